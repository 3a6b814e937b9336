// Models: finding, refusing, forgetting; where a layer lies in a block.
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;
static uint32_t model;

static void setup(void) {
    fix_init(&f);
    model = 99;
}

static void teardown(void) {
    fix_fini(&f);
}

START_TEST(kv_model_of_the_same_name_is_found) {
    kv_model_spec spec = fix_spec("m", f.tenant);
    memset(spec.name + 2, 'z', sizeof(spec.name) - 2); // behind the NUL: no part of the name
    spec.groups[1].layers = 7;                         // no part of the spec
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
    ck_assert_uint_eq(model, f.model);
    const kv_model_spec *got = kv_model_get(f.kv, model);
    ck_assert_str_eq(got->name, "m");
    ck_assert_uint_eq(got->num_groups, 1);
    ck_assert_uint_eq(got->groups[0].k_row_bytes, 32);
    ck_assert_uint_eq(got->groups[1].layers, 0);
    ATTND_CK_OK(kv_model_close(f.kv, model));
    ck_assert_ptr_nonnull(kv_model_get(f.kv, model)); // one user is left
}
END_TEST

START_TEST(kv_model_that_differs_is_refused) {
    kv_model_spec spec = fix_spec("m", f.tenant);
    spec.digest[31] = 1;
    ATTND_CK_ERR(kv_model_open(f.kv, &spec, &model, &f.info), ATTND_EEXIST);
    spec = fix_spec("m", f.tenant);
    spec.groups[0].window_left = 128;
    ATTND_CK_ERR(kv_model_open(f.kv, &spec, &model, &f.info), ATTND_EEXIST);
    ck_assert_str_eq(f.info.field, "name");
    ck_assert_uint_eq(model, 99);
    uint32_t other;
    ATTND_CK_OK(kv_tenant_set(f.kv, "other", 0, &other));
    spec.tenant = other; // another tenant's model of that name is another model
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
    ck_assert_uint_ne(model, f.model);
}
END_TEST

static void expect_refused(const kv_model_spec *spec, const char *field) {
    ATTND_CK_ERR(kv_model_open(f.kv, spec, &model, &f.info), ATTND_EINVAL);
    ck_assert_str_eq(f.info.field, field);
    ck_assert_uint_eq(model, 99);
}

START_TEST(kv_model_fields_out_of_range_are_named) {
    const struct {
        size_t offset;
        const char *name;
    } fields[] = {
        {offsetof(kv_group_spec, layers), "layers"},
        {offsetof(kv_group_spec, kv_heads), "kv_heads"},
        {offsetof(kv_group_spec, k_row_bytes), "k_row_bytes"},
        {offsetof(kv_group_spec, v_row_bytes), "v_row_bytes"},
        {offsetof(kv_group_spec, block_tokens), "block_tokens"},
    };
    const uint32_t bad[] = {0, UINT32_C(1) << 31, UINT32_MAX};
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        for (size_t b = 0; b < 3; b++) {
            kv_model_spec spec = fix_spec("new", f.tenant);
            memcpy((char *)&spec.groups[0] + fields[i].offset, &bad[b], sizeof(bad[b]));
            expect_refused(&spec, fields[i].name);
        }
    }
    kv_model_spec spec = fix_spec("new", f.tenant);
    spec.groups[0].window_left = -2;
    expect_refused(&spec, "window_left");
    spec = fix_spec("new", f.tenant);
    spec.num_groups = 0;
    expect_refused(&spec, "num_groups");
    spec.num_groups = KV_MAX_GROUPS + 1;
    expect_refused(&spec, "num_groups");
    spec = fix_spec("new", f.tenant + 1);
    expect_refused(&spec, "tenant");
    spec = fix_spec("", f.tenant);
    expect_refused(&spec, "name");
    memset(spec.name, 'x', sizeof(spec.name));
    expect_refused(&spec, "name");
    spec = fix_spec("new", f.tenant);
    spec.groups[0].window_left = INT32_MAX;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
}
END_TEST

