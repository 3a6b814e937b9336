// The connection.  One NNG REQ socket, one dialer, one pipe: the pipe is the session.  When it is
// gone the dialer is closed, the connection is lost for good, and every call, also one that waits
// in NNG to send, ends with ATTND_ECONN.
//
// NNG must not send a request again by itself (an append would be made twice): the resend time is
// infinite.
//
// A call takes a slot: a REQ context and an aio, kept for the next call.  No id is given out that
// is 64 or more above the oldest one without an answer, so that a request which is held up on its
// way never falls out of the daemon's window, whatever overtakes it.  A call that would need such
// an id waits; the price is that during a step that waits for blocks only 63 more such requests are
// made.
#include "proto/client/client_conn.h"

#include <errno.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/clock.h"

enum { NNG_ID_BYTES = 4 }; // REQ's own id, which NNG counts as part of a message

typedef struct slot {
    nng_ctx ctx;
    nng_aio *aio;
    uint64_t once_id;  // of a request without an answer that counts in the window; 0 = none
    struct slot *next; // in the idle list
} slot;

struct client_conn {
    nng_socket sock;
    nng_dialer dialer;
    pthread_mutex_t lock; // guards all below
    pthread_cond_t idle_cond;
    slot slots[CLIENT_MAX_SLOTS];
    slot *idle;
    uint32_t num_slots, max_slots;
    bool lost;
    uint64_t once_id, other_id; // last ones given out
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

attnd_err client_msg_alloc(client_msg *out, size_t bytes, attnd_errinfo *info) {
    nng_msg *msg;
    size_t size = bytes < PROTO_BODY ? PROTO_BODY : bytes;
    int rv = nng_msg_alloc(&msg, size);
    if (rv) {
        return nng_fail(rv, "message", info);
    }
    *out = (client_msg){nng_msg_body(msg), size, msg};
    memset(out->data, 0, size);
    return ATTND_OK;
}

void client_msg_free(client_msg *m) {
    if (m->handle) {
        nng_msg_free(m->handle);
    }
    *m = (client_msg){0};
}

// removed_cb ends all calls.  Closing the dialer here, before NNG arms its timer, is what keeps it
// from connecting again: a long NNG_OPT_RECONNMINT does not, since 1.5.2 draws the wait at random
// and half of the draws are negative.
static void removed_cb(nng_pipe pipe, nng_pipe_ev event, void *arg) {
    client_conn *conn = arg;
    (void)pipe;
    (void)event;
    pthread_mutex_lock(&conn->lock);
    conn->lost = true;
    for (uint32_t i = 0; i < conn->num_slots; i++) {
        nng_aio_abort(conn->slots[i].aio, NNG_ECONNRESET);
    }
    pthread_cond_broadcast(&conn->idle_cond);
    pthread_mutex_unlock(&conn->lock);
    nng_dialer_close(conn->dialer);
}

static int set_options(client_conn *conn) {
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
static int dial(client_conn *conn, const char *url, int32_t timeout_ms) {
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

static void init_lock(client_conn *conn) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&conn->idle_cond, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&conn->lock, NULL);
}

attnd_err client_conn_open(client_conn **out, const char *url, int32_t timeout_ms,
                           attnd_errinfo *info) {
    client_conn *conn = calloc(1, sizeof(*conn));
    if (!conn) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a connection");
    }
    int rv = nng_req0_open(&conn->sock);
    if (rv) {
        free(conn);
        return nng_fail(rv, "socket", info);
    }
    init_lock(conn);
    conn->max_slots = 1;
    conn->other_id = UINT64_C(1) << 63; // a range of its own
    if ((rv = set_options(conn)) || (rv = dial(conn, url, timeout_ms))) {
        client_conn_close(conn);
        return nng_fail(rv, url, info);
    }
    *out = conn;
    return ATTND_OK;
}

void client_conn_close(client_conn *conn) {
    if (!conn) {
        return;
    }
    // No callback from here on; this waits for one that runs.
    nng_pipe_notify(conn->sock, NNG_PIPE_EV_REM_POST, NULL, NULL);
    for (uint32_t i = 0; i < conn->num_slots; i++) {
        nng_ctx_close(conn->slots[i].ctx);
        nng_aio_free(conn->slots[i].aio);
    }
    nng_close(conn->sock);
    pthread_cond_destroy(&conn->idle_cond);
    pthread_mutex_destroy(&conn->lock);
    free(conn);
}

void client_conn_limit(client_conn *conn, uint32_t num_slots) {
    pthread_mutex_lock(&conn->lock);
    conn->max_slots = num_slots < CLIENT_MAX_SLOTS ? num_slots : CLIENT_MAX_SLOTS;
    pthread_mutex_unlock(&conn->lock);
}

static attnd_err lost(attnd_errinfo *info) {
    return attnd_fail(info, ATTND_ECONN, "", "the connection to the daemon is lost");
}

// make_slot adds a slot.  Called with the lock held.
static attnd_err make_slot(client_conn *conn, slot **out, attnd_errinfo *info) {
    slot *s = &conn->slots[conn->num_slots];
    int rv = nng_ctx_open(&s->ctx, conn->sock);
    if (rv) {
        return nng_fail(rv, "context", info);
    }
    if ((rv = nng_aio_alloc(&s->aio, NULL, NULL))) {
        nng_ctx_close(s->ctx);
        return nng_fail(rv, "aio", info);
    }
    conn->num_slots++;
    *out = s;
    return ATTND_OK;
}

