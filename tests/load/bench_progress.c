// The bar shows answered requests of all, or the time of a run that ends by time.
#include "tests/load/bench_progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/clock.h"

enum { PERIOD_US = 200000, BAR_CELLS = 24 };

void bench_progress_line(const bench_progress *p, const bench_stats *s, uint32_t running,
                         uint64_t verified, uint64_t now_us, char *line, uint32_t bytes) {
    double elapsed = (double)(now_us - p->start_us) * 1e-6, share = 0;
    if (p->duration_us > 0) {
        share = (double)(now_us - p->start_us) / (double)p->duration_us;
    } else if (p->total_requests > 0) {
        share = (double)s->requests / (double)p->total_requests;
    }
    int cells = share < 1 ? (int)(share * BAR_CELLS) : BAR_CELLS;
    char bar[BAR_CELLS + 1];
    memset(bar, '.', BAR_CELLS);
    memset(bar, '#', (size_t)cells);
    bar[BAR_CELLS] = '\0';
    double tokens = (double)(s->prefill_tokens + s->decode_tokens);
    snprintf(line, bytes,
             "[%s] %3.0f%%  %" PRIu64 " requests, %" PRIu32 " running, %.0f tokens/s, %" PRIu64
             " rows verified, %" PRIu64 " errors",
             bar, share < 1 ? share * 100 : 100, s->requests, running,
             elapsed > 0 ? tokens / elapsed : 0, verified, s->errors);
}

void bench_progress_draw(bench_progress *p, const bench_stats *s, uint32_t running,
                         uint64_t verified) {
    uint64_t now = attnd_clock_us();
    if (!p->on || now - p->drawn_us < PERIOD_US) {
        return;
    }
    char line[160];
    bench_progress_line(p, s, running, verified, now, line, sizeof(line));
    fprintf(stderr, "\r\033[K%s", line);
    fflush(stderr);
    p->drawn_us = now;
}

void bench_progress_clear(bench_progress *p) {
    if (p->on) {
        fprintf(stderr, "\r\033[K");
        fflush(stderr);
    }
}
