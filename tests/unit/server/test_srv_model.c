// From the JSON of model_open to groups, offsets and launch parameters; and the table of models.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "server/srv_model.h"
#include "tests/check_main.h"

#define HEAD                                                                                  \
    "\"name\": \"m\", \"digest\": \"00000000000000000000000000000000000000000000000000000000" \
    "00000001\", \"dtype\": \"bf16\", \"layers\": 4, \"q_heads\": 6, \"kv_heads\": 2, "       \
    "\"head_dim\": 16"

static srv_model *model;
static const attn_model *m; // its
static attnd_errinfo info;

static attnd_err parse(const char *json) {
    model = NULL;
    memset(&info, 0, sizeof(info));
    attnd_err err = srv_model_parse(&model, json, strlen(json), 0, 64, &info);
    m = model ? model->attn : NULL;
    return err;
}

static void refuse(const char *json, attnd_err code, const char *field) {
    ATTND_CK_ERR(parse(json), code);
    ck_assert_ptr_null(model);
    ck_assert_str_eq(info.field, field);
}

START_TEST(defaults_follow_the_wire_format) {
    ATTND_CK_OK(parse("{" HEAD "}"));
    ck_assert_uint_eq(m->v_head_dim, 16);
    ck_assert_int_eq(m->kv_dtype, ATTND_BF16);
    ck_assert_uint_eq(m->block_tokens, 64);
    ck_assert(m->causal);
    ck_assert(!m->shares_kv);
    ck_assert_uint_eq(model->spec.num_groups, 1);
    ck_assert_uint_eq(m->digest[31], 1);
    ck_assert_int_eq(m->layers[3].window_left, -1);
    ck_assert_int_eq(m->layers[3].rope.rotary_dim, 0);
    ck_assert_ptr_null(m->layers[3].sinks);
    srv_model_free(model);
}
END_TEST

START_TEST(a_block_is_k_then_v_layer_after_layer) {
    ATTND_CK_OK(parse("{" HEAD ", \"v_head_dim\": 24, \"block_tokens\": 5}"));
    // 2 heads x 5 tokens x 16 dims x 2 bytes = 320, and 480 for V.
    for (uint32_t i = 0; i < 4; i++) {
        ck_assert_uint_eq(m->layers[i].k_offset, i * 800);
        ck_assert_uint_eq(m->layers[i].v_offset, i * 800 + 320);
    }
    ck_assert_uint_eq(kv_block_bytes(&model->spec.groups[0]), 3200);
    ck_assert_int_eq(m->shape.stride_k_head, 80);
    ck_assert_int_eq(m->shape.stride_v_head, 120);
    ck_assert_uint_eq(m->shape.block_stride, KV_BLOCK_UNIT);
    srv_model_free(model);
}
END_TEST

START_TEST(windows_make_groups_and_readers_have_no_room_of_their_own) {
    ATTND_CK_OK(parse("{" HEAD ", \"window\": [7, 0], \"layer_overrides\": ["
                      "{\"layer\": 1, \"window\": [-1, -1]}, {\"layer\": 2, \"kv_layer\": 0}, "
                      "{\"layer\": 3, \"kv_layer\": 1, \"window\": [3, 3]}]}"));
    ck_assert_uint_eq(model->spec.num_groups, 2);
    ck_assert_uint_eq(model->spec.groups[0].layers, 1);
    ck_assert_uint_eq(model->spec.groups[1].layers, 1);
    ck_assert_int_eq(model->spec.groups[0].window_left, 7);
    ck_assert_int_eq(model->spec.groups[1].window_left, -1);
    ck_assert_uint_eq(m->layers[2].group, 0);
    ck_assert_uint_eq(m->layers[3].group, 1);
    ck_assert_uint_eq(m->layers[3].k_offset, m->layers[1].k_offset);
    ck_assert_int_eq(m->layers[3].window_left, 3);
    ck_assert(m->shares_kv);
    srv_model_free(model);
}
END_TEST

