// Both runs go over one KV head at a time.  Its query heads of all tokens of the block are the rows
// of two matrix products: scores [rows, keys] = q k^T, then out [rows, v_head_dim] = p v, with the
// softmax of each row between them.  K and V are made 64 keys at a time, K transposed, so that both
// products read along their columns.  The score matrix is whole (that is what "unfused" means) and
// bounded by SCORE_BYTES, which bounds the tokens of a block.
//
// The orders of the plain run: in the descending one keys and dims are laid out backwards and then
// summed ascending; in the blocked one each 8 dims and each 64 keys are summed from 0 and added up.
#include "tests/load/bench_ref.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_data.h"
#include "tests/load/bench_math.h"

enum {
    TILE = 64,             // keys
    DIM_BLOCK = 8,         // dims of a partial sum
    MAX_ROWS = 64,         // of a block, unless the group is larger
    SCORE_BYTES = 64 << 20 // of the score matrix, unless one token needs more
};

struct bench_ref {
    const bench_model *model;
    uint32_t group;       // query heads of a KV head
    uint32_t v_cols;      // v_head_dim, rounded up for the product
    uint32_t rows_cap;    // rows that the buffers are made for
    uint64_t score_bytes; // of scores
    double *scores;       // [padded rows, padded keys] of a block; float32 in the plain run
    double *q;            // [rows_cap, head_dim]
    float *q32;           // of the plain run, in the order of the sum
    double *out;          // [rows_cap, v_cols]; float32 in the plain run
    float *part;          // [rows_cap, max(TILE, v_cols)]
    float *tile;          // [TILE, max(head_dim, v_head_dim)]
    double *tile_cols;    // [max(head_dim, TILE), max(TILE, v_cols)]; float32 in the plain run
};

static uint32_t round_up(uint32_t x, uint32_t unit) {
    return (x + unit - 1) / unit * unit;
}

static uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

attnd_err bench_ref_create(bench_ref **out, const bench_model *m) {
    bench_ref *ref = calloc(1, sizeof(*ref));
    if (ref == NULL) {
        return ATTND_ENOMEM;
    }
    uint32_t dim = larger(m->head_dim, m->v_head_dim);
    ref->model = m;
    ref->group = m->q_heads / m->kv_heads;
    ref->v_cols = round_up(m->v_head_dim, BENCH_GEMM_COLS);
    ref->rows_cap = round_up(larger(MAX_ROWS, ref->group), BENCH_GEMM_ROWS);
    uint64_t cols = larger(TILE, ref->v_cols);
    ref->q = calloc((uint64_t)ref->rows_cap * m->head_dim, sizeof(*ref->q));
    ref->q32 = calloc((uint64_t)ref->rows_cap * m->head_dim, sizeof(*ref->q32));
    ref->out = calloc((uint64_t)ref->rows_cap * ref->v_cols, sizeof(*ref->out));
    ref->part = calloc(ref->rows_cap * cols, sizeof(*ref->part));
    ref->tile = calloc((uint64_t)TILE * dim, sizeof(*ref->tile));
    ref->tile_cols = calloc(larger(dim, TILE) * cols, sizeof(*ref->tile_cols));
    if (ref->q == NULL || ref->q32 == NULL || ref->out == NULL || ref->part == NULL ||
        ref->tile == NULL || ref->tile_cols == NULL) {
        bench_ref_free(ref);
        return ATTND_ENOMEM;
    }
    *out = ref;
    return ATTND_OK;
}

void bench_ref_free(bench_ref *ref) {
    if (ref != NULL) {
        free(ref->scores);
        free(ref->q);
        free(ref->q32);
        free(ref->out);
        free(ref->part);
        free(ref->tile);
        free(ref->tile_cols);
        free(ref);
    }
}

uint32_t bench_ref_max_tokens(const bench_ref *ref, uint32_t end_key) {
    uint64_t row_bytes = (uint64_t)round_up(end_key, TILE) * sizeof(double);
    uint64_t rows = SCORE_BYTES / row_bytes;
    rows = rows < MAX_ROWS ? rows : MAX_ROWS;
    return larger((uint32_t)rows / ref->group, 1);
}

typedef struct shape {
    uint32_t rows, padded_rows, keys, padded_keys;
} shape;

static shape shape_of(const bench_ref *ref, const bench_block *b) {
    shape s = {.rows = b->num_tokens * ref->group, .keys = b->end_key - b->first_key};
    s.padded_rows = round_up(s.rows, BENCH_GEMM_ROWS);
    s.padded_keys = round_up(s.keys, TILE);
    return s;
}

