// What a kernel's outputs are held against, and the peer, by the float64 reference; and that a set
// of data is what its case says.
#include "tests/load/bench_exact.h"

#include <math.h>
#include <stdio.h>

#include "tests/check_main.h"
#include "tests/load/bench_blas.h"
#include "tests/load/bench_ceil.h"
#include "tests/load/bench_set.h"

enum { SEED = 3 };

static bench_case the_case;
static bench_arena arena;
static bench_set set;

static void make(const char *text) {
    ATTND_CK_OK(bench_case_parse(&the_case, text, NULL));
    ATTND_CK_OK(bench_arena_open(&arena, bench_set_bytes(&the_case), true, NULL));
    ATTND_CK_OK(bench_set_init(&set, &the_case, &arena, 0, SEED, 2, NULL));
}

static void unmake(void) {
    bench_set_fini(&set);
    bench_arena_close(&arena);
}

// write_reference puts the float64 result, rounded, where a kernel would.
static void write_reference(double off) {
    const attn_shape *s = &set.params.shape;
    uint64_t num = set.out_bytes / attnd_dtype_bytes(s->q_dtype);
    double *out = malloc(num * sizeof(*out));
    ATTND_CK_OK(attn_reference(&set.params, out, NULL));
    for (uint64_t i = 0; i < num; i++) {
        attnd_store(set.out, s->q_dtype, i, out[i] + off);
    }
    free(out);
}

static const char *const cases[] = {
    "decode f32 4/2 head_dim 64 kv_len 100", "decode bf16 4/1 kv_len 70 block 16",
    "decode f8e4m3 4/4 kv_len 65",           "ragged f16 4/2 batch 5 kv_len 300",
    "prefill f32 4/2 q_len 20 kv_len 50",    "full bf16 4/2 batch 2 q_len 20 kv_len 50",
    "decode bf16 4/2 kv_len 65 new 1",       "prefill f16 4/2 q_len 20 kv_len 90 new 7",
};
enum { NUM_CASES = sizeof(cases) / sizeof(cases[0]) };

START_TEST(the_reference_itself_is_within_the_bound) {
    make(cases[_i]);
    bench_exact e;
    ATTND_CK_OK(bench_exact_init(&e, &set.params, 1 << 20, SEED, 2));
    ck_assert_uint_eq(e.num, 64);
    write_reference(0);
    bench_error error = bench_exact_compare(&e, &set.params);
    ck_assert_double_gt(error.bound, 0);
    ck_assert_double_le(error.max, error.bound / 2); // half a step of the type is left
    ck_assert_double_le(error.rms, error.max);
    ck_assert_double_ge(error.worst_rms, error.rms);
    ck_assert_uint_eq(error.places, 64);
    bench_exact_fini(&e);
    unmake();
}
END_TEST

START_TEST(a_shifted_result_is_as_far_off_as_the_shift) {
    make(cases[0]);
    bench_exact e;
    ATTND_CK_OK(bench_exact_init(&e, &set.params, 1 << 20, SEED, 1));
    write_reference(0.125);
    bench_error error = bench_exact_compare(&e, &set.params);
    ck_assert_double_eq_tol(error.max, 0.125, 1e-6);
    ck_assert_double_eq_tol(error.rms, 0.125, 1e-6);
    ck_assert_double_gt(error.max, error.bound);
    bench_exact_fini(&e);
    unmake();
}
END_TEST

START_TEST(an_output_that_nobody_wrote_is_wrong) {
    make(cases[1]);
    bench_exact e;
    ATTND_CK_OK(bench_exact_init(&e, &set.params, 1 << 20, SEED, 1));
    bench_error error = bench_exact_compare(&e, &set.params);
    ck_assert(isinf(error.max));
    bench_exact_fini(&e);
    unmake();
}
END_TEST

START_TEST(a_small_budget_still_has_two_places) {
    make(cases[0]);
    bench_exact e;
    ATTND_CK_OK(bench_exact_init(&e, &set.params, 1, SEED, 1));
    ck_assert_uint_eq(e.num, 2);
    bench_exact_fini(&e);
    unmake();
}
END_TEST

START_TEST(the_library_takes_every_set) {
    make(cases[_i]);
    attn_cpu *cpu = NULL;
    attn_cpu_opts opts = {.num_threads = 1, .isa = "scalar"};
    ATTND_CK_OK(attn_cpu_create(&cpu, &opts, NULL));
    ATTND_CK_OK(attn_cpu_run(cpu, &set.launch, NULL, NULL));
    bench_exact e;
    ATTND_CK_OK(bench_exact_init(&e, &set.params, 1 << 20, SEED, 2));
    bench_error error = bench_exact_compare(&e, &set.params);
    ck_assert_double_le(error.max, error.bound);
    bench_exact_fini(&e);
    attn_cpu_free(cpu);
    unmake();
}
END_TEST

