// The NNG transport.
//
//     NNG threads                            loop thread
//     recv done  --.                    .->  on_received: bounds, queue of its connection
//     send done  ---+-> events, async --+->  on_sent: count down, receive again
//     pipe added --'                    '->  opened(), lost()
//     pipe gone                              dispatch: a request of each connection in turn
//
// A slot is a REP context with its aio; it receives, works, sends, and receives again.  NNG's
// callbacks touch a slot or a connection only to link it into `events`, which the loop drains
// whole, because uv_async_send coalesces.
//
// What NNG 1.5 does that shaped this file:
// - A reply sent without an aio can be lost for good, so all are sent by aio.
// - A reply for a pipe that is busy waits inside its context.  A client that does not read would
//   hold all contexts in the end, and nobody could be received from; hence the counts, the
//   send timeout, and enough slots for every connection's share.
// - A reply to a pipe that is gone "succeeds".  Only pipe events tell that a client is gone.
// - A reply given to a pipe in the instant in which NNG closes it "succeeds" too, and its memory is
//   forgotten: the pipe's aio refuses it, and nobody frees what it holds.  (Seen in 3 of 120 kills
//   of clients with 16 requests in flight, on a crowded machine.)  Nothing here can know, nor help.
// - A context that receives again without having replied forgets the request: so a request of a
//   dead connection needs no answer.
// - The message limit is unlimited unless set, and must be set before the listener starts.
// - A request's body is aligned to 4 bytes, not more: REP trims its 4-byte id off the front.
#include "server/srv_nng.h"

#include <nng/nng.h>
#include <nng/protocol/reqrep0/rep.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_path.h"

enum {
    TURN_EVENTS = 512,   // handled in one turn of the loop
    TURN_US = 1000,      // after which no more requests are dispatched in a turn
    MAX_RECEIVING = 256, // contexts that receive at once
    HOP_BYTES = 64,      // REQ ids in front of a message, which NNG counts as part of it
};

typedef enum slot_state { SLOT_IDLE, SLOT_RECEIVING, SLOT_WORKING, SLOT_SENDING } slot_state;

typedef struct conn {
    srv_conn pub;
    // Guarded by lock, until the loop has seen `added`; then the loop's.
    uint32_t pipe_id; // 0 = free
    uint32_t uid;
    int32_t pid;
    // Guarded by lock.
    bool added, gone; // events that the loop has not seen yet
    list_node event;
    // The loop's.
    bool open;          // opened and not lost
    bool closing;       // the pipe was closed by us
    uint32_t working;   // requests received and not answered
    uint32_t unread;    // replies that NNG has not taken yet
    uint64_t bytes;     // of all their messages
    list_node requests; // received and not dispatched, slot.turn
    list_node turn;     // in srv_nng.turns when there are any
} conn;

typedef struct slot {
    srv_request rq;
    srv_nng *t;
    nng_ctx ctx;
    nng_aio *aio;
    nng_msg *request, *reply; // owned
    size_t bytes;             // of both, as counted in the connection
    slot_state state;
    list_node event; // guarded by lock
    list_node turn;  // in conn.requests, or in srv_nng.idle
} slot;

typedef struct url {
    nng_listener listener;
    srv_path path; // lock_fd -1 when not ipc
} url;

struct srv_nng {
    srv_nng_opts opts;
    nng_socket socket;
    uv_async_t async;
    bool stopping;
    url urls[SRV_URLS_MAX];
    uint32_t num_urls;
    conn *conns; // [opts.connections]
    slot *slots; // [num_slots]
    uint32_t num_slots;
    srv_nng_info info;
    struct {
        attnd_log_rate flood, slow, garbage, idle; // as info.closed_*
    } rates;
    list_node idle; // slots that do nothing; the last one that was used is taken first
    uint32_t receiving;
    list_node turns;  // connections with requests to dispatch, one from each in turn
    uint64_t refused; // guarded by lock: connections closed because all are taken

    pthread_mutex_t lock;  // guards events and what the structs above say
    list_node slot_events; // slots whose aio has ended
    list_node conn_events; // connections that were added or are gone
};

static slot *slot_of(srv_request *rq) {
    return LIST_ENTRY(rq, slot, rq);
}

static conn *conn_of(srv_conn *c) {
    return LIST_ENTRY(c, conn, pub);
}

// ---- NNG's threads

