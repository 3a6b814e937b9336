// kill -9 of a client at every stage of a ring's life.  Within a second nothing of it is left in
// the daemon: session, sequences, blocks, region, descriptor; and the client beside it goes on.
// (The stages of the protocol itself are those of e2e_kill, which runs over rings too.)
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/play.h"
#include "tests/e2e/ring_client.h"

typedef enum stage {
    CONNECTED,
    HALF_ASKED, // a packet that is too short
    ASKED,      // the answer is not read, its descriptor neither
    ATTACHED,
    WRITTEN, // a submission is written and not published
    PUBLISHED,
    HALF_PUBLISHED, // with no doorbell, the daemon asleep
    UNREAD,         // the completion is there
    WAITING,        // in the futex, for what does not come
    RUNNING,        // a long prefill reads and writes the region
    RUNNING_MANY,   // and more attends wait behind it
    NUM_STAGES,
} stage;

enum { DATA_BYTES = 64 << 20, LONG = 3000, HALF = 50000 };

static const char *const flags[] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB",
                                    "--set", "compute.threads=1",  NULL};
static char path[128];
static uint64_t id = 1;

static void hello(ring_client *r) {
    ATTND_CK_OK(ring_client_open(r, path, 16, DATA_BYTES));
    ATTND_CK_OK(ring_client_call(r, PROTO_HELLO, ++id, "{}", 2, NULL));
}

// open_step opens a model, a sequence and a step of so many tokens.
static uint64_t open_step(ring_client *r, uint32_t tokens, uint32_t deadline_ms, bool wait) {
    static const char json[] =
        "{\"name\": \"victim\", \"digest\": "
        "\"0000000000000000000000000000000000000000000000000000000000000000\", \"dtype\": "
        "\"f32\", \"layers\": 4, \"q_heads\": 4, \"kv_heads\": 2, \"head_dim\": 32}";
    const void *reply;
    struct {
        proto_step step;
        proto_step_seq seq;
    } body = {.step = {.num_seqs = 1, .deadline_ms = deadline_ms}, .seq = {.new_len = tokens}};
    ATTND_CK_OK(ring_client_call(r, PROTO_MODEL_OPEN, ++id, json, strlen(json), &reply));
    body.step.model = (uint32_t)e2e_number(reply, "model");
    proto_model create = {.model = body.step.model};
    ATTND_CK_OK(ring_client_call(r, PROTO_SEQ_CREATE, ++id, &create, sizeof(create), &reply));
    memcpy(&body.seq.seq, reply, 8);
    if (!wait) {
        proto_write_header(ring_client_data(r, 0), PROTO_STEP, ++id, ATTND_OK,
                           PROTO_BODY + sizeof(body));
        memcpy(ring_client_data(r, PROTO_BODY), &body, sizeof(body));
        ring_client_submit(r, 0, PROTO_BODY + sizeof(body), DATA_BYTES / 2, 65536, id);
        ring_client_bell(r);
        return 0;
    }
    uint64_t step;
    ATTND_CK_OK(ring_client_call(r, PROTO_STEP, ++id, &body, sizeof(body), &reply));
    memcpy(&step, reply, 8);
    return step;
}

// send_attend submits an attend of LONG tokens and does not wait: q [LONG, 4, 32], k, v [LONG, 2,
// 32].
static void send_attend(ring_client *r, uint64_t step, uint32_t layer) {
    uint32_t q = 104, k = q + LONG * 128 * 4, v = k + LONG * 64 * 4, end = v + LONG * 64 * 4;
    proto_attend body = {
        .step = step, .layer = layer, .q = {.off = q}, .k = {.off = k}, .v = {.off = v}};
    uint64_t at = (uint64_t)layer * (8 << 20);
    proto_write_header(ring_client_data(r, at), PROTO_ATTEND, ++id, ATTND_OK, end);
    memcpy(ring_client_data(r, at + PROTO_BODY), &body, sizeof(body));
    ring_client_submit(r, at, end, at + (4 << 20), 4 << 20, id);
    ring_client_bell(r);
}

static void submit_stats(ring_client *r) {
    proto_write_header(ring_client_data(r, 0), PROTO_STATS, ++id, ATTND_OK, PROTO_BODY);
    ring_client_submit(r, 0, PROTO_BODY, 65536, 65536, id);
}

