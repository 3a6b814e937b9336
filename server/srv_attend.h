// srv_attend runs one attend of an open step: it reads q, k and v in place from the request's
// message, makes the reply that the output is written into, and gives the rows to the scheduler.
// Shared by attend, decode and prefill; its second half by attend_all, too.  Loop thread only.
#ifndef ATTND_SERVER_SRV_ATTEND_H
#define ATTND_SERVER_SRV_ATTEND_H

#include "server/srv_core.h"

// srv_attend_ask is what the request asks for.
typedef struct srv_attend_ask {
    uint32_t layer, flags; // PROTO_ATTEND_*
    const proto_tensor *q, *k, *v;
    size_t fixed; // bytes of the body in front of the tensors
    uint32_t block_mask_off;
    uint32_t num_lens;     // committed lengths that the reply ends with; 0 = none
    bool recompute;        // the step is read only, though k and v may be there: ignore them
    const kv_copy *copies; // to run first
    uint32_t num_copies;
    // done is told how it went, when the layer is marked as attended.  reply is the body of the
    // reply, complete but for its lens; it must be sent or replaced.  After an error reply is NULL.
    void (*done)(srv_request *rq, attnd_err err, proto_attend_reply *reply,
                 const attnd_errinfo *info);
} srv_attend_ask;

// srv_attend starts it; done is called once, from inside or later.
void srv_attend(srv_core *core, srv_request *rq, srv_step *step, const srv_attend_ask *ask);

// srv_attend_layer runs a layer whose tensors are known: rq->attend is filled in, all of it.  Its
// done is called as above, once the layer's number was found good or not.
void srv_attend_layer(srv_core *core, srv_request *rq);

// srv_attend_prepare checks a layer whose flag has not come yet, and has the backend prepare it, if
// it is a decode; then rq->attend.ticket is the ticket, which must not be 0.  Must be taken back by
// srv_attend_forget, unless the layer is run.  With a flag (NULL = none) the backend may run it by
// itself once that is raised; forget is true when it has begun to.
void srv_attend_prepare(srv_core *core, srv_request *rq, uint64_t ticket, const srv_ahead *ahead);
bool srv_attend_forget(srv_core *core, srv_request *rq);

// srv_attend_began marks the layer as being attended, which the backend has begun by itself;
// srv_attend_ended tells how that ended, and done follows.  srv_attend_missed takes began back: the
// layer was not run.
void srv_attend_began(srv_request *rq);
void srv_attend_missed(srv_request *rq);
void srv_attend_ended(srv_core *core, srv_request *rq, const sched_launch *launch);

// srv_attend_cut_us is how a reply tells a time.
static inline uint32_t srv_attend_cut_us(uint64_t us) {
    return us < UINT32_MAX ? (uint32_t)us : UINT32_MAX;
}

// srv_attend_must_wait is true while an attend of this layer is under way, of the one whose K and V
// it reads, or of one that reads its: a stream may have gone on by the device's word already.
bool srv_attend_must_wait(const srv_step *step, uint32_t layer);

// srv_attend_appends is true when a layer of the step gets new K and V of its own.
bool srv_attend_appends(const srv_step *step, uint32_t layer);

#endif
