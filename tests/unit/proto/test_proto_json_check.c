// The JSON grammar: what RFC 8259 allows is taken, what it forbids (and what cJSON would let
// through) is refused, at every cut of a good text too.
#include <string.h>

#include "proto/proto_json.h"
#include "tests/check_main.h"

static attnd_errinfo info;

// check_exact checks a copy in a block of just its size, so that a sanitizer sees a read past it.
static attnd_err check_exact(const char *text, size_t bytes) {
    char *copy = malloc(bytes ? bytes : 1);
    memcpy(copy, text, bytes);
    attnd_err err = proto_json_check(copy, bytes, &info);
    free(copy);
    return err;
}

static const char *const good[] = {
    "{}",
    " \t\r\n{ } \n",
    "{\"a\":1}",
    "{\"a\" : [ ] , \"b\" : [ 1 , 2 ] , \"c\" : { } }",
    "{\"a\":true,\"b\":false,\"c\":null}",
    "{\"a\":-0,\"b\":0.5,\"c\":-12.25e+10,\"d\":1E-3,\"e\":0e0,\"f\":1e5}",
    "{\"\":\"\"}",
    "{\"a\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0001\\u00e9\\ud83d\\ude00\\uFFFF\"}",
    "{\"a\":\"\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf\"}",
    "{\"a\":\"\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\"}",
    "{\"a\":[[[[[[[1]]]]]]]}",                                                 // 8 levels
    "{\"a\":123456789012345678901234567890123456789012345678901234567890123}", // 63 digits
};

START_TEST(json_check_takes_good_text) {
    ATTND_CK_OK(check_exact(good[_i], strlen(good[_i])));
}
END_TEST

START_TEST(json_check_refuses_every_cut_of_good_text) {
    size_t end = strlen(good[_i]);
    while (good[_i][end - 1] != '}') {
        end--;
    }
    for (size_t n = 0; n < end; n++) {
        ATTND_CK_ERR(check_exact(good[_i], n), ATTND_EPROTO);
    }
}
END_TEST

static const char *const bad[] = {
    "",
    " ",
    "1",
    "[]",
    "null",
    "\"a\"",
    "{}{}",
    "{},",
    "{}x",
    "{]",
    "{,}",
    "{\"a\":1,}",
    "{\"a\"}",
    "{\"a\":}",
    "{\"a\" 1}",
    "{a:1}",
    "{'a':1}",
    "{1:1}",
    "{\"a\":[1,]}",
    "{\"a\":[1 2]}",
    "{\"a\":[1}",
    "{\"a\":{]}",
    "{\"a\":01}",
    "{\"a\":-01}",
    "{\"a\":+1}",
    "{\"a\":.5}",
    "{\"a\":1.}",
    "{\"a\":-}",
    "{\"a\":1e}",
    "{\"a\":1e+}",
    "{\"a\":0x10}",
    "{\"a\":1.2.3}",
    "{\"a\":NaN}",
    "{\"a\":Infinity}",
    "{\"a\":nan}",
    "{\"a\":tru}",
    "{\"a\":True}",
    "{\"a\":nulll}",
    "{\"a\":\"\n\"}",
    "{\"a\":\"\x1f\"}",
    "{\"a\":\"\\x41\"}",
    "{\"a\":\"\\u12g4\"}",
    "{\"a\":\"\\u0000\"}",
    "{\"a\\u0000b\":1}",
    "{\"a\":\"\\ud83d\"}",
    "{\"a\":\"\\ud83dx\"}",
    "{\"a\":\"\\ud83d\\n\"}",
    "{\"a\":\"\\ud83d\\u0041\"}",
    "{\"a\":\"\\ude00\"}",
    "{\"a\":\"\x80\"}",
    "{\"a\":\"\xc0\x80\"}",         // overlong NUL
    "{\"a\":\"\xc1\xbf\"}",         // overlong
    "{\"a\":\"\xe0\x9f\xbf\"}",     // overlong
    "{\"a\":\"\xed\xa0\x80\"}",     // surrogate
    "{\"a\":\"\xf0\x8f\xbf\xbf\"}", // overlong
    "{\"a\":\"\xf4\x90\x80\x80\"}", // over U+10FFFF
    "{\"a\":\"\xf5\x80\x80\x80\"}",
    "{\"a\":\"\xc2\"}",
    "{\"a\":\"\xe2\x82\"}",
    "{\"a\":[[[[[[[[1]]]]]]]]}",                                                // 9 levels
    "{\"a\":1234567890123456789012345678901234567890123456789012345678901234}", // 64 digits
    "\xef\xbb\xbf{}",                                                           // byte order mark
    "{} // comment",
    "{\"a\":/**/1}",
};

START_TEST(json_check_refuses_bad_text) {
    ATTND_CK_ERR(check_exact(bad[_i], strlen(bad[_i])), ATTND_EPROTO);
    ck_assert_str_eq(info.field, "json");
}
END_TEST

START_TEST(json_check_refuses_a_nul_byte) {
    ATTND_CK_ERR(check_exact("{}\0", 3), ATTND_EPROTO);
    ATTND_CK_ERR(check_exact("{\"a\0\":1}", 8), ATTND_EPROTO);
    ATTND_CK_ERR(check_exact("{\"a\":\"\\\0\"}", 9), ATTND_EPROTO);
}
END_TEST

START_TEST(json_check_says_where_it_is_wrong) {
    ATTND_CK_ERR(check_exact("{\"a\":01}", 8), ATTND_EPROTO);
    ck_assert_str_eq(info.text, "JSON: ',' or a closing bracket is expected at byte 6");
}
END_TEST

START_TEST(json_check_bounds_the_size) {
    size_t max = 1 << 20;
    char *text = malloc(max + 1);
    memset(text, ' ', max + 1);
    memcpy(text, "{}", 2);
    ATTND_CK_OK(proto_json_check(text, max, &info));
    ATTND_CK_ERR(proto_json_check(text, max + 1, &info), ATTND_EMSGSIZE);
    free(text);
}
END_TEST

START_TEST(json_check_survives_a_mebibyte_of_brackets) {
    size_t max = 1 << 20;
    char *text = malloc(max);
    memset(text, '[', max);
    memcpy(text, "{\"a\":", 5);
    ATTND_CK_ERR(proto_json_check(text, max, &info), ATTND_EPROTO);
    free(text);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("proto_json_check");
    TCase *tc = tcase_create("grammar");
    tcase_add_loop_test(tc, json_check_takes_good_text, 0, sizeof(good) / sizeof(good[0]));
    tcase_add_loop_test(tc, json_check_refuses_every_cut_of_good_text, 0,
                        sizeof(good) / sizeof(good[0]));
    tcase_add_loop_test(tc, json_check_refuses_bad_text, 0, sizeof(bad) / sizeof(bad[0]));
    tcase_add_test(tc, json_check_refuses_a_nul_byte);
    tcase_add_test(tc, json_check_says_where_it_is_wrong);
    tcase_add_test(tc, json_check_bounds_the_size);
    tcase_add_test(tc, json_check_survives_a_mebibyte_of_brackets);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
