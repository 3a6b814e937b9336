// Every check of a launch that the host can make, before anything changes.  Each error names the
// field of attn.h.  Arithmetic on sizes from the caller is checked for overflow, so that a kernel's
// plain 64-bit offsets are safe behind it.  Rows of one launch mostly share their small arrays
// (scales, RoPE tables, sinks); an array is looked at again only when its pointer differs from the
// row before.  Any thread.
#include <math.h>
#include <stddef.h>

#include "attention/attn.h"
#include "attention/attn_mask.h"

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

// extent returns the bytes from the first to behind the last element of a tensor [outer, inner,
// dim] whose dims lie side by side, or -1 when it does not fit 63 bits or a stride is negative.
static int64_t extent(int64_t outer, int64_t stride_outer, int64_t inner, int64_t stride_inner,
                      int64_t dim, uint32_t bytes) {
    int64_t a = 0;
    int64_t b = 0;
    if (stride_outer < 0 || stride_inner < 0 ||
        __builtin_mul_overflow(outer - 1, stride_outer, &a) ||
        __builtin_mul_overflow(inner - 1, stride_inner, &b) || __builtin_add_overflow(a, b, &a) ||
        __builtin_add_overflow(a, dim, &a) || __builtin_mul_overflow(a, (int64_t)bytes, &a)) {
        return -1;
    }
    return a;
}

// is_apart says that no two elements of a tensor [outer, inner, dim] share their place: one index
// nests in the other.
static bool is_apart(int64_t outer, int64_t stride_outer, int64_t inner, int64_t stride_inner,
                     int64_t dim) {
    int64_t inner_span = extent(inner, stride_inner, 1, 0, dim, 1);
    int64_t outer_span = extent(outer, stride_outer, 1, 0, dim, 1);
    bool inner_fits = inner == 1 || stride_inner >= dim;
    bool outer_fits = outer == 1 || stride_outer >= dim;
    return inner_span >= 0 && outer_span >= 0 &&
           ((inner_fits && (outer == 1 || stride_outer >= inner_span)) ||
            (outer_fits && (inner == 1 || stride_inner >= outer_span)));
}

static attnd_err check_dtypes(const attn_shape *s, attnd_errinfo *info) {
    FAIL_IF((uint32_t)s->q_dtype >= ATTND_NUM_DTYPES, ATTND_EINVAL, "q_dtype", "%d is no type",
            (int)s->q_dtype);
    FAIL_IF((uint32_t)s->kv_dtype >= ATTND_NUM_DTYPES, ATTND_EINVAL, "kv_dtype", "%d is no type",
            (int)s->kv_dtype);
    FAIL_IF(s->q_dtype == ATTND_F8E4M3, ATTND_ENOTSUP, "q_dtype",
            "queries in f8e4m3 are not supported");
    bool is_wide = s->q_dtype == ATTND_F32;
    FAIL_IF(s->kv_dtype != s->q_dtype && (s->kv_dtype != ATTND_F8E4M3 || is_wide), ATTND_ENOTSUP,
            "kv_dtype", "a cache of %s with queries of %s is not supported",
            attnd_dtype_name(s->kv_dtype), attnd_dtype_name(s->q_dtype));
    return ATTND_OK;
}

static attnd_err check_dim(const char *field, int32_t dim, attnd_errinfo *info) {
    FAIL_IF(dim < 1, ATTND_EINVAL, field, "%s %d is not positive", field, dim);
    FAIL_IF(dim % 8 != 0 || dim > ATTN_MAX_HEAD_DIM, ATTND_ENOTSUP, field,
            "%s %d: multiples of 8 up to %d are supported", field, dim, ATTN_MAX_HEAD_DIM);
    return ATTND_OK;
}

// check_block_strides wants no two elements of a block's K (or V) to share their place.  A block
// may be larger than block_stride: that is the unit of table entries, not the size of a block.
static attnd_err check_block_strides(const attn_shape *s, const char *field, int64_t stride_token,
                                     int64_t stride_head, int32_t dim, attnd_errinfo *info) {
    uint32_t bytes = attnd_dtype_bytes(s->kv_dtype);
    int64_t size = extent(s->kv_heads, stride_head, s->block_tokens, stride_token, dim, bytes);
    FAIL_IF(size < 0, ATTND_EINVAL, field, "%s: a stride is negative or too large", field);
    FAIL_IF(!is_apart(s->kv_heads, stride_head, s->block_tokens, stride_token, dim), ATTND_EINVAL,
            field, "%s: tokens and heads of a block overlap", field);
    return ATTND_OK;
}

