// Spilling and fetching: see kv_spill.h for the states.
//
// A flight is a copy under way.  There are as many as the tiers' queues hold together, and whoever
// finds none free, or no room in a queue, is told to wait: that the loop never waits itself, and
// that a slow tier slows only who needs it, follows from this bound.
#include "kvcache/kv_spill.h"

#include <stdlib.h>

#include "kvcache/kv_evict.h"
#include "kvcache/kv_prefix.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_seq.h"
#include "kvcache/kv_tier.h"

_Static_assert((int)KV_TIER_BLOCKS == (int)KV_MAX_GROUPS, "an image is a block of each group");

enum { DROPS = 64 }; // parked nodes that make way for one image, at most

typedef struct flight {
    bool used, is_get;
    bool left;  // of a get: the node has got other blocks meanwhile
    bool stays; // of a put: the node was found meanwhile
    uint32_t node, tier;
    uint64_t slot;
    uint32_t entries[KV_MAX_GROUPS]; // of the blocks, KV_NONE: the group has none
} flight;

typedef struct kv_spiller {
    kv_tier *tiers[KV_MAX_TIERS]; // borrowed; NULL = not there in this run
    uint32_t num_tiers;
    bool was_off[KV_MAX_TIERS];
    flight *flights; // [max_flights]
    uint32_t max_flights, num_flights;
    uint32_t first_parked, last_parked; // node + 1
    kv_spill_info info;
} kv_spiller;

// ---- parked nodes

void kv_spill_park(kv_cache *kv, uint32_t node) {
    kv_spiller *s = kv->spiller;
    kv_node_aux *aux = &kv->node_aux[node];
    if (!s) { // of a ledger that is being recovered: kv_tiers_start parks them
        return;
    }
    aux->prev_heap = s->last_parked;
    aux->next_heap = 0;
    *(s->last_parked ? &kv->node_aux[s->last_parked - 1].next_heap : &s->first_parked) = node + 1;
    s->last_parked = node + 1;
}

void kv_spill_unpark(kv_cache *kv, uint32_t node) {
    kv_spiller *s = kv->spiller;
    kv_node_aux *aux = &kv->node_aux[node];
    if (!s) {
        return;
    }
    *(aux->prev_heap ? &kv->node_aux[aux->prev_heap - 1].next_heap : &s->first_parked) =
        aux->next_heap;
    *(aux->next_heap ? &kv->node_aux[aux->next_heap - 1].prev_heap : &s->last_parked) =
        aux->prev_heap;
    aux->prev_heap = aux->next_heap = 0;
}

bool kv_spill_drop(kv_cache *kv) {
    if (!kv->spiller || !kv->spiller->first_parked) {
        return false;
    }
    kv->spiller->info.dropped++;
    kv_prefix_remove(kv, kv->spiller->first_parked - 1);
    return true;
}

void kv_spill_drop_model(kv_cache *kv, uint32_t model) {
    uint32_t link = kv->spiller ? kv->spiller->first_parked : 0;
    while (link) {
        uint32_t node = link - 1;
        link = kv->node_aux[node].next_heap;
        if (kv_node_model(kv, node) == model) {
            kv_prefix_remove(kv, node);
        }
    }
}

// ---- where images lie

static uint32_t num_blocks(uint32_t groups) {
    return (uint32_t)__builtin_popcount(groups);
}

static void put_spill(kv_cache *kv, uint32_t node, kv_led_spill spill) {
    kv_redo_put_bytes(kv, &kv->spills[node], &spill, sizeof(spill));
}

void kv_spill_leave(kv_cache *kv, uint32_t node) {
    if (kv_spilled(kv, node)) {
        put_spill(kv, node, (kv_led_spill){0});
    }
}

static flight *flight_of(const kv_cache *kv, uint32_t node) {
    kv_spiller *s = kv->spiller;
    for (uint32_t i = 0; s && s->num_flights > 0 && i < s->max_flights; i++) {
        if (s->flights[i].used && s->flights[i].node == node) {
            return &s->flights[i];
        }
    }
    return NULL;
}

