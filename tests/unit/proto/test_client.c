// Sessions: what hello says and which answers are taken; administration calls.
#include "proto/client/client.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/proto_json.h"
#include "tests/check_main.h"
#include "tests/unit/proto/fake_daemon.h"

static attnd_errinfo info;
static attnd_client *client;
static const attnd_connect_opts quick = {.timeout_ms = 5000};

static char got[2000]; // body of the last request
static uint32_t got_op;

static void keep(proto_view request, const proto_header *h) {
    size_t bytes = request.bytes - PROTO_BODY;
    ck_assert_uint_lt(bytes, sizeof(got));
    memcpy(got, request.data + PROTO_BODY, bytes);
    got[bytes] = '\0';
    got_op = h->op;
}

static const char *answer_text; // JSON of the next reply; NULL = the default one

static size_t answer(proto_view request, const proto_header *h, uint8_t *reply) {
    keep(request, h);
    return answer_text ? fake_json(reply, h, answer_text) : FAKE_DEFAULT;
}

START_TEST(connect_says_client_and_tenant) {
    fake_daemon *f = fake_daemon_start(answer, 1);
    attnd_connect_opts opts = {.client_name = "a \"b\"", .tenant = "t1", .timeout_ms = 5000};
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(f), &opts, &info));
    ck_assert_uint_eq(got_op, PROTO_HELLO);
    ck_assert_str_eq(got, "{\"client\":\"a \\\"b\\\"\",\"tenant\":\"t1\"}");
    attnd_close(client);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(connect_without_opts_has_defaults) {
    fake_daemon *f = fake_daemon_start(answer, 1);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(f), NULL, &info));
    char want[200];
    snprintf(want, sizeof(want), "{\"client\":\"%s\",\"tenant\":\"default\"}",
             program_invocation_short_name);
    ck_assert_str_eq(got, want);
    const attnd_limits *limits = attnd_get_limits(client);
    ck_assert_uint_eq(limits->message_bytes, 65536);
    ck_assert_uint_eq(limits->in_flight, FAKE_IN_FLIGHT);
    ck_assert_uint_eq(limits->step_seqs, 8);
    ck_assert_uint_eq(limits->step_rows, 256);
    ck_assert_uint_eq(limits->sequences, 100);
    attnd_close(client);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(connect_refuses_bad_arguments) {
    ATTND_CK_ERR(attnd_connect(&client, NULL, NULL, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "url");
    ATTND_CK_ERR(attnd_connect(&client, "ipc:///nonexistent/s",
                               &(attnd_connect_opts){.timeout_ms = -1}, &info),
                 ATTND_EINVAL);
    ck_assert_str_eq(info.field, "timeout_ms");
    ATTND_CK_ERR(attnd_connect(&client, "ipc:///nonexistent/s", NULL, NULL), ATTND_ECONN);
}
END_TEST

START_TEST(connect_over_tcp_says_what_wants_a_ring) {
    static const attnd_engine engine = {.name = "a"};
    attnd_connect_opts opts = {.engine = &engine};
    ATTND_CK_ERR(attnd_connect(&client, "tcp://127.0.0.1:1", &opts, &info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "engine");
    ck_assert_str_eq(info.text, "an engine needs a ring, which needs an ipc:// URL");
    opts = (attnd_connect_opts){.transport = ATTND_TRANSPORT_RING};
    ATTND_CK_ERR(attnd_connect(&client, "tcp://127.0.0.1:1", &opts, &info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "transport");
    ck_assert_str_eq(info.text, "a ring needs an ipc:// URL");
}
END_TEST

START_TEST(connect_refuses_a_region_where_there_is_none) {
    static const attnd_service service;
    static const attnd_engine in_process = {.name = "a"}, gpu = {.name = "b", .service = &service};
    const struct {
        const attnd_engine *engine;
        attnd_transport transport;
        const char *why;
    } cases[] = {{NULL, ATTND_TRANSPORT_AUTO, "there is no engine"},
                 {NULL, ATTND_TRANSPORT_NNG, "there is no engine"},
                 {&in_process, ATTND_TRANSPORT_AUTO, "in process"},
                 {&gpu, ATTND_TRANSPORT_NNG, NULL}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        attnd_connect_opts opts = {
            .engine = cases[i].engine, .transport = cases[i].transport, .region_bytes = 4096};
        ATTND_CK_ERR(attnd_connect(&client, "ipc:///nonexistent/s", &opts, &info), ATTND_EINVAL);
        ck_assert_str_eq(info.field, cases[i].why ? "region_bytes" : "engine");
        ck_assert(!cases[i].why || strstr(info.text, cases[i].why));
    }
}
END_TEST

// listen_at makes a socket that takes connections and never reads.
static int listen_at(const char *path, int type) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    ck_assert_uint_lt(strlen(path), sizeof(addr.sun_path));
    strcpy(addr.sun_path, path);
    int fd = socket(AF_UNIX, type, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert_int_eq(listen(fd, 8), 0);
    return fd;
}

// A daemon that hangs: the ring is tried, then NNG, both within the one timeout.
START_TEST(connect_to_a_daemon_that_hangs_takes_its_timeout_once) {
    char dir[] = "/tmp/attnd_client_XXXXXX", path[64], attach[64], url[80];
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/s", dir);
    snprintf(attach, sizeof(attach), "%s/s.attach", dir);
    snprintf(url, sizeof(url), "ipc://%s", path);
    int fds[] = {listen_at(path, SOCK_STREAM), listen_at(attach, SOCK_SEQPACKET)};
    for (attnd_transport t = ATTND_TRANSPORT_AUTO; t <= ATTND_TRANSPORT_RING; t++) {
        attnd_connect_opts opts = {.transport = t, .timeout_ms = 1000};
        uint64_t from_ms = attnd_clock_ms();
        ATTND_CK_ERR(attnd_connect(&client, url, &opts, &info), ATTND_ETIMEDOUT);
        uint64_t ms = attnd_clock_ms() - from_ms;
        ck_assert_uint_ge(ms, 990);
        ck_assert_uint_lt(ms, 1900);
    }
    for (int i = 0; i < 2; i++) {
        close(fds[i]);
    }
    unlink(path);
    unlink(attach);
    rmdir(dir);
}
END_TEST

#define LIMITS(m, i, q, r, s)                                                   \
    "{\"limits\":{\"message_bytes\":" m ",\"in_flight\":" i ",\"step_seqs\":" q \
    ",\"step_rows\":" r ",\"sequences\":" s "}}"

static const char *const bad_hellos[] = {
    "{}",
    "{\"limits\":7}",
    "{\"limits\":null}",
    "{\"limits\":{}}",
    "[]",
    "",
    "nonsense",
    "{\"limits\":{\"message_bytes\":65536}}",
    LIMITS("0", "1", "1", "1", "1"),
    LIMITS("1", "0", "1", "1", "1"),
    LIMITS("1", "1", "0", "1", "1"),
    LIMITS("1", "1", "1", "0", "1"),
    LIMITS("1", "1", "1", "1", "0"),
    LIMITS("268435457", "1", "1", "1", "1"),
    LIMITS("1", "4294967296", "1", "1", "1"),
    LIMITS("1", "1", "1025", "1", "1"),
    LIMITS("1", "1", "1", "65537", "1"),
    LIMITS("-1", "1", "1", "1", "1"),
    LIMITS("1.5", "1", "1", "1", "1"),
    LIMITS("\"1\"", "1", "1", "1", "1"),
};

START_TEST(connect_refuses_a_malformed_hello) {
    fake_daemon *f = fake_daemon_start(answer, 1);
    answer_text = bad_hellos[_i];
    ATTND_CK_ERR(attnd_connect(&client, fake_daemon_url(f), &quick, &info), ATTND_EPROTO);
    ck_assert_ptr_null(client);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(connect_takes_the_largest_limits) {
    fake_daemon *f = fake_daemon_start(answer, 1);
    answer_text = LIMITS("268435456", "4294967295", "1024", "65536", "4294967295");
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(f), &quick, &info));
    attnd_close(client);
    fake_daemon_stop(f);
}
END_TEST

static size_t refuse(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    return fake_error(reply, h, ATTND_EPERM, "tenant");
}

START_TEST(connect_returns_the_error_of_hello) {
    fake_daemon *f = fake_daemon_start(refuse, 1);
    ATTND_CK_ERR(attnd_connect(&client, fake_daemon_url(f), &quick, &info), ATTND_EPERM);
    ck_assert_str_eq(info.field, "tenant");
    fake_daemon_stop(f);
}
END_TEST

static atomic_int step;

static size_t cut_stats(proto_view request, const proto_header *h, uint8_t *reply) {
    (void)request;
    fake_json(reply, h, "{\"blocks\":{\"total\":1}}");
    return fake_cut(reply, h, atomic_load(&step));
}

START_TEST(admin_refuses_every_cut_of_a_reply) {
    fake_daemon *f = fake_daemon_start(cut_stats, 0);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(f), &quick, &info));
    char *reply = NULL;
    for (int i = 0; i < 2 * (PROTO_BODY + 22); i++) {
        atomic_store(&step, i);
        ATTND_CK_ERR(attnd_admin(client, "stats", NULL, &reply, &info), ATTND_EPROTO);
        ck_assert_ptr_null(reply);
    }
    attnd_close(client);
    fake_daemon_stop(f);
}
END_TEST

