// The loops of bench_ceil in portable C, as the compiler makes them for the lowest processor that
// the build is for.
#include "proto/dtype.h"
#include "tests/load/bench_ceil_loops.h"

static float from_f16(const uint16_t *x, uint64_t rounds) {
    float sum = 0;
    for (uint64_t round = 0; round < rounds; round++) {
        for (int i = 0; i < BENCH_CEIL_ELEMENTS; i++) {
            sum += attnd_f16_to_f32(x[i]);
        }
        __asm__ volatile("" ::: "memory");
    }
    return sum;
}

const bench_ceil_ops bench_ceil_scalar = {
    .isa = "scalar",
    .read = ceil_read,
    .fma = ceil_fma,
    .fma_flops = CEIL_FMA_FLOPS,
    .from_f16 = from_f16,
    .exp2 = ceil_exp2,
};
