// Attention by the float64 reference, over one block that holds the whole conversation.
#include <stdio.h>
#include <stdlib.h>

#include "attention/attn.h"
#include "tests/e2e/decoder.h"

enum {
    K_FLOATS = DECODER_KV_HEADS * DECODER_MAX_TOKENS * DECODER_HEAD_DIM,
    OUT = DECODER_MAX_ROWS * DECODER_Q_ROW,
};

typedef struct by_reference {
    decoder_attention pub; // first
    float cache[DECODER_LAYERS][2 * K_FLOATS];
    float inv_freq[DECODER_HEAD_DIM / 2];
    double out[OUT];
    uint32_t len;
} by_reference;

static bool begin(void *ctx, uint32_t rows) {
    const by_reference *r = ctx;
    return r->len + rows <= DECODER_MAX_TOKENS;
}

static const attn_shape shape = {
    .q_dtype = ATTND_F32,
    .kv_dtype = ATTND_F32,
    .q_heads = DECODER_Q_HEADS,
    .kv_heads = DECODER_KV_HEADS,
    .head_dim = DECODER_HEAD_DIM,
    .v_head_dim = DECODER_HEAD_DIM,
    .block_tokens = DECODER_MAX_TOKENS,
    .stride_k_token = DECODER_HEAD_DIM,
    .stride_k_head = DECODER_MAX_TOKENS * DECODER_HEAD_DIM,
    .stride_v_token = DECODER_HEAD_DIM,
    .stride_v_head = DECODER_MAX_TOKENS * DECODER_HEAD_DIM,
    .block_stride = 2 * K_FLOATS * sizeof(float),
};

static bool attend(void *ctx, uint32_t layer, uint32_t rows, const float *q, const float *k,
                   const float *v, float *out) {
    by_reference *r = ctx;
    static const uint32_t table[] = {0};
    attn_rope rope = {
        .inv_freq = r->inv_freq, .attention_factor = 1, .rotary_dim = DECODER_HEAD_DIM};
    attn_row row = {
        .q = q,
        .out = out,
        .k_new = k,
        .v_new = v,
        .table = table,
        .stride_q_token = DECODER_Q_ROW,
        .stride_q_head = DECODER_HEAD_DIM,
        .stride_out_token = DECODER_Q_ROW,
        .stride_out_head = DECODER_HEAD_DIM,
        .stride_k_new_token = DECODER_KV_ROW,
        .stride_k_new_head = DECODER_HEAD_DIM,
        .stride_v_new_token = DECODER_KV_ROW,
        .stride_v_new_head = DECODER_HEAD_DIM,
        .v_offset = K_FLOATS * sizeof(float),
        .kv_len = (int32_t)(r->len + rows),
        .q_len = (int32_t)rows,
        .q_count = (int32_t)rows,
        .new_len = (int32_t)rows,
        .flags = ATTN_CAUSAL,
        .window_left = -1,
        .window_right = -1,
        .rope = &rope,
    };
    attn_params params = {.shape = shape,
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
    for (uint32_t i = 0; i < rows * DECODER_Q_ROW; i++) {
        out[i] = (float)r->out[i];
    }
    return true;
}

static bool end(void *ctx, uint32_t rows) {
    by_reference *r = ctx;
    r->len += rows;
    return true;
}

decoder_attention *decoder_reference_open(void) {
    by_reference *r = calloc(1, sizeof(*r));
    if (!r) {
        return NULL;
    }
    r->pub = (decoder_attention){r, begin, attend, end};
    decoder_inv_freq(r->inv_freq);
    return &r->pub;
}

void decoder_reference_close(decoder_attention *a) {
    free(a->ctx);
}
