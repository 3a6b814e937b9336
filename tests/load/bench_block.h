// bench_block is a small set of output rows of one request and layer, and the q, k and v that they
// depend on, made again from the seed: the verifier's own copy, which has never been near the
// daemon.  Read only after bench_block_init; any thread with its own block and rope table.
#ifndef ATTND_LOAD_BENCH_BLOCK_H
#define ATTND_LOAD_BENCH_BLOCK_H

#include <stdint.h>

#include "proto/err.h"
#include "tests/load/bench_data.h"
#include "tests/load/bench_model.h"

// bench_rope_table keeps cos and sin of positions 0 to num_positions - 1, so that they are not
// computed once a head and tile; positions behind BENCH_ROPE_POSITIONS are.
enum { BENCH_ROPE_POSITIONS = 1 << 16 };
typedef struct bench_rope_table {
    double *cos_sin; // [num_positions, rotary_dim / 2, 2]
    uint32_t num_positions;
} bench_rope_table;

// bench_rope_table_grow makes it cover num_positions (or BENCH_ROPE_POSITIONS).  ATTND_ENOMEM.
attnd_err bench_rope_table_grow(bench_rope_table *table, const bench_model *m,
                                uint32_t num_positions);
void bench_rope_table_free(bench_rope_table *table);

typedef struct bench_block {
    const bench_model *model;
    const bench_rope_table *rope;
    uint64_t seed;
    bench_prompt prompt;
    uint32_t layer;
    uint32_t num_tokens;
    const uint32_t *positions; // [num_tokens], in any order; the row at p sees keys up to p
    uint32_t first_key;        // keys [first_key, end_key) are seen by at least one row
    uint32_t end_key;
} bench_block;

// bench_block_init sets the key range from the other fields.
void bench_block_init(bench_block *b);

// bench_block_seen gives the keys [*first, *end) that token t of the block sees.
void bench_block_seen(const bench_block *b, uint32_t t, uint32_t *first, uint32_t *end);

// bench_block_q writes q of the query heads of one KV head, rotated and not rounded again:
// [num_tokens, q_heads / kv_heads, head_dim].  bench_block_q_plain rotates in float32 (by cos and
// sin from float64) and rounds to the model's type.
void bench_block_q(const bench_block *b, uint32_t kv_head, double *q);
void bench_block_q_plain(const bench_block *b, uint32_t kv_head, float *q);

// bench_block_k and bench_block_v write k and v of one KV head as the cache stores them (rotated,
// then rounded to its type), for the keys first, first + step, ... : [n, head_dim], [n,
// v_head_dim]. bench_block_k_plain rotates in float32.
void bench_block_k(const bench_block *b, uint32_t kv_head, uint32_t first, int32_t step, uint32_t n,
                   float *k);
void bench_block_k_plain(const bench_block *b, uint32_t kv_head, uint32_t first, int32_t step,
                         uint32_t n, float *k);
void bench_block_v(const bench_block *b, uint32_t kv_head, uint32_t first, int32_t step, uint32_t n,
                   float *v);

#endif
