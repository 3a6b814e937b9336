// attn_mask answers which keys a query token sees: causal, window, tree mask, block mask.  Inline,
// because kernels ask in inner loops.  64-bit inside, so that no window overflows.  The row has
// passed attn_check.  Any thread.
#ifndef ATTND_ATTENTION_ATTN_MASK_H
#define ATTND_ATTENTION_ATTN_MASK_H

#include "attention/attn.h"

// attn_span is keys [first, end) of the sequence, first <= end.
typedef struct attn_span {
    int32_t first, end;
} attn_span;

// attn_bits_below returns the n lowest bits set, n from 0 to 64.
static inline uint64_t attn_bits_below(int32_t n) {
    return n >= 64 ? ~0ull : (1ull << n) - 1;
}

// attn_mask_span returns the keys that causal and window let tokens token_first to token_last (both
// included) see together.  All of them are live.  Both ends only grow with the token.
static inline attn_span attn_mask_span(const attn_row *row, int32_t token_first,
                                       int32_t token_last) {
    int64_t shift = (int64_t)row->kv_len - row->q_len; // the diagonal of token i is key i + shift
    int64_t first = row->window_left < 0 ? 0 : token_first + shift - row->window_left;
    int64_t end = row->window_right < 0 ? row->kv_len : token_last + shift + row->window_right + 1;
    if ((row->flags & ATTN_CAUSAL) && end > token_last + shift + 1) {
        end = token_last + shift + 1;
    }
    end = end > row->kv_len ? row->kv_len : end;
    end = end < 0 ? 0 : end;
    first = first < 0 ? 0 : first;
    first = first > end ? end : first;
    return (attn_span){(int32_t)first, (int32_t)end};
}

// attn_mask_seen returns what causal and window let a token see, be it in the sequence or not:
// token + i sees from max(0, first + i) to before min(kv_len, end + i).  The ends may still be
// moved by any number of tokens.
static inline attn_span attn_mask_seen(const attn_row *row, int32_t token) {
    const int64_t most = ATTN_MAX_TOKENS;
    int64_t at = (int64_t)row->kv_len - row->q_len + token;
    int64_t first = row->window_left < 0 ? -most : at - row->window_left;
    int64_t end = row->window_right < 0 ? most : at + row->window_right + 1;
    end = (row->flags & ATTN_CAUSAL) && end > at + 1 ? at + 1 : end;
    first = first < -most ? -most : first > most ? most : first;
    end = end < -most ? -most : end > most ? most : end;
    return (attn_span){(int32_t)first, (int32_t)end};
}

// attn_mask_is_full says that each of the tokens sees each of keys [key, key + count) as far as
// causal, window and tree mask go.
static inline bool attn_mask_is_full(const attn_row *row, int32_t token_first, int32_t token_last,
                                     int32_t key, int32_t count) {
    attn_span low = attn_mask_span(row, token_first, token_first);
    attn_span high = attn_mask_span(row, token_last, token_last);
    int64_t old_keys = (int64_t)row->kv_len - row->q_len; // a tree mask rules those behind
    return key >= high.first && key + count <= low.end &&
           (!row->tree_mask || key + count <= old_keys);
}

// attn_mask_tree_bits is the tree mask of a token for keys [key, key + count), count <= 64: bit b
// is set when key + b is old or its bit is.
static inline uint64_t attn_mask_tree_bits(const attn_row *row, int32_t token, int32_t key,
                                           int32_t count) {
    int64_t old_keys = (int64_t)row->kv_len - row->q_len;
    int64_t num_old = old_keys - key;
    if (num_old >= count) {
        return ~0ull;
    }
    uint64_t bits = num_old > 0 ? attn_bits_below((int32_t)num_old) : 0;
    uint64_t words = ((uint64_t)row->q_len + 63) / 64;
    const uint64_t *tree = row->tree_mask + (uint64_t)token * words;
    int64_t lead = num_old > 0 ? num_old : 0; // bit of the first new key
    int64_t bit = num_old > 0 ? 0 : -num_old; // its bit in the tree mask
    uint64_t word = (uint64_t)bit / 64;
    int32_t offset = (int32_t)(bit % 64);
    uint64_t tree_bits = tree[word] >> offset;
    if (offset > 0 && word + 1 < words) {
        tree_bits |= tree[word + 1] << (64 - offset);
    }
    return bits | tree_bits << lead;
}

// attn_mask_bits returns a bit per key of [key, key + count), count <= 64: set when the token sees
// it, as far as causal, window and tree mask go.  Keys at or behind kv_len are never seen.
static inline uint64_t attn_mask_bits(const attn_row *row, int32_t token, int32_t key,
                                      int32_t count) {
    attn_span span = attn_mask_span(row, token, token);
    if (span.first >= key + count || span.end <= key) {
        return 0;
    }
    uint64_t bits = attn_bits_below(count);
    if (span.first > key) {
        bits &= ~attn_bits_below(span.first - key);
    }
    if (span.end < key + count) {
        bits &= attn_bits_below(span.end - key);
    }
    return row->tree_mask && bits ? bits & attn_mask_tree_bits(row, token, key, count) : bits;
}

// attn_mask_block_bits is the block mask alone, for the query block of token and keys [key, key +
// count), count <= 64.  All ones without a block mask.
static inline uint64_t attn_mask_block_bits(const attn_row *row, int32_t block_tokens,
                                            int32_t token, int32_t key, int32_t count) {
    const attn_block_mask *mask = row->block_mask;
    if (!mask) {
        return attn_bits_below(count);
    }
    uint32_t low = mask->start[token / mask->q_block];
    uint32_t end = mask->start[token / mask->q_block + 1];
    uint32_t block = (uint32_t)(key / block_tokens);
    for (uint32_t high = end; low < high;) { // first listed block that is not before block
        uint32_t middle = low + (high - low) / 2;
        if (mask->kv_blocks[middle] < block) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    uint64_t bits = 0;
    for (; low < end; low++) {
        int64_t first = (int64_t)mask->kv_blocks[low] * block_tokens - key;
        if (first >= count) {
            break;
        }
        int64_t behind = first + block_tokens > count ? count : first + block_tokens;
        bits |= attn_bits_below((int32_t)behind) & ~attn_bits_below(first > 0 ? (int32_t)first : 0);
    }
    return bits;
}

#endif
