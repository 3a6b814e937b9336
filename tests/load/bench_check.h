// bench_check compares output rows of the daemon with the float64 reference.
//
// A row is one token of one layer, all its query heads; err is the largest |out - reference| of its
// q_heads * v_head_dim elements, and size its largest |reference|.  err must be at most
//
//     2 * plain + 1 ulp of the output type at size
//
// where plain is the err of a plain unfused run (bench_ref.h) of the same row, the worst of three
// summation orders.  A row of a small model is few numbers, and the luck of rounding may favour the
// plain run by more than 2.  What attnd promises is about a sequence's call, all rows of one
// attend; so a row past its own bound is held to that of its call: plain and size are then the
// largest of the call's rows.  A call of fewer than 32 rows, such as a decode's of one, is taken
// together with the rows before it, to 32 in all.
//
// The plain runs are made as far as they are needed: none when err is within the ulp, one order
// after another until its bound covers err, the call's other rows last.  So the verdict is that of
// the full bound, at a fraction of its cost, and the bound reported with an error may be a lower
// one.  Behind 4 lost appeals there are no more: the run has failed, and is to end soon.
#ifndef ATTND_LOAD_BENCH_CHECK_H
#define ATTND_LOAD_BENCH_CHECK_H

#include <stdint.h>

#include "proto/err.h"
#include "tests/load/bench_data.h"
#include "tests/load/bench_model.h"

typedef struct bench_verdict {
    uint64_t rows;          // checked
    uint64_t mismatches;    // rows whose error is past the bound, or NaN
    uint64_t plain_runs;    // rows for which a plain run was needed
    uint64_t appeals;       // rows for which the rest of their call was
    double max_error;       // largest err of a row; infinite for a NaN
    double max_error_bound; // the bound of that row, as far as it was needed
    char first[192];        // the first mismatch, in words; "" = none
} bench_verdict;

// bench_verdict_add adds what other has seen.
void bench_verdict_add(bench_verdict *v, const bench_verdict *other);

// bench_call is the positions of the rows of one request that one attend computed together.
typedef struct bench_call {
    uint32_t first, num;
} bench_call;

// bench_rows is what is to be checked: rows of one request and layer.
typedef struct bench_rows {
    bench_prompt prompt;
    uint32_t layer;
    uint32_t num_rows;
    const uint32_t *positions; // [num_rows]
    const bench_call *calls;   // [num_rows], which each row was part of
    const void *out;           // [num_rows, q_heads, v_head_dim] of the model's dtype
} bench_rows;

typedef struct bench_check bench_check;

// bench_check_create: borrows m.  One a thread.  The caller owns *out: bench_check_free.
attnd_err bench_check_create(bench_check **out, const bench_model *m, uint64_t seed);
void bench_check_free(bench_check *check);

// bench_check_rows adds the verdict on rows to *v.  ATTND_ENOMEM: nothing was checked.
attnd_err bench_check_rows(bench_check *check, const bench_rows *rows, bench_verdict *v);

// bench_ulp returns the distance from |x| to the next larger number of a type.
double bench_ulp(attnd_dtype dtype, double x);

#endif
