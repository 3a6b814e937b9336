// The daemon.
//
// Start: arena, cache and pools, backend (compute threads or a GPU), transports, then "ready". Stop
// is the way back: drain, no one new, transports (after which no callback of theirs runs), backend,
// handles, and the memory last.
//
// A lost device is a drain, too, in which everything fails: with the device's error what it ran,
// with ESHUTDOWN what is new.  The process then ends with that error, for its supervisor to start
// another.
//
// The loop sleeps until something is posted or the one deadline timer is due.  Before each sleep
// the prepare callback does what belongs to an idle point: the accounting check, and a look at
// whether a drain is through.
#include "server/srv_server.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <uv.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_compute.h"
#include "server/srv_core.h"
#include "server/srv_deadline.h"
#include "server/srv_device.h"
#include "server/srv_gpu.h"
#include "server/srv_inherit.h"
#include "server/srv_keeper.h"
#include "server/srv_nng.h"
#include "server/srv_notify.h"
#include "server/srv_ops.h"
#include "server/srv_process.h"
#include "server/srv_reload.h"
#include "server/srv_resume.h"
#include "server/srv_rings.h"
#include "server/srv_tick.h"
#include "server/srv_tiers.h"
#include "server/srv_urls.h"

enum {
    LOST_MS = 2000,         // for requests to fail in, when the device is lost
    LINGER_MS = 200,        // for NNG to write the last replies out, which it does not tell of
    LAST_REPLIES_MS = 2000, // behind the drain's end, for clients to read what they wait for
    HANG_MS = 5000,         // of taking everything down; deploy/attnd.conf speaks of both
    ADMIN_IN_FLIGHT = 8,
    OWN_FILES = 64, // that the daemon has open for itself
};

typedef enum phase { SERVING, DRAINING, ABORTING, LINGERING, STOPPED } phase;

typedef struct server {
    const srv_args *args;
    uv_loop_t loop;
    uv_timer_t timer, watchdog;
    srv_tick tick; // looks at flags while nothing else does
    uv_prepare_t idle;
    uv_signal_t sigterm, sigint, sighup;
    uint64_t timer_at_ms; // UINT64_MAX = not armed
    phase phase;
    uint64_t drain_until_ms;
    bool mismatch; // accounting was wrong at the last idle point
    kv_arena arena;
    srv_core core;
    srv_core_hooks hooks;
    srv_backend *backend; // NULL before it is made
    attnd_errinfo lost;   // of the device; code ATTND_OK = it is not
    srv_nng *clients, *admin;
    srv_rings *rings; // NULL = off
    srv_regions *regions;
    srv_tiers *tiers; // NULL = none
    srv_processes *processes;
    srv_urls urls;
    attnd_log_rate strangers; // lines about who is no tenant
    uint64_t unshared;        // regions of clients on this GPU, without MPS
    bool told_unshared;
} server;

// ---- time

static void on_timer(uv_timer_t *timer);

static void rearm(void *ctx, uint64_t at_ms) {
    server *s = ctx;
    if (s->phase == STOPPED || at_ms >= s->timer_at_ms) {
        return;
    }
    uint64_t now = attnd_clock_ms();
    s->timer_at_ms = at_ms;
    uv_update_time(&s->loop);
    uv_timer_start(&s->timer, on_timer, at_ms > now ? at_ms - now : 0, 0);
}

static void on_timer(uv_timer_t *timer) {
    server *s = timer->data;
    uint64_t now = attnd_clock_ms();
    uint64_t hello_ms = s->core.conf.hello_timeout_ms;
    s->timer_at_ms = UINT64_MAX;
    rearm(s, srv_core_expire(&s->core, now));
    rearm(s, srv_nng_expire(s->clients, now, hello_ms));
    rearm(s, srv_nng_expire(s->admin, now, hello_ms));
    rearm(s, srv_rings_expire(s->rings, now, hello_ms));
    if (s->phase == DRAINING || s->phase == LINGERING) {
        rearm(s, s->drain_until_ms > now ? s->drain_until_ms : UINT64_MAX);
    }
}

static void on_watchdog(uv_timer_t *timer) {
    (void)timer;
    srv_notify_alive();
}

