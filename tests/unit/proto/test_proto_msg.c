// The wire reader: good messages are read, and every way of lying about sizes is refused.  Messages
// lie at the end of a heap block, so that a sanitizer sees a read past them.
#include "proto/proto_msg.h"

#include <string.h>

#include "tests/check_main.h"

static attnd_errinfo info;

// copy_exact puts bytes of data into a heap block of just that size, aligned as NNG aligns.
static uint8_t *block;
static proto_view copy_exact(const void *data, size_t bytes) {
    free(block);
    block = malloc(bytes + 4);
    memcpy(block + 4, data, bytes);
    return (proto_view){block + 4, bytes};
}

static void drop_block(void) {
    free(block);
    block = NULL;
}

static proto_header good_header(uint32_t body_bytes) {
    return (proto_header){.magic = 0x444e5441,
                          .version = 1,
                          .op = PROTO_ATTEND,
                          .request = 7,
                          .body_bytes = body_bytes};
}

START_TEST(header_bytes_are_as_specified) {
    uint8_t msg[40] = {0};
    proto_write_header(msg, PROTO_STEP, UINT64_C(0x1122334455667788), ATTND_ENOSPC, sizeof(msg));
    const uint8_t want[32] = {'A',  'T',  'N',  'D',  1,    0,    32, 0, 0x88, 0x77, 0x66,
                              0x55, 0x44, 0x33, 0x22, 0x11, 0,    0,  0, 0,    8,    0,
                              0,    0,    0xfd, 0xff, 0xff, 0xff, 0,  0, 0,    0};
    ck_assert_mem_eq(msg, want, sizeof(want));
}
END_TEST

START_TEST(read_header_takes_a_good_one) {
    proto_header h = good_header(0), got;
    ATTND_CK_OK(proto_read_header(copy_exact(&h, sizeof(h)), &got, &info));
    ck_assert_mem_eq(&h, &got, sizeof(h));
}
END_TEST

START_TEST(read_header_refuses_every_shorter_message) {
    proto_header h = good_header(0), got;
    for (size_t n = 0; n < sizeof(h); n++) {
        ATTND_CK_ERR(proto_read_header(copy_exact(&h, n), &got, &info), ATTND_EPROTO);
    }
}
END_TEST

START_TEST(read_header_refuses_garbage) {
    proto_header got, h = good_header(0);
    h.magic ^= 1;
    ATTND_CK_ERR(proto_read_header(copy_exact(&h, sizeof(h)), &got, &info), ATTND_EPROTO);
    ck_assert_str_eq(info.field, "magic");
    h = good_header(1);
    ATTND_CK_ERR(proto_read_header(copy_exact(&h, sizeof(h)), &got, &info), ATTND_EPROTO);
    ck_assert_str_eq(info.field, "body_bytes");
    h = good_header(UINT32_MAX);
    ATTND_CK_ERR(proto_read_header(copy_exact(&h, sizeof(h)), &got, &info), ATTND_EPROTO);
    h = good_header(0);
    h.request = 0;
    ATTND_CK_ERR(proto_read_header(copy_exact(&h, sizeof(h)), &got, &info), ATTND_EPROTO);
    ck_assert_str_eq(info.field, "request");
}
END_TEST

START_TEST(read_header_gives_op_and_request_with_eversion) {
    const uint16_t versions[] = {0, 2, UINT16_MAX};
    for (int i = 0; i < 3; i++) {
        proto_header h = good_header(99), got = {0}; // nothing behind the version counts
        h.version = versions[i];
        h.flags = 1;
        ATTND_CK_ERR(proto_read_header(copy_exact(&h, sizeof(h)), &got, &info), ATTND_EVERSION);
        ck_assert_uint_eq(got.op, PROTO_ATTEND);
        ck_assert_uint_eq(got.request, 7);
    }
}
END_TEST