void kv_spill_left(kv_cache *kv, uint32_t node, const kv_led_spill *was) {
    kv_spiller *s = kv->spiller;
    flight *f = flight_of(kv, node);
    if (was->tier == KV_SPILL_LOST || !s) {
        return;
    }
    s->info.spilled -= num_blocks(was->groups);
    if (f) {
        f->left = true; // its end gives the slot back
    } else {
        kv_tier_give(s->tiers[was->tier - 1], (uint64_t)was->slot * KV_TIER_UNIT);
    }
}

// ---- flights

static flight *take_flight(kv_spiller *s) {
    for (uint32_t i = 0; i < s->max_flights; i++) {
        if (!s->flights[i].used) {
            s->num_flights++;
            s->flights[i] = (flight){.used = true};
            return &s->flights[i];
        }
    }
    return NULL;
}

static void give_flight(kv_spiller *s, flight *f) {
    f->used = false;
    s->num_flights--;
}

static const kv_model_spec *spec_of(const kv_cache *kv, uint32_t node) {
    return &kv->models[kv_node_model(kv, node)].spec;
}

// image_of lists the blocks of a flight; returns the bytes of the image.
static uint64_t image_of(const kv_cache *kv, const flight *f, kv_tier_job *job) {
    const kv_model_spec *spec = spec_of(kv, f->node);
    job->num_blocks = 0;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (f->entries[g] != KV_NONE) {
            job->at[job->num_blocks] = (uint64_t)f->entries[g] * KV_BLOCK_UNIT;
            job->bytes[job->num_blocks++] = kv_block_bytes(&spec->groups[g]);
        }
    }
    return kv_tier_job_bytes(job);
}

static uint32_t groups_of(const flight *f, uint32_t num_groups) {
    uint32_t groups = 0;
    for (uint32_t g = 0; g < num_groups; g++) {
        groups |= f->entries[g] != KV_NONE ? UINT32_C(1) << g : 0;
    }
    return groups;
}

// give_blocks drops the flight's references to its blocks.
static void give_blocks(kv_cache *kv, const flight *f) {
    const kv_model_spec *spec = spec_of(kv, f->node);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (f->entries[g] != KV_NONE) {
            kv_seq_give_block(kv, spec->tenant, f->entries[g]);
        }
    }
}

uint32_t kv_spill_coming(const kv_cache *kv, uint32_t class_idx, uint32_t tenant) {
    const kv_spiller *s = kv->spiller;
    uint32_t num = 0;
    for (uint32_t i = 0; s && s->num_flights > 0 && i < s->max_flights; i++) {
        const flight *f = &s->flights[i];
        if (!f->used || f->is_get || !(kv->node_aux[f->node].uses & KV_LEAVING) ||
            (tenant != KV_NONE && spec_of(kv, f->node)->tenant != tenant)) {
            continue;
        }
        for (uint32_t g = 0; g < spec_of(kv, f->node)->num_groups; g++) {
            uint32_t class_of = kv->model_aux[kv_node_model(kv, f->node)].classes[g];
            num += f->entries[g] != KV_NONE && (class_idx == KV_NONE || class_of == class_idx);
        }
    }
    return num;
}

bool kv_spill_moves(const kv_cache *kv, uint32_t model) {
    const kv_spiller *s = kv->spiller;
    for (uint32_t i = 0; s && i < s->max_flights; i++) {
        if (s->flights[i].used && kv_node_model(kv, s->flights[i].node) == model) {
            return true;
        }
    }
    return false;
}

void kv_spill_counted(const kv_cache *kv, kv_spill_counted_cb *cb, void *arg) {
    const kv_spiller *s = kv->spiller;
    for (uint32_t i = 0; s && i < s->max_flights; i++) {
        const flight *f = &s->flights[i];
        if (f->used) {
            bool leaves = !f->is_get && !f->stays;
            cb(arg, f->node, leaves ? KV_LEAVING : 1, f->entries);
        }
    }
}

