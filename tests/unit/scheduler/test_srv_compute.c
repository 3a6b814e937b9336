// The CPU backend: what the scheduler cuts and batches, it computes as the float64 reference says,
// and it starts, wakes and stops.
#include "server/srv_compute.h"

#include <math.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/check_main.h"

enum {
    Q_HEADS = 4,
    KV_HEADS = 2,
    DIM = 16,
    BLOCK = 16,
    SEQ_BLOCKS = 8,
    NUM = 12,
    MAX_LEN = BLOCK * SEQ_BLOCKS,
    BLOCK_FLOATS = 2 * KV_HEADS * BLOCK * DIM,
    NUM_BLOCKS = NUM * SEQ_BLOCKS,
};

static const attn_shape shape = {.q_dtype = ATTND_F32,
                                 .kv_dtype = ATTND_F32,
                                 .q_heads = Q_HEADS,
                                 .kv_heads = KV_HEADS,
                                 .head_dim = DIM,
                                 .v_head_dim = DIM,
                                 .block_tokens = BLOCK,
                                 .stride_k_token = DIM,
                                 .stride_k_head = BLOCK * DIM,
                                 .stride_v_token = DIM,
                                 .stride_v_head = BLOCK * DIM,
                                 .block_stride = BLOCK_FLOATS * sizeof(float)};

// attend is a request of one row: a sequence of len tokens, all new.
typedef struct attend {
    sched_req req;
    int32_t len;
    uint32_t table[SEQ_BLOCKS];
    float q[MAX_LEN * Q_HEADS * DIM], k[MAX_LEN * KV_HEADS * DIM], v[MAX_LEN * KV_HEADS * DIM];
    float out[MAX_LEN * Q_HEADS * DIM], lse[Q_HEADS * MAX_LEN];
    uint32_t num_done;
    attnd_err err;
    char kernel[32];
} attend;

static float pool[NUM_BLOCKS * BLOCK_FLOATS], pool_reference[NUM_BLOCKS * BLOCK_FLOATS];
static attend attends[NUM];
static uv_loop_t loop;
static srv_compute *compute;
static sched *s;

static attn_row row_of(attend *a) {
    return (attn_row){.q = a->q,
                      .out = a->out,
                      .lse = a->lse,
                      .k_new = a->k,
                      .v_new = a->v,
                      .table = a->table,
                      .stride_q_token = Q_HEADS * DIM,
                      .stride_q_head = DIM,
                      .stride_out_token = Q_HEADS * DIM,
                      .stride_out_head = DIM,
                      .stride_lse_head = MAX_LEN,
                      .stride_k_new_token = KV_HEADS * DIM,
                      .stride_k_new_head = DIM,
                      .stride_v_new_token = KV_HEADS * DIM,
                      .stride_v_new_head = DIM,
                      .v_offset = sizeof(float) * KV_HEADS * BLOCK * DIM,
                      .kv_len = a->len,
                      .q_len = a->len,
                      .new_len = a->len,
                      .q_count = a->len,
                      .flags = ATTN_CAUSAL,
                      .window_left = -1,
                      .window_right = -1};
}

static void fill(sched_req *req, attn_row *rows) {
    rows[0] = row_of(req->user);
}

static void lens(sched_req *req, uint32_t row, int32_t *q_len, int32_t *kv_len) {
    (void)row;
    *q_len = *kv_len = ((attend *)req->user)->len;
}

static void done(sched_req *req, attnd_err err, const attn_choice *choice,
                 const attnd_errinfo *info) {
    attend *a = req->user;
    (void)info;
    a->num_done++;
    a->err = err;
    snprintf(a->kernel, sizeof(a->kernel), "%s", choice ? choice->kernel : "");
}

static float noise(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (float)((double)(state >> 11) / (double)(1ull << 52) - 1.0);
}

static void make(int i, int32_t len) {
    attend *a = &attends[i];
    memset(a, 0, sizeof(*a));
    a->len = len;
    a->req = (sched_req){.shape = &shape,
                         .num_rows = 1,
                         .tenant = (uint32_t)i % 2,
                         .fill = fill,
                         .lens = lens,
                         .done = done,
                         .user = a};
    for (uint32_t b = 0; b < SEQ_BLOCKS; b++) {
        a->table[b] = b * NUM + (uint32_t)i;
    }
    for (int32_t x = 0; x < len * Q_HEADS * DIM; x++) {
        a->q[x] = noise();
    }
    for (int32_t x = 0; x < len * KV_HEADS * DIM; x++) {
        a->k[x] = noise();
        a->v[x] = noise();
    }
}

static uint64_t inline_work; // of the next start

