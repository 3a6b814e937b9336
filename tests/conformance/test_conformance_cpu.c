// The CPU kernels of every instruction set of this machine against the float64 reference: storage
// types x features x shapes, in automatic, forced and deterministic splits, on 1, 2 and 3 threads.
//
// The random launches are always the same ones; ATTND_CONFORMANCE=long adds long sequences and more
// random launches, other ones each time, and ATTND_SEED=n repeats those of a run that printed n;
// ATTND_CONFORMANCE=short takes every fact on fewer launches, for an emulated processor.
// ATTND_CPU=name tests that instruction set alone.
// New launches now and then miss the bound of a sequence that has few outputs: the plain run that
// the bound comes from may be lucky there, by a tenth or so.
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "attention/cpu/attn_cpu_ops.h"
#include "tests/check_main.h"
#include "tests/conformance/conf_oracle.h"
#include "tests/conformance/conf_plain.h"

enum { MAX_THREADS = 3, NUM_ISAS = 5, MAX_ROWS = 1024 };

static const char *const isas[NUM_ISAS] = {"scalar", "avx2", "avx512", "avx512_bf16", "neon"};
static attn_cpu *engines[NUM_ISAS][MAX_THREADS]; // NULL: not on this machine
static conf_launch launch;
static uint64_t first_seed;

// A pair of storage types.
typedef struct types {
    attnd_dtype q, kv;
} types;

enum { NUM_TYPES = 5 };
static const types all_types[NUM_TYPES] = {{ATTND_F32, ATTND_F32},
                                           {ATTND_BF16, ATTND_BF16},
                                           {ATTND_F16, ATTND_F16},
                                           {ATTND_BF16, ATTND_F8E4M3},
                                           {ATTND_F16, ATTND_F8E4M3}};

static bool is_mode(const char *name) {
    const char *mode = getenv("ATTND_CONFORMANCE");
    return mode && strcmp(mode, name) == 0;
}

static bool is_long(void) {
    return is_mode("long");
}

static bool is_short(void) {
    return is_mode("short");
}

// is_wanted says whether ATTND_CPU leaves an instruction set in.
static bool is_wanted(const char *isa) {
    const char *only = getenv("ATTND_CPU");
    return !only || strcmp(only, isa) == 0;
}

static void open_engines(void) {
    for (int i = 0; i < NUM_ISAS; i++) {
        for (int t = 0; t < MAX_THREADS && is_wanted(isas[i]); t++) {
            attn_cpu_opts opts = {.num_threads = t + 1, .max_rows = MAX_ROWS, .isa = isas[i]};
            attnd_err err = attn_cpu_create(&engines[i][t], &opts, NULL);
            ck_assert(err == ATTND_OK || (err == ATTND_ENOTSUP && i > 0));
        }
    }
}

static void close_engines(void) {
    for (int i = 0; i < NUM_ISAS; i++) {
        for (int t = 0; t < MAX_THREADS; t++) {
            attn_cpu_free(engines[i][t]);
            engines[i][t] = NULL;
        }
    }
}

// outputs is a copy of what a launch wrote.
typedef struct outputs {
    unsigned char *bytes;
    size_t num;
} outputs;

static outputs copy_outputs(const conf_launch *l) {
    outputs o = {0};
    for (uint32_t i = 0; i < l->spec.num_rows; i++) {
        o.num += l->out_bytes[i] + l->lse_bytes[i];
    }
    o.bytes = malloc(o.num + 1);
    size_t at = 0;
    for (uint32_t i = 0; i < l->spec.num_rows; i++) {
        const attn_row *row = &l->rows[conf_launch_row(l, i)];
        if (row->out) {
            memcpy(o.bytes + at, row->out, l->out_bytes[i]);
            at += l->out_bytes[i];
        }
        if (row->lse) {
            memcpy(o.bytes + at, row->lse, l->lse_bytes[i]);
            at += l->lse_bytes[i];
        }
    }
    o.num = at;
    return o;
}

static void run(attn_cpu *cpu, conf_launch *l, int32_t num_splits, bool deterministic) {
    conf_launch_reset(l);
    l->params.num_splits = num_splits;
    l->params.deterministic = deterministic;
    attnd_errinfo info = {0};
    attn_choice choice;
    attnd_err err = attn_cpu_run(cpu, &l->params, &choice, &info);
    ck_assert_msg(err == ATTND_OK, "%s %s: %s", attnd_errname(err), info.field, info.text);
}

