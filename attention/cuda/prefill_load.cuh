// prefill_load is the first warpgroup of the prefill kernel:
//     warp 0      copies keys and values, step by step, by tensor maps, which leave tiles swizzled
//                 as the products read them
//     warp 1      takes tasks
//     warps 2, 3  copy the queries of a task by 16-byte cp.async, since query rows are picked from
//                 tokens and heads, rotate them, and store the outputs, which the consumers leave
//                 in their place; each has the rows of one consumer
// All run ahead of the consumers as far as the buffers go: tasks and queries by two tasks, keys by
// the stages, across tasks.
//
// Runs.  A box of 64 columns by 2^run_log2 tokens of one block is one copy.  The map's dimension of
// tokens ends with the run, so a box that begins `live` tokens before that end, of which address
// and all are moved back by as much, reads the live tokens alone and zeros behind them.  So nothing
// behind kv_len is read, and no NaN can come from there.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_LOAD_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_LOAD_CUH

#include "attention/cuda/attn_math.cuh"
#include "attention/cuda/prefill_traits.cuh"

// prefill_next moves a walk to its next step, of which some key is seen; false after the last.
__device__ __forceinline__ bool prefill_next(const prefill_keys &keys, prefill_walk &w,
                                             int32_t block_tokens, int lane) {
    w.key -= ATTN_PREFILL_KEYS;
    w.seen = 0xff;
    if (!keys.blocks) {
        return w.key + ATTN_PREFILL_KEYS > keys.first;
    }
    w.seen = 0;
    while (w.seen == 0) {
        if (keys.low >= w.high) {
            return false;
        }
        // The last listed block decides the step; a step has keys of up to nine blocks.
        const int32_t last = (int32_t)__ldg(keys.blocks + w.high - 1) * block_tokens;
        w.key = min(w.key, (min(last + block_tokens, keys.end) - 1) & ~(ATTN_PREFILL_KEYS - 1));
        if (w.key + ATTN_PREFILL_KEYS <= keys.first) {
            return false;
        }
        const int32_t i = w.high - 1 - lane;
        const bool is_listed = i >= keys.low;
        const int32_t block = is_listed ? (int32_t)__ldg(keys.blocks + i) * block_tokens : 0;
        const int32_t first = max(block, keys.first) - w.key;
        const int32_t end = min(block + block_tokens, keys.end) - w.key;
        const int32_t from = max(first / 16, 0), to = min((end + 15) / 16, 8);
        const uint32_t bits = is_listed && to > from ? (1u << to) - (1u << from) : 0;
        w.seen = __reduce_or_sync(~0u, bits);
        w.high -= __popc(__ballot_sync(~0u, is_listed && block >= w.key));
    }
    return true;
}

// prefill_tasks finds the tasks that a CTA takes, by all lanes of a warp.
struct prefill_tasks {
    const prefill_args &args;
    const attn_prefill_head *plan;
    const attn_prefill_ends *ends;
    const attn_prefill_record *records;
    const int lane;
    uint32_t record, record_first, record_end; // tasks of the record, [first, end)
    uint32_t index;                            // of the task
    uint32_t taken;                            // of the one after it, in lane 0

    __device__ explicit prefill_tasks(const prefill_args &a)
        : args(a), plan(a.plan),
          ends((const attn_prefill_ends *)((const char *)a.plan + a.plan->ends_at)),
          records((const attn_prefill_record *)((const char *)a.plan + a.plan->records_at)),
          lane((int)threadIdx.x % 32), record(0), record_first(0), record_end(0), index(blockIdx.x),
          taken(0) {}

    // take takes the task after this one, so that the answer is there when it is wanted.  The
    // counter is the kernel's in front until that one has ended.
    __device__ void take() {
        if (index < plan->num_tasks && lane == 0) {
            taken = atomicAdd(&args.counters[0], 1);
        }
    }

    // advance moves on to the task that was taken.
    __device__ void advance() {
        index = gridDim.x + __shfl_sync(~0u, taken, 0);
        take();
    }

