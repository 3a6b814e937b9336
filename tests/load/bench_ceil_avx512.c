// The loops of bench_ceil for AVX-512 (F, BW, DQ, VL), and beside them its bf16 dot product.
#include <immintrin.h>

#define CEIL_VECTOR_BYTES 64
#define CEIL_WIDENS
#include "tests/load/bench_ceil_loops.h"

static ceil_f32 ceil_widen(const uint16_t *x) {
    return (ceil_f32)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)x));
}

const bench_ceil_ops bench_ceil_avx512 = {
    .isa = "avx512",
    .read = ceil_read,
    .fma = ceil_fma,
    .fma_flops = CEIL_FMA_FLOPS,
    .from_f16 = ceil_from_f16,
    .exp2 = ceil_exp2,
};

// A dot product takes pairs of bf16 and adds both products to a float32: 4 operations a lane.
enum { DOT_FLOPS = 4 * CEIL_CHAINS * CEIL_LANES };

__attribute__((target("avx512bf16"))) static float dot_bf16(uint64_t rounds) {
    __m512 acc[CEIL_CHAINS];
    __m512i ones = _mm512_set1_epi16(0x3f80); // 1.0
    __m512i small = _mm512_set1_epi16((short)(rounds & 1 ? 0x3a80 : 0x3a00));
    for (int chain = 0; chain < CEIL_CHAINS; chain++) {
        acc[chain] = _mm512_set1_ps((float)chain);
    }
    for (uint64_t round = 0; round < rounds; round++) {
        for (int chain = 0; chain < CEIL_CHAINS; chain++) {
            acc[chain] = _mm512_dpbf16_ps(acc[chain], (__m512bh)ones, (__m512bh)small);
        }
    }
    for (int chain = 1; chain < CEIL_CHAINS; chain++) {
        acc[0] = _mm512_add_ps(acc[0], acc[chain]);
    }
    return ceil_sum((ceil_f32)acc[0]);
}

const bench_ceil_ops bench_ceil_avx512_bf16 = {
    .isa = "avx512_bf16",
    .read = ceil_read,
    .fma = ceil_fma,
    .fma_flops = CEIL_FMA_FLOPS,
    .dot_bf16 = dot_bf16,
    .dot_flops = DOT_FLOPS,
    .from_f16 = ceil_from_f16,
    .exp2 = ceil_exp2,
};
