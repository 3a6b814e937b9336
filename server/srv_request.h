// srv_request is one request on its way through the daemon, whatever transport brought it: a
// header, a view of the message, and where the reply goes.  Op handlers know this file and nothing
// of sockets.
//
// Life.  A transport owns the memory of requests and connections.  It hands a request to
// srv_dispatch; the op's handler, now or later, answers it exactly once with one of the srv_reply
// functions, which give it back to the transport.  Until then the message stays readable and the
// connection stays valid, though its peer may be gone.  Loop thread only.
#ifndef ATTND_SERVER_SRV_REQUEST_H
#define ATTND_SERVER_SRV_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attention/attn_rows.h"
#include "proto/list.h"
#include "proto/proto_msg.h"
#include "scheduler/sched.h"

typedef struct srv_conn srv_conn;
typedef struct srv_request srv_request;
typedef struct srv_session srv_session; // srv_session.h
typedef struct srv_step srv_step;       // srv_step.h
typedef struct srv_region srv_region;   // srv_region.h
typedef struct srv_armed srv_armed;     // srv_armed.h

// srv_transport_ops is what a transport does for requests.
typedef struct srv_transport_ops {
    // reply_alloc returns room for a reply of bytes, header included, 8-aligned at least, in *out;
    // a second call replaces the first.  What is there is only to be written: in shared memory it
    // may be read back as something else.  ATTND_EBUSY: the connection has too many unread replies;
    // ATTND_ENOMEM; ATTND_EMSGSIZE: more than reply_room.
    attnd_err (*reply_alloc)(srv_request *rq, size_t bytes, void **out, attnd_errinfo *info);
    // reply_send sends what was allocated last and takes the request.
    void (*reply_send)(srv_request *rq);
    // drop takes a request that cannot be answered, for want of memory, and closes its connection.
    void (*drop)(srv_request *rq);
    // close closes the connection; the lost of srv_nng_opts or srv_rings_opts follows, from the
    // loop.
    void (*close)(srv_conn *conn);
} srv_transport_ops;

// srv_conn is a connection, embedded in the transport's own.
struct srv_conn {
    const srv_transport_ops *ops;
    srv_session *session; // NULL before hello, and again when it has ended
    uint64_t opened_ms;
    uint32_t uid;       // of the peer; UINT32_MAX = not known
    int32_t pid;        // of the peer; -1 = not known
    bool ring;          // else messages
    bool admin;         // came over the administration socket
    bool arena;         // its client has the arena mapped and attends by itself
    srv_region *region; // NULL = it has none
};

// srv_attend_state is what a running attend keeps (srv_ops_step.c, srv_ops_attend1.c).
typedef struct srv_attend_state {
    srv_step *step;
    uint32_t layer;
    uint32_t flags;            // PROTO_ATTEND_*
    attn_tensors tensors;      // q, k, v in the message, out and lse in the reply; or in the region
    attn_block_mask *masks;    // [step->num_seqs], in the step's memory; NULL = none
    bool on_device;            // they are in the region
    uint64_t signal;           // as in sched_req
    srv_armed *armed;          // attend_all: the call
    uint64_t ticket;           // under which the layer was checked and prepared; 0 = it was not
    proto_attend_reply *reply; // being made
    uint32_t *lens;            // in it; decode and prefill
    void (*done)(srv_request *rq, attnd_err err, proto_attend_reply *reply,
                 const attnd_errinfo *info);
} srv_attend_state;

struct srv_request {
    srv_conn *conn;
    proto_header header; // checked copy
    proto_view msg;      // whole message, borrowed until the reply; it may change while it is read
    size_t reply_room;   // bytes that a reply may have
    uint64_t arrival_us;
    // filled by srv_dispatch and the handlers
    srv_session *session;
    attnd_err status;                // of the reply
    list_node node;                  // in session->requests
    list_node wait_node;             // in a list of the step or of the queue that it waits in
    void (*cancel)(srv_request *rq); // answers it soon with ECANCELED; NULL = runs to its end
    sched_req sched;
    srv_attend_state attend;
};

// srv_reply_empty, _bytes and _error answer a request and give it back to the transport.
void srv_reply_empty(srv_request *rq);
void srv_reply_bytes(srv_request *rq, const void *bytes, size_t num_bytes);
// srv_reply_error sends code with what info says; info may be NULL.
void srv_reply_error(srv_request *rq, attnd_err code, const attnd_errinfo *info);

// srv_reply_begin makes a reply of body_bytes to be filled in place: header written, body zeroed up
// to zero_bytes.  srv_reply_end sends it.
attnd_err srv_reply_begin(srv_request *rq, size_t body_bytes, size_t zero_bytes, uint8_t **body,
                          attnd_errinfo *info);
void srv_reply_end(srv_request *rq);

#endif
