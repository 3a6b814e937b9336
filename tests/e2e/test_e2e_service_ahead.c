// Layers that the submit thread begins by itself when their flag comes, without being told by the
// loop: what they give, and what happens when a cancel, or a client that raises flags as it likes,
// comes at the same time.
#include <pthread.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/e2e/service_fixture.h"

// begin_ahead is begin_one with a thread that polls for long, also where it takes turns with the
// loop.
static void begin_ahead(play_model *m, play_seq *seq) {
    begin_with((const char *const[]){"--set", "compute.launch_ahead=on", "--set",
                                     "server.flag_spin_us=100000", NULL});
    service_join(&s, path, hello, MIB, FLAGS);
    *m = play_tiny();
    play_open(&c, m);
    play_create(&c, m, seq);
}

START_TEST(layers_that_the_loop_did_not_start_give_what_the_reference_gives) {
    enum { ROUNDS = 50 };
    play_seq seq, other;
    play_model m;
    begin_ahead(&m, &seq);
    play_create(&c, &m, &other);
    for (int round = 0; round < ROUNDS; round++) {
        play_step step = open_step(&m, &seq, 1 + (uint32_t)round % 8, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        service_send(&s, &all, sizeof(all));
        for (uint32_t layer = 0; layer < m.layers; layer++) {
            usleep(500);
            service_layers(&s, &step, &all, layer, layer + 1);
        }
        proto_attend_reply reply = ck_reply(&step);
        ck_assert_str_eq(reply.kernel, "fake");
        ck_assert_uint_eq(reply.batch_rows, 1);
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
        if (round % 7 == 6) { // launches of the loop's in between
            play_token(&c, (play_seq *const[]){&other}, 1, 1 + (uint32_t)round % 3);
        }
    }
    double layers = e2e_stat(&c, "service.layers"), ahead = e2e_stat(&c, "service.ahead");
    ck_assert_double_eq(layers, ROUNDS * m.layers);
    ck_assert_double_ge(ahead, layers / 2);
    ck_assert_double_ge(e2e_stat(&c, "service.prepared"), ahead);
    play_free(&c, &seq);
    play_free(&c, &other);
    end();
}
END_TEST

START_TEST(a_cancel_meets_a_layer_at_every_stage) {
    enum { ROUNDS = 200 };
    play_seq seq;
    play_model m;
    begin_ahead(&m, &seq);
    int after = 0; // the layer was done
    for (int round = 0; round < ROUNDS; round++) {
        play_step step = open_step(&m, &seq, 2, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        uint64_t id = service_send(&s, &all, sizeof(all));
        e2e_await_stat(&c, "service.waiting", 1, 5000);
        usleep((useconds_t)(round % 5) * 100);
        play_tensors t = play_random(&step);
        service_write(&s, &step, &all, &t);
        proto_cancel cancel = {.step = round % 2 ? step.handle : 0, .request = round % 2 ? 0 : id};
        service_raise(&s, PAIR);
        usleep((useconds_t)(round % 20) * 5);
        ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
        const void *reply;
        proto_error error;
        ATTND_CK_ERR(service_recv(&s, &reply), ATTND_ECANCELED);
        memcpy(&error, reply, sizeof(error));
        ck_assert_int_le(error.detail, 1);
        ck_assert_msg(service_lower(&s, PAIR, 1000), "round %d: the layer hangs", round);
        after += error.detail == 1;
        ck_drains(&all, 1);
        e2e_await_stat(&c, "service.draining", 0, 1000);
        if (round % 2 == 0) {
            cancel = (proto_cancel){.step = step.handle};
            ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
        }
        e2e_await_stat(&c, "steps", 0, 1000);
        play_tensors_fini(&t);
    }
    ck_assert_int_gt(after, 0);
    whole(&m, &seq, 3);
    play_free(&c, &seq);
    end();
}
END_TEST

// A stream goes on by the done flag, so it may raise the pair for the next call before the daemon
// has answered this one.
START_TEST(a_flag_that_comes_before_the_reply_is_the_next_calls) {
    enum { ROUNDS = 2000 };
    play_seq seq;
    play_model m;
    begin_ahead(&m, &seq);
    play_step step = open_step(&m, &seq, 1, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR);
    all.num_layers = 1; // an attend may be repeated until commit
    service_raise(&s, PAIR);
    for (int round = 0; round < ROUNDS; round++) {
        service_send(&s, &all, sizeof(all));
        ck_assert_msg(service_lower(&s, PAIR, SERVICE_WAIT_MS), "round %d: its flag is lost",
                      round);
        service_raise(&s, PAIR);
        ATTND_CK_OK(service_recv(&s, NULL));
    }
    service_send(&s, &all, sizeof(all)); // which has the last flag
    ATTND_CK_OK(service_recv(&s, NULL));
    ck_assert(service_lower(&s, PAIR, 1000));
    proto_cancel cancel = {.step = step.handle};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    e2e_await_stat(&c, "steps", 0, 1000);
    play_free(&c, &seq);
    end();
}
END_TEST

// submit sends a message over the ring, from `at` on.
static void submit(const e2e_buf *b, uint64_t at) {
    memcpy(ring_client_data(&s.ring, at), b->data, b->bytes);
    ring_client_submit(&s.ring, at, (uint32_t)b->bytes, SERVICE_RING_BYTES / 2 + at, 512, 0);
    ring_client_bell(&s.ring);
}

static void wait_us(uint32_t us) {
    for (uint64_t until = attnd_clock_us() + us; attnd_clock_us() < until;) {
    }
}

// An attend by message may meet the same layer when its flag comes: one waits for the other, or is
// refused, and there is no commit while either runs.
START_TEST(an_attend_by_message_meets_the_layer_of_a_flag) {
    enum { ROUNDS = 2000 };
    const uint32_t none = 0; // accepted
    play_model tiny, m = play_one();
    play_seq other, seq;
    begin_ahead(&tiny, &other);
    m.q_heads = m.kv_heads = 1;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_token(&c, (play_seq *const[]){&seq}, 1, 2000); // so that a layer takes its time
    for (int round = 0; round < ROUNDS; round++) {
        play_step step = open_step(&m, &seq, 1, 0);
        play_tensors t = play_random(&step);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        e2e_buf attend, commit;
        play_attend_body(&attend, ++c.id, &step, 0, 0, &t);
        play_commit_body(&commit, ++c.id, &step, &none);
        ck_assert_uint_le(attend.bytes, 512);
        service_write(&s, &step, &all, &t);
        service_send(&s, &all, sizeof(all));
        usleep(300); // the layer is prepared
        if (round % 2) {
            service_raise(&s, PAIR);
            wait_us((uint32_t)round % 7);
            submit(&attend, 0);
        } else {
            submit(&attend, 0);
            wait_us((uint32_t)round % 7);
            service_raise(&s, PAIR);
        }
        attnd_err errs[3] = {service_recv(&s, NULL)}; // whichever ends first
        submit(&commit, 512);
        errs[1] = service_recv(&s, NULL);
        errs[2] = service_recv(&s, NULL);
        ck_assert(service_lower(&s, PAIR, 1000));
        for (int i = 0; i < 3; i++) {
            ck_assert_msg(!errs[i] || errs[i] == ATTND_EBUSY, "round %d: %s", round,
                          attnd_errname(errs[i]));
        }
        if (errs[0] || errs[1] || errs[2]) {
            proto_cancel cancel = {.step = step.handle};
            (void)e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL);
        }
        e2e_await_stat(&c, "steps", 0, 1000);
        e2e_buf_fini(&attend);
        e2e_buf_fini(&commit);
        play_tensors_fini(&t);
    }
    play_free(&c, &seq);
    play_free(&c, &other);
    end();
}
END_TEST

static bool scribbles;

static void *scribble(void *arg) {
    (void)arg;
    while (__atomic_load_n(&scribbles, __ATOMIC_RELAXED)) {
        for (uint32_t i = 0; i < 4; i++) {
            __atomic_store_n(&s.pairs[PAIR + i].ready, i % 2 ? ~0u : 1, __ATOMIC_RELEASE);
        }
        usleep(20);
    }
    return NULL;
}

START_TEST(flags_raised_at_random_end_nobody_but_their_client) {
    play_seq seq, other;
    play_model m;
    begin_ahead(&m, &seq);
    play_create(&c, &m, &other);
    pthread_t thread;
    scribbles = true;
    ck_assert_int_eq(pthread_create(&thread, NULL, scribble, NULL), 0);
    for (int round = 0; round < 100; round++) {
        play_step step = open_step(&m, &seq, 1, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        service_send(&s, &all, sizeof(all));
        if (round % 3 == 0) {
            play_token(&c, (play_seq *const[]){&other}, 1, 1); // is checked
        }
        ATTND_CK_OK(service_recv(&s, NULL)); // what it computed means nothing
        proto_cancel cancel = {.step = step.handle};
        ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    }
    __atomic_store_n(&scribbles, false, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    for (uint32_t i = 0; i < FLAGS; i++) {
        s.pairs[i] = (proto_flag){.ready = 0};
    }
    e2e_await_stat(&c, "steps", 0, 1000);
    whole(&m, &seq, 2);
    play_free(&c, &seq);
    play_free(&c, &other);
    end();
}
END_TEST

static Suite *suite(void) {
    Suite *all = suite_create("e2e_service_ahead");
    TCase *tc = tcase_create("ahead");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, layers_that_the_loop_did_not_start_give_what_the_reference_gives);
    tcase_add_test(tc, a_cancel_meets_a_layer_at_every_stage);
    tcase_add_test(tc, a_flag_that_comes_before_the_reply_is_the_next_calls);
    tcase_add_test(tc, an_attend_by_message_meets_the_layer_of_a_flag);
    tcase_add_test(tc, flags_raised_at_random_end_nobody_but_their_client);
    suite_add_tcase(all, tc);
    return all;
}

CHECK_MAIN(suite)
