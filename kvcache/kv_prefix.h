// kv_prefix is the prefix tree: which token ids the rows of full blocks are of.
//
// A node stands for block_tokens tokens behind those of its parent and names the block of each
// layer group that holds their rows; so the path from the first tokens to a node is a prefix.  A
// child is found by its parent (node and generation) and its tokens: a hash of all tokens from the
// first on, over the tenant's salt and the model, says where to look, and all are compared, so two
// prefixes of one hash are told apart.  Each model has a tree, models are a tenant's own.
//
//     lookup     kv_prefix_find, then kv_prefix_hold what was found
//     insert     kv_prefix_insert, when the blocks are committed, never before
//     eviction   kv_evict.h
//
// A node's users are sequences (the deepest node that their tokens lead to), steps (what they have
// found) and pins.  Who uses a node uses all before it: a node is quiet when it has no user and
// nor has any behind it.  References to blocks are apart (kv_pool.h): a block of a quiet node has
// none, a block without one is cached.
//
// A node may lack its block of a group with a window: sequences that go on behind it need it no
// more, but it is cached for others that end there, until blocks are needed (kv_window.h).  A hit
// may go through such a node, but end only where the blocks are there that rows behind it see.
//
// Nodes and their table entries are authoritative, and their token ids; links, users, ranks and the
// hash buckets are derived.  Only models whose groups have equal block_tokens have a tree.
// Loop thread only.
#ifndef ATTND_KVCACHE_KV_PREFIX_H
#define ATTND_KVCACHE_KV_PREFIX_H

#include "kvcache/kv_ledger.h"

// kv_prefix_can says whether prefixes of the model are cached; else why not, in *info:
// ATTND_ENOTSUP.
attnd_err kv_prefix_can(const kv_cache *kv, const kv_model_spec *spec, attnd_errinfo *info);

// kv_prefix_start makes the empty tree of a model.
void kv_prefix_start(kv_cache *kv, uint32_t model);

typedef struct kv_prefix_hit {
    uint32_t node;           // the deepest whole one; KV_NONE: that from which the lookup went
    uint32_t blocks;         // whole ones that were found
    uint32_t partial;        // node behind it that begins with the tokens that follow, KV_NONE
    uint32_t partial_tokens; // of these
    uint32_t deepest, depth; // as node and blocks, whatever blocks nodes lack
} kv_prefix_hit;

// kv_prefix_find looks tokens [num] up behind a node (KV_NONE: they are the first ones), which lies
// behind `before` blocks.  What is found has all blocks that rows behind it see.  Nothing changes,
// what was found is not pinned.
void kv_prefix_find(const kv_cache *kv, uint32_t model, uint32_t from, uint32_t before,
                    const uint32_t *tokens, uint32_t num, kv_prefix_hit *out);

// kv_prefix_parent returns the node before one, KV_NONE for the first of a path.
uint32_t kv_prefix_parent(const kv_cache *kv, uint32_t node);

// kv_prefix_hold adds a user of a node, kv_prefix_rele drops one: blocks of which it is the last
// must have no reference any more.
void kv_prefix_hold(kv_cache *kv, uint32_t node);
void kv_prefix_rele(kv_cache *kv, uint32_t node);

// kv_prefix_hit_path tells the policy that the num nodes up to this one were hit.
void kv_prefix_hit_path(kv_cache *kv, uint32_t node, uint32_t num);

// kv_prefix_raise has a node that sequence seq_idx is a user of, and those before it, have the
// sequence's priority unless theirs is as high: what lies before a node never has a lower one.
// Committed by records, each of some nodes.
void kv_prefix_raise(kv_cache *kv, uint32_t node, uint32_t seq_idx);

// kv_prefix_insert returns the child of parent (KV_NONE: of the root), which must have a user, with
// tokens [block_tokens], and adds a user; it is made with the blocks entries [num_groups], in use,
// when there is none, and one that is spilled, or lacks some, gets these blocks.  depth: blocks
// before it.  KV_NONE: no node is free, and nothing was evicted for it.  Committed by the record
// that makes the node live, which says too that it is the chain of sequence seq_idx.
uint32_t kv_prefix_insert(kv_cache *kv, uint32_t model, uint32_t parent, const uint32_t *tokens,
                          const uint32_t *entries, uint32_t depth, uint32_t seq_idx);

// kv_prefix_shrink gives back the cached blocks that a node with users has in groups with a window,
// and returns how many: the node lacks them from then on, until a sequence commits its tokens
// again.  Committed by the record that says so.
uint32_t kv_prefix_shrink(kv_cache *kv, uint32_t node);

// kv_prefix_remove takes a leaf without users, a parked node, or one that leaves, out of the tree,
// and gives its cached blocks back; a model of which it was the last is forgotten when nothing else
// needs it. Committed by the record that says that the node is free.
void kv_prefix_remove(kv_cache *kv, uint32_t node);

// kv_prefix_link puts a live node of a recovered ledger into the tree, depth blocks before it:
// parents first.
void kv_prefix_link(kv_cache *kv, uint32_t node, uint32_t depth);

// kv_prefix_child returns the child, spilled or not, with tokens [block_tokens], KV_NONE for none.
uint32_t kv_prefix_child(const kv_cache *kv, uint32_t model, uint32_t parent,
                         const uint32_t *tokens);

// kv_prefix_leave makes a candidate one that is being spilled: out of the heap and of its parent's
// list, which may so become a candidate.  kv_prefix_stay takes that back: the node is quiet, and
// not a candidate yet; false when what lies before it is not there any more.  kv_prefix_left
// follows the record by which it is spilled, and kv_prefix_rejoin the one by which a node with
// users has blocks again.
void kv_prefix_leave(kv_cache *kv, uint32_t node);
bool kv_prefix_stay(kv_cache *kv, uint32_t node);
void kv_prefix_left(kv_cache *kv, uint32_t node, const uint32_t *entries);
void kv_prefix_rejoin(kv_cache *kv, uint32_t node);

// kv_prefix_has_parent says whether what lies before a node is in the arena, or spilled if it may
// be.
bool kv_prefix_has_parent(const kv_cache *kv, uint32_t node, bool spilled);

// kv_prefix_key returns the key of tokens [block_tokens] behind those of parent.
uint32_t kv_prefix_key(const kv_cache *kv, uint32_t model, uint32_t parent, const uint32_t *tokens);

// kv_prefix_set_key_mask is for tests: of a key only the bits in mask are looked at, so with 0 all
// prefixes have the same.
void kv_prefix_set_key_mask(kv_cache *kv, uint32_t mask);

#endif
