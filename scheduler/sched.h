// sched decides what is launched next: it holds the ready attends of all clients, forms launches
// from them and hands these to a backend.  It knows rows and costs, never sockets or kernels.  (The
// steps that wait for blocks are in sched_wait.h.)
//
// Policy.  A backend that is idle gets work at once; while it is busy, work gathers, and the next
// launch takes what is ready of one KV shape, across clients, models and layers.  Order: between
// tenants fair share by cost (keys read * query rows), inside a share decodes first.  Decodes and
// prefills run in launches of their own, a prefill is cut into chunks, and the prefills that are
// outstanding together are no more than a chunk.  So a decode whose tenant is within its share
// waits for at most one chunk and as many decode launches as the backend's depth (and one for each
// other KV shape that has decodes waiting).  After a bounded number of decode launches one chunk of
// the oldest prefill runs whatever waits, so that it is not starved.  What does not fit a launch
// may be passed by smaller requests of its tenant a bounded number of times.
//
// Chunks.  A row is cut at multiples of prefill_chunk_tokens, the next one mostly, so that what is
// computed in one piece does not depend on batch mates.  The first piece of a row appends its new
// tokens; later ones have new_len = 0 and the same kv_len.
//
// Alone.  A device that a chunk does not fill computes a prompt faster in one piece.  So while no
// decode waits or runs, and none came or ended within SCHED_QUIET_US, a chunk is longer: what is
// outstanding together may have the work of prefill_alone_tokens query tokens over as many keys.
// Prefills whose tensors are in place then run in launches of up to so many query tokens; others,
// and all in deterministic mode, in several of prefill_chunk_tokens, of which one is moved while
// another runs.  The first decode that comes waits for a long chunk, those that follow for short
// ones.
//
// Signals.  A request may name a flag that the backend's device writes, in the order of its work,
// once the last piece of the request has run: so a client's stream can go on without any host.
//
// Copies run before the rows of their launch.  A request with copies only goes into the next launch
// ahead of everything, so what is submitted after it finds its copies made.
//
// Loop thread only.  Does not allocate after sched_create.  fill and lens must not call sched; done
// may call anything but sched_free and sched_launch_done.
#ifndef ATTND_SCHEDULER_SCHED_H
#define ATTND_SCHEDULER_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/attn.h"
#include "kvcache/kv_cache.h"
#include "proto/err.h"
#include "proto/list.h"

typedef struct sched sched;
typedef struct sched_req sched_req;

enum {
    SCHED_DECODE_TOKENS = 8,    // rows with at most this many query tokens are decodes
    SCHED_MAX_SHARE = 1024,     // largest weight of a tenant
    SCHED_MAX_QUEUED = 1 << 20, // of max_queued and max_launch_rows
    SCHED_MAX_PASSES = 16,      // smaller requests that may pass one that does not fit a launch
    SCHED_LOOK_AHEAD = 8,       // requests that are looked at behind one that does not fit
    SCHED_LAUNCH_COPIES = 4096, // of several requests in one launch; one request may have more
    SCHED_MAX_DEPTH = 8,        // launches outstanding at a backend
    SCHED_QUIET_US = 10000,     // without a decode, until prefills run in long launches
};

// sched_req is one attend (or one list of copies) of one client.  The caller owns the memory and
// fills the upper part; it must stay until done was called.  Never submitted before: all zero.
struct sched_req {
    const attn_shape *shape; // equal pointers = one KV shape; borrowed.  NULL = copies only
    uint32_t num_rows;       // rows of the request, >= 1 when there is a shape
    uint32_t tenant;
    bool in_place;        // its tensors lie where the backend computes, and it has no block mask,
                          // over whose query blocks it may take far longer than by its tokens
    uint64_t deadline_ms; // of the loop's clock; 0 = none.  Past it: done(ATTND_ETIMEDOUT)
    // fill writes the request's rows [num_rows]; called when it is first taken into a launch, and
    // again for later chunks, always with the same result.  q_first and q_count are sched's.
    void (*fill)(sched_req *req, attn_row *rows);
    // q_len and kv_len of a row, for cost and chunks, before fill.
    void (*lens)(sched_req *req, uint32_t row, int32_t *q_len, int32_t *kv_len);
    const kv_copy *copies; // run before anything else; NULL = none
    uint32_t num_copies;
    uint64_t ticket; // under which the backend has prepared all its rows; 0 = it has not
    uint64_t signal; // flag that a backend with `signals` sets to 1 behind the last piece; 0 = none
    // done is called once, from the loop, after the last launch of the request has ended, with how
    // it went; then the memory is the caller's again.  choice is of the last launch, NULL when
    // there was none; info is never NULL.
    void (*done)(sched_req *req, attnd_err err, const attn_choice *choice,
                 const attnd_errinfo *info);
    void *user;
    // filled before done: from submit to the first launch, and of all its launches
    uint64_t queue_us, run_us;
    bool signaled; // the flag is written, or will be: also when it was canceled too late
    const struct sched_launch *signaler; // private: the launch that holds the last piece
    list_node node;     // private from here on; inline so that a queue never allocates
    uint64_t seqno;     // order of arrival
    uint64_t launch_no; // the last launch that it is in, 0 = none yet
    uint64_t queued_us;
    int32_t q_first; // first query token of row that is in no launch yet
    uint32_t row;    // first row with such tokens
    uint32_t running, passed, state, kind;
    attnd_err err;
};

