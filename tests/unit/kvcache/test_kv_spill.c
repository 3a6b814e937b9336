// Spilling: what makes way in the arena comes back from a tier to the byte, or is missed; copies
// that are slow or fail cost no more than that.  (Restarts: test_kv_spill_restart.c.  A tier behind
// the tier: test_kv_spill_move.c.)
#include "kvcache/kv_spill.h"

#include "tests/unit/kvcache/kv_spill_fixture.h"

START_TEST(what_makes_way_is_spilled_and_comes_back) {
    fill_pool(1);
    ck_assert_uint_eq(look().spills, 0);
    serve(100, 8 * FIX_BLOCK_TOKENS); // the two prompts used first make way
    ck_assert_uint_eq(look().spills, 8);
    ck_assert_uint_eq(look().spilled, 8);
    ck_assert_uint_eq(found(1, LEN), 0);
    ck_assert_uint_eq(found(2, LEN), 0);
    ck_assert_uint_eq(found(3, LEN), LEN);
    ck_assert_uint_eq(serve(1, LEN),
                      LEN - FIX_BLOCK_TOKENS); // of three blocks, and their rows are right
    ck_assert_uint_eq(look().fetches, 3);
    ck_assert_uint_eq(serve(2, LEN), LEN - FIX_BLOCK_TOKENS);
    ck_assert_uint_eq(look().lost + look().dropped + look().failed, 0);
}
END_TEST

START_TEST(who_does_not_wait_is_served_at_once) {
    fill_pool(1);
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)};
    bool may_wait = false;
    ATTND_CK_OK(try_open(&o, prompt(t, 100, LEN), LEN, &may_wait));
    end(&o, true);
    ck_assert_uint_eq(look().spills, 0);
    ck_assert_uint_eq(found(1, LEN), 0); // dropped
    serve(101, LEN);
    ck_assert_uint_eq(look().spills, 4);
    ck_assert_uint_eq(found(2, LEN), 0); // in the tier, and not waited for
    ck_assert_uint_eq(look().fetches, 0);
}
END_TEST

START_TEST(slow_copies_hold_up_only_who_waits_for_them) {
    fill_pool(1);
    tiers_set(true, ATTND_OK);
    static uint32_t t[TOKENS], u[TOKENS];
    opened o = {.seq = fix_seq(&f)}, other = {.seq = fix_seq(&f)};
    bool may_wait = true;
    ATTND_CK_ERR(try_open(&o, prompt(t, 100, LEN), LEN, &may_wait), ATTND_ENOSPC);
    ck_assert(may_wait);
    ck_assert_uint_eq(look().spilling, 4);
    ck_assert(!kv_tiers_poll(f.kv));
    ATTND_CK_ERR(try_open(&o, t, LEN, &may_wait), ATTND_ENOSPC); // no more are begun
    ck_assert_uint_eq(look().spilling, 4);
    may_wait = false; // the next prompt makes way at once
    ATTND_CK_OK(try_open(&other, prompt(u, 101, LEN), LEN, &may_wait));
    end(&other, true);
    ck_assert_uint_eq(found(2, LEN), 0);
    ck_assert_uint_eq(found(1, LEN), LEN); // is being spilled, and still there
    tiers_set(false, ATTND_OK);
    open_waiting(&o, t, LEN);
    end(&o, true);
}
END_TEST

START_TEST(the_queue_bounds_what_is_under_way) {
    fill_pool(1);
    tiers_set(true, ATTND_OK);
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)};
    bool may_wait = true;
    uint32_t num = 100 * FIX_BLOCK_TOKENS;
    ATTND_CK_ERR(try_open(&o, prompt(t, 100, num), num, &may_wait), ATTND_ENOSPC);
    ck_assert_uint_eq(look().spilling, DEPTH);
    tiers_set(false, ATTND_OK);
    ck_assert_uint_gt(open_waiting(&o, t, num), 100 / DEPTH);
    ck_assert_uint_eq(look().spilled, SLOTS); // the others were dropped for newer ones
    ck_assert_uint_eq(look().spills, 100);
    ck_assert_uint_eq(look().dropped, 100 - SLOTS);
    end(&o, true);
}
END_TEST

