// bench_ipc_link are the ways to hand something over and get an answer that `attn-bench ipc`
// compares: empty attends by libattnd, and bare echoes of the same sizes.  A link is one client's;
// one thread, in a process of its own.  What fails ends the process with a word on stderr.
#ifndef ATTND_LOAD_BENCH_IPC_LINK_H
#define ATTND_LOAD_BENCH_IPC_LINK_H

#include <stdbool.h>
#include <stdint.h>

enum {
    BENCH_IPC_MAX_CLIENTS = 64,
    BENCH_IPC_MAX_FLIGHT = 16,
    BENCH_IPC_REQUEST_BYTES = 104, // of an attend without rows
    BENCH_IPC_REPLY_BYTES = 160,   // of its reply
};

// bench_ipc_env is what all processes know.
typedef struct bench_ipc_env {
    const char *url;     // of the daemon
    const char *nng_url; // of the NNG echo
    const char *path;    // of the SEQPACKET echo
    void *rings;         // [bench_ipc_rings_bytes()] of the ring echo, shared, zeroed
    uint32_t flight;     // requests that the client keeps in flight
    int32_t spin_us;     // before a client that waits on a ring sleeps; below 0: not at all
} bench_ipc_env;

typedef struct bench_ipc_kind {
    const char *name; // "NNG attend"
    bool daemon;      // asks the daemon, not an echo
    void *(*open)(const bench_ipc_env *env, uint32_t client);
    // submit sends the request of a place [0, flight); take waits for an answer and returns whose.
    void (*submit)(void *link, uint32_t place);
    uint32_t (*take)(void *link);
    void (*close)(void *link);
    // serve is the echo's other end, which ends with the process; it stores 1 in *ready.
    void (*serve)(const bench_ipc_env *env, volatile int *ready);
} bench_ipc_kind;

uint64_t bench_ipc_rings_bytes(void);

// The kinds.
extern const bench_ipc_kind bench_ipc_attend_nng, bench_ipc_attend_ring; // bench_ipc_attend.c
extern const bench_ipc_kind bench_ipc_echo_nng;                          // bench_ipc_nng.c
extern const bench_ipc_kind bench_ipc_echo_seqpacket;                    // bench_ipc_echo.c
extern const bench_ipc_kind bench_ipc_echo_ring;

// bench_ipc_must ends the process unless ok.
void bench_ipc_must(bool ok, const char *what);

#endif
