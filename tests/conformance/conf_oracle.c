// Bounds.  out: twice the largest error of the plain computation, over the row and three orders of
// summation, and one ulp of the output type at the row's largest |out|.  lse: twice its error and 4
// float32 ulp at max(1, |lse| + ln(kv_len)).
#include "tests/conformance/conf_oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/conformance/conf_plain.h"

double conf_worst_ratio;

#define MAX_ROPE_ERROR 2e-6f // values are normal, so below 8

static int64_t total_tokens(const attn_params *p) {
    int64_t total = 0;
    for (uint32_t r = 0; r < p->num_rows; r++) {
        total += p->rows[r].q_count;
    }
    return total;
}

// ulp_at is the step of a type at |x|.
static double ulp_at(attnd_dtype dtype, double x) {
    static const int mantissa[ATTND_NUM_DTYPES] = {23, 7, 10, 3};
    static const int lowest[ATTND_NUM_DTYPES] = {-126, -126, -14, -6};
    int exponent = 0;
    frexp(x, &exponent);
    exponent -= 1;
    exponent = x == 0 || exponent < lowest[dtype] ? lowest[dtype] : exponent;
    return ldexp(1, exponent - mantissa[dtype]);
}

// max_error returns the largest |a - b| of a row's outputs.
static double max_error(const attn_params *p, const double *a, const double *b, int64_t first,
                        int32_t count) {
    int64_t width = (int64_t)p->shape.q_heads * p->shape.v_head_dim;
    double worst = 0;
    for (int64_t i = first * width; i < (first + count) * width; i++) {
        worst = fmax(worst, fabs(a[i] - b[i]));
    }
    return worst;
}

static double max_lse_error(const attn_params *p, const double *a, const double *b, int64_t total,
                            int64_t first, int32_t count) {
    double worst = 0;
    for (int32_t h = 0; h < p->shape.q_heads; h++) {
        for (int64_t i = h * total + first; i < h * total + first + count; i++) {
            worst = fmax(worst, a[i] == b[i] ? 0 : fabs(a[i] - b[i]));
        }
    }
    return worst;
}

// compute fills the oracle from params whose pool may be written.
static void compute(conf_oracle *o, attn_params *p, uint64_t pool_bytes) {
    int64_t total = total_tokens(p);
    int64_t width = (int64_t)p->shape.q_heads * p->shape.v_head_dim;
    void *before = malloc(pool_bytes);
    memcpy(before, p->pool, pool_bytes);
    double *out = malloc(((size_t)(total * width) + 1) * sizeof(double));
    double *lse = malloc(((size_t)(total * p->shape.q_heads) + 1) * sizeof(double));
    o->out = malloc(((size_t)(total * width) + 1) * sizeof(double));
    o->lse = malloc(((size_t)(total * p->shape.q_heads) + 1) * sizeof(double));
    o->pool = malloc(pool_bytes);
    if (attn_reference(p, o->out, o->lse) != ATTND_OK) {
        abort();
    }
    memcpy(o->pool, p->pool, pool_bytes);
    memset(o->out_bound, 0, sizeof(o->out_bound));
    memset(o->lse_error, 0, sizeof(o->lse_error));
    for (int order = 0; order < CONF_NUM_ORDERS; order++) {
        memcpy(p->pool, before, pool_bytes);
        conf_plain(p, (conf_order)order, out, lse);
        int64_t done = 0;
        for (uint32_t r = 0; r < p->num_rows; r++) {
            int32_t count = p->rows[r].q_count;
            o->out_bound[r] = fmax(o->out_bound[r], 2 * max_error(p, out, o->out, done, count));
            o->lse_error[r] =
                fmax(o->lse_error[r], max_lse_error(p, lse, o->lse, total, done, count));
            done += count;
        }
    }
    int64_t done = 0;
    for (uint32_t r = 0; r < p->num_rows; r++) {
        double largest = 0;
        for (int64_t i = done * width; i < (done + p->rows[r].q_count) * width; i++) {
            largest = fmax(largest, fabs(o->out[i]));
        }
        o->out_bound[r] += ulp_at(p->shape.q_dtype, largest);
        done += p->rows[r].q_count;
    }
    free(before);
    free(out);
    free(lse);
}

void conf_oracle_init(conf_oracle *o, const conf_launch *l) {
    attn_params p = l->params;
    p.pool = malloc(l->pool_bytes);
    memcpy(p.pool, l->pool_before, l->pool_bytes);
    p.saturated = NULL;
    compute(o, &p, l->pool_bytes);
    o->saturated = 0;
    memcpy(p.pool, l->pool_before, l->pool_bytes);
    p.saturated = &o->saturated;
    if (attn_reference(&p, NULL, NULL) != ATTND_OK) {
        abort();
    }
    free(p.pool);
}

void conf_oracle_fini(conf_oracle *o) {
    free(o->out);
    free(o->lse);
    free(o->pool);
}

// key_of orders the bit patterns of a type like its values.
static int64_t key_of(const void *base, attnd_dtype dtype, uint64_t i) {
    uint32_t bytes = attnd_dtype_bytes(dtype);
    uint32_t bits = 0;
    memcpy(&bits, (const char *)base + i * bytes, bytes);
    uint32_t sign = 1u << (8 * bytes - 1);
    return bits & sign ? -(int64_t)(bits & (sign - 1)) : (int64_t)bits;
}

