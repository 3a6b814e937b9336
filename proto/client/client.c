// libattnd's session: hello, the ways to make a request, administration.  The library keeps no
// state outside attnd_client; all waiting is done in client_conn.c.
#include "proto/client/client.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/proto_json.h"

enum { DEFAULT_TIMEOUT_MS = 30000 };

attnd_err client_request(attnd_client *c, uint64_t bytes, client_msg *out, attnd_errinfo *info) {
    if (bytes > c->limits.message_bytes) {
        return attnd_fail(info, ATTND_EMSGSIZE, "", "message of %llu bytes, the daemon takes %u",
                          (unsigned long long)bytes, c->limits.message_bytes);
    }
    return client_msg_alloc(out, bytes, info);
}

attnd_err client_call(attnd_client *c, proto_op op, client_msg *m, uint32_t extra_ms,
                      attnd_errinfo *info) {
    return client_conn_call(c->conn, op, m, (int64_t)c->timeout_ms + extra_ms, info);
}

attnd_err client_call_fixed(attnd_client *c, proto_op op, const void *body, size_t bytes,
                            void *reply, size_t reply_bytes, attnd_errinfo *info) {
    client_msg m = {0};
    attnd_err err = client_request(c, PROTO_BODY + bytes, &m, info);
    if (err) {
        return err;
    }
    memcpy(m.data + PROTO_BODY, body, bytes);
    if (!(err = client_call(c, op, &m, 0, info))) {
        err = proto_read(client_msg_view(&m), reply, reply_bytes, false, info);
    }
    client_msg_free(&m);
    return err;
}

attnd_err client_call_json(attnd_client *c, proto_op op, const char *json, client_msg *reply,
                           attnd_errinfo *info) {
    size_t len = json ? strlen(json) : 0;
    client_msg m = {0};
    attnd_err err = json ? proto_json_check(json, len, info) : ATTND_OK;
    if (err || (err = client_request(c, PROTO_BODY + len, &m, info))) {
        return err;
    }
    if (len > 0) {
        memcpy(m.data + PROTO_BODY, json, len);
    }
    if ((err = client_call(c, op, &m, 0, info))) {
        return err;
    }
    if (proto_json_check(m.data + PROTO_BODY, m.bytes - PROTO_BODY, info)) {
        client_msg_free(&m);
        return attnd_fail(info, ATTND_EPROTO, "json", "the reply is not JSON");
    }
    *reply = m;
    return ATTND_OK;
}

// read_limits takes the limits out of hello's reply.  Keys that this library does not know are for
// newer ones.
static attnd_err read_limits(const client_msg *reply, attnd_limits *out, attnd_errinfo *info) {
    cJSON *doc;
    attnd_err err =
        proto_json_parse(&doc, reply->data + PROTO_BODY, reply->bytes - PROTO_BODY, info);
    if (err) {
        return err;
    }
    proto_obj o, limits;
    const struct {
        const char *key;
        uint32_t max, *value;
    } keys[] = {
        {"message_bytes", PROTO_MAX_MESSAGE_BYTES, &out->message_bytes},
        {"in_flight", UINT32_MAX, &out->in_flight},
        {"step_seqs", PROTO_MAX_STEP_SEQS, &out->step_seqs},
        {"step_rows", PROTO_MAX_STEP_ROWS, &out->step_rows},
        {"sequences", UINT32_MAX, &out->sequences},
    };
    proto_obj_open(&o, doc, info);
    proto_obj_require(&o, "limits");
    if (proto_obj_child(&o, "limits", &limits)) {
        for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
            proto_obj_require(&limits, keys[i].key);
            proto_obj_u32(&limits, keys[i].key, 1, keys[i].max, keys[i].value);
        }
    }
    cJSON_Delete(doc);
    return o.err ? attnd_fail(info, ATTND_EPROTO, "limits", "the daemon's hello is malformed")
                 : ATTND_OK;
}

static attnd_err hello(attnd_client *c, const char *client_name, const char *tenant,
                       attnd_errinfo *info) {
    cJSON *body = cJSON_CreateObject();
    bool ok = cJSON_AddStringToObject(body, "client", client_name) &&
              cJSON_AddStringToObject(body, "tenant", tenant);
    char *text = ok ? cJSON_PrintUnformatted(body) : NULL;
    cJSON_Delete(body);
    if (!text) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for hello");
    }
    client_msg reply = {0};
    attnd_err err = client_call_json(c, PROTO_HELLO, text, &reply, info);
    cJSON_free(text);
    if (!err) {
        err = read_limits(&reply, &c->limits, info);
    }
    client_msg_free(&reply);
    return err;
}

attnd_err attnd_connect(attnd_client **out, const char *url, const attnd_connect_opts *opts,
                        attnd_errinfo *info) {
    attnd_connect_opts o = opts ? *opts : (attnd_connect_opts){0};
    if (!url) {
        return attnd_fail(info, ATTND_EINVAL, "url", "url is NULL");
    }
    if (o.timeout_ms < 0) {
        return attnd_fail(info, ATTND_EINVAL, "timeout_ms", "timeout_ms %d is negative",
                          o.timeout_ms);
    }
    attnd_client *c = calloc(1, sizeof(*c));
    if (!c) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a client");
    }
    pthread_mutex_init(&c->lock, NULL);
    c->timeout_ms = o.timeout_ms ? o.timeout_ms : DEFAULT_TIMEOUT_MS;
    c->limits.message_bytes = PROTO_BODY + PROTO_MAX_JSON_BYTES; // for hello
    attnd_err err = client_conn_open(&c->conn, url, c->timeout_ms, info);
    if (err || (err = hello(c, o.client_name ? o.client_name : program_invocation_short_name,
                            o.tenant ? o.tenant : "default", info))) {
        attnd_close(c);
        return err;
    }
    client_conn_limit(c->conn, c->limits.in_flight);
    *out = c;
    return ATTND_OK;
}

void attnd_close(attnd_client *c) {
    if (!c) {
        return;
    }
    client_conn_close(c->conn);
    client_models_free(c);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

const attnd_limits *attnd_get_limits(const attnd_client *c) {
    return &c->limits;
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
    client_msg m = {0};
    attnd_err err = client_call_json(c, code, takes_json && !json ? "{}" : json, &m, info);
    if (err) {
        return err;
    }
    char *text = strndup((const char *)m.data + PROTO_BODY, m.bytes - PROTO_BODY);
    client_msg_free(&m);
    if (!text) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for the reply");
    }
    *reply = text;
    return ATTND_OK;
}

void attnd_free(void *p) {
    free(p);
}