// Runs end at multiples of 256 bytes, so they may hold a little more than the live bytes.
START_TEST(runs_hold_the_live_bytes_of_the_pool) {
    make("ragged bf16 4/2 batch 5 kv_len 1000");
    uint64_t sum = 0;
    const char *pool = set.params.pool;
    for (uint64_t i = 0; i < set.num_runs; i++) {
        ck_assert_uint_eq(set.runs[i].bytes % BENCH_RUN_ALIGN, 0);
        ck_assert(set.runs[i].at >= pool);
        ck_assert(set.runs[i].at + set.runs[i].bytes <= pool + set.params.pool_bytes);
        sum += set.runs[i].bytes;
    }
    ck_assert_uint_ge(sum, bench_case_kv_bytes(&the_case));
    ck_assert_uint_le(sum, bench_case_kv_bytes(&the_case) + 5 * 4 * BENCH_RUN_ALIGN);
    unmake();
}
END_TEST

START_TEST(a_shifted_launch_has_every_pointer_shifted) {
    ATTND_CK_OK(bench_case_parse(&the_case, cases[2], NULL));
    ATTND_CK_OK(bench_arena_open(&arena, bench_set_bytes(&the_case), false, NULL));
    ATTND_CK_OK(bench_set_init(&set, &the_case, &arena, 4096, SEED, 1, NULL));
    const attn_row *host = &set.params.rows[0];
    const attn_row *device = &set.launch.rows[0];
    ck_assert_int_eq((char *)set.launch.pool - (char *)set.params.pool, 4096);
    ck_assert_int_eq((const char *)device->q - (const char *)host->q, 4096);
    ck_assert_int_eq((char *)device->out - (char *)host->out, 4096);
    ck_assert_int_eq((const char *)device->table - (const char *)host->table, 4096);
    ck_assert_int_eq((const char *)device->k_scale - (const char *)host->k_scale, 4096);
    ck_assert_int_eq((const char *)device->v_scale - (const char *)host->v_scale, 4096);
    unmake();
}
END_TEST

START_TEST(appended_tokens_are_shifted_too) {
    ATTND_CK_OK(bench_case_parse(&the_case, "decode f32 4/2 batch 2 kv_len 9 new 1", NULL));
    ATTND_CK_OK(bench_arena_open(&arena, bench_set_bytes(&the_case), false, NULL));
    ATTND_CK_OK(bench_set_init(&set, &the_case, &arena, 4096, SEED, 1, NULL));
    for (int i = 0; i < 2; i++) {
        const attn_row *host = &set.params.rows[i];
        const attn_row *device = &set.launch.rows[i];
        ck_assert_int_eq(host->new_len, 1);
        ck_assert_int_eq((const char *)device->k_new - (const char *)host->k_new, 4096);
        ck_assert_int_eq((const char *)device->v_new - (const char *)host->v_new, 4096);
        ck_assert_int_eq((const char *)device->rope->inv_freq - (const char *)host->rope->inv_freq,
                         4096);
    }
    ck_assert_int_eq((const char *)set.params.rows[1].k_new -
                         (const char *)set.params.rows[0].k_new,
                     2 * 128 * 4); // a token of 2 heads
    unmake();
}
END_TEST

START_TEST(a_softmax_is_that_of_float64) {
    float x[32] = {0}; // room for whole sixteens
    double want[19], sum = 0;
    for (int i = 0; i < 19; i++) {
        x[i] = (float)((i * 7) % 11) - 4.5f;
        want[i] = exp2(0.75 * (double)x[i]);
        sum += want[i];
    }
    bench_blas_softmax(x, 19, 0.75f);
    for (int i = 0; i < 19; i++) {
        ck_assert_double_eq_tol((double)x[i], want[i] / sum, 3e-6 * want[i] / sum + 1e-9);
    }
}
END_TEST

