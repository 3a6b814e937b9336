// Flights and lists: see kv_flight.h.
#include "kvcache/kv_flight.h"

#include <stdlib.h>

#include "kvcache/kv_prefix.h"
#include "kvcache/kv_redo.h"

#define IN_FLIGHT (UINT32_C(1) << 31) // in kv_node_aux.prev_heap: the rest is the flight

// ---- flights

attnd_err kv_spiller_create(kv_cache *kv, kv_tier *const *tiers, uint32_t num,
                            attnd_errinfo *info) {
    kv_spiller *s = calloc(1, sizeof(*s));
    uint32_t jobs = 1, room = 0;
    for (uint32_t i = 0; s && i < num; i++) {
        s->tiers[i] = tiers[i];
        room = tiers[i] ? kv_tier_room(tiers[i]) : 0;
        jobs += room;
    }
    kv->spiller = s;
    if (s) {
        s->num_tiers = num;
        s->max_flights = jobs;
        s->max_moves = room / 2 ? room / 2 : 1;
        s->flights = calloc(jobs, sizeof(*s->flights));
        s->class_coming = calloc(kv->lists->classes.cap, sizeof(*s->class_coming));
        s->tenant_coming = calloc(kv->lists->tenants.cap, sizeof(*s->tenant_coming));
        s->model_flights = calloc(kv->lists->models.cap, sizeof(*s->model_flights));
    }
    if (!s || !s->flights || !s->class_coming || !s->tenant_coming || !s->model_flights) {
        kv_tiers_stop(kv);
        return attnd_fail(info, ATTND_ENOMEM, "tier", "no memory for copies to tiers");
    }
    for (uint32_t i = jobs; i-- > 0;) {
        s->flights[i].next_free = s->first_free;
        s->first_free = i + 1;
    }
    return ATTND_OK;
}

void kv_tiers_stop(kv_cache *kv) {
    if (kv->spiller) {
        free(kv->spiller->flights);
        free(kv->spiller->class_coming);
        free(kv->spiller->tenant_coming);
        free(kv->spiller->model_flights);
        free(kv->spiller);
        kv->spiller = NULL;
    }
}

kv_flight *kv_flight_of(const kv_cache *kv, uint32_t node) {
    uint32_t link = kv->node_aux[node].prev_heap;
    return kv->spiller && link & IN_FLIGHT ? &kv->spiller->flights[link & ~IN_FLIGHT] : NULL;
}

uint64_t kv_flight_next(const kv_cache *kv) {
    ATTND_ASSERT(kv->spiller->first_free);
    return kv->spiller->first_free - 1;
}

kv_flight *kv_flight_take(kv_cache *kv, const kv_flight *as) {
    kv_spiller *s = kv->spiller;
    uint32_t i = (uint32_t)kv_flight_next(kv);
    kv_flight *f = &s->flights[i];
    s->first_free = f->next_free;
    *f = *as;
    f->used = true;
    f->model = kv_node_model(kv, f->node);
    s->num_flights++;
    s->model_flights[f->model]++;
    if (f->kind == KV_FLIGHT_MOVE) {
        s->num_moves++;
        s->moving_bytes += f->bytes;
    }
    kv->node_aux[f->node].prev_heap = IN_FLIGHT | i;
    kv->node_aux[f->node].next_heap = 0;
    return f;
}

// A moved node has no user from the flight, and may be anything by now if it left.
static void detach(kv_cache *kv, const kv_flight *f) {
    kv->spiller->model_flights[f->model]--;
    kv->node_aux[f->node].prev_heap = 0;
}

kv_flight kv_flight_give(kv_cache *kv, uint64_t number) {
    kv_spiller *s = kv->spiller;
    kv_flight *f = &s->flights[number], was = *f;
    ATTND_ASSERT(f->used);
    if (f->kind != KV_FLIGHT_MOVE || !f->left) {
        detach(kv, f);
    }
    if (f->kind == KV_FLIGHT_MOVE) {
        s->num_moves--;
        s->moving_bytes -= f->bytes;
    }
    s->num_flights--;
    *f = (kv_flight){.next_free = s->first_free};
    s->first_free = (uint32_t)number + 1;
    return was;
}

void kv_flight_leave(kv_cache *kv, kv_flight *f) {
    f->left = true;
    if (f->kind == KV_FLIGHT_MOVE) {
        detach(kv, f);
    }
}

void kv_flight_coming(kv_cache *kv, const kv_flight *f, uint32_t by) {
    const kv_model_spec *spec = &kv->models[f->model].spec;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        if (f->entries[g] != KV_NONE) {
            kv->spiller->class_coming[kv->model_aux[f->model].classes[g]] += by;
            kv->spiller->tenant_coming[spec->tenant] += by;
        }
    }
}

uint32_t kv_spill_coming(const kv_cache *kv, uint32_t class_idx) {
    return kv->spiller ? kv->spiller->class_coming[class_idx] : 0;
}

uint32_t kv_spill_coming_of(const kv_cache *kv, uint32_t tenant) {
    return kv->spiller ? kv->spiller->tenant_coming[tenant] : 0;
}

bool kv_spill_moves(const kv_cache *kv, uint32_t model) {
    return kv->spiller && kv->spiller->model_flights[model] > 0;
}

