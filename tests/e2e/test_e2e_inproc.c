// Attention in the client's own process, over the daemon's arena: the bits of the daemon's, and
// what happens when such a client is wrong, killed, or still there when the daemon is not.
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

#include "attention/attn_engine.h"
#include "proto/client/attnd.h"
#include "tests/e2e/harness.h"

enum {
    LAYERS = 4,
    HEADS = 6,
    KV_HEADS = 2,
    DIM = 16,
    V_DIM = 24,
    BLOCK = 8,
    MAX_ROWS = 64,
    Q_ROW = HEADS * DIM,
    K_ROW = KV_HEADS * DIM,
    V_ROW = KV_HEADS * V_DIM,
    OUT_ROW = HEADS * V_DIM,
};

static char in_process[64];
static const char *const flags[] = {"--set", "cache.memory=16MiB",       "--set", "cache.slab=1MiB",
                                    "--set", "compute.threads=1",        "--set", in_process,
                                    "--set", "compute.deterministic=on", NULL};
static const char *const no_grant[] = {"--set", "cache.memory=16MiB",
                                       "--set", "cache.slab=1MiB",
                                       "--set", "server.in_process_uids=4294967294",
                                       NULL};

static e2e_daemon d;
static attnd_errinfo info;

static void setup(void) {
    memset(&d, 0, sizeof(d));
    snprintf(in_process, sizeof(in_process), "server.in_process_uids=%u", (unsigned)getuid());
    e2e_dir(&d);
}

// player is a client with a model and a sequence.
typedef struct player {
    attnd_client *c;
    uint32_t model;
    uint64_t seq;
} player;

static attnd_err dial(player *p, bool here) {
    attnd_connect_opts opts = {.transport = ATTND_TRANSPORT_RING,
                               .timeout_ms = 20000,
                               .engine = here ? attn_engine_cpu() : NULL,
                               .engine_threads = 2};
    return attnd_connect(&p->c, d.url, &opts, &info);
}

static float value(uint32_t token, uint32_t kind, uint32_t i) {
    uint32_t h = (token * 512 + i) * 8 + kind;
    h = (h ^ h >> 15) * UINT32_C(2246822519);
    h = (h ^ h >> 13) * UINT32_C(3266489917);
    return (float)(h >> 8) / (1 << 23) - 1;
}

// open_model opens one with everything that a layer may have: windows in groups of their own, a
// layer that reads another's K and V, sinks, slopes, softcap, RoPE of both kinds.
static void open_model(player *p) {
    static float sinks[HEADS], slopes[HEADS], inv_freq[DIM / 2];
    attnd_layer_opts layers[LAYERS];
    for (int h = 0; h < HEADS; h++) {
        sinks[h] = value(1, 5, (uint32_t)h);
        slopes[h] = 0.25f / (float)(h + 1);
    }
    for (int i = 0; i < DIM / 2; i++) {
        inv_freq[i] = 1 / (float)(1 << i);
    }
    for (int l = 0; l < LAYERS; l++) {
        layers[l] = ATTND_LAYER_DEFAULT;
        layers[l].rope = (attnd_rope_opts){.inv_freq = inv_freq,
                                           .num_inv_freq = l == 1 ? DIM / 4 : DIM / 2,
                                           .attention_factor = l == 1 ? 1.25f : 0,
                                           .interleaved = l == 1};
    }
    layers[1].window_left = 13;
    layers[1].sinks = sinks;
    layers[2].softcap = 3;
    layers[2].scale = 0.5f;
    layers[2].alibi_slopes = slopes;
    layers[3].kv_layer = 1;
    layers[3].window_left = 5;
    attnd_model_opts opts = {.name = "m",
                             .dtype = ATTND_F32,
                             .kv_dtype = ATTND_F32,
                             .layers = LAYERS,
                             .q_heads = HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .v_head_dim = V_DIM,
                             .block_tokens = BLOCK,
                             .per_layer = layers};
    ATTND_CK_OK(attnd_model_open(p->c, &opts, &p->model, &info));
}

static void begin(player *p, bool here) {
    ATTND_CK_OK(dial(p, here));
    open_model(p);
    ATTND_CK_OK(attnd_seq_create(p->c, p->model, &p->seq, &info));
}

// outputs is what all layers of a step gave.
typedef struct outputs {
    float out[LAYERS][MAX_ROWS * OUT_ROW];
    float lse[LAYERS][HEADS * MAX_ROWS];
} outputs;

