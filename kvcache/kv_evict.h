// kv_evict gives cached blocks back when blocks are needed.
//
// A candidate is a leaf of the prefix tree without users.  Each model has a heap of its candidates
// by (priority, rank); ranks are the policy's (kv_policy.h).  The victim is the lowest of all heaps
// whose nodes have a block of the class that is needed, among the models of tenants that may lose
// one: one's own, and those that have more than their floor.  So a block in use is never taken, nor
// one that lies before a block in use.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_EVICT_H
#define ATTND_KVCACHE_KV_EVICT_H

#include "kvcache/kv_ledger.h"
#include "kvcache/kv_pool.h"

// kv_evict_add makes a quiet leaf a candidate, kv_evict_drop takes it back.
void kv_evict_add(kv_cache *kv, uint32_t node);
void kv_evict_drop(kv_cache *kv, uint32_t node);

// kv_evict_for evicts until the needs [num] fit the pool and take blocks more fit the tenant's
// quota; false when that cannot be, and then nothing is evicted: what cached blocks give is counted
// first.  (Only blocks of two classes that lack at once, of a tenant near its floor, may count
// twice.)
bool kv_evict_for(kv_cache *kv, uint32_t tenant, const kv_need *needs, uint32_t num, uint64_t take);

// kv_evict_spill begins to spill what kv_evict_for would evict, as far as tiers have room and less
// is on its way than lacks; true when it is worth waiting for.
bool kv_evict_spill(kv_cache *kv, uint32_t tenant, const kv_need *needs, uint32_t num,
                    uint64_t take);

// kv_evict_model evicts all that is quiet of a model.
void kv_evict_model(kv_cache *kv, uint32_t model);

#endif
