// Empty attends by libattnd: no rows in an open step, so that every check of a real attend is made
// and no kernel runs.  One in flight is attnd_attend; more are attnd_attend_start and attnd_poll.
#include <stdio.h>
#include <stdlib.h>

#include "proto/client/attnd.h"
#include "tests/load/bench_ipc_link.h"

struct place {
    struct attend_link *link;
    uint32_t idx;
};

typedef struct attend_link {
    attnd_client *client;
    attnd_attend_args args;
    uint32_t flight;
    uint32_t ready[BENCH_IPC_MAX_FLIGHT], num_ready; // called back and not taken
    struct place places[BENCH_IPC_MAX_FLIGHT];
} attend_link;

static void need(attnd_err err, const char *what, const attnd_errinfo *info) {
    if (err) {
        fprintf(stderr, "attn-bench ipc: %s: %s %s\n", what, attnd_errname(err), info->text);
        _Exit(1);
    }
}

static attend_link *open_link(const bench_ipc_env *env, attnd_transport transport) {
    attend_link *l = calloc(1, sizeof(*l));
    bench_ipc_must(l != NULL, "memory");
    attnd_errinfo info = {0};
    attnd_connect_opts opts = {
        .transport = transport, .ring_bytes = 4 << 20, .spin_us = env->spin_us};
    attnd_model_opts model = {.name = "attn-bench ipc",
                              .dtype = ATTND_F32,
                              .kv_dtype = ATTND_F32,
                              .layers = 1,
                              .q_heads = 1,
                              .kv_heads = 1,
                              .head_dim = 8,
                              .all = ATTND_LAYER_DEFAULT};
    attnd_step_seq seq = {.new_len = 0};
    need(attnd_connect(&l->client, env->url, &opts, &info), "connect", &info);
    need(attnd_model_open(l->client, &model, &l->args.model, &info), "model", &info);
    need(attnd_seq_create(l->client, l->args.model, &seq.seq, &info), "sequence", &info);
    need(attnd_step_open(l->client, l->args.model, &seq, 1, NULL, &l->args.step, &info), "step",
         &info);
    l->flight = env->flight;
    for (uint32_t i = 0; i < BENCH_IPC_MAX_FLIGHT; i++) {
        l->places[i].link = l;
        l->places[i].idx = i;
    }
    return l;
}

static void *open_nng(const bench_ipc_env *env, uint32_t client) {
    (void)client;
    return open_link(env, ATTND_TRANSPORT_NNG);
}

static void *open_ring(const bench_ipc_env *env, uint32_t client) {
    (void)client;
    return open_link(env, ATTND_TRANSPORT_RING);
}

static void ended(void *ctx, attnd_err err, const attnd_ran *ran, const attnd_errinfo *info) {
    (void)ran;
    const struct place *p = ctx;
    need(err, "attend", info);
    p->link->ready[p->link->num_ready++] = p->idx;
}

static void submit(void *link, uint32_t place) {
    attend_link *l = link;
    attnd_errinfo info;
    if (l->flight > 1) {
        need(attnd_attend_start(l->client, &l->args, ended, &l->places[place], &info), "attend",
             &info);
    }
}

static uint32_t take(void *link) {
    attend_link *l = link;
    attnd_errinfo info;
    if (l->flight == 1) {
        need(attnd_attend(l->client, &l->args, NULL, &info), "attend", &info);
        return 0;
    }
    while (l->num_ready == 0) {
        attnd_poll(l->client, 1000);
    }
    return l->ready[--l->num_ready];
}

static void close_link(void *link) {
    attend_link *l = link;
    attnd_close(l->client);
    free(l);
}

const bench_ipc_kind bench_ipc_attend_nng = {"NNG attend", true,       open_nng, submit,
                                             take,         close_link, NULL};
const bench_ipc_kind bench_ipc_attend_ring = {"ring attend", true,       open_ring, submit,
                                              take,          close_link, NULL};
