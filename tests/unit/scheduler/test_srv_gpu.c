// The GPU backend over a device of host memory: whatever of a launch fits a buffer, outputs are the
// float64 reference's; copies run in order; errors and the loss of the device reach whom they
// concern.
#include "server/srv_gpu.h"

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "kvcache/kv_tier.h"
#include "proto/clock.h"
#include "proto/proto_region.h"
#include "server/srv_gap.h"
#include "tests/check_main.h"
#include "tests/device/fake_device.h"

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
    PAD = 8, // floats between heads, so that tensors are not packed
    Q_ROW = Q_HEADS * (DIM + PAD),
    KV_ROW = KV_HEADS * (DIM + PAD),
    ROOMY = 8 << 20,
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

// attend is a request of one row: a sequence of old tokens and fresh ones behind them.
typedef struct attend {
    sched_req req;
    int32_t kv_len, rows;
    uint32_t table[SEQ_BLOCKS];
    float q[MAX_LEN * Q_ROW], k[MAX_LEN * KV_ROW], v[MAX_LEN * KV_ROW];
    float out[MAX_LEN * Q_ROW], lse[Q_HEADS * MAX_LEN];
    int32_t positions[MAX_LEN];
    uint64_t tree[MAX_LEN];
    bool has_tree, has_mask;
    attn_block_mask mask;
    uint32_t mask_start[MAX_LEN], mask_blocks[MAX_LEN];
    uint32_t num_done, order, num_missed;
    attnd_err err;
    attnd_errinfo info;
} attend;

static attend attends[NUM];
static float pool_reference[NUM_BLOCKS * BLOCK_FLOATS];
static const float sinks[2][Q_HEADS] = {{0.5f, -1, 2, 0}, {3, 0, -2, 1}};
static const float slopes[Q_HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f};
static const float inv_freq[DIM / 2] = {1, 0.3f, 0.1f, 0.03f, 0.01f, 0.003f, 0.001f, 0.0003f};
static const attn_rope rope = {.inv_freq = inv_freq, .attention_factor = 1, .rotary_dim = DIM};

static uv_loop_t loop;
static srv_gpu *gpu;
static srv_backend *backend;
static kv_arena arena;
static sched *s;
static attn_device_ops device_ops;
static atomic_uint num_refused; // uploads that are to be
static uint32_t num_lost, num_done;
static attnd_errinfo lost_info;

static attn_row row_of(attend *a) {
    return (attn_row){.q = a->q,
                      .out = a->out,
                      .lse = a->lse,
                      .k_new = a->k,
                      .v_new = a->v,
                      .table = a->table,
                      .stride_q_token = Q_ROW,
                      .stride_q_head = DIM + PAD,
                      .stride_out_token = Q_ROW,
                      .stride_out_head = DIM + PAD,
                      .stride_lse_head = MAX_LEN,
                      .stride_k_new_token = KV_ROW,
                      .stride_k_new_head = DIM + PAD,
                      .stride_v_new_token = KV_ROW,
                      .stride_v_new_head = DIM + PAD,
                      .v_offset = sizeof(float) * KV_HEADS * BLOCK * DIM,
                      .kv_len = a->kv_len,
                      .q_len = a->rows,
                      .new_len = a->rows,
                      .q_count = a->rows,
                      .flags = ATTN_CAUSAL,
                      .window_left = -1,
                      .window_right = -1,
                      .sinks = sinks[a->kv_len % 2],
                      .alibi_slopes = a->kv_len % 3 ? slopes : NULL,
                      .rope = &rope,
                      .q_positions = a->positions,
                      .k_positions = a->positions,
                      .tree_mask = a->has_tree ? a->tree : NULL,
                      .block_mask = a->has_mask ? &a->mask : NULL};
}

static void fill(sched_req *req, attn_row *rows) {
    rows[0] = row_of(req->user);
}

static void lens(sched_req *req, uint32_t row, int32_t *q_len, int32_t *kv_len) {
    (void)row;
    const attend *a = req->user;
    *q_len = a->rows;
    *kv_len = a->kv_len;
}

