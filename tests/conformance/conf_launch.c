// Random launches in guarded memory.  Each array ends where an inaccessible page begins, so that a
// read past its end is a crash and not a matter of luck.
#include "tests/conformance/conf_launch.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    CANARY = 0xa5,
    PAD = 8,          // elements between heads and between tokens of q, k_new, v_new and out
    SPARE_BLOCKS = 3, // blocks of nobody
    PAGE = 4096,
    TWIN_STEP = 0x777777, // between the random states of two pairs
};

uint64_t conf_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

double conf_uniform(uint64_t *state) {
    return (double)(conf_random(state) >> 11) * 0x1p-53;
}

double conf_normal(uint64_t *state) {
    double sum = 0; // 12 uniforms have variance 1
    for (int i = 0; i < 3; i++) {
        uint64_t bits = conf_random(state);
        for (int j = 0; j < 4; j++) {
            sum += (double)(bits >> (16 * j) & 0xffff) / 65536;
        }
    }
    return sum - 6;
}

int32_t conf_below(uint64_t *state, int32_t n) {
    return (int32_t)(conf_random(state) % (uint64_t)n);
}

// take maps bytes that end at an inaccessible page.
static void *take(conf_launch *l, size_t bytes) {
    size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    char *base =
        mmap(NULL, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || l->num_maps == CONF_MAX_MAPS) {
        abort();
    }
    mprotect(base + pages, PAGE, PROT_NONE);
    l->maps[l->num_maps++] = (conf_map){base, pages + PAGE};
    return base + pages - bytes;
}

static float *take_floats(conf_launch *l, int32_t num, uint64_t *state, double mean,
                          double spread) {
    float *x = take(l, (size_t)num * sizeof(float));
    for (int32_t i = 0; i < num; i++) {
        x[i] = (float)(mean + spread * (conf_uniform(state) - 0.5));
    }
    return x;
}

// take_tensor fills [tokens, heads, dim] with normal values; heads lie pad apart, tokens token_pad
// more.
static void *take_tensor(conf_launch *l, int32_t tokens, int32_t heads, int32_t dim, int32_t pad,
                         int32_t token_pad, uint64_t *state) {
    attnd_dtype dtype = l->spec.q_dtype;
    int64_t stride = (int64_t)heads * (dim + pad) + token_pad;
    int64_t num = tokens * stride - pad - token_pad;
    void *x = take(l, (size_t)num * attnd_dtype_bytes(dtype));
    memset(x, 0xff, (size_t)num * attnd_dtype_bytes(dtype));
    for (int32_t t = 0; t < tokens; t++) {
        for (int32_t h = 0; h < heads; h++) {
            for (int32_t d = 0; d < dim; d++) {
                uint64_t i = (uint64_t)(t * stride + h * (dim + pad) + d);
                attnd_store(x, dtype, i, conf_normal(state));
            }
        }
    }
    return x;
}

static void set_shape(conf_launch *l) {
    const conf_spec *spec = &l->spec;
    attn_shape *s = &l->params.shape;
    uint64_t bytes = attnd_dtype_bytes(spec->kv_dtype);
    *s = (attn_shape){
        .q_dtype = spec->q_dtype,
        .kv_dtype = spec->kv_dtype,
        .q_heads = spec->q_heads,
        .kv_heads = spec->kv_heads,
        .head_dim = spec->head_dim,
        .v_head_dim = spec->v_head_dim,
        .block_tokens = spec->block_tokens,
        .stride_k_token = spec->head_dim,
        .stride_k_head = (int64_t)spec->block_tokens * spec->head_dim,
        .stride_v_token = spec->v_head_dim,
        .stride_v_head = (int64_t)spec->block_tokens * spec->v_head_dim,
    };
    if (spec->features & CONF_TOKEN_MAJOR) {
        s->stride_k_token = (int64_t)spec->kv_heads * spec->head_dim;
        s->stride_k_head = spec->head_dim;
        s->stride_v_token = (int64_t)spec->kv_heads * spec->v_head_dim;
        s->stride_v_head = spec->v_head_dim;
    }
    uint64_t tokens = (uint64_t)spec->kv_heads * (uint64_t)spec->block_tokens;
    s->block_stride = tokens * (uint64_t)(spec->head_dim + spec->v_head_dim) * bytes;
}

