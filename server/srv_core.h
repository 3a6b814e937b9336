// srv_core is what op handlers work on: the cache, the scheduler, sessions, models and steps, and
// the configuration.  srv_server makes it and drives it; it knows no transport and no loop, so the
// same handlers serve every transport.  Loop thread only.
#ifndef ATTND_SERVER_SRV_CORE_H
#define ATTND_SERVER_SRV_CORE_H

#include "kvcache/kv_cache.h"
#include "scheduler/sched.h"
#include "scheduler/sched_wait.h"
#include "server/srv_armed.h"
#include "server/srv_backend.h"
#include "server/srv_conf.h"
#include "server/srv_model.h"
#include "server/srv_process.h"
#include "server/srv_session.h"
#include "server/srv_step.h"

struct cJSON;

enum { SRV_ADMIN_CONNECTIONS = 16 }; // at once, beside those of clients

// srv_core_hooks is what the core asks of srv_server.
typedef struct srv_core_hooks {
    // rearm: srv_core_expire is to be called at that time at the latest.
    void (*rearm)(void *ctx, uint64_t at_ms);
    // drain begins to drain; called again, it can only shorten the timeout.
    void (*drain)(void *ctx, uint64_t timeout_ms);
    // reconfigured: a reloadable key of conf has changed.
    void (*reconfigured)(void *ctx);
    // stir: flags of regions are to be looked at (srv_armed.h).
    void (*stir)(void *ctx);
    // describe adds the server's own part to stats.
    void (*describe)(void *ctx, struct cJSON *out);
    void *ctx;
} srv_core_hooks;

typedef struct srv_op_count {
    uint64_t requests, errors;
} srv_op_count;

struct srv_core {
    srv_conf conf;
    const srv_core_hooks *hooks;
    const kv_arena *arena;
    kv_cache *kv;
    srv_backend *backend;
    sched *sched;
    sched_wait *wait;
    uint32_t tenants[SRV_CONF_MAX_TENANTS]; // of kv_cache, [conf.num_tenants]

    list_node sessions, free_sessions;
    srv_session *session_pool;
    uint16_t *session_model_uses;
    uint32_t num_sessions;

    srv_models models;
    bool *models_held;        // [conf.max_models], for sessions of the run before (srv_resume.c)
    uint64_t models_until_ms; // UINT64_MAX = none is held
    srv_steps steps;
    srv_armed_set armed;
    attn_row *rows; // [conf.step_seqs], to check a request with

    const char *attach_path; // of the attach socket; borrowed, NULL = there is none
    bool draining;
    const srv_processes *processes; // borrowed; NULL = there are no rings
    bool lost;                      // the device; the daemon drains, and ends with an error
    uint64_t started_ms;
};

// srv_core_init makes the pools and the cache, or goes on with that of ledger_fd (-1 = none), which
// it owns.  conf is copied, arena and hooks are borrowed.  The scheduler is made afterwards by
// srv_core_set_backend, since its backend, which is borrowed, needs the cache.
// ATTND_ENOMEM, ATTND_EINVAL.  srv_core_fini accepts a half-made core.
attnd_err srv_core_init(srv_core *core, const srv_conf *conf, const kv_arena *arena, int ledger_fd,
                        const srv_core_hooks *hooks, attnd_errinfo *info);
attnd_err srv_core_set_backend(srv_core *core, srv_backend *backend, attnd_errinfo *info);
void srv_core_fini(srv_core *core);

// srv_core_apply_tenants tells cache and scheduler the tenants of conf (also after a reload). After
// an error conf has those in front of the one that cannot be made: it is the one to start with.
attnd_err srv_core_apply_tenants(srv_core *core, attnd_errinfo *info);

// srv_core_expire ends what is past its deadline; returns when the next is due, UINT64_MAX = none.
uint64_t srv_core_expire(srv_core *core, uint64_t now_ms);

// srv_core_freed is to be called after anything that may have given blocks or models back.
void srv_core_freed(srv_core *core);

// srv_core_busy is true while a request of a session is unanswered or a step open: what a drain
// waits for.
bool srv_core_busy(const srv_core *core);

// srv_core_refuse_waiting answers steps that wait for blocks with ESHUTDOWN; core->draining is set.
void srv_core_refuse_waiting(srv_core *core);

// srv_core_abort ends every session's waiting requests and steps, for a drain past its timeout.
void srv_core_abort(srv_core *core);

#endif