START_TEST(read_header_refuses_what_must_be_zero_by_name) {
    for (int i = 0; i < 3; i++) {
        proto_header h = good_header(0), got = {0};
        const char *const names[] = {"flags", "status", "reserved"};
        *(i == 0 ? &h.flags : i == 1 ? (uint32_t *)&h.status : &h.reserved) = 0x80000000u;
        ATTND_CK_ERR(proto_read_header(copy_exact(&h, sizeof(h)), &got, &info), ATTND_EINVAL);
        ck_assert_str_eq(info.field, names[i]);
        ck_assert_uint_eq(got.request, 7);
    }
}
END_TEST

START_TEST(read_takes_the_fixed_part) {
    uint8_t msg[48];
    memset(msg, 0xab, sizeof(msg));
    proto_header h = good_header(16);
    memcpy(msg, &h, sizeof(h));
    uint8_t out[16] = {0};
    ATTND_CK_OK(proto_read(copy_exact(msg, 48), out, 16, true, &info));
    ck_assert_mem_eq(out, msg + 32, 16);
    ATTND_CK_OK(proto_read(copy_exact(msg, 48), out, 8, false, &info));
    ATTND_CK_ERR(proto_read(copy_exact(msg, 48), out, 8, true, &info), ATTND_EPROTO);
    ATTND_CK_ERR(proto_read(copy_exact(msg, 48), out, 17, false, &info), ATTND_EPROTO);
    ATTND_CK_OK(proto_read(copy_exact(msg, 32), out, 0, true, &info));
    ATTND_CK_ERR(proto_read(copy_exact(msg, 31), out, 1, false, &info), ATTND_EPROTO);
}
END_TEST

// A message of 128 bytes with a fixed part of 24: arrays may lie in 56..128.
static const struct {
    uint64_t off, count, elem_bytes;
    attnd_err want;
} arrays[] = {
    {56, 9, 8, ATTND_OK},
    {56, 10, 8, ATTND_EPROTO},
    {56, 72, 1, ATTND_OK},
    {56, 73, 1, ATTND_EPROTO},
    {120, 1, 8, ATTND_OK},
    {120, 2, 8, ATTND_EPROTO},
    {128, 0, 8, ATTND_OK},
    {128, 1, 1, ATTND_EPROTO},
    {136, 0, 8, ATTND_EPROTO},
    {48, 1, 8, ATTND_EPROTO}, // inside the fixed part
    {32, 1, 8, ATTND_EPROTO},
    {8, 1, 8, ATTND_EPROTO}, // inside the header
    {57, 1, 1, ATTND_EPROTO},
    {60, 1, 4, ATTND_EPROTO},
    {UINT32_MAX, 1, 1, ATTND_EPROTO},
    {0xfffffff8u, 1, 8, ATTND_EPROTO},
    {UINT64_MAX - 7, 1, 8, ATTND_EPROTO},
    {UINT64_MAX - 7, 0, 8, ATTND_EPROTO},
    {56, UINT64_MAX, 8, ATTND_EPROTO},
    {56, UINT64_C(1) << 61, 8, ATTND_EPROTO}, // the product is 2^64
    {56, (UINT64_C(1) << 61) + 1, 8, ATTND_EPROTO},
    {56, UINT64_C(1) << 63, 2, ATTND_EPROTO},
    {56, UINT32_MAX, UINT32_MAX, ATTND_EPROTO},
};

START_TEST(array_lies_behind_the_fixed_part_and_in_the_message) {
    uint8_t bytes[128] = {0};
    proto_view msg = copy_exact(bytes, sizeof(bytes));
    const void *out = &info;
    ATTND_CK_ERR(proto_array(msg, "tokens_off", arrays[_i].off, arrays[_i].count,
                             arrays[_i].elem_bytes, 24, &out, &info),
                 arrays[_i].want);
    if (arrays[_i].want == ATTND_OK) {
        ck_assert_ptr_eq(out, msg.data + arrays[_i].off);
    } else {
        ck_assert_ptr_eq(out, &info);
        ck_assert_str_eq(info.field, "tokens_off");
    }
}
END_TEST

