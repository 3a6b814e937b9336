// The float64 outputs against hand values, against a literal loop, and against the library's
// reference; the plain run against its own definition.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attn.h"
#include "tests/check_main.h"
#include "tests/load/bench_data.h"
#include "tests/load/bench_math.h"
#include "tests/load/bench_ref.h"

static attnd_errinfo info;
static bench_model model;
static bench_ref *ref;
static bench_rope_table rope;

static void prepare(void) {
    ATTND_CK_OK(bench_model_prepare(&model, 1, &info));
    ATTND_CK_OK(bench_ref_create(&ref, &model));
    ATTND_CK_OK(bench_rope_table_grow(&rope, &model, 100)); // later positions are made on the way
}

static void setup(void) {
    ATTND_CK_OK(bench_model_preset(&model, "tiny", &info));
}

static void teardown(void) {
    bench_ref_free(ref);
    bench_rope_table_free(&rope);
    bench_model_fini(&model);
    ref = NULL;
}

static bench_block block_of(const uint32_t *positions, uint32_t num) {
    bench_block b = {.model = &model,
                     .rope = &rope,
                     .seed = 5,
                     .prompt.request = 6,
                     .layer = 1,
                     .num_tokens = num,
                     .positions = positions};
    bench_block_init(&b);
    return b;
}

// sent returns an element of what the runtime sends for the block's request and layer.
static double sent(bench_tensor tensor, uint32_t token, uint32_t elem) {
    char x[4];
    bench_fill(x, model.dtype, tensor, bench_row_key(5, 6, 1, tensor, token), elem, 1);
    return attnd_load(x, model.dtype, 0);
}

START_TEST(one_key_gives_its_value) {
    prepare();
    uint32_t position = 0;
    bench_block b = block_of(&position, 1);
    double out[128];
    float plain[128];
    ATTND_CK_OK(bench_ref_f64(ref, &b, out));
    ATTND_CK_OK(bench_ref_plain(ref, &b, BENCH_ASCENDING, plain));
    for (uint32_t h = 0; h < 4; h++) {
        for (uint32_t d = 0; d < 32; d++) {
            ck_assert_double_eq(out[h * 32 + d], sent(BENCH_V, 0, h / 2 * 32 + d));
            ck_assert_double_eq((double)plain[h * 32 + d], out[h * 32 + d]);
        }
    }
}
END_TEST

START_TEST(two_keys_are_weighted_by_the_logistic_function) {
    prepare();
    uint32_t position = 1;
    bench_block b = block_of(&position, 1);
    double out[128];
    ATTND_CK_OK(bench_ref_f64(ref, &b, out));
    for (uint32_t h = 0; h < 4; h++) {
        double x[2] = {0, 0};
        for (uint32_t j = 0; j < 2; j++) {
            for (uint32_t d = 0; d < 32; d++) {
                x[j] += sent(BENCH_Q, 1, h * 32 + d) * sent(BENCH_K, j, h / 2 * 32 + d);
            }
        }
        double p = 1 / (1 + exp((x[1] - x[0]) / sqrt(32))); // of key 0
        for (uint32_t d = 0; d < 32; d++) {
            double v0 = sent(BENCH_V, 0, h / 2 * 32 + d), v1 = sent(BENCH_V, 1, h / 2 * 32 + d);
            ck_assert_double_eq_tol(out[h * 32 + d], p * v0 + (1 - p) * v1, 1e-14);
        }
    }
}
END_TEST

START_TEST(rows_of_a_block_may_come_in_any_order) {
    prepare();
    static const uint32_t POSITIONS[] = {200, 3, 64, 63, 129};
    double all[5 * 128], one[128];
    bench_block b = block_of(POSITIONS, 5);
    ck_assert_uint_eq(b.first_key, 0);
    ck_assert_uint_eq(b.end_key, 201);
    ATTND_CK_OK(bench_ref_f64(ref, &b, all));
    for (uint32_t t = 0; t < 5; t++) {
        bench_block single = block_of(&POSITIONS[t], 1);
        ATTND_CK_OK(bench_ref_f64(ref, &single, one));
        for (uint32_t i = 0; i < 128; i++) {
            ck_assert_double_eq_tol(all[t * 128 + i], one[i], 1e-15);
        }
    }
}
END_TEST

// ---- against attn_reference

enum { MAX_LEN = 300, BLOCK_TOKENS = 16, NUM_CASES = 12 };

// make_case is geometry number i: each feature by itself, then together.
static void make_case(int i) {
    static const attnd_dtype DTYPES[] = {ATTND_F32, ATTND_BF16, ATTND_F16};
    model.dtype = DTYPES[i % 3];
    model.q_heads = i % 4 == 3 ? 12 : 4;
    model.kv_heads = i % 4 == 3 ? 4 : i % 2 == 0 ? 2 : 1;
    model.head_dim = i % 2 == 0 ? 32 : 72;
    model.v_head_dim = i % 3 == 1 ? 40 : 0;
    model.window = i == 2 || i >= 10 ? 50 : 0;
    model.softcap = i == 3 || i >= 9 ? 5 : 0;
    model.alibi = i == 4 || i == 11;
    model.sinks = i == 5 || i >= 8;
    model.scale = i == 6 ? 0.4f : 0;
    model.rope_theta = i >= 7 ? 10000 : 0;
    model.rope_factor = i == 9 ? 8 : 0;
    model.rotary_dim = i == 8 ? 24 : 0;
    model.rope_interleaved = i == 10;
    if (i == 7) {
        model.kv_dtype = ATTND_F8E4M3;
    }
}

