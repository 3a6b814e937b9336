// Sessions, and the replies kept for them: every id is answered exactly once.
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;

static void setup(void) {
    fix_init(&f);
}

static void teardown(void) {
    fix_fini(&f);
}

static uint64_t open_session(uint32_t tenant) {
    uint64_t session;
    ATTND_CK_OK(kv_session_open(f.kv, tenant, (const uint8_t[KV_SECRET_BYTES]){3}, &session));
    return session;
}

static attnd_err create_as(uint64_t session, uint64_t request, uint64_t *seq) {
    return kv_seq_create(f.kv, (kv_request){session, request}, f.model, seq, &f.info);
}

static attnd_err find(uint64_t session, uint64_t request) {
    kv_reply reply;
    return kv_reply_find(f.kv, (kv_request){session, request}, &reply);
}

START_TEST(kv_session_handle_is_never_used_twice) {
    uint64_t first = open_session(f.tenant);
    ATTND_CK_OK(kv_session_close(f.kv, first, 0));
    ATTND_CK_ERR(kv_session_close(f.kv, first, 0), ATTND_ESTALE);
    uint64_t second = open_session(f.tenant), seq;
    ck_assert_uint_eq((uint32_t)first, (uint32_t)second); // the slot, not the handle
    ck_assert_uint_ne(first, second);
    ATTND_CK_ERR(create_as(first, 1, &seq), ATTND_ESTALE);
    ATTND_CK_ERR(find(first, 1), ATTND_ESTALE);
    ATTND_CK_ERR(find(0, 1), ATTND_ESTALE);
    ATTND_CK_ERR(find(UINT64_MAX, 1), ATTND_ESTALE);
}
END_TEST

START_TEST(kv_session_slot_whose_generation_is_used_up_is_not_reused) {
    uint64_t first = open_session(f.tenant);
    uint32_t slot = (uint32_t)first;
    ATTND_CK_OK(kv_session_close(f.kv, first, 0));
    f.kv->sessions[slot].generation = UINT32_MAX - 1;
    uint64_t last = open_session(f.tenant);
    ck_assert_uint_eq(last, (uint64_t)UINT32_MAX << 32 | slot);
    ATTND_CK_OK(kv_session_close(f.kv, last, 0));
    ck_assert_uint_ne((uint32_t)open_session(f.tenant), slot);
}
END_TEST

START_TEST(kv_session_open_refuses_over_a_limit_and_without_tenant) {
    uint64_t session;
    const uint8_t secret[KV_SECRET_BYTES] = {0};
    ATTND_CK_ERR(kv_session_open(f.kv, f.tenant + 1, secret, &session), ATTND_EINVAL);
    for (int i = 0; i < 3; i++) {
        open_session(f.tenant);
    }
    ATTND_CK_ERR(kv_session_open(f.kv, f.tenant, secret, &session), ATTND_EBUSY);
}
END_TEST

START_TEST(kv_session_close_frees_unkept_and_detaches_kept_sequences) {
    uint64_t session = open_session(f.tenant), kept, other = fix_seq(&f), seq;
    ATTND_CK_OK(create_as(session, 1, &seq));
    ATTND_CK_OK(create_as(session, 2, &kept));
    ATTND_CK_OK(kv_seq_keep(f.kv, (kv_request){session, 3}, kept, "kept", 0, &f.info));
    fix_append(&f, other, 5);
    ATTND_CK_OK(kv_session_close(f.kv, session, 1000));
    kv_seq_info info;
    ATTND_CK_ERR(kv_seq_get(f.kv, 0, seq, &info), ATTND_ESTALE);
    ATTND_CK_OK(kv_seq_get(f.kv, 0, kept, &info));
    ck_assert_uint_eq(info.session, 0);
    ck_assert_uint_eq(fix_committed(&f, other), 5); // another session's are left alone
}
END_TEST

START_TEST(kv_session_with_an_open_step_does_not_close) {
    uint64_t session = open_session(f.tenant), seq, step;
    ATTND_CK_OK(create_as(session, 1, &seq));
    kv_step_seq s = {.seq = seq, .new_len = 5};
    const kv_copy *copies;
    uint32_t num;
    bool may_wait;
    ATTND_CK_OK(kv_step_open(f.kv, (kv_request){session, 2}, f.model, &s, 1, &step, &copies, &num,
                             &may_wait, &f.info));
    ATTND_CK_ERR(kv_session_close(f.kv, session, 0), ATTND_EBUSY);
    ATTND_CK_OK(kv_step_abort(f.kv, (kv_request){0}, step));
    ATTND_CK_OK(kv_session_close(f.kv, session, 0));
    ck_assert_uint_eq(fix_in_use(&f), 0);
}
END_TEST

