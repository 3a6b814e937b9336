// Block masks in bf16 by libattnd, over messages (loop index 0) and over a ring (1): prompts that
// are prefilled in chunks, chunks and decodes of two sequences at a time, a mask of its own in each
// layer, against the float64 reference.  What all masks hide is NaN.  On a GPU of host memory, and
// by tests/gpu_daemon.sh on a real one.
#include <math.h>
#include <string.h>

#include "proto/client/attnd.h"
#include "tests/e2e/harness.h"

enum {
    LAYERS = 2,
    SEQS = 2,
    HEADS = 8,
    KV_HEADS = 2,
    DIM = 64,
    BLOCK = 16,
    HIDDEN = 1, // no mask lists this block
    MAX_BLOCKS = 32,
    MAX_ROWS = 512,
    Q_ROW = HEADS * DIM,
    KV_ROW = KV_HEADS * DIM,
    HALF = KV_HEADS * BLOCK * DIM, // elements of K of a block
};

static const char *const flags[] = {"--set", "cache.memory=64MiB",       "--set", "cache.slab=1MiB",
                                    "--set", "compute.prefill_chunk=64", NULL};
static const attnd_transport transports[] = {ATTND_TRANSPORT_NNG, ATTND_TRANSPORT_RING};

static e2e_daemon d;
static attnd_client *client;
static attnd_errinfo info;
static uint32_t model;
static uint64_t seqs[SEQS];
static uint32_t len[SEQS];
static _Alignas(16) uint16_t pools[SEQS][LAYERS][MAX_BLOCKS * 2 * HALF]; // the reference's
static uint16_t q[MAX_ROWS * Q_ROW], k[MAX_ROWS * KV_ROW], v[MAX_ROWS * KV_ROW];
static uint16_t out[MAX_ROWS * Q_ROW];
static float lse[HEADS * MAX_ROWS];
static uint32_t start[MAX_ROWS + 1], kv_blocks[MAX_ROWS * MAX_BLOCKS];
static uint64_t seed;

static uint32_t random_bits(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32);
}

static void fill(uint16_t *array, uint32_t num) {
    for (uint32_t i = 0; i < num; i++) {
        attnd_store(array, ATTND_BF16, i, (double)random_bits() / (1u << 31) - 1);
    }
}

static void begin(int which) {
    attnd_connect_opts opts = {.transport = transports[which], .timeout_ms = 20000};
    attnd_model_opts m = {.name = "m",
                          .dtype = ATTND_BF16,
                          .kv_dtype = ATTND_BF16,
                          .layers = LAYERS,
                          .q_heads = HEADS,
                          .kv_heads = KV_HEADS,
                          .head_dim = DIM,
                          .block_tokens = BLOCK,
                          .all = ATTND_LAYER_DEFAULT};
    seed = 88172645463325252u;
    memset(&d, 0, sizeof(d));
    memset(len, 0, sizeof(len));
    e2e_dir(&d);
    e2e_start(&d, flags);
    ATTND_CK_OK(attnd_connect(&client, d.url, &opts, &info));
    ATTND_CK_OK(attnd_model_open(client, &m, &model, &info));
    for (int i = 0; i < SEQS; i++) {
        ATTND_CK_OK(attnd_seq_create(client, model, &seqs[i], &info));
    }
}

// hide makes K and V of tokens of the hidden block NaN.
static void hide(const uint32_t *new_len) {
    uint32_t row = 0;
    for (int i = 0; i < SEQS; i++) {
        for (uint32_t t = len[i]; t < len[i] + new_len[i]; t++, row++) {
            if (t / BLOCK == HIDDEN) {
                memset(k + row * KV_ROW, 0xff, KV_ROW * sizeof(*k));
                memset(v + row * KV_ROW, 0xff, KV_ROW * sizeof(*v));
            }
        }
    }
}

// make_mask lists about half of the blocks that may be listed, and returns how many query blocks
// there are.
static uint32_t make_mask(const uint32_t *new_len, uint32_t q_block) {
    uint32_t num = 0, listed = 0;
    start[0] = 0;
    for (int i = 0; i < SEQS; i++) {
        uint32_t blocks = (len[i] + new_len[i] - 1) / BLOCK + 1;
        for (uint32_t b = 0; b * q_block < new_len[i]; b++) {
            for (uint32_t n = 0; n < blocks; n++) {
                if (n != HIDDEN && random_bits() & 1) {
                    kv_blocks[listed++] = n;
                }
            }
            start[++num] = listed;
        }
    }
    return num;
}