// ---- drain and stop

static void begin_drain(void *ctx, uint64_t timeout_ms) {
    server *s = ctx;
    uint64_t until = attnd_clock_ms() + timeout_ms;
    if (s->phase > DRAINING || (s->phase == DRAINING && until >= s->drain_until_ms)) {
        return;
    }
    if (s->phase == SERVING) {
        attnd_log(ATTND_LOG_INFO, "server",
                  "draining: %u sessions, %u steps, %u requests that wait for blocks",
                  s->core.num_sessions, s->core.steps.num_open, sched_wait_count(s->core.wait));
        srv_notify_stopping("draining");
    }
    s->phase = DRAINING;
    s->drain_until_ms = until;
    s->core.draining = true;
    srv_core_refuse_waiting(&s->core);
    rearm(s, until);
    srv_deadline_set(until + LAST_REPLIES_MS + HANG_MS);
}

// on_lost begins the end of a daemon whose device is lost.
static void on_lost(void *ctx, const attnd_errinfo *info, bool spoilt) {
    server *s = ctx;
    attnd_log(ATTND_LOG_ERROR, "gpu", "%s is lost: %s (CUDA error %d)%s", s->backend->device,
              info->text, (int)info->detail, spoilt ? "; so is the cache" : "");
    if (spoilt) {
        srv_resume_give_up();
    }
    s->lost = *info;
    s->core.lost = true;
    begin_drain(s, LOST_MS);
    srv_armed_fail(&s->core, info->code, info);
}

static void on_term(uv_signal_t *handle, int signum) {
    server *s = handle->data;
    attnd_log(ATTND_LOG_INFO, "server", "%s", signum == SIGTERM ? "SIGTERM" : "SIGINT");
    begin_drain(s, s->phase == SERVING ? s->core.conf.drain_timeout_ms : 0);
}

// finish closes everything that the loop waits for, so that uv_run returns.
static void finish(server *s) {
    s->phase = STOPPED;
    srv_deadline_set(attnd_clock_ms() + HANG_MS);
    srv_nng_close(s->clients);
    srv_nng_close(s->admin);
    srv_rings_close(s->rings);
    srv_regions_close(s->regions);
    srv_processes_close(s->processes);
    srv_tiers_close(s->tiers);
    if (s->backend) {
        s->backend->ops->stop(s->backend);
    }
    srv_tick_close(&s->tick);
    uv_close((uv_handle_t *)&s->timer, NULL);
    uv_close((uv_handle_t *)&s->watchdog, NULL);
    uv_close((uv_handle_t *)&s->idle, NULL);
    uv_close((uv_handle_t *)&s->sigterm, NULL);
    uv_close((uv_handle_t *)&s->sigint, NULL);
    uv_close((uv_handle_t *)&s->sighup, NULL);
}

// replies_out is true when no reply is on its way, as far as can be known.
static bool replies_out(const server *s, uint64_t now) {
    srv_nng_info clients, admin;
    srv_nng_get_info(s->clients, &clients);
    srv_nng_get_info(s->admin, &admin);
    uint64_t last =
        clients.last_reply_ms > admin.last_reply_ms ? clients.last_reply_ms : admin.last_reply_ms;
    return clients.in_flight + admin.in_flight == 0 &&
           (clients.connections + admin.connections == 0 || now >= last + LINGER_MS);
}

static void drain_on(server *s) {
    uint64_t now = attnd_clock_ms();
    if (s->phase == DRAINING && srv_core_busy(&s->core) && now >= s->drain_until_ms) {
        attnd_log(ATTND_LOG_WARN, "server", "the drain took too long: %u steps are aborted",
                  s->core.steps.num_open);
        s->phase = ABORTING;
        srv_core_abort(&s->core);
    }
    if (s->phase < LINGERING && !srv_core_busy(&s->core)) {
        s->phase = LINGERING;
        uint64_t last = now + LAST_REPLIES_MS;
        s->drain_until_ms = s->drain_until_ms > last ? s->drain_until_ms : last;
    }
    if (s->phase == LINGERING) {
        if (replies_out(s, now) || now >= s->drain_until_ms) {
            finish(s);
        } else {
            rearm(s, now + LINGER_MS / 4);
        }
    }
}

