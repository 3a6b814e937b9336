// What ends a call before its layers are done: a deadline, a cancel, a launch that fails, a lost
// device, the daemon's end.  The call fails, and the client's stream drains instead of hanging.
#include <signal.h>
#include <stdlib.h>

#include "tests/device/faulty_device.h"
#include "tests/e2e/service_fixture.h"

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
    play_seq seq;
    play_model m;
    begin_one(&m, &seq);
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
    play_seq seq, other;
    play_model m;
    begin_one(&m, &seq);
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
    play_seq seq, other;
    play_model m;
    begin_one(&m, &seq);
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

static Suite *suite(void) {
    Suite *all = suite_create("e2e_service_end");
    TCase *tc = tcase_create("endings");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, what_ends_a_step_ends_its_call_and_the_stream_drains, 0, NUM_ENDINGS);
    tcase_add_test(tc, a_second_cancel_ends_the_drain);
    tcase_add_test(tc, a_launch_that_fails_fails_its_call_alone);
    tcase_add_test(tc, a_lost_device_fails_what_waits_and_its_streams_end);
    tcase_add_test(tc, sigterm_ends_what_waits_behind_the_timeout);
    suite_add_tcase(all, tc);
    return all;
}

CHECK_MAIN(suite)