static void aio_done(void *arg) {
    slot *s = arg;
    srv_nng *t = s->t;
    pthread_mutex_lock(&t->lock);
    list_append(&t->slot_events, &s->event);
    pthread_mutex_unlock(&t->lock);
    uv_async_send(&t->async);
}

// find_conn returns the connection of a pipe, or with 0 a free one.  Caller locks, or is the loop
// and looks for a pipe whose addition it has seen.
static conn *find_conn(srv_nng *t, uint32_t pipe_id) {
    for (uint32_t i = 0; i < t->opts.connections; i++) {
        if (t->conns[i].pipe_id == pipe_id) {
            return &t->conns[i];
        }
    }
    return NULL;
}

static void post_conn(srv_nng *t, conn *c) {
    if (!list_linked(&c->event)) {
        list_append(&t->conn_events, &c->event);
    }
}

static void pipe_event(nng_pipe pipe, nng_pipe_ev ev, void *arg) {
    srv_nng *t = arg;
    uint64_t uid = UINT32_MAX;
    if (ev == NNG_PIPE_EV_ADD_PRE && nng_pipe_get_uint64(pipe, NNG_OPT_IPC_PEER_UID, &uid) != 0) {
        uid = UINT32_MAX;
    }
    uint64_t pid = 0;
    if (ev == NNG_PIPE_EV_ADD_PRE && nng_pipe_get_uint64(pipe, NNG_OPT_IPC_PEER_PID, &pid) != 0) {
        pid = 0;
    }
    pthread_mutex_lock(&t->lock);
    conn *c = find_conn(t, ev == NNG_PIPE_EV_ADD_PRE ? 0 : (uint32_t)nng_pipe_id(pipe));
    if (c && ev == NNG_PIPE_EV_ADD_PRE) {
        c->pipe_id = (uint32_t)nng_pipe_id(pipe);
        c->uid = (uint32_t)uid;
        c->pid = pid ? (int32_t)pid : -1;
        c->added = true;
        post_conn(t, c);
    } else if (c) {
        c->gone = true;
        post_conn(t, c);
    } else if (ev == NNG_PIPE_EV_ADD_PRE) {
        t->refused++;
    }
    pthread_mutex_unlock(&t->lock);
    if (c) {
        uv_async_send(&t->async);
    } else if (ev == NNG_PIPE_EV_ADD_PRE) {
        nng_pipe_close(pipe);
    }
}

// ---- the loop: connections

static void close_pipe(conn *c) {
    if (c->open && !c->closing) {
        c->closing = true;
        nng_pipe_close((nng_pipe){c->pipe_id});
    }
}

static void free_if_unused(srv_nng *t, conn *c) {
    if (!c->open && c->working + c->unread == 0) {
        pthread_mutex_lock(&t->lock);
        c->pipe_id = 0;
        pthread_mutex_unlock(&t->lock);
    }
}

// ---- the loop: slots

// top_up lets idle slots receive.  NNG fills receiving contexts in the order in which they came, so
// a few that are used again and again stay in the processor's caches, and thousands would not.
// While any are idle, the loop replaces in each turn what a flood may have taken.
static void top_up(srv_nng *t) {
    for (list_node *node; t->receiving < MAX_RECEIVING && (node = list_first(&t->idle));) {
        slot *s = LIST_ENTRY(node, slot, turn);
        list_remove(node);
        s->state = SLOT_RECEIVING;
        t->receiving++;
        nng_aio_set_timeout(s->aio, NNG_DURATION_INFINITE);
        nng_ctx_recv(s->ctx, s->aio);
    }
}

static void rest(srv_nng *t, slot *s) {
    s->state = SLOT_IDLE;
    list_insert_before(t->idle.next, &s->turn);
    if (!t->stopping) {
        top_up(t);
    }
}

static void hold_bytes(slot *s, size_t bytes) {
    s->bytes += bytes;
    conn_of(s->rq.conn)->bytes += bytes;
}

static void drop_msg(slot *s, nng_msg **msg) {
    if (*msg) {
        s->bytes -= nng_msg_len(*msg);
        conn_of(s->rq.conn)->bytes -= nng_msg_len(*msg);
        nng_msg_free(*msg);
        *msg = NULL;
    }
}

// settle lets go of a request whose reply is out, or will never be.
static void settle(srv_nng *t, slot *s) {
    conn *c = conn_of(s->rq.conn);
    drop_msg(s, &s->request);
    c->bytes -= s->bytes;
    s->bytes = 0;
    if (s->state == SLOT_WORKING) {
        c->working--;
    } else {
        c->unread--;
    }
    t->info.in_flight--;
    free_if_unused(t, c);
    rest(t, s);
}

