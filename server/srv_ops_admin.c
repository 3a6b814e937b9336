// hello, statistics and administration: what is said in JSON and rare.
//
// A tenant is named by the client and admitted by the uid of its socket's peer.  That a tenant does
// not exist and that it is somebody else's get the same answer.
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "proto/proto_json.h"
#include "server/srv_ops.h"

// body_of returns the body of a request.
static const void *body_of(const srv_request *rq) {
    return rq->msg.data + sizeof(proto_header);
}

static attnd_err open_json(const srv_request *rq, cJSON **doc, proto_obj *o, attnd_errinfo *info) {
    attnd_err err = proto_json_parse(doc, body_of(rq), rq->header.body_bytes, info);
    if (!err) {
        proto_obj_open(o, *doc, info);
    }
    return err;
}

// ---- hello

typedef struct hello {
    char client[PROTO_NAME_BYTES];
    char tenant[PROTO_NAME_BYTES];
    uint64_t session;
    uint8_t secret[KV_SECRET_BYTES];
    bool reattach;
} hello;

static attnd_err read_hello(const srv_request *rq, hello *h, attnd_errinfo *info) {
    cJSON *doc = NULL;
    proto_obj o;
    attnd_err err = open_json(rq, &doc, &o, info);
    if (err) {
        return err;
    }
    strcpy(h->client, "unnamed");
    strcpy(h->tenant, "default");
    proto_obj_text(&o, "client", h->client, sizeof(h->client));
    proto_obj_text(&o, "tenant", h->tenant, sizeof(h->tenant));
    bool session = proto_obj_id(&o, "session", &h->session);
    bool secret = proto_obj_hex(&o, "secret", h->secret, sizeof(h->secret));
    if (session != secret) {
        proto_obj_fail(&o, session ? "secret" : "session", ATTND_EINVAL,
                       "session and secret go together");
    }
    h->reattach = session && secret;
    err = proto_obj_close(&o);
    cJSON_Delete(doc);
    return err;
}

static attnd_err find_tenant(const srv_core *core, const srv_conn *conn, const char *name,
                             uint32_t *idx, attnd_errinfo *info) {
    for (uint32_t i = 0; i < core->conf.num_tenants; i++) {
        const srv_conf_tenant *tenant = &core->conf.tenants[i];
        if (strcmp(tenant->name, name) == 0 &&
            (conn->admin || srv_conf_admits(tenant, conn->uid))) {
            *idx = i;
            return ATTND_OK;
        }
    }
    return attnd_fail(info, ATTND_EPERM, "tenant", "not a tenant that this user may be");
}

static cJSON *describe_session(const srv_core *core, const srv_conn *conn) {
    uint64_t last_request = kv_session_highest(core->kv, conn->session->id);
    const srv_session *s = conn->session;
    cJSON *doc = cJSON_CreateObject();
    cJSON *limits = cJSON_AddObjectToObject(doc, "limits");
    cJSON_AddStringToObject(doc, "daemon", "attnd " ATTND_VERSION);
    cJSON_AddNumberToObject(doc, "version", PROTO_VERSION);
    proto_json_add_id(doc, "session", s->name);
    proto_json_add_hex(doc, "secret", s->secret, sizeof(s->secret));
    cJSON_AddStringToObject(doc, "tenant", core->conf.tenants[s->tenant_idx].name);
    cJSON_AddBoolToObject(doc, "reattached", s->reattached);
    proto_json_add_id(doc, "last_request", last_request);
    if (core->attach_path && s->uid != UINT32_MAX && !conn->admin) {
        cJSON_AddStringToObject(doc, "attach_socket", core->attach_path);
    } else { // over tcp:// it would be another machine's, and a ring has no administration
        cJSON_AddNullToObject(doc, "attach_socket");
    }
    cJSON_AddNumberToObject(limits, "message_bytes", (double)core->conf.message_bytes);
    cJSON_AddNumberToObject(limits, "in_flight", (double)core->conf.in_flight);
    cJSON_AddNumberToObject(limits, "step_seqs", (double)core->conf.step_seqs);
    cJSON_AddNumberToObject(limits, "step_rows", (double)core->conf.step_rows);
    cJSON_AddNumberToObject(limits, "sequences", (double)core->conf.max_sequences);
    return doc;
}

