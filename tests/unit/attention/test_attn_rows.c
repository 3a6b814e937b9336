// Rows of a step: whose they are, and where a launch finds them.
#include "attention/attn_rows.h"
#include "tests/check_main.h"

static const attn_shape shape = {.q_dtype = ATTND_BF16, .q_heads = 4, .v_head_dim = 24};

START_TEST(sequences_lie_behind_each_other_and_cached_tokens_have_no_rows) {
    static const int32_t positions[5] = {0, 1, 2, 3, 4};
    attn_seq s[3] = {{.positions = positions}, {.rows = 3}, {.rows = 0}};
    uint32_t rows = 0, new_rows = 0;
    attn_seq_place(&s[0], 10, 5, 2, &rows, &new_rows); // 5 new tokens, 2 of them cached
    attn_seq_place(&s[1], 7, 0, 0, &rows, &new_rows);  // read only
    attn_seq_place(&s[2], 0, 4, 0, &rows, &new_rows);
    ck_assert_uint_eq(s[0].rows, 3);
    ck_assert_uint_eq(s[0].new_rows, 3);
    ck_assert_ptr_eq(s[0].positions, positions + 2);
    ck_assert_int_eq(s[0].kv_len, 15);
    ck_assert_uint_eq(s[1].row_start, 3);
    ck_assert_uint_eq(s[1].new_rows, 0);
    ck_assert_int_eq(s[1].kv_len, 7);
    ck_assert_uint_eq(s[2].row_start, 6);
    ck_assert_uint_eq(s[2].new_start, 3);
    ck_assert_uint_eq(rows, 10);
    ck_assert_uint_eq(new_rows, 7);
}
END_TEST

START_TEST(a_row_points_at_its_sequences_part_of_the_tensors) {
    static uint16_t q[1000], k[1000], v[1000], out[1000];
    static float lse[40];
    attn_seq s = {.rows = 2, .new_rows = 2, .row_start = 3, .new_start = 1, .kv_len = 9};
    attn_tensors t = {q, k, v, out, lse, 8, {64, 16}, {32, 16}, {48, 24}};
    attn_row row = {.q_len = 0};
    attn_seq_fill(&s, &shape, &t, &row);
    ck_assert_ptr_eq(row.q, q + 3 * 64);
    ck_assert_ptr_eq(row.out, out + 3 * 4 * 24);
    ck_assert_ptr_eq(row.lse, lse + 3);
    ck_assert_int_eq(row.stride_lse_head, 8);
    ck_assert_ptr_eq(row.k_new, k + 32);
    ck_assert_ptr_eq(row.v_new, v + 48);
    ck_assert_int_eq(row.q_len, 2);
    ck_assert_int_eq(row.new_len, 2);
    row = (attn_row){.q_len = 0};
    t.k = t.v = NULL; // a layer that reads another's
    t.lse = NULL;
    attn_seq_fill(&s, &shape, &t, &row);
    ck_assert_int_eq(row.new_len, 0);
    ck_assert_ptr_null(row.k_new);
    ck_assert_ptr_null(row.lse);
}
END_TEST

START_TEST(a_block_mask_is_cut_where_sequences_end) {
    static const attn_seq seqs[4] = {{.rows = 20}, {.rows = 0}, {.rows = 1}, {.rows = 9}};
    static const uint32_t start[6] = {0, 2, 2, 3, 5, 6}, blocks[6] = {0, 1, 0, 0, 1, 0};
    attn_block_mask m[4];
    attnd_errinfo info;
    ATTND_CK_OK(attn_mask_cut(seqs, 4, 8, 6, (uint32_t[7]){0, 0, 0, 0, 0, 0, 0}, blocks, m, &info));
    ck_assert_int_eq(m[0].q_block, 8); // 3 + 0 + 1 + 2 query blocks
    ATTND_CK_OK(attn_mask_cut(seqs, 4, 9, 5, start, blocks, m, &info)); // 3 + 0 + 1 + 1
    ck_assert_ptr_eq(m[0].start, start);
    ck_assert_ptr_eq(m[2].start, start + 3);
    ck_assert_ptr_eq(m[3].start, start + 4);
    ck_assert_ptr_eq(m[3].kv_blocks, blocks);
    ck_assert_int_eq(m[2].q_block, 1); // no larger than its rows
    ck_assert_int_eq(m[3].q_block, 9);
    ATTND_CK_OK(attn_mask_cut(seqs, 4, UINT32_MAX, 3, start, blocks, m, &info));
    ck_assert_int_eq(m[0].q_block, 20);
    ATTND_CK_ERR(attn_mask_cut(seqs, 4, 9, 4, start, blocks, m, &info), ATTND_EINVAL);
    ATTND_CK_ERR(attn_mask_cut(seqs, 4, 10, 5, start, blocks, m, &info), ATTND_EINVAL);
    ATTND_CK_ERR(attn_mask_cut(seqs, 4, 0, 5, start, blocks, m, &info), ATTND_EINVAL);
    ATTND_CK_ERR(attn_mask_cut(seqs, 4, 9, 5, NULL, blocks, m, &info), ATTND_EINVAL);
    static const uint32_t down[6] = {0, 2, 2, 3, 2, 6};
    ATTND_CK_ERR(attn_mask_cut(seqs, 4, 9, 5, down, blocks, m, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "block_mask");
    ATTND_CK_OK(attn_mask_cut(seqs + 1, 1, 4, 0, start, blocks, m, &info)); // no rows, no blocks
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_rows");
    TCase *tc = tcase_create("attn_rows");
    tcase_add_test(tc, sequences_lie_behind_each_other_and_cached_tokens_have_no_rows);
    tcase_add_test(tc, a_row_points_at_its_sequences_part_of_the_tensors);
    tcase_add_test(tc, a_block_mask_is_cut_where_sequences_end);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
