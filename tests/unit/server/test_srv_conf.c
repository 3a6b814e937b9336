// The configuration: every type of value, limits, names, the file with its line numbers, and that
// what is dumped reads back as itself.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/srv_conf.h"
#include "tests/check_main.h"

static srv_conf conf;
static attnd_errinfo info;
static srv_conf_errors errors;
static char path[64];

static void setup(void) {
    srv_conf_init(&conf);
    memset(&info, 0, sizeof(info));
    memset(&errors, 0, sizeof(errors));
    strcpy(path, "/tmp/attnd_conf_XXXXXX");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    close(fd);
}

static void teardown(void) {
    unlink(path);
}

static attnd_err load(const char *text) {
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    fputs(text, f);
    fclose(f);
    memset(&errors, 0, sizeof(errors));
    return srv_conf_load(&conf, path, &errors);
}

static void ck_text(const char *part) {
    ck_assert_msg(strstr(info.text, part), "\"%s\" is not in \"%s\"", part, info.text);
}

// ck_error wants a part in an error of the file.
static void ck_error(uint32_t i, const char *part) {
    ck_assert_uint_gt(errors.num, i);
    ck_assert_msg(strstr(errors.text[i], part), "\"%s\" is not in \"%s\"", part, errors.text[i]);
}

START_TEST(defaults_are_the_tables) {
    ck_assert_uint_eq(conf.memory_bytes, 1ull << 30);
    ck_assert_uint_eq(conf.slab_bytes, 32ull << 20);
    ck_assert_uint_eq(conf.message_bytes, 64ull << 20);
    ck_assert_uint_eq(conf.socket_mode, 0660);
    ck_assert_uint_eq(conf.admin_mode, 0600);
    ck_assert_uint_eq(conf.drain_timeout_ms, 30000);
    ck_assert_uint_eq(conf.in_flight, 64);
    ck_assert_str_eq(conf.listen, "ipc:///run/attnd/attnd.sock");
    ck_assert_str_eq(conf.log_level, "info");
    ck_assert(!conf.deterministic);
    ck_assert_uint_eq(conf.num_tenants, 1);
    ck_assert_str_eq(conf.tenants[0].name, "default");
    ck_assert_uint_eq(conf.tenants[0].share, 1);
    ATTND_CK_OK(srv_conf_check(&conf, &errors));
}
END_TEST

START_TEST(sizes_times_and_modes_have_units) {
    ATTND_CK_OK(srv_conf_set(&conf, "cache.memory", "3GiB", &info));
    ck_assert_uint_eq(conf.memory_bytes, 3ull << 30);
    ATTND_CK_OK(srv_conf_set(&conf, "cache.memory", "1048576", &info));
    ck_assert_uint_eq(conf.memory_bytes, 1048576);
    ATTND_CK_OK(srv_conf_set(&conf, "limits.message", "512KiB", &info));
    ck_assert_uint_eq(conf.message_bytes, 524288);
    ATTND_CK_OK(srv_conf_set(&conf, "server.drain_timeout", "250ms", &info));
    ck_assert_uint_eq(conf.drain_timeout_ms, 250);
    ATTND_CK_OK(srv_conf_set(&conf, "server.drain_timeout", "7s", &info));
    ck_assert_uint_eq(conf.drain_timeout_ms, 7000);
    ATTND_CK_OK(srv_conf_set(&conf, "server.socket_mode", "0777", &info));
    ck_assert_uint_eq(conf.socket_mode, 511);
    ATTND_CK_OK(srv_conf_set(&conf, "compute.deterministic", "on", &info));
    ck_assert(conf.deterministic);
}
END_TEST

