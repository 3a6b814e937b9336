// libattnd against a real daemon, over NNG (loop index 0) and over a ring (1).
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/client/attnd.h"
#include "tests/e2e/harness.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, LAYERS = 2, MAX_ROWS = 64 };

static const char *const flags[] = {"--set", "cache.memory=16MiB", "--set", "cache.slab=1MiB",
                                    NULL};
static const attnd_transport transports[] = {ATTND_TRANSPORT_NNG, ATTND_TRANSPORT_RING};

static e2e_daemon d;
static attnd_client *c;
static attnd_errinfo info;
static uint32_t model;

static void connect_over(int which) {
    attnd_connect_opts opts = {.transport = transports[which], .timeout_ms = 10000};
    ATTND_CK_OK(attnd_connect(&c, d.url, &opts, &info));
    ck_assert_int_eq(attnd_get_transport(c), transports[which]);
}

// open_model opens one with so many tokens a block, 0 = the daemon's choice.
static void open_model(const char *name, uint32_t block_tokens) {
    attnd_model_opts opts = {.name = name,
                             .block_tokens = block_tokens,
                             .dtype = ATTND_F32,
                             .kv_dtype = ATTND_F32,
                             .layers = LAYERS,
                             .q_heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .all = ATTND_LAYER_DEFAULT};
    ATTND_CK_OK(attnd_model_open(c, &opts, &model, &info));
}

static void setup(void) {
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
}

static void teardown(void) {
    e2e_stop(&d);
}

static void begin(int which) {
    connect_over(which);
    open_model("m", 0);
}

typedef struct tensors {
    float q[MAX_ROWS * HEADS * DIM], k[MAX_ROWS * KV_HEADS * DIM], v[MAX_ROWS * KV_HEADS * DIM];
    float out[MAX_ROWS * HEADS * DIM], lse[MAX_ROWS * HEADS];
} tensors;

static void fill(tensors *t, uint32_t seed) {
    float *const arrays[] = {t->q, t->k, t->v};
    const size_t sizes[] = {sizeof(t->q), sizeof(t->k), sizeof(t->v)};
    for (int a = 0; a < 3; a++) {
        for (size_t i = 0; i < sizes[a] / sizeof(float); i++) {
            seed = seed * 1664525 + 1013904223;
            arrays[a][i] = (float)(seed >> 8) / (float)(1 << 24) - 0.5f;
        }
    }
}

static attnd_attend_args args_of(tensors *t, uint64_t step, uint32_t layer, uint32_t rows) {
    return (attnd_attend_args){.step = step,
                               .model = model,
                               .layer = layer,
                               .rows = rows,
                               .new_rows = rows,
                               .q = t->q,
                               .k = t->k,
                               .v = t->v,
                               .out = t->out,
                               .lse = t->lse};
}

static uint64_t open_step(uint64_t seq, uint32_t rows) {
    attnd_step_seq s = {.seq = seq, .new_len = rows};
    uint64_t step = 0;
    ATTND_CK_OK(attnd_step_open(c, model, &s, 1, NULL, &step, &info));
    return step;
}

static uint64_t create_seq(void) {
    uint64_t seq = 0;
    ATTND_CK_OK(attnd_seq_create(c, model, &seq, &info));
    return seq;
}

START_TEST(auto_takes_a_ring_with_a_session_of_its_own) {
    ATTND_CK_OK(attnd_connect(&c, d.url, NULL, &info));
    ck_assert_int_eq(attnd_get_transport(c), ATTND_TRANSPORT_RING);
    ck_assert_uint_ne(attnd_get_session(c, NULL), 0);
    char *json;
    ATTND_CK_OK(attnd_admin(c, "stats", NULL, &json, &info));
    ck_assert_ptr_nonnull(strstr(json, "\"blocks\""));
    attnd_free(json);
    attnd_close(c);
}
END_TEST

