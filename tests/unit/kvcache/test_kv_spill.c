// Spilling: what makes way in the arena comes back from a tier to the byte, or is missed; copies
// that are slow or fail, and restarts, cost no more than that.  Every step here finds its tokens'
// rows by content, and after each the books are recounted.
#include "kvcache/kv_spill.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvcache/kv_prefix.h"
#include "tests/unit/kvcache/kv_rows.h"
#include "tests/unit/kvcache/kv_tiers.h"

enum { DEPTH = 16, LEN = 16, TOKENS = FIX_BLOCKS * FIX_BLOCK_TOKENS, SLOTS = 64 };

static kv_fixture f;
static kv_arena store, lower_store;
static kv_tier *tier, *lower;
static uint32_t tier_slots;
static uint32_t place;       // of the tier among the cache's
static uint32_t lower_slots; // of a second tier behind it, 0 = there is none
static kv_model_spec spec;

static kv_opts options(void) {
    kv_opts opts = fix_opts();
    opts.max_seq_blocks = FIX_BLOCKS;
    opts.prefix_blocks = 2 * FIX_BLOCKS;
    opts.prefix_block_tokens = FIX_BLOCK_TOKENS;
    return opts;
}

// Moves read the first tier's memory: they can be held up, and fail, apart from other copies.
static bool moves_held;
static attnd_err moves_err;

static attnd_err read_store(const kv_arena *arena, void *dst, uint64_t off, uint64_t bytes,
                            attnd_errinfo *info) {
    while (__atomic_load_n(&moves_held, __ATOMIC_ACQUIRE)) {
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    attnd_err err = __atomic_load_n(&moves_err, __ATOMIC_ACQUIRE);
    return err ? attnd_fail(info, err, "tier", "the test's error")
               : kv_arena_host_ops.read(arena, dst, off, bytes, info);
}

static void set_moves(bool held, attnd_err err) {
    __atomic_store_n(&moves_err, err, __ATOMIC_RELEASE);
    __atomic_store_n(&moves_held, held, __ATOMIC_RELEASE);
}

static void start_tier(uint32_t slots, bool is_kept) {
    static kv_arena_ops store_ops;
    const kv_tier_opts opts = tiers_opts(&f, slots, DEPTH);
    ATTND_CK_OK(kv_tier_open_memory(&tier, &opts, &store, is_kept, &f.info));
    kv_tier *tiers[KV_MAX_TIERS] = {NULL};
    tiers[place] = tier;
    store_ops = kv_arena_host_ops;
    store_ops.read = read_store;
    store.ops = &store_ops;
    if (lower_slots) {
        const kv_tier_opts lower_opts = tiers_opts(&f, lower_slots, DEPTH);
        ATTND_CK_OK(kv_tier_open_memory(&lower, &lower_opts, &lower_store, is_kept, &f.info));
        tiers[place + 1] = lower;
    }
    ATTND_CK_OK(kv_tiers_start(f.kv, tiers, KV_MAX_TIERS, &f.info));
}

static void start(uint32_t slots) {
    const kv_opts opts = options();
    fix_init_opts(&f, &opts);
    f.arena.ops = tiers_ops();
    spec = fix_spec("m", f.tenant);
    ATTND_CK_OK(kv_arena_open_host(&store, 2 << 20, &f.info));
    ATTND_CK_OK(kv_arena_open_host(&lower_store, 2 << 20, &f.info));
    set_moves(false, ATTND_OK);
    tier_slots = slots;
    start_tier(slots, false);
}

static void set_up(void) {
    place = lower_slots = 0;
    start(SLOTS);
}

static void stop_tiers(void) {
    kv_tier_close(tier);
    kv_tier_close(lower);
    kv_tiers_stop(f.kv);
    tier = lower = NULL;
}

static void tear_down(void) {
    stop_tiers();
    kv_arena_close_host(&store);
    kv_arena_close_host(&lower_store);
    fix_fini(&f);
}

// start_two starts anew, with two tiers.
static void start_two(uint32_t slots, uint32_t behind) {
    tear_down();
    lower_slots = behind;
    start(slots);
}

static void recount(void) {
    bool good = kv_check_full(f.kv, &f.info);
    ck_assert_msg(good, "%s", f.info.text);
    ck_assert(kv_check_fast(f.kv));
}

static kv_spill_info look(void) {
    kv_spill_info info;
    kv_spill_get_info(f.kv, &info);
    return info;
}

// settle waits until no copy is under way.
static void settle(void) {
    for (kv_tier_info a = {.jobs = 1}, b = {.jobs = 0}; a.jobs + b.jobs > 0;) {
        tiers_wait(&f, tier);
        kv_tier_get_info(tier, &a);
        if (lower) {
            tiers_wait(&f, lower);
            kv_tier_get_info(tier, &a);
            kv_tier_get_info(lower, &b);
        }
    }
}

// ---- steps

typedef struct opened {
    uint64_t seq, step;
    kv_step_seq in;
    const uint32_t *tokens;
} opened;

// try_open opens a step if it can be; what it found must hold the tokens' rows.
static attnd_err try_open(opened *o, const uint32_t *tokens, uint32_t num, bool *may_wait) {
    const kv_copy *copies;
    uint32_t num_copies, entries;
    o->tokens = tokens;
    o->in = (kv_step_seq){.seq = o->seq, .new_len = num, .tokens = tokens};
    attnd_err err = kv_step_open(f.kv, fix_rq(&f), f.model, &o->in, 1, &o->step, &copies,
                                 &num_copies, may_wait, &f.info);
    recount();
    if (err) {
        return err;
    }
    ATTND_CK_OK(kv_copy_run(f.kv, copies, num_copies, &f.info));
    for (uint32_t g = 0; g < spec.num_groups; g++) {
        const uint32_t *table = kv_step_table(f.kv, o->step, 0, g, &entries);
        for (uint32_t t = 0; t < o->in.cached; t++) {
            ck_assert(rows_right(&spec, g, f.memory, table, t, tokens[t]));
        }
        for (uint32_t t = o->in.cached; t < num; t++) {
            rows_write(&spec, g, f.memory, table, t, tokens[t]);
        }
    }
    return ATTND_OK;
}

// open_waiting opens a step that waits for copies; returns how many tries it took.
static uint32_t open_waiting(opened *o, const uint32_t *tokens, uint32_t num) {
    for (uint32_t tries = 1;; tries++) {
        bool may_wait = true;
        attnd_err err = try_open(o, tokens, num, &may_wait);
        if (!err) {
            return tries;
        }
        ATTND_CK_ERR(err, ATTND_ENOSPC);
        ck_assert(may_wait);
        ck_assert(look().spilling + look().fetching > 0 || lower);
        settle();
        recount();
    }
}

static void end(const opened *o, bool commit) {
    if (commit) {
        uint32_t num = o->in.new_len;
        ATTND_CK_OK(kv_step_commit_ids(f.kv, fix_rq(&f), o->step, &num, &o->tokens, 1, &f.info));
    } else {
        ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o->step));
    }
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), o->seq, &f.info));
    recount();
}