START_TEST(bad_values_are_refused_and_change_nothing) {
    static const char *const bad[][2] = {
        {"cache.memory", "-1"},
        {"cache.memory", ""},
        {"cache.memory", "12XiB"},
        {"cache.memory", "12 GiB"},
        {"cache.memory", "1023KiB"},
        {"cache.memory", "99999999999999999999"},
        {"cache.memory", "17592186044416GiB"},
        {"limits.in_flight", "0"},
        {"limits.in_flight", "1025"},
        {"limits.in_flight", "4KiB"},
        {"server.drain_timeout", "1h"},
        {"server.socket_mode", "0999"},
        {"server.log_level", "loud"},
        {"server.log_level", ""},
        {"server.log_level", "error warn"},
        {"compute.deterministic", "yes"},
        {"tenant a.share", "0"},
        {"tenant a.uids", "12 x"},
        {"server.in_process_uids", "root"},
        {"tenant a.uids", "4294967295"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        srv_conf before = conf;
        info.text[0] = '\0';
        ATTND_CK_ERR(srv_conf_set(&conf, bad[i][0], bad[i][1], &info), ATTND_EINVAL);
        ck_text(bad[i][0]); // the key in full
        ck_assert_uint_eq(conf.num_tenants, before.num_tenants);
        ck_assert_uint_eq(conf.memory_bytes, before.memory_bytes);
        ck_assert_str_eq(conf.log_level, before.log_level);
    }
}
END_TEST

START_TEST(a_number_that_is_none_is_told_what_it_may_be) {
    static const char *const bad[][3] = {
        {"cache.memory", "4GB", "\"4GB\" is not a whole number, of GiB, MiB, KiB or B"},
        {"cache.memory", "1.5GiB", "\"1.5GiB\" is not a whole number, of GiB"},
        {"server.drain_timeout", "5min", "\"5min\" is not a whole number, of s or ms"},
        {"server.socket_mode", "999", "\"999\" is not an octal number"},
        {"server.spin_us", "x", "\"x\" is not a whole number"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ATTND_CK_ERR(srv_conf_set(&conf, bad[i][0], bad[i][1], &info), ATTND_EINVAL);
        ck_text(bad[i][2]);
    }
}
END_TEST

static attnd_err device(const char *value, int32_t *ordinal) {
    ATTND_CK_OK(srv_conf_set(&conf, "compute.device", value, &info));
    return srv_conf_device(&conf, ordinal, &info);
}

START_TEST(a_device_is_the_cpu_or_a_numbered_gpu) {
    static const char *const bad[] = {"",        "gpu",     "cuda",       "cuda:",   "cuda:x",
                                      "cuda:-1", "cuda: 1", "cuda:12345", "cuda:1x", "cpu:0"};
    int32_t ordinal = 7;
    ATTND_CK_OK(srv_conf_device(&conf, &ordinal, &info));
    ck_assert_int_eq(ordinal, -1);
    ATTND_CK_OK(device("cuda:0", &ordinal));
    ck_assert_int_eq(ordinal, 0);
    ATTND_CK_OK(device("cuda:17", &ordinal));
    ck_assert_int_eq(ordinal, 17);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ATTND_CK_ERR(device(bad[i], &ordinal), ATTND_EINVAL);
        ck_assert_str_eq(info.field, "device");
    }
    ck_assert_int_eq(ordinal, 17);
}
END_TEST

START_TEST(limits_themselves_are_allowed) {
    ATTND_CK_OK(srv_conf_set(&conf, "limits.in_flight", "1", &info));
    ATTND_CK_OK(srv_conf_set(&conf, "limits.in_flight", "1024", &info));
    ATTND_CK_OK(srv_conf_set(&conf, "cache.memory", "1MiB", &info));
    ATTND_CK_OK(srv_conf_set(&conf, "limits.message", "256MiB", &info));
    ATTND_CK_ERR(srv_conf_set(&conf, "limits.message", "268435457", &info), ATTND_EINVAL);
}
END_TEST

START_TEST(an_unknown_key_names_the_nearest) {
    ATTND_CK_ERR(srv_conf_set(&conf, "cache.memmory", "1GiB", &info), ATTND_ENOENT);
    ck_text("cache.memory");
    ATTND_CK_ERR(srv_conf_set(&conf, "limit.in_flight", "1", &info), ATTND_ENOENT);
    ck_text("limits.in_flight");
    ATTND_CK_ERR(srv_conf_set(&conf, "memory", "1GiB", &info), ATTND_ENOENT);
    ck_text("cache.memory");
    ATTND_CK_ERR(srv_conf_set(&conf, "server.in_flight", "1", &info), ATTND_ENOENT);
    ck_text("limits.in_flight");
    ATTND_CK_ERR(srv_conf_set(&conf, "tenant a.shares", "1", &info), ATTND_ENOENT);
    ck_text("tenant a.share");
    ATTND_CK_ERR(srv_conf_set(&conf, "tenant.share", "1", &info), ATTND_ENOENT);
    ck_text("tenant NAME.share");
}
END_TEST

START_TEST(an_unknown_key_that_is_near_to_none_names_none) {
    static const char *const keys[] = {"nonsense", "a.b", "x", "server.colour", ""};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        ATTND_CK_ERR(srv_conf_set(&conf, keys[i], "1", &info), ATTND_ENOENT);
        ck_text("unknown key ");
        ck_assert_ptr_null(strstr(info.text, "nearest"));
        ck_text("--dump-config");
    }
    ATTND_CK_ERR(srv_conf_set(&conf, "tenant .share", "1", &info), ATTND_ENOENT);
    char name[400];
    memset(name, 'x', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    ATTND_CK_ERR(srv_conf_set(&conf, name, "1", &info), ATTND_ENOENT);
}
END_TEST

START_TEST(a_file_sets_keys_and_tenants) {
    ATTND_CK_OK(load("# comment\n[server]\nlisten = ipc:///a tcp://127.0.0.1:1\n\n"
                     "[cache]\nmemory = 2GiB ; inline\n"
                     "[tenant team.a]\nuids = 1000 1001\nquota_blocks=5\n"
                     "[tenant default]\nshare = 3\n"));
    ck_assert_str_eq(conf.listen, "ipc:///a tcp://127.0.0.1:1");
    ck_assert_uint_eq(conf.memory_bytes, 2ull << 30);
    ck_assert_uint_eq(conf.num_tenants, 2);
    ck_assert_str_eq(conf.tenants[1].name, "team.a");
    ck_assert_uint_eq(conf.tenants[1].uids.num, 2);
    ck_assert_uint_eq(conf.tenants[1].uids.list[1], 1001);
    ck_assert_uint_eq(conf.tenants[1].quota_blocks, 5);
    ck_assert_uint_eq(conf.tenants[0].share, 3);
}
END_TEST

// Every key of the table, the last one, too, and of two tenants.
START_TEST(a_key_that_is_set_twice_is_an_error) {
    size_t num = 0;
    for (const srv_conf_key *k = srv_conf_keys; k->section; k++, num++) {
        const bool tenants = strcmp(k->section, "tenant") == 0;
        const char *section = tenants ? "tenant a" : k->section;
        char text[2048], want[128];
        snprintf(text, sizeof(text), "[%s]\n%s = %s\n[%s]\n%s = %s\n[%s]\n%s = %s\n", section,
                 k->name, k->fallback, tenants ? "tenant b" : "cache", tenants ? k->name : "; ",
                 tenants ? k->fallback : "", section, k->name, k->fallback);
        snprintf(want, sizeof(want), ":6: %s.%s is set twice", section, k->name);
        srv_conf_init(&conf);
        ATTND_CK_ERR(load(text), ATTND_EINVAL);
        ck_assert_uint_eq(errors.num, 1);
        ck_error(0, want);
    }
    ck_assert_uint_eq(num, srv_conf_num_keys);
}
END_TEST

START_TEST(errors_of_a_file_name_its_line) {
    ATTND_CK_ERR(load("[cache]\n\nmemory = 1GiB\nslub = 1MiB\n"), ATTND_EINVAL);
    ck_error(0, ":4: unknown key cache.slub, the nearest is cache.slab");
    srv_conf_init(&conf);
    ATTND_CK_ERR(load("[limits]\nin_flight = many\n"), ATTND_EINVAL);
    ck_error(0, ":2: limits.in_flight: \"many\"");
    srv_conf_init(&conf);
    ATTND_CK_ERR(load("[limits]\nin_flight = 3\n# x\nin_flight = 4\n"), ATTND_EINVAL);
    ck_error(0, ":4: limits.in_flight is set twice");
    srv_conf_init(&conf);
    ATTND_CK_ERR(load("[limits]\nin_flight\n"), ATTND_EINVAL);
    ck_error(0, ":2: neither");
    srv_conf_init(&conf);
    ATTND_CK_ERR(load("\xef\xbb\xbf[limits\nin_flight = 3\n"), ATTND_EINVAL);
    ck_error(0, ":1: a section");
    ck_assert_uint_eq(errors.num, 1); // whose in_flight that is, nobody knows
    srv_conf_init(&conf);
    ATTND_CK_ERR(load("memory = 1GiB\n"), ATTND_EINVAL);
    ck_error(0, ":1: unknown key memory, the nearest is cache.memory");
}
END_TEST

START_TEST(all_errors_of_a_file_are_told) {
    ATTND_CK_ERR(load("[cache]\nmemory = much\nslab\n[limits\nqueue = 1\n[limits]\nqueue = 2\n"
                      "[server]\nmode = 1\n"),
                 ATTND_EINVAL);
    ck_assert_uint_eq(errors.num, 4);
    ck_error(0, ":2: cache.memory");
    ck_error(1, ":3: neither");
    ck_error(2, ":4: a section");
    ck_error(3, ":9: unknown key server.mode");
    ck_assert_uint_eq(conf.queue, 2);
    char text[1024] = "[server]\n";
    for (int i = 0; i < 20; i++) {
        strcat(text, "nonsense\n");
    }
    ATTND_CK_ERR(load(text), ATTND_EINVAL);
    ck_assert_uint_eq(errors.num, 20); // more than there is room for
}
END_TEST

START_TEST(the_same_key_of_two_tenants_is_not_twice) {
    ATTND_CK_OK(load("[tenant a]\nshare = 1\n[tenant b]\nshare = 2\n"));
    ATTND_CK_ERR(load("[tenant a]\nshare = 1\n[tenant b]\nshare = 2\n[tenant a]\nshare = 3\n"),
                 ATTND_EINVAL);
    ck_error(0, ":6: ");
}
END_TEST

START_TEST(a_tenant_needs_no_key) {
    ATTND_CK_OK(load("[tenant a]\n#share = 2\n[tenant b] # and a word\n[tenant default]\n"));
    ck_assert_uint_eq(conf.num_tenants, 3);
    ck_assert_str_eq(conf.tenants[1].name, "a");
    ck_assert_uint_eq(conf.tenants[1].share, 1);
    ck_assert_str_eq(conf.tenants[2].name, "b");
}
END_TEST

// Names of 63 bytes are different to their last, and longer ones never the same by being cut.
START_TEST(a_section_is_one_by_its_whole_name) {
    char most[64], text[256];
    memset(most, 'a', 63);
    most[63] = '\0';
    snprintf(text, sizeof(text), "[tenant %s]\nshare = 2\n[tenant %.62sb]\nquota_blocks = 3\n",
             most, most);
    ATTND_CK_OK(load(text));
    ck_assert_uint_eq(conf.num_tenants, 3);
    ck_assert_uint_eq(conf.tenants[1].quota_blocks, 0);
    srv_conf_init(&conf);
    snprintf(text, sizeof(text), "[tenant %sc]\nshare = 2\n", most);
    ATTND_CK_ERR(load(text), ATTND_EINVAL);
    ck_error(0, ":1: a tenant's name is longer than 63 bytes");
    ck_assert_uint_eq(errors.num, 1);
    ck_assert_uint_eq(conf.num_tenants, 1);
}
END_TEST

START_TEST(a_section_that_is_none_is_told_of) {
    static const char *const forms[] = {"[cache ; much]", "[tenant a ;b]", "[cache] memory = 2GiB"};
    static const char *const names[] = {"[]", "[tenant]", "[tenant ]", "[cashe]"};
    char text[64];
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        srv_conf_init(&conf);
        snprintf(text, sizeof(text), "[limits]\n%s\nqueue = 7\n", forms[i]);
        ATTND_CK_ERR(load(text), ATTND_EINVAL);
        ck_error(0, ":2: a section has the form");
        ck_assert_uint_eq(errors.num, 1);
        ck_assert_uint_eq(conf.queue, 4096); // which is not the queue of [limits]
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        srv_conf_init(&conf);
        snprintf(text, sizeof(text), "[limits]\n%s\nqueue = 7\n", names[i]);
        ATTND_CK_ERR(load(text), ATTND_EINVAL);
        ck_error(0, ":2: there is no section ");
        ck_assert_uint_eq(errors.num, 1);
        ck_assert_uint_eq(conf.queue, 4096);
    }
}
END_TEST

