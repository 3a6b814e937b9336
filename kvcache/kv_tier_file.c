// A file as a tier: io_uring over a file opened with O_DIRECT, so that what is spilled takes no
// memory of the page cache.
//
//     | 4 KiB: magic, version, salt, bytes | slot at 4 KiB + its offset | ...
//
// The thread drives LANES lanes.  A lane has an aligned buffer and takes a job through it piece by
// piece:    put: arena -> buffer -> file        get: file -> buffer -> arena
// Several lanes keep the device's queue filled.  The thread sleeps in the ring; a read of an
// eventfd is always among its requests, by which kv_tier_submit wakes it.
//
// The lock on the file is of its open description, which requests in flight hold, too: who gets it
// knows that nothing of a process that was killed is still being written.
#include "kvcache/kv_tier.h"

#ifdef ATTND_HAVE_URING

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kvcache/kv_sum.h"
#include "kvcache/kv_tier_store.h"

#define MAGIC UINT64_C(0x72656974646e7474)

enum {
    VERSION = 1,
    LANES = 8,
    PIECE_BYTES = 1 << 20,
    HEAD_BYTES = KV_TIER_UNIT,
    LOCK_TRIES = 100,
    LOCK_NAP_MS = 20,
};

typedef struct head {
    uint64_t magic, version, salt, bytes;
} head;

typedef struct lane {
    bool is_busy;
    char *buffer; // [PIECE_BYTES]
    kv_tier_job job;
    uint64_t bytes, done, piece; // of the image: all, copied, in flight
    XXH3_state_t *sum;
} lane;

typedef struct file_tier {
    kv_tier pub; // first
    int fd, event;
    uint64_t events; // what was read of it
    bool has_ring, is_pinned;
    struct io_uring ring;
    char *memory; // of all buffers
    lane lanes[LANES];
    uint32_t num_busy;
} file_tier;

#ifndef KV_TIER_FAULTS
static int kv_tier_result(bool is_put, int result) {
    (void)is_put;
    return result;
}
#else
// Tests say what a request of the file ends with.
int kv_tier_result(bool is_put, int result);
#endif

// ---- lanes

static uint64_t io_bytes(uint64_t bytes) {
    return (bytes + KV_TIER_UNIT - 1) / KV_TIER_UNIT * KV_TIER_UNIT;
}

// begin_io puts the lane's piece into the ring: there is room for a request of each lane.
static void begin_io(file_tier *f, lane *l) {
    const kv_tier_job *job = &l->job;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&f->ring);
    uint64_t at = HEAD_BYTES + job->slot + l->done;
    unsigned bytes = (unsigned)io_bytes(l->piece);
    if (job->op == KV_TIER_PUT) {
        io_uring_prep_write(sqe, f->fd, l->buffer, bytes, at);
    } else {
        io_uring_prep_read(sqe, f->fd, l->buffer, bytes, at);
    }
    io_uring_sqe_set_data(sqe, l);
}

// begin_piece begins the next piece of the lane's job, of which some is left.
static attnd_err begin_piece(file_tier *f, lane *l, attnd_errinfo *info) {
    uint64_t left = l->bytes - l->done;
    l->piece = left < PIECE_BYTES ? left : PIECE_BYTES;
    if (l->job.op == KV_TIER_PUT) {
        attnd_err err = kv_tier_copy(&f->pub, &l->job, l->done, l->piece, l->buffer, info);
        if (err) {
            return err;
        }
        XXH3_64bits_update(l->sum, l->buffer, l->piece);
        memset(l->buffer + l->piece, 0, io_bytes(l->piece) - l->piece);
    }
    begin_io(f, l);
    return ATTND_OK;
}

static void end_job(file_tier *f, lane *l, attnd_err err, const attnd_errinfo *info) {
    l->job.err = err;
    l->is_busy = false;
    f->num_busy--;
    kv_tier_end(&f->pub, &l->job, info);
}

static void begin_job(file_tier *f, const kv_tier_job *job) {
    lane *l = f->lanes;
    while (l->is_busy) {
        l++;
    }
    l->is_busy = true;
    f->num_busy++;
    l->job = *job;
    l->bytes = kv_tier_job_bytes(job);
    l->done = 0;
    XXH3_64bits_reset_withSeed(l->sum, kv_tier_seed(&f->pub, job->slot));
    attnd_errinfo info;
    attnd_err err = kv_tier_is_whole(job) ? begin_piece(f, l, &info) : ATTND_ESTALE;
    if (err) {
        end_job(f, l, err, &info);
    }
}

static attnd_err say_result(const lane *l, int result, attnd_errinfo *info) {
    const char *verb = l->job.op == KV_TIER_PUT ? "write" : "read";
    if (result < 0) {
        return attnd_fail(info, ATTND_EIO, "tier", "%s of the file: %s", verb, strerror(-result));
    }
    return attnd_fail(info, ATTND_EIO, "tier", "%s of the file: %d bytes instead of %llu", verb,
                      result, (unsigned long long)io_bytes(l->piece));
}

