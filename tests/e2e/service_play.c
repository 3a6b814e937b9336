// A client in tests of service mode.
#include "tests/e2e/service_play.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/dtype.h"

enum { REGION_BYTES = 8 << 20, RING_BYTES = 4 << 20, TIMEOUT_MS = 20000, BF16 = 2 };

static double real(uint32_t token, uint32_t kind, uint32_t i) {
    uint32_t h = (token * 1024 + i) * 4 + kind;
    h = (h ^ h >> 15) * UINT32_C(2246822519);
    h = (h ^ h >> 13) * UINT32_C(3266489917);
    return (double)(h >> 8) / (1 << 23) - 1;
}

static uint16_t value(uint32_t token, uint32_t kind, uint32_t i) {
    return attnd_f32_to_bf16((float)real(token, kind, i));
}

static double seen(uint32_t token, uint32_t kind, uint32_t i) {
    return (double)attnd_bf16_to_f32(value(token, kind, i));
}

// number tells a token of a sequence from all others.
static uint32_t number(uint32_t seq, uint32_t token) {
    return token * PLAY_SEQS + seq;
}

// ---- life

attnd_err play_dial(play *p, const char *url, play_how how) {
    bool service = how != PLAY_MESSAGES;
    memset(p, 0, sizeof(*p));
    p->how = how;
    attnd_connect_opts opts = {.transport = ATTND_TRANSPORT_RING,
                               .timeout_ms = TIMEOUT_MS,
                               .ring_bytes = service ? 256 << 10 : RING_BYTES,
                               .engine = service ? service_engine() : NULL,
                               .region_bytes = service ? REGION_BYTES : 0};
    if (service) {
        service_use();
    }
    return attnd_connect(&p->c, url, &opts, &p->info);
}

static void make_tensors(play *p) {
    for (int l = 0; l < PLAY_LAYERS; l++) {
        p->host[l].qkv = calloc(PLAY_MAX_ROWS * PLAY_ROW, BF16);
        p->host[l].out = calloc(PLAY_MAX_ROWS * PLAY_Q_ROW, BF16);
        if (p->stream) {
            p->device[l].qkv = service_alloc(PLAY_MAX_ROWS * PLAY_ROW * BF16);
            p->device[l].out = service_alloc(PLAY_MAX_ROWS * PLAY_Q_ROW * BF16);
        }
    }
    if (p->how == PLAY_REGION) {
        PLAY_OK(p, attnd_memory_create(p->c, &p->qkv, PLAY_MAX_ROWS * PLAY_ROW * BF16, &p->info));
        PLAY_OK(p, attnd_memory_create(p->c, &p->out, PLAY_MAX_ROWS * PLAY_Q_ROW * BF16, &p->info));
    }
    if (p->how == PLAY_BUFFERS) {
        PLAY_OK(p, attnd_buffers_create(p->c, &p->buffers, p->model, PLAY_MAX_ROWS, PLAY_MAX_ROWS,
                                        false, &p->info));
    }
}

static void open_model(play *p) {
    static float inv_freq[PLAY_DIM / 2], sinks[PLAY_HEADS];
    attnd_layer_opts layers[PLAY_LAYERS];
    for (int i = 0; i < PLAY_DIM / 2; i++) {
        inv_freq[i] = 1 / (float)(1 + i);
    }
    for (int h = 0; h < PLAY_HEADS; h++) {
        sinks[h] = (float)h / 4 - 1;
    }
    for (int l = 0; l < PLAY_LAYERS; l++) {
        layers[l] = ATTND_LAYER_DEFAULT;
    }
    layers[1].softcap = 5;
    layers[1].sinks = sinks;
    layers[2].rope = (attnd_rope_opts){.inv_freq = inv_freq, .num_inv_freq = PLAY_DIM / 2};
    layers[3].kv_layer = 1;
    attnd_model_opts opts = {.name = "m",
                             .dtype = ATTND_BF16,
                             .kv_dtype = ATTND_BF16,
                             .layers = PLAY_LAYERS,
                             .q_heads = PLAY_HEADS,
                             .kv_heads = PLAY_KV_HEADS,
                             .head_dim = PLAY_DIM,
                             .block_tokens = 16,
                             .per_layer = layers};
    PLAY_OK(p, attnd_model_open(p->c, &opts, &p->model, &p->info));
}

