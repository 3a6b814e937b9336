// Rows are taken in blocks that the reference can hold.  For each token of a block the error
// against float64 is found over all heads, then a list of the tokens that are still in doubt
// shrinks from one summation order of the plain run to the next.  What is left appeals to the rest
// of its call, whose q, k and v come from the seed.
#include "tests/load/bench_check.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_ref.h"

enum {
    MAX_TOKENS = 64, // of a block
    CALL_ROWS = 32,  // that an appeal looks at, at least
    MAX_LOST = 4,    // appeals; a daemon that is wrong all over should be told so soon
};

typedef struct doubt {
    double err;       // of the daemon
    double bound;     // so far
    double got, want; // where err is
    uint32_t elem;    // [q_heads, v_head_dim]
    bench_call call;
} doubt;

struct bench_check {
    const bench_model *model;
    uint64_t seed;
    uint32_t row_elems; // q_heads * v_head_dim
    uint32_t lost;      // appeals
    bench_ref *ref;
    bench_rope_table rope;
    double *want;  // [MAX_TOKENS, row_elems]
    double *truth; // [MAX_TOKENS, row_elems], of the tokens in doubt
    float *plain;  // [MAX_TOKENS, row_elems]
};

attnd_err bench_check_create(bench_check **out, const bench_model *m, uint64_t seed) {
    bench_check *c = calloc(1, sizeof(*c));
    if (c == NULL) {
        return ATTND_ENOMEM;
    }
    c->model = m;
    c->seed = seed;
    c->row_elems = m->q_heads * m->v_head_dim;
    c->want = calloc((uint64_t)MAX_TOKENS * c->row_elems, sizeof(*c->want));
    c->truth = calloc((uint64_t)MAX_TOKENS * c->row_elems, sizeof(*c->truth));
    c->plain = calloc((uint64_t)MAX_TOKENS * c->row_elems, sizeof(*c->plain));
    attnd_err err = bench_ref_create(&c->ref, m);
    if (err != ATTND_OK || c->want == NULL || c->truth == NULL || c->plain == NULL) {
        bench_check_free(c);
        return ATTND_ENOMEM;
    }
    *out = c;
    return ATTND_OK;
}

void bench_check_free(bench_check *c) {
    if (c != NULL) {
        bench_ref_free(c->ref);
        bench_rope_table_free(&c->rope);
        free(c->want);
        free(c->truth);
        free(c->plain);
        free(c);
    }
}

double bench_ulp(attnd_dtype dtype, double x) {
    static const int mantissa[ATTND_NUM_DTYPES] = {23, 7, 10, 3};
    static const int lowest[ATTND_NUM_DTYPES] = {-126, -126, -14, -6};
    int exponent = x != 0 ? ilogb(x) : lowest[dtype];
    exponent = exponent > lowest[dtype] ? exponent : lowest[dtype];
    return ldexp(1, exponent - mantissa[dtype]);
}

// load widens n elements of a type to float64.
static double load(const void *base, attnd_dtype dtype, uint64_t i) {
    switch (dtype) {
    case ATTND_F32:
        return (double)((const float *)base)[i];
    case ATTND_BF16:
        return (double)attnd_bf16_to_f32(((const uint16_t *)base)[i]);
    default:
        return attnd_load(base, dtype, i);
    }
}

static double size_of(const bench_check *c, const double *want) {
    double largest = 0;
    for (uint32_t i = 0; i < c->row_elems; i++) {
        largest = fmax(largest, fabs(want[i]));
    }
    return largest;
}

// judge finds the error of one row.  A NaN is an infinite error.
static doubt judge(const bench_check *c, const void *out, uint64_t row, const double *want) {
    attnd_dtype dtype = c->model->dtype;
    doubt d = {.bound = bench_ulp(dtype, size_of(c, want))};
    for (uint32_t i = 0; i < c->row_elems; i++) {
        double got = load(out, dtype, row * c->row_elems + i);
        double err = fabs(got - want[i]);
        err = isnan(err) ? INFINITY : err;
        if (err > d.err) {
            d = (doubt){.err = err, .bound = d.bound, .got = got, .want = want[i], .elem = i};
        }
    }
    return d;
}

