// When gates are due: after four gaps that are alike, some microseconds before the next one ends.
#include "server/srv_gap.h"

#include "tests/check_main.h"

static srv_gap g;

static void setup(void) {
    g = (srv_gap){.num = 0};
}

static void note(int times, uint64_t gap_us) {
    for (int i = 0; i < times; i++) {
        srv_gap_note(&g, gap_us);
    }
}

// first_due returns from when on a gate is due, and last_due until when; 0 = never.
static uint64_t first_due(void) {
    uint64_t us = 1;
    while (us < 100000 && !srv_gap_is_due(&g, us)) {
        us++;
    }
    return us < 100000 ? us : 0;
}

static uint64_t last_due(void) {
    uint64_t us = 100000;
    while (us > 0 && !srv_gap_is_due(&g, us)) {
        us--;
    }
    return us;
}

START_TEST(gap_learns_four_before_it_foresees_one) {
    for (int i = 0; i < 3; i++) {
        note(1, 100);
        ck_assert_uint_eq(first_due(), 0);
    }
    note(1, 100);
    ck_assert_uint_eq(first_due(), 90); // launching takes 10
    ck_assert_uint_eq(last_due(), 105);
}
END_TEST

// The last four: due before the shortest of them ends, and not long after the longest.
START_TEST(gap_goes_by_the_last_four) {
    note(4, 700);
    note(1, 96);
    note(1, 104);
    note(1, 100);
    ck_assert_uint_eq(first_due(), 0); // one of 700 is left
    note(1, 100);
    ck_assert_uint_eq(first_due(), 86);
    ck_assert_uint_eq(last_due(), 109);
}
END_TEST

START_TEST(gap_is_alike_within_ten_us_or_an_eighth) {
    static const struct {
        uint64_t a, b;
        bool alike;
    } cases[] = {{50, 60, true},     {50, 61, false},     {80, 90, true},
                 {80, 91, false},    {160, 180, true},    {160, 181, false},
                 {8000, 9000, true}, {8000, 9001, false}, {9000, 8000, true}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        setup();
        note(3, cases[i].a);
        note(1, cases[i].b);
        ck_assert_msg((first_due() > 0) == cases[i].alike, "case %zu", i);
    }
}
END_TEST

// What comes at once needs no gate: there is no time to launch one.
START_TEST(gap_that_is_shorter_than_two_leads_has_none) {
    note(4, 19);
    ck_assert_uint_eq(first_due(), 0);
    note(4, 20);
    ck_assert_uint_eq(first_due(), 10);
}
END_TEST

START_TEST(gap_is_mute_after_a_gate_in_vain_and_twice_as_long_after_the_next) {
    uint32_t mute = 64;
    note(4, 200);
    for (int i = 0; i < 13; i++) {
        srv_gap_missed(&g);
        note((int)mute - 1, 200);
        ck_assert_msg(first_due() == 0, "after %d in vain: early", i + 1);
        note(1, 200);
        ck_assert_msg(first_due() == 190, "after %d in vain: still mute", i + 1);
        mute = mute < 65536 ? 2 * mute : mute;
    }
    srv_gap_passed(&g, 4);
    srv_gap_missed(&g);
    note(64, 200); // as after the first
    ck_assert_uint_eq(first_due(), 190);
}
END_TEST

// A gate that waited for less than 7 us came late, perhaps too late: the next one is launched 1 us
// earlier, up to 32 us; one that waited for longer, later, down to 10.
START_TEST(gap_has_gates_wait_for_seven_us) {
    note(4, 500);
    ck_assert_uint_eq(first_due(), 490);
    srv_gap_passed(&g, 6);
    ck_assert_uint_eq(first_due(), 489);
    srv_gap_passed(&g, 7);
    ck_assert_uint_eq(first_due(), 489);
    for (int i = 0; i < 50; i++) {
        srv_gap_passed(&g, 0);
    }
    ck_assert_uint_eq(first_due(), 468);
    ck_assert_uint_eq(last_due(), 505); // which goes by the gaps alone
    srv_gap_passed(&g, 8);
    ck_assert_uint_eq(first_due(), 469);
    for (int i = 0; i < 50; i++) {
        srv_gap_passed(&g, 49);
    }
    ck_assert_uint_eq(first_due(), 490);
}
END_TEST

START_TEST(gap_forgets_its_lead_after_a_gate_in_vain) {
    note(4, 500);
    for (int i = 0; i < 5; i++) {
        srv_gap_passed(&g, 1);
    }
    ck_assert_uint_eq(first_due(), 485);
    srv_gap_missed(&g);
    note(64, 500);
    ck_assert_uint_eq(first_due(), 490);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_gap");
    TCase *tc = tcase_create("gap");
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, gap_learns_four_before_it_foresees_one);
    tcase_add_test(tc, gap_goes_by_the_last_four);
    tcase_add_test(tc, gap_is_alike_within_ten_us_or_an_eighth);
    tcase_add_test(tc, gap_that_is_shorter_than_two_leads_has_none);
    tcase_add_test(tc, gap_is_mute_after_a_gate_in_vain_and_twice_as_long_after_the_next);
    tcase_add_test(tc, gap_has_gates_wait_for_seven_us);
    tcase_add_test(tc, gap_forgets_its_lead_after_a_gate_in_vain);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
