// The queues between the loop and a tier's thread, and the slots.  Jobs are copied in and out; one
// mutex guards both queues, held for a copy of some words.
#include "kvcache/kv_tier.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "kvcache/kv_sum.h"
#include "kvcache/kv_tier_store.h"

static void push(const kv_tier *t, kv_tier_queue *q, const kv_tier_job *job) {
    ATTND_ASSERT(q->num < t->opts.depth);
    q->items[(q->first + q->num++) % t->opts.depth] = *job;
}

static bool pop(const kv_tier *t, kv_tier_queue *q, kv_tier_job *out) {
    if (q->num == 0) {
        return false;
    }
    *out = q->items[q->first];
    q->first = (q->first + 1) % t->opts.depth;
    q->num--;
    return true;
}

// ---- start and end

attnd_err kv_tier_init(kv_tier *t, const kv_tier_ops *ops, const kv_tier_opts *opts,
                       uint64_t kept_bytes, attnd_errinfo *info) {
    t->ops = ops;
    t->opts = *opts;
    t->kept_bytes = kept_bytes;
    t->info.kind = ops->kind;
    attnd_err err = kv_tier_slots_create(&t->slots, opts->bytes, opts->slab_bytes, info);
    if (err) {
        return err;
    }
    t->lock = calloc(1, sizeof(*t->lock));
    t->jobs.items = calloc(opts->depth, sizeof(*t->jobs.items));
    t->ended.items = calloc(opts->depth, sizeof(*t->ended.items));
    if (!t->lock || !t->jobs.items || !t->ended.items) {
        return attnd_fail(info, ATTND_ENOMEM, "tier", "no memory for the jobs of a tier");
    }
    pthread_mutex_init(t->lock, NULL);
    pthread_cond_init(&t->cond, NULL);
    return ATTND_OK;
}

static void *thread_main(void *arg) {
    kv_tier *t = arg;
    t->ops->run(t);
    return NULL;
}

attnd_err kv_tier_start(kv_tier *t, attnd_errinfo *info) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&t->thread, NULL, thread_main, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    t->has_thread = !failed;
    return failed ? attnd_fail(info, ATTND_ENOMEM, "tier", "the thread of a tier does not start")
                  : ATTND_OK;
}

void kv_tier_close(kv_tier *t) {
    if (!t) {
        return;
    }
    if (t->has_thread) {
        pthread_mutex_lock(t->lock);
        t->stopping = true;
        pthread_cond_signal(&t->cond);
        pthread_mutex_unlock(t->lock);
        if (t->ops->wake) {
            t->ops->wake(t);
        }
        pthread_join(t->thread, NULL);
    }
    if (t->lock) {
        pthread_mutex_destroy(t->lock);
        pthread_cond_destroy(&t->cond);
    }
    free(t->lock);
    free(t->jobs.items);
    free(t->ended.items);
    kv_tier_slots_free(t->slots);
    t->ops->free(t);
}

// ---- slots

bool kv_tier_take(kv_tier *t, uint64_t bytes, uint64_t *slot) {
    return !kv_tier_is_off(t) && kv_tier_slots_take(t->slots, bytes, slot);
}

void kv_tier_give(kv_tier *t, uint64_t slot) {
    kv_tier_slots_give(t->slots, slot);
}

bool kv_tier_holds(const kv_tier *t, uint64_t bytes) {
    return !kv_tier_is_off(t) && bytes <= t->opts.slab_bytes;
}

bool kv_tier_claim(kv_tier *t, uint64_t slot, uint64_t bytes) {
    return bytes <= t->kept_bytes && slot <= t->kept_bytes - bytes &&
           kv_tier_slots_claim(t->slots, slot, bytes);
}

uint64_t kv_tier_fill(const kv_tier *t, uint64_t *total) {
    return kv_tier_slots_bytes(t->slots, total);
}

// ---- images

uint64_t kv_tier_job_bytes(const kv_tier_job *job) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < job->num_blocks; i++) {
        bytes += job->bytes[i];
    }
    return bytes;
}

attnd_err kv_tier_copy(const kv_tier *t, const kv_tier_job *job, uint64_t from, uint64_t bytes,
                       char *buffer, attnd_errinfo *info) {
    const kv_arena *arena = job->from ? job->from : t->opts.arena;
    attnd_err err = ATTND_OK;
    for (uint32_t i = 0; i < job->num_blocks && bytes > 0 && !err; i++) {
        if (from >= job->bytes[i]) {
            from -= job->bytes[i];
            continue;
        }
        uint64_t left = job->bytes[i] - from, part = left < bytes ? left : bytes;
        err = job->op == KV_TIER_PUT
                  ? arena->ops->read(arena, buffer, job->at[i] + from, part, info)
                  : arena->ops->write(arena, job->at[i] + from, buffer, part, info);
        buffer += part;
        bytes -= part;
        from = 0;
    }
    return err ? ATTND_EIO : ATTND_OK;
}

