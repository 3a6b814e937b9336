// attn_cuda_plan cuts a launch for the decode kernel: what the host writes and the device reads.
//
// Work is a line of positions.  A *record* is up to 64 query rows of one row of the launch (all of
// it, for decode), over the keys that any of them sees; it takes `length` positions for each KV
// head, head after head, record after record.  What a position is depends on the mode:
//     balanced  the last tile_end - tile_first positions of a head are one tile of 16 keys each,
//     those
//               before are the overhead of starting it.  A head may be cut between any two tiles.
//     parts     a position is one part of a head, `part_tiles` tiles.  Deterministic mode, forced
//               splits, and launches so small that every CTA gets one part.
// CTA c walks positions [c * share, (c + 1) * share).
//
// A head that lies in one piece is written to `out` at once.  Else each piece leaves its state
// (sums, maximum, denominator of each query row) in a slot of the workspace, and the CTA that has
// the head's last part merges all of them in ascending order.  It waits for CTAs below it, when its
// own work is done, so waiting costs nothing and cannot lock up: CTAs start in ascending order.
// Of a balanced head in two parts, the first takes in the second as it ends: its CTA ends with it,
// and the next CTA began with the other, so it is there already, unless that CTA has not started.
// That one needs nobody for its first part, so two CTAs at a time are enough.
//
// A record of a row with a block mask has tokens of one query block, and a *mask* behind the
// records that says where that block's list lies: lists are device memory, so the keys of a record
// are counted as if all of them were seen, and the kernel passes over those that are not.
//
// Pure host C, no allocation.  Any thread, one plan by one thread at a time.
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_PLAN_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_PLAN_H

#include <stdbool.h>

#include "attention/attn.h"
#include "attention/cuda/attn_cuda.h"
#include "attention/cuda/attn_prefill.h"

#ifdef __CUDACC__
#define ATTN_CUDA_BOTH static __device__ __forceinline__
#else
#define ATTN_CUDA_BOTH static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    ATTN_CUDA_QUERY_ROWS = 64,  // the most query rows of a record
    ATTN_CUDA_TILE_TOKENS = 16, // keys a tile; blocks are multiples of it
    ATTN_CUDA_TREE_TOKENS = 32, // the longest q_len with a tree mask that the bulk kernel takes
};

enum {
    ATTN_CUDA_APPENDS = 1u << 8,     // this record writes the row's new tokens to the pool
    ATTN_CUDA_INTERLEAVED = 1u << 9, // RoPE pairs
    ATTN_CUDA_REREAD = 1u << 10,     // other records of the launch read the same keys
};

// attn_cuda_record is what the device knows of up to 64 query rows.  Query row r is token r / heads
// (counted from the record's first), head head_first + r % heads of the KV head's group.  Pointers
// point at the record's first token.
typedef struct attn_cuda_record {
    const char *q; // [tokens, q_heads, head_dim]
    void *out;     // [tokens, q_heads, head_dim]
    float *lse;    // [q_heads, tokens], may be NULL
    const char *k_new, *v_new;
    const uint32_t *table;
    char *k, *v; // of block 0
    const float *sinks, *alibi_slopes;
    const float *inv_freq; // NULL = no RoPE
    const int32_t *q_positions, *k_positions;
    const uint64_t *tree_mask;           // [tokens, ceil(q_len / 64)], q_len = kv_len - tree_first
    int64_t q_token_bytes, q_head_bytes; // strides
    int64_t out_token, out_head, lse_head;       // strides, elements
    int64_t k_new_token_bytes, k_new_head_bytes; // strides
    int64_t v_new_token_bytes, v_new_head_bytes; // strides
    int32_t kv_len, new_len;
    int32_t position;          // of the record's first token: key that it is aligned to
    int32_t tokens;            // 0 = only appends
    int32_t head_first, heads; // of the group
    uint32_t heads_inverse;    // row / heads = row * heads_inverse >> 16
    uint32_t flags;            // ATTN_CAUSAL ..., ATTN_CUDA_APPENDS ...
    // Causal and window let token i see keys from max(0, seen_first + i) to before min(kv_len,
    // seen_end + i).
    int32_t seen_first, seen_end;
    int32_t tree_first;              // first key that the tree mask rules
    int32_t full_first, full_end;    // keys that every query row sees, without bias
    int32_t tile_first, tile_end;    // tiles to read
    int32_t part_origin, part_tiles; // parts: part i is tiles origin + [i, i + 1) * part_tiles
    uint32_t line_first;             // position of its KV head 0
    uint32_t length;                 // positions a KV head
    uint32_t slot_first;             // parts: of KV head 0
    int32_t rotary_dim;
    float attention_factor;
    float scale_log2;          // scale * log2(e)
    float cap_log2, cap_scale; // softcap * log2(e), scale / softcap; 0 = off
    uint32_t mask;             // 1 + index of its attn_cuda_mask, 0 = no block mask
} attn_cuda_record;

