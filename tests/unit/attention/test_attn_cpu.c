// The engine: what create and run accept, refuse and say.  Results are the conformance tests'.
#include "attention/cpu/attn_cpu_ops.h"
#include "tests/check_main.h"
#include "tests/unit/attention/tiny.h"

static tiny t;

static attn_cpu *create(int32_t threads, uint32_t max_rows) {
    attn_cpu *cpu = NULL;
    attn_cpu_opts opts = {.num_threads = threads, .max_rows = max_rows};
    ATTND_CK_OK(attn_cpu_create(&cpu, &opts, NULL));
    return cpu;
}

START_TEST(defaults_are_enough) {
    attn_cpu *cpu = create(0, 0);
    tiny_init(&t, 5, 1);
    tiny_v(&t, 0)[0] = 5;
    ATTND_CK_OK(attn_cpu_run(cpu, &t.params, NULL, NULL));
    ck_assert_float_eq(t.out[0][0][0], 1);
    attn_cpu_free(cpu);
    attn_cpu_free(NULL);
}
END_TEST

// Twice ATTN_TASK_ROWS states and the scratch of a kernel.
START_TEST(no_room_for_states_is_enough) {
    attn_cpu *cpu = NULL;
    attn_cpu_opts opts = {.num_threads = 1};
    opts.scratch_bytes =
        ATTN_CPU_SCRATCH_BYTES + 2ull * ATTN_TASK_ROWS * (ATTN_MAX_HEAD_DIM + 2) * sizeof(float);
    ATTND_CK_OK(attn_cpu_create(&cpu, &opts, NULL));
    attn_cpu_free(cpu);
    opts.scratch_bytes--;
    ATTND_CK_ERR(attn_cpu_create(&cpu, &opts, NULL), ATTND_EINVAL);
}
END_TEST

START_TEST(scalar_is_always_there) {
    attn_cpu *cpu = NULL;
    ATTND_CK_OK(attn_cpu_create(&cpu, &(attn_cpu_opts){.num_threads = 1, .isa = "scalar"}, NULL));
    ck_assert_str_eq(attn_cpu_isa(cpu), "scalar");
    attn_cpu_free(cpu);
}
END_TEST

START_TEST(success_leaves_the_error_alone) {
    attn_cpu *cpu = NULL;
    attnd_errinfo info = {.code = ATTND_OK};
    ATTND_CK_OK(attn_cpu_create(&cpu, &(attn_cpu_opts){.num_threads = 1}, &info));
    ck_assert_int_eq(info.code, ATTND_OK);
    ck_assert_str_eq(info.text, "");
    attn_cpu_free(cpu);
}
END_TEST