START_TEST(kv_model_block_larger_than_a_slab_is_refused_with_both_sizes) {
    kv_model_spec spec = fix_spec("new", f.tenant);
    spec.groups[0].layers = 17; // 17 units of a slab of 16
    expect_refused(&spec, "block_tokens");
    ck_assert_ptr_nonnull(strstr(f.info.text, "4352"));
    ck_assert_ptr_nonnull(strstr(f.info.text, "4096"));
    spec.groups[0].layers = spec.groups[0].kv_heads = spec.groups[0].block_tokens = INT32_MAX;
    spec.groups[0].k_row_bytes = spec.groups[0].v_row_bytes = INT32_MAX;
    expect_refused(&spec, "block_tokens"); // does not fit 64 bits
    spec = fix_spec("new", f.tenant);
    spec.groups[0].layers = 16;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
}
END_TEST

START_TEST(kv_model_without_users_and_sequences_is_forgotten) {
    uint64_t seq = fix_seq(&f);
    kv_info info;
    ATTND_CK_OK(kv_model_close(f.kv, f.model));
    ck_assert_ptr_nonnull(kv_model_get(f.kv, f.model)); // the sequence needs it
    ATTND_CK_ERR(kv_model_close(f.kv, f.model), ATTND_ENOENT);
    fix_append(&f, seq, 3);
    ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
    ck_assert_ptr_null(kv_model_get(f.kv, f.model));
    kv_get_info(f.kv, &info);
    ck_assert_uint_eq(info.models, 0);
    ck_assert_uint_eq(info.num_classes, 0);
    kv_model_spec spec = fix_spec("m", f.tenant);
    spec.digest[0] = 9; // the name is free for another one
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
    ATTND_CK_OK(kv_model_close(f.kv, model));
    ck_assert_ptr_null(kv_model_get(f.kv, model));
}
END_TEST

START_TEST(kv_model_open_fails_when_all_exist) {
    const char *names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++) {
        kv_model_spec spec = fix_spec(names[i], f.tenant);
        ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
    }
    kv_model_spec spec = fix_spec("d", f.tenant);
    ATTND_CK_ERR(kv_model_open(f.kv, &spec, &model, &f.info), ATTND_ENOSPC);
    spec = fix_spec("c", f.tenant);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
}
END_TEST

START_TEST(kv_model_get_and_close_refuse_what_is_no_model) {
    ck_assert_ptr_null(kv_model_get(f.kv, f.model + 1));
    ck_assert_ptr_null(kv_model_get(f.kv, UINT32_MAX));
    ATTND_CK_ERR(kv_model_close(f.kv, UINT32_MAX), ATTND_ENOENT);
}
END_TEST

START_TEST(kv_model_layers_lie_as_the_header_says) {
    // 2 heads of 3 tokens, K rows of 10 bytes and V rows of 6: K 60, V 36 bytes a layer
    const kv_group_spec g = {
        .layers = 4, .kv_heads = 2, .k_row_bytes = 10, .v_row_bytes = 6, .block_tokens = 3};
    uint64_t k, v;
    kv_layer_offset(&g, 0, &k, &v);
    ck_assert_uint_eq(k, 0);
    ck_assert_uint_eq(v, 60);
    kv_layer_offset(&g, 3, &k, &v);
    ck_assert_uint_eq(k, 288);
    ck_assert_uint_eq(v, 348);
    ck_assert_uint_eq(kv_block_bytes(&g), 384); // one layer more would begin here
    const kv_group_spec large = {.layers = 1024,
                                 .kv_heads = 1024,
                                 .k_row_bytes = 1024,
                                 .v_row_bytes = 1024,
                                 .block_tokens = 1024};
    kv_layer_offset(&large, 1023, &k, &v); // 64-bit
    ck_assert_uint_eq(k, UINT64_C(1023) << 31);
    ck_assert_uint_eq(v, (UINT64_C(1023) << 31) + (UINT64_C(1) << 30));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_model");
    TCase *t = tcase_create("model");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_model_of_the_same_name_is_found);
    tcase_add_test(t, kv_model_that_differs_is_refused);
    tcase_add_test(t, kv_model_fields_out_of_range_are_named);
    tcase_add_test(t, kv_model_block_larger_than_a_slab_is_refused_with_both_sizes);
    tcase_add_test(t, kv_model_without_users_and_sequences_is_forgotten);
    tcase_add_test(t, kv_model_open_fails_when_all_exist);
    tcase_add_test(t, kv_model_get_and_close_refuse_what_is_no_model);
    tcase_add_test(t, kv_model_layers_lie_as_the_header_says);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
