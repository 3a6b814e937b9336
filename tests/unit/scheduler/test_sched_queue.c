// The queue of requests with rows: whose turn it is, and who may pass whom.
#include "scheduler/sched_queue.h"

#include "tests/check_main.h"

static const attn_shape shape_a, shape_b, shape_c;

static sched_queue *q;
static sched_req r[64];
static uint64_t seqno;

static void setup(void) {
    seqno = 0;
    ATTND_CK_OK(sched_queue_create(&q, 4, 64));
}

static void teardown(void) {
    sched_queue_free(q);
}

static sched_req *push(int i, const attn_shape *shape, sched_kind kind, uint32_t tenant) {
    r[i] = (sched_req){
        .shape = shape, .kind = kind, .tenant = tenant, .num_rows = 1, .seqno = ++seqno};
    sched_queue_push(q, &r[i]);
    return &r[i];
}

static bool rows_fit(void *ctx, sched_req *req) {
    return req->num_rows <= *(uint32_t *)ctx;
}

static uint32_t room;
static sched_follow follow_a = {
    .shape = &shape_a, .kind = SCHED_DECODE, .launch_no = 1, .fits = rows_fit, .ctx = &room};

START_TEST(empty_queue_has_no_lead) {
    ck_assert_ptr_null(sched_queue_lead(q, false));
    ck_assert_ptr_null(sched_queue_lead(q, true));
    room = 1;
    ck_assert_ptr_null(sched_queue_follow(q, &follow_a));
}
END_TEST

START_TEST(oldest_decode_leads_over_all_shapes) {
    push(0, &shape_a, SCHED_PREFILL, 0);
    push(1, &shape_c, SCHED_DECODE, 0);
    push(2, &shape_b, SCHED_DECODE, 0);
    push(3, &shape_a, SCHED_DECODE, 0);
    for (int i = 1; i <= 3; i++) {
        ck_assert_ptr_eq(sched_queue_lead(q, false), &r[i]);
        sched_queue_remove(q, &r[i]);
    }
    ck_assert_ptr_eq(sched_queue_lead(q, false), &r[0]);
}
END_TEST

START_TEST(prefill_first_is_the_oldest_of_all_tenants) {
    push(0, &shape_a, SCHED_DECODE, 0);
    push(1, &shape_b, SCHED_PREFILL, 1);
    push(2, &shape_a, SCHED_PREFILL, 0);
    sched_queue_charge(q, 1, 1000);
    ck_assert_ptr_eq(sched_queue_lead(q, false), &r[0]);
    ck_assert_ptr_eq(sched_queue_lead(q, true), &r[1]);
    sched_queue_remove(q, &r[1]);
    ck_assert_ptr_eq(sched_queue_lead(q, true), &r[2]);
    sched_queue_remove(q, &r[2]);
    ck_assert_ptr_eq(sched_queue_lead(q, true), &r[0]); // no prefill waits
}
END_TEST

START_TEST(least_service_by_weight_leads) {
    sched_queue_set_weight(q, 0, 3);
    push(0, &shape_a, SCHED_DECODE, 0);
    push(1, &shape_a, SCHED_DECODE, 1);
    // 90 each time: 0 has 30, 1 has 90, 0 has 60, 90; of equal ones 1 was served longest ago: 180
    const uint32_t turns[] = {0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1};
    for (size_t i = 0; i < sizeof(turns) / sizeof(turns[0]); i++) {
        sched_req *lead = sched_queue_lead(q, false);
        ck_assert_uint_eq(lead->tenant, turns[i]);
        sched_queue_advance(q);
        sched_queue_charge(q, lead->tenant, 90);
    }
}
END_TEST

START_TEST(equal_service_takes_turns) {
    for (int i = 0; i < 9; i++) {
        push(i, &shape_a, SCHED_DECODE, (uint32_t)i / 3);
    }
    room = 1;
    for (uint32_t i = 0; i < 9; i++) {
        sched_req *req = sched_queue_follow(q, &follow_a);
        ck_assert_uint_eq(req->tenant, i % 3);
        sched_queue_charge(q, req->tenant, 10);
        sched_queue_remove(q, req);
    }
}
END_TEST

START_TEST(tenant_that_comes_back_has_no_credit) {
    push(0, &shape_a, SCHED_DECODE, 0);
    for (int i = 0; i < 100; i++) {
        sched_queue_advance(q);
        sched_queue_charge(q, 0, 10);
    }
    push(1, &shape_a, SCHED_DECODE, 1);
    int of_tenant[2] = {0, 0};
    for (int i = 0; i < 20; i++) {
        sched_req *lead = sched_queue_lead(q, false);
        of_tenant[lead->tenant]++;
        sched_queue_advance(q);
        sched_queue_charge(q, lead->tenant, 10);
    }
    ck_assert_int_eq(of_tenant[0], 10);
    ck_assert_int_eq(of_tenant[1], 10);
}
END_TEST

START_TEST(huge_costs_do_not_overflow) {
    push(0, &shape_a, SCHED_DECODE, 0);
    push(1, &shape_a, SCHED_DECODE, 1);
    int of_tenant[2] = {0, 0};
    for (int i = 0; i < 2400000; i++) { // 2^42 a charge: past 2^62 after 2^20 turns each
        sched_req *lead = sched_queue_lead(q, false);
        of_tenant[lead->tenant]++;
        sched_queue_advance(q);
        sched_queue_charge(q, lead->tenant, UINT64_MAX);
    }
    ck_assert_int_eq(of_tenant[0], 1200000);
    ck_assert_int_eq(of_tenant[1], 1200000);
}
END_TEST