static attnd_err reply_alloc(srv_request *rq, size_t bytes, void **out, attnd_errinfo *info) {
    slot *s = slot_of(rq);
    conn *c = conn_of(rq->conn);
    srv_nng *t = s->t;
    drop_msg(s, &s->reply);
    if (bytes > rq->reply_room) {
        return attnd_fail(info, ATTND_EMSGSIZE, "", "the reply would have %zu bytes", bytes);
    }
    // An error always gets through: its size is counted, but not held against the bound.
    if (bytes > sizeof(proto_header) + sizeof(proto_error) &&
        c->bytes + bytes > t->opts.connection_bytes) {
        return attnd_fail(info, ATTND_EBUSY, "", "too many bytes of requests and unread replies");
    }
    if (nng_msg_alloc(&s->reply, bytes) != 0) {
        s->reply = NULL;
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a reply of %zu bytes", bytes);
    }
    hold_bytes(s, bytes);
    *out = nng_msg_body(s->reply);
    return ATTND_OK;
}

// The request's memory goes now; the reply is counted until NNG has written it, or nearly so.  That
// is known a little later than the client can know it, so what bounds a client that reads is
// `working` alone.
static void reply_send(srv_request *rq) {
    slot *s = slot_of(rq);
    conn *c = conn_of(rq->conn);
    ATTND_ASSERT(s->state == SLOT_WORKING && s->reply);
    drop_msg(s, &s->request);
    s->state = SLOT_SENDING;
    c->working--;
    c->unread++;
    s->t->info.last_reply_ms = attnd_clock_ms();
    nng_aio_set_timeout(s->aio, (nng_duration)s->t->opts.send_timeout_ms);
    nng_aio_set_msg(s->aio, s->reply);
    s->reply = NULL;
    nng_ctx_send(s->ctx, s->aio);
    if (c->unread > 2 * s->t->opts.in_flight && !c->closing) {
        s->t->info.closed_flood++;
        attnd_log_some(&s->t->rates.flood, ATTND_LOG_WARN, "nng",
                       "a client has over %u unread replies: closed",
                       (unsigned)(2 * s->t->opts.in_flight));
        close_pipe(c);
    }
}

static void drop_request(srv_request *rq) {
    slot *s = slot_of(rq);
    ATTND_ASSERT(s->state == SLOT_WORKING);
    close_pipe(conn_of(rq->conn));
    settle(s->t, s);
}

static void close_conn(srv_conn *pub) {
    close_pipe(conn_of(pub));
}

static const srv_transport_ops nng_ops = {reply_alloc, reply_send, drop_request, close_conn};

// free_aio_msg frees what an ended aio holds: a reply that was not taken, or a request that nobody
// wants any more.
static void free_aio_msg(slot *s) {
    nng_msg *msg = nng_aio_get_msg(s->aio);
    if (msg) {
        nng_msg_free(msg);
        nng_aio_set_msg(s->aio, NULL);
    }
}

static void on_sent(srv_nng *t, slot *s) {
    int rv = nng_aio_result(s->aio);
    if (rv != 0) {
        free_aio_msg(s);
        if (rv == NNG_ETIMEDOUT && !conn_of(s->rq.conn)->closing) {
            t->info.closed_slow++;
            attnd_log_some(&t->rates.slow, ATTND_LOG_WARN, "nng",
                           "a client does not read its %u replies: closed",
                           (unsigned)conn_of(s->rq.conn)->unread);
            close_pipe(conn_of(s->rq.conn));
        }
    }
    settle(t, s);
}

// refuse answers EBUSY without the server's part.
static void refuse(srv_nng *t, slot *s, const char *why) {
    attnd_errinfo info;
    t->info.busy++;
    srv_reply_error(&s->rq, attnd_fail(&info, ATTND_EBUSY, "", "%s", why), &info);
}

