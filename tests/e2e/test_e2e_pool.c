// A full pool and full quotas: who is refused at once, who waits and gets its blocks, who waits in
// vain, and that nothing changes for a step that was refused.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/e2e/play.h"

// 4 slabs of 1 MiB; a token of the model takes a block of 16 KiB, so the pool has 256.
static const char *const flags[] = {
    "--set", "cache.memory=4MiB",     "--set", "cache.slab=1MiB",
    "--set", "limits.connections=16", "--set", "tenant small.quota_blocks=10",
    NULL};
enum { POOL_BLOCKS = 256, BLOCK_TOKENS = 1 };

static e2e_daemon d;
static e2e_client c;
static play_model m;

static play_model fat_model(void) {
    play_model fat = play_tiny();
    fat.kv_heads = 4;
    fat.head_dim = fat.v_head_dim = 256;
    fat.block_tokens = BLOCK_TOKENS;
    return fat;
}

static void setup(void) {
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    m = fat_model();
    play_open(&c, &m);
}

static void teardown(void) {
    e2e_close(&c);
    e2e_stop(&d);
}

static attnd_err open_blocks(e2e_client *who, play_seq *s, uint32_t blocks, uint32_t deadline_ms,
                             play_step *step) {
    play_part part = {.seq = s, .new_len = blocks * BLOCK_TOKENS};
    return play_step_open(who, s->model, &part, 1, deadline_ms, step, NULL);
}

static void cancel_step(e2e_client *who, const play_step *step) {
    proto_cancel body = {.step = step->handle};
    ATTND_CK_OK(e2e_call(who, PROTO_CANCEL, &body, sizeof(body), NULL));
}

static void send_blocks(e2e_client *who, e2e_flight *f, play_seq *s, uint32_t blocks,
                        uint32_t deadline_ms) {
    e2e_buf b;
    play_part part = {.seq = s, .new_len = blocks * BLOCK_TOKENS};
    play_step_body(&b, ++who->id, s->model, &part, 1, deadline_ms);
    e2e_send(who, f, b.data, b.bytes);
    e2e_buf_fini(&b);
}

START_TEST(without_a_deadline_a_full_pool_is_said_at_once) {
    play_seq a, b;
    play_step step, refused;
    play_create(&c, &m, &a);
    play_create(&c, &m, &b);
    ATTND_CK_OK(open_blocks(&c, &a, 200, 0, &step));
    uint64_t start = e2e_now_ms();
    ATTND_CK_ERR(open_blocks(&c, &b, 57, 0, &refused), ATTND_ENOSPC);
    ck_assert_uint_le(e2e_now_ms() - start, 500);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 200);
    ATTND_CK_OK(open_blocks(&c, &b, 56, 0, &refused));
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), POOL_BLOCKS);
    play_forget(&a);
    play_forget(&b);
}
END_TEST

START_TEST(with_a_deadline_a_step_waits_and_gets_its_blocks) {
    play_seq a, b;
    play_step step;
    e2e_flight f;
    e2e_reply r;
    play_create(&c, &m, &a);
    play_create(&c, &m, &b);
    ATTND_CK_OK(open_blocks(&c, &a, 200, 0, &step));
    send_blocks(&c, &f, &b, 100, 20000);
    ck_assert(!e2e_arrived(&f, 100));
    ck_assert_double_eq(e2e_stat(&c, "scheduler.waiting_for_blocks"), 1);
    cancel_step(&c, &step);
    ck_assert(e2e_arrived(&f, 1000));
    ATTND_CK_OK(e2e_recv(&f, &r));
    e2e_reply_fini(&r);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 100);
    play_forget(&a);
    play_forget(&b);
}
END_TEST

// fill commits tokens that nobody checks.
static void fill(play_seq *s, uint32_t blocks) {
    play_step step;
    ATTND_CK_OK(open_blocks(&c, s, blocks, 0, &step));
    play_tensors t = play_random(&step);
    for (uint32_t l = 0; l < m.layers; l++) {
        e2e_buf b;
        play_attend_body(&b, ++c.id, &step, l, 0, &t);
        ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, NULL));
        e2e_buf_fini(&b);
    }
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_tensors_fini(&t);
}

