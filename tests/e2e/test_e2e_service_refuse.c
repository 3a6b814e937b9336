// Bad requests for regions, bad calls and garbage in flags: each is refused with its reason, and
// harms its client alone.
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#include "tests/e2e/service_fixture.h"

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
    bad[3].ask.flags = 4;
    bad[4].attach.flags |= PROTO_ATTACH_ARENA;
    bad[5].attach.flags = 0, bad[5].err = ATTND_EPROTO; // the packet is too long for that
    bad[6].ask.bytes = MIB + 1, bad[6].err = ATTND_EMSGSIZE;
    bad[7].ask.bytes = UINT64_MAX, bad[7].err = ATTND_EMSGSIZE;
    bad[8].attach.version++, bad[8].err = ATTND_EVERSION;
    service_client r, all[3];
    for (int i = 0; i < 9; i++) {
        ATTND_CK_ERR(service_ask(&r, path, &bad[i].attach, &bad[i].ask), bad[i].err);
        bool too_large = bad[i].err == ATTND_EMSGSIZE;
        ck_assert_uint_eq(r.ring.attached.bytes, too_large ? MIB : 0);
        ck_assert_uint_eq(r.ring.attached.flags, too_large ? PROTO_ATTACH_REGION : 0);
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
    play_seq seq;
    play_model m;
    begin_one(&m, &seq);
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
        {FIELD(flags), 8, ATTND_EINVAL},
        {FIELD(flags), PROTO_ATTEND_LSE | PROTO_ATTEND_BLOCK_MASK, ATTND_EPROTO}, // there is none
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
            ATTND_CK_ERR(service_recv(&s, NULL), ATTND_EPROTO);
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
    play_seq seq;
    play_model m;
    begin_one(&m, &seq);
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

static Suite *suite(void) {
    Suite *all = suite_create("e2e_service_refuse");
    TCase *tc = tcase_create("regions");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, a_bad_request_for_a_region_says_why);
    tcase_add_test(tc, regions_can_be_turned_off);
    tcase_add_test(tc, a_region_is_all_zero_whoever_had_its_memory);
    suite_add_tcase(all, tc);

    tc = tcase_create("calls");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, a_bad_call_is_refused_whole);
    tcase_add_test(tc, a_pair_belongs_to_one_call_and_calls_are_bounded);
    tcase_add_test(tc, a_stream_whose_call_is_refused_ends);
    tcase_add_test(tc, garbage_in_the_flags_harms_its_client_alone);
    suite_add_tcase(all, tc);
    return all;
}

CHECK_MAIN(suite)
