// srv_commit makes the rows of a step count, for commit and for a step that carries one.
// Loop thread only.
#ifndef ATTND_SERVER_SRV_COMMIT_H
#define ATTND_SERVER_SRV_COMMIT_H

#include "server/srv_core.h"

// srv_commit reads the proto_commit at off of the request's message, and commits under request id
// `id`.  then is called once, from inside or later, with the committed lengths [num_lens] (borrowed
// until it returns) or an error; info is never NULL.  A repeated id is told as a success with the
// kept lengths.
void srv_commit(srv_core *core, srv_request *rq, uint32_t off, uint64_t id, srv_committed_cb *then);

// srv_step_copy gives copies to the scheduler as a request of the step; done must end with
// srv_step_done.  On failure done is not called.
attnd_err srv_step_copy(srv_core *core, srv_step *step, const kv_copy *copies, uint32_t num_copies,
                        void (*done)(sched_req *req, attnd_err err, const attn_choice *choice,
                                     const attnd_errinfo *info),
                        attnd_errinfo *info);

#endif