// is_near says that element i of two pools is as good as the same: bits alike, or a step apart in a
// narrow type, or in float32 as far apart as rounding inside RoPE brings values of that size.
static bool is_near(const void *a, const void *b, attnd_dtype dtype, uint64_t i) {
    int64_t distance = key_of(a, dtype, i) - key_of(b, dtype, i);
    if (dtype == ATTND_F32) {
        return distance == 0 ||
               fabsf(((const float *)a)[i] - ((const float *)b)[i]) <= MAX_ROPE_ERROR;
    }
    return distance >= -1 && distance <= 1;
}

// count_different returns how many elements of the pool differ, -1 when one differs too much.
static int64_t count_different(const conf_oracle *o, const conf_launch *l) {
    attnd_dtype dtype = l->spec.kv_dtype;
    uint64_t num = l->pool_bytes / attnd_dtype_bytes(dtype);
    int64_t count = 0;
    if (memcmp(o->pool, l->params.pool, l->pool_bytes) == 0) {
        return 0;
    }
    for (uint64_t i = 0; i < num; i++) {
        if (!is_near(o->pool, l->params.pool, dtype, i)) {
            return -1;
        }
        count += key_of(o->pool, dtype, i) != key_of(l->params.pool, dtype, i);
    }
    return count;
}

// place is a token of a row: by its number in the row, and by its place in the oracle.
typedef struct place {
    uint32_t row;
    int64_t token;
    int64_t index, total;
} place;

static char wrong_text[256];

static const char *check_out(const conf_oracle *o, const conf_launch *l, const place *at,
                             int32_t h) {
    const attn_shape *s = &l->params.shape;
    const attn_row *row = &l->params.rows[at->row];
    double bound = o->out_bound[at->row];
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        int64_t i = at->token * row->stride_out_token + h * row->stride_out_head + d;
        double got = attnd_load(row->out, s->q_dtype, (uint64_t)i);
        double want = o->out[(at->index * s->q_heads + h) * s->v_head_dim + d];
        double error = fabs(got - want);
        conf_worst_ratio = fmax(conf_worst_ratio, error / bound);
        if (!(error <= bound)) {
            snprintf(wrong_text, sizeof(wrong_text),
                     "row %u token %lld head %d dim %d: out %.9g, reference %.9g, error %.3g, "
                     "bound %.3g",
                     at->row, (long long)at->token, h, d, got, want, error, bound);
            return wrong_text;
        }
    }
    return NULL;
}

static const char *check_lse(const conf_oracle *o, const conf_launch *l, const place *at,
                             int32_t h) {
    const attn_row *row = &l->params.rows[at->row];
    double got = (double)row->lse[h * row->stride_lse_head + at->token];
    double want = o->lse[h * at->total + at->index];
    double size = fmax(1, fabs(want) + log(fmax(1, row->kv_len)));
    double bound = 2 * o->lse_error[at->row] + (isfinite(want) ? 4 * ulp_at(ATTND_F32, size) : 0);
    if (got == want || fabs(got - want) <= bound) {
        return NULL;
    }
    snprintf(wrong_text, sizeof(wrong_text),
             "row %u token %lld head %d: lse %.9g, reference %.9g, bound %.3g", at->row,
             (long long)at->token, h, got, want, bound);
    return wrong_text;
}

// check_row compares a row whose first token is at index first of the oracle.
static const char *check_row(const conf_oracle *o, const conf_launch *l, uint32_t r, int64_t first,
                             int64_t total) {
    const attn_row *row = &l->params.rows[r];
    for (int32_t n = 0; n < row->q_count; n++) {
        place at = {.row = r, .token = row->q_first + n, .index = first + n, .total = total};
        for (int32_t h = 0; h < l->params.shape.q_heads; h++) {
            const char *wrong = check_out(o, l, &at, h);
            if (!wrong && row->lse) {
                wrong = check_lse(o, l, &at, h);
            }
            if (wrong) {
                return wrong;
            }
        }
    }
    return NULL;
}

static const char *check_rows(const conf_oracle *o, const conf_launch *l) {
    int64_t total = total_tokens(&l->params);
    int64_t done = 0;
    for (uint32_t r = 0; r < l->params.num_rows; r++) {
        const char *wrong = check_row(o, l, r, done, total);
        if (wrong) {
            return wrong;
        }
        done += l->params.rows[r].q_count;
    }
    return NULL;
}

// check_over_own_pool compares with a reference that takes the pool as the launch left it.
static const char *check_over_own_pool(const conf_launch *l) {
    conf_oracle own;
    attn_params p = l->params;
    attn_row *rows = malloc(p.num_rows * sizeof(*rows));
    memcpy(rows, p.rows, p.num_rows * sizeof(*rows));
    for (uint32_t r = 0; r < p.num_rows; r++) {
        rows[r].new_len = 0;
    }
    p.rows = rows;
    p.saturated = NULL;
    p.pool = malloc(l->pool_bytes);
    memcpy(p.pool, l->params.pool, l->pool_bytes);
    compute(&own, &p, l->pool_bytes);
    const char *wrong = check_rows(&own, l);
    conf_oracle_fini(&own);
    free(p.pool);
    free(rows);
    return wrong;
}

const char *conf_oracle_check(const conf_oracle *o, const conf_launch *l) {
    if (!conf_launch_is_intact(l)) {
        return "a canary round the outputs was overwritten";
    }
    int64_t different = count_different(o, l);
    if (different < 0) {
        return "the pool differs from the reference's after the append";
    }
    if (l->saturated != o->saturated) {
        return "the count of saturated values is wrong";
    }
    if (different > 0 && l->spec.kv_dtype != ATTND_F32) {
        return check_over_own_pool(l);
    }
    return check_rows(o, l);
}
