// The GPU backend of the scheduler.
//
//   loop thread                       submit thread                      device
//   launch: jobs <- L, wake      ->   begin: copies, fill buffer     ->  upload, kernel, download
//                                     look, until the mark is passed <-  signals, mark
//   on_ended: sched_launch_done  <-   spread outputs; ended <- L; uv_async_send
//
// A launch may be prepared before it comes (srv_gpu_prep): while nothing is in flight the submit
// thread fills, plans and uploads it in the next buffer.  If it is the next launch, only the kernel
// remains to be started; else its upload is awaited, and the buffer used anew.  One that waits for
// a client's flag the thread may begin by itself: while it looks for the next job without sleeping,
// it looks at that flag, too.  The loop then hears of it when it has ended, or asks.  Where the
// client's device has a pair for it, the thread may do so even before the flag comes, when that is
// foreseen (srv_gap): by a launch that waits on the device for some microseconds, and was in vain
// if the flag does not come by then.
//
// Launches leave in the order in which they came.  While one is in flight the submit thread looks
// for its end without sleeping for SPIN_US, then every NAP_US: a decode of some 10 us would wait
// longer for an interrupt than it runs.  Behind a launch with signals it looks for the next one the
// same way, for spin_us, since waking it takes as long as such a launch: a client's stream waits
// for every layer.  So it does for the end of one, because the next layer's flag is not looked at
// before that is known.
#include "server/srv_gpu.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/pause.h"
#include "server/srv_gap.h"
#include "server/srv_gpu_prep.h"
#include "server/srv_stage.h"

enum {
    DEPTH = ATTN_DEVICE_BUFFERS,
    QUEUE = DEPTH + 1, // and one that was begun without the loop
    SPIN_US = 200,
    NAP_US = 20,
    TIMER_SLACK_NS = 1000,
    FLAG_US = 20 * 1000, // that a flag whose gate has passed may take to the host
    CROWDED = 2,         // with no more processors than this the loop and the thread take turns
};

// queue is launches on their way to the other thread.
typedef struct queue {
    sched_launch *items[QUEUE];
    uint32_t first, num;
} queue;

// flight is a launch that has a buffer.
typedef struct flight {
    sched_launch *launch;
    srv_stage stage;
    uint64_t start_us;
    uint64_t flag_us; // when the flag of a gated one was seen raised; 0 = not yet
    bool marked;      // the device says when its work has ended; else it is not to be waited for
} flight;

struct srv_gpu {
    srv_backend pub; // first
    srv_backend_ops ops;
    srv_gpu_opts opts;
    attn_device *device;
    kv_arena arena; // what the cache has is a copy
    const kv_cache *kv;
    // loop thread
    sched *sched;
    uv_async_t async;
    uint32_t away; // launches
    bool started, stopped, told;
    bool is_crowded; // since the start
    // both
    pthread_t thread;
    pthread_mutex_t lock; // guards all below
    pthread_cond_t wake;
    queue jobs, ended;
    bool stopping, lost, spoilt;
    attnd_errinfo lost_info;
    // as above, to be looked at without the lock: both threads do so all the time, and one that
    // waits for the other's lock sleeps
    uint32_t num_jobs, num_ended;
    srv_gpu_prep prep;
    // submit thread
    flight flights[DEPTH];
    uint32_t first, num; // of flights
    bool watches;        // what is prepared has a flag
    bool uploaded;       // and is known to be on the device
    bool gates;          // and may be launched behind a gate
    uint64_t active_us;  // when a launch with signals ended last, or one was prepared
    uint64_t layer_us;   // when a launch with signals ended last
    srv_gap gap;         // behind that, until the next flag
};

static srv_gpu *of(srv_backend *b) {
    return (srv_gpu *)b;
}

static void push(queue *q, sched_launch *launch) {
    ATTND_ASSERT(q->num < QUEUE);
    q->items[(q->first + q->num++) % QUEUE] = launch;
}

static sched_launch *pop(queue *q) {
    if (q->num == 0) {
        return NULL;
    }
    sched_launch *launch = q->items[q->first];
    q->first = (q->first + 1) % QUEUE;
    q->num--;
    return launch;
}

// ---- submit thread

