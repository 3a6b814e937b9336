// prefill_load is the first warpgroup of the prefill kernel:
//     warp 0      copies keys and values, step by step, by tensor maps, which leave tiles swizzled
//                 as the products read them
//     warp 1      takes tasks, and finds what each consumer sees
//     warps 2, 3  copy the queries of a task, and store the outputs, which the consumers leave in
//                 their place; each has the rows of every other consumer.  Dense ones are moved by
//                 tensor maps, others row by row, by 16-byte cp.async
// All run ahead of the consumers as far as the buffers go: tasks and queries by their places, keys
// by the stages, across tasks.
//
// Runs.  A box of 64 columns by 2^run_log2 tokens of one block is one copy.  The map's dimension of
// tokens ends with the run, so a box that begins `live` tokens before that end, of which address
// and all are moved back by as much, reads the live tokens alone and zeros behind them.  So nothing
// behind kv_len is read, and no NaN can come from there.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_LOAD_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_LOAD_CUH

#include "attention/cuda/prefill_traits.cuh"

// prefill_spot is a prefill_ring of kNum places in one register, for loaders.
template <uint32_t kNum>
struct prefill_spot {
    uint32_t count = 0; // of places so far

    __device__ __forceinline__ uint32_t index() const { return count % kNum; }
    __device__ __forceinline__ uint32_t phase() const { return count / kNum & 1; }
    __device__ __forceinline__ void wait_full(const uint64_t *full) const {
        ptx::mbar_wait(ptx::s_addr(&full[index()]), phase());
    }
    __device__ __forceinline__ void wait_empty(const uint64_t *empty) const {
        ptx::mbar_wait(ptx::s_addr(&empty[index()]), phase() ^ 1);
    }
};

// prefill_lane returns the lane, read anew: loaders have few registers.
__device__ __forceinline__ int prefill_lane() {
    return ptx::thread() % 32;
}

// prefill_steps returns how many steps keys [first, end) reach over.
__device__ __forceinline__ uint32_t prefill_steps(int32_t first, int32_t end) {
    return (uint32_t)((end + ATTN_PREFILL_KEYS - 1) / ATTN_PREFILL_KEYS -
                      first / ATTN_PREFILL_KEYS);
}

