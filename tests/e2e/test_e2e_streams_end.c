// Service mode when something ends: the daemon, the client, a step, at every stage of a hand-over.
// Every wait in a stream ends within a second, with an error for whoever asks, and nothing is left
// with the daemon.  Streams as in test_e2e_streams.c.
#include <grp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/service_play.h"

enum {
    IN_TIME_MS = 1000,
    SYNC_MS = 20000,
    DEADLINE_MS = 100,
    IDLE = 64, // sessions that never become ready
    NOBODY = 65534,
};

typedef enum stage {
    OPEN,     // a step is open
    ARMED,    // the daemon knows of its attends
    LAUNCHED, // the graph is in the stream, and not yet at its first attend
    WAITING,  // the stream waits for a done flag
    DRAINING, // the step is over, and the daemon lets the stream run to its end
    STAGES,
} stage;

static const char *const flags[] = {
    "--set", "cache.memory=64MiB",       "--set", "cache.slab=4MiB",
    "--set", "compute.deterministic=on", "--set", "server.socket_mode=0666",
    NULL};
static e2e_daemon d;
enum { ARRIVED, GO };
static atomic_uint *reached; // [2], shared with children

static void start(bool keeper) {
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    d.keeper = keeper;
    e2e_start(&d, flags);
}

static void setup(void) {
    start(false);
}

static void await_nothing_left(void) {
    e2e_client c;
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    e2e_await_stat(&c, "blocks.in_use", 0, IN_TIME_MS);
    e2e_close(&c);
    ck_assert(!e2e_log_has(&d, "accounting"));
}

// ready is a client with a captured graph.
typedef struct ready {
    play p;
    uint64_t captured;
    service_graph *graph;
} ready;

static void get_ready(ready *r, play_how how) {
    static uint16_t out[PLAY_OUT];
    play_begin(&r->p, d.url, how);
    play_forward(&r->p, 7, out);
    r->captured = play_step(&r->p, 1);
    r->graph = play_graph(&r->p, r->captured);
    ATTND_CK_OK(attnd_step_cancel(r->p.c, r->captured, &r->p.info));
}

static void end_ready(ready *r) {
    play_end(&r->p, IN_TIME_MS);
    service_graph_free(r->graph);
}

static attnd_err arm(ready *r, uint64_t step) {
    return attnd_step_replay(r->p.c, r->captured, step, r->p.stream, &r->p.info);
}

static uint64_t reach(ready *r, stage s) {
    uint64_t step;
    ATTND_CK_OK(play_try_step(&r->p, 1, s == DRAINING ? DEADLINE_MS : 0, &step));
    play_fill(&r->p, r->p.len, 1);
    ck_assert(service_sync(r->p.stream, SYNC_MS));
    if (s != OPEN && s != WAITING) { // who waits is one of whom the daemon does not know
        ATTND_CK_OK(arm(r, step));
    }
    if (s == DRAINING) {
        e2e_sleep_ms(3 * DEADLINE_MS);
    }
    if (s >= LAUNCHED) {
        service_pause(r->p.stream, s == WAITING ? 0 : 100);
        service_launch(r->graph, r->p.stream);
    }
    if (s == WAITING) {
        ck_assert(!service_sync(r->p.stream, 50));
    }
    return step;
}

static void kill_daemon(void) {
    kill(d.pid, SIGKILL);
    ck_assert_int_eq(e2e_wait(&d, 10000), 128 + SIGKILL);
}

START_TEST(a_daemon_that_is_killed_ends_every_wait) {
    ready r;
    uint64_t step;
    get_ready(&r, PLAY_REGION);
    reach(&r, (stage)_i);
    kill_daemon();
    ck_assert(service_sync(r.p.stream, IN_TIME_MS));
    ATTND_CK_ERR(play_try_step(&r.p, 1, 0, &step), ATTND_ECONN);
    service_launch(r.graph, r.p.stream); // also of what comes later
    ck_assert(service_sync(r.p.stream, IN_TIME_MS));
    end_ready(&r);
    e2e_remove(&d);
}
END_TEST

START_TEST(closing_ends_every_wait) {
    ready r;
    get_ready(&r, PLAY_COPIED);
    reach(&r, (stage)_i);
    end_ready(&r);
    await_nothing_left();
    e2e_stop(&d);
}
END_TEST

static void *end_slowly(void *arg) {
    end_ready(arg);
    return NULL;
}

