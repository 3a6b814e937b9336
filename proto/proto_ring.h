// proto_ring is the second way to the daemon: the messages of proto_wire.h in memory that client
// and daemon share, one ring a session.  A client can be written from this file and proto_wire.h
// alone.
//
// Attach.  hello's reply names the attach socket (AF_UNIX, SOCK_SEQPACKET); a client that says no
// hello over NNG is told it by its user.  The client connects and sends one proto_attach; the
// daemon answers one proto_attach_reply, on success with one descriptor (SCM_RIGHTS): a memfd,
// sealed against shrinking and growing, which the client maps whole (MAP_SHARED).  The client sends
// no descriptors; whoever does loses the connection.
//
// Session.  With session = 0 in proto_attach the ring has a session of its own, and hello is the
// first message on it.  With the id and secret of a session that was opened over NNG, the ring
// joins that: requests may go either way, their ids are the session's.  The loss of either
// connection ends the session, and the daemon closes the other.
//
// Arena.  With PROTO_ATTACH_ARENA in flags (session = 0) the client asks for the memory that KV
// blocks lie in, to attend by itself; configuration says who gets it (server.in_process_uids), the
// rest get EPERM.  Behind proto_attach_reply the daemon then sends one proto_attach_arena with one
// descriptor: of host memory a memfd, sealed against shrinking, of a GPU's memory what
// cuMemImportFromShareableHandle takes.  Replies to step on this ring carry block tables
// (proto_step_tables), such a step is attended by the client alone, and its commit is the client's
// word that every layer was attended.  Past its deadline it cannot be committed any more (ESTALE);
// its blocks are held until a cancel of it, the client's word that nothing of it is still at work,
// or until the client is gone.  A client that has unmapped the arena, or whatever else it did with
// it has ended, sends one packet, a proto_attach_left, before it closes the connection.  Without it
// the daemon holds back the session's blocks until the process at the other end is gone.  A daemon
// that was restarted opens no step before each client that had the arena has attached again, by
// which it says that nothing of it works on a step of before, or its process is gone.  A key (in
// `secret`) tells the clients of a process apart: any 16 bytes, which a client keeps, and may leave
// to another when it is closed.
//
// Region.  With PROTO_ATTACH_REGION the client asks for device memory and flags, see
// proto_region.h: the packet is then longer, and one more comes behind proto_attach_reply.  Its
// last packet, too, is a proto_attach_left.
//
// Layout of the memfd.  Little-endian, offsets count bytes from its start
// (proto_ring_layout_make):
//     0      proto_ring: geometry, then each side's indices on a cache line of their own
//     4096   submissions: proto_ring_submit [entries]
//     ...    completions: proto_ring_complete [entries]
//     ...    data, from the next multiple of 4096: messages and replies, laid out by the client as
//            it likes
// entries is a power of two.  Indices start at 0 and wrap at 2^32; entry i is at i % entries.
//
//                 submissions                        completions
//     client: writes entry, then stores sq_tail  |  reads up to cq_tail, then stores cq_head
//     daemon: loads sq_tail, reads, stores sq_head  |  writes entry, then stores cq_tail
// Stores release, loads acquire.  A request is outstanding from the store of sq_tail to the store
// of cq_head behind its completion.  At most `entries` are: then neither queue can run over, and a
// client need not look at sq_head.  Of those, the ones without a completion count against the
// daemon's limits.in_flight; beyond it they get EBUSY.  Completions come in any order.
//
// A submission names a message (proto_header and body, as over NNG, offsets from its start) and the
// place for its reply.  q, k and v are read in place and out is written in place, so the client
// leaves both alone until the completion.  Everything else is copied once, then checked: whatever
// is written into the region at any moment harms this client alone.  The reply begins at reply_off.
// A reply that does not fit its place becomes an error reply EMSGSIZE, and nothing was changed.  So
// that this can be known beforehand, a place holds at least PROTO_RING_MIN_REPLY bytes, for hello
// and model_open PROTO_RING_JSON_REPLY.  The completion's status alone tells of a place below
// PROTO_RING_MIN_REPLY (EMSGSIZE) and of a submission that breaks another rule of proto_ring_submit
// (EPROTO); that request was not tried.
//
// The daemon closes the connection of a client that sends a descriptor, stores an sq_tail more than
// `entries` ahead of sq_head or a cq_head beyond cq_tail, or has more than `entries` outstanding.
// What is in flight then gets no completion.
//
// Doorbells.  The daemon polls sq_tail of every ring until nothing has happened on any of them for
// spin_us, then sets daemon_sleeps and looks once more.  A client that finds daemon_sleeps set
// after storing sq_tail (full fence between) sends one packet of one byte on the attach socket with
// MSG_DONTWAIT; EAGAIN is as good as success.  One too many does no harm, so a client that has no
// fences always sends it.
//
// A client that wants to sleep stores client_waits = 1, looks at cq_tail again (full fence
// between), and waits by FUTEX_WAIT (not PRIVATE) on cq_tail.  The daemon that finds client_waits
// set after storing cq_tail (full fence between) stores 0 and wakes one waiter by FUTEX_WAKE:
// threads of one client wake each other.  The daemon's end closes the attach socket and wakes
// nobody: a waiting client bounds its futex wait and polls the socket for POLLHUP.
#ifndef ATTND_PROTO_PROTO_RING_H
#define ATTND_PROTO_PROTO_RING_H

