// The ring's client end against a peer that may lie: what it writes into completions, indices,
// replies and the answer to attach never makes the library read or write outside of the region.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include "proto/client/client.h"
#include "proto/client/client_attach.h"
#include "proto/clock.h"
#include "tests/check_main.h"
#include "tests/unit/proto/fake_ring.h"

static attnd_errinfo info;
static client_conn *conn;
static client_most most;

enum { DATA = 1 << 20, THREADS = 16, CALLS = 300 };

static attnd_err open_to(const fake_ring *f) {
    client_ring_opts opts = {f->path, 3000, DATA, 20, NULL, 0, 0, NULL};
    attnd_err err = client_ring_open(&conn, &opts, &most, &info);
    if (!err) {
        client_conn_limit(conn, CLIENT_MAX_SLOTS);
    }
    return err;
}

// call sends a number and returns the one that comes back.
static attnd_err call(proto_op op, int64_t timeout_ms, uint64_t send, uint64_t *out) {
    client_msg m = {0};
    attnd_errinfo why;
    attnd_err err = client_msg_alloc(conn, &m, PROTO_BODY + 8, PROTO_BODY + 8,
                                     attnd_clock_ms() + (uint64_t)timeout_ms, &why);
    if (err) {
        return err;
    }
    memcpy(m.data + PROTO_BODY, &send, 8);
    if (!(err = client_conn_call(conn, op, &m, timeout_ms, NULL, &why))) {
        err = proto_read(client_msg_view(&m), out, 8, false, &why);
        client_msg_free(&m);
    }
    return err;
}

static bool echo(fake_ring *f, const uint8_t *msg, uint8_t *reply, proto_ring_complete *c) {
    (void)f;
    c->reply_bytes = fake_ring_body(reply, msg, msg + PROTO_BODY, 8);
    return true;
}

START_TEST(ring_calls_get_their_replies) {
    fake_ring *f = fake_ring_start(NULL, echo);
    ATTND_CK_OK(open_to(f));
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t out = 0;
        ATTND_CK_OK(call(i % 2 ? PROTO_STEP : PROTO_ATTEND, 5000, i, &out));
        ck_assert_uint_eq(out, i);
    }
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static atomic_int num_failed;

static void *many_calls(void *arg) {
    uint64_t base = (uint64_t)(uintptr_t)arg << 32;
    for (uint64_t i = 0; i < CALLS; i++) {
        uint64_t out = 0;
        if (call(PROTO_ATTEND, 20000, base + i, &out) || out != base + i) {
            atomic_fetch_add(&num_failed, 1);
        }
    }
    return NULL;
}

