// Blocks behind windows.  Group 0 sees everything, group 1 six tokens back; sequences keep two
// more. So a commit whose first row is at place p leaves blocks from (p - 8) / 4 on of group 1.
#include "kvcache/kv_window.h"

#include <unistd.h>

#include "tests/unit/kvcache/kv_fixture.h"

enum { LEFT = 6, MARGIN = 2 };

static kv_fixture f;
static kv_opts opts;

static void set_up(void) {
    opts = fix_opts();
    opts.window_margin = MARGIN;
    opts.prefix_blocks = FIX_BLOCKS;
    opts.prefix_block_tokens = FIX_BLOCK_TOKENS;
    fix_init_opts(&f, &opts);
    kv_model_spec spec = fix_spec("w", f.tenant);
    spec.num_groups = 2;
    spec.groups[1] = fix_group(1);
    spec.groups[1].window_left = LEFT;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
}

static void tear_down(void) {
    fix_fini(&f);
}

static const uint32_t *ids(uint32_t *tokens, uint32_t num, uint32_t first) {
    for (uint32_t i = 0; i < num; i++) {
        tokens[i] = first + i;
    }
    return tokens;
}

// open_ids opens a step of tokens with ids and returns how many are found.
static uint32_t open_ids(uint64_t seq, const uint32_t *tokens, uint32_t num, uint64_t *step) {
    kv_step_seq in = {.seq = seq, .new_len = num, .tokens = tokens};
    const kv_copy *copies;
    uint32_t num_copies;
    bool may_wait;
    ATTND_CK_OK(kv_step_open(f.kv, fix_rq(&f), f.model, &in, 1, step, &copies, &num_copies,
                             &may_wait, &f.info));
    return in.cached;
}

static void commit_ids(uint64_t step, const uint32_t *tokens, uint32_t accepted) {
    ATTND_CK_OK(kv_step_commit_ids(f.kv, fix_rq(&f), step, &accepted, &tokens, 1, &f.info));
}

static attnd_err read_rows(uint64_t seq, uint32_t q_len, uint64_t *step) {
    kv_step_seq in = {.seq = seq, .q_len = q_len};
    const kv_copy *copies;
    uint32_t num_copies;
    bool may_wait;
    return kv_step_open(f.kv, fix_rq(&f), f.model, &in, 1, step, &copies, &num_copies, &may_wait,
                        &f.info);
}

// lacks returns how many entries the table of group 1 begins with that name no block; behind them
// all do.
static uint32_t lacks(uint64_t seq) {
    uint64_t step;
    uint32_t num, first = 0;
    ATTND_CK_OK(read_rows(seq, 0, &step));
    const uint32_t *table = kv_step_table(f.kv, step, 0, 1, &num);
    while (first < num && table[first] == KV_NONE) {
        first++;
    }
    for (uint32_t b = first; b < num; b++) {
        ck_assert_uint_lt(table[b], FIX_BLOCKS);
    }
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    return first;
}

static uint32_t seq_blocks(uint64_t seq) {
    kv_seq_info info;
    ATTND_CK_OK(kv_seq_get(f.kv, f.session, seq, &info));
    return info.blocks;
}

static uint32_t tenant_blocks(void) {
    char name[KV_NAME_BYTES];
    uint32_t blocks, quota;
    ATTND_CK_OK(kv_tenant_get(f.kv, f.tenant, name, &blocks, &quota));
    return blocks;
}

static void recover(void) {
    kv_recovered found;
    int fd = dup(kv_ledger_fd(f.kv));
    kv_free(f.kv);
    ATTND_CK_OK(kv_recover(&f.kv, &f.arena, &opts, fd, 1000, &found, &f.info));
    ck_assert_uint_eq(found.lost_seqs + found.lost_prefix_blocks, 0);
}

