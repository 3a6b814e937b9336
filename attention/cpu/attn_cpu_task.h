// attn_cpu_task is what the kernels of all instruction sets share: where K, V, Q and out of a task
// lie, and how a dot product becomes a logit.  Inline, so that each file compiles it with its own
// flags.  Any thread.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_TASK_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_TASK_H

#include <math.h>

#include "attention/attn_mask.h"
#include "attention/attn_plan.h"

#define ATTN_LOG2E 1.4426950408889634074
#define ATTN_LN2   0.6931471805599453094

static inline int32_t attn_group(const attn_shape *s) {
    return s->q_heads / s->kv_heads;
}

// attn_k_at and attn_v_at return the address of one key's K and V of a KV head.  Keys of one block
// follow each other at stride_k_token and stride_v_token.
static inline char *attn_k_at(const attn_params *p, const attn_row *row, int32_t head,
                              int32_t key) {
    const attn_shape *s = &p->shape;
    int64_t element = head * s->stride_k_head + key % s->block_tokens * s->stride_k_token;
    uint64_t block = row->table[key / s->block_tokens];
    return (char *)p->pool + block * s->block_stride + row->k_offset +
           element * attnd_dtype_bytes(s->kv_dtype);
}

static inline char *attn_v_at(const attn_params *p, const attn_row *row, int32_t head,
                              int32_t key) {
    const attn_shape *s = &p->shape;
    int64_t element = head * s->stride_v_head + key % s->block_tokens * s->stride_v_token;
    uint64_t block = row->table[key / s->block_tokens];
    return (char *)p->pool + block * s->block_stride + row->v_offset +
           element * attnd_dtype_bytes(s->kv_dtype);
}

// attn_run_keys returns how many of the keys [key, end) follow key inside its block, key included.
static inline int32_t attn_run_keys(const attn_shape *s, int32_t key, int32_t end) {
    int32_t left = s->block_tokens - key % s->block_tokens;
    return left < end - key ? left : end - key;
}

// attn_task_span returns the keys of the task that any of its rows sees by causal and window, first
// rounded down to a step: what a kernel walks.
static inline attn_span attn_task_span(const attn_params *p, const attn_task *t) {
    int32_t group = attn_group(&p->shape);
    attn_span span =
        attn_mask_span(&p->rows[t->row], t->q_first / group, (t->q_first + t->q_count - 1) / group);
    if (span.end > t->key_end) {
        span.end = t->key_end;
    }
    if (span.first < t->key_first) {
        span.first = t->key_first;
    }
    if (span.first >= span.end) {
        return (attn_span){t->key_first, t->key_first};
    }
    span.first -= (span.first - t->key_first) % ATTN_STEP_KEYS;
    return span;
}

// attn_logit is how a dot product of a query head becomes a logit in log2 units.  Without softcap
// and slope x = dot * factor; best kept in one FMA with "- m", since then no product is rounded.
typedef struct attn_logit {
    double factor;  // scale * k_scale, times log2(e) when softcap is 0; rounded to float32 it would
                    // be wrong by up to 6e-8, and by as much of every logit
    float softcap;  // 0 = off: x = dot * factor, else x = cap_log2 * tanh(dot * factor / softcap)
    float cap_log2; // softcap * log2(e)
    float slope;    // log2(e) * ALiBi slope: x -= slope * |i + kv_len - q_len - j|; 0 = none
} attn_logit;

static inline attn_logit attn_logit_of(const attn_params *p, const attn_row *row, int32_t q_head) {
    int32_t kv_head = q_head / attn_group(&p->shape);
    double scale = row->scale != 0 ? (double)row->scale : 1.0 / sqrt(p->shape.head_dim);
    scale *= row->k_scale ? (double)row->k_scale[kv_head] : 1.0;
    double slope = row->alibi_slopes ? (double)row->alibi_slopes[q_head] : 0.0;
    return (attn_logit){
        .factor = row->softcap > 0 ? scale : scale * ATTN_LOG2E,
        .softcap = row->softcap,
        .cap_log2 = (float)((double)row->softcap * ATTN_LOG2E),
        .slope = (float)(slope * ATTN_LOG2E),
    };
}

// attn_cpu_load_q converts the query rows of the task to float32 and rotates them: q [head_count *
// q_count, head_dim].
void attn_cpu_load_q(const attn_params *p, const attn_task *t, float *q);

// attn_cpu_rope_angles fills cos_sin [2, rotary_dim / 2]: the cosines, then the sines of a
// position, both times the attention factor.  Good to 1e-11 at every position.
void attn_cpu_rope_angles(const attn_rope *rope, int32_t position, double *cos_sin);

// attn_cpu_rope_apply rotates x [head_dim] in place, in float64, so that K is rounded once only.
void attn_cpu_rope_apply(const attn_rope *rope, const double *cos_sin, float *x);

#endif
