// attnctl as a program: what it sends to which socket, what it prints, and how it exits.  The
// daemon is a fake that answers with the replies below; ATTNCTL is the program's path.
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/check_main.h"
#include "tests/unit/proto/fake_daemon.h"

static const char STATS[] =
    "{\"daemon\":\"attnd 9.8.7\",\"state\":\"ready\",\"uptime_s\":7384.5,"
    "\"device\":{\"device\":\"cuda:1\",\"name\":\"Some GPU\",\"kernels\":\"fast\"},"
    "\"blocks\":{\"total\":100,\"free\":60,\"cached\":15,\"in_use\":25},"
    "\"classes\":[{\"block_bytes\":1536,\"slabs\":2,\"total\":100,\"free\":60,\"cached\":15,"
    "\"in_use\":25}],"
    "\"prefix_cache\":{\"blocks\":9,\"looked_up_tokens\":1200,\"found_tokens\":300,"
    "\"evictions\":2},"
    "\"arena\":{\"bytes\":1073741824,\"in_use_bytes\":38400,\"slabs\":32,\"unassigned_slabs\":30,"
    "\"kind\":\"device\",\"pages\":\"huge\"},\"sequences\":7,\"models\":1,\"sessions\":2,\"steps\":"
    "3,"
    "\"accounting_mismatches\":0,"
    "\"service\":{\"mps\":false,\"regions\":6,\"regions_kept\":2,\"region_bytes\":6291456,"
    "\"regions_without_mps\":8,\"waiting\":12,\"draining\":13,\"calls\":140,\"layers\":280,"
    "\"ahead\":200,\"gated\":150,\"gates_missed\":3,\"wait_kernels\":true,"
    "\"failed\":15},"
    "\"scheduler\":{\"queued\":4,\"running\":1,\"waiting_for_blocks\":5,\"launches\":11,"
    "\"rows\":22,\"decode_tokens\":33,\"prefill_tokens\":44,\"busy_us\":1500000,"
    "\"last\":{\"kernel\":\"cpu_x\",\"why\":\"because\",\"splits\":2,\"rows\":6}},"
    "\"tenants\":[{\"name\":\"default\",\"blocks\":25,\"cached_blocks\":15,\"quota_blocks\":0,"
    "\"share\":1}]}";

static fake_daemon *clients, *admin;
static char output[65536];
static char seen[256]; // the last request's op and JSON body

static void note(proto_view request, const proto_header *h) {
    snprintf(seen, sizeof(seen), "%s %.*s", proto_op_name(h->op), (int)h->body_bytes,
             (const char *)request.data + sizeof(*h));
}

static const char *reply_of(uint32_t op) {
    switch (op) {
    case PROTO_STATS:
        return STATS;
    case PROTO_MODEL_LIST:
        return "{\"models\":[{\"model\":3,\"name\":\"tiny\",\"tenant\":\"default\",\"layers\":2,"
               "\"q_heads\":4,\"kv_heads\":2,\"head_dim\":32,\"v_head_dim\":32,"
               "\"block_tokens\":64,\"dtype\":\"f32\",\"kv_dtype\":\"f32\"},"
               "{\"model\":4,\"name\":\"old\",\"tenant\":\"default\"}]}";
    case PROTO_SEQ_LIST:
        return "{\"sequences\":[{\"seq\":\"100000002\",\"session\":\"a\",\"tenant\":\"default\","
               "\"model\":3,\"len\":77,\"blocks\":2,\"in_step\":true,\"name\":\"chat\"}]}";
    case PROTO_SESSION_LIST:
        return "{\"sessions\":[{\"session\":\"1f\",\"client\":\"ev\\u001b[31mil\","
               "\"tenant\":\"default\",\"uid\":-1,\"way\":\"in "
               "process\",\"pid\":4711,\"age_s\":61,\"requests\":9,\"errors\":1,"
               "\"in_flight\":2,\"steps\":1}]}";
    case PROTO_DRAIN:
        return "{\"draining\":true,\"timeout_ms\":1500,\"sessions\":2,\"steps\":1}";
    default:
        return "{\"compute.threads\":\"4\"}";
    }
}

