// A client that breaks the rules of the ring: each time that client alone is closed, or told so,
// and one beside it works on.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/play.h"
#include "tests/e2e/ring_client.h"

enum { ENTRIES = 16, DATA_BYTES = 1 << 20 };

static const char *const flags[] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB",
                                    NULL};
static e2e_daemon d;
static char path[128];
static ring_client bad, good;

static void check_good(void) {
    static uint64_t id = 100;
    const void *reply;
    ATTND_CK_OK(ring_client_call(&good, PROTO_STATS, ++id, NULL, 0, &reply));
}

static double stat_of(const char *name) {
    static uint64_t id = 1000000;
    const void *reply;
    ATTND_CK_OK(ring_client_call(&good, PROTO_STATS, ++id, NULL, 0, &reply));
    return e2e_number(reply, name);
}

static void open_ring(ring_client *r) {
    ATTND_CK_OK(ring_client_open(r, path, ENTRIES, DATA_BYTES));
    ATTND_CK_OK(ring_client_call(r, PROTO_HELLO, 1, "{}", 2, NULL));
}

static void setup(void) {
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    snprintf(path, sizeof(path), "%s.attach", d.path);
    open_ring(&bad);
    open_ring(&good);
}

static void teardown(void) {
    check_good();
    ring_client_close(&bad);
    ring_client_close(&good);
    e2e_stop(&d);
}

// ck_closed wants the connection of `bad` closed, and its session gone.
static void ck_closed(void) {
    ck_assert(ring_client_closed(&bad, 5000));
    for (int i = 0; i < 1000 && stat_of("sessions") > 1; i++) {
        e2e_sleep_ms(1);
    }
    ck_assert_double_eq(stat_of("sessions"), 1);
    ck_assert_double_eq(stat_of("transport.rings.rings"), 1);
}

static void ring_bell(void) {
    send(bad.fd, "", 1, MSG_NOSIGNAL);
}

// ---- indices

START_TEST(a_tail_that_jumps_closes_the_connection) {
    proto_ring_store(&bad.head->sq_tail, bad.sq_tail + ENTRIES + 1);
    ring_bell();
    ck_closed();
    ck_assert_double_eq(stat_of("transport.rings.closed_broken"), 1);
}
END_TEST

START_TEST(a_tail_that_goes_back_closes_the_connection) {
    proto_ring_store(&bad.head->sq_tail, bad.sq_tail - 1);
    ring_bell();
    ck_closed();
}
END_TEST

START_TEST(a_cq_head_from_nowhere_closes_the_connection) {
    proto_ring_store(&bad.head->cq_head, 0x12345678);
    ring_client_submit(&bad, 0, 32, 65536, 65536, 1);
    ring_bell();
    ck_closed();
}
END_TEST

START_TEST(a_client_that_never_reads_completions_runs_out) {
    for (int i = 0; i < 2 * ENTRIES && !ring_client_closed(&bad, 0); i++) {
        proto_write_header(ring_client_data(&bad, 0), PROTO_STATS, 5, ATTND_OK, PROTO_BODY);
        ring_client_submit(&bad, 0, PROTO_BODY, 65536, 65536, 5);
        ring_bell();
        e2e_sleep_ms(1);
    }
    ck_closed();
}
END_TEST

START_TEST(a_submission_that_lies_elsewhere_is_answered_and_forgotten) {
    static const proto_ring_submit bads[] = {
        {.msg_off = 0, .msg_bytes = 32, .reply_off = 8192, .reply_bytes = 4096},
        {.msg_off = 8192, .msg_bytes = 31, .reply_off = 8192, .reply_bytes = 4096},
        {.msg_off = 8200, .msg_bytes = 64, .reply_off = 8192, .reply_bytes = 4096},
        {.msg_off = UINT64_MAX - 63, .msg_bytes = 64, .reply_off = 8192, .reply_bytes = 4096},
        {.msg_off = 8192, .msg_bytes = UINT32_MAX, .reply_off = 8192, .reply_bytes = 4096},
        {.msg_off = 8192, .msg_bytes = 64, .reply_off = 0, .reply_bytes = 4096},
        {.msg_off = 8192, .msg_bytes = 64, .reply_off = 1 << 20, .reply_bytes = UINT32_MAX},
        {.msg_off = 8192, .msg_bytes = 64, .reply_off = UINT64_MAX - 63, .reply_bytes = 512},
    };
    for (int i = 0; i < 8; i++) {
        proto_ring_submit s = bads[i];
        proto_ring_complete done;
        s.user = 77;
        ring_client_submit_raw(&bad, &s);
        ring_client_bell(&bad);
        ck_assert(ring_client_wait(&bad, &done, 5000));
        ck_assert_uint_eq(done.user, 77);
        ATTND_CK_ERR((attnd_err)done.status, ATTND_EPROTO);
        ck_assert_uint_eq(done.reply_bytes, 0);
    }
    ATTND_CK_OK(ring_client_call(&bad, PROTO_STATS, 200, NULL, 0, NULL));
    ck_assert_double_eq(stat_of("transport.rings.refused_malformed"), 8);
}
END_TEST

