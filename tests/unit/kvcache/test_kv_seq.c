// Sequences: handles, forks, truncating, keeping and attaching, and who may do what.
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;
static uint64_t other_session; // of the same tenant
static uint64_t stranger;      // a session of another tenant
static uint32_t strange_tenant, strange_model;

static void setup(void) {
    fix_init(&f);
    const uint8_t secret[KV_SECRET_BYTES] = {0};
    ATTND_CK_OK(kv_tenant_set(f.kv, "strange", 0, &strange_tenant));
    ATTND_CK_OK(kv_session_open(f.kv, f.tenant, secret, &other_session));
    ATTND_CK_OK(kv_session_open(f.kv, strange_tenant, secret, &stranger));
    kv_model_spec spec = fix_spec("m", strange_tenant);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &strange_model, &f.info));
}

static void teardown(void) {
    fix_fini(&f);
}

static kv_request as(uint64_t session) {
    return (kv_request){.session = session, .request = f.next_request++};
}

static uint64_t fork_of(uint64_t seq) {
    uint64_t forked;
    uint32_t committed;
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seq, &forked, &committed, &f.info));
    return forked;
}

static attnd_err attach(uint64_t session, const char *name, uint64_t *seq) {
    uint32_t committed;
    uint32_t model = session == stranger ? strange_model : f.model;
    return kv_seq_attach(f.kv, as(session), model, name, seq, &committed, &f.info);
}

// every_op tries all that changes a sequence, as a session; all must answer the same.
static void every_op(uint64_t session, uint64_t seq, attnd_err want) {
    uint64_t id;
    uint32_t committed, num;
    bool may_wait;
    const kv_copy *copies;
    kv_step_seq s = {.seq = seq, .new_len = 1};
    ATTND_CK_ERR(kv_seq_fork(f.kv, as(session), seq, &id, &committed, &f.info), want);
    ATTND_CK_ERR(kv_seq_truncate(f.kv, as(session), seq, 0, &f.info), want);
    ATTND_CK_ERR(kv_seq_keep(f.kv, as(session), seq, "mine", 0, &f.info), want);
    ATTND_CK_ERR(kv_step_open(f.kv, as(session), session == stranger ? strange_model : f.model, &s,
                              1, &id, &copies, &num, &may_wait, &f.info),
                 want);
    ATTND_CK_ERR(kv_seq_free(f.kv, as(session), seq, &f.info), want);
}

START_TEST(kv_seq_stale_handle_is_refused) {
    uint64_t seq = fix_seq(&f);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    every_op(f.session, seq, ATTND_ESTALE);
    uint64_t again = fix_seq(&f);
    ck_assert_uint_eq((uint32_t)again, (uint32_t)seq); // the slot is used again, the handle is not
    ck_assert_uint_ne(again, seq);
    every_op(f.session, seq, ATTND_ESTALE);
    every_op(f.session, 0, ATTND_ESTALE);
    every_op(f.session, UINT64_MAX, ATTND_ESTALE);
    every_op(f.session, (uint32_t)again, ATTND_ESTALE);
    kv_seq_info info;
    ATTND_CK_ERR(kv_seq_get(f.kv, f.session, seq, &info), ATTND_ESTALE);
    ATTND_CK_OK(kv_seq_get(f.kv, f.session, again, &info));
}
END_TEST

START_TEST(kv_seq_slot_whose_generation_is_used_up_is_not_reused) {
    uint64_t seq = fix_seq(&f);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    f.kv->seqs[(uint32_t)seq].generation = UINT32_MAX - 1;
    uint64_t last = fix_seq(&f);
    ck_assert_uint_eq(last >> 32, UINT32_MAX);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), last, &f.info));
    ck_assert_uint_ne((uint32_t)fix_seq(&f), (uint32_t)last);
}
END_TEST

