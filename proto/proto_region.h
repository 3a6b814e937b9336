// proto_region is service mode on a GPU: device memory that client and daemon share for q, k, v,
// out and lse, and the flags by which the client's stream and the daemon hand a layer's work to
// each other.  A step is then one attend_all (proto_wire.h) for all its layers; per layer no
// message is sent, and no host of the client's takes part.
//
// Attach.  With PROTO_ATTACH_REGION in proto_attach.flags (not together with PROTO_ATTACH_ARENA)
// the packet is proto_attach and, right behind it, proto_region_ask.  Behind proto_attach_reply the
// daemon sends one proto_region with two descriptors (SCM_RIGHTS), in this order: the region, which
// cuMemImportFromShareableHandle takes (POSIX file descriptor), all zero at first, and the flags, a
// memfd that is sealed against shrinking and growing, to be mapped whole (MAP_SHARED) and
// registered with the client's own context.  Both are the connection's: they go with it, once
// nothing that the daemon runs uses them.  Any client may have a region, within the configured
// bounds.  It counts against these from the packet on; the answer comes when it is made, which may
// take milliseconds, and those of others before it.  A client sends a proto_attach_left before it
// closes: its word that its streams have ended, and that it keeps no descriptor and no import of
// the region.  Without it the region counts until the client's process is gone.  Refused by
// proto_attach_reply.status with ENOTSUP where the daemon computes on the CPU (there a ring's data
// area is read and written in place), is configured to give none, or has a GPU or driver without
// stream memory operations of 64 bits, EMSGSIZE for more bytes than a client may have (bytes then
// says how many it may), EBUSY when all that clients may have is taken, ENOMEM or ECUDA when the
// GPU has none.
//
// Flags.  At offset 0 proto_flags, at PROTO_FLAGS_HEAD_BYTES proto_flag [num_flags], all 0 at
// first.  Values are only ever 0 and 1, so a captured graph replays as it is.  Per layer:
//
//     client's stream                            daemon
//     copy q, k, v into the region
//     done = 0 and ready = 1 (at once, cuStreamWriteValue64, or in this order)
//                                                sees ready, stores ready = 0, launches
//                                                behind the launch, in stream order, at once:
//                                                ready = 0 and done = 1
//     wait for done >= 1 (cuStreamWaitValue32)
//     copy out, lse out of the region
//
// The daemon looks at the ready flag of an attend_all's next layer only, so the streams raise them
// in layer order.  A flag may be raised before the attend_all has arrived.
//
// Device pairs.  Under MPS the region may end in a counterpart of every pair: proto_flag
// [num_flags] at pairs_off, all 0 at first.  It does when the client asks with PROTO_REGION_MPS and
// PROTO_REGION_PAIRS, on the daemon's own GPU, the daemon is under MPS, too, and has
// compute.wait_kernels = auto, and fewer than six clients have pairs.  A client that is given them
// (pairs_off is not 0) has to wait there: small kernels of both do, which see each other sooner
// than streams that wait for host memory.  But for an attend_all with PROTO_ATTEND_AT_FLAGS it
// waits at the flags: a prompt's launch takes all SMs of a GPU, and one is taken by a kernel that
// waits.  The flags stay what hosts go by:
//
//     client's stream, one kernel                daemon
//     device pair: ready = 1 and done = 0
//     flags: the same, right behind it
//                                                a kernel that waits there sees the device pair's
//                                                ready, or the host the flag; either way a launch
//                                                begins, and the host stores ready = 0 in the flags
//                                                behind the launch, in stream order, in the device
//                                                pair at once: ready = 0 and done = 1
//     waits for done in the device pair, or,
//     which it looks at more rarely, the flags
//     device pair: ready = 0
//
// The daemon has a kernel wait only when it foresees ready, and for some microseconds.  A pair
// whose flag does not come fails the call (EPROTO), and the region's pairs are not waited for any
// more. What hosts answer (Errors, Death) they answer in the flags.  A layer's done may be seen
// before the host has lowered its flag: so a pair that was that of a later layer of a call is
// raised for the first layer of another call only after the reply.
//
// Errors.  When an attend_all fails, for whatever reason, its reply says so at once, and the call
// drains; so does one that is refused when it comes, if its pairs are there and free.  The daemon's
// host then answers done = 1 for the layer that failed, if it had been raised, and for each later
// layer as its ready flag comes (and stores ready = 0), so that the client's stream runs to its
// end; out and lse hold nothing.  Before the first of these, error, error_step and then error_epoch
// are stored in proto_flags.  A drain is over when the last layer was answered, or when cancel
// names its step, also a step that is gone: with that the client says that its streams will not
// touch the pairs any more, and the daemon stores 0 into those that it has not answered.  So who
// never launched its work cancels twice: the first ends the step, and the second, when its
// attend_alls have been answered, the drain.  A pair belongs to one call at a time, drain included:
// another one gets EBUSY.
//
// Death.  Either host can end a wait.  When the connection ends the daemon stores done = 1 into
// every pair once; a client whose daemon is gone (POLLHUP on the attach socket) does so itself, and
// again until its streams have ended.
#ifndef ATTND_PROTO_PROTO_REGION_H
#define ATTND_PROTO_PROTO_REGION_H

