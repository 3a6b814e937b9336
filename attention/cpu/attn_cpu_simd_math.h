// attn_cpu_simd_math is the softmax of the SIMD kernels: exp2, tanh, and one step of the online
// softmax on a tile of scores.  Included behind a vector header (attn_cpu_vec_*.h), once per
// instruction set.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_MATH_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_MATH_H

#include <float.h>
#include <math.h>
#include <stdbool.h>

#include "attention/cpu/attn_cpu_simd_stream.h"
#include "attention/cpu/attn_cpu_step.h"
#include "attention/cpu/attn_cpu_task.h"

#define SIMD_EACH(i, num) _Pragma("GCC unroll 4") for (int i = 0; i < (num); i++)

// exp2_parts turns each of num vectors f into 2^(n + f) for |f| <= 1/2: 2^n * p(f), p(f) = 1 + f *
// (c1 + ...), minimax for the relative error with p(0) = 1; 2.0e-9 before rounding.  Vectors take
// turns: a chain of its own for each would fill the core's queue with what cannot start yet.
SIMD_INLINE void exp2_parts(vec *f, const vec *n, int num) {
    static const float factors[] = {1.339887385e-3f, 9.618436918e-3f, 5.550332367e-2f,
                                    2.402264774e-1f, 6.931471825e-1f, 1.0f};
    vec p[4];
    SIMD_EACH(i, num) {
        p[i] = vec_set1(1.535336195e-4f);
    }
#pragma GCC unroll 6
    for (int k = 0; k < 6; k++) {
        SIMD_EACH(i, num) {
            p[i] = vec_fma(p[i], f[i], vec_set1(factors[k]));
        }
    }
    SIMD_EACH(i, num) {
        f[i] = vec_scale2(p[i], n[i]);
    }
}

// simd_exp2 returns 2^x for x <= 127, exactly 1 for 0, exactly 0 for -inf, NaN for NaN.
static inline vec simd_exp2(vec x) {
    x = vec_max(vec_set1(-200.0f), x);
    vec n = vec_round(x);
    vec f = vec_sub(x, n);
    exp2_parts(&f, &n, 1);
    return f;
}

// simd_exp2_less turns each of num <= 4 vectors s into 2^(s * c - m) like simd_exp2, for an
// integral m.  m + n is exact then, so what the polynomial gets is rounded once, at the size of 1/2
// and not of s * c - m.
SIMD_INLINE void simd_exp2_less(vec *s, int num, vec c, vec m) {
    vec n[4];
    SIMD_EACH(i, num) {
        n[i] = vec_fma(s[i], c, vec_sub(vec_zero(), m));
        n[i] = vec_round(vec_max(vec_set1(-200.0f), n[i]));
    }
    SIMD_EACH(i, num) {
        s[i] = vec_fma(s[i], c, vec_sub(vec_zero(), vec_add(m, n[i])));
        s[i] = vec_max(vec_set1(-1.0f), s[i]); // below -1 the result is 0 by n
    }
    exp2_parts(s, n, num);
}

// simd_tanh returns tanh(y) with a relative error of some ulp, near 0 too, where softcap lives for
// small logits: tanh |y| = e / (e + 2), e = exp(2 |y|) - 1 = 2^n * (exp(r) - 1) + (2^n - 1).
static inline vec simd_tanh(vec y) {
    vec z = vec_min(vec_set1(20.0f), vec_mul(vec_abs(y), vec_set1(2.0f)));
    vec n = vec_round(vec_mul(z, vec_set1((float)ATTN_LOG2E)));
    vec r = vec_fma(n, vec_set1(-6.93145752e-1f), z); // ln 2 = 0.693145752 + 1.42860677e-6
    r = vec_fma(n, vec_set1(-1.42860677e-6f), r);
    vec q = vec_set1(1.0f / 5040);
    q = vec_fma(q, r, vec_set1(1.0f / 720));
    q = vec_fma(q, r, vec_set1(1.0f / 120));
    q = vec_fma(q, r, vec_set1(1.0f / 24));
    q = vec_fma(q, r, vec_set1(1.0f / 6));
    q = vec_fma(q, r, vec_set1(0.5f));
    vec expm1_r = vec_fma(vec_mul(r, r), q, r);
    vec power = vec_scale2(vec_set1(1.0f), n);
    vec e = vec_fma(power, expm1_r, vec_sub(power, vec_set1(1.0f)));
    vec e2 = vec_add(e, vec_set1(2.0f));
    vec small = vec_div(e, e2);
    vec large = vec_sub(vec_set1(1.0f), vec_div(vec_set1(2.0f), e2)); // errors of e fade
    return vec_copysign(vec_if_less(small, vec_set1(0.5f), small, large), y);
}

