// dtype names the storage types of tensors and of the KV cache, and converts single values.  The
// numbers travel on the wire.  The conversions are the plain, exact ones (round to nearest, ties to
// even); kernels have their own vector forms, which tests hold against these.  Any thread.
#ifndef ATTND_PROTO_DTYPE_H
#define ATTND_PROTO_DTYPE_H

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum attnd_dtype {
    ATTND_F32 = 0,
    ATTND_BF16 = 1,
    ATTND_F16 = 2,
    ATTND_F8E4M3 = 3, // 1-4-3, no infinities, NaN = 0x7f and 0xff, largest 448
    ATTND_NUM_DTYPES,
} attnd_dtype;

// attnd_dtype_bytes returns the size of one element, 0 for a number that is no dtype.
static inline uint32_t attnd_dtype_bytes(uint32_t dtype) {
    static const uint8_t bytes[ATTND_NUM_DTYPES] = {4, 2, 2, 1};
    return dtype < ATTND_NUM_DTYPES ? bytes[dtype] : 0;
}

// attnd_dtype_name returns "f32", "bf16", "f16", "f8e4m3"; "?" for a number that is no dtype.
const char *attnd_dtype_name(uint32_t dtype);

// attnd_dtype_parse is the inverse; returns ATTND_NUM_DTYPES for a name that is none.
attnd_dtype attnd_dtype_parse(const char *name);

static inline float attnd_bf16_to_f32(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof(f));
    return f;
}

// attnd_f32_to_bf16 keeps NaN a (quiet) NaN.
static inline uint16_t attnd_f32_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((u >> 16) | 0x40u);
    }
    u += 0x7fffu + ((u >> 16) & 1u);
    return (uint16_t)(u >> 16);
}

float attnd_f16_to_f32(uint16_t x);
uint16_t attnd_f32_to_f16(float f); // overflow gives infinity, subnormals are exact
float attnd_f8e4m3_to_f32(uint8_t x);
uint8_t attnd_f32_to_f8e4m3(float f); // saturates at +-448; NaN stays NaN

// attnd_load reads element i of a tensor of that dtype; attnd_store writes it, rounded.
double attnd_load(const void *base, attnd_dtype dtype, uint64_t i);
void attnd_store(void *base, attnd_dtype dtype, uint64_t i, double value);

#ifdef __cplusplus
}
#endif

#endif
