// Sequences in the prefix tree: see kv_chain.h.
//
//     depth    blocks of the path to the chain's node: committed / block_tokens while all ids are
//              known, or one more when the sequence was truncated within a node's block, which it
//              goes on to have until it writes (and so copies)
//     tail     the ids of tokens behind the last full block, in one of two rows of seq_ids; a
//              commit that fills the block puts the new ones into the other row, so that the
//              record that names the row decides
//
// A block becomes a node by a record of its own, behind that of the commit.  A stop in between
// leaves a sequence with fewer nodes than it could have, and its later tokens then make none.
#include "kvcache/kv_chain.h"

#include <string.h>

#include "kvcache/kv_redo.h"
#include "kvcache/kv_spill.h"
#include "kvcache/kv_sum.h"

static uint32_t block_tokens_of(const kv_cache *kv, uint32_t idx) {
    return kv->models[kv->seqs[idx].model].spec.groups[0].block_tokens;
}

static uint32_t *tail_of(const kv_cache *kv, uint32_t idx, uint32_t half) {
    return kv->seq_ids + ((uint64_t)idx * 2 + half) * kv->opts.prefix_block_tokens;
}

static uint32_t chain_of(const kv_cache *kv, uint32_t idx) {
    return kv->seqs[idx].chain ? kv->seqs[idx].chain - 1 : KV_NONE;
}

static uint64_t sum_ids(const uint32_t *ids, uint32_t from, uint32_t to) {
    uint64_t sum = 0;
    for (uint32_t i = from; i < to; i++) {
        sum += kv_sum_entry(i, ids[i]);
    }
    return sum;
}

// is_known says whether the ids of all committed tokens are known, and the chain leads to them.
static bool is_known(const kv_cache *kv, uint32_t idx) {
    const kv_led_seq *s = &kv->seqs[idx];
    if (s->known != s->committed || kv_prefix_can(kv, &kv->models[s->model].spec, NULL)) {
        return false;
    }
    uint32_t block_tokens = block_tokens_of(kv, idx), depth = kv->seq_aux[idx].depth;
    uint32_t full = s->committed / block_tokens;
    return depth == full || (depth == full + 1 && s->committed % block_tokens);
}

// ancestor returns the node num before one, KV_NONE for the root.
static uint32_t ancestor(const kv_cache *kv, uint32_t node, uint32_t num) {
    while (num-- > 0) {
        node = kv_prefix_parent(kv, node);
    }
    return node;
}

static void put_chain(kv_cache *kv, uint32_t idx, uint32_t node) {
    kv_led_seq *s = &kv->seqs[idx];
    kv_redo_put(kv, &s->chain, node == KV_NONE ? 0 : node + 1);
    kv_redo_put(kv, &s->chain_generation, node == KV_NONE ? 0 : kv->nodes[node].generation);
}

// settle makes the sequence a user of the node that its record names, at depth `depth`.
static void settle(kv_cache *kv, uint32_t idx, uint32_t depth) {
    kv_seq_aux *aux = &kv->seq_aux[idx];
    uint32_t old = aux->held, new = kv->seqs[idx].chain;
    aux->depth = depth;
    aux->held = new;
    if (new != old &&new) {
        kv_prefix_hold(kv, new - 1);
    }
    if (new != old && old) {
        kv_prefix_rele(kv, old - 1);
    }
}

// can_find says whether what a step may take over can be looked up.
static bool can_find(const kv_cache *kv, uint32_t idx, const uint32_t *tokens, uint32_t new_len) {
    return tokens && new_len > 1 && is_known(kv, idx) &&
           kv->seqs[idx].committed % block_tokens_of(kv, idx) == 0;
}

void kv_chain_find(const kv_cache *kv, uint32_t idx, const uint32_t *tokens, uint32_t new_len,
                   kv_prefix_hit *out) {
    const kv_led_seq *s = &kv->seqs[idx];
    *out = (kv_prefix_hit){.node = KV_NONE, .partial = KV_NONE};
    if (can_find(kv, idx, tokens, new_len)) {
        kv_prefix_find(kv, s->model, chain_of(kv, idx), s->committed / block_tokens_of(kv, idx),
                       tokens, new_len - 1, out);
    }
}

