// Operations on sequences: the cache does the work, and keeps the reply under the request's id.
#include <cjson/cJSON.h>
#include <string.h>

#include "proto/proto_json.h"
#include "server/srv_ops.h"

static kv_request kv_rq(const srv_request *rq) {
    return (kv_request){rq->session->id, rq->header.request};
}

static attnd_err must_be_zero(uint32_t value, const char *field, attnd_errinfo *info) {
    return value ? attnd_fail(info, ATTND_EINVAL, field, "must be 0") : ATTND_OK;
}

static attnd_err check_room(const srv_core *core, const srv_request *rq, attnd_errinfo *info) {
    if (rq->session->num_seqs >= core->conf.session_sequences) {
        return attnd_fail(info, ATTND_EBUSY, "", "the client holds %u sequences",
                          rq->session->num_seqs);
    }
    return ATTND_OK;
}

// reply_seq answers a request that made the session the holder of one more sequence.
static void reply_seq(srv_request *rq, attnd_err err, uint64_t seq, uint32_t len,
                      const attnd_errinfo *info) {
    proto_seq reply = {.seq = seq, .len = len};
    if (err) {
        srv_reply_error(rq, err, info);
    } else {
        rq->session->num_seqs++;
        srv_reply_bytes(rq, &reply, sizeof(reply));
    }
}

// reply_freed answers a request that may have given blocks back.
static void reply_freed(srv_core *core, srv_request *rq, attnd_err err, const attnd_errinfo *info) {
    if (err) {
        srv_reply_error(rq, err, info);
        return;
    }
    srv_reply_empty(rq);
    srv_core_freed(core);
}

static attnd_err read_seq(const srv_request *rq, proto_seq *body, bool with_len,
                          attnd_errinfo *info) {
    attnd_err err = proto_read(rq->msg, body, sizeof(*body), true, info);
    if (!err) {
        err = must_be_zero(body->reserved, "reserved", info);
    }
    return err || with_len ? err : must_be_zero(body->len, "len", info);
}

SRV_HANDLER(seq_create) {
    (void)kept;
    proto_seq_create body;
    uint64_t seq = 0;
    attnd_errinfo info;
    attnd_err err = proto_read(rq->msg, &body, sizeof(body), true, &info);
    if (!err && !srv_session_model(rq->session, body.model)) {
        err = attnd_fail(&info, ATTND_ENOENT, "model", "no such model");
    }
    if (!err) {
        err = check_room(core, rq, &info);
    }
    if (!err) {
        err = kv_seq_create_priority(core->kv, kv_rq(rq), body.model, body.priority, &seq, &info);
    }
    reply_seq(rq, err, seq, 0, &info);
}

SRV_HANDLER(seq_fork) {
    (void)kept;
    proto_seq body;
    uint64_t forked = 0;
    uint32_t len = 0;
    attnd_errinfo info;
    attnd_err err = read_seq(rq, &body, false, &info);
    if (!err) {
        err = check_room(core, rq, &info);
    }
    if (!err) {
        err = kv_seq_fork(core->kv, kv_rq(rq), body.seq, &forked, &len, &info);
    }
    reply_seq(rq, err, forked, len, &info);
}

SRV_HANDLER(seq_truncate) {
    (void)kept;
    proto_seq body;
    attnd_errinfo info;
    attnd_err err = read_seq(rq, &body, true, &info);
    if (!err) {
        err = kv_seq_truncate(core->kv, kv_rq(rq), body.seq, body.len, &info);
    }
    reply_freed(core, rq, err, &info);
}

SRV_HANDLER(seq_free) {
    (void)kept;
    proto_seq body;
    attnd_errinfo info;
    attnd_err err = read_seq(rq, &body, false, &info);
    if (!err) {
        err = kv_seq_free(core->kv, kv_rq(rq), body.seq, &info);
        rq->session->num_seqs -= !err;
    }
    reply_freed(core, rq, err, &info);
}

SRV_HANDLER(seq_keep) {
    (void)kept;
    proto_seq_keep body;
    attnd_errinfo info;
    attnd_err err = proto_read(rq->msg, &body, sizeof(body), true, &info);
    if (!err) {
        err = proto_check_name(body.name, "name", true, &info);
    }
    if (!err) {
        err = kv_seq_keep(core->kv, kv_rq(rq), body.seq, body.name, body.ttl_ms, &info);
    }
    reply_freed(core, rq, err, &info);
}

// holds is true when the session holds a kept sequence of that name already.
static bool holds(const srv_core *core, const srv_session *s, uint32_t model, const char *name) {
    uint32_t cursor = 0;
    kv_seq_info info;
    while (kv_seq_next(core->kv, s->tenant, &cursor, &info)) {
        if (info.session == s->id && info.model == model && strcmp(info.name, name) == 0) {
            return true;
        }
    }
    return false;
}

SRV_HANDLER(seq_attach) {
    (void)kept;
    proto_seq_attach body;
    bool held = false;
    uint64_t seq = 0;
    uint32_t len = 0;
    attnd_errinfo info;
    attnd_err err = proto_read(rq->msg, &body, sizeof(body), true, &info);
    if (!err) {
        err = must_be_zero(body.reserved, "reserved", &info);
    }
    if (!err) {
        err = proto_check_name(body.name, "name", false, &info);
    }
    if (!err && !srv_session_model(rq->session, body.model)) {
        err = attnd_fail(&info, ATTND_ENOENT, "model", "no such model");
    }
    if (!err) {
        held = holds(core, rq->session, body.model, body.name);
        err = held ? ATTND_OK : check_room(core, rq, &info);
    }
    if (!err) {
        err = kv_seq_attach(core->kv, kv_rq(rq), body.model, body.name, &seq, &len, &info);
    }
    rq->session->num_seqs -= !err && held; // it is no further one
    reply_seq(rq, err, seq, len, &info);
}

static void add_seqs(const srv_core *core, uint32_t tenant_idx, cJSON *list) {
    uint32_t cursor = 0;
    kv_seq_info info;
    while (kv_seq_next(core->kv, core->tenants[tenant_idx], &cursor, &info)) {
        cJSON *o = cJSON_CreateObject();
        proto_json_add_id(o, "seq", info.seq);
        proto_json_add_id(o, "session", srv_session_name(core, info.session));
        cJSON_AddStringToObject(o, "tenant", core->conf.tenants[tenant_idx].name);
        cJSON_AddNumberToObject(o, "model", info.model);
        cJSON_AddNumberToObject(o, "len", info.committed);
        cJSON_AddNumberToObject(o, "blocks", info.blocks);
        cJSON_AddBoolToObject(o, "in_step", info.in_step);
        cJSON_AddStringToObject(o, "name", info.name);
        cJSON_AddNumberToObject(o, "ttl_ms", (double)info.ttl_ms);
        cJSON_AddNumberToObject(o, "priority", info.priority);
        cJSON_AddItemToArray(list, o);
    }
}

SRV_HANDLER(seq_list) {
    (void)kept;
    cJSON *doc = cJSON_CreateObject();
    cJSON *list = cJSON_AddArrayToObject(doc, "sequences");
    for (uint32_t i = 0; i < core->conf.num_tenants; i++) {
        if (rq->conn->admin || i == rq->session->tenant_idx) {
            add_seqs(core, i, list);
        }
    }
    srv_reply_json(rq, doc);
}
