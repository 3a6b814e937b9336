// The end of clients that attend in their own process: killed, too late, or still there when the
// daemon is not.
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/e2e/inproc_fixture.h"

// in_child runs what in another process, which ends with it or with us.
static pid_t in_child(void (*what)(void)) {
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        what();
        _exit(0);
    }
    return pid;
}

static void reap(pid_t pid) {
    kill(pid, SIGKILL);
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
}

static atomic_uint *turns; // shared with children: steps that were committed

static void play_for_ever(void) {
    static outputs o;
    player p;
    begin(&p, true);
    for (uint32_t len = 0;; len += 3) {
        attnd_step_seq s = {.seq = p.seq, .new_len = 3, .reserve = 20};
        if (len > 300) {
            ATTND_CK_OK(attnd_seq_truncate(p.c, p.seq, 0, &info));
            len = 0;
        }
        uint64_t step = open_step(&p, &s, 1);
        attend_all(&p, step, len, 3, true, &o);
        commit(&p, step, (attnd_accept){.accepted = 3}, len + 3);
        atomic_fetch_add(turns, 1);
    }
}

static void await_turns(uint32_t num) {
    uint64_t until = e2e_now_ms() + 10000;
    while (atomic_load(turns) < num && e2e_now_ms() < until) {
        usleep(200);
    }
    ck_assert_uint_ge(atomic_load(turns), num);
}

// Killed anywhere between two instructions, again and again, beside a client that goes on.
START_TEST(a_killed_client_leaves_nothing) {
    enum { KILLS = 40 };
    static outputs there, here;
    e2e_start(&d, flags);
    for (int i = 0; i < KILLS; i++) {
        atomic_store(turns, 0);
        pid_t pid = in_child(play_for_ever);
        await_turns(1);
        usleep((useconds_t)(rand() % 3000));
        reap(pid);
    }
    await_stat("blocks.in_use", 0, 1000);
    await_stat("sessions", 1, 1000); // whoever asks
    ck_assert(!e2e_log_has(&d, "accounting"));
    player a, b;
    begin(&a, false);
    begin(&b, true);
    attnd_step_seq s = {.seq = a.seq, .new_len = 20}, t = {.seq = b.seq, .new_len = 20};
    uint64_t step = open_step(&a, &s, 1);
    attend_all(&a, step, 0, 20, true, &there);
    step = open_step(&b, &t, 1);
    attend_all(&b, step, 0, 20, true, &here);
    for (int l = 0; l < LAYERS; l++) {
        ck_assert_mem_eq(there.out[l], here.out[l], 20 * OUT_ROW * sizeof(float));
    }
    attnd_close(a.c);
    attnd_close(b.c);
    e2e_stop(&d);
}
END_TEST

// hang_up cuts the connections of the process.
static void hang_up(void) {
    for (int fd = 3; fd < 64; fd++) {
        shutdown(fd, SHUT_RDWR); // which only sockets can
    }
}

// lose_connection hangs up without a word, and goes on writing to the slots of its step.
static void lose_connection(void) {
    static outputs o;
    player p;
    begin(&p, true);
    attnd_step_seq s = {.seq = p.seq, .new_len = 30};
    uint64_t step = open_step(&p, &s, 1);
    attend_all(&p, step, 0, 30, true, &o);
    hang_up();
    atomic_fetch_add(turns, 1);
    for (;;) {
        attend(&p, step, 0, 1000, 30, true, &o);
    }
}

START_TEST(slots_are_not_given_out_while_their_writer_lives) {
    e2e_start(&d, flags);
    atomic_store(turns, 0);
    pid_t pid = in_child(lose_connection);
    await_turns(1);
    e2e_sleep_ms(300);
    // 30 tokens in blocks of 8, two groups
    ck_assert_double_eq(stat_of("blocks.in_use"), 8);
    await_stat("sessions", 2, 1000); // whoever asked before is going
    reap(pid);
    await_stat("blocks.in_use", 0, 1000);
    e2e_stop(&d);
}
END_TEST

enum { LATE_MS = 150, LATE_ROWS = 30, LATE_BLOCKS = 8 }; // blocks of 8 tokens, two groups

static uint64_t open_late(player *p) {
    uint64_t step = 0;
    attnd_step_seq s = {.seq = p->seq, .new_len = LATE_ROWS};
    attnd_step_opts opts = {.deadline_ms = LATE_MS};
    ATTND_CK_OK(attnd_step_open(p->c, p->model, &s, 1, &opts, &step, &info));
    return step;
}

