// kv_name reads the names of tenants, models and sequences into their fixed, zero-padded form, in
// which equal names are equal bytes.  Any thread.
#ifndef ATTND_KVCACHE_KV_NAME_H
#define ATTND_KVCACHE_KV_NAME_H

#include <stdbool.h>
#include <string.h>

#include "kvcache/kv_cache.h"

// kv_name_read fills out; false when name does not end within KV_NAME_BYTES.
static inline bool kv_name_read(char out[KV_NAME_BYTES], const char *name) {
    size_t len = strnlen(name, KV_NAME_BYTES);
    if (len == KV_NAME_BYTES) {
        return false;
    }
    memset(out, 0, KV_NAME_BYTES);
    memcpy(out, name, len);
    return true;
}

static inline bool kv_name_equal(const char a[KV_NAME_BYTES], const char b[KV_NAME_BYTES]) {
    return memcmp(a, b, KV_NAME_BYTES) == 0;
}

#endif
