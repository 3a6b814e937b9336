// The histogram against a sorted array of what was recorded.
#include "proto/hist.h"

#include <math.h>

#include "tests/check_main.h"

static attnd_hist h, other;

static uint64_t next_random(uint64_t *state) { // xorshift64*
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

static int compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

START_TEST(hist_answers_zero_when_empty) {
    attnd_hist_init(&h);
    ck_assert_uint_eq(attnd_hist_count(&h), 0);
    ck_assert_uint_eq(attnd_hist_min(&h), 0);
    ck_assert_uint_eq(attnd_hist_max(&h), 0);
    ck_assert(attnd_hist_mean(&h) == 0.0);
    ck_assert_uint_eq(attnd_hist_quantile(&h, 0.0), 0);
    ck_assert_uint_eq(attnd_hist_quantile(&h, 0.5), 0);
    ck_assert_uint_eq(attnd_hist_quantile(&h, 1.0), 0);
}
END_TEST

START_TEST(hist_is_exact_below_128) {
    attnd_hist_init(&h);
    for (uint64_t v = 0; v < 128; v++) {
        attnd_hist_record(&h, v);
    }
    for (uint64_t v = 0; v < 128; v++) {
        ck_assert_uint_eq(attnd_hist_quantile(&h, ((double)v + 1) / 128), v);
    }
    ck_assert(attnd_hist_mean(&h) == 63.5);
}
END_TEST

// Each value alone among two: the lower one is the median, and must come back within 1 %.
START_TEST(hist_error_is_within_one_percent_at_every_magnitude) {
    uint64_t state = 1;
    for (int bits = 1; bits <= 64; bits++) {
        for (int i = 0; i < 200; i++) {
            uint64_t v = next_random(&state) >> (64 - bits);
            attnd_hist_init(&h);
            attnd_hist_record(&h, 0);
            attnd_hist_record(&h, v);
            attnd_hist_record(&h, UINT64_MAX);
            double got = (double)attnd_hist_quantile(&h, 0.5);
            ck_assert(fabs(got - (double)v) <= 0.01 * (double)v);
        }
    }
}
END_TEST

START_TEST(hist_takes_the_edges_of_every_power_of_two) {
    attnd_hist_init(&h);
    uint64_t n = 0;
    for (int bit = 0; bit < 64; bit++) {
        attnd_hist_record(&h, UINT64_C(1) << bit);
        attnd_hist_record(&h, (UINT64_C(1) << bit) - 1);
        n += 2;
    }
    attnd_hist_record(&h, UINT64_MAX);
    uint64_t sum = 0;
    for (int i = 0; i < ATTND_HIST_BUCKETS; i++) {
        sum += h.buckets[i];
    }
    ck_assert_uint_eq(sum, n + 1);
    ck_assert_uint_eq(h.buckets[ATTND_HIST_BUCKETS - 1], 1); // UINT64_MAX lies in the last one
}
END_TEST

START_TEST(hist_quantiles_match_the_sorted_values) {
    enum { N = 10000 };
    static uint64_t values[N];
    uint64_t state = 42;
    double sum = 0;
    attnd_hist_init(&h);
    for (int i = 0; i < N; i++) {
        uint64_t r = next_random(&state);
        values[i] = (r >> 20) >> (r % 40); // spread over magnitudes
        sum += (double)values[i];
        attnd_hist_record(&h, values[i]);
    }
    qsort(values, N, sizeof(values[0]), compare);
    const double qs[] = {0.001, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999};
    for (size_t i = 0; i < sizeof(qs) / sizeof(qs[0]); i++) {
        double want = (double)values[(size_t)ceil(qs[i] * N) - 1];
        ck_assert(fabs((double)attnd_hist_quantile(&h, qs[i]) - want) <= 0.01 * want);
    }
    ck_assert_uint_eq(attnd_hist_quantile(&h, 0.0), values[0]);
    ck_assert_uint_eq(attnd_hist_quantile(&h, 1.0), values[N - 1]);
    ck_assert_uint_eq(attnd_hist_min(&h), values[0]);
    ck_assert_uint_eq(attnd_hist_max(&h), values[N - 1]);
    ck_assert(fabs(attnd_hist_mean(&h) - sum / N) <= 1e-9 * sum / N);
}
END_TEST

START_TEST(hist_of_one_value_answers_it_exactly) {
    attnd_hist_init(&h);
    attnd_hist_record(&h, 1000003);
    for (double q = 0.0; q <= 1.0; q += 0.125) {
        ck_assert_uint_eq(attnd_hist_quantile(&h, q), 1000003);
    }
}
END_TEST

START_TEST(hist_merge_is_as_if_one_had_recorded_all) {
    static attnd_hist both;
    attnd_hist_init(&h);
    attnd_hist_init(&other);
    attnd_hist_init(&both);
    uint64_t state = 7;
    for (int i = 0; i < 2000; i++) {
        uint64_t v = next_random(&state) >> 30;
        attnd_hist_record(i % 3 ? &h : &other, v);
        attnd_hist_record(&both, v);
    }
    attnd_hist_merge(&h, &other);
    ck_assert_uint_eq(attnd_hist_count(&h), 2000);
    ck_assert_uint_eq(attnd_hist_min(&h), attnd_hist_min(&both));
    ck_assert_uint_eq(attnd_hist_max(&h), attnd_hist_max(&both));
    ck_assert_uint_eq(attnd_hist_quantile(&h, 0.9), attnd_hist_quantile(&both, 0.9));
}
END_TEST

START_TEST(hist_merge_with_an_empty_one_changes_nothing) {
    attnd_hist_init(&h);
    attnd_hist_init(&other);
    attnd_hist_record(&h, 5);
    attnd_hist_merge(&h, &other);
    ck_assert_uint_eq(attnd_hist_min(&h), 5);
    attnd_hist_merge(&other, &h);
    ck_assert_uint_eq(attnd_hist_min(&other), 5);
    ck_assert_uint_eq(attnd_hist_count(&other), 1);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("hist");
    TCase *tc = tcase_create("hist");
    tcase_add_test(tc, hist_answers_zero_when_empty);
    tcase_add_test(tc, hist_is_exact_below_128);
    tcase_add_test(tc, hist_error_is_within_one_percent_at_every_magnitude);
    tcase_add_test(tc, hist_takes_the_edges_of_every_power_of_two);
    tcase_add_test(tc, hist_quantiles_match_the_sorted_values);
    tcase_add_test(tc, hist_of_one_value_answers_it_exactly);
    tcase_add_test(tc, hist_merge_is_as_if_one_had_recorded_all);
    tcase_add_test(tc, hist_merge_with_an_empty_one_changes_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
