// kv_arena is the memory that blocks lie in: one memfd of the host, or one exported allocation of a
// GPU (attention/cuda makes that one; kvcache includes no CUDA header).  The creator owns it.
#ifndef ATTND_KVCACHE_KV_ARENA_H
#define ATTND_KVCACHE_KV_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/err.h"

typedef enum kv_pages { KV_PAGES_SMALL, KV_PAGES_TRANSPARENT_HUGE, KV_PAGES_HUGE } kv_pages;

typedef struct kv_arena {
    void *base; // of the mapping: host address, or device address
    uint64_t bytes;
    int fd;         // memfd or exported allocation; -1 = none
    bool on_device; // base must not be dereferenced by the host
    kv_pages pages; // what was got
} kv_arena;

// kv_arena_open_host makes a memfd arena of bytes (rounded up to 2 MiB), sealed against shrinking
// and growing.  It asks for huge pages first (MFD_HUGETLB), then for transparent ones (madvise),
// and takes small ones last: arena->pages says which.  ATTND_ENOMEM.  kv_arena_close_host gives it
// back.
attnd_err kv_arena_open_host(kv_arena *arena, uint64_t bytes, attnd_errinfo *info);
void kv_arena_close_host(kv_arena *arena);

#endif
