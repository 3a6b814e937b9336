// Accounting.  The fast check compares counters that are kept apart on purpose: the free and the
// used blocks of a class are counted each for itself, and so are the blocks of tenants.  The full
// check believes only tables and recounts all of them.
#include <stdlib.h>
#include <string.h>

#include "kvcache/kv_ledger.h"
#include "kvcache/kv_name.h"
#include "kvcache/kv_pool.h"
#include "kvcache/kv_prefix.h"
#include "kvcache/kv_spill.h"
#include "kvcache/kv_step.h"
#include "kvcache/kv_sum.h"
#include "kvcache/kv_window.h"

void kv_get_info(const kv_cache *kv, kv_info *out) {
    const kv_led_lists *lists = kv->lists;
    *out = (kv_info){
        .arena_bytes = kv->arena->bytes,
        .slab_bytes = kv->opts.slab_bytes,
        .slabs = kv->num_slabs,
        .unassigned_slabs = kv->num_slabs - lists->slabs.live,
        .num_classes = lists->classes.live,
        .seqs = lists->seqs.live,
        .models = lists->models.live,
        .sessions = lists->sessions.live,
        .steps = lists->steps.live,
        .prefix_blocks = lists->nodes.live,
        .looked_up_tokens = kv->looked_up_tokens,
        .found_tokens = kv->found_tokens,
        .evictions = kv->evictions,
        .mismatches = kv->mismatches,
    };
    kv_class_info class;
    for (uint32_t i = 0; kv_class_get(kv, i, &class) == ATTND_OK; i++) {
        out->total += class.total;
        out->free += class.free;
        out->cached += class.cached;
        out->in_use += class.in_use;
        out->in_use_bytes += class.in_use * class.block_bytes;
        out->cached_bytes += class.cached * class.block_bytes;
    }
}

attnd_err kv_class_get(const kv_cache *kv, uint32_t i, kv_class_info *out) {
    for (uint32_t c = 0; c < kv->lists->classes.used; c++) {
        const kv_class *class = &kv->classes[c];
        if (class->users > 0 && i-- == 0) {
            *out = (kv_class_info){
                .block_bytes = (uint64_t) class->units * KV_BLOCK_UNIT,
                .slabs = class->slabs,
                .total = class->slabs * class->slab_blocks,
                .free = class->free,
                .cached = class->cached,
                .in_use = class->in_use,
            };
            return ATTND_OK;
        }
    }
    return ATTND_ENOENT;
}

bool kv_check_fast(kv_cache *kv) {
    uint64_t slabs = 0, in_use = 0, cached = 0, used_by = 0, cached_by = 0;
    bool good = true;
    for (uint32_t c = 0; c < kv->lists->classes.used; c++) {
        const kv_class *class = &kv->classes[c];
        if (class->users > 0) {
            good = good && (uint64_t) class->free + class->cached + class->in_use ==
                               (uint64_t) class->slabs * class->slab_blocks;
            slabs += class->slabs;
            in_use += class->in_use;
            cached += class->cached;
        }
    }
    for (uint32_t t = 0; t < kv->lists->tenants.used; t++) {
        used_by += kv->tenant_aux[t].blocks;
        cached_by += kv->tenant_aux[t].cached;
    }
    good = good && slabs == kv->lists->slabs.live && in_use == used_by && cached == cached_by;
    kv->mismatches += !good;
    return good;
}

// ---- the full check

typedef struct recount {
    const kv_cache *kv;
    uint32_t *refs;    // [num_slabs, slab_blocks], as the tables say
    uint32_t *nodes;   // likewise, node + 1 that the block is of
    uint32_t *tenants; // [max_tenants], blocks in use
    uint32_t *cached;  // [max_tenants]
    uint32_t *uses;    // [prefix_blocks], of nodes
    uint64_t spilled;  // blocks
    attnd_errinfo *info;
} recount;

#define WRONG(r, ...) (attnd_fail((r)->info, ATTND_EINVAL, "accounting", __VA_ARGS__), false)

// is_block says whether an entry names a block of the class.
static bool is_block(const kv_cache *kv, uint32_t class_idx, uint32_t entry) {
    uint32_t slab = entry / kv->slab_units;
    const kv_slab_aux *aux = slab < kv->num_slabs ? &kv->slab_aux[slab] : NULL;
    return aux && aux->units != 0 && aux->class_idx == class_idx &&
           entry % kv->slab_units % aux->units == 0 &&
           entry % kv->slab_units / aux->units < aux->slab_blocks;
}