SRV_HANDLER(hello) {
    (void)kept;
    hello h = {.reattach = false};
    uint32_t tenant_idx = 0;
    srv_session *s = NULL;
    attnd_errinfo info;
    attnd_err err = ATTND_OK;
    if (rq->conn->session) {
        err = attnd_fail(&info, ATTND_EEXIST, "session", "this connection has a session already");
    }
    if (!err) {
        err = read_hello(rq, &h, &info);
    }
    if (!err) {
        err = find_tenant(core, rq->conn, h.tenant, &tenant_idx, &info);
    }
    if (!err) {
        err = h.reattach
                  ? srv_session_reattach(core, rq->conn, h.session, h.secret, h.client, &info)
                  : srv_session_open(core, rq->conn, tenant_idx, h.client, &s, &info);
    }
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    s = rq->conn->session;
    attnd_log(ATTND_LOG_INFO, "session", "%llx of %s, tenant %s, %s, pid %d, uid %d%s%s",
              (unsigned long long)s->name, s->client, core->conf.tenants[s->tenant_idx].name,
              srv_session_way(s), (int)rq->conn->pid, (int)s->uid,
              rq->conn->admin ? ", administration" : "", s->reattached ? ", re-attached" : "");
    srv_reply_json(rq, describe_session(core, rq->conn));
}

// ---- stats

static void add_blocks(cJSON *o, uint32_t total, uint32_t free, uint32_t cached, uint32_t in_use) {
    cJSON_AddNumberToObject(o, "total", total);
    cJSON_AddNumberToObject(o, "free", free);
    cJSON_AddNumberToObject(o, "cached", cached);
    cJSON_AddNumberToObject(o, "in_use", in_use);
}

static void add_cache(const srv_core *core, cJSON *doc) {
    kv_info info;
    kv_get_info(core->kv, &info);
    add_blocks(cJSON_AddObjectToObject(doc, "blocks"), info.total, info.free, info.cached,
               info.in_use);
    cJSON *classes = cJSON_AddArrayToObject(doc, "classes");
    kv_class_info class;
    for (uint32_t i = 0; kv_class_get(core->kv, i, &class) == ATTND_OK; i++) {
        cJSON *o = cJSON_CreateObject();
        cJSON_AddNumberToObject(o, "block_bytes", (double)class.block_bytes);
        cJSON_AddNumberToObject(o, "slabs", class.slabs);
        add_blocks(o, class.total, class.free, class.cached, class.in_use);
        cJSON_AddItemToArray(classes, o);
    }
    cJSON *arena = cJSON_AddObjectToObject(doc, "arena");
    static const char *const pages[] = {"small", "transparent_huge", "huge"};
    cJSON_AddNumberToObject(arena, "bytes", (double)info.arena_bytes);
    cJSON_AddNumberToObject(arena, "in_use_bytes", (double)info.in_use_bytes);
    cJSON_AddNumberToObject(arena, "cached_bytes", (double)info.cached_bytes);
    cJSON_AddNumberToObject(arena, "slab_bytes", (double)info.slab_bytes);
    cJSON_AddNumberToObject(arena, "slabs", info.slabs);
    cJSON_AddNumberToObject(arena, "unassigned_slabs", info.unassigned_slabs);
    cJSON_AddStringToObject(arena, "kind", core->arena->ops->kind);
    cJSON_AddStringToObject(arena, "pages", pages[core->arena->pages]);
    cJSON *prefixes = cJSON_AddObjectToObject(doc, "prefix_cache");
    cJSON_AddNumberToObject(prefixes, "blocks", info.prefix_blocks);
    cJSON_AddNumberToObject(prefixes, "looked_up_tokens", (double)info.looked_up_tokens);
    cJSON_AddNumberToObject(prefixes, "found_tokens", (double)info.found_tokens);
    cJSON_AddNumberToObject(prefixes, "evictions", (double)info.evictions);
    cJSON_AddNumberToObject(doc, "sequences", info.seqs);
    cJSON_AddNumberToObject(doc, "models", info.models);
    cJSON_AddNumberToObject(doc, "sessions", core->num_sessions);
    cJSON_AddNumberToObject(doc, "steps", core->steps.num_open);
    cJSON_AddNumberToObject(doc, "accounting_mismatches", (double)info.mismatches);
}

static void add_device(const srv_core *core, cJSON *doc) {
    cJSON *o = cJSON_AddObjectToObject(doc, "device");
    cJSON_AddStringToObject(o, "device", core->backend->device);
    cJSON_AddStringToObject(o, "name", core->backend->name);
    cJSON_AddStringToObject(o, "kernels", core->backend->kernels);
}

