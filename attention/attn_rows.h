// attn_rows says which rows of a step's tensors belong to which of its sequences, and writes what
// of a launch's row follows from that.  A step's tensors pack the rows of all its sequences in step
// order: q [rows, q_heads, head_dim], k and v [new rows, kv_heads, dim].  The daemon lays out steps
// by this, and so do engines in clients' processes.  No allocation.  Any thread.
#ifndef ATTND_ATTENTION_ATTN_ROWS_H
#define ATTND_ATTENTION_ATTN_ROWS_H

#include "attention/attn.h"

// attn_seq is one sequence of a step, as its launches see it.
typedef struct attn_seq {
    uint32_t rows;            // query rows: new_len - cached, or q_len when read only
    uint32_t new_rows;        // rows when it appends, else 0
    uint32_t row_start;       // first of its rows in q and out
    uint32_t new_start;       // first of its rows in k and v
    int32_t kv_len;           // after the append
    const int32_t *positions; // [rows], NULL = default
    const uint64_t *tree;     // [rows, ceil(rows / 64)], NULL = none
} attn_seq;

// attn_seq_place lays out the next sequence of a step behind *rows and *new_rows, which it counts
// on.  s->rows is q_len, and s->positions those of all new tokens, cached ones included, before.
void attn_seq_place(attn_seq *s, uint32_t committed, uint32_t new_len, uint32_t cached,
                    uint32_t *rows, uint32_t *new_rows);

// attn_tensors is where a layer's q, k, v, out and lse lie, of all sequences of a step.
typedef struct attn_tensors {
    const void *q, *k, *v; // k = v = NULL: nothing is appended
    void *out;             // [rows, q_heads, v_head_dim], contiguous
    float *lse;            // [q_heads, rows], may be NULL
    uint32_t rows;
    int64_t q_stride[2], k_stride[2], v_stride[2]; // elements: token, head
} attn_tensors;

// attn_seq_fill fills in what of a launch's row is the sequence's: lengths, tensors, positions,
// tree mask.  The layer's is attn_layer_fill's, the table the caller's.
void attn_seq_fill(const attn_seq *s, const attn_shape *shape, const attn_tensors *t,
                   attn_row *row);

// attn_mask_cut gives each sequence of a step its part of a block mask: masks [num_seqs], over the
// same arrays.  Query blocks of all sequences follow each other, ceil(rows / q_block) for each:
// start [num_query_blocks + 1].  ATTND_EINVAL: the sequences have another number of query blocks,
// q_block is 0, or start goes down.  What the lists hold is attn_check's to look at.
attnd_err attn_mask_cut(const attn_seq *seqs, uint32_t num_seqs, uint32_t q_block,
                        uint32_t num_query_blocks, const uint32_t *start, const uint32_t *kv_blocks,
                        attn_block_mask *masks, attnd_errinfo *info);

#endif
