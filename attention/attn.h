// attn is exact attention over a paged KV cache, as a library: what the daemon runs, and what a
// program can link by itself (libattn).  A launch is a list of rows; a row is one sequence of one
// layer, and carries everything that may differ between sequences, layers and models: where its
// queries and its blocks lie, lengths, mask, scale, softcap, sinks, RoPE.  All rows of a launch
// share one KV shape.  A launch first appends the new tokens of its rows, then attends.
//
// Definition, for query i in [0, q_len) of head h, key j in [0, kv_len), Sq = q_len, Sk = kv_len:
//     x(i, j)  = scale * dot(rope(q[i, h]), k[j, h / (q_heads / kv_heads)])
//     x        = softcap * tanh(x / softcap)                       when softcap > 0
//     x       -= alibi_slope[h] * |i + Sk - Sq - j|                when slopes are given
//     j is seen when  (not causal or j <= i + Sk - Sq)
//               and   (window_left  < 0 or j >= i + Sk - Sq - window_left)
//               and   (window_right < 0 or j <= i + Sk - Sq + window_right)
//               and   (no tree mask or j < Sk - Sq or bit (i, j - (Sk - Sq)) is set)
//               and   (no block mask or the KV block of j is listed for the query block of i)
//     out[i,h] = sum over seen j of exp(x) * v[j] / (sum over seen j of exp(x) + exp(sink[h]))
//     lse[h,i] = ln(sum over seen j of exp(x))                     natural log, without the sink
// A row that sees no key: out = 0, lse = -inf, both written.  Sums are float32 or wider.  An output
// never depends on a byte outside the live tokens of its own sequence.
//
// Sources: online softmax, Milakov & Gimelshein 2018 (arXiv 1805.02867), eq. 3-5; split keys merged
// by LSE, Dao 2023 (arXiv 2307.08691) and Flash-Decoding; RoPE, Su et al. 2021 (arXiv 2104.09864),
// eq. 34; ALiBi, Press et al. 2021 (arXiv 2108.12409); FlashAttention-2's bottom-right causal rule.
//
// flash_attn_with_kvcache, argument by argument, and what stands here for it:
//     q                       rows[].q, stride_q_token, stride_q_head
//     k_cache, v_cache        params.pool + rows[].k_offset, v_offset
//     k, v                    rows[].k_new, v_new, new_len; None is new_len = 0
//     qv                      refused: there is no such field
//     rotary_cos, rotary_sin  rows[].rope: inv_freq, so that no table bounds the length
//     rotary_interleaved      rows[].rope->interleaved
//     rotary_seqlens          rows[].q_positions, k_positions
//     cache_seqlens           rows[].kv_len - new_len: kv_len counts the appended tokens
//     cache_batch_idx         the caller's choice of rows[].table
//     cache_leftpad           refused: a sequence starts at its first table entry
//     block_table             rows[].table; contiguous is one block of block_tokens >= kv_len
//     cu_seqlens_q, max_...   rows[].q and q_len: a batch is always ragged
//     softmax_scale           rows[].scale; None is 0, 1 / sqrt(head_dim)
//     causal                  rows[].flags, ATTN_CAUSAL
//     window_size             rows[].window_left, window_right
//     attention_chunk         refused: no such field; a block mask can say it
//     softcap                 rows[].softcap
//     alibi_slopes            rows[].alibi_slopes
//     s_aux (sinks)           rows[].sinks
//     q_descale               refused: q is of 16 or 32 bits
//     k_descale, v_descale    rows[].k_scale, v_scale
//     num_splits              params.num_splits; 0 = attn_plan decides
//     pack_gqa                always: the heads of a group are rows of one pass
//     return_softmax_lse      rows[].lse not NULL
#ifndef ATTND_ATTENTION_ATTN_H
#define ATTND_ATTENTION_ATTN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/dtype.h"
#include "proto/err.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    ATTN_MAX_HEAD_DIM = 256,   // head_dim and v_head_dim: multiples of 8 from 8 up to this
    ATTN_MAX_Q_HEADS = 1024,   // and any multiple of kv_heads
    ATTN_SPLIT_TOKENS = 1024,  // deterministic mode: splits begin at multiples of this many keys
    ATTN_MAX_SPLITS = 128,     // of one row, when not deterministic
    ATTN_MAX_TOKENS = 1 << 30, // kv_len, and q_len * (q_heads / kv_heads)
};

