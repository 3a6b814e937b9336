// How requests of the scheduler end: canceled, too late or failed, done comes once, and only when
// nothing of them runs; and what tells who waits on a device.
#include "scheduler/sched.h"

#include "tests/unit/scheduler/sched_fixture.h"

// ---- cancel and deadline

START_TEST(cancel_of_a_queued_request_is_done_at_once) {
    decode(&r[0], 0);
    decode(&r[1], 0);
    sched_cancel(b.s, &r[1].req);
    ck_assert_uint_eq(r[1].num_done, 1);
    ATTND_CK_ERR(r[1].err, ATTND_ECANCELED);
    ATTND_CK_ERR(r[1].info.code, ATTND_ECANCELED);
    ck_assert_ptr_null(r[1].kernel);
    fake_end(&b);
    ck_assert_uint_eq(b.given, 1);
}
END_TEST

START_TEST(cancel_of_a_running_request_is_done_when_it_ended) {
    decode(&r[0], 0);
    sched_cancel(b.s, &r[0].req);
    sched_cancel(b.s, &r[0].req); // twice is as once
    ck_assert_uint_eq(r[0].num_done, 0);
    ck_assert(!sched_idle(b.s));
    fake_end(&b);
    ck_assert_uint_eq(r[0].num_done, 1);
    ATTND_CK_ERR(r[0].err, ATTND_ECANCELED);
}
END_TEST

START_TEST(cancel_between_chunks_stops_the_rest) {
    prefill(&r[0], 0, 320);
    fake_end(&b);
    ck_assert_uint_eq(b.given, 2);
    sched_cancel(b.s, &r[0].req);
    ck_assert_uint_eq(r[0].num_done, 0);
    fake_end(&b);
    ck_assert_uint_eq(r[0].num_done, 1);
    ATTND_CK_ERR(r[0].err, ATTND_ECANCELED);
    ck_assert_uint_eq(b.given, 2);
    ck_assert_uint_eq(b.num, 0);
}
END_TEST

START_TEST(cancel_in_two_launches_waits_for_both) {
    prefill(&r[0], 0, 200);
    ck_assert_uint_eq(b.num, 2);
    sched_cancel(b.s, &r[0].req);
    fake_end(&b);
    ck_assert_uint_eq(r[0].num_done, 0);
    fake_end(&b);
    ck_assert_uint_eq(r[0].num_done, 1);
    ck_assert_uint_eq(b.given, 2);
}
END_TEST

START_TEST(cancel_of_a_finished_request_does_nothing) {
    decode(&r[0], 0);
    fake_end(&b);
    sched_cancel(b.s, &r[0].req);
    ck_assert_uint_eq(r[0].num_done, 1);
    fake_make(&r[1], &shape_a, 0, 1, 1); // never submitted
    sched_cancel(b.s, &r[1].req);
    ck_assert_uint_eq(r[1].num_done, 0);
}
END_TEST

static void cancel_arg(fake_req *req) {
    sched_cancel(b.s, &((fake_req *)req->arg)->req);
}

START_TEST(done_may_cancel_others_in_every_state) {
    decode(&r[0], 0);
    for (int i = 1; i < 4; i++) {
        decode(&r[i], 0);
    }
    r[0].then = cancel_arg; // queued when r[0] is done?  No: given to the backend just before
    r[0].arg = &r[1];
    fake_end(&b);
    ck_assert_uint_eq(r[1].num_done, 0);
    r[2].then = cancel_arg; // of the same launch, ended, its done still to come
    r[2].arg = &r[3];
    decode(&r[4], 0);
    fake_end(&b);
    ATTND_CK_ERR(r[1].err, ATTND_ECANCELED);
    ATTND_CK_OK(r[3].err);
    for (int i = 0; i < 4; i++) {
        ck_assert_uint_eq(r[i].num_done, 1);
    }
    prefill(&r[5], 0, 64);
    decode(&r[6], 0);
    r[4].then = cancel_arg; // queued
    r[4].arg = &r[5];
    fake_end(&b);
    ck_assert_uint_eq(r[5].num_done, 1);
    fake_end_all(&b);
    ck_assert_uint_eq(r[6].num_done, 1);
}
END_TEST

