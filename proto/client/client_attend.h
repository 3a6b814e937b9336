// client_attend is what the ways to attend share: blocking, started, through buffers.  Any thread.
#ifndef ATTND_PROTO_CLIENT_CLIENT_ATTEND_H
#define ATTND_PROTO_CLIENT_CLIENT_ATTEND_H

#include "proto/client/client.h"
#include "proto/client/client_sheet.h"

// client_attend_prepare checks args and makes the request *m.
attnd_err client_attend_prepare(attnd_client *c, const attnd_attend_args *args, client_model *model,
                                client_msg *m, attnd_errinfo *info);

// client_attend_read gives the results of a good reply to the caller, or nothing.  ran may be NULL.
attnd_err client_attend_read(proto_view msg, const attnd_attend_args *args,
                             const client_model *model, attnd_ran *ran, attnd_errinfo *info);

// client_attend_room is what a good reply takes at most.
uint64_t client_attend_room(uint32_t rows, bool lse, const client_model *m, uint32_t num_lens);

// client_attend_check_rows checks rows against the daemon's limits.
attnd_err client_attend_check_rows(attnd_client *c, const attnd_attend_args *a,
                                   attnd_errinfo *info);

// client_attend_check_mask wants the arrays of args' block mask, if there is one;
// client_attend_put_mask copies it and returns its offset, 0 without one.
attnd_err client_attend_check_mask(const attnd_attend_args *a, attnd_errinfo *info);
uint32_t client_attend_put_mask(client_sheet *s, const attnd_block_mask *mask);

// client_attend_results are arrays in a reply.
typedef struct client_attend_results {
    const void *out, *lse, *lens; // NULL = not asked for
    proto_attend_reply r;
} client_attend_results;

// client_attend_find finds them: EPROTO.
attnd_err client_attend_find(proto_view msg, uint32_t rows, bool lse, uint32_t num_lens,
                             const client_model *m, client_attend_results *out,
                             attnd_errinfo *info);

void client_attend_copy_ran(attnd_ran *ran, const proto_attend_reply *r); // ran may be NULL

// The same two for args->buffers.
attnd_err client_buffers_prepare(attnd_client *c, const attnd_attend_args *args, client_msg *m,
                                 attnd_errinfo *info);
attnd_err client_buffers_read(proto_view msg, const attnd_attend_args *args,
                              const client_model *model, attnd_ran *ran, attnd_errinfo *info);

// client_buffers_plain makes args of private buffers ones with arrays; client_buffers_done lets the
// buffers point at the results.
attnd_err client_buffers_plain(attnd_client *c, const attnd_attend_args *args,
                               attnd_attend_args *out, attnd_errinfo *info);
void client_buffers_done(const attnd_attend_args *args);

#endif
