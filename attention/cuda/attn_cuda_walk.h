// attn_cuda_walk is how a CTA walks a share of a plan, piece by piece.  A piece is what of one KV
// head of one record falls to the share.  The same code runs on the device, in the loader's lanes,
// and in the unit tests, which hold the pieces of all shares against the launch.
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_WALK_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_WALK_H

#include "attention/cuda/attn_cuda_plan.h"

enum { ATTN_CUDA_MERGE_ALL = 1, ATTN_CUDA_MERGE_LATER = 2, ATTN_CUDA_MERGE_SECOND = 3 };

typedef struct attn_cuda_piece {
    int32_t kv_head; // -1 = none
    int32_t tile_first, num_tiles;
    int32_t part, num_parts; // num_parts > 1: its state goes to a slot
    int32_t is_last;         // of the CTA
    int32_t is_end;          // and no merge is left to do behind it
    // Slots of part 0 and of part 1, and from there on to the next.
    uint32_t slot_first, slot_second, slot_step;
    uint32_t slot_rows; // query rows of a slot
    // What becomes of a part: 0, its slot waits for another part to merge it; ATTN_CUDA_MERGE_ALL,
    // it merges all slots, its own too, or ATTN_CUDA_MERGE_LATER, does so when its CTA has nothing
    // else to do; ATTN_CUDA_MERGE_SECOND, it is the first of two and takes in the other's slot:
    // that one was computed first of all by its CTA, and this one last of all.
    int32_t merge;
} attn_cuda_piece;

typedef struct attn_cuda_walk {
    const attn_cuda_record *records;
    uint32_t num_records, share, is_parts, slot_rows; // of the head
    uint32_t cta, kv_heads;
    uint32_t record, kv_head, offset; // offset: positions into the head
    uint32_t position, left;          // on the line, and how many are still this CTA's
    bool owes;                        // a part is to be merged later
} attn_cuda_walk;

ATTN_CUDA_BOTH uint32_t attn_cuda_slot(const attn_cuda_piece *piece, int32_t part) {
    return part == 0 ? piece->slot_first
                     : piece->slot_second + (uint32_t)(part - 1) * piece->slot_step;
}

ATTN_CUDA_BOTH void attn_cuda_walk_init(attn_cuda_walk *w, const attn_cuda_head *head,
                                        uint32_t num_ctas, uint32_t cta, uint32_t kv_heads) {
    const attn_cuda_start *starts = (const attn_cuda_start *)(head + 1);
    w->records = attn_cuda_records_of(head, num_ctas);
    w->num_records = head->num_records;
    w->share = head->share;
    w->is_parts = head->is_parts;
    w->slot_rows = head->query_rows;
    w->cta = cta;
    w->kv_heads = kv_heads;
    w->record = starts[cta].record;
    w->kv_head = starts[cta].kv_head;
    w->offset = starts[cta].offset;
    w->position = cta * head->share;
    w->left = w->position >= head->total                ? 0
              : head->total - w->position < head->share ? head->total - w->position
                                                        : head->share;
    w->owes = false;
}

ATTN_CUDA_BOTH void attn_cuda_walk_advance(attn_cuda_walk *w, uint32_t positions, uint32_t length) {
    w->position += positions;
    w->left -= positions;
    w->offset += positions;
    if (w->offset == length) {
        w->offset = 0;
        if (++w->kv_head == w->kv_heads) {
            w->kv_head = 0;
            w->record++;
        }
    }
}

// attn_cuda_walk_leave says what is left of the CTA behind a piece.  is_shared: its head begins in
// another CTA, so others may still be at work on it.
ATTN_CUDA_BOTH void attn_cuda_walk_leave(attn_cuda_walk *w, attn_cuda_piece *piece,
                                         bool is_shared) {
    piece->is_last = w->left == 0;
    if (piece->merge == ATTN_CUDA_MERGE_ALL && is_shared && w->left > 0) {
        piece->merge = ATTN_CUDA_MERGE_LATER;
        w->owes = true;
    }
    piece->is_end = w->left == 0 && !w->owes;
}