START_TEST(kv_seq_of_another_tenant_does_not_exist) {
    uint64_t seq = fix_seq(&f);
    fix_append(&f, seq, 5);
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "name", 0, &f.info));
    every_op(stranger, seq, ATTND_ESTALE);
    kv_seq_info info;
    uint64_t got;
    ATTND_CK_ERR(kv_seq_get(f.kv, stranger, seq, &info), ATTND_ESTALE);
    ATTND_CK_ERR(attach(stranger, "name", &got), ATTND_ENOENT);
    uint32_t cursor = 0;
    ck_assert(!kv_seq_next(f.kv, strange_tenant, &cursor, &info));
    // nor can a session use another tenant's model
    ATTND_CK_ERR(kv_seq_create(f.kv, as(stranger), f.model, &got, &f.info), ATTND_ENOENT);
    uint32_t committed;
    ATTND_CK_ERR(kv_seq_attach(f.kv, as(stranger), f.model, "name", &got, &committed, &f.info),
                 ATTND_ENOENT);
    ck_assert_uint_eq(fix_committed(&f, seq), 5);
}
END_TEST

START_TEST(kv_seq_held_by_another_session_is_busy) {
    uint64_t seq = fix_seq(&f), got;
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "name", 0, &f.info));
    every_op(other_session, seq, ATTND_EBUSY);
    ATTND_CK_ERR(attach(other_session, "name", &got), ATTND_EBUSY);
    kv_seq_info info;
    ATTND_CK_OK(kv_seq_get(f.kv, other_session, seq, &info)); // looking is free
    ck_assert_uint_eq(info.session, f.session);
}
END_TEST

START_TEST(kv_seq_held_by_none_must_be_attached_first) {
    uint64_t seq = fix_seq(&f), got;
    fix_append(&f, seq, 5);
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "name", 0, &f.info));
    ATTND_CK_OK(kv_session_close(f.kv, f.session, 0));
    every_op(other_session, seq, ATTND_EPERM);
    ATTND_CK_OK(attach(other_session, "name", &got));
    ck_assert_uint_eq(got, seq);
    f.session = other_session;
    ck_assert_uint_eq(fix_committed(&f, seq), 5);
    fix_append(&f, seq, 1);
    ATTND_CK_OK(attach(other_session, "name", &got));      // by its holder: nothing changes
    ATTND_CK_OK(kv_session_close(f.kv, other_session, 0)); // kept still
    kv_seq_info info;
    ATTND_CK_OK(kv_seq_get(f.kv, 0, seq, &info));
    ck_assert_uint_eq(info.committed, 6);
    ATTND_CK_OK(kv_seq_free(f.kv, (kv_request){0}, seq, &f.info)); // attnd itself may
    ck_assert_uint_eq(fix_in_use(&f), 0);
}
END_TEST

START_TEST(kv_seq_create_is_refused_over_the_limit) {
    uint64_t seq;
    uint32_t committed;
    for (int i = 0; i < 64; i++) {
        seq = fix_seq(&f);
    }
    ATTND_CK_ERR(kv_seq_create(f.kv, fix_rq(&f), f.model, &seq, &f.info), ATTND_EBUSY);
    ATTND_CK_ERR(kv_seq_fork(f.kv, fix_rq(&f), seq, &seq, &committed, &f.info), ATTND_EBUSY);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    fix_seq(&f);
}
END_TEST

// ---- sharing

START_TEST(kv_seq_forks_share_blocks_until_the_last_is_freed) {
    uint64_t a = fix_seq(&f);
    fix_append(&f, a, 10); // 3 blocks
    uint64_t b = fork_of(a), c = fork_of(b);
    ck_assert_uint_eq(fix_in_use(&f), 3);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), a, &f.info));
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), c, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 3);
    ck_assert_uint_eq(fix_committed(&f, b), 10);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), b, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 0);
}
END_TEST

START_TEST(kv_seq_fork_of_an_empty_sequence_is_empty) {
    uint64_t b = fork_of(fix_seq(&f));
    ck_assert_uint_eq(fix_committed(&f, b), 0);
    fix_append(&f, b, 4);
    ck_assert_uint_eq(fix_in_use(&f), 1);
}
END_TEST

