// Streams of the host: a queue of works, and a thread that does them.  What a graph holds is such a
// queue, too.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/proto_region.h"
#include "tests/check_main.h"
#include "tests/device/fake_device.h"
#include "tests/e2e/service_device.h"

typedef enum kind { COPY, WRITE, WAIT, PAIR, PAUSE } kind;

typedef struct work {
    kind kind;
    attnd_service_copy copy;
    uint32_t *flag, value;   // of WRITE; WAIT waits until it is not 0; value of PAUSE: ms
    proto_flag *pair, *host; // of PAIR: the same on the device, and in the flags
} work;

typedef struct works {
    work *all;
    size_t num, max;
} works;

struct service_graph {
    works works;
};

struct service_stream {
    pthread_t thread;
    pthread_mutex_t lock; // guards all below
    pthread_cond_t change;
    works queue; // those from `done` on are to be done
    size_t done;
    bool stop;
    service_graph *capture; // NULL = none
    uint64_t capture_id;
};

static void add(works *w, const work *one) {
    if (w->num == w->max) {
        w->max = w->max ? 2 * w->max : 64;
        w->all = realloc(w->all, w->max * sizeof(*w->all));
        ck_assert_ptr_nonnull(w->all);
    }
    w->all[w->num++] = *one;
}

static void push(service_stream *s, const work *one) {
    pthread_mutex_lock(&s->lock);
    if (s->done == s->queue.num) {
        s->done = s->queue.num = 0;
    }
    add(s->capture ? &s->capture->works : &s->queue, one);
    pthread_cond_broadcast(&s->change);
    pthread_mutex_unlock(&s->lock);
}

static void do_copy(const attnd_service_copy *c) {
    for (uint64_t r = 0; r < c->rows; r++) {
        for (uint64_t h = 0; h < c->heads; h++) {
            memcpy((uint8_t *)c->to + r * c->to_row + h * c->width,
                   (const uint8_t *)c->from + r * c->from_row + h * c->from_head, c->width);
        }
    }
}

static void nap(long us) {
    nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL);
}

// await waits as a stream does: nothing but the flag ends it.
static void await(const uint32_t *flag) {
    for (int i = 0; !__atomic_load_n(flag, __ATOMIC_ACQUIRE); i++) {
        if (i < 100) {
            sched_yield();
        } else {
            nap(20);
        }
    }
}

// hand_pair is a kernel where there are pairs on the device (proto_region.h).
static void hand_pair(proto_flag *pair, proto_flag *flag) {
    enum { RARELY = 16 };
    __atomic_store_n(&pair->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pair->ready, 1, __ATOMIC_RELEASE);
    __atomic_store_n(&flag->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&flag->ready, 1, __ATOMIC_RELEASE);
    for (int i = 1; !__atomic_load_n(&pair->done, __ATOMIC_ACQUIRE); i++) {
        if (i % RARELY == 0 && __atomic_load_n(&flag->done, __ATOMIC_ACQUIRE)) {
            break;
        }
        if (i < 100) {
            sched_yield();
        } else {
            nap(20);
        }
    }
    __atomic_store_n(&pair->ready, 0, __ATOMIC_RELEASE);
}

static void do_work(const work *w) {
    switch (w->kind) {
    case COPY:
        do_copy(&w->copy);
        break;
    case WRITE:
        __atomic_store_n(w->flag, w->value, __ATOMIC_RELEASE);
        break;
    case WAIT:
        await(w->flag);
        break;
    case PAIR:
        hand_pair(w->pair, w->host);
        break;
    case PAUSE:
        nap((long)w->value * 1000);
    }
}

static void *run(void *arg) {
    service_stream *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        if (s->done == s->queue.num) {
            pthread_cond_wait(&s->change, &s->lock);
            continue;
        }
        work one = s->queue.all[s->done];
        pthread_mutex_unlock(&s->lock);
        do_work(&one);
        pthread_mutex_lock(&s->lock);
        s->done++;
        pthread_cond_broadcast(&s->change);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

void service_use(void) {}

void *service_alloc(size_t bytes) {
    void *p = calloc(1, bytes);
    ck_assert_ptr_nonnull(p);
    return p;
}

void service_free(void *p) {
    free(p);
}

service_stream *service_stream_create(void) {
    service_stream *s = calloc(1, sizeof(*s));
    ck_assert_ptr_nonnull(s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->change, NULL);
    ck_assert_int_eq(pthread_create(&s->thread, NULL, run, s), 0);
    return s;
}

void service_stream_free(service_stream *s) {
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->change);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->change);
    pthread_mutex_destroy(&s->lock);
    free(s->queue.all);
    free(s);
}

void service_copy(service_stream *s, void *to, const void *from, size_t bytes) {
    push(s, &(work){.kind = COPY,
                    .copy = {.to = to, .from = from, .rows = 1, .heads = 1, .width = bytes}});
}

