// Models: a spec under a tenant's name, kept while it has users, sequences or cached prefixes; a
// model that has only the last gives way to another that wants its name or its place.  Each layer
// group holds the size class of its blocks.  The spec is stored in one form (unused groups and the
// bytes behind the name are zero), so that equal specs are equal bytes.
#include "kvcache/kv_model.h"

#include "kvcache/kv_evict.h"
#include "kvcache/kv_name.h"
#include "kvcache/kv_prefix.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_slab.h"
#include "kvcache/kv_spill.h"

_Static_assert(sizeof(kv_model_spec) == 64 + 32 + 4 + 4 + 24 * KV_MAX_GROUPS,
               "without padding equal specs are equal bytes");

// block_units returns how many units a block takes, 0 when the product does not fit 64 bits.
static uint64_t block_units(const kv_group_spec *g) {
    uint64_t bytes;
    if (__builtin_mul_overflow((uint64_t)g->layers * g->kv_heads, g->block_tokens, &bytes) ||
        __builtin_mul_overflow(bytes, (uint64_t)g->k_row_bytes + g->v_row_bytes, &bytes)) {
        return 0;
    }
    return bytes / KV_BLOCK_UNIT + (bytes % KV_BLOCK_UNIT != 0);
}

static attnd_err check_group(const kv_cache *kv, const kv_group_spec *g, uint32_t i,
                             attnd_errinfo *info) {
    const struct {
        const char *field;
        uint32_t value;
    } fields[] = {
        {"layers", g->layers},
        {"kv_heads", g->kv_heads},
        {"k_row_bytes", g->k_row_bytes},
        {"v_row_bytes", g->v_row_bytes},
        {"block_tokens", g->block_tokens},
    };
    for (size_t f = 0; f < sizeof(fields) / sizeof(fields[0]); f++) {
        if (fields[f].value == 0 || fields[f].value > INT32_MAX) {
            return attnd_fail(info, ATTND_EINVAL, fields[f].field,
                              "%s of layer group %u is %u: it must be from 1 to 2147483647",
                              fields[f].field, i, fields[f].value);
        }
    }
    if (g->window_left < -1) {
        return attnd_fail(info, ATTND_EINVAL, "window_left",
                          "window_left of layer group %u is %d: it must be -1 or more", i,
                          g->window_left);
    }
    uint64_t units = block_units(g);
    if (units == 0 || units > kv->slab_units) {
        return attnd_fail(info, ATTND_EINVAL, "block_tokens",
                          "a block of layer group %u has %llu bytes, a slab only %llu", i,
                          (unsigned long long)(units ? units * KV_BLOCK_UNIT : UINT64_MAX),
                          (unsigned long long)kv->opts.slab_bytes);
    }
    return ATTND_OK;
}

// read_spec checks a spec and writes it in its one form.
static attnd_err read_spec(const kv_cache *kv, const kv_model_spec *in, kv_model_spec *out,
                           attnd_errinfo *info) {
    memset(out, 0, sizeof(*out));
    if (in->name[0] == '\0' || !kv_name_read(out->name, in->name)) {
        return attnd_fail(info, ATTND_EINVAL, "name", "a model's name has 1 to %d bytes",
                          KV_NAME_BYTES - 1);
    }
    if (in->tenant >= kv->lists->tenants.used) {
        return attnd_fail(info, ATTND_EINVAL, "tenant", "tenant %u does not exist", in->tenant);
    }
    if (in->num_groups == 0 || in->num_groups > KV_MAX_GROUPS) {
        return attnd_fail(info, ATTND_EINVAL, "num_groups", "%u layer groups: 1 to %d are possible",
                          in->num_groups, KV_MAX_GROUPS);
    }
    memcpy(out->digest, in->digest, sizeof(out->digest));
    out->tenant = in->tenant;
    out->num_groups = in->num_groups;
    for (uint32_t i = 0; i < in->num_groups; i++) {
        out->groups[i] = in->groups[i];
        attnd_err err = check_group(kv, &out->groups[i], i, info);
        if (err) {
            return err;
        }
    }
    return ATTND_OK;
}

bool kv_model_revive(kv_cache *kv, uint32_t model) {
    kv_model_spec fixed;
    attnd_errinfo info;
    const kv_model_spec *spec = &kv->models[model].spec;
    if (read_spec(kv, spec, &fixed, &info) || memcmp(spec, &fixed, sizeof(fixed)) != 0) {
        return false;
    }
    for (uint32_t g = 0; g < fixed.num_groups; g++) {
        kv->model_aux[model].classes[g] =
            kv_class_hold(kv, (uint32_t)block_units(&fixed.groups[g]));
    }
    kv_prefix_start(kv, model);
    return true;
}

static uint32_t find_by_name(const kv_cache *kv, uint32_t tenant, const char *name) {
    for (uint32_t i = 0; i < kv->lists->models.used; i++) {
        const kv_led_model *m = &kv->models[i];
        if (m->state == KV_LIVE && m->spec.tenant == tenant && kv_name_equal(m->spec.name, name)) {
            return i;
        }
    }
    return KV_NONE;
}

