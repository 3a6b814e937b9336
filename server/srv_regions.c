// One queue of places, to be made or freed, and the pool of counts.
//
//     NONE --ask--> WAITS --> MAKING --> READY --leave--> FREEING --> NONE
//                     '-leave-> NONE        (left while MAKING: FREEING at once)
//
//     count: free --ask--> of a place --freed--> free, when its client has said that it left
//                                     '-------> KEPT --its process is gone--> free
#include "server/srv_regions.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/srv_process.h"

struct srv_region_count {
    srv_regions *t;
    list_node node; // in t->free, or in t->kept
    uint64_t bytes;
    int pidfd; // of the client; -1 = not known
    bool said_so, pairs;
    uv_poll_t poll; // while kept
};

// A stream that waits at a device pair holds one of the 128 places that a GPU has for kernels that
// run (sm_90), and libattnd has up to 16 streams wait; the others are for their work and ours.
enum { MAX_PAIRED = 6 };

struct srv_regions {
    uv_loop_t *loop;
    srv_regions_opts opts;
    srv_region_count *counts; // [opts.max]
    list_node free, kept;
    list_node queue; // places that are WAITS or FREEING, but the one that is worked on
    uv_work_t work;
    srv_region_place *busy; // work's
    uint32_t handles;       // not closed yet
    uint32_t paired;        // regions that count and have pairs
    bool closing;
    srv_regions_info info;
};

static srv_region_place *place_of(list_node *node) {
    return LIST_ENTRY(node, srv_region_place, node);
}

static void free_memory(srv_regions *t) {
    free(t->counts);
    free(t);
}

static void end_if_closed(srv_regions *t) {
    if (t->closing && !t->busy && t->handles == 0) {
        free_memory(t);
    }
}

// ---- count

static uint64_t rounded(const srv_regions *t, uint64_t bytes) {
    uint64_t unit = t->opts.backend->region_unit;
    return (bytes + unit - 1) / unit * unit;
}

// wants_pairs: kernels that wait are for a GPU that the client shares with us under MPS.  Elsewhere
// one would keep the GPU from us, or look at memory of another GPU.
static bool wants_pairs(const srv_regions *t, const proto_region_ask *ask) {
    const srv_backend *b = t->opts.backend;
    const uint32_t needed = PROTO_REGION_MPS | PROTO_REGION_PAIRS;
    return t->paired < MAX_PAIRED && b->waits && b->mps && (ask->flags & needed) == needed &&
           memcmp(ask->device, b->uuid, sizeof(ask->device)) == 0;
}

static srv_region_count *begin_count(srv_regions *t, uint64_t bytes, bool pairs, int socket) {
    list_node *node = list_first(&t->free);
    list_remove(node);
    srv_region_count *n = LIST_ENTRY(node, srv_region_count, node);
    n->bytes = bytes;
    n->said_so = false;
    n->pairs = pairs;
    t->paired += pairs;
    n->pidfd = srv_process_pidfd(socket);
    t->info.regions++;
    t->info.bytes += bytes;
    return n;
}

static void end_count(srv_region_count *n) {
    srv_regions *t = n->t;
    t->info.regions--;
    t->info.bytes -= n->bytes;
    t->paired -= n->pairs;
    if (n->pidfd >= 0) {
        close(n->pidfd);
    }
    list_append(&t->free, &n->node);
}

static void on_closed(uv_handle_t *handle) {
    srv_region_count *n = handle->data;
    srv_regions *t = n->t;
    t->handles--;
    end_count(n);
    end_if_closed(t);
}

static void stop_watching(srv_region_count *n) {
    list_remove(&n->node);
    n->t->info.kept--;
    uv_close((uv_handle_t *)&n->poll, on_closed);
}

static void on_process_gone(uv_poll_t *poll, int status, int events) {
    (void)status, (void)events;
    stop_watching(poll->data);
}

// settle_count: the memory is freed here.
static void settle_count(srv_region_count *n) {
    srv_regions *t = n->t;
    bool known = n->said_so || n->pidfd < 0 || t->closing;
    if (known || uv_poll_init(t->loop, &n->poll, n->pidfd) != 0) {
        end_count(n);
        return;
    }
    t->handles++;
    t->info.kept++;
    list_append(&t->kept, &n->node);
    n->poll.data = n;
    uv_poll_start(&n->poll, UV_READABLE, on_process_gone);
}

// ---- work

static void next(srv_regions *t);

// on_work runs on a thread of the pool; the loop leaves the place alone meanwhile.
static void on_work(uv_work_t *work) {
    srv_regions *t = work->data;
    srv_region_place *p = t->busy;
    if (p->state == SRV_REGION_MAKING) {
        p->err = srv_region_open(&p->region, t->opts.backend, p->ask.bytes, p->ask.num_flags,
                                 p->count->pairs, &p->flags_fd, &p->info);
    } else {
        srv_region_close(&p->region);
    }
}

static void begin_free(srv_regions *t, srv_region_place *p) {
    p->state = SRV_REGION_FREEING;
    list_append(&t->queue, &p->node);
}

