// attn_cpu_vec_avx512 is the vector type of the SIMD kernels for AVX-512 (F, BW, DQ, VL).  The
// kernels' text (attn_cpu_simd.h) is written in these names; attn_cpu_vec_avx2.h and
// attn_cpu_vec_neon.h define the same ones.  To be included by one .c file with its own flags.
//
// "Pair order": conversions of 16-bit types leave the elements of 2 VEC_LANES columns in two
// vectors in the order that costs least; VEC_BF16_SPLITS says that bf16 gives even columns, then
// odd ones.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_VEC_AVX512_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_VEC_AVX512_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "proto/dtype.h"

typedef __m512 vec;

enum {
    VEC_LANES = 16,
    VEC_DOTS = 16,     // sums that a dot kernel keeps, a multiple of VEC_LANES
    VEC_TILE_ROWS = 6, // accumulators of a product tile: VEC_TILE_ROWS * VEC_TILE_VECS
    VEC_TILE_VECS = 4,
    VEC_SUM_VECS = 16, // accumulators of a weighted sum over keys
};

// vec_fetches_far says that prefetches go into the second cache: a core of Intel's has few misses
// of the first cache in flight (203 to 238 ns a key of bf16 on a Xeon); AMD's Zen 5 and Zen 3 are
// as fast or faster with the first.
static inline bool vec_fetches_far(void) {
    return __builtin_cpu_is("intel");
}
static inline vec vec_zero(void) {
    return _mm512_setzero_ps();
}
static inline vec vec_set1(float x) {
    return _mm512_set1_ps(x);
}
static inline vec vec_iota(void) {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline vec vec_load(const float *x) {
    return _mm512_loadu_ps(x);
}
static inline void vec_store(float *x, vec a) {
    _mm512_storeu_ps(x, a);
}
static inline vec vec_add(vec a, vec b) {
    return _mm512_add_ps(a, b);
}
static inline vec vec_sub(vec a, vec b) {
    return _mm512_sub_ps(a, b);
}
static inline vec vec_mul(vec a, vec b) {
    return _mm512_mul_ps(a, b);
}
static inline vec vec_div(vec a, vec b) {
    return _mm512_div_ps(a, b);
}
// vec_fma returns a * b + c.
static inline vec vec_fma(vec a, vec b, vec c) {
    return _mm512_fmadd_ps(a, b, c);
}
// vec_max and vec_min return b where a or b is NaN.
static inline vec vec_max(vec a, vec b) {
    return _mm512_max_ps(a, b);
}
static inline vec vec_min(vec a, vec b) {
    return _mm512_min_ps(a, b);
}
static inline vec vec_abs(vec a) {
    return _mm512_abs_ps(a);
}
static inline vec vec_copysign(vec magnitude, vec sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
// vec_round rounds to the nearest integer, ties to even.
static inline vec vec_round(vec a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// vec_scale2 returns a * 2^n for integral n in [-200, 127] and a in [0.5, 2]; what lies below the
// normal numbers may become 0.
static inline vec vec_scale2(vec a, vec n) {
    return _mm512_scalef_ps(a, n);
}
// vec_select returns a where the lane's bit is set, else b.
static inline vec vec_select(uint32_t bits, vec a, vec b) {
    return _mm512_mask_blend_ps((__mmask16)bits, b, a);
}
// vec_if_less returns x where a < b, else y.
static inline vec vec_if_less(vec a, vec b, vec x, vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline float vec_hmax(vec a) {
    return _mm512_reduce_max_ps(a);
}
static inline float vec_hsum(vec a) {
    return _mm512_reduce_add_ps(a);
}

// fold_* is one step of the sum over lanes of two vectors at once: the sums of a's parts end in the
// lower part, those of b in the upper one.
static inline vec fold_halves(vec a, vec b) {
    return vec_add(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}
static inline vec fold_quarters(vec a, vec b) {
    vec keep = _mm512_mask_blend_ps(0xf0f0, a, b);
    vec move = _mm512_mask_blend_ps(0x0f0f, a, b);
    return vec_add(keep, _mm512_shuffle_f32x4(move, move, 0xb1));
}
static inline vec fold_pairs(vec a, vec b) {
    return vec_add(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}
static inline vec fold_lanes(vec a, vec b) {
    vec keep = _mm512_mask_blend_ps(0xaaaa, a, b);
    vec move = _mm512_mask_blend_ps(0x5555, a, b);
    return vec_add(keep, _mm512_permute_ps(move, 0xb1));
}

// vec_sum_lanes returns in lane i the sum of the lanes of x[i].
static inline vec vec_sum_lanes(const vec x[VEC_LANES]) {
    vec h[8], q[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        h[i] = fold_halves(x[i], x[i + 8]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        q[i] = fold_quarters(h[i], h[i + 4]);
    }
    return fold_lanes(fold_pairs(q[0], q[2]), fold_pairs(q[1], q[3]));
}

// vec_store_dots stores the sums of lanes of VEC_DOTS vectors, ordered [rows, VEC_DOTS / rows], to
// rows s, s + stride ...
static inline void vec_store_dots(const vec x[VEC_DOTS], int rows, float *s, int stride) {
    vec sums = vec_sum_lanes(x);
    if (rows == 1) {
        vec_store(s, sums);
    } else if (rows == 2) {
        _mm256_storeu_ps(s, _mm512_castps512_ps256(sums));
        _mm256_storeu_ps(s + stride, _mm512_extractf32x8_ps(sums, 1));
    } else {
        _mm_storeu_ps(s, _mm512_castps512_ps128(sums));
        _mm_storeu_ps(s + stride, _mm512_extractf32x4_ps(sums, 1));
        _mm_storeu_ps(s + 2 * stride, _mm512_extractf32x4_ps(sums, 2));
        _mm_storeu_ps(s + 3 * stride, _mm512_extractf32x4_ps(sums, 3));
    }
}

// vec_transpose transposes VEC_LANES x VEC_LANES in place.
static inline void vec_transpose(vec x[VEC_LANES]) {
    vec t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
        __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
        x[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        x[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        x[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        x[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// vec_split moves the even elements of a, b (one after the other) to *even, the odd ones to *odd;
// vec_merge is the inverse.
static inline void vec_split(vec a, vec b, vec *even, vec *odd) {
    const __m512i pick =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *even = _mm512_permutex2var_ps(a, pick, b);
    *odd = _mm512_permutex2var_ps(a, _mm512_add_epi32(pick, _mm512_set1_epi32(1)), b);
}
static inline void vec_merge(vec even, vec odd, vec *a, vec *b) {
    const __m512i pick = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *a = _mm512_permutex2var_ps(even, pick, odd);
    *b = _mm512_permutex2var_ps(even, _mm512_add_epi32(pick, _mm512_set1_epi32(8)), odd);
}

static inline void pair_of_bf16(__m512i x, vec *a, vec *b) {
    *a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    *b = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u)));
}

// vec_load_pair loads 2 VEC_LANES elements of a type of 2 or 4 bytes in pair order.
static inline void vec_load_pair(const void *x, attnd_dtype dtype, vec *a, vec *b) {
    if (dtype == ATTND_F32) {
        *a = _mm512_loadu_ps(x);
        *b = _mm512_loadu_ps((const float *)x + 16);
    } else if (dtype == ATTND_BF16) {
        pair_of_bf16(_mm512_loadu_si512(x), a, b);
    } else {
        *a = _mm512_cvtph_ps(_mm256_loadu_si256(x));
        *b = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x + 1));
    }
}

// vec_load_pair_n loads the first n, the rest is 0.  No byte behind them is read.
static inline void vec_load_pair_n(const void *x, attnd_dtype dtype, int32_t n, vec *a, vec *b) {
    uint32_t bits = (1u << n) - 1;
    if (dtype == ATTND_F32) {
        *a = _mm512_maskz_loadu_ps((__mmask16)bits, x);
        *b = _mm512_maskz_loadu_ps((__mmask16)(bits >> 16), (const float *)x + 16);
        return;
    }
    __m512i y = _mm512_maskz_loadu_epi16(bits, x);
    if (dtype == ATTND_BF16) {
        pair_of_bf16(y, a, b);
    } else {
        *a = _mm512_cvtph_ps(_mm512_castsi512_si256(y));
        *b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(y, 1));
    }
}

// f16_of_f8 turns a byte in the upper half of each 16-bit lane into the half of 2^-8 its value:
// both types count exponents alike, so the bits move one place down, subnormals included.  NaN
// (0x7f) would become 1.875: adding one unit carries into the bit that makes it NaN again.
static inline __m512i f16_of_f8(__m512i x) {
    __m512i h = _mm512_and_si512(_mm512_srai_epi16(x, 1), _mm512_set1_epi16((short)0xbf80));
    __m512i carry = _mm512_add_epi16(h, _mm512_set1_epi16(0x80));
    return _mm512_ternarylogic_epi32(h, carry, _mm512_set1_epi16(0x4000), 0xf8);
}

// vec_f8_to_f16 writes the halves of 2^-8 times n <= 4 VEC_LANES elements of F8E4M3, zeros behind
// them: the even elements, then the odd ones.
static inline void vec_f8_to_f16(const void *x, int32_t n, uint16_t *halves) {
    __m512i y = n == 64 ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi8((1ull << n) - 1, x);
    _mm512_storeu_si512(halves, f16_of_f8(_mm512_slli_epi16(y, 8)));
    _mm512_storeu_si512(halves + 32, f16_of_f8(y));
}

// vec_widen loads n <= VEC_LANES elements of a type of 2 or 4 bytes in their order, zeros behind.
static inline vec vec_widen(const void *x, attnd_dtype dtype, int32_t n) {
    __mmask16 bits = (__mmask16)((1u << n) - 1);
    if (dtype == ATTND_F32) {
        return _mm512_maskz_loadu_ps(bits, x);
    }
    __m256i y = _mm256_maskz_loadu_epi16(bits, x);
    if (dtype == ATTND_BF16) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(y), 16));
    }
    return _mm512_cvtph_ps(y);
}

// vec_narrow stores the first n <= VEC_LANES lanes, rounded to nearest even.
static inline void vec_narrow(void *x, attnd_dtype dtype, int32_t n, vec a) {
    __mmask16 bits = (__mmask16)((1u << n) - 1);
    if (dtype == ATTND_F32) {
        _mm512_mask_storeu_ps(x, bits, a);
    } else if (dtype == ATTND_F16) {
        _mm256_mask_storeu_epi16(x, bits, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    } else {
        __m512i u = _mm512_castps_si512(a);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        __m512i sum = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
        sum = _mm512_mask_or_epi32(sum, nan, u, _mm512_set1_epi32(0x400000));
        _mm256_mask_storeu_epi16(x, bits, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
    }
}

#endif
