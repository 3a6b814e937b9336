// Launches with rows of many query tokens, and block masks.
#include <string.h>

#include "tests/conformance/cuda/conf_cases.h"

static conf_spec many(attnd_dtype dtype, int32_t head_dim, uint64_t seed) {
    conf_spec s = conf_base(dtype, head_dim, seed);
    s.num_rows = 7;
    static const conf_row rows[] = {
        {300, 300, 300, 0, 300}, {77, 1, 1, 0, 1},       {513, 140, 100, 0, 140}, {0, 3, 0, 0, 3},
        {70, 131, 70, 0, 131},   {400, 260, 0, 129, 70}, {33, 0, 5, 0, 0}};
    memcpy(s.rows, rows, sizeof(rows));
    return s;
}

static void add_many_types(bool is_short) {
    static const int32_t blocks[] = {16, 32, 48, 64, 128, 256};
    for (uint64_t i = 0; i < (is_short ? 8 : 48); i++) {
        conf_spec s = many(conf_dtype_of(i), conf_head_dim_of(i), 1100 + i);
        s.block_tokens = blocks[i / 8];
        s.is_dense = i / 4 % 2;
        conf_add("many_query_tokens_match_the_reference", CONF_MODE_AUTO | CONF_MODE_DETERMINISTIC,
                 &s);
    }
}

static void add_many_features(void) {
    for (uint64_t i = 0; i < 14; i++) {
        uint32_t feature = 1u << i;
        if (feature & (CONF_ROPE_INTERLEAVED | CONF_POSITIONS)) {
            feature |= CONF_ROPE;
        }
        for (uint64_t j = 0; j < 4; j++) {
            conf_spec s = many(conf_dtype_of(i + j), j % 2 ? 64 : 128, 1200 + 4 * i + j);
            s.features = feature | (j % 2 && feature != CONF_TREE ? CONF_CAUSAL : 0);
            s.block_tokens = j < 2 ? 32 : 64;
            s.q_heads = j < 2 ? 4 : 6;
            s.is_dense = j < 2;
            conf_add("each_feature_with_many_query_tokens_matches_the_reference", CONF_MODE_AUTO,
                     &s);
        }
    }
}

static void add_many_ratios(void) {
    static const int32_t ratios[] = {1,  3,  4,   5,   6,   7,  8,  12, 16,
                                     17, 64, 100, 128, 200,                  // with gaps
                                     1,  2,  3,   4,   8,   16, 32, 64, 128, // without
                                     1,  2,  4,   16,  64};                  // between tokens alone
    for (uint64_t i = 0; i < sizeof(ratios) / sizeof(*ratios); i++) {
        conf_spec s = conf_base(conf_dtype_of(i), conf_head_dim_of(i), 1300 + i);
        s.is_dense = i >= 14;
        s.is_fused = i >= 23;
        s.kv_heads = ratios[i] > 16 ? 1 : 3;
        s.q_heads = s.kv_heads * ratios[i];
        s.block_tokens = i % 3 ? 64 : 16;
        s.features |= i % 2 ? CONF_ROPE | CONF_SINKS : 0;
        s.num_rows = 2;
        s.rows[0] = (conf_row){150, 66, 66, 0, 66};
        s.rows[1] = (conf_row){40, 33, 33, 5, 20};
        conf_add("head_ratios_with_many_query_tokens_match_the_reference", CONF_MODE_AUTO, &s);
    }
}

// RoPE of queries and of appended keys: all dims, some, an odd number of pairs; pairs side by side;
// groups of heads that tiles hold evenly and not; rows of one token and of none among them.
static void add_many_rotations(bool is_short) {
    static const int32_t groups[] = {1, 4, 5, 8};
    static const int32_t dims[2][6] = {{64, 62, 8, 2, 44, 16}, {128, 126, 8, 2, 76, 32}};
    for (uint64_t i = 0; i < 36; i += is_short ? 7 : 1) {
        conf_spec s = many(conf_dtype_of(i), conf_head_dim_of(i / 2), 1600 + i);
        s.kv_heads = 1 + (int32_t)(i % 5); // fewer and more than are appended together
        s.q_heads = s.kv_heads * groups[i % 4];
        s.rotary_dim = dims[s.head_dim == 128][i / 2 % 6];
        s.features = CONF_CAUSAL | CONF_ROPE | (i / 3 % 2 ? CONF_ROPE_INTERLEAVED : 0) |
                     (i % 7 == 0 ? CONF_POSITIONS : 0);
        s.is_dense = i / 4 % 2;
        s.is_fused = s.is_dense && i % 7 == 0;
        s.logit = i % 8 == 7 ? -1 : 1;
        conf_add("rotations_with_many_query_tokens_match_the_reference", CONF_MODE_AUTO, &s);
    }
}

