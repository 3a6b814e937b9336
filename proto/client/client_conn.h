// client_conn is one connection of libattnd to the daemon, over NNG or a ring: requests out,
// replies in, the same for both.  It keeps request ids and bounds what is in flight; how bytes
// travel is the business of client_nng.c and client_ring.c, behind client_conn_ops.  Any thread.
//
// Lifetime: counted references.  client_conn_close loses the connection, so that every call on it
// ends, and drops its holder's reference; messages and buffers hold one each, so memory of a
// region stays mapped while somebody may look at it.
#ifndef ATTND_PROTO_CLIENT_CLIENT_CONN_H
#define ATTND_PROTO_CLIENT_CLIENT_CONN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "proto/client/attnd_engine.h"
#include "proto/proto_msg.h"

typedef struct client_conn client_conn;

// client_msg is a message that the holder owns: client_msg_free.  All zero = none.
typedef struct client_msg {
    uint8_t *data; // [bytes], header included, aligned to 4; of a reply over a ring: shared memory
    size_t bytes;
    client_conn *conn; // private, as the next one
    void *handle;
} client_msg;

// client_msg_alloc makes a message of at least a header, of which the reply has at most
// reply_bytes; over a ring it waits until deadline_ms for memory.  What is not written may hold
// anything that the library wrote earlier.  ATTND_ENOMEM; over a ring ATTND_EMSGSIZE,
// ATTND_ETIMEDOUT.
attnd_err client_msg_alloc(client_conn *conn, client_msg *out, uint64_t bytes, uint64_t reply_bytes,
                           uint64_t deadline_ms, attnd_errinfo *info);
void client_msg_free(client_msg *m); // once more does no harm

// client_msg_again makes *out a message of the same memory as m, which stays its holder's and is in
// nobody else's hands: EBUSY else.  For connections of which messages outlive a call: in process
// none is needed.
bool client_conn_keeps(const client_conn *conn);
attnd_err client_msg_again(client_msg *out, const client_msg *m, attnd_errinfo *info);

static inline proto_view client_msg_view(const client_msg *m) {
    return (proto_view){m->data, m->bytes};
}

// client_nng_open connects to an NNG URL within timeout_ms.  client_ring_open asks the attach
// socket at path for a ring of data_bytes; *most is what client_attach says.  Both take one request
// at a time until client_conn_limit.  The caller owns *out: client_conn_close.
attnd_err client_nng_open(client_conn **out, const char *url, int32_t timeout_ms,
                          attnd_errinfo *info);

// client_most is the most that the daemon gives of what it was asked too much of.
typedef struct client_most {
    uint64_t bytes; // 0 = it does not say
    bool of_region; // else of the ring's data
} client_most;

typedef struct client_ring_opts {
    const char *path;
    int32_t timeout_ms;
    uint64_t data_bytes;
    uint32_t spin_us;           // before a waiting thread sleeps
    const attnd_engine *engine; // NULL = none
    int32_t engine_threads;
    uint64_t region_bytes;     // of an engine for service mode
    const uint8_t *engine_key; // [16]
} client_ring_opts;
attnd_err client_ring_open(client_conn **out, const client_ring_opts *opts, client_most *most,
                           attnd_errinfo *info);

// client_conn_ids makes the ids of ops that are done once go on behind `last`.
void client_conn_ids(client_conn *conn, uint64_t last);
uint64_t client_conn_last_id(client_conn *conn);

void client_conn_close(client_conn *conn); // accepts NULL
client_conn *client_conn_hold(client_conn *conn);
void client_conn_rele(client_conn *conn);

// client_conn_limit sets how many requests may be in flight, at most CLIENT_MAX_SLOTS.
enum { CLIENT_MAX_SLOTS = PROTO_REQUEST_WINDOW };
void client_conn_limit(client_conn *conn, uint32_t num_slots);

// client_flight is a request that was sent.
typedef struct client_flight {
    client_conn *conn; // borrowed
    struct client_slot *slot;
    proto_op op;
    uint64_t id;
} client_flight;

typedef struct client_start_opts {
    bool async;           // client_conn_ready will be asked, and client_conn_events counts it
    uint32_t second_id;   // offset in the message where a second id goes (of a commit that a step
                          // carries), 0 = none
    uint64_t *request_id; // gets the id before the request is sent; may be NULL
    uint64_t again_id;    // goes under this id, which it had before, instead of a new one; 0 = new
    uint64_t second_again_id; // likewise of the second one
    uint64_t *second_request_id;
} client_start_opts;