// count_entry counts a reference of the sequence to a block, which must be one of the class.
static bool count_entry(recount *r, uint32_t idx, uint32_t class_idx, uint32_t entry) {
    const kv_cache *kv = r->kv;
    if (!is_block(kv, class_idx, entry)) {
        return WRONG(r, "entry %u of sequence %u is no block of its class", entry, idx);
    }
    if (r->refs[kv_pool_index(kv, entry)]++ == 0) {
        r->tenants[kv->seqs[idx].tenant]++;
    }
    return true;
}

// count_table counts the blocks of a sequence in a group.
static bool count_table(recount *r, uint32_t idx, uint32_t g, const kv_group_spec *group) {
    const kv_cache *kv = r->kv;
    const kv_led_seq *s = &kv->seqs[idx];
    const uint32_t *table = kv_table(kv, idx, g);
    uint32_t class_idx = kv->model_aux[s->model].classes[g];
    uint32_t have = kv_blocks_of(s->committed, group->block_tokens), num = have, found = have;
    uint64_t sum = kv_sum_entries(table, s->first[g], have), at = kv_step_place(kv, idx);
    if (at != KV_NONE) {
        const kv_step_seq *in = &kv->step_seqs[at];
        num = kv_blocks_of(s->committed + in->new_len + in->reserve, group->block_tokens);
        found = kv_window_found(kv, group, have, kv->step_hits[at].blocks);
    }
    if (s->old_last[g] != KV_NONE) {
        sum += kv_sum_entry(have - 1, s->old_last[g]) - kv_sum_entry(have - 1, table[have - 1]);
    }
    if (sum != s->table_sums[g]) {
        return WRONG(r, "a table of sequence %u has a wrong checksum", idx);
    }
    for (uint32_t b = 0; b < num; b++) {
        bool none = b < s->first[g] || (b >= have && b < found);
        if (none ? table[b] != KV_NONE : !count_entry(r, idx, class_idx, table[b])) {
            return none ? WRONG(r, "sequence %u has entry %u behind its window", idx, table[b])
                        : false;
        }
    }
    if (s->old_last[g] != KV_NONE && at == KV_NONE) {
        return WRONG(r, "sequence %u has a copied block but no step", idx);
    }
    return s->old_last[g] == KV_NONE || count_entry(r, idx, class_idx, s->old_last[g]);
}

static bool count_seq(recount *r, uint32_t idx) {
    const kv_cache *kv = r->kv;
    const kv_led_seq *s = &kv->seqs[idx];
    const kv_led_model *model = &kv->models[s->model];
    if (model->state != KV_LIVE || model->spec.tenant != s->tenant) {
        return WRONG(r, "sequence %u has no model", idx);
    }
    for (uint32_t g = 0; g < model->spec.num_groups; g++) {
        if (!count_table(r, idx, g, &model->spec.groups[g])) {
            return false;
        }
    }
    return true;
}

// count_nodes counts what the prefix tree has: blocks, and users of nodes but for the sequences and
// steps.
static bool count_nodes(recount *r) {
    const kv_cache *kv = r->kv;
    for (uint32_t i = 0; i < kv->lists->nodes.used; i++) {
        if (!kv->nodes[i].owner) {
            continue;
        }
        uint32_t model = kv_node_model(kv, i), parent = kv_prefix_parent(kv, i);
        const kv_model_spec *spec = kv_model_get(kv, model);
        bool may_lack = kv_spilled(kv, i) || kv->node_aux[i].uses & KV_LEAVING;
        if (!spec || (parent != KV_NONE && !may_lack &&
                      (kv->nodes[parent].generation != kv->nodes[i].parent_generation ||
                       kv->nodes[parent].owner == 0 || kv_node_model(kv, parent) != model))) {
            return WRONG(r, "node %u has no model or no parent", i);
        }
        for (uint32_t g = 0; g < spec->num_groups; g++) {
            uint32_t entry = *kv_node_entry(kv, i, g);
            if (entry == KV_NONE) {
                continue;
            }
            if (!is_block(kv, kv->model_aux[model].classes[g], entry) ||
                r->nodes[kv_pool_index(kv, entry)]) {
                return WRONG(r, "entry %u of node %u is no block of its own", entry, i);
            }
            r->nodes[kv_pool_index(kv, entry)] = i + 1;
            r->cached[spec->tenant] += r->refs[kv_pool_index(kv, entry)] == 0;
        }
        if (kv_spilled(kv, i)) {
            r->spilled += kv->spills[i].tier == KV_SPILL_LOST
                              ? 0
                              : (uint32_t)__builtin_popcount(kv->spills[i].groups);
        }
        bool busy = kv->node_aux[i].uses & ~(KV_CANDIDATE | KV_LEAVING);
        if (parent != KV_NONE && busy) {
            r->uses[parent]++;
        }
    }
    return true;
}

