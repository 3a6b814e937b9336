// The plan of the decode kernel (attn_cuda_plan.h has the picture): rows become records, records
// become positions, positions are dealt to CTAs.  128 rows take some microseconds, because nothing
// is listed a head, a tile or a share: a CTA gets its first position and walks on by itself.
//
// Checks: what the kernel cannot do is refused by name, and what would make it read or write out of
// bounds is refused as far as the host can see it (tables and masks are device memory).
#include <math.h>
#include <string.h>

#include "attention/attn_mask.h"
#include "attention/cuda/attn_cuda_plan.h"

#define FAIL_IF(cond, code, field, ...)                        \
    do {                                                       \
        if (cond) {                                            \
            return attnd_fail(info, code, field, __VA_ARGS__); \
        }                                                      \
    } while (0)

#define TRY(call)               \
    do {                        \
        attnd_err err = (call); \
        if (err != ATTND_OK) {  \
            return err;         \
        }                       \
    } while (0)

#define LOG2_E 1.4426950408889634

enum {
    COPY_ALIGN = 16, // bytes, of everything that bulk copies read
    // Starting a head takes as long as so many tiles.  While the consumers end one head and start
    // the next, the CTA has less on its way and the other CTAs get more of the memory's bandwidth.
    HEAD_COST = 10,
};

attnd_err attn_cuda_check_shape(const attn_shape *s, attnd_errinfo *info) {
    FAIL_IF(s->q_dtype != ATTND_BF16 && s->q_dtype != ATTND_F16, ATTND_ENOTSUP, "q_dtype",
            "the CUDA kernels take bf16 and f16, not %s", attnd_dtype_name(s->q_dtype));
    FAIL_IF(s->kv_dtype != s->q_dtype, ATTND_ENOTSUP, "kv_dtype",
            "the CUDA kernels take a cache of q_dtype, not %s", attnd_dtype_name(s->kv_dtype));
    FAIL_IF(s->head_dim != 64 && s->head_dim != 128, ATTND_ENOTSUP, "head_dim",
            "the CUDA kernels take head_dim 64 and 128, not %d", s->head_dim);
    FAIL_IF(s->v_head_dim != s->head_dim, ATTND_ENOTSUP, "v_head_dim",
            "the CUDA kernels take v_head_dim = head_dim %d, not %d", s->head_dim, s->v_head_dim);
    FAIL_IF(s->kv_heads < 1 || s->q_heads < 1 || s->q_heads % s->kv_heads != 0 ||
                s->q_heads > ATTN_MAX_Q_HEADS,
            ATTND_EINVAL, "q_heads", "q_heads %d is no multiple of kv_heads %d up to %d",
            s->q_heads, s->kv_heads, ATTN_MAX_Q_HEADS);
    FAIL_IF(s->block_tokens < 1 || s->block_tokens > ATTN_MAX_TOKENS, ATTND_EINVAL, "block_tokens",
            "block_tokens %d is not from 1 to %d", s->block_tokens, ATTN_MAX_TOKENS);
    FAIL_IF(s->block_tokens % ATTN_CUDA_TILE_TOKENS != 0, ATTND_ENOTSUP, "block_tokens",
            "the CUDA kernels take multiples of %d tokens, not %d", ATTN_CUDA_TILE_TOKENS,
            s->block_tokens);
    FAIL_IF(s->stride_k_token != s->head_dim, ATTND_ENOTSUP, "stride_k_token",
            "the CUDA kernels take head-major blocks (stride %d), not %lld", s->head_dim,
            (long long)s->stride_k_token);
    FAIL_IF(s->stride_v_token != s->head_dim, ATTND_ENOTSUP, "stride_v_token",
            "the CUDA kernels take head-major blocks (stride %d), not %lld", s->head_dim,
            (long long)s->stride_v_token);
    FAIL_IF(s->stride_k_head < 0 || s->stride_k_head % 8 != 0, ATTND_ENOTSUP, "stride_k_head",
            "the CUDA kernels take multiples of 8 elements, not %lld", (long long)s->stride_k_head);
    FAIL_IF(s->stride_v_head < 0 || s->stride_v_head % 8 != 0, ATTND_ENOTSUP, "stride_v_head",
            "the CUDA kernels take multiples of 8 elements, not %lld", (long long)s->stride_v_head);
    FAIL_IF(s->block_stride % COPY_ALIGN != 0, ATTND_ENOTSUP, "block_stride",
            "the CUDA kernels take multiples of %d bytes, not %llu", COPY_ALIGN,
            (unsigned long long)s->block_stride);
    return ATTND_OK;
}