// commit_late tries to; by a step that carries the commit, of another sequence, when carried.
static void commit_late(player *p, uint64_t step, bool carried) {
    attnd_accept accept = {.accepted = LATE_ROWS};
    attnd_step_seq s = {.seq = p->seq, .new_len = 1};
    attnd_step_opts opts = {.commit_step = step, .commit_accept = &accept, .num_commit = 1};
    ATTND_CK_ERR(carried ? attnd_step_open(p->c, p->model, &s, 1, &opts, &step, &info)
                         : attnd_step_commit(p->c, step, &accept, 1, NULL, &info),
                 ATTND_ESTALE);
    ck_assert_str_eq(info.field, carried ? "commit.step" : "step");
}

// Past its deadline a step does not count, and its blocks are its own until it is done with.
START_TEST(a_late_step_is_held_until_its_client_is_done) {
    enum { COMMIT, CARRIED, CANCEL };
    static outputs o;
    player p;
    e2e_start(&d, flags);
    begin(&p, true);
    uint64_t step = open_late(&p), next = 0;
    ATTND_CK_OK(attend(&p, step, 0, 0, LATE_ROWS, true, &o));
    e2e_sleep_ms(LATE_MS + 200);
    ck_assert(e2e_log_has(&d, "past its deadline"));
    ck_assert_double_eq(stat_of("blocks.in_use"), LATE_BLOCKS);
    attnd_step_seq s = {.seq = p.seq, .new_len = 1};
    ATTND_CK_ERR(attnd_step_open(p.c, p.model, &s, 1, NULL, &next, &info), ATTND_EBUSY);
    attend_all(&p, step, 0, LATE_ROWS, true, &o); // nobody is harmed
    if (_i == CANCEL) {
        ATTND_CK_OK(attnd_step_cancel(p.c, step, &info));
    } else {
        commit_late(&p, step, _i == CARRIED);
    }
    ck_assert_double_eq(stat_of("blocks.in_use"), 0);
    ATTND_CK_ERR(attend(&p, step, 0, 0, LATE_ROWS, true, &o), ATTND_ESTALE);
    ATTND_CK_ERR(attnd_step_cancel(p.c, step, &info), ATTND_ESTALE);
    s = (attnd_step_seq){.seq = p.seq, .new_len = 2};
    step = open_step(&p, &s, 1);
    ck_assert_uint_eq(s.committed, 0); // nothing of it is left
    attend_all(&p, step, 0, 2, true, &o);
    commit(&p, step, (attnd_accept){.accepted = 2}, 2);
    attnd_close(p.c);
    await_stat("blocks.in_use", 0, 1000);
    e2e_stop(&d);
}
END_TEST

static void be_late_for_ever(void) {
    static outputs o;
    player p;
    begin(&p, true);
    uint64_t step = open_late(&p);
    atomic_fetch_add(turns, 1);
    for (;;) {
        attend(&p, step, 0, 0, LATE_ROWS, true, &o);
    }
}

START_TEST(a_late_step_ends_with_its_process) {
    e2e_start(&d, flags);
    atomic_store(turns, 0);
    pid_t pid = in_child(be_late_for_ever);
    await_turns(1);
    e2e_sleep_ms(LATE_MS + 200);
    ck_assert(e2e_log_has(&d, "past its deadline"));
    ck_assert_double_eq(stat_of("blocks.in_use"), LATE_BLOCKS);
    reap(pid);
    await_stat("blocks.in_use", 0, 1000);
    e2e_stop(&d);
}
END_TEST

// The daemon ends under a client in the middle of a step; its successor opens no step before the
// client has attached again.
static void outlive_the_daemon(void) {
    static outputs o;
    player p;
    begin(&p, true);
    attnd_step_seq s = {.seq = p.seq, .new_len = 30};
    uint64_t step = open_step(&p, &s, 1);
    attend_all(&p, step, 0, 30, true, &o);
    atomic_fetch_add(turns, 1);
    while (atomic_load(turns) < 2) {
        ATTND_CK_OK(attend(&p, step, 0, 1000, 30, true, &o)); // it has not noticed
    }
    attnd_accept accept = {.accepted = 30};
    ATTND_CK_ERR(attnd_step_commit(p.c, step, &accept, 1, NULL, &info), ATTND_ECONN);
    ATTND_CK_OK(attnd_reconnect(p.c, &info));
    ATTND_CK_ERR(attnd_step_commit(p.c, step, &accept, 1, NULL, &info), ATTND_ESTALE);
    step = open_step(&p, &s, 1);
    attend_all(&p, step, 0, 30, true, &o);
    commit(&p, step, accept, 30);
    atomic_fetch_add(turns, 1);
    pause();
}

