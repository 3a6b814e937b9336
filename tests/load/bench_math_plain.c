// The loops in float32, of the plain run.  This file is compiled without contraction to FMA: a
// plain implementation rounds products and sums each by itself, and its error is the yardstick.
#include "tests/load/bench_math.h"
#include "tests/load/bench_simd.h"

typedef float f32_vec __attribute__((vector_size(64), aligned(4), may_alias));

GEMM_BODY(bench_gemm_f32_body, float, f32_vec)
SCALE_BODY(bench_scale_f32_body, float)

BODY void bench_exp_f32_body(uint32_t level, float *x, uint64_t n, float shift) {
    (void)level;
    double wide[64];
    for (uint64_t at = 0; at < n; at += 64) {
        uint64_t len = n - at < 64 ? n - at : 64;
        for (uint64_t i = 0; i < len; i++) {
            float y = x[at + i] - shift;
            wide[i] = (double)y;
        }
        for (uint64_t i = 0; i < len; i++) {
            wide[i] = exp_one(wide[i]);
        }
        for (uint64_t i = 0; i < len; i++) {
            x[at + i] = (float)wide[i];
        }
    }
}

BODY void bench_divide_f32_body(uint32_t level, float *x, uint64_t n, float divisor) {
    (void)level;
    for (uint64_t i = 0; i < n; i++) {
        x[i] /= divisor;
    }
}

MULTIVERSION(bench_gemm_f32,
             (float *c, uint64_t ldc, const float *a, uint64_t lda, const float *b, uint32_t rows,
              uint32_t cols, uint32_t inner),
             c, ldc, a, lda, b, rows, cols, inner)
MULTIVERSION(bench_scale_f32, (float *x, uint64_t n, float factor, float *max), x, n, factor, max)
MULTIVERSION(bench_exp_f32, (float *x, uint64_t n, float shift), x, n, shift)
MULTIVERSION(bench_divide_f32, (float *x, uint64_t n, float divisor), x, n, divisor)
