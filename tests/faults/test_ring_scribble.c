// Clients that flip random bytes of their own regions while they send good requests, beside a
// client whose every output is compared with the reference.  Whatever the daemon meets in the
// scribblers' memory, it must live, the victim's outputs must be right, and nothing may be left at
// the end.
//
// A scribbler is a process of two threads: one sends requests of every kind as fast as it can, the
// other flips bytes, through a mapping of its own.  What comes back is not looked at.  It goes on
// for some seconds, or for ATTND_SCRIBBLE_SECONDS.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/play.h"
#include "tests/e2e/ring_client.h"

enum {
    SCRIBBLERS = 3,
    SECONDS = 5,
    ENTRIES = 16,
    DATA_BYTES = 1 << 19,
    MSG_BYTES = 8192, // requests lie below, in ENTRIES places
    WAIT_MS = 20,     // for a completion that a flip may have lost
    ROUNDS = 400,     // of one connection
    MAX_LOST = 5,
};

static const char *const flags[] = {"--set", "cache.memory=64MiB",     "--set", "cache.slab=1MiB",
                                    "--set", "server.log_level=error", NULL};
static char path[128];

// ---- the flipping thread

typedef enum mode { FLIP_MESSAGES, FLIP_QUEUES, FLIP_ALL, NUM_MODES } mode;

typedef struct flipper {
    uint8_t *base;
    uint64_t data_off, seed;
    mode mode;
    atomic_bool stop;
} flipper;

static uint64_t draw(uint64_t *rng) {
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    return *rng ^= *rng << 17;
}

// pick returns an offset where a flip hurts: mostly in what is read and checked.
static uint64_t pick(const flipper *f, uint64_t *rng) {
    // the first bytes of one of the messages, or of one of the replies behind them
    uint64_t in_msg = draw(rng) % (2 * ENTRIES) * MSG_BYTES + draw(rng) % 192;
    switch (f->mode) {
    case FLIP_MESSAGES:
        return f->data_off + in_msg;
    case FLIP_QUEUES:
        return draw(rng) % 4 ? 4096 + draw(rng) % (ENTRIES * 32) : f->data_off + in_msg;
    default:
        return draw(rng) % 8   ? f->data_off + draw(rng) % DATA_BYTES
               : draw(rng) % 2 ? 4096 + draw(rng) % (ENTRIES * 48)
                               : draw(rng) % 256;
    }
}

static void *flip(void *arg) {
    flipper *f = arg;
    uint64_t rng = f->seed;
    while (!atomic_load(&f->stop)) {
        uint8_t *at = f->base + pick(f, &rng);
        uint8_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
        unsigned value = draw(&rng) % 2 ? old ^ 1u << draw(&rng) % 8 : (unsigned)draw(&rng);
        __atomic_store_n(at, (uint8_t)value, __ATOMIC_RELAXED);
        if (draw(&rng) % 8 == 0) {
            usleep(20); // so that some requests get through
        }
        if (draw(&rng) % 2) {
            __atomic_store_n(at, old, __ATOMIC_RELAXED); // seen at one look, gone at the next
        }
    }
    return NULL;
}

// ---- the sending thread

typedef struct sender {
    ring_client r;
    uint64_t id, seq, step;
    uint32_t model, place;
    int lost; // completions that did not come
} sender;