// prefill_next moves a walk to its next step, of which some key is seen; false after the last.
__device__ __forceinline__ bool prefill_next(const prefill_keys &keys, prefill_walk &w,
                                             int32_t block_tokens) {
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
        if (min(w.key + ATTN_PREFILL_KEYS, last + block_tokens) <= keys.first) {
            return false;
        }
        const int32_t i = w.high - 1 - prefill_lane();
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
    uint32_t record = 0, record_end = 0; // where the record's tasks end
    uint32_t index;                      // of the task

    __device__ explicit prefill_tasks(const prefill_args &a) : args(a), index(blockIdx.x) {}

    __device__ const attn_prefill_ends *ends() const {
        return (const attn_prefill_ends *)((const char *)args.plan + args.plan->ends_at);
    }
    __device__ const attn_prefill_record *records() const {
        return (const attn_prefill_record *)((const char *)args.plan + args.plan->records_at);
    }

    // advance takes another task.  The counter is the kernel's in front until that one has ended.
    __device__ void advance() {
        uint32_t taken = 0;
        if (prefill_lane() == 0) {
            taken = atomicAdd(&args.counters[0], 1);
        }
        index = gridDim.x + __shfl_sync(~0u, taken, 0);
    }

    // find moves to the record of the task.  Tasks and records are taken in ascending order.
    __device__ void find() {
        while (index >= record_end) {
            const uint32_t i = record + (uint32_t)prefill_lane();
            const uint32_t end = i < args.plan->num_records ? __ldg(&ends()[i].tasks) : ~0u;
            const int behind = __ffs((int)__ballot_sync(~0u, index < end)) - 1;
            record_end = __shfl_sync(~0u, end, behind < 0 ? 31 : behind);
            record += behind < 0 ? 32 : (uint32_t)behind;
        }
    }

    // get returns the task; record -1 after the last.
    __device__ prefill_task get() {
        prefill_task t = {};
        t.record = -1;
        if (index >= args.plan->num_tasks) {
            return t;
        }
        find();
        const attn_prefill_record &r = records()[record];
        t.record = (int32_t)record;
        const uint32_t first = record > 0 ? __ldg(&ends()[record - 1].tasks) : 0;
        t.tile = attn_prefill_tile_of(&r, (int32_t)(index - first), args.group);
        begin(r, t, (index - first) % 2);
        t.is_empty = !prefill_next(t.keys, t.walk, args.block_tokens);
        return t;
    }

    // begin finds the keys of a task, and begins a walk before its first step.  Where keys are
    // shared they are those of a half, 0 or 1.
    __device__ void begin(const attn_prefill_record &r, prefill_task &task, uint32_t half) const {
        const attn_prefill_tile &t = task.tile;
        prefill_keys &keys = task.keys;
        keys.first = max(r.seen_first + t.token_first, 0);
        keys.end = min(r.seen_end + t.token_first + t.tokens - 1, r.kv_len);
        if (t.tokens == 0 || keys.first >= keys.end) {
            keys.first = keys.end = 0;
        }
        if (r.shares_keys) { // there is no block mask
            const int32_t middle = (keys.first / ATTN_PREFILL_KEYS +
                                    (int32_t)prefill_steps(keys.first, keys.end) / 2) *
                                   ATTN_PREFILL_KEYS;
            keys.first = half > 0 ? max(keys.first, middle) : keys.first;
            keys.end = half > 0 ? keys.end : min(keys.end, middle);
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
        if (prefill_lane() == 0 && atomicAdd(&args.counters[1], 1) == gridDim.x - 1) {
            args.counters[0] = 0;
            args.counters[1] = 0;
        }
    }
};

template <typename Traits>
struct prefill_loader {
    typename Traits::smem &s;
    const prefill_args &args;
    prefill_spot<Traits::kStages> ring; // where it stands among stages

    __device__ prefill_loader(typename Traits::smem &smem, const prefill_args &a)
        : s(smem), args(a) {}

    // begin_copy lets a stage's barrier wait for a copy of a whole stage.
    __device__ void begin_copy(const uint64_t *full) const {
        if (prefill_lane() == 0) {
            ptx::mbar_arrive_expect(ptx::s_addr(&full[ring.index()]), Traits::kStageBytes);
        }
        __syncwarp();
    }

    // copy copies the lane's run of a step, `live` tokens from g_run on and zeros behind them.
    __device__ void copy(uint32_t s_tiles, const char *g_run, int32_t live, uint32_t s_bar) const {
        const int runs_log2 = 7 - args.run_log2;
        const int run = prefill_lane() & ((1 << runs_log2) - 1), half = prefill_lane() >> runs_log2;
        if (half < Traits::kHalves) {
            const int32_t skip = (1 << args.run_log2) - live;
            const uint64_t at =
                (uint64_t)(uintptr_t)g_run - args.map.base - (uint64_t)skip * Traits::kRowBytes;
            const uint32_t s_dst = s_tiles + (uint32_t)half * Traits::kTileBytes +
                                   ((uint32_t)run << args.run_log2) * 128;
            ptx::tensor_copy(s_dst, &args.map, half * 64, skip, (int32_t)((uint32_t)at >> 4),
                             (int32_t)(at >> 32), s_bar);
        }
    }

    __device__ void copy_keys(const char *g_run, int32_t live, const prefill_step &step) const {
        ring.wait_empty(s.k_empty);
        if (prefill_lane() == 0) {
            s.steps[ring.index()] = step;
        }
        begin_copy(s.k_full);
        copy(ptx::s_addr(s.k[ring.index()]), g_run, live, ptx::s_addr(&s.k_full[ring.index()]));
    }

    __device__ void copy_values(const char *g_run, int32_t live) const {
        ring.wait_empty(s.v_empty);
        begin_copy(s.v_full);
        copy(ptx::s_addr(s.v[ring.index()]), g_run, live, ptx::s_addr(&s.v_full[ring.index()]));
    }

    // in_step returns where the lane's run begins in a step.
    __device__ int32_t in_step() const {
        return prefill_lane() << args.run_log2 & (ATTN_PREFILL_KEYS - 1);
    }

    // entry_of returns the table entry of the lane's run of the step at `key`.
    __device__ uint32_t entry_of(const attn_prefill_record &r, int32_t key, bool is_read) const {
        const int32_t run_key = key + in_step();
        return !is_read                      ? 0
               : args.block_tokens_log2 >= 0 ? __ldg(r.table + (run_key >> args.block_tokens_log2))
                                             : __ldg(r.table + run_key / args.block_tokens);
    }

    // shows says whether any of the lane's run is seen.
    __device__ bool shows(const prefill_keys &k, const prefill_walk &w) const {
        const int32_t key = w.key + in_step(), run_tokens = 1 << args.run_log2;
        return (w.seen >> (in_step() / 16) & ((1u << run_tokens / 16) - 1)) != 0 && key < k.end &&
               key + run_tokens > k.first;
    }

    // load_task copies keys and values of a task.  In place of runs that are not seen comes another
    // of the same step: it does no harm, and a box of zeros alone would read address 0.
    __device__ void load_task(const attn_prefill_record &r, const prefill_task &t) {
        prefill_walk w = t.walk;
        bool is_read = shows(t.keys, w);
        uint32_t entry = entry_of(r, w.key, is_read);
        ptx::grid_wait(); // the table may be read before, but no keys
        for (bool is_last = false; !is_last;) {
            const int32_t key = w.key, run_key = key + in_step();
            const uint32_t seen = w.seen;
            int32_t live = min(t.keys.end - run_key, 1 << args.run_log2);
            const uint32_t in_block = args.block_tokens_log2 >= 0
                                          ? (uint32_t)run_key & (uint32_t)(args.block_tokens - 1)
                                          : (uint32_t)run_key % (uint32_t)args.block_tokens;
            int64_t offset =
                (int64_t)(entry * args.block_stride) + (int64_t)in_block * Traits::kRowBytes;
            const int seen_lane = __ffs((int)__ballot_sync(~0u, is_read)) - 1;
            const int from = is_read ? prefill_lane() : seen_lane;
            live = __shfl_sync(~0u, live, from);
            offset = __shfl_sync(~0u, offset, from);
            is_last = !prefill_next(t.keys, w, args.block_tokens);
            is_read = !is_last && shows(t.keys, w);
            entry = entry_of(r, w.key, is_read); // comes while the copies are issued
            copy_keys(r.k + t.tile.kv_head * args.k_head_bytes + offset, live,
                      prefill_step{key, seen, is_last, 0});
            if (prefill_lane() == 0) {
                ptx::s_put(&s.steps_begun, s.steps_begun + 1);
            }
            copy_values(r.v + t.tile.kv_head * args.v_head_bytes + offset, live);
            ring.count++;
        }
        if (prefill_lane() == 0) {
            ptx::s_put(&s.steps_begun, t.steps_end); // a block mask may have hidden some
        }
    }

    __device__ void run() {
        prefill_spot<Traits::kTasks> places;
        for (;;) {
            places.wait_full(s.task_full);
            const prefill_task &t = s.tasks[places.index()];
            const bool is_end = t.record < 0;
            if (!is_end && !t.is_empty) {
                load_task(s.records[places.index()], t);
            }
            __syncwarp();
            if (prefill_lane() == 0) {
                ptx::mbar_arrive(ptx::s_addr(&s.task_empty[places.index()]));
            }
            if (is_end) {
                return;
            }
            places.count++;
        }
    }
};

// prefill_span_of returns what a consumer's rows see; nothing when there are none.
__device__ __forceinline__ prefill_span prefill_span_of(const attn_prefill_record &r,
                                                        const attn_prefill_tile &t, int consumer) {
    const int low = prefill_row_token(r, consumer * 64);
    const int high = min(prefill_row_token(r, consumer * 64 + 63), t.tokens - 1);
    const int32_t first = r.seen_first + t.token_first, end = r.seen_end + t.token_first;
    return prefill_span{first + low, low < t.tokens ? min(end + high, r.kv_len) : 0, first + high,
                        min(end + low, r.kv_len)};
}

// prefill_schedule puts tasks and their records into the places.  It takes a task as late as can
// be, when few steps of those before are still to be loaded: what a CTA has taken no other can, and
// some would end late.
template <typename Traits>
__device__ void prefill_schedule(typename Traits::smem &s, const prefill_args &args) {
    constexpr int kPieces = (int)sizeof(attn_prefill_record) / 16; // of a record, one a lane
    static_assert(kPieces <= 32, "a warp copies a record at once");
    prefill_spot<Traits::kTasks> places;
    prefill_tasks tasks(args);
    uint32_t steps = 0; // of the tasks taken
    for (bool is_end = false; !is_end;) {
        prefill_task t = tasks.get();
        is_end = t.record < 0;
        t.steps_end = steps += t.is_empty ? 0 : prefill_steps(t.keys.first, t.keys.end);
        places.wait_empty(s.task_empty);
        if (!is_end && prefill_lane() < kPieces) {
            ((uint4 *)&s.records[places.index()])[prefill_lane()] =
                __ldg((const uint4 *)&tasks.records()[t.record] + prefill_lane());
        }
        if (prefill_lane() == 0) {
            s.tasks[places.index()] = t;
        }
        __syncwarp();
        if (!is_end && prefill_lane() < PREFILL_CONSUMERS) {
            s.spans[places.index()][prefill_lane()] =
                prefill_span_of(s.records[places.index()], t.tile, prefill_lane());
        }
        __syncwarp();
        if (prefill_lane() == 0) {
            ptx::mbar_arrive(ptx::s_addr(&s.task_full[places.index()]));
        }
        places.count++;
        if (places.count == 1) {
            ptx::grid_wait();
        }
        if (!is_end) {
            while (steps - ptx::s_get(&s.steps_begun) > Traits::kStepsAhead) {
                __nanosleep(100);
            }
            tasks.advance();
        }
    }
    tasks.leave();
}

template <typename Traits>
struct prefill_query_loader {
    static constexpr int kAtOnce = 32 / Traits::kPieces; // rows that a warp moves at a time

    typename Traits::smem &s;
    const prefill_args &args;

    __device__ prefill_query_loader(typename Traits::smem &smem, const prefill_args &a)
        : s(smem), args(a) {}

    static __device__ int warp() { return ptx::thread() / 32 - 2; } // of kQueryWarps

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

    __device__ void release(const uint64_t *barriers, uint32_t place) const {
        __syncwarp();
        if (prefill_lane() == 0) {
            ptx::mbar_arrive(ptx::s_addr(&barriers[place]));
        }
    }

    // box is the rows of a consumer where they lie densely: it ends with the tile's tokens, so that
    // what the map shows of it begins at token `skip`, and place `at` lies as much before.
    struct box {
        int32_t skip;
        uint64_t at;
        bool is_there; // false: no rows, and a box wholly outside faults
    };

    __device__ box box_of(const attn_prefill_record &r, const attn_prefill_tile &t, int consumer,
                          const void *rows) const {
        const int32_t tokens = ATTN_PREFILL_ROWS / args.group, first = consumer * tokens;
        const int64_t row = ((int64_t)t.token_first + first) * args.kv_heads + t.kv_head;
        box x;
        x.skip = max(first + tokens - t.tokens, 0);
        x.is_there = x.skip < tokens;
        x.at = (uint64_t)(uintptr_t)rows - args.rows.base +
               (row - (int64_t)x.skip * args.kv_heads) * args.group * Traits::kRowBytes;
        return x;
    }

    // copy_box copies dense queries of a consumer, and reports them to s_bar.
    __device__ void copy_box(uint32_t place, int consumer, uint32_t s_bar) const {
        const attn_prefill_record &r = s.records[place];
        const box x = box_of(r, s.tasks[place].tile, consumer, r.q);
        if (prefill_lane() == 0 && x.is_there) {
            ptx::mbar_expect(s_bar, Traits::kGroupBytes);
        }
        __syncwarp();
        if (x.is_there && prefill_lane() < Traits::kHalves) {
            ptx::tensor_copy(ptx::s_addr(s.q[place]) + consumer * Traits::kGroupBytes +
                                 prefill_lane() * Traits::kQueryTileBytes,
                             &args.rows, prefill_lane() * 64, 0, x.skip,
                             (int32_t)((uint32_t)x.at >> 4), (int32_t)(x.at >> 32), s_bar);
        }
    }

    // copy_tokens does the same token by token.
    __device__ void copy_tokens(uint32_t place, int consumer, uint32_t s_bar) const {
        const attn_prefill_record &r = s.records[place];
        const attn_prefill_tile &t = s.tasks[place].tile;
        const int most = ATTN_PREFILL_ROWS / args.group, first = consumer * most;
        const int num = min(t.tokens - first, most);
        if (prefill_lane() == 0 && num > 0) {
            ptx::mbar_expect(s_bar, (uint32_t)(num * args.group * Traits::kRowBytes));
        }
        __syncwarp();
#pragma unroll 1
        for (int i = prefill_lane(); i < num * Traits::kHalves; i += 32) {
            const int token = i / Traits::kHalves, half = i % Traits::kHalves;
            const uint64_t at = (uint64_t)(uintptr_t)r.q - args.token.base +
                                (uint64_t)((t.token_first + first + token) * r.q_token_bytes +
                                           t.kv_head * args.group * Traits::kRowBytes);
            ptx::tensor_copy(ptx::s_addr(s.q[place]) + consumer * Traits::kGroupBytes +
                                 half * Traits::kQueryTileBytes + token * args.group * 128,
                             &args.token, half * 64, 0, 0, (int32_t)((uint32_t)at >> 4),
                             (int32_t)(at >> 32), s_bar);
        }
    }

    // copy_boxes copies queries by maps; q_full, at which it arrives, waits for them.
    __device__ void copy_boxes(uint32_t place) const {
        const uint32_t s_bar = ptx::s_addr(&s.q_full[place]);
#pragma unroll 1
        for (int n = warp(); n < Traits::kConsumers; n += Traits::kQueryWarps) {
            if (s.records[place].flags & ATTN_PREFILL_DENSE_Q) {
                copy_box(place, n, s_bar);
            } else {
                copy_tokens(place, n, s_bar);
            }
        }
        if (prefill_lane() == 0) {
            ptx::mbar_arrive(s_bar);
        }
    }

    // store_box stores outputs of a consumer densely.
    __device__ void store_box(uint32_t place, int consumer) const {
        const attn_prefill_record &r = s.records[place];
        const box x = box_of(r, s.tasks[place].tile, consumer, r.out);
        if (x.is_there && prefill_lane() < Traits::kHalves) {
            ptx::tensor_store(ptx::s_addr(s.q[place]) + consumer * Traits::kGroupBytes +
                                  prefill_lane() * Traits::kQueryTileBytes,
                              &args.rows, prefill_lane() * 64, 0, x.skip,
                              (int32_t)((uint32_t)x.at >> 4), (int32_t)(x.at >> 32));
        }
    }

    // next_rows returns the 32 rows of this warp behind those from `first` on.
    static __device__ int next_rows(int first) {
        return first + (first % 64 == 0 ? 32 : 64 * Traits::kQueryWarps - 32);
    }

    // copy_rows copies queries row by row.
    __device__ void copy_rows(uint32_t place) const {
        const attn_prefill_record &r = s.records[place];
        const uint32_t s_q = ptx::s_addr(s.q[place]);
        const int piece = prefill_lane() % Traits::kPieces;
#pragma unroll 1
        for (int first = 64 * warp(); first < Traits::kRows; first = next_rows(first)) {
            const char *mine = row_of(r, s.tasks[place].tile, first + prefill_lane(), r.q,
                                      r.q_token_bytes, r.q_head_bytes);
#pragma unroll 1
            for (int i = prefill_lane() / Traits::kPieces; i < 32; i += kAtOnce) {
                const uint64_t q = __shfl_sync(~0u, (uint64_t)(uintptr_t)mine, i);
                if (q) {
                    ptx::cp_async_16(s_q + prefill_place<Traits>(first + i, piece),
                                     (const char *)(uintptr_t)q + piece * 16);
                }
            }
        }
        ptx::cp_async_wait();
    }

    // load loads this warp's queries of a task, and arrives at q_full.
    __device__ void load(uint32_t place) const {
        if (s.records[place].flags & ATTN_PREFILL_TOKENS_Q) {
            copy_boxes(place);
        } else {
            copy_rows(place);
            ptx::fence_async_shared();
            release(s.q_full, place);
        }
    }

    // store_rows stores outputs of a consumer row by row.
    __device__ void store_rows(uint32_t place, int consumer) const {
        constexpr int kBatch = 2; // reads that are under way together
        const attn_prefill_record &r = s.records[place];
        const uint32_t s_out = ptx::s_addr(s.q[place]);
        const int piece = prefill_lane() % Traits::kPieces;
#pragma unroll 1
        for (int first = 64 * consumer; first < 64 * consumer + 64; first += 32) {
            const char *mine = row_of(r, s.tasks[place].tile, first + prefill_lane(), r.out,
                                      r.out_token * 2, r.out_head * 2);
#pragma unroll 1
            for (int i = prefill_lane() / Traits::kPieces; i < 32; i += kBatch * kAtOnce) {
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
        ptx::fence_async_shared(); // read, before other queries are copied there
    }

    // retire stores the outputs of the task that was last loaded to a place.
    __device__ void retire(const prefill_spot<Traits::kTasks> &at) const {
        const bool is_dense = s.records[at.index()].flags & ATTN_PREFILL_DENSE_OUT;
#pragma unroll 1
        for (int n = warp(); n < Traits::kConsumers; n += Traits::kQueryWarps) {
            ptx::mbar_wait(ptx::s_addr(&s.out_full[at.index()][n]), at.phase() ^ 1);
            if (!s.has_out[at.index()][n]) {
                continue;
            }
            if (is_dense) {
                store_box(at.index(), n);
            } else {
                store_rows(at.index(), n);
            }
        }
        ptx::tensor_stores_read();
        release(s.task_empty, at.index());
    }

    // run loads as far ahead as there are places, and stores what comes back.
    __device__ void run() {
        prefill_spot<Traits::kTasks> at;
        ptx::grid_wait();
        for (bool is_end = false; !is_end; at.count++) {
            if (at.count >= Traits::kTasks) {
                retire(at);
            }
            at.wait_full(s.task_full);
            is_end = s.tasks[at.index()].record < 0;
            if (is_end) {
                release(s.q_full, at.index());
            } else {
                load(at.index());
            }
        }
#pragma unroll 1
        for (int i = 1; i < Traits::kTasks; i++, at.count++) { // the places behind the end's
            if (at.count >= Traits::kTasks) {
                retire(at);
            }
        }
    }
};

#endif