START_TEST(array_at_offset_zero_is_not_there) {
    uint8_t bytes[64] = {0};
    const void *out = &info;
    ATTND_CK_OK(proto_array(copy_exact(bytes, 64), "tree_off", 0, 1000, 8, 24, &out, &info));
    ck_assert_ptr_null(out);
}
END_TEST

// A message of 256 bytes with a fixed part of 72: 152 bytes, 38 float32, behind offset 104.
static const struct {
    proto_tensor t;
    uint64_t rows, heads, dim;
    attnd_dtype dtype;
    attnd_err want;
    int64_t token, head;
} tensors[] = {
    {{.off = 104}, 1, 2, 19, ATTND_F32, ATTND_OK, 38, 19},
    {{.off = 104}, 1, 3, 13, ATTND_F32, ATTND_EPROTO, 0, 0}, // 39
    {{.off = 104}, 2, 1, 19, ATTND_F32, ATTND_OK, 19, 19},
    {{.off = 104}, 4, 1, 19, ATTND_F16, ATTND_OK, 19, 19},
    {{.off = 104}, 5, 1, 19, ATTND_F16, ATTND_EPROTO, 0, 0},
    {{.off = 104}, 8, 1, 19, ATTND_F8E4M3, ATTND_OK, 19, 19},
    {{.off = 96}, 1, 1, 8, ATTND_F32, ATTND_EPROTO, 0, 0},
    {{.off = 108}, 1, 1, 8, ATTND_F32, ATTND_EPROTO, 0, 0},
    {{.off = 104}, 0, 2, 64, ATTND_F32, ATTND_OK, 128, 64},
    {{.off = 256}, 0, 2, 64, ATTND_F32, ATTND_OK, 128, 64},
    {{.off = 264}, 0, 2, 64, ATTND_F32, ATTND_EPROTO, 0, 0},
    // strides: the last element counts, not rows * stride
    {{.off = 104, .stride_token = 30}, 2, 1, 8, ATTND_F32, ATTND_OK, 30, 8},
    {{.off = 104, .stride_token = 31}, 2, 1, 8, ATTND_F32, ATTND_EPROTO, 0, 0},
    {{.off = 104, .stride_token = 8, .stride_head = 16}, 2, 2, 8, ATTND_F32, ATTND_OK, 8, 16},
    {{.off = 104, .stride_token = 8, .stride_head = 23}, 2, 2, 8, ATTND_F32, ATTND_EPROTO, 0, 0},
    {{.off = 104, .stride_token = UINT32_MAX}, 1, 1, 8, ATTND_F32, ATTND_OK, UINT32_MAX, 8},
    {{.off = 104, .stride_token = UINT32_MAX}, 2, 1, 8, ATTND_F8E4M3, ATTND_EPROTO, 0, 0},
    {{.off = 104, .stride_head = UINT32_MAX}, 1, 2, 8, ATTND_F32, ATTND_EPROTO, 0, 0},
    {{.off = 104, .stride_token = 1u << 30}, 5, 1, 8, ATTND_F32, ATTND_EPROTO, 0, 0}, // 2^34 bytes
    {{.off = 104, .stride_token = UINT32_MAX, .stride_head = UINT32_MAX},
     65536,
     256,
     8,
     ATTND_F32,
     ATTND_EPROTO,
     0,
     0},
    {{.off = 104, .stride_token = UINT32_MAX}, UINT64_MAX, 1, 8, ATTND_F32, ATTND_EPROTO, 0, 0},
    {{.off = 104, .stride_token = 1u << 31},
     UINT64_C(1) << 33,
     1,
     8,
     ATTND_F32,
     ATTND_EPROTO,
     0,
     0}, // 2^64 elements
    {{.off = 104, .stride_token = 1u << 31},
     UINT64_C(1) << 31,
     1,
     8,
     ATTND_F32,
     ATTND_EPROTO,
     0,
     0}, // 2^62 elements, 2^64 bytes
    {{.off = UINT32_MAX & ~7u}, 1, 1, 8, ATTND_F32, ATTND_EPROTO, 0, 0},
    {{.off = 104, .reserved = 1}, 1, 1, 8, ATTND_F32, ATTND_EINVAL, 0, 0},
    {{.off = 0, .reserved = 1}, 1, 1, 8, ATTND_F32, ATTND_EINVAL, 0, 0},
};

