// bench_ref computes the output rows of a block twice: in float64, which is taken for the truth,
// and as a plain unfused implementation would (float32 scores and sums, probabilities and output
// rounded to the storage type), whose error is the yardstick for the daemon's.  Caller locks; one a
// thread.
#ifndef ATTND_LOAD_BENCH_REF_H
#define ATTND_LOAD_BENCH_REF_H

#include <stdint.h>

#include "proto/err.h"
#include "tests/load/bench_block.h"

// bench_order is the order of every sum of a plain run: over head_dim, over keys.
typedef enum bench_order {
    BENCH_ASCENDING,
    BENCH_DESCENDING,
    BENCH_BLOCKED, // sums of 8 dims or 64 keys, then the sum of those
    BENCH_NUM_ORDERS,
} bench_order;

typedef struct bench_ref bench_ref;

// bench_ref_create: borrows m.  The caller owns *out: bench_ref_free.
attnd_err bench_ref_create(bench_ref **out, const bench_model *m);
void bench_ref_free(bench_ref *ref);

// bench_ref_max_tokens returns how many tokens a block may have when its keys end at end_key, >= 1.
uint32_t bench_ref_max_tokens(const bench_ref *ref, uint32_t end_key);

// bench_ref_f64 writes out [num_tokens, q_heads, v_head_dim].  ATTND_ENOMEM.
attnd_err bench_ref_f64(bench_ref *ref, const bench_block *b, double *out);

// bench_ref_plain writes the plain run's out, of the same shape.  ATTND_ENOMEM.
attnd_err bench_ref_plain(bench_ref *ref, const bench_block *b, bench_order order, float *out);

#endif
