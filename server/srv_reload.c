// Reloading: key by key, so that one value that cannot be taken leaves the others.
#include "server/srv_reload.h"

#include <string.h>

#include "proto/log.h"

static const char *shown(const char *value) {
    return value[0] ? value : "(empty)";
}

// take_value takes over one value of a configuration read again.
static void take_value(void *arg, const char *key, const char *value) {
    srv_conf *conf = arg;
    char old[SRV_CONF_TEXT_BYTES] = "";
    attnd_errinfo info;
    const srv_conf_key *row = srv_conf_find(key);
    bool same = srv_conf_get(conf, key, old, &info) == ATTND_OK && !strcmp(old, value);
    if (same) {
        return;
    }
    if (!row->reloadable) {
        attnd_log(ATTND_LOG_WARN, "conf", "%s = %s takes effect at the next start, it is %s", key,
                  shown(value), shown(old));
    } else if (srv_conf_set(conf, key, value, &info)) {
        attnd_log(ATTND_LOG_WARN, "conf", "%s stays %s: %s", key, shown(old), info.text);
    } else {
        attnd_log(ATTND_LOG_INFO, "conf", "%s = %s, was %s", key, shown(value), shown(old));
    }
}

// take_tenants adds those that are new, with the defaults, and tells of those that are gone.
static void take_tenants(srv_conf *conf, srv_conf *next) {
    attnd_errinfo info;
    for (uint32_t i = 0; i < conf->num_tenants; i++) {
        if (!srv_conf_tenant_find(next, conf->tenants[i].name)) {
            attnd_log(ATTND_LOG_WARN, "conf", "tenant %s stays until the next start",
                      conf->tenants[i].name);
        }
    }
    for (uint32_t i = 0; i < next->num_tenants; i++) {
        const char *name = next->tenants[i].name;
        if (srv_conf_tenant_find(conf, name)) {
            continue;
        }
        if (srv_conf_tenant_add(conf, name, &info)) {
            attnd_log(ATTND_LOG_WARN, "conf", "tenant %s was not added: %s", name, info.text);
        } else {
            attnd_log(ATTND_LOG_INFO, "conf", "tenant %s is new", name);
        }
    }
}

void srv_reload_take(srv_conf *conf, srv_conf *next) {
    take_tenants(conf, next);
    srv_conf_each(next, take_value, conf);
}
