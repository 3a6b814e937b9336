// Exactly once: a repeated request is answered as the first one was and changes nothing; decode and
// prefill compute again.  And who a session is: hello and its errors.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/e2e/play.h"

static const char *const flags[] = {
    "--set", "cache.memory=32MiB",    "--set", "cache.slab=1MiB",
    "--set", "limits.connections=16", "--set", "tenant nobodys.uids=4294967294",
    NULL};

static e2e_daemon d;
static e2e_client c;

static void setup(void) {
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
}

static void teardown(void) {
    e2e_close(&c);
    e2e_stop(&d);
}

// twice sends the same request two times and wants the same reply, byte for byte.
static e2e_reply twice(uint32_t op, const void *body, size_t bytes) {
    e2e_reply first, second;
    uint64_t id = ++c.id;
    ATTND_CK_OK(e2e_call_id(&c, op, id, body, bytes, &first));
    double seqs = e2e_stat(&c, "sequences"), blocks = e2e_stat(&c, "blocks.in_use");
    ATTND_CK_OK(e2e_call_id(&c, op, id, body, bytes, &second));
    ck_assert_uint_eq(first.bytes, second.bytes);
    ck_assert_mem_eq(first.msg, second.msg, first.bytes);
    ck_assert_double_eq(e2e_stat(&c, "sequences"), seqs);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks);
    e2e_reply_fini(&first);
    return second;
}

static proto_seq twice_seq(uint32_t op, const void *body, size_t bytes) {
    proto_seq out;
    e2e_reply r = twice(op, body, bytes);
    ck_assert_uint_eq(r.body_bytes, sizeof(out));
    memcpy(&out, r.body, sizeof(out));
    e2e_reply_fini(&r);
    return out;
}

static void twice_empty(uint32_t op, const void *body, size_t bytes) {
    e2e_reply r = twice(op, body, bytes);
    ck_assert_uint_eq(r.body_bytes, 0);
    e2e_reply_fini(&r);
}

START_TEST(repeated_sequence_operations_change_nothing) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 40);
    proto_model model = {.model = m.id};
    proto_seq made = twice_seq(PROTO_SEQ_CREATE, &model, sizeof(model));
    proto_seq body = {.seq = s.handle};
    proto_seq forked = twice_seq(PROTO_SEQ_FORK, &body, sizeof(body));
    ck_assert_uint_eq(forked.len, 40);
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 3);
    proto_seq cut = {.seq = forked.seq, .len = 10};
    twice_empty(PROTO_SEQ_TRUNCATE, &cut, sizeof(cut));
    proto_seq_keep keep = {.seq = forked.seq, .ttl_ms = 60000, .name = "kept"};
    twice_empty(PROTO_SEQ_KEEP, &keep, sizeof(keep));
    made.len = 0;
    twice_empty(PROTO_SEQ_FREE, &made, sizeof(made));
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 2);
    play_token(&c, seqs, 1, 1);
    play_forget(&s);
}
END_TEST

START_TEST(repeated_steps_and_commits_change_nothing) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_part part = {.seq = &s, .new_len = 5};
    e2e_buf b;
    play_step_body(&b, c.id + 1, &m, &part, 1, 0);
    e2e_reply r = twice(PROTO_STEP, b.data + PROTO_BODY, b.bytes - PROTO_BODY);
    proto_step_reply head;
    memcpy(&head, r.body, sizeof(head));
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_step step = {.handle = head.step, .model = &m, .num = 1, .rows = 5, .new_rows = 5};
    step.parts[0] = part;
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    play_commit_body(&b, c.id + 1, &step, NULL);
    r = twice(PROTO_COMMIT, b.data + PROTO_BODY, b.bytes - PROTO_BODY);
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    s.len = 5;
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 1);
    play_free(&c, &s);
}
END_TEST

