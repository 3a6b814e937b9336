// Slots: which index comes next.
#include "kvcache/kv_slots.h"
#include "tests/check_main.h"

START_TEST(kv_slots_are_handed_out_in_order_then_last_in_first_out) {
    kv_slots s = {.cap = 3};
    uint32_t next[3] = {0};
    ck_assert_uint_eq(kv_slots_take(&s, next), 0);
    ck_assert_uint_eq(kv_slots_take(&s, next), 1);
    kv_slots_give(&s, next, 0);
    kv_slots_give(&s, next, 1);
    ck_assert_uint_eq(s.live, 0);
    ck_assert_uint_eq(s.used, 2);
    ck_assert_uint_eq(kv_slots_peek(&s), 1);
    ck_assert_uint_eq(kv_slots_take(&s, next), 1);
    ck_assert_uint_eq(kv_slots_take(&s, next), 0);
    ck_assert_uint_eq(kv_slots_take(&s, next), 2);
    ck_assert_uint_eq(s.live, 3);
}
END_TEST

START_TEST(kv_slots_take_fails_when_full) {
    kv_slots s = {.cap = 1};
    uint32_t next[1] = {0};
    ck_assert_uint_eq(kv_slots_take(&s, next), 0);
    ck_assert_uint_eq(kv_slots_peek(&s), KV_NONE);
    ck_assert_uint_eq(kv_slots_take(&s, next), KV_NONE);
    ck_assert_uint_eq(s.live, 1);
}
END_TEST

START_TEST(kv_slots_of_the_last_generation_are_retired) {
    kv_slots s = {.cap = 2};
    uint32_t next[2] = {0};
    kv_slots_take(&s, next);
    kv_slots_give_handle(&s, next, 0, UINT32_MAX - 1); // one generation is left
    ck_assert_uint_eq(kv_slots_take(&s, next), 0);
    kv_slots_give_handle(&s, next, 0, UINT32_MAX);
    ck_assert_uint_eq(s.live, 0);
    ck_assert_uint_eq(kv_slots_take(&s, next), 1);
    ck_assert_uint_eq(kv_slots_take(&s, next), KV_NONE);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_slots");
    TCase *t = tcase_create("slots");
    tcase_add_test(t, kv_slots_are_handed_out_in_order_then_last_in_first_out);
    tcase_add_test(t, kv_slots_take_fails_when_full);
    tcase_add_test(t, kv_slots_of_the_last_generation_are_retired);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
