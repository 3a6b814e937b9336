// Rows of a step: prefix sums, and the pointers that follow from them.
#include "attention/attn_rows.h"

void attn_seq_place(attn_seq *s, uint32_t committed, uint32_t new_len, uint32_t cached,
                    uint32_t *rows, uint32_t *new_rows) {
    if (new_len) {
        s->rows = s->new_rows = new_len - cached;
        s->positions = s->positions ? s->positions + cached : NULL;
    }
    s->kv_len = (int32_t)(committed + new_len);
    s->row_start = *rows;
    s->new_start = *new_rows;
    *rows += s->rows;
    *new_rows += s->new_rows;
}

static const void *at(const void *base, int64_t elements, uint32_t elem_bytes) {
    return base ? (const uint8_t *)base + elements * elem_bytes : NULL;
}

void attn_seq_fill(const attn_seq *s, const attn_shape *shape, const attn_tensors *t,
                   attn_row *row) {
    uint32_t elem = attnd_dtype_bytes(shape->q_dtype);
    int64_t out_row = (int64_t)shape->q_heads * shape->v_head_dim;
    row->kv_len = s->kv_len;
    row->q_len = row->q_count = (int32_t)s->rows;
    row->q = at(t->q, s->row_start * t->q_stride[0], elem);
    row->stride_q_token = t->q_stride[0];
    row->stride_q_head = t->q_stride[1];
    row->out = (uint8_t *)t->out + s->row_start * out_row * elem;
    row->stride_out_token = out_row;
    row->stride_out_head = shape->v_head_dim;
    row->lse = t->lse ? t->lse + s->row_start : NULL;
    row->stride_lse_head = t->rows;
    row->q_positions = s->positions;
    row->tree_mask = s->tree;
    if (s->new_rows && t->k) {
        row->new_len = (int32_t)s->new_rows;
        row->k_new = at(t->k, s->new_start * t->k_stride[0], elem);
        row->v_new = at(t->v, s->new_start * t->v_stride[0], elem);
        row->stride_k_new_token = t->k_stride[0];
        row->stride_k_new_head = t->k_stride[1];
        row->stride_v_new_token = t->v_stride[0];
        row->stride_v_new_head = t->v_stride[1];
        row->k_positions = s->positions;
    }
}

attnd_err attn_mask_cut(const attn_seq *seqs, uint32_t num_seqs, uint32_t q_block,
                        uint32_t num_query_blocks, const uint32_t *start, const uint32_t *kv_blocks,
                        attn_block_mask *masks, attnd_errinfo *info) {
    if (q_block == 0) {
        return attnd_fail(info, ATTND_EINVAL, "block_mask", "q_block is 0");
    }
    if (!start) {
        return attnd_fail(info, ATTND_EINVAL, "block_mask", "start is NULL");
    }
    for (uint32_t b = 0; b < num_query_blocks; b++) {
        if (start[b + 1] < start[b]) {
            return attnd_fail(info, ATTND_EINVAL, "block_mask", "start goes down behind %u", b);
        }
    }
    uint64_t first = 0;
    for (uint32_t i = 0; i < num_seqs; i++) {
        uint32_t rows = seqs[i].rows;
        uint64_t num = rows ? (rows - 1) / q_block + 1 : 0;
        masks[i] = (attn_block_mask){.start = start + first,
                                     .kv_blocks = kv_blocks,
                                     .q_block = (int32_t)(q_block < rows ? q_block : rows)};
        first += num;
        if (first > num_query_blocks) {
            break;
        }
    }
    if (first != num_query_blocks) {
        return attnd_fail(info, ATTND_EINVAL, "block_mask",
                          "%u query blocks are not ceil(rows / %u) for each sequence",
                          num_query_blocks, q_block);
    }
    return ATTND_OK;
}
