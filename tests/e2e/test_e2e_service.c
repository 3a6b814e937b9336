// attend_all over regions, with a device of host memory, so that the test is the client's stream:
// steps go over NNG, and a ring with a region joins their session.  ATTND_E2E_BINARY names the
// daemon: attnd_fake.
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "tests/device/faulty_device.h"
#include "tests/e2e/service_client.h"

enum { MIB = 1 << 20, FLAGS = 256, PAIR = 7 };

static e2e_daemon d;
static e2e_client c;
static service_client s;
static char *hello, path[128];

static void begin_with(const char *const *more) {
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

static void begin(void) {
    begin_with(NULL);
    service_join(&s, path, hello, MIB, FLAGS);
}

// ck_clean: nothing of a call is left, and the accounting is right.
static void ck_clean(void) {
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

static void end(void) {
    ck_clean();
    service_close(&s);
    e2e_close(&c);
    free(hello);
    e2e_stop(&d);
}

static play_step open_step(const play_model *m, play_seq *seq, uint32_t new_len,
                           uint32_t deadline_ms) {
    play_step step;
    play_part part = {.seq = seq, .new_len = new_len};
    ATTND_CK_OK(play_step_open(&c, m, &part, 1, deadline_ms, &step, NULL));
    return step;
}

// ck_error takes the reply to a call that fails.
static void ck_error(attnd_err want, int32_t detail) {
    const void *reply;
    proto_error error;
    ATTND_CK_ERR(service_recv(&s, &reply), want);
    memcpy(&error, reply, sizeof(error));
    ck_assert_int_eq(error.detail, detail);
}

static proto_attend_reply ck_reply(const play_step *step) {
    const void *body;
    proto_attend_reply reply;
    ATTND_CK_OK(service_recv(&s, &body));
    memcpy(&reply, body, sizeof(reply));
    ck_assert_uint_eq(reply.rows, step->rows);
    ck_assert_uint_eq(reply.out_off | reply.lse_off | reply.lens_off, 0);
    return reply;
}

// whole does a step by attend_all, and checks every output of every layer.
static void whole(const play_model *m, play_seq *seq, uint32_t new_len) {
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
static void ck_drains(const proto_attend_all *all, uint32_t from) {
    for (uint32_t i = from; i < all->num_layers; i++) {
        service_raise(&s, all->first_flag + i);
        ck_assert_msg(service_lower(&s, all->first_flag + i, 1000), "layer %u hangs", i);
    }
}

// ---- values

START_TEST(layers_give_what_the_reference_gives) {
    begin();
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    static const uint32_t lens[] = {1, 40, 8, 600, 1, 1, 18}; // decodes and prefills of two chunks
    for (size_t i = 0; i < sizeof(lens) / sizeof(lens[0]); i++) {
        whole(&m, &seq, lens[i]);
    }
    play_free(&c, &seq);
    ck_assert_double_eq(e2e_stat(&c, "service.calls"), 7);
    ck_assert_double_eq(e2e_stat(&c, "service.layers"), 14);
    ck_assert_double_le(e2e_stat(&c, "service.prepared"), 8); // the decodes
    ck_assert_double_eq(e2e_stat(&c, "service.failed"), 0);
    end();
}
END_TEST

// A layer whose flag takes its time is prepared; then something else goes in between.
START_TEST(what_is_prepared_is_run_or_given_up) {
    begin();
    play_model m = play_tiny();
    play_seq seq, other;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_create(&c, &m, &other);
    for (int round = 0; round < 20; round++) {
        play_step step = open_step(&m, &seq, 1 + (uint32_t)round % 8, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        service_send(&s, &all, sizeof(all));
        e2e_sleep_ms(3);
        service_layers(&s, &step, &all, 0, 1);
        e2e_sleep_ms(3);
        if (round % 2) {
            play_token(&c, (play_seq *const[]){&other}, 1, 1 + (uint32_t)round % 3);
        }
        if (round % 5 == 4) {
            proto_cancel cancel = {.step = step.handle};
            ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
            ck_error(ATTND_ECANCELED, 1);
            ck_drains(&all, 1);
            continue;
        }
        service_layers(&s, &step, &all, 1, 2);
        ck_reply(&step);
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    }
    ck_assert_double_ge(e2e_stat(&c, "service.prepared"), 5);
    ck_assert_double_le(e2e_stat(&c, "service.prepared"), e2e_stat(&c, "service.layers"));
    play_free(&c, &seq);
    play_free(&c, &other);
    end();
}
END_TEST

START_TEST(sequences_of_a_step_are_packed_and_strides_are_kept) {
    begin();
    play_model m = play_tiny();
    play_seq seqs[3];
    play_open(&c, &m);
    play_part parts[3];
    memset(parts, 0, sizeof(parts));
    for (int i = 0; i < 3; i++) {
        play_create(&c, &m, &seqs[i]);
        parts[i] = (play_part){.seq = &seqs[i], .new_len = 5 + (uint32_t)i};
    }
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, parts, 3, 0, &step, NULL));
    proto_attend_all all = service_layout(&step, 256 * 1024, 0);
    all.q.off = 0;
    all.q.stride_token = m.q_heads * m.head_dim + 64;
    service_send(&s, &all, sizeof(all));
    service_layers(&s, &step, &all, 0, 2);
    ck_reply(&step);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    parts[1].new_len = 0; // reads only, beside two that append
    parts[1].q_len = 3;
    ATTND_CK_OK(play_step_open(&c, &m, parts, 3, 0, &step, NULL));
    all = service_layout(&step, 0, 3);
    service_send(&s, &all, sizeof(all));
    service_layers(&s, &step, &all, 0, 2);
    ck_reply(&step);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    for (int i = 0; i < 3; i++) {
        play_free(&c, &seqs[i]);
    }
    end();
}
END_TEST

START_TEST(a_layer_that_reads_anothers_cache_appends_nothing) {
    begin();
    play_model m = play_tiny();
    m.name = "shared";
    m.layers = 3;
    m.layer[2] = m.layer[0];
    m.layer[2].kv_layer = 0;
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    for (uint32_t len = 1; len < 40; len += 19) {
        whole(&m, &seq, len);
    }
    play_free(&c, &seq);
    end();
}
END_TEST

START_TEST(flags_may_come_before_the_call_and_a_step_in_parts) {
    begin();
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_step step = open_step(&m, &seq, 3, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR), first = all, second = all;
    play_tensors t = play_random(&step);
    service_write(&s, &step, &all, &t);
    service_raise(&s, PAIR);
    first.num_layers = second.num_layers = 1;
    second.first_layer = 1;
    second.first_flag = PAIR + 1;
    service_send(&s, &first, sizeof(first));
    ck_assert(service_lower(&s, PAIR, SERVICE_WAIT_MS));
    service_check(&s, &step, &all, 0, &t);
    ck_reply(&step);
    ATTND_CK_ERR(play_commit(&c, &step, NULL, NULL), ATTND_EINVAL); // layer 1 is not attended
    service_send(&s, &second, sizeof(second));
    e2e_await_stat(&c, "service.waiting", 1, 5000);
    ATTND_CK_ERR(play_commit(&c, &step, NULL, NULL), ATTND_EBUSY);
    service_layers(&s, &step, &second, 1, 2);
    ck_reply(&step);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_tensors_fini(&t);
    play_free(&c, &seq);
    end();
}
END_TEST

// Eight calls are ready at once, on a device that takes two launches at a time.
START_TEST(calls_are_batched_across_sessions) {
    enum { NUM = 8 };
    static e2e_client cs[NUM];
    static service_client ss[NUM];
    play_seq seqs[NUM];
    play_step steps[NUM];
    uint32_t most = 0;
    begin();
    play_model m = play_tiny();
    m.layers = 1;
    play_open(&c, &m);
    for (int i = 0; i < NUM; i++) {
        e2e_connect(&cs[i], d.url);
        char *text = e2e_json(&cs[i], PROTO_HELLO, "{}");
        service_join(&ss[i], path, text, MIB, 1);
        free(text);
        play_open(&cs[i], &m);
        play_create(&cs[i], &m, &seqs[i]);
    }
    for (int round = 0; round < 20; round++) {
        play_tensors ts[NUM];
        proto_attend_all alls[NUM];
        for (int i = 0; i < NUM; i++) {
            play_part part = {.seq = &seqs[i], .new_len = 2};
            ATTND_CK_OK(play_step_open(&cs[i], &m, &part, 1, 0, &steps[i], NULL));
            alls[i] = service_layout(&steps[i], 0, 0);
            ts[i] = play_random(&steps[i]);
            service_write(&ss[i], &steps[i], &alls[i], &ts[i]);
            service_send(&ss[i], &alls[i], sizeof(alls[i]));
        }
        e2e_await_stat(&c, "service.waiting", NUM, 5000);
        for (int i = 0; i < NUM; i++) {
            service_raise(&ss[i], 0);
        }
        for (int i = 0; i < NUM; i++) {
            const void *body;
            proto_attend_reply reply;
            ck_assert(service_lower(&ss[i], 0, SERVICE_WAIT_MS));
            service_check(&ss[i], &steps[i], &alls[i], 0, &ts[i]);
            play_tensors_fini(&ts[i]);
            ATTND_CK_OK(service_recv(&ss[i], &body));
            memcpy(&reply, body, sizeof(reply));
            most = reply.batch_rows > most ? reply.batch_rows : most;
            ATTND_CK_OK(play_commit(&cs[i], &steps[i], NULL, NULL));
        }
    }
    ck_assert_uint_ge(most, 2);
    for (int i = 0; i < NUM; i++) {
        play_free(&cs[i], &seqs[i]);
        service_close(&ss[i]);
        e2e_close(&cs[i]);
    }
    e2e_await_stat(&c, "service.regions", 1, 1000);
    end();
}
END_TEST

// ---- refusals

START_TEST(a_bad_request_for_a_region_says_why) {
    static const char *const flags[] = {"--set", "limits.region_memory=1MiB", "--set",
                                        "limits.all_regions_memory=2MiB", NULL};
    begin_with(flags);
    const proto_attach attach = {.magic = PROTO_RING_MAGIC,
                                 .version = PROTO_VERSION,
                                 .flags = PROTO_ATTACH_REGION,
                                 .entries = 16,
                                 .data_bytes = 4096};
    struct {
        proto_attach attach;
        proto_region_ask ask;
        attnd_err err;
    } bad[9];
    for (int i = 0; i < 9; i++) {
        bad[i].attach = attach;
        bad[i].ask = (proto_region_ask){.bytes = 4096, .num_flags = 1};
        bad[i].err = ATTND_EINVAL;
    }
    bad[0].ask.bytes = 0;
    bad[1].ask.num_flags = 0;
    bad[2].ask.num_flags = PROTO_REGION_MAX_FLAGS + 1;
    bad[3].ask.flags = 2;
    bad[4].attach.flags |= PROTO_ATTACH_ARENA;
    bad[5].attach.flags = 0, bad[5].err = ATTND_EPROTO; // the packet is too long for that
    bad[6].ask.bytes = MIB + 1, bad[6].err = ATTND_EMSGSIZE;
    bad[7].ask.bytes = UINT64_MAX, bad[7].err = ATTND_EMSGSIZE;
    bad[8].attach.version++, bad[8].err = ATTND_EVERSION;
    service_client r, all[3];
    for (int i = 0; i < 9; i++) {
        ATTND_CK_ERR(service_ask(&r, path, &bad[i].attach, &bad[i].ask), bad[i].err);
        ck_assert_uint_eq(r.ring.attached.bytes, bad[i].err == ATTND_EMSGSIZE ? MIB : 0);
        ck_assert(ring_client_closed(&r.ring, 5000));
        service_close(&r);
    }
    ck_assert(ring_client_connect(&r.ring, path)); // and none where it is announced
    ATTND_CK_ERR(ring_client_ask(&r.ring, &attach), ATTND_EPROTO);
    ring_client_close(&r.ring);
    const proto_region_ask most = {.bytes = MIB, .num_flags = PROTO_REGION_MAX_FLAGS};
    for (int i = 0; i < 3; i++) {
        ATTND_CK_ERR(service_ask(&all[i], path, &attach, &most), i < 2 ? ATTND_OK : ATTND_EBUSY);
    }
    ck_assert_double_eq(e2e_stat(&c, "service.regions"), 2);
    ck_assert_double_eq(e2e_stat(&c, "service.region_bytes"), 2 * MIB);
    service_close(&all[0]);
    e2e_await_stat(&c, "service.regions", 1, 1000);
    ATTND_CK_OK(service_ask(&all[0], path, &attach, &most));
    for (int i = 0; i < 3; i++) {
        service_close(&all[i]);
    }
    e2e_await_stat(&c, "service.region_bytes", 0, 1000);
    end();
}
END_TEST

START_TEST(regions_can_be_turned_off) {
    static const char *const flags[] = {"--set", "limits.region_memory=0", NULL};
    begin_with(flags);
    const proto_attach attach = {.magic = PROTO_RING_MAGIC,
                                 .version = PROTO_VERSION,
                                 .flags = PROTO_ATTACH_REGION,
                                 .entries = 16,
                                 .data_bytes = 4096};
    const proto_region_ask ask = {.bytes = 1, .num_flags = 1};
    service_client r;
    ATTND_CK_ERR(service_ask(&r, path, &attach, &ask), ATTND_ENOTSUP);
    service_close(&r);
    end();
}
END_TEST

START_TEST(a_region_is_all_zero_whoever_had_its_memory) {
    begin();
    for (int round = 0; round < 4; round++) {
        service_client r;
        service_open(&r, path, MIB, 4);
        for (size_t i = 0; i < MIB; i++) {
            ck_assert_uint_eq(r.region[i], 0);
        }
        memset(r.region, 0xa5, MIB);
        memset(r.pairs, 0xff, 4 * sizeof(proto_flag));
        service_close(&r);
        e2e_await_stat(&c, "service.regions", 1, 1000);
    }
    end();
}
END_TEST

// fault is one change to a good message, and the error that it must give.
typedef struct fault {
    size_t off, bytes;
    uint64_t value;
    attnd_err err;
} fault;

#define FIELD(name) offsetof(proto_attend_all, name), sizeof(((proto_attend_all *)0)->name)

START_TEST(a_bad_call_is_refused_whole) {
    begin();
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_step step = open_step(&m, &seq, 3, 0);
    const proto_attend_all all = service_layout(&step, 0, PAIR);
    const uint64_t q_bytes = 3 * 4 * 32 * 4, whole_region = s.given.bytes;
    uint32_t drained = 0;
    const fault faults[] = {
        {FIELD(step), step.handle + 1, ATTND_ESTALE},
        {FIELD(step), 0, ATTND_ESTALE},
        {FIELD(first_layer), 1, ATTND_EINVAL},
        {FIELD(first_layer), UINT32_MAX, ATTND_EINVAL},
        {FIELD(num_layers), 0, ATTND_EINVAL},
        {FIELD(num_layers), 3, ATTND_EINVAL},
        {FIELD(num_layers), UINT32_MAX, ATTND_EINVAL},
        {FIELD(first_flag), FLAGS - 1, ATTND_EINVAL},
        {FIELD(first_flag), FLAGS, ATTND_EINVAL},
        {FIELD(first_flag), UINT32_MAX, ATTND_EINVAL},
        {FIELD(flags), 4, ATTND_EINVAL},
        {FIELD(flags), 0, ATTND_EINVAL}, // with a place for lse
        {FIELD(q.off), PROTO_REGION_NONE, ATTND_EINVAL},
        {FIELD(k.off), PROTO_REGION_NONE, ATTND_EINVAL},
        {FIELD(v.off), PROTO_REGION_NONE, ATTND_EINVAL},
        {FIELD(out_off), PROTO_REGION_NONE, ATTND_EINVAL},
        {FIELD(lse_off), PROTO_REGION_NONE, ATTND_EINVAL},
        {FIELD(q.off), 128, ATTND_EINVAL},
        {FIELD(out_off), 1, ATTND_EINVAL},
        {FIELD(q.off), whole_region, ATTND_EINVAL},
        {FIELD(q.off), whole_region - 1024, ATTND_EINVAL}, // it has 1536 bytes
        {FIELD(out_off), whole_region - 1024, ATTND_EINVAL},
        {FIELD(k.off), whole_region - 512, ATTND_EINVAL},
        {FIELD(q.off), 0xffffffffffffff00, ATTND_EINVAL},
        {FIELD(lse_off), 0x8000000000000000, ATTND_EINVAL},
        {FIELD(q.stride_token), 4, ATTND_EINVAL},
        {FIELD(q.stride_head), 33, ATTND_EINVAL},
        {FIELD(q.stride_token), 0xfffffff8, ATTND_EINVAL},
        {FIELD(k.stride_head), 0xfffffff8, ATTND_EINVAL},
        {FIELD(out_off), 0, ATTND_EINVAL},             // on q
        {FIELD(out_off), q_bytes - 256, ATTND_EINVAL}, // on its end
        {FIELD(lse_off), all.out_off, ATTND_EINVAL},   // on out
        {FIELD(lse_off), all.v.off, ATTND_EINVAL},     // on v
    };
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
        proto_attend_all body = all;
        memcpy((uint8_t *)&body + faults[i].off, &faults[i].value, faults[i].bytes);
        service_send(&s, &body, sizeof(body));
        attnd_err err = service_recv(&s, NULL);
        ck_assert_msg(err == faults[i].err, "fault %zu: %s", i, attnd_errname(err));
        bool pairs = body.num_layers && (uint64_t)body.first_flag + body.num_layers <= FLAGS;
        ck_assert_double_eq(e2e_stat(&c, "service.draining"), pairs);
        drained += pairs;
        ck_assert_uint_eq(__atomic_load_n(&s.head->error_epoch, __ATOMIC_ACQUIRE), drained);
        if (pairs) {
            ck_drains(&body, 0);
        }
    }
    for (size_t bytes = 0; bytes < sizeof(all) + 16; bytes += 4) {
        uint8_t body[sizeof(all) + 16] = {0};
        if (bytes != sizeof(all)) {
            memcpy(body, &all, bytes < sizeof(all) ? bytes : sizeof(all));
            service_send(&s, body, bytes);
            ATTND_CK_ERR(service_recv(&s, NULL),
                         bytes < sizeof(all) ? ATTND_EPROTO : ATTND_EMSGSIZE);
        }
    }
    e2e_buf b; // NNG has no region
    e2e_buf_init(&b, PROTO_ATTEND_ALL, ++c.id, &all, sizeof(all));
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, NULL), ATTND_ENOTSUP);
    e2e_buf_fini(&b);
    ck_assert_double_eq(e2e_stat(&c, "service.calls"), 0);
    service_send(&s, &all, sizeof(all)); // the good one still is
    service_layers(&s, &step, &all, 0, 2);
    ck_reply(&step);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_free(&c, &seq);
    end();
}
END_TEST

