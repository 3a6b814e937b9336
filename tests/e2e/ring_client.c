// A ring's other end, in the plainest way.
#include "tests/e2e/ring_client.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/proto_msg.h"

enum { FUTEX_MS = 50 };

bool ring_client_connect(ring_client *c, const char *path) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    memset(c, 0, sizeof(*c));
    c->spin_us = RING_CLIENT_SPIN_US;
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    c->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connect(c->fd, (struct sockaddr *)&addr, sizeof(addr)) == 0) {
        return true;
    }
    close(c->fd);
    c->fd = -1;
    return false;
}

// recv_reply returns the descriptor that came with the answer, -1 when there was none.
static int recv_reply(ring_client *c, ssize_t *bytes) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {&c->attached, sizeof(c->attached)};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = sizeof(control.space)};
    *bytes = recvmsg(c->fd, &msg, MSG_CMSG_CLOEXEC);
    const struct cmsghdr *h = *bytes > 0 ? CMSG_FIRSTHDR(&msg) : NULL;
    int fd = -1;
    if (h && h->cmsg_type == SCM_RIGHTS) {
        memcpy(&fd, CMSG_DATA(h), sizeof(fd));
    }
    return fd;
}

static attnd_err map(ring_client *c, int fd, const proto_attach *ask) {
    attnd_errinfo info;
    attnd_err err = proto_ring_layout_make(&c->layout, ask->entries, ask->data_bytes, &info);
    void *base =
        err ? MAP_FAILED : mmap(NULL, c->layout.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        return ATTND_EIO;
    }
    c->base = base;
    c->head = base;
    return ATTND_OK;
}

attnd_err ring_client_ask(ring_client *c, const proto_attach *ask) {
    return ring_client_ask_more(c, ask, sizeof(*ask));
}

attnd_err ring_client_ask_more(ring_client *c, const proto_attach *ask, size_t packet_bytes) {
    ssize_t bytes;
    if (send(c->fd, ask, packet_bytes, MSG_NOSIGNAL) != (ssize_t)packet_bytes) {
        return ATTND_ECONN;
    }
    int fd = recv_reply(c, &bytes);
    if (bytes != (ssize_t)sizeof(c->attached)) {
        return ATTND_ECONN;
    }
    attnd_err err = (attnd_err)c->attached.status;
    if (!err) {
        err = fd >= 0 ? map(c, fd, ask) : ATTND_EPROTO;
    }
    if (fd >= 0) {
        close(fd);
    }
    return err;
}

attnd_err ring_client_open(ring_client *c, const char *path, uint32_t entries,
                           uint64_t data_bytes) {
    proto_attach ask = {.magic = PROTO_RING_MAGIC,
                        .version = PROTO_VERSION,
                        .entries = entries,
                        .data_bytes = data_bytes};
    return ring_client_connect(c, path) ? ring_client_ask(c, &ask) : ATTND_ECONN;
}

void ring_client_close(ring_client *c) {
    if (c->base) {
        munmap(c->base, c->layout.bytes);
        c->base = NULL;
    }
    if (c->fd >= 0) {
        close(c->fd);
        c->fd = -1;
    }
}

bool ring_client_closed(const ring_client *c, int ms) {
    struct pollfd p = {.fd = c->fd, .events = POLLRDHUP};
    return poll(&p, 1, ms) == 1 && (p.revents & (POLLRDHUP | POLLHUP)) != 0;
}

