// decode_traits holds the constants of the decode kernel and its shared memory.  README.md has the
// picture.
#ifndef ATTND_ATTENTION_CUDA_DECODE_TRAITS_CUH
#define ATTND_ATTENTION_CUDA_DECODE_TRAITS_CUH

#include "attention/cuda/attn_cuda_walk.h"
#include "attention/cuda/decode_instance.h"
#include "attention/cuda/ptx.cuh"

static_assert(sizeof(attn_cuda_head) % 16 == 0 && sizeof(attn_cuda_start) == 16 &&
                  sizeof(attn_cuda_record) == 288 && sizeof(attn_cuda_piece) % 16 == 0,
              "a record is copied in 16-byte pieces");

// decode_item is what one pass of the consumers computes: a piece of a KV head of a record.
struct decode_item {
    attn_cuda_record record;
    attn_cuda_piece piece;
};

// decode_ring is a place in a ring of buffers, each with a barrier "full" and one "empty": an
// index, and how often it came round, odd or even.  One register.
struct decode_ring {
    uint32_t place = 0; // index, and behind 8 bits the phase

    __device__ uint32_t index() const { return place & 0xff; }
    __device__ void advance(uint32_t num) {
        place = index() + 1 == num ? (place & 0x100) ^ 0x100 : place + 1;
    }
    __device__ void wait_full(const uint64_t *full) const {
        ptx::mbar_wait(ptx::s_addr(&full[index()]), place >> 8);
    }
    __device__ void wait_empty(const uint64_t *empty) const {
        ptx::mbar_wait(ptx::s_addr(&empty[index()]), place >> 8 ^ 1);
    }
};

template <int kHeadDim, typename T, bool kBulk>
struct decode_traits {
    using type = T;
    static constexpr int kDim = kHeadDim;
    static constexpr bool kIsBulk = kBulk; // cp.async.bulk, else 16-byte cp.async
    static constexpr int kRowBytes = kHeadDim * 2;
    static constexpr int kTile = ATTN_CUDA_TILE_TOKENS; // keys that a warp takes at a time

    // A stage holds K and V of four tiles, or of eight with head_dim 64: 32 KiB.
    static constexpr int kWarps = kBulk ? 8 : 4; // consumers
    static constexpr int kStageTiles = 4 * 128 / kHeadDim;
    static constexpr int kStageTokens = kStageTiles * kTile;
    static constexpr int kStageTokensLog2 = kStageTokens == 128 ? 7 : 6;
    static constexpr int kStageBytes = kStageTokens * kRowBytes; // of K, and of V
    static_assert(1 << kStageTokensLog2 == kStageTokens, "stages begin at multiples of their size");
    static constexpr int kStages = kBulk ? 5 : 2; // 160 KiB; 64 KiB suit any GPU since sm_80
    // Stages to prefetch while the launch before ends.  More take the memory from its merges.
    static constexpr int kEarlyStages = kBulk ? 3 : 0;
    // Stages on their way at a time; the others hold what has landed, for when the consumers pass
    // from one head to the next.  With more, requests queue up in front of the memory, and the SMs
    // end further apart.
    static constexpr int kOnTheWay = 2;
    static constexpr int kConsumers = 32 * kWarps; // threads
    // Warps beside the consumers: one loads keys and one items, and where there are registers for
    // them, one rotates queries and one merges the consumers' states (decode_aside.cuh).
    static constexpr bool kHasAside = kBulk;
    static constexpr int kThreads = kConsumers + (kHasAside ? 128 : 64);
    static constexpr int kFullArrivals = kBulk ? 1 : 33; // the lanes' copies, and lane 0 itself
    static constexpr int kItemArrivals = 33;             // queries are copied by all lanes

    // Items wait in up to four places: the queries of two of the largest items, or of four.  When
    // no item has more than 8 query rows, the room behind four such places holds what the consumers
    // leave to be merged aside: sums of kAsideRows query rows of each warp.
    static constexpr int kQueryBytes = 2 * ATTN_CUDA_QUERY_ROWS * kRowBytes;
    static constexpr int kItems = 4;
    static constexpr int kSmallBytes = 8 * kRowBytes; // of queries
    static constexpr int kAsideRows =
        kHasAside ? (kQueryBytes - kItems * kSmallBytes) / (kWarps * kHeadDim * 4) : 0;

    static constexpr int kSteps = kHeadDim / 32; // 16-byte pieces of a key that a lane takes
    static constexpr int kOuts = kHeadDim / 16;  // matrix products that make an output row

