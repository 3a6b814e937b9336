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

// limit bounds the next call on a socket, which waits 1 ms at least: 0 would be for ever.
static bool limit(int fd, int option, uint64_t until_ms) {
    uint64_t now_ms = attnd_clock_ms(), ms = until_ms > now_ms ? until_ms - now_ms : 1;
    struct timeval left = {(time_t)(ms / 1000), (suseconds_t)(ms % 1000 * 1000)};
    return setsockopt(fd, SOL_SOCKET, option, &left, sizeof(left)) == 0;
}

static bool connect_fd(int fd, const struct sockaddr_un *addr, uint64_t until_ms) {
    int rv;
    do {
        rv = limit(fd, SO_SNDTIMEO, until_ms)
                 ? connect(fd, (const struct sockaddr *)addr, sizeof(*addr))
                 : -1;
    } while (rv != 0 && again(until_ms));
    return rv == 0;
}

static attnd_err connect_to(int *out, const char *path, uint64_t until_ms, attnd_errinfo *info) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(addr.sun_path)) {
        return attnd_fail(info, ATTND_EINVAL, "url", "the attach socket's path is too long");
    }
    strcpy(addr.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || !connect_fd(fd, &addr, until_ms)) {
        attnd_err err = failed(path, errno, info);
        if (fd >= 0) {
            close(fd);
        }
        return err;
    }
    *out = fd;
    return ATTND_OK;
}

enum { MAX_FDS = 2 };

static void close_fds(int fds[MAX_FDS]) {
    for (int i = 0; i < MAX_FDS; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
        fds[i] = -1;
    }
}

// take_fds keeps the first `most` of the descriptors that came, and closes the rest.
static int take_fds(struct msghdr *msg, int most, int fds[MAX_FDS]) {
    const struct cmsghdr *h = CMSG_FIRSTHDR(msg);
    int came = 0;
    if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS) {
        for (; h->cmsg_len >= CMSG_LEN((unsigned)(came + 1) * sizeof(int)); came++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + (size_t)came * sizeof(int), sizeof(int));
            if (came < most) {
                fds[came] = fd;
            } else {
                close(fd);
            }
        }
    }
    return came;
}

// receive takes an answer and the descriptors with it, -1 where there is none; at most `most` may
// come.  The caller owns them, but after an error.
static attnd_err receive(int fd, void *reply, size_t size, uint64_t until_ms, int most,
                         int fds[MAX_FDS], attnd_errinfo *info) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov = {reply, size};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = sizeof(control)};
    ssize_t bytes;
    fds[0] = fds[1] = -1;
    do {
        bytes = limit(fd, SO_RCVTIMEO, until_ms) ? recvmsg(fd, &msg, MSG_CMSG_CLOEXEC) : -1;
    } while (bytes < 0 && again(until_ms));
    if (bytes < 0) {
        return failed("attach socket", errno, info);
    }
    int came = take_fds(&msg, most, fds);
    uint32_t magic;
    memcpy(&magic, reply, sizeof(magic));
    attnd_err err = ATTND_OK;
    if (bytes == 0) {
        err = attnd_fail(info, ATTND_ECONN, "", "the daemon takes no ring");
    } else if (bytes != (ssize_t)size || magic != PROTO_RING_MAGIC) {
        err = attnd_fail(info, ATTND_EPROTO, "magic", "the attach socket's answer is malformed");
    } else if (came > most) {
        err = attnd_fail(info, ATTND_EPROTO, "", "more descriptors came than were asked for");
    } else if (msg.msg_flags & MSG_CTRUNC) {
        err = came < most
                  ? attnd_fail(info, ATTND_ENOMEM, "", "no descriptor left for a ring")
                  : attnd_fail(info, ATTND_EPROTO, "", "more descriptors came than were asked for");
    }
    if (err) {
        close_fds(fds);
    }
    return err;
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

static attnd_err refused(const proto_attach_reply *reply, const proto_attach *ask,
                         const proto_region_ask *region, attnd_errinfo *info) {
    attnd_err err = reply->status < 0 ? (attnd_err)reply->status : ATTND_EPROTO;
    if ((ask->flags & PROTO_ATTACH_ARENA) && (err == ATTND_EPERM || err == ATTND_ENOTSUP)) {
        return attnd_fail(info, err, "engine", "the daemon gives no arena: %s",
                          err == ATTND_EPERM ? "its server.in_process_uids does not name this user"
                                             : "it has none that can be shared");
    }
    if ((ask->flags & PROTO_ATTACH_REGION) && err == ATTND_ENOTSUP) {
        return attnd_fail(info, err, "engine",
                          "the daemon gives no region: it computes on the CPU, or may give none");
    }
    if (err == ATTND_EMSGSIZE) {
        bool of_region = reply->flags & PROTO_ATTACH_REGION;
        return attnd_fail(info, err, of_region ? "region_bytes" : "ring_bytes",
                          "%s of %llu bytes, the daemon gives %llu at most",
                          of_region ? "a region" : "a ring",
                          (unsigned long long)(of_region ? region->bytes : ask->data_bytes),
                          (unsigned long long)reply->bytes);
    }
    return attnd_fail(info, err, "", "the daemon gives no ring%s: %s",
                      ask->flags & PROTO_ATTACH_REGION ? " or no region" : "", attnd_strerror(err));
}

