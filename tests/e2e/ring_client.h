// ring_client is the smallest client of a ring, for tests: it keeps the rules of proto_ring.h where
// it is asked to, and everything is open to whoever wants to break them.  One thread.
#ifndef ATTND_TESTS_E2E_RING_CLIENT_H
#define ATTND_TESTS_E2E_RING_CLIENT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/proto_ring.h"

enum {
    RING_CLIENT_SPIN_US = 200,
    RING_CLIENT_MAX_RIGHTS = 253, // descriptors of one packet, says the kernel
};

typedef struct ring_client {
    int fd; // the attach socket; -1 = closed
    proto_attach_reply attached;
    proto_ring_layout layout;
    uint8_t *base; // the region
    proto_ring *head;
    uint32_t sq_tail, cq_head; // ours
    uint32_t spin_us;          // before sleeping in ring_client_wait
    uint64_t doorbells;        // sent
} ring_client;

// ring_client_connect connects to an attach socket; false when nobody listens.
bool ring_client_connect(ring_client *c, const char *path);

// ring_client_ask sends any proto_attach and takes the answer, mapping what came with it.  The
// status, or ATTND_ECONN when the daemon closed.
attnd_err ring_client_ask(ring_client *c, const proto_attach *ask);
// ring_client_ask_more sends a packet that begins with one.
attnd_err ring_client_ask_more(ring_client *c, const proto_attach *ask, size_t bytes);

// ring_client_open connects and asks for a ring with a session of its own.
attnd_err ring_client_open(ring_client *c, const char *path, uint32_t entries, uint64_t data_bytes);
void ring_client_close(ring_client *c);

// ring_client_closed is true when the daemon has closed the connection, within ms.
bool ring_client_closed(const ring_client *c, int ms);

// ring_client_submit publishes a submission; ring_client_bell rings when the daemon sleeps.
// Offsets here count from the start of the data area.
void ring_client_submit(ring_client *c, uint64_t msg_at, uint32_t msg_bytes, uint64_t reply_at,
                        uint32_t reply_bytes, uint64_t user);
void ring_client_submit_raw(ring_client *c, const proto_ring_submit *s);
void ring_client_bell(ring_client *c);

// ring_client_take takes a completion if there is one; ring_client_wait waits for it, spinning and
// then by futex; false when the daemon closed or ms have passed.
bool ring_client_take(ring_client *c, proto_ring_complete *out);
bool ring_client_wait(ring_client *c, proto_ring_complete *out, int ms);

// ring_client_data returns where an offset of the data area lies.
static inline uint8_t *ring_client_data(const ring_client *c, uint64_t at) {
    return c->base + c->layout.data_off + at;
}

// ring_client_call sends a body with the place of its message at 0 and of its reply at half of the
// data area, and waits; *body points at the reply's body (may be NULL).  ATTND_ECONN as above.
attnd_err ring_client_call(ring_client *c, uint32_t op, uint64_t id, const void *body, size_t bytes,
                           const void **reply);

// ring_client_send_rights sends a packet with num copies of a descriptor, which no client should.
void ring_client_send_rights(ring_client *c, int what, int num);

// ring_client_count_fds and ring_client_count_regions count what a process has open, and the
// regions of rings that it has mapped.
int ring_client_count_fds(pid_t pid);
int ring_client_count_regions(pid_t pid);

#endif
