// Rates over threads.  Each thread does its own share from a common start, and the time is that of
// the slowest, which is what a launch has to wait for.
#include "tests/load/bench_ceil.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/cpu/attn_cpu_ops.h"
#include "proto/dtype.h"
#include "tests/load/bench_team.h"

// In rising order of preference, as attn_cpu_init has them.
static const struct {
    const bench_ceil_ops *ops;
    uint32_t features;
} tables[] = {
    {&bench_ceil_scalar, 0},
#if defined(__x86_64__)
    {&bench_ceil_avx2, ATTN_CPU_AVX2},
    {&bench_ceil_avx512, ATTN_CPU_AVX2 | ATTN_CPU_AVX512},
    {&bench_ceil_avx512_bf16, ATTN_CPU_AVX2 | ATTN_CPU_AVX512 | ATTN_CPU_AVX512_BF16},
#elif defined(__aarch64__)
    {&bench_ceil_neon, ATTN_CPU_NEON},
#endif
};
enum { NUM_TABLES = sizeof(tables) / sizeof(tables[0]) };

static _Atomic float sink; // where results go, so that they are wanted

const bench_ceil_ops *bench_ceil_find(const char *isa) {
    uint32_t features = attn_cpu_detect();
    for (int i = NUM_TABLES - 1; i >= 0; i--) {
        bool is_there = (features & tables[i].features) == tables[i].features;
        if (is_there && (!isa || strcmp(isa, tables[i].ops->isa) == 0)) {
            return tables[i].ops;
        }
    }
    return NULL;
}

uint64_t bench_ceil_ahead(uint32_t index) {
    static const uint32_t kib[BENCH_CEIL_AHEADS] = {0, 2, 4, 8, 16, 32};
    return index < BENCH_CEIL_AHEADS ? (uint64_t)kib[index] << 10 : 0;
}

typedef struct read_job {
    const bench_ceil_ops *ops;
    uint64_t ahead;
    const bench_run **runs; // [threads], into one copy of the runs, cut at the threads' ends
    uint64_t *nums;         // [threads]
} read_job;

static void read_share(void *arg, uint32_t worker) {
    read_job *job = arg;
    sink = job->ops->read(job->runs[worker], job->nums[worker], job->ahead);
}

// cut_runs copies runs into out [num + threads] so that threads get equal shares; a run that lies
// across a boundary is cut in two.
static void cut_runs(read_job *job, bench_run *out, const bench_run *runs, uint64_t num,
                     uint64_t total, uint32_t threads) {
    uint64_t run = 0;
    uint64_t at = 0;
    for (uint32_t t = 0; t < threads; t++) {
        uint64_t share = (total * (t + 1) / threads - total * t / threads) & ~(uint64_t)255;
        share = t + 1 == threads ? total : share;
        job->runs[t] = out;
        job->nums[t] = 0;
        while (run < num && share > 0) {
            uint64_t bytes = runs[run].bytes - at < share ? runs[run].bytes - at : share;
            *out++ = (bench_run){runs[run].at + at, bytes};
            job->nums[t]++;
            share -= bytes;
            at += bytes;
            if (at == runs[run].bytes) {
                run++;
                at = 0;
            }
        }
    }
}

double bench_ceil_read(const bench_ceil_ops *ops, const bench_run *runs, uint64_t num,
                       uint64_t ahead, uint32_t threads) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < num; i++) {
        total += runs[i].bytes;
    }
    read_job job = {.ops = ops,
                    .ahead = ahead,
                    .runs = calloc(threads, sizeof(*job.runs)),
                    .nums = calloc(threads, sizeof(*job.nums))};
    bench_run *cut = calloc(num + threads, sizeof(*cut));
    if (!job.runs || !job.nums || !cut) {
        fprintf(stderr, "attn-bench: no memory for %llu runs\n", (unsigned long long)num);
        exit(1);
    }
    cut_runs(&job, cut, runs, num, total, threads);
    double seconds = bench_team_run(read_share, &job, threads);
    free(cut);
    free(job.nums);
    free((void *)job.runs);
    return (double)total / seconds * 1e-9;
}

typedef struct compute_job {
    const bench_ceil_ops *ops;
    bench_ceil_rate rate;
    uint64_t rounds;
    float x[BENCH_CEIL_ELEMENTS];
    uint16_t half[BENCH_CEIL_ELEMENTS];
} compute_job;

static void compute_share(void *arg, uint32_t worker) {
    compute_job *job = arg;
    (void)worker;
    switch (job->rate) {
    case BENCH_CEIL_FMA:
        sink = job->ops->fma(job->rounds);
        break;
    case BENCH_CEIL_DOT:
        sink = job->ops->dot_bf16(job->rounds);
        break;
    case BENCH_CEIL_FROM_F16:
        sink = job->ops->from_f16(job->half, job->rounds);
        break;
    default:
        sink = job->ops->exp2(job->x, job->rounds);
        break;
    }
}

double bench_ceil_compute(const bench_ceil_ops *ops, bench_ceil_rate rate, uint32_t threads,
                          double ms) {
    static compute_job job;
    job.ops = ops;
    job.rate = rate;
    uint64_t work = rate == BENCH_CEIL_FMA   ? ops->fma_flops
                    : rate == BENCH_CEIL_DOT ? ops->dot_flops
                                             : BENCH_CEIL_ELEMENTS;
    if (work == 0) {
        return 0;
    }
    for (int i = 0; i < BENCH_CEIL_ELEMENTS; i++) {
        job.x[i] = -(float)(i % 1024) * 0.02f;
        job.half[i] = attnd_f32_to_f16(job.x[i]);
    }
    job.rounds = 64;
    double seconds = bench_team_run(compute_share, &job, threads);
    while (seconds * 1e3 < ms / 4) { // find how many rounds take that long
        job.rounds *= 2;
        seconds = bench_team_run(compute_share, &job, threads);
    }
    job.rounds = (uint64_t)((double)job.rounds * ms / (seconds * 1e3)) + 1;
    seconds = bench_team_run(compute_share, &job, threads);
    return (double)work * (double)job.rounds * threads / seconds * 1e-9;
}
