// kv_redo commits a change of the ledger by one store.  An operation checks everything, prepares
// what no reader sees, then lists the words that it changes and what they become; kv_redo_commit
// seals the list with a checksum, publishes it by one store to head.published, and only then writes
// the words.  The words become what the list says whether it is applied once or again, so whoever
// finds a published record applies it again and has the whole change; a record that was not
// published has changed nothing.
//
// Record n lies in the half n % 2, so the newest published one stays whole while the next is made:
//     number, num_writes, checksum (2 words, low first), then (word, value) [num_writes]
// word counts 32-bit words from the start of the region.  The checksum covers number, num_writes
// and the writes (kv_redo_checksum).  The last writes are the new checksums of the units that the
// others change.  A word is put once a record.  Loop thread only.
#ifndef ATTND_KVCACHE_KV_REDO_H
#define ATTND_KVCACHE_KV_REDO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvcache/kv_ledger.h"

enum { KV_REDO_HEAD_WORDS = 4 };

// kv_redo_writes returns how many writes the largest operation makes: the commit of a step of
// max_step_seqs sequences, of each its length twice, old_last, first and checksums of its tables,
// its place in the prefix tree, and the checksums of three units.
static inline uint32_t kv_redo_writes(uint32_t max_step_seqs) {
    return (4 * KV_MAX_GROUPS + 16) * max_step_seqs + 512;
}

static inline uint64_t kv_redo_record_words(uint32_t cap) {
    return KV_REDO_HEAD_WORDS + UINT64_C(2) * cap;
}

uint64_t kv_redo_checksum(const kv_word *record);

// kv_redo_again applies the newest record again, whatever it was when the process that made it was
// killed; false when it is damaged, and nothing was applied.
bool kv_redo_again(kv_cache *kv);

// kv_redo_begin starts a record; one at a time.
void kv_redo_begin(kv_cache *kv);

// kv_redo_put adds: the word becomes value.
void kv_redo_put(kv_cache *kv, kv_word *word, uint32_t value);
void kv_redo_put64(kv_cache *kv, uint64_t *word, uint64_t value);

// kv_redo_put_bytes adds: bytes (a multiple of 4) at dst, 4-aligned, become src.
void kv_redo_put_bytes(kv_cache *kv, void *dst, const void *src, size_t bytes);

// kv_redo_unit_good says whether what a unit holds has the checksum that it should.
bool kv_redo_unit_good(const kv_cache *kv, uint32_t unit);

// kv_redo_accept puts the right checksum of a unit that is not good: of what it holds, and of what
// else the record changes.
void kv_redo_accept(kv_cache *kv, uint32_t unit);

// kv_redo_commit publishes the record, the committing store of its operation, and applies it.
void kv_redo_commit(kv_cache *kv);

#endif