START_TEST(a_line_that_is_too_long_is_refused) {
    char text[600];
    int n = snprintf(text, sizeof(text), "[server]\nlisten = ipc:///");
    memset(text + n, 'a', 400);
    strcpy(text + n + 400, "\n[limits]\nqueue = 7\n");
    ATTND_CK_ERR(load(text), ATTND_EINVAL);
    ck_error(0, ":2: server.listen: the line is longer than 198 bytes");
    ck_assert_uint_eq(errors.num, 1);
    ck_assert_uint_eq(conf.queue, 7);
    ck_assert_str_eq(conf.listen, "ipc:///run/attnd/attnd.sock"); // as it was
    n = snprintf(text, sizeof(text), "[server]\nlisten = ipc:///b\n  ");
    memset(text + n, 'a', 400);
    strcpy(text + n + 400, "\n");
    ATTND_CK_ERR(load(text), ATTND_EINVAL);
    ck_error(0, ":3: server.listen: the line is longer than 198 bytes");
    ck_assert_uint_eq(errors.num, 1);
    ck_assert_str_eq(conf.listen, "ipc:///run/attnd/attnd.sock");
    n = snprintf(text, sizeof(text), "[limits]\nqueue = 8\n# ");
    memset(text + n, 'a', 400);
    strcpy(text + n + 400, "\n");
    ATTND_CK_ERR(load(text), ATTND_EINVAL);
    ck_error(0, ":3: the line is longer than 198 bytes");
    ck_assert_uint_eq(conf.queue, 8);
}
END_TEST

