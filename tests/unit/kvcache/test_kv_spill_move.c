// From tier to tier: what was spilled first moves on to the tier behind, and is dropped when that
// is full, too; moves that are slow, or fail, or find damage, hold up and lose no more than they
// must.
#include "kvcache/kv_spill.h"

#include "tests/unit/kvcache/kv_spill_fixture.h"

// range_of says which prompts have blocks in a tier: the lowest and the highest; returns how many
// blocks these are.
static uint32_t range_of(uint32_t in, uint32_t *low, uint32_t *high) {
    uint32_t num = 0;
    *low = UINT32_MAX;
    *high = 0;
    for (uint32_t i = 0; i < f.kv->lists->nodes.used; i++) {
        if (f.kv->nodes[i].owner && kv_spilled(f.kv, i) && f.kv->spills[i].tier == in) {
            uint32_t p = kv_node_ids(f.kv, i)[0] / 1000;
            *low = p < *low ? p : *low;
            *high = p > *high ? p : *high;
            num++;
        }
    }
    return num;
}

static uint64_t taken(const kv_tier *t) {
    kv_tier_info info;
    kv_tier_get_info(t, &info);
    return info.in_use_bytes / KV_TIER_UNIT;
}

// Two of the first tier's sixteen slots are kept free; prompts are of four blocks.
START_TEST(what_was_spilled_first_moves_on) {
    uint32_t low, high, lower_low, lower_high;
    start_two(16, 32);
    fill_pool(1);
    for (uint32_t p = 0; p < 10; p++) {
        ck_assert_uint_eq(serve(100 + p, LEN), 0);
        settle();
    }
    ck_assert_uint_eq(look().spilled, 40);
    ck_assert_uint_eq(look().moves, 40 - 14);
    ck_assert_uint_eq(look().dropped + look().lost + look().failed, 0);
    ck_assert_uint_eq(range_of(1, &low, &high), 14);
    ck_assert_uint_eq(range_of(2, &lower_low, &lower_high), 26);
    ck_assert_uint_eq(lower_low, 1);
    ck_assert_uint_le(lower_high, low);
    ck_assert_uint_eq(high, 10);
    ck_assert_uint_eq(taken(tier), 14);
    ck_assert_uint_eq(taken(lower), 26);
    for (uint32_t p = 1; p <= 10; p++) { // and the rows are right
        ck_assert_uint_eq(serve(p, LEN), LEN - FIX_BLOCK_TOKENS);
    }
    settle();
    ck_assert_uint_gt(look().fetches, 26);
}
END_TEST

START_TEST(what_moved_on_first_is_dropped_when_all_is_full) {
    uint32_t low, high;
    start_two(16, 16);
    fill_pool(1);
    for (uint32_t p = 0; p < 12; p++) {
        serve(100 + p, LEN);
        settle();
    }
    ck_assert_uint_eq(look().spilled, 14 + 16);
    ck_assert_uint_eq(look().dropped, 48 - 30);
    ck_assert_uint_eq(range_of(2, &low, &high), 16);
    ck_assert_uint_eq(low, 5); // two blocks of it
    ck_assert_uint_eq(range_of(1, &low, &high), 14);
    ck_assert_uint_eq(high, 12);
    ck_assert_uint_eq(serve(4, LEN), 0);
    ck_assert_uint_eq(serve(12, LEN), LEN - FIX_BLOCK_TOKENS);
}
END_TEST

START_TEST(slow_moves_hold_up_only_who_waits_for_them) {
    static uint32_t t[TOKENS], u[TOKENS];
    start_two(16, 64);
    fill_pool(1);
    set_moves(true, ATTND_OK);
    for (uint32_t p = 0; p < 3; p++) {
        serve(100 + p, LEN);
    }
    opened o = {.seq = fix_seq(&f)}, waits = {.seq = fix_seq(&f)}, does_not = {.seq = fix_seq(&f)};
    bool may_wait = true;
    ATTND_CK_ERR(try_open(&o, prompt(t, 103, LEN), LEN, &may_wait), ATTND_ENOSPC);
    tiers_wait(&f, tier); // which fills the first tier
    may_wait = true;
    ATTND_CK_OK(try_open(&o, t, LEN, &may_wait));
    end(&o, true);
    may_wait = true;
    kv_tier_info info;
    ATTND_CK_ERR(try_open(&waits, prompt(t, 104, LEN), LEN, &may_wait), ATTND_ENOSPC);
    ck_assert(may_wait);
    kv_tier_get_info(lower, &info);
    ck_assert_uint_eq(info.jobs, 2); // as many as are to be free
    ck_assert_uint_eq(look().spilled, 16);
    may_wait = false;
    ATTND_CK_OK(try_open(&does_not, prompt(u, 1, LEN), LEN, &may_wait)); // two of which are moved
    ck_assert_uint_eq(does_not.in.cached, 0);
    end(&does_not, true); // and have blocks again
    ck_assert_uint_eq(look().spilled, 12);
    set_moves(false, ATTND_OK);
    settle();
    ck_assert_uint_eq(look().failed + look().lost + look().moves, 0);
    ck_assert_uint_eq(taken(lower), 0);
    ck_assert_uint_eq(taken(tier), 12);
    open_waiting(&waits, t, LEN);
    end(&waits, true);
    ck_assert_uint_eq(serve(1, LEN), LEN - 1);
}
END_TEST

