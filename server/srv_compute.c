// The CPU backend of the scheduler.
//
//   loop thread                          master thread (and attn_cpu's team)
//   launch: job = L, wake if asleep  ->  take job; kv_copy_run; attn_cpu_run
//   on_ended: take ended             <-  ended = L; uv_async_send
//      sched_launch_done(L)
//
//   launch of a small L: attn_cpu_run; ended = L; start soon
//   on_soon: take ended, sched_launch_done(L), which launch itself may not call
//
// The engine is one caller's at a time: the loop only calls it while no launch is with the master.
//
// The depth is 1, so a slot each way is the whole mailbox.  The master spins for SPIN_NS before it
// sleeps, because the next launch often comes from the callback that hears of the last; it does not
// where it would spin on the loop's own processor.
//
// job and asleep are sequentially consistent: either the loop sees the master asleep and wakes it,
// or the master sees the job before it sleeps.
#include "server/srv_compute.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "proto/clock.h"
#include "proto/pause.h"

enum {
    SPIN_US = 50,
    TURNS_PER_CLOCK = 64,
    CROWDED = 2, // with no more processors than this none is kept off, and nobody spins
    INLINE_ROWS = 4,
};

struct srv_compute {
    srv_backend pub; // first
    srv_compute_opts opts;
    sched *sched;
    uv_async_t async;
    uv_idle_t soon; // started while a launch that ran on the loop is to be told of
    bool away;      // a launch is with the master
    bool stopped;
    pthread_t thread;
    pthread_mutex_t lock; // guards sleeping on wake, and the fields of the start
    pthread_cond_t wake;
    _Atomic(sched_launch *) job;
    _Atomic(sched_launch *) ended;
    atomic_bool asleep, stopping;
    attn_cpu *cpu; // made and freed by the master, so that the team inherits its processors
    bool spins;
    bool started; // the master has made cpu, or failed to
    attnd_err start_err;
    attnd_errinfo start_info;
};

// ---- master thread

// keep_off takes one processor from the calling thread's mask, when there are enough.
static void keep_off(srv_compute *c) {
    cpu_set_t set;
    if (pthread_getaffinity_np(pthread_self(), sizeof(set), &set) != 0) {
        return; // more processors than a cpu_set_t holds: let the system place the threads
    }
    uint32_t num = (uint32_t)CPU_COUNT(&set);
    c->spins = num > CROWDED;
    if (num <= CROWDED || c->opts.num_threads >= num) {
        return;
    }
    size_t first = 0;
    while (!CPU_ISSET(first, &set)) {
        first++;
    }
    CPU_CLR(first, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

static bool has_work(srv_compute *c) {
    return atomic_load(&c->job) != NULL || atomic_load(&c->stopping);
}

static void spin(srv_compute *c) {
    uint64_t until = attnd_clock_us() + SPIN_US;
    for (uint32_t turns = 1; !has_work(c); turns++) {
        attnd_pause();
        if (turns % TURNS_PER_CLOCK == 0 && attnd_clock_us() > until) {
            return;
        }
    }
}

static void wait_for_work(srv_compute *c) {
    if (c->spins) {
        spin(c);
    }
    if (has_work(c)) {
        return;
    }
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->asleep, true);
    while (!has_work(c)) {
        pthread_cond_wait(&c->wake, &c->lock);
    }
    atomic_store(&c->asleep, false);
    pthread_mutex_unlock(&c->lock);
}

// run computes a launch, on either thread.
static void run(srv_compute *c, sched_launch *launch) {
    uint64_t start_us = attnd_clock_us();
    if (launch->num_copies > 0) {
        launch->err = kv_copy_run(c->opts.kv, launch->copies, launch->num_copies, &launch->info);
    }
    if (!launch->err && launch->params.num_rows > 0) {
        launch->err = attn_cpu_run(c->cpu, &launch->params, &launch->choice, &launch->info);
    }
    launch->run_us = attnd_clock_us() - start_us;
    atomic_store(&c->ended, launch);
}

static void start(srv_compute *c) {
    keep_off(c);
    attn_cpu_opts opts = {.num_threads = (int32_t)c->opts.num_threads,
                          .max_rows = c->opts.max_rows,
                          .isa = c->opts.isa};
    attnd_err err = attn_cpu_create(&c->cpu, &opts, &c->start_info);
    pthread_mutex_lock(&c->lock);
    c->start_err = err;
    c->started = true;
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->lock);
}

static void *master(void *arg) {
    srv_compute *c = arg;
    start(c);
    while (!c->start_err) {
        wait_for_work(c);
        if (atomic_load(&c->stopping)) {
            break; // a job that came with it is the loop's to fail
        }
        run(c, atomic_exchange(&c->job, NULL));
        uv_async_send(&c->async);
    }
    attn_cpu_free(c->cpu);
    return NULL;
}

// ---- loop thread

static void wake(srv_compute *c) {
    if (atomic_load(&c->asleep)) {
        pthread_mutex_lock(&c->lock);
        pthread_cond_signal(&c->wake);
        pthread_mutex_unlock(&c->lock);
    }
}

