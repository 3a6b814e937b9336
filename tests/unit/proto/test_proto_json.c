// Reading of JSON objects: values, ranges, paths of errors, unknown and repeated keys.
#include "proto/proto_json.h"

#include <cjson/cJSON.h>
#include <float.h>
#include <stdio.h>
#include <string.h>

#include "tests/check_main.h"

static attnd_errinfo info;
static cJSON *doc;
static proto_obj o;

static void open_text(const char *text) {
    cJSON_Delete(doc);
    doc = NULL;
    memset(&info, 0, sizeof(info));
    ATTND_CK_OK(proto_json_parse(&doc, text, strlen(text), &info));
    proto_obj_open(&o, doc, &info);
}

static void drop(void) {
    cJSON_Delete(doc);
    doc = NULL;
}

// refused says that reading ended in EINVAL about that field.
static void refused(const char *field) {
    ATTND_CK_ERR(proto_obj_close(&o), ATTND_EINVAL);
    ck_assert_int_eq(info.code, ATTND_EINVAL);
    ck_assert_str_eq(info.field, field);
}

START_TEST(json_parse_refuses_bad_text) {
    cJSON *none = NULL;
    ATTND_CK_ERR(proto_json_parse(&none, "{", 1, &info), ATTND_EPROTO);
    ck_assert_ptr_null(none);
}
END_TEST

START_TEST(obj_reads_each_type) {
    open_text(
        "{\"b\":true,\"u\":4294967295,\"f\":-0.1,\"id\":\"ffffffffffffffff\",\"h\":\"00fFa5\","
        "\"t\":\"\xc3\xa9\\n\",\"fs\":[1,2.5],\"is\":[-1,2147483647],\"n\":null}");
    bool b = false;
    uint32_t u = 0, num = 9;
    float f = 0, fs[2];
    int32_t is[2];
    uint64_t id = 0;
    uint8_t h[3];
    char t[8] = "same";
    ck_assert(proto_obj_bool(&o, "b", &b) && b);
    ck_assert(proto_obj_u32(&o, "u", 0, UINT32_MAX, &u) && u == UINT32_MAX);
    ck_assert(proto_obj_float(&o, "f", &f) && f == -0.1f);
    ck_assert(proto_obj_id(&o, "id", &id) && id == UINT64_MAX);
    ck_assert(proto_obj_hex(&o, "h", h, 3) && h[0] == 0 && h[1] == 0xff && h[2] == 0xa5);
    ck_assert(proto_obj_floats(&o, "fs", fs, 2, &num) && num == 2 && fs[0] == 1 && fs[1] == 2.5f);
    ck_assert(proto_obj_ints(&o, "is", is, 2, &num) && num == 2 && is[0] == -1);
    ck_assert_int_eq(is[1], INT32_MAX);
    ck_assert(proto_obj_null(&o, "n"));
    ck_assert(!proto_obj_text(&o, "t", t, sizeof(t))); // a control character
    ck_assert_str_eq(t, "same");
    refused("t");
}
END_TEST

START_TEST(obj_missing_keys_leave_defaults) {
    open_text("{}");
    uint32_t u = 5, num = 6;
    float f = 7;
    proto_obj child, item = {0};
    ck_assert(!proto_obj_u32(&o, "u", 0, 1, &u));
    ck_assert(!proto_obj_floats(&o, "fs", &f, 1, &num));
    ck_assert(!proto_obj_child(&o, "c", &child));
    ck_assert(!proto_obj_each(&o, "a", &item));
    ck_assert(!proto_obj_null(&o, "n"));
    ck_assert(u == 5 && num == 6 && f == 7);
    ATTND_CK_OK(proto_obj_close(&o));
}
END_TEST

START_TEST(obj_require_refuses_a_missing_key) {
    open_text("{\"a\":1}");
    uint32_t u;
    proto_obj_require(&o, "a");
    proto_obj_u32(&o, "a", 0, 9, &u);
    proto_obj_require(&o, "layers");
    refused("layers");
}
END_TEST

START_TEST(obj_require_alone_does_not_use_a_key) {
    open_text("{\"a\":1}");
    proto_obj_require(&o, "a");
    refused("a");
}
END_TEST

