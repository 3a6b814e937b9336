// Steps: the bytes of requests, and replies that are whole, cut or lie.
#include <stdatomic.h>
#include <string.h>

#include "proto/client/client.h"
#include "tests/check_main.h"
#include "tests/unit/proto/fake_daemon.h"

static attnd_errinfo info;
static attnd_client *client;
static fake_daemon *fake;
static uint8_t got[65536];
static size_t got_bytes;
static uint32_t got_op;
static atomic_int step = -1; // of fake_cut; -1 = whole
static uint8_t body[256];    // of the reply
static size_t body_bytes;
static uint32_t model;

static size_t answer(proto_view request, const proto_header *h, uint8_t *reply) {
    got_bytes = request.bytes;
    memcpy(got, request.data, got_bytes);
    got_op = h->op;
    size_t bytes = fake_body(reply, h, body, body_bytes);
    return atomic_load(&step) >= 0 ? fake_cut(reply, h, atomic_load(&step)) : bytes;
}

static void start(void) {
    fake = fake_daemon_start(answer, 0);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(fake),
                              &(attnd_connect_opts){.timeout_ms = 5000}, &info));
    const attnd_model_opts opts = {.name = "m",
                                   .layers = 1,
                                   .q_heads = 1,
                                   .kv_heads = 1,
                                   .head_dim = 8,
                                   .all = ATTND_LAYER_DEFAULT};
    ATTND_CK_OK(attnd_model_open(client, &opts, &model, &info));
}

static void stop(void) {
    attnd_close(client);
    fake_daemon_stop(fake);
}

// Two sequences: 5 new tokens with everything, 3 read-only rows.
static const uint32_t tokens[5] = {10, 11, 12, 13, 14};
static const int32_t positions[5] = {0, 1, 2, 2, 3}, read_positions[3] = {7, 8, 9};
static const uint64_t tree[5] = {1, 3, 7, 11, 27};
static attnd_step_seq seqs[2];

static const uint32_t path[3] = {0, 2, 4};
static const attnd_accept accept[2] = {{.accepted = 3, .num_path = 3, .path = path}, {0}};

static void fill_step(void) {
    seqs[0] = (attnd_step_seq){.seq = 0xa1,
                               .new_len = 5,
                               .reserve = 2,
                               .tokens = tokens,
                               .positions = positions,
                               .tree_mask = tree};
    seqs[1] = (attnd_step_seq){.seq = 0xa2, .q_len = 3, .positions = read_positions};
    const struct {
        proto_step_reply r;
        proto_step_len lens[2];
    } reply = {{.step = 0x5e, .num_seqs = 2}, {{100, 4}, {50, 0}}};
    memcpy(body, &reply, sizeof(reply));
    body_bytes = sizeof(reply);
}

START_TEST(step_open_lays_out_what_it_was_given) {
    fill_step();
    uint64_t handle = 0;
    attnd_step_opts opts = {.deadline_ms = 250};
    ATTND_CK_OK(attnd_step_open(client, model, seqs, 2, &opts, &handle, &info));
    ck_assert_uint_eq(got_op, PROTO_STEP);
    const proto_view msg = {got, got_bytes};
    proto_step s;
    proto_step_seq q[2];
    memcpy(&s, got + 32, sizeof(s));
    memcpy(q, got + 56, sizeof(q));
    const proto_step want = {.model = FAKE_MODEL, .num_seqs = 2, .deadline_ms = 250};
    ck_assert_mem_eq(&s, &want, sizeof(s));
    ck_assert(q[0].seq == 0xa1 && q[0].new_len == 5 && q[0].q_len == 0 && q[0].reserve == 2);
    ck_assert(q[1].seq == 0xa2 && q[1].new_len == 0 && q[1].q_len == 3 && q[1].reserve == 0);
    const struct {
        uint32_t off;
        const void *want;
        size_t elems, elem_bytes;
    } arrays[] = {{q[0].tokens_off, tokens, 5, 4},
                  {q[0].positions_off, positions, 5, 4},
                  {q[0].tree_off, tree, 5, 8},
                  {q[1].positions_off, read_positions, 3, 4}};
    for (int i = 0; i < 4; i++) {
        const void *at = NULL;
        ATTND_CK_OK(proto_array(msg, "x", arrays[i].off, arrays[i].elems, arrays[i].elem_bytes,
                                24 + 64, &at, &info));
        ck_assert_ptr_nonnull(at);
        ck_assert_mem_eq(at, arrays[i].want, arrays[i].elems * arrays[i].elem_bytes);
    }
    ck_assert_uint_eq(q[1].tokens_off, 0);
    ck_assert_uint_eq(q[1].tree_off, 0);
}
END_TEST

