// Tiers of a GPU's memory: prompts in bf16 that together are larger than the arena are found again
// in host memory and in a file, after the worker is killed, too, and attention over them is right.
// All keys are zero, so the output of the last row is the mean of the prompt's values.
// ATTND_E2E_DEVICE=cuda:0: on a fake GPU by CTest, on a real one by tests/gpu_daemon.sh.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/client/attnd.h"
#include "proto/dtype.h"
#include "tests/e2e/harness.h"

// A block is 2 layers x 2 heads x 16 tokens x (64 + 64) x 2 bytes = 16 KiB; the arena has 128.
enum { HEADS = 4, KV_HEADS = 2, DIM = 64, LAYERS = 2, BLOCK_TOKENS = 16 };
enum { PROMPTS = 8, LEN = 320, ALL = PROMPTS * LEN / BLOCK_TOKENS, POOL = 128 };

static const char *const flags[] = {"--set", "cache.memory=2MiB",   "--set", "cache.slab=256KiB",
                                    "--set", "tier.wait=60s",       "--set", "tier.memory=512KiB",
                                    "--set",
                                    NULL, // tier.file
                                    "--set", "tier.file_size=2MiB", NULL};

static e2e_daemon d;
static attnd_client *c;
static uint32_t model;
static attnd_errinfo info;
static uint16_t q[LEN * HEADS * DIM], k[LEN * KV_HEADS * DIM], v[LEN * KV_HEADS * DIM],
    out[LEN * HEADS * DIM];

// value_of is what a bf16 holds exactly; the mean differs from prompt to prompt.
static float value_of(uint32_t prompt, uint32_t token) {
    return (float)((int)(16 * prompt) + (int)(token % 5) - 2);
}

static void join(void) {
    const attnd_connect_opts connect = {.timeout_ms = 60000};
    const attnd_model_opts opts = {.name = "m",
                                   .dtype = ATTND_BF16,
                                   .kv_dtype = ATTND_BF16,
                                   .layers = LAYERS,
                                   .q_heads = HEADS,
                                   .kv_heads = KV_HEADS,
                                   .head_dim = DIM,
                                   .block_tokens = BLOCK_TOKENS,
                                   .all = ATTND_LAYER_DEFAULT};
    ATTND_CK_OK(attnd_connect(&c, d.url, &connect, &info));
    ATTND_CK_OK(attnd_model_open(c, &opts, &model, &info));
}

// serve runs a prompt and checks its last row; returns how many of its tokens were found.
static uint32_t serve(uint32_t prompt) {
    static uint32_t ids[LEN];
    uint64_t seq, step;
    double mean = 0;
    for (uint32_t t = 0; t < LEN; t++) {
        ids[t] = prompt * 10007 + t;
        mean += (double)value_of(prompt, t) / LEN;
    }
    ATTND_CK_OK(attnd_seq_create(c, model, &seq, &info));
    attnd_step_seq s = {.seq = seq, .new_len = LEN, .tokens = ids};
    ATTND_CK_OK(
        attnd_step_open(c, model, &s, 1, &(attnd_step_opts){.deadline_ms = 60000}, &step, &info));
    uint32_t rows = LEN - s.cached;
    for (uint32_t i = 0; i < rows * KV_HEADS * DIM; i++) {
        v[i] = attnd_f32_to_bf16(value_of(prompt, s.cached + i / (KV_HEADS * DIM)));
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        attnd_attend_args args = {.step = step,
                                  .model = model,
                                  .layer = layer,
                                  .rows = rows,
                                  .new_rows = rows,
                                  .q = q,
                                  .k = k,
                                  .v = v,
                                  .out = out};
        ATTND_CK_OK(attnd_attend(c, &args, NULL, &info));
        for (uint32_t i = (rows - 1) * HEADS * DIM; i < rows * HEADS * DIM; i++) {
            double got = (double)attnd_bf16_to_f32(out[i]);
            ck_assert_msg(fabs(got - mean) <= (fabs(mean) + 1) / 128, "prompt %u: %g, not %g",
                          prompt, got, mean);
        }
    }
    attnd_accept accept = {.accepted = LEN};
    ATTND_CK_OK(attnd_step_commit(c, step, &accept, 1, NULL, &info));
    ATTND_CK_OK(attnd_seq_free(c, seq, &info));
    return s.cached;
}

static double stat(const char *path) {
    char *json = NULL;
    ATTND_CK_OK(attnd_admin(c, "stats", NULL, &json, &info));
    double value = e2e_number(json, path);
    attnd_free(json);
    return value;
}

START_TEST(prompts_larger_than_the_gpus_memory_are_found_again) {
    char file[96], set_file[128];
    const char *own[sizeof(flags) / sizeof(flags[0])];
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    d.keeper = true;
    snprintf(file, sizeof(file), "%s/tier", d.dir);
    snprintf(set_file, sizeof(set_file), "tier.file=%s", file);
    memcpy(own, flags, sizeof(flags));
    own[9] = set_file;
    e2e_start(&d, own);
    join();
    bool has_file = stat("tiers.off") == 0; // a device may lend no O_DIRECT or io_uring
    for (uint32_t p = 0; p < PROMPTS; p++) {
        ck_assert_uint_eq(serve(p), 0);
    }
    for (int round = 0; round < 2; round++) {
        for (uint32_t p = 0; p < PROMPTS; p++) {
            uint32_t cached = serve(p);
            ck_assert(!has_file || cached >= LEN - BLOCK_TOKENS);
        }
        ck_assert_double_gt(stat("tiers.fetches"), 0);
        ck_assert_double_eq(stat("tiers.lost") + stat("tiers.failed"), 0);
        ck_assert_int_eq(stat("tiers.moves") > 0, has_file);
        printf("tiers: %.0f blocks spilled, %.0f fetched, %.0f moved on, file %s\n",
               stat("tiers.spills"), stat("tiers.fetches"), stat("tiers.moves"),
               has_file ? "used" : "off");
        attnd_close(c);
        e2e_kill_worker(&d);
        e2e_await_ready(&d);
        join();
    }
    ck_assert_double_eq(stat("accounting_mismatches"), 0);
    attnd_close(c);
    unlink(file);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_tiers_gpu");
    TCase *tc = tcase_create("tiers");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, prompts_larger_than_the_gpus_memory_are_found_again);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
