// Launches with rows of few query tokens: types, head ratios, lengths, features, logits; and the
// shapes that launches themselves can have.
#include "tests/conformance/cuda/conf_cases.h"

conf_spec conf_base(attnd_dtype dtype, int32_t head_dim, uint64_t seed) {
    return (conf_spec){
        .q_dtype = dtype,
        .kv_dtype = dtype,
        .q_heads = 4,
        .kv_heads = 2,
        .head_dim = head_dim,
        .v_head_dim = head_dim,
        .block_tokens = 16,
        .features = CONF_CAUSAL,
        .logit = 1,
        .seed = seed,
        .placement = seed,
        .num_rows = 4,
        .rows = {{77, 1, 1, 0, 1}, {50, 5, 5, 0, 5}, {600, 8, 0, 0, 8}, {9, 3, 2, 1, 2}}};
}

attnd_dtype conf_dtype_of(uint64_t i) {
    return i % 2 ? ATTND_F16 : ATTND_BF16;
}

int32_t conf_head_dim_of(uint64_t i) {
    return i % 4 < 2 ? 128 : 64;
}

static void add_types(void) {
    static const int32_t blocks[] = {16, 32, 48, 64, 128};
    for (uint64_t i = 0; i < 20; i++) {
        conf_spec s = conf_base(conf_dtype_of(i), conf_head_dim_of(i), 100 + i);
        s.block_tokens = blocks[i / 4];
        conf_add("types_and_blocks_match_the_reference", CONF_MODE_USUAL, &s);
    }
}

static void add_ratios(void) {
    static const int32_t ratios[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                     12, 13, 14, 15, 16, 17, 32, 33, 64, 128};
    for (uint64_t i = 0; i < sizeof(ratios) / sizeof(*ratios); i++) {
        conf_spec s = conf_base(conf_dtype_of(i), conf_head_dim_of(i), 200 + i);
        s.kv_heads = ratios[i] > 16 ? 1 : 3;
        s.q_heads = s.kv_heads * ratios[i];
        s.block_tokens = i % 3 ? 64 : 16;
        conf_add("head_ratios_match_the_reference", CONF_MODE_USUAL, &s);
    }
}

static void add_lengths(void) {
    for (uint64_t i = 0; i < 4; i++) {
        conf_spec s = conf_base(conf_dtype_of(i), conf_head_dim_of(i), 300 + i);
        static const int32_t blocks[] = {16, 64, 128, 32};
        uint64_t state = 300 + i;
        s.block_tokens = blocks[i];
        s.num_rows = 0;
        for (int32_t edge = 0; edge <= 256; edge += edge < 128 ? 16 : 64) {
            for (int32_t kv = edge - 1; kv <= edge + 1 && s.num_rows < CONF_MAX_ROWS; kv++) {
                int32_t q = 1 + conf_below(&state, 8);
                if (kv >= 0) {
                    int32_t new_len = conf_below(&state, (q < kv ? q : kv) + 1);
                    s.rows[s.num_rows++] = (conf_row){kv, q, new_len, 0, q};
                }
            }
        }
        conf_add("lengths_around_block_edges_match_the_reference", CONF_MODE_USUAL, &s);
    }
}

static void add_features(void) {
    for (uint64_t i = 0; i < 15; i++) {
        uint32_t feature = 1u << i;
        if (feature & (CONF_BLOCK_MASK | CONF_TOKEN_MAJOR)) {
            continue;
        }
        if (feature & (CONF_ROPE_INTERLEAVED | CONF_POSITIONS)) {
            feature |= CONF_ROPE;
        }
        for (uint64_t j = 0; j < 2; j++) {
            conf_spec s = conf_base(conf_dtype_of(i + j), j ? 64 : 128, 400 + 2 * i + j);
            s.features = feature | (j && feature != CONF_TREE ? CONF_CAUSAL : 0);
            s.block_tokens = 32;
            conf_add("each_feature_matches_the_reference", CONF_MODE_USUAL, &s);
        }
    }
}