// client_conn_start writes the header of request *m and sends it; *m is none then, also after an
// error.  how may be NULL.
attnd_err client_conn_start(client_conn *conn, proto_op op, client_msg *m, uint64_t deadline_ms,
                            const client_start_opts *how, client_flight *out, attnd_errinfo *info);

// client_conn_ready is true when client_conn_finish will not wait.
bool client_conn_ready(const client_flight *f);

// client_conn_finish waits until deadline_ms for the reply, which *m then is, with header checked
// and status 0; it must be called once for each start.  When it fails, *m is none; also with the
// error that a reply carries.
attnd_err client_conn_finish(client_flight *f, uint64_t deadline_ms, client_msg *m,
                             attnd_errinfo *info);

// client_conn_events counts async requests that have become ready; client_conn_await waits until
// the count is not `seen` any more, the connection is lost, or deadline_ms.
uint32_t client_conn_events(client_conn *conn);
void client_conn_await(client_conn *conn, uint32_t seen, uint64_t deadline_ms);

// client_conn_call is start and finish.
attnd_err client_conn_call(client_conn *conn, proto_op op, client_msg *m, int64_t timeout_ms,
                           const client_start_opts *how, attnd_errinfo *info);

bool client_conn_is_lost(client_conn *conn);

// ---- private, for the transports

// client_slot is a request in flight.
typedef struct client_slot {
    uint32_t idx;
    bool async;
    uint64_t id;
    uint64_t once_id;         // of a request without an answer that counts in the window; 0 = none
    struct client_slot *next; // in the idle list
} client_slot;

typedef struct client_conn_ops {
    attnd_err (*alloc)(client_conn *conn, client_msg *out, uint64_t bytes, uint64_t reply_bytes,
                       uint64_t deadline_ms, attnd_errinfo *info);
    void (*msg_free)(client_msg *m);
    attnd_err (*again)(const client_msg *m, attnd_errinfo *info); // NULL = messages do not outlive
    // prepare makes what a new slot needs; lock held.
    attnd_err (*prepare)(client_conn *conn, client_slot *s, attnd_errinfo *info);
    // send takes *m, also when it fails.  Begins with the lock held (ids leave in their order), and
    // ends without it.
    attnd_err (*send)(client_conn *conn, client_slot *s, client_msg *m, uint64_t deadline_ms,
                      attnd_errinfo *info);
    bool (*ready)(const client_conn *conn, const client_slot *s);
    // wait takes the reply.  False in *ended: the request is still in flight and the slot with it;
    // the transport gives the slot back later by client_conn_give.
    attnd_err (*wait)(client_conn *conn, client_slot *s, uint64_t deadline_ms, client_msg *m,
                      bool *ended, attnd_errinfo *info);
    void (*await)(client_conn *conn, uint32_t seen, uint64_t deadline_ms);
    void (*lose)(client_conn *conn); // ends all that waits; conn->lost is set; lock held
    void (*free)(client_conn *conn); // nobody looks any more
} client_conn_ops;

struct client_conn {
    const client_conn_ops *ops;
    const attnd_engine *engine; // attends in this process; NULL = the daemon does
    void *engine_state;
    struct client_service *service; // hands attends to the daemon in streams; NULL = in messages
    atomic_uint refs;
    atomic_uint events;
    pthread_mutex_t lock; // guards all below
    pthread_cond_t idle_cond;
    client_slot slots[CLIENT_MAX_SLOTS];
    client_slot *idle;
    uint32_t num_slots, max_slots;
    attnd_err lost;             // 0, ECONN, or EPROTO when the daemon wrote nonsense
    uint64_t once_id, other_id; // last ones given out
};

void client_conn_init(client_conn *conn, const client_conn_ops *ops);
void client_conn_fini(client_conn *conn);

// client_conn_lose ends all calls with err; later ones too.  Lock held.
void client_conn_lose(client_conn *conn, attnd_err err);
attnd_err client_conn_lost(const client_conn *conn, attnd_errinfo *info); // the error that says so

// client_conn_give gives a slot back.  Lock held.
void client_conn_give(client_conn *conn, client_slot *s);

// client_cond_init makes a condition variable on the monotonic clock; client_cond_wait waits until
// deadline_ms, false when it is over.
void client_cond_init(pthread_cond_t *cond);
bool client_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ms);

#endif
