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

    // entered is what a consumer keeps of a task.
    struct entered {
        uint32_t place;
        bool is_bent;
        int2 full; // keys that all query rows of this consumer see
        uint64_t q;
    };

    __device__ __forceinline__ entered enter(uint32_t place) const {
        const attn_prefill_record &r = s.records[place];
        const attn_prefill_tile &t = s.tasks[place].tile;
        const int low = prefill_row_token(r, consumer * 64);
        const int high = min(prefill_row_token(r, consumer * 64 + 63), t.tokens - 1);
        return {place, r.cap_log2 > 0 || r.alibi_slopes || r.tree_mask,
                make_int2(r.seen_first + t.token_first + high,
                          min(r.seen_end + t.token_first + low, r.kv_len)),
                ptx::wgmma_tile(ptx::s_addr(s.q[place]) + consumer * Traits::kGroupBytes, 0)};
    }

    __device__ __forceinline__ int row() const {
        return consumer * 64 + ptx::thread() % 128 / 32 * 16 + ptx::thread() % 32 / 4;
    }

    static __device__ __forceinline__ bool is_masked(const prefill_step &step, int2 full) {
        return step.key < full.x || step.key + Traits::kKeys > full.y || step.seen != 0xff;
    }

    template <prefill_kind kKind>
    __device__ __forceinline__ float bend(float (&scores)[rows::kScores], const entered &at,
                                          const prefill_step &step) const {
        return rows::template bend<kKind>(scores, s.records[at.place], s.tasks[at.place].tile,
                                          row(), step, args.group);
    }

    __device__ __forceinline__ void write(rows &x, const entered &at, float2 m, float2 l) {
        x.write(s.records[at.place], s.tasks[at.place].tile, args.group, s.q[at.place],
                s.out_rows[at.place], row() & ~15, m, l);
    }

    // start computes the scores of a task's first step and their weights, nothing beside.
    __device__ __forceinline__ void start(rows &x, const entered &at, prefill_step &step) {
        float scores[rows::kScores];
        float c;
        x.begin();
        ring.wait_full(s.k_full);
        step = s.steps[ring.index];
        ptx::wgmma_hold(scores);
        ptx::wgmma_begin();
        rows::score(scores, at.q, keys());
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(scores);
        prefill_release(s.k_empty, ring.index);
        if (at.is_bent) {
            c = bend<PREFILL_BENT>(scores, at, step);
        } else {
            c = bend<PREFILL_MASKED>(scores, at, step);
        }
        (void)x.weigh(scores, c);
        x.pack(scores);
    }

    // begin_products starts the scores of a step, and O += P V of the one before, in this
    // consumer's turn, and returns when the scores are there.
    __device__ __forceinline__ void begin_products(rows &x, float (&scores)[rows::kScores],
                                                   uint64_t q, const prefill_ring &before,
                                                   bool adds) {
        wait_turn();
        ptx::wgmma_hold(scores);
        ptx::wgmma_hold(x.o);
        ptx::wgmma_begin();
        rows::score(scores, q, keys());
        ptx::wgmma_commit();
        before.wait_full(s.v_full);
        ptx::wgmma_begin();
        x.gather(values(before.index), adds);
        ptx::wgmma_commit();
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::wgmma_hold(scores);
        prefill_release(s.k_empty, ring.index);
    }

    // end_products waits for O += P V.
    __device__ __forceinline__ void end_products(rows &x, const prefill_ring &before) {
        x.end_weigh();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(x.o);
        prefill_release(s.v_empty, before.index);
    }

    // next computes a further step of a task.
    template <prefill_kind kKind>
    __device__ __forceinline__ void next(rows &x, const entered &at, const prefill_step &step,
                                         const prefill_ring &before, bool adds) {
        float scores[rows::kScores];
        begin_products(x, scores, at.q, before, adds);
        const float c = bend<kKind>(scores, at, step);
        const float2 shrink = x.weigh(scores, c);
        end_products(x, before);
        x.scale(shrink);
        x.pack(scores);
    }

    // cross ends a task and begins another, in one: the products overlap as within a task.
    __device__ __forceinline__ void cross(rows &x, const entered &from, const entered &to,
                                          prefill_step &step, bool adds) {
        float scores[rows::kScores];
        const prefill_ring before = ring;
        ring.advance(Traits::kStages);
        ring.wait_full(s.k_full);
        step = s.steps[ring.index];
        begin_products(x, scores, to.q, before, adds);
        const float2 m = make_float2(x.m[0], x.m[1]), l = make_float2(x.l[0], x.l[1]);
        x.begin();
        float c = bend<PREFILL_PLAIN>(scores, to, step);
        if (is_masked(step, to.full)) {
            c = bend<PREFILL_MASKED>(scores, to, step);
        }
        (void)x.weigh(scores, c);
        end_products(x, before);
        write(x, from, m, l);
        x.pack(scores);
    }

    // finish adds the values of a task's last step, nothing beside.
    __device__ __forceinline__ void finish(rows &x, const entered &at, bool adds) {
        ring.wait_full(s.v_full);
        ptx::wgmma_hold(x.o);
        ptx::wgmma_begin();
        x.gather(values(ring.index), adds);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(x.o);
        prefill_release(s.v_empty, ring.index);
        ring.advance(Traits::kStages);
        ptx::bar_sync(BAR_WRITE + consumer, 128); // all warps are done with the queries
        write(x, at, make_float2(x.m[0], x.m[1]), make_float2(x.l[0], x.l[1]));
    }

    // write_nothing writes the outputs of a task that sees no key.
    __device__ __forceinline__ void write_nothing(rows &x, const entered &at) {
#pragma unroll
        for (int i = 0; i < rows::kOuts; i++) {
            x.o[i] = 0;
        }
        ptx::bar_sync(BAR_WRITE + consumer, 128);
        write(x, at, make_float2(-INFINITY, -INFINITY), make_float2(0, 0));
    }

    __device__ __forceinline__ void run() {
        prefill_ring places;
        prefill_step step;
        rows x;
        if (consumer == Traits::kConsumers - 1) {
            pass_turn();
        }
#pragma unroll 1
        for (;;) {
            places.wait_full(s.q_full);
            if (s.tasks[places.index].record < 0) {
                break;
            }
            entered at = enter(places.index);
            if (s.tasks[at.place].is_empty) {
                write_nothing(x, at);
                prefill_release(s.task_empty, at.place);
                places.advance(Traits::kTasks);
                continue;
            }
            start(x, at, step);
            bool adds = false; // the task has sums already
#pragma unroll 1
            for (bool goes_on = true; goes_on;) {
#pragma unroll 1
                while (!step.is_last) {
                    const prefill_ring before = ring;
                    ring.advance(Traits::kStages);
                    ring.wait_full(s.k_full);
                    step = s.steps[ring.index];
                    if (at.is_bent) {
                        next<PREFILL_BENT>(x, at, step, before, adds);
                    } else if (is_masked(step, at.full)) {
                        next<PREFILL_MASKED>(x, at, step, before, adds);
                    } else {
                        next<PREFILL_PLAIN>(x, at, step, before, adds);
                    }
                    adds = true;
                }
                const uint32_t done = places.index;
                places.advance(Traits::kTasks);
                places.wait_full(s.q_full);
                const prefill_task &task = s.tasks[places.index];
                const entered to = enter(places.index);
                goes_on = task.record >= 0 && !task.is_empty && !to.is_bent;
                if (goes_on) {
                    cross(x, at, to, step, adds);
                    at = to;
                    adds = false;
                } else {
                    finish(x, at, adds);
                }
                prefill_release(s.task_empty, done);
            }
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