// {text, what to read "x" as}
enum { BOOL, U32, FLOAT, ID, HEX, TEXT, FLOATS, INTS, CHILD, EACH };
static const struct {
    const char *text;
    int type;
    const char *field;
} wrong[] = {
    {"{\"x\":1}", BOOL, "x"},
    {"{\"x\":null}", BOOL, "x"},
    {"{\"x\":\"1\"}", U32, "x"},
    {"{\"x\":null}", U32, "x"},
    {"{\"x\":1.5}", U32, "x"},
    {"{\"x\":0}", U32, "x"}, // 1 to 10
    {"{\"x\":11}", U32, "x"},
    {"{\"x\":-1}", U32, "x"},
    {"{\"x\":4294967297}", U32, "x"}, // 2^32 + 1
    {"{\"x\":18446744073709551617}", U32, "x"},
    {"{\"x\":1e400}", U32, "x"},
    {"{\"x\":1e39}", FLOAT, "x"},
    {"{\"x\":-1e400}", FLOAT, "x"},
    {"{\"x\":true}", FLOAT, "x"},
    {"{\"x\":12}", ID, "x"},
    {"{\"x\":\"\"}", ID, "x"},
    {"{\"x\":\"0x1\"}", ID, "x"},
    {"{\"x\":\"12g\"}", ID, "x"},
    {"{\"x\":\" 1\"}", ID, "x"},
    {"{\"x\":\"10000000000000000\"}", ID, "x"}, // 17 digits
    {"{\"x\":\"00\"}", HEX, "x"},               // 3 bytes wanted
    {"{\"x\":\"0000000\"}", HEX, "x"},
    {"{\"x\":\"00000g\"}", HEX, "x"},
    {"{\"x\":[]}", HEX, "x"},
    {"{\"x\":\"12345678\"}", TEXT, "x"}, // room for 7
    {"{\"x\":\"\\u007f\"}", TEXT, "x"},
    {"{\"x\":{}}", TEXT, "x"},
    {"{\"x\":[1,2,3]}", FLOATS, "x"}, // at most 2
    {"{\"x\":[1,\"2\"]}", FLOATS, "x"},
    {"{\"x\":[1e39]}", FLOATS, "x"},
    {"{\"x\":1}", FLOATS, "x"},
    {"{\"x\":[2147483648]}", INTS, "x"},
    {"{\"x\":[-2147483649]}", INTS, "x"},
    {"{\"x\":[0.5]}", INTS, "x"},
    {"{\"x\":{}}", INTS, "x"},
    {"{\"x\":[]}", CHILD, "x"},
    {"{\"x\":null}", CHILD, "x"},
    {"{\"x\":{\"y\":{}}}", CHILD, "x.y"},
    {"{\"x\":{}}", EACH, "x"},
    {"{\"x\":[{},1]}", EACH, "x[1]"},
    {"{\"x\":[{},{},{\"y\":1}]}", EACH, "x[2].y"},
};

START_TEST(obj_refuses_wrong_types_and_ranges_by_path) {
    open_text(wrong[_i].text);
    uint8_t room[8];
    float fs[2];
    int32_t is[2];
    uint32_t num;
    proto_obj child = {0};
    switch (wrong[_i].type) {
    case BOOL:
        ck_assert(!proto_obj_bool(&o, "x", (bool *)room));
        break;
    case U32:
        ck_assert(!proto_obj_u32(&o, "x", 1, 10, &num));
        break;
    case FLOAT:
        ck_assert(!proto_obj_float(&o, "x", fs));
        break;
    case ID:
        ck_assert(!proto_obj_id(&o, "x", &(uint64_t){0}));
        break;
    case HEX:
        ck_assert(!proto_obj_hex(&o, "x", room, 3));
        break;
    case TEXT:
        ck_assert(!proto_obj_text(&o, "x", (char *)room, sizeof(room)));
        break;
    case FLOATS:
        ck_assert(!proto_obj_floats(&o, "x", fs, 2, &num));
        break;
    case INTS:
        ck_assert(!proto_obj_ints(&o, "x", is, 2, &num));
        break;
    case CHILD:
        if (proto_obj_child(&o, "x", &child)) {
            proto_obj_close(&child);
        }
        break;
    default:
        while (proto_obj_each(&o, "x", &child)) {
        }
        break;
    }
    refused(wrong[_i].field);
}
END_TEST

