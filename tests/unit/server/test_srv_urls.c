// Where the daemon listens, and what cannot be listened on.
#include <string.h>

#include "server/srv_urls.h"
#include "tests/check_main.h"

static srv_conf conf;
static srv_urls urls;
static srv_conf_errors errors;

static attnd_err read(const char *listen, const char *admin, const char *attach) {
    srv_conf_init(&conf);
    memset(&errors, 0, sizeof(errors));
    strcpy(conf.listen, listen);
    strcpy(conf.admin, admin);
    strcpy(conf.attach_socket, attach);
    return srv_urls_read(&urls, &conf, &errors);
}

static void ck_refused(const char *listen, const char *admin, const char *attach,
                       const char *part) {
    ATTND_CK_ERR(read(listen, admin, attach), ATTND_EINVAL);
    ck_assert_uint_eq(errors.num, 1);
    ck_assert_msg(strstr(errors.text[0], part), "\"%s\" is not in \"%s\"", part, errors.text[0]);
}

START_TEST(names_follow_from_the_first_ipc_url) {
    ATTND_CK_OK(read("tcp://h:1 ipc:///a/b  ipc:///c", "", ""));
    ck_assert_uint_eq(urls.num_clients, 3);
    ck_assert_str_eq(urls.clients[0], "tcp://h:1");
    ck_assert_str_eq(urls.clients[2], "ipc:///c");
    ck_assert_str_eq(urls.admin, "ipc:///a/b.admin");
    ck_assert_str_eq(urls.attach, "/a/b.attach");
}
END_TEST

START_TEST(what_is_named_is_taken) {
    ATTND_CK_OK(read("ipc:///a", "ipc:///b", "/c"));
    ck_assert_str_eq(urls.admin, "ipc:///b");
    ck_assert_str_eq(urls.attach, "/c");
    ATTND_CK_OK(read("ipc:///a", "", "none"));
    ck_assert_str_eq(urls.attach, "");
    ATTND_CK_OK(read("tcp://h:1", "ipc:///b", ""));
    ck_assert_str_eq(urls.attach, "");
}
END_TEST

START_TEST(tcp_needs_host_and_port) {
    ATTND_CK_OK(read("tcp://127.0.0.1:65535 tcp://*:1 tcp://:2 tcp://[::1]:3", "ipc:///b", ""));
    static const char *const wrong[] = {
        "tcp://",        "tcp://h",     "tcp://h:",   "tcp://h:0",  "tcp://h:1x",
        "tcp://h:65536", "tcp://::1:3", "tcp://h:-1", "tcp://h:1/p"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        ck_refused(wrong[i], "ipc:///b", "", "HOST:PORT");
    }
}
END_TEST

START_TEST(other_schemes_are_refused) {
    ck_refused("foo://x", "ipc:///b", "", "foo://x: neither ipc://PATH nor tcp://HOST:PORT");
    ck_refused("/run/x", "ipc:///b", "", "/run/x: neither");
    ck_refused("ipc:///a", "tcp://h:1", "", "server.admin");
    ck_refused("ipc://", "ipc:///b", "/c", "path is missing");
}
END_TEST

START_TEST(a_path_fits_a_socket_address) {
    char url[256] = "ipc:///";
    memset(url + 7, 'a', 200);
    url[6 + 107] = '\0';
    ATTND_CK_OK(read(url, "ipc:///b", "/c"));
    ck_refused(url, "", "/c", "server.listen with .admin appended");
    ck_refused(url, "ipc:///b", "", "server.listen with .attach appended");
    url[6 + 107 - 7] = '\0';
    ATTND_CK_OK(read(url, "", ""));
    ck_assert_uint_eq(strlen(urls.attach), 107);
    url[6 + 107 - 7] = 'a';
    url[6 + 107] = 'a';
    url[6 + 108] = '\0';
    ck_refused(url, "ipc:///b", "/c", "at most 107 bytes, this one has 108");
    ck_refused("ipc:///a", url, "", "server.admin");
    ck_refused("ipc:///a", "", url + 6, "server.attach_socket");
}
END_TEST

START_TEST(sockets_are_different) {
    ck_refused("ipc:///a ipc:///a", "", "", "twice");
    ck_refused("ipc:///a", "ipc:///a", "", "server.admin");
    ck_refused("ipc:///a", "", "/a", "server.attach_socket");
    ck_refused("ipc:///a", "ipc:///b", "/b", "server.attach_socket and server.admin");
}
END_TEST

START_TEST(there_are_one_to_eight) {
    ck_refused("", "ipc:///b", "", "server.listen is empty");
    ck_refused("  ", "ipc:///b", "", "server.listen is empty");
    ATTND_CK_OK(
        read("ipc:///1 ipc:///2 ipc:///3 ipc:///4 ipc:///5 ipc:///6 ipc:///7 ipc:///8", "", ""));
    ck_refused("ipc:///1 ipc:///2 ipc:///3 ipc:///4 ipc:///5 ipc:///6 ipc:///7 ipc:///8 ipc:///9",
               "", "", "ipc:///9: more than 8");
    ck_refused("tcp://h:1", "", "", "server.admin must be set");
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_urls");
    TCase *tc = tcase_create("srv_urls");
    tcase_add_test(tc, names_follow_from_the_first_ipc_url);
    tcase_add_test(tc, what_is_named_is_taken);
    tcase_add_test(tc, tcp_needs_host_and_port);
    tcase_add_test(tc, other_schemes_are_refused);
    tcase_add_test(tc, a_path_fits_a_socket_address);
    tcase_add_test(tc, sockets_are_different);
    tcase_add_test(tc, there_are_one_to_eight);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
