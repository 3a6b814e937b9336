// What happens to a machine, not to a message: descriptors run out, nobody reads the log, a client
// is stopped, the daemon is killed under its clients, and clients come and go for long.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/play.h"
#include "tests/e2e/raw.h"

static const char *const flags[] = {"--set", "cache.memory=32MiB",    "--set", "cache.slab=1MiB",
                                    "--set", "limits.connections=64", NULL};

static e2e_daemon d;
static e2e_client good;
static play_model m;
static play_seq s;

static void begin(void) {
    e2e_start(&d, flags);
    e2e_connect(&good, d.url);
    play_hello(&good, "good");
    m = play_tiny();
    play_open(&good, &m);
    play_create(&good, &m, &s);
}

static void still_good(void) {
    play_seq *const seqs[] = {&s};
    play_token(&good, seqs, 1, 1);
}

static void end(void) {
    still_good();
    play_free(&good, &s);
    ck_assert_double_eq(e2e_stat(&good, "blocks.in_use"), 0);
    e2e_close(&good);
    e2e_stop(&d);
}

START_TEST(without_descriptors_clients_are_kept_and_new_ones_served_later) {
    enum { N = 40 };
    raw_client c[N];
    struct rlimit few;
    begin();
    ck_assert_int_eq(prlimit(d.pid, RLIMIT_NOFILE, NULL, &few), 0);
    few.rlim_cur = 32;
    ck_assert_int_eq(prlimit(d.pid, RLIMIT_NOFILE, &few, NULL), 0);
    for (int i = 0; i < N; i++) {
        raw_connect(&c[i], d.path); // the backlog takes them all
    }
    for (int i = 0; i < 5; i++) {
        still_good();
    }
    for (int i = 0; i < N; i++) {
        raw_close(&c[i]);
    }
    e2e_client late;
    e2e_connect(&late, d.url);
    play_hello(&late, "late");
    e2e_close(&late);
    end();
}
END_TEST

START_TEST(a_log_that_nobody_reads_stops_nothing) {
    char path[96];
    e2e_dir(&d);
    snprintf(path, sizeof(path), "%s/log", d.dir);
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    ck_assert_int_ge(fd, 0);
    fcntl(fd, F_SETPIPE_SZ, 4096);
    begin();
    for (int i = 0; i < 100; i++) { // some 90 bytes at each hello and each end
        e2e_client c;
        e2e_connect(&c, d.url);
        play_hello(&c, "talkative");
        e2e_close(&c);
    }
    still_good();
    char text[8192];
    ssize_t n = read(fd, text, sizeof(text) - 1); // room again: the next line says what was lost
    ck_assert_int_gt(n, 0);
    e2e_client c;
    e2e_connect(&c, d.url);
    play_hello(&c, "heard");
    n = read(fd, text, sizeof(text) - 1);
    ck_assert_int_gt(n, 0);
    text[n] = '\0';
    ck_assert_msg(strstr(text, "lines were lost") != NULL, "%s", text);
    e2e_close(&c);
    still_good();
    play_free(&good, &s);
    e2e_close(&good);
    kill(d.pid, SIGTERM);
    ck_assert_int_eq(e2e_wait(&d, 10000), 0);
    close(fd);
    e2e_remove(&d);
}
END_TEST

// work is a client that opens a step and attends, again and again, until it is killed.
static _Noreturn void work(const char *url, int ready) {
    e2e_client c;
    play_model tiny = play_tiny();
    play_seq q;
    e2e_connect(&c, url);
    play_hello(&c, "stopped");
    play_open(&c, &tiny);
    play_create(&c, &tiny, &q);
    play_seq *const seqs[] = {&q};
    for (int i = 0;; i++) {
        play_token(&c, seqs, 1, 1);
        if (i == 3 && write(ready, "x", 1) != 1) {
            _exit(1);
        }
    }
}

START_TEST(a_client_that_is_stopped_and_goes_on_loses_nothing) {
    int fds[2], status;
    char byte;
    e2e_dir(&d);
    e2e_start(&d, flags);
    ck_assert_int_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        work(d.url, fds[1]);
    }
    e2e_connect(&good, d.url);
    play_hello(&good, "good");
    m = play_tiny();
    play_open(&good, &m);
    play_create(&good, &m, &s);
    ck_assert_int_eq(read(fds[0], &byte, 1), 1);
    for (int i = 0; i < 5; i++) {
        kill(pid, SIGSTOP);
        for (int k = 0; k < 5; k++) {
            still_good();
        }
        kill(pid, SIGCONT);
        e2e_sleep_ms(20);
    }
    ck_assert_int_eq(waitpid(pid, &status, WNOHANG), 0); // its checks held
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    e2e_await_stat(&good, "sessions", 1, 1000);
    close(fds[0]);
    close(fds[1]);
    end();
}
END_TEST

START_TEST(a_daemon_killed_under_its_clients_is_a_lost_connection) {
    e2e_flight f;
    e2e_reply r;
    e2e_buf b;
    begin();
    play_step step;
    play_part part = {.seq = &s, .new_len = 1500};
    ATTND_CK_OK(play_step_open(&good, &m, &part, 1, 0, &step, NULL));
    play_tensors t = play_random(&step);
    play_attend_body(&b, ++good.id, &step, 0, 0, &t);
    e2e_send(&good, &f, b.data, b.bytes);
    e2e_sleep_ms(20);
    kill(d.pid, SIGKILL);
    ck_assert_int_eq(e2e_wait(&d, 5000), 128 + SIGKILL);
    attnd_err err = e2e_recv(&f, &r);
    ck_assert(err == ATTND_ECONN || err == ATTND_OK); // the answer may have been under way
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
    e2e_close(&good);
    close(d.out);
    d.ready[0] = '\0';
    begin(); // takes the dead one's socket over
    ck_assert_double_eq(e2e_stat(&good, "sequences"), 1);
    end();
}
END_TEST