static void done(sched_req *req, attnd_err err, const attn_choice *choice,
                 const attnd_errinfo *info) {
    attend *a = req->user;
    (void)choice;
    a->num_done++;
    a->order = num_done++;
    a->err = err;
    a->info = *info;
}

static float noise(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (float)((double)(state >> 11) / (double)(1ull << 52) - 1.0);
}

static void fill_noise(float *x, int32_t num) {
    for (int32_t i = 0; i < num; i++) {
        x[i] = noise();
    }
}

// make_mask has every second query block of 10 tokens see the even blocks, the others the odd ones.
// Its lists lie behind those of another sequence.
static void make_mask(attend *a) {
    enum { BEHIND = 3, Q_BLOCK = 10 };
    uint32_t num = BEHIND, num_kv = (uint32_t)(a->kv_len + BLOCK - 1) / BLOCK, q_block = 0;
    memset(a->mask_blocks, 0xff, BEHIND * sizeof(a->mask_blocks[0]));
    a->mask_start[0] = BEHIND;
    for (int32_t t = 0; t < a->rows; t += Q_BLOCK) {
        for (uint32_t b = q_block % 2; b < num_kv; b += 2) {
            a->mask_blocks[num++] = b;
        }
        a->mask_start[++q_block] = num;
    }
    a->mask = (attn_block_mask){a->mask_start, a->mask_blocks, Q_BLOCK};
    a->has_mask = true;
}

// make readies sequence i for a step of rows new tokens behind old ones.
static void make(int i, int32_t old, int32_t rows) {
    attend *a = &attends[i];
    memset(a, 0, sizeof(*a));
    a->kv_len = old + rows;
    a->rows = rows;
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
    fill_noise(a->q, rows * Q_ROW);
    fill_noise(a->k, rows * KV_ROW);
    fill_noise(a->v, rows * KV_ROW);
    for (int32_t t = 0; t < rows; t++) {
        a->positions[t] = 1000 + 3 * (old + t);
        a->tree[t] = (1ull << t % 64) | 0x5555555555555555u; // itself, and every second before it
    }
    a->has_tree = rows <= 64 && i % 2 == 1;
    if (i % 3 == 1) { // among them 100 rows, and some with a tree
        make_mask(a);
    }
}

static void lost(void *ctx, const attnd_errinfo *info, bool spoilt) {
    (void)ctx;
    ck_assert(!spoilt);
    num_lost++;
    lost_info = *info;
}

// ran_ahead tells of the launch of the request whose number is its ticket.
static void ran_ahead(void *ctx, uint64_t ticket, const sched_launch *launch) {
    (void)ctx;
    attend *a = &attends[ticket];
    a->num_done += !launch->missed;
    a->num_missed += launch->missed;
    a->err = launch->err;
    a->info = launch->info;
}

// upload refuses as many as it is told to.
static attnd_err upload(attn_device *d, uint32_t buffer, uint64_t off, uint64_t bytes,
                        attnd_errinfo *info) {
    if (num_refused > 0) {
        num_refused--;
        return attnd_fail(info, ATTND_ECUDA, "cuda", "refused, as was asked for");
    }
    return fake_device_ops.upload(d, buffer, off, bytes, info);
}

// launch_gated does, behind a gate that the test expects, what it says of the client's stream.
static atomic_bool expects_gate;
static atomic_uint num_gates; // of those
static void (*on_gate)(void);
static bool refuses_gates;

static attnd_err launch_gated(attn_device *d, uint32_t buffer, uint64_t pair, attnd_errinfo *info) {
    bool expected = atomic_exchange(&expects_gate, false);
    attnd_err err = refuses_gates && expected
                        ? attnd_fail(info, ATTND_ECUDA, "cuda", "refused, as was asked for")
                        : fake_device_ops.launch_gated(d, buffer, pair, info);
    if (on_gate && expected) {
        on_gate();
    }
    num_gates += expected;
    return err;
}

