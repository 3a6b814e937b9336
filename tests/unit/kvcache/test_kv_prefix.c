// The prefix cache through kvcache's calls: what a step finds, what it leaves, what goes.
#include "kvcache/kv_prefix.h"

#include <unistd.h>

#include "tests/unit/kvcache/kv_fixture.h"
#include "tests/unit/kvcache/kv_rows.h"

static kv_fixture f;

static kv_opts options(void) {
    kv_opts opts = fix_opts();
    opts.max_seq_blocks = FIX_BLOCKS;
    opts.prefix_blocks = FIX_BLOCKS;
    opts.prefix_block_tokens = FIX_BLOCK_TOKENS;
    return opts;
}

static void set_up(void) {
    const kv_opts opts = options();
    fix_init_opts(&f, &opts);
}

static void tear_down(void) {
    fix_fini(&f);
}

typedef struct opened {
    uint64_t seq, step;
    kv_step_seq in;
    const kv_copy *copies;
    uint32_t num_copies;
} opened;

static attnd_err try_open(opened *o, const uint32_t *tokens, uint32_t num, bool *may_wait) {
    o->in = (kv_step_seq){.seq = o->seq, .new_len = num, .tokens = tokens};
    return kv_step_open(f.kv, fix_rq(&f), f.model, &o->in, 1, &o->step, &o->copies, &o->num_copies,
                        may_wait, &f.info);
}

static opened open_ids(uint64_t seq, const uint32_t *tokens, uint32_t num) {
    bool may_wait;
    opened o = {.seq = seq};
    ATTND_CK_OK(try_open(&o, tokens, num, &may_wait));
    return o;
}

static void commit_ids(const opened *o, const uint32_t *tokens, uint32_t accepted) {
    ATTND_CK_OK(kv_step_commit_ids(f.kv, fix_rq(&f), o->step, &accepted, &tokens, 1, &f.info));
}

// ids fills tokens [num] with first, first + 1 ...
static const uint32_t *ids(uint32_t *tokens, uint32_t num, uint32_t first) {
    for (uint32_t i = 0; i < num; i++) {
        tokens[i] = first + i;
    }
    return tokens;
}

// leave commits a sequence of tokens and frees it.
static void leave(const uint32_t *tokens, uint32_t num) {
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, tokens, num);
    commit_ids(&o, tokens, num);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
}

// found returns how many of the tokens a new sequence finds.
static uint32_t found(const uint32_t *tokens, uint32_t num) {
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, tokens, num);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    return o.in.cached;
}

static uint32_t cached(void) {
    kv_info info;
    kv_get_info(f.kv, &info);
    return info.cached;
}

START_TEST(a_prefix_is_found_whole_blocks_and_part_of_one_more) {
    uint32_t t[16];
    leave(ids(t, 12, 100), 12);
    ck_assert_uint_eq(cached(), 3);
    ck_assert_uint_eq(found(t, 5), 4);
    ck_assert_uint_eq(found(t, 12), 11); // at most all but one
    ck_assert_uint_eq(found(ids(t, 16, 100), 16), 12);
    t[9] = 1;
    ck_assert_uint_eq(found(t, 16), 9); // the first row of the third block is the same
    t[3] = 1;
    ck_assert_uint_eq(found(t, 16), 3);
    t[0] = 1;
    ck_assert_uint_eq(found(t, 16), 0);
    ck_assert_uint_eq(found(t, 1), 0);
}
END_TEST

START_TEST(blocks_that_are_not_full_are_not_found) {
    uint32_t t[16];
    leave(ids(t, 7, 1), 7);
    ck_assert_uint_eq(cached(), 1);
    ck_assert_uint_eq(found(t, 7), 4);
}
END_TEST

START_TEST(nothing_is_found_before_the_commit_nor_after_an_abort) {
    uint32_t t[16];
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, ids(t, 12, 1), 12);
    ck_assert_uint_eq(found(t, 12), 0);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    ck_assert_uint_eq(found(t, 12), 0);
    o = open_ids(seq, t, 12);
    commit_ids(&o, t, 6); // of which two are of a block that is not full
    ck_assert_uint_eq(found(t, 12), 4);
}
END_TEST

