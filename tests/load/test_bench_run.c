// The runtime against a toy cache in this process.
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/load/bench_run.h"
#include "tests/load/fake_attnd.h"

static volatile sig_atomic_t stop;
static bench_model model;
static bench_load_opts load_opts;
static bench_run_opts opts;
static bench_stats stats;
static bench_verdict verdict;
static attnd_errinfo info;

static void setup(void) {
    fake_reset();
    stop = 0;
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    load_opts = (bench_load_opts){
        .input = {.mean = 20}, .output = {.mean = 5}, .num_requests = 10, .seed = 3};
    opts = (bench_run_opts){.url = "ipc://fake",
                            .model = &model,
                            .concurrency = 4,
                            .prefill_chunk = 16,
                            .verify = 1,
                            .verify_threads = 1,
                            .seed = 3,
                            .timeout_ms = 1000,
                            .patience_us = 20000,
                            .stop = &stop};
}

static void teardown(void) {
    bench_model_fini(&model);
}

static attnd_err run(void) {
    bench_load *load = NULL;
    ATTND_CK_OK(bench_load_create(&load, &load_opts, &info));
    opts.load = load;
    opts.open_loop = load_opts.arrival != BENCH_CLOSED;
    attnd_err err = bench_run(&opts, &stats, &verdict, &info);
    bench_load_free(load);
    ck_assert(!fake.open);
    ck_assert_uint_eq(fake.live, 0);
    return err;
}

START_TEST(every_request_is_answered_and_every_row_verified) {
    ATTND_CK_OK(run());
    ck_assert_uint_eq(stats.requests, 10);
    ck_assert_uint_eq(stats.errors, 0);
    ck_assert_uint_eq(stats.unfinished, 0);
    // 20 prompt tokens make the first token, 4 decodes the other four; 2 layers
    ck_assert_uint_eq(stats.prefill_tokens, 10 * 20);
    ck_assert_uint_eq(stats.decode_tokens, 10 * 4);
    ck_assert_uint_eq(stats.rows, 10 * 24 * 2);
    ck_assert_uint_eq(verdict.rows, 10 * 24 * 2);
    ck_assert_uint_eq(verdict.mismatches, 0);
    ck_assert_double_le(verdict.max_error, 2.4e-7); // the toy rounds float64 once, |out| < 4
    ck_assert_uint_eq(stats.layer_calls, 2 * stats.steps);
    ck_assert_uint_eq(attnd_hist_count(&stats.times[BENCH_TIME_ttft]), 10);
    ck_assert_uint_eq(attnd_hist_count(&stats.times[BENCH_TIME_tpot]), 10);
    ck_assert_uint_eq(attnd_hist_count(&stats.times[BENCH_TIME_itl]), 40);
    ck_assert_uint_eq(attnd_hist_count(&stats.times[BENCH_TIME_e2e]), 10);
    ck_assert_str_eq(stats.kernels[0].name, "fake_f64");
}
END_TEST

START_TEST(steps_stay_within_concurrency_and_chunk) {
    ATTND_CK_OK(run());
    ck_assert_uint_eq(fake.max_live, 4);
    ck_assert_uint_le(fake.max_step_rows, 16 + 4);
    ck_assert_uint_le(fake.max_step_seqs, 4);
    ck_assert_uint_gt(fake.max_step_rows, 16); // decodes ran beside a chunk
}
END_TEST

START_TEST(a_fraction_of_the_rows_is_verified) {
    load_opts.num_requests = 40;
    opts.verify = 0.25;
    ATTND_CK_OK(run());
    // 40 * 24 tokens, p = 1/4: mean 240, standard deviation 13.4; all layers of a sampled token
    ck_assert_uint_ge(verdict.rows / 2, 240 - 54);
    ck_assert_uint_le(verdict.rows / 2, 240 + 54);
    ck_assert_uint_eq(verdict.rows % 2, 0);
}
END_TEST

START_TEST(nothing_is_verified_at_0) {
    opts.verify = 0;
    ATTND_CK_OK(run());
    ck_assert_uint_eq(verdict.rows, 0);
}
END_TEST

START_TEST(a_wrong_output_is_a_mismatch) {
    fake.spoil_attend = 7;
    ATTND_CK_OK(run());
    ck_assert_uint_eq(verdict.mismatches, 1);
    ck_assert_uint_eq(verdict.rows, 480);
    ck_assert_double_eq_tol(verdict.max_error, 0.01, 1e-6);
    ck_assert_ptr_nonnull(strstr(verdict.first, "head 3, dim 31"));
}
END_TEST

START_TEST(a_nan_is_a_mismatch) {
    fake.spoil_attend = 1;
    fake.spoil_with_nan = true;
    ATTND_CK_OK(run());
    ck_assert_uint_eq(verdict.mismatches, 1);
}
END_TEST

