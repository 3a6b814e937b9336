// Layout of requests: what is measured is what is written, offsets are aligned, tensors packed.
#include "proto/client/client_sheet.h"

#include <string.h>

#include "tests/check_main.h"

START_TEST(sheet_places_arrays_at_multiples_of_eight) {
    client_sheet s;
    client_sheet_begin(&s, NULL, 24);
    ck_assert_uint_eq(s.end, 56);
    ck_assert_uint_eq(client_sheet_place(&s, 5), 56);
    ck_assert_uint_eq(s.end, 61);
    ck_assert_uint_eq(client_sheet_place(&s, 0), 64);
    ck_assert_uint_eq(client_sheet_place(&s, 8), 64);
    ck_assert_uint_eq(s.end, 72);
}
END_TEST

START_TEST(sheet_without_a_message_only_measures) {
    client_sheet s;
    client_sheet_begin(&s, NULL, 8);
    client_sheet_set(&s, 32, "abcd", 4);
    ck_assert_uint_eq(client_sheet_put(&s, "abcd", 4), 40);
    ck_assert_uint_eq(client_sheet_put(&s, NULL, 4), 0);
    ck_assert_uint_eq(s.end, 44);
}
END_TEST

START_TEST(sheet_measures_more_than_32_bits) {
    client_sheet s;
    client_sheet_begin(&s, NULL, 0);
    client_sheet_place(&s, UINT64_C(1) << 33);
    ck_assert_uint_eq(s.end, (UINT64_C(1) << 33) + 32);
}
END_TEST

START_TEST(sheet_writes_where_it_measured) {
    uint8_t msg[64] = {0};
    client_sheet s;
    client_sheet_begin(&s, msg, 8);
    client_sheet_set(&s, 32, "fixed", 5);
    ck_assert_uint_eq(client_sheet_put(&s, "one", 3), 40);
    ck_assert_uint_eq(client_sheet_put(&s, "two", 3), 48);
    ck_assert_mem_eq(msg + 32, "fixed\0\0\0one\0\0\0\0\0two\0\0\0\0\0", 24);
}
END_TEST

// A caller's tensor [3, 2, 2] of 16-bit numbers t * 100 + h * 10 + d in any strides.
static const struct {
    uint64_t stride_token, stride_head;
} strides[] = {{0, 0}, {4, 2}, {10, 0}, {0, 2}, {20, 7}, {2, 6}, {7, 2}};

START_TEST(sheet_packs_tensors_of_any_strides) {
    uint64_t token = strides[_i].stride_token ? strides[_i].stride_token : 4;
    uint64_t head = strides[_i].stride_head ? strides[_i].stride_head : 2;
    uint16_t from[64];
    memset(from, 0xee, sizeof(from));
    for (uint16_t t = 0; t < 3; t++) {
        for (uint16_t h = 0; h < 2; h++) {
            for (uint16_t d = 0; d < 2; d++) {
                from[t * token + h * head + d] = (uint16_t)(t * 100 + h * 10 + d);
            }
        }
    }
    client_tensor tensor = {from, 3, 2, 2, 2, strides[_i].stride_token, strides[_i].stride_head};
    uint8_t msg[64] = {0};
    client_sheet s;
    client_sheet_begin(&s, msg, 0);
    proto_tensor out = client_sheet_put_tensor(&s, &tensor);
    ck_assert_uint_eq(out.off, 32);
    ck_assert_uint_eq(out.stride_token | out.stride_head | out.reserved, 0);
    ck_assert_uint_eq(s.end, 32 + 24);
    const uint16_t want[12] = {0, 1, 10, 11, 100, 101, 110, 111, 200, 201, 210, 211};
    ck_assert_mem_eq(msg + 32, want, sizeof(want));
}
END_TEST

START_TEST(sheet_puts_no_tensor_for_null) {
    client_tensor tensor = {NULL, 3, 2, 2, 2, 0, 0};
    client_sheet s;
    client_sheet_begin(&s, NULL, 0);
    ck_assert_uint_eq(client_sheet_put_tensor(&s, &tensor).off, 0);
    ck_assert_uint_eq(s.end, 32);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_sheet");
    TCase *tc = tcase_create("sheet");
    tcase_add_test(tc, sheet_places_arrays_at_multiples_of_eight);
    tcase_add_test(tc, sheet_without_a_message_only_measures);
    tcase_add_test(tc, sheet_measures_more_than_32_bits);
    tcase_add_test(tc, sheet_writes_where_it_measured);
    tcase_add_loop_test(tc, sheet_packs_tensors_of_any_strides, 0,
                        sizeof(strides) / sizeof(strides[0]));
    tcase_add_test(tc, sheet_puts_no_tensor_for_null);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
