// The transport of rings.
//
//     attach socket: accept -> one proto_attach -> ring made, sent -> doorbells -> closed
//     with a region: ... -> ring made -> region made beside the loop -> both sent -> ...
//     loop:          asleep --doorbell, completion--> polls (srv_spin) --spin_us--> asleep
//
// Polling.  Within a slice every ring gets up to BURST submissions a turn, so that no client can
// keep the others waiting.  Clients that wait for completions are woken at the end of their ring's
// turn, not at the first one.
//
// A request is a slot of its connection, from the array made at the start: in_flight of them, and
// one to answer EBUSY with.
#include "server/srv_rings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_asked.h"
#include "server/srv_attach.h"
#include "server/srv_ring.h"
#include "server/srv_spin.h"

enum {
    BURST = 16,   // submissions of one ring in a turn
    PACKETS = 16, // of one connection, and connections of the socket, in one event
    HEARD = 1024, // packets of a connection at its end: more than a socket of the usual size holds
};

typedef struct slot {
    srv_request rq;
    list_node node; // in conn->free_slots
    uint64_t user;
    uint8_t *reply;
    uint32_t reply_bytes; // of the reply that was made
} slot;

// gifts is what goes out with a ring; descriptors are -1 where there is none.
typedef struct gifts {
    int ring_fd, flags_fd; // closed when they are sent, or the connection is closed
    int arena_fd;          // the server's
    proto_attach_arena arena;
} gifts;

typedef struct conn {
    srv_conn pub;
    srv_rings *t;
    list_node node; // in t->rings when it has a ring and is open; in t->free when it is nothing
    uv_poll_t poll;
    int fd;
    bool open;   // the socket is
    bool handle; // poll is not closed yet
    srv_ring ring;
    srv_region_place place; // of its region
    gifts gifts;
    slot *slots; // [in_flight + 1]
    list_node free_slots;
    uint32_t in_flight;
    bool in_turn;     // its clients are woken at the end of the turn
    uint32_t process; // of t->opts.processes when pub.arena
    bool left;        // it has no descriptor of arena or region, or says that it keeps none
} conn;

struct srv_rings {
    srv_rings_opts opts;
    srv_attach socket;
    uv_poll_t listen;
    srv_spin spin;
    bool stopping;
    uint32_t handles; // not closed yet
    conn *conns;      // [opts.connections]
    slot *slots;      // [opts.connections, in_flight + 1]
    list_node rings, free;
    srv_rings_info info;
    struct {
        attnd_log_rate broken, refused, rights, idle;
    } rates;
};

static slot *slot_of(srv_request *rq) {
    return LIST_ENTRY(rq, slot, rq);
}

static conn *conn_of(srv_conn *pub) {
    return LIST_ENTRY(pub, conn, pub);
}

static conn *ring_conn(list_node *node) {
    return LIST_ENTRY(node, conn, node);
}

// ---- end of a connection

static void free_memory(srv_rings *t) {
    free(t->conns);
    free(t->slots);
    free(t);
}

static void handle_gone(srv_rings *t) {
    if (--t->handles == 0 && t->stopping) {
        free_memory(t);
    }
}

static void close_gifts(gifts *g) {
    if (g->ring_fd >= 0) {
        close(g->ring_fd);
    }
    if (g->flags_fd >= 0) {
        close(g->flags_fd);
    }
    *g = (gifts){-1, -1, -1, {.magic = PROTO_RING_MAGIC}};
}

// release gives the connection's place back once nothing uses it.
static void release(conn *c) {
    srv_rings *t = c->t;
    if (c->open || c->handle || c->pub.arena || c->in_flight || list_linked(&c->node)) {
        return;
    }
    if (!srv_regions_leave(t->opts.regions, &c->place, c->left)) {
        return; // until on_region_gone
    }
    if (c->ring.base) {
        t->info.ring_bytes -= c->ring.layout.bytes;
        srv_ring_close(&c->ring);
    }
    list_append(&t->free, &c->node);
}

static void on_region_gone(srv_region_place *place) {
    conn *c = LIST_ENTRY(place, conn, place);
    if (c->t->stopping) {
        handle_gone(c->t);
    } else {
        release(c);
    }
}

// on_gone ends what a connection was, once its client cannot touch the arena any more.
static void on_gone(void *ctx) {
    conn *c = ctx;
    c->pub.arena = false;
    c->t->opts.lost(c->t->opts.ctx, &c->pub);
    release(c);
}

