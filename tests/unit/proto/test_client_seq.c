// Sequences: the bytes of each request, the values of each reply, every cut of a reply.
#include <stdatomic.h>
#include <string.h>

#include "proto/client/attnd.h"
#include "tests/check_main.h"
#include "tests/unit/proto/fake_daemon.h"

static attnd_errinfo info;
static attnd_client *client;
static fake_daemon *fake;
static uint8_t got[256];
static size_t got_bytes;
static uint32_t got_op;
static uint32_t model;       // FAKE_MODEL
static atomic_int step = -1; // of fake_cut; -1 = whole

static size_t answer(proto_view request, const proto_header *h, uint8_t *reply) {
    got_bytes = request.bytes - PROTO_BODY;
    memcpy(got, request.data + PROTO_BODY, got_bytes);
    got_op = h->op;
    const proto_seq seq = {.seq = UINT64_C(0xfedcba9876543210), .len = 17};
    bool has_seq = h->op == 16 || h->op == 17 || h->op == 21;
    size_t bytes = fake_body(reply, h, &seq, has_seq ? sizeof(seq) : 0);
    return atomic_load(&step) >= 0 ? fake_cut(reply, h, atomic_load(&step)) : bytes;
}

static void start(void) {
    fake = fake_daemon_start(answer, 0);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(fake),
                              &(attnd_connect_opts){.timeout_ms = 5000}, &info));
    const attnd_model_opts opts = {.name = "m", .all = ATTND_LAYER_DEFAULT};
    ATTND_CK_OK(attnd_model_open(client, &opts, &model, &info));
}

static void stop(void) {
    attnd_close(client);
    fake_daemon_stop(fake);
}

static void sent(uint32_t op, const void *body, size_t bytes) {
    ck_assert_uint_eq(got_op, op);
    ck_assert_uint_eq(got_bytes, bytes);
    ck_assert_mem_eq(got, body, bytes);
}

START_TEST(seq_create_names_the_model) {
    uint64_t seq = 0;
    ATTND_CK_OK(attnd_seq_create(client, model, &seq, &info));
    ck_assert_uint_eq(seq, UINT64_C(0xfedcba9876543210));
    sent(16, "\3\0\0\0\0\0\0", 8);
    ATTND_CK_OK(attnd_seq_create_priority(client, model, 200, &seq, &info));
    sent(16, "\3\0\0\0\310\0\0", 8);
}
END_TEST

START_TEST(seq_fork_names_the_sequence) {
    uint64_t forked = 0;
    uint32_t len = 0;
    ATTND_CK_OK(attnd_seq_fork(client, 0x1122, &forked, &len, &info));
    ck_assert_uint_eq(forked, UINT64_C(0xfedcba9876543210));
    ck_assert_uint_eq(len, 17);
    sent(17, "\x22\x11\0\0\0\0\0\0\0\0\0\0\0\0\0", 16);
    ATTND_CK_OK(attnd_seq_fork(client, 0x1122, &forked, NULL, &info));
}
END_TEST

START_TEST(seq_truncate_and_free_say_their_length) {
    ATTND_CK_OK(attnd_seq_truncate(client, 1, 0x0102, &info));
    sent(18, "\1\0\0\0\0\0\0\0\2\1\0\0\0\0\0", 16);
    ATTND_CK_OK(attnd_seq_free(client, 1, &info));
    sent(19, "\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 16);
}
END_TEST

START_TEST(seq_keep_and_attach_pad_the_name) {
    uint8_t keep[80] = {9, [8] = 0xe8, [9] = 3, [16] = 'a', [17] = 'b'};
    ATTND_CK_OK(attnd_seq_keep(client, 9, "ab", 1000, &info));
    sent(20, keep, sizeof(keep));
    keep[16] = keep[17] = 0;
    ATTND_CK_OK(attnd_seq_keep(client, 9, NULL, 1000, &info));
    sent(20, keep, sizeof(keep));
    uint8_t attach[72] = {3, [8] = 'x'};
    uint64_t seq = 0;
    uint32_t len = 0;
    ATTND_CK_OK(attnd_seq_attach(client, model, "x", &seq, &len, &info));
    sent(21, attach, sizeof(attach));
    ck_assert_uint_eq(len, 17);
}
END_TEST

START_TEST(seq_names_have_a_longest) {
    char name[65];
    uint64_t seq;
    memset(name, 'n', 64);
    name[63] = '\0';
    ATTND_CK_OK(attnd_seq_keep(client, 9, name, 0, &info));
    ck_assert_mem_eq(got + 16, name, 64);
    name[63] = 'n';
    name[64] = '\0';
    got_op = 0;
    ATTND_CK_ERR(attnd_seq_keep(client, 9, name, 0, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "name");
    ATTND_CK_ERR(attnd_seq_attach(client, model, name, &seq, NULL, &info), ATTND_EINVAL);
    ck_assert_uint_eq(got_op, 0);
}
END_TEST

START_TEST(seq_of_a_model_that_is_closed_is_refused) {
    uint64_t seq = 5;
    ATTND_CK_OK(attnd_model_close(client, model, &info));
    ATTND_CK_ERR(attnd_seq_create(client, model, &seq, &info), ATTND_ENOENT);
    ck_assert_str_eq(info.field, "model");
    ck_assert_str_eq(info.text, "model 3 is not open");
    ATTND_CK_ERR(attnd_seq_attach(client, model, "x", &seq, NULL, &info), ATTND_ENOENT);
    ck_assert_uint_eq(got_op, PROTO_MODEL_CLOSE);
    ck_assert_uint_eq(seq, 5);
    ATTND_CK_OK(attnd_seq_free(client, 1, &info)); // those that there are stay until then
}
END_TEST

START_TEST(seq_every_cut_of_a_reply_is_refused) {
    for (int i = 0; i < 2 * (PROTO_BODY + (int)sizeof(proto_seq)); i++) {
        uint64_t seq = 5;
        uint32_t len = 6;
        atomic_store(&step, i);
        ATTND_CK_ERR(attnd_seq_fork(client, 1, &seq, &len, &info), ATTND_EPROTO);
        ck_assert(seq == 5 && len == 6);
    }
    for (int i = 0; i < 2 * PROTO_BODY; i++) {
        atomic_store(&step, i);
        ATTND_CK_ERR(attnd_seq_free(client, 1, &info), ATTND_EPROTO);
    }
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_seq");
    TCase *tc = tcase_create("seq");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, start, stop);
    tcase_add_test(tc, seq_create_names_the_model);
    tcase_add_test(tc, seq_fork_names_the_sequence);
    tcase_add_test(tc, seq_truncate_and_free_say_their_length);
    tcase_add_test(tc, seq_keep_and_attach_pad_the_name);
    tcase_add_test(tc, seq_names_have_a_longest);
    tcase_add_test(tc, seq_of_a_model_that_is_closed_is_refused);
    tcase_add_test(tc, seq_every_cut_of_a_reply_is_refused);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