static void start(uint64_t staging_bytes, int32_t limit, const kv_cache *kv) {
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    for (int i = 0; i < NUM_BLOCKS * BLOCK_FLOATS; i++) {
        pool_reference[i] = NAN;
    }
    num_lost = num_done = 0;
    fake_device_limit(limit);
    device_ops = fake_device_ops;
    device_ops.upload = upload;
    device_ops.launch_gated = launch_gated;
    srv_gpu_opts opts = {.device_ops = &device_ops,
                         .arena_bytes = sizeof(pool_reference),
                         .staging_bytes = staging_bytes,
                         .max_rows = 8,
                         .spin_us = 1000000,
                         .ahead = true,
                         .waits = true,
                         .lost = lost};
    attnd_errinfo info;
    ATTND_CK_OK(srv_gpu_open(&gpu, &opts, &arena, &info));
    ck_assert(arena.on_device);
    ck_assert_str_eq(arena.ops->kind, "device");
    ATTND_CK_OK(srv_gpu_start(gpu, &loop, kv, &info));
    backend = srv_gpu_backend(gpu);
    backend->ran_ahead = ran_ahead;
    sched_opts sopts = {.max_queued = 64,
                        .max_tenant_queued = 64,
                        .max_launch_rows = 8,
                        .max_tenants = 2,
                        .prefill_chunk_tokens = 32,
                        .prefill_alone_tokens = 64, // so two chunks may be under way
                        .max_decodes_in_a_row = 4,
                        .now_us = attnd_clock_us};
    ATTND_CK_OK(sched_create(&s, &sopts, &backend->sched));
    backend->ops->set_sched(backend, s);
}

static void stop(void) {
    backend->ops->stop(backend);
    backend->ops->stop(backend);
    ck_assert_int_eq(uv_run(&loop, UV_RUN_DEFAULT), 0);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
    backend->ops->free(backend);
    sched_free(s);
}

static void submit(int i) {
    attnd_errinfo info;
    ATTND_CK_OK(sched_submit(s, &attends[i].req, &info));
}

static void run_until_idle(void) {
    while (!sched_idle(s)) {
        uv_run(&loop, UV_RUN_ONCE);
    }
}

// check_reference computes the request whole, on a pool of the host, and compares.
static void check_reference(attend *a) {
    static double out[MAX_LEN * Q_HEADS * DIM], lse[Q_HEADS * MAX_LEN];
    attn_row row = row_of(a);
    attn_params p = {.shape = shape,
                     .pool = pool_reference,
                     .pool_bytes = sizeof(pool_reference),
                     .num_blocks = NUM_BLOCKS,
                     .rows = &row,
                     .num_rows = 1};
    ck_assert_uint_eq(a->num_done, 1);
    ATTND_CK_OK(a->err);
    ATTND_CK_OK(attn_reference(&p, out, lse));
    double worst = 0;
    for (int32_t t = 0; t < a->rows; t++) {
        for (int32_t h = 0; h < Q_HEADS; h++) {
            const float *got = a->out + t * Q_ROW + h * (DIM + PAD);
            for (int32_t i = 0; i < DIM; i++) {
                worst = fmax(worst, fabs(out[(t * Q_HEADS + h) * DIM + i] - (double)got[i]));
            }
            ck_assert_double_eq((double)got[DIM], 0); // nothing is written between heads
            double want = lse[h * a->rows + t], lse_got = (double)a->lse[h * MAX_LEN + t];
            worst = fmax(worst, isinf(want) && want == lse_got ? 0 : fabs(want - lse_got));
        }
    }
    ck_assert_double_lt(worst, 2e-5); // |out| <= 1, |lse| < 10, float32
}

// converse runs prompts of many lengths, and two more steps of each sequence.
static void converse(void) {
    static const int32_t lengths[NUM] = {1, 100, 8, 119, 9, 32, 33, 64, 65, 31, 5, 110};
    static const int32_t more[2] = {7, 1};
    int32_t old[NUM] = {0};
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < NUM; i++) {
            make(i, old[i], step ? more[step - 1] : lengths[i]);
            submit(i);
        }
        run_until_idle();
        for (int i = 0; i < NUM; i++) {
            check_reference(&attends[i]);
            old[i] = attends[i].kv_len;
        }
    }
}

