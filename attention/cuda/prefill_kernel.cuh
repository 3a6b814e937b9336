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
    using weights = typename rows::weights;

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
        bool is_bent, is_listed;
        int2 full;        // keys that all query rows of this consumer see
        int32_t last_key; // of the last step, without a block mask
        int32_t plain;    // steps of `full` from this key on are plain
        uint64_t q;
        float c; // makes logits of base 2 of scores
    };

    __device__ __forceinline__ entered enter(uint32_t place) const {
        const attn_prefill_record &r = s.records[place];
        const prefill_task &task = s.tasks[place];
        const attn_prefill_tile &t = task.tile;
        const int low = prefill_row_token(r, consumer * 64);
        const int high = min(prefill_row_token(r, consumer * 64 + 63), t.tokens - 1);
        entered at;
        at.place = place;
        at.is_bent = r.cap_log2 > 0 || r.alibi_slopes || r.tree_mask;
        at.is_listed = task.keys.blocks != nullptr;
        at.full = make_int2(r.seen_first + t.token_first + high,
                            min(r.seen_end + t.token_first + low, r.kv_len));
        at.last_key = task.keys.first & ~(Traits::kKeys - 1);
        at.plain = at.is_bent || at.is_listed ? INT32_MAX : max(at.last_key, at.full.x);
        at.q = ptx::wgmma_tile(ptx::s_addr(s.q[place]) + consumer * Traits::kGroupBytes, 0);
        at.c = r.scale_log2;
        return at;
    }

    __device__ __forceinline__ int row() const {
        return consumer * 64 + ptx::thread() % 128 / 32 * 16 + ptx::thread() % 32 / 4;
    }

    static __device__ __forceinline__ bool is_masked(const prefill_step &step, const entered &at) {
        return step.key < at.full.x || step.key + Traits::kKeys > at.full.y || step.seen != 0xff;
    }

    // next_step moves on by a step of the task, and waits for its keys.
    __device__ __forceinline__ void next_step(prefill_step &step, const entered &at) {
        ring.advance(Traits::kStages);
        ring.wait_full(s.k_full);
        if (at.is_listed) {
            step = s.steps[ring.index];
        } else {
            step.key -= Traits::kKeys;
            step.is_last = step.key <= at.last_key;
        }
    }

    template <prefill_kind kKind>
    __device__ __forceinline__ float bend(float (&scores)[rows::kScores], const entered &at,
                                          const prefill_step &step) const {
        if constexpr (kKind == PREFILL_PLAIN) {
            return at.c;
        } else {
            return rows::template bend<kKind>(scores, s.records[at.place], s.tasks[at.place].tile,
                                              row(), step, args.group);
        }
    }

    // bend_first masks the first step of a task, which has nearly always something to mask.
    __device__ __forceinline__ float bend_first(float (&scores)[rows::kScores], const entered &at,
                                                const prefill_step &step) const {
        return is_masked(step, at) ? bend<PREFILL_MASKED>(scores, at, step)
                                   : bend<PREFILL_PLAIN>(scores, at, step);
    }

    // write leaves the outputs of a task for those who store them.
    __device__ __forceinline__ void write(const rows &x, const entered &at, float2 m, float2 l) {
        const float2 by =
            rows::quotients(s.records[at.place], s.tasks[at.place].tile, args.group, row(), m, l);
        x.leave(s.q[at.place], row() & ~15, by);
        ptx::fence_async_shared();
        prefill_release(s.out_full[at.place], (uint32_t)consumer);
    }

    // start computes the scores of a task's first step and their weights, nothing beside.
    __device__ __forceinline__ void start(rows &x, weights &p, const entered &at,
                                          const prefill_step &step) {
        float scores[rows::kScores];
        float c;
        x.begin();
        x.clear();
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
            c = bend_first(scores, at, step);
        }
        (void)x.raise(rows::tops(scores, c));
        x.weigh(scores, c);
        rows::pack(p, scores);
    }

    // begin_products starts the scores of a step, and O += P V of the one before, in this
    // consumer's turn, and returns when the scores are there.
    __device__ __forceinline__ void begin_products(rows &x, float (&scores)[rows::kScores],
                                                   const weights &p, uint64_t q,
                                                   const prefill_ring &before) {
        wait_turn();
        ptx::wgmma_hold(scores);
        ptx::wgmma_hold(x.o);
        ptx::wgmma_begin();
        rows::score(scores, q, keys());
        ptx::wgmma_commit();
        x.gather(p, values(before.index));
        ptx::wgmma_commit();
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::wgmma_hold(scores);
        prefill_release(s.k_empty, ring.index);
    }

    // end_products waits for O += P V.
    __device__ __forceinline__ void end_products(rows &x, const weights &p,
                                                 const prefill_ring &before) {
        x.end_weigh();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(x.o);
        ptx::wgmma_hold(p);
        prefill_release(s.v_empty, before.index);
    }

    // next computes a further step of a task; p are the weights of the step before.
    template <prefill_kind kKind>
    __device__ __forceinline__ void next(rows &x, weights &p, const entered &at,
                                         const prefill_step &step, const prefill_ring &before) {
        float scores[rows::kScores];
        begin_products(x, scores, p, at.q, before);
        const float c = bend<kKind>(scores, at, step);
        float2 shrink;
        const bool rises = x.raise_if(scores, c, &shrink);
        x.weigh(scores, c);
        end_products(x, p, before);
        if (rises) {
            x.scale(shrink);
        }
        rows::pack(p, scores);
    }

    // next_plain is next for a step of which every row sees all.  Where registers allow, the
    // weights are taken by the maxima as they are, so that neither waits for the other, and once
    // more in the rare case that one is to be raised.
    __device__ __forceinline__ void next_plain(rows &x, weights &p, const entered &at) {
        const prefill_ring before = ring;
        ring.advance(Traits::kStages);
        const bool has_k = ring.is_full(s.k_full), has_v = before.is_full(s.v_full);
        if (!has_k) {
            ring.wait_full(s.k_full);
        }
        if (!has_v) {
            before.wait_full(s.v_full);
        }
        float scores[rows::kScores];
        begin_products(x, scores, p, at.q, before);
        float2 shrink = make_float2(1, 1);
        bool rises;
        if constexpr (Traits::kWeighsEarly) {
            weights next; // p is still being read
            float2 sums;
            const float2 top = x.weigh_early(next, scores, at.c, &sums);
            rises = x.is_below(top);
            if (rises) {
                shrink = x.raise(top);
                (void)x.weigh_early(next, scores, at.c, &sums);
            }
            x.l[0] += sums.x;
            x.l[1] += sums.y;
            end_products(x, p, before);
            rows::copy(p, next);
        } else {
            rises = x.raise_if(scores, at.c, &shrink);
            x.weigh(scores, at.c);
            end_products(x, p, before);
            rows::pack(p, scores);
        }
        if (rises) {
            x.scale(shrink);
        }
    }

    // precedes_plain says whether the step behind that of `key` is there and plain.
    static __device__ __forceinline__ bool precedes_plain(int32_t key, const entered &at) {
        return key - Traits::kKeys >= at.plain && key <= at.full.y;
    }

    // run_steps computes a task's further steps.
    __device__ __forceinline__ void run_steps(rows &x, weights &p, const entered &at,
                                              prefill_step &step) {
#pragma unroll 1
        while (!step.is_last) {
            if (precedes_plain(step.key, at)) {
                next_plain(x, p, at);
                step.key -= Traits::kKeys;
                step.is_last = step.key <= at.last_key;
                continue;
            }
            const prefill_ring before = ring;
            next_step(step, at);
            before.wait_full(s.v_full);
            if (at.is_bent) {
                next<PREFILL_BENT>(x, p, at, step, before);
            } else {
                next<PREFILL_MASKED>(x, p, at, step, before);
            }
        }
    }

    // cross ends a task and begins another, in one: the products overlap as within a task.
    __device__ __forceinline__ void cross(rows &x, weights &p, const entered &from,
                                          const entered &to, const prefill_step &step,
                                          const prefill_ring &before) {
        float scores[rows::kScores];
        begin_products(x, scores, p, to.q, before);
        const float2 m = make_float2(x.m[0], x.m[1]), l = make_float2(x.l[0], x.l[1]);
        x.begin();
        const float c = bend_first(scores, to, step);
        (void)x.raise(rows::tops(scores, c));
        x.weigh(scores, c);
        end_products(x, p, before);
        write(x, from, m, l);
        x.clear();
        rows::pack(p, scores);
    }

    // finish adds the values of a task's last step, nothing beside.
    __device__ __forceinline__ void finish(rows &x, const weights &p, const entered &at) {
        ring.wait_full(s.v_full);
        ptx::wgmma_hold(x.o);
        ptx::wgmma_begin();
        x.gather(p, values(ring.index));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(x.o);
        ptx::wgmma_hold(p);
        prefill_release(s.v_empty, ring.index);
        ring.advance(Traits::kStages);
        ptx::bar_sync(BAR_WRITE + consumer, 128); // all warps are done with the queries
        write(x, at, make_float2(x.m[0], x.m[1]), make_float2(x.l[0], x.l[1]));
    }

    // write_nothing writes the outputs of a task that sees no key.
    __device__ __forceinline__ void write_nothing(rows &x, const entered &at) {
        x.clear();
        ptx::bar_sync(BAR_WRITE + consumer, 128);
        write(x, at, make_float2(-INFINITY, -INFINITY), make_float2(0, 0));
    }

    // run_chain computes tasks, from one on until one does not begin with the end of another.  No
    // return from within loops, here and in what it calls, and no branch on what was shuffled: the
    // compiler then takes ring and places for different in the lanes, and spills.
    __device__ __forceinline__ void run_chain(rows &x, entered at, prefill_ring &places) {
        weights p;
        ring.wait_full(s.k_full);
        prefill_step step = s.steps[ring.index];
        start(x, p, at, step);
#pragma unroll 1
        for (bool goes_on = true; goes_on;) {
            run_steps(x, p, at, step);
            places.advance(Traits::kTasks);
            places.wait_full(s.q_full);
            const prefill_task &task = s.tasks[places.index];
            const entered to = enter(places.index);
            goes_on = task.record >= 0 && !task.is_empty && !to.is_bent;
            if (!goes_on) {
                finish(x, p, at);
            } else {
                const prefill_ring before = ring;
                ring.advance(Traits::kStages);
                ring.wait_full(s.k_full);
                step = s.steps[ring.index];
                before.wait_full(s.v_full);
                cross(x, p, at, to, step, before);
                at = to;
            }
        }
    }

    __device__ __forceinline__ void run() {
        prefill_ring places;
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
            const entered at = enter(places.index);
            if (s.tasks[at.place].is_empty) {
                write_nothing(x, at);
                places.advance(Traits::kTasks);
            } else {
                run_chain(x, at, places);
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
        ptx::tensor_prefetch_map(&args.rows);
        for (int i = 0; i < Traits::kStages; i++) {
            ptx::mbar_init(ptx::s_addr(&s.k_full[i]), 1);
            ptx::mbar_init(ptx::s_addr(&s.v_full[i]), 1);
            ptx::mbar_init(ptx::s_addr(&s.k_empty[i]), Traits::kConsumerWarps);
            ptx::mbar_init(ptx::s_addr(&s.v_empty[i]), Traits::kConsumerWarps);
        }
        for (int i = 0; i < Traits::kQueryWarps; i++) {
            ptx::mbar_init(ptx::s_addr(&s.q_copied[i]), 1);
            s.num_copied[i] = 0;
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