#include <stddef.h>

#include "proto/proto_wire.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PROTO_RING_MAGIC = 0x474e5241, // "ARNG"
    PROTO_RING_HEAD_BYTES = 4096,
    PROTO_RING_MIN_ENTRIES = 2,
    PROTO_RING_MAX_ENTRIES = 1024,
    PROTO_RING_ALIGN = 64, // of messages and of replies in the data area
    PROTO_RING_MIN_REPLY = sizeof(proto_header) + sizeof(proto_error),
    PROTO_RING_JSON_REPLY = 16384,
};

// proto_attach is the client's one packet; with PROTO_ATTACH_REGION proto_region_ask is behind it.
typedef struct proto_attach {
    uint32_t magic;     //  0: PROTO_RING_MAGIC
    uint16_t version;   //  4: PROTO_VERSION
    uint16_t flags;     //  6: PROTO_ATTACH_*
    uint64_t session;   //  8: of hello over NNG; 0 = the ring gets its own
    uint8_t secret[16]; // 16: of that session; with PROTO_ATTACH_ARENA the client's key; else zeros
    uint32_t entries;   // 32: a power of two
    uint32_t reserved2; // 36: 0
    uint64_t data_bytes; // 40: of the data area, rounded up to 4096 by the daemon; not 0
} proto_attach;

enum {
    PROTO_ATTACH_ARENA = 1,  // the client attends by itself
    PROTO_ATTACH_REGION = 2, // its streams hand layers to the daemon (proto_region.h)
};

// proto_attach_reply.  status: EPROTO, EVERSION, EINVAL (entries, reserved), EMSGSIZE (bytes is the
// largest data_bytes that the daemon gives, or with PROTO_ATTACH_REGION in flags the largest
// region), EBUSY (all rings, their memory or that of regions are taken), ENOMEM, ESTALE (no such
// session), EPERM (not its secret, or not a user who may; with PROTO_ATTACH_ARENA, not a user who
// may have the arena), ENOTSUP (there is no arena, or no region to be had), EEXIST (the session has
// a ring), ECUDA (the region could not be made), ESHUTDOWN.  After an error the daemon closes the
// connection.
typedef struct proto_attach_reply {
    uint32_t magic;    //  0: PROTO_RING_MAGIC
    int32_t status;    //  4: 0, or an attnd_err and no descriptor
    uint64_t bytes;    //  8: of the whole region
    uint64_t data_off; // 16: of the data area
    uint32_t spin_us;  // 24: how long the daemon polls after the last event before it sleeps
    uint32_t flags;    // 28: 0; after EMSGSIZE PROTO_ATTACH_REGION: it was the region
} proto_attach_reply;

