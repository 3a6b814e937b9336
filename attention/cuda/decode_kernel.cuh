// decode_kernel is paged split-KV decode: q_len up to 8 or so, any GQA ratio, appended tokens and
// RoPE included, one launch.  README.md has the picture and the counts.
//
// Grid: one CTA an SM, always; what each computes stands in the plan (attn_cuda_plan.h).  The first
// warps are the consumers; what each one behind them does, decode_role says (decode_load.cuh,
// decode_aside.cuh).
//
// Where the code lies matters.  Between two launches of a model step its weights go through the L2,
// so a launch fetches its code from memory: what lies in the first 64 KiB is there when it is
// needed, what lies behind is waited for, some 700 cycles a KiB.  So branches are written such that
// the compiler puts the loader first, then merging, then the form for 8 query rows; the one for
// more comes last.  (cuobjdump -sass shows it.)
#ifndef ATTND_ATTENTION_CUDA_DECODE_KERNEL_CUH
#define ATTND_ATTENTION_CUDA_DECODE_KERNEL_CUH

#include "attention/cuda/decode_aside.cuh"
#include "attention/cuda/decode_load.cuh"
#include "attention/cuda/decode_math.cuh"
#include "attention/cuda/decode_merge.cuh"
#include "attention/cuda/decode_rope.cuh"

// decode_consume computes an item with kNt * 8 query rows a warp.  The item has landed.  is_first:
// it is the CTA's first.
template <typename Traits, int kNt>
__device__ void decode_consume(typename Traits::smem &s, const decode_item &item,
                               unsigned char *s_queries, const decode_args &args, bool is_first) {
    // Roles.  Up to 8 * kNt query rows, the warps share out the tiles of a stage; with more, some
    // of them hold different sets of query rows and read the same tiles.
    const attn_cuda_record &r = item.record;
    const int thread = ptx::thread(), lane = thread % 32, warp = thread / 32;
    const int num_rows = r.tokens * r.heads;
    const int sets_log2 = decode_sets_log2<kNt>(num_rows);
    const decode_lane at(lane);

    // Queries.  Up to 8 rows have been rotated aside, but for the first.
    if (r.inv_freq && num_rows > 0 && (is_first || kNt > 1 || !Traits::kHasAside)) {
        decode_rotate_queries<Traits, false>(r, s_queries, thread);
        ptx::bar_sync(BAR_CONSUMERS, Traits::kConsumers);
    }
    decode_rows<Traits, kNt> rows;
    rows.begin(r, ptx::s_addr(s_queries), (warp & ((1 << sets_log2) - 1)) * 8 * kNt, at);

    // Stages, the newest keys first.  New keys are rotated by the warp that reads them; by all when
    // several warps read them, and in the first item, where all wait for them.  Every warp passes
    // all of them, so that a stage is free when all have; it computes each tile whose number,
    // modulo how many warps share the query rows, is its own.
    const int32_t first_key = item.piece.tile_first * Traits::kTile;
    const int32_t end_key = min(first_key + item.piece.num_tiles * Traits::kTile, r.kv_len);
    int32_t key = (end_key - 1) & ~(Traits::kStageTokens - 1);
    decode_ring ring = s.rings[warp];
    for (;; key -= Traits::kStageTokens) {
        const int32_t first = max(key, first_key), end = min(key + Traits::kStageTokens, end_key);
        auto &stage = s.stages[ring.index()];
        ring.wait_full(s.full);
        const int32_t first_new = max(first, r.kv_len - r.new_len);
        if ((is_first || kNt > 1) && first_new < end) {
            decode_append<Traits, false>(item, args, stage.k, stage.v, key, first_new, end,
                                         ptx::thread());
        }
        const int sharing = Traits::kWarps >> sets_log2;
        int n = ((ptx::thread() / 32 >> sets_log2) - key / Traits::kTile) & (sharing - 1);
#pragma unroll 1
        for (; n < Traits::kStageTiles; n += sharing) {
            const int32_t tile_key = key + n * Traits::kTile;
            if (tile_key < first || tile_key >= end) {
                continue;
            }
            if (!is_first && kNt == 1 && first_new < min(tile_key + Traits::kTile, end)) {
                decode_append<Traits, true>(item, args, stage.k, stage.v, key,
                                            max(tile_key, first_new),
                                            min(tile_key + Traits::kTile, end), lane);
            }
            if (num_rows > 0 && decode_is_listed<Traits>(s, args, ring, n)) {
                const uint32_t offset = (uint32_t)(n * Traits::kTile * Traits::kRowBytes);
                rows.tile(item, args, ptx::s_addr(stage.k) + offset, ptx::s_addr(stage.v) + offset,
                          tile_key, at);
            }
        }
        if (key <= first_key) {
            break;
        }
        decode_release(s.empty, ring);
        ring.advance(Traits::kStages);
    }

    // Epilogue, in the last stage, or aside.
    if (kNt == 1 && decode_is_aside<Traits>(item)) {
        decode_merge<Traits>(s, args, item).leave(rows);
    } else if (num_rows > 0) {
        auto &stage = s.stages[ring.index()];
        decode_merge<Traits>(s, args, item).finish(rows, ptx::s_addr(stage.k));
        decode_fence<Traits>();
    }
    decode_release(s.empty, ring);
    ring.advance(Traits::kStages);
    s.rings[ptx::thread() / 32] = ring;
}