// come_back loses its connection in the middle of a step, and connects again.
static void come_back(void) {
    static outputs o;
    player p;
    begin(&p, true);
    attnd_step_seq s = {.seq = p.seq, .new_len = 30};
    uint64_t step = open_step(&p, &s, 1);
    attend_all(&p, step, 0, 30, true, &o);
    hang_up();
    e2e_sleep_ms(200); // or the daemon looks into the ring once more
    attnd_accept accept = {.accepted = 30};
    ATTND_CK_ERR(attnd_step_commit(p.c, step, &accept, 1, NULL, &info), ATTND_ECONN);
    atomic_fetch_add(turns, 1);
    await_turns(2);
    ATTND_CK_ERR(attnd_reconnect(p.c, &info), ATTND_ESTALE); // a new session
    ck_assert_str_eq(info.field, "session");
    atomic_fetch_add(turns, 1);
    pause();
}

START_TEST(slots_are_given_back_when_their_writer_is_back) {
    e2e_start(&d, flags);
    atomic_store(turns, 0);
    pid_t pid = in_child(come_back);
    await_turns(1);
    e2e_sleep_ms(300);
    ck_assert_double_eq(stat_of("blocks.in_use"), 8);
    atomic_fetch_add(turns, 1);
    await_turns(3);
    await_stat("blocks.in_use", 0, 1000);
    reap(pid);
    e2e_stop(&d);
}
END_TEST

// Two clients of one process outlive the daemon.  One comes back, and a third comes: neither
// speaks for the other one.
static void be_two(void) {
    static outputs o;
    player a, b, c;
    begin(&a, true);
    begin(&b, true);
    attnd_step_seq s = {.seq = b.seq, .new_len = 30};
    uint64_t step = open_step(&b, &s, 1);
    attend_all(&b, step, 0, 30, true, &o);
    atomic_fetch_add(turns, 1);
    await_turns(2); // the daemon is another one
    attnd_accept accept = {.accepted = 1};
    ATTND_CK_ERR(attnd_step_commit(a.c, 1, &accept, 1, NULL, &info), ATTND_ECONN);
    ATTND_CK_OK(attnd_reconnect(a.c, &info));
    ATTND_CK_OK(dial(&c, true));
    attnd_close(a.c);
    ATTND_CK_OK(dial(&a, true));
    ATTND_CK_OK(attend(&b, step, 0, 1000, 30, true, &o)); // it has not noticed
    atomic_fetch_add(turns, 1);
    await_turns(4);
    attnd_close(b.c);            // it has noticed, and is not needed any more
    ATTND_CK_OK(dial(&b, true)); // its place is the next one's
    atomic_fetch_add(turns, 1);
    pause();
}

static pid_t worker_of(pid_t keeper) {
    char path[64];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)keeper, (int)keeper);
    FILE *f = fopen(path, "re");
    if (f && fscanf(f, "%d", &pid) != 1) {
        pid = 0;
    }
    if (f) {
        fclose(f);
    }
    return pid;
}

// restart kills the daemon's worker, and connects a client with a sequence to the next one.
static void restart(player *p) {
    kill(worker_of(d.pid), SIGKILL);
    uint64_t until = e2e_now_ms() + 10000;
    while (dial(p, false) && e2e_now_ms() < until) {
        e2e_sleep_ms(20);
    }
    open_model(p);
    ATTND_CK_OK(attnd_seq_create(p->c, p->model, &p->seq, &info));
}