static void submit_again(fake_req *req) {
    uint32_t left = (uint32_t)(uintptr_t)req->arg;
    if (left > 0) {
        fake_make(req, &shape_a, 0, 1, 100);
        req->then = submit_again;
        req->arg = (void *)(uintptr_t)(left - 1);
        ATTND_CK_OK(sched_submit(b.s, &req->req, NULL));
    }
}

START_TEST(done_may_submit_the_same_memory_again) {
    fake_make(&r[0], &shape_a, 0, 1, 100);
    r[0].then = submit_again;
    r[0].arg = (void *)(uintptr_t)5;
    ATTND_CK_OK(sched_submit(b.s, &r[0].req, NULL));
    fake_end_all(&b);
    ck_assert_uint_eq(b.given, 6);
    ck_assert_uint_eq(r[0].num_done, 1);
}
END_TEST

START_TEST(deadline_ends_queued_and_running_requests) {
    ck_assert_uint_eq(sched_expire(b.s, 0), UINT64_MAX);
    for (int i = 0; i < 4; i++) {
        fake_make(&r[i], &shape_a, 0, i == 0 ? 64 : 1, 64);
        r[i].req.deadline_ms = (uint64_t[]){50, 40, 60, 0}[i];
        ATTND_CK_OK(sched_submit(b.s, &r[i].req, NULL));
    }
    ck_assert_uint_eq(sched_expire(b.s, 39), 40);
    ck_assert_uint_eq(sched_expire(b.s, 40), 50);
    ATTND_CK_ERR(r[1].err, ATTND_ETIMEDOUT);
    ck_assert_uint_eq(sched_expire(b.s, 50), 60);
    ck_assert_uint_eq(r[0].num_done, 0); // its first chunk runs
    fake_end(&b);
    ck_assert_uint_eq(r[0].num_done, 1);
    ATTND_CK_ERR(r[0].err, ATTND_ETIMEDOUT);
    ck_assert_uint_eq(fake_in(&b, &r[2]), 1);
    ck_assert_uint_eq(sched_expire(b.s, 1000), UINT64_MAX); // it runs: ends when that has
    ck_assert_uint_eq(r[2].num_done, 0);
    fake_end_all(&b);
    ATTND_CK_ERR(r[2].err, ATTND_ETIMEDOUT);
    ATTND_CK_OK(r[3].err);
}
END_TEST

static void cancel_two(fake_req *req) {
    fake_req *others = req->arg;
    sched_cancel(b.s, &others[0].req);
    sched_cancel(b.s, &others[1].req);
}

START_TEST(done_of_an_expired_request_may_cancel_another_expired_one) {
    decode(&r[0], 0);
    for (int i = 1; i < 4; i++) {
        fake_make(&r[i], &shape_a, 0, 1, 1);
        r[i].req.deadline_ms = i < 3 ? 10 : 0;
        ATTND_CK_OK(sched_submit(b.s, &r[i].req, NULL));
    }
    r[1].then = cancel_two;
    r[1].arg = &r[2];
    sched_expire(b.s, 10);
    ATTND_CK_ERR(r[1].err, ATTND_ETIMEDOUT);
    ATTND_CK_ERR(r[2].err, ATTND_ETIMEDOUT);
    ATTND_CK_ERR(r[3].err, ATTND_ECANCELED);
    for (int i = 1; i < 4; i++) {
        ck_assert_uint_eq(r[i].num_done, 1);
    }
    fake_end_all(&b);
}
END_TEST

static void expire_and_free(fake_req *req) {
    sched_expire(b.s, 100);
    ++*(int *)req->arg;
    free(req);
}

