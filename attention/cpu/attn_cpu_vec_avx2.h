// attn_cpu_vec_avx2 is the vector type of the SIMD kernels for AVX2 with FMA and F16C: the names of
// attn_cpu_vec_avx512.h, where they are explained.  To be included by one .c file with its own
// flags.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_VEC_AVX2_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_VEC_AVX2_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "proto/dtype.h"

typedef __m256 vec;

enum {
    VEC_LANES = 8,
    VEC_DOTS = 8,
    VEC_TILE_ROWS = 6, // 12 of 16 registers
    VEC_TILE_VECS = 2,
    VEC_SUM_VECS = 8,
};

// vec_fetches_far says that prefetches go into the second cache.
static inline bool vec_fetches_far(void) {
    return false;
}
static inline vec vec_zero(void) {
    return _mm256_setzero_ps();
}
static inline vec vec_set1(float x) {
    return _mm256_set1_ps(x);
}
static inline vec vec_iota(void) {
    return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
}
static inline vec vec_load(const float *x) {
    return _mm256_loadu_ps(x);
}
static inline void vec_store(float *x, vec a) {
    _mm256_storeu_ps(x, a);
}
static inline vec vec_add(vec a, vec b) {
    return _mm256_add_ps(a, b);
}
static inline vec vec_sub(vec a, vec b) {
    return _mm256_sub_ps(a, b);
}
static inline vec vec_mul(vec a, vec b) {
    return _mm256_mul_ps(a, b);
}
static inline vec vec_div(vec a, vec b) {
    return _mm256_div_ps(a, b);
}
static inline vec vec_fma(vec a, vec b, vec c) {
    return _mm256_fmadd_ps(a, b, c);
}
static inline vec vec_max(vec a, vec b) {
    return _mm256_max_ps(a, b);
}
static inline vec vec_min(vec a, vec b) {
    return _mm256_min_ps(a, b);
}
static inline vec vec_abs(vec a) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
static inline vec vec_copysign(vec magnitude, vec sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
static inline vec vec_round(vec a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vec vec_scale2(vec a, vec n) {
    __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    vec scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), power));
    return _mm256_andnot_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), scaled);
}
static inline vec vec_select(uint32_t bits, vec a, vec b) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)bits), lane);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
}
static inline vec vec_if_less(vec a, vec b, vec x, vec y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline float vec_hmax(vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
static inline float vec_hsum(vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

static inline vec fold_halves(vec a, vec b) {
    return vec_add(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
}
static inline vec fold_pairs(vec a, vec b) {
    return vec_add(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}
static inline vec fold_lanes(vec a, vec b) {
    vec move = _mm256_blend_ps(a, b, 0x55);
    return vec_add(_mm256_blend_ps(a, b, 0xaa), _mm256_permute_ps(move, 0xb1));
}

static inline vec vec_sum_lanes(const vec x[VEC_LANES]) {
    vec a = fold_halves(x[0], x[4]), b = fold_halves(x[1], x[5]);
    vec c = fold_halves(x[2], x[6]), d = fold_halves(x[3], x[7]);
    return fold_lanes(fold_pairs(a, c), fold_pairs(b, d));
}

static inline void vec_store_dots(const vec x[VEC_DOTS], int rows, float *s, int stride) {
    vec sums = vec_sum_lanes(x);
    __m128 low = _mm256_castps256_ps128(sums), high = _mm256_extractf128_ps(sums, 1);
    if (rows == 1) {
        vec_store(s, sums);
    } else if (rows == 2) {
        _mm_storeu_ps(s, low);
        _mm_storeu_ps(s + stride, high);
    } else {
        _mm_storel_pi((__m64 *)(void *)s, low);
        _mm_storeh_pi((__m64 *)(void *)(s + stride), low);
        _mm_storel_pi((__m64 *)(void *)(s + 2 * stride), high);
        _mm_storeh_pi((__m64 *)(void *)(s + 3 * stride), high);
    }
}

static inline void vec_transpose(vec x[VEC_LANES]) {
    vec t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        x[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        x[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        x[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        x[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vec low = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
        x[i] = low;
    }
}

static inline vec in_order(vec a) { // of quarters 0, 2, 1, 3
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xd8));
}
static inline void vec_split(vec a, vec b, vec *even, vec *odd) {
    *even = in_order(_mm256_shuffle_ps(a, b, 0x88));
    *odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
}
static inline void vec_merge(vec even, vec odd, vec *a, vec *b) {
    vec low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    *a = _mm256_permute2f128_ps(low, high, 0x20);
    *b = _mm256_permute2f128_ps(low, high, 0x31);
}

static inline void pair_of_bf16(__m256i x, vec *a, vec *b) {
    *a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    *b = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)));
}

static inline void vec_load_pair(const void *x, attnd_dtype dtype, vec *a, vec *b) {
    if (dtype == ATTND_F32) {
        *a = _mm256_loadu_ps(x);
        *b = _mm256_loadu_ps((const float *)x + 8);
    } else if (dtype == ATTND_BF16) {
        pair_of_bf16(_mm256_loadu_si256(x), a, b);
    } else {
        *a = _mm256_cvtph_ps(_mm_loadu_si128(x));
        *b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x + 1));
    }
}

// vec_load_pair_n: n can only be 8.
static inline void vec_load_pair_n(const void *x, attnd_dtype dtype, int32_t n, vec *a, vec *b) {
    (void)n;
    *b = vec_zero();
    if (dtype == ATTND_F32) {
        *a = _mm256_loadu_ps(x);
    } else if (dtype == ATTND_BF16) {
        pair_of_bf16(_mm256_zextsi128_si256(_mm_loadu_si128(x)), a, b);
    } else {
        *a = _mm256_cvtph_ps(_mm_loadu_si128(x));
    }
}

static inline __m256i f16_of_f8(__m256i x) {
    __m256i h = _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16((short)0xbf80));
    __m256i carry = _mm256_add_epi16(h, _mm256_set1_epi16(0x80));
    return _mm256_or_si256(h, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
}

static inline void vec_f8_to_f16(const void *x, int32_t n, uint16_t *halves) {
    __m256i y = _mm256_setzero_si256();
    if (n == 32) {
        y = _mm256_loadu_si256(x);
    } else {
        memcpy(&y, x, (size_t)n);
    }
    _mm256_storeu_si256((__m256i *)(void *)halves, f16_of_f8(_mm256_slli_epi16(y, 8)));
    _mm256_storeu_si256((__m256i *)(void *)(halves + 16), f16_of_f8(y));
}

// vec_widen and vec_narrow: n can only be 8.
static inline vec vec_widen(const void *x, attnd_dtype dtype, int32_t n) {
    (void)n;
    if (dtype == ATTND_F32) {
        return _mm256_loadu_ps(x);
    }
    __m128i y = _mm_loadu_si128(x);
    if (dtype == ATTND_BF16) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(y), 16));
    }
    return _mm256_cvtph_ps(y);
}

static inline void vec_narrow(void *x, attnd_dtype dtype, int32_t n, vec a) {
    (void)n;
    if (dtype == ATTND_F32) {
        _mm256_storeu_ps(x, a);
    } else if (dtype == ATTND_F16) {
        _mm_storeu_si128(x, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    } else {
        __m256i u = _mm256_castps_si256(a);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        __m256i sum = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        __m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
        vec is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
        sum = _mm256_blendv_epi8(sum, nan, _mm256_castps_si256(is_nan));
        sum = _mm256_srli_epi32(sum, 16);
        _mm_storeu_si128(
            x, _mm_packus_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
    }
}

#endif