static void check(const conf_oracle *o, conf_launch *l, const char *isa, const char *mode) {
    const char *wrong = conf_oracle_check(o, l);
    if (wrong) {
        ck_abort_msg("%s, %s: %s: %s", isa, mode, wrong, conf_text(&l->spec));
    }
}

// check_isa runs the launch in every mode on one instruction set.
static void check_isa(const conf_oracle *o, conf_launch *l, int isa) {
    run(engines[isa][1], l, 0, false);
    check(o, l, isas[isa], "splits by the plan, 2 threads");
    int32_t forced = 1 + (int32_t)(l->spec.seed % ATTN_MAX_SPLITS);
    run(engines[isa][1], l, forced, false);
    check(o, l, isas[isa], "forced splits, 2 threads");
    run(engines[isa][0], l, 0, true);
    check(o, l, isas[isa], "deterministic, 1 thread");
    outputs one = copy_outputs(l);
    for (int t = 1; t < MAX_THREADS; t++) {
        run(engines[isa][t], l, 0, true);
        outputs more = copy_outputs(l);
        bool is_same = memcmp(one.bytes, more.bytes, one.num) == 0;
        free(more.bytes);
        if (!is_same) {
            ck_abort_msg("%s: other bits on %d threads: %s", isas[isa], t + 1, conf_text(&l->spec));
        }
    }
    free(one.bytes);
}

static void check_spec(const conf_spec *spec) {
    conf_oracle oracle;
    conf_launch_init(&launch, spec);
    conf_oracle_init(&oracle, &launch);
    for (int i = 0; i < NUM_ISAS; i++) {
        if (engines[i][0]) {
            check_isa(&oracle, &launch, i);
        }
    }
    conf_oracle_fini(&oracle);
    conf_launch_fini(&launch);
}

// base is a plain launch: one decode, one speculative step, one prefill.
static conf_spec base(types t, uint64_t seed) {
    return (conf_spec){.q_dtype = t.q,
                       .kv_dtype = t.kv,
                       .q_heads = 4,
                       .kv_heads = 2,
                       .head_dim = 64,
                       .v_head_dim = 64,
                       .block_tokens = 16,
                       .features = CONF_CAUSAL,
                       .logit = 1,
                       .seed = seed,
                       .num_rows = 3,
                       .rows = {{77, 1, 1, 0, 1}, {50, 5, 5, 0, 5}, {40, 33, 20, 0, 33}}};
}

// Three keys of equal logits, values -1, 1 + 2^-12 and 0: a third is 11184811 * 2^-25 in float32,
// so the second product is that and 2730.67 * 2^-25 more, of which rounding makes 2731.
START_TEST(the_run_that_bounds_come_from_is_not_fused) {
    enum { DIM = 8, KEYS = 3 };
    float q[DIM] = {0}, out[DIM], pool[2 * KEYS * DIM] = {0};
    const uint32_t table[1] = {0};
    double plain[DIM], lse;
    attn_row row = {.q = q,
                    .out = out, // not written
                    .table = table,
                    .stride_q_token = DIM,
                    .stride_q_head = DIM,
                    .v_offset = KEYS * DIM * sizeof(float),
                    .kv_len = KEYS,
                    .q_len = 1,
                    .q_count = 1,
                    .window_left = -1,
                    .window_right = -1};
    attn_params p = {.shape = {.q_dtype = ATTND_F32,
                               .kv_dtype = ATTND_F32,
                               .q_heads = 1,
                               .kv_heads = 1,
                               .head_dim = DIM,
                               .v_head_dim = DIM,
                               .block_tokens = KEYS,
                               .stride_k_token = DIM,
                               .stride_k_head = KEYS * DIM,
                               .stride_v_token = DIM,
                               .stride_v_head = KEYS * DIM,
                               .block_stride = sizeof(pool)},
                     .pool = pool,
                     .pool_bytes = sizeof(pool),
                     .num_blocks = 1,
                     .rows = &row,
                     .num_rows = 1};
    pool[KEYS * DIM] = -1;
    pool[(KEYS + 1) * DIM] = 1 + 0x1p-12f;
    conf_plain(&p, CONF_ASCENDING, plain, &lse);
    ck_assert(plain[0] == 2731 * 0x1p-25);
}
END_TEST

