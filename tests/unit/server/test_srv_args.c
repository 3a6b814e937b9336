// The command line, and which of default, file and flag wins.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/srv_args.h"
#include "tests/check_main.h"

static srv_args args;
static srv_conf conf;
static attnd_errinfo info;
static srv_conf_errors errors;

static attnd_err parse(int argc, const char *const *argv) {
    return srv_args_parse(&args, argc, (char **)argv, &info);
}
#define PARSE(...)                                                                \
    parse((int)(sizeof((const char *[]){"attnd", __VA_ARGS__}) / sizeof(char *)), \
          (const char *[]){"attnd", __VA_ARGS__, NULL})

START_TEST(flags_name_what_is_to_be_done) {
    ATTND_CK_OK(PARSE("--listen", "ipc:///a"));
    ck_assert_int_eq(args.mode, SRV_ARGS_SERVE);
    ck_assert_str_eq(args.listen, "ipc:///a");
    ck_assert_ptr_null(args.config);
    ATTND_CK_OK(PARSE("--listen=ipc:///a", "--listen", "tcp://b:1", "--config", "f"));
    ck_assert_str_eq(args.listen, "ipc:///a tcp://b:1");
    ck_assert_str_eq(args.config, "f");
    ATTND_CK_OK(PARSE("--check-config"));
    ck_assert_int_eq(args.mode, SRV_ARGS_CHECK_CONFIG);
    ATTND_CK_OK(PARSE("--dump-config"));
    ck_assert_int_eq(args.mode, SRV_ARGS_DUMP_CONFIG);
    ATTND_CK_OK(PARSE("--help"));
    ck_assert_int_eq(args.mode, SRV_ARGS_HELP);
    ATTND_CK_OK(PARSE("--version"));
    ck_assert_int_eq(args.mode, SRV_ARGS_VERSION);
    ck_assert(!args.no_keeper);
    ATTND_CK_OK(PARSE("--no-keeper", "--listen", "ipc:///a"));
    ck_assert(args.no_keeper);
}
END_TEST

START_TEST(what_is_no_flag_is_refused) {
    ATTND_CK_ERR(PARSE("--listem", "x"), ATTND_EINVAL);
    ATTND_CK_ERR(PARSE("--listen"), ATTND_EINVAL);
    ATTND_CK_ERR(PARSE("--listen", ""), ATTND_EINVAL);
    ATTND_CK_ERR(PARSE("-l", "x"), ATTND_EINVAL);
    ATTND_CK_ERR(PARSE("serve"), ATTND_EINVAL);
    ATTND_CK_ERR(PARSE("--set", "cache.memory"), ATTND_EINVAL);
    char url[SRV_CONF_TEXT_BYTES + 1];
    memset(url, 'u', sizeof(url) - 1);
    url[SRV_CONF_TEXT_BYTES] = '\0';
    ATTND_CK_ERR(PARSE("--listen", url), ATTND_EINVAL);
    url[SRV_CONF_TEXT_BYTES - 1] = '\0';
    ATTND_CK_OK(PARSE("--listen", url));
    ATTND_CK_ERR(PARSE("--listen", url, "--listen", "u"), ATTND_EINVAL);
}
END_TEST

START_TEST(a_flag_wins_over_the_file_and_the_file_over_the_default) {
    char path[] = "/tmp/attnd_args_XXXXXX";
    int fd = mkstemp(path);
    const char text[] = "[cache]\nmemory = 2GiB\nslab = 16MiB\n[server]\nlisten = ipc:///file\n";
    ck_assert_int_eq(write(fd, text, sizeof(text) - 1), sizeof(text) - 1);
    close(fd);
    ATTND_CK_OK(PARSE("--config", path, "--set", "cache.memory=4GiB"));
    ATTND_CK_OK(srv_args_conf(&args, &conf, &errors));
    ck_assert_uint_eq(conf.memory_bytes, 4ull << 30);
    ck_assert_uint_eq(conf.slab_bytes, 16ull << 20);
    ck_assert_uint_eq(conf.in_flight, 64);
    ck_assert_str_eq(conf.listen, "ipc:///file");
    ATTND_CK_OK(PARSE("--config", path, "--listen", "ipc:///flag"));
    ATTND_CK_OK(srv_args_conf(&args, &conf, &errors));
    ck_assert_str_eq(conf.listen, "ipc:///flag");
    ck_assert_str_eq(conf.device, "cpu");
    ATTND_CK_OK(PARSE("--device", "cuda:2"));
    ATTND_CK_OK(srv_args_conf(&args, &conf, &errors));
    ck_assert_str_eq(conf.device, "cuda:2");
    ATTND_CK_OK(PARSE("--set", "cache.memory=1MiB"));
    ATTND_CK_ERR(srv_args_conf(&args, &conf, &errors), ATTND_EINVAL); // less than a slab
    unlink(path);
}
END_TEST

START_TEST(all_that_is_wrong_is_told_with_where_it_stands) {
    char path[] = "/tmp/attnd_args_XXXXXX";
    int fd = mkstemp(path);
    const char text[] = "[cache]\nslab = big\n[x]\ny = 1\n";
    ck_assert_int_eq(write(fd, text, sizeof(text) - 1), sizeof(text) - 1);
    close(fd);
    ATTND_CK_OK(PARSE("--config", path, "--set", "limits.queue=0", "--set", "colour=red",
                      "--listen", "ipc:///a"));
    ATTND_CK_ERR(srv_args_conf(&args, &conf, &errors), ATTND_EINVAL);
    ck_assert_uint_eq(errors.num, 4);
    ck_assert_ptr_nonnull(strstr(errors.text[0], ":2: cache.slab: "));
    ck_assert_ptr_nonnull(strstr(errors.text[1], ":3: there is no section [x]"));
    ck_assert_str_eq(errors.text[2], "--set: limits.queue: \"0\" is not between 1 and 1048576");
    ck_assert_str_eq(errors.text[3],
                     "--set: unknown key colour: attnd --dump-config shows all of them");
    unlink(path);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_args");
    TCase *tc = tcase_create("srv_args");
    tcase_add_test(tc, flags_name_what_is_to_be_done);
    tcase_add_test(tc, what_is_no_flag_is_refused);
    tcase_add_test(tc, a_flag_wins_over_the_file_and_the_file_over_the_default);
    tcase_add_test(tc, all_that_is_wrong_is_told_with_where_it_stands);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
