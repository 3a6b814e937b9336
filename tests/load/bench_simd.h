// bench_simd makes one function of several copies: MULTIVERSION(name, (parameters), arguments)
// defines `name`, which calls name_body(level, arguments) compiled for the best x86-64 level that
// the processor has.  The body is BODY void name_body(uint32_t level, parameters), level being the
// rows that a matrix product keeps in registers there.  (The attribute target_clones would do the
// same by ifunc, which sanitizers and aarch64 do not like.)
#ifndef ATTND_LOAD_BENCH_SIMD_H
#define ATTND_LOAD_BENCH_SIMD_H

#include <stdint.h>
#include <string.h>

#define BODY static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define TARGET_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma")))
#define TARGET_AVX2   __attribute__((target("avx2,fma")))
#define HAVE_AVX512                                                             \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && \
     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
#define HAVE_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#define MULTIVERSION(name, params, ...)              \
    TARGET_AVX512 static void name##_avx512 params { \
        name##_body(8, __VA_ARGS__);                 \
    }                                                \
    TARGET_AVX2 static void name##_avx2 params {     \
        name##_body(4, __VA_ARGS__);                 \
    }                                                \
    void name params {                               \
        if (HAVE_AVX512) {                           \
            name##_avx512(__VA_ARGS__);              \
        } else if (HAVE_AVX2) {                      \
            name##_avx2(__VA_ARGS__);                \
        } else {                                     \
            name##_body(2, __VA_ARGS__);             \
        }                                            \
    }
#else
#define MULTIVERSION(name, params, ...) \
    void name params {                  \
        name##_body(4, __VA_ARGS__);    \
    }
#endif

// GEMM_BODY is one strip of columns, `level` rows at a time: the accumulators stay in registers
// over the whole inner loop.  A vec is 64 bytes, which the compiler cuts to what the level has.
#define GEMM_BODY(name, type, vec)                                                    \
    BODY void name(uint32_t step, type *c, uint64_t ldc, const type *a, uint64_t lda, \
                   const type *b, uint32_t rows, uint32_t cols, uint32_t inner) {     \
        enum { WIDTH = 64 / sizeof(type) };                                           \
        for (uint32_t col = 0; col < cols; col += WIDTH) {                            \
            for (uint32_t row = 0; row < rows; row += step) {                         \
                vec acc[8];                                                           \
                for (uint32_t i = 0; i < step; i++) {                                 \
                    acc[i] = *(const vec *)(c + (row + i) * ldc + col);               \
                }                                                                     \
                for (uint32_t k = 0; k < inner; k++) {                                \
                    vec bk = *(const vec *)(b + (uint64_t)k * cols + col);            \
                    for (uint32_t i = 0; i < step; i++) {                             \
                        acc[i] += a[(row + i) * lda + k] * bk;                        \
                    }                                                                 \
                }                                                                     \
                for (uint32_t i = 0; i < step; i++) {                                 \
                    *(vec *)(c + (row + i) * ldc + col) = acc[i];                     \
                }                                                                     \
            }                                                                         \
        }                                                                             \
    }

// LANES are independent accumulators, so that one element does not wait for another.
enum { LANES = 8 };

#define SCALE_BODY(name, type)                                                    \
    BODY void name(uint32_t level, type *x, uint64_t n, type factor, type *max) { \
        (void)level;                                                              \
        type part[LANES];                                                         \
        for (int lane = 0; lane < LANES; lane++) {                                \
            part[lane] = *max;                                                    \
        }                                                                         \
        uint64_t i = 0;                                                           \
        for (; i + LANES <= n; i += LANES) {                                      \
            for (int lane = 0; lane < LANES; lane++) {                            \
                type y = x[i + (uint64_t)lane] * factor;                          \
                x[i + (uint64_t)lane] = y;                                        \
                part[lane] = y > part[lane] ? y : part[lane];                     \
            }                                                                     \
        }                                                                         \
        for (; i < n; i++) {                                                      \
            x[i] *= factor;                                                       \
            part[0] = x[i] > part[0] ? x[i] : part[0];                            \
        }                                                                         \
        for (int lane = 0; lane < LANES; lane++) {                                \
            *max = part[lane] > *max ? part[lane] : *max;                         \
        }                                                                         \
    }

// exp_one: exp(x) = 2^n * exp(r), n = round(x / ln 2), r = x - n ln 2 with ln 2 in two parts,
// |r| <= 0.347; exp(r) by its Taylor series up to r^13 / 13!, whose remainder is below 4e-18.
BODY double exp_one(double x) {
    static const double inv_factorial[] = {
        1.0 / 6227020800.0,
        1.0 / 479001600.0,
        1.0 / 39916800.0,
        1.0 / 3628800.0,
        1.0 / 362880.0,
        1.0 / 40320.0,
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        1.0 / 2.0,
        1.0,
        1.0,
    };
    const double magic = 6755399441055744.0; // 1.5 * 2^52: adding it rounds to an integer
    x = x > -708.0 ? x : -708.0;
    double shifted = x * 1.4426950408889634 + magic;
    double n = shifted - magic;
    double r = (x - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
    double y = inv_factorial[0];
    for (uint32_t i = 1; i < sizeof(inv_factorial) / sizeof(inv_factorial[0]); i++) {
        y = y * r + inv_factorial[i];
    }
    uint64_t bits;
    memcpy(&bits, &shifted,
           sizeof(bits)); // n is in the low bits; the exponent field takes n + 1023
    bits = (bits + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof(scale));
    return y * scale;
}

#endif
