// kv_cache is the owner of the KV cache: an arena cut into slabs of blocks, models and their layer
// groups, sequences with their block tables, sessions and the replies kept for them, tenants and
// quotas.  It knows tokens and bytes, never sockets or kernels.
//
// All its state lies in one position-independent region of 32-bit indices (kv_ledger.h).  Each
// function that changes state checks everything first, then changes what no reader can see yet,
// then makes the change visible by one store, named in its source.  A refused call changes nothing.
//
// Loop thread only, except kv_copy_run.  Time comes from the caller (ms of a monotonic clock).
#ifndef ATTND_KVCACHE_KV_CACHE_H
#define ATTND_KVCACHE_KV_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "kvcache/kv_arena.h"
#include "proto/err.h"

typedef struct kv_cache kv_cache;

enum {
    KV_BLOCK_UNIT = 256, // bytes: a table entry e names the block at arena + e * KV_BLOCK_UNIT
    KV_MAX_GROUPS = 8,   // layer groups of a model
    KV_NAME_BYTES = 64,  // of models, tenants and kept sequences, NUL included
    KV_DIGEST_BYTES = 32,
    KV_SECRET_BYTES = 16,
    KV_MAX_PRIORITY = 255,
    KV_REPLY_WINDOW = 64, // request ids below the highest seen for which replies are kept
};

typedef struct kv_opts {
    uint64_t slab_bytes; // 32 MiB unless configured; a multiple of KV_BLOCK_UNIT
    uint32_t max_blocks; // of all size classes together; a slab holds at most its even share of
                         // them, so smaller blocks leave the rest of their slab unused
    uint32_t max_seqs;
    uint32_t max_seq_blocks; // longest block table
    uint32_t max_models;
    uint32_t max_tenants;
    uint32_t max_sessions;
    uint32_t max_steps;     // open at once
    uint32_t max_step_seqs; // sequences of one step
    // Prefix cache.  A block of more than prefix_block_tokens tokens is never cached.
    uint32_t prefix_blocks;       // cached blocks, those of all groups of a model as one; 0 = none
    uint32_t prefix_block_tokens; // token ids kept a block; 0 only with prefix_blocks
    uint32_t policy;              // index of kv_policies (kv_policy.h)
    // Tokens that a sequence keeps behind the window of its last commit's first row, so that it can
    // be truncated by as many (kv_seq_truncate).  This and policy are free to change over a
    // restart.
    uint32_t window_margin;
} kv_opts;

// kv_create makes a cache over the arena (at most 1 TiB), which is borrowed and must outlive it.
// The caller owns *out: kv_free, which accepts NULL.  ATTND_EINVAL, ATTND_ENOMEM.
attnd_err kv_create(kv_cache **out, const kv_arena *arena, const kv_opts *opts,
                    attnd_errinfo *info);
void kv_free(kv_cache *kv);

// kv_ledger_fd returns the descriptor of the memory that the cache's state lies in.  Who holds it,
// and the arena's, can go on with the cache after this process is gone: kv_recover.
int kv_ledger_fd(const kv_cache *kv);

// kv_salt returns a random number that was made with the ledger and that it keeps.
uint64_t kv_salt(const kv_cache *kv);

// kv_recovered says what kv_recover found.
typedef struct kv_recovered {
    uint32_t models, sessions, seqs;                // served again
    uint32_t lost_models, lost_sessions, lost_seqs; // dropped as damaged
    uint32_t lost_tenants;
    uint32_t prefix_blocks, lost_prefix_blocks; // nodes of the prefix tree
    uint32_t aborted_steps;                     // that were open
    uint64_t blocks;                            // in use
    uint64_t bad_units;                         // of KV_SUM_BYTES, with a wrong checksum
    bool bad_record;                            // the newest redo record was damaged
} kv_recovered;

