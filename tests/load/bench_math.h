// bench_math has the loops that the verifier and the data generator spend their time in, written so
// that the compiler makes vectors of them, and compiled for several x86-64 levels of which the best
// one that the processor has is taken.  It shares nothing with the library's kernels: what checks
// them must not be them.  No state; any thread.
#ifndef ATTND_LOAD_BENCH_MATH_H
#define ATTND_LOAD_BENCH_MATH_H

#include <stdbool.h>
#include <stdint.h>

enum {
    BENCH_GEMM_ROWS = 8,  // rows of a matrix product come in multiples of this
    BENCH_GEMM_COLS = 16, // and columns of this
};

// bench_gemm_f64 and bench_gemm_f32: c[rows][cols] += a[rows][inner] * b[inner][cols].  Each
// element is summed in ascending order of the inner index, beginning with what c holds.  lda and
// ldc are the elements from a row to the next; b is packed.  rows and cols are multiples as above.
void bench_gemm_f64(double *c, uint64_t ldc, const double *a, uint64_t lda, const double *b,
                    uint32_t rows, uint32_t cols, uint32_t inner);
void bench_gemm_f32(float *c, uint64_t ldc, const float *a, uint64_t lda, const float *b,
                    uint32_t rows, uint32_t cols, uint32_t inner);

// Steps of a softmax over n scores.  bench_scale_*: x *= factor; *max becomes the largest of itself
// and all x.  bench_exp_*: x = exp(x - shift), for x <= shift, relative error below 1e-15 (float32:
// computed in float64, rounded once; the subtraction is float32); below -708 it is exp(-708),
// 3e-308. bench_exp_f64 adds the sum of all x to *sum, in no particular order.
void bench_scale_f64(double *x, uint64_t n, double factor, double *max);
void bench_scale_f32(float *x, uint64_t n, float factor, float *max);
void bench_exp_f64(double *x, uint64_t n, double shift, double *sum);
void bench_exp_f32(float *x, uint64_t n, float shift);
void bench_divide_f32(float *x, uint64_t n, float divisor);

// bench_uniform writes elements first to first + n - 1 of the infinite row of that key: uniform in
// (-sqrt 3, sqrt 3), which has variance 1, never 0.  The same on every processor.
void bench_uniform(float *out, uint64_t key, uint32_t first, uint32_t n);

// bench_hash64 mixes 64 bits so that every input bit changes every output bit with probability 1/2.
uint64_t bench_hash64(uint64_t x);

#endif
