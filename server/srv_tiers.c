// Tiers of the daemon: one of memory, one of a file, in this order.
#include "server/srv_tiers.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvcache/kv_tier.h"
#include "proto/log.h"
#include "server/srv_inherit.h"
#include "server/srv_notify.h"

static const char fd_name[] = "tier";

// Their places are the same in each run, whatever is configured or fails: the ledger names them so.
enum { MEMORY, FILES, NUM_TIERS };

_Static_assert((int)NUM_TIERS == (int)KV_MAX_TIERS, "the cache takes as many");

struct srv_tiers {
    srv_core *core;
    uv_async_t async;
    bool closed;
    kv_arena store; // of the memory tier
    bool has_store;
    kv_tier *tiers[NUM_TIERS]; // NULL = not configured, or could not be opened
    bool told_off[NUM_TIERS];
    uint32_t failed; // that could not be opened
};

// ---- copies that have ended

static void on_ended(void *ctx) {
    uv_async_send(&((srv_tiers *)ctx)->async);
}

static void tell_off(srv_tiers *t) {
    for (uint32_t i = 0; i < NUM_TIERS; i++) {
        if (t->tiers[i] && !t->told_off[i] && kv_tier_is_off(t->tiers[i])) {
            kv_tier_info info;
            kv_tier_get_info(t->tiers[i], &info);
            t->told_off[i] = true;
            attnd_log(ATTND_LOG_ERROR, "tier", "the %s tier is off: %s", info.kind, info.why);
        }
    }
}

static void on_async(uv_async_t *async) {
    srv_tiers *t = async->data;
    // with a lost device every copy fails, and tiers are not to blame: what they have is for the
    // next run
    bool retry = !t->closed && !t->core->lost && kv_tiers_poll(t->core->kv);
    tell_off(t);
    if (retry) {
        srv_core_freed(t->core);
    }
}

// ---- opening

static kv_tier_opts opts_of(srv_tiers *t, uint64_t bytes) {
    const srv_conf *conf = &t->core->conf;
    uint64_t slab = (conf->slab_bytes + KV_TIER_UNIT - 1) / KV_TIER_UNIT * KV_TIER_UNIT;
    return (kv_tier_opts){.arena = t->core->arena,
                          .bytes = bytes,
                          .slab_bytes = slab,
                          .salt = kv_salt(t->core->kv),
                          .depth = (uint32_t)conf->tier_queue,
                          .ended = on_ended,
                          .ctx = t};
}

// open_store takes over the memory of the run before, or makes some.
static attnd_err open_store(srv_tiers *t, bool *is_kept, attnd_errinfo *info) {
    uint64_t bytes = t->core->conf.tier_memory_bytes;
    int fd = srv_inherit_fd(fd_name);
    *is_kept = fd >= 0 && kv_arena_adopt_host(&t->store, fd, bytes, info) == ATTND_OK;
    if (!*is_kept && fd >= 0) {
        attnd_log(ATTND_LOG_WARN, "tier",
                  "the memory tier starts empty: that of the run before: %s", info->text);
        srv_notify_forget(fd_name);
        close(fd);
        srv_notify_settle(); // there may be no room for two
    }
    attnd_err err = *is_kept ? ATTND_OK : kv_arena_open_host(&t->store, bytes, info);
    t->has_store = !err;
    if (!err && !*is_kept) {
        srv_notify_store(fd_name, t->store.fd);
    }
    return err;
}

static attnd_err open_memory(srv_tiers *t, attnd_errinfo *info) {
    kv_tier_opts opts = opts_of(t, t->core->conf.tier_memory_bytes);
    bool is_kept;
    attnd_err err = open_store(t, &is_kept, info);
    return err ? err : kv_tier_open_memory(&t->tiers[MEMORY], &opts, &t->store, is_kept, info);
}

static attnd_err open_file(srv_tiers *t, attnd_errinfo *info) {
    kv_tier_opts opts = opts_of(t, t->core->conf.tier_file_bytes);
    return kv_tier_open_file(&t->tiers[FILES], &opts, t->core->conf.tier_file, info);
}

static void add(srv_tiers *t, attnd_err (*open)(srv_tiers *t, attnd_errinfo *info),
                const char *kind) {
    attnd_errinfo info;
    if (open(t, &info)) {
        t->failed++;
        attnd_log(ATTND_LOG_ERROR, "tier", "the %s tier is off: %s", kind, info.text);
    }
}

// forget_store: no tier of memory is configured any more.
static void forget_store(void) {
    int fd = srv_inherit_fd(fd_name);
    if (fd >= 0) {
        srv_notify_forget(fd_name);
        close(fd);
    }
}