// kv_recover goes on with the cache of a process that is gone, whose ledger and arena were handed
// over; *out owns fd on success.  Whatever that process was doing, each of its calls was made whole
// or not at all.  Steps that were open are aborted, and the replies to their opening forgotten, so
// that repeating it opens them again.  What is damaged is dropped and counted, the rest is served.
// A session whose replies are damaged goes whole, since a repeat could not be told any more;
// sequences of a session that is gone are freed, or if kept are held by none.  All other sessions
// live on: the caller closes those that nobody comes back to.  Every model has one user, the
// caller, who closes it, too, so that its index stays while sessions come back.
//
// ATTND_EVERSION: of another version.  ATTND_EINVAL: no ledger, made with other options (*info
// names the field), short, or not sealed.  ATTND_ENOMEM, ATTND_EIO.  After these nothing was
// changed that a second try would miss; a cache can be made with kv_create instead.
attnd_err kv_recover(kv_cache **out, const kv_arena *arena, const kv_opts *opts, int fd,
                     uint64_t now_ms, kv_recovered *found, attnd_errinfo *info);

// kv_recover_arena_bytes returns how large the arena was that a ledger is of, before it is opened
// again; 0 when that cannot be told.
uint64_t kv_recover_arena_bytes(int fd);

// ---- tenants

// kv_tenant_set makes a tenant or changes its quota.  quota_blocks counts blocks of any class, in
// use or cached, a shared block once; 0 = no quota.  ATTND_EINVAL (the name is empty or too long),
// ATTND_ENOSPC when max_tenants exist.
attnd_err kv_tenant_set(kv_cache *kv, const char *name, uint32_t quota_blocks, uint32_t *tenant);

// kv_tenant_cache sets how many of the blocks that a tenant has, in use or cached, others leave it
// when they need some, and the priority of what it caches from now on, unless a sequence has a
// lower one: blocks of a lower one are evicted first.  ATTND_EINVAL: no such tenant, or a priority
// above KV_MAX_PRIORITY.
attnd_err kv_tenant_cache(kv_cache *kv, uint32_t tenant, uint32_t floor_blocks, uint32_t priority);

// ---- models

// kv_group_spec is a layer group: layers of one window and KV shape that share blocks.  A block is,
// per layer of the group, K `[kv_heads, block_tokens, k_row_bytes]`, then V of v_row_bytes.
typedef struct kv_group_spec {
    uint32_t layers;
    uint32_t kv_heads;
    uint32_t k_row_bytes; // head_dim * element size
    uint32_t v_row_bytes;
    uint32_t block_tokens;
    int32_t window_left; // tokens that a layer of the group looks back, at most; -1 = unbounded
} kv_group_spec;

// kv_block_bytes returns the bytes that the rows of a block fill, for a group that kv_model_open
// accepted (for others the product may overflow); the block takes them rounded up to KV_BLOCK_UNIT.
static inline uint64_t kv_block_bytes(const kv_group_spec *group) {
    return (uint64_t)group->layers * group->kv_heads * group->block_tokens *
           ((uint64_t)group->k_row_bytes + group->v_row_bytes);
}

// kv_layer_offset returns where in a block K `[kv_heads, block_tokens, k_row_bytes]` and V
// `[kv_heads, block_tokens, v_row_bytes]` of a layer of the group begin, in bytes.
static inline void kv_layer_offset(const kv_group_spec *group, uint32_t layer_in_group,
                                   uint64_t *k_off, uint64_t *v_off) {
    uint64_t rows = (uint64_t)group->kv_heads * group->block_tokens;
    *k_off = layer_in_group * rows * ((uint64_t)group->k_row_bytes + group->v_row_bytes);
    *v_off = *k_off + rows * group->k_row_bytes;
}

typedef struct kv_model_spec {
    char name[KV_NAME_BYTES];
    uint8_t digest[KV_DIGEST_BYTES]; // of weights and geometry; equal name needs equal digest
    uint32_t tenant;                 // models are a tenant's own
    uint32_t num_groups;
    kv_group_spec groups[KV_MAX_GROUPS];
} kv_model_spec;

