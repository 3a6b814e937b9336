// attn_cpu_simd_finish merges states and turns them into outputs, for the SIMD kernels' table.
// Included behind a vector header, once per instruction set.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_FINISH_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_FINISH_H

#include "attention/cpu/attn_cpu_ops.h"
#include "attention/cpu/attn_cpu_simd_math.h"

static inline float exp2_of(float x) {
    float lanes[VEC_LANES];
    vec_store(lanes, simd_exp2(vec_set1(x)));
    return lanes[0];
}

// simd_merge: see attn_cpu_ops.merge.  acc = acc * 2^(m - m') + more * 2^(from m - m').
static void simd_merge(const attn_state *into, const attn_state *from, int32_t rows,
                       int32_t v_head_dim) {
    for (int32_t r = 0; r < rows; r++) {
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
        float m = from->m[r] <= into->m[r] ? into->m[r] : from->m[r];
        float keep = exp2_of(into->m[r] - m);
        float add = exp2_of(from->m[r] - m);
        for (int32_t c = 0; c < v_head_dim; c += VEC_LANES) {
            int32_t n = v_head_dim - c < VEC_LANES ? v_head_dim - c : VEC_LANES;
            vec x = vec_mul(vec_widen(acc + c, ATTND_F32, n), vec_set1(keep));
            x = vec_fma(vec_widen(more + c, ATTND_F32, n), vec_set1(add), x);
            vec_narrow(acc + c, ATTND_F32, n, x);
        }
        into->d[r] = into->d[r] * keep + from->d[r] * add;
        into->m[r] = m;
    }
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
    int64_t to = token * row->stride_out_token + q_head * row->stride_out_head;
    int64_t element = attnd_dtype_bytes(s->q_dtype);
    char *out = (char *)row->out + to * element;
    for (int32_t c = 0; c < s->v_head_dim; c += VEC_LANES) {
        int32_t n = s->v_head_dim - c < VEC_LANES ? s->v_head_dim - c : VEC_LANES;
        vec x = vec_mul(vec_widen(acc + c, ATTND_F32, n), factor);
        vec_narrow(out + c * element, s->q_dtype, n, x);
    }
}

// simd_finish: see attn_cpu_ops.finish.
static void simd_finish(const attn_params *p, const attn_task *t, const attn_state *state) {
    int32_t group = attn_group(&p->shape);
    for (int32_t h = 0; h < t->head_count; h++) {
        for (int32_t r = 0; r < t->q_count; r++) {
            int64_t i = (int64_t)h * t->q_count + r;
            finish_row(p, &p->rows[t->row], (t->q_first + r) / group,
                       (t->head_first + h) * group + (t->q_first + r) % group,
                       state->acc + i * p->shape.v_head_dim, (double)state->m[i],
                       (double)state->d[i]);
        }
    }
}

#endif
