// The places of a flight's message and reply are taken one behind the other; when nothing is in
// flight the area starts anew.
#include "tests/e2e/harness_ring.h"

#include <stdio.h>
#include <string.h>

#include "tests/e2e/ring_client.h"

enum { ENTRIES = 1024, REPLY_BYTES = 256 << 10 };
#define DATA_BYTES (200ull << 20)

struct e2e_ring {
    ring_client client;
    uint64_t user, used;
    uint32_t flights;
    proto_ring_complete done[ENTRIES]; // by user % ENTRIES
};

e2e_ring *e2e_ring_open(const char *url) {
    const char *transport = getenv("ATTND_E2E_TRANSPORT");
    if (!transport || strcmp(transport, "ring") != 0 || strstr(url, ".admin")) {
        return NULL;
    }
    char path[128];
    snprintf(path, sizeof(path), "%s.attach", url + strlen("ipc://"));
    e2e_ring *ring = calloc(1, sizeof(*ring));
    ck_assert_ptr_nonnull(ring);
    ATTND_CK_OK(ring_client_open(&ring->client, path, ENTRIES, DATA_BYTES));
    return ring;
}

void e2e_ring_close(e2e_ring *ring) {
    ring_client_close(&ring->client);
    free(ring);
}

static uint64_t take(e2e_ring *ring, uint64_t bytes) {
    uint64_t at = ring->used;
    ring->used += (bytes + PROTO_RING_ALIGN - 1) / PROTO_RING_ALIGN * PROTO_RING_ALIGN;
    ck_assert_uint_le(ring->used, DATA_BYTES);
    return at;
}

void e2e_ring_send(e2e_flight *f, const void *msg, size_t bytes) {
    e2e_ring *ring = f->ring;
    ring->used = ring->flights ? ring->used : 0;
    uint64_t room = bytes + REPLY_BYTES, at = take(ring, bytes);
    f->reply_at = take(ring, room);
    f->user = ++ring->user;
    ring->flights++;
    memset(&ring->done[f->user % ENTRIES], 0, sizeof(ring->done[0]));
    if (bytes) {
        memcpy(ring_client_data(&ring->client, at), msg, bytes);
    }
    ring_client_submit(&ring->client, at, (uint32_t)bytes, f->reply_at, (uint32_t)room, f->user);
    ring_client_bell(&ring->client);
}

// pump takes what has come; true when the flight's completion is there.
static bool pump(e2e_flight *f) {
    e2e_ring *ring = f->ring;
    proto_ring_complete done;
    while (ring_client_take(&ring->client, &done)) {
        ring->done[done.user % ENTRIES] = done;
    }
    return ring->done[f->user % ENTRIES].user == f->user;
}

bool e2e_ring_arrived(e2e_flight *f) {
    return pump(f) || ring_client_closed(&f->ring->client, 0);
}

const void *e2e_ring_recv(e2e_flight *f, int ms, attnd_err *status, size_t *bytes) {
    e2e_ring *ring = f->ring;
    proto_ring_complete done;
    uint64_t until = e2e_now_ms() + (uint64_t)ms;
    *status = ATTND_ECONN;
    while (!pump(f) && e2e_now_ms() < until) {
        if (!ring_client_wait(&ring->client, &done, ms)) {
            return NULL;
        }
        ring->done[done.user % ENTRIES] = done;
    }
    const proto_ring_complete *mine = &ring->done[f->user % ENTRIES];
    if (mine->user != f->user) {
        return NULL;
    }
    *status = (attnd_err)mine->status;
    *bytes = mine->reply_bytes;
    return mine->reply_bytes ? ring_client_data(&ring->client, f->reply_at) : NULL;
}

void e2e_ring_done(e2e_flight *f) {
    f->ring->flights--;
}
