// decode_math is what a consumer warp computes: scores, softmax and weighted values of 8 query rows
// (or 16) over 16 keys at a time, all of it in registers.
//
// Both products have the keys or values as their left, wide side, so that 8 query rows are enough
// to fill the right one:
//     S^T [16 keys, 8 rows] = K [16 keys, dims] * Q^T [dims, 8 rows]
//     O^T [16 dims, 8 rows] = V^T [16 dims, 16 keys] * P^T [16 keys, 8 rows]
// P^T comes from S^T by one 8 x 8 transposition in registers for each 8 keys.
//
// K and V lie as plain rows of 256 (or 128) bytes, all of which begin at bank 0: ldmatrix would
// meet eight rows in one group of banks.  But a product may take its inner dimension in any order,
// and dims of the output may have any place.  So lanes load 16-byte pieces, of which a quarter of a
// warp (lanes (g, t) of two g) loads eight at a time:
//     K: lane (g, t) has key g (and g + 8), and of it pieces t, t + 4, ...; odd g take each two of
//        them in the other order and swap them afterwards: 8 different groups of banks.
//     V: lane (g, t) has keys 2t, 2t + 1, 2t + 8, 2t + 9, and of them the two pieces of dims 16 g
//     to
//        16 g + 15; t >= 2 take them in the other order: 4 groups of banks, two keys each.  Two
//        registers of two keys are then cut and joined to pairs of keys.
#ifndef ATTND_ATTENTION_CUDA_DECODE_MATH_CUH
#define ATTND_ATTENTION_CUDA_DECODE_MATH_CUH

#include "attention/cuda/attn_math.cuh"
#include "attention/cuda/decode_traits.cuh"

// A maximum this far (log2) behind the true one is good enough: sums stay within float32, and the
// weights within fp16.
#define DECODE_SLACK_LOG2 8.0f
#define DECODE_NO_MAX     (-1e30f)

// decode_lane is where a lane stands: (g, t) of ptx::mma.
struct decode_lane {
    int g, t;
    __device__ explicit decode_lane(int lane) : g(lane / 4), t(lane % 4) {}
};

// decode_swap exchanges a and b.
template <typename V>
__device__ __forceinline__ void decode_swap(V &a, V &b, bool yes) {
    const V x = a;
    a = yes ? b : a;
    b = yes ? x : b;
}

// decode_sets_log2 is over how many sets of kNt * 8 query rows the warps are spread, warp by warp.
template <int kNt>
__device__ __forceinline__ int decode_sets_log2(int num_rows) {
    return kNt == 1 || num_rows <= 16 ? 0 : num_rows <= 32 ? 1 : 2;
}

// decode_half is a lane's half of its dims of a value: 16 bytes, or 8.
template <int kDim>
struct decode_half {
    using type = uint4;
};

template <>
struct decode_half<64> {
    using type = uint2;
};

// decode_mask is what one query row sees, and its bias.  Made anew for each tile that needs it: few
// do, and the registers are better spent otherwise.
template <typename Traits>
struct decode_mask {
    int32_t first, end; // keys that causal and window let the row see
    int32_t position;
    uint32_t tree;             // bulk: up to 32 tokens
    const uint64_t *tree_mask; // portable: of the token, NULL = none
    float slope;               // base 2

    __device__ decode_mask(const decode_item &item, const decode_args &args, int row)
        : tree(~0u), slope(0) {
        const attn_cuda_record &r = item.record;
        const int token = decode_token(r, row);
        first = r.seen_first + token;
        end = min(r.seen_end + token, r.kv_len);
        position = r.position + token;
        if constexpr (!Traits::kIsBulk) {
            const int64_t words = (r.kv_len - r.tree_first + 63) / 64;
            tree_mask = r.tree_mask && token < r.tokens ? r.tree_mask + token * words : nullptr;
        } else if (r.tree_mask && token < r.tokens) {
            tree = (uint32_t)__ldg(r.tree_mask + token);
        }
        if (r.alibi_slopes && token < r.tokens) {
            const int head = r.head_first + row - token * r.heads;
            slope = 1.4426950408889634f *
                    __ldg(r.alibi_slopes + item.piece.kv_head * args.group + head);
        }
    }

    // apply returns the score x of a key with bias and mask; it is still to be multiplied by factor
    // when there is no bias.
    __device__ float apply(const attn_cuda_record &r, float x, float factor, int32_t key) const {
        bool seen = key >= first && key < end;
        if constexpr (!Traits::kIsBulk) {
            if (seen && tree_mask && key >= r.tree_first) { // seen: before kv_len
                const uint32_t bit = (uint32_t)(key - r.tree_first);
                seen = __ldg(tree_mask + bit / 64) >> bit % 64 & 1;
            }
        } else if (r.tree_mask && key >= r.tree_first) {
            seen = seen && (tree >> (key - r.tree_first) & 1);
        }
        if (r.alibi_slopes) {
            return seen ? factor * x - slope * (float)abs(position - key) : -INFINITY;
        }
        return seen ? x : factor < 0 ? INFINITY : -INFINITY;
    }
};

