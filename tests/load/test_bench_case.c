#include "tests/load/bench_case.h"

#include "tests/check_main.h"

static bench_case parse(const char *text) {
    bench_case c;
    attnd_errinfo info = {0};
    attnd_err err = bench_case_parse(&c, text, &info);
    ck_assert_msg(err == ATTND_OK, "%s: %s", text, info.text);
    return c;
}

START_TEST(a_case_is_read_with_defaults) {
    bench_case c = parse("decode bf16 32/8 kv_len 32768");
    ck_assert_int_eq(c.kind, BENCH_DECODE);
    ck_assert_int_eq(c.q_dtype, ATTND_BF16);
    ck_assert_int_eq(c.kv_dtype, ATTND_BF16);
    ck_assert_int_eq(c.q_heads, 32);
    ck_assert_int_eq(c.kv_heads, 8);
    ck_assert_int_eq(c.head_dim, 128);
    ck_assert_int_eq(c.block_tokens, 64);
    ck_assert_int_eq(c.batch, 1);
    ck_assert_int_eq(c.q_len, 1);
    ck_assert_int_eq(c.kv_len, 32768);
}
END_TEST

START_TEST(every_key_is_read) {
    bench_case c =
        parse("prefill f8e4m3 8/2 kv_len 900 q_len 30 block 16 head_dim 64 batch 3 new 20 fused 1");
    ck_assert_int_eq(c.kind, BENCH_PREFILL);
    ck_assert_int_eq(c.q_dtype, ATTND_BF16);
    ck_assert_int_eq(c.kv_dtype, ATTND_F8E4M3);
    ck_assert_int_eq(c.head_dim, 64);
    ck_assert_int_eq(c.block_tokens, 16);
    ck_assert_int_eq(c.batch, 3);
    ck_assert_int_eq(c.q_len, 30);
    ck_assert_int_eq(c.new_len, 20);
    ck_assert_int_eq(c.kv_len, 900);
    ck_assert_int_eq(c.fused, 1);
}
END_TEST

// Each name is written as it is read.
static const char *const names[] = {
    "decode bf16 32/8 kv_len 32768",
    "decode f32 8/8 head_dim 64 block 16 batch 2 q_len 4 kv_len 100",
    "ragged f16 32/8 batch 128 kv_len 131072",
    "prefill f32 32/8 q_len 512",
    "prefill f32 32/8 q_len 512 kv_len 4096",
    "full bf16 16/16 block 512 batch 32 q_len 512",
    "decode bf16 32/8 batch 8 kv_len 4096 new 1",
    "prefill bf16 32/8 q_len 512 new 512 fused 1",
};

START_TEST(a_name_is_read_as_it_is_written) {
    char name[BENCH_CASE_BYTES];
    bench_case c = parse(names[_i]);
    bench_case_name(&c, name);
    ck_assert_str_eq(name, names[_i]);
}
END_TEST

static const struct {
    const char *text, *field;
    attnd_err err;
} wrong[] = {
    {"", "kind", ATTND_EINVAL},
    {"decod bf16 32/8 kv_len 1", "kind", ATTND_EINVAL},
    {"decode", "dtype", ATTND_EINVAL},
    {"decode bf17 32/8 kv_len 1", "dtype", ATTND_EINVAL},
    {"decode bf16 32 kv_len 1", "heads", ATTND_EINVAL},
    {"decode bf16 32/5 kv_len 1", "heads", ATTND_EINVAL},
    {"decode bf16 8/16 kv_len 1", "kv_heads", ATTND_EINVAL},
    {"decode bf16 32/8", "kv_len", ATTND_EINVAL},
    {"decode bf16 32/8 kv_len", "kv_len", ATTND_EINVAL},
    {"decode bf16 32/8 kv_len 0", "kv_len", ATTND_EINVAL},
    {"decode bf16 32/8 kv_len 12x", "kv_len", ATTND_EINVAL},
    {"decode bf16 32/8 kv_len 1 kv_len 2", "kv_len", ATTND_EINVAL},
    {"decode bf16 32/8 length 12", "case", ATTND_EINVAL},
    {"decode bf16 32/8 q_len 4 kv_len 3", "kv_len", ATTND_EINVAL},
    {"ragged bf16 32/8 batch 128 kv_len 127", "kv_len", ATTND_EINVAL},
    {"ragged bf16 32/8 batch 4096 q_len 524288 kv_len 16777216", "kv_len", ATTND_EINVAL}, // of 2^31
    {"prefill bf16 32/8 kv_len 100", "q_len", ATTND_EINVAL},
    {"full bf16 32/8 kv_len 100", "q_len", ATTND_EINVAL},
    {"decode bf16 32/8 kv_len 100 new 2", "new", ATTND_EINVAL},
    {"decode bf16 32/8 head_dim 100 kv_len 3", "head_dim", ATTND_ENOTSUP},
};
enum { NUM_WRONG = sizeof(wrong) / sizeof(wrong[0]) };