// simd_logits says how dot products of the rows of one KV head become logits x.  What is stored as
// a score is x / factor, so that the last product is made inside exp2's argument and is not
// rounded:
//     plain             the dot product itself           factor = scale
//     softcap           tanh(dot * scale / cap)          factor = cap
//     slopes, or both   x                                factor = 1
typedef struct simd_logits {
    float factor;
    bool plain;             // nothing to be done to the dot products
    float scale, scale_low; // dot * (scale + scale_low): argument of tanh, or x without slope
    float cap;              // in log2 units, 0 = off
    const float *slopes;    // [rows], in log2 units, or NULL
    const float *places;    // [rows]: i + kv_len - q_len of each row, for slopes
} simd_logits;

// simd_logits_set fills *l for one KV head; more is multiplied into the scale.  slopes and places
// are the rows' and are used when the row has ALiBi slopes.
static inline void simd_logits_set(simd_logits *l, const attn_row *row, const attn_logit *logit,
                                   float more, const float *slopes, const float *places) {
    bool is_capped = row->softcap > 0;
    double scale = (double)logit->factor * (double)more;
    scale /= is_capped ? (double)row->softcap : 1.0;
    l->scale = (float)scale;
    l->scale_low = (float)(scale - (double)l->scale);
    l->cap = is_capped ? logit->cap_log2 : 0;
    l->slopes = row->alibi_slopes ? slopes : NULL;
    l->places = places;
    l->plain = !is_capped && !l->slopes && l->scale > 0;
    l->factor = l->plain ? l->scale : is_capped && !l->slopes ? l->cap : 1.0f;
}

// bend turns the dot products of one row and step into scores in place, unless they are scores.
static inline void bend(const simd_logits *l, int32_t row, float *s, int32_t num_vecs,
                        int32_t key) {
    vec scale = vec_set1(l->scale);
    vec scale_low = vec_set1(l->scale_low);
    for (int32_t v = 0; v < num_vecs; v++) {
        vec dot = vec_load(s + v * VEC_LANES);
        vec factor = vec_set1(1.0f);
        vec x = vec_fma(dot, scale, vec_mul(dot, scale_low));
        if (l->cap > 0) {
            x = simd_tanh(x);
            factor = vec_set1(l->cap);
        }
        if (l->slopes) {
            float away = l->places[row] - (float)(key + v * VEC_LANES);
            vec distance = vec_abs(vec_sub(vec_set1(away), vec_iota()));
            x = vec_fma(x, factor, vec_mul(vec_set1(-l->slopes[row]), distance));
        }
        vec_store(s + v * VEC_LANES, x);
    }
}

// simd_tile is a tile of scores [rows, ATTN_STEP_KEYS] and the running state of its rows.
typedef struct simd_tile {
    float *s;                 // in: dot products; out: exp2(x - m)
    float *m;                 // [rows], updated
    float *d;                 // [rows, VEC_LANES], updated: the sums of the lanes
    float *rescale;           // out: exp2(m before - m after), by which acc is to be multiplied
    const uint64_t *row_bits; // [rows], NULL = each row sees all keys
    int32_t rows, row_first;  // rows of the tile; row_first indexes logits' arrays
    int32_t key_first;
} simd_tile;

enum { SIMD_TILE_ROWS = 60 }; // rows that are worked on together, a multiple of VEC_TILE_ROWS

// row_max applies logits and mask to one row of scores and returns the largest of each lane.
static inline vec row_max(const simd_tile *t, const simd_logits *l, int32_t r) {
    float *s = t->s + r * ATTN_STEP_KEYS;
    uint64_t bits = t->row_bits ? t->row_bits[r] : ~0ull;
    vec hidden = vec_set1(-INFINITY);
    vec most = hidden;
    if (bits == 0) {
        return hidden;
    }
    int32_t num_vecs = (ATTN_STEP_KEYS - __builtin_clzll(bits) + VEC_LANES - 1) / VEC_LANES;
    if (!l->plain) {
        bend(l, t->row_first + r, s, num_vecs, t->key_first);
    }
    if (bits == ~0ull) {
        for (int32_t v = 0; v < ATTN_STEP_KEYS / VEC_LANES; v++) {
            most = vec_max(most, vec_load(s + v * VEC_LANES));
        }
        return most;
    }
    for (int32_t v = 0; v < num_vecs; v++) {
        vec x =
            vec_select((uint32_t)(bits >> (v * VEC_LANES)), vec_load(s + v * VEC_LANES), hidden);
        vec_store(s + v * VEC_LANES, x);
        most = vec_max(most, x);
    }
    return most;
}

