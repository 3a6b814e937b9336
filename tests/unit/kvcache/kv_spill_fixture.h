// kv_spill_fixture is what tests of spilling share: a cache with a tier of host memory, or two, and
// prompts served from them.  Every step here finds its tokens' rows by content, and after each the
// books are recounted.
#ifndef ATTND_TESTS_KV_SPILL_FIXTURE_H
#define ATTND_TESTS_KV_SPILL_FIXTURE_H

#include <unistd.h>

#include "kvcache/kv_prefix.h"
#include "kvcache/kv_spill.h"
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

static inline kv_opts options(void) {
    kv_opts opts = fix_opts();
    opts.max_seq_blocks = FIX_BLOCKS;
    opts.prefix_blocks = 2 * FIX_BLOCKS;
    opts.prefix_block_tokens = FIX_BLOCK_TOKENS;
    return opts;
}

// Moves read the first tier's memory: they can be held up, and fail, apart from other copies.
static bool moves_held;
static attnd_err moves_err;

static inline attnd_err read_store(const kv_arena *arena, void *dst, uint64_t off, uint64_t bytes,
                                   attnd_errinfo *info) {
    while (__atomic_load_n(&moves_held, __ATOMIC_ACQUIRE)) {
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    attnd_err err = __atomic_load_n(&moves_err, __ATOMIC_ACQUIRE);
    return err ? attnd_fail(info, err, "tier", "the test's error")
               : kv_arena_host_ops.read(arena, dst, off, bytes, info);
}

// set_moves holds moves up, or lets them go; from then on they end with err.
static inline void set_moves(bool held, attnd_err err) {
    __atomic_store_n(&moves_err, err, __ATOMIC_RELEASE);
    __atomic_store_n(&moves_held, held, __ATOMIC_RELEASE);
}

// start_tier opens the tiers and gives them to the cache; start opens both.
static inline void start_tier(uint32_t slots, bool is_kept) {
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

static inline void start(uint32_t slots) {
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

static inline void set_up(void) {
    place = lower_slots = 0;
    start(SLOTS);
}

static inline void stop_tiers(void) {
    kv_tier_close(tier);
    kv_tier_close(lower);
    kv_tiers_stop(f.kv);
    tier = lower = NULL;
}

static inline void tear_down(void) {
    stop_tiers();
    kv_arena_close_host(&store);
    kv_arena_close_host(&lower_store);
    fix_fini(&f);
}

// start_two starts anew, with two tiers.
static inline void start_two(uint32_t slots, uint32_t behind) {
    tear_down();
    lower_slots = behind;
    start(slots);
}

// recount compares the books with what is there.
static inline void recount(void) {
    bool good = kv_check_full(f.kv, &f.info);
    ck_assert_msg(good, "%s", f.info.text);
    ck_assert(kv_check_fast(f.kv));
}

static inline kv_spill_info look(void) {
    kv_spill_info info;
    kv_spill_get_info(f.kv, &info);
    return info;
}

// settle waits until no copy is under way.
static inline void settle(void) {
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
static inline attnd_err try_open(opened *o, const uint32_t *tokens, uint32_t num, bool *may_wait) {
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
static inline uint32_t open_waiting(opened *o, const uint32_t *tokens, uint32_t num) {
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

// end commits a step or aborts it, and frees its sequence.
static inline void end(const opened *o, bool commit) {
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
static inline const uint32_t *prompt(uint32_t *tokens, uint32_t p, uint32_t num) {
    for (uint32_t i = 0; i < num; i++) {
        tokens[i] = p * 1000 + i;
    }
    return tokens;
}

// serve runs prompt p, and returns how many of its tokens were found.
static inline uint32_t serve(uint32_t p, uint32_t num) {
    static uint32_t t[TOKENS];
    opened o = {.seq = fix_seq(&f)};
    open_waiting(&o, prompt(t, p, num), num);
    end(&o, true);
    return o.in.cached;
}

// found returns how many tokens of a prompt are in the arena.
static inline uint32_t found(uint32_t p, uint32_t num) {
    static uint32_t t[TOKENS];
    kv_prefix_hit hit;
    kv_prefix_find(f.kv, f.model, KV_NONE, 0, prompt(t, p, num), num, &hit);
    return hit.blocks * FIX_BLOCK_TOKENS + hit.partial_tokens;
}

// fill_pool leaves prompts first and up, whose blocks fill the arena.
static inline void fill_pool(uint32_t first) {
    for (uint32_t p = 0; p < FIX_BLOCKS / (LEN / FIX_BLOCK_TOKENS); p++) {
        ck_assert_uint_eq(serve(first + p, LEN), 0);
    }
}

// restart goes on with the ledger and, if kept, the tier's memory.
static inline void restart(bool with_tier, bool is_kept) {
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

#endif
