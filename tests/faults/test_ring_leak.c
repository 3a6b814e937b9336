// Ten thousand rings that come and go, in every way that a client can leave: afterwards the daemon
// has as many descriptors and mappings as before.
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/e2e/harness.h"
#include "tests/e2e/ring_client.h"

enum { SESSIONS = 10000, DATA_BYTES = 1 << 18, KINDS = 8 };

static const char *const flags[] = {"--set", "cache.memory=64MiB",     "--set", "cache.slab=1MiB",
                                    "--set", "server.log_level=error", NULL};

// visit comes, and leaves in one of several ways.  False when the daemon had no place.
static bool visit(const char *path, int kind) {
    ring_client r;
    proto_attach ask = {.magic = PROTO_RING_MAGIC,
                        .version = PROTO_VERSION,
                        .entries = 16,
                        .data_bytes = DATA_BYTES};
    ck_assert(ring_client_connect(&r, path));
    if (kind == 0) { // without a word
        ring_client_close(&r);
        return true;
    }
    if (kind == 1) { // without waiting for the answer
        send(r.fd, &ask, sizeof(ask), MSG_NOSIGNAL);
        ring_client_close(&r);
        return true;
    }
    ask.entries = kind == 2 ? 3 : 16; // refused
    attnd_err err = ring_client_ask(&r, &ask);
    bool place = kind == 2 ? err == ATTND_EINVAL : err == ATTND_OK;
    if (place && kind > 3) {
        err = ring_client_call(&r, PROTO_HELLO, 1, "{}", 2, NULL);
        ck_assert(err == ATTND_OK || err == ATTND_EBUSY); // sessions outlive connections a little
    }
    if (place && kind == 5) { // in the middle of something
        proto_write_header(ring_client_data(&r, 0), PROTO_STATS, 2, ATTND_OK, PROTO_BODY);
        ring_client_submit(&r, 0, PROTO_BODY, 65536, 65536, 2);
        ring_client_bell(&r);
    } else if (place && kind == 6) {
        proto_ring_store(&r.head->sq_tail, r.sq_tail + 1000);
        send(r.fd, "x", 1, MSG_NOSIGNAL);
    } else if (place && kind == 7) {
        ring_client_send_rights(&r, r.fd, 1);
    }
    ring_client_close(&r);
    return place || err == ATTND_ECONN || err == ATTND_EBUSY;
}

START_TEST(ten_thousand_rings_leave_nothing) {
    e2e_daemon d = {.dir = ""};
    char path[128];
    e2e_start(&d, flags);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    for (int i = 0; i < KINDS; i++) { // what is made once is made now
        visit(path, i);
    }
    e2e_sleep_ms(100);
    int fds = ring_client_count_fds(d.pid);
    for (int i = 0; i < SESSIONS; i++) {
        ck_assert(visit(path, i % KINDS));
    }
    for (int i = 0;
         i < 5000 && (ring_client_count_fds(d.pid) > fds || ring_client_count_regions(d.pid) > 0);
         i++) {
        e2e_sleep_ms(1);
    }
    ck_assert_int_eq(ring_client_count_fds(d.pid), fds);
    ck_assert_int_eq(ring_client_count_regions(d.pid), 0);
    ring_client r;
    const void *reply;
    ATTND_CK_OK(ring_client_open(&r, path, 16, DATA_BYTES));
    ATTND_CK_OK(ring_client_call(&r, PROTO_HELLO, 1, "{}", 2, NULL));
    ATTND_CK_OK(ring_client_call(&r, PROTO_STATS, 2, NULL, 0, &reply));
    ck_assert_double_eq(e2e_number(reply, "sessions"), 1);
    ck_assert_double_eq(e2e_number(reply, "transport.rings.connections"), 1);
    ck_assert_double_gt(e2e_number(reply, "transport.rings.closed_rights"), SESSIONS / KINDS / 2);
    ring_client_close(&r);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("ring_leak");
    TCase *tc = tcase_create("leak");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, ten_thousand_rings_leave_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
