// attn_cpu_simd_finish merges states and turns them into outputs, for the SIMD kernels' table.
// Included behind a vector header, once per instruction set.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_FINISH_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_FINISH_H

#include "attention/cpu/attn_cpu_ops.h"
#include "attention/cpu/attn_cpu_simd_math.h"
#include "attention/cpu/attn_cpu_simd_stream.h"

enum { SIMD_MERGE_AHEAD = 2048 }; // bytes; states lie one behind the other

// merge_row: acc = acc * keep + more * add.
static inline void merge_row(float *acc, const float *more, int32_t v_head_dim, vec keep, vec add) {
    int32_t c = 0;
    for (; c + VEC_LANES <= v_head_dim; c += VEC_LANES) {
        __builtin_prefetch((const char *)(more + c) + SIMD_MERGE_AHEAD, 0, 3);
        vec_store(acc + c, vec_fma(vec_load(more + c), add, vec_mul(vec_load(acc + c), keep)));
    }
    if (c < v_head_dim) {
        int32_t n = v_head_dim - c;
        vec x = vec_mul(vec_widen(acc + c, ATTND_F32, n), keep);
        x = vec_fma(vec_widen(more + c, ATTND_F32, n), add, x);
        vec_narrow(acc + c, ATTND_F32, n, x);
    }
}

// simd_merge: see attn_cpu_ops.merge.  acc = acc * 2^(m - m') + more * 2^(from m - m').
static void simd_merge(const attn_state *into, const attn_state *from, int32_t rows,
                       int32_t v_head_dim) {
    for (int32_t first = 0; first < rows; first += VEC_LANES) {
        float keep[VEC_LANES], add[VEC_LANES], most[VEC_LANES];
        int32_t n = rows - first < VEC_LANES ? rows - first : VEC_LANES;
        vec m = vec_widen(into->m + first, ATTND_F32, n);
        vec more_m = vec_widen(from->m + first, ATTND_F32, n);
        vec new_m = vec_max(more_m, m);
        vec_store(most, new_m);
        vec_store(keep, simd_exp2(vec_sub(m, new_m)));
        vec_store(add, simd_exp2(vec_sub(more_m, new_m)));
        for (int32_t i = 0; i < n; i++) {
            int32_t r = first + i;
            float *acc = into->acc + (int64_t)r * v_head_dim;
            const float *more = from->acc + (int64_t)r * v_head_dim;
            if (from->d[r] == 0) {
                continue;
            }
            if (into->d[r] == 0) {
                memcpy(acc, more, (size_t)v_head_dim * sizeof(float));
                into->m[r] = from->m[r];
                into->d[r] = from->d[r];
                continue;
            }
            merge_row(acc, more, v_head_dim, vec_set1(keep[i]), vec_set1(add[i]));
            into->d[r] = into->d[r] * keep[i] + from->d[r] * add[i];
            into->m[r] = most[i];
        }
    }
}

// out_row returns the address of one query head's output.
static inline char *out_row(const attn_params *p, const attn_row *row, int32_t token,
                            int32_t q_head) {
    int64_t at = token * row->stride_out_token + q_head * row->stride_out_head;
    return (char *)row->out + at * (int64_t)attnd_dtype_bytes(p->shape.q_dtype);
}

// finish_row: out = acc * v_scale / (d + exp2(sink - m)), lse = ln2 * (m + log2(d)).
static inline void finish_row(const attn_params *p, const attn_row *row, int32_t token,
                              int32_t q_head, const float *acc, double m, double d) {
    const attn_shape *s = &p->shape;
    int32_t kv_head = q_head / attn_group(s);
    bool is_empty = d == 0;
    if (row->lse) {
        row->lse[q_head * row->stride_lse_head + token] =
            is_empty ? -INFINITY : (float)(m * ATTN_LN2 + log(d));
    }
    if (row->sinks && !(row->flags & ATTN_PARTIAL)) {
        d += exp2((double)row->sinks[q_head] * ATTN_LOG2E - m);
    }
    double v_scale = row->v_scale ? (double)row->v_scale[kv_head] : 1.0;
    vec factor = vec_set1(is_empty ? 0 : (float)(v_scale / d));
    int64_t element = attnd_dtype_bytes(s->q_dtype);
    char *out = out_row(p, row, token, q_head);
    for (int32_t c = 0; c < s->v_head_dim; c += VEC_LANES) {
        int32_t n = s->v_head_dim - c < VEC_LANES ? s->v_head_dim - c : VEC_LANES;
        vec x = vec_mul(vec_widen(acc + c, ATTND_F32, n), factor);
        vec_narrow(out + c * element, s->q_dtype, n, x);
    }
}

enum { SIMD_OUT_AHEAD = 8 }; // query rows, of what is fetched to be written

// simd_finish: see attn_cpu_ops.finish.
static void simd_finish(const attn_params *p, const attn_task *t, const attn_state *state) {
    const attn_row *row = &p->rows[t->row];
    int32_t group = attn_group(&p->shape);
    int64_t bytes = p->shape.v_head_dim * (int64_t)attnd_dtype_bytes(p->shape.q_dtype);
    for (int32_t h = 0; h < t->head_count; h++) {
        int32_t q_head = (t->head_first + h) * group;
        for (int32_t r = t->q_first; r < t->q_first + t->q_count; r++) {
            int64_t i = (int64_t)h * t->q_count + r - t->q_first;
            int32_t next = r + SIMD_OUT_AHEAD;
            if (next < t->q_first + t->q_count) {
                const char *out = out_row(p, row, next / group, q_head + next % group);
                for (int64_t at = 0; at < bytes; at += SIMD_LINE) {
                    __builtin_prefetch(out + at, 1, 3);
                }
            }
            finish_row(p, row, r / group, q_head + r % group, state->acc + i * p->shape.v_head_dim,
                       (double)state->m[i], (double)state->d[i]);
        }
    }
}

#endif
