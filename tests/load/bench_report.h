// bench_report writes the result of a run of `attn-bench serve`: a table for people, and JSON with
// the same figures, what each of them means, and everything that is needed to repeat the run.
#ifndef ATTND_LOAD_BENCH_REPORT_H
#define ATTND_LOAD_BENCH_REPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/err.h"
#include "tests/load/bench_check.h"
#include "tests/load/bench_host.h"
#include "tests/load/bench_model.h"
#include "tests/load/bench_stats.h"

typedef struct bench_report {
    const bench_model *model;
    const bench_stats *stats;
    const bench_verdict *verdict;
    const bench_host *host;
    const char *command_line, *url, *trace; // trace: path or NULL
    const char *transport;                  // as asked for; NULL = not said
    const char *lengths, *arrivals;         // in words
    const char *ended;                      // what ended the run early, in words; "" = nothing
    double verify;                          // fraction asked for
    uint64_t seed;
    uint32_t concurrency;
    int64_t daemon_pid; // 0 = unknown: no figures of the daemon
    bench_usage before, after;
} bench_report;

// bench_report_ok says whether the run may exit with status 0: it ran to its end, at least one
// request was answered, no call failed, no request was given up, no row mismatched.
bool bench_report_ok(const bench_report *r);

void bench_report_table(const bench_report *r, FILE *out);

// bench_report_json returns the JSON text, ending in a newline; the caller frees it (free).  NULL
// when out of memory.
char *bench_report_json(const bench_report *r);

#endif
