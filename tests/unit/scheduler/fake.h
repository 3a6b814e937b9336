// fake is what the scheduler's tests run it against: a clock that stands still, requests that know
// what was computed of them, and a backend that ends a launch when told to.
#ifndef ATTND_TESTS_UNIT_SCHEDULER_FAKE_H
#define ATTND_TESTS_UNIT_SCHEDULER_FAKE_H

#include <stdbool.h>
#include <string.h>

#include "scheduler/sched.h"
#include "tests/check_main.h"

enum { FAKE_MAX_ROWS = 8, FAKE_MAX_TOKENS = 320, FAKE_MAX_LAUNCHES = 4 };

static uint64_t fake_now_us;

static uint64_t fake_clock(void) {
    return fake_now_us;
}

// fake_req is a request of at most FAKE_MAX_ROWS rows.
typedef struct fake_req {
    sched_req req;
    int32_t q_len[FAKE_MAX_ROWS], kv_len[FAKE_MAX_ROWS];
    uint8_t computed[FAKE_MAX_ROWS][FAKE_MAX_TOKENS]; // times that the token was computed
    uint8_t appended[FAKE_MAX_ROWS];                  // times that the new tokens were appended
    uint8_t copied;                                   // times that its copies ran
    uint32_t running;                                 // launches that hold a row of it
    uint32_t num_done;
    attnd_err err;
    attnd_errinfo info;
    const char *kernel;
    kv_copy copies[4];
    void (*then)(struct fake_req *r); // called by done
    void *arg;
} fake_req;

static int32_t fake_new_mark; // what k_new and v_new point at

static void fake_fill(sched_req *req, attn_row *rows) {
    fake_req *r = req->user;
    for (uint32_t i = 0; i < req->num_rows; i++) {
        rows[i] = (attn_row){.q = r,
                             .k_offset = i,
                             .q_len = r->q_len[i],
                             .kv_len = r->kv_len[i],
                             .new_len = r->q_len[i],
                             .k_new = &fake_new_mark,
                             .v_new = &fake_new_mark,
                             .k_positions = &fake_new_mark};
    }
}

static void fake_lens(sched_req *req, uint32_t row, int32_t *q_len, int32_t *kv_len) {
    const fake_req *r = req->user;
    *q_len = r->q_len[row];
    *kv_len = r->kv_len[row];
}

static void fake_done(sched_req *req, attnd_err err, const attn_choice *choice,
                      const attnd_errinfo *info) {
    fake_req *r = req->user;
    ck_assert_uint_eq(r->running, 0);
    r->num_done++;
    r->err = err;
    r->info = *info;
    r->kernel = choice ? choice->kernel : NULL;
    if (r->then) {
        r->then(r);
    }
}

// fake_make makes a request of one row; more are added by fake_row.
static inline void fake_make(fake_req *r, const attn_shape *shape, uint32_t tenant, int32_t q_len,
                             int32_t kv_len) {
    memset(r, 0, sizeof(*r));
    r->req = (sched_req){.shape = shape,
                         .num_rows = 1,
                         .tenant = tenant,
                         .fill = fake_fill,
                         .lens = fake_lens,
                         .done = fake_done,
                         .user = r};
    r->q_len[0] = q_len;
    r->kv_len[0] = kv_len;
}

static inline void fake_row(fake_req *r, int32_t q_len, int32_t kv_len) {
    r->q_len[r->req.num_rows] = q_len;
    r->kv_len[r->req.num_rows] = kv_len;
    r->req.num_rows++;
}

// fake_make_copies makes a request with num copies only; src says whose they are.
static inline void fake_make_copies(fake_req *r, uint32_t tenant, uint32_t num) {
    fake_make(r, NULL, tenant, 0, 0);
    r->req.num_rows = 0;
    r->req.copies = r->copies;
    r->req.num_copies = num;
}

// fake_backend keeps the launches that were given to it, oldest first.
typedef struct fake_backend {
    sched *s;
    sched_launch *launches[FAKE_MAX_LAUNCHES];
    uint32_t num, depth, given;
} fake_backend;

