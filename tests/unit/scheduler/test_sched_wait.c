// Those that wait for blocks, against a pool that is two numbers: free blocks, and what each tenant
// may still have.
#include "scheduler/sched_wait.h"

#include "tests/check_main.h"

enum { NUM = 64 };

typedef struct step {
    sched_waiter w;
    uint32_t blocks;
    uint32_t tries, num_done;
    attnd_err err;
    attnd_errinfo info;
    attnd_err answer; // of place, when not OK
    void (*then)(struct step *s);
    struct step *arg;
} step;

static sched_wait *q;
static uint32_t pool_free, pool_total, quota_left[4];
static step s[NUM];

static const sched_wait_opts opts = {.max_waiting = 40, .max_tenant_waiting = 30, .max_tenants = 4};

static void setup(void) {
    pool_free = 0;
    pool_total = 100;
    for (int i = 0; i < 4; i++) {
        quota_left[i] = 1000;
    }
    ATTND_CK_OK(sched_wait_create(&q, &opts));
}

static void teardown(void) {
    for (int i = 0; i < NUM; i++) {
        sched_wait_cancel(q, &s[i].w);
    }
    ck_assert_uint_eq(sched_wait_count(q), 0);
    sched_wait_free(q);
}

static attnd_err place(sched_waiter *w, sched_lack *lack, attnd_errinfo *info) {
    step *p = w->user;
    p->tries++;
    if (p->answer) {
        return attnd_fail(info, p->answer, "step", "as the test wants it");
    }
    if (p->blocks > pool_total) {
        return attnd_fail(info, ATTND_ENOSPC, "blocks", "larger than the pool");
    }
    if (p->blocks > quota_left[w->tenant]) {
        *lack = SCHED_LACK_QUOTA;
        return attnd_fail(info, ATTND_ENOSPC, "quota", "over the quota");
    }
    if (p->blocks > pool_free) {
        *lack = SCHED_LACK_POOL;
        return attnd_fail(info, ATTND_ENOSPC, "blocks", "no free blocks");
    }
    pool_free -= p->blocks;
    quota_left[w->tenant] -= p->blocks;
    return ATTND_OK;
}

static void done(sched_waiter *w, attnd_err err, const attnd_errinfo *info) {
    step *p = w->user;
    p->num_done++;
    p->err = err;
    p->info = *info;
    if (p->then) {
        p->then(p);
    }
}

static attnd_err enter_as(int i, uint32_t tenant, uint32_t blocks, uint64_t deadline, bool *waits) {
    s[i] = (step){.blocks = blocks};
    s[i].w = (sched_waiter){
        .tenant = tenant, .deadline_ms = deadline, .place = place, .done = done, .user = &s[i]};
    return sched_wait_enter(q, &s[i].w, waits, &s[i].info);
}

// enter returns whether it waits.
static bool enter(int i, uint32_t tenant, uint32_t blocks) {
    bool waits;
    ATTND_CK_OK(enter_as(i, tenant, blocks, 1000, &waits));
    return waits;
}

static void give(uint32_t blocks) {
    pool_free += blocks;
    sched_wait_retry(q);
}

START_TEST(what_fits_is_placed_at_once) {
    pool_free = 10;
    ck_assert(!enter(0, 0, 10));
    ck_assert_uint_eq(pool_free, 0);
    ck_assert_uint_eq(s[0].num_done, 0);
}
END_TEST

START_TEST(oldest_is_placed_first) {
    for (int i = 0; i < 3; i++) {
        ck_assert(enter(i, (uint32_t)i, 5));
    }
    give(9);
    ck_assert_uint_eq(s[0].num_done, 1);
    ATTND_CK_OK(s[0].err);
    ck_assert_uint_eq(s[1].num_done, 0);
    give(6);
    ck_assert_uint_eq(s[1].num_done, 1);
    ck_assert_uint_eq(s[2].num_done, 1);
    ck_assert_uint_eq(sched_wait_count(q), 0);
}
END_TEST

