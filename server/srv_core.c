// The core: pools sized from the configuration, tenants, deadlines, and what follows from freed
// blocks.
#include "server/srv_core.h"

#include <stdlib.h>
#include <string.h>

#include "kvcache/kv_policy.h"
#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_resume.h"

// A session outlives its connection while something of it runs, so there are more sessions than
// connections.  The administration socket has its own few connections.
static uint32_t max_sessions(const srv_conf *conf) {
    return 2 * ((uint32_t)(conf->connections + conf->rings) + SRV_ADMIN_CONNECTIONS);
}

// prefix_blocks is how many blocks the prefix tree can have, spilled ones included.
static uint32_t prefix_blocks(const srv_conf *conf) {
    bool tiers = conf->tier_memory_bytes || conf->tier_file[0];
    return conf->prefixes ? (uint32_t)(conf->max_blocks + (tiers ? conf->tier_max_blocks : 0)) : 0;
}

static attnd_err make_cache(srv_core *core, int ledger_fd, attnd_errinfo *info) {
    const srv_conf *conf = &core->conf;
    kv_opts opts = {
        .slab_bytes = conf->slab_bytes,
        .max_blocks = (uint32_t)conf->max_blocks,
        .max_seqs = (uint32_t)conf->max_sequences,
        .max_seq_blocks = (uint32_t)conf->max_seq_blocks,
        .max_models = (uint32_t)conf->max_models,
        .max_tenants = SRV_CONF_MAX_TENANTS,
        .max_sessions = max_sessions(conf),
        .max_steps = (uint32_t)conf->steps,
        .max_step_seqs = (uint32_t)conf->step_seqs,
        .prefix_blocks = prefix_blocks(conf),
        .prefix_block_tokens = conf->prefixes ? (uint32_t)conf->prefix_block_tokens : 0,
        .policy = kv_policy_find(conf->eviction),
        .window_margin = PROTO_TRUNCATE_TOKENS,
    };
    return srv_resume_cache(&core->kv, core->arena, &opts, ledger_fd, info);
}

static attnd_err make_sessions(srv_core *core) {
    uint32_t num = max_sessions(&core->conf);
    size_t models = core->conf.max_models;
    core->session_pool = calloc(num, sizeof(*core->session_pool));
    core->session_model_uses = calloc(num * models, sizeof(*core->session_model_uses));
    core->rows = calloc(core->conf.step_seqs, sizeof(*core->rows));
    core->models_held = calloc(models, sizeof(*core->models_held));
    if (!core->models_held || !core->session_pool || !core->session_model_uses || !core->rows) {
        return ATTND_ENOMEM;
    }
    for (uint32_t i = 0; i < num; i++) {
        core->session_pool[i].model_uses = core->session_model_uses + i * models;
        list_append(&core->free_sessions, &core->session_pool[i].node);
    }
    return ATTND_OK;
}

attnd_err srv_core_init(srv_core *core, const srv_conf *conf, const kv_arena *arena, int ledger_fd,
                        const srv_core_hooks *hooks, attnd_errinfo *info) {
    memset(core, 0, sizeof(*core));
    core->conf = *conf;
    core->arena = arena;
    core->hooks = hooks;
    core->started_ms = attnd_clock_ms();
    core->models_until_ms = UINT64_MAX;
    list_init(&core->sessions);
    list_init(&core->free_sessions);
    attnd_err err = make_cache(core, ledger_fd, info);
    if (err) {
        return err;
    }
    err = make_sessions(core);
    if (!err) {
        err = srv_models_init(&core->models, (uint32_t)conf->max_models);
    }
    if (!err) {
        err = srv_steps_init(&core->steps, (uint32_t)conf->steps, (uint32_t)conf->step_seqs,
                             conf->step_bytes);
    }
    if (!err) {
        err = srv_armed_init(&core->armed, (uint32_t)conf->rings * PROTO_REGION_MAX_CALLS);
    }
    sched_wait_opts wait = {
        .max_waiting = (uint32_t)conf->steps,
        .max_tenant_waiting = (uint32_t)conf->steps,
        .max_tenants = SRV_CONF_MAX_TENANTS,
    };
    if (!err) {
        err = sched_wait_create(&core->wait, &wait);
    }
    return err ? attnd_fail(info, err, "", "no memory for the pools") : ATTND_OK;
}

