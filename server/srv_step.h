// srv_step is an open step: which rows its attends have, what was copied from the client for them,
// which layers are done, and what still runs.  Its blocks are the cache's.  Pools sized at start;
// loop thread only.
//
//     OPENING -> OPEN -> COMMITTING -> gone
//         '--------'---------'-> ENDING -> gone      canceled, expired, or its session lost
//                  '-> LATE -----^                   expired, and attended in another process
#ifndef ATTND_SERVER_SRV_STEP_H
#define ATTND_SERVER_SRV_STEP_H

#include "attention/attn_rows.h"
#include "proto/log.h"
#include "scheduler/sched_wait.h"
#include "server/srv_model.h"
#include "server/srv_request.h"

typedef struct srv_core srv_core;

typedef enum srv_step_state {
    SRV_STEP_FREE,
    SRV_STEP_OPENING, // waits for its blocks, or for copies before its first attend
    SRV_STEP_OPEN,
    SRV_STEP_COMMITTING, // moves of accepted rows run
    // Past its deadline, in process: it cannot be committed any more, but only its client knows
    // when nothing writes to its blocks.  They stay its own until the client cancels it or is gone.
    SRV_STEP_LATE,
    SRV_STEP_ENDING, // to be aborted once nothing of it runs
} srv_step_state;

enum { SRV_LAYER_WORDS = PROTO_MAX_LAYERS / 64 };

// srv_committed_cb is told how a commit went: committed lengths [num_lens], or an error.  info is
// never NULL.
typedef void srv_committed_cb(srv_request *rq, attnd_err err, const uint32_t *lens,
                              uint32_t num_lens, const attnd_errinfo *info);

// srv_step_ids is what of a sequence of a step is of use to the prefix cache; in the step's memory.
typedef struct srv_step_ids {
    uint32_t *tokens; // [new_len] ids, NULL = not known
    // of the commit under way: accepted rows [accepted - cached], NULL = the first ones; where in
    // the message they are said
    uint32_t *path;
    uint32_t path_off;
} srv_step_ids;

struct srv_step {
    list_node node; // in session->steps, or in the free list
    srv_step_state state;
    // decode, prefill (srv_ops_attend1.c): nobody but its own request knows the step
    bool once, recompute;
    bool in_process; // its client attends it: it gets the tables, and says when it is whole
    uint64_t commit_id;
    uint64_t handle; // of kv_cache; 0 = has no blocks yet
    srv_session *session;
    const srv_model *model;
    uint32_t model_idx;
    uint64_t deadline_ms;          // 0 = none
    uint64_t tiers_ms;             // until when it would wait for tiers; 0 = it was not tried yet
    kv_step_seq *kv_seqs;          // [num_seqs]
    attn_seq *seqs;                // [num_seqs]; positions and trees in memory
    uint32_t *active;              // [num_active] sequences with rows: the rows of a launch
    srv_step_ids *ids;             // [num_seqs]
    const uint32_t **accepted_ids; // [num_seqs], for kv_step_commit_ids
    uint32_t num_seqs, num_active;
    uint32_t rows, new_rows; // of all sequences
    uint32_t running;        // attends and copies of it in the scheduler
    uint32_t armed;          // attend_alls under way, which may wait for flags
    uint32_t num_attended;
    uint64_t attended[SRV_LAYER_WORDS], attending[SRV_LAYER_WORDS]; // a bit a layer
    uint8_t *memory;                                                // [steps.memory_bytes]
    size_t memory_used, memory_mark; // mark: before the commit under way
    uint32_t num_masks; // block masks of attends under way (srv_block_mask.h), which lie in memory
    size_t masks_mark;  // from here on
    // opening: the request that wants it, the id its reply is kept under, and who is told
    srv_request *request;
    uint64_t kept_id; // 0 = none
    void (*opened)(srv_step *step, attnd_err err, const attnd_errinfo *info);
    sched_waiter waiter;
    // copies before the first attend; moves before the commit
    const kv_copy *copies;
    uint32_t num_copies;
    sched_req copy_req;
    uint32_t *accepted; // [num_seqs], in memory; of the commit under way (srv_commit.c)
    srv_committed_cb *committed;
    list_node cancels; // requests that wait for its end, srv_request.wait_node
};

typedef struct srv_steps {
    srv_step *pool; // [max]
    list_node free;
    srv_step **by_index; // [max], by the low half of the cache's handle
    uint32_t max, num_open;
    attnd_log_rate late; // lines about steps past their deadline
    size_t memory_bytes; // of one step
    kv_step_seq *kv_seqs;
    attn_seq *seqs;
    uint32_t *active;
    srv_step_ids *ids;
    const uint32_t **accepted_ids;
    uint8_t *memory;
} srv_steps;

attnd_err srv_steps_init(srv_steps *t, uint32_t max, uint32_t max_seqs, size_t memory_bytes);
void srv_steps_fini(srv_steps *t);

// srv_step_take takes a step from the pool for num_seqs sequences, all zero.  ATTND_EBUSY.
attnd_err srv_step_take(srv_core *core, srv_session *session, uint32_t num_seqs, srv_step **out,
                        attnd_errinfo *info);

// srv_step_alloc returns bytes of the step's memory, 8-aligned, NULL when it is used up.
void *srv_step_alloc(srv_core *core, srv_step *step, size_t bytes);

// srv_step_open asks for the step's blocks, waiting for them until its deadline.  kv_seqs, seqs
// (positions and trees), model, deadline_ms, request, kept_id and opened are filled in.  opened is
// called once, from inside or later; after an error the step is gone.
void srv_step_open(srv_core *core, srv_step *step);

// srv_step_find_late returns a step of the session that is LATE, or what srv_step_find does.
srv_step *srv_step_find_late(const srv_core *core, const srv_session *session, uint64_t handle);

// srv_step_find returns an open step of the session, NULL when it is gone, another's, or not open
// yet.
srv_step *srv_step_find(const srv_core *core, const srv_session *session, uint64_t handle);

// srv_step_settle gives the blocks of a step back that is ENDING and has nothing running.
void srv_step_settle(srv_core *core, srv_step *step);

// srv_step_done tells that an attend or copy of the step has left the scheduler, and settles it.
void srv_step_done(srv_core *core, srv_step *step);

// srv_step_end aborts a step: what waits in the scheduler is canceled, what runs is awaited, then
// its blocks are given back and the requests in `cancels` are answered.
void srv_step_end(srv_core *core, srv_step *step);

// srv_step_release returns a step to the pool whose blocks are committed or were never had.
void srv_step_release(srv_core *core, srv_step *step);

// srv_steps_expire ends steps past their deadline; returns the next deadline, UINT64_MAX = none.
uint64_t srv_steps_expire(srv_core *core, uint64_t now_ms);

static inline bool srv_layer_bit(const uint64_t *set, uint32_t layer) {
    return set[layer / 64] >> (layer % 64) & 1;
}

#endif
