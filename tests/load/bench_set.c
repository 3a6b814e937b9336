#include "tests/load/bench_set.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_math.h"
#include "tests/load/bench_team.h"

// sizes are the parts of a set in bytes.
typedef struct sizes {
    uint64_t half; // K or V of a block
    uint64_t blocks, pool, q, out, table, scale;
    uint64_t new_rows, freqs; // K or V of all appended tokens, RoPE's frequencies
} sizes;

static uint64_t blocks_of(const bench_case *c, int32_t kv_len) {
    return (uint64_t)((kv_len + c->block_tokens - 1) / c->block_tokens);
}

// q_stride_heads returns how many heads lie between one token's queries and the next one's.
static int32_t q_stride_heads(const bench_case *c) {
    return c->q_heads + (c->fused ? 2 * c->kv_heads : 0);
}

static sizes sizes_of(const bench_case *c) {
    int32_t lengths[BENCH_MAX_BATCH];
    sizes z = {0};
    bench_case_lengths(c, lengths);
    for (int32_t i = 0; i < c->batch; i++) {
        z.blocks += blocks_of(c, lengths[i]);
    }
    z.half = (uint64_t)c->kv_heads * (uint64_t)c->block_tokens * (uint64_t)c->head_dim *
             attnd_dtype_bytes(c->kv_dtype);
    z.pool = z.blocks * 2 * z.half;
    z.out = (uint64_t)c->batch * (uint64_t)c->q_len * (uint64_t)c->q_heads * (uint64_t)c->head_dim *
            attnd_dtype_bytes(c->q_dtype);
    z.q = z.out / (uint64_t)c->q_heads * (uint64_t)q_stride_heads(c);
    z.table = z.blocks * sizeof(uint32_t);
    z.scale = (uint64_t)c->kv_heads * sizeof(float);
    z.new_rows = c->fused ? 0 // they lie behind the queries
                          : (uint64_t)c->batch * (uint64_t)c->new_len * (uint64_t)c->kv_heads *
                                (uint64_t)c->head_dim * attnd_dtype_bytes(c->q_dtype);
    z.freqs = (uint64_t)c->head_dim / 2 * sizeof(float);
    return z;
}

uint64_t bench_set_bytes(const bench_case *c) {
    sizes z = sizes_of(c);
    uint64_t pages = 9 * 4096; // of what each part is rounded up by
    return z.pool + z.q + z.out + z.table + 2 * z.scale + 2 * z.new_rows + z.freqs + pages;
}

// shuffle fills table with 0 .. num - 1 in random order.
static void shuffle(uint32_t *table, uint64_t num, uint64_t seed) {
    for (uint64_t i = 0; i < num; i++) {
        uint64_t j = bench_hash64(seed * 0x100000001 + i) % (i + 1);
        table[i] = table[j];
        table[j] = (uint32_t)i;
    }
}

static attn_shape shape_of(const bench_case *c, const sizes *z) {
    int64_t head = (int64_t)c->block_tokens * c->head_dim;
    return (attn_shape){.q_dtype = c->q_dtype,
                        .kv_dtype = c->kv_dtype,
                        .q_heads = c->q_heads,
                        .kv_heads = c->kv_heads,
                        .head_dim = c->head_dim,
                        .v_head_dim = c->head_dim,
                        .block_tokens = c->block_tokens,
                        .stride_k_token = c->head_dim,
                        .stride_k_head = head,
                        .stride_v_token = c->head_dim,
                        .stride_v_head = head,
                        .block_stride = 2 * z->half};
}

static attn_row row_of(const bench_case *c, const sizes *z, int32_t kv_len) {
    return (attn_row){.stride_q_token = q_stride_heads(c) * c->head_dim,
                      .stride_q_head = c->head_dim,
                      .stride_out_token = c->q_heads * c->head_dim,
                      .stride_out_head = c->head_dim,
                      .v_offset = z->half,
                      .kv_len = kv_len,
                      .q_len = c->q_len,
                      .q_count = c->q_len,
                      .flags = c->kind == BENCH_FULL ? 0 : ATTN_CAUSAL,
                      .window_left = -1,
                      .window_right = -1};
}

