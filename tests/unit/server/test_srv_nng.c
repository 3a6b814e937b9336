// Connections of srv_nng, seen by REQ clients.  Everything runs on this thread, the loop a turn at
// a time, and NNG's own threads behind it; pauses give those time to deliver, and only make the
// orders that are wanted likely: without them the tests pass all the same.
#include "server/srv_nng.h"

#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <nng/supplemental/util/platform.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/check_main.h"

enum { PAUSE_MS = 100, PATIENCE_MS = 3000 };

static struct {
    uv_loop_t loop;
    srv_nng *nng;
    char folder[32], url[64];
    nng_socket busy, doomed, next;
    uint32_t requests, lost;
} w;

static nng_socket dial_and_send(void) {
    nng_socket s;
    proto_header h = {.magic = PROTO_MAGIC, .version = PROTO_VERSION, .op = PROTO_STATS};
    h.request = 1;
    ck_assert_int_eq(nng_req0_open(&s), 0);
    ck_assert_int_eq(nng_dial(s, w.url, NULL, 0), 0);
    ck_assert_int_eq(nng_send(s, &h, sizeof(h), 0), 0);
    nng_msleep(PAUSE_MS);
    return s;
}

static bool opened(void *ctx, srv_conn *conn) {
    (void)ctx, (void)conn;
    return true;
}

// The first request takes so long that the second client, whose request waits behind it, is gone
// before its turn comes.
static void request(void *ctx, srv_request *rq) {
    (void)ctx;
    if (w.requests++ == 0) {
        nng_close(w.doomed);
        nng_msleep(PAUSE_MS);
    }
    srv_reply_empty(rq);
}

static void lost(void *ctx, srv_conn *conn) {
    (void)ctx, (void)conn;
    if (w.lost++ == 0) {
        w.next = dial_and_send();
    }
}

static void start(void) {
    strcpy(w.folder, "/tmp/attnd-nng-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(w.folder));
    snprintf(w.url, sizeof(w.url), "ipc://%s/s", w.folder);
    srv_nng_opts opts = {.urls = {w.url}, .num_urls = 1, .mode = 0600, .connections = 4};
    opts.in_flight = 4;
    opts.message_bytes = opts.connection_bytes = 65536;
    opts.send_timeout_ms = PATIENCE_MS;
    opts.opened = opened;
    opts.request = request;
    opts.lost = lost;
    attnd_errinfo info;
    ck_assert_int_eq(uv_loop_init(&w.loop), 0);
    ATTND_CK_OK(srv_nng_open(&w.nng, &w.loop, &opts, &info));
}

static void stop(void) {
    srv_nng_close(w.nng);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&w.loop), 0);
    rmdir(w.folder);
}

static bool gets_reply(nng_socket s) {
    for (int ms = 0; ms < PATIENCE_MS; ms++) {
        uint8_t reply[256];
        size_t bytes = sizeof(reply);
        uv_run(&w.loop, UV_RUN_NOWAIT);
        if (nng_recv(s, reply, &bytes, NNG_FLAG_NONBLOCK) == 0) {
            return true;
        }
        nng_msleep(1);
    }
    return false;
}

// lost_become runs the loop until `count` connections were lost.
static bool lost_become(uint32_t count) {
    for (int ms = 0; ms < PATIENCE_MS && w.lost < count; ms++) {
        uv_run(&w.loop, UV_RUN_NOWAIT);
        nng_msleep(1);
    }
    return w.lost == count;
}

START_TEST(a_client_that_comes_while_another_is_being_lost_is_served) {
    start();
    w.busy = dial_and_send();
    w.doomed = dial_and_send();
    ck_assert(gets_reply(w.busy));
    ck_assert(lost_become(1));
    ck_assert(gets_reply(w.next));
    ck_assert_uint_eq(w.requests, 2); // the doomed one's was dropped
    nng_close(w.busy);
    nng_close(w.next);
    ck_assert(lost_become(3));
    srv_nng_info info;
    srv_nng_get_info(w.nng, &info);
    ck_assert_uint_eq(info.connections, 0);
    stop();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_nng");
    TCase *tc = tcase_create("connections");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, a_client_that_comes_while_another_is_being_lost_is_served);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
