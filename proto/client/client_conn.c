// What both transports share: references, ids, slots.
//
// A call takes a slot.  No id is given out that is 64 or more above the oldest one without an
// answer, so that a request which is held up on its way never falls out of the daemon's window,
// whatever overtakes it.  A call that would need such an id waits; the price is that during a step
// that waits for blocks only 63 more such requests are made.
#include "proto/client/client_conn.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "proto/clock.h"

void client_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

bool client_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ms) {
    struct timespec until = {.tv_sec = (time_t)(deadline_ms / 1000),
                             .tv_nsec = (long)(deadline_ms % 1000) * 1000000};
    return pthread_cond_timedwait(cond, lock, &until) != ETIMEDOUT;
}

void client_conn_init(client_conn *conn, const client_conn_ops *ops) {
    conn->ops = ops;
    atomic_init(&conn->refs, 1);
    pthread_mutex_init(&conn->lock, NULL);
    client_cond_init(&conn->idle_cond);
    conn->max_slots = 1;
    conn->other_id = UINT64_C(1) << 63; // a range of its own
}

void client_conn_fini(client_conn *conn) {
    pthread_cond_destroy(&conn->idle_cond);
    pthread_mutex_destroy(&conn->lock);
}

client_conn *client_conn_hold(client_conn *conn) {
    atomic_fetch_add_explicit(&conn->refs, 1, memory_order_relaxed);
    return conn;
}

void client_conn_rele(client_conn *conn) {
    if (atomic_fetch_sub_explicit(&conn->refs, 1, memory_order_acq_rel) == 1) {
        conn->ops->free(conn);
    }
}

void client_conn_lose(client_conn *conn, attnd_err err) {
    if (!conn->lost) {
        conn->lost = err;
        conn->ops->lose(conn);
        pthread_cond_broadcast(&conn->idle_cond);
    }
}

void client_conn_close(client_conn *conn) {
    if (conn) {
        pthread_mutex_lock(&conn->lock);
        client_conn_lose(conn, ATTND_ECONN);
        pthread_mutex_unlock(&conn->lock);
        client_conn_rele(conn);
    }
}

void client_conn_limit(client_conn *conn, uint32_t num_slots) {
    pthread_mutex_lock(&conn->lock);
    conn->max_slots = num_slots < CLIENT_MAX_SLOTS ? num_slots : CLIENT_MAX_SLOTS;
    pthread_mutex_unlock(&conn->lock);
}

void client_conn_ids(client_conn *conn, uint64_t last) {
    pthread_mutex_lock(&conn->lock);
    conn->once_id = last > conn->once_id ? last : conn->once_id;
    pthread_mutex_unlock(&conn->lock);
}

uint64_t client_conn_last_id(client_conn *conn) {
    pthread_mutex_lock(&conn->lock);
    uint64_t last = conn->once_id;
    pthread_mutex_unlock(&conn->lock);
    return last;
}

attnd_err client_conn_lost(const client_conn *conn, attnd_errinfo *info) {
    return attnd_fail(info, conn->lost, "",
                      conn->lost == ATTND_EPROTO ? "the daemon's end of the ring makes no sense"
                                                 : "the connection to the daemon is lost");
}

attnd_err client_msg_alloc(client_conn *conn, client_msg *out, uint64_t bytes, uint64_t reply_bytes,
                           uint64_t deadline_ms, attnd_errinfo *info) {
    uint64_t size = bytes < PROTO_BODY ? PROTO_BODY : bytes;
    attnd_err err = conn->ops->alloc(conn, out, size, reply_bytes, deadline_ms, info);
    if (!err) {
        out->conn = client_conn_hold(conn);
    }
    return err;
}

void client_msg_free(client_msg *m) {
    if (m->conn) {
        client_conn *conn = m->conn;
        conn->ops->msg_free(m);
        client_conn_rele(conn);
    }
    *m = (client_msg){0};
}

bool client_conn_keeps(const client_conn *conn) {
    return conn->ops->again != NULL && !conn->engine && !conn->service;
}

attnd_err client_msg_again(client_msg *out, const client_msg *m, attnd_errinfo *info) {
    attnd_err err = m->conn->ops->again(m, info);
    if (!err) {
        *out = *m;
        client_conn_hold(m->conn);
    }
    return err;
}

// ---- slots

// window_full says whether the next num once ids would be too far above the oldest without an
// answer.  Called with the lock held.
static bool window_full(const client_conn *conn, uint32_t num) {
    uint64_t oldest = conn->once_id + 1;
    for (uint32_t i = 0; i < conn->num_slots; i++) {
        uint64_t id = conn->slots[i].once_id;
        oldest = id && id < oldest ? id : oldest;
    }
    return conn->once_id + num - oldest >= PROTO_REQUEST_WINDOW;
}

// must_wait says whether a call has to wait for another one to end.  Called with the lock held.
static bool must_wait(const client_conn *conn, uint32_t num_once) {
    return (!conn->idle && conn->num_slots >= conn->max_slots) ||
           (num_once && window_full(conn, num_once));
}