START_TEST(a_value_goes_on_in_lines_that_begin_with_a_blank) {
    ATTND_CK_OK(load("[server]\nlisten = ipc:///a\n  ipc:///b ; inline\n\tipc:///c\n"
                     "[tenant a]\nuids =\n  1\n  2 3\nshare = 4\n"));
    ck_assert_str_eq(conf.listen, "ipc:///a ipc:///b ipc:///c");
    ck_assert_uint_eq(conf.tenants[1].uids.num, 3);
    ck_assert_uint_eq(conf.tenants[1].share, 4);
    srv_conf_init(&conf);
    ATTND_CK_OK(load("  [limits]\n  queue = 7\n\tin_flight=3 ; no value goes on here\n"));
    ck_assert_uint_eq(conf.queue, 7);
    ck_assert_uint_eq(conf.in_flight, 3);
    srv_conf_init(&conf);
    ATTND_CK_ERR(load("[server]\nlisten = ipc:///a\n# what follows is of no key\n  ipc:///b\n"
                      "[limits]\n  9\nqueue = 7\n  8\n"),
                 ATTND_EINVAL);
    ck_error(0, ":4: unknown key server.ipc");
    ck_error(1, ":6: neither");
    ck_error(2, ":7: limits.queue: \"7 8\"");
    ck_assert_uint_eq(errors.num, 3);
    ck_assert_str_eq(conf.listen, "ipc:///a");
    char text[2000] = "[server]\nlisten =\n"; // 512 bytes when they are joined, one too many
    for (int i = 0; i < 57; i++) {
        strcat(text, "  ipc:///a\n");
    }
    ATTND_CK_ERR(load(text), ATTND_EINVAL);
    ck_error(0, ":2: server.listen: longer than 511 bytes");
}
END_TEST

