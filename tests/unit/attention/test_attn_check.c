// Every refusal of attn_check, by field; and that what it must accept passes.
#include "tests/check_main.h"
#include "tests/unit/attention/tiny.h"

static tiny t;

static void refuse(attnd_err code, const char *field, const char *what) {
    attnd_errinfo info = {0};
    attnd_err err = attn_check(&t.params, &info);
    ck_assert_msg(err == code && info.code == code && strcmp(info.field, field) == 0,
                  "%s: %s of '%s' (%s), want %s of '%s'", what, attnd_errname(err), info.field,
                  info.text, attnd_errname(code), field);
    ck_assert(info.text[0] != 0);
    ATTND_CK_ERR(attn_check(&t.params, NULL), code); // info may be NULL
}

// REFUSE sets one thing in a good launch and expects it to be refused.
#define REFUSE(what, code, field)   \
    do {                            \
        tiny_init(&t, 10, 2);       \
        t.row.new_len = 1;          \
        what;                       \
        refuse(code, field, #what); \
    } while (0)

START_TEST(a_good_launch_passes) {
    tiny_init(&t, 10, 2);
    ATTND_CK_OK(attn_check(&t.params, NULL));
    tiny_init(&t, 0, 0);
    t.row.q = t.row.k_new = t.row.v_new = NULL;
    t.row.out = NULL;
    t.row.lse = NULL;
    t.row.table = NULL;
    ATTND_CK_OK(attn_check(&t.params, NULL));
    t.params.num_rows = 0;
    t.params.rows = NULL;
    t.params.pool = NULL;
    t.params.pool_bytes = 0;
    ATTND_CK_OK(attn_check(&t.params, NULL));
}
END_TEST

START_TEST(more_queries_than_keys_pass) {
    tiny_init(&t, 3, 12);
    ATTND_CK_OK(attn_check(&t.params, NULL));
}
END_TEST

START_TEST(types_are_checked) {
    attn_shape *s = &t.params.shape;
    REFUSE(s->q_dtype = (attnd_dtype)7, ATTND_EINVAL, "q_dtype");
    REFUSE(s->kv_dtype = (attnd_dtype)7, ATTND_EINVAL, "kv_dtype");
    REFUSE(s->q_dtype = s->kv_dtype = ATTND_F8E4M3, ATTND_ENOTSUP, "q_dtype");
    REFUSE(s->kv_dtype = ATTND_F8E4M3, ATTND_ENOTSUP, "kv_dtype");
    REFUSE(s->kv_dtype = ATTND_BF16, ATTND_ENOTSUP, "kv_dtype");
    REFUSE((s->q_dtype = ATTND_F16, s->kv_dtype = ATTND_BF16), ATTND_ENOTSUP, "kv_dtype");
}
END_TEST

START_TEST(heads_and_dims_are_checked) {
    attn_shape *s = &t.params.shape;
    REFUSE(s->kv_heads = 0, ATTND_EINVAL, "kv_heads");
    REFUSE(s->q_heads = 0, ATTND_EINVAL, "q_heads");
    REFUSE((s->q_heads = 3, s->kv_heads = 2), ATTND_EINVAL, "q_heads");
    REFUSE(s->q_heads = 1025, ATTND_ENOTSUP, "q_heads");
    REFUSE(s->head_dim = 0, ATTND_EINVAL, "head_dim");
    REFUSE(s->head_dim = -8, ATTND_EINVAL, "head_dim");
    REFUSE(s->head_dim = 12, ATTND_ENOTSUP, "head_dim");
    REFUSE(s->head_dim = 264, ATTND_ENOTSUP, "head_dim");
    REFUSE(s->v_head_dim = 4, ATTND_ENOTSUP, "v_head_dim");
    REFUSE(s->v_head_dim = INT32_MAX, ATTND_ENOTSUP, "v_head_dim");
}
END_TEST

START_TEST(blocks_are_checked) {
    attn_shape *s = &t.params.shape;
    REFUSE(s->block_tokens = 0, ATTND_EINVAL, "block_tokens");
    REFUSE(s->block_tokens = INT32_MAX, ATTND_EINVAL, "block_tokens");
    REFUSE(s->stride_k_token = 7, ATTND_EINVAL, "stride_k");
    REFUSE(s->stride_k_token = -8, ATTND_EINVAL, "stride_k");
    REFUSE(s->stride_v_token = INT64_MAX, ATTND_EINVAL, "stride_v");
    REFUSE(s->stride_v_token = 0, ATTND_EINVAL, "stride_v");
    REFUSE(s->block_stride = 257, ATTND_EINVAL, "block_stride");
    REFUSE((s->kv_heads = s->q_heads = 2, s->stride_k_head = 8), ATTND_EINVAL, "stride_k");
}
END_TEST

START_TEST(token_major_blocks_pass) {
    tiny_init(&t, 7, 1);
    attn_shape *s = &t.params.shape;
    s->q_heads = s->kv_heads = 2;
    s->block_tokens = 2;
    s->stride_k_token = s->stride_v_token = 16;
    s->stride_k_head = s->stride_v_head = 8;
    ATTND_CK_OK(attn_check(&t.params, NULL));
}
END_TEST

START_TEST(a_block_may_be_larger_than_the_unit_of_table_entries) {
    tiny_init(&t, 8, 1);
    t.params.shape.block_stride /= 4;
    t.params.num_blocks *= 4;
    t.table[0] = 8;
    ATTND_CK_OK(attn_check(&t.params, NULL));
}
END_TEST

START_TEST(lengths_are_checked) {
    attn_row *r = &t.row;
    REFUSE(r->kv_len = -1, ATTND_EINVAL, "kv_len");
    REFUSE(r->kv_len = ATTN_MAX_TOKENS + 1, ATTND_EINVAL, "kv_len");
    REFUSE(r->q_len = -1, ATTND_EINVAL, "q_len");
    REFUSE((t.params.shape.q_heads = 4, r->q_len = ATTN_MAX_TOKENS / 2), ATTND_EINVAL, "q_len");
    REFUSE(r->new_len = -1, ATTND_EINVAL, "new_len");
    REFUSE(r->new_len = 11, ATTND_EINVAL, "new_len");
    REFUSE(r->q_first = -1, ATTND_EINVAL, "q_first");
    REFUSE(r->q_first = 3, ATTND_EINVAL, "q_first");
    REFUSE(r->q_first = 1, ATTND_EINVAL, "q_count");
    REFUSE(r->q_count = INT32_MAX, ATTND_EINVAL, "q_count");
    REFUSE(r->q_count = -1, ATTND_EINVAL, "q_count");
}
END_TEST

START_TEST(what_shapes_logits_is_checked) {
    attn_row *r = &t.row;
    REFUSE(r->flags = 1u << 2, ATTND_EINVAL, "flags");
    REFUSE(r->scale = NAN, ATTND_EINVAL, "scale");
    REFUSE(r->scale = INFINITY, ATTND_EINVAL, "scale");
    REFUSE(r->softcap = -1, ATTND_EINVAL, "softcap");
    REFUSE(r->softcap = NAN, ATTND_EINVAL, "softcap");
    REFUSE(r->window_left = -2, ATTND_EINVAL, "window_left");
    REFUSE(r->window_right = INT32_MIN, ATTND_EINVAL, "window_right");
}
END_TEST

START_TEST(tensors_are_checked) {
    attn_row *r = &t.row;
    REFUSE(r->q = NULL, ATTND_EINVAL, "q");
    REFUSE(r->q = (char *)t.q + 1, ATTND_EINVAL, "q");
    REFUSE(r->stride_q_token = INT64_MAX, ATTND_EINVAL, "q");
    REFUSE(r->out = NULL, ATTND_EINVAL, "out");
    REFUSE(r->stride_out_token = 0, ATTND_EINVAL, "out");
    REFUSE(r->stride_out_token = -32, ATTND_EINVAL, "out");
    REFUSE(r->lse = (float *)((char *)t.lse + 2), ATTND_EINVAL, "lse");
    REFUSE((t.params.shape.q_heads = 2, r->stride_lse_head = 1), ATTND_EINVAL, "stride_lse_head");
    REFUSE(r->k_new = NULL, ATTND_EINVAL, "k_new");
    REFUSE(r->v_new = NULL, ATTND_EINVAL, "v_new");
    REFUSE(r->stride_v_new_token = -1, ATTND_EINVAL, "v_new"); // of one token, but still no stride
}
END_TEST

START_TEST(table_entries_in_the_live_range_are_checked) {
    REFUSE(t.row.table = NULL, ATTND_EINVAL, "table");
    REFUSE(t.table[2] = TINY_BLOCKS, ATTND_EINVAL, "table");
    REFUSE(t.table[0] = UINT32_MAX, ATTND_EINVAL, "table");
    tiny_init(&t, 8, 1);
    t.table[2] = UINT32_MAX; // behind kv_len
    ATTND_CK_OK(attn_check(&t.params, NULL));
}
END_TEST

// Of 12 keys in blocks of 4, a window of 3: the last token sees keys from 8 on, the one before from
// 7 on.
START_TEST(table_entries_behind_the_window_are_not_looked_at) {
    tiny_init(&t, 12, 1);
    t.row.window_left = 3;
    t.table[0] = t.table[1] = UINT32_MAX;
    ATTND_CK_OK(attn_check(&t.params, NULL));
    t.table[2] = UINT32_MAX;
    ATTND_CK_ERR(attn_check(&t.params, NULL), ATTND_EINVAL);
    t.table[2] = 1;
    t.row.q_len = t.row.q_count = 2;
    ATTND_CK_ERR(attn_check(&t.params, NULL), ATTND_EINVAL);
    t.row.q_first = t.row.q_count = 1; // the first token is another launch's
    ATTND_CK_OK(attn_check(&t.params, NULL));
    t.row.new_len = 5; // from key 7 on
    ATTND_CK_ERR(attn_check(&t.params, NULL), ATTND_EINVAL);
    t.row.new_len = 4;
    ATTND_CK_OK(attn_check(&t.params, NULL));
    t.row.window_left = -1;
    ATTND_CK_ERR(attn_check(&t.params, NULL), ATTND_EINVAL);
}
END_TEST

START_TEST(every_live_byte_lies_in_the_pool) {
    REFUSE(t.params.pool_bytes = sizeof(t.pool[0]) * 2, ATTND_EINVAL, "k_offset");
    REFUSE(t.params.pool_bytes = sizeof(t.pool[0]) * 3 - 4, ATTND_EINVAL, "v_offset");
    REFUSE(t.row.k_offset = 2, ATTND_EINVAL, "k_offset");
    REFUSE(t.row.v_offset = UINT64_MAX - 3, ATTND_EINVAL, "v_offset");
    REFUSE(t.row.v_offset = sizeof(t.pool), ATTND_EINVAL, "v_offset");
    REFUSE((t.params.shape.block_stride = UINT64_MAX / 2 & ~3ull), ATTND_EINVAL, "k_offset");
    tiny_init(&t, 10, 1); // blocks 2, 0, 1
    t.params.pool_bytes = sizeof(t.pool[0]) * 3;
    ATTND_CK_OK(attn_check(&t.params, NULL));
}
END_TEST

START_TEST(pool_and_rows_are_checked) {
    REFUSE(t.params.pool = NULL, ATTND_EINVAL, "pool");
    REFUSE(t.params.pool = (char *)t.pool + 1, ATTND_EINVAL, "pool");
    REFUSE(t.params.rows = NULL, ATTND_EINVAL, "rows");
}
END_TEST

START_TEST(splits_are_checked) {
    REFUSE(t.params.num_splits = -1, ATTND_EINVAL, "num_splits");
    REFUSE(t.params.num_splits = ATTN_MAX_SPLITS + 1, ATTND_EINVAL, "num_splits");
    REFUSE((t.params.num_splits = 2, t.params.deterministic = true), ATTND_EINVAL, "num_splits");
}
END_TEST

START_TEST(scales_must_be_finite_positive_and_for_f8_only) {
    static float scale;
    REFUSE(t.row.k_scale = &scale, ATTND_EINVAL, "k_scale");
    REFUSE(t.row.v_scale = &scale, ATTND_EINVAL, "v_scale");
    const float bad[] = {0, -1, NAN, INFINITY};
    for (int i = 0; i < 4; i++) {
        scale = bad[i];
        REFUSE((t.params.shape.q_dtype = ATTND_BF16, t.params.shape.kv_dtype = ATTND_F8E4M3,
                t.row.k_scale = &scale),
               ATTND_EINVAL, "k_scale");
        REFUSE((t.params.shape.q_dtype = ATTND_BF16, t.params.shape.kv_dtype = ATTND_F8E4M3,
                t.row.v_scale = &scale),
               ATTND_EINVAL, "v_scale");
    }
}
END_TEST

START_TEST(arrays_of_a_layer_are_checked) {
    static const float bad = NAN;
    static const float infinite = INFINITY;
    REFUSE(t.row.sinks = &bad, ATTND_EINVAL, "sinks");
    REFUSE(t.row.sinks = &infinite, ATTND_EINVAL, "sinks");
    REFUSE(t.row.alibi_slopes = &bad, ATTND_EINVAL, "alibi_slopes");
    static const float no_sink = -INFINITY;
    tiny_init(&t, 10, 2);
    t.row.sinks = &no_sink;
    ATTND_CK_OK(attn_check(&t.params, NULL));
}
END_TEST

START_TEST(rope_is_checked) {
    static const float freq[4] = {1, 1, 1, 1};
    static const float bad[4] = {1, INFINITY, 1, 1};
    attn_rope rope = {.inv_freq = freq, .attention_factor = 1, .rotary_dim = 8};
    tiny_init(&t, 10, 2);
    t.row.rope = &rope;
    ATTND_CK_OK(attn_check(&t.params, NULL));
    rope.rotary_dim = 7;
    REFUSE(t.row.rope = &rope, ATTND_EINVAL, "rotary_dim");
    rope.rotary_dim = 10;
    REFUSE(t.row.rope = &rope, ATTND_EINVAL, "rotary_dim");
    rope.rotary_dim = 0;
    REFUSE(t.row.rope = &rope, ATTND_EINVAL, "rotary_dim");
    rope.rotary_dim = 8;
    rope.inv_freq = bad;
    REFUSE(t.row.rope = &rope, ATTND_EINVAL, "inv_freq");
    rope.inv_freq = NULL;
    REFUSE(t.row.rope = &rope, ATTND_EINVAL, "inv_freq");
    rope.inv_freq = freq;
    rope.attention_factor = NAN;
    REFUSE(t.row.rope = &rope, ATTND_EINVAL, "attention_factor");
}
END_TEST

START_TEST(block_masks_are_checked) {
    static const uint32_t start[] = {0, 2, 3};
    static const uint32_t down[] = {2, 1, 3};
    static const uint32_t good[] = {0, 2, 1};
    static const uint32_t behind[] = {0, 3, 1};
    static const uint32_t twice[] = {1, 1, 1};
    attn_block_mask mask = {.start = start, .kv_blocks = good, .q_block = 1};
    tiny_init(&t, 10, 2);
    t.row.block_mask = &mask;
    ATTND_CK_OK(attn_check(&t.params, NULL));
    mask.q_block = 0;
    REFUSE(t.row.block_mask = &mask, ATTND_EINVAL, "q_block");
    mask.q_block = 1;
    mask.kv_blocks = behind;
    REFUSE(t.row.block_mask = &mask, ATTND_EINVAL, "block_mask");
    mask.kv_blocks = twice;
    REFUSE(t.row.block_mask = &mask, ATTND_EINVAL, "block_mask");
    mask.kv_blocks = NULL;
    REFUSE(t.row.block_mask = &mask, ATTND_EINVAL, "block_mask");
    mask.kv_blocks = good;
    mask.start = down;
    REFUSE(t.row.block_mask = &mask, ATTND_EINVAL, "block_mask");
    mask.start = NULL;
    REFUSE(t.row.block_mask = &mask, ATTND_EINVAL, "block_mask");
}
END_TEST

START_TEST(a_bad_row_behind_good_ones_is_found) {
    static attn_row rows[3];
    tiny_init(&t, 10, 2);
    rows[0] = rows[1] = rows[2] = t.row;
    rows[2].kv_len = -5;
    t.params.rows = rows;
    t.params.num_rows = 3;
    attnd_errinfo info;
    ATTND_CK_ERR(attn_check(&t.params, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "kv_len");
    ck_assert_ptr_nonnull(strstr(info.text, "row 2"));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_check");
    TCase *c = tcase_create("check");
    tcase_add_test(c, a_good_launch_passes);
    tcase_add_test(c, more_queries_than_keys_pass);
    tcase_add_test(c, types_are_checked);
    tcase_add_test(c, heads_and_dims_are_checked);
    tcase_add_test(c, blocks_are_checked);
    tcase_add_test(c, token_major_blocks_pass);
    tcase_add_test(c, a_block_may_be_larger_than_the_unit_of_table_entries);
    tcase_add_test(c, lengths_are_checked);
    tcase_add_test(c, what_shapes_logits_is_checked);
    tcase_add_test(c, tensors_are_checked);
    tcase_add_test(c, table_entries_in_the_live_range_are_checked);
    tcase_add_test(c, table_entries_behind_the_window_are_not_looked_at);
    tcase_add_test(c, every_live_byte_lies_in_the_pool);
    tcase_add_test(c, pool_and_rows_are_checked);
    tcase_add_test(c, splits_are_checked);
    tcase_add_test(c, scales_must_be_finite_positive_and_for_f8_only);
    tcase_add_test(c, arrays_of_a_layer_are_checked);
    tcase_add_test(c, rope_is_checked);
    tcase_add_test(c, block_masks_are_checked);
    tcase_add_test(c, a_bad_row_behind_good_ones_is_found);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