// A default is made smaller, a wish of the caller's is not; nor does it end in messages, and what
// went before a success is no reason for anything.
START_TEST(ring_is_as_large_as_asked_or_an_error) {
    static const char *const small[] = {"--set", "limits.ring_memory=1MiB", "--set",
                                        "cache.memory=64MiB", NULL};
    e2e_stop(&d);
    memset(&d, 0, sizeof(d));
    e2e_start(&d, small);
    attnd_connect_opts opts = {.transport = _i ? ATTND_TRANSPORT_RING : ATTND_TRANSPORT_AUTO};
    info = (attnd_errinfo){.code = ATTND_OK};
    ATTND_CK_OK(attnd_connect(&c, d.url, &opts, &info));
    ck_assert_int_eq(attnd_get_transport(c), ATTND_TRANSPORT_RING);
    ck_assert_str_eq(info.text, "");
    attnd_close(c);
    opts.ring_bytes = 1 << 20; // and its queues besides
    ATTND_CK_ERR(attnd_connect(&c, d.url, &opts, &info), ATTND_EMSGSIZE);
    ck_assert_str_eq(info.field, "ring_bytes");
    ck_assert_ptr_nonnull(strstr(info.text, "1048576"));
    opts.ring_bytes = 256 << 10;
    ATTND_CK_OK(attnd_connect(&c, d.url, &opts, &info));
    ck_assert_int_eq(attnd_get_transport(c), ATTND_TRANSPORT_RING);
    attnd_close(c);
}
END_TEST

// Where there are no rings, AUTO is messages, whatever was asked of one.
START_TEST(messages_that_auto_falls_back_to_leave_no_reason) {
    static const char *const none[] = {"--set", "server.attach_socket=none", "--set",
                                       "cache.memory=64MiB", NULL};
    e2e_stop(&d);
    memset(&d, 0, sizeof(d));
    e2e_start(&d, none);
    attnd_connect_opts opts = {.ring_bytes = 1 << 20};
    info = (attnd_errinfo){.code = ATTND_OK};
    ATTND_CK_OK(attnd_connect(&c, d.url, &opts, &info));
    ck_assert_int_eq(attnd_get_transport(c), ATTND_TRANSPORT_NNG);
    ck_assert_str_eq(info.text, "");
    attnd_close(c);
}
END_TEST

START_TEST(buffers_have_the_bits_of_a_plain_attend) {
    static tensors t;
    begin(_i);
    fill(&t, 1);
    attnd_buffers *b;
    attnd_ran ran;
    uint64_t step = open_step(create_seq(), 5);
    ATTND_CK_OK(attnd_buffers_create(c, &b, model, 8, 8, true, &info));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        attnd_attend_args plain = args_of(&t, step, layer, 5);
        ATTND_CK_OK(attnd_attend(c, &plain, &ran, &info));
        attnd_attend_args direct = {
            .step = step, .model = model, .layer = layer, .rows = 5, .new_rows = 5, .buffers = b};
        memcpy(b->q, t.q, 5 * HEADS * DIM * sizeof(float));
        memcpy(b->k, t.k, 5 * KV_HEADS * DIM * sizeof(float));
        memcpy(b->v, t.v, 5 * KV_HEADS * DIM * sizeof(float));
        for (int again = 0; again < 3; again++) {
            ATTND_CK_OK(attnd_attend(c, &direct, &ran, &info));
            ck_assert_mem_eq(b->out, t.out, 5 * HEADS * DIM * sizeof(float));
            ck_assert_mem_eq(b->lse, t.lse, 5 * HEADS * sizeof(float));
        }
        direct.layer = LAYERS; // refused, and the buffers live on
        ATTND_CK_ERR(attnd_attend(c, &direct, &ran, &info), ATTND_EINVAL);
        direct.rows = 9;
        ATTND_CK_ERR(attnd_attend(c, &direct, &ran, &info), ATTND_EINVAL);
        ck_assert_str_eq(info.field, "rows");
        direct.rows = 5;
        direct.q = t.q;
        ATTND_CK_ERR(attnd_attend(c, &direct, &ran, &info), ATTND_EINVAL);
        ck_assert_str_eq(info.field, "buffers");
    }
    attnd_buffers_free(b);
    attnd_close(c);
}
END_TEST

static int called, called_bad;

static void count_cb(void *ctx, attnd_err err, const attnd_ran *ran, const attnd_errinfo *why) {
    ck_assert_int_eq(err == 0, ran != NULL);
    ck_assert_int_eq(err == 0, why == NULL);
    __atomic_add_fetch(&called, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&called_bad, err != 0, __ATOMIC_RELAXED);
    if (ctx) {
        *(attnd_err *)ctx = err;
    }
}

START_TEST(buffers_outlive_their_client) {
    begin(_i);
    attnd_buffers *b;
    ATTND_CK_OK(attnd_buffers_create(c, &b, model, 8, 8, false, &info));
    attnd_close(c);
    memset(b->q, 1, 8 * HEADS * DIM * sizeof(float));
    attnd_buffers_free(b);
}
END_TEST