// take_slot waits until deadline_ms for a slot and num_once ids.  Called with the lock
// held.
static attnd_err take_slot(client_conn *conn, uint32_t num_once, uint64_t deadline_ms,
                           client_slot **out, attnd_errinfo *info) {
    bool in_time = true;
    while (!conn->lost && must_wait(conn, num_once)) {
        if (!in_time) {
            return attnd_fail(info, ATTND_ETIMEDOUT, "", "waited for other requests in flight");
        }
        in_time = client_cond_wait(&conn->idle_cond, &conn->lock, deadline_ms);
    }
    if (conn->lost) {
        return client_conn_lost(conn, info);
    }
    if (conn->idle) {
        *out = conn->idle;
        conn->idle = conn->idle->next;
        return ATTND_OK;
    }
    client_slot *s = &conn->slots[conn->num_slots];
    s->idx = conn->num_slots;
    attnd_err err = conn->ops->prepare(conn, s, info);
    if (!err) {
        conn->num_slots++;
        *out = s;
    }
    return err;
}

void client_conn_give(client_conn *conn, client_slot *s) {
    s->once_id = 0;
    s->next = conn->idle;
    conn->idle = s;
    pthread_cond_broadcast(&conn->idle_cond); // not all wait for the same
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

// ---- calls

static void give(client_conn *conn, client_slot *s) {
    pthread_mutex_lock(&conn->lock);
    client_conn_give(conn, s);
    pthread_mutex_unlock(&conn->lock);
}

// set_ids gives out the request's ids.  Lock held.
static void set_ids(client_conn *conn, proto_op op, client_slot *s, client_msg *m,
                    const client_start_opts *how) {
    if (is_once(op)) {
        s->once_id = conn->once_id + 1;
        if (how && how->second_id) {
            uint64_t second = how->second_again_id ? how->second_again_id : ++conn->once_id;
            memcpy(m->data + how->second_id, &second, sizeof(second));
            if (how->second_request_id) {
                *how->second_request_id = second;
            }
            s->once_id = second < s->once_id ? second : s->once_id;
        }
        s->id = how && how->again_id ? how->again_id : ++conn->once_id;
        s->once_id = s->id < s->once_id ? s->id : s->once_id;
    } else {
        s->once_id = 0;
        s->id = ++conn->other_id;
    }
    s->async = how && how->async;
    if (how && how->request_id) {
        __atomic_store_n(how->request_id, s->id, __ATOMIC_RELEASE);
    }
    proto_write_header(m->data, op, s->id, ATTND_OK, m->bytes);
}

attnd_err client_conn_start(client_conn *conn, proto_op op, client_msg *m, uint64_t deadline_ms,
                            const client_start_opts *how, client_flight *out, attnd_errinfo *info) {
    client_slot *s = NULL;
    uint32_t num_once = !is_once(op) ? 0 : how && how->second_id ? 2 : 1;
    pthread_mutex_lock(&conn->lock);
    attnd_err err = take_slot(conn, num_once, deadline_ms, &s, info);
    if (err) {
        pthread_mutex_unlock(&conn->lock);
        client_msg_free(m);
        return err;
    }
    set_ids(conn, op, s, m, how);
    *out = (client_flight){conn, s, op, s->id};
    if ((err = conn->ops->send(conn, s, m, deadline_ms, info))) {
        give(conn, s);
    }
    return err;
}

bool client_conn_ready(const client_flight *f) {
    return f->conn->ops->ready(f->conn, f->slot);
}

attnd_err client_conn_finish(client_flight *f, uint64_t deadline_ms, client_msg *m,
                             attnd_errinfo *info) {
    bool ended = true;
    attnd_err err = f->conn->ops->wait(f->conn, f->slot, deadline_ms, m, &ended, info);
    if (ended) {
        give(f->conn, f->slot);
    }
    if (!err && (err = proto_read_reply(client_msg_view(m), f->op, f->id, info))) {
        client_msg_free(m);
    }
    return err;
}

attnd_err client_conn_call(client_conn *conn, proto_op op, client_msg *m, int64_t timeout_ms,
                           const client_start_opts *how, attnd_errinfo *info) {
    uint64_t deadline_ms = attnd_clock_ms() + (uint64_t)timeout_ms;
    client_flight f;
    attnd_err err = client_conn_start(conn, op, m, deadline_ms, how, &f, info);
    return err ? err : client_conn_finish(&f, deadline_ms, m, info);
}

bool client_conn_is_lost(client_conn *conn) {
    pthread_mutex_lock(&conn->lock);
    bool lost = conn->lost != ATTND_OK;
    pthread_mutex_unlock(&conn->lock);
    return lost;
}

uint32_t client_conn_events(client_conn *conn) {
    return atomic_load(&conn->events);
}

void client_conn_await(client_conn *conn, uint32_t seen, uint64_t deadline_ms) {
    conn->ops->await(conn, seen, deadline_ms);
}
