// The portable kernels: plain C, one attend function for decode and prefill and all storage types.
// They are right on every machine and what the vector kernels are compared with.
//
// A step of ATTN_STEP_KEYS keys of one KV head is converted to float32 once, then used by all query
// rows of the task: scores, online softmax, weighted sum.  Logits are float64 and are rounded only
// after "- m", so that those of 1e5 lose nothing.
#include <math.h>
#include <string.h>

#include "attention/cpu/attn_cpu_convert.h"
#include "attention/cpu/attn_cpu_ops.h"
#include "attention/cpu/attn_cpu_task.h"

enum {
    DECODE_ROWS = 64,
    PREFILL_ROWS = 128,
    LANES = 8, // partial sums of a dot product; head dims are multiples of it
};

// step is one step of keys of one KV head.
typedef struct step {
    int32_t key, count;
    uint64_t seen; // keys behind the first that a row sees, less what the block mask hides
    float *k, *v;  // [ATTN_STEP_KEYS, head_dim] and [ATTN_STEP_KEYS, v_head_dim]
} step;

// exp2_of is 2^x to a float32 ulp for x <= 127, exactly 1 at 0; NaN stays NaN.
// x = n + f, |f| <= 1/2; the polynomial is a minimax fit of (2^f - 1) / f, relative error 2e-9.
static inline float exp2_of(float x) {
    float clamped = x < -126.0f ? -126.0f : x;
    float shifted = clamped + 0x1.8p23f;
    float f = clamped - (shifted - 0x1.8p23f);
    float y = 0.00015353360504377633f;
    y = y * f + 0.0013398875016719103f;
    y = y * f + 0.00961843691766262f;
    y = y * f + 0.055503323674201965f;
    y = y * f + 0.24022647738456726f;
    y = y * f + 0.6931471824645996f;
    y = y * f + 1.0f;
    uint32_t power = (attn_bits_of(shifted) << 23) + attn_bits_of(1.0f);
    return x < -126.0f ? 0.0f : y * attn_float_of(power);
}

// dot is in float64, which the product of two float32 numbers fits: what a logit of 100 loses, its
// weight loses a hundredfold.
static double dot(const float *a, const float *b, int32_t dim) {
    double part[LANES] = {0};
    for (int32_t d = 0; d < dim; d += LANES) {
        for (int32_t i = 0; i < LANES; i++) {
            part[i] += (double)a[d + i] * (double)b[d + i];
        }
    }
    return ((part[0] + part[4]) + (part[2] + part[6])) +
           ((part[1] + part[5]) + (part[3] + part[7]));
}

// load_step converts the keys of the step that are seen.  Of a block that shows none not even the
// table entry is looked at.
static void load_step(const attn_params *p, const attn_row *row, int32_t head, const step *st) {
    const attn_shape *s = &p->shape;
    uint32_t bytes = attnd_dtype_bytes(s->kv_dtype);
    for (int32_t i = 0; i < st->count;) {
        int32_t run = attn_run_keys(s, st->key + i, st->key + st->count);
        bool is_seen = (st->seen >> i & attn_bits_below(run)) != 0;
        const char *k = is_seen ? attn_k_at(p, row, head, st->key + i) : NULL;
        const char *v = is_seen ? attn_v_at(p, row, head, st->key + i) : NULL;
        for (int32_t j = 0; j < run && is_seen; j++) {
            attn_to_f32(st->k + (int64_t)(i + j) * s->head_dim, k + j * s->stride_k_token * bytes,
                        s->kv_dtype, s->head_dim);
            attn_to_f32(st->v + (int64_t)(i + j) * s->v_head_dim, v + j * s->stride_v_token * bytes,
                        s->kv_dtype, s->v_head_dim);
        }
        i += run;
    }
}

// logit_of returns x of a dot product with the key at that distance from the diagonal.
static inline double logit_of(const attn_logit *l, double score, int64_t distance) {
    double x = score * l->factor;
    if (l->softcap > 0) {
        x = (double)l->cap_log2 * tanh(x / (double)l->softcap);
    }
    if (l->slope != 0) {
        x -= (double)l->slope * (double)(distance < 0 ? -distance : distance);
    }
    return x;
}

// row_state is where the state of one query row lies.
typedef struct row_state {
    float *acc, *m, *d;
} row_state;

