// The queue of those that wait for blocks: one list, oldest first, walked from the front whenever
// blocks came free.
//
// A waiter that was passed SCHED_WAIT_PASSES times is a wall: nobody behind it is tried (of its
// tenant only, when what it lacks is quota), until it was placed or left.  So a big one is placed
// as soon as enough came free after that, whatever small ones arrive.
//
// done runs inside the walk and may take any waiter out: cursor is the next one to look at, and
// who leaves the list moves it on.
//
// Loop thread only.  Limits: a walk makes at most SCHED_WAIT_LOOK failing tries for each tenant.
#include "scheduler/sched_wait.h"

#include <stdlib.h>

typedef struct wait_tenant {
    uint32_t waiting;
    uint32_t failed; // tries of the walk that looked at it last
    uint64_t walk_no;
    bool wall; // in that walk: quota is saved up for an older one
} wait_tenant;

struct sched_wait {
    sched_wait_opts opts;
    list_node waiters; // oldest first
    list_node *cursor; // of the walk
    uint32_t waiting;
    bool walking;
    bool again; // blocks came free during the walk
    uint64_t walk_no;
    wait_tenant *tenants; // [max_tenants]
};

attnd_err sched_wait_create(sched_wait **out, const sched_wait_opts *opts) {
    if (opts->max_waiting == 0 || opts->max_tenant_waiting == 0 || opts->max_tenants == 0) {
        return ATTND_EINVAL;
    }
    sched_wait *q = calloc(1, sizeof(*q));
    if (!q) {
        return ATTND_ENOMEM;
    }
    q->opts = *opts;
    list_init(&q->waiters);
    q->tenants = calloc(opts->max_tenants, sizeof(*q->tenants));
    if (!q->tenants) {
        free(q);
        return ATTND_ENOMEM;
    }
    *out = q;
    return ATTND_OK;
}

void sched_wait_free(sched_wait *q) {
    if (!q) {
        return;
    }
    ATTND_ASSERT(q->waiting == 0);
    free(q->tenants);
    free(q);
}

static bool competes(const sched_waiter *older, const sched_waiter *w) {
    return older->lack == SCHED_LACK_POOL || older->tenant == w->tenant;
}

static bool is_wall(const sched_waiter *w) {
    return w->passed >= SCHED_WAIT_PASSES;
}

// walled_off is true when an older waiter may not be passed by w, which is not queued yet.
static bool walled_off(const sched_wait *q, const sched_waiter *w) {
    LIST_FOREACH (&q->waiters, node) {
        const sched_waiter *older = LIST_ENTRY(node, sched_waiter, node);
        if (is_wall(older) && competes(older, w)) {
            return true;
        }
    }
    return false;
}

// count_passes notes that w was placed before all waiters from the front to end; true when one of
// them has become a wall by that.
static bool count_passes(sched_wait *q, const sched_waiter *w, const list_node *end) {
    bool wall = false;
    for (list_node *node = q->waiters.next; node != end; node = node->next) {
        sched_waiter *older = LIST_ENTRY(node, sched_waiter, node);
        if (competes(older, w)) {
            older->passed++;
            wall = wall || older->passed == SCHED_WAIT_PASSES;
        }
    }
    return wall;
}

// try_place returns ATTND_ENOSPC only when it may wait, else *final is true; w->why says why.
static attnd_err try_place(sched_waiter *w, bool *final) {
    sched_lack lack = SCHED_LACK_FOREVER;
    w->why = (attnd_errinfo){.code = ATTND_OK};
    attnd_err err = w->place(w, &lack, &w->why);
    *final = err != ATTND_ENOSPC || lack == SCHED_LACK_FOREVER;
    w->lack = lack;
    return err;
}

static void append(sched_wait *q, sched_waiter *w) {
    list_append(&q->waiters, &w->node);
    q->waiting++;
    q->tenants[w->tenant].waiting++;
}

static void take_out(sched_wait *q, sched_waiter *w) {
    if (q->cursor == &w->node) {
        q->cursor = w->node.next;
    }
    list_remove(&w->node);
    q->waiting--;
    q->tenants[w->tenant].waiting--;
}

// refuse returns err, and in *info why.
static attnd_err refuse(const sched_waiter *w, attnd_err err, attnd_errinfo *info) {
    if (info) {
        *info = w->why;
    }
    return err;
}

