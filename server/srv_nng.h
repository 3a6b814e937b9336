// srv_nng carries requests and replies over NNG REP sockets.  It is the one file of the daemon that
// includes NNG.  Loop thread only; NNG's own threads never leave srv_nng.c.
//
// Bounds, per connection: `in_flight` requests without a reply, then EBUSY; twice as many unread
// replies, then the connection is closed; `connection_bytes` of requests and unread replies, then
// EBUSY; a reply that is not read for send_timeout_ms, or a message above message_bytes, closes the
// connection.  A REP socket can only receive while it has a free context, so there are as many
// contexts as all connections together may hold, and one that misbehaves costs the others nothing.
#ifndef ATTND_SERVER_SRV_NNG_H
#define ATTND_SERVER_SRV_NNG_H

#include <uv.h>

#include "server/srv_request.h"
#include "server/srv_urls.h"

typedef struct srv_nng srv_nng; // the struct is in srv_nng.c

typedef struct srv_nng_opts {
    const char *urls[SRV_URLS_MAX]; // ipc://PATH, tcp://HOST:PORT; borrowed
    uint32_t num_urls;
    uint32_t mode; // permissions of ipc sockets
    uint32_t connections, in_flight;
    uint64_t message_bytes, connection_bytes;
    uint64_t send_timeout_ms;
    bool admin;
    // Events, from the loop.  opened returns false to have the connection closed.  request takes
    // the request.  lost: the peer is gone or was closed; requests may still be unanswered.
    bool (*opened)(void *ctx, srv_conn *conn);
    void (*request)(void *ctx, srv_request *rq);
    void (*lost)(void *ctx, srv_conn *conn);
    void *ctx;
} srv_nng_opts;

typedef struct srv_nng_info {
    uint32_t connections;
    uint32_t in_flight;     // requests without a reply, and unread replies
    uint64_t last_reply_ms; // when the last reply was given to NNG; 0 = never
    uint64_t requests;      // received since the start
    uint64_t busy;          // answered EBUSY over a bound
    // Connections that were closed: too many unread replies, one unread too long, what is no
    // request, all connections taken, no hello.
    uint64_t closed_flood, closed_slow, closed_garbage, closed_full, closed_idle;
} srv_nng_info;

// srv_nng_open claims the paths, listens, and delivers events from loop.  ATTND_EEXIST: a path is
// taken; ATTND_EINVAL, ATTND_ENOTSUP: a URL; ATTND_EIO; ATTND_ENOMEM.  The caller owns *out:
// srv_nng_close.
attnd_err srv_nng_open(srv_nng **out, uv_loop_t *loop, const srv_nng_opts *opts,
                       attnd_errinfo *info);

// srv_nng_close stops receiving, waits until no callback of NNG runs, closes connections (lost is
// called for each) and sockets, and gives the paths up.  Every request must have been answered.
// The memory goes with the next turn of the loop.  Accepts NULL.
void srv_nng_close(srv_nng *t);

// srv_nng_expire closes connections that have had no session for hello_timeout_ms; returns when the
// next one is due, UINT64_MAX = none.
uint64_t srv_nng_expire(srv_nng *t, uint64_t now_ms, uint64_t hello_timeout_ms);

// srv_nng_set_send_timeout changes it for replies from now on.
void srv_nng_set_send_timeout(srv_nng *t, uint64_t ms);

void srv_nng_get_info(const srv_nng *t, srv_nng_info *out);

// srv_nng_fini ends NNG's threads, once, at the end of the process.
void srv_nng_fini(void);

#endif