START_TEST(kv_seq_truncate_gives_whole_blocks_back) {
    const struct {
        uint32_t len, blocks;
    } cases[] = {{20, 5}, {17, 5}, {16, 4}, {15, 4}, {13, 4}, {12, 3}, {1, 1}, {0, 0}, {0, 0}};
    uint64_t seq = fix_seq(&f);
    fix_append(&f, seq, 20);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, cases[i].len, &f.info));
        ck_assert_uint_eq(fix_in_use(&f), cases[i].blocks);
        ck_assert_uint_eq(fix_committed(&f, seq), cases[i].len);
    }
    ATTND_CK_ERR(kv_seq_truncate(f.kv, fix_rq(&f), seq, 1, &f.info), ATTND_EINVAL);
    ck_assert_str_eq(f.info.field, "len");
    ATTND_CK_ERR(kv_seq_truncate(f.kv, fix_rq(&f), seq, UINT32_MAX, &f.info), ATTND_EINVAL);
}
END_TEST

START_TEST(kv_seq_truncate_of_a_fork_leaves_the_parent) {
    uint64_t a = fix_seq(&f);
    fix_append(&f, a, 12);
    uint64_t b = fork_of(a);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), b, 3, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 3);
    ck_assert_uint_eq(fix_committed(&f, a), 12);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), a, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 1); // b's first block
}
END_TEST

START_TEST(kv_seq_info_counts_blocks_of_an_open_step) {
    uint64_t a = fix_seq(&f), step;
    bool may_wait;
    kv_seq_info info;
    fix_append(&f, a, 6);
    fork_of(a);
    ATTND_CK_OK(kv_seq_get(f.kv, f.session, a, &info));
    ck_assert_uint_eq(info.blocks, 2);
    ck_assert(!info.in_step);
    ATTND_CK_OK(fix_step(&f, a, 3, 0, &step, &may_wait)); // 9 tokens, and the old last block
    ATTND_CK_OK(kv_seq_get(f.kv, f.session, a, &info));
    ck_assert_uint_eq(info.blocks, 4);
    ck_assert_uint_eq(info.committed, 6);
    ck_assert(info.in_step);
    fix_commit(&f, step, 3);
}
END_TEST

// ---- names

START_TEST(kv_seq_name_is_unique_in_the_tenant) {
    uint64_t a = fix_seq(&f), b = fix_seq(&f), c, got;
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), a, "name", 0, &f.info));
    ATTND_CK_ERR(kv_seq_keep(f.kv, fix_rq(&f), b, "name", 0, &f.info), ATTND_EEXIST);
    ATTND_CK_OK(kv_seq_create(f.kv, as(stranger), strange_model, &c, &f.info));
    ATTND_CK_OK(kv_seq_keep(f.kv, as(stranger), c, "name", 0, &f.info));
    ATTND_CK_OK(attach(stranger, "name", &got));
    ck_assert_uint_eq(got, c);
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), a, "name", 77, &f.info)); // its own: a new TTL
    kv_seq_info info;
    ATTND_CK_OK(kv_seq_get(f.kv, f.session, a, &info));
    ck_assert_uint_eq(info.ttl_ms, 77);
    ck_assert_str_eq(info.name, "name");
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), a, "new", 0, &f.info)); // frees the old name
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), b, "name", 0, &f.info));
    ATTND_CK_OK(attach(f.session, "new", &got));
    ck_assert_uint_eq(got, a);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), b, &f.info));
    ATTND_CK_ERR(attach(f.session, "name", &got), ATTND_ENOENT);
}
END_TEST

START_TEST(kv_seq_empty_name_makes_it_unkept) {
    uint64_t seq = fix_seq(&f), got;
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "name", 9, &f.info));
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "", 9, &f.info));
    ATTND_CK_ERR(attach(f.session, "name", &got), ATTND_ENOENT);
    ATTND_CK_ERR(attach(f.session, "", &got), ATTND_ENOENT);
    kv_seq_info info;
    ATTND_CK_OK(kv_seq_get(f.kv, f.session, seq, &info));
    ck_assert_uint_eq(info.ttl_ms, 0);
    ATTND_CK_OK(kv_session_close(f.kv, f.session, 0));
    ATTND_CK_ERR(kv_seq_get(f.kv, 0, seq, &info), ATTND_ESTALE);
}
END_TEST