void play_begin(play *p, const char *url, play_how how) {
    PLAY_OK(p, play_dial(p, url, how));
    if (how != PLAY_MESSAGES) {
        p->stream = service_stream_create();
    }
    open_model(p);
    make_tensors(p);
    for (int i = 0; i < PLAY_SEQS; i++) {
        PLAY_OK(p, attnd_seq_create(p->c, p->model, &p->seqs[i], &p->info));
    }
}

void play_end(play *p, int ms) {
    attnd_close(p->c);
    ck_assert(!p->stream || service_sync(p->stream, ms));
    attnd_memory_free(p->qkv);
    attnd_memory_free(p->out);
    attnd_buffers_free(p->buffers);
    for (int l = 0; l < PLAY_LAYERS; l++) {
        free(p->host[l].qkv);
        free(p->host[l].out);
        if (p->stream) {
            service_free(p->device[l].qkv);
            service_free(p->device[l].out);
        }
    }
    if (p->stream) {
        service_stream_free(p->stream);
    }
}

// ---- steps

attnd_err play_try_step(play *p, uint32_t rows, uint32_t deadline_ms, uint64_t *step) {
    attnd_step_seq s[PLAY_SEQS];
    for (int i = 0; i < PLAY_SEQS; i++) {
        s[i] = (attnd_step_seq){.seq = p->seqs[i], .new_len = rows};
    }
    attnd_step_opts opts = {.deadline_ms = deadline_ms};
    return attnd_step_open(p->c, p->model, s, PLAY_SEQS, &opts, step, &p->info);
}

uint64_t play_step(play *p, uint32_t rows) {
    uint64_t step = 0;
    PLAY_OK(p, play_try_step(p, rows, 0, &step));
    return step;
}

void play_fill(play *p, uint32_t first, uint32_t rows) {
    for (uint32_t l = 0; l < PLAY_LAYERS; l++) {
        uint16_t *to = p->host[l].qkv;
        for (uint32_t r = 0; r < PLAY_SEQS * rows; r++) {
            uint32_t token = number(r / rows, first + r % rows);
            for (uint32_t i = 0; i < PLAY_ROW; i++) {
                uint32_t kind = i < PLAY_Q_ROW ? 0 : i < PLAY_Q_ROW + PLAY_KV_ROW ? 1 : 2;
                to[r * PLAY_ROW + i] = value(token, kind, i + l);
            }
        }
        if (p->stream) {
            service_copy(p->stream, p->device[l].qkv, to, PLAY_SEQS * rows * PLAY_ROW * BF16);
        }
    }
}

// set_tensors names q, k and v in rows of PLAY_ROW.
static void set_tensors(attnd_attend_args *a, const uint16_t *qkv, uint16_t *out) {
    bool appends = a->layer != PLAY_LAYERS - 1;
    a->q = qkv;
    a->k = appends ? qkv + PLAY_Q_ROW : NULL;
    a->v = appends ? qkv + PLAY_Q_ROW + PLAY_KV_ROW : NULL;
    a->q_stride_token = a->k_stride_token = a->v_stride_token = PLAY_ROW;
    a->out = out;
}

// to_buffers copies rows to where q, k and v are contiguous.
static void to_buffers(play *p, const uint16_t *qkv, uint32_t rows) {
    const attnd_buffers *b = p->buffers;
    for (uint32_t r = 0; r < rows; r++) {
        const uint16_t *from = qkv + r * PLAY_ROW;
        service_copy(p->stream, (uint16_t *)b->q + r * PLAY_Q_ROW, from, PLAY_Q_ROW * BF16);
        from += PLAY_Q_ROW;
        service_copy(p->stream, (uint16_t *)b->k + r * PLAY_KV_ROW, from, PLAY_KV_ROW * BF16);
        from += PLAY_KV_ROW;
        service_copy(p->stream, (uint16_t *)b->v + r * PLAY_KV_ROW, from, PLAY_KV_ROW * BF16);
    }
}

static attnd_err attend_buffers(play *p, attnd_attend_args *a, uint32_t rows) {
    const play_tensors *t = &p->device[a->layer];
    to_buffers(p, t->qkv, PLAY_SEQS * rows);
    a->buffers = p->buffers;
    attnd_err err = attnd_attend(p->c, a, NULL, &p->info);
    if (!err) {
        service_copy(p->stream, t->out, p->buffers->out, PLAY_SEQS * rows * PLAY_Q_ROW * BF16);
    }
    return err;
}

