// Going on: arena and ledger first, then, when the tenants are known, the sessions.
//
// Old ledgers and new arenas must never meet: a ledger that cannot be gone on with is taken out of
// the keeper's hands before a new arena is put there, so that a run that is killed in between
// leaves an arena without a ledger, which is simply empty.
#include "server/srv_resume.h"

#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_inherit.h"
#include "server/srv_keeper.h"
#include "server/srv_notify.h"
#include "server/srv_process.h"

static const char arena_name[] = "arena", ledger_name[] = "ledger";

static void say_empty(const char *what, const attnd_errinfo *why) {
    attnd_log(ATTND_LOG_WARN, "resume", "the cache starts empty: %s of the run before: %s", what,
              why->text);
}

static void forget(const char *name, int *fd) {
    if (*fd >= 0) {
        srv_notify_forget(name);
        close(*fd);
        *fd = -1;
    }
}

attnd_err srv_resume_arena(kv_arena *arena, srv_resume_open_cb *open, void *ctx, int *ledger_fd,
                           attnd_errinfo *info) {
    int fd = srv_inherit_fd(arena_name);
    *ledger_fd = srv_inherit_fd(ledger_name);
    if (fd >= 0) {
        uint64_t bytes = *ledger_fd >= 0 ? kv_recover_arena_bytes(*ledger_fd) : 0;
        attnd_err err = open(ctx, fd, bytes, arena, info);
        if (err != ATTND_EINVAL) {
            return err;
        }
        say_empty("the arena", info);
    } else if (*ledger_fd >= 0) {
        say_empty("the arena", &(attnd_errinfo){.text = "it was not handed over"});
    }
    if (fd >= 0 || *ledger_fd >= 0) {
        forget(ledger_name, ledger_fd);
        forget(arena_name, &fd);
        srv_notify_settle(); // there may be no room for two
    }
    attnd_err err = open(ctx, -1, 0, arena, info);
    if (!err) {
        srv_notify_store(arena_name, arena->fd);
    }
    return err;
}

void srv_resume_later(attnd_errinfo *info) {
    if (srv_inherit_fd(SRV_KEEPER_CONF) >= 0) {
        srv_notify_no_device(info->text);
        info->text[0] = '\0';
    }
}

void srv_resume_give_up(void) {
    srv_notify_forget(ledger_name);
    srv_notify_forget(arena_name);
}

static void say_recovered(const kv_recovered *r, uint64_t us) {
    attnd_log(ATTND_LOG_INFO, "resume",
              "recovered in %.1f ms: %u models, %u sessions, %u sequences, %llu blocks; %u open "
              "steps aborted",
              (double)us / 1000, r->models, r->sessions, r->seqs, (unsigned long long)r->blocks,
              r->aborted_steps);
    if (r->bad_units || r->bad_record || r->lost_seqs || r->lost_sessions || r->lost_models) {
        attnd_log(ATTND_LOG_ERROR, "resume",
                  "the ledger is damaged (%llu places%s): %u tenants, %u models, %u sessions, %u "
                  "sequences dropped",
                  (unsigned long long)r->bad_units, r->bad_record ? ", and its newest record" : "",
                  r->lost_tenants, r->lost_models, r->lost_sessions, r->lost_seqs);
    }
    if (r->lost_prefix_blocks) { // damaged, or behind one that a kill left in a tier
        attnd_log(ATTND_LOG_WARN, "resume", "the prefix cache has %u blocks, %u were dropped",
                  r->prefix_blocks, r->lost_prefix_blocks);
    }
}

attnd_err srv_resume_cache(kv_cache **kv, const kv_arena *arena, const kv_opts *opts, int ledger_fd,
                           attnd_errinfo *info) {
    if (ledger_fd >= 0) {
        kv_recovered found;
        uint64_t from_us = attnd_clock_us();
        attnd_err err = kv_recover(kv, arena, opts, ledger_fd, attnd_clock_ms(), &found, info);
        if (!err) {
            say_recovered(&found, attnd_clock_us() - from_us);
        }
        if (!err || err == ATTND_ENOMEM) {
            return err;
        }
        say_empty("the ledger", info);
        forget(ledger_name, &ledger_fd);
    }
    attnd_err err = kv_create(kv, arena, opts, info);
    if (!err) {
        srv_notify_store(ledger_name, kv_ledger_fd(*kv));
    }
    return err;
}

// ---- sessions

static bool find_tenant(const srv_core *core, uint32_t tenant, uint32_t *idx) {
    for (uint32_t i = 0; i < core->conf.num_tenants; i++) {
        if (core->tenants[i] == tenant) {
            *idx = i;
            return true;
        }
    }
    return false;
}

static void adopt(srv_core *core, const kv_session_info *info, uint64_t until_ms) {
    list_node *node = list_first(&core->free_sessions);
    uint32_t tenant_idx;
    if (!node || !find_tenant(core, info->tenant, &tenant_idx)) { // a tenant that is no more
        kv_session_close(core->kv, info->session, attnd_clock_ms());
        return;
    }
    srv_session *s = LIST_ENTRY(node, srv_session, node);
    srv_session_init(core, s, tenant_idx, info->session);
    memcpy(s->secret, info->secret, sizeof(s->secret));
    strcpy(s->client, "orphan");
    s->num_seqs = info->num_seqs;
    s->orphan_until_ms = until_ms;
}

void srv_resume_sessions(srv_core *core) {
    uint64_t until_ms = attnd_clock_ms() + core->conf.reattach_timeout_ms;
    kv_session_info info;
    uint32_t cursor = 0;
    while (kv_session_next(core->kv, &cursor, &info)) {
        adopt(core, &info, until_ms);
    }
    for (uint32_t i = 0; i < core->models.max; i++) {
        core->models_held[i] = kv_model_get(core->kv, i) != NULL;
    }
    core->models_until_ms = until_ms;
    core->hooks->rearm(core->hooks->ctx, until_ms);
}

// let_go closes the models that were held for the sessions that came back, which now do so
// themselves.
static void let_go(srv_core *core) {
    for (uint32_t i = 0; i < core->models.max; i++) {
        if (core->models_held[i]) {
            core->models_held[i] = false;
            kv_model_close(core->kv, i);
        }
    }
    core->models_until_ms = UINT64_MAX;
}

// first_due returns an orphan past its time, NULL for none; *next is when the first of the others
// is due.
static srv_session *first_due(srv_core *core, uint64_t now_ms, uint64_t *next) {
    *next = UINT64_MAX;
    LIST_FOREACH (&core->sessions, node) {
        srv_session *s = LIST_ENTRY(node, srv_session, node);
        if (s->orphan_until_ms && s->orphan_until_ms <= now_ms) {
            return s;
        }
        if (s->orphan_until_ms && s->orphan_until_ms < *next) {
            *next = s->orphan_until_ms;
        }
    }
    return NULL;
}

uint64_t srv_resume_expire(srv_core *core, uint64_t now_ms) {
    uint64_t next;
    uint32_t num = 0;
    for (srv_session *s; (s = first_due(core, now_ms, &next)); num++) {
        s->orphan_until_ms = 0;
        srv_session_settle(s);
    }
    if (num) {
        int32_t pid;
        attnd_log(ATTND_LOG_INFO, "resume", "%u sessions did not come back", num);
        if (srv_processes_before(core->processes, &pid)) {
            attnd_log(ATTND_LOG_WARN, "resume",
                      "process %d has neither attached again nor ended: still no step is opened",
                      (int)pid);
        }
    }
    if (now_ms >= core->models_until_ms) {
        let_go(core);
    }
    return next < core->models_until_ms ? next : core->models_until_ms;
}