bool kv_chain_fetch(kv_cache *kv, uint32_t idx, const uint32_t *tokens, uint32_t new_len,
                    const kv_prefix_hit *found) {
    uint32_t whole = found->depth * block_tokens_of(kv, idx);
    return can_find(kv, idx, tokens, new_len) &&
           kv_spill_fetch(kv, kv->seqs[idx].model, found->deepest, tokens + whole,
                          new_len - 1 - whole);
}

// ---- commit

// put_tail stores the ids behind the last full block where no reader looks, and puts where that is.
static void put_tail(kv_cache *kv, uint32_t idx, uint32_t accepted, const uint32_t *tokens) {
    kv_led_seq *s = &kv->seqs[idx];
    uint32_t block_tokens = block_tokens_of(kv, idx), len = s->committed + accepted;
    bool same = len / block_tokens == s->committed / block_tokens;
    uint32_t half = same ? s->tail_half : 1 - s->tail_half;
    uint32_t from = same ? s->committed % block_tokens : 0, to = len % block_tokens;
    uint32_t *tail = tail_of(kv, idx, half);
    for (uint32_t i = from; i < to; i++) {
        kv_store(&tail[i], tokens[accepted - (to - i)]);
    }
    kv_redo_put(kv, &s->known, len);
    kv_redo_put(kv, &s->tail_half, half);
    kv_redo_put64(kv, &s->tail_sum, (same ? s->tail_sum : 0) + sum_ids(tail, from, to));
}

void kv_chain_put(kv_cache *kv, uint32_t idx, uint32_t accepted, const uint32_t *tokens,
                  const kv_step_hit *hit) {
    const kv_led_seq *s = &kv->seqs[idx];
    uint32_t full = s->committed / block_tokens_of(kv, idx), depth = kv->seq_aux[idx].depth;
    if (accepted == 0) {
        return;
    }
    if (hit->node) {
        put_chain(kv, idx, hit->node - 1);
    } else if (depth > full) { // the node's block was copied
        put_chain(kv, idx, ancestor(kv, chain_of(kv, idx), depth - full));
    }
    if (tokens && is_known(kv, idx)) {
        put_tail(kv, idx, accepted, tokens);
    }
}

// filled returns the ids of block b, of which tokens behind the first `before` are given.  The row
// of the tail that was left is completed to the whole block: no reader looks at it any more.
static const uint32_t *filled(kv_cache *kv, uint32_t idx, uint32_t b, uint32_t before,
                              const uint32_t *tokens) {
    uint32_t block_tokens = block_tokens_of(kv, idx);
    if (b * block_tokens >= before) {
        return tokens + (b * block_tokens - before);
    }
    uint32_t *tail = tail_of(kv, idx, 1 - kv->seqs[idx].tail_half);
    for (uint32_t i = before % block_tokens; i < block_tokens; i++) {
        kv_store(&tail[i], tokens[i - before % block_tokens]);
    }
    return tail;
}

// grow makes a node of block `depth`; false when none is free: then no more are made.
static bool grow(kv_cache *kv, uint32_t idx, uint32_t before, const uint32_t *tokens) {
    kv_led_seq *s = &kv->seqs[idx];
    uint32_t b = kv->seq_aux[idx].depth, from = chain_of(kv, idx), entries[KV_MAX_GROUPS];
    for (uint32_t g = 0; g < kv->models[s->model].spec.num_groups; g++) {
        entries[g] = kv_table(kv, idx, g)[b];
    }
    uint32_t node =
        kv_prefix_insert(kv, s->model, from, filled(kv, idx, b, before, tokens), entries, b, idx);
    if (node == KV_NONE) {
        kv_redo_begin(kv);
        kv_redo_put(kv, &s->known, 0);
        kv_redo_commit(kv);
        return false;
    }
    settle(kv, idx, b + 1);
    kv_prefix_rele(kv, node); // the insertion's own use
    return true;
}

