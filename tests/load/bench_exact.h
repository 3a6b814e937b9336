// bench_exact is what a sample of a launch's outputs should be: in float64, and how far from that a
// result may lie.  The bound is that of attention computed step by step in the storage type
// (conf_plain.h): twice its largest error over the sample and three orders of summation, and one
// ulp of the output type at the sample's largest value.
#ifndef ATTND_LOAD_BENCH_EXACT_H
#define ATTND_LOAD_BENCH_EXACT_H

#include "attention/attn.h"

// bench_place is one query token of one head.
typedef struct bench_place {
    uint32_t row;
    int32_t token, head;
} bench_place;

typedef struct bench_exact {
    bench_place *places; // [num]
    double *want;        // [num, v_head_dim]
    uint32_t num;
    double bound;
} bench_exact;

// bench_error is how far a launch is from it.
typedef struct bench_error {
    double max, rms, bound;
    double worst_rms;  // of the place whose own is the largest,
    bench_place worst; // which is this
    uint32_t places;   // compared
} bench_error;

// bench_exact_init computes a sample of launch p, which the host can read: as many places as make
// max_keys keys together, at least 2 and at most 64, spread over rows, tokens and heads by seed;
// the first is the last token of the longest row.  threads help.  ATTND_ENOMEM.  The caller owns
// *out: bench_exact_fini.
attnd_err bench_exact_init(bench_exact *out, const attn_params *p, uint64_t max_keys, uint64_t seed,
                           uint32_t threads);
void bench_exact_fini(bench_exact *e);

// bench_exact_compare compares the outputs of p's rows.  A NaN makes max infinite.
bench_error bench_exact_compare(const bench_exact *e, const attn_params *p);

#endif