START_TEST(tokens_that_come_one_by_one_make_blocks_too) {
    uint32_t t[16];
    uint64_t seq = fix_seq(&f);
    ids(t, 16, 7);
    for (uint32_t i = 0; i < 11; i++) {
        opened o = open_ids(seq, t + i, 1);
        ck_assert_uint_eq(o.in.cached, 0);
        commit_ids(&o, t + i, 1);
    }
    ck_assert_uint_eq(found(t, 16), 8);
    ck_assert_uint_eq(cached(), 0); // they are in use
}
END_TEST

START_TEST(tokens_without_ids_end_it) {
    uint32_t t[16];
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, ids(t, 16, 7), 6);
    commit_ids(&o, t, 6);
    fix_append(&f, seq, 1);
    o = open_ids(seq, t + 7, 5);
    commit_ids(&o, t + 7, 5);
    ck_assert_uint_eq(found(t, 16), 4);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, 5, &f.info)); // now all are known again
    o = open_ids(seq, t + 5, 5);
    commit_ids(&o, t + 5, 5);
    ck_assert_uint_eq(found(t, 16), 8);
}
END_TEST

START_TEST(copied_rows_are_those_of_the_cached_block) {
    uint32_t t[16], entries;
    const kv_model_spec *spec = kv_model_get(f.kv, f.model);
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, ids(t, 12, 50), 12);
    for (uint32_t i = 0; i < 12; i++) {
        rows_write(spec, 0, f.memory, kv_step_table(f.kv, o.step, 0, 0, &entries), i, t[i]);
    }
    commit_ids(&o, t, 12);
    t[10] = 1;
    uint64_t other = fix_seq(&f);
    o = open_ids(other, t, 12);
    ck_assert_uint_eq(o.in.cached, 10);
    ck_assert_uint_eq(o.num_copies, 1);
    ATTND_CK_OK(kv_copy_run(f.kv, o.copies, o.num_copies, &f.info));
    const uint32_t *table = kv_step_table(f.kv, o.step, 0, 0, &entries);
    for (uint32_t i = 0; i < 10; i++) {
        ck_assert(rows_right(spec, 0, f.memory, table, i, t[i]));
    }
    rows_write(spec, 0, f.memory, table, 10, 1);
    commit_ids(&o, t, 12);
    t[10] = 60;
    ck_assert_uint_eq(found(t, 12), 11); // the first one's block is still there
    t[10] = 1;
    ck_assert_uint_eq(found(t, 12), 11);
}
END_TEST

START_TEST(prefixes_of_one_hash_are_told_apart) {
    uint32_t t[16];
    kv_prefix_set_key_mask(f.kv, 0);
    for (uint32_t i = 0; i < 6; i++) {
        leave(ids(t, 8, 100 * i), 8);
    }
    for (uint32_t i = 0; i < 6; i++) {
        ids(t, 9, 100 * i);
        ck_assert_uint_eq(found(t, 9), 8);
        t[0] = 99; // the second block alone is no prefix
        ck_assert_uint_eq(found(t, 9), 0);
    }
    uint32_t both[9]; // the first block of one, the second of another
    memcpy(both, ids(t, 9, 100), sizeof(both));
    memcpy(both + 4, ids(t, 9, 200) + 4, 5 * sizeof(t[0]));
    ck_assert_uint_eq(found(both, 9), 4);
}
END_TEST

START_TEST(models_and_tenants_share_nothing) {
    uint32_t t[16], tenant;
    leave(ids(t, 8, 1), 8);
    kv_model_spec spec = fix_spec("other", f.tenant);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    ck_assert_uint_eq(found(t, 8), 0);
    ATTND_CK_OK(kv_tenant_set(f.kv, "u", 0, &tenant));
    spec = fix_spec("m", tenant);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    ATTND_CK_OK(kv_session_open(f.kv, tenant, (const uint8_t[KV_SECRET_BYTES]){1}, &f.session));
    ck_assert_uint_eq(found(t, 8), 0);
}
END_TEST

