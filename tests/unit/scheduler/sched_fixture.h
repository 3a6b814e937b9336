// sched_fixture is what tests of the whole scheduler share: its bounds, two shapes, a fake backend,
// and requests of one row.
#ifndef ATTND_TESTS_UNIT_SCHEDULER_SCHED_FIXTURE_H
#define ATTND_TESTS_UNIT_SCHEDULER_SCHED_FIXTURE_H

#include "tests/unit/scheduler/fake.h"

static const attn_shape shape_a = {.head_dim = 64, .block_stride = 256};
static const attn_shape shape_b = {.head_dim = 128, .block_stride = 512};

static const sched_opts opts = {.max_queued = 64,
                                .max_tenant_queued = 48,
                                .max_launch_rows = 16,
                                .max_tenants = 4,
                                .prefill_chunk_tokens = 32,
                                .max_decodes_in_a_row = 3};

static fake_backend b;
static fake_req r[64];

// setup opens a backend that takes one launch at a time, setup_deep one that takes two.
static inline void setup(void) {
    fake_open(&b, opts, 1);
}

static inline void setup_deep(void) {
    fake_open(&b, opts, 2);
}

// setup_alone opens one that takes two, where prefills alone run in launches of up to 128 tokens
// and the work of 128 x 128.
static inline void setup_alone(void) {
    sched_opts o = opts;
    o.prefill_alone_tokens = 128;
    fake_open_as(&b, o, 2, false);
}

static inline void teardown(void) {
    fake_close(&b);
}

// decode and prefill submit a request: of one query token over 100 keys, or of a prompt.
static inline void decode(fake_req *req, uint32_t tenant) {
    fake_make(req, &shape_a, tenant, 1, 100);
    ATTND_CK_OK(sched_submit(b.s, &req->req, NULL));
}

static inline void prefill(fake_req *req, uint32_t tenant, int32_t q_len) {
    fake_make(req, &shape_a, tenant, q_len, q_len);
    ATTND_CK_OK(sched_submit(b.s, &req->req, NULL));
}

// with makes a case whose tests run between open (setup, setup_deep) and teardown.
static inline TCase *with(const char *name, void (*open)(void)) {
    TCase *t = tcase_create(name);
    tcase_add_checked_fixture(t, open, teardown);
    return t;
}

#endif