START_TEST(deadline_zero_does_not_wait) {
    bool waits = true;
    ATTND_CK_ERR(enter_as(0, 0, 1, 0, &waits), ATTND_ENOSPC);
    ck_assert(!waits);
    ck_assert_str_eq(s[0].info.field, "blocks");
    ck_assert_uint_eq(s[0].num_done, 0);
}
END_TEST

START_TEST(larger_than_the_pool_is_refused_at_once) {
    bool waits;
    ATTND_CK_ERR(enter_as(0, 0, 101, 1000, &waits), ATTND_ENOSPC);
    ck_assert_str_eq(s[0].info.text, "larger than the pool");
    ck_assert_uint_eq(sched_wait_count(q), 0);
}
END_TEST

START_TEST(other_errors_end_the_waiting) {
    ck_assert(enter(0, 0, 5));
    s[0].answer = ATTND_ESTALE;
    give(1);
    ATTND_CK_ERR(s[0].err, ATTND_ESTALE);
    ck_assert_str_eq(s[0].info.field, "step");
    bool waits;
    s[1].answer = ATTND_EBUSY;
    ATTND_CK_OK(enter_as(1, 0, 5, 1000, &waits));
    sched_wait_cancel(q, &s[1].w);
    s[1].answer = ATTND_EBUSY; // at the first try
    ATTND_CK_ERR(sched_wait_enter(q, &s[1].w, &waits, NULL), ATTND_EBUSY);
}
END_TEST

START_TEST(small_ones_pass_a_big_one_sixteen_times) {
    pool_free = 20;
    ck_assert(enter(0, 0, 50));
    for (int i = 1; i <= SCHED_WAIT_PASSES; i++) {
        ck_assert(!enter(i, 1, 1));
    }
    ck_assert_uint_eq(pool_free, 4);
    ck_assert(enter(17, 1, 1)); // now what is free is saved up
    ck_assert_uint_eq(s[17].tries, 0);
    bool waits;
    ATTND_CK_ERR(enter_as(18, 2, 1, 0, &waits), ATTND_ENOSPC);
    give(45);
    ck_assert_uint_eq(s[0].num_done + s[17].num_done, 0);
    give(1);
    ck_assert_uint_eq(s[0].num_done, 1);
    ck_assert_uint_eq(s[17].num_done, 0);
    give(1);
    ck_assert_uint_eq(s[17].num_done, 1);
}
END_TEST

START_TEST(passes_are_counted_in_the_queue_too) {
    ck_assert(enter(0, 0, 50));
    for (int i = 1; i <= 20; i++) {
        ck_assert(enter(i, 1, 1));
    }
    give(49);
    int placed = 0;
    for (int i = 1; i <= 20; i++) {
        placed += (int)s[i].num_done;
    }
    ck_assert_int_eq(placed, SCHED_WAIT_PASSES);
    ck_assert_uint_eq(pool_free, 49 - SCHED_WAIT_PASSES);
}
END_TEST

START_TEST(lack_of_quota_holds_up_no_other_tenant) {
    pool_free = 100;
    quota_left[0] = 10;
    ck_assert(enter(0, 0, 11));
    for (int i = 1; i <= 20; i++) {
        ck_assert(!enter(i, 1, 1));
    }
    for (int i = 21; i < 21 + 10; i++) { // its own tenant passes it until its quota is used up
        ck_assert(!enter(i, 0, 1));
    }
    ck_assert(enter(31, 0, 1));
    quota_left[0] += 7;
    for (int i = 32; i < 32 + 5; i++) {
        enter(i, 0, 1);
    }
    sched_wait_retry(q);
    // 16 passes: 10 before and 6 now, then quota is saved up
    ck_assert_uint_eq(quota_left[0], 1);
    ck_assert(!enter(40, 1, 1));
    quota_left[0] += 10;
    sched_wait_retry(q);
    ck_assert_uint_eq(s[0].num_done, 1);
}
END_TEST

START_TEST(tenant_full_of_failing_tries_does_not_hide_others) {
    quota_left[0] = 0;
    pool_free = 0;
    for (int i = 0; i < 20; i++) {
        ck_assert(enter(i, 0, 5));
    }
    ck_assert(enter(20, 1, 5));
    for (int i = 0; i < 20; i++) {
        s[i].tries = 0;
    }
    give(5);
    ck_assert_uint_eq(s[20].num_done, 1);
    uint32_t tries = 0;
    for (int i = 0; i < 20; i++) {
        tries += s[i].tries;
    }
    ck_assert_uint_eq(tries, SCHED_WAIT_LOOK);
}
END_TEST