START_TEST(plain_launches_match_the_reference) {
    conf_spec spec = base(all_types[_i], 1);
    check_spec(&spec);
}
END_TEST

// Every multiple of 8; V's runs the other way in every second type.
START_TEST(every_head_dim_matches_the_reference) {
    for (int32_t dim = 8; dim <= ATTN_MAX_HEAD_DIM; dim += is_short() ? 72 : 8) {
        conf_spec spec = base(all_types[_i], (uint64_t)dim);
        spec.head_dim = dim;
        spec.v_head_dim = _i % 2 ? ATTN_MAX_HEAD_DIM + 8 - dim : dim;
        spec.rows[0] = (conf_row){67, 1, 1, 0, 1};
        spec.rows[1] = (conf_row){19, 11, 4, 0, 11};
        spec.num_rows = 2;
        check_spec(&spec);
    }
}
END_TEST

static const int32_t ratios[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64};
enum { NUM_RATIOS = sizeof(ratios) / sizeof(ratios[0]) };

START_TEST(every_gqa_ratio_matches_the_reference) {
    for (int i = is_short() ? _i : 0; i < NUM_RATIOS; i += is_short() ? NUM_TYPES : 1) {
        conf_spec spec = base(all_types[_i], (uint64_t)i);
        spec.kv_heads = 1 + i % 3;
        spec.q_heads = spec.kv_heads * ratios[i];
        spec.head_dim = spec.v_head_dim = 32;
        spec.rows[0] = (conf_row){130, 1, 1, 0, 1};
        spec.rows[1] = (conf_row){70, 7, 7, 0, 7};
        spec.rows[2] = (conf_row){21, 13, 13, 0, 13};
        check_spec(&spec);
    }
}
END_TEST

// One token has more query rows than a task takes.
START_TEST(the_largest_group_matches_the_reference) {
    conf_spec spec = base(all_types[_i], 3);
    spec.kv_heads = 1;
    spec.q_heads = ATTN_MAX_Q_HEADS;
    spec.head_dim = spec.v_head_dim = 8;
    spec.num_rows = 2;
    spec.rows[0] = (conf_row){70, 1, 1, 0, 1};
    spec.rows[1] = (conf_row){20, 3, 3, 1, 2};
    check_spec(&spec);
}
END_TEST

static const int32_t lengths[] = {0,  1,  2,   15,  16,  17,   31,   33,  63,
                                  64, 65, 127, 128, 255, 1023, 1024, 1025};
static const int32_t blocks[] = {1, 7, 16, 64, 1100};
enum {
    NUM_LENGTHS = sizeof(lengths) / sizeof(lengths[0]),
    NUM_BLOCKS = sizeof(blocks) / sizeof(blocks[0]),
};

// Block edges, steps, splits; blocks of one token and one block for all.
START_TEST(every_length_matches_the_reference) {
    for (int i = is_short() ? _i : 0; i < NUM_LENGTHS; i += is_short() ? NUM_BLOCKS : 1) {
        int32_t kv_len = lengths[i];
        conf_spec spec = base(all_types[(i + _i) % NUM_TYPES], (uint64_t)i);
        spec.block_tokens = blocks[_i];
        spec.head_dim = spec.v_head_dim = 16;
        spec.features = i % 2 ? (uint32_t)CONF_CAUSAL : 0;
        spec.num_rows = 5;
        spec.rows[0] = (conf_row){kv_len, 1, kv_len > 0, 0, 1};
        spec.rows[1] = (conf_row){kv_len, 8, kv_len / 2, 0, 8};
        spec.rows[2] = (conf_row){kv_len, 17, 0, 0, 17};
        spec.rows[3] = (conf_row){kv_len, 0, kv_len, 0, 0};
        spec.rows[4] = (conf_row){kv_len, 40, 0, 23, 9};
        check_spec(&spec);
    }
}
END_TEST

enum { NUM_FEATURES = 15 };

// Each feature with each other, and alone on the diagonal.
START_TEST(every_pair_of_features_matches_the_reference) {
    for (int other = is_short() ? _i : 0; other <= _i; other++) {
        conf_spec spec =
            base(all_types[(_i + other) % NUM_TYPES], (uint64_t)_i * 64 + (uint64_t)other);
        spec.features = 1u << _i | 1u << other;
        if (spec.features & (CONF_ROPE_INTERLEAVED | CONF_POSITIONS)) {
            spec.features |= CONF_ROPE;
        }
        check_spec(&spec);
    }
}
END_TEST

