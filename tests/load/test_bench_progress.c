#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_progress.h"

static bench_stats stats;
static char line[200];

START_TEST(the_bar_shows_answered_requests) {
    bench_progress p = {.start_us = 1000000, .total_requests = 8};
    stats.requests = 2;
    stats.prefill_tokens = 900;
    stats.decode_tokens = 100;
    stats.errors = 3;
    bench_progress_line(&p, &stats, 5, 77, 3000000, line, sizeof(line));
    ck_assert_str_eq(line, "[######..................]  25%  2 requests, 5 running, 500 tokens/s, "
                           "77 rows verified, 3 errors");
}
END_TEST

START_TEST(the_bar_of_a_duration_shows_time) {
    bench_progress p = {.start_us = 0, .duration_us = 10000000};
    bench_progress_line(&p, &stats, 0, 0, 5000000, line, sizeof(line));
    ck_assert_ptr_nonnull(strstr(line, "[############............]  50%"));
    bench_progress_line(&p, &stats, 0, 0, 50000000, line, sizeof(line));
    ck_assert_ptr_nonnull(strstr(line, "[########################] 100%"));
}
END_TEST

START_TEST(a_line_is_cut_to_its_room) {
    bench_progress p = {.total_requests = 1};
    memset(line, 'x', sizeof(line));
    bench_progress_line(&p, &stats, 0, 0, 0, line, 10);
    ck_assert_uint_eq(strlen(line), 9);
    ck_assert_int_eq(line[10], 'x');
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_progress");
    TCase *tc = tcase_create("line");
    tcase_add_test(tc, the_bar_shows_answered_requests);
    tcase_add_test(tc, the_bar_of_a_duration_shows_time);
    tcase_add_test(tc, a_line_is_cut_to_its_room);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