START_TEST(tensor_lies_in_the_message_whatever_its_strides) {
    uint8_t bytes[256] = {0};
    proto_view msg = copy_exact(bytes, sizeof(bytes));
    const void *out = &info;
    int64_t token = -1, head = -1;
    proto_tensor_shape shape = {tensors[_i].rows, tensors[_i].heads, tensors[_i].dim,
                                tensors[_i].dtype};
    ATTND_CK_ERR(
        proto_read_tensor(msg, "q", &tensors[_i].t, &shape, 72, &out, &token, &head, &info),
        tensors[_i].want);
    if (tensors[_i].want == ATTND_OK) {
        ck_assert_ptr_eq(out, msg.data + tensors[_i].t.off);
        ck_assert_int_eq(token, tensors[_i].token);
        ck_assert_int_eq(head, tensors[_i].head);
    } else {
        ck_assert_ptr_eq(out, &info);
        ck_assert_int_eq(token, -1);
        ck_assert_str_eq(info.field, "q");
    }
}
END_TEST

START_TEST(tensor_at_offset_zero_is_null) {
    uint8_t bytes[64] = {0};
    proto_tensor t = {0};
    proto_tensor_shape shape = {65536, 64, 128, ATTND_F32};
    const void *out = &info;
    int64_t token, head;
    ATTND_CK_OK(
        proto_read_tensor(copy_exact(bytes, 64), "k", &t, &shape, 0, &out, &token, &head, &info));
    ck_assert_ptr_null(out);
}
END_TEST

