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
// hands all on.  It has time to say when what came before this launch has ended: until then, and
// only then, prefetching gains.
template <typename Traits>
__device__ void decode_rotate_aside(typename Traits::smem &s) {
    ptx::s_put(&s.has_begun, 0);
    decode_grid_wait<Traits>();
    ptx::s_put(&s.has_begun, 1);
    ptx::bar_sync(BAR_ASIDE, 64); // barriers are there
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

// decode_keep_plan brings the plan to L2, a share by each CTA, and has it kept there: the launches
// of a model's other layers may read the same one, and what they come after sweeps the L2.
template <typename Traits>
__device__ void decode_keep_plan(const decode_args &args) {
    if constexpr (Traits::kIsBulk) {
        const uint32_t share = (args.plan_bytes / gridDim.x + 16) & ~15u;
        const uint32_t first = blockIdx.x * share;
        if (threadIdx.x % 32 == 0 && first < args.plan_bytes) {
            ptx::bulk_prefetch((const char *)args.plan + first, min(share, args.plan_bytes - first),
                               ptx::policy_evict_last());
        }
    }
}

// decode_merge_aside merges what the consumers leave of an item, and hands back its place.
template <typename Traits>
__device__ void decode_merge_aside(typename Traits::smem &s, const decode_args &args) {
    ptx::bar_arrive(BAR_ASIDE, 64);
    for (decode_ring items, states;;) {
        items.wait_full(s.item_full);
        const decode_item &item = s.items[items.index()];
        if (item.piece.kv_head < 0) {
            decode_keep_plan<Traits>(args);
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