// rows_max returns the largest score of row r + i, of the VEC_LANES from r on, in lane i.
static inline vec rows_max(const simd_tile *t, const simd_logits *l, int32_t r) {
    int32_t num = t->rows - r;
    vec x[VEC_LANES];
    if (num <= VEC_LANES / 4) {
        float most[VEC_LANES];
        vec_store(most, vec_set1(-INFINITY));
        for (int32_t i = 0; i < num; i++) {
            most[i] = vec_hmax(row_max(t, l, r + i));
        }
        return vec_load(most);
    }
    for (int32_t i = 0; i < VEC_LANES; i++) {
        x[i] = i < num ? row_max(t, l, r + i) : vec_set1(-INFINITY);
    }
    vec_transpose(x);
    for (int32_t half = VEC_LANES / 2; half > 0; half /= 2) {
        for (int32_t i = 0; i < half; i++) {
            x[i] = vec_max(x[i], x[i + half]);
        }
    }
    return x[0];
}

// some_exp2 turns num <= 4 vectors of scores into exp2(s * c - m) and returns their sum.
SIMD_INLINE vec some_exp2(float *s, int num, vec c, vec m) {
    vec e[4];
    SIMD_EACH(i, num) {
        e[i] = vec_load(s + i * VEC_LANES);
    }
    simd_exp2_less(e, num, c, m);
    vec sum = e[0];
    SIMD_EACH(i, num) {
        vec_store(s + i * VEC_LANES, e[i]);
        sum = i > 0 ? vec_add(sum, e[i]) : sum;
    }
    return sum;
}

// row_exp2 turns one row of scores into exp2(s * factor - m), zeros where nothing was computed, and
// returns the sum of each lane.
static inline vec row_exp2(const simd_tile *t, int32_t r, float factor, float m) {
    float *s = t->s + r * ATTN_STEP_KEYS;
    uint64_t bits = t->row_bits ? t->row_bits[r] : ~0ull;
    int32_t num_vecs = 0;
    if (bits) {
        num_vecs = (ATTN_STEP_KEYS - __builtin_clzll(bits) + VEC_LANES - 1) / VEC_LANES;
    }
    vec c = vec_set1(factor);
    vec shift = vec_set1(m);
    vec sum = vec_zero();
    int32_t v = 0;
    for (; v + 4 <= num_vecs; v += 4) {
        sum = vec_add(sum, some_exp2(s + v * VEC_LANES, 4, c, shift));
    }
    for (; v < num_vecs; v++) {
        sum = vec_add(sum, some_exp2(s + v * VEC_LANES, 1, c, shift));
    }
    for (; v < ATTN_STEP_KEYS / VEC_LANES; v++) {
        vec_store(s + v * VEC_LANES, vec_zero());
    }
    return sum;
}

// simd_softmax_step is one step of the online softmax: m' = max(m, round(max x)), d' = d * exp2(m -
// m') + sum exp2(x - m').  m being integral, all that is rescaled is multiplied by powers of two,
// which rounds nothing.  A row that has seen nothing keeps m = -inf.
static inline void simd_softmax_step(const simd_tile *t, const simd_logits *l) {
    float shift[SIMD_TILE_ROWS + VEC_LANES];
    float factor = l->factor;
    for (int32_t r = 0; r < t->rows; r += VEC_LANES) {
        vec before = vec_load(t->m + r);
        vec most = vec_mul(rows_max(t, l, r), vec_set1(factor));
        vec after = vec_max(before, vec_round(most));
        vec subtract = vec_max(vec_set1(-FLT_MAX), after); // not -inf: -inf - -inf is NaN
        vec_store(t->m + r, after);
        vec_store(shift + r, subtract);
        vec_store(t->rescale + r, simd_exp2(vec_sub(before, subtract)));
    }
    for (int32_t r = 0; r < t->rows; r++) {
        float *d = t->d + r * VEC_LANES;
        vec sum = row_exp2(t, r, factor, shift[r]);
        vec_store(d, vec_fma(vec_load(d), vec_set1(t->rescale[r]), sum));
    }
}

#endif