START_TEST(done_may_free_the_memory_and_expire_others) {
    int freed = 0;
    for (int i = 0; i < 4; i++) {
        fake_req *req = malloc(sizeof(*req));
        ck_assert_ptr_nonnull(req);
        fake_make(req, &shape_a, 0, 1, 1);
        req->then = expire_and_free;
        req->arg = &freed;
        req->req.deadline_ms = (uint64_t)i * 30; // of i = 1 to 3: in the past when they are done
        ATTND_CK_OK(sched_submit(b.s, &req->req, NULL));
    }
    fake_end_all(&b);
    ck_assert_int_eq(freed, 4);
}
END_TEST

START_TEST(failed_launch_fails_its_requests_and_no_other) {
    decode(&r[0], 0);
    decode(&r[1], 0);
    fake_end_as(&b, ATTND_EIO);
    ATTND_CK_ERR(r[0].err, ATTND_EIO);
    ck_assert_str_eq(r[0].info.text, "the backend says so");
    fake_end(&b);
    ATTND_CK_OK(r[1].err);
    prefill(&r[2], 0, 320);
    fake_end_as(&b, ATTND_EIO);
    ck_assert_uint_eq(r[2].num_done, 1); // the other chunks are not run
    ck_assert_uint_eq(b.num, 0);
}
END_TEST

START_TEST(failed_chunk_ends_when_the_next_one_has) {
    prefill(&r[0], 0, 200);
    fake_end_as(&b, ATTND_EIO);
    ck_assert_uint_eq(r[0].num_done, 0);
    fake_end(&b);
    ck_assert_uint_eq(r[0].num_done, 1);
    ATTND_CK_ERR(r[0].err, ATTND_EIO);
    ck_assert_uint_eq(b.num, 0);
}
END_TEST

// ---- signals

START_TEST(a_signal_is_behind_the_last_piece) {
    fake_make(&r[0], &shape_a, 0, 80, 80); // 32 + 32 + 16
    r[0].req.signal = 0x1000;
    ATTND_CK_OK(sched_submit(b.s, &r[0].req, NULL));
    decode(&r[1], 0);
    for (int piece = 0; piece < 4; piece++) { // the decode runs between two of them
        bool last = b.launches[0]->params.rows[0].q_first == 64;
        ck_assert_uint_eq(b.launches[0]->num_signals, last);
        if (last) {
            ck_assert_uint_eq(b.launches[0]->signals[0], 0x1000);
        }
        ck_assert(!r[0].req.signaled);
        fake_end(&b);
    }
    ck_assert(r[0].req.signaled);
    ck_assert(!r[1].req.signaled);
    fake_check(&r[0]);
}
END_TEST

START_TEST(who_is_canceled_too_late_is_signaled_and_a_failed_launch_signals_nobody) {
    decode(&r[0], 0);
    for (int i = 1; i < 4; i++) {
        fake_make(&r[i], &shape_a, 0, 1, 100);
        r[i].req.signal = 0x1000u * (uint64_t)i;
        ATTND_CK_OK(sched_submit(b.s, &r[i].req, NULL));
    }
    fake_end(&b);
    ck_assert_uint_eq(b.launches[0]->num_signals, 3);
    sched_cancel(b.s, &r[2].req); // it runs
    fake_end(&b);
    ATTND_CK_ERR(r[2].err, ATTND_ECANCELED);
    ck_assert(r[1].req.signaled && r[2].req.signaled && r[3].req.signaled);
    fake_make(&r[4], &shape_a, 0, 1, 100);
    r[4].req.signal = 0x5000;
    ATTND_CK_OK(sched_submit(b.s, &r[4].req, NULL));
    fake_end_as(&b, ATTND_ECUDA);
    ck_assert(!r[4].req.signaled);
}
END_TEST