// ---- to a tier

bool kv_spill_stay(kv_cache *kv, uint32_t node) {
    if (!kv_prefix_stay(kv, node)) {
        return false;
    }
    flight *f = flight_of(kv, node);
    f->stays = true;
    kv_prefix_hold(kv, node);
    return true;
}

// take_slot takes a slot of the first tier that has one, and room in its queue.
static bool take_slot(const kv_spiller *s, uint64_t bytes, uint32_t *tier, uint64_t *slot) {
    for (*tier = 0; *tier < s->num_tiers; ++*tier) {
        kv_tier *t = s->tiers[*tier];
        if (t && kv_tier_room(t) > 0 && kv_tier_take(t, bytes, slot)) {
            return true;
        }
    }
    return false;
}

// find_slot has parked nodes make way when there is no slot.
static kv_spill_how find_slot(kv_cache *kv, uint64_t bytes, uint32_t *tier, uint64_t *slot) {
    const kv_spiller *s = kv->spiller;
    bool busy = false, holds = false;
    if (take_slot(s, bytes, tier, slot)) {
        return KV_SPILL_BEGUN;
    }
    for (uint32_t i = 0; i < s->num_tiers; i++) {
        bool may = s->tiers[i] && kv_tier_holds(s->tiers[i], bytes);
        busy |= may && kv_tier_room(s->tiers[i]) == 0;
        holds |= may;
    }
    if (busy || !holds) {
        return busy ? KV_SPILL_BUSY : KV_SPILL_NOT;
    }
    for (uint32_t drops = 0; drops < DROPS && kv_spill_drop(kv); drops++) {
        if (take_slot(s, bytes, tier, slot)) {
            return KV_SPILL_BEGUN;
        }
    }
    return s->num_flights > 0 ? KV_SPILL_BUSY : KV_SPILL_NOT; // these may be parked next
}

kv_spill_how kv_spill_begin(kv_cache *kv, uint32_t node) {
    kv_spiller *s = kv->spiller;
    const kv_model_spec *spec = spec_of(kv, node);
    kv_tier_job job = {.op = KV_TIER_PUT};
    flight to = {.used = true, .node = node};
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        to.entries[g] = *kv_node_entry(kv, node, g);
    }
    uint64_t bytes = image_of(kv, &to, &job);
    if (bytes == 0) {
        return KV_SPILL_NOT;
    }
    kv_spill_how how = find_slot(kv, bytes, &to.tier, &to.slot);
    flight *f = how == KV_SPILL_BEGUN ? take_flight(s) : NULL;
    if (how != KV_SPILL_BEGUN) {
        return how;
    }
    ATTND_ASSERT(f); // as many as jobs
    *f = to;
    job.slot = f->slot;
    job.tag = (uint64_t)(f - s->flights);
    if (kv_tier_submit(s->tiers[f->tier], &job)) { // it went off meanwhile
        kv_tier_give(s->tiers[f->tier], f->slot);
        give_flight(s, f);
        return KV_SPILL_NOT;
    }
    kv_prefix_leave(kv, node);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (f->entries[g] != KV_NONE) {
            kv_seq_hold_block(kv, spec->tenant, f->entries[g]);
        }
    }
    return KV_SPILL_BEGUN;
}

// spilled makes a node whose image is complete one without blocks.  Committed by the record that
// says where the image is.
static void spilled(kv_cache *kv, const flight *f, uint64_t sum) {
    const kv_model_spec *spec = spec_of(kv, f->node);
    uint32_t groups = groups_of(f, spec->num_groups);
    kv_redo_begin(kv);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        kv_redo_put(kv, kv_node_entry(kv, f->node, g), KV_NONE);
    }
    put_spill(kv, f->node,
              (kv_led_spill){.tier = f->tier + 1,
                             .slot = (uint32_t)(f->slot / KV_TIER_UNIT),
                             .groups = groups,
                             .sum = sum});
    kv_redo_commit(kv);
    give_blocks(kv, f);
    kv_prefix_left(kv, f->node, f->entries);
    kv_spill_park(kv, f->node);
    kv->spiller->info.spilled += num_blocks(groups);
    kv->spiller->info.spills += num_blocks(groups);
}

