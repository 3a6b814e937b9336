// The notify protocol: a datagram of lines, descriptors by SCM_RIGHTS.  A message that cannot be
// sent is lost: a supervisor that is gone has nothing to be told.
#include "server/srv_notify.h"

#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { TEXT_BYTES = 512, SETTLE_MS = 2000 };

void srv_notify_send(const char *socket_name, const char *text, size_t bytes, int fd) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    size_t len = strlen(socket_name);
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {.bytes = {0}};
    if ((socket_name[0] != '/' && socket_name[0] != '@') || len >= sizeof(to.sun_path)) {
        return;
    }
    memcpy(to.sun_path, socket_name, len);
    to.sun_path[0] = to.sun_path[0] == '@' ? '\0' : to.sun_path[0];
    struct iovec part = {.iov_base = (char *)text, .iov_len = bytes};
    struct msghdr msg = {
        .msg_name = &to,
        .msg_namelen = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len),
        .msg_iov = &part,
        .msg_iovlen = 1,
    };
    if (fd >= 0) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof(control.bytes);
        struct cmsghdr *head = CMSG_FIRSTHDR(&msg);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &fd, sizeof(fd));
    }
    int sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock >= 0) {
        (void)!sendmsg(sock, &msg, MSG_NOSIGNAL);
        close(sock);
    }
}

// tell sends "HEAD VALUE TAIL" to the supervisor.
static void tell(const char *head, const char *value, const char *tail, int fd) {
    char text[TEXT_BYTES];
    const char *to = getenv("NOTIFY_SOCKET");
    int bytes = snprintf(text, sizeof(text), "%s%s%s", head, value, tail);
    if (to && bytes > 0 && (size_t)bytes < sizeof(text)) {
        srv_notify_send(to, text, (size_t)bytes, fd);
    }
}

void srv_notify_ready(const char *status) {
    tell("READY=1\nSTATUS=", status, "", -1);
}

void srv_notify_stopping(const char *status) {
    tell("STOPPING=1\nSTATUS=", status, "", -1);
}

void srv_notify_alive(void) {
    tell("WATCHDOG=1", "", "", -1);
}

void srv_notify_reloaded(void) {
    tell(SRV_NOTIFY_RELOADED "=1", "", "", -1);
}

void srv_notify_no_device(const char *why) {
    tell(SRV_NOTIFY_NO_DEVICE "=", why, "", -1);
}

void srv_notify_store(const char *name, int fd) {
    if (fd >= 0) {
        srv_notify_forget(name);
        tell("FDSTORE=1\nFDNAME=", name, "\nFDPOLL=0", fd);
    }
}

void srv_notify_forget(const char *name) {
    tell("FDSTOREREMOVE=1\nFDNAME=", name, "", -1);
}

// The supervisor closes the descriptors of a message that it knows no use for, and reads messages
// in order: sd_notify_barrier(3).
void srv_notify_settle(void) {
    int ends[2];
    if (getenv("NOTIFY_SOCKET") && pipe2(ends, O_CLOEXEC) == 0) {
        tell("BARRIER=1", "", "", ends[1]);
        close(ends[1]);
        poll(&(struct pollfd){.fd = ends[0]}, 1, SETTLE_MS);
        close(ends[0]);
    }
}

// number reads a variable, 0 when it is missing or no number.
static uint64_t number(const char *variable) {
    const char *text = getenv(variable);
    char *end = NULL;
    unsigned long long value = text && *text ? strtoull(text, &end, 10) : 0;
    return end && !*end ? value : 0;
}

uint64_t srv_notify_watchdog_ms(void) {
    bool ours = !getenv("WATCHDOG_PID") || number("WATCHDOG_PID") == (uint64_t)getpid();
    return ours ? number("WATCHDOG_USEC") / 1000 : 0;
}