START_TEST(started_attends_are_called_back_once_by_poll) {
    enum { NUM = 16 };
    static tensors t[NUM];
    begin(_i);
    uint64_t step[NUM];
    for (uint32_t i = 0; i < NUM; i++) {
        fill(&t[i], 7);
        step[i] = open_step(create_seq(), 3);
    }
    for (uint32_t i = 0; i < NUM; i++) {
        attnd_attend_args a = args_of(&t[i], step[i], 0, 3);
        ATTND_CK_OK(attnd_attend_start(c, &a, count_cb, NULL, &info));
    }
    uint32_t num = 0;
    while (num < NUM) {
        num += attnd_poll(c, 5000);
    }
    ck_assert_uint_eq(num, NUM);
    ck_assert_int_eq(called, NUM);
    ck_assert_int_eq(called_bad, 0);
    ck_assert_uint_eq(attnd_poll(c, 5000), 0); // nothing is started: at once
    for (uint32_t i = 1; i < NUM; i++) {       // the same tokens everywhere
        ck_assert_mem_eq(t[i].out, t[0].out, 3 * HEADS * DIM * sizeof(float));
    }
    attnd_err err = ATTND_OK;
    attnd_attend_args bad = args_of(&t[0], 12345, 0, 3);
    ATTND_CK_OK(attnd_attend_start(c, &bad, count_cb, &err, &info));
    ck_assert_uint_eq(attnd_poll(c, 5000), 1);
    ck_assert_int_eq(err, ATTND_ESTALE);
    attnd_close(c);
}
END_TEST

START_TEST(close_calls_back_what_was_started) {
    static tensors t;
    begin(_i);
    attnd_attend_args a = args_of(&t, open_step(create_seq(), 3), 0, 3);
    ATTND_CK_OK(attnd_attend_start(c, &a, count_cb, NULL, &info));
    attnd_close(c);
    ck_assert_int_eq(called, 1);
}
END_TEST

// The reply, of 64 KiB, comes in pieces; the close meets it before, between and behind them.
START_TEST(close_returns_whenever_it_comes) {
    enum { CLOSES = 300, ROWS = 256 };
    static float q[ROWS * HEADS * DIM], out[ROWS * HEADS * DIM];
    for (int i = 0; i < CLOSES; i++) {
        begin(_i);
        attnd_step_seq s = {.seq = create_seq(), .q_len = ROWS};
        uint64_t step = 0;
        ATTND_CK_OK(attnd_step_open(c, model, &s, 1, NULL, &step, &info));
        attnd_attend_args a = {.step = step, .model = model, .rows = ROWS, .q = q, .out = out};
        called = 0;
        ATTND_CK_OK(attnd_attend_start(c, &a, count_cb, NULL, &info));
        usleep((useconds_t)(i % 100 * 5));
        attnd_close(c);
        ck_assert_int_eq(called, 1);
    }
}
END_TEST

START_TEST(step_carries_the_commit_of_the_one_before) {
    static tensors t;
    begin(_i);
    fill(&t, 3);
    uint64_t seq = create_seq(), step = open_step(seq, 4);
    for (uint32_t token = 0; token < 100; token++) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            attnd_attend_args a = args_of(&t, step, layer, token ? 1 : 4);
            ATTND_CK_OK(attnd_attend(c, &a, NULL, &info));
        }
        attnd_accept accept = {.accepted = token ? 1 : 4};
        attnd_step_opts opts = {.commit_step = step, .commit_accept = &accept, .num_commit = 1};
        attnd_step_seq s = {.seq = seq, .new_len = 1};
        ATTND_CK_OK(attnd_step_open(c, model, &s, 1, &opts, &step, &info));
        ck_assert_uint_eq(s.committed, 4 + token);
    }
    attnd_accept accept = {.accepted = 1}; // before every layer was attended
    attnd_step_opts opts = {.commit_step = step, .commit_accept = &accept, .num_commit = 1};
    attnd_step_seq s = {.seq = seq, .new_len = 1};
    ATTND_CK_ERR(attnd_step_open(c, model, &s, 1, &opts, &step, &info), ATTND_EINVAL);
    ck_assert_ptr_eq(strstr(info.field, "commit."), info.field);
    attnd_close(c);
}
END_TEST

