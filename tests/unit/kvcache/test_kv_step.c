// Steps: reserving, committing, aborting, copies of shared blocks, what is refused.
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;

static void setup(void) {
    fix_init(&f);
}

static void teardown(void) {
    fix_fini(&f);
}

START_TEST(kv_step_commit_makes_the_accepted_tokens_count) {
    uint64_t seq = fix_seq(&f), step;
    bool may_wait;
    ATTND_CK_OK(fix_step(&f, seq, 9, 2, &step, &may_wait)); // 11 tokens: 3 blocks of 4
    ck_assert_uint_eq(fix_in_use(&f), 3);
    ck_assert_uint_eq(fix_committed(&f, seq), 0);
    fix_commit(&f, step, 5); // 2 blocks
    ck_assert_uint_eq(fix_in_use(&f), 2);
    ck_assert_uint_eq(fix_committed(&f, seq), 5);
}
END_TEST

START_TEST(kv_step_abort_leaves_no_trace) {
    uint64_t seq = fix_seq(&f), step;
    bool may_wait;
    fix_append(&f, seq, 6);
    ATTND_CK_OK(fix_step(&f, seq, 30, 5, &step, &may_wait));
    ck_assert_uint_eq(fix_in_use(&f), 11); // ceil(41 / 4)
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    ck_assert_uint_eq(fix_in_use(&f), 2);
    ck_assert_uint_eq(fix_committed(&f, seq), 6);
    ATTND_CK_ERR(kv_step_abort(f.kv, fix_rq(&f), step), ATTND_ESTALE);
    fix_append(&f, seq, 1); // the sequence is free for the next step
}
END_TEST

START_TEST(kv_step_accepted_outside_its_range_is_refused) {
    uint64_t seq = fix_seq(&f), step;
    bool may_wait;
    ATTND_CK_OK(fix_step(&f, seq, 3, 4, &step, &may_wait));
    uint32_t accepted[2] = {4, 0}; // reserve does not count
    ATTND_CK_ERR(kv_step_commit(f.kv, fix_rq(&f), step, accepted, 1, &f.info), ATTND_EINVAL);
    ck_assert_str_eq(f.info.field, "accepted");
    accepted[0] = UINT32_MAX;
    ATTND_CK_ERR(kv_step_commit(f.kv, fix_rq(&f), step, accepted, 1, &f.info), ATTND_EINVAL);
    accepted[0] = 1;
    ATTND_CK_ERR(kv_step_commit(f.kv, fix_rq(&f), step, accepted, 2, &f.info), ATTND_EINVAL);
    ck_assert_str_eq(f.info.field, "num_seqs");
    ATTND_CK_ERR(kv_step_commit(f.kv, fix_rq(&f), step, accepted, 0, &f.info), ATTND_EINVAL);
    ck_assert_uint_eq(fix_committed(&f, seq), 0);
    fix_commit(&f, step, 3);
    ck_assert_uint_eq(fix_committed(&f, seq), 3);
}
END_TEST

START_TEST(kv_step_takes_a_sequence_once_and_one_step_at_a_time) {
    uint64_t a = fix_seq(&f), b = fix_seq(&f), step, second;
    bool may_wait;
    kv_step_seq twice[3] = {{.seq = a, .new_len = 1}, {.seq = b, .new_len = 1}, {.seq = a}};
    const kv_copy *copies;
    uint32_t num;
    ATTND_CK_ERR(
        kv_step_open(f.kv, fix_rq(&f), f.model, twice, 3, &step, &copies, &num, &may_wait, &f.info),
        ATTND_EINVAL);
    char handle[32];
    snprintf(handle, sizeof(handle), "%llx", (unsigned long long)a);
    ck_assert_ptr_nonnull(strstr(f.info.text, handle));
    ck_assert_uint_eq(fix_in_use(&f), 0);
    ATTND_CK_OK(fix_step(&f, b, 1, 0, &step, &may_wait)); // the refused step let go of b
    ATTND_CK_ERR(fix_step(&f, b, 1, 0, &second, &may_wait), ATTND_EBUSY);
    ATTND_CK_ERR(kv_seq_truncate(f.kv, fix_rq(&f), b, 0, &f.info), ATTND_EBUSY);
    ATTND_CK_ERR(kv_seq_free(f.kv, fix_rq(&f), b, &f.info), ATTND_EBUSY);
    ATTND_CK_ERR(kv_seq_keep(f.kv, fix_rq(&f), b, "x", 0, &f.info), ATTND_EBUSY);
    fix_commit(&f, step, 1);
}
END_TEST

