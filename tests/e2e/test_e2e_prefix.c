// The prefix cache over the wire: what the step finds, that attention over it is the reference's,
// and which token ids count.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/e2e/play.h"

static const char *const flags[] = {
    "--set", "cache.memory=2MiB",     "--set", "cache.slab=1MiB",
    "--set", "limits.connections=16", "--set", "tenant small.quota_blocks=8",
    NULL};

static e2e_daemon d;
static e2e_client c;
static play_model m;
static uint32_t ids[PLAY_MAX_TOKENS];

static void begin(bool keeper) {
    e2e_dir(&d);
    d.keeper = keeper;
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    m = play_tiny();
    play_open(&c, &m);
    for (uint32_t i = 0; i < PLAY_MAX_TOKENS; i++) {
        ids[i] = 5 * i + 1;
    }
}

static void setup(void) {
    begin(false);
}

static void teardown(void) {
    e2e_close(&c);
    e2e_stop(&d);
}

static uint32_t run(play_seq *s, const play_seq *prefix, const uint32_t *tokens, uint32_t num) {
    return play_prompt(&c, s, prefix, tokens, num);
}

START_TEST(attention_over_a_cached_prefix_is_the_references) {
    play_seq first, second, third;
    play_create(&c, &m, &first);
    ck_assert_uint_eq(run(&first, NULL, ids, 100), 0);
    play_create(&c, &m, &second); // while the first one lives
    ck_assert_uint_eq(run(&second, &first, ids, 100), 96);
    for (uint32_t i = 0; i < 20; i++) {
        ck_assert_uint_eq(run(&second, NULL, ids + 100 + i, 1), 0);
    }
    play_free_there(&c, &first);
    play_free_there(&c, &second);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    ck_assert_double_eq(e2e_stat(&c, "blocks.cached"), 7);
    play_create(&c, &m, &third);
    ids[90] = 0; // within the sixth block: ten of its rows are as they were
    ck_assert_uint_eq(run(&third, &second, ids, 120), 90);
    ck_assert_uint_eq(run(&third, NULL, ids + 120, 17), 0);
    ck_assert_double_eq(e2e_stat(&c, "prefix_cache.found_tokens"), 96 + 90);
    play_free(&c, &third);
    play_forget(&first);
    play_forget(&second);
}
END_TEST

START_TEST(a_batch_finds_for_each_of_its_sequences) {
    play_seq first, a, b;
    uint32_t other[64];
    play_create(&c, &m, &first);
    run(&first, NULL, ids, 64);
    play_create(&c, &m, &a);
    play_create(&c, &m, &b);
    memcpy(other, ids, sizeof(other));
    other[20] = 0;
    const play_part parts[] = {{.seq = &a, .new_len = 64, .tokens = other, .prefix = &first},
                               {.seq = &b, .new_len = 50, .tokens = ids, .prefix = &first}};
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, parts, 2, 0, &step, NULL));
    ck_assert_uint_eq(step.parts[0].cached, 20);
    ck_assert_uint_eq(step.parts[1].cached, 49);
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    ck_assert_uint_eq(run(&a, NULL, ids, 3), 0);
    ck_assert_uint_eq(run(&b, NULL, ids, 3), 0);
    play_free(&c, &first);
    play_free(&c, &a);
    play_free(&c, &b);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}
END_TEST

// The pool has 128 blocks of 16 KiB, 16 tokens each.
START_TEST(cached_blocks_make_way_for_steps) {
    for (uint32_t i = 0; i < 6; i++) {
        play_seq s;
        play_create(&c, &m, &s);
        uint32_t first = ids[0];
        ids[0] = 1000 + i;
        play_part part = {.seq = &s, .new_len = 800, .tokens = ids};
        play_step step;
        ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
        play_attend(&c, &step, 0);
        play_attend(&c, &step, 1);
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
        ids[0] = first;
        play_free(&c, &s);
    }
    ck_assert_double_eq(e2e_stat(&c, "blocks.cached"), 128);
    ck_assert_double_eq(e2e_stat(&c, "prefix_cache.evictions"), 6 * 50 - 128);
    ck_assert_double_eq(e2e_stat(&c, "accounting_mismatches"), 0);
}
END_TEST