START_TEST(the_environment_forces_an_isa) {
    attn_cpu *cpu = NULL;
    attnd_errinfo info;
    setenv("ATTND_CPU", "scalar", 1);
    ATTND_CK_OK(attn_cpu_create(&cpu, &(attn_cpu_opts){.num_threads = 1}, NULL));
    ck_assert_str_eq(attn_cpu_isa(cpu), "scalar");
    attn_cpu_free(cpu);
    cpu = NULL;
    setenv("ATTND_CPU", "mmx", 1);
    ATTND_CK_ERR(attn_cpu_create(&cpu, &(attn_cpu_opts){.num_threads = 1}, &info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "isa");
    ck_assert_ptr_null(cpu);
}
END_TEST

START_TEST(isas_that_the_machine_lacks_are_refused) {
    uint32_t features = 0;
    ATTND_CK_OK(attn_cpu_features_of(&features, "scalar", 0, NULL));
    ck_assert_uint_eq(features, 0);
    ATTND_CK_ERR(attn_cpu_features_of(&features, "avx2", 0, NULL), ATTND_ENOTSUP);
    ATTND_CK_ERR(attn_cpu_features_of(&features, "neon", 0, NULL), ATTND_ENOTSUP);
    ATTND_CK_ERR(attn_cpu_features_of(&features, "", ~0u, NULL), ATTND_ENOTSUP);
}
END_TEST

// Unasked an engine runs what pays on this machine; every set that is there can be asked for.
START_TEST(what_is_there_can_be_asked_for) {
    uint32_t there = attn_cpu_detect();
    ck_assert_uint_eq(attn_cpu_prefer(there) & ~there, 0);
    ck_assert_uint_eq((there ^ attn_cpu_prefer(there)) & ~(uint32_t)ATTN_CPU_AVX512_BF16, 0);
    if (there & ATTN_CPU_AVX512_BF16) {
        attn_cpu *cpu = NULL;
        attn_cpu_opts opts = {.num_threads = 1, .isa = "avx512_bf16"};
        ATTND_CK_OK(attn_cpu_create(&cpu, &opts, NULL));
        ck_assert_str_eq(attn_cpu_isa(cpu), "avx512_bf16");
        attn_cpu_free(cpu);
    }
}
END_TEST

START_TEST(masked_features_give_the_scalar_table) {
    attn_cpu_ops ops;
    attn_cpu_init(&ops, 0);
    ck_assert_str_eq(ops.isa, "scalar");
    for (int i = 0; i < ATTND_NUM_DTYPES; i++) {
        ck_assert_ptr_nonnull(ops.decode[i].attend);
        ck_assert_ptr_nonnull(ops.prefill[i].attend);
        ck_assert_int_le(ops.decode[i].rows, ATTN_TASK_ROWS);
        ck_assert_int_le(ops.prefill[i].rows, ATTN_TASK_ROWS);
    }
}
END_TEST

static void refuse_opts(attn_cpu_opts opts, const char *field) {
    attn_cpu *cpu = NULL;
    attnd_errinfo info = {0};
    ATTND_CK_ERR(attn_cpu_create(&cpu, &opts, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, field);
    ck_assert_ptr_null(cpu);
}

START_TEST(bad_options_are_refused_by_name) {
    refuse_opts((attn_cpu_opts){.num_threads = -1}, "num_threads");
    refuse_opts((attn_cpu_opts){.num_threads = 1 << 20}, "num_threads");
    refuse_opts((attn_cpu_opts){.max_rows = UINT32_MAX}, "max_rows");
    refuse_opts((attn_cpu_opts){.num_threads = 1, .scratch_bytes = 4096}, "scratch_bytes");
}
END_TEST

START_TEST(a_refused_launch_changes_nothing) {
    attn_cpu *cpu = create(2, 4);
    tiny_init(&t, 5, 2);
    t.row.new_len = 2;
    t.k_new[0][0] = t.v_new[0][0] = 1;
    attn_row rows[2] = {t.row, t.row};
    rows[1].kv_len = -1;
    t.params.rows = rows;
    t.params.num_rows = 2;
    static tiny before;
    before = t;
    attnd_errinfo info;
    ATTND_CK_ERR(attn_cpu_run(cpu, &t.params, NULL, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "kv_len");
    ck_assert_mem_eq(&before, &t, sizeof(t));
    attn_cpu_free(cpu);
}
END_TEST

START_TEST(too_many_rows_are_refused) {
    attn_cpu *cpu = create(1, 2);
    attn_row rows[3];
    tiny_init(&t, 5, 1);
    rows[0] = rows[1] = rows[2] = t.row;
    t.params.rows = rows;
    t.params.num_rows = 3;
    attnd_errinfo info;
    ATTND_CK_ERR(attn_cpu_run(cpu, &t.params, NULL, &info), ATTND_EMSGSIZE);
    ck_assert_str_eq(info.field, "rows");
    t.params.num_rows = 2;
    ATTND_CK_OK(attn_cpu_run(cpu, &t.params, NULL, NULL));
    attn_cpu_free(cpu);
}
END_TEST

START_TEST(the_choice_names_kernel_splits_and_rows) {
    setenv("ATTND_CPU", "scalar", 1);
    attn_cpu *cpu = create(1, 4);
    attn_choice choice;
    tiny_init(&t, 12, 1);
    t.params.num_splits = 3;
    ATTND_CK_OK(attn_cpu_run(cpu, &t.params, &choice, NULL));
    ck_assert_str_eq(choice.kernel, "cpu_scalar_f32_decode");
    ck_assert_uint_eq(choice.splits, 3);
    ck_assert_uint_eq(choice.rows, 1);
    tiny_init(&t, 12, 12);
    ATTND_CK_OK(attn_cpu_run(cpu, &t.params, &choice, NULL));
    ck_assert_str_eq(choice.kernel, "cpu_scalar_f32_prefill");
    tiny_init(&t, 12, 0);
    t.row.new_len = 1;
    ATTND_CK_OK(attn_cpu_run(cpu, &t.params, &choice, NULL));
    ck_assert_str_eq(choice.kernel, "cpu_append");
    t.params.num_rows = 0;
    ATTND_CK_OK(attn_cpu_run(cpu, &t.params, &choice, NULL));
    ck_assert_uint_eq(choice.rows, 0);
    attn_cpu_free(cpu);
}
END_TEST

// Rows may read what other rows of the launch append.
START_TEST(all_appends_come_before_all_reads) {
    attn_cpu *cpu = create(3, 64);
    static attn_row rows[64];
    for (int n = 0; n < 50; n++) {
        tiny_init(&t, 16, 1);
        static float out[64][TINY_DIM];
        for (int i = 0; i < 64; i++) {
            rows[i] = t.row;
            rows[i].out = out[i];
            rows[i].lse = NULL;
        }
        rows[63].new_len = 16; // the last row appends what all read
        for (int j = 0; j < 16; j++) {
            t.v_new[j][0] = 2;
        }
        t.params.rows = rows;
        t.params.num_rows = 64;
        ATTND_CK_OK(attn_cpu_run(cpu, &t.params, NULL, NULL));
        for (int i = 0; i < 64; i++) {
            ck_assert_float_eq(out[i][0], 2);
        }
    }
    attn_cpu_free(cpu);
}
END_TEST

START_TEST(saturated_values_are_counted) {
    attn_cpu *cpu = create(2, 4);
    uint64_t saturated = 5;
    static const float k_scale = 0.5f;
    uint16_t k[8] = {0};
    uint16_t v[8] = {0};
    k[0] = attnd_f32_to_bf16(300); // 600 in units of the scale
    k[1] = attnd_f32_to_bf16(-224);
    v[3] = attnd_f32_to_bf16(-1000);
    v[4] = attnd_f32_to_bf16(INFINITY);
    v[5] = attnd_f32_to_bf16(NAN);
    tiny_init(&t, 3, 0);
    t.params.shape.q_dtype = ATTND_BF16;
    t.params.shape.kv_dtype = ATTND_F8E4M3;
    t.params.saturated = &saturated;
    t.row.new_len = 1;
    t.row.k_new = k;
    t.row.v_new = v;
    t.row.k_scale = &k_scale;
    ATTND_CK_OK(attn_cpu_run(cpu, &t.params, NULL, NULL));
    ck_assert_uint_eq(saturated, 5 + 3);
    const uint8_t *block = (const uint8_t *)t.pool + 2 * t.params.shape.block_stride;
    ck_assert_uint_eq(block[2 * TINY_DIM], 0x7e);
    ck_assert_uint_eq(block[2 * TINY_DIM + 1], 0xfe); // -448 fits and does not count
    ck_assert_uint_eq(block[t.row.v_offset + 2 * TINY_DIM + 5] & 0x7f, 0x7f);
    attn_cpu_free(cpu);
}
END_TEST

// One key of value h for KV head h, so the result is h; K and q are zeros.
START_TEST(as_many_heads_as_there_may_be_fit) {
    enum { HEADS = 512, DIM = ATTN_MAX_HEAD_DIM };
    static const char *const isas[] = {"scalar", "avx2", "avx512", "avx512_bf16", "neon"};
    float *pool = calloc(2 * HEADS * DIM, sizeof(*pool));
    float *q = calloc(HEADS * DIM, sizeof(*q));
    float *out = calloc(HEADS * DIM, sizeof(*out));
    ck_assert(pool && q && out);
    for (int i = 0; i < HEADS * DIM; i++) {
        pool[HEADS * DIM + i] = (float)(i / DIM);
    }
    tiny_init(&t, 1, 1);
    t.row.q = q;
    t.row.out = out;
    t.row.lse = NULL;
    t.row.stride_q_token = t.row.stride_out_token = HEADS * DIM;
    t.row.stride_q_head = t.row.stride_out_head = DIM;
    t.row.v_offset = HEADS * DIM * sizeof(*pool);
    t.table[0] = 0;
    attn_shape *s = &t.params.shape;
    s->q_heads = s->kv_heads = HEADS;
    s->head_dim = s->v_head_dim = DIM;
    s->block_tokens = 1;
    s->stride_k_token = s->stride_v_token = s->stride_k_head = s->stride_v_head = DIM;
    s->block_stride = 2 * HEADS * DIM * sizeof(*pool);
    t.params.pool = pool;
    t.params.pool_bytes = s->block_stride;
    t.params.num_blocks = 1;
    for (size_t isa = 0; isa < sizeof(isas) / sizeof(isas[0]); isa++) {
        attn_cpu *cpu = NULL;
        if (attn_cpu_create(&cpu, &(attn_cpu_opts){.num_threads = 1, .isa = isas[isa]}, NULL)) {
            continue;
        }
        memset(out, 0xff, HEADS * DIM * sizeof(*out));
        ATTND_CK_OK(attn_cpu_run(cpu, &t.params, NULL, NULL));
        for (int i = 0; i < HEADS * DIM; i++) {
            ck_assert_float_eq(out[i], (float)(i / DIM));
        }
        attn_cpu_free(cpu);
    }
    free(out);
    free(q);
    free(pool);
}
END_TEST

// f8e4m3 is what a byte means: sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinities.
static float f8e4m3(int byte) {
    int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float sign = byte & 128 ? -1.0f : 1.0f;
    if ((byte & 127) == 127) {
        return NAN;
    }
    return exponent ? sign * ldexpf((float)(8 + mantissa), exponent - 10)
                    : sign * ldexpf((float)mantissa, -9);
}

// near compares what two roundings may keep apart, and NaN with NaN.
static void near(float got, float want, int byte) {
    bool is_near = isnan(want) ? isnan(got) : fabsf(got - want) <= 1e-6f * fmaxf(1, fabsf(want));
    ck_assert_msg(is_near, "byte %d: %g, expected %g", byte, (double)got, (double)want);
}

// check_bytes attends one key: what weighs 1 comes out as it is, and a key's only score is its LSE.
static void check_bytes(attn_cpu *cpu, attnd_dtype q_dtype) {
    enum { DIM = 256 };
    static uint8_t pool[2][DIM]; // K, V
    static uint16_t q[DIM], out[DIM];
    tiny_init(&t, 1, 1);
    t.row.q = q;
    t.row.out = out;
    t.row.v_offset = DIM;
    t.table[0] = 0;
    attn_shape *s = &t.params.shape;
    s->q_dtype = q_dtype;
    s->kv_dtype = ATTND_F8E4M3;
    s->head_dim = s->v_head_dim = DIM;
    s->block_tokens = 1;
    s->stride_k_token = s->stride_v_token = s->stride_k_head = s->stride_v_head = DIM;
    s->block_stride = sizeof(pool);
    t.row.stride_q_token = t.row.stride_q_head = t.row.stride_out_token = t.row.stride_out_head =
        DIM;
    t.params.pool = pool;
    t.params.pool_bytes = sizeof(pool);
    t.params.num_blocks = 1;
    for (int i = 0; i < DIM; i++) {
        q[i] = q_dtype == ATTND_F16 ? 0x3c00 : 0x3f80; // 1
        pool[1][i] = (uint8_t)i;
    }
    for (int byte = 0; byte < DIM; byte++) {
        memset(pool[0], 0, DIM);
        pool[0][byte] = (uint8_t)byte;
        ATTND_CK_OK(attn_cpu_run(cpu, &t.params, NULL, NULL));
        near(t.lse[0][0], f8e4m3(byte), byte);
        if (!isnan(f8e4m3(byte))) {
            for (int i = 0; i < DIM; i++) {
                near(q_dtype == ATTND_F16 ? attnd_f16_to_f32(out[i]) : attnd_bf16_to_f32(out[i]),
                     f8e4m3(i), i);
            }
        }
    }
}

START_TEST(every_f8e4m3_byte_is_what_it_means) {
    static const char *const isas[] = {"scalar", "avx2", "avx512", "avx512_bf16", "neon"};
    for (size_t isa = 0; isa < sizeof(isas) / sizeof(isas[0]); isa++) {
        attn_cpu *cpu = NULL;
        if (!attn_cpu_create(&cpu, &(attn_cpu_opts){.num_threads = 1, .isa = isas[isa]}, NULL)) {
            check_bytes(cpu, ATTND_BF16);
            check_bytes(cpu, ATTND_F16);
            attn_cpu_free(cpu);
        }
    }
}
END_TEST

START_TEST(an_engine_runs_thousands_of_launches) {
    attn_cpu *cpu = create(3, 4);
    tiny_init(&t, 16, 8);
    t.params.shape.q_heads = 4;
    t.params.shape.kv_heads = 1;
    t.params.num_splits = 4;
    for (int j = 0; j < 16; j++) {
        tiny_v(&t, j)[0] = 3;
    }
    for (int n = 0; n < 5000; n++) {
        t.row.new_len = n % 2 ? 0 : 16;
        for (int j = 0; j < 16; j++) {
            t.v_new[j][0] = 3;
        }
        t.out[7][3][0] = 0;
        ATTND_CK_OK(attn_cpu_run(cpu, &t.params, NULL, NULL));
        ck_assert_float_eq(t.out[7][3][0], 3);
    }
    attn_cpu_free(cpu);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_cpu");
    TCase *c = tcase_create("engine");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, defaults_are_enough);
    tcase_add_test(c, no_room_for_states_is_enough);
    tcase_add_test(c, scalar_is_always_there);
    tcase_add_test(c, success_leaves_the_error_alone);
    tcase_add_test(c, the_environment_forces_an_isa);
    tcase_add_test(c, isas_that_the_machine_lacks_are_refused);
    tcase_add_test(c, what_is_there_can_be_asked_for);
    tcase_add_test(c, masked_features_give_the_scalar_table);
    tcase_add_test(c, bad_options_are_refused_by_name);
    tcase_add_test(c, a_refused_launch_changes_nothing);
    tcase_add_test(c, too_many_rows_are_refused);
    tcase_add_test(c, the_choice_names_kernel_splits_and_rows);
    tcase_add_test(c, all_appends_come_before_all_reads);
    tcase_add_test(c, saturated_values_are_counted);
    tcase_add_test(c, as_many_heads_as_there_may_be_fit);
    tcase_add_test(c, every_f8e4m3_byte_is_what_it_means);
    tcase_add_test(c, an_engine_runs_thousands_of_launches);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
