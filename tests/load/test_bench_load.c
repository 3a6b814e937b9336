#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/load/bench_load.h"

static attnd_errinfo info;

static bench_load *create(const bench_load_opts *opts) {
    bench_load *load = NULL;
    ATTND_CK_OK(bench_load_create(&load, opts, &info));
    return load;
}

START_TEST(lengths_are_parsed) {
    bench_length len;
    ATTND_CK_OK(bench_length_parse(&len, "512", &info));
    ck_assert(!len.lognormal);
    ck_assert_double_eq(len.mean, 512);
    ATTND_CK_OK(bench_length_parse(&len, "lognormal:1000,0.5", &info));
    ck_assert(len.lognormal);
    ck_assert_double_eq(len.mean, 1000);
    ck_assert_double_eq(len.sigma, 0.5);
}
END_TEST

START_TEST(bad_lengths_are_refused) {
    static const char *const BAD[] = {"",
                                      "0",
                                      "-1",
                                      "1.5",
                                      "512x",
                                      "1e99",
                                      "nan",
                                      "inf",
                                      "16777217",
                                      "lognormal:",
                                      "lognormal:5",
                                      "lognormal:5,",
                                      "lognormal:5,-1",
                                      "lognormal:5,11",
                                      "lognormal:0,1",
                                      "lognormal:5,1x",
                                      "uniform:1,2"};
    bench_length len = {.mean = 77};
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        ATTND_CK_ERR(bench_length_parse(&len, BAD[i], &info), ATTND_EINVAL);
        ck_assert_double_eq(len.mean, 77);
    }
}
END_TEST

START_TEST(fixed_lengths_and_ids_count_up) {
    bench_load *load =
        create(&(bench_load_opts){.input = {.mean = 9}, .output = {.mean = 3}, .num_requests = 3});
    bench_request req;
    ck_assert_uint_eq(bench_load_total(load), 3);
    for (uint64_t i = 0; i < 3; i++) {
        ck_assert(bench_load_next(load, &req));
        ck_assert_uint_eq(req.id, i);
        ck_assert_uint_eq(req.input, 9);
        ck_assert_uint_eq(req.output, 3);
        ck_assert_uint_eq(req.arrival_us, 0);
    }
    ck_assert(!bench_load_next(load, &req));
    bench_load_free(load);
}
END_TEST

START_TEST(lognormal_lengths_have_the_mean_and_sigma_asked_for) {
    enum { N = 40000 };
    bench_load *load = create(&(bench_load_opts){
        .input = {true, 1000, 0.5}, .output = {true, 200, 1}, .num_requests = N, .seed = 11});
    bench_request req;
    double sum = 0, log_sum = 0, log_sq = 0, out_sum = 0;
    while (bench_load_next(load, &req)) {
        ck_assert_uint_ge(req.output, 1);
        sum += req.input;
        log_sum += log(req.input);
        log_sq += log(req.input) * log(req.input);
        out_sum += req.output;
    }
    bench_load_free(load);
    // The mean of n lognormals has the standard deviation mean * sqrt((exp(sigma^2) - 1) / n):
    // 2.7 and 1.3 here.  Five of them are allowed.
    ck_assert_double_eq_tol(sum / N, 1000, 13.5);
    ck_assert_double_eq_tol(out_sum / N, 200, 6.6);
    double mu = log_sum / N, sigma = sqrt(log_sq / N - mu * mu);
    ck_assert_double_eq_tol(mu, log(1000) - 0.125, 0.0125); // 5 * 0.5 / sqrt(n)
    ck_assert_double_eq_tol(sigma, 0.5, 0.009);             // 5 * 0.5 / sqrt(2 n)
}
END_TEST

START_TEST(a_seed_gives_the_same_stream_and_another_one_another) {
    bench_load_opts opts = {.input = {true, 1000, 1},
                            .output = {.mean = 5},
                            .arrival = BENCH_POISSON,
                            .rate = 10,
                            .num_requests = 50,
                            .seed = 5};
    bench_load *a = create(&opts), *b = create(&opts);
    opts.seed = 6;
    bench_load *c = create(&opts);
    bench_request x, y, z;
    uint32_t differ = 0;
    while (bench_load_next(a, &x)) {
        ck_assert(bench_load_next(b, &y));
        ck_assert(bench_load_next(c, &z));
        ck_assert_uint_eq(x.input, y.input);
        ck_assert_uint_eq(x.arrival_us, y.arrival_us);
        differ += x.input != z.input;
    }
    ck_assert_uint_gt(differ, 40);
    bench_load_free(a);
    bench_load_free(b);
    bench_load_free(c);
}
END_TEST

START_TEST(poisson_arrivals_have_exponential_gaps) {
    enum { N = 20000 };
    bench_load *load = create(&(bench_load_opts){.input = {.mean = 1},
                                                 .output = {.mean = 1},
                                                 .arrival = BENCH_POISSON,
                                                 .rate = 100,
                                                 .num_requests = N,
                                                 .seed = 2});
    bench_request req;
    uint64_t last = 0, short_gaps = 0;
    while (bench_load_next(load, &req)) {
        ck_assert_uint_ge(req.arrival_us, last);
        short_gaps += req.arrival_us - last < 10000; // the mean gap
        last = req.arrival_us;
    }
    bench_load_free(load);
    ck_assert_double_eq_tol((double)last / N, 10000, 5 * 10000 / sqrt(N));
    // 1 - 1/e of exponential gaps are below their mean
    ck_assert_double_eq_tol((double)short_gaps / N, 0.632, 5 * sqrt(0.632 * 0.368 / N));
}
END_TEST

static char path[] = "test_bench_load.XXXXXX";

