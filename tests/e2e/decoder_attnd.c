// Attention by libattnd.  This is what a runtime has to write: a step a forward pass, an attend a
// layer.  q, k and v are rounded into the buffers here; a runtime would let its projections write
// there.  A step carries the commit of the one before, so a token costs one call less.
//
// And what it has to write to outlive the daemon: it keeps q, k and v of the step that is not
// committed.  When the daemon is gone it reconnects, asks whether that step counts, and if not does
// it again.  Whatever was committed before is there.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/e2e/decoder.h"

typedef struct by_attnd {
    decoder_attention pub; // first
    const decoder_kind *kind;
    attnd_client *client;
    attnd_buffers *buffers;
    uint32_t model;
    uint64_t seq, step;
    attnd_accept accept; // of the step that is not committed yet; 0 = none
    uint64_t due;        // that step
    uint32_t rows;       // of the newest step
    float q[DECODER_LAYERS][DECODER_MAX_ROWS * DECODER_MAX_Q_ROW]; // of its layers so far
    float k[DECODER_LAYERS][DECODER_MAX_ROWS * DECODER_MAX_KV_ROW];
    float v[DECODER_LAYERS][DECODER_MAX_ROWS * DECODER_MAX_KV_ROW];
} by_attnd;

static bool good(attnd_err err, const char *what, const attnd_errinfo *info) {
    if (err) {
        fprintf(stderr, "decoder: %s: %s %s %s\n", what, attnd_errname(err), info->field,
                info->text);
    }
    return !err;
}

// gone says whether an error means that the daemon ends or has ended.
static bool gone(attnd_err err) {
    return err == ATTND_ECONN || err == ATTND_EPROTO || err == ATTND_ESHUTDOWN;
}

static attnd_err open_step(by_attnd *a, uint32_t rows, uint64_t due, attnd_errinfo *info) {
    attnd_step_seq s = {.seq = a->seq, .new_len = rows};
    attnd_step_opts opts = {
        .deadline_ms = 1000, .commit_step = due, .commit_accept = &a->accept, .num_commit = 1};
    return attnd_step_open(a->client, a->model, &s, 1, &opts, &a->step, info);
}

static void round_to(const decoder_kind *kind, void *out, const float *in, uint32_t num) {
    for (uint32_t i = 0; i < num; i++) {
        attnd_store(out, kind->dtype, i, (double)in[i]);
    }
}

static attnd_err attend_saved(by_attnd *a, uint32_t layer, attnd_errinfo *info) {
    attnd_attend_args args = {.step = a->step,
                              .model = a->model,
                              .layer = layer,
                              .rows = a->rows,
                              .new_rows = a->rows,
                              .buffers = a->buffers};
    round_to(a->kind, a->buffers->q, a->q[layer], a->rows * decoder_q_row(a->kind));
    round_to(a->kind, a->buffers->k, a->k[layer], a->rows * decoder_kv_row(a->kind));
    round_to(a->kind, a->buffers->v, a->v[layer], a->rows * decoder_kv_row(a->kind));
    return attnd_attend(a->client, &args, NULL, info);
}

// redo opens the newest step again and attends its first layers.
static attnd_err redo(by_attnd *a, uint32_t layers, attnd_errinfo *info) {
    attnd_err err = open_step(a, a->rows, 0, info);
    for (uint32_t l = 0; l < layers && !err; l++) {
        err = attend_saved(a, l, info);
    }
    return err;
}

// settle makes the step that was due count, once and only once.
static attnd_err settle(by_attnd *a, attnd_errinfo *info) {
    attnd_err err = attnd_step_commit(a->client, a->due, &a->accept, 1, NULL, info);
    if (err == ATTND_ESTALE) { // it was aborted with the daemon
        err = redo(a, DECODER_LAYERS, info);
        a->due = err ? a->due : a->step;
        err = err ? err : attnd_step_commit(a->client, a->due, &a->accept, 1, NULL, info);
    }
    a->due = err ? a->due : 0;
    return err;
}

