// Merging of states, with weights worked out by hand.
#include <math.h>

#include "attention/attn.h"
#include "tests/check_main.h"

enum { DIM = 8 };

static float states[3][DIM], lses[3], out[DIM], lse;

static void merge(int32_t num, const float *sinks) {
    const void *state_list[] = {states[0], states[1], states[2]};
    const float *lse_list[] = {&lses[0], &lses[1], &lses[2]};
    attn_merge_states(&(attn_merge_params){.out = out,
                                           .lse = &lse,
                                           .states = state_list,
                                           .state_lses = lse_list,
                                           .sinks = sinks,
                                           .tokens = 1,
                                           .num_states = num,
                                           .q_heads = 1,
                                           .v_head_dim = DIM,
                                           .dtype = ATTND_F32});
}

static void set(int32_t s, float value, float l) {
    states[s][0] = value;
    lses[s] = l;
}

START_TEST(states_weigh_by_the_exponential_of_their_lse) {
    set(0, 4, logf(1));
    set(1, 8, logf(3));
    merge(2, NULL);
    ck_assert_float_eq_tol(out[0], 7, 1e-6f);
    ck_assert_float_eq_tol(lse, logf(4), 1e-6f);
}
END_TEST

START_TEST(an_empty_state_is_the_identity) {
    set(0, 5, 2);
    set(1, NAN, -INFINITY); // its out is not read
    merge(2, NULL);
    ck_assert_float_eq(out[0], 5);
    ck_assert_float_eq(lse, 2);
}
END_TEST

START_TEST(two_empty_states_give_an_empty_one) {
    static const float sink = 3;
    set(0, 0, -INFINITY);
    set(1, 0, -INFINITY);
    merge(2, &sink);
    ck_assert_float_eq(out[0], 0);
    ck_assert(isinf(lse) && lse < 0);
}
END_TEST

START_TEST(no_state_gives_an_empty_one) {
    merge(0, NULL);
    ck_assert_float_eq(out[0], 0);
    ck_assert(isinf(lse) && lse < 0);
}
END_TEST

START_TEST(the_sink_counts_once_and_not_in_the_lse) {
    static const float sink = 0;
    set(0, 6, 0);
    set(1, 6, 0);
    merge(2, &sink);
    ck_assert_float_eq_tol(out[0], 4, 1e-6f); // 2 * 6 / (2 + 1)
    ck_assert_float_eq_tol(lse, logf(2), 1e-6f);
}
END_TEST

START_TEST(large_lses_do_not_overflow) {
    set(0, 2, 1e5f);
    set(1, 4, 1e5f);
    set(2, 100, -1e5f);
    merge(3, NULL);
    ck_assert_float_eq_tol(out[0], 3, 1e-6f);
    ck_assert_float_eq_tol(lse, 1e5f + logf(2), 0.01f);
}
END_TEST

START_TEST(a_nan_stays_a_nan) {
    set(0, 2, NAN);
    set(1, 4, 1);
    merge(2, NULL);
    ck_assert(isnan(out[0]) && isnan(lse));
}
END_TEST

START_TEST(tokens_and_heads_lie_as_the_header_says) {
    // [tokens 2, q_heads 2, v_head_dim 8] and [q_heads 2, tokens 2]
    float a[2][2][DIM] = {{{1}, {2}}, {{3}, {4}}};
    float b[2][2][DIM] = {{{10}, {20}}, {{30}, {40}}};
    float a_lse[2][2] = {{0, 0}, {0, -INFINITY}};         // head 1, token 1 is empty in a
    float b_lse[2][2] = {{-INFINITY, 0}, {-INFINITY, 0}}; // token 0 is empty in b
    float merged[2][2][DIM];
    const void *state_list[] = {a, b};
    const float *lse_list[] = {a_lse[0], b_lse[0]};
    attn_merge_states(&(attn_merge_params){.out = merged,
                                           .states = state_list,
                                           .state_lses = lse_list,
                                           .tokens = 2,
                                           .num_states = 2,
                                           .q_heads = 2,
                                           .v_head_dim = DIM,
                                           .dtype = ATTND_F32});
    ck_assert_float_eq(merged[0][0][0], 1);
    ck_assert_float_eq(merged[0][1][0], 2);
    ck_assert_float_eq(merged[1][0][0], 16.5f);
    ck_assert_float_eq(merged[1][1][0], 40);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_merge");
    TCase *c = tcase_create("merge");
    tcase_add_test(c, states_weigh_by_the_exponential_of_their_lse);
    tcase_add_test(c, an_empty_state_is_the_identity);
    tcase_add_test(c, two_empty_states_give_an_empty_one);
    tcase_add_test(c, no_state_gives_an_empty_one);
    tcase_add_test(c, the_sink_counts_once_and_not_in_the_lse);
    tcase_add_test(c, large_lses_do_not_overflow);
    tcase_add_test(c, a_nan_stays_a_nan);
    tcase_add_test(c, tokens_and_heads_lie_as_the_header_says);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