// sched_launch is what a backend runs: copies first, then params (num_rows may be 0), then signals.
typedef struct sched_launch {
    attn_params params;
    const kv_copy *copies;
    uint32_t num_copies;
    uint64_t ticket;   // of the one request that it is all of; else 0
    uint64_t *signals; // [num_signals] pairs to answer (attn_device.h), unless the launch fails
    uint32_t num_signals;
    bool gated; // it was begun before its flag had come
    // filled by the backend before sched_launch_done
    bool prepared; // under the ticket
    bool missed;   // gated, and its flag is as it was, or still to come; not run, unless err
    attn_choice choice;
    attnd_err err;
    attnd_errinfo info;
    uint64_t run_us;
    uint32_t idx; // private
} sched_launch;

// sched_backend runs launches elsewhere (compute threads, a GPU).  launch takes it and returns at
// once; when it has ended the backend's owner calls sched_launch_done from the loop, never from
// inside launch.  At most depth launches are outstanding; they run in the order they were given.
typedef struct sched_backend {
    void (*launch)(void *ctx, sched_launch *launch);
    void *ctx;
    void *pool; // of attn_params
    uint64_t pool_bytes;
    uint32_t depth; // 1 for the CPU, at most SCHED_MAX_DEPTH
    bool deterministic;
} sched_backend;

typedef struct sched_opts {
    uint32_t max_queued;        // requests that wait; past it ATTND_EBUSY
    uint32_t max_tenant_queued; // of one tenant
    uint32_t max_launch_rows;   // also the largest request
    uint32_t max_tenants;
    int32_t prefill_chunk_tokens;  // query tokens of a chunk, all rows together
    int32_t prefill_alone_tokens;  // the same while no decode is about; 0 = as if one always were
    uint32_t max_decodes_in_a_row; // decode launches before a waiting prefill gets a chunk; less
                                   // than the backend's depth counts as that
    uint64_t (*now_us)(void);
} sched_opts;

// sched_create makes a scheduler for the backend, which is copied.  The caller owns *out:
// sched_free.  ATTND_EINVAL when a bound is 0 or over its limit, ATTND_ENOMEM.
attnd_err sched_create(sched **out, const sched_opts *opts, const sched_backend *backend);
void sched_free(sched *s); // accepts NULL; nothing may be queued or running

// sched_tenant_share sets the weight of a tenant in the fair share (default 1; 0 counts as 1, more
// than SCHED_MAX_SHARE as that).
void sched_tenant_share(sched *s, uint32_t tenant, uint32_t weight);

// sched_submit queues a request and launches if the backend is idle.  On failure done is not
// called.  ATTND_EBUSY: over a bound.  ATTND_EMSGSIZE: more rows than max_launch_rows.
// ATTND_EINVAL: neither rows nor copies.
attnd_err sched_submit(sched *s, sched_req *req, attnd_errinfo *info);

// sched_cancel takes a queued request out: done(ATTND_ECANCELED) follows, at once when nothing of
// it runs, else when that has ended.  A request that is not queued or running is left alone.
void sched_cancel(sched *s, sched_req *req);

// sched_launch_done tells that a launch has ended, and starts the next before the done callbacks
// of the ended one run.
void sched_launch_done(sched *s, sched_launch *launch);

// sched_ran books a decode that the backend has run without being given it, as if it had been
// queued and launched: its tenant's share, the counters, and what req is filled with before done,
// which is not called.  shape, num_rows, tenant and lens are to be filled in.
void sched_ran(sched *s, sched_req *req, const sched_launch *launch);

// sched_expire ends requests past their deadline; returns the next one or earlier, UINT64_MAX =
// none.
uint64_t sched_expire(sched *s, uint64_t now_ms);

// sched_idle is true when nothing is queued or running.
bool sched_idle(const sched *s);

typedef struct sched_info {
    uint64_t launches, requests, rows, copies; // since the start; rows counts chunks
    uint64_t decode_tokens, prefill_tokens;    // query tokens computed
    uint32_t queued, running;                  // requests; one in chunks may be both
    uint64_t busy_us;                          // the backend's, summed
    attn_choice last;                          // "none", "nothing ran yet" before the first
} sched_info;
void sched_get_info(const sched *s, sched_info *out);

#endif