START_TEST(a_missing_file_is_an_io_error) {
    ATTND_CK_ERR(srv_conf_load(&conf, "/nonexistent/attnd.conf", &errors), ATTND_EIO);
    ck_error(0, "/nonexistent/attnd.conf");
    ATTND_CK_ERR(srv_conf_load(&conf, "/", &errors), ATTND_EIO);
}
END_TEST

static void set_other(void *arg, const char *key, const char *value) {
    (void)value;
    (void)arg;
    const srv_conf_key *row = srv_conf_find(key);
    ck_assert_ptr_nonnull(row);
    if (row->type == SRV_CONF_COUNT || row->type == SRV_CONF_SIZE || row->type == SRV_CONF_TIME) {
        char text[32];
        snprintf(text, sizeof(text), "%llu", (unsigned long long)row->max);
        ATTND_CK_OK(srv_conf_set(&conf, key, text, &info));
    }
}

START_TEST(a_dump_reads_back_as_itself) {
    ATTND_CK_OK(srv_conf_set(&conf, "tenant a.b.uids", "7 8", &info));
    ATTND_CK_OK(srv_conf_set(&conf, "compute.deterministic", "on", &info));
    srv_conf_each(&conf, set_other, NULL); // every number at its maximum
    FILE *f = fopen(path, "w");
    srv_conf_dump(&conf, f);
    fclose(f);
    static srv_conf again;
    srv_conf_init(&again);
    ATTND_CK_OK(srv_conf_load(&again, path, &errors));
    ck_assert_mem_eq(&again, &conf, sizeof(conf));
}
END_TEST

// ck_round_trip dumps conf, wants lines that inih takes whole, and reads it back.
static void ck_round_trip(void) {
    static srv_conf again;
    char line[4096];
    FILE *f = fopen(path, "w+");
    srv_conf_dump(&conf, f);
    rewind(f);
    while (fgets(line, sizeof(line), f)) {
        ck_assert_uint_le(strlen(line), 198 + 1);
    }
    fclose(f);
    memset(&errors, 0, sizeof(errors));
    srv_conf_init(&again);
    ck_assert_msg(!srv_conf_load(&again, path, &errors), "%s", errors.text[0]);
    ck_assert_str_eq(again.listen, conf.listen);
    ck_assert_str_eq(again.tier_file, conf.tier_file);
    ck_assert_mem_eq(&again, &conf, sizeof(conf));
}

