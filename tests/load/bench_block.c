// Regenerates rows and rotates them.  Angles are position times inv_freq in float64, cos and sin
// too; K is rounded to the cache's type once, behind the rotation, as the append does it.  The
// plain forms rotate in float32, as an implementation does, so that what this costs is in their
// error.
#include "tests/load/bench_block.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_HEAD_DIM = 256 };

static void cos_sin_of(const bench_model *m, uint32_t position, double *out) {
    for (uint32_t p = 0; p < m->rotary_dim / 2; p++) {
        double angle = (double)position * (double)m->inv_freq[p];
        out[2 * (uint64_t)p] = cos(angle) * (double)m->attention_factor;
        out[2 * (uint64_t)p + 1] = sin(angle) * (double)m->attention_factor;
    }
}

attnd_err bench_rope_table_grow(bench_rope_table *table, const bench_model *m,
                                uint32_t num_positions) {
    if (num_positions > BENCH_ROPE_POSITIONS) {
        num_positions = BENCH_ROPE_POSITIONS;
    }
    if (m->inv_freq == NULL || num_positions <= table->num_positions) {
        return ATTND_OK;
    }
    uint32_t wanted = 2 * table->num_positions; // doubles, so that growing costs little in all
    wanted = wanted > num_positions ? wanted : num_positions;
    wanted = wanted < BENCH_ROPE_POSITIONS ? wanted : BENCH_ROPE_POSITIONS;
    double *grown = realloc(table->cos_sin, (uint64_t)wanted * m->rotary_dim * sizeof(*grown));
    if (grown == NULL) {
        return ATTND_ENOMEM;
    }
    table->cos_sin = grown;
    for (uint32_t i = table->num_positions; i < wanted; i++) {
        cos_sin_of(m, i, table->cos_sin + (uint64_t)i * m->rotary_dim);
    }
    table->num_positions = wanted;
    return ATTND_OK;
}

void bench_rope_table_free(bench_rope_table *table) {
    free(table->cos_sin);
    *table = (bench_rope_table){0};
}

void bench_block_init(bench_block *b) {
    b->first_key = UINT32_MAX;
    b->end_key = 0;
    for (uint32_t t = 0; t < b->num_tokens; t++) {
        uint32_t first, end;
        bench_block_seen(b, t, &first, &end);
        b->first_key = first < b->first_key ? first : b->first_key;
        b->end_key = end > b->end_key ? end : b->end_key;
    }
}

void bench_block_seen(const bench_block *b, uint32_t t, uint32_t *first, uint32_t *end) {
    uint32_t window = bench_model_window(b->model, b->layer);
    *end = b->positions[t] + 1;
    *first = window > 0 && *end > window ? *end - window : 0;
}

// angles returns cos and sin of a position; here [rotary_dim] is for one that no table has.
static const double *angles(const bench_block *b, uint32_t position, double *here) {
    if (position < b->rope->num_positions) {
        return b->rope->cos_sin + (uint64_t)position * b->model->rotary_dim;
    }
    cos_sin_of(b->model, position, here);
    return here;
}

// rotate turns the pairs of one head: (x, y) -> (x cos - y sin, x sin + y cos), in its type.
#define ROTATE(name, type)                                                              \
    static void name(const bench_block *b, uint32_t position, type *head) {             \
        const bench_model *m = b->model;                                                \
        double here[MAX_HEAD_DIM];                                                      \
        const double *cs = angles(b, position, here);                                   \
        uint64_t half = m->rotary_dim / 2;                                              \
        for (uint64_t p = 0; p < half; p++) {                                           \
            type *first = m->rope_interleaved ? head + 2 * p : head + p;                \
            type *second = m->rope_interleaved ? first + 1 : first + half;              \
            type x = *first, y = *second, c = (type)cs[2 * p], s = (type)cs[2 * p + 1]; \
            *first = x * c - y * s;                                                     \
            *second = x * s + y * c;                                                    \
        }                                                                               \
    }

ROTATE(rotate_f64, double)
ROTATE(rotate_f32, float)

