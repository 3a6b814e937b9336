// prefill_math is what a consumer warpgroup computes: 64 query rows over 128 keys at a time.
//
//     S [64 rows, 128 keys] = Q K^T      both from shared memory
//     O [64 rows, dims]    += P V        P from registers: S's fragments are those of a left side
//
// Lane (g, t) = (lane / 4, lane % 4) of warp w has rows 16 w + g ("row 0") and 16 w + g + 8 ("row
// 1"), and of each 8 keys or dims the two from 2t on.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_MATH_CUH
#define ATTND_ATTENTION_CUDA_PREFILL_MATH_CUH

#include "attention/cuda/attn_math.cuh"
#include "attention/cuda/prefill_traits.cuh"

// Weights are taken by the row's maximum so far, unless a lane's share of a row adds up to more
// than this in a step: far within float32, and each of them within fp16.  Most steps then leave the
// sums as they are, and look for no maximum.
#define PREFILL_MOST_WEIGHT 4096.0f

// prefill_row is what one query row of a lane sees.
struct prefill_row {
    int32_t token;      // of the row; may lie behind the tile
    int32_t first, end; // keys that causal and window show
    bool is_row;        // there is such a row
};

template <typename Traits>
__device__ __forceinline__ prefill_row prefill_row_of(const attn_prefill_record &r,
                                                      const attn_prefill_tile &t, int row) {
    const int token = prefill_row_token(r, row);
    prefill_row x;
    x.token = t.token_first + token;
    x.first = r.seen_first + x.token;
    x.end = min(r.seen_end + x.token, r.kv_len);
    x.is_row = token < t.tokens && row - token * r.tile_heads < t.heads;
    return x;
}

// prefill_tree_bits returns what the tree mask says of keys [key, key + 32) for a token: bit b is
// set when key + b is old or its bit is.
__device__ __forceinline__ uint32_t prefill_tree_bits(const attn_prefill_record &r, int32_t token,
                                                      int32_t key) {
    const int32_t bit = key - (r.kv_len - r.q_len); // of the first key
    if (bit <= -32) {
        return ~0u;
    }
    const uint32_t *tree =
        (const uint32_t *)(r.tree_mask + (int64_t)token * r.tree_words); // little-endian
    const int32_t word = bit < 0 ? -1 : bit / 32, last = 2 * r.tree_words - 1;
    const uint32_t low = word < 0 ? ~0u : word <= last ? __ldg(tree + word) : 0;
    const uint32_t high = word < last ? __ldg(tree + word + 1) : 0;
    return __funnelshift_r(low, high, (uint32_t)bit & 31);
}

// prefill_range_bits has the bits of keys [first, end) among keys [key, key + 32).
__device__ __forceinline__ uint32_t prefill_range_bits(int32_t first, int32_t end, int32_t key) {
    const int32_t low = min(max(first - key, 0), 32), high = min(max(end - key, 0), 32);
    // Shifts by 32 give 0 in funnels that clamp.
    return __funnelshift_lc(0, ~0u, (uint32_t)low) & ~__funnelshift_lc(0, ~0u, (uint32_t)high);
}

// prefill_kind is what a step's scores go through before softmax.  One piece of code each: in the
// usual ones no branch stands between starting products and waiting for them, since the compiler
// waits before a branch.
enum prefill_kind {
    PREFILL_PLAIN,  // nothing
    PREFILL_MASKED, // causal, window and block mask
    PREFILL_BENT,   // a scale below 0, softcap, ALiBi and tree mask too
};

template <typename Traits>
struct prefill_rows {
    static constexpr int kScores = Traits::kKeys / 2;
    static constexpr int kOuts = Traits::kDim / 2;

    using weights = uint32_t[Traits::kKeys / 16][4]; // P, of a step

    float o[kOuts];   // sums of exp2(x - m) * v
    float m[2], l[2]; // m, and this lane's part of the sum of exp2(x - m)

    __device__ __forceinline__ void begin() {
        m[0] = m[1] = -INFINITY;
        l[0] = l[1] = 0;
#pragma unroll
        for (int i = 0; i < kOuts; i++) {
            o[i] = 0;
        }
    }