static void say_taken_over(const srv_tiers *t) {
    kv_spill_info info;
    kv_spill_get_info(t->core->kv, &info);
    if (info.spilled || info.lost) {
        attnd_log(info.lost ? ATTND_LOG_WARN : ATTND_LOG_INFO, "tier",
                  "%llu blocks of the run before are in tiers, %llu are lost",
                  (unsigned long long)info.spilled, (unsigned long long)info.lost);
    }
}

attnd_err srv_tiers_open(srv_tiers **out, uv_loop_t *loop, srv_core *core, attnd_errinfo *info) {
    const srv_conf *conf = &core->conf;
    if (!conf->tier_memory_bytes) {
        forget_store();
    }
    if (!conf->tier_memory_bytes && !conf->tier_file[0]) {
        return kv_tiers_start(core->kv, NULL, 0, info);
    }
    srv_tiers *t = calloc(1, sizeof(*t));
    if (!t || uv_async_init(loop, &t->async, on_async) != 0) {
        free(t);
        return attnd_fail(info, ATTND_ENOMEM, "tier", "no memory for tiers");
    }
    t->core = core;
    t->async.data = t;
    *out = t;
    if (conf->tier_memory_bytes) {
        add(t, open_memory, "memory");
    }
    if (conf->tier_file[0]) {
        add(t, open_file, "file");
    }
    attnd_err err = kv_tiers_start(core->kv, t->tiers, NUM_TIERS, info);
    say_taken_over(t);
    return err;
}

// ---- closing

void srv_tiers_close(srv_tiers *t) {
    if (!t || t->closed) {
        return;
    }
    t->closed = true;
    for (uint32_t i = 0; i < NUM_TIERS; i++) {
        kv_tier_close(t->tiers[i]);
        t->tiers[i] = NULL;
    }
    kv_tiers_stop(t->core->kv);
    uv_close((uv_handle_t *)&t->async, NULL);
}

void srv_tiers_free(srv_tiers *t) {
    if (t && t->has_store) {
        kv_arena_close_host(&t->store);
    }
    free(t);
}

// ---- stats

static cJSON *describe_store(const kv_tier *tier) {
    kv_tier_info info;
    kv_tier_get_info(tier, &info);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "kind", info.kind);
    cJSON_AddBoolToObject(o, "off", info.off != ATTND_OK);
    cJSON_AddStringToObject(o, "why", info.why);
    cJSON_AddNumberToObject(o, "bytes", (double)info.bytes);
    cJSON_AddNumberToObject(o, "in_use_bytes", (double)info.in_use_bytes);
    cJSON_AddNumberToObject(o, "copies", info.jobs);
    cJSON_AddNumberToObject(o, "puts", (double)info.puts);
    cJSON_AddNumberToObject(o, "gets", (double)info.gets);
    cJSON_AddNumberToObject(o, "put_bytes", (double)info.put_bytes);
    cJSON_AddNumberToObject(o, "get_bytes", (double)info.get_bytes);
    cJSON_AddNumberToObject(o, "damaged", (double)info.damaged);
    return o;
}

void srv_tiers_describe(const srv_tiers *t, const kv_cache *kv, cJSON *out) {
    kv_spill_info info;
    kv_spill_get_info(kv, &info);
    uint32_t off = t ? t->failed : 0;
    cJSON *o = cJSON_AddObjectToObject(out, "tiers");
    cJSON_AddNumberToObject(o, "spilled", (double)info.spilled);
    cJSON_AddNumberToObject(o, "spilling", (double)info.spilling);
    cJSON_AddNumberToObject(o, "fetching", (double)info.fetching);
    cJSON_AddNumberToObject(o, "spills", (double)info.spills);
    cJSON_AddNumberToObject(o, "fetches", (double)info.fetches);
    cJSON_AddNumberToObject(o, "moves", (double)info.moves);
    cJSON_AddNumberToObject(o, "dropped", (double)info.dropped);
    cJSON_AddNumberToObject(o, "failed", (double)info.failed);
    cJSON_AddNumberToObject(o, "lost", (double)info.lost);
    cJSON *stores = cJSON_AddArrayToObject(o, "stores");
    for (uint32_t i = 0; t && i < NUM_TIERS; i++) {
        if (t->tiers[i]) {
            off += kv_tier_is_off(t->tiers[i]);
            cJSON_AddItemToArray(stores, describe_store(t->tiers[i]));
        }
    }
    cJSON_AddNumberToObject(o, "off", off);
}
