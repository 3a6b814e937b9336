// The loops of bench_ceil for NEON of AArch64.
#include <arm_neon.h>

#define CEIL_VECTOR_BYTES 16
#include "tests/load/bench_ceil_loops.h"

static float from_f16(const uint16_t *x, uint64_t rounds) {
    ceil_f32 acc[4];
    memset(acc, 0, sizeof(acc));
    for (uint64_t round = 0; round < rounds; round++) {
        for (int i = 0; i < BENCH_CEIL_ELEMENTS; i += 4 * CEIL_LANES) {
            for (int part = 0; part < 4; part++) {
                float16x4_t half = vreinterpret_f16_u16(vld1_u16(x + i + part * CEIL_LANES));
                acc[part] += (ceil_f32)vcvt_f32_f16(half);
            }
        }
        __asm__ volatile("" ::: "memory");
    }
    return ceil_sum(acc[0] + acc[1] + acc[2] + acc[3]);
}

const bench_ceil_ops bench_ceil_neon = {
    .isa = "neon",
    .read = ceil_read,
    .fma = ceil_fma,
    .fma_flops = CEIL_FMA_FLOPS,
    .from_f16 = from_f16,
    .exp2 = ceil_exp2,
};