START_TEST(a_block_found_while_it_is_spilled_stays) {
    fill_pool(1);
    tiers_set(true, ATTND_OK);
    static uint32_t t[TOKENS], u[TOKENS];
    opened o = {.seq = fix_seq(&f)}, finds = {.seq = fix_seq(&f)};
    bool may_wait = true;
    ATTND_CK_ERR(try_open(&o, prompt(t, 100, LEN), LEN, &may_wait), ATTND_ENOSPC);
    may_wait = false;
    finds.in = (kv_step_seq){0};
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), fix_seq(&f), &f.info));
    prompt(u, 1, 2 * FIX_BLOCK_TOKENS + 1); // the first two of its blocks, and a block of its own
    ATTND_CK_OK(try_open(&finds, u, 2 * FIX_BLOCK_TOKENS + 1, &may_wait));
    ck_assert_uint_eq(finds.in.cached, 2 * FIX_BLOCK_TOKENS);
    tiers_set(false, ATTND_OK);
    tiers_wait(&f, tier);
    recount();
    ck_assert_uint_eq(look().spilled, 2);
    kv_tier_info info;
    kv_tier_get_info(tier, &info);
    ck_assert_uint_eq(info.in_use_bytes, 2 * KV_TIER_UNIT);
    open_waiting(&o, t, LEN);
    end(&o, true);
    end(&finds, true);
    ck_assert_uint_eq(serve(1, LEN), LEN - FIX_BLOCK_TOKENS);
}
END_TEST

START_TEST(a_block_computed_again_while_it_is_fetched_is_the_new_one) {
    fill_pool(1);
    serve(100, LEN);
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)}, again = {.seq = fix_seq(&f)};
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), fix_seq(&f), &f.info));
    bool may_wait = true;
    tiers_set(true, ATTND_OK);
    ATTND_CK_ERR(try_open(&o, prompt(t, 1, LEN), LEN, &may_wait), ATTND_ENOSPC); // makes room
    tiers_set(false, ATTND_OK);
    tiers_wait(&f, tier);
    tiers_set(true, ATTND_OK);
    may_wait = true;
    ATTND_CK_ERR(try_open(&o, t, LEN, &may_wait), ATTND_ENOSPC);
    ck_assert_uint_gt(look().fetching, 0);
    may_wait = false;
    ATTND_CK_OK(try_open(&again, t, LEN, &may_wait));
    ck_assert_uint_eq(again.in.cached, 0);
    end(&again, true);
    tiers_set(false, ATTND_OK);
    tiers_wait(&f, tier);
    recount();
    ck_assert_uint_eq(open_waiting(&o, t, LEN), 1);
    ck_assert_uint_eq(o.in.cached, LEN - 1);
    end(&o, true);
}
END_TEST

START_TEST(a_damaged_image_is_missed) {
    fill_pool(1);
    serve(100, LEN);
    uint32_t damaged = 0;
    for (uint32_t i = 0; i < f.kv->lists->nodes.used && !damaged; i++) { // its second block
        if (f.kv->nodes[i].owner && kv_spilled(f.kv, i) && kv_node_ids(f.kv, i)[0] == 1004) {
            ((char *)store.base)[f.kv->spills[i].slot * KV_TIER_UNIT + 77] ^= 4;
            damaged++;
        }
    }
    ck_assert_uint_eq(damaged, 1);
    ck_assert_uint_eq(serve(1, LEN), FIX_BLOCK_TOKENS);
    ck_assert_uint_eq(look().lost, 3); // and the two behind it
    ck_assert(!kv_tier_is_off(tier));
    ck_assert_uint_eq(found(1, LEN), LEN); // computed again
}
END_TEST

// Of a prompt of four blocks the second is damaged: what lies behind it gives its slots back, too.
START_TEST(what_lies_behind_a_lost_image_takes_no_room) {
    fill_pool(1);
    serve(100, LEN);
    for (uint32_t i = 0; i < f.kv->lists->nodes.used; i++) {
        if (f.kv->nodes[i].owner && kv_spilled(f.kv, i) && kv_node_ids(f.kv, i)[0] == 1004) {
            ((char *)store.base)[f.kv->spills[i].slot * KV_TIER_UNIT + 77] ^= 4;
        }
    }
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)};
    open_waiting(&o, prompt(t, 1, LEN + 1), LEN + 1);
    ck_assert_uint_eq(o.in.cached, FIX_BLOCK_TOKENS);
    end(&o, false);
    tiers_wait(&f, tier);
    for (uint32_t i = 0; i < f.kv->lists->nodes.used; i++) {
        ck_assert(!f.kv->nodes[i].owner || !kv_spilled(f.kv, i) ||
                  kv_node_ids(f.kv, i)[0] / 1000 != 1);
    }
    kv_tier_info info;
    kv_tier_get_info(tier, &info);
    ck_assert_uint_eq(info.in_use_bytes, look().spilled * KV_TIER_UNIT);
}
END_TEST

