// kv_ledger is the memory that kvcache keeps its state in: one memfd, mapped once, that holds
// arrays of 32-bit indices and no pointer, so that another process can map it anywhere and go on.
// The arrays are sized by kv_opts for the worst case; pages never touched cost nothing.
//
//     +----------------------------------------------------------------------------------------+
//     | head       magic, version, options; `published`, the word that commits everything      |
//     | head_copy  the same but for `published`                                                |
//     | redo       two records of (word, value) writes, used by turns (kv_redo.h)              |
//     |------------------------- authoritative: what a restart believes -----------------------|
//     | tenants    name, quota                                                                 |
//     | models     users, spec                                                                 |
//     | slabs      size of the blocks that a slab is cut into, 0 = unassigned                  |
//     | sessions   generation, tenant, secret, highest request id                              |
//     | replies    65 a session: the reply to request r lies at r % 65                         |
//     | values     2 * max_step_seqs words a reply                                             |
//     | steps      generation, open or not                                                     |
//     | seqs       generation, tenant, model, holder, committed length, name, time to live,    |
//     |            checksums of its tables, its place in the prefix tree                       |
//     | nodes      the prefix tree: a node is the block of a prefix, in each group; parent,    |
//     |            key, table entries (kv_prefix.h)                                            |
//     | spills     of a node whose blocks are in a tier: which, where, checksum (kv_spill.h)   |
//     |------------------------- checksums of the above ---------------------------------------|
//     | sums       one a unit of 256 bytes                                                     |
//     |------------------------- derived: made again by kv_recover ----------------------------|
//     | lists      free slots, counters, next expiry                                           |
//     | ..._aux    what belongs to an element above: links, counts, the step of a sequence     |
//     | classes    size classes, their free blocks and slabs                                   |
//     | bits       a block is free, shared, or cached; free_sum: a word has a free block       |
//     | refs       how many references a shared block has                                      |
//     | step_*     sequences and copies of open steps                                          |
//     |----------------------------------------------------------------------------------------|
//     | ids        token ids of the nodes, and of the last block of sequences that is not full |
//     | tables     max_seq_blocks entries a (sequence, group); authoritative from seqs.first   |
//     |            to the committed length, reservations of an open step behind it             |
//     +----------------------------------------------------------------------------------------+
//
// Authoritative words change by the redo record of an operation, all but table entries and token
// ids: these are never in a record, but stored (kv_store) where no reader looks: behind the
// committed length, before seqs.first, in the table of a sequence that is not live, the ids of a
// node that is not live, and in the place of a shared last block that an open step copies, where
// seqs.old_last has the committed entry from before the store until after the commit, or until the
// entry is back.  It may not be otherwise: the newest record is applied again after a crash, and
// would undo what was stored to its words since.
//
// Checksums.  A unit's is the sum of a hash of each of its words that is not 0, with its place; a
// record that changes words holds the new checksums of their units among its writes, so they are
// right whenever the record is applied or not at all.  A table's is the same sum over its committed
// entries from seqs.first on (kv_sum_entry), and changes with these; so has what is kept of a
// sequence's token ids.  A node's key is made of its ids.  Sums, since they follow from what
// is added and taken away, whatever else the unit holds; memory that was never touched sums to 0.
// Loop thread only.
#ifndef ATTND_KVCACHE_KV_LEDGER_H
#define ATTND_KVCACHE_KV_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "kvcache/kv_cache.h"
#include "kvcache/kv_policy.h"
#include "kvcache/kv_slots.h"
#include "proto/err.h"

#define KV_LEDGER_MAGIC UINT64_C(0x7265676465616b76)
#define KV_NEVER        UINT64_MAX

#define KV_CANDIDATE (UINT32_C(1) << 31) // in kv_node_aux.uses: it is in the heap
#define KV_LEAVING   (UINT32_C(1) << 30) // it is being spilled, and in no list

enum {
    KV_OWNER_BITS = 24,
    KV_LEDGER_VERSION = 5,
    KV_SUM_BYTES = 256, // a unit
    KV_SUM_WORDS = KV_SUM_BYTES / 4,
    KV_REPLIES = KV_REPLY_WINDOW + 1, // the highest id and those below it
};

// kv_word is how the ledger is written: it may be a half of a 64-bit field or a part of a name.
typedef uint32_t __attribute__((may_alias)) kv_word;

typedef enum kv_state { KV_FREE, KV_LIVE } kv_state; // zeroed memory is free