START_TEST(a_pair_belongs_to_one_call_and_calls_are_bounded) {
    enum { NUM = PROTO_REGION_MAX_CALLS + 1, SPACE = 4096 };
    static const char *const flags[] = {"--set", "limits.in_flight=100", NULL};
    static play_seq seqs[NUM];
    static play_step steps[NUM];
    begin_with(flags);
    service_join(&s, path, hello, MIB, FLAGS);
    play_model m = play_tiny();
    play_open(&c, &m);
    for (uint32_t i = 0; i < NUM; i++) {
        play_create(&c, &m, &seqs[i]);
        steps[i] = open_step(&m, &seqs[i], 1, 0);
    }
    proto_attend_all all = service_layout(&steps[0], 0, 10), other;
    service_send(&s, &all, sizeof(all));
    e2e_await_stat(&c, "service.waiting", 1, 5000);
    for (uint32_t flag = 9; flag <= 11; flag++) {
        other = service_layout(&steps[1], SPACE, flag);
        service_send(&s, &other, sizeof(other));
        ATTND_CK_ERR(service_recv(&s, NULL), ATTND_EBUSY);
    }
    for (uint32_t i = 1; i < NUM; i++) {
        other = service_layout(&steps[i], SPACE * i, 10 + 2 * i);
        service_send(&s, &other, sizeof(other));
    }
    ATTND_CK_ERR(service_recv(&s, NULL), ATTND_EBUSY); // the last one
    e2e_await_stat(&c, "service.waiting", PROTO_REGION_MAX_CALLS, 5000);
    for (uint32_t i = 0; i < PROTO_REGION_MAX_CALLS; i++) {
        other = service_layout(&steps[i], SPACE * i, 10 + 2 * i);
        service_layers(&s, &steps[i], &other, 0, 2);
        ck_reply(&steps[i]);
        ATTND_CK_OK(play_commit(&c, &steps[i], NULL, NULL));
    }
    proto_cancel cancel = {.step = steps[NUM - 1].handle};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    for (uint32_t i = 0; i < NUM; i++) {
        play_free(&c, &seqs[i]);
    }
    end();
}
END_TEST