static void fake_launch(void *ctx, sched_launch *launch) {
    fake_backend *b = ctx;
    ck_assert_uint_lt(b->num, b->depth);
    b->launches[b->num++] = launch;
    b->given++;
    for (uint32_t i = 0; i < launch->params.num_rows; i++) {
        ((fake_req *)launch->params.rows[i].q)->running++;
    }
}

static inline void fake_open_as(fake_backend *b, sched_opts opts, uint32_t depth,
                                bool deterministic) {
    memset(b, 0, sizeof(*b));
    fake_now_us = 1000;
    b->depth = depth;
    opts.now_us = fake_clock;
    sched_backend backend = {.launch = fake_launch,
                             .ctx = b,
                             .pool = b,
                             .pool_bytes = 1 << 20,
                             .depth = depth,
                             .deterministic = deterministic};
    ATTND_CK_OK(sched_create(&b->s, &opts, &backend));
}

static inline void fake_open(fake_backend *b, sched_opts opts, uint32_t depth) {
    fake_open_as(b, opts, depth, true);
}

static inline void fake_close(fake_backend *b) {
    ck_assert_uint_eq(b->num, 0);
    ck_assert(sched_idle(b->s));
    sched_free(b->s);
}

// fake_record notes what the row computes; its checks are one assert, since each writes to a pipe.
static inline void fake_record(const attn_row *row) {
    fake_req *r = (fake_req *)row->q;
    uint64_t i = row->k_offset;
    bool first = row->q_first == 0;
    // what a later piece reads was appended by an earlier launch
    bool ok = row->kv_len == r->kv_len[i] && r->appended[i] == !first;
    if (first) {
        ok = ok && row->new_len == r->q_len[i] && row->k_new == &fake_new_mark;
        r->appended[i]++;
    } else {
        ok = ok && row->new_len == 0 && !row->k_new && !row->v_new;
    }
    ck_assert(ok);
    for (int32_t t = row->q_first; t < row->q_first + row->q_count; t++) {
        r->computed[i][t]++;
    }
    r->running--;
}

// fake_end ends the oldest launch, as computed or with an error.
static inline void fake_end_as(fake_backend *b, attnd_err err) {
    ck_assert_uint_gt(b->num, 0);
    sched_launch *launch = b->launches[0];
    b->num--;
    memmove(b->launches, b->launches + 1, b->num * sizeof(b->launches[0]));
    for (uint32_t i = 0; i < launch->params.num_rows; i++) {
        fake_record(&launch->params.rows[i]);
    }
    launch->choice = (attn_choice){.kernel = "fake", .why = "test", .splits = 1};
    launch->choice.rows = launch->params.num_rows;
    launch->run_us = 10;
    launch->err = err ? attnd_fail(&launch->info, err, "row", "the backend says so") : ATTND_OK;
    sched_launch_done(b->s, launch);
}

static inline void fake_end(fake_backend *b) {
    fake_end_as(b, ATTND_OK);
}

// fake_end_all ends launches until nothing runs.
static inline void fake_end_all(fake_backend *b) {
    while (b->num > 0) {
        fake_end(b);
    }
}

// fake_in returns how many rows of a request the newest launch holds.
static inline uint32_t fake_in(const fake_backend *b, const fake_req *r) {
    uint32_t rows = 0;
    if (b->num > 0) {
        const attn_params *p = &b->launches[b->num - 1]->params;
        for (uint32_t i = 0; i < p->num_rows; i++) {
            rows += p->rows[i].q == r;
        }
    }
    return rows;
}

// fake_check checks that a request was computed whole, each token once.
static inline void fake_check(const fake_req *r) {
    ck_assert_uint_eq(r->num_done, 1);
    ATTND_CK_OK(r->err);
    bool ok = true;
    for (uint32_t i = 0; i < r->req.num_rows; i++) {
        ok = ok && r->appended[i] == 1;
        for (int32_t t = 0; t < FAKE_MAX_TOKENS; t++) {
            ok = ok && r->computed[i][t] == (t < r->q_len[i]);
        }
    }
    ck_assert(ok);
}

#endif