    // score computes S = Q K^T.
    static __device__ __forceinline__ void score(float (&s)[kScores], uint64_t q, uint64_t k) {
        ptx::wgmma_hold(s);
        ptx::wgmma_begin();
#pragma unroll
        for (int i = 0; i < Traits::kDim / 16; i++) {
            ptx::wgmma_tiles<typename Traits::type>(
                s, ptx::wgmma_moved(q, i / 4 * Traits::kQueryTileBytes + i % 4 * 32),
                ptx::wgmma_moved(k, i / 4 * Traits::kTileBytes + i % 4 * 32), i > 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(s);
    }

    // gather computes O += P V; with is_half of the first half of the keys.  As the last of the
    // products begins it arrives at the barrier `next`.
    __device__ __forceinline__ void gather(const weights &p, uint64_t v, bool is_half,
                                           uint32_t next) {
        if (is_half) {
            gather_tiles<Traits::kKeys / 32>(p, v, next);
        } else {
            gather_tiles<Traits::kKeys / 16>(p, v, next);
        }
    }

    template <int kNum>
    __device__ __forceinline__ void gather_tiles(const weights &p, uint64_t v, uint32_t next) {
        ptx::wgmma_hold(o);
        ptx::wgmma_begin();
#pragma unroll
        for (int i = 0; i < kNum; i++) {
            ptx::wgmma_weights<typename Traits::type>(o, p[i], ptx::wgmma_moved(v, i * 16 * 128),
                                                      1);
            if (i >= kNum - 2) {
                ptx::wgmma_commit();
            }
        }
        ptx::wgmma_wait<1>();
        ptx::bar_arrive(next, 2 * 128);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(o);
        ptx::wgmma_hold(p);
    }

    // bend applies softcap, bias and masks to scores, and returns the factor that makes them logits
    // of base 2.
    template <prefill_kind kKind>
    static __device__ __forceinline__ float bend(float (&s)[kScores], const attn_prefill_record &r,
                                                 const attn_prefill_tile &t, int row,
                                                 const prefill_step &step, int group) {
        float c = r.scale_log2;
        const int pair = 2 * (ptx::thread() % 4);
        if constexpr (kKind == PREFILL_BENT) {
            if (r.flags & ATTN_PREFILL_NEGATIVE) {
#pragma unroll
                for (int i = 0; i < kScores; i++) {
                    s[i] = -s[i];
                }
            }
            if (r.cap_log2 > 0) {
#pragma unroll
                for (int i = 0; i < kScores; i++) {
                    s[i] = r.cap_log2 * attn_tanh(s[i] * r.cap_scale);
                }
                c = 1;
            }
            if (r.alibi_slopes) {
                bias(s, r, t, row, step.key + pair, c, group);
                c = 1;
            }
        }
        if constexpr (kKind != PREFILL_PLAIN) {
            mask<kKind>(s, r, t, row, step, pair);
        }
        return c;
    }

    // bias makes logits of base 2 of the scores and adds ALiBi's.
    static __device__ __forceinline__ void bias(float (&s)[kScores], const attn_prefill_record &r,
                                                const attn_prefill_tile &t, int row, int32_t key,
                                                float c, int group) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const prefill_row x = prefill_row_of<Traits>(r, t, row + 8 * e);
            const int head = t.kv_head * group + t.head_first + row + 8 * e -
                             (x.token - t.token_first) * r.tile_heads;
            const float slope = x.is_row ? -1.4426950408889634f * __ldg(r.alibi_slopes + head) : 0;
            const int32_t ahead = r.kv_len - r.q_len + x.token - key;
#pragma unroll
            for (int i = 0; i < kScores / 2; i++) {
                float &y = s[i / 2 * 4 + i % 2 + 2 * e];
                y = fmaf(slope, (float)abs(ahead - (i / 2 * 8 + i % 2)), c * y);
            }
        }
    }