// expect_no_step wants a step to be refused, because of that process, and the status to say so.
static void expect_no_step(player *p, pid_t pid) {
    char who[64], *stats;
    uint64_t step = 0;
    attnd_step_seq s = {.seq = p->seq, .new_len = 1};
    attnd_step_opts opts = {.deadline_ms = 100};
    ATTND_CK_ERR(attnd_step_open(p->c, p->model, &s, 1, &opts, &step, &info), ATTND_ENOSPC);
    snprintf(who, sizeof(who), "process %d may still write", (int)pid);
    ck_assert_ptr_nonnull(strstr(info.text, who));
    ATTND_CK_OK(attnd_admin(p->c, "stats", NULL, &stats, &info));
    snprintf(who, sizeof(who), "\"pid\":%d}", (int)pid);
    ck_assert_ptr_nonnull(strstr(stats, who));
    attnd_free(stats);
}

static void expect_nobody_to_wait_for(player *p) {
    char *stats;
    ATTND_CK_OK(attnd_admin(p->c, "stats", NULL, &stats, &info));
    ck_assert_ptr_nonnull(strstr(stats, "\"waits_for\":{\"processes\":0,\"pid\":0}"));
    attnd_free(stats);
}

START_TEST(a_restarted_daemon_waits_for_those_who_may_still_write) {
    bool comes_back = _i;
    player p;
    attnd_step_seq s = {.new_len = 1};
    d.keeper = true;
    e2e_start(&d, flags);
    atomic_store(turns, 0);
    pid_t pid = in_child(outlive_the_daemon);
    await_turns(1);
    restart(&p);
    expect_no_step(&p, pid);
    char who[64];
    snprintf(who, sizeof(who), "process %d of the run before", (int)pid);
    ck_assert(e2e_log_has(&d, who));
    if (comes_back) {
        atomic_fetch_add(turns, 1);
    } else {
        reap(pid);
    }
    s.seq = p.seq;
    open_step(&p, &s, 1); // waits up to 10 s
    expect_nobody_to_wait_for(&p);
    if (comes_back) {
        await_turns(3);
        reap(pid);
    }
    attnd_close(p.c);
    e2e_stop(&d);
}
END_TEST

START_TEST(a_restarted_daemon_waits_for_each_client_of_a_process) {
    player p;
    attnd_step_seq s = {.new_len = 1};
    d.keeper = true;
    e2e_start(&d, flags);
    atomic_store(turns, 0);
    pid_t pid = in_child(be_two);
    await_turns(1);
    restart(&p);
    expect_no_step(&p, pid);
    atomic_fetch_add(turns, 1);
    await_turns(3);
    expect_no_step(&p, pid);
    atomic_fetch_add(turns, 1);
    await_turns(5);
    s.seq = p.seq;
    open_step(&p, &s, 1);
    reap(pid);
    attnd_close(p.c);
    e2e_stop(&d);
}
END_TEST

// The time to attach again ends, and the process is still there.
START_TEST(a_restarted_daemon_says_again_whom_it_waits_for) {
    static const char *const hasty[] = {"--set", "cache.memory=16MiB",
                                        "--set", "cache.slab=1MiB",
                                        "--set", "server.reattach_timeout=300ms",
                                        "--set", in_process,
                                        NULL};
    player p;
    char who[80];
    d.keeper = true;
    e2e_start(&d, hasty);
    atomic_store(turns, 0);
    pid_t pid = in_child(outlive_the_daemon);
    await_turns(1);
    restart(&p);
    snprintf(who, sizeof(who), "process %d has neither attached again nor ended", (int)pid);
    for (uint64_t until = e2e_now_ms() + 10000; !e2e_log_has(&d, who);) {
        ck_assert_uint_lt(e2e_now_ms(), until);
        e2e_sleep_ms(20);
    }
    expect_no_step(&p, pid);
    reap(pid);
    attnd_close(p.c);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_inproc_end");
    TCase *tc = tcase_create("inproc");
    turns = mmap(NULL, sizeof(*turns), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, a_killed_client_leaves_nothing);
    tcase_add_test(tc, slots_are_not_given_out_while_their_writer_lives);
    tcase_add_loop_test(tc, a_late_step_is_held_until_its_client_is_done, 0, 3);
    tcase_add_test(tc, a_late_step_ends_with_its_process);
    tcase_add_test(tc, slots_are_given_back_when_their_writer_is_back);
    tcase_add_loop_test(tc, a_restarted_daemon_waits_for_those_who_may_still_write, 0, 2);
    tcase_add_test(tc, a_restarted_daemon_says_again_whom_it_waits_for);
    tcase_add_test(tc, a_restarted_daemon_waits_for_each_client_of_a_process);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
