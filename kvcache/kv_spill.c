// Spilling and fetching: see kv_spill.h for the states.
//
// A flight is a copy under way.  There are as many as the tiers' queues hold together, and whoever
// finds none free, or no room in a queue, is told to wait: that the loop never waits itself, and
// that a slow tier slows only who needs it, follows from this bound.  A node knows its flight: the
// links of heap and list are free meanwhile.
#include "kvcache/kv_spill.h"

#include "kvcache/kv_evict.h"
#include "kvcache/kv_flight.h"
#include "kvcache/kv_move.h"
#include "kvcache/kv_prefix.h"
#include "kvcache/kv_redo.h"
#include "kvcache/kv_seq.h"
#include "kvcache/kv_tier.h"

_Static_assert((int)KV_TIER_BLOCKS == (int)KV_MAX_GROUPS, "an image is a block of each group");

static const kv_model_spec *spec_of(const kv_cache *kv, uint32_t node) {
    return &kv->models[kv_node_model(kv, node)].spec;
}

static uint32_t num_blocks(uint32_t groups) {
    return (uint32_t)__builtin_popcount(groups);
}

// ---- blocks of flights

// image_of lists the blocks of a flight; returns the bytes of the image.
static uint64_t image_of(const kv_cache *kv, const kv_flight *f, kv_tier_job *job) {
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

static uint32_t groups_of(const kv_flight *f, uint32_t num_groups) {
    uint32_t groups = 0;
    for (uint32_t g = 0; g < num_groups; g++) {
        groups |= f->entries[g] != KV_NONE ? UINT32_C(1) << g : 0;
    }
    return groups;
}

// give_blocks drops the flight's references to its blocks.
static void give_blocks(kv_cache *kv, const kv_flight *f) {
    const kv_model_spec *spec = spec_of(kv, f->node);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (f->entries[g] != KV_NONE) {
            kv_seq_give_block(kv, spec->tenant, f->entries[g]);
        }
    }
}

// ---- to a tier

bool kv_spill_stay(kv_cache *kv, uint32_t node) {
    if (!kv_prefix_stay(kv, node)) {
        return false;
    }
    kv_flight *f = kv_flight_of(kv, node);
    f->stays = true;
    kv_flight_coming(kv, f, UINT32_MAX);
    kv_prefix_hold(kv, node);
    return true;
}

// take_slot takes a slot of the first tier that has one, and room in its queue.  It waits for one
// that is making room: what is used last belongs there.
static kv_spill_how take_slot(kv_cache *kv, uint64_t bytes, uint32_t *tier, uint64_t *slot) {
    const kv_spiller *s = kv->spiller;
    for (*tier = 0; *tier < s->num_tiers; ++*tier) {
        kv_tier *t = s->tiers[*tier];
        if (t && kv_tier_room(t) > 0 && kv_tier_take(t, bytes, slot)) {
            return KV_SPILL_BEGUN;
        }
        if (t && kv_tier_holds(t, bytes) && kv_move_on_from(kv, *tier)) {
            return KV_SPILL_BUSY;
        }
    }
    return KV_SPILL_NOT;
}

// find_slot has parked nodes make way when there is no slot.
static kv_spill_how find_slot(kv_cache *kv, uint64_t bytes, uint32_t *tier, uint64_t *slot) {
    const kv_spiller *s = kv->spiller;
    bool busy = false, holds = false;
    kv_spill_how how = take_slot(kv, bytes, tier, slot);
    if (how != KV_SPILL_NOT) {
        return how;
    }
    for (uint32_t i = 0; i < s->num_tiers; i++) {
        bool may = s->tiers[i] && kv_tier_holds(s->tiers[i], bytes);
        busy |= may && kv_tier_room(s->tiers[i]) == 0;
        holds |= may;
    }
    if (busy || !holds) {
        return busy ? KV_SPILL_BUSY : KV_SPILL_NOT;
    }
    for (uint32_t drops = 0; drops < KV_SPILL_DROPS && kv_spill_drop(kv); drops++) {
        how = take_slot(kv, bytes, tier, slot);
        if (how != KV_SPILL_NOT) {
            return how;
        }
    }
    return s->num_flights > 0 ? KV_SPILL_BUSY : KV_SPILL_NOT; // these may be parked next
}

