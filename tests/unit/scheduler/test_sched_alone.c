// Launches of prefills while no decode is about.
#include "scheduler/sched.h"

#include "tests/unit/scheduler/sched_fixture.h"

// in_place submits a prompt whose tensors are in place, of q_len tokens over kv_len keys.
static void in_place(fake_req *req, int32_t q_len, int32_t kv_len) {
    fake_make(req, &shape_a, 0, q_len, kv_len);
    req->req.in_place = true;
    ATTND_CK_OK(sched_submit(b.s, &req->req, NULL));
}

// ck_piece: row `row` of launch i (0 = the oldest) is tokens [first, first + count) of the request.
static void ck_piece(uint32_t i, uint32_t row, const fake_req *req, int32_t first, int32_t count) {
    ck_assert_uint_lt(i, b.num);
    const attn_params *p = &b.launches[i]->params;
    ck_assert_uint_lt(row, p->num_rows);
    ck_assert_ptr_eq(p->rows[row].q, req);
    ck_assert_int_eq(p->rows[row].q_first, first);
    ck_assert_int_eq(p->rows[row].q_count, count);
}

static void finish(const fake_req *req) {
    fake_end_all(&b);
    fake_check(req);
}

START_TEST(a_prompt_alone_is_one_launch) {
    in_place(&r[0], 128, 128);
    ck_assert_uint_eq(b.num, 1);
    ck_piece(0, 0, &r[0], 0, 128);
    finish(&r[0]);
    in_place(&r[1], 100, 100); // also when it is no multiple of the chunk
    ck_piece(0, 0, &r[1], 0, 100);
    finish(&r[1]);
    in_place(&r[2], 100, 163); // 100 * 163 = 16300 of 16384
    ck_piece(0, 0, &r[2], 0, 100);
    finish(&r[2]);
    in_place(&r[3], 100, 164); // 16400: as many chunks as there is room for
    ck_piece(0, 0, &r[3], 0, 96);
    finish(&r[3]);
}
END_TEST

START_TEST(over_more_keys_it_has_fewer_tokens) {
    in_place(&r[0], 200, 250); // 16384 / 250 = 65, two chunks; 384 is left, too little for more
    for (int32_t first = 0; first < 192; first += 64) {
        ck_piece(0, 0, &r[0], first, 64);
        ck_assert_uint_eq(b.num, 1);
        fake_end(&b);
    }
    ck_piece(0, 0, &r[0], 192, 8);
    finish(&r[0]);
    in_place(&r[1], 100, 600); // 16384 / 600 = 27, less than a chunk: one at a time
    ck_piece(0, 0, &r[1], 0, 32);
    ck_assert_uint_eq(b.num, 1);
    finish(&r[1]);
}
END_TEST

START_TEST(prompts_that_are_outstanding_share_the_room) {
    in_place(&r[0], 96, 96); // 9216
    in_place(&r[1], 80, 80); // 6400: 15616 of 16384
    in_place(&r[2], 40, 40);
    in_place(&r[3], 30, 30);
    ck_piece(0, 0, &r[0], 0, 96);
    ck_piece(1, 0, &r[1], 0, 80);
    fake_end(&b); // 9984 are left
    ck_piece(1, 0, &r[2], 0, 40);
    ck_piece(1, 1, &r[3], 0, 30);
    finish(&r[3]);
    fake_check(&r[2]);
}
END_TEST

// Tokens are bounded, too: many short prompts have little work by that measure.
START_TEST(a_launch_has_at_most_so_many_tokens) {
    for (int i = 0; i < 6; i++) {
        in_place(&r[i], 50, 50);
    }
    fake_end(&b);
    fake_end(&b);
    ck_piece(0, 0, &r[2], 0, 50); // 2500 each, but 128 tokens
    ck_piece(0, 1, &r[3], 0, 50);
    ck_assert_uint_eq(b.launches[0]->params.num_rows, 2);
    ck_piece(1, 0, &r[4], 0, 50);
    finish(&r[5]);
}
END_TEST

// A decode that comes goes behind what is outstanding, and from then on there are chunks.
START_TEST(decodes_have_chunks_between_them) {
    in_place(&r[0], 128, 128);
    in_place(&r[1], 128, 128); // there is no room left, not for a chunk either
    ck_assert_uint_eq(b.num, 1);
    decode(&r[2], 0);
    ck_piece(1, 0, &r[2], 0, 1);
    fake_end(&b);
    ck_piece(1, 0, &r[1], 0, 32);
    fake_now_us += 500000;
    fake_end(&b);
    ck_assert_uint_eq(b.num, 1);       // a chunk is outstanding
    fake_now_us += SCHED_QUIET_US - 1; // since the decode has ended
    fake_end(&b);
    ck_piece(0, 0, &r[1], 32, 32);
    ck_assert_uint_eq(b.num, 1);
    fake_now_us += 1;
    fake_end(&b);
    ck_piece(0, 0, &r[1], 64, 64);
    finish(&r[1]);
}
END_TEST

