// tiny is a launch small enough to compute by hand: one row, float32, one query head and one KV
// head unless a test says otherwise, head_dim 8 of which most tests use the first, blocks of 4
// tokens, block table 2, 0, 1, 3.
#ifndef ATTND_TESTS_UNIT_ATTENTION_TINY_H
#define ATTND_TESTS_UNIT_ATTENTION_TINY_H

#include <math.h>
#include <string.h>

#include "attention/attn.h"

enum { TINY_DIM = 8, TINY_BLOCK = 4, TINY_BLOCKS = 4, TINY_HEADS = 4, TINY_TOKENS = 16 };

typedef struct tiny {
    attn_params params;
    attn_row row;
    uint32_t table[TINY_BLOCKS];
    float pool[TINY_BLOCKS][2][TINY_BLOCK][TINY_DIM]; // [block][K or V][token][dim]
    float q[TINY_TOKENS][TINY_HEADS][TINY_DIM];
    float out[TINY_TOKENS][TINY_HEADS][TINY_DIM];
    float lse[TINY_HEADS][TINY_TOKENS];
    float k_new[TINY_TOKENS][TINY_DIM];
    float v_new[TINY_TOKENS][TINY_DIM];
} tiny;

// tiny_init makes a row with all zeros in q, K and V: every key that is seen weighs the same.
static inline void tiny_init(tiny *t, int32_t kv_len, int32_t q_len) {
    static const uint32_t table[TINY_BLOCKS] = {2, 0, 1, 3};
    memset(t, 0, sizeof(*t));
    memcpy(t->table, table, sizeof(table));
    t->row = (attn_row){
        .q = t->q,
        .out = t->out,
        .lse = t->lse[0],
        .k_new = t->k_new,
        .v_new = t->v_new,
        .table = t->table,
        .stride_q_token = (int64_t)TINY_HEADS * TINY_DIM,
        .stride_q_head = TINY_DIM,
        .stride_out_token = (int64_t)TINY_HEADS * TINY_DIM,
        .stride_out_head = TINY_DIM,
        .stride_lse_head = TINY_TOKENS,
        .stride_k_new_token = TINY_DIM,
        .stride_k_new_head = TINY_DIM,
        .stride_v_new_token = TINY_DIM,
        .stride_v_new_head = TINY_DIM,
        .v_offset = sizeof(t->pool[0][0]),
        .kv_len = kv_len,
        .q_len = q_len,
        .q_count = q_len,
        .scale = 1,
        .window_left = -1,
        .window_right = -1,
    };
    t->params = (attn_params){
        .shape = {.q_dtype = ATTND_F32,
                  .kv_dtype = ATTND_F32,
                  .q_heads = 1,
                  .kv_heads = 1,
                  .head_dim = TINY_DIM,
                  .v_head_dim = TINY_DIM,
                  .block_tokens = TINY_BLOCK,
                  .stride_k_token = TINY_DIM,
                  .stride_k_head = (int64_t)TINY_BLOCK * TINY_DIM,
                  .stride_v_token = TINY_DIM,
                  .stride_v_head = (int64_t)TINY_BLOCK * TINY_DIM,
                  .block_stride = sizeof(t->pool[0])},
        .pool = t->pool,
        .pool_bytes = sizeof(t->pool),
        .num_blocks = TINY_BLOCKS,
        .rows = &t->row,
        .num_rows = 1,
    };
}

// tiny_k and tiny_v are key j of the sequence, [TINY_DIM].
static inline float *tiny_k(tiny *t, int32_t j) {
    return t->pool[t->table[j / TINY_BLOCK]][0][j % TINY_BLOCK];
}

static inline float *tiny_v(tiny *t, int32_t j) {
    return t->pool[t->table[j / TINY_BLOCK]][1][j % TINY_BLOCK];
}

#endif