// A region counts as long as the client's stream may use it.
START_TEST(a_region_counts_until_the_streams_have_ended) {
    ready r;
    e2e_client c;
    pthread_t closer;
    get_ready(&r, PLAY_COPIED);
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    ck_assert_double_eq(e2e_stat(&c, "service.regions"), 1);
    service_launch(r.graph, r.p.stream);
    service_pause(r.p.stream, 300);
    ck_assert_int_eq(pthread_create(&closer, NULL, end_slowly, &r), 0);
    e2e_sleep_ms(150);
    ck_assert_double_eq(e2e_stat(&c, "service.regions"), 1);
    ck_assert_double_eq(e2e_stat(&c, "service.regions_kept"), 0);
    pthread_join(closer, NULL);
    e2e_await_stat(&c, "service.regions", 0, IN_TIME_MS);
    e2e_close(&c);
    await_nothing_left();
    e2e_stop(&d);
}
END_TEST

// The worker is killed, and the next one has the cache.
START_TEST(a_client_goes_on_with_the_next_daemon) {
    static uint16_t there[PLAY_OUT], here[PLAY_OUT];
    play a;
    ready r;
    uint64_t step;
    start(true);
    get_ready(&r, PLAY_COPIED);
    reach(&r, WAITING);
    e2e_kill_worker(&d);
    ck_assert(service_sync(r.p.stream, IN_TIME_MS));
    ATTND_CK_ERR(play_try_step(&r.p, 1, 0, &step), ATTND_ECONN);
    e2e_await_ready(&d);
    ATTND_CK_OK(attnd_reconnect(r.p.c, &r.p.info));
    step = play_step(&r.p, 1);
    ATTND_CK_ERR(arm(&r, step), ATTND_ESTALE); // its addresses are gone
    ck_assert_str_eq(r.p.info.field, "captured");
    ATTND_CK_OK(attnd_step_cancel(r.p.c, step, &r.p.info));
    play_forward(&r.p, 1, here);
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_forward(&a, 7, there);
    play_forward(&a, 1, there);
    ck_assert_mem_eq(there, here, PLAY_LAYERS * PLAY_SEQS * PLAY_Q_ROW * 2);
    play_end(&a, 0);
    end_ready(&r);
    e2e_stop(&d);
}
END_TEST

// ---- clients that are killed

static void play_child(stage s) {
    ready r;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    get_ready(&r, PLAY_REGION);
    reach(&r, s);
    atomic_store(&reached[ARRIVED], 1);
    for (;;) {
        pause();
    }
}

static void kill_child_at(stage s) {
    atomic_store(&reached[ARRIVED], 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        play_child(s);
        _exit(1);
    }
    uint64_t until = e2e_now_ms() + SYNC_MS;
    while (!atomic_load(&reached[ARRIVED]) && e2e_now_ms() < until &&
           waitpid(pid, NULL, WNOHANG) == 0) {
        usleep(200);
    }
    ck_assert_uint_eq(atomic_load(&reached[ARRIVED]), 1);
    kill(pid, SIGKILL);
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
}

START_TEST(a_client_that_is_killed_leaves_nothing) {
    static uint16_t there[PLAY_OUT], here[PLAY_OUT];
    play a, b;
    kill_child_at((stage)_i);
    await_nothing_left();
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_begin(&b, d.url, PLAY_COPIED);
    play_forward(&a, PLAY_MAX, there);
    play_forward(&b, PLAY_MAX, here);
    ck_assert_mem_eq(there, here, sizeof(here));
    play_end(&a, 0);
    play_end(&b, IN_TIME_MS);
    await_nothing_left();
    e2e_stop(&d);
}
END_TEST

// One MPS server has one fate: who is killed in a kernel ends the contexts of all (attnd.conf,
// wait_kernels).  What is left is the cache.
static void poke_device(void) {
    static uint16_t out[PLAY_OUT];
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) { // its request may be the first to meet the end of the daemon's context
        play a;
        play_begin(&a, d.url, PLAY_MESSAGES);
        play_forward(&a, 1, out);
        _exit(0);
    }
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
}

START_TEST(the_cache_outlives_a_client_that_is_killed_while_it_waits) {
    enum { BACK_MS = 60000 };
    static uint16_t there[PLAY_OUT], here[PLAY_OUT];
    play a, b;
    start(true);
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_forward(&a, 7, here);
    kill_child_at(WAITING);
    poke_device();
    e2e_sleep_ms(1000); // until the daemon has ended, if it does
    uint64_t until = e2e_now_ms() + BACK_MS;
    while (attnd_reconnect(a.c, &a.info) && e2e_now_ms() < until) {
        e2e_sleep_ms(50);
    }
    play_forward(&a, 1, here);
    play_begin(&b, d.url, PLAY_MESSAGES);
    play_forward(&b, 7, there);
    play_forward(&b, 1, there);
    ck_assert_mem_eq(there, here, PLAY_LAYERS * PLAY_SEQS * PLAY_Q_ROW * 2);
    play_end(&a, 0);
    play_end(&b, 0);
    await_nothing_left();
    e2e_stop(&d);
}
END_TEST

