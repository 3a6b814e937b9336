// Polling instead of sleeping: it ends when nothing has come for a while, not while something is
// awaited, at once where it crowds, and never past what comes while it goes to sleep.
#include "server/srv_spin.h"

#include "proto/clock.h"
#include "tests/check_main.h"

enum { SPIN_US = 2000, LONG_US = 60 * 1000 * 1000 };

// world is what a test lets come and sees; ctx of the callbacks.
typedef struct world {
    uint32_t has_come;     // for serve to take
    uint32_t comes_asleep; // while it goes to sleep
    uint32_t served;
    bool told, awaits, crowds, closed; // told: that it sleeps
} world;

static uv_loop_t loop;
static srv_spin spin;
static world w;

static bool serve(void *ctx, uint64_t until_us) {
    world *it = ctx;
    ck_assert_int_lt((int64_t)(until_us - attnd_clock_us()), 1000000); // a slice
    uint32_t num = it->has_come;
    it->served += num;
    it->has_come = 0;
    return num > 0;
}

static bool pending(void *ctx) {
    world *it = ctx;
    ck_assert(it->told); // before the last look
    it->has_come += it->comes_asleep;
    it->comes_asleep = 0;
    return it->has_come > 0;
}

static void sleeps(void *ctx, bool told) {
    world *it = ctx;
    it->told = told;
}

static bool awaits(void *ctx) {
    return ((const world *)ctx)->awaits;
}

static bool crowds(void *ctx) {
    return ((const world *)ctx)->crowds;
}

static void begin(uint32_t spin_us) {
    srv_spin_opts opts = {.spin_us = spin_us,
                          .serve = serve,
                          .pending = pending,
                          .sleeps = sleeps,
                          .awaits = awaits,
                          .crowds = crowds,
                          .ctx = &w};
    w = (world){.told = true};
    ck_assert_int_eq(uv_loop_init(&loop), 0);
    srv_spin_open(&spin, &loop, &opts);
    ck_assert(!srv_spin_awake(&spin));
}

static void on_closed(uv_handle_t *handle) {
    world *it = handle->data;
    it->closed = true;
}

static void end(void) {
    srv_spin_close(&spin, on_closed);
    srv_spin_wake(&spin); // does nothing
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert(w.closed);
    ck_assert_int_eq(uv_loop_close(&loop), 0);
}

// turn is one of the loop's; returns whether the loop would block in the next.
static bool turn(void) {
    return uv_run(&loop, UV_RUN_NOWAIT) == 0;
}

START_TEST(it_sleeps_when_nothing_has_come_for_a_while) {
    begin(SPIN_US);
    uint64_t from_us = attnd_clock_us();
    srv_spin_wake(&spin);
    ck_assert(srv_spin_awake(&spin) && !w.told);
    uv_run(&loop, UV_RUN_DEFAULT); // until it sleeps
    ck_assert_uint_ge(attnd_clock_us() - from_us, SPIN_US);
    ck_assert(!srv_spin_awake(&spin) && w.told);
    ck_assert_uint_eq(srv_spin_slept(&spin), 1);
    w.has_come = 3;
    srv_spin_wake(&spin);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_uint_eq(w.served, 3);
    ck_assert_uint_eq(srv_spin_slept(&spin), 2);
    end();
}
END_TEST

START_TEST(what_comes_while_it_goes_to_sleep_keeps_it_awake) {
    begin(0);
    w.comes_asleep = 5;
    srv_spin_wake(&spin);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_uint_eq(w.served, 5);
    ck_assert_uint_eq(srv_spin_slept(&spin), 1);
    ck_assert(w.told);
    end();
}
END_TEST

START_TEST(it_goes_on_while_something_is_awaited) {
    begin(0);
    w.awaits = true;
    srv_spin_wake(&spin);
    for (int i = 0; i < 20; i++) {
        ck_assert(!turn());
    }
    ck_assert(srv_spin_awake(&spin));
    w.crowds = true; // others need the processor more
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert(!srv_spin_awake(&spin));
    end();
}
END_TEST

START_TEST(it_sleeps_at_once_where_it_crowds) {
    begin(LONG_US);
    w.crowds = true;
    w.has_come = 1;
    srv_spin_wake(&spin);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_uint_eq(w.served, 1);
    ck_assert(!srv_spin_awake(&spin));
    end();
}
END_TEST

START_TEST(its_patience_can_be_changed) {
    begin(LONG_US);
    srv_spin_wake(&spin);
    ck_assert(!turn());
    srv_spin_set(&spin, 0);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert(!srv_spin_awake(&spin));
    end();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_spin");
    TCase *tc = tcase_create("spin");
    tcase_add_test(tc, it_sleeps_when_nothing_has_come_for_a_while);
    tcase_add_test(tc, what_comes_while_it_goes_to_sleep_keeps_it_awake);
    tcase_add_test(tc, it_goes_on_while_something_is_awaited);
    tcase_add_test(tc, it_sleeps_at_once_where_it_crowds);
    tcase_add_test(tc, its_patience_can_be_changed);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
