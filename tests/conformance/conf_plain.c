// Nothing here is shared with the library: neither masks nor RoPE nor sums, so that an error of the
// library cannot widen its own bound.
#include "tests/conformance/conf_plain.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/conformance/conf_launch.h"

static float rounded(double x, attnd_dtype dtype) {
    unsigned char element[4];
    attnd_store(element, dtype, 0, x);
    return (float)attnd_load(element, dtype, 0);
}

// rotate is RoPE in float32 with angles from float64.
static void rotate(const attn_rope *rope, int32_t position, float *x) {
    for (int32_t i = 0; i < rope->rotary_dim / 2; i++) {
        int32_t a = rope->interleaved ? 2 * i : i;
        int32_t b = rope->interleaved ? 2 * i + 1 : i + rope->rotary_dim / 2;
        double angle = (double)position * (double)rope->inv_freq[i];
        float c = (float)(cos(angle) * (double)rope->attention_factor);
        float s = (float)(sin(angle) * (double)rope->attention_factor);
        float xa = x[a];
        float xb = x[b];
        x[a] = xa * c - xb * s;
        x[b] = xb * c + xa * s;
    }
}

static char *block_of(const attn_params *p, const attn_row *row, int32_t key) {
    return (char *)p->pool + row->table[key / p->shape.block_tokens] * p->shape.block_stride;
}

static void append(const attn_params *p, const attn_row *row, int32_t t, int32_t h) {
    const attn_shape *s = &p->shape;
    int32_t key = row->kv_len - row->new_len + t;
    int32_t slot = key % s->block_tokens;
    float x[ATTN_MAX_HEAD_DIM] = {0};
    for (int32_t d = 0; d < s->head_dim; d++) {
        x[d] = (float)attnd_load(
            row->k_new, s->q_dtype,
            (uint64_t)(t * row->stride_k_new_token + h * row->stride_k_new_head + d));
    }
    if (row->rope) {
        rotate(row->rope, row->k_positions ? row->k_positions[t] : key, x);
    }
    for (int32_t d = 0; d < s->head_dim; d++) {
        attnd_store(block_of(p, row, key) + row->k_offset, s->kv_dtype,
                    (uint64_t)(h * s->stride_k_head + slot * s->stride_k_token + d),
                    (double)(x[d] / (row->k_scale ? row->k_scale[h] : 1)));
    }
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        float v = (float)attnd_load(
            row->v_new, s->q_dtype,
            (uint64_t)(t * row->stride_v_new_token + h * row->stride_v_new_head + d));
        attnd_store(block_of(p, row, key) + row->v_offset, s->kv_dtype,
                    (uint64_t)(h * s->stride_v_head + slot * s->stride_v_token + d),
                    (double)(v / (row->v_scale ? row->v_scale[h] : 1)));
    }
}

static bool sees(const attn_params *p, const attn_row *row, int64_t i, int64_t j) {
    int64_t diagonal = i + (int64_t)row->kv_len - row->q_len;
    int64_t words = ((int64_t)row->q_len + 63) / 64;
    int64_t bit = j - ((int64_t)row->kv_len - row->q_len);
    bool ok = !(row->flags & ATTN_CAUSAL) || j <= diagonal;
    ok = ok && (row->window_left < 0 || j >= diagonal - row->window_left);
    ok = ok && (row->window_right < 0 || j <= diagonal + row->window_right);
    ok = ok && (!row->tree_mask || bit < 0 ||
                (row->tree_mask[i * words + bit / 64] & 1ull << bit % 64) != 0);
    if (ok && row->block_mask) {
        int64_t q_block = i / row->block_mask->q_block;
        ok = false;
        for (uint32_t b = row->block_mask->start[q_block]; b < row->block_mask->start[q_block + 1];
             b++) {
            ok = ok || row->block_mask->kv_blocks[b] == j / p->shape.block_tokens;
        }
    }
    return ok;
}

enum { LEAF = 8 }; // terms that pairwise summation adds one after the other

// sum adds num terms in the order asked for.
static float sum(const float *x, int32_t num, conf_order order) {
    float total = 0;
    if (order == CONF_PAIRWISE && num > LEAF) {
        return sum(x, num / 2, order) + sum(x + num / 2, num - num / 2, order);
    }
    for (int32_t i = 0; i < num; i++) {
        total += x[order == CONF_DESCENDING ? num - 1 - i : i];
    }
    return total;
}

// head is K and V of one KV head, float32, and what a query needs.
typedef struct head {
    float *k, *v; // [kv_len, head_dim], [kv_len, v_head_dim]
    float *x;     // [kv_len], logits, then probabilities, of the keys that are seen
    int32_t *seen;
    int32_t num;
} head;

static void load_head(head *hd, const attn_params *p, const attn_row *row, int32_t h) {
    const attn_shape *s = &p->shape;
    float k_scale = row->k_scale ? row->k_scale[h] : 1;
    float v_scale = row->v_scale ? row->v_scale[h] : 1;
    for (int32_t j = 0; j < row->kv_len; j++) {
        if (row->table[j / s->block_tokens] == CONF_NO_BLOCK) {
            continue; // nobody sees it
        }
        int32_t slot = j % s->block_tokens;
        for (int32_t d = 0; d < s->head_dim; d++) {
            uint64_t at = (uint64_t)(h * s->stride_k_head + slot * s->stride_k_token + d);
            hd->k[(int64_t)j * s->head_dim + d] =
                k_scale * (float)attnd_load(block_of(p, row, j) + row->k_offset, s->kv_dtype, at);
        }
        for (int32_t d = 0; d < s->v_head_dim; d++) {
            uint64_t at = (uint64_t)(h * s->stride_v_head + slot * s->stride_v_token + d);
            hd->v[(int64_t)j * s->v_head_dim + d] =
                v_scale * (float)attnd_load(block_of(p, row, j) + row->v_offset, s->kv_dtype, at);
        }
    }
}

