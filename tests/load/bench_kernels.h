// bench_kernels times groups of cases on a backend.
//
// The cases of a group are measured in turns, and each beside its ceiling, so that all of them see
// the same hours of a shared machine and the same clocks: a repetition takes every case's ceiling,
// then every case and every peer, on a GPU each behind its case; while times of a case spread by
// more than 15%, there are more of them, up to three times as many.  A decode or ragged case has so
// many copies of its data that the group's together exceed the last cache several times, and walks
// them in turn: what it reads is never cached. Outputs are compared with float64 before anything is
// timed.
#ifndef ATTND_LOAD_BENCH_KERNELS_H
#define ATTND_LOAD_BENCH_KERNELS_H

#include <cjson/cJSON.h>

#include "tests/load/bench_arena.h"
#include "tests/load/bench_backend.h"
#include "tests/load/bench_result.h"

enum {
    BENCH_MAX_GROUP = 16,
    BENCH_MAX_REPS = 101,
    BENCH_MAX_RESULTS = 256,
    BENCH_MAX_VERDICTS = 512,
};

// bench_timing is how a run measures.
typedef struct bench_timing {
    uint32_t reps;
    uint64_t cold_bytes;   // that a group's copies together have at least
    uint64_t sample_bytes; // see bench_backend_ops
    uint32_t sample_calls;
    uint64_t seed;
} bench_timing;

// bench_group_bytes returns how much of an arena a group needs.
uint64_t bench_group_bytes(const bench_case *cases, uint32_t num, const bench_timing *timing);

// bench_group_run measures cases [num], num <= BENCH_MAX_GROUP, into results [num].  The arena is
// reset.  Any error of the backend, or ATTND_ENOMEM.
attnd_err bench_group_run(bench_backend *b, const bench_backend_ops *ops, bench_arena *arena,
                          const bench_case *cases, uint32_t num, const bench_timing *timing,
                          bench_result *results, attnd_errinfo *info);

// bench_kernels_report is what a run has found.
typedef struct bench_kernels_report {
    const char *backend, *command;
    char device[256], state[256];
    bench_timing timing;
    uint64_t last_cache, arena_bytes, arena_huge;
    const char *peer_missing; // NULL = none
    bench_ceiling machine[BENCH_MAX_MACHINE];
    uint32_t num_machine;
    const bench_result *results;
    uint32_t num_results;
    const bench_verdict_line *verdicts;
    uint32_t num_verdicts;
    double seconds;
} bench_kernels_report;

// bench_result_text writes a line for a person.
enum { BENCH_RESULT_BYTES = 640 };
void bench_result_text(const bench_result *r, char out[BENCH_RESULT_BYTES]);

// bench_kernels_json returns the report; the caller frees it with cJSON_Delete.
cJSON *bench_kernels_json(const bench_kernels_report *r);

// bench_json_write writes a document and says on stderr when it cannot; then it returns false.
bool bench_json_write(const cJSON *doc, const char *path);

#endif
