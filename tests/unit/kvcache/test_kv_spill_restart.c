// Spilling over restarts: what a tier holds is found again where the tier is, and missed where it
// is not; so it is when the process was killed at any store.
#include "kvcache/kv_spill.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/kvcache/kv_spill_fixture.h"

START_TEST(tiers_survive_a_restart) {
    fill_pool(1);
    serve(100, 4 * LEN);
    ck_assert_uint_eq(look().spilled, 16);
    restart(true, true);
    ck_assert_uint_eq(look().spilled, 16);
    ck_assert_uint_eq(look().lost, 0);
    ck_assert_uint_eq(serve(1, LEN), LEN - FIX_BLOCK_TOKENS);
    ck_assert_uint_eq(serve(4, LEN), LEN - FIX_BLOCK_TOKENS);
}
END_TEST

START_TEST(copies_cut_off_by_a_restart_leave_what_was) {
    fill_pool(1);
    serve(100, LEN);
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)};
    bool may_wait = true;
    ATTND_CK_ERR(try_open(&o, prompt(t, 1, LEN), LEN, &may_wait), ATTND_ENOSPC);
    ck_assert_uint_gt(look().spilling, 0); // and never taken in
    restart(true, true);
    ck_assert_uint_eq(look().spilled, 4);
    ck_assert_uint_eq(found(2, LEN), LEN);
    ATTND_CK_ERR(try_open(&o, t, LEN, &may_wait), ATTND_ENOSPC);
    tiers_wait(&f, tier);
    ATTND_CK_ERR(try_open(&o, t, LEN, &may_wait), ATTND_ENOSPC);
    ck_assert_uint_gt(look().fetching, 0);
    restart(true, true);
    open_waiting(&o, t, LEN);
    ck_assert_uint_eq(o.in.cached, LEN - FIX_BLOCK_TOKENS);
    end(&o, true);
}
END_TEST

START_TEST(a_tier_that_is_gone_at_a_restart_is_missed) {
    fill_pool(1);
    serve(100, LEN);
    restart(true, false);
    ck_assert_uint_eq(look().spilled, 0);
    ck_assert_uint_eq(look().lost, 4);
    ck_assert_uint_eq(serve(1, LEN), 0);
    ck_assert_uint_gt(look().spilled, 0);
    restart(false, false);
    ck_assert_uint_eq(look().spilled, 0);
    ck_assert_uint_eq(serve(2, LEN), 0);
}
END_TEST

// Blocks of a tier that is not there are lost, and claim no room in another; those of one that is
// there are found, whether one before it is or not.
START_TEST(a_tier_is_known_by_its_place) {
    fill_pool(1);
    serve(100, LEN);
    ck_assert_uint_eq(look().spilled, 4);
    place = 1;
    restart(true, true);
    kv_tier_info info;
    kv_tier_get_info(tier, &info);
    ck_assert_uint_eq(look().spilled, 0);
    ck_assert_uint_eq(look().lost, 4);
    ck_assert_uint_eq(info.in_use_bytes, 0);
    serve(101, 4 * LEN);
    uint64_t spilled = look().spilled;
    ck_assert_uint_gt(spilled, 0);
    restart(true, true);
    ck_assert_uint_eq(look().spilled, spilled);
    ck_assert_uint_eq(look().lost, 0);
}
END_TEST

// ---- kill -9 at a store

enum { STOPPED = 77, EVERY = 29, FEW_SLOTS = 24 };

static long stores, stop_at = -1;

void kv_crash_point(void);
void kv_crash_point(void) {
    if (stores++ == stop_at) {
        _exit(STOPPED);
    }
}

// script spills, fetches, drops what was spilled first, and computes spilled blocks again.
static void script(void) {
    static uint32_t t[TOKENS];
    start_tier(lower_slots ? FEW_SLOTS / 3 : FEW_SLOTS, true);
    serve(100, 2 * LEN);
    serve(1, LEN);
    opened o = {.seq = fix_seq(&f)};
    bool may_wait = false;
    ATTND_CK_OK(try_open(&o, prompt(t, 2, LEN), LEN, &may_wait));
    end(&o, true);
    serve(101, 5 * LEN);
    serve(3, LEN);
    serve(4, LEN);
    settle();
}

// run_until runs the script in a process that stops before a store; false when it came to its end.
static bool run_until(long store_idx) {
    int status;
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        stores = 0;
        stop_at = store_idx;
        script();
        _exit(0);
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == STOPPED));
    return WEXITSTATUS(status) == STOPPED;
}

// After a stop at any store each prompt finds right rows, from the arena or the tier, or none; no
// image is lost, and the books balance.
START_TEST(killed_at_any_store_it_goes_on) {
    const uint64_t bytes = (uint64_t)FIX_BLOCKS * KV_BLOCK_UNIT;
    long runs = 0, spilled = 0, moves = 0;
    bool stopped = true;
    for (long at = 0; stopped; at += EVERY, runs++) {
        char *own = f.memory; // memory that the processes share, in its place
        f.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        ck_assert_ptr_ne(f.memory, MAP_FAILED);
        f.arena.base = f.memory;
        fill_pool(1);
        stop_tiers();
        lower_slots = _i ? FEW_SLOTS : 0;
        stopped = run_until(at);
        f.next_request += 1000; // above those of the script
        restart(true, true);
        ck_assert_uint_eq(look().lost, 0);
        spilled += look().spilled > 0;
        for (uint32_t i = 0; lower && i < f.kv->lists->nodes.used; i++) {
            if (f.kv->nodes[i].owner && kv_spilled(f.kv, i) && f.kv->spills[i].tier == 2) {
                moves++;
                break;
            }
        }
        for (uint32_t p = 1; p < 8; p++) {
            serve(p, LEN);
        }
        serve(100, 2 * LEN);
        munmap(f.memory, bytes);
        f.memory = own;
        tear_down();
        set_up();
    }
    ck_assert_int_gt(runs, 100);
    ck_assert_int_gt(spilled, runs / 2);
    ck_assert_int_eq(moves > runs / 2, _i);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_spill_restart");
    TCase *t = tcase_create("restart");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, tiers_survive_a_restart);
    tcase_add_test(t, copies_cut_off_by_a_restart_leave_what_was);
    tcase_add_test(t, a_tier_that_is_gone_at_a_restart_is_missed);
    tcase_add_test(t, a_tier_is_known_by_its_place);
    tcase_add_loop_test(t, killed_at_any_store_it_goes_on, 0, 2);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