START_TEST(launches_give_what_the_reference_gives) {
    start(ROOMY, 0, NULL);
    converse();
    stop();
}
END_TEST

// A prompt of 119 tokens has 30 KiB of k and v.  One token with its table takes 2.5 KiB, since
// everything is aligned to 256 bytes.
START_TEST(what_does_not_fit_a_buffer_is_cut) {
    static const uint64_t sizes[] = {200000, 40000, 10000, 6000, 5000};
    start(sizes[_i], 0, NULL);
    converse();
    stop();
}
END_TEST

START_TEST(what_the_device_finds_too_large_is_cut) {
    static const int32_t limits[] = {31, 8, 1};
    start(ROOMY, limits[_i], NULL);
    converse();
    stop();
}
END_TEST

START_TEST(a_token_that_fits_no_buffer_is_an_error_of_its_request) {
    start(1024, 0, NULL);
    make(0, 0, 1);
    submit(0);
    run_until_idle();
    ATTND_CK_ERR(attends[0].err, ATTND_EMSGSIZE);
    ck_assert_str_eq(attends[0].info.field, "staging");
    stop();
}
END_TEST

START_TEST(two_launches_are_under_way_and_end_in_order) {
    start(ROOMY, 0, NULL);
    for (int i = 0; i < 4; i++) {
        make(i, 0, 32); // one chunk each
        submit(i);
    }
    sched_info info;
    sched_get_info(s, &info);
    ck_assert_uint_eq(info.running, 2);
    run_until_idle();
    for (int i = 0; i < 4; i++) {
        check_reference(&attends[i]);
    }
    for (uint32_t i = 0; i < 4; i++) {
        ck_assert_uint_eq(attends[i].order, i); // the tenants take turns
    }
    stop();
}
END_TEST

START_TEST(poll_takes_in_what_ended) {
    start(ROOMY, 0, NULL);
    make(0, 0, 1);
    ck_assert(!backend->ops->poll(backend));
    submit(0);
    while (!backend->ops->poll(backend)) {
    }
    check_reference(&attends[0]);
    ck_assert(!backend->ops->crowds(backend));
    stop();
}
END_TEST

// Where processors are few a spinning loop leaves them to the thread while that has a launch, also
// one that it has begun by itself.
START_TEST(a_launch_begun_ahead_crowds_as_any_does) {
    enum { TICKET = 1 };
    static uint32_t flag;
    static proto_flag pair;
    const bool crowded = sysconf(_SC_NPROCESSORS_ONLN) <= 2;
    start(ROOMY, 0, NULL);
    make(TICKET, 0, 1);
    attn_row row = row_of(&attends[TICKET]);
    const attn_params p = {.shape = shape,
                           .pool = arena.base,
                           .pool_bytes = arena.bytes,
                           .num_blocks = NUM_BLOCKS,
                           .rows = &row,
                           .num_rows = 1};
    const srv_ahead ahead = {.flag = &flag, .signal = (uintptr_t)&pair};
    backend->ops->prepare(backend, &p, TICKET, &ahead);
    ck_assert(!backend->ops->crowds(backend));
    __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
    while (!backend->ops->begun(backend, TICKET)) {
        sched_yield();
    }
    ck_assert(backend->ops->crowds(backend) == crowded);
    while (!backend->ops->poll(backend)) {
        sched_yield();
    }
    ck_assert(!backend->ops->crowds(backend));
    ck_assert_uint_eq(__atomic_load_n(&pair.done, __ATOMIC_ACQUIRE), 1);
    check_reference(&attends[TICKET]);
    stop();
}
END_TEST