static attnd_err check_lengths(int32_t most, const attn_row *row, uint32_t i, attnd_errinfo *info) {
    FAIL_IF(row->kv_len < 0 || row->kv_len > ATTN_MAX_TOKENS, ATTND_EINVAL, "kv_len",
            "row %u: kv_len %d is not from 0 to %d", i, row->kv_len, ATTN_MAX_TOKENS);
    FAIL_IF(row->q_len < 0 || row->q_len > most, ATTND_EINVAL, "q_len",
            "row %u: q_len %d is not from 0 to %d", i, row->q_len, most);
    FAIL_IF(row->new_len < 0 || row->new_len > row->kv_len, ATTND_EINVAL, "new_len",
            "row %u: new_len %d is not from 0 to kv_len %d", i, row->new_len, row->kv_len);
    FAIL_IF(row->q_first < 0 || row->q_first > row->q_len, ATTND_EINVAL, "q_first",
            "row %u: q_first %d is not from 0 to q_len %d", i, row->q_first, row->q_len);
    FAIL_IF(row->q_count < 0 || row->q_count > row->q_len - row->q_first, ATTND_EINVAL, "q_count",
            "row %u: q_first %d and q_count %d go past q_len %d", i, row->q_first, row->q_count,
            row->q_len);
    FAIL_IF(row->kv_len > 0 && !row->table, ATTND_EINVAL, "table", "row %u: table is NULL", i);
    return ATTND_OK;
}

// is_masked says whether the bulk kernel cannot take a row's mask.
static bool is_masked(const attn_row *row) {
    return row->block_mask || (row->tree_mask && row->q_len > ATTN_CUDA_TREE_TOKENS);
}

// check_masks checks the masks that are lists.
static attnd_err check_masks(const attn_params *p, const attn_row *row, attn_cuda_masks masks,
                             uint32_t i, attnd_errinfo *info) {
    const attn_block_mask *mask = row->block_mask;
    FAIL_IF(is_masked(row) && masks == ATTN_CUDA_MASKS_NONE, ATTND_ENOTSUP,
            mask ? "block_mask" : "tree_mask",
            "row %u: this build has no kernel for a block mask or a tree mask of more than %d "
            "tokens on this GPU",
            i, ATTN_CUDA_TREE_TOKENS);
    FAIL_IF(is_masked(row) && masks == ATTN_CUDA_MASKS_PREFILL && p->num_splits != 0, ATTND_ENOTSUP,
            "num_splits", "row %u: with a %s the prefill kernel takes no forced splits", i,
            mask ? "block mask" : "tree mask of more than 32 tokens");
    FAIL_IF(mask && mask->q_block < 1, ATTND_EINVAL, "q_block", "row %u: q_block %d is less than 1",
            i, mask->q_block);
    FAIL_IF(mask && (!mask->start || !mask->kv_blocks), ATTND_EINVAL, "block_mask",
            "row %u: a list of the block mask is NULL", i);
    return ATTND_OK;
}

