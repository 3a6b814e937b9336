// Two clients; one is killed by SIGKILL at every stage of a request.  The other's outputs stay
// right, and within a second the dead one's blocks, session, steps and models are gone.
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/play.h"

static const char *const flags[] = {"--set", "cache.memory=96MiB",       "--set", "cache.slab=1MiB",
                                    "--set", "limits.connections=16",    "--set", "limits.steps=32",
                                    "--set", "compute.prefill_chunk=64", NULL};

typedef enum stage {
    CONNECTED,
    HELLO_SENT,
    HELLO,
    MODEL,
    SEQUENCE,
    STEP_SENT,
    STEP_WAITS, // for blocks that do not come
    STEP,
    ATTEND_SENT,
    ATTEND_RUNS, // a prefill that takes long
    ATTENDED,
    COMMIT_SENT,
    COMMITTED,
    FORK_SENT,
    KEPT,
    DECODE_SENT,
    NUM_STAGES,
} stage;

enum {
    LONG = 1500,  // tokens of a prefill that takes long
    HALF = 50000, // tokens that take a little over half of the pool
};

// send_only sends a message and does not wait for the answer.
static void send_only(e2e_client *c, e2e_buf *b) {
    e2e_flight f;
    e2e_send(c, &f, b->data, b->bytes);
    e2e_buf_fini(b);
}

static void send_step(e2e_client *c, const play_model *m, play_seq *s, uint32_t tokens) {
    e2e_buf b;
    play_step_body(&b, ++c->id, m, &(play_part){.seq = s, .new_len = tokens}, 1, 60000);
    send_only(c, &b);
}

// attend_and_on is the victim from an open step on.
static void attend_and_on(e2e_client *c, play_step *step, stage until) {
    e2e_buf b;
    play_tensors t = play_random(step);
    if (until == ATTEND_SENT || until == ATTEND_RUNS) {
        play_attend_body(&b, ++c->id, step, 0, 0, &t);
        send_only(c, &b);
        return;
    }
    play_attend(c, step, 0);
    play_attend(c, step, 1);
    if (until == COMMIT_SENT) {
        play_commit_body(&b, ++c->id, step, NULL);
        send_only(c, &b);
    } else if (until >= COMMITTED) {
        ATTND_CK_OK(play_commit(c, step, NULL, NULL));
    }
}

static void send_decode(e2e_client *c) {
    play_model m = play_one();
    play_seq s;
    e2e_buf b;
    m.name = "victims";
    play_open(c, &m);
    play_create(c, &m, &s);
    play_step step = {.model = &m, .num = 1, .rows = 4, .new_rows = 4};
    step.parts[0] = (play_part){.seq = &s, .new_len = 4};
    play_tensors t = play_random(&step);
    play_attend1_body(&b, PROTO_DECODE, ++c->id, &step, 0, &t);
    send_only(c, &b);
}

static void live(const char *url, stage until) {
    e2e_client c;
    e2e_buf b;
    play_model m = play_tiny();
    play_seq s;
    play_step step;
    e2e_connect(&c, url);
    if (until == HELLO_SENT) {
        e2e_buf_init(&b, PROTO_HELLO, ++c.id, "{}", 2);
        send_only(&c, &b);
    }
    if (until < HELLO) {
        return;
    }
    play_hello(&c, "victim");
    if (until < MODEL) {
        return;
    }
    m.name = "victims too"; // also the victim's models must go
    play_open(&c, &m);
    if (until < SEQUENCE) {
        return;
    }
    play_create(&c, &m, &s);
    if (until < STEP_SENT) {
        return;
    }
    if (until == STEP_WAITS) { // a step has half of the pool, the next one wants as much
        play_part half = {.seq = &s, .new_len = HALF};
        ATTND_CK_OK(play_step_open(&c, &m, &half, 1, 0, &step, NULL));
        play_create(&c, &m, &s);
    }
    if (until == STEP_SENT || until == STEP_WAITS) {
        send_step(&c, &m, &s, until == STEP_WAITS ? HALF : 100);
        return;
    }
    if (until == DECODE_SENT) {
        send_decode(&c);
        return;
    }
    play_part part = {.seq = &s, .new_len = until == ATTEND_RUNS ? LONG : 100};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 60000, &step, NULL));
    if (until < ATTEND_SENT) {
        return;
    }
    attend_and_on(&c, &step, until);
    if (until == FORK_SENT) {
        proto_seq fork_body = {.seq = s.handle};
        e2e_buf_init(&b, PROTO_SEQ_FORK, ++c.id, &fork_body, sizeof(fork_body));
        send_only(&c, &b);
    } else if (until == KEPT) {
        proto_seq_keep keep = {.seq = s.handle, .ttl_ms = 300};
        snprintf(keep.name, sizeof(keep.name), "of %d", (int)getpid()); // another may still be kept
        ATTND_CK_OK(e2e_call(&c, PROTO_SEQ_KEEP, &keep, sizeof(keep), NULL));
    }
}