// decode_rows is the state of kNt * 8 query rows in one warp.  As right side, lane (g, t) holds
// query row g of each 8; of scores and sums, rows 2t and 2t + 1; of sums, dims [g, g + 1) * kDim /
// 8, the lower half of them in o[..][..][0] and [1], the upper in [2] and [3].
template <typename Traits, int kNt>
struct decode_rows {
    // With 8 rows there are registers for the queries; 16 rows leave them where they lie.
    static constexpr bool kIsRoomy = kNt == 1;
    uint4 q[kIsRoomy ? Traits::kSteps : 1];
    uint32_t s_q;                   // of query row g, piece t
    float o[kNt][Traits::kOuts][4]; // sums of exp2(x - m) * v
    float m[kNt][2], l[kNt][2];     // m, and this lane's part of the sum of exp2(x - m)
    int row;                        // of the item, the first of these

    // begin takes the rows from first_row on of the item; s_queries holds them all.
    __device__ void begin(const attn_cuda_record &r, uint32_t s_queries, int first_row,
                          decode_lane at) {
        row = first_row;
        s_q = s_queries + (uint32_t)((row + at.g) * Traits::kRowBytes + at.t * 16);
        if constexpr (kIsRoomy) {
            const bool is_row = row + at.g < r.tokens * r.heads;
#pragma unroll
            for (int i = 0; i < Traits::kSteps; i++) {
                q[i] = is_row ? query(0, i, at) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
            for (int j = 0; j < Traits::kOuts; j++) {
                o[nt][j][0] = o[nt][j][1] = o[nt][j][2] = o[nt][j][3] = 0;
            }
            m[nt][0] = m[nt][1] = DECODE_NO_MAX;
            l[nt][0] = l[nt][1] = 0;
        }
    }

    // query returns piece t + 4 * i of query row 8 * nt + g; see decode_query_at.
    __device__ uint4 query(int nt, int i, decode_lane at) const {
        return ptx::s_load(s_q + nt * 8 * Traits::kRowBytes + (i * 64 ^ (at.g & 1) << 6));
    }

    // raise lifts the maxima to what the scores s (times c) want, for all lanes alike.
    __device__ void raise(const float (&s)[kNt][4], float c) {
#pragma unroll
        for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float top = fmaxf(s[nt][e] * c, s[nt][e + 2] * c);
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
                top = fmaxf(top, m[nt][e]);
                float shrink = ptx::exp2(m[nt][e] - top);
                m[nt][e] = top;
                l[nt][e] *= shrink;
#pragma unroll
                for (int j = 0; j < Traits::kOuts; j++) {
                    o[nt][j][e] *= shrink;
                    o[nt][j][e + 2] *= shrink;
                }
            }
        }
    }

    // score computes S^T of the 16 keys that lie from s_k on.
    __device__ void score(float (&s)[kNt][4], uint32_t s_k, decode_lane at) const {
        // Two chains of products are half as long; with 16 query rows there are two anyway.
        constexpr int kChains = kNt == 1 ? 2 : 1;
        float x[kChains][kNt][4];
#pragma unroll
        for (int i = 0; i < kChains * kNt * 4; i++) {
            x[i / 4 / kNt][i / 4 % kNt][i % 4] = 0;
        }
        const bool odd = at.g % 2;
        const uint32_t s_key = s_k + at.g * Traits::kRowBytes + at.t * 16;
        const uint32_t s_even = s_key + (odd ? 64 : 0), s_odd = s_key + (odd ? 0 : 64);
#pragma unroll(kIsRoomy ? Traits::kSteps : 1)
        for (int i = 0; i < Traits::kSteps; i += 2) {
            uint4 a[2] = {ptx::s_load(s_even + i * 64), ptx::s_load(s_odd + i * 64)};
            uint4 b[2] = {ptx::s_load(s_even + i * 64 + 8 * Traits::kRowBytes),
                          ptx::s_load(s_odd + i * 64 + 8 * Traits::kRowBytes)};
            decode_swap(a[0], a[1], odd);
            decode_swap(b[0], b[1], odd);
#pragma unroll
            for (int k = 0; k < 2; k++) {
#pragma unroll
                for (int nt = 0; nt < kNt; nt++) {
                    uint4 y;
                    if constexpr (kIsRoomy) {
                        y = q[i + k];
                    } else {
                        y = query(nt, i + k, at);
                    }
                    ptx::mma<typename Traits::type>(x[0][nt], a[k].x, b[k].x, a[k].y, b[k].y, y.x,
                                                    y.y);
                    ptx::mma<typename Traits::type>(x[kChains - 1][nt], a[k].z, b[k].z, a[k].w,
                                                    b[k].w, y.z, y.w);
                }
            }
        }
#pragma unroll
        for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[nt][i] = kChains == 2 ? x[0][nt][i] + x[kChains - 1][nt][i] : x[0][nt][i];
            }
        }
    }

    // bend applies softcap, bias and mask to the scores of keys key and key + 8, and returns the
    // factor that makes them logits of base 2.
    __device__ float bend(float (&s)[kNt][4], const decode_item &item, const decode_args &args,
                          int32_t key, bool masked, decode_lane at) const {
        const attn_cuda_record &r = item.record;
        float c = r.scale_log2;
        if (r.cap_log2 > 0) {
#pragma unroll
            for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[nt][i] = r.cap_log2 * attn_tanh(s[nt][i] * r.cap_scale);
                }
            }
            c = 1;
        }
        if (masked) {
            const float factor = c;
            c = item.record.alibi_slopes ? 1 : c;
#pragma unroll
            for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const decode_mask<Traits> mask(item, args, row + nt * 8 + 2 * at.t + e);
                    s[nt][e] = mask.apply(item.record, s[nt][e], factor, key);
                    s[nt][e + 2] = mask.apply(item.record, s[nt][e + 2], factor, key + 8);
                }
            }
        }
        return c;
    }

    // weigh turns scores into weights P^T, as right side of the second product.
    __device__ void weigh(const float (&s)[kNt][4], float c, uint32_t (&p)[kNt][2]) {
        float y[kNt][4];
        float top = -INFINITY;
#pragma unroll
        for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                y[nt][i] = fmaf(s[nt][i], c, -m[nt][i & 1]);
                top = fmaxf(top, y[nt][i]);
            }
        }
        if (__any_sync(~0u, top > DECODE_SLACK_LOG2)) {
            raise(s, c);
#pragma unroll
            for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    y[nt][i] = fmaf(s[nt][i], c, -m[nt][i & 1]);
                }
            }
        }