START_TEST(kv_step_table_holds_committed_and_reserved_blocks) {
    uint64_t seq = fix_seq(&f), step;
    bool may_wait;
    fix_append(&f, seq, 5);
    ATTND_CK_OK(fix_step(&f, seq, 4, 4, &step, &may_wait)); // 13 tokens
    uint32_t num;
    const uint32_t *table = kv_step_table(f.kv, step, 0, 0, &num);
    ck_assert_uint_eq(num, 4);
    for (uint32_t i = 0; i < num; i++) {
        ck_assert_uint_lt(table[i], FIX_BLOCKS); // a block is one unit
        for (uint32_t j = 0; j < i; j++) {
            ck_assert_uint_ne(table[i], table[j]);
        }
    }
    ck_assert_ptr_null(kv_step_table(f.kv, step, 1, 0, &num));
    ck_assert_ptr_null(kv_step_table(f.kv, step, 0, 1, &num));
    ck_assert_ptr_null(kv_step_table(f.kv, step + 1, 0, 0, &num));
    fix_commit(&f, step, 0);
    ck_assert_ptr_null(kv_step_table(f.kv, step, 0, 0, &num));
}
END_TEST

START_TEST(kv_step_get_answers_the_holder_only) {
    uint64_t seq = fix_seq(&f), step, other;
    bool may_wait;
    uint32_t num, model;
    ATTND_CK_OK(kv_session_open(f.kv, f.tenant, (const uint8_t[KV_SECRET_BYTES]){2}, &other));
    ATTND_CK_OK(fix_step(&f, seq, 2, 1, &step, &may_wait));
    const kv_step_seq *seqs = kv_step_get(f.kv, f.session, step, &num, &model);
    ck_assert_ptr_nonnull(seqs);
    ck_assert_uint_eq(num, 1);
    ck_assert_uint_eq(model, f.model);
    ck_assert_uint_eq(seqs[0].seq, seq);
    ck_assert_uint_eq(seqs[0].new_len, 2);
    ck_assert_uint_eq(seqs[0].reserve, 1);
    ck_assert_ptr_null(kv_step_get(f.kv, other, step, &num, &model));
    ck_assert_ptr_eq(kv_step_get(f.kv, 0, step, &num, &model), seqs); // attnd itself
    uint32_t accepted = 2;
    ATTND_CK_ERR(kv_step_commit(f.kv, (kv_request){other, 1}, step, &accepted, 1, &f.info),
                 ATTND_ESTALE);
    ATTND_CK_ERR(kv_step_abort(f.kv, (kv_request){other, 1}, step), ATTND_ESTALE);
    ATTND_CK_OK(kv_step_abort(f.kv, (kv_request){0}, step));
    ck_assert_ptr_null(kv_step_get(f.kv, f.session, step, &num, &model));
}
END_TEST

// ---- room

START_TEST(kv_step_waits_for_blocks_of_others_only) {
    uint64_t a = fix_seq(&f), b = fix_seq(&f), step;
    bool may_wait = true;
    // 32 blocks a table, 128 in the arena: four full sequences fill it
    for (int i = 0; i < 3; i++) {
        fix_append(&f, fix_seq(&f), 128);
    }
    fix_append(&f, a, 124); // 31 blocks
    fix_append(&f, b, 1);
    ck_assert_uint_eq(fix_in_use(&f), FIX_BLOCKS);
    ATTND_CK_ERR(fix_step(&f, b, 4, 0, &step, &may_wait), ATTND_ENOSPC);
    ck_assert(may_wait);
    ck_assert_uint_eq(fix_committed(&f, b), 1);
    ATTND_CK_OK(fix_step(&f, b, 3, 0, &step, &may_wait)); // fits the block it has
    fix_commit(&f, step, 3);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), a, &f.info));
    fix_append(&f, b, 4);
}
END_TEST

