// Regions come and go beside the loop: with a device that takes its time for each, others keep
// their latency; clients that leave and a daemon that stops meanwhile leave nothing; and what
// counts against the bounds is exact at every moment.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/device/faulty_device.h"
#include "tests/e2e/service_fixture.h"

enum { SLOW_MS = 200 };

static const proto_attach attach = {.magic = PROTO_RING_MAGIC,
                                    .version = PROTO_VERSION,
                                    .flags = PROTO_ATTACH_REGION,
                                    .entries = 16,
                                    .data_bytes = 4096};

static void begin_slow(const char *const *more) {
    setenv("ATTND_SLOW_REGIONS", "200", 1);
    begin_with(more);
}

// ask_only sends the packet and does not wait for the answer.
static void ask_only(service_client *r, uint64_t bytes) {
    const struct {
        proto_attach attach;
        proto_region_ask region;
    } packet = {attach, {.bytes = bytes, .num_flags = 1}};
    memset(r, 0, sizeof(*r));
    ck_assert(ring_client_connect(&r->ring, path));
    ck_assert_int_eq(send(r->ring.fd, &packet, sizeof(packet), MSG_NOSIGNAL), sizeof(packet));
}

// answer_of waits for the answer to ask_only, and takes no descriptor.  (All is read: closing a
// socket that has something unread throws away what was sent before.)
static attnd_err answer_of(service_client *r) {
    proto_attach_reply reply;
    proto_region region;
    if (recv(r->ring.fd, &reply, sizeof(reply), 0) != sizeof(reply)) {
        return ATTND_ECONN;
    }
    ck_assert(reply.status || recv(r->ring.fd, &region, sizeof(region), 0) == sizeof(region));
    return (attnd_err)reply.status;
}

static void leave(service_client *r) {
    const proto_attach_left left = {.magic = PROTO_ATTACH_LEFT};
    (void)!send(r->ring.fd, &left, sizeof(left), MSG_NOSIGNAL);
    ring_client_close(&r->ring);
}

static void ck_regions(double regions, double bytes, int ms) {
    e2e_await_stat(&c, "service.regions", regions, ms);
    ck_assert_double_eq(e2e_stat(&c, "service.region_bytes"), bytes);
}

static uint32_t count_maps(const char *what) {
    char name[64], line[512];
    uint32_t num = 0;
    snprintf(name, sizeof(name), "/proc/%d/maps", (int)d.pid);
    FILE *f = fopen(name, "r");
    ck_assert(f);
    while (fgets(line, sizeof(line), f)) {
        num += strstr(line, what) != NULL;
    }
    fclose(f);
    return num;
}

// ck_nothing: no region of anybody's is left, in the count nor in the process.
static void ck_nothing(void) {
    ck_regions(0, 0, 10 * SLOW_MS + 5000);
    e2e_await_stat(&c, "transport.rings.connections", 0, 5000);
    ck_assert_uint_eq(count_maps("fake-region"), 0);
    ck_assert_uint_eq(count_maps("attnd-flags"), 0);
    ck_assert_double_eq(e2e_stat(&c, "transport.rings.bytes"), 0);
}

// ---- others

static atomic_bool enough;