static void add_scheduler(const srv_core *core, cJSON *doc) {
    sched_info info;
    sched_get_info(core->sched, &info);
    cJSON *o = cJSON_AddObjectToObject(doc, "scheduler");
    cJSON_AddNumberToObject(o, "queued", info.queued);
    cJSON_AddNumberToObject(o, "running", info.running);
    cJSON_AddNumberToObject(o, "waiting_for_blocks", sched_wait_count(core->wait));
    cJSON_AddNumberToObject(o, "launches", (double)info.launches);
    cJSON_AddNumberToObject(o, "requests", (double)info.requests);
    cJSON_AddNumberToObject(o, "rows", (double)info.rows);
    cJSON_AddNumberToObject(o, "copies", (double)info.copies);
    cJSON_AddNumberToObject(o, "decode_tokens", (double)info.decode_tokens);
    cJSON_AddNumberToObject(o, "prefill_tokens", (double)info.prefill_tokens);
    cJSON_AddNumberToObject(o, "busy_us", (double)info.busy_us);
    cJSON *last = cJSON_AddObjectToObject(o, "last");
    cJSON_AddStringToObject(last, "kernel", info.last.kernel ? info.last.kernel : "none");
    cJSON_AddStringToObject(last, "why", info.last.why ? info.last.why : "nothing ran yet");
    cJSON_AddNumberToObject(last, "splits", info.last.splits);
    cJSON_AddNumberToObject(last, "rows", info.last.rows);
}

// add_tenants lists the caller's own tenant, over the administration socket every one.
static void add_tenants(const srv_core *core, const srv_request *rq, cJSON *doc) {
    cJSON *tenants = cJSON_AddArrayToObject(doc, "tenants");
    for (uint32_t i = 0; i < core->conf.num_tenants; i++) {
        char name[KV_NAME_BYTES];
        uint32_t blocks, quota;
        if ((rq->conn->admin || i == rq->session->tenant_idx) &&
            kv_tenant_get(core->kv, core->tenants[i], name, &blocks, &quota) == ATTND_OK) {
            cJSON *o = cJSON_CreateObject();
            cJSON_AddStringToObject(o, "name", name);
            cJSON_AddNumberToObject(o, "blocks", blocks);
            cJSON_AddNumberToObject(o, "cached_blocks",
                                    kv_tenant_cached(core->kv, core->tenants[i]));
            cJSON_AddNumberToObject(o, "quota_blocks", quota);
            cJSON_AddNumberToObject(o, "share", (double)core->conf.tenants[i].share);
            cJSON_AddItemToArray(tenants, o);
        }
    }
}

SRV_HANDLER(stats) {
    (void)kept;
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "daemon", "attnd " ATTND_VERSION);
    cJSON_AddStringToObject(doc, "state",
                            core->lost       ? "lost"
                            : core->draining ? "draining"
                                             : "ready");
    cJSON_AddNumberToObject(doc, "uptime_s", (double)(attnd_clock_ms() - core->started_ms) / 1000);
    add_device(core, doc);
    add_cache(core, doc);
    add_scheduler(core, doc);
    add_tenants(core, rq, doc);
    core->hooks->describe(core->hooks->ctx, doc);
    srv_reply_json(rq, doc);
}

SRV_HANDLER(session_list) {
    (void)kept;
    cJSON *doc = cJSON_CreateObject();
    cJSON *list = cJSON_AddArrayToObject(doc, "sessions");
    uint64_t now = attnd_clock_ms();
    LIST_FOREACH (&core->sessions, node) {
        const srv_session *s = LIST_ENTRY(node, srv_session, node);
        cJSON *o = cJSON_CreateObject();
        proto_json_add_id(o, "session", s->name);
        cJSON_AddStringToObject(o, "client", s->client);
        cJSON_AddStringToObject(o, "tenant", core->conf.tenants[s->tenant_idx].name);
        cJSON_AddBoolToObject(o, "connected", s->conn != NULL);
        cJSON_AddBoolToObject(o, "administration", s->conn && s->conn->admin);
        cJSON_AddNumberToObject(o, "uid", s->uid == UINT32_MAX ? -1 : (double)s->uid);
        const char *way = srv_session_way(s);
        cJSON_AddItemToObject(o, "way", way ? cJSON_CreateString(way) : cJSON_CreateNull());
        cJSON_AddNumberToObject(o, "pid", s->conn ? s->conn->pid : -1);
        cJSON_AddNumberToObject(o, "age_s", (double)(now - s->opened_ms) / 1000);
        cJSON_AddNumberToObject(o, "requests", (double)s->num_requests);
        cJSON_AddNumberToObject(o, "errors", (double)s->errors);
        uint32_t in_flight = 0, steps = 0;
        LIST_FOREACH (&s->requests, rq_node) {
            in_flight++;
        }
        LIST_FOREACH (&s->steps, step_node) {
            steps++;
        }
        cJSON_AddNumberToObject(o, "in_flight", in_flight);
        cJSON_AddNumberToObject(o, "steps", steps);
        cJSON_AddItemToArray(list, o);
    }
    srv_reply_json(rq, doc);
}

