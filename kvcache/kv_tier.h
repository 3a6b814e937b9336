// kv_tier is a store of block images outside the arena: host memory (kv_tier_open_memory) or a file
// (kv_tier_open_file).  A job copies one image to a slot of the tier or back; the tier's own thread
// does it, so that neither the loop nor a device's stream waits for it.  An image is the block of
// each layer group, one behind the other.
//
//     loop thread                      tier's thread
//     kv_tier_submit            ->     copy, checksum, write or read
//     kv_tier_take_ended        <-     opts.ended()
//
// Bounds: at most opts.depth jobs are queued, running or ended and not taken; one more is
// ATTND_EBUSY.  A job's blocks must stay as they are, and its slot taken, until the job was taken
// back.
//
// Errors.  An image has a checksum (XXH3 over its bytes, seeded with the ledger's salt and the
// slot), which whoever keeps the slot's record keeps: an image that was changed, or that
// another put has left there, is ATTND_ESTALE, and nothing of it is to be believed; the blocks
// may hold a part of it.  When the store itself fails (an error of the device, no space, less read
// or written than asked) the tier is off from then on: every job, also one that waits, ends with
// ATTND_EIO, and kv_tier_submit answers that.  It is never switched on again in this process.
//
// A restart.  Slots and checksums are the ledger's; the memory is a memfd that outlives the process
// as the arena does, the file has a name.  Who goes on with them claims the slots that the ledger
// names (kv_tier_claim); what was cut off meanwhile cannot be claimed.
#ifndef ATTND_KVCACHE_KV_TIER_H
#define ATTND_KVCACHE_KV_TIER_H

#include <stdbool.h>
#include <stdint.h>

#include "kvcache/kv_arena.h"
#include "kvcache/kv_tier_slots.h"
#include "proto/err.h"

typedef struct kv_tier kv_tier;

enum { KV_TIER_BLOCKS = 8 }; // of an image: KV_MAX_GROUPS

typedef struct kv_tier_opts {
    const kv_arena *arena; // of the blocks; borrowed
    uint64_t bytes;        // of the tier
    uint64_t slab_bytes;   // in which it is cut; no image is larger
    uint64_t salt;         // kv_salt
    uint32_t depth;        // jobs
    // ended is told, by the tier's thread, when one job or several can be taken back.
    void (*ended)(void *ctx);
    void *ctx;
} kv_tier_opts;

typedef enum kv_tier_op { KV_TIER_PUT, KV_TIER_GET } kv_tier_op;

typedef struct kv_tier_job {
    kv_tier_op op;
    uint64_t tag;  // the caller's
    uint64_t slot; // bytes from the tier's start
    uint64_t sum;  // of the image: PUT fills it in, GET compares it
    attnd_err err; // how it ended
    uint32_t num_blocks;
    uint64_t at[KV_TIER_BLOCKS];    // of the blocks, bytes from the arena's base
    uint64_t bytes[KV_TIER_BLOCKS]; // of each
    // Of a PUT whose image lies in another tier (kv_tier_lend): that one's memory, which at then
    // counts in, and the checksum there.  NULL = it is in opts.arena.
    const kv_arena *from;
    uint64_t from_sum, from_seed;
} kv_tier_job;

// kv_tier_job_bytes returns the bytes of a job's image.
uint64_t kv_tier_job_bytes(const kv_tier_job *job);

typedef struct kv_tier_info {
    const char *kind;             // "memory" or "file"
    uint64_t bytes, in_use_bytes; // of all slots, of those that are taken: kv_tier_fill
    uint32_t jobs;                // not taken back yet
    uint64_t puts, gets;          // that ended well
    uint64_t put_bytes, get_bytes;
    uint64_t damaged; // images with a wrong checksum
    uint64_t busy;    // jobs refused because of the depth
    attnd_err off;    // ATTND_OK, or why it was switched off
    char why[ATTND_ERR_TEXT_BYTES];
} kv_tier_info;

// kv_tier_open_memory makes a tier of host memory: store is a host arena of opts->bytes
// (kv_arena_open_host, or kv_arena_adopt_host when is_kept), borrowed until the tier is closed.  On
// a device's arena the memory is pinned when the device lets us.  The caller owns *out:
// kv_tier_close.  ATTND_ENOMEM, ATTND_EINVAL.
attnd_err kv_tier_open_memory(kv_tier **out, const kv_tier_opts *opts, const kv_arena *store,
                              bool is_kept, attnd_errinfo *info);

// kv_tier_open_file makes a tier of the file of that name, which is made when it is not there, and
// all of whose space is allocated.  A file that is no tier's is left alone.  When it belongs to
// opts->salt, its images are kept.  It waits, up to 2 s, until no other process uses it, I/O
// of a process that was killed included.  ATTND_ENOTSUP: kv_tier_file_check; ATTND_EIO: the file,
// with the reason; ATTND_EBUSY: in use; ATTND_EINVAL: no tier's file; ATTND_ENOMEM.
attnd_err kv_tier_open_file(kv_tier **out, const kv_tier_opts *opts, const char *path,
                            attnd_errinfo *info);

// kv_tier_file_check says whether files can be tiers here: ATTND_ENOTSUP when attnd was built
// without liburing, or when the kernel gives this process no io_uring.
attnd_err kv_tier_file_check(attnd_errinfo *info);

// kv_tier_close ends the thread; running jobs are waited for, others dropped.  Accepts NULL.
void kv_tier_close(kv_tier *t);

// kv_tier_take takes a slot for an image; false when there is none, or the tier is off.
bool kv_tier_take(kv_tier *t, uint64_t bytes, uint64_t *slot);
void kv_tier_give(kv_tier *t, uint64_t slot);

// kv_tier_holds says whether an image of that size could lie in the tier if it were empty.
bool kv_tier_holds(const kv_tier *t, uint64_t bytes);

// kv_tier_claim takes a slot that the ledger names; false when it cannot hold its image any more.
bool kv_tier_claim(kv_tier *t, uint64_t slot, uint64_t bytes);

// kv_tier_lend makes a PUT of another tier from the image of that size and checksum in a slot of
// this one, which must stay taken until the job was taken back; it is ATTND_ESTALE when the image
// there was changed.  False for a tier whose images are not in memory, or that is off.
bool kv_tier_lend(const kv_tier *t, uint64_t slot, uint64_t bytes, uint64_t sum, kv_tier_job *job);

// kv_tier_submit: ATTND_EBUSY, ATTND_EIO (the tier is off).
attnd_err kv_tier_submit(kv_tier *t, const kv_tier_job *job);
// kv_tier_room returns how many jobs kv_tier_submit would take now.
uint32_t kv_tier_room(const kv_tier *t);

// kv_tier_take_ended takes back a job that has ended; false when there is none.
bool kv_tier_take_ended(kv_tier *t, kv_tier_job *out);

// kv_tier_fill returns the bytes of slots that are taken, and *total of all.
uint64_t kv_tier_fill(const kv_tier *t, uint64_t *total);

bool kv_tier_is_off(const kv_tier *t);
void kv_tier_get_info(const kv_tier *t, kv_tier_info *out);

#endif