static void *attach_again_and_again(void *arg) {
    (void)arg;
    while (!atomic_load(&enough)) {
        service_client r;
        const proto_region_ask ask = {.bytes = MIB, .num_flags = 4};
        ATTND_CK_OK(service_ask(&r, path, &attach, &ask));
        service_close(&r);
    }
    return NULL;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// Three clients attach and leave in a loop, so that some region is being made or freed all the
// time.
START_TEST(others_keep_their_latency) {
    enum { CALLS = 300, LOOPS = 3 };
    static uint64_t took_us[CALLS];
    begin_slow(NULL);
    service_join(&s, path, hello, MIB, FLAGS);
    play_model m = play_tiny();
    play_seq seq;
    play_open(&c, &m);
    play_create(&c, &m, &seq);
    play_step step = open_step(&m, &seq, 1, 0);
    proto_attend_all all = service_layout(&step, 0, PAIR);
    pthread_t threads[LOOPS];
    for (int i = 0; i < LOOPS; i++) {
        ck_assert_int_eq(pthread_create(&threads[i], NULL, attach_again_and_again, NULL), 0);
    }
    uint64_t begin_us = attnd_clock_us();
    for (int i = 0; i < CALLS; i++) { // all layers, which may be repeated until commit
        uint64_t from = attnd_clock_us();
        service_send(&s, &all, sizeof(all));
        service_layers(&s, &step, &all, 0, m.layers);
        ck_reply(&step);
        took_us[i] = attnd_clock_us() - from;
        usleep(5000);
    }
    double busy = (double)(attnd_clock_us() - begin_us) / 1e6;
    atomic_store(&enough, true);
    for (int i = 0; i < LOOPS; i++) {
        pthread_join(threads[i], NULL);
    }
    double made = e2e_stat(&c, "service.regions_made");
    ck_assert_msg(made >= 3, "%g regions in %g s", made, busy);
    qsort(took_us, CALLS, sizeof(took_us[0]), by_size);
    printf("%g regions in %.1f s; calls beside them: median %.2f ms, 99%% %.2f, longest %.2f\n",
           made, busy, (double)took_us[CALLS / 2] / 1e3, (double)took_us[CALLS * 99 / 100] / 1e3,
           (double)took_us[CALLS - 1] / 1e3);
    ck_assert_uint_lt(took_us[CALLS * 99 / 100], SLOW_MS * 1000 / 2);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_free(&c, &seq);
    end();
}
END_TEST

// ---- leaving

static pid_t fork_asker(int *ready) {
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        service_client r;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        ask_only(&r, MIB);
        if (write(fds[1], "x", 1) == 1) {
            pause();
        }
        _exit(0);
    }
    close(fds[1]);
    *ready = fds[0];
    return pid;
}

// The first one's region is being made when it dies, the others' wait for that.
START_TEST(a_client_killed_while_its_region_is_made_leaves_nothing) {
    enum { ASKERS = 4 };
    char byte;
    pid_t pids[ASKERS];
    int ready[ASKERS];
    setenv("ATTND_SLOW_REGIONS", "200", 1);
    e2e_dir(&d);
    e2e_start(&d, NULL);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    for (int i = 0; i < ASKERS; i++) {
        pids[i] = fork_asker(&ready[i]);
        ck_assert_int_eq(read(ready[i], &byte, 1), 1);
    }
    e2e_sleep_ms(SLOW_MS / 4);
    for (int i = 0; i < ASKERS; i++) {
        kill(pids[i], SIGKILL);
        ck_assert_int_eq(waitpid(pids[i], NULL, 0), pids[i]);
        close(ready[i]);
    }
    e2e_connect(&c, d.url);
    hello = e2e_json(&c, PROTO_HELLO, "{}");
    c.id = 100;
    ck_nothing();
    ck_assert_double_le(e2e_stat(&c, "service.regions_made"), 1); // the others' was never begun
    service_open(&s, path, MIB, FLAGS);
    ck_regions(1, MIB, 1000);
    end();
}
END_TEST

// Leaving at about the moment at which the region is there: now and then the loop hears of both in
// one turn.
START_TEST(a_client_that_leaves_as_its_region_comes_leaves_nothing) {
    setenv("ATTND_SLOW_REGIONS", "1", 1);
    begin_with(NULL);
    for (int i = 0; i < 600; i++) {
        service_client r;
        ask_only(&r, MIB);
        usleep((useconds_t)(400 + i % 100 * 20));
        leave(&r);
    }
    ck_nothing();
    ck_assert_double_ge(e2e_stat(&c, "service.regions_made"), 10);
    end();
}
END_TEST

