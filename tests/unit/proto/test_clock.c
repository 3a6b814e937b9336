// The clocks: monotonic and wall time agree with the kernel's, dates with known ones.
#include "proto/clock.h"

#include <string.h>
#include <time.h>

#include "tests/check_main.h"

START_TEST(clock_us_and_ms_are_one_monotonic_clock) {
    uint64_t ms = attnd_clock_ms();
    uint64_t us = attnd_clock_us();
    ck_assert_uint_ge(us / 1000, ms);
    for (int i = 0; i < 1000; i++) {
        uint64_t next = attnd_clock_us();
        ck_assert_uint_ge(next, us);
        us = next;
    }
}
END_TEST

START_TEST(clock_us_advances_by_what_was_slept) {
    uint64_t start = attnd_clock_us();
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    uint64_t slept = attnd_clock_us() - start;
    ck_assert_uint_ge(slept, 5000);
    ck_assert_uint_lt(slept, 2000000);
}
END_TEST

START_TEST(wall_us_is_the_time_of_day) {
    uint64_t us = attnd_wall_us();
    uint64_t now = (uint64_t)time(NULL);
    ck_assert_uint_le(us / 1000000, now + 1);
    ck_assert_uint_ge(us / 1000000 + 2, now);
}
END_TEST

// seconds since 1970 of known dates (date -u -d ... +%s)
static const struct {
    uint64_t us;
    const char *text;
} dates[] = {
    {0, "1970-01-01T00:00:00.000Z"},
    {999, "1970-01-01T00:00:00.000Z"},
    {951782399999999, "2000-02-28T23:59:59.999Z"},
    {951782400000000, "2000-02-29T00:00:00.000Z"},
    {1738324800123456, "2025-01-31T12:00:00.123Z"},
    {4107542400000000, "2100-03-01T00:00:00.000Z"},
    {253402300799999999, "9999-12-31T23:59:59.999Z"},
    {253402300800000000, "9999-12-31T23:59:59.999Z"},
    {UINT64_MAX, "9999-12-31T23:59:59.999Z"},
};

START_TEST(wall_text_writes_known_dates) {
    char text[ATTND_WALL_TEXT_BYTES];
    attnd_wall_text(text, dates[_i].us);
    ck_assert_str_eq(text, dates[_i].text);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("clock");
    TCase *tc = tcase_create("clock");
    tcase_add_test(tc, clock_us_and_ms_are_one_monotonic_clock);
    tcase_add_test(tc, clock_us_advances_by_what_was_slept);
    tcase_add_test(tc, wall_us_is_the_time_of_day);
    tcase_add_loop_test(tc, wall_text_writes_known_dates, 0, sizeof(dates) / sizeof(dates[0]));
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
