// prefill_kernel is attention of many query tokens over the paged pool: any q_len, any GQA ratio,
// all masks, sm_90a.  README.md has the picture and the counts.
//
// Grid: one CTA an SM; each takes tasks (attn_prefill.h) until there are none.  Warpgroup 0
// loads, the others compute 64 query rows each.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_KERNEL_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_KERNEL_CUH

#include "attention/cuda/prefill_load.cuh"
#include "attention/cuda/prefill_math.cuh"
#include "attention/cuda/prefill_prepare.cuh"
#include "attention/cuda/prefill_rope.cuh"

// prefill_release hands a buffer back, once all lanes of the warp are done with it.
__device__ __forceinline__ void prefill_release(const uint64_t *empty, uint32_t index) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ptx::mbar_arrive(ptx::s_addr(&empty[index]));
    }
}

template <typename Traits>
struct prefill_consumer {
    using rows = prefill_rows<Traits>;

    typename Traits::smem &s;
    const prefill_args &args;
    const int consumer;        // which
    prefill_ring ring, places; // where it stands among stages, and among tasks

    __device__ __forceinline__ prefill_consumer(typename Traits::smem &smem, const prefill_args &a,
                                                int which)
        : s(smem), args(a), consumer(which) {}

    // Turns.  O += P V of a step is one consumer's at a time, in turns, but that the next begins
    // as the last of its products does.  So they stay apart: one has its softmax while others have
    // products under way.  Without turns they come to do all at once.
    __device__ __forceinline__ void wait_turn() const {
        ptx::bar_sync(BAR_TURN + consumer, 2 * 128);
    }
    __device__ __forceinline__ uint32_t next_turn() const {
        return BAR_TURN + (consumer + 1 == Traits::kConsumers ? 0 : consumer + 1);
    }
    __device__ __forceinline__ void pass_turn() const { ptx::bar_arrive(next_turn(), 2 * 128); }

    __device__ __forceinline__ uint64_t keys() const {
        return ptx::wgmma_tile(ptx::s_addr(s.k[ring.index]), 0);
    }
    __device__ __forceinline__ uint64_t values() const {
        return ptx::wgmma_tile(ptx::s_addr(s.v[ring.index]), Traits::kTileBytes);
    }

    __device__ __forceinline__ uint64_t queries() const {
        return ptx::wgmma_tile(ptx::s_addr(s.q[places.index]) + consumer * Traits::kGroupBytes, 0);
    }
    __device__ __forceinline__ const attn_prefill_record &record() const {
        return s.records[places.index];
    }
    __device__ __forceinline__ const prefill_task &task() const { return s.tasks[places.index]; }

    __device__ __forceinline__ int row() const {
        return consumer * 64 + ptx::thread() % 128 / 32 * 16 + ptx::thread() % 32 / 4;
    }

    // bend masks scores and the like, and returns the factor that makes them logits of base 2.
    __device__ __forceinline__ float bend(float (&scores)[rows::kScores],
                                          const prefill_step &step) const {
        const prefill_span &span = s.spans[places.index][consumer];
        if (record().flags & ATTN_PREFILL_BENT) {
            return rows::template bend<PREFILL_BENT>(scores, record(), task().tile, row(), step,
                                                     args.group);
        }
        if (step.key < span.all_first || step.key + Traits::kKeys > span.all_end ||
            step.seen != 0xff) {
            return rows::template bend<PREFILL_MASKED>(scores, record(), task().tile, row(), step,
                                                       args.group);
        }
        return record().scale_log2;
    }

    // skip lets a step pass that none of the rows sees.  It is handed back when it has come:
    // before, others may still want what was there.
    __device__ __forceinline__ void skip() const {
        prefill_release(s.k_empty, ring.index);
        ring.wait_full(s.v_full);
        wait_turn();
        pass_turn();
        prefill_release(s.v_empty, ring.index);
    }

    // run_steps computes the steps of a task.  Weights are taken by the maxima as they are; where
    // one was to be raised first, which is rare but for the first step, the step is done again.
    __device__ __forceinline__ void run_steps(rows &x) {
        bool raises = true;
        uint32_t asking[2] = {~0u, ~0u};
#pragma unroll 1
        for (bool is_last = false; !is_last;) {
            ring.wait_full(s.k_full);
            const prefill_step step = s.steps[ring.index];
            const prefill_span &span = s.spans[places.index][consumer];
            if (step.key < span.end && step.key + Traits::kKeys > span.first) {
                const bool is_half = span.end - step.key <= Traits::kKeys / 2;
                float scores[rows::kScores];
                rows::score(scores, queries(), keys());
                const float c = bend(scores, step);
                if (raises) {
                    x.raise(scores, c, asking);
                }
                typename rows::weights p;
                const float2 sums = x.weigh(p, scores, c);
                asking[0] = x.asking(0, sums.x);
                asking[1] = x.asking(1, sums.y);
                if (!raises) { // all warps do it again or none, as they share the products
                    raises =
                        ptx::bar_any(BAR_CONSUMER + consumer, 128, (asking[0] | asking[1]) != 0);
                    if (raises) {
                        continue;
                    }
                }
                raises = false;
                x.l[0] += sums.x;
                x.l[1] += sums.y;
                prefill_release(s.k_empty, ring.index);
                ring.wait_full(s.v_full);
                wait_turn();
                x.gather(p, values(), is_half, next_turn()); // passes the turn on
                prefill_release(s.v_empty, ring.index);
            } else {
                skip();
            }
            is_last = step.is_last;
            ring.advance(Traits::kStages);
        }
    }

