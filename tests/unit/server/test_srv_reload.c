// What a reload takes over, and what it leaves.
#include "server/srv_reload.h"

#include "tests/check_main.h"

static srv_conf conf, next;
static attnd_errinfo info;

static void setup(void) {
    srv_conf_init(&conf);
    srv_conf_init(&next);
}

static void set(srv_conf *c, const char *key, const char *value) {
    ck_assert_msg(srv_conf_set(c, key, value, &info) == ATTND_OK, "%s", info.text);
}

START_TEST(what_can_change_changes_and_the_rest_stays) {
    ck_assert(srv_conf_find("server.drain_timeout")->reloadable);
    ck_assert(!srv_conf_find("cache.memory")->reloadable);
    set(&next, "server.drain_timeout", "7s");
    set(&next, "cache.memory", "3GiB");
    uint64_t memory = conf.memory_bytes;
    srv_reload_take(&conf, &next);
    ck_assert_uint_eq(conf.drain_timeout_ms, 7000);
    ck_assert_uint_eq(conf.memory_bytes, memory);
}
END_TEST

START_TEST(what_a_file_no_longer_sets_is_the_default_again) {
    uint64_t before = conf.drain_timeout_ms;
    set(&conf, "server.drain_timeout", "7s");
    srv_reload_take(&conf, &next);
    ck_assert_uint_eq(conf.drain_timeout_ms, before);
}
END_TEST

START_TEST(tenants_come_and_do_not_go) {
    set(&conf, "tenant old.share", "5");
    set(&next, "tenant fresh.share", "3");
    set(&next, "tenant fresh.quota_blocks", "9");
    srv_reload_take(&conf, &next);
    ck_assert_uint_eq(conf.num_tenants, 3); // with default
    ck_assert_uint_eq(srv_conf_tenant_find(&conf, "old")->share, 5);
    ck_assert_uint_eq(srv_conf_tenant_find(&conf, "fresh")->share, 3);
    ck_assert_uint_eq(srv_conf_tenant_find(&conf, "fresh")->quota_blocks, 9);
}
END_TEST

START_TEST(a_tenant_without_room_is_left_out) {
    char key[64];
    for (int i = 1; i < SRV_CONF_MAX_TENANTS; i++) {
        snprintf(key, sizeof(key), "tenant t%d.share", i);
        set(&conf, key, "2");
    }
    set(&next, "tenant one_too_many.share", "3");
    set(&next, "server.drain_timeout", "7s");
    srv_reload_take(&conf, &next);
    ck_assert_uint_eq(conf.num_tenants, SRV_CONF_MAX_TENANTS);
    ck_assert_ptr_null(srv_conf_tenant_find(&conf, "one_too_many"));
    ck_assert_uint_eq(conf.drain_timeout_ms, 7000); // and the others are taken
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_reload");
    TCase *tc = tcase_create("reload");
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, what_can_change_changes_and_the_rest_stays);
    tcase_add_test(tc, what_a_file_no_longer_sets_is_the_default_again);
    tcase_add_test(tc, tenants_come_and_do_not_go);
    tcase_add_test(tc, a_tenant_without_room_is_left_out);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
