// Tiny traces whose hits are counted by hand.  A prompt is written by its blocks, each a letter;
// all are full but the last where a '-' ends it.
#include "tests/load/bench_replay.h"

#include <string.h>

#include "kvcache/kv_policy.h"
#include "tests/check_main.h"

enum { MAX_PROMPTS = 32, MAX_IDS = 256, T = BENCH_TRACE_BLOCK };

static bench_trace_row rows[MAX_PROMPTS];
static uint32_t ids[MAX_IDS];
static bench_trace trace;
static bench_replay *replay;
static attnd_errinfo info;

static attnd_err try_prompts(const char *const *prompts) {
    trace = (bench_trace){.rows = rows, .ids = ids, .format = "mooncake"};
    for (; *prompts; prompts++) {
        bench_trace_row *row = &rows[trace.num_rows++];
        *row = (bench_trace_row){.output = 1, .first_id = trace.num_ids};
        for (const char *c = *prompts; *c; c++) {
            row->input += *c == '-' ? UINT32_MAX - (T - 1 - 100) : T; // the last has 100 tokens
            if (*c != '-') {
                ids[trace.num_ids++] = (uint32_t)*c;
                row->num_ids++;
            }
        }
    }
    return bench_replay_create(&replay, &trace, &info);
}

static void prompts_are(const char *const *prompts) {
    ATTND_CK_OK(try_prompts(prompts));
}

static void tear_down(void) {
    bench_replay_free(replay);
    replay = NULL;
}

static uint64_t belady(uint32_t blocks) {
    uint64_t hits = 0;
    ATTND_CK_OK(bench_replay_belady(replay, blocks, &hits, &info));
    return hits;
}

static uint64_t found(uint32_t blocks, const char *policy) {
    uint64_t hits = 0;
    ATTND_CK_OK(bench_replay_policy(replay, blocks, kv_policy_find(policy), &hits, &info));
    return hits;
}

#define PROMPTS(...) prompts_are((const char *const[]){__VA_ARGS__, NULL})

// 2 full blocks and 100 tokens; the same; all full; another one behind the first block.
START_TEST(only_full_blocks_count) {
    PROMPTS("abc-", "abc-", "abc", "ad");
    bench_replay_info i = bench_replay_get_info(replay);
    ck_assert_uint_eq(i.requests, 4);
    ck_assert_uint_eq(i.input_tokens, 2 * (2 * T + 100) + 3 * T + 2 * T);
    ck_assert_uint_eq(i.unique_blocks, 4); // c is full once
    ck_assert_uint_eq(i.longest, 3);
    ck_assert_uint_eq(i.unbounded_hits, (2 + 2 + 1) * T);
    for (uint32_t blocks = 4; blocks < 7; blocks++) {
        ck_assert_uint_eq(belady(blocks), i.unbounded_hits);
        ck_assert_uint_eq(found(blocks, "lru"), i.unbounded_hits);
        ck_assert_uint_eq(found(blocks, "reuse"), i.unbounded_hits);
    }
}
END_TEST

// Only the beginning of a prompt is found: b is there, but not behind x.
START_TEST(a_hit_is_a_prefix) {
    PROMPTS("ab", "cb");
    ck_assert_uint_eq(bench_replay_get_info(replay).unbounded_hits, 0);
    ck_assert_uint_eq(found(3, "lru"), 0);
}
END_TEST

// Two blocks.  LRU: a b c a b c finds nothing, since each goes just before it is needed.  Belady:
// c takes the place of b, which is needed after a; so a is found, then b takes c's or a's place, of
// which c is needed: c is found.
START_TEST(a_loop_that_does_not_fit_defeats_lru) {
    PROMPTS("a", "b", "c", "a", "b", "c");
    ck_assert_uint_eq(found(2, "lru"), 0);
    ck_assert_uint_eq(belady(2), 2 * T);
    ck_assert_uint_eq(found(3, "lru"), 3 * T);
}
END_TEST

// Three blocks.  "abc", then d: LRU lets the leaf c go, so a and b are found, and of "abc" c takes
// the place of d.
START_TEST(lru_lets_the_leaf_go_first) {
    PROMPTS("abc", "d", "abc", "d");
    ck_assert_uint_eq(found(3, "lru"), 2 * T);
    ck_assert_uint_eq(belady(3), 2 * T); // a, b; or d in the place of c, which costs c
}
END_TEST

