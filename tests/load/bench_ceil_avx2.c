// The loops of bench_ceil for AVX2 with FMA and F16C.
#include <immintrin.h>

#define CEIL_VECTOR_BYTES 32
#define CEIL_WIDENS
#include "tests/load/bench_ceil_loops.h"

static ceil_f32 ceil_widen(const uint16_t *x) {
    return (ceil_f32)_mm256_cvtph_ps(_mm_loadu_si128((const void *)x));
}

const bench_ceil_ops bench_ceil_avx2 = {
    .isa = "avx2",
    .read = ceil_read,
    .fma = ceil_fma,
    .fma_flops = CEIL_FMA_FLOPS,
    .from_f16 = ceil_from_f16,
    .exp2 = ceil_exp2,
};
