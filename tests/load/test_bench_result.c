// Statistics, verdicts, the line and the JSON of a case, from figures written down here.
#include "tests/load/bench_result.h"

#include <stdio.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_kernels.h"

START_TEST(a_spread_is_median_and_quartiles) {
    double x[] = {5, 1, 4, 2, 3};
    bench_spread s = bench_spread_of(x, 5);
    ck_assert_uint_eq(s.num, 5);
    ck_assert_double_eq(s.median, 3);
    ck_assert_double_eq(s.min, 1);
    ck_assert_double_eq(s.max, 5);
    ck_assert_double_eq(s.spread, 2.0 / 3); // quartiles 2 and 4
}
END_TEST

START_TEST(an_even_number_has_its_median_between) {
    double x[] = {4, 1, 2, 3};
    bench_spread s = bench_spread_of(x, 4);
    ck_assert_double_eq(s.median, 2.5);
    ck_assert_double_eq_tol(s.spread, 1.5 / 2.5, 1e-12); // quartiles 1.75 and 3.25
    double one[] = {7};
    s = bench_spread_of(one, 1);
    ck_assert_double_eq(s.median, 7);
    ck_assert_double_eq(s.spread, 0);
}
END_TEST

// result_of is a result with a time and a ceiling.
static bench_result result_of(const char *text, double us, double ceiling, bool is_bytes) {
    bench_result r = {.us = {.num = 9, .median = us, .min = us, .max = us}};
    ATTND_CK_OK(bench_case_parse(&r.c, text, NULL));
    r.ceiling.is_bytes = is_bytes;
    r.ceiling_value.median = ceiling;
    r.choice.kernel = "cpu_scalar_f32_decode";
    r.choice.why = "because";
    r.error.bound = 1;
    bench_result_derive(&r);
    return r;
}

START_TEST(rates_follow_from_the_time) {
    // 16 MiB and 64 Mi operations in 1000 us.
    bench_result r = result_of("decode bf16 32/8 kv_len 4096", 1000, 33.554432, true);
    ck_assert_str_eq(r.name, "decode bf16 32/8 kv_len 4096");
    ck_assert_double_eq_tol(r.gbs, 16.777216, 1e-9);
    ck_assert_double_eq_tol(r.gflops, 67.108864, 1e-9);
    ck_assert_double_eq_tol(r.ceiling_share, 0.5, 1e-12);
    r = result_of("decode bf16 32/8 kv_len 4096", 1000, 268.435456, false);
    ck_assert_double_eq_tol(r.ceiling_share, 0.25, 1e-12);
}
END_TEST

static const bench_ask asks[] = {
    {"decode f32 32/8 kv_len *", NULL, BENCH_SHARE, 4096, 0.8, 0},
    {"decode f8e4m3 32/8 kv_len *", "decode bf16 32/8 kv_len *", BENCH_SPEEDUP, 0, 1.5, 0},
    {"ragged bf16 32/8 batch 128 kv_len *", "decode bf16 32/8 kv_len *", BENCH_SLOWER, 0, 0, 1.05},
    {"decode bf16 32/8 kv_len *", "decode bf16 32/8 kv_len 32768", BENCH_SLOPE, 0, 0.9, 1.1},
    {"prefill f32 32/8 q_len *", NULL, BENCH_PEER, 0, 1.0, 0},
    {NULL, NULL, BENCH_SHARE, 0, 0, 0},
};

