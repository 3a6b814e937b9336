// Counting and summing up; nothing here takes a clock.
#include "tests/load/bench_stats.h"

#include <stdio.h>
#include <string.h>

void bench_stats_init(bench_stats *s) {
    memset(s, 0, sizeof(*s));
    for (int i = 0; i < BENCH_NUM_TIMES; i++) {
        attnd_hist_init(&s->times[i]);
    }
}

void bench_stats_error(bench_stats *s, const char *what, attnd_err err, const attnd_errinfo *info) {
    int code = -(int)err;
    s->by_code[code > 0 && code < BENCH_NUM_CODES ? code : BENCH_NUM_CODES - 1]++;
    if (s->errors++ == 0) {
        snprintf(s->first_error, sizeof(s->first_error), "%s: %s: %.150s", what, attnd_errname(err),
                 info->text[0] != '\0' ? info->text : attnd_strerror(err));
    }
}

static bench_kernel *find_kernel(bench_stats *s, const attnd_ran *ran) {
    for (uint32_t i = 0; i < s->num_kernels; i++) {
        if (strncmp(s->kernels[i].name, ran->kernel, sizeof(ran->kernel)) == 0) {
            return &s->kernels[i];
        }
    }
    if (s->num_kernels == BENCH_MAX_KERNELS) {
        return &s->kernels[BENCH_MAX_KERNELS - 1];
    }
    bench_kernel *k = &s->kernels[s->num_kernels++];
    memcpy(k->name, ran->kernel, sizeof(k->name));
    memcpy(k->why, ran->why, sizeof(k->why));
    k->name[sizeof(k->name) - 1] = '\0';
    k->why[sizeof(k->why) - 1] = '\0';
    return k;
}

void bench_stats_ran(bench_stats *s, const attnd_ran *ran) {
    bench_kernel *k = find_kernel(s, ran);
    k->calls++;
    k->max_splits = ran->splits > k->max_splits ? ran->splits : k->max_splits;
    k->max_batch_rows = ran->batch_rows > k->max_batch_rows ? ran->batch_rows : k->max_batch_rows;
    bench_stats_time(s, BENCH_TIME_queue, ran->queue_us);
    bench_stats_time(s, BENCH_TIME_kernel, ran->run_us);
}

const char *bench_time_name(bench_time time) {
    static const char *const names[BENCH_NUM_TIMES] = {
#define XX(name, text) #name,
        BENCH_TIME_MAP(XX)
#undef XX
    };
    return names[time];
}

const char *bench_time_text(bench_time time) {
    static const char *const texts[BENCH_NUM_TIMES] = {
#define XX(name, text) text,
        BENCH_TIME_MAP(XX)
#undef XX
    };
    return texts[time];
}

bench_ms_summary bench_summarize(const attnd_hist *h) {
    return (bench_ms_summary){
        .count = attnd_hist_count(h),
        .mean = attnd_hist_mean(h) / 1e3,
        .p50 = (double)attnd_hist_quantile(h, 0.5) / 1e3,
        .p90 = (double)attnd_hist_quantile(h, 0.9) / 1e3,
        .p99 = (double)attnd_hist_quantile(h, 0.99) / 1e3,
        .p99_9 = (double)attnd_hist_quantile(h, 0.999) / 1e3,
        .max = (double)attnd_hist_max(h) / 1e3,
    };
}
