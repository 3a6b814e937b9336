// `attn-bench ceilings`: what this machine can do at most, on one thread and on all, by loops of
// this benchmark's own.  Reads of memory go over an arena of several times the last cache.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/load/bench_ceil.h"
#include "tests/load/bench_cmd.h"
#include "tests/load/bench_host.h"
#include "tests/load/bench_kernels.h"
#include "tests/load/bench_math.h"
#include "tests/load/bench_opts.h"
#include "tests/load/bench_team.h"

enum {
    REPS = 9,
    MAX_LINES = 64,
    COLD_CACHES = 3,
    MIN_COLD_BYTES = 256 << 20,
    DEFAULT_L2_BYTES = 1 << 20,
    DEFAULT_L3_BYTES = 32 << 20,
    SAMPLE_BYTES = 256 << 20, // of a read from memory
    L2_SAMPLE_BYTES = 512 << 20,
    COMPUTE_MS = 20,
};

typedef struct line {
    char what[96];
    const char *unit;
    uint32_t threads;
    bench_spread value;
} line;

// ceilings is the run.
typedef struct ceilings {
    const bench_ceil_ops *ops;
    uint32_t all; // threads
    uint64_t cold_bytes;
    line lines[MAX_LINES];
    uint32_t num;
    uint64_t huge_bytes;
    uint64_t at; // where in the arena the next read begins
} ceilings;

static void add(ceilings *c, const char *what, const char *unit, uint32_t threads, double *values) {
    line *l = &c->lines[c->num++];
    snprintf(l->what, sizeof(l->what), "%s", what);
    l->unit = unit;
    l->threads = threads;
    l->value = bench_spread_of(values, REPS);
    printf("%-58s | %4u thread%s | %8.1f %s, spread %.1f%%\n", what, threads,
           threads == 1 ? " " : "s", l->value.median, unit, 100 * l->value.spread);
    fflush(stdout);
}

// read_ordered measures reads of runs of run_bytes, in order or shuffled, by the best prefetch
// distance; every sample reads another part of the arena.
static bool read_runs(ceilings *c, const bench_arena *arena, uint64_t run_bytes, bool is_random,
                      uint32_t threads, const char *what) {
    uint64_t num = arena->bytes / run_bytes;
    uint64_t per = SAMPLE_BYTES / run_bytes;
    per = per > num ? num : per;
    bench_run *runs = calloc(num, sizeof(*runs));
    if (!runs) {
        return false;
    }
    for (uint64_t i = 0; i < num; i++) {
        uint64_t j = is_random ? bench_hash64(i) % (i + 1) : i;
        runs[i] = runs[j];
        runs[j] = (bench_run){arena->base + i * run_bytes, run_bytes};
    }
    double best[REPS] = {0};
    uint64_t best_ahead = 0;
    double best_median = -1;
    for (uint32_t way = 0; way < BENCH_CEIL_AHEADS; way++) {
        double values[REPS];
        for (int rep = 0; rep < REPS; rep++) {
            c->at = c->at + per > num ? 0 : c->at;
            values[rep] =
                bench_ceil_read(c->ops, runs + c->at, per, bench_ceil_ahead(way), threads);
            c->at += per;
        }
        double median = bench_spread_of(values, REPS).median;
        if (median > best_median) {
            memcpy(best, values, sizeof(best));
            best_median = median;
            best_ahead = bench_ceil_ahead(way);
        }
    }
    free(runs);
    char text[96];
    snprintf(text, sizeof(text), "%s, prefetch %u KiB ahead", what, (unsigned)(best_ahead >> 10));
    add(c, text, "GB/s", threads, best);
    return true;
}