static const double logits[] = {1e-4, 1e-2, 1, 30, 1e3, 1e5};
enum { NUM_LOGITS = sizeof(logits) / sizeof(logits[0]), NUM_SMALL_LOGITS = 4 };

// Random logits of 1e3 have one key win nearly always, and then whose rounding is worse is luck.
START_TEST(every_size_of_logits_matches_the_reference) {
    static const uint32_t features[] = {0, CONF_SOFTCAP, CONF_ALIBI | CONF_SINKS,
                                        CONF_SOFTCAP | CONF_ALIBI | CONF_ROPE};
    for (int f = is_short() ? _i % 4 : 0; f < 4; f += is_short() ? 4 : 1) {
        conf_spec spec = base(all_types[_i / NUM_LOGITS], (uint64_t)_i * 4 + (uint64_t)f);
        spec.logit = logits[_i % NUM_LOGITS];
        spec.has_twins = _i % NUM_LOGITS >= NUM_SMALL_LOGITS;
        spec.features = CONF_CAUSAL | features[f];
        spec.q_heads = 16;
        spec.rows[0] = (conf_row){300, 1, 0, 0, 1};
        spec.rows[1] = (conf_row){50, 5, 0, 0, 5};
        spec.rows[2] = (conf_row){40, 12, 0, 0, 12};
        check_spec(&spec);
    }
}
END_TEST

static int32_t pick(uint64_t *state, const int32_t *list, int32_t num) {
    return list[conf_below(state, num)];
}

static conf_row random_row(uint64_t *state, int32_t block_tokens) {
    const int32_t kv[] = {
        0,  1,  block_tokens - 1,       block_tokens,           block_tokens + 1,
        64, 65, conf_below(state, 200), conf_below(state, 200), conf_below(state, 1200)};
    const int32_t q[] = {0, 1, 1, 1, 2, 5, 8, 9, 33, conf_below(state, 80)};
    conf_row row = {.kv_len = pick(state, kv, 10), .q_len = pick(state, q, 10)};
    row.new_len = conf_below(state, row.kv_len + 1);
    if (conf_below(state, 2) && row.q_len <= row.kv_len) {
        row.new_len = row.q_len;
    }
    row.q_count = row.q_len;
    if (row.q_len > 0 && conf_below(state, 4) == 0) {
        row.q_first = conf_below(state, row.q_len);
        row.q_count = conf_below(state, row.q_len - row.q_first + 1);
    }
    return row;
}

static conf_spec random_spec(uint64_t seed) {
    static const int32_t block_tokens[] = {1, 3, 16, 16, 24, 64, 128, 400};
    static const uint32_t some[] = {0, CONF_CAUSAL, ~0u};
    uint64_t state = seed;
    conf_spec spec = base(all_types[conf_below(&state, NUM_TYPES)], seed);
    spec.kv_heads = 1 + conf_below(&state, 3);
    spec.q_heads = spec.kv_heads * pick(&state, ratios, NUM_RATIOS - 1);
    spec.head_dim = 8 * (1 + conf_below(&state, conf_below(&state, 4) ? 16 : 32));
    spec.v_head_dim = conf_below(&state, 2) ? spec.head_dim : 8 * (1 + conf_below(&state, 32));
    spec.block_tokens = pick(&state, block_tokens, 8);
    spec.logit = logits[conf_below(&state, NUM_SMALL_LOGITS)];
    uint32_t often = (uint32_t)conf_random(&state);
    uint32_t rarely = often & (uint32_t)conf_random(&state);
    spec.features = (rarely | some[conf_below(&state, 2)]) & CONF_ALL_FEATURES;
    spec.num_rows = (uint32_t)(1 + conf_below(&state, 4));
    spec.placement = conf_random(&state);
    for (uint32_t i = 0; i < spec.num_rows; i++) {
        spec.rows[i] = random_row(&state, spec.block_tokens);
    }
    return spec;
}

// Sanitizers make a launch many times slower, and find in a fifth of them what they find.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { NUM_RANDOM_TESTS = 16, LAUNCHES_PER_TEST = 2 };
#else
enum { NUM_RANDOM_TESTS = 16, LAUNCHES_PER_TEST = 10 };
#endif

