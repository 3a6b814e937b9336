// attnd_engine is what attends in a client's own process: a table of functions, since libattnd has
// no kernels.  libattn makes one for each kind of memory (attention/attn_engine.h); a client names
// it in attnd_connect_opts.engine, and libattnd calls it.
//
// An engine is open as long as its connection: it maps the arena, keeps models and open steps, and
// runs launches over the arena.  close unmaps it; nothing runs any more then.  Any thread, also at
// the same time.
//
// On a GPU an attend is work in a stream of the caller's, which may end after the commit.  libattnd
// has it settled before it asks the daemon for anything that gives blocks away or has others look
// at them.
#ifndef ATTND_PROTO_CLIENT_ATTND_ENGINE_H
#define ATTND_PROTO_CLIENT_ATTND_ENGINE_H

#include <stddef.h>

#include "proto/client/attnd.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attnd_engine_opts {
    int fd; // of the arena, borrowed until open returns
    uint64_t bytes;
    uint8_t device[16]; // UUID of the GPU whose memory it is; zeros = host memory
    bool deterministic; // as the daemon computes
    int32_t threads;    // attnd_connect_opts.engine_threads
} attnd_engine_opts;

// attnd_engine_step is a step that was opened.  tables is proto_step_tables with what follows it,
// in memory that may change: it is copied once, then checked.
typedef struct attnd_engine_step {
    uint64_t step;
    uint32_t model;
    const attnd_step_seq *seqs; // [num_seqs], committed and cached filled in
    uint32_t num_seqs;
    const void *tables;
    size_t tables_bytes;
} attnd_engine_step;

typedef struct attnd_engine {
    const char *name;
    // open: ATTND_ENOTSUP with the field: not such memory, or not on this machine.
    attnd_err (*open)(void **state, const attnd_engine_opts *opts, attnd_errinfo *info);
    void (*close)(void *state);
    // model_open takes the JSON that the daemon opened a model by, and the block_tokens of its
    // reply.  A model stays until close.
    attnd_err (*model_open)(void *state, uint32_t model, const char *json, uint32_t block_tokens,
                            attnd_errinfo *info);
    // step_open: ATTND_EPROTO: tables that make no sense.
    attnd_err (*step_open)(void *state, const attnd_engine_step *step, attnd_errinfo *info);
    // attend: ATTND_ESTALE for a step that is not open here.
    attnd_err (*attend)(void *state, const attnd_attend_args *args, attnd_ran *ran,
                        attnd_errinfo *info);
    // replay plans the layers of a captured step for another one (attnd_step_replay).
    attnd_err (*replay)(void *state, uint64_t captured, uint64_t step, void *stream,
                        attnd_errinfo *info);
    // step_ready says whether the step may be committed so: ATTND_EINVAL with the first layer that
    // was not attended in detail.  ATTND_OK for a step that is not open here.  It returns once the
    // step's work has ended; or, when soon is set, sooner, if nobody can meet what is not written
    // yet, or lose what still is.
    attnd_err (*step_ready)(void *state, uint64_t step, const attnd_accept *accept,
                            uint32_t num_seqs, bool soon, attnd_errinfo *info);
    // step_close forgets a step; work of it may go on.
    void (*step_close)(void *state, uint64_t step);
    // settle returns when all work has ended.
    attnd_err (*settle)(void *state, attnd_errinfo *info);
} attnd_engine;

#ifdef __cplusplus
}
#endif

#endif