static attnd_err open_buffers(by_attnd *a, attnd_errinfo *info) {
    attnd_buffers_free(a->buffers);
    a->buffers = NULL;
    return attnd_buffers_create(a->client, &a->buffers, a->model, DECODER_MAX_ROWS,
                                DECODER_MAX_ROWS, false, info);
}

// come_back reconnects, and has the step that was due committed.  A daemon that drains is still
// there: it ends sooner when nobody keeps asking.
static bool come_back(by_attnd *a, attnd_err why) {
    attnd_errinfo info = {0};
    attnd_err err = why;
    do {
        if (err == ATTND_ESHUTDOWN) {
            nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
        }
        err = attnd_reconnect(a->client, &info);
        err = err ? err : open_buffers(a, &info);
        err = err || !a->due ? err : settle(a, &info);
    } while (gone(err));
    return good(err, "after a restart", &info);
}

static bool begin(void *ctx, uint32_t rows) {
    by_attnd *a = ctx;
    attnd_errinfo info = {0};
    attnd_err err;
    while (gone(err = open_step(a, rows, a->due, &info))) {
        if (!come_back(a, err)) {
            return false;
        }
    }
    a->due = 0;
    a->rows = rows;
    return good(err, "step", &info);
}

static bool attend(void *ctx, uint32_t layer, uint32_t rows, const float *q, const float *k,
                   const float *v, float *out) {
    by_attnd *a = ctx;
    attnd_errinfo info = {0};
    memcpy(a->q[layer], q, rows * decoder_q_row(a->kind) * sizeof(float));
    memcpy(a->k[layer], k, rows * decoder_kv_row(a->kind) * sizeof(float));
    memcpy(a->v[layer], v, rows * decoder_kv_row(a->kind) * sizeof(float));
    attnd_err err = attend_saved(a, layer, &info);
    while (gone(err)) {
        if (!come_back(a, err)) {
            return false;
        }
        err = redo(a, layer + 1, &info);
    }
    if (!good(err, "attend", &info)) {
        return false;
    }
    for (uint32_t i = 0; i < rows * decoder_q_row(a->kind); i++) {
        out[i] = (float)attnd_load(a->buffers->out, a->kind->dtype, i);
    }
    return true;
}

static bool end(void *ctx, uint32_t rows) {
    by_attnd *a = ctx;
    a->accept = (attnd_accept){.accepted = rows};
    a->due = a->step;
    return true;
}

static attnd_err open_model(by_attnd *a, attnd_errinfo *info) {
    float inv_freq[DECODER_MAX_HEAD_DIM / 2];
    decoder_inv_freq(a->kind, inv_freq);
    attnd_model_opts opts = {.name = "decoder",
                             .dtype = a->kind->dtype,
                             .kv_dtype = a->kind->dtype,
                             .layers = DECODER_LAYERS,
                             .q_heads = DECODER_Q_HEADS,
                             .kv_heads = DECODER_KV_HEADS,
                             .head_dim = a->kind->head_dim,
                             .all = ATTND_LAYER_DEFAULT};
    opts.all.rope = (attnd_rope_opts){.inv_freq = inv_freq, .num_inv_freq = a->kind->head_dim / 2};
    return attnd_model_open(a->client, &opts, &a->model, info);
}

decoder_attention *decoder_attnd_open(const decoder_kind *kind, attnd_client *c) {
    attnd_errinfo info = {0};
    by_attnd *a = calloc(1, sizeof(*a));
    if (!a) {
        return NULL;
    }
    a->pub = (decoder_attention){a, begin, attend, end};
    a->kind = kind;
    a->client = c;
    if (!good(open_model(a, &info), "model", &info) ||
        !good(attnd_seq_create(c, a->model, &a->seq, &info), "sequence", &info) ||
        !good(open_buffers(a, &info), "buffers", &info)) {
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