START_TEST(kv_seq_name_has_at_most_63_bytes) {
    char name[KV_NAME_BYTES + 8];
    uint64_t seq = fix_seq(&f), got;
    memset(name, 'x', sizeof(name));
    name[KV_NAME_BYTES] = '\0';
    ATTND_CK_ERR(kv_seq_keep(f.kv, fix_rq(&f), seq, name, 0, &f.info), ATTND_EINVAL);
    ck_assert_str_eq(f.info.field, "name");
    ATTND_CK_ERR(attach(f.session, name, &got), ATTND_ENOENT);
    name[KV_NAME_BYTES - 1] = '\0';
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, name, 0, &f.info));
    ATTND_CK_OK(attach(f.session, name, &got));
}
END_TEST

START_TEST(kv_seq_attach_needs_the_model_of_the_sequence) {
    kv_model_spec spec = fix_spec("second", f.tenant);
    uint32_t second, committed;
    uint64_t seq = fix_seq(&f), got;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &second, &f.info));
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "name", 0, &f.info));
    ATTND_CK_ERR(kv_seq_attach(f.kv, fix_rq(&f), second, "name", &got, &committed, &f.info),
                 ATTND_ENOENT);
    ATTND_CK_ERR(kv_seq_attach(f.kv, fix_rq(&f), 77, "name", &got, &committed, &f.info),
                 ATTND_ENOENT);
    ck_assert_str_eq(f.info.field, "model");
}
END_TEST

START_TEST(kv_seq_many_names_are_all_found) {
    uint64_t seqs[60], got;
    char name[16];
    for (int i = 0; i < 60; i++) {
        snprintf(name, sizeof(name), "n%d", i);
        seqs[i] = fix_seq(&f);
        ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seqs[i], name, 0, &f.info));
    }
    for (int i = 0; i < 60; i += 3) {
        ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seqs[i], &f.info));
    }
    for (int i = 0; i < 60; i++) {
        snprintf(name, sizeof(name), "n%d", i);
        attnd_err err = attach(f.session, name, &got);
        ATTND_CK_ERR(err, i % 3 == 0 ? ATTND_ENOENT : ATTND_OK);
        ck_assert(err || got == seqs[i]);
    }
}
END_TEST

// ---- time to live

static void keep_and_leave(uint64_t *seq, const char *name, uint64_t ttl_ms, uint64_t now_ms) {
    uint64_t session;
    ATTND_CK_OK(kv_session_open(f.kv, f.tenant, (const uint8_t[KV_SECRET_BYTES]){0}, &session));
    ATTND_CK_OK(kv_seq_create(f.kv, as(session), f.model, seq, &f.info));
    ATTND_CK_OK(kv_seq_keep(f.kv, as(session), *seq, name, ttl_ms, &f.info));
    ATTND_CK_OK(kv_session_close(f.kv, session, now_ms));
}

static bool lives(uint64_t seq) {
    kv_seq_info info;
    return kv_seq_get(f.kv, 0, seq, &info) == ATTND_OK;
}

START_TEST(kv_expire_frees_what_its_session_left_too_long_ago) {
    uint64_t a, b, c, held = fix_seq(&f);
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), held, "held", 1, &f.info));
    ck_assert_uint_eq(kv_expire(f.kv, 1000000), UINT64_MAX); // held: its time does not run
    keep_and_leave(&a, "a", 500, 1000);
    keep_and_leave(&b, "b", 100, 1200);
    keep_and_leave(&c, "c", 0, 0); // for ever
    ck_assert_uint_eq(kv_expire(f.kv, 1299), 1300);
    ck_assert(lives(b));
    ck_assert_uint_eq(kv_expire(f.kv, 1300), 1500);
    ck_assert(!lives(b) && lives(a));
    ck_assert_uint_eq(kv_expire(f.kv, 1500), UINT64_MAX);
    ck_assert(!lives(a) && lives(c) && lives(held));
    ck_assert_uint_eq(kv_expire(f.kv, UINT64_MAX), UINT64_MAX);
    ck_assert(lives(c) && lives(held));
}
END_TEST