// fork_victim starts a process that lives up to a stage, says so, and waits to be killed.
static pid_t fork_victim(const char *url, stage until, int *ready) {
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        live(url, until);
        if (write(fds[1], "x", 1) == 1) {
            pause();
        }
        _exit(0);
    }
    close(fds[1]);
    *ready = fds[0];
    return pid;
}

static void kill_victim(pid_t pid) {
    int status;
    kill(pid, SIGKILL);
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFSIGNALED(status));
}

START_TEST(a_client_killed_at_any_stage_costs_the_other_nothing) {
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    int ready;
    char byte;
    e2e_start(&d, flags);
    pid_t victim = fork_victim(d.url, (stage)_i, &ready);
    e2e_connect(&c, d.url);
    play_hello(&c, "survivor");
    play_model m = play_tiny();
    play_seq s, other;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_create(&c, &m, &other);
    play_seq *const seqs[] = {&s, &other};
    play_token(&c, seqs, 2, 40); // 3 blocks each
    ck_assert_int_eq(read(ready, &byte, 1), 1);
    play_token(&c, seqs, 2, 1);
    if (_i == STEP_WAITS) {
        e2e_await_stat(&c, "scheduler.waiting_for_blocks", 1, 1000);
    }
    uint64_t killed = e2e_now_ms();
    kill_victim(victim);
    play_token(&c, seqs, 2, 1);
    e2e_await_stat(&c, "sessions", 1, 1000);
    if (_i == KEPT) {
        ck_assert_double_gt(e2e_stat(&c, "blocks.in_use"), 6);
        ck_assert_double_eq(e2e_stat(&c, "sequences"), 3);
        e2e_await_stat(&c, "sequences", 2, 2000);
        // ttl 300 ms, counted from the time at which the loop last looked at its clock
        ck_assert_uint_ge(e2e_now_ms() - killed, 200);
    }
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 6);
    ck_assert_double_eq(e2e_stat(&c, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 2);
    ck_assert_double_eq(e2e_stat(&c, "models"), 1);
    ck_assert_double_eq(e2e_stat(&c, "accounting_mismatches"), 0);
    for (int i = 0; i < 3; i++) {
        play_token(&c, seqs, 2, 1);
    }
    play_free(&c, &s);
    play_free(&c, &other);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

START_TEST(many_clients_killed_at_random_leave_nothing) {
    enum { ROUNDS = 6, VICTIMS = 5 };
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    pid_t victims[ROUNDS * VICTIMS];
    int ready[ROUNDS * VICTIMS];
    e2e_start(&d, flags);
    unsigned int rand = 12345;
    // All are forked before this process uses NNG, the later ones while the earlier ones die.
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < VICTIMS; i++) {
            int n = round * VICTIMS + i;
            victims[n] = fork_victim(d.url, (stage)(n * 7 % NUM_STAGES), &ready[n]);
        }
        for (int i = 0; i < VICTIMS; i++) {
            rand = rand * 1103515245 + 12345;
            e2e_sleep_ms((int)(rand >> 16) % 20);
            kill_victim(victims[round * VICTIMS + i]);
        }
    }
    e2e_connect(&c, d.url);
    play_hello(&c, "survivor");
    e2e_await_stat(&c, "sessions", 1, 1000);
    e2e_await_stat(&c, "blocks.in_use", 0, 1000); // a kept one has its time to live
    ck_assert_double_eq(e2e_stat(&c, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&c, "accounting_mismatches"), 0);
    // This request; the one before counts until NNG has said that its reply is written, which the
    // client can know sooner.
    e2e_await_stat(&c, "transport.clients.in_flight", c.ring ? 0 : 1, 1000);
    e2e_await_stat(&c, "transport.rings.in_flight", c.ring ? 1 : 0, 1000);
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_kill");
    TCase *tc = tcase_create("kill");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, a_client_killed_at_any_stage_costs_the_other_nothing, 0, NUM_STAGES);
    tcase_add_test(tc, many_clients_killed_at_random_leave_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
