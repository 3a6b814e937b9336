// Taking over the prefix tree: see kv_regrow.h.
//
// A node can be checked once its parent is known to be good, and parents lie anywhere: so nodes are
// put into lists by parent first, and then the tree is walked from its roots.  What the walk does
// not meet is dropped.
#include "kvcache/kv_regrow.h"

#include <stdlib.h>

#include "kvcache/kv_chain.h"
#include "kvcache/kv_model.h"
#include "kvcache/kv_pool.h"
#include "kvcache/kv_prefix.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_slab.h"
#include "kvcache/kv_spill.h"

typedef struct regrowing {
    kv_cache *kv;
    kv_recovered *found;
    uint32_t *owners;
    uint32_t *nodes;  // [num_slabs, slab_blocks], node + 1 of which a block is
    uint32_t *depths; // [prefix_blocks], blocks up to a node that was taken over, else 0
    uint32_t *first;  // [prefix_blocks + 1], child of node - 1, 0 = of the roots; node + 1
    uint32_t *next;   // [prefix_blocks], in that list; node + 1
} regrowing;

// ---- one node

static uint64_t index_of(const kv_cache *kv, uint32_t class_idx, uint32_t entry) {
    return (uint64_t)(entry / kv->slab_units) * kv->slab_blocks +
           entry % kv->slab_units / kv->classes[class_idx].units;
}

// can_have says whether an entry can be a block of the class that is the model's or nobody's.
static bool can_have(const regrowing *r, uint32_t model, uint32_t class_idx, uint32_t entry) {
    const kv_cache *kv = r->kv;
    const kv_class *class = &kv->classes[class_idx];
    uint32_t slab = entry / kv->slab_units, unit = entry % kv->slab_units;
    if (slab >= kv->num_slabs || unit % class->units || unit / class->units >= class->slab_blocks) {
        return false;
    }
    uint32_t owner = r->owners[index_of(kv, class_idx, entry)];
    bool in_class = kv->slab_aux[slab].units == 0 || kv->slab_aux[slab].class_idx == class_idx;
    return in_class && (!owner || owner == model + 1) && !r->nodes[index_of(kv, class_idx, entry)];
}

// take_entry makes a block the node's; one that no sequence has is cached.
static void take_entry(regrowing *r, uint32_t node, uint32_t class_idx, uint32_t entry) {
    kv_cache *kv = r->kv;
    uint32_t model = kv_node_model(kv, node), slab = entry / kv->slab_units;
    if (kv->slab_aux[slab].units == 0) {
        kv_slab_claim(kv, slab, class_idx);
        kv->lists->slabs.live++;
    }
    r->owners[index_of(kv, class_idx, entry)] = model + 1;
    r->nodes[index_of(kv, class_idx, entry)] = node + 1;
    bool was_free = kv_pool_refs(kv, entry) == 0;
    if (was_free) {
        kv_pool_claim(kv, entry);
    }
    kv_pool_index_block(kv, entry);
    if (was_free) {
        kv_pool_rele(kv, entry);
        kv->tenant_aux[kv->models[model].spec.tenant].cached++;
    }
}

// may_lack says whether a node may be without a block of a group.
static bool may_lack(const kv_model_spec *spec, uint32_t g) {
    return spec->groups[g].window_left >= 0;
}

// has_all says whether there is no image any more, or it has the block of every group that needs
// one.
static bool has_all(const kv_led_spill *spill, const kv_model_spec *spec) {
    uint32_t most = (UINT32_C(1) << spec->num_groups) - 1, least = 0;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        least |= may_lack(spec, g) ? 0 : UINT32_C(1) << g;
    }
    return spill->tier == KV_SPILL_LOST ||
           (spill->groups && (spill->groups & ~most) == 0 && (spill->groups & least) == least);
}

static bool is_good(const regrowing *r, uint32_t node) {
    const kv_cache *kv = r->kv;
    const kv_led_node *n = &kv->nodes[node];
    uint32_t model = kv_node_model(kv, node), parent = kv_prefix_parent(kv, node);
    const kv_model_spec *spec = kv_model_get(kv, model);
    if (!spec || kv_prefix_can(kv, spec, NULL) ||
        (kv_spilled(kv, node) && !has_all(&kv->spills[node], spec)) ||
        (parent != KV_NONE && kv_spilled(kv, parent) && !kv_spilled(kv, node)) ||
        (parent != KV_NONE && (kv->nodes[parent].generation != n->parent_generation ||
                               kv_node_model(kv, parent) != model)) ||
        kv_prefix_key(kv, model, parent, kv_node_ids(kv, node)) != n->key) {
        return false;
    }
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entry = *kv_node_entry(kv, node, g);
        bool none = kv_spilled(kv, node), may = none || may_lack(spec, g);
        if ((entry == KV_NONE ? !may : none) ||
            (entry != KV_NONE && !can_have(r, model, kv->model_aux[model].classes[g], entry))) {
            return false;
        }
        for (uint32_t other = 0; other < g; other++) {
            if (entry != KV_NONE && entry == *kv_node_entry(kv, node, other)) {
                return false;
            }
        }
    }
    return true;
}

