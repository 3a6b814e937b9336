// The definition of attn.h in float64, sentence by sentence; nothing shared with the kernels, no
// blocking, no online softmax, so that an error would have to be made twice.  Values of the cache
// are read as they were stored.
#include <math.h>
#include <stdlib.h>

#include "attention/attn.h"

// rotate applies RoPE to x [head_dim]:
//     (a, b) -> factor * (a cos - b sin, b cos + a sin), angle = position * inv_freq
static void rotate(const attn_rope *rope, double position, double *x) {
    int32_t half = rope->rotary_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        int32_t a = rope->interleaved ? 2 * i : i;
        int32_t b = rope->interleaved ? 2 * i + 1 : i + half;
        double angle = position * (double)rope->inv_freq[i];
        double cosine = cos(angle) * (double)rope->attention_factor;
        double sine = sin(angle) * (double)rope->attention_factor;
        double rotated = x[a] * cosine - x[b] * sine;
        x[b] = x[b] * cosine + x[a] * sine;
        x[a] = rotated;
    }
}

static void *block_of(const attn_params *p, const attn_row *row, int32_t key) {
    return (char *)p->pool + row->table[key / p->shape.block_tokens] * p->shape.block_stride;
}

static uint64_t k_element(const attn_shape *s, int32_t head, int32_t key) {
    return (uint64_t)(head * s->stride_k_head + key % s->block_tokens * s->stride_k_token);
}

static uint64_t v_element(const attn_shape *s, int32_t head, int32_t key) {
    return (uint64_t)(head * s->stride_v_head + key % s->block_tokens * s->stride_v_token);
}

static void store(const attn_params *p, void *base, uint64_t element, double value) {
    if (p->shape.kv_dtype == ATTND_F8E4M3 && fabs(value) > 448 && p->saturated) {
        ++*p->saturated;
    }
    attnd_store(base, p->shape.kv_dtype, element, value);
}

static void append_key(const attn_params *p, const attn_row *row, int32_t t, int32_t head) {
    const attn_shape *s = &p->shape;
    int32_t key = row->kv_len - row->new_len + t;
    char *block = block_of(p, row, key);
    double x[ATTN_MAX_HEAD_DIM] = {0};
    int64_t from = t * row->stride_k_new_token + head * row->stride_k_new_head;
    for (int32_t d = 0; d < s->head_dim; d++) {
        x[d] = attnd_load(row->k_new, s->q_dtype, (uint64_t)(from + d));
    }
    if (row->rope) {
        rotate(row->rope, row->k_positions ? row->k_positions[t] : key, x);
    }
    double scale = row->k_scale ? (double)row->k_scale[head] : 1.0;
    for (int32_t d = 0; d < s->head_dim; d++) {
        store(p, block + row->k_offset, k_element(s, head, key) + (uint64_t)d, x[d] / scale);
    }
    from = t * row->stride_v_new_token + head * row->stride_v_new_head;
    scale = row->v_scale ? (double)row->v_scale[head] : 1.0;
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        double v = attnd_load(row->v_new, s->q_dtype, (uint64_t)(from + d));
        store(p, block + row->v_offset, v_element(s, head, key) + (uint64_t)d, v / scale);
    }
}

static bool sees(const attn_params *p, const attn_row *row, int64_t i, int64_t j) {
    int64_t shift = (int64_t)row->kv_len - row->q_len;
    if ((row->flags & ATTN_CAUSAL) && j > i + shift) {
        return false;
    }
    if (row->window_left >= 0 && j < i + shift - row->window_left) {
        return false;
    }
    if (row->window_right >= 0 && j > i + shift + row->window_right) {
        return false;
    }
    if (row->tree_mask && j >= shift) {
        int64_t words = ((int64_t)row->q_len + 63) / 64;
        int64_t bit = j - shift;
        if (!(row->tree_mask[i * words + bit / 64] >> (bit % 64) & 1)) {
            return false;
        }
    }
    if (row->block_mask) {
        const attn_block_mask *mask = row->block_mask;
        for (uint32_t b = mask->start[i / mask->q_block]; b < mask->start[i / mask->q_block + 1];
             b++) {
            if (mask->kv_blocks[b] == j / p->shape.block_tokens) {
                return true;
            }
        }
        return false;
    }
    return true;
}

// first_seen returns the key before which no query of the launch sees any: what lies there may be
// gone.
static int64_t first_seen(const attn_row *row) {
    int64_t at = (int64_t)row->kv_len - row->q_len + row->q_first;
    return row->window_left < 0 || at < row->window_left ? 0 : at - row->window_left;
}

// cache is K [kv_len, head_dim] and V [kv_len, v_head_dim] of one KV head in float64.
typedef struct cache {
    double *k, *v;
    double *x; // [kv_len], the logits of a query
    bool *seen;
} cache;