// end_piece goes on with a job of which a piece was written or read.
static void end_piece(file_tier *f, lane *l, int result) {
    attnd_errinfo info;
    attnd_err err = ATTND_OK;
    if (result < 0 || (uint64_t)result != io_bytes(l->piece)) {
        err = say_result(l, result, &info);
    } else if (l->job.op == KV_TIER_GET) {
        XXH3_64bits_update(l->sum, l->buffer, l->piece);
        err = kv_tier_copy(&f->pub, &l->job, l->done, l->piece, l->buffer, &info);
    }
    l->done += l->piece;
    if (!err && l->done < l->bytes) {
        err = begin_piece(f, l, &info);
        if (!err) {
            return;
        }
    }
    if (!err) {
        uint64_t sum = XXH3_64bits_digest(l->sum);
        if (l->job.op == KV_TIER_PUT) {
            l->job.sum = sum;
        } else if (sum != l->job.sum) {
            err = ATTND_ESTALE;
        }
    }
    end_job(f, l, err, &info);
}

// ---- thread

static void await_wake(file_tier *f) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&f->ring);
    io_uring_prep_read(sqe, f->event, &f->events, sizeof(f->events), 0);
    io_uring_sqe_set_data(sqe, NULL);
}

static void take_results(file_tier *f) {
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&f->ring, &cqe) == 0) {
        lane *l = io_uring_cqe_get_data(cqe);
        int result = cqe->res;
        io_uring_cqe_seen(&f->ring, cqe);
        if (l) {
            end_piece(f, l, kv_tier_result(l->job.op == KV_TIER_PUT, result));
        } else {
            await_wake(f);
        }
    }
}

static void run(kv_tier *t) {
    file_tier *f = (file_tier *)t;
    await_wake(f);
    for (bool stopping = false;;) {
        kv_tier_job job;
        while (f->num_busy < LANES && kv_tier_next(t, false, &job, &stopping)) {
            begin_job(f, &job);
        }
        if (stopping && f->num_busy == 0) {
            return;
        }
        io_uring_submit_and_wait(&f->ring, 1);
        take_results(f);
    }
}

static void wake(kv_tier *t) {
    uint64_t one = 1;
    ssize_t written = write(((file_tier *)t)->event, &one, sizeof(one));
    (void)written; // fails only when the count is full, and then the thread is being woken
}

static void free_file(kv_tier *t) {
    file_tier *f = (file_tier *)t;
    if (f->has_ring) {
        io_uring_queue_exit(&f->ring);
    }
    if (f->is_pinned) {
        t->opts.arena->ops->unpin(t->opts.arena, f->memory);
    }
    for (int i = 0; i < LANES; i++) {
        if (f->lanes[i].sum) {
            XXH3_freeState(f->lanes[i].sum);
        }
    }
    free(f->memory);
    if (f->event >= 0) {
        close(f->event);
    }
    if (f->fd >= 0) {
        close(f->fd);
    }
    free(f);
}

static const kv_tier_ops file_ops = {.kind = "file", .run = run, .wake = wake, .free = free_file};

// ---- opening

static attnd_err failed(const char *what, const char *path, attnd_errinfo *info) {
    return attnd_fail(info, ATTND_EIO, "tier", "%s: %s: %s", path, what, strerror(errno));
}

// lock_file waits for the requests of a process that was killed to end.
static attnd_err lock_file(int fd, const char *path, attnd_errinfo *info) {
    for (int i = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; i++) {
        if (errno != EWOULDBLOCK) {
            return failed("flock", path, info);
        }
        if (i == LOCK_TRIES) {
            return attnd_fail(info, ATTND_EBUSY, "tier", "%s: another process uses it", path);
        }
        nanosleep(&(struct timespec){.tv_nsec = LOCK_NAP_MS * 1000000L}, NULL);
    }
    return ATTND_OK;
}

