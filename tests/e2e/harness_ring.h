// harness_ring carries the harness's messages over a ring.  One thread.
#ifndef ATTND_TESTS_E2E_HARNESS_RING_H
#define ATTND_TESTS_E2E_HARNESS_RING_H

#include "tests/e2e/harness.h"

typedef struct e2e_ring e2e_ring;

// e2e_ring_open opens a ring beside an ipc:// URL when the environment asks for it; NULL when not.
e2e_ring *e2e_ring_open(const char *url);
void e2e_ring_close(e2e_ring *ring);

// e2e_ring_send submits a message.  e2e_ring_arrived is true when its completion is there, or will
// never be.  e2e_ring_recv waits for it: the reply in the region, until e2e_ring_done; NULL when
// there is none, *status says why.
void e2e_ring_send(e2e_flight *f, const void *msg, size_t bytes);
bool e2e_ring_arrived(e2e_flight *f);
const void *e2e_ring_recv(e2e_flight *f, int ms, attnd_err *status, size_t *bytes);
void e2e_ring_done(e2e_flight *f);

#endif