static void load_cache(cache *c, const attn_params *p, const attn_row *row, int32_t head) {
    const attn_shape *s = &p->shape;
    double k_scale = row->k_scale ? (double)row->k_scale[head] : 1.0;
    double v_scale = row->v_scale ? (double)row->v_scale[head] : 1.0;
    for (int32_t j = (int32_t)first_seen(row); j < row->kv_len; j++) {
        char *block = block_of(p, row, j);
        for (int32_t d = 0; d < s->head_dim; d++) {
            uint64_t element = k_element(s, head, j) + (uint64_t)d;
            c->k[(int64_t)j * s->head_dim + d] =
                k_scale * attnd_load(block + row->k_offset, s->kv_dtype, element);
        }
        for (int32_t d = 0; d < s->v_head_dim; d++) {
            uint64_t element = v_element(s, head, j) + (uint64_t)d;
            c->v[(int64_t)j * s->v_head_dim + d] =
                v_scale * attnd_load(block + row->v_offset, s->kv_dtype, element);
        }
    }
}

// load_logits fills c->x and c->seen for query token i of head h, and returns the largest seen
// logit.
static double load_logits(cache *c, const attn_params *p, const attn_row *row, int32_t i,
                          int32_t h) {
    const attn_shape *s = &p->shape;
    double q[ATTN_MAX_HEAD_DIM] = {0};
    for (int32_t d = 0; d < s->head_dim; d++) {
        q[d] = attnd_load(row->q, s->q_dtype,
                          (uint64_t)(i * row->stride_q_token + h * row->stride_q_head + d));
    }
    if (row->rope) {
        rotate(row->rope, row->q_positions ? row->q_positions[i] : row->kv_len - row->q_len + i, q);
    }
    double scale = row->scale != 0 ? (double)row->scale : 1 / sqrt(s->head_dim);
    double largest = -INFINITY;
    for (int64_t j = 0; j < row->kv_len; j++) {
        c->seen[j] = sees(p, row, i, j);
        if (!c->seen[j]) {
            continue;
        }
        double dot = 0;
        for (int32_t d = 0; d < s->head_dim; d++) {
            dot += q[d] * c->k[j * s->head_dim + d];
        }
        double x = scale * dot;
        if (row->softcap > 0) {
            x = (double)row->softcap * tanh(x / (double)row->softcap);
        }
        if (row->alibi_slopes) {
            x -= (double)row->alibi_slopes[h] *
                 fabs((double)(i + (int64_t)row->kv_len - row->q_len - j));
        }
        c->x[j] = x;
        largest = isnan(x) || x > largest ? x : largest;
    }
    return largest;
}

// attend writes out [v_head_dim] of query token i of head h and returns its LSE.
static double attend(cache *c, const attn_params *p, const attn_row *row, int32_t i, int32_t h,
                     double *out) {
    const attn_shape *s = &p->shape;
    double largest = load_logits(c, p, row, i, h);
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        out[d] = 0;
    }
    if (largest == -INFINITY) {
        return -INFINITY;
    }
    double sum = 0;
    for (int64_t j = 0; j < row->kv_len; j++) {
        if (!c->seen[j]) {
            continue;
        }
        double weight = exp(c->x[j] - largest);
        sum += weight;
        for (int32_t d = 0; d < s->v_head_dim; d++) {
            out[d] += weight * c->v[j * s->v_head_dim + d];
        }
    }
    bool has_sink = row->sinks && !(row->flags & ATTN_PARTIAL);
    double denominator = sum + (has_sink ? exp((double)row->sinks[h] - largest) : 0);
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        out[d] /= denominator;
    }
    return largest + log(sum);
}

static void attend_row(cache *c, const attn_params *p, const attn_row *row, int64_t total,
                       int64_t done, double *out, double *lse) {
    const attn_shape *s = &p->shape;
    double unused[ATTN_MAX_HEAD_DIM] = {0};
    int32_t group = s->q_heads / s->kv_heads;
    for (int32_t h = 0; h < s->q_heads; h++) {
        if (h % group == 0) {
            load_cache(c, p, row, h / group);
        }
        for (int32_t n = 0; n < row->q_count; n++) {
            double *to = out ? out + ((done + n) * s->q_heads + h) * s->v_head_dim : unused;
            double row_lse = attend(c, p, row, row->q_first + n, h, to);
            if (lse) {
                lse[h * total + done + n] = row_lse;
            }
        }
    }
}

attnd_err attn_reference(const attn_params *p, double *out_f64, double *lse_f64) {
    int64_t longest = 1;
    int64_t total = 0;
    for (uint32_t r = 0; r < p->num_rows; r++) {
        const attn_row *row = &p->rows[r];
        longest = row->kv_len > longest ? row->kv_len : longest;
        total += row->q_count;
        for (int32_t t = 0; t < row->new_len; t++) {
            for (int32_t head = 0; head < p->shape.kv_heads; head++) {
                append_key(p, row, t, head);
            }
        }
    }
    cache c = {
        .k = calloc((size_t)longest * (size_t)p->shape.head_dim, sizeof(double)),
        .v = calloc((size_t)longest * (size_t)p->shape.v_head_dim, sizeof(double)),
        .x = calloc((size_t)longest, sizeof(double)),
        .seen = calloc((size_t)longest, sizeof(bool)),
    };
    attnd_err err = c.k && c.v && c.x && c.seen ? ATTND_OK : ATTND_ENOMEM;
    int64_t done = 0;
    for (uint32_t r = 0; r < p->num_rows && err == ATTND_OK; r++) {
        attend_row(&c, p, &p->rows[r], total, done, out_f64, lse_f64);
        done += p->rows[r].q_count;
    }
    free(c.k);
    free(c.v);
    free(c.x);
    free(c.seen);
    return err;
}