START_TEST(the_least_recently_used_leaf_goes_first) {
    uint32_t a[16], b[16], c[16], t[4 * FIX_BLOCKS];
    leave(ids(a, 9, 100), 8);
    leave(ids(b, 9, 200), 8);
    leave(ids(c, 9, 300), 8);
    ck_assert_uint_eq(found(a, 9), 8); // used again
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, NULL, 4 * (FIX_SLAB_BLOCKS * 2 - 6));
    uint64_t big = fix_seq(&f);
    (void)t;
    ck_assert_uint_eq(cached(), 6);
    // 96 blocks of whole slabs and two that are not free: two cached ones go
    opened p = open_ids(big, NULL, 4 * (FIX_BLOCKS - FIX_SLAB_BLOCKS * 2 + 2));
    ck_assert_uint_eq(cached(), 4);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), p.step));
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    ck_assert_uint_eq(found(b, 9), 0); // its second block first, then its first
    ck_assert_uint_eq(found(c, 9), 8);
    ck_assert_uint_eq(found(a, 9), 8);
}
END_TEST

START_TEST(what_a_step_found_stays_under_pressure) {
    uint32_t a[16];
    bool may_wait = false;
    leave(ids(a, 9, 100), 8);
    uint64_t seq = fix_seq(&f), big = fix_seq(&f);
    opened o = open_ids(seq, a, 9);
    ck_assert_uint_eq(o.in.cached, 8);
    opened p = {.seq = big};
    ATTND_CK_ERR(try_open(&p, NULL, 4 * (FIX_BLOCKS - 2), &may_wait), ATTND_ENOSPC);
    ck_assert(may_wait);
    p = open_ids(big, NULL, 4 * (FIX_BLOCKS - 3)); // all that is left
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), p.step));
    commit_ids(&o, a, 9);
    ck_assert_uint_eq(found(a, 9), 8);
}
END_TEST

START_TEST(a_step_that_does_not_fit_with_copied_rows_does_without) {
    uint32_t a[4 * FIX_BLOCKS];
    leave(ids(a, 4 * FIX_BLOCKS, 5), 4 * FIX_BLOCKS);
    ck_assert_uint_eq(cached(), FIX_BLOCKS);
    a[4 * FIX_BLOCKS - 2] = 1; // of the last block, two are as they were
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, a, 4 * FIX_BLOCKS);
    ck_assert_uint_eq(o.in.cached, 4 * (FIX_BLOCKS - 1));
    ck_assert_uint_eq(o.num_copies, 0);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
}
END_TEST

START_TEST(a_truncated_sequence_copies_before_it_writes_into_a_cached_block) {
    uint32_t t[16];
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, ids(t, 16, 30), 12);
    commit_ids(&o, t, 12);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, 6, &f.info));
    ck_assert_uint_eq(cached(), 1);
    uint32_t more[] = {1, 2};
    o = open_ids(seq, more, 2);
    ck_assert_uint_eq(o.num_copies, 1);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    o = open_ids(seq, more, 2);
    commit_ids(&o, more, 2);
    ck_assert_uint_eq(found(t, 13), 12);
    t[6] = 1, t[7] = 2;
    ck_assert_uint_eq(found(t, 13), 8);
}
END_TEST

START_TEST(a_model_without_users_stays_while_its_prefixes_do) {
    uint32_t t[16], again;
    leave(ids(t, 9, 1), 8);
    ATTND_CK_OK(kv_model_close(f.kv, f.model));
    ck_assert_uint_eq(cached(), 2);
    kv_model_spec spec = fix_spec("m", f.tenant);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &again, &f.info));
    ck_assert_uint_eq(again, f.model);
    ck_assert_uint_eq(found(t, 9), 8);
    ATTND_CK_OK(kv_model_close(f.kv, f.model));
    spec.digest[0] = 1; // other weights under the name
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    ck_assert_uint_eq(cached(), 0);
    ck_assert_uint_eq(found(t, 9), 0);
}
END_TEST

