// attn_cpu_simd_stream is the inner part of the SIMD decode kernels, for up to 4 query rows of a KV
// head: K and V are taken from the cache as they lie, each element loaded and converted once for
// all rows.
//
//     scores:  lanes run along head_dim; VEC_DOTS sums (rows x keys) are kept in registers, then
//              added up over lanes together, which costs 3 instructions a score
//     weights: lanes run along v_head_dim; rows x columns are kept in registers over the keys of
//              the step
//
// F8E4M3 is widened to halves of 2^-8 its value (exact, and both types' subnormals agree) some keys
// at a time, on the stack, and then goes the way of F16: loads convert halves for free.  An
// instruction set with a cheaper way from a byte to a float names it in SIMD_F8_HEADER.
//
// Between the multiplications stand the prefetches of the rows that come next, 64 rows ahead and in
// the order of memory, so that they are spread evenly: in a burst they gain nothing.  Each line is
// asked for again some KiB later, which gains where misses are many: not of F8E4M3, where 64 rows
// are no further than that.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_STREAM_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_STREAM_H

#include "attention/cpu/attn_cpu_step.h"

#define SIMD_INLINE static inline __attribute__((always_inline))

enum {
    SIMD_LINE = 64,            // bytes of a cache line
    SIMD_AGAIN = 8 << 10,      // bytes, see fetch_line
    SIMD_PAIR = 2 * VEC_LANES, // columns of a pair
    SIMD_QUAD = 4 * VEC_LANES, // columns of F8E4M3 that are widened together
};

#define SIMD_F8_SCALE 256.0f // by which what vec_f8_to_f16 gives is too small

// simd_rows is the 64 rows of K or of V of a step and KV head.
typedef struct simd_rows {
    const char *const *row; // [ATTN_STEP_KEYS]
    int64_t offset;         // bytes, to be added to row
    int64_t stride;         // bytes from one row of a run to the next
    int32_t run;            // rows, see attn_cpu_step
    int32_t bytes;          // of a row
} simd_rows;

SIMD_INLINE int32_t element_bytes(attnd_dtype dtype) {
    return dtype == ATTND_F32 ? 4 : dtype == ATTND_F8E4M3 ? 1 : 2;
}

// load_pair loads n columns of a pair, n being known when it is 2 VEC_LANES.
SIMD_INLINE void load_pair(const char *x, attnd_dtype dtype, int32_t n, vec *a, vec *b) {
    if (n == SIMD_PAIR) {
        vec_load_pair(x, dtype, a, b);
    } else {
        vec_load_pair_n(x, dtype, n, a, b);
    }
}

// simd_ahead is a place in rows that come next: left bytes of a row are still to come from at on,
// then run_left more rows of its run, then the run of row number key.  Behind the last row it
// begins anew.  Inside a run addresses are made by adding: one that waits for a table's entry,
// which the rows drive out of the first cache, comes too late.
typedef struct simd_ahead {
    const char *at, *row;
    int64_t left;
    int32_t run_left, key;
    const simd_rows *rows;
    bool again; // see fetch_line
} simd_ahead;

SIMD_INLINE simd_ahead ahead_of(const simd_rows *rows, attnd_dtype dtype) {
    return (simd_ahead){.rows = rows, .again = dtype != ATTND_F8E4M3};
}

// fetch_line fetches one line; again says that it fetches one of some KiB before, too.
SIMD_INLINE void fetch_line(const char *x, bool again) {
    if (vec_fetches_far()) {
        __builtin_prefetch(x, 0, 2);
        return;
    }
    __builtin_prefetch(x, 0, 3);
    if (again) {
        __builtin_prefetch(x - SIMD_AGAIN, 0, 3);
    }
}

// fetch_ahead fetches the lines of the next bytes of *ahead.
SIMD_INLINE void fetch_ahead(simd_ahead *ahead, int32_t bytes) {
    if (ahead->left <= 0) {
        const simd_rows *rows = ahead->rows;
        ahead->row += rows->stride;
        if (--ahead->run_left < 0) {
            ahead->row = rows->row[ahead->key] + rows->offset;
            ahead->run_left = rows->run - 1;
            ahead->key = (ahead->key + rows->run) % ATTN_STEP_KEYS;
        }
        ahead->at = ahead->row;
        ahead->left = rows->bytes;
    }
    for (int32_t i = 0; i < bytes; i += SIMD_LINE) {
        fetch_line(ahead->at + i, ahead->again && bytes >= SIMD_LINE);
    }
    ahead->at += bytes;
    ahead->left -= bytes;
}

