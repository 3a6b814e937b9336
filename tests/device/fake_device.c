// Device memory is one range of addresses, closed but while work runs: the arena, a memory file
// that another process can take over, then the buffers' device sides; and regions, memory files
// that clients map.  Work is a list that runs up to a mark, or to a gate that waits.
#include "tests/device/fake_device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/proto_region.h"

enum { MAX_WORK = 64 * 1024, MAX_REGIONS = 4096, PAGE = 4096 };

typedef enum kind { UPLOAD, DOWNLOAD, MOVE, GATE, LAUNCH, SIGNAL, MARK } kind;

typedef struct work {
    kind kind;
    bool gated; // done only if the buffer's gate was passed
    uint32_t buffer;
    uint64_t a, b, c, d, e; // as the call had them
    attn_params launch;     // with rows of its own
} work;

// gate is a buffer's last one.
typedef struct gate {
    uint64_t met_us; // when the order of work had come to it; 0 = it has not
    uint32_t waited_us;
    bool passed;
} gate;

// range is memory of the device's that a client shares.
typedef struct range {
    void *base;
    uint64_t bytes;
} range;

typedef struct fake_device {
    attn_device pub;            // first
    pthread_mutex_t lock;       // guards regions, and their being open
    range regions[MAX_REGIONS]; // [num_regions]
    uint32_t num_regions;
    uint8_t *memory;
    uint64_t bytes;
    attn_cpu *cpu;
    attn_params planned[ATTN_DEVICE_BUFFERS];
    bool is_planned[ATTN_DEVICE_BUFFERS];
    work *work; // [MAX_WORK]
    uint32_t num;
    bool passed[ATTN_DEVICE_BUFFERS]; // the mark
    gate gates[ATTN_DEVICE_BUFFERS];
    bool looked; // for the mark that is next
    bool lost;
    int32_t max_tokens;
} fake_device;

static int32_t next_limit;

void fake_device_limit(int32_t tokens) {
    next_limit = tokens;
}

static fake_device *of(attn_device *d) {
    return (fake_device *)d;
}

static attnd_err cuda_error(attnd_errinfo *info, int32_t code, const char *text) {
    attnd_fail(info, ATTND_ECUDA, "cuda", "%s", text);
    if (info) {
        info->detail = code;
    }
    return ATTND_ECUDA;
}

static attnd_err illegal_address(attnd_errinfo *info) {
    return cuda_error(info, FAKE_ILLEGAL_ADDRESS, "an illegal memory access was encountered");
}