START_TEST(a_session_that_ends_takes_a_region_under_way_with_it) {
    e2e_client other;
    begin_slow(NULL);
    e2e_connect(&other, d.url);
    char *text = e2e_json(&other, PROTO_HELLO, "{}");
    proto_attach join = attach;
    unsigned byte;
    const char *secret = strstr(text, "\"secret\":\"") + strlen("\"secret\":\"");
    join.session = strtoull(strstr(text, "\"session\":\"") + strlen("\"session\":\""), NULL, 16);
    for (int i = 0; i < 16; i++) {
        ck_assert_int_eq(sscanf(secret + 2 * i, "%2x", &byte), 1);
        join.secret[i] = (uint8_t)byte;
    }
    const struct {
        proto_attach attach;
        proto_region_ask region;
    } packet = {join, {.bytes = MIB, .num_flags = 1}};
    service_client r = {.region = NULL};
    ck_assert(ring_client_connect(&r.ring, path));
    ck_assert_int_eq(send(r.ring.fd, &packet, sizeof(packet), MSG_NOSIGNAL), sizeof(packet));
    e2e_await_stat(&c, "service.regions", 1, SLOW_MS / 2);
    e2e_close(&other);
    ck_assert(ring_client_closed(&r.ring, 5000));
    ring_client_close(&r.ring);
    free(text);
    ck_nothing();
    end();
}
END_TEST

// A region that takes longer than a connection may stay without a session does not cost it.
START_TEST(the_time_for_hello_begins_when_the_region_is_there) {
    static const char *const flags[] = {"--set", "limits.hello_timeout=100ms", NULL};
    begin_slow(flags);
    service_open(&s, path, MIB, FLAGS);
    service_client mute;
    const proto_region_ask ask = {.bytes = MIB, .num_flags = 1};
    ATTND_CK_OK(service_ask(&mute, path, &attach, &ask));
    ck_assert(ring_client_closed(&mute.ring, 5000)); // it says none
    service_close(&mute);
    end();
}
END_TEST

// ---- stopping

START_TEST(sigterm_ends_what_is_under_way) {
    enum { ASKERS = 3 };
    service_client r[ASKERS];
    begin_slow(NULL);
    for (int i = 0; i < ASKERS; i++) {
        ask_only(&r[i], MIB);
    }
    e2e_await_stat(&c, "service.regions", ASKERS, SLOW_MS / 2);
    e2e_close(&c); // or its last reply would be waited for
    kill(d.pid, SIGTERM);
    for (int i = 0; i < ASKERS; i++) {
        ATTND_CK_ERR(answer_of(&r[i]), ATTND_ESHUTDOWN);
        ck_assert(ring_client_closed(&r[i].ring, 5000));
        ring_client_close(&r[i].ring);
    }
    ck_assert_int_eq(e2e_wait(&d, 10000), 0); // the fake device asserts that no region is left
    free(hello);
    e2e_remove(&d);
}
END_TEST

// Regions of clients that are there when it stops take their time, too.
START_TEST(sigterm_frees_what_clients_have) {
    begin_slow(NULL);
    service_join(&s, path, hello, MIB, FLAGS);
    service_client r[3];
    for (int i = 0; i < 3; i++) {
        service_open(&r[i], path, MIB, FLAGS);
    }
    ck_regions(4, 4 * MIB, 1000);
    e2e_close(&c);
    kill(d.pid, SIGTERM);
    ck_assert_int_eq(e2e_wait(&d, 10000), 0);
    for (int i = 0; i < 3; i++) {
        service_close(&r[i]);
    }
    service_close(&s);
    free(hello);
    e2e_remove(&d);
}
END_TEST

// ---- bounds

static const char *const three[] = {"--set", "limits.region_memory=1MiB", "--set",
                                    "limits.all_regions_memory=3MiB", NULL};