static void start_with(const kv_cache *kv, void *memory, uint64_t bytes) {
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    srv_compute_opts opts = {.loop = &loop,
                             .kv = kv,
                             .pool = memory,
                             .pool_bytes = bytes,
                             .max_rows = 8,
                             .inline_work = inline_work};
    attnd_errinfo info;
    ATTND_CK_OK(srv_compute_create(&compute, &opts, &info));
    sched_opts sopts = {.max_queued = 64,
                        .max_tenant_queued = 64,
                        .max_launch_rows = 8,
                        .max_tenants = 2,
                        .prefill_chunk_tokens = 32,
                        .max_decodes_in_a_row = 4,
                        .now_us = attnd_clock_us};
    ATTND_CK_OK(sched_create(&s, &sopts, &srv_compute_backend(compute)->sched));
    srv_compute_set_sched(compute, s);
}

static void start(void) {
    memset(pool, 0xff, sizeof(pool)); // NaN wherever nothing was appended
    memcpy(pool_reference, pool, sizeof(pool));
    start_with(NULL, pool, sizeof(pool));
}

static void stop(void) {
    srv_compute_stop(compute);
    srv_compute_stop(compute);
    ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    srv_compute_free(compute);
    sched_free(s);
}

static void run_until_idle(void) {
    while (!sched_idle(s)) {
        uv_run(&loop, UV_RUN_ONCE);
    }
}

// check_reference computes the request whole, on a pool of its own, and compares.
static void check_reference(attend *a) {
    static double out[MAX_LEN * Q_HEADS * DIM], lse[Q_HEADS * MAX_LEN];
    attn_row row = row_of(a);
    attn_params p = {.shape = shape,
                     .pool = pool_reference,
                     .pool_bytes = sizeof(pool_reference),
                     .num_blocks = NUM_BLOCKS,
                     .rows = &row,
                     .num_rows = 1};
    ATTND_CK_OK(attn_reference(&p, out, lse));
    double worst = 0;
    for (int32_t x = 0; x < a->len * Q_HEADS * DIM; x++) {
        worst = fmax(worst, fabs(out[x] - (double)a->out[x]));
    }
    for (int32_t h = 0; h < Q_HEADS; h++) {
        for (int32_t t = 0; t < a->len; t++) {
            worst = fmax(worst, fabs(lse[h * a->len + t] - (double)a->lse[h * MAX_LEN + t]));
        }
    }
    ck_assert_double_lt(worst, 1e-5); // |out| <= 1, |lse| < 10, float32
}

START_TEST(chunks_and_batches_give_what_the_reference_gives) {
    static const int32_t lengths[NUM] = {1, 100, 8, 128, 9, 32, 33, 64, 65, 31, 5, 127};
    start();
    for (int i = 0; i < NUM; i++) {
        make(i, lengths[i]);
        ATTND_CK_OK(sched_submit(s, &attends[i].req, NULL));
    }
    run_until_idle();
    for (int i = 0; i < NUM; i++) {
        ck_assert_uint_eq(attends[i].num_done, 1);
        ATTND_CK_OK(attends[i].err);
        ck_assert_str_ne(attends[i].kernel, "");
        check_reference(&attends[i]);
    }
    ck_assert_mem_eq(pool, pool_reference, sizeof(pool)); // appended once, and nowhere else
    stop();
}
END_TEST

START_TEST(work_after_a_pause_wakes_the_threads) {
    start();
    for (int round = 0; round < 20; round++) {
        make(0, 1);
        ATTND_CK_OK(sched_submit(s, &attends[0].req, NULL));
        run_until_idle();
        ATTND_CK_OK(attends[0].err);
        usleep((useconds_t)round % 4 * 1000);
    }
    stop();
}
END_TEST

START_TEST(poll_takes_in_what_ended) {
    start();
    make(0, 1);
    ck_assert(!srv_compute_poll(compute));
    ATTND_CK_OK(sched_submit(s, &attends[0].req, NULL));
    while (!srv_compute_poll(compute)) {
        usleep(10);
    }
    ck_assert_uint_eq(attends[0].num_done, 1);
    make(1, 1); // the wake that is still on its way finds nothing, or the next one
    ATTND_CK_OK(sched_submit(s, &attends[1].req, NULL));
    run_until_idle();
    ck_assert_uint_eq(attends[1].num_done, 1);
    stop();
}
END_TEST

// 2 query rows, 2 keys, 4 heads, 16 + 16 dims: 512 multiply-adds.
enum { TWO_TOKENS = 2 * 2 * Q_HEADS * 2 * DIM };

