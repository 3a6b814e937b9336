// Attaching.  The region is the daemon's making, and the library does not take its word for it: it
// must be as large as was asked for and sealed against shrinking, or an access could miss it and
// end the process.
#include "proto/client/client_attach.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/clock.h"

static attnd_err failed(const char *what, int error, attnd_errinfo *info) {
    bool late = error == EAGAIN || error == EWOULDBLOCK || error == EINPROGRESS;
    return attnd_fail(info, late ? ATTND_ETIMEDOUT : ATTND_ECONN, "", "%s: %s", what,
                      late ? "no answer in time" : strerror(error));
}

// again is true when a signal of the caller's interrupted a system call that may go on.
static bool again(uint64_t until_ms) {
    return errno == EINTR && attnd_clock_ms() < until_ms;
}

static bool connect_fd(int fd, const struct sockaddr_un *addr, int32_t timeout_ms) {
    uint64_t until_ms = attnd_clock_ms() + (uint64_t)timeout_ms;
    int rv;
    do {
        rv = connect(fd, (const struct sockaddr *)addr, sizeof(*addr));
    } while (rv != 0 && again(until_ms));
    return rv == 0;
}

static attnd_err connect_to(int *out, const char *path, int32_t timeout_ms, attnd_errinfo *info) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    struct timeval limit = {timeout_ms / 1000, timeout_ms % 1000 * 1000};
    if (strlen(path) >= sizeof(addr.sun_path)) {
        return attnd_fail(info, ATTND_EINVAL, "url", "the attach socket's path is too long");
    }
    strcpy(addr.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) != 0 ||
        !connect_fd(fd, &addr, timeout_ms)) {
        attnd_err err = failed(path, errno, info);
        if (fd >= 0) {
            close(fd);
        }
        return err;
    }
    *out = fd;
    return ATTND_OK;
}

// receive takes the answer and the descriptor with it, -1 when there is none.  The room is for one,
// and CMSG_SPACE would have padding in which the kernel puts another.
static attnd_err receive(int fd, void *reply, size_t size, int32_t timeout_ms, int *passed,
                         attnd_errinfo *info) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec iov = {reply, size};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = CMSG_LEN(sizeof(int))};
    uint64_t until_ms = attnd_clock_ms() + (uint64_t)timeout_ms;
    ssize_t bytes;
    do {
        bytes = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
    } while (bytes < 0 && again(until_ms));
    if (bytes < 0) {
        return failed("attach socket", errno, info);
    }
    const struct cmsghdr *h = CMSG_FIRSTHDR(&msg);
    *passed = -1;
    if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS &&
        h->cmsg_len >= CMSG_LEN(sizeof(int))) {
        memcpy(passed, CMSG_DATA(h), sizeof(int));
    }
    if (bytes == 0) {
        return attnd_fail(info, ATTND_ECONN, "", "the daemon takes no ring");
    }
    uint32_t magic;
    memcpy(&magic, reply, sizeof(magic));
    if (bytes != (ssize_t)size || magic != PROTO_RING_MAGIC) {
        return attnd_fail(info, ATTND_EPROTO, "magic", "the attach socket's answer is malformed");
    }
    if (msg.msg_flags & MSG_CTRUNC) {
        return *passed < 0 ? attnd_fail(info, ATTND_ENOMEM, "", "no descriptor left for a ring")
                           : attnd_fail(info, ATTND_EPROTO, "", "more than one descriptor came");
    }
    return ATTND_OK;
}

static attnd_err map(client_attached *out, int region, const proto_attach_reply *reply,
                     attnd_errinfo *info) {
    const proto_ring_layout *l = &out->layout;
    struct stat st;
    int seals = region >= 0 ? fcntl(region, F_GET_SEALS) : -1;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(region, &st) != 0 ||
        (uint64_t)st.st_size < l->bytes || reply->bytes != l->bytes ||
        reply->data_off != l->data_off) {
        return attnd_fail(info, ATTND_EPROTO, "bytes", "the region is not the one asked for");
    }
    void *base = mmap(NULL, l->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region, 0);
    if (base == MAP_FAILED) {
        return attnd_fail(info, ATTND_ENOMEM, "", "the region cannot be mapped: %s",
                          strerror(errno));
    }
    out->base = base;
    return ATTND_OK;
}

static attnd_err refused(const proto_attach_reply *reply, bool arena, attnd_errinfo *info) {
    attnd_err err = reply->status < 0 ? (attnd_err)reply->status : ATTND_EPROTO;
    if (arena && (err == ATTND_EPERM || err == ATTND_ENOTSUP)) {
        return attnd_fail(info, err, "engine", "the daemon gives no arena: %s",
                          err == ATTND_EPERM ? "its server.in_process_uids does not name this user"
                                             : "it has none that can be shared");
    }
    return attnd_fail(info, err, "", "the daemon gives no ring: %s", attnd_strerror(err));
}

static attnd_err receive_arena(client_attached *out, int32_t timeout_ms, attnd_errinfo *info) {
    attnd_err err =
        receive(out->fd, &out->arena, sizeof(out->arena), timeout_ms, &out->arena_fd, info);
    return !err && out->arena_fd < 0 ? attnd_fail(info, ATTND_EPROTO, "engine", "no arena came")
                                     : err;
}

attnd_err client_attach(client_attached *out, const char *path, const proto_attach *ask,
                        int32_t timeout_ms, uint64_t *most, attnd_errinfo *info) {
    proto_attach_reply reply = {0};
    int region = -1;
    bool arena = ask->flags & PROTO_ATTACH_ARENA;
    out->arena_fd = -1;
    out->base = NULL;
    *most = 0;
    attnd_err err = proto_ring_layout_make(&out->layout, ask->entries, ask->data_bytes, info);
    if (err || (err = connect_to(&out->fd, path, timeout_ms, info))) {
        return err;
    }
    if (send(out->fd, ask, sizeof(*ask), MSG_NOSIGNAL) != (ssize_t)sizeof(*ask)) {
        err = failed("attach socket", errno, info);
    } else {
        err = receive(out->fd, &reply, sizeof(reply), timeout_ms, &region, info);
    }
    if (!err && reply.status != 0) {
        *most = reply.bytes;
        err = refused(&reply, arena, info);
    }
    if (!err) {
        err = map(out, region, &reply, info);
    }
    if (!err && arena) {
        err = receive_arena(out, timeout_ms, info);
    }
    if (region >= 0) {
        close(region);
    }
    if (err && out->base) {
        munmap(out->base, out->layout.bytes);
    }
    if (err && out->arena_fd >= 0) {
        close(out->arena_fd);
    }
    if (err) {
        close(out->fd);
    }
    return err;
}
