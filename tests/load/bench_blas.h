// bench_blas is attention as one would write it over a BLAS, the peer of the CPU kernels: S = Q
// K^T, softmax, O = P V, each one product of float32: in decode per KV head over all keys, the
// heads of its group as rows; in causal prefill per KV head and block of query tokens, over the
// keys up to the end of the block.  OpenBLAS is looked for at run time (libopenblas.so.0); each
// thread takes its own heads and blocks, and calls it with one thread.  One caller at a time.
#ifndef ATTND_LOAD_BENCH_BLAS_H
#define ATTND_LOAD_BENCH_BLAS_H

#include <stdbool.h>
#include <stdint.h>

// bench_blas_open loads the library once; false when it is not there.
bool bench_blas_open(void);

// bench_blas_name returns what was loaded, such as "OpenBLAS 0.3.21 SkylakeX".
const char *bench_blas_name(void);

typedef struct bench_blas_case {
    const float *q;     // [tokens, q_heads, head_dim]; of a decode one token
    const float *k, *v; // [kv_heads, tokens, head_dim]
    float *out;         // as q
    int32_t tokens, q_heads, kv_heads, head_dim;
    int32_t block; // query tokens a block, of a prefill
} bench_blas_case;

// bench_blas_prefill computes the case with threads and returns seconds.
double bench_blas_prefill(const bench_blas_case *c, uint32_t threads);

// bench_blas_decode computes one query token over all tokens with threads, a KV head each, and
// returns seconds.
double bench_blas_decode(const bench_blas_case *c, uint32_t threads);

// bench_blas_softmax turns scores x [num], num >= 1, into probabilities 2^(scale x) / their sum.  x
// has room for the next multiple of 16.
void bench_blas_softmax(float *x, int32_t num, float scale);

#endif