START_TEST(a_decode_is_about_however_long_it_runs) {
    decode(&r[0], 0);
    fake_now_us += SCHED_QUIET_US;
    in_place(&r[1], 128, 128);
    ck_piece(1, 0, &r[1], 0, 32);
    finish(&r[1]);
}
END_TEST

// Its tenant has had its share, so a prefill of another's goes first, but no more than a chunk.
START_TEST(a_decode_that_waits_is_about) {
    in_place(&r[0], 100, 100);
    in_place(&r[1], 64, 64);
    decode(&r[2], 0);
    fake_make(&r[3], &shape_a, 1, 100, 100);
    r[3].req.in_place = true;
    ATTND_CK_OK(sched_submit(b.s, &r[3].req, NULL));
    fake_now_us += SCHED_QUIET_US;
    ck_piece(1, 0, &r[1], 0, 64);
    fake_end(&b);
    ck_assert_uint_eq(b.num, 1);
    fake_end(&b);
    ck_piece(0, 0, &r[3], 0, 32);
    finish(&r[3]);
    fake_check(&r[2]);
}
END_TEST

START_TEST(what_ran_without_the_scheduler_is_about) {
    fake_make(&r[0], &shape_a, 0, 1, 100);
    sched_launch ran = {.run_us = 5};
    sched_ran(b.s, &r[0].req, &ran);
    in_place(&r[1], 100, 100);
    ck_piece(0, 0, &r[1], 0, 32);
    finish(&r[1]);
}
END_TEST

START_TEST(tensors_that_are_moved_go_in_chunks) {
    prefill(&r[0], 0, 100);
    ck_piece(0, 0, &r[0], 0, 32);
    ck_piece(1, 0, &r[0], 32, 32);
    in_place(&r[1], 90, 90);
    prefill(&r[2], 0, 20);
    prefill(&r[3], 0, 30);
    fake_end(&b);
    ck_piece(1, 0, &r[0], 64, 32);
    ck_piece(1, 1, &r[1], 0, 90); // 122 tokens, of which a chunk is moved
    ck_assert_uint_eq(b.launches[1]->params.num_rows, 2);
    fake_end(&b);
    ck_piece(1, 0, &r[0], 96, 4);
    ck_piece(1, 1, &r[2], 0, 20);
    ck_assert_uint_eq(b.launches[1]->params.num_rows, 2);
    finish(&r[3]);
    for (int i = 0; i < 3; i++) {
        fake_check(&r[i]);
    }
}
END_TEST

START_TEST(deterministic_mode_has_chunks_alone) {
    sched_opts o = opts;
    o.prefill_alone_tokens = 128;
    fake_open(&b, o, 2);
    in_place(&r[0], 100, 100);
    ck_piece(0, 0, &r[0], 0, 32);
    ck_piece(1, 0, &r[0], 32, 32);
    decode(&r[1], 0);
    fake_end(&b);
    ck_piece(1, 0, &r[1], 0, 1);
    fake_end(&b);
    ck_piece(1, 0, &r[0], 64, 32);
    fake_end(&b);
    ck_assert_uint_eq(b.num, 1);
    finish(&r[0]);
    teardown();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("sched_alone");
    TCase *t = with("alone", setup_alone);
    tcase_add_test(t, a_prompt_alone_is_one_launch);
    tcase_add_test(t, over_more_keys_it_has_fewer_tokens);
    tcase_add_test(t, prompts_that_are_outstanding_share_the_room);
    tcase_add_test(t, a_launch_has_at_most_so_many_tokens);
    tcase_add_test(t, decodes_have_chunks_between_them);
    tcase_add_test(t, a_decode_is_about_however_long_it_runs);
    tcase_add_test(t, a_decode_that_waits_is_about);
    tcase_add_test(t, what_ran_without_the_scheduler_is_about);
    tcase_add_test(t, tensors_that_are_moved_go_in_chunks);
    suite_add_tcase(s, t);

    t = tcase_create("whole");
    tcase_add_test(t, deterministic_mode_has_chunks_alone);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