// note_error looks whether an error was the device's end.
static void note_error(srv_gpu *g, attnd_err err, const attnd_errinfo *info) {
    if (err != ATTND_ECUDA || !g->opts.device_ops->lost(g->device)) {
        return;
    }
    pthread_mutex_lock(&g->lock);
    if (!g->lost) {
        g->lost = true;
        g->spoilt = g->opts.device_ops->spoilt(g->device);
        g->lost_info = *info;
    }
    pthread_mutex_unlock(&g->lock);
}

static attnd_err move_rows(const kv_arena *arena, const kv_move *m, attnd_errinfo *info) {
    srv_gpu *g = arena->owner;
    return g->opts.device_ops->move(g->device, m->dst, m->src, m->row_bytes, m->pitch, m->num_rows,
                                    info);
}

static attnd_err read_bytes(const kv_arena *arena, void *dst, uint64_t off, uint64_t bytes,
                            attnd_errinfo *info) {
    srv_gpu *g = arena->owner;
    return g->opts.device_ops->read(g->device, dst, off, bytes, info);
}

static attnd_err write_bytes(const kv_arena *arena, uint64_t off, const void *src, uint64_t bytes,
                             attnd_errinfo *info) {
    srv_gpu *g = arena->owner;
    return g->opts.device_ops->write(g->device, off, src, bytes, info);
}

static bool pin(const kv_arena *arena, void *base, uint64_t bytes) {
    srv_gpu *g = arena->owner;
    return g->opts.device_ops->pin(g->device, base, bytes);
}

static void unpin(const kv_arena *arena, void *base) {
    srv_gpu *g = arena->owner;
    g->opts.device_ops->unpin(g->device, base);
}

static const kv_arena_ops arena_ops = {.kind = "device",
                                       .move = move_rows,
                                       .read = read_bytes,
                                       .write = write_bytes,
                                       .pin = pin,
                                       .unpin = unpin};

static void relax(uint64_t since_us, uint64_t spin_us) {
    if (attnd_clock_us() - since_us > spin_us) {
        nanosleep(&(struct timespec){.tv_nsec = NAP_US * 1000L}, NULL);
    } else {
        attnd_pause();
    }
}

// run_filled runs a filling that is uploaded.
static attnd_err run_filled(srv_gpu *g, uint32_t buffer, const flight *f, attnd_errinfo *info) {
    const attn_device_ops *ops = g->opts.device_ops;
    const srv_stage *s = &f->stage;
    const sched_launch *l = f->launch;
    attnd_err err = l->gated ? ops->launch_gated(g->device, buffer, l->signals[0], info)
                             : ops->launch(g->device, buffer, info);
    if (!err && s->out_bytes) {
        err = ops->download(g->device, buffer, s->buffer->bytes - s->out_bytes, s->out_bytes, info);
    }
    return err;
}

// submit gives the device one filling of a buffer.
static attnd_err submit(srv_gpu *g, uint32_t buffer, const flight *f, attnd_errinfo *info) {
    const attn_device_ops *ops = g->opts.device_ops;
    const srv_stage *s = &f->stage;
    attnd_err err = ops->upload(g->device, buffer, 0, s->in_bytes, info);
    return err ? err : run_filled(g, buffer, f, info);
}

static attnd_err await(srv_gpu *g, uint32_t buffer, attnd_errinfo *info) {
    uint64_t since_us = attnd_clock_us();
    bool ended = false;
    attnd_err err = ATTND_OK;
    while (!ended && !err) {
        err = g->opts.device_ops->ended(g->device, buffer, &ended, info);
        relax(since_us, SPIN_US);
    }
    return err;
}

// fill fills the buffer from the cursor on and plans it, with fewer rows or tokens while that is
// more than one launch of the device can do.
static attnd_err fill(srv_gpu *g, uint32_t buffer, flight *f, srv_stage_cursor *at,
                      srv_stage_limits *limits, attnd_errinfo *info) {
    sched_launch *launch = f->launch;
    for (;;) {
        srv_stage_cursor next = *at;
        if (!srv_stage_fill(&f->stage, &launch->params, &next, limits)) {
            return attnd_fail(info, ATTND_EMSGSIZE, "staging",
                              "a query token of the launch does not fit compute.staging");
        }
        attn_params p = srv_stage_params(&f->stage, &launch->params);
        attnd_err err = g->opts.device_ops->plan(g->device, buffer, &p, &launch->choice, info);
        if (err != ATTND_EMSGSIZE || !srv_stage_halve(&f->stage, limits)) {
            *at = err ? *at : next;
            return err;
        }
    }
}

