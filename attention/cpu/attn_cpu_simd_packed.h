// attn_cpu_simd_packed is the inner part of the SIMD prefill kernels: two matrix products a step,
// blocked for registers (a tile of VEC_TILE_ROWS x VEC_TILE_VECS accumulators) and for the first
// cache: a step's K or V, float32, is 32 KiB at head_dim 128, so all rows meet a part of its
// columns before the next part is touched.
//
//     K of the step is transposed once for all rows:  panel [head_dim, ATTN_STEP_KEYS]
//     V of the step is converted once for all rows:   [ATTN_STEP_KEYS, v_head_dim], or read in
//     place scores  = Q * panel     lanes run along keys: no sum over lanes, one broadcast of q per
//     row acc    += weights * V   lanes run along v_head_dim
//
// A file that includes this one defines SIMD_PRODUCT(a, b, sum): vec_fma, or a dot product of pairs
// of bf16, for which "column" and "key" below mean two of them.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_PACKED_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_PACKED_H

#include "attention/cpu/attn_cpu_simd_stream.h"

// Columns of q and K that all rows meet before the next ones.  So many products of a score are
// summed on their own: the rounding errors of one long sum would be those of a plain implementation
// again, and logits of 1e5 show every bit of them.
enum { SIMD_SUM_COLUMNS = 32 };

enum { SIMD_WEIGH_COLUMNS = VEC_TILE_VECS * VEC_LANES }; // the same of V

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

// weigh_columns returns how many columns of V from c on all rows meet before the next ones.
static inline int32_t weigh_columns(int32_t c, int32_t columns) {
    return columns - c < SIMD_WEIGH_COLUMNS ? SIMD_PAIR : SIMD_WEIGH_COLUMNS;
}

// widen_v converts keys [first, end) of the step to panels: the columns that weigh_columns puts
// together from c on are [ATTN_STEP_KEYS, num columns] at panels + c * ATTN_STEP_KEYS.  Columns are
// in pair order, zeros behind v_head_dim.
SIMD_INLINE void widen_v(float *panels, const simd_rows *v, int32_t first, int32_t end,
                         attnd_dtype dtype, int32_t v_head_dim) {
    const int32_t bytes = SIMD_PAIR * element_bytes(dtype);
    const int32_t columns = (v_head_dim + SIMD_PAIR - 1) / SIMD_PAIR * SIMD_PAIR;
    for (int32_t c = 0, width; c < columns; c += width) {
        width = weigh_columns(c, columns);
        for (int32_t key = first; key < end; key++) {
            const char *x = v->row[key] + v->offset + (int64_t)c * element_bytes(dtype);
            float *y = panels + c * ATTN_STEP_KEYS + key * width;
            for (int32_t i = 0; i < width; i += SIMD_PAIR, x += bytes) {
                int32_t left = v_head_dim - c - i;
                vec a, b;
                load_pair(x, dtype, left < SIMD_PAIR ? left : SIMD_PAIR, &a, &b);
                vec_store(y + i, a);
                vec_store(y + i + VEC_LANES, b);
            }
        }
    }
}