    // find moves to the record of the task.  Tasks and records are taken in ascending order.
    __device__ void find() {
        while (index >= record_end) {
            const uint32_t i = record + (uint32_t)lane;
            const uint32_t end = i < plan->num_records ? __ldg(&ends[i].tasks) : ~0u;
            const int behind = __ffs((int)__ballot_sync(~0u, index < end)) - 1;
            const int last = behind < 0 ? 31 : behind; // the last lane that matters
            const uint32_t before = __shfl_sync(~0u, end, last > 0 ? last - 1 : 0);
            record_first = last > 0 ? before : record_end_of(record);
            record_end = __shfl_sync(~0u, end, last);
            record += (uint32_t)last + (behind < 0 ? 1 : 0);
        }
    }

    // record_end_of returns where the tasks of the record before this one end.
    __device__ uint32_t record_end_of(uint32_t i) const {
        return i > 0 ? __ldg(&ends[i - 1].tasks) : 0;
    }

    // get returns the task; record -1 after the last.
    __device__ prefill_task get() {
        prefill_task t = {};
        t.record = -1;
        if (index >= plan->num_tasks) {
            return t;
        }
        find();
        const attn_prefill_record &r = records[record];
        t.record = (int32_t)record;
        t.tile =
            attn_prefill_tile_of(&r, (int32_t)(index - record_first), args.kv_heads, args.group);
        begin(r, t);
        t.is_empty = !prefill_next(t.keys, t.walk, args.block_tokens, lane);
        return t;
    }

    // begin finds the keys of a task, and begins a walk before its first step.
    __device__ void begin(const attn_prefill_record &r, prefill_task &task) const {
        const attn_prefill_tile &t = task.tile;
        prefill_keys &keys = task.keys;
        keys.first = max(r.seen_first + t.token_first, 0);
        keys.end = min(r.seen_end + t.token_first + t.tokens - 1, r.kv_len);
        if (t.tokens == 0 || keys.first >= keys.end) {
            keys.first = keys.end = 0;
        }
        task.walk.key = (keys.end + ATTN_PREFILL_KEYS - 1) & ~(ATTN_PREFILL_KEYS - 1);
        if (r.mask_start && t.tokens > 0) {
            ptx::grid_wait();
            const int32_t q_block = t.token_first / r.q_block;
            keys.blocks = r.mask_blocks;
            keys.low = (int32_t)__ldg(r.mask_start + q_block);
            int32_t above = (int32_t)__ldg(r.mask_start + q_block + 1);
            for (int32_t low = keys.low; low < above;) { // the first that begins behind the keys
                const int32_t middle = low + (above - low) / 2;
                if ((int64_t)__ldg(keys.blocks + middle) * args.block_tokens < keys.end) {
                    low = middle + 1;
                } else {
                    above = middle;
                }
            }
            task.walk.high = above;
        }
    }

    // leave ends the CTA's part; the last CTA leaves the counters as they were.
    __device__ void leave() const {
        if (lane == 0 && atomicAdd(&args.counters[1], 1) == gridDim.x - 1) {
            args.counters[0] = 0;
            args.counters[1] = 0;
        }
    }
};

template <typename Traits>
struct prefill_loader {
    typename Traits::smem &s;
    const prefill_args &args;
    const int lane;
    prefill_ring keys, values; // where it stands among stages

    __device__ prefill_loader(typename Traits::smem &smem, const prefill_args &a)
        : s(smem), args(a), lane((int)threadIdx.x % 32) {}

    // begin_copy lets a stage's barrier wait for a copy of a whole stage.
    __device__ void begin_copy(const prefill_ring &at, const uint64_t *full) const {
        if (lane == 0) {
            ptx::mbar_arrive_expect(ptx::s_addr(&full[at.index]), Traits::kStageBytes);
        }
        __syncwarp();
    }

