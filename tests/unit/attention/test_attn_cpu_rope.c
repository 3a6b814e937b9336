// Angles against libm in float64, rotation and the reading of Q by hand.
#include <math.h>
#include <string.h>

#include "attention/cpu/attn_cpu_task.h"
#include "tests/check_main.h"
#include "tests/unit/attention/tiny.h"

START_TEST(angles_are_good_at_every_position) {
    static const int32_t positions[] = {0,      1,       2,         7,          -3,         1000,
                                        131071, 1048575, 536870912, 2147483647, -2147483647};
    float inv_freq[128];
    for (int32_t i = 0; i < 128; i++) {
        inv_freq[i] = (float)pow(10000, -i / 128.0);
    }
    attn_rope rope = {.inv_freq = inv_freq, .attention_factor = 1.5f, .rotary_dim = 256};
    double cos_sin[256];
    for (size_t n = 0; n < sizeof(positions) / sizeof(positions[0]); n++) {
        attn_cpu_rope_angles(&rope, positions[n], cos_sin);
        double tolerance = positions[n] > 1 << 24 || positions[n] < -(1 << 24) ? 1e-6 : 1e-10;
        for (int32_t i = 0; i < 128; i++) {
            double angle = (double)positions[n] * (double)inv_freq[i];
            ck_assert_double_eq_tol(cos_sin[i], 1.5 * cos(angle), tolerance);
            ck_assert_double_eq_tol(cos_sin[128 + i], 1.5 * sin(angle), tolerance);
        }
    }
}
END_TEST

START_TEST(position_zero_turns_nothing) {
    static const float inv_freq[4] = {1, 0.5f, 0.25f, 0.125f};
    static const attn_rope rope = {.inv_freq = inv_freq, .attention_factor = 1, .rotary_dim = 8};
    double cos_sin[8];
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    float before[8];
    memcpy(before, x, sizeof(x));
    attn_cpu_rope_angles(&rope, 0, cos_sin);
    attn_cpu_rope_apply(&rope, cos_sin, x);
    ck_assert_mem_eq(x, before, sizeof(x));
}
END_TEST

START_TEST(pairs_are_halves_or_neighbours) {
    static const double cos_sin[4] = {0, 1, 1, 0}; // pair 0 by 90 degrees, pair 1 not at all
    attn_rope rope = {.attention_factor = 1, .rotary_dim = 4};
    float halves[5] = {1, 2, 3, 4, 5};
    attn_cpu_rope_apply(&rope, cos_sin, halves);
    const float want_halves[5] = {-3, 2, 1, 4, 5};
    ck_assert_mem_eq(halves, want_halves, sizeof(halves));
    rope.interleaved = true;
    float neighbours[5] = {1, 2, 3, 4, 5};
    attn_cpu_rope_apply(&rope, cos_sin, neighbours);
    const float want_neighbours[5] = {-2, 1, 3, 4, 5};
    ck_assert_mem_eq(neighbours, want_neighbours, sizeof(neighbours));
}
END_TEST

// Rows are [heads of the task, query rows]; row r is token r / group, head h * group + r % group.
START_TEST(load_q_folds_the_heads_of_a_group_into_rows) {
    static tiny t;
    static float q[8][TINY_DIM];
    tiny_init(&t, 8, 3);
    t.params.shape.q_heads = 4;
    t.params.shape.kv_heads = 2;
    for (int32_t token = 0; token < 3; token++) {
        for (int32_t h = 0; h < 4; h++) {
            t.q[token][h][0] = (float)(10 * token + h);
        }
    }
    attn_task task = {.head_first = 0, .head_count = 2, .q_first = 1, .q_count = 4};
    attn_cpu_load_q(&t.params, &task, q[0]);
    const float want[8] = {1, 10, 11, 20, 3, 12, 13, 22};
    for (int i = 0; i < 8; i++) {
        ck_assert_float_eq(q[i][0], want[i]);
    }
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_cpu_rope");
    TCase *c = tcase_create("rope");
    tcase_add_test(c, angles_are_good_at_every_position);
    tcase_add_test(c, position_zero_turns_nothing);
    tcase_add_test(c, pairs_are_halves_or_neighbours);
    tcase_add_test(c, load_q_folds_the_heads_of_a_group_into_rows);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