// read_memory: sequential reads on both kinds of pages, then runs in random order, of K or V of a
// block of 8 heads and head_dim 128: 16 tokens of bf16, 64 of bf16 and of float32.
static bool read_memory(ceilings *c, bool is_huge, attnd_errinfo *info) {
    static const struct {
        uint64_t bytes;
        const char *what;
    } random[] = {{4096, "read of 4 KiB runs in random order"},
                  {32 << 10, "read of 32 KiB runs in random order"},
                  {128 << 10, "read of 128 KiB runs in random order"},
                  {256 << 10, "read of 256 KiB runs in random order"}};
    bench_arena arena;
    if (bench_arena_open(&arena, c->cold_bytes, is_huge, info) != ATTND_OK) {
        return false;
    }
    uint64_t huge = bench_arena_huge(&arena);
    c->huge_bytes = is_huge ? huge : c->huge_bytes;
    if (is_huge && huge < arena.bytes / 2) {
        printf("only %llu of %llu MiB are in huge pages\n", (unsigned long long)(huge >> 20),
               (unsigned long long)(arena.bytes >> 20));
    }
    bool is_good = true;
    for (int t = 0; t < 2 && is_good; t++) {
        uint32_t threads = t == 0 ? 1 : c->all;
        if (t == 1 && c->all == 1) {
            break;
        }
        is_good = read_runs(c, &arena, 2 << 20, false, threads,
                            is_huge ? "read of memory, huge pages" : "read of memory, 4 KiB pages");
        for (size_t i = 0; i < sizeof(random) / sizeof(random[0]) && is_huge && is_good; i++) {
            is_good = read_runs(c, &arena, random[i].bytes, true, threads, random[i].what);
        }
    }
    bench_arena_close(&arena);
    return is_good;
}

// read_l2 reads half the L2 of each thread again and again.
static bool read_l2(ceilings *c, attnd_errinfo *info) {
    long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    uint64_t half = (uint64_t)(l2 > 0 ? l2 : DEFAULT_L2_BYTES) / 2 & ~(uint64_t)4095;
    bench_arena arena;
    if (bench_arena_open(&arena, half * c->all, true, info) != ATTND_OK) {
        return false;
    }
    uint64_t times = L2_SAMPLE_BYTES / half;
    bench_run *runs = calloc(times * c->all, sizeof(*runs));
    for (uint32_t t = 0; runs && t < 2; t++) {
        uint32_t threads = t == 0 ? 1 : c->all;
        double values[REPS];
        for (uint64_t i = 0; i < times * threads; i++) {
            runs[i] = (bench_run){arena.base + i / times * half, half};
        }
        for (int rep = 0; rep < REPS; rep++) {
            values[rep] = bench_ceil_read(c->ops, runs, times * threads, 0, threads);
        }
        if (t == 0 || c->all > 1) {
            add(c, "read of half the L2", "GB/s", threads, values);
        }
    }
    free(runs);
    bench_arena_close(&arena);
    return runs != NULL;
}

static void compute(ceilings *c) {
    static const struct {
        const char *what, *unit;
    } rates[BENCH_CEIL_NUM_RATES] = {
        [BENCH_CEIL_FMA] = {"float32 multiply-add", "GFLOP/s"},
        [BENCH_CEIL_DOT] = {"bf16 dot product into float32", "GFLOP/s"},
        [BENCH_CEIL_FROM_F16] = {"conversion of fp16 to float32", "G elements/s"},
        [BENCH_CEIL_EXP2] = {"exp2 by a polynomial of degree 5", "G elements/s"},
    };
    for (int rate = 0; rate < BENCH_CEIL_NUM_RATES; rate++) {
        for (uint32_t t = 0; t < (c->all > 1 ? 2u : 1u); t++) {
            uint32_t threads = t == 0 ? 1 : c->all;
            double values[REPS];
            for (int rep = 0; rep < REPS; rep++) {
                values[rep] =
                    bench_ceil_compute(c->ops, (bench_ceil_rate)rate, threads, COMPUTE_MS);
            }
            if (values[0] > 0) {
                add(c, rates[rate].what, rates[rate].unit, threads, values);
            } else if (t == 0) {
                printf("%-58s | there is none in %s\n", rates[rate].what, c->ops->isa);
            }
        }
    }
}

