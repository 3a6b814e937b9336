// The reference against values worked out by hand.  With q, K = 0 every seen key weighs the same,
// so V[j][0] = 2^j spells out, times the number of keys seen, which ones they were.
#include "tests/check_main.h"
#include "tests/unit/attention/tiny.h"

static tiny t;
static double out[TINY_TOKENS * TINY_HEADS * TINY_DIM];
static double lse[TINY_HEADS * TINY_TOKENS];

#define CK_NEAR(a, b) ck_assert_double_eq_tol(a, b, 1e-7)

static void start(int32_t kv_len, int32_t q_len) {
    tiny_init(&t, kv_len, q_len);
    for (int32_t j = 0; j < TINY_TOKENS; j++) {
        tiny_v(&t, j)[0] = (float)(1 << j);
    }
}

static void run(void) {
    ATTND_CK_OK(attn_check(&t.params, NULL));
    ATTND_CK_OK(attn_reference(&t.params, out, lse));
}

// seen returns the keys that query row i saw, a bit each.
static uint32_t seen(int32_t i) {
    double num = isinf(lse[i]) ? 0 : round(exp(lse[i]));
    return (uint32_t)round(out[(size_t)i * TINY_DIM] * num);
}

START_TEST(one_key_gives_its_value_and_its_logit) {
    start(1, 1);
    t.q[0][0][0] = 3;
    tiny_k(&t, 0)[0] = 2;
    tiny_v(&t, 0)[5] = -7;
    t.row.scale = 0.5f;
    run();
    CK_NEAR(out[0], 1);
    CK_NEAR(out[5], -7);
    CK_NEAR(lse[0], 3);
}
END_TEST

START_TEST(weights_are_the_softmax_of_the_logits) {
    start(2, 1);
    t.q[0][0][0] = 1;
    tiny_k(&t, 1)[0] = logf(3);
    tiny_v(&t, 0)[0] = 4;
    tiny_v(&t, 1)[0] = 8;
    run();
    CK_NEAR(out[0], 0.25 * 4 + 0.75 * 8);
    CK_NEAR(lse[0], log(4));
}
END_TEST

START_TEST(scale_zero_is_one_over_the_root_of_head_dim) {
    start(1, 1);
    t.row.scale = 0;
    t.q[0][0][0] = 1;
    tiny_k(&t, 0)[0] = 1;
    run();
    CK_NEAR(lse[0], 1 / sqrt(8));
}
END_TEST

START_TEST(softcap_comes_after_scale_and_before_alibi) {
    static const float slope = 0.25f;
    start(2, 1); // the key is one behind the diagonal
    t.row.window_right = 0;
    t.row.softcap = 2;
    t.row.alibi_slopes = &slope;
    t.q[0][0][0] = 2;
    tiny_k(&t, 0)[0] = 2;
    t.row.scale = 0.5f;
    run();
    CK_NEAR(lse[0], log(exp(2 * tanh(1) - 0.25) + 1));
}
END_TEST

START_TEST(alibi_counts_from_the_diagonal_both_ways) {
    static const float slope = 1;
    start(3, 3);
    t.row.alibi_slopes = &slope;
    run();
    CK_NEAR(lse[0], log(1 + exp(-1) + exp(-2)));
    CK_NEAR(lse[1], log(exp(-1) + 1 + exp(-1)));
}
END_TEST

START_TEST(a_sink_joins_the_denominator_but_not_the_lse) {
    static const float sink = 0;
    start(1, 1);
    t.row.sinks = &sink;
    run();
    CK_NEAR(out[0], 0.5);
    CK_NEAR(lse[0], 0);
    t.row.flags = ATTN_PARTIAL;
    run();
    CK_NEAR(out[0], 1);
}
END_TEST

START_TEST(causal_is_aligned_to_the_bottom_right) {
    start(4, 2);
    t.row.flags = ATTN_CAUSAL;
    run();
    ck_assert_uint_eq(seen(0), 0x7);
    ck_assert_uint_eq(seen(1), 0xf);
}
END_TEST

START_TEST(queries_before_the_first_key_see_nothing) {
    start(1, 3);
    t.row.flags = ATTN_CAUSAL;
    run();
    ck_assert(isinf(lse[0]) && lse[0] < 0 && out[0] == 0);
    ck_assert(isinf(lse[1]) && lse[1] < 0 && out[TINY_DIM] == 0);
    ck_assert_uint_eq(seen(2), 1);
}
END_TEST

START_TEST(an_empty_sequence_gives_zero_and_minus_infinity) {
    start(0, 1);
    run();
    ck_assert(out[0] == 0 && isinf(lse[0]) && lse[0] < 0);
}
END_TEST

START_TEST(windows_include_both_ends) {
    start(6, 2); // diagonals at keys 4 and 5
    t.row.window_left = 2;
    t.row.window_right = 0;
    run();
    ck_assert_uint_eq(seen(0), 0x1c);
    ck_assert_uint_eq(seen(1), 0x38);
    t.row.window_left = INT32_MAX;
    t.row.window_right = INT32_MAX;
    run();
    ck_assert_uint_eq(seen(0), 0x3f);
}
END_TEST

START_TEST(a_tree_mask_rules_new_keys_only) {
    static const uint64_t tree[] = {0x1, 0x3, 0x5};
    start(5, 3);
    t.row.tree_mask = tree;
    run();
    ck_assert_uint_eq(seen(0), 0x3 | 0x1 << 2);
    ck_assert_uint_eq(seen(1), 0x3 | 0x3 << 2);
    ck_assert_uint_eq(seen(2), 0x3 | 0x5 << 2);
}
END_TEST

