// One region.
//
//     flags: [ proto_flags | pad to 4096 | proto_flag [num_flags] | pad to 4096 ]
//
// The daemon loads ready and stores the rest; what it needs to know again it keeps on its own side.
// The flags are a memfd that can be neither shrunk nor grown, whose pages the device has pinned: a
// client that punches holes into it is given new pages, which the device does not see, and so
// waits in vain, alone.
#include "server/srv_region.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static attnd_err failed(const char *what, attnd_errinfo *info) {
    return attnd_fail(info, ATTND_ENOMEM, "region.num_flags", "flags: %s: %s", what,
                      strerror(errno));
}

static attnd_err make_flags(srv_region *r, int *out, attnd_errinfo *info) {
    int fd = memfd_create("attnd-flags", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return failed("memfd_create", info);
    }
    if (ftruncate(fd, (off_t)r->flags_bytes) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        close(fd);
        return failed("memfd", info);
    }
    void *base = mmap(NULL, r->flags_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        close(fd);
        return failed("mmap", info);
    }
    r->flags = base;
    *out = fd;
    return ATTND_OK;
}

static proto_flags *head_of(const srv_region *r) {
    return (proto_flags *)(void *)r->flags;
}

static proto_flag *pair_of(const srv_region *r, uint32_t pair) {
    ATTND_ASSERT(pair < r->num_flags);
    return (proto_flag *)(void *)(r->flags + PROTO_FLAGS_HEAD_BYTES) + pair;
}

attnd_err srv_region_open(srv_region *r, srv_backend *backend, uint64_t bytes, uint32_t num_flags,
                          bool pairs, int *flags_fd, attnd_errinfo *info) {
    const uint64_t pairs_bytes = pairs ? proto_pairs_bytes(num_flags) : 0;
    *r = (srv_region){.num_flags = num_flags, .flags_bytes = proto_flags_bytes(num_flags)};
    list_init(&r->calls);
    int fd = -1;
    attnd_err err = make_flags(r, &fd, info);
    if (err) {
        return err;
    }
    err = backend->ops->region_make(backend, bytes + pairs_bytes, &r->memory, info);
    if (!err) {
        err = backend->ops->flags_map(backend, r->flags, r->flags_bytes, &r->flags_address, info);
        if (err) {
            backend->ops->region_free(backend, &r->memory);
        }
    }
    if (err) {
        munmap(r->flags, r->flags_bytes);
        close(fd);
        return err;
    }
    r->backend = backend;
    r->pairs_off = pairs ? r->memory.bytes - pairs_bytes : 0;
    head_of(r)->magic = PROTO_RING_MAGIC;
    head_of(r)->num_flags = num_flags;
    *flags_fd = fd;
    return ATTND_OK;
}

void srv_region_close(srv_region *r) {
    if (!r->backend) {
        return;
    }
    ATTND_ASSERT(r->num_calls == 0);
    r->backend->ops->flags_unmap(r->backend, r->flags);
    r->backend->ops->region_free(r->backend, &r->memory);
    munmap(r->flags, r->flags_bytes);
    r->backend = NULL;
}

uint32_t *srv_region_ready(srv_region *r, uint32_t pair) {
    return &pair_of(r, pair)->ready;
}

bool srv_region_raised(srv_region *r, uint32_t pair) {
    return __atomic_load_n(srv_region_ready(r, pair), __ATOMIC_ACQUIRE) != 0;
}

bool srv_region_take(srv_region *r, uint32_t pair) {
    return srv_region_raised(r, pair) &&
           __atomic_exchange_n(srv_region_ready(r, pair), 0, __ATOMIC_ACQ_REL);
}

void srv_region_answer(srv_region *r, uint32_t pair) {
    __atomic_store_n(&pair_of(r, pair)->done, 1, __ATOMIC_RELEASE);
}

void srv_region_reset(srv_region *r, uint32_t pair) {
    proto_flag *p = pair_of(r, pair);
    __atomic_store_n(&p->ready, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&p->done, 0, __ATOMIC_RELEASE);
}

void srv_region_abandon(srv_region *r) {
    r->abandoned = true;
    for (uint32_t i = 0; i < r->num_flags; i++) {
        srv_region_answer(r, i);
    }
}

uint64_t srv_region_bytes(const srv_region *r) {
    return r->pairs_off ? r->pairs_off : r->memory.bytes;
}

uint64_t srv_region_signal(const srv_region *r, uint32_t pair, bool at_flags) {
    uint64_t pairs = r->pairs_off && !at_flags ? r->memory.address + r->pairs_off
                                               : r->flags_address + PROTO_FLAGS_HEAD_BYTES;
    return pairs + (uint64_t)pair * sizeof(proto_flag);
}

void srv_region_tell(srv_region *r, attnd_err err, uint64_t step) {
    proto_flags *head = head_of(r);
    __atomic_store_n(&head->error, (int32_t)err, __ATOMIC_RELAXED);
    __atomic_store_n(&head->error_step, step, __ATOMIC_RELAXED);
    __atomic_store_n(&head->error_epoch, ++r->error_epoch, __ATOMIC_RELEASE);
}
