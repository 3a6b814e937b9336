// The loops of bench_ceil for NEON of AArch64.
#include <arm_neon.h>

#define CEIL_VECTOR_BYTES 16
#define CEIL_WIDENS
#include "tests/load/bench_ceil_loops.h"

static ceil_f32 ceil_widen(const uint16_t *x) {
    return (ceil_f32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
}

const bench_ceil_ops bench_ceil_neon = {
    .isa = "neon",
    .read = ceil_read,
    .fma = ceil_fma,
    .fma_flops = CEIL_FMA_FLOPS,
    .from_f16 = ceil_from_f16,
    .exp2 = ceil_exp2,
};