attnd_err sched_wait_enter(sched_wait *q, sched_waiter *w, bool *waits, attnd_errinfo *info) {
    ATTND_ASSERT(w->tenant < q->opts.max_tenants && !list_linked(&w->node));
    *waits = false;
    w->passed = 0;
    w->lack = SCHED_LACK_POOL;
    if (walled_off(q, w)) {
        attnd_fail(&w->why, ATTND_ENOSPC, "blocks", "free blocks are saved up for an older step");
    } else {
        bool final;
        attnd_err err = try_place(w, &final);
        if (!err) {
            count_passes(q, w, &q->waiters);
        }
        if (final) {
            return err ? refuse(w, err, info) : ATTND_OK;
        }
    }
    if (w->deadline_ms == 0) {
        return refuse(w, ATTND_ENOSPC, info);
    }
    if (q->waiting >= q->opts.max_waiting ||
        q->tenants[w->tenant].waiting >= q->opts.max_tenant_waiting) {
        return attnd_fail(info, ATTND_EBUSY, "queue", "%u steps wait for blocks", q->waiting);
    }
    append(q, w);
    *waits = true;
    return ATTND_OK;
}

// may_try is false for a waiter that this walk passes over.
static bool may_try(sched_wait *q, const sched_waiter *w) {
    wait_tenant *t = &q->tenants[w->tenant];
    if (t->walk_no != q->walk_no) {
        t->walk_no = q->walk_no;
        t->failed = 0;
        t->wall = false;
    }
    return !t->wall && t->failed < SCHED_WAIT_LOOK;
}

// try_one looks at a waiter that is queued; true when it waits on.
static bool try_one(sched_wait *q, sched_waiter *w) {
    if (!may_try(q, w)) {
        return true;
    }
    bool final;
    attnd_err err = try_place(w, &final);
    if (!final) {
        q->tenants[w->tenant].failed++;
        return true;
    }
    bool wall = !err && count_passes(q, w, &w->node);
    take_out(q, w);
    if (wall) { // those behind it must not be tried: begin again
        q->cursor = &q->waiters;
        q->again = true;
    }
    attnd_errinfo why = w->why; // done may be the end of w
    w->done(w, err, &why);
    return false;
}

static void walk(sched_wait *q) {
    q->walk_no++;
    q->cursor = q->waiters.next;
    while (q->cursor != &q->waiters) {
        sched_waiter *w = LIST_ENTRY(q->cursor, sched_waiter, node);
        q->cursor = q->cursor->next;
        if (!try_one(q, w) || !is_wall(w)) {
            continue;
        }
        if (w->lack == SCHED_LACK_POOL) {
            break;
        }
        q->tenants[w->tenant].wall = true;
    }
    q->cursor = NULL;
}

void sched_wait_retry(sched_wait *q) {
    q->again = true;
    if (q->walking) {
        return;
    }
    q->walking = true;
    while (q->again) {
        q->again = false;
        walk(q);
    }
    q->walking = false;
}

void sched_wait_cancel(sched_wait *q, sched_waiter *w) {
    if (!list_linked(&w->node)) {
        return;
    }
    bool wall = is_wall(w);
    attnd_errinfo info;
    take_out(q, w);
    attnd_fail(&info, ATTND_ECANCELED, "blocks", "%s", attnd_strerror(ATTND_ECANCELED));
    w->done(w, ATTND_ECANCELED, &info);
    if (wall) {
        sched_wait_retry(q);
    }
}

// first_expired returns the oldest waiter past its deadline, NULL when there is none; *next_ms is
// the least deadline of the others that were looked at.
static sched_waiter *first_expired(const sched_wait *q, uint64_t now_ms, uint64_t *next_ms) {
    *next_ms = UINT64_MAX;
    LIST_FOREACH (&q->waiters, node) {
        sched_waiter *w = LIST_ENTRY(node, sched_waiter, node);
        if (w->deadline_ms <= now_ms) {
            return w;
        }
        *next_ms = w->deadline_ms < *next_ms ? w->deadline_ms : *next_ms;
    }
    return NULL;
}

uint64_t sched_wait_expire(sched_wait *q, uint64_t now_ms) {
    bool wall = false;
    uint64_t next_ms;
    for (;;) {
        sched_waiter *w = first_expired(q, now_ms, &next_ms);
        if (w) {
            wall = wall || is_wall(w);
            take_out(q, w);
            attnd_errinfo why = w->why;
            w->done(w, ATTND_ENOSPC, &why);
        } else if (wall) {
            wall = false;
            sched_wait_retry(q);
        } else {
            return next_ms;
        }
    }
}

uint32_t sched_wait_count(const sched_wait *q) {
    return q->waiting;
}
