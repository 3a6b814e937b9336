// kv_window says which blocks of a layer group with a left window a sequence still needs, and gives
// the others back.
//
// A row at place p of a sequence sees keys from p - window_left on, and no later row looks further
// back: a block that ends before that is of no use to what is to come.  So a commit gives blocks
// back, by the place of the *first* row that it commits, less opts.window_margin tokens:
//
//     first = max(what it was, (committed + found - window_left - window_margin) / block_tokens)
//
// where committed and found (whole blocks from the prefix cache) are those of the step.  By the
// first row and not by the new length, so that what was committed last can be computed again
// (decode and prefill are repeatable), and so that a sequence can always be truncated to where its
// last commit began, and window_margin tokens further: what is rejected of a speculation that was
// committed row by row.  A long sequence has window_left + window_margin + two steps' tokens of
// such a group, and no more.  A commit that accepts nothing, and an abort, give nothing back.
//
// seqs.first[g], in the commit's record, is the first block that is left.  Entries before it are
// KV_NONE: stored behind the record, where no reader looks; recovery stores them again.  A block
// that others use, or the prefix tree has, stays with these.  One that only the tree has is cached,
// for sequences that begin alike and end there; it makes way when nothing else can that is cached
// (kv_window_evict_for), though its node is in use, which then lacks it.
//
// What has been given back does not come again: a truncation that would need it, or rows to be read
// that see it, are ATTND_ENOTSUP.  Of length 0 nothing is needed, and the table is empty then.
// Loop thread only.
#ifndef ATTND_KVCACHE_KV_WINDOW_H
#define ATTND_KVCACHE_KV_WINDOW_H

#include "kvcache/kv_ledger.h"
#include "kvcache/kv_pool.h"

// kv_window_first returns the first block of a group that a sequence needs for rows from place `at`
// on, the margin included.
static inline uint32_t kv_window_first(const kv_cache *kv, const kv_group_spec *group,
                                       uint64_t at) {
    uint64_t back = (uint64_t)group->window_left + kv->opts.window_margin;
    return group->window_left < 0 || at <= back ? 0 : (uint32_t)((at - back) / group->block_tokens);
}

// kv_window_found returns the first of `found` whole blocks behind the `have` committed ones that a
// step takes over: those before it lie behind the window of the step's first row.
static inline uint32_t kv_window_found(const kv_cache *kv, const kv_group_spec *group,
                                       uint32_t have, uint32_t found) {
    uint64_t at = (uint64_t)(have + found) * group->block_tokens;
    uint32_t first = found > 0 ? kv_window_first(kv, group, at) : have;
    return first > have ? first : have;
}

// kv_window_check says whether a sequence has what rows from place `at` on see: ATTND_ENOTSUP with
// that field, of what is asked for; at < 0 is before all tokens.
attnd_err kv_window_check(const kv_cache *kv, uint32_t idx, int64_t at, const char *field,
                          attnd_errinfo *info);

// kv_window_give gives back blocks [from, to) of a group and stores that there are none.
void kv_window_give(kv_cache *kv, uint32_t idx, uint32_t group, uint32_t from, uint32_t to);

// kv_window_evict_for does what kv_evict_for could not: it takes cached blocks from nodes in use,
// in groups with a window, as many as it takes; false when that does not help.  From is the node
// from which on it goes back, KV_NONE: from those that live sequences are users of.  Not of another
// tenant that would have less than its floor.
bool kv_window_evict_for(kv_cache *kv, uint32_t from, uint32_t tenant, const kv_need *needs,
                         uint32_t num, uint64_t take);

#endif
