// The CPU as a backend: host memory is device memory, a launch is over when it returns.
//
// Decode is held against reading the same blocks in the same order, prefill against the multiply-
// adds of the instruction set in use: of float32, or, for bf16, of its bf16 dot product where that
// is faster.  The peer is OpenBLAS (bench_peer.h).
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/load/bench_backend.h"
#include "tests/load/bench_peer.h"
#include "tests/load/bench_result.h"
#include "tests/load/bench_team.h"

enum {
    DEFAULT_L3_BYTES = 32 << 20,
    COMPUTE_MS = 20, // of a sample of a compute ceiling
    MACHINE_REPS = 7,
    SAMPLE_BYTES = 64 << 20,
    MACHINE_READ_BYTES = 128 << 20, // of a sample
};

struct bench_backend {
    attn_cpu *cpu;
    uint32_t threads;
    const bench_ceil_ops *reads, *computes;
    bench_peers peers; // of the group that is measured
};

// DECODE is a group: all storage types at one length.  LONG is a part of one: one type at all
// lengths, which are compared with each other.
#define DECODE(heads, length)                                                                     \
    (const char *const[]) {                                                                       \
        "decode f32 " heads " kv_len " length, "decode bf16 " heads " kv_len " length,            \
            "decode f16 " heads " kv_len " length, "decode f8e4m3 " heads " kv_len " length, NULL \
    }
#define LONG(dtype)                                                                 \
    "decode " dtype " 32/8 kv_len 4096", "decode " dtype " 32/8 kv_len 8192",       \
        "decode " dtype " 32/8 kv_len 16384", "decode " dtype " 32/8 kv_len 32768", \
        "decode " dtype " 32/8 kv_len 65536", "decode " dtype " 32/8 kv_len 131072"
#define PREFILL(length)                                                           \
    (const char *const[]) {                                                       \
        "prefill f32 32/8 q_len " length, "prefill bf16 32/8 q_len " length, NULL \
    }

static const char *const *const groups[] = {
    DECODE("32/8", "512"),
    DECODE("32/8", "1024"),
    DECODE("32/8", "2048"),
    (const char *const[]){LONG("f32"), "ragged f32 32/8 batch 128 kv_len 131072", NULL},
    (const char *const[]){LONG("bf16"), LONG("f8e4m3"), "ragged bf16 32/8 batch 128 kv_len 131072",
                          NULL},
    (const char *const[]){LONG("f16"), NULL},
    DECODE("8/8", "4096"),
    DECODE("8/8", "32768"),
    PREFILL("512"),
    PREFILL("2048"),
    PREFILL("4096"),
    NULL,
};

#define DECODE_ASKS(dtype, share)                                                                  \
    {"decode " dtype " 32/8 kv_len *", NULL, BENCH_SHARE, 4096, share, 0},                         \
        {"decode " dtype " 8/8 kv_len *", NULL, BENCH_SHARE, 4096, 0.85, 0}, {                     \
        "decode " dtype " 32/8 kv_len *", "decode " dtype " 32/8 kv_len 32768", BENCH_SLOPE, 4096, \
            0.9, 1.1                                                                               \
    }

static const bench_ask asks[] = {
    DECODE_ASKS("f32", 0.80),
    DECODE_ASKS("bf16", 0.75),
    DECODE_ASKS("f16", 0.60),
    {"decode f8e4m3 32/8 kv_len *", "decode bf16 32/8 kv_len *", BENCH_SPEEDUP, 4096, 1.5, 0},
    {"ragged f32 32/8 batch 128 kv_len *", "decode f32 32/8 kv_len *", BENCH_SLOWER, 0, 0, 1.05},
    {"ragged bf16 32/8 batch 128 kv_len *", "decode bf16 32/8 kv_len *", BENCH_SLOWER, 0, 0, 1.05},
    {"prefill f32 32/8 q_len 512", NULL, BENCH_SHARE, 0, 0.62, 0},
    {"prefill f32 32/8 q_len *", NULL, BENCH_SHARE, 2048, 0.70, 0},
    {"prefill bf16 32/8 q_len 512", NULL, BENCH_SHARE, 0, 0.55, 0},
    {"prefill bf16 32/8 q_len *", NULL, BENCH_SHARE, 2048, 0.60, 0},
    {"prefill f32 32/8 q_len *", NULL, BENCH_PEER, 0, 1.0, 0},
    {"prefill bf16 32/8 q_len *", NULL, BENCH_PEER, 0, 1.0, 0},
    {NULL, NULL, BENCH_SHARE, 0, 0, 0},
};

