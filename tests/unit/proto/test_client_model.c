// model_open: the JSON is what was asked for, key by key; which replies are taken; what is known of
// a model afterwards.
#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

#include "proto/client/client.h"
#include "proto/proto_json.h"
#include "tests/check_main.h"
#include "tests/unit/proto/fake_daemon.h"

static attnd_errinfo info;
static attnd_client *client;
static fake_daemon *fake;
static char got[200000];
static uint32_t num_requests;
static const char *answer_text;

static size_t answer(proto_view request, const proto_header *h, uint8_t *reply) {
    if (h->op == PROTO_HELLO) {
        return FAKE_DEFAULT;
    }
    num_requests++;
    size_t bytes = request.bytes - PROTO_BODY;
    memcpy(got, request.data + PROTO_BODY, bytes);
    got[bytes] = '\0';
    if (h->op == PROTO_MODEL_CLOSE) {
        return fake_body(reply, h, NULL, 0);
    }
    return answer_text ? fake_json(reply, h, answer_text) : FAKE_DEFAULT;
}

static void start(void) {
    fake = fake_daemon_start(answer, 1);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(fake),
                              &(attnd_connect_opts){.timeout_ms = 5000}, &info));
}

static void stop(void) {
    attnd_close(client);
    fake_daemon_stop(fake);
}

static attnd_model_opts small(void) {
    attnd_model_opts m = {.name = "m",
                          .dtype = ATTND_BF16,
                          .kv_dtype = ATTND_F8E4M3,
                          .layers = 2,
                          .q_heads = 4,
                          .kv_heads = 2,
                          .head_dim = 32,
                          .all = ATTND_LAYER_DEFAULT};
    m.digest[0] = 0xab;
    m.digest[31] = 0x01;
    return m;
}

START_TEST(model_open_of_defaults_sends_only_what_is_needed) {
    attnd_model_opts m = small();
    uint32_t model = 0;
    ATTND_CK_OK(attnd_model_open(client, &m, &model, &info));
    ck_assert_uint_eq(model, FAKE_MODEL);
    ck_assert_str_eq(got,
                     "{\"name\":\"m\",\"digest\":\"ab00000000000000000000000000000000000000"
                     "000000000000000000000001\",\"dtype\":\"bf16\",\"kv_dtype\":\"f8e4m3\","
                     "\"layers\":2,\"q_heads\":4,\"kv_heads\":2,\"head_dim\":32,\"causal\":true}");
}
END_TEST

START_TEST(model_open_sends_every_option) {
    const float freq[2] = {1.0f, 0.01f}, heads[4] = {0.5f, -1.0f, 2.0f, 0.0f}, scales[2] = {2, 4};
    attnd_model_opts m = small();
    m.v_head_dim = 16;
    m.block_tokens = 64;
    m.not_causal = true;
    m.all = (attnd_layer_opts){.scale = 0.25f,
                               .softcap = 30.0f,
                               .window_left = 128,
                               .window_right = 0,
                               .sinks = heads,
                               .alibi_slopes = heads,
                               .k_scale = scales,
                               .v_scale = scales,
                               .rope = {freq, 2, 1.5f, true},
                               .kv_layer = 0};
    uint32_t model;
    ATTND_CK_OK(attnd_model_open(client, &m, &model, &info));
    cJSON *doc;
    ATTND_CK_OK(proto_json_parse(&doc, got, strlen(got), &info));
    proto_obj o, rope;
    float f = 0, fs[4];
    uint32_t u = 0, num = 0;
    int32_t is[2];
    bool b = true;
    proto_obj_open(&o, doc, &info);
    ck_assert(proto_obj_u32(&o, "v_head_dim", 0, 99, &u) && u == 16);
    ck_assert(proto_obj_u32(&o, "block_tokens", 0, 99, &u) && u == 64);
    ck_assert(proto_obj_bool(&o, "causal", &b) && !b);
    ck_assert(proto_obj_float(&o, "scale", &f) && f == 0.25f);
    ck_assert(proto_obj_float(&o, "softcap", &f) && f == 30.0f);
    ck_assert(proto_obj_ints(&o, "window", is, 2, &num) && is[0] == 128 && is[1] == 0);
    const char *const arrays[] = {"sinks", "alibi"};
    for (int i = 0; i < 2; i++) {
        ck_assert(proto_obj_floats(&o, arrays[i], fs, 4, &num) && num == 4);
        ck_assert_mem_eq(fs, heads, sizeof(heads));
    }
    const char *const kv[] = {"k_scale", "v_scale"};
    for (int i = 0; i < 2; i++) {
        ck_assert(proto_obj_floats(&o, kv[i], fs, 2, &num) && num == 2 && fs[1] == 4.0f);
    }
    ck_assert(proto_obj_u32(&o, "kv_layer", 0, 9, &u) && u == 0);
    ck_assert(proto_obj_child(&o, "rope", &rope));
    ck_assert(proto_obj_floats(&rope, "inv_freq", fs, 4, &num) && num == 2 && fs[1] == 0.01f);
    ck_assert(proto_obj_float(&rope, "attention_factor", &f) && f == 1.5f);
    ck_assert(proto_obj_bool(&rope, "interleaved", &b) && b);
    ATTND_CK_OK(proto_obj_close(&rope));
    cJSON_Delete(doc);
}
END_TEST

