// attn_cpu_simd_stream is the inner part of the SIMD decode kernels, for up to 4 query rows of a KV
// head: K and V are taken from the cache as they lie, each element loaded and converted once for
// all rows.
//
//     scores:  lanes run along head_dim; VEC_DOTS sums (rows x keys) are kept in registers, then
//              added up over lanes together, which costs 3 instructions a score
//     weights: lanes run along v_head_dim; rows x columns are kept in registers over the keys of
//              the step
//
// Between the multiplications stand the prefetches of the rows that come next (of the next KV head
// of the step, or of the next step), so that they are spread evenly: in a burst they gain nothing.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_STREAM_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_STREAM_H

#include "attention/cpu/attn_cpu_step.h"

#define SIMD_INLINE static inline __attribute__((always_inline))

enum { SIMD_LINE = 64, SIMD_PAIR = 2 * VEC_LANES }; // bytes of a cache line; columns of a pair

// simd_rows is the 64 rows of K or of V of a step and KV head, and those that come next.
typedef struct simd_rows {
    const char *const *row;  // [ATTN_STEP_KEYS]
    const char *const *next; // [ATTN_STEP_KEYS], rows that will be wanted next
    int64_t offset;          // bytes, to be added to row
    int64_t next_offset;
} simd_rows;

SIMD_INLINE int32_t element_bytes(attnd_dtype dtype) {
    return dtype == ATTND_F32 ? 4 : 2;
}

// load_pair loads n columns of a pair, n being known when it is 2 VEC_LANES.
SIMD_INLINE void load_pair(const char *x, attnd_dtype dtype, int32_t n, vec *a, vec *b) {
    if (n == SIMD_PAIR) {
        vec_load_pair(x, dtype, a, b);
    } else {
        vec_load_pair_n(x, dtype, n, a, b);
    }
}

// prefetch fetches the lines of bytes [at, at + bytes) of a next row that start there.
SIMD_INLINE void prefetch(const simd_rows *rows, int32_t key, int64_t at, int32_t bytes) {
    const char *x = rows->next[key] + rows->next_offset + at;
    if (bytes >= SIMD_LINE || at % SIMD_LINE == 0) {
        for (int32_t i = 0; i < bytes; i += SIMD_LINE) {
            __builtin_prefetch(x + i, 0, 2); // into the second cache: a step outgrows the first
        }
    }
}

// dots_pair adds the products of one pair of columns, n of its 2 VEC_LANES, to the sums.
SIMD_INLINE void dots_pair(vec sum[VEC_DOTS], const float *q, int64_t stride_q, const simd_rows *k,
                           int32_t key, int64_t at, int32_t n, attnd_dtype dtype, int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    vec qa[4], qb[4];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) {
        qa[r] = vec_load(q + r * stride_q);
        qb[r] = vec_load(q + r * stride_q + VEC_LANES);
    }
#pragma GCC unroll 16
    for (int j = 0; j < num_keys; j++) {
        vec a, b;
        load_pair(k->row[key + j] + k->offset + at, dtype, n, &a, &b);
        prefetch(k, key + j, at, SIMD_PAIR * element_bytes(dtype));
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            sum[r * num_keys + j] = vec_fma(a, qa[r], sum[r * num_keys + j]);
            sum[r * num_keys + j] = vec_fma(b, qb[r], sum[r * num_keys + j]);
        }
    }
}

// dots computes the scores of num_rows query rows (1, 2 or 4) and VEC_DOTS / num_rows keys from
// key.
SIMD_INLINE void dots(float *s, const float *q, int64_t stride_q, const simd_rows *k, int32_t key,
                      attnd_dtype dtype, int32_t head_dim, int num_rows) {
    const int32_t bytes = SIMD_PAIR * element_bytes(dtype);
    vec sum[VEC_DOTS];
#pragma GCC unroll 16
    for (int i = 0; i < VEC_DOTS; i++) {
        sum[i] = vec_zero();
    }
    int32_t c = 0;
    int64_t at = 0;
    for (; c + SIMD_PAIR <= head_dim; c += SIMD_PAIR, at += bytes) {
        dots_pair(sum, q + c, stride_q, k, key, at, SIMD_PAIR, dtype, num_rows);
    }
    if (c < head_dim) {
        dots_pair(sum, q + c, stride_q, k, key, at, head_dim - c, dtype, num_rows);
    }
    vec_store_dots(sum, num_rows, s, ATTN_STEP_KEYS);
}