    // copy copies the lane's run of a step, `live` tokens from g_run on and zeros behind them.
    __device__ void copy(uint32_t s_tiles, const char *g_run, int32_t live, uint32_t s_bar) const {
        const int runs_log2 = 7 - args.run_log2;
        const int run = lane & ((1 << runs_log2) - 1), half = lane >> runs_log2;
        if (half < Traits::kHalves) {
            const int32_t skip = (1 << args.run_log2) - live;
            const uint64_t at =
                (uint64_t)(uintptr_t)g_run - args.map_base - (uint64_t)skip * Traits::kRowBytes;
            const uint32_t s_dst = s_tiles + (uint32_t)half * Traits::kTileBytes +
                                   ((uint32_t)run << args.run_log2) * 128;
            ptx::tensor_copy(s_dst, &args.map, half * 64, skip, (int32_t)((uint32_t)at >> 4),
                             (int32_t)(at >> 32), s_bar);
        }
    }

    __device__ void copy_keys(const char *g_run, int32_t live, const prefill_step &step) {
        keys.wait_empty(s.k_empty);
        if (lane == 0) {
            s.steps[keys.index] = step;
        }
        begin_copy(keys, s.k_full);
        copy(ptx::s_addr(s.k[keys.index]), g_run, live, ptx::s_addr(&s.k_full[keys.index]));
        keys.advance(Traits::kStages);
    }

    __device__ void copy_values(const char *g_run, int32_t live) {
        values.wait_empty(s.v_empty);
        begin_copy(values, s.v_full);
        copy(ptx::s_addr(s.v[values.index]), g_run, live, ptx::s_addr(&s.v_full[values.index]));
        values.advance(Traits::kStages);
    }

    // entry_of returns the table entry of the lane's run.
    __device__ uint32_t entry_of(const attn_prefill_record &r, int32_t run_key,
                                 bool is_read) const {
        return !is_read                      ? 0
               : args.block_tokens_log2 >= 0 ? __ldg(r.table + (run_key >> args.block_tokens_log2))
                                             : __ldg(r.table + run_key / args.block_tokens);
    }

    // shows says whether any of the lane's run is seen.
    __device__ bool shows(const prefill_keys &k, const prefill_walk &w, int32_t in_step) const {
        const int32_t key = w.key + in_step, run_tokens = 1 << args.run_log2;
        return (w.seen >> (in_step / 16) & ((1u << run_tokens / 16) - 1)) != 0 && key < k.end &&
               key + run_tokens > k.first;
    }

    // load_task copies keys and values of a task.  In place of runs that are not seen comes another
    // of the same step: it does no harm, and a box of zeros alone would read address 0.
    __device__ void load_task(const attn_prefill_record &r, const prefill_task &t) {
        prefill_walk w = t.walk;
        const int runs_log2 = 7 - args.run_log2, run_tokens = 1 << args.run_log2;
        const int32_t in_step = (lane & ((1 << runs_log2) - 1)) << args.run_log2;
        int32_t run_key = w.key + in_step;
        bool is_read = shows(t.keys, w, in_step);
        uint32_t entry = entry_of(r, run_key, is_read);
        ptx::grid_wait();          // the table may be read before, but no keys
        int64_t values_offset = 0; // of the values that are still to be copied
        int32_t values_live = 0;
        const auto values_of = [&]() {
            return r.v + t.tile.kv_head * args.v_head_bytes + values_offset;
        };
        for (bool is_first = true, is_last = false; !is_last;) {
            const int32_t key = w.key;
            const uint32_t seen = w.seen;
            int32_t live = min(t.keys.end - run_key, run_tokens);
            const uint32_t in_block = args.block_tokens_log2 >= 0
                                          ? (uint32_t)run_key & (uint32_t)(args.block_tokens - 1)
                                          : (uint32_t)run_key % (uint32_t)args.block_tokens;
            int64_t offset =
                (int64_t)(entry * args.block_stride) + (int64_t)in_block * Traits::kRowBytes;
            const int seen_lane = __ffs((int)__ballot_sync(~0u, is_read)) - 1;
            const int from = is_read ? lane : seen_lane;
            live = __shfl_sync(~0u, live, from);
            offset = __shfl_sync(~0u, offset, from);
            is_last = !prefill_next(t.keys, w, args.block_tokens, lane);
            run_key = w.key + in_step;
            is_read = !is_last && shows(t.keys, w, in_step);
            entry = entry_of(r, run_key, is_read); // comes while the copies are issued

            // Keys go ahead of the values of the step before, which are wanted later.
            copy_keys(r.k + t.tile.kv_head * args.k_head_bytes + offset, live,
                      prefill_step{key, seen, is_last, 0});
            if (!is_first) {
                copy_values(values_of(), values_live);
            }
            is_first = false;
            values_offset = offset;
            values_live = live;
        }
        copy_values(values_of(), values_live);
    }