// take_request checks the bounds for a message of a live connection, and queues it.
static void take_request(srv_nng *t, slot *s, conn *c) {
    srv_request *rq = &s->rq;
    rq->msg = (proto_view){nng_msg_body(s->request), nng_msg_len(s->request)};
    uint32_t magic = 0;
    if (rq->msg.bytes >= sizeof(proto_header)) {
        memcpy(&rq->header, rq->msg.data, sizeof(rq->header));
        magic = rq->header.magic;
    }
    if (magic != PROTO_MAGIC) {
        t->info.closed_garbage++;
        attnd_log_some(&t->rates.garbage, ATTND_LOG_WARN, "nng",
                       "a client sends what is no request: closed");
        close_pipe(c);
        settle(t, s);
    } else if (c->working > t->opts.in_flight) {
        refuse(t, s, "too many requests in flight");
    } else if (c->bytes > t->opts.connection_bytes) {
        refuse(t, s, "too many bytes of requests and unread replies");
    } else {
        list_append(&c->requests, &s->turn);
        if (!list_linked(&c->turn)) {
            list_append(&t->turns, &c->turn);
        }
    }
}

// live_conn returns the connection that a message came from, NULL when it is on its way out.
static conn *live_conn(srv_nng *t, nng_msg *msg) {
    pthread_mutex_lock(&t->lock);
    conn *c = find_conn(t, (uint32_t)nng_msg_get_pipe(msg).id);
    pthread_mutex_unlock(&t->lock);
    return c && c->open && !c->closing ? c : NULL;
}

static void on_received(srv_nng *t, slot *s) {
    t->receiving--;
    conn *c = nng_aio_result(s->aio) == 0 ? live_conn(t, nng_aio_get_msg(s->aio)) : NULL;
    if (!c) {
        free_aio_msg(s);
        rest(t, s);
        return;
    }
    top_up(t);
    memset(&s->rq, 0, sizeof(s->rq));
    s->rq.conn = &c->pub;
    s->rq.arrival_us = attnd_clock_us();
    s->rq.reply_room = t->opts.message_bytes;
    s->state = SLOT_WORKING;
    s->request = nng_aio_get_msg(s->aio);
    nng_aio_set_msg(s->aio, NULL);
    hold_bytes(s, nng_msg_len(s->request));
    t->info.requests++;
    t->info.in_flight++;
    c->working++;
    take_request(t, s, c);
}

// drop_requests lets go of what a lost connection has sent and nobody has looked at.
static void drop_requests(srv_nng *t, conn *c) {
    for (list_node *node; (node = list_first(&c->requests));) {
        list_remove(node);
        settle(t, LIST_ENTRY(node, slot, turn));
    }
    if (list_linked(&c->turn)) {
        list_remove(&c->turn);
    }
}

static void on_conn(srv_nng *t, conn *c, bool added, bool gone) {
    if (added && !gone) {
        c->pub.uid = c->uid;
        c->pub.pid = c->pid;
        c->pub.admin = t->opts.admin;
        c->pub.session = NULL;
        c->pub.opened_ms = attnd_clock_ms();
        c->open = true;
        c->closing = false;
        t->info.connections++;
        if (!t->opts.opened(t->opts.ctx, &c->pub)) {
            close_pipe(c);
        }
    }
    if (gone) {
        // Open until the end, so that the last request let go of does not free it here already:
        // NNG's threads give what is free to the next pipe at once.
        if (c->open) {
            c->closing = true;
            t->info.connections--;
            drop_requests(t, c);
            t->opts.lost(t->opts.ctx, &c->pub);
            c->open = false;
        }
        free_if_unused(t, c);
    }
}

static conn *take_conn_event(srv_nng *t, bool *added, bool *gone) {
    conn *c = NULL;
    pthread_mutex_lock(&t->lock);
    list_node *node = list_first(&t->conn_events);
    if (node) {
        c = LIST_ENTRY(node, conn, event);
        list_remove(node);
        *added = c->added;
        *gone = c->gone;
        c->added = c->gone = false;
    }
    pthread_mutex_unlock(&t->lock);
    return c;
}

static slot *take_slot_event(srv_nng *t) {
    slot *s = NULL;
    pthread_mutex_lock(&t->lock);
    list_node *node = list_first(&t->slot_events);
    if (node) {
        s = LIST_ENTRY(node, slot, event);
        list_remove(node);
    }
    pthread_mutex_unlock(&t->lock);
    return s;
}

// take_events handles what has been posted, up to a bound; false when there may be more.  A slot's
// event is taken before the connections' events are: then the addition of the connection that its
// message came from is among these, or was seen earlier.  A loss may be seen before the last
// messages of its connection, which are then dropped.
static bool take_events(srv_nng *t) {
    for (int i = 0; i < TURN_EVENTS; i++) {
        slot *s = take_slot_event(t);
        bool added, gone;
        for (conn *c; (c = take_conn_event(t, &added, &gone));) {
            on_conn(t, c, added, gone);
        }
        if (!s) {
            return true;
        }
        if (s->state == SLOT_SENDING) {
            on_sent(t, s);
        } else {
            on_received(t, s);
        }
    }
    return false;
}

