// The log's sink: whole lines, syslog's priorities for the journal, and a full pipe that is never
// waited for.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/log.h"
#include "server/srv_log.h"
#include "tests/check_main.h"

static int ends[2];
static char text[1 << 20];

// capture makes standard error a pipe; Check runs each test in a process of its own.
static void capture(void) {
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    ck_assert_int_eq(fcntl(ends[0], F_SETFL, O_NONBLOCK), 0);
}

static void drain(void) {
    size_t len = 0;
    for (ssize_t n; (n = read(ends[0], text + len, sizeof(text) - 1 - len)) > 0;) {
        len += (size_t)n;
    }
    text[len] = '\0';
}

START_TEST(a_line_is_written_whole) {
    capture();
    unsetenv("JOURNAL_STREAM");
    srv_log_init();
    attnd_log(ATTND_LOG_INFO, "srv", "n %d", 1);
    drain();
    const char *rest = strstr(text, "Z INFO srv n 1\n");
    ck_assert_ptr_nonnull(rest);
    ck_assert_str_eq(rest, "Z INFO srv n 1\n");
}
END_TEST

START_TEST(the_journal_gets_priorities) {
    capture();
    setenv("JOURNAL_STREAM", "8:1", 1);
    srv_log_init();
    attnd_log(ATTND_LOG_ERROR, "srv", "x");
    attnd_log(ATTND_LOG_WARN, "srv", "x");
    attnd_log(ATTND_LOG_INFO, "srv", "x");
    drain();
    ck_assert_ptr_eq(strstr(text, "<3>"), text); // LOG_ERR, LOG_WARNING, LOG_INFO of syslog.h
    ck_assert_ptr_nonnull(strstr(text, "\n<4>"));
    ck_assert_ptr_nonnull(strstr(text, "\n<6>"));
}
END_TEST

START_TEST(a_full_pipe_is_not_waited_for_and_lost_lines_are_counted) {
    enum { LINES = 3000 }; // of some 60 bytes: more than a pipe holds
    capture();
    srv_log_init();
    for (int i = 0; i < LINES; i++) {
        attnd_log(ATTND_LOG_INFO, "srv", "a line that is as long as most are: %d", i);
    }
    drain();
    int written = 0;
    for (const char *c = text; (c = strchr(c, '\n')); c++) {
        written++;
    }
    ck_assert_int_gt(written, 0);
    ck_assert_int_lt(written, LINES);
    attnd_log(ATTND_LOG_INFO, "srv", "there is room again");
    drain();
    char lost[64];
    snprintf(lost, sizeof(lost), "WARN log %d lines were lost\n", LINES - written);
    ck_assert_ptr_nonnull(strstr(text, lost));
    ck_assert_ptr_nonnull(strstr(text, "there is room again\n"));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_log");
    TCase *tc = tcase_create("srv_log");
    tcase_add_test(tc, a_line_is_written_whole);
    tcase_add_test(tc, the_journal_gets_priorities);
    tcase_add_test(tc, a_full_pipe_is_not_waited_for_and_lost_lines_are_counted);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