static attnd_err check_logits(const attn_params *p, const attn_row *row, attn_cuda_masks masks,
                              uint32_t i, attnd_errinfo *info) {
    FAIL_IF(row->flags & ~(uint32_t)ATTN_FLAGS, ATTND_EINVAL, "flags", "row %u: unknown flags 0x%x",
            i, row->flags);
    FAIL_IF(!isfinite(row->scale), ATTND_EINVAL, "scale", "row %u: scale is not finite", i);
    FAIL_IF(!isfinite(row->softcap) || row->softcap < 0, ATTND_EINVAL, "softcap",
            "row %u: softcap %g is not a finite number from 0 up", i, (double)row->softcap);
    FAIL_IF(row->window_left < -1, ATTND_EINVAL, "window_left",
            "row %u: window_left %d, -1 is unbounded", i, row->window_left);
    FAIL_IF(row->window_right < -1, ATTND_EINVAL, "window_right",
            "row %u: window_right %d, -1 is unbounded", i, row->window_right);
    FAIL_IF(row->k_scale || row->v_scale, ATTND_EINVAL, row->k_scale ? "k_scale" : "v_scale",
            "row %u: scales are for f8e4m3 only", i);
    TRY(check_masks(p, row, masks, i, info));
    const attn_rope *rope = row->rope;
    FAIL_IF(rope && (rope->rotary_dim < 2 || rope->rotary_dim % 2 != 0 ||
                     rope->rotary_dim > p->shape.head_dim),
            ATTND_EINVAL, "rotary_dim",
            "row %u: rotary_dim %d is not even and from 2 to head_dim %d", i, rope->rotary_dim,
            p->shape.head_dim);
    FAIL_IF(rope && !rope->inv_freq, ATTND_EINVAL, "inv_freq", "row %u: inv_freq is NULL", i);
    FAIL_IF(rope && !isfinite(rope->attention_factor), ATTND_EINVAL, "attention_factor",
            "row %u: attention_factor is not finite", i);
    return ATTND_OK;
}

// check_tensor wants 16-bit elements [.., .., head_dim] that 16-byte copies can move.
static attnd_err check_tensor(const char *field, const void *data, int64_t stride_token,
                              int64_t stride_head, uint32_t i, attnd_errinfo *info) {
    FAIL_IF(!data, ATTND_EINVAL, field, "row %u: %s is NULL", i, field);
    FAIL_IF(stride_token < 0 || stride_head < 0, ATTND_EINVAL, field,
            "row %u: a stride of %s is negative", i, field);
    FAIL_IF(((uintptr_t)data % COPY_ALIGN) != 0 || ((stride_token | stride_head) & 7) != 0,
            ATTND_ENOTSUP, field, "row %u: the CUDA kernels take %s aligned to %d bytes", i, field,
            COPY_ALIGN);
    return ATTND_OK;
}

// most_queries is the longest q_len whose query rows can be counted.
static int32_t most_queries(const attn_shape *s) {
    return ATTN_MAX_TOKENS / (s->q_heads / s->kv_heads);
}

attnd_err attn_cuda_check_row(const attn_params *p, const attn_row *row, attn_cuda_masks masks,
                              uint32_t i, attnd_errinfo *info) {
    TRY(check_lengths(most_queries(&p->shape), row, i, info));
    return check_logits(p, row, masks, i, info);
}

// check_offset wants a layer's K or V to begin inside the pool, where 16-byte copies can reach it.
// It may lie behind block_stride, which is the unit of table entries, not the size of a block.
static attnd_err check_offset(const char *field, const attn_params *p, uint64_t offset, uint32_t i,
                              attnd_errinfo *info) {
    FAIL_IF(offset % COPY_ALIGN != 0 || offset >= p->pool_bytes, ATTND_EINVAL, field,
            "row %u: %s %llu is not a multiple of %d inside the pool of %llu bytes", i, field,
            (unsigned long long)offset, COPY_ALIGN, (unsigned long long)p->pool_bytes);
    return ATTND_OK;
}

