// The attach socket.
//
// Packets are received without room for descriptors: the kernel then drops what came with them
// before it could take a place in the descriptor table, and says so by MSG_CTRUNC.
//
// A process at its limit of descriptors cannot accept, and what it cannot accept keeps the loop
// busy for ever.  So one descriptor is held in reserve, with whose place the peer is accepted and
// closed.
//
// Limit: a peer may send a TCP socket that lingers, whose last close (the kernel's, when the packet
// is dropped) waits for its other end.
#include "server/srv_attach.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 128 };

static int open_reserve(void) {
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static attnd_err failed(const char *path, attnd_errinfo *info) {
    return attnd_fail(info, ATTND_EIO, "attach_socket", "%.107s: %s", path, strerror(errno));
}

// bind_listen: between bind and listen nobody can connect, so the permissions are never too wide.
static attnd_err bind_listen(srv_attach *a, uint32_t mode, attnd_errinfo *info) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    _Static_assert(sizeof(a->path) == sizeof(addr.sun_path), "it fits");
    memcpy(addr.sun_path, a->path, sizeof(addr.sun_path));
    a->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (a->fd < 0 || bind(a->fd, (const struct sockaddr *)&addr, sizeof(addr)) != 0) {
        return failed(a->path, info);
    }
    if (chmod(a->path, mode) != 0 || listen(a->fd, BACKLOG) != 0) {
        attnd_err err = failed(a->path, info);
        unlink(a->path);
        return err;
    }
    return ATTND_OK;
}

attnd_err srv_attach_listen(srv_attach *a, const char *path, uint32_t mode, attnd_errinfo *info) {
    a->fd = a->reserve_fd = a->claim.lock_fd = -1;
    attnd_err err = srv_path_claim(&a->claim, path, info);
    if (err) {
        return err;
    }
    snprintf(a->path, sizeof(a->path), "%s", path); // which the claim has found short enough
    err = bind_listen(a, mode, info);
    if (err) {
        a->path[0] = '\0'; // so that close leaves it alone
        srv_attach_close(a);
        return err;
    }
    a->reserve_fd = open_reserve();
    return ATTND_OK;
}

static bool has_option(int fd, int option, int value) {
    int got = -1;
    socklen_t len = sizeof(got);
    return getsockopt(fd, SOL_SOCKET, option, &got, &len) == 0 && got == value;
}

attnd_err srv_attach_adopt(srv_attach *a, int fd, attnd_errinfo *info) {
    struct sockaddr_un addr = {.sun_family = AF_UNSPEC};
    socklen_t len = sizeof(addr);
    a->fd = a->reserve_fd = a->claim.lock_fd = -1;
    if (getsockname(fd, (struct sockaddr *)&addr, &len) != 0 || addr.sun_family != AF_UNIX ||
        !has_option(fd, SO_TYPE, SOCK_SEQPACKET) || !has_option(fd, SO_ACCEPTCONN, 1)) {
        return attnd_fail(info, ATTND_EINVAL, "attach_socket",
                          "descriptor %d is not a listening socket of type SOCK_SEQPACKET", fd);
    }
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
        return failed("descriptor", info);
    }
    a->fd = fd;
    a->reserve_fd = open_reserve();
    snprintf(a->path, sizeof(a->path), "%.*s", (int)(sizeof(a->path) - 1), addr.sun_path);
    return ATTND_OK;
}

void srv_attach_close(srv_attach *a) {
    if (a->fd >= 0) {
        close(a->fd);
        a->fd = -1;
    }
    if (a->reserve_fd >= 0) {
        close(a->reserve_fd);
        a->reserve_fd = -1;
    }
    if (a->claim.lock_fd >= 0) {
        if (a->path[0]) {
            unlink(a->path);
        }
        srv_path_release(&a->claim);
    }
}

// turn_away accepts one peer with the reserve's place and closes it.
static void turn_away(srv_attach *a) {
    close(a->reserve_fd);
    int fd = accept4(a->fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0) {
        close(fd);
    }
    a->reserve_fd = open_reserve();
}

int srv_attach_accept(srv_attach *a, uint32_t *uid) {
    if (a->reserve_fd < 0) {
        a->reserve_fd = open_reserve();
    }
    int fd = accept4(a->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if ((errno == EMFILE || errno == ENFILE) && a->reserve_fd >= 0) {
            turn_away(a);
        }
        return -1;
    }
    struct ucred peer;
    socklen_t len = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0) {
        close(fd);
        return -1;
    }
    *uid = peer.uid;
    return fd;
}

int32_t srv_attach_pid(int fd) {
    struct ucred peer;
    socklen_t len = sizeof(peer);
    bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 && peer.pid > 0;
    return known ? (int32_t)peer.pid : -1;
}

srv_attach_event srv_attach_recv(int fd, void *out, size_t size, size_t *bytes) {
    struct iovec iov = {out, size};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1}; // and no room for descriptors
    ssize_t n = recvmsg(fd, &msg, MSG_DONTWAIT | MSG_TRUNC);
    if (n < 0) {
        return errno == EAGAIN || errno == EINTR ? SRV_ATTACH_NONE : SRV_ATTACH_GONE;
    }
    if (msg.msg_flags & MSG_CTRUNC) {
        return SRV_ATTACH_RIGHTS;
    }
    *bytes = (size_t)n;
    return n == 0 ? SRV_ATTACH_GONE : SRV_ATTACH_PACKET;
}

bool srv_attach_send(int fd, const void *packet, size_t bytes, const int *pass, size_t num_pass) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(SRV_ATTACH_MAX_PASS * sizeof(int))];
    } control = {.space = {0}};
    struct iovec iov = {(void *)packet, bytes};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    ATTND_ASSERT(num_pass <= SRV_ATTACH_MAX_PASS);
    if (num_pass > 0) {
        msg.msg_control = control.space;
        msg.msg_controllen = CMSG_SPACE(num_pass * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(num_pass * sizeof(int));
        memcpy(CMSG_DATA(c), pass, num_pass * sizeof(int));
    }
    return sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes;
}