START_TEST(a_quota_counts_cached_blocks_and_evicts_ones_own) {
    uint32_t t[64];
    uint32_t tenant;
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 10, &tenant));
    leave(ids(t, 24, 1), 24);
    ck_assert_uint_eq(cached(), 6);
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, NULL, 4 * 8);
    ck_assert_uint_eq(cached(), 2);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    ck_assert_uint_eq(found(t, 24), 8);
}
END_TEST

START_TEST(a_slab_of_cached_blocks_goes_to_another_class) {
    uint32_t t[4 * FIX_BLOCKS], wide;
    leave(ids(t, 4 * FIX_BLOCKS, 1), 4 * FIX_BLOCKS);
    kv_model_spec spec = fix_spec("wide", f.tenant);
    spec.groups[0] = fix_group(2);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &wide, &f.info));
    f.model = wide;
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, NULL, 4);
    ck_assert_uint_eq(cached(), FIX_BLOCKS - FIX_SLAB_BLOCKS);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
}
END_TEST

START_TEST(a_floor_is_left_to_its_tenant) {
    uint32_t t[4 * FIX_BLOCKS], other, mine = f.model;
    leave(ids(t, 40, 1), 40);
    ATTND_CK_OK(kv_tenant_cache(f.kv, f.tenant, 4, 0));
    ATTND_CK_OK(kv_tenant_set(f.kv, "u", 0, &other));
    kv_model_spec spec = fix_spec("m", other);
    uint64_t session = f.session;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    ATTND_CK_OK(kv_session_open(f.kv, other, (const uint8_t[KV_SECRET_BYTES]){1}, &f.session));
    uint64_t seq = fix_seq(&f);
    bool may_wait = false;
    opened o = {.seq = seq};
    ATTND_CK_ERR(try_open(&o, NULL, 4 * (FIX_BLOCKS - 3), &may_wait), ATTND_ENOSPC);
    o = open_ids(seq, NULL, 4 * (FIX_BLOCKS - 4));
    ck_assert_uint_eq(cached(), 4);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    f.session = session;
    f.model = mine;
    ck_assert_uint_eq(found(t, 40), 16);
}
END_TEST

// enter makes another tenant's model of that many layers, and a session, the fixture's.
static void enter(const char *name, uint32_t layers) {
    uint32_t other;
    ATTND_CK_OK(kv_tenant_set(f.kv, "u", 0, &other));
    kv_model_spec spec = fix_spec(name, other);
    spec.groups[0] = fix_group(layers);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    ATTND_CK_OK(kv_session_open(f.kv, other, (const uint8_t[KV_SECRET_BYTES]){1}, &f.session));
}

// 128 blocks in a row, 16 a slab: only the last slab comes free without the others.
START_TEST(a_floor_holds_when_a_slab_changes_its_class) {
    uint32_t t[4 * FIX_BLOCKS];
    bool may_wait = false;
    leave(ids(t, 4 * FIX_BLOCKS, 1), 4 * FIX_BLOCKS);
    uint32_t tenant = f.tenant;
    ATTND_CK_OK(kv_tenant_cache(f.kv, tenant, FIX_BLOCKS - FIX_SLAB_BLOCKS + 1, 0));
    enter("wide", 2);
    opened o = {.seq = fix_seq(&f)};
    ATTND_CK_ERR(try_open(&o, NULL, 4, &may_wait), ATTND_ENOSPC);
    ck_assert_uint_eq(cached(), FIX_BLOCKS); // and nothing went for nothing
    ATTND_CK_OK(kv_tenant_cache(f.kv, tenant, FIX_BLOCKS - FIX_SLAB_BLOCKS, 0));
    ATTND_CK_ERR(try_open(&o, NULL, 4 * FIX_SLAB_BLOCKS, &may_wait), ATTND_ENOSPC); // two slabs
    ck_assert_uint_eq(cached(), FIX_BLOCKS);
    o = open_ids(o.seq, NULL, 4);
    ck_assert_uint_eq(cached(), FIX_BLOCKS - FIX_SLAB_BLOCKS);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
}
END_TEST

