// Peers that connect and hang up: before anything was said, and in the middle of a message.
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/e2e/harness.h"
#include "tests/e2e/play.h"
#include "tests/e2e/raw.h"

static e2e_daemon d;

static void setup(void) {
    e2e_dir(&d);
    e2e_start(&d, NULL);
}

static void teardown(void) {
    e2e_stop(&d);
}

static void connect_and_close(void) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    ck_assert_uint_lt(strlen(d.path), sizeof(addr.sun_path));
    memcpy(addr.sun_path, d.path, strlen(d.path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(connect(fd, (const struct sockaddr *)&addr, sizeof(addr)), 0);
    close(fd);
}

START_TEST(peers_that_hang_up_at_once_deafen_nobody) {
    for (int i = 0; i < 200; i++) {
        connect_and_close();
    }
    e2e_client c;
    e2e_connect(&c, d.url);
    play_hello(&c, "test"); // is answered, or this fails
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    e2e_close(&c);
}
END_TEST

// ask calls an op and returns the body's first bytes in out.
static void ask(raw_client *c, uint32_t op, const void *body, size_t bytes, void *out,
                size_t out_bytes) {
    e2e_buf b;
    uint8_t *msg;
    size_t n;
    e2e_buf_init(&b, op, c->sp_id + 1, body, bytes);
    ck_assert(raw_send(c, b.data, b.bytes, 5000));
    ck_assert(raw_recv(c, &msg, &n));
    ck_assert_uint_ge(n, PROTO_BODY + out_bytes);
    memcpy(out, msg + PROTO_BODY, out_bytes);
    free(msg);
    e2e_buf_fini(&b);
}

// large_attend is an attend of 2 MiB whose answer has 2 MiB: rows that see no key.
static void large_attend(raw_client *c, const play_model *m, e2e_buf *b) {
    enum { ROWS = 4096 };
    proto_seq seq;
    proto_step_reply reply;
    proto_model model = {.model = m->id};
    uint8_t byte;
    ask(c, PROTO_HELLO, "{}", 2, &byte, 1);
    ask(c, PROTO_SEQ_CREATE, &model, sizeof(model), &seq, sizeof(seq));
    struct {
        proto_step head;
        proto_step_seq seq;
    } step = {{.model = m->id, .num_seqs = 1}, {.seq = seq.seq, .q_len = ROWS}};
    ask(c, PROTO_STEP, &step, sizeof(step), &reply, sizeof(reply));
    proto_attend body = {.step = reply.step};
    e2e_buf_init(b, PROTO_ATTEND, 99, &body, sizeof(body));
    body.q.off = e2e_buf_add(b, NULL, (size_t)ROWS * m->q_heads * m->head_dim * sizeof(float));
    e2e_buf_set(b, 0, &body, sizeof(body));
    e2e_buf_seal(b);
}

START_TEST(peers_that_hang_up_in_the_middle_of_a_message_are_noticed) {
    static uint8_t sink[1 << 16];
    e2e_client good;
    e2e_connect(&good, d.url);
    play_hello(&good, "good");
    play_model m = play_tiny();
    play_open(&good, &m);
    for (int i = 0; i < 150; i++) {
        raw_client c;
        e2e_buf b;
        raw_open(&c, d.path);
        large_attend(&c, &m, &b);
        size_t part = b.bytes * (size_t)(i % 10 + 1) / 10; // every tenth sends it whole
        raw_send_part(&c, b.data, b.bytes, part);
        for (size_t read = 0; part == b.bytes && read < (size_t)i * 10000;) {
            ssize_t n = raw_read(&c, sink, sizeof(sink));
            ck_assert_int_gt(n, 0);
            read += (size_t)n;
        }
        raw_close(&c);
        e2e_buf_fini(&b);
        e2e_await_stat(&good, "sessions", 1, 1000);
    }
    ck_assert_double_eq(e2e_stat(&good, "steps"), 0);
    e2e_close(&good);
}
END_TEST

// A cancel is answered when what runs of its step has ended, here after its client has gone.
START_TEST(peers_that_hang_up_while_a_cancel_waits_harm_nobody) {
    enum { ROWS = 3072 };
    e2e_client good;
    e2e_connect(&good, d.url);
    play_hello(&good, "good");
    play_model m = play_tiny();
    play_open(&good, &m);
    for (int i = 0; i < 20; i++) {
        raw_client c;
        e2e_buf attend, cancel;
        proto_seq seq;
        proto_step_reply reply;
        proto_model model = {.model = m.id};
        uint8_t byte;
        raw_open(&c, d.path);
        ask(&c, PROTO_HELLO, "{}", 2, &byte, 1);
        ask(&c, PROTO_SEQ_CREATE, &model, sizeof(model), &seq, sizeof(seq));
        struct {
            proto_step head;
            proto_step_seq seq;
        } step = {{.model = m.id, .num_seqs = 1}, {.seq = seq.seq, .new_len = ROWS}};
        ask(&c, PROTO_STEP, &step, sizeof(step), &reply, sizeof(reply));
        proto_attend body = {.step = reply.step};
        e2e_buf_init(&attend, PROTO_ATTEND, 99, &body, sizeof(body));
        size_t kv_bytes = (size_t)ROWS * m.kv_heads * m.head_dim * sizeof(float);
        body.q.off = e2e_buf_add(&attend, NULL, kv_bytes * m.q_heads / m.kv_heads);
        body.k.off = e2e_buf_add(&attend, NULL, kv_bytes);
        body.v.off = e2e_buf_add(&attend, NULL, kv_bytes);
        e2e_buf_set(&attend, 0, &body, sizeof(body));
        e2e_buf_seal(&attend);
        ck_assert(raw_send(&c, attend.data, attend.bytes, 5000));
        proto_cancel which = {.step = reply.step};
        e2e_buf_init(&cancel, PROTO_CANCEL, 100, &which, sizeof(which));
        e2e_sleep_ms(i % 4);
        ck_assert(raw_send(&c, cancel.data, cancel.bytes, 5000));
        e2e_sleep_ms(i % 3);
        raw_close(&c);
        e2e_buf_fini(&attend);
        e2e_buf_fini(&cancel);
        e2e_await_stat(&good, "sessions", 1, 5000);
    }
    ck_assert_double_eq(e2e_stat(&good, "steps"), 0);
    ck_assert_double_eq(e2e_stat(&good, "blocks.in_use"), 0);
    ck_assert_double_eq(e2e_stat(&good, "accounting_mismatches"), 0);
    e2e_close(&good);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_hangup");
    TCase *tc = tcase_create("hang up");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, peers_that_hang_up_at_once_deafen_nobody);
    tcase_add_test(tc, peers_that_hang_up_in_the_middle_of_a_message_are_noticed);
    tcase_add_test(tc, peers_that_hang_up_while_a_cancel_waits_harm_nobody);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