// end_put: a node that somebody found meanwhile stays, and one whose copy failed, unless what lies
// before it has gone.
static void end_put(kv_cache *kv, const flight *f, const kv_tier_job *job) {
    if (!f->stays && !job->err && kv_prefix_has_parent(kv, f->node, true)) {
        spilled(kv, f, job->sum);
        return;
    }
    kv->spiller->info.failed += job->err != ATTND_OK;
    give_blocks(kv, f);
    kv_tier_give(kv->spiller->tiers[f->tier], f->slot);
    if (f->stays) {
        kv_prefix_rele(kv, f->node);
    } else if (kv_prefix_stay(kv, f->node)) {
        kv_evict_add(kv, f->node);
    } else {
        kv_prefix_remove(kv, f->node);
    }
}

// ---- from a tier

// needs_of lists the blocks of an image by class.
static uint32_t needs_of(const kv_cache *kv, uint32_t node, kv_need needs[KV_MAX_GROUPS]) {
    const uint32_t *classes = kv->model_aux[kv_node_model(kv, node)].classes;
    uint32_t num = 0;
    for (uint32_t g = 0; g < spec_of(kv, node)->num_groups; g++) {
        uint32_t i = 0;
        while (i < num && needs[i].class_idx != classes[g]) {
            i++;
        }
        if (i == num) {
            needs[num++] = (kv_need){.class_idx = classes[g]};
        }
        needs[i].take += kv->spills[node].groups >> g & 1;
    }
    return num;
}

// make_room has cached blocks make way for a node that is fetched.
static kv_spill_how make_room(kv_cache *kv, uint32_t node) {
    uint32_t tenant = spec_of(kv, node)->tenant, take = num_blocks(kv->spills[node].groups);
    kv_need needs[KV_MAX_GROUPS];
    uint32_t num = needs_of(kv, node, needs);
    if (kv_evict_spill(kv, tenant, needs, num, take)) {
        return KV_SPILL_BUSY;
    }
    return kv_evict_for(kv, tenant, needs, num, take) ? KV_SPILL_BEGUN : KV_SPILL_NOT;
}

static void take_blocks(kv_cache *kv, flight *f) {
    const kv_model_spec *spec = spec_of(kv, f->node);
    const kv_model_aux *aux = &kv->model_aux[kv_node_model(kv, f->node)];
    uint32_t parent = kv_prefix_parent(kv, f->node);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        bool has = kv->spills[f->node].groups >> g & 1;
        uint32_t near = parent == KV_NONE ? KV_NONE : *kv_node_entry(kv, parent, g);
        f->entries[g] = has ? kv_pool_take(kv, aux->classes[g], near) : KV_NONE;
        ATTND_ASSERT(!has || f->entries[g] != KV_NONE); // make_room counted
        kv->tenant_aux[spec->tenant].blocks += has;
    }
}