// attn_cuda_walk_part is the next piece when positions are parts.
ATTN_CUDA_BOTH void attn_cuda_walk_part(attn_cuda_walk *w, const attn_cuda_record *r,
                                        attn_cuda_piece *piece) {
    int32_t first = r->part_origin + (int32_t)w->offset * r->part_tiles;
    int32_t end = first + r->part_tiles < r->tile_end ? first + r->part_tiles : r->tile_end;
    first = first > r->tile_first ? first : r->tile_first;
    piece->tile_first = first;
    piece->num_tiles = end > first ? end - first : 0;
    piece->part = (int32_t)w->offset;
    piece->num_parts = (int32_t)r->length;
    bool merges = piece->num_parts > 1 && piece->part == piece->num_parts - 1;
    piece->merge = merges ? ATTN_CUDA_MERGE_ALL : 0;
    piece->slot_first = r->slot_first + w->kv_head * r->length;
    piece->slot_second = piece->slot_first + 1;
    piece->slot_step = 1;
    const bool is_shared = w->position - w->offset < w->cta * w->share;
    attn_cuda_walk_advance(w, 1, r->length);
    attn_cuda_walk_leave(w, piece, is_shared);
}

// attn_cuda_walk_share is the next piece when positions are tiles: what is left of the head, as far
// as this CTA goes.  Returns false when that is only the head's overhead, so that the next CTA has
// all of its tiles.
ATTN_CUDA_BOTH bool attn_cuda_walk_share(attn_cuda_walk *w, const attn_cuda_record *r,
                                         attn_cuda_piece *piece) {
    int32_t tiles = r->tile_end - r->tile_first;
    uint32_t take = r->length - w->offset < w->left ? r->length - w->offset : w->left;
    uint32_t overhead = r->length - (uint32_t)tiles;
    int32_t first = (int32_t)w->offset - (int32_t)overhead;
    int32_t end = first + (int32_t)take;
    uint32_t head_start = w->position - w->offset;
    first = first > 0 ? first : 0;
    attn_cuda_walk_advance(w, take, r->length);
    if (end < 0 || (end == 0 && tiles > 0)) {
        return false;
    }
    piece->tile_first = r->tile_first + first;
    piece->num_tiles = end - first;
    piece->part = 0;
    piece->num_parts = 1;
    piece->merge = 0;
    if (end - first < tiles) {
        uint32_t cta_first = (head_start + overhead) / w->share;
        uint32_t cta_last = (head_start + r->length - 1) / w->share;
        piece->part = (int32_t)(w->cta - cta_first);
        piece->num_parts = (int32_t)(cta_last - cta_first) + 1;
        if (piece->num_parts == 2) {
            piece->merge = piece->part == 0 ? ATTN_CUDA_MERGE_SECOND : 0;
        } else {
            piece->merge = piece->part == piece->num_parts - 1 ? ATTN_CUDA_MERGE_ALL : 0;
        }
        // A CTA leaves at most two parts: the end of one head, and the start of another.
        piece->slot_first = 2 * cta_first + 1;
        piece->slot_second = 2 * (cta_first + 1);
        piece->slot_step = 2;
    }
    attn_cuda_walk_leave(w, piece, head_start < w->cta * w->share);
    return true;
}

// attn_cuda_walk_next returns the record of the next piece, NULL after the last.
ATTN_CUDA_BOTH const attn_cuda_record *attn_cuda_walk_next(attn_cuda_walk *w,
                                                           attn_cuda_piece *piece) {
    piece->slot_rows = w->slot_rows;
    while (w->left > 0 && w->record < w->num_records) {
        const attn_cuda_record *r = &w->records[w->record];
        piece->kv_head = (int32_t)w->kv_head;
        if (w->is_parts) {
            attn_cuda_walk_part(w, r, piece);
            return r;
        }
        if (attn_cuda_walk_share(w, r, piece)) {
            return r;
        }
    }
    piece->kv_head = -1;
    return (const attn_cuda_record *)0;
}

#endif