// The device still has what the buffer held before.
START_TEST(what_could_not_be_uploaded_is_not_launched) {
    enum { TICKET = 1 };
    static uint32_t flag;
    static proto_flag pair;
    start(ROOMY, 0, NULL);
    make(TICKET, 0, 1);
    attend *a = &attends[TICKET];
    attn_row row = row_of(a);
    const attn_params p = {.shape = shape,
                           .pool = arena.base,
                           .pool_bytes = arena.bytes,
                           .num_blocks = NUM_BLOCKS,
                           .rows = &row,
                           .num_rows = 1};
    const srv_ahead ahead = {.flag = &flag, .signal = (uintptr_t)&pair};
    num_refused = 1;
    flag = 1;
    backend->ops->prepare(backend, &p, TICKET, &ahead);
    while (num_refused > 0) {
        sched_yield();
    }
    a->req.ticket = TICKET;
    submit(TICKET);
    run_until_idle();
    ck_assert(!backend->ops->begun(backend, TICKET));
    ck_assert_uint_eq(__atomic_load_n(&flag, __ATOMIC_ACQUIRE), 1);
    ck_assert_uint_eq(backend->prepared, 0);
    check_reference(a);
    stop();
}
END_TEST

START_TEST(the_loss_of_the_device_is_told_once_and_fails_all_that_follows) {
    start(ROOMY, 0, NULL);
    make(0, 0, 3);
    attends[0].table[0] = NUM_BLOCKS; // outside the arena
    submit(0);
    make(1, 0, 3);
    submit(1);
    run_until_idle();
    make(2, 0, 3);
    submit(2);
    run_until_idle();
    for (int i = 0; i < 3; i++) {
        ck_assert_uint_eq(attends[i].num_done, 1);
        ATTND_CK_ERR(attends[i].err, ATTND_ECUDA);
        ck_assert_int_eq(attends[i].info.detail, FAKE_ILLEGAL_ADDRESS);
        ck_assert_str_eq(attends[i].info.text, "an illegal memory access was encountered");
    }
    ck_assert_uint_eq(num_lost, 1);
    ck_assert_int_eq(lost_info.detail, FAKE_ILLEGAL_ADDRESS);
    stop();
}
END_TEST

// ---- gates

enum { LAYER = 1, GAP_US = 20000, LATE_US = 50000, TRIES = 600 }; // LAYER is the ticket, too

static uint32_t flag;
static union {
    proto_flag pair;
    uint64_t bits;
} there; // the same on the device

static uint64_t gated_before, missed_before;

static void raise_pair(void) {
    __atomic_store_n(&there.pair.done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&there.pair.ready, 1, __ATOMIC_RELEASE);
}

static void raise_flag(void) {
    __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
}

static void raise_both(void) {
    raise_pair();
    raise_flag();
}

static void ck_flags(uint32_t want_flag, uint32_t ready, uint32_t done_flag) {
    ck_assert_uint_eq(__atomic_load_n(&flag, __ATOMIC_ACQUIRE), want_flag);
    ck_assert_uint_eq(__atomic_load_n(&there.pair.ready, __ATOMIC_ACQUIRE), ready);
    ck_assert_uint_eq(__atomic_load_n(&there.pair.done, __ATOMIC_ACQUIRE), done_flag);
}

static void prepare_layer(void) {
    static attn_row row;
    row = row_of(&attends[LAYER]);
    const attn_params p = {.shape = shape,
                           .pool = arena.base,
                           .pool_bytes = arena.bytes,
                           .num_blocks = NUM_BLOCKS,
                           .rows = &row,
                           .num_rows = 1};
    const srv_ahead ahead = {
        .flag = &flag, .signal = (uintptr_t)&there.pair, .follows = true, .has_pair = true};
    backend->ops->prepare(backend, &p, LAYER, &ahead);
}

static void await_end(void) {
    while (!backend->ops->poll(backend)) {
        sched_yield();
    }
}

// await_gate is true when a gate is launched within us; none is expected any more if not.
static bool await_gate(uint64_t us) {
    uint64_t until = attnd_clock_us() + us;
    while (expects_gate && attnd_clock_us() < until) {
        sched_yield();
    }
    if (atomic_exchange(&expects_gate, false)) {
        return false;
    }
    while (!num_gates) {
        sched_yield();
    }
    return true;
}