attnd_err attn_check_shape(const attn_shape *s, attnd_errinfo *info) {
    TRY(check_dtypes(s, info));
    FAIL_IF(s->kv_heads < 1, ATTND_EINVAL, "kv_heads", "kv_heads %d is not positive", s->kv_heads);
    FAIL_IF(s->q_heads < 1 || s->q_heads % s->kv_heads != 0, ATTND_EINVAL, "q_heads",
            "q_heads %d is no multiple of kv_heads %d", s->q_heads, s->kv_heads);
    FAIL_IF(s->q_heads > ATTN_MAX_Q_HEADS, ATTND_ENOTSUP, "q_heads",
            "q_heads %d: up to %d are supported", s->q_heads, ATTN_MAX_Q_HEADS);
    TRY(check_dim("head_dim", s->head_dim, info));
    TRY(check_dim("v_head_dim", s->v_head_dim, info));
    FAIL_IF(s->block_tokens < 1 || s->block_tokens > ATTN_MAX_TOKENS, ATTND_EINVAL, "block_tokens",
            "block_tokens %d is not from 1 to %d", s->block_tokens, ATTN_MAX_TOKENS);
    uint32_t bytes = attnd_dtype_bytes(s->kv_dtype);
    FAIL_IF(bytes == 0 || s->block_stride % bytes != 0, ATTND_EINVAL, "block_stride",
            "block_stride %llu is no multiple of an element", (unsigned long long)s->block_stride);
    TRY(check_block_strides(s, "stride_k", s->stride_k_token, s->stride_k_head, s->head_dim, info));
    return check_block_strides(s, "stride_v", s->stride_v_token, s->stride_v_head, s->v_head_dim,
                               info);
}

static attnd_err check_lengths(const attn_shape *s, const attn_row *row, uint32_t i,
                               attnd_errinfo *info) {
    int32_t group = s->q_heads / s->kv_heads;
    FAIL_IF(row->kv_len < 0 || row->kv_len > ATTN_MAX_TOKENS, ATTND_EINVAL, "kv_len",
            "row %u: kv_len %d is not from 0 to %d", i, row->kv_len, ATTN_MAX_TOKENS);
    FAIL_IF(row->q_len < 0 || row->q_len > ATTN_MAX_TOKENS / group, ATTND_EINVAL, "q_len",
            "row %u: q_len %d is not from 0 to %d", i, row->q_len, ATTN_MAX_TOKENS / group);
    FAIL_IF(row->new_len < 0 || row->new_len > row->kv_len, ATTND_EINVAL, "new_len",
            "row %u: new_len %d is not from 0 to kv_len %d", i, row->new_len, row->kv_len);
    FAIL_IF(row->q_first < 0 || row->q_first > row->q_len, ATTND_EINVAL, "q_first",
            "row %u: q_first %d is not from 0 to q_len %d", i, row->q_first, row->q_len);
    FAIL_IF(row->q_count < 0 || row->q_count > row->q_len - row->q_first, ATTND_EINVAL, "q_count",
            "row %u: q_first %d and q_count %d go past q_len %d", i, row->q_first, row->q_count,
            row->q_len);
    return ATTND_OK;
}

static attnd_err check_logits(const attn_row *row, uint32_t i, attnd_errinfo *info) {
    FAIL_IF(row->flags & ~(uint32_t)ATTN_FLAGS, ATTND_EINVAL, "flags", "row %u: unknown flags 0x%x",
            i, row->flags & ~(uint32_t)ATTN_FLAGS);
    FAIL_IF(!isfinite(row->scale), ATTND_EINVAL, "scale", "row %u: scale is not finite", i);
    FAIL_IF(!isfinite(row->softcap) || row->softcap < 0, ATTND_EINVAL, "softcap",
            "row %u: softcap %g is not a finite number from 0 up", i, (double)row->softcap);
    FAIL_IF(row->window_left < -1, ATTND_EINVAL, "window_left",
            "row %u: window_left %d, -1 is unbounded", i, row->window_left);
    FAIL_IF(row->window_right < -1, ATTND_EINVAL, "window_right",
            "row %u: window_right %d, -1 is unbounded", i, row->window_right);
    return ATTND_OK;
}

