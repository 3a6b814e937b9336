// kv_slab cuts slabs into blocks of a size class.  A class is a block size; a slab belongs to the
// class whose blocks it holds, and to none as soon as the last of them is free, so models of
// different geometry share one pool.  A slab holds at most max_blocks / slabs blocks: what smaller
// blocks would leave over stays unused.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_SLAB_H
#define ATTND_KVCACHE_KV_SLAB_H

#include "kvcache/kv_ledger.h"

// kv_class_hold finds or makes the class of blocks of units * KV_BLOCK_UNIT bytes, at most a slab,
// and counts a user more.  There are as many classes as layer groups, so it cannot fail.
uint32_t kv_class_hold(kv_cache *kv, uint32_t units);
// kv_class_rele counts a user less; a class without users, which then has no blocks, is forgotten.
void kv_class_rele(kv_cache *kv, uint32_t class_idx);

// kv_slab_assign gives an unassigned slab to the class; false when there is none.
bool kv_slab_assign(kv_cache *kv, uint32_t class_idx);

// kv_slab_claim makes a given slab, unassigned, the class's: for recovery, which puts the record
// and counts the slots itself.
void kv_slab_claim(kv_cache *kv, uint32_t slab, uint32_t class_idx);

// These are told what became of a block of the slab: kv_slab_took a free one in use, kv_slab_gave
// the reverse, kv_slab_cached one in use cached, kv_slab_used the reverse, kv_slab_evicted a cached
// one free.
void kv_slab_took(kv_cache *kv, uint32_t slab);
void kv_slab_gave(kv_cache *kv, uint32_t slab);
void kv_slab_cached(kv_cache *kv, uint32_t slab);
void kv_slab_used(kv_cache *kv, uint32_t slab);
void kv_slab_evicted(kv_cache *kv, uint32_t slab);

#endif
