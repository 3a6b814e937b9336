// The redo record: see kv_redo.h for the idea.  All words are stored in program order (kv_store),
// which is enough here: a process that is killed leaves every store that it has executed in the
// shared memory, and only its own compiler could have moved them.
#include "kvcache/kv_redo.h"

#include <string.h>

#include "kvcache/kv_sum.h"

static kv_word *record_of(const kv_cache *kv, uint32_t number) {
    return kv->redo + (number & 1) * kv_redo_record_words(kv->redo_cap);
}

uint64_t kv_redo_checksum(const kv_word *record) {
    uint64_t seed = (uint64_t)record[0] << 32 | record[1];
    return kv_sum_bytes(record + KV_REDO_HEAD_WORDS, (size_t)8 * record[1], seed);
}

void kv_redo_begin(kv_cache *kv) {
    ATTND_ASSERT(!kv->redo_open);
    kv->redo_open = true;
    kv->redo_writes = 0;
}

// add adds a write, without a look at checksums.
static void add(kv_cache *kv, uint32_t word_idx, uint32_t value) {
    ATTND_ASSERT(kv->redo_open && kv->redo_writes < kv->redo_cap);
    kv_word *write =
        record_of(kv, kv->head->published + 1) + KV_REDO_HEAD_WORDS + (size_t)2 * kv->redo_writes++;
    kv_store(&write[0], word_idx);
    kv_store(&write[1], value);
}

void kv_redo_put(kv_cache *kv, kv_word *word, uint32_t value) {
    uint32_t idx = (uint32_t)(word - kv->base);
    kv->sum_deltas[idx / KV_SUM_WORDS] += kv_sum_word(idx, value) - kv_sum_word(idx, *word);
    add(kv, idx, value);
}

void kv_redo_put64(kv_cache *kv, uint64_t *word, uint64_t value) {
    kv_redo_put_bytes(kv, word, &value, sizeof(value));
}

void kv_redo_put_bytes(kv_cache *kv, void *dst, const void *src, size_t bytes) {
    ATTND_ASSERT(bytes % sizeof(uint32_t) == 0);
    for (size_t i = 0; i < bytes / sizeof(uint32_t); i++) {
        uint32_t value;
        memcpy(&value, (const char *)src + i * sizeof(value), sizeof(value));
        kv_redo_put(kv, (kv_word *)dst + i, value);
    }
}

static uint64_t unit_sum(const kv_cache *kv, uint32_t unit) {
    const kv_word *published = (const kv_word *)&kv->head->published;
    uint32_t first = unit * KV_SUM_WORDS;
    uint64_t sum = 0;
    for (uint32_t i = first; i < first + KV_SUM_WORDS; i++) {
        sum += &kv->base[i] == published ? 0 : kv_sum_word(i, kv->base[i]);
    }
    return sum;
}

bool kv_redo_unit_good(const kv_cache *kv, uint32_t unit) {
    return unit_sum(kv, unit) == kv->sums[unit];
}

// The write that changes nothing makes add_sums see the unit.
void kv_redo_accept(kv_cache *kv, uint32_t unit) {
    kv_word *first = kv->base + (size_t)unit * KV_SUM_WORDS;
    kv_redo_put(kv, first, *first);
    kv->sum_deltas[unit] += unit_sum(kv, unit) - kv->sums[unit];
}

// add_sums adds the checksums of the units that the writes change.
static void add_sums(kv_cache *kv) {
    const kv_word *writes = record_of(kv, kv->head->published + 1) + KV_REDO_HEAD_WORDS;
    uint32_t num = kv->redo_writes;
    for (uint32_t i = 0; i < num; i++) {
        uint32_t unit = writes[(size_t)2 * i] / KV_SUM_WORDS;
        uint64_t sum = kv->sums[unit] + kv->sum_deltas[unit];
        if (kv->sum_deltas[unit]) {
            uint32_t at = (uint32_t)((kv_word *)&kv->sums[unit] - kv->base);
            add(kv, at, (uint32_t)sum);
            add(kv, at + 1, (uint32_t)(sum >> 32));
            kv->sum_deltas[unit] = 0;
        }
    }
}

static void apply(kv_cache *kv, const kv_word *record) {
    for (uint32_t i = 0; i < record[1]; i++) {
        const kv_word *write = record + KV_REDO_HEAD_WORDS + (size_t)2 * i;
        kv_store(&kv->base[write[0]], write[1]);
    }
}

void kv_redo_commit(kv_cache *kv) {
    ATTND_ASSERT(kv->redo_open);
    add_sums(kv);
    uint32_t number = kv->head->published + 1;
    kv_word *record = record_of(kv, number);
    kv_store(&record[0], number);
    kv_store(&record[1], kv->redo_writes);
    uint64_t checksum = kv_redo_checksum(record);
    kv_store(&record[2], (uint32_t)checksum);
    kv_store(&record[3], (uint32_t)(checksum >> 32));
    kv_store(&kv->head->published, number); // the committing store
    apply(kv, record);
    kv->redo_open = false;
}

// ---- again

static bool is_whole(const kv_cache *kv, uint32_t number) {
    const kv_word *record = record_of(kv, number);
    uint64_t checksum = (uint64_t)record[3] << 32 | record[2];
    if (record[0] != number || record[1] > kv->redo_cap || checksum != kv_redo_checksum(record)) {
        return false;
    }
    for (uint32_t i = 0; i < record[1]; i++) {
        if (record[KV_REDO_HEAD_WORDS + (size_t)2 * i] >= (kv_word *)kv->lists - kv->base) {
            return false;
        }
    }
    return true;
}

// published is believed when it names a whole record.  Else it, or the record, is damaged.  The
// newest whole record then is the one that was published, or one that was about to be, which may be
// applied, too; unless it is the one before: that one is applied already, and so may be its
// successor, which it would undo.
bool kv_redo_again(kv_cache *kv) {
    uint32_t published = kv->head->published;
    if (is_whole(kv, published)) {
        apply(kv, record_of(kv, published));
        return true;
    }
    uint32_t a = record_of(kv, 0)[0], b = record_of(kv, 1)[0];
    bool a_whole = a % 2 == 0 && is_whole(kv, a), b_whole = b % 2 == 1 && is_whole(kv, b);
    uint32_t newest = !b_whole || (a_whole && (int32_t)(a - b) > 0) ? a : b;
    if ((a_whole || b_whole) && newest + 1 != published) {
        kv_store(&kv->head->published, newest);
        apply(kv, record_of(kv, newest));
    }
    return false;
}