START_TEST(a_kept_sequence_is_attached_by_its_name) {
    play_model m = play_tiny();
    play_seq s;
    e2e_client other;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 20);
    proto_seq_keep keep = {.seq = s.handle, .name = "system prompt"};
    ATTND_CK_OK(e2e_call(&c, PROTO_SEQ_KEEP, &keep, sizeof(keep), NULL));
    proto_seq_attach attach = {.model = m.id, .name = "system prompt"};
    e2e_connect(&other, d.url);
    play_hello(&other, "other");
    play_open(&other, &m);
    ATTND_CK_ERR(e2e_call(&other, PROTO_SEQ_ATTACH, &attach, sizeof(attach), NULL), ATTND_EBUSY);
    e2e_close(&c);
    e2e_await_stat(&other, "sessions", 1, 1000);
    proto_seq_attach unknown = {.model = m.id, .name = "another"};
    ATTND_CK_ERR(e2e_call(&other, PROTO_SEQ_ATTACH, &unknown, sizeof(unknown), NULL), ATTND_ENOENT);
    c = other; // for twice
    proto_seq out = twice_seq(PROTO_SEQ_ATTACH, &attach, sizeof(attach));
    ck_assert_uint_eq(out.len, 20);
    s.handle = out.seq;
    play_token(&c, seqs, 1, 3);
    char *text = e2e_json(&c, PROTO_SEQ_LIST, "");
    ck_assert_ptr_nonnull(strstr(text, "\"name\":\"system prompt\""));
    free(text);
    play_forget(&s);
}
END_TEST

START_TEST(an_id_below_the_window_is_stale) {
    play_model m = play_tiny();
    play_open(&c, &m);
    proto_model model = {.model = m.id};
    uint64_t first = 1000;
    ATTND_CK_OK(e2e_call_id(&c, PROTO_SEQ_CREATE, first, &model, sizeof(model), NULL));
    ATTND_CK_OK(e2e_call_id(&c, PROTO_SEQ_CREATE, first + 63, &model, sizeof(model), NULL));
    ATTND_CK_OK(e2e_call_id(&c, PROTO_SEQ_CREATE, first, &model, sizeof(model), NULL));     // again
    ATTND_CK_OK(e2e_call_id(&c, PROTO_SEQ_CREATE, first + 5, &model, sizeof(model), NULL)); // new
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 3);
    ATTND_CK_OK(e2e_call_id(&c, PROTO_SEQ_CREATE, first + 65, &model, sizeof(model), NULL));
    ATTND_CK_ERR(e2e_call_id(&c, PROTO_SEQ_CREATE, first, &model, sizeof(model), NULL),
                 ATTND_ESTALE);
    ATTND_CK_ERR(e2e_call_id(&c, PROTO_SEQ_CREATE, 1, &model, sizeof(model), NULL), ATTND_ESTALE);
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 4);
}
END_TEST

START_TEST(an_id_cannot_be_used_for_another_operation) {
    play_model m = play_tiny();
    play_open(&c, &m);
    proto_model model = {.model = m.id};
    e2e_reply r;
    ATTND_CK_OK(e2e_call_id(&c, PROTO_SEQ_CREATE, 50, &model, sizeof(model), &r));
    proto_seq seq;
    memcpy(&seq, r.body, sizeof(seq));
    e2e_reply_fini(&r);
    ATTND_CK_ERR(e2e_call_id(&c, PROTO_SEQ_FREE, 50, &seq, sizeof(seq), NULL), ATTND_EINVAL);
    ck_assert_double_eq(e2e_stat(&c, "sequences"), 1);
}
END_TEST

// attend1 sends a decode or prefill and checks its output.
static void attend1(uint32_t op, uint64_t id, play_step *step, const play_tensors *t,
                    const uint32_t *want_lens) {
    e2e_buf b;
    e2e_reply r;
    play_attend1_body(&b, op, id, step, 0, t);
    attnd_err err = e2e_call_raw(&c, b.data, b.bytes, &r);
    ck_assert_msg(err == ATTND_OK, "%s: %s", attnd_errname(err), r.error.text);
    play_check(step, 0, t, &r);
    proto_attend_reply head;
    memcpy(&head, r.body, sizeof(head));
    ck_assert_uint_ne(head.lens_off, 0);
    for (uint32_t i = 0; i < step->num; i++) {
        uint32_t len;
        memcpy(&len, r.msg + head.lens_off + i * sizeof(len), sizeof(len));
        ck_assert_uint_eq(len, want_lens[i]);
    }
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
}

