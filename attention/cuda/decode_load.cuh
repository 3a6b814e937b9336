// decode_load has the warps that walk the CTA's share of the plan and fill the buffers, item after
// item: one loads the record and the queries, one K and V of the tiles, in stages.  They run ahead
// of the consumers as far as the buffers go, across items.
//
// A launch may begin while the one before it ends.  Until that is over, they read what no kernel
// writes, the plan and the block tables, and a third warp prefetches; everything else waits.
//
// In a model step plan, tables and code come from memory (decode_kernel.cuh), so the way to the
// first keys is kept short: nothing is done on it that another warp can do.
//
// A stage holds keys [n, n + 1) * kStageTokens of the sequence, as far as the piece goes.  The
// newest keys come first: rotating and writing appended tokens hides behind the loads that follow.
// A lane stands for one run, the tokens of a block that fall into one stage: the block table of 32
// runs is read by one load, a batch ahead, and the runs of a stage are copied by as many lanes at
// once.
#ifndef ATTND_ATTENTION_CUDA_DECODE_LOAD_CUH
#define ATTND_ATTENTION_CUDA_DECODE_LOAD_CUH

#include "attention/cuda/decode_traits.cuh"

// The warps behind the consumers: what they do.
enum decode_role { DECODE_KEYS, DECODE_ITEMS, DECODE_AHEAD, DECODE_ROTATES };

template <typename Traits>
struct decode_loader {
    typename Traits::smem &s;
    const decode_args &args;
    const int lane;
    const uint64_t once, kept; // L2 policies
    decode_ring ring, items;
    // The stage that must have landed before another is asked for: at first, any has.
    decode_ring late{0x100 | (Traits::kStages - Traits::kOnTheWay)};

    __device__ decode_loader(typename Traits::smem &smem, const decode_args &a)
        : s(smem), args(a), lane((int)threadIdx.x % 32), once(ptx::policy_evict_first()),
          kept(ptx::policy_evict_last()) {}

    // copy copies bytes of each lane (0 = none), and reports them to s_bar.
    __device__ void copy(uint32_t s_dst, const void *g_src, uint32_t bytes, uint32_t s_bar,
                         bool is_once = false) {
        if constexpr (Traits::kIsBulk) {
            if (bytes > 0 && is_once) {
                ptx::bulk_copy_once(s_dst, g_src, bytes, s_bar, once);
            } else if (bytes > 0) {
                ptx::bulk_copy(s_dst, g_src, bytes, s_bar);
            }
        } else {
            for (uint32_t todo = __ballot_sync(~0u, bytes > 0); todo != 0; todo &= todo - 1) {
                int from = __ffs((int)todo) - 1;
                uint32_t dst = __shfl_sync(~0u, s_dst, from);
                const char *src = (const char *)__shfl_sync(~0u, (unsigned long long)g_src, from);
                uint32_t end = __shfl_sync(~0u, bytes, from);
                for (uint32_t i = (uint32_t)lane * 16; i < end; i += 32 * 16) {
                    ptx::cp_async_16(dst + i, src + i);
                }
            }
        }
    }

    // commit ends a buffer that waits for bytes of bulk copies, and for cp_async_16 if there are.
    __device__ void commit(uint32_t bytes, uint32_t s_bar, bool has_pieces = !Traits::kIsBulk) {
        if (has_pieces) {
            ptx::cp_async_arrive(s_bar);
        }
        __syncwarp();
        if (lane == 0) {
            if constexpr (Traits::kIsBulk) {
                ptx::mbar_arrive_expect(s_bar, bytes);
            } else {
                ptx::mbar_arrive(s_bar);
            }
        }
    }

    // copy_queries copies query rows in 16-byte pieces, side by side: the bulk copies of a warp's
    // lanes are issued one after the other.
    __device__ void copy_queries(const attn_cuda_piece &piece, const attn_cuda_record &r,
                                 uint32_t s_queries) {
        constexpr int kPieces = Traits::kRowBytes / 16;
        const int heads = r.heads, pieces = r.tokens * heads * kPieces;
        const uint32_t heads_inverse = r.heads_inverse;
        const int64_t token_bytes = r.q_token_bytes, head_bytes = r.q_head_bytes;
        const char *q =
            r.q + args.shift.q + (piece.kv_head * args.group + r.head_first) * head_bytes;
#pragma unroll 1
        for (int i = lane; i < pieces; i += 32) {
            const int row = i / kPieces, byte = i % kPieces * 16;
            const int token = (int)((uint32_t)row * heads_inverse >> 16);
            ptx::cp_async_16(s_queries + decode_query_at<Traits>(row, byte),
                             q + token * token_bytes + (row - token * heads) * head_bytes + byte);
        }
    }