    __device__ void run() {
        prefill_ring places;
        for (;;) {
            places.wait_full(s.task_full);
            const prefill_task &t = s.tasks[places.index];
            const bool is_end = t.record < 0;
            if (!is_end && !t.is_empty) {
                load_task(s.records[places.index], t);
            }
            __syncwarp();
            if (lane == 0) {
                ptx::mbar_arrive(ptx::s_addr(&s.task_empty[places.index]));
            }
            if (is_end) {
                return;
            }
            places.advance(Traits::kTasks);
        }
    }
};

// prefill_schedule puts tasks and their records into the places.
template <typename Traits>
__device__ void prefill_schedule(typename Traits::smem &s, const prefill_args &args) {
    constexpr int kPieces = (int)sizeof(attn_prefill_record) / 16; // of a record, one a lane
    static_assert(kPieces <= 32, "a warp copies a record at once");
    prefill_ring places;
    prefill_tasks tasks(args);
    const int lane = tasks.lane;
    for (bool is_first = true, is_end = false; !is_end; is_first = false) {
        const prefill_task t = tasks.get();
        is_end = t.record < 0;
        uint4 piece = {};
        if (!is_end && lane < kPieces) {
            piece = __ldg((const uint4 *)&tasks.records[t.record] + lane);
        }
        places.wait_empty(s.task_empty);
        if (!is_end && lane < kPieces) {
            ((uint4 *)&s.records[places.index])[lane] = piece;
        }
        if (lane == 0) {
            s.tasks[places.index] = t;
        }
        __syncwarp();
        if (lane == 0) {
            ptx::mbar_arrive(ptx::s_addr(&s.task_full[places.index]));
        }
        places.advance(Traits::kTasks);
        if (is_first) {
            ptx::grid_wait();
            tasks.take();
        }
        tasks.advance();
    }
    tasks.leave();
}

// prefill_pair_dims returns the two dims of pair p.
__device__ __forceinline__ int2 prefill_pair_dims(int p, const attn_prefill_record &r) {
    return r.flags & ATTN_PREFILL_INTERLEAVED ? make_int2(2 * p, 2 * p + 1)
                                              : make_int2(p, p + r.rotary_dim / 2);
}

template <typename Traits>
struct prefill_query_loader {
    using T = typename Traits::type;
    static constexpr int kThreads = 32 * Traits::kQueryWarps;
    static constexpr int kAtOnce = 32 / Traits::kPieces; // rows that a warp moves at a time

    typename Traits::smem &s;
    const prefill_args &args;
    const int thread; // of kThreads
    const int lane, first_row;

    __device__ prefill_query_loader(typename Traits::smem &smem, const prefill_args &a)
        : s(smem), args(a), thread((int)threadIdx.x - 64), lane(thread % 32),
          first_row(thread / 32 * 64) {}

    // row_of returns where a row of a tile lies, of queries or outputs at `rows`, strides in bytes.
    // NULL = there is no such row: it is neither loaded nor written, and what is computed for it
    // concerns no other.
    __device__ char *row_of(const attn_prefill_record &r, const attn_prefill_tile &t, int row,
                            const void *rows, int64_t token_bytes, int64_t head_bytes) const {
        const int in_tile = prefill_row_token(r, row), head = row - in_tile * r.tile_heads;
        return in_tile < t.tokens && head < t.heads
                   ? (char *)rows + (t.token_first + in_tile) * token_bytes +
                         (t.kv_head * args.group + t.head_first + head) * head_bytes
                   : nullptr;
    }

