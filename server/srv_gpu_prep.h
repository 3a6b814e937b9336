// srv_gpu_prep is the launch that srv_gpu prepares before it comes, and may begin by itself when a
// client's flag is raised.
//
//     NONE --want--> WANTED --fill--> READY --take, its flag is raised--> BEGUN --settle--> NONE
//                                       |--gate, before it is raised---------->|
//                                       '------claim, by any other launch-------------------'
//
// Loop thread: want, forget, unwatch, begun, any_begun, watched, is_own, settle.  Submit thread:
// is_wanted, fill, spoil, watch, take, follows, has_gate, gate, raised, consume, claim.  No lock is
// taken by is_wanted, begun, any_begun, watched and is_own; nor by follows, has_gate, raised and
// consume: from fill on, and until settle, `ahead` does not change but for its flag, which the loop
// may take away until the launch is BEGUN.
#ifndef ATTND_SERVER_SRV_GPU_PREP_H
#define ATTND_SERVER_SRV_GPU_PREP_H

#include <pthread.h>

#include "server/srv_backend.h"
#include "server/srv_stage.h"

typedef enum srv_gpu_prep_state {
    SRV_GPU_PREP_NONE,
    SRV_GPU_PREP_WANTED, // rows are there
    SRV_GPU_PREP_READY,  // they are in a buffer, planned and on their way to the device
    SRV_GPU_PREP_BEGUN,  // its own launch is under way
} srv_gpu_prep_state;

// srv_gpu_prep: private, but for embedding.
typedef struct srv_gpu_prep {
    pthread_mutex_t lock; // guards all below
    srv_gpu_prep_state state;
    uint64_t ticket; // 0 = forgotten
    attn_params params;
    attn_row *rows; // [max_rows]
    uint32_t max_rows;
    srv_ahead ahead; // flag NULL = it waits to be told
    attn_choice choice;
    sched_launch launch; // that was begun
    // to be looked at without the lock
    uint32_t wanted; // state is WANTED
    uint64_t begun;  // ticket of what is BEGUN, else 0
    uint64_t watched;
} srv_gpu_prep;

// ATTND_ENOMEM.  fini accepts what init refused.
attnd_err srv_gpu_prep_init(srv_gpu_prep *p, uint32_t max_rows);
void srv_gpu_prep_fini(srv_gpu_prep *p);

// srv_gpu_prep_want replaces what was wanted before, and is true when there is something to fill.
// What is in a buffer already stays until a launch comes.
bool srv_gpu_prep_want(srv_gpu_prep *p, const attn_params *params, uint64_t ticket,
                       const srv_ahead *ahead);

// srv_gpu_prep_forget makes sure that nobody reads the rows' arrays or the flag any more; true:
// that is too late, the launch has begun.
bool srv_gpu_prep_forget(srv_gpu_prep *p, uint64_t ticket);

// srv_gpu_prep_unwatch only has the flag left alone; true: too late.
bool srv_gpu_prep_unwatch(srv_gpu_prep *p, uint64_t ticket);

bool srv_gpu_prep_is_wanted(const srv_gpu_prep *p);
bool srv_gpu_prep_begun(const srv_gpu_prep *p, uint64_t ticket);
bool srv_gpu_prep_any_begun(const srv_gpu_prep *p);
// srv_gpu_prep_watched is true while the submit thread looks at the flag of that ticket.
bool srv_gpu_prep_watched(const srv_gpu_prep *p, uint64_t ticket);

// srv_gpu_prep_is_own says whether a launch that has ended is the one that was begun; settle then
// makes room for the next one.
bool srv_gpu_prep_is_own(const srv_gpu_prep *p, const sched_launch *launch);
void srv_gpu_prep_settle(srv_gpu_prep *p);

// srv_gpu_prep_fill fills and plans what is wanted, if it fits the buffer whole; true: it is to be
// uploaded.  *watches: it has a flag.
bool srv_gpu_prep_fill(srv_gpu_prep *p, srv_stage *stage, const attn_device_ops *ops,
                       attn_device *device, uint32_t buffer, bool *watches);

// srv_gpu_prep_spoil is told that the upload has failed: what is in the buffer is no launch's.
void srv_gpu_prep_spoil(srv_gpu_prep *p);

// srv_gpu_prep_watch says whether take is called all the time from now on.
void srv_gpu_prep_watch(srv_gpu_prep *p, bool on);

// srv_gpu_prep_take returns the launch of what is READY when its flag is raised, and lowers it;
// else NULL.  The launch is the submit thread's until it is handed to the loop.
sched_launch *srv_gpu_prep_take(srv_gpu_prep *p);

// srv_gpu_prep_follows says whether the layer before that of what was filled had just run.
// srv_gpu_prep_has_gate, whether what is READY may be begun before its flag is raised, by a
// launch that waits for it on the device, which is what gate returns; NULL: it is not READY any
// more.  raised says whether the flag of such a launch is raised; consume lowers it once its gate
// has passed; false: it has not been raised yet.
bool srv_gpu_prep_follows(const srv_gpu_prep *p);
bool srv_gpu_prep_has_gate(const srv_gpu_prep *p);
sched_launch *srv_gpu_prep_gate(srv_gpu_prep *p);
bool srv_gpu_prep_raised(const srv_gpu_prep *p);
bool srv_gpu_prep_consume(srv_gpu_prep *p);

// srv_gpu_prep_claim ends the preparation, if there is one, before a launch of the loop's; true: it
// is the launch's, and in its buffer.  *spoils: it is in the buffer, but another launch's.
bool srv_gpu_prep_claim(srv_gpu_prep *p, srv_stage *stage, sched_launch *launch, bool *spoils);

#endif
