// attn_cpu_ops is the table behind which the CPU kernels of every instruction set stand.  Scalar
// code fills it whole; then each set that the caller allows overrides what it does better.  One
// file per set, compiled with its own flags; no intrinsics elsewhere.
//
// An entry works on one task at a time and touches nothing but what the task names, the state it
// writes, and its thread's scratch; so any number of threads may run tasks of one launch at once.
// Entries cannot fail: attn_check has accepted the launch before.
//
// What every attend kernel keeps, so that results never depend on how a launch was cut:
//   - it writes the whole state of every row of the task, also of rows that see no key;
//   - it walks keys upwards in steps of ATTN_STEP_KEYS from key_first (a step in which no row of
//   the
//     task sees a key may be left out), and the bits of a row's state depend on that row and the
//     key range alone, not on the rows that share the task or on where the blocks lie;
//   - exp2(0) is 1 exactly, so that a rescale by an unchanged maximum changes nothing;
//   - it reads no key at or behind key_end, no table entry behind the live range, no block that the
//     block mask hides; attn_cpu_task.h has what a task sees, and where it lies;
//   - a NaN score stays NaN in the state; a row that sees nothing gets m = -inf, d = 0, acc = 0.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_OPS_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "attention/attn.h"
#include "attention/attn_plan.h"

// attn_cpu_features are instruction sets as the kernels need them.
enum {
    ATTN_CPU_AVX2 = 1u << 0,        // with FMA and F16C
    ATTN_CPU_AVX512 = 1u << 1,      // F, BW, DQ, VL
    ATTN_CPU_AVX512_BF16 = 1u << 2, // on top of AVX512; with VBMI
    ATTN_CPU_NEON = 1u << 3,        // of AArch64
};

enum {
    ATTN_CPU_ALIGN = 64,               // bytes: of scratch, and of the state that a kernel gets
    ATTN_CPU_SCRATCH_BYTES = 2u << 20, // of one thread, for whatever a kernel converts or packs
};

// attn_state is the partial result of the rows of a task, in log2 units:
//     x   = log2(e) * logit, the logit as attn.h defines it (k_scale included)
//     m   = largest x seen, or that rounded to an integer, so that rescaling rounds nothing
//     d   = sum of exp2(x - m), acc = sum of exp2(x - m) * v, without v_scale
// A row that sees no key has m = -INFINITY, d = 0, acc = 0.
typedef struct attn_state {
    float *acc; // [rows, v_head_dim]
    float *m;   // [rows]
    float *d;   // [rows]
} attn_state;

// attn_cpu_attend_fn computes the state of t's rows over t's keys.  scratch has
// ATTN_CPU_SCRATCH_BYTES, aligned; its content is garbage.
typedef void (*attn_cpu_attend_fn)(const attn_params *p, const attn_task *t, const attn_state *out,
                                   void *scratch);

// attn_cpu_kernel is an attend function, its name for attn_choice ("cpu_avx2_bf16_decode"), and the
// most query rows of one KV head that it takes in one task (at most ATTN_TASK_ROWS).
typedef struct attn_cpu_kernel {
    attn_cpu_attend_fn attend;
    const char *name;
    int32_t rows;
} attn_cpu_kernel;

typedef struct attn_cpu_ops {
    const char *isa; // "scalar", "avx2", "avx512", "avx512_bf16", "neon"

    // decode is for rows with q_len <= 8 whose q_len * group fits in its rows; a task spans any
    // number of KV heads, so that a block's heads can be walked together, and few query rows, so
    // that every byte of the cache is read and converted once.  prefill is for all else; a task has
    // one KV head.  Both by shape.kv_dtype; F8E4M3 comes with q of BF16 or F16.
    attn_cpu_kernel decode[ATTND_NUM_DTYPES];
    attn_cpu_kernel prefill[ATTND_NUM_DTYPES];

    // append writes a run of new K and V to their blocks: RoPE on K, division by the scales,
    // rounding to the storage type once.  Returns how many values F8E4M3 saturated.
    uint64_t (*append)(const attn_params *p, const attn_append_task *t, void *scratch);

    // merge adds the state of the same rows over later keys to an earlier one.  A row with
    // from->d = 0 leaves into as it is, bit for bit, and into->d = 0 takes from's bits.
    void (*merge)(const attn_state *into, const attn_state *from, int32_t rows, int32_t v_head_dim);

    // finish writes out and lse of the rows of t from their state over all keys: applies v_scale
    // and, once, the sink (not to partial rows), and rounds to q_dtype.
    void (*finish)(const attn_params *p, const attn_task *t, const attn_state *state);
} attn_cpu_ops;

// attn_cpu_detect returns the features of this machine.  Any thread.
uint32_t attn_cpu_detect(void);

// attn_cpu_prefer leaves out of the features of this machine what is there but does not pay: a core
// of Intel's does half as many multiply-adds a second by the bf16 dot as by FMA (213 to 416 GFLOP/s
// on two of them), one of AMD's twice as many.  Any thread.
uint32_t attn_cpu_prefer(uint32_t features);

// attn_cpu_init fills *ops with the best that features allow; features that the machine lacks are
// the caller's fault.  Any thread.
void attn_cpu_init(attn_cpu_ops *ops, uint32_t features);

// attn_cpu_features_of turns an ISA's name into the features that select it: "avx512" gives AVX2
// and AVX512.  ATTND_ENOTSUP with field "isa" for a name that is none or that is not in allowed.
attnd_err attn_cpu_features_of(uint32_t *features, const char *name, uint32_t allowed,
                               attnd_errinfo *info);

// One per instruction set: overrides in *ops what it does better.  An implementation that this
// build lacks is not called.
void attn_cpu_scalar_init(attn_cpu_ops *ops);
void attn_cpu_avx2_init(attn_cpu_ops *ops);
void attn_cpu_avx512_init(attn_cpu_ops *ops);
void attn_cpu_avx512_bf16_init(attn_cpu_ops *ops);
void attn_cpu_avx512_f8_init(attn_cpu_ops *ops);          // its decode of F8E4M3
void attn_cpu_avx512_bf16_decode_init(attn_cpu_ops *ops); // and of bf16
void attn_cpu_neon_init(attn_cpu_ops *ops);

#endif