// tensor is one of a row's tensors [tokens, heads, dim].
typedef struct tensor {
    const char *field;
    const void *data;
    int64_t tokens, stride_token, heads, stride_head, dim;
    uint32_t bytes; // an element
} tensor;

// check_tensor wants a tensor to be there, aligned to its elements, and of an extent that 63 bits
// hold.
static attnd_err check_tensor(const tensor *t, uint32_t i, attnd_errinfo *info) {
    FAIL_IF(!t->data, ATTND_EINVAL, t->field, "row %u: %s is NULL", i, t->field);
    FAIL_IF((uintptr_t)t->data % t->bytes != 0, ATTND_EINVAL, t->field,
            "row %u: %s is not aligned to its elements", i, t->field);
    FAIL_IF(extent(t->tokens, t->stride_token, t->heads, t->stride_head, t->dim, t->bytes) < 0,
            ATTND_EINVAL, t->field, "row %u: a stride of %s is negative or too large", i, t->field);
    return ATTND_OK;
}

static attnd_err check_out(const attn_shape *s, const attn_row *row, uint32_t i,
                           attnd_errinfo *info) {
    uint32_t bytes = attnd_dtype_bytes(s->q_dtype);
    const tensor out = {"out",         row->out,
                        row->q_len,    row->stride_out_token,
                        s->q_heads,    row->stride_out_head,
                        s->v_head_dim, bytes};
    const tensor lse = {"lse",      row->lse,     1, 0, s->q_heads, row->stride_lse_head,
                        row->q_len, sizeof(float)};
    TRY(check_tensor(&out, i, info));
    FAIL_IF(!is_apart(row->q_len, row->stride_out_token, s->q_heads, row->stride_out_head,
                      s->v_head_dim),
            ATTND_EINVAL, "out", "row %u: tokens and heads of out overlap", i);
    if (!row->lse) {
        return ATTND_OK;
    }
    TRY(check_tensor(&lse, i, info));
    FAIL_IF(s->q_heads > 1 && row->stride_lse_head < row->q_len, ATTND_EINVAL, "stride_lse_head",
            "row %u: stride_lse_head %lld is less than q_len %d", i,
            (long long)row->stride_lse_head, row->q_len);
    return ATTND_OK;
}

static attnd_err check_tensors(const attn_shape *s, const attn_row *row, uint32_t i,
                               attnd_errinfo *info) {
    uint32_t bytes = attnd_dtype_bytes(s->q_dtype);
    const tensor q = {
        "q",         row->q, row->q_len, row->stride_q_token, s->q_heads, row->stride_q_head,
        s->head_dim, bytes};
    const tensor k = {"k_new",      row->k_new,
                      row->new_len, row->stride_k_new_token,
                      s->kv_heads,  row->stride_k_new_head,
                      s->head_dim,  bytes};
    const tensor v = {"v_new",       row->v_new,
                      row->new_len,  row->stride_v_new_token,
                      s->kv_heads,   row->stride_v_new_head,
                      s->v_head_dim, bytes};
    if (row->q_count > 0) {
        TRY(check_tensor(&q, i, info));
        TRY(check_out(s, row, i, info));
    }
    if (row->new_len > 0) {
        TRY(check_tensor(&k, i, info));
        TRY(check_tensor(&v, i, info));
    }
    return ATTND_OK;
}

// part is a layer's K or V inside a block.
typedef struct part {
    const char *field;
    uint64_t offset;
    int64_t stride_token, stride_head;
    int32_t dim;
} part;

// check_inside wants the live bytes of the row's highest block to end inside the pool.
static attnd_err check_inside(const attn_params *p, const attn_row *row, const part *x,
                              uint64_t block, attnd_errinfo *info) {
    const attn_shape *s = &p->shape;
    int64_t tokens = row->kv_len < s->block_tokens ? row->kv_len : s->block_tokens;
    uint32_t bytes = attnd_dtype_bytes(s->kv_dtype);
    uint64_t end = 0;
    int64_t size = extent(s->kv_heads, x->stride_head, tokens, x->stride_token, x->dim, bytes);
    FAIL_IF(x->offset % bytes != 0, ATTND_EINVAL, x->field,
            "row %td: %s %llu is no multiple of an element", row - p->rows, x->field,
            (unsigned long long)x->offset);
    bool overflows = __builtin_mul_overflow(block, s->block_stride, &end) ||
                     __builtin_add_overflow(end, x->offset, &end) ||
                     __builtin_add_overflow(end, (uint64_t)size, &end);
    FAIL_IF(overflows || end > p->pool_bytes, ATTND_EINVAL, x->field,
            "row %td: block %llu at %s %llu ends behind the pool of %llu bytes", row - p->rows,
            (unsigned long long)block, x->field, (unsigned long long)x->offset,
            (unsigned long long)p->pool_bytes);
    return ATTND_OK;
}

