// kv_pool hands out blocks by table entry and counts references to them.  A block is free, in use
// (has a reference), or cached (has none, but is a node's of the prefix tree).  Loop thread only.
#ifndef ATTND_KVCACHE_KV_POOL_H
#define ATTND_KVCACHE_KV_POOL_H

#include "kvcache/kv_ledger.h"

// kv_pool_take returns a block of the class with one reference, KV_NONE when there is none.  The
// free neighbour behind near (an entry of the class in use, or KV_NONE) is preferred, so that the
// blocks of a sequence lie in long runs.
uint32_t kv_pool_take(kv_cache *kv, uint32_t class_idx, uint32_t near);

// kv_pool_claim makes a given block in use, or adds a reference when it is; true when it was free.
// For recovery; the block's slab is assigned.
bool kv_pool_claim(kv_cache *kv, uint32_t entry);

// kv_pool_hold adds a reference to a block in use or cached; true when it was cached.
bool kv_pool_hold(kv_cache *kv, uint32_t entry);

// kv_pool_rele drops a reference; true when it was the last and the block is free or cached.
bool kv_pool_rele(kv_cache *kv, uint32_t entry);

// kv_pool_index_block makes a block in use a node's, kv_pool_unindex takes that back: a cached
// block then is free, and true is returned.
void kv_pool_index_block(kv_cache *kv, uint32_t entry);
bool kv_pool_unindex(kv_cache *kv, uint32_t entry);

bool kv_pool_is_indexed(const kv_cache *kv, uint32_t entry);
bool kv_pool_is_cached(const kv_cache *kv, uint32_t entry);

// kv_pool_slab returns the slab that the block lies in.
uint32_t kv_pool_slab(const kv_cache *kv, uint32_t entry);

uint32_t kv_pool_refs(const kv_cache *kv, uint32_t entry);

// kv_pool_index returns the number of the block, for arrays with an element a block.
uint64_t kv_pool_index(const kv_cache *kv, uint32_t entry);

// kv_need is what a step asks of one class.
typedef struct kv_need {
    uint32_t class_idx;
    uint64_t take;  // blocks that it takes
    uint64_t found; // blocks that it would take, too, if the prefix cache did not have them
    uint64_t held;  // blocks that its sequences hold already, and
    uint64_t slabs; // slabs that these lie in: filled for kv_pool_could_fit
} kv_need;

// kv_pool_fits says whether all needs [num] (of different classes) can be taken now.
bool kv_pool_fits(const kv_cache *kv, const kv_need *needs, uint32_t num);

// kv_pool_could_fit says whether they could if everybody else gave all blocks back.
bool kv_pool_could_fit(const kv_cache *kv, const kv_need *needs, uint32_t num);

// kv_pool_mark marks a block and its slab; *new_block and *new_slab say whether they were unmarked.
// kv_pool_unmark takes both marks off.  For counting distinct blocks within one call.
void kv_pool_mark(kv_cache *kv, uint32_t entry, bool *new_block, bool *new_slab);
void kv_pool_unmark(kv_cache *kv, uint32_t entry);

#endif
