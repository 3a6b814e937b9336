// Descriptors handed over by systemd's protocol.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "server/srv_inherit.h"
#include "tests/check_main.h"

static void hand_over(const char *num, const char *names) {
    char pid[16];
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    setenv("LISTEN_PID", pid, 1);
    setenv("LISTEN_FDS", num, 1);
    setenv("LISTEN_FDNAMES", names, 1);
}

START_TEST(a_name_is_found_at_its_place) {
    hand_over("3", "metrics:attach:attach");
    ck_assert_int_eq(srv_inherit_fd("metrics"), 3);
    ck_assert_int_eq(srv_inherit_fd("attach"), 4);
    ck_assert_int_eq(srv_inherit_fd("attac"), -1);
    ck_assert_int_eq(srv_inherit_fd("attach2"), -1);
}
END_TEST

START_TEST(names_behind_the_count_are_not_there) {
    hand_over("1", "metrics:attach");
    ck_assert_int_eq(srv_inherit_fd("attach"), -1);
    hand_over("2", "attach");
    ck_assert_int_eq(srv_inherit_fd("metrics"), -1);
}
END_TEST

START_TEST(what_is_meant_for_another_process_is_left_alone) {
    hand_over("1", "attach");
    setenv("LISTEN_PID", "1", 1);
    ck_assert_int_eq(srv_inherit_fd("attach"), -1);
    setenv("LISTEN_PID", "", 1);
    ck_assert_int_eq(srv_inherit_fd("attach"), -1);
}
END_TEST

START_TEST(nonsense_is_nothing) {
    static const char *const nums[] = {"0", "-1", "x", "1x", "", "99999999999999999999"};
    for (size_t i = 0; i < sizeof(nums) / sizeof(nums[0]); i++) {
        hand_over(nums[i], "attach");
        ck_assert_int_eq(srv_inherit_fd("attach"), -1);
    }
    unsetenv("LISTEN_FDNAMES");
    setenv("LISTEN_FDS", "1", 1);
    ck_assert_int_eq(srv_inherit_fd("attach"), -1);
    unsetenv("LISTEN_PID");
    ck_assert_int_eq(srv_inherit_fd("attach"), -1);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_inherit");
    TCase *tc = tcase_create("inherit");
    tcase_add_test(tc, a_name_is_found_at_its_place);
    tcase_add_test(tc, names_behind_the_count_are_not_there);
    tcase_add_test(tc, what_is_meant_for_another_process_is_left_alone);
    tcase_add_test(tc, nonsense_is_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