// raw makes n elements of a row as they were sent, rounded to the model's type.
static void raw(const bench_block *b, bench_tensor tensor, uint32_t token, uint32_t first,
                uint32_t n, float *out) {
    uint64_t key =
        bench_row_key(b->seed, bench_prompt_origin(&b->prompt, token), b->layer, tensor, token);
    bench_fill(out, ATTND_F32, tensor, key, first, n);
    bench_round(out, b->model->dtype, n);
}

// raw_q makes q of one row of the product: token row / group, head row % group of the KV head.
static void raw_q(const bench_block *b, uint32_t kv_head, uint32_t row, float *head) {
    const bench_model *m = b->model;
    uint32_t group = m->q_heads / m->kv_heads;
    raw(b, BENCH_Q, b->positions[row / group], (kv_head * group + row % group) * m->head_dim,
        m->head_dim, head);
}

void bench_block_q(const bench_block *b, uint32_t kv_head, double *q) {
    const bench_model *m = b->model;
    uint32_t group = m->q_heads / m->kv_heads;
    float head[MAX_HEAD_DIM];
    for (uint32_t row = 0; row < b->num_tokens * group; row++, q += m->head_dim) {
        raw_q(b, kv_head, row, head);
        for (uint32_t i = 0; i < m->head_dim; i++) {
            q[i] = (double)head[i];
        }
        if (m->inv_freq != NULL) {
            rotate_f64(b, b->positions[row / group], q);
        }
    }
}

void bench_block_q_plain(const bench_block *b, uint32_t kv_head, float *q) {
    const bench_model *m = b->model;
    uint32_t group = m->q_heads / m->kv_heads;
    for (uint32_t row = 0; row < b->num_tokens * group; row++, q += m->head_dim) {
        raw_q(b, kv_head, row, q);
        if (m->inv_freq != NULL) {
            rotate_f32(b, b->positions[row / group], q);
            bench_round(q, m->dtype, m->head_dim);
        }
    }
}

void bench_block_k(const bench_block *b, uint32_t kv_head, uint32_t first, int32_t step, uint32_t n,
                   float *k) {
    const bench_model *m = b->model;
    double head[MAX_HEAD_DIM];
    uint32_t key = first;
    for (uint32_t i = 0; i < n; i++, key += (uint32_t)step, k += m->head_dim) {
        raw(b, BENCH_K, key, kv_head * m->head_dim, m->head_dim, k);
        if (m->inv_freq != NULL) {
            for (uint32_t j = 0; j < m->head_dim; j++) {
                head[j] = (double)k[j];
            }
            rotate_f64(b, key, head);
            for (uint32_t j = 0; j < m->head_dim; j++) {
                k[j] = (float)head[j];
            }
        }
        if (m->inv_freq != NULL || m->kv_dtype != m->dtype) {
            bench_round(k, m->kv_dtype, m->head_dim);
        }
    }
}

void bench_block_k_plain(const bench_block *b, uint32_t kv_head, uint32_t first, int32_t step,
                         uint32_t n, float *k) {
    const bench_model *m = b->model;
    uint32_t key = first;
    for (uint32_t i = 0; i < n; i++, key += (uint32_t)step, k += m->head_dim) {
        raw(b, BENCH_K, key, kv_head * m->head_dim, m->head_dim, k);
        if (m->inv_freq != NULL) {
            rotate_f32(b, key, k);
        }
        if (m->inv_freq != NULL || m->kv_dtype != m->dtype) {
            bench_round(k, m->kv_dtype, m->head_dim);
        }
    }
}

void bench_block_v(const bench_block *b, uint32_t kv_head, uint32_t first, int32_t step, uint32_t n,
                   float *v) {
    const bench_model *m = b->model;
    uint32_t key = first;
    for (uint32_t i = 0; i < n; i++, key += (uint32_t)step, v += m->v_head_dim) {
        raw(b, BENCH_V, key, kv_head * m->v_head_dim, m->v_head_dim, v);
        if (m->kv_dtype != m->dtype) {
            bench_round(v, m->kv_dtype, m->v_head_dim);
        }
    }
}