// ---- idle points

static void check_accounting(server *s) {
    bool good = kv_check_fast(s->core.kv);
    if (!good && !s->mismatch) {
        attnd_errinfo info = {.text = "no more is known"};
        kv_check_full(s->core.kv, &info);
        attnd_log(ATTND_LOG_ERROR, "kv", "the accounting of blocks is wrong: %s", info.text);
    }
    s->mismatch = !good;
}

// ---- flags of regions

static void stir(void *ctx) {
    server *s = ctx;
    srv_rings_stir(s->rings);
}

static void on_tick(void *ctx) {
    server *s = ctx;
    if (srv_armed_tick(&s->core, attnd_clock_us())) {
        stir(s);
    }
}

static bool flags_await(void *ctx) {
    const server *s = ctx;
    return srv_armed_hot(&s->core);
}

// set_tick: before the loop sleeps, and before each slice of polling.
static void set_tick(server *s) {
    if (s->tick.cb) {
        bool polled = srv_rings_awake(s->rings);
        srv_tick_set(&s->tick, srv_armed_tick_us(&s->core, attnd_clock_us(), polled));
    }
}

static void on_idle(uv_prepare_t *handle) {
    server *s = handle->data;
    set_tick(s);
    if (sched_idle(s->core.sched)) {
        check_accounting(s);
    }
    if (s->phase != SERVING) {
        drain_on(s);
    }
}

// ---- transports

static bool opened(void *ctx, srv_conn *conn) {
    server *s = ctx;
    bool admitted = conn->admin;
    for (uint32_t i = 0; i < s->core.conf.num_tenants && !admitted; i++) {
        admitted = srv_conf_admits(&s->core.conf.tenants[i], conn->uid);
    }
    if (!admitted) {
        attnd_log_some(&s->strangers, ATTND_LOG_WARN, "server",
                       "uid %d is no tenant: connection closed", (int)conn->uid);
        return false;
    }
    rearm(s, conn->opened_ms + s->core.conf.hello_timeout_ms);
    return true;
}

static void request(void *ctx, srv_request *rq) {
    server *s = ctx;
    srv_dispatch(&s->core, rq);
}

static void lost(void *ctx, srv_conn *conn) {
    server *s = ctx;
    if (conn->region) {
        srv_armed_abandon(&s->core, conn->region);
    }
    if (conn->session) {
        srv_session_end(conn->session, conn);
    }
}

static attnd_err attached(void *ctx, srv_conn *conn, uint64_t session, const uint8_t *secret,
                          attnd_errinfo *info) {
    server *s = ctx;
    if (s->core.draining) {
        return attnd_fail(info, ATTND_ESHUTDOWN, "", "%s", attnd_strerror(ATTND_ESHUTDOWN));
    }
    return session ? srv_session_join(&s->core, conn, session, secret, info) : ATTND_OK;
}

// give_arena: to a user that configuration names.
static attnd_err give_arena(void *ctx, const srv_conn *conn, proto_attach_arena *out, int *fd,
                            attnd_errinfo *info) {
    server *s = ctx;
    if (!srv_conf_in_process(&s->core.conf, conn->uid)) {
        return attnd_fail(info, ATTND_EPERM, "flags",
                          "server.in_process_uids does not name the user");
    }
    if (s->arena.fd < 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "flags", "the arena of %s cannot be shared",
                          s->backend->device);
    }
    out->bytes = s->arena.bytes;
    memcpy(out->device, s->backend->uuid, sizeof(out->device));
    out->flags = s->core.conf.deterministic ? PROTO_ARENA_DETERMINISTIC : 0;
    *fd = s->arena.fd;
    return ATTND_OK;
}

// look_shared warns of a client whose contexts take turns with ours on the GPU.
static void look_shared(server *s, const srv_conn *conn, const proto_region_ask *ask) {
    bool same = memcmp(ask->device, s->backend->uuid, sizeof(ask->device)) == 0;
    if (!same || (s->backend->mps && (ask->flags & PROTO_REGION_MPS))) {
        return;
    }
    s->unshared++;
    if (!s->told_unshared) {
        s->told_unshared = true;
        attnd_log(ATTND_LOG_WARN, "gpu",
                  "uid %d computes on %s, too, without MPS: every layer costs context switches",
                  (int)conn->uid, s->backend->device);
    }
}

