// Tenants: a name, a quota, and how many blocks their sequences use.  They are few, come from the
// configuration, and are never removed, so a name is found by walking them.
#include "kvcache/kv_ledger.h"
#include "kvcache/kv_name.h"
#include "kvcache/kv_redo.h"

// Committed by the record that holds name and quota.
attnd_err kv_tenant_set(kv_cache *kv, const char *name, uint32_t quota_blocks, uint32_t *tenant) {
    char fixed[KV_NAME_BYTES];
    if (name[0] == '\0' || !kv_name_read(fixed, name)) {
        return ATTND_EINVAL;
    }
    kv_slots *slots = &kv->lists->tenants;
    uint32_t i = 0;
    while (i < slots->used && !kv_name_equal(kv->tenants[i].name, fixed)) {
        i++;
    }
    for (uint32_t hole = 0; i == slots->used && hole < i; hole++) {
        i = kv->tenants[hole].name[0] ? i : hole; // recovery dropped what was there
    }
    if (i == slots->cap) {
        return ATTND_ENOSPC;
    }
    kv_redo_begin(kv);
    kv_redo_put_bytes(kv, kv->tenants[i].name, fixed, sizeof(fixed));
    kv_redo_put(kv, &kv->tenants[i].quota_blocks, quota_blocks);
    kv_redo_commit(kv);
    slots->used += i == slots->used;
    *tenant = i;
    return ATTND_OK;
}

// Committed by the record that holds the floor.
attnd_err kv_tenant_cache(kv_cache *kv, uint32_t tenant, uint32_t floor_blocks, uint32_t priority) {
    if (tenant >= kv->lists->tenants.used || !kv->tenants[tenant].name[0] ||
        priority > KV_MAX_PRIORITY) {
        return ATTND_EINVAL;
    }
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->tenants[tenant].floor_blocks, floor_blocks);
    kv_redo_put(kv, &kv->tenants[tenant].priority, priority);
    kv_redo_commit(kv);
    return ATTND_OK;
}

uint32_t kv_tenant_cached(const kv_cache *kv, uint32_t tenant) {
    return kv->tenant_aux[tenant].cached;
}

attnd_err kv_tenant_get(const kv_cache *kv, uint32_t tenant, char name[KV_NAME_BYTES],
                        uint32_t *blocks, uint32_t *quota_blocks) {
    if (tenant >= kv->lists->tenants.used) {
        return ATTND_ENOENT;
    }
    memcpy(name, kv->tenants[tenant].name, KV_NAME_BYTES);
    *blocks = kv->tenant_aux[tenant].blocks;
    *quota_blocks = kv->tenants[tenant].quota_blocks;
    return ATTND_OK;
}
