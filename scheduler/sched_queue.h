// sched_queue holds the requests with rows that wait, and knows whose turn it is: fair share
// between tenants, decodes before prefills inside a share, oldest first inside those.  Loop thread
// only.
#ifndef ATTND_SCHEDULER_SCHED_QUEUE_H
#define ATTND_SCHEDULER_SCHED_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "scheduler/sched.h"

typedef struct sched_queue sched_queue;

typedef enum sched_kind { SCHED_DECODE, SCHED_PREFILL, SCHED_NUM_KINDS } sched_kind;

// sched_queue_create makes an empty queue.  The caller owns *out: sched_queue_free, which accepts
// NULL.  ATTND_ENOMEM.
attnd_err sched_queue_create(sched_queue **out, uint32_t max_tenants, uint32_t max_queued);
void sched_queue_free(sched_queue *q);

// sched_queue_set_weight sets a tenant's weight, 1 to SCHED_MAX_SHARE.
void sched_queue_set_weight(sched_queue *q, uint32_t tenant, uint32_t weight);

// sched_queue_push appends a request by its tenant, shape and kind; at most max_queued at a time.
// A tenant that had nothing waiting does not keep credit from its idle time.
void sched_queue_push(sched_queue *q, sched_req *req);
void sched_queue_remove(sched_queue *q, sched_req *req);

// sched_queue_waiting returns how many requests of a kind wait.
uint32_t sched_queue_waiting(const sched_queue *q, sched_kind kind);

// sched_queue_lead returns the request whose turn it is, NULL when none waits; it stays queued.
// With prefill_first that is the oldest prefill of all tenants, when there is one.
sched_req *sched_queue_lead(const sched_queue *q, bool prefill_first);

// sched_queue_advance is called when what leads is served, before it is charged for.
void sched_queue_advance(sched_queue *q);

// sched_follow says what may join a launch that has begun.
typedef struct sched_follow {
    const attn_shape *shape;
    sched_kind kind;
    uint64_t launch_no; // 1 and up; requests that are in it already are stepped over
    bool (*fits)(void *ctx, sched_req *req);
    void *ctx;
} sched_follow;

// sched_queue_follow returns the next request that may join, by fair share and age, NULL when none
// does; it stays queued.  Requests that do not fit are passed as sched.h says.
sched_req *sched_queue_follow(sched_queue *q, const sched_follow *f);

// sched_queue_charge counts service against a tenant's share; while it has something queued, or at
// least before it is removed.
void sched_queue_charge(sched_queue *q, uint32_t tenant, uint64_t cost);

// sched_queue_each calls fn for every request; fn may remove that request, no other.
void sched_queue_each(sched_queue *q, void (*fn)(void *ctx, sched_req *req), void *ctx);

#endif
