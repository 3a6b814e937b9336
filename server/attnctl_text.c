// The daemon's replies as text: a few labelled lines for status, tables for lists.  Names in them
// come from other clients, so what is not printable ASCII becomes '?': a terminal obeys no client.
//
// One thread.  Limits: a text is cut to TEXT_BYTES.
#include "server/attnctl_text.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>

enum { TEXT_BYTES = 96 };

// text_buf is a printable text, held by the caller for as long as printf needs it.
typedef struct text_buf {
    char s[TEXT_BYTES];
} text_buf;

static const cJSON *child(const cJSON *o, const char *key) {
    return cJSON_GetObjectItemCaseSensitive(o, key);
}

static double number(const cJSON *o, const char *key) {
    const cJSON *item = child(o, key);
    return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

// whole returns a number for PRIu64; the daemon counts nothing below 0.
static uint64_t whole(const cJSON *o, const char *key) {
    double value = number(o, key);
    return value > 0 ? (uint64_t)value : 0;
}

static bool yes(const cJSON *o, const char *key) {
    return cJSON_IsTrue(child(o, key));
}

static text_buf printable(const char *s) {
    text_buf buf = {""};
    for (size_t i = 0; i + 1 < sizeof(buf.s) && s[i]; i++) {
        buf.s[i] = s[i];
        if (s[i] < ' ' || s[i] > '~') {
            buf.s[i] = '?';
        }
    }
    return buf;
}

static bool has_text(const cJSON *o, const char *key) {
    const cJSON *item = child(o, key);
    return cJSON_IsString(item) && item->valuestring[0];
}

static text_buf text(const cJSON *o, const char *key) {
    return printable(has_text(o, key) ? child(o, key)->valuestring : "-");
}

// bytes writes 1536 as "1.5 KiB".
static text_buf bytes(double value) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    text_buf buf;
    snprintf(buf.s, sizeof(buf.s), unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return buf;
}

// duration writes 7384 s as "2h 03m 04s".
static text_buf duration(double seconds) {
    uint64_t s = seconds > 0 ? (uint64_t)seconds : 0;
    text_buf buf;
    if (s >= 86400) {
        snprintf(buf.s, sizeof(buf.s), "%" PRIu64 "d %02" PRIu64 "h", s / 86400, s / 3600 % 24);
    } else if (s >= 3600) {
        snprintf(buf.s, sizeof(buf.s), "%" PRIu64 "h %02" PRIu64 "m", s / 3600, s / 60 % 60);
    } else {
        snprintf(buf.s, sizeof(buf.s), "%" PRIu64 "m %02" PRIu64 "s", s / 60, s % 60);
    }
    return buf;
}

static void print_blocks(const cJSON *o, FILE *out) {
    double total = number(o, "total");
    fprintf(out,
            "in use %" PRIu64 ", cached %" PRIu64 ", free %" PRIu64 ", total %" PRIu64 " (%.1f%%)",
            whole(o, "in_use"), whole(o, "cached"), whole(o, "free"), whole(o, "total"),
            total > 0 ? 100 * number(o, "in_use") / total : 0.0);
}

static void print_device(const cJSON *device, FILE *out) {
    fprintf(out, "device     %s%s%s, %s kernels\n", text(device, "device").s,
            has_text(device, "name") ? ", " : "",
            has_text(device, "name") ? text(device, "name").s : "", text(device, "kernels").s);
}

static void print_cache(const cJSON *doc, FILE *out) {
    const cJSON *arena = child(doc, "arena");
    fprintf(out, "blocks     ");
    print_blocks(child(doc, "blocks"), out);
    fprintf(out, "\n");
    const cJSON *class;
    cJSON_ArrayForEach(class, child(doc, "classes")) {
        fprintf(out, "  of %s in %" PRIu64 " slabs: ", bytes(number(class, "block_bytes")).s,
                whole(class, "slabs"));
        print_blocks(class, out);
        fprintf(out, "\n");
    }
    fprintf(out,
            "arena      %s of %s pages, %s, %s in use; %" PRIu64 " slabs, %" PRIu64 " unassigned\n",
            bytes(number(arena, "bytes")).s, text(arena, "pages").s, text(arena, "kind").s,
            bytes(number(arena, "in_use_bytes")).s, whole(arena, "slabs"),
            whole(arena, "unassigned_slabs"));
    fprintf(out,
            "holds      %" PRIu64 " sequences, %" PRIu64 " models, %" PRIu64 " sessions, %" PRIu64
            " open steps\n",
            whole(doc, "sequences"), whole(doc, "models"), whole(doc, "sessions"),
            whole(doc, "steps"));
    const cJSON *prefixes = child(doc, "prefix_cache");
    double asked = number(prefixes, "looked_up_tokens");
    fprintf(out,
            "prefixes   %" PRIu64 " blocks; %" PRIu64 " of %" PRIu64
            " tokens found (%.1f%%), %" PRIu64 " blocks evicted\n",
            whole(prefixes, "blocks"), whole(prefixes, "found_tokens"),
            whole(prefixes, "looked_up_tokens"),
            asked > 0 ? 100 * number(prefixes, "found_tokens") / asked : 0.0,
            whole(prefixes, "evictions"));
    const cJSON *waits_for = child(doc, "waits_for");
    if (number(waits_for, "processes") > 0) {
        fprintf(out,
                "WARNING    no step is opened: process %" PRIu64 " of before the restart has the "
                "cache mapped, and must attach again or end\n",
                whole(waits_for, "pid"));
    }
    if (number(doc, "accounting_mismatches") > 0) {
        fprintf(out, "WARNING    the block accounting was wrong %" PRIu64 " times\n",
                whole(doc, "accounting_mismatches"));
    }
}

static void print_tiers(const cJSON *tiers, FILE *out) {
    const cJSON *store, *stores = child(tiers, "stores");
    if (cJSON_GetArraySize(stores) == 0 && number(tiers, "off") == 0) {
        return;
    }
    fprintf(out,
            "tiers      %" PRIu64 " blocks; %" PRIu64 " spilled and %" PRIu64 " fetched, %" PRIu64
            " lost; %" PRIu64 " copies failed\n",
            whole(tiers, "spilled"), whole(tiers, "spills"), whole(tiers, "fetches"),
            whole(tiers, "lost"), whole(tiers, "failed"));
    cJSON_ArrayForEach(store, stores) {
        fprintf(out, "  %s: %s, %s in use%s%s\n", text(store, "kind").s,
                bytes(number(store, "bytes")).s, bytes(number(store, "in_use_bytes")).s,
                yes(store, "off") ? "; off: " : "", yes(store, "off") ? text(store, "why").s : "");
    }
    if (number(tiers, "off") > 0) {
        fprintf(out, "WARNING    %" PRIu64 " tiers are off\n", whole(tiers, "off"));
    }
}

static void print_service(const cJSON *service, FILE *out) {
    if (number(service, "regions") > 0) {
        fprintf(out,
                "service    %" PRIu64 " regions of %s; %" PRIu64 " calls wait, %" PRIu64
                " drain; %" PRIu64 " of %" PRIu64 " failed\n",
                whole(service, "regions"), bytes(number(service, "region_bytes")).s,
                whole(service, "waiting"), whole(service, "draining"), whole(service, "failed"),
                whole(service, "calls"));
    }
    if (number(service, "regions_kept") > 0) {
        fprintf(out, "           %" PRIu64 " of them of processes that left without a word\n",
                whole(service, "regions_kept"));
    }
    if (number(service, "layers") > 0) {
        fprintf(out,
                "           %" PRIu64 " layers, %" PRIu64 " launched at their flag, %" PRIu64
                " before it, %" PRIu64 " in vain%s\n",
                whole(service, "layers"), whole(service, "ahead") - whole(service, "gated"),
                whole(service, "gated"), whole(service, "gates_missed"),
                cJSON_IsTrue(child(service, "wait_kernels")) ? "; clients wait in kernels" : "");
    }
    if (number(service, "regions_without_mps") > 0) {
        fprintf(out, "WARNING    %" PRIu64 " clients came to share the GPU without MPS\n",
                whole(service, "regions_without_mps"));
    }
}

static void print_scheduler(const cJSON *sched, FILE *out) {
    const cJSON *last = child(sched, "last");
    fprintf(out,
            "scheduler  %" PRIu64 " queued, %" PRIu64 " running, %" PRIu64 " wait for blocks\n",
            whole(sched, "queued"), whole(sched, "running"), whole(sched, "waiting_for_blocks"));
    fprintf(out, "launches   %" PRIu64 " with %" PRIu64 " rows, busy %.1f s\n",
            whole(sched, "launches"), whole(sched, "rows"), number(sched, "busy_us") / 1e6);
    fprintf(out, "tokens     %" PRIu64 " decode, %" PRIu64 " prefill (queries, layer by layer)\n",
            whole(sched, "decode_tokens"), whole(sched, "prefill_tokens"));
    fprintf(out, "last       %s: %s; %" PRIu64 " rows, %" PRIu64 " splits\n",
            text(last, "kernel").s, text(last, "why").s, whole(last, "rows"),
            whole(last, "splits"));
}

void attnctl_print_status(const cJSON *doc, FILE *out) {
    fprintf(out, "%s is %s, up %s\n", text(doc, "daemon").s, text(doc, "state").s,
            duration(number(doc, "uptime_s")).s);
    print_device(child(doc, "device"), out);
    print_cache(doc, out);
    print_tiers(child(doc, "tiers"), out);
    print_service(child(doc, "service"), out);
    print_scheduler(child(doc, "scheduler"), out);
    fprintf(out, "\n%-24s %10s %10s %10s %6s\n", "TENANT", "BLOCKS", "CACHED", "QUOTA", "SHARE");
    const cJSON *tenant;
    cJSON_ArrayForEach(tenant, child(doc, "tenants")) {
        text_buf quota = {"none"};
        if (number(tenant, "quota_blocks") > 0) {
            snprintf(quota.s, sizeof(quota.s), "%" PRIu64, whole(tenant, "quota_blocks"));
        }
        fprintf(out, "%-24s %10" PRIu64 " %10" PRIu64 " %10s %6" PRIu64 "\n",
                text(tenant, "name").s, whole(tenant, "blocks"), whole(tenant, "cached_blocks"),
                quota.s, whole(tenant, "share"));
    }
}

void attnctl_print_models(const cJSON *doc, FILE *out) {
    fprintf(out, "%5s %-24s %-16s %6s %9s %8s %5s %8s\n", "MODEL", "NAME", "TENANT", "LAYERS",
            "HEADS", "HEAD_DIM", "BLOCK", "DTYPE");
    const cJSON *m;
    cJSON_ArrayForEach(m, child(doc, "models")) {
        if (!child(m, "layers")) {
            fprintf(out, "%5" PRIu64 " %-24s %-16s not opened since a restart\n", whole(m, "model"),
                    text(m, "name").s, text(m, "tenant").s);
            continue;
        }
        text_buf heads, dims, dtype;
        snprintf(heads.s, sizeof(heads.s), "%" PRIu64 "/%" PRIu64, whole(m, "q_heads"),
                 whole(m, "kv_heads"));
        snprintf(dims.s, sizeof(dims.s), "%" PRIu64 "/%" PRIu64, whole(m, "head_dim"),
                 whole(m, "v_head_dim"));
        snprintf(dtype.s, sizeof(dtype.s), "%.40s/%.40s", text(m, "dtype").s,
                 text(m, "kv_dtype").s);
        fprintf(out, "%5" PRIu64 " %-24s %-16s %6" PRIu64 " %9s %8s %5" PRIu64 " %8s\n",
                whole(m, "model"), text(m, "name").s, text(m, "tenant").s, whole(m, "layers"),
                heads.s, dims.s, whole(m, "block_tokens"), dtype.s);
    }
}

void attnctl_print_sequences(const cJSON *doc, FILE *out) {
    fprintf(out, "%-16s %5s %-16s %-16s %8s %8s %-5s %s\n", "SEQUENCE", "MODEL", "TENANT",
            "SESSION", "TOKENS", "BLOCKS", "STEP", "KEPT AS");
    const cJSON *s;
    cJSON_ArrayForEach(s, child(doc, "sequences")) {
        fprintf(out, "%-16s %5" PRIu64 " %-16s %-16s %8" PRIu64 " %8" PRIu64 " %-5s %s\n",
                text(s, "seq").s, whole(s, "model"), text(s, "tenant").s, text(s, "session").s,
                whole(s, "len"), whole(s, "blocks"), yes(s, "in_step") ? "open" : "-",
                text(s, "name").s);
    }
}

void attnctl_print_sessions(const cJSON *doc, FILE *out) {
    fprintf(out, "%-16s %-20s %-16s %-10s %8s %6s %10s %9s %5s %10s %8s\n", "SESSION", "CLIENT",
            "TENANT", "WAY", "PID", "UID", "AGE", "IN FLIGHT", "STEPS", "REQUESTS", "ERRORS");
    const cJSON *s;
    cJSON_ArrayForEach(s, child(doc, "sessions")) {
        text_buf uid = {"-"}, pid = {"-"};
        if (number(s, "pid") > 0) {
            snprintf(pid.s, sizeof(pid.s), "%" PRIu64, whole(s, "pid"));
        }
        if (number(s, "uid") >= 0) {
            snprintf(uid.s, sizeof(uid.s), "%" PRIu64, whole(s, "uid"));
        }
        fprintf(out,
                "%-16s %-20s %-16s %-10s %8s %6s %10s %9" PRIu64 " %5" PRIu64 " %10" PRIu64
                " %8" PRIu64 "\n",
                text(s, "session").s, text(s, "client").s, text(s, "tenant").s, text(s, "way").s,
                pid.s, uid.s, duration(number(s, "age_s")).s, whole(s, "in_flight"),
                whole(s, "steps"), whole(s, "requests"), whole(s, "errors"));
    }
}

void attnctl_print_drain(const cJSON *doc, FILE *out) {
    fprintf(out,
            "draining: new work is refused; %" PRIu64 " sessions and %" PRIu64
            " open steps have %.1f s\n",
            whole(doc, "sessions"), whole(doc, "steps"), number(doc, "timeout_ms") / 1000);
}

void attnctl_print_config(const cJSON *doc, FILE *out) {
    const cJSON *item;
    cJSON_ArrayForEach(item, doc) {
        fprintf(out, "%s = %s\n", printable(item->string).s,
                cJSON_IsString(item) ? item->valuestring : "");
    }
}

void attnctl_print_ping(const cJSON *doc, FILE *out) {
    fprintf(out, "%s is %s\n", text(doc, "daemon").s, text(doc, "state").s);
}