// kv_model_open finds the tenant's model of that name or makes it, and counts one more user.
// ATTND_EEXIST when the name exists with another digest or geometry; ATTND_EINVAL, also for a block
// larger than a slab; ATTND_ENOSPC when max_models exist.
attnd_err kv_model_open(kv_cache *kv, const kv_model_spec *spec, uint32_t *model,
                        attnd_errinfo *info);
// kv_model_close counts one user less; without users and sequences the model is forgotten once its
// cached prefixes are gone, which then make way for another model of its name, too.
attnd_err kv_model_close(kv_cache *kv, uint32_t model);
// kv_model_is_new says whether a model has one user and neither sequences nor cached prefixes.
bool kv_model_is_new(const kv_cache *kv, uint32_t model);
// kv_model_get returns the spec, NULL for an index that is no model.
const kv_model_spec *kv_model_get(const kv_cache *kv, uint32_t model);

// ---- sessions and kept replies

// kv_session_open makes a session; id is never used twice, secret comes from the caller.
// ATTND_EINVAL: no such tenant.  ATTND_EBUSY: max_sessions are open.
attnd_err kv_session_open(kv_cache *kv, uint32_t tenant, const uint8_t secret[KV_SECRET_BYTES],
                          uint64_t *session);
// kv_session_close frees the session's sequences that are not kept and detaches the others.  Its
// steps must have been aborted or committed, else ATTND_EBUSY.  A second close is ATTND_ESTALE.
attnd_err kv_session_close(kv_cache *kv, uint64_t session, uint64_t now_ms);

typedef struct kv_session_info {
    uint64_t session;
    uint32_t tenant, num_seqs;
    uint8_t secret[KV_SECRET_BYTES];
    uint64_t highest; // request id seen
} kv_session_info;
// kv_session_highest returns the highest request id that a session has used, 0 for none.
uint64_t kv_session_highest(const kv_cache *kv, uint64_t session);
// kv_session_next walks the sessions (*cursor starts at 0; false at the end).
bool kv_session_next(const kv_cache *kv, uint32_t *cursor, kv_session_info *out);

typedef enum kv_op {
    KV_OP_CREATE = 1,
    KV_OP_FORK,
    KV_OP_TRUNCATE,
    KV_OP_FREE,
    KV_OP_KEEP,
    KV_OP_ATTACH,
    KV_OP_STEP,
    KV_OP_COMMIT,
    KV_OP_ABORT,
} kv_op;

// kv_reply is what a state-changing request answered: enough to build its wire reply again.
typedef struct kv_reply {
    uint64_t request; // id
    uint32_t op;      // kv_op
    uint32_t num_values;
    uint64_t id;            // the sequence made, or the step
    const uint32_t *values; // FORK, ATTACH: committed length.  STEP: (committed, cached) per
                            // sequence.  COMMIT: committed length per sequence
} kv_reply;

// kv_request says under which id a call is made; its reply is kept in the call's committing store.
// request 0 = nothing is kept.  session 0 = attnd itself, with request 0: it may free a sequence
// and commit or abort a step, whoever holds it.  A call under an id that was answered before is
// refused with ATTND_EEXIST, under one below the window, or of a session that is gone, with
// ATTND_ESTALE.
typedef struct kv_request {
    uint64_t session;
    uint64_t request;
} kv_request;

// kv_reply_find: OK and *out filled when the request was answered before; ATTND_ENOENT when it is
// new; ATTND_ESTALE when its id is below the window or the session is gone.  *out is borrowed until
// the next state-changing call.
attnd_err kv_reply_find(const kv_cache *kv, kv_request rq, kv_reply *out);

// ---- sequences
//
// A handle is (generation << 32 | index).  Each function takes the caller's session and answers
// ATTND_ESTALE for a handle that is gone or another tenant's, ATTND_EBUSY for one that has an open
// step (free, truncate, keep) or is held by another session, ATTND_EPERM for one that is held by
// none: it must be attached first.  ATTND_EBUSY, too, when no more sequences are possible.

