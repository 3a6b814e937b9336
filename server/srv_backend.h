// srv_backend is where launches run: the compute threads (srv_compute) or a GPU (srv_gpu).  The
// server picks one at the start by compute.device, and knows it by this table from then on.  Loop
// thread only, but where it says otherwise.
#ifndef ATTND_SERVER_SRV_BACKEND_H
#define ATTND_SERVER_SRV_BACKEND_H

#include <stdbool.h>

#include "attention/attn_device.h"
#include "scheduler/sched.h"

typedef struct srv_backend srv_backend;

// srv_ahead is what a launch that is prepared waits for.  The backend may look at the flag itself:
// whoever exchanges it for 0 runs the launch.
typedef struct srv_ahead {
    uint32_t *flag;  // 1 = to be run; shared with a client, which may write anything
    uint64_t signal; // as in sched_req
    bool follows;    // the layer before has just run: when the flag comes can be foreseen
    bool has_pair;   // signal is a pair on the device, which a kernel can wait at
} srv_ahead;

typedef struct srv_backend_ops {
    // set_sched says whose launches they are; before the first one.
    void (*set_sched)(srv_backend *b, sched *s);
    // check_shape and check_row say what the backend cannot do of what attn_check lets pass.  NULL:
    // it can do everything.  ATTND_ENOTSUP with the field.
    attnd_err (*check_shape)(const attn_shape *shape, attnd_errinfo *info);
    attnd_err (*check_row)(const srv_backend *b, const attn_shape *shape, const attn_row *row,
                           attnd_errinfo *info);
    // poll takes in a launch that has ended, without waiting for the loop to be woken; for a loop
    // that spins.  False when there was none.
    bool (*poll)(srv_backend *b);
    // crowds is true while the backend's threads run that have no processor but those that a
    // spinning loop takes from them.
    bool (*crowds)(const srv_backend *b);
    // Memory that clients share with the device, as in attn_device_ops, from any thread; NULL:
    // there is none, and no row with SRV_STAGE_ON_DEVICE and no signal may be submitted.
    attnd_err (*region_make)(srv_backend *b, uint64_t bytes, attn_device_region *out,
                             attnd_errinfo *info);
    void (*region_free)(srv_backend *b, attn_device_region *r);
    attnd_err (*flags_map)(srv_backend *b, void *base, uint64_t bytes, uint64_t *address,
                           attnd_errinfo *info);
    void (*flags_unmap)(srv_backend *b, void *base);
    // prepare says that a launch of just these rows is likely to come next, under that ticket,
    // which is never used again.  Rows are copied; what they point at stays as it is until the
    // launch has ended, or forget was called.  With ahead, which is copied, the backend may begin
    // it by itself, at any time: nothing that it depends on may be submitted any more, and
    // srv_backend.ran_ahead is called when it has ended, from the loop.  It may also begin before
    // the flag has come (has_pair), and end without having run: ran_ahead is called with
    // launch->missed, it is forgotten, and its flag is as it was.  forget is true when ran_ahead is
    // to come: it is too late; so is unwatch, which has the flag left alone and no more.  NULL:
    // nothing is prepared here.
    void (*prepare)(srv_backend *b, const attn_params *p, uint64_t ticket, const srv_ahead *ahead);
    bool (*forget)(srv_backend *b, uint64_t ticket);
    bool (*unwatch)(srv_backend *b, uint64_t ticket);
    // begun is true from when the backend has begun it by itself until ran_ahead was called;
    // watches, while it looks at the flag all the time.
    bool (*begun)(const srv_backend *b, uint64_t ticket);
    bool (*watches)(const srv_backend *b, uint64_t ticket);
    // stop waits for what runs, fails what is queued behind it with ATTND_ESHUTDOWN, ends the
    // threads and closes the loop's handles.  A second call does nothing.
    void (*stop)(srv_backend *b);
    // free, when the loop has closed them and nobody uses the arena.
    void (*free)(srv_backend *b);
} srv_backend_ops;

// srv_backend is embedded first in what implements it.
struct srv_backend {
    const srv_backend_ops *ops;
    sched_backend sched;  // for sched_create
    char device[16];      // "cpu", "cuda:0"
    uint8_t uuid[16];     // of the device, zeros for the CPU
    uint64_t region_unit; // regions are whole multiples of so many bytes
    bool mps;             // the device's contexts are shared through NVIDIA's MPS
    bool waits;           // its kernels may wait for clients, and kernels of clients for it
    char name[64];        // of the device, "" = not known
    const char *kernels;  // which it takes, such as "avx512"
    // Launches since the start that were found prepared; of these, those that the backend began by
    // itself; of these, those that it had begun before the flag came.  `missed` counts launches
    // that it began so, but in vain.
    uint64_t prepared, ahead, gated, missed;
    // ran_ahead is told how such a launch ended; set by the core, as ctx.
    void (*ran_ahead)(void *ctx, uint64_t ticket, const sched_launch *launch);
    void *ctx;
};

#endif
