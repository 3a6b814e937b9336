// Tenants and their quotas.
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;

static void setup(void) {
    fix_init(&f);
}

static void teardown(void) {
    fix_fini(&f);
}

START_TEST(kv_tenant_set_again_changes_the_quota) {
    uint32_t a, b, blocks, quota;
    char name[KV_NAME_BYTES];
    ATTND_CK_OK(kv_tenant_set(f.kv, "a", 5, &a));
    ATTND_CK_OK(kv_tenant_set(f.kv, "b", 6, &b));
    ck_assert_uint_ne(a, b);
    uint32_t again;
    ATTND_CK_OK(kv_tenant_set(f.kv, "a", 7, &again));
    ck_assert_uint_eq(again, a);
    ATTND_CK_OK(kv_tenant_get(f.kv, a, name, &blocks, &quota));
    ck_assert_str_eq(name, "a");
    ck_assert_uint_eq(blocks, 0);
    ck_assert_uint_eq(quota, 7);
}
END_TEST

START_TEST(kv_tenant_get_ends_behind_the_last) {
    uint32_t blocks, quota, n = 0;
    char name[KV_NAME_BYTES];
    while (kv_tenant_get(f.kv, n, name, &blocks, &quota) == ATTND_OK) {
        n++;
    }
    ck_assert_uint_eq(n, 1);
    ATTND_CK_ERR(kv_tenant_get(f.kv, UINT32_MAX, name, &blocks, &quota), ATTND_ENOENT);
}
END_TEST

START_TEST(kv_tenant_name_has_1_to_63_bytes) {
    char name[KV_NAME_BYTES + 1];
    uint32_t tenant = 99;
    memset(name, 'x', sizeof(name));
    name[KV_NAME_BYTES] = '\0';
    ATTND_CK_ERR(kv_tenant_set(f.kv, name, 0, &tenant), ATTND_EINVAL);
    ATTND_CK_ERR(kv_tenant_set(f.kv, "", 0, &tenant), ATTND_EINVAL);
    ck_assert_uint_eq(tenant, 99);
    name[KV_NAME_BYTES - 1] = '\0';
    ATTND_CK_OK(kv_tenant_set(f.kv, name, 0, &tenant));
}
END_TEST

START_TEST(kv_tenant_set_fails_when_all_exist) {
    uint32_t tenant;
    ATTND_CK_OK(kv_tenant_set(f.kv, "1", 0, &tenant));
    ATTND_CK_OK(kv_tenant_set(f.kv, "2", 0, &tenant));
    ATTND_CK_OK(kv_tenant_set(f.kv, "3", 0, &tenant));
    ATTND_CK_ERR(kv_tenant_set(f.kv, "4", 0, &tenant), ATTND_ENOSPC);
    ATTND_CK_OK(kv_tenant_set(f.kv, "3", 9, &tenant)); // an old one still changes
}
END_TEST

START_TEST(kv_tenant_quota_below_use_stops_growth_only) {
    uint64_t seq = fix_seq(&f), step;
    bool may_wait = true;
    fix_append(&f, seq, 16); // 4 blocks
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 2, &f.tenant));
    ATTND_CK_ERR(fix_step(&f, seq, 1, 0, &step, &may_wait), ATTND_ENOSPC);
    ck_assert(!may_wait);                                   // the sequence alone is over the quota
    ATTND_CK_OK(fix_step(&f, seq, 0, 0, &step, &may_wait)); // reading needs nothing
    fix_commit(&f, step, 0);
    ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), seq, 3, &f.info));
    fix_append(&f, seq, 5); // 2 blocks
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_tenant");
    TCase *t = tcase_create("tenant");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_tenant_set_again_changes_the_quota);
    tcase_add_test(t, kv_tenant_get_ends_behind_the_last);
    tcase_add_test(t, kv_tenant_name_has_1_to_63_bytes);
    tcase_add_test(t, kv_tenant_set_fails_when_all_exist);
    tcase_add_test(t, kv_tenant_quota_below_use_stops_growth_only);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
