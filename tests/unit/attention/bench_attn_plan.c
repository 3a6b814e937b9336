// How long a plan takes: one line a case, median of many.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "attention/attn_plan.h"

enum { MAX_ROWS = 1024, REPEATS = 2001 };

static attn_row rows[MAX_ROWS];

static double now_us(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec * 1e-3;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench(const char *name, uint32_t num_rows, int32_t q_len, uint32_t workers,
                  bool deterministic) {
    static double times[REPEATS];
    attn_params p = {
        .shape =
            {.q_heads = 32, .kv_heads = 8, .head_dim = 128, .v_head_dim = 128, .block_tokens = 16},
        .rows = rows,
        .num_rows = num_rows,
        .deterministic = deterministic,
    };
    attn_machine machine = {.workers = workers,
                            .decode_rows = 64,
                            .prefill_rows = 128,
                            .state_floats = 1 << 24,
                            .max_groups = 1 << 16};
    attn_plan plan;
    void *storage = malloc(attn_plan_bytes(MAX_ROWS));
    attn_plan_init(&plan, storage, MAX_ROWS);
    srand(1);
    for (uint32_t i = 0; i < num_rows; i++) {
        rows[i] = (attn_row){.kv_len = q_len + rand() % 8192,
                             .q_len = q_len,
                             .q_count = q_len,
                             .new_len = q_len,
                             .flags = ATTN_CAUSAL,
                             .window_left = -1,
                             .window_right = -1};
    }
    for (int n = 0; n < REPEATS; n++) {
        double start = now_us();
        if (attn_plan_make(&plan, &p, &machine, NULL) != ATTND_OK) {
            abort();
        }
        times[n] = now_us() - start;
    }
    qsort(times, REPEATS, sizeof(times[0]), compare);
    printf("plan %s rows=%u q_len=%d workers=%u | %.2f us | %.2f us p99 | %llu tasks\n", name,
           num_rows, q_len, workers, times[REPEATS / 2], times[REPEATS * 99 / 100],
           (unsigned long long)plan.num_tasks);
    free(storage);
}

int main(void) {
    bench("decode", 1, 1, 2, false);
    bench("decode", 128, 1, 2, false);
    bench("decode", 128, 1, 64, false);
    bench("decode deterministic", 128, 1, 2, true);
    bench("decode", 1024, 1, 2, false);
    bench("prefill", 16, 2048, 2, false);
    return 0;
}