// reserve makes the score matrix large enough for a block.
static attnd_err reserve(bench_ref *ref, const bench_block *b) {
    shape s = shape_of(ref, b);
    uint64_t bytes = (uint64_t)s.padded_rows * s.padded_keys * sizeof(double);
    ATTND_ASSERT(s.padded_rows <= ref->rows_cap);
    if (bytes > ref->score_bytes) {
        free(ref->scores);
        ref->scores = malloc(bytes);
        ref->score_bytes = ref->scores != NULL ? bytes : 0;
    }
    return ref->scores != NULL ? ATTND_OK : ATTND_ENOMEM;
}

// out_row returns which of the output's [tokens, q_heads] a row of the product is.
static uint64_t out_row(const bench_ref *ref, uint32_t row, uint32_t kv_head) {
    uint64_t token = row / ref->group, head = (uint64_t)kv_head * ref->group + row % ref->group;
    return token * ref->model->q_heads + head;
}

// ---- float64

static void scores_f64(bench_ref *ref, const bench_block *b, shape s, uint32_t kv_head) {
    uint32_t dim = ref->model->head_dim;
    bench_block_q(b, kv_head, ref->q);
    memset(ref->scores, 0, (uint64_t)s.padded_rows * s.padded_keys * sizeof(double));
    for (uint32_t at = 0; at < s.keys; at += TILE) {
        uint32_t n = s.keys - at < TILE ? s.keys - at : TILE;
        bench_block_k(b, kv_head, b->first_key + at, 1, n, ref->tile);
        memset(ref->tile_cols, 0, (uint64_t)dim * TILE * sizeof(double));
        for (uint32_t j = 0; j < n; j++) {
            for (uint32_t i = 0; i < dim; i++) {
                ref->tile_cols[i * TILE + j] = (double)ref->tile[j * dim + i];
            }
        }
        bench_gemm_f64(ref->scores + at, s.padded_keys, ref->q, dim, ref->tile_cols, s.padded_rows,
                       TILE, dim);
    }
}

// logits_f64 takes n dot products, of the keys from first on, to the arguments of exp: scale,
// softcap, ALiBi, in this order.  *max gets the largest.
static void logits_f64(const bench_model *m, double slope, uint32_t position, uint32_t first,
                       double *x, uint32_t n, double *max) {
    double scale = m->scale != 0 ? (double)m->scale : 1 / sqrt((double)m->head_dim);
    double cap = (double)m->softcap, unused = 0;
    if (cap == 0 && slope == 0) {
        bench_scale_f64(x, n, scale, max);
        return;
    }
    bench_scale_f64(x, n, scale, &unused);
    for (uint32_t j = 0; j < n; j++) {
        x[j] = cap > 0 ? cap * tanh(x[j] / cap) : x[j];
        x[j] -= slope * (double)(position - (first + j));
        *max = x[j] > *max ? x[j] : *max;
    }
}

// softmax_f64 makes probabilities of one row of scores; keys that it does not see get 0.
static void softmax_f64(const bench_ref *ref, const bench_block *b, uint32_t t, uint32_t head,
                        double *row, uint32_t padded_keys) {
    const bench_model *m = ref->model;
    const float *sinks = m->per_layer[b->layer].sinks;
    double slope = m->alibi_slopes != NULL ? (double)m->alibi_slopes[head] : 0;
    double max = sinks != NULL ? (double)sinks[head] : -INFINITY, sum = 0, unused = 0;
    uint32_t first, end;
    bench_block_seen(b, t, &first, &end);
    uint32_t from = first - b->first_key, to = end - b->first_key;
    logits_f64(m, slope, b->positions[t], first, row + from, to - from, &max);
    bench_exp_f64(row + from, to - from, max, &sum);
    sum += sinks != NULL ? exp((double)sinks[head] - max) : 0;
    bench_scale_f64(row + from, to - from, 1 / sum, &unused);
    memset(row, 0, from * sizeof(*row));
    memset(row + to, 0, (padded_keys - to) * sizeof(*row));
}

static void outputs_f64(bench_ref *ref, const bench_block *b, shape s, uint32_t kv_head) {
    uint32_t dim = ref->model->v_head_dim, cols = ref->v_cols;
    memset(ref->out, 0, (uint64_t)s.padded_rows * cols * sizeof(double));
    memset(ref->tile_cols, 0, (uint64_t)TILE * cols * sizeof(double));
    for (uint32_t at = 0; at < s.keys; at += TILE) {
        uint32_t n = s.keys - at < TILE ? s.keys - at : TILE;
        bench_block_v(b, kv_head, b->first_key + at, 1, n, ref->tile);
        for (uint32_t j = 0; j < n; j++) {
            for (uint32_t i = 0; i < dim; i++) {
                ref->tile_cols[j * cols + i] = (double)ref->tile[j * dim + i];
            }
        }
        bench_gemm_f64(ref->out, cols, ref->scores + at, s.padded_keys, ref->tile_cols,
                       s.padded_rows, cols, n);
    }
}