START_TEST(a_commit_gives_back_what_its_first_row_does_not_see) {
    uint64_t seq = fix_seq(&f), step;
    bool may_wait;
    fix_append(&f, seq, 20);
    ck_assert_uint_eq(fix_in_use(&f), 10); // the first row is at 0
    fix_append(&f, seq, 3);                // at 20: (20 - 8) / 4 = 3
    ck_assert_uint_eq(lacks(seq), 3);
    ck_assert_uint_eq(fix_in_use(&f), 6 + 3);
    ck_assert_uint_eq(seq_blocks(seq), 9);
    ck_assert_uint_eq(tenant_blocks(), 9);
    ATTND_CK_OK(fix_step(&f, seq, 2, 3, &step, &may_wait)); // 28 tokens: one block more a group
    ck_assert_uint_eq(seq_blocks(seq), 11);
    fix_commit(&f, step, 0); // nothing accepted
    ck_assert_uint_eq(lacks(seq), 3);
    ATTND_CK_OK(fix_step(&f, seq, 9, 0, &step, &may_wait)); // 32 tokens
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    ck_assert_uint_eq(lacks(seq), 3);
    ATTND_CK_OK(fix_step(&f, seq, 9, 0, &step, &may_wait));
    fix_commit(&f, step, 1); // at 23: (23 - 8) / 4 = 3
    ck_assert_uint_eq(lacks(seq), 3);
    fix_append(&f, seq, 1); // at 24
    ck_assert_uint_eq(lacks(seq), 4);
    ck_assert_uint_eq(fix_in_use(&f), 7 + 3);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 0);
}
END_TEST

START_TEST(a_sequence_is_truncated_to_its_last_commit_and_by_the_margin) {
    uint64_t seq = fix_seq(&f);
    fix_append(&f, seq, 20);
    fix_append(&f, seq, 4); // blocks from 3 on: tokens from 12 on, which rows from 18 on see
    ATTND_CK_ERR(kv_seq_truncate(f.kv, fix_rq(&f), seq, 17, &f.info), ATTND_ENOTSUP);
    ck_assert_str_eq(f.info.field, "len");
    ATTND_CK_ERR(kv_seq_truncate(f.kv, fix_rq(&f), seq, 1, &f.info), ATTND_ENOTSUP);
    ck_assert_uint_eq(fix_committed(&f, seq), 24);
    ck_assert_uint_eq(fix_in_use(&f), 6 + 3);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, 18, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 5 + 2);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, 18, &f.info)); // no change
    fix_append(&f, seq, 1);
    ck_assert_uint_eq(lacks(seq), 3); // never fewer
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, 0, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 0);
    fix_append(&f, seq, 5);
    ck_assert_uint_eq(lacks(seq), 0);
    ck_assert_uint_eq(fix_in_use(&f), 4);
}
END_TEST

START_TEST(rows_that_see_what_was_given_back_are_not_read) {
    uint64_t seq = fix_seq(&f), step;
    fix_append(&f, seq, 20);
    fix_append(&f, seq, 4);
    ATTND_CK_OK(read_rows(seq, 6, &step)); // from 18 on
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    ATTND_CK_ERR(read_rows(seq, 7, &step), ATTND_ENOTSUP);
    ck_assert_str_eq(f.info.field, "q_len");
    ATTND_CK_ERR(read_rows(seq, UINT32_MAX, &step), ATTND_ENOTSUP);
    uint64_t whole = fix_seq(&f);
    fix_append(&f, whole, 9);
    ATTND_CK_OK(read_rows(whole, 1000, &step)); // nothing is missing
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
}
END_TEST

START_TEST(a_fork_shares_what_is_left_and_gives_back_its_own) {
    uint64_t seq = fix_seq(&f), forked;
    uint32_t committed;
    fix_append(&f, seq, 20);
    fix_append(&f, seq, 3);
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seq, &forked, &committed, &f.info));
    ck_assert_uint_eq(lacks(forked), 3);
    ck_assert_uint_eq(fix_in_use(&f), 9);
    ATTND_CK_ERR(kv_seq_truncate(f.kv, fix_rq(&f), forked, 17, &f.info), ATTND_ENOTSUP);
    fix_append(&f, forked, 5); // at 23; the shared last blocks are copied, one more each
    ck_assert_uint_eq(fix_in_use(&f), 9 + 2 + 2);
    fix_append(&f, forked, 1); // at 28: (28 - 8) / 4 = 5; the parent has blocks 3 to 5 still
    ck_assert_uint_eq(lacks(forked), 5);
    ck_assert_uint_eq(fix_in_use(&f), 9 + 2 * 3);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 8 + 3);
    ck_assert_uint_eq(seq_blocks(forked), 11);
}
END_TEST

