#include "tests/load/bench_arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/load/bench_math.h"
#include "tests/load/bench_team.h"

enum {
    PAGE_BYTES = 4096,
    HUGE_BYTES = 2 << 20,
    TABLE_VALUES = 4 << 20,  // of the table of random values
    PIECE_VALUES = 16 << 10, // copied from it at a time, from a random place,
    PLACE_VALUES = 32,       // which is a multiple of this
};

attnd_err bench_arena_open(bench_arena *out, uint64_t bytes, bool is_huge, attnd_errinfo *info) {
    // The system would give more than there is, and end who fills it.
    uint64_t there = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    if (bytes > there) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "%llu MiB are needed, this machine has %llu",
                          (unsigned long long)(bytes >> 20), (unsigned long long)(there >> 20));
    }
    bytes = (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    char *map = mmap(NULL, bytes + HUGE_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no %llu MiB of memory",
                          (unsigned long long)(bytes >> 20));
    }
    uint64_t before = (HUGE_BYTES - (uintptr_t)map % HUGE_BYTES) % HUGE_BYTES;
    if (before > 0) {
        munmap(map, before);
    }
    if (before < HUGE_BYTES) {
        munmap(map + before + bytes, HUGE_BYTES - before);
    }
    *out = (bench_arena){.base = map + before, .bytes = bytes};
    madvise(out->base, bytes, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    for (uint64_t at = 0; at < bytes; at += PAGE_BYTES) {
        out->base[at] = 0;
    }
    return ATTND_OK;
}

void bench_arena_close(bench_arena *a) {
    if (a->base) {
        munmap(a->base, a->bytes);
    }
    *a = (bench_arena){0};
}

void *bench_arena_take(bench_arena *a, uint64_t bytes) {
    bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (bytes > a->bytes - a->used) {
        return NULL;
    }
    void *at = a->base + a->used;
    a->used += bytes;
    return at;
}

void bench_arena_reset(bench_arena *a) {
    a->used = 0;
}

uint64_t bench_arena_huge(const bench_arena *a) {
    char line[512];
    bool is_inside = false;
    unsigned long long first, end, kib;
    uint64_t bytes = 0;
    FILE *f = fopen("/proc/self/smaps", "re");
    while (f && fgets(line, sizeof(line), f)) {
        if (sscanf(line, "%llx-%llx ", &first, &end) == 2) {
            is_inside = first <= (uintptr_t)a->base && (uintptr_t)a->base < end;
        } else if (is_inside && sscanf(line, "AnonHugePages: %llu kB", &kib) == 1) {
            bytes = (uint64_t)kib << 10;
        }
    }
    if (f) {
        fclose(f);
    }
    return bytes < a->bytes ? bytes : a->bytes;
}

typedef struct fill_job {
    char *to;
    const char *table;
    uint64_t num, seed;
    uint32_t bytes, threads; // bytes of a value
} fill_job;

static void fill_share(void *arg, uint32_t worker) {
    const fill_job *job = arg;
    uint64_t pieces = (job->num + PIECE_VALUES - 1) / PIECE_VALUES;
    for (uint64_t piece = worker; piece < pieces; piece += job->threads) {
        uint64_t first = piece * PIECE_VALUES;
        uint64_t count = job->num - first < PIECE_VALUES ? job->num - first : PIECE_VALUES;
        uint64_t place = bench_hash64(job->seed * 0x10001 + piece);
        place %= (TABLE_VALUES - PIECE_VALUES) / PLACE_VALUES;
        memcpy(job->to + first * job->bytes, job->table + place * PLACE_VALUES * job->bytes,
               count * job->bytes);
    }
}

// table_of returns the table of a storage type, made when it is first asked for and never freed.
static const char *table_of(attnd_dtype dtype) {
    static char *tables[ATTND_NUM_DTYPES];
    if (!tables[dtype]) {
        float *values = malloc(TABLE_VALUES * sizeof(*values));
        char *table = malloc((size_t)TABLE_VALUES * attnd_dtype_bytes(dtype));
        if (!values || !table) {
            fprintf(stderr, "attn-bench: no memory for random values\n");
            exit(1);
        }
        bench_uniform(values, bench_hash64(dtype), 0, TABLE_VALUES);
        for (uint64_t i = 0; i < TABLE_VALUES; i++) {
            attnd_store(table, dtype, i, (double)values[i]);
        }
        free(values);
        tables[dtype] = table;
    }
    return tables[dtype];
}

void bench_arena_fill(void *at, attnd_dtype dtype, uint64_t num, uint64_t seed, uint32_t threads) {
    fill_job job = {.to = at,
                    .table = table_of(dtype),
                    .num = num,
                    .seed = seed,
                    .bytes = attnd_dtype_bytes(dtype),
                    .threads = threads};
    bench_team_run(fill_share, &job, threads);
}