static play_step lone_step(const play_model *m, play_seq *s, uint32_t n) {
    play_step step = {.model = m, .num = 1, .rows = n, .new_rows = n};
    step.parts[0] = (play_part){.seq = s, .new_len = n};
    return step;
}

START_TEST(decode_and_prefill_append_once_and_compute_again) {
    play_model m = play_one();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    for (uint32_t round = 0; round < 4; round++) {
        uint32_t n = round == 0 ? 600 : 1 + round, op = round == 0 ? PROTO_PREFILL : PROTO_DECODE;
        play_step step = lone_step(&m, &s, n);
        play_tensors t = play_random(&step);
        uint64_t id = ++c.id;
        uint32_t want[1] = {s.len + n};
        attend1(op, id, &step, &t, want);
        double blocks = e2e_stat(&c, "blocks.in_use");
        attend1(op, id, &step, &t, want); // the mirror appends the same again, too
        attend1(op, id, &step, &t, want);
        ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks);
        s.len += n;
        play_tensors_fini(&t);
    }
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    ck_assert_double_eq(e2e_stat(&c, "steps"), 0);
}
END_TEST

START_TEST(a_repeated_decode_is_stale_once_the_sequence_has_moved_on) {
    play_model m = play_one();
    play_seq s;
    e2e_buf b;
    e2e_reply r;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_step step = lone_step(&m, &s, 3);
    play_tensors t = play_random(&step);
    uint64_t id = ++c.id;
    attend1(PROTO_DECODE, id, &step, &t, (uint32_t[]){3});
    s.len = 3;
    attend1(PROTO_DECODE, ++c.id, &step, &t, (uint32_t[]){6});
    s.len = 6;
    play_attend1_body(&b, PROTO_DECODE, id, &step, 0, &t);
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, &r), ATTND_ESTALE);
    ck_assert_str_eq(r.error.field, "request");
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 1);
    play_free(&c, &s);
}
END_TEST

START_TEST(a_decode_has_at_most_eight_rows_and_one_layer) {
    play_model m = play_one(), two = play_tiny();
    play_seq s;
    e2e_buf b;
    e2e_reply r;
    play_open(&c, &m);
    play_open(&c, &two);
    play_create(&c, &m, &s);
    play_step step = lone_step(&m, &s, 9);
    play_tensors t = play_random(&step);
    play_attend1_body(&b, PROTO_DECODE, ++c.id, &step, 0, &t);
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, &r), ATTND_EINVAL);
    ck_assert_str_eq(r.error.field, "new_len");
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_seq other;
    play_create(&c, &two, &other);
    step = lone_step(&two, &other, 2);
    play_attend1_body(&b, PROTO_PREFILL, ++c.id, &step, 0, &t);
    ATTND_CK_ERR(e2e_call_raw(&c, b.data, b.bytes, &r), ATTND_ENOTSUP);
    ck_assert_str_eq(r.error.field, "model");
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
    ck_assert_double_eq(e2e_stat(&c, "steps"), 0);
    play_forget(&s);
    play_forget(&other);
}
END_TEST

START_TEST(a_decode_of_forked_sequences_copies_their_block_first) {
    play_model m = play_one();
    play_seq s, fork;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 21);
    play_fork(&c, &s, &fork);
    play_step step = {.model = &m, .num = 2, .rows = 3, .new_rows = 3};
    step.parts[0] = (play_part){.seq = &s, .new_len = 1};
    step.parts[1] = (play_part){.seq = &fork, .new_len = 2};
    play_tensors t = play_random(&step);
    attend1(PROTO_DECODE, ++c.id, &step, &t, (uint32_t[]){22, 23});
    s.len = 22;
    fork.len = 23;
    play_seq *const both[] = {&s, &fork};
    play_token(&c, both, 2, 1);
    play_tensors_fini(&t);
    play_free(&c, &s);
    play_free(&c, &fork);
}
END_TEST