START_TEST(random_launches_match_the_reference) {
    int num = is_short() ? 1 : LAUNCHES_PER_TEST * (is_long() ? 20 : 1);
    for (int i = 0; i < num; i++) {
        conf_spec spec = random_spec(first_seed + (uint64_t)_i * (uint64_t)num + (uint64_t)i);
        check_spec(&spec);
    }
}
END_TEST

// Long enough that deterministic mode has several splits.
START_TEST(long_sequences_match_the_reference) {
    static const int32_t some[] = {2047, 3000, 5000};
    static const int32_t more[] = {16384, 32768, 131072};
    for (int i = 0; i < (is_short() ? 1 : 3); i++) {
        conf_spec spec = base(all_types[_i], (uint64_t)i);
        int32_t kv_len = is_short() ? 1100 : is_long() ? more[i] : some[i];
        spec.q_heads = 2;
        spec.kv_heads = 1;
        spec.head_dim = spec.v_head_dim = 64;
        spec.num_rows = 2;
        spec.rows[0] = (conf_row){kv_len, 1, 1, 0, 1};
        spec.rows[1] = (conf_row){kv_len, 20, 20, 0, 20};
        check_spec(&spec);
    }
}
END_TEST

// ragged is a batch of many sequences with empty ones among them.
static conf_spec ragged(types t) {
    conf_spec spec = base(t, 99);
    uint64_t state = 7;
    spec.head_dim = spec.v_head_dim = 32;
    spec.features = CONF_CAUSAL | CONF_ROPE | CONF_SINKS;
    spec.num_rows = is_short() ? 28 : 128;
    for (uint32_t i = 0; i < spec.num_rows; i++) {
        int32_t kv_len = i % 9 == 8 ? 0 : 1 + conf_below(&state, i % 16 == 3 ? 2100 : 90);
        int32_t q_len = i % 7 == 0 ? 12 : 1;
        spec.rows[i] = (conf_row){kv_len, q_len, kv_len > 0, 0, q_len};
    }
    return spec;
}

START_TEST(a_ragged_batch_matches_the_reference) {
    conf_spec spec = ragged(all_types[_i]);
    check_spec(&spec);
}
END_TEST

// run_bits runs a spec in deterministic mode and returns its outputs by row of the spec.
static outputs run_bits(const conf_spec *spec, int isa) {
    conf_launch_init(&launch, spec);
    run(engines[isa][1], &launch, 0, true);
    outputs o = copy_outputs(&launch);
    conf_launch_fini(&launch);
    return o;
}

static void check_same_bits(const conf_spec *a, const conf_spec *b, const char *what) {
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        if (engines[isa][0]) {
            outputs first = run_bits(a, isa);
            outputs second = run_bits(b, isa);
            bool is_same =
                first.num == second.num && memcmp(first.bytes, second.bytes, first.num) == 0;
            free(first.bytes);
            free(second.bytes);
            ck_assert_msg(is_same, "%s: %s changes the bits", isas[isa], what);
        }
    }
}

START_TEST(the_order_of_a_batch_changes_nothing) {
    conf_spec spec = ragged(all_types[_i]);
    conf_spec other = spec;
    other.is_reversed = true;
    check_same_bits(&spec, &other, "the order of the batch");
}
END_TEST

START_TEST(the_place_of_blocks_changes_nothing) {
    conf_spec spec = ragged(all_types[_i]);
    conf_spec other = spec;
    other.placement = 12345;
    check_same_bits(&spec, &other, "the block table");
}
END_TEST

START_TEST(batch_mates_change_nothing) {
    conf_spec spec = ragged(all_types[_i]);
    uint32_t num_rows = spec.num_rows;
    spec.num_rows = 20; // content follows from the seed and the row alone
    outputs few[NUM_ISAS] = {0};
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        few[isa] = engines[isa][0] ? run_bits(&spec, isa) : few[isa];
    }
    spec.num_rows = num_rows;
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        if (engines[isa][0]) {
            outputs all = run_bits(&spec, isa);
            ck_assert_msg(memcmp(few[isa].bytes, all.bytes, few[isa].num) == 0, "%s", isas[isa]);
            free(all.bytes);
        }
        free(few[isa].bytes);
    }
}
END_TEST

