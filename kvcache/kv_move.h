// kv_move moves what is spilled from a tier to the next one, so that the first has room for what is
// spilled next: what went there first goes on first, a little ahead of need.  Until a copy has
// ended the node is where it was; a process that is killed leaves it there.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_MOVE_H
#define ATTND_KVCACHE_KV_MOVE_H

#include "kvcache/kv_flight.h"

// kv_move_on_from begins as many moves as a tier needs, and as half of the next one's queue takes;
// false when none is under way then.  kv_move_on does so for all tiers.
bool kv_move_on_from(kv_cache *kv, uint32_t tier);
void kv_move_on(kv_cache *kv);

// kv_move_end ends one, which is no flight any more.
void kv_move_end(kv_cache *kv, const kv_flight *f, const kv_tier_job *job);

#endif
