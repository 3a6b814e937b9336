// The mask helpers against the sentence of attn.h, key by key, for random rows; and by hand where
// numbers are extreme.
#include "attention/attn_mask.h"

#include <string.h>

#include "tests/check_main.h"

enum { NUM_ROWS = 400, MAX_LEN = 200, WORDS = (MAX_LEN + 63) / 64 };

static uint64_t seed = 1;

static int32_t below(int32_t n) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (int32_t)((seed >> 33) % (uint64_t)n);
}

static uint64_t tree[MAX_LEN * WORDS];

static attn_row random_row(void) {
    attn_row row = {
        .kv_len = below(MAX_LEN),
        .q_len = 1 + below(MAX_LEN - 1),
        .flags = below(2) ? (uint32_t)ATTN_CAUSAL : 0,
        .window_left = below(2) ? below(MAX_LEN) : -1,
        .window_right = below(2) ? below(MAX_LEN) : -1,
        .tree_mask = below(2) ? tree : NULL,
    };
    for (int32_t i = 0; i < MAX_LEN * WORDS; i++) {
        tree[i] = (uint64_t)below(1 << 30) << 40 ^ (uint64_t)below(1 << 30) << 20 ^
                  (uint64_t)below(1 << 30);
    }
    return row;
}

static bool sees_span(const attn_row *row, int64_t i, int64_t j) {
    int64_t diagonal = i + row->kv_len - row->q_len;
    return j >= 0 && j < row->kv_len && (!(row->flags & ATTN_CAUSAL) || j <= diagonal) &&
           (row->window_left < 0 || j >= diagonal - row->window_left) &&
           (row->window_right < 0 || j <= diagonal + row->window_right);
}

static bool sees(const attn_row *row, int64_t i, int64_t j) {
    int64_t fresh = j - (row->kv_len - row->q_len);
    int64_t words = (row->q_len + 63) / 64;
    return sees_span(row, i, j) && (!row->tree_mask || fresh < 0 ||
                                    (row->tree_mask[i * words + fresh / 64] >> fresh % 64 & 1));
}

START_TEST(spans_hold_the_keys_that_causal_and_window_show) {
    for (int n = 0; n < NUM_ROWS; n++) {
        attn_row row = random_row();
        int32_t first = below(row.q_len);
        int32_t last = first + below(row.q_len - first);
        attn_span span = attn_mask_span(&row, first, last);
        int32_t num_wrong = 0;
        for (int32_t j = 0; j < row.kv_len; j++) {
            bool any = false;
            for (int32_t i = first; i <= last; i++) {
                any |= sees_span(&row, i, j);
            }
            num_wrong += any != (j >= span.first && j < span.end);
        }
        ck_assert_int_eq(num_wrong, 0);
        ck_assert(span.first >= 0 && span.first <= span.end && span.end <= row.kv_len);
    }
}
END_TEST

// want_bits is what attn_mask_bits should return.
static uint64_t want_bits(const attn_row *row, int32_t i, int32_t key, int32_t count) {
    uint64_t want = 0;
    for (int32_t b = 0; b < count; b++) {
        want |= (uint64_t)sees(row, i, key + b) << b;
    }
    return want;
}

START_TEST(bits_are_the_keys_that_a_token_sees) {
    for (int n = 0; n < NUM_ROWS; n++) {
        attn_row row = random_row();
        for (int32_t i = 0; i < row.q_len; i += 1 + below(20)) {
            for (int32_t key = 0; key < row.kv_len; key += 1 + below(50)) {
                int32_t count = 1 + below(64);
                ck_assert_uint_eq(attn_mask_bits(&row, i, key, count),
                                  want_bits(&row, i, key, count));
            }
        }
    }
}
END_TEST

START_TEST(full_means_that_all_tokens_see_all_keys) {
    int num_full = 0;
    for (int n = 0; n < 20 * NUM_ROWS; n++) {
        attn_row row = random_row();
        int32_t first = below(row.q_len);
        int32_t last = first + below(row.q_len - first < 4 ? row.q_len - first : 4);
        int32_t key = below(row.kv_len + 1);
        int32_t count = 1 + below(20);
        bool want = true;
        for (int32_t i = first; i <= last && want; i++) {
            for (int32_t j = key; j < key + count && want; j++) {
                want = sees_span(&row, i, j) && (!row.tree_mask || j < row.kv_len - row.q_len);
            }
        }
        ck_assert_int_eq(attn_mask_is_full(&row, first, last, key, count), want);
        num_full += want;
    }
    ck_assert_int_gt(num_full, 100);
}
END_TEST

START_TEST(huge_windows_are_unbounded) {
    attn_row row = {.kv_len = ATTN_MAX_TOKENS,
                    .q_len = ATTN_MAX_TOKENS,
                    .window_left = INT32_MAX,
                    .window_right = INT32_MAX};
    attn_span span = attn_mask_span(&row, ATTN_MAX_TOKENS - 1, ATTN_MAX_TOKENS - 1);
    ck_assert_int_eq(span.first, 0);
    ck_assert_int_eq(span.end, ATTN_MAX_TOKENS);
    row.kv_len = 1; // the diagonal of token 0 is far below 0
    span = attn_mask_span(&row, 0, 0);
    ck_assert_int_eq(span.first, 0);
    ck_assert_int_eq(span.end, 1);
}
END_TEST

START_TEST(block_bits_are_the_listed_blocks) {
    static const uint32_t start[] = {0, 3, 3};
    static const uint32_t list[] = {0, 2, 9};
    attn_block_mask mask = {.start = start, .kv_blocks = list, .q_block = 4};
    attn_row row = {.kv_len = 100, .q_len = 8, .block_mask = &mask};
    for (int32_t key = 0; key < 100; key++) {
        for (int32_t count = 1; count <= 64; count += 7) {
            uint64_t want = 0;
            for (int32_t b = 0; b < count; b++) {
                int32_t block = (key + b) / 10;
                want |= (uint64_t)(block == 0 || block == 2 || block == 9) << b;
            }
            ck_assert_uint_eq(attn_mask_block_bits(&row, 10, 3, key, count), want);
        }
    }
    ck_assert_uint_eq(attn_mask_block_bits(&row, 10, 4, 0, 64), 0); // query block 1 lists none
    row.block_mask = NULL;
    ck_assert_uint_eq(attn_mask_block_bits(&row, 10, 4, 0, 64), ~0ull);
    ck_assert_uint_eq(attn_mask_block_bits(&row, 10, 4, 0, 3), 7);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_mask");
    TCase *c = tcase_create("mask");
    tcase_add_test(c, spans_hold_the_keys_that_causal_and_window_show);
    tcase_add_test(c, bits_are_the_keys_that_a_token_sees);
    tcase_add_test(c, full_means_that_all_tokens_see_all_keys);
    tcase_add_test(c, huge_windows_are_unbounded);
    tcase_add_test(c, block_bits_are_the_listed_blocks);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
