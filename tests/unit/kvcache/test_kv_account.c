// Accounting: what is reported, and that damage to any derived state is seen and named.
#include "kvcache/kv_pool.h"
#include "tests/unit/kvcache/kv_faults.h"
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fault calloc_fault = KV_NO_FAULT;
KV_FAULT_CALLOC(&calloc_fault)

static kv_fixture f;
static uint64_t a, b;

// 5 blocks in use: a has 3, b shares them and has 2 more.
static void setup(void) {
    fix_init(&f);
    uint32_t committed;
    a = fix_seq(&f);
    fix_append(&f, a, 12);
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), a, &b, &committed, &f.info));
    fix_append(&f, b, 8);
}

static void teardown(void) {
    fix_fini(&f);
}

START_TEST(kv_account_reports_blocks_slabs_and_bytes) {
    kv_info info;
    kv_get_info(f.kv, &info);
    ck_assert_uint_eq(info.total, 16);
    ck_assert_uint_eq(info.in_use, 5);
    ck_assert_uint_eq(info.free, 11);
    ck_assert_uint_eq(info.cached, 0);
    ck_assert_uint_eq(info.arena_bytes, 32768);
    ck_assert_uint_eq(info.slab_bytes, 4096);
    ck_assert_uint_eq(info.in_use_bytes, 1280);
    ck_assert_uint_eq(info.slabs, 8);
    ck_assert_uint_eq(info.unassigned_slabs, 7);
    ck_assert_uint_eq(info.num_classes, 1);
    ck_assert_uint_eq(info.seqs, 2);
    ck_assert_uint_eq(info.models, 1);
    ck_assert_uint_eq(info.sessions, 1);
    ck_assert_uint_eq(info.steps, 0);
    ck_assert_uint_eq(info.mismatches, 0);
    kv_class_info class;
    ATTND_CK_OK(kv_class_get(f.kv, 0, &class));
    ck_assert_uint_eq(class.block_bytes, 256);
    ck_assert_uint_eq(class.slabs, 1);
    ck_assert_uint_eq(class.total, 16);
    ATTND_CK_ERR(kv_class_get(f.kv, 1, &class), ATTND_ENOENT);
    ATTND_CK_ERR(kv_class_get(f.kv, UINT32_MAX, &class), ATTND_ENOENT);
}
END_TEST

// expect_seen checks that the full check fails now and not after *word is restored.
static void expect_seen(uint32_t *word, uint32_t wrong) {
    uint32_t right = *word;
    *word = wrong;
    f.info.text[0] = '\0';
    bool seen = !kv_check_full(f.kv, &f.info);
    ck_assert_msg(seen, "%u instead of %u is not seen", wrong, right);
    ck_assert_str_ne(f.info.text, "");
    *word = right;
    bool good = kv_check_full(f.kv, &f.info);
    ck_assert_msg(good, "%s", f.info.text);
}

START_TEST(kv_check_full_sees_each_kind_of_damage) {
    uint32_t ia = (uint32_t)a, ib = (uint32_t)b;
    uint32_t *table = kv_table(f.kv, ia, 0);
    kv_class *class = &f.kv->classes[0];
    uint32_t slab = table[0] / FIX_SLAB_BLOCKS;
    expect_seen(&f.kv->seqs[ia].committed, 13);  // a block too many
    expect_seen(&f.kv->seqs[ib].committed, 0);   // blocks lost
    expect_seen(&f.kv->seqs[ia].state, KV_FREE); // a sequence lost
    expect_seen(&f.kv->seqs[ia].old_last[0], 1); // a copy without a step
    expect_seen(&f.kv->seqs[ia].tenant, 2);
    expect_seen(&table[0], table[1]);       // twice
    expect_seen(&table[0], UINT32_MAX);     // outside the arena
    expect_seen(&table[0], FIX_BLOCKS - 1); // in an unassigned slab
    expect_seen(&f.kv->refs[kv_pool_index(f.kv, table[0])], 3);
    expect_seen(&f.kv->slabs[slab].units, 2);
    expect_seen(&f.kv->slab_aux[slab].free, 10);
    expect_seen(&f.kv->slab_aux[slab].units, 0);
    expect_seen(&class->free, 10);
    expect_seen(&class->in_use, 6);
    expect_seen(&class->slabs, 2);
    expect_seen(&class->first_slab, 0);
    expect_seen(&f.kv->lists->slabs.live, 2);
    expect_seen(&f.kv->lists->seqs.live, 3);
    expect_seen(&f.kv->tenant_aux[f.tenant].blocks, 6);
    uint32_t *bits = (uint32_t *)(void *)&f.kv->bits[(uint64_t)slab * f.kv->free_words].free;
    expect_seen(bits, *bits ^ 1u << table[0] % FIX_SLAB_BLOCKS); // in use and free
    expect_seen(bits, *bits & ~(1u << 15));                      // neither
    uint32_t *sum = (uint32_t *)(void *)&f.kv->free_sum[(uint64_t)slab * f.kv->free_sums];
    expect_seen(sum, 0);
}
END_TEST

START_TEST(kv_check_fast_counts_mismatches) {
    ck_assert(kv_check_fast(f.kv));
    uint32_t *counters[] = {&f.kv->classes[0].free, &f.kv->classes[0].in_use,
                            &f.kv->classes[0].slabs, &f.kv->lists->slabs.live,
                            &f.kv->tenant_aux[f.tenant].blocks};
    kv_info info;
    for (uint32_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
        ++*counters[i];
        ck_assert(!kv_check_fast(f.kv));
        --*counters[i];
        ck_assert(kv_check_fast(f.kv));
        kv_get_info(f.kv, &info);
        ck_assert_uint_eq(info.mismatches, i + 1);
    }
}
END_TEST

START_TEST(kv_check_full_without_memory_says_so) {
    for (int after = 0; after < 2; after++) {
        calloc_fault = (kv_fault){.after = after, .err = ENOMEM};
        ck_assert(!kv_check_full(f.kv, &f.info));
        ck_assert_ptr_nonnull(strstr(f.info.text, "memory"));
    }
    ck_assert(kv_check_full(f.kv, &f.info));
}
END_TEST

START_TEST(kv_account_balances_while_steps_are_open) {
    uint64_t step;
    bool may_wait;
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), a, 10, &f.info)); // into a shared block
    ATTND_CK_OK(fix_step(&f, a, 3, 7, &step, &may_wait));
    kv_info info;
    kv_get_info(f.kv, &info);
    ck_assert_uint_eq(info.in_use, 5 + 1 + 2); // the copy, and blocks for tokens 12 to 19
    ck_assert_uint_eq(info.steps, 1);
    ck_assert(kv_check_fast(f.kv));
    ck_assert_msg(kv_check_full(f.kv, &f.info), "%s", f.info.text);
    fix_commit(&f, step, 3);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_account");
    TCase *t = tcase_create("account");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_account_reports_blocks_slabs_and_bytes);
    tcase_add_test(t, kv_check_full_sees_each_kind_of_damage);
    tcase_add_test(t, kv_check_fast_counts_mismatches);
    tcase_add_test(t, kv_check_full_without_memory_says_so);
    tcase_add_test(t, kv_account_balances_while_steps_are_open);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