static bool is_only_cached(const kv_cache *kv, uint32_t model) {
    const kv_led_model *m = &kv->models[model];
    return m->state == KV_LIVE && m->users == 0 && kv->model_aux[model].seqs == 0 &&
           !kv_spill_moves(kv, model);
}

// take_slot finds a place for a new model; one that has only cached prefixes makes way.
static uint32_t take_slot(kv_cache *kv) {
    kv_slots *slots = &kv->lists->models;
    for (uint32_t i = 0; kv_slots_peek(slots) == KV_NONE && i < slots->used; i++) {
        if (is_only_cached(kv, i)) {
            kv_evict_model(kv, i);
        }
    }
    return kv_slots_take(slots, kv->model_next);
}

// Committed by the record that holds the number of users and, for a new model, its spec.
attnd_err kv_model_open(kv_cache *kv, const kv_model_spec *spec, uint32_t *model,
                        attnd_errinfo *info) {
    kv_model_spec fixed;
    attnd_err err = read_spec(kv, spec, &fixed, info);
    if (err) {
        return err;
    }
    uint32_t i = find_by_name(kv, fixed.tenant, fixed.name);
    if (i != KV_NONE && is_only_cached(kv, i) &&
        memcmp(&kv->models[i].spec, &fixed, sizeof(fixed))) {
        kv_evict_model(kv, i);
        i = KV_NONE;
    }
    bool is_new = i == KV_NONE;
    if (is_new) {
        i = take_slot(kv);
        if (i == KV_NONE) {
            return attnd_fail(info, ATTND_ENOSPC, NULL,
                              "%u models are open or wait for clients of before a restart: "
                              "cache.max_models allows no more",
                              kv->opts.max_models);
        }
    } else if (memcmp(&kv->models[i].spec, &fixed, sizeof(fixed)) != 0) {
        return attnd_fail(info, ATTND_EEXIST, "name",
                          "model %s exists with another digest or geometry", fixed.name);
    } else if (kv->models[i].users == UINT32_MAX) {
        return attnd_fail(info, ATTND_EBUSY, NULL, "model %s has too many users", fixed.name);
    }
    kv_redo_begin(kv);
    if (is_new) {
        kv_redo_put_bytes(kv, &kv->models[i].spec, &fixed, sizeof(fixed));
        kv_redo_put(kv, &kv->models[i].state, KV_LIVE);
    }
    kv_redo_put(kv, &kv->models[i].users, is_new ? 1 : kv->models[i].users + 1);
    kv_redo_commit(kv);
    for (uint32_t g = 0; is_new && g < fixed.num_groups; g++) {
        kv->model_aux[i].classes[g] = kv_class_hold(kv, (uint32_t)block_units(&fixed.groups[g]));
    }
    if (is_new) {
        kv_prefix_start(kv, i);
    }
    *model = i;
    return ATTND_OK;
}

// forget removes a model that nothing needs.  Committed by the record that says so.
static void forget(kv_cache *kv, uint32_t model) {
    if (!is_only_cached(kv, model) || kv->model_aux[model].nodes > 0) {
        return;
    }
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->models[model].state, KV_FREE);
    kv_redo_commit(kv);
    for (uint32_t g = 0; g < kv->models[model].spec.num_groups; g++) {
        kv_class_rele(kv, kv->model_aux[model].classes[g]);
    }
    kv_slots_give(&kv->lists->models, kv->model_next, model);
}

// Committed by the record that holds the number of users.
attnd_err kv_model_close(kv_cache *kv, uint32_t model) {
    if (!kv_model_get(kv, model) || kv->models[model].users == 0) {
        return ATTND_ENOENT;
    }
    kv_redo_begin(kv);
    kv_redo_put(kv, &kv->models[model].users, kv->models[model].users - 1);
    kv_redo_commit(kv);
    forget(kv, model);
    return ATTND_OK;
}

void kv_model_seq_gone(kv_cache *kv, uint32_t model) {
    kv->model_aux[model].seqs--;
    forget(kv, model);
}

void kv_model_node_gone(kv_cache *kv, uint32_t model) {
    forget(kv, model);
}

bool kv_model_is_new(const kv_cache *kv, uint32_t model) {
    const kv_model_aux *aux = &kv->model_aux[model];
    return kv->models[model].users == 1 && aux->seqs == 0 && aux->nodes == 0;
}

const kv_model_spec *kv_model_get(const kv_cache *kv, uint32_t model) {
    bool live = model < kv->lists->models.used && kv->models[model].state == KV_LIVE;
    return live ? &kv->models[model].spec : NULL;
}

attnd_err kv_model_find(const kv_cache *kv, uint32_t tenant, uint32_t model, attnd_errinfo *info) {
    const kv_model_spec *spec = kv_model_get(kv, model);
    if (!spec || spec->tenant != tenant) {
        return attnd_fail(info, ATTND_ENOENT, "model", "model %u does not exist", model);
    }
    return ATTND_OK;
}
