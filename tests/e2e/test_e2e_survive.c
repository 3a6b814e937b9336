// What outlives the daemon: with a keeper the worker is killed by SIGKILL, and its clients go on.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/client/attnd.h"
#include "tests/e2e/harness.h"

enum { LAYERS = 2, HEADS = 2, DIM = 16, MAX_ROWS = 8, ROW = HEADS * DIM };

static const attnd_transport transports[] = {ATTND_TRANSPORT_NNG, ATTND_TRANSPORT_RING};
static const char *const flags[] = {"--set", "cache.memory=16MiB", "--set", "cache.slab=1MiB",
                                    NULL};
static const char *const hasty[] = {"--set", "cache.memory=16MiB",
                                    "--set", "cache.slab=1MiB",
                                    "--set", "server.reattach_timeout=300ms",
                                    NULL};
static e2e_daemon d;
static attnd_client *c;
static attnd_errinfo info;
static uint32_t model;

static void start(const char *const *with) {
    e2e_dir(&d);
    d.keeper = true;
    e2e_start(&d, with);
}

static void connect_over(int transport) {
    attnd_connect_opts opts = {.transport = transports[transport]};
    ATTND_CK_OK(attnd_connect(&c, d.url, &opts, &info));
}

static void open_model(void) {
    attnd_model_opts opts = {.name = "m",
                             .dtype = ATTND_F32,
                             .kv_dtype = ATTND_F32,
                             .layers = LAYERS,
                             .q_heads = HEADS,
                             .kv_heads = HEADS,
                             .head_dim = DIM,
                             .block_tokens = 4,
                             .all = ATTND_LAYER_DEFAULT};
    ATTND_CK_OK(attnd_model_open(c, &opts, &model, &info));
}

// worker_of returns the keeper's child, 0 for none.
static pid_t worker_of(pid_t keeper) {
    char path[64];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)keeper, (int)keeper);
    FILE *f = fopen(path, "re");
    ck_assert_ptr_nonnull(f);
    if (fscanf(f, "%d", &pid) != 1) {
        pid = 0;
    }
    fclose(f);
    return pid;
}

static void kill_worker(void) {
    pid_t worker = worker_of(d.pid);
    ck_assert_int_gt(worker, 0);
    kill(worker, SIGKILL);
}

// await_ready waits for the line of the next worker.
static void await_ready(void) {
    char line[256] = "";
    size_t len = 0;
    while (!memchr(line, '\n', len)) {
        ck_assert_uint_lt(len, sizeof(line) - 1);
        ck_assert_int_eq(read(d.out, line + len, 1), 1);
        len++;
    }
}

static float value(uint32_t token, uint32_t kind, uint32_t i) {
    uint32_t h = (token * 64 + i) * 4 + kind;
    h = (h ^ h >> 15) * UINT32_C(2246822519);
    return (float)(h >> 8) / (1 << 23) - 1;
}

// attend attends every layer of a step with rows tokens from `first` on; new: they are appended.
static attnd_err attend(uint64_t step, uint32_t first, uint32_t rows, bool new, float *out) {
    float q[MAX_ROWS * ROW], k[MAX_ROWS * ROW], v[MAX_ROWS * ROW], got[MAX_ROWS * ROW];
    for (uint32_t i = 0; i < rows * ROW; i++) {
        q[i] = value(first + i / ROW, 0, i % ROW);
        k[i] = value(first + i / ROW, 1, i % ROW);
        v[i] = value(first + i / ROW, 2, i % ROW);
    }
    attnd_err err = ATTND_OK;
    for (uint32_t l = 0; l < LAYERS && !err; l++) {
        attnd_attend_args args = {.step = step,
                                  .model = model,
                                  .layer = l,
                                  .rows = rows,
                                  .new_rows = new ? rows : 0,
                                  .q = q,
                                  .k = new ? k : NULL,
                                  .v = new ? v : NULL,
                                  .out = got};
        err = attnd_attend(c, &args, NULL, &info);
        if (out) {
            memcpy(out + l * MAX_ROWS * ROW, got, rows * ROW * sizeof(float));
        }
    }
    return err;
}

static uint64_t append(uint64_t seq, uint32_t first, uint32_t rows) {
    attnd_step_seq s = {.seq = seq, .new_len = rows};
    uint64_t step;
    ATTND_CK_OK(attnd_step_open(c, model, &s, 1, NULL, &step, &info));
    ATTND_CK_OK(attend(step, first, rows, true, NULL));
    return step;
}

static void commit(uint64_t step, uint32_t rows, uint32_t want) {
    uint32_t len = 0;
    ATTND_CK_OK(attnd_step_commit(c, step, &(attnd_accept){.accepted = rows}, 1, &len, &info));
    ck_assert_uint_eq(len, want);
}