static void write_trace(void) {
    strcpy(path, "test_bench_load.XXXXXX");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    FILE *f = fdopen(fd, "w");
    fprintf(f, "TIMESTAMP,ContextTokens,GeneratedTokens\n"
               "2023-11-16 00:00:02,10,1\n"
               "2023-11-16 00:00:00,20,0\n"
               "2023-11-16 00:00:01,0,3\n");
    fclose(f);
}

static void remove_trace(void) {
    unlink(path);
}

START_TEST(a_trace_is_taken_once_in_file_order) {
    bench_load *load = create(&(bench_load_opts){.trace = path});
    bench_request req;
    ck_assert_uint_eq(bench_load_total(load), 3);
    ck_assert(bench_load_next(load, &req));
    ck_assert_uint_eq(req.input, 10);
    ck_assert(bench_load_next(load, &req));
    ck_assert_uint_eq(req.input, 20);
    ck_assert_uint_eq(req.output, 1); // a recorded 0
    ck_assert(bench_load_next(load, &req));
    ck_assert_uint_eq(req.input, 1);
    ck_assert_uint_eq(req.output, 3);
    ck_assert_uint_eq(req.arrival_us, 0);
    ck_assert(!bench_load_next(load, &req));
    bench_load_free(load);
}
END_TEST

START_TEST(a_trace_begins_again_at_its_end) {
    bench_load *load = create(&(bench_load_opts){.trace = path, .num_requests = 5});
    bench_request req = {0};
    for (int i = 0; i < 5; i++) {
        ck_assert(bench_load_next(load, &req));
    }
    ck_assert_uint_eq(req.id, 4);
    ck_assert_uint_eq(req.input, 20);
    ck_assert(!bench_load_next(load, &req));
    bench_load_free(load);
}
END_TEST

START_TEST(trace_times_are_sorted_scaled_and_run_on) {
    bench_load *load = create(&(bench_load_opts){
        .trace = path, .num_requests = 4, .arrival = BENCH_TRACE_TIME, .speed = 2});
    static const uint64_t TIMES[] = {0, 500000, 1000000, 1000000}; // the lap is 2 s + 1 us long
    static const uint32_t INPUTS[] = {20, 1, 10, 20};
    for (int i = 0; i < 4; i++) {
        bench_request req;
        ck_assert(bench_load_next(load, &req));
        ck_assert_uint_eq(req.arrival_us, TIMES[i]);
        ck_assert_uint_eq(req.input, INPUTS[i]);
    }
    bench_load_free(load);
}
END_TEST

START_TEST(prompts_have_hash_ids_when_they_share_them) {
    FILE *f = fopen(path, "w");
    fprintf(
        f, "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [3, 4]}\n"
           "{\"timestamp\": 1, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [5]}\n");
    fclose(f);
    bench_request req = {0};
    bench_load *load = create(&(bench_load_opts){.trace = path, .shares_prefixes = true});
    ck_assert(bench_load_shares(load));
    ck_assert(bench_load_next(load, &req));
    ck_assert_uint_eq(req.num_ids, 2);
    ck_assert_uint_eq(req.ids[1], 4);
    ck_assert(bench_load_next(load, &req));
    ck_assert_uint_eq(req.num_ids, 1);
    ck_assert_uint_eq(req.ids[0], 5);
    bench_load_free(load);
    load = create(&(bench_load_opts){.trace = path});
    ck_assert(!bench_load_shares(load));
    ck_assert(bench_load_next(load, &req));
    ck_assert_uint_eq(req.num_ids, 0);
    bench_load_free(load);
}
END_TEST

START_TEST(a_trace_without_hash_ids_shares_nothing) {
    bench_load *load = create(&(bench_load_opts){.trace = path, .shares_prefixes = true});
    ck_assert(!bench_load_shares(load));
    bench_load_free(load);
}
END_TEST

START_TEST(an_endless_load_has_no_end) {
    bench_load *load = create(&(bench_load_opts){.trace = path, .endless = true});
    bench_request req = {0};
    ck_assert_uint_eq(bench_load_total(load), 0);
    for (int i = 0; i < 100; i++) {
        ck_assert(bench_load_next(load, &req));
    }
    ck_assert_uint_eq(req.id, 99);
    bench_load_free(load);
}
END_TEST

START_TEST(a_bad_trace_is_refused) {
    bench_load *load = NULL;
    ATTND_CK_ERR(bench_load_create(&load, &(bench_load_opts){.trace = "/nowhere"}, &info),
                 ATTND_EIO);
    ck_assert_ptr_null(load);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_load");
    TCase *tc = tcase_create("lengths and arrivals");
    tcase_add_test(tc, lengths_are_parsed);
    tcase_add_test(tc, bad_lengths_are_refused);
    tcase_add_test(tc, fixed_lengths_and_ids_count_up);
    tcase_add_test(tc, lognormal_lengths_have_the_mean_and_sigma_asked_for);
    tcase_add_test(tc, a_seed_gives_the_same_stream_and_another_one_another);
    tcase_add_test(tc, poisson_arrivals_have_exponential_gaps);
    suite_add_tcase(s, tc);
    TCase *traces = tcase_create("traces");
    tcase_add_checked_fixture(traces, write_trace, remove_trace);
    tcase_add_test(traces, a_trace_is_taken_once_in_file_order);
    tcase_add_test(traces, a_trace_begins_again_at_its_end);
    tcase_add_test(traces, trace_times_are_sorted_scaled_and_run_on);
    tcase_add_test(traces, prompts_have_hash_ids_when_they_share_them);
    tcase_add_test(traces, a_trace_without_hash_ids_shares_nothing);
    tcase_add_test(traces, an_endless_load_has_no_end);
    tcase_add_test(traces, a_bad_trace_is_refused);
    suite_add_tcase(s, traces);
    return s;
}

CHECK_MAIN(suite)