START_TEST(two_signals_under_a_flood_end_the_daemon_cleanly) {
    enum { N = 8 };
    for (int round = 0; round < 10; round++) {
        raw_client c[N];
        e2e_buf hello, stats;
        memset(&d, 0, sizeof(d));
        e2e_start(&d, flags);
        e2e_buf_init(&hello, PROTO_HELLO, 1, "{}", 2);
        e2e_buf_init(&stats, PROTO_STATS, 2, NULL, 0);
        for (int i = 0; i < N; i++) {
            raw_open(&c[i], d.path);
            raw_send(&c[i], hello.data, hello.bytes, 1000);
            for (int k = 0; k < 60; k++) {
                raw_send(&c[i], stats.data, stats.bytes, 1000);
            }
        }
        e2e_sleep_ms(round);
        kill(d.pid, SIGTERM);
        kill(d.pid, SIGINT);
        int status = e2e_wait(&d, 20000);
        ck_assert_int_eq(status, 0);
        ck_assert(!e2e_log_has(&d, "Sanitizer"));
        for (int i = 0; i < N; i++) {
            raw_close(&c[i]);
        }
        e2e_buf_fini(&hello);
        e2e_buf_fini(&stats);
        e2e_remove(&d);
    }
}
END_TEST

static int count_fds(void) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)d.pid);
    DIR *dir = opendir(path);
    ck_assert_ptr_nonnull(dir);
    int num = 0;
    while (readdir(dir)) {
        num++;
    }
    closedir(dir);
    return num;
}

// await_fds waits until the daemon has at most so many descriptors: the last connections' are
// closed behind their sessions' end.
static void await_fds(int most) {
    for (int i = 0; i < 400 && count_fds() > most; i++) {
        e2e_sleep_ms(5);
    }
    ck_assert_int_le(count_fds(), most);
}

static long resident_kib(void) {
    char path[64], line[128];
    long kib = 0;
    snprintf(path, sizeof(path), "/proc/%d/status", (int)d.pid);
    FILE *f = fopen(path, "r");
    ck_assert_ptr_nonnull(f);
    while (kib == 0 && fgets(line, sizeof(line), f)) {
        sscanf(line, "VmRSS: %ld", &kib);
    }
    fclose(f);
    return kib;
}

static void come_and_go(int times) {
    for (int i = 0; i < times; i++) {
        e2e_client c;
        play_model tiny = play_tiny();
        play_seq q;
        play_step step;
        e2e_connect(&c, d.url);
        play_hello(&c, "passing");
        tiny.name = "of those who pass";
        play_open(&c, &tiny);
        play_create(&c, &tiny, &q);
        play_part part = {.seq = &q, .new_len = 20};
        ATTND_CK_OK(play_step_open(&c, &tiny, &part, 1, 60000, &step, NULL));
        e2e_close(&c); // with the step open
        play_forget(&q);
    }
    e2e_await_stat(&good, "sessions", 1, 2000);
}

// Sanitizers keep freed memory aside.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { GROWTH_KIB = 1 << 20 };
#else
enum { GROWTH_KIB = 300 }; // 400 sessions that left 1 KiB each would be more
#endif

START_TEST(clients_that_come_and_go_leave_neither_memory_nor_descriptors) {
    begin();
    come_and_go(400); // until every pool has been touched
    int fds = count_fds();
    long kib = resident_kib();
    come_and_go(400);
    await_fds(fds);
    ck_assert_int_le(resident_kib() - kib, GROWTH_KIB);
    ck_assert_double_eq(e2e_stat(&good, "models"), 1);
    ck_assert_double_eq(e2e_stat(&good, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&good, "accounting_mismatches"), 0);
    end();
}
END_TEST

// hear waits for a notification that contains text.
static void hear(int fd, const char *text) {
    char got[512];
    do {
        ssize_t n = recv(fd, got, sizeof(got) - 1, 0);
        ck_assert_msg(n > 0, "never heard %s", text);
        got[n] = '\0';
    } while (!strstr(got, text));
}

START_TEST(systemd_hears_ready_alive_and_stopping) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    struct timeval patience = {20, 0};
    e2e_dir(&d);
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/notify", d.dir);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setenv("NOTIFY_SOCKET", addr.sun_path, 1);
    setenv("WATCHDOG_USEC", "200000", 1);
    begin();
    hear(fd, "READY=1");
    hear(fd, "WATCHDOG=1");
    hear(fd, "WATCHDOG=1");
    kill(d.pid, SIGTERM);
    hear(fd, "STOPPING=1");
    ck_assert_int_eq(e2e_wait(&d, 10000), 0);
    e2e_close(&good);
    close(fd);
    e2e_remove(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *all = suite_create("faults");
    TCase *tc = tcase_create("faults");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, without_descriptors_clients_are_kept_and_new_ones_served_later);
    tcase_add_test(tc, a_log_that_nobody_reads_stops_nothing);
    tcase_add_test(tc, a_client_that_is_stopped_and_goes_on_loses_nothing);
    tcase_add_test(tc, a_daemon_killed_under_its_clients_is_a_lost_connection);
    tcase_add_test(tc, two_signals_under_a_flood_end_the_daemon_cleanly);
    tcase_add_test(tc, clients_that_come_and_go_leave_neither_memory_nor_descriptors);
    tcase_add_test(tc, systemd_hears_ready_alive_and_stopping);
    suite_add_tcase(all, tc);
    return all;
}

CHECK_MAIN(suite)
