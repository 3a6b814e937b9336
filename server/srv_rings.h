// srv_rings is the transport of shared-memory rings: connections of the attach socket, their rings,
// and the polling of these from the loop.  Requests and replies are the same as over NNG.
//
// Bounds: `connections` at once; memory of one ring and of all (of regions: srv_regions); per ring,
// `in_flight` requests without a reply, then EBUSY, and as many outstanding as it has entries, then
// it is closed.
//
// The loop polls every ring, and takes turns with its other work, until nothing has happened on any
// ring for spin_us; then it sleeps, and a client's packet on the attach socket wakes it.
//
// A client that has got the arena may still write there when its connection is lost; lost is called
// once it has said that it does not, or its process is gone (srv_process.h).
//
// A ring's memory, and the region on the device that a client may have beside it, stay until the
// last request in them has ended, also when the client is gone.
// Loop thread only.
#ifndef ATTND_SERVER_SRV_RINGS_H
#define ATTND_SERVER_SRV_RINGS_H

#include <uv.h>

#include "proto/proto_ring.h"
#include "server/srv_process.h"
#include "server/srv_regions.h"
#include "server/srv_request.h"

typedef struct srv_rings srv_rings; // the struct is in srv_rings.c

typedef struct srv_rings_opts {
    const char *path; // of the attach socket
    int fd;           // a listening socket to take over instead; -1 = none
    uint32_t mode;    // permissions of the socket
    uint32_t connections, in_flight;
    uint64_t ring_bytes, all_bytes; // memory of rings
    uint64_t message_bytes;
    uint32_t spin_us;
    // Events, from the loop.  opened, request and lost are those of srv_nng_opts.  attached: a ring
    // is about to be given to the client.  session 0 = it will say hello; else it joins that one,
    // which makes conn->session.  An error refuses it.
    bool (*opened)(void *ctx, srv_conn *conn);
    attnd_err (*attached)(void *ctx, srv_conn *conn, uint64_t session, const uint8_t *secret,
                          attnd_errinfo *info);
    void (*request)(void *ctx, srv_request *rq);
    void (*lost)(void *ctx, srv_conn *conn);
    // arena: a client asks for it.  *fd, which stays the callee's, goes out with *out.
    attnd_err (*arena)(void *ctx, const srv_conn *conn, proto_attach_arena *out, int *fd,
                       attnd_errinfo *info);
    // region: conn->region, which was asked for a while ago, is about to be given to the client.
    // An error refuses it.
    attnd_err (*region)(void *ctx, const srv_conn *conn, const proto_region_ask *ask,
                        attnd_errinfo *info);
    srv_processes *processes; // borrowed, both
    srv_regions *regions;
    // poll takes in what has ended elsewhere since the last time; false when that was nothing.
    bool (*poll)(void *ctx);
    // awaits is true while poll is to be called also when nothing has happened on the rings.
    bool (*awaits)(void *ctx);
    // crowds is true while others need the processor that polling takes: the loop sleeps then.
    bool (*crowds)(void *ctx);
    void *ctx;
} srv_rings_opts;

typedef struct srv_rings_info {
    uint32_t connections, rings;
    uint32_t in_flight;         // requests without a reply
    uint64_t ring_bytes;        // memory of all rings
    uint64_t requests;          // taken since the start
    uint64_t busy;              // answered EBUSY over a bound
    uint64_t malformed;         // submissions with impossible places
    uint64_t refused;           // rings that were asked for and not given
    uint64_t sleeps, doorbells; // times that the polling ended; packets that came
    // Connections that were closed: senseless indices, descriptors sent, all connections taken, no
    // ring or no hello in time.
    uint64_t closed_broken, closed_rights, closed_full, closed_idle;
} srv_rings_info;

// srv_rings_open makes the pools and listens.  Errors as srv_attach_listen and srv_attach_adopt;
// ATTND_ENOMEM.  The caller owns *out: srv_rings_close.
attnd_err srv_rings_open(srv_rings **out, uv_loop_t *loop, const srv_rings_opts *opts,
                         attnd_errinfo *info);

// srv_rings_close stops listening and closes every connection (lost is called for each).  Every
// request must have been answered.  The memory goes with the last handle that the loop closes and
// the last region.  Accepts NULL.
void srv_rings_close(srv_rings *t);

// srv_rings_stir notes that something has happened, and starts the polling.  Both accept NULL.
void srv_rings_stir(srv_rings *t);
bool srv_rings_awake(const srv_rings *t);

// srv_rings_path returns the attach socket's path, NULL when it is not known.
const char *srv_rings_path(const srv_rings *t);

// srv_rings_expire closes connections that have had no session for hello_timeout_ms; returns when
// the next one is due, UINT64_MAX = none.
uint64_t srv_rings_expire(srv_rings *t, uint64_t now_ms, uint64_t hello_timeout_ms);

void srv_rings_set_spin(srv_rings *t, uint32_t spin_us);
void srv_rings_get_info(const srv_rings *t, srv_rings_info *out);

#endif