// end_place: nothing is left there.
static void end_place(srv_region_place *p) {
    p->state = SRV_REGION_NONE;
    settle_count(p->count);
    p->count = NULL;
}

// take_made looks what has become of a place that was to be made.
static void take_made(srv_regions *t, srv_region_place *p) {
    if (p->err) {
        p->count->said_so = true; // it has never had a descriptor
        end_place(p);
    } else {
        p->state = SRV_REGION_READY;
        t->info.made++;
        t->info.bytes += p->region.memory.bytes - p->count->bytes; // 0 if they round alike
        p->count->bytes = p->region.memory.bytes;
    }
    if (!p->leaving) {
        p->made(p, p->err, p->flags_fd, &p->info);
    } else if (p->err) {
        p->gone(p);
    } else {
        close(p->flags_fd);
        p->count->said_so = true;
        begin_free(t, p);
    }
}

static void on_worked(uv_work_t *work, int status) {
    (void)status; // it is never cancelled
    srv_regions *t = work->data;
    srv_region_place *p = t->busy;
    t->busy = NULL;
    if (p->state == SRV_REGION_MAKING) {
        take_made(t, p);
    } else {
        end_place(p);
        p->gone(p);
    }
    next(t);
    end_if_closed(t);
}

static void next(srv_regions *t) {
    list_node *node = list_first(&t->queue);
    if (t->busy || !node) {
        return;
    }
    srv_region_place *p = place_of(node);
    list_remove(node);
    t->busy = p;
    if (p->state == SRV_REGION_WAITS) {
        p->state = SRV_REGION_MAKING;
    }
    uv_queue_work(t->loop, &t->work, on_work, on_worked); // fails without a callback only
}

// ---- asking and leaving

attnd_err srv_regions_ask(srv_regions *t, srv_region_place *p, const proto_region_ask *ask,
                          int socket, attnd_errinfo *info) {
    ATTND_ASSERT(p->state == SRV_REGION_NONE);
    if (t->opts.one_bytes == 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "flags", "limits.region_memory gives none");
    }
    if (!t->opts.backend->ops->region_make) {
        return attnd_fail(info, ATTND_ENOTSUP, "flags",
                          "regions are memory of a GPU; this daemon computes on the CPU");
    }
    if (ask->bytes > t->opts.one_bytes) {
        return attnd_fail(info, ATTND_EMSGSIZE, "region.bytes", "a region of %llu bytes",
                          (unsigned long long)ask->bytes);
    }
    bool pairs = wants_pairs(t, ask);
    uint64_t more = pairs ? proto_pairs_bytes(ask->num_flags) : 0;
    uint64_t bytes = rounded(t, ask->bytes + more), all = rounded(t, t->opts.all_bytes);
    if (bytes > all || t->info.bytes > all - bytes || list_empty(&t->free)) {
        return attnd_fail(info, ATTND_EBUSY, "", "the memory of regions is taken");
    }
    p->ask = *ask;
    p->leaving = false;
    p->count = begin_count(t, bytes, pairs, socket);
    p->state = SRV_REGION_WAITS;
    list_append(&t->queue, &p->node);
    next(t);
    return ATTND_OK;
}

bool srv_regions_leave(srv_regions *t, srv_region_place *p, bool said_so) {
    switch (p->state) {
    case SRV_REGION_NONE:
        return true;
    case SRV_REGION_WAITS:
        list_remove(&p->node);
        p->count->said_so = true;
        end_place(p);
        return true;
    case SRV_REGION_READY:
        p->count->said_so = said_so;
        begin_free(t, p);
        next(t);
        break;
    case SRV_REGION_MAKING:
    case SRV_REGION_FREEING:
        break;
    }
    p->leaving = true;
    return false;
}

// ---- life

attnd_err srv_regions_open(srv_regions **out, uv_loop_t *loop, const srv_regions_opts *opts,
                           attnd_errinfo *info) {
    srv_regions *t = calloc(1, sizeof(*t));
    srv_region_count *counts = calloc(opts->max, sizeof(*counts));
    if (!t || !counts) {
        free(t);
        free(counts);
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for regions");
    }
    t->loop = loop;
    t->opts = *opts;
    t->work.data = t;
    t->counts = counts;
    list_init(&t->free);
    list_init(&t->kept);
    list_init(&t->queue);
    for (uint32_t i = 0; i < opts->max; i++) {
        counts[i].t = t;
        list_append(&t->free, &counts[i].node);
    }
    *out = t;
    return ATTND_OK;
}

void srv_regions_close(srv_regions *t) {
    if (!t) {
        return;
    }
    t->closing = true;
    for (list_node *node; (node = list_first(&t->kept));) {
        stop_watching(LIST_ENTRY(node, srv_region_count, node));
    }
    end_if_closed(t);
}

uint64_t srv_regions_most(const srv_regions *t) {
    return t->opts.one_bytes;
}

void srv_regions_get_info(const srv_regions *t, srv_regions_info *out) {
    memset(out, 0, sizeof(*out));
    if (t) {
        *out = t->info;
    }
}
