// kv_sum has the checksums of the ledger (kv_ledger.h says what they are of), all made of XXH3.
// Any thread.
#ifndef ATTND_KVCACHE_KV_SUM_H
#define ATTND_KVCACHE_KV_SUM_H

#define XXH_INLINE_ALL
#include <stddef.h>
#include <stdint.h>
#include <xxhash.h>

// kv_sum_word is what a word of the ledger adds to the checksum of its unit.
static inline uint64_t kv_sum_word(uint32_t word_idx, uint32_t value) {
    return value ? XXH3_64bits_withSeed(&value, sizeof(value), word_idx) : 0;
}

// kv_sum_entry is what entry b of a table adds to the checksum of the table.
static inline uint64_t kv_sum_entry(uint32_t b, uint32_t entry) {
    return XXH3_64bits_withSeed(&entry, sizeof(entry), b);
}

static inline uint64_t kv_sum_entries(const uint32_t *table, uint32_t from, uint32_t to) {
    uint64_t sum = 0;
    for (uint32_t b = from; b < to; b++) {
        sum += kv_sum_entry(b, table[b]);
    }
    return sum;
}

static inline uint64_t kv_sum_bytes(const void *data, size_t bytes, uint64_t seed) {
    return XXH3_64bits_withSeed(data, bytes, seed);
}

#endif