attnd_err play_attend(play *p, uint64_t step, uint32_t layer, uint32_t rows) {
    uint32_t num = PLAY_SEQS * rows;
    const play_tensors *t = p->stream ? &p->device[layer] : &p->host[layer];
    attnd_attend_args a = {.step = step,
                           .model = p->model,
                           .layer = layer,
                           .rows = num,
                           .new_rows = num,
                           .block_mask = p->masks ? &p->masks[layer] : NULL,
                           .stream = p->stream};
    if (p->pause_ms > 0) {
        service_pause(p->stream, p->pause_ms);
    }
    if (p->how == PLAY_BUFFERS && layer != PLAY_LAYERS - 1) { // which has no place without k, v
        return attend_buffers(p, &a, rows);
    }
    if (p->how != PLAY_REGION) {
        set_tensors(&a, t->qkv, t->out);
        return attnd_attend(p->c, &a, NULL, &p->info);
    }
    service_copy(p->stream, p->qkv->data, t->qkv, num * PLAY_ROW * BF16);
    set_tensors(&a, p->qkv->data, p->out->data);
    attnd_err err = attnd_attend(p->c, &a, NULL, &p->info);
    if (!err) {
        service_copy(p->stream, t->out, p->out->data, num * PLAY_Q_ROW * BF16);
    }
    return err;
}

attnd_err play_try_commit(play *p, uint64_t step, uint32_t rows) {
    attnd_accept accept[PLAY_SEQS];
    for (int i = 0; i < PLAY_SEQS; i++) {
        accept[i] = (attnd_accept){.accepted = rows};
    }
    attnd_err err = attnd_step_commit(p->c, step, accept, PLAY_SEQS, NULL, &p->info);
    p->len += err ? 0 : rows;
    return err;
}

void play_commit(play *p, uint64_t step, uint32_t rows) {
    PLAY_OK(p, play_try_commit(p, step, rows));
}

void play_read(play *p, uint32_t rows, uint16_t *out) {
    size_t num = PLAY_SEQS * rows * PLAY_Q_ROW;
    for (uint32_t l = 0; l < PLAY_LAYERS; l++) {
        if (p->stream) {
            service_copy(p->stream, out + l * num, p->device[l].out, num * BF16);
        } else {
            memcpy(out + l * num, p->host[l].out, num * BF16);
        }
    }
}

void play_forward(play *p, uint32_t rows, uint16_t *out) {
    uint64_t step = play_step(p, rows);
    play_fill(p, p->len, rows);
    for (uint32_t l = 0; l < PLAY_LAYERS; l++) {
        PLAY_OK(p, play_attend(p, step, l, rows));
    }
    play_read(p, rows, out);
    play_commit(p, step, rows);
    ck_assert(!p->stream || service_sync(p->stream, TIMEOUT_MS)); // host memory is used again
}

service_graph *play_graph(play *p, uint64_t step) {
    service_capture(p->stream);
    for (uint32_t l = 0; l < PLAY_LAYERS; l++) {
        PLAY_OK(p, play_attend(p, step, l, 1));
    }
    return service_end(p->stream);
}

// ---- the reference

// A result is a mean of values of at most 1, weighted by numbers that the kernels round to 8 bits
// and so is their sum's reciprocal, rounded to 8 bits: 2^-9 each.
void play_check(const uint16_t *row, uint32_t seq, uint32_t token) {
    const double bound = 1.0 / 128;
    for (uint32_t h = 0; h < PLAY_HEADS; h++) {
        uint32_t kv = h / (PLAY_HEADS / PLAY_KV_HEADS);
        double sum = 0, out[PLAY_DIM] = {0};
        for (uint32_t t = 0; t <= token; t++) {
            double x = 0;
            for (uint32_t i = 0; i < PLAY_DIM; i++) {
                x += seen(number(seq, token), 0, h * PLAY_DIM + i) *
                     seen(number(seq, t), 1, PLAY_Q_ROW + kv * PLAY_DIM + i);
            }
            double weight = exp(x / sqrt(PLAY_DIM));
            sum += weight;
            for (uint32_t i = 0; i < PLAY_DIM; i++) {
                uint32_t at = PLAY_Q_ROW + PLAY_KV_ROW + kv * PLAY_DIM + i;
                out[i] += weight * seen(number(seq, t), 2, at);
            }
        }
        for (uint32_t i = 0; i < PLAY_DIM; i++) {
            double got = (double)attnd_bf16_to_f32(row[h * PLAY_DIM + i]);
            ck_assert_double_lt(fabs(got - out[i] / sum), bound);
        }
    }
}