static void on_conn_closed(uv_handle_t *handle) {
    conn *c = handle->data;
    srv_rings *t = c->t;
    c->handle = false;
    if (!t->stopping && c->pub.arena && !c->left) {
        srv_process_await(t->opts.processes, c->process, on_gone, c);
    } else if (!t->stopping) {
        if (c->pub.arena) {
            srv_process_remove(t->opts.processes, c->process);
        }
        on_gone(c);
    }
    handle_gone(t);
}

// is_left is true for a packet by which the client says that it keeps nothing.
static bool is_left(const srv_asked *packet, size_t bytes) {
    proto_attach_left left;
    memcpy(&left, packet, sizeof(left));
    return bytes == sizeof(left) && left.magic == PROTO_ATTACH_LEFT;
}

// hear_out looks for that among what has come and was not read: the end of the session can be heard
// of by its other connection first; and the end of a socket in which the client has left something
// unread is told before what it sent.
static void hear_out(conn *c) {
    srv_asked packet;
    size_t bytes;
    for (int i = 0; i < HEARD && !c->left; i++) {
        srv_attach_event event = srv_attach_recv(c->fd, &packet, sizeof(packet), &bytes);
        if (event == SRV_ATTACH_NONE) {
            return;
        }
        c->left = event == SRV_ATTACH_PACKET && is_left(&packet, bytes);
    }
}

// close_conn: lost follows when the loop has closed the handle, never from inside.
static void close_conn(conn *c) {
    if (!c->open) {
        return;
    }
    if (c->pub.region || c->pub.arena) {
        hear_out(c);
    }
    c->open = false;
    c->t->info.connections--;
    if (list_linked(&c->node)) {
        list_remove(&c->node);
        c->t->info.rings--;
    }
    uv_close((uv_handle_t *)&c->poll, on_conn_closed); // stops the polling of fd
    close(c->fd);
    close_gifts(&c->gifts);
}

// ---- requests

static attnd_err reply_alloc(srv_request *rq, size_t bytes, void **out, attnd_errinfo *info) {
    slot *s = slot_of(rq);
    if (bytes > rq->reply_room) {
        return attnd_fail(info, ATTND_EMSGSIZE, "reply_bytes",
                          "the reply has %zu bytes, its place %zu", bytes, rq->reply_room);
    }
    s->reply_bytes = (uint32_t)bytes;
    *out = s->reply;
    return ATTND_OK;
}

static void end_request(slot *s) {
    conn *c = conn_of(s->rq.conn);
    list_append(&c->free_slots, &s->node);
    c->in_flight--;
    c->t->info.in_flight--;
    release(c);
}

static void reply_send(srv_request *rq) {
    slot *s = slot_of(rq);
    conn *c = conn_of(rq->conn);
    if (c->open) {
        srv_ring_post(&c->ring, s->user, s->reply_bytes, rq->status);
        if (!c->in_turn) {
            srv_ring_wake(&c->ring);
            srv_spin_wake(&c->t->spin);
        }
    }
    end_request(s);
}

static void drop(srv_request *rq) {
    close_conn(conn_of(rq->conn));
    end_request(slot_of(rq));
}

static void close_pub(srv_conn *pub) {
    close_conn(conn_of(pub));
}

static const srv_transport_ops ring_ops = {reply_alloc, reply_send, drop, close_pub};

static void refuse(srv_rings *t, srv_request *rq, attnd_err err, const char *why) {
    attnd_errinfo info;
    t->info.busy += err == ATTND_EBUSY;
    srv_reply_error(rq, attnd_fail(&info, err, "", "%s", why), &info);
}

// start hands a call to the server.
static void start(conn *c, const srv_ring_call *call) {
    srv_rings *t = c->t;
    list_node *node = list_first(&c->free_slots);
    ATTND_ASSERT(node != NULL); // in_flight + 1 slots, and past in_flight each is answered at once
    list_remove(node);
    slot *s = LIST_ENTRY(node, slot, node);
    srv_request *rq = &s->rq;
    memset(rq, 0, sizeof(*rq));
    rq->conn = &c->pub;
    rq->msg = call->msg;
    rq->arrival_us = attnd_clock_us();
    rq->reply_room = call->reply_bytes;
    s->reply = call->reply;
    s->user = call->user;
    proto_copy(&rq->header, call->msg.data, sizeof(rq->header)); // for an error that repeats it
    t->info.requests++;
    t->info.in_flight++;
    if (++c->in_flight > t->opts.in_flight) {
        refuse(t, rq, ATTND_EBUSY, "too many requests in flight");
    } else if (call->msg.bytes > t->opts.message_bytes) {
        refuse(t, rq, ATTND_EMSGSIZE, "the message is above the limit");
    } else {
        t->opts.request(t->opts.ctx, rq);
    }
}