// begin_fetch begins to fetch a node; what lies before it has blocks, or is being fetched.
static kv_spill_how begin_fetch(kv_cache *kv, uint32_t node) {
    kv_spiller *s = kv->spiller;
    const kv_led_spill *spill = &kv->spills[node];
    if (spill->tier == KV_SPILL_LOST || kv_tier_is_off(s->tiers[spill->tier - 1])) {
        return KV_SPILL_NOT;
    }
    if (kv_tier_room(s->tiers[spill->tier - 1]) == 0) {
        return KV_SPILL_BUSY;
    }
    kv_prefix_hold(kv, node); // nor does what lies before it make way
    kv_spill_how how = make_room(kv, node);
    flight *f = how == KV_SPILL_BEGUN ? take_flight(s) : NULL;
    if (how != KV_SPILL_BEGUN) {
        kv_prefix_rele(kv, node);
        return how;
    }
    ATTND_ASSERT(f);
    f->is_get = true;
    f->node = node;
    f->tier = spill->tier - 1;
    f->slot = (uint64_t)spill->slot * KV_TIER_UNIT;
    take_blocks(kv, f);
    kv_tier_job job = {
        .op = KV_TIER_GET, .tag = (uint64_t)(f - s->flights), .slot = f->slot, .sum = spill->sum};
    image_of(kv, f, &job);
    if (kv_tier_submit(s->tiers[f->tier], &job)) {
        give_blocks(kv, f);
        give_flight(s, f);
        kv_prefix_rele(kv, node);
        return KV_SPILL_NOT;
    }
    return KV_SPILL_BEGUN;
}

bool kv_spill_fetch(kv_cache *kv, uint32_t model, uint32_t parent, const uint32_t *tokens,
                    uint32_t num) {
    uint32_t block_tokens = kv->models[model].spec.groups[0].block_tokens;
    bool waits = false;
    for (; kv->spiller && num >= block_tokens; num -= block_tokens, tokens += block_tokens) {
        uint32_t node = kv_prefix_child(kv, model, parent, tokens);
        if (node == KV_NONE || !kv_spilled(kv, node)) {
            break;
        }
        if (!flight_of(kv, node)) {
            kv_spill_how how = begin_fetch(kv, node);
            waits |= how == KV_SPILL_BUSY;
            if (how != KV_SPILL_BEGUN) {
                break;
            }
        }
        waits = true;
        parent = node;
    }
    return waits;
}

// fetched gives a node the blocks that its image was copied to.  Committed by the record that names
// them.
static void fetched(kv_cache *kv, const flight *f) {
    const kv_model_spec *spec = spec_of(kv, f->node);
    const kv_led_spill was = kv->spills[f->node];
    kv_redo_begin(kv);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        kv_redo_put(kv, kv_node_entry(kv, f->node, g), f->entries[g]);
    }
    kv_spill_leave(kv, f->node);
    kv_redo_commit(kv);
    kv_spill_left(kv, f->node, &was);
    kv_prefix_rejoin(kv, f->node);
    kv->spiller->info.fetches += num_blocks(was.groups);
}

// lose says that a node's image is gone.
static void lose(kv_cache *kv, uint32_t node) {
    kv->spiller->info.spilled -= num_blocks(kv->spills[node].groups);
    kv->spiller->info.lost += num_blocks(kv->spills[node].groups);
    kv_redo_begin(kv);
    put_spill(kv, node, (kv_led_spill){.tier = KV_SPILL_LOST});
    kv_redo_commit(kv);
}

// end_get: a node whose parent was lost meanwhile stays where it is.
static void end_get(kv_cache *kv, const flight *f, const kv_tier_job *job) {
    uint32_t node = f->node;
    if (!job->err && !f->left && kv_prefix_has_parent(kv, node, false)) {
        fetched(kv, f);
        give_blocks(kv, f);
    } else {
        give_blocks(kv, f);
        if (job->err && !f->left) {
            lose(kv, node);
        }
        if (job->err || f->left) {
            kv_tier_give(kv->spiller->tiers[f->tier], f->slot);
        }
    }
    kv_prefix_rele(kv, node);
    if (kv->spills[node].tier == KV_SPILL_LOST && kv->node_aux[node].uses == 0) {
        kv_prefix_remove(kv, node);
    }
}

// ---- the tiers

// lose_tier drops what lies in a tier that is off; what is being copied has its own end.
static void lose_tier(kv_cache *kv, uint32_t tier) {
    uint32_t link = kv->spiller->first_parked;
    while (link) {
        uint32_t node = link - 1;
        link = kv->node_aux[node].next_heap;
        if (kv->spills[node].tier == tier + 1) {
            kv->spiller->info.lost += num_blocks(kv->spills[node].groups);
            kv_prefix_remove(kv, node);
        }
    }
}

