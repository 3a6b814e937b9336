// kv_flight is what kv_spill works on: the tiers, the copies under way (flights), and the spilled
// nodes without users (parked), of each tier a list in the order in which they came there.
//
// A node knows its flight, and a node with one is in no list: the link of heap and lists holds the
// flight meanwhile.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_FLIGHT_H
#define ATTND_KVCACHE_KV_FLIGHT_H

#include "kvcache/kv_ledger.h"
#include "kvcache/kv_spill.h"
#include "kvcache/kv_tier.h"

enum {
    KV_SPILL_DROPS = 64,         // parked nodes that make way for one image, at most
    KV_LIST_LOST = KV_MAX_TIERS, // those that have no image, or that nothing leads to
    KV_NUM_LISTS,
};

typedef enum kv_flight_kind {
    KV_FLIGHT_PUT,  // arena -> tier
    KV_FLIGHT_GET,  // tier -> arena
    KV_FLIGHT_MOVE, // tier -> tier
} kv_flight_kind;

typedef struct kv_flight {
    bool used;
    kv_flight_kind kind;
    bool left;  // of a get or move: the node has got other blocks meanwhile
    bool stays; // of a put: the node was found meanwhile
    uint32_t node, model;
    uint32_t tier; // of a move: to which
    uint64_t slot;
    uint32_t from_tier; // of a move, and the bytes that it frees there
    uint64_t from_slot, bytes;
    uint32_t entries[KV_MAX_GROUPS]; // of the arena's blocks, KV_NONE: the group has none
    uint32_t next_free;              // + 1
} kv_flight;

typedef struct kv_spiller {
    kv_tier *tiers[KV_MAX_TIERS]; // borrowed; NULL = not there in this run
    uint32_t num_tiers;
    bool was_off[KV_MAX_TIERS];
    kv_flight *flights; // [max_flights], as many as the tiers' queues hold
    uint32_t max_flights, num_flights;
    uint32_t first_free; // flight + 1
    uint32_t num_moves, max_moves;
    uint64_t moving_bytes;
    uint32_t first_parked[KV_NUM_LISTS], last_parked[KV_NUM_LISTS]; // node + 1
    uint32_t *class_coming, *tenant_coming; // blocks that come free when puts have ended
    uint32_t *model_flights;
    kv_spill_info info;
} kv_spiller;

// kv_spiller_create makes kv->spiller: ATTND_ENOMEM.
attnd_err kv_spiller_create(kv_cache *kv, kv_tier *const *tiers, uint32_t num, attnd_errinfo *info);

// kv_flight_of returns the flight of a node, NULL for none.
kv_flight *kv_flight_of(const kv_cache *kv, uint32_t node);

// kv_flight_next returns the number of the flight that kv_flight_take makes of *as, whose node is
// in no list.  There is one for each job that a tier takes.
uint64_t kv_flight_next(const kv_cache *kv);
kv_flight *kv_flight_take(kv_cache *kv, const kv_flight *as);

// kv_flight_give ends a flight and returns what it was.
kv_flight kv_flight_give(kv_cache *kv, uint64_t number);

// kv_flight_leave: the node of a get or a move has got other blocks.
void kv_flight_leave(kv_cache *kv, kv_flight *f);

// kv_flight_coming counts the blocks of a put in (by 1) or out (by UINT32_MAX) of those that come
// free.
void kv_flight_coming(kv_cache *kv, const kv_flight *f, uint32_t by);

// kv_flight_bytes returns the bytes of a spilled node's image.
uint64_t kv_flight_bytes(const kv_cache *kv, uint32_t node);

// kv_spill_put puts into the open record where a node's image is; kv_spill_lose says, in a record
// of its own, that a node that is in no list has none any more.
void kv_spill_put(kv_cache *kv, uint32_t node, kv_led_spill spill);
void kv_spill_lose(kv_cache *kv, uint32_t node);

// kv_spill_is_orphan says whether what lies before a spilled node is gone for good, or lost, so
// that nothing finds it.
bool kv_spill_is_orphan(const kv_cache *kv, uint32_t node);

// kv_spill_drop_first drops the node that was parked first in a tier; false when there is none.
bool kv_spill_drop_first(kv_cache *kv, uint32_t tier);

#endif
