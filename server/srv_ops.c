// The table of operations and what is checked before any handler runs: header, size, who may,
// drain, repeats.
//
// Exactly once.  The cache keeps the replies of state-changing requests.  A repeat of an answered
// one is answered from there; a repeat of one that still runs gets EBUSY, since its reply will come
// on the first; a refused request was kept nowhere and is simply tried again.
#include "server/srv_ops.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "proto/log.h"
#include "proto/proto_ring.h"

#define FIXED(type) (sizeof(proto_header) + sizeof(type))
#define JSON        (sizeof(proto_header) + PROTO_MAX_JSON_BYTES)
#define NONE        sizeof(proto_header)

enum {
    ONCE = SRV_OP_ONCE,
    STARTS = SRV_OP_STARTS,
    ADMIN = SRV_OP_ADMIN,
    AGAIN = SRV_OP_REPEATS,
    ROOM = SRV_OP_ROOM,
};

#define OP(name, NAME, bytes, flags, kv_op) \
    { #name, PROTO_##NAME, srv_op_##name, bytes, flags, kv_op }

const srv_op srv_ops[] = {
    OP(hello, HELLO, JSON, SRV_OP_HELLO | STARTS | ROOM, 0),
    OP(model_open, MODEL_OPEN, JSON, STARTS | ROOM, 0),
    OP(model_close, MODEL_CLOSE, FIXED(proto_model), 0, 0),
    OP(model_list, MODEL_LIST, NONE, 0, 0),
    OP(seq_create, SEQ_CREATE, FIXED(proto_seq_create), ONCE | STARTS, KV_OP_CREATE),
    OP(seq_fork, SEQ_FORK, FIXED(proto_seq), ONCE | STARTS, KV_OP_FORK),
    OP(seq_truncate, SEQ_TRUNCATE, FIXED(proto_seq), ONCE, KV_OP_TRUNCATE),
    OP(seq_free, SEQ_FREE, FIXED(proto_seq), ONCE, KV_OP_FREE),
    OP(seq_keep, SEQ_KEEP, FIXED(proto_seq_keep), ONCE, KV_OP_KEEP),
    OP(seq_attach, SEQ_ATTACH, FIXED(proto_seq_attach), ONCE | STARTS, KV_OP_ATTACH),
    OP(seq_list, SEQ_LIST, NONE, 0, 0),
    OP(step, STEP, 0, ONCE | STARTS, KV_OP_STEP),
    OP(attend, ATTEND, 0, 0, 0),
    OP(commit, COMMIT, 0, ONCE, KV_OP_COMMIT),
    OP(cancel, CANCEL, FIXED(proto_cancel), 0, 0),
    OP(decode, DECODE, 0, ONCE | STARTS | AGAIN, KV_OP_COMMIT),
    OP(prefill, PREFILL, 0, ONCE | STARTS | AGAIN, KV_OP_COMMIT),
    OP(attend_all, ATTEND_ALL, 0, 0, 0),
    OP(stats, STATS, NONE, 0, 0),
    OP(session_list, SESSION_LIST, NONE, ADMIN, 0),
    OP(drain, DRAIN, JSON, ADMIN, 0),
    OP(config_get, CONFIG_GET, JSON, ADMIN, 0),
    OP(config_set, CONFIG_SET, JSON, ADMIN, 0),
    {NULL, 0, NULL, 0, 0, 0},
};

const srv_op *srv_ops_find(uint32_t code) {
    for (const srv_op *op = srv_ops; op->name; op++) {
        if (op->code == code) {
            return op;
        }
    }
    return NULL;
}

static attnd_err check_op(const srv_core *core, const srv_request *rq, const srv_op *op,
                          attnd_errinfo *info) {
    if (!op) {
        return attnd_fail(info, ATTND_ENOTSUP, "op", "op %u is not known", rq->header.op);
    }
    if ((op->flags & SRV_OP_ADMIN) && !rq->conn->admin) {
        return attnd_fail(info, ATTND_EPERM, "op", "%s is for the administration socket", op->name);
    }
    if (op->max_bytes && rq->msg.bytes > op->max_bytes) {
        return attnd_fail(info, ATTND_EMSGSIZE, "", "a %s message has at most %llu bytes", op->name,
                          (unsigned long long)op->max_bytes);
    }
    if ((op->flags & SRV_OP_ROOM) && rq->reply_room < PROTO_RING_JSON_REPLY) {
        return attnd_fail(info, ATTND_EMSGSIZE, "reply_bytes", "a reply to %s has up to %d bytes",
                          op->name, PROTO_RING_JSON_REPLY);
    }
    bool hello = (op->flags & SRV_OP_HELLO) != 0;
    if (!hello && !rq->conn->session) {
        return attnd_fail(info, ATTND_ESTALE, "session",
                          "this connection has no session: its first request must be hello");
    }
    if ((op->flags & SRV_OP_STARTS) && core->draining && !(hello && rq->conn->admin)) {
        return attnd_fail(info, ATTND_ESHUTDOWN, "", "%s", attnd_strerror(ATTND_ESHUTDOWN));
    }
    return ATTND_OK;
}

// once_outstanding counts the session's unanswered requests whose replies will be kept.
static uint32_t once_outstanding(const srv_session *s) {
    uint32_t num = 0;
    LIST_FOREACH (&s->requests, node) {
        const srv_op *op = srv_ops_find(LIST_ENTRY(node, srv_request, node)->header.op);
        num += op && (op->flags & SRV_OP_ONCE);
    }
    return num;
}

// find_kept looks a request up whose id may have been used.  *found when it was answered before.
static attnd_err find_kept(const srv_core *core, const srv_request *rq, const srv_op *op,
                           kv_reply *kept, bool *found, attnd_errinfo *info) {
    const srv_session *s = rq->session;
    if (srv_session_find_request(s, rq->header.request, rq)) {
        return attnd_fail(info, ATTND_EBUSY, "request", "a request of this id is under way");
    }
    if (once_outstanding(s) > PROTO_REQUEST_WINDOW) {
        return attnd_fail(info, ATTND_EBUSY, "", "over %d state-changing requests outstanding",
                          PROTO_REQUEST_WINDOW);
    }
    attnd_err err = kv_reply_find(core->kv, (kv_request){s->id, rq->header.request}, kept);
    *found = err == ATTND_OK;
    if (err == ATTND_ENOENT) {
        return ATTND_OK;
    }
    if (err) {
        return attnd_fail(info, err, "request", "the id is below the window of kept replies");
    }
    if (kept->op != op->kv_op) {
        return attnd_fail(info, ATTND_EINVAL, "request", "the id was used for another operation");
    }
    return ATTND_OK;
}

void srv_dispatch(srv_core *core, srv_request *rq) {
    attnd_errinfo info = {.code = ATTND_OK};
    attnd_err err = proto_read_header(rq->msg, &rq->header, &info);
    const srv_op *op = srv_ops_find(rq->header.op);
    if (!err) {
        err = check_op(core, rq, op, &info);
    }
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    rq->session = rq->conn->session;
    if (rq->session) {
        list_append(&rq->session->requests, &rq->node);
        rq->session->num_requests++;
    }
    kv_reply kept;
    bool found = false;
    if (op->flags & SRV_OP_ONCE) {
        err = find_kept(core, rq, op, &kept, &found, &info);
    }
    if (err) {
        srv_reply_error(rq, err, &info);
    } else if (found && !(op->flags & SRV_OP_REPEATS)) {
        srv_reply_kept(rq, &kept);
    } else {
        op->handler(core, rq, found ? &kept : NULL);
    }
}

void srv_reply_json(srv_request *rq, cJSON *doc) {
    char *text = doc ? cJSON_PrintUnformatted(doc) : NULL;
    cJSON_Delete(doc);
    if (!text) {
        srv_reply_error(rq, ATTND_ENOMEM, NULL);
        return;
    }
    srv_reply_bytes(rq, text, strlen(text));
    cJSON_free(text);
}

// reply_list sends a fixed head and 32-bit values behind it.
static void reply_list(srv_request *rq, const void *head, size_t head_bytes, const uint32_t *values,
                       size_t num) {
    uint8_t *body;
    attnd_errinfo info;
    attnd_err err = srv_reply_begin(rq, head_bytes + num * sizeof(*values), 0, &body, &info);
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    memcpy(body, head, head_bytes);
    if (num) {
        memcpy(body + head_bytes, values, num * sizeof(*values));
    }
    srv_reply_end(rq);
}

void srv_reply_kept(srv_request *rq, const kv_reply *kept) {
    proto_seq seq = {.seq = kept->id, .len = kept->num_values ? kept->values[0] : 0};
    proto_step_reply step = {.step = kept->id, .num_seqs = kept->num_values / 2};
    proto_lens lens = {.num_seqs = kept->num_values};
    switch ((kv_op)kept->op) {
    case KV_OP_CREATE:
    case KV_OP_FORK:
    case KV_OP_ATTACH:
        srv_reply_bytes(rq, &seq, sizeof(seq));
        return;
    case KV_OP_STEP:
        reply_list(rq, &step, sizeof(step), kept->values, kept->num_values);
        return;
    case KV_OP_COMMIT:
        reply_list(rq, &lens, sizeof(lens), kept->values, kept->num_values);
        return;
    case KV_OP_TRUNCATE:
    case KV_OP_FREE:
    case KV_OP_KEEP:
    case KV_OP_ABORT:
        break;
    }
    srv_reply_empty(rq);
}
