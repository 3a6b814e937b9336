// kv_chain is a sequence's place in the prefix tree: the deepest node that its committed tokens
// lead to, of which it is a user, and the ids of the tokens behind the last full block.  While the
// ids of all its committed tokens are known, full blocks that it commits become nodes; once tokens
// come without ids no more do.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_CHAIN_H
#define ATTND_KVCACHE_KV_CHAIN_H

#include "kvcache/kv_prefix.h"

// kv_chain_find looks up what a step of new_len tokens [new_len] could take over; nothing when the
// sequence does not end with a full block or the ids of its tokens are not known.  At least one
// token is left over.
void kv_chain_find(const kv_cache *kv, uint32_t idx, const uint32_t *tokens, uint32_t new_len,
                   kv_prefix_hit *out);

// kv_chain_fetch begins to fetch from the tiers what follows what was found; true when it is worth
// waiting for.
bool kv_chain_fetch(kv_cache *kv, uint32_t idx, const uint32_t *tokens, uint32_t new_len,
                    const kv_prefix_hit *found);

// kv_chain_put puts into the open record how the chain changes when accepted tokens (ids; NULL =
// not known) are committed, of which the step found what *hit says.
void kv_chain_put(kv_cache *kv, uint32_t idx, uint32_t accepted, const uint32_t *tokens,
                  const kv_step_hit *hit);

// kv_chain_committed goes on with the chain once these tokens, behind the first `before` ones, are
// committed, and makes nodes of full blocks.
void kv_chain_committed(kv_cache *kv, uint32_t idx, uint32_t before, const uint32_t *tokens,
                        const kv_step_hit *hit);

// kv_chain_put_cut puts into the open record what truncating to len changes; kv_chain_cut follows
// when the blocks were given back.
void kv_chain_put_cut(kv_cache *kv, uint32_t idx, uint32_t len);
void kv_chain_cut(kv_cache *kv, uint32_t idx);

// kv_chain_copy copies the known ids of a sequence's last block to one that is not live yet, for
// which the record then says the same as for the first; kv_chain_forked follows it.
void kv_chain_copy(kv_cache *kv, uint32_t from, uint32_t to);
void kv_chain_forked(kv_cache *kv, uint32_t from, uint32_t to);

// kv_chain_drop ends the use of the tree; the blocks were given back.
void kv_chain_drop(kv_cache *kv, uint32_t idx);

// kv_chain_take_over makes a recovered sequence a user of its node again, at depth `depth` (0: it
// has none, or none that is good); false when what is known of its tokens is not what was
// committed, and the record must say so.
bool kv_chain_take_over(kv_cache *kv, uint32_t idx, uint32_t depth);

#endif