// kv_kind is what has handles, and so generations.
typedef enum kv_kind { KV_KIND_SESSION, KV_KIND_STEP, KV_KIND_SEQ, KV_NUM_KINDS } kv_kind;

typedef struct kv_led_head {
    uint64_t magic;
    uint32_t version, reserved;
    uint64_t arena_bytes;
    uint64_t salt; // random, of this ledger
    kv_opts opts;
    uint32_t tops[KV_NUM_KINDS]; // no handle of the kind was ever given out above it
    uint32_t reserved2;
    uint64_t check;     // kv_head_check
    uint32_t published; // number of the newest redo record; not of head_copy
    uint32_t reserved3;
} kv_led_head;

typedef struct kv_led_tenant {
    char name[KV_NAME_BYTES]; // "" = free
    uint32_t quota_blocks;    // in use and cached, 0 = none
    uint32_t floor_blocks;    // that others leave it of what it has
    uint32_t priority;        // of what it caches
} kv_led_tenant;

typedef struct kv_led_model {
    uint32_t state, users;
    kv_model_spec spec; // unused groups and name bytes are zero
} kv_led_model;

typedef struct kv_led_slab {
    uint32_t units; // of KV_BLOCK_UNIT bytes, a block; 0 = unassigned
} kv_led_slab;

typedef struct kv_led_session {
    uint32_t state, generation, tenant, reserved;
    uint8_t secret[KV_SECRET_BYTES];
    uint64_t highest; // request id
} kv_led_session;

typedef struct kv_led_reply {
    uint64_t request, id;
    uint32_t generation; // of the session: replies of an earlier one in the slot do not count
    uint32_t op, num_values, reserved;
} kv_led_reply;

typedef struct kv_led_step {
    uint32_t state, generation;
} kv_led_step;

typedef struct kv_led_seq {
    uint32_t state, generation, tenant, model;
    uint64_t session;   // handle, 0 = held by none
    uint64_t expire_ms; // KV_NEVER while held
    uint64_t ttl_ms;
    uint32_t committed;                 // tokens
    uint32_t known;                     // of them, from the first on, whose ids are known
    uint32_t old_last[KV_MAX_GROUPS];   // committed entry behind a step's copy of it, or KV_NONE
    uint32_t first[KV_MAX_GROUPS];      // first entry of the table that names a block (kv_window.h)
    char name[KV_NAME_BYTES];           // "" = not kept, zero-padded
    uint64_t table_sums[KV_MAX_GROUPS]; // of the committed entries
    uint32_t chain, chain_generation;   // deepest node that it has of the prefix tree, + 1
    uint32_t tail_half;                 // of seq_ids: known ids of the last block, if not full
    uint32_t priority;                  // of what it caches; 0 = the tenant's
    uint64_t tail_sum;                  // checksum of these
} kv_led_seq;

typedef struct kv_led_node {
    uint32_t owner; // model + 1, and the priority << KV_OWNER_BITS; 0 = free
    uint32_t generation;
    uint32_t parent, parent_generation; // node + 1; 0 = it holds the first tokens
    uint32_t key;                       // of the tokens from the first on
    uint32_t entry;                     // of group 0; of the others in node_more
} kv_led_node;

// kv_led_spill belongs to the node of the same index.
typedef struct kv_led_spill {
    uint32_t tier;   // + 1; 0 = its blocks are in the arena
    uint32_t slot;   // in KV_TIER_UNIT
    uint32_t groups; // a bit for each whose block is in the image
    uint32_t reserved;
    uint64_t sum; // of the image
} kv_led_spill;

// Derived.  Links are index + 1, 0 = none.

typedef struct kv_led_lists {
    kv_slots tenants, models, classes, slabs, sessions, steps, seqs, nodes;
    uint64_t next_expiry;
} kv_led_lists;

typedef struct kv_tenant_aux {
    uint32_t blocks; // in use, a shared one once
    uint32_t cached;
} kv_tenant_aux;

typedef struct kv_model_aux {
    uint32_t seqs;
    uint32_t classes[KV_MAX_GROUPS];
    uint32_t root_key;
    uint32_t nodes, first_child;       // of the root
    uint32_t candidates;               // root of their heap (kv_evict.c)
    uint32_t evictable[KV_MAX_GROUPS]; // blocks that would come free if all quiet nodes went
} kv_model_aux;