// The tenant may lose ten blocks, of two models that have twenty each.
START_TEST(nothing_goes_for_a_step_that_floors_leave_no_room_for) {
    uint32_t t[80], first = f.model;
    bool may_wait = false;
    leave(ids(t, 80, 1), 80);
    kv_model_spec spec = fix_spec("second", f.tenant);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    leave(t, 80);
    ck_assert_uint_ne(first, f.model);
    ATTND_CK_OK(kv_tenant_cache(f.kv, f.tenant, 30, 0));
    enter("m", 1);
    opened o = {.seq = fix_seq(&f)};
    ATTND_CK_ERR(try_open(&o, NULL, 4 * (FIX_BLOCKS - 40 + 11), &may_wait), ATTND_ENOSPC);
    ck_assert_uint_eq(cached(), 40);
    o = open_ids(o.seq, NULL, 4 * (FIX_BLOCKS - 40 + 10));
    ck_assert_uint_eq(cached(), 30);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
}
END_TEST

START_TEST(what_has_a_lower_priority_goes_first) {
    uint32_t a[16], b[16];
    ATTND_CK_ERR(kv_tenant_cache(f.kv, f.tenant, 0, KV_MAX_PRIORITY + 1), ATTND_EINVAL);
    ATTND_CK_OK(kv_tenant_cache(f.kv, f.tenant, 0, 7));
    leave(ids(a, 9, 100), 8);
    ATTND_CK_OK(kv_tenant_cache(f.kv, f.tenant, 0, 3));
    leave(ids(b, 9, 200), 8); // used last
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, NULL, 4 * (FIX_BLOCKS - 2));
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    ck_assert_uint_eq(found(a, 9), 8);
    ck_assert_uint_eq(found(b, 9), 0);
}
END_TEST

// leave_at is leave with a sequence of that priority.
static void leave_at(uint32_t priority, const uint32_t *tokens, uint32_t num) {
    uint64_t seq;
    ATTND_CK_OK(kv_seq_create_priority(f.kv, fix_rq(&f), f.model, priority, &seq, &f.info));
    opened o = open_ids(seq, tokens, num);
    commit_ids(&o, tokens, num);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
}

// press evicts until only num blocks are free of what steps have.
static void press(uint32_t num) {
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, NULL, 4 * num);
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
}

START_TEST(a_sequence_of_a_lower_priority_leaves_what_goes_first) {
    uint32_t a[16], b[16], c[16];
    uint64_t seq;
    kv_seq_info info;
    ATTND_CK_ERR(
        kv_seq_create_priority(f.kv, fix_rq(&f), f.model, KV_MAX_PRIORITY + 1, &seq, &f.info),
        ATTND_EINVAL);
    ck_assert_str_eq(f.info.field, "priority");
    ATTND_CK_OK(kv_tenant_cache(f.kv, f.tenant, 0, 7));
    leave_at(0, ids(a, 9, 100), 8);
    leave_at(3, ids(b, 9, 200), 8);
    leave_at(KV_MAX_PRIORITY, ids(c, 9, 300), 8); // as high as the tenant's, no higher
    press(FIX_BLOCKS - 4);
    ck_assert_uint_eq(found(b, 9), 0); // though a was used before it
    ck_assert_uint_eq(found(c, 9), 8);
    ck_assert_uint_eq(found(a, 9), 8); // last
    press(FIX_BLOCKS - 2);
    ck_assert_uint_eq(found(c, 9), 0);
    ck_assert_uint_eq(found(a, 9), 8);
    ATTND_CK_OK(kv_seq_create_priority(f.kv, fix_rq(&f), f.model, 3, &seq, &f.info));
    uint64_t forked;
    uint32_t committed;
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seq, &forked, &committed, &f.info));
    ATTND_CK_OK(kv_seq_get(f.kv, f.session, forked, &info));
    ck_assert_uint_eq(info.priority, 3);
}
END_TEST

