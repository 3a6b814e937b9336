// attn_cpu_avx2.c compiles the SIMD kernels (attn_cpu_simd.h) for AVX2 with FMA and F16C.
// Thread: any.
#include "attention/cpu/attn_cpu_vec_avx2.h"

#include "attention/cpu/attn_cpu_simd_table.h"

void attn_cpu_avx2_init(attn_cpu_ops *ops) {
    static const char *const decode[ATTND_NUM_DTYPES] = SIMD_NAMES("avx2", "decode");
    static const char *const prefill[ATTND_NUM_DTYPES] = SIMD_NAMES("avx2", "prefill");
    ops->isa = "avx2";
    simd_init(ops, decode, prefill);
}
