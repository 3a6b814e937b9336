// bench_result is what `attn-bench kernels` knows of a case after it was timed, and what is asked
// of some of them.  Pure functions; any thread.
#ifndef ATTND_LOAD_BENCH_RESULT_H
#define ATTND_LOAD_BENCH_RESULT_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/attn.h"
#include "tests/load/bench_backend.h"
#include "tests/load/bench_case.h"
#include "tests/load/bench_exact.h"

// bench_spread describes a few measurements of the same thing.
typedef struct bench_spread {
    uint32_t num;
    double median, min, max;
    double spread; // distance of the quartiles over the median
} bench_spread;

// bench_spread_of sorts x [num], num >= 1, in place.  Quartiles and the median lie between two
// values where num makes it so.
bench_spread bench_spread_of(double *x, uint32_t num);

typedef struct bench_result {
    bench_case c;
    char name[BENCH_CASE_BYTES];
    bench_spread us;    // of a call
    uint32_t calls;     // of a repetition
    uint64_t kv_bytes;  // K and V that a call reads
    double gbs, gflops; // of the median
    bench_ceiling ceiling;
    bench_spread ceiling_value;
    double ceiling_share; // gbs or gflops over it; 0 without a ceiling
    bench_error error;
    attn_choice choice;
    double plan_us; // on the host, before the launch; 0 = part of it
    char peer[160]; // "" = none
    bench_spread peer_us;
    bench_pace pace, peer_pace; // medians
} bench_result;

// bench_result_derive fills name, kv_bytes, gbs, gflops and ceiling_share from c, us, ceiling and
// ceiling_value.
void bench_result_derive(bench_result *r);

typedef enum bench_measure {
    BENCH_SHARE,   // ceiling_share
    BENCH_SPEEDUP, // other's time over this one's
    BENCH_SLOWER,  // this one's time over other's
    BENCH_MORE,    // this one's time less other's, us
    BENCH_PLAN,    // plan_us
    BENCH_SLOPE,   // time over kv_len, over the same of other
    BENCH_PEER,    // the peer's time over this one's
} bench_measure;

// bench_ask is one thing that is asked of every case whose name matches: pattern is a name with one
// "*" for kv_len or q_len, which must be at least from; the same number takes the place of a "*" in
// other.
typedef struct bench_ask {
    const char *pattern, *other; // other: NULL when the measure has none
    bench_measure measure;
    int32_t from;
    double at_least, at_most; // 0 = no such bound
} bench_ask;

typedef struct bench_verdict_line {
    const bench_ask *ask;
    const bench_result *result;
    char other[BENCH_CASE_BYTES]; // "" = none
    double measured;
    bool is_met;
} bench_verdict_line;

// bench_verdicts answers asks, ended by a pattern of NULL, from results [num].  What was not
// measured in this run gets no line.  out has room for max lines; returns how many were filled.
uint32_t bench_verdicts(const bench_ask *asks, const bench_result *results, uint32_t num,
                        bench_verdict_line *out, uint32_t max);

// bench_verdict_text writes a line such as "decode f32 32/8 kv_len 4096: share of the ceiling 0.83,
// asked at least 0.80: met".
enum { BENCH_VERDICT_BYTES = 512 };
void bench_verdict_text(const bench_verdict_line *v, char out[BENCH_VERDICT_BYTES]);

#endif
