// The thread sleeps in poll until something happens to the socket, which is once in a session.
//
// done is stored again and again, since a stream resets it before each wait, and has as many before
// it as layers were given to it.
#include "proto/client/client_watch.h"

#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/clock.h"

enum { AGAIN_MS = 1, GRACE_MS = 500 };

static void end_waits(const client_watch *w) {
    for (uint32_t i = 0; i < w->num_flags; i++) {
        __atomic_store_n(&w->flags[i].done, 1, __ATOMIC_RELEASE);
    }
}

// end_all ends waits until it is told to stop.
static void end_all(const client_watch *w, struct pollfd *stop) {
    uint64_t until_ms = attnd_clock_ms() + GRACE_MS;
    bool is_late = false;
    do {
        end_waits(w);
        if (!is_late && attnd_clock_ms() >= until_ms) {
            shutdown(w->fd, SHUT_RDWR);
            is_late = true;
        }
    } while (poll(stop, 1, AGAIN_MS) <= 0);
}

static void *watch(void *arg) {
    const client_watch *w = arg;
    struct pollfd p[] = {{.fd = w->wake_fd, .events = POLLIN}, {.fd = w->fd, .events = POLLRDHUP}};
    const short over = POLLRDHUP | POLLHUP | POLLERR | POLLNVAL;
    do {
        p[0].revents = p[1].revents = 0;
        (void)poll(p, 2, -1);
    } while (!p[0].revents && !(p[1].revents & over));
    if (p[1].revents & over) {
        w->gone(w->ctx);
        end_all(w, &p[0]);
    }
    return NULL;
}

attnd_err client_watch_start(client_watch *w, int fd, proto_flag *flags, uint32_t num_flags,
                             void (*gone)(void *ctx), void *ctx, attnd_errinfo *info) {
    *w = (client_watch){.fd = fd,
                        .wake_fd = eventfd(0, EFD_CLOEXEC),
                        .flags = flags,
                        .num_flags = num_flags,
                        .gone = gone,
                        .ctx = ctx};
    sigset_t all, before;
    sigfillset(&all); // the program's signals are for its own threads
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = w->wake_fd >= 0 && pthread_create(&w->thread, NULL, watch, w) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!started && w->wake_fd >= 0) {
        close(w->wake_fd);
    }
    return started ? ATTND_OK : attnd_fail(info, ATTND_ENOMEM, "engine", "no thread to be had");
}

void client_watch_stop(client_watch *w) {
    uint64_t one = 1;
    (void)!write(w->wake_fd, &one, sizeof(one));
    pthread_join(w->thread, NULL);
    close(w->wake_fd);
}