START_TEST(full_queue_is_ebusy) {
    for (int i = 0; i < 30; i++) {
        ck_assert(enter(i, 0, 5));
    }
    bool waits;
    ATTND_CK_ERR(enter_as(30, 0, 5, 1000, &waits), ATTND_EBUSY);
    for (int i = 31; i < 41; i++) {
        ck_assert(enter(i, 1, 5));
    }
    ATTND_CK_ERR(enter_as(41, 2, 5, 1000, &waits), ATTND_EBUSY);
    pool_free = 1; // a full queue is no reason to refuse what can be placed
    ATTND_CK_OK(enter_as(41, 2, 1, 1000, &waits));
    ck_assert(!waits);
}
END_TEST

START_TEST(deadline_passes_with_enospc) {
    bool waits;
    const uint64_t deadlines[] = {30, 10, 20};
    for (int i = 0; i < 3; i++) {
        ATTND_CK_OK(enter_as(i, 0, 5, deadlines[i], &waits));
    }
    ck_assert_uint_eq(sched_wait_expire(q, 9), 10);
    ck_assert_uint_eq(sched_wait_expire(q, 20), 30);
    ATTND_CK_ERR(s[1].err, ATTND_ENOSPC);
    ATTND_CK_ERR(s[2].err, ATTND_ENOSPC);
    ck_assert_uint_eq(s[0].num_done, 0);
    ck_assert_uint_eq(sched_wait_expire(q, 1000), UINT64_MAX);
    ck_assert_uint_eq(s[0].num_done, 1);
}
END_TEST

// What is told is what the last try lacked: the blocks came, and then the quota was too small.
START_TEST(deadline_passes_with_the_reason_of_the_last_try) {
    bool waits;
    ATTND_CK_OK(enter_as(0, 0, 5, 10, &waits));
    ATTND_CK_OK(enter_as(1, 1, 5, 20, &waits));
    quota_left[1] = 4;
    give(1);
    ck_assert_uint_eq(sched_wait_expire(q, 20), UINT64_MAX);
    ATTND_CK_ERR(s[0].err, ATTND_ENOSPC);
    ck_assert_int_eq(s[0].info.code, ATTND_ENOSPC);
    ck_assert_str_eq(s[0].info.field, "blocks");
    ck_assert_str_eq(s[0].info.text, "no free blocks");
    ATTND_CK_ERR(s[1].err, ATTND_ENOSPC);
    ck_assert_str_eq(s[1].info.field, "quota");
    ck_assert_str_eq(s[1].info.text, "over the quota");
}
END_TEST

START_TEST(who_waits_behind_a_wall_is_told_so) {
    bool waits;
    pool_free = 20;
    ATTND_CK_OK(enter_as(0, 0, 50, 1000, &waits));
    for (int i = 1; i <= SCHED_WAIT_PASSES; i++) {
        ck_assert(!enter(i, 1, 1));
    }
    ATTND_CK_OK(enter_as(17, 1, 1, 10, &waits));
    ck_assert(waits);
    sched_wait_expire(q, 10);
    ATTND_CK_ERR(s[17].err, ATTND_ENOSPC);
    ck_assert_str_eq(s[17].info.text, "free blocks are saved up for an older step");
    ck_assert_uint_eq(s[17].tries, 0);
}
END_TEST

START_TEST(who_stood_behind_a_wall_is_tried_when_it_goes) {
    for (int by_deadline = 0; by_deadline < 2; by_deadline++) {
        pool_free = 20;
        bool waits;
        ATTND_CK_OK(enter_as(0, 0, 50, 10, &waits));
        for (int i = 1; i <= SCHED_WAIT_PASSES; i++) {
            ck_assert(!enter(i, 1, 1));
        }
        ck_assert(enter(17, 1, 1));
        if (by_deadline) {
            sched_wait_expire(q, 10);
        } else {
            sched_wait_cancel(q, &s[0].w);
        }
        ATTND_CK_ERR(s[0].err, by_deadline ? ATTND_ENOSPC : ATTND_ECANCELED);
        ATTND_CK_OK(s[17].err);
        ck_assert_uint_eq(s[17].num_done, 1);
    }
}
END_TEST