START_TEST(model_open_sends_layers_one_by_one) {
    attnd_layer_opts layers[2] = {ATTND_LAYER_DEFAULT, ATTND_LAYER_DEFAULT};
    layers[1].window_left = 64;
    attnd_model_opts m = small();
    m.all.softcap = 9.0f; // replaced whole
    m.per_layer = layers;
    uint32_t model;
    ATTND_CK_OK(attnd_model_open(client, &m, &model, &info));
    ck_assert_ptr_null(strstr(got, "softcap"));
    ck_assert_ptr_nonnull(
        strstr(got, "\"layer_overrides\":[{\"layer\":0},{\"layer\":1,\"window\":[64,-1]}]}"));
}
END_TEST

START_TEST(model_open_floats_survive_as_text) {
    float values[4] = {0.1f, 1.17549435e-38f, 3.4028235e38f, 1e-45f};
    attnd_model_opts m = small();
    m.all.sinks = values;
    uint32_t model, num;
    ATTND_CK_OK(attnd_model_open(client, &m, &model, &info));
    cJSON *doc;
    ATTND_CK_OK(proto_json_parse(&doc, got, strlen(got), &info));
    proto_obj o;
    float fs[4];
    proto_obj_open(&o, doc, &info);
    ck_assert(proto_obj_floats(&o, "sinks", fs, 4, &num));
    ck_assert_mem_eq(fs, values, sizeof(values));
    cJSON_Delete(doc);
}
END_TEST

// What cannot be written down, or would overflow, is refused before anything is sent.
static void spoil(attnd_model_opts *m, int what) {
    m->name = what == 0 ? NULL : m->name;
    m->dtype = what == 1 ? (attnd_dtype)99 : m->dtype;
    m->kv_dtype = what == 2 ? ATTND_NUM_DTYPES : m->kv_dtype;
    m->layers = what == 3 ? PROTO_MAX_LAYERS + 1 : m->layers;
    m->q_heads = what == 4 ? 65536 : m->q_heads;
    m->kv_heads = what == 5 ? UINT32_MAX : m->kv_heads;
    m->head_dim = what == 6 ? 65536 : m->head_dim;
    m->v_head_dim = what == 7 ? 65536 : m->v_head_dim;
    m->all.rope.num_inv_freq = what == 8 ? 1 : 0; // without values
}
static const char *const spoilt[] = {"name",     "dtype",      "kv_dtype",
                                     "layers",   "q_heads",    "kv_heads",
                                     "head_dim", "v_head_dim", "rope.inv_freq"};