// score_tile computes num_rows x num_vecs vectors of scores over columns [c, c + n) of q and panel,
// and adds them to what is there unless c is 0: s[r] += sum over c of q[r][c] * panel[c].
SIMD_INLINE void score_tile(const simd_score *x, const float *panel, int32_t c, int32_t n,
                            int num_rows, int num_vecs) {
    vec sum[VEC_TILE_ROWS * 4];
#pragma GCC unroll 32
    for (int i = 0; i < num_rows * num_vecs; i++) {
        sum[i] = vec_zero();
    }
    const float *q = x->q + c;
    panel += c * ATTN_STEP_KEYS;
#pragma GCC unroll 2
    for (int32_t i = 0; i < n; i++) {
        vec k[4];
#pragma GCC unroll 4
        for (int v = 0; v < num_vecs; v++) {
            k[v] = vec_load(panel + i * ATTN_STEP_KEYS + v * VEC_LANES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            vec y = vec_set1(q[r * x->stride_q + i]);
#pragma GCC unroll 4
            for (int v = 0; v < num_vecs; v++) {
                sum[r * num_vecs + v] = SIMD_PRODUCT(y, k[v], sum[r * num_vecs + v]);
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < num_rows * num_vecs; i++) {
        float *to = x->s + i / num_vecs * ATTN_STEP_KEYS + i % num_vecs * VEC_LANES;
        vec_store(to, c > 0 ? vec_add(vec_load(to), sum[i]) : sum[i]);
    }
}

// weigh_tile does the product for num_rows x num_vecs vectors of acc from column c on; v is the
// panel of V of these columns.
SIMD_INLINE void weigh_tile(const simd_weigh *x, const float *v, int32_t c, int num_rows,
                            int num_vecs) {
    vec sum[VEC_TILE_ROWS * 4];
#pragma GCC unroll 32
    for (int i = 0; i < num_rows * num_vecs; i++) {
        sum[i] = vec_zero();
    }
    const float *weights = x->weights;
#pragma GCC unroll 2
    for (int32_t key = x->first; key < x->end; key++) {
        vec y[4];
#pragma GCC unroll 4
        for (int i = 0; i < num_vecs; i++) {
            y[i] = vec_load(v + (key * num_vecs + i) * VEC_LANES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            vec weight = vec_set1(weights[r * ATTN_STEP_KEYS + key]);
#pragma GCC unroll 4
            for (int i = 0; i < num_vecs; i++) {
                sum[r * num_vecs + i] = SIMD_PRODUCT(weight, y[i], sum[r * num_vecs + i]);
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < num_rows * num_vecs; i++) {
        int r = i / num_vecs;
        float *to = x->acc + r * x->stride_acc + c + i % num_vecs * VEC_LANES;
        vec_store(to, vec_fma(vec_load(to), vec_set1(x->rescale[r]), sum[i]));
    }
}

// A product's rows are cut into tiles of VEC_TILE_ROWS and of SIMD_SHORT_ROWS; rows behind the last
// one are padding.
enum { SIMD_SHORT_ROWS = 4 };

// tile_rows returns the height of the first tile of left rows.
static inline int32_t tile_rows(int32_t left) {
    bool is_short =
        left <= SIMD_SHORT_ROWS || (left > VEC_TILE_ROWS && left <= 2 * SIMD_SHORT_ROWS);
    return is_short ? SIMD_SHORT_ROWS : VEC_TILE_ROWS;
}

SIMD_INLINE void score_keys(const simd_score *x, const float *panel, int32_t c, int32_t n,
                            int32_t first, int32_t end, int num_rows) {
    const int32_t width = VEC_TILE_VECS * VEC_LANES;
    for (int32_t key = first - first % width; key < end; key += width) {
        simd_score y = {x->s + key, x->q, x->stride_q, x->terms};
        int32_t vecs = (end - key + VEC_LANES - 1) / VEC_LANES;
        if (vecs >= VEC_TILE_VECS) {
            score_tile(&y, panel + key, c, n, num_rows, VEC_TILE_VECS);
        } else if (vecs == 3) {
            score_tile(&y, panel + key, c, n, num_rows, 3);
        } else if (vecs == 2) {
            score_tile(&y, panel + key, c, n, num_rows, 2);
        } else {
            score_tile(&y, panel + key, c, n, num_rows, 1);
        }
    }
}

// packed_scores does columns [c, c + n) of the scores of a tile of num_rows (what tile_rows
// returned) for keys [first, end), rounded outwards to vectors.
static inline void packed_scores(const simd_score *x, const float *panel, int32_t c, int32_t n,
                                 int32_t first, int32_t end, int32_t num_rows) {
    if (num_rows == VEC_TILE_ROWS) {
        score_keys(x, panel, c, n, first, end, VEC_TILE_ROWS);
    } else {
        score_keys(x, panel, c, n, first, end, SIMD_SHORT_ROWS);
    }
}

// packed_weigh does the product for a tile of num_rows and the num_columns columns of acc from c on
// whose panel v is.
static inline void packed_weigh(const simd_weigh *x, const float *v, int32_t c, int32_t num_columns,
                                int32_t num_rows) {
    bool is_wide = num_columns == SIMD_WEIGH_COLUMNS;
    if (num_rows == VEC_TILE_ROWS && is_wide) {
        weigh_tile(x, v, c, VEC_TILE_ROWS, VEC_TILE_VECS);
    } else if (num_rows == VEC_TILE_ROWS) {
        weigh_tile(x, v, c, VEC_TILE_ROWS, 2);
    } else if (is_wide) {
        weigh_tile(x, v, c, SIMD_SHORT_ROWS, VEC_TILE_VECS);
    } else {
        weigh_tile(x, v, c, SIMD_SHORT_ROWS, 2);
    }
}

#endif