// attn_shape is the KV shape: what all rows of a launch have in common.  Strides count elements of
// kv_dtype.  The pool's own layout, head-major `[kv_heads, block_tokens, head_dim]`, has
// stride_k_token = head_dim, stride_k_head = block_tokens * head_dim; a token-major pool sets
// others.
typedef struct attn_shape {
    attnd_dtype q_dtype;  // of q, k_new, v_new and out
    attnd_dtype kv_dtype; // of the pool: q_dtype, or F8E4M3 with a 16-bit q_dtype
    int32_t q_heads;
    int32_t kv_heads;
    int32_t head_dim;     // of q and k
    int32_t v_head_dim;   // of v and out
    int32_t block_tokens; // tokens a block, >= 1
    int64_t stride_k_token, stride_k_head;
    int64_t stride_v_token, stride_v_head;
    // Bytes from table entry e to e + 1: block e is at pool + e * block_stride.  A block may be
    // larger than that: a pool of blocks of many sizes names them by multiples of a small unit.
    uint64_t block_stride;
} attn_shape;

typedef struct attn_rope {
    const float *inv_freq;  // [rotary_dim / 2], angle of pair p at position t: t * inv_freq[p]
    float attention_factor; // multiplies cos and sin; 1 unless the model says otherwise
    int32_t rotary_dim;     // even, 2 to head_dim; dims behind it are left as they are
    bool interleaved;       // pairs are (2p, 2p + 1), else (p, p + rotary_dim / 2)
} attn_rope;

// attn_block_mask lists, per query block of q_block query tokens, the KV blocks that it sees, in
// ascending order without repeats.  What it hides is never read.
typedef struct attn_block_mask {
    const uint32_t *start;     // [ceil(q_len / q_block) + 1], offsets into kv_blocks
    const uint32_t *kv_blocks; // indices of blocks of the sequence (not table entries)
    int32_t q_block;           // query tokens a query block, >= 1
} attn_block_mask;

enum {
    ATTN_CAUSAL = 1u << 0,
    ATTN_PARTIAL = 1u << 1, // out and lse are a state to be merged: the sink is left out of both
    ATTN_FLAGS = ATTN_CAUSAL | ATTN_PARTIAL,
};

// attn_row is one sequence of one layer.  Pointers are to memory that the launch can read (host
// memory for the CPU, device memory for a GPU), borrowed until the launch has ended.  Strides count
// elements.
typedef struct attn_row {
    const void *q;     // [q_len, q_heads, head_dim]; NULL when q_len = 0
    void *out;         // [q_len, q_heads, v_head_dim]; NULL when q_len = 0
    float *lse;        // [q_heads, q_len], may be NULL
    const void *k_new; // [new_len, kv_heads, head_dim]; NULL when new_len = 0
    const void *v_new; // [new_len, kv_heads, v_head_dim]; NULL when new_len = 0
    // [ceil(kv_len / block_tokens)], entries below params.num_blocks.  Entries before the block of
    // the first key that the launch reaches are not looked at, whatever step or tile a kernel
    // rounds to: blocks wholly behind the left window of query token q_first may be gone.
    const uint32_t *table;
    int64_t stride_q_token, stride_q_head;
    int64_t stride_out_token, stride_out_head;
    int64_t stride_lse_head;
    int64_t stride_k_new_token, stride_k_new_head;
    int64_t stride_v_new_token, stride_v_new_head;
    uint64_t k_offset; // bytes from the start of a block to this layer's K
    uint64_t v_offset; // and to its V
    int32_t kv_len;    // live tokens after the append
    int32_t q_len;     // query tokens; may exceed kv_len
    int32_t new_len;   // appended tokens, the last new_len of kv_len
    int32_t q_first;   // this launch computes query tokens [q_first, q_first + q_count) of q_len,
    int32_t q_count;   // q and out still point at token 0
    uint32_t flags;    // ATTN_CAUSAL ...
    float scale;       // 0 = 1 / sqrt(head_dim)
    float softcap;     // 0 = off
    int32_t window_left, window_right; // -1 = unbounded
    const float *sinks;                // [q_heads], logits; may be NULL
    const float *alibi_slopes;         // [q_heads]; may be NULL
    const float *k_scale, *v_scale;    // [kv_heads], for F8E4M3 only; NULL = 1
    const attn_rope *rope;             // may be NULL
    // Positions for RoPE, NULL = default.  q_positions[i], default kv_len - q_len + i;
    // k_positions[t] of new token t, default kv_len - new_len + t.
    const int32_t *q_positions; // [q_len]
    const int32_t *k_positions; // [new_len]
    const uint64_t
        *tree_mask; // [q_len, ceil(q_len / 64)], bit b of word w = new key 64 w + b; may be NULL
    const attn_block_mask *block_mask; // may be NULL
} attn_row;

