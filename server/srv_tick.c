// A timerfd in the loop.
#include "server/srv_tick.h"

#include <sys/timerfd.h>
#include <unistd.h>

static void on_tick(uv_poll_t *poll, int status, int events) {
    (void)events;
    srv_tick *t = poll->data;
    uint64_t times;
    if (status == 0 && read(t->fd, &times, sizeof(times)) == (ssize_t)sizeof(times)) {
        t->cb(t->ctx);
    }
}

attnd_err srv_tick_open(srv_tick *t, uv_loop_t *loop, void (*cb)(void *ctx), void *ctx,
                        attnd_errinfo *info) {
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (fd < 0 || uv_poll_init(loop, &t->poll, fd) != 0) {
        if (fd >= 0) {
            close(fd);
        }
        return attnd_fail(info, ATTND_ENOMEM, "", "no descriptor for a timer");
    }
    t->fd = fd;
    t->cb = cb;
    t->ctx = ctx;
    t->poll.data = t;
    uv_poll_start(&t->poll, UV_READABLE, on_tick);
    return ATTND_OK;
}

void srv_tick_set(srv_tick *t, uint64_t period_us) {
    if (period_us == t->period_us) {
        return;
    }
    struct timespec each = {.tv_sec = (time_t)(period_us / 1000000),
                            .tv_nsec = (long)(period_us % 1000000) * 1000};
    struct itimerspec spec = {.it_interval = each, .it_value = each};
    timerfd_settime(t->fd, 0, &spec, NULL);
    t->period_us = period_us;
}

void srv_tick_close(srv_tick *t) {
    if (t->cb) {
        uv_close((uv_handle_t *)&t->poll, NULL); // stops the polling of fd
        close(t->fd);
        t->cb = NULL;
    }
}