    template <prefill_kind kKind>
    static __device__ __forceinline__ void mask(float (&s)[kScores], const attn_prefill_record &r,
                                                const attn_prefill_tile &t, int row,
                                                const prefill_step &step, int pair) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const prefill_row x = prefill_row_of<Traits>(r, t, row + 8 * e);
            if (kKind == PREFILL_MASKED && step.seen == 0xff && x.first <= step.key) {
                const int32_t end = x.end - step.key - pair; // only the end is to be cut off
#pragma unroll
                for (int i = 0; i < kScores / 2; i++) {
                    float &y = s[i / 2 * 4 + i % 2 + 2 * e];
                    y = i / 2 * 8 + i % 2 < end ? y : -INFINITY;
                }
                continue;
            }
#pragma unroll
            for (int w = 0; w < kScores / 16; w++) { // words of 32 keys
                const int32_t key = step.key + 32 * w;
                uint32_t bits = prefill_range_bits(x.first, x.end, key) &
                                ((step.seen >> (2 * w) & 1 ? 0x0000ffff : 0) |
                                 (step.seen >> (2 * w + 1) & 1 ? 0xffff0000 : 0));
                if (kKind == PREFILL_BENT && r.tree_mask && x.is_row) {
                    bits &= prefill_tree_bits(r, x.token, key);
                }
                bits >>= pair;
#pragma unroll
                for (int i = 0; i < 8; i++) { // keys 8 j and 8 j + 1 of this lane
                    float &y = s[16 * w + i / 2 * 4 + i % 2 + 2 * e];
                    y = bits >> (i / 2 * 8 + i % 2) & 1 ? y : -INFINITY;
                }
            }
        }
    }

    // tops returns the lane's largest logits.
    static __device__ __forceinline__ float2 tops(const float (&s)[kScores], float c) {
        float top[8]; // four chains a row
#pragma unroll
        for (int i = 0; i < kScores; i++) {
            float &t = top[i / 4 % 2 * 4 + i % 4];
            t = i < 8 ? s[i] : fmaxf(t, s[i]);
        }
        return make_float2(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[4], top[5])) * c,
                           fmaxf(fmaxf(top[2], top[3]), fmaxf(top[6], top[7])) * c);
    }

    // asking returns the lanes of the warp that ask for a row's maximum to be raised, given what
    // their weights by it add up to: by what the row itself sees, never by its neighbours, so that
    // its bits do not depend on them.
    __device__ __forceinline__ uint32_t asking(int e, float sum) const {
        return __ballot_sync(~0u, !(sum <= PREFILL_MOST_WEIGHT) || m[e] == -INFINITY);
    }

    // raise raises the maxima of rows of which a lane asks for it, and rescales what was added up.
    __device__ __forceinline__ void raise(const float (&s)[kScores], float c,
                                          const uint32_t (&asking)[2]) {
        const float2 top = tops(s, c);
        float shrink[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float t = e == 0 ? top.x : top.y;
            t = fmaxf(t, __shfl_xor_sync(~0u, t, 1));
            t = fmaxf(t, __shfl_xor_sync(~0u, t, 2));
            const bool rises = (asking[e] >> (ptx::thread() & 28) & 15) != 0;
            const float next = rises ? fmaxf(t, m[e]) : m[e];
            shrink[e] = ptx::exp2(m[e] - (next == -INFINITY ? 0 : next));
            m[e] = next;
            l[e] *= shrink[e];
        }
#pragma unroll
        for (int i = 0; i < kOuts; i++) {
            o[i] *= shrink[i / 2 % 2];
        }
    }

    // weigh makes P of scores, exp2(x - m), and returns what the lane's weights add up to.
    __device__ __forceinline__ float2 weigh(weights &p, const float (&s)[kScores], float c) const {
        const float base[2] = {m[0] == -INFINITY ? 0 : m[0], m[1] == -INFINITY ? 0 : m[1]};
        float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
            float w[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                w[k] = ptx::exp2(fmaf(s[i + k], c, -base[i / 2 % 2]));
                sum[(i + k) % 4] += w[k];
            }
            p[i / 8][i / 2 % 4] = ptx::pack<typename Traits::type>(w[0], w[1]);
        }
        return make_float2(sum[0] + sum[1], sum[2] + sum[3]);
    }

    static constexpr int kSums = kOuts / 4 + 1; // float4 of a thread

    // save leaves the sums, add adds up what another CTA has left of the same rows; [kSums, 128].
    __device__ __forceinline__ void save(float4 *g_sums) const {
#pragma unroll
        for (int i = 0; i < kOuts / 4; i++) {
            g_sums[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        }
        g_sums[(kSums - 1) * 128] = make_float4(m[0], m[1], l[0], l[1]);
    }

    __device__ __forceinline__ void add(const float4 *g_sums) {
        const float4 other = ptx::g_load_now(g_sums + (kSums - 1) * 128);
        float mine[2], its[2]; // by what sums are to be multiplied
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float top = e == 0 ? other.x : other.y, next = fmaxf(m[e], top);
            const float base = next == -INFINITY ? 0 : next;
            mine[e] = ptx::exp2(m[e] - base);
            its[e] = ptx::exp2(top - base);
            m[e] = next;
            l[e] =
                __fadd_rn(__fmul_rn(l[e], mine[e]), __fmul_rn(e == 0 ? other.z : other.w, its[e]));
        }
#pragma unroll
        for (int i = 0; i < kOuts / 4; i++) {
            const float4 x = ptx::g_load_now(g_sums + i * 128);
            const float y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int k = 0; k < 4; k++) { // rounded alike from both sides
                o[4 * i + k] =
                    __fadd_rn(__fmul_rn(o[4 * i + k], mine[k / 2]), __fmul_rn(y[k], its[k / 2]));
            }
        }
    }

    // quotients returns by what the sums are to be multiplied, of given maxima and denominators,
    // and writes the LSE.
    static __device__ __forceinline__ float2 quotients(const attn_prefill_record &r,
                                                       const attn_prefill_tile &t, int group,
                                                       int row, float2 tops, float2 sums) {
        float by[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float top = e == 0 ? tops.x : tops.y;
            float sum = e == 0 ? sums.x : sums.y;
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            float whole = sum;
            if (r.lse || r.sinks) {
                const prefill_row x = prefill_row_of<Traits>(r, t, row + 8 * e);
                const int head = t.kv_head * group + t.head_first + row + 8 * e -
                                 (x.token - t.token_first) * r.tile_heads;
                if (x.is_row && r.sinks && !(r.flags & ATTN_PARTIAL)) {
                    whole += ptx::exp2(1.4426950408889634f * __ldg(r.sinks + head) - top);
                }
                if (x.is_row && r.lse && ptx::thread() % 4 == 0) {
                    r.lse[head * r.lse_head + x.token] =
                        sum == 0 ? -INFINITY : fmaf(top, 0.6931471805599453f, logf(sum));
                }
            }
            by[e] = sum == 0 ? 0 : __fdividef(1, whole);
        }
        return make_float2(by[0], by[1]);
    }

    // leave leaves the outputs, the sums times `by`, where the queries of the warp's rows were:
    // of 16 dims, matrices (rows 0 to 7, 8 to 15) x (dims 0 to 7, 8 to 15).
    __device__ __forceinline__ void leave(unsigned char *s_q, int warp_row, float2 by) const {
        const int lane = ptx::thread() % 32;
        const uint32_t s_row =
            ptx::s_addr(s_q) +
            prefill_place<Traits>(warp_row + lane / 8 % 2 * 8 + lane % 8, lane / 16);
#pragma unroll
        for (int i = 0; i < kOuts / 8; i++) {
            uint32_t x[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *y = &o[8 * i + 2 * n];
                const float factor = n % 2 == 0 ? by.x : by.y;
                x[n] = ptx::pack<typename Traits::type>(y[0] * factor, y[1] * factor);
            }
            // Piece 2 i of the row, in the swizzle.
            ptx::s_store_tiles((s_row ^ i % 4 * 32) + i / 4 * Traits::kQueryTileBytes, x);
        }
    }
};

#endif
