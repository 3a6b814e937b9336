// attn_cpu_step cuts the keys of a task into steps of ATTN_STEP_KEYS and says, for each step, where
// its keys lie and which of them each query row sees.  It is the part of the SIMD kernels that
// knows tables, blocks and masks; what follows works on 64 row addresses and one word of bits a
// row, whatever the block size, layout and mask.  Any thread.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_STEP_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_STEP_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/attn_mask.h"
#include "attention/attn_plan.h"

// attn_cpu_step is one step.  Bit b of seen and of row_bits is key key_first + b.
typedef struct attn_cpu_step {
    int32_t key_first;
    uint64_t seen; // keys that a row of the task sees; 0 = there is no further step
    bool full;     // every row sees all ATTN_STEP_KEYS keys; row_bits is then not filled
    // Addresses of the keys' rows of KV head 0.  A key that no row sees has the address of one that
    // a row sees, so that kernels may read every row and read nothing that is hidden.
    const char *k[ATTN_STEP_KEYS];
    const char *v[ATTN_STEP_KEYS];
    // Keys b to b + run lie in one block for every multiple b of run, a power of two.
    int32_t run;
    uint64_t row_bits[ATTN_TASK_ROWS]; // [q_count]
} attn_cpu_step;

// attn_cpu_step_next fills *step with the first step at or behind key in which a row of the task
// sees a key, steps being counted from t->key_first.  span is attn_task_span.  Returns the key
// behind the step.
int32_t attn_cpu_step_next(attn_cpu_step *step, const attn_params *p, const attn_task *t,
                           attn_span span, int32_t key);

#endif
