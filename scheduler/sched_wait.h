// sched_wait is the queue of those that wait for KV blocks: the oldest is tried first, whenever
// blocks come free.  A small one may be placed before an older one that cannot be placed yet, but
// each one is passed at most SCHED_WAIT_PASSES times; then what comes free is saved up for it.
//
// Who lacks blocks of the pool competes with everyone.  Who lacks only quota competes with its own
// tenant: others placed meanwhile do not count as passing it, and it holds up none of them.
//
// Loop thread only.  Does not allocate after sched_wait_create.  Callbacks: place must not call
// sched_wait; done may call anything but sched_wait_free.
#ifndef ATTND_SCHEDULER_SCHED_WAIT_H
#define ATTND_SCHEDULER_SCHED_WAIT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/err.h"
#include "proto/list.h"

typedef struct sched_wait sched_wait;
typedef struct sched_waiter sched_waiter;

enum {
    SCHED_WAIT_PASSES = 16, // younger ones that may be placed before one that waits
    SCHED_WAIT_LOOK = 8,    // tries that fail, of one tenant, each time blocks come free
};

// sched_lack says what a try did not find.
typedef enum sched_lack {
    SCHED_LACK_FOREVER, // it could not be placed in an empty pool either: refused at once
    SCHED_LACK_POOL,    // blocks that others have
    SCHED_LACK_QUOTA,   // blocks that the tenant may have, until it gives some back
} sched_lack;

// sched_waiter is one that wants blocks.  The caller owns the memory (a step request embeds it) and
// fills the upper part; it must stay until the waiting is over.  All zero before first use.
struct sched_waiter {
    uint32_t tenant;
    uint64_t deadline_ms; // of the loop's clock; past it done(ATTND_ENOSPC).  0 = do not wait
    // place takes the blocks.  ATTND_ENOSPC with *lack (SCHED_LACK_FOREVER when untouched) when
    // there are not enough; any other result ends the waiting with it.
    attnd_err (*place)(sched_waiter *w, sched_lack *lack, attnd_errinfo *info);
    // done is called once when a waiter that was queued waits no longer: ATTND_OK it has its
    // blocks; ATTND_ENOSPC its deadline passed, info is the last try's; ATTND_ECANCELED; else what
    // place answered.  info is never NULL.
    void (*done)(sched_waiter *w, attnd_err err, const attnd_errinfo *info);
    void *user;
    // private; inline so that a queue never allocates
    list_node node; // linked while it waits
    uint32_t passed;
    sched_lack lack;
    attnd_errinfo why; // of the last try
};

typedef struct sched_wait_opts {
    uint32_t max_waiting; // past it ATTND_EBUSY
    uint32_t max_tenant_waiting;
    uint32_t max_tenants;
} sched_wait_opts;

// sched_wait_create makes an empty queue.  The caller owns *out: sched_wait_free.  ATTND_EINVAL
// when a bound is 0, ATTND_ENOMEM.
attnd_err sched_wait_create(sched_wait **out, const sched_wait_opts *opts);
// sched_wait_free accepts NULL.  Nobody may be waiting.
void sched_wait_free(sched_wait *q);

// sched_wait_enter places w now, when no older one would be passed too often, else queues it.
// ATTND_OK with *waits = false: it has its blocks.  ATTND_OK with *waits = true: it waits, done
// follows.  Otherwise it is refused and done is not called: ATTND_ENOSPC (deadline 0, or lacking
// for ever), ATTND_EBUSY (over a bound), or what place answered.
attnd_err sched_wait_enter(sched_wait *q, sched_waiter *w, bool *waits, attnd_errinfo *info);

// sched_wait_retry tries those that wait; to be called whenever blocks came free.  Inside a done
// callback it only notes that there is more to try.
void sched_wait_retry(sched_wait *q);

// sched_wait_cancel ends the waiting of w: done(ATTND_ECANCELED), at once.  Of one that does not
// wait nothing is changed.
void sched_wait_cancel(sched_wait *q, sched_waiter *w);

// sched_wait_expire ends the waiting of those past their deadline; returns the next deadline,
// UINT64_MAX = none.  Who is behind one that ended is tried.
uint64_t sched_wait_expire(sched_wait *q, uint64_t now_ms);

// sched_wait_count returns how many wait.
uint32_t sched_wait_count(const sched_wait *q);

#endif