// count_users counts the users of nodes that sequences and open steps are.
static void count_users(recount *r) {
    const kv_cache *kv = r->kv;
    for (uint32_t i = 0; i < kv->lists->seqs.used; i++) {
        if (kv->seqs[i].state == KV_LIVE && kv->seqs[i].chain) {
            r->uses[kv->seqs[i].chain - 1]++;
        }
    }
    for (uint32_t s = 0; s < kv->lists->steps.used; s++) {
        uint32_t num = kv->steps[s].state == KV_LIVE ? kv->step_aux[s].num_seqs : 0;
        for (uint32_t i = 0; i < num; i++) {
            const kv_step_hit *hit = &kv->step_hits[(uint64_t)s * kv->opts.max_step_seqs + i];
            if (hit->node) {
                r->uses[hit->node - 1]++;
            }
            if (hit->partial) {
                r->uses[hit->partial - 1]++;
                for (uint32_t g = 0; g < kv->models[kv->step_aux[s].model].spec.num_groups; g++) {
                    uint32_t entry = *kv_node_entry(kv, hit->partial - 1, g);
                    uint32_t tenant = kv->models[kv->step_aux[s].model].spec.tenant;
                    r->tenants[tenant] += r->refs[kv_pool_index(kv, entry)]++ == 0;
                }
            }
        }
    }
}

// count_copied counts a node that is being copied to a tier or back, and its blocks.
static void count_copied(void *arg, uint32_t node, uint32_t uses, const uint32_t *entries) {
    recount *r = arg;
    const kv_model_spec *spec = &r->kv->models[kv_node_model(r->kv, node)].spec;
    r->uses[node] += uses;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (entries[g] != KV_NONE) {
            r->tenants[spec->tenant] += r->refs[kv_pool_index(r->kv, entries[g])]++ == 0;
        }
    }
}

static bool check_nodes(recount *r) {
    const kv_cache *kv = r->kv;
    uint32_t live = 0, has_child = 0;
    for (uint32_t i = 0; i < kv->lists->nodes.used; i++) {
        if (!kv->nodes[i].owner) {
            continue;
        }
        uint32_t uses = kv->node_aux[i].uses;
        live++;
        has_child = kv->node_aux[i].down && !(uses & KV_CANDIDATE);
        if ((uses & ~KV_CANDIDATE) != r->uses[i] ||
            !!(uses & KV_CANDIDATE) != (r->uses[i] == 0 && !has_child && !kv_spilled(kv, i))) {
            return WRONG(r, "node %u has %u users, not %x", i, r->uses[i], uses);
        }
    }
    kv_spill_info spill;
    kv_spill_get_info(kv, &spill);
    if (kv->spiller && spill.spilled != r->spilled) {
        return WRONG(r, "%llu blocks are spilled, not %llu", (unsigned long long)r->spilled,
                     (unsigned long long)spill.spilled);
    }
    if (live != kv->lists->nodes.live) {
        return WRONG(r, "%u nodes live, not %u", live, kv->lists->nodes.live);
    }
    return true;
}

// check_slab compares references and free bits of a slab with the recount.
static bool check_slab(recount *r, uint32_t slab, uint32_t *in_use, uint32_t *cached) {
    const kv_cache *kv = r->kv;
    const kv_slab_aux *aux = &kv->slab_aux[slab];
    const kv_bits *bits = kv->bits + (uint64_t)slab * kv->free_words;
    const uint64_t *sum = kv->free_sum + (uint64_t)slab * kv->free_sums;
    uint64_t first = (uint64_t)slab * kv->slab_blocks;
    uint32_t used = 0, unused = 0, quiet = 0;
    if (aux->units != kv->slabs[slab].units) {
        return WRONG(r, "slab %u is cut in two ways", slab);
    }
    for (uint32_t b = 0; b < aux->slab_blocks; b++) {
        uint32_t refs = r->refs[first + b];
        uint32_t entry = slab * kv->slab_units + b * aux->units;
        uint32_t node = r->nodes[first + b];
        bool is_free = bits[b / 64].free >> b % 64 & 1;
        if (kv_pool_refs(kv, entry) != refs || is_free != (refs == 0 && !node) ||
            kv_pool_is_indexed(kv, entry) != (node != 0) ||
            kv_pool_is_cached(kv, entry) != (node && refs == 0)) {
            return WRONG(r, "block %u of slab %u has %u references, not %u%s", b, slab, refs,
                         kv_pool_refs(kv, entry), is_free ? ", and is free" : "");
        }
        used += refs > 0;
        unused += node && refs == 0;
        quiet += node && (kv->node_aux[node - 1].uses & ~KV_CANDIDATE) == 0;
    }
    for (uint32_t w = 0; aux->units && w < kv->free_words; w++) {
        if ((sum[w / 64] >> w % 64 & 1) != (bits[w].free != 0)) {
            return WRONG(r, "word %u of the free bits of slab %u is not summed up", w, slab);
        }
    }
    if (aux->slab_blocks - used - unused != aux->free || (aux->units && used + unused == 0) ||
        aux->evictable != quiet) {
        return WRONG(r, "slab %u has %u blocks in use and %u cached of %u, and %u free", slab, used,
                     unused, aux->slab_blocks, aux->free);
    }
    *in_use += used;
    *cached += unused;
    return true;
}

