// Host memory as a tier: a slot is a place in a memfd that is mapped as the arena is, and survives
// with it.  The thread copies one block after another; a checksum is made of what lies in the
// store, after a put and before a get.
#include <stdlib.h>

#include "kvcache/kv_sum.h"
#include "kvcache/kv_tier_store.h"

typedef struct memory_tier {
    kv_tier pub; // first
    bool is_pinned;
} memory_tier;

static void run_job(kv_tier *t, kv_tier_job *job, attnd_errinfo *info) {
    char *image = (char *)t->store->base + job->slot;
    uint64_t bytes = kv_tier_job_bytes(job);
    if (!kv_tier_is_whole(job)) {
        job->err = ATTND_ESTALE;
        return;
    }
    job->err = job->op == KV_TIER_PUT ? kv_tier_copy(t, job, 0, bytes, image, info) : ATTND_OK;
    uint64_t sum = kv_sum_bytes(image, bytes, kv_tier_seed(t, job->slot));
    if (job->op == KV_TIER_PUT) {
        job->sum = sum;
    } else {
        job->err = sum == job->sum ? kv_tier_copy(t, job, 0, bytes, image, info) : ATTND_ESTALE;
    }
}

static void run(kv_tier *t) {
    kv_tier_job job;
    bool stopping;
    while (kv_tier_next(t, true, &job, &stopping)) {
        attnd_errinfo info;
        run_job(t, &job, &info);
        kv_tier_end(t, &job, &info);
    }
}

static void free_memory(kv_tier *t) {
    memory_tier *m = (memory_tier *)t;
    if (m->is_pinned) {
        t->opts.arena->ops->unpin(t->opts.arena, t->store->base);
    }
    free(m);
}

static const kv_tier_ops memory_ops = {.kind = "memory", .run = run, .free = free_memory};

attnd_err kv_tier_open_memory(kv_tier **out, const kv_tier_opts *opts, const kv_arena *store,
                              bool is_kept, attnd_errinfo *info) {
    memory_tier *m = calloc(1, sizeof(*m));
    if (!m) {
        return attnd_fail(info, ATTND_ENOMEM, "tier", "no memory for a tier");
    }
    m->pub.store = store;
    attnd_err err = kv_tier_init(&m->pub, &memory_ops, opts, is_kept ? opts->bytes : 0, info);
    if (!err) {
        const kv_arena_ops *ops = opts->arena->ops;
        m->is_pinned = ops->pin && ops->pin(opts->arena, store->base, store->bytes);
        err = kv_tier_start(&m->pub, info);
    }
    if (err) {
        kv_tier_close(&m->pub);
        return err;
    }
    *out = &m->pub;
    return ATTND_OK;
}
