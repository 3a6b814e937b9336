// The error table: numbers that travel on the wire never change, texts are found, errinfo is cut.
#include "proto/err.h"

#include <signal.h>
#include <string.h>

#include "tests/check_main.h"

// The wire's numbers, written out: a change here is a change of the protocol.
static const struct {
    int code;
    const char *name;
} wire[] = {
    {0, "OK"},         {-1, "EINVAL"},     {-2, "ENOMEM"},     {-3, "ENOSPC"},     {-4, "EBUSY"},
    {-5, "EMSGSIZE"},  {-6, "ENOTSUP"},    {-7, "ESTALE"},     {-8, "EPERM"},      {-9, "ENOENT"},
    {-10, "EEXIST"},   {-11, "ETIMEDOUT"}, {-12, "ECANCELED"}, {-13, "ESHUTDOWN"}, {-14, "EPROTO"},
    {-15, "EVERSION"}, {-16, "ECONN"},     {-17, "EIO"},       {-18, "ECUDA"},
};

START_TEST(errname_of_each_number_on_the_wire_is_fixed) {
    ck_assert_str_eq(attnd_errname((attnd_err)wire[_i].code), wire[_i].name);
    ck_assert_str_ne(attnd_strerror((attnd_err)wire[_i].code), "unknown error");
}
END_TEST

START_TEST(errname_of_a_number_that_is_no_code_is_unknown) {
    const int none[] = {1, -19, -1000, 0x7fffffff};
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
        ck_assert_str_eq(attnd_errname((attnd_err)none[i]), "EUNKNOWN");
        ck_assert_str_eq(attnd_strerror((attnd_err)none[i]), "unknown error");
    }
}
END_TEST

START_TEST(fail_fills_info_and_returns_the_code) {
    attnd_errinfo info = {.detail = 7};
    ATTND_CK_ERR(attnd_fail(&info, ATTND_EINVAL, "kv_len", "kv_len %d is negative", -3),
                 ATTND_EINVAL);
    ck_assert_int_eq(info.code, ATTND_EINVAL);
    ck_assert_int_eq(info.detail, 0);
    ck_assert_str_eq(info.field, "kv_len");
    ck_assert_str_eq(info.text, "kv_len -3 is negative");
}
END_TEST

START_TEST(fail_accepts_no_info_and_no_field) {
    ATTND_CK_ERR(attnd_fail(NULL, ATTND_EIO, "x", "y"), ATTND_EIO);
    attnd_errinfo info;
    ATTND_CK_ERR(attnd_fail(&info, ATTND_EIO, NULL, "y"), ATTND_EIO);
    ck_assert_str_eq(info.field, "");
}
END_TEST

START_TEST(fail_cuts_what_does_not_fit) {
    char longer[1000];
    memset(longer, 'a', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = '\0';
    attnd_errinfo info;
    attnd_fail(&info, ATTND_EIO, longer, "%s", longer);
    ck_assert_uint_eq(strlen(info.field), ATTND_ERR_FIELD_BYTES - 1);
    ck_assert_uint_eq(strlen(info.text), ATTND_ERR_TEXT_BYTES - 1);
}
END_TEST

START_TEST(assert_that_holds_does_nothing) {
    ATTND_ASSERT(1 + 1 == 2);
}
END_TEST

START_TEST(assert_that_does_not_hold_aborts) {
    ATTND_ASSERT(1 + 1 == 3);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("err");
    TCase *tc = tcase_create("err");
    tcase_add_loop_test(tc, errname_of_each_number_on_the_wire_is_fixed, 0,
                        sizeof(wire) / sizeof(wire[0]));
    tcase_add_test(tc, errname_of_a_number_that_is_no_code_is_unknown);
    tcase_add_test(tc, fail_fills_info_and_returns_the_code);
    tcase_add_test(tc, fail_accepts_no_info_and_no_field);
    tcase_add_test(tc, fail_cuts_what_does_not_fit);
    tcase_add_test(tc, assert_that_holds_does_nothing);
    tcase_add_test_raise_signal(tc, assert_that_does_not_hold_aborts, SIGABRT);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