START_TEST(step_open_fills_lengths_from_the_reply) {
    fill_step();
    uint64_t handle = 0;
    ATTND_CK_OK(attnd_step_open(client, model, seqs, 2, NULL, &handle, &info));
    ck_assert_uint_eq(handle, 0x5e);
    ck_assert(seqs[0].committed == 100 && seqs[0].cached == 4);
    ck_assert(seqs[1].committed == 50 && seqs[1].cached == 0);
}
END_TEST

static void step_reply_is_refused(void) {
    uint64_t handle = 9;
    seqs[0].committed = seqs[1].committed = 77;
    ATTND_CK_ERR(attnd_step_open(client, model, seqs, 2, NULL, &handle, &info), ATTND_EPROTO);
    ck_assert_uint_eq(handle, 9);
    ck_assert(seqs[0].committed == 77 && seqs[1].committed == 77);
}

START_TEST(step_open_refuses_every_cut_of_a_reply) {
    fill_step();
    for (int i = 0; i < 2 * (PROTO_BODY + (int)body_bytes); i++) {
        atomic_store(&step, i);
        step_reply_is_refused();
    }
}
END_TEST

START_TEST(step_open_refuses_a_reply_that_lies) {
    const uint32_t nums[] = {0, 1, 3, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        fill_step();
        memcpy(body + 8, &nums[i], 4); // num_seqs
        step_reply_is_refused();
    }
    const uint32_t cached[] = {6, UINT32_MAX};
    for (int i = 0; i < 2; i++) {
        fill_step();
        memcpy(body + 20, &cached[i], 4); // of 5 new tokens
        step_reply_is_refused();
    }
    fill_step();
    memcpy(body + 28, &(uint32_t){1}, 4); // of a read-only sequence
    step_reply_is_refused();
}
END_TEST

START_TEST(step_open_takes_a_longer_reply) {
    fill_step();
    body_bytes += 24;
    uint64_t handle;
    ATTND_CK_OK(attnd_step_open(client, model, seqs, 2, NULL, &handle, &info));
}
END_TEST

