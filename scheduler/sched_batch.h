// sched_batch forms a launch from what waits, in arrays that were made at the start, and remembers
// whose it is.  Loop thread only.
#ifndef ATTND_SCHEDULER_SCHED_BATCH_H
#define ATTND_SCHEDULER_SCHED_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "scheduler/sched.h"
#include "scheduler/sched_queue.h"

typedef struct sched_batch {
    sched_launch launch;
    sched_req **reqs; // [num_reqs] of [max_reqs]: a request is in a launch at most once
    uint32_t num_reqs;
    sched_kind kind; // of the launch, when it has rows
    int64_t decode_tokens, prefill_tokens;
    uint64_t prefill_work; // query tokens * keys, of prefills
    bool in_use;
    // private
    attn_row *rows;    // [max_rows]
    kv_copy *copies;   // [SCHED_LAUNCH_COPIES]
    uint64_t *signals; // [max_reqs]
    uint32_t max_rows;
    int32_t chunk_tokens, alone_tokens;
    uint64_t room;       // of the turn
    int64_t outstanding; // of the turn
} sched_batch;

// sched_batch_init makes the arrays; sched_batch_fini frees them, also of a batch that is all zero
// or half made.  ATTND_ENOMEM.
attnd_err sched_batch_init(sched_batch *b, const sched_opts *opts);
void sched_batch_fini(sched_batch *b);

// sched_turn says for which launch and when.
typedef struct sched_turn {
    uint64_t launch_no; // 1 and up, never the same twice
    uint64_t now_us;
    bool prefill_first;  // the oldest prefill's turn, whatever waits
    uint64_t room;       // work that a launch of prefills alone may do; 0 = no more than a chunk
    int64_t outstanding; // query tokens of the prefills that are outstanding
} sched_turn;

// sched_batch_form fills an empty batch: first the requests with copies only (list copies), then,
// when all of those went in, rows of one shape and kind from the queue.  Requests of which nothing
// remains leave their list, and each one's running is counted up.  False when nothing waits, or it
// is the turn of a prefill that has no room beside those outstanding.
bool sched_batch_form(sched_batch *b, sched_queue *q, list_node *copies, const sched_turn *turn);

// sched_batch_left is true when the request has query tokens that are in no launch yet.
bool sched_batch_left(const sched_req *req);

// sched_batch_prefill_tokens returns the query tokens of a launch of prefills; of another, 0.
int64_t sched_batch_prefill_tokens(const sched_batch *b);

#endif
