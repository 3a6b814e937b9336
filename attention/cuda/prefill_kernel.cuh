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
    const int consumer; // which
    prefill_ring ring;  // where it stands among stages; values are a step behind keys

    __device__ __forceinline__ prefill_consumer(typename Traits::smem &smem, const prefill_args &a,
                                                int which)
        : s(smem), args(a), consumer(which) {}

    // Turns.  A consumer issues the products of a step when it is its turn, and then lets the next
    // one do so: while one has products under way, another has the time for its softmax.
    __device__ __forceinline__ void wait_turn() const { ptx::bar_sync(BAR_TURN + consumer, 256); }
    __device__ __forceinline__ void pass_turn() const {
        ptx::bar_arrive(BAR_TURN + (consumer + 1 == Traits::kConsumers ? 0 : consumer + 1), 256);
    }

    __device__ __forceinline__ uint64_t keys() const {
        return ptx::wgmma_tile(ptx::s_addr(s.k[ring.index]), 0);
    }
    __device__ __forceinline__ uint64_t values(uint32_t index) const {
        return ptx::wgmma_tile(ptx::s_addr(s.v[index]), Traits::kTileBytes);
    }

    // full is the range of keys that all query rows of this consumer see.
    __device__ __forceinline__ int2 full(const attn_prefill_record &r,
                                         const attn_prefill_tile &t) const {
        const int low = prefill_row_token(r, consumer * 64);
        const int high = min(prefill_row_token(r, consumer * 64 + 63), t.tokens - 1);
        return make_int2(r.seen_first + t.token_first + high,
                         min(r.seen_end + t.token_first + low, r.kv_len));
    }

    static __device__ __forceinline__ bool is_masked(const prefill_step &step, int2 full) {
        return step.key < full.x || step.key + Traits::kKeys > full.y || step.seen != 0xff;
    }

    // first computes the scores of a task's first step and their weights.
    template <prefill_kind kKind>
    __device__ __forceinline__ void first(rows &x, const attn_prefill_record &r,
                                          const attn_prefill_tile &t, int row, uint64_t q,
                                          const prefill_step &step) {
        float scores[rows::kScores];
        ptx::wgmma_hold(scores);
        ptx::wgmma_begin();
        rows::score(scores, q, keys());
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(scores);
        prefill_release(s.k_empty, ring.index);
        const float c = rows::template bend<kKind>(scores, r, t, row, step, args.group);
        (void)x.weigh(scores, c);
        x.pack(scores);
    }

    // next computes the scores of a further step, and the values of the one before.
    template <prefill_kind kKind>
    __device__ __forceinline__ void next(rows &x, const attn_prefill_record &r,
                                         const attn_prefill_tile &t, int row, uint64_t q,
                                         const prefill_step &step, const prefill_ring &before) {
        float scores[rows::kScores];
        wait_turn();
        ptx::wgmma_hold(scores);
        ptx::wgmma_hold(x.o);
        ptx::wgmma_begin();
        rows::score(scores, q, keys());
        ptx::wgmma_commit();
        before.wait_full(s.v_full);
        ptx::wgmma_begin();
        x.gather(values(before.index));
        ptx::wgmma_commit();
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::wgmma_hold(scores);
        prefill_release(s.k_empty, ring.index);
        const float c = rows::template bend<kKind>(scores, r, t, row, step, args.group);
        const float2 shrink = x.weigh(scores, c);
        x.end_weigh();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(x.o);
        prefill_release(s.v_empty, before.index);
        x.scale(shrink);
        x.pack(scores);
    }

    // task computes a task, whose queries have landed in place `place`.
    __device__ __forceinline__ void task(uint32_t place) {
        const attn_prefill_record &r = s.records[place];
        const attn_prefill_tile &t = s.tasks[place].tile;
        const int row = consumer * 64 + (ptx::thread() % 128) / 32 * 16 + ptx::thread() % 32 / 4;
        const uint64_t q =
            ptx::wgmma_tile(ptx::s_addr(s.q[place]) + consumer * Traits::kGroupBytes, 0);
        const int2 whole = full(r, t);
        const bool is_bent = r.cap_log2 > 0 || r.alibi_slopes || r.tree_mask;
        rows x;
        x.begin();
        if (s.tasks[place].is_empty) {
            x.write(r, t, row, args.group);
            return;
        }
        ring.wait_full(s.k_full);
        prefill_step step = s.steps[ring.index];
        if (is_bent) {
            first<PREFILL_BENT>(x, r, t, row, q, step);
        } else {
            first<PREFILL_MASKED>(x, r, t, row, q, step);
        }
#pragma unroll 1
        while (!step.is_last) {
            const prefill_ring before = ring;
            ring.advance(Traits::kStages);
            ring.wait_full(s.k_full);
            step = s.steps[ring.index];
            if (is_bent) {
                next<PREFILL_BENT>(x, r, t, row, q, step, before);
            } else if (is_masked(step, whole)) {
                next<PREFILL_MASKED>(x, r, t, row, q, step, before);
            } else {
                next<PREFILL_PLAIN>(x, r, t, row, q, step, before);
            }
        }

        // The last step's values.
        ring.wait_full(s.v_full);
        ptx::wgmma_hold(x.o);
        ptx::wgmma_begin();
        x.gather(values(ring.index));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(x.o);
        prefill_release(s.v_empty, ring.index);
        ring.advance(Traits::kStages);
        x.write(r, t, row, args.group);
    }

    __device__ __forceinline__ void run() {
        prefill_ring places;
        if (consumer == Traits::kConsumers - 1) {
            pass_turn();
        }
#pragma unroll 1
        for (;;) {
            places.wait_full(s.q_full);
            if (s.tasks[places.index].record < 0) {
                break;
            }
            task(places.index);
            prefill_release(s.task_empty, places.index);
            places.advance(Traits::kTasks);
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
        for (int i = 0; i < Traits::kStages; i++) {
            ptx::mbar_init(ptx::s_addr(&s.k_full[i]), 1);
            ptx::mbar_init(ptx::s_addr(&s.v_full[i]), 1);
            ptx::mbar_init(ptx::s_addr(&s.k_empty[i]), Traits::kConsumerWarps);
            ptx::mbar_init(ptx::s_addr(&s.v_empty[i]), Traits::kConsumerWarps);
        }
        for (int i = 0; i < Traits::kTasks; i++) {
            ptx::mbar_init(ptx::s_addr(&s.task_full[i]), 1);
            ptx::mbar_init(ptx::s_addr(&s.q_full[i]), Traits::kQueryWarps);
            ptx::mbar_init(ptx::s_addr(&s.task_empty[i]), Traits::kConsumerWarps + 1);
        }
        ptx::fence_mbar_init();
    }
    __syncthreads();
    ptx::grid_launch_next();
    ptx::grid_wait();

    // Roles.
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
        // Broadcast, so that the compiler knows that it is the same in all lanes.
        const int consumer = __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0);
        prefill_consumer<Traits>(s, args, consumer).run();
    }
}

#endif
