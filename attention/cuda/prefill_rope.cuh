// prefill_rope turns pairs of dims: those of queries in shared memory, by the consumer whose they
// are, and those of new keys on their way to the pool (prefill_prepare.cuh).
//
// A *piece* is two pairs: of two words (4 bytes) of a row.  A lane has the same piece of several
// rows.  Where rotary_dim is no multiple of 4, pairs are turned one at a time.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_ROPE_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_ROPE_CUH

#include "attention/cuda/attn_math.cuh"
#include "attention/cuda/prefill_traits.cuh"

// prefill_pair_dims returns the two dims of pair p.
__device__ __forceinline__ int2 prefill_pair_dims(int p, const attn_prefill_record &r) {
    return r.flags & ATTN_PREFILL_INTERLEAVED ? make_int2(2 * p, 2 * p + 1)
                                              : make_int2(p, p + r.rotary_dim / 2);
}

// prefill_piece is piece n of a row, pairs 2 n and 2 n + 1.  The pieces behind the last pair are
// the words that no pair has.
struct prefill_piece {
    int a, b;            // words of the row
    uint32_t to_x, to_y; // which of their bytes are the pairs' x, and y; and back

    __device__ __forceinline__ prefill_piece(int n, const attn_prefill_record &r) {
        const int num = r.rotary_dim / 4;
        const bool is_apart = n < num && !(r.flags & ATTN_PREFILL_INTERLEAVED);
        a = is_apart ? n : 2 * n;
        b = is_apart ? n + num : 2 * n + 1;
        to_x = is_apart ? 0x3210 : 0x5410;
        to_y = is_apart ? 0x7654 : 0x7632;
    }

    // change makes the pairs' x and y of the words, or the words of x and y.
    __device__ __forceinline__ void change(uint32_t &first, uint32_t &second) const {
        const uint32_t x = __byte_perm(first, second, to_x);
        second = __byte_perm(first, second, to_y);
        first = x;
    }
};

// prefill_turn turns pairs (x[0], y[0]), (x[1], y[1]) by two angles.
template <typename T>
__device__ __forceinline__ void prefill_turn(uint32_t &x, uint32_t &y, float4 angles) {
    const float2 a = ptx::unpack<T>(x), b = ptx::unpack<T>(y);
    x = ptx::pack<T>(fmaf(a.x, angles.x, -b.x * angles.y), fmaf(a.y, angles.z, -b.y * angles.w));
    y = ptx::pack<T>(fmaf(b.x, angles.x, a.x * angles.y), fmaf(b.y, angles.z, a.y * angles.w));
}

// prefill_rotate_pieces rotates the 64 query rows of a consumer, by its 128 threads.  angles: of
// the tile's first token.  The rows behind the last token turn by its angles and concern nobody.
template <typename Traits>
__device__ __forceinline__ void
prefill_rotate_pieces(const attn_prefill_record &r, const attn_prefill_tile &t, unsigned char *s_q,
                      int consumer, const float2 *angles) {
    constexpr int kPieces = Traits::kDim / 4;   // of a row
    constexpr int kRows = 64 / (128 / kPieces); // of a thread
    constexpr int kBatch = 8;                   // rows under way together
    static_assert(kRows % kBatch == 0, "rows of a batch have the swizzles of a tile in order");
    const int n = ptx::thread() % kPieces;
    const int num = r.rotary_dim / 4;
    if (n >= num) {
        return;
    }
    const prefill_piece piece(n, r);
    int row = consumer * 64 + ptx::thread() % 128 / kPieces * kRows;
    const uint32_t s_a =
        ptx::s_addr(s_q) + prefill_place<Traits>(row, piece.a / 4) + piece.a % 4 * 4;
    const uint32_t s_b =
        ptx::s_addr(s_q) + prefill_place<Traits>(row, piece.b / 4) + piece.b % 4 * 4;
#pragma unroll 1
    for (int done = 0; done < kRows; done += kBatch, row += kBatch) {
        float4 turns[kBatch];
        uint32_t x[kBatch], y[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const int token = min(prefill_row_token(r, row + k), t.tokens - 1);
            turns[k] = __ldg((const float4 *)angles + (token * num + n));
        }
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            x[k] = ptx::s_load_u32(((s_a + done * 128) ^ k * 16) + k * 128);
            y[k] = ptx::s_load_u32(((s_b + done * 128) ^ k * 16) + k * 128);
        }
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            piece.change(x[k], y[k]);
            prefill_turn<typename Traits::type>(x[k], y[k], turns[k]);
            piece.change(x[k], y[k]);
            ptx::s_store_u32(((s_a + done * 128) ^ k * 16) + k * 128, x[k]);
            ptx::s_store_u32(((s_b + done * 128) ^ k * 16) + k * 128, y[k]);
        }
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
    if (r.rotary_dim % 4 == 0) {
        prefill_rotate_pieces<Traits>(r, t, s_q, consumer, angles);
    } else {
        prefill_rotate_pairs<Traits>(r, t, s_q, consumer, angles);
    }
}

#endif