kv_spill_how kv_spill_begin(kv_cache *kv, uint32_t node) {
    kv_spiller *s = kv->spiller;
    const kv_model_spec *spec = spec_of(kv, node);
    kv_tier_job job = {.op = KV_TIER_PUT};
    kv_flight to = {.kind = KV_FLIGHT_PUT, .node = node};
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        to.entries[g] = *kv_node_entry(kv, node, g);
    }
    uint64_t bytes = image_of(kv, &to, &job);
    if (bytes == 0) {
        return KV_SPILL_NOT;
    }
    kv_spill_how how = find_slot(kv, bytes, &to.tier, &to.slot);
    if (how != KV_SPILL_BEGUN) {
        return how;
    }
    job.slot = to.slot;
    job.tag = kv_flight_next(kv);                  // the flight that take_flight takes
    if (kv_tier_submit(s->tiers[to.tier], &job)) { // it went off meanwhile
        kv_tier_give(s->tiers[to.tier], to.slot);
        return KV_SPILL_NOT;
    }
    kv_prefix_leave(kv, node);
    kv_flight_coming(kv, kv_flight_take(kv, &to), 1);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (to.entries[g] != KV_NONE) {
            kv_seq_hold_block(kv, spec->tenant, to.entries[g]);
        }
    }
    return KV_SPILL_BEGUN;
}