// stream_scores computes s [num_rows, ATTN_STEP_KEYS] for keys [first, end) of the step.
SIMD_INLINE void stream_scores(float *s, const float *q, int64_t stride_q, const simd_rows *k,
                               int32_t first, int32_t end, attnd_dtype dtype, int32_t head_dim,
                               int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    for (int32_t key = first - first % num_keys; key < end; key += num_keys) {
        dots(s + key, q, stride_q, k, key, dtype, head_dim, num_rows);
    }
}

// weigh adds weighted rows of V to num_pairs pairs of columns of acc, at bytes into a row of V. The
// sum starts at zero and meets acc last: one rounding of the size of acc a step, not one a key.
SIMD_INLINE void weigh(float *acc, int64_t stride_acc, const float *weights, const float *rescale,
                       const simd_rows *v, int32_t first, int32_t end, attnd_dtype dtype,
                       int32_t columns, int num_rows, int num_pairs, int64_t at) {
    const int32_t bytes = SIMD_PAIR * element_bytes(dtype);
    vec sum[VEC_SUM_VECS];
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * num_pairs * 2; i++) {
        sum[i] = vec_zero();
    }
    for (int32_t key = first; key < end; key++) {
        const char *x = v->row[key] + v->offset + at;
#pragma GCC unroll 8
        for (int c = 0; c < num_pairs; c++) {
            vec a, b;
            load_pair(x + c * bytes, dtype, columns, &a, &b);
            prefetch(v, key, at + c * bytes, bytes);
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                vec weight = vec_set1(weights[r * ATTN_STEP_KEYS + key]);
                int i = (r * num_pairs + c) * 2;
                sum[i] = vec_fma(weight, a, sum[i]);
                sum[i + 1] = vec_fma(weight, b, sum[i + 1]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * num_pairs * 2; i++) {
        int r = i / (num_pairs * 2), c = i % (num_pairs * 2);
        float *to = acc + r * stride_acc + c * VEC_LANES;
        vec_store(to, vec_fma(vec_load(to), vec_set1(rescale[r]), sum[i]));
    }
}

// stream_weigh: acc [num_rows, v_head_dim in pair order] = acc * rescale + weights * V over keys
// [first, end) of the step.
SIMD_INLINE void stream_weigh(float *acc, int64_t stride_acc, const float *weights,
                              const float *rescale, const simd_rows *v, int32_t first, int32_t end,
                              attnd_dtype dtype, int32_t v_head_dim, int num_rows) {
    const int wide = VEC_SUM_VECS / num_rows / 2 > 4 ? 4 : VEC_SUM_VECS / num_rows / 2; // pairs
    const int32_t bytes = SIMD_PAIR * element_bytes(dtype);
    int64_t at = 0;
    int32_t left = v_head_dim;
    for (; left >= wide * SIMD_PAIR; left -= wide * SIMD_PAIR, at += wide * bytes) {
        weigh(acc, stride_acc, weights, rescale, v, first, end, dtype, SIMD_PAIR, num_rows, wide,
              at);
        acc += wide * SIMD_PAIR;
    }
    for (; left >= SIMD_PAIR; left -= SIMD_PAIR, at += bytes) {
        weigh(acc, stride_acc, weights, rescale, v, first, end, dtype, SIMD_PAIR, num_rows, 1, at);
        acc += SIMD_PAIR;
    }
    if (left > 0) {
        weigh(acc, stride_acc, weights, rescale, v, first, end, dtype, left, num_rows, 1, at);
    }
}

#endif