static void broken(conn *c) {
    c->t->info.closed_broken++;
    attnd_log_some(&c->t->rates.broken, ATTND_LOG_WARN, "ring",
                   "a client's ring has indices that make no sense: closed");
    close_conn(c);
}

// serve gives a ring its turn; true when it had something.
static bool serve(conn *c) {
    srv_ring_call call;
    srv_ring_found found = SRV_RING_EMPTY;
    bool any = false;
    c->in_turn = true;
    for (int i = 0; i < BURST && c->open; i++) {
        found = srv_ring_take(&c->ring, &call);
        if (found == SRV_RING_EMPTY || found == SRV_RING_BROKEN) {
            break;
        }
        any = true;
        if (found == SRV_RING_CALL) {
            start(c, &call);
        } else {
            c->t->info.malformed++;
        }
    }
    c->in_turn = false;
    if (c->open && found == SRV_RING_BROKEN) {
        broken(c);
    } else if (c->open && any) {
        srv_ring_wake(&c->ring);
    }
    return any;
}

// next_pending returns the first ring with a submission, NULL when there is none.  Rings without
// one cost a load: many sit there while few work.
static conn *next_pending(srv_rings *t) {
    LIST_FOREACH (&t->rings, node) {
        if (srv_ring_pending(&ring_conn(node)->ring)) {
            return ring_conn(node);
        }
    }
    return NULL;
}

// serve_all gives every ring that has something one turn, or as many as get one before the slice is
// over; the next slice goes on behind them.  What is awaited elsewhere is looked at between them.
static bool serve_all(srv_rings *t, uint64_t until_us) {
    bool any = false;
    conn *c;
    for (uint32_t i = t->info.rings; i > 0 && (c = next_pending(t)); i--) {
        list_remove(&c->node);
        list_append(&t->rings, &c->node);
        any = serve(c) || any;
        if (attnd_clock_us() >= until_us) {
            break;
        }
        t->opts.poll(t->opts.ctx);
    }
    return any;
}

// ---- polling, for srv_spin

static bool serve_slice(void *ctx, uint64_t until_us) {
    srv_rings *t = ctx;
    bool any = t->opts.poll(t->opts.ctx);
    return serve_all(t, until_us) || any;
}

static bool any_pending(void *ctx) {
    return next_pending(ctx) != NULL;
}

static void set_sleeps(void *ctx, bool sleeps) {
    srv_rings *t = ctx;
    LIST_FOREACH (&t->rings, node) {
        srv_ring_set_sleeps(&ring_conn(node)->ring, sleeps);
    }
}

static bool awaits(void *ctx) {
    const srv_rings *t = ctx;
    return t->opts.awaits(t->opts.ctx);
}

static bool crowds(void *ctx) {
    const srv_rings *t = ctx;
    return t->opts.crowds(t->opts.ctx);
}

// ---- attaching

// open_ring makes the ring, within the bounds.
static attnd_err open_ring(conn *c, const proto_attach *a, int *fd, attnd_errinfo *info) {
    srv_rings *t = c->t;
    proto_ring_layout layout;
    attnd_err err = proto_ring_layout_make(&layout, a->entries, a->data_bytes, info);
    if (!err && layout.bytes > t->opts.ring_bytes) {
        err = attnd_fail(info, ATTND_EMSGSIZE, "data_bytes", "a region of %llu bytes",
                         (unsigned long long)layout.bytes);
    }
    if (!err && layout.bytes > t->opts.all_bytes - t->info.ring_bytes) {
        err = attnd_fail(info, ATTND_EBUSY, "", "the memory of rings is taken");
    }
    if (!err) {
        err = srv_ring_open(&c->ring, a->entries, a->data_bytes, fd, info);
    }
    if (!err) {
        t->info.ring_bytes += layout.bytes;
    }
    return err;
}

