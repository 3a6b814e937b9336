// sched decides what is launched next: it holds the ready attends of all clients in queues, forms
// launches from them and hands these to a backend; and it holds the steps that wait for blocks.  It
// knows rows and costs, never sockets or kernels.
//
// Policy.  A backend that is idle gets work at once; while it is busy, work gathers, and the next
// launch takes what is ready of one KV shape, across clients, models and layers.  Order: between
// tenants fair share by cost (keys read * query rows), inside a share decodes first; a prefill is
// cut into chunks of prefill_chunk_tokens query tokens, so that a decode waits for at most one
// chunk and one decode launch; after a bounded number of decode launches one chunk of the oldest
// prefill runs whatever waits, so that it is not starved.
//
// Loop thread only.  Does not allocate after sched_create.
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

enum { SCHED_DECODE_TOKENS = 8 }; // rows with at most this many query tokens are decodes

// sched_req is one attend (or one list of copies) of one client.  The caller owns the memory and
// fills the upper part; it must stay until done was called.
struct sched_req {
    const attn_shape *shape; // equal pointers = one KV shape; borrowed.  NULL = copies only
    uint32_t num_rows;       // rows of the request
    uint32_t tenant;
    uint64_t deadline_ms; // of the loop's clock; 0 = none.  Past it: done(ATTND_ETIMEDOUT)
    // fill writes the request's rows [num_rows]; called when it is first taken into a launch, and
    // again for later chunks, always with the same result.
    void (*fill)(sched_req *req, attn_row *rows);
    // q_len and kv_len of a row, for cost and chunks, before fill.
    void (*lens)(sched_req *req, uint32_t row, int32_t *q_len, int32_t *kv_len);
    const kv_copy *copies; // run before anything else; NULL = none
    uint32_t num_copies;
    // done is called once, from the loop, after the last launch of the request has ended, with how
    // it went; then the memory is the caller's again.  choice is of the last launch.
    void (*done)(sched_req *req, attnd_err err, const attn_choice *choice,
                 const attnd_errinfo *info);
    void *user;
    // private; inline so that a queue never allocates
    list_node node;
    uint64_t seqno;
    uint32_t row, running, state;
    int32_t q_first;
    attnd_err err;
    attn_choice choice;
    uint64_t queued_us;
};

// sched_launch is what a backend runs: copies first, then params (num_rows may be 0).
typedef struct sched_launch {
    attn_params params;
    const kv_copy *copies;
    uint32_t num_copies;
    // filled by the backend before sched_launch_done
    attn_choice choice;
    attnd_err err;
    attnd_errinfo info;
    uint64_t run_us;
    // private
    uint32_t idx;
} sched_launch;

// sched_backend runs launches elsewhere (compute threads, a GPU).  launch takes it and returns at
// once; when it has ended the backend's owner calls sched_launch_done from the loop.  At most depth
// launches are outstanding.
typedef struct sched_backend {
    void (*launch)(void *ctx, sched_launch *launch);
    void *ctx;
    void *pool; // of attn_params
    uint64_t pool_bytes;
    uint32_t depth; // 1 for the CPU
    bool deterministic;
} sched_backend;

typedef struct sched_opts {
    uint32_t max_queued;        // requests; past it ATTND_EBUSY
    uint32_t max_tenant_queued; // of one tenant
    uint32_t max_launch_rows;
    uint32_t max_tenants;
    int32_t prefill_chunk_tokens;  // query tokens of one chunk, all rows together
    uint32_t max_decodes_in_a_row; // decode launches before a waiting prefill gets a chunk
    uint64_t (*now_us)(void);
} sched_opts;

attnd_err sched_create(sched **out, const sched_opts *opts, const sched_backend *backend);
void sched_free(sched *s); // nothing may be running

// sched_tenant_share sets the weight of a tenant in the fair share (default 1).
void sched_tenant_share(sched *s, uint32_t tenant, uint32_t weight);

// sched_submit queues a request and launches if the backend is idle.  ATTND_EBUSY: over a bound.
attnd_err sched_submit(sched *s, sched_req *req, attnd_errinfo *info);

// sched_cancel takes a queued request out: done(ATTND_ECANCELED) follows, at once when nothing of
// it runs, else when that has ended.  A finished request is left alone.
void sched_cancel(sched *s, sched_req *req);

// sched_launch_done tells that a launch has ended, and starts the next.
void sched_launch_done(sched *s, sched_launch *launch);

// sched_expire ends requests past their deadline; returns the next deadline, UINT64_MAX = none.
uint64_t sched_expire(sched *s, uint64_t now_ms);

// sched_idle is true when nothing is queued or running.
bool sched_idle(const sched *s);

typedef struct sched_info {
    uint64_t launches, requests, rows, copies; // since the start
    uint64_t decode_tokens, prefill_tokens;    // query tokens computed
    uint32_t queued, running;
    uint64_t busy_us; // the backend's, summed
    attn_choice last;
} sched_info;
void sched_get_info(const sched *s, sched_info *out);

#endif