// ---- steps that end

// go_on wants the client to be as if nothing had been.
static void go_on(ready *r) {
    static uint16_t there[PLAY_OUT], here[PLAY_OUT];
    play a;
    play_begin(&a, d.url, PLAY_MESSAGES);
    play_forward(&a, 7, there);
    play_forward(&a, 1, there);
    uint64_t step = play_step(&r->p, 1);
    play_fill(&r->p, r->p.len, 1);
    ATTND_CK_OK(arm(r, step));
    service_launch(r->graph, r->p.stream);
    play_read(&r->p, 1, here);
    play_commit(&r->p, step, 1);
    ck_assert(service_sync(r->p.stream, SYNC_MS));
    ck_assert_mem_eq(there, here, PLAY_LAYERS * PLAY_SEQS * PLAY_Q_ROW * 2);
    play_end(&a, 0);
    end_ready(r);
    await_nothing_left();
    e2e_stop(&d);
}

START_TEST(a_step_that_expires_ends_its_waits) {
    ready r;
    get_ready(&r, PLAY_REGION);
    uint64_t step = reach(&r, DRAINING);
    ck_assert(service_sync(r.p.stream, IN_TIME_MS));
    ck_assert_int_lt(play_try_commit(&r.p, step, 1), 0);
    attnd_step_cancel(r.p.c, step, NULL);
    go_on(&r);
}
END_TEST

// A layer that the model has not got: the daemon finds out when the stream waits already.
START_TEST(an_attend_that_is_refused_ends_its_wait) {
    ready r;
    get_ready(&r, PLAY_REGION);
    uint64_t step = play_step(&r.p, 1);
    attnd_attend_args args = {.step = step,
                              .model = r.p.model,
                              .layer = 99,
                              .rows = PLAY_SEQS,
                              .new_rows = PLAY_SEQS,
                              .q = r.p.device[0].qkv,
                              .k = r.p.device[0].qkv,
                              .v = r.p.device[0].qkv,
                              .out = r.p.device[0].out,
                              .stream = r.p.stream};
    ATTND_CK_OK(attnd_attend(r.p.c, &args, NULL, &r.p.info));
    ck_assert(service_sync(r.p.stream, IN_TIME_MS));
    ATTND_CK_ERR(play_try_commit(&r.p, step, 1), ATTND_EINVAL);
    ck_assert_ptr_nonnull(strstr(r.p.info.field, "layer"));
    ATTND_CK_OK(attnd_step_cancel(r.p.c, step, &r.p.info));
    go_on(&r);
}
END_TEST

// ---- sessions that never become ready

// tokens_a_second runs tokens for a while.
static double tokens_a_second(ready *r) {
    enum { LONG = 200, WHILE_MS = 700 };
    uint64_t begin = e2e_now_ms(), now;
    uint32_t tokens = 0;
    while ((now = e2e_now_ms()) < begin + WHILE_MS) {
        uint64_t step = play_step(&r->p, 1);
        ATTND_CK_OK(arm(r, step));
        service_launch(r->graph, r->p.stream);
        play_commit(&r->p, step, 1);
        tokens++;
        for (int i = 0; i < PLAY_SEQS && r->p.len >= LONG; i++) {
            ATTND_CK_OK(attnd_seq_truncate(r->p.c, r->p.seqs[i], 7, &r->p.info));
        }
        r->p.len = r->p.len >= LONG ? 7 : r->p.len;
    }
    ck_assert(service_sync(r->p.stream, SYNC_MS));
    return tokens * 1000.0 / (double)(now - begin);
}

static double best_of(ready *r, int times) {
    double best = 0;
    for (int i = 0; i < times; i++) {
        double rate = tokens_a_second(r);
        best = rate > best ? rate : best;
    }
    return best;
}

static int num_idle(void) {
    return getenv("ATTND_E2E_ALONE") ? IDLE : IDLE / 8;
}

// be_idle has sessions that are armed and never become ready, once `go` says so.
static void be_idle(void) {
    static ready idle[IDLE];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (!atomic_load(&reached[GO])) {
        usleep(1000);
    }
    for (int i = 0; i < num_idle(); i++) {
        get_ready(&idle[i], PLAY_REGION);
        reach(&idle[i], ARMED);
    }
    atomic_store(&reached[ARRIVED], 1);
    for (;;) {
        pause();
    }
}