#include "proto/proto_msg.h"
#include "proto/proto_ring.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PROTO_REGION_MAX_FLAGS = 4096, // pairs of one region
    PROTO_REGION_MAX_CALLS = 64,   // attend_alls of one region at a time, drains included
    PROTO_FLAGS_HEAD_BYTES = 4096,
    PROTO_FLAGS_PAGE_BYTES = 4096,
};

// proto_region_ask.flags
enum {
    PROTO_REGION_MPS = 1u << 0,   // the client's contexts on the GPU are shared through MPS
    PROTO_REGION_PAIRS = 1u << 1, // its streams can wait at device pairs
};

// proto_region_ask follows proto_attach in the same packet.
typedef struct proto_region_ask {
    uint64_t bytes;     //  0: of the region, rounded up by the daemon; not 0
    uint32_t num_flags; //  8: 1 to PROTO_REGION_MAX_FLAGS
    uint32_t flags;     // 12: PROTO_REGION_*
    uint8_t device[16]; // 16: UUID of the GPU that the client's streams are on; zeros = not said
} proto_region_ask;

// proto_region is what comes with the two descriptors.
typedef struct proto_region {
    uint32_t magic;       //  0: PROTO_RING_MAGIC
    uint32_t num_flags;   //  4: as asked for
    uint64_t bytes;       //  8: of the region, device pairs included; tensors lie before those
    uint64_t flags_bytes; // 16: of the flags' memfd
    uint8_t device[16];   // 24: UUID of the GPU whose memory the region is
    uint64_t pairs_off;   // 40: of its device pairs, a multiple of PROTO_REGION_ALIGN; 0 = none
} proto_region;

// proto_flags is the head of the flags.  The daemon writes it and never reads it back.
typedef struct proto_flags {
    uint32_t magic;       //  0: PROTO_RING_MAGIC
    uint32_t num_flags;   //  4
    uint32_t error_epoch; //  8: attend_alls that have failed; stored last (release)
    int32_t error;        // 12: attnd_err of the last one
    uint64_t error_step;  // 16: its step
} proto_flags;

typedef struct proto_flag {
    uint32_t ready; // 0: the client's stream stores 1, the daemon 0
    uint32_t done;  // 4: the daemon stores 1, the client's stream 0 as it raises ready
} proto_flag;

PROTO_SIZE(proto_region_ask, 32);
PROTO_SIZE(proto_region, 48);
PROTO_SIZE(proto_flags, 24);
PROTO_SIZE(proto_flag, 8);

// proto_flags_bytes returns the bytes of the memfd for num_flags pairs.
static inline uint64_t proto_flags_bytes(uint32_t num_flags) {
    uint64_t pairs = (uint64_t)num_flags * sizeof(proto_flag);
    uint64_t pages = (pairs + PROTO_FLAGS_PAGE_BYTES - 1) / PROTO_FLAGS_PAGE_BYTES;
    return PROTO_FLAGS_HEAD_BYTES + pages * PROTO_FLAGS_PAGE_BYTES;
}

// proto_pairs_bytes returns the bytes of num_flags device pairs.
static inline uint64_t proto_pairs_bytes(uint32_t num_flags) {
    const uint64_t unit = PROTO_REGION_ALIGN;
    return (num_flags * sizeof(proto_flag) + unit - 1) / unit * unit;
}

// proto_region_array checks that bytes at off lie in the region: ATTND_EINVAL with the field's
// name.
attnd_err proto_region_array(uint64_t region_bytes, const char *field, uint64_t off, uint64_t bytes,
                             attnd_errinfo *info);

// proto_region_view is where a tensor lies: bytes from its first to behind its last element,
// strides in elements.
typedef struct proto_region_view {
    uint64_t off, bytes;
    int64_t stride_token, stride_head;
} proto_region_view;

// proto_region_place checks that a tensor of that shape, which is not NULL, lies in the region, and
// fills in default strides.  ATTND_EINVAL with the field's name.
attnd_err proto_region_place(uint64_t region_bytes, const char *field, const proto_region_tensor *t,
                             const proto_tensor_shape *shape, proto_region_view *out,
                             attnd_errinfo *info);

#ifdef __cplusplus
}
#endif

#endif