START_TEST(a_stream_whose_call_is_refused_ends) {
    begin();
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_step step = open_step(&m, &seq, 1, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR);
    service_raise(&s, PAIR); // the stream is ahead of the host
    all.step++;
    service_send(&s, &all, sizeof(all));
    ATTND_CK_ERR(service_recv(&s, NULL), ATTND_ESTALE);
    ck_assert(service_lower(&s, PAIR, 1000));
    ck_drains(&all, 1);
    all.step--;
    service_send(&s, &all, sizeof(all));
    service_layers(&s, &step, &all, 0, 2);
    ck_reply(&step);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_free(&c, &seq);
    end();
}
END_TEST

// A call for each layer, all sent at once; the last layer reads the cache of the first.
START_TEST(a_layer_waits_for_the_one_whose_cache_it_reads) {
    begin();
    play_model m = play_tiny();
    m.name = "shared";
    m.layers = 3;
    m.layer[2] = m.layer[0];
    m.layer[2].kv_layer = 0;
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    for (int round = 0; round < 10; round++) {
        play_step step = open_step(&m, &seq, 1, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR), one = all;
        one.num_layers = 1;
        for (uint32_t i = 0; i < 3; i++) {
            one.first_layer = i;
            one.first_flag = PAIR + i;
            service_send(&s, &one, sizeof(one));
        }
        service_layers(&s, &step, &all, 0, 3);
        for (uint32_t i = 0; i < 3; i++) {
            ck_reply(&step);
        }
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    }
    play_step step = open_step(&m, &seq, 1, 0); // and is refused when that never comes
    proto_attend_all last = service_layout(&step, 0, PAIR);
    last.first_layer = 2;
    last.num_layers = 1;
    service_send(&s, &last, sizeof(last));
    service_raise(&s, PAIR);
    ck_error(ATTND_EINVAL, 2);
    ck_assert(service_lower(&s, PAIR, 1000));
    proto_cancel cancel = {.step = step.handle};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    play_free(&c, &seq);
    end();
}
END_TEST

