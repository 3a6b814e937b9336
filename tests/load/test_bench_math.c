#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_math.h"

enum { ROWS = 24, COLS = 48, MAX_INNER = 70, LD = 100 };

static double num(uint32_t i) {
    return sin(i * 1.7 + 0.3);
}

START_TEST(products_are_those_of_three_loops) {
    static double a[ROWS * LD], b[MAX_INNER * COLS], c[ROWS * LD];
    static float af[ROWS * LD], bf[MAX_INNER * COLS], cf[ROWS * LD];
    uint32_t inner = (uint32_t)_i;
    for (uint32_t i = 0; i < ROWS * LD; i++) {
        a[i] = num(i);
        af[i] = (float)num(i);
        c[i] = num(i + 7);
        cf[i] = (float)num(i + 7);
    }
    for (uint32_t i = 0; i < inner * COLS; i++) {
        b[i] = num(i + 3);
        bf[i] = (float)num(i + 3);
    }
    bench_gemm_f64(c, LD, a, LD, b, ROWS, COLS, inner);
    bench_gemm_f32(cf, LD, af, LD, bf, ROWS, COLS, inner);
    for (uint32_t i = 0; i < ROWS; i++) {
        for (uint32_t j = 0; j < LD; j++) {
            double want = num(i * LD + j + 7);
            for (uint32_t k = 0; k < inner && j < COLS; k++) {
                want += num(i * LD + k) * num(k * COLS + j + 3);
            }
            ck_assert_double_eq_tol(c[i * LD + j], want, 1e-13);
            ck_assert_double_eq_tol((double)cf[i * LD + j], want, 2e-5);
        }
    }
}
END_TEST

START_TEST(exp_is_exact_at_0_and_close_below) {
    enum { N = 70901 };
    double *x = malloc(N * sizeof(*x)), sum = 5, want_sum = 5;
    float *xf = malloc(N * sizeof(*xf));
    for (int i = 0; i < N; i++) {
        x[i] = 3 - i * 0.01; // shift 3: arguments 0 to -709
        xf[i] = (float)(-i * 0.001);
    }
    bench_exp_f64(x, N, 3, &sum);
    bench_exp_f32(xf, N, 0);
    ck_assert(x[0] == 1 && xf[0] == 1);
    for (int i = 0; i < N; i++) {
        double arg = (3 - i * 0.01) - 3, want = exp(arg > -708 ? arg : -708);
        ck_assert_double_le(fabs(x[i] - want), 1e-15 * want);
        double want_f = exp((double)(float)(-i * 0.001));
        ck_assert_double_le(fabs((double)xf[i] - want_f), 0.501 * 0x1p-23 * want_f);
        want_sum += want;
    }
    ck_assert_double_eq_tol(sum, want_sum, 1e-11);
    free(x);
    free(xf);
}
END_TEST

START_TEST(float_shifts_are_made_in_float) {
    float x = 1e-4f;
    bench_exp_f32(&x, 1, 16);
    ck_assert_float_eq(x, (float)exp((double)(1e-4f - 16)));
}
END_TEST

START_TEST(scale_finds_the_largest) {
    for (uint32_t n = 0; n < 40; n++) {
        for (uint32_t at = 0; at < (n > 0 ? n : 1); at++) {
            double x[40], max = -INFINITY;
            float xf[40], max_f = 2;
            for (uint32_t i = 0; i < n; i++) {
                x[i] = i == at ? 9 : -1.0 * i;
                xf[i] = i == at ? 9 : -1.0f * (float)i;
            }
            bench_scale_f64(x, n, 0.5, &max);
            bench_scale_f32(xf, n, 0.25f, &max_f);
            ck_assert_double_eq(max, n > 0 ? 4.5 : -INFINITY);
            ck_assert_float_eq(max_f, n > 0 ? 2.25f : 2);
            for (uint32_t i = 0; i < n; i++) {
                ck_assert_double_eq(x[i], i == at ? 4.5 : -0.5 * i);
                ck_assert_float_eq(xf[i], i == at ? 2.25f : -0.25f * (float)i);
            }
        }
    }
}
END_TEST

START_TEST(divide_divides) {
    float x[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    bench_divide_f32(x, 9, 3);
    for (int i = 0; i < 9; i++) {
        ck_assert_float_eq(x[i], (float)(i + 1) / 3);
    }
}
END_TEST

// uniform_one is the generator as its comment describes it, one element at a time.
static float uniform_one(uint64_t key, uint32_t i) {
    uint32_t x = i * 2654435761u + (uint32_t)(key & 0xffffffff);
    x = (x ^ (x / 65536)) * 2246822507u;
    x = x ^ (uint32_t)(key >> 32);
    x = (x ^ (x / 8192)) * 3266489909u;
    x = x ^ (x / 65536);
    return (float)((double)(x / 256) * 2 + 1 - 16777216) * (1.7320508f / 16777216.0f);
}

START_TEST(uniform_is_the_generator_of_its_comment) {
    static const uint64_t KEYS[] = {0, 1, 0x123456789abcdef0, ~0ull};
    for (int k = 0; k < 4; k++) {
        float x[77];
        bench_uniform(x, KEYS[k], 0xfffffff0u, 77); // the counter wraps
        for (uint32_t i = 0; i < 77; i++) {
            ck_assert_float_eq(x[i], uniform_one(KEYS[k], 0xfffffff0u + i));
        }
    }
}
END_TEST

START_TEST(hash_is_splitmix64) {
    // the first outputs of SplitMix64 seeded with 0 (its published test vector)
    ck_assert_uint_eq(bench_hash64(0), 0xe220a8397b1dcdafu);
    ck_assert_uint_eq(bench_hash64(0x9e3779b97f4a7c15u), 0x6e789e6aa1b965f4u);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_math");
    TCase *tc = tcase_create("loops");
    tcase_add_loop_test(tc, products_are_those_of_three_loops, 0, MAX_INNER);
    tcase_add_test(tc, exp_is_exact_at_0_and_close_below);
    tcase_add_test(tc, float_shifts_are_made_in_float);
    tcase_add_test(tc, scale_finds_the_largest);
    tcase_add_test(tc, divide_divides);
    tcase_add_test(tc, uniform_is_the_generator_of_its_comment);
    tcase_add_test(tc, hash_is_splitmix64);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
