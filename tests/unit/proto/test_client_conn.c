// The connection: who may be connected to, ids, slots, time limits, loss, replies to other
// requests.
#include "proto/client/client_conn.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/check_main.h"
#include "tests/unit/proto/fake_daemon.h"

static attnd_errinfo info;
static client_conn *conn;

static client_conn *connect_to(const fake_daemon *f, int32_t timeout_ms) {
    client_conn *c = NULL;
    ATTND_CK_OK(client_nng_open(&c, fake_daemon_url(f), timeout_ms, &info));
    client_conn_limit(c, CLIENT_MAX_SLOTS);
    return c;
}

// call makes a request with one 64-bit number and returns the one that comes back.
static attnd_err call(client_conn *c, proto_op op, int64_t timeout_ms, uint64_t *out) {
    client_msg m = {0};
    attnd_errinfo why;
    attnd_err err =
        client_msg_alloc(c, &m, PROTO_BODY + 8, PROTO_BODY + 8, attnd_clock_ms() + 1000, &why);
    if (err || (err = client_conn_call(c, op, &m, timeout_ms, NULL, &why))) {
        return err;
    }
    err = proto_read(client_msg_view(&m), out, 8, false, &why);
    client_msg_free(&m);
    return err;
}

static size_t answer_id(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    return fake_body(reply, h, &h->request, sizeof(h->request));
}

START_TEST(conn_open_to_nobody_fails_at_once) {
    uint64_t start = attnd_clock_ms();
    ATTND_CK_ERR(client_nng_open(&conn, "ipc:///nonexistent/attnd.sock", 10000, &info),
                 ATTND_ECONN);
    ck_assert_uint_lt(attnd_clock_ms() - start, 5000);
    ck_assert_ptr_nonnull(strstr(info.text, "/nonexistent/attnd.sock"));
    ck_assert_ptr_null(conn);
}
END_TEST

START_TEST(conn_open_refuses_a_url_that_is_none) {
    ATTND_CK_ERR(client_nng_open(&conn, "/run/attnd.sock", 1000, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "url");
    ATTND_CK_ERR(client_nng_open(&conn, "gopher://x", 1000, &info), ATTND_EINVAL);
}
END_TEST

// A TCP listener that accepts nothing and whose backlog is full: connecting to it hangs.
START_TEST(conn_open_gives_up_after_its_time) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), filler[3];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&at, len), 0);
    ck_assert_int_eq(listen(fd, 0), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    for (int i = 0; i < 3; i++) {
        filler[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)!connect(filler[i], (struct sockaddr *)&at, len);
    }
    char url[64];
    snprintf(url, sizeof(url), "tcp://127.0.0.1:%d", ntohs(at.sin_port));
    uint64_t start = attnd_clock_ms();
    ATTND_CK_ERR(client_nng_open(&conn, url, 200, &info), ATTND_ETIMEDOUT);
    ck_assert_uint_ge(attnd_clock_ms() - start, 190);
    ck_assert_uint_lt(attnd_clock_ms() - start, 3000);
    for (int i = 0; i < 3; i++) {
        close(filler[i]);
    }
    close(fd);
}
END_TEST

