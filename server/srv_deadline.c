// One per process, like the process's end.  The thread is started by the first deadline and ends
// with the process.
#include "server/srv_deadline.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/log.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // guards deadline_ms
static pthread_cond_t changed;
static uint64_t deadline_ms = UINT64_MAX;

static void *wait_for_it(void *arg) {
    (void)arg;
    pthread_mutex_lock(&lock);
    for (uint64_t now = attnd_clock_ms(); now < deadline_ms; now = attnd_clock_ms()) {
        if (deadline_ms == UINT64_MAX) {
            pthread_cond_wait(&changed, &lock);
        } else {
            struct timespec at = {.tv_sec = (time_t)(deadline_ms / 1000),
                                  .tv_nsec = (long)(deadline_ms % 1000) * 1000000};
            pthread_cond_timedwait(&changed, &lock, &at);
        }
    }
    attnd_log(ATTND_LOG_ERROR, "server", "the stop hangs: ended with exit status %d",
              SRV_DEADLINE_EXIT);
    _exit(SRV_DEADLINE_EXIT);
}

static void start(void) {
    pthread_t thread;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); // attnd_clock_ms's
    pthread_cond_init(&changed, &attr);
    pthread_condattr_destroy(&attr);
    if (pthread_create(&thread, NULL, wait_for_it, NULL) == 0) {
        pthread_detach(thread);
    } else {
        attnd_log(ATTND_LOG_WARN, "server", "no thread to bound the stop with");
    }
}

void srv_deadline_set(uint64_t at_ms) {
    pthread_mutex_lock(&lock);
    deadline_ms = at_ms;
    pthread_mutex_unlock(&lock);
    pthread_once(&once, start);
    pthread_cond_signal(&changed);
}