// ---- replies

START_TEST(kv_reply_is_found_once_answered) {
    uint64_t seq, again;
    kv_reply reply;
    ATTND_CK_ERR(find(f.session, 10), ATTND_ENOENT);
    ATTND_CK_OK(create_as(f.session, 10, &seq));
    ATTND_CK_OK(kv_reply_find(f.kv, (kv_request){f.session, 10}, &reply));
    ck_assert_uint_eq(reply.request, 10);
    ck_assert_uint_eq(reply.op, KV_OP_CREATE);
    ck_assert_uint_eq(reply.id, seq);
    ck_assert_uint_eq(reply.num_values, 0);
    ATTND_CK_ERR(create_as(f.session, 10, &again), ATTND_EEXIST);
    ck_assert_str_eq(f.info.field, "request");
    kv_info info;
    kv_get_info(f.kv, &info);
    ck_assert_uint_eq(info.seqs, 1);
}
END_TEST

START_TEST(kv_reply_window_is_64_below_the_highest) {
    uint64_t seq;
    ATTND_CK_OK(create_as(f.session, 1000, &seq));
    ATTND_CK_ERR(find(f.session, 936), ATTND_ENOENT); // 64 below: new
    ATTND_CK_ERR(find(f.session, 935), ATTND_ESTALE); // 65 below
    ATTND_CK_ERR(create_as(f.session, 935, &seq), ATTND_ESTALE);
    ATTND_CK_OK(create_as(f.session, 936, &seq));
    ATTND_CK_OK(create_as(f.session, 970, &seq)); // in any order
    ATTND_CK_OK(find(f.session, 936));
    ATTND_CK_ERR(find(f.session, 937), ATTND_ENOENT);
    ATTND_CK_OK(create_as(f.session, 1001, &seq)); // takes the place of 936
    ATTND_CK_ERR(find(f.session, 936), ATTND_ESTALE);
    ATTND_CK_OK(find(f.session, 970));
    ATTND_CK_OK(find(f.session, 1000));
    ATTND_CK_OK(create_as(f.session, UINT64_MAX, &seq));
    ATTND_CK_ERR(find(f.session, 1001), ATTND_ESTALE);
    ATTND_CK_ERR(find(f.session, 1), ATTND_ESTALE);
    ATTND_CK_OK(find(f.session, UINT64_MAX));
    ATTND_CK_ERR(find(f.session, UINT64_MAX - 64), ATTND_ENOENT);
    ATTND_CK_ERR(find(f.session, UINT64_MAX - 65), ATTND_ESTALE);
}
END_TEST

START_TEST(kv_reply_of_request_0_is_not_kept) {
    uint64_t a, b;
    ATTND_CK_OK(create_as(f.session, 0, &a));
    ATTND_CK_OK(create_as(f.session, 0, &b));
    ck_assert_uint_ne(a, b);
    ATTND_CK_ERR(find(f.session, 0), ATTND_ENOENT);
}
END_TEST

START_TEST(kv_reply_of_an_earlier_session_in_the_slot_is_not_found) {
    uint64_t session = open_session(f.tenant), seq;
    ATTND_CK_OK(create_as(session, 20, &seq));
    ATTND_CK_OK(kv_session_close(f.kv, session, 0));
    session = open_session(f.tenant);
    ATTND_CK_ERR(find(session, 20), ATTND_ENOENT);
    ATTND_CK_OK(create_as(session, 50, &seq));
    ATTND_CK_ERR(find(session, 20), ATTND_ENOENT); // in the window, still not answered
    ATTND_CK_OK(create_as(session, 20, &seq));
}
END_TEST

START_TEST(kv_reply_of_a_refused_call_is_not_kept) {
    ATTND_CK_ERR(kv_seq_free(f.kv, (kv_request){f.session, 5}, 12345, &f.info), ATTND_ESTALE);
    ATTND_CK_ERR(find(f.session, 5), ATTND_ENOENT);
    uint64_t seq;
    ATTND_CK_OK(create_as(f.session, 5, &seq)); // the id is not used up
}
END_TEST

// expect compares a kept reply.
static void expect(uint64_t request, kv_op op, uint64_t id, uint32_t num, const uint32_t *values) {
    kv_reply reply;
    ATTND_CK_OK(kv_reply_find(f.kv, (kv_request){f.session, request}, &reply));
    ck_assert_uint_eq(reply.op, op);
    ck_assert_uint_eq(reply.id, id);
    ck_assert_uint_eq(reply.num_values, num);
    for (uint32_t i = 0; i < num; i++) {
        ck_assert_uint_eq(reply.values[i], values[i]);
    }
}