// most_data is what the reply to EMSGSIZE tells: the largest data area beside the largest queues.
static uint64_t most_data(const srv_rings *t) {
    proto_ring_layout layout;
    proto_ring_layout_make(&layout, PROTO_RING_MAX_ENTRIES, 1, NULL);
    return t->opts.ring_bytes > layout.data_off ? t->opts.ring_bytes - layout.data_off : 0;
}

static void refuse_ring(conn *c, attnd_err err, const attnd_errinfo *info) {
    proto_attach_reply reply = {.magic = PROTO_RING_MAGIC, .status = err};
    if (err == ATTND_EMSGSIZE) {
        bool of_region = strcmp(info->field, "region.bytes") == 0;
        reply.bytes = of_region ? srv_regions_most(c->t->opts.regions) : most_data(c->t);
        reply.flags = of_region ? PROTO_ATTACH_REGION : 0;
    }
    c->t->info.refused++;
    attnd_log_some(&c->t->rates.refused, ATTND_LOG_INFO, "ring", "uid %d gets no ring: %s",
                   (int)c->pub.uid, info->text);
    srv_attach_send(c->fd, &reply, sizeof(reply), NULL, 0);
    close_conn(c);
}

static bool send_ring(conn *c, int fd) {
    proto_attach_reply reply = {.magic = PROTO_RING_MAGIC,
                                .bytes = c->ring.layout.bytes,
                                .data_off = c->ring.layout.data_off,
                                .spin_us = c->t->opts.spin_us};
    return srv_attach_send(c->fd, &reply, sizeof(reply), &fd, 1);
}

static bool send_region(conn *c) {
    const srv_region *r = &c->place.region;
    int pass[] = {r->memory.fd, c->gifts.flags_fd};
    proto_region region = {.magic = PROTO_RING_MAGIC,
                           .num_flags = r->num_flags,
                           .bytes = r->memory.bytes,
                           .flags_bytes = r->flags_bytes,
                           .pairs_off = r->pairs_off};
    memcpy(region.device, r->backend->uuid, sizeof(region.device));
    return srv_attach_send(c->fd, &region, sizeof(region), pass, 2);
}

// grant looks whether the client may have the arena, and notes its process.
static attnd_err grant(conn *c, const uint8_t *key, proto_attach_arena *arena, int *fd,
                       attnd_errinfo *info) {
    srv_rings *t = c->t;
    attnd_err err = t->opts.arena(t->opts.ctx, &c->pub, arena, fd, info);
    if (!err) {
        err = srv_process_add(t->opts.processes, c->fd, key, &c->process, info);
    }
    c->pub.arena = !err;
    return err;
}

// prepare makes what is asked for, but a region.
static attnd_err prepare(conn *c, const proto_attach *a, attnd_errinfo *info) {
    srv_rings *t = c->t;
    attnd_err err = open_ring(c, a, &c->gifts.ring_fd, info);
    if (!err) {
        err = t->opts.attached(t->opts.ctx, &c->pub, a->session, a->secret, info);
    }
    if (!err && (a->flags & PROTO_ATTACH_ARENA)) {
        err = grant(c, a->secret, &c->gifts.arena, &c->gifts.arena_fd, info);
    }
    return err;
}

static bool send_all(conn *c) {
    const gifts *g = &c->gifts;
    return send_ring(c, g->ring_fd) &&
           (g->arena_fd < 0 ||
            srv_attach_send(c->fd, &g->arena, sizeof(g->arena), &g->arena_fd, 1)) &&
           (g->flags_fd < 0 || send_region(c));
}

// give sends what was made, or the reason why it was not.
static void give(conn *c, attnd_err err, const attnd_errinfo *info) {
    srv_rings *t = c->t;
    if (err) {
        c->left = true;
        refuse_ring(c, err, info);
        return;
    }
    srv_ring_set_sleeps(&c->ring, !srv_spin_awake(&t->spin)); // before the client can look
    list_append(&t->rings, &c->node);
    t->info.rings++;
    if (send_all(c)) {
        close_gifts(&c->gifts);
    } else {
        c->left = true; // the last packet is the one that counts
        close_conn(c);
    }
}

static void on_region_made(srv_region_place *place, attnd_err err, int flags_fd,
                           const attnd_errinfo *made) {
    conn *c = LIST_ENTRY(place, conn, place);
    attnd_errinfo info = *made;
    if (!c->open) { // both in one turn of the loop; on_conn_closed follows
        c->left = true;
        if (!err) {
            close(flags_fd);
        }
        return;
    }
    if (!err) {
        c->gifts.flags_fd = flags_fd;
        c->pub.region = &place->region;
        c->pub.opened_ms = attnd_clock_ms(); // it says hello from here on
        err = c->t->opts.region(c->t->opts.ctx, &c->pub, &place->ask, &info);
    }
    give(c, err, &info);
}

