// Clients with the arena mapped: a pidfd each, in a table.  The supervisor keeps it as
// "process-PLACE-KEY", the key in hexadecimal; none, of a daemon that knew of no keys, counts as
// zeros.
//
//     FREE -> HELD    srv_process_add           -> FREE    srv_process_remove
//             HELD -> AWAITED                   -> CLOSING when it is gone or back
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

enum { NAME_BYTES = 64 };

typedef enum state { FREE, HELD, AWAITED, BEFORE, CLOSING } state;

typedef struct process {
    srv_processes *t;
    state state;
    char name[NAME_BYTES]; // under which the supervisor has it
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

static const char prefix[] = "process-";

static void set_name(process *p, const uint8_t *key) {
    int n = snprintf(p->name, NAME_BYTES, "%s%d-", prefix, (int)(p - p->t->all));
    for (int i = 0; i < SRV_PROCESS_KEY; i++) {
        n += snprintf(p->name + n, (size_t)(NAME_BYTES - n), "%02x", key[i]);
    }
}

// key_of returns where in a name the key begins, "" for none.
static const char *key_of(const char *name) {
    const char *dash = strchr(name + sizeof(prefix) - 1, '-');
    return dash ? dash + 1 : "";
}

static bool is_zeros(const char *key) {
    return key[strspn(key, "0")] == '\0';
}

static process *find_free(srv_processes *t) {
    for (int i = 0; i < SRV_MAX_PROCESSES; i++) {
        if (t->all[i].state == FREE) {
            return &t->all[i];
        }
    }
    return NULL;
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

// same_client is true for two places of one client of a process that is still there.
static bool same_client(const process *a, const process *b) {
    const char *x = key_of(a->name), *y = key_of(b->name);
    int32_t pid = pid_of(a->fd);
    return pid > 0 && pid == pid_of(b->fd) && (strcmp(x, y) == 0 || (is_zeros(x) && is_zeros(y)));
}

// has_key: clients without one may be several, and are only known again after a restart.
static bool has_key(const process *p) {
    return !is_zeros(key_of(p->name));
}

static void forget(process *p) {
    srv_notify_forget(p->name);
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

// inherit takes over what lay at the place that the name says: places of one run have names of
// their own, and what is new gets another place.
static void inherit(srv_processes *t, const char *name, int fd) {
    unsigned long i = strtoul(name + sizeof(prefix) - 1, NULL, 10);
    process *p = i < SRV_MAX_PROCESSES ? &t->all[i] : NULL;
    if (!p || p->state != FREE) {
        attnd_log(ATTND_LOG_ERROR, "process", "%s is not of the run before", name);
        return;
    }
    snprintf(p->name, NAME_BYTES, "%s", name);
    p->fd = fd;
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
    }
    char name[NAME_BYTES];
    int fd;
    for (int i = 0; (fd = srv_inherit_at(i, name, sizeof(name))) >= 0; i++) {
        if (strncmp(name, prefix, sizeof(prefix) - 1) == 0) {
            inherit(t, name, fd);
        }
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

int srv_process_pidfd(int socket) {
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

// accept_back ends the other places of a client that has attached again.
static void accept_back(const process *p) {
    for (int i = 0; i < SRV_MAX_PROCESSES; i++) {
        process *other = &p->t->all[i];
        bool left_alone = other->state == BEFORE || (other->state == AWAITED && has_key(p));
        if (left_alone && same_client(other, p)) {
            void (*gone)(void *ctx) = other->state == AWAITED ? other->gone : NULL;
            end(other);
            if (gone) {
                gone(other->ctx);
            }
        }
    }
}

// is_back says whether the client of a place has attached again since.
static bool is_back(const process *p) {
    for (int i = 0; has_key(p) && i < SRV_MAX_PROCESSES; i++) {
        const process *other = &p->t->all[i];
        if (other != p && other->state == HELD && same_client(other, p)) {
            return true;
        }
    }
    return false;
}

attnd_err srv_process_add(srv_processes *t, int socket, const uint8_t key[SRV_PROCESS_KEY],
                          uint32_t *idx, attnd_errinfo *info) {
    process *p = find_free(t);
    if (!p) {
        return attnd_fail(info, ATTND_EBUSY, "", "%d processes have the arena", SRV_MAX_PROCESSES);
    }
    p->fd = srv_process_pidfd(socket);
    if (p->fd < 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "", "the kernel does not say which process it is");
    }
    p->state = HELD;
    set_name(p, key);
    srv_notify_store(p->name, p->fd);
    accept_back(p);
    *idx = (uint32_t)(p - t->all);
    return ATTND_OK;
}

void srv_process_remove(srv_processes *t, uint32_t idx) {
    forget(&t->all[idx]);
    t->all[idx].state = FREE;
}

void srv_process_await(srv_processes *t, uint32_t idx, void (*gone)(void *ctx), void *ctx) {
    process *p = &t->all[idx];
    if (is_back(p)) {
        srv_process_remove(t, idx);
        gone(ctx);
        return;
    }
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