// first_key returns the first key that the launch reads or appends: queries see by causal and
// window from the first one's on, and both ends of that only grow.
static int32_t first_key(const attn_row *row) {
    int32_t first = row->kv_len - row->new_len;
    if (row->q_count > 0) {
        int32_t seen = attn_mask_span(row, row->q_first, row->q_first).first;
        first = seen < first ? seen : first;
    }
    return first;
}

static attnd_err check_table(const attn_params *p, const attn_row *row, uint32_t i,
                             attnd_errinfo *info) {
    const attn_shape *s = &p->shape;
    if (row->kv_len == 0) {
        return ATTND_OK;
    }
    FAIL_IF(!row->table, ATTND_EINVAL, "table", "row %u: table is NULL", i);
    int32_t num = (row->kv_len - 1) / s->block_tokens + 1;
    uint32_t highest = 0;
    for (int32_t b = first_key(row) / s->block_tokens; b < num; b++) {
        highest = row->table[b] > highest ? row->table[b] : highest;
    }
    FAIL_IF(highest >= p->num_blocks, ATTND_EINVAL, "table",
            "row %u: an entry is block %u, the pool has %llu", i, highest,
            (unsigned long long)p->num_blocks);
    const part k = {"k_offset", row->k_offset, s->stride_k_token, s->stride_k_head, s->head_dim};
    const part v = {"v_offset", row->v_offset, s->stride_v_token, s->stride_v_head, s->v_head_dim};
    TRY(check_inside(p, row, &k, highest, info));
    return check_inside(p, row, &v, highest, info);
}

static bool all_finite(const float *x, int32_t num) {
    bool finite = true;
    for (int32_t i = 0; i < num; i++) {
        finite &= isfinite(x[i]) != 0;
    }
    return finite;
}

static bool all_positive(const float *x, int32_t num) {
    bool positive = all_finite(x, num);
    for (int32_t i = 0; i < num; i++) {
        positive &= x[i] > 0;
    }
    return positive;
}

// A sink of -inf is no sink.
static bool all_sinks(const float *x, int32_t num) {
    bool good = true;
    for (int32_t i = 0; i < num; i++) {
        good &= x[i] < INFINITY;
    }
    return good;
}

static attnd_err check_rope(const attn_shape *s, const attn_rope *rope, uint32_t i,
                            attnd_errinfo *info) {
    FAIL_IF(rope->rotary_dim < 2 || rope->rotary_dim % 2 != 0 || rope->rotary_dim > s->head_dim,
            ATTND_EINVAL, "rotary_dim",
            "row %u: rotary_dim %d is not even and from 2 to head_dim %d", i, rope->rotary_dim,
            s->head_dim);
    FAIL_IF(!rope->inv_freq || !all_finite(rope->inv_freq, rope->rotary_dim / 2), ATTND_EINVAL,
            "inv_freq", "row %u: inv_freq is NULL or not finite", i);
    FAIL_IF(!isfinite(rope->attention_factor), ATTND_EINVAL, "attention_factor",
            "row %u: attention_factor is not finite", i);
    return ATTND_OK;
}

// check_arrays checks what belongs to a layer; last is the row before, or NULL.
static attnd_err check_arrays(const attn_shape *s, const attn_row *row, const attn_row *last,
                              uint32_t i, attnd_errinfo *info) {
    static const attn_row none;
    last = last ? last : &none;
    FAIL_IF((row->k_scale || row->v_scale) && s->kv_dtype != ATTND_F8E4M3, ATTND_EINVAL,
            row->k_scale ? "k_scale" : "v_scale", "row %u: scales are for f8e4m3 only", i);
    FAIL_IF(row->k_scale && row->k_scale != last->k_scale &&
                !all_positive(row->k_scale, s->kv_heads),
            ATTND_EINVAL, "k_scale", "row %u: a k_scale is not finite and > 0", i);
    FAIL_IF(row->v_scale && row->v_scale != last->v_scale &&
                !all_positive(row->v_scale, s->kv_heads),
            ATTND_EINVAL, "v_scale", "row %u: a v_scale is not finite and > 0", i);
    FAIL_IF(row->sinks && row->sinks != last->sinks && !all_sinks(row->sinks, s->q_heads),
            ATTND_EINVAL, "sinks", "row %u: a sink is NaN or +inf", i);
    FAIL_IF(row->alibi_slopes && row->alibi_slopes != last->alibi_slopes &&
                !all_finite(row->alibi_slopes, s->q_heads),
            ATTND_EINVAL, "alibi_slopes", "row %u: a slope is not finite", i);
    return row->rope && row->rope != last->rope ? check_rope(s, row->rope, i, info) : ATTND_OK;
}