// put sends a message and waits a little for its completion; its reply's body starts at the
// pointer returned.
static const uint8_t *put(sender *s, uint32_t op, const void *body, size_t bytes) {
    uint64_t at = (uint64_t)(s->place++ % ENTRIES) * MSG_BYTES;
    uint64_t reply = (uint64_t)ENTRIES * MSG_BYTES + at;
    proto_ring_complete done;
    proto_write_header(ring_client_data(&s->r, at), op, ++s->id, ATTND_OK, PROTO_BODY + bytes);
    if (bytes) {
        memcpy(ring_client_data(&s->r, at + PROTO_BODY), body, bytes);
    }
    uint32_t room = op < PROTO_SEQ_CREATE ? 4 * MSG_BYTES : MSG_BYTES;
    ring_client_submit(&s->r, at, (uint32_t)(PROTO_BODY + bytes), reply, room, s->id);
    send(s->r.fd, "x", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    s->lost += !ring_client_wait(&s->r, &done, WAIT_MS);
    return ring_client_data(&s->r, reply + PROTO_BODY);
}

static void put_model(sender *s) {
    static const char json[] =
        "{\"name\": \"scribble\", \"digest\": "
        "\"0000000000000000000000000000000000000000000000000000000000000000\", \"dtype\": "
        "\"f32\", \"layers\": 1, \"q_heads\": 2, \"kv_heads\": 1, \"head_dim\": 8, "
        "\"block_tokens\": 16, \"rope\": {\"inv_freq\": [1.0, 0.1, 0.01, 0.001]}}";
    char text[64] = "";
    memcpy(text, put(s, PROTO_MODEL_OPEN, json, strlen(json)), sizeof(text) - 1);
    const char *model = strstr(text, "\"model\":");
    if (!model || sscanf(model, "\"model\":%u", &s->model) != 1) {
        s->model = 0;
    }
}

enum { ROWS = 5 };

static void put_step(sender *s, bool tree) {
    struct {
        proto_step step;
        proto_step_seq seq;
        int32_t positions[8];
        uint64_t tree[ROWS];
        uint32_t tokens[8];
    } body = {.step = {.model = s->model, .num_seqs = 1},
              .seq = {.seq = s->seq,
                      .new_len = ROWS,
                      .reserve = 3,
                      .positions_off = 88,
                      .tree_off = tree ? 120 : 0,
                      .tokens_off = 160},
              .positions = {0, 1, 2, 3, 4},
              .tree = {1, 3, 5, 9, 17}};
    memcpy(&s->step, put(s, PROTO_STEP, &body, sizeof(body)), 8);
}

static void put_attend(sender *s) {
    struct {
        proto_attend attend;
        float q[ROWS * 16], k[ROWS * 8], v[ROWS * 8];
    } body = {.attend = {.step = s->step,
                         .flags = PROTO_ATTEND_LSE,
                         .q = {.off = 104},
                         .k = {.off = 104 + ROWS * 64},
                         .v = {.off = 104 + ROWS * 96}}};
    put(s, PROTO_ATTEND, &body, sizeof(body));
}

static void put_commit(sender *s, bool tree) {
    struct {
        proto_commit commit;
        proto_commit_seq seq;
        uint32_t path[4];
    } body = {.commit = {.step = s->step, .num_seqs = 1},
              .seq = {.accepted = tree ? 3 : ROWS, .path_off = tree ? 56 : 0},
              .path = {0, 1, 3}};
    put(s, PROTO_COMMIT, &body, sizeof(body));
}

static void put_decode(sender *s) {
    struct {
        proto_attend1 attend;
        proto_attend1_seq seq;
        int32_t positions[2];
        float q[16], k[8], v[8];
    } body = {.attend = {.model = s->model,
                         .num_seqs = 1,
                         .q = {.off = 128},
                         .k = {.off = 192},
                         .v = {.off = 224}},
              .seq = {.seq = s->seq, .new_len = 1, .positions_off = 120}};
    put(s, PROTO_DECODE, &body, sizeof(body));
}

static void put_round(sender *s, int round) {
    bool tree = round % 2;
    proto_model create = {.model = s->model};
    if (round % 8 == 0) {
        memcpy(&s->seq, put(s, PROTO_SEQ_CREATE, &create, sizeof(create)), 8);
    }
    put_step(s, tree);
    put_attend(s);
    put_commit(s, tree);
    put_decode(s);
    if (round % 8 == 7) {
        put(s, PROTO_SEQ_FORK, &(proto_seq){.seq = s->seq}, sizeof(proto_seq));
        put(s, PROTO_SEQ_TRUNCATE, &(proto_seq){.seq = s->seq, .len = 2}, sizeof(proto_seq));
        put(s, PROTO_SEQ_FREE, &(proto_seq){.seq = s->seq}, sizeof(proto_seq));
        put(s, PROTO_SEQ_LIST, NULL, 0);
        put_model(s);
    }
}

// session is one connection: until it is closed, or has lived long enough.
static void session(uint64_t seed, mode how) {
    sender s = {.id = 0};
    pthread_t thread;
    if (ring_client_open(&s.r, path, ENTRIES, DATA_BYTES)) {
        ring_client_close(&s.r);
        e2e_sleep_ms(1);
        return;
    }
    // an old size of 0 maps the same pages once more
    void *again = mremap(s.r.base, 0, s.r.layout.bytes, MREMAP_MAYMOVE);
    flipper f = {.base = again, .data_off = s.r.layout.data_off, .seed = seed, .mode = how};
    put(&s, PROTO_HELLO, "{\"client\": \"scribbler\"}", 23);
    put_model(&s);
    if (again == MAP_FAILED || pthread_create(&thread, NULL, flip, &f) != 0) {
        _exit(1);
    }
    for (int round = 0; round < ROUNDS && s.lost < MAX_LOST; round++) {
        put_round(&s, round);
    }
    atomic_store(&f.stop, true);
    pthread_join(thread, NULL);
    munmap(again, s.r.layout.bytes);
    ring_client_close(&s.r);
}

static pid_t fork_scribbler(int idx) {
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (uint64_t n = 0;; n++) {
            session(0x9e3779b97f4a7c15u * (n + 1) + (uint64_t)idx, (mode)(n % NUM_MODES));
        }
    }
    return pid;
}