START_TEST(kv_step_longer_than_a_table_never_waits) {
    uint64_t seq = fix_seq(&f), step;
    const uint32_t too_long[][2] = {
        {129, 0}, {0, 129}, {128, 1}, {UINT32_MAX, UINT32_MAX}, {UINT32_MAX, 1}, {INT32_MAX, 0}};
    for (size_t i = 0; i < sizeof(too_long) / sizeof(too_long[0]); i++) {
        bool may_wait = true;
        ATTND_CK_ERR(fix_step(&f, seq, too_long[i][0], too_long[i][1], &step, &may_wait),
                     ATTND_ENOSPC);
        ck_assert(!may_wait);
    }
    bool may_wait;
    ATTND_CK_OK(fix_step(&f, seq, 127, 1, &step, &may_wait));
    fix_commit(&f, step, 127);
    ck_assert_uint_eq(fix_committed(&f, seq), 127);
}
END_TEST

START_TEST(kv_step_larger_than_the_pool_never_waits) {
    kv_step_seq seqs[5];
    for (int i = 0; i < 5; i++) {
        seqs[i] = (kv_step_seq){.seq = fix_seq(&f), .new_len = 100}; // 25 blocks each
    }
    seqs[4].new_len = 116; // 29: 129 in all
    uint64_t step;
    bool may_wait = true;
    const kv_copy *copies;
    uint32_t num;
    ATTND_CK_ERR(
        kv_step_open(f.kv, fix_rq(&f), f.model, seqs, 5, &step, &copies, &num, &may_wait, &f.info),
        ATTND_ENOSPC);
    ck_assert(!may_wait);
    seqs[4].new_len = 112; // 28: exactly all
    ATTND_CK_OK(
        kv_step_open(f.kv, fix_rq(&f), f.model, seqs, 5, &step, &copies, &num, &may_wait, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), FIX_BLOCKS);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    ck_assert_uint_eq(fix_in_use(&f), 0);
}
END_TEST

START_TEST(kv_step_counts_what_its_sequences_hold_once) {
    // 40 blocks held by a and shared by its forks; the others fill the pool up
    uint64_t a = fix_seq(&f), b, c, step;
    uint32_t committed;
    fix_append(&f, a, 108); // 27 blocks
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), a, &b, &committed, &f.info));
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), a, &c, &committed, &f.info));
    uint64_t other[4];
    for (int i = 0; i < 4; i++) {
        other[i] = fix_seq(&f);
        fix_append(&f, other[i], i < 3 ? 128 : 20); // 101 blocks
    }
    ck_assert_uint_eq(fix_in_use(&f), FIX_BLOCKS);
    // a, b, c hold 27 blocks together, not 81: 15 more fit once the others go
    kv_step_seq seqs[3] = {
        {.seq = a, .new_len = 20}, {.seq = b, .new_len = 20}, {.seq = c, .new_len = 20}};
    bool may_wait = false;
    const kv_copy *copies;
    uint32_t num;
    ATTND_CK_ERR(
        kv_step_open(f.kv, fix_rq(&f), f.model, seqs, 3, &step, &copies, &num, &may_wait, &f.info),
        ATTND_ENOSPC);
    ck_assert(may_wait);
    // all sequences of the pool in one step: nobody else gives anything back
    kv_step_seq all[7] = {{.seq = a, .new_len = 20}, {.seq = b}, {.seq = c}};
    for (int i = 0; i < 4; i++) {
        all[3 + i] = (kv_step_seq){.seq = other[i]};
    }
    may_wait = true;
    ATTND_CK_ERR(
        kv_step_open(f.kv, fix_rq(&f), f.model, all, 7, &step, &copies, &num, &may_wait, &f.info),
        ATTND_ENOSPC);
    ck_assert(!may_wait);
}
END_TEST

START_TEST(kv_step_quota_counts_shared_blocks_once) {
    uint64_t a = fix_seq(&f), b, step;
    uint32_t committed, blocks, quota;
    char name[KV_NAME_BYTES];
    bool may_wait = true;
    fix_append(&f, a, 16);
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 6, &f.tenant));
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), a, &b, &committed, &f.info));
    ATTND_CK_OK(kv_tenant_get(f.kv, f.tenant, name, &blocks, &quota));
    ck_assert_uint_eq(blocks, 4);
    fix_append(&f, b, 8); // 6 blocks in use
    ATTND_CK_ERR(fix_step(&f, a, 1, 0, &step, &may_wait), ATTND_ENOSPC);
    ck_assert(may_wait); // once b is gone
    ck_assert_str_eq(f.info.field, "tenant");
    ATTND_CK_ERR(fix_step(&f, a, 9, 0, &step, &may_wait), ATTND_ENOSPC);
    ck_assert(!may_wait); // 7 blocks of its own
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), b, &f.info));
    fix_append(&f, a, 8);
    ATTND_CK_OK(kv_tenant_get(f.kv, f.tenant, name, &blocks, &quota));
    ck_assert_uint_eq(blocks, 6);
}
END_TEST