static attnd_err give_region(void *ctx, const srv_conn *conn, const proto_region_ask *ask,
                             attnd_errinfo *info) {
    server *s = ctx;
    if (s->core.draining) {
        return attnd_fail(info, ATTND_ESHUTDOWN, "", "%s", attnd_strerror(ATTND_ESHUTDOWN));
    }
    look_shared(s, conn, ask);
    rearm(s, conn->opened_ms + s->core.conf.hello_timeout_ms);
    return ATTND_OK;
}

// settled: no process of the run before can write to blocks of ours any more.
static void settled(void *ctx) {
    server *s = ctx;
    srv_core_freed(&s->core);
}

// poll_work looks for launches that have ended, and for flags that have come.
static bool poll_work(void *ctx) {
    server *s = ctx;
    bool ended = s->backend->ops->poll(s->backend);
    return (srv_armed_hot(&s->core) && srv_armed_poll(&s->core, attnd_clock_us())) || ended;
}

static bool compute_crowds(void *ctx) {
    server *s = ctx;
    return s->backend->ops->crowds(s->backend);
}

// open_rings: the attach socket is handed over, or made at its path.
static attnd_err open_rings(server *s, attnd_errinfo *info) {
    const srv_conf *conf = &s->core.conf;
    int fd = srv_inherit_fd("attach");
    if (fd < 0 && !s->urls.attach[0]) {
        return ATTND_OK;
    }
    srv_regions_opts regions = {
        .backend = s->backend,
        .one_bytes = conf->region_bytes,
        .all_bytes = conf->all_regions_bytes,
        .max = 2 * (uint32_t)conf->rings, // as many again whose clients have left
    };
    attnd_err err = srv_regions_open(&s->regions, &s->loop, &regions, info);
    if (err) {
        return err;
    }
    srv_rings_opts opts = {
        .path = s->urls.attach,
        .fd = fd,
        .mode = (uint32_t)conf->socket_mode,
        .connections = (uint32_t)conf->rings,
        .in_flight = (uint32_t)conf->in_flight,
        .ring_bytes = conf->ring_bytes,
        .all_bytes = conf->all_rings_bytes,
        .message_bytes = conf->message_bytes,
        .spin_us = (uint32_t)conf->spin_us,
        .opened = opened,
        .attached = attached,
        .request = request,
        .lost = lost,
        .arena = give_arena,
        .region = give_region,
        .processes = s->processes,
        .regions = s->regions,
        .poll = poll_work,
        .awaits = flags_await,
        .crowds = compute_crowds,
        .ctx = s,
    };
    err = srv_rings_open(&s->rings, &s->loop, &opts, info);
    s->core.attach_path = srv_rings_path(s->rings);
    return err;
}

static attnd_err open_transports(server *s, attnd_errinfo *info) {
    const srv_conf *conf = &s->core.conf;
    srv_nng_opts clients = {
        .mode = (uint32_t)conf->socket_mode,
        .connections = (uint32_t)conf->connections,
        .in_flight = (uint32_t)conf->in_flight,
        .message_bytes = conf->message_bytes,
        .connection_bytes = conf->connection_bytes,
        .send_timeout_ms = conf->send_timeout_ms,
        .opened = opened,
        .request = request,
        .lost = lost,
        .ctx = s,
    };
    srv_conf_errors errors = {0};
    attnd_err err = srv_urls_read(&s->urls, conf, &errors);
    if (err) {
        return attnd_fail(info, err, "listen", "%s", errors.text[0]);
    }
    srv_nng_opts admin = clients;
    for (clients.num_urls = 0; clients.num_urls < s->urls.num_clients; clients.num_urls++) {
        clients.urls[clients.num_urls] = s->urls.clients[clients.num_urls];
    }
    admin.urls[0] = s->urls.admin;
    admin.num_urls = 1;
    admin.mode = (uint32_t)conf->admin_mode;
    admin.connections = SRV_ADMIN_CONNECTIONS;
    admin.in_flight = ADMIN_IN_FLIGHT;
    admin.admin = true;
    err = srv_nng_open(&s->clients, &s->loop, &clients, info);
    if (!err) {
        err = srv_nng_open(&s->admin, &s->loop, &admin, info);
    }
    return err ? err : open_rings(s, info);
}