START_TEST(a_wrong_case_is_refused_by_name) {
    bench_case c;
    attnd_errinfo info = {0};
    ATTND_CK_ERR(bench_case_parse(&c, wrong[_i].text, &info), wrong[_i].err);
    ck_assert_str_eq(info.field, wrong[_i].field);
}
END_TEST

START_TEST(a_pattern_means_names) {
    const char *name = "decode bf16 32/8 kv_len 4096";
    ck_assert(bench_case_matches(name, NULL));
    ck_assert(bench_case_matches(name, "bf16"));
    ck_assert(bench_case_matches(name, "32/8 kv_len 4"));
    ck_assert(!bench_case_matches(name, "prefill"));
    ck_assert(bench_case_matches(name, "decode * kv_len 4096"));
    ck_assert(!bench_case_matches(name, "decode * kv_len 409"));
    ck_assert(!bench_case_matches(name, "*f32*"));
}
END_TEST

START_TEST(ragged_lengths_add_up) {
    bench_case c = parse("ragged bf16 32/8 batch 128 kv_len 131072");
    int32_t lengths[128], again[128];
    int64_t sum = 0;
    int32_t shortest = INT32_MAX, longest = 0;
    bench_case_lengths(&c, lengths);
    bench_case_lengths(&c, again);
    ck_assert_mem_eq(lengths, again, sizeof(lengths));
    for (int i = 0; i < 128; i++) {
        sum += lengths[i];
        shortest = lengths[i] < shortest ? lengths[i] : shortest;
        longest = lengths[i] > longest ? lengths[i] : longest;
    }
    ck_assert_int_eq(sum, 131072);
    ck_assert_int_ge(shortest, 1);
    ck_assert_int_lt(shortest, 200); // a mean of 1024, a deviation of 1 of the logarithm
    ck_assert_int_gt(longest, 4000);
}
END_TEST

START_TEST(ragged_lengths_follow_weights) {
    bench_case c = parse("ragged bf16 32/8 batch 4 kv_len 1004");
    static const double weights[] = {1, 2, 3, 4};
    int32_t lengths[4];
    c.weights = weights;
    bench_case_lengths(&c, lengths); // one token each, and 1000 in proportion
    ck_assert_int_eq(lengths[0], 101);
    ck_assert_int_eq(lengths[1], 201);
    ck_assert_int_eq(lengths[2], 301);
    ck_assert_int_eq(lengths[3], 401);
}
END_TEST

START_TEST(uniform_lengths_are_the_case_s) {
    bench_case c = parse("decode bf16 32/8 batch 3 kv_len 77");
    int32_t lengths[3];
    bench_case_lengths(&c, lengths);
    ck_assert_int_eq(lengths[0], 77);
    ck_assert_int_eq(lengths[2], 77);
}
END_TEST

START_TEST(bytes_and_operations_are_those_of_the_definition) {
    // K and V: 2 * 4096 keys * 8 heads * 128 * 2 bytes; 2 products * 2 * 32 heads * 128 a key.
    bench_case c = parse("decode bf16 32/8 kv_len 4096");
    ck_assert_uint_eq(bench_case_kv_bytes(&c), 16777216);
    ck_assert_double_eq(bench_case_flops(&c), 67108864.0);
    // 3 tokens behind 2 cached ones see 3 + 4 + 5 keys.
    c = parse("prefill f32 1/1 head_dim 8 q_len 3 kv_len 5");
    ck_assert_double_eq(bench_case_flops(&c), 4.0 * 12 * 8);
    ck_assert_uint_eq(bench_case_kv_bytes(&c), 5 * 2 * 8 * 4);
    // All 3 see all 5.
    c = parse("full f32 1/1 head_dim 8 q_len 3 kv_len 5");
    ck_assert_double_eq(bench_case_flops(&c), 4.0 * 15 * 8);
    // Two sequences of 5 keys, one token each.
    c = parse("ragged f8e4m3 2/1 head_dim 8 batch 2 kv_len 10");
    ck_assert_double_eq(bench_case_flops(&c), 4.0 * 10 * 2 * 8);
    ck_assert_uint_eq(bench_case_kv_bytes(&c), 10 * 2 * 8);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_case");
    TCase *c = tcase_create("case");
    tcase_add_test(c, a_case_is_read_with_defaults);
    tcase_add_test(c, every_key_is_read);
    tcase_add_loop_test(c, a_name_is_read_as_it_is_written, 0, 8);
    tcase_add_loop_test(c, a_wrong_case_is_refused_by_name, 0, NUM_WRONG);
    tcase_add_test(c, a_pattern_means_names);
    tcase_add_test(c, ragged_lengths_add_up);
    tcase_add_test(c, ragged_lengths_follow_weights);
    tcase_add_test(c, uniform_lengths_are_the_case_s);
    tcase_add_test(c, bytes_and_operations_are_those_of_the_definition);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