// look reads the sequence with one row and wants len committed tokens.
static void look(uint64_t seq, uint32_t len, float out[LAYERS * MAX_ROWS * ROW]) {
    attnd_step_seq s = {.seq = seq, .q_len = 1};
    uint64_t step;
    memset(out, 0, LAYERS * MAX_ROWS * ROW * sizeof(float));
    ATTND_CK_OK(attnd_step_open(c, model, &s, 1, NULL, &step, &info));
    ck_assert_uint_eq(s.committed, len);
    ATTND_CK_OK(attend(step, 1000, 1, false, out));
    ATTND_CK_OK(attnd_step_cancel(c, step, &info));
}

START_TEST(killed_worker_leaves_all_that_was_committed) {
    static float before[LAYERS * MAX_ROWS * ROW], after[LAYERS * MAX_ROWS * ROW];
    uint64_t seq, forked, session;
    uint32_t len, old;
    start(flags);
    connect_over(_i);
    open_model();
    ATTND_CK_OK(attnd_seq_create(c, model, &seq, &info));
    commit(append(seq, 0, 6), 6, 6);
    ATTND_CK_OK(attnd_seq_fork(c, seq, &forked, &len, &info));
    commit(append(forked, 50, 3), 3, 9);
    look(seq, 6, before);
    session = attnd_get_session(c, NULL);
    old = model;
    for (int kills = 0; kills < 3; kills++) {
        uint64_t step = append(seq, 6, 2); // in flight
        kill_worker();
        attnd_err err = attnd_step_commit(c, step, &(attnd_accept){.accepted = 2}, 1, &len, &info);
        ATTND_CK_ERR(err, ATTND_ECONN);
        ATTND_CK_OK(attnd_reconnect(c, &info));
        ck_assert_uint_eq(attnd_get_session(c, NULL), session);
        ck_assert_int_eq(attnd_get_transport(c), transports[_i]);
        ck_assert_uint_eq(model, old);
        err = attnd_step_commit(c, step, &(attnd_accept){.accepted = 2}, 1, &len, &info);
        ATTND_CK_ERR(err, ATTND_ESTALE); // it did not count
        look(seq, 6, after);
        ck_assert_mem_eq(before, after, sizeof(before));
        look(forked, 9, after);
    }
    commit(append(seq, 6, 2), 2, 8);
    ATTND_CK_OK(attnd_seq_free(c, forked, &info));
    attnd_close(c);
    e2e_stop(&d);
}
END_TEST

// A client that was idle has not noticed the loss, and finds out by attnd_reconnect itself.
START_TEST(reconnect_notices_what_an_idle_client_has_not) {
    static float before[LAYERS * MAX_ROWS * ROW], after[LAYERS * MAX_ROWS * ROW];
    uint64_t seq;
    start(flags);
    connect_over(_i);
    open_model();
    ATTND_CK_OK(attnd_seq_create(c, model, &seq, &info));
    commit(append(seq, 0, 6), 6, 6);
    look(seq, 6, before);
    for (int kills = 0; kills < 3; kills++) {
        pid_t old = worker_of(d.pid), now;
        kill_worker();
        while ((now = worker_of(d.pid)) == old || now == 0) {
            e2e_sleep_ms(1);
        }
        e2e_sleep_ms(kills * 100);
        ATTND_CK_OK(attnd_reconnect(c, &info));
        look(seq, 6, after);
        ck_assert_mem_eq(before, after, sizeof(before));
    }
    attnd_close(c);
    e2e_stop(&d);
}
END_TEST

START_TEST(models_are_to_be_opened_again_after_a_re_attach) {
    uint64_t seq, again;
    uint8_t secret[16];
    start(flags);
    connect_over(_i);
    open_model();
    ATTND_CK_OK(attnd_seq_create(c, model, &seq, &info));
    attnd_connect_opts opts = {.transport = transports[_i],
                               .session = attnd_get_session(c, secret)};
    memcpy(opts.secret, secret, sizeof(secret));
    attnd_client *second;
    ATTND_CK_ERR(attnd_connect(&second, d.url, &opts, &info), ATTND_EBUSY); // it is connected
    kill_worker();
    attnd_close(c);
    opts.secret[3] ^= 1;
    attnd_err err;
    while ((err = attnd_connect(&c, d.url, &opts, &info)) == ATTND_ECONN) {
        e2e_sleep_ms(5);
    }
    ATTND_CK_ERR(err, ATTND_EPERM);
    opts.secret[3] ^= 1;
    ATTND_CK_OK(attnd_connect(&c, d.url, &opts, &info)); // as another process would
    attnd_step_seq s = {.seq = seq, .q_len = 1};
    ATTND_CK_ERR(attnd_step_open(c, model, &s, 1, NULL, &again, &info), ATTND_ENOENT);
    uint32_t old = model;
    open_model();
    ck_assert_uint_eq(model, old);
    ATTND_CK_OK(attnd_step_open(c, model, &s, 1, NULL, &again, &info));
    ATTND_CK_OK(attnd_step_cancel(c, again, &info));
    attnd_close(c);
    e2e_stop(&d);
}
END_TEST