START_TEST(kv_step_refused_claims_nothing) {
    uint64_t a = fix_seq(&f), step, second;
    bool may_wait;
    kv_step_seq seqs[2] = {{.seq = a, .new_len = 1}, {.seq = 12345, .new_len = 1}};
    const kv_copy *copies;
    uint32_t num;
    ATTND_CK_ERR(
        kv_step_open(f.kv, fix_rq(&f), f.model, seqs, 2, &step, &copies, &num, &may_wait, &f.info),
        ATTND_ESTALE);
    ATTND_CK_ERR(
        kv_step_open(f.kv, fix_rq(&f), f.model, seqs, 0, &step, &copies, &num, &may_wait, &f.info),
        ATTND_EINVAL);
    ATTND_CK_ERR(
        kv_step_open(f.kv, fix_rq(&f), f.model, seqs, 9, &step, &copies, &num, &may_wait, &f.info),
        ATTND_EMSGSIZE);
    ATTND_CK_ERR(kv_step_open(f.kv, fix_rq(&f), f.model + 1, seqs, 1, &step, &copies, &num,
                              &may_wait, &f.info),
                 ATTND_ENOENT);
    ATTND_CK_ERR(kv_step_open(f.kv, (kv_request){0}, f.model, seqs, 1, &step, &copies, &num,
                              &may_wait, &f.info),
                 ATTND_ESTALE);
    uint64_t many[8];
    for (int i = 0; i < 8; i++) {
        ATTND_CK_OK(fix_step(&f, fix_seq(&f), 1, 0, &many[i], &may_wait));
    }
    ATTND_CK_ERR(fix_step(&f, a, 1, 0, &second, &may_wait), ATTND_EBUSY);
    for (int i = 0; i < 8; i++) {
        fix_commit(&f, many[i], 1);
    }
    fix_append(&f, a, 1);
}
END_TEST

START_TEST(kv_step_of_two_groups_takes_from_both_classes_or_neither) {
    kv_model_spec spec = fix_spec("two", f.tenant);
    spec.num_groups = 2;
    spec.groups[1] = fix_group(3); // blocks of 3 units: 5 a slab
    spec.groups[1].block_tokens = FIX_BLOCK_TOKENS;
    uint32_t two;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &two, &f.info));
    uint64_t seq, step;
    ATTND_CK_OK(kv_seq_create(f.kv, fix_rq(&f), two, &seq, &f.info));
    for (int i = 0; i < 3; i++) {
        fix_append(&f, fix_seq(&f), 128); // 6 of 8 slabs
    }
    kv_step_seq s = {.seq = seq, .new_len = 24}; // 6 small, 6 large: 1 slab + 2 slabs
    bool may_wait = false;
    const kv_copy *copies;
    uint32_t num;
    kv_info before, after;
    kv_get_info(f.kv, &before);
    ATTND_CK_ERR(
        kv_step_open(f.kv, fix_rq(&f), two, &s, 1, &step, &copies, &num, &may_wait, &f.info),
        ATTND_ENOSPC);
    ck_assert(may_wait);
    kv_get_info(f.kv, &after);
    ck_assert_int_eq(memcmp(&before, &after, sizeof(before)), 0);
    s.new_len = 20; // 5 small, 5 large: one slab each
    ATTND_CK_OK(
        kv_step_open(f.kv, fix_rq(&f), two, &s, 1, &step, &copies, &num, &may_wait, &f.info));
    kv_get_info(f.kv, &after);
    ck_assert_uint_eq(after.in_use, before.in_use + 10);
    ck_assert_uint_eq(after.unassigned_slabs, 0);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    kv_get_info(f.kv, &after);
    ck_assert_uint_eq(after.unassigned_slabs, 2);
}
END_TEST

// ---- copies of shared blocks

// open_copies opens a step of one sequence and returns its copies.
static uint64_t open_copies(uint64_t seq, uint32_t new_len, const kv_copy **copies,
                            uint32_t *num_copies) {
    uint64_t step;
    bool may_wait;
    kv_step_seq s = {.seq = seq, .new_len = new_len};
    ATTND_CK_OK(kv_step_open(f.kv, fix_rq(&f), f.model, &s, 1, &step, copies, num_copies, &may_wait,
                             &f.info));
    return step;
}

