// The connection over NNG, and the only file of the library that calls NNG.  One REQ socket, one
// dialer, one pipe: the pipe is the session.  When it is gone the dialer is closed, the connection
// is lost for good, and every call, also one that waits in NNG to send, ends with ATTND_ECONN.
//
// NNG must not send a request again by itself (an append would be made twice): the resend time is
// infinite.
//
// A slot has a REQ context and two aios: one without a callback, so that the thread which waits is
// woken by NNG's own, and for async requests one whose callback counts the event.
#include <errno.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/client/client_conn.h"
#include "proto/client/client_nng_repair.h"
#include "proto/clock.h"

enum { NNG_ID_BYTES = 4 }; // REQ's own id, which NNG counts as part of a message

typedef struct nng_conn nng_conn;

typedef struct nng_slot {
    nng_ctx ctx;
    nng_aio *aio;
    nng_aio *async_aio; // NULL until the first async request
    atomic_bool done;   // of an async request
    nng_conn *conn;
} nng_slot;

struct nng_conn {
    client_conn base;
    nng_socket sock;
    nng_dialer dialer;
    pthread_mutex_t event_lock; // guards the next two; taken behind base.lock
    pthread_cond_t event_cond;  // base.events has changed, or all is lost
    bool lost;                  // as base.lost
    nng_slot slots[CLIENT_MAX_SLOTS];
};

static attnd_err nng_fail(int rv, const char *what, attnd_errinfo *info) {
    attnd_err code;
    switch (rv) {
    case NNG_ETIMEDOUT:
        code = ATTND_ETIMEDOUT;
        break;
    case NNG_ENOMEM:
        code = ATTND_ENOMEM;
        break;
    case NNG_EADDRINVAL:
    case NNG_EINVAL:
    case NNG_ENOTSUP:
        code = ATTND_EINVAL;
        break;
    default:
        code = ATTND_ECONN;
        break;
    }
    return attnd_fail(info, code, code == ATTND_EINVAL ? "url" : "", "%s: %s", what,
                      nng_strerror(rv));
}

static nng_conn *nng_of(client_conn *base) {
    return (nng_conn *)(void *)base; // its first member
}

// ---- messages

// Zeroed: gaps between arrays travel too, and the heap is none of the daemon's business.
static attnd_err alloc(client_conn *base, client_msg *out, uint64_t bytes, uint64_t reply_bytes,
                       uint64_t deadline_ms, attnd_errinfo *info) {
    nng_msg *msg;
    (void)base, (void)reply_bytes, (void)deadline_ms;
    int rv = nng_msg_alloc(&msg, bytes);
    if (rv) {
        return nng_fail(rv, "message", info);
    }
    *out = (client_msg){.data = nng_msg_body(msg), .bytes = bytes, .handle = msg};
    memset(out->data, 0, bytes);
    return ATTND_OK;
}

static void msg_free(client_msg *m) {
    nng_msg_free(m->handle);
}

// ---- slots

// async_cb leaves base.lock alone: who sends holds it, and NNG's threads are not to wait for that.
static void async_cb(void *arg) {
    nng_slot *n = arg;
    nng_conn *conn = n->conn;
    atomic_store(&n->done, true);
    pthread_mutex_lock(&conn->event_lock);
    atomic_fetch_add(&conn->base.events, 1);
    pthread_cond_broadcast(&conn->event_cond);
    pthread_mutex_unlock(&conn->event_lock);
}

static attnd_err prepare(client_conn *base, client_slot *s, attnd_errinfo *info) {
    nng_slot *n = &nng_of(base)->slots[s->idx];
    n->conn = nng_of(base);
    int rv = nng_ctx_open(&n->ctx, n->conn->sock);
    if (rv) {
        return nng_fail(rv, "context", info);
    }
    if ((rv = nng_aio_alloc(&n->aio, NULL, NULL))) {
        nng_ctx_close(n->ctx);
        return nng_fail(rv, "aio", info);
    }
    return ATTND_OK;
}

static void set_timeout(nng_aio *aio, uint64_t deadline_ms) {
    uint64_t now = attnd_clock_ms();
    uint64_t left = deadline_ms > now ? deadline_ms - now : 0;
    nng_aio_set_timeout(aio, (nng_duration)(left < INT32_MAX ? left : INT32_MAX));
}