attnd_err kv_seq_create(kv_cache *kv, kv_request rq, uint32_t model, uint64_t *seq,
                        attnd_errinfo *info);
// kv_seq_create_priority has blocks that the sequence, or a fork of it, caches or finds cached have
// at least this priority, at most the tenant's; 0 = the tenant's, as kv_seq_create.  ATTND_EINVAL:
// above KV_MAX_PRIORITY.
attnd_err kv_seq_create_priority(kv_cache *kv, kv_request rq, uint32_t model, uint32_t priority,
                                 uint64_t *seq, attnd_errinfo *info);
// kv_seq_fork makes a sequence that shares all committed blocks that are left; the first write
// copies.
attnd_err kv_seq_fork(kv_cache *kv, kv_request rq, uint64_t seq, uint64_t *forked,
                      uint32_t *committed, attnd_errinfo *info);
// kv_seq_truncate sets the committed length to len (at most what it is) and gives blocks back.  In
// a layer group with a window, len must not be further back than the place where the last commit
// began, less window_margin: what rows from there on see may have been given back, then it is
// ATTND_ENOTSUP (kv_window.h).  Length 0 is always possible.
attnd_err kv_seq_truncate(kv_cache *kv, kv_request rq, uint64_t seq, uint32_t len,
                          attnd_errinfo *info);
attnd_err kv_seq_free(kv_cache *kv, kv_request rq, uint64_t seq, attnd_errinfo *info);
// kv_seq_keep names a sequence, so that it outlives its session by ttl_ms (0 = for ever).  The
// empty name makes it unkept again.  ATTND_EEXIST when the tenant has that name for another one.
attnd_err kv_seq_keep(kv_cache *kv, kv_request rq, uint64_t seq, const char *name, uint64_t ttl_ms,
                      attnd_errinfo *info);
// kv_seq_attach makes the session the holder of a kept sequence.  ATTND_ENOENT, ATTND_EBUSY.
attnd_err kv_seq_attach(kv_cache *kv, kv_request rq, uint32_t model, const char *name,
                        uint64_t *seq, uint32_t *committed, attnd_errinfo *info);

typedef struct kv_seq_info {
    uint64_t seq, session; // session 0 = held by none
    uint32_t model, committed, blocks, priority;
    bool in_step;
    char name[KV_NAME_BYTES]; // "" = not kept
    uint64_t ttl_ms;
} kv_seq_info;
// kv_seq_get answers for one handle of the session's tenant (session 0: of any); kv_seq_next walks
// a tenant's sequences (*cursor starts at 0; false at the end).
attnd_err kv_seq_get(const kv_cache *kv, uint64_t session, uint64_t seq, kv_seq_info *out);
bool kv_seq_next(const kv_cache *kv, uint32_t tenant, uint32_t *cursor, kv_seq_info *out);

// kv_expire frees kept sequences whose time is over; returns the next such time, UINT64_MAX = none.
uint64_t kv_expire(kv_cache *kv, uint64_t now_ms);

// ---- steps

typedef struct kv_step_seq {
    uint64_t seq;
    uint32_t new_len;       // tokens to append, cached ones included
    uint32_t reserve;       // extra slots
    uint32_t q_len;         // of a sequence that appends nothing: rows that will be read
    const uint32_t *tokens; // [new_len] ids, to be looked up in the prefix cache; NULL = none.
                            // Borrowed during the call
    // filled by kv_step_open
    uint32_t committed; // before the step
    uint32_t cached;    // of new_len, found in the prefix cache
} kv_step_seq;

// kv_copy is a copy of token rows, all layers and heads of a group, between blocks of one arena.
typedef struct kv_copy {
    uint32_t model, group;
    uint32_t src, dst;                         // table entries
    uint32_t src_token, dst_token, num_tokens; // within the blocks
} kv_copy;