// ---- the victim

START_TEST(scribblers_harm_themselves_alone) {
    e2e_daemon d = {.dir = ""};
    e2e_client c;
    pid_t pids[SCRIBBLERS];
    e2e_start(&d, flags);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    for (int i = 0; i < SCRIBBLERS; i++) {
        pids[i] = fork_scribbler(i);
    }
    setenv("ATTND_E2E_TRANSPORT", "ring", 1);
    e2e_connect(&c, d.url);
    play_hello(&c, "victim");
    play_model m = play_tiny();
    play_seq a, b;
    play_open(&c, &m);
    play_create(&c, &m, &a);
    play_create(&c, &m, &b);
    play_seq *const seqs[] = {&a, &b};
    play_token(&c, seqs, 2, 40);
    int tokens = 0;
    const char *wanted = getenv("ATTND_SCRIBBLE_SECONDS");
    int seconds = wanted ? (int)strtol(wanted, NULL, 10) : SECONDS;
    uint64_t until = e2e_now_ms() + (uint64_t)seconds * 1000;
    for (; e2e_now_ms() < until; tokens++) {
        play_token(&c, seqs, 2, 1 + (uint32_t)tokens % 3);
        e2e_sleep_ms(5);
    }
    ck_assert_int_gt(tokens, 2 * seconds);
    double requests = e2e_stat(&c, "transport.rings.requests");
    ck_assert_double_gt(requests, 200 * seconds);
    for (int i = 0; i < SCRIBBLERS; i++) {
        kill(pids[i], SIGKILL);
        ck_assert_int_eq(waitpid(pids[i], NULL, 0), pids[i]);
    }
    play_token(&c, seqs, 2, 1);
    play_free(&c, &a);
    play_free(&c, &b);
    e2e_await_stat(&c, "sessions", 1, 5000);
    e2e_await_stat(&c, "transport.rings.connections", 1, 5000);
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 0);
    ck_assert_double_eq(e2e_stat(&c, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    ck_assert_double_eq(e2e_stat(&c, "accounting_mismatches"), 0);
    fprintf(stderr, "scribble: %d tokens checked, %.0f requests, %.0f closed, %.0f malformed\n",
            tokens, requests, e2e_stat(&c, "transport.rings.closed_broken"),
            e2e_stat(&c, "transport.rings.refused_malformed"));
    e2e_close(&c);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("ring_scribble");
    TCase *tc = tcase_create("scribble");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, scribblers_harm_themselves_alone);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
