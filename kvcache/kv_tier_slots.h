// kv_tier_slots hands out places in the memory or file of a tier, of any size up to a slab's.  As
// the arena, a tier is cut into slabs, and a slab into slots of one size; an empty slab can change
// its size.  Slots are named by their offset from the start, a multiple of KV_TIER_UNIT.
//
// Derived state in process memory: recovery claims what the ledger names.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_TIER_SLOTS_H
#define ATTND_KVCACHE_KV_TIER_SLOTS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/err.h"

enum { KV_TIER_UNIT = 4096 }; // bytes: what O_DIRECT asks of places and lengths

#define KV_TIER_MAX_BYTES (UINT64_C(16) << 40) // the ledger names a slot by 32 bits, in units

typedef struct kv_tier_slots kv_tier_slots;

// kv_tier_slots_create: of the bytes, whole slabs are used; a slab is a multiple of KV_TIER_UNIT.
// The caller owns *out: kv_tier_slots_free, which accepts NULL.  ATTND_ENOMEM; ATTND_EINVAL: less
// than one slab, or more than KV_TIER_MAX_BYTES.
attnd_err kv_tier_slots_create(kv_tier_slots **out, uint64_t bytes, uint64_t slab_bytes,
                               attnd_errinfo *info);
void kv_tier_slots_free(kv_tier_slots *s);

// kv_tier_slots_take takes a slot of at least bytes; false when there is none.
bool kv_tier_slots_take(kv_tier_slots *s, uint64_t bytes, uint64_t *slot);
void kv_tier_slots_give(kv_tier_slots *s, uint64_t slot);

// kv_tier_slots_claim takes a given slot; false when it is taken, outside, or of a slab that has
// slots of another size.
bool kv_tier_slots_claim(kv_tier_slots *s, uint64_t slot, uint64_t bytes);

// kv_tier_slots_bytes returns what the slots that are taken fill, and *total what all slabs do.
uint64_t kv_tier_slots_bytes(const kv_tier_slots *s, uint64_t *total);

#endif
