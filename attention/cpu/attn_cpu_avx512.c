// attn_cpu_avx512.c compiles the SIMD kernels (attn_cpu_simd.h) for AVX-512 with F, BW, DQ and VL.
// Thread: any.
#include "attention/cpu/attn_cpu_vec_avx512.h"

#include "attention/cpu/attn_cpu_simd_table.h"

void attn_cpu_avx512_init(attn_cpu_ops *ops) {
    static const char *const decode[ATTND_NUM_DTYPES] = SIMD_NAMES("avx512", "decode");
    static const char *const prefill[ATTND_NUM_DTYPES] = SIMD_NAMES("avx512", "prefill");
    ops->isa = "avx512";
    simd_init(ops, decode, prefill);
}
