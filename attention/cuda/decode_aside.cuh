// decode_aside has the warps that work beside the consumers, so that these pass from one item to
// the next without waiting for one another.  One rotates the queries of items that have been
// loaded; one merges the states that the consumers leave as they end an item.  Both take items of
// few query rows only, and neither what nothing runs beside: the queries of the CTA's first item
// and the states of its last one.  All consumers together are quicker.
//
//     loader --item_loaded--> rotating --item_full--> consumers --aside_full--> merging
//        ^                                                |      <--aside_empty--   |
//        +----------------------item_empty----------------+-------------------------+
#ifndef ATTND_ATTENTION_CUDA_DECODE_ASIDE_CUH
#define ATTND_ATTENTION_CUDA_DECODE_ASIDE_CUH

#include "attention/cuda/decode_merge.cuh"
#include "attention/cuda/decode_rope.cuh"

// decode_rotate_aside rotates the queries of each item of up to 8 query rows but the first, and
// hands all on.
template <typename Traits>
__device__ void decode_rotate_aside(typename Traits::smem &s) {
    decode_grid_wait<Traits>();
    bool is_first = true;
    for (decode_ring items;;) {
        items.wait_full(s.item_loaded);
        const decode_item &item = s.items[items.index()];
        const uint32_t slot_rows = item.piece.slot_rows;
        const bool is_end = item.piece.kv_head < 0;
        if (!is_first && !is_end && item.piece.num_tiles > 0 && item.record.inv_freq &&
            item.record.tokens * item.record.heads <= 8) {
            decode_rotate_queries<Traits, true>(
                item.record, s.queries + decode_place<Traits>(items.index(), slot_rows),
                (int)threadIdx.x % 32);
        }
        is_first = false;
        decode_release(s.item_full, items);
        if (is_end) {
            return;
        }
        items.advance(decode_num_items(slot_rows));
    }
}

// decode_merge_aside merges what the consumers leave of an item, and hands back its place.
template <typename Traits>
__device__ void decode_merge_aside(typename Traits::smem &s, const decode_args &args) {
    decode_grid_wait<Traits>();
    for (decode_ring items, states;;) {
        items.wait_full(s.item_full);
        const decode_item &item = s.items[items.index()];
        if (item.piece.kv_head < 0) {
            return;
        }
        if (decode_is_aside<Traits>(item)) {
            states.wait_full(&s.aside_full);
            decode_merge<Traits>(s, args, item, (int)threadIdx.x % 32).merge_left();
            decode_release(&s.aside_empty, states);
            states.advance(1);
        }
        const uint32_t num_items = decode_num_items(item.piece.slot_rows);
        decode_release(s.item_empty, items);
        items.advance(num_items);
    }
}

#endif