    // rotate rotates the queries in place.
    __device__ __forceinline__ void rotate() const {
        prefill_rotate<Traits>(record(), task().tile, s.q[places.index], consumer, args.angles);
        ptx::fence_async_shared();
        ptx::bar_sync(BAR_CONSUMER + consumer, 128); // the products of a warp may read all of them
    }

    // join adds up the sums of a tile whose keys two CTAs share: the first to come leaves its own
    // to the second one, and false is returned.  Which of them that is changes no bit.
    __device__ __forceinline__ bool join(rows &x) const {
        const int thread = ptx::thread() % 128;
        const attn_prefill_record &r = record();
        const attn_prefill_tile &t = task().tile;
        const int tile = (t.token_first - r.block_first) / r.tile_tokens * r.head_parts +
                         t.head_first / r.tile_heads;
        const uint32_t slot =
            (uint32_t)((tile * args.kv_heads + t.kv_head) * Traits::kConsumers + consumer);
        uint32_t *state = &args.joins[slot]; // CTAs that have come, and 4 when the sums are there
        float4 *sums = (float4 *)args.sums + (uint64_t)slot * (rows::kSums * 128) + thread;
        // Broadcast, so that the compiler knows that it is the same in all lanes.
        const bool is_second = __shfl_sync(
            ~0u, ptx::bar_any(BAR_CONSUMER + consumer, 128, ptx::g_add(thread == 0, state, 1) != 0),
            0);
        if (is_second) {
            while (__shfl_sync(~0u, ptx::g_load_acquire(state), 0) < 6) { // two CTAs, and sums
            }
            x.add(sums);
            ptx::bar_sync(BAR_CONSUMER + consumer, 128);
            (void)ptx::g_add(thread == 0, state, -6u);
        } else {
            x.save(sums);
            __threadfence();
            ptx::bar_sync(BAR_CONSUMER + consumer, 128);
            (void)ptx::g_add(thread == 0, state, 4);
        }
        return is_second;
    }

    // write leaves the outputs of a task for those who store them.
    __device__ __forceinline__ void write(rows &x) const {
        const bool is_whole = !record().shares_keys || join(x);
        if (is_whole) {
            const float2 by =
                rows::quotients(record(), task().tile, args.group, row(),
                                make_float2(x.m[0], x.m[1]), make_float2(x.l[0], x.l[1]));
            ptx::bar_sync(BAR_CONSUMER + consumer, 128); // all warps are done with the queries
            x.leave(s.q[places.index], row() & ~15, by);
            ptx::fence_async_shared();
        }
        if (ptx::thread() % 128 == 0) {
            s.has_out[places.index][consumer] = is_whole;
        }
        prefill_release(s.out_full[places.index], (uint32_t)consumer);
    }

    __device__ __forceinline__ void run() {
        if (consumer == Traits::kConsumers - 1) {
            pass_turn();
        }
#pragma unroll 1
        for (;; places.advance(Traits::kTasks)) {
            places.wait_full(s.q_full);
            if (task().record < 0) {
                break;
            }
            if (record().inv_freq && !task().is_empty) {
                rotate();
            }
            rows x;
            x.begin();
            if (!task().is_empty) {
                run_steps(x);
            }
            write(x);
        }
        if (consumer == 0) {
            wait_turn(); // the last one passed
        }
    }
};

template <int kHeadDim, typename T>
__global__ void __launch_bounds__(prefill_traits<kHeadDim, T>::kThreads, 1)
    prefill_kernel(const __grid_constant__ prefill_args args) {
    using Traits = prefill_traits<kHeadDim, T>;
    extern __shared__ __align__(1024) unsigned char s_memory[];
    typename Traits::smem &s = *(typename Traits::smem *)s_memory;

    // Barriers.
    if (threadIdx.x == 0) {
        ptx::tensor_prefetch_map(&args.map);
        ptx::tensor_prefetch_map(&args.rows);
        ptx::tensor_prefetch_map(&args.token);
        for (int i = 0; i < Traits::kStages; i++) {
            ptx::mbar_init(ptx::s_addr(&s.k_full[i]), 1);
            ptx::mbar_init(ptx::s_addr(&s.v_full[i]), 1);
            ptx::mbar_init(ptx::s_addr(&s.k_empty[i]), Traits::kConsumerWarps);
            ptx::mbar_init(ptx::s_addr(&s.v_empty[i]), Traits::kConsumerWarps);
        }
        s.steps_begun = 0;
        for (int i = 0; i < Traits::kTasks; i++) {
            ptx::mbar_init(ptx::s_addr(&s.task_full[i]), 1);
            ptx::mbar_init(ptx::s_addr(&s.q_full[i]), Traits::kQueryWarps);
            ptx::mbar_init(ptx::s_addr(&s.task_empty[i]), Traits::kQueryWarps + 1);
            for (int n = 0; n < Traits::kConsumers; n++) {
                ptx::mbar_init(ptx::s_addr(&s.out_full[i][n]), 4);
            }
        }
        ptx::fence_mbar_init();
    }
    __syncthreads();
    ptx::grid_launch_next();

    // Roles.  Each waits by itself for the kernel in front, before what that one may write.
    if (threadIdx.x < 128) {
        ptx::give_registers<Traits::kLoaderRegisters>();
        if (threadIdx.x < 32) {
            prefill_loader<Traits>(s, args).run();
        } else if (threadIdx.x < 64) {
            prefill_schedule<Traits>(s, args);
        } else {
            prefill_query_loader<Traits>(s, args).run();
        }
    } else {
        ptx::take_registers<Traits::kConsumerRegisters>();
        ptx::grid_wait();
        // Broadcast, so that the compiler knows that it is the same in all lanes.
        prefill_consumer<Traits>(s, args, __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0)).run();
    }
}

#endif