// Two calls for one layer, whose flags come at the same time, as they do when the device has set
// the first one's done flag and the loop has not heard of it yet.
START_TEST(a_layer_waits_for_an_attend_of_its_own) {
    begin();
    play_model m = play_tiny();
    m.layers = 1;
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    for (int round = 0; round < 20; round++) {
        play_step step = open_step(&m, &seq, 1 + (uint32_t)round % 3, 0);
        proto_attend_all calls[] = {service_layout(&step, 0, PAIR),
                                    service_layout(&step, MIB / 2, PAIR + 1)};
        play_tensors t = play_random(&step);
        for (int i = 0; i < 2; i++) {
            service_write(&s, &step, &calls[i], &t);
            service_send(&s, &calls[i], sizeof(calls[i]));
        }
        e2e_await_stat(&c, "service.waiting", 2, 5000);
        service_raise(&s, PAIR);
        service_raise(&s, PAIR + 1);
        for (uint32_t i = 0; i < 2; i++) {
            ck_reply(&step);
            ck_assert(service_lower(&s, PAIR + i, SERVICE_WAIT_MS));
            service_check(&s, &step, &calls[i], 0, &t);
        }
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
        play_tensors_fini(&t);
    }
    play_free(&c, &seq);
    end();
}
END_TEST