void kv_spill_counted(const kv_cache *kv, kv_spill_counted_cb *cb, void *arg) {
    const kv_spiller *s = kv->spiller;
    for (uint32_t i = 0; s && i < s->max_flights; i++) {
        const kv_flight *f = &s->flights[i];
        if (f->used && f->kind != KV_FLIGHT_MOVE) {
            bool leaves = f->kind == KV_FLIGHT_PUT && !f->stays;
            cb(arg, f->node, leaves ? KV_LEAVING : 1, f->entries);
        }
    }
}

// ---- where images lie

uint64_t kv_flight_bytes(const kv_cache *kv, uint32_t node) {
    const kv_model_spec *spec = &kv->models[kv_node_model(kv, node)].spec;
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < spec->num_groups; g++) {
        bytes += kv->spills[node].groups >> g & 1 ? kv_block_bytes(&spec->groups[g]) : 0;
    }
    return bytes;
}

void kv_spill_put(kv_cache *kv, uint32_t node, kv_led_spill spill) {
    kv_redo_put_bytes(kv, &kv->spills[node], &spill, sizeof(spill));
}

void kv_spill_leave(kv_cache *kv, uint32_t node) {
    if (kv_spilled(kv, node)) {
        kv_spill_put(kv, node, (kv_led_spill){0});
    }
}

void kv_spill_left(kv_cache *kv, uint32_t node, const kv_led_spill *was) {
    kv_spiller *s = kv->spiller;
    kv_flight *f = kv_flight_of(kv, node);
    if (was->tier == KV_SPILL_LOST || !s) {
        return;
    }
    s->info.spilled -= (uint32_t)__builtin_popcount(was->groups);
    if (f) { // of a get or move: its end gives the slot back
        kv_flight_leave(kv, f);
    } else {
        kv_tier_give(s->tiers[was->tier - 1], (uint64_t)was->slot * KV_TIER_UNIT);
    }
}

void kv_spill_lose(kv_cache *kv, uint32_t node) {
    uint32_t blocks = (uint32_t)__builtin_popcount(kv->spills[node].groups);
    kv->spiller->info.spilled -= blocks;
    kv->spiller->info.lost += blocks;
    kv_redo_begin(kv);
    kv_spill_put(kv, node, (kv_led_spill){.tier = KV_SPILL_LOST});
    kv_redo_commit(kv);
}

bool kv_spill_is_orphan(const kv_cache *kv, uint32_t node) {
    uint32_t parent = kv_prefix_parent(kv, node);
    return !kv_prefix_has_parent(kv, node, true) || (parent != KV_NONE && kv_spilled(kv, parent) &&
                                                     kv->spills[parent].tier == KV_SPILL_LOST);
}

// ---- parked nodes

// list_of returns the list that a spilled node without users belongs to.
static uint32_t list_of(const kv_cache *kv, uint32_t node) {
    uint32_t tier = kv->spills[node].tier;
    return tier == KV_SPILL_LOST ? KV_LIST_LOST : tier - 1;
}

void kv_spill_park(kv_cache *kv, uint32_t node) {
    kv_spiller *s = kv->spiller;
    kv_node_aux *aux = &kv->node_aux[node];
    if (!s || kv_flight_of(kv, node)) { // kv_tiers_start, or the flight's end, parks it
        return;
    }
    uint32_t list = list_of(kv, node), *last = &s->last_parked[list];
    aux->prev_heap = *last;
    aux->next_heap = 0;
    *(*last ? &kv->node_aux[*last - 1].next_heap : &s->first_parked[list]) = node + 1;
    *last = node + 1;
}

void kv_spill_unpark(kv_cache *kv, uint32_t node) {
    kv_spiller *s = kv->spiller;
    kv_node_aux *aux = &kv->node_aux[node];
    if (!s || kv_flight_of(kv, node)) {
        return;
    }
    uint32_t list = list_of(kv, node);
    *(aux->prev_heap ? &kv->node_aux[aux->prev_heap - 1].next_heap : &s->first_parked[list]) =
        aux->next_heap;
    *(aux->next_heap ? &kv->node_aux[aux->next_heap - 1].prev_heap : &s->last_parked[list]) =
        aux->prev_heap;
    aux->prev_heap = aux->next_heap = 0;
}

bool kv_spill_drop_first(kv_cache *kv, uint32_t tier) {
    uint32_t link = kv->spiller->first_parked[tier];
    if (link) {
        kv->spiller->info.dropped++;
        kv_prefix_remove(kv, link - 1);
    }
    return link != 0;
}

bool kv_spill_drop(kv_cache *kv) {
    bool dropped = false;
    for (uint32_t t = kv->spiller ? kv->spiller->num_tiers : 0; t-- > 0 && !dropped;) {
        dropped = kv_spill_drop_first(kv, t);
    }
    return dropped;
}

void kv_spill_drop_model(kv_cache *kv, uint32_t model) {
    for (uint32_t list = 0; kv->spiller && list < KV_NUM_LISTS; list++) {
        uint32_t link = kv->spiller->first_parked[list];
        while (link) {
            uint32_t node = link - 1;
            link = kv->node_aux[node].next_heap;
            if (kv_node_model(kv, node) == model) {
                kv_prefix_remove(kv, node);
            }
        }
    }
}
