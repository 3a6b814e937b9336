// Tenants of a cache that starts go on with, whatever the configuration says by then.
#include "server/srv_core.h"

#include <stdio.h>
#include <unistd.h>

#include "tests/check_main.h"

static srv_conf conf;
static kv_arena arena;
static srv_core core;
static int ledger;
static attnd_errinfo info;

static void set_sched(srv_backend *b, sched *s) {
    (void)b;
    (void)s;
}

static void launch(void *ctx, sched_launch *l) {
    (void)ctx;
    (void)l;
    ck_abort_msg("nothing is submitted");
}

static const srv_backend_ops ops = {.set_sched = set_sched};
static const srv_core_hooks hooks;
static srv_backend backend;

static void add_tenant(srv_conf *c, const char *name) {
    ck_assert_msg(srv_conf_tenant_add(c, name, &info) == ATTND_OK, "%s", info.text);
}

static void setup(void) {
    srv_conf_init(&conf); // it has the tenant "default"
    ck_assert_uint_eq(conf.num_tenants, 1);
    ATTND_CK_OK(srv_conf_set(&conf, "cache.slab", "1MiB", &info));
    ATTND_CK_OK(kv_arena_open_host(&arena, 2 << 20, &info));
    backend = (srv_backend){
        .ops = &ops,
        .sched = {.launch = launch, .pool = arena.base, .pool_bytes = arena.bytes, .depth = 1}};
    ledger = -1;
}

static void teardown(void) {
    close(ledger);
    kv_arena_close_host(&arena);
}

static attnd_err start(const srv_conf *with) {
    ATTND_CK_OK(srv_core_init(&core, with, &arena, ledger, &hooks, &info));
    return srv_core_set_backend(&core, &backend, &info);
}

static void stop(void) {
    ledger = dup(kv_ledger_fd(core.kv));
    srv_core_fini(&core);
}

START_TEST(a_tenant_that_the_cache_has_no_room_for_is_not_configured) {
    srv_conf first = conf, second = conf;
    char name[16];
    for (int i = 1; i <= 62; i++) { // 63 with "default"
        snprintf(name, sizeof(name), "old%d", i);
        add_tenant(&first, name);
    }
    ATTND_CK_OK(start(&first));
    stop();
    add_tenant(&second, "b"); // the 64th that the cache knows
    ATTND_CK_OK(start(&second));
    add_tenant(&core.conf, "c");
    add_tenant(&core.conf, "old7"); // which the cache knows, but it is behind one that it does not
    ATTND_CK_ERR(srv_core_apply_tenants(&core, &info), ATTND_ENOSPC);
    ck_assert_str_eq(info.field, "tenant");
    ck_assert_str_eq(info.text, "tenant c cannot be made");
    ck_assert_uint_eq(core.conf.num_tenants, 2);
    ck_assert_str_eq(core.conf.tenants[0].name, "default");
    ck_assert_str_eq(core.conf.tenants[1].name, "b");
    srv_conf left = core.conf;
    stop();
    ATTND_CK_OK(start(&left)); // as the worker after a crash does
    add_tenant(&core.conf, "old7");
    ATTND_CK_OK(srv_core_apply_tenants(&core, &info));
    // Each is the tenant that it was: "default" and old1 to old62 came first, in that order.
    ck_assert_uint_eq(core.tenants[0], 0);
    ck_assert_uint_eq(core.tenants[1], 63);
    ck_assert_uint_eq(core.tenants[2], 7);
    stop();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_core");
    TCase *tc = tcase_create("tenants");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_tenant_that_the_cache_has_no_room_for_is_not_configured);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