static void add_negative_scales(void) {
    static const uint32_t features[] = {CONF_CAUSAL, CONF_CAUSAL | CONF_SOFTCAP,
                                        CONF_CAUSAL | CONF_ALIBI, CONF_CAUSAL | CONF_SINKS,
                                        CONF_TREE | CONF_ROPE};
    for (uint64_t i = 0; i < 10; i++) {
        conf_spec s = many(conf_dtype_of(i), conf_head_dim_of(i), 1700 + i);
        s.features = features[i % 5];
        s.is_dense = i % 2;
        s.logit = i < 5 ? -1 : -30;
        conf_add("negative_scales_match_the_reference", CONF_MODE_AUTO, &s);
    }
}

// Few tasks of many keys, which two CTAs share: two sums are joined; of a window one may see
// nothing.
static void add_many_shared(bool is_short) {
    static const uint32_t features[] = {0,
                                        CONF_CAUSAL | CONF_ROPE,
                                        CONF_SINKS,
                                        CONF_CAUSAL | CONF_SOFTCAP | CONF_ALIBI,
                                        CONF_PARTIAL | CONF_SINKS,
                                        CONF_CAUSAL | CONF_NO_LSE,
                                        CONF_TREE,
                                        CONF_WINDOW_LEFT | CONF_CAUSAL};
    for (uint64_t i = 0; i < (is_short ? 2 : 16); i++) {
        conf_spec s = conf_base(conf_dtype_of(i / 2), i % 2 ? 64 : 128, 1800 + i);
        s.features = features[i / 2 % 8];
        s.block_tokens = 64;
        s.is_dense = i / 4 % 2;
        s.q_heads = i % 3 ? 2 : 6;
        s.logit = i % 5 == 4 ? 30 : 2; // maxima of both halves differ
        s.num_rows = i % 4 == 3 ? 2 : 1;
        s.rows[0] = (conf_row){2700, 200, 200, 0, 200};
        s.rows[1] = (conf_row){2600, 130, 30, 0, 130};
        conf_add("keys_that_two_ctas_share_match_the_reference",
                 CONF_MODE_AUTO | CONF_MODE_DETERMINISTIC, &s);
    }
}

// Lengths, windows, query blocks and trees whose edges lie at, before and behind those of steps
// (128 keys) and tiles (64 query rows of a warpgroup, three of them together).
static void add_many_edges(void) {
    for (uint64_t i = 0; i < 28; i++) {
        conf_spec s = conf_base(conf_dtype_of(i), conf_head_dim_of(i), 1400 + i);
        static const uint32_t features[] = {CONF_CAUSAL,
                                            0,
                                            CONF_CAUSAL | CONF_WINDOW_LEFT,
                                            CONF_WINDOW_LEFT | CONF_WINDOW_RIGHT,
                                            CONF_BLOCK_MASK,
                                            CONF_BLOCK_MASK | CONF_CAUSAL,
                                            CONF_TREE};
        static const int32_t q_blocks[] = {64, 63, 128, 129, 192, 191, 65, 127};
        s.features = features[i / 2 % 7];
        s.q_block = q_blocks[i % 8];
        s.is_dense = i >= 14;
        s.block_tokens = i % 2 ? 64 : 16;
        s.q_heads = s.kv_heads = 1;
        s.num_rows = 0;
        for (int32_t edge = 64; edge <= 384; edge += 64) {
            for (int32_t n = edge - 1; n <= edge + 1; n++) {
                s.rows[s.num_rows++] = (conf_row){n, n, n, 0, n};
                s.rows[s.num_rows++] = (conf_row){n + 100, edge / 2 + 1, 0, 0, edge / 2 + 1};
            }
        }
        conf_add("edges_of_steps_and_tiles_match_the_reference", CONF_MODE_AUTO, &s);
    }
}