static void add_random(int num, uint64_t seed) {
    static const int32_t ratios[] = {1, 2, 4, 8, 3, 16, 6, 12};
    static const double logits[] = {1, 1, 4, 30, 0.01};
    for (int i = 0; i < num; i++) {
        uint64_t state = seed + (uint64_t)i;
        conf_spec s = conf_base(conf_dtype_of(conf_random(&state)),
                                conf_head_dim_of(conf_random(&state)), seed + (uint64_t)i);
        s.kv_heads = 1 + conf_below(&state, 4);
        s.q_heads = s.kv_heads * ratios[conf_below(&state, 8)];
        s.block_tokens = 16 << conf_below(&state, 4);
        s.features = (uint32_t)conf_random(&state) & (uint32_t)conf_random(&state) &
                     (CONF_ALL_FEATURES & ~(uint32_t)(CONF_BLOCK_MASK | CONF_TOKEN_MAJOR));
        s.logit = logits[conf_below(&state, 5)];
        s.num_rows = (uint32_t)(1 + conf_below(&state, 12));
        for (uint32_t r = 0; r < s.num_rows; r++) {
            int32_t kv = conf_below(&state, conf_below(&state, 3) ? 300 : 1500);
            int32_t q = conf_below(&state, 9);
            int32_t most = q < kv ? q : kv;
            int32_t first = conf_below(&state, q + 1);
            first = conf_below(&state, 2) ? 0 : first;
            s.rows[r] = (conf_row){kv, q, conf_below(&state, most + 1), first, q - first};
        }
        conf_add("random_launches_match_the_reference", CONF_MODE_USUAL, &s);
    }
}

static void add_logits(void) {
    static const double logits[] = {1e-4, 1e-2, 10, 1e2, 1e3, 1e4, 1e5};
    for (uint64_t i = 0; i < 7; i++) {
        conf_spec s = conf_base(conf_dtype_of(i), conf_head_dim_of(i), 500 + i);
        s.logit = logits[i];
        s.features |= i % 2 ? CONF_SINKS : 0;
        conf_add("logits_of_all_sizes_match_the_reference", CONF_MODE_USUAL, &s);
    }
}

static void add_long(void) {
    for (uint64_t i = 0; i < 2; i++) {
        conf_spec s = conf_base(conf_dtype_of(i), i ? 64 : 128, 600 + i);
        s.q_heads = 2;
        s.kv_heads = 1;
        s.block_tokens = 64;
        s.num_rows = 3;
        s.rows[0] = (conf_row){i ? 131072 : 33000, 1, 1, 0, 1};
        s.rows[1] = (conf_row){1025, 2, 2, 0, 2};
        s.rows[2] = (conf_row){1, 1, 0, 0, 1};
        s.features |= CONF_SINKS | CONF_ROPE;
        conf_add("long_sequences_match_the_reference", CONF_MODE_USUAL, &s);
    }
    conf_spec s = conf_base(ATTND_BF16, 128, 610);
    s.num_rows = 2;
    s.rows[0] = (conf_row){9000, 1, 1, 0, 1};
    s.rows[1] = (conf_row){3000, 8, 8, 0, 8};
    conf_add("forced_splits_from_1_to_128_match_the_reference", CONF_MODE_ALL_SPLITS, &s);
}

static void add_shapes_of_launches(void) {
    conf_spec s = conf_base(ATTND_BF16, 128, 700);
    s.num_rows = 4;
    s.rows[0] = (conf_row){300, 100, 100, 0, 100};
    s.rows[1] = (conf_row){300, 100, 40, 17, 50};
    s.rows[2] = (conf_row){100, 130, 100, 0, 130};
    s.rows[3] = (conf_row){200, 0, 150, 0, 0};
    conf_add("long_queries_and_rows_that_only_append_match_the_reference", CONF_MODE_USUAL, &s);
    s.features |= CONF_WINDOW_LEFT | CONF_ROPE;
    conf_add("long_queries_and_rows_that_only_append_match_the_reference", CONF_MODE_USUAL, &s);

    for (uint64_t i = 0; i < 4; i++) { // more heads than CTAs: some are cut in two
        s = conf_base(conf_dtype_of(i + 1), conf_head_dim_of(i + 2), 703 + i);
        s.num_rows = CONF_MAX_ROWS;
        uint64_t state = 703 + i;
        int32_t q = 1 + 3 * (int32_t)i;
        for (uint32_t r = 0; r < s.num_rows; r++) {
            s.rows[r] = (conf_row){1 + conf_below(&state, 400), q, 1, 0, q};
        }
        s.features |= i % 2 ? CONF_SINKS | CONF_PARTIAL : CONF_WINDOW_LEFT | CONF_ROPE;
        conf_add("many_rows_of_layers_and_windows_match_the_reference", CONF_MODE_USUAL, &s);
        conf_lay_out((conf_layout){0, 3});
    }

    s = conf_base(ATTND_BF16, 128, 702);
    s.block_tokens = 64;
    conf_add("blocks_beyond_2_to_31_bytes_match_the_reference", CONF_MODE_USUAL, &s);
    conf_lay_out((conf_layout){5ull * (1u << 30) / (64 * 2 * 128 * 2 * 2), 1});
}

void conf_add_few(bool is_short) {
    add_types();
    add_features();
    if (is_short) {
        add_random(4, 1000);
        return;
    }
    add_ratios();
    add_lengths();
    add_random(60, 1000);
    add_logits();
    add_long();
    add_shapes_of_launches();
}