// A commit that was made and answered is answered again with the same, after a kill, too.
START_TEST(repeat_of_an_answered_request_is_answered_from_the_ledger) {
    uint64_t seq, session, forked[2];
    uint8_t secret[16];
    char json[128];
    start(flags);
    connect_over(0);
    open_model();
    ATTND_CK_OK(attnd_seq_create(c, model, &seq, &info));
    commit(append(seq, 0, 5), 5, 5);
    session = attnd_get_session(c, secret);
    proto_seq body = {.seq = seq};
    kill_worker();
    attnd_close(c);
    for (int i = 0; i < 2; i++) {
        e2e_client raw;
        e2e_reply r;
        await_ready();
        e2e_connect(&raw, d.url);
        int n = snprintf(json, sizeof(json), "{\"session\":\"%llx\",\"secret\":\"",
                         (unsigned long long)session);
        for (int b = 0; b < 16; b++) {
            n += snprintf(json + n, sizeof(json) - (size_t)n, "%02x", secret[b]);
        }
        snprintf(json + n, sizeof(json) - (size_t)n, "\"}");
        char *reply = e2e_json(&raw, PROTO_HELLO, json);
        ck_assert_ptr_nonnull(strstr(reply, "\"reattached\":true"));
        free(reply);
        ATTND_CK_OK(e2e_call_id(&raw, PROTO_SEQ_FORK, 40, &body, sizeof(body), &r));
        proto_seq got;
        memcpy(&got, r.body, sizeof(got));
        ck_assert_uint_eq(got.len, 5);
        forked[i] = got.seq;
        e2e_reply_fini(&r);
        kill_worker();
        e2e_close(&raw);
    }
    ck_assert_uint_eq(forked[0], forked[1]);
    await_ready();
    e2e_stop(&d);
}
END_TEST

START_TEST(orphans_are_freed_after_their_time_but_kept_sequences) {
    static float before[LAYERS * MAX_ROWS * ROW], after[LAYERS * MAX_ROWS * ROW];
    uint64_t seq, kept;
    uint32_t len;
    e2e_client admin;
    start(hasty);
    connect_over(_i);
    open_model();
    ATTND_CK_OK(attnd_seq_create(c, model, &seq, &info));
    ATTND_CK_OK(attnd_seq_create(c, model, &kept, &info));
    commit(append(seq, 0, 8), 8, 8);
    commit(append(kept, 20, 4), 4, 4);
    look(kept, 4, before);
    ATTND_CK_OK(attnd_seq_keep(c, kept, "kept", 0, &info));
    kill_worker();
    attnd_close(c);
    while (!e2e_log_has(&d, "did not come back")) {
        e2e_sleep_ms(20);
    }
    e2e_connect(&admin, d.admin_url);
    free(e2e_json(&admin, PROTO_HELLO, "{}"));
    ck_assert_double_eq(e2e_stat(&admin, "sequences"), 1);
    ck_assert_double_eq(e2e_stat(&admin, "blocks.in_use"), 1);
    ck_assert_double_eq(e2e_stat(&admin, "accounting_mismatches"), 0);
    connect_over(_i);
    open_model();
    ATTND_CK_OK(attnd_seq_attach(c, model, "kept", &kept, &len, &info));
    ck_assert_uint_eq(len, 4);
    look(kept, 4, after);
    ck_assert_mem_eq(before, after, sizeof(before));
    attnd_close(c);
    e2e_close(&admin);
    e2e_stop(&d);
}
END_TEST

START_TEST(keeper_ends_with_a_worker_that_cannot_start) {
    static const char *const bad[] = {"--listen", "ipc:///nonexistent/a/b", NULL};
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    d.keeper = true;
    e2e_try_start(&d, bad);
    ck_assert_int_eq(e2e_wait(&d, 10000), 1);
    e2e_remove(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_survive");
    TCase *tc = tcase_create("survive");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, killed_worker_leaves_all_that_was_committed, 0, 2);
    tcase_add_loop_test(tc, reconnect_notices_what_an_idle_client_has_not, 0, 2);
    tcase_add_loop_test(tc, models_are_to_be_opened_again_after_a_re_attach, 0, 2);
    tcase_add_test(tc, repeat_of_an_answered_request_is_answered_from_the_ledger);
    tcase_add_loop_test(tc, orphans_are_freed_after_their_time_but_kept_sequences, 0, 2);
    tcase_add_test(tc, keeper_ends_with_a_worker_that_cannot_start);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