static void add_many_random(int num, uint64_t seed) {
    static const int32_t ratios[] = {1, 2, 4, 8, 3, 16, 6, 12};
    static const double logits[] = {1, 1, 4, 30, 0.01, 1000};
    for (int i = 0; i < num; i++) {
        uint64_t state = seed + (uint64_t)i;
        conf_spec s = conf_base(conf_dtype_of(conf_random(&state)),
                                conf_head_dim_of(conf_random(&state)), seed + (uint64_t)i);
        s.kv_heads = 1 + conf_below(&state, 3);
        s.q_heads = s.kv_heads * ratios[conf_below(&state, 8)];
        s.block_tokens = 16 << conf_below(&state, 4);
        s.features = (uint32_t)conf_random(&state) & (uint32_t)conf_random(&state) &
                     (CONF_ALL_FEATURES & ~(uint32_t)CONF_TOKEN_MAJOR);
        s.logit = logits[conf_below(&state, 6)];
        s.is_dense = conf_below(&state, 3) > 0;
        s.num_rows = (uint32_t)(1 + conf_below(&state, 8));
        for (uint32_t r = 0; r < s.num_rows; r++) {
            int32_t kv = conf_below(&state, conf_below(&state, 3) ? 200 : 900);
            int32_t q = conf_below(&state, conf_below(&state, 2) ? 9 : 1 + 2000 / s.q_heads);
            int32_t most = q < kv ? q : kv;
            int32_t first = conf_below(&state, q + 1);
            first = conf_below(&state, 2) ? 0 : first;
            s.rows[r] = (conf_row){kv, q, conf_below(&state, most + 1), first, q - first};
        }
        conf_add("random_launches_of_many_query_tokens_match_the_reference",
                 CONF_MODE_AUTO | CONF_MODE_DETERMINISTIC, &s);
    }
}

conf_spec conf_chunked(int i) {
    static const uint32_t features[] = {
        CONF_CAUSAL | CONF_ROPE | CONF_SINKS, CONF_TREE, CONF_CAUSAL | CONF_BLOCK_MASK,
        CONF_CAUSAL | CONF_WINDOW_LEFT, CONF_SOFTCAP | CONF_ALIBI | CONF_WINDOW_RIGHT};
    conf_spec s = conf_base(ATTND_BF16, i % 2 ? 128 : 64, 820);
    s.features = features[i / 4];
    s.is_dense = i / 2 % 2 == 0;
    s.q_block = 100;
    s.logit = i % 3 == 0 ? 30 : 4; // with 30 maxima rise in later steps, too
    s.num_rows = 1;
    s.rows[0] = (conf_row){900, 400, 0, 0, 400};
    return s;
}

// Masks of rows that are cut in splits, some over blocks as long as a split, which then may see
// nothing; some of their query blocks see nothing at all.
static void add_split_masks(int modes, bool is_short) {
    for (uint64_t i = 0; i < (is_short ? 2 : 12); i++) {
        conf_spec s = conf_base(conf_dtype_of(i), conf_head_dim_of(i), 1500 + i);
        static const uint32_t features[] = {CONF_BLOCK_MASK,
                                            CONF_BLOCK_MASK | CONF_CAUSAL,
                                            CONF_TREE,
                                            CONF_BLOCK_MASK | CONF_TREE | CONF_ROPE,
                                            CONF_BLOCK_MASK | CONF_WINDOW_LEFT | CONF_SINKS,
                                            CONF_BLOCK_MASK | CONF_ALIBI | CONF_PARTIAL};
        static const int32_t blocks[] = {16, 512, 48, 256, 64, 1024};
        s.features = features[i % 6];
        s.block_tokens = blocks[i / 2 % 6];
        s.q_block = i % 3 ? 5 : 64;
        s.num_rows = 5;
        s.rows[0] = (conf_row){3000, 1, 1, 0, 1};
        s.rows[1] = (conf_row){1500, 70, 70, 0, 70};
        s.rows[2] = (conf_row){700, 200, 100, 33, 100};
        s.rows[3] = (conf_row){40, 65, 40, 0, 65};
        s.rows[4] = (conf_row){2100, 8, 0, 0, 8};
        conf_add("masks_cut_in_splits_match_the_reference", modes, &s);
    }
}

void conf_add_many(const char *kernel, bool is_short) {
    const bool is_bulk = strcmp(kernel, "bulk") == 0;
    const bool decodes = is_bulk || strcmp(kernel, "portable") == 0; // else no masks in splits
    add_split_masks(decodes ? CONF_MODE_USUAL : CONF_MODE_AUTO | CONF_MODE_DETERMINISTIC, is_short);
    if (is_bulk) {
        return;
    }
    add_many_types(is_short);
    add_many_rotations(is_short);
    add_many_shared(is_short);
    if (is_short) {
        add_many_random(6, 2000);
        return;
    }
    add_many_features();
    add_many_ratios();
    add_many_edges();
    add_negative_scales();
    add_many_random(60, 2000);
}