// dispatch gives one request of each connection in turn to the server, for a bounded time, so that
// a client with many or costly requests delays another by one of them; false when there are more.
static bool dispatch(srv_nng *t) {
    uint64_t start = attnd_clock_us();
    for (list_node *node; (node = list_first(&t->turns));) {
        if (attnd_clock_us() - start > TURN_US) {
            return false;
        }
        conn *c = LIST_ENTRY(node, conn, turn);
        list_node *first = list_first(&c->requests);
        list_remove(node);
        list_remove(first);
        if (!list_empty(&c->requests)) {
            list_append(&t->turns, node);
        }
        t->opts.request(t->opts.ctx, &LIST_ENTRY(first, slot, turn)->rq);
    }
    return true;
}

static void on_async(uv_async_t *async) {
    srv_nng *t = async->data;
    if (t->stopping) {
        return;
    }
    bool all = take_events(t);
    if (!dispatch(t) || !all) {
        uv_async_send(&t->async); // timers and others come first
    }
}

uint64_t srv_nng_expire(srv_nng *t, uint64_t now_ms, uint64_t hello_timeout_ms) {
    uint64_t next = UINT64_MAX;
    for (uint32_t i = 0; i < t->opts.connections; i++) {
        conn *c = &t->conns[i];
        if (!c->open || c->closing || c->pub.session) {
            continue;
        }
        uint64_t at = c->pub.opened_ms + hello_timeout_ms;
        if (at <= now_ms) {
            t->info.closed_idle++;
            attnd_log_some(&t->rates.idle, ATTND_LOG_INFO, "nng",
                           "a connection said no hello in %llu ms: closed",
                           (unsigned long long)hello_timeout_ms);
            close_pipe(c);
        } else if (at < next) {
            next = at;
        }
    }
    return next;
}

// ---- life

static attnd_err nng_failed(int rv, const char *what, attnd_errinfo *info) {
    attnd_err err = rv == NNG_ENOMEM       ? ATTND_ENOMEM
                    : rv == NNG_EADDRINUSE ? ATTND_EEXIST
                                           : ATTND_EIO;
    return attnd_fail(info, err, "listen", "%.120s: %s", what, nng_strerror(rv));
}

static attnd_err listen_on(srv_nng *t, const char *text, attnd_errinfo *info) {
    url *u = &t->urls[t->num_urls];
    bool ipc = strncmp(text, "ipc://", 6) == 0;
    u->path.lock_fd = -1;
    if (!ipc && (t->opts.admin || strncmp(text, "tcp://", 6) != 0)) {
        return attnd_fail(info, ATTND_ENOTSUP, t->opts.admin ? "admin" : "listen",
                          t->opts.admin ? "%.120s: the administration socket is ipc:// only"
                                        : "%.120s: neither ipc:// nor tcp://",
                          text);
    }
    if (strlen(text) >= SRV_URL_BYTES) {
        return attnd_fail(info, ATTND_EINVAL, "listen", "a URL is too long");
    }
    attnd_err err = ipc ? srv_path_claim(&u->path, text + 6, info) : ATTND_OK;
    if (err) {
        return err;
    }
    t->num_urls++; // from here on srv_nng_close releases the path
    int rv = nng_listener_create(&u->listener, t->socket, text);
    if (rv == 0) {
        rv = nng_listener_set_size(u->listener, NNG_OPT_RECVMAXSZ,
                                   t->opts.message_bytes + HOP_BYTES);
    }
    if (rv == 0 && ipc) {
        rv = nng_listener_set_int(u->listener, NNG_OPT_IPC_PERMISSIONS, (int)t->opts.mode);
    } else if (rv == 0) {
        rv = nng_listener_set_bool(u->listener, NNG_OPT_TCP_KEEPALIVE, true);
    }
    if (rv == 0) {
        rv = nng_listener_start(u->listener, 0);
    }
    return rv == 0 ? ATTND_OK : nng_failed(rv, text, info);
}

static void free_memory(srv_nng *t) {
    free(t->conns);
    free(t->slots);
    free(t);
}