static attnd_err attend(player *p, uint64_t step, uint32_t layer, uint32_t first, uint32_t rows,
                        bool new, outputs *o) {
    float q[MAX_ROWS * Q_ROW], k[MAX_ROWS * K_ROW], v[MAX_ROWS * V_ROW];
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t i = 0; i < Q_ROW; i++) {
            q[r * Q_ROW + i] = value(first + r, 0, i + 7 * layer);
        }
        for (uint32_t i = 0; i < K_ROW; i++) {
            k[r * K_ROW + i] = value(first + r, 1, i + 7 * layer);
        }
        for (uint32_t i = 0; i < V_ROW; i++) {
            v[r * V_ROW + i] = value(first + r, 2, i + 7 * layer);
        }
    }
    bool appends = new &&layer != 3;
    attnd_attend_args args = {.step = step,
                              .model = p->model,
                              .layer = layer,
                              .rows = rows,
                              .new_rows = new ? rows : 0,
                              .q = q,
                              .k = appends ? k : NULL,
                              .v = appends ? v : NULL,
                              .out = o->out[layer],
                              .lse = o->lse[layer]};
    return attnd_attend(p->c, &args, NULL, &info);
}

static void attend_all(player *p, uint64_t step, uint32_t first, uint32_t rows, bool new,
                       outputs *o) {
    for (uint32_t l = 0; l < LAYERS; l++) {
        ATTND_CK_OK(attend(p, step, l, first, rows, new, o));
    }
}

static uint64_t open_step(player *p, attnd_step_seq *seqs, uint32_t num) {
    uint64_t step = 0;
    attnd_step_opts opts = {.deadline_ms = 10000};
    ATTND_CK_OK(attnd_step_open(p->c, p->model, seqs, num, &opts, &step, &info));
    return step;
}

static void commit(player *p, uint64_t step, attnd_accept accept, uint32_t len) {
    uint32_t got = 0;
    ATTND_CK_OK(attnd_step_commit(p->c, step, &accept, 1, &got, &info));
    ck_assert_uint_eq(got, len);
}

static double stat_of(const char *path) {
    e2e_client c;
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    double x = e2e_stat(&c, path);
    e2e_close(&c);
    return x;
}

static void await_stat(const char *path, double want, int ms) {
    e2e_client c;
    e2e_connect(&c, d.admin_url);
    free(e2e_json(&c, PROTO_HELLO, "{}"));
    e2e_await_stat(&c, path, want, ms);
    e2e_close(&c);
}

// ---- outputs

// converse makes a conversation of all kinds of steps; every output goes into all [*num].
static void converse(player *p, outputs *all, uint32_t *num) {
    attnd_step_seq s = {.seq = p->seq, .new_len = 37, .reserve = 5};
    uint64_t step = open_step(p, &s, 1);
    attend_all(p, step, 0, 37, true, &all[(*num)++]);
    commit(p, step, (attnd_accept){.accepted = 37}, 37);
    for (uint32_t t = 37; t < 60; t++) { // tokens
        s = (attnd_step_seq){.seq = p->seq, .new_len = 1};
        step = open_step(p, &s, 1);
        ck_assert_uint_eq(s.committed, t);
        attend_all(p, step, t, 1, true, &all[*num]);
        attend_all(p, step, t, 1, true, &all[(*num)++]); // again, into the same slots
        commit(p, step, (attnd_accept){.accepted = 1}, t + 1);
    }
    // A tree: rows 0 to 3, of which 0, 2 and 3 are a path.
    static const uint64_t tree[4] = {1, 3, 5, 13};
    static const int32_t positions[4] = {60, 61, 61, 62};
    static const uint32_t path[3] = {0, 2, 3};
    s = (attnd_step_seq){.seq = p->seq, .new_len = 4, .positions = positions, .tree_mask = tree};
    step = open_step(p, &s, 1);
    attend_all(p, step, 100, 4, true, &all[(*num)++]);
    commit(p, step, (attnd_accept){.accepted = 3, .num_path = 3, .path = path}, 63);
    // Two sequences with the same blocks, of which one appends and one only reads.
    uint64_t forked = 0;
    uint32_t len = 0;
    ATTND_CK_OK(attnd_seq_fork(p->c, p->seq, &forked, &len, &info));
    ATTND_CK_OK(attnd_seq_truncate(p->c, p->seq, 61, &info));
    attnd_step_seq one = {.seq = p->seq, .new_len = 5};
    step = open_step(p, &one, 1);
    attend_all(p, step, 200, 5, true, &all[(*num)++]);
    commit(p, step, (attnd_accept){.accepted = 2}, 63);
    attnd_step_seq two = {.seq = forked, .q_len = 3};
    step = open_step(p, &two, 1);
    attend_all(p, step, 300, 3, false, &all[(*num)++]);
    commit(p, step, (attnd_accept){.accepted = 0}, 63);
}

