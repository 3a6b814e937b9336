// The loops of bench_ceil for AVX2 with FMA and F16C.
#include <immintrin.h>

#define CEIL_VECTOR_BYTES 32
#include "tests/load/bench_ceil_loops.h"

static float from_f16(const uint16_t *x, uint64_t rounds) {
    ceil_f32 acc[4];
    memset(acc, 0, sizeof(acc));
    for (uint64_t round = 0; round < rounds; round++) {
        for (int i = 0; i < BENCH_CEIL_ELEMENTS; i += 4 * CEIL_LANES) {
            for (int part = 0; part < 4; part++) {
                const void *at = x + i + part * CEIL_LANES;
                acc[part] += (ceil_f32)_mm256_cvtph_ps(_mm_loadu_si128(at));
            }
        }
        __asm__ volatile("" ::: "memory");
    }
    return ceil_sum(acc[0] + acc[1] + acc[2] + acc[3]);
}

const bench_ceil_ops bench_ceil_avx2 = {
    .isa = "avx2",
    .read = ceil_read,
    .fma = ceil_fma,
    .fma_flops = CEIL_FMA_FLOPS,
    .from_f16 = from_f16,
    .exp2 = ceil_exp2,
};
