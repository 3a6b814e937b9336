// Eviction: heaps of candidates, and which of them go.
//
// The heaps are pairing heaps, linked through the nodes: a node in front of which others must go is
// in none, so `down`, its first child in the tree, is free for the heap.  prev_heap of the first
// child of a heap node is that node.
//
// What can be had is counted before anything goes: free blocks of a class and those of quiet nodes,
// whole unassigned slabs, and slabs of other classes in which every block is free or a quiet
// node's, as far as tenants' floors allow.  Victims go one by one, in the order of ranks; when the
// classes that lack blocks have too few, whole slabs are emptied, that of the node that would go
// first if it can be, which takes walks over the nodes: models of different geometry trade slabs
// rarely.
#include "kvcache/kv_evict.h"

#include <stddef.h>

#include "kvcache/kv_prefix.h"
#include "kvcache/kv_spill.h"

// ---- the heap

static bool before(const kv_cache *kv, uint32_t a, uint32_t b) {
    uint32_t pa = kv->nodes[a].owner >> KV_OWNER_BITS, pb = kv->nodes[b].owner >> KV_OWNER_BITS;
    return pa != pb ? pa < pb : kv->node_aux[a].rank.rank < kv->node_aux[b].rank.rank;
}

// meld joins two heaps (root + 1, 0 = empty) and returns the root.
static uint32_t meld(kv_cache *kv, uint32_t a, uint32_t b) {
    if (!a || !b) {
        return a ? a : b;
    }
    if (before(kv, b - 1, a - 1)) {
        uint32_t swap = a;
        a = b;
        b = swap;
    }
    kv_node_aux *top = &kv->node_aux[a - 1], *under = &kv->node_aux[b - 1];
    under->prev_heap = a;
    under->next_heap = top->down;
    if (top->down) {
        kv->node_aux[top->down - 1].prev_heap = b;
    }
    top->down = b;
    return a;
}

// meld_list joins the heaps of a list of siblings: pairs from the front, then all from the back.
static uint32_t meld_list(kv_cache *kv, uint32_t first) {
    uint32_t pairs = 0, root = 0;
    while (first) {
        uint32_t a = first, b = kv->node_aux[a - 1].next_heap;
        first = b ? kv->node_aux[b - 1].next_heap : 0;
        kv->node_aux[a - 1].next_heap = kv->node_aux[a - 1].prev_heap = 0;
        if (b) {
            kv->node_aux[b - 1].next_heap = kv->node_aux[b - 1].prev_heap = 0;
        }
        uint32_t pair = meld(kv, a, b);
        kv->node_aux[pair - 1].next_heap = pairs;
        pairs = pair;
    }
    while (pairs) {
        uint32_t next = kv->node_aux[pairs - 1].next_heap;
        kv->node_aux[pairs - 1].next_heap = 0;
        root = meld(kv, root, pairs);
        pairs = next;
    }
    return root;
}

void kv_evict_add(kv_cache *kv, uint32_t node) {
    kv_node_aux *aux = &kv->node_aux[node];
    uint32_t *root = &kv->model_aux[kv_node_model(kv, node)].candidates;
    ATTND_ASSERT(aux->uses == 0 && aux->down == 0);
    aux->uses = KV_CANDIDATE;
    aux->prev_heap = aux->next_heap = 0;
    *root = meld(kv, *root, node + 1);
}

void kv_evict_drop(kv_cache *kv, uint32_t node) {
    kv_node_aux *aux = &kv->node_aux[node];
    uint32_t *root = &kv->model_aux[kv_node_model(kv, node)].candidates;
    ATTND_ASSERT(aux->uses == KV_CANDIDATE);
    uint32_t under = meld_list(kv, aux->down);
    if (*root == node + 1) {
        *root = under;
    } else {
        kv_node_aux *prev = &kv->node_aux[aux->prev_heap - 1];
        *(prev->down == node + 1 ? &prev->down : &prev->next_heap) = aux->next_heap;
        if (aux->next_heap) {
            kv->node_aux[aux->next_heap - 1].prev_heap = aux->prev_heap;
        }
        *root = meld(kv, *root, under);
    }
    aux->uses = 0;
    aux->down = aux->prev_heap = aux->next_heap = 0;
}

// ---- who may lose what

typedef struct evicting {
    kv_cache *kv;
    uint32_t tenant; // for whom
    const kv_need *needs;
    uint32_t num;
} evicting;