START_TEST(outputs_have_the_bits_of_the_daemons) {
    static outputs there[40], here[40];
    player a, b;
    uint32_t num[2] = {0, 0};
    e2e_start(&d, flags);
    begin(&a, false);
    converse(&a, there, &num[0]);
    attnd_close(a.c);
    begin(&b, true);
    ck_assert_int_eq(attnd_get_transport(b.c), ATTND_TRANSPORT_RING);
    converse(&b, here, &num[1]);
    ck_assert_uint_eq(num[0], num[1]);
    ck_assert_mem_eq(there, here, sizeof(there));
    ck_assert(stat_of("blocks.in_use") > 0);
    // The daemon's attends were a's, each token's twice; and for each of the two it moved a tree's
    // rows and copied a shared block.
    ck_assert_double_eq(stat_of("scheduler.launches"), (double)(num[0] + 23) * LAYERS + 2 * 2);
    attnd_close(b.c);
    await_stat("blocks.in_use", 0, 1000);
    e2e_stop(&d);
}
END_TEST

// Blocks behind the window of layer 1 (13 tokens, and 64 that are kept) come free: the tables have
// none there, and outputs are the same.
START_TEST(outputs_have_the_bits_of_the_daemons_behind_a_window) {
    enum { STEPS = 16, LEN = 6 * 60 + 10 };
    static outputs all[2][STEPS];
    e2e_start(&d, flags);
    for (int here = 0; here < 2; here++) {
        player p;
        begin(&p, here);
        for (uint32_t i = 0, len = 0; i < STEPS; i++) {
            uint32_t num = i < 6 ? 60 : 1;
            attnd_step_seq s = {.seq = p.seq, .new_len = num};
            uint64_t step = open_step(&p, &s, 1);
            attend_all(&p, step, len, num, true, &all[here][i]);
            len += num;
            commit(&p, step, (attnd_accept){.accepted = num}, len);
        }
        uint32_t blocks = (LEN + BLOCK - 1) / BLOCK, gone = (LEN - 1 - 13 - 64) / BLOCK;
        ck_assert_double_eq(stat_of("blocks.in_use"), 2 * blocks - gone);
        ATTND_CK_ERR(attnd_seq_truncate(p.c, p.seq, LEN - 80, &info), ATTND_ENOTSUP);
        attnd_close(p.c);
        await_stat("blocks.in_use", 0, 1000);
    }
    ck_assert_mem_eq(all[0], all[1], sizeof(all[0]));
    e2e_stop(&d);
}
END_TEST

// A kept sequence that was filled in process is read by the daemon, and the other way round.
START_TEST(both_ways_share_a_sequence) {
    static outputs there, here;
    player a, b;
    e2e_start(&d, flags);
    begin(&b, true);
    attnd_step_seq s = {.seq = b.seq, .new_len = 30};
    uint64_t step = open_step(&b, &s, 1);
    attend_all(&b, step, 0, 30, true, &here);
    commit(&b, step, (attnd_accept){.accepted = 30}, 30);
    s = (attnd_step_seq){.seq = b.seq, .q_len = 8};
    step = open_step(&b, &s, 1);
    attend_all(&b, step, 500, 8, false, &here);
    commit(&b, step, (attnd_accept){.accepted = 0}, 30);
    ATTND_CK_OK(attnd_seq_keep(b.c, b.seq, "kept", 0, &info));
    attnd_close(b.c);
    begin(&a, false);
    uint32_t len = 0;
    ATTND_CK_OK(attnd_seq_attach(a.c, a.model, "kept", &a.seq, &len, &info));
    ck_assert_uint_eq(len, 30);
    s = (attnd_step_seq){.seq = a.seq, .q_len = 8};
    step = open_step(&a, &s, 1);
    attend_all(&a, step, 500, 8, false, &there);
    commit(&a, step, (attnd_accept){.accepted = 0}, 30);
    for (int l = 0; l < LAYERS; l++) {
        ck_assert_mem_eq(there.out[l], here.out[l], 8 * OUT_ROW * sizeof(float));
    }
    attnd_close(a.c);
    e2e_stop(&d);
}
END_TEST

