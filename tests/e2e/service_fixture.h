// service_fixture is what tests of attend_all over regions share: a daemon whose device is host
// memory, a client over NNG that opens steps, and a ring with a region in its session.
// ATTND_E2E_BINARY names the daemon: attnd_fake.
#ifndef ATTND_TESTS_E2E_SERVICE_FIXTURE_H
#define ATTND_TESTS_E2E_SERVICE_FIXTURE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/e2e/service_client.h"

enum { MIB = 1 << 20, FLAGS = 256, PAIR = 7 };

static e2e_daemon d;
static e2e_client c;
static service_client s;
static char *hello, path[128];

// begin_with starts a daemon with more flags (NULL = none), and begin joins a region, too.
static inline void begin_with(const char *const *more) {
    const char *flags[16] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB"};
    for (int i = 0; more && more[i]; i++) {
        flags[4 + i] = more[i];
    }
    memset(&d, 0, sizeof(d));
    setenv("ATTND_FAULTY", "1", 1);
    e2e_dir(&d);
    e2e_start(&d, flags);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    e2e_connect(&c, d.url);
    hello = e2e_json(&c, PROTO_HELLO, "{}");
    c.id = 100;
}

static inline void begin(void) {
    begin_with(NULL);
    service_join(&s, path, hello, MIB, FLAGS);
}

// begin_one makes the tiny model and a sequence of it, too.  *m is the sequence's from then on.
static inline void begin_one(play_model *m, play_seq *seq) {
    begin();
    *m = play_tiny();
    play_open(&c, m);
    play_create(&c, m, seq);
}

// ck_clean: nothing of a call is left, and the accounting is right.
static inline void ck_clean(void) {
    ck_assert_double_eq(e2e_stat(&c, "service.waiting"), 0);
    ck_assert_double_eq(e2e_stat(&c, "service.draining"), 0);
    ck_assert_double_eq(e2e_stat(&c, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&c, "accounting_mismatches"), 0);
    double total = e2e_stat(&c, "blocks.total"), in_use = e2e_stat(&c, "blocks.in_use");
    double rest = e2e_stat(&c, "blocks.free") + e2e_stat(&c, "blocks.cached");
    ck_assert_double_eq(total, in_use + rest);
    for (uint32_t i = 0; s.pairs && i < FLAGS; i++) {
        ck_assert_uint_eq(s.pairs[i].ready, 0);
        ck_assert_uint_eq(s.pairs[i].done, 0);
    }
}

// end checks that all is clean, and stops all.
static inline void end(void) {
    ck_clean();
    service_close(&s);
    e2e_close(&c);
    free(hello);
    e2e_stop(&d);
}

static inline play_step open_step(const play_model *m, play_seq *seq, uint32_t new_len,
                                  uint32_t deadline_ms) {
    play_step step;
    play_part part = {.seq = seq, .new_len = new_len};
    ATTND_CK_OK(play_step_open(&c, m, &part, 1, deadline_ms, &step, NULL));
    return step;
}

// ck_error takes the reply to a call that fails.
static inline void ck_error(attnd_err want, int32_t detail) {
    const void *reply;
    proto_error error;
    ATTND_CK_ERR(service_recv(&s, &reply), want);
    memcpy(&error, reply, sizeof(error));
    ck_assert_int_eq(error.detail, detail);
}

static inline proto_attend_reply ck_reply(const play_step *step) {
    const void *body;
    proto_attend_reply reply;
    ATTND_CK_OK(service_recv(&s, &body));
    memcpy(&reply, body, sizeof(reply));
    ck_assert_uint_eq(reply.rows, step->rows);
    ck_assert_uint_eq(reply.out_off | reply.lse_off | reply.lens_off, 0);
    return reply;
}

// whole does a step by attend_all, and checks every output of every layer.
static inline void whole(const play_model *m, play_seq *seq, uint32_t new_len) {
    play_step step = open_step(m, seq, new_len, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR);
    service_send(&s, &all, sizeof(all));
    service_layers(&s, &step, &all, 0, m->layers);
    proto_attend_reply reply = ck_reply(&step);
    ck_assert_str_eq(reply.kernel, "fake");
    ck_assert_uint_ge(reply.batch_rows, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
}

// ck_drains plays the rest of a stream whose call has failed: nobody computes any more.
static inline void ck_drains(const proto_attend_all *all, uint32_t from) {
    for (uint32_t i = from; i < all->num_layers; i++) {
        service_raise(&s, all->first_flag + i);
        ck_assert_msg(service_lower(&s, all->first_flag + i, 1000), "layer %u hangs", i);
    }
}

#endif
