// decode_rope rotates rows in shared memory, in place: the queries of an item, and the new keys of
// a stage.
#ifndef ATTND_ATTENTION_CUDA_DECODE_ROPE_CUH
#define ATTND_ATTENTION_CUDA_DECODE_ROPE_CUH

#include "attention/cuda/attn_math.cuh"
#include "attention/cuda/decode_traits.cuh"

// decode_pair_dims returns the two dims of pair p.
__device__ __forceinline__ int2 decode_pair_dims(int p, const attn_cuda_record &r) {
    return r.flags & ATTN_CUDA_INTERLEAVED ? make_int2(2 * p, 2 * p + 1)
                                           : make_int2(p, p + r.rotary_dim / 2);
}

// decode_rotate_queries rotates all query rows of an item: by all consumers, each a row's pair at a
// time, or by one warp, each lane a pair of all heads.
template <typename Traits, bool kByWarp>
__device__ void decode_rotate_queries(const attn_cuda_record &r, unsigned char *s_queries,
                                      int thread) {
    using T = typename Traits::type;
    constexpr int kThreads = kByWarp ? 32 : Traits::kConsumers;
    const int pairs = r.rotary_dim / 2, rows = kByWarp ? r.heads : 1; // at a time
#pragma unroll 1
    for (int i = thread; i < r.tokens * (kByWarp ? 1 : r.heads) * pairs; i += kThreads) {
        const int first = i / pairs * rows, p = i % pairs, token = decode_token(r, first);
        const int2 dims = decode_pair_dims(p, r);
        const float2 angle =
            attn_angle(r.q_positions ? __ldg(r.q_positions + token) : r.position + token,
                       __ldg(r.inv_freq + p));
#pragma unroll 1
        for (int row = first; row < first + rows; row++) {
            attn_rotate(*(T *)(s_queries + decode_query_at<Traits>(row, 2 * dims.x)),
                        *(T *)(s_queries + decode_query_at<Traits>(row, 2 * dims.y)), angle,
                        r.attention_factor);
        }
    }
}

// decode_append rotates new keys [first, end) in a stage that begins with key stage_key, by one
// warp or by all consumers, and writes them and the new values to the pool when the record is the
// one that appends.
template <typename Traits, bool kByWarp>
__device__ void decode_append(const decode_item &item, const decode_args &args, unsigned char *s_k,
                              unsigned char *s_v, int32_t stage_key, int32_t first, int32_t end,
                              int thread) {
    using T = typename Traits::type;
    constexpr int kPieces = Traits::kRowBytes / 16;
    constexpr int kThreads = kByWarp ? 32 : Traits::kConsumers;
    const attn_cuda_record &r = item.record;
    const int32_t old_len = r.kv_len - r.new_len;
    if (r.inv_freq) {
        const int pairs = r.rotary_dim / 2;
#pragma unroll 1
        for (int i = thread; i < (end - first) * pairs; i += kThreads) {
            const int32_t key = first + i / pairs;
            const int2 dims = decode_pair_dims(i % pairs, r);
            T *s_row = (T *)(s_k + (key - stage_key) * Traits::kRowBytes);
            const int32_t position = r.k_positions ? __ldg(r.k_positions + (key - old_len)) : key;
            attn_rotate(s_row[dims.x], s_row[dims.y],
                        attn_angle(position, __ldg(r.inv_freq + i % pairs)), r.attention_factor);
        }
        decode_fence<Traits>();
        if constexpr (kByWarp) {
            __syncwarp();
        } else {
            ptx::bar_sync(BAR_CONSUMERS, Traits::kConsumers);
        }
    }
    if (!(r.flags & ATTN_CUDA_APPENDS)) {
        return;
    }
#pragma unroll 1
    for (int i = thread; i < (end - first) * kPieces; i += kThreads) {
        const int32_t key = first + i / kPieces;
        const int32_t in_stage = (key - stage_key) * Traits::kRowBytes + i % kPieces * 16;
        const int64_t in_pool =
            (int64_t)(__ldg(r.table + key / args.block_tokens) * args.block_stride) +
            (int64_t)(key % args.block_tokens) * Traits::kRowBytes + i % kPieces * 16;
        *(uint4 *)(r.k + args.shift.k + item.piece.kv_head * args.k_head_bytes + in_pool) =
            *(const uint4 *)(s_k + in_stage);
        *(uint4 *)(r.v + args.shift.v + item.piece.kv_head * args.v_head_bytes + in_pool) =
            *(const uint4 *)(s_v + in_stage);
    }
}

#endif