// The peer computes the same thing, whatever its block.
START_TEST(the_peer_is_right) {
    enum { TOKENS = 37, Q_HEADS = 4, KV_HEADS = 2, DIM = 16 };
    if (!bench_blas_open()) {
        printf("no OpenBLAS: the peer is not tested\n");
        return;
    }
    // One block holds all tokens, so K and V of a head are contiguous, as the peer takes them.
    make("prefill f32 4/2 head_dim 16 block 37 q_len 37");
    static float out[TOKENS * Q_HEADS * DIM];
    static double want[TOKENS * Q_HEADS * DIM];
    const float *k = set.params.pool;
    ATTND_CK_OK(attn_reference(&set.params, want, NULL));
    for (int32_t block = 5; block <= 64; block += 59) {
        bench_blas_case c = {.q = set.params.rows[0].q,
                             .k = k,
                             .v = k + KV_HEADS * TOKENS * DIM,
                             .out = out,
                             .tokens = TOKENS,
                             .q_heads = Q_HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .block = block};
        ck_assert_uint_eq(set.params.rows[0].table[0], 0);
        bench_blas_prefill(&c, 2);
        for (int i = 0; i < TOKENS * Q_HEADS * DIM; i++) {
            ck_assert_double_eq_tol((double)out[i], want[i], 1e-5);
        }
    }
    unmake();
}
END_TEST

START_TEST(the_peer_s_decode_is_right) {
    if (!bench_blas_open()) {
        printf("no OpenBLAS: the peer is not tested\n");
        return;
    }
    make("decode f32 4/2 head_dim 16 block 37 kv_len 37");
    static float out[4 * 16];
    static double want[4 * 16];
    const float *k = set.params.pool;
    bench_blas_case c = {.q = set.params.rows[0].q,
                         .k = k,
                         .v = k + 2 * 37 * 16,
                         .out = out,
                         .tokens = 37,
                         .q_heads = 4,
                         .kv_heads = 2,
                         .head_dim = 16};
    ATTND_CK_OK(attn_reference(&set.params, want, NULL));
    bench_blas_decode(&c, 2);
    for (int i = 0; i < 4 * 16; i++) {
        ck_assert_double_eq_tol((double)out[i], want[i], 1e-5);
    }
    unmake();
}
END_TEST

START_TEST(a_ceiling_is_found_by_name) {
    ck_assert_str_eq(bench_ceil_find("scalar")->isa, "scalar");
    ck_assert_ptr_null(bench_ceil_find("abacus"));
    ck_assert_ptr_nonnull(bench_ceil_find(NULL));
}
END_TEST

// Every distance reads every byte once: the sum of the words tells.
START_TEST(a_read_leaves_nothing_out) {
    enum { RUNS = 5 };
    static _Alignas(256) int32_t memory[RUNS * 256];
    bench_run runs[RUNS];
    const bench_ceil_ops *ops = bench_ceil_find(NULL);
    for (int i = 0; i < RUNS * 256; i++) {
        memory[i] = 1 << (i % 16);
    }
    memory[RUNS * 256 - 1] ^= 1 << 20; // the exclusive or of all words is this, and 2^20 exact
    int32_t all = 0;
    for (int i = 0; i < RUNS * 256; i++) {
        all ^= memory[i];
    }
    for (int i = 0; i < RUNS; i++) {
        runs[i] = (bench_run){(const char *)(memory + ((i * 3) % RUNS) * 256), 1024};
    }
    for (uint32_t way = 0; way < BENCH_CEIL_AHEADS; way++) {
        ck_assert_float_eq(ops->read(runs, RUNS, bench_ceil_ahead(way)), (float)all);
    }
    ck_assert_int_eq(all, 1 << 20);
    ck_assert_double_gt(bench_ceil_read(ops, runs, RUNS, 2048, 3), 0);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_exact");
    TCase *c = tcase_create("exact");
    tcase_set_timeout(c, 60); // each test makes its tables of random values anew
    tcase_add_loop_test(c, the_reference_itself_is_within_the_bound, 0, NUM_CASES);
    tcase_add_test(c, a_shifted_result_is_as_far_off_as_the_shift);
    tcase_add_test(c, an_output_that_nobody_wrote_is_wrong);
    tcase_add_test(c, a_small_budget_still_has_two_places);
    tcase_add_loop_test(c, the_library_takes_every_set, 0, NUM_CASES);
    tcase_add_test(c, runs_hold_the_live_bytes_of_the_pool);
    tcase_add_test(c, a_shifted_launch_has_every_pointer_shifted);
    tcase_add_test(c, appended_tokens_are_shifted_too);
    suite_add_tcase(s, c);
    c = tcase_create("peers and ceilings");
    tcase_add_test(c, a_softmax_is_that_of_float64);
    tcase_add_test(c, the_peer_is_right);
    tcase_add_test(c, the_peer_s_decode_is_right);
    tcase_add_test(c, a_ceiling_is_found_by_name);
    tcase_add_test(c, a_read_leaves_nothing_out);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