    __device__ static T *element(unsigned char *s_q, int row, int dim) {
        return (T *)(s_q + prefill_place<Traits>(row, dim / 8) + dim % 8 * 2);
    }

    // turn rotates pairs (x[0], y[0]), (x[1], y[1]) by two angles.
    __device__ static void turn(uint32_t &x, uint32_t &y, float4 angles) {
        const float2 a = ptx::unpack<T>(x), b = ptx::unpack<T>(y);
        x = ptx::pack<T>(fmaf(a.x, angles.x, -b.x * angles.y),
                         fmaf(a.y, angles.z, -b.y * angles.w));
        y = ptx::pack<T>(fmaf(b.x, angles.x, a.x * angles.y), fmaf(b.y, angles.z, a.y * angles.w));
    }

    // rotate_pieces rotates pairs (p, p + rotary_dim / 2), four at a time: 8 bytes, and those that
    // lie rotary_dim / 2 dims behind them.  All heads of a token turn by the same angles.
    __device__ void rotate_pieces(const attn_prefill_record &r, const attn_prefill_tile &t,
                                  unsigned char *s_q, const float2 *angles) const {
        const int num = r.rotary_dim / 8; // of a row
#pragma unroll 1
        for (int i = thread; i < t.tokens * num; i += kThreads) {
            const int token = i / num, dim = (i - token * num) * 4;
            const float4 *from = (const float4 *)(angles + token * (4 * num) + dim);
            const float4 low = __ldg(from), high = __ldg(from + 1);
#pragma unroll 1
            for (int row = token * r.tile_heads, end = row + t.heads; row < end; row++) {
                uint2 *s_x = (uint2 *)element(s_q, row, dim);
                uint2 *s_y = (uint2 *)element(s_q, row, dim + 4 * num);
                uint2 x = *s_x, y = *s_y;
                turn(x.x, y.x, low);
                turn(x.y, y.y, high);
                *s_x = x;
                *s_y = y;
            }
        }
    }

    // rotate_pairs does the same for pairs of any kind, one at a time.
    __device__ void rotate_pairs(const attn_prefill_record &r, const attn_prefill_tile &t,
                                 unsigned char *s_q, const float2 *angles) const {
        const int pairs = r.rotary_dim / 2;
#pragma unroll 1
        for (int i = thread; i < t.tokens * pairs; i += kThreads) {
            const int token = i / pairs, p = i - token * pairs;
            const int2 dims = prefill_pair_dims(p, r);
            const float2 angle = __ldg(angles + token * pairs + p);
            for (int row = token * r.tile_heads; row < token * r.tile_heads + t.heads; row++) {
                T *s_x = element(s_q, row, dims.x), *s_y = element(s_q, row, dims.y);
                const float x = (float)*s_x, y = (float)*s_y;
                *s_x = (T)fmaf(x, angle.x, -y * angle.y);
                *s_y = (T)fmaf(y, angle.x, x * angle.y);
            }
        }
    }

    __device__ void rotate(const attn_prefill_record &r, const attn_prefill_tile &t,
                           unsigned char *s_q) const {
        const float2 *angles = (const float2 *)args.angles + r.angles_first +
                               (int64_t)(t.token_first - r.q_first) * (r.rotary_dim / 2);
        if (r.rotary_dim % 8 == 0 && !(r.flags & ATTN_PREFILL_INTERLEAVED)) {
            rotate_pieces(r, t, s_q, angles);
        } else {
            rotate_pairs(r, t, s_q, angles);
        }
    }

    // negate changes the sign of all queries, for a scale below 0.
    __device__ void negate(unsigned char *s_q) const {
#pragma unroll 1
        for (int i = thread; i < Traits::kConsumers * Traits::kGroupBytes / 4; i += kThreads) {
            ((uint32_t *)s_q)[i] ^= 0x80008000;
        }
    }