static const struct {
    const char *op, *json, *sent;
    uint32_t code;
} admin_calls[] = {
    {"stats", NULL, "", 48},        {"model_list", NULL, "", 4},
    {"seq_list", NULL, "", 22},     {"session_list", NULL, "", 49},
    {"drain", NULL, "{}", 64},      {"drain", "{\"timeout_ms\":5}", "{\"timeout_ms\":5}", 64},
    {"config_get", NULL, "{}", 65}, {"config_set", "{\"key\":\"a\"}", "{\"key\":\"a\"}", 66},
};

START_TEST(admin_sends_op_and_json_and_returns_the_reply) {
    fake_daemon *f = fake_daemon_start(answer, 0);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(f), &quick, &info));
    answer_text = "{\"x\": [1]} ";
    char *reply = NULL;
    ATTND_CK_OK(attnd_admin(client, admin_calls[_i].op, admin_calls[_i].json, &reply, &info));
    ck_assert_uint_eq(got_op, admin_calls[_i].code);
    ck_assert_str_eq(got, admin_calls[_i].sent);
    ck_assert_str_eq(reply, "{\"x\": [1]} ");
    attnd_free(reply);
    attnd_close(client);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(admin_refuses_other_ops_and_bad_json) {
    fake_daemon *f = fake_daemon_start(answer, 0);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(f), &quick, &info));
    char *reply = NULL;
    const char *const others[] = {"hello", "step", "no such op", ""};
    for (int i = 0; i < 4; i++) {
        ATTND_CK_ERR(attnd_admin(client, others[i], NULL, &reply, &info), ATTND_ENOTSUP);
        ck_assert_str_eq(info.field, "op");
    }
    ATTND_CK_ERR(attnd_admin(client, "stats", "{}", &reply, &info), ATTND_EINVAL);
    ATTND_CK_ERR(attnd_admin(client, "drain", "{", &reply, &info), ATTND_EPROTO);
    ck_assert_str_eq(info.field, "json");
    ck_assert_uint_eq(got_op, 0); // nothing was sent
    attnd_close(client);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(request_over_the_daemons_limit_is_not_sent) {
    fake_daemon *f = fake_daemon_start(answer, 0);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(f), &quick, &info));
    client_msg m = {0};
    ATTND_CK_ERR(client_request(client, 65537, 0, &m, &info), ATTND_EMSGSIZE);
    ATTND_CK_ERR(client_request(client, UINT64_MAX, 0, &m, &info), ATTND_EMSGSIZE);
    ck_assert_ptr_null(m.data);
    ATTND_CK_OK(client_request(client, 65536, 0, &m, &info));
    ck_assert_uint_eq(m.bytes, 65536);
    client_msg_free(&m);
    attnd_close(client);
    fake_daemon_stop(f);
}
END_TEST