// run_rows gives the device a launch's rows.  All fillings but the last are waited for.
static attnd_err run_rows(srv_gpu *g, uint32_t buffer, flight *f, attnd_errinfo *info) {
    const attn_params *p = &f->launch->params;
    srv_stage_cursor at = {0};
    srv_stage_limits limits = {.rows = UINT32_MAX, .queries = INT32_MAX};
    for (;;) {
        attnd_err err = fill(g, buffer, f, &at, &limits, info);
        if (!err) {
            err = submit(g, buffer, f, info);
        }
        if (err || at.row == p->num_rows) {
            return err;
        }
        err = g->opts.device_ops->mark(g->device, buffer, info);
        if (!err) {
            err = await(g, buffer, info);
        }
        if (err) {
            return err;
        }
        srv_stage_spread(&f->stage);
    }
}

// signal_all has the flags of a launch's requests set behind its work.
static attnd_err signal_all(srv_gpu *g, const sched_launch *launch, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    for (uint32_t i = 0; i < launch->num_signals && !launch->gated && !err; i++) {
        err = g->opts.device_ops->signal(g->device, launch->signals[i], info);
    }
    return err;
}

// ---- preparation

// prepare_next fills, plans and uploads what is wanted, if it fits the next buffer whole.
static void prepare_next(srv_gpu *g) {
    const attn_device_ops *ops = g->opts.device_ops;
    srv_stage *stage = &g->flights[g->first].stage;
    attnd_errinfo info;
    g->uploaded = false;
    if (srv_gpu_prep_fill(&g->prep, stage, ops, g->device, g->first, &g->watches)) {
        attnd_err err = ops->upload(g->device, g->first, 0, stage->in_bytes, &info);
        if (err) {
            note_error(g, err, &info);
            srv_gpu_prep_spoil(&g->prep);
            g->watches = false;
        }
    }
    g->active_us = g->watches ? attnd_clock_us() : g->active_us;
}

// claim_prep ends the preparation, if there is one.  True: it is the launch's, and in its buffer.
static bool claim_prep(srv_gpu *g, uint32_t buffer, sched_launch *launch) {
    bool spoils;
    bool is_it = srv_gpu_prep_claim(&g->prep, &g->flights[buffer].stage, launch, &spoils);
    attnd_errinfo info;
    if (spoils) { // nobody may touch the buffer before its upload has ended
        attnd_err err = g->opts.device_ops->mark(g->device, buffer, &info);
        note_error(g, err ? err : await(g, buffer, &info), &info);
    }
    return is_it;
}

// ---- flights

// begin puts a launch in flight, whatever comes of it.  After an error it is waited for, too: the
// device may still read the buffer.
static void begin(srv_gpu *g, sched_launch *launch) {
    uint32_t buffer = (g->first + g->num++) % DEPTH;
    flight *f = &g->flights[buffer];
    f->launch = launch;
    f->start_us = attnd_clock_us();
    f->flag_us = 0;
    g->watches = false;
    launch->prepared = launch->prepared || claim_prep(g, buffer, launch);
    if (!launch->prepared) {
        f->stage.num_rows = 0;
    }
    attnd_err err = ATTND_OK;
    if (g->lost) { // which this thread alone sets
        err = g->lost_info.code;
        launch->info = g->lost_info;
    }
    if (!err && launch->num_copies > 0) {
        err = kv_copy_run(g->kv, launch->copies, launch->num_copies, &launch->info);
    }
    if (!err && launch->params.num_rows > 0) {
        err = launch->prepared ? run_filled(g, buffer, f, &launch->info)
                               : run_rows(g, buffer, f, &launch->info);
    }
    if (!err) {
        err = signal_all(g, launch, &launch->info);
    }
    note_error(g, err, &launch->info);
    attnd_errinfo info;
    attnd_err mark_err = g->opts.device_ops->mark(g->device, buffer, &info);
    note_error(g, mark_err, &info);
    f->marked = !mark_err;
    if (!err && mark_err) {
        launch->info = info;
    }
    launch->err = err ? err : mark_err;
}

