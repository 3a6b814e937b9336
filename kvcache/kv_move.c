// Moves from tier to tier: see kv_move.h.
//
// The next tier puts the image as it does one of the arena, from the memory of the first.  The
// checksum there is compared before, so that a damaged image is lost and not made a good one.
#include "kvcache/kv_move.h"

#include <string.h>

#include "kvcache/kv_redo.h"

enum { SPARE = 8 }; // a tier of which less than one part in so many is free has some moved on

// take_slot takes a slot of a tier; what was parked there first makes way.
static bool take_slot(kv_cache *kv, uint32_t tier, uint64_t bytes, uint64_t *slot) {
    kv_tier *t = kv->spiller->tiers[tier];
    bool has = kv_tier_take(t, bytes, slot);
    for (uint32_t drops = 0; !has && drops < KV_SPILL_DROPS && kv_spill_drop_first(kv, tier);
         drops++) {
        has = kv_tier_take(t, bytes, slot);
    }
    return has;
}

// begin moves the node that was parked first in a tier on to another; false when that cannot be
// now.
static bool begin(kv_cache *kv, uint32_t from, uint32_t to) {
    kv_spiller *s = kv->spiller;
    uint32_t node = s->first_parked[from] - 1;
    const kv_led_spill *spill = &kv->spills[node];
    kv_flight as = {.kind = KV_FLIGHT_MOVE,
                    .node = node,
                    .tier = to,
                    .from_tier = from,
                    .from_slot = (uint64_t)spill->slot * KV_TIER_UNIT};
    uint64_t bytes = kv_flight_bytes(kv, node);
    as.bytes = (bytes + KV_TIER_UNIT - 1) / KV_TIER_UNIT * KV_TIER_UNIT;
    kv_tier_job job;
    if (kv_spill_is_orphan(kv, node)) {
        return kv_spill_drop_first(kv, from);
    }
    if (!kv_tier_lend(s->tiers[from], as.from_slot, bytes, spill->sum, &job) ||
        !take_slot(kv, to, bytes, &as.slot)) {
        return false;
    }
    memset(as.entries, 0xff, sizeof(as.entries)); // KV_NONE
    job.slot = as.slot;
    job.tag = kv_flight_next(kv);
    if (kv_tier_submit(s->tiers[to], &job)) { // it went off meanwhile
        kv_tier_give(s->tiers[to], as.slot);
        return false;
    }
    kv_spill_unpark(kv, node);
    kv_flight_take(kv, &as);
    return true;
}

// moved says where the image of a node is now.  Committed by the record that says so.
static void moved(kv_cache *kv, const kv_flight *f, uint64_t sum) {
    kv_led_spill spill = kv->spills[f->node];
    spill.tier = f->tier + 1;
    spill.slot = (uint32_t)(f->slot / KV_TIER_UNIT);
    spill.sum = sum;
    kv_redo_begin(kv);
    kv_spill_put(kv, f->node, spill);
    kv_redo_commit(kv);
    kv->spiller->info.moves += (uint32_t)__builtin_popcount(spill.groups);
}

// A node that could not be moved stays where it is; if its image is damaged, or its tier off, it is
// lost.
void kv_move_end(kv_cache *kv, const kv_flight *f, const kv_tier_job *job) {
    kv_spiller *s = kv->spiller;
    bool good = !job->err && !f->left;
    bool lost =
        !f->left && !good && (job->err == ATTND_ESTALE || kv_tier_is_off(s->tiers[f->from_tier]));
    s->info.failed += job->err == ATTND_EIO;
    if (good) {
        moved(kv, f, job->sum);
    } else {
        kv_tier_give(s->tiers[f->tier], f->slot);
    }
    if (lost) {
        kv_spill_lose(kv, f->node);
    }
    if (good || lost || f->left) {
        kv_tier_give(s->tiers[f->from_tier], f->from_slot);
    }
    if (!f->left && kv->node_aux[f->node].uses == 0) {
        kv_spill_park(kv, f->node);
    }
}

static bool is_on(const kv_tier *t) {
    return t && !kv_tier_is_off(t);
}

// next_tier returns the tier behind one that is on, num_tiers when there is none.
static uint32_t next_tier(const kv_spiller *s, uint32_t tier) {
    do {
        tier++;
    } while (tier < s->num_tiers && !is_on(s->tiers[tier]));
    return tier;
}

// is_short says whether too little of a tier is free, or will be once what moves has moved.
static bool is_short(const kv_spiller *s, uint32_t tier) {
    uint64_t total, taken = kv_tier_fill(s->tiers[tier], &total);
    return total - taken + s->moving_bytes < total / SPARE;
}

bool kv_move_on_from(kv_cache *kv, uint32_t tier) {
    kv_spiller *s = kv->spiller;
    uint32_t to = next_tier(s, tier);
    if (to == s->num_tiers || !is_on(s->tiers[tier])) {
        return false;
    }
    while (s->first_parked[tier] && is_short(s, tier) && s->num_moves < s->max_moves &&
           kv_tier_room(s->tiers[to]) > 0 && begin(kv, tier, to)) {
    }
    return s->num_moves > 0;
}

void kv_move_on(kv_cache *kv) {
    for (uint32_t t = 0; t < kv->spiller->num_tiers; t++) {
        kv_move_on_from(kv, t);
    }
}