// read_head finds out how much of the file may be gone on with.
static attnd_err read_head(file_tier *f, const kv_tier_opts *opts, const char *path, uint64_t *kept,
                           attnd_errinfo *info) {
    struct stat st;
    head *h = (head *)f->memory;
    if (fstat(f->fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return attnd_fail(info, ATTND_EINVAL, "tier", "%s: it is no regular file", path);
    }
    *kept = 0;
    if (st.st_size == 0) {
        return ATTND_OK;
    }
    memset(h, 0, HEAD_BYTES);
    if (pread(f->fd, h, HEAD_BYTES, 0) < 0) {
        return failed("read", path, info);
    }
    if (h->magic != MAGIC) {
        return attnd_fail(info, ATTND_EINVAL, "tier", "%s: it is no tier's file, and left as it is",
                          path);
    }
    if (h->version == VERSION && h->salt == opts->salt && st.st_size > HEAD_BYTES) {
        uint64_t bytes = (uint64_t)st.st_size - HEAD_BYTES;
        *kept = bytes < h->bytes ? bytes : h->bytes;
    }
    return ATTND_OK;
}

static attnd_err write_head(file_tier *f, const kv_tier_opts *opts, const char *path,
                            attnd_errinfo *info) {
    memset(f->memory, 0, HEAD_BYTES);
    *(head *)f->memory =
        (head){.magic = MAGIC, .version = VERSION, .salt = opts->salt, .bytes = opts->bytes};
    errno = ENOSPC;
    return pwrite(f->fd, f->memory, HEAD_BYTES, 0) == HEAD_BYTES ? ATTND_OK
                                                                 : failed("write", path, info);
}

static attnd_err open_file(file_tier *f, const kv_tier_opts *opts, const char *path, uint64_t *kept,
                           attnd_errinfo *info) {
    f->fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    if (f->fd < 0) {
        return failed("open with O_DIRECT", path, info);
    }
    attnd_err err = lock_file(f->fd, path, info);
    if (!err) {
        err = read_head(f, opts, path, kept, info);
    }
    if (err) {
        return err;
    }
    off_t bytes = (off_t)(HEAD_BYTES + opts->bytes);
    if (fallocate(f->fd, 0, 0, bytes) != 0) {
        return failed("fallocate", path, info);
    }
    if (ftruncate(f->fd, bytes) != 0) { // it may have been larger
        return failed("ftruncate", path, info);
    }
    return write_head(f, opts, path, info);
}

static attnd_err make_lanes(file_tier *f, const kv_tier_opts *opts, attnd_errinfo *info) {
    const size_t bytes = (size_t)LANES * PIECE_BYTES;
    bool good = posix_memalign((void **)&f->memory, KV_TIER_UNIT, bytes) == 0;
    for (int i = 0; i < LANES; i++) {
        f->lanes[i].buffer = f->memory + (size_t)i * PIECE_BYTES;
        f->lanes[i].sum = XXH3_createState();
        good = good && f->lanes[i].sum;
    }
    if (!good) {
        return attnd_fail(info, ATTND_ENOMEM, "tier", "no memory for the buffers of a tier");
    }
    const kv_arena_ops *ops = opts->arena->ops;
    f->is_pinned = ops->pin && ops->pin(opts->arena, f->memory, bytes);
    return ATTND_OK;
}

static attnd_err make_ring(file_tier *f, attnd_errinfo *info) {
    f->event = eventfd(0, EFD_CLOEXEC);
    int err = f->event < 0 ? -errno : io_uring_queue_init(2 * LANES, &f->ring, 0);
    f->has_ring = err == 0;
    return err == 0 ? ATTND_OK
                    : attnd_fail(info, ATTND_ENOTSUP, "tier", "io_uring: %s", strerror(-err));
}

attnd_err kv_tier_open_file(kv_tier **out, const kv_tier_opts *opts, const char *path,
                            attnd_errinfo *info) {
    file_tier *f = calloc(1, sizeof(*f));
    if (!f) {
        return attnd_fail(info, ATTND_ENOMEM, "tier", "no memory for a tier");
    }
    f->fd = f->event = -1;
    f->pub.ops = &file_ops;
    f->pub.opts = *opts;
    uint64_t kept = 0;
    attnd_err err = make_ring(f, info);
    if (!err) {
        err = make_lanes(f, opts, info);
    }
    if (!err) {
        err = open_file(f, opts, path, &kept, info);
    }
    if (!err) {
        err = kv_tier_init(&f->pub, &file_ops, opts, kept, info);
    }
    if (!err) {
        err = kv_tier_start(&f->pub, info);
    }
    if (err) {
        kv_tier_close(&f->pub);
        return err;
    }
    *out = &f->pub;
    return ATTND_OK;
}

attnd_err kv_tier_file_check(attnd_errinfo *info) {
    struct io_uring ring;
    int err = io_uring_queue_init(1, &ring, 0);
    if (err) {
        return attnd_fail(info, ATTND_ENOTSUP, "tier", "this kernel gives no io_uring: %s",
                          strerror(-err));
    }
    io_uring_queue_exit(&ring);
    return ATTND_OK;
}

#else // without liburing

attnd_err kv_tier_file_check(attnd_errinfo *info) {
    return attnd_fail(info, ATTND_ENOTSUP, "tier", "this attnd was built without liburing");
}

attnd_err kv_tier_open_file(kv_tier **out, const kv_tier_opts *opts, const char *path,
                            attnd_errinfo *info) {
    (void)out;
    (void)opts;
    (void)path;
    return kv_tier_file_check(info);
}

#endif