// see_flag looks when the flag of a gated flight comes.  It is not lowered: a gate that has given
// up meanwhile leaves it to whoever launches the layer next.
static void see_flag(srv_gpu *g, flight *f) {
    if (!f->flag_us && srv_gpu_prep_raised(&g->prep)) {
        f->flag_us = attnd_clock_us();
    }
}

// take_flag lowers the flag of a flight whose gate has passed, once it is there: the client's
// kernel raises the pair first, and the flag right behind it; where another program has the
// client's device in between, that takes until it has it back.
static bool take_flag(srv_gpu *g, flight *f) {
    uint64_t since_us = attnd_clock_us();
    bool came, is_late;
    do {
        is_late = attnd_clock_us() - since_us > FLAG_US; // then this is the last look
        see_flag(g, f);
        came = f->flag_us && srv_gpu_prep_consume(&g->prep);
        relax(since_us, SPIN_US);
    } while (!came && !is_late);
    return came;
}

// end_gate finds out what became of a gate.  A call whose flag does not come fails, and its drain
// awaits it: it would pass for the next one's later.
static void end_gate(srv_gpu *g, flight *f) {
    sched_launch *launch = f->launch;
    uint32_t waited_us = 0;
    bool passed = !launch->err && g->opts.device_ops->passed(g->device, g->first, &waited_us);
    if (passed && !take_flag(g, f)) {
        launch->err = attnd_fail(&launch->info, ATTND_EPROTO, "flags",
                                 "the pair of a layer was raised, its flag was not");
    }
    launch->missed = !passed || launch->err;
    if (launch->missed) {
        srv_gap_missed(&g->gap);
        return;
    }
    srv_gap_passed(&g->gap, waited_us);
    srv_gap_note(&g->gap, f->flag_us - g->layer_us);
}

// finish ends the oldest flight.
static void finish(srv_gpu *g, flight *f) {
    sched_launch *launch = f->launch;
    uint64_t now_us = attnd_clock_us();
    if (launch->gated) {
        end_gate(g, f);
    }
    if (!launch->err && !launch->missed) {
        srv_stage_spread(&f->stage);
    }
    launch->run_us = now_us - f->start_us;
    if (launch->num_signals) {
        g->active_us = now_us;
        g->layer_us = launch->missed ? g->layer_us : now_us;
    }
    g->first = (g->first + 1) % DEPTH;
    g->num--;
    pthread_mutex_lock(&g->lock);
    push(&g->ended, launch);
    __atomic_store_n(&g->num_ended, g->ended.num, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&g->lock);
    uv_async_send(&g->async);
}

// look finishes the oldest flight if it has ended.
static bool look(srv_gpu *g) {
    flight *f = &g->flights[g->first];
    sched_launch *launch = f->launch;
    bool ended = true;
    if (launch->gated) {
        see_flag(g, f);
    }
    if (f->marked) {
        attnd_errinfo info;
        attnd_err err = g->opts.device_ops->ended(g->device, g->first, &ended, &info);
        note_error(g, err, &info);
        ended = ended || err;
        if (err && !launch->err) {
            launch->err = err;
            launch->info = info;
        }
    }
    if (ended) {
        finish(g, f);
    }
    return ended;
}

// has_job says, without the lock, whether the thread has something to do.
static bool has_job(const srv_gpu *g) {
    return __atomic_load_n(&g->num_jobs, __ATOMIC_RELAXED) || srv_gpu_prep_is_wanted(&g->prep);
}

// begin_own returns the launch of what is prepared when its flag has come, or is foreseen to come
// soon; else NULL.
static sched_launch *begin_own(srv_gpu *g) {
    const attn_device_ops *ops = g->opts.device_ops;
    uint64_t since_us = attnd_clock_us() - g->layer_us;
    sched_launch *own = srv_gpu_prep_take(&g->prep);
    if (own && srv_gpu_prep_follows(&g->prep)) {
        srv_gap_note(&g->gap, since_us);
    }
    if (!own && !g->uploaded) {
        g->uploaded = ops->uploaded(g->device, g->first);
    }
    if (!own && g->uploaded && g->gates && srv_gap_is_due(&g->gap, since_us)) {
        own = srv_gpu_prep_gate(&g->prep);
    }
    return own;
}

