// Processes with the arena mapped: a pidfd each, in a table whose places are the names under which
// the supervisor keeps them ("process-0" ...).
//
//     FREE -> HELD    srv_process_add           -> FREE    srv_process_remove
//             HELD -> AWAITED                   -> CLOSING when it is gone
//     FREE -> BEFORE  of the run before         -> CLOSING when it is gone or back
//     CLOSING -> FREE when the loop has closed the handle
#include "server/srv_process.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/log.h"
#include "server/srv_inherit.h"
#include "server/srv_notify.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 // Linux 6.5
#endif

enum { NAME_BYTES = 32 };

typedef enum state { FREE, HELD, AWAITED, BEFORE, CLOSING } state;

typedef struct process {
    srv_processes *t;
    state state;
    int fd;
    uv_poll_t poll; // AWAITED, BEFORE, CLOSING
    void (*gone)(void *ctx);
    void *ctx;
} process;

struct srv_processes {
    uv_loop_t *loop;
    void (*settled)(void *ctx);
    void *ctx;
    process all[SRV_MAX_PROCESSES];
    uint32_t handles; // not closed yet
    bool closing;
};

static void name_of(const process *p, char out[NAME_BYTES]) {
    snprintf(out, NAME_BYTES, "process-%d", (int)(p - p->t->all));
}

// pid_of returns the process's id in our namespace, 0 or below when it has none or is gone.
static int32_t pid_of(int pidfd) {
    char path[64], line[64];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", pidfd);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f) && sscanf(line, "Pid: %d", &pid) != 1) {
    }
    if (f) {
        fclose(f);
    }
    return pid;
}

static void forget(process *p) {
    char name[NAME_BYTES];
    name_of(p, name);
    srv_notify_forget(name);
    close(p->fd);
    p->fd = -1;
}

static void on_closed(uv_handle_t *handle) {
    process *p = handle->data;
    srv_processes *t = p->t;
    p->state = FREE;
    if (--t->handles == 0 && t->closing) {
        free(t);
    }
}

// end forgets a process whose handle is open.
static void end(process *p) {
    bool was_before = p->state == BEFORE;
    p->state = CLOSING;
    uv_close((uv_handle_t *)&p->poll, on_closed);
    forget(p);
    if (was_before && srv_processes_before(p->t, NULL) == 0) {
        attnd_log(ATTND_LOG_INFO, "process", "those of the run before are gone or back");
        p->t->settled(p->t->ctx);
    }
}

static void on_gone(uv_poll_t *poll, int status, int events) {
    (void)status, (void)events;
    process *p = poll->data;
    void (*gone)(void *ctx) = p->state == AWAITED ? p->gone : NULL;
    end(p);
    if (gone) {
        gone(p->ctx);
    }
}

static bool watch(process *p, state as) {
    if (uv_poll_init(p->t->loop, &p->poll, p->fd) != 0) {
        return false;
    }
    p->t->handles++;
    p->poll.data = p;
    p->state = as;
    uv_poll_start(&p->poll, UV_READABLE, on_gone);
    return true;
}

static void inherit(process *p) {
    char name[NAME_BYTES];
    name_of(p, name);
    p->fd = srv_inherit_fd(name);
    if (p->fd < 0) {
        return;
    }
    int32_t pid = pid_of(p->fd);
    if (pid <= 0 || !watch(p, BEFORE)) { // gone; or no pidfd, which nobody but us stores there
        forget(p);
        return;
    }
    attnd_log(ATTND_LOG_WARN, "process",
              "process %d of the run before has the cache mapped: no step is opened before it "
              "attaches again or ends",
              (int)pid);
}

attnd_err srv_processes_open(srv_processes **out, uv_loop_t *loop, void (*settled)(void *ctx),
                             void *ctx, attnd_errinfo *info) {
    srv_processes *t = calloc(1, sizeof(*t));
    if (!t) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for processes");
    }
    t->loop = loop;
    t->settled = settled;
    t->ctx = ctx;
    for (int i = 0; i < SRV_MAX_PROCESSES; i++) {
        t->all[i].t = t;
        inherit(&t->all[i]);
    }
    *out = t;
    return ATTND_OK;
}

// The supervisor keeps what it has, for the next run.
void srv_processes_close(srv_processes *t) {
    if (!t) {
        return;
    }
    t->closing = true;
    for (int i = 0; i < SRV_MAX_PROCESSES; i++) {
        process *p = &t->all[i];
        if (p->state == AWAITED || p->state == BEFORE) {
            p->state = CLOSING;
            uv_close((uv_handle_t *)&p->poll, on_closed);
        }
        if (p->fd >= 0 && p->state != FREE) {
            close(p->fd);
            p->fd = -1;
        }
    }
    if (t->handles == 0) {
        free(t);
    }
}

static int open_pidfd(int socket) {
    int fd = -1;
    socklen_t len = sizeof(fd);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &len) == 0) {
        return fd;
    }
    struct ucred peer;
    len = sizeof(peer);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0 || peer.pid <= 0) {
        return -1;
    }
    return pidfd_open(peer.pid, 0);
}

// accept_back takes one place of the run before that is of the same process.
static void accept_back(srv_processes *t, int32_t pid) {
    for (int i = 0; i < SRV_MAX_PROCESSES; i++) {
        process *p = &t->all[i];
        if (p->state == BEFORE && pid > 0 && pid_of(p->fd) == pid) {
            end(p);
            return;
        }
    }
}

attnd_err srv_process_add(srv_processes *t, int socket, uint32_t *idx, attnd_errinfo *info) {
    uint32_t i = 0;
    while (i < SRV_MAX_PROCESSES && t->all[i].state != FREE) {
        i++;
    }
    if (i == SRV_MAX_PROCESSES) {
        return attnd_fail(info, ATTND_EBUSY, "", "%d processes have the arena", SRV_MAX_PROCESSES);
    }
    process *p = &t->all[i];
    p->fd = open_pidfd(socket);
    if (p->fd < 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "", "the kernel does not say which process it is");
    }
    p->state = HELD;
    char name[NAME_BYTES];
    name_of(p, name);
    srv_notify_store(name, p->fd);
    accept_back(t, pid_of(p->fd));
    *idx = i;
    return ATTND_OK;
}

void srv_process_remove(srv_processes *t, uint32_t idx) {
    forget(&t->all[idx]);
    t->all[idx].state = FREE;
}

void srv_process_await(srv_processes *t, uint32_t idx, void (*gone)(void *ctx), void *ctx) {
    process *p = &t->all[idx];
    p->gone = gone;
    p->ctx = ctx;
    // Without a handle nobody tells: its blocks stay where they are until the next start.
    if (!watch(p, AWAITED)) {
        attnd_log(ATTND_LOG_ERROR, "process", "process %d cannot be watched: its blocks are held",
                  (int)pid_of(p->fd));
    }
}

uint32_t srv_processes_before(const srv_processes *t, int32_t *pid) {
    uint32_t num = 0;
    for (int i = 0; t && i < SRV_MAX_PROCESSES; i++) {
        if (t->all[i].state == BEFORE) {
            num++;
            if (pid) {
                *pid = pid_of(t->all[i].fd);
            }
        }
    }
    return num;
}