static void load_logits(head *hd, const attn_params *p, const attn_row *row, int32_t i, int32_t h,
                        conf_order order) {
    const attn_shape *s = &p->shape;
    float q[ATTN_MAX_HEAD_DIM] = {0};
    float terms[ATTN_MAX_HEAD_DIM];
    for (int32_t d = 0; d < s->head_dim; d++) {
        q[d] = (float)attnd_load(row->q, s->q_dtype,
                                 (uint64_t)(i * row->stride_q_token + h * row->stride_q_head + d));
    }
    if (row->rope) {
        rotate(row->rope, row->q_positions ? row->q_positions[i] : row->kv_len - row->q_len + i, q);
        for (int32_t d = 0; d < s->head_dim; d++) {
            q[d] = rounded((double)q[d], s->q_dtype);
        }
    }
    float scale = row->scale != 0 ? row->scale : 1 / sqrtf((float)s->head_dim);
    hd->num = 0;
    for (int32_t j = 0; j < row->kv_len; j++) {
        if (!sees(p, row, i, j)) {
            continue;
        }
        for (int32_t d = 0; d < s->head_dim; d++) {
            terms[d] = q[d] * hd->k[(int64_t)j * s->head_dim + d];
        }
        float x = scale * sum(terms, s->head_dim, order);
        if (row->softcap > 0) {
            x = row->softcap * tanhf(x / row->softcap);
        }
        if (row->alibi_slopes) {
            x -= row->alibi_slopes[h] * fabsf((float)(i + row->kv_len - row->q_len - j));
        }
        hd->seen[hd->num] = j;
        hd->x[hd->num++] = x;
    }
}

// weigh sums up x * v over num of the keys seen, from index first, in the order asked for.
static void weigh(const head *hd, int32_t first, int32_t num, int32_t dim, conf_order order,
                  float *out) {
    memset(out, 0, (size_t)dim * sizeof(*out));
    if (order == CONF_PAIRWISE && num > LEAF) {
        float right[ATTN_MAX_HEAD_DIM];
        weigh(hd, first, num / 2, dim, order, out);
        weigh(hd, first + num / 2, num - num / 2, dim, order, right);
        for (int32_t d = 0; d < dim; d++) {
            out[d] += right[d];
        }
        return;
    }
    for (int32_t i = 0; i < num; i++) {
        int32_t n = first + (order == CONF_DESCENDING ? num - 1 - i : i);
        const float *v = hd->v + (int64_t)hd->seen[n] * dim;
        for (int32_t d = 0; d < dim; d++) {
            out[d] += hd->x[n] * v[d];
        }
    }
}

static double attend(head *hd, const attn_params *p, const attn_row *row, int32_t i, int32_t h,
                     conf_order order, double *out) {
    const attn_shape *s = &p->shape;
    load_logits(hd, p, row, i, h, order);
    float largest = -INFINITY;
    for (int32_t n = 0; n < hd->num; n++) {
        largest = fmaxf(largest, hd->x[n]);
    }
    for (int32_t n = 0; n < hd->num; n++) {
        hd->x[n] = expf(hd->x[n] - largest);
    }
    float total = sum(hd->x, hd->num, order);
    bool has_sink = row->sinks && !(row->flags & ATTN_PARTIAL);
    float denominator = total + (has_sink ? expf(row->sinks[h] - largest) : 0);
    for (int32_t n = 0; n < hd->num; n++) {
        hd->x[n] = rounded((double)(hd->x[n] / denominator), s->q_dtype);
    }
    float acc[ATTN_MAX_HEAD_DIM];
    weigh(hd, 0, hd->num, s->v_head_dim, order, acc);
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        out[d] = (double)rounded((double)acc[d], s->q_dtype);
    }
    return hd->num > 0 ? (double)(largest + logf(total)) : -INFINITY;
}

void conf_plain(const attn_params *p, conf_order order, double *out, double *lse) {
    const attn_shape *s = &p->shape;
    int64_t total = 0;
    int64_t done = 0;
    for (uint32_t r = 0; r < p->num_rows; r++) {
        total += p->rows[r].q_count;
        for (int32_t t = 0; t < p->rows[r].new_len; t++) {
            for (int32_t h = 0; h < s->kv_heads; h++) {
                append(p, &p->rows[r], t, h);
            }
        }
    }
    for (uint32_t r = 0; r < p->num_rows; r++) {
        const attn_row *row = &p->rows[r];
        size_t keys = (size_t)row->kv_len + 1;
        head hd = {
            .k = malloc(keys * (size_t)s->head_dim * sizeof(float)),
            .v = malloc(keys * (size_t)s->v_head_dim * sizeof(float)),
            .x = malloc(keys * sizeof(float)),
            .seen = malloc(keys * sizeof(int32_t)),
        };
        for (int32_t h = 0; h < s->q_heads; h++) {
            if (h % (s->q_heads / s->kv_heads) == 0) {
                load_head(&hd, p, row, h / (s->q_heads / s->kv_heads));
            }
            for (int32_t n = 0; n < row->q_count; n++) {
                double *to = out + ((done + n) * s->q_heads + h) * s->v_head_dim;
                lse[h * total + done + n] = attend(&hd, p, row, row->q_first + n, h, order, to);
            }
        }
        done += row->q_count;
        free(hd.k);
        free(hd.v);
        free(hd.x);
        free(hd.seen);
    }
}