START_TEST(a_full_pool_preempts_and_loses_nothing) {
    fake.pool_tokens = 60; // two sequences of 24 and a bit
    ATTND_CK_OK(run());
    ck_assert_uint_gt(stats.preemptions, 0);
    ck_assert_uint_gt(stats.recomputed_tokens, 0);
    ck_assert_uint_eq(stats.requests, 10);
    ck_assert_uint_eq(stats.errors, 0);
    ck_assert_uint_eq(verdict.mismatches, 0);
    ck_assert_uint_eq(verdict.rows, stats.rows);
    ck_assert_uint_eq(attnd_hist_count(&stats.times[BENCH_TIME_itl]), 40);
}
END_TEST

START_TEST(a_request_larger_than_the_pool_is_an_error) {
    fake.pool_tokens = 22; // a prompt fits, its answer does not
    ATTND_CK_OK(run());
    ck_assert_uint_eq(stats.failed, 10);
    ck_assert_uint_eq(stats.errors, 10);
    ck_assert_uint_eq(stats.by_code[3], 10);
    ck_assert_uint_eq(stats.requests, 0);
}
END_TEST

static void free_the_pool_at_call_60(void) {
    fake.pool_tokens = fake.calls >= 60 ? 0 : 22;
}

START_TEST(a_pool_that_others_fill_is_waited_for) {
    fake.on_call = free_the_pool_at_call_60; // until then a prompt fits and its answer does not
    opts.patience_us = 30000000;
    ATTND_CK_OK(run());
    ck_assert_uint_eq(stats.requests, 10);
    ck_assert_uint_eq(stats.errors, 0);
    ck_assert_uint_gt(stats.preemptions, 0); // the last one too gave its blocks back meanwhile
    ck_assert_uint_eq(verdict.mismatches, 0);
    ck_assert_uint_eq(verdict.rows, stats.rows);
}
END_TEST

START_TEST(busy_is_retried_and_counted_apart) {
    fake.busy_every = 3;
    ATTND_CK_OK(run());
    ck_assert_uint_gt(stats.retries, 0);
    ck_assert_uint_eq(stats.errors, 0);
    ck_assert_uint_eq(stats.requests, 10);
    ck_assert_uint_eq(verdict.mismatches, 0);
}
END_TEST

START_TEST(busy_for_too_long_is_an_error) {
    fake.fail_call = 20;
    fake.fail_code = ATTND_EBUSY;
    fake.fails_on = true;
    load_opts.num_requests = 40; // ten failures in a row end the run
    ATTND_CK_ERR(run(), ATTND_EBUSY);
    ck_assert_uint_gt(stats.by_code[4], 0);
}
END_TEST

START_TEST(a_failed_call_costs_its_requests_and_the_run_goes_on) {
    fake.fail_call = (uint32_t)_i;
    fake.fail_code = ATTND_EINVAL;
    ATTND_CK_OK(run());
    ck_assert_uint_eq(stats.errors, 1);
    ck_assert_uint_eq(stats.by_code[1], 1);
    ck_assert_uint_eq(verdict.mismatches, 0);
    ck_assert_ptr_nonnull(strstr(stats.first_error, "EINVAL: call"));
    // A failed seq_free leaves the answer whole.
    ck_assert_uint_eq(stats.requests + stats.failed, 10);
}
END_TEST

START_TEST(a_lost_daemon_ends_the_run_at_once) {
    fake.fail_call = (uint32_t)_i;
    fake.fail_code = ATTND_ECONN;
    fake.fails_on = true;
    ATTND_CK_ERR(run(), ATTND_ECONN);
    ck_assert_uint_le(fake.calls, (uint32_t)_i + 1);
    ck_assert_uint_eq(verdict.mismatches, 0);
}
END_TEST

START_TEST(no_daemon_is_said) {
    opts.url = "ipc://nowhere";
    ATTND_CK_ERR(run(), ATTND_ECONN);
    ck_assert_str_eq(info.text, "nobody listens there");
}
END_TEST

START_TEST(wrong_lengths_end_the_run) {
    fake.lies_about_lengths = true;
    ATTND_CK_ERR(run(), ATTND_EPROTO);
    ck_assert_str_eq(info.field, "committed");
}
END_TEST

static void stop_at_call_50(void) {
    stop = fake.calls >= 50;
}

START_TEST(a_stop_ends_the_run_between_steps) {
    fake.on_call = stop_at_call_50;
    ATTND_CK_OK(run());
    ck_assert_uint_gt(stats.unfinished, 0);
    ck_assert_uint_lt(stats.requests, 10);
    ck_assert_uint_eq(stats.errors, 0);
    ck_assert_uint_eq(verdict.rows, stats.rows);
}
END_TEST