// The rows of a chunk have the bits that they have in one launch of all.
START_TEST(chunks_change_nothing) {
    conf_spec spec = base(all_types[_i], 5);
    spec.features = CONF_CAUSAL | CONF_ROPE | CONF_BLOCK_MASK;
    spec.num_rows = 1;
    spec.rows[0] = (conf_row){1500, 300, 300, 0, 300};
    static conf_launch chunked;
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        if (!engines[isa][0]) {
            continue;
        }
        conf_launch_init(&launch, &spec);
        run(engines[isa][1], &launch, 0, true);
        conf_launch_init(&chunked, &spec);
        conf_launch_reset(&chunked);
        chunked.params.deterministic = true;
        for (int32_t first = 0; first < 300; first += 77) {
            chunked.rows[0].q_first = first;
            chunked.rows[0].q_count = 300 - first < 77 ? 300 - first : 77;
            ATTND_CK_OK(attn_cpu_run(engines[isa][2], &chunked.params, NULL, NULL));
            chunked.rows[0].new_len = 0; // the first chunk has appended for all
        }
        outputs whole = copy_outputs(&launch);
        outputs parts = copy_outputs(&chunked);
        ck_assert_msg(memcmp(whole.bytes, parts.bytes, whole.num) == 0, "%s", isas[isa]);
        free(whole.bytes);
        free(parts.bytes);
        conf_launch_fini(&chunked);
        conf_launch_fini(&launch);
    }
}
END_TEST

// An engine without room for states folds every row: slower, but the same bits.
START_TEST(room_for_states_changes_nothing) {
    conf_spec spec = ragged(all_types[_i]);
    spec.rows[5].kv_len = 5000;
    conf_launch_init(&launch, &spec);
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        if (!engines[isa][0]) {
            continue;
        }
        attn_cpu *small = NULL;
        attn_cpu_opts opts = {
            .num_threads = 2, .max_rows = 256, .scratch_bytes = 8 << 20, .isa = isas[isa]};
        ATTND_CK_OK(attn_cpu_create(&small, &opts, NULL));
        for (int32_t splits = 0; splits <= 7; splits += 7) {
            run(engines[isa][1], &launch, splits, splits == 0);
            outputs spread = copy_outputs(&launch);
            run(small, &launch, splits, splits == 0);
            outputs folded = copy_outputs(&launch);
            ck_assert_msg(memcmp(spread.bytes, folded.bytes, spread.num) == 0, "%s", isas[isa]);
            free(spread.bytes);
            free(folded.bytes);
        }
        attn_cpu_free(small);
    }
    conf_launch_fini(&launch);
}
END_TEST

// Blocks that the mask hides from all queries lie on inaccessible pages.
START_TEST(hidden_blocks_are_never_read) {
    conf_spec spec = base(all_types[_i], 17);
    spec.features = CONF_BLOCK_MASK;
    spec.head_dim = spec.v_head_dim = 256; // a block is a multiple of a page in every type
    spec.num_rows = 1;
    spec.rows[0] = (conf_row){330, 19, 0, 0, 19};
    static const uint32_t start[] = {0, 3, 5};
    static const uint32_t seen[] = {0, 7, 20, 2, 7};
    const attn_block_mask mask = {.start = start, .kv_blocks = seen, .q_block = 16};
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        if (!engines[isa][0]) {
            continue;
        }
        conf_launch_init(&launch, &spec);
        launch.rows[0].block_mask = &mask;
        uint64_t size = launch.params.shape.block_stride;
        for (uint32_t b = 0; b < 21; b++) {
            bool is_seen = b == 0 || b == 2 || b == 7 || b == 20;
            char *block = (char *)launch.params.pool + launch.rows[0].table[b] * size;
            ck_assert_int_eq(mprotect(block, size, is_seen ? PROT_READ : PROT_NONE), 0);
        }
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            launch.params.deterministic = deterministic;
            ATTND_CK_OK(attn_cpu_run(engines[isa][1], &launch.params, NULL, NULL));
        }
        conf_launch_fini(&launch);
    }
}
END_TEST

static bool row_is_nan(const conf_launch *l, uint32_t r) {
    const attn_row *row = &l->params.rows[r];
    return isnan(attnd_load(row->out, l->spec.q_dtype, 0));
}