START_TEST(long_values_are_dumped_on_several_lines) {
    char text[SRV_CONF_TEXT_BYTES] = "";
    for (int i = 0; i < 4; i++) { // four sockets of 107 bytes: 463 bytes
        sprintf(text + strlen(text), "%sipc:///%c%0*d", i ? " " : "", 'a' + i, 105, 0);
    }
    ATTND_CK_OK(srv_conf_set(&conf, "server.listen", text, &info));
    text[0] = '\0';
    for (unsigned i = 0; i < SRV_CONF_MAX_UIDS; i++) {
        sprintf(text + strlen(text), "%s%u", i ? " " : "", 4294967294u - i);
    }
    ATTND_CK_OK(srv_conf_set(&conf, "tenant a.uids", text, &info));
    ATTND_CK_OK(srv_conf_set(&conf, "server.in_process_uids", text, &info));
    memset(text, 'f', 194); // alone on its line
    text[0] = '/';
    text[194] = '\0';
    ATTND_CK_OK(srv_conf_set(&conf, "tier.file", text, &info));
    ck_round_trip();
    ck_assert_uint_eq(conf.tenants[1].uids.num, SRV_CONF_MAX_UIDS);
}
END_TEST

START_TEST(values_that_a_file_cannot_hold_are_refused) {
    char text[200];
    memset(text, 'f', 195);
    text[195] = '\0';
    const char *const bad[][2] = {
        {text, "198 bytes"},          {"/a ;b", "behind a space"}, {";b", "a ; in front"},
        {"/a\nqueue = 3", "control"}, {"/a\tb", "control"},        {" /a", "a space in front"},
        {"/a ", "or at the end"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ATTND_CK_ERR(srv_conf_set(&conf, "tier.file", bad[i][0], &info), ATTND_EINVAL);
        ck_text("tier.file: ");
        ck_text(bad[i][1]);
        ck_assert_str_eq(conf.tier_file, "");
    }
    ATTND_CK_OK(srv_conf_set(&conf, "tier.file", "/a;b", &info));
    ck_round_trip();
    srv_conf_init(&conf);
    ATTND_CK_OK(srv_conf_set(&conf, "tier.file", "#a  [b] = c:d", &info));
    ck_round_trip();
}
END_TEST

// Whatever is taken is dumped so that it reads back, whatever it is made of.
START_TEST(what_is_taken_reads_back) {
    static const char *const parts[] = {" ",
                                        "  ",
                                        "=",
                                        ":",
                                        ";",
                                        "#",
                                        "[",
                                        "]",
                                        "file",
                                        "wait",
                                        "listen",
                                        "queue",
                                        "spin",
                                        "/a",
                                        "= 7",
                                        " ;",
                                        "fffffffffffffffffffffffffffffffffffffffffffff"};
    uint32_t seed = 1, taken = 0, long_ones = 0;
    for (int round = 0; round < 4000; round++) {
        char text[SRV_CONF_TEXT_BYTES + 64] = "";
        seed = seed * 1664525u + 1013904223u;
        for (uint32_t n = 1 + (seed >> 20) % 60; n > 0 && strlen(text) < SRV_CONF_TEXT_BYTES; n--) {
            seed = seed * 1664525u + 1013904223u;
            uint32_t few = round % 2 ? 17 : 8; // every other one is mostly letters
            uint32_t i = (seed >> 16) % few;
            strcat(text, parts[few == 8 && i > 0 ? 8 + i : i]);
        }
        srv_conf_init(&conf);
        if (!srv_conf_set(&conf, round % 3 ? "tier.file" : "server.listen", text, &info)) {
            taken++;
            long_ones += strlen(text) > 198;
            ck_round_trip();
        }
    }
    ck_assert_uint_gt(taken, 500); // or it tries nothing
    ck_assert_uint_gt(long_ones, 5);
}
END_TEST

#define NAME_63 "a.name-of-sixty-three-bytes-the-longest-that-a-tenant-may-have-"

START_TEST(a_dump_tells_tenants_of_the_longest_names_apart) {
    ck_assert_uint_eq(sizeof(NAME_63), 64);
    char other[] = NAME_63, key[128];
    other[62] = '+'; // alike but for the last byte
    snprintf(key, sizeof(key), "tenant %s.share", other);
    ATTND_CK_OK(srv_conf_set(&conf, "tenant " NAME_63 ".share", "3", &info));
    ATTND_CK_OK(srv_conf_set(&conf, key, "4", &info));
    FILE *f = fopen(path, "w");
    srv_conf_dump(&conf, f);
    fclose(f);
    static srv_conf again;
    srv_conf_init(&again);
    ck_assert_msg(!srv_conf_load(&again, path, &errors), "%s", errors.text[0]);
    ck_assert_uint_eq(again.num_tenants, 3);
    ck_assert_uint_eq(srv_conf_tenant_find(&again, NAME_63)->share, 3);
    ck_assert_uint_eq(srv_conf_tenant_find(&again, other)->share, 4);
}
END_TEST

START_TEST(names_that_a_file_cannot_hold_are_refused) {
    ATTND_CK_ERR(srv_conf_set(&conf, "tenant a]b.share", "2", &info), ATTND_EINVAL);
    ck_text("no control characters");
    ATTND_CK_ERR(srv_conf_set(&conf, "tenant a;b.share", "2", &info), ATTND_EINVAL);
    ATTND_CK_ERR(srv_conf_set(&conf, "tenant a\nb.share", "2", &info), ATTND_EINVAL);
    ck_assert_uint_eq(conf.num_tenants, 1);
}
END_TEST

START_TEST(get_writes_what_set_took) {
    char out[SRV_CONF_TEXT_BYTES];
    ATTND_CK_OK(srv_conf_set(&conf, "cache.memory", "1536MiB", &info));
    ATTND_CK_OK(srv_conf_get(&conf, "cache.memory", out, &info));
    ck_assert_str_eq(out, "1536MiB");
    ATTND_CK_OK(srv_conf_get(&conf, "server.socket_mode", out, &info));
    ck_assert_str_eq(out, "0660");
    ATTND_CK_OK(srv_conf_get(&conf, "tenant default.quota_blocks", out, &info));
    ck_assert_str_eq(out, "0");
    ATTND_CK_ERR(srv_conf_get(&conf, "tenant x.share", out, &info), ATTND_ENOENT);
    ATTND_CK_ERR(srv_conf_get(&conf, "no.key", out, &info), ATTND_ENOENT);
}
END_TEST

// ck_refused sets one key and wants the check to refuse what comes of it, in words.
static void ck_refused(const char *key, const char *value, const char *part) {
    srv_conf_init(&conf);
    memset(&errors, 0, sizeof(errors));
    ATTND_CK_OK(srv_conf_set(&conf, key, value, &info));
    ATTND_CK_ERR(srv_conf_check(&conf, &errors), ATTND_EINVAL);
    ck_assert_uint_eq(errors.num, 1);
    ck_error(0, part);
}

START_TEST(keys_that_contradict_each_other_are_refused) {
    ck_refused("limits.connection_memory", "32MiB", "limits.message");
    ck_refused("cache.slab", "65537", "cache.slab");
    ck_refused("cache.memory", "16MiB", "cache.slab");
    ck_refused("server.listen", "", "server.listen");
    ck_refused("server.listen", "udp://x", "udp://x");
    ck_refused("compute.launch_rows", "1023", "limits.step_seqs");
    ck_refused("compute.isa", "abacus", "compute.isa");
    ck_refused("compute.device", "tpu", "compute.device");
    ck_refused("limits.all_rings_memory", "255MiB", "limits.ring_memory");
    ck_refused("tier.memory", "32MiB", "tier.memory is less than cache.slab");
    ck_refused("limits.all_regions_memory", "1MiB",
               "limits.all_regions_memory is less than limits.region_memory: 1048576 and 268435456 "
               "bytes");
    ck_refused("limits.all_rings_memory", "1MiB",
               "limits.all_rings_memory is less than limits.ring_memory: 1048576 and 268435456 "
               "bytes");
    ck_refused("tier.file_size", "1GiB", "tier.file is not");
}
END_TEST

// The keys of the CPU are not ignored beside a GPU, and one token with its table must fit a buffer:
// 8 MiB, a fifth of a message of 64 MiB, 8192 entries and masks of 1 MiB are 22891724 bytes.
START_TEST(a_gpu_wants_its_own_keys) {
    ATTND_CK_OK(srv_conf_set(&conf, "compute.device", "cuda:0", &info));
    ATTND_CK_OK(srv_conf_set(&conf, "compute.staging", "22891724", &info));
    ATTND_CK_OK(srv_conf_check(&conf, &errors));
    ATTND_CK_OK(srv_conf_set(&conf, "compute.staging", "22891723", &info));
    ATTND_CK_OK(srv_conf_set(&conf, "compute.threads", "2", &info));
    ATTND_CK_OK(srv_conf_set(&conf, "compute.isa", "scalar", &info));
    ATTND_CK_ERR(srv_conf_check(&conf, &errors), ATTND_EINVAL);
    ck_assert_uint_eq(errors.num, 3);
    ck_error(0, "compute.threads");
    ck_error(1, "compute.isa");
    ck_error(2, "compute.staging");
}
END_TEST

START_TEST(all_contradictions_are_told) {
    ATTND_CK_OK(srv_conf_set(&conf, "cache.memory", "16MiB", &info));
    ATTND_CK_OK(srv_conf_set(&conf, "server.listen", "tcp://x", &info));
    ATTND_CK_ERR(srv_conf_check(&conf, &errors), ATTND_EINVAL);
    ck_assert_uint_eq(errors.num, 2);
}
END_TEST

START_TEST(a_tenant_without_uids_admits_everybody) {
    ck_assert(srv_conf_admits(&conf.tenants[0], 12));
    ck_assert(srv_conf_admits(&conf.tenants[0], UINT32_MAX));
    ATTND_CK_OK(srv_conf_set(&conf, "tenant a.uids", "12 0", &info));
    ck_assert(srv_conf_admits(&conf.tenants[1], 12));
    ck_assert(srv_conf_admits(&conf.tenants[1], 0));
    ck_assert(!srv_conf_admits(&conf.tenants[1], 13));
    ck_assert(!srv_conf_admits(&conf.tenants[1], UINT32_MAX));
}
END_TEST

START_TEST(in_process_uids_admit_those_they_name_and_else_nobody) {
    srv_conf_init(&conf);
    ck_assert(!srv_conf_in_process(&conf, 0));
    ATTND_CK_OK(srv_conf_set(&conf, "server.in_process_uids", "12 0", &info));
    ck_assert(srv_conf_in_process(&conf, 0));
    ck_assert(srv_conf_in_process(&conf, 12));
    ck_assert(!srv_conf_in_process(&conf, 13));
    ck_assert(!srv_conf_in_process(&conf, UINT32_MAX));
}
END_TEST

START_TEST(tenants_and_uids_are_bounded) {
    char key[SRV_CONF_NAME_BYTES * 2];
    for (int i = 1; i < SRV_CONF_MAX_TENANTS; i++) {
        snprintf(key, sizeof(key), "tenant t%d.share", i);
        ATTND_CK_OK(srv_conf_set(&conf, key, "1", &info));
    }
    ATTND_CK_ERR(srv_conf_set(&conf, "tenant one_more.share", "1", &info), ATTND_EINVAL);
    char uids[SRV_CONF_MAX_UIDS * 2 + 3] = "";
    for (int i = 0; i < SRV_CONF_MAX_UIDS; i++) {
        strcat(uids, i ? " 1" : "1");
    }
    ATTND_CK_OK(srv_conf_set(&conf, "tenant t1.uids", uids, &info));
    strcat(uids, " 1");
    ATTND_CK_ERR(srv_conf_set(&conf, "tenant t1.uids", uids, &info), ATTND_EINVAL);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_conf");
    TCase *tc = tcase_create("srv_conf");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, defaults_are_the_tables);
    tcase_add_test(tc, sizes_times_and_modes_have_units);
    tcase_add_test(tc, bad_values_are_refused_and_change_nothing);
    tcase_add_test(tc, a_number_that_is_none_is_told_what_it_may_be);
    tcase_add_test(tc, a_device_is_the_cpu_or_a_numbered_gpu);
    tcase_add_test(tc, limits_themselves_are_allowed);
    tcase_add_test(tc, an_unknown_key_names_the_nearest);
    tcase_add_test(tc, an_unknown_key_that_is_near_to_none_names_none);
    tcase_add_test(tc, a_file_sets_keys_and_tenants);
    tcase_add_test(tc, a_key_that_is_set_twice_is_an_error);
    tcase_add_test(tc, errors_of_a_file_name_its_line);
    tcase_add_test(tc, all_errors_of_a_file_are_told);
    tcase_add_test(tc, the_same_key_of_two_tenants_is_not_twice);
    tcase_add_test(tc, a_tenant_needs_no_key);
    tcase_add_test(tc, a_section_is_one_by_its_whole_name);
    tcase_add_test(tc, a_section_that_is_none_is_told_of);
    tcase_add_test(tc, a_line_that_is_too_long_is_refused);
    tcase_add_test(tc, a_value_goes_on_in_lines_that_begin_with_a_blank);
    tcase_add_test(tc, a_missing_file_is_an_io_error);
    tcase_add_test(tc, a_dump_reads_back_as_itself);
    tcase_add_test(tc, long_values_are_dumped_on_several_lines);
    tcase_add_test(tc, values_that_a_file_cannot_hold_are_refused);
    tcase_add_test(tc, what_is_taken_reads_back);
    tcase_add_test(tc, a_dump_tells_tenants_of_the_longest_names_apart);
    tcase_add_test(tc, names_that_a_file_cannot_hold_are_refused);
    tcase_add_test(tc, get_writes_what_set_took);
    tcase_add_test(tc, keys_that_contradict_each_other_are_refused);
    tcase_add_test(tc, a_gpu_wants_its_own_keys);
    tcase_add_test(tc, all_contradictions_are_told);
    tcase_add_test(tc, a_tenant_without_uids_admits_everybody);
    tcase_add_test(tc, in_process_uids_admit_those_they_name_and_else_nobody);
    tcase_add_test(tc, tenants_and_uids_are_bounded);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