static attnd_err check_row(const attn_params *p, const attn_row *row, attn_cuda_masks masks,
                           int32_t most, uint32_t i, attnd_errinfo *info) {
    TRY(check_lengths(most, row, i, info));
    TRY(check_logits(p, row, masks, i, info));
    if (row->q_count > 0) {
        TRY(check_tensor("q", row->q, row->stride_q_token, row->stride_q_head, i, info));
        TRY(check_tensor("out", row->out, row->stride_out_token, row->stride_out_head, i, info));
        FAIL_IF(row->lse && row->stride_lse_head < row->q_len && p->shape.q_heads > 1, ATTND_EINVAL,
                "stride_lse_head", "row %u: stride_lse_head %lld is less than q_len %d", i,
                (long long)row->stride_lse_head, row->q_len);
    }
    if (row->new_len > 0) {
        TRY(check_tensor("k_new", row->k_new, row->stride_k_new_token, row->stride_k_new_head, i,
                         info));
        TRY(check_tensor("v_new", row->v_new, row->stride_v_new_token, row->stride_v_new_head, i,
                         info));
    }
    TRY(check_offset("k_offset", p, row->k_offset, i, info));
    return check_offset("v_offset", p, row->v_offset, i, info);
}

static attnd_err check_params(const attn_params *p, attnd_errinfo *info) {
    FAIL_IF(p->num_rows > 0 && !p->rows, ATTND_EINVAL, "rows", "rows is NULL");
    FAIL_IF(p->num_rows > 0 && (!p->pool || ((uintptr_t)p->pool % COPY_ALIGN) != 0), ATTND_EINVAL,
            "pool", "the pool is not there, or not aligned to %d bytes", COPY_ALIGN);
    FAIL_IF(p->num_splits < 0 || p->num_splits > ATTN_MAX_SPLITS, ATTND_EINVAL, "num_splits",
            "num_splits %d is not from 0 to %d", p->num_splits, ATTN_MAX_SPLITS);
    FAIL_IF(p->deterministic && p->num_splits != 0, ATTND_EINVAL, "num_splits",
            "forced splits are refused in deterministic mode");
    return ATTND_OK;
}

static uint32_t ceil_div(uint64_t a, uint64_t b) {
    return (uint32_t)((a + b - 1) / b);
}

// maker is the plan while it is made.
typedef struct maker {
    const attn_params *p;
    const attn_cuda_limits *limits;
    attn_cuda_record *records;
    attn_cuda_mask *masks; // behind max_records records, until their number is known
    attn_cuda_head *head;
    int32_t group;          // query heads a KV head
    int32_t heads_at_once;  // of the group, in a record
    int32_t tokens_at_once; // in a record
    uint32_t heads_inverse; // of heads_at_once
    uint64_t tiles, heads;  // sums over records, a head
    uint32_t query_rows;
    float scale_log2; // of rows without a scale
} maker;

// set_tensors fills what does not depend on which query rows a record has.
static void set_tensors(const maker *m, const attn_row *row, attn_cuda_record *r) {
    r->k_new = row->k_new;
    r->v_new = row->v_new;
    r->table = row->table;
    r->k = (char *)m->p->pool + row->k_offset;
    r->v = (char *)m->p->pool + row->v_offset;
    r->sinks = row->sinks;
    r->alibi_slopes = row->alibi_slopes;
    r->inv_freq = row->rope ? row->rope->inv_freq : NULL;
    r->k_positions = row->k_positions;
    r->q_token_bytes = row->stride_q_token * 2;
    r->q_head_bytes = row->stride_q_head * 2;
    r->out_token = row->stride_out_token;
    r->out_head = row->stride_out_head;
    r->lse_head = row->stride_lse_head;
    r->k_new_token_bytes = row->stride_k_new_token * 2;
    r->k_new_head_bytes = row->stride_k_new_head * 2;
    r->v_new_token_bytes = row->stride_v_new_token * 2;
    r->v_new_head_bytes = row->stride_v_new_head * 2;
    r->kv_len = row->kv_len;
    r->new_len = row->new_len;
    r->tree_first = row->kv_len - row->q_len;
    r->rotary_dim = row->rope ? row->rope->rotary_dim : 0;
    r->attention_factor = row->rope ? row->rope->attention_factor : 0;
    r->scale_log2 = row->scale != 0 ? (float)((double)row->scale * LOG2_E) : m->scale_log2;
    r->cap_log2 = (float)((double)row->softcap * LOG2_E);
    r->cap_scale = row->softcap > 0 ? r->scale_log2 / r->cap_log2 : 0;
}

