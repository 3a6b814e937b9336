// Peers that connect and hang up before anything was said.
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/e2e/harness.h"
#include "tests/e2e/play.h"

static e2e_daemon d;

static void setup(void) {
    e2e_dir(&d);
    e2e_start(&d, NULL);
}

static void teardown(void) {
    e2e_stop(&d);
}

static void connect_and_close(void) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    ck_assert_uint_lt(strlen(d.path), sizeof(addr.sun_path));
    memcpy(addr.sun_path, d.path, strlen(d.path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(connect(fd, (const struct sockaddr *)&addr, sizeof(addr)), 0);
    close(fd);
}

START_TEST(peers_that_hang_up_at_once_deafen_nobody) {
    for (int i = 0; i < 200; i++) {
        connect_and_close();
    }
    e2e_client c;
    e2e_connect(&c, d.url);
    play_hello(&c, "test"); // is answered, or this fails
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    e2e_close(&c);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_hangup");
    TCase *tc = tcase_create("hang up");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, peers_that_hang_up_at_once_deafen_nobody);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