// library computes rows [len - num, len) by attn_reference, out [num, q_heads, v_head_dim].
static void library(uint32_t len, uint32_t num, double *out) {
    const bench_model *m = &model;
    uint32_t size = attnd_dtype_bytes(m->dtype), kv_size = attnd_dtype_bytes(m->kv_dtype);
    uint32_t blocks = (len + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    uint64_t k_bytes = (uint64_t)m->kv_heads * BLOCK_TOKENS * m->head_dim * kv_size;
    uint64_t v_bytes = (uint64_t)m->kv_heads * BLOCK_TOKENS * m->v_head_dim * kv_size;
    uint32_t q_row = m->q_heads * m->head_dim, k_row = m->kv_heads * m->head_dim,
             v_row = m->kv_heads * m->v_head_dim, out_row = m->q_heads * m->v_head_dim;
    char *q = malloc((size_t)len * q_row * size), *k = malloc((size_t)len * k_row * size),
         *v = malloc((size_t)len * v_row * size), *o = malloc((size_t)len * out_row * size);
    for (uint32_t t = 0; t < len; t++) {
        bench_fill(q + (size_t)t * q_row * size, m->dtype, BENCH_Q,
                   bench_row_key(5, 6, 1, BENCH_Q, t), 0, q_row);
        bench_fill(k + (size_t)t * k_row * size, m->dtype, BENCH_K,
                   bench_row_key(5, 6, 1, BENCH_K, t), 0, k_row);
        bench_fill(v + (size_t)t * v_row * size, m->dtype, BENCH_V,
                   bench_row_key(5, 6, 1, BENCH_V, t), 0, v_row);
    }
    uint32_t table[MAX_LEN / BLOCK_TOKENS + 1];
    for (uint32_t i = 0; i < blocks; i++) {
        table[i] = blocks - 1 - i;
    }
    const attnd_layer_opts *l = &m->per_layer[1];
    attn_rope turn = {.inv_freq = m->inv_freq,
                      .attention_factor = m->attention_factor,
                      .rotary_dim = (int32_t)m->rotary_dim,
                      .interleaved = m->rope_interleaved};
    attn_row row = {
        .q = q,
        .out = o,
        .k_new = k,
        .v_new = v,
        .table = table,
        .stride_q_token = q_row,
        .stride_q_head = m->head_dim,
        .stride_out_token = out_row,
        .stride_out_head = m->v_head_dim,
        .stride_k_new_token = k_row,
        .stride_k_new_head = m->head_dim,
        .stride_v_new_token = v_row,
        .stride_v_new_head = m->v_head_dim,
        .v_offset = k_bytes,
        .kv_len = (int32_t)len,
        .q_len = (int32_t)len,
        .new_len = (int32_t)len,
        .q_first = (int32_t)(len - num),
        .q_count = (int32_t)num,
        .flags = ATTN_CAUSAL,
        .scale = l->scale,
        .softcap = l->softcap,
        .window_left = l->window_left,
        .window_right = -1,
        .sinks = l->sinks,
        .alibi_slopes = l->alibi_slopes,
        .rope = m->inv_freq != NULL ? &turn : NULL,
    };
    attn_params p = {.shape = {.q_dtype = m->dtype,
                               .kv_dtype = m->kv_dtype,
                               .q_heads = (int32_t)m->q_heads,
                               .kv_heads = (int32_t)m->kv_heads,
                               .head_dim = (int32_t)m->head_dim,
                               .v_head_dim = (int32_t)m->v_head_dim,
                               .block_tokens = BLOCK_TOKENS,
                               .stride_k_token = m->head_dim,
                               .stride_k_head = (int64_t)BLOCK_TOKENS * m->head_dim,
                               .stride_v_token = m->v_head_dim,
                               .stride_v_head = (int64_t)BLOCK_TOKENS * m->v_head_dim,
                               .block_stride = k_bytes + v_bytes},
                     .pool = calloc(blocks, k_bytes + v_bytes),
                     .pool_bytes = blocks * (k_bytes + v_bytes),
                     .num_blocks = blocks,
                     .rows = &row,
                     .num_rows = 1};
    ATTND_CK_OK(attn_check(&p, &info));
    ATTND_CK_OK(attn_reference(&p, out, NULL));
    free(p.pool);
    free(q);
    free(k);
    free(v);
    free(o);
}

START_TEST(outputs_are_those_of_the_library_reference) {
    static const uint32_t LENS[] = {1, 15, 64, 65, 300};
    make_case(_i);
    prepare();
    uint64_t row = (uint64_t)model.q_heads * model.v_head_dim;
    double *want = malloc(5 * row * sizeof(*want)), *got = malloc(5 * row * sizeof(*got));
    for (int n = 0; n < 5; n++) {
        uint32_t len = LENS[n], num = len < 5 ? len : 5, positions[5];
        for (uint32_t t = 0; t < num; t++) {
            positions[t] = len - num + t;
        }
        bench_block b = block_of(positions, num);
        library(len, num, want);
        ATTND_CK_OK(bench_ref_f64(ref, &b, got));
        for (uint64_t i = 0; i < num * row; i++) {
            ck_assert_double_eq_tol(got[i], want[i], 1e-13);
        }
    }
    free(want);
    free(got);
}
END_TEST

START_TEST(plain_runs_are_near_and_differ_by_order) {
    make_case(_i);
    prepare();
    uint32_t positions[2] = {298, 299};
    uint64_t elems = 2ull * model.q_heads * model.v_head_dim;
    bench_block b = block_of(positions, 2);
    double *want = malloc(elems * sizeof(*want)), largest = 0;
    float *plain[BENCH_NUM_ORDERS];
    ATTND_CK_OK(bench_ref_f64(ref, &b, want));
    for (uint64_t i = 0; i < elems; i++) {
        largest = fmax(largest, fabs(want[i]));
    }
    // far below what a wrong key, head or dim would make, far above rounding
    double near = model.dtype == ATTND_F32 ? 5e-6 : model.dtype == ATTND_F16 ? 2e-3 : 2e-2;
    near = model.kv_dtype == ATTND_F8E4M3 ? 5e-2 : near;
    for (int order = 0; order < BENCH_NUM_ORDERS; order++) {
        plain[order] = malloc(elems * sizeof(float));
        ATTND_CK_OK(bench_ref_plain(ref, &b, (bench_order)order, plain[order]));
        for (uint64_t i = 0; i < elems; i++) {
            ck_assert_double_eq_tol((double)plain[order][i], want[i], near * largest);
        }
    }
    if (model.dtype == ATTND_F32) {
        ck_assert_mem_ne(plain[0], plain[1], elems * sizeof(float));
        ck_assert_mem_ne(plain[0], plain[2], elems * sizeof(float));
        ck_assert_mem_ne(plain[1], plain[2], elems * sizeof(float));
    }
    for (int order = 0; order < BENCH_NUM_ORDERS; order++) {
        free(plain[order]);
    }
    free(want);
}
END_TEST

// literal is the plain run of tiny's row at position p, ascending, as a reader would write it.
static void literal(uint32_t p, float *out) {
    float scale = 1 / sqrtf(32), x[64];
    for (uint32_t h = 0; h < 4; h++) {
        float largest = -INFINITY, sum = 0;
        for (uint32_t j = 0; j <= p; j++) {
            float dot = 0;
            for (uint32_t d = 0; d < 32; d++) {
                dot = fmaf((float)sent(BENCH_Q, p, h * 32 + d),
                           (float)sent(BENCH_K, j, h / 2 * 32 + d), dot);
            }
            x[j] = dot * scale;
            largest = fmaxf(largest, x[j]);
        }
        for (uint32_t j = 0; j <= p; j++) {
            x[j] = (float)exp((double)(x[j] - largest));
            sum += x[j];
        }
        for (uint32_t d = 0; d < 32; d++) {
            float o = 0;
            for (uint32_t j = 0; j <= p; j++) {
                o = fmaf(x[j] / sum, (float)sent(BENCH_V, j, h / 2 * 32 + d), o);
            }
            out[h * 32 + d] = o;
        }
    }
}

START_TEST(the_ascending_plain_run_is_the_literal_one) {
    prepare();
    uint32_t position = 50;
    bench_block b = block_of(&position, 1);
    float got[128], want[128];
    ATTND_CK_OK(bench_ref_plain(ref, &b, BENCH_ASCENDING, got));
    literal(position, want);
    for (uint32_t i = 0; i < 128; i++) {
        ck_assert_float_eq_tol(got[i], want[i], 1e-6f); // FMA or not is the compiler's choice
    }
}
END_TEST

START_TEST(long_sequences_have_smaller_blocks) {
    prepare();
    ck_assert_uint_eq(bench_ref_max_tokens(ref, 1000), 32);   // 64 rows, 2 heads a group
    ck_assert_uint_eq(bench_ref_max_tokens(ref, 1 << 20), 4); // 8 MiB a row of 64 MiB
    ck_assert_uint_eq(bench_ref_max_tokens(ref, 1 << 24), 1);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_ref");
    TCase *tc = tcase_create("reference");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, one_key_gives_its_value);
    tcase_add_test(tc, two_keys_are_weighted_by_the_logistic_function);
    tcase_add_test(tc, rows_of_a_block_may_come_in_any_order);
    tcase_add_loop_test(tc, outputs_are_those_of_the_library_reference, 0, NUM_CASES);
    tcase_add_loop_test(tc, plain_runs_are_near_and_differ_by_order, 0, NUM_CASES);
    tcase_add_test(tc, the_ascending_plain_run_is_the_literal_one);
    tcase_add_test(tc, long_sequences_have_smaller_blocks);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
