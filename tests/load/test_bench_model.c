#include <math.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_model.h"

static attnd_errinfo info;

static bench_model preset(const char *name) {
    bench_model m;
    ATTND_CK_OK(bench_model_preset(&m, name, &info));
    return m;
}

// public geometries: layers, query and KV heads, head_dim
static const struct {
    const char *name;
    uint32_t layers, q_heads, kv_heads, head_dim;
    attnd_dtype dtype;
} GEOMETRIES[] = {
    {"tiny", 2, 4, 2, 32, ATTND_F32},           {"llama-3-8b", 32, 32, 8, 128, ATTND_BF16},
    {"qwen2.5-7b", 28, 28, 4, 128, ATTND_BF16}, {"tiny-gpu", 2, 4, 2, 64, ATTND_BF16},
    {"gpt-oss-20b", 24, 64, 8, 64, ATTND_BF16},
};

START_TEST(presets_have_the_public_geometries) {
    bench_model m = preset(GEOMETRIES[_i].name);
    ATTND_CK_OK(bench_model_prepare(&m, 1, &info));
    ck_assert_uint_eq(m.layers, GEOMETRIES[_i].layers);
    ck_assert_uint_eq(m.q_heads, GEOMETRIES[_i].q_heads);
    ck_assert_uint_eq(m.kv_heads, GEOMETRIES[_i].kv_heads);
    ck_assert_uint_eq(m.head_dim, GEOMETRIES[_i].head_dim);
    ck_assert_uint_eq(m.v_head_dim, GEOMETRIES[_i].head_dim);
    ck_assert_int_eq(m.dtype, GEOMETRIES[_i].dtype);
    ck_assert_int_eq(m.kv_dtype, GEOMETRIES[_i].dtype);
    bench_model_fini(&m);
}
END_TEST

START_TEST(an_unknown_preset_lists_the_known) {
    bench_model m;
    ATTND_CK_ERR(bench_model_preset(&m, "llama-9", &info), ATTND_ENOENT);
    ck_assert_str_eq(
        info.text,
        "no preset \"llama-9\"; there are tiny, tiny-gpu, llama-3-8b, qwen2.5-7b, gpt-oss-20b");
}
END_TEST

START_TEST(gpt_oss_alternates_its_window_and_has_sinks) {
    bench_model m = preset("gpt-oss-20b");
    ATTND_CK_OK(bench_model_prepare(&m, 1, &info));
    ck_assert_uint_eq(bench_model_window(&m, 0), 128);
    ck_assert_uint_eq(bench_model_window(&m, 1), 0);
    ck_assert_int_eq(m.per_layer[0].window_left, 127); // 128 keys, the query's own included
    ck_assert_int_eq(m.per_layer[1].window_left, -1);
    ck_assert_int_eq(m.per_layer[0].window_right, -1);
    ck_assert_ptr_eq(m.per_layer[2].sinks, m.sink_logits + 2 * 64);
    ck_assert(m.per_layer[0].sinks[0] != m.per_layer[1].sinks[0]);
    bench_model_fini(&m);
}
END_TEST

START_TEST(rope_frequencies_are_powers_of_theta) {
    bench_model m = preset("llama-3-8b");
    ATTND_CK_OK(bench_model_prepare(&m, 1, &info));
    ck_assert_uint_eq(m.per_layer[0].rope.num_inv_freq, 64);
    ck_assert_float_eq(m.inv_freq[0], 1);
    ck_assert_float_eq_tol(m.inv_freq[32], 0.00141421356f, 1e-10f); // 500000^(-1/2)
    ck_assert_float_eq(m.attention_factor, 1);
    bench_model_fini(&m);
}
END_TEST

START_TEST(yarn_keeps_high_frequencies_and_stretches_low_ones) {
    bench_model m = preset("gpt-oss-20b");
    ATTND_CK_OK(bench_model_prepare(&m, 1, &info));
    // Pairs below 64 ln(4096 / 64 pi) / (2 ln 150000) = 8.09 keep theta^(-p / 32), those above
    // 64 ln(4096 / 2 pi) / (2 ln 150000) = 17.40 have a 32nd of it.
    ck_assert_float_eq_tol(m.inv_freq[8], 0.0508133f, 1e-6f);
    ck_assert_float_eq_tol(m.inv_freq[18], (float)(pow(150000, -18.0 / 32) / 32), 1e-9f);
    // ramp of pair 12: (12 - 8.0928) / (17.3980 - 8.0928) = 0.41989, so f (1 - r + r / 32)
    ck_assert_float_eq_tol(m.inv_freq[12], 0.00679496f, 1e-8f);
    ck_assert_float_eq_tol(m.attention_factor, 1.3465736f, 1e-6f); // 0.1 ln 32 + 1
    bench_model_fini(&m);
}
END_TEST

