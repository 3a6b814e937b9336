// One step at a time against the toy cache of fake_attnd.
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_step.h"
#include "tests/load/fake_attnd.h"

enum { MAX_SEQS = 3, MAX_ROWS = 200 };

static volatile sig_atomic_t stop;
static bench_model model;
static bench_stats stats;
static bench_link conn;
static bench_step *step;
static attnd_errinfo info;
static uint64_t seqs[MAX_SEQS];
static bench_batch *open[MAX_SEQS];

static void setup(void) {
    attnd_model_opts opts;
    fake_reset();
    stop = 0;
    bench_stats_init(&stats);
    memset(open, 0, sizeof(open));
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    conn = (bench_link){
        .seed = 1, .patience_us = 10000, .stop = &stop, .stats = &stats, .verify_share = 1};
    ATTND_CK_OK(attnd_connect(&conn.client, "ipc://fake", NULL, &info));
    bench_model_opts(&model, &opts);
    ATTND_CK_OK(attnd_model_open(conn.client, &opts, &conn.model_id, &info));
    for (int i = 0; i < MAX_SEQS; i++) {
        ATTND_CK_OK(attnd_seq_create(conn.client, conn.model_id, &seqs[i], &info));
    }
    bench_verify_opts verify = {
        .seed = 1, .num_threads = 1, .num_sequences = MAX_SEQS, .step_rows = MAX_ROWS};
    ATTND_CK_OK(bench_verify_start(&conn.verify, &model, &verify, &info));
    ATTND_CK_OK(bench_step_create(&step, &model, MAX_SEQS, MAX_ROWS));
}

static void teardown(void) {
    bench_step_free(step);
    attnd_close(conn.client);
    bench_model_fini(&model);
}

static void add(uint64_t seq, uint64_t request, uint32_t first, uint32_t num, bench_batch **batch) {
    bench_step_add(step, seq, &(bench_prompt){.request = request}, first, num, batch);
}

static bench_verdict verdict(void) {
    bench_verdict v;
    for (int i = 0; i < MAX_SEQS; i++) {
        bench_verify_submit(conn.verify, open[i]);
    }
    ATTND_CK_OK(bench_verify_stop(conn.verify, &v));
    return v;
}

START_TEST(rows_of_all_sequences_are_attended_and_verified) {
    add(seqs[0], 10, 0, 150, &open[0]); // two full batches and an open one
    add(seqs[1], 11, 0, 1, &open[1]);
    ck_assert_uint_eq(bench_step_rows(step), 151);
    ck_assert_uint_eq(bench_step_seqs(step), 2);
    ATTND_CK_OK(bench_step_run(step, &conn, &info));
    ck_assert_uint_eq(open[0]->num_rows, 150 - 128);
    ck_assert_uint_eq(open[1]->num_rows, 1);
    bench_step_clear(step);
    add(seqs[1], 11, 1, 1, &open[1]);
    ATTND_CK_OK(bench_step_run(step, &conn, &info));
    bench_verdict v = verdict();
    ck_assert_uint_eq(v.rows, 152 * 2);
    ck_assert_uint_eq(v.mismatches, 0);
    ck_assert_uint_eq(stats.steps, 2);
    ck_assert_uint_eq(stats.layer_calls, 4);
    ck_assert_uint_eq(stats.rows, 152 * 2);
}
END_TEST

START_TEST(a_full_pool_changes_nothing_and_is_no_error) {
    fake.pool_tokens = 5;
    add(seqs[0], 10, 0, 6, &open[0]);
    ATTND_CK_ERR(bench_step_run(step, &conn, &info), ATTND_ENOSPC);
    ck_assert_ptr_null(open[0]);
    ck_assert_uint_eq(stats.errors, 0);
    ck_assert_uint_eq(verdict().rows, 0);
}
END_TEST

// Two requests of 40 tokens in one block of the trace: the second one finds 39 of them, since the
// last token must give a row.
START_TEST(cached_tokens_are_neither_sent_nor_verified) {
    const uint32_t ids[] = {5};
    bench_prompt prompt = {.request = 10, .ids = ids, .num_ids = 1, .input = 40};
    conn.gives_tokens = fake.has_prefix_cache = true;
    bench_step_add(step, seqs[0], &prompt, 0, 40, &open[0]);
    ATTND_CK_OK(bench_step_run(step, &conn, &info));
    ck_assert_uint_eq(stats.cached_tokens, 0);
    bench_step_clear(step);
    bench_step_add(step, seqs[0], &prompt, 40, 3, &open[0]);
    prompt.request = 11;
    bench_step_add(step, seqs[1], &prompt, 0, 40, &open[1]);
    ATTND_CK_OK(bench_step_run(step, &conn, &info));
    ck_assert_uint_eq(stats.cached_tokens, 39);
    ck_assert_uint_eq(stats.rows, 2 * (40 + 1 + 3));
    ck_assert_uint_eq(open[1]->num_rows, 1);
    ck_assert_uint_eq(open[1]->positions[0], 39);
    bench_verdict v = verdict();
    ck_assert_uint_eq(v.rows, 2 * (40 + 1 + 3));
    ck_assert_uint_eq(v.mismatches, 0);
}
END_TEST