// kv_step_open reserves every block for all groups of all sequences, or nothing.  seqs [num_seqs]
// is read and filled.  ATTND_ENOSPC: *may_wait says whether the step could fit once others give
// blocks back; false when it is larger than the pool, the quota or a sequence's table (more than
// max_seq_blocks in a group, or 2^31 - 1 tokens).  *may_wait is set with ATTND_ENOSPC only.
// With tiers *may_wait says before the call whether the caller would wait.  If so, ATTND_ENOSPC
// with *may_wait is the answer, too, while blocks that the step needs are being copied from or to a
// tier; a caller who cannot wait any longer asks again without, and is served with what is there.
// ATTND_EBUSY: a sequence has an open step, or max_steps are open.  ATTND_ENOTSUP, field "q_len":
// rows to be read see tokens that were given back (kv_window.h).  ATTND_EINVAL: a sequence is
// twice in the step, or of another model.  ATTND_EMSGSIZE: more than max_step_seqs.  ATTND_ENOTSUP:
// tokens of a model whose prefixes cannot be cached (*info says why).  A partial last block that is
// shared, or cached, gets a block of its own; the copies that must run before the first attend are
// *copies [*num_copies], borrowed until the step ends.
//
// Of tokens that are given the cached ones are found, at most new_len - 1: whole blocks behind the
// committed ones, which are taken over, and the first rows of one more, which are copied.  They
// stay until the step ends whatever else happens.  Nothing is found for a sequence that does not
// end with a full block, or of which some ids are not known.
attnd_err kv_step_open(kv_cache *kv, kv_request rq, uint32_t model, kv_step_seq *seqs,
                       uint32_t num_seqs, uint64_t *step, const kv_copy **copies,
                       uint32_t *num_copies, bool *may_wait, attnd_errinfo *info);

// kv_step_get returns the step's sequences [*num_seqs] and its model, NULL for a step that is gone
// or another session's (session 0: of any).  Borrowed until the step ends.
const kv_step_seq *kv_step_get(const kv_cache *kv, uint64_t session, uint64_t step,
                               uint32_t *num_seqs, uint32_t *model);

// kv_step_table returns the block table of sequence i of the step in a group, *num_entries long,
// copies already in place.  Entries behind the window of the step's first row may be UINT32_MAX: no
// block.  Borrowed until the step ends.
const uint32_t *kv_step_table(const kv_cache *kv, uint64_t step, uint32_t i, uint32_t group,
                              uint32_t *num_entries);

// kv_step_moves lists the copies that gather the accepted nodes path [num_path] of sequence i
// behind its committed and cached tokens, in all groups; they must have run, in order, before the
// commit. Path indices ascend and count the rows: new tokens behind the cached ones.  A copy may
// overlap itself.  ATTND_EINVAL; ATTND_EMSGSIZE when there are more than max.
attnd_err kv_step_moves(const kv_cache *kv, uint64_t step, uint32_t i, const uint32_t *path,
                        uint32_t num_path, kv_copy *out, uint32_t max, uint32_t *num,
                        attnd_errinfo *info);

// kv_step_commit makes accepted[i] of the new tokens count (never fewer than the cached ones),
// gives the other slots back, and blocks that no row behind the first one accepted sees
// (kv_window.h), and ends the step.
attnd_err kv_step_commit(kv_cache *kv, kv_request rq, uint64_t step, const uint32_t *accepted,
                         uint32_t num_accepted, attnd_errinfo *info);

// kv_step_commit_ids is kv_step_commit for a step of which ids are known: tokens[i] (NULL = not
// known) are those of the accepted new tokens of sequence i, the cached ones included, and their
// rows are what rows of these tokens at these places always are.  Blocks that are full now enter
// the prefix cache, if the ids of all tokens before them are known, too.
attnd_err kv_step_commit_ids(kv_cache *kv, kv_request rq, uint64_t step, const uint32_t *accepted,
                             const uint32_t *const *tokens, uint32_t num_accepted,
                             attnd_errinfo *info);