// take_node takes a node over that is good; its parent was.
static bool take_node(regrowing *r, uint32_t node) {
    kv_cache *kv = r->kv;
    uint32_t model = kv_node_model(kv, node), parent = kv_prefix_parent(kv, node);
    uint32_t above = parent == KV_NONE ? 0 : r->depths[parent];
    if (!is_good(r, node)) {
        return false;
    }
    for (uint32_t g = 0; g < kv->models[model].spec.num_groups; g++) {
        uint32_t entry = *kv_node_entry(kv, node, g);
        if (entry != KV_NONE) {
            take_entry(r, node, kv->model_aux[model].classes[g], entry);
        }
    }
    kv_prefix_link(kv, node, above);
    r->depths[node] = above + 1;
    r->found->prefix_blocks++;
    return true;
}

// ---- all nodes

static void list_by_parent(const regrowing *r) {
    for (uint32_t i = r->kv->lists->nodes.used; i-- > 0;) {
        uint32_t parent = r->kv->nodes[i].parent;
        if (r->kv->nodes[i].owner && parent <= r->kv->lists->nodes.used) {
            r->next[i] = r->first[parent];
            r->first[parent] = i + 1;
        }
    }
}

// take_nodes walks the tree: the lists of children that are still to be walked are joined in front
// of each other.
static void take_nodes(regrowing *r) {
    uint32_t todo = r->first[0];
    while (todo) {
        uint32_t node = todo - 1, last = r->first[todo];
        todo = r->next[node];
        if (!take_node(r, node) || !last) {
            continue;
        }
        uint32_t children = last;
        while (r->next[last - 1]) {
            last = r->next[last - 1];
        }
        r->next[last - 1] = todo;
        todo = children;
    }
}

static void drop_others(const regrowing *r) {
    kv_cache *kv = r->kv;
    for (uint32_t i = 0; i < kv->lists->nodes.used; i++) {
        if (kv->nodes[i].owner && !r->depths[i]) {
            r->found->lost_prefix_blocks += !kv_spilled(kv, i); // else it may lack its parent
            kv_redo_begin(kv);
            kv_redo_put(kv, &kv->nodes[i].owner, 0);
            kv_spill_leave(kv, i);
            kv_redo_commit(kv);
        }
    }
}

// ---- sequences

// find_chain returns the node + 1 that the sequence's own blocks lead to, *depth of them: the
// deepest whose block it has in the node's place.  Blocks before that may be others than the
// nodes', where somebody computed the same tokens at the same time.
static uint32_t find_chain(const regrowing *r, uint32_t idx, uint32_t *depth) {
    const kv_cache *kv = r->kv;
    const kv_led_seq *s = &kv->seqs[idx];
    uint32_t class_idx = kv->model_aux[s->model].classes[0];
    *depth = s->committed / kv->models[s->model].spec.groups[0].block_tokens;
    for (; *depth > s->first[0]; --*depth) {
        uint32_t entry = kv_table(kv, idx, 0)[*depth - 1];
        uint32_t link = r->nodes[index_of(kv, class_idx, entry)];
        if (link && r->depths[link - 1] == *depth && kv_node_model(kv, link - 1) == s->model) {
            return link;
        }
    }
    *depth = 0;
    return 0;
}

static void take_chain(const regrowing *r, uint32_t idx) {
    kv_cache *kv = r->kv;
    kv_led_seq *s = &kv->seqs[idx];
    uint32_t chain = s->chain, depth = 0;
    bool good = chain <= kv->lists->nodes.used;
    if (good && chain) {
        depth = r->depths[chain - 1];
        good = depth > 0 && kv->nodes[chain - 1].generation == s->chain_generation &&
               kv_node_model(kv, chain - 1) == s->model && !kv_spilled(kv, chain - 1);
    }
    if (!good) {
        chain = find_chain(r, idx, &depth);
        kv_redo_begin(kv);
        kv_redo_put(kv, &s->chain, chain);
        kv_redo_put(kv, &s->chain_generation, chain ? kv->nodes[chain - 1].generation : 0);
        kv_redo_put(kv, &s->known, 0);
        kv_redo_commit(kv);
    }
    if (!kv_chain_take_over(kv, idx, depth)) {
        kv_redo_begin(kv);
        kv_redo_put(kv, &s->known, 0);
        kv_redo_commit(kv);
    }
}

static void take_all(regrowing *r) {
    kv_cache *kv = r->kv;
    list_by_parent(r);
    take_nodes(r);
    drop_others(r);
    for (uint32_t i = 0; i < kv->lists->seqs.used; i++) {
        if (kv->seqs[i].state == KV_LIVE) {
            take_chain(r, i);
        }
    }
}

attnd_err kv_regrow(kv_cache *kv, uint32_t *owners, kv_recovered *found, attnd_errinfo *info) {
    size_t num = (size_t)kv->opts.prefix_blocks + 1;
    regrowing r = {.kv = kv, .found = found, .owners = owners};
    r.nodes = calloc((size_t)kv->num_slabs * kv->slab_blocks, sizeof(*r.nodes));
    r.depths = calloc(num, sizeof(*r.depths));
    r.first = calloc(num, sizeof(*r.first));
    r.next = calloc(num, sizeof(*r.next));
    attnd_err err = ATTND_OK;
    if (r.nodes && r.depths && r.first && r.next) {
        take_all(&r);
    } else {
        err = attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to recover a ledger");
    }
    free(r.nodes);
    free(r.depths);
    free(r.first);
    free(r.next);
    return err;
}
