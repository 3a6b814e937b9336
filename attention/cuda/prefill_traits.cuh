// prefill_traits holds the constants of the prefill kernel and its shared memory.  README.md has
// the picture.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_TRAITS_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_TRAITS_CUH

#include "attention/cuda/attn_prefill.h"
#include "attention/cuda/prefill_instance.h"
#include "attention/cuda/wgmma.cuh"

static_assert(sizeof(attn_prefill_record) % 16 == 0 && sizeof(attn_prefill_head) % 16 == 0,
              "a record is copied in 16-byte pieces");

// prefill_keys is which keys a task sees, prefill_walk where one stands among them: step after
// step, from the last to the first.
struct prefill_keys {
    int32_t first, end;     // keys that causal and window show
    const uint32_t *blocks; // NULL = no block mask; else those from `low` on are listed
    int32_t low;
    int32_t reserved;
};

struct prefill_walk {
    int32_t key;   // of the step
    uint32_t seen; // of the step, as in prefill_step
    int32_t high;  // listed blocks [low, high) are still ahead
};

enum { PREFILL_CONSUMERS = 3 }; // warpgroups that compute, 64 query rows each

// prefill_span is which keys the query rows of a consumer see.
struct alignas(16) prefill_span {
    int32_t first, end;         // some row
    int32_t all_first, all_end; // every row, but for a block mask
};

// prefill_task is a tile of a KV head of a record.
struct prefill_task {
    int32_t record;   // -1 = there are no more
    int32_t is_empty; // no key is seen
    attn_prefill_tile tile;
    prefill_walk walk;  // at its first step
    uint32_t steps_end; // steps of this task and all before it, as if a block mask hid none or all
    prefill_keys keys;
};

// prefill_step is what the consumers know of 128 keys in a stage.
struct alignas(16) prefill_step {
    int32_t key;      // the first
    uint32_t seen;    // bit b: the block mask shows keys [16 b, 16 b + 16) of them
    uint32_t is_last; // of the task
    uint32_t reserved;
};

// prefill_ring is a place in a ring of buffers, each with a barrier "full" and one "empty".
struct prefill_ring {
    uint32_t index = 0, phase = 0;

    __device__ __forceinline__ void advance(uint32_t num) {
        index++;
        if (index == num) {
            index = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ void wait_full(const uint64_t *full) const {
        ptx::mbar_wait(ptx::s_addr(&full[index]), phase);
    }
    __device__ __forceinline__ void wait_empty(const uint64_t *empty) const {
        ptx::mbar_wait(ptx::s_addr(&empty[index]), phase ^ 1);
    }
};

template <int kHeadDim, typename T>
struct prefill_traits {
    using type = T;
    static constexpr int kDim = kHeadDim;
    static constexpr int kRowBytes = kHeadDim * 2;
    static constexpr int kHalves = kHeadDim / 64; // tiles of 64 columns side by side
    static constexpr int kKeys = ATTN_PREFILL_KEYS;
    static constexpr int kPieces = kRowBytes / 16; // 16-byte pieces of a row

    // Warpgroups: the first one loads, each other computes 64 query rows.
    static constexpr int kConsumers = PREFILL_CONSUMERS;
    static constexpr int kRows = 64 * kConsumers;
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kConsumerWarps = 4 * kConsumers;
    static constexpr int kQueryWarps = 2; // that load queries and store outputs
    static constexpr int kLoaderRegisters = 32;
    static constexpr int kConsumerRegisters = 160;
    static_assert(kLoaderRegisters + kConsumers * kConsumerRegisters <= 65536 / 128,
                  "the registers of an SM");

    static constexpr int kStages = kHeadDim == 128 ? 2 : 4; // of keys, and of values
    static constexpr int kTileBytes = kKeys * 128;          // a tile of keys or values
    static constexpr int kStageBytes = kHalves * kTileBytes;
    static constexpr int kQueryTileBytes = 64 * 128;
    static constexpr int kGroupBytes = kHalves * kQueryTileBytes; // queries of a warpgroup
    static constexpr int kTasks = kHeadDim == 128 ? 2 : 3;        // under way, as many as fit
    // A task is taken when at most so many steps of those before are still to be loaded.
    static constexpr int kStepsAhead = 3;

    struct smem {
        alignas(1024) unsigned char q[kTasks][kConsumers * kGroupBytes]; // then the outputs
        alignas(1024) unsigned char k[kStages][kStageBytes];
        alignas(1024) unsigned char v[kStages][kStageBytes];
        alignas(16) attn_prefill_record records[kTasks];
        alignas(16) prefill_step steps[kStages];
        alignas(16) prefill_span spans[kTasks][kConsumers];
        prefill_task tasks[kTasks];
        uint64_t k_full[kStages], k_empty[kStages];
        uint64_t v_full[kStages], v_empty[kStages];
        uint64_t task_full[kTasks];            // task and record are there
        uint64_t q_full[kTasks];               // its queries too
        uint32_t steps_begun;                  // of all tasks: their keys are being loaded, or were
        uint64_t out_full[kTasks][kConsumers]; // the outputs of a consumer are, in their place
        uint64_t task_empty[kTasks];
        bool has_out[kTasks][kConsumers]; // else another CTA has the outputs of the consumer's rows
    };
    static_assert(sizeof(smem) <= 227 * 1024, "what a CTA can have");
};

// Named barriers; 0 is __syncthreads.
enum prefill_barrier {
    BAR_TURN = 1,     // + n: consumer n may add values up
    BAR_CONSUMER = 4, // + n: the warps of consumer n
};

// prefill_row_token returns the token of a query row, counted from the tile's first.
__device__ __forceinline__ int prefill_row_token(const attn_prefill_record &r, int row) {
    return (int)((uint32_t)row * r.heads_inverse >> 16);
}

// prefill_place is where piece `piece` of query row `row` of a tile lies.
template <typename Traits>
__device__ __forceinline__ uint32_t prefill_place(int row, int piece) {
    return (uint32_t)(row / 64 * Traits::kGroupBytes + piece / 8 * Traits::kQueryTileBytes +
                      row % 64 * 128 + ((piece ^ row) & 7) * 16);
}

#endif
