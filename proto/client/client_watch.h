// client_watch is a thread that watches the attach socket of a client in service mode, so that no
// stream of the client waits for a daemon that is gone: nobody else may be looking then.
#ifndef ATTND_PROTO_CLIENT_CLIENT_WATCH_H
#define ATTND_PROTO_CLIENT_CLIENT_WATCH_H

#include <pthread.h>

#include "proto/proto_region.h"

typedef struct client_watch {
    pthread_t thread;
    int fd, wake_fd;
    proto_flag *flags;
    uint32_t num_flags;
    void (*gone)(void *ctx);
    void *ctx;
} client_watch;

// client_watch_start watches fd.  When the other end is gone, or this one was shut down for
// reading, it calls gone once, on the thread, and from then on stores done = 1 into all flags,
// every millisecond.  Streams that have not ended within half a second do not keep the session: fd
// is shut down then, without the word that they have (PROTO_ATTACH_LEFT). Borrows fd, flags and ctx
// until client_watch_stop, which returns when the thread has ended; not to be called by gone.
// ATTND_ENOMEM.
attnd_err client_watch_start(client_watch *w, int fd, proto_flag *flags, uint32_t num_flags,
                             void (*gone)(void *ctx), void *ctx, attnd_errinfo *info);
void client_watch_stop(client_watch *w);

#endif