static void add_transport(cJSON *doc, const char *name, const srv_nng *t) {
    srv_nng_info info;
    srv_nng_get_info(t, &info);
    cJSON *o = cJSON_AddObjectToObject(doc, name);
    cJSON_AddNumberToObject(o, "connections", info.connections);
    cJSON_AddNumberToObject(o, "in_flight", info.in_flight);
    cJSON_AddNumberToObject(o, "requests", (double)info.requests);
    cJSON_AddNumberToObject(o, "refused_busy", (double)info.busy);
    cJSON_AddNumberToObject(o, "closed_flood", (double)info.closed_flood);
    cJSON_AddNumberToObject(o, "closed_slow", (double)info.closed_slow);
    cJSON_AddNumberToObject(o, "closed_garbage", (double)info.closed_garbage);
    cJSON_AddNumberToObject(o, "closed_full", (double)info.closed_full);
    cJSON_AddNumberToObject(o, "closed_idle", (double)info.closed_idle);
}

static void add_rings(cJSON *doc, const srv_rings *t) {
    srv_rings_info info;
    srv_rings_get_info(t, &info);
    cJSON *o = cJSON_AddObjectToObject(doc, "rings");
    cJSON_AddNumberToObject(o, "connections", info.connections);
    cJSON_AddNumberToObject(o, "rings", info.rings);
    cJSON_AddNumberToObject(o, "bytes", (double)info.ring_bytes);
    cJSON_AddNumberToObject(o, "in_flight", info.in_flight);
    cJSON_AddNumberToObject(o, "requests", (double)info.requests);
    cJSON_AddNumberToObject(o, "refused_busy", (double)info.busy);
    cJSON_AddNumberToObject(o, "refused_malformed", (double)info.malformed);
    cJSON_AddNumberToObject(o, "refused_rings", (double)info.refused);
    cJSON_AddNumberToObject(o, "sleeps", (double)info.sleeps);
    cJSON_AddNumberToObject(o, "doorbells", (double)info.doorbells);
    cJSON_AddNumberToObject(o, "closed_broken", (double)info.closed_broken);
    cJSON_AddNumberToObject(o, "closed_rights", (double)info.closed_rights);
    cJSON_AddNumberToObject(o, "closed_full", (double)info.closed_full);
    cJSON_AddNumberToObject(o, "closed_idle", (double)info.closed_idle);
}

static void add_regions(cJSON *doc, const server *s) {
    srv_regions_info regions;
    const srv_armed_info *info = &s->core.armed.info;
    srv_regions_get_info(s->regions, &regions);
    cJSON *o = cJSON_AddObjectToObject(doc, "service");
    cJSON_AddBoolToObject(o, "mps", s->backend->mps);
    cJSON_AddBoolToObject(o, "wait_kernels", s->backend->waits && s->backend->mps);
    cJSON_AddNumberToObject(o, "regions", regions.regions);
    cJSON_AddNumberToObject(o, "regions_kept", regions.kept);
    cJSON_AddNumberToObject(o, "regions_made", (double)regions.made);
    cJSON_AddNumberToObject(o, "region_bytes", (double)regions.bytes);
    cJSON_AddNumberToObject(o, "regions_without_mps", (double)s->unshared);
    cJSON_AddNumberToObject(o, "waiting", info->waiting);
    cJSON_AddNumberToObject(o, "draining", info->draining);
    cJSON_AddNumberToObject(o, "calls", (double)info->calls);
    cJSON_AddNumberToObject(o, "layers", (double)info->layers);
    cJSON_AddNumberToObject(o, "prepared", (double)s->backend->prepared);
    cJSON_AddNumberToObject(o, "ahead", (double)s->backend->ahead);
    cJSON_AddNumberToObject(o, "gated", (double)s->backend->gated);
    cJSON_AddNumberToObject(o, "gates_missed", (double)s->backend->missed);
    cJSON_AddNumberToObject(o, "failed", (double)info->failed);
}