// ---- messages

static attnd_err send_bytes(const void *msg, size_t bytes) {
    proto_ring_complete done = {.status = ATTND_ECONN};
    memcpy(ring_client_data(&bad, 0), msg, bytes);
    ring_client_submit(&bad, 0, (uint32_t)bytes, 65536, 65536, 1);
    ring_client_bell(&bad);
    ring_client_wait(&bad, &done, 5000);
    return (attnd_err)done.status;
}

START_TEST(garbage_for_a_message_is_a_protocol_error) {
    uint8_t junk[256];
    proto_header h;
    memset(junk, 0xff, sizeof(junk));
    ATTND_CK_ERR(send_bytes(junk, sizeof(junk)), ATTND_EPROTO);
    memset(junk, 0, sizeof(junk));
    ATTND_CK_ERR(send_bytes(junk, sizeof(junk)), ATTND_EPROTO);
    proto_write_header(&h, PROTO_STATS, 9, ATTND_OK, sizeof(h) + 8); // more than there is
    ATTND_CK_ERR(send_bytes(&h, sizeof(h)), ATTND_EPROTO);
    proto_write_header(&h, PROTO_STATS, 0, ATTND_OK, sizeof(h));
    ATTND_CK_ERR(send_bytes(&h, sizeof(h)), ATTND_EPROTO);
    proto_write_header(&h, PROTO_STATS, 9, ATTND_OK, sizeof(h));
    h.version = 2;
    ATTND_CK_ERR(send_bytes(&h, sizeof(h)), ATTND_EVERSION);
    ATTND_CK_OK(ring_client_call(&bad, PROTO_STATS, 200, NULL, 0, NULL));
}
END_TEST

START_TEST(a_reply_over_its_own_message_harms_nobody_else) {
    proto_ring_complete done;
    for (uint64_t at = 0; at <= 128; at += 64) {
        proto_write_header(ring_client_data(&bad, 128), PROTO_HELLO, 9, ATTND_OK, PROTO_BODY + 2);
        memcpy(ring_client_data(&bad, 160), "{}", 2);
        ring_client_submit(&bad, 128, PROTO_BODY + 2, at, 65536, 1);
        ring_client_bell(&bad);
        ck_assert(ring_client_wait(&bad, &done, 5000));
        ATTND_CK_ERR((attnd_err)done.status, ATTND_EEXIST);
    }
}
END_TEST

// ---- descriptors

// open_kind opens a descriptor of one kind.
static int open_kind(int kind) {
    int pair[2];
    switch (kind) {
    case 0:
        return memfd_create("x", MFD_ALLOW_SEALING);
    case 1:
        return open("/proc/self/status", O_RDONLY);
    case 2:
        ck_assert_int_eq(pipe(pair), 0);
        close(pair[1]);
        return pair[0];
    case 3:
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        close(pair[1]);
        return pair[0];
    default:
        return open("/tmp", O_RDONLY | O_DIRECTORY);
    }
}

