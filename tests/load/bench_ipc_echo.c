// Bare echoes: packets of SOCK_SEQPACKET through epoll, and a ring in shared memory.
//
// The ring is the least that can work: a slot array each way for every client, indices on lines of
// their own, both ends spinning before they sleep on a futex.  It has no checks and no sessions, so
// it is the floor for the real one.
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/load/bench_ipc_link.h"

void bench_ipc_must(bool ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "attn-bench ipc: %s: %s\n", what, strerror(errno));
        _Exit(1);
    }
}

// ---- SEQPACKET

typedef struct packet_link {
    int fd;
} packet_link;

static struct sockaddr_un address(const bench_ipc_env *env) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", env->path);
    return addr;
}

static void *packet_open(const bench_ipc_env *env, uint32_t client) {
    (void)client;
    packet_link *l = calloc(1, sizeof(*l));
    struct sockaddr_un addr = address(env);
    bench_ipc_must(l != NULL, "memory");
    l->fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    bench_ipc_must(connect(l->fd, (struct sockaddr *)&addr, sizeof(addr)) == 0, "connect");
    return l;
}

static void packet_submit(void *link, uint32_t place) {
    uint32_t packet[BENCH_IPC_REQUEST_BYTES / sizeof(uint32_t)] = {place};
    ssize_t n = send(((packet_link *)link)->fd, packet, sizeof(packet), MSG_NOSIGNAL);
    bench_ipc_must(n == (ssize_t)sizeof(packet), "send");
}

static uint32_t packet_take(void *link) {
    uint32_t packet[BENCH_IPC_REPLY_BYTES / sizeof(uint32_t)];
    ssize_t n = recv(((packet_link *)link)->fd, packet, sizeof(packet), 0);
    bench_ipc_must(n == (ssize_t)sizeof(packet), "receive");
    return packet[0];
}

static void plain_close(void *link) {
    free(link);
}

static void packet_answer(int fd) {
    uint32_t packet[BENCH_IPC_REPLY_BYTES / sizeof(uint32_t)] = {0};
    if (recv(fd, packet, BENCH_IPC_REQUEST_BYTES, 0) <= 0) {
        close(fd);
        return;
    }
    (void)!send(fd, packet, sizeof(packet), MSG_NOSIGNAL);
}

static void watch(int epoll, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data = {.fd = fd}};
    bench_ipc_must(fd >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll");
}

static void packet_serve(const bench_ipc_env *env, volatile int *ready) {
    struct sockaddr_un addr = address(env);
    struct epoll_event events[BENCH_IPC_MAX_CLIENTS];
    int epoll = epoll_create1(0), listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    bench_ipc_must(bind(listener, (struct sockaddr *)&addr, sizeof(addr)) == 0 &&
                       listen(listener, BENCH_IPC_MAX_CLIENTS) == 0,
                   "listen");
    watch(epoll, listener);
    *ready = 1;
    for (;;) {
        int num = epoll_wait(epoll, events, BENCH_IPC_MAX_CLIENTS, -1);
        for (int i = 0; i < num; i++) {
            if (events[i].data.fd == listener) {
                watch(epoll, accept(listener, NULL, NULL));
            } else {
                packet_answer(events[i].data.fd);
            }
        }
    }
}

const bench_ipc_kind bench_ipc_echo_seqpacket = {
    "SEQPACKET echo", false, packet_open, packet_submit, packet_take, plain_close, packet_serve};

// ---- ring

enum { LINE = 64, SERVER_SPIN_US = 50, CLIENT_SPIN_US = 50 };

// lane is one client's.  Indices only grow; entry i is at i % BENCH_IPC_MAX_FLIGHT.
typedef struct lane {
    uint32_t sq_tail; // client
    uint32_t waits;   // client sets, server clears
    uint8_t pad0[LINE - 8];
    uint32_t cq_tail; // server; the client's futex
    uint8_t pad1[LINE - 4];
    uint32_t requests[BENCH_IPC_MAX_FLIGHT][LINE / 2]; // 128 bytes each
    uint32_t replies[BENCH_IPC_MAX_FLIGHT][LINE];      // 256
} lane;

typedef struct rings {
    uint32_t bell; // the server's futex
    uint32_t server_sleeps;
    uint8_t pad[LINE - 8];
    lane lanes[BENCH_IPC_MAX_CLIENTS];
} rings;