static size_t serve_client(proto_view request, const proto_header *h, uint8_t *reply) {
    note(request, h);
    if (h->op != PROTO_STATS && h->op != PROTO_MODEL_LIST && h->op != PROTO_SEQ_LIST) {
        return fake_error(reply, h, ATTND_EPERM, "op");
    }
    return fake_json(reply, h, reply_of(h->op));
}

static size_t serve_admin(proto_view request, const proto_header *h, uint8_t *reply) {
    note(request, h);
    return fake_json(reply, h, reply_of(h->op));
}

static size_t serve_draining(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    return fake_error(reply, h, ATTND_ESHUTDOWN, "");
}

static size_t serve_draining_stats(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    return fake_json(reply, h, "{\"daemon\":\"attnd 1\",\"state\":\"draining\"}");
}

static size_t serve_nobody(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request, (void)h, (void)reply;
    return FAKE_SILENT;
}

static size_t serve_plain_stats(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    return fake_json(reply, h,
                     "{\"device\":{\"device\":\"cpu\",\"name\":\"\",\"kernels\":\"fast\"},"
                     "\"tiers\":{\"off\":1,\"stores\":["
                     "{\"kind\":\"memory\",\"bytes\":2048,\"in_use_bytes\":0,\"off\":false,"
                     "\"why\":\"\"},{\"kind\":\"file\",\"bytes\":4096,\"in_use_bytes\":1,"
                     "\"off\":true,\"why\":\"it broke\"}]}}");
}

static void teardown(void) {
    if (clients) {
        fake_daemon_stop(clients);
    }
    if (admin) {
        fake_daemon_stop(admin);
    }
    clients = admin = NULL;
}

