// Names of the storage types and the exact scalar conversions; the slow, obviously right forms that
// the vector kernels are tested against.
#include "proto/dtype.h"

#include <math.h>

static const char *const names[ATTND_NUM_DTYPES] = {"f32", "bf16", "f16", "f8e4m3"};

const char *attnd_dtype_name(uint32_t dtype) {
    return dtype < ATTND_NUM_DTYPES ? names[dtype] : "?";
}

attnd_dtype attnd_dtype_parse(const char *name) {
    uint32_t i = 0;
    while (i < ATTND_NUM_DTYPES && strcmp(name, names[i]) != 0) {
        i++;
    }
    return (attnd_dtype)i;
}

// to_float decodes a small float of exp_bits and man_bits without infinities or NaN.
static float to_float(uint32_t x, int exp_bits, int man_bits) {
    int bias = (1 << (exp_bits - 1)) - 1;
    int exponent = (int)(x >> man_bits) & ((1 << exp_bits) - 1);
    int mantissa = (int)(x & ((1u << man_bits) - 1u));
    if (exponent == 0) {
        return ldexpf((float)mantissa, 1 - bias - man_bits);
    }
    return ldexpf((float)(mantissa + (1 << man_bits)), exponent - bias - man_bits);
}

// round_to_grid rounds |f| to the nearest value that man_bits and min_exp (the exponent of the
// smallest normal number) can hold, ties to even: the current rounding mode of rintf.
static float round_to_grid(float f, int man_bits, int min_exp) {
    int exponent = 0;
    frexpf(f, &exponent);
    exponent -= 1; // f = 1.x * 2^exponent
    int step = (exponent < min_exp ? min_exp : exponent) - man_bits;
    return ldexpf(rintf(ldexpf(f, -step)), step);
}

// encode packs a value that lies on the grid already.
static uint32_t encode(float f, int exp_bits, int man_bits) {
    int bias = (1 << (exp_bits - 1)) - 1;
    if (f == 0.0f) {
        return 0;
    }
    int exponent = 0;
    frexpf(f, &exponent);
    exponent -= 1;
    if (exponent < 1 - bias) {
        return (uint32_t)ldexpf(f, bias - 1 + man_bits);
    }
    uint32_t mantissa = (uint32_t)ldexpf(f, man_bits - exponent) - (1u << man_bits);
    return (uint32_t)(exponent + bias) << man_bits | mantissa;
}

float attnd_f16_to_f32(uint16_t x) {
    float sign = (x & 0x8000u) ? -1.0f : 1.0f;
    uint32_t magnitude = x & 0x7fffu;
    if (magnitude > 0x7c00u) {
        return NAN;
    }
    return magnitude == 0x7c00u ? sign * INFINITY : sign * to_float(magnitude, 5, 10);
}

uint16_t attnd_f32_to_f16(float f) {
    uint32_t sign = signbit(f) ? 0x8000u : 0u;
    if (isnan(f)) {
        return (uint16_t)(sign | 0x7e00u);
    }
    float rounded = fabsf(f) < 65536.0f ? round_to_grid(fabsf(f), 10, -14) : INFINITY;
    return (uint16_t)(sign | (rounded > 65504.0f ? 0x7c00u : encode(rounded, 5, 10)));
}

float attnd_f8e4m3_to_f32(uint8_t x) {
    float sign = (x & 0x80u) ? -1.0f : 1.0f;
    return (x & 0x7fu) == 0x7fu ? NAN : sign * to_float(x & 0x7fu, 4, 3);
}

uint8_t attnd_f32_to_f8e4m3(float f) {
    uint32_t sign = signbit(f) ? 0x80u : 0u;
    if (isnan(f)) {
        return (uint8_t)(sign | 0x7fu);
    }
    float rounded = fabsf(f) < 464.0f ? round_to_grid(fabsf(f), 3, -6) : 448.0f;
    return (uint8_t)(sign | encode(rounded > 448.0f ? 448.0f : rounded, 4, 3));
}

double attnd_load(const void *base, attnd_dtype dtype, uint64_t i) {
    switch (dtype) {
    case ATTND_F32:
        return (double)((const float *)base)[i];
    case ATTND_BF16:
        return (double)attnd_bf16_to_f32(((const uint16_t *)base)[i]);
    case ATTND_F16:
        return (double)attnd_f16_to_f32(((const uint16_t *)base)[i]);
    default:
        return (double)attnd_f8e4m3_to_f32(((const uint8_t *)base)[i]);
    }
}

void attnd_store(void *base, attnd_dtype dtype, uint64_t i, double value) {
    switch (dtype) {
    case ATTND_F32:
        ((float *)base)[i] = (float)value;
        break;
    case ATTND_BF16:
        ((uint16_t *)base)[i] = attnd_f32_to_bf16((float)value);
        break;
    case ATTND_F16:
        ((uint16_t *)base)[i] = attnd_f32_to_f16((float)value);
        break;
    default:
        ((uint8_t *)base)[i] = attnd_f32_to_f8e4m3((float)value);
        break;
    }
}