START_TEST(freed_and_truncated_sequences_end_the_waiting_of_others) {
    play_seq a, b;
    e2e_flight f;
    e2e_reply r;
    play_create(&c, &m, &a);
    play_create(&c, &m, &b);
    fill(&a, 250);
    send_blocks(&c, &f, &b, 20, 20000);
    ck_assert(!e2e_arrived(&f, 50));
    proto_seq body = {.seq = a.handle, .len = 236 * BLOCK_TOKENS};
    ATTND_CK_OK(e2e_call(&c, PROTO_SEQ_TRUNCATE, &body, sizeof(body), NULL));
    ATTND_CK_OK(e2e_recv(&f, &r));
    e2e_reply_fini(&r);
    a.len = 236 * BLOCK_TOKENS;
    e2e_client other;
    play_seq far;
    e2e_connect(&other, d.url);
    play_hello(&other, "other");
    play_create(&other, &m, &far); // the model is the tenant's
    send_blocks(&other, &f, &far, 100, 20000);
    ck_assert(!e2e_arrived(&f, 50));
    body.len = 0;
    ATTND_CK_OK(e2e_call(&c, PROTO_SEQ_FREE, &body, sizeof(body), NULL));
    ATTND_CK_OK(e2e_recv(&f, &r));
    e2e_reply_fini(&r);
    e2e_close(&other);
    play_forget(&a);
    play_forget(&b);
    play_forget(&far);
}
END_TEST

START_TEST(a_waiting_step_is_told_at_its_deadline) {
    play_seq a, b;
    play_step step, late;
    play_create(&c, &m, &a);
    play_create(&c, &m, &b);
    ATTND_CK_OK(open_blocks(&c, &a, 200, 0, &step));
    uint64_t start = e2e_now_ms();
    ATTND_CK_ERR(open_blocks(&c, &b, 100, 200, &late), ATTND_ENOSPC);
    ck_assert_uint_ge(e2e_now_ms() - start, 199);
    ck_assert_uint_le(e2e_now_ms() - start, 2000);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 200);
    ATTND_CK_OK(open_blocks(&c, &b, 56, 200, &late));
    play_forget(&a);
    play_forget(&b);
}
END_TEST

START_TEST(a_step_larger_than_the_pool_is_refused_at_once) {
    play_seq a;
    play_step step;
    play_create(&c, &m, &a);
    uint64_t start = e2e_now_ms();
    ATTND_CK_ERR(open_blocks(&c, &a, POOL_BLOCKS + 1, 20000, &step), ATTND_ENOSPC);
    ck_assert_uint_le(e2e_now_ms() - start, 1000);
    play_part part = {.seq = &a, .new_len = 1, .reserve = UINT32_MAX};
    ATTND_CK_ERR(play_step_open(&c, &m, &part, 1, 20000, &step, NULL), ATTND_ENOSPC);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    ATTND_CK_OK(open_blocks(&c, &a, POOL_BLOCKS, 0, &step));
    play_forget(&a);
}
END_TEST

START_TEST(the_oldest_waiting_step_is_placed_first) {
    play_seq s[4];
    play_step step;
    e2e_flight f[3];
    e2e_reply r;
    proto_cancel third = {.request = 0};
    for (int i = 0; i < 4; i++) {
        play_create(&c, &m, &s[i]);
    }
    ATTND_CK_OK(open_blocks(&c, &s[0], 250, 0, &step));
    for (int i = 0; i < 3; i++) {
        send_blocks(&c, &f[i], &s[i + 1], 120, 20000);
        third.request = c.id;
        e2e_await_stat(&c, "scheduler.waiting_for_blocks", i + 1, 1000);
    }
    cancel_step(&c, &step);
    ATTND_CK_OK(e2e_recv(&f[0], &r));
    e2e_reply_fini(&r);
    ATTND_CK_OK(e2e_recv(&f[1], &r));
    e2e_reply_fini(&r);
    ck_assert(!e2e_arrived(&f[2], 50));
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &third, sizeof(third), NULL));
    ATTND_CK_ERR(e2e_recv(&f[2], &r), ATTND_ECANCELED);
    e2e_reply_fini(&r);
    for (int i = 0; i < 4; i++) {
        play_forget(&s[i]);
    }
}
END_TEST