// masked_row is attention of row i, head h over the keys that seen says, literally.
static double masked_row(const tensors *t, int i, int h, int dim, const bool *seen) {
    double sum = 0, out = 0;
    for (int j = 0; j <= i; j++) {
        double x = 0;
        for (int e = 0; e < DIM; e++) {
            x += (double)t->q[(i * HEADS + h) * DIM + e] *
                 (double)t->k[(j * KV_HEADS + h / 2) * DIM + e];
        }
        double p = seen[j] ? exp(x / sqrt(DIM)) : 0;
        sum += p;
        out += p * (double)t->v[(j * KV_HEADS + h / 2) * DIM + dim];
    }
    return sum > 0 ? out / sum : 0;
}

// 40 rows in query blocks of 16, over blocks of 16 tokens.
START_TEST(a_block_mask_is_kept_to) {
    enum { ROWS = 40, BLOCK = 16 };
    static tensors t;
    static const uint32_t start[] = {0, 1, 2, 4}, blocks[] = {0, 0, 0, 2};
    static const bool sees[3][3] = {{true}, {true}, {true, false, true}}; // of the same
    begin(_i);
    open_model("of 16", BLOCK);
    fill(&t, 9);
    uint64_t seq = create_seq();
    attnd_block_mask mask = {BLOCK, 3, start, blocks};
    attnd_attend_args a = args_of(&t, open_step(seq, ROWS), 0, ROWS);
    a.block_mask = &mask;
    ATTND_CK_OK(attnd_attend(c, &a, NULL, &info));
    for (int i = 0; i < ROWS; i++) {
        bool seen[ROWS];
        for (int j = 0; j < ROWS; j++) {
            seen[j] = sees[i / BLOCK][j / BLOCK];
        }
        for (int h = 0; h < HEADS; h++) {
            for (int e = 0; e < DIM; e++) {
                double want = masked_row(&t, i, h, e, seen);
                double got = (double)t.out[(i * HEADS + h) * DIM + e];
                ck_assert_msg(fabs(got - want) < 1e-6, "row %d: %g, not %g", i, got, want);
            }
        }
    }
    mask.num_query_blocks = 2;
    ATTND_CK_ERR(attnd_attend(c, &a, NULL, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "block_mask");
    attnd_close(c);
}
END_TEST

static uint64_t request;

static void *cancel_soon(void *arg) {
    (void)arg;
    uint64_t id;
    attnd_errinfo why;
    while (!(id = __atomic_load_n(&request, __ATOMIC_ACQUIRE))) {
        usleep(1000);
    }
    usleep(100000);
    ck_assert_int_eq(attnd_cancel(c, id, &why), ATTND_OK);
    return NULL;
}

// The pool has 16 MiB; one token of this model takes 2 layers of 2 heads of 16 floats, k and v.
START_TEST(cancel_ends_a_step_that_waits_for_blocks) {
    enum { TOKENS = (12 << 20) / (LAYERS * KV_HEADS * DIM * 2 * 4) };
    begin(_i);
    uint64_t a = create_seq(), b = create_seq(), step;
    attnd_step_seq s = {.seq = a, .new_len = 1, .reserve = TOKENS};
    ATTND_CK_OK(attnd_step_open(c, model, &s, 1, NULL, &step, &info));
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, cancel_soon, NULL), 0);
    s = (attnd_step_seq){.seq = b, .new_len = 1, .reserve = TOKENS};
    attnd_step_opts opts = {.deadline_ms = 20000, .request = &request};
    uint64_t begin_ms = e2e_now_ms();
    ATTND_CK_ERR(attnd_step_open(c, model, &s, 1, &opts, &step, &info), ATTND_ECANCELED);
    ck_assert_uint_lt(e2e_now_ms() - begin_ms, 10000);
    pthread_join(thread, NULL);
    ATTND_CK_ERR(attnd_cancel(c, 0, &info), ATTND_EINVAL);
    attnd_close(c);
}
END_TEST

enum { THREADS = 8, TOKENS = 30 };
static tensors expected[TOKENS];

