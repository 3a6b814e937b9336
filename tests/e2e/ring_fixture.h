// ring_fixture is what tests of rings send first: a call, a small model, a sequence, a step of one
// token.
#ifndef ATTND_TESTS_E2E_RING_FIXTURE_H
#define ATTND_TESTS_E2E_RING_FIXTURE_H

#include <string.h>

#include "tests/e2e/play.h"
#include "tests/e2e/ring_client.h"

static inline attnd_err call(ring_client *r, uint32_t op, uint64_t id, const void *body,
                             size_t bytes) {
    return ring_client_call(r, op, id, body, bytes, NULL);
}

// open_seq opens a small model and a sequence with ids from 10 on.
static inline uint64_t open_seq(ring_client *r, uint32_t *model) {
    static const char json[] =
        "{\"name\": \"m\", \"digest\": "
        "\"0000000000000000000000000000000000000000000000000000000000000000\", \"dtype\": "
        "\"f32\", \"layers\": 1, \"q_heads\": 1, \"kv_heads\": 1, \"head_dim\": 8}";
    const void *reply;
    ATTND_CK_OK(ring_client_call(r, PROTO_MODEL_OPEN, 10, json, strlen(json), &reply));
    *model = (uint32_t)e2e_number(reply, "model");
    proto_model body = {.model = *model};
    proto_seq seq;
    ATTND_CK_OK(ring_client_call(r, PROTO_SEQ_CREATE, 11, &body, sizeof(body), &reply));
    memcpy(&seq, reply, sizeof(seq));
    return seq.seq;
}

typedef struct step_body {
    proto_step step;
    proto_step_seq seq;
} step_body;

static inline step_body one_token(uint32_t model, uint64_t seq) {
    return (step_body){.step = {.model = model, .num_seqs = 1}, .seq = {.seq = seq, .new_len = 1}};
}

#endif