START_TEST(close_of_none_does_nothing) {
    attnd_close(NULL);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client");
    TCase *tc = tcase_create("client");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, connect_says_client_and_tenant);
    tcase_add_test(tc, connect_without_opts_has_defaults);
    tcase_add_test(tc, connect_refuses_bad_arguments);
    tcase_add_test(tc, connect_over_tcp_says_what_wants_a_ring);
    tcase_add_test(tc, connect_refuses_a_region_where_there_is_none);
    tcase_add_test(tc, connect_to_a_daemon_that_hangs_takes_its_timeout_once);
    tcase_add_loop_test(tc, connect_refuses_a_malformed_hello, 0,
                        sizeof(bad_hellos) / sizeof(bad_hellos[0]));
    tcase_add_test(tc, connect_takes_the_largest_limits);
    tcase_add_test(tc, connect_returns_the_error_of_hello);
    tcase_add_test(tc, admin_refuses_every_cut_of_a_reply);
    tcase_add_loop_test(tc, admin_sends_op_and_json_and_returns_the_reply, 0,
                        sizeof(admin_calls) / sizeof(admin_calls[0]));
    tcase_add_test(tc, admin_refuses_other_ops_and_bad_json);
    tcase_add_test(tc, request_over_the_daemons_limit_is_not_sent);
    tcase_add_test(tc, close_of_none_does_nothing);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