// reach_gate has layers come at equal times until a gate is launched for one, which is under way;
// `then` is called right behind the gate, on the submit thread.
static void reach_gate(void (*then)(void)) {
    num_gates = 0;
    on_gate = then;
    for (int i = 0; i < TRIES; i++) {
        flag = 0;
        there.bits = 0;
        make(LAYER, 0, 1);
        gated_before = backend->gated;
        missed_before = backend->missed;
        expects_gate = true;
        prepare_layer();
        if (await_gate(i % 8 < SRV_GAP_SAMPLES ? GAP_US : LATE_US)) {
            return;
        }
        raise_both();
        await_end();
        if (attends[LAYER].num_missed) { // one was launched at that very moment, and in vain
            prepare_layer();
            await_end();
        }
        ck_flags(0, 0, 1);
        check_reference(&attends[LAYER]);
    }
    ck_abort_msg("no gate was launched");
}

// ck_counts: gated and missed since reach_gate.
static void ck_counts(uint64_t ahead, uint64_t gated, uint64_t missed) {
    ck_assert_uint_eq(backend->ahead, ahead);
    ck_assert_uint_eq(backend->prepared, ahead);
    ck_assert_uint_eq(backend->gated - gated_before, gated);
    ck_assert_uint_eq(backend->missed - missed_before, missed);
}

START_TEST(a_gate_that_passes_has_the_layer_run_and_answered) {
    start(ROOMY, 0, NULL);
    reach_gate(raise_both);
    uint64_t before = backend->ahead;
    await_end();
    ck_flags(0, 0, 1);
    ck_counts(before + 1, 1, 0);
    check_reference(&attends[LAYER]);
    stop();
}
END_TEST

// Then the flag comes.
START_TEST(a_gate_in_vain_runs_nothing_and_the_layer_waits_for_its_flag) {
    start(ROOMY, 0, NULL);
    reach_gate(NULL);
    attend *a = &attends[LAYER];
    uint64_t before = backend->ahead;
    ck_assert(backend->ops->begun(backend, LAYER));
    await_end();
    ck_assert(!backend->ops->begun(backend, LAYER));
    ck_assert_uint_eq(a->num_missed, 1);
    ck_assert_uint_eq(a->num_done, 0);
    ATTND_CK_OK(a->err);
    for (int i = 0; i < Q_ROW; i++) {
        ck_assert_double_eq((double)a->out[i], 0);
    }
    ck_flags(0, 0, 0);
    ck_counts(before, 0, 1);
    prepare_layer();
    raise_both();
    await_end();
    ck_flags(0, 0, 1);
    ck_counts(before + 1, 0, 1);
    check_reference(a);
    stop();
}
END_TEST

// The gate gave up between the two.
START_TEST(a_flag_that_came_too_late_for_its_gate_is_not_lost) {
    start(ROOMY, 0, NULL);
    reach_gate(raise_flag);
    uint64_t before = backend->ahead;
    await_end();
    ck_assert_uint_eq(attends[LAYER].num_missed, 1);
    ck_flags(1, 0, 0);
    raise_pair();
    prepare_layer();
    await_end();
    ck_flags(0, 0, 1);
    ck_counts(before + 1, 0, 1);
    check_reference(&attends[LAYER]);
    stop();
}
END_TEST

// If its flag came later it would be the next call's, whose inputs are not there yet.
START_TEST(a_pair_that_comes_without_its_flag_is_an_error) {
    start(ROOMY, 0, NULL);
    reach_gate(raise_pair);
    await_end();
    ck_assert_uint_eq(attends[LAYER].num_missed, 1);
    ATTND_CK_ERR(attends[LAYER].err, ATTND_EPROTO);
    ck_assert_str_eq(attends[LAYER].info.field, "flags");
    ck_flags(0, 0, 1);
    ck_assert_uint_eq(backend->missed - missed_before, 1);
    stop();
}
END_TEST

