// bench_stats is what a run has seen: counts, and latencies as histograms of microseconds.  One
// thread.
#ifndef ATTND_LOAD_BENCH_STATS_H
#define ATTND_LOAD_BENCH_STATS_H

#include <stdint.h>

#include "proto/client/attnd.h"
#include "proto/err.h"
#include "proto/hist.h"

// XX(field, what it is): the latencies, in the order in which they are reported.
#define BENCH_TIME_MAP(XX)                                                                      \
    XX(ttft, "arrival to first token: the commit of the prompt's last chunk")                   \
    XX(tpot, "mean time of an output token after the first, one value a request")               \
    XX(itl, "gap between two output tokens, every gap")                                         \
    XX(e2e, "arrival to last token")                                                            \
    XX(step, "call that opens a step")                                                          \
    XX(attend, "call that attends one layer of all running sequences")                          \
    XX(commit, "call that commits a step")                                                      \
    XX(queue, "of an attend: from its arrival at the daemon to its launch, as the daemon says") \
    XX(kernel, "of an attend: the launch, as the daemon says")

typedef enum bench_time {
#define XX(name, text) BENCH_TIME_##name,
    BENCH_TIME_MAP(XX)
#undef XX
        BENCH_NUM_TIMES,
} bench_time;

enum { BENCH_MAX_KERNELS = 16, BENCH_NUM_CODES = 64 };

typedef struct bench_kernel {
    char name[40], why[56]; // why: of the first launch
    uint64_t calls;
    uint32_t max_splits, max_batch_rows;
} bench_kernel;

typedef struct bench_stats {
    uint64_t requests;   // answered whole
    uint64_t unfinished; // begun, cut off by the end of the run
    uint64_t failed;     // given up after an error
    uint64_t errors;     // calls that failed; EBUSY (retried) and a full pool do not count
    uint64_t by_code[BENCH_NUM_CODES]; // errors by -code; the last also takes unknown ones
    char first_error[256];             // in words; "" = none
    uint64_t steps, layer_calls;
    uint64_t rows;           // tokens x layers attended
    uint64_t prefill_tokens; // recomputed and cached ones included
    uint64_t cached_tokens;  // of these, found in the daemon's prefix cache
    uint64_t decode_tokens;
    uint64_t recomputed_tokens; // thrown away by preemptions
    uint64_t preemptions, retries;
    uint64_t fill_us; // spent on making q, k and v, between the calls
    uint64_t elapsed_us;
    uint32_t prefill_chunk; // in use: what was asked for, or what the daemon's limits leave
    bench_kernel kernels[BENCH_MAX_KERNELS]; // the last also takes what did not fit
    uint32_t num_kernels;
    attnd_hist times[BENCH_NUM_TIMES];
} bench_stats;

void bench_stats_init(bench_stats *s);

// bench_stats_error counts a failed call; what names the call.
void bench_stats_error(bench_stats *s, const char *what, attnd_err err, const attnd_errinfo *info);

// bench_stats_ran notes what the daemon says of an attend, and its two times.
void bench_stats_ran(bench_stats *s, const attnd_ran *ran);

static inline void bench_stats_time(bench_stats *s, bench_time time, uint64_t us) {
    attnd_hist_record(&s->times[time], us);
}

// bench_time_name returns "ttft" ..., bench_time_text what it is.
const char *bench_time_name(bench_time time);
const char *bench_time_text(bench_time time);

// bench_ms_summary is a histogram of microseconds in milliseconds.
typedef struct bench_ms_summary {
    uint64_t count;
    double mean, p50, p90, p99, p99_9, max; // ms
} bench_ms_summary;

bench_ms_summary bench_summarize(const attnd_hist *h);

#endif