// refer computes a sequence's rows, which begin with `first` of the step, in float64.
static void refer(int i, uint32_t layer, uint32_t rows, uint32_t first, const attn_block_mask *mask,
                  double *want, double *want_lse) {
    static const uint32_t table[MAX_BLOCKS] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                               11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                               22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    attn_row row = {.q = q + first * Q_ROW,
                    .out = out, // not written
                    .k_new = k + first * KV_ROW,
                    .v_new = v + first * KV_ROW,
                    .table = table,
                    .stride_q_token = Q_ROW,
                    .stride_q_head = DIM,
                    .stride_out_token = Q_ROW,
                    .stride_out_head = DIM,
                    .stride_k_new_token = KV_ROW,
                    .stride_k_new_head = DIM,
                    .stride_v_new_token = KV_ROW,
                    .stride_v_new_head = DIM,
                    .v_offset = HALF * sizeof(uint16_t),
                    .kv_len = (int32_t)(len[i] + rows),
                    .q_len = (int32_t)rows,
                    .q_count = (int32_t)rows,
                    .new_len = (int32_t)rows,
                    .flags = ATTN_CAUSAL,
                    .window_left = -1,
                    .window_right = -1,
                    .block_mask = mask};
    attn_params p = {.shape = {.q_dtype = ATTND_BF16,
                               .kv_dtype = ATTND_BF16,
                               .q_heads = HEADS,
                               .kv_heads = KV_HEADS,
                               .head_dim = DIM,
                               .v_head_dim = DIM,
                               .block_tokens = BLOCK,
                               .stride_k_token = DIM,
                               .stride_k_head = BLOCK * DIM,
                               .stride_v_token = DIM,
                               .stride_v_head = BLOCK * DIM,
                               .block_stride = 2 * HALF * sizeof(uint16_t)},
                     .pool = pools[i][layer],
                     .pool_bytes = sizeof(pools[i][layer]),
                     .num_blocks = MAX_BLOCKS,
                     .rows = &row,
                     .num_rows = 1};
    ATTND_CK_OK(attn_check(&p, &info));
    ATTND_CK_OK(attn_reference(&p, want, want_lse));
}

// compare: probabilities and the output are rounded to bf16, 2^-9 of each, and |v| is at most 1.
static void compare(uint32_t rows, uint32_t first, uint32_t all_rows, const double *want,
                    const double *want_lse) {
    for (uint32_t n = 0; n < rows * Q_ROW; n++) {
        double got = (double)attnd_bf16_to_f32(out[first * Q_ROW + n]);
        ck_assert_msg(fabs(got - want[n]) < 1.0 / 128, "row %u: %g instead of %g", n / Q_ROW, got,
                      want[n]);
    }
    for (uint32_t n = 0; n < HEADS * rows; n++) {
        double got = (double)lse[n / rows * all_rows + first + n % rows];
        ck_assert_msg(got == want_lse[n] || fabs(got - want_lse[n]) < 1e-4, "lse: %g instead of %g",
                      got, want_lse[n]);
    }
}

static void check(uint32_t layer, const uint32_t *new_len, uint32_t all_rows, uint32_t q_block) {
    static double want[MAX_ROWS * Q_ROW], want_lse[HEADS * MAX_ROWS];
    uint32_t first = 0, blocks = 0;
    for (int i = 0; i < SEQS; i++) {
        const attn_block_mask mask = {start + blocks, kv_blocks, (int32_t)q_block};
        refer(i, layer, new_len[i], first, &mask, want, want_lse);
        compare(new_len[i], first, all_rows, want, want_lse);
        first += new_len[i];
        blocks += (new_len[i] - 1) / q_block + 1;
    }
}

static void masked(const uint32_t *new_len, uint32_t q_block) {
    attnd_step_seq s[SEQS];
    attnd_accept accept[SEQS];
    uint32_t rows = 0;
    uint64_t step;
    for (int i = 0; i < SEQS; i++) {
        s[i] = (attnd_step_seq){.seq = seqs[i], .new_len = new_len[i]};
        accept[i] = (attnd_accept){.accepted = new_len[i]};
        rows += new_len[i];
    }
    ATTND_CK_OK(attnd_step_open(client, model, s, SEQS, NULL, &step, &info));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        fill(q, rows * Q_ROW);
        fill(k, rows * KV_ROW);
        fill(v, rows * KV_ROW);
        hide(new_len);
        const attnd_block_mask mask = {q_block, make_mask(new_len, q_block), start, kv_blocks};
        attnd_attend_args args = {.step = step,
                                  .model = model,
                                  .layer = layer,
                                  .rows = rows,
                                  .new_rows = rows,
                                  .q = q,
                                  .k = k,
                                  .v = v,
                                  .out = out,
                                  .lse = lse,
                                  .block_mask = &mask};
        ATTND_CK_OK(attnd_attend(client, &args, NULL, &info));
        check(layer, new_len, rows, q_block);
    }
    ATTND_CK_OK(attnd_step_commit(client, step, accept, SEQS, NULL, &info));
    for (int i = 0; i < SEQS; i++) {
        len[i] += new_len[i];
    }
}

START_TEST(masked_attends_have_the_references_outputs) {
    static const struct {
        uint32_t new_len[SEQS], q_block;
    } steps[] = {{{200, 70}, 16}, {{1, 1}, 1}, {{9, 1}, 3},    {{33, 40}, 1},
                 {{100, 7}, 64},  {{1, 1}, 5}, {{64, 130}, 17}};
    begin(_i);
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        masked(steps[i].new_len, steps[i].q_block);
    }
    attnd_close(client);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_gpu_mask");
    TCase *tc = tcase_create("gpu_mask");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, masked_attends_have_the_references_outputs, 0, 2);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
