// attn_cpu_neon.c compiles the SIMD kernels (attn_cpu_simd.h) for AArch64.
// Thread: any.
#include "attention/cpu/attn_cpu_vec_neon.h"

#include "attention/cpu/attn_cpu_simd_table.h"

void attn_cpu_neon_init(attn_cpu_ops *ops) {
    static const char *const decode[ATTND_NUM_DTYPES] = SIMD_NAMES("neon", "decode");
    static const char *const prefill[ATTND_NUM_DTYPES] = SIMD_NAMES("neon", "prefill");
    ops->isa = "neon";
    simd_init(ops, decode, prefill);
}