// add_step brings the keys of a step that bits names into the state of one query row.  Their
// weighted sum starts at zero and meets acc last: one rounding of the size of acc a step, not one a
// key, which a row whose weight lies on few of many keys would show.
static void add_step(const row_state *state, const attn_shape *s, const float *q,
                     const attn_logit *logit, const step *st, uint64_t bits, int64_t diagonal) {
    double x[ATTN_STEP_KEYS];
    float m = *state->m;
    for (uint64_t left = bits; left; left &= left - 1) {
        int32_t j = __builtin_ctzll(left);
        x[j] = logit_of(logit, dot(q, st->k + (int64_t)j * s->head_dim, s->head_dim),
                        diagonal - st->key - j);
        m = (float)x[j] <= m ? m : (float)x[j]; // a NaN gets in
    }
    if (m == -INFINITY) {
        return; // nothing but logits of -inf
    }
    float sum = 0;
    float weighted[ATTN_MAX_HEAD_DIM];
    memset(weighted, 0, (size_t)s->v_head_dim * sizeof(*weighted));
    for (uint64_t left = bits; left; left &= left - 1) {
        int32_t j = __builtin_ctzll(left);
        float weight = exp2_of((float)(x[j] - (double)m));
        const float *v = st->v + (int64_t)j * s->v_head_dim;
        sum += weight;
        for (int32_t d = 0; d < s->v_head_dim; d++) {
            weighted[d] += weight * v[d];
        }
    }
    float rescale = exp2_of(*state->m - m);
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        state->acc[d] = state->acc[d] * rescale + weighted[d];
    }
    *state->d = *state->d * rescale + sum;
    *state->m = m;
}

// add_head brings a step into all rows of KV head index h of the task.
static void add_head(const attn_params *p, const attn_task *t, const attn_state *out,
                     const float *q, const step *st, int32_t h) {
    const attn_shape *s = &p->shape;
    const attn_row *row = &p->rows[t->row];
    int32_t group = attn_group(s);
    for (int32_t r = 0; r < t->q_count; r++) {
        int32_t token = (t->q_first + r) / group;
        int32_t q_head = (t->head_first + h) * group + (t->q_first + r) % group;
        uint64_t bits = attn_mask_bits(row, token, st->key, st->count) & st->seen;
        if (bits) {
            int64_t i = (int64_t)h * t->q_count + r;
            row_state state = {out->acc + i * s->v_head_dim, out->m + i, out->d + i};
            attn_logit logit = attn_logit_of(p, row, q_head);
            add_step(&state, s, q + i * s->head_dim, &logit, st, bits,
                     (int64_t)row->kv_len - row->q_len + token);
        }
    }
}

static void attend(const attn_params *p, const attn_task *t, const attn_state *out, void *scratch) {
    const attn_shape *s = &p->shape;
    const attn_row *row = &p->rows[t->row];
    int32_t rows = t->head_count * t->q_count;
    float *q = scratch;
    step st = {.k = q + (int64_t)rows * s->head_dim};
    st.v = st.k + (int64_t)ATTN_STEP_KEYS * s->head_dim;
    for (int32_t i = 0; i < rows; i++) {
        out->m[i] = -INFINITY;
        out->d[i] = 0;
    }
    memset(out->acc, 0, (size_t)rows * (size_t)s->v_head_dim * sizeof(float));
    attn_span span = attn_task_span(p, t);
    if (span.first < span.end) {
        attn_cpu_load_q(p, t, q);
    }
    int32_t first =
        attn_mask_span(row, t->q_first / attn_group(s), t->q_first / attn_group(s)).first;
    for (st.key = span.first; st.key < span.end; st.key += ATTN_STEP_KEYS) {
        st.count = span.end - st.key < ATTN_STEP_KEYS ? span.end - st.key : ATTN_STEP_KEYS;
        st.seen = attn_mask_block_bits(row, s->block_tokens, t->q_first / attn_group(s), st.key,
                                       st.count);
        st.seen &= ~attn_bits_below(first > st.key ? first - st.key : 0);
        for (int32_t h = 0; h < t->head_count && st.seen; h++) {
            load_step(p, row, t->head_first + h, &st);
            add_head(p, t, out, q, &st, h);
        }
    }
}

// count_saturated counts what f8e4m3 cannot hold.
static uint64_t count_saturated(const attn_shape *s, const float *x, int32_t num) {
    uint64_t count = 0;
    for (int32_t i = 0; i < num && s->kv_dtype == ATTND_F8E4M3; i++) {
        count += fabsf(x[i]) > 448.0f;
    }
    return count;
}

static void divide(float *x, int32_t num, const float *scale, int32_t head) {
    for (int32_t i = 0; i < num && scale; i++) {
        x[i] /= scale[head];
    }
}

static uint64_t append_token(const attn_params *p, const attn_row *row, int32_t token) {
    const attn_shape *s = &p->shape;
    uint32_t bytes = attnd_dtype_bytes(s->q_dtype);
    int32_t key = row->kv_len - row->new_len + token;
    uint64_t saturated = 0;
    double cos_sin[ATTN_MAX_HEAD_DIM];
    float x[ATTN_MAX_HEAD_DIM];
    if (row->rope) {
        attn_cpu_rope_angles(row->rope, row->k_positions ? row->k_positions[token] : key, cos_sin);
    }
    for (int32_t head = 0; head < s->kv_heads; head++) {
        int64_t from = token * row->stride_k_new_token + head * row->stride_k_new_head;
        attn_to_f32(x, (const char *)row->k_new + from * bytes, s->q_dtype, s->head_dim);
        if (row->rope) {
            attn_cpu_rope_apply(row->rope, cos_sin, x);
        }
        divide(x, s->head_dim, row->k_scale, head);
        saturated += count_saturated(s, x, s->head_dim);
        attn_from_f32(attn_k_at(p, row, head, key), x, s->kv_dtype, s->head_dim);

        from = token * row->stride_v_new_token + head * row->stride_v_new_head;
        attn_to_f32(x, (const char *)row->v_new + from * bytes, s->q_dtype, s->v_head_dim);
        divide(x, s->v_head_dim, row->v_scale, head);
        saturated += count_saturated(s, x, s->v_head_dim);
        attn_from_f32(attn_v_at(p, row, head, key), x, s->kv_dtype, s->v_head_dim);
    }
    return saturated;
}