START_TEST(obj_takes_the_edges_of_ranges) {
    open_text("{\"lo\":1,\"hi\":10,\"max\":3.4028234663852886e38,\"min\":-2147483648,"
              "\"e\":1e1,\"id\":\"0\",\"t\":\"1234567\"}");
    uint32_t u;
    float f;
    uint64_t id = 9;
    char t[8];
    ck_assert(proto_obj_u32(&o, "lo", 1, 10, &u));
    ck_assert(proto_obj_u32(&o, "hi", 1, 10, &u));
    ck_assert(proto_obj_u32(&o, "e", 1, 10, &u) && u == 10);
    ck_assert(proto_obj_float(&o, "max", &f) && f == FLT_MAX);
    ck_assert(proto_obj_float(&o, "min", &f) && f == -2147483648.0f);
    ck_assert(proto_obj_id(&o, "id", &id) && id == 0);
    ck_assert(proto_obj_text(&o, "t", t, sizeof(t)));
    ck_assert_str_eq(t, "1234567");
    ATTND_CK_OK(proto_obj_close(&o));
}
END_TEST

START_TEST(obj_refuses_an_unknown_key_by_name) {
    open_text("{\"layers\":2,\"layrs\":3}");
    uint32_t u;
    proto_obj_u32(&o, "layers", 1, 8, &u);
    refused("layrs");
}
END_TEST

START_TEST(obj_refuses_a_key_that_is_there_twice) {
    open_text("{\"layers\":2,\"layers\":3}");
    uint32_t u = 0;
    proto_obj_u32(&o, "layers", 1, 8, &u);
    refused("layers");
    ck_assert_uint_eq(u, 2);
}
END_TEST

START_TEST(obj_refuses_more_keys_than_its_bound) {
    char text[2000] = "{";
    for (int i = 0; i < 64; i++) {
        sprintf(text + strlen(text), "\"k%d\":%d,", i, i);
    }
    strcpy(text + strlen(text) - 1, "}");
    open_text(text);
    for (int i = 0; i < 64; i++) {
        char key[16];
        uint32_t u = 99;
        sprintf(key, "k%d", i);
        ck_assert(proto_obj_u32(&o, key, 0, 63, &u));
        ck_assert_int_eq((int)u, i);
    }
    ATTND_CK_OK(proto_obj_close(&o));
    strcpy(text + strlen(text) - 1, ",\"k64\":64}");
    open_text(text);
    ATTND_CK_ERR(proto_obj_close(&o), ATTND_EINVAL);
}
END_TEST

START_TEST(obj_first_error_sticks) {
    open_text("{\"a\":\"x\",\"b\":\"y\"}");
    uint32_t u = 3;
    proto_obj_u32(&o, "a", 0, 9, &u);
    proto_obj_u32(&o, "b", 0, 9, &u);
    proto_obj_require(&o, "c");
    proto_obj_fail(&o, "d", ATTND_ENOTSUP, "later");
    ck_assert_uint_eq(u, 3);
    refused("a");
}
END_TEST

START_TEST(obj_fail_takes_code_and_path_of_the_caller) {
    open_text("{\"r\":{\"x\":1}}");
    proto_obj r;
    uint32_t u;
    ck_assert(proto_obj_child(&o, "r", &r));
    proto_obj_u32(&r, "x", 0, 9, &u);
    ATTND_CK_ERR(proto_obj_fail(&r, "x", ATTND_ENOTSUP, "no %d here", 1), ATTND_ENOTSUP);
    ATTND_CK_ERR(proto_obj_close(&r), ATTND_ENOTSUP);
    ATTND_CK_ERR(proto_obj_close(&o), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "r.x");
    ck_assert_str_eq(info.text, "r.x: no 1 here");
}
END_TEST

START_TEST(obj_child_error_is_the_parents) {
    open_text("{\"r\":{\"x\":1,\"y\":2},\"z\":3}");
    proto_obj r;
    uint32_t u;
    ck_assert(proto_obj_child(&o, "r", &r));
    proto_obj_u32(&r, "x", 0, 9, &u);
    proto_obj_close(&r);
    ck_assert(!proto_obj_u32(&o, "z", 0, 9, &u));
    refused("r.y");
}
END_TEST