bool kv_tier_lend(const kv_tier *t, uint64_t slot, uint64_t bytes, uint64_t sum, kv_tier_job *job) {
    *job = (kv_tier_job){
        .op = KV_TIER_PUT,
        .num_blocks = 1,
        .at = {slot},
        .bytes = {bytes},
        .from = t->store,
        .from_sum = sum,
        .from_seed = kv_tier_seed(t, slot),
    };
    return t->store && !kv_tier_is_off(t);
}

bool kv_tier_is_whole(const kv_tier_job *job) {
    return !job->from || kv_sum_bytes((const char *)job->from->base + job->at[0], job->bytes[0],
                                      job->from_seed) == job->from_sum;
}

uint64_t kv_tier_seed(const kv_tier *t, uint64_t slot) {
    return t->opts.salt ^ slot;
}

// ---- loop thread

attnd_err kv_tier_submit(kv_tier *t, const kv_tier_job *job) {
    ATTND_ASSERT(job->num_blocks > 0 && kv_tier_job_bytes(job) <= t->opts.slab_bytes);
    pthread_mutex_lock(t->lock);
    attnd_err err = t->info.off ? ATTND_EIO : ATTND_OK;
    if (!err && t->away == t->opts.depth) {
        t->info.busy++;
        err = ATTND_EBUSY;
    }
    if (!err) {
        t->away++;
        push(t, &t->jobs, job);
        pthread_cond_signal(&t->cond);
    }
    pthread_mutex_unlock(t->lock);
    if (!err && t->ops->wake) {
        t->ops->wake(t);
    }
    return err;
}

uint32_t kv_tier_room(const kv_tier *t) {
    pthread_mutex_lock(t->lock);
    uint32_t room = t->info.off ? 0 : t->opts.depth - t->away;
    pthread_mutex_unlock(t->lock);
    return room;
}

bool kv_tier_take_ended(kv_tier *t, kv_tier_job *out) {
    pthread_mutex_lock(t->lock);
    bool any = pop(t, &t->ended, out);
    t->away -= any;
    pthread_mutex_unlock(t->lock);
    return any;
}

bool kv_tier_is_off(const kv_tier *t) {
    pthread_mutex_lock(t->lock);
    bool off = t->info.off != ATTND_OK;
    pthread_mutex_unlock(t->lock);
    return off;
}

void kv_tier_get_info(const kv_tier *t, kv_tier_info *out) {
    pthread_mutex_lock(t->lock);
    *out = t->info;
    out->jobs = t->away;
    pthread_mutex_unlock(t->lock);
    out->in_use_bytes = kv_tier_fill(t, &out->bytes);
}

// ---- tier's thread

static void end_locked(kv_tier *t, const kv_tier_job *job) {
    bool is_put = job->op == KV_TIER_PUT;
    if (job->err == ATTND_OK) {
        *(is_put ? &t->info.puts : &t->info.gets) += 1;
        *(is_put ? &t->info.put_bytes : &t->info.get_bytes) += kv_tier_job_bytes(job);
    }
    t->info.damaged += job->err == ATTND_ESTALE;
    push(t, &t->ended, job);
}

bool kv_tier_next(kv_tier *t, bool is_idle, kv_tier_job *job, bool *stopping) {
    bool any = false, told = false;
    pthread_mutex_lock(t->lock);
    while (!any && !t->stopping) {
        any = pop(t, &t->jobs, job);
        if (any && t->info.off) {
            job->err = ATTND_EIO;
            end_locked(t, job);
            told = true;
            any = false;
        } else if (!any && !is_idle) {
            break;
        } else if (!any && told) { // what waited for the tier is told before we wait
            pthread_mutex_unlock(t->lock);
            t->opts.ended(t->opts.ctx);
            told = false;
            pthread_mutex_lock(t->lock);
        } else if (!any) {
            pthread_cond_wait(&t->cond, t->lock);
        }
    }
    *stopping = t->stopping;
    pthread_mutex_unlock(t->lock);
    if (told) {
        t->opts.ended(t->opts.ctx);
    }
    return any;
}

void kv_tier_end(kv_tier *t, const kv_tier_job *job, const attnd_errinfo *info) {
    pthread_mutex_lock(t->lock);
    if (job->err == ATTND_EIO && !t->info.off) {
        t->info.off = ATTND_EIO;
        memcpy(t->info.why, info->text, sizeof(t->info.why));
    }
    end_locked(t, job);
    pthread_mutex_unlock(t->lock);
    t->opts.ended(t->opts.ctx);
}
