// Least likely to be used again.
//
// Whether a block is used again depends on how often it was: of blocks of conversations about a
// quarter comes back once, of those that did half does again, and so on, about as the odds u : 3
// for a block with u uses.  How long that takes depends on it little.  So if the gaps between two
// uses are exponential with mean g, then, a time t after its u-th use, the odds that a block comes
// back have fallen to
//
//     u * exp(-t / g) : 3        (Bayes' rule)
//
// and their logarithm orders blocks as
//
//     time of the last use  +  g * ln(u)
//
// does: a rank that is fixed from one use to the next, as a heap needs it.  LRU is u = 1 for all.
// A doubling of u counts here as a whole g, not ln(2) of it, since the gaps have a longer tail than
// exponential ones, and as no more uses of any block than there are blocks in the cache, so that a
// block does not stay for much longer than the cache could keep it anyway.  Each doubling of the
// depth takes a sixteenth of that off: of a path that forks less is used the further back it lies.
//
// Time is counted in uses of any block.  g is what was seen, the mean of the last few thousand
// gaps.  Gaps and uses would be seen too small if they ended with an eviction, most of all in a
// small cache: so past remembers evicted blocks, about three times as many as the tree has room
// for, as sets of entries, newest first.
//
//     block, entry of past   | time of the last use : 16 | uses - 1 : 4 | 12 |
//                              in units, modulo 2^16                      log2(depth + 1) / tag
//
// The remembered use of blocks that are gone is 2Q's (Johnson and Shasha 1994) and ARC's (Megiddo
// and Modha 2003); a sum of time and a weight of the uses is LRFU's (Lee et al. 2001).
#include <stdbool.h>
#include <stddef.h>

#include "kvcache/kv_policy.h"

enum { // words of kv_policy_state
    TIME,
    NUM_GAPS,
    SUM_GAPS,
    BLOCKS, // in the tree
};

enum {
    MAX_USES = 16,
    MAX_DEPTH_LOG2 = 15,
    DEPTH_WEIGHT = 16, // of a doubling of depth, in 1/256 of a doubling of uses
    MAX_GAPS = 8192,   // that the mean is of; half of them are forgotten then
    SET = 8,           // entries of past
    TIME_UNITS = 1024, // in the time in which each block could be used once
};

#define LOW_BITS  12
#define LOW_MASK  ((UINT32_C(1) << LOW_BITS) - 1)
#define TIME_MASK UINT32_C(0xffff)

// uses_log2[u - 1] is log2(u) in 1/256.
static const uint16_t uses_log2[MAX_USES] = {0,   256, 406, 512, 594, 662, 719,  768,
                                             811, 850, 886, 918, 947, 975, 1000, 1024};

static uint64_t unit(const kv_policy_state *st) {
    return 1 + st->num_past / (KV_POLICY_PAST * TIME_UNITS);
}

static uint32_t now(const kv_policy_state *st) {
    return (uint32_t)(st->words[TIME] / unit(st)) & TIME_MASK;
}

static uint32_t word_of(const kv_policy_state *st, uint32_t uses, uint32_t low) {
    return now(st) << 16 | (uses - 1) << LOW_BITS | low;
}

static uint32_t uses_of(uint32_t word) {
    return (word >> LOW_BITS) % MAX_USES + 1;
}

// used_again notes the gap behind the use that a word is of, and returns how many uses that makes.
static uint32_t used_again(kv_policy_state *st, uint32_t word) {
    st->words[SUM_GAPS] += ((now(st) - (word >> 16)) & TIME_MASK) * unit(st);
    if (++st->words[NUM_GAPS] == MAX_GAPS) {
        st->words[NUM_GAPS] /= 2;
        st->words[SUM_GAPS] /= 2;
    }
    return uses_of(word) < MAX_USES ? uses_of(word) + 1 : MAX_USES;
}

// ---- blocks that are gone

// set_of returns the set that a key belongs to, NULL when there is no room for any, and its tag.
static uint32_t *set_of(kv_policy_state *st, uint32_t key, uint32_t *tag) {
    uint64_t at = (uint64_t)key * (st->num_past / SET);
    *tag = 1 + (uint32_t)(((at & UINT32_MAX) * LOW_MASK) >> 32); // never 0: that is no entry
    return st->num_past < SET ? NULL : st->past + (at >> 32) * SET;
}

static void remember(kv_policy_state *st, uint32_t key, uint32_t word) {
    uint32_t tag, *set = set_of(st, key, &tag);
    for (uint32_t i = SET - 1; set && i > 0; i--) {
        set[i] = set[i - 1];
    }
    if (set) {
        set[0] = (word & ~LOW_MASK) | tag;
    }
}

// recall takes what is remembered of a block; false when that is nothing.
static bool recall(kv_policy_state *st, uint32_t key, uint32_t *word) {
    uint32_t tag, *set = set_of(st, key, &tag), i = 0;
    while (set && i < SET && (set[i] & LOW_MASK) != tag) {
        i++;
    }
    if (!set || i == SET) {
        return false;
    }
    *word = set[i];
    for (; i + 1 < SET; i++) {
        set[i] = set[i + 1];
    }
    set[SET - 1] = 0;
    return true;
}

// ---- the policy

static uint32_t depth_log2(uint32_t depth) {
    uint32_t log2 = 0;
    while (log2 < MAX_DEPTH_LOG2 && (depth + 1) >> (log2 + 1) > 0) {
        log2++;
    }
    return log2;
}

static void count_use(kv_policy_state *st) {
    st->words[TIME]++;
    kv_policy_tick(st);
}

static void reuse_insert(kv_policy_state *st, kv_rank *block, uint32_t key, uint32_t depth) {
    uint32_t past, uses = 1;
    count_use(st);
    st->words[BLOCKS]++;
    if (recall(st, key, &past)) {
        uses = used_again(st, past);
    }
    block->word = word_of(st, uses, depth_log2(depth));
}

static void reuse_hit(kv_policy_state *st, kv_rank *block) {
    count_use(st);
    block->word = word_of(st, used_again(st, block->word), block->word & LOW_MASK);
}

// The use ends here, and with it the time that the next gap is counted from.
static void reuse_release(kv_policy_state *st, kv_rank *block) {
    uint32_t uses = uses_of(block->word), depth = block->word & LOW_MASK;
    uint64_t doubling = st->words[NUM_GAPS] ? st->words[SUM_GAPS] / st->words[NUM_GAPS] : 0;
    if (doubling > st->words[BLOCKS]) {
        doubling = st->words[BLOCKS];
    }
    uint32_t weight = uses_log2[uses - 1] + DEPTH_WEIGHT * (MAX_DEPTH_LOG2 - depth);
    block->word = word_of(st, uses, depth);
    block->rank = st->clock + (uint32_t)(doubling * weight / 256);
}

static void reuse_evict(kv_policy_state *st, const kv_rank *block, uint32_t key) {
    st->words[BLOCKS]--;
    remember(st, key, block->word);
}

const kv_policy kv_policy_reuse = {
    .name = "reuse",
    .insert = reuse_insert,
    .hit = reuse_hit,
    .release = reuse_release,
    .evict = reuse_evict,
};