START_TEST(a_hit_takes_over_what_its_rows_see) {
    uint32_t t[64];
    uint64_t a = fix_seq(&f), b, step;
    ck_assert_uint_eq(open_ids(a, ids(t, 40, 1), 40, &step), 0);
    commit_ids(step, t, 40);
    ck_assert_uint_eq(fix_in_use(&f), 20);
    b = fix_seq(&f);
    ck_assert_uint_eq(open_ids(b, t, 40, &step), 39); // 9 blocks; first row at 36: (36 - 8) / 4 = 7
    ck_assert_uint_eq(seq_blocks(b), 10 + 3);
    ck_assert_uint_eq(fix_in_use(&f), 20 + 2);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    ck_assert_uint_eq(fix_in_use(&f), 20);
    ck_assert_uint_eq(open_ids(b, t, 40, &step), 39);
    commit_ids(step, t, 40);
    ck_assert_uint_eq(lacks(b), 7);
    ck_assert_uint_eq(seq_blocks(b), 13);
    ATTND_CK_ERR(kv_seq_truncate(f.kv, fix_rq(&f), b, 33, &f.info), ATTND_ENOTSUP);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), a, &f.info));
    recover();
    ck_assert_uint_eq(lacks(b), 7);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), b, 34, &f.info)); // 28 + 6
}
END_TEST

START_TEST(a_restart_keeps_what_is_left) {
    uint64_t seq = fix_seq(&f);
    fix_append(&f, seq, 20);
    fix_append(&f, seq, 4);
    kv_table(f.kv, 0, 1)[1] = 77; // killed before it stored that there is none
    recover();
    ck_assert_uint_eq(lacks(seq), 3);
    ck_assert_uint_eq(fix_in_use(&f), 9);
    ATTND_CK_ERR(kv_seq_truncate(f.kv, fix_rq(&f), seq, 17, &f.info), ATTND_ENOTSUP);
    fix_append(&f, seq, 8);
    ck_assert_uint_eq(lacks(seq), 4);
    opts.window_margin = 0; // another one after a restart
    recover();
    fix_append(&f, seq, 1); // at 32: (32 - 6) / 4 = 6
    ck_assert_uint_eq(lacks(seq), 6);
}
END_TEST

START_TEST(a_window_of_one_token_and_no_margin_leaves_the_last_block_alone) {
    opts.window_margin = 0;
    recover();
    kv_model_spec spec = fix_spec("one", f.tenant);
    spec.groups[0].window_left = 0;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    uint64_t seq = fix_seq(&f), step;
    bool may_wait;
    fix_append(&f, seq, 8);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, 4, &f.info));
    fix_append(&f, seq, 4); // at 4
    ck_assert_uint_eq(fix_in_use(&f), 1);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, 4, &f.info)); // no block at all
    ck_assert_uint_eq(fix_in_use(&f), 0);
    ATTND_CK_OK(fix_step(&f, seq, 3, 2, &step, &may_wait));
    ck_assert_uint_eq(fix_in_use(&f), 2);
    fix_commit(&f, step, 3);
    ck_assert_uint_eq(fix_in_use(&f), 1);
    recover();
    ck_assert_uint_eq(fix_in_use(&f), 1);
    ck_assert_uint_eq(fix_committed(&f, seq), 7);
}
END_TEST

// 100000 tokens in a pool of 128 blocks, of which the tenant may have 51: the window of 64 tokens,
// 2 of margin, 61 of the last step and 64 of the next are at most 191 tokens, and as many blocks as
// they lie in.
START_TEST(a_long_sequence_lives_in_a_small_pool) {
    opts.max_seq_blocks = 25001;
    tear_down();
    fix_init_opts(&f, &opts);
    kv_model_spec spec = fix_spec("long", f.tenant);
    spec.groups[0].window_left = 64;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 51, &f.tenant));
    uint64_t seq = fix_seq(&f), step;
    uint32_t len = 0, most = 0;
    bool may_wait;
    while (len < 100000) {
        uint32_t num = 100000 - len < 61 ? 100000 - len : 61;
        ATTND_CK_OK(fix_step(&f, seq, num, 3, &step, &may_wait));
        most = fix_in_use(&f) > most ? fix_in_use(&f) : most;
        fix_commit(&f, step, num);
        len += num;
    }
    ck_assert_uint_eq(fix_committed(&f, seq), 100000);
    ck_assert_uint_le(most, 51);
    ATTND_CK_ERR(fix_step(&f, seq, 200, 0, &step, &may_wait), ATTND_ENOSPC);
    ck_assert(!may_wait); // with what it holds more than the quota
}
END_TEST