// window_full says whether the next once id is too far above the oldest without an answer.  Called
// with the lock held.
static bool window_full(const client_conn *conn) {
    uint64_t oldest = conn->once_id + 1;
    for (uint32_t i = 0; i < conn->num_slots; i++) {
        uint64_t id = conn->slots[i].once_id;
        oldest = id && id < oldest ? id : oldest;
    }
    return conn->once_id + 1 - oldest >= PROTO_REQUEST_WINDOW;
}

// must_wait says whether a call has to wait for another one to end.  Called with the lock held.
static bool must_wait(const client_conn *conn, bool once) {
    return (!conn->idle && conn->num_slots >= conn->max_slots) || (once && window_full(conn));
}

// take_slot waits until deadline_ms for a slot and, when once, for an id.  Called with the lock
// held.
static attnd_err take_slot(client_conn *conn, bool once, uint64_t deadline_ms, slot **out,
                           attnd_errinfo *info) {
    struct timespec until = {.tv_sec = (time_t)(deadline_ms / 1000),
                             .tv_nsec = (long)(deadline_ms % 1000) * 1000000};
    int timed_out = 0;
    while (!conn->lost && must_wait(conn, once)) {
        if (timed_out) {
            return attnd_fail(info, ATTND_ETIMEDOUT, "", "waited for other requests in flight");
        }
        timed_out = pthread_cond_timedwait(&conn->idle_cond, &conn->lock, &until) == ETIMEDOUT;
    }
    if (conn->lost) {
        return lost(info);
    }
    if (!conn->idle) {
        return make_slot(conn, out, info);
    }
    *out = conn->idle;
    conn->idle = conn->idle->next;
    return ATTND_OK;
}

static void give_slot(client_conn *conn, slot *s) {
    pthread_mutex_lock(&conn->lock);
    s->once_id = 0;
    s->next = conn->idle;
    conn->idle = s;
    pthread_cond_broadcast(&conn->idle_cond); // not all wait for the same
    pthread_mutex_unlock(&conn->lock);
}

// is_once says whether the op's ids count in the daemon's window.
static bool is_once(proto_op op) {
    switch (op) {
    case PROTO_SEQ_CREATE:
    case PROTO_SEQ_FORK:
    case PROTO_SEQ_TRUNCATE:
    case PROTO_SEQ_FREE:
    case PROTO_SEQ_KEEP:
    case PROTO_SEQ_ATTACH:
    case PROTO_STEP:
    case PROTO_COMMIT:
    case PROTO_DECODE:
    case PROTO_PREFILL:
        return true;
    default:
        return false;
    }
}

static void set_timeout(slot *s, uint64_t deadline_ms) {
    uint64_t now = attnd_clock_ms();
    uint64_t left = deadline_ms > now ? deadline_ms - now : 0;
    nng_aio_set_timeout(s->aio, (nng_duration)(left < INT32_MAX ? left : INT32_MAX));
}

// start_send gives the request its id and starts to send it.  NNG owns *m when it is sent.
static attnd_err start_send(client_conn *conn, proto_op op, client_msg *m, uint64_t deadline_ms,
                            slot **out, uint64_t *id, attnd_errinfo *info) {
    pthread_mutex_lock(&conn->lock);
    bool once = is_once(op);
    attnd_err err = take_slot(conn, once, deadline_ms, out, info);
    if (!err) {
        slot *s = *out;
        *id = once ? ++conn->once_id : ++conn->other_id;
        s->once_id = once ? *id : 0;
        proto_write_header(m->data, op, *id, ATTND_OK, m->bytes);
        set_timeout(s, deadline_ms);
        nng_aio_set_msg(s->aio, m->handle);
        nng_ctx_send(s->ctx, s->aio);
    }
    pthread_mutex_unlock(&conn->lock);
    return err;
}

// receive waits for the reply.
static attnd_err receive(client_conn *conn, slot *s, uint64_t deadline_ms, client_msg *m,
                         attnd_errinfo *info) {
    pthread_mutex_lock(&conn->lock); // removed_cb aborts what was started before it, not later
    bool is_lost = conn->lost;
    if (!is_lost) {
        set_timeout(s, deadline_ms);
        nng_ctx_recv(s->ctx, s->aio);
    }
    pthread_mutex_unlock(&conn->lock);
    if (is_lost) {
        return lost(info);
    }
    nng_aio_wait(s->aio);
    int rv = nng_aio_result(s->aio);
    if (rv) {
        return nng_fail(rv, "reply", info);
    }
    nng_msg *msg = nng_aio_get_msg(s->aio);
    *m = (client_msg){nng_msg_body(msg), nng_msg_len(msg), msg};
    return ATTND_OK;
}

attnd_err client_conn_call(client_conn *conn, proto_op op, client_msg *m, int64_t timeout_ms,
                           attnd_errinfo *info) {
    uint64_t deadline_ms = attnd_clock_ms() + (uint64_t)timeout_ms, id = 0;
    slot *s = NULL;
    attnd_err err = start_send(conn, op, m, deadline_ms, &s, &id, info);
    if (err) {
        client_msg_free(m);
        return err;
    }
    nng_aio_wait(s->aio);
    int rv = nng_aio_result(s->aio);
    if (rv) {
        client_msg_free(m); // not sent, so it is still ours
        err = nng_fail(rv, "request", info);
    } else {
        *m = (client_msg){0};
        err = receive(conn, s, deadline_ms, m, info);
    }
    give_slot(conn, s);
    if (!err && (err = proto_read_reply(client_msg_view(m), op, id, info))) {
        client_msg_free(m);
    }
    return err;
}