static uint64_t rounded(uint64_t bytes) {
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

// ---- opening

static void fake_close(attn_device *pub) {
    fake_device *d = of(pub);
    for (uint32_t i = 0; i < ATTN_DEVICE_BUFFERS; i++) {
        free(pub->buffers[i].host);
        free(d->planned[i].rows);
    }
    for (uint32_t i = 0; d->work && i < d->num; i++) {
        free(d->work[i].launch.rows);
    }
    if (d->memory) {
        munmap(d->memory, d->bytes);
    }
    if (pub->arena_fd >= 0) {
        close(pub->arena_fd);
    }
    ATTND_ASSERT(d->num_regions == 0);
    pthread_mutex_destroy(&d->lock);
    attn_cpu_free(d->cpu);
    free(d->work);
    free(d);
}

// open_arena returns a descriptor of bytes of memory; -1 and *info when the one that is to be taken
// over is none.
static int open_arena(const attn_device_opts *opts, uint64_t bytes, attnd_errinfo *info) {
    if (opts->adopt_bytes == 0) {
        int fd = memfd_create("fake-arena", MFD_CLOEXEC);
        ATTND_ASSERT(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
        return fd;
    }
    if (opts->adopt_bytes != opts->arena_bytes) {
        attnd_fail(info, ATTND_EINVAL, "memory", "it has %llu bytes, not %llu",
                   (unsigned long long)opts->adopt_bytes, (unsigned long long)opts->arena_bytes);
        return -1;
    }
    struct stat st;
    if (fstat(opts->arena_fd, &st) != 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != bytes) {
        attnd_fail(info, ATTND_EINVAL, "memory", "the descriptor is no memory of a GPU");
        return -1;
    }
    return opts->arena_fd;
}

static attnd_err fake_open(attn_device **out, const attn_device_opts *opts, attnd_errinfo *info) {
    if (opts->ordinal != 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "device", "there is no cuda:%d, the machine has 1",
                          opts->ordinal);
    }
    uint64_t arena = rounded(opts->arena_bytes), buffer = rounded(opts->buffer_bytes);
    int arena_fd = open_arena(opts, arena, info);
    if (arena_fd < 0) {
        return ATTND_EINVAL;
    }
    fake_device *d = calloc(1, sizeof(*d));
    ATTND_ASSERT(d);
    pthread_mutex_init(&d->lock, NULL);
    d->bytes = arena + ATTN_DEVICE_BUFFERS * buffer;
    d->memory = mmap(NULL, d->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    d->work = calloc(MAX_WORK, sizeof(*d->work));
    ATTND_ASSERT(d->memory != MAP_FAILED && d->work);
    ATTND_ASSERT(mmap(d->memory, arena, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, arena_fd,
                      0) != MAP_FAILED);
    d->pub = (attn_device){.ops = &fake_device_ops,
                           .name = "host memory",
                           .uuid = FAKE_UUID,
                           .mps = getenv("ATTND_FAKE_MPS") != NULL,
                           .waits = true,
                           .region_unit = PAGE,
                           .kernels = "fake",
                           .arena = d->memory,
                           .arena_bytes = opts->arena_bytes,
                           .arena_fd = arena_fd};
    for (uint32_t i = 0; i < ATTN_DEVICE_BUFFERS; i++) {
        d->pub.buffers[i] = (attn_device_buffer){.host = calloc(1, opts->buffer_bytes),
                                                 .device = d->memory + arena + i * buffer,
                                                 .bytes = opts->buffer_bytes};
        ATTND_ASSERT(d->pub.buffers[i].host);
    }
    d->max_tokens = next_limit;
    attn_cpu_opts cpu = {.num_threads = 1, .max_rows = opts->max_rows};
    attnd_err err = attn_cpu_create(&d->cpu, &cpu, info);
    if (err) {
        fake_close(&d->pub);
        return err;
    }
    *out = &d->pub;
    return ATTND_OK;
}

static attnd_err fake_check_row(const attn_device *d, const attn_shape *shape, const attn_row *row,
                                attnd_errinfo *info) {
    (void)d;
    (void)shape;
    (void)row;
    (void)info;
    return ATTND_OK;
}

// ---- work

static attnd_err fake_plan(attn_device *pub, uint32_t buffer, const attn_params *p,
                           attn_choice *choice, attnd_errinfo *info) {
    fake_device *d = of(pub);
    ATTND_ASSERT(p->num_rows > 0);
    int64_t tokens = 0;
    for (uint32_t i = 0; i < p->num_rows; i++) {
        tokens += p->rows[i].q_count;
    }
    free(d->planned[buffer].rows);
    d->planned[buffer].rows = NULL;
    d->is_planned[buffer] = false;
    if (d->max_tokens && tokens > d->max_tokens) {
        return attnd_fail(info, ATTND_EMSGSIZE, "rows", "more than %d query tokens", d->max_tokens);
    }
    d->planned[buffer] = *p;
    d->planned[buffer].rows = calloc(p->num_rows, sizeof(*p->rows));
    ATTND_ASSERT(d->planned[buffer].rows);
    memcpy(d->planned[buffer].rows, p->rows, p->num_rows * sizeof(*p->rows));
    d->is_planned[buffer] = true;
    *choice = (attn_choice){.kernel = "fake", .why = "no GPU", .splits = 1, .rows = p->num_rows};
    return ATTND_OK;
}

static attnd_err append(fake_device *d, work w, attnd_errinfo *info) {
    if (d->lost) {
        free(w.launch.rows);
        return illegal_address(info);
    }
    ATTND_ASSERT(d->num < MAX_WORK);
    d->work[d->num++] = w;
    return ATTND_OK;
}

static attnd_err launch(fake_device *d, uint32_t buffer, bool gated, attnd_errinfo *info) {
    ATTND_ASSERT(d->is_planned[buffer]);
    work w = {.kind = LAUNCH, .gated = gated, .buffer = buffer, .launch = d->planned[buffer]};
    d->planned[buffer].rows = NULL;
    d->is_planned[buffer] = false;
    return append(d, w, info);
}

static attnd_err fake_launch(attn_device *d, uint32_t buffer, attnd_errinfo *info) {
    return launch(of(d), buffer, false, info);
}

static bool fake_gates(attn_device *d, uint32_t buffer) {
    return of(d)->is_planned[buffer];
}

static attnd_err fake_launch_gated(attn_device *pub, uint32_t buffer, uint64_t pair,
                                   attnd_errinfo *info) {
    fake_device *d = of(pub);
    d->gates[buffer] = (gate){.met_us = 0};
    attnd_err err = append(d, (work){.kind = GATE, .buffer = buffer, .a = pair}, info);
    err = err ? err : launch(d, buffer, true, info);
    work signal = {.kind = SIGNAL, .gated = true, .buffer = buffer, .a = pair};
    return err ? err : append(d, signal, info);
}

static bool fake_passed(attn_device *d, uint32_t buffer, uint32_t *waited_us) {
    *waited_us = of(d)->gates[buffer].waited_us;
    return of(d)->gates[buffer].passed;
}

static attnd_err transfer(fake_device *d, work w, attnd_errinfo *info) {
    uint64_t bytes = d->pub.buffers[w.buffer].bytes;
    if (w.a > bytes || w.b > bytes - w.a) {
        return cuda_error(info, FAKE_INVALID_VALUE, "invalid argument");
    }
    return append(d, w, info);
}

static bool fake_uploaded(attn_device *pub, uint32_t buffer) {
    (void)pub;
    (void)buffer;
    return true;
}

static attnd_err fake_download(attn_device *d, uint32_t buffer, uint64_t off, uint64_t bytes,
                               attnd_errinfo *info) {
    return transfer(of(d), (work){.kind = DOWNLOAD, .buffer = buffer, .a = off, .b = bytes}, info);
}

static attnd_err fake_move(attn_device *d, uint64_t dst, uint64_t src, uint64_t row_bytes,
                           uint64_t pitch, uint64_t num_rows, attnd_errinfo *info) {
    work w = {.kind = MOVE, .a = dst, .b = src, .c = row_bytes, .d = pitch, .e = num_rows};
    return append(of(d), w, info);
}

// fake_read and fake_write go by the descriptor: the mapping is closed, or being worked on.
static attnd_err fake_read(attn_device *d, void *dst, uint64_t off, uint64_t bytes,
                           attnd_errinfo *info) {
    return pread(d->arena_fd, dst, bytes, (off_t)off) == (ssize_t)bytes ? ATTND_OK
                                                                        : illegal_address(info);
}

static attnd_err fake_write(attn_device *d, uint64_t off, const void *src, uint64_t bytes,
                            attnd_errinfo *info) {
    return pwrite(d->arena_fd, src, bytes, (off_t)off) == (ssize_t)bytes ? ATTND_OK
                                                                         : illegal_address(info);
}

static bool fake_pin(attn_device *d, void *base, uint64_t bytes) {
    (void)d;
    (void)base;
    (void)bytes;
    return true;
}

static void fake_unpin(attn_device *d, void *base) {
    (void)d;
    (void)base;
}

// ---- shared with clients

// fake_region_make: memory of a file is zero.
static attnd_err fake_region_make(attn_device *pub, uint64_t bytes, attn_device_region *out,
                                  attnd_errinfo *info) {
    fake_device *d = of(pub);
    uint64_t size = rounded(bytes);
    int fd = memfd_create("fake-region", MFD_CLOEXEC);
    void *base = fd >= 0 && ftruncate(fd, (off_t)size) == 0
                     ? mmap(NULL, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0)
                     : MAP_FAILED;
    pthread_mutex_lock(&d->lock);
    bool room = base != MAP_FAILED && d->num_regions < MAX_REGIONS;
    if (room) {
        d->regions[d->num_regions++] = (range){base, size};
    }
    pthread_mutex_unlock(&d->lock);
    if (!room) {
        if (base != MAP_FAILED) {
            munmap(base, size);
        }
        if (fd >= 0) {
            close(fd);
        }
        return attnd_fail(info, ATTND_ENOMEM, "memory", "no memory on the GPU");
    }
    *out = (attn_device_region){.address = (uintptr_t)base, .bytes = size, .fd = fd};
    return ATTND_OK;
}

static void fake_region_free(attn_device *pub, attn_device_region *r) {
    fake_device *d = of(pub);
    uint32_t i = 0;
    pthread_mutex_lock(&d->lock);
    while (i < d->num_regions && (uintptr_t)d->regions[i].base != r->address) {
        i++;
    }
    ATTND_ASSERT(i < d->num_regions);
    d->regions[i] = d->regions[--d->num_regions];
    pthread_mutex_unlock(&d->lock);
    munmap((void *)(uintptr_t)r->address, r->bytes);
    close(r->fd);
    *r = (attn_device_region){.fd = -1};
}

static attnd_err fake_flags_map(attn_device *pub, void *base, uint64_t bytes, uint64_t *address,
                                attnd_errinfo *info) {
    (void)pub, (void)bytes, (void)info;
    ATTND_ASSERT((uintptr_t)base % PAGE == 0 && bytes % PAGE == 0);
    *address = (uintptr_t)base;
    return ATTND_OK;
}

static attnd_err fake_signal(attn_device *d, uint64_t pair, attnd_errinfo *info) {
    return append(of(d), (work){.kind = SIGNAL, .a = pair}, info);
}

static attnd_err fake_mark(attn_device *d, uint32_t buffer, attnd_errinfo *info) {
    of(d)->passed[buffer] = false;
    return append(of(d), (work){.kind = MARK, .buffer = buffer}, info);
}

// open_region opens or closes the region that an address lies in, if any.
static void open_region(const fake_device *d, uintptr_t at, int access) {
    for (uint32_t i = 0; i < d->num_regions; i++) {
        uintptr_t base = (uintptr_t)d->regions[i].base;
        if (at >= base && at - base < d->regions[i].bytes) {
            ATTND_ASSERT(mprotect(d->regions[i].base, d->regions[i].bytes, access) == 0);
        }
    }
}

static void open_regions(const fake_device *d, const attn_params *p, int access) {
    for (uint32_t r = 0; r < p->num_rows; r++) {
        open_region(d, (uintptr_t)(p->rows[r].q ? p->rows[r].q : p->rows[r].k_new), access);
    }
}

// pass_gate is true when the gate has been passed or has given up.
static bool pass_gate(fake_device *d, const work *w) {
    gate *g = &d->gates[w->buffer];
    uint64_t now_us = attnd_clock_us();
    g->met_us = g->met_us ? g->met_us : now_us;
    g->waited_us = (uint32_t)(now_us - g->met_us);
    open_region(d, w->a, PROT_READ);
    const proto_flag *pair = (const proto_flag *)(uintptr_t)w->a;
    g->passed = __atomic_load_n(&pair->ready, __ATOMIC_ACQUIRE) != 0;
    open_region(d, w->a, PROT_NONE);
    return g->passed || g->waited_us > ATTN_DEVICE_GATE_US;
}

static void answer(const fake_device *d, uint64_t pair) {
    const union {
        proto_flag pair;
        uint64_t bits;
    } answered = {.pair = {.ready = 0, .done = 1}};
    open_region(d, pair, PROT_READ | PROT_WRITE);
    __atomic_store_n((uint64_t *)(uintptr_t)pair, answered.bits, __ATOMIC_RELEASE);
    open_region(d, pair, PROT_NONE);
}

static attnd_err run_launch(fake_device *d, work *w, bool shut) {
    attnd_err err = ATTND_OK;
    if (!shut) {
        open_regions(d, &w->launch, PROT_READ | PROT_WRITE);
        err = attn_cpu_run(d->cpu, &w->launch, NULL, NULL);
        open_regions(d, &w->launch, PROT_NONE);
    }
    free(w->launch.rows);
    w->launch.rows = NULL;
    return err;
}

static attnd_err run(fake_device *d, work *w) {
    const attn_device_buffer *b = &d->pub.buffers[w->buffer];
    bool shut = w->gated && !d->gates[w->buffer].passed;
    attnd_err err = ATTND_OK;
    switch (w->kind) {
    case UPLOAD:
        memcpy(b->device + w->a, b->host + w->a, w->b);
        break;
    case DOWNLOAD:
        memcpy(b->host + w->a, b->device + w->a, w->b);
        break;
    case MOVE:
        for (uint64_t r = 0; r < w->e; r++) {
            memcpy(d->memory + w->a + r * w->d, d->memory + w->b + r * w->d, w->c);
        }
        break;
    case GATE: // is pass_gate's
        break;
    case LAUNCH:
        err = run_launch(d, w, shut);
        break;
    case SIGNAL: // to a thread or process that looks at it now
        if (!shut) {
            answer(d, w->a);
        }
        break;
    case MARK:
        d->passed[w->buffer] = true;
    }
    return err;
}

static void protect(fake_device *d, int access) {
    ATTND_ASSERT(mprotect(d->memory, d->bytes, access) == 0);
}

// fake_upload copies at once, and again where it stands in the order: a device may do it at any
// time in between.
static attnd_err fake_upload(attn_device *pub, uint32_t buffer, uint64_t off, uint64_t bytes,
                             attnd_errinfo *info) {
    fake_device *d = of(pub);
    work w = {.kind = UPLOAD, .buffer = buffer, .a = off, .b = bytes};
    attnd_err err = transfer(d, w, info);
    if (!err) {
        protect(d, PROT_READ | PROT_WRITE);
        (void)run(d, &w);
        protect(d, PROT_NONE);
    }
    return err;
}

// run_to runs what comes up to the buffer's mark, or to a gate that waits.
static void run_to(fake_device *d, uint32_t buffer) {
    pthread_mutex_lock(&d->lock);
    protect(d, PROT_READ | PROT_WRITE);
    uint32_t at = 0;
    while (at < d->num && !d->passed[buffer] && !d->lost) {
        work *w = &d->work[at];
        if (w->kind == GATE && !pass_gate(d, w)) {
            break;
        }
        d->lost = run(d, w) != ATTND_OK;
        at++;
    }
    protect(d, PROT_NONE);
    pthread_mutex_unlock(&d->lock);
    d->num -= at;
    memmove(d->work, d->work + at, d->num * sizeof(*d->work));
}

// fake_ended does the work at the second look.
static attnd_err fake_ended(attn_device *pub, uint32_t buffer, bool *ended, attnd_errinfo *info) {
    fake_device *d = of(pub);
    if (!d->passed[buffer] && !d->lost && d->looked) {
        run_to(d, buffer);
    }
    d->looked = !d->looked;
    *ended = d->passed[buffer];
    return d->lost ? illegal_address(info) : ATTND_OK;
}

static bool fake_lost(attn_device *d) {
    return of(d)->lost;
}

static bool fake_spoilt(attn_device *d) {
    (void)d; // an access can lose it, nothing else
    return false;
}

const attn_device_ops fake_device_ops = {
    .open = fake_open,
    .close = fake_close,
    .check_shape = attn_check_shape,
    .check_row = fake_check_row,
    .plan = fake_plan,
    .launch = fake_launch,
    .gates = fake_gates,
    .launch_gated = fake_launch_gated,
    .passed = fake_passed,
    .upload = fake_upload,
    .uploaded = fake_uploaded,
    .download = fake_download,
    .move = fake_move,
    .read = fake_read,
    .write = fake_write,
    .pin = fake_pin,
    .unpin = fake_unpin,
    .region_make = fake_region_make,
    .region_free = fake_region_free,
    .flags_map = fake_flags_map,
    .flags_unmap = fake_unpin,
    .signal = fake_signal,
    .mark = fake_mark,
    .ended = fake_ended,
    .lost = fake_lost,
    .spoilt = fake_spoilt,
};