attnd_err bench_ref_f64(bench_ref *ref, const bench_block *b, double *out) {
    const bench_model *m = ref->model;
    if (reserve(ref, b) != ATTND_OK) {
        return ATTND_ENOMEM;
    }
    shape s = shape_of(ref, b);
    for (uint32_t h = 0; h < m->kv_heads; h++) {
        scores_f64(ref, b, s, h);
        for (uint32_t row = 0; row < s.rows; row++) {
            softmax_f64(ref, b, row / ref->group, h * ref->group + row % ref->group,
                        ref->scores + (uint64_t)row * s.padded_keys, s.padded_keys);
        }
        outputs_f64(ref, b, s, h);
        for (uint32_t row = 0; row < s.rows; row++) {
            uint64_t at = out_row(ref, row, h);
            memcpy(out + at * m->v_head_dim, ref->out + (uint64_t)row * ref->v_cols,
                   m->v_head_dim * sizeof(*out));
        }
    }
    return ATTND_OK;
}

// ---- plain float32

// key_at returns the key at place n of the order's sequence of keys.
static uint32_t key_at(const bench_block *b, bench_order order, uint32_t n) {
    return order == BENCH_DESCENDING ? b->end_key - 1 - n : b->first_key + n;
}

static void q_plain(bench_ref *ref, const bench_block *b, shape s, uint32_t kv_head,
                    bench_order order) {
    uint32_t dim = ref->model->head_dim;
    bench_block_q_plain(b, kv_head, ref->q32);
    for (uint32_t row = 0; row < s.rows && order == BENCH_DESCENDING; row++) {
        float *head = ref->q32 + (uint64_t)row * dim;
        for (uint32_t i = 0; i < dim / 2; i++) {
            float x = head[i];
            head[i] = head[dim - 1 - i];
            head[dim - 1 - i] = x;
        }
    }
}

// product is c[rows][cols] += a[rows][inner] * b[inner][cols], as bench_gemm_f32 takes it.
typedef struct product {
    float *c;
    const float *a, *b;
    uint64_t ldc, lda;
    uint32_t rows, cols, inner;
} product;

// multiply makes a product, in partial sums of `block` of the inner index when the order says so.
static void multiply(bench_ref *ref, const product *p, bench_order order, uint32_t block) {
    if (order != BENCH_BLOCKED) {
        bench_gemm_f32(p->c, p->ldc, p->a, p->lda, p->b, p->rows, p->cols, p->inner);
        return;
    }
    for (uint32_t k = 0; k < p->inner; k += block) {
        uint32_t n = p->inner - k < block ? p->inner - k : block;
        memset(ref->part, 0, (uint64_t)p->rows * p->cols * sizeof(float));
        bench_gemm_f32(ref->part, p->cols, p->a + k, p->lda, p->b + (uint64_t)k * p->cols, p->rows,
                       p->cols, n);
        for (uint64_t row = 0; row < p->rows; row++) {
            for (uint64_t col = 0; col < p->cols; col++) {
                p->c[row * p->ldc + col] += ref->part[row * p->cols + col];
            }
        }
    }
}

static void scores_plain(bench_ref *ref, const bench_block *b, shape s, uint32_t kv_head,
                         bench_order order) {
    uint32_t dim = ref->model->head_dim;
    int32_t step = order == BENCH_DESCENDING ? -1 : 1;
    float *scores = (float *)ref->scores, *cols = (float *)ref->tile_cols;
    q_plain(ref, b, s, kv_head, order);
    memset(scores, 0, (uint64_t)s.padded_rows * s.padded_keys * sizeof(float));
    for (uint32_t at = 0; at < s.keys; at += TILE) {
        uint32_t n = s.keys - at < TILE ? s.keys - at : TILE;
        bench_block_k_plain(b, kv_head, key_at(b, order, at), step, n, ref->tile);
        memset(cols, 0, (uint64_t)dim * TILE * sizeof(float));
        for (uint32_t j = 0; j < n; j++) {
            for (uint32_t i = 0; i < dim; i++) {
                uint32_t from = order == BENCH_DESCENDING ? dim - 1 - i : i;
                cols[i * TILE + j] = ref->tile[j * dim + from];
            }
        }
        product qk = {.c = scores + at,
                      .ldc = s.padded_keys,
                      .a = ref->q32,
                      .lda = dim,
                      .b = cols,
                      .rows = s.padded_rows,
                      .cols = TILE,
                      .inner = dim};
        multiply(ref, &qk, order, DIM_BLOCK);
    }
}