START_TEST(what_a_sequence_of_a_higher_priority_finds_is_raised_to_it) {
    uint32_t a[4 * 100], b[16];
    ATTND_CK_OK(kv_tenant_cache(f.kv, f.tenant, 0, 7));
    leave_at(3, ids(a, 4 * 80, 1000), 4 * 80);
    ck_assert_uint_eq(found(a, 4 * 80), 4 * 79 + 3); // and raises all that are whole
    leave_at(3, ids(b, 9, 200), 8);
    press(FIX_BLOCKS - 79);
    ck_assert_uint_eq(found(b, 9), 0); // both of it and the last one of a, which was only copied
    ck_assert_uint_eq(found(a, 4 * 80), 4 * 79);
    leave_at(5, a, 4 * 80 - 1); // lowers nothing
    for (uint32_t n = 0; n < f.kv->lists->nodes.used; n++) {
        uint32_t owner = f.kv->nodes[n].owner;
        ck_assert(owner == 0 || owner >> KV_OWNER_BITS == 7);
    }
}
END_TEST

START_TEST(a_kept_sequence_pins_its_prefix_for_its_time) {
    uint32_t a[16];
    bool may_wait;
    uint64_t seq = fix_seq(&f), kept = f.session;
    opened o = open_ids(seq, ids(a, 9, 100), 8);
    commit_ids(&o, a, 8);
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "prompt", 1000, &f.info));
    ATTND_CK_OK(kv_session_close(f.kv, kept, 5000));
    ATTND_CK_OK(kv_session_open(f.kv, f.tenant, (const uint8_t[KV_SECRET_BYTES]){2}, &f.session));
    o = (opened){.seq = fix_seq(&f)};
    ATTND_CK_ERR(try_open(&o, NULL, 4 * (FIX_BLOCKS - 1), &may_wait), ATTND_ENOSPC);
    ck_assert_uint_eq(found(a, 9), 8);
    ck_assert_uint_eq(kv_expire(f.kv, 5999), 6000);
    ATTND_CK_ERR(try_open(&o, NULL, 4 * (FIX_BLOCKS - 1), &may_wait), ATTND_ENOSPC);
    kv_expire(f.kv, 6000);
    ck_assert_uint_eq(found(a, 9), 8); // nobody needed it yet
    o = open_ids(o.seq, NULL, 4 * (FIX_BLOCKS - 1));
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    ck_assert_uint_eq(found(a, 9), 4);
}
END_TEST

// The parent fills the block that a fork of the same time shares, so that it becomes a node, of
// which the fork is no user; then the parent goes.  The node makes way for the fork's step, which
// so writes in place, and needs no copy.
START_TEST(a_node_of_a_block_that_a_fork_shares_may_go) {
    uint32_t t[16], committed, blocks, quota;
    char name[KV_NAME_BYTES];
    uint64_t seq = fix_seq(&f), forked;
    opened o = open_ids(seq, ids(t, 16, 30), 6);
    commit_ids(&o, t, 6);
    o = open_ids(seq, t + 6, 6);
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seq, &forked, &committed, &f.info));
    commit_ids(&o, t + 6, 6);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    leave(ids(t, 4, 500), 4); // used last
    ck_assert_uint_eq(cached(), 2);
    o = open_ids(forked, NULL, 4 * (FIX_BLOCKS - 4) + 2); // but for these and a copy
    ATTND_CK_OK(kv_tenant_get(f.kv, f.tenant, name, &blocks, &quota));
    ck_assert_uint_eq(blocks, fix_in_use(&f));
    ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), o.step));
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), forked, &f.info));
}
END_TEST

START_TEST(a_fork_goes_on_by_itself) {
    uint32_t t[16], committed, more[] = {1, 2, 3};
    uint64_t seq = fix_seq(&f), forked;
    opened o = open_ids(seq, ids(t, 16, 30), 6);
    commit_ids(&o, t, 6);
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seq, &forked, &committed, &f.info));
    o = open_ids(forked, more, 3);
    commit_ids(&o, more, 3);
    o = open_ids(seq, t + 6, 4);
    commit_ids(&o, t + 6, 4);
    ck_assert_uint_eq(found(t, 16), 8);
    memcpy(t + 6, more, sizeof(more));
    ck_assert_uint_eq(found(t, 16), 8);
}
END_TEST