START_TEST(check_zero_refuses_by_name) {
    ATTND_CK_OK(proto_check_zero(0, "reserved", &info));
    ATTND_CK_ERR(proto_check_zero(UINT64_C(1) << 63, "reserved", &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "reserved");
}
END_TEST

START_TEST(name_is_terminated_padded_and_printable) {
    char name[PROTO_NAME_BYTES] = "seq ~1";
    ATTND_CK_OK(proto_check_name(name, "name", false, &info));
    name[PROTO_NAME_BYTES - 1] = 'x'; // not padded
    ATTND_CK_ERR(proto_check_name(name, "name", false, &info), ATTND_EINVAL);
    memset(name, 'a', sizeof(name)); // not terminated
    ATTND_CK_ERR(proto_check_name(name, "name", false, &info), ATTND_EINVAL);
    name[PROTO_NAME_BYTES - 1] = '\0'; // the longest
    ATTND_CK_OK(proto_check_name(name, "name", false, &info));
    const char bad[] = {'\n', '\x1f', '\x7f', '\x80', '\xff'};
    for (size_t i = 0; i < sizeof(bad); i++) {
        char other[PROTO_NAME_BYTES] = "ab";
        other[1] = bad[i];
        ATTND_CK_ERR(proto_check_name(other, "name", false, &info), ATTND_EINVAL);
        ck_assert_str_eq(info.field, "name");
    }
    memset(name, 0, sizeof(name));
    ATTND_CK_OK(proto_check_name(name, "name", true, &info));
    ATTND_CK_ERR(proto_check_name(name, "name", false, &info), ATTND_EINVAL);
}
END_TEST

static uint8_t reply[PROTO_ERROR_BYTES];

START_TEST(error_reply_comes_back_as_it_was) {
    attnd_errinfo sent = {.detail = -5}, got = {0};
    attnd_fail(&sent, ATTND_EINVAL, "kv_len", "kv_len -3 is negative");
    sent.detail = 17;
    proto_write_error(reply, PROTO_COMMIT, 9, &sent);
    ATTND_CK_ERR(proto_read_reply(copy_exact(reply, sizeof(reply)), PROTO_COMMIT, 9, &got),
                 ATTND_EINVAL);
    ck_assert_int_eq(got.code, ATTND_EINVAL);
    ck_assert_int_eq(got.detail, 17);
    ck_assert_str_eq(got.field, "kv_len");
    ck_assert_str_eq(got.text, "kv_len -3 is negative");
    ATTND_CK_ERR(proto_read_reply(copy_exact(reply, sizeof(reply)), PROTO_COMMIT, 9, NULL),
                 ATTND_EINVAL);
}
END_TEST

START_TEST(error_reply_text_is_made_printable_and_terminated) {
    attnd_errinfo sent, got;
    attnd_fail(&sent, ATTND_EIO, "f", "t");
    proto_write_error(reply, PROTO_COMMIT, 9, &sent);
    memset(reply + 40, 'f', ATTND_ERR_FIELD_BYTES); // no NUL in either
    memset(reply + 72, '\n', ATTND_ERR_TEXT_BYTES);
    ATTND_CK_ERR(proto_read_reply(copy_exact(reply, sizeof(reply)), PROTO_COMMIT, 9, &got),
                 ATTND_EIO);
    ck_assert_uint_eq(strlen(got.field), ATTND_ERR_FIELD_BYTES - 1);
    ck_assert_uint_eq(strlen(got.text), ATTND_ERR_TEXT_BYTES - 1);
    ck_assert_ptr_null(strchr(got.text, '\n'));
}
END_TEST

START_TEST(reply_of_every_shorter_length_is_refused) {
    attnd_errinfo sent, got;
    attnd_fail(&sent, ATTND_EBUSY, "", "busy");
    proto_write_error(reply, PROTO_COMMIT, 9, &sent);
    for (size_t n = 0; n < sizeof(reply); n++) {
        // as it is, and with a body_bytes that fits
        ATTND_CK_ERR(proto_read_reply(copy_exact(reply, n), PROTO_COMMIT, 9, &got), ATTND_EPROTO);
        if (n >= PROTO_BODY) {
            uint8_t cut[PROTO_ERROR_BYTES];
            memcpy(cut, reply, n);
            proto_write_header(cut, PROTO_COMMIT, 9, ATTND_EBUSY, n);
            ATTND_CK_ERR(proto_read_reply(copy_exact(cut, n), PROTO_COMMIT, 9, &got), ATTND_EPROTO);
        }
    }
}
END_TEST

START_TEST(reply_may_be_longer_than_known) {
    uint8_t longer[PROTO_ERROR_BYTES + 8] = {0};
    attnd_errinfo sent, got;
    attnd_fail(&sent, ATTND_EBUSY, "", "busy");
    proto_write_error(longer, PROTO_COMMIT, 9, &sent);
    proto_write_header(longer, PROTO_COMMIT, 9, ATTND_EBUSY, sizeof(longer));
    ATTND_CK_ERR(proto_read_reply(copy_exact(longer, sizeof(longer)), PROTO_COMMIT, 9, &got),
                 ATTND_EBUSY);
}
END_TEST

START_TEST(reply_to_something_else_is_refused) {
    attnd_errinfo got;
    proto_write_header(reply, PROTO_COMMIT, 9, ATTND_OK, 32);
    proto_view msg = copy_exact(reply, 32);
    ATTND_CK_OK(proto_read_reply(msg, PROTO_COMMIT, 9, &got));
    ATTND_CK_ERR(proto_read_reply(msg, PROTO_COMMIT, 8, &got), ATTND_EPROTO);
    ck_assert_str_eq(got.field, "request");
    ATTND_CK_ERR(proto_read_reply(msg, PROTO_STEP, 9, &got), ATTND_EPROTO);
    ck_assert_str_eq(got.field, "op");
}
END_TEST

START_TEST(reply_with_a_positive_status_or_flags_is_refused) {
    attnd_errinfo got;
    const size_t fields[] = {16, 24, 28};
    for (int i = 0; i < 3; i++) {
        proto_write_header(reply, PROTO_COMMIT, 9, ATTND_OK, 32);
        reply[fields[i]] = 1;
        ATTND_CK_ERR(proto_read_reply(copy_exact(reply, 32), PROTO_COMMIT, 9, &got), ATTND_EPROTO);
    }
}
END_TEST

START_TEST(op_names_go_both_ways) {
    const struct {
        uint32_t op;
        const char *name;
    } some[] = {
        {1, "hello"}, {16, "seq_create"}, {33, "attend"}, {49, "session_list"}, {66, "config_set"}};
    for (int i = 0; i < 5; i++) {
        ck_assert_str_eq(proto_op_name(some[i].op), some[i].name);
        ck_assert_uint_eq(proto_op_parse(some[i].name), some[i].op);
    }
    ck_assert_str_eq(proto_op_name(0), "?");
    ck_assert_str_eq(proto_op_name(UINT32_MAX), "?");
    ck_assert_uint_eq(proto_op_parse("?"), 0);
    ck_assert_uint_eq(proto_op_parse(""), 0);
}
END_TEST

START_TEST(align_rounds_up_to_eight) {
    ck_assert_uint_eq(proto_align(0), 0);
    ck_assert_uint_eq(proto_align(1), 8);
    ck_assert_uint_eq(proto_align(8), 8);
    ck_assert_uint_eq(proto_align(UINT32_MAX), UINT64_C(1) << 32);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("proto_msg");
    TCase *tc = tcase_create("read");
    tcase_add_checked_fixture(tc, NULL, drop_block);
    tcase_add_test(tc, header_bytes_are_as_specified);
    tcase_add_test(tc, read_header_takes_a_good_one);
    tcase_add_test(tc, read_header_refuses_every_shorter_message);
    tcase_add_test(tc, read_header_refuses_garbage);
    tcase_add_test(tc, read_header_gives_op_and_request_with_eversion);
    tcase_add_test(tc, read_header_refuses_what_must_be_zero_by_name);
    tcase_add_test(tc, read_takes_the_fixed_part);
    tcase_add_loop_test(tc, array_lies_behind_the_fixed_part_and_in_the_message, 0,
                        sizeof(arrays) / sizeof(arrays[0]));
    tcase_add_test(tc, array_at_offset_zero_is_not_there);
    tcase_add_loop_test(tc, tensor_lies_in_the_message_whatever_its_strides, 0,
                        sizeof(tensors) / sizeof(tensors[0]));
    tcase_add_test(tc, tensor_at_offset_zero_is_null);
    tcase_add_test(tc, check_zero_refuses_by_name);
    tcase_add_test(tc, name_is_terminated_padded_and_printable);
    suite_add_tcase(s, tc);
    tc = tcase_create("reply");
    tcase_add_checked_fixture(tc, NULL, drop_block);
    tcase_add_test(tc, error_reply_comes_back_as_it_was);
    tcase_add_test(tc, error_reply_text_is_made_printable_and_terminated);
    tcase_add_test(tc, reply_of_every_shorter_length_is_refused);
    tcase_add_test(tc, reply_may_be_longer_than_known);
    tcase_add_test(tc, reply_to_something_else_is_refused);
    tcase_add_test(tc, reply_with_a_positive_status_or_flags_is_refused);
    tcase_add_test(tc, op_names_go_both_ways);
    tcase_add_test(tc, align_rounds_up_to_eight);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
