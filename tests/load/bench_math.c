// Four loops: matrix product in float64 and float32, exp, and random numbers from a counter.
//
// Each loop is one always-inline body.  MULTIVERSION makes a copy of it per instruction set level
// and a function that picks one; GCC and Clang then vectorise each copy for its level.  (The
// target_clones attribute would do the same by ifunc, which sanitizers and aarch64 do not like.)
// The matrix products use vectors of 64 bytes, which the compiler cuts to what the level has.
//
// The generator is the 32-bit finalizer of MurmurHash3 (Appleby, public domain) over a Weyl
// sequence, with the second half of the key mixed in between its two multiplications: three
// multiplications an element, no state, any element by itself.
#include "tests/load/bench_math.h"

#include <math.h>
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

typedef double f64_vec __attribute__((vector_size(64), aligned(8), may_alias));
typedef float f32_vec __attribute__((vector_size(64), aligned(4), may_alias));

// One strip of columns, as many rows at a time as the level has registers for: the accumulators
// stay in registers over the whole inner loop.
#define GEMM_BODY(name, type, vec)                                                    \
    BODY void name(uint32_t step, type *c, uint64_t ldc, const type *a, uint64_t lda, \
                   const type *b, uint32_t rows, uint32_t cols, uint32_t inner) {     \
        enum { LANES = 64 / sizeof(type) };                                           \
        for (uint32_t col = 0; col < cols; col += LANES) {                            \
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

GEMM_BODY(bench_gemm_f64_body, double, f64_vec)
GEMM_BODY(bench_gemm_f32_body, float, f32_vec)

MULTIVERSION(bench_gemm_f64,
             (double *c, uint64_t ldc, const double *a, uint64_t lda, const double *b,
              uint32_t rows, uint32_t cols, uint32_t inner),
             c, ldc, a, lda, b, rows, cols, inner)
MULTIVERSION(bench_gemm_f32,
             (float *c, uint64_t ldc, const float *a, uint64_t lda, const float *b, uint32_t rows,
              uint32_t cols, uint32_t inner),
             c, ldc, a, lda, b, rows, cols, inner)

// exp(x) = 2^n * exp(r), n = round(x / ln 2), r = x - n ln 2 with ln 2 in two parts, |r| <= 0.347;
// exp(r) by its Taylor series up to r^13 / 13!, whose remainder is below 4e-18.
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

enum { LANES = 8 }; // independent accumulators, so that one element does not wait for another

BODY void bench_exp_f64_body(uint32_t level, double *x, uint64_t n, double shift, double *sum) {
    (void)level;
    double part[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            x[i + (uint64_t)lane] = exp_one(x[i + (uint64_t)lane] - shift);
            part[lane] += x[i + (uint64_t)lane];
        }
    }
    for (; i < n; i++) {
        x[i] = exp_one(x[i] - shift);
        part[0] += x[i];
    }
    for (int lane = 0; lane < LANES; lane++) {
        *sum += part[lane];
    }
}

BODY void bench_exp_f32_body(uint32_t level, float *x, uint64_t n, float shift) {
    (void)level;
    double wide[64];
    for (uint64_t at = 0; at < n; at += 64) {
        uint32_t len = n - at < 64 ? (uint32_t)(n - at) : 64;
        for (uint32_t i = 0; i < len; i++) {
            float y = x[at + i] - shift;
            wide[i] = (double)y;
        }
        for (uint32_t i = 0; i < len; i++) {
            wide[i] = exp_one(wide[i]);
        }
        for (uint32_t i = 0; i < len; i++) {
            x[at + i] = (float)wide[i];
        }
    }
}

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

SCALE_BODY(bench_scale_f64_body, double)
SCALE_BODY(bench_scale_f32_body, float)

BODY void bench_divide_f32_body(uint32_t level, float *x, uint64_t n, float divisor) {
    (void)level;
    for (uint64_t i = 0; i < n; i++) {
        x[i] /= divisor;
    }
}

MULTIVERSION(bench_exp_f64, (double *x, uint64_t n, double shift, double *sum), x, n, shift, sum)
MULTIVERSION(bench_exp_f32, (float *x, uint64_t n, float shift), x, n, shift)
MULTIVERSION(bench_scale_f64, (double *x, uint64_t n, double factor, double *max), x, n, factor,
             max)
MULTIVERSION(bench_scale_f32, (float *x, uint64_t n, float factor, float *max), x, n, factor, max)
MULTIVERSION(bench_divide_f32, (float *x, uint64_t n, float divisor), x, n, divisor)

BODY void bench_uniform_body(uint32_t level, float *out, uint64_t key, uint32_t first, uint32_t n) {
    (void)level;
    uint32_t lo = (uint32_t)key, hi = (uint32_t)(key >> 32);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t x = (first + i) * 0x9e3779b1u + lo;
        x ^= x >> 16;
        x *= 0x85ebca6bu;
        x ^= hi;
        x ^= x >> 13;
        x *= 0xc2b2ae35u;
        x ^= x >> 16;
        int32_t odd = (int32_t)(x >> 8) * 2 + 1 - (1 << 24); // odd, so never 0; exact in float32
        out[i] = (float)odd * (1.7320508f / 16777216.0f);
    }
}

MULTIVERSION(bench_uniform, (float *out, uint64_t key, uint32_t first, uint32_t n), out, key, first,
             n)

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014), Stafford's variant 13, public domain.
uint64_t bench_hash64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