// simd_score is a product of query rows with K: s [rows, ATTN_STEP_KEYS] = q * K.
typedef struct simd_score {
    float *s;
    const float *q; // [rows, stride_q], pair order
    int64_t stride_q;
    int terms; // 0: q is floats, else pairs of bf16 of so many terms, see simd_form.pair
} simd_score;

// simd_weigh is a product of weights with V over keys [first, end) of a step: acc [rows,
// stride_acc] = acc * rescale + weights [rows, ATTN_STEP_KEYS] * V.  The sum over the keys starts
// at zero and meets acc last: one rounding of the size of acc a step, not one a key.
typedef struct simd_weigh {
    float *acc; // pair order
    int64_t stride_acc;
    const float *weights;
    const float *rescale; // [rows]
    int32_t first, end;
    int terms; // of bf16 that weights are rounded to; 0: they are floats
} simd_weigh;

// dots_pair adds the products of one pair of columns from c on, n of its 2 VEC_LANES, to the sums
// of num_rows rows and VEC_DOTS / num_rows keys, whose columns are at rows.  ahead may be NULL.
SIMD_INLINE void dots_pair(vec sum[VEC_DOTS], const simd_score *x, const char *const *rows,
                           simd_ahead *ahead, int32_t c, int32_t n, attnd_dtype dtype,
                           int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    const int32_t bytes = SIMD_PAIR * element_bytes(dtype);
    vec qa[4], qb[4];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) {
        qa[r] = vec_load(x->q + r * x->stride_q + c);
        qb[r] = vec_load(x->q + r * x->stride_q + c + VEC_LANES);
    }
#pragma GCC unroll 16
    for (int j = 0; j < num_keys; j++) {
        vec a, b;
        if (ahead && j * bytes % SIMD_LINE == 0) {
            fetch_ahead(ahead, bytes < SIMD_LINE ? SIMD_LINE : bytes);
        }
        load_pair(rows[j], dtype, n, &a, &b);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            sum[r * num_keys + j] = vec_fma(a, qa[r], sum[r * num_keys + j]);
            sum[r * num_keys + j] = vec_fma(b, qb[r], sum[r * num_keys + j]);
        }
    }
}

#ifdef SIMD_BF16_HEADER
#include SIMD_BF16_HEADER
#else
// dots_bf16 is for q in pairs (simd_score.terms), which only SIMD_BF16_HEADER makes of it.
SIMD_INLINE void dots_bf16(vec sum[VEC_DOTS], const simd_score *x, const simd_rows *k,
                           simd_ahead *ahead, int32_t key, int32_t head_dim, int num_rows) {
    (void)sum, (void)x, (void)k, (void)ahead, (void)key, (void)head_dim, (void)num_rows;
}
#endif

// dots_part does columns [c, c + n), up to a pair, of the keys from key on.
SIMD_INLINE void dots_part(vec sum[VEC_DOTS], const simd_score *x, const simd_rows *k,
                           simd_ahead *ahead, int32_t key, int32_t c, int32_t n, attnd_dtype dtype,
                           int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    const char *rows[VEC_DOTS];
#pragma GCC unroll 16
    for (int j = 0; j < num_keys; j++) {
        rows[j] = k->row[key + j] + k->offset + (int64_t)c * element_bytes(dtype);
    }
    dots_pair(sum, x, rows, ahead, c, n, dtype, num_rows);
}

// dot_row returns the products of one query row and one key, to be added up over lanes.
SIMD_INLINE vec dot_row(const simd_score *x, const char *row, simd_ahead *ahead, attnd_dtype dtype,
                        int32_t head_dim) {
    vec sum = vec_zero();
    for (int32_t c = 0; c < head_dim; c += SIMD_PAIR) {
        const int32_t n = head_dim - c;
        vec a, b;
        fetch_ahead(ahead, SIMD_PAIR * element_bytes(dtype));
        if (n >= SIMD_PAIR) {
            vec_load_pair(row + c * element_bytes(dtype), dtype, &a, &b);
        } else {
            vec_load_pair_n(row + c * element_bytes(dtype), dtype, n, &a, &b);
        }
        sum = vec_fma(a, vec_load(x->q + c), sum);
        sum = vec_fma(b, vec_load(x->q + c + VEC_LANES), sum);
    }
    return sum;
}

