// srv_compute runs the scheduler's launches on the CPU: one thread takes a launch, runs its copies
// and its rows (together with attn_cpu's team), and tells the loop.  The loop never waits for it.
//
// A small launch is not worth waking anybody: it runs on the loop at once, and is told of like the
// others, by srv_compute_poll or from the loop's next turn.  What is submitted until then gathers
// behind it into a launch.
//
// Everything here is for the loop thread.  Where the process may use more than two processors, the
// compute threads keep off one of them, which is then the loop's and the transport's.
#ifndef ATTND_SERVER_SRV_COMPUTE_H
#define ATTND_SERVER_SRV_COMPUTE_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "kvcache/kv_cache.h"
#include "proto/err.h"
#include "scheduler/sched.h"
#include "server/srv_backend.h"

typedef struct srv_compute srv_compute;

typedef struct srv_compute_opts {
    uv_loop_t *loop;
    const kv_cache *kv; // of kv_copy_run; borrowed
    void *pool;         // the arena
    uint64_t pool_bytes;
    uint32_t num_threads; // 0 = the processors of the affinity mask, less the one that is kept off
    uint32_t max_rows;    // largest launch
    uint64_t inline_work; // multiply-adds of the largest launch that runs on the loop; 0 = none do
    const char *isa;      // of attn_cpu_opts; NULL = the best
    bool deterministic;
} srv_compute_opts;

// srv_compute_create starts the threads.  The caller owns *out: srv_compute_stop, then, when the
// loop has closed its handles, srv_compute_free.  ATTND_ENOMEM, or what attn_cpu_create answers.
attnd_err srv_compute_create(srv_compute **out, const srv_compute_opts *opts, attnd_errinfo *info);

// srv_compute_backend is the table that the server knows it by; borrowed.
srv_backend *srv_compute_backend(srv_compute *c);

// srv_compute_set_sched says whose launches they are; before the first one.
void srv_compute_set_sched(srv_compute *c, sched *s);

// srv_compute_poll takes in a launch that has ended, without waiting for the loop to be woken; for
// a loop that spins.  False when there was none.
bool srv_compute_poll(srv_compute *c);

// srv_compute_crowds is true while compute threads run that have no processor but those that a
// spinning loop takes from them.
bool srv_compute_crowds(const srv_compute *c);

// srv_compute_stop waits for the launch that runs, fails what is queued behind it with
// ATTND_ESHUTDOWN, ends the threads and closes the handle.  NULL and a second call do nothing.
void srv_compute_stop(srv_compute *c);

// srv_compute_free accepts NULL.
void srv_compute_free(srv_compute *c);

#endif
