// An echo over NNG as the daemon is built: REP contexts whose callbacks post to a libuv loop, which
// answers.  The client waits as libattnd does: on the aio for one in flight, else on callbacks.
#include <nng/nng.h>
#include <nng/protocol/reqrep0/rep.h>
#include <nng/protocol/reqrep0/req.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "tests/load/bench_ipc_link.h"

enum { CONTEXTS = 256 };

// ---- the client

typedef struct nng_link nng_link;

typedef struct place {
    nng_link *link;
    nng_ctx ctx;
    nng_aio *aio, *cb_aio;
} place;

struct nng_link {
    nng_socket sock;
    uint32_t flight;
    place places[BENCH_IPC_MAX_FLIGHT];
    pthread_mutex_t lock; // guards all below
    pthread_cond_t cond;
    uint32_t ready[BENCH_IPC_MAX_FLIGHT], num_ready;
};

static void received(void *arg) {
    place *p = arg;
    nng_link *l = p->link;
    pthread_mutex_lock(&l->lock);
    l->ready[l->num_ready++] = (uint32_t)(p - l->places);
    pthread_cond_signal(&l->cond);
    pthread_mutex_unlock(&l->lock);
}

static void *open_link(const bench_ipc_env *env, uint32_t client) {
    (void)client;
    nng_link *l = calloc(1, sizeof(*l));
    bench_ipc_must(l && nng_req0_open(&l->sock) == 0, "NNG socket");
    nng_socket_set_ms(l->sock, NNG_OPT_REQ_RESENDTIME, NNG_DURATION_INFINITE);
    bench_ipc_must(nng_dial(l->sock, env->nng_url, NULL, 0) == 0, "NNG dial");
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->cond, NULL);
    l->flight = env->flight;
    for (uint32_t i = 0; i < env->flight; i++) {
        place *p = &l->places[i];
        p->link = l;
        bench_ipc_must(nng_ctx_open(&p->ctx, l->sock) == 0 &&
                           nng_aio_alloc(&p->aio, NULL, NULL) == 0 &&
                           nng_aio_alloc(&p->cb_aio, received, p) == 0,
                       "NNG context");
    }
    return l;
}

static void submit(void *link, uint32_t idx) {
    nng_link *l = link;
    place *p = &l->places[idx];
    nng_msg *msg;
    bench_ipc_must(nng_msg_alloc(&msg, BENCH_IPC_REQUEST_BYTES) == 0, "NNG message");
    memset(nng_msg_body(msg), 0, BENCH_IPC_REQUEST_BYTES);
    nng_aio_set_msg(p->aio, msg);
    nng_ctx_send(p->ctx, p->aio);
    nng_aio_wait(p->aio);
    bench_ipc_must(nng_aio_result(p->aio) == 0, "NNG send");
    nng_ctx_recv(p->ctx, l->flight == 1 ? p->aio : p->cb_aio);
}

static uint32_t take(void *link) {
    nng_link *l = link;
    uint32_t idx = 0;
    if (l->flight > 1) {
        pthread_mutex_lock(&l->lock);
        while (l->num_ready == 0) {
            pthread_cond_wait(&l->cond, &l->lock);
        }
        idx = l->ready[--l->num_ready];
        pthread_mutex_unlock(&l->lock);
    }
    nng_aio *aio = l->flight > 1 ? l->places[idx].cb_aio : l->places[idx].aio;
    nng_aio_wait(aio);
    bench_ipc_must(nng_aio_result(aio) == 0, "NNG receive");
    nng_msg_free(nng_aio_get_msg(aio));
    return idx;
}

static void close_link(void *link) {
    (void)link; // the process ends
}

// ---- the echo

typedef struct server server;

typedef struct context {
    server *server;
    nng_ctx ctx;
    nng_aio *aio;
    bool sends; // else it receives
} context;

struct server {
    nng_socket sock;
    context contexts[CONTEXTS];
    uv_async_t async;
    pthread_mutex_t lock; // guards all below
    context *ended[CONTEXTS];
    uint32_t num_ended;
};

static void ended(void *arg) {
    context *c = arg;
    server *s = c->server;
    pthread_mutex_lock(&s->lock);
    s->ended[s->num_ended++] = c;
    pthread_mutex_unlock(&s->lock);
    uv_async_send(&s->async);
}

static void advance(context *c) {
    bench_ipc_must(nng_aio_result(c->aio) == 0, "NNG echo");
    if (c->sends) {
        c->sends = false;
        nng_ctx_recv(c->ctx, c->aio);
        return;
    }
    nng_msg *reply;
    nng_msg_free(nng_aio_get_msg(c->aio));
    bench_ipc_must(nng_msg_alloc(&reply, BENCH_IPC_REPLY_BYTES) == 0, "NNG message");
    memset(nng_msg_body(reply), 0, BENCH_IPC_REPLY_BYTES);
    c->sends = true;
    nng_aio_set_msg(c->aio, reply);
    nng_ctx_send(c->ctx, c->aio);
}

static void on_async(uv_async_t *async) {
    server *s = async->data;
    context *list[CONTEXTS];
    pthread_mutex_lock(&s->lock);
    uint32_t num = s->num_ended;
    memcpy(list, s->ended, num * sizeof(list[0]));
    s->num_ended = 0;
    pthread_mutex_unlock(&s->lock);
    for (uint32_t i = 0; i < num; i++) {
        advance(list[i]);
    }
}

static void serve(const bench_ipc_env *env, volatile int *ready) {
    server *s = calloc(1, sizeof(*s));
    uv_loop_t loop;
    bench_ipc_must(s && uv_loop_init(&loop) == 0 && uv_async_init(&loop, &s->async, on_async) == 0,
                   "loop");
    s->async.data = s;
    pthread_mutex_init(&s->lock, NULL);
    bench_ipc_must(nng_rep0_open(&s->sock) == 0 && nng_listen(s->sock, env->nng_url, NULL, 0) == 0,
                   "NNG listen");
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        context *c = &s->contexts[i];
        c->server = s;
        bench_ipc_must(nng_ctx_open(&c->ctx, s->sock) == 0 && nng_aio_alloc(&c->aio, ended, c) == 0,
                       "NNG context");
        nng_ctx_recv(c->ctx, c->aio);
    }
    *ready = 1;
    uv_run(&loop, UV_RUN_DEFAULT);
}

const bench_ipc_kind bench_ipc_echo_nng = {"NNG echo", false,      open_link, submit,
                                           take,       close_link, serve};