START_TEST(ids_of_a_model_without_a_tree_are_refused) {
    uint32_t t[16];
    bool may_wait;
    kv_model_spec spec = fix_spec("long", f.tenant);
    spec.groups[0].block_tokens = FIX_BLOCK_TOKENS + 1;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    opened o = {.seq = fix_seq(&f)};
    ATTND_CK_ERR(try_open(&o, ids(t, 4, 1), 4, &may_wait), ATTND_ENOTSUP);
    ck_assert_str_eq(f.info.field, "tokens");
}
END_TEST

static void recover(kv_recovered *got) {
    const kv_opts opts = options();
    int fd = dup(kv_ledger_fd(f.kv));
    kv_free(f.kv);
    ATTND_CK_OK(kv_recover(&f.kv, &f.arena, &opts, fd, 0, got, &f.info));
    ck_assert_msg(kv_check_full(f.kv, &f.info), "%s", f.info.text);
}

// Two sequences compute the same two blocks at the same time, and one of them goes on by two
// blocks. When the last node is damaged, it is still a user of the third one.
START_TEST(a_chain_is_found_again_behind_blocks_computed_twice) {
    uint32_t t[16];
    kv_recovered got;
    uint64_t a = fix_seq(&f), b = fix_seq(&f);
    opened of_a = open_ids(a, ids(t, 16, 1), 8), of_b = open_ids(b, t, 8);
    commit_ids(&of_a, t, 8);
    commit_ids(&of_b, t, 8);
    of_b = open_ids(b, t + 8, 8);
    commit_ids(&of_b, t + 8, 8);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), a, &f.info));
    kv_node_ids(f.kv, 3)[1] ^= 1;
    recover(&got);
    ck_assert_uint_eq(got.lost_prefix_blocks, 1);
    ck_assert_uint_eq(f.kv->seqs[(uint32_t)b].chain, 3);
    ck_assert_uint_eq(f.kv->seq_aux[(uint32_t)b].depth, 3);
    ck_assert_uint_eq(found(t, 16), 12);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), b, &f.info));
}
END_TEST

START_TEST(the_cache_survives_a_restart) {
    uint32_t t[16], u[16];
    kv_recovered got;
    leave(ids(t, 12, 1), 12);
    uint64_t seq = fix_seq(&f);
    opened o = open_ids(seq, ids(u, 16, 70), 6);
    commit_ids(&o, u, 6);
    recover(&got);
    ck_assert_uint_eq(got.prefix_blocks, 4);
    ck_assert_uint_eq(got.lost_prefix_blocks, 0);
    ck_assert_uint_eq(cached(), 3);
    ck_assert_uint_eq(found(t, 12), 11);
    o = open_ids(seq, u + 6, 6); // goes on where it was
    commit_ids(&o, u + 6, 6);
    ck_assert_uint_eq(found(u, 16), 12);
}
END_TEST

START_TEST(damaged_ids_lose_the_block_and_what_is_behind_it) {
    uint32_t t[16];
    kv_recovered got;
    leave(ids(t, 16, 1), 16);
    kv_node_ids(f.kv, 1)[2] ^= 8;
    recover(&got);
    ck_assert_uint_eq(got.prefix_blocks, 1);
    ck_assert_uint_eq(got.lost_prefix_blocks, 3);
    ck_assert_uint_eq(cached(), 1);
    ck_assert_uint_eq(found(t, 16), 4);
}
END_TEST

START_TEST(damaged_nodes_are_lost) {
    uint32_t t[16];
    kv_recovered got;
    leave(ids(t, 16, 1), 16);
    f.kv->nodes[0].entry ^= 1;
    recover(&got);
    ck_assert_uint_eq(got.bad_units, 1);
    ck_assert_uint_eq(got.prefix_blocks, 0);
    ck_assert_uint_eq(got.lost_prefix_blocks, 4);
    ck_assert_uint_eq(cached(), 0);
    ck_assert_uint_eq(found(t, 16), 0);
}
END_TEST

