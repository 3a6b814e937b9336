// The connection over a ring (proto_ring.h): a client_conn whose messages lie in the shared region.
//
//     start   write the submission, store sq_tail, ring the bell when the daemon sleeps
//     wait    one waiting thread leads: it spins on cq_tail, then sleeps on it as a futex; what it
//             finds it hands to whoever waits for it.  The others sleep on a condition variable of
//             their own, so that however many wait, one thread spins.  A leader that goes lets the
//             next one lead.
//
// `user` of a submission is its slot's index.  A request whose time is over stays in its slot, and
// its message in its place, until the completion comes: the daemon may still write there.
//
// The other end is not believed: indices, users and lengths are loaded once and checked; nonsense
// loses the connection with ATTND_EPROTO.  Replies are shared memory: their readers copy, then
// check.
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/client_area.h"
#include "proto/client/client_attach.h"
#include "proto/client/client_conn.h"
#include "proto/client/client_service.h"
#include "proto/clock.h"
#include "proto/list.h"
#include "proto/pause.h"

enum {
    ENTRIES = 2 * CLIENT_MAX_SLOTS,
    FUTEX_MS = 20, // between two looks at the socket: the daemon's death wakes nobody
    YIELD_US = 5,  // of spinning, before the processor is offered to others between two looks
};

// waiter is a thread that waits, on its stack.
typedef struct waiter {
    list_node node; // in conn->waiters
    pthread_cond_t cond;
} waiter;

typedef struct ring_slot {
    atomic_bool done;
    bool abandoned; // nobody waits any more
    client_msg msg; // with the place that the daemon may write
    uint32_t reply_room, reply_bytes;
    attnd_err status;
    waiter *waiter;
} ring_slot;

typedef struct ring_conn {
    client_conn base;
    int fd;
    uint8_t *region;
    proto_ring *head;
    proto_ring_layout layout;
    uint64_t spin_us;
    uint32_t sq_tail;    // lock
    atomic_uint cq_head; // lock to change
    atomic_bool lost;    // as base.lost
    bool leads;          // a thread does
    list_node waiters;   // those that do not lead
    client_area area;
    ring_slot slots[CLIENT_MAX_SLOTS];
} ring_conn;

static ring_conn *ring_of(const client_conn *base) {
    return (ring_conn *)(uintptr_t)base; // its first member
}

// ---- messages

static uint64_t align(uint64_t bytes) {
    return (bytes + PROTO_RING_ALIGN - 1) / PROTO_RING_ALIGN * PROTO_RING_ALIGN;
}

static attnd_err alloc(client_conn *base, client_msg *out, uint64_t bytes, uint64_t reply_bytes,
                       uint64_t deadline_ms, attnd_errinfo *info) {
    ring_conn *conn = ring_of(base);
    uint64_t room = reply_bytes < PROTO_RING_MIN_REPLY ? PROTO_RING_MIN_REPLY : reply_bytes;
    uint64_t most = conn->area.bytes;
    if (bytes > UINT32_MAX / 2 || room > UINT32_MAX / 2 || align(bytes) + align(room) > most) {
        return attnd_fail(info, ATTND_EMSGSIZE, "ring_bytes",
                          "message of %llu bytes and reply of %llu, the ring has %llu",
                          (unsigned long long)bytes, (unsigned long long)room,
                          (unsigned long long)most);
    }
    client_place *place = NULL;
    bool in_time = true;
    pthread_mutex_lock(&base->lock);
    while (!base->lost && in_time &&
           !(place = client_area_take(&conn->area, align(bytes) + room))) {
        in_time = client_cond_wait(&base->idle_cond, &base->lock, deadline_ms);
    }
    attnd_err err = place        ? ATTND_OK
                    : base->lost ? client_conn_lost(base, info)
                                 : attnd_fail(info, ATTND_ETIMEDOUT, "ring_bytes",
                                              "waited for memory of the ring");
    pthread_mutex_unlock(&base->lock);
    if (err) {
        return err;
    }
    *out = (client_msg){
        .data = conn->region + conn->layout.data_off + place->off, .bytes = bytes, .handle = place};
    return ATTND_OK;
}