// ---- errors

typedef enum ending { DEADLINE, CANCEL_STEP, CANCEL_REQUEST, NUM_ENDINGS } ending;

START_TEST(what_ends_a_step_ends_its_call_and_the_stream_drains) {
    static const attnd_err errors[] = {ATTND_ETIMEDOUT, ATTND_ECANCELED, ATTND_ECANCELED};
    begin();
    play_model m = play_tiny();
    m.layers = 4;
    m.layer[2] = m.layer[3] = m.layer[0];
    m.layer[2].kv_layer = 2;
    m.layer[3].kv_layer = 3;
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    for (uint32_t at = 0; at < 4; at++) { // the layer that it happens at
        play_step step = open_step(&m, &seq, 2, _i == DEADLINE ? 200 : 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        uint64_t id = service_send(&s, &all, sizeof(all));
        e2e_await_stat(&c, "service.waiting", 1, 5000); // the cancel goes another way
        service_layers(&s, &step, &all, 0, at);
        proto_cancel cancel = {.step = _i == CANCEL_STEP ? step.handle : 0,
                               .request = _i == CANCEL_REQUEST ? id : 0};
        if (_i != DEADLINE) {
            ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
        }
        ck_error(errors[_i], (int32_t)at);
        ck_assert_uint_eq(__atomic_load_n(&s.head->error_epoch, __ATOMIC_ACQUIRE), at + 1);
        ck_assert_int_eq(s.head->error, errors[_i]);
        ck_assert_uint_eq(s.head->error_step, step.handle);
        ck_assert_double_eq(e2e_stat(&c, "service.draining"), 1);
        play_step next = step;
        if (_i != CANCEL_REQUEST) {
            e2e_await_stat(&c, "steps", 0, 1000);
            next = open_step(&m, &seq, 2, 0);
        }
        proto_attend_all again = service_layout(&next, 0, PAIR);
        service_send(&s, &again, sizeof(again));
        ATTND_CK_ERR(service_recv(&s, NULL), ATTND_EBUSY); // until it has drained
        ck_drains(&all, at);
        e2e_await_stat(&c, "service.draining", 0, 1000);
        service_send(&s, &again, sizeof(again));
        service_layers(&s, &next, &again, 0, 4);
        ck_reply(&next);
        ATTND_CK_OK(play_commit(&c, &next, NULL, NULL));
    }
    play_free(&c, &seq);
    end();
}
END_TEST

START_TEST(a_second_cancel_ends_the_drain) {
    begin();
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_step step = open_step(&m, &seq, 2, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR);
    service_send(&s, &all, sizeof(all));
    service_layers(&s, &step, &all, 0, 1);
    proto_cancel cancel = {.step = step.handle};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    ck_error(ATTND_ECANCELED, 1);
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    ck_assert_double_eq(e2e_stat(&c, "service.draining"), 0);
    ATTND_CK_ERR(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL), ATTND_ESTALE);
    whole(&m, &seq, 2);
    play_free(&c, &seq);
    end();
}
END_TEST

