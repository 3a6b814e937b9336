// bench_set is one copy of a case's data in an arena: pool, tables, queries, outputs, new tokens.
// The blocks of all its sequences lie in random order, K and V of a block side by side, `[kv_heads,
// block_tokens, head_dim]` each, as in the daemon's pool of a model of one layer.
#ifndef ATTND_LOAD_BENCH_SET_H
#define ATTND_LOAD_BENCH_SET_H

#include "attention/attn.h"
#include "tests/load/bench_arena.h"
#include "tests/load/bench_case.h"
#include "tests/load/bench_ceil.h"

typedef struct bench_set {
    attn_params params; // as the host sees the arena
    attn_params launch; // as the backend does; its rows too lie in host memory
    bench_run *runs;    // [num_runs], live K and V in the order in which a sequence has its keys
    uint64_t num_runs;
    attn_rope *ropes; // [2], of params and of launch, where tokens are appended
    void *out;        // outputs of all rows, contiguous
    uint64_t out_bytes;
} bench_set;

// bench_set_bytes returns how much of an arena a set takes.
uint64_t bench_set_bytes(const bench_case *c);

// bench_set_init takes its memory from the arena and fills it with random values; outputs are NaN.
// delta is what the backend adds to an address of the arena.  ATTND_ENOMEM.  The caller owns *out:
// bench_set_fini, before the arena is reset.
attnd_err bench_set_init(bench_set *out, const bench_case *c, bench_arena *arena, int64_t delta,
                         uint64_t seed, uint32_t threads, attnd_errinfo *info);
void bench_set_fini(bench_set *s);

#endif
