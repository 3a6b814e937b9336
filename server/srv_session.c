// Sessions: a pool, a list of the live ones, and an end in three stages.
//
//     connection lost -> cancel what waits, end the steps -> last request answered, last step gone
//                     -> the cache's session is closed: sequences and model uses are given back
//
// Everything is counted by list membership: a session is over when both its lists are empty.
#include "server/srv_session.h"

#include <string.h>
#include <sys/random.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_core.h"
#include "server/srv_ops.h"

static void close_models(srv_session *s) {
    for (uint32_t i = 0; i < s->core->models.max; i++) {
        for (; s->model_uses[i]; s->model_uses[i]--) {
            kv_model_close(s->core->kv, i);
        }
    }
}

void srv_session_init(srv_core *core, srv_session *s, uint32_t tenant_idx, uint64_t id) {
    list_remove(&s->node);
    list_append(&core->sessions, &s->node);
    core->num_sessions++;
    s->id = id;
    s->name = srv_session_name(core, id);
    s->core = core;
    s->tenant = core->tenants[tenant_idx];
    s->tenant_idx = tenant_idx;
    s->uid = UINT32_MAX;
    s->conn = s->ring = NULL;
    s->settling = s->reattached = false;
    s->orphan_until_ms = 0;
    s->opened_ms = attnd_clock_ms();
    s->num_requests = s->errors = 0;
    s->num_steps = s->num_seqs = 0;
    memset(s->client, 0, sizeof(s->client));
    list_init(&s->requests);
    list_init(&s->steps);
}

static void take_conn(srv_session *s, srv_conn *conn, const char *client) {
    s->uid = conn->uid;
    s->conn = conn;
    memset(s->client, 0, sizeof(s->client));
    memcpy(s->client, client, strnlen(client, sizeof(s->client) - 1));
    conn->session = s;
}

attnd_err srv_session_open(srv_core *core, srv_conn *conn, uint32_t tenant_idx, const char *client,
                           srv_session **out, attnd_errinfo *info) {
    list_node *node = list_first(&core->free_sessions);
    if (!node) {
        return attnd_fail(info, ATTND_EBUSY, "", "all sessions are taken");
    }
    srv_session *s = LIST_ENTRY(node, srv_session, node);
    if (getrandom(s->secret, sizeof(s->secret), 0) != (ssize_t)sizeof(s->secret)) {
        return attnd_fail(info, ATTND_EIO, "", "no random bytes for a secret");
    }
    attnd_err err = kv_session_open(core->kv, core->tenants[tenant_idx], s->secret, &s->id);
    if (err) {
        return attnd_fail(info, err, "", "all sessions are taken");
    }
    srv_session_init(core, s, tenant_idx, s->id);
    take_conn(s, conn, client);
    *out = s;
    return ATTND_OK;
}

attnd_err srv_session_reattach(srv_core *core, srv_conn *conn, uint64_t id, const uint8_t *secret,
                               const char *client, attnd_errinfo *info) {
    srv_session *s = srv_session_find(core, id);
    if (!s) {
        return attnd_fail(info, ATTND_ESTALE, "session", "the session is gone");
    }
    if (!srv_session_has_secret(s, secret)) {
        return attnd_fail(info, ATTND_EPERM, "secret", "not the session's secret");
    }
    if (!s->orphan_until_ms) {
        return attnd_fail(info, ATTND_EBUSY, "session", "the session has another connection");
    }
    if (conn->admin || !srv_conf_admits(&core->conf.tenants[s->tenant_idx], conn->uid)) {
        return attnd_fail(info, ATTND_EPERM, "session", "not a session that this user may have");
    }
    s->orphan_until_ms = 0;
    s->reattached = true;
    take_conn(s, conn, client);
    return ATTND_OK;
}

const srv_model *srv_session_model(const srv_session *s, uint32_t model) {
    const srv_model *m = srv_models_get(&s->core->models, model, s->tenant);
    return m && s->reattached && !s->model_uses[model] ? NULL : m;
}

bool srv_session_has_secret(const srv_session *s, const uint8_t *secret) {
    uint8_t diff = 0;
    for (size_t i = 0; i < KV_SECRET_BYTES; i++) {
        diff |= (uint8_t)(s->secret[i] ^ secret[i]);
    }
    return diff == 0;
}