// is_small is true for a launch that takes less time than waking somebody for it.
static bool is_small(const srv_compute *c, const sched_launch *launch) {
    const attn_params *p = &launch->params;
    uint64_t dims = (uint64_t)p->shape.head_dim + (uint64_t)p->shape.v_head_dim;
    uint64_t work = 0, key = (uint64_t)p->shape.q_heads * dims;
    if (launch->num_copies > 0 || p->num_rows > INLINE_ROWS) {
        return false;
    }
    for (uint32_t i = 0; i < p->num_rows; i++) {
        work += (uint64_t)p->rows[i].q_count * (uint64_t)p->rows[i].kv_len * key;
    }
    return work <= c->opts.inline_work;
}

static void on_soon(uv_idle_t *soon) {
    srv_compute_poll(soon->data);
}

static void launch_one(void *ctx, sched_launch *launch) {
    srv_compute *c = ctx;
    ATTND_ASSERT(atomic_load(&c->job) == NULL && !c->away);
    if (!c->stopped && is_small(c, launch)) {
        run(c, launch);
        uv_idle_start(&c->soon, on_soon);
        return;
    }
    c->away = true;
    atomic_store(&c->job, launch);
    wake(c);
}

bool srv_compute_poll(srv_compute *c) {
    sched_launch *launch = atomic_exchange(&c->ended, NULL);
    if (launch) {
        c->away = false;
        uv_idle_stop(&c->soon);
        sched_launch_done(c->sched, launch);
    }
    return launch != NULL;
}

bool srv_compute_crowds(const srv_compute *c) {
    return c->away && !c->spins;
}

// on_ended takes in one launch: the next one sends again, so the loop's other work gets its turn.
static void on_ended(uv_async_t *async) {
    srv_compute_poll(async->data);
}

// start_thread starts the master with all signals blocked, which its team inherits, and waits for
// what it answers.
static attnd_err start_thread(srv_compute *c, attnd_errinfo *info) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&c->thread, NULL, master, c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        return attnd_fail(info, ATTND_ENOMEM, "threads", "the compute thread does not start");
    }
    pthread_mutex_lock(&c->lock);
    while (!c->started) {
        pthread_cond_wait(&c->wake, &c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    if (c->start_err) {
        pthread_join(c->thread, NULL);
        if (info) {
            *info = c->start_info;
        }
    }
    return c->start_err;
}

static void destroy(srv_compute *c) {
    pthread_cond_destroy(&c->wake);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

static bool backend_poll(srv_backend *b) {
    return srv_compute_poll((srv_compute *)b);
}

static bool backend_crowds(const srv_backend *b) {
    return srv_compute_crowds((const srv_compute *)b);
}

static void backend_set_sched(srv_backend *b, sched *s) {
    srv_compute_set_sched((srv_compute *)b, s);
}

static void backend_stop(srv_backend *b) {
    srv_compute_stop((srv_compute *)b);
}

static void backend_free(srv_backend *b) {
    srv_compute_free((srv_compute *)b);
}

static const srv_backend_ops backend_ops = {.set_sched = backend_set_sched,
                                            .poll = backend_poll,
                                            .crowds = backend_crowds,
                                            .stop = backend_stop,
                                            .free = backend_free};

attnd_err srv_compute_create(srv_compute **out, const srv_compute_opts *opts, attnd_errinfo *info) {
    srv_compute *c = calloc(1, sizeof(*c));
    if (!c) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for the compute threads");
    }
    c->opts = *opts;
    c->pub = (srv_backend){.ops = &backend_ops,
                           .device = "cpu",
                           .sched = {.launch = launch_one,
                                     .ctx = c,
                                     .pool = opts->pool,
                                     .pool_bytes = opts->pool_bytes,
                                     .depth = 1,
                                     .deterministic = opts->deterministic}};
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->wake, NULL);
    attnd_err err = start_thread(c, info);
    if (err) {
        destroy(c);
        return err;
    }
    // only the master's launches send, and there are none before this returns
    if (uv_async_init(opts->loop, &c->async, on_ended) != 0) {
        atomic_store(&c->stopping, true);
        wake(c);
        pthread_join(c->thread, NULL);
        destroy(c);
        return attnd_fail(info, ATTND_ENOMEM, "", "no descriptor to wake the loop with");
    }
    uv_idle_init(opts->loop, &c->soon);
    c->async.data = c->soon.data = c;
    c->pub.kernels = attn_cpu_isa(c->cpu);
    *out = c;
    return ATTND_OK;
}

srv_backend *srv_compute_backend(srv_compute *c) {
    return &c->pub;
}

void srv_compute_set_sched(srv_compute *c, sched *s) {
    c->sched = s;
}

// fail_queued ends what the master no longer takes, and what that lets follow.
static void fail_queued(srv_compute *c) {
    for (sched_launch *launch; (launch = atomic_exchange(&c->job, NULL));) {
        c->away = false;
        launch->err = attnd_fail(&launch->info, ATTND_ESHUTDOWN, "", "the daemon stops");
        sched_launch_done(c->sched, launch);
    }
}

void srv_compute_stop(srv_compute *c) {
    if (!c || c->stopped) {
        return;
    }
    c->stopped = true;
    atomic_store(&c->stopping, true);
    wake(c);
    pthread_join(c->thread, NULL);
    srv_compute_poll(c);
    fail_queued(c);
    uv_close((uv_handle_t *)&c->async, NULL);
    uv_close((uv_handle_t *)&c->soon, NULL);
}

void srv_compute_free(srv_compute *c) {
    if (c) {
        destroy(c);
    }
}
