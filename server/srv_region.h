// srv_region is the daemon's end of one region (proto_region.h): memory of the device that a client
// shares, and its flags.  It knows pairs, not what is attended.  Nothing that the client does to
// either can make the daemon or the device read or write outside of them.  One thread at a time.
#ifndef ATTND_SERVER_SRV_REGION_H
#define ATTND_SERVER_SRV_REGION_H

#include "proto/list.h"
#include "proto/proto_region.h"
#include "server/srv_backend.h"

typedef struct srv_region {
    srv_backend *backend; // NULL = not open
    attn_device_region memory;
    uint8_t *flags; // the memfd's mapping, [flags_bytes]
    uint64_t flags_bytes, flags_address;
    uint64_t pairs_off; // in memory; 0 = the client's streams wait for the flags
    uint32_t num_flags, error_epoch;
    bool abandoned;  // its client is gone
    bool distrusted; // its client raised a pair without the flag: no gate waits there any more
    list_node calls; // srv_armed.region_node
    uint32_t num_calls;
} srv_region;

// srv_region_open makes both; pairs: the memory is to end in device pairs (proto_region.h).
// *flags_fd is the sealed memfd to be sent to the client, with memory.fd; the caller closes it.
// The backend has region_make.  ATTND_ENOMEM, ATTND_ECUDA, ATTND_ENOTSUP.  This and
// srv_region_close may take the device milliseconds.
attnd_err srv_region_open(srv_region *r, srv_backend *backend, uint64_t bytes, uint32_t num_flags,
                          bool pairs, int *flags_fd, attnd_errinfo *info);

// srv_region_close frees both; no launch may use them and no call be left.  One that is not open is
// left alone.
void srv_region_close(srv_region *r);

// srv_region_ready returns where the ready flag of a pair is, until close.  srv_region_raised
// returns whether it is raised; srv_region_take lowers it, too.  Of two threads that take at the
// same time one gets it.
uint32_t *srv_region_ready(srv_region *r, uint32_t pair);
bool srv_region_raised(srv_region *r, uint32_t pair);
bool srv_region_take(srv_region *r, uint32_t pair);

// srv_region_answer sets the done flag of a pair; srv_region_reset stores 0 in both.
void srv_region_answer(srv_region *r, uint32_t pair);
void srv_region_reset(srv_region *r, uint32_t pair);

// srv_region_abandon answers every pair once, for a client that may still wait there.
void srv_region_abandon(srv_region *r);

// srv_region_bytes returns how many bytes tensors may lie in, from the region's start.
uint64_t srv_region_bytes(const srv_region *r);

// srv_region_signal returns where the device signals that a layer is done (attn_device.h): in its
// device pair, or where there is none, and in any case with at_flags, in the flags.
uint64_t srv_region_signal(const srv_region *r, uint32_t pair, bool at_flags);

// srv_region_tell writes an error where libattnd looks for it.
void srv_region_tell(srv_region *r, attnd_err err, uint64_t step);

#endif