// dots computes the scores of num_rows query rows (1, 2 or 4) and VEC_DOTS / num_rows keys from
// key.
SIMD_INLINE void dots(const simd_score *x, const simd_rows *k, simd_ahead *ahead, int32_t key,
                      attnd_dtype dtype, int32_t head_dim, int num_rows) {
    vec sum[VEC_DOTS];
    const bool pairs = dtype == ATTND_BF16 && x->terms > 0;
    if (num_rows == 1 && !pairs) { // K in the order of memory
#pragma GCC unroll 16
        for (int i = 0; i < VEC_DOTS; i++) {
            sum[i] = dot_row(x, k->row[key + i] + k->offset, ahead, dtype, head_dim);
        }
        vec_store_dots(sum, num_rows, x->s + key, ATTN_STEP_KEYS);
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < VEC_DOTS; i++) {
        sum[i] = vec_zero();
    }
    int32_t c = pairs ? head_dim : 0;
    if (pairs) {
        dots_bf16(sum, x, k, ahead, key, head_dim, num_rows);
    }
    for (; c + SIMD_PAIR <= head_dim; c += SIMD_PAIR) {
        dots_part(sum, x, k, ahead, key, c, SIMD_PAIR, dtype, num_rows);
    }
    if (c < head_dim) {
        dots_part(sum, x, k, ahead, key, c, head_dim - c, dtype, num_rows);
    }
    vec_store_dots(sum, num_rows, x->s + key, ATTN_STEP_KEYS);
}

#ifdef SIMD_F8_HEADER
#include SIMD_F8_HEADER
#else
// dots_quad does n columns from c on, up to a quad of F8E4M3, of the keys from key on.
SIMD_INLINE void dots_quad(vec sum[VEC_DOTS], const simd_score *x, const simd_rows *k,
                           simd_ahead *ahead, int32_t key, int32_t c, int32_t n, int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    _Alignas(SIMD_LINE) uint16_t halves[VEC_DOTS * SIMD_QUAD];
    const char *rows[VEC_DOTS];
#pragma GCC unroll 16
    for (int j = 0; j < num_keys; j++) {
        fetch_ahead(ahead, SIMD_QUAD);
        vec_f8_to_f16(k->row[key + j] + k->offset + c, n, halves + j * SIMD_QUAD);
        rows[j] = (const char *)(halves + j * SIMD_QUAD);
    }
    dots_pair(sum, x, rows, NULL, c, SIMD_PAIR, ATTND_F16, num_rows);
#pragma GCC unroll 16
    for (int j = 0; j < num_keys; j++) {
        rows[j] += SIMD_PAIR * sizeof(uint16_t);
    }
    dots_pair(sum, x, rows, NULL, c + SIMD_PAIR, SIMD_PAIR, ATTND_F16, num_rows);
}

// scores_f8 is stream_scores for F8E4M3.
SIMD_INLINE void scores_f8(const simd_score *x, const simd_rows *k, simd_ahead *ahead,
                           int32_t first, int32_t end, int32_t head_dim, int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    for (int32_t key = first - first % num_keys; key < end; key += num_keys) {
        vec sum[VEC_DOTS];
#pragma GCC unroll 16
        for (int i = 0; i < VEC_DOTS; i++) {
            sum[i] = vec_zero();
        }
        int32_t c = 0;
        for (; c + SIMD_QUAD <= head_dim; c += SIMD_QUAD) {
            dots_quad(sum, x, k, ahead, key, c, SIMD_QUAD, num_rows);
        }
        if (c < head_dim) {
            dots_quad(sum, x, k, ahead, key, c, head_dim - c, num_rows);
        }
        vec_store_dots(sum, num_rows, x->s + key, ATTN_STEP_KEYS);
    }
}
#endif

// stream_scores computes the scores of num_rows query rows and keys [first, end) of the step, and
// fetches next.
SIMD_INLINE void stream_scores(const simd_score *x, const simd_rows *k, const simd_rows *next,
                               int32_t first, int32_t end, attnd_dtype dtype, int32_t head_dim,
                               int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    simd_ahead ahead = ahead_of(next, dtype);
    if (dtype == ATTND_F8E4M3) {
        scores_f8(x, k, &ahead, first, end, head_dim, num_rows);
        return;
    }
    for (int32_t key = first - first % num_keys; key < end; key += num_keys) {
        dots(x, k, &ahead, key, dtype, head_dim, num_rows);
    }
}

