// kv_seq: what the rest of kvcache asks of sequences (the public part is in kv_cache.h).
#ifndef ATTND_KVCACHE_KV_SEQ_H
#define ATTND_KVCACHE_KV_SEQ_H

#include "kvcache/kv_ledger.h"

// kv_seq_index returns the index of a live sequence, KV_NONE for a handle that is gone.
uint32_t kv_seq_index(const kv_cache *kv, uint64_t seq);

// kv_seq_find checks that the session (index; KV_NONE = attnd itself, which may everything) may
// change the sequence, and returns its index.  ATTND_ESTALE, ATTND_EBUSY, ATTND_EPERM.
attnd_err kv_seq_find(const kv_cache *kv, uint32_t session_idx, uint64_t seq, uint32_t *idx,
                      attnd_errinfo *info);

// kv_seq_link puts a sequence into the list of its session, kv_seq_link_name into the bucket of its
// name.
void kv_seq_link(kv_cache *kv, uint32_t idx);
void kv_seq_link_name(kv_cache *kv, uint32_t idx);

// kv_seq_leave takes a sequence from its session: a kept one is held by none and its time begins to
// run, any other is freed.
void kv_seq_leave(kv_cache *kv, uint32_t idx, uint64_t now_ms);

// kv_seq_give_blocks drops the sequence's references to blocks [from, to) of a group, those that it
// still has.
void kv_seq_give_blocks(kv_cache *kv, uint32_t idx, uint32_t group, uint32_t from, uint32_t to);

// kv_seq_give_block drops one reference of the tenant's to a block, kv_seq_hold_block adds one.
void kv_seq_give_block(kv_cache *kv, uint32_t tenant, uint32_t entry);
void kv_seq_hold_block(kv_cache *kv, uint32_t tenant, uint32_t entry);

#endif