// attn_params is one launch.
typedef struct attn_params {
    attn_shape shape;
    void *pool;          // the arena: block e at pool + e * block_stride
    uint64_t pool_bytes; // every live byte of a block must lie below this
    uint64_t num_blocks; // table entries must be below this
    attn_row *rows;      // [num_rows]
    uint32_t num_rows;
    int32_t num_splits;  // forced number of splits, 1 to ATTN_MAX_SPLITS; 0 = attn_plan decides
    bool deterministic;  // splits at multiples of ATTN_SPLIT_TOKENS; num_splits must be 0
    uint64_t *saturated; // counts appended values that F8E4M3 saturated; may be NULL
} attn_params;

// attn_choice says which kernel ran and why; the strings are constants.
typedef struct attn_choice {
    const char *kernel; // such as "cpu_avx512_bf16_decode"
    const char *why;    // such as "q_len <= 8, head_dim 128"
    uint32_t splits;    // the most that a row was cut into
    uint32_t rows;      // rows of the launch
} attn_choice;

// attn_check checks everything that can be checked on the host: geometry, lengths, strides, flags,
// every table entry in the live range that the launch reaches, masks, scales.  Nothing of the pool
// is read.  Rows' small arrays (tables, masks, positions, scales) must be host-readable.
// ATTND_EINVAL or ATTND_ENOTSUP with the field's name in *info (may be NULL).  Any thread.
attnd_err attn_check(const attn_params *p, attnd_errinfo *info);

// attn_check_mask checks the lists of a row's block mask alone, as attn_check does, if it has one;
// i is the row's number, for the text.
attnd_err attn_check_mask(const attn_shape *shape, const attn_row *row, uint32_t i,
                          attnd_errinfo *info);

// attn_check_shape is the part of attn_check that concerns the shape alone, for a daemon that
// accepts a model.  Any thread.
attnd_err attn_check_shape(const attn_shape *shape, attnd_errinfo *info);

// attn_reference computes the launch in float64 on the calling thread: the same append (rounded to
// the storage type once), then the definition above, literally.  out_f64 [sum of q_count, q_heads,
// v_head_dim] and lse_f64 [q_heads, sum of q_count] get the unrounded results, rows in order; each
// may be NULL.  rows[].out and lse are not written.  Slow by intent.  ATTND_ENOMEM.
attnd_err attn_reference(const attn_params *p, double *out_f64, double *lse_f64);

// attn_merge_states merges num_states partial states of the same rows into out and lse (which may
// be NULL): out = sum of exp(lse_s - lse) * out_s, applies sinks (may be NULL) once, and returns an
// LSE without the sink.  (0, -inf) is the identity.  Each states[s] is [tokens, q_heads,
// v_head_dim] of dtype, contiguous; state_lses[s] is [q_heads, tokens].  Any thread.
typedef struct attn_merge_params {
    void *out;
    float *lse;
    const void *const *states;
    const float *const *state_lses;
    const float *sinks; // [q_heads]
    int64_t tokens;
    int32_t num_states, q_heads, v_head_dim;
    attnd_dtype dtype;
} attn_merge_params;
void attn_merge_states(const attn_merge_params *p);

// attn_cpu is the CPU engine: a team of threads and the workspace for one launch at a time.
typedef struct attn_cpu attn_cpu;

typedef struct attn_cpu_opts {
    int32_t num_threads; // the calling thread is one of them; 0 = processors of the affinity mask
    uint32_t max_rows;   // largest launch; 0 = 4096
    uint64_t scratch_bytes; // for splits and converted tiles; 0 = decided from max_rows
    const char
        *isa; // "scalar", "avx2", "avx512", "avx512_bf16", "neon"; NULL = ATTND_CPU, else the best
} attn_cpu_opts;

// attn_cpu_create starts the team.  ATTND_ENOTSUP when the ISA asked for is not there,
// ATTND_ENOMEM. The caller owns *out: attn_cpu_free.
attnd_err attn_cpu_create(attn_cpu **out, const attn_cpu_opts *opts, attnd_errinfo *info);

// attn_cpu_free stops the team.  Accepts NULL.
void attn_cpu_free(attn_cpu *cpu);

// attn_cpu_run runs one launch to its end on the team, the calling thread included.  One caller at
// a time.  Calls attn_check first: a refused launch changes nothing.  Does not allocate.  *choice
// (may be NULL) says what ran.  ATTND_EMSGSIZE when the launch has more rows than max_rows.
attnd_err attn_cpu_run(attn_cpu *cpu, const attn_params *p, attn_choice *choice,
                       attnd_errinfo *info);

// attn_cpu_isa returns the name of the ISA in use.
const char *attn_cpu_isa(const attn_cpu *cpu);

#ifdef __cplusplus
}
#endif

#endif