// A node may lack a block of a group with a window: one of which an entry is damaged does, and what
// would see it is not found until the block is there again.
START_TEST(damaged_nodes_of_a_model_with_a_window_lack_blocks) {
    uint32_t t[16];
    kv_recovered got;
    kv_model_spec spec = fix_spec("windowed", f.tenant);
    spec.num_groups = 2;
    spec.groups[1] = fix_group(1);
    spec.groups[0].window_left = spec.groups[1].window_left = 4;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    leave(ids(t, 16, 1), 16);
    *kv_node_entry(f.kv, 2, 1) ^= 1; // its unit has all that group 1 has
    recover(&got);
    ck_assert_uint_eq(got.bad_units, 1);
    ck_assert_uint_eq(got.prefix_blocks, 4);
    ck_assert_uint_eq(got.lost_prefix_blocks, 0);
    ck_assert_uint_eq(cached(), 4);
    ck_assert_uint_eq(found(t, 16), 0);
    leave(t, 16);
    ck_assert_uint_eq(cached(), 8);
    ck_assert_uint_eq(found(t, 16), 15);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_prefix");
    TCase *t = tcase_create("steps");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_test(t, a_prefix_is_found_whole_blocks_and_part_of_one_more);
    tcase_add_test(t, blocks_that_are_not_full_are_not_found);
    tcase_add_test(t, nothing_is_found_before_the_commit_nor_after_an_abort);
    tcase_add_test(t, tokens_that_come_one_by_one_make_blocks_too);
    tcase_add_test(t, tokens_without_ids_end_it);
    tcase_add_test(t, copied_rows_are_those_of_the_cached_block);
    tcase_add_test(t, prefixes_of_one_hash_are_told_apart);
    tcase_add_test(t, models_and_tenants_share_nothing);
    tcase_add_test(t, a_truncated_sequence_copies_before_it_writes_into_a_cached_block);
    tcase_add_test(t, a_fork_goes_on_by_itself);
    tcase_add_test(t, a_node_of_a_block_that_a_fork_shares_may_go);
    tcase_add_test(t, ids_of_a_model_without_a_tree_are_refused);
    suite_add_tcase(s, t);
    t = tcase_create("eviction");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_test(t, the_least_recently_used_leaf_goes_first);
    tcase_add_test(t, what_a_step_found_stays_under_pressure);
    tcase_add_test(t, a_step_that_does_not_fit_with_copied_rows_does_without);
    tcase_add_test(t, a_model_without_users_stays_while_its_prefixes_do);
    tcase_add_test(t, a_quota_counts_cached_blocks_and_evicts_ones_own);
    tcase_add_test(t, a_slab_of_cached_blocks_goes_to_another_class);
    tcase_add_test(t, a_floor_is_left_to_its_tenant);
    tcase_add_test(t, a_floor_holds_when_a_slab_changes_its_class);
    tcase_add_test(t, nothing_goes_for_a_step_that_floors_leave_no_room_for);
    tcase_add_test(t, what_has_a_lower_priority_goes_first);
    tcase_add_test(t, a_sequence_of_a_lower_priority_leaves_what_goes_first);
    tcase_add_test(t, what_a_sequence_of_a_higher_priority_finds_is_raised_to_it);
    tcase_add_test(t, a_kept_sequence_pins_its_prefix_for_its_time);
    suite_add_tcase(s, t);
    t = tcase_create("restart");
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_test(t, a_chain_is_found_again_behind_blocks_computed_twice);
    tcase_add_test(t, the_cache_survives_a_restart);
    tcase_add_test(t, damaged_ids_lose_the_block_and_what_is_behind_it);
    tcase_add_test(t, damaged_nodes_are_lost);
    tcase_add_test(t, damaged_nodes_of_a_model_with_a_window_lack_blocks);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