typedef struct ring_link {
    rings *rings;
    lane *lane;
    uint32_t sq_tail, cq_head;
    int32_t spin_us;
} ring_link;

uint64_t bench_ipc_rings_bytes(void) {
    return sizeof(rings);
}

static void futex_wait(uint32_t *at, uint32_t value) {
    syscall(SYS_futex, at, FUTEX_WAIT, value, NULL, NULL, 0);
}

static void futex_wake(uint32_t *at) {
    syscall(SYS_futex, at, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static uint32_t load(const uint32_t *at) {
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}

static void store(uint32_t *at, uint32_t value) {
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
}

static void *ring_open(const bench_ipc_env *env, uint32_t client) {
    ring_link *l = calloc(1, sizeof(*l));
    bench_ipc_must(l != NULL, "memory");
    l->rings = env->rings;
    l->lane = &l->rings->lanes[client];
    l->spin_us = env->spin_us ? env->spin_us : CLIENT_SPIN_US;
    return l;
}

static void ring_submit(void *link, uint32_t place) {
    ring_link *l = link;
    uint32_t request[BENCH_IPC_REQUEST_BYTES / sizeof(uint32_t)] = {place};
    memcpy(l->lane->requests[l->sq_tail % BENCH_IPC_MAX_FLIGHT], request, sizeof(request));
    store(&l->lane->sq_tail, ++l->sq_tail);
    if (load(&l->rings->server_sleeps)) {
        store(&l->rings->server_sleeps, 0);
        __atomic_add_fetch(&l->rings->bell, 1, __ATOMIC_SEQ_CST);
        futex_wake(&l->rings->bell);
    }
}

static uint32_t ring_take(void *link) {
    ring_link *l = link;
    uint32_t reply[BENCH_IPC_REPLY_BYTES / sizeof(uint32_t)];
    uint64_t until = l->spin_us > 0 ? attnd_clock_us() + (uint64_t)l->spin_us : 0;
    while (load(&l->lane->cq_tail) == l->cq_head) {
        if (attnd_clock_us() < until) {
            continue;
        }
        store(&l->lane->waits, 1);
        if (load(&l->lane->cq_tail) == l->cq_head) {
            futex_wait(&l->lane->cq_tail, l->cq_head);
        }
    }
    memcpy(reply, l->lane->replies[l->cq_head++ % BENCH_IPC_MAX_FLIGHT], sizeof(reply));
    return reply[0];
}

// answer_lane echoes what a client has sent; false when that is nothing.
static bool answer_lane(lane *l, uint32_t *done) {
    uint32_t reply[BENCH_IPC_REPLY_BYTES / sizeof(uint32_t)] = {0};
    uint32_t tail = load(&l->sq_tail);
    if (tail == *done) {
        return false;
    }
    for (; *done != tail; ++*done) {
        memcpy(reply, l->requests[*done % BENCH_IPC_MAX_FLIGHT], BENCH_IPC_REQUEST_BYTES);
        memcpy(l->replies[*done % BENCH_IPC_MAX_FLIGHT], reply, sizeof(reply));
        store(&l->cq_tail, *done + 1);
    }
    if (load(&l->waits)) {
        store(&l->waits, 0);
        futex_wake(&l->cq_tail);
    }
    return true;
}

static bool answer_all(rings *r, uint32_t *done) {
    bool any = false;
    for (uint32_t i = 0; i < BENCH_IPC_MAX_CLIENTS; i++) {
        any |= answer_lane(&r->lanes[i], &done[i]);
    }
    return any;
}

static void ring_serve(const bench_ipc_env *env, volatile int *ready) {
    static uint32_t done[BENCH_IPC_MAX_CLIENTS];
    rings *r = env->rings;
    uint64_t event_us = attnd_clock_us();
    *ready = 1;
    for (;;) {
        if (answer_all(r, done)) {
            event_us = attnd_clock_us();
        } else if (attnd_clock_us() - event_us > SERVER_SPIN_US) {
            uint32_t bell = load(&r->bell);
            store(&r->server_sleeps, 1);
            if (!answer_all(r, done)) {
                futex_wait(&r->bell, bell);
            }
            store(&r->server_sleeps, 0);
            event_us = attnd_clock_us();
        }
    }
}

const bench_ipc_kind bench_ipc_echo_ring = {"ring echo", false,       ring_open, ring_submit,
                                            ring_take,   plain_close, ring_serve};
