// A daemon whose GPU fails, by libattnd: over NNG (loop index 0) and over a ring (1).  Errors are
// asked for by the number of query tokens (tests/device).  ATTND_E2E_BINARY names the daemon:
// attnd_fake, or attnd_faulty on a machine with a GPU.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/client/attnd.h"
#include "proto/dtype.h"
#include "tests/device/faulty_device.h"
#include "tests/e2e/harness.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, LAYERS = 2, MAX_ROWS = 64, LOST_MS = 10000 };
enum { INVALID_VALUE = 1, ILLEGAL_ADDRESS = 700 }; // of CUDA

static const char *const flags[] = {
    "--set", "cache.memory=64MiB",        "--set", "cache.slab=1MiB",
    "--set", "server.restart_pause=50ms", NULL};
static const attnd_transport transports[] = {ATTND_TRANSPORT_NNG, ATTND_TRANSPORT_RING};

static e2e_daemon d;
static char opens[96]; // ATTND_FAULTY_OPEN
static attnd_errinfo info;

// runtime is a client with one sequence.
typedef struct runtime {
    attnd_client *client;
    uint32_t model;
    uint64_t seq;
    uint16_t q[MAX_ROWS * HEADS * DIM], k[MAX_ROWS * KV_HEADS * DIM], v[MAX_ROWS * KV_HEADS * DIM];
    uint16_t out[MAX_ROWS * HEADS * DIM];
} runtime;

static runtime a, b;

static void join(runtime *r, int which) {
    attnd_connect_opts opts = {.transport = transports[which], .timeout_ms = 20000};
    attnd_model_opts model = {.name = "m",
                              .dtype = ATTND_BF16,
                              .kv_dtype = ATTND_BF16,
                              .layers = LAYERS,
                              .q_heads = HEADS,
                              .kv_heads = KV_HEADS,
                              .head_dim = DIM,
                              .all = ATTND_LAYER_DEFAULT};
    memset(r, 0, sizeof(*r));
    ATTND_CK_OK(attnd_connect(&r->client, d.url, &opts, &info));
    ATTND_CK_OK(attnd_model_open(r->client, &model, &r->model, &info));
    ATTND_CK_OK(attnd_seq_create(r->client, r->model, &r->seq, &info));
    for (int i = 0; i < MAX_ROWS * KV_HEADS * DIM; i++) {
        r->v[i] = 0x3f80; // 1.0 in bf16
    }
}

static attnd_err open_step(runtime *r, uint32_t rows, uint64_t *step) {
    attnd_step_seq s = {.seq = r->seq, .new_len = rows};
    return attnd_step_open(r->client, r->model, &s, 1, NULL, step, &info);
}

static attnd_err attend(runtime *r, uint64_t step, uint32_t layer, uint32_t rows) {
    attnd_attend_args args = {.step = step,
                              .model = r->model,
                              .layer = layer,
                              .rows = rows,
                              .new_rows = rows,
                              .q = r->q,
                              .k = r->k,
                              .v = r->v,
                              .out = r->out};
    memset(r->out, 0, sizeof(r->out));
    return attnd_attend(r->client, &args, NULL, &info);
}

// token does a whole step.  All v are one, so all outputs are.
static void token(runtime *r, uint32_t rows) {
    uint64_t step;
    ATTND_CK_OK(open_step(r, rows, &step));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        ATTND_CK_OK(attend(r, step, layer, rows));
        for (uint32_t i = 0; i < rows * HEADS * DIM; i++) {
            ck_assert_uint_eq(r->out[i], 0x3f80);
        }
    }
    attnd_accept accept = {.accepted = rows};
    ATTND_CK_OK(attnd_step_commit(r->client, step, &accept, 1, NULL, &info));
}

// mean appends rows tokens whose v are values [rows] to a sequence and returns the last row's
// output: all keys are zero, so it is the mean of the values that it sees.  The step stays open.
static double mean(runtime *r, uint64_t seq, const float *values, uint32_t rows,
                   const uint64_t *tree, uint64_t *step) {
    attnd_step_seq s = {.seq = seq, .new_len = rows, .tree_mask = tree};
    ATTND_CK_OK(attnd_step_open(r->client, r->model, &s, 1, NULL, step, &info));
    for (uint32_t i = 0; i < rows * KV_HEADS * DIM; i++) {
        r->v[i] = attnd_f32_to_bf16(values[i / (KV_HEADS * DIM)]);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        ATTND_CK_OK(attend(r, *step, layer, rows));
    }
    return (double)attnd_bf16_to_f32(r->out[(rows * HEADS - 1) * DIM]);
}

static void commit(runtime *r, uint64_t step, uint32_t accepted, const uint32_t *path) {
    attnd_accept accept = {.accepted = accepted, .num_path = path ? accepted : 0, .path = path};
    ATTND_CK_OK(attnd_step_commit(r->client, step, &accept, 1, NULL, &info));
}

