// kv_tier_store: what the two kinds of tier (kv_tier_mem.c, kv_tier_file.c) share with kv_tier.c.
// A store embeds kv_tier first and has a thread, which runs ops->run.
#ifndef ATTND_KVCACHE_KV_TIER_STORE_H
#define ATTND_KVCACHE_KV_TIER_STORE_H

#include <pthread.h>

#include "kvcache/kv_tier.h"

typedef struct kv_tier_ops {
    const char *kind;
    // run does jobs until kv_tier_next says that there will be no more; then it returns when those
    // that it has taken have ended.
    void (*run)(kv_tier *t);
    // wake makes a run that waits for something else look at kv_tier_next again; NULL = it never
    // does.  Any thread.
    void (*wake)(kv_tier *t);
    // free, after the thread has ended, frees the store, itself included.
    void (*free)(kv_tier *t);
} kv_tier_ops;

// kv_tier_queue is jobs in order, of a fixed number.
typedef struct kv_tier_queue {
    kv_tier_job *items; // [depth]
    uint32_t first, num;
} kv_tier_queue;

struct kv_tier {
    const kv_tier_ops *ops;
    kv_tier_opts opts;
    const kv_arena *store; // host memory that the images lie in; NULL = they do not
    kv_tier_slots *slots;
    uint64_t kept_bytes; // from the start, what may be claimed
    bool has_thread;
    pthread_t thread;
    pthread_cond_t cond;
    pthread_mutex_t *lock; // guards all below; apart, so that a const tier can be looked at
    kv_tier_queue jobs, ended;
    uint32_t away; // jobs submitted and not taken back
    bool stopping;
    kv_tier_info info;
};

// kv_tier_init makes the shared part of a store; kept_bytes may be claimed.  kv_tier_start starts
// its thread.  After an error of either, kv_tier_close.  ATTND_ENOMEM, ATTND_EINVAL.
attnd_err kv_tier_init(kv_tier *t, const kv_tier_ops *ops, const kv_tier_opts *opts,
                       uint64_t kept_bytes, attnd_errinfo *info);
attnd_err kv_tier_start(kv_tier *t, attnd_errinfo *info);

// kv_tier_next takes the next job of the queue.  When there is none it waits if is_idle, and else
// says false; it says false, too, when the thread is to end, and then *stopping is true.  Jobs of a
// tier that is off end here.
bool kv_tier_next(kv_tier *t, bool is_idle, kv_tier_job *job, bool *stopping);

// kv_tier_end ends a job, and switches the tier off when its err is ATTND_EIO, with *info's text.
void kv_tier_end(kv_tier *t, const kv_tier_job *job, const attnd_errinfo *info);

// kv_tier_is_whole says whether the image of a PUT is what the tier that lends it has a checksum
// of.
bool kv_tier_is_whole(const kv_tier_job *job);

// kv_tier_copy copies bytes [from, from + bytes) of a job's image out of the arena to buffer, or,
// of a GET, from buffer into the arena.  ATTND_EIO.
attnd_err kv_tier_copy(const kv_tier *t, const kv_tier_job *job, uint64_t from, uint64_t bytes,
                       char *buffer, attnd_errinfo *info);

// kv_tier_seed returns what the checksum of an image in a slot starts from.
uint64_t kv_tier_seed(const kv_tier *t, uint64_t slot);

#endif
