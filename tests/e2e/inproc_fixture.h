// inproc_fixture is what tests of attention in the client's own process share: a daemon that lets
// this user in, and players, clients with a model and a sequence whose values are told by token.
#ifndef ATTND_TESTS_E2E_INPROC_FIXTURE_H
#define ATTND_TESTS_E2E_INPROC_FIXTURE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attention/attn_engine.h"
#include "proto/client/attnd.h"
#include "tests/e2e/harness.h"

enum {
    LAYERS = 4,
    HEADS = 6,
    KV_HEADS = 2,
    DIM = 16,
    V_DIM = 24,
    BLOCK = 8,
    MAX_ROWS = 64,
    Q_ROW = HEADS * DIM,
    K_ROW = KV_HEADS * DIM,
    V_ROW = KV_HEADS * V_DIM,
    OUT_ROW = HEADS * V_DIM,
};

static char in_process[64];
static const char *const flags[] = {"--set", "cache.memory=16MiB",       "--set", "cache.slab=1MiB",
                                    "--set", "compute.threads=1",        "--set", in_process,
                                    "--set", "compute.deterministic=on", NULL};
static const char *const no_grant[] = {"--set", "cache.memory=16MiB",
                                       "--set", "cache.slab=1MiB",
                                       "--set", "server.in_process_uids=4294967294",
                                       NULL};

static e2e_daemon d;
static attnd_errinfo info;

static inline void setup(void) {
    memset(&d, 0, sizeof(d));
    snprintf(in_process, sizeof(in_process), "server.in_process_uids=%u", (unsigned)getuid());
    e2e_dir(&d);
}

// player is a client with a model and a sequence.
typedef struct player {
    attnd_client *c;
    uint32_t model;
    uint64_t seq;
} player;

static inline attnd_err dial(player *p, bool here) {
    attnd_connect_opts opts = {.transport = ATTND_TRANSPORT_RING,
                               .timeout_ms = 20000,
                               .engine = here ? attn_engine_cpu() : NULL,
                               .engine_threads = 2};
    return attnd_connect(&p->c, d.url, &opts, &info);
}

static inline float value(uint32_t token, uint32_t kind, uint32_t i) {
    uint32_t h = (token * 512 + i) * 8 + kind;
    h = (h ^ h >> 15) * UINT32_C(2246822519);
    h = (h ^ h >> 13) * UINT32_C(3266489917);
    return (float)(h >> 8) / (1 << 23) - 1;
}

// open_model opens one with everything that a layer may have: windows in groups of their own, a
// layer that reads another's K and V, sinks, slopes, softcap, RoPE of both kinds.
static inline void open_model(player *p) {
    static float sinks[HEADS], slopes[HEADS], inv_freq[DIM / 2];
    attnd_layer_opts layers[LAYERS];
    for (int h = 0; h < HEADS; h++) {
        sinks[h] = value(1, 5, (uint32_t)h);
        slopes[h] = 0.25f / (float)(h + 1);
    }
    for (int i = 0; i < DIM / 2; i++) {
        inv_freq[i] = 1 / (float)(1 << i);
    }
    for (int l = 0; l < LAYERS; l++) {
        layers[l] = ATTND_LAYER_DEFAULT;
        layers[l].rope = (attnd_rope_opts){.inv_freq = inv_freq,
                                           .num_inv_freq = l == 1 ? DIM / 4 : DIM / 2,
                                           .attention_factor = l == 1 ? 1.25f : 0,
                                           .interleaved = l == 1};
    }
    layers[1].window_left = 13;
    layers[1].sinks = sinks;
    layers[2].softcap = 3;
    layers[2].scale = 0.5f;
    layers[2].alibi_slopes = slopes;
    layers[3].kv_layer = 1;
    layers[3].window_left = 5;
    attnd_model_opts opts = {.name = "m",
                             .dtype = ATTND_F32,
                             .kv_dtype = ATTND_F32,
                             .layers = LAYERS,
                             .q_heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .v_head_dim = V_DIM,
                             .block_tokens = BLOCK,
                             .per_layer = layers};
    ATTND_CK_OK(attnd_model_open(p->c, &opts, &p->model, &info));
}

static inline void begin(player *p, bool here) {
    ATTND_CK_OK(dial(p, here));
    open_model(p);
    ATTND_CK_OK(attnd_seq_create(p->c, p->model, &p->seq, &info));
}

// outputs is what all layers of a step gave.
typedef struct outputs {
    float out[LAYERS][MAX_ROWS * OUT_ROW];
    float lse[LAYERS][HEADS * MAX_ROWS];
} outputs;

// attend_mask is that of the attends that follow, NULL = none.
static const attnd_block_mask *attend_mask;

static inline attnd_err attend(player *p, uint64_t step, uint32_t layer, uint32_t first,
                               uint32_t rows, bool new, outputs *o) {
    float q[MAX_ROWS * Q_ROW], k[MAX_ROWS * K_ROW], v[MAX_ROWS * V_ROW];
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t i = 0; i < Q_ROW; i++) {
            q[r * Q_ROW + i] = value(first + r, 0, i + 7 * layer);
        }
        for (uint32_t i = 0; i < K_ROW; i++) {
            k[r * K_ROW + i] = value(first + r, 1, i + 7 * layer);
        }
        for (uint32_t i = 0; i < V_ROW; i++) {
            v[r * V_ROW + i] = value(first + r, 2, i + 7 * layer);
        }
    }
    bool appends = new &&layer != 3;
    attnd_attend_args args = {.step = step,
                              .model = p->model,
                              .layer = layer,
                              .rows = rows,
                              .new_rows = new ? rows : 0,
                              .q = q,
                              .k = appends ? k : NULL,
                              .v = appends ? v : NULL,
                              .out = o->out[layer],
                              .lse = o->lse[layer],
                              .block_mask = attend_mask};
    return attnd_attend(p->c, &args, NULL, &info);
}

static inline void attend_all(player *p, uint64_t step, uint32_t first, uint32_t rows, bool new,
                              outputs *o) {
    for (uint32_t l = 0; l < LAYERS; l++) {
        ATTND_CK_OK(attend(p, step, l, first, rows, new, o));
    }
}

static inline uint64_t open_step(player *p, attnd_step_seq *seqs, uint32_t num) {
    uint64_t step = 0;
    attnd_step_opts opts = {.deadline_ms = 10000};
    ATTND_CK_OK(attnd_step_open(p->c, p->model, seqs, num, &opts, &step, &info));
    return step;
}

static inline void commit(player *p, uint64_t step, attnd_accept accept, uint32_t len) {
    uint32_t got = 0;
    ATTND_CK_OK(attnd_step_commit(p->c, step, &accept, 1, &got, &info));
    ck_assert_uint_eq(got, len);
}

static inline double stat_of(const char *path) {
    e2e_client c;
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    double x = e2e_stat(&c, path);
    e2e_close(&c);
    return x;
}

static inline void await_stat(const char *path, double want, int ms) {
    e2e_client c;
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    e2e_await_stat(&c, path, want, ms);
    e2e_close(&c);
}

#endif