START_TEST(conn_ids_of_once_ops_are_dense_and_apart_from_others) {
    fake_daemon *f = fake_daemon_start(answer_id, 1);
    conn = connect_to(f, 5000);
    uint64_t once = 0, other = 0;
    for (uint64_t i = 1; i <= 100; i++) {
        ATTND_CK_OK(call(conn, PROTO_STEP, 5000, &once));
        ATTND_CK_OK(call(conn, PROTO_ATTEND, 5000, &other));
        ck_assert_uint_eq(once, i);
        ck_assert(other > UINT64_C(1) << 63);
    }
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

static atomic_int wrong_window, seen_ids[20000], running, most_running;
static _Atomic uint64_t highest;

// check_window answers with the id, and watches that ids stay within 64 below the highest seen.
static size_t check_window(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    if (h->op == PROTO_HELLO) {
        return FAKE_DEFAULT;
    }
    int now = atomic_fetch_add(&running, 1) + 1, most = atomic_load(&most_running);
    while (now > most && !atomic_compare_exchange_weak(&most_running, &most, now)) {
    }
    uint64_t top = atomic_load(&highest);
    while (h->request > top && !atomic_compare_exchange_weak(&highest, &top, h->request)) {
    }
    if (h->request + 63 < top || h->request >= 20000 ||
        atomic_fetch_add(&seen_ids[h->request], 1) != 0) {
        atomic_fetch_add(&wrong_window, 1);
    }
    if (h->request % 16 == 0) {
        usleep(500);
    }
    atomic_fetch_sub(&running, 1);
    return fake_body(reply, h, &h->request, sizeof(h->request));
}

enum { THREADS = 24, CALLS = 100 };
static atomic_int num_failed;

static void *many_calls(void *arg) {
    for (int i = 0; i < CALLS; i++) {
        uint64_t id = 0;
        if (call(arg, PROTO_SEQ_CREATE, 20000, &id) || id == 0) {
            atomic_fetch_add(&num_failed, 1);
        }
    }
    return NULL;
}

static void run_threads(client_conn *c) {
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        ck_assert_int_eq(pthread_create(&threads[i], NULL, many_calls, c), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
}

START_TEST(conn_calls_of_many_threads_each_get_their_reply) {
    fake_daemon *f = fake_daemon_start(check_window, 1);
    conn = connect_to(f, 5000);
    run_threads(conn);
    ck_assert_int_eq(atomic_load(&num_failed), 0);
    ck_assert_int_eq(atomic_load(&wrong_window), 0);
    ck_assert_uint_eq(atomic_load(&highest), THREADS * CALLS);
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(conn_keeps_to_its_limit_of_requests_in_flight) {
    fake_daemon *f = fake_daemon_start(check_window, 1);
    conn = connect_to(f, 5000);
    client_conn_limit(conn, 2);
    run_threads(conn);
    ck_assert_int_eq(atomic_load(&num_failed), 0);
    ck_assert_int_le(atomic_load(&most_running), 2);
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

static size_t silent(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    (void)h;
    (void)reply;
    return FAKE_SILENT;
}

START_TEST(conn_call_without_a_reply_times_out) {
    fake_daemon *f = fake_daemon_start(silent, 1);
    conn = connect_to(f, 5000);
    uint64_t start = attnd_clock_ms(), out = 7;
    ATTND_CK_ERR(call(conn, PROTO_STATS, 100, &out), ATTND_ETIMEDOUT);
    ck_assert_uint_ge(attnd_clock_ms() - start, 90);
    ck_assert_uint_lt(attnd_clock_ms() - start, 3000);
    ck_assert_uint_eq(out, 7);
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

static atomic_int late;

static size_t answer_late_once(proto_view request, const proto_header *h, uint8_t *reply) {
    if (atomic_fetch_add(&late, 1) == 0) {
        usleep(150000);
    }
    return answer_id(request, h, reply);
}

START_TEST(conn_late_reply_is_not_taken_for_the_next_one) {
    fake_daemon *f = fake_daemon_start(answer_late_once, 1);
    conn = connect_to(f, 5000);
    uint64_t out = 0;
    ATTND_CK_ERR(call(conn, PROTO_STEP, 50, &out), ATTND_ETIMEDOUT);
    for (uint64_t i = 2; i < 40; i++) {
        ATTND_CK_OK(call(conn, PROTO_STEP, 5000, &out));
        ck_assert_uint_eq(out, i);
        usleep(10000);
    }
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(conn_waits_for_a_slot_no_longer_than_its_time) {
    fake_daemon *f = fake_daemon_start(silent, 1);
    conn = connect_to(f, 5000);
    client_conn_limit(conn, 1);
    pthread_t other;
    ck_assert_int_eq(pthread_create(&other, NULL, many_calls, conn), 0); // waits for 20 s
    usleep(100000);
    uint64_t start = attnd_clock_ms(), out;
    ATTND_CK_ERR(call(conn, PROTO_STATS, 100, &out), ATTND_ETIMEDOUT);
    ck_assert_uint_lt(attnd_clock_ms() - start, 3000);
    fake_daemon_stop(f); // which ends the other one's calls
    pthread_join(other, NULL);
    client_conn_close(conn);
}
END_TEST

static size_t silent_to_first(proto_view request, const proto_header *h, uint8_t *reply) {
    return h->request == 1 ? FAKE_SILENT : answer_id(request, h, reply);
}

static void *first_call(void *arg) {
    uint64_t out;
    ck_assert_int_eq(call(arg, PROTO_STEP, 1500, &out), ATTND_ETIMEDOUT);
    return NULL;
}

START_TEST(conn_ids_stay_within_the_window_of_the_oldest) {
    fake_daemon *f = fake_daemon_start(silent_to_first, 1);
    conn = connect_to(f, 5000);
    pthread_t first;
    ck_assert_int_eq(pthread_create(&first, NULL, first_call, conn), 0);
    usleep(100000);
    uint64_t out = 0;
    for (uint64_t id = 2; id <= 64; id++) {
        ATTND_CK_OK(call(conn, PROTO_COMMIT, 5000, &out));
        ck_assert_uint_eq(out, id);
    }
    ATTND_CK_ERR(call(conn, PROTO_COMMIT, 50, &out), ATTND_ETIMEDOUT);
    ATTND_CK_OK(call(conn, PROTO_ATTEND, 5000, &out)); // does not count
    ATTND_CK_OK(call(conn, PROTO_COMMIT, 5000, &out)); // waits until the first one gives up
    ck_assert_uint_eq(out, 65);
    pthread_join(first, NULL);
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

static size_t hang_up(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    (void)h;
    (void)reply;
    return FAKE_HANG_UP;
}

START_TEST(conn_lost_connection_ends_this_call_and_every_later_one) {
    fake_daemon *f = fake_daemon_start(hang_up, 1);
    conn = connect_to(f, 5000);
    uint64_t start = attnd_clock_ms(), out;
    for (int i = 0; i < 5; i++) {
        ATTND_CK_ERR(call(conn, PROTO_STATS, 10000, &out), ATTND_ECONN);
    }
    ck_assert_uint_lt(attnd_clock_ms() - start, 5000);
    usleep(300000);
    ck_assert_int_eq(fake_num_pipes(f), 1); // it does not come back by itself
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

static size_t hang_up_on_stats(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    (void)reply;
    return h->op == PROTO_STATS ? FAKE_HANG_UP : FAKE_SILENT;
}

START_TEST(conn_loss_wakes_all_that_wait) {
    fake_daemon *f = fake_daemon_start(hang_up_on_stats, 1);
    conn = connect_to(f, 5000);
    client_conn_limit(conn, 6);
    pthread_t threads[THREADS]; // some wait for a reply, some for a slot
    for (int i = 0; i < THREADS; i++) {
        ck_assert_int_eq(pthread_create(&threads[i], NULL, many_calls, conn), 0);
    }
    usleep(100000);
    client_conn_limit(conn, 7);
    uint64_t start = attnd_clock_ms(), out;
    ATTND_CK_ERR(call(conn, PROTO_STATS, 10000, &out), ATTND_ECONN);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    ck_assert_uint_lt(attnd_clock_ms() - start, 5000);
    ck_assert_int_eq(atomic_load(&num_failed), THREADS * CALLS);
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(conn_to_a_daemon_that_stops_is_lost) {
    fake_daemon *f = fake_daemon_start(answer_id, 1);
    conn = connect_to(f, 5000);
    uint64_t out;
    ATTND_CK_OK(call(conn, PROTO_STATS, 5000, &out));
    fake_daemon_stop(f);
    ATTND_CK_ERR(call(conn, PROTO_STATS, 10000, &out), ATTND_ECONN);
    client_conn_close(conn);
}
END_TEST

static int change; // which of the lies below

static size_t lie(proto_view request, const proto_header *h, uint8_t *reply) {
    proto_header other = *h;
    (void)request;
    size_t bytes = fake_body(reply, &other, &other.request, 8);
    const struct {
        size_t at;
        uint8_t value;
    } lies[] = {{0, 0},  {3, 'd'}, {4, 2},   {5, 1},     {6, 33},    {8, 0xee}, {15, 1},
                {16, 1}, {20, 9},  {23, 64}, {24, 0xff}, {27, 0x7f}, {28, 1}};
    reply[lies[change].at] = lies[change].value;
    return bytes;
}
enum { NUM_LIES = 13 };

START_TEST(conn_reply_with_a_wrong_header_is_refused) {
    change = _i;
    fake_daemon *f = fake_daemon_start(lie, 1);
    conn = connect_to(f, 5000);
    uint64_t out = 7;
    attnd_err err = call(conn, PROTO_STATS, 5000, &out);
    ck_assert(err == ATTND_EPROTO || err == ATTND_EVERSION);
    ck_assert_uint_eq(out, 7);
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

static size_t refuse(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    return fake_error(reply, h, ATTND_ENOSPC, "new_len");
}

START_TEST(conn_error_of_the_daemon_comes_back) {
    fake_daemon *f = fake_daemon_start(refuse, 1);
    conn = connect_to(f, 5000);
    client_msg m = {0};
    ATTND_CK_OK(client_msg_alloc(conn, &m, PROTO_BODY, 0, UINT64_MAX, &info));
    ATTND_CK_ERR(client_conn_call(conn, PROTO_STEP, &m, 5000, NULL, &info), ATTND_ENOSPC);
    ck_assert_str_eq(info.field, "new_len");
    ck_assert_str_eq(info.text, "new_len is wrong");
    ck_assert_int_eq(info.detail, 42);
    ck_assert_ptr_null(m.data);
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

static atomic_int cut_step;

static size_t cut_error(proto_view request, const proto_header *h, uint8_t *reply) {
    refuse(request, h, reply);
    return fake_cut(reply, h, atomic_load(&cut_step));
}

START_TEST(conn_every_cut_of_an_error_reply_is_refused) {
    fake_daemon *f = fake_daemon_start(cut_error, 1);
    conn = connect_to(f, 5000);
    for (int i = 0; i < 2 * PROTO_ERROR_BYTES; i++) {
        uint64_t out;
        atomic_store(&cut_step, i);
        ATTND_CK_ERR(call(conn, PROTO_STATS, 5000, &out), ATTND_EPROTO);
    }
    client_conn_close(conn);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(conn_close_of_none_does_nothing) {
    client_conn_close(NULL);
    client_msg m = {0};
    client_msg_free(&m);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_conn");
    TCase *tc = tcase_create("conn");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, conn_open_to_nobody_fails_at_once);
    tcase_add_test(tc, conn_open_refuses_a_url_that_is_none);
    tcase_add_test(tc, conn_open_gives_up_after_its_time);
    tcase_add_test(tc, conn_ids_of_once_ops_are_dense_and_apart_from_others);
    tcase_add_test(tc, conn_calls_of_many_threads_each_get_their_reply);
    tcase_add_test(tc, conn_keeps_to_its_limit_of_requests_in_flight);
    tcase_add_test(tc, conn_call_without_a_reply_times_out);
    tcase_add_test(tc, conn_late_reply_is_not_taken_for_the_next_one);
    tcase_add_test(tc, conn_waits_for_a_slot_no_longer_than_its_time);
    tcase_add_test(tc, conn_ids_stay_within_the_window_of_the_oldest);
    tcase_add_test(tc, conn_lost_connection_ends_this_call_and_every_later_one);
    tcase_add_test(tc, conn_loss_wakes_all_that_wait);
    tcase_add_test(tc, conn_to_a_daemon_that_stops_is_lost);
    tcase_add_loop_test(tc, conn_reply_with_a_wrong_header_is_refused, 0, NUM_LIES);
    tcase_add_test(tc, conn_error_of_the_daemon_comes_back);
    tcase_add_test(tc, conn_every_cut_of_an_error_reply_is_refused);
    tcase_add_test(tc, conn_close_of_none_does_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