// kv_node_aux: a node is quiet when nobody uses it or what lies behind it, a candidate when it is
// quiet and nothing lies behind it.
typedef struct kv_node_aux {
    uint32_t uses; // by sequences, steps and pins, and by children that are not quiet;
                   // KV_CANDIDATE, KV_LEAVING
    uint32_t down; // first child; of a candidate, first child in the heap
    uint32_t prev_sibling, next_sibling;
    uint32_t prev_heap, next_heap; // of a candidate; of a parked node, in their list
    kv_rank rank;
} kv_node_aux;

typedef struct kv_session_aux {
    uint32_t first_seq, steps;
} kv_session_aux;

typedef struct kv_seq_aux {
    uint32_t step; // open one
    uint32_t prev, next;
    uint32_t next_name;   // in the bucket of the name
    uint32_t held, depth; // node of the prefix tree that it is a user of, + 1; blocks up to it
} kv_seq_aux;

typedef struct kv_step_aux {
    uint64_t session;
    uint32_t model, num_seqs, num_copies, reserved;
} kv_step_aux;

// kv_step_hit is what the prefix cache gave a sequence of an open step; node + 1, 0 = none.
typedef struct kv_step_hit {
    uint32_t node, blocks;         // the deepest whole one, held by the step; whole ones found
    uint32_t partial;              // of which rows are copied, held by the step
    uint32_t first[KV_MAX_GROUPS]; // seqs.first before the step
} kv_step_hit;

typedef struct kv_class {
    uint32_t units, slab_blocks; // of a block, of a slab
    uint32_t users;              // layer groups
    uint32_t slabs, free, in_use, cached;
    uint32_t first_slab, last_slab; // with a free block
} kv_class;

// kv_bits says of 64 blocks of a slab which are free, and which are shared: in use by more than one
// reference.  Only a shared block's count is looked at, so that taking and giving back blocks that
// have one owner, nearly all, stays within these bits.  An indexed block is a node's; it is cached
// when it has no reference.
typedef struct kv_bits {
    uint64_t free, shared, indexed, cached;
} kv_bits;

typedef struct kv_slab_aux {
    uint32_t units, slab_blocks, class_idx;
    uint32_t free;
    uint32_t prev, next; // of the class's slabs with a free block
    uint32_t evictable;  // blocks of quiet nodes
    uint32_t mark;       // used within a call, else 0
} kv_slab_aux;

struct kv_cache {
    const kv_arena *arena;
    kv_opts opts;
    int fd;
    kv_word *base;  // of the region
    uint64_t bytes; // of the region, most of it never touched
    uint64_t mismatches;
    uint32_t num_slabs, slab_units;
    uint32_t slab_blocks; // most blocks of a slab: block i of slab s is s * slab_blocks + i
    uint32_t free_words, free_sums; // a slab, of bits and of free_sum
    uint32_t redo_cap, redo_writes; // a record; of the record being made
    bool redo_open;
    uint64_t *sum_deltas; // [num_units], by how much the record being made changes them; owned
    uint32_t num_units;
    uint32_t name_buckets;                              // a power of two
    uint32_t key_buckets;                               // a power of two
    uint32_t key_mask;                                  // kv_prefix_set_key_mask
    uint64_t looked_up_tokens, found_tokens, evictions; // kv_info
    const kv_policy *policy;
    kv_policy_state policy_state;
    struct kv_spiller *spiller; // NULL = there are no tiers
    // sections, in order
    kv_led_head *head, *head_copy;
    kv_word *redo; // [2, record]
    kv_led_tenant *tenants;
    kv_led_model *models;
    kv_led_slab *slabs;
    kv_led_session *sessions;
    kv_led_reply *replies; // [max_sessions, KV_REPLIES]
    uint32_t *values;      // [max_sessions, KV_REPLIES, 2 * max_step_seqs]
    kv_led_step *steps;
    kv_led_seq *seqs;
    kv_led_node *nodes;
    uint32_t *node_more; // [KV_MAX_GROUPS - 1, prefix_blocks], entries of the groups behind 0
    kv_led_spill *spills;
    uint64_t *sums; // [num_units]
    kv_led_lists *lists;
    kv_tenant_aux *tenant_aux;
    kv_model_aux *model_aux;
    kv_session_aux *session_aux;
    kv_seq_aux *seq_aux;
    kv_step_aux *step_aux;
    uint32_t *model_next, *class_next, *slab_next, *session_next, *step_next, *seq_next;
    uint32_t *node_next; // of a free node, as those; of a live one, the next in its bucket
    kv_node_aux *node_aux;
    uint32_t *past;  // [prefix_blocks, KV_POLICY_PAST], the policy's
    uint32_t *keys;  // [key_buckets], first node
    uint32_t *names; // [name_buckets], first sequence
    kv_class *classes;
    kv_slab_aux *slab_aux;
    uint64_t *free_sum;     // [num_slabs, free_sums], a bit a word of bits
    kv_bits *bits;          // [num_slabs, free_words]
    uint32_t *refs;         // [num_slabs, slab_blocks], of shared blocks
    kv_step_seq *step_seqs; // [max_steps, max_step_seqs]
    kv_copy *step_copies;   // [max_steps, max_step_seqs * KV_MAX_GROUPS]
    uint32_t *copy_seqs;    // likewise: which sequence of the step
    kv_step_hit *step_hits; // as step_seqs
    uint32_t *node_ids;     // [prefix_blocks, prefix_block_tokens]
    uint32_t *seq_ids;      // [max_seqs, 2, prefix_block_tokens]
    uint32_t *tables;       // [max_seqs, KV_MAX_GROUPS, max_seq_blocks]
};