// Those that are being made count, and bytes as they are rounded up: 1 byte is a page.
START_TEST(who_asks_at_once_gets_no_more_than_there_is) {
    enum { ASKERS = 8, ROUNDS = 2 };
    service_client r[ASKERS];
    begin_slow(three);
    for (int round = 0; round < ROUNDS; round++) {
        int given = 0;
        uint64_t from = e2e_now_ms();
        for (int i = 0; i < ASKERS; i++) {
            ask_only(&r[i], MIB);
        }
        ck_regions(3, 3 * MIB, SLOW_MS / 2);
        for (int i = ASKERS - 1; i >= 0; i--) { // who is refused need not wait for those
            attnd_err err = answer_of(&r[i]);
            given += err == ATTND_OK;
            ck_assert(err == ATTND_OK || err == ATTND_EBUSY);
            ck_assert(err == ATTND_OK || e2e_now_ms() - from < 3 * SLOW_MS / 2);
        }
        ck_assert_int_eq(given, 3);
        ck_regions(3, 3 * MIB, 1000);
        for (int i = 0; i < ASKERS; i++) {
            leave(&r[i]);
        }
        ck_nothing();
    }
    service_client last[3];
    ask_only(&last[0], MIB);
    ask_only(&last[1], MIB);
    ask_only(&last[2], MIB - 4095); // a MiB when it is rounded up
    ck_regions(3, 3 * MIB, SLOW_MS / 2);
    ask_only(&r[0], 1);
    ATTND_CK_ERR(answer_of(&r[0]), ATTND_EBUSY);
    ring_client_close(&r[0].ring);
    for (int i = 0; i < 3; i++) {
        ATTND_CK_OK(answer_of(&last[i]));
        leave(&last[i]);
    }
    ck_nothing();
    end();
}
END_TEST

START_TEST(a_region_that_cannot_be_made_does_not_count) {
    service_client r;
    begin_slow(three);
    for (int i = 0; i < 3; i++) {
        ask_only(&r, FAULTY_REGION);
        ck_regions(1, 4096, SLOW_MS / 2);
        ATTND_CK_ERR(answer_of(&r), ATTND_ENOMEM);
        ck_assert(ring_client_closed(&r.ring, 5000));
        ring_client_close(&r.ring);
        ck_nothing();
    }
    ck_assert_double_eq(e2e_stat(&c, "service.regions_made"), 0);
    end();
}
END_TEST

// ---- what a client may keep

// fork_keeper starts a process that attaches, closes the connection without a word, and has the
// region's memory mapped from then on.
static pid_t fork_keeper(int *ready) {
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        service_client r;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        service_open(&r, path, MIB, 1);
        close(r.ring.fd);
        memset(r.region, 1, MIB); // it is still there
        if (write(fds[1], "x", 1) == 1) {
            pause();
        }
        _exit(0);
    }
    close(fds[1]);
    *ready = fds[0];
    return pid;
}

START_TEST(a_region_counts_until_its_client_lets_go_or_is_gone) {
    int ready;
    char byte;
    e2e_dir(&d);
    e2e_start(&d, three);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    pid_t keeper = fork_keeper(&ready);
    ck_assert_int_eq(read(ready, &byte, 1), 1);
    e2e_connect(&c, d.url);
    hello = e2e_json(&c, PROTO_HELLO, "{}");
    c.id = 100;
    e2e_await_stat(&c, "service.regions_kept", 1, 5000);
    ck_regions(1, MIB, 0);
    ck_assert_uint_eq(count_maps("fake-region"), 0); // the daemon has let go
    service_client r[3];
    const proto_region_ask ask = {.bytes = MIB, .num_flags = 1};
    for (int i = 0; i < 3; i++) {
        ATTND_CK_ERR(service_ask(&r[i], path, &attach, &ask), i < 2 ? ATTND_OK : ATTND_EBUSY);
    }
    service_close(&r[2]);
    for (int i = 0; i < 20; i++) { // who says that it left may come again, as often as it likes
        service_close(&r[0]);
        ck_regions(2, 2 * MIB, 1000);
        ATTND_CK_OK(service_ask(&r[0], path, &attach, &ask));
    }
    kill(keeper, SIGKILL);
    ck_assert_int_eq(waitpid(keeper, NULL, 0), keeper);
    close(ready);
    e2e_await_stat(&c, "service.regions_kept", 0, 1000);
    ck_regions(2, 2 * MIB, 0);
    ATTND_CK_OK(service_ask(&r[2], path, &attach, &ask));
    for (int i = 0; i < 3; i++) {
        service_close(&r[i]);
    }
    ck_nothing();
    end();
}
END_TEST

