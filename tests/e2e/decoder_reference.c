// Attention by the float64 reference, over one block that holds the whole conversation; q, k, v and
// out rounded to the kind's type, as a daemon has them.
#include <stdio.h>
#include <stdlib.h>

#include "attention/attn.h"
#include "tests/e2e/decoder.h"

enum {
    MAX_K = DECODER_KV_HEADS * DECODER_MAX_TOKENS * DECODER_MAX_HEAD_DIM,
    MAX_Q = DECODER_MAX_ROWS * DECODER_MAX_Q_ROW,
};

typedef struct by_reference {
    decoder_attention pub; // first
    const decoder_kind *kind;
    float cache[DECODER_LAYERS][2 * MAX_K]; // of the kind's type, which may be smaller
    float inv_freq[DECODER_MAX_HEAD_DIM / 2];
    float q[MAX_Q], k[MAX_Q], v[MAX_Q]; // rounded, likewise
    double out[MAX_Q];
    uint32_t len;
} by_reference;

static bool begin(void *ctx, uint32_t rows) {
    const by_reference *r = ctx;
    return r->len + rows <= DECODER_MAX_TOKENS;
}

static void rounded(const by_reference *r, void *out, const float *in, uint32_t num) {
    for (uint32_t i = 0; i < num; i++) {
        attnd_store(out, r->kind->dtype, i, (double)in[i]);
    }
}

static attn_shape shape_of(const decoder_kind *kind) {
    int32_t dim = (int32_t)kind->head_dim;
    return (attn_shape){
        .q_dtype = kind->dtype,
        .kv_dtype = kind->dtype,
        .q_heads = DECODER_Q_HEADS,
        .kv_heads = DECODER_KV_HEADS,
        .head_dim = dim,
        .v_head_dim = dim,
        .block_tokens = DECODER_MAX_TOKENS,
        .stride_k_token = dim,
        .stride_k_head = (int64_t)DECODER_MAX_TOKENS * dim,
        .stride_v_token = dim,
        .stride_v_head = (int64_t)DECODER_MAX_TOKENS * dim,
        .block_stride = 2 * MAX_K * sizeof(float),
    };
}

static attn_row row_of(by_reference *r, uint32_t rows, const attn_rope *rope) {
    static const uint32_t table[] = {0};
    uint32_t dim = r->kind->head_dim;
    return (attn_row){
        .q = r->q,
        .out = r->out, // not written
        .k_new = r->k,
        .v_new = r->v,
        .table = table,
        .stride_q_token = decoder_q_row(r->kind),
        .stride_q_head = dim,
        .stride_out_token = decoder_q_row(r->kind),
        .stride_out_head = dim,
        .stride_k_new_token = decoder_kv_row(r->kind),
        .stride_k_new_head = dim,
        .stride_v_new_token = decoder_kv_row(r->kind),
        .stride_v_new_head = dim,
        .v_offset = MAX_K * sizeof(float),
        .kv_len = (int32_t)(r->len + rows),
        .q_len = (int32_t)rows,
        .q_count = (int32_t)rows,
        .new_len = (int32_t)rows,
        .flags = ATTN_CAUSAL,
        .window_left = -1,
        .window_right = -1,
        .rope = rope,
    };
}

static bool attend(void *ctx, uint32_t layer, uint32_t rows, const float *q, const float *k,
                   const float *v, float *out) {
    by_reference *r = ctx;
    attn_rope rope = {
        .inv_freq = r->inv_freq, .attention_factor = 1, .rotary_dim = (int32_t)r->kind->head_dim};
    uint32_t num = rows * decoder_q_row(r->kind), num_new = rows * decoder_kv_row(r->kind);
    rounded(r, r->q, q, num);
    rounded(r, r->k, k, num_new);
    rounded(r, r->v, v, num_new);
    attn_row row = row_of(r, rows, &rope);
    attn_params params = {.shape = shape_of(r->kind),
                          .pool = r->cache[layer],
                          .pool_bytes = sizeof(r->cache[layer]),
                          .num_blocks = 1,
                          .rows = &row,
                          .num_rows = 1};
    attnd_errinfo info = {0};
    if (attn_check(&params, &info) || attn_reference(&params, r->out, NULL)) {
        fprintf(stderr, "decoder: reference: %s %s\n", info.field, info.text);
        return false;
    }
    for (uint32_t i = 0; i < num; i++) {
        float bits;
        attnd_store(&bits, r->kind->dtype, 0, r->out[i]);
        out[i] = (float)attnd_load(&bits, r->kind->dtype, 0);
    }
    return true;
}

static bool end(void *ctx, uint32_t rows) {
    by_reference *r = ctx;
    r->len += rows;
    return true;
}

decoder_attention *decoder_reference_open(const decoder_kind *kind) {
    by_reference *r = calloc(1, sizeof(*r));
    if (!r) {
        return NULL;
    }
    r->pub = (decoder_attention){r, begin, attend, end};
    r->kind = kind;
    decoder_inv_freq(kind, r->inv_freq);
    return &r->pub;
}

void decoder_reference_close(decoder_attention *a) {
    free(a->ctx);
}