static uint64_t fork_of(uint64_t seq) {
    uint64_t forked;
    uint32_t committed;
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seq, &forked, &committed, &f.info));
    ck_assert_uint_eq(committed, fix_committed(&f, seq));
    return forked;
}

START_TEST(kv_step_first_write_into_a_shared_block_copies_it) {
    uint64_t a = fix_seq(&f);
    const kv_copy *copies;
    uint32_t num, entries;
    fix_append(&f, a, 6);
    uint64_t b = fork_of(a);
    ck_assert_uint_eq(fix_in_use(&f), 2);
    uint64_t step_a = open_copies(a, 1, &copies, &num);
    ck_assert_uint_eq(num, 1);
    ck_assert_uint_eq(copies[0].num_tokens, 2); // tokens 4 and 5
    ck_assert_uint_eq(copies[0].src_token, 0);
    ck_assert_uint_eq(copies[0].dst_token, 0);
    ck_assert_uint_eq(copies[0].dst, kv_step_table(f.kv, step_a, 0, 0, &entries)[1]);
    ck_assert_uint_eq(entries, 2);
    uint32_t shared = copies[0].src;
    fix_commit(&f, step_a, 1);
    ck_assert_uint_eq(fix_in_use(&f), 3);
    // the block is b's alone now
    uint64_t step_b = open_copies(b, 1, &copies, &num);
    ck_assert_uint_eq(num, 0);
    ck_assert_uint_eq(kv_step_table(f.kv, step_b, 0, 0, &entries)[1], shared);
    fix_commit(&f, step_b, 1);
    ck_assert_uint_eq(fix_in_use(&f), 3);
}
END_TEST

START_TEST(kv_step_abort_goes_back_to_the_shared_block) {
    uint64_t a = fix_seq(&f);
    const kv_copy *copies;
    uint32_t num, entries;
    fix_append(&f, a, 6);
    fork_of(a);
    for (int i = 0; i < 2; i++) { // the second time shows that the first left no trace
        uint64_t step = open_copies(a, 9, &copies, &num);
        ck_assert_uint_eq(num, 1);
        ck_assert_uint_eq(fix_in_use(&f), 5); // 2 shared, the copy, 2 new
        if (i == 0) {
            ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
        } else {
            fix_commit(&f, step, 0);
        }
        ck_assert_uint_eq(fix_in_use(&f), 2);
    }
    uint64_t read = open_copies(a, 0, &copies, &num);
    ck_assert_uint_eq(num, 0); // who does not write needs no copy
    kv_step_table(f.kv, read, 0, 0, &entries);
    ck_assert_uint_eq(entries, 2);
    fix_commit(&f, read, 0);
}
END_TEST

START_TEST(kv_step_full_shared_block_is_not_copied) {
    uint64_t a = fix_seq(&f);
    const kv_copy *copies;
    uint32_t num;
    fix_append(&f, a, 8);
    fork_of(a);
    uint64_t step = open_copies(a, 1, &copies, &num);
    ck_assert_uint_eq(num, 0);
    fix_commit(&f, step, 1);
    ck_assert_uint_eq(fix_in_use(&f), 3);
}
END_TEST

START_TEST(kv_step_truncated_into_a_shared_block_copies_what_is_left) {
    uint64_t a = fix_seq(&f);
    const kv_copy *copies;
    uint32_t num;
    fix_append(&f, a, 8);
    uint64_t b = fork_of(a);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), b, 5, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 2);
    uint64_t step = open_copies(b, 2, &copies, &num);
    ck_assert_uint_eq(num, 1);
    ck_assert_uint_eq(copies[0].num_tokens, 1);
    fix_commit(&f, step, 2);
    ck_assert_uint_eq(fix_in_use(&f), 3);
}
END_TEST