// The device refuses the launch of one call (its rows say so), and lives on.
START_TEST(a_launch_that_fails_fails_its_call_alone) {
    begin();
    play_model m = play_tiny();
    play_seq seq, other;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_create(&c, &m, &other);
    play_step step = open_step(&m, &seq, FAULTY_LAUNCH, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR);
    service_send(&s, &all, sizeof(all));
    service_raise(&s, PAIR);
    ck_error(ATTND_ECUDA, 1); // CUDA's own code
    ck_assert(service_lower(&s, PAIR, 1000));
    ck_drains(&all, 1);
    proto_cancel cancel = {.step = step.handle};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    whole(&m, &other, 5);
    whole(&m, &seq, 5);
    play_free(&c, &seq);
    play_free(&c, &other);
    end();
}
END_TEST

START_TEST(a_lost_device_fails_what_waits_and_its_streams_end) {
    begin();
    play_model m = play_tiny();
    play_seq seq, other;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_create(&c, &m, &other);
    play_step step = open_step(&m, &seq, FAULTY_LOSS, 0), waits = open_step(&m, &other, 1, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR),
                     waiting = service_layout(&waits, 512 * 1024, PAIR + 8);
    service_send(&s, &waiting, sizeof(waiting));
    service_send(&s, &all, sizeof(all));
    e2e_await_stat(&c, "service.waiting", 2, 5000);
    service_raise(&s, PAIR);
    ATTND_CK_ERR(service_recv(&s, NULL), ATTND_ECUDA);
    ATTND_CK_ERR(service_recv(&s, NULL), ATTND_ECUDA);
    ck_assert(service_lower(&s, PAIR, 1000));
    ck_assert_int_ne(e2e_wait(&d, 10000), 0);
    ck_assert(ring_client_closed(&s.ring, 1000));
    for (uint32_t i = 0; i < FLAGS; i++) {
        ck_assert_uint_eq(s.pairs[i].done, 1); // once for whoever still waits
    }
    service_close(&s);
    e2e_close(&c);
    play_forget(&seq);
    play_forget(&other);
    free(hello);
    e2e_remove(&d);
}
END_TEST