// check_list wants the blocks of one query block to ascend below num_kv_blocks.
static attnd_err check_list(const attn_block_mask *mask, int32_t q_block, uint32_t num_kv_blocks,
                            uint32_t i, attnd_errinfo *info) {
    uint32_t first = mask->start[q_block];
    uint32_t end = mask->start[q_block + 1];
    FAIL_IF(end < first, ATTND_EINVAL, "block_mask", "row %u: start goes down behind %d", i,
            q_block);
    FAIL_IF(end > first && !mask->kv_blocks, ATTND_EINVAL, "block_mask",
            "row %u: kv_blocks is NULL", i);
    for (uint32_t k = first; k < end; k++) {
        FAIL_IF(mask->kv_blocks[k] >= num_kv_blocks, ATTND_EINVAL, "block_mask",
                "row %u: block %u is behind kv_len", i, mask->kv_blocks[k]);
        FAIL_IF(k > first && mask->kv_blocks[k] <= mask->kv_blocks[k - 1], ATTND_EINVAL,
                "block_mask", "row %u: blocks of query block %d do not ascend", i, q_block);
    }
    return ATTND_OK;
}

attnd_err attn_check_mask(const attn_shape *s, const attn_row *row, uint32_t i,
                          attnd_errinfo *info) {
    const attn_block_mask *mask = row->block_mask;
    if (!mask || row->q_len == 0) {
        return ATTND_OK;
    }
    FAIL_IF(mask->q_block < 1, ATTND_EINVAL, "q_block", "row %u: q_block %d is not positive", i,
            mask->q_block);
    FAIL_IF(!mask->start, ATTND_EINVAL, "block_mask", "row %u: start is NULL", i);
    int32_t num_q_blocks = (row->q_len - 1) / mask->q_block + 1;
    uint32_t num_kv_blocks =
        row->kv_len == 0 ? 0 : ((uint32_t)row->kv_len - 1) / (uint32_t)s->block_tokens + 1;
    for (int32_t b = 0; b < num_q_blocks; b++) {
        TRY(check_list(mask, b, num_kv_blocks, i, info));
    }
    return ATTND_OK;
}

static attnd_err check_row(const attn_params *p, uint32_t i, attnd_errinfo *info) {
    const attn_row *row = &p->rows[i];
    TRY(check_lengths(&p->shape, row, i, info));
    TRY(check_logits(row, i, info));
    TRY(check_tensors(&p->shape, row, i, info));
    TRY(check_table(p, row, i, info));
    TRY(check_arrays(&p->shape, row, i > 0 ? row - 1 : NULL, i, info));
    return attn_check_mask(&p->shape, row, i, info);
}

attnd_err attn_check(const attn_params *p, attnd_errinfo *info) {
    TRY(attn_check_shape(&p->shape, info));
    FAIL_IF(p->num_splits < 0 || p->num_splits > ATTN_MAX_SPLITS, ATTND_EINVAL, "num_splits",
            "num_splits %d is not from 0 to %d", p->num_splits, ATTN_MAX_SPLITS);
    FAIL_IF(p->deterministic && p->num_splits != 0, ATTND_EINVAL, "num_splits",
            "forced splits and deterministic mode exclude each other");
    FAIL_IF(p->num_rows > 0 && !p->rows, ATTND_EINVAL, "rows", "rows is NULL");
    FAIL_IF((!p->pool && p->pool_bytes > 0) ||
                (uintptr_t)p->pool % attnd_dtype_bytes(p->shape.kv_dtype) != 0,
            ATTND_EINVAL, "pool", "pool is NULL or not aligned to its elements");
    for (uint32_t i = 0; i < p->num_rows; i++) {
        TRY(check_row(p, i, info));
    }
    return ATTND_OK;
}