// awaits_region: it gets its answer when its region is made.
static bool awaits_region(const conn *c) {
    return c->place.state == SRV_REGION_WAITS || c->place.state == SRV_REGION_MAKING;
}

static void attach(conn *c, const srv_asked *in, size_t bytes) {
    attnd_errinfo info = {.code = ATTND_OK};
    attnd_err err = srv_asked_check(in, bytes, &info);
    if (!err) {
        err = prepare(c, &in->attach, &info);
    }
    if (!err && (in->attach.flags & PROTO_ATTACH_REGION)) {
        err = srv_regions_ask(c->t->opts.regions, &c->place, &in->region, c->fd, &info);
    }
    if (!awaits_region(c)) {
        give(c, err, &info);
    }
}

// ---- packets

static void on_packet(conn *c, const srv_asked *packet, size_t bytes) {
    if (c->ring.base && is_left(packet, bytes)) {
        c->left = true;
    } else if (c->ring.base) {
        c->t->info.doorbells++;
        srv_spin_wake(&c->t->spin);
    } else {
        attach(c, packet, bytes);
    }
}

static void on_readable(uv_poll_t *poll, int status, int events) {
    (void)events;
    conn *c = poll->data;
    if (status < 0) {
        close_conn(c);
    }
    for (int i = 0; i < PACKETS && c->open; i++) {
        srv_asked packet;
        size_t bytes;
        switch (srv_attach_recv(c->fd, &packet, sizeof(packet), &bytes)) {
        case SRV_ATTACH_NONE:
            return;
        case SRV_ATTACH_PACKET:
            on_packet(c, &packet, bytes);
            break;
        case SRV_ATTACH_RIGHTS:
            c->t->info.closed_rights++;
            attnd_log_some(&c->t->rates.rights, ATTND_LOG_WARN, "ring",
                           "uid %d sends descriptors: closed", (int)c->pub.uid);
            close_conn(c);
            break;
        case SRV_ATTACH_GONE:
            close_conn(c);
            break;
        }
    }
}

// ---- connections

static void open_conn(srv_rings *t, int fd, uint32_t uid) {
    list_node *node = list_first(&t->free);
    conn *c = node ? ring_conn(node) : NULL;
    if (!c) {
        t->info.closed_full++;
        close(fd);
        return;
    }
    if (uv_poll_init(t->listen.loop, &c->poll, fd) != 0) {
        close(fd);
        return;
    }
    list_remove(node);
    t->handles++;
    t->info.connections++;
    c->poll.data = c;
    c->fd = fd;
    c->left = false;
    c->open = c->handle = true;
    c->pub = (srv_conn){.ops = &ring_ops,
                        .opened_ms = attnd_clock_ms(),
                        .uid = uid,
                        .pid = srv_attach_pid(fd),
                        .ring = true};
    uv_poll_start(&c->poll, UV_READABLE, on_readable);
    if (!t->opts.opened(t->opts.ctx, &c->pub)) {
        close_conn(c);
    }
}

static void on_listen(uv_poll_t *poll, int status, int events) {
    (void)status, (void)events;
    srv_rings *t = poll->data;
    for (int i = 0; i < PACKETS; i++) {
        uint32_t uid;
        int fd = srv_attach_accept(&t->socket, &uid);
        if (fd < 0) {
            return;
        }
        open_conn(t, fd, uid);
    }
}

uint64_t srv_rings_expire(srv_rings *t, uint64_t now_ms, uint64_t hello_timeout_ms) {
    uint64_t next = UINT64_MAX;
    for (uint32_t i = 0; t && i < t->opts.connections; i++) {
        conn *c = &t->conns[i];
        uint64_t at = c->pub.opened_ms + hello_timeout_ms;
        if (!c->open || c->pub.session || awaits_region(c)) {
            continue;
        }
        if (at <= now_ms) {
            t->info.closed_idle++;
            attnd_log_some(&t->rates.idle, ATTND_LOG_INFO, "ring",
                           "a connection has no session after %llu ms: closed",
                           (unsigned long long)hello_timeout_ms);
            close_conn(c);
        } else if (at < next) {
            next = at;
        }
    }
    return next;
}

