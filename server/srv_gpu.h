// srv_gpu runs the scheduler's launches on a GPU, whose memory holds the arena.  One submit thread
// drives the device and is the only user of its stream; the loop gives it launches and hears when
// they have ended, and never waits for the device.
//
// Clients' tensors lie in host memory: a launch's inputs are packed into a pinned buffer and copied
// to the device, its outputs come back the same way (srv_stage).  There are two buffers, so that
// one launch is packed while another runs.  What does not fit a buffer runs in several fillings,
// one after another.  Copies of blocks take their place in the stream.
//
// Errors.  A launch that fails is an error of its own requests.  When the device is lost (an error
// that stays with its context, such as an illegal address), what is in flight and all that follows
// fails with that error, and the owner is told once: nothing will work again in this process.
#ifndef ATTND_SERVER_SRV_GPU_H
#define ATTND_SERVER_SRV_GPU_H

#include <stdint.h>
#include <uv.h>

#include "attention/attn_device.h"
#include "kvcache/kv_cache.h"
#include "server/srv_backend.h"

typedef struct srv_gpu srv_gpu;

typedef struct srv_gpu_opts {
    const attn_device_ops *device_ops; // borrowed
    int32_t ordinal;                   // N of cuda:N
    uint64_t arena_bytes;
    int arena_fd; // as in attn_device_opts
    uint64_t adopt_bytes;
    uint64_t staging_bytes; // of each of the two buffers, at least srv_stage_min_bytes
    uint32_t max_rows;      // largest launch
    uint64_t spin_us; // for how long the submit thread looks for the end of a launch with signals,
                      // and behind it for more, without sleeping: the client's stream waits for it
    bool ahead;       // meanwhile it begins what is prepared by itself (srv_ahead)
    bool waits;       // kernels of ours may wait for clients, and kernels of clients for us
    bool deterministic;
    // lost is told once, from the loop, before the requests that it is an error of.  spoilt: what
    // the arena holds cannot be believed.
    void (*lost)(void *ctx, const attnd_errinfo *info, bool spoilt);
    void *ctx;
} srv_gpu_opts;

// srv_gpu_open opens the device and fills in *arena, which stays the backend's.  ATTND_ENOMEM, or
// what the device answers (ATTND_EINVAL: the arena cannot be taken over).  The caller owns *out, as
// every srv_backend: ops->stop, then ops->free.
attnd_err srv_gpu_open(srv_gpu **out, const srv_gpu_opts *opts, kv_arena *arena,
                       attnd_errinfo *info);

// srv_gpu_start starts the submit thread; kv is the cache over the arena, borrowed.
attnd_err srv_gpu_start(srv_gpu *g, uv_loop_t *loop, const kv_cache *kv, attnd_errinfo *info);

srv_backend *srv_gpu_backend(srv_gpu *g);

#endif
