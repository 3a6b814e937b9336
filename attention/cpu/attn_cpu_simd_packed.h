// attn_cpu_simd_packed is the inner part of the SIMD prefill kernels: two matrix products a step,
// blocked for registers (a tile of VEC_TILE_ROWS x VEC_TILE_VECS accumulators) and for the first
// cache (a step's K or V, float32, is 32 KiB at head_dim 128).
//
//     K of the step is transposed once for all rows:  panel [head_dim, ATTN_STEP_KEYS]
//     V of the step is converted once for all rows:   [ATTN_STEP_KEYS, v_head_dim], or read in
//     place scores  = Q * panel     lanes run along keys: no sum over lanes, one broadcast of q per
//     row acc    += weights * V   lanes run along v_head_dim
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_PACKED_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_PACKED_H

#include "attention/cpu/attn_cpu_simd_stream.h"

enum { SIMD_SUM_COLUMNS = 32 }; // products of a score that are summed one after the other

// pack_k transposes keys [0, end) of the step, rounded up to VEC_LANES, to panel [stride_q,
// ATTN_STEP_KEYS], columns in pair order, zeros behind head_dim.
SIMD_INLINE void pack_k(float *panel, const simd_rows *k, int32_t end, attnd_dtype dtype,
                        int32_t head_dim) {
    const int32_t bytes = SIMD_PAIR * element_bytes(dtype);
    for (int32_t key = 0; key < end; key += VEC_LANES) {
        int64_t at = 0;
        for (int32_t c = 0; c < head_dim; c += SIMD_PAIR, at += bytes) {
            vec a[VEC_LANES], b[VEC_LANES];
            int32_t n = head_dim - c < SIMD_PAIR ? head_dim - c : SIMD_PAIR;
#pragma GCC unroll 16
            for (int i = 0; i < VEC_LANES; i++) {
                load_pair(k->row[key + i] + k->offset + at, dtype, n, &a[i], &b[i]);
            }
            vec_transpose(a);
#pragma GCC unroll 16
            for (int i = 0; i < VEC_LANES; i++) {
                vec_store(panel + (c + i) * ATTN_STEP_KEYS + key, a[i]);
            }
            vec_transpose(b);
#pragma GCC unroll 16
            for (int i = 0; i < VEC_LANES; i++) {
                vec_store(panel + (c + VEC_LANES + i) * ATTN_STEP_KEYS + key, b[i]);
            }
        }
    }
}

// widen_v converts keys [first, end) of the step to rows of stride floats, columns in pair order,
// zeros behind v_head_dim.
SIMD_INLINE void widen_v(float *rows, int32_t stride, const simd_rows *v, int32_t first,
                         int32_t end, attnd_dtype dtype, int32_t v_head_dim) {
    const int32_t bytes = SIMD_PAIR * element_bytes(dtype);
    for (int32_t key = first; key < end; key++) {
        const char *x = v->row[key] + v->offset;
        float *y = rows + (int64_t)key * stride;
        for (int32_t c = 0; c < v_head_dim; c += SIMD_PAIR, x += bytes) {
            int32_t n = v_head_dim - c < SIMD_PAIR ? v_head_dim - c : SIMD_PAIR;
            vec a, b;
            load_pair(x, dtype, n, &a, &b);
            vec_store(y + c, a);
            vec_store(y + c + VEC_LANES, b);
        }
    }
}