static bool write_json(const ceilings *c, const char *path) {
    bench_host host;
    bench_host_read(&host);
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "what", "attn-bench ceilings");
    cJSON_AddStringToObject(doc, "version", ATTND_VERSION);
    cJSON_AddStringToObject(doc, "cpu", host.cpu);
    cJSON_AddNumberToObject(doc, "cpus", host.cpus);
    cJSON_AddStringToObject(doc, "system", host.kernel);
    cJSON_AddStringToObject(doc, "isa", c->ops->isa);
    cJSON_AddNumberToObject(doc, "cold_bytes", (double)c->cold_bytes);
    cJSON_AddNumberToObject(doc, "huge_page_bytes", (double)c->huge_bytes);
    cJSON *list = cJSON_AddArrayToObject(doc, "ceilings");
    for (uint32_t i = 0; i < c->num; i++) {
        const line *l = &c->lines[i];
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "what", l->what);
        cJSON_AddNumberToObject(one, "threads", l->threads);
        cJSON_AddNumberToObject(one, "value", l->value.median);
        cJSON_AddStringToObject(one, "unit", l->unit);
        cJSON_AddNumberToObject(one, "spread", l->value.spread);
        cJSON_AddNumberToObject(one, "min", l->value.min);
        cJSON_AddNumberToObject(one, "max", l->value.max);
        cJSON_AddNumberToObject(one, "repetitions", l->value.num);
        cJSON_AddItemToArray(list, one);
    }
    bool is_good = bench_json_write(doc, path);
    cJSON_Delete(doc);
    return is_good;
}

int bench_ceilings(int argc, char **argv) {
    static ceilings c;
    const char *json = NULL, *isa = NULL;
    uint32_t cold_mib = 0;
    bool help = false;
    attnd_errinfo info = {0};
    bench_host host;
    bench_host_read(&host);
    c.all = host.cpus > 0 ? host.cpus : 1;
    bench_opt table[] = {
        {"isa", BENCH_OPT_TEXT, &isa, "NAME", "loops of this instruction set; default: the best", 0,
         0, false},
        {"threads", BENCH_OPT_U32, &c.all, "N", "beside 1; default: all processors", 1,
         BENCH_MAX_THREADS, false},
        {"cold-mib", BENCH_OPT_U32, &cold_mib, "N",
         "memory that is read; default 3 times the last cache", 1, 1 << 20, false},
        {"json", BENCH_OPT_TEXT, &json, "FILE", "write the result there too", 0, 0, false},
        {"help", BENCH_OPT_FLAG, &help, NULL, "print this", 0, 0, false},
        {NULL, BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
    };
    int status;
    attnd_err err = bench_opts_parse(table, argc, argv, &info);
    c.ops = bench_ceil_find(isa);
    if (!err && !c.ops) {
        err = attnd_fail(&info, ATTND_ENOTSUP, "isa", "no loops of \"%s\" on this machine", isa);
    }
    if (bench_opts_ended(table, "ceilings", help, err, &info, &status)) {
        return status;
    }
    long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    c.cold_bytes = COLD_CACHES * (uint64_t)(l3 > 0 ? l3 : DEFAULT_L3_BYTES);
    c.cold_bytes = c.cold_bytes < MIN_COLD_BYTES ? MIN_COLD_BYTES : c.cold_bytes;
    c.cold_bytes = cold_mib > 0 ? (uint64_t)cold_mib << 20 : c.cold_bytes;
    printf("attn-bench ceilings: %s, %s; memory: %llu MiB; medians of %d\n", host.cpu, c.ops->isa,
           (unsigned long long)(c.cold_bytes >> 20), REPS);
    if (!read_memory(&c, true, &info) || !read_memory(&c, false, &info) || !read_l2(&c, &info)) {
        fprintf(stderr, "attn-bench ceilings: %s\n", info.text);
        return BENCH_EXIT_FAILED;
    }
    compute(&c);
    return json && !write_json(&c, json) ? BENCH_EXIT_FAILED : BENCH_EXIT_OK;
}
