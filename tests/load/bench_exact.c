// A sampled output is a launch of its own: one head, one query token, the pool as it is.  So the
// reference and the plain computation are taken as they are, however large the case.
#include "tests/load/bench_exact.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "tests/conformance/conf_plain.h"
#include "tests/load/bench_math.h"
#include "tests/load/bench_team.h"

enum { MIN_PLACES = 2, MAX_PLACES = 64 };

// place_params makes p the launch of one place.  row is storage.
static attn_params place_params(const attn_params *p, const bench_place *at, attn_row *row) {
    const attn_shape *s = &p->shape;
    uint32_t kv_bytes = attnd_dtype_bytes(s->kv_dtype);
    uint32_t q_bytes = attnd_dtype_bytes(s->q_dtype);
    int32_t kv_head = at->head / (s->q_heads / s->kv_heads);
    attn_params one = *p;
    *row = p->rows[at->row];
    row->q = (const char *)row->q + at->head * row->stride_q_head * q_bytes;
    row->k_offset += (uint64_t)(kv_head * s->stride_k_head) * kv_bytes;
    row->v_offset += (uint64_t)(kv_head * s->stride_v_head) * kv_bytes;
    if (row->new_len > 0) {
        row->k_new = (const char *)row->k_new + kv_head * row->stride_k_new_head * q_bytes;
        row->v_new = (const char *)row->v_new + kv_head * row->stride_v_new_head * q_bytes;
    }
    row->k_scale = row->k_scale ? row->k_scale + kv_head : NULL;
    row->v_scale = row->v_scale ? row->v_scale + kv_head : NULL;
    row->q_first = at->token;
    row->q_count = 1;
    one.shape.q_heads = 1;
    one.shape.kv_heads = 1;
    one.rows = row;
    one.num_rows = 1;
    return one;
}

// ulp_at is the step of a type at |x|.
static double ulp_at(attnd_dtype dtype, double x) {
    static const int mantissa[ATTND_NUM_DTYPES] = {23, 7, 10, 3};
    int exponent = 0;
    frexp(x, &exponent);
    return ldexp(1, exponent - 1 - mantissa[dtype]);
}

static void choose_places(bench_exact *e, const attn_params *p, uint64_t seed) {
    uint32_t longest = 0;
    for (uint32_t r = 0; r < p->num_rows; r++) {
        longest = p->rows[r].kv_len > p->rows[longest].kv_len ? r : longest;
    }
    for (uint32_t i = 0; i < e->num; i++) {
        uint64_t random = bench_hash64(seed * 0x10001 + i);
        uint32_t row = i == 0 ? longest : (uint32_t)(random % p->num_rows);
        int32_t tokens = p->rows[row].q_len;
        e->places[i] = (bench_place){
            .row = row,
            .token = i == 0 ? tokens - 1 : (int32_t)((random >> 20) % (uint32_t)tokens),
            .head = (int32_t)((random >> 44) % (uint32_t)p->shape.q_heads)};
    }
}

// compute_place fills want and returns the largest error of the plain computation.
static attnd_err compute_place(const attn_params *p, const bench_place *at, double *want,
                               double *plain_error) {
    attn_row row;
    double lse;
    double plain[ATTN_MAX_HEAD_DIM];
    attn_params one = place_params(p, at, &row);
    attnd_err err = attn_reference(&one, want, &lse);
    if (err != ATTND_OK) {
        return err;
    }
    *plain_error = 0;
    for (int order = 0; order < CONF_NUM_ORDERS; order++) {
        conf_plain(&one, (conf_order)order, plain, &lse);
        for (int32_t d = 0; d < p->shape.v_head_dim; d++) {
            *plain_error = fmax(*plain_error, fabs(plain[d] - want[d]));
        }
    }
    return ATTND_OK;
}

typedef struct job {
    const attn_params *p;
    const bench_exact *e;
    double *plain_errors; // [num]
    _Atomic uint32_t next;
    _Atomic int err; // the last that there was
} job;

static void compute_share(void *arg, uint32_t worker) {
    job *j = arg;
    size_t dims = (size_t)j->p->shape.v_head_dim;
    (void)worker;
    for (uint32_t i; (i = atomic_fetch_add(&j->next, 1)) < j->e->num;) {
        attnd_err err =
            compute_place(j->p, &j->e->places[i], j->e->want + i * dims, &j->plain_errors[i]);
        if (err != ATTND_OK) {
            atomic_store(&j->err, err);
        }
    }
}

// set_bound reads the bound off the sample.
static void set_bound(bench_exact *e, const attn_params *p, const double *plain_errors) {
    size_t dims = (size_t)p->shape.v_head_dim;
    double worst = 0;
    double largest = 0;
    for (uint32_t i = 0; i < e->num; i++) {
        worst = fmax(worst, plain_errors[i]);
    }
    for (size_t i = 0; i < e->num * dims; i++) {
        largest = fmax(largest, fabs(e->want[i]));
    }
    e->bound = 2 * worst + ulp_at(p->shape.q_dtype, largest);
}

attnd_err bench_exact_init(bench_exact *out, const attn_params *p, uint64_t max_keys, uint64_t seed,
                           uint32_t threads) {
    uint64_t keys = 0;
    for (uint32_t r = 0; r < p->num_rows; r++) {
        keys += (uint64_t)p->rows[r].kv_len;
    }
    uint64_t num = max_keys * p->num_rows / (keys + 1);
    num = num < MIN_PLACES ? MIN_PLACES : num > MAX_PLACES ? MAX_PLACES : num;
    size_t dims = (size_t)p->shape.v_head_dim;
    bench_exact e = {.num = (uint32_t)num,
                     .places = calloc(num, sizeof(*e.places)),
                     .want = calloc(num * dims, sizeof(*e.want))};
    job j = {.p = p, .e = &e, .plain_errors = calloc(num, sizeof(*j.plain_errors))};
    attnd_err err = ATTND_ENOMEM;
    if (e.places && e.want && j.plain_errors) {
        choose_places(&e, p, seed);
        bench_team_run(compute_share, &j, threads);
        err = (attnd_err)atomic_load(&j.err);
        set_bound(&e, p, j.plain_errors);
    }
    free(j.plain_errors);
    if (err != ATTND_OK) {
        bench_exact_fini(&e);
        return err;
    }
    *out = e;
    return ATTND_OK;
}

void bench_exact_fini(bench_exact *e) {
    free(e->places);
    free(e->want);
    *e = (bench_exact){0};
}

bench_error bench_exact_compare(const bench_exact *e, const attn_params *p) {
    const attn_shape *s = &p->shape;
    bench_error result = {.bound = e->bound, .places = e->num, .worst_rms = -1};
    double squares = 0;
    for (uint32_t i = 0; i < e->num; i++) {
        const bench_place *at = &e->places[i];
        const attn_row *row = &p->rows[at->row];
        int64_t first = at->token * row->stride_out_token + at->head * row->stride_out_head;
        double own = 0;
        for (int32_t d = 0; d < s->v_head_dim; d++) {
            double got = attnd_load(row->out, s->q_dtype, (uint64_t)(first + d));
            double error = fabs(got - e->want[(int64_t)i * s->v_head_dim + d]);
            error = isnan(error) ? INFINITY : error;
            result.max = fmax(result.max, error);
            own += error * error;
        }
        squares += own;
        double rms = sqrt(own / s->v_head_dim);
        if (rms > result.worst_rms) {
            result.worst_rms = rms;
            result.worst = *at;
        }
    }
    result.rms = sqrt(squares / ((double)e->num * s->v_head_dim));
    return result;
}