START_TEST(model_open_refuses_what_it_cannot_say) {
    attnd_model_opts m = small();
    uint32_t model = 77;
    spoil(&m, _i);
    ATTND_CK_ERR(attnd_model_open(client, &m, &model, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, spoilt[_i]);
    ck_assert_uint_eq(model, 77);
    ck_assert_uint_eq(num_requests, 0);
}
END_TEST

static int allocations_left;

static void *fail_later(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

// Every allocation of the JSON fails once: nothing with a key missing is ever sent.
START_TEST(model_open_without_memory_sends_nothing) {
    const float freq[2] = {1.0f, 0.01f};
    attnd_layer_opts layers[2] = {ATTND_LAYER_DEFAULT, ATTND_LAYER_DEFAULT};
    layers[1] = (attnd_layer_opts){.window_left = 64, .sinks = freq, .rope = {freq, 2, 1.5f, 1}};
    attnd_model_opts m = small();
    m.q_heads = 2;
    m.per_layer = layers;
    uint32_t model = 77, last_unsent = 0;
    cJSON_InitHooks(&(cJSON_Hooks){fail_later, free});
    for (int n = 0; n < 1000; n++) {
        allocations_left = n;
        if (attnd_model_open(client, &m, &model, &info) == ATTND_OK) {
            break;
        }
        ck_assert_int_eq(info.code, ATTND_ENOMEM);
        ck_assert_uint_eq(model, 77);
        if (num_requests > 0) { // the reply's JSON is what had no memory
            ck_assert_ptr_nonnull(strstr(got, "\"interleaved\":true}}]}"));
        } else {
            last_unsent = (uint32_t)n;
        }
    }
    cJSON_InitHooks(NULL);
    ck_assert_uint_eq(model, FAKE_MODEL);
    ck_assert_uint_gt(last_unsent, 40); // it is that many allocations at least
}
END_TEST

START_TEST(model_open_over_the_message_limit_is_not_sent) {
    static float heads[60000];
    attnd_model_opts m = small();
    m.q_heads = 60000;
    m.all.sinks = heads;
    uint32_t model;
    ATTND_CK_ERR(attnd_model_open(client, &m, &model, &info), ATTND_EMSGSIZE);
    ck_assert_uint_eq(num_requests, 0);
}
END_TEST

static const char *const bad_replies[] = {
    "{}",
    "{\"model\":-1}",
    "{\"model\":4294967296}",
    "{\"model\":\"3\"}",
    "{\"model\":null}",
    "[3]",
    "3",
    "",
    "{\"model\":3",
};

START_TEST(model_open_refuses_a_malformed_reply) {
    attnd_model_opts m = small();
    uint32_t model = 77;
    client_model known;
    answer_text = bad_replies[_i];
    ATTND_CK_ERR(attnd_model_open(client, &m, &model, &info), ATTND_EPROTO);
    ck_assert_uint_eq(model, 77);
    ATTND_CK_ERR(client_model_get(client, 3, &known, &info), ATTND_ENOENT);
}
END_TEST

START_TEST(model_is_known_until_it_is_closed_as_often_as_opened) {
    attnd_model_opts m = small();
    uint32_t model;
    client_model known;
    ATTND_CK_ERR(client_model_get(client, FAKE_MODEL, &known, &info), ATTND_ENOENT);
    ATTND_CK_OK(attnd_model_open(client, &m, &model, &info));
    ATTND_CK_OK(attnd_model_open(client, &m, &model, &info));
    ATTND_CK_OK(client_model_get(client, FAKE_MODEL, &known, &info));
    ck_assert_uint_eq(known.q_heads, 4);
    ck_assert_uint_eq(known.kv_heads, 2);
    ck_assert_uint_eq(known.head_dim, 32);
    ck_assert_uint_eq(known.v_head_dim, 32); // the default
    ck_assert_int_eq(known.dtype, ATTND_BF16);
    ATTND_CK_OK(attnd_model_close(client, model, &info));
    ATTND_CK_OK(client_model_get(client, FAKE_MODEL, &known, &info));
    ATTND_CK_OK(attnd_model_close(client, model, &info));
    ATTND_CK_ERR(client_model_get(client, FAKE_MODEL, &known, &info), ATTND_ENOENT);
    ck_assert_str_eq(info.field, "model");
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_model");
    TCase *tc = tcase_create("model");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, start, stop);
    tcase_add_test(tc, model_open_of_defaults_sends_only_what_is_needed);
    tcase_add_test(tc, model_open_sends_every_option);
    tcase_add_test(tc, model_open_sends_layers_one_by_one);
    tcase_add_test(tc, model_open_floats_survive_as_text);
    tcase_add_loop_test(tc, model_open_refuses_what_it_cannot_say, 0, 9);
    tcase_add_test(tc, model_open_without_memory_sends_nothing);
    tcase_add_test(tc, model_open_over_the_message_limit_is_not_sent);
    tcase_add_loop_test(tc, model_open_refuses_a_malformed_reply, 0,
                        sizeof(bad_replies) / sizeof(bad_replies[0]));
    tcase_add_test(tc, model_is_known_until_it_is_closed_as_often_as_opened);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