START_TEST(kv_expire_does_not_wait_for_an_attached_sequence) {
    uint64_t a, b, got;
    keep_and_leave(&a, "a", 100, 1000);
    keep_and_leave(&b, "b", 900, 1000);
    ATTND_CK_OK(attach(f.session, "a", &got));
    ck_assert_uint_eq(kv_expire(f.kv, 1050), 1900);
    ck_assert_uint_eq(kv_expire(f.kv, 1500), 1900);
    ck_assert(lives(a));
    ATTND_CK_OK(kv_session_close(f.kv, f.session, 1600)); // its time begins anew
    ck_assert_uint_eq(kv_expire(f.kv, 1650), 1700);
    ATTND_CK_OK(kv_seq_free(f.kv, (kv_request){0}, a, &f.info));
    ck_assert_uint_eq(kv_expire(f.kv, 1650), 1900);
}
END_TEST

START_TEST(kv_expire_time_that_overflows_is_never) {
    uint64_t a;
    keep_and_leave(&a, "a", UINT64_MAX, 5);
    ck_assert_uint_eq(kv_expire(f.kv, UINT64_MAX - 1), UINT64_MAX);
    ck_assert(lives(a));
}
END_TEST

START_TEST(kv_seq_next_walks_the_tenants_sequences) {
    uint64_t a = fix_seq(&f), b = fix_seq(&f), c;
    ATTND_CK_OK(kv_seq_create(f.kv, as(stranger), strange_model, &c, &f.info));
    uint64_t d = fix_seq(&f);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), b, &f.info));
    uint32_t cursor = 0, n = 0;
    kv_seq_info info;
    uint64_t want[] = {a, d};
    while (kv_seq_next(f.kv, f.tenant, &cursor, &info)) {
        ck_assert_uint_lt(n, 2);
        ck_assert_uint_eq(info.seq, want[n++]);
    }
    ck_assert_uint_eq(n, 2);
    ck_assert(!kv_seq_next(f.kv, f.tenant, &cursor, &info));
    cursor = UINT32_MAX;
    ck_assert(!kv_seq_next(f.kv, f.tenant, &cursor, &info));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_seq");
    TCase *t = tcase_create("rights");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_seq_stale_handle_is_refused);
    tcase_add_test(t, kv_seq_slot_whose_generation_is_used_up_is_not_reused);
    tcase_add_test(t, kv_seq_of_another_tenant_does_not_exist);
    tcase_add_test(t, kv_seq_held_by_another_session_is_busy);
    tcase_add_test(t, kv_seq_held_by_none_must_be_attached_first);
    tcase_add_test(t, kv_seq_create_is_refused_over_the_limit);
    suite_add_tcase(s, t);
    t = tcase_create("sharing");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_seq_forks_share_blocks_until_the_last_is_freed);
    tcase_add_test(t, kv_seq_fork_of_an_empty_sequence_is_empty);
    tcase_add_test(t, kv_seq_truncate_gives_whole_blocks_back);
    tcase_add_test(t, kv_seq_truncate_of_a_fork_leaves_the_parent);
    tcase_add_test(t, kv_seq_info_counts_blocks_of_an_open_step);
    suite_add_tcase(s, t);
    t = tcase_create("names");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_seq_name_is_unique_in_the_tenant);
    tcase_add_test(t, kv_seq_empty_name_makes_it_unkept);
    tcase_add_test(t, kv_seq_name_has_at_most_63_bytes);
    tcase_add_test(t, kv_seq_attach_needs_the_model_of_the_sequence);
    tcase_add_test(t, kv_seq_many_names_are_all_found);
    suite_add_tcase(s, t);
    t = tcase_create("time");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_expire_frees_what_its_session_left_too_long_ago);
    tcase_add_test(t, kv_expire_does_not_wait_for_an_attached_sequence);
    tcase_add_test(t, kv_expire_time_that_overflows_is_never);
    tcase_add_test(t, kv_seq_next_walks_the_tenants_sequences);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