START_TEST(a_waiting_step_can_be_canceled_by_its_request) {
    play_seq a, b;
    play_step step;
    e2e_flight f;
    e2e_reply r;
    play_create(&c, &m, &a);
    play_create(&c, &m, &b);
    ATTND_CK_OK(open_blocks(&c, &a, 250, 0, &step));
    send_blocks(&c, &f, &b, 100, 20000);
    uint64_t id = c.id;
    ck_assert(!e2e_arrived(&f, 50));
    // A repeat of a request that waits: its reply comes on the first.
    e2e_buf again;
    play_part part = {.seq = &b, .new_len = 100 * BLOCK_TOKENS};
    play_step_body(&again, id, &m, &part, 1, 20000);
    ATTND_CK_ERR(e2e_call_raw(&c, again.data, again.bytes, NULL), ATTND_EBUSY);
    proto_cancel cancel = {.request = id};
    ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
    ATTND_CK_ERR(e2e_recv(&f, &r), ATTND_ECANCELED);
    e2e_reply_fini(&r);
    ATTND_CK_ERR(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL), ATTND_ENOENT);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 250);
    e2e_buf_fini(&again);
    play_forget(&a);
    play_forget(&b);
}
END_TEST

START_TEST(a_quota_bounds_its_tenant_and_nobody_else) {
    e2e_client small;
    play_seq a, b, mine;
    play_step step, other, refused;
    play_model sm = fat_model();
    e2e_connect(&small, d.url);
    free(e2e_json(&small, PROTO_HELLO, "{\"tenant\": \"small\"}"));
    play_open(&small, &sm); // the same name is another model for another tenant
    play_create(&small, &sm, &a);
    play_create(&small, &sm, &b);
    uint64_t start = e2e_now_ms();
    ATTND_CK_ERR(open_blocks(&small, &a, 11, 20000, &refused), ATTND_ENOSPC);
    ck_assert_uint_le(e2e_now_ms() - start, 1000);
    ATTND_CK_OK(open_blocks(&small, &a, 8, 0, &step));
    ATTND_CK_ERR(open_blocks(&small, &b, 3, 0, &refused), ATTND_ENOSPC);
    e2e_flight f;
    e2e_reply r;
    send_blocks(&small, &f, &b, 3, 20000);
    ck_assert(!e2e_arrived(&f, 50));
    play_create(&c, &m, &mine); // one that waits for its quota holds nobody else up
    ATTND_CK_OK(open_blocks(&c, &mine, 100, 0, &other));
    ck_assert(!e2e_arrived(&f, 50));
    cancel_step(&small, &step);
    ATTND_CK_OK(e2e_recv(&f, &r));
    e2e_reply_fini(&r);
    e2e_close(&small);
    play_forget(&a);
    play_forget(&b);
    play_forget(&mine);
}
END_TEST

START_TEST(a_client_sees_its_own_tenant_only) {
    e2e_client small;
    play_seq mine;
    e2e_connect(&small, d.url);
    free(e2e_json(&small, PROTO_HELLO, "{\"tenant\": \"small\"}"));
    play_create(&c, &m, &mine);
    proto_model model = {.model = m.id};
    ATTND_CK_ERR(e2e_call(&small, PROTO_SEQ_CREATE, &model, sizeof(model), NULL), ATTND_ENOENT);
    ATTND_CK_ERR(e2e_call(&small, PROTO_MODEL_CLOSE, &model, sizeof(model), NULL), ATTND_ENOENT);
    proto_seq seq = {.seq = mine.handle};
    e2e_reply r;
    ATTND_CK_ERR(e2e_call(&small, PROTO_SEQ_FREE, &seq, sizeof(seq), &r), ATTND_ESTALE);
    e2e_reply_fini(&r);
    ATTND_CK_ERR(e2e_call(&small, PROTO_SEQ_FORK, &seq, sizeof(seq), NULL), ATTND_ESTALE);
    char *text = e2e_json(&small, PROTO_SEQ_LIST, "");
    ck_assert_str_eq(text, "{\"sequences\":[]}");
    free(text);
    text = e2e_json(&small, PROTO_MODEL_LIST, "");
    ck_assert_str_eq(text, "{\"models\":[]}");
    free(text);
    text = e2e_json(&small, PROTO_STATS, "");
    ck_assert_ptr_null(strstr(text, "default"));
    free(text);
    e2e_close(&small);
    play_forget(&mine);
}
END_TEST

