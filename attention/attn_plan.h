// attn_plan cuts a launch into tasks that workers take one by one.  A task is a set of query rows
// of some KV heads over a range of keys; it leaves one partial state per query row.
#ifndef ATTND_ATTENTION_ATTN_PLAN_H
#define ATTND_ATTENTION_ATTN_PLAN_H

#include "attention/attn.h"

enum {
    ATTN_TASK_ROWS = 512, // the most states of a task: head_count * q_count
    ATTN_STEP_KEYS = 64,  // kernels walk keys in steps of this many, counted from key_first
};

// attn_task is what one call of a kernel computes.  The query heads of a KV head are folded into
// rows: query row r of KV head h is token r / group, query head h * group + r % group, where group
// = q_heads / kv_heads.  Its states are ordered [head_count, q_count].
typedef struct attn_task {
    uint32_t row;                   // of params.rows
    int32_t head_first, head_count; // KV heads
    int32_t q_first, q_count;       // query rows of each of those heads; all tokens of a task lie
                                    // in one query block of the row's block mask
    int32_t key_first, key_end;     // keys of the sequence; may be empty
} attn_task;

// attn_append_task is a run of a row's new tokens, all KV heads.
typedef struct attn_append_task {
    uint32_t row;                     // of params.rows
    int32_t token_first, token_count; // of new_len
} attn_append_task;

#endif