START_TEST(sigterm_ends_what_waits_behind_the_timeout) {
    static const char *const flags[] = {"--set", "server.drain_timeout=300ms", NULL};
    begin_with(flags);
    service_join(&s, path, hello, MIB, FLAGS);
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_step step = open_step(&m, &seq, 1, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR);
    service_send(&s, &all, sizeof(all));
    e2e_await_stat(&c, "service.waiting", 1, 5000);
    kill(d.pid, SIGTERM);
    e2e_sleep_ms(50);
    service_layers(&s, &step, &all, 0, 1); // what runs is answered
    ck_error(ATTND_ESHUTDOWN, 1);
    service_close(&s);
    e2e_close(&c);
    play_forget(&seq);
    free(hello);
    ck_assert_int_eq(e2e_wait(&d, 10000), 0);
    e2e_remove(&d);
}
END_TEST

// ---- hostile flags

static bool stop_scribbling;

static void *scribble(void *arg) {
    const service_client *victim = arg;
    uint32_t noise = 1;
    while (!__atomic_load_n(&stop_scribbling, __ATOMIC_RELAXED)) {
        noise = noise * 1664525 + 1013904223;
        uint32_t *word = (uint32_t *)(void *)victim->head + noise % (victim->given.flags_bytes / 4);
        __atomic_store_n(word, noise >> 13 & 3 ? noise : 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

START_TEST(garbage_in_the_flags_harms_its_client_alone) {
    begin();
    service_client bad;
    play_model m = play_tiny();
    play_seq seq, theirs;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    e2e_client b;
    e2e_connect(&b, d.url);
    char *text = e2e_json(&b, PROTO_HELLO, "{}");
    service_join(&bad, path, text, MIB, 1000);
    free(text);
    play_open(&b, &m);
    play_create(&b, &m, &theirs);
    pthread_t thread;
    stop_scribbling = false;
    pthread_create(&thread, NULL, scribble, &bad);
    for (int round = 0; round < 30; round++) {
        play_step step;
        play_part part = {.seq = &theirs, .new_len = 2};
        ATTND_CK_OK(play_step_open(&b, &m, &part, 1, 0, &step, NULL));
        proto_attend_all all = service_layout(&step, 0, (uint32_t)round * 2);
        service_send(&bad, &all, sizeof(all));
        whole(&m, &seq, 1);
        ATTND_CK_OK(service_recv(&bad, NULL)); // noise raises every flag at some time
        ATTND_CK_OK(play_commit(&b, &step, NULL, NULL));
    }
    __atomic_store_n(&stop_scribbling, true, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    service_close(&bad);
    e2e_close(&b);
    play_forget(&theirs);
    play_free(&c, &seq);
    end();
}
END_TEST

START_TEST(a_step_without_rows_is_answered_by_the_host) {
    begin();
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    whole(&m, &seq, 3);
    play_part part = {.seq = &seq};
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    proto_attend_all all = {.step = step.handle, .num_layers = 2, .first_flag = 1};
    all.q.off = all.k.off = all.v.off = all.out_off = all.lse_off = PROTO_REGION_NONE;
    service_send(&s, &all, sizeof(all));
    service_raise(&s, 1);
    ck_assert(service_lower(&s, 1, 1000));
    service_raise(&s, 2);
    ck_assert(service_lower(&s, 2, 1000));
    ck_reply(&step);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_free(&c, &seq);
    end();
}
END_TEST

// ---- who shares the GPU

START_TEST(a_gpu_shared_without_mps_is_warned_of_once_and_counted) {
    begin();
    const proto_attach attach = {.magic = PROTO_RING_MAGIC,
                                 .version = PROTO_VERSION,
                                 .flags = PROTO_ATTACH_REGION,
                                 .entries = 16,
                                 .data_bytes = 4096};
    proto_region_ask ask = {.bytes = 4096, .num_flags = 1};
    for (int i = 0; i < 4; i++) {
        service_client r;
        memcpy(ask.device, s.given.device, sizeof(ask.device));
        ask.device[15] ^= (uint8_t)(i == 0);       // another one's
        ask.flags = i == 1 ? PROTO_REGION_MPS : 0; // it has MPS, the fake device has not
        ATTND_CK_OK(service_ask(&r, path, &attach, &ask));
        service_close(&r);
    }
    ck_assert_double_eq(e2e_stat(&c, "service.regions_without_mps"), 3);
    e2e_await_stat(&c, "service.regions", 1, 1000);
    end();
}
END_TEST

static Suite *suite(void) {
    Suite *all = suite_create("e2e_service");
    TCase *tc = tcase_create("service");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, layers_give_what_the_reference_gives);
    tcase_add_test(tc, what_is_prepared_is_run_or_given_up);
    tcase_add_test(tc, sequences_of_a_step_are_packed_and_strides_are_kept);
    tcase_add_test(tc, a_layer_that_reads_anothers_cache_appends_nothing);
    tcase_add_test(tc, flags_may_come_before_the_call_and_a_step_in_parts);
    tcase_add_test(tc, calls_are_batched_across_sessions);
    tcase_add_test(tc, a_bad_request_for_a_region_says_why);
    tcase_add_test(tc, regions_can_be_turned_off);
    tcase_add_test(tc, a_region_is_all_zero_whoever_had_its_memory);
    tcase_add_test(tc, a_bad_call_is_refused_whole);
    tcase_add_test(tc, a_pair_belongs_to_one_call_and_calls_are_bounded);
    tcase_add_test(tc, a_stream_whose_call_is_refused_ends);
    tcase_add_test(tc, a_layer_waits_for_the_one_whose_cache_it_reads);
    tcase_add_test(tc, a_layer_waits_for_an_attend_of_its_own);
    tcase_add_loop_test(tc, what_ends_a_step_ends_its_call_and_the_stream_drains, 0, NUM_ENDINGS);
    tcase_add_test(tc, a_second_cancel_ends_the_drain);
    tcase_add_test(tc, a_launch_that_fails_fails_its_call_alone);
    tcase_add_test(tc, a_lost_device_fails_what_waits_and_its_streams_end);
    tcase_add_test(tc, sigterm_ends_what_waits_behind_the_timeout);
    tcase_add_test(tc, garbage_in_the_flags_harms_its_client_alone);
    tcase_add_test(tc, a_step_without_rows_is_answered_by_the_host);
    tcase_add_test(tc, a_gpu_shared_without_mps_is_warned_of_once_and_counted);
    suite_add_tcase(all, tc);
    return all;
}

CHECK_MAIN(suite)