// proto_attach_arena is what comes with the arena's descriptor.
typedef struct proto_attach_arena {
    uint32_t magic;     //  0: PROTO_RING_MAGIC
    uint32_t flags;     //  4: PROTO_ARENA_*
    uint64_t bytes;     //  8: of the arena
    uint8_t device[16]; // 16: UUID of the GPU whose memory it is; zeros = host memory
} proto_attach_arena;

enum { PROTO_ARENA_DETERMINISTIC = 1 }; // the daemon computes so; clients that share with it, too

// proto_attach_left is the client's last packet.
typedef struct proto_attach_left {
    uint32_t magic; // 0: PROTO_ATTACH_LEFT
} proto_attach_left;

enum { PROTO_ATTACH_LEFT = 0x5446454c }; // "LEFT"

// proto_ring is the head of the region.  The daemon never trusts the geometry here, it has its own.
typedef struct proto_ring {
    uint32_t magic, version, entries, reserved;    //   0: written once by the daemon
    uint64_t sq_off, cq_off, data_off, data_bytes; //  16
    uint8_t pad0[16];
    uint32_t sq_tail;      //  64: client
    uint32_t cq_head;      //  68: client
    uint32_t client_waits; // 72: client sets, daemon clears
    uint8_t pad1[52];
    uint32_t sq_head;       // 128: daemon
    uint32_t cq_tail;       // 132: daemon; the futex
    uint32_t daemon_sleeps; // 136: daemon
    uint8_t pad2[52];
} proto_ring;

typedef struct proto_ring_submit {
    uint64_t msg_off;     //  0: of the message, a multiple of PROTO_RING_ALIGN, in the data area
    uint32_t msg_bytes;   //  8: header and body, all in the data area
    uint32_t reply_bytes; // 12: room for the reply, all in the data area
    uint64_t reply_off;   // 16: of the reply, a multiple of PROTO_RING_ALIGN, in the data area
    uint64_t user;        // 24: comes back in the completion
} proto_ring_submit;

typedef struct proto_ring_complete {
    uint64_t user;        // 0
    uint32_t reply_bytes; // 8: of the reply, header included; 0 = there is none
    int32_t status;       // 12: as in the reply's header
} proto_ring_complete;

PROTO_SIZE(proto_attach, 48);
PROTO_SIZE(proto_attach_reply, 32);
PROTO_SIZE(proto_attach_arena, 32);
PROTO_SIZE(proto_attach_left, 4);
PROTO_SIZE(proto_ring, 192);
PROTO_SIZE(proto_ring_submit, 32);
PROTO_SIZE(proto_ring_complete, 16);

// proto_ring_layout says where the parts of a region lie.
typedef struct proto_ring_layout {
    uint32_t entries;
    uint64_t sq_off, cq_off, data_off;
    uint64_t data_bytes; // rounded up
    uint64_t bytes;      // of the region
} proto_ring_layout;

// proto_ring_layout_make computes it.  ATTND_EINVAL: entries is no power of two within the limits,
// or data_bytes is 0.  ATTND_EMSGSIZE: data_bytes above 2^40.
attnd_err proto_ring_layout_make(proto_ring_layout *out, uint32_t entries, uint64_t data_bytes,
                                 attnd_errinfo *info);

// proto_ring_load and proto_ring_store are the accesses to indices and flags that both sides share;
// proto_ring_fence is the full fence between a store and the look at the other side's flag.
static inline uint32_t proto_ring_load(const uint32_t *index) {
    return __atomic_load_n(index, __ATOMIC_ACQUIRE);
}

static inline void proto_ring_store(uint32_t *index, uint32_t value) {
    __atomic_store_n(index, value, __ATOMIC_RELEASE);
}

// GCC warns that its thread sanitizer does not model fences.  That costs nothing here: what the
// other side may read is ordered by the index's release, the fence only orders a store before a
// load.
#if defined(__SANITIZE_THREAD__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif
static inline void proto_ring_fence(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
#if defined(__SANITIZE_THREAD__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#ifdef __cplusplus
}
#endif

#endif