START_TEST(an_accepted_path_of_a_tree_is_a_prefix_too) {
    static const uint64_t tree[4] = {0x1, 0x3, 0x5, 0xd}; // 0 -> 1, 0 -> 2 -> 3
    const int32_t positions[] = {30, 31, 31, 32};
    const uint32_t tokens[] = {ids[30], 7, ids[31], ids[32]}, path[] = {0, 2, 3};
    play_seq s, other;
    play_create(&c, &m, &s);
    run(&s, NULL, ids, 30);
    play_part part = {
        .seq = &s, .new_len = 4, .positions = positions, .tree = tree, .tokens = tokens};
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    proto_commit head = {.step = step.handle, .num_seqs = 1};
    proto_commit_seq seq = {.accepted = 3};
    e2e_buf b;
    e2e_buf_init(&b, PROTO_COMMIT, ++c.id, &head, sizeof(head));
    e2e_buf_add(&b, &seq, sizeof(seq));
    seq.path_off = e2e_buf_add(&b, path, sizeof(path));
    e2e_buf_set(&b, sizeof(head), &seq, sizeof(seq));
    e2e_buf_seal(&b);
    ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, NULL));
    e2e_buf_fini(&b);
    play_create(&c, &m, &other);
    part = (play_part){.seq = &other, .new_len = 40, .tokens = ids, .prefix = &s};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    ck_assert_uint_eq(step.parts[0].cached, 32);
    play_forget(&s);
    play_forget(&other);
}
END_TEST

START_TEST(rows_at_other_positions_are_no_prefix) {
    int32_t positions[40];
    play_seq s, other;
    for (int32_t i = 0; i < 40; i++) {
        positions[i] = i;
    }
    play_create(&c, &m, &s);
    positions[20] = 21; // in the second block
    play_part part = {.seq = &s, .new_len = 40, .tokens = ids, .positions = positions};
    play_step step;
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_create(&c, &m, &other);
    ck_assert_uint_eq(run(&other, NULL, ids, 40), 0);
    play_free(&c, &s);
    positions[20] = 20; // the default ones, said
    play_create(&c, &m, &s);
    part = (play_part){
        .seq = &s, .new_len = 40, .tokens = ids, .positions = positions, .prefix = &other};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    ck_assert_uint_eq(step.parts[0].cached, 32);
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    play_forget(&s);
    play_forget(&other);
}
END_TEST

START_TEST(ids_are_refused_where_no_prefix_can_be) {
    e2e_reply r;
    play_step step;
    play_seq s;
    play_model encoder = play_tiny(), wide = play_tiny();
    encoder.name = "encoder";
    encoder.not_causal = true;
    play_open(&c, &encoder);
    play_create(&c, &encoder, &s);
    play_part part = {.seq = &s, .new_len = 4, .tokens = ids};
    ATTND_CK_ERR(play_step_open(&c, &encoder, &part, 1, 0, &step, &r), ATTND_ENOTSUP);
    ck_assert_str_eq(r.error.field, "tokens_off");
    e2e_reply_fini(&r);
    play_free(&c, &s);
    wide.name = "wide";
    wide.block_tokens = 128;
    play_open(&c, &wide);
    play_create(&c, &wide, &s);
    ATTND_CK_ERR(play_step_open(&c, &wide, &part, 1, 0, &step, &r), ATTND_ENOTSUP);
    ck_assert_ptr_nonnull(strstr(r.error.text, "prefix_block_tokens"));
    e2e_reply_fini(&r);
    play_free(&c, &s);
}
END_TEST

