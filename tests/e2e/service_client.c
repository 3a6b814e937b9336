// The other end of a region, in the plainest way.
#include "tests/e2e/service_client.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/device/fake_device.h"

enum { SLOT_BYTES = 1024 }; // of a message, and of a reply

static void recv_region(service_client *c, int fds[2]) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec iov = {&c->given, sizeof(c->given)};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = sizeof(control.space)};
    ck_assert_int_eq(recvmsg(c->ring.fd, &msg, MSG_CMSG_CLOEXEC), sizeof(c->given));
    const struct cmsghdr *h = CMSG_FIRSTHDR(&msg);
    ck_assert(h && h->cmsg_type == SCM_RIGHTS && h->cmsg_len == CMSG_LEN(2 * sizeof(int)));
    memcpy(fds, CMSG_DATA(h), 2 * sizeof(int));
}

static void *map(int fd, uint64_t bytes) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert(base != MAP_FAILED);
    close(fd);
    return base;
}

attnd_err service_ask(service_client *c, const char *path, const proto_attach *attach,
                      const proto_region_ask *region) {
    struct {
        proto_attach attach;
        proto_region_ask region;
    } packet = {*attach, *region};
    memset(c, 0, sizeof(*c));
    ck_assert(ring_client_connect(&c->ring, path));
    attnd_err err = ring_client_ask_more(&c->ring, &packet.attach, sizeof(packet));
    if (err) {
        return err;
    }
    int fds[2];
    recv_region(c, fds);
    ck_assert_uint_eq(c->given.magic, PROTO_RING_MAGIC);
    ck_assert_uint_eq(c->given.num_flags, region->num_flags);
    ck_assert_uint_ge(c->given.bytes, region->bytes);
    ck_assert_uint_eq(c->given.flags_bytes, proto_flags_bytes(region->num_flags));
    c->region = map(fds[0], c->given.bytes);
    c->head = map(fds[1], c->given.flags_bytes);
    c->pairs = (proto_flag *)(void *)((uint8_t *)c->head + PROTO_FLAGS_HEAD_BYTES);
    if (c->given.pairs_off) {
        c->there = (proto_flag *)(void *)(c->region + c->given.pairs_off);
    }
    return ATTND_OK;
}

static const proto_attach good = {.magic = PROTO_RING_MAGIC,
                                  .version = PROTO_VERSION,
                                  .flags = PROTO_ATTACH_REGION,
                                  .entries = 128,
                                  .data_bytes = SERVICE_RING_BYTES};

static proto_region_ask ask_for(uint64_t bytes, uint32_t num_flags) {
    proto_region_ask ask = {.bytes = bytes, .num_flags = num_flags};
    if (getenv("ATTND_FAKE_MPS")) {
        ask.flags = PROTO_REGION_MPS | PROTO_REGION_PAIRS;
        memcpy(ask.device, FAKE_UUID, sizeof(ask.device));
    }
    return ask;
}

void service_open(service_client *c, const char *path, uint64_t bytes, uint32_t num_flags) {
    proto_region_ask ask = ask_for(bytes, num_flags);
    ATTND_CK_OK(service_ask(c, path, &good, &ask));
    ATTND_CK_OK(ring_client_call(&c->ring, PROTO_HELLO, ++c->id, "{}", 2, NULL));
}

void service_join(service_client *c, const char *path, const char *hello_reply, uint64_t bytes,
                  uint32_t num_flags) {
    proto_region_ask ask = ask_for(bytes, num_flags);
    proto_attach attach = good;
    cJSON *doc = cJSON_Parse(hello_reply);
    const char *session = cJSON_GetStringValue(cJSON_GetObjectItem(doc, "session"));
    const char *secret = cJSON_GetStringValue(cJSON_GetObjectItem(doc, "secret"));
    ck_assert(session && secret && strlen(secret) == 32);
    attach.session = strtoull(session, NULL, 16);
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        ck_assert_int_eq(sscanf(secret + 2 * i, "%2x", &byte), 1);
        attach.secret[i] = (uint8_t)byte;
    }
    cJSON_Delete(doc);
    ATTND_CK_OK(service_ask(c, path, &attach, &ask));
    c->id = 1ull << 32; // apart from those that go over NNG
}