// talk makes the same conversation as every other thread.
static void *talk(void *arg) {
    static __thread tensors t;
    attnd_errinfo why;
    uint64_t seq, step, bad = 0;
    bool first = arg != NULL;
    bad += attnd_seq_create(c, model, &seq, &why) != ATTND_OK;
    for (uint32_t token = 0; token < TOKENS && !bad; token++) {
        attnd_step_seq s = {.seq = seq, .new_len = 1};
        bad += attnd_step_open(c, model, &s, 1, &(attnd_step_opts){.deadline_ms = 1000}, &step,
                               &why) != ATTND_OK;
        for (uint32_t layer = 0; layer < LAYERS && !bad; layer++) {
            fill(&t, token * LAYERS + layer);
            attnd_attend_args a = args_of(&t, step, layer, 1);
            bad += attnd_attend(c, &a, NULL, &why) != ATTND_OK;
        }
        bad += attnd_step_commit(c, step, &(attnd_accept){.accepted = 1}, 1, NULL, &why) != 0;
        if (first) {
            memcpy(expected[token].out, t.out, HEADS * DIM * sizeof(float));
        } else {
            bad += memcmp(expected[token].out, t.out, HEADS * DIM * sizeof(float)) != 0;
        }
    }
    return (void *)(uintptr_t)bad;
}

START_TEST(threads_share_a_client) {
    begin(_i);
    ck_assert_ptr_null(talk(&c));
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        ck_assert_int_eq(pthread_create(&threads[i], NULL, talk, NULL), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        ck_assert_ptr_null(bad);
    }
    attnd_close(c);
}
END_TEST

START_TEST(reconnect_without_a_loss_does_nothing) {
    begin(_i);
    uint64_t seq = create_seq(), session = attnd_get_session(c, NULL);
    ATTND_CK_OK(attnd_reconnect(c, &info));
    ck_assert_uint_eq(attnd_get_session(c, NULL), session);
    ATTND_CK_OK(attnd_seq_free(c, seq, &info));
    attnd_close(c);
}
END_TEST

static void *reconnect(void *arg) {
    attnd_errinfo why;
    (void)arg;
    return (void *)(intptr_t)attnd_reconnect(c, &why);
}

START_TEST(daemon_that_restarts_is_found_again_and_the_session_is_lost) {
    static tensors t;
    begin(_i);
    attnd_buffers *b;
    attnd_ran ran;
    uint64_t seq = create_seq(), step = open_step(seq, 2), old = model;
    ATTND_CK_OK(attnd_buffers_create(c, &b, model, 2, 2, false, &info));
    kill(d.pid, SIGKILL);
    e2e_wait(&d, 5000);
    attnd_attend_args a = args_of(&t, step, 0, 2);
    for (int i = 0; i < 3; i++) {
        ATTND_CK_ERR(attnd_attend(c, &a, &ran, &info), ATTND_ECONN);
    }
    pthread_t thread;
    void *answer;
    ck_assert_int_eq(pthread_create(&thread, NULL, reconnect, NULL), 0);
    usleep(300000);
    e2e_start(&d, flags);
    pthread_join(thread, &answer);
    ck_assert_int_eq((intptr_t)answer, ATTND_ESTALE);
    ck_assert_int_eq(attnd_get_transport(c), transports[_i]);
    a.model = (uint32_t)old;
    ATTND_CK_ERR(attnd_attend(c, &a, &ran, &info), ATTND_ENOENT); // the models are forgotten
    open_model("m", 0);
    step = open_step(create_seq(), 2);
    attnd_attend_args direct = {.step = step, .model = model, .rows = 2, .new_rows = 2};
    direct.buffers = b;
    if (transports[_i] == ATTND_TRANSPORT_RING) {
        ATTND_CK_ERR(attnd_attend(c, &direct, &ran, &info), ATTND_ESTALE);
    }
    attnd_buffers_free(b);
    a = args_of(&t, step, 0, 2);
    ATTND_CK_OK(attnd_attend(c, &a, &ran, &info));
    attnd_close(c);
}
END_TEST

static void *kill_soon(void *arg) {
    (void)arg;
    usleep(200000);
    kill(d.pid, SIGKILL);
    return NULL;
}

START_TEST(daemon_killed_in_the_middle_of_a_call_ends_it) {
    enum { MANY = (12 << 20) / (LAYERS * KV_HEADS * DIM * 2 * 4) };
    begin(_i);
    uint64_t a = create_seq(), b = create_seq(), step;
    attnd_step_seq s = {.seq = a, .new_len = 1, .reserve = MANY};
    ATTND_CK_OK(attnd_step_open(c, model, &s, 1, NULL, &step, &info));
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, kill_soon, NULL), 0);
    s = (attnd_step_seq){.seq = b, .new_len = 1, .reserve = MANY};
    uint64_t begin_ms = e2e_now_ms();
    ATTND_CK_ERR(
        attnd_step_open(c, model, &s, 1, &(attnd_step_opts){.deadline_ms = 20000}, &step, &info),
        ATTND_ECONN);
    ck_assert_uint_lt(e2e_now_ms() - begin_ms, 5000);
    pthread_join(thread, NULL);
    attnd_close(c);
    e2e_wait(&d, 5000);
    e2e_start(&d, flags); // for teardown
}
END_TEST