    // load_item hands over a piece, its record and its queries.  r is NULL at the end.
    __device__ void load_item(const attn_cuda_piece &piece, const attn_cuda_record *r) {
        const uint32_t index = items.index();
        const uint32_t s_bar =
            ptx::s_addr(&(Traits::kHasAside ? s.item_loaded : s.item_full)[index]);
        items.wait_empty(s.item_empty);
        decode_item *s_item = &s.items[index];
        if (lane == 0) {
            s_item->piece = piece;
        }
        if (r) {
            copy(ptx::s_addr(&s_item->record), r, lane == 0 ? sizeof(*r) : 0, s_bar);
            if (piece.num_tiles > 0) {
                copy_queries(piece, *r,
                             ptx::s_addr(s.queries) + decode_place<Traits>(index, piece.slot_rows));
            }
        }
        commit(r ? sizeof(*r) : 0, s_bar, true);
        items.advance(decode_num_items(piece.slot_rows));
    }

    // copy_new copies new tokens [first, end) of a sequence, which are not in the pool yet.
    __device__ void copy_new(uint32_t s_stage, int32_t stage_key, int32_t first, int32_t end,
                             const char *g_new, int64_t token_bytes, int32_t old_len,
                             uint32_t s_bar) {
#pragma unroll 1
        for (int32_t key = first + lane; key - lane < end; key += 32) {
            copy(s_stage + (uint32_t)(key - stage_key) * Traits::kRowBytes,
                 g_new + (key - old_len) * token_bytes, key < end ? Traits::kRowBytes : 0, s_bar);
        }
    }

    // source is what of a piece's record its tiles are loaded by.
    struct source {
        const uint32_t *table;
        const char *k, *v, *k_new, *v_new;
        int64_t k_new_bytes, v_new_bytes; // a token
        int32_t first_key, end_key, old_len;
        bool is_once;
        // Portable: the list of the block mask, NULL = none.
        const uint32_t *list;
        uint32_t list_num;

        __device__ source(const attn_cuda_piece &piece, const attn_cuda_record &r,
                          const decode_args &args) {
            table = r.table;
            k = r.k + args.shift.k + piece.kv_head * args.k_head_bytes;
            v = r.v + args.shift.v + piece.kv_head * args.v_head_bytes;
            k_new = r.k_new + args.shift.k_new + piece.kv_head * r.k_new_head_bytes;
            v_new = r.v_new + args.shift.v_new + piece.kv_head * r.v_new_head_bytes;
            k_new_bytes = r.k_new_token_bytes;
            v_new_bytes = r.v_new_token_bytes;
            first_key = piece.tile_first * Traits::kTile;
            end_key = min((piece.tile_first + piece.num_tiles) * Traits::kTile, r.kv_len);
            old_len = r.kv_len - r.new_len;
            is_once = !(r.flags & ATTN_CUDA_REREAD);
            if constexpr (!Traits::kIsBulk) {
                set_list(r, args);
            }
        }

        __device__ void set_list(const attn_cuda_record &r, const decode_args &args) {
            list = nullptr;
            if (r.mask > 0) {
                const attn_cuda_mask &mask = attn_cuda_masks_of(args.plan, gridDim.x)[r.mask - 1];
                const uint32_t first = __ldg(mask.start);
                list = mask.kv_blocks + first;
                list_num = __ldg(mask.start + 1) - first;
            }
        }
    };

