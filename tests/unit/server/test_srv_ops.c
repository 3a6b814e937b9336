// The table of operations against the wire format's map.
#include <string.h>

#include "server/srv_ops.h"
#include "tests/check_main.h"

typedef struct name_code {
    const char *name;
    uint32_t code;
} name_code;

static const name_code map[] = {
#define XX(upper, code, name) {name, code},
    PROTO_OP_MAP(XX)
#undef XX
};
enum { NUM_OPS = sizeof(map) / sizeof(map[0]) };

START_TEST(every_op_of_the_wire_has_a_row_of_its_name) {
    uint32_t rows = 0;
    while (srv_ops[rows].name) {
        rows++;
    }
    ck_assert_uint_eq(rows, NUM_OPS);
    for (uint32_t i = 0; i < NUM_OPS; i++) {
        const srv_op *op = srv_ops_find(map[i].code);
        ck_assert_ptr_nonnull(op);
        ck_assert_str_eq(op->name, map[i].name);
        ck_assert_ptr_nonnull(op->handler);
    }
}
END_TEST

START_TEST(other_codes_have_no_row) {
    ck_assert_ptr_null(srv_ops_find(0));
    ck_assert_ptr_null(srv_ops_find(23));
    ck_assert_ptr_null(srv_ops_find(UINT32_MAX));
}
END_TEST

// The table at the head of proto_wire.h: what is done once, and what is for administration.
START_TEST(flags_are_those_of_the_wire_format) {
    static const char *const once[] = {"seq_create", "seq_fork",   "seq_truncate", "seq_free",
                                       "seq_keep",   "seq_attach", "step",         "commit",
                                       "decode",     "prefill"};
    static const char *const admin[] = {"session_list", "drain", "config_get", "config_set"};
    uint32_t num_once = 0, num_admin = 0;
    for (const srv_op *op = srv_ops; op->name; op++) {
        num_once += (op->flags & SRV_OP_ONCE) != 0;
        num_admin += (op->flags & SRV_OP_ADMIN) != 0;
        ck_assert_int_eq((op->flags & SRV_OP_ONCE) != 0, op->kv_op != 0);
        ck_assert_int_eq((op->flags & SRV_OP_HELLO) != 0, strcmp(op->name, "hello") == 0);
        for (size_t i = 0; i < sizeof(once) / sizeof(once[0]); i++) {
            ck_assert(strcmp(op->name, once[i]) != 0 || (op->flags & SRV_OP_ONCE));
        }
        for (size_t i = 0; i < sizeof(admin) / sizeof(admin[0]); i++) {
            ck_assert(strcmp(op->name, admin[i]) != 0 || (op->flags & SRV_OP_ADMIN));
        }
    }
    ck_assert_uint_eq(num_once, sizeof(once) / sizeof(once[0]));
    ck_assert_uint_eq(num_admin, sizeof(admin) / sizeof(admin[0]));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_ops");
    TCase *tc = tcase_create("srv_ops");
    tcase_add_test(tc, every_op_of_the_wire_has_a_row_of_its_name);
    tcase_add_test(tc, other_codes_have_no_row);
    tcase_add_test(tc, flags_are_those_of_the_wire_format);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
