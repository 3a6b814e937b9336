// decoder is a whole language model in small: tokens in, tokens out.  Its weights are random, from
// a seed.  It does everything but attention itself (embedding, RMSNorm, projections, SwiGLU MLP,
// logits, greedy choice); attention, RoPE included, is behind decoder_attention: libattnd, or the
// float64 reference in this process.  One thread.
//
// There are two kinds.  In float32 the reference's tokens are those of every correct attention.  In
// bf16, for GPUs, q, k, v and out are rounded; where the two likeliest tokens are closer than
// DECODER_CLOSE, either may come out.
#ifndef ATTND_TESTS_E2E_DECODER_H
#define ATTND_TESTS_E2E_DECODER_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/client/attnd.h"

enum {
    DECODER_LAYERS = 2,
    DECODER_Q_HEADS = 4,
    DECODER_KV_HEADS = 2,
    DECODER_MAX_HEAD_DIM = 64,
    DECODER_VOCABULARY = 256,  // tokens are bytes
    DECODER_MAX_ROWS = 64,     // tokens of a step
    DECODER_MAX_TOKENS = 1024, // of the conversation
    DECODER_MAX_Q_ROW = DECODER_Q_HEADS * DECODER_MAX_HEAD_DIM,
    DECODER_MAX_KV_ROW = DECODER_KV_HEADS * DECODER_MAX_HEAD_DIM,
};

// Logits have a standard deviation of about 1, and one rounding of out to bf16 moves them by some
// 0.001.
#define DECODER_CLOSE 0.02f

typedef struct decoder_kind {
    uint32_t head_dim;
    attnd_dtype dtype; // of q, k, v and out
} decoder_kind;
extern const decoder_kind decoder_f32, decoder_bf16; // head_dim 32 and 64

// decoder_q_row and decoder_kv_row are the elements of a token's q or out, and of its k or v.
static inline uint32_t decoder_q_row(const decoder_kind *kind) {
    return DECODER_Q_HEADS * kind->head_dim;
}
static inline uint32_t decoder_kv_row(const decoder_kind *kind) {
    return DECODER_KV_HEADS * kind->head_dim;
}

// decoder_attention keeps one sequence.  Each returns false when it failed, having said why.
typedef struct decoder_attention {
    void *ctx;
    // begin opens a step of rows new tokens; end makes them part of the sequence.
    bool (*begin)(void *ctx, uint32_t rows);
    // attend: q [rows, q_heads, head_dim], k, v [rows, kv_heads, head_dim], out as q; rounded to
    // the kind's dtype by attend.
    bool (*attend)(void *ctx, uint32_t layer, uint32_t rows, const float *q, const float *k,
                   const float *v, float *out);
    bool (*end)(void *ctx, uint32_t rows);
} decoder_attention;

typedef struct decoder decoder;

// decoder_create makes the weights; NULL without memory.
decoder *decoder_create(const decoder_kind *kind, uint64_t seed);
void decoder_free(decoder *d);

// decoder_talk is a conversation: the prompt, fed in steps of DECODER_MAX_ROWS, then num - 1
// tokens, each time the likeliest one, or what `forced` [num] has instead (NULL = nothing is
// forced).
typedef struct decoder_talk {
    const uint8_t *prompt; // [num_prompt]
    uint32_t num_prompt, num;
    const uint8_t *forced;
    uint8_t *out;   // [num], the likeliest tokens
    float *margins; // [num], by how much each was likelier than the second; NULL = not wanted
} decoder_talk;
bool decoder_run(decoder *d, const decoder_attention *a, const decoder_talk *talk);

// decoder_inv_freq is RoPE's table, [head_dim / 2].
void decoder_inv_freq(const decoder_kind *kind, float *out);

// decoder_attnd_open attends by libattnd, over a client that the caller keeps; through buffers, and
// with each commit carried by the next step.  NULL when it failed.
decoder_attention *decoder_attnd_open(const decoder_kind *kind, attnd_client *c);
void decoder_attnd_close(decoder_attention *a);

// decoder_reference_open attends by attn_reference.
decoder_attention *decoder_reference_open(const decoder_kind *kind);
void decoder_reference_close(decoder_attention *a);

#endif