START_TEST(alibi_slopes_are_a_geometric_series) {
    bench_model m = preset("tiny");
    m.alibi = true;
    ATTND_CK_OK(bench_model_prepare(&m, 1, &info));
    static const float SLOPES[] = {0.25f, 0.0625f, 0.015625f, 0.00390625f};
    ck_assert_mem_eq(m.alibi_slopes, SLOPES, sizeof(SLOPES));
    bench_model_fini(&m);
}
END_TEST

START_TEST(the_client_gets_what_the_model_is) {
    bench_model m = preset("tiny");
    m.v_head_dim = 64;
    m.softcap = 30;
    ATTND_CK_OK(bench_model_prepare(&m, 1, &info));
    attnd_model_opts o;
    bench_model_opts(&m, &o);
    ck_assert_str_eq(o.name, m.name);
    ck_assert_uint_eq(o.v_head_dim, 64);
    ck_assert_uint_eq(o.layers, 2);
    ck_assert_float_eq(o.per_layer[1].softcap, 30);
    ck_assert_uint_eq(o.per_layer[1].rope.num_inv_freq, 0);
    ck_assert_uint_eq(bench_model_row_bytes(&m), (4 * 32 + 2 * 32 + 2 * 64) * 4);
    ck_assert_uint_eq(bench_model_out_bytes(&m), 4 * 64 * 4);
    bench_model_fini(&m);
}
END_TEST

START_TEST(names_differ_when_geometries_do) {
    bench_model a = preset("tiny"), b = preset("tiny"), c = preset("tiny"), d = preset("tiny");
    b.head_dim = 40;
    c.sinks = d.sinks = true;
    ATTND_CK_OK(bench_model_prepare(&a, 1, &info));
    ATTND_CK_OK(bench_model_prepare(&b, 1, &info));
    ATTND_CK_OK(bench_model_prepare(&c, 1, &info));
    ATTND_CK_OK(bench_model_prepare(&d, 2, &info)); // other sinks
    ck_assert_str_ne(a.name, b.name);
    ck_assert_str_ne(a.name, c.name);
    ck_assert_str_ne(c.name, d.name);
    bench_model again = preset("tiny");
    ATTND_CK_OK(bench_model_prepare(&again, 7, &info)); // without sinks the seed is not in it
    ck_assert_str_eq(a.name, again.name);
    bench_model_fini(&a);
    bench_model_fini(&b);
    bench_model_fini(&c);
    bench_model_fini(&d);
    bench_model_fini(&again);
}
END_TEST

START_TEST(impossible_geometries_are_refused_by_flag) {
    static const char *const FIELDS[] = {"layers",     "q-heads",    "q-heads",      "head-dim",
                                         "head-dim",   "v-head-dim", "block-tokens", "rotary-dim",
                                         "rotary-dim", "dtype",      "kv-dtype",     "kv-dtype"};
    bench_model m = preset("llama-3-8b");
    switch (_i) {
    case 0:
        m.layers = 1025;
        break;
    case 1:
        m.q_heads = 12;
        break;
    case 2:
        m.q_heads = 0;
        break;
    case 3:
        m.head_dim = 12;
        break;
    case 4:
        m.head_dim = 264;
        break;
    case 5:
        m.v_head_dim = 264;
        break;
    case 6:
        m.block_tokens = 1025;
        break;
    case 7:
        m.rotary_dim = 7;
        break;
    case 8:
        m.rotary_dim = 136;
        break;
    case 9:
        m.dtype = ATTND_F8E4M3;
        break;
    case 10:
        m.kv_dtype = ATTND_F16;
        break;
    default:
        m.dtype = ATTND_F32;
        m.kv_dtype = ATTND_F8E4M3;
        break;
    }
    attnd_err err = bench_model_prepare(&m, 1, &info);
    ck_assert(err == ATTND_EINVAL || err == ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, FIELDS[_i]);
    bench_model_fini(&m);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_model");
    TCase *tc = tcase_create("model");
    tcase_add_loop_test(tc, presets_have_the_public_geometries, 0, 4);
    tcase_add_test(tc, an_unknown_preset_lists_the_known);
    tcase_add_test(tc, gpt_oss_alternates_its_window_and_has_sinks);
    tcase_add_test(tc, rope_frequencies_are_powers_of_theta);
    tcase_add_test(tc, yarn_keeps_high_frequencies_and_stretches_low_ones);
    tcase_add_test(tc, alibi_slopes_are_a_geometric_series);
    tcase_add_test(tc, the_client_gets_what_the_model_is);
    tcase_add_test(tc, names_differ_when_geometries_do);
    tcase_add_loop_test(tc, impossible_geometries_are_refused_by_flag, 0, 12);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