// add_waits_for tells of processes for which no step is opened, and the id of one.
static void add_waits_for(cJSON *out, const server *s) {
    int32_t pid = 0;
    cJSON *o = cJSON_AddObjectToObject(out, "waits_for");
    cJSON_AddNumberToObject(o, "processes", srv_processes_before(s->processes, &pid));
    cJSON_AddNumberToObject(o, "pid", pid);
}

static void describe(void *ctx, cJSON *out) {
    const server *s = ctx;
    cJSON *o = cJSON_AddObjectToObject(out, "transport");
    add_transport(o, "clients", s->clients);
    add_transport(o, "administration", s->admin);
    add_rings(o, s->rings);
    add_regions(out, s);
    add_waits_for(out, s);
    srv_tiers_describe(s->tiers, s->core.kv, out);
}

// ---- configuration

// hand_over gives the keeper what the next worker is to begin with.
static void hand_over(const srv_conf *conf) {
    int fd = srv_inherit_fd(SRV_KEEPER_CONF) < 0 ? -1 : srv_conf_put(conf);
    if (fd >= 0) {
        srv_notify_store(SRV_KEEPER_CONF, fd);
        close(fd);
    }
}

static void reconfigured(void *ctx) {
    server *s = ctx;
    const srv_conf *conf = &s->core.conf;
    attnd_log_set_level(attnd_log_level_parse(conf->log_level));
    srv_nng_set_send_timeout(s->clients, conf->send_timeout_ms);
    srv_nng_set_send_timeout(s->admin, conf->send_timeout_ms);
    srv_rings_set_spin(s->rings, (uint32_t)conf->spin_us);
    hand_over(conf);
    rearm(s, attnd_clock_ms()); // hello_timeout, and quotas that waiting steps may now fit
}

static attnd_err take_conf(server *s, srv_conf *next) {
    attnd_errinfo info;
    srv_reload_take(&s->core.conf, next);
    attnd_err err = srv_core_apply_tenants(&s->core, &info);
    if (err) {
        attnd_log(ATTND_LOG_ERROR, "conf", "%s", info.text);
    }
    reconfigured(s);
    return err;
}

static void on_hup(uv_signal_t *handle, int signum) {
    (void)signum;
    server *s = handle->data;
    srv_conf_errors errors = {0};
    srv_conf *next = malloc(sizeof(*next));
    if (!next) {
        srv_conf_error(&errors, "no memory");
    } else if (!srv_args_conf(s->args, next, &errors) && !take_conf(s, next)) {
        attnd_log(ATTND_LOG_INFO, "conf", "reloaded");
    }
    for (uint32_t i = 0; i < errors.num && i < SRV_CONF_MAX_ERRORS; i++) {
        attnd_log(ATTND_LOG_ERROR, "conf", "nothing was reloaded: %s", errors.text[i]);
    }
    free(next);
    srv_notify_reloaded();
}

// ---- start

static void start_handles(server *s) {
    uv_timer_init(&s->loop, &s->timer);
    uv_timer_init(&s->loop, &s->watchdog);
    uv_prepare_init(&s->loop, &s->idle);
    uv_signal_init(&s->loop, &s->sigterm);
    uv_signal_init(&s->loop, &s->sigint);
    uv_signal_init(&s->loop, &s->sighup);
    s->timer.data = s->watchdog.data = s->idle.data = s;
    s->sigterm.data = s->sigint.data = s->sighup.data = s;
    uv_prepare_start(&s->idle, on_idle);
    uv_signal_start(&s->sigterm, on_term, SIGTERM);
    uv_signal_start(&s->sigint, on_term, SIGINT);
    uv_signal_start(&s->sighup, on_hup, SIGHUP);
    uint64_t watchdog_ms = srv_notify_watchdog_ms();
    if (watchdog_ms) {
        uv_timer_start(&s->watchdog, on_watchdog, 0, watchdog_ms / 2);
    }
}

static attnd_err make_core(server *s, const srv_conf *conf, int ledger_fd, attnd_errinfo *info) {
    return srv_core_init(&s->core, conf, &s->arena, ledger_fd, &s->hooks, info);
}

