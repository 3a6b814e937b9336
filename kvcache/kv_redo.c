// The redo record: see kv_redo.h for the idea.  All words are stored in program order (kv_store),
// which is enough here: a process that is killed leaves every store that it has executed in the
// shared memory, and only its own compiler could have moved them.
#include "kvcache/kv_redo.h"

#include <string.h>

static kv_word *record_of(const kv_cache *kv, uint32_t number) {
    return kv->redo + (number & 1) * kv_redo_record_words(kv->redo_cap);
}

// Each word is folded in by an odd multiplication and a shift, so that every bit of the record
// reaches the high and the low half; the two words that hold the checksum are left out.
uint64_t kv_redo_checksum(const kv_word *record) {
    uint64_t h = UINT64_C(0x9e3779b97f4a7c15);
    for (uint64_t i = 0; i < KV_REDO_HEAD_WORDS + UINT64_C(2) * record[1]; i++) {
        if (i != 2 && i != 3) {
            h = (h ^ record[i]) * UINT64_C(0xff51afd7ed558ccd);
            h ^= h >> 32;
        }
    }
    return h;
}

void kv_redo_begin(kv_cache *kv) {
    ATTND_ASSERT(!kv->redo_open);
    kv->redo_open = true;
    kv->redo_writes = 0;
}

void kv_redo_put(kv_cache *kv, kv_word *word, uint32_t value) {
    ATTND_ASSERT(kv->redo_open && kv->redo_writes < kv->redo_cap);
    kv_word *write =
        record_of(kv, kv->head->published + 1) + KV_REDO_HEAD_WORDS + (size_t)2 * kv->redo_writes++;
    kv_store(&write[0], (uint32_t)(word - kv->base));
    kv_store(&write[1], value);
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

void kv_redo_commit(kv_cache *kv) {
    ATTND_ASSERT(kv->redo_open);
    uint32_t number = kv->head->published + 1;
    kv_word *record = record_of(kv, number);
    kv_store(&record[0], number);
    kv_store(&record[1], kv->redo_writes);
    uint64_t checksum = kv_redo_checksum(record);
    kv_store(&record[2], (uint32_t)checksum);
    kv_store(&record[3], (uint32_t)(checksum >> 32));
    kv_store(&kv->head->published, number); // the committing store
    for (uint32_t i = 0; i < kv->redo_writes; i++) {
        const kv_word *write = record + KV_REDO_HEAD_WORDS + (size_t)2 * i;
        kv_store(&kv->base[write[0]], write[1]);
    }
    kv->redo_open = false;
}
