// bench_verify checks sampled output rows behind the load test's back: the runtime collects them in
// batches, one open batch a sequence, and verifier threads take full ones.  Memory is bounded by a
// fixed pool of batches; when all are out the runtime waits for the verifiers.
//
// One runtime thread calls everything here.
#ifndef ATTND_LOAD_BENCH_VERIFY_H
#define ATTND_LOAD_BENCH_VERIFY_H

#include <stdint.h>

#include "proto/err.h"
#include "tests/load/bench_check.h"
#include "tests/load/bench_model.h"

typedef struct bench_verify bench_verify;

typedef struct bench_verify_opts {
    uint64_t seed;
    uint32_t num_threads;   // >= 1
    uint32_t num_sequences; // that may have a batch open
    uint32_t step_rows;     // rows that one step may add
} bench_verify_opts;

// bench_batch is rows of one request, all layers of each.  Filled by the runtime.
typedef struct bench_batch {
    bench_prompt prompt;
    uint32_t num_rows;        // up to bench_verify_capacity
    uint32_t *positions;      // [capacity]
    bench_call *calls;        // [capacity], see bench_check.h
    uint8_t *out;             // [layers, capacity, q_heads, v_head_dim]
    struct bench_batch *next; // private
} bench_batch;

// bench_verify_start: borrows m.  The caller owns *out: bench_verify_stop.  ATTND_ENOMEM.
attnd_err bench_verify_start(bench_verify **out, const bench_model *m,
                             const bench_verify_opts *opts, attnd_errinfo *info);

// bench_verify_capacity returns the rows a batch holds.
uint32_t bench_verify_capacity(const bench_verify *v);

// bench_verify_take returns an empty batch; it waits for one while verifiers are busy.
bench_batch *bench_verify_take(bench_verify *v, const bench_prompt *prompt);

// bench_verify_out returns where the output of a row of a batch goes.
void *bench_verify_out(const bench_verify *v, const bench_batch *batch, uint32_t layer,
                       uint32_t row);

// bench_verify_submit hands a batch over to be checked; bench_verify_discard gives it back
// unchecked. Both accept NULL.
void bench_verify_submit(bench_verify *v, bench_batch *batch);
void bench_verify_discard(bench_verify *v, bench_batch *batch);

// bench_verify_progress copies what has been checked so far.
void bench_verify_progress(bench_verify *v, bench_verdict *out);

// bench_verify_stop waits until every submitted batch is checked, ends the threads, writes the
// verdict to *out and frees v (NULL is accepted).  ATTND_ENOMEM: rows could not be checked.
attnd_err bench_verify_stop(bench_verify *v, bench_verdict *out);

#endif