static const char *const kernels[] = {"scalar", "avx2", "avx512", "avx512_bf16", "neon", NULL};

static uint32_t processors(void) {
    cpu_set_t set;
    int num = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    return (uint32_t)(num < 1 ? 1 : num);
}

static attnd_err cpu_open(bench_backend **out, const bench_backend_opts *opts,
                          attnd_errinfo *info) {
    if (opts->peer) {
        return attnd_fail(info, ATTND_ENOTSUP, "peer", "--peer is of --backend cuda");
    }
    bench_backend *b = calloc(1, sizeof(*b));
    if (!b) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory");
    }
    b->threads = opts->threads > 0 ? opts->threads : processors();
    attn_cpu_opts cpu = {.num_threads = (int32_t)b->threads, .isa = opts->kernel};
    attnd_err err = attn_cpu_create(&b->cpu, &cpu, info);
    if (err != ATTND_OK) {
        free(b);
        return err;
    }
    b->reads = bench_ceil_find(NULL);
    b->computes = bench_ceil_find(attn_cpu_isa(b->cpu));
    *out = b;
    return ATTND_OK;
}

static void cpu_close(bench_backend *b) {
    attn_cpu_free(b->cpu);
    bench_peers_reset(&b->peers);
    free(b);
}

static void cpu_describe(const bench_backend *b, char *out, size_t bytes) {
    snprintf(out, bytes, "%s, %u threads", attn_cpu_isa(b->cpu), b->threads);
}

static uint32_t cpu_threads(const bench_backend *b) {
    return b->threads;
}

static uint64_t cpu_last_cache(const bench_backend *b) {
    (void)b;
    long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > 0 ? (uint64_t)bytes : DEFAULT_L3_BYTES;
}

static attnd_err cpu_place(bench_backend *b, const bench_arena *arena, int64_t *delta,
                           attnd_errinfo *info) {
    (void)b;
    (void)arena;
    (void)info;
    *delta = 0;
    return ATTND_OK;
}

static attnd_err cpu_put(bench_backend *b, const bench_arena *arena, attnd_errinfo *info) {
    (void)arena;
    (void)info;
    bench_peers_reset(&b->peers);
    return ATTND_OK;
}

static attnd_err cpu_get(bench_backend *b, void *host, uint64_t bytes, attnd_errinfo *info) {
    (void)b;
    (void)host;
    (void)bytes;
    (void)info;
    return ATTND_OK;
}

static attnd_err cpu_run(bench_backend *b, const attn_params *launch, attn_choice *choice,
                         attnd_errinfo *info) {
    return attn_cpu_run(b->cpu, launch, choice, info);
}

static attnd_err cpu_time(bench_backend *b, const attn_params *const *launches, uint32_t num,
                          double *us, attnd_errinfo *info) {
    double begin = bench_now();
    for (uint32_t i = 0; i < num; i++) {
        attnd_err err = attn_cpu_run(b->cpu, launches[i], NULL, info);
        if (err != ATTND_OK) {
            return err;
        }
    }
    *us = (bench_now() - begin) * 1e6 / num;
    return ATTND_OK;
}

// read_sets reads all runs of the sets once, in the order of their keys.
static double read_sets(const bench_backend *b, const bench_set *const *sets, uint32_t num,
                        uint64_t ahead) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < num; i++) {
        total += sets[i]->num_runs;
    }
    bench_run *runs = malloc(total * sizeof(*runs));
    if (!runs) {
        return 0;
    }
    uint64_t at = 0;
    for (uint32_t i = 0; i < num; i++) {
        memcpy(runs + at, sets[i]->runs, sets[i]->num_runs * sizeof(*runs));
        at += sets[i]->num_runs;
    }
    double gbs = bench_ceil_read(b->reads, runs, total, ahead, b->threads);
    free(runs);
    return gbs;
}

static uint32_t cpu_ceilings(const bench_backend *b, const bench_case *c) {
    (void)b;
    return bench_case_is_prefill(c) ? 2 : BENCH_CEIL_AHEADS;
}