void kv_chain_committed(kv_cache *kv, uint32_t idx, uint32_t before, const uint32_t *tokens,
                        const kv_step_hit *hit) {
    const kv_led_seq *s = &kv->seqs[idx];
    uint32_t block_tokens = block_tokens_of(kv, idx), depth = kv->seq_aux[idx].depth;
    uint32_t full = before / block_tokens, num = s->committed / block_tokens;
    if (s->committed == before) {
        return;
    }
    settle(kv, idx, hit->node ? full + hit->blocks : depth < full ? depth : full);
    bool grows = tokens && s->known == s->committed;
    while (grows && kv->seq_aux[idx].depth < num) {
        grows = grow(kv, idx, before, tokens);
    }
}

// ---- truncate

void kv_chain_put_cut(kv_cache *kv, uint32_t idx, uint32_t len) {
    kv_led_seq *s = &kv->seqs[idx];
    uint32_t block_tokens = block_tokens_of(kv, idx), depth = kv->seq_aux[idx].depth;
    uint32_t most = kv_blocks_of(len, block_tokens), chain = chain_of(kv, idx);
    if (depth > most) {
        chain = ancestor(kv, chain, depth - most);
        put_chain(kv, idx, chain);
        depth = most;
    }
    if (len >= s->known) {
        return;
    }
    ATTND_ASSERT(depth == most || len / block_tokens == s->known / block_tokens);
    uint32_t half = s->tail_half, num = len % block_tokens;
    if (num > 0 && len / block_tokens != s->known / block_tokens) { // the ids are a node's
        half = 1 - half;
        for (uint32_t i = 0; i < num; i++) {
            kv_store(&tail_of(kv, idx, half)[i], kv_node_ids(kv, chain)[i]);
        }
    }
    kv_redo_put(kv, &s->known, len);
    kv_redo_put(kv, &s->tail_half, half);
    kv_redo_put64(kv, &s->tail_sum, sum_ids(tail_of(kv, idx, half), 0, num));
}

void kv_chain_cut(kv_cache *kv, uint32_t idx) {
    uint32_t most = kv_blocks_of(kv->seqs[idx].committed, block_tokens_of(kv, idx));
    uint32_t depth = kv->seq_aux[idx].depth;
    settle(kv, idx, depth < most ? depth : most);
}

// ---- fork, free, recovery

void kv_chain_copy(kv_cache *kv, uint32_t from, uint32_t to) {
    const kv_led_seq *s = &kv->seqs[from];
    const uint32_t *src = tail_of(kv, from, s->tail_half);
    uint32_t *dst = tail_of(kv, to, s->tail_half);
    for (uint32_t i = 0; i < s->known % block_tokens_of(kv, from); i++) {
        kv_store(&dst[i], src[i]);
    }
}

void kv_chain_forked(kv_cache *kv, uint32_t from, uint32_t to) {
    settle(kv, to, kv->seq_aux[from].depth);
}

void kv_chain_drop(kv_cache *kv, uint32_t idx) {
    kv_seq_aux *aux = &kv->seq_aux[idx];
    if (aux->held) {
        kv_prefix_rele(kv, aux->held - 1);
    }
    aux->held = aux->depth = 0;
}

bool kv_chain_take_over(kv_cache *kv, uint32_t idx, uint32_t depth) {
    kv_led_seq *s = &kv->seqs[idx];
    bool good = s->known <= s->committed && s->tail_half < 2;
    settle(kv, idx, depth);
    if (good && s->known == s->committed && s->known > 0) {
        const uint32_t *tail = tail_of(kv, idx, s->tail_half);
        good = is_known(kv, idx) &&
               sum_ids(tail, 0, s->known % block_tokens_of(kv, idx)) == s->tail_sum;
    }
    return good;
}