START_TEST(a_small_launch_runs_at_once_and_is_told_of_later) {
    inline_work = TWO_TOKENS;
    start();
    make(0, 2);
    ATTND_CK_OK(sched_submit(s, &attends[0].req, NULL));
    ck_assert_uint_eq(attends[0].num_done, 0);
    ck_assert(srv_compute_poll(compute)); // nobody was waited for
    ck_assert_uint_eq(attends[0].num_done, 1);
    ATTND_CK_OK(attends[0].err);
    check_reference(&attends[0]);
    ck_assert(!srv_compute_poll(compute));
    stop();
}
END_TEST

START_TEST(the_loop_tells_of_a_small_launch_in_its_next_turn) {
    inline_work = TWO_TOKENS;
    start();
    for (int i = 0; i < NUM; i++) {
        make(i, 2);
        ATTND_CK_OK(sched_submit(s, &attends[i].req, NULL));
        uv_run(&loop, UV_RUN_NOWAIT);
        ck_assert_uint_eq(attends[i].num_done, 1);
        check_reference(&attends[i]);
    }
    ck_assert_int_eq(uv_backend_timeout(&loop), -1); // it may sleep
    stop();
}
END_TEST

START_TEST(what_comes_behind_a_small_launch_gathers) {
    inline_work = TWO_TOKENS;
    start();
    for (int i = 0; i < 7; i++) { // the first one runs, six are one launch of the threads
        make(i, 2);
        ATTND_CK_OK(sched_submit(s, &attends[i].req, NULL));
    }
    ck_assert(srv_compute_poll(compute));
    sched_info info;
    sched_get_info(s, &info);
    ck_assert_uint_eq(info.launches, 2);
    run_until_idle();
    for (int i = 0; i < 7; i++) {
        ck_assert_uint_eq(attends[i].num_done, 1);
        check_reference(&attends[i]);
    }
    stop();
}
END_TEST

START_TEST(a_launch_above_the_limit_is_the_threads) {
    inline_work = TWO_TOKENS - 1;
    start();
    make(0, 2);
    ck_assert(!srv_compute_crowds(compute));
    ATTND_CK_OK(sched_submit(s, &attends[0].req, NULL));
    cpu_set_t set;
    ck_assert_int_eq(sched_getaffinity(0, sizeof(set), &set), 0);
    ck_assert(srv_compute_crowds(compute) == (CPU_COUNT(&set) <= 2));
    run_until_idle();
    ck_assert(!srv_compute_crowds(compute));
    check_reference(&attends[0]);
    stop();
}
END_TEST

START_TEST(stop_answers_a_small_launch_and_what_gathered_behind_it) {
    inline_work = TWO_TOKENS;
    start();
    for (int i = 0; i < 2; i++) {
        make(i, 2);
        ATTND_CK_OK(sched_submit(s, &attends[i].req, NULL));
    }
    srv_compute_stop(compute);
    ck_assert(sched_idle(s));
    ATTND_CK_OK(attends[0].err);
    ATTND_CK_ERR(attends[1].err, ATTND_ESHUTDOWN);
    stop();
}
END_TEST

// open_step makes one sequence step of new_len tokens and returns it.
static uint64_t open_step(kv_cache *kv, uint64_t session, uint32_t model, uint64_t seq,
                          uint32_t new_len, const kv_copy **copies, uint32_t *num_copies) {
    kv_step_seq step_seq = {.seq = seq, .new_len = new_len};
    bool may_wait;
    uint64_t step;
    ATTND_CK_OK(kv_step_open(kv, (kv_request){.session = session}, model, &step_seq, 1, &step,
                             copies, num_copies, &may_wait, NULL));
    return step;
}