START_TEST(kv_step_fork_of_a_sequence_in_a_step_sees_the_committed_block) {
    uint64_t a = fix_seq(&f);
    const kv_copy *copies;
    uint32_t num;
    fix_append(&f, a, 6);
    uint64_t b = fork_of(a);
    uint64_t step = open_copies(a, 1, &copies, &num);
    uint32_t old = copies[0].src, copy = copies[0].dst;
    uint64_t c = fork_of(a); // while a has a copy of its last block
    fix_commit(&f, step, 1);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), b, &f.info));
    step = open_copies(c, 1, &copies, &num);
    ck_assert_uint_eq(num, 0); // the old block is c's alone
    uint32_t entries;
    ck_assert_uint_eq(kv_step_table(f.kv, step, 0, 0, &entries)[1], old);
    ck_assert_uint_ne(old, copy);
    fix_commit(&f, step, 1);
}
END_TEST

START_TEST(kv_step_both_forks_in_one_step_copy) {
    uint64_t a = fix_seq(&f), step;
    fix_append(&f, a, 6);
    kv_step_seq seqs[2] = {{.seq = a, .new_len = 1}, {.seq = fork_of(a), .new_len = 1}};
    bool may_wait;
    const kv_copy *copies;
    uint32_t num;
    ATTND_CK_OK(
        kv_step_open(f.kv, fix_rq(&f), f.model, seqs, 2, &step, &copies, &num, &may_wait, &f.info));
    ck_assert_uint_eq(num, 2);
    ck_assert_uint_ne(copies[0].dst, copies[1].dst);
    ck_assert_uint_eq(fix_in_use(&f), 4);
    uint32_t accepted[2] = {1, 0}; // b goes back to the old block, alone
    ATTND_CK_OK(kv_step_commit(f.kv, fix_rq(&f), step, accepted, 2, &f.info));
    ck_assert_uint_eq(fix_in_use(&f), 3);
}
END_TEST

START_TEST(kv_step_handle_is_never_used_twice) {
    uint64_t seq = fix_seq(&f), first, second;
    bool may_wait;
    ATTND_CK_OK(fix_step(&f, seq, 1, 0, &first, &may_wait));
    fix_commit(&f, first, 1);
    ATTND_CK_OK(fix_step(&f, seq, 1, 0, &second, &may_wait));
    ck_assert_uint_ne(first, second);
    uint32_t accepted = 1;
    ATTND_CK_ERR(kv_step_commit(f.kv, fix_rq(&f), first, &accepted, 1, &f.info), ATTND_ESTALE);
    fix_commit(&f, second, 1);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_step");
    TCase *basic = tcase_create("basic");
    tcase_add_checked_fixture(basic, setup, teardown);
    tcase_add_test(basic, kv_step_commit_makes_the_accepted_tokens_count);
    tcase_add_test(basic, kv_step_abort_leaves_no_trace);
    tcase_add_test(basic, kv_step_accepted_outside_its_range_is_refused);
    tcase_add_test(basic, kv_step_takes_a_sequence_once_and_one_step_at_a_time);
    tcase_add_test(basic, kv_step_table_holds_committed_and_reserved_blocks);
    tcase_add_test(basic, kv_step_get_answers_the_holder_only);
    tcase_add_test(basic, kv_step_refused_claims_nothing);
    tcase_add_test(basic, kv_step_handle_is_never_used_twice);
    suite_add_tcase(s, basic);
    TCase *room = tcase_create("room");
    tcase_add_checked_fixture(room, setup, teardown);
    tcase_add_test(room, kv_step_waits_for_blocks_of_others_only);
    tcase_add_test(room, kv_step_longer_than_a_table_never_waits);
    tcase_add_test(room, kv_step_larger_than_the_pool_never_waits);
    tcase_add_test(room, kv_step_counts_what_its_sequences_hold_once);
    tcase_add_test(room, kv_step_quota_counts_shared_blocks_once);
    tcase_add_test(room, kv_step_of_two_groups_takes_from_both_classes_or_neither);
    suite_add_tcase(s, room);
    TCase *copy = tcase_create("copy");
    tcase_add_checked_fixture(copy, setup, teardown);
    tcase_add_test(copy, kv_step_first_write_into_a_shared_block_copies_it);
    tcase_add_test(copy, kv_step_abort_goes_back_to_the_shared_block);
    tcase_add_test(copy, kv_step_full_shared_block_is_not_copied);
    tcase_add_test(copy, kv_step_truncated_into_a_shared_block_copies_what_is_left);
    tcase_add_test(copy, kv_step_fork_of_a_sequence_in_a_step_sees_the_committed_block);
    tcase_add_test(copy, kv_step_both_forks_in_one_step_copy);
    suite_add_tcase(s, copy);
    return s;
}

CHECK_MAIN(suite)
