// proto_ring is the second way to the daemon: the messages of proto_wire.h in memory that client
// and daemon share, one ring a session.  A client can be written from this file and proto_wire.h
// alone.
//
// Attach.  hello's reply names the attach socket (AF_UNIX, SOCK_SEQPACKET).  The client connects
// and sends one proto_attach; the daemon answers one proto_attach_reply with one descriptor
// (SCM_RIGHTS): a memfd, sealed against shrinking and growing, of the size that was asked for.  The
// client maps it whole.  The connection is the session's: when it closes, the session ends (with
// session = 0 in proto_attach the ring has a session of its own and hello is the first message on
// it).  The client sends no descriptors; whoever does loses the connection.
//
// Region.  Little-endian, offsets count bytes from its start:
//     0      proto_ring, 4096 bytes: geometry, then each index on a cache line of its own
//     4096   submissions: proto_ring_submit [entries]
//     ...    completions: proto_ring_complete [entries]
//     ...    data: messages and replies, laid out by the client as it likes
// entries is a power of two.  Indices run from 0 and wrap at 2^32; entry i is at i % entries.
//
//                 submissions                        completions
//     client: writes entry, then stores sq_tail  |  reads up to cq_tail, then stores cq_head
//     daemon: loads sq_tail, reads, stores sq_head  |  writes entry, then stores cq_tail
// Stores release, loads acquire.  At most `entries` requests are outstanding (submitted, completion
// not read): more is a protocol error.
//
// A submission names a message (proto_header and body, as over NNG, offsets from its start) and the
// place for its reply.  q, k and v are read in place and out is written in place, so the client
// leaves both alone until the completion.  Everything else is copied once, then checked: whatever
// is written into the region at any moment harms this client alone.  A reply that does not fit its
// place is an error reply EMSGSIZE, and when even that does not fit, the completion's status alone
// says so.
//
// Doorbells.  The daemon spins for a bounded time while a session has calls in flight, then sets
// daemon_sleeps; a client that finds it set after storing sq_tail (full fence between) sends one
// byte on the attach socket with MSG_DONTWAIT.  A client that wants to sleep stores client_waits =
// 1, checks cq_tail again (full fence between), and waits by FUTEX_WAIT on cq_tail; the daemon that
// finds it set after storing cq_tail stores 0 and wakes by FUTEX_WAKE.  The daemon's death closes
// the attach socket: a waiting client bounds its futex wait and polls the socket.
#ifndef ATTND_PROTO_PROTO_RING_H
#define ATTND_PROTO_PROTO_RING_H

#include <stddef.h>

#include "proto/proto_wire.h"

enum {
    PROTO_RING_MAGIC = 0x474e5241, // "ARNG"
    PROTO_RING_HEAD_BYTES = 4096,
    PROTO_RING_MIN_ENTRIES = 2,
    PROTO_RING_MAX_ENTRIES = 1024,
    PROTO_RING_ALIGN = 64, // of messages and of replies in the data area
};

// proto_attach is the client's one packet.
typedef struct proto_attach {
    uint32_t magic;      //  0: PROTO_RING_MAGIC
    uint16_t version;    //  4: PROTO_VERSION
    uint16_t reserved;   //  6: 0
    uint64_t session;    //  8: of hello over NNG; 0 = the ring gets its own
    uint8_t secret[16];  // 16: of that session; zeros when session = 0
    uint32_t entries;    // 32: a power of two
    uint32_t reserved2;  // 36: 0
    uint64_t data_bytes; // 40: size of the data area, at most the daemon's limit
} proto_attach;

typedef struct proto_attach_reply {
    uint32_t magic;    //  0: PROTO_RING_MAGIC
    int32_t status;    //  4: 0, or an attnd_err (no descriptor, and the connection closes)
    uint64_t bytes;    //  8: of the whole region
    uint64_t data_off; // 16: of the data area
    uint32_t spin_us;  // 24: how long the daemon spins before it sleeps
    uint32_t reserved; // 28
} proto_attach_reply;

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
    uint32_t msg_bytes;   //  8: header and body
    uint32_t reply_bytes; // 12: room for the reply
    uint64_t reply_off;   // 16: multiple of PROTO_RING_ALIGN, in the data area
    uint64_t user;        // 24: comes back in the completion
} proto_ring_submit;

typedef struct proto_ring_complete {
    uint64_t user;        // 0
    uint32_t reply_bytes; // 8: of the reply, 0 when it did not fit
    int32_t status;       // 12: as in the reply's header
} proto_ring_complete;

PROTO_SIZE(proto_attach, 48);
PROTO_SIZE(proto_attach_reply, 32);
PROTO_SIZE(proto_ring, 192);
PROTO_SIZE(proto_ring_submit, 32);
PROTO_SIZE(proto_ring_complete, 16);

#endif
