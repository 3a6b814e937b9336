#include <stdlib.h>
#include <string.h>

#include "proto/dtype.h"
#include "tests/check_main.h"
#include "tests/load/bench_opts.h"

static const char *text;
static uint32_t u32;
static uint64_t u64;
static double real;
static float real32;
static attnd_dtype dtype;
static bool on, flag;
static attnd_errinfo info;

static bench_opt opts[16];

static void setup(void) {
    const bench_opt rows[] = {
        {"Things", BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
        {"text", BENCH_OPT_TEXT, &text, "T", "a text", 0, 0, false},
        {"count", BENCH_OPT_U32, &u32, "N", "a count", 1, 4294967295.0, false},
        {"big", BENCH_OPT_U64, &u64, "N", "a big count", 0, 9007199254740992.0, false},
        {"real", BENCH_OPT_REAL, &real, "X", "a number", -1, 2.5, false},
        {"real32", BENCH_OPT_REAL32, &real32, "X", "a float", 0, 10, false},
        {"dtype", BENCH_OPT_DTYPE, &dtype, "T", "a type", 0, 0, false},
        {"sinks", BENCH_OPT_ON_OFF, &on, "on|off", "a switch", 0, 0, false},
        {"flag", BENCH_OPT_FLAG, &flag, NULL, "a flag", 0, 0, false},
        {NULL, BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
    };
    memcpy(opts, rows, sizeof(rows));
    text = NULL;
    u32 = 7;
    u64 = 8;
    real = 0.5;
    real32 = 0.25f;
    dtype = ATTND_F32;
    on = true;
    flag = false;
}

static attnd_err parse(char *const *argv) {
    int argc = 0;
    while (argv[argc] != NULL) {
        argc++;
    }
    return bench_opts_parse(opts, argc, argv, &info);
}

START_TEST(every_kind_is_read) {
    ATTND_CK_OK(parse((char *[]){"x", "--text", "--hello", "--count=4294967295", "--big",
                                 "9007199254740992", "--real=-1", "--real32", "0.125", "--dtype",
                                 "bf16", "--sinks", "off", "--flag", NULL}));
    ck_assert_str_eq(text, "--hello");
    ck_assert_uint_eq(u32, 4294967295u);
    ck_assert_uint_eq(u64, 9007199254740992u);
    ck_assert_double_eq(real, -1);
    ck_assert_float_eq(real32, 0.125f);
    ck_assert_int_eq(dtype, ATTND_BF16);
    ck_assert(!on);
    ck_assert(flag);
    ck_assert(bench_opts_seen(opts, "flag"));
}
END_TEST

START_TEST(what_is_not_given_stays) {
    ATTND_CK_OK(parse((char *[]){"x", NULL}));
    ck_assert_ptr_null(text);
    ck_assert_uint_eq(u32, 7);
    ck_assert(!bench_opts_seen(opts, "count"));
    ck_assert(!bench_opts_seen(opts, "nothing"));
}
END_TEST

static const struct {
    char *first, *second;
    const char *field, *says;
} BAD[] = {
    {"--nothing", "1", "argument", "no flag --nothing"},
    {"--", NULL, "argument", "\"--\" is not a flag"},
    {"-count", "1", "argument", "\"-count\" is not a flag"},
    {"stray", NULL, "argument", "\"stray\" is not a flag"},
    {"--Things", "1", "argument", "no flag --Things"},
    {"--coun", "1", "argument", "no flag --coun"},
    {"--count", NULL, "count", "--count needs a value: N"},
    {"--count", "0", "count", "\"0\" is not a whole number from 1 to 4294967295"},
    {"--count", "4294967296", "count", "is not a whole number"},
    {"--count", "-1", "count", "is not a whole number"},
    {"--count", "+1", "count", "is not a whole number"},
    {"--count", "1x", "count", "is not a whole number"},
    {"--count", "", "count", "is not a whole number"},
    {"--count=1", "--count=1", "count", "--count is given twice"},
    {"--big", "99999999999999999999999", "big", "is not a whole number"},
    {"--big", "9007199254740993", "big", "is not a whole number"}, // 2^53 + 1
    {"--real", "2.6", "real", "\"2.6\" is not a number from -1 to 2.5"},
    {"--real", "nan", "real", "is not a number"},
    {"--real", "x", "real", "is not a number"},
    {"--real32", "1e30", "real32", "is not a number"},
    {"--real32", "1e-46", "real32", "is not a number"}, // a float of it is 0
    {"--dtype", "f64", "dtype", "\"f64\" is not f32, bf16, f16 or f8e4m3"},
    {"--sinks", "yes", "sinks", "\"yes\" is not on or off"},
    {"--flag=1", NULL, "flag", "--flag takes no value"},
};
enum { NUM_BAD = sizeof(BAD) / sizeof(BAD[0]) };

START_TEST(bad_arguments_are_refused_by_name) {
    ATTND_CK_ERR(parse((char *[]){"x", BAD[_i].first, BAD[_i].second, NULL}), ATTND_EINVAL);
    ck_assert_str_eq(info.field, BAD[_i].field);
    ck_assert_msg(strstr(info.text, BAD[_i].says) != NULL, "says: %s", info.text);
}
END_TEST

START_TEST(help_names_every_flag) {
    char *out = NULL;
    size_t bytes;
    FILE *f = open_memstream(&out, &bytes);
    bench_opts_help(opts, f);
    fclose(f);
    for (const bench_opt *o = opts; o->name != NULL; o++) {
        ck_assert_ptr_nonnull(strstr(out, o->name));
    }
    ck_assert_ptr_nonnull(strstr(out, "--sinks on|off"));
    free(out);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_opts");
    TCase *tc = tcase_create("flags");
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, every_kind_is_read);
    tcase_add_test(tc, what_is_not_given_stays);
    tcase_add_loop_test(tc, bad_arguments_are_refused_by_name, 0, NUM_BAD);
    tcase_add_test(tc, help_names_every_flag);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
