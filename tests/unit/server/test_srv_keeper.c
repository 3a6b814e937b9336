// What becomes of a SIGHUP while workers die.  The keeper runs this program as its workers: they
// write what they do into one pipe, a letter each: s(erves), h(angup came), r(eloaded).
#include "server/srv_keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/srv_notify.h"
#include "tests/check_main.h"

enum { SAYS_FD = 200, WAIT_MS = 20000, QUIET_MS = 300 };

// ---- the worker: READY, then as it is told what to do with a SIGHUP, "die" or "reload"

static int play(const char *how) {
    sigset_t set;
    int got;
    sigemptyset(&set);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, NULL);
    srv_notify_ready("");
    (void)!write(SAYS_FD, "s", 1);
    while (sigwait(&set, &got) == 0 && got == SIGHUP) {
        (void)!write(SAYS_FD, "h", 1);
        if (strcmp(how, "die") == 0) {
            raise(SIGKILL);
        }
        srv_notify_reloaded();
        (void)!write(SAYS_FD, "r", 1); // the keeper knows
    }
    return 0;
}

// ---- the keeper, in a child

static srv_conf conf;
static int says; // what workers write
static pid_t keeper;

static void start(char *how) {
    int ends[2];
    srv_conf_init(&conf);
    ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
    says = ends[0];
    keeper = fork();
    if (keeper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); // when the test fails
        dup2(ends[1], SAYS_FD);
        _exit(srv_keeper_run(2, (char *[]){"test_srv_keeper", how, NULL}, &conf));
    }
    close(ends[1]);
}

static void stop(void) {
    int how;
    kill(keeper, SIGTERM);
    ck_assert_int_eq(waitpid(keeper, &how, 0), keeper);
    ck_assert_int_eq(how, 0);
    close(says);
}

// ck_says checks what workers write next.
static void ck_says(const char *want) {
    for (size_t i = 0; want[i]; i++) {
        char got[2] = "";
        struct pollfd fd = {.fd = says, .events = POLLIN};
        ck_assert_msg(poll(&fd, 1, WAIT_MS) == 1 && read(says, got, 1) == 1,
                      "nothing more is said before \"%s\"", want + i);
        ck_assert_msg(got[0] == want[i], "\"%s\", not \"%s\"", got, want + i);
    }
}

static void ck_quiet(void) {
    ck_assert_int_eq(poll(&(struct pollfd){.fd = says, .events = POLLIN}, 1, QUIET_MS), 0);
}

static pid_t worker(void) {
    char path[64], text[32] = "";
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)keeper, (int)keeper);
    FILE *f = fopen(path, "r");
    ck_assert_ptr_nonnull(f);
    ck_assert_ptr_nonnull(fgets(text, sizeof(text), f));
    fclose(f);
    return (pid_t)atoi(text);
}

// await_stop waits until a process is stopped.
static void await_stop(pid_t pid) {
    char path[64], text[512], state;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    do {
        FILE *f = fopen(path, "r");
        ck_assert_ptr_nonnull(f);
        ck_assert_ptr_nonnull(fgets(text, sizeof(text), f));
        fclose(f);
        state = strrchr(text, ')')[2];
    } while (state != 'T');
}

START_TEST(a_worker_that_lives_reloads_once) {
    start("reload");
    ck_says("s");
    for (int i = 0; i < 3; i++) {
        kill(keeper, SIGHUP);
        ck_says("hr");
    }
    kill(worker(), SIGKILL);
    ck_says("s");
    ck_quiet(); // it has all of it from the one before
    stop();
}
END_TEST

START_TEST(one_that_comes_for_a_dead_worker_reaches_the_next) {
    start("reload");
    ck_says("s");
    kill(keeper, SIGSTOP);
    await_stop(keeper);
    kill(worker(), SIGKILL);
    kill(keeper,
         SIGHUP); // heard before the death: of pending signals the lowest number comes first
    kill(keeper, SIGCONT);
    ck_says("shr");
    kill(keeper, SIGHUP);
    ck_says("hr");
    ck_quiet();
    stop();
}
END_TEST

START_TEST(one_that_a_worker_dies_with_reaches_the_next) {
    start("reload");
    ck_says("s");
    pid_t first = worker();
    kill(first, SIGSTOP);
    await_stop(first);
    kill(keeper, SIGHUP);
    kill(keeper, SIGHUP);
    ck_quiet();
    kill(first, SIGKILL);
    ck_says("shr");
    ck_quiet(); // both at once
    stop();
}
END_TEST

START_TEST(one_that_workers_die_of_reaches_no_third) {
    start("die");
    ck_says("s");
    kill(keeper, SIGHUP);
    ck_says("hshs");
    ck_quiet();
    kill(keeper, SIGHUP); // another one does
    ck_says("hshs");
    ck_quiet();
    stop();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_keeper");
    TCase *tc = tcase_create("sighup");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, a_worker_that_lives_reloads_once);
    tcase_add_test(tc, one_that_comes_for_a_dead_worker_reaches_the_next);
    tcase_add_test(tc, one_that_a_worker_dies_with_reaches_the_next);
    tcase_add_test(tc, one_that_workers_die_of_reaches_no_third);
    suite_add_tcase(s, tc);
    return s;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--no-keeper") == 0) {
        return play(argv[2]);
    }
    SRunner *runner = srunner_create(suite());
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
