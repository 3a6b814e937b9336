// The loops in float64, the generator and the hash.  The generator is the 32-bit finalizer of
// MurmurHash3 (Appleby, public domain) over a Weyl sequence, with the second half of the key mixed
// in between its two multiplications: three multiplications an element, no state, any element by
// itself.
#include "tests/load/bench_math.h"

#include "tests/load/bench_simd.h"

typedef double f64_vec __attribute__((vector_size(64), aligned(8), may_alias));

GEMM_BODY(bench_gemm_f64_body, double, f64_vec)
SCALE_BODY(bench_scale_f64_body, double)

BODY void bench_exp_f64_body(uint32_t level, double *x, uint64_t n, double shift, double *sum) {
    (void)level;
    double part[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (uint64_t lane = 0; lane < LANES; lane++) {
            x[i + lane] = exp_one(x[i + lane] - shift);
            part[lane] += x[i + lane];
        }
    }
    for (; i < n; i++) {
        x[i] = exp_one(x[i] - shift);
        part[0] += x[i];
    }
    for (uint64_t lane = 0; lane < LANES; lane++) {
        *sum += part[lane];
    }
}

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

MULTIVERSION(bench_gemm_f64,
             (double *c, uint64_t ldc, const double *a, uint64_t lda, const double *b,
              uint32_t rows, uint32_t cols, uint32_t inner),
             c, ldc, a, lda, b, rows, cols, inner)
MULTIVERSION(bench_scale_f64, (double *x, uint64_t n, double factor, double *max), x, n, factor,
             max)
MULTIVERSION(bench_exp_f64, (double *x, uint64_t n, double shift, double *sum), x, n, shift, sum)
MULTIVERSION(bench_uniform, (float *out, uint64_t key, uint32_t first, uint32_t n), out, key, first,
             n)

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014), Stafford's variant 13, public domain.
uint64_t bench_hash64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
