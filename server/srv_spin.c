// The idle handle keeps the loop from blocking while it is started.
#include "server/srv_spin.h"

#include <sched.h>

#include "proto/clock.h"
#include "proto/pause.h"
#include "proto/proto_ring.h"

enum {
    SLICE_US = 20,   // of polling between two looks at everything else
    AWAIT_US = 100,  // the same while something is awaited elsewhere, which takes every look
    IDLE_PAUSES = 4, // between two turns that found nothing
    YIELD_US = 5,    // without an event, before the processor is offered to others between two
};

static void try_sleep(srv_spin *s) {
    s->opts.sleeps(s->opts.ctx, true);
    proto_ring_fence();
    if (s->opts.pending(s->opts.ctx)) {
        s->opts.sleeps(s->opts.ctx, false);
        s->event_us = attnd_clock_us();
        return;
    }
    s->awake = false;
    s->slept++;
    uv_idle_stop(&s->idle);
}

static void pause_cpu(void) {
    for (int i = 0; i < IDLE_PAUSES; i++) {
        attnd_pause();
    }
}

static void on_idle(uv_idle_t *idle) {
    srv_spin *s = (srv_spin *)idle; // its first member
    const srv_spin_opts *o = &s->opts;
    uint64_t now = attnd_clock_us();
    uint64_t until = now + (o->awaits(o->ctx) ? AWAIT_US : SLICE_US);
    do {
        bool any = o->serve(o->ctx, until);
        now = attnd_clock_us();
        if (any) {
            s->event_us = now;
        } else if (o->crowds(o->ctx) || (now - s->event_us >= o->spin_us && !o->awaits(o->ctx))) {
            try_sleep(s);
        } else if (now - s->event_us < YIELD_US) {
            pause_cpu();
        } else {
            sched_yield(); // a client may have been put on this very processor
        }
    } while (s->awake && now < until);
}

void srv_spin_open(srv_spin *s, uv_loop_t *loop, const srv_spin_opts *opts) {
    *s = (srv_spin){.opts = *opts};
    uv_idle_init(loop, &s->idle);
    s->idle.data = opts->ctx;
}

void srv_spin_close(srv_spin *s, uv_close_cb closed) {
    s->stopped = true;
    uv_close((uv_handle_t *)&s->idle, closed);
}

void srv_spin_wake(srv_spin *s) {
    s->event_us = attnd_clock_us();
    if (!s->awake && !s->stopped) {
        s->awake = true;
        s->opts.sleeps(s->opts.ctx, false);
        uv_idle_start(&s->idle, on_idle);
    }
}

bool srv_spin_awake(const srv_spin *s) {
    return s->awake;
}

uint64_t srv_spin_slept(const srv_spin *s) {
    return s->slept;
}

void srv_spin_set(srv_spin *s, uint32_t spin_us) {
    s->opts.spin_us = spin_us;
}