static void msg_free(client_msg *m) {
    pthread_mutex_lock(&m->conn->lock);
    client_area_give(&ring_of(m->conn)->area, m->handle);
    pthread_cond_broadcast(&m->conn->idle_cond);
    pthread_mutex_unlock(&m->conn->lock);
}

static attnd_err again(const client_msg *m, attnd_errinfo *info) {
    client_place *place = m->handle;
    attnd_err err = ATTND_OK;
    pthread_mutex_lock(&m->conn->lock);
    if (place->refs > 1) {
        err = attnd_fail(info, ATTND_EBUSY, "buffers", "the buffers are in use");
    } else {
        client_area_hold(place);
    }
    pthread_mutex_unlock(&m->conn->lock);
    return err;
}

// ---- submissions

static attnd_err prepare(client_conn *base, client_slot *s, attnd_errinfo *info) {
    (void)base, (void)s, (void)info;
    return ATTND_OK;
}

static void bell(ring_conn *conn) {
    proto_ring_fence();
    if (proto_ring_load(&conn->head->daemon_sleeps)) {
        // A failure is not looked at: whoever waits sees the socket closed.
        (void)!send(conn->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

static attnd_err send_msg(client_conn *base, client_slot *s, client_msg *m, uint64_t deadline_ms,
                          attnd_errinfo *info) {
    ring_conn *conn = ring_of(base);
    ring_slot *r = &conn->slots[s->idx];
    const client_place *place = m->handle;
    uint64_t end = place->off + place->bytes, reply = place->off + align(m->bytes);
    (void)deadline_ms, (void)info;
    atomic_store_explicit(&r->done, false, memory_order_relaxed);
    r->abandoned = false;
    r->msg = *m;
    r->waiter = NULL;
    r->reply_room = (uint32_t)(end - reply);
    proto_ring_submit entry = {.msg_off = conn->layout.data_off + place->off,
                               .msg_bytes = (uint32_t)m->bytes,
                               .reply_bytes = r->reply_room,
                               .reply_off = conn->layout.data_off + reply,
                               .user = s->idx};
    uint64_t at = conn->sq_tail % conn->layout.entries * sizeof(entry);
    memcpy(conn->region + conn->layout.sq_off + at, &entry, sizeof(entry));
    proto_ring_store(&conn->head->sq_tail, ++conn->sq_tail);
    pthread_mutex_unlock(&base->lock);
    *m = (client_msg){0};
    bell(conn);
    return ATTND_OK;
}

// ---- completions

// release ends a slot that nobody waits for.  Lock held.
static void release(ring_conn *conn, client_slot *s) {
    ring_slot *r = &conn->slots[s->idx];
    client_area_give(&conn->area, r->msg.handle);
    r->msg = (client_msg){0};
    client_conn_give(&conn->base, s);
    atomic_fetch_sub(&conn->base.refs, 1); // the message's; whoever holds the lock has one too
}

// complete is false when the completion is nonsense.  Lock held.
static bool complete(ring_conn *conn, const proto_ring_complete *c) {
    if (c->user >= conn->base.num_slots) {
        return false;
    }
    ring_slot *r = &conn->slots[c->user];
    client_slot *s = &conn->base.slots[c->user];
    if (!r->msg.conn || atomic_load(&r->done) || c->reply_bytes > r->reply_room) {
        return false;
    }
    r->reply_bytes = c->reply_bytes;
    r->status = (attnd_err)c->status;
    if (r->abandoned) {
        release(conn, s);
        return true;
    }
    if (s->async) {
        atomic_fetch_add(&conn->base.events, 1);
    }
    atomic_store_explicit(&r->done, true, memory_order_release);
    if (r->waiter) {
        pthread_cond_signal(&r->waiter->cond);
    }
    return true;
}

// harvest takes all completions there are.  Lock held.
static void harvest(ring_conn *conn) {
    uint32_t head = atomic_load_explicit(&conn->cq_head, memory_order_relaxed);
    uint32_t tail = proto_ring_load(&conn->head->cq_tail);
    bool events = false;
    if (conn->base.lost || tail == head) {
        return;
    }
    if (tail - head > conn->layout.entries) {
        client_conn_lose(&conn->base, ATTND_EPROTO);
        return;
    }
    for (; head != tail; head++) {
        proto_ring_complete c;
        uint64_t at = head % conn->layout.entries * sizeof(c);
        proto_copy(&c, conn->region + conn->layout.cq_off + at, sizeof(c));
        if (!complete(conn, &c)) {
            client_conn_lose(&conn->base, ATTND_EPROTO);
            return;
        }
        events |= conn->base.slots[c.user].async;
    }
    atomic_store_explicit(&conn->cq_head, head, memory_order_release);
    proto_ring_store(&conn->head->cq_head, head);
    if (events) { // whose waiters are not known
        LIST_FOREACH (&conn->waiters, node) {
            pthread_cond_signal(&LIST_ENTRY(node, waiter, node)->cond);
        }
    }
}

// ---- waiting

// goal is what a thread waits for: a slot, or (NULL) any event.
typedef struct goal {
    const ring_slot *slot;
    uint32_t seen;
} goal;

static bool reached(const ring_conn *conn, const goal *g) {
    return g->slot ? atomic_load_explicit(&g->slot->done, memory_order_acquire)
                   : atomic_load(&conn->base.events) != g->seen;
}

static bool hung_up(const ring_conn *conn) {
    struct pollfd p = {.fd = conn->fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

// sleep_once waits for cq_tail to leave `seen`, for a while.
static void sleep_once(ring_conn *conn, uint32_t seen, uint64_t left_ms) {
    uint64_t ms = left_ms < FUTEX_MS ? left_ms : FUTEX_MS;
    struct timespec bound = {.tv_nsec = (long)ms * 1000000L};
    proto_ring_store(&conn->head->client_waits, 1);
    proto_ring_fence();
    syscall(SYS_futex, &conn->head->cq_tail, FUTEX_WAIT, seen, &bound, NULL, 0);
    proto_ring_store(&conn->head->client_waits, 0);
}

// lead watches the queue, without the lock, until there is something in it, the goal was reached
// by another's harvest, or it has looked for long enough.  It reads cq_head before it looks at the
// goal: who harvests does it in the opposite order, so a stale cq_head never lets it sleep.
//
// What is waited for may need this very processor, where the kernel has put both ends.
static void lead(ring_conn *conn, const goal *g, uint64_t *spin_until_us, uint64_t deadline_ms) {
    uint64_t alone_until_us = attnd_clock_us() + YIELD_US;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&conn->cq_head, memory_order_acquire);
        if (proto_ring_load(&conn->head->cq_tail) != seen || reached(conn, g) ||
            atomic_load(&conn->lost)) {
            return;
        }
        uint64_t now_us = attnd_clock_us();
        if (now_us < *spin_until_us) {
            if (now_us < alone_until_us) {
                attnd_pause();
            } else {
                sched_yield();
            }
            continue;
        }
        if (now_us / 1000 < deadline_ms) {
            sleep_once(conn, seen, deadline_ms - now_us / 1000);
        }
        return;
    }
}

static void check_peer(ring_conn *conn) {
    harvest(conn);
    if (!conn->base.lost && hung_up(conn)) {
        harvest(conn); // what it had written before
        client_conn_lose(&conn->base, ATTND_ECONN);
    }
}

// follow sleeps until it is woken, because the goal is reached or nobody leads.
static void follow(ring_conn *conn, waiter *w, uint64_t deadline_ms) {
    list_append(&conn->waiters, &w->node);
    client_cond_wait(&w->cond, &conn->base.lock, deadline_ms);
    list_remove(&w->node);
}

static void next_leader(ring_conn *conn) {
    list_node *node = list_first(&conn->waiters);
    if (!conn->leads && node) {
        pthread_cond_signal(&LIST_ENTRY(node, waiter, node)->cond);
    }
}

// wait_until waits until the goal is reached, the connection is lost, or deadline_ms.  Lock held.
static void wait_until(ring_conn *conn, const goal *g, ring_slot *slot, uint64_t deadline_ms) {
    uint64_t spin_until_us = attnd_clock_us() + conn->spin_us;
    waiter w = {.node = {0}};
    bool has_cond = false;
    harvest(conn);
    while (!reached(conn, g) && !conn->base.lost && attnd_clock_ms() < deadline_ms) {
        if (!conn->leads) {
            conn->leads = true;
            pthread_mutex_unlock(&conn->base.lock);
            lead(conn, g, &spin_until_us, deadline_ms);
            pthread_mutex_lock(&conn->base.lock);
            conn->leads = false;
            harvest(conn);
            if (!reached(conn, g) && attnd_clock_us() >= spin_until_us) {
                check_peer(conn);
            }
        } else {
            if (!has_cond) {
                client_cond_init(&w.cond);
                has_cond = true;
            }
            if (slot) {
                slot->waiter = &w;
            }
            follow(conn, &w, deadline_ms);
        }
    }
    if (slot) {
        slot->waiter = NULL;
    }
    next_leader(conn);
    if (has_cond) {
        pthread_cond_destroy(&w.cond);
    }
}

static bool ready(const client_conn *base, const client_slot *s) {
    return atomic_load_explicit(&ring_of(base)->slots[s->idx].done, memory_order_acquire) ||
           atomic_load(&ring_of(base)->lost);
}

// take_reply makes the completed slot's place a reply.  Lock held.
static void take_reply(ring_conn *conn, ring_slot *r, client_msg *m) {
    const client_place *place = r->msg.handle;
    uint64_t at = place->off + place->bytes - r->reply_room;
    *m = r->msg;
    m->data = conn->region + conn->layout.data_off + at;
    m->bytes = r->reply_bytes;
    r->msg = (client_msg){0};
}

static attnd_err wait_reply(client_conn *base, client_slot *s, uint64_t deadline_ms, client_msg *m,
                            bool *ended, attnd_errinfo *info) {
    ring_conn *conn = ring_of(base);
    ring_slot *r = &conn->slots[s->idx];
    goal g = {.slot = r};
    attnd_err err = ATTND_OK;
    pthread_mutex_lock(&base->lock);
    wait_until(conn, &g, r, deadline_ms);
    if (atomic_load(&r->done)) {
        take_reply(conn, r, m);
        atomic_store(&r->done, false);
        if (!m->bytes) {
            err = attnd_fail(info, r->status < 0 ? r->status : ATTND_EPROTO, "",
                             "completion without a reply");
        }
    } else if (base->lost) {
        err = client_conn_lost(base, info);
        *m = r->msg;
        r->msg = (client_msg){0};
    } else {
        err = attnd_fail(info, ATTND_ETIMEDOUT, "", "no reply in time");
        r->abandoned = true;
        *ended = false;
    }
    pthread_mutex_unlock(&base->lock);
    if (err && *ended) {
        client_msg_free(m);
    }
    return err;
}

static void await(client_conn *base, uint32_t seen, uint64_t deadline_ms) {
    goal g = {.seen = seen};
    pthread_mutex_lock(&base->lock);
    wait_until(ring_of(base), &g, NULL, deadline_ms);
    pthread_mutex_unlock(&base->lock);
}

// ---- life

static void lose(client_conn *base) {
    ring_conn *conn = ring_of(base);
    atomic_store(&conn->lost, true);
    if (base->service) {
        shutdown(conn->fd, SHUT_RD);   // for who watches it; the daemon hears when the streams end
    } else if (!base->engine) {        // else when nothing attends any more: free_conn
        shutdown(conn->fd, SHUT_RDWR); // the session ends now, whoever still holds a reference
    }
    LIST_FOREACH (&conn->waiters, node) {
        pthread_cond_signal(&LIST_ENTRY(node, waiter, node)->cond);
    }
    for (uint32_t i = 0; i < base->num_slots; i++) {
        if (conn->slots[i].abandoned && conn->slots[i].msg.conn) {
            release(conn, &base->slots[i]);
        }
    }
}

static void free_conn(client_conn *base) {
    ring_conn *conn = ring_of(base);
    if (base->engine) {
        base->engine->close(base->engine_state);
    }
    client_service_close(base->service);
    if (base->engine || base->service) { // arena and region are not mapped any more
        client_attach_leave(conn->fd);
    }
    munmap(conn->region, conn->layout.bytes);
    close(conn->fd);
    client_conn_fini(base);
    free(conn);
}

static const client_conn_ops ring_ops = {
    alloc, msg_free, again, prepare, send_msg, ready, wait_reply, await, lose, free_conn,
};

static attnd_err open_engine(const client_ring_opts *opts, client_attached *a, void **state,
                             attnd_errinfo *info) {
    attnd_engine_opts engine = {.fd = a->arena_fd,
                                .bytes = a->arena.bytes,
                                .deterministic = a->arena.flags & PROTO_ARENA_DETERMINISTIC,
                                .threads = opts->engine_threads};
    memcpy(engine.device, a->arena.device, sizeof(engine.device));
    return opts->engine->open(state, &engine, info);
}

// daemon_gone is called on the thread that watches the socket.
static void daemon_gone(void *ctx) {
    ring_conn *conn = ctx;
    pthread_mutex_lock(&conn->base.lock);
    check_peer(conn);
    pthread_mutex_unlock(&conn->base.lock);
}

// open_with opens what the engine needs of an attached ring.
static attnd_err open_with(ring_conn *conn, const client_ring_opts *opts, client_attached *a,
                           attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    if (opts->engine && opts->engine->service) {
        err = client_service_open(&conn->base.service, &conn->base, opts->engine->service, a,
                                  daemon_gone, info);
    } else if (opts->engine) {
        err = open_engine(opts, a, &conn->base.engine_state, info);
        conn->base.engine = err ? NULL : opts->engine;
    }
    client_attached_close(a);
    return err;
}

static ring_conn *make_conn(const client_attached *a, uint32_t spin_us) {
    ring_conn *conn = calloc(1, sizeof(*conn));
    if (conn) {
        client_conn_init(&conn->base, &ring_ops);
        conn->fd = a->fd;
        conn->region = a->base;
        conn->head = (proto_ring *)(void *)a->base;
        conn->layout = a->layout;
        conn->spin_us = spin_us;
        list_init(&conn->waiters);
        client_area_init(&conn->area, a->layout.data_bytes);
    }
    return conn;
}

// ask_region fills in what is asked for in service mode.
static attnd_err ask_region(const client_ring_opts *opts, proto_region_ask *out,
                            attnd_errinfo *info) {
    bool mps = false;
    *out = (proto_region_ask){.bytes = opts->region_bytes, .num_flags = PROTO_REGION_MAX_FLAGS};
    attnd_err err = opts->engine->service->device(out->device, &mps, info);
    out->flags = mps ? PROTO_REGION_MPS | PROTO_REGION_PAIRS : 0;
    return err;
}

attnd_err client_ring_open(client_conn **out, const client_ring_opts *opts, client_most *most,
                           attnd_errinfo *info) {
    bool service = opts->engine && opts->engine->service;
    proto_attach ask = {.magic = PROTO_RING_MAGIC,
                        .version = PROTO_VERSION,
                        .flags = service        ? PROTO_ATTACH_REGION
                                 : opts->engine ? PROTO_ATTACH_ARENA
                                                : 0,
                        .entries = ENTRIES,
                        .data_bytes = opts->data_bytes};
    proto_region_ask region = {.bytes = 0};
    if (opts->engine && !service) {
        memcpy(ask.secret, opts->engine_key, sizeof(ask.secret));
    }
    client_attached a;
    *most = (client_most){.bytes = 0};
    attnd_err err = service ? ask_region(opts, &region, info) : ATTND_OK;
    if (err || (err = client_attach(&a, opts->path, &ask, &region, opts->timeout_ms, most, info))) {
        return err;
    }
    ring_conn *conn = make_conn(&a, opts->spin_us);
    if (!conn) {
        err = attnd_fail(info, ATTND_ENOMEM, "", "no memory for a connection");
    } else {
        err = open_with(conn, opts, &a, info);
    }
    if (err) {
        client_attached_close(&a);
        munmap(a.base, a.layout.bytes);
        client_attach_leave(a.fd);
        close(a.fd);
        if (conn) {
            client_conn_fini(&conn->base);
        }
        free(conn);
        return err;
    }
    *out = &conn->base;
    return ATTND_OK;
}