START_TEST(followers_are_of_the_shape_and_kind) {
    push(0, &shape_b, SCHED_DECODE, 0);
    push(1, &shape_a, SCHED_PREFILL, 0);
    push(2, &shape_a, SCHED_DECODE, 1);
    push(3, &shape_a, SCHED_DECODE, 0);
    room = 1;
    ck_assert_ptr_eq(sched_queue_follow(q, &follow_a), &r[3]); // equal: who was there first
    sched_queue_charge(q, 0, 10);
    sched_queue_remove(q, &r[3]);
    ck_assert_ptr_eq(sched_queue_follow(q, &follow_a), &r[2]);
    sched_queue_remove(q, &r[2]);
    ck_assert_ptr_null(sched_queue_follow(q, &follow_a));
}
END_TEST

START_TEST(follower_that_is_in_the_launch_is_stepped_over_without_a_pass) {
    push(0, &shape_a, SCHED_DECODE, 0)->launch_no = 1;
    push(1, &shape_a, SCHED_DECODE, 0);
    room = 1;
    ck_assert_ptr_eq(sched_queue_follow(q, &follow_a), &r[1]);
    ck_assert_uint_eq(r[0].passed, 0);
}
END_TEST

START_TEST(big_request_is_passed_sixteen_times) {
    push(0, &shape_a, SCHED_DECODE, 0)->num_rows = 8;
    for (int i = 1; i <= 20; i++) {
        push(i, &shape_a, SCHED_DECODE, 0);
    }
    push(30, &shape_a, SCHED_DECODE, 1);
    sched_queue_charge(q, 1, 1000);
    room = 7;
    for (int i = 1; i <= SCHED_MAX_PASSES; i++) {
        ck_assert_ptr_eq(sched_queue_follow(q, &follow_a), &r[i]);
        sched_queue_remove(q, &r[i]);
    }
    ck_assert_ptr_eq(sched_queue_follow(q, &follow_a), &r[30]); // another tenant is not held up
    sched_queue_remove(q, &r[30]);
    ck_assert_ptr_null(sched_queue_follow(q, &follow_a));
    room = 8;
    follow_a.launch_no++;
    ck_assert_ptr_eq(sched_queue_follow(q, &follow_a), &r[0]);
}
END_TEST

START_TEST(look_ahead_is_bounded) {
    for (int i = 0; i <= SCHED_LOOK_AHEAD; i++) {
        push(i, &shape_a, SCHED_DECODE, 0)->num_rows = 8;
    }
    push(20, &shape_a, SCHED_DECODE, 0);
    room = 7;
    ck_assert_ptr_null(sched_queue_follow(q, &follow_a));
    sched_queue_remove(q, &r[3]);
    follow_a.launch_no++;
    ck_assert_ptr_eq(sched_queue_follow(q, &follow_a), &r[20]);
}
END_TEST

START_TEST(any_number_of_shapes_is_served) {
    static attn_shape shapes[64];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 64; i++) {
            push(i, &shapes[i], SCHED_DECODE, (uint32_t)i % 4);
        }
        ck_assert_uint_eq(sched_queue_waiting(q, SCHED_DECODE), 64);
        for (int i = 63; i >= 0; i--) {
            sched_queue_remove(q, &r[i]);
        }
        ck_assert_uint_eq(sched_queue_waiting(q, SCHED_DECODE), 0);
    }
}
END_TEST

static void remove_even(void *ctx, sched_req *req) {
    ++*(int *)ctx;
    if ((req - r) % 2 == 0) {
        sched_queue_remove(q, req);
    }
}

START_TEST(each_visits_all_and_may_remove) {
    const attn_shape *shapes[] = {&shape_a, &shape_b, &shape_c};
    for (int i = 0; i < 60; i++) {
        push(i, shapes[i % 3], i % 4 ? SCHED_DECODE : SCHED_PREFILL, (uint32_t)i % 4);
    }
    int visits = 0;
    sched_queue_each(q, remove_even, &visits);
    ck_assert_int_eq(visits, 60);
    visits = 0;
    sched_queue_each(q, remove_even, &visits);
    ck_assert_int_eq(visits, 30);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("sched_queue");
    TCase *t = tcase_create("queue");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, empty_queue_has_no_lead);
    tcase_add_test(t, oldest_decode_leads_over_all_shapes);
    tcase_add_test(t, prefill_first_is_the_oldest_of_all_tenants);
    tcase_add_test(t, least_service_by_weight_leads);
    tcase_add_test(t, equal_service_takes_turns);
    tcase_add_test(t, tenant_that_comes_back_has_no_credit);
    tcase_add_test(t, huge_costs_do_not_overflow);
    tcase_add_test(t, followers_are_of_the_shape_and_kind);
    tcase_add_test(t, follower_that_is_in_the_launch_is_stepped_over_without_a_pass);
    tcase_add_test(t, big_request_is_passed_sixteen_times);
    tcase_add_test(t, look_ahead_is_bounded);
    tcase_add_test(t, any_number_of_shapes_is_served);
    tcase_add_test(t, each_visits_all_and_may_remove);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
