// bench_arena is one piece of memory that everything of a case lies in, so that a backend may copy
// it to a device as a whole, and so that the kind of its pages is known.
#ifndef ATTND_LOAD_BENCH_ARENA_H
#define ATTND_LOAD_BENCH_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/dtype.h"
#include "proto/err.h"

typedef struct bench_arena {
    char *base;
    uint64_t bytes, used;
} bench_arena;

// bench_arena_open maps bytes of zeros, all of them resident.  is_huge asks for huge pages (what
// was got: bench_arena_huge), else pages are small.  ATTND_ENOMEM.  The caller: bench_arena_close.
attnd_err bench_arena_open(bench_arena *out, uint64_t bytes, bool is_huge, attnd_errinfo *info);
void bench_arena_close(bench_arena *a);

// bench_arena_take returns the next bytes, aligned to 4096, NULL when there are fewer.
// bench_arena_reset takes everything back.
void *bench_arena_take(bench_arena *a, uint64_t bytes);
void bench_arena_reset(bench_arena *a);

// bench_arena_huge returns how many bytes of the arena lie in huge pages, from /proc/self/smaps.
uint64_t bench_arena_huge(const bench_arena *a);

// bench_arena_fill writes num random values of variance 1, uniform, of a storage type, with
// threads. They are pieces of one table of random values, in random order.
void bench_arena_fill(void *at, attnd_dtype dtype, uint64_t num, uint64_t seed, uint32_t threads);

#endif