static void await_idle(void) {
    atomic_store(&reached[GO], 1);
    uint64_t until = e2e_now_ms() + SYNC_MS;
    while (!atomic_load(&reached[ARRIVED]) && e2e_now_ms() < until) {
        usleep(1000);
    }
    ck_assert_uint_eq(atomic_load(&reached[ARRIVED]), 1);
    e2e_sleep_ms(200); // until the daemon looks at them more rarely
}

// A share is asked for where ATTND_E2E_ALONE says that nothing else runs, on a GPU: the fake one's
// own checks take longer with every region.  The sessions are of another process.
START_TEST(sessions_that_never_become_ready_cost_next_to_nothing) {
    static ready r;
    const double asked = getenv("ATTND_E2E_ALONE") ? 0.95 : 0;
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        be_idle();
        _exit(1);
    }
    get_ready(&r, PLAY_REGION);
    best_of(&r, 1);
    double before = best_of(&r, 3);
    await_idle();
    double after = best_of(&r, 3);
    printf("tokens a second: %.0f alone, %.0f beside %d that are armed: %.3f\n", before, after,
           num_idle(), after / before);
    fflush(stdout); // a failure ends the process
    ck_assert_double_ge(after / before, asked);
    kill(pid, SIGKILL);
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
    end_ready(&r);
    await_nothing_left();
    e2e_stop(&d);
}
END_TEST

// ---- another user

static void play_as_nobody(void) {
    static uint16_t out[PLAY_OUT];
    play b;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (setgroups(0, NULL) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0) {
        _exit(2);
    }
    alarm(10); // one MPS server serves one user: another one may wait for it for ever
    play_begin(&b, d.url, PLAY_REGION);
    play_forward(&b, 5, out);
    for (uint32_t s = 0; s < PLAY_SEQS; s++) {
        play_check(out + s * 5 * PLAY_Q_ROW, s, 0);
    }
    play_end(&b, IN_TIME_MS);
    _exit(0);
}

// Another user is served; under MPS, which serves one, it need not be, but disturbs nobody.
START_TEST(another_user_is_served_or_disturbs_nobody) {
    static uint16_t out[PLAY_OUT];
    play b;
    int status;
    if (getuid() != 0) {
        e2e_stop(&d);
        return;
    }
    ck_assert_int_eq(chmod(d.dir, 0755), 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        play_as_nobody();
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    bool mps = getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL, served = status == 0;
    printf("another user%s: %s\n", mps ? " under MPS" : "",
           served                ? "served"
           : WIFSIGNALED(status) ? "waits"
                                 : "refused");
    ck_assert(served || mps);
    play_begin(&b, d.url, PLAY_REGION);
    play_forward(&b, 5, out);
    play_check(out, 0, 0);
    play_end(&b, IN_TIME_MS);
    await_nothing_left();
    e2e_stop(&d);
}
END_TEST

// add_case makes a case whose tests begin with a daemon, if it has one.
static TCase *add_case(Suite *s, const char *name, bool begins) {
    TCase *tc = tcase_create(name);
    tcase_set_timeout(tc, 60);
    if (begins) {
        tcase_add_checked_fixture(tc, setup, NULL);
    }
    suite_add_tcase(s, tc);
    return tc;
}

static Suite *suite(void) {
    Suite *s = suite_create("e2e_streams_end");
    reached =
        mmap(NULL, 2 * sizeof(*reached), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TCase *tc = add_case(s, "daemon", true);
    tcase_add_loop_test(tc, a_daemon_that_is_killed_ends_every_wait, 0, STAGES);
    tc = add_case(s, "client", true);
    tcase_add_loop_test(tc, a_client_that_is_killed_leaves_nothing, 0, STAGES);
    tc = add_case(s, "steps", true);
    tcase_add_loop_test(tc, closing_ends_every_wait, 0, STAGES);
    tcase_add_test(tc, a_region_counts_until_the_streams_have_ended);
    tcase_add_test(tc, a_step_that_expires_ends_its_waits);
    tcase_add_test(tc, an_attend_that_is_refused_ends_its_wait);
    tc = add_case(s, "rate", true);
    tcase_add_test(tc, sessions_that_never_become_ready_cost_next_to_nothing);
    tc = add_case(s, "users", true);
    tcase_add_test(tc, another_user_is_served_or_disturbs_nobody);
    tc = add_case(s, "keeper", false);
    tcase_add_test(tc, a_client_goes_on_with_the_next_daemon);
    tc = add_case(s, "outlives", false);
    tcase_add_test(tc, the_cache_outlives_a_client_that_is_killed_while_it_waits);
    return s;
}

CHECK_MAIN(suite)