// ---- hello

static attnd_err hello(e2e_client *who, const char *json, char field[32]) {
    e2e_reply r;
    attnd_err err = e2e_call(who, PROTO_HELLO, json, strlen(json), &r);
    if (field) {
        strcpy(field, r.error.field);
    }
    e2e_reply_fini(&r);
    return err;
}

START_TEST(hello_comes_first_and_once) {
    e2e_client other;
    char field[32];
    ATTND_CK_ERR(hello(&c, "{}", NULL), ATTND_EEXIST);
    e2e_connect(&other, d.url);
    ATTND_CK_ERR(e2e_call(&other, PROTO_STATS, "", 0, NULL), ATTND_ESTALE);
    ATTND_CK_ERR(hello(&other, "", NULL), ATTND_EPROTO);
    ATTND_CK_ERR(hello(&other, "{\"color\": 1}", field), ATTND_EINVAL);
    ck_assert_str_eq(field, "color");
    ATTND_CK_ERR(hello(&other, "{\"client\": 1}", field), ATTND_EINVAL);
    ATTND_CK_ERR(hello(&other, "{\"tenant\": \"unknown\"}", field), ATTND_EPERM);
    ck_assert_str_eq(field, "tenant");
    ATTND_CK_ERR(hello(&other, "{\"tenant\": \"nobodys\"}", field), ATTND_EPERM);
    ATTND_CK_ERR(hello(&other, "{\"session\": \"1\"}", field), ATTND_EINVAL);
    ck_assert_str_eq(field, "secret");
    ATTND_CK_OK(hello(&other, "{}", NULL));
    e2e_close(&other);
}
END_TEST

START_TEST(reattaching_needs_a_live_session_and_its_secret) {
    e2e_client one, two;
    e2e_connect(&one, d.url);
    char *text = e2e_json(&one, PROTO_HELLO, "{}");
    char session[32], secret[64], json[160];
    ck_assert_int_eq(sscanf(strstr(text, "\"session\":"), "\"session\":\"%31[0-9a-f]", session), 1);
    ck_assert_int_eq(sscanf(strstr(text, "\"secret\":"), "\"secret\":\"%63[0-9a-f]", secret), 1);
    free(text);
    ck_assert_uint_eq(strlen(secret), 32);
    e2e_connect(&two, d.url);
    snprintf(json, sizeof(json), "{\"session\": \"%s\", \"secret\": \"%s\"}", session, secret);
    ATTND_CK_ERR(hello(&two, json, NULL), ATTND_EBUSY); // has its connection
    snprintf(json, sizeof(json), "{\"session\": \"%s\", \"secret\": \"%032x\"}", session, 1);
    ATTND_CK_ERR(hello(&two, json, NULL), ATTND_EPERM);
    e2e_close(&one);
    e2e_await_stat(&c, "sessions", 1, 1000);
    snprintf(json, sizeof(json), "{\"session\": \"%s\", \"secret\": \"%s\"}", session, secret);
    ATTND_CK_ERR(hello(&two, json, NULL), ATTND_ESTALE);
    ATTND_CK_OK(hello(&two, "{}", NULL));
    e2e_close(&two);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_once");
    TCase *tc = tcase_create("once");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, repeated_sequence_operations_change_nothing);
    tcase_add_test(tc, repeated_steps_and_commits_change_nothing);
    tcase_add_test(tc, a_kept_sequence_is_attached_by_its_name);
    tcase_add_test(tc, an_id_below_the_window_is_stale);
    tcase_add_test(tc, an_id_cannot_be_used_for_another_operation);
    tcase_add_test(tc, decode_and_prefill_append_once_and_compute_again);
    tcase_add_test(tc, a_repeated_decode_is_stale_once_the_sequence_has_moved_on);
    tcase_add_test(tc, a_decode_has_at_most_eight_rows_and_one_layer);
    tcase_add_test(tc, a_decode_of_forked_sequences_copies_their_block_first);
    tcase_add_test(tc, hello_comes_first_and_once);
    tcase_add_test(tc, reattaching_needs_a_live_session_and_its_secret);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