    // is_listed is whether the block mask lets the piece see a run's block.
    __device__ bool is_listed(const source &from, int32_t run) const {
        if (!from.list) {
            return true;
        }
        const uint32_t block = (uint32_t)run / (uint32_t)args.block_tokens;
        uint32_t low = 0; // listed blocks from here on are not before it
        for (uint32_t high = from.list_num; low < high;) {
            const uint32_t middle = (low + high) / 2;
            if (__ldg(from.list + middle) < block) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return run >= 0 && low < from.list_num && __ldg(from.list + low) == block;
    }

    __device__ uint32_t entry_of(const source &from, int32_t run) const {
        const bool is_read = run + (1 << args.run_tokens_log2) > from.first_key &&
                             run < min(from.end_key, from.old_len);
        return !is_read ? 0
               : args.block_tokens_log2 >= 0
                   ? ptx::g_load_kept(from.table + (run >> args.block_tokens_log2), kept)
                   : ptx::g_load_kept(from.table + run / args.block_tokens, kept);
    }

    // run_place is what of a lane's run is read, from the pool.
    struct run_place {
        int32_t first; // key
        uint32_t bytes;
        int64_t offset; // from the head's K or V in block 0
    };

    __device__ run_place place_of(const source &from, int32_t run_key, uint32_t entry) const {
        const uint32_t block_tokens = (uint32_t)args.block_tokens;
        const int32_t first = max(run_key, from.first_key);
        const int32_t end =
            min(run_key + (1 << args.run_tokens_log2), min(from.end_key, from.old_len));
        const uint32_t in_block = args.block_tokens_log2 >= 0 ? (uint32_t)first & (block_tokens - 1)
                                                              : (uint32_t)first % block_tokens;
        return {first, (uint32_t)max(end - first, 0) * Traits::kRowBytes,
                (int64_t)(entry * args.block_stride + in_block * Traits::kRowBytes)};
    }

    // first_run is the first key of the lane's run among those of the last stages of a piece, which
    // come first.
    __device__ int32_t first_run(const source &from) const {
        const int runs_log2 = Traits::kStageTokensLog2 - args.run_tokens_log2;
        return ((from.end_key - 1) & ~(Traits::kStageTokens - 1)) -
               (lane >> runs_log2) * Traits::kStageTokens +
               ((lane & ((1 << runs_log2) - 1)) << args.run_tokens_log2);
    }

    // prefetch brings what will fill the first stages to L2, while the launch before this one still
    // runs.  Whatever that one writes there afterwards is seen all the same: L2 is one for all SMs.
    __device__ void prefetch(const source &from, int32_t run_key, uint32_t entry) const {
        const int runs_log2 = Traits::kStageTokensLog2 - args.run_tokens_log2;
        const run_place run = place_of(from, run_key, entry);
        if (run.bytes > 0 && lane >> runs_log2 < Traits::kEarlyStages) {
            ptx::bulk_prefetch(from.k + run.offset, run.bytes, once);
            ptx::bulk_prefetch(from.v + run.offset, run.bytes, once);
        }
    }

    // load_tiles fills a stage for each kStageTokens keys, the newest first.  run_key is the lane's
    // first_run, next_entry its block.  Of a run that no query sees nothing is copied but new
    // tokens, since they may have to be appended.
    __device__ void load_tiles(const source &from, int32_t run_key, uint32_t next_entry) {
        const int runs_log2 = Traits::kStageTokensLog2 - args.run_tokens_log2; // of a stage
        int32_t key = (from.end_key - 1) & ~(Traits::kStageTokens - 1);        // of the stage
        while (key + Traits::kStageTokens > from.first_key) {
            run_place run = place_of(from, run_key, next_entry);
            const uint32_t at =
                (uint32_t)(run.first & (Traits::kStageTokens - 1)) * Traits::kRowBytes;
            uint32_t listed = ~0u; // a bit a lane
            if constexpr (!Traits::kIsBulk) {
                const bool is_mine = is_listed(from, run_key);
                run.bytes = is_mine ? run.bytes : 0;
                listed = __ballot_sync(~0u, is_mine);
            }
            run_key -= 32 << args.run_tokens_log2;
            next_entry = entry_of(from, run_key);
#pragma unroll 1
            for (int i = 0; i < 32 >> runs_log2 && key + Traits::kStageTokens > from.first_key;
                 i++) {
                const int32_t first = max(key, from.first_key);
                const int32_t end = min(key + Traits::kStageTokens, from.end_key);
                const uint32_t my_bytes = lane >> runs_log2 == i ? run.bytes : 0;
                const uint32_t s_bar = ptx::s_addr(&s.full[ring.index()]);
                const uint32_t s_k = ptx::s_addr(s.stages[ring.index()].k);
                const uint32_t s_v = ptx::s_addr(s.stages[ring.index()].v);
                ring.wait_empty(s.empty);
                late.wait_full(s.full);
                late.advance(Traits::kStages);
                if constexpr (!Traits::kIsBulk) {
                    if (lane == 0) { // higher bits are of stages to come
                        s.listed[ring.index()] = listed >> (i << runs_log2);
                    }
                }
                copy(s_k + at, from.k + run.offset, my_bytes, s_bar, from.is_once);
                copy(s_v + at, from.v + run.offset, my_bytes, s_bar, from.is_once);
                if (end > from.old_len) {
                    const int32_t first_new = max(first, from.old_len);
                    copy_new(s_k, key, first_new, end, from.k_new, from.k_new_bytes, from.old_len,
                             s_bar);
                    copy_new(s_v, key, first_new, end, from.v_new, from.v_new_bytes, from.old_len,
                             s_bar);
                }
                commit((uint32_t)(end - first) * 2 * Traits::kRowBytes, s_bar);
                ring.advance(Traits::kStages);
                key -= Traits::kStageTokens;
            }
        }
    }

    // run walks the plan, by the warp that loads keys, by the one that hands over items, or, as far
    // as its first piece, by the one that prefetches.
    __device__ void run(int role) {
        attn_cuda_walk walk;
        attn_cuda_piece piece;
        bool is_waiting = true; // for what came before this launch, which may have begun early
        attn_cuda_walk_init(&walk, args.plan, gridDim.x, blockIdx.x, (uint32_t)args.kv_heads);
        while (const attn_cuda_record *r = attn_cuda_walk_next(&walk, &piece)) {
            if (role == DECODE_ITEMS) {
                if (is_waiting) {
                    decode_begin<Traits>();
                }
                load_item(piece, r);
            } else {
                const source from(piece, *r, args);
                const int32_t run_key = first_run(from);
                const uint32_t entry = entry_of(from, run_key);
                if (role == DECODE_AHEAD) {
                    if (Traits::kEarlyStages > 0 && piece.num_tiles > 0 &&
                        !ptx::s_get(&s.has_begun)) {
                        prefetch(from, run_key, entry);
                    }
                    break;
                }
                if (is_waiting) {
                    decode_begin<Traits>();
                }
                if (piece.num_tiles > 0) {
                    load_tiles(from, run_key, entry);
                }
            }
            is_waiting = false;
        }
        if (is_waiting) {
            decode_begin<Traits>();
        }
        if (role == DECODE_ITEMS) {
            load_item(piece, nullptr);
        }
    }
};

#endif