// weigh works on num_pairs pairs of columns from column c on, of which the last has columns
// columns; of F8E4M3 on pairs of the quad at c, which has columns columns, from pair pair_first on.
SIMD_INLINE void weigh(const simd_weigh *x, const simd_rows *v, simd_ahead *rest, int32_t c,
                       int32_t columns, attnd_dtype dtype, int num_rows, int num_pairs,
                       int pair_first) {
    const bool is_f8 = dtype == ATTND_F8E4M3;
    const int num_vecs = num_pairs * 2;
    const int32_t bytes = SIMD_PAIR * (is_f8 ? 2 : element_bytes(dtype));
    const int64_t at = (int64_t)c * element_bytes(dtype);
    _Alignas(SIMD_LINE) uint16_t halves[SIMD_QUAD];
    vec sum[VEC_SUM_VECS];
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * num_vecs; i++) {
        sum[i] = vec_zero();
    }
    const bool is_whole = columns == (is_f8 ? SIMD_QUAD : SIMD_PAIR);
    simd_ahead ahead = *rest; // stays in registers
    for (int32_t key = x->first; key < x->end; key++) {
        const char *row = v->row[key] + v->offset + at;
        if (is_whole && is_f8) {
            fetch_ahead(&ahead, num_pairs * SIMD_PAIR);
        }
        if (is_f8) {
            vec_f8_to_f16(row, columns, halves);
            row = (const char *)(halves + pair_first * SIMD_PAIR);
        }
#pragma GCC unroll 8
        for (int i = 0; i < num_pairs; i++) {
            vec a, b;
            if (is_whole && !is_f8) {
                fetch_ahead(&ahead, bytes);
            }
            load_pair(row + i * bytes, is_f8 ? ATTND_F16 : dtype, is_f8 ? SIMD_PAIR : columns, &a,
                      &b);
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                vec weight = vec_set1(x->weights[r * ATTN_STEP_KEYS + key]);
                vec *to = &sum[r * num_vecs + i * 2];
                to[0] = vec_fma(weight, a, to[0]);
                to[1] = vec_fma(weight, b, to[1]);
            }
        }
    }
    *rest = ahead;
    c += pair_first * SIMD_PAIR;
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * num_vecs; i++) {
        int r = i / num_vecs;
        float *to = x->acc + r * x->stride_acc + c + i % num_vecs * VEC_LANES;
        vec_store(to, vec_fma(vec_load(to), vec_set1(x->rescale[r]), sum[i]));
    }
}

#ifndef SIMD_F8_HEADER
// weigh_quad does a quad of F8E4M3, in two passes where registers are few.
SIMD_INLINE void weigh_quad(const simd_weigh *x, const simd_rows *v, simd_ahead *ahead, int32_t c,
                            int32_t columns, int num_rows) {
    if (num_rows * 4 <= VEC_SUM_VECS) {
        weigh(x, v, ahead, c, columns, ATTND_F8E4M3, num_rows, 2, 0);
    } else {
        weigh(x, v, ahead, c, columns, ATTND_F8E4M3, num_rows, 1, 0);
        weigh(x, v, ahead, c, columns, ATTND_F8E4M3, num_rows, 1, 1);
    }
}

// weigh_f8 is stream_weigh for F8E4M3.
SIMD_INLINE void weigh_f8(const simd_weigh *x, const simd_rows *v, simd_ahead *ahead,
                          int32_t v_head_dim, int num_rows) {
    int32_t c = 0;
    for (; c + SIMD_QUAD <= v_head_dim; c += SIMD_QUAD) {
        weigh_quad(x, v, ahead, c, SIMD_QUAD, num_rows);
    }
    if (c < v_head_dim) {
        weigh_quad(x, v, ahead, c, v_head_dim - c, num_rows);
    }
}
#endif

// stream_weigh does the product for num_rows rows and all columns, and fetches next.
SIMD_INLINE void stream_weigh(const simd_weigh *x, const simd_rows *v, const simd_rows *next,
                              attnd_dtype dtype, int32_t v_head_dim, int num_rows) {
    const int most = VEC_SUM_VECS / num_rows / 2;
    const int wide = most > 4 ? 4 : most; // pairs
    simd_ahead ahead = ahead_of(next, dtype);
    int32_t c = 0;
    if (dtype == ATTND_F8E4M3) {
        weigh_f8(x, v, &ahead, v_head_dim, num_rows);
        return;
    }
    for (; c + wide * SIMD_PAIR <= v_head_dim; c += wide * SIMD_PAIR) {
        weigh(x, v, &ahead, c, SIMD_PAIR, dtype, num_rows, wide, 0);
    }
    for (; c + SIMD_PAIR <= v_head_dim; c += SIMD_PAIR) {
        weigh(x, v, &ahead, c, SIMD_PAIR, dtype, num_rows, 1, 0);
    }
    if (c < v_head_dim) {
        weigh(x, v, &ahead, c, v_head_dim - c, dtype, num_rows, 1, 0);
    }
}

#endif
