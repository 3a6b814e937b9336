// Blocks behind windows: see kv_window.h.
#include "kvcache/kv_window.h"

#include "kvcache/kv_evict.h"
#include "kvcache/kv_prefix.h"
#include "kvcache/kv_seq.h"

attnd_err kv_window_check(const kv_cache *kv, uint32_t idx, int64_t at, const char *field,
                          attnd_errinfo *info) {
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_model_spec *spec = &kv->models[s->model].spec;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        int64_t from = at - spec->groups[g].window_left;
        int64_t left = (int64_t)s->first[g] * spec->groups[g].block_tokens;
        if (left > 0 && from < left) {
            return attnd_fail(
                info, ATTND_ENOTSUP, field,
                "rows from token %lld on see token %lld: those before %lld lie behind "
                "the window of layer group %u and were given back",
                (long long)at, (long long)(from > 0 ? from : 0), (long long)left, g);
        }
    }
    return ATTND_OK;
}

void kv_window_give(kv_cache *kv, uint32_t idx, uint32_t group, uint32_t from, uint32_t to) {
    uint32_t *table = kv_table(kv, idx, group);
    kv_seq_give_blocks(kv, idx, group, from, to);
    for (uint32_t b = from; b < to; b++) {
        kv_store(&table[b], KV_NONE);
    }
}

// may_help says whether the needs could be met if all went that is cached.
static bool may_help(const kv_cache *kv, uint32_t tenant, const kv_need *needs, uint32_t num,
                     uint64_t take) {
    const kv_tenant_aux *has = &kv->tenant_aux[tenant];
    uint64_t quota = kv->tenants[tenant].quota_blocks;
    bool may = quota == 0 || has->blocks + take <= quota;
    for (uint32_t i = 0; i < num; i++) {
        const kv_class *class = &kv->classes[needs[i].class_idx];
        may = may && needs[i].take <= (uint64_t) class->free + class->cached;
    }
    return may;
}

static bool has_window(const kv_model_spec *spec) {
    uint32_t g = 0;
    while (g < spec->num_groups && spec->groups[g].window_left < 0) {
        g++;
    }
    return g < spec->num_groups;
}

// may_lose says whether a tenant may lose the blocks of one more node to another.
static bool may_lose(const kv_cache *kv, const kv_model_spec *spec, uint32_t to) {
    const kv_tenant_aux *has = &kv->tenant_aux[spec->tenant];
    uint64_t floor = kv->tenants[spec->tenant].floor_blocks;
    return spec->tenant == to || (uint64_t)has->blocks + has->cached >= floor + spec->num_groups;
}

// evict_path goes back from a node.
static bool evict_path(kv_cache *kv, uint32_t node, uint32_t tenant, const kv_need *needs,
                       uint32_t num, uint64_t take) {
    const kv_model_spec *spec = &kv->models[kv_node_model(kv, node)].spec;
    for (; has_window(spec) && node != KV_NONE; node = kv_prefix_parent(kv, node)) {
        if (!may_lose(kv, spec, tenant)) {
            return false;
        }
        if (kv_prefix_shrink(kv, node) > 0 && kv_evict_for(kv, tenant, needs, num, take)) {
            return true;
        }
    }
    return false;
}

bool kv_window_evict_for(kv_cache *kv, uint32_t from, uint32_t tenant, const kv_need *needs,
                         uint32_t num, uint64_t take) {
    if (!may_help(kv, tenant, needs, num, take)) {
        return false;
    }
    if (from != KV_NONE) {
        return evict_path(kv, from, tenant, needs, num, take);
    }
    bool fits = false;
    for (uint32_t i = 0; !fits && i < kv->lists->seqs.used; i++) {
        const kv_led_seq *s = &kv->seqs[i];
        fits = s->state == KV_LIVE && s->chain &&
               evict_path(kv, s->chain - 1, tenant, needs, num, take);
    }
    return fits;
}