// set_queries points a record at its first token.
static void set_queries(const attn_row *row, int32_t token, int32_t tokens, attn_cuda_record *r) {
    r->q = (const char *)row->q + token * row->stride_q_token * 2;
    r->out = (char *)row->out + token * row->stride_out_token * 2;
    r->lse = row->lse ? row->lse + token : NULL;
    r->q_positions = row->q_positions ? row->q_positions + token : NULL;
    int64_t tree_words = ((int64_t)row->q_len + 63) / 64;
    r->tree_mask = row->tree_mask ? row->tree_mask + token * tree_words : NULL;
    r->position = row->kv_len - row->q_len + token;
    r->tokens = tokens;
}

// set_span fills the keys to read: what the query rows see, and what the record appends.
static void set_span(const attn_row *row, int32_t token, attn_cuda_record *r) {
    attn_span low = {0, 0};
    attn_span high = {0, 0};
    if (r->tokens > 0) {
        low = high = attn_mask_span(row, token, token);
    }
    if (r->tokens > 1) {
        high = attn_mask_span(row, token + r->tokens - 1, token + r->tokens - 1);
    }
    int32_t end = low.end < r->tree_first || !r->tree_mask ? low.end : r->tree_first;
    r->full_first = high.first;
    r->full_end = r->alibi_slopes ? 0 : end;
    attn_span span = {low.first, high.end};
    if (r->flags & ATTN_CUDA_APPENDS) {
        int32_t first_new = row->kv_len - row->new_len;
        span.first = span.first >= span.end || span.first > first_new ? first_new : span.first;
        span.end = row->kv_len;
    }
    bool empty = span.first >= span.end;
    r->tile_first = empty ? 0 : span.first / ATTN_CUDA_TILE_TOKENS;
    r->tile_end = empty ? 0 : (span.end - 1) / ATTN_CUDA_TILE_TOKENS + 1;
    r->part_origin = r->tile_first;
    r->part_tiles = 1;
    r->length = (uint32_t)(r->tile_end - r->tile_first) + HEAD_COST;
    r->slot_first = 0;
}

// set_mask gives a record its query block's list.
static void set_mask(maker *m, const attn_row *row, int32_t token, attn_cuda_record *r) {
    const attn_block_mask *mask = row->block_mask;
    r->mask = 0;
    if (mask && r->tokens > 0) {
        m->masks[m->head->num_masks++] =
            (attn_cuda_mask){mask->start + token / mask->q_block, mask->kv_blocks};
        r->mask = m->head->num_masks;
    }
    m->head->is_masked |= r->tokens > 0 && is_masked(row);
}

// inverse returns x with i * x >> 16 = i / heads, for i and heads up to ATTN_CUDA_QUERY_ROWS.
static uint32_t inverse(int32_t heads) {
    return 65536 / (uint32_t)heads + 1;
}

// add_record appends one record of a row: tokens [token, token + tokens), heads [head, head +
// heads) of each group.
static attnd_err add_record(maker *m, const attn_row *row, int32_t token, int32_t tokens,
                            int32_t head, int32_t heads, bool appends, attnd_errinfo *info) {
    FAIL_IF(m->head->num_records == m->limits->max_records, ATTND_EMSGSIZE, "rows",
            "the rows need more than the %u records of the plan", m->limits->max_records);
    attn_cuda_record *r = &m->records[m->head->num_records++];
    set_tensors(m, row, r);
    set_queries(row, token, tokens, r);
    r->head_first = head;
    r->heads = heads;
    r->heads_inverse = heads == m->heads_at_once ? m->heads_inverse : inverse(heads);
    r->flags = row->flags | (appends ? ATTN_CUDA_APPENDS : 0) |
               (tokens * heads < row->q_count * m->group ? ATTN_CUDA_REREAD : 0) |
               (row->rope && row->rope->interleaved ? ATTN_CUDA_INTERLEAVED : 0);
    const attn_span seen = attn_mask_seen(row, token);
    r->seen_first = seen.first;
    r->seen_end = seen.end;
    set_span(row, token, r);
    set_mask(m, row, token, r);
    uint32_t query_rows = (uint32_t)(tokens * heads);
    m->query_rows = query_rows > m->query_rows ? query_rows : m->query_rows;
    m->tiles += (uint64_t)(r->tile_end - r->tile_first);
    m->heads++;
    return ATTND_OK;
}