static void logits_plain(const bench_block *b, uint32_t t, float slope, bench_order order,
                         uint32_t from, float *x, uint32_t n, float *max) {
    const bench_model *m = b->model;
    float scale = m->scale != 0 ? m->scale : 1 / sqrtf((float)m->head_dim);
    float cap = m->softcap, unused = 0;
    if (cap == 0 && slope == 0) {
        bench_scale_f32(x, n, scale, max);
        return;
    }
    bench_scale_f32(x, n, scale, &unused);
    for (uint32_t j = 0; j < n; j++) {
        x[j] = cap > 0 ? cap * tanhf(x[j] / cap) : x[j];
        x[j] -= slope * (float)(b->positions[t] - key_at(b, order, from + j));
        *max = x[j] > *max ? x[j] : *max;
    }
}

static float sum_plain(const float *x, uint32_t n, bench_order order) {
    uint32_t block = order == BENCH_BLOCKED ? TILE : n;
    float sum = 0;
    for (uint32_t at = 0; at < n; at += block) {
        float part = 0;
        for (uint32_t j = at; j < n && j < at + block; j++) {
            part += x[j];
        }
        sum += part;
    }
    return sum;
}

static void softmax_plain(const bench_ref *ref, const bench_block *b, uint32_t t, uint32_t head,
                          bench_order order, float *row, shape s) {
    const bench_model *m = ref->model;
    const float *sinks = m->per_layer[b->layer].sinks;
    float slope = m->alibi_slopes != NULL ? m->alibi_slopes[head] : 0;
    float max = sinks != NULL ? sinks[head] : -INFINITY;
    uint32_t first, end;
    bench_block_seen(b, t, &first, &end);
    uint32_t from = order == BENCH_DESCENDING ? b->end_key - end : first - b->first_key;
    uint32_t to = from + (end - first);
    logits_plain(b, t, slope, order, from, row + from, to - from, &max);
    bench_exp_f32(row + from, to - from, max);
    float sum = sum_plain(row + from, to - from, order);
    sum += sinks != NULL ? expf(sinks[head] - max) : 0;
    bench_divide_f32(row + from, to - from, sum);
    bench_round(row + from, m->dtype, to - from);
    memset(row, 0, from * sizeof(*row));
    memset(row + to, 0, (s.padded_keys - to) * sizeof(*row));
}

static void outputs_plain(bench_ref *ref, const bench_block *b, shape s, uint32_t kv_head,
                          bench_order order) {
    uint32_t dim = ref->model->v_head_dim, cols = ref->v_cols;
    int32_t step = order == BENCH_DESCENDING ? -1 : 1;
    float *tile = (float *)ref->tile_cols, *out = (float *)ref->out;
    memset(out, 0, (uint64_t)s.padded_rows * cols * sizeof(float));
    memset(tile, 0, (uint64_t)TILE * cols * sizeof(float));
    for (uint32_t at = 0; at < s.keys; at += TILE) {
        uint32_t n = s.keys - at < TILE ? s.keys - at : TILE;
        bench_block_v(b, kv_head, key_at(b, order, at), step, n, ref->tile);
        for (uint32_t j = 0; j < n; j++) {
            memcpy(tile + (uint64_t)j * cols, ref->tile + (uint64_t)j * dim, dim * sizeof(float));
        }
        product pv = {.c = out,
                      .ldc = cols,
                      .a = (float *)ref->scores + at,
                      .lda = s.padded_keys,
                      .b = tile,
                      .rows = s.padded_rows,
                      .cols = cols,
                      .inner = n};
        multiply(ref, &pv, order, TILE);
    }
}

attnd_err bench_ref_plain(bench_ref *ref, const bench_block *b, bench_order order, float *out) {
    const bench_model *m = ref->model;
    if (reserve(ref, b) != ATTND_OK) {
        return ATTND_ENOMEM;
    }
    shape s = shape_of(ref, b);
    for (uint32_t h = 0; h < m->kv_heads; h++) {
        scores_plain(ref, b, s, h, order);
        for (uint32_t row = 0; row < s.rows; row++) {
            softmax_plain(ref, b, row / ref->group, h * ref->group + row % ref->group, order,
                          (float *)ref->scores + (uint64_t)row * s.padded_keys, s);
        }
        outputs_plain(ref, b, s, h, order);
        for (uint32_t row = 0; row < s.rows; row++) {
            uint64_t at = out_row(ref, row, h);
            memcpy(out + at * m->v_head_dim, (float *)ref->out + (uint64_t)row * ref->v_cols,
                   m->v_head_dim * sizeof(*out));
            bench_round(out + at * m->v_head_dim, m->dtype, m->v_head_dim);
        }
    }
    return ATTND_OK;
}