// kv_ledger_open lays out the region of kv->opts over kv->arena, maps it and fills in the upper
// part of *kv.  fd -1: a new one, all zero.  Else the descriptor of one that was made before, which
// kv owns on success: ATTND_EINVAL when it is not of that size, or not sealed, so that it could
// shrink under us.  ATTND_EINVAL, ATTND_ENOMEM.  kv_ledger_close gives it back.
attnd_err kv_ledger_open(kv_cache *kv, int fd, attnd_errinfo *info);
void kv_ledger_close(kv_cache *kv);

// kv_opts_check checks options; kv_lists_init sets the capacities in zeroed lists.
attnd_err kv_opts_check(const kv_arena *arena, const kv_opts *opts, attnd_errinfo *info);
void kv_lists_init(kv_cache *kv);

// kv_head_check returns the checksum of a head, of what stands before `check`.
uint64_t kv_head_check(const kv_led_head *head);

// kv_head_put puts a head into the open redo record, with its checksum, in both places.
void kv_head_put(kv_cache *kv, kv_led_head head);

// kv_next_generation returns the generation behind one, and puts a new top into the open redo
// record when it passes the old one.
uint32_t kv_next_generation(kv_cache *kv, kv_kind kind, uint32_t generation);

// kv_crash_point is called before every store that a restart could see, in a build that stops there
// (tests define it); else it is nothing.
#ifdef KV_CRASH_POINTS
void kv_crash_point(void);
#else
static inline void kv_crash_point(void) {}
#endif

// kv_store writes a word of a record, or a table entry that no reader looks at.  It is never moved
// across another kv_store.
static inline void kv_store(kv_word *word, uint32_t value) {
    kv_crash_point();
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// kv_table returns the row of a sequence in a group.
static inline uint32_t *kv_table(const kv_cache *kv, uint32_t seq_idx, uint32_t group) {
    return kv->tables + ((uint64_t)seq_idx * KV_MAX_GROUPS + group) * kv->opts.max_seq_blocks;
}

// kv_blocks_of returns how many blocks hold len tokens.
static inline uint32_t kv_blocks_of(uint32_t len, uint32_t block_tokens) {
    return len / block_tokens + (len % block_tokens != 0);
}

// kv_node_entry returns the table entry of a node in a group; KV_NONE when the node is spilled, or
// lacks a block of a group with a window.
static inline uint32_t *kv_node_entry(const kv_cache *kv, uint32_t node, uint32_t group) {
    return group == 0 ? &kv->nodes[node].entry
                      : kv->node_more + (uint64_t)(group - 1) * kv->opts.prefix_blocks + node;
}

// kv_node_ids returns the token ids of a node, as many as a block of its model has.
static inline uint32_t *kv_node_ids(const kv_cache *kv, uint32_t node) {
    return kv->node_ids + (uint64_t)node * kv->opts.prefix_block_tokens;
}

static inline uint32_t kv_node_model(const kv_cache *kv, uint32_t node) {
    return (kv->nodes[node].owner & ((UINT32_C(1) << KV_OWNER_BITS) - 1)) - 1;
}

static inline uint64_t kv_handle(uint32_t generation, uint32_t idx) {
    return (uint64_t)generation << 32 | idx;
}

#endif