START_TEST(descriptors_are_closed_and_their_sender_too) {
    static const int nums[] = {1, 3, RING_CLIENT_MAX_RIGHTS};
    ring_client_close(&bad);
    for (int i = 0; i < 2000 && stat_of("transport.rings.connections") > 1; i++) {
        e2e_sleep_ms(1);
    }
    int before = ring_client_count_fds(d.pid);
    for (int i = 0; i < 5 * 3; i++) {
        int what = open_kind(i / 3);
        open_ring(&bad);
        ring_client_send_rights(&bad, what, nums[i % 3]);
        ck_closed();
        ring_client_close(&bad);
        close(what);
        ck_assert_int_eq(ring_client_count_fds(d.pid), before);
    }
    ck_assert_double_eq(stat_of("transport.rings.closed_rights"), 15);
}
END_TEST

START_TEST(descriptors_instead_of_the_first_packet_end_it) {
    int what = open_kind(0);
    ring_client_close(&bad);
    ck_assert(ring_client_connect(&bad, path));
    ring_client_send_rights(&bad, what, 1);
    close(what);
    ck_closed();
}
END_TEST

START_TEST(a_session_that_both_connections_have_ends_with_the_descriptor) {
    e2e_client c;
    e2e_connect(&c, d.url);
    char *hello = e2e_json(&c, PROTO_HELLO, "{}");
    proto_attach ask = {.magic = PROTO_RING_MAGIC,
                        .version = PROTO_VERSION,
                        .entries = ENTRIES,
                        .data_bytes = DATA_BYTES};
    ask.session = strtoull(strstr(hello, "\"session\":\"") + 11, NULL, 16);
    for (int i = 0; i < 16; i++) {
        unsigned byte;
        ck_assert_int_eq(sscanf(strstr(hello, "\"secret\":\"") + 10 + i * 2, "%2x", &byte), 1);
        ask.secret[i] = (uint8_t)byte;
    }
    free(hello);
    ring_client_close(&bad);
    ck_assert(ring_client_connect(&bad, path));
    ATTND_CK_OK(ring_client_ask(&bad, &ask));
    int what = open_kind(2);
    ring_client_send_rights(&bad, what, 1);
    close(what);
    ck_closed();
    attnd_err err = e2e_call(&c, PROTO_STATS, NULL, 0, NULL);
    ck_assert(err == ATTND_ECONN || err == ATTND_ESTALE); // NNG connects again by itself
    e2e_close(&c);
}
END_TEST

// ---- floods

static _Noreturn void flood(void) {
    ring_client r;
    if (ring_client_open(&r, path, 1024, DATA_BYTES)) {
        _exit(1);
    }
    ring_client_call(&r, PROTO_HELLO, 1, "{}", 2, NULL);
    proto_write_header(ring_client_data(&r, 0), PROTO_STATS, 5, ATTND_OK, PROTO_BODY);
    for (uint64_t out = 0;;) {
        proto_ring_complete done;
        for (; out < 1000; out++) {
            ring_client_submit(&r, 0, out % 3 ? PROTO_BODY : 0, 65536, 65536, 1);
        }
        ring_client_bell(&r);
        send(r.fd, "bell", 4, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (ring_client_take(&r, &done)) {
            out--;
        }
    }
}

START_TEST(a_flood_does_not_keep_others_waiting) {
    pid_t pid = fork();
    if (pid == 0) {
        flood();
    }
    uint64_t begin = e2e_now_ms();
    for (int i = 0; i < 200; i++) {
        check_good();
    }
    ck_assert_uint_lt(e2e_now_ms() - begin, 30000);
    kill(pid, SIGKILL);
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("ring_abuse");
    TCase *tc = tcase_create("abuse");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_tail_that_jumps_closes_the_connection);
    tcase_add_test(tc, a_tail_that_goes_back_closes_the_connection);
    tcase_add_test(tc, a_cq_head_from_nowhere_closes_the_connection);
    tcase_add_test(tc, a_client_that_never_reads_completions_runs_out);
    tcase_add_test(tc, a_submission_that_lies_elsewhere_is_answered_and_forgotten);
    tcase_add_test(tc, garbage_for_a_message_is_a_protocol_error);
    tcase_add_test(tc, a_reply_over_its_own_message_harms_nobody_else);
    tcase_add_test(tc, descriptors_are_closed_and_their_sender_too);
    tcase_add_test(tc, descriptors_instead_of_the_first_packet_end_it);
    tcase_add_test(tc, a_session_that_both_connections_have_ends_with_the_descriptor);
    tcase_add_test(tc, a_flood_does_not_keep_others_waiting);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
