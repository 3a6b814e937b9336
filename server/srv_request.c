// Replies.  A reply is written straight into the memory that its transport sends from.  Answering a
// request takes it out of its session, which may have waited for just that to end.
#include "server/srv_request.h"

#include <string.h>

#include "server/srv_session.h"

attnd_err srv_reply_begin(srv_request *rq, size_t body_bytes, size_t zero_bytes, uint8_t **body,
                          attnd_errinfo *info) {
    void *msg;
    attnd_err err = rq->conn->ops->reply_alloc(rq, sizeof(proto_header) + body_bytes, &msg, info);
    if (err) {
        return err;
    }
    proto_header header = {
        .magic = PROTO_MAGIC,
        .version = PROTO_VERSION,
        .op = rq->header.op,
        .request = rq->header.request,
        .body_bytes = (uint32_t)body_bytes,
        .status = rq->status,
    };
    memcpy(msg, &header, sizeof(header));
    *body = (uint8_t *)msg + sizeof(header);
    memset(*body, 0, zero_bytes);
    return ATTND_OK;
}

// leave takes a request that is about to be answered out of its session.
static srv_session *leave(srv_request *rq) {
    ATTND_ASSERT(!list_linked(&rq->wait_node));
    if (list_linked(&rq->node)) {
        list_remove(&rq->node);
    }
    return rq->session;
}

void srv_reply_end(srv_request *rq) {
    srv_session *session = leave(rq);
    rq->conn->ops->reply_send(rq);
    if (session) {
        srv_session_settle(session);
    }
}

void srv_reply_error(srv_request *rq, attnd_err code, const attnd_errinfo *info) {
    uint8_t *body;
    rq->status = code;
    if (srv_reply_begin(rq, sizeof(proto_error), sizeof(proto_error), &body, NULL)) {
        srv_session *session = leave(rq);
        rq->conn->ops->drop(rq);
        if (session) {
            srv_session_settle(session);
        }
        return;
    }
    proto_error error = {.detail = 0};
    if (info && info->code == code) {
        error.detail = info->detail;
        memcpy(error.field, info->field, strlen(info->field));
        memcpy(error.text, info->text, strlen(info->text));
    } else {
        strncpy(error.text, attnd_strerror(code), sizeof(error.text) - 1);
    }
    memcpy(body, &error, sizeof(error));
    if (rq->session) {
        rq->session->errors++;
    }
    srv_reply_end(rq);
}

void srv_reply_bytes(srv_request *rq, const void *bytes, size_t num_bytes) {
    uint8_t *body;
    attnd_errinfo info;
    attnd_err err = srv_reply_begin(rq, num_bytes, 0, &body, &info);
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    if (num_bytes) {
        memcpy(body, bytes, num_bytes);
    }
    srv_reply_end(rq);
}

void srv_reply_empty(srv_request *rq) {
    srv_reply_bytes(rq, NULL, 0);
}