// NaN in what a row sees comes out; its neighbours in the batch do not notice.
START_TEST(a_nan_in_live_data_stays_in_its_row) {
    conf_spec spec = base(all_types[_i], 23);
    spec.num_rows = 2;
    spec.rows[0] = (conf_row){100, 1, 0, 0, 1};
    spec.rows[1] = (conf_row){100, 1, 0, 0, 1};
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        if (!engines[isa][0]) {
            continue;
        }
        for (int where = 0; where < 2; where++) {
            conf_launch_init(&launch, &spec);
            char *block = (char *)launch.params.pool +
                          launch.rows[0].table[3] * launch.params.shape.block_stride;
            uint64_t offset = where == 0 ? launch.rows[0].k_offset : launch.rows[0].v_offset;
            memset(block + offset, 0xff, attnd_dtype_bytes(spec.kv_dtype)); // head 0, dim 0
            ATTND_CK_OK(attn_cpu_run(engines[isa][1], &launch.params, NULL, NULL));
            ck_assert_msg(row_is_nan(&launch, 0), "%s", isas[isa]);
            ck_assert_msg(!row_is_nan(&launch, 1), "%s", isas[isa]);
            conf_launch_fini(&launch);
        }
    }
}
END_TEST

// More rows than a launch takes are refused whole, and come out right in several launches.
START_TEST(seventy_thousand_rows_run_in_several_launches) {
    enum { NUM = 70000 };
    conf_spec spec = base(all_types[1], 31);
    spec.head_dim = spec.v_head_dim = 8;
    spec.num_rows = 1;
    spec.rows[0] = (conf_row){20, 1, 0, 0, 1};
    attn_row *rows = calloc(NUM, sizeof(*rows));
    int64_t width = (int64_t)spec.q_heads * (spec.v_head_dim + 8);
    uint16_t *out = calloc(NUM, (size_t)width * sizeof(*out));
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        if (!engines[isa][0]) {
            continue;
        }
        conf_launch_init(&launch, &spec);
        run(engines[isa][1], &launch, 0, false);
        attn_params p = launch.params;
        for (int64_t i = 0; i < NUM; i++) {
            rows[i] = launch.rows[0];
            rows[i].out = out + i * width;
            rows[i].lse = NULL;
        }
        p.rows = rows;
        p.num_rows = NUM;
        ATTND_CK_ERR(attn_cpu_run(engines[isa][1], &p, NULL, NULL), ATTND_EMSGSIZE);
        ck_assert_uint_eq(out[0], 0);
        for (uint32_t first = 0; first < NUM; first += MAX_ROWS) {
            p.rows = rows + first;
            p.num_rows = NUM - first < MAX_ROWS ? NUM - first : MAX_ROWS;
            ATTND_CK_OK(attn_cpu_run(engines[isa][1], &p, NULL, NULL));
        }
        const uint16_t *want = launch.rows[0].out;
        for (int64_t i = 0; i < NUM; i++) {
            for (int32_t h = 0; h < spec.q_heads; h++) {
                int64_t at = (int64_t)h * (spec.v_head_dim + 8);
                ck_assert_mem_eq(out + i * width + at, want + at, 16);
            }
        }
        memset(out, 0, NUM * (size_t)width * sizeof(*out));
        conf_launch_fini(&launch);
    }
    free(rows);
    free(out);
}
END_TEST

// A sequence computed in two parts as partial states and merged with sinks is the sequence whole.
START_TEST(merged_partial_states_are_the_whole) {
    conf_spec spec = base(all_types[0], 41);
    spec.features = CONF_SINKS;
    spec.num_rows = 1;
    spec.rows[0] = (conf_row){100, 2, 0, 0, 2};
    conf_oracle oracle;
    conf_launch_init(&launch, &spec);
    conf_oracle_init(&oracle, &launch);
    attn_row whole = launch.rows[0];
    int32_t q_heads = spec.q_heads;
    int32_t dim = spec.v_head_dim;
    for (int isa = 0; isa < NUM_ISAS; isa++) {
        if (!engines[isa][0]) {
            continue;
        }
        float out[3][2 * 4 * 64];
        float lse[3][2 * 4];
        for (int part = 0; part < 2; part++) {
            attn_row *row = &launch.rows[0];
            *row = whole;
            row->flags = ATTN_PARTIAL;
            row->table += part == 0 ? 0 : 3;
            row->kv_len = part == 0 ? 48 : 52;
            row->out = out[part];
            row->lse = lse[part];
            row->stride_out_token = (int64_t)q_heads * dim;
            row->stride_out_head = dim;
            row->stride_lse_head = 2;
            ATTND_CK_OK(attn_cpu_run(engines[isa][1], &launch.params, NULL, NULL));
        }
        const void *states[] = {out[0], out[1]};
        const float *lses[] = {lse[0], lse[1]};
        attn_merge_states(&(attn_merge_params){.out = out[2],
                                               .lse = lse[2],
                                               .states = states,
                                               .state_lses = lses,
                                               .sinks = whole.sinks,
                                               .tokens = 2,
                                               .num_states = 2,
                                               .q_heads = q_heads,
                                               .v_head_dim = dim,
                                               .dtype = ATTND_F32});
        for (int32_t i = 0; i < 2 * q_heads * dim; i++) {
            ck_assert_double_le(fabs((double)out[2][i] - oracle.out[i]), 2e-6);
        }
        for (int32_t i = 0; i < 2 * q_heads; i++) {
            ck_assert_double_le(fabs((double)lse[2][i] - oracle.lse[i]), 4e-6);
        }
        launch.rows[0] = whole;
    }
    conf_oracle_fini(&oracle);
    conf_launch_fini(&launch);
}
END_TEST