static void ran_ahead(void *ctx, uint64_t ticket, const sched_launch *launch) {
    srv_armed_ran(ctx, ticket, launch);
}

attnd_err srv_core_set_backend(srv_core *core, srv_backend *backend, attnd_errinfo *info) {
    const srv_conf *conf = &core->conf;
    core->backend = backend;
    sched_opts opts = {
        .max_queued = (uint32_t)conf->queue,
        .max_tenant_queued = (uint32_t)conf->tenant_queue,
        .max_launch_rows = (uint32_t)conf->launch_rows,
        .max_tenants = SRV_CONF_MAX_TENANTS,
        .prefill_chunk_tokens = (int32_t)conf->prefill_chunk_tokens,
        .prefill_alone_tokens = (int32_t)conf->prefill_alone_tokens,
        .max_decodes_in_a_row = (uint32_t)conf->decodes_in_a_row,
        .now_us = attnd_clock_us,
    };
    attnd_err err = sched_create(&core->sched, &opts, &backend->sched);
    if (err) {
        return attnd_fail(info, err, "", "the scheduler cannot be made");
    }
    backend->ops->set_sched(backend, core->sched);
    backend->ran_ahead = ran_ahead;
    backend->ctx = core;
    return srv_core_apply_tenants(core, info);
}

void srv_core_fini(srv_core *core) {
    sched_free(core->sched);
    sched_wait_free(core->wait);
    srv_steps_fini(&core->steps);
    srv_armed_fini(&core->armed);
    srv_models_fini(&core->models);
    kv_free(core->kv);
    free(core->session_pool);
    free(core->session_model_uses);
    free(core->rows);
    free(core->models_held);
    memset(core, 0, sizeof(*core));
}

attnd_err srv_core_apply_tenants(srv_core *core, attnd_errinfo *info) {
    for (uint32_t i = 0; i < core->conf.num_tenants; i++) {
        const srv_conf_tenant *tenant = &core->conf.tenants[i];
        attnd_err err = kv_tenant_set(core->kv, tenant->name, (uint32_t)tenant->quota_blocks,
                                      &core->tenants[i]);
        if (!err) {
            err = kv_tenant_cache(core->kv, core->tenants[i], (uint32_t)tenant->floor_blocks,
                                  (uint32_t)tenant->cache_priority);
        }
        if (err) {
            core->conf.num_tenants = i; // what has no index would pass for tenant 0
            return attnd_fail(info, err, "tenant", "tenant %s cannot be made", tenant->name);
        }
        sched_tenant_share(core->sched, core->tenants[i], (uint32_t)tenant->share);
    }
    return ATTND_OK;
}

static uint64_t earlier(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

uint64_t srv_core_expire(srv_core *core, uint64_t now_ms) {
    uint64_t next = sched_expire(core->sched, now_ms);
    next = earlier(next, sched_wait_expire(core->wait, now_ms));
    next = earlier(next, srv_steps_expire(core, now_ms));
    next = earlier(next, srv_resume_expire(core, now_ms));
    uint64_t kept = kv_expire(core->kv, now_ms);
    srv_core_freed(core);
    return earlier(next, kept);
}

void srv_core_freed(srv_core *core) {
    srv_models_sweep(&core->models, core->kv);
    sched_wait_retry(core->wait);
}

bool srv_core_busy(const srv_core *core) {
    LIST_FOREACH (&core->sessions, node) {
        const srv_session *s = LIST_ENTRY(node, srv_session, node);
        if (!list_empty(&s->requests) || !list_empty(&s->steps)) {
            return true;
        }
    }
    return false;
}

void srv_core_abort(srv_core *core) {
    LIST_FOREACH (&core->sessions, node) {
        srv_session_abort(LIST_ENTRY(node, srv_session, node));
    }
}

void srv_core_refuse_waiting(srv_core *core) {
    for (uint32_t i = 0; i < core->steps.max; i++) {
        srv_step *step = &core->steps.pool[i];
        if (step->state == SRV_STEP_OPENING && list_linked(&step->waiter.node)) {
            sched_wait_cancel(core->wait, &step->waiter);
        }
    }
}
