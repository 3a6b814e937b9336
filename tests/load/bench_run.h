// bench_run plays a model runtime against a daemon: one session, up to `concurrency` sequences, and
// continuous batching.  An iteration is one step over all running sequences: a token for each that
// decodes, and at most prefill_chunk tokens of prompts, oldest first.  When the pool has no blocks
// for a step the youngest sequence is freed and computed again later (a preemption); until another
// one ends none is begun.  The last one waits a while first, in case others give blocks back.
#ifndef ATTND_LOAD_BENCH_RUN_H
#define ATTND_LOAD_BENCH_RUN_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/client/attnd.h"
#include "proto/err.h"
#include "tests/load/bench_check.h"
#include "tests/load/bench_load.h"
#include "tests/load/bench_model.h"
#include "tests/load/bench_stats.h"

typedef struct bench_run_opts {
    const char *url;
    const char *tenant; // NULL = the default one
    attnd_transport transport;
    const bench_model *model;
    bench_load *load;
    bool open_loop;         // requests have arrival times
    uint32_t concurrency;   // sequences at a time
    uint32_t prefill_chunk; // prompt tokens a step
    double verify;          // fraction of the output rows, 0 = none
    uint32_t verify_threads;
    uint64_t seed;
    uint64_t duration_us; // 0 = until every request is answered
    int32_t timeout_ms;   // of a call
    uint64_t patience_us; // how long EBUSY, or a full pool with one sequence left, is endured
    const volatile sig_atomic_t *stop; // not 0: end now
    bool progress;                     // a bar on stderr
} bench_run_opts;

// bench_run runs the load to its end and fills *stats and *verdict.  An error of a single request
// is counted in stats and the run goes on; what ends it (no connection, a daemon that drains or
// does not answer, ten failures in a row) is returned, with what was counted so far.
attnd_err bench_run(const bench_run_opts *opts, bench_stats *stats, bench_verdict *verdict,
                    attnd_errinfo *info);

#endif