// decode_take computes the next item.  Where a warp stands among items and stages it looks up each
// time: registers are short in between.
template <typename Traits>
__device__ void decode_take(typename Traits::smem &s, const decode_args &args, bool is_first) {
    const decode_ring items = s.item_rings[ptx::thread() / 32];
    items.wait_full(s.item_full);
    const decode_item &item = s.items[items.index()];
    unsigned char *s_queries =
        s.queries + decode_place<Traits>(items.index(), item.piece.slot_rows);
    if (item.piece.kv_head < 0) {
        ptx::bar_sync(BAR_CONSUMERS, Traits::kConsumers); // shared_item written
    } else if (item.piece.num_tiles == 0) {
        decode_merge<Traits>(s, args, item).write_empty();
    } else if (item.record.tokens * item.record.heads > 8) {
        decode_consume<Traits, 2>(s, item, s_queries, args, is_first);
    } else {
        decode_consume<Traits, 1>(s, item, s_queries, args, is_first);
    }
}

// decode_leave hands the item back; false when nothing is left to do.  The last part of a head
// merges all of them: at once when they are all this CTA's, else behind the CTA's last item.
template <typename Traits>
__device__ bool decode_leave(typename Traits::smem &s, const decode_args &args) {
    const int thread = ptx::thread();
    decode_ring &place = s.item_rings[thread / 32];
    const decode_item &done = s.items[place.index()];
    const bool is_end = done.piece.kv_head < 0;
    const decode_item &last = is_end ? s.shared_item : done;
    if (last.piece.merge == ATTN_CUDA_MERGE_ALL ||
        (is_end && last.piece.merge == ATTN_CUDA_MERGE_LATER)) {
        decode_merge<Traits>(s, args, last).merge_parts();
    } else if (last.piece.merge == ATTN_CUDA_MERGE_LATER &&
               thread < (int)sizeof(decode_item) / 16) {
        ((uint4 *)&s.shared_item)[thread] = ((const uint4 *)&done)[thread];
    }
    if (is_end || last.piece.is_end) {
        return false;
    }
    const uint32_t num_items = decode_num_items(done.piece.slot_rows);
    decode_release(s.item_empty, place);
    if (thread % 32 == 0) {
        place.advance(num_items);
    }
    __syncwarp();
    return true;
}

// decode_init makes the barriers, each by a lane of one warp.
template <typename Traits>
__device__ void decode_init(typename Traits::smem &s) {
    const int lane = ptx::thread() % 32;
    if (lane < Traits::kStages) {
        ptx::mbar_init(ptx::s_addr(&s.full[lane]), Traits::kFullArrivals);
        ptx::mbar_init(ptx::s_addr(&s.empty[lane]), Traits::kWarps);
    }
    if (lane < Traits::kItems) {
        ptx::mbar_init(ptx::s_addr(&s.item_loaded[lane]), Traits::kItemArrivals);
        ptx::mbar_init(ptx::s_addr(&s.item_full[lane]),
                       Traits::kHasAside ? 1 : Traits::kItemArrivals);
        ptx::mbar_init(ptx::s_addr(&s.item_empty[lane]), Traits::kWarps + Traits::kHasAside);
    }
    if (lane < Traits::kWarps) {
        s.rings[lane] = s.item_rings[lane] = s.aside_rings[lane] = decode_ring();
    }
    if (lane == 0) {
        ptx::mbar_init(ptx::s_addr(&s.aside_full), Traits::kWarps);
        ptx::mbar_init(ptx::s_addr(&s.aside_empty), 1);
        s.shared_item.piece.merge = 0;
    }
    if constexpr (Traits::kIsBulk) {
        ptx::fence_mbar_init();
    }
    __syncwarp();
}

template <int kHeadDim, typename T, bool kBulk>
__global__ void __launch_bounds__(decode_traits<kHeadDim, T, kBulk>::kThreads, 1)
    decode_kernel(const __grid_constant__ decode_args args) {
    using Traits = decode_traits<kHeadDim, T, kBulk>;
    extern __shared__ __align__(128) unsigned char s_memory[];
    typename Traits::smem &s = *(typename Traits::smem *)s_memory;

    if constexpr (kBulk) {
        ptx::grid_launch_next();
    }

    // Consumers.  Merging comes before taking, so that it lies before the wide form (top of file).
    if (threadIdx.x < Traits::kConsumers) {
        if (threadIdx.x < 32) {
            decode_init<Traits>(s);
        }
        decode_begin<Traits>();
        for (uint32_t has_item = 0;; has_item = 1) {
            asm volatile("" : "+r"(has_item)); // else the compiler turns the loop about
            if (has_item && !decode_leave<Traits>(s, args)) {
                return;
            }
            decode_take<Traits>(s, args, !has_item);
        }
    }

    // The loading warps are one text, so that its code is fetched once.
    const int role = ptx::thread() / 32 - Traits::kWarps;
    if (role == DECODE_ROTATES) {
        decode_rotate_aside<Traits>(s);
        return;
    }
    if (role == DECODE_AHEAD) {
        decode_keep_plan<Traits>(args);
    }
    decode_loader<Traits>(s, args).run(role);
    if (role == DECODE_AHEAD) {
        decode_merge_aside<Traits>(s, args);
    }
}

#endif