static attnd_err open_slots(srv_nng *t, attnd_errinfo *info) {
    for (uint32_t i = 0; i < t->num_slots; i++) {
        slot *s = &t->slots[i];
        s->t = t;
        int rv = nng_ctx_open(&s->ctx, t->socket);
        if (rv == 0) {
            rv = nng_aio_alloc(&s->aio, aio_done, s);
        }
        if (rv != 0) {
            return nng_failed(rv, "a context", info);
        }
        list_append(&t->idle, &s->turn);
    }
    top_up(t);
    return ATTND_OK;
}

static attnd_err open_socket(srv_nng *t, attnd_errinfo *info) {
    int rv = nng_rep0_open(&t->socket);
    if (rv == 0) {
        rv = nng_pipe_notify(t->socket, NNG_PIPE_EV_ADD_PRE, pipe_event, t);
    }
    if (rv == 0) {
        rv = nng_pipe_notify(t->socket, NNG_PIPE_EV_REM_POST, pipe_event, t);
    }
    if (rv != 0) {
        return nng_failed(rv, "a socket", info);
    }
    attnd_err err = open_slots(t, info);
    for (uint32_t i = 0; i < t->opts.num_urls && !err; i++) {
        err = listen_on(t, t->opts.urls[i], info);
    }
    return err;
}

attnd_err srv_nng_open(srv_nng **out, uv_loop_t *loop, const srv_nng_opts *opts,
                       attnd_errinfo *info) {
    srv_nng *t = calloc(1, sizeof(*t));
    if (!t) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for the transport");
    }
    t->opts = *opts;
    t->num_slots = (opts->connections * 3 + 1) * (opts->in_flight + 1);
    t->conns = calloc(opts->connections, sizeof(*t->conns));
    t->slots = calloc(t->num_slots, sizeof(*t->slots));
    if (!t->conns || !t->slots || uv_async_init(loop, &t->async, on_async) != 0) {
        free_memory(t);
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for the transport");
    }
    t->async.data = t;
    for (uint32_t i = 0; i < opts->connections; i++) {
        t->conns[i].pub.ops = &nng_ops;
        list_init(&t->conns[i].requests);
    }
    pthread_mutex_init(&t->lock, NULL);
    list_init(&t->slot_events);
    list_init(&t->conn_events);
    list_init(&t->turns);
    list_init(&t->idle);
    attnd_err err = open_socket(t, info);
    if (err) {
        srv_nng_close(t);
        return err;
    }
    *out = t;
    return ATTND_OK;
}

static void on_closed(uv_handle_t *handle) {
    srv_nng *t = handle->data;
    pthread_mutex_destroy(&t->lock);
    free_memory(t);
}

// The order matters: nobody new, then no callback, then the socket, what connections still hold,
// and the path last.
void srv_nng_close(srv_nng *t) {
    if (!t) {
        return;
    }
    t->stopping = true;
    for (uint32_t i = 0; i < t->num_urls; i++) {
        nng_listener_close(t->urls[i].listener);
    }
    for (uint32_t i = 0; i < t->num_slots && t->slots[i].aio; i++) {
        nng_aio_cancel(t->slots[i].aio); // all at once, since each takes its turn on NNG's threads
    }
    for (uint32_t i = 0; i < t->num_slots && t->slots[i].aio; i++) {
        nng_aio_stop(t->slots[i].aio);
        nng_ctx_close(t->slots[i].ctx);
    }
    nng_close(t->socket);
    for (uint32_t i = 0; i < t->opts.connections; i++) {
        on_conn(t, &t->conns[i], false, t->conns[i].open);
    }
    for (uint32_t i = 0; i < t->num_slots && t->slots[i].aio; i++) {
        slot *s = &t->slots[i];
        free_aio_msg(s);
        nng_aio_free(s->aio);
        nng_msg_free(s->request);
        nng_msg_free(s->reply);
    }
    for (uint32_t i = 0; i < t->num_urls; i++) {
        srv_path_release(&t->urls[i].path);
    }
    uv_close((uv_handle_t *)&t->async, on_closed);
}

void srv_nng_set_send_timeout(srv_nng *t, uint64_t ms) {
    t->opts.send_timeout_ms = ms;
}

void srv_nng_get_info(const srv_nng *t, srv_nng_info *out) {
    *out = t->info;
    srv_nng *mut = (srv_nng *)t;
    pthread_mutex_lock(&mut->lock);
    out->closed_full = t->refused;
    pthread_mutex_unlock(&mut->lock);
}

void srv_nng_fini(void) {
    nng_fini();
}