static kv_info counts(void) {
    kv_info info;
    kv_get_info(f.kv, &info);
    return info;
}

// What the tree alone has of a live sequence makes way when nothing else can, the deepest first; a
// hit does not end where its rows would see it, until another sequence commits these tokens.
START_TEST(cached_blocks_behind_a_window_make_way) {
    uint32_t t[64], u[24];
    uint64_t a = fix_seq(&f), b, c, d, step;
    ids(t, 40, 1);
    for (uint32_t i = 0; i < 40; i += 4) {
        open_ids(a, t + i, 4, &step);
        commit_ids(step, t + i, 4);
    }
    ck_assert_uint_eq(lacks(a), 7); // the last one began at 36
    ck_assert_uint_eq(counts().in_use, 10 + 3);
    ck_assert_uint_eq(counts().cached, 7);
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 20, &f.tenant));
    c = fix_seq(&f);
    fix_append(&f, c, 12); // 6 blocks: nodes 6 to 1 make way
    ck_assert_uint_eq(counts().in_use, 13 + 6);
    ck_assert_uint_eq(counts().cached, 1);
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 0, &f.tenant));
    recover();
    b = fix_seq(&f);
    ck_assert_uint_eq(open_ids(b, t, 40, &step), 39); // sees blocks 7 to 9, which a has
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    ids(u, 24, 100);
    memcpy(u, t, 20 * sizeof(t[0]));
    ck_assert_uint_eq(open_ids(b, u, 24, &step), 4); // node 0 alone has all
    commit_ids(step, u, 24);                         // its blocks become those of nodes 1 to 4
    d = fix_seq(&f);
    ck_assert_uint_eq(open_ids(d, u, 24, &step), 23);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), b, &f.info));
    ck_assert_uint_eq(open_ids(d, t, 21, &step), 20);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
}
END_TEST

// The same as above with token ids: 4000 tokens in 128 blocks.
START_TEST(a_long_prompt_with_ids_lives_in_a_small_pool) {
    opts.max_seq_blocks = opts.prefix_blocks = 1000;
    tear_down();
    fix_init_opts(&f, &opts);
    kv_model_spec spec = fix_spec("long", f.tenant);
    spec.groups[0].window_left = 64;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    uint64_t seq = fix_seq(&f), again, step;
    static uint32_t t[4000];
    ids(t, 4000, 1);
    for (uint32_t i = 0; i < 4000; i += 50) {
        ck_assert_uint_eq(open_ids(seq, t + i, 50, &step), 0);
        commit_ids(step, t + i, 50);
    }
    ck_assert_uint_le(counts().in_use, 50);
    ck_assert_uint_eq(counts().prefix_blocks, 1000);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    again = fix_seq(&f);
    ck_assert_uint_eq(open_ids(again, t, 4000, &step), 3999);
    ck_assert_uint_le(counts().in_use, 18 + 2);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_window");
    TCase *t = tcase_create("window");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_test(t, a_commit_gives_back_what_its_first_row_does_not_see);
    tcase_add_test(t, a_sequence_is_truncated_to_its_last_commit_and_by_the_margin);
    tcase_add_test(t, rows_that_see_what_was_given_back_are_not_read);
    tcase_add_test(t, a_fork_shares_what_is_left_and_gives_back_its_own);
    tcase_add_test(t, a_hit_takes_over_what_its_rows_see);
    tcase_add_test(t, a_restart_keeps_what_is_left);
    tcase_add_test(t, a_window_of_one_token_and_no_margin_leaves_the_last_block_alone);
    tcase_add_test(t, a_long_sequence_lives_in_a_small_pool);
    tcase_add_test(t, cached_blocks_behind_a_window_make_way);
    tcase_add_test(t, a_long_prompt_with_ids_lives_in_a_small_pool);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
