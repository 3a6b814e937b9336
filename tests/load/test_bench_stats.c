#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_stats.h"

static bench_stats stats;

static void setup(void) {
    bench_stats_init(&stats);
}

START_TEST(a_summary_is_in_milliseconds) {
    for (uint64_t i = 1; i <= 1000; i++) {
        bench_stats_time(&stats, BENCH_TIME_itl, i * 100); // 0.1 ms to 100 ms
    }
    bench_ms_summary s = bench_summarize(&stats.times[BENCH_TIME_itl]);
    ck_assert_uint_eq(s.count, 1000);
    ck_assert_double_eq_tol(s.mean, 50.05, 1e-9);
    ck_assert_double_eq_tol(s.p50, 50, 0.5);
    ck_assert_double_eq_tol(s.p90, 90, 0.9);
    ck_assert_double_eq_tol(s.p99, 99, 0.99);
    ck_assert_double_eq_tol(s.p99_9, 99.9, 0.999);
    ck_assert_double_eq(s.max, 100);
}
END_TEST

START_TEST(an_empty_summary_is_0) {
    bench_ms_summary s = bench_summarize(&stats.times[BENCH_TIME_ttft]);
    ck_assert_uint_eq(s.count, 0);
    ck_assert_double_eq(s.mean, 0);
    ck_assert_double_eq(s.max, 0);
}
END_TEST

START_TEST(errors_are_counted_by_code_and_the_first_is_kept) {
    attnd_errinfo info = {.text = "seq 3 is not there"};
    bench_stats_error(&stats, "step", ATTND_ESTALE, &info);
    info.text[0] = '\0';
    bench_stats_error(&stats, "attend", ATTND_ECONN, &info);
    bench_stats_error(&stats, "attend", (attnd_err)-1000, &info);
    bench_stats_error(&stats, "attend", (attnd_err)5, &info);
    ck_assert_uint_eq(stats.errors, 4);
    ck_assert_uint_eq(stats.by_code[7], 1);
    ck_assert_uint_eq(stats.by_code[16], 1);
    ck_assert_uint_eq(stats.by_code[BENCH_NUM_CODES - 1], 2);
    ck_assert_str_eq(stats.first_error, "step: ESTALE: seq 3 is not there");
}
END_TEST

START_TEST(kernels_are_told_apart_by_name) {
    attnd_ran a = {.kernel = "decode",
                   .why = "q_len 1",
                   .splits = 2,
                   .batch_rows = 9,
                   .queue_us = 5,
                   .run_us = 7};
    attnd_ran b = {.kernel = "prefill", .why = "q_len 99", .splits = 1, .batch_rows = 99};
    bench_stats_ran(&stats, &a);
    bench_stats_ran(&stats, &b);
    a.splits = 4;
    a.batch_rows = 3;
    bench_stats_ran(&stats, &a);
    ck_assert_uint_eq(stats.num_kernels, 2);
    ck_assert_str_eq(stats.kernels[0].name, "decode");
    ck_assert_str_eq(stats.kernels[0].why, "q_len 1");
    ck_assert_uint_eq(stats.kernels[0].calls, 2);
    ck_assert_uint_eq(stats.kernels[0].max_splits, 4);
    ck_assert_uint_eq(stats.kernels[0].max_batch_rows, 9);
    ck_assert_uint_eq(stats.kernels[1].calls, 1);
    ck_assert_uint_eq(attnd_hist_max(&stats.times[BENCH_TIME_queue]), 5);
    ck_assert_uint_eq(attnd_hist_max(&stats.times[BENCH_TIME_kernel]), 7);
}
END_TEST

START_TEST(more_kernels_than_room_and_unended_names_are_harmless) {
    for (int i = 0; i < 40; i++) {
        attnd_ran ran;
        memset(&ran, 'a' + i % 26, sizeof(ran));
        ran.kernel[0] = (char)('A' + i);
        bench_stats_ran(&stats, &ran);
    }
    ck_assert_uint_eq(stats.num_kernels, BENCH_MAX_KERNELS);
    ck_assert_uint_eq(stats.kernels[BENCH_MAX_KERNELS - 1].calls, 40 - BENCH_MAX_KERNELS + 1);
    ck_assert_uint_eq(strlen(stats.kernels[0].name), 39);
    ck_assert_uint_eq(strlen(stats.kernels[0].why), 55);
}
END_TEST

START_TEST(every_time_has_a_name_and_a_meaning) {
    for (int i = 0; i < BENCH_NUM_TIMES; i++) {
        ck_assert_uint_gt(strlen(bench_time_name((bench_time)i)), 0);
        ck_assert_uint_gt(strlen(bench_time_text((bench_time)i)), 10);
    }
    ck_assert_str_eq(bench_time_name(BENCH_TIME_tpot), "tpot");
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_stats");
    TCase *tc = tcase_create("stats");
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, a_summary_is_in_milliseconds);
    tcase_add_test(tc, an_empty_summary_is_0);
    tcase_add_test(tc, errors_are_counted_by_code_and_the_first_is_kept);
    tcase_add_test(tc, kernels_are_told_apart_by_name);
    tcase_add_test(tc, more_kernels_than_room_and_unended_names_are_harmless);
    tcase_add_test(tc, every_time_has_a_name_and_a_meaning);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
