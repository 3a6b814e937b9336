// attnd_engine is what a client's own process does on its device: a table of functions, since
// libattnd knows no device.  libattn makes them (attention/attn_engine.h); a client names one in
// attnd_connect_opts.engine, and libattnd calls it.  There are two kinds: one attends over the
// daemon's arena (in process), the other hands attends over to the daemon (service).
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

// attnd_service is the part of an engine for service mode: tensors lie in a region, device memory
// that the daemon has made, and a pair of 32-bit flags in host memory passes an attend there and
// back.  What the client does for one is work in its stream, in this order:
//     copies in | done = 0 | ready = 1 | wait until done is not 0 | copies out
// The values are constants, so that a graph of it can be replayed.  Nothing is looked up or checked
// in between: libattnd has sent the daemon what it needs to know.  A region with device pairs
// has the three in the middle done by a kernel that waits, as proto_region.h says.
typedef struct attnd_service_opts {
    int fd;             // of the region, borrowed until open returns
    uint64_t bytes;     // of the region
    uint64_t pairs_off; // of its device pairs; 0 = none
    void *flags;        // [flags_bytes], whole pages, mapped until close has returned
    uint64_t flags_bytes;
    uint8_t device[16]; // UUID of the GPU whose memory the region is; zeros = host memory
} attnd_service_opts;

// attnd_service_copy copies [rows, heads, width bytes], the heads of a row behind each other in
// `to`.  Strides count bytes.
typedef struct attnd_service_copy {
    void *to;
    const void *from;
    uint64_t rows, heads, width;
    uint64_t to_row, from_row, from_head; // from one to the next
} attnd_service_copy;

typedef struct attnd_hand_over {
    attnd_service_copy in[3], out[2];
    uint32_t num_in, num_out;
    uint32_t pair;          // which of the region's device pairs, if it has any
    bool at_flags;          // wait at the flags in any case
    uint32_t *ready, *done; // in the flags; done lies behind ready, in the same 8 aligned bytes
} attnd_hand_over;

typedef struct attnd_service {
    // device tells which GPU the client's streams are on, the current one (zeros: host memory), and
    // whether MPS lets it share that with other processes.
    attnd_err (*device)(uint8_t uuid[16], bool *mps, attnd_errinfo *info);
    // open maps the region; *base is where the client's device sees it.  That is the region's own
    // or one that reaches it (peer access).  ATTND_ENOTSUP with the field.
    attnd_err (*open)(void **state, void **base, const attnd_service_opts *opts,
                      attnd_errinfo *info);
    // close returns once nothing of the device's work uses the region any more, and unmaps it.
    void (*close)(void *state);
    // capture tells which capture the stream is under; 0 = none.
    attnd_err (*capture)(void *state, void *stream, uint64_t *id, attnd_errinfo *info);
    attnd_err (*hand_over)(void *state, void *stream, const attnd_hand_over *h,
                           attnd_errinfo *info);
    // idle says whether all work of the stream has ended; true when it cannot be told.
    bool (*idle)(void *state, void *stream);
} attnd_service;

// attnd_engine: one for service mode has a name and a service, and nothing else.
typedef struct attnd_engine {
    const char *name;
    const attnd_service *service; // NULL = in process
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
    // abandon forgets all steps, and returns when all work has ended: none comes any more.
    attnd_err (*abandon)(void *state, attnd_errinfo *info);
    // settle returns when all work has ended.
    attnd_err (*settle)(void *state, attnd_errinfo *info);
} attnd_engine;

#ifdef __cplusplus
}
#endif

#endif