static void live_attached(ring_client *r, stage until) {
    proto_ring_complete done;
    hello(r);
    switch (until) {
    case WRITTEN:
        memset(r->base + r->layout.sq_off, 0xff, 32 * 16);
        break;
    case PUBLISHED:
        submit_stats(r);
        ring_client_bell(r);
        break;
    case HALF_PUBLISHED:
        while (!proto_ring_load(&r->head->daemon_sleeps)) {
            e2e_sleep_ms(1);
        }
        submit_stats(r);
        break;
    case UNREAD:
        submit_stats(r);
        ring_client_bell(r);
        while (proto_ring_load(&r->head->cq_tail) == r->cq_head) {
            e2e_sleep_ms(1);
        }
        break;
    case WAITING: // a step has over half of the pool, and the next one wants as much
        open_step(r, HALF / 2, 0, true);
        open_step(r, HALF / 2, 60000, false);
        ring_client_wait(r, &done, 200);
        break;
    case RUNNING:
    case RUNNING_MANY: {
        uint64_t step = open_step(r, LONG, 0, true);
        for (uint32_t layer = 0; layer < (until == RUNNING ? 1 : 4); layer++) {
            send_attend(r, step, layer);
        }
        break;
    }
    default:
        break;
    }
}

static void live(stage until) {
    ring_client r;
    proto_attach ask = {.magic = PROTO_RING_MAGIC,
                        .version = PROTO_VERSION,
                        .entries = 16,
                        .data_bytes = DATA_BYTES};
    if (until > ASKED) {
        live_attached(&r, until);
        return;
    }
    ck_assert(ring_client_connect(&r, path));
    size_t bytes = until == HALF_ASKED ? 20 : sizeof(ask);
    if (until >= HALF_ASKED) {
        ck_assert_int_eq(send(r.fd, &ask, bytes, MSG_NOSIGNAL), (ssize_t)bytes);
    }
}

// fork_victim starts a process that lives up to a stage, says so, and waits to be killed.
static pid_t fork_victim(stage until, int *ready) {
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        live(until);
        if (write(fds[1], "x", 1) == 1) {
            pause();
        }
        _exit(0);
    }
    close(fds[1]);
    *ready = fds[0];
    return pid;
}

static double stat_of(ring_client *r, const char *name) {
    const void *reply;
    ATTND_CK_OK(ring_client_call(r, PROTO_STATS, ++id, NULL, 0, &reply));
    return e2e_number(reply, name);
}

static void await(ring_client *r, const char *name, double value, int ms) {
    double now = -1;
    uint64_t until = e2e_now_ms() + (uint64_t)ms;
    while ((now = stat_of(r, name)) != value && e2e_now_ms() < until) {
        e2e_sleep_ms(1);
    }
    ck_assert_msg(now == value, "%s is %g, not %g", name, now, value);
}

START_TEST(a_client_killed_at_any_stage_leaves_nothing) {
    e2e_daemon d = {.dir = ""};
    ring_client survivor;
    int ready;
    char byte;
    e2e_start(&d, flags);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    hello(&survivor);
    pid_t victim = fork_victim((stage)_i, &ready);
    ck_assert_int_eq(read(ready, &byte, 1), 1);
    if (_i >= ATTACHED) {
        ck_assert_double_eq(stat_of(&survivor, "transport.rings.rings"), 2);
        ck_assert_int_eq(ring_client_count_regions(d.pid), 2);
    }
    kill(victim, SIGKILL);
    ck_assert_int_eq(waitpid(victim, NULL, 0), victim);
    await(&survivor, "transport.rings.connections", 1, 1000);
    await(&survivor, "sessions", 1, _i < RUNNING ? 1000 : 60000); // not under a kernel
    await(&survivor, "sequences", 0, 1000);
    await(&survivor, "transport.rings.in_flight", 1, 1000); // the question itself
    await(&survivor, "transport.rings.bytes", (double)survivor.layout.bytes, 1000);
    ck_assert_double_eq(stat_of(&survivor, "blocks.in_use"), 0);
    ck_assert_double_eq(stat_of(&survivor, "steps"), 0);
    ck_assert_double_eq(stat_of(&survivor, "models"), 0);
    ck_assert_double_eq(stat_of(&survivor, "accounting_mismatches"), 0);
    ck_assert_int_eq(ring_client_count_regions(d.pid), 1);
    ring_client_close(&survivor);
    close(ready);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("ring_kill");
    TCase *tc = tcase_create("kill");
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, a_client_killed_at_any_stage_leaves_nothing, 0, NUM_STAGES);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
