// conf_launch makes random launches for the conformance tests, and surrounds them with everything
// that a kernel must not touch: guard pages behind tables, queries, masks and the pool, NaN behind
// kv_len and in blocks of nobody, canaries between and around the outputs.  Blocks behind a row's
// window are not in its table: who uses such an entry reads far behind the pool.  A
// row's content follows from the seed and the row's number alone, so the same sequences can be laid
// out differently.
#ifndef ATTND_TESTS_CONFORMANCE_CONF_LAUNCH_H
#define ATTND_TESTS_CONFORMANCE_CONF_LAUNCH_H

#include "attention/attn.h"

#define CONF_NO_BLOCK UINT32_MAX // a table entry

enum {
    CONF_MAX_ROWS = 160,
    CONF_MAX_MAPS = 16 * CONF_MAX_ROWS,
};

enum {
    CONF_CAUSAL = 1u << 0,
    CONF_WINDOW_LEFT = 1u << 1,
    CONF_WINDOW_RIGHT = 1u << 2,
    CONF_WINDOW_HUGE = 1u << 3, // both sides INT32_MAX
    CONF_SOFTCAP = 1u << 4,
    CONF_ALIBI = 1u << 5,
    CONF_SINKS = 1u << 6,
    CONF_PARTIAL = 1u << 7,
    CONF_TREE = 1u << 8,
    CONF_BLOCK_MASK = 1u << 9,
    CONF_ROPE = 1u << 10,
    CONF_ROPE_INTERLEAVED = 1u << 11,
    CONF_POSITIONS = 1u << 12,
    CONF_NO_LSE = 1u << 13,
    CONF_TOKEN_MAJOR = 1u << 14, // blocks [block_tokens, kv_heads, head_dim]
    CONF_ALL_FEATURES = (1u << 15) - 1,
};

// conf_row is one row; it computes query tokens [q_first, q_first + q_count).
typedef struct conf_row {
    int32_t kv_len, q_len, new_len, q_first, q_count;
} conf_row;

typedef struct conf_spec {
    attnd_dtype q_dtype, kv_dtype;
    int32_t q_heads, kv_heads, head_dim, v_head_dim, block_tokens;
    uint32_t features;  // CONF_CAUSAL ...
    double logit;       // standard deviation of the logits; below 0: of a negative scale
    int32_t rotary_dim; // 0 = some of the dims
    uint64_t seed;
    uint64_t placement; // which blocks the sequences get
    bool is_reversed;   // rows in opposite order
    bool is_dense;      // q and out without gaps between heads and tokens
    bool is_fused; // and is_dense: tokens of q with gaps, as slices of a fused projection's output
    int32_t q_block; // of block masks; 0 = random, up to 20
    bool has_twins;  // old keys come in pairs whose logits differ by about 1, whatever logit is
    uint32_t num_rows;
    conf_row rows[CONF_MAX_ROWS];
} conf_spec;

// conf_map is guarded memory.
typedef struct conf_map {
    void *base;
    size_t bytes;
} conf_map;

typedef struct conf_launch {
    conf_spec spec;
    attn_params params;
    attn_row rows[CONF_MAX_ROWS];
    attn_block_mask masks[CONF_MAX_ROWS];
    attn_rope rope;
    uint64_t saturated;
    uint64_t pool_bytes;
    void *pool_before; // what the pool held before any append
    size_t out_bytes[CONF_MAX_ROWS], lse_bytes[CONF_MAX_ROWS];
    conf_map maps[CONF_MAX_MAPS];
    uint32_t num_maps;
} conf_launch;

// conf_launch_init builds the launch of a spec.
void conf_launch_init(conf_launch *l, const conf_spec *spec);

void conf_launch_fini(conf_launch *l);

// conf_launch_reset makes pool, outputs and canaries as they were.
void conf_launch_reset(conf_launch *l);

// conf_launch_row returns the index in params.rows of row i of the spec.
uint32_t conf_launch_row(const conf_launch *l, uint32_t i);

// conf_launch_is_intact says that no canary was overwritten.
bool conf_launch_is_intact(const conf_launch *l);

// conf_random is the next number of a generator (splitmix64); conf_uniform is in [0, 1),
// conf_normal has mean 0 and deviation 1, conf_below is from 0 to n - 1.
uint64_t conf_random(uint64_t *state);
double conf_uniform(uint64_t *state);
double conf_normal(uint64_t *state);
int32_t conf_below(uint64_t *state, int32_t n);

// conf_text returns a spec on one line, in static storage.
const char *conf_text(const conf_spec *spec);

#endif