START_TEST(arrays_and_rope_reach_their_layers) {
    ATTND_CK_OK(parse("{" HEAD ", \"sinks\": [1, 2, 3, 4, 5, 6], \"rope\": {\"inv_freq\": [1, 0.5],"
                      " \"attention_factor\": 1.5, \"interleaved\": true}, \"layer_overrides\": ["
                      "{\"layer\": 2, \"rope\": null, \"alibi\": [6, 5, 4, 3, 2, 1], "
                      "\"softcap\": 30, \"scale\": 0.25}]}"));
    ck_assert_float_eq(m->layers[0].sinks[5], 6);
    ck_assert_float_eq(m->layers[2].sinks[0], 1);
    ck_assert_ptr_null(m->layers[0].alibi);
    ck_assert_float_eq(m->layers[2].alibi[0], 6);
    ck_assert_int_eq(m->layers[1].rope.rotary_dim, 4);
    ck_assert_float_eq(m->layers[1].rope.inv_freq[1], 0.5f);
    ck_assert_float_eq(m->layers[1].rope.attention_factor, 1.5f);
    ck_assert(m->layers[1].rope.interleaved);
    attn_row row = {.q_len = 0};
    attn_layer_fill(m, 2, &row);
    ck_assert_ptr_null(row.rope);
    ck_assert_float_eq(row.softcap, 30);
    ck_assert_float_eq(row.scale, 0.25f);
    ck_assert_uint_eq(row.flags, ATTN_CAUSAL);
    attn_layer_fill(m, 1, &row);
    ck_assert_ptr_eq(row.rope, &m->layers[1].rope);
    srv_model_free(model);
}
END_TEST

START_TEST(fp8_caches_have_scales) {
    ATTND_CK_OK(parse("{" HEAD ", \"kv_dtype\": \"f8e4m3\", \"k_scale\": [0.5, 2], "
                      "\"v_scale\": [1, 1]}"));
    ck_assert_uint_eq(model->spec.groups[0].k_row_bytes, 16);
    ck_assert_float_eq(m->layers[3].k_scale[1], 2);
    srv_model_free(model);
    refuse("{" HEAD ", \"kv_dtype\": \"f8e4m3\", \"k_scale\": [0.5, 0]}", ATTND_EINVAL, "k_scale");
    refuse("{" HEAD ", \"k_scale\": [0.5, 1]}", ATTND_EINVAL, "k_scale");
}
END_TEST

START_TEST(wrong_models_are_refused_by_the_fields_name) {
    refuse("{" HEAD ", \"colour\": 1}", ATTND_EINVAL, "colour");
    refuse("{" HEAD ", \"window\": [1]}", ATTND_EINVAL, "window");
    refuse("{" HEAD ", \"window\": [-2, 0]}", ATTND_EINVAL, "window_left");
    refuse("{" HEAD ", \"sinks\": [1, 2]}", ATTND_EINVAL, "sinks");
    refuse("{" HEAD ", \"softcap\": -1}", ATTND_EINVAL, "softcap");
    refuse("{" HEAD ", \"kv_layer\": 4}", ATTND_EINVAL, "kv_layer");
    refuse("{" HEAD ", \"v_head_dim\": 12}", ATTND_ENOTSUP, "v_head_dim");
    refuse("{" HEAD ", \"kv_dtype\": \"f32\"}", ATTND_ENOTSUP, "kv_dtype");
    refuse("{" HEAD ", \"kv_dtype\": \"int4\"}", ATTND_ENOTSUP, "kv_dtype");
    refuse("{" HEAD ", \"block_tokens\": 0}", ATTND_EINVAL, "block_tokens");
    refuse("{" HEAD ", \"rope\": {\"inv_freq\": []}}", ATTND_EINVAL, "rope.inv_freq");
    refuse("{" HEAD ", \"layer_overrides\": [{\"layer\": 4}]}", ATTND_EINVAL,
           "layer_overrides[0].layer");
    refuse("{" HEAD ", \"layer_overrides\": [{\"layer\": 2, \"softcap\": 4}, {\"layer\": 2}]}",
           ATTND_EINVAL, "layer_overrides[1].layer");
    refuse("{" HEAD ", \"layer_overrides\": [{\"softcap\": 4}]}", ATTND_EINVAL,
           "layer_overrides[0].layer");
    refuse("{\"name\": \"m\"}", ATTND_EINVAL, "digest");
    ATTND_CK_ERR(parse("{"), ATTND_EPROTO);
    ATTND_CK_ERR(parse(""), ATTND_EPROTO);
}
END_TEST