START_TEST(cancel_is_done_at_once_and_once) {
    ck_assert(enter(0, 0, 5));
    sched_wait_cancel(q, &s[0].w);
    sched_wait_cancel(q, &s[0].w);
    ck_assert_uint_eq(s[0].num_done, 1);
    ATTND_CK_ERR(s[0].err, ATTND_ECANCELED);
    give(5);
    ck_assert_uint_eq(pool_free, 5);
}
END_TEST

static void cancel_arg(step *p) {
    sched_wait_cancel(q, &p->arg->w);
}

static void give_back(step *p) {
    give(p->blocks);
}

START_TEST(done_may_cancel_the_next_and_give_blocks_back) {
    for (int i = 0; i < 4; i++) {
        ck_assert(enter(i, 0, 5));
    }
    s[0].then = cancel_arg;
    s[0].arg = &s[1];
    s[2].then = give_back;
    give(10);
    ATTND_CK_OK(s[0].err);
    ATTND_CK_ERR(s[1].err, ATTND_ECANCELED);
    ATTND_CK_OK(s[2].err);
    ATTND_CK_OK(s[3].err); // with what s[2] gave back
    for (int i = 0; i < 4; i++) {
        ck_assert_uint_eq(s[i].num_done, 1);
    }
}
END_TEST

static void enter_again(step *p) {
    bool waits;
    p->then = NULL;
    ATTND_CK_OK(sched_wait_enter(q, &p->w, &waits, NULL));
    ck_assert(waits);
}

START_TEST(done_may_enter_the_same_memory_again) {
    ck_assert(enter(0, 0, 5));
    s[0].then = enter_again;
    give(5);
    ck_assert_uint_eq(sched_wait_count(q), 1);
    give(5);
    ck_assert_uint_eq(s[0].num_done, 2);
}
END_TEST

START_TEST(create_refuses_bounds_of_zero) {
    sched_wait *other = NULL;
    for (int i = 0; i < 3; i++) {
        sched_wait_opts o = opts;
        *(uint32_t *[]){&o.max_waiting, &o.max_tenant_waiting, &o.max_tenants}[i] = 0;
        ATTND_CK_ERR(sched_wait_create(&other, &o), ATTND_EINVAL);
    }
    ck_assert_ptr_null(other);
    sched_wait_free(NULL);
}
END_TEST

static Suite *suite(void) {
    Suite *suite = suite_create("sched_wait");
    TCase *t = tcase_create("wait");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, what_fits_is_placed_at_once);
    tcase_add_test(t, oldest_is_placed_first);
    tcase_add_test(t, deadline_zero_does_not_wait);
    tcase_add_test(t, larger_than_the_pool_is_refused_at_once);
    tcase_add_test(t, other_errors_end_the_waiting);
    tcase_add_test(t, small_ones_pass_a_big_one_sixteen_times);
    tcase_add_test(t, passes_are_counted_in_the_queue_too);
    tcase_add_test(t, lack_of_quota_holds_up_no_other_tenant);
    tcase_add_test(t, tenant_full_of_failing_tries_does_not_hide_others);
    tcase_add_test(t, full_queue_is_ebusy);
    tcase_add_test(t, deadline_passes_with_enospc);
    tcase_add_test(t, deadline_passes_with_the_reason_of_the_last_try);
    tcase_add_test(t, who_waits_behind_a_wall_is_told_so);
    tcase_add_test(t, who_stood_behind_a_wall_is_tried_when_it_goes);
    tcase_add_test(t, cancel_is_done_at_once_and_once);
    tcase_add_test(t, done_may_cancel_the_next_and_give_blocks_back);
    tcase_add_test(t, done_may_enter_the_same_memory_again);
    tcase_add_test(t, create_refuses_bounds_of_zero);
    suite_add_tcase(suite, t);
    return suite;
}

CHECK_MAIN(suite)