START_TEST(a_ticket_is_for_a_launch_of_one_request) {
    fake_make(&r[0], &shape_a, 0, 1, 100);
    r[0].req.ticket = 7;
    ATTND_CK_OK(sched_submit(b.s, &r[0].req, NULL));
    ck_assert_uint_eq(b.launches[0]->ticket, 7);
    for (int i = 1; i < 3; i++) {
        fake_make(&r[i], &shape_a, 0, 1, 100);
        r[i].req.ticket = 7 + (uint64_t)i;
        ATTND_CK_OK(sched_submit(b.s, &r[i].req, NULL));
    }
    fake_end(&b);
    ck_assert_uint_eq(b.launches[0]->params.num_rows, 2);
    ck_assert_uint_eq(b.launches[0]->ticket, 0);
    fake_end(&b);
    fake_make(&r[3], &shape_a, 0, 20, 20); // a prefill may be one of several pieces
    r[3].req.ticket = 10;
    ATTND_CK_OK(sched_submit(b.s, &r[3].req, NULL));
    ck_assert_uint_eq(b.launches[0]->ticket, 0);
    fake_end(&b);
}
END_TEST

// Two tenants with equal shares: one's work that the backend did by itself counts as any other.
START_TEST(what_ran_without_the_scheduler_is_booked) {
    sched_launch launch = {.run_us = 30, .choice = {.kernel = "own", .why = "x", .rows = 1}};
    fake_make(&r[0], &shape_a, 0, 1, 100);
    r[0].req.signal = 64;
    sched_ran(b.s, &r[0].req, &launch);
    ck_assert_uint_eq(b.num, 0); // nothing was launched
    ck_assert(r[0].req.signaled);
    ck_assert_uint_eq(r[0].req.run_us, 30);
    sched_info info;
    sched_get_info(b.s, &info);
    ck_assert_uint_eq(info.launches, 1);
    ck_assert_uint_eq(info.requests, 1);
    ck_assert_uint_eq(info.rows, 1);
    ck_assert_uint_eq(info.decode_tokens, 1);
    ck_assert_uint_eq(info.busy_us, 30);
    ck_assert_str_eq(info.last.kernel, "own");
    ck_assert(sched_idle(b.s));
    launch.err = ATTND_ECUDA;
    sched_ran(b.s, &r[0].req, &launch);
    ck_assert(!r[0].req.signaled);
    sched_get_info(b.s, &info);
    ck_assert_uint_eq(info.decode_tokens, 1);
    ck_assert_uint_eq(info.requests, 2);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("sched_end");
    TCase *t = with("ending", setup);
    tcase_add_test(t, cancel_of_a_queued_request_is_done_at_once);
    tcase_add_test(t, cancel_of_a_running_request_is_done_when_it_ended);
    tcase_add_test(t, cancel_between_chunks_stops_the_rest);
    tcase_add_test(t, cancel_of_a_finished_request_does_nothing);
    tcase_add_test(t, done_may_cancel_others_in_every_state);
    tcase_add_test(t, done_may_submit_the_same_memory_again);
    tcase_add_test(t, deadline_ends_queued_and_running_requests);
    tcase_add_test(t, done_of_an_expired_request_may_cancel_another_expired_one);
    tcase_add_test(t, done_may_free_the_memory_and_expire_others);
    tcase_add_test(t, failed_launch_fails_its_requests_and_no_other);
    suite_add_tcase(s, t);

    t = with("signals", setup);
    tcase_add_test(t, a_signal_is_behind_the_last_piece);
    tcase_add_test(t, who_is_canceled_too_late_is_signaled_and_a_failed_launch_signals_nobody);
    tcase_add_test(t, a_ticket_is_for_a_launch_of_one_request);
    tcase_add_test(t, what_ran_without_the_scheduler_is_booked);
    suite_add_tcase(s, t);

    t = with("depth", setup_alone); // where two pieces are outstanding
    tcase_add_test(t, cancel_in_two_launches_waits_for_both);
    tcase_add_test(t, failed_chunk_ends_when_the_next_one_has);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