void ring_client_bell(ring_client *c) {
    proto_ring_fence();
    if (proto_ring_load(&c->head->daemon_sleeps)) {
        c->doorbells++;
        send(c->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

void ring_client_submit_raw(ring_client *c, const proto_ring_submit *s) {
    uint64_t at = c->sq_tail % c->layout.entries * sizeof(*s);
    memcpy(c->base + c->layout.sq_off + at, s, sizeof(*s));
    proto_ring_store(&c->head->sq_tail, ++c->sq_tail);
}

void ring_client_submit(ring_client *c, uint64_t msg_at, uint32_t msg_bytes, uint64_t reply_at,
                        uint32_t reply_bytes, uint64_t user) {
    proto_ring_submit s = {.msg_off = c->layout.data_off + msg_at,
                           .msg_bytes = msg_bytes,
                           .reply_bytes = reply_bytes,
                           .reply_off = c->layout.data_off + reply_at,
                           .user = user};
    ring_client_submit_raw(c, &s);
}

bool ring_client_take(ring_client *c, proto_ring_complete *out) {
    if (proto_ring_load(&c->head->cq_tail) == c->cq_head) {
        return false;
    }
    uint64_t at = c->cq_head % c->layout.entries * sizeof(*out);
    memcpy(out, c->base + c->layout.cq_off + at, sizeof(*out));
    proto_ring_store(&c->head->cq_head, ++c->cq_head);
    return true;
}

static void sleep_once(ring_client *c) {
    struct timespec bound = {.tv_nsec = FUTEX_MS * 1000000L};
    proto_ring_store(&c->head->client_waits, 1);
    proto_ring_fence();
    if (proto_ring_load(&c->head->cq_tail) == c->cq_head) {
        syscall(SYS_futex, &c->head->cq_tail, FUTEX_WAIT, c->cq_head, &bound, NULL, 0);
    }
    proto_ring_store(&c->head->client_waits, 0);
}

bool ring_client_wait(ring_client *c, proto_ring_complete *out, int ms) {
    uint64_t begin = attnd_clock_us();
    while (!ring_client_take(c, out)) {
        uint64_t waited = attnd_clock_us() - begin;
        if (waited < c->spin_us) {
            continue;
        }
        if (waited > (uint64_t)ms * 1000 || ring_client_closed(c, 0)) {
            return ring_client_take(c, out);
        }
        sleep_once(c);
    }
    return true;
}

attnd_err ring_client_call(ring_client *c, uint32_t op, uint64_t id, const void *body, size_t bytes,
                           const void **reply) {
    uint64_t half = c->layout.data_bytes / 2;
    uint8_t *msg = ring_client_data(c, 0);
    proto_write_header(msg, op, id, ATTND_OK, PROTO_BODY + bytes);
    if (bytes) {
        memcpy(msg + PROTO_BODY, body, bytes);
    }
    ring_client_submit(c, 0, (uint32_t)(PROTO_BODY + bytes), half, (uint32_t)half, id);
    ring_client_bell(c);
    proto_ring_complete done;
    if (!ring_client_wait(c, &done, 30000)) {
        return ATTND_ECONN;
    }
    if (reply) {
        *reply = ring_client_data(c, half + PROTO_BODY);
    }
    return (attnd_err)done.status;
}

void ring_client_send_rights(ring_client *c, int what, int num) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(RING_CLIENT_MAX_RIGHTS * sizeof(int))];
    } control;
    struct iovec iov = {"x", 1};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = CMSG_SPACE((size_t)num * sizeof(int))};
    struct cmsghdr *h = CMSG_FIRSTHDR(&msg);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN((size_t)num * sizeof(int));
    for (int i = 0; i < num; i++) {
        memcpy(CMSG_DATA(h) + (size_t)i * sizeof(int), &what, sizeof(int));
    }
    sendmsg(c->fd, &msg, MSG_NOSIGNAL);
}

int ring_client_count_fds(pid_t pid) {
    char name[64];
    int num = 0;
    snprintf(name, sizeof(name), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(name);
    while (dir && readdir(dir)) {
        num++;
    }
    if (dir) {
        closedir(dir);
    }
    return num;
}

int ring_client_count_regions(pid_t pid) {
    char name[64], line[512];
    int num = 0;
    snprintf(name, sizeof(name), "/proc/%d/maps", (int)pid);
    FILE *f = fopen(name, "r");
    while (f && fgets(line, sizeof(line), f)) {
        num += strstr(line, "attnd-ring") != NULL;
    }
    if (f) {
        fclose(f);
    }
    return num;
}