// block_rest returns how many tokens of a row's query block are left from `token` on.
static int32_t block_rest(const attn_row *row, int32_t token) {
    return row->block_mask ? row->block_mask->q_block - token % row->block_mask->q_block
                           : ATTN_MAX_TOKENS;
}

// add_row cuts the query rows of a row into records, each in one query block.  The last one
// appends: it reads the newest keys anyway.
static attnd_err add_row(maker *m, const attn_row *row, attnd_errinfo *info) {
    int32_t group = m->group;
    int32_t heads = m->heads_at_once;
    int32_t tokens = m->tokens_at_once;
    int32_t end = row->q_first + row->q_count;
    if (row->q_count > 0 && row->q_count <= tokens && heads == group && !row->block_mask) {
        // one record, mostly
        return add_record(m, row, row->q_first, row->q_count, 0, group, row->new_len > 0, info);
    }
    for (int32_t token = row->q_first, num; token < end; token += num) {
        num = end - token < tokens ? end - token : tokens;
        num = num < block_rest(row, token) ? num : block_rest(row, token);
        for (int32_t head = 0; head < group; head += heads) {
            int32_t num_heads = group - head < heads ? group - head : heads;
            bool is_last = token + num == end && head + num_heads == group;
            TRY(add_record(m, row, token, num, head, num_heads, is_last && row->new_len > 0, info));
        }
    }
    if (row->q_count == 0 && row->new_len > 0) {
        TRY(add_record(m, row, 0, 0, 0, 1, true, info));
    }
    return ATTND_OK;
}

// token_records returns how many records so many tokens of one query block take.
static uint64_t token_records(const attn_shape *s, int32_t tokens) {
    const uint32_t group = (uint32_t)(s->q_heads / s->kv_heads);
    const uint32_t heads = group < ATTN_CUDA_QUERY_ROWS ? group : ATTN_CUDA_QUERY_ROWS;
    return (uint64_t)ceil_div(group, heads) *
           ceil_div((uint64_t)tokens, ATTN_CUDA_QUERY_ROWS / heads);
}

uint64_t attn_cuda_row_records(const attn_shape *s, const attn_row *row, attn_cuda_masks masks) {
    if (row->q_count == 0) {
        return row->new_len > 0;
    }
    if (is_masked(row) && masks == ATTN_CUDA_MASKS_PREFILL) {
        return 1;
    }
    const int32_t rest = block_rest(row, row->q_first);
    const int32_t first = rest < row->q_count ? rest : row->q_count;
    const int32_t block = row->block_mask ? row->block_mask->q_block : ATTN_MAX_TOKENS;
    const int32_t behind = row->q_count - first;
    return token_records(s, first) + (uint64_t)(behind / block) * token_records(s, block) +
           token_records(s, behind % block);
}