START_TEST(a_tier_that_fails_is_off_and_the_service_goes_on) {
    fill_pool(1);
    serve(100, LEN);
    ck_assert_uint_eq(look().spilled, 4);
    tiers_set(false, ATTND_ECUDA);
    ck_assert_uint_eq(serve(101, LEN), 0);
    ck_assert(kv_tier_is_off(tier));
    tiers_wait(&f, tier);
    ck_assert_uint_eq(look().spilled, 0);
    ck_assert_uint_eq(look().lost, 4);
    ck_assert_uint_gt(look().failed, 0);
    tiers_set(false, ATTND_OK);
    for (uint32_t p = 102; p < 200; p++) {
        ck_assert_uint_eq(serve(p, LEN), 0);
        ck_assert_uint_eq(serve(p, LEN), LEN - 1);
    }
    ck_assert_uint_eq(serve(1, LEN), 0);
    kv_tier_info info;
    kv_tier_get_info(tier, &info);
    ck_assert_uint_eq(info.in_use_bytes, 0);
}
END_TEST

START_TEST(a_tier_that_fails_in_a_fetch_is_off) {
    fill_pool(1);
    serve(100, LEN);
    serve(101, LEN);
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)};
    bool may_wait = true;
    ATTND_CK_ERR(try_open(&o, prompt(t, 1, LEN), LEN, &may_wait), ATTND_ENOSPC);
    tiers_wait(&f, tier); // there is room now
    tiers_set(false, ATTND_ECUDA);
    open_waiting(&o, t, LEN);
    ck_assert_uint_eq(o.in.cached, 0);
    end(&o, true);
    ck_assert(kv_tier_is_off(tier));
    tiers_wait(&f, tier);
    ck_assert_uint_eq(look().spilled, 0);
}
END_TEST

// Random prompts of a few stems, groups of two sizes, deaths, damage.  serve compares every row.
START_TEST(whatever_happens_the_rows_are_right) {
    if (_i) { // once more, with two tiers that are as large together
        start_two(SLOTS / 4, SLOTS - SLOTS / 4);
    }
    spec.num_groups = 2;
    spec.groups[1] = (kv_group_spec){2, 1, 32, 16, FIX_BLOCK_TOKENS, -1}; // 384 bytes: two units
    strcpy(spec.name, "two");
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    static uint32_t t[TOKENS];
    uint64_t hits = 0;
    srand(7);
    for (uint32_t round = 0; round < 4000; round++) {
        uint32_t num = 1 + (uint32_t)rand() % 60, stem = (uint32_t)rand() % 12;
        prompt(t, stem + 1, num);
        for (uint32_t i = (uint32_t)rand() % 60; i < num; i++) {
            t[i] += 100000 * (1 + (uint32_t)rand() % 2);
        }
        opened o = {.seq = fix_seq(&f)};
        bool waits = rand() % 8 != 0, may_wait = false;
        if (waits) {
            open_waiting(&o, t, num);
        } else if (try_open(&o, t, num, &may_wait)) { // copies hold what it needs
            tiers_wait(&f, tier);
            may_wait = false;
            ATTND_CK_OK(try_open(&o, t, num, &may_wait));
        }
        hits += o.in.cached;
        end(&o, rand() % 8 != 0);
        if (rand() % 64 == 0) {
            ((char *)store.base)[(uint32_t)rand() % (SLOTS * KV_TIER_UNIT)] ^= 1;
        }
        if (rand() % 200 == 0) {
            restart(true, rand() % 4 != 0);
            f.model = kv_model_get(f.kv, 1) ? 1 : 0;
        }
    }
    ck_assert_uint_gt(hits, 4000);
    ck_assert_uint_gt(look().fetches, 100);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_spill");
    TCase *t = tcase_create("memory");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, what_makes_way_is_spilled_and_comes_back);
    tcase_add_test(t, who_does_not_wait_is_served_at_once);
    tcase_add_test(t, slow_copies_hold_up_only_who_waits_for_them);
    tcase_add_test(t, the_queue_bounds_what_is_under_way);
    tcase_add_test(t, a_block_found_while_it_is_spilled_stays);
    tcase_add_test(t, a_block_computed_again_while_it_is_fetched_is_the_new_one);
    tcase_add_test(t, a_damaged_image_is_missed);
    tcase_add_test(t, what_lies_behind_a_lost_image_takes_no_room);
    tcase_add_test(t, a_tier_that_fails_is_off_and_the_service_goes_on);
    tcase_add_test(t, a_tier_that_fails_in_a_fetch_is_off);
    tcase_add_loop_test(t, whatever_happens_the_rows_are_right, 0, 2);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