// spare returns how many blocks of a tenant may go.
static uint64_t spare(const evicting *e, uint32_t tenant) {
    const kv_tenant_aux *has = &e->kv->tenant_aux[tenant];
    uint64_t all = (uint64_t)has->blocks + has->cached;
    uint32_t floor = tenant == e->tenant ? 0 : e->kv->tenants[tenant].floor_blocks;
    return all > floor ? all - floor : 0;
}

// may_lose says whether a node of the model may go.
static bool may_lose(const evicting *e, uint32_t model) {
    const kv_model_spec *spec = &e->kv->models[model].spec;
    return spec->tenant == e->tenant || spare(e, spec->tenant) >= spec->num_groups;
}

static bool is_live(const kv_cache *kv, uint32_t model) {
    return kv->models[model].state == KV_LIVE;
}

// evictable_of returns how many blocks of a class (KV_NONE: of any) quiet nodes of a model have.
static uint64_t evictable_of(const kv_cache *kv, uint32_t model, uint32_t class_idx) {
    const kv_model_aux *aux = &kv->model_aux[model];
    uint64_t num = 0;
    for (uint32_t g = 0; g < kv->models[model].spec.num_groups; g++) {
        num += class_idx == KV_NONE || aux->classes[g] == class_idx ? aux->evictable[g] : 0;
    }
    return num;
}

// is_bound says whether a tenant has a floor that counts: its own needs take no notice of it.
static bool is_bound(const evicting *e, uint32_t tenant) {
    return tenant != e->tenant && e->kv->tenants[tenant].floor_blocks > 0;
}

// evictable_from returns how many blocks of a class a tenant with a floor can give: nodes go whole.
static uint64_t evictable_from(const evicting *e, uint32_t tenant, uint32_t class_idx) {
    const kv_cache *kv = e->kv;
    uint64_t has = 0, costs = 1, gives = KV_MAX_GROUPS; // a node, at most and at least
    for (uint32_t m = 0; m < kv->lists->models.used; m++) {
        const kv_model_spec *spec = &kv->models[m].spec;
        if (!is_live(kv, m) || spec->tenant != tenant || !evictable_of(kv, m, class_idx)) {
            continue;
        }
        uint64_t of_class = 0;
        for (uint32_t g = 0; g < spec->num_groups; g++) {
            of_class += kv->model_aux[m].classes[g] == class_idx;
        }
        has += evictable_of(kv, m, class_idx);
        costs = spec->num_groups > costs ? spec->num_groups : costs;
        gives = of_class < gives ? of_class : gives;
    }
    uint64_t may = spare(e, tenant) / costs * gives;
    return has < may ? has : may;
}

// evictable returns how many blocks of a class could come free.
static uint64_t evictable(const evicting *e, uint32_t class_idx) {
    const kv_cache *kv = e->kv;
    uint64_t num = 0;
    for (uint32_t m = 0; m < kv->lists->models.used; m++) {
        if (is_live(kv, m) && !is_bound(e, kv->models[m].spec.tenant)) {
            num += evictable_of(kv, m, class_idx);
        }
    }
    for (uint32_t t = 0; t < kv->lists->tenants.used; t++) {
        num += is_bound(e, t) ? evictable_from(e, t, class_idx) : 0;
    }
    return num;
}

// victim returns the candidate that goes first, own: of the tenant's models; lacked [num needs], or
// NULL: of models that have blocks of a class that is.  KV_NONE when there is none.
static uint32_t victim(const evicting *e, bool own, const bool *lacked) {
    const kv_cache *kv = e->kv;
    uint32_t best = KV_NONE;
    for (uint32_t m = 0; m < kv->lists->models.used; m++) {
        uint32_t tenant = kv->models[m].spec.tenant, top = kv->model_aux[m].candidates;
        bool may = is_live(kv, m) && top && (own ? tenant == e->tenant : may_lose(e, m));
        bool helps = !lacked;
        for (uint32_t i = 0; may && lacked && i < e->num; i++) {
            helps |= lacked[i] && evictable_of(kv, m, e->needs[i].class_idx) > 0;
        }
        if (may && helps && (best == KV_NONE || before(kv, top - 1, best))) {
            best = top - 1;
        }
    }
    return best;
}

// ---- slabs

static const kv_need *need_of(const evicting *e, uint32_t class_idx) {
    for (uint32_t i = 0; i < e->num; i++) {
        if (e->needs[i].class_idx == class_idx) {
            return &e->needs[i];
        }
    }
    return NULL;
}

