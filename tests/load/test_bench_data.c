#include <math.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_data.h"

START_TEST(a_row_is_the_same_every_time_and_in_any_piece) {
    float whole[1000], piece[100];
    uint64_t key = bench_row_key(1, 2, 3, BENCH_V, 4);
    bench_fill(whole, ATTND_F32, BENCH_V, key, 0, 1000);
    bench_fill(piece, ATTND_F32, BENCH_V, key, 333, 100);
    ck_assert_mem_eq(piece, whole + 333, sizeof(piece));
}
END_TEST

START_TEST(every_coordinate_changes_the_row) {
    uint64_t keys[] = {
        bench_row_key(1, 2, 3, BENCH_K, 4), bench_row_key(9, 2, 3, BENCH_K, 4),
        bench_row_key(1, 9, 3, BENCH_K, 4), bench_row_key(1, 2, 9, BENCH_K, 4),
        bench_row_key(1, 2, 3, BENCH_V, 4), bench_row_key(1, 2, 3, BENCH_K, 9),
    };
    float rows[6][64];
    for (int i = 0; i < 6; i++) {
        bench_fill(rows[i], ATTND_F32, BENCH_K, keys[i], 0, 64);
        for (int j = 0; j < i; j++) {
            int same = 0;
            for (int e = 0; e < 64; e++) {
                same += rows[i][e] == rows[j][e];
            }
            ck_assert_int_le(same, 1);
        }
    }
}
END_TEST

// 1000 prompt tokens with ids of two blocks, the third is missing; 24 generated ones.
START_TEST(tokens_are_those_of_shared_blocks_or_of_the_request) {
    const uint32_t ids[] = {4, UINT32_MAX};
    bench_prompt a = {.request = 4, .ids = ids, .num_ids = 2, .input = 1000};
    bench_prompt b = {.request = 9, .ids = ids, .num_ids = 1, .input = 1000};
    bench_prompt c = {.request = 9};
    ck_assert_uint_eq(bench_prompt_origin(&a, 0), bench_prompt_origin(&b, 0));
    ck_assert_uint_eq(bench_prompt_origin(&a, 511), bench_prompt_origin(&a, 0));
    ck_assert_uint_ne(bench_prompt_origin(&a, 512), bench_prompt_origin(&a, 511));
    ck_assert_uint_eq(bench_prompt_origin(&a, 999), bench_prompt_origin(&a, 512));
    ck_assert_uint_eq(bench_prompt_origin(&a, 1000), 4); // generated
    ck_assert_uint_ne(bench_prompt_origin(&a, 0), 4);    // the block 4 is not the request 4
    ck_assert_uint_eq(bench_prompt_origin(&b, 512), 9);
    ck_assert_uint_eq(bench_prompt_origin(&c, 0), 9);
}
END_TEST

START_TEST(token_ids_depend_on_seed_origin_and_place) {
    uint32_t id = bench_token_id(1, 2, 3);
    ck_assert_uint_eq(id, bench_token_id(1, 2, 3));
    ck_assert_uint_ne(id, bench_token_id(9, 2, 3));
    ck_assert_uint_ne(id, bench_token_id(1, 9, 3));
    ck_assert_uint_ne(id, bench_token_id(1, 2, 9));
}
END_TEST

START_TEST(values_are_spread_as_said_and_never_0) {
    enum { ROWS = 1000, N = 256 };
    double sum[2] = {0}, sq[2] = {0}, product = 0;
    for (uint32_t t = 0; t < ROWS; t++) {
        float k[N], q[N];
        bench_fill(k, ATTND_F32, BENCH_K, bench_row_key(1, 0, 0, BENCH_K, t), 0, N);
        bench_fill(q, ATTND_F32, BENCH_Q, bench_row_key(1, 0, 0, BENCH_Q, t), 0, N);
        for (int i = 0; i < N; i++) {
            ck_assert(k[i] != 0 && q[i] != 0);
            ck_assert(fabsf(k[i]) <= 1.7320510f);
            sum[0] += (double)k[i];
            sum[1] += (double)q[i];
            sq[0] += (double)(k[i] * k[i]);
            sq[1] += (double)(q[i] * q[i]);
            product += (double)(q[i] * k[i]);
        }
    }
    // n = 256000: 5 standard deviations of a mean of uniforms, of their squares (0.894), and of
    // products of independent ones
    ck_assert_double_eq_tol(sum[0] / (ROWS * N), 0, 0.0099);
    ck_assert_double_eq_tol(sum[1] / (ROWS * N), 0, 0.0198);
    ck_assert_double_eq_tol(sq[0] / (ROWS * N), 1, 0.0089);
    ck_assert_double_eq_tol(sq[1] / (ROWS * N), 4, 0.0354);
    ck_assert_double_eq_tol(product / (ROWS * N), 0, 0.0198);
}
END_TEST