// spin_for_job looks for a launch where one is likely to come soon, and returns one that the thread
// begins by itself, else NULL.  Launches of the loop's go first.
static sched_launch *spin_for_job(srv_gpu *g) {
    sched_launch *own = NULL;
    bool watches = g->watches && g->opts.ahead;
    if (g->num > 0 || (g->is_crowded && !watches)) {
        return NULL;
    }
    if (watches) {
        srv_gpu_prep_watch(&g->prep, true);
        g->gates =
            srv_gpu_prep_has_gate(&g->prep) && g->opts.device_ops->gates(g->device, g->first);
    }
    while (!own && !has_job(g) && attnd_clock_us() - g->active_us < g->opts.spin_us) {
        own = watches ? begin_own(g) : NULL;
        if (g->is_crowded) {
            sched_yield();
        } else {
            attnd_pause();
        }
    }
    if (watches) {
        srv_gpu_prep_watch(&g->prep, false);
    }
    return own;
}

// take_job takes the next launch, NULL when there is none; sleeps while nothing is in flight and
// nothing to be done.  False when the thread is to end.
static bool take_job(srv_gpu *g, sched_launch **launch) {
    *launch = spin_for_job(g);
    if (*launch) {
        return true;
    }
    pthread_mutex_lock(&g->lock);
    while (g->num == 0 && g->jobs.num == 0 && !g->stopping && !srv_gpu_prep_is_wanted(&g->prep)) {
        pthread_cond_wait(&g->wake, &g->lock);
    }
    // what is queued when the thread stops is the loop's to fail
    *launch = g->stopping || g->num == DEPTH ? NULL : pop(&g->jobs);
    __atomic_store_n(&g->num_jobs, g->jobs.num, __ATOMIC_RELAXED);
    bool ends = g->stopping && g->num == 0;
    pthread_mutex_unlock(&g->lock);
    return !ends;
}

// patience returns for how long the end of the oldest flight is looked for without sleeping.
static uint64_t patience(const srv_gpu *g) {
    bool signals = g->flights[g->first].launch->num_signals > 0;
    return signals && !g->is_crowded && g->opts.spin_us > SPIN_US ? g->opts.spin_us : SPIN_US;
}

static void *submitter(void *arg) {
    srv_gpu *g = arg;
    uint64_t since_us = 0;
    sched_launch *launch;
    (void)prctl(PR_SET_TIMERSLACK, (unsigned long)TIMER_SLACK_NS); // else a nap takes 50 us more
    while (take_job(g, &launch)) {
        if (launch) {
            begin(g, launch);
            since_us = attnd_clock_us();
        } else if (g->num == 0) {
            prepare_next(g);
        } else if (look(g)) {
            since_us = attnd_clock_us();
        } else {
            relax(since_us, patience(g));
        }
    }
    return NULL;
}

// ---- loop thread

static void launch_one(void *ctx, sched_launch *launch) {
    srv_gpu *g = ctx;
    g->away++;
    pthread_mutex_lock(&g->lock);
    push(&g->jobs, launch);
    __atomic_store_n(&g->num_jobs, g->jobs.num, __ATOMIC_RELAXED);
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->lock);
}

static void gpu_prepare(srv_backend *b, const attn_params *params, uint64_t ticket,
                        const srv_ahead *ahead) {
    srv_gpu *g = of(b);
    if (srv_gpu_prep_want(&g->prep, params, ticket, ahead)) {
        pthread_mutex_lock(&g->lock);
        pthread_cond_signal(&g->wake);
        pthread_mutex_unlock(&g->lock);
    }
}

static bool gpu_forget(srv_backend *b, uint64_t ticket) {
    return srv_gpu_prep_forget(&of(b)->prep, ticket);
}

static bool gpu_unwatch(srv_backend *b, uint64_t ticket) {
    return srv_gpu_prep_unwatch(&of(b)->prep, ticket);
}

static bool gpu_begun(const srv_backend *b, uint64_t ticket) {
    return srv_gpu_prep_begun(&((const srv_gpu *)b)->prep, ticket);
}

static bool gpu_watches(const srv_backend *b, uint64_t ticket) {
    return srv_gpu_prep_watched(&((const srv_gpu *)b)->prep, ticket);
}

