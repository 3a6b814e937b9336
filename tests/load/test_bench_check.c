#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_check.h"
#include "tests/load/bench_data.h"
#include "tests/load/bench_ref.h"

enum { LEN = 150, PROMPT = 100, ELEMS = 128 };

static attnd_errinfo info;
static bench_model model;
static bench_check *check;
static bench_ref *ref;
static bench_rope_table rope;
static uint32_t positions[LEN];
static bench_call calls[LEN];
static double truth[LEN * ELEMS];
static float plain[LEN * ELEMS];
static float out[LEN * ELEMS];
static bench_verdict verdict;

// reference fills truth and plain of rows 0 to LEN - 1.
static void reference(bench_order order) {
    uint32_t step = bench_ref_max_tokens(ref, LEN);
    for (uint32_t at = 0; at < LEN; at += step) {
        bench_block b = {.model = &model,
                         .rope = &rope,
                         .seed = 5,
                         .prompt.request = 6,
                         .num_tokens = LEN - at < step ? LEN - at : step,
                         .positions = positions + at};
        bench_block_init(&b);
        ATTND_CK_OK(bench_ref_f64(ref, &b, truth + at * ELEMS));
        ATTND_CK_OK(bench_ref_plain(ref, &b, order, plain + at * ELEMS));
    }
}

static void setup(void) {
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    ATTND_CK_OK(bench_check_create(&check, &model, 5));
    ATTND_CK_OK(bench_ref_create(&ref, &model));
    for (uint32_t t = 0; t < LEN; t++) {
        positions[t] = t;
        calls[t] = t < PROMPT ? (bench_call){0, PROMPT} : (bench_call){t, 1};
    }
    memset(&verdict, 0, sizeof(verdict));
    reference(BENCH_DESCENDING);
    for (uint32_t i = 0; i < LEN * ELEMS; i++) {
        out[i] = (float)truth[i];
    }
}

static void teardown(void) {
    bench_check_free(check);
    bench_ref_free(ref);
    bench_model_fini(&model);
}

static void run(const void *rows) {
    bench_rows r = {.prompt.request = 6,
                    .layer = 0,
                    .num_rows = LEN,
                    .positions = positions,
                    .calls = calls,
                    .out = rows};
    ATTND_CK_OK(bench_check_rows(check, &r, &verdict));
    ck_assert_uint_eq(verdict.rows, LEN);
}

START_TEST(the_rounded_truth_needs_no_plain_run) {
    run(out);
    ck_assert_uint_eq(verdict.mismatches, 0);
    ck_assert_uint_eq(verdict.plain_runs, 0);
    ck_assert_double_gt(verdict.max_error, 0);
    ck_assert_double_le(verdict.max_error, 2 * 0x1p-24); // |out| < 4: half an ulp
    ck_assert_str_eq(verdict.first, "");
}
END_TEST

START_TEST(a_plain_run_in_any_order_passes) {
    reference((bench_order)_i);
    run(plain);
    ck_assert_uint_eq(verdict.mismatches, 0);
    ck_assert_uint_gt(verdict.plain_runs, 0);
    ck_assert_double_le(verdict.max_error, verdict.max_error_bound);
}
END_TEST

// bound_of is 2 x plain + 1 ulp at size, both the largest of rows [first, end).
static double bound_of(const double *own, const double *size, uint32_t first, uint32_t end) {
    double plain_err = 0, largest = 0;
    for (uint32_t t = first; t < end; t++) {
        plain_err = fmax(plain_err, own[t]);
        largest = fmax(largest, size[t]);
    }
    return 2 * plain_err + bench_ulp(ATTND_F32, largest);
}

START_TEST(errors_past_the_bound_fail_and_errors_within_pass) {
    static double own[LEN], size[LEN];
    for (int order = 0; order < BENCH_NUM_ORDERS; order++) {
        reference((bench_order)order);
        for (uint32_t i = 0; i < LEN * ELEMS; i++) {
            own[i / ELEMS] = fmax(own[i / ELEMS], fabs((double)plain[i] - truth[i]));
            size[i / ELEMS] = fmax(size[i / ELEMS], fabs(truth[i]));
        }
    }
    uint32_t expected = 0, appeals = 0;
    for (uint32_t t = 0; t < LEN; t++) {
        // The prompt is one call; a decode is taken together with the 31 rows before it.
        double bound =
            t < PROMPT ? bound_of(own, size, 0, PROMPT) : bound_of(own, size, t - 31, t + 1);
        // Rows 1, 51 and 101 get an error past their bound, the others one within.
        uint32_t at = t * ELEMS + 77;
        out[at] = (float)(truth[at] + bound * (t % 50 == 1 ? 1.4 : 0.6));
        double err = fabs((double)out[at] - truth[at]);
        expected += err > bound;
        appeals += err > bound_of(own, size, t, t + 1);
    }
    run(out);
    ck_assert_uint_eq(expected, 3);
    ck_assert_uint_eq(verdict.mismatches, expected);
    ck_assert_uint_gt(appeals, expected);
    ck_assert_uint_eq(verdict.appeals, appeals);
    ck_assert_ptr_nonnull(strstr(verdict.first, "request 6, layer 0, position 1, head 2, dim 13"));
}
END_TEST

