// Which instruction sets there are: what the machine has, what this build has, what a name selects.
// The only file that asks the compiler about the architecture.
#include <stdbool.h>
#include <string.h>

#include "attention/cpu/attn_cpu_ops.h"

#if defined(__x86_64__)
#include <cpuid.h>

#define CPUID_F16C        (1u << 29) // leaf 1, ECX
#define CPUID_AVX512_VBMI (1u << 1)  // leaf 7, ECX
#define CPUID_AVX512_BF16 (1u << 5)  // leaf 7, subleaf 1, EAX
#endif

// isa is one instruction set: the feature that it needs beside those of the sets before it.
typedef struct isa {
    const char *name;
    uint32_t features; // all that must be there
    void (*init)(attn_cpu_ops *ops);
} isa;

// In rising order of preference; ATTN_HAVE_X comes from CMake when the file is part of the build.
static const isa isas[] = {
    {"scalar", 0, attn_cpu_scalar_init},
#ifdef ATTN_HAVE_AVX2
    {"avx2", ATTN_CPU_AVX2, attn_cpu_avx2_init},
#endif
#ifdef ATTN_HAVE_AVX512
    {"avx512", ATTN_CPU_AVX2 | ATTN_CPU_AVX512, attn_cpu_avx512_init},
#endif
#ifdef ATTN_HAVE_AVX512_BF16
    {"avx512_bf16", ATTN_CPU_AVX2 | ATTN_CPU_AVX512 | ATTN_CPU_AVX512_BF16,
     attn_cpu_avx512_bf16_init},
#endif
#ifdef ATTN_HAVE_NEON
    {"neon", ATTN_CPU_NEON, attn_cpu_neon_init},
#endif
};

enum { NUM_ISAS = sizeof(isas) / sizeof(isas[0]) };

#if defined(__x86_64__)
// has_bits says that CPUID sets all bits of a register, 0 = EAX to 3 = EDX; for what clang 14 has
// no name.
static bool has_bits(uint32_t leaf, uint32_t subleaf, int reg, uint32_t bits) {
    uint32_t regs[4] = {0};
    return __get_cpuid_count(leaf, subleaf, &regs[0], &regs[1], &regs[2], &regs[3]) &&
           (regs[reg] & bits) == bits;
}

uint32_t attn_cpu_detect(void) {
    uint32_t features = 0;
    __builtin_cpu_init(); // its answers include what the operating system saves
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        has_bits(1, 0, 2, CPUID_F16C)) {
        features |= ATTN_CPU_AVX2;
    }
    if (features && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        features |= ATTN_CPU_AVX512;
    }
    if ((features & ATTN_CPU_AVX512) && has_bits(7, 0, 2, CPUID_AVX512_VBMI) &&
        has_bits(7, 1, 0, CPUID_AVX512_BF16)) {
        features |= ATTN_CPU_AVX512_BF16;
    }
    return features;
}

uint32_t attn_cpu_prefer(uint32_t features) {
    return __builtin_cpu_is("intel") ? features & ~(uint32_t)ATTN_CPU_AVX512_BF16 : features;
}
#else
uint32_t attn_cpu_detect(void) {
#if defined(__aarch64__)
    return ATTN_CPU_NEON; // every AArch64 has it
#else
    return 0;
#endif
}

uint32_t attn_cpu_prefer(uint32_t features) {
    return features;
}
#endif

void attn_cpu_init(attn_cpu_ops *ops, uint32_t features) {
    memset(ops, 0, sizeof(*ops));
    for (uint32_t i = 0; i < NUM_ISAS; i++) {
        if ((features & isas[i].features) == isas[i].features) {
            isas[i].init(ops);
            ops->isa = isas[i].name;
        }
    }
}

attnd_err attn_cpu_features_of(uint32_t *features, const char *name, uint32_t allowed,
                               attnd_errinfo *info) {
    for (uint32_t i = 0; i < NUM_ISAS; i++) {
        if (strcmp(name, isas[i].name) == 0) {
            if ((allowed & isas[i].features) != isas[i].features) {
                return attnd_fail(info, ATTND_ENOTSUP, "isa", "this machine has no %s", name);
            }
            *features = isas[i].features;
            return ATTND_OK;
        }
    }
    return attnd_fail(info, ATTND_ENOTSUP, "isa", "this build has no kernels for '%s'", name);
}