// run runs attnctl with the arguments and returns its exit status; output is what it printed.
static int run(const char *args) {
    char line[1024];
    seen[0] = '\0';
    snprintf(line, sizeof(line), "%s -t 2000 %s%s %s%s %s 2>&1", ATTNCTL, clients ? "-s " : "",
             clients ? fake_daemon_url(clients) : "", admin ? "-a " : "",
             admin ? fake_daemon_url(admin) : "", args);
    FILE *pipe = popen(line, "r");
    ck_assert_ptr_nonnull(pipe);
    size_t len = fread(output, 1, sizeof(output) - 1, pipe);
    output[len] = '\0';
    int status = pclose(pipe);
    ck_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void has(const char *text) {
    ck_assert_msg(strstr(output, text), "no \"%s\" in:\n%s", text, output);
}

static void both(void) {
    clients = fake_daemon_start(serve_client, 0);
    admin = fake_daemon_start(serve_admin, 0);
}

START_TEST(status_is_a_screen_of_text) {
    both();
    ck_assert_int_eq(run("status"), 0);
    ck_assert_str_eq(seen, "stats ");
    has("attnd 9.8.7 is ready, up 2h 03m\n");
    has("device     cuda:1, Some GPU, fast kernels\n");
    has("in use 25, cached 15, free 60, total 100 (25.0%)");
    has("of 1.5 KiB in 2 slabs");
    has("1.0 GiB of huge pages, device, 37.5 KiB in use; 32 slabs, 30 unassigned");
    has("7 sequences, 1 models, 2 sessions, 3 open steps");
    has("4 queued, 1 running, 5 wait for blocks");
    has("11 with 22 rows, busy 1.5 s");
    has("33 decode, 44 prefill");
    has("cpu_x: because; 6 rows, 2 splits");
    has("prefixes   9 blocks; 300 of 1200 tokens found (25.0%), 2 blocks evicted");
    has("default                          25         15       none      1\n");
    has("service    6 regions of 6.0 MiB; 12 calls wait, 13 drain; 15 of 140 failed\n"
        "           2 of them of processes that left without a word\n"
        "           280 layers, 50 launched at their flag, 150 before it, 3 in vain; clients wait "
        "in "
        "kernels\n");
    const char *warning =
        strstr(output, "WARNING    8 clients came to share the GPU without MPS\n");
    ck_assert_ptr_nonnull(warning);
    ck_assert_ptr_eq(strstr(output, "WARNING"), warning); // and no other
    ck_assert_ptr_null(strstr(warning + 1, "WARNING"));
}
END_TEST

START_TEST(status_prints_no_name_and_no_reason_where_there_is_none) {
    clients = fake_daemon_start(serve_plain_stats, 0);
    ck_assert_int_eq(run("status"), 0);
    has("device     cpu, fast kernels\n");
    has("  memory: 2.0 KiB, 0 B in use\n");
    has("  file: 4.0 KiB, 1 B in use; off: it broke\n");
}
END_TEST

START_TEST(json_is_the_reply_as_it_is) {
    both();
    ck_assert_int_eq(run("--json status"), 0);
    ck_assert_mem_eq(output, STATS, sizeof(STATS) - 1);
    ck_assert_str_eq(output + sizeof(STATS) - 1, "\n");
    ck_assert_int_eq(run("status --json"), 0); // options may follow
    ck_assert_mem_eq(output, STATS, sizeof(STATS) - 1);
}
END_TEST

START_TEST(lists_are_tables) {
    both();
    ck_assert_int_eq(run("models"), 0);
    has("    3 tiny                     default               2       4/2    32/32    64  f32/f32");
    has("    4 old                      default          not opened since a restart\n");
    ck_assert_int_eq(run("sequences"), 0);
    has("100000002            3 default          a                      77        2 open  chat");
    ck_assert_int_eq(run("sessions"), 0);
    has("1f               ev?[31mil            default          in process     4711      -     1m "
        "01s         2     1");
}
END_TEST

START_TEST(arguments_become_json) {
    both();
    ck_assert_int_eq(run("drain 1500"), 0);
    ck_assert_str_eq(seen, "drain {\"timeout_ms\":1500}");
    has("2 sessions and 1 open steps have 1.5 s");
    ck_assert_int_eq(run("drain"), 0);
    ck_assert_str_eq(seen, "drain {}");
    ck_assert_int_eq(run("config get compute.threads"), 0);
    ck_assert_str_eq(seen, "config_get {\"key\":\"compute.threads\"}");
    has("compute.threads = 4\n");
    ck_assert_int_eq(run("config get"), 0);
    ck_assert_str_eq(seen, "config_get {}");
    ck_assert_int_eq(run("config set a.b 'c \"d'"), 0);
    ck_assert_str_eq(seen, "config_set {\"key\":\"a.b\",\"value\":\"c \\\"d\"}");
}
END_TEST

START_TEST(usage_errors_exit_with_two) {
    const char *const wrong[] = {"",
                                 "nothing",
                                 "status now",
                                 "config",
                                 "config frob",
                                 "config set a -1",
                                 "config set a",
                                 "drain soon",
                                 "drain -- -5",
                                 "drain 1 2",
                                 "config get a b",
                                 "-x status",
                                 "-t 0 status",
                                 "stat",
                                 "drain 999999999",
                                 "-t",
                                 "-t 5s status"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        ck_assert_msg(run(wrong[i]) == 2, "\"%s\" is taken", wrong[i]);
        has("(attnctl --help lists");
        ck_assert_ptr_eq(strchr(output, '\n'), output + strlen(output) - 1); // one line
    }
    ck_assert_int_eq(run("--help"), 0);
    has("usage: attnctl");
    has("exit status: 0 ok");
    ck_assert_int_eq(run("--version"), 0);
    ck_assert_int_eq(strncmp(output, "attnctl ", 8), 0);
    run("config frob");
    has("config get or config set?");
    run("config set a -1");
    has("-- goes before a value with a -: -1");
}
END_TEST

START_TEST(no_daemon_exits_with_four) {
    ck_assert_int_eq(run("-s /nowhere/at.all ping"), 4);
    ck_assert_int_eq(run("-s ipc:///nowhere/at.all status"), 4);
    has("ipc:///nowhere/at.all: no such socket");
    ck_assert_int_eq(run("-s /nowhere/at.all drain"), 4);
    has("/nowhere/at.all.admin"); // the administration socket is beside the main one
    ck_assert_int_eq(run("-s /nowhere/at.all.admin drain"), 4);
    ck_assert_ptr_null(strstr(output, ".admin.admin"));
}
END_TEST

START_TEST(environment_names_the_socket) {
    clients = fake_daemon_start(serve_client, 0);
    char line[256];
    snprintf(line, sizeof(line), "ATTND_SOCKET=%s %s ping >/dev/null", fake_daemon_url(clients),
             ATTNCTL);
    ck_assert_int_eq(system(line), 0);
}
END_TEST

START_TEST(ping_says_whether_clients_are_served) {
    clients = fake_daemon_start(serve_client, 0);
    ck_assert_int_eq(run("ping"), 0);
    ck_assert_str_eq(output, "attnd 9.8.7 is ready\n");
    fake_daemon_stop(clients);
    clients = fake_daemon_start(serve_draining, 1); // hello is refused
    ck_assert_int_eq(run("ping"), 3);
    fake_daemon_stop(clients);
    clients = fake_daemon_start(serve_draining_stats, 0);
    ck_assert_int_eq(run("ping"), 3);
    has("attnd 1 is draining\n");
    ck_assert_int_eq(run("status"), 0); // that one is about the answer
}
END_TEST

START_TEST(without_administration_socket_status_is_the_clients) {
    clients = fake_daemon_start(serve_client, 0);
    ck_assert_int_eq(run("status"), 0);
    has("attnd 9.8.7 is ready");
    ck_assert_int_eq(run("sessions"), 4); // not for clients
    has(".admin");
}
END_TEST

START_TEST(refusals_exit_with_one_and_name_the_field) {
    clients = fake_daemon_start(serve_client, 0);
    char args[300];
    snprintf(args, sizeof(args), "-a %s drain", fake_daemon_url(clients));
    ck_assert_int_eq(run(args), 1);
    has("attnctl: EPERM: ");
    has("(op)");
    ck_assert_int_eq(run("-s tcp://127.0.0.1:1 drain"), 1);
    has("needs the administration socket");
}
END_TEST

START_TEST(daemon_that_does_not_answer_is_an_error_in_time) {
    clients = fake_daemon_start(serve_nobody, 0);
    ck_assert_int_eq(run("-t 200 ping"), 1);
    has("ETIMEDOUT");
    fake_daemon_stop(clients);
    clients = fake_daemon_start(serve_nobody, 1); // not even hello
    ck_assert_int_eq(run("-t 200 ping"), 4);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attnctl");
    TCase *t = tcase_create("attnctl");
    tcase_set_timeout(t, 60);
    tcase_add_checked_fixture(t, NULL, teardown);
    tcase_add_test(t, status_is_a_screen_of_text);
    tcase_add_test(t, status_prints_no_name_and_no_reason_where_there_is_none);
    tcase_add_test(t, json_is_the_reply_as_it_is);
    tcase_add_test(t, lists_are_tables);
    tcase_add_test(t, arguments_become_json);
    tcase_add_test(t, usage_errors_exit_with_two);
    tcase_add_test(t, no_daemon_exits_with_four);
    tcase_add_test(t, environment_names_the_socket);
    tcase_add_test(t, ping_says_whether_clients_are_served);
    tcase_add_test(t, without_administration_socket_status_is_the_clients);
    tcase_add_test(t, refusals_exit_with_one_and_name_the_field);
    tcase_add_test(t, daemon_that_does_not_answer_is_an_error_in_time);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
