// attn_plan cuts a launch into tasks that workers take one by one.  A task is a set of query rows
// of some KV heads over a range of keys; it leaves one partial state per query row.
//
// Two things are kept apart.  Where the *splits* of a row begin decides the bits of its result: at
// multiples of ATTN_SPLIT_TOKENS (deterministic), at num_splits equal parts (forced), or where the
// plan likes.  Whether a row is *spread*, one task a split, or folded, one task that walks its
// splits in order, only decides who computes it.  So a plan may always fall back to folding when
// room for states runs out, and nothing changes but the time.
//
// Pure host C, no allocation, no clock.  Any thread, one plan by one thread at a time.
#ifndef ATTND_ATTENTION_ATTN_PLAN_H
#define ATTND_ATTENTION_ATTN_PLAN_H

#include <stddef.h>
#include <stdio.h>

#include "attention/attn.h"

enum {
    ATTN_TASK_ROWS = 512, // the most states of a task: head_count * q_count, and of a decode task
    ATTN_HEAD_ROWS = 4,   // with so many rows a KV head at least, which kernels have room for
    ATTN_STEP_KEYS = 64,  // kernels walk keys in steps of this many, counted from key_first
    ATTN_APPEND_TOKENS = 64, // new tokens an append task
    ATTN_DECODE_TOKENS = 8,  // the longest q_len that a decode kernel gets
};

// attn_task is what one call of a kernel computes.  The query heads of a KV head are folded into
// rows: query row r of KV head h is token r / group, head h * group + r % group, where group =
// q_heads / kv_heads.  Its states are ordered [head_count, q_count].
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

// attn_machine is what a plan has to know of who runs it.
typedef struct attn_machine {
    uint32_t workers;
    int32_t decode_rows;   // the most query rows a KV head that a decode task takes
    int32_t prefill_rows;  // the same of a prefill task; both at most ATTN_TASK_ROWS
    uint64_t state_floats; // room for the states of spread rows
    uint32_t max_groups;   // room for what counts the splits of a task that are still to come
} attn_machine;

// attn_plan_row is how one row is cut: head_parts x tiles x (spread ? num_splits : 1) tasks.
typedef struct attn_plan_row {
    uint32_t row; // of params.rows
    bool decode;  // which kernel
    bool spread;
    int32_t head_step, head_parts;   // KV heads a task
    int32_t q_end, q_step;           // query rows: where they end, how many a task
    int32_t q_block, block_tiles;    // query rows a query block, tiles of it
    int32_t block_first, num_blocks; // query blocks
    int32_t key_first, key_end;      // keys that any query of the row sees
    int32_t split_keys, num_splits;
    int32_t round_splits; // 0: all splits have split_keys keys; else they come in rounds of so
                          // many, each half of the keys that are left, and split_keys is the least
    int32_t short_keys;   // when no more are left, a round has all but those of two of the least
    uint64_t num_tasks;
    uint64_t cost;         // keys * heads * (rows + ROW_COST), see attn_plan.c
    uint64_t state_first;  // floats, when spread
    uint64_t state_stride; // floats, from one split's states to the next
    uint32_t group_first;
    uint32_t bucket; // of the order
} attn_plan_row;

// attn_plan is a plan and the storage that it may use.
typedef struct attn_plan {
    attn_plan_row *rows;  // [num_rows], rows of the launch in order
    uint32_t *order;      // [num_rows], indices into rows, costliest tasks first
    uint64_t *task_end;   // [num_rows], tasks up to and with order[i]
    uint64_t *append_end; // [num_rows], append tasks up to and with row i
    uint32_t max_rows, num_rows;
    uint64_t num_tasks, num_appends;
    uint64_t cost;
    uint64_t state_floats; // used
    uint32_t num_groups;
    int32_t max_splits;
} attn_plan;

// attn_plan_part is one task of a plan.
typedef struct attn_plan_part {
    attn_task task;           // keys: those of the split when spread, else of all splits
    const attn_plan_row *row; // borrowed from the plan
    int32_t split;            // 0 when not spread
    uint32_t group;           // when spread: the same for all splits of one set of query rows
    uint64_t state_first;     // floats, when spread: of this group's split 0
} attn_plan_part;

// attn_plan_bytes returns the storage that a plan of max_rows rows needs.
size_t attn_plan_bytes(uint32_t max_rows);

// attn_plan_init gives the plan its storage, attn_plan_bytes(max_rows) aligned to 8, borrowed for
// as long as the plan is used.
void attn_plan_init(attn_plan *plan, void *storage, uint32_t max_rows);

// attn_plan_make plans a launch that passed attn_check.  ATTND_EMSGSIZE with field "rows" when it
// has more than max_rows rows.
attnd_err attn_plan_make(attn_plan *plan, const attn_params *p, const attn_machine *machine,
                         attnd_errinfo *info);

// attn_plan_task returns task index, below num_tasks.  A task may turn out empty: q_count = 0.
attn_plan_part attn_plan_task(const attn_plan *plan, const attn_params *p, uint64_t index);

// attn_plan_split returns the keys of one split of a row.
void attn_plan_split(const attn_plan_row *row, int32_t split, int32_t *key_first, int32_t *key_end);

// attn_plan_append returns append task index, below num_appends.
attn_append_task attn_plan_append(const attn_plan *plan, const attn_params *p, uint64_t index);

// attn_plan_print writes the plan for a person: one line for the launch, one a row.
void attn_plan_print(const attn_plan *plan, FILE *out);

#endif