static void begin_with(bool keeper, int which) {
    memset(&d, 0, sizeof(d));
    setenv("ATTND_FAULTY", "1", 1);
    e2e_dir(&d);
    d.keeper = keeper;
    snprintf(opens, sizeof(opens), "%s/opens", d.dir);
    setenv("ATTND_FAULTY_OPEN", opens, 1);
    e2e_start(&d, flags);
    join(&a, which);
    join(&b, which);
    token(&a, 40);
    token(&b, 1);
}

static void begin(int which) {
    begin_with(false, which);
}

static void end(void) {
    attnd_close(a.client);
    attnd_close(b.client);
}

static char *stats(runtime *r) {
    char *json = NULL;
    ATTND_CK_OK(attnd_admin(r->client, "stats", NULL, &json, &info));
    return json;
}

START_TEST(status_names_the_device) {
    begin(_i);
    char *json = stats(&a);
    ck_assert_ptr_nonnull(strstr(json, "\"device\":\"cuda:0\""));
    ck_assert_ptr_nonnull(strstr(json, "\"kind\":\"device\""));
    attnd_free(json);
    end();
    e2e_stop(&d);
}
END_TEST

// 40 ones in blocks of 64: a fork shares the block that the next token goes into.
START_TEST(forks_and_trees_move_rows_on_the_device) {
    enum { ONES = 40 };
    const double slack = 1.0 / 128; // of bf16, twice
    const float big = 100;
    uint64_t forked, step;
    begin(_i);
    ATTND_CK_OK(attnd_seq_fork(a.client, a.seq, &forked, NULL, &info));
    double got = mean(&a, forked, &big, 1, NULL, &step);
    double want = (ONES + 100) / (ONES + 1.0);
    ck_assert_double_lt(fabs(got / want - 1), slack);
    commit(&a, step, 1, NULL);
    const float one = 1;
    ck_assert_double_eq(mean(&a, a.seq, &one, 1, NULL, &step), 1); // it has its own block
    commit(&a, step, 1, NULL);
    // A tree of the fork: row 0, and rows 1, 2 and 3 that see it; 2 and 3 are in one branch.
    const float nodes[] = {200, 400, 800, 1600};
    const uint64_t tree[] = {1, 3, 5, 13};
    const uint32_t path[] = {0, 2, 3};
    got = mean(&a, forked, nodes, 4, tree, &step);
    want = (ONES + 100 + 200 + 800 + 1600) / (ONES + 4.0);
    ck_assert_double_lt(fabs(got / want - 1), slack);
    commit(&a, step, 3, path);
    got = mean(&a, forked, &one, 1, NULL, &step);
    want = (ONES + 100 + 200 + 800 + 1600 + 1) / (ONES + 5.0);
    ck_assert_double_lt(fabs(got / want - 1), slack);
    commit(&a, step, 1, NULL);
    end();
    e2e_stop(&d);
}
END_TEST

START_TEST(a_launch_error_reaches_the_request_it_belongs_to) {
    begin(_i);
    uint64_t step;
    ATTND_CK_OK(open_step(&a, FAULTY_LAUNCH, &step));
    ATTND_CK_ERR(attend(&a, step, 0, FAULTY_LAUNCH), ATTND_ECUDA);
    ck_assert_int_eq(info.detail, INVALID_VALUE);
    ck_assert_ptr_nonnull(strstr(info.text, "invalid argument"));
    token(&b, 3); // nobody else
    ATTND_CK_OK(attnd_step_cancel(a.client, step, &info));
    token(&a, 3); // and nothing is left of it
    char *json = stats(&a);
    ck_assert_ptr_nonnull(strstr(json, "\"state\":\"ready\""));
    attnd_free(json);
    end();
    e2e_stop(&d);
}
END_TEST

// lose has the device lost under an attend.
static void lose(runtime *r, uint32_t how) {
    uint64_t step;
    ATTND_CK_OK(open_step(r, how, &step));
    ATTND_CK_ERR(attend(r, step, 0, how), ATTND_ECUDA);
    ck_assert_int_eq(info.detail, ILLEGAL_ADDRESS);
    ck_assert_ptr_nonnull(strstr(info.text, "illegal memory access"));
}

START_TEST(a_lost_device_fails_what_runs_and_ends_the_daemon) {
    uint64_t step;
    begin(_i);
    lose(&a, FAULTY_LOSS);
    char *json = stats(&b);
    ck_assert_ptr_nonnull(strstr(json, "\"state\":\"lost\""));
    attnd_free(json);
    ATTND_CK_ERR(open_step(&b, 1, &step), ATTND_ESHUTDOWN);
    ck_assert_int_eq(e2e_wait(&d, LOST_MS), 1);
    ck_assert(e2e_log_has(&d, "cuda:0 is lost"));
    ck_assert(e2e_log_has(&d, "illegal memory access"));
    end();
    e2e_remove(&d);
}
END_TEST

