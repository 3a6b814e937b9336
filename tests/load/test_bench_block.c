#include <math.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_block.h"
#include "tests/load/bench_data.h"

static attnd_errinfo info;
static bench_model model;
static bench_rope_table rope;

static void setup(void) {
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
}

static void teardown(void) {
    bench_rope_table_free(&rope);
    bench_model_fini(&model);
}

static bench_block block_of(const uint32_t *positions, uint32_t num) {
    bench_block b = {.model = &model,
                     .rope = &rope,
                     .seed = 1,
                     .prompt.request = 2,
                     .num_tokens = num,
                     .positions = positions};
    bench_block_init(&b);
    return b;
}

START_TEST(key_ranges_are_causal_and_windowed) {
    model.window = 4;
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    static const uint32_t POSITIONS[] = {9, 2, 30};
    static const uint32_t FIRST[] = {6, 0, 27}, END[] = {10, 3, 31};
    bench_block b = block_of(POSITIONS, 3);
    for (uint32_t t = 0; t < 3; t++) {
        uint32_t first, end;
        bench_block_seen(&b, t, &first, &end);
        ck_assert_uint_eq(first, FIRST[t]);
        ck_assert_uint_eq(end, END[t]);
    }
    ck_assert_uint_eq(b.first_key, 0);
    ck_assert_uint_eq(b.end_key, 31);
    b = block_of(POSITIONS, 1);
    ck_assert_uint_eq(b.first_key, 6);
}
END_TEST

START_TEST(keys_come_in_the_order_asked_for) {
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    static const uint32_t POSITION = 9;
    bench_block b = block_of(&POSITION, 1);
    float up[10 * 32], down[10 * 32], sent[64];
    bench_block_k(&b, 1, 0, 1, 10, up);
    bench_block_k(&b, 1, 9, -1, 10, down);
    for (uint32_t j = 0; j < 10; j++) {
        ck_assert_mem_eq(up + j * 32, down + (9 - j) * 32, 32 * sizeof(float));
        bench_fill(sent, ATTND_F32, BENCH_K, bench_row_key(1, 2, 0, BENCH_K, j), 0, 64);
        ck_assert_mem_eq(up + j * 32, sent + 32, 32 * sizeof(float)); // KV head 1
    }
    bench_block_v(&b, 0, 5, -1, 1, up);
    bench_fill(sent, ATTND_F32, BENCH_V, bench_row_key(1, 2, 0, BENCH_V, 5), 0, 64);
    ck_assert_mem_eq(up, sent, 32 * sizeof(float));
}
END_TEST

START_TEST(rotation_turns_pairs_by_position_times_frequency) {
    model.rope_theta = 100;
    model.rotary_dim = 4; // frequencies 1 and 0.1
    model.rope_interleaved = _i == 1;
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    static const uint32_t POSITION = 7;
    bench_block b = block_of(&POSITION, 1);
    double q[2 * 32];
    float plain[2 * 32], k[32], k_plain[32], sent[4 * 32];
    bench_block_q(&b, 0, q);
    bench_block_q_plain(&b, 0, plain);
    bench_fill(sent, ATTND_F32, BENCH_Q, bench_row_key(1, 2, 0, BENCH_Q, 7), 0, 128);
    for (uint32_t p = 0; p < 2; p++) {
        double angle = 7 * (p == 0 ? 1.0 : (double)0.1f);
        uint32_t i = _i == 1 ? 2 * p : p, j = _i == 1 ? 2 * p + 1 : p + 2;
        double x = (double)sent[i], y = (double)sent[j];
        ck_assert_double_eq_tol(q[i], x * cos(angle) - y * sin(angle), 1e-14);
        ck_assert_double_eq_tol(q[j], y * cos(angle) + x * sin(angle), 1e-14);
    }
    for (uint32_t i = 0; i < 64; i++) {
        ck_assert_double_eq_tol((double)plain[i], q[i], 1e-6);
        ck_assert(i % 32 < 4 || q[i] == (double)sent[i]); // dims behind rotary_dim stay
    }
    bench_block_k(&b, 0, 7, 1, 1, k);
    bench_block_k_plain(&b, 0, 7, 1, 1, k_plain);
    for (uint32_t i = 0; i < 32; i++) {
        ck_assert_float_eq_tol(k[i], k_plain[i], 1e-6f);
    }
}
END_TEST

START_TEST(a_table_changes_no_number) {
    model.rope_theta = 10000;
    model.dtype = ATTND_BF16;
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    static const uint32_t POSITION = 50;
    bench_block b = block_of(&POSITION, 1);
    float without[51 * 32], with[51 * 32];
    bench_block_k(&b, 0, 0, 1, 51, without);
    ATTND_CK_OK(bench_rope_table_grow(&rope, &model, 3));
    ATTND_CK_OK(bench_rope_table_grow(&rope, &model, 20));
    ck_assert_uint_ge(rope.num_positions, 20);
    bench_block_k(&b, 0, 0, 1, 51, with);
    ck_assert_mem_eq(with, without, sizeof(with));
    ATTND_CK_OK(bench_rope_table_grow(&rope, &model, 1 << 24));
    ck_assert_uint_eq(rope.num_positions, BENCH_ROPE_POSITIONS);
}
END_TEST

START_TEST(the_cache_type_is_rounded_to_once) {
    model.dtype = ATTND_BF16;
    model.kv_dtype = ATTND_F8E4M3;
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    static const uint32_t POSITION = 3;
    bench_block b = block_of(&POSITION, 1);
    float k[32];
    uint16_t sent[64];
    bench_block_k(&b, 0, 3, 1, 1, k);
    bench_fill(sent, ATTND_BF16, BENCH_K, bench_row_key(1, 2, 0, BENCH_K, 3), 0, 64);
    for (uint32_t i = 0; i < 32; i++) {
        ck_assert_float_eq(k[i],
                           attnd_f8e4m3_to_f32(attnd_f32_to_f8e4m3(attnd_bf16_to_f32(sent[i]))));
    }
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_block");
    TCase *tc = tcase_create("rows and keys");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, key_ranges_are_causal_and_windowed);
    tcase_add_test(tc, keys_come_in_the_order_asked_for);
    tcase_add_loop_test(tc, rotation_turns_pairs_by_position_times_frequency, 0, 2);
    tcase_add_test(tc, a_table_changes_no_number);
    tcase_add_test(tc, the_cache_type_is_rounded_to_once);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