// end_own tells of a launch that the thread began by itself; another one may be prepared from then
// on.
static void end_own(srv_gpu *g) {
    sched_launch launch = g->prep.launch;
    srv_gpu_prep_settle(&g->prep);
    g->pub.ahead += !launch.missed;
    g->pub.gated += launch.gated && !launch.missed;
    g->pub.missed += launch.missed;
    g->pub.ran_ahead(g->pub.ctx, launch.ticket, &launch);
}

// take_ended takes in one launch, and tells of the device's end before the first that met it.
static bool take_ended(srv_gpu *g) {
    if (!__atomic_load_n(&g->num_ended, __ATOMIC_RELAXED)) {
        return false;
    }
    pthread_mutex_lock(&g->lock);
    sched_launch *launch = pop(&g->ended);
    __atomic_store_n(&g->num_ended, g->ended.num, __ATOMIC_RELAXED);
    bool tell = g->lost && !g->told;
    pthread_mutex_unlock(&g->lock);
    if (tell && launch) {
        g->told = true;
        g->opts.lost(g->opts.ctx, &g->lost_info, g->spoilt);
    }
    if (launch) {
        g->pub.prepared += launch->prepared && !launch->missed;
    }
    if (launch && srv_gpu_prep_is_own(&g->prep, launch)) {
        end_own(g);
    } else if (launch) {
        g->away--;
        sched_launch_done(g->sched, launch);
    }
    return launch != NULL;
}

static void on_ended(uv_async_t *async) {
    srv_gpu *g = async->data;
    for (int i = 0; i < QUEUE && take_ended(g); i++) {
    }
}

static bool gpu_poll(srv_backend *b) {
    return take_ended(of(b));
}

static bool gpu_crowds(const srv_backend *b) {
    const srv_gpu *g = (const srv_gpu *)b;
    return g->is_crowded && (g->away > 0 || srv_gpu_prep_any_begun(&g->prep));
}

static attnd_err gpu_check_row(const srv_backend *b, const attn_shape *shape, const attn_row *row,
                               attnd_errinfo *info) {
    const srv_gpu *g = (const srv_gpu *)b;
    return g->opts.device_ops->check_row(g->device, shape, row, info);
}

static attnd_err gpu_region_make(srv_backend *b, uint64_t bytes, attn_device_region *out,
                                 attnd_errinfo *info) {
    srv_gpu *g = of(b);
    return g->opts.device_ops->region_make(g->device, bytes, out, info);
}

static void gpu_region_free(srv_backend *b, attn_device_region *r) {
    srv_gpu *g = of(b);
    g->opts.device_ops->region_free(g->device, r);
}

static attnd_err gpu_flags_map(srv_backend *b, void *base, uint64_t bytes, uint64_t *address,
                               attnd_errinfo *info) {
    srv_gpu *g = of(b);
    return g->opts.device_ops->flags_map(g->device, base, bytes, address, info);
}

static void gpu_flags_unmap(srv_backend *b, void *base) {
    srv_gpu *g = of(b);
    g->opts.device_ops->flags_unmap(g->device, base);
}

static void gpu_set_sched(srv_backend *b, sched *s) {
    of(b)->sched = s;
}

static void end_thread(srv_gpu *g) {
    pthread_mutex_lock(&g->lock);
    g->stopping = true;
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->lock);
    pthread_join(g->thread, NULL);
}

// fail_queued ends what the thread no longer takes, and what that lets follow.
static void fail_queued(srv_gpu *g) {
    for (sched_launch *launch; (launch = pop(&g->jobs));) {
        g->away--;
        launch->err = attnd_fail(&launch->info, ATTND_ESHUTDOWN, "", "the daemon stops");
        sched_launch_done(g->sched, launch);
    }
}

static void gpu_stop(srv_backend *b) {
    srv_gpu *g = of(b);
    if (!g->started || g->stopped) {
        return;
    }
    g->stopped = true;
    end_thread(g);
    while (take_ended(g)) {
    }
    fail_queued(g);
    uv_close((uv_handle_t *)&g->async, NULL);
}

static void gpu_free(srv_backend *b) {
    srv_gpu *g = of(b);
    for (int i = 0; i < DEPTH; i++) {
        srv_stage_fini(&g->flights[i].stage);
    }
    if (g->device) {
        g->opts.device_ops->close(g->device);
    }
    pthread_cond_destroy(&g->wake);
    pthread_mutex_destroy(&g->lock);
    srv_gpu_prep_fini(&g->prep);
    free(g);
}