static uint64_t append(const attn_params *p, const attn_append_task *t, void *scratch) {
    (void)scratch;
    uint64_t saturated = 0;
    for (int32_t token = t->token_first; token < t->token_first + t->token_count; token++) {
        saturated += append_token(p, &p->rows[t->row], token);
    }
    return saturated;
}

static void merge(const attn_state *into, const attn_state *from, int32_t rows,
                  int32_t v_head_dim) {
    for (int32_t i = 0; i < rows; i++) {
        float *acc = into->acc + (int64_t)i * v_head_dim;
        const float *more = from->acc + (int64_t)i * v_head_dim;
        if (from->d[i] == 0) {
            continue;
        }
        if (into->d[i] == 0) {
            memcpy(acc, more, (size_t)v_head_dim * sizeof(float));
            into->m[i] = from->m[i];
            into->d[i] = from->d[i];
            continue;
        }
        float m = from->m[i] <= into->m[i] ? into->m[i] : from->m[i];
        float keep = exp2_of(into->m[i] - m);
        float add = exp2_of(from->m[i] - m);
        for (int32_t d = 0; d < v_head_dim; d++) {
            acc[d] = acc[d] * keep + more[d] * add;
        }
        into->d[i] = into->d[i] * keep + from->d[i] * add;
        into->m[i] = m;
    }
}

// finish_row: out = acc * v_scale / (d + exp2(sink - m)), lse = ln2 * (m + log2(d)).
static void finish_row(const attn_params *p, const attn_row *row, int32_t token, int32_t q_head,
                       const row_state *state) {
    const attn_shape *s = &p->shape;
    int32_t kv_head = q_head / attn_group(s);
    double m = (double)*state->m;
    double denominator = (double)*state->d;
    bool is_empty = denominator == 0;
    if (row->lse) {
        row->lse[q_head * row->stride_lse_head + token] =
            is_empty ? -INFINITY : (float)(m * ATTN_LN2 + log(denominator));
    }
    if (row->sinks && !(row->flags & ATTN_PARTIAL)) {
        denominator += exp2((double)row->sinks[q_head] * ATTN_LOG2E - m);
    }
    float v_scale = row->v_scale ? row->v_scale[kv_head] : 1.0f;
    double factor = is_empty ? 0 : (double)v_scale / denominator;
    float x[ATTN_MAX_HEAD_DIM];
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        x[d] = (float)((double)state->acc[d] * factor); // so one key alone comes out within an ulp
    }
    int64_t to = token * row->stride_out_token + q_head * row->stride_out_head;
    attn_from_f32((char *)row->out + to * attnd_dtype_bytes(s->q_dtype), x, s->q_dtype,
                  s->v_head_dim);
}

static void finish(const attn_params *p, const attn_task *t, const attn_state *state) {
    int32_t group = attn_group(&p->shape);
    for (int32_t h = 0; h < t->head_count; h++) {
        for (int32_t r = 0; r < t->q_count; r++) {
            int64_t i = (int64_t)h * t->q_count + r;
            row_state one = {state->acc + i * p->shape.v_head_dim, state->m + i, state->d + i};
            finish_row(p, &p->rows[t->row], (t->q_first + r) / group,
                       (t->head_first + h) * group + (t->q_first + r) % group, &one);
        }
    }
}

void attn_cpu_scalar_init(attn_cpu_ops *ops) {
    static const char *const decode[ATTND_NUM_DTYPES] = {
        "cpu_scalar_f32_decode", "cpu_scalar_bf16_decode", "cpu_scalar_f16_decode",
        "cpu_scalar_f8e4m3_decode"};
    static const char *const prefill[ATTND_NUM_DTYPES] = {
        "cpu_scalar_f32_prefill", "cpu_scalar_bf16_prefill", "cpu_scalar_f16_prefill",
        "cpu_scalar_f8e4m3_prefill"};
    ops->isa = "scalar";
    for (uint32_t i = 0; i < ATTND_NUM_DTYPES; i++) {
        ops->decode[i] = (attn_cpu_kernel){attend, decode[i], DECODE_ROWS};
        ops->prefill[i] = (attn_cpu_kernel){attend, prefill[i], PREFILL_ROWS};
    }
    ops->append = append;
    ops->merge = merge;
    ops->finish = finish;
}
