// attn_cpu_convert turns runs of elements of a storage type into float32 and back, in plain C that
// a compiler can vectorise: no branch, no table but for f8e4m3.  Same values as proto/dtype.h,
// which a test holds it to.  NaNs stay NaN, though not the same one.  Any thread.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_CONVERT_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_CONVERT_H

#include <stdint.h>
#include <string.h>

#include "proto/dtype.h"

static inline uint32_t attn_bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    return u;
}

static inline float attn_float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof(f));
    return f;
}

// The exponent of half is moved to float's place and rescaled by a product, which is exact for
// subnormals too; what was 31 becomes at least 2^16 and then gets float's largest exponent.
static inline float attn_f16_to_f32(uint16_t h) {
    float f = attn_float_of((h & 0x7fffu) << 13) * 0x1p112f;
    uint32_t u = attn_bits_of(f);
    u |= f >= 65536.0f ? 0x7f800000u : 0u;
    return attn_float_of(u | (h & 0x8000u) << 16);
}

// Round to nearest even at bit 13 for normal results; subnormal ones are rounded by adding 0.5,
// whose ulp is half's smallest step.
static inline uint16_t attn_f32_to_f16(float f) {
    uint32_t sign = attn_bits_of(f) & 0x80000000u;
    uint32_t u = attn_bits_of(f) ^ sign;
    uint32_t normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
    uint32_t tiny = attn_bits_of(attn_float_of(u) + 0.5f) - attn_bits_of(0.5f);
    uint32_t huge = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t h = u < (113u << 23) ? tiny : normal;
    h = u >= 0x477ff000u ? huge : h; // 65520 and up: infinity
    return (uint16_t)(h | sign >> 16);
}

// The same for 1-4-3: rounded at bit 20, smallest step 2^-9 = ulp of 2^14, saturated at 448 = 0x7e.
static inline uint8_t attn_f32_to_f8e4m3(float f) {
    uint32_t sign = attn_bits_of(f) & 0x80000000u;
    uint32_t u = attn_bits_of(f) ^ sign;
    uint32_t normal = (u - (120u << 23) + 0x7ffffu + ((u >> 20) & 1u)) >> 20;
    uint32_t tiny = attn_bits_of(attn_float_of(u) + 0x1p14f) - attn_bits_of(0x1p14f);
    uint32_t huge = u > 0x7f800000u ? 0x7fu : 0x7eu;
    uint32_t x = u < (121u << 23) ? tiny : normal;
    x = u >= attn_bits_of(448.0f) ? huge : x;
    return (uint8_t)(x | sign >> 24);
}

// f8e4m3's exponent is moved and rescaled like half's; 0x7f is its only NaN.
static inline float attn_f8e4m3_to_f32(uint8_t x) {
    float f = attn_float_of((x & 0x7fu) << 20) * 0x1p120f;
    uint32_t u = (x & 0x7fu) == 0x7fu ? 0x7fc00000u : attn_bits_of(f);
    return attn_float_of(u | (x & 0x80u) << 24);
}

static inline void attn_to_f32(float *to, const void *from, attnd_dtype dtype, int32_t num) {
    const uint16_t *half = from;
    const uint8_t *byte = from;
    switch (dtype) {
    case ATTND_F32:
        memcpy(to, from, (size_t)num * sizeof(float));
        break;
    case ATTND_BF16:
        for (int32_t i = 0; i < num; i++) {
            to[i] = attn_float_of((uint32_t)half[i] << 16);
        }
        break;
    case ATTND_F16:
        for (int32_t i = 0; i < num; i++) {
            to[i] = attn_f16_to_f32(half[i]);
        }
        break;
    default:
        for (int32_t i = 0; i < num; i++) {
            to[i] = attn_f8e4m3_to_f32(byte[i]);
        }
        break;
    }
}

static inline void attn_from_f32(void *to, const float *from, attnd_dtype dtype, int32_t num) {
    uint16_t *half = to;
    uint8_t *byte = to;
    switch (dtype) {
    case ATTND_F32:
        memcpy(to, from, (size_t)num * sizeof(float));
        break;
    case ATTND_BF16:
        for (int32_t i = 0; i < num; i++) {
            half[i] = attnd_f32_to_bf16(from[i]);
        }
        break;
    case ATTND_F16:
        for (int32_t i = 0; i < num; i++) {
            half[i] = attn_f32_to_f16(from[i]);
        }
        break;
    default:
        for (int32_t i = 0; i < num; i++) {
            byte[i] = attn_f32_to_f8e4m3(from[i]);
        }
        break;
    }
}

#endif