static attnd_err open_on_cpu(void *ctx, int fd, uint64_t bytes, kv_arena *arena,
                             attnd_errinfo *info) {
    const uint64_t *memory_bytes = ctx;
    (void)bytes; // a memory file's own size is looked at
    return fd >= 0 ? kv_arena_adopt_host(arena, fd, *memory_bytes, info)
                   : kv_arena_open_host(arena, *memory_bytes, info);
}

static attnd_err make_on_cpu(server *s, const srv_conf *conf, attnd_errinfo *info) {
    int ledger_fd;
    uint64_t bytes = conf->memory_bytes;
    attnd_err err = srv_resume_arena(&s->arena, open_on_cpu, &bytes, &ledger_fd, info);
    if (!err) {
        err = make_core(s, conf, ledger_fd, info);
    }
    if (err) {
        return err;
    }
    srv_compute_opts opts = {
        .loop = &s->loop,
        .kv = s->core.kv,
        .pool = s->arena.base,
        .pool_bytes = s->arena.bytes,
        .num_threads = (uint32_t)conf->threads,
        .max_rows = (uint32_t)conf->launch_rows,
        .inline_work = conf->inline_work,
        .isa = conf->isa[0] ? conf->isa : NULL,
        .deterministic = conf->deterministic,
    };
    srv_compute *compute = NULL;
    err = srv_compute_create(&compute, &opts, info);
    s->backend = err ? NULL : srv_compute_backend(compute);
    return err;
}

// on_gpu is what open_on_gpu opens, and with what.
typedef struct on_gpu {
    srv_gpu_opts opts;
    srv_gpu *gpu;
} on_gpu;

static attnd_err open_on_gpu(void *ctx, int fd, uint64_t bytes, kv_arena *arena,
                             attnd_errinfo *info) {
    on_gpu *g = ctx;
    if (fd >= 0 && bytes == 0) {
        return attnd_fail(info, ATTND_EINVAL, "arena", "no ledger says how large it is");
    }
    g->opts.arena_fd = fd;
    g->opts.adopt_bytes = bytes;
    uint64_t from_us = attnd_clock_us();
    attnd_err err = srv_gpu_open(&g->gpu, &g->opts, arena, info);
    if (!err) { // most of it is the driver's, which makes a context
        attnd_log(ATTND_LOG_INFO, "gpu", "cuda:%d was opened in %.1f ms%s", g->opts.ordinal,
                  (double)(attnd_clock_us() - from_us) / 1000,
                  fd >= 0 ? ", with the arena of the run before" : "");
    }
    return err;
}

static attnd_err make_on_gpu(server *s, const srv_conf *conf, int32_t ordinal,
                             attnd_errinfo *info) {
    on_gpu g = {.opts = {
                    .device_ops = srv_device_cuda(),
                    .ordinal = ordinal,
                    .arena_bytes = conf->memory_bytes,
                    .staging_bytes = conf->staging_bytes,
                    .max_rows = (uint32_t)conf->launch_rows,
                    .spin_us = conf->flag_spin_us,
                    .ahead = srv_conf_launch_ahead(conf),
                    .waits = strcmp(conf->wait_kernels, "off") != 0,
                    .deterministic = conf->deterministic,
                    .lost = on_lost,
                    .ctx = s,
                }};
    if (!g.opts.device_ops) {
        return attnd_fail(info, ATTND_ENOTSUP, "device",
                          "compute.device: this attnd was built without CUDA");
    }
    int ledger_fd;
    attnd_err err = srv_resume_arena(&s->arena, open_on_gpu, &g, &ledger_fd, info);
    if (err) {
        srv_resume_later(info);
        return err;
    }
    s->backend = srv_gpu_backend(g.gpu);
    err = make_core(s, conf, ledger_fd, info);
    return err ? err : srv_gpu_start(g.gpu, &s->loop, s->core.kv, info);
}