// prompt opens a step of 37 tokens with their ids, attends what of them is not cached, and commits;
// returns how many were.
static uint32_t prompt(player *p, outputs *o) {
    enum { PROMPT = 37 };
    uint32_t ids[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) {
        ids[i] = 1000 + i;
    }
    ATTND_CK_OK(attnd_seq_create(p->c, p->model, &p->seq, &info));
    attnd_step_seq s = {.seq = p->seq, .new_len = PROMPT, .tokens = ids};
    uint64_t step = open_step(p, &s, 1);
    attend_all(p, step, s.cached, PROMPT - s.cached, true, o);
    commit(p, step, (attnd_accept){.accepted = PROMPT}, PROMPT);
    return s.cached;
}

// What was filled in process is found by the daemon's prefix cache, for both.
START_TEST(a_cached_prefix_has_no_rows) {
    static outputs there, here, all;
    player a, b;
    e2e_start(&d, flags);
    begin(&b, true);
    ck_assert_uint_eq(prompt(&b, &all), 0);
    begin(&a, false);
    uint32_t cached = prompt(&a, &there);
    ck_assert_uint_ge(cached, 32); // whole blocks of 8
    ck_assert_uint_le(cached, 36); // at least the last one is computed
    ck_assert_uint_eq(prompt(&b, &here), cached);
    for (int l = 0; l < LAYERS; l++) {
        ck_assert_mem_eq(there.out[l], here.out[l], (37 - cached) * OUT_ROW * sizeof(float));
        for (uint32_t i = 0; i < (37 - cached) * OUT_ROW; i++) { // and without the cache
            ck_assert_float_eq_tol(here.out[l][i], all.out[l][cached * OUT_ROW + i], 1e-5f);
        }
    }
    attnd_close(a.c);
    attnd_close(b.c);
    e2e_stop(&d);
}
END_TEST

// ---- what is refused