START_TEST(a_daemon_that_is_wrong_all_over_is_told_so_soon) {
    for (uint32_t i = 0; i < LEN * ELEMS; i++) {
        out[i] = 0;
    }
    run(out);
    ck_assert_uint_eq(verdict.mismatches, LEN);
    ck_assert_uint_eq(verdict.appeals, 4);
}
END_TEST

START_TEST(a_row_that_missed_one_key_of_150_is_found) {
    // out without key j = (out - p v) / (1 - p); p is taken as 1/150 of every head, a mean key
    for (uint32_t i = 0; i < ELEMS; i++) {
        char v[4];
        uint32_t kv_elem = i / 32 / 2 * 32 + i % 32;
        bench_fill(v, ATTND_F32, BENCH_V, bench_row_key(5, 6, 0, BENCH_V, 70), kv_elem, 1);
        double p = 1.0 / 150,
               without = (truth[149 * ELEMS + i] - p * attnd_load(v, ATTND_F32, 0)) / (1 - p);
        out[149 * ELEMS + i] = (float)without;
    }
    run(out);
    ck_assert_uint_eq(verdict.mismatches, 1);
    ck_assert_ptr_nonnull(strstr(verdict.first, "position 149"));
}
END_TEST

START_TEST(nan_and_infinity_are_mismatches) {
    out[3 * ELEMS] = NAN;
    out[5 * ELEMS + 1] = INFINITY;
    run(out);
    ck_assert_uint_eq(verdict.mismatches, 2);
    ck_assert(isinf(verdict.max_error));
    ck_assert_ptr_nonnull(strstr(verdict.first, "position 3, head 0, dim 0"));
}
END_TEST

START_TEST(sixteen_bit_outputs_are_held_to_their_ulp) {
    bench_check_free(check);
    bench_ref_free(ref);
    bench_model_fini(&model);
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
    model.dtype = ATTND_BF16;
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    ATTND_CK_OK(bench_check_create(&check, &model, 5));
    ATTND_CK_OK(bench_ref_create(&ref, &model));
    reference(BENCH_ASCENDING);
    static uint16_t bf16[LEN * ELEMS];
    for (uint32_t i = 0; i < LEN * ELEMS; i++) {
        bf16[i] = attnd_f32_to_bf16((float)truth[i]);
    }
    run(bf16);
    ck_assert_uint_eq(verdict.mismatches, 0);
    memset(&verdict, 0, sizeof(verdict));
    bf16[100 * ELEMS] = attnd_f32_to_bf16((float)truth[100 * ELEMS] + 0.2f);
    run(bf16);
    ck_assert_uint_eq(verdict.mismatches, 1);
}
END_TEST

START_TEST(ulps_are_the_steps_of_the_types) {
    ck_assert_double_eq(bench_ulp(ATTND_F32, 1), 0x1p-23);
    ck_assert_double_eq(bench_ulp(ATTND_F32, -3.9), 0x1p-22);
    ck_assert_double_eq(bench_ulp(ATTND_F32, 0), 0x1p-149);
    ck_assert_double_eq(bench_ulp(ATTND_F32, 1e-44), 0x1p-149);
    ck_assert_double_eq(bench_ulp(ATTND_BF16, 1), 0x1p-7);
    ck_assert_double_eq(bench_ulp(ATTND_BF16, 0.4), 0x1p-9);
    ck_assert_double_eq(bench_ulp(ATTND_F16, 1.5), 0x1p-10);
    ck_assert_double_eq(bench_ulp(ATTND_F16, 1e-6), 0x1p-24);
}
END_TEST

START_TEST(verdicts_add_up) {
    bench_verdict a = {.rows = 1, .max_error = 1, .max_error_bound = 3};
    bench_verdict b = {.rows = 2,
                       .mismatches = 1,
                       .plain_runs = 4,
                       .max_error = 2,
                       .max_error_bound = 1,
                       .first = "b"};
    bench_verdict c = {.mismatches = 1, .max_error = 0.5, .first = "c"};
    bench_verdict_add(&a, &b);
    bench_verdict_add(&a, &c);
    ck_assert_uint_eq(a.rows, 3);
    ck_assert_uint_eq(a.mismatches, 2);
    ck_assert_uint_eq(a.plain_runs, 4);
    ck_assert_double_eq(a.max_error, 2);
    ck_assert_double_eq(a.max_error_bound, 1);
    ck_assert_str_eq(a.first, "b");
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_check");
    TCase *tc = tcase_create("verdicts");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, the_rounded_truth_needs_no_plain_run);
    tcase_add_loop_test(tc, a_plain_run_in_any_order_passes, 0, BENCH_NUM_ORDERS);
    tcase_add_test(tc, errors_past_the_bound_fail_and_errors_within_pass);
    tcase_add_test(tc, a_daemon_that_is_wrong_all_over_is_told_so_soon);
    tcase_add_test(tc, a_row_that_missed_one_key_of_150_is_found);
    tcase_add_test(tc, nan_and_infinity_are_mismatches);
    tcase_add_test(tc, sixteen_bit_outputs_are_held_to_their_ulp);
    tcase_add_test(tc, ulps_are_the_steps_of_the_types);
    tcase_add_test(tc, verdicts_add_up);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