static int32_t blocks_of(const conf_spec *spec, const conf_row *row) {
    return (row->kv_len + spec->block_tokens - 1) / spec->block_tokens;
}

// take_pool poisons the pool and returns the blocks in the order in which sequences get them.
static uint32_t *take_pool(conf_launch *l) {
    const conf_spec *spec = &l->spec;
    int32_t num = SPARE_BLOCKS;
    for (uint32_t i = 0; i < spec->num_rows; i++) {
        num += blocks_of(spec, &spec->rows[i]);
    }
    l->pool_bytes = (uint64_t)num * l->params.shape.block_stride;
    l->params.pool = take(l, l->pool_bytes);
    l->params.pool_bytes = l->pool_bytes;
    l->params.num_blocks = (uint64_t)num;
    memset(l->params.pool, 0xff, l->pool_bytes); // NaN in every type
    uint32_t *blocks = malloc((size_t)num * sizeof(*blocks));
    uint64_t state = spec->placement;
    for (int32_t i = 0; i < num; i++) {
        int32_t j = conf_below(&state, i + 1);
        blocks[i] = blocks[j];
        blocks[j] = (uint32_t)i;
    }
    return blocks;
}

// fill_vector writes one K or V vector.
static void fill_vector(char *base, attnd_dtype dtype, int64_t first, int32_t dim, double scale,
                        uint64_t *state) {
    for (int32_t d = 0; d < dim; d++) {
        attnd_store(base, dtype, (uint64_t)(first + d), conf_normal(state) / scale);
    }
}

// give_back takes from a row's table the blocks that lie behind its window, which stay NaN, and
// returns the first key that is left.  It is counted by the first query token of all, so that any
// part of them may be computed.
static int32_t give_back(const attn_row *row, int32_t block_tokens) {
    int64_t first = (int64_t)row->kv_len - row->q_len - row->window_left;
    int64_t first_new = (int64_t)row->kv_len - row->new_len;
    first = row->window_left < 0 ? 0 : first < first_new ? first : first_new;
    int32_t block = first > 0 ? (int32_t)(first / block_tokens) : 0;
    for (int32_t b = 0; b < block; b++) {
        ((uint32_t *)row->table)[b] = CONF_NO_BLOCK;
    }
    return block * block_tokens;
}

// fill_cache writes the old tokens of a row to its blocks.  Of twins, all of K but dim 0 is alike,
// and dim 0 moves the logit by about 1: then every query has two keys that compete, and the
// rounding of large logits shows in every output and not by chance in one.
static void fill_cache(conf_launch *l, const attn_row *row, uint64_t *state) {
    const attn_shape *s = &l->params.shape;
    uint64_t start = *state;
    int32_t first = give_back(row, s->block_tokens);
    for (int32_t key = first; key < row->kv_len - row->new_len; key++) {
        char *block = (char *)l->params.pool + row->table[key / s->block_tokens] * s->block_stride;
        uint64_t twin = start + (uint64_t)(key / 2) * TWIN_STEP;
        for (int32_t h = 0; h < s->kv_heads; h++) {
            int64_t k = h * s->stride_k_head + key % s->block_tokens * s->stride_k_token;
            int64_t v = h * s->stride_v_head + key % s->block_tokens * s->stride_v_token;
            double k_scale = row->k_scale ? (double)row->k_scale[h] : 1;
            double v_scale = row->v_scale ? (double)row->v_scale[h] : 1;
            fill_vector(block + row->k_offset, s->kv_dtype, k, s->head_dim, k_scale,
                        l->spec.has_twins ? &twin : state);
            if (l->spec.has_twins) {
                attnd_store(block + row->k_offset, s->kv_dtype, (uint64_t)k,
                            conf_normal(state) / (double)row->scale / k_scale);
            }
            fill_vector(block + row->v_offset, s->kv_dtype, v, s->v_head_dim, v_scale, state);
        }
    }
}

static int32_t *take_positions(conf_launch *l, int32_t num, int32_t first, uint64_t *state) {
    int32_t *x = take(l, (size_t)num * sizeof(*x));
    for (int32_t i = 0; i < num; i++) {
        x[i] = first + conf_below(state, 7);
    }
    return x;
}