void service_close(service_client *c) {
    if (c->region) {
        const proto_attach_left left = {.magic = PROTO_ATTACH_LEFT};
        munmap(c->region, c->given.bytes);
        munmap(c->head, c->given.flags_bytes);
        (void)!send(c->ring.fd, &left, sizeof(left), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    ring_client_close(&c->ring);
    memset(c, 0, sizeof(*c));
    c->ring.fd = -1;
}

// slot is where a message lies, and its reply; the first is ring_client_call's.
static uint64_t slot(uint64_t id) {
    return (1 + id % 127) * SLOT_BYTES;
}

uint64_t service_send(service_client *c, const void *body, size_t bytes) {
    uint64_t id = ++c->id, at = slot(id);
    uint8_t *msg = ring_client_data(&c->ring, at);
    proto_write_header(msg, PROTO_ATTEND_ALL, id, ATTND_OK, PROTO_BODY + bytes);
    memcpy(msg + PROTO_BODY, body, bytes);
    ring_client_submit(&c->ring, at, (uint32_t)(PROTO_BODY + bytes), SERVICE_RING_BYTES / 2 + at,
                       SLOT_BYTES, id);
    ring_client_bell(&c->ring);
    return id;
}

attnd_err service_recv(service_client *c, const void **reply) {
    proto_ring_complete done;
    if (!ring_client_wait(&c->ring, &done, SERVICE_WAIT_MS)) {
        return ATTND_ECONN;
    }
    if (reply) {
        *reply = ring_client_data(&c->ring, SERVICE_RING_BYTES / 2 + slot(done.user) + PROTO_BODY);
    }
    return (attnd_err)done.status;
}

void service_raise(service_client *c, uint32_t pair) {
    if (c->there) {
        __atomic_store_n(&c->there[pair].done, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&c->there[pair].ready, 1, __ATOMIC_RELEASE);
        __atomic_store_n(&c->pairs[pair].done, 0, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&c->pairs[pair].ready, 1, __ATOMIC_RELEASE);
}

static bool is_done(const service_client *c, uint32_t pair) {
    return __atomic_load_n(&c->pairs[pair].done, __ATOMIC_ACQUIRE) ||
           (c->there && __atomic_load_n(&c->there[pair].done, __ATOMIC_ACQUIRE));
}

bool service_lower(service_client *c, uint32_t pair, int ms) {
    uint64_t begin = attnd_clock_us(), waited = 0;
    while (!is_done(c, pair)) {
        waited = attnd_clock_us() - begin;
        if (waited > (uint64_t)ms * 1000) {
            return false;
        }
        if (waited > 100) { // the daemon may want this processor
            usleep(20);
        }
    }
    if (c->there) {
        __atomic_store_n(&c->there[pair].ready, 0, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&c->pairs[pair].done, 0, __ATOMIC_RELEASE);
    return true;
}

bool service_ready(const service_client *c, uint32_t pair) {
    return __atomic_load_n(&c->pairs[pair].ready, __ATOMIC_ACQUIRE) != 0;
}

// ---- tensors

static uint64_t place(uint64_t *end, uint64_t floats) {
    uint64_t off = *end;
    *end +=
        (floats * sizeof(float) + PROTO_REGION_ALIGN - 1) / PROTO_REGION_ALIGN * PROTO_REGION_ALIGN;
    return off;
}

proto_attend_all service_layout(const play_step *s, uint64_t off, uint32_t first_flag) {
    const play_model *m = s->model;
    proto_attend_all all = {.step = s->handle,
                            .num_layers = m->layers,
                            .first_flag = first_flag,
                            .flags = PROTO_ATTEND_LSE};
    all.q.off = place(&off, (uint64_t)s->rows * m->q_heads * m->head_dim);
    all.k.off = place(&off, (uint64_t)s->new_rows * m->kv_heads * m->head_dim);
    all.v.off = place(&off, (uint64_t)s->new_rows * m->kv_heads * m->v_head_dim);
    all.out_off = place(&off, (uint64_t)s->rows * m->q_heads * m->v_head_dim);
    all.lse_off = place(&off, (uint64_t)s->rows * m->q_heads);
    return all;
}

void service_write(service_client *c, const play_step *s, const proto_attend_all *all,
                   const play_tensors *t) {
    const play_model *m = s->model;
    size_t q = (size_t)m->q_heads * m->head_dim, stride = all->q.stride_token;
    for (uint32_t i = 0; i < s->rows; i++) {
        memcpy(c->region + all->q.off + i * (stride ? stride : q) * sizeof(float), t->q + i * q,
               q * sizeof(float));
    }
    if (s->new_rows) {
        memcpy(c->region + all->k.off, t->k,
               (size_t)s->new_rows * m->kv_heads * m->head_dim * sizeof(float));
        memcpy(c->region + all->v.off, t->v,
               (size_t)s->new_rows * m->kv_heads * m->v_head_dim * sizeof(float));
    }
}

// service_check makes the reply of a plain attend from what lies in the region.
void service_check(service_client *c, const play_step *s, const proto_attend_all *all,
                   uint32_t layer, const play_tensors *t) {
    const play_model *m = s->model;
    size_t out_bytes = (size_t)s->rows * m->q_heads * m->v_head_dim * sizeof(float);
    size_t lse_bytes = (size_t)s->rows * m->q_heads * sizeof(float);
    proto_attend_reply head = {.rows = s->rows, .out_off = PROTO_BODY + sizeof(head)};
    e2e_reply r = {.bytes = head.out_off + out_bytes + lse_bytes};
    head.lse_off = all->flags & PROTO_ATTEND_LSE ? head.out_off + (uint32_t)out_bytes : 0;
    r.msg = calloc(1, r.bytes);
    r.body = r.msg + PROTO_BODY;
    r.body_bytes = r.bytes - PROTO_BODY;
    memcpy(r.body, &head, sizeof(head));
    memcpy(r.msg + head.out_off, c->region + all->out_off, out_bytes);
    if (head.lse_off) {
        memcpy(r.msg + head.lse_off, c->region + all->lse_off, lse_bytes);
    }
    play_check(s, layer, t, &r);
    free(r.msg);
}

void service_layers(service_client *c, const play_step *s, const proto_attend_all *all,
                    uint32_t from, uint32_t to) {
    for (uint32_t layer = from; layer < to; layer++) {
        play_tensors t = play_random(s);
        uint32_t pair = all->first_flag + layer - all->first_layer;
        service_write(c, s, all, &t);
        service_raise(c, pair);
        ck_assert_msg(service_lower(c, pair, SERVICE_WAIT_MS), "layer %u is not done", layer);
        service_check(c, s, all, layer, &t);
        play_tensors_fini(&t);
    }
}