START_TEST(a_gate_that_is_refused_leaves_the_flag_to_the_drain) {
    static void (*const then[])(void) = {NULL, raise_both};
    start(ROOMY, 0, NULL);
    refuses_gates = true;
    reach_gate(then[_i]);
    await_end();
    ck_assert_uint_eq(attends[LAYER].num_missed, 1);
    ATTND_CK_ERR(attends[LAYER].err, ATTND_ECUDA);
    ck_flags((uint32_t)_i, (uint32_t)_i, 0);
    ck_assert_uint_eq(num_lost, 0);
    stop();
}
END_TEST

START_TEST(what_waits_at_a_gate_cannot_be_forgotten) {
    start(ROOMY, 0, NULL);
    reach_gate(NULL);
    ck_assert(backend->ops->forget(backend, LAYER));
    ck_assert(backend->ops->unwatch(backend, LAYER));
    await_end();
    ck_assert_uint_eq(attends[LAYER].num_missed, 1);
    ck_assert(!backend->ops->forget(backend, LAYER));
    ck_assert(!backend->ops->unwatch(backend, LAYER));
    stop();
}
END_TEST

START_TEST(launches_wait_behind_a_gate) {
    static void (*const then[])(void) = {NULL, raise_both};
    start(ROOMY, 0, NULL);
    reach_gate(then[_i]);
    make(3, 0, 32);
    make(5, 0, 32);
    submit(3);
    submit(5);
    run_until_idle();
    check_reference(&attends[3]);
    check_reference(&attends[5]);
    ck_assert_uint_eq(attends[LAYER].num_missed, _i == 0);
    if (_i == 1) {
        check_reference(&attends[LAYER]);
    }
    stop();
}
END_TEST

START_TEST(stop_awaits_what_waits_at_a_gate) {
    static void (*const then[])(void) = {NULL, raise_both};
    start(ROOMY, 0, NULL);
    reach_gate(then[_i]);
    backend->ops->stop(backend);
    ck_assert_uint_eq(attends[LAYER].num_missed, _i == 0);
    ck_assert_uint_eq(attends[LAYER].num_done, (uint32_t)_i);
    ck_flags(0, 0, (uint32_t)_i);
    stop();
}
END_TEST

// ---- tiers

static void on_ended(void *ctx) {
    uv_async_send(ctx);
}

static void on_async(uv_async_t *async) {
    (void)async;
}

static void run_job(kv_tier *tier, kv_tier_job *job) {
    ATTND_CK_OK(kv_tier_submit(tier, job));
    while (!kv_tier_take_ended(tier, job)) {
        uv_run(&loop, UV_RUN_ONCE); // launches go on meanwhile
    }
    ATTND_CK_OK(job->err);
}

// spill takes the blocks of sequence i away and brings them back at other places, while the device
// works for others.
static void spill(int i, uint64_t bytes) {
    kv_arena store;
    attnd_errinfo info;
    static uv_async_t async; // closed when the loop runs next
    kv_tier *tier;
    ck_assert_int_eq(uv_async_init(&loop, &async, on_async), 0);
    ATTND_CK_OK(kv_arena_open_host(&store, 2 << 20, &info));
    kv_tier_opts opts = {.arena = &arena,
                         .bytes = 1 << 20,
                         .slab_bytes = 64 << 10,
                         .depth = 1,
                         .ended = on_ended,
                         .ctx = &async};
    ATTND_CK_OK(kv_tier_open_memory(&tier, &opts, &store, false, &info));
    for (uint32_t b = 0; b < SEQ_BLOCKS; b++) {
        uint32_t *entry = &attends[i].table[b], from = *entry;
        kv_tier_job job = {.op = KV_TIER_PUT, .num_blocks = 1};
        job.at[0] = from * bytes;
        job.bytes[0] = bytes;
        ck_assert(kv_tier_take(tier, bytes, &job.slot));
        run_job(tier, &job);
        ATTND_CK_OK(arena.ops->write(&arena, from * bytes, attends[i].q, bytes, &info));
        *entry = (SEQ_BLOCKS - 1 - b) * NUM + NUM - 1; // of the last sequence, which has none
        job.op = KV_TIER_GET;
        job.at[0] = *entry * bytes;
        run_job(tier, &job);
        memcpy(pool_reference + (size_t)*entry * BLOCK_FLOATS,
               pool_reference + (size_t)from * BLOCK_FLOATS, bytes);
    }
    kv_tier_close(tier);
    kv_arena_close_host(&store);
    uv_close((uv_handle_t *)&async, NULL);
}

