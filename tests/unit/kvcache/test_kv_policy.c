// Ranks as the policies' files derive them: of candidates the lowest goes first.
#include "kvcache/kv_policy.h"

#include <string.h>

#include "tests/check_main.h"

// A tree with room for 8 blocks: 3 sets of past, time in single uses.
enum { PAST = 8 * KV_POLICY_PAST };
static uint32_t past[PAST];
static kv_policy_state st;
static const kv_policy *const p = &kv_policy_reuse;

static void set_up(void) {
    memset(past, 0, sizeof(past));
    st = (kv_policy_state){.past = past, .num_past = PAST};
}

// key_of spreads small numbers as a hash does.
static uint32_t key_of(uint32_t number) {
    return number * UINT32_C(2654435761);
}

// used makes a block that is used once, and then by nobody.
static kv_rank used(uint32_t number, uint32_t depth) {
    kv_rank block = {0};
    p->insert(&st, &block, key_of(number), depth);
    p->release(&st, &block);
    return block;
}

static void use_again(kv_rank *block) {
    p->hit(&st, block);
    p->release(&st, block);
}

// pass lets others be used num times; they stay.
static void pass(uint32_t num) {
    for (uint32_t i = 0; i < num; i++) {
        used(1000 + i, 0);
    }
}

START_TEST(policies_are_found_by_name) {
    ck_assert_uint_eq(kv_policy_find("lru"), 0);
    ck_assert_ptr_eq(kv_policies[kv_policy_find("reuse")], &kv_policy_reuse);
    ck_assert_uint_eq(kv_policy_find("mru"), UINT32_MAX);
}
END_TEST

START_TEST(lru_ranks_by_the_time_of_the_release) {
    kv_rank a = {0}, b = {0};
    kv_policy_lru.release(&st, &a);
    kv_policy_lru.release(&st, &b);
    ck_assert_uint_lt(a.rank, b.rank);
    kv_policy_lru.release(&st, &a);
    ck_assert_uint_gt(a.rank, b.rank);
}
END_TEST

START_TEST(without_a_second_use_reuse_is_lru) {
    kv_rank deep = used(1, 7), flat = used(2, 0);
    ck_assert_uint_lt(deep.rank, flat.rank);
    deep = used(3, 7);
    ck_assert_uint_gt(deep.rank, flat.rank);
}
END_TEST

// The block comes back after 10 uses, so g = 10, and its second use is worth 10 uses of others:
// those that are used once up to 9 uses after it go first, those of 11 later do not.
START_TEST(a_second_use_is_worth_a_mean_gap) {
    kv_rank twice = used(1, 0);
    pass(9);
    use_again(&twice); // clock 11
    pass(8);
    kv_rank nine = used(2, 0); // clock 20
    pass(1);
    kv_rank eleven = used(3, 0); // clock 22
    ck_assert_uint_lt(nine.rank, twice.rank);
    ck_assert_uint_gt(eleven.rank, twice.rank);
}
END_TEST

// Uses at 1, 11, 21, 31: g stays 10, the fourth use makes two doublings.
START_TEST(every_doubling_of_uses_is_worth_one) {
    kv_rank four = used(1, 0);
    for (int i = 0; i < 3; i++) {
        pass(9);
        use_again(&four);
    }
    pass(18);
    kv_rank nineteen = used(2, 0); // clock 50
    pass(1);
    kv_rank twenty_one = used(3, 0);
    ck_assert_uint_lt(nineteen.rank, four.rank);
    ck_assert_uint_gt(twenty_one.rank, four.rank);
}
END_TEST

// g = 160: 16 doublings of depth would outweigh one of uses, two of them are worth 20 uses.
START_TEST(depth_takes_a_sixteenth_a_doubling) {
    kv_rank first = used(1, 0);
    pass(159);
    use_again(&first);
    kv_rank root = used(2, 0);
    pass(18);
    kv_rank deep19 = used(3, 3);
    pass(1);
    kv_rank deep21 = used(4, 3);
    ck_assert_uint_lt(deep19.rank, root.rank);
    ck_assert_uint_gt(deep21.rank, root.rank);
}
END_TEST