// prompt fills tokens of prompt p: no two share a block.
static const uint32_t *prompt(uint32_t *tokens, uint32_t p, uint32_t num) {
    for (uint32_t i = 0; i < num; i++) {
        tokens[i] = p * 1000 + i;
    }
    return tokens;
}

// serve runs prompt p, and returns how many of its tokens were found.
static uint32_t serve(uint32_t p, uint32_t num) {
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)};
    open_waiting(&o, prompt(t, p, num), num);
    end(&o, true);
    return o.in.cached;
}

// found returns how many tokens of a prompt are in the arena.
static uint32_t found(uint32_t p, uint32_t num) {
    static uint32_t t[TOKENS];
    kv_prefix_hit hit;
    kv_prefix_find(f.kv, f.model, KV_NONE, 0, prompt(t, p, num), num, &hit);
    return hit.blocks * FIX_BLOCK_TOKENS + hit.partial_tokens;
}

// fill_pool leaves prompts first and up, whose blocks fill the arena.
static void fill_pool(uint32_t first) {
    for (uint32_t p = 0; p < FIX_BLOCKS / (LEN / FIX_BLOCK_TOKENS); p++) {
        ck_assert_uint_eq(serve(first + p, LEN), 0);
    }
}

// ---- tests

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

// restart goes on with the ledger and, if kept, the tier's memory.
static void restart(bool with_tier, bool is_kept) {
    const kv_opts opts = options();
    kv_recovered got;
    int fd = dup(kv_ledger_fd(f.kv));
    stop_tiers();
    kv_free(f.kv);
    ATTND_CK_OK(kv_recover(&f.kv, &f.arena, &opts, fd, 0, &got, &f.info));
    ck_assert_uint_eq(got.lost_prefix_blocks, 0);
    recount();
    if (with_tier) {
        start_tier(tier_slots, is_kept);
    } else {
        ATTND_CK_OK(kv_tiers_start(f.kv, NULL, 0, &f.info));
    }
    recount();
}

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

// ---- from tier to tier

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
    tcase_add_test(t, tiers_survive_a_restart);
    tcase_add_test(t, copies_cut_off_by_a_restart_leave_what_was);
    tcase_add_test(t, a_tier_that_is_gone_at_a_restart_is_missed);
    tcase_add_test(t, a_tier_is_known_by_its_place);
    tcase_add_loop_test(t, killed_at_any_store_it_goes_on, 0, 2);
    tcase_add_loop_test(t, whatever_happens_the_rows_are_right, 0, 2);
    suite_add_tcase(s, t);
    t = tcase_create("two tiers");
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
