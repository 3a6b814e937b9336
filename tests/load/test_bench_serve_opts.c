#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_serve_opts.h"

static bench_serve_opts opts;
static attnd_errinfo info;

#define BASE "serve", "--connect", "ipc:///run/x", "--preset", "tiny"

static attnd_err parse(char *const *argv) {
    int argc = 0;
    while (argv[argc] != NULL) {
        argc++;
    }
    bench_model_fini(&opts.model); // of the call before
    memset(&info, 0, sizeof(info));
    return bench_serve_parse(&opts, argc, argv, &info);
}

static void teardown(void) {
    bench_model_fini(&opts.model);
}

START_TEST(defaults_are_a_closed_loop_of_64_requests) {
    ATTND_CK_OK(parse((char *[]){BASE, NULL}));
    ck_assert_str_eq(opts.connect, "ipc:///run/x");
    ck_assert_uint_eq(opts.concurrency, 16);
    ck_assert_uint_eq(opts.load.num_requests, 64);
    ck_assert_int_eq(opts.load.arrival, BENCH_CLOSED);
    ck_assert(!opts.load.endless);
    ck_assert_double_eq(opts.load.input.mean, 512);
    ck_assert_double_eq(opts.verify, 0);
    ck_assert_ptr_null(opts.json);
    ck_assert_uint_eq(opts.model.layers, 2);
}
END_TEST

START_TEST(transport_is_one_of_three) {
    ATTND_CK_OK(parse((char *[]){BASE, NULL}));
    ck_assert_int_eq(opts.transport, ATTND_TRANSPORT_AUTO);
    ATTND_CK_OK(parse((char *[]){BASE, "--transport", "ring", NULL}));
    ck_assert_int_eq(opts.transport, ATTND_TRANSPORT_RING);
    ATTND_CK_OK(parse((char *[]){BASE, "--transport=nng", NULL}));
    ck_assert_int_eq(opts.transport, ATTND_TRANSPORT_NNG);
    ATTND_CK_ERR(parse((char *[]){BASE, "--transport", "pigeon", NULL}), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "transport");
}
END_TEST

START_TEST(flags_change_the_preset_in_any_order) {
    ATTND_CK_OK(
        parse((char *[]){"serve", "--layers", "3", "--kv-dtype=f8e4m3", "--preset=gpt-oss-20b",
                         "--head-dim", "96", "--sinks", "off", "--window", "64", "--window-every=1",
                         "--rope", "none", "--connect", "tcp://h:1", NULL}));
    ck_assert_uint_eq(opts.model.layers, 3);
    ck_assert_uint_eq(opts.model.q_heads, 64);
    ck_assert_uint_eq(opts.model.head_dim, 96);
    ck_assert_uint_eq(opts.model.v_head_dim, 96);
    ck_assert_int_eq(opts.model.kv_dtype, ATTND_F8E4M3);
    ck_assert_ptr_null(opts.model.sink_logits);
    ck_assert_ptr_null(opts.model.inv_freq);
    ck_assert_int_eq(opts.model.per_layer[1].window_left, 63);
}
END_TEST

START_TEST(rope_turns_the_dims_asked_for) {
    ATTND_CK_OK(parse((char *[]){BASE, "--rope=10000", "--rotary-dim", "16", NULL}));
    ck_assert_uint_eq(opts.model.per_layer[0].rope.num_inv_freq, 8);
}
END_TEST

START_TEST(a_trace_is_run_once_and_may_keep_its_time) {
    ATTND_CK_OK(parse((char *[]){BASE, "--trace", "t.csv", "--trace-time", "--speed", "4", NULL}));
    ck_assert_uint_eq(opts.load.num_requests, 0);
    ck_assert_int_eq(opts.load.arrival, BENCH_TRACE_TIME);
    ck_assert_double_eq(opts.load.speed, 4);
    ck_assert(opts.load.shares_prefixes);
    ATTND_CK_OK(parse((char *[]){BASE, "--trace", "t", "--share-prefixes", "off", NULL}));
    ck_assert(!opts.load.shares_prefixes);
}
END_TEST

START_TEST(a_rate_is_an_open_loop) {
    ATTND_CK_OK(parse((char *[]){BASE, "--rate", "2.5", "--requests=7", "--verify=1", NULL}));
    ck_assert_int_eq(opts.load.arrival, BENCH_POISSON);
    ck_assert_double_eq(opts.load.rate, 2.5);
    ck_assert_uint_eq(opts.load.num_requests, 7);
    ck_assert_double_eq(opts.verify, 1);
}
END_TEST

START_TEST(a_duration_is_endless) {
    ATTND_CK_OK(parse((char *[]){BASE, "--duration", "20", "--input", "lognormal:100,1", NULL}));
    ck_assert(opts.load.endless);
    ck_assert(opts.load.input.lognormal);
}
END_TEST