void service_pause(service_stream *s, int ms) {
    push(s, &(work){.kind = PAUSE, .value = (uint32_t)ms});
}

static bool is_idle(service_stream *s) {
    pthread_mutex_lock(&s->lock);
    bool idle = s->done == s->queue.num;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

bool service_sync(service_stream *s, int ms) {
    uint64_t until = attnd_clock_ms() + (uint64_t)ms;
    while (!is_idle(s) && attnd_clock_ms() < until) {
        nap(50);
    }
    return is_idle(s);
}

void service_capture(service_stream *s) {
    static atomic_ullong captures;
    service_graph *g = calloc(1, sizeof(*g));
    ck_assert_ptr_nonnull(g);
    pthread_mutex_lock(&s->lock);
    s->capture = g;
    s->capture_id = atomic_fetch_add(&captures, 1) + 1;
    pthread_mutex_unlock(&s->lock);
}

service_graph *service_end(service_stream *s) {
    pthread_mutex_lock(&s->lock);
    service_graph *g = s->capture;
    s->capture = NULL;
    pthread_mutex_unlock(&s->lock);
    return g;
}

void service_launch(service_graph *g, service_stream *s) {
    for (size_t i = 0; i < g->works.num; i++) {
        push(s, &g->works.all[i]);
    }
}

void service_graph_free(service_graph *g) {
    free(g->works.all);
    free(g);
}

// ---- the engine

enum { STREAMS = 8, CLOSE_MS = 5000 };

typedef struct region {
    uint8_t *base;
    uint64_t bytes, pairs_off;
    service_stream *streams[STREAMS]; // that use it
} region;

static attnd_err device(uint8_t uuid[16], bool *mps, attnd_errinfo *info) {
    (void)info;
    *mps = getenv("ATTND_FAKE_MPS") != NULL;
    memcpy(uuid, FAKE_UUID, 16);
    return ATTND_OK;
}

static attnd_err engine_open(void **state, void **base, const attnd_service_opts *opts,
                             attnd_errinfo *info) {
    region *r = calloc(1, sizeof(*r));
    ck_assert_ptr_nonnull(r);
    r->bytes = opts->bytes;
    r->pairs_off = opts->pairs_off;
    r->base = mmap(NULL, opts->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opts->fd, 0);
    if (r->base == MAP_FAILED) {
        free(r);
        return attnd_fail(info, ATTND_ENOTSUP, "engine", "the region cannot be mapped");
    }
    *state = r;
    *base = r->base;
    return ATTND_OK;
}

static void engine_close(void *state) {
    region *r = state;
    for (int i = 0; i < STREAMS && r->streams[i]; i++) {
        ck_assert(service_sync(r->streams[i], CLOSE_MS));
    }
    munmap(r->base, r->bytes);
    free(r);
}

static attnd_err capture(void *state, void *stream, uint64_t *id, attnd_errinfo *info) {
    service_stream *s = stream;
    (void)state, (void)info;
    pthread_mutex_lock(&s->lock);
    *id = s->capture ? s->capture_id : 0;
    pthread_mutex_unlock(&s->lock);
    return ATTND_OK;
}

// push_flags is the work between the copies.
static void push_flags(const region *r, service_stream *stream, const attnd_hand_over *h) {
    if (r->pairs_off && !h->at_flags) {
        proto_flag *pairs = (proto_flag *)(void *)(r->base + r->pairs_off);
        proto_flag *flag = (proto_flag *)(void *)h->ready;
        push(stream, &(work){.kind = PAIR, .pair = pairs + h->pair, .host = flag});
        return;
    }
    push(stream, &(work){.kind = WRITE, .flag = h->done, .value = 0});
    push(stream, &(work){.kind = WRITE, .flag = h->ready, .value = 1});
    push(stream, &(work){.kind = WAIT, .flag = h->done});
}

static attnd_err hand_over(void *state, void *stream, const attnd_hand_over *h,
                           attnd_errinfo *info) {
    region *r = state;
    int at = 0;
    (void)info;
    while (at < STREAMS - 1 && r->streams[at] && r->streams[at] != stream) {
        at++;
    }
    r->streams[at] = stream;
    for (uint32_t i = 0; i < h->num_in; i++) {
        push(stream, &(work){.kind = COPY, .copy = h->in[i]});
    }
    push_flags(r, stream, h);
    for (uint32_t i = 0; i < h->num_out; i++) {
        push(stream, &(work){.kind = COPY, .copy = h->out[i]});
    }
    return ATTND_OK;
}

static bool idle(void *state, void *stream) {
    (void)state;
    return is_idle(stream);
}

const attnd_engine *service_engine(void) {
    static const attnd_service ops = {.device = device,
                                      .open = engine_open,
                                      .close = engine_close,
                                      .capture = capture,
                                      .hand_over = hand_over,
                                      .idle = idle};
    static const attnd_engine engine = {.name = "host service", .service = &ops};
    return &engine;
}