START_TEST(a_user_without_the_grant_is_refused_by_name) {
    player p;
    e2e_start(&d, no_grant);
    ATTND_CK_ERR(dial(&p, true), ATTND_EPERM);
    ck_assert_str_eq(info.field, "engine");
    ck_assert_ptr_nonnull(strstr(info.text, "server.in_process_uids"));
    ck_assert(e2e_log_has(&d, "in_process_uids"));
    ATTND_CK_OK(dial(&p, false)); // else it is served
    attnd_close(p.c);
    attnd_connect_opts opts = {.transport = ATTND_TRANSPORT_NNG, .engine = attn_engine_cpu()};
    ATTND_CK_ERR(attnd_connect(&p.c, d.url, &opts, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "engine");
    e2e_stop(&d);
}
END_TEST

START_TEST(a_commit_wants_every_layer) {
    static outputs o;
    player p;
    e2e_start(&d, flags);
    begin(&p, true);
    attnd_step_seq s = {.seq = p.seq, .new_len = 2};
    uint64_t step = open_step(&p, &s, 1), next = 0;
    attnd_accept accept = {.accepted = 2};
    ATTND_CK_OK(attend(&p, step, 0, 0, 2, true, &o));
    ATTND_CK_ERR(attend(&p, step, 3, 0, 2, true, &o), ATTND_EINVAL); // it reads layer 1
    ck_assert_str_eq(info.field, "layer");
    ATTND_CK_OK(attend(&p, step, 2, 0, 2, true, &o));
    ATTND_CK_ERR(attnd_step_commit(p.c, step, &accept, 1, NULL, &info), ATTND_EINVAL);
    ck_assert_int_eq(info.detail, 1);
    attnd_step_opts opts = {.commit_step = step, .commit_accept = &accept, .num_commit = 1};
    s = (attnd_step_seq){.seq = p.seq, .new_len = 1};
    ATTND_CK_ERR(attnd_step_open(p.c, p.model, &s, 1, &opts, &next, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "commit.step");
    ck_assert_int_eq(info.detail, 1);
    ATTND_CK_OK(attend(&p, step, 1, 0, 2, true, &o));
    ATTND_CK_OK(attend(&p, step, 3, 0, 2, true, &o));
    ATTND_CK_OK(attnd_step_open(p.c, p.model, &s, 1, &opts, &next, &info));
    ck_assert_uint_eq(s.committed, 2);
    ATTND_CK_ERR(attend(&p, step, 0, 0, 2, true, &o), ATTND_ESTALE); // it is committed
    ATTND_CK_OK(attnd_step_cancel(p.c, next, &info));
    ATTND_CK_ERR(attend(&p, next, 0, 0, 1, true, &o), ATTND_ESTALE);
    attnd_close(p.c);
    e2e_stop(&d);
}
END_TEST

START_TEST(wrong_attends_are_refused_by_name) {
    static float x[64 * OUT_ROW];
    player p;
    e2e_start(&d, flags);
    begin(&p, true);
    attnd_step_seq s = {.seq = p.seq, .new_len = 2};
    uint64_t step = open_step(&p, &s, 1);
    const attnd_attend_args good = {
        .step = step, .model = p.model, .rows = 2, .new_rows = 2, .q = x, .k = x, .v = x, .out = x};
    const attnd_block_mask mask = {.q_block = 1};
    struct {
        attnd_attend_args a;
        attnd_err err;
        const char *field;
    } bad[] = {{good, ATTND_EINVAL, "rows"},  {good, ATTND_EINVAL, "new_rows"},
               {good, ATTND_EINVAL, "layer"}, {good, ATTND_EINVAL, "k"},
               {good, ATTND_EINVAL, "q"},     {good, ATTND_ENOTSUP, "block_mask"},
               {good, ATTND_EINVAL, "model"}, {good, ATTND_ESTALE, "step"}};
    bad[0].a.rows = 3;
    bad[1].a.new_rows = 1;
    bad[2].a.layer = LAYERS;
    bad[3].a.k = bad[3].a.v = NULL;
    bad[4].a.q = NULL;
    bad[5].a.block_mask = &mask;
    bad[6].a.model++;
    bad[7].a.step++;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ATTND_CK_ERR(attnd_attend(p.c, &bad[i].a, NULL, &info), bad[i].err);
        ck_assert_str_eq(info.field, bad[i].field);
    }
    ATTND_CK_ERR(attnd_attend_start(p.c, &good, NULL, NULL, &info), ATTND_ENOTSUP);
    ATTND_CK_OK(attnd_attend(p.c, &good, NULL, &info));
    attnd_close(p.c);
    e2e_stop(&d);
}
END_TEST

// ---- ends

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

static void expect_no_step(player *p) {
    uint64_t step = 0;
    attnd_step_seq s = {.seq = p->seq, .new_len = 1};
    attnd_step_opts opts = {.deadline_ms = 100};
    ATTND_CK_ERR(attnd_step_open(p->c, p->model, &s, 1, &opts, &step, &info), ATTND_ENOSPC);
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
    expect_no_step(&p);
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
    expect_no_step(&p);
    atomic_fetch_add(turns, 1);
    await_turns(3);
    expect_no_step(&p);
    atomic_fetch_add(turns, 1);
    await_turns(5);
    s.seq = p.seq;
    open_step(&p, &s, 1);
    reap(pid);
    attnd_close(p.c);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_inproc");
    TCase *tc = tcase_create("inproc");
    turns = mmap(NULL, sizeof(*turns), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, outputs_have_the_bits_of_the_daemons);
    tcase_add_test(tc, outputs_have_the_bits_of_the_daemons_behind_a_window);
    tcase_add_test(tc, both_ways_share_a_sequence);
    tcase_add_test(tc, a_cached_prefix_has_no_rows);
    tcase_add_test(tc, a_user_without_the_grant_is_refused_by_name);
    tcase_add_test(tc, a_commit_wants_every_layer);
    tcase_add_test(tc, wrong_attends_are_refused_by_name);
    tcase_add_test(tc, a_killed_client_leaves_nothing);
    tcase_add_test(tc, slots_are_not_given_out_while_their_writer_lives);
    tcase_add_loop_test(tc, a_late_step_is_held_until_its_client_is_done, 0, 3);
    tcase_add_test(tc, a_late_step_ends_with_its_process);
    tcase_add_test(tc, slots_are_given_back_when_their_writer_is_back);
    tcase_add_loop_test(tc, a_restarted_daemon_waits_for_those_who_may_still_write, 0, 2);
    tcase_add_test(tc, a_restarted_daemon_waits_for_each_client_of_a_process);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