START_TEST(types_are_rounded_like_the_single_conversions) {
    float f32[700];
    uint16_t bf16[700], f16[700];
    uint8_t f8[700];
    uint64_t key = bench_row_key(5, 6, 7, BENCH_Q, 8);
    bench_fill(f32, ATTND_F32, BENCH_Q, key, 3, 700);
    bench_fill(bf16, ATTND_BF16, BENCH_Q, key, 3, 700);
    bench_fill(f16, ATTND_F16, BENCH_Q, key, 3, 700);
    bench_fill(f8, ATTND_F8E4M3, BENCH_Q, key, 3, 700);
    for (int i = 0; i < 700; i++) {
        ck_assert_uint_eq(bf16[i], attnd_f32_to_bf16(f32[i]));
        ck_assert_uint_eq(f16[i], attnd_f32_to_f16(f32[i]));
        ck_assert_uint_eq(f8[i], attnd_f32_to_f8e4m3(f32[i]));
    }
}
END_TEST

START_TEST(round_keeps_what_fits_the_type) {
    // 1 + 2^-8 lies halfway between bf16's 1 and 1 + 2^-7: to the even one
    float x[4] = {1.00390625f, 1.01171875f, -0.1f, 1e-30f};
    float y[4];
    memcpy(y, x, sizeof(x));
    bench_round(y, ATTND_F32, 4);
    ck_assert_mem_eq(y, x, sizeof(x));
    bench_round(y, ATTND_BF16, 4);
    ck_assert_float_eq(y[0], 1);
    ck_assert_float_eq(y[1], 1.015625f);
    ck_assert_float_eq_tol(y[2], -0.1f, 0.1f / 256);
    bench_round(x, ATTND_F16, 4);
    ck_assert_float_eq(x[0], 1.00390625f);
    ck_assert_float_eq(x[3], 0);
}
END_TEST

START_TEST(samples_are_a_stable_fraction) {
    uint32_t hits = 0, both = 0;
    for (uint32_t t = 0; t < 100000; t++) {
        bool sampled = bench_sampled(1, t / 100, t % 100, 0.1);
        ck_assert(sampled == bench_sampled(1, t / 100, t % 100, 0.1));
        ck_assert(!sampled || bench_sampled(1, t / 100, t % 100, 0.2)); // more only adds rows
        hits += sampled;
        both += sampled && bench_sampled(2, t / 100, t % 100, 0.1);
        ck_assert(bench_sampled(1, 0, t, 1));
        ck_assert(!bench_sampled(1, 0, t, 0));
    }
    ck_assert_double_eq_tol(hits, 10000, 475); // 5 standard deviations
    ck_assert_double_eq_tol(both, 1000, 158);
}
END_TEST

START_TEST(random_numbers_have_their_moments) {
    enum { N = 100000 };
    bench_rng rng = {.state = 1};
    double sum = 0, normal = 0, normal_sq = 0;
    for (int i = 0; i < N; i++) {
        double u = bench_rng_uniform(&rng), z = bench_rng_normal(&rng);
        ck_assert(u > 0 && u < 1);
        sum += u;
        normal += z;
        normal_sq += z * z;
    }
    ck_assert_double_eq_tol(sum / N, 0.5, 0.0046);
    ck_assert_double_eq_tol(normal / N, 0, 0.0158);
    ck_assert_double_eq_tol(normal_sq / N, 1, 0.0224);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_data");
    TCase *tc = tcase_create("data");
    tcase_add_test(tc, a_row_is_the_same_every_time_and_in_any_piece);
    tcase_add_test(tc, every_coordinate_changes_the_row);
    tcase_add_test(tc, tokens_are_those_of_shared_blocks_or_of_the_request);
    tcase_add_test(tc, token_ids_depend_on_seed_origin_and_place);
    tcase_add_test(tc, values_are_spread_as_said_and_never_0);
    tcase_add_test(tc, types_are_rounded_like_the_single_conversions);
    tcase_add_test(tc, round_keeps_what_fits_the_type);
    tcase_add_test(tc, samples_are_a_stable_fraction);
    tcase_add_test(tc, random_numbers_have_their_moments);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