// spilled makes a node whose image is complete one without blocks.  Committed by the record that
// says where the image is.
static void spilled(kv_cache *kv, const kv_flight *f, uint64_t sum) {
    const kv_model_spec *spec = spec_of(kv, f->node);
    uint32_t groups = groups_of(f, spec->num_groups);
    kv_redo_begin(kv);
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        kv_redo_put(kv, kv_node_entry(kv, f->node, g), KV_NONE);
    }
    kv_spill_put(kv, f->node,
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
static void end_put(kv_cache *kv, const kv_flight *f, const kv_tier_job *job) {
    if (!f->stays) {
        kv_flight_coming(kv, f, UINT32_MAX);
    }
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

static void take_blocks(kv_cache *kv, kv_flight *f) {
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
    if (how != KV_SPILL_BEGUN) {
        kv_prefix_rele(kv, node);
        return how;
    }
    kv_flight as = {.kind = KV_FLIGHT_GET,
                    .node = node,
                    .tier = spill->tier - 1,
                    .slot = (uint64_t)spill->slot * KV_TIER_UNIT};
    take_blocks(kv, &as);
    kv_tier_job job = {
        .op = KV_TIER_GET, .tag = kv_flight_next(kv), .slot = as.slot, .sum = spill->sum};
    image_of(kv, &as, &job);
    if (kv_tier_submit(s->tiers[as.tier], &job)) {
        give_blocks(kv, &as);
        kv_prefix_rele(kv, node);
        return KV_SPILL_NOT;
    }
    kv_flight_take(kv, &as);
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
        const kv_flight *f = kv_flight_of(kv, node);
        if (f && f->kind == KV_FLIGHT_MOVE) { // it is fetched from where it goes
            return true;
        }
        if (!f) {
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
static void fetched(kv_cache *kv, const kv_flight *f) {
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

// end_get: a node whose parent was lost meanwhile is of no use where it is.
static void end_get(kv_cache *kv, const kv_flight *f, const kv_tier_job *job) {
    uint32_t node = f->node;
    bool had = !f->left && !job->err && kv_prefix_has_parent(kv, node, false);
    if (had) {
        fetched(kv, f);
    } else if (!f->left && (job->err || kv_spill_is_orphan(kv, node))) {
        kv_spill_lose(kv, node);
    }
    give_blocks(kv, f);
    if (!had && (f->left || kv->spills[node].tier == KV_SPILL_LOST)) {
        kv_tier_give(kv->spiller->tiers[f->tier], f->slot);
    }
    kv_prefix_rele(kv, node);
}

// ---- the tiers

// lose_tier drops what lies in a tier that is off; what is being copied has its own end.
static void lose_tier(kv_cache *kv, uint32_t tier) {
    for (uint32_t link; (link = kv->spiller->first_parked[tier]);) {
        kv->spiller->info.lost += num_blocks(kv->spills[link - 1].groups);
        kv_prefix_remove(kv, link - 1);
    }
}

// drop_lost drops nodes without an image, and what is parked behind them: from the ends of the
// lists, since what lies behind a node was spilled before it.  Images are lost rarely.
static void drop_lost(kv_cache *kv) {
    kv_spiller *s = kv->spiller;
    for (uint32_t link; (link = s->first_parked[KV_LIST_LOST]);) {
        kv_prefix_remove(kv, link - 1);
    }
    for (uint32_t t = 0; t < s->num_tiers; t++) {
        for (uint32_t link = s->last_parked[t]; link;) {
            uint32_t node = link - 1;
            link = kv->node_aux[node].prev_heap;
            if (kv_spill_is_orphan(kv, node)) {
                s->info.lost += num_blocks(kv->spills[node].groups);
                kv_prefix_remove(kv, node);
            }
        }
    }
}

static void end_flight(kv_cache *kv, const kv_tier_job *job) {
    const kv_flight f = kv_flight_give(kv, job->tag);
    if (f.kind == KV_FLIGHT_PUT) {
        end_put(kv, &f, job);
    } else if (f.kind == KV_FLIGHT_GET) {
        end_get(kv, &f, job);
    } else {
        kv_move_end(kv, &f, job);
    }
}

bool kv_tiers_poll(kv_cache *kv) {
    kv_spiller *s = kv->spiller;
    bool any = false;
    for (uint32_t t = 0; s && t < s->num_tiers; t++) {
        kv_tier_job job;
        while (s->tiers[t] && kv_tier_take_ended(s->tiers[t], &job)) {
            end_flight(kv, &job);
            any = true;
        }
        if (s->tiers[t] && kv_tier_is_off(s->tiers[t]) && !s->was_off[t]) {
            s->was_off[t] = true;
            lose_tier(kv, t);
        }
    }
    if (s && s->first_parked[KV_LIST_LOST]) {
        drop_lost(kv);
    }
    if (any) {
        kv_move_on(kv);
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
        uint64_t bytes = kv_flight_bytes(kv, i);
        kv_tier *t = spill->tier <= s->num_tiers ? s->tiers[spill->tier - 1] : NULL;
        bool good = t && bytes > 0 && kv_tier_claim(t, (uint64_t)spill->slot * KV_TIER_UNIT, bytes);
        s->info.spilled += num_blocks(spill->groups);
        if (!good) {
            kv_spill_lose(kv, i);
        }
        kv_spill_park(kv, i);
        if (!good) {
            kv_prefix_remove(kv, i);
        }
    }
}

attnd_err kv_tiers_start(kv_cache *kv, kv_tier *const *tiers, uint32_t num, attnd_errinfo *info) {
    ATTND_ASSERT(!kv->spiller && num <= KV_MAX_TIERS);
    attnd_err err = kv_spiller_create(kv, tiers, num, info);
    if (err) {
        return err;
    }
    take_over(kv);
    if (num == 0) {
        kv_tiers_stop(kv);
    }
    return ATTND_OK;
}

void kv_spill_get_info(const kv_cache *kv, kv_spill_info *out) {
    const kv_spiller *s = kv->spiller;
    *out = s ? s->info : (kv_spill_info){0};
    for (uint32_t i = 0; s && i < s->max_flights; i++) {
        const kv_flight *f = &s->flights[i];
        uint32_t blocks =
            f->used ? num_blocks(groups_of(f, kv->models[f->model].spec.num_groups)) : 0;
        *(f->kind == KV_FLIGHT_GET ? &out->fetching : &out->spilling) += blocks;
    }
}
