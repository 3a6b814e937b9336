#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_ref.h"
#include "tests/load/bench_verify.h"

static attnd_errinfo info;
static bench_model model;
static bench_verify *verify;
static bench_ref *ref;

static void setup(void) {
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    ATTND_CK_OK(bench_ref_create(&ref, &model));
}

static void teardown(void) {
    bench_ref_free(ref);
    bench_model_fini(&model);
}

static void start(uint32_t threads, uint32_t sequences) {
    bench_verify_opts opts = {
        .seed = 9, .num_threads = threads, .num_sequences = sequences, .step_rows = 10};
    ATTND_CK_OK(bench_verify_start(&verify, &model, &opts, &info));
}

static bench_batch *take(uint64_t request) {
    return bench_verify_take(verify, &(bench_prompt){.request = request});
}

// fill writes the right outputs of positions 0 to num - 1 of a request, all layers.
static void fill(bench_batch *batch, uint32_t num) {
    bench_rope_table rope = {0};
    double *out = malloc(num * 128 * sizeof(*out));
    batch->num_rows = num;
    for (uint32_t i = 0; i < num; i++) {
        batch->positions[i] = i;
        batch->calls[i] = (bench_call){0, num};
    }
    for (uint32_t layer = 0; layer < 2; layer++) {
        for (uint32_t i = 0; i < num; i++) {
            bench_block b = {.model = &model,
                             .rope = &rope,
                             .seed = 9,
                             .prompt = batch->prompt,
                             .layer = layer,
                             .num_tokens = 1,
                             .positions = &batch->positions[i]};
            bench_block_init(&b);
            ATTND_CK_OK(bench_ref_f64(ref, &b, out));
            float *dst = bench_verify_out(verify, batch, layer, i);
            for (uint32_t e = 0; e < 128; e++) {
                dst[e] = (float)out[e];
            }
        }
    }
    free(out);
}

START_TEST(batches_of_many_requests_are_checked_by_many_threads) {
    start((uint32_t)_i, 4);
    ck_assert_uint_eq(bench_verify_capacity(verify), 64);
    for (uint32_t request = 0; request < 50; request++) { // more than the pool has batches
        bench_batch *batch = take(request);
        fill(batch, 5 + request % 7);
        bench_verify_submit(verify, batch);
    }
    bench_verdict v;
    ATTND_CK_OK(bench_verify_stop(verify, &v));
    uint64_t rows = 0;
    for (uint32_t request = 0; request < 50; request++) {
        rows += 2 * (5 + request % 7);
    }
    ck_assert_uint_eq(v.rows, rows);
    ck_assert_uint_eq(v.mismatches, 0);
}
END_TEST

START_TEST(outputs_of_another_request_or_layer_are_mismatches) {
    start(1, 1);
    bench_batch *batch = take(1);
    fill(batch, 10);
    batch->prompt.request = 2;
    bench_verify_submit(verify, batch);
    batch = take(3);
    fill(batch, 10);
    memcpy(bench_verify_out(verify, batch, 1, 4), bench_verify_out(verify, batch, 0, 4), 512);
    bench_verify_submit(verify, batch);
    bench_verdict v;
    ATTND_CK_OK(bench_verify_stop(verify, &v));
    ck_assert_uint_eq(v.rows, 40);
    ck_assert_uint_eq(v.mismatches, 20 + 1);
}
END_TEST

START_TEST(discarded_batches_are_not_checked) {
    start(1, 1);
    bench_batch *batch = take(1);
    batch->num_rows = 3; // whatever is in it
    bench_verify_discard(verify, batch);
    bench_verify_discard(verify, NULL);
    bench_verify_submit(verify, NULL);
    bench_verdict v;
    ATTND_CK_OK(bench_verify_stop(verify, &v));
    ck_assert_uint_eq(v.rows, 0);
    ATTND_CK_OK(bench_verify_stop(NULL, &v));
}
END_TEST

START_TEST(memory_of_a_batch_is_bounded) {
    bench_model_fini(&model);
    ATTND_CK_OK(bench_model_preset(&model, "llama-3-8b", &info));
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    start(1, 2);
    ck_assert_uint_eq(bench_verify_capacity(verify), 32); // 8 MiB / (32 layers * 8 KiB)
    bench_verdict v;
    ATTND_CK_OK(bench_verify_stop(verify, &v));
}
END_TEST

START_TEST(progress_is_seen_before_the_end) {
    start(1, 1);
    bench_batch *batch = take(1);
    fill(batch, 2);
    bench_verify_submit(verify, batch);
    bench_verdict v = {0};
    while (v.rows == 0) { // Check's timeout is the guard
        bench_verify_progress(verify, &v);
    }
    ck_assert_uint_eq(v.rows, 4);
    ATTND_CK_OK(bench_verify_stop(verify, &v));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_verify");
    TCase *tc = tcase_create("batches");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, batches_of_many_requests_are_checked_by_many_threads, 1, 4);
    tcase_add_test(tc, outputs_of_another_request_or_layer_are_mismatches);
    tcase_add_test(tc, discarded_batches_are_not_checked);
    tcase_add_test(tc, memory_of_a_batch_is_bounded);
    tcase_add_test(tc, progress_is_seen_before_the_end);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