START_TEST(moves_that_fail_switch_off_the_tier_that_they_go_to) {
    uint32_t low, high;
    start_two(16, 32);
    fill_pool(1);
    set_moves(false, ATTND_EIO);
    for (uint32_t p = 0; p < 10; p++) {
        serve(100 + p, LEN);
    }
    settle();
    ck_assert(kv_tier_is_off(lower));
    ck_assert(!kv_tier_is_off(tier));
    ck_assert_uint_gt(look().failed, 0);
    ck_assert_uint_eq(look().moves + look().lost, 0);
    ck_assert_uint_eq(look().spilled, 16); // the first one has what came last
    ck_assert_uint_eq(range_of(1, &low, &high), 16);
    ck_assert_uint_eq(high, 10);
    ck_assert_uint_eq(taken(lower), 0);
    ck_assert_uint_eq(serve(10, LEN), LEN - FIX_BLOCK_TOKENS);
}
END_TEST

START_TEST(a_damaged_image_is_lost_when_it_is_moved) {
    start_two(16, 32);
    fill_pool(1);
    for (uint32_t p = 0; p < 3; p++) {
        serve(100 + p, LEN);
    }
    ck_assert_uint_eq(look().moves, 0);
    uint32_t damaged = 0;
    for (uint32_t i = 0; i < f.kv->lists->nodes.used; i++) { // the block that goes first
        if (f.kv->nodes[i].owner && kv_spilled(f.kv, i) && kv_node_ids(f.kv, i)[0] == 1012) {
            ((char *)store.base)[f.kv->spills[i].slot * KV_TIER_UNIT + 77] ^= 4;
            damaged++;
        }
    }
    ck_assert_uint_eq(damaged, 1);
    serve(103, LEN);
    settle();
    ck_assert_uint_eq(look().lost, 1); // nothing lies behind it
    ck_assert_uint_ge(look().moves, 1);
    ck_assert(!kv_tier_is_off(lower));
    kv_tier_info info;
    kv_tier_get_info(lower, &info);
    ck_assert_uint_eq(info.damaged, 1);
    ck_assert_uint_eq(serve(1, LEN + 1), LEN - FIX_BLOCK_TOKENS);
    ck_assert_uint_eq(taken(tier) + taken(lower), look().spilled);
}
END_TEST

START_TEST(what_was_moved_survives_a_restart) {
    start_two(16, 32);
    fill_pool(1);
    for (uint32_t p = 0; p < 10; p++) {
        serve(100 + p, LEN);
        settle();
    }
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)};
    bool may_wait = true;
    set_moves(true, ATTND_OK);
    ATTND_CK_ERR(try_open(&o, prompt(t, 110, LEN), LEN, &may_wait), ATTND_ENOSPC);
    kv_tier_info info;
    kv_tier_get_info(lower, &info);
    ck_assert_uint_eq(info.jobs, 2);
    set_moves(false, ATTND_OK); // and what is under way is never taken in
    uint64_t spilled = look().spilled;
    restart(true, true);
    ck_assert_uint_eq(look().lost, 0);
    ck_assert_uint_eq(look().spilled, spilled);
    for (uint32_t p = 1; p <= 10; p++) {
        ck_assert_uint_eq(serve(p, LEN), LEN - FIX_BLOCK_TOKENS);
    }
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_spill_move");
    TCase *t = tcase_create("two tiers");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, what_was_spilled_first_moves_on);
    tcase_add_test(t, what_moved_on_first_is_dropped_when_all_is_full);
    tcase_add_test(t, slow_moves_hold_up_only_who_waits_for_them);
    tcase_add_test(t, moves_that_fail_switch_off_the_tier_that_they_go_to);
    tcase_add_test(t, a_damaged_image_is_lost_when_it_is_moved);
    tcase_add_test(t, what_was_moved_survives_a_restart);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
