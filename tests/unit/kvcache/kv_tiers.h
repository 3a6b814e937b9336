// kv_tiers gives a test's cache a tier of host memory whose copies the test can hold up, and makes
// it wait for them.
#ifndef ATTND_TESTS_KV_TIERS_H
#define ATTND_TESTS_KV_TIERS_H

#include <pthread.h>
#include <time.h>

#include "kvcache/kv_tier.h"
#include "tests/unit/kvcache/kv_fixture.h"

static pthread_mutex_t tiers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t tiers_cond = PTHREAD_COND_INITIALIZER;
static bool tiers_held; // copies wait
static attnd_err tiers_err;

static inline attnd_err tiers_pass(attnd_errinfo *info) {
    pthread_mutex_lock(&tiers_lock);
    while (tiers_held) {
        pthread_cond_wait(&tiers_cond, &tiers_lock);
    }
    attnd_err err = tiers_err;
    pthread_mutex_unlock(&tiers_lock);
    return err ? attnd_fail(info, err, "tier", "the test's error") : ATTND_OK;
}

static inline attnd_err tiers_read(const kv_arena *arena, void *dst, uint64_t off, uint64_t bytes,
                                   attnd_errinfo *info) {
    attnd_err err = tiers_pass(info);
    return err ? err : kv_arena_host_ops.read(arena, dst, off, bytes, info);
}

static inline attnd_err tiers_write(const kv_arena *arena, uint64_t off, const void *src,
                                    uint64_t bytes, attnd_errinfo *info) {
    attnd_err err = tiers_pass(info);
    return err ? err : kv_arena_host_ops.write(arena, off, src, bytes, info);
}

static inline void tiers_set(bool held, attnd_err err) {
    pthread_mutex_lock(&tiers_lock);
    tiers_held = held;
    tiers_err = err;
    pthread_cond_broadcast(&tiers_cond);
    pthread_mutex_unlock(&tiers_lock);
}

static inline void tiers_ended(void *ctx) {
    (void)ctx;
    pthread_mutex_lock(&tiers_lock);
    pthread_cond_broadcast(&tiers_cond);
    pthread_mutex_unlock(&tiers_lock);
}

// tiers_ops returns the operations of a host arena, with copies that can be held up.
static inline const kv_arena_ops *tiers_ops(void) {
    static kv_arena_ops ops;
    ops = kv_arena_host_ops;
    ops.read = tiers_read;
    ops.write = tiers_write;
    tiers_set(false, ATTND_OK);
    return &ops;
}

static inline kv_tier_opts tiers_opts(const kv_fixture *f, uint32_t slots, uint32_t depth) {
    return (kv_tier_opts){.arena = &f->arena,
                          .bytes = (uint64_t)slots * KV_TIER_UNIT,
                          .slab_bytes = KV_TIER_UNIT,
                          .salt = kv_salt(f->kv),
                          .depth = depth,
                          .ended = tiers_ended};
}

// tiers_wait waits until no copy is under way, and takes all in.
static inline void tiers_wait(kv_fixture *f, const kv_tier *tier) {
    for (kv_tier_info info;;) {
        kv_tiers_poll(f->kv);
        kv_tier_get_info(tier, &info);
        if (info.jobs == 0) {
            return;
        }
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

#endif