// The same gap of 10, but the others are gone: with one block in the tree a use is worth one use.
START_TEST(a_use_is_worth_no_more_than_there_are_blocks) {
    kv_rank twice = used(1, 0);
    for (uint32_t i = 0; i < 9; i++) {
        kv_rank other = used(1000 + i, 0);
        p->evict(&st, &other, key_of(1000 + i));
    }
    use_again(&twice);
    kv_rank next = used(2, 0);
    ck_assert_uint_gt(next.rank, twice.rank);
}
END_TEST

START_TEST(uses_are_remembered_over_an_eviction) {
    kv_rank a = used(1, 0);
    pass(4);
    p->evict(&st, &a, key_of(1));
    pass(5);
    kv_rank again = used(1, 0); // clock 11, as in a_second_use_is_worth_a_mean_gap
    pass(8);
    kv_rank nine = used(2, 0);
    pass(1);
    kv_rank eleven = used(3, 0);
    ck_assert_uint_lt(nine.rank, again.rank);
    ck_assert_uint_gt(eleven.rank, again.rank);
}
END_TEST

// One set: of nine evicted blocks the first is forgotten, and a block is remembered only once.
START_TEST(the_oldest_of_a_set_is_forgotten) {
    st.num_past = 8;
    kv_rank blocks[9];
    for (uint32_t i = 0; i < 9; i++) {
        blocks[i] = used(i, 0);
    }
    for (uint32_t i = 0; i < 9; i++) {
        p->evict(&st, &blocks[i], key_of(i));
    }
    for (uint32_t i = 0; i < 9; i++) {
        kv_rank again = {0}, fresh = {0};
        p->insert(&st, &again, key_of(i), 0);
        p->insert(&st, &fresh, key_of(100), 0);
        p->release(&st, &again);
        p->release(&st, &fresh);
        ck_assert_msg((again.rank > fresh.rank) == (i > 0), "block %u", i);
    }
    for (uint32_t i = 0; i < 8; i++) {
        ck_assert_uint_eq(past[i], 0);
    }
}
END_TEST

START_TEST(a_tree_without_room_remembers_nothing) {
    st.num_past = 7;
    kv_rank a = used(1, 0);
    p->evict(&st, &a, key_of(1));
    used(1, 0);
    for (uint32_t i = 0; i < PAST; i++) {
        ck_assert_uint_eq(past[i], 0);
    }
}
END_TEST

// The clock is halved when it is half through, and the path of one call may go on ticking: ranks
// lie ahead of it by at most all blocks that there can be (2^28), for each of 4 doublings of uses
// and 15/16 for depth.
START_TEST(ranks_do_not_wrap_before_the_clock_is_halved) {
    const uint64_t blocks = UINT64_C(1) << 28, path = UINT64_C(1) << 24;
    st.clock = (UINT32_C(1) << 31) + (uint32_t)path;
    st.words[1] = 1;
    st.words[2] = UINT64_MAX / 2; // a mean gap above all blocks
    st.words[3] = blocks;
    kv_rank most = {.word = 15 << 12};
    p->release(&st, &most);
    ck_assert_uint_eq(most.rank, (UINT64_C(1) << 31) + path + blocks * 4 + blocks / 16 * 15);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_policy");
    TCase *tc = tcase_create("ranks");
    tcase_add_checked_fixture(tc, set_up, NULL);
    tcase_add_test(tc, policies_are_found_by_name);
    tcase_add_test(tc, lru_ranks_by_the_time_of_the_release);
    tcase_add_test(tc, without_a_second_use_reuse_is_lru);
    tcase_add_test(tc, a_second_use_is_worth_a_mean_gap);
    tcase_add_test(tc, every_doubling_of_uses_is_worth_one);
    tcase_add_test(tc, depth_takes_a_sixteenth_a_doubling);
    tcase_add_test(tc, a_use_is_worth_no_more_than_there_are_blocks);
    tcase_add_test(tc, uses_are_remembered_over_an_eviction);
    tcase_add_test(tc, the_oldest_of_a_set_is_forgotten);
    tcase_add_test(tc, a_tree_without_room_remembers_nothing);
    tcase_add_test(tc, ranks_do_not_wrap_before_the_clock_is_halved);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
