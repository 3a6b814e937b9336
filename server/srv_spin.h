// srv_spin polls what no descriptor tells the loop of, such as submissions in rings, instead of
// letting the loop sleep.  It polls for a slice, then the loop does all else that is ready, then
// comes the next slice; when nothing has come for spin_us the loop sleeps, until srv_spin_wake.
//
// Going to sleep: sleeps(true) has everybody told that the loop is to be woken, then comes a full
// fence, then pending looks once more.  Whoever brings something does the same the other way round
// (brings it, fence, looks whether the loop sleeps), so one of the two sees the other.
//
// With crowds, the loop sleeps as soon as nothing has come: others need the processor.  With awaits
// it goes on however long nothing comes, unless it crowds.
//
// Loop thread only, callbacks included.  Does not allocate.
#ifndef ATTND_SERVER_SRV_SPIN_H
#define ATTND_SERVER_SRV_SPIN_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

typedef struct srv_spin_opts {
    uint32_t spin_us;
    // serve takes what has come, and returns at until_us (attnd_clock_us) if there is more; false
    // when nothing had come.
    bool (*serve)(void *ctx, uint64_t until_us);
    // pending is true when there is something for serve.
    bool (*pending)(void *ctx);
    void (*sleeps)(void *ctx, bool sleeps);
    bool (*awaits)(void *ctx);
    bool (*crowds)(void *ctx);
    void *ctx;
} srv_spin_opts;

// srv_spin: private, but for embedding.
typedef struct srv_spin {
    uv_idle_t idle;
    srv_spin_opts opts;
    bool awake, stopped;
    uint64_t event_us; // when something came last
    uint64_t slept;    // times that it went to sleep
} srv_spin;

// srv_spin_open makes it, asleep: whoever is told of by sleeps must know.
void srv_spin_open(srv_spin *s, uv_loop_t *loop, const srv_spin_opts *opts);

// srv_spin_close ends it; nothing wakes it any more.  *s is the loop's until closed was called,
// with the handle, whose data is ctx.
void srv_spin_close(srv_spin *s, uv_close_cb closed);

// srv_spin_wake notes that something has come, and has the loop poll.
void srv_spin_wake(srv_spin *s);

bool srv_spin_awake(const srv_spin *s);
uint64_t srv_spin_slept(const srv_spin *s); // how many times, since it was made
void srv_spin_set(srv_spin *s, uint32_t spin_us);

#endif
