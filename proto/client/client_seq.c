// Sequences: one fixed struct out, one fixed struct back.
#include <string.h>

#include "proto/client/client.h"

// call_seq makes a request that answers with a sequence.
static attnd_err call_seq(attnd_client *c, proto_op op, const void *body, size_t bytes,
                          uint64_t *seq, uint32_t *len, attnd_errinfo *info) {
    proto_seq reply;
    attnd_err err = client_call_fixed(c, op, body, bytes, &reply, sizeof(reply), info);
    if (err) {
        return err;
    }
    *seq = reply.seq;
    if (len) {
        *len = reply.len;
    }
    return ATTND_OK;
}

// set_name writes a fixed name, zero-padded.
static attnd_err set_name(char out[PROTO_NAME_BYTES], const char *name, attnd_errinfo *info) {
    size_t len = name ? strlen(name) : 0;
    if (len >= PROTO_NAME_BYTES) {
        return attnd_fail(info, ATTND_EINVAL, "name", "name is longer than %d bytes",
                          PROTO_NAME_BYTES - 1);
    }
    if (len > 0) {
        memcpy(out, name, len + 1);
    }
    return ATTND_OK;
}

attnd_err attnd_seq_create(attnd_client *c, uint32_t model, uint64_t *seq, attnd_errinfo *info) {
    return attnd_seq_create_priority(c, model, 0, seq, info);
}

attnd_err attnd_seq_create_priority(attnd_client *c, uint32_t model, uint32_t priority,
                                    uint64_t *seq, attnd_errinfo *info) {
    proto_seq_create body = {.model = model, .priority = priority};
    attnd_err err = client_model_get(c, model, NULL, info);
    return err ? err : call_seq(c, PROTO_SEQ_CREATE, &body, sizeof(body), seq, NULL, info);
}

attnd_err attnd_seq_fork(attnd_client *c, uint64_t seq, uint64_t *forked, uint32_t *len,
                         attnd_errinfo *info) {
    proto_seq body = {.seq = seq};
    attnd_err err = client_engine_settle(c, 0, info);
    return err ? err : call_seq(c, PROTO_SEQ_FORK, &body, sizeof(body), forked, len, info);
}

attnd_err attnd_seq_truncate(attnd_client *c, uint64_t seq, uint32_t len, attnd_errinfo *info) {
    proto_seq body = {.seq = seq, .len = len};
    attnd_err err = client_engine_settle(c, 0, info);
    return err ? err : client_call_fixed(c, PROTO_SEQ_TRUNCATE, &body, sizeof(body), NULL, 0, info);
}

attnd_err attnd_seq_free(attnd_client *c, uint64_t seq, attnd_errinfo *info) {
    proto_seq body = {.seq = seq};
    attnd_err err = client_engine_settle(c, 0, info);
    return err ? err : client_call_fixed(c, PROTO_SEQ_FREE, &body, sizeof(body), NULL, 0, info);
}

attnd_err attnd_seq_keep(attnd_client *c, uint64_t seq, const char *name, uint64_t ttl_ms,
                         attnd_errinfo *info) {
    proto_seq_keep body = {.seq = seq, .ttl_ms = ttl_ms};
    attnd_err err = set_name(body.name, name, info);
    client_engine_waits(c);
    err = err ? err : client_engine_settle(c, 0, info);
    return err ? err : client_call_fixed(c, PROTO_SEQ_KEEP, &body, sizeof(body), NULL, 0, info);
}

attnd_err attnd_seq_attach(attnd_client *c, uint32_t model, const char *name, uint64_t *seq,
                           uint32_t *len, attnd_errinfo *info) {
    proto_seq_attach body = {.model = model};
    attnd_err err = set_name(body.name, name, info);
    err = err ? err : client_model_get(c, model, NULL, info);
    client_engine_waits(c);
    return err ? err : call_seq(c, PROTO_SEQ_ATTACH, &body, sizeof(body), seq, len, info);
}
