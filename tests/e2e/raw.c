// SP by hand.  Greeting: 00 'S' 'P' 00, protocol (REQ 0x30), 00 00.  A frame over ipc: 01, length
// as 64 bits big-endian, body.  A REQ body begins with a 32-bit id whose top bit is set.
#include "tests/e2e/raw.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/e2e/harness.h"

static bool ready(int fd, short what, int ms) {
    struct pollfd p = {.fd = fd, .events = what};
    return poll(&p, 1, ms) == 1 && (p.revents & (what | POLLHUP | POLLERR));
}

void raw_connect(raw_client *c, const char *path) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strcpy(addr.sun_path, path);
    c->sp_id = 0;
    c->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(c->fd, 0);
    ck_assert_int_eq(connect(c->fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
}

static bool write_all(int fd, const uint8_t *data, size_t bytes, int wait_ms) {
    while (bytes) {
        if (!ready(fd, POLLOUT, wait_ms)) {
            return false;
        }
        ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL);
        if (n <= 0) {
            return false;
        }
        data += n;
        bytes -= (size_t)n;
    }
    return true;
}

static bool read_all(int fd, uint8_t *data, size_t bytes) {
    while (bytes) {
        ssize_t n = ready(fd, POLLIN, 10000) ? recv(fd, data, bytes, 0) : 0;
        if (n <= 0) {
            return false;
        }
        data += n;
        bytes -= (size_t)n;
    }
    return true;
}

void raw_open(raw_client *c, const char *path) {
    static const uint8_t greeting[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
    uint8_t theirs[8];
    raw_connect(c, path);
    ck_assert(write_all(c->fd, greeting, sizeof(greeting), 1000));
    ck_assert(read_all(c->fd, theirs, sizeof(theirs)));
    ck_assert_uint_eq(theirs[5], 0x31);
}

void raw_close(raw_client *c) {
    close(c->fd);
}

bool raw_write(raw_client *c, const void *data, size_t bytes) {
    return write_all(c->fd, data, bytes, 5000);
}

static bool send_head(raw_client *c, size_t bytes, int wait_ms) {
    uint8_t head[13] = {1};
    uint64_t len = bytes + 4;
    uint32_t id = 0x80000000u | ++c->sp_id;
    for (int i = 0; i < 8; i++) {
        head[1 + i] = (uint8_t)(len >> (56 - 8 * i));
    }
    for (int i = 0; i < 4; i++) {
        head[9 + i] = (uint8_t)(id >> (24 - 8 * i));
    }
    return write_all(c->fd, head, sizeof(head), wait_ms);
}

bool raw_send(raw_client *c, const void *msg, size_t bytes, int wait_ms) {
    return send_head(c, bytes, wait_ms) && write_all(c->fd, msg, bytes, wait_ms);
}

void raw_send_part(raw_client *c, const void *msg, size_t bytes, size_t part) {
    ck_assert(send_head(c, bytes, 5000));
    ck_assert(write_all(c->fd, msg, part, 5000));
}

ssize_t raw_read(raw_client *c, void *out, size_t bytes) {
    return ready(c->fd, POLLIN, 10000) ? recv(c->fd, out, bytes, 0) : -1;
}

bool raw_recv(raw_client *c, uint8_t **msg, size_t *bytes) {
    uint8_t head[13];
    if (!read_all(c->fd, head, sizeof(head))) {
        return false;
    }
    uint64_t len = 0;
    for (int i = 0; i < 8; i++) {
        len = len << 8 | head[1 + i];
    }
    ck_assert_uint_ge(len, 4);
    ck_assert_uint_le(len, 1 << 28);
    *bytes = (size_t)len - 4;
    *msg = malloc(*bytes + 1);
    ck_assert_ptr_nonnull(*msg);
    if (!read_all(c->fd, *msg, *bytes)) {
        free(*msg);
        return false;
    }
    return true;
}

bool raw_closed(raw_client *c, int ms) {
    static uint8_t sink[1 << 16];
    uint64_t until = e2e_now_ms() + (uint64_t)ms;
    while (e2e_now_ms() < until) {
        if (ready(c->fd, POLLIN, 10) && recv(c->fd, sink, sizeof(sink), 0) <= 0) {
            return true;
        }
    }
    return false;
}
