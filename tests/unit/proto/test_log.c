// Log lines: their form, the level check, what hostile text becomes.
#include "proto/log.h"

#include <string.h>

#include "tests/check_main.h"

static char got[ATTND_LOG_LINE_BYTES];
static int lines, evaluated;
static attnd_log_level got_level;

static void sink(attnd_log_level level, const char *line, size_t len) {
    ck_assert_uint_eq(strlen(line), len);
    got_level = level;
    memcpy(got, line, len + 1);
    lines++;
}

static int evaluate(void) {
    return ++evaluated;
}

__attribute__((format(printf, 4, 5))) static size_t format(char *line, attnd_log_level level,
                                                           const char *area, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    size_t len = attnd_log_format(line, UINT64_C(1738324800123456), level, area, fmt, args);
    va_end(args);
    return len;
}

START_TEST(log_format_writes_time_level_area_and_text) {
    char line[ATTND_LOG_LINE_BYTES];
    size_t len = format(line, ATTND_LOG_WARN, "kv", "pool full: %d of %d blocks free", 0, 8192);
    ck_assert_str_eq(line, "2025-01-31T12:00:00.123Z WARN kv pool full: 0 of 8192 blocks free");
    ck_assert_uint_eq(len, strlen(line));
}
END_TEST

START_TEST(log_format_cuts_a_long_line_visibly) {
    char text[2 * ATTND_LOG_LINE_BYTES], line[ATTND_LOG_LINE_BYTES];
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    ck_assert_uint_eq(format(line, ATTND_LOG_INFO, "srv", "%s", text), ATTND_LOG_LINE_BYTES - 1);
    ck_assert_uint_eq(strlen(line), ATTND_LOG_LINE_BYTES - 1);
    ck_assert_str_eq(line + ATTND_LOG_LINE_BYTES - 5, "x...");
}
END_TEST

START_TEST(log_format_keeps_a_line_that_just_fits) {
    char text[ATTND_LOG_LINE_BYTES], line[ATTND_LOG_LINE_BYTES];
    size_t head = strlen("2025-01-31T12:00:00.123Z INFO srv ");
    size_t room = ATTND_LOG_LINE_BYTES - 1 - head;
    memset(text, 'x', room);
    text[room] = '\0';
    ck_assert_uint_eq(format(line, ATTND_LOG_INFO, "srv", "%s", text), ATTND_LOG_LINE_BYTES - 1);
    ck_assert_str_eq(line + head, text);
}
END_TEST

START_TEST(log_format_makes_control_bytes_harmless) {
    char line[ATTND_LOG_LINE_BYTES];
    format(line, ATTND_LOG_INFO, "srv", "client %s", "a\nERROR b\x1b[31m\x80\x7f");
    ck_assert_str_eq(line, "2025-01-31T12:00:00.123Z INFO srv client a?ERROR b?[31m??");
}
END_TEST

START_TEST(log_format_survives_a_long_area_and_a_wrong_level) {
    char area[1000], line[ATTND_LOG_LINE_BYTES];
    memset(area, 'a', sizeof(area) - 1);
    area[sizeof(area) - 1] = '\0';
    format(line, (attnd_log_level)99, area, "text");
    ck_assert_ptr_nonnull(strstr(line, "Z ? aaa"));
    ck_assert_str_eq(line + strlen(line) - 5, " text");
}
END_TEST

START_TEST(log_reaches_the_sink_at_its_level_and_above) {
    attnd_log_set_sink(sink);
    attnd_log_set_level(ATTND_LOG_WARN);
    attnd_log(ATTND_LOG_ERROR, "srv", "n %d", evaluate());
    attnd_log(ATTND_LOG_WARN, "srv", "n %d", evaluate());
    ck_assert_int_eq(lines, 2);
    ck_assert_int_eq(got_level, ATTND_LOG_WARN);
    ck_assert_ptr_nonnull(strstr(got, "Z WARN srv n 2"));
}
END_TEST

START_TEST(log_below_the_level_evaluates_nothing) {
    attnd_log_set_sink(sink);
    attnd_log_set_level(ATTND_LOG_WARN);
    attnd_log(ATTND_LOG_INFO, "srv", "n %d", evaluate());
    attnd_log(ATTND_LOG_DEBUG, "srv", "n %d", evaluate());
    ck_assert_int_eq(lines, 0);
    ck_assert_int_eq(evaluated, 0);
}
END_TEST

START_TEST(log_without_a_sink_is_dropped) {
    attnd_log_set_sink(NULL);
    attnd_log(ATTND_LOG_ERROR, "srv", "lost");
    ck_assert_int_eq(lines, 0);
}
END_TEST

START_TEST(log_level_names_go_both_ways) {
    const char *const names[] = {"error", "warn", "info", "debug"};
    for (int i = 0; i < ATTND_LOG_NUM_LEVELS; i++) {
        ck_assert_str_eq(attnd_log_level_name((attnd_log_level)i), names[i]);
        ck_assert_int_eq((int)attnd_log_level_parse(names[i]), i);
    }
    ck_assert_int_eq(attnd_log_level_parse("loud"), ATTND_LOG_NUM_LEVELS);
    ck_assert_str_eq(attnd_log_level_name(ATTND_LOG_NUM_LEVELS), "?");
}
END_TEST

START_TEST(log_some_writes_ten_lines_and_counts_the_rest) {
    attnd_log_rate rate = {0};
    attnd_log_set_sink(sink);
    attnd_log_set_level(ATTND_LOG_INFO);
    for (int i = 0; i < 25; i++) {
        attnd_log_some(&rate, ATTND_LOG_WARN, "srv", "n %d", i);
    }
    ck_assert_int_eq(lines, 10);
    ck_assert_ptr_nonnull(strstr(got, "WARN srv n 9"));
    rate.since_ms -= ATTND_LOG_SOME_MS; // ten seconds go by
    attnd_log_some(&rate, ATTND_LOG_DEBUG, "srv", "hidden");
    ck_assert_int_eq(lines, 10);
    ck_assert(attnd_log_admit(&rate, ATTND_LOG_WARN, "srv"));
    ck_assert_int_eq(lines, 11);
    ck_assert_ptr_nonnull(strstr(got, "WARN srv 15 lines like the next one were left out"));
    attnd_log_some(&rate, ATTND_LOG_WARN, "srv", "next");
    ck_assert_int_eq(lines, 12);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("log");
    TCase *tc = tcase_create("log");
    tcase_add_test(tc, log_format_writes_time_level_area_and_text);
    tcase_add_test(tc, log_format_cuts_a_long_line_visibly);
    tcase_add_test(tc, log_format_keeps_a_line_that_just_fits);
    tcase_add_test(tc, log_format_makes_control_bytes_harmless);
    tcase_add_test(tc, log_format_survives_a_long_area_and_a_wrong_level);
    tcase_add_test(tc, log_reaches_the_sink_at_its_level_and_above);
    tcase_add_test(tc, log_below_the_level_evaluates_nothing);
    tcase_add_test(tc, log_without_a_sink_is_dropped);
    tcase_add_test(tc, log_level_names_go_both_ways);
    tcase_add_test(tc, log_some_writes_ten_lines_and_counts_the_rest);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