// ---- life

static attnd_err make_pools(srv_rings *t) {
    uint32_t num_slots = t->opts.in_flight + 1;
    t->conns = calloc(t->opts.connections, sizeof(*t->conns));
    t->slots = calloc((size_t)t->opts.connections * num_slots, sizeof(*t->slots));
    if (!t->conns || !t->slots) {
        return ATTND_ENOMEM;
    }
    list_init(&t->rings);
    list_init(&t->free);
    for (uint32_t i = 0; i < t->opts.connections; i++) {
        conn *c = &t->conns[i];
        c->t = t;
        c->place.made = on_region_made;
        c->place.gone = on_region_gone;
        c->gifts = (gifts){-1, -1, -1, {.magic = PROTO_RING_MAGIC}};
        c->slots = t->slots + (size_t)i * num_slots;
        list_init(&c->free_slots);
        list_append(&t->free, &c->node);
        for (uint32_t k = 0; k < num_slots; k++) {
            list_append(&c->free_slots, &c->slots[k].node);
        }
    }
    return ATTND_OK;
}

static attnd_err open_socket(srv_rings *t, attnd_errinfo *info) {
    return t->opts.fd >= 0 ? srv_attach_adopt(&t->socket, t->opts.fd, info)
                           : srv_attach_listen(&t->socket, t->opts.path, t->opts.mode, info);
}

attnd_err srv_rings_open(srv_rings **out, uv_loop_t *loop, const srv_rings_opts *opts,
                         attnd_errinfo *info) {
    srv_rings *t = calloc(1, sizeof(*t));
    if (!t) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for the rings");
    }
    t->opts = *opts;
    attnd_err err = make_pools(t);
    if (err) {
        attnd_fail(info, err, "", "no memory for the rings");
    } else {
        err = open_socket(t, info);
    }
    if (!err && uv_poll_init(loop, &t->listen, t->socket.fd) != 0) {
        srv_attach_close(&t->socket);
        err = attnd_fail(info, ATTND_EIO, "attach_socket", "the loop cannot poll the socket");
    }
    if (err) {
        free_memory(t);
        return err;
    }
    srv_spin_opts spin = {.spin_us = opts->spin_us,
                          .serve = serve_slice,
                          .pending = any_pending,
                          .sleeps = set_sleeps,
                          .awaits = awaits,
                          .crowds = crowds,
                          .ctx = t};
    srv_spin_open(&t->spin, loop, &spin);
    t->listen.data = t;
    t->handles = 2;
    uv_poll_start(&t->listen, UV_READABLE, on_listen);
    *out = t;
    return ATTND_OK;
}

static void on_own_closed(uv_handle_t *handle) {
    handle_gone(handle->data);
}

// Every request is answered by now, but the handles outlive this call.
void srv_rings_close(srv_rings *t) {
    if (!t) {
        return;
    }
    t->stopping = true;
    uv_close((uv_handle_t *)&t->listen, on_own_closed);
    srv_spin_close(&t->spin, on_own_closed);
    srv_attach_close(&t->socket);
    for (uint32_t i = 0; i < t->opts.connections; i++) {
        conn *c = &t->conns[i];
        if (c->open && awaits_region(c)) {
            attnd_errinfo info;
            refuse_ring(c, attnd_fail(&info, ATTND_ESHUTDOWN, "", "the daemon stops"), &info);
        }
        if (c->handle || c->pub.arena) {
            close_conn(c);
            t->opts.lost(t->opts.ctx, &c->pub);
        }
        t->handles += !srv_regions_leave(t->opts.regions, &c->place, c->left);
    }
}

void srv_rings_stir(srv_rings *t) {
    if (t) {
        srv_spin_wake(&t->spin);
    }
}

bool srv_rings_awake(const srv_rings *t) {
    return t && srv_spin_awake(&t->spin);
}

const char *srv_rings_path(const srv_rings *t) {
    return t && t->socket.path[0] ? t->socket.path : NULL;
}

void srv_rings_set_spin(srv_rings *t, uint32_t spin_us) {
    if (t) {
        t->opts.spin_us = spin_us; // which clients are told
        srv_spin_set(&t->spin, spin_us);
    }
}

void srv_rings_get_info(const srv_rings *t, srv_rings_info *out) {
    memset(out, 0, sizeof(*out));
    if (t) {
        *out = t->info;
        out->sleeps = srv_spin_slept(&t->spin);
    }
}