static void run_threads(void) {
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) {
        ck_assert_int_eq(pthread_create(&threads[i], NULL, many_calls, (void *)i), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
}

START_TEST(ring_calls_of_many_threads_each_get_their_reply) {
    fake_ring *f = fake_ring_start(NULL, echo);
    ATTND_CK_OK(open_to(f));
    run_threads();
    ck_assert_int_eq(atomic_load(&num_failed), 0);
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

START_TEST(ring_of_few_bytes_makes_callers_wait_for_memory) {
    fake_ring *f = fake_ring_start(NULL, echo);
    client_ring_opts opts = {f->path, 3000, 1, 20, NULL, 0, 0, NULL}; // a page
    ATTND_CK_OK(client_ring_open(&conn, &opts, &most, &info));
    client_conn_limit(conn, CLIENT_MAX_SLOTS);
    run_threads();
    ck_assert_int_eq(atomic_load(&num_failed), 0);
    client_msg m = {0};
    ATTND_CK_ERR(client_msg_alloc(conn, &m, 4096, 0, UINT64_MAX, &info), ATTND_EMSGSIZE);
    ck_assert_str_eq(info.field, "ring_bytes");
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static int lie;

static bool lie_in_completion(fake_ring *f, const uint8_t *msg, uint8_t *reply,
                              proto_ring_complete *c) {
    echo(f, msg, reply, c);
    switch (lie) {
    case 0:
        c->user = 1; // a slot that was never used
        break;
    case 1:
        c->user = UINT64_MAX;
        break;
    case 2:
        c->reply_bytes = UINT32_MAX;
        break;
    case 3:
        c->reply_bytes = 1 << 20;
        break;
    case 4: // 200 completions at once
        f->cq_tail += 200;
        break;
    default:
        f->cq_tail -= 7; // backwards
        break;
    }
    return true;
}
enum { NUM_LIES = 6 };

START_TEST(ring_completion_that_is_nonsense_loses_the_connection) {
    lie = _i;
    fake_ring *f = fake_ring_start(NULL, lie_in_completion);
    ATTND_CK_OK(open_to(f));
    uint64_t out = 7;
    ATTND_CK_ERR(call(PROTO_STATS, 5000, 1, &out), ATTND_EPROTO);
    ATTND_CK_ERR(call(PROTO_STATS, 5000, 1, &out), ATTND_EPROTO); // at once
    ck_assert_uint_eq(out, 7);
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static bool twice(fake_ring *f, const uint8_t *msg, uint8_t *reply, proto_ring_complete *c) {
    echo(f, msg, reply, c);
    memcpy(f->base + f->layout.cq_off + f->cq_tail % f->layout.entries * sizeof(*c), c, sizeof(*c));
    proto_ring_store(&f->head->cq_tail, ++f->cq_tail);
    return true;
}

START_TEST(ring_second_completion_of_a_request_is_nonsense) {
    fake_ring *f = fake_ring_start(NULL, twice);
    ATTND_CK_OK(open_to(f));
    uint64_t out;
    attnd_err err = ATTND_OK;
    for (int i = 0; i < 10 && !err; i++) {
        err = call(PROTO_STATS, 5000, 1, &out);
    }
    ATTND_CK_ERR(err, ATTND_EPROTO);
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static atomic_int at_byte;

static bool lie_in_reply(fake_ring *f, const uint8_t *msg, uint8_t *reply, proto_ring_complete *c) {
    echo(f, msg, reply, c);
    if (atomic_load(&at_byte) < 32) {
        reply[atomic_load(&at_byte)] ^= 0x55;
    } else {
        c->reply_bytes = (uint32_t)atomic_load(&at_byte) - 32;
    }
    return true;
}

START_TEST(ring_reply_with_a_wrong_header_or_length_is_refused) {
    fake_ring *f = fake_ring_start(NULL, lie_in_reply);
    ATTND_CK_OK(open_to(f));
    for (int i = 0; i < 32 + 40; i++) {
        uint64_t out = 7;
        atomic_store(&at_byte, i);
        ck_assert_int_ne(call(PROTO_STATS, 5000, 1, &out), ATTND_OK);
        ck_assert_uint_eq(out, 7);
    }
    atomic_store(&at_byte, 32 + 40); // and the connection still stands
    uint64_t out = 0;
    ATTND_CK_OK(call(PROTO_STATS, 5000, 9, &out));
    ck_assert_uint_eq(out, 9);
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static bool refuse_bare(fake_ring *f, const uint8_t *msg, uint8_t *reply, proto_ring_complete *c) {
    (void)f, (void)msg, (void)reply;
    c->status = ATTND_EPROTO;
    return true;
}

START_TEST(ring_completion_without_a_reply_is_its_status) {
    fake_ring *f = fake_ring_start(NULL, refuse_bare);
    ATTND_CK_OK(open_to(f));
    uint64_t out;
    ATTND_CK_ERR(call(PROTO_STATS, 5000, 1, &out), ATTND_EPROTO);
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static bool hang_up(fake_ring *f, const uint8_t *msg, uint8_t *reply, proto_ring_complete *c) {
    (void)msg, (void)reply, (void)c;
    usleep(50000); // let others come in
    f->hang_up = 1;
    return false;
}

START_TEST(ring_peer_that_dies_ends_all_calls_and_later_ones) {
    fake_ring *f = fake_ring_start(NULL, hang_up);
    ATTND_CK_OK(open_to(f));
    uint64_t start = attnd_clock_ms(), out;
    run_threads();
    ck_assert_int_eq(atomic_load(&num_failed), THREADS * CALLS);
    ATTND_CK_ERR(call(PROTO_STATS, 10000, 1, &out), ATTND_ECONN);
    ck_assert_uint_lt(attnd_clock_ms() - start, 5000);
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static atomic_int late;

static bool late_once(fake_ring *f, const uint8_t *msg, uint8_t *reply, proto_ring_complete *c) {
    if (atomic_fetch_add(&late, 1) == 0) {
        usleep(200000);
    }
    return echo(f, msg, reply, c);
}

START_TEST(ring_late_reply_is_not_taken_for_the_next_one) {
    fake_ring *f = fake_ring_start(NULL, late_once);
    ATTND_CK_OK(open_to(f));
    uint64_t start = attnd_clock_ms(), out = 0;
    ATTND_CK_ERR(call(PROTO_STEP, 50, 1, &out), ATTND_ETIMEDOUT);
    ck_assert_uint_lt(attnd_clock_ms() - start, 190);
    for (uint64_t i = 2; i < 40; i++) {
        ATTND_CK_OK(call(PROTO_STEP, 5000, i, &out));
        ck_assert_uint_eq(out, i);
    }
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static bool silent(fake_ring *f, const uint8_t *msg, uint8_t *reply, proto_ring_complete *c) {
    (void)f, (void)msg, (void)reply, (void)c;
    return false;
}

START_TEST(ring_requests_that_timed_out_keep_their_slots) {
    fake_ring *f = fake_ring_start(NULL, silent);
    ATTND_CK_OK(open_to(f));
    client_conn_limit(conn, 4);
    uint64_t out;
    for (int i = 0; i < 6; i++) {
        ATTND_CK_ERR(call(PROTO_STATS, 10, 1, &out), ATTND_ETIMEDOUT);
    }
    ck_assert_uint_eq(proto_ring_load(&f->head->sq_tail), 4); // the other two were not sent
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

// ---- attach

static int attach_lie;
static const int seals = F_SEAL_SHRINK | F_SEAL_GROW;

static int lie_in_attach(fake_ring *f, proto_attach_reply *reply, int region) {
    switch (attach_lie) {
    case 0: // not sealed
        return region;
    case 1: // too small
        ck_assert_int_eq(ftruncate(region, 4096), 0);
        break;
    case 2:
        reply->magic = 0;
        break;
    case 3:
        reply->bytes += 4096;
        break;
    case 4:
        reply->data_off = UINT64_MAX;
        break;
    case 5:
        reply->status = 5; // an error that is none
        break;
    case 6: // no descriptor
        fcntl(region, F_ADD_SEALS, seals);
        return -1;
    default: // a descriptor of another kind
        return f->listen_fd;
    }
    fcntl(region, F_ADD_SEALS, seals);
    return region;
}
enum { NUM_ATTACH_LIES = 8 };

START_TEST(ring_answer_to_attach_that_is_nonsense_is_refused) {
    attach_lie = _i;
    fake_ring *f = fake_ring_start(lie_in_attach, echo);
    ATTND_CK_ERR(open_to(f), ATTND_EPROTO);
    ck_assert_ptr_null(conn);
    fake_ring_stop(f);
}
END_TEST

static int send_copies(fake_ring *f, proto_attach_reply *reply, int region) {
    (void)reply;
    f->copies = (uint32_t)attach_lie;
    fcntl(region, F_ADD_SEALS, seals);
    return region;
}

// num_regions counts descriptors of this process that are a fake's region.
static int num_regions(void) {
    int num = 0;
    for (int fd = 0; fd < 256; fd++) {
        char link[64], target[64] = "";
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        num += readlink(link, target, sizeof(target) - 1) > 0 && strstr(target, "memfd:fake");
    }
    return num;
}

START_TEST(ring_descriptors_beyond_the_first_are_refused_and_not_kept) {
    attach_lie = _i;
    fake_ring *f = fake_ring_start(send_copies, echo);
    ATTND_CK_ERR(open_to(f), ATTND_EPROTO);
    fake_ring_stop(f);
    ck_assert_int_eq(num_regions(), 0);
}
END_TEST

static void on_alarm(int number) {
    (void)number;
}

// answer_late lets signals come, to the client's thread, while that waits for the answer.
static int answer_late(fake_ring *f, proto_attach_reply *reply, int region) {
    (void)f, (void)reply;
    const struct itimerval often = {{0, 1000}, {0, 1000}}, off = {{0, 0}, {0, 0}};
    sigset_t alarm;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    usleep(100000);
    setitimer(ITIMER_REAL, &off, NULL);
    fcntl(region, F_ADD_SEALS, seals);
    return region;
}

START_TEST(ring_open_bears_signals) {
    struct sigaction action = {.sa_handler = on_alarm}; // without SA_RESTART
    sigaction(SIGALRM, &action, NULL);
    fake_ring *f = fake_ring_start(answer_late, echo);
    ATTND_CK_OK(open_to(f));
    client_conn_close(conn);
    fake_ring_stop(f);
}
END_TEST

static int too_large(fake_ring *f, proto_attach_reply *reply, int region) {
    (void)f, (void)region;
    reply->status = ATTND_EMSGSIZE;
    reply->bytes = 12345;
    return -1;
}

START_TEST(ring_that_is_refused_says_why_and_how_much) {
    fake_ring *f = fake_ring_start(too_large, echo);
    ATTND_CK_ERR(open_to(f), ATTND_EMSGSIZE);
    ck_assert_uint_eq(most.bytes, 12345);
    ck_assert(!most.of_region);
    ck_assert_str_eq(info.field, "ring_bytes");
    ck_assert(strstr(info.text, "1048576") && strstr(info.text, "12345"));
    fake_ring_stop(f);
}
END_TEST

// The caller's own word is not made smaller, nor left for messages.
START_TEST(ring_that_the_caller_named_too_large_is_an_error) {
    attnd_client *c = NULL;
    fake_ring *f = fake_ring_start(too_large, echo);
    attnd_connect_opts opts = {.transport = (attnd_transport)_i, .ring_bytes = 20000};
    ATTND_CK_ERR(attnd_connect(&c, f->url, &opts, &info), ATTND_EMSGSIZE);
    ck_assert_str_eq(info.field, "ring_bytes");
    ck_assert(strstr(info.text, "20000") && strstr(info.text, "12345"));
    fake_ring_stop(f);
}
END_TEST

START_TEST(ring_of_more_bytes_than_any_is_an_error) {
    attnd_client *c = NULL;
    attnd_connect_opts opts = {.transport = (attnd_transport)_i, .ring_bytes = UINT64_MAX};
    ATTND_CK_ERR(attnd_connect(&c, "ipc:///nonexistent/s", &opts, &info), ATTND_EMSGSIZE);
    ck_assert_str_eq(info.field, "ring_bytes");
}
END_TEST

START_TEST(ring_open_to_nobody_fails) {
    client_ring_opts opts = {"/nonexistent/s.attach", 3000, DATA, 0, NULL, 0, 0, NULL};
    ATTND_CK_ERR(client_ring_open(&conn, &opts, &most, &info), ATTND_ECONN);
    char path[200];
    memset(path, 'a', sizeof(path) - 1);
    path[sizeof(path) - 1] = '\0';
    opts.path = path;
    ATTND_CK_ERR(client_ring_open(&conn, &opts, &most, &info), ATTND_EINVAL);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_ring");
    TCase *tc = tcase_create("ring");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, ring_calls_get_their_replies);
    tcase_add_test(tc, ring_calls_of_many_threads_each_get_their_reply);
    tcase_add_test(tc, ring_of_few_bytes_makes_callers_wait_for_memory);
    tcase_add_loop_test(tc, ring_completion_that_is_nonsense_loses_the_connection, 0, NUM_LIES);
    tcase_add_test(tc, ring_second_completion_of_a_request_is_nonsense);
    tcase_add_test(tc, ring_reply_with_a_wrong_header_or_length_is_refused);
    tcase_add_test(tc, ring_completion_without_a_reply_is_its_status);
    tcase_add_test(tc, ring_peer_that_dies_ends_all_calls_and_later_ones);
    tcase_add_test(tc, ring_late_reply_is_not_taken_for_the_next_one);
    tcase_add_test(tc, ring_requests_that_timed_out_keep_their_slots);
    tcase_add_loop_test(tc, ring_answer_to_attach_that_is_nonsense_is_refused, 0, NUM_ATTACH_LIES);
    tcase_add_loop_test(tc, ring_descriptors_beyond_the_first_are_refused_and_not_kept, 1, 4);
    tcase_add_test(tc, ring_open_bears_signals);
    tcase_add_test(tc, ring_that_is_refused_says_why_and_how_much);
    tcase_add_loop_test(tc, ring_that_the_caller_named_too_large_is_an_error, ATTND_TRANSPORT_AUTO,
                        ATTND_TRANSPORT_AUTO + 1);
    tcase_add_loop_test(tc, ring_of_more_bytes_than_any_is_an_error, ATTND_TRANSPORT_AUTO,
                        ATTND_TRANSPORT_AUTO + 1);
    tcase_add_test(tc, ring_open_to_nobody_fails);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