START_TEST(step_open_refuses_too_many_sequences) {
    attnd_step_seq many[9] = {{0}};
    uint64_t handle;
    ATTND_CK_ERR(attnd_step_open(client, model, many, 0, NULL, &handle, &info), ATTND_EINVAL);
    ATTND_CK_ERR(attnd_step_open(client, model, many, 9, NULL, &handle, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "num_seqs");
    ck_assert_uint_eq(got_op, 0);
}
END_TEST

START_TEST(step_open_refuses_a_model_that_is_not_open) {
    uint64_t handle = 9;
    fill_step();
    ATTND_CK_ERR(attnd_step_open(client, 7, seqs, 2, NULL, &handle, &info), ATTND_ENOENT);
    ck_assert_str_eq(info.field, "model");
    ck_assert_uint_eq(got_op, 0);
    uint32_t again;
    const attnd_model_opts opts = {.name = "m", .all = ATTND_LAYER_DEFAULT};
    ATTND_CK_OK(attnd_model_open(client, &opts, &again, &info));
    ck_assert_uint_eq(again, model); // it is open twice
    body_bytes = 0;
    ATTND_CK_OK(attnd_model_close(client, model, &info));
    fill_step();
    ATTND_CK_OK(attnd_step_open(client, model, seqs, 2, NULL, &handle, &info));
    body_bytes = 0;
    ATTND_CK_OK(attnd_model_close(client, model, &info));
    fill_step();
    handle = 9;
    attnd_step_opts carries = {.commit_step = 0x5e, .commit_accept = accept, .num_commit = 2};
    ATTND_CK_ERR(attnd_step_open(client, model, seqs, 2, &carries, &handle, &info), ATTND_ENOENT);
    ck_assert_str_eq(info.text, "model 3 is not open");
    ck_assert_uint_eq(got_op, PROTO_MODEL_CLOSE); // the commit was not made either
    ck_assert_uint_eq(handle, 9);
}
END_TEST

START_TEST(step_open_refuses_what_is_too_large) {
    fill_step();
    uint64_t handle;
    seqs[0].new_len = 513; // of a tree
    ATTND_CK_ERR(attnd_step_open(client, model, seqs, 1, NULL, &handle, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "tree_mask");
    seqs[0].tree_mask = NULL;
    seqs[0].new_len = UINT32_MAX; // 16 GiB of tokens: measured, not touched
    ATTND_CK_ERR(attnd_step_open(client, model, seqs, 1, NULL, &handle, &info), ATTND_EMSGSIZE);
    ck_assert_uint_eq(got_op, 0);
}
END_TEST

static void fill_commit(void) {
    const struct {
        proto_lens r;
        uint32_t lens[2];
    } reply = {{.num_seqs = 2}, {103, 50}};
    memcpy(body, &reply, sizeof(reply));
    body_bytes = sizeof(reply);
}

START_TEST(step_commit_lays_out_what_it_was_given) {
    fill_commit();
    uint32_t lens[2] = {0};
    ATTND_CK_OK(attnd_step_commit(client, 0x5e, accept, 2, lens, &info));
    ck_assert_uint_eq(got_op, PROTO_COMMIT);
    const proto_commit want = {.step = 0x5e, .num_seqs = 2};
    const proto_commit_seq want_seqs[2] = {{.accepted = 3, .path_off = 64}, {0}};
    ck_assert_mem_eq(got + 32, &want, sizeof(want));
    ck_assert_mem_eq(got + 48, want_seqs, sizeof(want_seqs));
    ck_assert_mem_eq(got + 64, path, sizeof(path));
    ck_assert_uint_eq(got_bytes, 76);
    ck_assert(lens[0] == 103 && lens[1] == 50);
    ATTND_CK_OK(attnd_step_commit(client, 0x5e, accept, 2, NULL, &info));
}
END_TEST

START_TEST(step_commit_refuses_replies_that_are_cut_or_lie) {
    uint32_t lens[2] = {1, 2};
    fill_commit();
    memcpy(body, &(uint32_t){3}, 4);
    ATTND_CK_ERR(attnd_step_commit(client, 0x5e, accept, 2, lens, &info), ATTND_EPROTO);
    fill_commit();
    for (int i = 0; i < 2 * (PROTO_BODY + (int)body_bytes); i++) {
        atomic_store(&step, i);
        ATTND_CK_ERR(attnd_step_commit(client, 0x5e, accept, 2, lens, &info), ATTND_EPROTO);
    }
    ck_assert(lens[0] == 1 && lens[1] == 2);
}
END_TEST

START_TEST(step_commit_refuses_too_many_sequences) {
    ATTND_CK_ERR(attnd_step_commit(client, 1, accept, 0, NULL, &info), ATTND_EINVAL);
    ATTND_CK_ERR(attnd_step_commit(client, 1, accept, 9, NULL, &info), ATTND_EINVAL);
    ck_assert_uint_eq(got_op, 0);
}
END_TEST

START_TEST(step_cancel_names_the_step) {
    body_bytes = 0;
    ATTND_CK_OK(attnd_step_cancel(client, 0x5e, &info));
    ck_assert_uint_eq(got_op, PROTO_CANCEL);
    const proto_cancel want = {.step = 0x5e};
    ck_assert_mem_eq(got + 32, &want, sizeof(want));
    got_op = 0;
    ATTND_CK_ERR(attnd_step_cancel(client, 0, &info), ATTND_EINVAL);
    ck_assert_uint_eq(got_op, 0);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_step");
    TCase *tc = tcase_create("step");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, start, stop);
    tcase_add_test(tc, step_open_lays_out_what_it_was_given);
    tcase_add_test(tc, step_open_fills_lengths_from_the_reply);
    tcase_add_test(tc, step_open_refuses_every_cut_of_a_reply);
    tcase_add_test(tc, step_open_refuses_a_reply_that_lies);
    tcase_add_test(tc, step_open_takes_a_longer_reply);
    tcase_add_test(tc, step_open_refuses_too_many_sequences);
    tcase_add_test(tc, step_open_refuses_a_model_that_is_not_open);
    tcase_add_test(tc, step_open_refuses_what_is_too_large);
    tcase_add_test(tc, step_commit_lays_out_what_it_was_given);
    tcase_add_test(tc, step_commit_refuses_replies_that_are_cut_or_lie);
    tcase_add_test(tc, step_commit_refuses_too_many_sequences);
    tcase_add_test(tc, step_cancel_names_the_step);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