START_TEST(a_reader_cannot_read_a_reader_or_look_further_back) {
    refuse("{" HEAD ", \"layer_overrides\": [{\"layer\": 1, \"kv_layer\": 0}, "
           "{\"layer\": 2, \"kv_layer\": 1}]}",
           ATTND_EINVAL, "kv_layer");
    refuse("{" HEAD ", \"layer_overrides\": [{\"layer\": 0, \"window\": [4, 0]}, "
           "{\"layer\": 1, \"kv_layer\": 0, \"window\": [5, 0]}]}",
           ATTND_EINVAL, "kv_layer");
}
END_TEST

START_TEST(more_windows_than_groups_are_refused) {
    char json[2048];
    int n = snprintf(json, sizeof(json), "%s",
                     "{\"name\": \"m\", \"digest\": \"00000000000000000000000000000000000000000000"
                     "00000000000000000001\", \"dtype\": \"f32\", \"layers\": 9, \"q_heads\": 1, "
                     "\"kv_heads\": 1, \"head_dim\": 8, \"layer_overrides\": [");
    for (int i = 0; i < 9; i++) {
        n += snprintf(json + n, sizeof(json) - (size_t)n, "%s{\"layer\": %d, \"window\": [%d, 0]}",
                      i ? ", " : "", i, i);
    }
    snprintf(json + n, sizeof(json) - (size_t)n, "]}");
    refuse(json, ATTND_ENOTSUP, "window");
}
END_TEST

START_TEST(equal_geometry_shares_a_shape_and_equal_models_a_place) {
    srv_models t;
    ATTND_CK_OK(srv_models_init(&t, 3));
    ATTND_CK_OK(parse("{" HEAD "}"));
    ATTND_CK_OK(srv_models_put(&t, 0, model, &info));
    ATTND_CK_OK(parse("{" HEAD "}"));
    ATTND_CK_OK(srv_models_put(&t, 0, model, &info)); // takes it, keeps the first
    ATTND_CK_OK(parse("{" HEAD ", \"softcap\": 2}"));
    ATTND_CK_ERR(srv_models_put(&t, 0, model, &info), ATTND_EEXIST);
    ATTND_CK_OK(srv_models_put(&t, 1, model, &info));
    ck_assert_ptr_eq(t.by_index[0]->shape, t.by_index[1]->shape);
    ATTND_CK_OK(parse("{" HEAD ", \"block_tokens\": 32}"));
    ATTND_CK_OK(srv_models_put(&t, 2, model, &info));
    ck_assert_ptr_ne(t.by_index[0]->shape, t.by_index[2]->shape);
    ck_assert_ptr_nonnull(srv_models_get(&t, 2, 0));
    ck_assert_ptr_null(srv_models_get(&t, 2, 1)); // another tenant
    ck_assert_ptr_null(srv_models_get(&t, 3, 0));
    ck_assert_ptr_null(srv_models_get(&t, UINT32_MAX, 0));
    srv_models_fini(&t);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_model");
    TCase *tc = tcase_create("srv_model");
    tcase_add_test(tc, defaults_follow_the_wire_format);
    tcase_add_test(tc, a_block_is_k_then_v_layer_after_layer);
    tcase_add_test(tc, windows_make_groups_and_readers_have_no_room_of_their_own);
    tcase_add_test(tc, arrays_and_rope_reach_their_layers);
    tcase_add_test(tc, fp8_caches_have_scales);
    tcase_add_test(tc, wrong_models_are_refused_by_the_fields_name);
    tcase_add_test(tc, a_reader_cannot_read_a_reader_or_look_further_back);
    tcase_add_test(tc, more_windows_than_groups_are_refused);
    tcase_add_test(tc, equal_geometry_shares_a_shape_and_equal_models_a_place);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