START_TEST(copies_of_a_forked_sequence_run) {
    enum { LEN = 20, ROW = DIM * sizeof(float) };
    kv_arena arena;
    ATTND_CK_OK(kv_arena_open_host(&arena, 2 << 20, NULL));
    kv_opts opts = {.slab_bytes = 1 << 20,
                    .max_blocks = 64,
                    .max_seqs = 4,
                    .max_seq_blocks = 8,
                    .max_models = 1,
                    .max_tenants = 1,
                    .max_sessions = 1,
                    .max_steps = 2,
                    .max_step_seqs = 1};
    kv_cache *kv;
    ATTND_CK_OK(kv_create(&kv, &arena, &opts, NULL));
    kv_model_spec spec = {.name = "m", .num_groups = 1};
    spec.groups[0] = (kv_group_spec){.layers = 1,
                                     .kv_heads = 1,
                                     .k_row_bytes = ROW,
                                     .v_row_bytes = ROW,
                                     .block_tokens = BLOCK,
                                     .window_left = -1};
    uint32_t tenant, model, committed, num_copies, num_entries;
    uint64_t session, seq, forked;
    const uint8_t secret[KV_SECRET_BYTES] = {1};
    const kv_copy *copies;
    ATTND_CK_OK(kv_tenant_set(kv, "t", 0, &tenant));
    spec.tenant = tenant;
    ATTND_CK_OK(kv_model_open(kv, &spec, &model, NULL));
    ATTND_CK_OK(kv_session_open(kv, tenant, secret, &session));
    kv_request rq = {.session = session};
    ATTND_CK_OK(kv_seq_create(kv, rq, model, &seq, NULL));
    uint64_t step = open_step(kv, session, model, seq, LEN, &copies, &num_copies);
    uint32_t last = kv_step_table(kv, step, 0, 0, &num_entries)[1]; // tokens 16 to 19
    char *from = (char *)arena.base + (size_t)last * KV_BLOCK_UNIT;
    memset(from, 7, 4 * ROW);
    memset(from + BLOCK * ROW, 8, 4 * ROW); // V
    ATTND_CK_OK(kv_step_commit(kv, rq, step, &(uint32_t){LEN}, 1, NULL));
    ATTND_CK_OK(kv_seq_fork(kv, rq, seq, &forked, &committed, NULL));
    step = open_step(kv, session, model, forked, 1, &copies, &num_copies);
    ck_assert_uint_eq(num_copies, 1);
    char *to =
        (char *)arena.base + (size_t)kv_step_table(kv, step, 0, 0, &num_entries)[1] * KV_BLOCK_UNIT;
    ck_assert_ptr_ne(to, from);

    start_with(kv, arena.base, arena.bytes);
    attend *a = &attends[0];
    memset(a, 0, sizeof(*a));
    a->req = (sched_req){.copies = copies, .num_copies = num_copies, .done = done, .user = a};
    ATTND_CK_OK(sched_submit(s, &a->req, NULL));
    run_until_idle();
    ATTND_CK_OK(a->err);
    ck_assert_mem_eq(to, from, 4 * ROW);
    ck_assert_mem_eq(to + BLOCK * ROW, from + BLOCK * ROW, 4 * ROW);
    stop();
    kv_free(kv);
    kv_arena_close_host(&arena);
}
END_TEST

START_TEST(refused_launch_is_an_error_of_its_requests) {
    start();
    make(0, 1);
    attends[0].table[0] = NUM_BLOCKS; // outside the pool
    ATTND_CK_OK(sched_submit(s, &attends[0].req, NULL));
    run_until_idle();
    ATTND_CK_ERR(attends[0].err, ATTND_EINVAL);
    stop();
}
END_TEST

START_TEST(stop_answers_what_is_queued) {
    start();
    for (int i = 0; i < NUM; i++) {
        make(i, 128);
        ATTND_CK_OK(sched_submit(s, &attends[i].req, NULL));
    }
    srv_compute_stop(compute); // the running chunk ends, the rest never starts
    ck_assert(sched_idle(s));
    for (int i = 0; i < NUM; i++) {
        ck_assert_uint_eq(attends[i].num_done, 1);
        ATTND_CK_ERR(attends[i].err, ATTND_ESHUTDOWN);
    }
    stop();
}
END_TEST

START_TEST(unknown_isa_is_refused) {
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    srv_compute_opts opts = {.loop = &loop, .isa = "abacus", .max_rows = 8};
    attnd_errinfo info;
    ATTND_CK_ERR(srv_compute_create(&compute, &opts, &info), ATTND_ENOTSUP);
    ck_assert_str_ne(info.text, "");
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    srv_compute_stop(NULL);
    srv_compute_free(NULL);
}
END_TEST

static Suite *suite(void) {
    Suite *suite = suite_create("srv_compute");
    TCase *t = tcase_create("compute");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, chunks_and_batches_give_what_the_reference_gives);
    tcase_add_test(t, work_after_a_pause_wakes_the_threads);
    tcase_add_test(t, poll_takes_in_what_ended);
    tcase_add_test(t, a_small_launch_runs_at_once_and_is_told_of_later);
    tcase_add_test(t, the_loop_tells_of_a_small_launch_in_its_next_turn);
    tcase_add_test(t, what_comes_behind_a_small_launch_gathers);
    tcase_add_test(t, a_launch_above_the_limit_is_the_threads);
    tcase_add_test(t, stop_answers_a_small_launch_and_what_gathered_behind_it);
    tcase_add_test(t, copies_of_a_forked_sequence_run);
    tcase_add_test(t, refused_launch_is_an_error_of_its_requests);
    tcase_add_test(t, stop_answers_what_is_queued);
    tcase_add_test(t, unknown_isa_is_refused);
    suite_add_tcase(suite, t);
    return suite;
}

CHECK_MAIN(suite)