// That a client left is heard, however many doorbells are unread before it.
START_TEST(a_client_that_leaves_behind_doorbells_does_not_count) {
    begin_with(NULL);
    for (int i = 0; i < 12; i++) {
        service_client r;
        e2e_client session;
        e2e_connect(&session, d.url);
        char *text = e2e_json(&session, PROTO_HELLO, "{}");
        service_join(&r, path, text, MIB, 1);
        for (int bell = 0; bell < 200; bell++) {
            ck_assert_int_eq(send(r.ring.fd, "", 1, MSG_NOSIGNAL), 1);
        }
        kill(d.pid, SIGSTOP); // so that it finds all of that, in whatever order
        e2e_close(&session);
        leave(&r);
        kill(d.pid, SIGCONT);
        free(text);
        ck_nothing();
    }
    end();
}
END_TEST

// Its process lives on, but it was not given any.
START_TEST(a_region_that_could_not_be_sent_does_not_count) {
    begin_slow(NULL);
    for (int i = 0; i < 3; i++) {
        service_client r;
        ask_only(&r, MIB);
        ck_assert_int_eq(shutdown(r.ring.fd, SHUT_RD), 0);
        ck_regions(1, MIB, SLOW_MS / 2);
        ck_nothing();
        ck_assert_double_eq(e2e_stat(&c, "service.regions_made"), i + 1);
        ring_client_close(&r.ring);
    }
    end();
}
END_TEST

// A daemon that stops does not wait for the processes of such clients.
START_TEST(what_is_kept_does_not_hold_up_the_end) {
    begin();
    service_client r;
    service_open(&r, path, MIB, 1);
    close(r.ring.fd);
    r.ring.fd = -1;
    e2e_await_stat(&c, "service.regions_kept", 1, 5000);
    end();
    service_close(&r);
}
END_TEST

static Suite *suite(void) {
    Suite *suite_of = suite_create("service_attach");
    TCase *tc = tcase_create("attach");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, others_keep_their_latency);
    tcase_add_test(tc, a_client_killed_while_its_region_is_made_leaves_nothing);
    tcase_add_test(tc, a_client_that_leaves_as_its_region_comes_leaves_nothing);
    tcase_add_test(tc, a_session_that_ends_takes_a_region_under_way_with_it);
    tcase_add_test(tc, the_time_for_hello_begins_when_the_region_is_there);
    tcase_add_test(tc, sigterm_ends_what_is_under_way);
    tcase_add_test(tc, sigterm_frees_what_clients_have);
    tcase_add_test(tc, who_asks_at_once_gets_no_more_than_there_is);
    tcase_add_test(tc, a_region_that_cannot_be_made_does_not_count);
    tcase_add_test(tc, a_region_counts_until_its_client_lets_go_or_is_gone);
    tcase_add_test(tc, a_client_that_leaves_behind_doorbells_does_not_count);
    tcase_add_test(tc, a_region_that_could_not_be_sent_does_not_count);
    tcase_add_test(tc, what_is_kept_does_not_hold_up_the_end);
    suite_add_tcase(suite_of, tc);
    return suite_of;
}

CHECK_MAIN(suite)
