// The layout of a ring's region, with the numbers worked out by hand.
#include "proto/proto_ring.h"
#include "tests/check_main.h"

static proto_ring_layout l;
static attnd_errinfo info;

START_TEST(queues_follow_the_head_and_data_begins_at_a_page) {
    ATTND_CK_OK(proto_ring_layout_make(&l, 64, 65536, &info));
    ck_assert_uint_eq(l.entries, 64);
    ck_assert_uint_eq(l.sq_off, 4096);
    ck_assert_uint_eq(l.cq_off, 4096 + 2048);
    ck_assert_uint_eq(l.data_off, 8192); // 4096 + 2048 + 1024 = 7168
    ck_assert_uint_eq(l.data_bytes, 65536);
    ck_assert_uint_eq(l.bytes, 8192 + 65536);
}
END_TEST

START_TEST(the_largest_queues_fill_twelve_pages) {
    ATTND_CK_OK(proto_ring_layout_make(&l, 1024, 1, &info));
    ck_assert_uint_eq(l.cq_off, 4096 + 32768);
    ck_assert_uint_eq(l.data_off, 4096 + 32768 + 16384);
    ck_assert_uint_eq(l.data_bytes, 4096); // rounded up
    ck_assert_uint_eq(l.bytes, 57344);
}
END_TEST

START_TEST(entries_are_a_power_of_two_within_limits) {
    static const uint32_t bad[] = {0, 1, 3, 63, 1023, 1025, 2048, 0x80000000u, UINT32_MAX};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ATTND_CK_ERR(proto_ring_layout_make(&l, bad[i], 4096, &info), ATTND_EINVAL);
        ck_assert_str_eq(info.field, "entries");
    }
    ATTND_CK_OK(proto_ring_layout_make(&l, 2, 4096, &info));
    ATTND_CK_OK(proto_ring_layout_make(&l, 1024, 4096, &info));
}
END_TEST

START_TEST(data_has_bounds_and_cannot_overflow) {
    ATTND_CK_ERR(proto_ring_layout_make(&l, 2, 0, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "data_bytes");
    ATTND_CK_OK(proto_ring_layout_make(&l, 2, UINT64_C(1) << 40, &info));
    ATTND_CK_ERR(proto_ring_layout_make(&l, 2, (UINT64_C(1) << 40) + 1, &info), ATTND_EMSGSIZE);
    ATTND_CK_ERR(proto_ring_layout_make(&l, 2, UINT64_MAX, &info), ATTND_EMSGSIZE);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("proto_ring");
    TCase *tc = tcase_create("layout");
    tcase_add_test(tc, queues_follow_the_head_and_data_begins_at_a_page);
    tcase_add_test(tc, the_largest_queues_fill_twelve_pages);
    tcase_add_test(tc, entries_are_a_power_of_two_within_limits);
    tcase_add_test(tc, data_has_bounds_and_cannot_overflow);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