START_TEST(other_parameters_under_the_same_name_find_nothing) {
    play_seq s;
    play_create(&c, &m, &s);
    run(&s, NULL, ids, 40);
    play_free_there(&c, &s);
    proto_model body = {.model = m.id};
    ATTND_CK_OK(e2e_call(&c, PROTO_MODEL_CLOSE, &body, sizeof(body), NULL));
    ck_assert_double_eq(e2e_stat(&c, "blocks.cached"), 2);
    play_open(&c, &m); // as it was
    play_seq other;
    play_create(&c, &m, &other);
    ck_assert_uint_eq(run(&other, &s, ids, 40), 32);
    play_free(&c, &other);
    ATTND_CK_OK(e2e_call(&c, PROTO_MODEL_CLOSE, &body, sizeof(body), NULL));
    m.inv_freq[3] *= 2;
    play_open(&c, &m);
    play_create(&c, &m, &other);
    ck_assert_uint_eq(run(&other, NULL, ids, 40), 0);
    play_free(&c, &other);
    play_forget(&s);
}
END_TEST

// create_at is play_create of a sequence of that priority.
static void create_at(uint32_t priority, play_seq *s) {
    proto_seq_create body = {.model = m.id, .priority = priority};
    e2e_reply r;
    play_create(&c, &m, s);
    play_free_there(&c, s);
    ATTND_CK_OK(e2e_call(&c, PROTO_SEQ_CREATE, &body, sizeof(body), &r));
    memcpy(&s->handle, r.body, sizeof(s->handle));
    e2e_reply_fini(&r);
}

// 40 blocks each, then 50 that have 48 free ones.
START_TEST(prompts_of_a_low_priority_go_first_after_a_restart_too) {
    teardown();
    begin(true);
    play_seq a, b, s;
    e2e_reply r;
    proto_seq_create body = {.model = m.id, .priority = 256};
    ATTND_CK_ERR(e2e_call(&c, PROTO_SEQ_CREATE, &body, sizeof(body), &r), ATTND_EINVAL);
    ck_assert_str_eq(r.error.field, "priority");
    e2e_reply_fini(&r);
    create_at(0, &a);
    run(&a, NULL, ids, 640);
    create_at(1, &b);
    run(&b, NULL, ids + 1, 640);
    char *list = e2e_json(&c, PROTO_SEQ_LIST, "");
    ck_assert_ptr_nonnull(strstr(list, "\"priority\":1}"));
    free(list);
    play_free_there(&c, &a);
    play_free_there(&c, &b);
    e2e_close(&c);
    e2e_kill_worker(&d);
    e2e_await_ready(&d);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    play_open(&c, &m);
    play_create(&c, &m, &s);
    run(&s, NULL, ids + 2, 800);
    play_free(&c, &s);
    play_create(&c, &m, &s); // takes one more
    ck_assert_uint_eq(run(&s, &a, ids, 640), 639);
    play_free(&c, &s);
    play_create(&c, &m, &s);
    ck_assert_uint_eq(run(&s, &b, ids + 1, 640), 640 - 3 * 16);
    play_free(&c, &s);
    play_forget(&a);
    play_forget(&b);
}
END_TEST

START_TEST(the_cache_outlives_the_daemon) {
    teardown();
    begin(true);
    play_seq s, other;
    play_create(&c, &m, &s);
    run(&s, NULL, ids, 70);
    play_free_there(&c, &s);
    e2e_close(&c);
    e2e_kill_worker(&d);
    e2e_await_ready(&d);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    play_open(&c, &m);
    ck_assert_double_eq(e2e_stat(&c, "blocks.cached"), 4);
    play_create(&c, &m, &other);
    ck_assert_uint_eq(run(&other, &s, ids, 70), 64);
    ck_assert_uint_eq(run(&other, NULL, ids + 70, 5), 0);
    play_free(&c, &other);
    play_forget(&s);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_prefix");
    TCase *tc = tcase_create("prefix");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, attention_over_a_cached_prefix_is_the_references);
    tcase_add_test(tc, a_batch_finds_for_each_of_its_sequences);
    tcase_add_test(tc, cached_blocks_make_way_for_steps);
    tcase_add_test(tc, an_accepted_path_of_a_tree_is_a_prefix_too);
    tcase_add_test(tc, rows_at_other_positions_are_no_prefix);
    tcase_add_test(tc, ids_are_refused_where_no_prefix_can_be);
    tcase_add_test(tc, other_parameters_under_the_same_name_find_nothing);
    tcase_add_test(tc, the_cache_outlives_the_daemon);
    tcase_add_test(tc, prompts_of_a_low_priority_go_first_after_a_restart_too);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
