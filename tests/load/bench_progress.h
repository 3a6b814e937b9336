// bench_progress draws one line on a terminal, a few times a second, over and over.  One thread.
#ifndef ATTND_LOAD_BENCH_PROGRESS_H
#define ATTND_LOAD_BENCH_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/load/bench_stats.h"

typedef struct bench_progress {
    bool on;
    uint64_t start_us, drawn_us;
    uint64_t total_requests; // 0 = no end; then the bar shows time
    uint64_t duration_us;    // 0 = until every request is answered
} bench_progress;

// bench_progress_draw draws when the last time is 200 ms ago.
void bench_progress_draw(bench_progress *p, const bench_stats *s, uint32_t running,
                         uint64_t verified);

// bench_progress_clear wipes the line.
void bench_progress_clear(bench_progress *p);

// bench_progress_line writes what is drawn, without control characters, cut to bytes.
void bench_progress_line(const bench_progress *p, const bench_stats *s, uint32_t running,
                         uint64_t verified, uint64_t now_us, char *line, uint32_t bytes);

#endif
