// A stop that hangs inside a library ends all the same, in time, and says so.
#include <signal.h>
#include <stdlib.h>

#include "tests/e2e/harness.h"

START_TEST(a_stop_that_hangs_ends_with_status_three) {
    e2e_daemon d = {.dir = ""};
    setenv("LD_PRELOAD", ATTND_HANG, 1);
    e2e_start(&d, (const char *const[]){"--set", "cache.memory=32MiB", NULL});
    unsetenv("LD_PRELOAD");
    uint64_t start = e2e_now_ms();
    kill(d.pid, SIGTERM);
    ck_assert_int_eq(e2e_wait(&d, 20000), 3);
    uint64_t took = e2e_now_ms() - start;
    ck_assert_uint_ge(took, 5000); // of taking everything down
    ck_assert_uint_le(took, 10000);
    ck_assert(e2e_log_has(&d, "ERROR server the stop hangs"));
    e2e_remove(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("faults_hang");
    TCase *tc = tcase_create("stop");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, a_stop_that_hangs_ends_with_status_three);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