static bool check_class(recount *r, uint32_t class_idx) {
    const kv_cache *kv = r->kv;
    const kv_class *class = &kv->classes[class_idx];
    uint32_t slabs = 0, in_use = 0, cached = 0, linked = 0, with_free = 0;
    for (uint32_t s = 0; s < kv->num_slabs; s++) {
        const kv_slab_aux *aux = &kv->slab_aux[s];
        if (aux->units && aux->class_idx == class_idx) {
            slabs++;
            with_free += aux->free > 0;
            if (!check_slab(r, s, &in_use, &cached)) {
                return false;
            }
        }
    }
    for (uint32_t s = class->first_slab; s && linked <= slabs; s = kv->slab_aux[s - 1].next) {
        linked++;
    }
    if (slabs != class->slabs || in_use != class->in_use || cached != class->cached ||
        linked != with_free ||
        (uint64_t) class->free + cached + in_use != (uint64_t)slabs * class->slab_blocks) {
        return WRONG(r, "class of %u units: %u slabs (%u linked) with %u blocks in use, not %u, %u",
                     class->units, slabs, linked, in_use, class->slabs, class->in_use);
    }
    return true;
}

static bool check_seqs(recount *r) {
    const kv_cache *kv = r->kv;
    uint32_t live = 0;
    for (uint32_t i = 0; i < kv->lists->seqs.used; i++) {
        if (kv->seqs[i].state == KV_LIVE) {
            live++;
            if (!count_seq(r, i)) {
                return false;
            }
        }
    }
    if (live != kv->lists->seqs.live) {
        return WRONG(r, "%u sequences live, not %u", live, kv->lists->seqs.live);
    }
    return true;
}

static bool check_totals(recount *r) {
    const kv_cache *kv = r->kv;
    uint32_t assigned = 0;
    for (uint32_t s = 0; s < kv->num_slabs; s++) {
        assigned += kv->slab_aux[s].units != 0;
    }
    if (assigned != kv->lists->slabs.live) {
        return WRONG(r, "%u slabs are assigned, not %u", assigned, kv->lists->slabs.live);
    }
    for (uint32_t c = 0; c < kv->lists->classes.used; c++) {
        if (kv->classes[c].users > 0 && !check_class(r, c)) {
            return false;
        }
    }
    for (uint32_t t = 0; t < kv->lists->tenants.used; t++) {
        if (r->tenants[t] != kv->tenant_aux[t].blocks || r->cached[t] != kv->tenant_aux[t].cached) {
            return WRONG(r, "tenant %u uses %u blocks, not %u, and has %u cached, not %u", t,
                         r->tenants[t], kv->tenant_aux[t].blocks, r->cached[t],
                         kv->tenant_aux[t].cached);
        }
    }
    return true;
}

static bool count(recount *r) {
    if (!check_seqs(r)) {
        return false;
    }
    count_users(r);
    kv_spill_counted(r->kv, count_copied, r);
    return count_nodes(r);
}

static bool check(recount *r) {
    return check_nodes(r) && check_totals(r);
}

static bool no_memory(recount *r) {
    return WRONG(r, "no memory for a recount");
}

bool kv_check_full(const kv_cache *kv, attnd_errinfo *info) {
    recount r = {.kv = kv, .info = info};
    size_t blocks = (size_t)kv->num_slabs * kv->slab_blocks;
    r.refs = calloc(blocks, sizeof(*r.refs));
    r.nodes = calloc(blocks, sizeof(*r.nodes));
    r.tenants = calloc(kv->opts.max_tenants, sizeof(*r.tenants));
    r.cached = calloc(kv->opts.max_tenants, sizeof(*r.cached));
    r.uses = calloc((size_t)kv->opts.prefix_blocks + 1, sizeof(*r.uses));
    bool good = r.refs && r.nodes && r.tenants && r.cached && r.uses ? count(&r) && check(&r)
                                                                     : no_memory(&r);
    free(r.refs);
    free(r.nodes);
    free(r.tenants);
    free(r.cached);
    free(r.uses);
    return good;
}
