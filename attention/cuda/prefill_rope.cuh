// prefill_rope turns pairs of dims: those of queries in shared memory, by the consumer whose they
// are, and those of new keys on their way to the pool (prefill_prepare.cuh).
#ifndef ATTND_ATTENTION_CUDA_PREFILL_ROPE_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_ROPE_CUH

#include "attention/cuda/attn_math.cuh"
#include "attention/cuda/prefill_traits.cuh"

// prefill_pair_dims returns the two dims of pair p.
__device__ __forceinline__ int2 prefill_pair_dims(int p, const attn_prefill_record &r) {
    return r.flags & ATTN_PREFILL_INTERLEAVED ? make_int2(2 * p, 2 * p + 1)
                                              : make_int2(p, p + r.rotary_dim / 2);
}

// prefill_part makes of two words, (x, y) of two pairs that lie side by side, the xs and the ys of
// both; and the words of these.
__device__ __forceinline__ void prefill_part(uint32_t &a, uint32_t &b) {
    const uint32_t x = ptx::low_halves(a, b);
    b = ptx::high_halves(a, b);
    a = x;
}

// prefill_turn turns pairs (x[0], y[0]), (x[1], y[1]) by two angles.
template <typename T>
__device__ __forceinline__ void prefill_turn(uint32_t &x, uint32_t &y, float4 angles) {
    const float2 a = ptx::unpack<T>(x), b = ptx::unpack<T>(y);
    x = ptx::pack<T>(fmaf(a.x, angles.x, -b.x * angles.y), fmaf(a.y, angles.z, -b.y * angles.w));
    y = ptx::pack<T>(fmaf(b.x, angles.x, a.x * angles.y), fmaf(b.y, angles.z, a.y * angles.w));
}

// prefill_rotate_pieces rotates the 64 query rows of a consumer, by its 128 threads: each has four
// pairs, which are two pieces of 8 bytes, of some rows.  angles: of the tile's first token.  What
// lies behind the last token turns by its angles, and concerns nobody.
template <typename Traits, bool kInterleaved>
__device__ __forceinline__ void
prefill_rotate_pieces(const attn_prefill_record &r, const attn_prefill_tile &t, unsigned char *s_q,
                      int consumer, const float2 *angles) {
    using T = typename Traits::type;
    constexpr int kParts = Traits::kDim / 8;   // of a row
    constexpr int kRows = 64 / (128 / kParts); // of a thread, all under way together
    static_assert(8 % kRows == 0, "rows of a thread have neighbouring swizzles");
    const int n = ptx::thread() % kParts, num = r.rotary_dim / 8;
    if (n >= num) {
        return;
    }
    const int row = consumer * 64 + ptx::thread() % 128 / kParts * kRows;
    const int a = kInterleaved ? 2 * n : n, b = kInterleaved ? 2 * n + 1 : n + num; // pieces
    const uint32_t s_a = ptx::s_addr(s_q) + prefill_place<Traits>(row, a / 2) + a % 2 * 8;
    const uint32_t s_b = ptx::s_addr(s_q) + prefill_place<Traits>(row, b / 2) + b % 2 * 8;
    float4 turns[kRows][2];
    uint2 x[kRows], y[kRows];
#pragma unroll
    for (int k = 0; k < kRows; k++) {
        const int token = min(prefill_row_token(r, row + k), t.tokens - 1);
        const float4 *two = (const float4 *)angles + (token * num + n) * 2;
        turns[k][0] = __ldg(two);
        turns[k][1] = __ldg(two + 1);
    }
#pragma unroll
    for (int k = 0; k < kRows; k++) {
        ptx::s_load(x[k], (s_a ^ k * 16) + k * 128);
        ptx::s_load(y[k], (s_b ^ k * 16) + k * 128);
    }
#pragma unroll
    for (int k = 0; k < kRows; k++) {
        if (kInterleaved) {
            prefill_part(x[k].x, x[k].y);
            prefill_part(y[k].x, y[k].y);
            prefill_turn<T>(x[k].x, x[k].y, turns[k][0]);
            prefill_turn<T>(y[k].x, y[k].y, turns[k][1]);
            prefill_part(x[k].x, x[k].y);
            prefill_part(y[k].x, y[k].y);
        } else {
            prefill_turn<T>(x[k].x, y[k].x, turns[k][0]);
            prefill_turn<T>(x[k].y, y[k].y, turns[k][1]);
        }
        ptx::s_store(x[k], (s_a ^ k * 16) + k * 128);
        ptx::s_store(y[k], (s_b ^ k * 16) + k * 128);
    }
}

// prefill_rotate_pairs does the same one pair at a time.
template <typename Traits>
__device__ __forceinline__ void prefill_rotate_pairs(const attn_prefill_record &r,
                                                     const attn_prefill_tile &t, unsigned char *s_q,
                                                     int consumer, const float2 *angles) {
    using T = typename Traits::type;
    const int pairs = r.rotary_dim / 2;
#pragma unroll 1
    for (int i = ptx::thread() % 128; i < 64 * pairs; i += 128) {
        const int row = consumer * 64 + i / pairs, p = i % pairs;
        const float2 angle =
            __ldg(angles + min(prefill_row_token(r, row), t.tokens - 1) * pairs + p);
        const int2 dims = prefill_pair_dims(p, r);
        T *s_x = (T *)(s_q + prefill_place<Traits>(row, dims.x / 8)) + dims.x % 8;
        T *s_y = (T *)(s_q + prefill_place<Traits>(row, dims.y / 8)) + dims.y % 8;
        const float x = (float)*s_x, y = (float)*s_y;
        *s_x = (T)fmaf(x, angle.x, -y * angle.y);
        *s_y = (T)fmaf(y, angle.x, x * angle.y);
    }
}

// prefill_rotate rotates the queries of a consumer in place, of a task that has tokens.
template <typename Traits>
__device__ __forceinline__ void prefill_rotate(const attn_prefill_record &r,
                                               const attn_prefill_tile &t, unsigned char *s_q,
                                               int consumer, const float *all_angles) {
    const float2 *angles = (const float2 *)all_angles + r.angles_first +
                           (int64_t)(t.token_first - r.q_first) * (r.rotary_dim / 2);
    if (r.rotary_dim % 8 != 0) {
        prefill_rotate_pairs<Traits>(r, t, s_q, consumer, angles);
    } else if (r.flags & ATTN_PREFILL_INTERLEAVED) {
        prefill_rotate_pieces<Traits, true>(r, t, s_q, consumer, angles);
    } else {
        prefill_rotate_pieces<Traits, false>(r, t, s_q, consumer, angles);
    }
}

#endif
