// bench_case names a launch that is timed.  A case is written as
//
//     KIND DTYPE Q_HEADS/KV_HEADS [KEY N ...]
//
// KIND: "decode": batch sequences of kv_len keys and one query token each; "ragged": batch
// sequences of unequal lengths, kv_len keys in all; "prefill": batch sequences of q_len query
// tokens, causal, behind kv_len - q_len cached ones; "full": the same, but every token sees all
// keys.  DTYPE is the storage type, as in proto/dtype.h; f8e4m3 has bf16 queries.  Keys: batch (1;
// ragged 128), kv_len (prefill, full: q_len), q_len (1), new (0): the last so many keys are
// appended by the launch, and these and the queries are rotated (RoPE); head_dim (128), block
// (tokens; 64), fused (0; 1: queries and new keys and values are slices of what one projection
// writes, [tokens, q_heads + 2 kv_heads, head_dim]).  "decode bf16 32/8 kv_len 32768".  No state;
// any thread.
#ifndef ATTND_LOAD_BENCH_CASE_H
#define ATTND_LOAD_BENCH_CASE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/dtype.h"
#include "proto/err.h"

enum { BENCH_CASE_BYTES = 128, BENCH_MAX_BATCH = 4096 };

typedef enum bench_kind {
    BENCH_DECODE,
    BENCH_RAGGED,
    BENCH_PREFILL,
    BENCH_FULL,
    BENCH_NUM_KINDS
} bench_kind;

typedef struct bench_case {
    bench_kind kind;
    attnd_dtype q_dtype, kv_dtype;
    int32_t q_heads, kv_heads, head_dim, block_tokens;
    int32_t batch, kv_len, q_len, new_len, fused;
    const double *weights; // [batch], what lengths of a ragged case are in proportion to; borrowed,
                           // NULL = as bench_case_lengths says
} bench_case;

static inline bool bench_case_is_prefill(const bench_case *c) {
    return c->kind == BENCH_PREFILL || c->kind == BENCH_FULL;
}

// bench_case_parse reads a case.  ATTND_EINVAL with the word that is wrong; ATTND_ENOTSUP where
// the library has no such shape.
attnd_err bench_case_parse(bench_case *out, const char *text, attnd_errinfo *info);

// bench_case_name writes a case as bench_case_parse reads it, with keys in one order and without
// those that have their default.
void bench_case_name(const bench_case *c, char out[BENCH_CASE_BYTES]);

// bench_case_matches says whether a name is meant by pattern: contains it, or, when pattern has one
// of *?[ in it, is matched by it as a file name would be.  NULL means all.
bool bench_case_matches(const char *name, const char *pattern);

// bench_case_lengths fills lengths [batch]: keys of each sequence.  Those of a ragged case without
// weights are distributed like the prompts of the Azure conversation trace of 2023 (log-normal,
// deviation 1 of the logarithm), always the same ones.  They add up to kv_len.
void bench_case_lengths(const bench_case *c, int32_t *lengths);

// bench_case_flops returns the multiply-adds of a launch, each counted as two: of Q K and of P V,
// over the keys that each query token sees.
double bench_case_flops(const bench_case *c);

// bench_case_kv_bytes returns the K and V bytes that a launch has to read: all live ones, once.
uint64_t bench_case_kv_bytes(const bench_case *c);

#endif
