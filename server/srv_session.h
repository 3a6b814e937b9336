// srv_session is one client: its connections, its unanswered requests, its open steps, and the
// models it uses.  A session ends when a connection of it is lost: waiting requests are canceled,
// running ones awaited, steps aborted, and only then are its sequences given back, so that nothing
// is freed under a launch.  Loop thread only.
#ifndef ATTND_SERVER_SRV_SESSION_H
#define ATTND_SERVER_SRV_SESSION_H

#include "kvcache/kv_cache.h"
#include "server/srv_model.h"
#include "server/srv_request.h"

typedef struct srv_core srv_core; // srv_core.h

struct srv_session {
    srv_core *core;
    list_node node; // in core->sessions, or in core->free_sessions
    uint64_t id;    // of kv_cache
    uint64_t name;  // what clients call it: srv_session_name
    uint8_t secret[KV_SECRET_BYTES];
    uint32_t tenant;     // of kv_cache
    uint32_t tenant_idx; // in core->conf.tenants
    uint32_t uid;
    srv_conn *conn;           // NULL once the session is ending
    srv_conn *ring;           // the second one, a ring that has joined; NULL = none
    bool settling;            // srv_session_abort walks the lists: do not close yet
    bool reattached;          // models of the run before have to be opened again
    uint64_t orphan_until_ms; // it waits for its client to come back; 0 = it does not
    char client[PROTO_NAME_BYTES];
    list_node requests;   // unanswered, srv_request.node
    list_node steps;      // srv_step.node
    uint16_t *model_uses; // [conf.max_models], times that the session has opened each
    uint64_t opened_ms;
    uint32_t num_steps, num_seqs;  // held now
    uint64_t num_requests, errors; // since hello
};

// srv_session_open makes a session for a connection that has none.  ATTND_EBUSY: all are taken.
attnd_err srv_session_open(srv_core *core, srv_conn *conn, uint32_t tenant_idx, const char *client,
                           srv_session **out, attnd_errinfo *info);

// srv_session_init takes a free session for one of the cache, without secret and connection.
void srv_session_init(srv_core *core, srv_session *s, uint32_t tenant_idx, uint64_t id);

// srv_session_reattach makes a connection that of an orphan.  ATTND_ESTALE: no such session;
// ATTND_EPERM: a wrong secret, or not a user who may; ATTND_EBUSY: it has a connection.
attnd_err srv_session_reattach(srv_core *core, srv_conn *conn, uint64_t id, const uint8_t *secret,
                               const char *client, attnd_errinfo *info);

// srv_session_model returns a model that the session may use, NULL for none: of its tenant, and
// after a re-attach, opened again.
const srv_model *srv_session_model(const srv_session *s, uint32_t model);

// srv_session_join gives a session a second connection.  ATTND_ESTALE: no such session;
// ATTND_EPERM: a wrong secret, or not a user who may; ATTND_EEXIST: it has two.
attnd_err srv_session_join(srv_core *core, srv_conn *conn, uint64_t id, const uint8_t *secret,
                           attnd_errinfo *info);

// srv_session_has_secret compares in a time that tells nothing.
bool srv_session_has_secret(const srv_session *s, const uint8_t *secret);

// srv_session_abort cancels the session's waiting requests and ends its steps.
void srv_session_abort(srv_session *s);

// srv_session_end begins the end of a session that has lost a connection, and closes the other.
void srv_session_end(srv_session *s, const srv_conn *lost);

// srv_session_settle closes a session that is ending and has nothing left.  Call it whenever a
// request or a step of it has gone.
void srv_session_settle(srv_session *s);

// srv_session_name returns the id that clients know a session of the cache by.  A cache that starts
// empty counts from the beginning; a client that offers a session of an earlier one must not meet
// another one of the same number, so the ids that travel are mixed with the cache's salt.
uint64_t srv_session_name(const srv_core *core, uint64_t id);

// srv_session_way says how a session's client is connected: "messages", "ring", "in process" (it
// has the arena mapped) or "service" (it has a region); NULL when it is not.
const char *srv_session_way(const srv_session *s);

// srv_session_find returns the live session of a name, NULL for none.
srv_session *srv_session_find(srv_core *core, uint64_t name);

// srv_session_find_request returns an unanswered request of that id other than rq, NULL for none.
srv_request *srv_session_find_request(const srv_session *s, uint64_t request,
                                      const srv_request *except);

#endif