// begin_receive starts to wait for the reply.
static attnd_err begin_receive(client_conn *base, client_slot *s, nng_aio *aio,
                               uint64_t deadline_ms, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    pthread_mutex_lock(&base->lock); // lose aborts what was started before it, not later
    if (base->lost) {
        err = client_conn_lost(base, info);
    } else {
        set_timeout(aio, deadline_ms);
        nng_ctx_recv(nng_of(base)->slots[s->idx].ctx, aio);
    }
    pthread_mutex_unlock(&base->lock);
    return err;
}

static attnd_err begin_async(client_conn *base, client_slot *s, uint64_t deadline_ms,
                             attnd_errinfo *info) {
    nng_slot *n = &nng_of(base)->slots[s->idx];
    int rv = n->async_aio ? 0 : nng_aio_alloc(&n->async_aio, async_cb, n);
    if (rv) {
        return nng_fail(rv, "aio", info);
    }
    atomic_store(&n->done, false);
    return begin_receive(base, s, n->async_aio, deadline_ms, info);
}

// fail_request: a request may hear of a lost connection before removed_cb does.
static attnd_err fail_request(client_conn *base, int rv, const char *what, attnd_errinfo *info) {
    attnd_err err = nng_fail(rv, what, info);
    if (err == ATTND_ECONN) {
        pthread_mutex_lock(&base->lock);
        client_conn_lose(base, ATTND_ECONN);
        pthread_mutex_unlock(&base->lock);
    }
    return err;
}

static attnd_err send_msg(client_conn *base, client_slot *s, client_msg *m, uint64_t deadline_ms,
                          attnd_errinfo *info) {
    nng_slot *n = &nng_of(base)->slots[s->idx];
    set_timeout(n->aio, deadline_ms);
    nng_aio_set_msg(n->aio, m->handle);
    nng_ctx_send(n->ctx, n->aio);
    pthread_mutex_unlock(&base->lock);
    nng_aio_wait(n->aio);
    int rv = nng_aio_result(n->aio);
    if (rv) {
        client_msg_free(m); // not sent, so it is still ours
        return fail_request(base, rv, "request", info);
    }
    *m = (client_msg){0};
    client_conn_rele(base); // the message's reference
    return s->async ? begin_async(base, s, deadline_ms, info) : ATTND_OK;
}

static bool ready(const client_conn *base, const client_slot *s) {
    const nng_conn *conn = (const nng_conn *)(const void *)base;
    return atomic_load(&conn->slots[s->idx].done);
}

// An aio that has ended, one way or another, has left the context: the slot can be used again.
static attnd_err wait_reply(client_conn *base, client_slot *s, uint64_t deadline_ms, client_msg *m,
                            bool *ended, attnd_errinfo *info) {
    nng_slot *n = &nng_of(base)->slots[s->idx];
    nng_aio *aio = s->async ? n->async_aio : n->aio;
    attnd_err err = s->async ? ATTND_OK : begin_receive(base, s, aio, deadline_ms, info);
    (void)ended;
    if (err) {
        return err;
    }
    nng_aio_wait(aio);
    int rv = nng_aio_result(aio);
    if (rv) {
        return fail_request(base, rv, "reply", info);
    }
    nng_msg *msg = nng_aio_get_msg(aio);
    *m = (client_msg){nng_msg_body(msg), nng_msg_len(msg), client_conn_hold(base), msg};
    return ATTND_OK;
}

static void await(client_conn *base, uint32_t seen, uint64_t deadline_ms) {
    nng_conn *conn = nng_of(base);
    if (deadline_ms == 0) {
        return; // there is nothing to take in
    }
    pthread_mutex_lock(&conn->event_lock);
    while (!conn->lost && atomic_load(&base->events) == seen &&
           client_cond_wait(&conn->event_cond, &conn->event_lock, deadline_ms)) {
    }
    pthread_mutex_unlock(&conn->event_lock);
}

// ---- life

static void lose(client_conn *base) {
    nng_conn *conn = nng_of(base);
    for (uint32_t i = 0; i < base->num_slots; i++) {
        nng_aio_abort(conn->slots[i].aio, NNG_ECONNRESET);
        if (conn->slots[i].async_aio) {
            nng_aio_abort(conn->slots[i].async_aio, NNG_ECONNRESET);
        }
    }
    pthread_mutex_lock(&conn->event_lock);
    conn->lost = true;
    pthread_cond_broadcast(&conn->event_cond);
    pthread_mutex_unlock(&conn->event_lock);
}