START_TEST(a_verdict_says_what_was_measured) {
    bench_result r[] = {
        result_of("decode f32 32/8 kv_len 2048", 1e3, 16.777216, true), // too short to be asked
        result_of("decode f32 32/8 kv_len 4096", 1e3, 67.108864, true), // 33.5 of 67.1 GB/s
        result_of("decode bf16 32/8 kv_len 32768", 8000, 0, true),
        result_of("decode bf16 32/8 kv_len 131072", 40000, 0, true),
        result_of("decode f8e4m3 32/8 kv_len 32768", 5000, 0, true),
        result_of("ragged bf16 32/8 batch 128 kv_len 131072", 41000, 0, true),
        result_of("prefill f32 32/8 q_len 512", 10000, 0, false),
        result_of("prefill f32 32/8 q_len 2048", 10000, 0, false), // without a peer
    };
    snprintf(r[6].peer, sizeof(r[6].peer), "OpenBLAS");
    r[6].peer_us.median = 9000;
    bench_verdict_line v[16];
    uint32_t num = bench_verdicts(asks, r, 8, v, 16);
    ck_assert_uint_eq(num, 5);
    ck_assert_str_eq(v[0].result->name, "decode f32 32/8 kv_len 4096");
    ck_assert_double_eq_tol(v[0].measured, 0.5, 1e-12);
    ck_assert(!v[0].is_met);
    ck_assert_str_eq(v[1].other, "decode bf16 32/8 kv_len 32768");
    ck_assert_double_eq_tol(v[1].measured, 1.6, 1e-12);
    ck_assert(v[1].is_met);
    ck_assert_double_eq_tol(v[2].measured, 1.025, 1e-12);
    ck_assert(v[2].is_met);
    ck_assert_double_eq_tol(v[3].measured, 1.25, 1e-12); // 5 times the time of 4 times the keys
    ck_assert(!v[3].is_met);
    ck_assert_double_eq_tol(v[4].measured, 0.9, 1e-12);
    ck_assert(!v[4].is_met);
    char text[BENCH_VERDICT_BYTES];
    bench_verdict_text(&v[3], text);
    ck_assert_str_eq(text, "decode bf16 32/8 kv_len 131072: time a key over \"decode bf16 32/8 "
                           "kv_len 32768\" 1.250, asked 0.90 to 1.10: NOT MET");
    ck_assert_uint_eq(bench_verdicts(asks, r, 8, v, 2), 2);
}
END_TEST

START_TEST(differences_and_plans_are_asked_in_microseconds) {
    static const bench_ask two[] = {
        {"decode bf16 32/8 kv_len 8192 new 1", "decode bf16 32/8 kv_len 8192", BENCH_MORE, 0, 0, 2},
        {"decode bf16 32/8 kv_len 8192", NULL, BENCH_PLAN, 0, 0, 5},
        {NULL, NULL, BENCH_SHARE, 0, 0, 0}};
    bench_result r[] = {result_of("decode bf16 32/8 kv_len 8192", 14, 0, true),
                        result_of("decode bf16 32/8 kv_len 8192 new 1", 16.5, 0, true)};
    bench_verdict_line v[4];
    ck_assert_uint_eq(bench_verdicts(two, r, 2, v, 4), 1); // the plan was not timed
    ck_assert_double_eq_tol(v[0].measured, 2.5, 1e-12);
    ck_assert(!v[0].is_met);
    r[0].plan_us = 4;
    ck_assert_uint_eq(bench_verdicts(two, r, 2, v, 4), 2);
    ck_assert_double_eq_tol(v[1].measured, 4, 1e-12);
    ck_assert(v[1].is_met);
}
END_TEST

START_TEST(a_pattern_without_a_star_is_one_name) {
    static const bench_ask one[] = {{"prefill f32 32/8 q_len 512", NULL, BENCH_SHARE, 0, 0.6, 0},
                                    {NULL, NULL, BENCH_SHARE, 0, 0, 0}};
    bench_result r[] = {result_of("prefill f32 32/8 q_len 5120", 1, 1, true),
                        result_of("prefill f32 32/8 q_len 512", 1e9, 1, true)};
    bench_verdict_line v[4];
    ck_assert_uint_eq(bench_verdicts(one, r, 2, v, 4), 1);
    ck_assert_ptr_eq(v[0].result, &r[1]);
}
END_TEST