static uint64_t *take_tree(conf_launch *l, int32_t q_len, uint64_t *state) {
    int32_t words = (q_len + 63) / 64;
    uint64_t *tree = take(l, (size_t)q_len * (size_t)words * sizeof(*tree));
    for (int32_t i = 0; i < q_len * words; i++) {
        tree[i] = conf_random(state);
    }
    return tree;
}

static void set_block_mask(conf_launch *l, attn_row *row, attn_block_mask *mask, uint64_t *state) {
    mask->q_block = l->spec.q_block > 0 ? l->spec.q_block : 1 + conf_below(state, 20);
    int32_t num_q = row->q_len == 0 ? 0 : (row->q_len - 1) / mask->q_block + 1;
    int32_t num_kv = blocks_of(&l->spec, &(conf_row){.kv_len = row->kv_len});
    uint32_t *start = take(l, ((size_t)num_q + 1) * sizeof(*start));
    uint32_t *list = malloc(((size_t)num_q * (size_t)num_kv + 1) * sizeof(*list));
    start[0] = 0;
    for (int32_t q = 0; q < num_q; q++) {
        start[q + 1] = start[q];
        for (int32_t k = 0; k < num_kv; k++) {
            if (conf_below(state, 3) > 0) {
                list[start[q + 1]++] = (uint32_t)k;
            }
        }
    }
    uint32_t *kv_blocks = take(l, start[num_q] * sizeof(*kv_blocks));
    memcpy(kv_blocks, list, start[num_q] * sizeof(*kv_blocks));
    free(list);
    mask->start = start;
    mask->kv_blocks = kv_blocks;
    row->block_mask = mask;
}

static void set_mask(conf_launch *l, attn_row *row, attn_block_mask *mask, uint64_t *state) {
    uint32_t f = l->spec.features;
    row->flags = (f & CONF_CAUSAL ? (uint32_t)ATTN_CAUSAL : 0) |
                 (f & CONF_PARTIAL ? (uint32_t)ATTN_PARTIAL : 0);
    row->window_left = f & CONF_WINDOW_LEFT ? conf_below(state, row->kv_len + 2) : -1;
    row->window_right = f & CONF_WINDOW_RIGHT ? conf_below(state, row->kv_len + 2) : -1;
    if (f & CONF_WINDOW_HUGE) {
        row->window_left = row->window_right = INT32_MAX;
    }
    row->tree_mask = f & CONF_TREE && row->q_len > 0 ? take_tree(l, row->q_len, state) : NULL;
    if (f & CONF_BLOCK_MASK) {
        set_block_mask(l, row, mask, state);
    }
}

static void set_layer(conf_launch *l, attn_row *row, uint64_t *state) {
    const conf_spec *spec = &l->spec;
    uint32_t f = spec->features;
    row->scale = (float)(spec->logit / sqrt((double)spec->head_dim));
    row->softcap =
        f & CONF_SOFTCAP ? (float)((0.5 + 2 * conf_uniform(state)) * fabs(spec->logit)) : 0;
    row->alibi_slopes = f & CONF_ALIBI ? take_floats(l, spec->q_heads, state, 0.05, 0.1) : NULL;
    row->sinks = f & CONF_SINKS ? take_floats(l, spec->q_heads, state, 1, 6) : NULL;
    if (spec->kv_dtype == ATTND_F8E4M3) {
        row->k_scale = take_floats(l, spec->kv_heads, state, 0.02, 0.03);
        row->v_scale = take_floats(l, spec->kv_heads, state, 0.02, 0.03);
    }
    row->rope = f & CONF_ROPE ? &l->rope : NULL;
}

