// play is a model runtime for tests: it opens a model and sequences, sends random q, k and v, and
// compares every output with attn_reference, which gets the same tokens in float64 from a pool of
// its own.  float32 models.
#ifndef ATTND_TESTS_E2E_PLAY_H
#define ATTND_TESTS_E2E_PLAY_H

#include "tests/e2e/harness.h"

enum { PLAY_MAX_LAYERS = 8, PLAY_MAX_SEQS = 16, PLAY_MAX_TOKENS = 8192, PLAY_MAX_INV_FREQ = 32 };

// play_layer is what a layer of the model says of itself, as in proto_wire.h.
typedef struct play_layer {
    int32_t window_left, window_right;
    float softcap, scale;
    uint32_t kv_layer; // its own index = its own K and V
} play_layer;

typedef struct play_model {
    const char *name;
    uint32_t layers, q_heads, kv_heads, head_dim, v_head_dim, block_tokens;
    bool not_causal;
    uint32_t num_inv_freq; // of every layer
    float inv_freq[PLAY_MAX_INV_FREQ];
    play_layer layer[PLAY_MAX_LAYERS];
    uint32_t id; // once it is open
} play_model;

// play_tiny is 2 layers, 4 query heads, 2 KV heads, head_dim 32, RoPE, 16 tokens a block.
play_model play_tiny(void);
// play_one is the same with one layer.
play_model play_one(void);

// play_seq is a sequence and its mirror: per layer K [kv_heads, PLAY_MAX_TOKENS, head_dim], then V.
typedef struct play_seq {
    uint64_t handle;
    uint32_t len;
    const play_model *model;
    float *mirror[PLAY_MAX_LAYERS];
} play_seq;

void play_hello(e2e_client *c, const char *name);
void play_open(e2e_client *c, play_model *m);
void play_create(e2e_client *c, const play_model *m, play_seq *s);
void play_fork(e2e_client *c, const play_seq *s, play_seq *forked);
void play_free(e2e_client *c, play_seq *s); // on the daemon and here
void play_forget(play_seq *s);              // here only

// play_part is one sequence's part of a step.
typedef struct play_part {
    play_seq *seq;
    uint32_t new_len, q_len, reserve;
    const int32_t *positions; // [rows], may be NULL
    const uint64_t *tree;     // may be NULL
    const uint32_t *tokens;   // ids [new_len], may be NULL
    const play_seq *prefix;   // has the rows of those that are cached
    uint32_t cached;          // filled by play_step_open
} play_part;

// play_mask is a block mask of a step, as in proto_block_mask; start [num + 1].
typedef struct play_mask {
    uint32_t q_block, num;
    const uint32_t *start, *kv_blocks;
} play_mask;

// play_step is an open step.
typedef struct play_step {
    uint64_t handle;
    const play_model *model;
    play_part parts[PLAY_MAX_SEQS];
    uint32_t num, rows, new_rows;
    const play_mask *mask; // of the attends that follow; NULL = none.  head_dim = v_head_dim then
} play_step;

uint32_t play_rows(const play_part *p); // query rows, of the step that is opened or open

// play_step_body writes a step message under id; the caller seals nothing.
void play_step_body(e2e_buf *b, uint64_t id, const play_model *m, const play_part *parts,
                    uint32_t num, uint32_t deadline_ms);
// play_step_open opens one; s->handle is 0 when it was refused.
attnd_err play_step_open(e2e_client *c, const play_model *m, const play_part *parts, uint32_t num,
                         uint32_t deadline_ms, play_step *s, e2e_reply *r);

// play_tensors holds random q, k and v for a step, packed.
typedef struct play_tensors {
    float *q, *k, *v;
} play_tensors;
play_tensors play_random(const play_step *s);
void play_tensors_fini(play_tensors *t);

void play_attend_body(e2e_buf *b, uint64_t id, const play_step *s, uint32_t layer, uint32_t flags,
                      const play_tensors *t);
// play_check appends to the mirrors and compares the reply of an attend with the reference.
void play_check(const play_step *s, uint32_t layer, const play_tensors *t, const e2e_reply *r);
// play_attend sends random tensors for a layer, wants success, and compares.
void play_attend(e2e_client *c, const play_step *s, uint32_t layer);

void play_commit_body(e2e_buf *b, uint64_t id, const play_step *s, const uint32_t *accepted);
// play_commit commits; accepted NULL = all.  On success the sequences' lengths follow.
attnd_err play_commit(e2e_client *c, play_step *s, const uint32_t *accepted, e2e_reply *r);

// play_token does a whole step of new_len tokens for each sequence and checks every output.
void play_token(e2e_client *c, play_seq *const *seqs, uint32_t num, uint32_t new_len);

// play_prompt does a step of tokens [num] with a sequence and checks every output; returns how many
// were cached, of which prefix has the rows.  play_free_there frees a sequence on the daemon alone,
// so that its mirror can be a prefix.
uint32_t play_prompt(e2e_client *c, play_seq *s, const play_seq *prefix, const uint32_t *tokens,
                     uint32_t num);
void play_free_there(e2e_client *c, const play_seq *s);

// play_attend1_body writes a decode or prefill of a one-layer model.
void play_attend1_body(e2e_buf *b, uint32_t op, uint64_t id, const play_step *s,
                       uint32_t deadline_ms, const play_tensors *t);

#endif