// score_part computes num_rows x num_vecs vectors of scores over columns [0, columns) of q and
// panel: s[r] = sum over c of q[r][c] * panel[c], added to what s holds when adds is set.
SIMD_INLINE void score_part(float *s, const float *q, int64_t stride_q, const float *panel,
                            int32_t columns, bool adds, int num_rows, int num_vecs) {
    vec sum[VEC_TILE_ROWS * 4];
#pragma GCC unroll 32
    for (int i = 0; i < num_rows * num_vecs; i++) {
        sum[i] = vec_zero();
    }
#pragma GCC unroll 2
    for (int32_t c = 0; c < columns; c++) {
        vec k[4];
#pragma GCC unroll 4
        for (int v = 0; v < num_vecs; v++) {
            k[v] = vec_load(panel + c * ATTN_STEP_KEYS + v * VEC_LANES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            vec x = vec_set1(q[r * stride_q + c]);
#pragma GCC unroll 4
            for (int v = 0; v < num_vecs; v++) {
                sum[r * num_vecs + v] = vec_fma(x, k[v], sum[r * num_vecs + v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < num_vecs; v++) {
            float *to = s + r * ATTN_STEP_KEYS + v * VEC_LANES;
            vec x = sum[r * num_vecs + v];
            vec_store(to, adds ? vec_add(vec_load(to), x) : x);
        }
    }
}

// score_tile computes num_rows x num_vecs vectors of scores.  Each SIMD_SUM_COLUMNS products are
// summed on their own: the rounding errors of one long sum would be those of a plain implementation
// again, and logits of 1e5 show every bit of them.
SIMD_INLINE void score_tile(float *s, const float *q, int64_t stride_q, const float *panel,
                            int32_t columns, int num_rows, int num_vecs) {
    for (int32_t c = 0; c < columns; c += SIMD_SUM_COLUMNS) {
        int32_t n = columns - c < SIMD_SUM_COLUMNS ? columns - c : SIMD_SUM_COLUMNS;
        score_part(s, q + c, stride_q, panel + c * ATTN_STEP_KEYS, n, c > 0, num_rows, num_vecs);
    }
}

// weigh_tile: acc[r] = acc[r] * rescale[r] + sum over keys [first, end) of weights[r][key] *
// v[key]. The sum starts at zero and meets acc last: one rounding of the size of acc a step, not
// one a key.
SIMD_INLINE void weigh_tile(float *acc, int64_t stride_acc, const float *weights,
                            const float *rescale, const float *const *v, int64_t column,
                            int32_t first, int32_t end, int num_rows, int num_vecs) {
    vec sum[VEC_TILE_ROWS * 4];
#pragma GCC unroll 32
    for (int i = 0; i < num_rows * num_vecs; i++) {
        sum[i] = vec_zero();
    }
#pragma GCC unroll 2
    for (int32_t key = first; key < end; key++) {
        vec x[4];
#pragma GCC unroll 4
        for (int i = 0; i < num_vecs; i++) {
            x[i] = vec_load(v[key] + column + i * VEC_LANES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            vec weight = vec_set1(weights[r * ATTN_STEP_KEYS + key]);
#pragma GCC unroll 4
            for (int i = 0; i < num_vecs; i++) {
                sum[r * num_vecs + i] = vec_fma(weight, x[i], sum[r * num_vecs + i]);
            }
        }
    }
    acc += column;
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++) {
        vec scale = vec_set1(rescale[r]);
#pragma GCC unroll 4
        for (int i = 0; i < num_vecs; i++) {
            float *to = acc + r * stride_acc + i * VEC_LANES;
            vec_store(to, vec_fma(vec_load(to), scale, sum[r * num_vecs + i]));
        }
    }
}

// A product's rows are cut into tiles of VEC_TILE_ROWS and of SIMD_SHORT_ROWS; rows behind the last
// one are padding.
enum { SIMD_SHORT_ROWS = 4 };

static inline int32_t tile_rows(int32_t left) {
    bool shorter = left <= SIMD_SHORT_ROWS || (left > VEC_TILE_ROWS && left <= 2 * SIMD_SHORT_ROWS);
    return shorter ? SIMD_SHORT_ROWS : VEC_TILE_ROWS;
}

// score_rows computes scores of a tile's rows for keys [first, end), rounded outwards.
SIMD_INLINE void score_rows(float *s, const float *q, int64_t stride_q, const float *panel,
                            int32_t columns, int32_t first, int32_t end, int num_rows) {
    const int32_t width = VEC_TILE_VECS * VEC_LANES;
    for (int32_t key = first - first % width; key < end; key += width) {
        int32_t vecs = (end - key + VEC_LANES - 1) / VEC_LANES;
        if (vecs >= VEC_TILE_VECS) {
            score_tile(s + key, q, stride_q, panel + key, columns, num_rows, VEC_TILE_VECS);
        } else if (vecs == 3) {
            score_tile(s + key, q, stride_q, panel + key, columns, num_rows, 3);
        } else if (vecs == 2) {
            score_tile(s + key, q, stride_q, panel + key, columns, num_rows, 2);
        } else {
            score_tile(s + key, q, stride_q, panel + key, columns, num_rows, 1);
        }
    }
}

// weigh_rows adds the weighted V of keys [first, end) to a tile's rows of acc.
SIMD_INLINE void weigh_rows(float *acc, int64_t stride_acc, const float *weights,
                            const float *rescale, const float *const *v, int32_t columns,
                            int32_t first, int32_t end, int num_rows) {
    const int32_t width = VEC_TILE_VECS * VEC_LANES;
    int32_t column = 0;
    for (; column + width <= columns; column += width) {
        weigh_tile(acc, stride_acc, weights, rescale, v, column, first, end, num_rows,
                   VEC_TILE_VECS);
    }
    for (; column < columns; column += SIMD_PAIR) {
        weigh_tile(acc, stride_acc, weights, rescale, v, column, first, end, num_rows, 2);
    }
}

// score_tile_rows and weigh_tile_rows choose the tile: num_rows is what tile_rows returned.
static inline void score_tile_rows(float *s, const float *q, int64_t stride_q, const float *panel,
                                   int32_t columns, uint64_t seen, int32_t num_rows) {
    int32_t first = __builtin_ctzll(seen);
    int32_t end = ATTN_STEP_KEYS - __builtin_clzll(seen);
    if (num_rows == VEC_TILE_ROWS) {
        score_rows(s, q, stride_q, panel, columns, first, end, VEC_TILE_ROWS);
    } else {
        score_rows(s, q, stride_q, panel, columns, first, end, SIMD_SHORT_ROWS);
    }
}

static inline void weigh_tile_rows(float *acc, int64_t stride_acc, const float *weights,
                                   const float *rescale, const float *const *v, int32_t columns,
                                   uint64_t seen, int32_t num_rows) {
    int32_t first = __builtin_ctzll(seen);
    int32_t end = ATTN_STEP_KEYS - __builtin_clzll(seen);
    if (num_rows == VEC_TILE_ROWS) {
        weigh_rows(acc, stride_acc, weights, rescale, v, columns, first, end, VEC_TILE_ROWS);
    } else {
        weigh_rows(acc, stride_acc, weights, rescale, v, columns, first, end, SIMD_SHORT_ROWS);
    }
}

#endif