START_TEST(obj_each_walks_all_elements) {
    open_text("{\"a\":[{\"layer\":3},{\"layer\":4},{\"layer\":5}],\"b\":[]}");
    proto_obj item = {0}, none = {0};
    uint32_t n = 0, layer = 0;
    while (proto_obj_each(&o, "a", &item)) {
        ck_assert(proto_obj_u32(&item, "layer", 0, 9, &layer));
        ck_assert_uint_eq(layer, 3 + n++);
    }
    ck_assert_uint_eq(n, 3);
    ck_assert(!proto_obj_each(&o, "b", &none));
    ATTND_CK_OK(proto_obj_close(&o));
}
END_TEST

START_TEST(obj_paths_of_hostile_keys_are_printable_and_cut) {
    open_text("{\"\\n\xc3\xa9"
              "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\":1}");
    ATTND_CK_ERR(proto_obj_close(&o), ATTND_EINVAL);
    ck_assert_uint_eq(strlen(info.field), ATTND_ERR_FIELD_BYTES - 1);
    ck_assert(strncmp(info.field, "???aaaa", 7) == 0);
}
END_TEST

START_TEST(json_ids_and_digests_go_both_ways) {
    const uint64_t ids[] = {0, 1, UINT64_C(0x8000000000000000), UINT64_MAX};
    const uint8_t digest[32] = {0, 1, 0x7f, 0x80, 0xff, [31] = 0xee};
    for (int i = 0; i < 4; i++) {
        cJSON *made = cJSON_CreateObject();
        ATTND_CK_OK(proto_json_add_id(made, "id", ids[i]));
        ATTND_CK_OK(proto_json_add_hex(made, "digest", digest, sizeof(digest)));
        char *text = cJSON_PrintUnformatted(made);
        open_text(text);
        uint64_t id = 5;
        uint8_t got[32] = {0};
        ck_assert(proto_obj_id(&o, "id", &id));
        ck_assert(proto_obj_hex(&o, "digest", got, sizeof(got)));
        ATTND_CK_OK(proto_obj_close(&o));
        ck_assert(id == ids[i]);
        ck_assert_mem_eq(got, digest, sizeof(digest));
        cJSON_free(text);
        cJSON_Delete(made);
    }
}
END_TEST

START_TEST(obj_works_without_info) {
    open_text("{\"a\":1}");
    proto_obj_open(&o, doc, NULL);
    ATTND_CK_ERR(proto_obj_close(&o), ATTND_EINVAL);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("proto_json");
    TCase *tc = tcase_create("obj");
    tcase_add_checked_fixture(tc, NULL, drop);
    tcase_add_test(tc, json_parse_refuses_bad_text);
    tcase_add_test(tc, obj_reads_each_type);
    tcase_add_test(tc, obj_missing_keys_leave_defaults);
    tcase_add_test(tc, obj_require_refuses_a_missing_key);
    tcase_add_test(tc, obj_require_alone_does_not_use_a_key);
    tcase_add_loop_test(tc, obj_refuses_wrong_types_and_ranges_by_path, 0,
                        sizeof(wrong) / sizeof(wrong[0]));
    tcase_add_test(tc, obj_takes_the_edges_of_ranges);
    tcase_add_test(tc, obj_refuses_an_unknown_key_by_name);
    tcase_add_test(tc, obj_refuses_a_key_that_is_there_twice);
    tcase_add_test(tc, obj_refuses_more_keys_than_its_bound);
    tcase_add_test(tc, obj_first_error_sticks);
    tcase_add_test(tc, obj_fail_takes_code_and_path_of_the_caller);
    tcase_add_test(tc, obj_child_error_is_the_parents);
    tcase_add_test(tc, obj_each_walks_all_elements);
    tcase_add_test(tc, obj_paths_of_hostile_keys_are_printable_and_cut);
    tcase_add_test(tc, json_ids_and_digests_go_both_ways);
    tcase_add_test(tc, obj_works_without_info);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