// set_row makes row i; its content depends on the seed and i alone.
static void set_row(conf_launch *l, uint32_t i, const uint32_t *blocks) {
    const conf_spec *spec = &l->spec;
    const conf_row *from = &spec->rows[i];
    attn_row *row = &l->rows[conf_launch_row(l, i)];
    uint64_t state = spec->seed + (i + 1) * 0x1234567ull;
    int32_t num = blocks_of(spec, from);
    uint32_t *table = take(l, (size_t)num * sizeof(*table));
    memcpy(table, blocks, (size_t)num * sizeof(*table));
    *row = (attn_row){
        .table = table,
        .k_offset = 0,
        .v_offset = (uint64_t)spec->kv_heads * (uint64_t)spec->block_tokens *
                    (uint64_t)spec->head_dim * attnd_dtype_bytes(spec->kv_dtype),
        .kv_len = from->kv_len,
        .q_len = from->q_len,
        .new_len = from->new_len,
        .q_first = from->q_first,
        .q_count = from->q_count,
    };
    set_layer(l, row, &state);
    set_mask(l, row, &l->masks[i], &state);
    fill_cache(l, row, &state);
    if (row->q_len > 0) {
        const int32_t pad = spec->is_dense ? 0 : PAD;
        const int32_t token_pad = spec->is_fused ? PAD : pad;
        row->stride_q_head = spec->head_dim + pad;
        row->stride_q_token = spec->q_heads * row->stride_q_head + token_pad;
        row->q = take_tensor(l, row->q_len, spec->q_heads, spec->head_dim, pad, token_pad, &state);
        row->stride_out_head = spec->v_head_dim + pad;
        row->stride_out_token = spec->q_heads * row->stride_out_head + pad;
        l->out_bytes[i] = (size_t)(row->q_len * row->stride_out_token - 2ll * pad) *
                          attnd_dtype_bytes(spec->q_dtype);
        row->out = take(l, l->out_bytes[i]);
        row->stride_lse_head = row->q_len + PAD;
        l->lse_bytes[i] = (size_t)(spec->q_heads * row->stride_lse_head - PAD) * sizeof(float);
        row->lse = spec->features & CONF_NO_LSE ? NULL : take(l, l->lse_bytes[i]);
    }
    if (row->new_len > 0) {
        row->stride_k_new_head = spec->head_dim + PAD;
        row->stride_k_new_token = spec->kv_heads * row->stride_k_new_head + PAD;
        row->k_new = take_tensor(l, row->new_len, spec->kv_heads, spec->head_dim, PAD, PAD, &state);
        row->stride_v_new_head = spec->v_head_dim + PAD;
        row->stride_v_new_token = spec->kv_heads * row->stride_v_new_head + PAD;
        row->v_new =
            take_tensor(l, row->new_len, spec->kv_heads, spec->v_head_dim, PAD, PAD, &state);
    }
    if (spec->features & CONF_POSITIONS) {
        row->q_positions = take_positions(l, row->q_len, row->kv_len, &state);
        row->k_positions = take_positions(l, row->new_len, row->kv_len, &state);
    }
}

static void set_rope(conf_launch *l) {
    int32_t dim = l->spec.head_dim >= 32 ? l->spec.head_dim / 4 * 2 + 8 : l->spec.head_dim;
    dim = dim > l->spec.head_dim ? l->spec.head_dim : dim;
    dim = l->spec.rotary_dim > 0 ? l->spec.rotary_dim : dim;
    float *inv_freq = take(l, (size_t)dim / 2 * sizeof(float));
    for (int32_t i = 0; i < dim / 2; i++) {
        inv_freq[i] = (float)pow(10000, -2.0 * i / dim);
    }
    l->rope = (attn_rope){.inv_freq = inv_freq,
                          .attention_factor = 1.125f,
                          .rotary_dim = dim,
                          .interleaved = (l->spec.features & CONF_ROPE_INTERLEAVED) != 0};
}

uint32_t conf_launch_row(const conf_launch *l, uint32_t i) {
    return l->spec.is_reversed ? l->spec.num_rows - 1 - i : i;
}

void conf_launch_init(conf_launch *l, const conf_spec *spec) {
    memset(l, 0, sizeof(*l));
    l->spec = *spec;
    l->params.rows = l->rows;
    l->params.num_rows = spec->num_rows;
    l->params.saturated = &l->saturated;
    set_shape(l);
    set_rope(l);
    uint32_t *blocks = take_pool(l);
    uint32_t *next = blocks;
    for (uint32_t i = 0; i < spec->num_rows; i++) {
        set_row(l, i, next);
        next += blocks_of(spec, &spec->rows[i]);
    }
    free(blocks);
    l->pool_before = malloc(l->pool_bytes);
    memcpy(l->pool_before, l->params.pool, l->pool_bytes);
    conf_launch_reset(l);
}

void conf_launch_fini(conf_launch *l) {
    for (uint32_t i = 0; i < l->num_maps; i++) {
        munmap(l->maps[i].base, l->maps[i].bytes);
    }
    free(l->pool_before);
}