// attn_cuda_mask is the list of KV blocks that the query rows of a record see.
typedef struct attn_cuda_mask {
    const uint32_t *start;     // [2], offsets into kv_blocks: of the list and behind it
    const uint32_t *kv_blocks; // of all query blocks of the row
} attn_cuda_mask;

// attn_cuda_start is where a CTA begins.
typedef struct attn_cuda_start {
    uint32_t record, kv_head, offset; // offset: positions into the head
    uint32_t reserved;
} attn_cuda_start;

// attn_cuda_head begins a plan; [num_ctas] starts, [num_records] records and [num_masks] masks
// follow it.
typedef struct attn_cuda_head {
    uint32_t num_records;
    uint32_t total, share; // positions of the line, and of a CTA
    uint32_t is_parts;
    uint32_t query_rows; // of the largest record: a slot is [query_rows, head_dim + 4] floats
    uint32_t num_left;   // rows that are prefilled
    uint32_t num_masks;
    uint32_t is_masked; // there are masks that only the portable kernel takes
} attn_cuda_head;

// attn_cuda_limits is what a plan has to know of the engine.
typedef struct attn_cuda_limits {
    uint32_t num_ctas;
    uint32_t max_records;
    uint64_t slot_floats; // of the workspace
    uint32_t min_part_tiles;
    attn_cuda_masks masks;
    attn_prefill_limits prefill; // least_rows 0: all rows are decoded
} attn_cuda_limits;

static inline attn_cuda_start *attn_cuda_starts(attn_cuda_head *head) {
    return (attn_cuda_start *)(head + 1);
}

static inline attn_cuda_record *attn_cuda_records(attn_cuda_head *head, uint32_t num_ctas) {
    return (attn_cuda_record *)(attn_cuda_starts(head) + num_ctas);
}

// attn_cuda_records_of and attn_cuda_masks_of return where the records and the masks of a finished
// plan lie.  The device's code too.
ATTN_CUDA_BOTH const attn_cuda_record *attn_cuda_records_of(const attn_cuda_head *head,
                                                            uint32_t num_ctas) {
    return (const attn_cuda_record *)((const attn_cuda_start *)(head + 1) + num_ctas);
}

ATTN_CUDA_BOTH const attn_cuda_mask *attn_cuda_masks_of(const attn_cuda_head *head,
                                                        uint32_t num_ctas) {
    return (const attn_cuda_mask *)(attn_cuda_records_of(head, num_ctas) + head->num_records);
}

// attn_cuda_plan_bytes returns the size of a plan.
static inline uint64_t attn_cuda_plan_bytes(uint32_t num_ctas, uint32_t num_records,
                                            uint32_t num_masks) {
    return sizeof(attn_cuda_head) + (uint64_t)num_ctas * sizeof(attn_cuda_start) +
           (uint64_t)num_records * sizeof(attn_cuda_record) +
           (uint64_t)num_masks * sizeof(attn_cuda_mask);
}

// attn_cuda_check_shape says whether the kernel takes a shape.  ATTND_EINVAL, ATTND_ENOTSUP.
attnd_err attn_cuda_check_shape(const attn_shape *shape, attnd_errinfo *info);

// attn_cuda_check_row checks what does not depend on where things lie: lengths, flags, mask, which
// arrays there are.  i is the row's number, for the text.  ATTND_EINVAL, ATTND_ENOTSUP.
attnd_err attn_cuda_check_row(const attn_params *p, const attn_row *row, attn_cuda_masks masks,
                              uint32_t i, attnd_errinfo *info);

// attn_cuda_row_records returns how many records a row that was checked takes when it is decoded,
// each up to 64 query rows of one query block; one when only prefill can take it.
uint64_t attn_cuda_row_records(const attn_shape *shape, const attn_row *row, attn_cuda_masks masks);

// attn_cuda_plan_make checks all rows and writes the plan of those that the prefill kernel does not
// take to *head, which has room for max_records records behind the starts, aligned to 16, and, with
// ATTN_CUDA_MASKS_DECODE, for as many masks.  Errors: see attn_cuda_plan_set.
attnd_err attn_cuda_plan_make(attn_cuda_head *head, const attn_params *p,
                              const attn_cuda_limits *limits, attn_choice *choice,
                              attnd_errinfo *info);

#ifdef __cplusplus
}
#endif

#endif