// can_empty says whether a slab can come free without taking what is needed itself; left: blocks of
// its class that are free or could be.
static bool can_empty(const evicting *e, uint32_t slab, uint64_t left) {
    const kv_slab_aux *aux = &e->kv->slab_aux[slab];
    if (!aux->units || aux->mark || aux->evictable == 0 ||
        aux->free + aux->evictable < aux->slab_blocks) {
        return false;
    }
    const kv_need *need = need_of(e, aux->class_idx);
    return !need || left >= need->take + aux->slab_blocks;
}

static uint64_t left_of(const evicting *e, uint32_t class_idx) {
    return e->kv->classes[class_idx].free + evictable(e, class_idx);
}

// emptiable returns how many slabs could come free, at most; stops at enough.
static uint64_t emptiable(const evicting *e, uint64_t enough) {
    const kv_cache *kv = e->kv;
    uint64_t num = 0, taken[KV_MAX_GROUPS] = {0};
    for (uint32_t s = 0; s < kv->num_slabs && num < enough; s++) {
        uint32_t class_idx = kv->slab_aux[s].class_idx;
        const kv_need *need = kv->slab_aux[s].units ? need_of(e, class_idx) : NULL;
        uint64_t *gone = need ? &taken[need - e->needs] : NULL;
        uint64_t left = need ? left_of(e, class_idx) : 0;
        if (need && left < *gone) {
            continue;
        }
        if (can_empty(e, s, left - (need ? *gone : 0))) {
            num++;
            if (need) {
                *gone += kv->slab_aux[s].slab_blocks;
            }
        }
    }
    return num;
}

static void remove_subtree(kv_cache *kv, uint32_t top) {
    uint32_t node = top;
    for (;;) {
        while (!(kv->node_aux[node].uses & KV_CANDIDATE) && kv->node_aux[node].down) {
            node = kv->node_aux[node].down - 1;
        }
        uint32_t parent = kv_prefix_parent(kv, node);
        kv_prefix_remove(kv, node);
        if (node == top) {
            return;
        }
        node = parent;
    }
}

// lies_in says whether a live node has a block in the slab.
static bool lies_in(const kv_cache *kv, uint32_t node, uint32_t slab) {
    const kv_model_spec *spec = &kv->models[kv_node_model(kv, node)].spec;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        uint32_t entry = *kv_node_entry(kv, node, g);
        if (entry != KV_NONE && kv_pool_slab(kv, entry) == slab) {
            return true;
        }
    }
    return false;
}

// A slab is emptied with all that lies behind its nodes, wherever that is.  What tenants with a
// floor would lose is counted with marks on nodes, before anything goes.

#define GOES  (UINT32_C(1) << 29) // in kv_node_aux.uses: with a slab that is planned
#define TRIED (UINT32_C(1) << 28) // with the one that is looked at

enum { PLANNED = 1, REFUSED, MAX_REFUSED = 16 }; // kv_slab_aux.mark

// next_in returns the node behind one in the walk over a subtree of quiet nodes, KV_NONE at its
// end.
static uint32_t next_in(const kv_cache *kv, uint32_t top, uint32_t node) {
    const kv_node_aux *aux = &kv->node_aux[node];
    if (!(aux->uses & KV_CANDIDATE) && aux->down) {
        return aux->down - 1;
    }
    while (node != top && !kv->node_aux[node].next_sibling) {
        node = kv_prefix_parent(kv, node);
    }
    return node == top ? KV_NONE : kv->node_aux[node].next_sibling - 1;
}

// try_slab marks what goes with a slab.
static void try_slab(kv_cache *kv, uint32_t slab) {
    for (uint32_t i = 0; i < kv->lists->nodes.used; i++) {
        if (!kv->nodes[i].owner || kv->node_aux[i].uses & (GOES | TRIED) || !lies_in(kv, i, slab)) {
            continue;
        }
        for (uint32_t n = i; n != KV_NONE; n = next_in(kv, i, n)) {
            kv->node_aux[n].uses |= kv->node_aux[n].uses & GOES ? 0 : TRIED;
        }
    }
}

// turn_marks makes one mark another, or none.
static void turn_marks(kv_cache *kv, uint32_t from, uint32_t to) {
    for (uint32_t i = 0; i < kv->lists->nodes.used; i++) {
        uint32_t *uses = &kv->node_aux[i].uses;
        *uses = kv->nodes[i].owner && *uses & from ? (*uses & ~from) | to : *uses;
    }
}