START_TEST(kv_reply_of_each_operation_can_be_built_again) {
    uint64_t a, b, c, step;
    uint32_t committed;
    const kv_copy *copies;
    uint32_t num;
    bool may_wait;
    ATTND_CK_OK(create_as(f.session, 1, &a));
    kv_step_seq one = {.seq = a, .new_len = 7};
    ATTND_CK_OK(kv_step_open(f.kv, (kv_request){f.session, 2}, f.model, &one, 1, &step, &copies,
                             &num, &may_wait, &f.info));
    ATTND_CK_OK(
        kv_step_commit(f.kv, (kv_request){f.session, 3}, step, (const uint32_t[]){6}, 1, &f.info));
    expect(2, KV_OP_STEP, step, 2, (const uint32_t[]){0, 0});
    expect(3, KV_OP_COMMIT, step, 1, (const uint32_t[]){6});
    ATTND_CK_OK(kv_seq_fork(f.kv, (kv_request){f.session, 4}, a, &b, &committed, &f.info));
    expect(4, KV_OP_FORK, b, 1, (const uint32_t[]){6});
    kv_step_seq two[2] = {{.seq = b, .new_len = 1}, {.seq = a, .new_len = 2}};
    ATTND_CK_OK(kv_step_open(f.kv, (kv_request){f.session, 5}, f.model, two, 2, &step, &copies,
                             &num, &may_wait, &f.info));
    expect(5, KV_OP_STEP, step, 4, (const uint32_t[]){6, 0, 6, 0});
    ATTND_CK_OK(kv_step_commit(f.kv, (kv_request){f.session, 6}, step, (const uint32_t[]){1, 0}, 2,
                               &f.info));
    expect(6, KV_OP_COMMIT, step, 2, (const uint32_t[]){7, 6});
    ATTND_CK_OK(kv_seq_keep(f.kv, (kv_request){f.session, 7}, a, "a", 0, &f.info));
    expect(7, KV_OP_KEEP, a, 0, NULL);
    ATTND_CK_OK(
        kv_seq_attach(f.kv, (kv_request){f.session, 8}, f.model, "a", &c, &committed, &f.info));
    ck_assert_uint_eq(c, a);
    expect(8, KV_OP_ATTACH, a, 1, (const uint32_t[]){6});
    ATTND_CK_OK(kv_seq_truncate(f.kv, (kv_request){f.session, 9}, b, 1, &f.info));
    expect(9, KV_OP_TRUNCATE, b, 0, NULL);
    ATTND_CK_OK(kv_seq_free(f.kv, (kv_request){f.session, 10}, b, &f.info));
    expect(10, KV_OP_FREE, b, 0, NULL);
    ATTND_CK_OK(kv_step_open(f.kv, (kv_request){f.session, 11}, f.model, &one, 1, &step, &copies,
                             &num, &may_wait, &f.info));
    ATTND_CK_OK(kv_step_abort(f.kv, (kv_request){f.session, 12}, step));
    expect(12, KV_OP_ABORT, step, 0, NULL);
    expect(2, KV_OP_STEP, step - (UINT64_C(2) << 32), 2, (const uint32_t[]){0, 0}); // the first
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_session");
    TCase *session = tcase_create("session");
    tcase_add_checked_fixture(session, setup, teardown);
    tcase_add_test(session, kv_session_handle_is_never_used_twice);
    tcase_add_test(session, kv_session_slot_whose_generation_is_used_up_is_not_reused);
    tcase_add_test(session, kv_session_open_refuses_over_a_limit_and_without_tenant);
    tcase_add_test(session, kv_session_close_frees_unkept_and_detaches_kept_sequences);
    tcase_add_test(session, kv_session_with_an_open_step_does_not_close);
    suite_add_tcase(s, session);
    TCase *reply = tcase_create("reply");
    tcase_add_checked_fixture(reply, setup, teardown);
    tcase_add_test(reply, kv_reply_is_found_once_answered);
    tcase_add_test(reply, kv_reply_window_is_64_below_the_highest);
    tcase_add_test(reply, kv_reply_of_request_0_is_not_kept);
    tcase_add_test(reply, kv_reply_of_an_earlier_session_in_the_slot_is_not_found);
    tcase_add_test(reply, kv_reply_of_a_refused_call_is_not_kept);
    tcase_add_test(reply, kv_reply_of_each_operation_can_be_built_again);
    suite_add_tcase(s, reply);
    return s;
}

CHECK_MAIN(suite)