#pragma unroll
        for (int nt = 0; nt < kNt; nt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                y[nt][i] = ptx::exp2(y[nt][i]);
                l[nt][i & 1] += y[nt][i];
            }
            p[nt][0] = ptx::transpose_8x8(ptx::pack<typename Traits::type>(y[nt][0], y[nt][1]));
            p[nt][1] = ptx::transpose_8x8(ptx::pack<typename Traits::type>(y[nt][2], y[nt][3]));
        }
    }

    // values are a lane's dims of keys 2t, 2t + 1, 2t + 8, 2t + 9 of 16: the lower and the upper
    // half of them.
    struct values {
        typename decode_half<Traits::kDim>::type v[4][2];
    };

    static __device__ int value_key(int k, decode_lane at) {
        return 2 * at.t + k % 2 + k / 2 * 8;
    }

    static __device__ values load_values(uint32_t s_v, decode_lane at) {
        constexpr uint32_t kBytes = Traits::kRowBytes / 16;
        const bool late = at.t >= 2;
        values x;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t s_row = s_v + value_key(k, at) * Traits::kRowBytes + at.g * 2 * kBytes;
            ptx::s_load(x.v[k][0], s_row + (late ? kBytes : 0));
            ptx::s_load(x.v[k][1], s_row + (late ? 0 : kBytes));
        }
        return x;
    }

    // drop_values makes what lies beyond `live` keys zero: it is of earlier tiles, maybe NaN.
    static __device__ void drop_values(values &x, int live, decode_lane at) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (value_key(k, at) >= live) {
                x.v[k][0] = x.v[k][1] = {};
            }
        }
    }

    // gather adds P * V.
    __device__ void gather(const uint32_t (&p)[kNt][2], values &x, decode_lane at) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            decode_swap(x.v[k][0], x.v[k][1], at.t >= 2);
        }
#pragma unroll
        for (int j = 0; j < Traits::kOuts; j++) {
            uint32_t a[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint32_t low = word(x.v[k / 2 * 2][k % 2], j / 2);
                const uint32_t high = word(x.v[k / 2 * 2 + 1][k % 2], j / 2);
                a[k] = j % 2 ? ptx::high_halves(low, high) : ptx::low_halves(low, high);
            }
#pragma unroll
            for (int nt = 0; nt < kNt; nt++) {
                ptx::mma<typename Traits::type>(o[nt][j], a[0], a[1], a[2], a[3], p[nt][0],
                                                p[nt][1]);
            }
        }
    }

    static __device__ uint32_t word(const uint4 &x, int i) {
        return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
    }
    static __device__ uint32_t word(const uint2 &x, int i) {
        return i == 0 ? x.x : x.y;
    }

    // tile takes the 16 keys from `key` on, whose K and V lie at s_k and s_v.
    __device__ void tile(const decode_item &item, const decode_args &args, uint32_t s_k,
                         uint32_t s_v, int32_t key, decode_lane at) {
        const attn_cuda_record &r = item.record;
        const bool masked = key < r.full_first || key + Traits::kTile > r.full_end;
        float s[kNt][4];
        uint32_t p[kNt][2];
        score(s, s_k, at);
        values x;
        if constexpr (kIsRoomy) {
            x = load_values(s_v, at); // on their way while the scores become weights
        }
        const float c = bend(s, item, args, key + at.g, masked, at);
        weigh(s, c, p);
        if constexpr (!kIsRoomy) {
            x = load_values(s_v, at);
        }
        if (masked) {
            drop_values(x, r.kv_len - key, at);
        }
        gather(p, x, at);
    }
};

#endif