static TCase *add_case(Suite *s, const char *name) {
    TCase *c = tcase_create(name);
    tcase_add_checked_fixture(c, open_engines, close_engines);
    tcase_set_timeout(c, is_long() ? 3600 : 300);
    suite_add_tcase(s, c);
    return c;
}

static Suite *suite(void) {
    Suite *s = suite_create("conformance_cpu");
    const char *seed = getenv("ATTND_SEED");
    first_seed = seed ? strtoull(seed, NULL, 0) : is_long() ? (uint64_t)time(NULL) * 1000 : 1;
    printf("ATTND_SEED=%llu, instruction sets:", (unsigned long long)first_seed);
    for (int i = 0; i < NUM_ISAS; i++) {
        uint32_t features = 0;
        bool is_here =
            is_wanted(isas[i]) &&
            attn_cpu_features_of(&features, isas[i], attn_cpu_detect(), NULL) == ATTND_OK;
        printf("%s%s", is_here ? " " : "", is_here ? isas[i] : "");
    }
    printf("\n");
    TCase *c = add_case(s, "shapes");
    tcase_add_test(c, the_run_that_bounds_come_from_is_not_fused);
    tcase_add_loop_test(c, plain_launches_match_the_reference, 0, NUM_TYPES);
    tcase_add_loop_test(c, every_head_dim_matches_the_reference, 0, NUM_TYPES);
    tcase_add_loop_test(c, every_gqa_ratio_matches_the_reference, 0, NUM_TYPES);
    tcase_add_loop_test(c, the_largest_group_matches_the_reference, 0, NUM_TYPES);
    tcase_add_loop_test(c, every_length_matches_the_reference, 0, NUM_BLOCKS);
    tcase_add_loop_test(c, long_sequences_match_the_reference, 0, NUM_TYPES);
    tcase_add_loop_test(c, a_ragged_batch_matches_the_reference, 0, NUM_TYPES);
    if (!is_short()) {
        tcase_add_test(c, seventy_thousand_rows_run_in_several_launches);
    }
    c = add_case(s, "features");
    tcase_add_loop_test(c, every_pair_of_features_matches_the_reference, 0, NUM_FEATURES);
    tcase_add_loop_test(c, every_size_of_logits_matches_the_reference, 0, NUM_TYPES * NUM_LOGITS);
    tcase_add_loop_test(c, random_launches_match_the_reference, 0,
                        is_short() ? NUM_RANDOM_TESTS / 2 : NUM_RANDOM_TESTS);
    tcase_add_test(c, merged_partial_states_are_the_whole);
    c = add_case(s, "isolation");
    tcase_add_loop_test(c, the_order_of_a_batch_changes_nothing, 0, NUM_TYPES);
    tcase_add_loop_test(c, the_place_of_blocks_changes_nothing, 0, NUM_TYPES);
    tcase_add_loop_test(c, batch_mates_change_nothing, 0, NUM_TYPES);
    tcase_add_loop_test(c, chunks_change_nothing, 0, NUM_TYPES);
    tcase_add_loop_test(c, room_for_states_changes_nothing, 0, NUM_TYPES);
    tcase_add_loop_test(c, hidden_blocks_are_never_read, 0, NUM_TYPES);
    tcase_add_loop_test(c, a_nan_in_live_data_stays_in_its_row, 0, NUM_TYPES);
    return s;
}

CHECK_MAIN(suite)
