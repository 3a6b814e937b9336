// fake_ring is the daemon's end of one ring, played by a thread as a test likes.
#ifndef ATTND_TESTS_FAKE_RING_H
#define ATTND_TESTS_FAKE_RING_H

#include <stdatomic.h>
#include <stdbool.h>

#include "proto/proto_msg.h"
#include "proto/proto_ring.h"

typedef struct fake_ring fake_ring;

// fake_ring_attach changes the answer to proto_attach, or the file behind it: return the
// descriptor to send, -1 = none.
typedef int fake_ring_attach(fake_ring *f, proto_attach_reply *reply, int region);

// fake_ring_answer writes the reply to a request (header included) and may change its completion;
// false: no completion.
typedef bool fake_ring_answer(fake_ring *f, const uint8_t *msg, uint8_t *reply,
                              proto_ring_complete *c);

struct fake_ring {
    char path[96]; // of the attach socket
    char url[96];  // of the NNG socket that is not there
    char folder[64];
    int listen_fd, fd;
    uint8_t *base;
    proto_ring *head;
    proto_ring_layout layout;
    uint32_t sq_head, cq_tail;
    fake_ring_attach *attach; // NULL = well
    fake_ring_answer *answer;
    uint32_t copies; // of the descriptor that attach gave, sent beside it
    atomic_int stop, hang_up;
    unsigned long thread;
};

// fake_ring_start listens, and serves one client.
fake_ring *fake_ring_start(fake_ring_attach *attach, fake_ring_answer *answer);
void fake_ring_stop(fake_ring *f);

// fake_ring_body writes a good reply of a body; returns its length.
uint32_t fake_ring_body(uint8_t *reply, const uint8_t *msg, const void *body, size_t bytes);

#endif