    struct smem {
        struct {
            alignas(128) unsigned char k[kStageBytes], v[kStageBytes];
        } stages[kStages];
        alignas(128) unsigned char queries[kQueryBytes];
        alignas(16) decode_item items[kItems];
        // (maximum, denominator) of a warp's query rows; from 8 on, of those to be merged aside.
        float2 states[kWarps][16];
        uint64_t full[kStages], empty[kStages];
        // An item is loaded, its queries rotated, it is done.
        uint64_t item_loaded[kItems], item_full[kItems], item_empty[kItems];
        uint64_t aside_full, aside_empty; // states to be merged aside
        // Where each warp stands.
        decode_ring rings[kWarps], item_rings[kWarps], aside_rings[kWarps];
        decode_item shared_item; // the last part of a head that begins in another CTA
        uint32_t has_begun;      // what came before this launch has ended; a hint
        // Portable: which runs of a stage the item's block mask lists, a bit each.
        uint32_t listed[kStages];
    };
    static_assert(sizeof(smem) <= (kBulk ? 227 : 99) * 1024, "what a CTA can have");
    static_assert(kStageBytes % 128 == 0, "bulk copies are slow when they cross lines");
};

// Named barriers.
enum decode_barrier { BAR_BEGIN = 0, BAR_CONSUMERS = 1, BAR_ASIDE = 2 };

// decode_num_items is how many places for items there are: the queries of one take a quarter of
// smem.queries, or half.
__device__ __forceinline__ uint32_t decode_num_items(uint32_t slot_rows) {
    return slot_rows <= ATTN_CUDA_QUERY_ROWS / 2 ? 4 : 2;
}

// decode_place is where the queries of an item lie.
template <typename Traits>
__device__ __forceinline__ uint32_t decode_place(uint32_t index, uint32_t slot_rows) {
    return index * (uint32_t)(slot_rows <= 8 ? Traits::kSmallBytes
                                             : Traits::kQueryBytes / decode_num_items(slot_rows));
}

// decode_is_aside is whether an item's states are merged aside.  Not those of the CTA's last piece:
// all consumers together are quicker.
template <typename Traits>
__device__ __forceinline__ bool decode_is_aside(const decode_item &item) {
    return (int)item.piece.slot_rows <= Traits::kAsideRows && item.piece.num_tiles > 0 &&
           !item.piece.is_last && item.record.tokens > 0;
}

// decode_is_listed is whether the block mask lets the item see tile n of a stage.
template <typename Traits>
__device__ __forceinline__ bool decode_is_listed(const typename Traits::smem &s,
                                                 const decode_args &args, const decode_ring &stage,
                                                 int n) {
    if constexpr (Traits::kIsBulk) {
        return true;
    } else {
        return s.listed[stage.index()] >> (n * Traits::kTile >> args.run_tokens_log2) & 1;
    }
}

// decode_token returns the token of a query row.
__device__ __forceinline__ int decode_token(const attn_cuda_record &r, int row) {
    return (int)((uint32_t)row * r.heads_inverse >> 16);
}

// decode_query_at is where byte `byte` of a query row lies.  Odd rows have their 64-byte halves of
// 128 exchanged, so that eight lanes that read four pieces of each of two rows hit all banks.
template <typename Traits>
__device__ __forceinline__ uint32_t decode_query_at(int row, int byte) {
    return (uint32_t)(row * Traits::kRowBytes + (byte ^ (row & 1) << 6));
}

// decode_fence orders this thread's stores to a buffer before the copies that fill it next.
template <typename Traits>
__device__ __forceinline__ void decode_fence() {
    if constexpr (Traits::kIsBulk) {
        ptx::fence_async_shared();
    }
}

// decode_release reports to a buffer's barrier that all lanes of the warp are done with it.
__device__ __forceinline__ void decode_release(const uint64_t *bars, const decode_ring &at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ptx::mbar_arrive(ptx::s_addr(&bars[at.index()]));
    }
}

// decode_grid_wait waits for what came before this launch, which may have begun early.  The plan
// and the block tables alone may be read before: the kernel that this one overlaps does not write
// them (attn_cuda.h).
template <typename Traits>
__device__ __forceinline__ void decode_grid_wait() {
    if constexpr (Traits::kIsBulk) {
        ptx::grid_wait();
    }
}

// decode_begin waits for that, and for the CTA's barriers.
template <typename Traits>
__device__ __forceinline__ void decode_begin() {
    ptx::bar_sync(BAR_BEGIN, Traits::kThreads - (Traits::kHasAside ? 32 : 0)); // but who rotates
    decode_grid_wait<Traits>();
}

#endif
