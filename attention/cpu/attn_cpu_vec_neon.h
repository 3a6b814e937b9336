// attn_cpu_vec_neon is the vector type of the SIMD kernels for AArch64: the names of
// attn_cpu_vec_avx512.h, where they are explained.  To be included by one .c file.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_VEC_NEON_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_VEC_NEON_H

#include <arm_neon.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "proto/dtype.h"

typedef float32x4_t vec;

enum {
    VEC_LANES = 4,
    VEC_DOTS = 16,
    VEC_TILE_ROWS = 6, // 24 of 32 registers
    VEC_TILE_VECS = 4,
    VEC_SUM_VECS = 16,
};

// vec_fetches_far says that prefetches go into the second cache.
static inline bool vec_fetches_far(void) {
    return false;
}
static inline vec vec_zero(void) {
    return vdupq_n_f32(0);
}
static inline vec vec_set1(float x) {
    return vdupq_n_f32(x);
}
static inline vec vec_iota(void) {
    const float lanes[4] = {0, 1, 2, 3};
    return vld1q_f32(lanes);
}
static inline vec vec_load(const float *x) {
    return vld1q_f32(x);
}
static inline void vec_store(float *x, vec a) {
    vst1q_f32(x, a);
}
static inline vec vec_add(vec a, vec b) {
    return vaddq_f32(a, b);
}
static inline vec vec_sub(vec a, vec b) {
    return vsubq_f32(a, b);
}
static inline vec vec_mul(vec a, vec b) {
    return vmulq_f32(a, b);
}
static inline vec vec_div(vec a, vec b) {
    return vdivq_f32(a, b);
}
static inline vec vec_fma(vec a, vec b, vec c) {
    return vfmaq_f32(c, a, b);
}
static inline vec vec_max(vec a, vec b) {
    return vmaxq_f32(a, b);
}
static inline vec vec_min(vec a, vec b) {
    return vminq_f32(a, b);
}
static inline vec vec_abs(vec a) {
    return vabsq_f32(a);
}
static inline vec vec_copysign(vec magnitude, vec sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}
static inline vec vec_round(vec a) {
    return vrndnq_f32(a);
}
static inline vec vec_scale2(vec a, vec n) {
    int32x4_t power = vshlq_n_s32(vcvtq_s32_f32(n), 23);
    uint32x4_t scaled = vreinterpretq_u32_s32(vaddq_s32(vreinterpretq_s32_f32(a), power));
    return vreinterpretq_f32_u32(vbicq_u32(scaled, vcltq_f32(n, vdupq_n_f32(-126.0f))));
}
static inline vec vec_select(uint32_t bits, vec a, vec b) {
    const uint32_t lanes[4] = {1, 2, 4, 8};
    return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lanes)), a, b);
}
static inline vec vec_if_less(vec a, vec b, vec x, vec y) {
    return vbslq_f32(vcltq_f32(a, b), x, y);
}
static inline float vec_hmax(vec a) {
    return vmaxvq_f32(a);
}
static inline float vec_hsum(vec a) {
    return vaddvq_f32(a);
}

static inline vec vec_sum_lanes(const vec x[VEC_LANES]) {
    return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
}

static inline void vec_store_dots(const vec x[VEC_DOTS], int rows, float *s, int stride) {
    int keys = VEC_DOTS / rows;
#pragma GCC unroll 4
    for (int i = 0; i < VEC_DOTS; i += VEC_LANES) {
        vec_store(s + i / keys * stride + i % keys, vec_sum_lanes(x + i));
    }
}

static inline void vec_transpose(vec x[VEC_LANES]) {
    float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(x[0], x[1]));
    float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(x[0], x[1]));
    float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(x[2], x[3]));
    float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(x[2], x[3]));
    x[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
    x[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
    x[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
    x[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}

static inline void vec_split(vec a, vec b, vec *even, vec *odd) {
    *even = vuzp1q_f32(a, b);
    *odd = vuzp2q_f32(a, b);
}
static inline void vec_merge(vec even, vec odd, vec *a, vec *b) {
    *a = vzip1q_f32(even, odd);
    *b = vzip2q_f32(even, odd);
}

static inline void vec_load_pair(const void *x, attnd_dtype dtype, vec *a, vec *b) {
    if (dtype == ATTND_F32) {
        *a = vld1q_f32(x);
        *b = vld1q_f32((const float *)x + 4);
        return;
    }
    uint16x8_t y = vld1q_u16(x);
    if (dtype == ATTND_BF16) {
        uint32x4_t u = vreinterpretq_u32_u16(y);
        *a = vreinterpretq_f32_u32(vshlq_n_u32(u, 16));
        *b = vreinterpretq_f32_u32(vandq_u32(u, vdupq_n_u32(0xffff0000u)));
    } else {
        *a = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(y)));
        *b = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(y)));
    }
}

// vec_load_pair_n is never called: a pair has 8 columns, and head dims are multiples of it.
static inline void vec_load_pair_n(const void *x, attnd_dtype dtype, int32_t n, vec *a, vec *b) {
    (void)n;
    vec_load_pair(x, dtype, a, b);
}

static inline uint16x8_t f16_of_f8(uint16x8_t x) {
    int16x8_t half = vshrq_n_s16(vreinterpretq_s16_u16(x), 1);
    uint16x8_t h = vandq_u16(vreinterpretq_u16_s16(half), vdupq_n_u16(0xbf80));
    uint16x8_t carry = vaddq_u16(h, vdupq_n_u16(0x80));
    return vorrq_u16(h, vandq_u16(carry, vdupq_n_u16(0x4000)));
}

static inline void vec_f8_to_f16(const void *x, int32_t n, uint16_t *halves) {
    uint8_t bytes[16] = {0};
    memcpy(bytes, x, (size_t)n);
    uint16x8_t y = vreinterpretq_u16_u8(vld1q_u8(bytes));
    vst1q_u16(halves, f16_of_f8(vshlq_n_u16(y, 8)));
    vst1q_u16(halves + 8, f16_of_f8(y));
}

// vec_widen and vec_narrow: n can only be 4.
static inline vec vec_widen(const void *x, attnd_dtype dtype, int32_t n) {
    (void)n;
    if (dtype == ATTND_F32) {
        return vld1q_f32(x);
    }
    uint16x4_t y = vld1_u16(x);
    if (dtype == ATTND_BF16) {
        return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(y), 16));
    }
    return vcvt_f32_f16(vreinterpret_f16_u16(y));
}

static inline void vec_narrow(void *x, attnd_dtype dtype, int32_t n, vec a) {
    (void)n;
    if (dtype == ATTND_F32) {
        vst1q_f32(x, a);
    } else if (dtype == ATTND_F16) {
        vst1_u16(x, vreinterpret_u16_f16(vcvt_f16_f32(a)));
    } else {
        uint32x4_t u = vreinterpretq_u32_f32(a);
        uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
        uint32x4_t sum = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        uint32x4_t nan = vorrq_u32(u, vdupq_n_u32(0x400000));
        sum = vbslq_u32(vceqq_f32(a, a), sum, nan);
        vst1_u16(x, vshrn_n_u32(sum, 16));
    }
}

#endif
