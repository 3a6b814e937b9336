// The ways to make a request, and administration.  The library keeps no state outside attnd_client;
// all waiting is done behind client_conn.
#include "proto/client/client.h"

#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/proto_json.h"
#include "proto/proto_ring.h"

client_conn *client_conn_of(attnd_client *c) {
    pthread_mutex_lock(&c->lock);
    client_conn *conn = client_conn_hold(c->conn);
    pthread_mutex_unlock(&c->lock);
    return conn;
}

attnd_limits client_get_limits(attnd_client *c) {
    pthread_mutex_lock(&c->lock);
    attnd_limits limits = c->limits;
    pthread_mutex_unlock(&c->lock);
    return limits;
}

static attnd_err check_bytes(attnd_client *c, uint64_t bytes, attnd_errinfo *info) {
    uint32_t most = client_get_limits(c).message_bytes;
    return bytes <= most
               ? ATTND_OK
               : attnd_fail(info, ATTND_EMSGSIZE, "", "message of %llu bytes, the daemon takes %u",
                            (unsigned long long)bytes, most);
}

attnd_err client_request(attnd_client *c, uint64_t bytes, uint64_t reply_bytes, client_msg *out,
                         attnd_errinfo *info) {
    attnd_err err = check_bytes(c, bytes, info);
    if (err) {
        return err;
    }
    client_conn *conn = client_conn_of(c);
    err = client_msg_alloc(conn, out, bytes, reply_bytes,
                           attnd_clock_ms() + (uint64_t)c->timeout_ms, info);
    client_conn_rele(conn);
    return err;
}

attnd_err client_call(attnd_client *c, proto_op op, client_msg *m, uint32_t extra_ms,
                      const client_start_opts *how, attnd_errinfo *info) {
    client_conn *conn = client_conn_hold(m->conn);
    attnd_err err = client_conn_call(conn, op, m, (int64_t)c->timeout_ms + extra_ms, how, info);
    client_conn_rele(conn);
    return err;
}

attnd_err client_call_fixed(attnd_client *c, proto_op op, const void *body, size_t bytes,
                            void *reply, size_t reply_bytes, attnd_errinfo *info) {
    client_msg m = {0};
    attnd_err err = client_request(c, PROTO_BODY + bytes, PROTO_BODY + reply_bytes, &m, info);
    if (err) {
        return err;
    }
    memcpy(m.data + PROTO_BODY, body, bytes);
    if (!(err = client_call(c, op, &m, 0, NULL, info))) {
        err = proto_read(client_msg_view(&m), reply, reply_bytes, false, info);
    }
    client_msg_free(&m);
    return err;
}

// json_room is the room for a reply: the ops whose room has a bound, or the largest there is.
static uint64_t json_room(proto_op op) {
    return op == PROTO_HELLO || op == PROTO_MODEL_OPEN ? PROTO_RING_JSON_REPLY
                                                       : PROTO_BODY + PROTO_MAX_JSON_BYTES;
}

// The reply is copied before it is checked: over a ring it could change in between.
attnd_err client_conn_json(client_conn *conn, proto_op op, const char *json, int32_t timeout_ms,
                           char **reply, attnd_errinfo *info) {
    size_t len = json ? strlen(json) : 0;
    client_msg m = {0};
    attnd_err err = json ? proto_json_check(json, len, info) : ATTND_OK;
    if (err || (err = client_msg_alloc(conn, &m, PROTO_BODY + len, json_room(op),
                                       attnd_clock_ms() + (uint64_t)timeout_ms, info))) {
        return err;
    }
    if (len > 0) {
        memcpy(m.data + PROTO_BODY, json, len);
    }
    if ((err = client_conn_call(conn, op, &m, timeout_ms, NULL, info))) {
        return err;
    }
    size_t got = m.bytes - PROTO_BODY;
    char *text = malloc(got + 1);
    if (text) {
        proto_copy(text, m.data + PROTO_BODY, got);
        text[got] = '\0';
    }
    client_msg_free(&m);
    if (!text) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for the reply");
    }
    if (proto_json_check(text, got, info)) {
        free(text);
        return attnd_fail(info, ATTND_EPROTO, "json", "the reply is not JSON");
    }
    *reply = text;
    return ATTND_OK;
}

attnd_err client_call_json(attnd_client *c, proto_op op, const char *json, char **reply,
                           attnd_errinfo *info) {
    attnd_err err = check_bytes(c, PROTO_BODY + (json ? strlen(json) : 0), info);
    if (err) {
        return err;
    }
    client_conn *conn = client_conn_of(c);
    err = client_conn_json(conn, op, json, c->timeout_ms, reply, info);
    client_conn_rele(conn);
    return err;
}

attnd_err attnd_admin(attnd_client *c, const char *op, const char *json, char **reply,
                      attnd_errinfo *info) {
    proto_op code = (proto_op)proto_op_parse(op);
    bool takes_json = code == PROTO_DRAIN || code == PROTO_CONFIG_GET || code == PROTO_CONFIG_SET;
    bool takes_none = code == PROTO_MODEL_LIST || code == PROTO_SEQ_LIST || code == PROTO_STATS ||
                      code == PROTO_SESSION_LIST;
    if (!takes_json && !takes_none) {
        return attnd_fail(info, ATTND_ENOTSUP, "op", "%s is no op that answers in JSON", op);
    }
    if (takes_none && json) {
        return attnd_fail(info, ATTND_EINVAL, "json", "%s takes no JSON", op);
    }
    return client_call_json(c, code, takes_json && !json ? "{}" : json, reply, info);
}

attnd_err attnd_cancel(attnd_client *c, uint64_t request, attnd_errinfo *info) {
    proto_cancel body = {.request = request};
    if (request == 0) {
        return attnd_fail(info, ATTND_EINVAL, "request", "0 is no request");
    }
    return client_call_fixed(c, PROTO_CANCEL, &body, sizeof(body), NULL, 0, info);
}

void attnd_free(void *p) {
    free(p);
}
