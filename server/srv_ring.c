// One ring.
//
// The rule for every word of the region: what the client may write is loaded once into a local,
// checked there, and only the local is used; what the daemon writes is never read back.  Geometry
// and positions come from `layout`, `sq_head` and `cq_tail`, which lie in the daemon's memory.
//
// The region is a memfd that the daemon makes and seals against shrinking and growing, so that no
// access to the mapping can miss it.  (A client can punch holes into it; they read as zeros.)  Its
// pages come when they are touched, as a client asks for more than it uses.  Completions can not
// run over: a call is only taken while its completion has room.
//
// Limit: where the system promises no more memory than it has (vm.overcommit_memory = 2), a page of
// a hole that it cannot give back ends the process by SIGBUS.
#include "server/srv_ring.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static attnd_err make_memfd(const proto_ring_layout *layout, int *out, attnd_errinfo *info) {
    int fd = memfd_create("attnd-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)layout->bytes) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        attnd_fail(info, ATTND_ENOMEM, "", "a region of %llu bytes: %s",
                   (unsigned long long)layout->bytes, strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return ATTND_ENOMEM;
    }
    *out = fd;
    return ATTND_OK;
}

static void write_head(const srv_ring *ring) {
    const proto_ring_layout *l = &ring->layout;
    ring->head->magic = PROTO_RING_MAGIC;
    ring->head->version = PROTO_VERSION;
    ring->head->entries = l->entries;
    ring->head->sq_off = l->sq_off;
    ring->head->cq_off = l->cq_off;
    ring->head->data_off = l->data_off;
    ring->head->data_bytes = l->data_bytes;
}

attnd_err srv_ring_open(srv_ring *ring, uint32_t entries, uint64_t data_bytes, int *fd,
                        attnd_errinfo *info) {
    memset(ring, 0, sizeof(*ring));
    int memfd;
    attnd_err err = proto_ring_layout_make(&ring->layout, entries, data_bytes, info);
    if (!err) {
        err = make_memfd(&ring->layout, &memfd, info);
    }
    if (err) {
        return err;
    }
    void *base = mmap(NULL, ring->layout.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    if (base == MAP_FAILED) {
        close(memfd);
        return attnd_fail(info, ATTND_ENOMEM, "", "the region cannot be mapped: %s",
                          strerror(errno));
    }
    ring->base = base;
    ring->head = base;
    write_head(ring);
    *fd = memfd;
    return ATTND_OK;
}

void srv_ring_close(srv_ring *ring) {
    if (ring->base) {
        munmap(ring->base, ring->layout.bytes);
        ring->base = NULL;
        ring->head = NULL;
    }
}

// in_data is true when bytes at off lie in the data area, aligned.
static bool in_data(const proto_ring_layout *l, uint64_t off, uint64_t bytes) {
    return off % PROTO_RING_ALIGN == 0 && off >= l->data_off && off <= l->bytes &&
           bytes <= l->bytes - off;
}

// check looks at a private copy of a submission.
static attnd_err check(const srv_ring *ring, const proto_ring_submit *s) {
    if (s->msg_bytes < sizeof(proto_header) || !in_data(&ring->layout, s->msg_off, s->msg_bytes) ||
        !in_data(&ring->layout, s->reply_off, s->reply_bytes)) {
        return ATTND_EPROTO;
    }
    return s->reply_bytes < PROTO_RING_MIN_REPLY ? ATTND_EMSGSIZE : ATTND_OK;
}

// indices_ok checks the client's indices.  sq_tail was loaded first, so that the cq_head seen here
// is at least the one that the client stored before it.
static bool indices_ok(const srv_ring *ring, uint32_t sq_tail) {
    uint32_t entries = ring->layout.entries;
    uint32_t waiting = sq_tail - ring->sq_head;
    uint32_t unread = ring->cq_tail - proto_ring_load(&ring->head->cq_head);
    return waiting <= entries && unread <= entries &&
           waiting + unread + ring->unanswered <= entries;
}

srv_ring_found srv_ring_take(srv_ring *ring, srv_ring_call *out) {
    uint32_t sq_tail = proto_ring_load(&ring->head->sq_tail);
    if (sq_tail == ring->sq_head) {
        return SRV_RING_EMPTY;
    }
    if (!indices_ok(ring, sq_tail)) {
        return SRV_RING_BROKEN;
    }
    proto_ring_submit s;
    uint64_t at = ring->sq_head % ring->layout.entries * sizeof(s);
    proto_copy(&s, ring->base + ring->layout.sq_off + at, sizeof(s));
    proto_ring_store(&ring->head->sq_head, ++ring->sq_head);
    ring->unanswered++;
    attnd_err err = check(ring, &s);
    if (err) {
        srv_ring_post(ring, s.user, 0, err);
        return SRV_RING_REFUSED;
    }
    out->msg = (proto_view){ring->base + s.msg_off, s.msg_bytes};
    out->reply = ring->base + s.reply_off;
    out->reply_bytes = s.reply_bytes;
    out->user = s.user;
    return SRV_RING_CALL;
}

void srv_ring_post(srv_ring *ring, uint64_t user, uint32_t reply_bytes, attnd_err status) {
    ATTND_ASSERT(ring->unanswered > 0);
    proto_ring_complete done = {.user = user, .reply_bytes = reply_bytes, .status = status};
    uint64_t at = ring->cq_tail % ring->layout.entries * sizeof(done);
    memcpy(ring->base + ring->layout.cq_off + at, &done, sizeof(done));
    ring->unanswered--;
    proto_ring_store(&ring->head->cq_tail, ++ring->cq_tail);
    ring->wake_due = true;
}

// The futex is not private: its key is the page of the memfd, wherever it is mapped.
void srv_ring_wake(srv_ring *ring) {
    if (!ring->wake_due) {
        return;
    }
    ring->wake_due = false;
    proto_ring_fence();
    if (proto_ring_load(&ring->head->client_waits)) {
        proto_ring_store(&ring->head->client_waits, 0);
        syscall(SYS_futex, &ring->head->cq_tail, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

void srv_ring_set_sleeps(srv_ring *ring, bool sleeps) {
    proto_ring_store(&ring->head->daemon_sleeps, sleeps);
}