// keeps_floor says whether a tenant may lose all that is marked.
static bool keeps_floor(const evicting *e, uint32_t tenant) {
    const kv_cache *kv = e->kv;
    uint64_t lost = 0;
    for (uint32_t i = 0; i < kv->lists->nodes.used; i++) {
        if (kv->nodes[i].owner && kv->node_aux[i].uses & (GOES | TRIED)) {
            const kv_model_spec *spec = &kv->models[kv_node_model(kv, i)].spec;
            lost += spec->tenant == tenant ? spec->num_groups : 0;
        }
    }
    return lost <= spare(e, tenant);
}

// may_empty says whether no tenant loses too much with this slab besides those that are planned.
static bool may_empty(const evicting *e, uint32_t slab) {
    bool may = true, tried = false;
    for (uint32_t t = 0; t < e->kv->lists->tenants.used && may; t++) {
        if (is_bound(e, t) && !tried) {
            try_slab(e->kv, slab);
            tried = true;
        }
        may = !is_bound(e, t) || keeps_floor(e, t);
    }
    if (tried) {
        turn_marks(e->kv, TRIED, may ? GOES : 0);
    }
    return may;
}

// pick returns the slab of the node that would go first, else the one that costs least, of those
// that can be emptied; taken: what the needs' classes lose with those that are planned.  KV_NONE:
// there is none.
static uint32_t pick(const evicting *e, const uint64_t taken[KV_MAX_GROUPS]) {
    const kv_cache *kv = e->kv;
    uint32_t node = victim(e, false, NULL), best = KV_NONE;
    uint32_t entry = node == KV_NONE ? KV_NONE : kv->nodes[node].entry;
    uint32_t first = entry == KV_NONE ? KV_NONE : kv_pool_slab(kv, entry);
    for (uint32_t s = 0; s < kv->num_slabs && (best == KV_NONE || best != first); s++) {
        const kv_slab_aux *aux = &kv->slab_aux[s];
        if (aux->units &&
            (s == first || best == KV_NONE || aux->evictable < kv->slab_aux[best].evictable)) {
            const kv_need *need = need_of(e, aux->class_idx);
            uint64_t left = left_of(e, aux->class_idx), gone = need ? taken[need - e->needs] : 0;
            best = left >= gone && can_empty(e, s, left - gone) ? s : best;
        }
    }
    return best;
}

// plan_slabs marks as many slabs as are to be emptied; false when so many cannot be.
static bool plan_slabs(const evicting *e, uint64_t num) {
    kv_cache *kv = e->kv;
    uint64_t taken[KV_MAX_GROUPS] = {0};
    for (uint32_t refused = 0; num > 0 && refused < MAX_REFUSED;) {
        uint32_t slab = pick(e, taken);
        if (slab == KV_NONE) {
            break;
        }
        kv_slab_aux *aux = &kv->slab_aux[slab];
        const kv_need *need = need_of(e, aux->class_idx);
        bool may = may_empty(e, slab);
        aux->mark = may ? PLANNED : REFUSED;
        num -= may;
        refused += !may;
        if (need && may) {
            taken[need - e->needs] += aux->slab_blocks;
        }
    }
    turn_marks(kv, GOES, 0);
    for (uint32_t s = 0; s < kv->num_slabs; s++) {
        kv_slab_aux *aux = &kv->slab_aux[s];
        aux->mark = aux->mark == PLANNED && num == 0 ? PLANNED : 0;
    }
    return num == 0;
}

// empty_planned evicts what has a block in a slab that is planned.
static void empty_planned(kv_cache *kv) {
    for (uint32_t s = 0; s < kv->num_slabs; s++) {
        bool planned = kv->slab_aux[s].mark == PLANNED;
        kv->slab_aux[s].mark = 0;
        for (uint32_t i = 0; planned && i < kv->lists->nodes.used; i++) {
            if (kv->nodes[i].owner && lies_in(kv, i, s)) {
                remove_subtree(kv, i);
            }
        }
    }
}

// ---- making room

static uint64_t over_quota(const evicting *e, uint64_t take) {
    const kv_tenant_aux *has = &e->kv->tenant_aux[e->tenant];
    uint64_t quota = e->kv->tenants[e->tenant].quota_blocks;
    uint64_t all = has->blocks + (uint64_t)has->cached + take;
    return quota > 0 && take > 0 && all > quota ? all - quota : 0;
}