void conf_launch_reset(conf_launch *l) {
    memcpy(l->params.pool, l->pool_before, l->pool_bytes);
    l->saturated = 0;
    for (uint32_t i = 0; i < l->spec.num_rows; i++) {
        attn_row *row = &l->rows[conf_launch_row(l, i)];
        if (row->out) {
            memset(row->out, CANARY, l->out_bytes[i]);
        }
        if (row->lse) {
            memset(row->lse, CANARY, l->lse_bytes[i]);
        }
    }
}

// area is an output [outer, inner, width] of which outer indices [first, end) and the first inner
// and width elements may be written.
typedef struct area {
    const unsigned char *base;
    size_t bytes;
    int64_t element; // bytes
    int64_t stride_outer, stride_inner;
    int64_t first, end, inner, width;
} area;

// is_untouched says that an area holds only canaries outside what may be written.
static bool is_untouched(const area *a) {
    int64_t num = (int64_t)a->bytes / a->element;
    for (int64_t i = 0; i < num; i++) {
        int64_t outer = i / a->stride_outer;
        int64_t inner = i % a->stride_outer / a->stride_inner;
        bool is_output = outer >= a->first && outer < a->end && inner < a->inner &&
                         i % a->stride_outer % a->stride_inner < a->width;
        for (int64_t b = 0; b < a->element && !is_output; b++) {
            if (a->base[i * a->element + b] != CANARY) {
                return false;
            }
        }
    }
    return true;
}

bool conf_launch_is_intact(const conf_launch *l) {
    for (uint32_t i = 0; i < l->spec.num_rows; i++) {
        const attn_row *row = &l->rows[conf_launch_row(l, i)];
        area out = {.base = row->out,
                    .bytes = row->out ? l->out_bytes[i] : 0,
                    .element = attnd_dtype_bytes(l->spec.q_dtype),
                    .stride_outer = row->stride_out_token,
                    .stride_inner = row->stride_out_head,
                    .first = row->q_first,
                    .end = row->q_first + row->q_count,
                    .inner = l->spec.q_heads,
                    .width = l->spec.v_head_dim};
        // [q_heads, q_len]: the chunk is a range of width, so what lies before it is looked at
        // apart.
        area lse = {.base = (const unsigned char *)row->lse,
                    .bytes = row->lse ? l->lse_bytes[i] : 0,
                    .element = sizeof(float),
                    .stride_outer = row->stride_lse_head,
                    .stride_inner = row->stride_lse_head,
                    .end = l->spec.q_heads,
                    .inner = 1,
                    .width = row->q_first + row->q_count};
        for (int32_t h = 0; h < l->spec.q_heads && row->lse && row->q_first > 0; h++) {
            area before = {.base = (const unsigned char *)(row->lse + h * row->stride_lse_head),
                           .bytes = (size_t)row->q_first * sizeof(float),
                           .element = sizeof(float),
                           .stride_outer = row->q_first,
                           .stride_inner = row->q_first};
            if (!is_untouched(&before)) {
                return false;
            }
        }
        if (!is_untouched(&out) || !is_untouched(&lse)) {
            return false;
        }
    }
    return true;
}

const char *conf_text(const conf_spec *spec) {
    static char text[1024];
    int at = snprintf(
        text, sizeof(text),
        "seed %llu: q %s kv %s, heads %d/%d, head_dim %d/%d, block %d, features 0x%x%s, logit %g, "
        "rotary_dim %d",
        (unsigned long long)spec->seed, attnd_dtype_name(spec->q_dtype),
        attnd_dtype_name(spec->kv_dtype), spec->q_heads, spec->kv_heads, spec->head_dim,
        spec->v_head_dim, spec->block_tokens, spec->features,
        spec->is_fused   ? " fused"
        : spec->is_dense ? " dense"
                         : "",
        spec->logit, spec->rotary_dim);
    for (uint32_t i = 0; i < spec->num_rows && i < 6; i++) {
        const conf_row *r = &spec->rows[i];
        at += snprintf(text + at, sizeof(text) - (size_t)at, " | kv %d q %d new %d rows %d+%d",
                       r->kv_len, r->q_len, r->new_len, r->q_first, r->q_count);
    }
    return text;
}