START_TEST(blocks_go_to_a_tier_and_back_while_the_device_works) {
    start(ROOMY, 0, NULL);
    make(0, 0, 100);
    submit(0);
    run_until_idle();
    check_reference(&attends[0]);
    for (int i = 1; i < NUM - 1; i++) {
        make(i, 0, 128);
        submit(i);
    }
    spill(0, BLOCK_FLOATS * sizeof(float));
    run_until_idle();
    uint32_t table[SEQ_BLOCKS];
    memcpy(table, attends[0].table, sizeof(table));
    make(0, 100, 5);
    memcpy(attends[0].table, table, sizeof(table));
    submit(0);
    run_until_idle();
    for (int i = 0; i < NUM - 1; i++) {
        check_reference(&attends[i]);
    }
    stop();
}
END_TEST

START_TEST(stop_answers_what_is_queued) {
    start(ROOMY, 0, NULL);
    for (int i = 0; i < NUM; i++) {
        make(i, 0, 128); // four chunks
        submit(i);
    }
    backend->ops->stop(backend);
    ck_assert(sched_idle(s));
    for (int i = 0; i < NUM; i++) {
        ck_assert_uint_eq(attends[i].num_done, 1);
        ATTND_CK_ERR(attends[i].err, ATTND_ESHUTDOWN);
    }
    stop();
}
END_TEST

START_TEST(a_device_that_is_not_there_is_refused) {
    srv_gpu_opts opts = {.device_ops = &fake_device_ops, .ordinal = 3, .max_rows = 8};
    attnd_errinfo info;
    ATTND_CK_ERR(srv_gpu_open(&gpu, &opts, &arena, &info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.text, "there is no cuda:3, the machine has 1");
}
END_TEST

static Suite *suite(void) {
    Suite *suite = suite_create("srv_gpu");
    TCase *t = tcase_create("gpu");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, launches_give_what_the_reference_gives);
    tcase_add_loop_test(t, what_does_not_fit_a_buffer_is_cut, 0, 5);
    tcase_add_loop_test(t, what_the_device_finds_too_large_is_cut, 0, 3);
    tcase_add_test(t, a_token_that_fits_no_buffer_is_an_error_of_its_request);
    tcase_add_test(t, two_launches_are_under_way_and_end_in_order);
    tcase_add_test(t, poll_takes_in_what_ended);
    tcase_add_test(t, a_launch_begun_ahead_crowds_as_any_does);
    tcase_add_test(t, what_could_not_be_uploaded_is_not_launched);
    tcase_add_test(t, the_loss_of_the_device_is_told_once_and_fails_all_that_follows);
    tcase_add_test(t, a_gate_that_passes_has_the_layer_run_and_answered);
    tcase_add_test(t, a_gate_in_vain_runs_nothing_and_the_layer_waits_for_its_flag);
    tcase_add_test(t, a_flag_that_came_too_late_for_its_gate_is_not_lost);
    tcase_add_test(t, a_pair_that_comes_without_its_flag_is_an_error);
    tcase_add_loop_test(t, a_gate_that_is_refused_leaves_the_flag_to_the_drain, 0, 2);
    tcase_add_test(t, what_waits_at_a_gate_cannot_be_forgotten);
    tcase_add_loop_test(t, launches_wait_behind_a_gate, 0, 2);
    tcase_add_loop_test(t, stop_awaits_what_waits_at_a_gate, 0, 2);
    tcase_add_test(t, blocks_go_to_a_tier_and_back_while_the_device_works);
    tcase_add_test(t, stop_answers_what_is_queued);
    tcase_add_test(t, a_device_that_is_not_there_is_refused);
    suite_add_tcase(suite, t);
    return suite;
}

CHECK_MAIN(suite)