attnd_err srv_session_join(srv_core *core, srv_conn *conn, uint64_t id, const uint8_t *secret,
                           attnd_errinfo *info) {
    srv_session *s = srv_session_find(core, id);
    if (!s || !s->conn) {
        return attnd_fail(info, ATTND_ESTALE, "session", "the session is gone");
    }
    if (!srv_session_has_secret(s, secret)) {
        return attnd_fail(info, ATTND_EPERM, "secret", "not the session's secret");
    }
    if (s->conn->admin || !srv_conf_admits(&core->conf.tenants[s->tenant_idx], conn->uid)) {
        return attnd_fail(info, ATTND_EPERM, "session", "not a session that this user may join");
    }
    if (s->ring || s->conn->arena) { // whose end nobody but its own connection may begin
        return attnd_fail(info, ATTND_EEXIST, "session", "the session has a ring");
    }
    s->ring = conn;
    conn->session = s;
    return ATTND_OK;
}

static bool cancel_one(srv_session *s) {
    LIST_FOREACH (&s->requests, node) {
        srv_request *rq = LIST_ENTRY(node, srv_request, node);
        if (rq->cancel) {
            void (*cancel)(srv_request *) = rq->cancel;
            rq->cancel = NULL;
            cancel(rq);
            return true;
        }
    }
    return false;
}

static bool end_one(srv_session *s) {
    LIST_FOREACH (&s->steps, node) {
        srv_step *step = LIST_ENTRY(node, srv_step, node);
        if (step->state != SRV_STEP_ENDING) {
            srv_step_end(s->core, step);
            return true;
        }
    }
    return false;
}

// A canceled request may answer others and take them out of the lists, so each turn starts anew.
void srv_session_abort(srv_session *s) {
    s->settling = true;
    while (cancel_one(s)) {
    }
    while (end_one(s)) {
    }
    s->settling = false;
    srv_session_settle(s);
}

static void leave(srv_conn **conn, const srv_conn *lost) {
    srv_conn *c = *conn;
    *conn = NULL;
    if (c) {
        c->session = NULL;
    }
    if (c && c != lost) {
        c->ops->close(c);
    }
}

// A drain ends with every connection lost, and the next run may be asked for the sessions.
void srv_session_end(srv_session *s, const srv_conn *lost) {
    if (s->core->draining) {
        s->orphan_until_ms = UINT64_MAX;
    }
    leave(&s->conn, lost);
    leave(&s->ring, lost);
    srv_session_abort(s);
}

void srv_session_settle(srv_session *s) {
    if (s->conn || s->orphan_until_ms || s->settling || !list_empty(&s->requests) ||
        !list_empty(&s->steps)) {
        return;
    }
    srv_core *core = s->core;
    uint64_t now = attnd_clock_ms();
    attnd_err err = kv_session_close(core->kv, s->id, now);
    ATTND_ASSERT(!err);
    core->hooks->rearm(core->hooks->ctx, now); // kept sequences' time runs from here
    close_models(s);
    list_remove(&s->node);
    list_append(&core->free_sessions, &s->node);
    core->num_sessions--;
    attnd_log(ATTND_LOG_INFO, "session", "%llx of %s ended: %llu requests, %llu errors",
              (unsigned long long)s->name, s->client, (unsigned long long)s->num_requests,
              (unsigned long long)s->errors);
    srv_core_freed(core);
}

uint64_t srv_session_name(const srv_core *core, uint64_t id) {
    return id ? id ^ kv_salt(core->kv) : 0;
}

const char *srv_session_way(const srv_session *s) {
    const srv_conn *conn = s->ring ? s->ring : s->conn;
    return !conn          ? NULL
           : conn->arena  ? "in process"
           : conn->region ? "service"
           : conn->ring   ? "ring"
                          : "messages";
}

srv_session *srv_session_find(srv_core *core, uint64_t name) {
    LIST_FOREACH (&core->sessions, node) {
        srv_session *s = LIST_ENTRY(node, srv_session, node);
        if (s->name == name) {
            return s;
        }
    }
    return NULL;
}

srv_request *srv_session_find_request(const srv_session *s, uint64_t request,
                                      const srv_request *except) {
    LIST_FOREACH (&s->requests, node) {
        srv_request *rq = LIST_ENTRY(node, srv_request, node);
        if (rq->header.request == request && rq != except) {
            return rq;
        }
    }
    return NULL;
}