// Three blocks.  h comes four times, with one other block between: the mean gap is 2 uses, so its
// fourth use is worth 4 more; then come four that come once.  LRU has dropped h behind the third of
// them, reuse keeps it and finds it once more.
START_TEST(reuse_keeps_what_comes_often) {
    PROMPTS("h", "1", "h", "2", "h", "3", "h", "4", "5", "6", "h");
    ck_assert_uint_eq(found(3, "lru"), 3 * T);
    ck_assert_uint_eq(found(3, "reuse"), 4 * T);
    ck_assert_uint_eq(belady(3), 4 * T);
    ck_assert_uint_eq(bench_replay_get_info(replay).unbounded_hits, 4 * T);
}
END_TEST

// Prompts at random from a small tree: nothing beats Belady, a larger cache never loses there, and
// one that holds all is unbounded.
START_TEST(nothing_beats_belady) {
    char text[24][8];
    const char *prompts[25] = {NULL};
    uint32_t state = (uint32_t)_i * 2654435761u + 1;
    for (int i = 0; i < 24; i++) {
        int len = 1 + (int)((state = state * 1664525u + 1013904223u) >> 24) % 6;
        char path = 0;
        for (int j = 0; j < len; j++) { // at each depth one of two, named after the way there
            path = (char)(2 * path + (((state = state * 1664525u + 1013904223u) >> 28) < 5));
            text[i][j] = (char)((2 << j) + path);
        }
        text[i][len] = '\0';
        prompts[i] = text[i];
    }
    prompts_are(prompts);
    bench_replay_info all = bench_replay_get_info(replay);
    uint64_t last = 0;
    for (uint32_t blocks = all.longest; blocks <= all.unique_blocks; blocks++) {
        uint64_t best = belady(blocks);
        ck_assert_uint_ge(best, last);
        ck_assert_uint_ge(best, found(blocks, "lru"));
        ck_assert_uint_ge(best, found(blocks, "reuse"));
        last = best;
    }
    ck_assert_uint_eq(last, all.unbounded_hits);
    ck_assert_uint_eq(found(all.unique_blocks, "lru"), all.unbounded_hits);
    ck_assert_uint_eq(found(all.unique_blocks, "reuse"), all.unbounded_hits);
}
END_TEST

START_TEST(a_cache_that_the_longest_prompt_does_not_fit_is_refused) {
    PROMPTS("a", "abc");
    uint64_t hits = 7;
    ATTND_CK_ERR(bench_replay_belady(replay, 2, &hits, &info), ATTND_EINVAL);
    ATTND_CK_ERR(bench_replay_policy(replay, 2, 0, &hits, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.text, "2 blocks: the longest prompt alone has 3 full ones");
    ck_assert_uint_eq(hits, 7);
}
END_TEST

START_TEST(a_trace_without_enough_hash_ids_is_refused) {
    ATTND_CK_ERR(try_prompts((const char *const[]){"", NULL}), ATTND_EINVAL);
    ck_assert_str_eq(info.text, "the trace has no hash_ids");
    rows[0] = (bench_trace_row){.input = 2 * T, .num_ids = 1};
    trace = (bench_trace){.rows = rows, .num_rows = 1, .ids = ids, .num_ids = 1};
    ATTND_CK_ERR(bench_replay_create(&replay, &trace, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.text, "request 0 has 2 full blocks, but 1 hash ids");
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_replay");
    TCase *tc = tcase_create("hits");
    tcase_add_checked_fixture(tc, NULL, tear_down);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, only_full_blocks_count);
    tcase_add_test(tc, a_hit_is_a_prefix);
    tcase_add_test(tc, a_loop_that_does_not_fit_defeats_lru);
    tcase_add_test(tc, lru_lets_the_leaf_go_first);
    tcase_add_test(tc, reuse_keeps_what_comes_often);
    tcase_add_loop_test(tc, nothing_beats_belady, 0, 8);
    tcase_add_test(tc, a_cache_that_the_longest_prompt_does_not_fit_is_refused);
    tcase_add_test(tc, a_trace_without_enough_hash_ids_is_refused);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