static attnd_err receive_arena(client_attached *out, uint64_t until_ms, attnd_errinfo *info) {
    int fds[MAX_FDS];
    attnd_err err = receive(out->fd, &out->arena, sizeof(out->arena), until_ms, 1, fds, info);
    out->arena_fd = err ? -1 : fds[0];
    return !err && out->arena_fd < 0 ? attnd_fail(info, ATTND_EPROTO, "engine", "no arena came")
                                     : err;
}

static bool holds_pairs(const proto_region *r, uint64_t asked) {
    uint64_t off = r->pairs_off;
    return off == 0 || (off % PROTO_REGION_ALIGN == 0 && off >= asked && off <= r->bytes &&
                        r->bytes - off >= proto_pairs_bytes(r->num_flags));
}

// receive_region: the flags are accessed by this process, so they must keep their size.
static attnd_err receive_region(client_attached *out, const proto_region_ask *ask,
                                uint64_t until_ms, attnd_errinfo *info) {
    int fds[MAX_FDS];
    const proto_region *r = &out->region;
    struct stat st;
    attnd_err err = receive(out->fd, &out->region, sizeof(*r), until_ms, 2, fds, info);
    if (err) {
        return err;
    }
    out->region_fd = fds[0];
    out->flags_fd = fds[1];
    int seals = out->flags_fd >= 0 ? fcntl(out->flags_fd, F_GET_SEALS) : -1;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(out->flags_fd, &st) != 0 ||
        (uint64_t)st.st_size < r->flags_bytes || r->num_flags != ask->num_flags ||
        r->flags_bytes != proto_flags_bytes(r->num_flags) || r->bytes < ask->bytes ||
        !holds_pairs(r, ask->bytes)) {
        return attnd_fail(info, ATTND_EPROTO, "engine", "the region is not the one asked for");
    }
    return ATTND_OK;
}

// send_ask sends the packet, which is longer when it asks for a region.
static attnd_err send_ask(int fd, const proto_attach *ask, const proto_region_ask *region,
                          attnd_errinfo *info) {
    uint8_t packet[sizeof(*ask) + sizeof(*region)];
    size_t bytes = sizeof(*ask);
    memcpy(packet, ask, sizeof(*ask));
    if (ask->flags & PROTO_ATTACH_REGION) {
        memcpy(packet + bytes, region, sizeof(*region));
        bytes += sizeof(*region);
    }
    return send(fd, packet, bytes, MSG_NOSIGNAL) == (ssize_t)bytes
               ? ATTND_OK
               : failed("attach socket", errno, info);
}

attnd_err client_attach(client_attached *out, const char *path, const proto_attach *ask,
                        const proto_region_ask *region, int32_t timeout_ms, client_most *most,
                        attnd_errinfo *info) {
    uint64_t until_ms = attnd_clock_ms() + (uint64_t)timeout_ms;
    proto_attach_reply reply = {0};
    int fds[MAX_FDS] = {-1, -1};
    *out = (client_attached){.arena_fd = -1, .region_fd = -1, .flags_fd = -1};
    *most = (client_most){.bytes = 0};
    attnd_err err = proto_ring_layout_make(&out->layout, ask->entries, ask->data_bytes, NULL);
    if (err) {
        return attnd_fail(info, err, "ring_bytes", "there is no ring of %llu bytes",
                          (unsigned long long)ask->data_bytes);
    }
    if ((err = connect_to(&out->fd, path, until_ms, info))) {
        return err;
    }
    if (!(err = send_ask(out->fd, ask, region, info))) {
        err = receive(out->fd, &reply, sizeof(reply), until_ms, 1, fds, info);
    }
    if (!err && reply.status != 0) {
        *most = (client_most){reply.bytes, reply.flags & PROTO_ATTACH_REGION};
        err = refused(&reply, ask, region, info);
    }
    if (!err) {
        err = map(out, fds[0], &reply, info);
    }
    if (!err && (ask->flags & PROTO_ATTACH_ARENA)) {
        err = receive_arena(out, until_ms, info);
    }
    if (!err && (ask->flags & PROTO_ATTACH_REGION)) {
        err = receive_region(out, region, until_ms, info);
    }
    close_fds(fds);
    if (err) {
        client_attached_close(out);
        if (out->base) {
            munmap(out->base, out->layout.bytes);
        }
        client_attach_leave(out->fd); // an answer may be on its way
        close(out->fd);
    }
    return err;
}

void client_attach_leave(int fd) {
    proto_attach_left left = {.magic = PROTO_ATTACH_LEFT};
    (void)!send(fd, &left, sizeof(left), MSG_DONTWAIT | MSG_NOSIGNAL); // it may be gone
}

void client_attached_close(client_attached *a) {
    int *fds[] = {&a->arena_fd, &a->region_fd, &a->flags_fd};
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++) {
        if (*fds[i] >= 0) {
            close(*fds[i]);
        }
        *fds[i] = -1;
    }
}