START_TEST(session_of_a_daemon_that_is_gone_is_stale) {
    attnd_connect_opts opts = {.transport = transports[_i], .session = 12345, .secret = {1}};
    ATTND_CK_ERR(attnd_connect(&c, d.url, &opts, &info), ATTND_ESTALE);
}
END_TEST

START_TEST(ring_on_a_url_that_is_not_local_is_refused) {
    attnd_connect_opts opts = {.transport = ATTND_TRANSPORT_RING};
    ATTND_CK_ERR(attnd_connect(&c, "tcp://127.0.0.1:1", &opts, &info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "transport");
}
END_TEST

// ---- other attach sockets

static void start_with_attach(const char *attach) {
    static char set[200];
    static const char *const with[] = {
        "--set", "cache.memory=16MiB", "--set", "cache.slab=1MiB", "--set", set, NULL};
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    if (attach) {
        snprintf(set, sizeof(set), "server.attach_socket=%s", attach);
    } else {
        snprintf(set, sizeof(set), "server.attach_socket=%s/elsewhere", d.dir);
    }
    e2e_start(&d, with);
}

START_TEST(attach_socket_elsewhere_is_found_by_hello) {
    start_with_attach(NULL);
    connect_over(1);
    open_model("m", 0);
    attnd_close(c);
    ATTND_CK_OK(attnd_connect(&c, d.url, NULL, &info));
    ck_assert_int_eq(attnd_get_transport(c), ATTND_TRANSPORT_RING);
    attnd_close(c);
    e2e_stop(&d);
}
END_TEST

START_TEST(daemon_without_rings_is_talked_to_over_nng) {
    start_with_attach("none");
    ATTND_CK_OK(attnd_connect(&c, d.url, NULL, &info));
    ck_assert_int_eq(attnd_get_transport(c), ATTND_TRANSPORT_NNG);
    attnd_close(c);
    attnd_connect_opts opts = {.transport = ATTND_TRANSPORT_RING};
    ATTND_CK_ERR(attnd_connect(&c, d.url, &opts, &info), ATTND_ENOTSUP);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_client");
    TCase *tc = tcase_create("client"), *attach = tcase_create("attach");
    tcase_set_timeout(tc, 60);
    tcase_set_timeout(attach, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, auto_takes_a_ring_with_a_session_of_its_own);
    tcase_add_loop_test(tc, ring_is_as_large_as_asked_or_an_error, 0, 2);
    tcase_add_test(tc, messages_that_auto_falls_back_to_leave_no_reason);
    tcase_add_loop_test(tc, buffers_have_the_bits_of_a_plain_attend, 0, 2);
    tcase_add_loop_test(tc, buffers_outlive_their_client, 0, 2);
    tcase_add_loop_test(tc, started_attends_are_called_back_once_by_poll, 0, 2);
    tcase_add_loop_test(tc, close_calls_back_what_was_started, 0, 2);
    tcase_add_loop_test(tc, close_returns_whenever_it_comes, 0, 2);
    tcase_add_loop_test(tc, step_carries_the_commit_of_the_one_before, 0, 2);
    tcase_add_loop_test(tc, a_block_mask_is_kept_to, 0, 2);
    tcase_add_loop_test(tc, cancel_ends_a_step_that_waits_for_blocks, 0, 2);
    tcase_add_loop_test(tc, threads_share_a_client, 0, 2);
    tcase_add_loop_test(tc, reconnect_without_a_loss_does_nothing, 0, 2);
    tcase_add_loop_test(tc, daemon_that_restarts_is_found_again_and_the_session_is_lost, 0, 2);
    tcase_add_loop_test(tc, daemon_killed_in_the_middle_of_a_call_ends_it, 0, 2);
    tcase_add_loop_test(tc, session_of_a_daemon_that_is_gone_is_stale, 0, 2);
    tcase_add_test(tc, ring_on_a_url_that_is_not_local_is_refused);
    suite_add_tcase(s, tc);
    tcase_add_test(attach, attach_socket_elsewhere_is_found_by_hello);
    tcase_add_test(attach, daemon_without_rings_is_talked_to_over_nng);
    suite_add_tcase(s, attach);
    return s;
}

CHECK_MAIN(suite)