START_TEST(help_needs_nothing_else) {
    ATTND_CK_OK(parse((char *[]){"serve", "--help", NULL}));
    ck_assert(opts.help);
}
END_TEST

static const struct {
    char *a, *b, *c, *d;
    const char *field;
} BAD[] = {
    {"--preset", "tiny", NULL, NULL, "connect"},
    {"--connect", "x", NULL, NULL, "connect"},
    {"--connect=x", "--preset=none", NULL, NULL, "preset"},
    {"--connect=x", "--preset=tiny", "--verify", "1.5", "verify"},
    {"--connect=x", "--preset=tiny", "--trace=t", "--input=5", "trace"},
    {"--connect=x", "--preset=tiny", "--trace-time", NULL, "trace-time"},
    {"--connect=x", "--preset=tiny", "--speed", "2", "speed"},
    {"--connect=x", "--preset=tiny", "--share-prefixes", "on", "share-prefixes"},
    {"--connect=x", "--preset=tiny", "--requests=1", "--duration=1", "duration"},
    {"--connect=x", "--preset=tiny", "--verify-threads", "2", "verify-threads"},
    {"--connect=x", "--preset=tiny", "--rope", "1", "rope"},
    {"--connect=x", "--preset=tiny", "--rope", "x", "rope"},
    {"--connect=x", "--preset=tiny", "--rope-factor", "8", "rope-factor"}, // tiny has no RoPE
    {"--connect=x", "--preset=tiny", "--rope-interleaved", "on", "rope-interleaved"},
    {"--connect=x", "--preset=gpt-oss-20b", "--rope=none", "--rotary-dim=16", "rotary-dim"},
    {"--connect=x", "--preset=gpt-oss-20b", "--rope=none", "--rope-factor=8", "rope-factor"},
    {"--connect=x", "--preset=gpt-oss-20b", "--rope-factor", "0.5", "rope-factor"},
    {"--connect=x", "--preset=tiny", "--window-every", "2", "window-every"},
    {"--connect=x", "--preset=gpt-oss-20b", "--window=0", "--window-every=3", "window-every"},
    {"--connect=x", "--preset=tiny", "--scale", "1e-50", "scale"},
    {"--connect=x", "--preset=tiny", "--input", "x", "input"},
    {"--connect=x", "--preset=tiny", "--output", "lognormal:5,nan", "output"},
    {"--connect=x", "--preset=tiny", "--q-heads", "5", "q-heads"},
    {"--connect=x", "--preset=tiny", "--dtype", "f8e4m3", "dtype"},
    {"--connect=x", "--preset=tiny", "--concurrency", "0", "concurrency"},
    {"--connect=x", "--preset=tiny", "--requests", "0", "requests"},
};
enum { NUM_BAD = sizeof(BAD) / sizeof(BAD[0]) };

START_TEST(what_does_not_go_together_is_refused) {
    attnd_err err = parse((char *[]){"serve", BAD[_i].a, BAD[_i].b, BAD[_i].c, BAD[_i].d, NULL});
    ck_assert_int_ne(err, ATTND_OK);
    ck_assert_str_eq(info.field, BAD[_i].field);
}
END_TEST

START_TEST(a_wrong_length_is_refused_by_its_flag) {
    ATTND_CK_ERR(parse((char *[]){BASE, "--output", "0.5", NULL}), ATTND_EINVAL);
    ck_assert_str_eq(info.text, "--output: \"0.5\" is neither a number of tokens nor "
                                "lognormal:MEAN,SIGMA");
}
END_TEST

START_TEST(help_lists_the_flags_of_the_readme) {
    char *out = NULL;
    size_t bytes;
    FILE *f = open_memstream(&out, &bytes);
    bench_serve_help(f);
    fclose(f);
    static const char *const FLAGS[] = {"--connect URL", "--preset NAME", "--trace FILE",
                                        "--requests N",  "--verify P",    "--json FILE"};
    for (int i = 0; i < 6; i++) {
        ck_assert_ptr_nonnull(strstr(out, FLAGS[i]));
    }
    free(out);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_serve_opts");
    TCase *tc = tcase_create("flags");
    tcase_add_checked_fixture(tc, NULL, teardown);
    tcase_add_test(tc, defaults_are_a_closed_loop_of_64_requests);
    tcase_add_test(tc, transport_is_one_of_three);
    tcase_add_test(tc, flags_change_the_preset_in_any_order);
    tcase_add_test(tc, rope_turns_the_dims_asked_for);
    tcase_add_test(tc, a_trace_is_run_once_and_may_keep_its_time);
    tcase_add_test(tc, a_rate_is_an_open_loop);
    tcase_add_test(tc, a_duration_is_endless);
    tcase_add_test(tc, help_needs_nothing_else);
    tcase_add_loop_test(tc, what_does_not_go_together_is_refused, 0, NUM_BAD);
    tcase_add_test(tc, a_wrong_length_is_refused_by_its_flag);
    tcase_add_test(tc, help_lists_the_flags_of_the_readme);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