// await_end waits until the worker that lost its device has ended.
static void await_end(void) {
    uint64_t until = e2e_now_ms() + LOST_MS;
    while (!e2e_log_has(&d, "the worker ended by exit status 1")) {
        ck_assert_uint_lt(e2e_now_ms(), until);
        e2e_sleep_ms(10);
    }
}

// reconnect notices the loss, then comes back to the next worker.
static attnd_err reconnect(runtime *r) {
    char *json;
    while (!attnd_admin(r->client, "stats", NULL, &json, &info)) {
        attnd_free(json);
    }
    return attnd_reconnect(r->client, &info);
}

START_TEST(the_cache_outlives_the_loss_of_its_device) {
    const float big = 100;
    uint64_t step;
    begin_with(true, _i);
    lose(&a, FAULTY_LOSS);
    await_end();
    ATTND_CK_OK(reconnect(&a));
    ATTND_CK_OK(reconnect(&b));
    double got = mean(&a, a.seq, &big, 1, NULL, &step), want = (40 + 100) / 41.0;
    ck_assert_double_lt(fabs(got / want - 1), 1.0 / 128);
    commit(&a, step, 1, NULL);
    token(&b, 40);
    ck_assert(!e2e_log_has(&d, "starts empty"));
    end();
    e2e_stop(&d);
}
END_TEST

static void write_opens(const char *letters) {
    FILE *f = fopen(opens, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_ge(fputs(letters, f), 0);
    fclose(f);
}

// a has 40 ones, b has one.
START_TEST(the_cache_waits_for_a_device_that_cannot_be_opened) {
    const float big = 100;
    uint64_t step;
    struct stat left;
    begin_with(true, _i);
    write_opens("cacfccccccc");
    lose(&a, FAULTY_LOSS);
    await_end();
    ATTND_CK_OK(reconnect(&a));
    ATTND_CK_OK(reconnect(&b));
    ck_assert_int_eq(stat(opens, &left), 0);
    ck_assert_int_eq(left.st_size, 0); // all eleven were met
    double got = mean(&a, a.seq, &big, 1, NULL, &step), want = (40 + 100) / 41.0;
    ck_assert_double_lt(fabs(got / want - 1), 1.0 / 128);
    commit(&a, step, 1, NULL);
    got = mean(&b, b.seq, &big, 1, NULL, &step);
    want = (1 + 100) / 2.0;
    ck_assert_double_lt(fabs(got / want - 1), 1.0 / 128);
    commit(&b, step, 1, NULL);
    ck_assert(e2e_log_has(&d, "no context, as was asked for: it is waited for, with the cache"));
    ck_assert(!e2e_log_has(&d, "given up"));
    ck_assert(!e2e_log_has(&d, "starts empty"));
    end();
    e2e_stop(&d);
}
END_TEST

START_TEST(a_cache_whose_memory_is_spoilt_is_given_up) {
    begin_with(true, _i);
    lose(&a, FAULTY_MEMORY);
    await_end();
    ATTND_CK_ERR(reconnect(&a), ATTND_ESTALE); // a new session
    ck_assert(e2e_log_has(&d, "so is the cache"));
    attnd_close(a.client);
    join(&a, _i);
    token(&a, 40);
    end();
    e2e_stop(&d);
}
END_TEST

START_TEST(a_gpu_that_is_not_there_is_a_line_at_the_start) {
    const char *const other[] = {"--device", "cuda:99", NULL};
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    d.keeper = _i;
    e2e_try_start(&d, other);
    ck_assert_int_eq(e2e_wait(&d, LOST_MS), 1);
    ck_assert(e2e_log_has(&d, "there is no cuda:99, the machine has"));
    e2e_remove(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_gpu");
    TCase *tc = tcase_create("gpu");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, status_names_the_device, 0, 2);
    tcase_add_loop_test(tc, forks_and_trees_move_rows_on_the_device, 0, 2);
    tcase_add_loop_test(tc, a_launch_error_reaches_the_request_it_belongs_to, 0, 2);
    tcase_add_loop_test(tc, a_lost_device_fails_what_runs_and_ends_the_daemon, 0, 2);
    tcase_add_loop_test(tc, the_cache_outlives_the_loss_of_its_device, 0, 2);
    tcase_add_loop_test(tc, the_cache_waits_for_a_device_that_cannot_be_opened, 0, 2);
    tcase_add_loop_test(tc, a_cache_whose_memory_is_spoilt_is_given_up, 0, 2);
    tcase_add_loop_test(tc, a_gpu_that_is_not_there_is_a_line_at_the_start, 0, 2);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