// ---- drain and configuration

SRV_HANDLER(drain) {
    (void)kept;
    cJSON *doc = NULL;
    proto_obj o;
    attnd_errinfo info;
    uint32_t timeout_ms = (uint32_t)core->conf.drain_timeout_ms;
    attnd_err err = open_json(rq, &doc, &o, &info);
    if (!err) {
        proto_obj_u32(&o, "timeout_ms", 0, UINT32_MAX, &timeout_ms);
        err = proto_obj_close(&o);
    }
    cJSON_Delete(doc);
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    core->hooks->drain(core->hooks->ctx, timeout_ms);
    cJSON *reply = cJSON_CreateObject();
    cJSON_AddTrueToObject(reply, "draining");
    cJSON_AddNumberToObject(reply, "timeout_ms", timeout_ms);
    cJSON_AddNumberToObject(reply, "sessions", core->num_sessions);
    cJSON_AddNumberToObject(reply, "steps", core->steps.num_open);
    srv_reply_json(rq, reply);
}

static void add_value(void *arg, const char *key, const char *value) {
    cJSON_AddStringToObject(arg, key, value);
}

SRV_HANDLER(config_get) {
    (void)kept;
    cJSON *doc = NULL, *reply = cJSON_CreateObject();
    proto_obj o;
    attnd_errinfo info;
    char key[2 * SRV_CONF_NAME_BYTES], value[SRV_CONF_TEXT_BYTES];
    attnd_err err = open_json(rq, &doc, &o, &info);
    if (!err) {
        bool one = proto_obj_text(&o, "key", key, sizeof(key));
        err = proto_obj_close(&o);
        if (!err && one) {
            err = srv_conf_get(&core->conf, key, value, &info);
            add_value(reply, key, err ? "" : value);
        } else if (!err) {
            srv_conf_each(&core->conf, add_value, reply);
        }
    }
    cJSON_Delete(doc);
    if (err) {
        cJSON_Delete(reply);
        srv_reply_error(rq, err, &info);
        return;
    }
    srv_reply_json(rq, reply);
}

static attnd_err set_value(srv_core *core, const char *key, const char *value,
                           attnd_errinfo *info) {
    srv_conf *next = malloc(sizeof(*next));
    if (!next) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory");
    }
    *next = core->conf;
    attnd_err err =
        srv_conf_set(next, key, value, info); // what is no value is none at a start, too
    if (!err && !srv_conf_find(key)->reloadable) {
        err = attnd_fail(info, ATTND_ENOTSUP, "key", "%.64s takes effect at a start only", key);
    }
    if (!err) {
        core->conf = *next;
        err = srv_core_apply_tenants(core, info);
        core->hooks->reconfigured(core->hooks->ctx);
    }
    free(next);
    return err;
}

SRV_HANDLER(config_set) {
    (void)kept;
    cJSON *doc = NULL;
    proto_obj o;
    attnd_errinfo info;
    char key[2 * SRV_CONF_NAME_BYTES] = "", value[SRV_CONF_TEXT_BYTES] = "";
    attnd_err err = open_json(rq, &doc, &o, &info);
    if (!err) {
        proto_obj_require(&o, "key");
        proto_obj_require(&o, "value");
        proto_obj_text(&o, "key", key, sizeof(key));
        proto_obj_text(&o, "value", value, sizeof(value));
        err = proto_obj_close(&o);
    }
    cJSON_Delete(doc);
    if (!err) {
        err = set_value(core, key, value, &info);
    }
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    attnd_log(ATTND_LOG_INFO, "conf", "%s set to \"%s\"", key, value);
    cJSON *reply = cJSON_CreateObject();
    add_value(reply, key, value);
    srv_reply_json(rq, reply);
}