static attnd_err cpu_ceiling(bench_backend *b, const bench_case *c, uint32_t way,
                             const bench_set *const *sets, uint32_t num, bench_ceiling *out,
                             attnd_errinfo *info) {
    if (bench_case_is_prefill(c)) {
        bool is_dot = way == 1 && c->kv_dtype == ATTND_BF16 && b->computes->dot_bf16;
        bench_ceil_rate rate = is_dot ? BENCH_CEIL_DOT : BENCH_CEIL_FMA;
        snprintf(out->what, sizeof(out->what), "%s %s", b->computes->isa,
                 is_dot ? "bf16 dot product" : "float32 multiply-add");
        out->value = bench_ceil_compute(b->computes, rate, b->threads, COMPUTE_MS);
        out->is_bytes = false;
        return ATTND_OK;
    }
    uint64_t ahead = bench_ceil_ahead(way);
    snprintf(out->what, sizeof(out->what), "read of the same blocks, prefetch %u KiB ahead",
             (uint32_t)(ahead >> 10));
    out->value = read_sets(b, sets, num, ahead);
    out->is_bytes = true;
    return out->value > 0 ? ATTND_OK : attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for runs");
}

// cpu_machine measures what every figure stands before: reading the arena from end to end, and the
// multiply-adds.
static uint32_t cpu_machine(bench_backend *b, const bench_arena *arena, bench_ceiling *out) {
    double values[MACHINE_REPS];
    uint64_t bytes = arena->bytes < MACHINE_READ_BYTES ? arena->bytes : MACHINE_READ_BYTES;
    uint64_t pieces = arena->bytes / bytes;
    for (uint64_t rep = 0; rep < MACHINE_REPS; rep++) {
        bench_run run = {arena->base + rep % pieces * bytes, bytes};
        values[rep] = bench_ceil_read(b->reads, &run, 1, 0, b->threads);
    }
    out[0] = (bench_ceiling){.what = "sequential read of the arena", .is_bytes = true};
    out[0].value = bench_spread_of(values, MACHINE_REPS).median;
    for (int i = 0; i < MACHINE_REPS; i++) {
        values[i] = bench_ceil_compute(b->computes, BENCH_CEIL_FMA, b->threads, COMPUTE_MS);
    }
    out[1] = (bench_ceiling){.what = "float32 multiply-add"};
    out[1].value = bench_spread_of(values, MACHINE_REPS).median;
    for (int i = 0; i < MACHINE_REPS; i++) {
        values[i] = bench_ceil_compute(b->computes, BENCH_CEIL_DOT, b->threads, COMPUTE_MS);
    }
    out[2] = (bench_ceiling){.what = "bf16 dot product into float32"};
    out[2].value = bench_spread_of(values, MACHINE_REPS).median;
    return out[2].value > 0 ? 3 : 2;
}

static const char *cpu_peer_name(bench_backend *b, const bench_case *c) {
    (void)b;
    return bench_peer_knows(c) ? bench_blas_name() : NULL;
}

static const char *cpu_peer_missing(bench_backend *b) {
    (void)b;
    return bench_blas_open() ? NULL
                             : "OpenBLAS is left out: no libopenblas.so.0 (Debian: apt-get install "
                               "libopenblas0-pthread)";
}

static attnd_err cpu_peer(bench_backend *b, const bench_case *c, uint32_t copies, double *us,
                          attnd_errinfo *info) {
    return bench_peer_time(&b->peers, c, b->threads, copies, us, info);
}

const bench_backend_ops bench_backend_cpu = {
    .name = "cpu",
    .groups = groups,
    .asks = asks,
    .kernels = kernels,
    .sample_bytes = SAMPLE_BYTES,
    .sample_calls = 1,
    .open = cpu_open,
    .close = cpu_close,
    .describe = cpu_describe,
    .threads = cpu_threads,
    .last_cache = cpu_last_cache,
    .place = cpu_place,
    .put = cpu_put,
    .get = cpu_get,
    .run = cpu_run,
    .time = cpu_time,
    .ceilings = cpu_ceilings,
    .ceiling = cpu_ceiling,
    .machine = cpu_machine,
    .peer_name = cpu_peer_name,
    .peer = cpu_peer,
    .peer_missing = cpu_peer_missing,
};
