// kv_policy says which cached block goes first when blocks are needed.
//
// The candidates are never a policy's business: leaves of the prefix tree that nobody uses, of
// tenants that may lose some (kv_evict.h).  Of these the one of lowest priority goes, among equals
// the one of lowest rank.  A policy is a few functions that set ranks:
//
//     insert     a block came into the tree; depth blocks lie before it (0 = the first).  A key is
//                made of its tokens and all before them, so a block that comes again has the same
//     hit        a lookup found it; called for every block of the path, in no order
//     release    its last user left, so it may become a candidate: now, when nothing lies behind
//                it, else as soon as what does is gone
//     evict      it leaves the tree; one that is spilled to a tier stays
//     age        all ranks and the clock were halved, since the clock was half through: the policy
//                halves what it keeps in kv_policy_state to compare ranks with
//
// Each may be NULL.  None is called while the block is a candidate.  What a policy knows of a block
// are the two words of kv_rank, of all blocks those of kv_policy_state, of blocks that are gone
// what it keeps in past.  All start as zeros, in a restarted daemon too, which calls insert, then
// release for each block that it finds, in no order.  Loop thread only.
//
// To add a policy: a file kv_policy_<name>.c, and its line in the table of kv_policy.c.
#ifndef ATTND_KVCACHE_KV_POLICY_H
#define ATTND_KVCACHE_KV_POLICY_H

#include <stdint.h>

typedef struct kv_rank {
    uint32_t rank; // of candidates of one priority the lowest goes first
    uint32_t word; // the policy's own
} kv_rank;

enum { KV_POLICY_PAST = 3 }; // words of past a block that the tree has room for

typedef struct kv_policy_state {
    uint32_t clock;    // kv_policy_tick
    uint32_t num_past; // words
    uint32_t *past;    // [num_past], what a policy remembers of blocks that are gone; never touched
                       // by a policy that remembers none, it takes no memory
    uint64_t words[4]; // the policy's own
} kv_policy_state;

typedef struct kv_policy {
    const char *name;
    void (*insert)(kv_policy_state *st, kv_rank *block, uint32_t key, uint32_t depth);
    void (*hit)(kv_policy_state *st, kv_rank *block);
    void (*release)(kv_policy_state *st, kv_rank *block);
    void (*evict)(kv_policy_state *st, const kv_rank *block, uint32_t key);
    void (*age)(kv_policy_state *st);
} kv_policy;

// kv_policies ends with NULL; the first one is used unless another is configured.
extern const kv_policy *const kv_policies[];

// kv_policy_find returns the index of a policy, UINT32_MAX for a name that is none.
uint32_t kv_policy_find(const char *name);

extern const kv_policy kv_policy_lru;   // least recently used
extern const kv_policy kv_policy_reuse; // least likely to be used again

// kv_policy_tick returns the next number of the clock.
static inline uint32_t kv_policy_tick(kv_policy_state *st) {
    return ++st->clock;
}

#endif
