// client_conn is libattnd's transport: one connection to the daemon, requests out, replies in.  It
// is the only file of the library that calls NNG.  Any thread.
#ifndef ATTND_PROTO_CLIENT_CLIENT_CONN_H
#define ATTND_PROTO_CLIENT_CLIENT_CONN_H

#include <stdint.h>

#include "proto/proto_msg.h"

typedef struct client_conn client_conn;

// client_msg is a message that the holder owns: client_msg_free.  All zero = none.
typedef struct client_msg {
    uint8_t *data; // [bytes], header included, aligned to 4
    size_t bytes;
    void *handle; // private
} client_msg;

// client_msg_alloc makes a zeroed message of at least a header.  ATTND_ENOMEM.
attnd_err client_msg_alloc(client_msg *out, size_t bytes, attnd_errinfo *info);
void client_msg_free(client_msg *m); // once more does no harm

static inline proto_view client_msg_view(const client_msg *m) {
    return (proto_view){m->data, m->bytes};
}

// client_conn_open connects to an NNG URL within timeout_ms, for at most max_slots requests at a
// time (until client_conn_limit).  The caller owns *out: client_conn_close, when no call runs.
attnd_err client_conn_open(client_conn **out, const char *url, int32_t timeout_ms,
                           attnd_errinfo *info);
void client_conn_close(client_conn *conn);

// client_conn_limit sets how many requests may be in flight, at most CLIENT_MAX_SLOTS.
enum { CLIENT_MAX_SLOTS = PROTO_REQUEST_WINDOW };
void client_conn_limit(client_conn *conn, uint32_t num_slots);

// client_conn_call writes the header of request *m, sends it and waits timeout_ms for the reply,
// which *m then is, with header checked and status 0.  When it fails, *m is none; also with the
// error that a reply carries.
attnd_err client_conn_call(client_conn *conn, proto_op op, client_msg *m, int64_t timeout_ms,
                           attnd_errinfo *info);

#endif