    __device__ void load(uint32_t place) const {
        const attn_prefill_record &r = s.records[place];
        const attn_prefill_tile &t = s.tasks[place].tile;
        const uint32_t s_q = ptx::s_addr(s.q[place]);
        const int piece = lane % Traits::kPieces;
#pragma unroll 1
        for (int first = first_row; first < first_row + 64; first += 32) {
            const char *mine = row_of(r, t, first + lane, r.q, r.q_token_bytes, r.q_head_bytes);
#pragma unroll 4
            for (int i = lane / Traits::kPieces; i < 32; i += kAtOnce) {
                const uint64_t q = __shfl_sync(~0u, (uint64_t)(uintptr_t)mine, i);
                if (q) {
                    ptx::cp_async_16(s_q + prefill_place<Traits>(first + i, piece),
                                     (const char *)(uintptr_t)q + piece * 16);
                }
            }
        }
        ptx::cp_async_wait();
        if (r.inv_freq || r.flags & ATTN_PREFILL_NEGATIVE) {
            ptx::bar_sync(BAR_QUERIES, kThreads); // copied
            if (r.flags & ATTN_PREFILL_NEGATIVE) {
                negate(s.q[place]);
                ptx::bar_sync(BAR_QUERIES, kThreads);
            }
            if (r.inv_freq) {
                rotate(r, t, s.q[place]);
            }
        }
        ptx::fence_async_shared();
    }

    // store stores the outputs of this warp's consumer.
    __device__ void store(uint32_t place) const {
        constexpr int kBatch = 4; // reads that are under way together
        const attn_prefill_record &r = s.records[place];
        const uint32_t s_out = ptx::s_addr(s.q[place]);
        const int piece = lane % Traits::kPieces;
#pragma unroll 1
        for (int first = first_row; first < first_row + 64; first += 32) {
            const char *mine = row_of(r, s.tasks[place].tile, first + lane, r.out, r.out_token * 2,
                                      r.out_head * 2);
#pragma unroll 1
            for (int i = lane / Traits::kPieces; i < 32; i += kBatch * kAtOnce) {
                uint4 x[kBatch];
#pragma unroll
                for (int k = 0; k < kBatch; k++) {
                    x[k] =
                        ptx::s_load(s_out + prefill_place<Traits>(first + i + k * kAtOnce, piece));
                }
#pragma unroll
                for (int k = 0; k < kBatch; k++) {
                    const uint64_t out =
                        __shfl_sync(~0u, (uint64_t)(uintptr_t)mine, i + k * kAtOnce);
                    if (out) {
                        *(uint4 *)(uintptr_t)(out + (uint64_t)piece * 16) = x[k];
                    }
                }
            }
        }
    }

    __device__ void release(const uint64_t *barriers, uint32_t place) const {
        __syncwarp();
        if (lane == 0) {
            ptx::mbar_arrive(ptx::s_addr(&barriers[place]));
        }
    }

    // retire stores the outputs of the task that was last loaded to a place.
    __device__ void retire(const prefill_ring &at) const {
        ptx::mbar_wait(ptx::s_addr(&s.out_full[at.index][thread / 32]), at.phase ^ 1);
        store(at.index);
        release(s.task_empty, at.index);
    }

    // run loads as far ahead as there are places, and stores what comes back.
    __device__ void run() {
        prefill_ring at;
        int num = 0; // places in use
        ptx::grid_wait();
        for (bool is_end = false; !is_end;) {
            if (num == Traits::kTasks) {
                retire(at);
            }
            at.wait_full(s.task_full);
            is_end = s.tasks[at.index].record < 0;
            if (!is_end) {
                load(at.index);
                num = min(num + 1, Traits::kTasks);
            }
            release(s.q_full, at.index);
            at.advance(Traits::kTasks);
        }
#pragma unroll 1
        for (int i = 1; i < Traits::kTasks; i++) { // the places behind the end's
            if (num == Traits::kTasks || (int)at.index < num) {
                retire(at);
            }
            at.advance(Traits::kTasks);
        }
    }
};

#endif
