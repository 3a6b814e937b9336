// srv_step_read reads the body of a step into a step from the pool: sequences, positions, tree
// masks and token ids, each copied once and then checked.  Loop thread only.
#ifndef ATTND_SERVER_SRV_STEP_READ_H
#define ATTND_SERVER_SRV_STEP_READ_H

#include "server/srv_core.h"

// srv_step_read takes a step from the pool and fills in what srv_step_open wants, except request,
// kept_id and opened.  On failure nothing is taken.  EINVAL, EPROTO, EMSGSIZE, ENOENT, EBUSY.
attnd_err srv_step_read(srv_core *core, const srv_request *rq, const proto_step *body,
                        srv_step **out, attnd_errinfo *info);

// srv_step_read_positions copies int32 positions [rows] at off (0 = none) for sequence i, rows
// known from its new_len or q_len.  fixed is as in proto_array.
attnd_err srv_step_read_positions(srv_core *core, srv_step *step, const srv_request *rq, uint32_t i,
                                  uint32_t off, size_t fixed, attnd_errinfo *info);

// srv_step_set_model fills in the model and the deadline.  ENOENT.
attnd_err srv_step_set_model(srv_step *step, uint32_t model, uint32_t deadline_ms,
                             attnd_errinfo *info);

// srv_step_set_lens checks new_len and q_len of sequence i and adds its rows to *rows, which stays
// within the limit.  EINVAL, EMSGSIZE.
attnd_err srv_step_set_lens(srv_core *core, srv_step *step, uint32_t i, uint32_t new_len,
                            uint32_t q_len, uint64_t *rows, attnd_errinfo *info);

#endif