static double plain_error(const bench_check *c, const float *plain, const double *want) {
    double worst = 0;
    for (uint32_t i = 0; i < c->row_elems; i++) {
        double err = fabs((double)plain[i] - want[i]);
        worst = err > worst ? err : worst;
    }
    return worst;
}

// measure raises *plain to the largest plain err of a block's rows, in any order, and *size to
// their largest |reference|.
static attnd_err measure(bench_check *c, const bench_block *b, double *plain, double *size) {
    attnd_err err = bench_ref_f64(c->ref, b, c->want);
    for (uint64_t t = 0; t < b->num_tokens && err == ATTND_OK; t++) {
        *size = fmax(*size, size_of(c, c->want + t * c->row_elems));
    }
    for (int order = 0; order < BENCH_NUM_ORDERS && err == ATTND_OK; order++) {
        err = bench_ref_plain(c->ref, b, (bench_order)order, c->plain);
        for (uint64_t t = 0; t < b->num_tokens && err == ATTND_OK; t++) {
            uint64_t at = t * c->row_elems;
            *plain = fmax(*plain, plain_error(c, c->plain + at, c->want + at));
        }
    }
    return err;
}

// appeal widens the bound of a row to that of its call, from the call's first row on until it
// covers err.
static attnd_err appeal(bench_check *c, bench_block b, doubt *d) {
    uint32_t positions[MAX_TOKENS];
    uint32_t end = d->call.first + d->call.num;
    uint32_t at = d->call.first;
    if (d->call.num < CALL_ROWS) {
        at = end > CALL_ROWS ? end - CALL_ROWS : 0;
    }
    uint32_t most = bench_ref_max_tokens(c->ref, end);
    most = most < MAX_TOKENS ? most : MAX_TOKENS;
    double plain = 0, size = 0;
    attnd_err err = ATTND_OK;
    while (at < end && d->err > d->bound && err == ATTND_OK) {
        b.positions = positions;
        for (b.num_tokens = 0; b.num_tokens < most && at < end; at++) {
            positions[b.num_tokens++] = at;
        }
        bench_block_init(&b);
        err = measure(c, &b, &plain, &size);
        d->bound = fmax(d->bound, 2 * plain + bench_ulp(c->model->dtype, size));
    }
    return err;
}

static void note_error(bench_verdict *v, const doubt *d) {
    if (d->err > v->max_error) {
        v->max_error = d->err;
        v->max_error_bound = d->bound;
    }
}

static void reject(const bench_check *c, bench_verdict *v, const bench_block *b, uint32_t t,
                   const doubt *d) {
    note_error(v, d);
    if (v->mismatches++ == 0) {
        snprintf(v->first, sizeof(v->first),
                 "request %" PRIu64 ", layer %" PRIu32 ", position %" PRIu32 ", head %" PRIu32
                 ", dim %" PRIu32 ": got %.9g, want %.9g, error %.3g, bound %.3g",
                 b->prompt.request, b->layer, b->positions[t], d->elem / c->model->v_head_dim,
                 d->elem % c->model->v_head_dim, d->got, d->want, d->err, d->bound);
    }
}

