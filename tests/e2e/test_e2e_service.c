// attend_all over regions, with a device of host memory, so that the test is the client's stream:
// what its layers give, how calls and flags go together, and which calls are batched.  (Refusals:
// test_e2e_service_refuse.c.  What ends a call: test_e2e_service_end.c.)
#include <string.h>

#include "tests/e2e/service_fixture.h"

START_TEST(layers_give_what_the_reference_gives) {
    play_seq seq;
    play_model m;
    begin_one(&m, &seq);
    static const uint32_t lens[] = {1, 40, 8, 600, 1, 1, 18}; // decodes and prefills
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

// prompts_launches returns how many launches a prompt of 600 tokens takes, of two layers, when
// there was no decode for long.
static double prompts_launches(const char *alone) {
    const char *more[] = {"--set", "compute.prefill_chunk=256", "--set", alone, NULL};
    begin_with(more);
    service_join(&s, path, hello, MIB, FLAGS);
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    double before = e2e_stat(&c, "scheduler.launches");
    whole(&m, &seq, 600);
    double launches = e2e_stat(&c, "scheduler.launches") - before;
    play_free(&c, &seq);
    end();
    return launches;
}

START_TEST(a_prompt_alone_is_one_launch_a_layer) {
    ck_assert_double_eq(prompts_launches("compute.prefill_alone=0"), 6);    // 256 + 256 + 88
    ck_assert_double_eq(prompts_launches("compute.prefill_alone=600"), 2);  // 600 over 600 keys
    ck_assert_double_eq(prompts_launches("compute.prefill_alone=599"), 4);  // 512 + 88
    ck_assert_double_eq(prompts_launches("compute.prefill_alone=8192"), 2); // as it is by default
}
END_TEST

// A layer whose flag takes its time is prepared; then something else goes in between.
START_TEST(what_is_prepared_is_run_or_given_up) {
    play_seq seq, other;
    play_model m;
    begin_one(&m, &seq);
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
    play_seq seq;
    play_model m;
    begin_one(&m, &seq);
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

START_TEST(a_step_without_rows_is_answered_by_the_host) {
    play_seq seq;
    play_model m;
    begin_one(&m, &seq);
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
        ask.flags = i == 1 ? PROTO_REGION_MPS : 0; // the fake device only has it when told so
        ATTND_CK_OK(service_ask(&r, path, &attach, &ask));
        service_close(&r);
    }
    ck_assert_double_eq(e2e_stat(&c, "service.regions_without_mps"),
                        getenv("ATTND_FAKE_MPS") ? 2 : 3);
    e2e_await_stat(&c, "service.regions", 1, 1000);
    end();
}
END_TEST

static Suite *suite(void) {
    Suite *all = suite_create("e2e_service");
    TCase *tc = tcase_create("service");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, layers_give_what_the_reference_gives);
    tcase_add_test(tc, a_prompt_alone_is_one_launch_a_layer);
    tcase_add_test(tc, what_is_prepared_is_run_or_given_up);
    tcase_add_test(tc, sequences_of_a_step_are_packed_and_strides_are_kept);
    tcase_add_test(tc, a_layer_that_reads_anothers_cache_appends_nothing);
    tcase_add_test(tc, flags_may_come_before_the_call_and_a_step_in_parts);
    tcase_add_test(tc, calls_are_batched_across_sessions);
    tcase_add_test(tc, a_layer_waits_for_the_one_whose_cache_it_reads);
    tcase_add_test(tc, a_layer_waits_for_an_attend_of_its_own);
    tcase_add_test(tc, a_step_without_rows_is_answered_by_the_host);
    tcase_add_test(tc, a_gpu_shared_without_mps_is_warned_of_once_and_counted);
    suite_add_tcase(all, tc);
    return all;
}

CHECK_MAIN(suite)