// list_runs lists K and V of each block of a row.  Of a last block that is not full, the live
// tokens of every head are a run of their own; they are rounded up to the grain of runs.
static void list_runs(bench_set *s, const attn_row *row) {
    const attn_shape *shape = &s->params.shape;
    uint64_t element = attnd_dtype_bytes(shape->kv_dtype);
    uint64_t token = (uint64_t)shape->head_dim * element;
    uint64_t head = (uint64_t)shape->block_tokens * token;
    for (int32_t key = 0; key < row->kv_len; key += shape->block_tokens) {
        const char *k = (const char *)s->params.pool +
                        row->table[key / shape->block_tokens] * shape->block_stride;
        int32_t live = row->kv_len - key;
        if (live >= shape->block_tokens) {
            uint64_t half = head * (uint64_t)shape->kv_heads;
            s->runs[s->num_runs++] = (bench_run){k, half & ~(uint64_t)(BENCH_RUN_ALIGN - 1)};
            s->runs[s->num_runs++] =
                (bench_run){k + row->v_offset, half & ~(uint64_t)(BENCH_RUN_ALIGN - 1)};
            continue;
        }
        uint64_t bytes = ((uint64_t)live * token + BENCH_RUN_ALIGN - 1) / BENCH_RUN_ALIGN;
        bytes *= BENCH_RUN_ALIGN;
        for (int32_t part = 0; part < 2 * shape->kv_heads; part++) {
            s->runs[s->num_runs++] = (bench_run){k + (uint64_t)part * head, bytes};
        }
    }
}

// set_new gives a row its part of the appended tokens: its own, from `first` on, or behind the
// queries of the same tokens.
static void set_new(attn_row *row, const bench_case *c, const char *k_new, const char *v_new,
                    uint64_t first, const attn_rope *rope) {
    row->k_new = k_new + first;
    row->v_new = v_new + first;
    row->stride_k_new_token = row->stride_v_new_token = c->kv_heads * c->head_dim;
    if (c->fused) {
        int64_t element = (int64_t)attnd_dtype_bytes(c->q_dtype);
        int64_t k = (c->q_len - c->new_len) * row->stride_q_token + c->q_heads * c->head_dim;
        row->k_new = (const char *)row->q + k * element;
        row->v_new = (const char *)row->q + (k + c->kv_heads * c->head_dim) * element;
        row->stride_k_new_token = row->stride_v_new_token = row->stride_q_token;
    }
    row->stride_k_new_head = row->stride_v_new_head = c->head_dim;
    row->new_len = c->new_len;
    row->rope = rope;
}

static const void *shifted(const void *p, int64_t delta) {
    return p ? (const char *)p + delta : NULL;
}

// shift_rows makes launch from params for a backend that sees the arena elsewhere.
static void shift_rows(bench_set *s, int64_t delta) {
    s->ropes[1] = s->ropes[0];
    s->ropes[1].inv_freq = shifted(s->ropes[0].inv_freq, delta);
    s->launch = s->params;
    s->launch.pool = (char *)s->params.pool + delta;
    s->launch.rows = s->params.rows + s->params.num_rows;
    for (uint32_t i = 0; i < s->params.num_rows; i++) {
        attn_row row = s->params.rows[i];
        row.q = shifted(row.q, delta);
        row.out = (char *)row.out + delta;
        row.table = shifted(row.table, delta);
        row.k_scale = shifted(row.k_scale, delta);
        row.v_scale = shifted(row.v_scale, delta);
        row.k_new = shifted(row.k_new, delta);
        row.v_new = shifted(row.v_new, delta);
        row.rope = row.rope ? &s->ropes[1] : NULL;
        s->launch.rows[i] = row;
    }
}

static void fill_scales(float *k_scale, float *v_scale, int32_t num) {
    for (int32_t h = 0; h < num; h++) {
        k_scale[h] = 1.0f + (float)(h % 8) / 64;
        v_scale[h] = 1.0f - (float)(h % 8) / 64;
    }
}

typedef struct tensor_job {
    void *to;
    attnd_dtype dtype;
    uint64_t bytes, seed;
    uint32_t threads;
} tensor_job;

static void fill_share(void *arg, uint32_t worker) {
    enum { PIECE = 1024 };
    const tensor_job *job = arg;
    float values[PIECE];
    uint64_t num = job->bytes / attnd_dtype_bytes(job->dtype);
    for (uint64_t at = (uint64_t)worker * PIECE; at < num; at += (uint64_t)job->threads * PIECE) {
        bench_uniform(values, bench_hash64(~job->seed), (uint32_t)at, PIECE);
        for (uint64_t i = 0; i < PIECE && at + i < num; i++) {
            attnd_store(job->to, job->dtype, at + i, (double)values[i]);
        }
    }
}

