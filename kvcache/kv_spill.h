// kv_spill moves cached blocks to the tiers (kv_tier.h) instead of dropping them, and back when a
// lookup meets them.  What moves is a node of the prefix tree, the blocks of all its groups as one
// image:
//
//     cached  ->  spilling  ->  spilled  ->  fetching  ->  cached
//
// While a copy is under way the blocks have a reference, so they are in use and nobody takes them.
// A node keeps its parent, its tokens and its key, so that it is found by them whatever its state;
// found while it is spilling it stays where it is.  But as soon as it begins to spill it is no
// child in the list of its parent's, which so becomes a leaf, and may go next: so nodes go leaf
// first, many at a time, and whatever lies behind a spilled node is spilled, too.
//
// Spilled nodes that nobody fetches are parked, in each tier in the order in which they came there.
// A node goes to the first tier that has room, or is making some, so the fast one is named first;
// before that is full, what was parked first there is moved on to the next (kv_move.h).  When all
// are full, what was parked first in the last one is dropped.
//
// The ledger has where an image lies and its checksum: the record that names the slot takes the
// blocks from the node, the record that gives it blocks again takes the slot.  A process that is
// killed leaves nodes cached that were spilling, and nodes spilled that were being fetched.
//
// A copy that fails costs the node, or leaves it where it was, never more: an image with a wrong
// checksum is dropped; a tier that is off loses all that it has.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_SPILL_H
#define ATTND_KVCACHE_KV_SPILL_H

#include "kvcache/kv_ledger.h"
#include "kvcache/kv_pool.h"

#define KV_SPILL_LOST UINT32_MAX // in kv_led_spill.tier: there is no image any more

// kv_spilled says whether a live node's blocks are in a tier.  A node with a block of group 0 has
// none there: its record of the spill is not even looked at, so where nothing is spilled it takes
// no memory.
static inline bool kv_spilled(const kv_cache *kv, uint32_t node) {
    return kv->nodes[node].entry == KV_NONE && kv->spills[node].tier != 0;
}

typedef enum kv_spill_how {
    KV_SPILL_BEGUN,
    KV_SPILL_BUSY, // copies are under way; when some have ended it may be possible
    KV_SPILL_NOT,
} kv_spill_how;

// kv_spill_begin begins to copy the blocks of a candidate to a tier.
kv_spill_how kv_spill_begin(kv_cache *kv, uint32_t node);

// kv_spill_stay has a node stay that is being spilled, since somebody found it; until the copy has
// ended that has a use of it.  False when what lies before it is not there any more.
bool kv_spill_stay(kv_cache *kv, uint32_t node);

// kv_spill_coming returns how many blocks of a class come free when the copies that are under way
// have ended, kv_spill_coming_of how many of a tenant.
uint32_t kv_spill_coming(const kv_cache *kv, uint32_t class_idx);
uint32_t kv_spill_coming_of(const kv_cache *kv, uint32_t tenant);

// kv_spill_fetch begins to fetch what is spilled of tokens [num] behind a node (KV_NONE: the first
// ones), as much as has room; true when it is worth waiting for.
bool kv_spill_fetch(kv_cache *kv, uint32_t model, uint32_t parent, const uint32_t *tokens,
                    uint32_t num);

// kv_spill_park and kv_spill_unpark: a spilled node lost its last user, or got one.
void kv_spill_park(kv_cache *kv, uint32_t node);
void kv_spill_unpark(kv_cache *kv, uint32_t node);

// kv_spill_leave puts into the open record that a node is spilled no longer; kv_spill_left follows
// it and gives the slot back.
void kv_spill_leave(kv_cache *kv, uint32_t node);
void kv_spill_left(kv_cache *kv, uint32_t node, const kv_led_spill *was);

// kv_spill_drop drops the node that was parked first in the last tier that has one; false when
// there is none.
bool kv_spill_drop(kv_cache *kv);

// kv_spill_drop_model drops all parked nodes of a model; kv_spill_moves says whether one of its
// nodes is being copied.
void kv_spill_drop_model(kv_cache *kv, uint32_t model);
bool kv_spill_moves(const kv_cache *kv, uint32_t model);

// kv_spill_counted calls cb with each node that is being copied, how the copy shows in its uses,
// and the entries [groups] of the blocks that the copy has a reference to.
typedef void kv_spill_counted_cb(void *arg, uint32_t node, uint32_t uses, const uint32_t *entries);
void kv_spill_counted(const kv_cache *kv, kv_spill_counted_cb *cb, void *arg);

#endif