// slabs_lacking returns how many slabs have to come free, so that the needs fit if all cached
// blocks of their classes went that can.
static uint64_t slabs_lacking(const evicting *e) {
    const kv_cache *kv = e->kv;
    uint64_t slabs = 0, unassigned = kv->lists->slabs.cap - kv->lists->slabs.live;
    for (uint32_t i = 0; i < e->num; i++) {
        const kv_class *class = &kv->classes[e->needs[i].class_idx];
        uint64_t left = left_of(e, e->needs[i].class_idx);
        if (e->needs[i].take > left) {
            uint64_t more = e->needs[i].take - left;
            slabs += more / class->slab_blocks + (more % class->slab_blocks != 0);
        }
    }
    return slabs > unassigned ? slabs - unassigned : 0;
}

// could_fit says whether the needs could fit if all went that can.
static bool could_fit(const evicting *e) {
    uint64_t slabs = slabs_lacking(e);
    return slabs == 0 || slabs <= emptiable(e, slabs);
}

// make_fit evicts until the needs fit.
static bool make_fit(const evicting *e) {
    kv_cache *kv = e->kv;
    while (!kv_pool_fits(kv, e->needs, e->num)) {
        bool lacked[KV_MAX_GROUPS];
        for (uint32_t i = 0; i < e->num; i++) {
            lacked[i] = e->needs[i].take > kv->classes[e->needs[i].class_idx].free;
        }
        uint32_t node = victim(e, false, lacked);
        if (node == KV_NONE) {
            return false;
        }
        kv_prefix_remove(kv, node);
    }
    return true;
}

bool kv_evict_for(kv_cache *kv, uint32_t tenant, const kv_need *needs, uint32_t num,
                  uint64_t take) {
    const evicting e = {.kv = kv, .tenant = tenant, .needs = needs, .num = num};
    uint64_t own = 0, slabs = kv_pool_fits(kv, needs, num) ? 0 : slabs_lacking(&e);
    for (uint32_t m = 0; over_quota(&e, take) && m < kv->lists->models.used; m++) {
        bool is_own = is_live(kv, m) && kv->models[m].spec.tenant == tenant;
        own += is_own ? evictable_of(kv, m, KV_NONE) : 0;
    }
    if (over_quota(&e, take) > own || (slabs > 0 && !plan_slabs(&e, slabs))) {
        return false;
    }
    if (slabs > 0) {
        empty_planned(kv);
    }
    while (over_quota(&e, take)) {
        uint32_t node = victim(&e, true, NULL);
        if (node == KV_NONE) {
            return false;
        }
        kv_prefix_remove(kv, node);
    }
    return make_fit(&e);
}

// coming takes from the needs what is on its way; returns how many blocks more the tenant must
// lose.
static uint64_t coming(const evicting *e, uint64_t take, kv_need *left) {
    uint64_t over = over_quota(e, take), own = kv_spill_coming_of(e->kv, e->tenant);
    for (uint32_t i = 0; i < e->num; i++) {
        uint64_t comes = kv_spill_coming(e->kv, e->needs[i].class_idx);
        left[i] = e->needs[i];
        left[i].take -= comes < left[i].take ? comes : left[i].take;
    }
    return over > own ? over - own : 0;
}

bool kv_evict_spill(kv_cache *kv, uint32_t tenant, const kv_need *needs, uint32_t num,
                    uint64_t take) {
    kv_need left[KV_MAX_GROUPS];
    const evicting e = {.kv = kv, .tenant = tenant, .needs = needs, .num = num};
    const evicting rest = {.kv = kv, .tenant = tenant, .needs = left, .num = num};
    if (!kv->spiller || (!over_quota(&e, take) && kv_pool_fits(kv, needs, num))) {
        return false;
    }
    for (;;) {
        uint64_t over = coming(&e, take, left);
        bool lacked[KV_MAX_GROUPS];
        for (uint32_t i = 0; i < num; i++) {
            lacked[i] = left[i].take > kv->classes[left[i].class_idx].free;
        }
        if (over == 0 && kv_pool_fits(kv, left, num)) {
            return true;
        }
        uint32_t node = could_fit(&rest) ? victim(&e, over > 0, over > 0 ? NULL : lacked) : KV_NONE;
        kv_spill_how how = node == KV_NONE ? KV_SPILL_NOT : kv_spill_begin(kv, node);
        if (how != KV_SPILL_BEGUN) {
            return how == KV_SPILL_BUSY;
        }
    }
}

void kv_evict_model(kv_cache *kv, uint32_t model) {
    kv_spill_drop_model(kv, model);
    while (kv->model_aux[model].candidates) {
        kv_prefix_remove(kv, kv->model_aux[model].candidates - 1);
    }
}
