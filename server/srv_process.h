// srv_process keeps track of the processes that have the arena mapped (proto_ring.h, Arena), so
// that no block that one of them may still write is given to anybody else: when a process leaves
// without a word, the end of its session waits until the process is known to be gone.
//
// The descriptors that tell of that (pidfds) are handed to the supervisor, too.  A daemon that was
// restarted finds the processes of the run before, whose open steps it has aborted, and opens no
// step before each of them has attached again (by which it says that it does nothing with the steps
// of before) or is gone.  A process may have several clients, each with a place of its own: a
// client's key (proto_attach) is part of the name that its descriptor is kept under, so that one
// does not speak for another.
//
// At most SRV_MAX_PROCESSES at once.  Loop thread only.
#ifndef ATTND_SERVER_SRV_PROCESS_H
#define ATTND_SERVER_SRV_PROCESS_H

#include <stdint.h>
#include <uv.h>

#include "proto/err.h"

enum { SRV_MAX_PROCESSES = 8 };

typedef struct srv_processes srv_processes; // the struct is in srv_process.c

// srv_processes_open takes over the processes of the run before.  settled is called, from the loop,
// when the last of these is accounted for.  ATTND_ENOMEM.  The caller owns *out:
// srv_processes_close, which accepts NULL; the memory goes with the last handle.
attnd_err srv_processes_open(srv_processes **out, uv_loop_t *loop, void (*settled)(void *ctx),
                             void *ctx, attnd_errinfo *info);
void srv_processes_close(srv_processes *t);

// srv_process_add notes the process at the other end of a connected AF_UNIX socket, and takes
// the client with that process and key as back: it does nothing any more under its other places.
// ATTND_EBUSY: SRV_MAX_PROCESSES are there; ATTND_ENOTSUP: the kernel does not say which process it
// is.
enum { SRV_PROCESS_KEY = 16 }; // bytes
attnd_err srv_process_add(srv_processes *t, int socket, const uint8_t key[SRV_PROCESS_KEY],
                          uint32_t *idx, attnd_errinfo *info);

// srv_process_pidfd returns a descriptor of the process at the other end of a connected AF_UNIX
// socket, which can be read when that is gone; -1: the kernel does not say which it is.  The caller
// closes it.
int srv_process_pidfd(int socket);

// srv_process_remove forgets a process that has unmapped the arena.
void srv_process_remove(srv_processes *t, uint32_t idx);

// srv_process_await calls gone, from the loop, when the process is gone or its client has attached
// again (then perhaps from inside, or from srv_process_add), and forgets the place.
void srv_process_await(srv_processes *t, uint32_t idx, void (*gone)(void *ctx), void *ctx);

// srv_processes_before returns how many processes of the run before are not accounted for, and the
// id of one; 0 with t = NULL.
uint32_t srv_processes_before(const srv_processes *t, int32_t *pid);

#endif