// kv_step_abort gives all slots back and ends the step.  No launch of it may be running.
attnd_err kv_step_abort(kv_cache *kv, kv_request rq, uint64_t step);

// kv_copy_run does the copies in the arena, in order, by its table: see there when they are made,
// and by which thread.  The blocks are the caller's.  A copy within one block goes down.
attnd_err kv_copy_run(const kv_cache *kv, const kv_copy *copies, uint32_t num_copies,
                      attnd_errinfo *info);

// ---- tiers (kv_tier.h)

typedef struct kv_tier kv_tier;

enum { KV_MAX_TIERS = 2 };

// kv_tiers_start has cached blocks that must make way spilled to the tiers [num], first to the
// first, from which they go on to the next when that is nearly full, and fetched when a step looks
// them up; both only for steps that would wait, see kv_step_open.  The tiers are borrowed until
// kv_tiers_stop, and nobody else puts jobs into them. The ledger knows a tier by its index, which
// is to be the same in each run; NULL = not there. Of a recovered cache it takes over what its
// ledger says is in the tiers; blocks whose image cannot be there are dropped, and counted as lost.
// num 0 drops all.  Call it once, before the first step. ATTND_ENOMEM.
attnd_err kv_tiers_start(kv_cache *kv, kv_tier *const *tiers, uint32_t num, attnd_errinfo *info);

// kv_tiers_poll takes in the copies that have ended; to be called when a tier tells so.  True when
// steps that wait should be tried again.
bool kv_tiers_poll(kv_cache *kv);

// kv_tiers_stop forgets the tiers; they were closed before.
void kv_tiers_stop(kv_cache *kv);

typedef struct kv_spill_info {
    uint64_t spilled;            // blocks in tiers
    uint64_t spilling, fetching; // blocks in use that are being copied there, or back
    uint64_t spills, fetches;    // blocks, since the start
    uint64_t moves;              // of them, from a tier to the next one
    uint64_t dropped;            // nodes of the prefix tree that made way for newer ones in a tier
    uint64_t failed;             // copies to a tier that failed
    uint64_t lost;               // blocks whose image was gone, damaged, or in a tier that is off
} kv_spill_info;
void kv_spill_get_info(const kv_cache *kv, kv_spill_info *out);

// ---- accounting

typedef struct kv_class_info {
    uint64_t block_bytes;
    uint32_t slabs, total, free, cached, in_use; // blocks, of the slabs that the class holds
} kv_class_info;

typedef struct kv_info {
    uint32_t total, free, cached, in_use; // blocks, sums over the classes
    uint64_t arena_bytes, slab_bytes, in_use_bytes, cached_bytes;
    uint32_t slabs, unassigned_slabs;
    uint32_t num_classes, seqs, models, sessions, steps;
    uint32_t prefix_blocks; // nodes of the prefix tree, in use or not
    // Since the start: tokens of steps that were opened, those of them that were found, and nodes
    // that were evicted.
    uint64_t looked_up_tokens, found_tokens, evictions;
    uint64_t mismatches; // accounting checks that failed since the start
} kv_info;
void kv_get_info(const kv_cache *kv, kv_info *out);
attnd_err kv_class_get(const kv_cache *kv, uint32_t i,
                       kv_class_info *out); // ATTND_ENOENT at the end
attnd_err kv_tenant_get(const kv_cache *kv, uint32_t tenant, char name[KV_NAME_BYTES],
                        uint32_t *blocks, uint32_t *quota_blocks); // ATTND_ENOENT at the end
uint32_t kv_tenant_cached(const kv_cache *kv, uint32_t tenant);    // blocks, of one that exists

// kv_check_fast compares the counters (free + cached + in_use = total in every class,
// slabs of all classes + unassigned = slabs); false counts a mismatch.  For every idle point.
bool kv_check_fast(kv_cache *kv);
// kv_check_full recounts everything from tables and reference counts; says what is wrong in *info.
bool kv_check_full(const kv_cache *kv, attnd_errinfo *info);

#endif
