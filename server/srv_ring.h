// srv_ring is the daemon's end of one ring (proto_ring.h): the region, and the indices that are the
// daemon's own.  It knows queues and places, not what a message means.  Nothing that the client
// writes into the region can make it read or write outside of it.  Loop thread only, no allocation
// after srv_ring_open.
#ifndef ATTND_SERVER_SRV_RING_H
#define ATTND_SERVER_SRV_RING_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/proto_msg.h"
#include "proto/proto_ring.h"

typedef struct srv_ring {
    uint8_t *base; // the region; NULL = not open
    proto_ring *head;
    proto_ring_layout layout;
    uint32_t sq_head, cq_tail; // as the region's; those are written and never read
    uint32_t unanswered;       // taken, and no completion posted
    bool wake_due;             // posted since the last srv_ring_wake
} srv_ring;

// srv_ring_call is a request that was taken: views of the region, checked to lie in its data area.
typedef struct srv_ring_call {
    proto_view msg; // at least a header
    uint8_t *reply; // [reply_bytes], aligned to PROTO_RING_ALIGN
    uint32_t reply_bytes;
    uint64_t user;
} srv_ring_call;

// srv_ring_open makes the region and maps it.  *fd is the sealed memfd to be sent to the client;
// the caller closes it, the mapping stays.  EINVAL, EMSGSIZE as proto_ring_layout_make; ENOMEM.
attnd_err srv_ring_open(srv_ring *ring, uint32_t entries, uint64_t data_bytes, int *fd,
                        attnd_errinfo *info);

// srv_ring_close unmaps the region; nothing may read or write it any more.  A ring that is not open
// is left alone.
void srv_ring_close(srv_ring *ring);

typedef enum srv_ring_found {
    SRV_RING_EMPTY,
    SRV_RING_CALL,    // *out is filled; srv_ring_post must follow, now or later
    SRV_RING_REFUSED, // a submission was bad and has been answered
    SRV_RING_BROKEN,  // the client's indices make no sense: close the connection
} srv_ring_found;

// srv_ring_take takes the next submission.
srv_ring_found srv_ring_take(srv_ring *ring, srv_ring_call *out);

// srv_ring_post completes a call.  The client may see it at once, but is not woken.
void srv_ring_post(srv_ring *ring, uint64_t user, uint32_t reply_bytes, attnd_err status);

// srv_ring_wake wakes the client if it waits and something was posted since the last time.
void srv_ring_wake(srv_ring *ring);

// srv_ring_set_sleeps sets or clears daemon_sleeps.  After setting it on every ring, a full fence,
// and srv_ring_pending false for each, a client that submits rings the doorbell.
void srv_ring_set_sleeps(srv_ring *ring, bool sleeps);

// srv_ring_pending is true when a submission waits to be taken.
static inline bool srv_ring_pending(const srv_ring *ring) {
    return proto_ring_load(&ring->head->sq_tail) != ring->sq_head;
}

#endif
