// client_service is service mode in libattnd: tensors in the connection's region, pairs of flags,
// and the attend_all that tells the daemon of each attend, or of all attends of a captured graph
// at once.  What a stream does is the engine's business (attnd_engine.h, attnd_service).
//
// It belongs to its connection (client_ring.c).  Any thread.
#ifndef ATTND_PROTO_CLIENT_CLIENT_SERVICE_H
#define ATTND_PROTO_CLIENT_CLIENT_SERVICE_H

#include "proto/client/client.h"
#include "proto/client/client_area.h"
#include "proto/client/client_attach.h"

typedef struct client_service client_service;

// client_service_open maps region and flags of an attached ring and watches its socket: gone is
// called once when the daemon has gone (client_watch.h).  The descriptors stay the caller's, who
// owns *out: client_service_close, when nobody looks any more.
attnd_err client_service_open(client_service **out, client_conn *conn, const attnd_service *ops,
                              const client_attached *a, void (*gone)(void *ctx),
                              attnd_errinfo *info);
void client_service_close(client_service *s); // accepts NULL

// client_service_take makes a place of the region of at least bytes, at *address; ENOSPC.
// client_service_give gives it back: no work in a stream may use it any more.
attnd_err client_service_take(client_service *s, uint64_t bytes, client_place **place,
                              void **address, attnd_errinfo *info);
void client_service_give(client_service *s, client_place *place);

// A step as libattnd sees it: opened, attended or replayed, ready (all that was sent has an answer,
// the first error of which is returned once), closed.  timeout_ms bounds the wait of each.
attnd_err client_service_step_open(client_service *s, const attnd_engine_step *step,
                                   attnd_errinfo *info);
attnd_err client_service_attend(client_service *s, const client_model *model,
                                const attnd_attend_args *args, int32_t timeout_ms,
                                attnd_errinfo *info);
attnd_err client_service_replay(client_service *s, uint64_t captured, uint64_t step, void *stream,
                                int32_t timeout_ms, attnd_errinfo *info);
attnd_err client_service_ready(client_service *s, uint64_t step, int32_t timeout_ms,
                               attnd_errinfo *info);
void client_service_step_close(client_service *s, uint64_t step);

// client_service_settle returns when the step's stream is idle.  ATTND_ETIMEDOUT.
// client_service_collect waits for the answers that a cancelled step still has to come, and returns
// whether there were any: such a step is cancelled once more, which gives its flags back.
attnd_err client_service_settle(client_service *s, uint64_t step, int32_t timeout_ms,
                                attnd_errinfo *info);
bool client_service_collect(client_service *s, uint64_t step, int32_t timeout_ms);

#endif