// ---- start

static attnd_err open_device(srv_gpu *g, attnd_errinfo *info) {
    const srv_gpu_opts *opts = &g->opts;
    attn_device_opts dev = {.ordinal = opts->ordinal,
                            .arena_bytes = opts->arena_bytes,
                            .arena_fd = opts->arena_fd,
                            .adopt_bytes = opts->adopt_bytes,
                            .buffer_bytes = opts->staging_bytes,
                            .max_rows = opts->max_rows};
    attnd_err err = opts->device_ops->open(&g->device, &dev, info);
    for (int i = 0; i < DEPTH && !err; i++) {
        err = srv_stage_init(&g->flights[i].stage, &g->device->buffers[i], opts->max_rows);
        if (err) {
            attnd_fail(info, err, "", "no memory for rows on their way to the device");
        }
    }
    return err;
}

static void describe(srv_gpu *g) {
    const attn_device *d = g->device;
    snprintf(g->pub.device, sizeof(g->pub.device), "cuda:%d", g->opts.ordinal);
    memcpy(g->pub.name, d->name, sizeof(g->pub.name));
    memcpy(g->pub.uuid, d->uuid, sizeof(g->pub.uuid));
    g->pub.kernels = d->kernels;
    g->pub.mps = d->mps;
    g->pub.waits = g->opts.waits && d->waits;
    g->pub.region_unit = d->region_unit;
    g->arena = (kv_arena){.base = d->arena,
                          .bytes = d->arena_bytes,
                          .fd = d->arena_fd,
                          .on_device = true,
                          .pages = KV_PAGES_HUGE,
                          .ops = &arena_ops,
                          .owner = g};
    g->pub.sched = (sched_backend){.launch = launch_one,
                                   .ctx = g,
                                   .pool = d->arena,
                                   .pool_bytes = d->arena_bytes,
                                   .depth = DEPTH,
                                   .deterministic = g->opts.deterministic};
}

attnd_err srv_gpu_open(srv_gpu **out, const srv_gpu_opts *opts, kv_arena *arena,
                       attnd_errinfo *info) {
    srv_gpu *g = calloc(1, sizeof(*g));
    if (!g) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for the device");
    }
    g->opts = *opts;
    g->is_crowded = sysconf(_SC_NPROCESSORS_ONLN) <= CROWDED;
    g->ops = (srv_backend_ops){.set_sched = gpu_set_sched,
                               .check_shape = opts->device_ops->check_shape,
                               .check_row = gpu_check_row,
                               .poll = gpu_poll,
                               .crowds = gpu_crowds,
                               .region_make = gpu_region_make,
                               .region_free = gpu_region_free,
                               .flags_map = gpu_flags_map,
                               .flags_unmap = gpu_flags_unmap,
                               .prepare = gpu_prepare,
                               .forget = gpu_forget,
                               .unwatch = gpu_unwatch,
                               .begun = gpu_begun,
                               .watches = gpu_watches,
                               .stop = gpu_stop,
                               .free = gpu_free};
    g->pub.ops = &g->ops;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->wake, NULL);
    attnd_err err = srv_gpu_prep_init(&g->prep, opts->max_rows);
    if (err) {
        attnd_fail(info, err, "", "no memory for rows that are prepared");
    } else {
        err = open_device(g, info);
    }
    if (err) {
        gpu_free(&g->pub);
        return err;
    }
    describe(g);
    *arena = g->arena;
    *out = g;
    return ATTND_OK;
}

attnd_err srv_gpu_start(srv_gpu *g, uv_loop_t *loop, const kv_cache *kv, attnd_errinfo *info) {
    g->kv = kv;
    if (uv_async_init(loop, &g->async, on_ended) != 0) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no descriptor to wake the loop with");
    }
    g->async.data = g;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&g->thread, NULL, submitter, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        uv_close((uv_handle_t *)&g->async, NULL);
        return attnd_fail(info, ATTND_ENOMEM, "threads", "the submit thread does not start");
    }
    g->started = true;
    return ATTND_OK;
}

srv_backend *srv_gpu_backend(srv_gpu *g) {
    return &g->pub;
}