// settle makes plain runs of the tokens in doubt until each is covered or all orders were tried.
// positions and doubts [n] and c->truth are compacted as tokens are accepted.
static attnd_err settle(bench_check *c, bench_block b, uint32_t *positions, doubt *doubts,
                        bench_verdict *v) {
    b.positions = positions;
    v->plain_runs += b.num_tokens;
    for (int order = 0; order < BENCH_NUM_ORDERS && b.num_tokens > 0; order++) {
        bench_block_init(&b);
        attnd_err err = bench_ref_plain(c->ref, &b, (bench_order)order, c->plain);
        if (err != ATTND_OK) {
            return err;
        }
        uint32_t left = 0;
        for (uint32_t t = 0; t < b.num_tokens; t++) {
            doubt d = doubts[t];
            const double *want = c->truth + (uint64_t)t * c->row_elems;
            double plain = plain_error(c, c->plain + (uint64_t)t * c->row_elems, want);
            d.bound = fmax(d.bound, 2 * plain + bench_ulp(c->model->dtype, size_of(c, want)));
            if (d.err <= d.bound) {
                note_error(v, &d);
                continue;
            }
            memmove(c->truth + (uint64_t)left * c->row_elems, want, c->row_elems * sizeof(*want));
            positions[left] = positions[t];
            doubts[left++] = d;
        }
        b.num_tokens = left;
    }
    for (uint32_t t = 0; t < b.num_tokens; t++) {
        doubt *d = &doubts[t];
        if (c->lost < MAX_LOST) {
            attnd_err err = appeal(c, b, d);
            if (err != ATTND_OK) {
                return err;
            }
            v->appeals++;
        }
        if (d->err <= d->bound) {
            note_error(v, d);
        } else {
            c->lost++;
            reject(c, v, &b, t, d);
        }
    }
    return ATTND_OK;
}

// check_block checks the rows of a block, which are those from row on.
static attnd_err check_block(bench_check *c, const bench_block *b, const bench_rows *rows,
                             uint64_t row, bench_verdict *v) {
    uint32_t positions[MAX_TOKENS], left = 0;
    doubt doubts[MAX_TOKENS];
    attnd_err err = bench_ref_f64(c->ref, b, c->want);
    if (err != ATTND_OK) {
        return err;
    }
    v->rows += b->num_tokens;
    for (uint32_t t = 0; t < b->num_tokens; t++) {
        const double *want = c->want + (uint64_t)t * c->row_elems;
        doubt d = judge(c, rows->out, row + t, want);
        d.call = rows->calls[row + t];
        if (d.err <= d.bound) {
            note_error(v, &d);
            continue;
        }
        memcpy(c->truth + (uint64_t)left * c->row_elems, want, c->row_elems * sizeof(*want));
        positions[left] = b->positions[t];
        doubts[left++] = d;
    }
    bench_block rest = *b;
    rest.num_tokens = left;
    return left > 0 ? settle(c, rest, positions, doubts, v) : ATTND_OK;
}

attnd_err bench_check_rows(bench_check *c, const bench_rows *rows, bench_verdict *v) {
    bench_verdict sum = {0};
    uint32_t end_key = 0;
    for (uint32_t i = 0; i < rows->num_rows; i++) {
        const bench_call *call = &rows->calls[i];
        ATTND_ASSERT(rows->positions[i] - call->first < call->num);
        end_key = call->first + call->num > end_key ? call->first + call->num : end_key;
    }
    attnd_err err = bench_rope_table_grow(&c->rope, c->model, end_key);
    uint32_t step = bench_ref_max_tokens(c->ref, end_key);
    step = step < MAX_TOKENS ? step : MAX_TOKENS;
    for (uint32_t at = 0; at < rows->num_rows && err == ATTND_OK; at += step) {
        bench_block b = {
            .model = c->model,
            .rope = &c->rope,
            .seed = c->seed,
            .prompt = rows->prompt,
            .layer = rows->layer,
            .num_tokens = rows->num_rows - at < step ? rows->num_rows - at : step,
            .positions = rows->positions + at,
        };
        bench_block_init(&b);
        err = check_block(c, &b, rows, at, &sum);
    }
    if (err == ATTND_OK) {
        bench_verdict_add(v, &sum);
    }
    return err;
}

void bench_verdict_add(bench_verdict *v, const bench_verdict *other) {
    if (v->mismatches == 0 && other->mismatches > 0) {
        memcpy(v->first, other->first, sizeof(v->first));
    }
    v->rows += other->rows;
    v->mismatches += other->mismatches;
    v->plain_runs += other->plain_runs;
    v->appeals += other->appeals;
    if (other->max_error > v->max_error) {
        v->max_error = other->max_error;
        v->max_error_bound = other->max_error_bound;
    }
}