START_TEST(a_block_mask_goes_by_query_block) {
    static const uint32_t first[] = {0, 1, 3};
    static const uint32_t list[] = {1, 0, 2};
    static const attn_block_mask mask = {.start = first, .kv_blocks = list, .q_block = 2};
    start(10, 3);
    t.row.block_mask = &mask;
    run();
    ck_assert_uint_eq(seen(0), 0xf0);
    ck_assert_uint_eq(seen(1), 0xf0);
    ck_assert_uint_eq(seen(2), 0x30f);
}
END_TEST

// At position 1 an angle of 90 degrees turns (1, 0) to (0, 1), times the attention factor.
START_TEST(rope_turns_new_keys_and_queries) {
    static const float quarter = 1.57079632679f;
    static attn_rope rope = {.inv_freq = &quarter, .attention_factor = 2, .rotary_dim = 2};
    start(2, 1);
    t.row.rope = &rope;
    t.row.new_len = 1;
    t.k_new[0][0] = 1;
    t.k_new[0][2] = 9; // behind rotary_dim
    t.q[0][0][0] = 5;
    run();
    CK_NEAR((double)tiny_k(&t, 1)[0], 0);
    CK_NEAR((double)tiny_k(&t, 1)[1], 2);
    CK_NEAR((double)tiny_k(&t, 1)[2], 9);
    CK_NEAR(lse[0], log(1 + exp(20))); // (0, 10) times (0, 2)
}
END_TEST

START_TEST(rope_pairs_halves_or_neighbours) {
    static const float inv_freq[] = {1.57079632679f, 0};
    static attn_rope rope = {.inv_freq = inv_freq, .attention_factor = 1, .rotary_dim = 4};
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        start(2, 1);
        rope.interleaved = interleaved;
        t.row.rope = &rope;
        t.row.new_len = 1;
        t.k_new[0][0] = 1;
        run();
        CK_NEAR((double)tiny_k(&t, 1)[interleaved ? 1 : 2], 1);
        CK_NEAR((double)tiny_k(&t, 1)[interleaved ? 2 : 1], 0);
    }
}
END_TEST

START_TEST(explicit_positions_override) {
    static const float quarter = 1.57079632679f;
    static const attn_rope rope = {.inv_freq = &quarter, .attention_factor = 1, .rotary_dim = 2};
    static const int32_t zero = 0;
    start(2, 1);
    t.row.rope = &rope;
    t.row.new_len = 1;
    t.row.k_positions = &zero;
    t.row.q_positions = &zero;
    t.k_new[0][0] = 1;
    t.q[0][0][0] = 1;
    run();
    CK_NEAR((double)tiny_k(&t, 1)[0], 1);
    CK_NEAR(lse[0], log(1 + exp(1)));
}
END_TEST

START_TEST(new_tokens_go_to_the_end_of_the_sequence) {
    start(6, 0);
    t.row.new_len = 3;
    for (int32_t i = 0; i < 3; i++) {
        t.k_new[i][1] = (float)(10 + i);
        t.v_new[i][0] = (float)(20 + i);
    }
    run();
    for (int32_t i = 0; i < 3; i++) {
        ck_assert_float_eq(tiny_k(&t, 3 + i)[1], (float)(10 + i));
        ck_assert_float_eq(tiny_v(&t, 3 + i)[0], (float)(20 + i));
    }
    ck_assert_float_eq(tiny_v(&t, 2)[0], 4);
    ck_assert_float_eq(tiny_v(&t, 6)[0], 64);
}
END_TEST

START_TEST(query_heads_share_a_kv_head_in_groups) {
    start(1, 1);
    t.params.shape.q_heads = 4;
    t.params.shape.kv_heads = 1;
    tiny_k(&t, 0)[0] = 1;
    for (int32_t h = 0; h < 4; h++) {
        t.q[0][h][0] = (float)h;
    }
    run();
    for (int32_t h = 0; h < 4; h++) {
        CK_NEAR(lse[h], h);
    }
}
END_TEST

START_TEST(a_chunk_is_a_part_of_the_whole) {
    start(6, 4);
    t.row.flags = ATTN_CAUSAL;
    t.row.q_first = 2;
    t.row.q_count = 1;
    run();
    ck_assert_uint_eq(seen(0), 0x1f);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_reference");
    TCase *c = tcase_create("definition");
    tcase_add_test(c, one_key_gives_its_value_and_its_logit);
    tcase_add_test(c, weights_are_the_softmax_of_the_logits);
    tcase_add_test(c, scale_zero_is_one_over_the_root_of_head_dim);
    tcase_add_test(c, softcap_comes_after_scale_and_before_alibi);
    tcase_add_test(c, alibi_counts_from_the_diagonal_both_ways);
    tcase_add_test(c, a_sink_joins_the_denominator_but_not_the_lse);
    tcase_add_test(c, causal_is_aligned_to_the_bottom_right);
    tcase_add_test(c, queries_before_the_first_key_see_nothing);
    tcase_add_test(c, an_empty_sequence_gives_zero_and_minus_infinity);
    tcase_add_test(c, windows_include_both_ends);
    tcase_add_test(c, a_tree_mask_rules_new_keys_only);
    tcase_add_test(c, a_block_mask_goes_by_query_block);
    tcase_add_test(c, rope_turns_new_keys_and_queries);
    tcase_add_test(c, rope_pairs_halves_or_neighbours);
    tcase_add_test(c, explicit_positions_override);
    tcase_add_test(c, new_tokens_go_to_the_end_of_the_sequence);
    tcase_add_test(c, query_heads_share_a_kv_head_in_groups);
    tcase_add_test(c, a_chunk_is_a_part_of_the_whole);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
