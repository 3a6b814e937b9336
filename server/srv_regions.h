// srv_regions makes and frees the regions of clients (srv_region.h), and keeps count of them.
//
// On a GPU both take milliseconds, so they are done beside the loop, on a thread of libuv's pool,
// one at a time in the order of the requests: clients that attach again and again wait for each
// other, and nobody else for them.
//
// Count.  A region counts from the request on until its memory is known to be given back: it has
// been freed here, and its client keeps no descriptor of it, by which the memory would live on.
// That is the client's word (PROTO_ATTACH_LEFT), or its process is gone.  (No more can be known:
// who lies, or has handed the descriptor to another process, keeps memory that nobody counts.)
//
// Bounds: bytes of one region and of all, rounded up as the device does; `max` that count.  Loop
// thread only.
#ifndef ATTND_SERVER_SRV_REGIONS_H
#define ATTND_SERVER_SRV_REGIONS_H

#include <uv.h>

#include "server/srv_region.h"

typedef struct srv_regions srv_regions; // the struct is in srv_regions.c
typedef struct srv_region_count srv_region_count;

typedef struct srv_regions_opts {
    srv_backend *backend;          // borrowed
    uint64_t one_bytes, all_bytes; // one_bytes 0 = nobody gets one
    uint32_t max;
} srv_regions_opts;

typedef enum srv_region_state {
    SRV_REGION_NONE,
    SRV_REGION_WAITS, // to be made
    SRV_REGION_MAKING,
    SRV_REGION_READY,
    SRV_REGION_FREEING,
} srv_region_state;

// srv_region_place is where a connection has its region, which is open while READY.  All zero =
// NONE.
typedef struct srv_region_place {
    srv_region region;
    srv_region_state state;
    // private
    list_node node; // in the queue
    srv_region_count *count;
    proto_region_ask ask;
    bool leaving;
    int flags_fd;
    attnd_err err;
    attnd_errinfo info;
    void (*made)(struct srv_region_place *p, attnd_err err, int flags_fd,
                 const attnd_errinfo *info);
    void (*gone)(struct srv_region_place *p);
} srv_region_place;

typedef struct srv_regions_info {
    uint32_t regions; // that count
    uint32_t kept;    // of these, whose client has left without a word, and whose process lives
    uint64_t bytes;   // of all that count
    uint64_t made;    // since the start
} srv_regions_info;

// srv_regions_open: ATTND_ENOMEM.  The caller owns *out: srv_regions_close, after srv_regions_leave
// for every place; what is under way ends from the loop, and the memory goes with it.  Accepts
// NULL.
attnd_err srv_regions_open(srv_regions **out, uv_loop_t *loop, const srv_regions_opts *opts,
                           attnd_errinfo *info);
void srv_regions_close(srv_regions *t);

// srv_regions_ask asks for a region for the client at the other end of a connected socket, and
// counts it.  made follows from the loop, unless the place is left before: the region is READY, and
// flags_fd the callee's; or an error of srv_region_open, and the place is NONE.  ATTND_ENOTSUP,
// ATTND_EMSGSIZE, ATTND_EBUSY: over a bound; nothing follows.
attnd_err srv_regions_ask(srv_regions *t, srv_region_place *p, const proto_region_ask *ask,
                          int socket, attnd_errinfo *info);

// srv_regions_leave frees what the place has; no launch may use it.  True: the place is NONE;
// false: it will be, and gone is called, from the loop, by whichever call was the first.  said_so:
// the client keeps no descriptor.
bool srv_regions_leave(srv_regions *t, srv_region_place *p, bool said_so);

// srv_regions_most returns the bytes of the largest region that a client gets.
uint64_t srv_regions_most(const srv_regions *t);

void srv_regions_get_info(const srv_regions *t, srv_regions_info *out);

#endif
