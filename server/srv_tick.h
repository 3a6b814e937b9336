// srv_tick wakes the loop every so many microseconds, which is finer than a loop's timers are.
// Loop thread only.
#ifndef ATTND_SERVER_SRV_TICK_H
#define ATTND_SERVER_SRV_TICK_H

#include <stdint.h>
#include <uv.h>

#include "proto/err.h"

typedef struct srv_tick {
    uv_poll_t poll;
    int fd;             // a timerfd
    uint64_t period_us; // 0 = stopped
    void (*cb)(void *ctx);
    void *ctx;
} srv_tick;

// srv_tick_open makes it, stopped.  ATTND_ENOMEM.  The memory must stay until the loop has closed
// its handles.
attnd_err srv_tick_open(srv_tick *t, uv_loop_t *loop, void (*cb)(void *ctx), void *ctx,
                        attnd_errinfo *info);

// srv_tick_set has cb called every period_us from now on, 0 = not any more.
void srv_tick_set(srv_tick *t, uint64_t period_us);

// srv_tick_close accepts one that is all zero.
void srv_tick_close(srv_tick *t);

#endif