static void say_ready(const server *s) {
    static const char *const pages[] = {"small", "transparent huge", "huge"};
    char status[256];
    bool is_small = s->arena.bytes < 1 << 30;
    snprintf(status, sizeof(status), "%.1f %s of %s pages, %s%s%s, %s kernels",
             (double)s->arena.bytes / (is_small ? 1 << 20 : 1 << 30), is_small ? "MiB" : "GiB",
             pages[s->arena.pages], s->backend->device, s->backend->name[0] ? " " : "",
             s->backend->name, s->backend->kernels);
    attnd_log(ATTND_LOG_INFO, "server", "attnd %s serves: %s", ATTND_VERSION, status);
    srv_notify_ready(status); // first: whoever has read the line knows that the keeper knows
    printf("attnd ready: %s (administration %s)\n", s->core.conf.listen, s->urls.admin);
    fflush(stdout);
}

// warn_of_memory: the system gives memory that it does not have, and ends who uses it.
static void warn_of_memory(const srv_conf *conf, bool is_gpu) {
    uint64_t asked = (is_gpu ? 0 : conf->memory_bytes) + conf->tier_memory_bytes;
    uint64_t there = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    if (asked > there) {
        attnd_log(ATTND_LOG_WARN, "server",
                  "%s: %.1f GiB, of %.1f GiB that this machine has: what fills them may be ended",
                  is_gpu ? "tier.memory" : "cache.memory and tier.memory",
                  (double)asked / (1 << 30), (double)there / (1 << 30));
    }
}

static attnd_err make(server *s, const srv_conf *conf, attnd_errinfo *info) {
    int32_t ordinal = -1;
    attnd_err err = srv_conf_device(conf, &ordinal, info);
    if (!err) {
        warn_of_memory(conf, ordinal >= 0);
        err = ordinal < 0 ? make_on_cpu(s, conf, info) : make_on_gpu(s, conf, ordinal, info);
    }
    if (!err) {
        err = srv_core_set_backend(&s->core, s->backend, info);
    }
    if (!err) {
        err = srv_tiers_open(&s->tiers, &s->loop, &s->core, info);
    }
    if (!err) {
        srv_resume_sessions(&s->core);
        err = srv_processes_open(&s->processes, &s->loop, settled, s, info);
        s->core.processes = s->processes;
    }
    if (!err) {
        err = srv_tick_open(&s->tick, &s->loop, on_tick, s, info);
    }
    return err ? err : open_transports(s, info);
}

// raise_files raises the limit of descriptors to the most that this process may have: connections
// that never say what they are take one each, and count nowhere else.
static void raise_files(const srv_conf *conf) {
    struct rlimit files;
    uint64_t needed = conf->connections + 5 * conf->rings + SRV_ADMIN_CONNECTIONS + OWN_FILES;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) {
        return;
    }
    files.rlim_cur = files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur < needed) {
        attnd_log(ATTND_LOG_WARN, "server", "%llu open files are allowed, %llu may be needed",
                  (unsigned long long)files.rlim_cur, (unsigned long long)needed);
    }
}

attnd_err srv_server_run(const srv_args *args, const srv_conf *conf, attnd_errinfo *info) {
    server *s = calloc(1, sizeof(*s));
    if (!s || uv_loop_init(&s->loop) != 0) {
        free(s);
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for the daemon");
    }
    signal(SIGPIPE, SIG_IGN);
    s->args = args;
    s->timer_at_ms = UINT64_MAX;
    s->arena.fd = -1;
    s->hooks = (srv_core_hooks){rearm, begin_drain, reconfigured, stir, describe, s};
    attnd_log_set_level(attnd_log_level_parse(conf->log_level));
    raise_files(conf);
    start_handles(s);
    attnd_err err = make(s, conf, info);
    if (err) {
        finish(s);
    } else {
        say_ready(s);
    }
    uv_run(&s->loop, UV_RUN_DEFAULT);
    uv_loop_close(&s->loop);
    srv_nng_fini();
    srv_deadline_set(UINT64_MAX); // unmapping a large arena takes its time
    srv_tiers_free(s->tiers);
    srv_core_fini(&s->core);
    if (s->arena.ops == &kv_arena_host_ops) {
        kv_arena_close_host(&s->arena);
    }
    if (s->backend) {
        s->backend->ops->free(s->backend);
    }
    if (!err && s->lost.code) {
        *info = s->lost;
        err = s->lost.code;
    }
    free(s);
    if (!err) {
        attnd_log(ATTND_LOG_INFO, "server", "stopped");
    }
    return err;
}