static void free_conn(client_conn *base) {
    nng_conn *conn = nng_of(base);
    // No callback from here on; this waits for one that runs.
    nng_pipe_notify(conn->sock, NNG_PIPE_EV_REM_POST, NULL, NULL);
    for (uint32_t i = 0; i < base->num_slots; i++) {
        nng_ctx_close(conn->slots[i].ctx);
        nng_aio_free(conn->slots[i].aio);
        nng_aio_free(conn->slots[i].async_aio);
    }
    nng_close(conn->sock);
    pthread_cond_destroy(&conn->event_cond);
    pthread_mutex_destroy(&conn->event_lock);
    client_conn_fini(base);
    free(conn);
}

// removed_cb ends all calls.  Closing the dialer here, before NNG arms its timer, is what keeps it
// from connecting again: a long NNG_OPT_RECONNMINT does not, since 1.5.2 draws the wait at random
// and half of the draws are negative.
static void removed_cb(nng_pipe pipe, nng_pipe_ev event, void *arg) {
    nng_conn *conn = arg;
    (void)pipe;
    (void)event;
    pthread_mutex_lock(&conn->base.lock);
    client_conn_lose(&conn->base, ATTND_ECONN);
    pthread_mutex_unlock(&conn->base.lock);
    nng_dialer_close(conn->dialer);
}

static int set_options(nng_conn *conn) {
    nng_socket s = conn->sock;
    int rv = nng_socket_set_ms(s, NNG_OPT_REQ_RESENDTIME, NNG_DURATION_INFINITE);
    rv =
        rv ? rv : nng_socket_set_size(s, NNG_OPT_RECVMAXSZ, PROTO_MAX_MESSAGE_BYTES + NNG_ID_BYTES);
    return rv ? rv : nng_pipe_notify(s, NNG_PIPE_EV_REM_POST, removed_cb, conn);
}

typedef struct watch {
    nng_aio *aio;
    nng_dialer dialer;
    bool expired;
} watch;

// give_up_cb ends a dialer whose time is over.
static void give_up_cb(void *arg) {
    watch *w = arg;
    if (nng_aio_result(w->aio) == 0) {
        w->expired = true;
        nng_dialer_close(w->dialer);
    }
}

// dial connects, and waits for it no longer than timeout_ms: NNG's own dial has no time limit.
static int dial(nng_conn *conn, const char *url, int32_t timeout_ms) {
    int rv = nng_dialer_create(&conn->dialer, conn->sock, url);
    watch w = {.dialer = conn->dialer};
    if (rv || (rv = nng_aio_alloc(&w.aio, give_up_cb, &w))) {
        return rv;
    }
    nng_sleep_aio(timeout_ms, w.aio);
    rv = nng_dialer_start(conn->dialer, 0);
    nng_aio_stop(w.aio); // waits for the callback
    nng_aio_free(w.aio);
    return rv && w.expired ? NNG_ETIMEDOUT : rv;
}

// dial_fail: a socket that is not there is "connection refused" to NNG.
static attnd_err dial_fail(int rv, const char *url, attnd_errinfo *info) {
    bool local = strncmp(url, "ipc://", 6) == 0;
    if (rv == NNG_ECONNREFUSED && local && access(url + 6, F_OK) != 0 && errno == ENOENT) {
        return attnd_fail(info, ATTND_ECONN, "", "%s: no such socket", url);
    }
    return nng_fail(rv, url, info);
}

static const client_conn_ops nng_ops = {
    alloc, msg_free, NULL, prepare, send_msg, ready, wait_reply, await, lose, free_conn,
};

attnd_err client_nng_open(client_conn **out, const char *url, int32_t timeout_ms,
                          attnd_errinfo *info) {
    nng_conn *conn = calloc(1, sizeof(*conn));
    if (!conn) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a connection");
    }
    client_nng_repair();
    int rv = nng_req0_open(&conn->sock);
    if (rv) {
        free(conn);
        return nng_fail(rv, "socket", info);
    }
    client_conn_init(&conn->base, &nng_ops);
    pthread_mutex_init(&conn->event_lock, NULL);
    client_cond_init(&conn->event_cond);
    if ((rv = set_options(conn)) || (rv = dial(conn, url, timeout_ms))) {
        client_conn_close(&conn->base);
        return dial_fail(rv, url, info);
    }
    *out = &conn->base;
    return ATTND_OK;
}
