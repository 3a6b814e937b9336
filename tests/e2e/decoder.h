// decoder is a whole language model in small: tokens in, tokens out.  Its weights are random, from
// a seed.  It does everything but attention itself (embedding, RMSNorm, projections, SwiGLU MLP,
// logits, greedy choice); attention, RoPE included, is behind decoder_attention: libattnd, or the
// float64 reference in this process.  One thread.
#ifndef ATTND_TESTS_E2E_DECODER_H
#define ATTND_TESTS_E2E_DECODER_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/client/attnd.h"

enum {
    DECODER_LAYERS = 2,
    DECODER_Q_HEADS = 4,
    DECODER_KV_HEADS = 2,
    DECODER_HEAD_DIM = 32,
    DECODER_VOCABULARY = 256,  // tokens are bytes
    DECODER_MAX_ROWS = 64,     // tokens of a step
    DECODER_MAX_TOKENS = 1024, // of the conversation
    DECODER_Q_ROW = DECODER_Q_HEADS * DECODER_HEAD_DIM,
    DECODER_KV_ROW = DECODER_KV_HEADS * DECODER_HEAD_DIM,
};

// decoder_attention keeps one sequence.  Each returns false when it failed, having said why.
typedef struct decoder_attention {
    void *ctx;
    // begin opens a step of rows new tokens; end makes them part of the sequence.
    bool (*begin)(void *ctx, uint32_t rows);
    // attend: q [rows, q_heads, head_dim], k, v [rows, kv_heads, head_dim], out as q.
    bool (*attend)(void *ctx, uint32_t layer, uint32_t rows, const float *q, const float *k,
                   const float *v, float *out);
    bool (*end)(void *ctx, uint32_t rows);
} decoder_attention;

typedef struct decoder decoder;

// decoder_create makes the weights; NULL without memory.
decoder *decoder_create(uint64_t seed);
void decoder_free(decoder *d);

// decoder_run feeds the prompt and then num - 1 of its own tokens, the likeliest each time; out
// [num].  The prompt goes in steps of DECODER_MAX_ROWS.
bool decoder_run(decoder *d, const decoder_attention *a, const uint8_t *prompt, uint32_t num_prompt,
                 uint8_t *out, uint32_t num);

// decoder_inv_freq is RoPE's table, [head_dim / 2].
void decoder_inv_freq(float *out);

// decoder_attnd_open attends by libattnd, over a client that the caller keeps; through buffers, and
// with each commit carried by the next step.  NULL when it failed.
decoder_attention *decoder_attnd_open(attnd_client *c);
void decoder_attnd_close(decoder_attention *a);

// decoder_reference_open attends by attn_reference.
decoder_attention *decoder_reference_open(void);
void decoder_reference_close(decoder_attention *a);

#endif
