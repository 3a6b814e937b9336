#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/load/bench_host.h"

// shortened, as the kernel writes them; utime 1234, stime 66
#define STAT(name) \
    "42 (" name ") S 1 42 42 0 -1 4194560 9 0 0 0 1234 66 7 8 20 0 5 0 100 1000 50 18446744073\n"
#define STATUS \
    "Name:\tx\nVmPeak:\t   99 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t1\n"

START_TEST(usage_is_read_from_the_texts_of_proc) {
    bench_usage u;
    ATTND_CK_OK(bench_usage_parse(&u, STAT("attnd"), STATUS, 100));
    ck_assert_double_eq(u.cpu_s, 13);
    ck_assert_uint_eq(u.rss_bytes, 1 << 20);
    ck_assert_uint_eq(u.peak_bytes, 2 << 20);
    ATTND_CK_OK(bench_usage_parse(&u, STAT("a) S 1 (b c"), STATUS, 100));
    ck_assert_double_eq(u.cpu_s, 13);
}
END_TEST

START_TEST(other_texts_are_refused) {
    bench_usage u = {.cpu_s = 5};
    ATTND_CK_ERR(bench_usage_parse(&u, "", STATUS, 100), ATTND_EINVAL);
    ATTND_CK_ERR(bench_usage_parse(&u, "42 (x) S 1 2 3", STATUS, 100), ATTND_EINVAL);
    ATTND_CK_ERR(bench_usage_parse(&u, STAT("x"), "VmRSS:\t1 kB\n", 100), ATTND_EINVAL);
    ATTND_CK_ERR(bench_usage_parse(&u, STAT("x"), "VmRSS:\tx\nVmHWM: 1 kB\n", 100), ATTND_EINVAL);
    ATTND_CK_ERR(bench_usage_parse(&u, STAT("x"), STATUS, 0), ATTND_EINVAL);
    ck_assert_double_eq(u.cpu_s, 5);
}
END_TEST

START_TEST(own_usage_grows) {
    bench_usage before, after;
    ATTND_CK_OK(bench_usage_read(&before, getpid()));
    ck_assert_uint_gt(before.rss_bytes, 100000);
    ck_assert_uint_ge(before.peak_bytes, before.rss_bytes);
    size_t bytes = 64 << 20;
    volatile char *p = malloc(bytes);
    for (size_t i = 0; i < bytes; i += 1024) {
        p[i] = 1;
    }
    ATTND_CK_OK(bench_usage_read(&after, getpid()));
    ck_assert_uint_ge(after.peak_bytes, before.peak_bytes + bytes / 2);
    ck_assert_double_ge(after.cpu_s, before.cpu_s);
    free((void *)p);
    ATTND_CK_ERR(bench_usage_read(&after, 0), ATTND_ENOENT);
    ATTND_CK_ERR(bench_usage_read(&after, 1 << 30), ATTND_ENOENT);
}
END_TEST

START_TEST(the_listener_of_a_socket_is_found) {
    char dir[] = "/tmp/test_bench_host.XXXXXX", url[128];
    ck_assert_ptr_nonnull(mkdtemp(dir));
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/s", dir);
    snprintf(url, sizeof(url), "ipc://%s/s", dir);
    ck_assert_int_eq(bench_peer_pid(url), 0);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert_int_eq(listen(fd, 4), 0);
    ck_assert_int_eq(bench_peer_pid(url), getpid());
    close(fd);
    ck_assert_int_eq(bench_peer_pid(url), 0);
    unlink(addr.sun_path);
    rmdir(dir);
    ck_assert_int_eq(bench_peer_pid("tcp://127.0.0.1:1"), 0);
    char longer[300];
    memset(longer, 'x', sizeof(longer));
    memcpy(longer, "ipc://", 6);
    longer[299] = '\0';
    ck_assert_int_eq(bench_peer_pid(longer), 0);
}
END_TEST

START_TEST(the_host_is_described) {
    bench_host h;
    bench_host_read(&h);
    ck_assert_uint_ge(h.cpus, 1);
    ck_assert_uint_gt(h.memory_bytes, 1 << 20);
    ck_assert_ptr_nonnull(strstr(h.kernel, "Linux"));
    ck_assert_uint_gt(strlen(h.cpu), 0);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_host");
    TCase *tc = tcase_create("host");
    tcase_add_test(tc, usage_is_read_from_the_texts_of_proc);
    tcase_add_test(tc, other_texts_are_refused);
    tcase_add_test(tc, own_usage_grows);
    tcase_add_test(tc, the_listener_of_a_socket_is_found);
    tcase_add_test(tc, the_host_is_described);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
