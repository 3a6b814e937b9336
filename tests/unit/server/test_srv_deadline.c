// A deadline ends its process, whatever that one is doing.  Check runs each test in a process of
// its own, and wants the exit status here.
#include <unistd.h>

#include "proto/clock.h"
#include "server/srv_deadline.h"
#include "tests/check_main.h"

START_TEST(a_deadline_ends_a_process_that_hangs) {
    srv_deadline_set(attnd_clock_ms() + 50);
    for (;;) {
        pause();
    }
}
END_TEST

START_TEST(an_earlier_one_takes_the_place_of_a_later_one) {
    srv_deadline_set(attnd_clock_ms() + 3600 * 1000);
    usleep(20000); // the thread waits for the hour
    srv_deadline_set(attnd_clock_ms() + 50);
    for (;;) {
        pause();
    }
}
END_TEST

START_TEST(one_that_was_taken_back_ends_nothing) {
    srv_deadline_set(attnd_clock_ms() + 50);
    srv_deadline_set(UINT64_MAX);
    usleep(150000);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_deadline");
    TCase *tc = tcase_create("srv_deadline");
    tcase_add_exit_test(tc, a_deadline_ends_a_process_that_hangs, SRV_DEADLINE_EXIT);
    tcase_add_exit_test(tc, an_earlier_one_takes_the_place_of_a_later_one, SRV_DEADLINE_EXIT);
    tcase_add_test(tc, one_that_was_taken_back_ends_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