START_TEST(wrong_rows_in_the_prefix_cache_are_mismatches) {
    const uint32_t ids[] = {5};
    bench_prompt prompt = {.request = 10, .ids = ids, .num_ids = 1, .input = 40};
    conn.gives_tokens = fake.has_prefix_cache = fake.spoils_cached = true;
    for (int i = 0; i < 2; i++) {
        bench_step_clear(step);
        prompt.request = 10 + (uint64_t)i;
        bench_step_add(step, seqs[i], &prompt, 0, 40, &open[i]);
        ATTND_CK_OK(bench_step_run(step, &conn, &info));
    }
    ck_assert_uint_eq(verdict().mismatches, 2); // both layers of the one row that sees them
}
END_TEST

START_TEST(more_cached_tokens_than_there_may_be_end_the_run) {
    conn.gives_tokens = fake.lies_about_cached = true;
    add(seqs[0], 10, 0, 4, &open[0]);
    ATTND_CK_ERR(bench_step_run(step, &conn, &info), ATTND_EPROTO);
    ck_assert_str_eq(stats.first_error,
                     "step: EPROTO: request 10: daemon says 4 of 4 tokens are cached");
    bench_verify_discard(conn.verify, open[0]);
    open[0] = NULL;
    verdict();
}
END_TEST

START_TEST(a_failed_attend_cancels_the_step) {
    add(seqs[0], 10, 0, 100, &open[0]);
    fake.fail_call = fake.calls + 3; // step, attend 0, attend 1
    fake.fail_code = ATTND_EIO;
    ATTND_CK_ERR(bench_step_run(step, &conn, &info), ATTND_EIO);
    ck_assert_uint_eq(stats.errors, 1);
    bench_verify_discard(conn.verify, open[0]);
    open[0] = NULL;
    ATTND_CK_OK(bench_step_run(step, &conn, &info)); // the same step again, from the start
    bench_verdict v = verdict();
    ck_assert_uint_eq(v.rows, 200);
    ck_assert_uint_eq(v.mismatches, 0);
}
END_TEST

START_TEST(a_wrong_length_is_told) {
    add(seqs[0], 10, 3, 1, &open[0]); // but nothing is committed
    ATTND_CK_ERR(bench_step_run(step, &conn, &info), ATTND_EPROTO);
    ck_assert_str_eq(stats.first_error, "step: EPROTO: request 10: daemon says 0 tokens are "
                                        "committed, but they are 3");
    for (int i = 0; i < MAX_SEQS; i++) {
        bench_verify_discard(conn.verify, open[i]);
        open[i] = NULL;
    }
    verdict();
}
END_TEST

START_TEST(retries_end_with_patience_or_stop) {
    bench_retry r = {0};
    ck_assert(!bench_retry_again(&r, &conn, ATTND_OK));
    ck_assert(!bench_retry_again(&r, &conn, ATTND_EINVAL));
    uint32_t tries = 0;
    while (bench_retry_again(&r, &conn, ATTND_EBUSY)) {
        tries++;
    }
    // sleeps of 1, 2, 4 and 8 ms or a little longer fill 10 ms
    ck_assert_uint_ge(tries, 1);
    ck_assert_uint_le(tries, 4);
    ck_assert_uint_eq(stats.retries, tries);
    stop = 1;
    bench_retry fresh = {0};
    ck_assert(!bench_retry_again(&fresh, &conn, ATTND_EBUSY));
    verdict();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_step");
    TCase *tc = tcase_create("steps");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, rows_of_all_sequences_are_attended_and_verified);
    tcase_add_test(tc, a_full_pool_changes_nothing_and_is_no_error);
    tcase_add_test(tc, cached_tokens_are_neither_sent_nor_verified);
    tcase_add_test(tc, wrong_rows_in_the_prefix_cache_are_mismatches);
    tcase_add_test(tc, more_cached_tokens_than_there_may_be_end_the_run);
    tcase_add_test(tc, a_failed_attend_cancels_the_step);
    tcase_add_test(tc, a_wrong_length_is_told);
    tcase_add_test(tc, retries_end_with_patience_or_stop);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