// small_part returns the tiles of a part with which every CTA gets at most one part and none gets
// much more than its share, or 0: then cutting wherever a CTA ends is better.
static int32_t small_part(const maker *m, uint32_t share) {
    uint32_t kv_heads = (uint32_t)m->p->shape.kv_heads;
    if (m->heads * kv_heads > m->limits->num_ctas) {
        return 0;
    }
    for (uint32_t part = share; part <= share + 1 + share / 64; part++) {
        uint64_t parts = 0;
        for (uint32_t i = 0; i < m->head->num_records; i++) {
            const attn_cuda_record *r = &m->records[i];
            uint32_t num = ceil_div((uint64_t)(r->tile_end - r->tile_first), part);
            parts += num > 0 ? num : 1;
        }
        if (parts * kv_heads <= m->limits->num_ctas) {
            return (int32_t)part;
        }
    }
    return 0;
}

// cut_parts gives a record parts of part_tiles tiles (0: num_splits equal ones).
static void cut_parts(const maker *m, attn_cuda_record *r, int32_t part_tiles) {
    int32_t tiles = r->tile_end - r->tile_first;
    if (part_tiles == 0) {
        part_tiles = (int32_t)ceil_div((uint64_t)tiles, (uint64_t)m->p->num_splits);
    }
    r->part_tiles = part_tiles > 0 ? part_tiles : 1;
    r->part_origin =
        m->p->deterministic ? r->tile_first - r->tile_first % r->part_tiles : r->tile_first;
    uint32_t num = ceil_div((uint64_t)(r->tile_end - r->part_origin), (uint64_t)r->part_tiles);
    r->length = num > 0 ? num : 1;
}

// cut_all decides the mode, and gives every record its length and its place on the line.
static uint64_t cut_all(maker *m, uint32_t *max_parts) {
    const attn_params *p = m->p;
    uint64_t tiles = m->tiles * (uint64_t)p->shape.kv_heads;
    uint32_t share = ceil_div(tiles, m->limits->num_ctas);
    share = share > m->limits->min_part_tiles ? share : m->limits->min_part_tiles;
    int32_t part_tiles = p->deterministic     ? ATTN_SPLIT_TOKENS / ATTN_CUDA_TILE_TOKENS
                         : p->num_splits == 0 ? small_part(m, share)
                                              : 0;
    m->head->is_parts = p->deterministic || p->num_splits > 0 || part_tiles > 0;
    uint64_t line = 0;
    for (uint32_t i = 0; i < m->head->num_records; i++) {
        attn_cuda_record *r = &m->records[i];
        if (m->head->is_parts) {
            cut_parts(m, r, part_tiles);
        }
        r->line_first = (uint32_t)line;
        line += (uint64_t)r->length * (uint64_t)p->shape.kv_heads;
        *max_parts = r->length > *max_parts ? r->length : *max_parts;
    }
    return line;
}

// even_share returns a share a little larger than the one given that cuts heads of one length
// evenly, or not at all; the one given when there is none.  Memory is the bound, and all but the
// very last SMs read it as fast as all: a few idle ones cost less than states to be merged.
static uint64_t even_share(const maker *m, uint64_t share) {
    const uint32_t length = m->records[0].length;
    for (uint32_t i = 1; i < m->head->num_records; i++) {
        if (m->records[i].length != length) {
            return share;
        }
    }
    uint64_t even =
        length < share ? (share + length - 1) / length * length : ceil_div(length, length / share);
    return even <= share + share / 20 + 1 ? even : share;
}

// cut_line deals out the line.
static void cut_line(maker *m, uint64_t line) {
    const uint32_t least = m->limits->min_part_tiles;
    uint64_t share = ceil_div(line, m->limits->num_ctas);
    if (!m->head->is_parts && m->head->num_records > 0) {
        share = even_share(m, share > least ? share : least);
    }
    m->head->total = (uint32_t)line;
    m->head->share = share > 0 ? (uint32_t)share : 1;
}

