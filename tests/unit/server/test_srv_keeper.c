// What becomes of a SIGHUP, and of the cache, while workers die.  The keeper runs this program as
// its workers, which write what they do into one pipe, a letter each: s(erves), h(angup came),
// r(eloaded).  Those that go by a plan, letters in another pipe, also write e(mpty) or k(ept), of
// their cache, f(ails) and n(o device).  l is a line of the keeper's about a device.
#include "server/srv_keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_inherit.h"
#include "server/srv_notify.h"
#include "tests/check_main.h"

enum { FIRST_FD = 3, SAYS_FD = 200, PLAN_FD, WAIT_MS = 20000, QUIET_MS = 300 };

static const char why[] = "cudaSetDevice: no MPS server";

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

// play_plan does as the next letter of the plan says: s(erve), with the ledger that it was given or
// another one, f(ail), have n(o device), or c(rash) when it has said that.
static int play_plan(void) {
    char what;
    if (read(PLAN_FD, &what, 1) != 1) {
        return 0;
    }
    if (what == 's') {
        bool is_kept = srv_inherit_fd("ledger") >= 0;
        srv_notify_store("ledger", is_kept ? -1 : memfd_create("ledger", 0));
        (void)!write(SAYS_FD, is_kept ? "k" : "e", 1);
        return play("reload");
    }
    (void)!write(SAYS_FD, what == 'c' ? "n" : &what, 1);
    if (what != 'f') {
        srv_notify_no_device(why);
    }
    if (what == 'c') {
        raise(SIGKILL);
    }
    return 1;
}

// ---- the keeper, in a child

static srv_conf conf;
static int says; // what workers write
static pid_t keeper;
static const char *given; // name of a descriptor that it is started with, NULL = none

static void sink(attnd_log_level level, const char *line, size_t len) {
    (void)level;
    (void)len;
    if (strstr(line, "no device to start with")) {
        (void)!write(SAYS_FD, strstr(line, why) ? "l" : "?", 1);
    }
}

static void start(char *how) {
    int ends[2];
    ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
    says = ends[0];
    keeper = fork();
    if (keeper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); // when the test fails
        dup2(ends[1], SAYS_FD);
        attnd_log_set_sink(sink);
        char pid[16];
        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        setenv("LISTEN_PID", pid, 1);
        setenv("WATCHDOG_PID", pid, 1);
        if (given) {
            dup2(memfd_create("given", 0), FIRST_FD);
            setenv("LISTEN_FDS", "1", 1);
            setenv("LISTEN_FDNAMES", given, 1);
        }
        _exit(srv_keeper_run(2, (char *[]){"test_srv_keeper", how, NULL}, &conf));
    }
    close(ends[1]);
}

// start_plan starts one whose workers do as a plan says.
static void start_plan(const char *plan) {
    int ends[2];
    ck_assert_int_eq(pipe(ends), 0);
    ck_assert_int_eq(write(ends[1], plan, strlen(plan)), (ssize_t)strlen(plan));
    close(ends[1]);
    ck_assert_int_eq(dup2(ends[0], PLAN_FD), PLAN_FD);
    close(ends[0]);
    start("plan");
}

static void setup(void) {
    srv_conf_init(&conf);
}

static void setup_hasty(void) {
    setup();
    conf.restart_pause_ms = 20;
}

// end waits for the keeper's end and returns how it ended.
static int end(void) {
    int how;
    ck_assert_int_eq(waitpid(keeper, &how, 0), keeper);
    return how;
}