// fill_tensor writes values that the pool has not: a query that is some key would see that alone.
static void fill_tensor(void *to, attnd_dtype dtype, uint64_t bytes, uint64_t seed,
                        uint32_t threads) {
    enum { SMALL_BYTES = 1 << 20 }; // which other threads are not started for
    threads = bytes < SMALL_BYTES ? 1 : threads;
    tensor_job job = {to, dtype, bytes, seed, threads};
    bench_team_run(fill_share, &job, threads);
}

// fill_freqs is RoPE's usual base.
static void fill_freqs(float *freqs, int32_t head_dim) {
    for (int32_t i = 0; i < head_dim / 2; i++) {
        freqs[i] = (float)pow(10000, -2.0 * i / head_dim);
    }
}

attnd_err bench_set_init(bench_set *out, const bench_case *c, bench_arena *arena, int64_t delta,
                         uint64_t seed, uint32_t threads, attnd_errinfo *info) {
    int32_t lengths[BENCH_MAX_BATCH];
    sizes z = sizes_of(c);
    bench_case_lengths(c, lengths);
    bench_set s = {.out_bytes = z.out};
    attn_row *rows = calloc(2 * (size_t)c->batch, sizeof(*rows));
    s.runs = calloc(2 * z.blocks + 2 * (uint64_t)c->batch * (uint64_t)c->kv_heads, sizeof(*s.runs));
    s.ropes = calloc(2, sizeof(*s.ropes));
    char *pool = bench_arena_take(arena, z.pool);
    char *q = bench_arena_take(arena, z.q);
    s.out = bench_arena_take(arena, z.out);
    uint32_t *table = bench_arena_take(arena, z.table);
    float *k_scale = bench_arena_take(arena, z.scale);
    float *v_scale = bench_arena_take(arena, z.scale);
    char *k_new = bench_arena_take(arena, z.new_rows);
    char *v_new = bench_arena_take(arena, z.new_rows);
    float *freqs = bench_arena_take(arena, z.freqs);
    if (!rows || !s.runs || !s.ropes || !pool || !q || !s.out || !table || !k_scale || !v_scale ||
        !k_new || !v_new || !freqs) {
        free(rows);
        free(s.runs);
        free(s.ropes);
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no room for a set of %llu MiB",
                          (unsigned long long)(bench_set_bytes(c) >> 20));
    }
    s.params = (attn_params){.shape = shape_of(c, &z),
                             .pool = pool,
                             .pool_bytes = z.pool,
                             .num_blocks = z.blocks,
                             .rows = rows,
                             .num_rows = (uint32_t)c->batch};
    bench_arena_fill(pool, c->kv_dtype, z.pool / attnd_dtype_bytes(c->kv_dtype), seed, threads);
    fill_tensor(q, c->q_dtype, z.q, seed, threads);
    fill_tensor(k_new, c->q_dtype, z.new_rows, seed + (1u << 20), threads);
    fill_tensor(v_new, c->q_dtype, z.new_rows, seed + (2u << 20), threads);
    fill_freqs(freqs, c->head_dim);
    s.ropes[0] = (attn_rope){freqs, 1, c->head_dim, false};
    memset(s.out, 0xff, z.out); // a NaN in every type
    shuffle(table, z.blocks, seed);
    fill_scales(k_scale, v_scale, c->kv_heads);
    for (int32_t i = 0; i < c->batch; i++) {
        rows[i] = row_of(c, &z, lengths[i]);
        rows[i].q = q + (uint64_t)i * (z.q / (uint64_t)c->batch);
        rows[i].out = (char *)s.out + (uint64_t)i * (z.out / (uint64_t)c->batch);
        rows[i].table = table;
        if (c->kv_dtype == ATTND_F8E4M3) {
            rows[i].k_scale = k_scale;
            rows[i].v_scale = v_scale;
        }
        if (c->new_len > 0) {
            set_new(&rows[i], c, k_new, v_new, (uint64_t)i * (z.new_rows / (uint64_t)c->batch),
                    s.ropes);
        }
        table += blocks_of(c, lengths[i]);
        list_runs(&s, &rows[i]);
    }
    shift_rows(&s, delta);
    *out = s;
    return ATTND_OK;
}

void bench_set_fini(bench_set *s) {
    free(s->params.rows);
    free(s->runs);
    free(s->ropes);
    *s = (bench_set){0};
}