// place_slots gives records of more than one part their slots.
static attnd_err place_slots(maker *m, attnd_errinfo *info) {
    const attn_shape *s = &m->p->shape;
    uint64_t slots = m->head->is_parts ? 0 : 2 * (uint64_t)m->limits->num_ctas;
    for (uint32_t i = 0; m->head->is_parts && i < m->head->num_records; i++) {
        attn_cuda_record *r = &m->records[i];
        if (r->length > 1 && r->tokens > 0) {
            r->slot_first = (uint32_t)slots;
            slots += (uint64_t)r->length * (uint64_t)s->kv_heads;
        }
    }
    uint64_t floats = slots * m->query_rows * (uint64_t)(s->head_dim + 4);
    FAIL_IF(floats > m->limits->slot_floats, ATTND_EMSGSIZE, "rows",
            "the parts of the rows need %llu bytes of the workspace's %llu",
            (unsigned long long)floats * 4, (unsigned long long)m->limits->slot_floats * 4);
    return ATTND_OK;
}

// place_starts finds where each CTA begins.
static void place_starts(maker *m) {
    attn_cuda_start *starts = attn_cuda_starts(m->head);
    const uint32_t share = m->head->share;
    uint32_t record = 0;
    for (uint32_t cta = 0; cta < m->limits->num_ctas; cta++) {
        uint64_t position = (uint64_t)cta * share;
        if (position >= m->head->total) {
            starts[cta] = (attn_cuda_start){m->head->num_records, 0, 0, 0};
            continue;
        }
        while (record + 1 < m->head->num_records && m->records[record + 1].line_first <= position) {
            record++;
        }
        uint32_t inside = (uint32_t)position - m->records[record].line_first;
        uint32_t length = m->records[record].length;
        uint32_t kv_head = inside / length;
        starts[cta] = (attn_cuda_start){record, kv_head, inside - kv_head * length, 0};
    }
}

attnd_err attn_cuda_plan_make(attn_cuda_head *head, const attn_params *p,
                              const attn_cuda_limits *limits, attn_choice *choice,
                              attnd_errinfo *info) {
    memset(head, 0, sizeof(*head));
    TRY(check_params(p, info));
    maker m = {.p = p,
               .limits = limits,
               .head = head,
               .records = attn_cuda_records(head, limits->num_ctas),
               .masks = (attn_cuda_mask *)(attn_cuda_records(head, limits->num_ctas) +
                                           limits->max_records),
               .group = p->shape.q_heads / p->shape.kv_heads,
               .scale_log2 = (float)(LOG2_E / sqrt((double)p->shape.head_dim))};
    m.heads_at_once = m.group < ATTN_CUDA_QUERY_ROWS ? m.group : ATTN_CUDA_QUERY_ROWS;
    m.tokens_at_once = ATTN_CUDA_QUERY_ROWS / m.heads_at_once;
    m.heads_inverse = inverse(m.heads_at_once);
    const int32_t most = most_queries(&p->shape);
    attnd_err err = ATTND_OK;
    for (uint32_t i = 0; i < p->num_rows && err == ATTND_OK; i++) {
        const attn_row *row = &p->rows[i];
        err = check_row(p, row, limits->masks, most, i, info);
        if (err == ATTND_OK && attn_prefill_takes(p, row, &limits->prefill)) {
            head->num_left++;
        } else if (err == ATTND_OK) {
            err = add_row(&m, row, info);
        }
    }
    memmove(m.records + head->num_records, m.masks, head->num_masks * sizeof(*m.masks));
    uint32_t max_parts = 0;
    uint64_t line = cut_all(&m, &max_parts);
    if (err == ATTND_OK && line > INT32_MAX) {
        err = attnd_fail(info, ATTND_EMSGSIZE, "rows", "the rows have %llu tiles, the most is %d",
                         (unsigned long long)line, INT32_MAX);
    }
    if (err == ATTND_OK) {
        cut_line(&m, line);
        err = place_slots(&m, info);
    }
    if (err != ATTND_OK) {
        memset(head, 0, sizeof(*head));
        return err;
    }
    head->query_rows = m.query_rows;
    place_starts(&m);
    if (choice) {
        choice->rows = p->num_rows;
        uint32_t shares = (max_parts - 1) / head->share + 2; // the most that a head is cut into
        choice->splits = head->is_parts ? max_parts : shares;
    }
    return ATTND_OK;
}
