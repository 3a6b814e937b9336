// Processes that have the arena: told when they are gone, counted, forgotten.
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/srv_process.h"
#include "tests/check_main.h"

static uv_loop_t loop;
static srv_processes *t;
static attnd_errinfo info;
static int num_gone, num_settled, listener;
static char path[64];
static const uint8_t key[SRV_PROCESS_KEY] = {7};

static void gone(void *ctx) {
    num_gone += *(int *)ctx;
}

static void settled(void *ctx) {
    (void)ctx;
    num_settled++;
}

static void setup(void) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(path, sizeof(path), "/tmp/attnd_process_%d", (int)getpid());
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert_int_eq(listen(listener, 8), 0);
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    ATTND_CK_OK(srv_processes_open(&t, &loop, settled, NULL, &info));
}

static void teardown(void) {
    srv_processes_close(t);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    close(listener);
    unlink(path);
}

// child starts a process that connects; returns our end.
static int child(pid_t *pid) {
    *pid = fork();
    ck_assert_int_ge(*pid, 0);
    if (*pid == 0) {
        struct sockaddr_un addr = {.sun_family = AF_UNIX};
        snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
        if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0) {
            pause();
        }
        _exit(1);
    }
    int fd = accept(listener, NULL, NULL);
    ck_assert_int_ge(fd, 0);
    return fd;
}

static void reap(pid_t pid) {
    kill(pid, SIGKILL);
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
}

START_TEST(a_process_is_told_of_when_it_is_gone_and_not_before) {
    pid_t pid;
    uint32_t idx;
    int one = 1, fd = child(&pid);
    ATTND_CK_OK(srv_process_add(t, fd, key, &idx, &info));
    close(fd); // the connection is lost, the process is not
    srv_process_await(t, idx, gone, &one);
    for (int i = 0; i < 5; i++) {
        uv_run(&loop, UV_RUN_NOWAIT);
        usleep(10000);
    }
    ck_assert_int_eq(num_gone, 0);
    reap(pid);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(num_gone, 1);
    ck_assert_int_eq(num_settled, 0);
    ck_assert_uint_eq(srv_processes_before(t, NULL), 0);
}
END_TEST

START_TEST(places_are_bounded_and_used_again) {
    pid_t pid;
    uint32_t idx[SRV_MAX_PROCESSES + 1];
    int fd = child(&pid);
    for (int i = 0; i < SRV_MAX_PROCESSES; i++) {
        ATTND_CK_OK(srv_process_add(t, fd, key, &idx[i], &info));
    }
    ATTND_CK_ERR(srv_process_add(t, fd, key, &idx[SRV_MAX_PROCESSES], &info), ATTND_EBUSY);
    srv_process_remove(t, idx[3]);
    ATTND_CK_OK(srv_process_add(t, fd, key, &idx[SRV_MAX_PROCESSES], &info));
    ck_assert_uint_eq(idx[SRV_MAX_PROCESSES], idx[3]);
    close(fd);
    reap(pid);
}
END_TEST

// Attaching again says that a client does nothing under its other places, not that its siblings of
// the same process do nothing.
START_TEST(a_client_that_is_back_speaks_for_itself_alone) {
    static const uint8_t keys[2][SRV_PROCESS_KEY] = {{1}, {2}}, none[SRV_PROCESS_KEY];
    pid_t pid;
    uint32_t idx[3], again;
    int worth[3] = {1, 10, 100}, fd = child(&pid);
    for (int i = 0; i < 3; i++) {
        ATTND_CK_OK(srv_process_add(t, fd, i < 2 ? keys[i] : none, &idx[i], &info));
        srv_process_await(t, idx[i], gone, &worth[i]);
    }
    ck_assert_int_eq(num_gone, 0);
    ATTND_CK_OK(srv_process_add(t, fd, keys[0], &again, &info));
    ck_assert_int_eq(num_gone, 1);
    ATTND_CK_OK(srv_process_add(t, fd, none, &again, &info)); // may be another that has no key
    ck_assert_int_eq(num_gone, 1);
    ATTND_CK_OK(srv_process_add(t, fd, keys[1], &again, &info));
    ck_assert_int_eq(num_gone, 11);
    // Its end is noticed after it is back.
    uint32_t back;
    ATTND_CK_OK(srv_process_add(t, fd, keys[1], &back, &info));
    srv_process_await(t, again, gone, &worth[0]);
    ck_assert_int_eq(num_gone, 12);
    close(fd);
    reap(pid);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(num_gone, 112);
}
END_TEST

START_TEST(what_is_no_socket_names_no_process) {
    uint32_t idx;
    ATTND_CK_ERR(srv_process_add(t, 0, key, &idx, &info), ATTND_ENOTSUP);
    ck_assert_uint_eq(srv_processes_before(NULL, NULL), 0);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_process");
    TCase *tc = tcase_create("srv_process");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_process_is_told_of_when_it_is_gone_and_not_before);
    tcase_add_test(tc, places_are_bounded_and_used_again);
    tcase_add_test(tc, a_client_that_is_back_speaks_for_itself_alone);
    tcase_add_test(tc, what_is_no_socket_names_no_process);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
