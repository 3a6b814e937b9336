// kv_arena is the memory that blocks lie in: one memfd of the host, or one exported allocation of a
// GPU.  What can be done with it comes as a table, since kvcache includes no CUDA header: the
// host's is here, a GPU's is the server's (srv_gpu), over attention's.  The creator owns an arena.
#ifndef ATTND_KVCACHE_KV_ARENA_H
#define ATTND_KVCACHE_KV_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/err.h"

typedef enum kv_pages { KV_PAGES_SMALL, KV_PAGES_TRANSPARENT_HUGE, KV_PAGES_HUGE } kv_pages;

typedef struct kv_arena_ops kv_arena_ops;

typedef struct kv_arena {
    void *base; // of the mapping: host address, or device address
    uint64_t bytes;
    int fd;         // memfd or exported allocation; -1 = none
    bool on_device; // base must not be dereferenced by the host
    kv_pages pages; // what was got; a GPU's are huge
    const kv_arena_ops *ops;
    void *owner; // of ops, NULL for the host's
} kv_arena;

// kv_move moves num_rows rows: row r, of row_bytes, from src + r * pitch to dst + r * pitch (bytes
// from the arena's base).  No two of these ranges overlap, at the source, at the destination or
// between them.
typedef struct kv_move {
    uint64_t src, dst, row_bytes, pitch;
    uint64_t num_rows;
} kv_move;

struct kv_arena_ops {
    const char *kind; // "host" or "device"
    // move makes a move.  On a device it takes its place in the order of launches, and an error of
    // it may show later; it is called by the thread that owns the device's stream.  ATTND_ECUDA.
    attnd_err (*move)(const kv_arena *arena, const kv_move *move, attnd_errinfo *info);
    // read and write copy bytes from and to off (bytes from the arena's base); the copy has been
    // made when they return.  On a device they have an order of their own, beside launches: of the
    // same bytes, what wrote them must be known to have ended.  Any thread, one at a time.
    // ATTND_ECUDA.
    attnd_err (*read)(const kv_arena *arena, void *dst, uint64_t off, uint64_t bytes,
                      attnd_errinfo *info);
    attnd_err (*write)(const kv_arena *arena, uint64_t off, const void *src, uint64_t bytes,
                       attnd_errinfo *info);
    // pin makes host memory that reads and writes use faster for them, unpin undoes it; false: it
    // stays as it is.  NULL: there is nothing to gain.
    bool (*pin)(const kv_arena *arena, void *base, uint64_t bytes);
    void (*unpin)(const kv_arena *arena, void *base);
};

extern const kv_arena_ops kv_arena_host_ops;

// kv_arena_open_host makes a memfd arena of bytes (rounded up to 2 MiB), sealed against shrinking
// and growing.  It asks for huge pages first (MFD_HUGETLB), then for transparent ones (madvise),
// and takes small ones last: arena->pages says which.  ATTND_ENOMEM.  kv_arena_close_host gives it
// back.
attnd_err kv_arena_open_host(kv_arena *arena, uint64_t bytes, attnd_errinfo *info);

// kv_arena_adopt_host maps an arena that another process has made with the same bytes, and owns fd
// on success.  ATTND_EINVAL: it has another size, or is not sealed, so that it could shrink under
// us.  ATTND_ENOMEM.
attnd_err kv_arena_adopt_host(kv_arena *arena, int fd, uint64_t bytes, attnd_errinfo *info);

void kv_arena_close_host(kv_arena *arena);

#endif
