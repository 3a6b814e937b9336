// Attention by libattnd.  This is what a runtime has to write: a step a forward pass, an attend a
// layer.  q, k and v are copied into the buffers here; a runtime would let its projections write
// there.  A step carries the commit of the one before, so a token costs one call less.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/e2e/decoder.h"

typedef struct by_attnd {
    decoder_attention pub; // first
    attnd_client *client;
    attnd_buffers *buffers;
    uint32_t model;
    uint64_t seq, step;
    attnd_accept accept; // of the step that is not committed yet; 0 = none
    uint64_t due;        // that step
} by_attnd;

static bool good(attnd_err err, const char *what, const attnd_errinfo *info) {
    if (err) {
        fprintf(stderr, "decoder: %s: %s %s %s\n", what, attnd_errname(err), info->field,
                info->text);
    }
    return !err;
}

static bool begin(void *ctx, uint32_t rows) {
    by_attnd *a = ctx;
    attnd_errinfo info = {0};
    attnd_step_seq s = {.seq = a->seq, .new_len = rows};
    attnd_step_opts opts = {
        .deadline_ms = 1000, .commit_step = a->due, .commit_accept = &a->accept, .num_commit = 1};
    return good(attnd_step_open(a->client, a->model, &s, 1, &opts, &a->step, &info), "step", &info);
}

static bool attend(void *ctx, uint32_t layer, uint32_t rows, const float *q, const float *k,
                   const float *v, float *out) {
    by_attnd *a = ctx;
    attnd_errinfo info = {0};
    attnd_attend_args args = {.step = a->step,
                              .model = a->model,
                              .layer = layer,
                              .rows = rows,
                              .new_rows = rows,
                              .buffers = a->buffers};
    memcpy(a->buffers->q, q, rows * DECODER_Q_ROW * sizeof(float));
    memcpy(a->buffers->k, k, rows * DECODER_KV_ROW * sizeof(float));
    memcpy(a->buffers->v, v, rows * DECODER_KV_ROW * sizeof(float));
    if (!good(attnd_attend(a->client, &args, NULL, &info), "attend", &info)) {
        return false;
    }
    memcpy(out, a->buffers->out, rows * DECODER_Q_ROW * sizeof(float));
    return true;
}

static bool end(void *ctx, uint32_t rows) {
    by_attnd *a = ctx;
    a->accept = (attnd_accept){.accepted = rows};
    a->due = a->step;
    return true;
}

static attnd_err open_model(by_attnd *a, attnd_errinfo *info) {
    float inv_freq[DECODER_HEAD_DIM / 2];
    decoder_inv_freq(inv_freq);
    attnd_model_opts opts = {.name = "decoder",
                             .dtype = ATTND_F32,
                             .kv_dtype = ATTND_F32,
                             .layers = DECODER_LAYERS,
                             .q_heads = DECODER_Q_HEADS,
                             .kv_heads = DECODER_KV_HEADS,
                             .head_dim = DECODER_HEAD_DIM,
                             .all = ATTND_LAYER_DEFAULT};
    opts.all.rope = (attnd_rope_opts){.inv_freq = inv_freq, .num_inv_freq = DECODER_HEAD_DIM / 2};
    return attnd_model_open(a->client, &opts, &a->model, info);
}

decoder_attention *decoder_attnd_open(attnd_client *c) {
    attnd_errinfo info = {0};
    by_attnd *a = calloc(1, sizeof(*a));
    if (!a) {
        return NULL;
    }
    a->pub = (decoder_attention){a, begin, attend, end};
    a->client = c;
    if (!good(open_model(a, &info), "model", &info) ||
        !good(attnd_seq_create(c, a->model, &a->seq, &info), "sequence", &info) ||
        !good(attnd_buffers_create(c, &a->buffers, a->model, DECODER_MAX_ROWS, DECODER_MAX_ROWS,
                                   false, &info),
              "buffers", &info)) {
        free(a);
        return NULL;
    }
    return &a->pub;
}

void decoder_attnd_close(decoder_attention *pub) {
    by_attnd *a = pub->ctx;
    attnd_errinfo info;
    if (a->due) {
        attnd_step_cancel(a->client, a->due, &info);
    }
    attnd_buffers_free(a->buffers);
    attnd_seq_free(a->client, a->seq, &info);
    attnd_model_close(a->client, a->model, &info);
    free(a);
}
