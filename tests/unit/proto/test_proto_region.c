// Places in a region, with the numbers worked out by hand.
#include "proto/proto_region.h"
#include "tests/check_main.h"

enum { REGION = 65536 };

static attnd_errinfo info;
static proto_region_view view;

START_TEST(flags_are_a_head_and_whole_pages_of_512_pairs) {
    ck_assert_uint_eq(proto_flags_bytes(1), 8192);
    ck_assert_uint_eq(proto_flags_bytes(512), 8192);
    ck_assert_uint_eq(proto_flags_bytes(513), 12288);
    ck_assert_uint_eq(proto_flags_bytes(PROTO_REGION_MAX_FLAGS), 4096 + 32768);
}
END_TEST

START_TEST(an_array_lies_inside_at_a_multiple_of_256) {
    static const struct {
        uint64_t off, bytes;
        attnd_err err;
    } cases[] = {
        {0, REGION, ATTND_OK},
        {256, REGION - 256, ATTND_OK},
        {REGION, 0, ATTND_OK},
        {0, REGION + 1, ATTND_EINVAL},
        {256, REGION - 255, ATTND_EINVAL},
        {REGION, 1, ATTND_EINVAL},
        {255, 1, ATTND_EINVAL},
        {REGION + 256, 0, ATTND_EINVAL},
        {UINT64_MAX - 255, 256, ATTND_EINVAL}, // the end is 0
        {256, UINT64_MAX, ATTND_EINVAL},
        {PROTO_REGION_NONE, 0, ATTND_EINVAL},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        attnd_err err = proto_region_array(REGION, "x", cases[i].off, cases[i].bytes, &info);
        ck_assert_msg(err == cases[i].err, "case %zu: %s", i, attnd_errname(err));
    }
    ck_assert_str_eq(info.field, "x");
}
END_TEST

START_TEST(a_tensor_takes_what_its_strides_say) {
    // 3 tokens, 4 heads of 32 floats: 384 elements of 4 bytes when packed
    const proto_tensor_shape shape = {3, 4, 32, ATTND_F32};
    proto_region_tensor t = {.off = 256};
    ATTND_CK_OK(proto_region_place(REGION, "q", &t, &shape, &view, &info));
    ck_assert_uint_eq(view.off, 256);
    ck_assert_uint_eq(view.bytes, 1536);
    ck_assert_int_eq(view.stride_token, 128);
    ck_assert_int_eq(view.stride_head, 32);
    t.stride_token = 1000;
    t.stride_head = 40; // 2 * 1000 + 3 * 40 + 32 = 2152 elements
    ATTND_CK_OK(proto_region_place(REGION, "q", &t, &shape, &view, &info));
    ck_assert_uint_eq(view.bytes, 8608);
    t.off = REGION - 8704; // 34 * 256
    ATTND_CK_OK(proto_region_place(REGION, "q", &t, &shape, &view, &info));
    t.off += 256;
    ATTND_CK_ERR(proto_region_place(REGION, "q", &t, &shape, &view, &info), ATTND_EINVAL);
    t.off = 0;
    t.stride_token = 1001;
    ATTND_CK_ERR(proto_region_place(REGION, "q", &t, &shape, &view, &info), ATTND_EINVAL);
    t.stride_token = 0xfffffff8;
    ATTND_CK_ERR(proto_region_place(UINT64_MAX / 2, "q", &t,
                                    &(proto_tensor_shape){UINT64_MAX / 4, 4, 32, ATTND_F32}, &view,
                                    &info),
                 ATTND_EINVAL); // its extent is more than 64 bits hold
}
END_TEST

START_TEST(a_tensor_without_rows_takes_nothing) {
    const proto_tensor_shape none = {0, 4, 32, ATTND_BF16};
    proto_region_tensor t = {.off = REGION};
    ATTND_CK_OK(proto_region_place(REGION, "k", &t, &none, &view, &info));
    ck_assert_uint_eq(view.bytes, 0);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("proto_region");
    TCase *t = tcase_create("places");
    tcase_add_test(t, flags_are_a_head_and_whole_pages_of_512_pairs);
    tcase_add_test(t, an_array_lies_inside_at_a_multiple_of_256);
    tcase_add_test(t, a_tensor_takes_what_its_strides_say);
    tcase_add_test(t, a_tensor_without_rows_takes_nothing);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
