// One REP socket, a context and a thread each for FAKE_THREADS requests at a time.
#include "tests/unit/proto/fake_daemon.h"

#include <nng/nng.h>
#include <nng/protocol/reqrep0/rep.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fake_daemon {
    nng_socket sock;
    fake_handler *handler;
    int all_ops;
    char folder[64], url[96];
    pthread_t threads[FAKE_THREADS];
    nng_ctx ctxs[FAKE_THREADS];
    nng_aio *aios[FAKE_THREADS];
    atomic_int next, stopping;
    pthread_mutex_t lock; // guards pipes
    int pipes;
};

size_t fake_body(uint8_t *reply, const proto_header *h, const void *body, size_t bytes) {
    proto_write_header(reply, h->op, h->request, ATTND_OK, PROTO_BODY + bytes);
    if (bytes > 0) {
        memcpy(reply + PROTO_BODY, body, bytes);
    }
    return PROTO_BODY + bytes;
}

size_t fake_json(uint8_t *reply, const proto_header *h, const char *json) {
    return fake_body(reply, h, json, strlen(json));
}

size_t fake_error(uint8_t *reply, const proto_header *h, attnd_err code, const char *field) {
    attnd_errinfo info;
    attnd_fail(&info, code, field, "%s is wrong", field);
    info.detail = 42;
    proto_write_error(reply, h->op, h->request, &info);
    return PROTO_ERROR_BYTES;
}

size_t fake_cut(uint8_t *reply, const proto_header *h, int step) {
    size_t n = (size_t)step / 2;
    if (step % 2 && n >= PROTO_BODY) {
        proto_header good;
        memcpy(&good, reply, sizeof(good));
        proto_write_header(reply, h->op, h->request, (attnd_err)good.status, n);
    }
    return n;
}

static size_t good_answer(const proto_header *h, uint8_t *reply) {
    char json[256];
    if (h->op == PROTO_HELLO) {
        snprintf(json, sizeof(json),
                 "{\"daemon\":\"fake\",\"version\":1,\"session\":\"a1\",\"limits\":"
                 "{\"message_bytes\":65536,\"in_flight\":%d,\"step_seqs\":8,\"step_rows\":256,"
                 "\"sequences\":100,\"more\":1}}",
                 FAKE_IN_FLIGHT);
    } else {
        snprintf(json, sizeof(json), "{\"model\":%d,\"block_tokens\":16,\"groups\":[]}",
                 FAKE_MODEL);
    }
    return fake_json(reply, h, json);
}

static size_t answer(fake_daemon *f, proto_view request, uint8_t *reply) {
    proto_header h;
    if (proto_read_header(request, &h, NULL)) {
        fprintf(stderr, "fake_daemon: the client sent a bad header\n");
        abort();
    }
    int by_itself = h.op == PROTO_HELLO || h.op == PROTO_MODEL_OPEN;
    size_t bytes = by_itself && !f->all_ops ? FAKE_DEFAULT : f->handler(request, &h, reply);
    return bytes == FAKE_DEFAULT ? good_answer(&h, reply) : bytes;
}

// serve answers one request; returns 0 when the daemon stops.
static int serve(fake_daemon *f, nng_ctx ctx, nng_aio *aio) {
    nng_ctx_recv(ctx, aio);
    nng_aio_wait(aio);
    if (nng_aio_result(aio)) {
        return !atomic_load(&f->stopping);
    }
    uint8_t reply[FAKE_REPLY_BYTES];
    nng_msg *msg = nng_aio_get_msg(aio);
    nng_pipe pipe = nng_msg_get_pipe(msg);
    size_t bytes = answer(f, (proto_view){nng_msg_body(msg), nng_msg_len(msg)}, reply);
    nng_msg_free(msg);
    if (bytes == FAKE_HANG_UP) {
        nng_pipe_close(pipe);
        return 1;
    }
    if (bytes == FAKE_SILENT || nng_msg_alloc(&msg, bytes)) {
        return 1;
    }
    memcpy(nng_msg_body(msg), reply, bytes);
    nng_aio_set_msg(aio, msg);
    nng_ctx_send(ctx, aio);
    nng_aio_wait(aio);
    if (nng_aio_result(aio)) {
        nng_msg_free(msg);
    }
    return !atomic_load(&f->stopping);
}

static void *serve_all(void *arg) {
    fake_daemon *f = arg;
    int i = atomic_fetch_add(&f->next, 1);
    while (serve(f, f->ctxs[i], f->aios[i])) {
    }
    return NULL;
}

static void count_pipe(nng_pipe pipe, nng_pipe_ev event, void *arg) {
    (void)pipe;
    (void)event;
    fake_daemon *f = arg;
    pthread_mutex_lock(&f->lock);
    f->pipes++;
    pthread_mutex_unlock(&f->lock);
}

static void must(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "fake_daemon: %s failed\n", what);
        abort();
    }
}

fake_daemon *fake_daemon_start(fake_handler *handler, int all_ops) {
    fake_daemon *f = calloc(1, sizeof(*f));
    must(f != NULL, "calloc");
    f->handler = handler;
    f->all_ops = all_ops;
    pthread_mutex_init(&f->lock, NULL);
    snprintf(f->folder, sizeof(f->folder), "%s/attnd-fake-XXXXXX", P_tmpdir);
    must(mkdtemp(f->folder) != NULL, "mkdtemp");
    snprintf(f->url, sizeof(f->url), "ipc://%s/s", f->folder);
    must(nng_rep0_open(&f->sock) == 0, "rep0_open");
    must(nng_pipe_notify(f->sock, NNG_PIPE_EV_ADD_POST, count_pipe, f) == 0, "pipe_notify");
    for (int i = 0; i < FAKE_THREADS; i++) {
        must(nng_ctx_open(&f->ctxs[i], f->sock) == 0, "ctx_open");
        must(nng_aio_alloc(&f->aios[i], NULL, NULL) == 0, "aio_alloc");
    }
    must(nng_listen(f->sock, f->url, NULL, 0) == 0, "listen");
    for (int i = 0; i < FAKE_THREADS; i++) {
        must(pthread_create(&f->threads[i], NULL, serve_all, f) == 0, "pthread_create");
    }
    return f;
}

const char *fake_daemon_url(const fake_daemon *f) {
    return f->url;
}

int fake_num_pipes(fake_daemon *f) {
    pthread_mutex_lock(&f->lock);
    int pipes = f->pipes;
    pthread_mutex_unlock(&f->lock);
    return pipes;
}

// Threads first: NNG 1.5.2 aborts when a context sends while its socket closes.  NNG's threads are
// past count_pipe when nng_close returns; the lock tells the thread sanitizer, which cannot see it.
void fake_daemon_stop(fake_daemon *f) {
    atomic_store(&f->stopping, 1);
    for (int i = 0; i < FAKE_THREADS; i++) {
        while (pthread_tryjoin_np(f->threads[i], NULL)) {
            for (int k = 0; k < FAKE_THREADS; k++) {
                nng_aio_abort(f->aios[k], NNG_ECANCELED);
            }
            usleep(500);
        }
    }
    nng_close(f->sock);
    (void)fake_num_pipes(f);
    for (int i = 0; i < FAKE_THREADS; i++) {
        nng_aio_free(f->aios[i]);
    }
    rmdir(f->folder);
    pthread_mutex_destroy(&f->lock);
    free(f);
}
