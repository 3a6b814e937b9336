// Attends that were started: a fixed pool, and a list of those without a callback yet, which
// attnd_poll walks.  Whoever takes one off the list owns it, so each is called back once, however
// many threads poll.
#include "proto/client/client_attend.h"
#include "proto/clock.h"

static client_async *take_idle(attnd_client *c) {
    pthread_mutex_lock(&c->lock);
    client_async *a = c->idle_asyncs;
    if (a) {
        c->idle_asyncs = a->next;
    }
    pthread_mutex_unlock(&c->lock);
    return a;
}

static void give_idle(attnd_client *c, client_async *a) {
    pthread_mutex_lock(&c->lock);
    a->next = c->idle_asyncs;
    c->idle_asyncs = a;
    pthread_mutex_unlock(&c->lock);
}

static void append_started(attnd_client *c, client_async *a) {
    pthread_mutex_lock(&c->lock);
    client_async **at = &c->started;
    while (*at) {
        at = &(*at)->next;
    }
    a->next = NULL;
    *at = a;
    pthread_mutex_unlock(&c->lock);
}

static attnd_err start(attnd_client *c, client_async *a, attnd_errinfo *info) {
    client_msg m = {0};
    client_start_opts how = {.async = true, .request_id = a->args.request};
    attnd_err err = client_attend_prepare(c, &a->args, &a->model, &m, info);
    if (err) {
        return err;
    }
    client_conn *conn = client_conn_hold(m.conn);
    a->deadline_ms = attnd_clock_ms() + (uint64_t)c->timeout_ms;
    err = client_conn_start(conn, PROTO_ATTEND, &m, a->deadline_ms, &how, &a->flight, info);
    if (err) {
        client_conn_rele(conn);
    }
    return err;
}

attnd_err attnd_attend_start(attnd_client *c, const attnd_attend_args *args, attnd_attend_cb *cb,
                             void *ctx, attnd_errinfo *info) {
    if (c->engine) {
        return attnd_fail(info, ATTND_ENOTSUP, "engine", "an attend by an engine is not started");
    }
    if (!cb) {
        return attnd_fail(info, ATTND_EINVAL, "cb", "cb is NULL");
    }
    client_async *a = take_idle(c);
    if (!a) {
        return attnd_fail(info, ATTND_EBUSY, "", "%d attends are started already",
                          CLIENT_MAX_SLOTS);
    }
    a->args = *args;
    a->cb = cb;
    a->ctx = ctx;
    attnd_err err = start(c, a, info);
    if (err) {
        give_idle(c, a);
    } else {
        append_started(c, a);
    }
    return err;
}

// call_back ends one that is off the list.
static void call_back(attnd_client *c, client_async *a) {
    client_msg m = {0};
    attnd_errinfo info = {.code = ATTND_OK};
    attnd_ran ran = {.splits = 0};
    attnd_err err = client_conn_finish(&a->flight, a->deadline_ms, &m, &info);
    if (!err) {
        err = client_attend_read(client_msg_view(&m), &a->args, &a->model, &ran, &info);
    }
    client_msg_free(&m);
    client_conn_rele(a->flight.conn);
    attnd_attend_cb *cb = a->cb;
    void *ctx = a->ctx;
    give_idle(c, a);
    cb(ctx, err, err ? NULL : &ran, err ? &info : NULL);
}

// take_ended takes the oldest that has ended off the list.  *next_ms is the first deadline of the
// others, UINT64_MAX when there are none.
static client_async *take_ended(attnd_client *c, uint64_t *next_ms) {
    uint64_t now_ms = attnd_clock_ms();
    *next_ms = UINT64_MAX;
    pthread_mutex_lock(&c->lock);
    client_async **at = &c->started;
    while (*at && !client_conn_ready(&(*at)->flight) && now_ms < (*at)->deadline_ms) {
        *next_ms = (*at)->deadline_ms < *next_ms ? (*at)->deadline_ms : *next_ms;
        at = &(*at)->next;
    }
    client_async *a = *at;
    if (a) {
        *at = a->next;
    }
    pthread_mutex_unlock(&c->lock);
    return a;
}

static uint32_t poll_ended(attnd_client *c, uint64_t *next_ms) {
    client_async *a;
    uint32_t num = 0;
    while (num < CLIENT_MAX_SLOTS && (a = take_ended(c, next_ms))) {
        call_back(c, a);
        num++;
    }
    return num;
}

uint32_t attnd_poll(attnd_client *c, int32_t wait_ms) {
    uint64_t until_ms = attnd_clock_ms() + (uint64_t)(wait_ms > 0 ? wait_ms : 0);
    for (;;) {
        client_conn *conn = client_conn_of(c);
        uint32_t seen = client_conn_events(conn); // before the look
        uint64_t next_ms;
        client_conn_await(conn, seen, 0); // takes in what a ring has
        uint32_t num = poll_ended(c, &next_ms);
        bool over = num > 0 || next_ms == UINT64_MAX || attnd_clock_ms() >= until_ms;
        if (!over) {
            client_conn_await(conn, seen, next_ms < until_ms ? next_ms : until_ms);
        }
        client_conn_rele(conn);
        if (over) {
            return num;
        }
    }
}

void client_async_end(attnd_client *c) {
    uint64_t next_ms;
    while (c->started) {
        poll_ended(c, &next_ms);
    }
}
