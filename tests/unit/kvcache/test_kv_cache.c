// Making a cache: every option out of range, and no memory for it.
#include "tests/unit/kvcache/kv_faults.h"
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fault calloc_fault = KV_NO_FAULT;
KV_FAULT_CALLOC(&calloc_fault)

enum { ARENA = FIX_BLOCKS * KV_BLOCK_UNIT };

static const kv_arena arena = {.bytes = ARENA, .fd = -1, .on_device = true};
static attnd_errinfo info;

static attnd_err create(const kv_opts *opts) {
    kv_cache *kv = NULL;
    attnd_err err = kv_create(&kv, &arena, opts, &info);
    ck_assert((err == ATTND_OK) == (kv != NULL));
    kv_free(kv);
    return err;
}

START_TEST(kv_create_names_the_option_that_is_out_of_range) {
    const struct {
        size_t offset;
        const char *name;
    } fields[] = {
        {offsetof(kv_opts, max_blocks), "max_blocks"},
        {offsetof(kv_opts, max_seqs), "max_seqs"},
        {offsetof(kv_opts, max_seq_blocks), "max_seq_blocks"},
        {offsetof(kv_opts, max_models), "max_models"},
        {offsetof(kv_opts, max_tenants), "max_tenants"},
        {offsetof(kv_opts, max_sessions), "max_sessions"},
        {offsetof(kv_opts, max_steps), "max_steps"},
        {offsetof(kv_opts, max_step_seqs), "max_step_seqs"},
    };
    const uint32_t bad[] = {0, UINT32_C(1) << 31, UINT32_MAX};
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        for (size_t b = 0; b < 3; b++) {
            kv_opts opts = fix_opts();
            memcpy((char *)&opts + fields[i].offset, &bad[b], sizeof(bad[b]));
            ATTND_CK_ERR(create(&opts), ATTND_EINVAL);
            ck_assert_str_eq(info.field, fields[i].name);
        }
    }
}
END_TEST

START_TEST(kv_create_refuses_slabs_that_do_not_fit) {
    const uint64_t bad[] = {0, 1, 257, KV_BLOCK_UNIT / 2, ARENA + KV_BLOCK_UNIT, UINT64_MAX};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        kv_opts opts = fix_opts();
        opts.slab_bytes = bad[i];
        ATTND_CK_ERR(create(&opts), ATTND_EINVAL);
        ck_assert_str_eq(info.field, "slab_bytes");
    }
    kv_opts opts = fix_opts();
    opts.max_blocks = FIX_SLABS - 1;
    ATTND_CK_ERR(create(&opts), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "max_blocks");
    opts.max_blocks++;
    ATTND_CK_OK(create(&opts));
}
END_TEST

START_TEST(kv_create_refuses_an_arena_past_32_bit_entries) {
    const kv_arena large = {.bytes = (UINT64_C(1) << 40) + KV_BLOCK_UNIT, .on_device = true};
    kv_opts opts = fix_opts();
    kv_cache *kv;
    opts.slab_bytes = 32 << 20;
    opts.max_blocks = 1 << 20;
    ATTND_CK_ERR(kv_create(&kv, &large, &opts, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "arena");
}
END_TEST

START_TEST(kv_create_refuses_a_ledger_that_is_too_large) {
    kv_opts opts = fix_opts();
    opts.max_seqs = opts.max_seq_blocks = INT32_MAX;
    ATTND_CK_ERR(create(&opts), ATTND_EINVAL);
    opts = fix_opts();
    opts.max_sessions = opts.max_steps = INT32_MAX;
    ATTND_CK_ERR(create(&opts), ATTND_EINVAL);
    opts = fix_opts();
    opts.max_step_seqs = (1 << 20) + 1;
    ATTND_CK_ERR(create(&opts), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "max_step_seqs");
    opts = fix_opts();
    opts.max_models = (1 << 20) + 1;
    ATTND_CK_ERR(create(&opts), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "max_models");
}
END_TEST

START_TEST(kv_create_without_memory_fails) {
    kv_opts opts = fix_opts();
    calloc_fault = (kv_fault){.after = 0, .err = ENOMEM};
    ATTND_CK_ERR(create(&opts), ATTND_ENOMEM);
    ATTND_CK_OK(create(&opts));
}
END_TEST

START_TEST(kv_create_starts_with_nothing_in_use) {
    kv_opts opts = fix_opts();
    kv_cache *kv;
    kv_info got;
    ATTND_CK_OK(kv_create(&kv, &arena, &opts, &info));
    kv_get_info(kv, &got);
    ck_assert_uint_eq(got.slabs, FIX_SLABS);
    ck_assert_uint_eq(got.unassigned_slabs, got.slabs);
    ck_assert_uint_eq(got.total + got.free + got.in_use + got.seqs + got.models + got.steps, 0);
    ck_assert(kv_check_fast(kv));
    ck_assert(kv_check_full(kv, &info));
    ck_assert_uint_eq(kv_expire(kv, UINT64_MAX), UINT64_MAX);
    kv_free(kv);
    kv_free(NULL);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_cache");
    TCase *t = tcase_create("create");
    tcase_add_test(t, kv_create_names_the_option_that_is_out_of_range);
    tcase_add_test(t, kv_create_refuses_slabs_that_do_not_fit);
    tcase_add_test(t, kv_create_refuses_an_arena_past_32_bit_entries);
    tcase_add_test(t, kv_create_refuses_a_ledger_that_is_too_large);
    tcase_add_test(t, kv_create_without_memory_fails);
    tcase_add_test(t, kv_create_starts_with_nothing_in_use);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