START_TEST(one_client_has_a_bounded_part_of_steps_and_sequences) {
    e2e_daemon own = {.dir = ""};
    e2e_client one, two;
    play_seq q[5], other;
    play_step step;
    e2e_start(&own,
              (const char *const[]){"--set", "cache.memory=4MiB", "--set", "cache.slab=1MiB",
                                    "--set", "limits.steps=4", "--set", "limits.session_steps=3",
                                    "--set", "limits.session_sequences=4", NULL});
    e2e_connect(&one, own.url);
    e2e_connect(&two, own.url);
    play_hello(&one, "one");
    play_hello(&two, "two");
    play_model tiny = play_tiny();
    play_open(&one, &tiny);
    for (int i = 0; i < 4; i++) {
        play_create(&one, &tiny, &q[i]);
    }
    proto_model model = {.model = tiny.id};
    proto_seq body = {.seq = q[0].handle};
    ATTND_CK_ERR(e2e_call(&one, PROTO_SEQ_CREATE, &model, sizeof(model), NULL), ATTND_EBUSY);
    ATTND_CK_ERR(e2e_call(&one, PROTO_SEQ_FORK, &body, sizeof(body), NULL), ATTND_EBUSY);
    proto_seq_keep keep = {.seq = q[0].handle, .ttl_ms = 1000, .name = "k"};
    ATTND_CK_OK(e2e_call(&one, PROTO_SEQ_KEEP, &keep, sizeof(keep), NULL));
    proto_seq_attach attach = {.model = tiny.id, .name = "k"}; // held already: no further one
    ATTND_CK_OK(e2e_call(&one, PROTO_SEQ_ATTACH, &attach, sizeof(attach), NULL));
    for (int i = 0; i < 3; i++) {
        ATTND_CK_OK(open_blocks(&one, &q[i], 1, 0, &step));
    }
    play_part last = {.seq = &q[3], .new_len = 1};
    play_step refused;
    ATTND_CK_ERR(play_step_open(&one, &tiny, &last, 1, 0, &refused, NULL), ATTND_EBUSY);
    play_create(&two, &tiny, &other);
    ATTND_CK_OK(open_blocks(&two, &other, 1, 0, &refused)); // the fourth is left for others
    cancel_step(&one, &step);
    ATTND_CK_OK(play_step_open(&one, &tiny, &last, 1, 0, &step, NULL));
    play_free(&one, &q[2]);
    ATTND_CK_OK(e2e_call(&one, PROTO_SEQ_CREATE, &model, sizeof(model), NULL));
    ATTND_CK_ERR(e2e_call(&one, PROTO_SEQ_CREATE, &model, sizeof(model), NULL), ATTND_EBUSY);
    e2e_close(&one);
    e2e_close(&two);
    e2e_stop(&own);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_pool");
    TCase *tc = tcase_create("pool");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, without_a_deadline_a_full_pool_is_said_at_once);
    tcase_add_test(tc, with_a_deadline_a_step_waits_and_gets_its_blocks);
    tcase_add_test(tc, freed_and_truncated_sequences_end_the_waiting_of_others);
    tcase_add_test(tc, a_waiting_step_is_told_at_its_deadline);
    tcase_add_test(tc, a_step_larger_than_the_pool_is_refused_at_once);
    tcase_add_test(tc, the_oldest_waiting_step_is_placed_first);
    tcase_add_test(tc, a_waiting_step_can_be_canceled_by_its_request);
    tcase_add_test(tc, a_quota_bounds_its_tenant_and_nobody_else);
    tcase_add_test(tc, a_client_sees_its_own_tenant_only);
    tcase_add_test(tc, one_client_has_a_bounded_part_of_steps_and_sequences);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
