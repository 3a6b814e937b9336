// bench_load is the stream of requests of a load test: how long each prompt and answer is and when
// it arrives.  The same options give the same stream.  Caller locks.
#ifndef ATTND_LOAD_BENCH_LOAD_H
#define ATTND_LOAD_BENCH_LOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/err.h"

// bench_length is a distribution of lengths in tokens: always mean, or lognormal with that mean
// (of the lengths, not of their logarithms) and sigma = standard deviation of the logarithm.
typedef struct bench_length {
    bool lognormal;
    double mean, sigma;
} bench_length;

// bench_length_parse reads "512" or "lognormal:MEAN,SIGMA".  ATTND_EINVAL.
attnd_err bench_length_parse(bench_length *out, const char *text, attnd_errinfo *info);

typedef enum bench_arrival {
    BENCH_CLOSED,     // the next request arrives when there is room for it
    BENCH_POISSON,    // rate a second, independent of the answers
    BENCH_TRACE_TIME, // when the trace says, sped up by speed
} bench_arrival;

typedef struct bench_load_opts {
    const char *trace; // path, or NULL: lengths from input and output
    bench_length input, output;
    bench_arrival arrival;
    double rate;           // requests/s
    double speed;          // of the trace's clock; 1 = as recorded
    uint64_t num_requests; // 0 = the trace once; without a trace for ever
    bool endless;          // num_requests is ignored; a trace begins again at its end
    bool shares_prefixes;  // prompts have the hash ids of the trace, if it has any
    uint64_t seed;
} bench_load_opts;

typedef struct bench_request {
    uint64_t id;            // 0, 1, 2 ...
    uint32_t input, output; // tokens, >= 1 (a recorded 0 counts as 1)
    uint64_t arrival_us;    // since the start; 0 for BENCH_CLOSED
    const uint32_t *ids;    // [num_ids], of its prompt (bench_data.h); borrowed from the load
    uint32_t num_ids;
} bench_request;

typedef struct bench_load bench_load;

// bench_load_create reads the trace, if any.  num_requests beyond the trace's end begin it again,
// with its clock running on.  The caller owns *out: bench_load_free.  Errors of bench_trace_read.
attnd_err bench_load_create(bench_load **out, const bench_load_opts *opts, attnd_errinfo *info);
void bench_load_free(bench_load *load);

// bench_load_next returns the next request, in order of arrival; false when there are no more.
bool bench_load_next(bench_load *load, bench_request *out);

// bench_load_shares says whether prompts have hash ids.
bool bench_load_shares(const bench_load *load);

// bench_load_total returns how many requests there will be, 0 = no end.
uint64_t bench_load_total(const bench_load *load);

#endif