START_TEST(a_duration_ends_an_endless_load) {
    load_opts.endless = true;
    opts.duration_us = 150000;
    ATTND_CK_OK(run());
    ck_assert_uint_ge(stats.elapsed_us, 150000);
    ck_assert_uint_gt(stats.unfinished, 0);
    ck_assert_uint_eq(stats.errors, 0);
    ck_assert_uint_eq(verdict.rows, stats.rows);
}
END_TEST

START_TEST(an_open_loop_counts_latency_from_the_scheduled_time) {
    load_opts.arrival = BENCH_POISSON;
    load_opts.rate = 200;
    opts.concurrency = 1;
    ATTND_CK_OK(run());
    ck_assert_uint_eq(stats.requests, 10);
    // ten arrivals at 200/s take 50 ms on average; ttft contains the wait for the one place
    ck_assert_uint_ge(stats.elapsed_us, 5000);
    ck_assert_uint_ge(attnd_hist_max(&stats.times[BENCH_TIME_e2e]),
                      attnd_hist_max(&stats.times[BENCH_TIME_ttft]));
}
END_TEST

START_TEST(limits_of_the_daemon_are_respected) {
    fake.limits.step_rows = 12; // 4 sequences leave 8 prompt tokens
    ATTND_CK_OK(run());
    ck_assert_uint_le(fake.max_step_rows, 12);
    ck_assert_uint_eq(stats.prefill_chunk, 8);
    fake_reset();
    fake.limits.sequences = 3;
    ATTND_CK_ERR(run(), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "concurrency");
}
END_TEST

// Prompts of 20 and 30 tokens of one block, in chunks of 16.  The second one finds 15 tokens in its
// first step, whose last one must give a row, and 4 in its second.
START_TEST(prefixes_that_prompts_share_are_found) {
    char path[] = "test_bench_run.XXXXXX";
    FILE *f = fdopen(mkstemp(path), "w");
    ck_assert_ptr_nonnull(f);
    fprintf(f,
            "{\"timestamp\": 0, \"input_length\": 20, \"output_length\": 5, \"hash_ids\": [7]}\n"
            "{\"timestamp\": 1, \"input_length\": 30, \"output_length\": 2, \"hash_ids\": [7]}\n");
    fclose(f);
    load_opts = (bench_load_opts){.trace = path, .shares_prefixes = true};
    opts.concurrency = 1;
    fake.has_prefix_cache = true;
    ATTND_CK_OK(run());
    ck_assert_uint_eq(stats.prefill_tokens, 50);
    ck_assert_uint_eq(stats.cached_tokens, 15 + 4);
    ck_assert_uint_eq(verdict.rows, 2 * (20 + 4 + 30 + 1 - 19));
    ck_assert_uint_eq(verdict.mismatches, 0);
    load_opts.shares_prefixes = false;
    ATTND_CK_OK(run());
    ck_assert_uint_eq(stats.cached_tokens, 0);
    ck_assert_uint_eq(verdict.mismatches, 0);
    unlink(path);
}
END_TEST

START_TEST(windows_and_wide_values_are_verified) {
    bench_model_fini(&model);
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
    model.window = 7;
    model.window_every = 2;
    model.v_head_dim = 48;
    model.dtype = ATTND_BF16;
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    ATTND_CK_OK(run());
    ck_assert_uint_eq(verdict.rows, 480);
    ck_assert_uint_eq(verdict.mismatches, 0);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_run");
    TCase *tc = tcase_create("runs");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, every_request_is_answered_and_every_row_verified);
    tcase_add_test(tc, steps_stay_within_concurrency_and_chunk);
    tcase_add_test(tc, a_fraction_of_the_rows_is_verified);
    tcase_add_test(tc, nothing_is_verified_at_0);
    tcase_add_test(tc, a_wrong_output_is_a_mismatch);
    tcase_add_test(tc, a_nan_is_a_mismatch);
    tcase_add_test(tc, a_full_pool_preempts_and_loses_nothing);
    tcase_add_test(tc, a_request_larger_than_the_pool_is_an_error);
    tcase_add_test(tc, a_pool_that_others_fill_is_waited_for);
    tcase_add_test(tc, busy_is_retried_and_counted_apart);
    tcase_add_test(tc, busy_for_too_long_is_an_error);
    tcase_add_loop_test(tc, a_failed_call_costs_its_requests_and_the_run_goes_on, 2, 60);
    tcase_add_loop_test(tc, a_lost_daemon_ends_the_run_at_once, 1, 60);
    tcase_add_test(tc, no_daemon_is_said);
    tcase_add_test(tc, wrong_lengths_end_the_run);
    tcase_add_test(tc, a_stop_ends_the_run_between_steps);
    tcase_add_test(tc, a_duration_ends_an_endless_load);
    tcase_add_test(tc, an_open_loop_counts_latency_from_the_scheduled_time);
    tcase_add_test(tc, limits_of_the_daemon_are_respected);
    tcase_add_test(tc, prefixes_that_prompts_share_are_found);
    tcase_add_test(tc, windows_and_wide_values_are_verified);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
