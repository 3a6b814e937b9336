#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_report.h"

static bench_model model;
static bench_stats stats;
static bench_verdict verdict;
static bench_host host = {
    .cpu = "A CPU", .kernel = "Linux 6.1 x86_64", .cpus = 2, .memory_bytes = 1 << 30};
static bench_report report;

static void setup(void) {
    attnd_errinfo info;
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    bench_stats_init(&stats);
    stats.requests = 10;
    stats.layer_calls = 200;
    stats.rows = 400;
    stats.prefill_tokens = 3000;
    stats.cached_tokens = 600;
    stats.decode_tokens = 1000;
    stats.elapsed_us = 2000000;
    bench_stats_time(&stats, BENCH_TIME_ttft, 1500);
    verdict = (bench_verdict){.rows = 400, .max_error = 2e-7, .max_error_bound = 5e-7};
    report = (bench_report){.model = &model,
                            .stats = &stats,
                            .verdict = &verdict,
                            .host = &host,
                            .command_line = "attn-bench serve",
                            .url = "ipc://x",
                            .lengths = "input 1",
                            .arrivals = "closed loop",
                            .ended = "",
                            .verify = 1,
                            .seed = 7,
                            .concurrency = 3,
                            .daemon_pid = 99,
                            .before = {.cpu_s = 1},
                            .after = {.cpu_s = 3.5, .peak_bytes = 4096}};
}

static void teardown(void) {
    bench_model_fini(&model);
}

static cJSON *json(void) {
    char *text = bench_report_json(&report);
    ck_assert_ptr_nonnull(text);
    cJSON *root = cJSON_Parse(text);
    ck_assert_ptr_nonnull(root);
    free(text);
    return root;
}

static double number(const cJSON *root, const char *key) {
    const cJSON *item = cJSON_GetObjectItem(root, key);
    ck_assert_msg(cJSON_IsNumber(item), "%s is no number", key);
    return item->valuedouble;
}

START_TEST(json_has_the_figures) {
    cJSON *root = json();
    ck_assert_double_eq(number(root, "requests"), 10);
    ck_assert_double_eq(number(root, "errors"), 0);
    ck_assert_double_eq(number(root, "verified"), 400);
    ck_assert_double_eq(number(root, "max_error"), 2e-7);
    ck_assert_double_eq(number(root, "max_error_bound"), 5e-7);
    ck_assert_double_eq(number(root, "layer_calls_per_s"), 100);
    ck_assert_double_eq(number(root, "prefill_tokens_per_s"), 1500);
    ck_assert_double_eq(number(root, "decode_tokens_per_s"), 500);
    ck_assert_double_eq(number(root, "cached_tokens"), 600);
    ck_assert_double_eq(number(root, "prefix_hit_rate"), 0.2);
    ck_assert_ptr_nonnull(
        strstr(cJSON_GetObjectItem(root, "tokens_are")->valuestring, "attention only, 2 layers"));
    static const char *const TIMES[] = {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"};
    for (int i = 0; i < 4; i++) {
        const cJSON *t = cJSON_GetObjectItem(root, TIMES[i]);
        ck_assert_ptr_nonnull(t);
        static const char *const KEYS[] = {"mean", "p50", "p90", "p99", "p99.9", "max"};
        for (int k = 0; k < 6; k++) {
            ck_assert_double_eq(number(t, KEYS[k]),
                                i == 0 && (k == 0 || k == 5) ? 1.5 : number(t, KEYS[k]));
        }
    }
    const cJSON *daemon = cJSON_GetObjectItem(root, "daemon");
    ck_assert_double_eq(number(daemon, "cpu_s"), 2.5);
    ck_assert_double_eq(number(daemon, "peak_bytes"), 4096);
    const cJSON *protocol = cJSON_GetObjectItem(root, "protocol");
    ck_assert_double_eq(number(protocol, "seed"), 7);
    ck_assert_str_eq(
        cJSON_GetObjectItem(cJSON_GetObjectItem(protocol, "machine"), "cpu")->valuestring, "A CPU");
    ck_assert_double_eq(number(cJSON_GetObjectItem(protocol, "model"), "head_dim"), 32);
    ck_assert(cJSON_IsTrue(cJSON_GetObjectItem(root, "ok")));
    cJSON_Delete(root);
}
END_TEST

START_TEST(errors_appear_by_name) {
    attnd_errinfo info = {.text = "a \"quoted\" thing"};
    bench_stats_error(&stats, "step", ATTND_ESTALE, &info);
    cJSON *root = json();
    ck_assert_double_eq(number(cJSON_GetObjectItem(root, "errors_by_code"), "ESTALE"), 1);
    ck_assert_str_eq(cJSON_GetObjectItem(root, "first_error")->valuestring,
                     "step: ESTALE: a \"quoted\" thing");
    ck_assert(cJSON_IsFalse(cJSON_GetObjectItem(root, "ok")));
    cJSON_Delete(root);
}
END_TEST

START_TEST(an_infinite_error_is_null) {
    verdict.max_error = INFINITY;
    verdict.mismatches = 1;
    cJSON *root = json();
    ck_assert(cJSON_IsNull(cJSON_GetObjectItem(root, "max_error")));
    cJSON_Delete(root);
}
END_TEST

START_TEST(a_run_is_good_without_errors_mismatches_or_early_end) {
    ck_assert(bench_report_ok(&report));
    verdict.mismatches = 1;
    ck_assert(!bench_report_ok(&report));
    verdict.mismatches = 0;
    stats.failed = 1;
    ck_assert(!bench_report_ok(&report));
    stats.failed = 0;
    stats.errors = 1;
    ck_assert(!bench_report_ok(&report));
    stats.errors = 0;
    report.ended = "ECONN";
    ck_assert(!bench_report_ok(&report));
    report.ended = "";
    stats.requests = 0;
    ck_assert(!bench_report_ok(&report));
}
END_TEST

START_TEST(the_table_says_what_the_tokens_are) {
    char *out = NULL;
    size_t bytes;
    FILE *f = open_memstream(&out, &bytes);
    bench_report_table(&report, f);
    fclose(f);
    ck_assert_ptr_nonnull(
        strstr(out, "decode tokens/s        500 (attention only, 2 layers; 1000 tokens)"));
    ck_assert_ptr_nonnull(strstr(out, "400 of 400 rows"));
    ck_assert_ptr_nonnull(strstr(out, "tpot: mean time of an output token after the first"));
    ck_assert_ptr_nonnull(strstr(out, "pid 99, 2.50 CPU s"));
    free(out);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_report");
    TCase *tc = tcase_create("report");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, json_has_the_figures);
    tcase_add_test(tc, errors_appear_by_name);
    tcase_add_test(tc, an_infinite_error_is_null);
    tcase_add_test(tc, a_run_is_good_without_errors_mismatches_or_early_end);
    tcase_add_test(tc, the_table_says_what_the_tokens_are);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