START_TEST(a_line_names_case_time_and_kernel) {
    char text[BENCH_RESULT_BYTES];
    bench_result r = result_of("decode bf16 32/8 kv_len 4096", 1000, 33.554432, true);
    bench_result_text(&r, text);
    ck_assert_ptr_nonnull(strstr(text, "decode bf16 32/8 kv_len 4096"));
    ck_assert_ptr_nonnull(strstr(text, "1000.0 us"));
    ck_assert_ptr_nonnull(strstr(text, "50.0% of 33.6 GB/s"));
    ck_assert_ptr_nonnull(strstr(text, "cpu_scalar_f32_decode"));
    ck_assert_ptr_null(strstr(text, "WRONG"));
    r.error.max = 2;
    bench_result_text(&r, text);
    ck_assert_ptr_nonnull(strstr(text, "WRONG"));
}
END_TEST

static double number(const cJSON *o, const char *key) {
    const cJSON *x = cJSON_GetObjectItemCaseSensitive(o, key);
    ck_assert_msg(cJSON_IsNumber(x), "%s", key);
    return x->valuedouble;
}

START_TEST(the_json_has_every_field_of_a_case) {
    bench_result r[] = {result_of("decode f32 32/8 kv_len 4096", 1000, 67.108864, true),
                        result_of("ragged bf16 2/1 batch 4 kv_len 100", 10, 0, true)};
    bench_verdict_line v[4];
    bench_kernels_report report = {.backend = "cpu",
                                   .command = "attn-bench kernels",
                                   .device = "scalar, 1 threads",
                                   .timing = {.reps = 9, .cold_bytes = 1 << 20, .seed = 1},
                                   .results = r,
                                   .num_results = 2,
                                   .verdicts = v};
    report.num_verdicts = bench_verdicts(asks, r, 2, v, 4);
    cJSON *doc = bench_kernels_json(&report);
    const cJSON *cases = cJSON_GetObjectItemCaseSensitive(doc, "cases");
    ck_assert_int_eq(cJSON_GetArraySize(cases), 2);
    const cJSON *one = cJSON_GetArrayItem(cases, 0);
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(one, "case");
    ck_assert_str_eq(name->valuestring, "decode f32 32/8 kv_len 4096");
    ck_assert_double_eq(number(one, "us"), 1000);
    ck_assert_double_eq(number(one, "kv_len"), 4096);
    ck_assert_double_eq_tol(number(one, "gbs"), 33.554432, 1e-9);
    ck_assert_double_eq_tol(number(one, "gflops"), 67.108864, 1e-9);
    ck_assert_double_eq_tol(number(one, "ceiling_share"), 0.5, 1e-12);
    ck_assert_double_eq(number(one, "spread"), 0);
    ck_assert(cJSON_IsString(cJSON_GetObjectItemCaseSensitive(one, "kernel")));
    ck_assert(cJSON_IsString(cJSON_GetObjectItemCaseSensitive(one, "why")));
    const cJSON *lengths =
        cJSON_GetObjectItemCaseSensitive(cJSON_GetArrayItem(cases, 1), "kv_lens");
    ck_assert_int_eq(cJSON_GetArraySize(lengths), 4);
    const cJSON *asked = cJSON_GetObjectItemCaseSensitive(doc, "asked");
    ck_assert_int_eq(cJSON_GetArraySize(asked), 1);
    ck_assert(cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(cJSON_GetArrayItem(asked, 0), "met")));
    cJSON_Delete(doc);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_result");
    TCase *c = tcase_create("result");
    tcase_add_test(c, a_spread_is_median_and_quartiles);
    tcase_add_test(c, an_even_number_has_its_median_between);
    tcase_add_test(c, rates_follow_from_the_time);
    tcase_add_test(c, a_verdict_says_what_was_measured);
    tcase_add_test(c, differences_and_plans_are_asked_in_microseconds);
    tcase_add_test(c, a_pattern_without_a_star_is_one_name);
    tcase_add_test(c, a_line_names_case_time_and_kernel);
    tcase_add_test(c, the_json_has_every_field_of_a_case);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