bool kv_tiers_poll(kv_cache *kv) {
    kv_spiller *s = kv->spiller;
    bool any = false;
    for (uint32_t t = 0; s && t < s->num_tiers; t++) {
        kv_tier_job job;
        while (s->tiers[t] && kv_tier_take_ended(s->tiers[t], &job)) {
            const flight f = s->flights[job.tag];
            give_flight(s, &s->flights[job.tag]);
            (f.is_get ? end_get : end_put)(kv, &f, &job);
            any = true;
        }
        if (s->tiers[t] && kv_tier_is_off(s->tiers[t]) && !s->was_off[t]) {
            s->was_off[t] = true;
            lose_tier(kv, t);
        }
    }
    return any && s->num_flights <= s->max_flights / 2;
}

// take_over parks the spilled nodes of a recovered ledger; those whose image cannot be there any
// more are dropped.
static void take_over(kv_cache *kv) {
    kv_spiller *s = kv->spiller;
    for (uint32_t i = 0; i < kv->lists->nodes.used; i++) {
        if (!kv->nodes[i].owner || !kv_spilled(kv, i)) {
            continue;
        }
        const kv_led_spill *spill = &kv->spills[i];
        uint64_t bytes = 0;
        for (uint32_t g = 0; g < spec_of(kv, i)->num_groups; g++) {
            bytes += spill->groups >> g & 1 ? kv_block_bytes(&spec_of(kv, i)->groups[g]) : 0;
        }
        kv_tier *t = spill->tier <= s->num_tiers ? s->tiers[spill->tier - 1] : NULL;
        bool good = t && bytes > 0 && kv_tier_claim(t, (uint64_t)spill->slot * KV_TIER_UNIT, bytes);
        kv_spill_park(kv, i);
        s->info.spilled += num_blocks(spill->groups);
        if (!good) {
            s->info.spilled -= num_blocks(spill->groups);
            s->info.lost += num_blocks(spill->groups);
            kv_redo_begin(kv);
            put_spill(kv, i, (kv_led_spill){.tier = KV_SPILL_LOST});
            kv_redo_commit(kv);
            kv_prefix_remove(kv, i);
        }
    }
}

attnd_err kv_tiers_start(kv_cache *kv, kv_tier *const *tiers, uint32_t num, attnd_errinfo *info) {
    ATTND_ASSERT(!kv->spiller && num <= KV_MAX_TIERS);
    kv_spiller *s = calloc(1, sizeof(*s));
    uint32_t jobs = 1;
    for (uint32_t i = 0; s && i < num; i++) {
        s->tiers[i] = tiers[i];
        jobs += tiers[i] ? kv_tier_room(tiers[i]) : 0;
    }
    if (s) {
        s->flights = calloc(jobs, sizeof(*s->flights));
    }
    if (!s || !s->flights) {
        free(s);
        return attnd_fail(info, ATTND_ENOMEM, "tier", "no memory for copies to tiers");
    }
    s->num_tiers = num;
    s->max_flights = jobs;
    kv->spiller = s;
    take_over(kv);
    if (num == 0) {
        kv_tiers_stop(kv);
    }
    return ATTND_OK;
}

void kv_tiers_stop(kv_cache *kv) {
    if (kv->spiller) {
        free(kv->spiller->flights);
        free(kv->spiller);
        kv->spiller = NULL;
    }
}

void kv_spill_get_info(const kv_cache *kv, kv_spill_info *out) {
    const kv_spiller *s = kv->spiller;
    *out = s ? s->info : (kv_spill_info){0};
    for (uint32_t i = 0; s && i < s->max_flights; i++) {
        const flight *f = &s->flights[i];
        uint32_t blocks = f->used ? num_blocks(groups_of(f, spec_of(kv, f->node)->num_groups)) : 0;
        *(f->is_get ? &out->fetching : &out->spilling) += blocks;
    }
}