static void stop(void) {
    kill(keeper, SIGTERM);
    ck_assert_int_eq(end(), 0);
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

// ck_quiet_end checks that they have written nothing more, and are gone.
static void ck_quiet_end(void) {
    char got;
    ck_assert_int_eq(read(says, &got, 1), 0);
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
    // Heard before the death: of pending signals the lowest number comes first.
    kill(keeper, SIGHUP);
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

// ---- a device that is not there

static void kill_worker(void) {
    ck_assert_int_eq(kill(worker(), SIGKILL), 0);
}

START_TEST(a_device_is_waited_for_with_the_cache) {
    start_plan("snnnnnnnnns");
    ck_says("es");
    kill_worker();
    ck_says("nlnnnnnnnnks"); // one line
    stop();
}
END_TEST

START_TEST(a_worker_that_crashes_behind_that_it_has_no_device_is_no_other) {
    start_plan("sccccccccns");
    ck_says("es");
    kill_worker();
    ck_says("nlnnnnnnnnks");
    stop();
}
END_TEST

START_TEST(starts_without_a_device_are_not_among_those_that_fail_in_a_row) {
    start_plan("snfnfnsnfffs");
    ck_says("es");
    kill_worker();
    ck_says("nlfnfnks");
    kill_worker();
    ck_says("nlfffes");
    stop();
}
END_TEST

START_TEST(six_starts_that_fail_end_the_keeper_whatever_is_between) {
    start_plan("sfffnnfffs");
    ck_says("es");
    kill_worker();
    ck_says("fffnlnfff");
    int how = end();
    ck_assert(WIFEXITED(how) && WEXITSTATUS(how) == 1);
    ck_quiet_end();
}
END_TEST

START_TEST(a_first_start_without_a_device_ends_the_keeper) {
    start_plan("nns");
    ck_says("n");
    int how = end();
    ck_assert(WIFEXITED(how) && WEXITSTATUS(how) == 1);
    ck_quiet_end();
}
END_TEST

START_TEST(a_first_start_with_a_cache_waits_for_the_device) {
    given = "ledger";
    start_plan("nnnnnnnns");
    ck_says("nlnnnnnnnks");
    stop();
}
END_TEST

START_TEST(one_with_an_arena_alone_does_not) {
    given = "arena";
    start_plan("ns");
    ck_says("n");
    ck_assert_int_ne(end(), 0);
}
END_TEST

START_TEST(a_stop_ends_the_wait_at_once) {
    conf.restart_pause_ms = 60000;
    start_plan("snnnnns");
    ck_says("es");
    kill_worker();
    ck_says("nlnnnn");
    stop(); // in a pause of 1600 ms, or while that worker ends, perhaps of SIGTERM
    ck_quiet_end();
}
END_TEST

// hears returns whether a message that begins with text comes to a socket.
static bool hears(int above, const char *text) {
    char got[512];
    uint64_t until = attnd_clock_ms() + WAIT_MS;
    struct pollfd fd = {.fd = above, .events = POLLIN};
    while (attnd_clock_ms() < until && poll(&fd, 1, WAIT_MS) == 1) {
        ssize_t bytes = recv(above, got, sizeof(got) - 1, 0);
        got[bytes > 0 ? bytes : 0] = '\0';
        ck_assert_ptr_null(strstr(got, SRV_NOTIFY_NO_DEVICE)); // the keeper's alone
        if (strncmp(got, text, strlen(text)) == 0) {
            return true;
        }
    }
    return false;
}

START_TEST(whoever_supervises_hears_what_it_waits_for_and_that_it_lives) {
    struct sockaddr_un any = {.sun_family = AF_UNIX};
    socklen_t len = sizeof(any);
    int above = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(above, (struct sockaddr *)&any, sizeof(any.sun_family)), 0);
    ck_assert_int_eq(getsockname(above, (struct sockaddr *)&any, &len), 0);
    char name[sizeof(any.sun_path) + 1] = "@";
    memcpy(name + 1, any.sun_path + 1, len - offsetof(struct sockaddr_un, sun_path) - 1);
    setenv("NOTIFY_SOCKET", name, 1);
    setenv("WATCHDOG_USEC", "40000", 1);
    start_plan("snn");
    ck_says("es");
    kill_worker();
    ck_assert(hears(above, "STATUS=waits for the device: cudaSetDevice: no MPS server"));
    ck_assert(hears(above, "WATCHDOG=1")); // no worker here says so
    end();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_keeper");
    TCase *tc = tcase_create("sighup");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, a_worker_that_lives_reloads_once);
    tcase_add_test(tc, one_that_comes_for_a_dead_worker_reaches_the_next);
    tcase_add_test(tc, one_that_a_worker_dies_with_reaches_the_next);
    tcase_add_test(tc, one_that_workers_die_of_reaches_no_third);
    suite_add_tcase(s, tc);
    tc = tcase_create("device");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup_hasty, NULL);
    tcase_add_test(tc, a_device_is_waited_for_with_the_cache);
    tcase_add_test(tc, a_worker_that_crashes_behind_that_it_has_no_device_is_no_other);
    tcase_add_test(tc, starts_without_a_device_are_not_among_those_that_fail_in_a_row);
    tcase_add_test(tc, six_starts_that_fail_end_the_keeper_whatever_is_between);
    tcase_add_test(tc, a_first_start_without_a_device_ends_the_keeper);
    tcase_add_test(tc, a_first_start_with_a_cache_waits_for_the_device);
    tcase_add_test(tc, one_with_an_arena_alone_does_not);
    tcase_add_test(tc, a_stop_ends_the_wait_at_once);
    tcase_add_test(tc, whoever_supervises_hears_what_it_waits_for_and_that_it_lives);
    suite_add_tcase(s, tc);
    return s;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--no-keeper") == 0) {
        return strcmp(argv[2], "plan") == 0 ? play_plan() : play(argv[2]);
    }
    SRunner *runner = srunner_create(suite());
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
