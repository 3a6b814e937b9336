// attn_model is what the JSON of model_open (proto_wire.h) says, as launches see it: the KV shape,
// and per layer what goes into a row.  The daemon and in-process clients read it by this same code,
// so they agree on where in a block a layer lies.
//
// Layers that have K and V of their own and share a window form a group; a block of the group is,
// layer after layer, K `[kv_heads, block_tokens, head_dim]`, then V `[kv_heads, block_tokens,
// v_head_dim]`.
//
// Reading allocates.  A model that was read does not change: any thread.
#ifndef ATTND_ATTENTION_ATTN_MODEL_H
#define ATTND_ATTENTION_ATTN_MODEL_H

#include <stddef.h>

#include "attention/attn.h"
#include "proto/proto_wire.h"

enum {
    ATTN_MODEL_BLOCK_UNIT = 256, // bytes from table entry e to e + 1
    ATTN_MODEL_GROUPS = 8,       // layer groups of a model
    ATTN_MODEL_DIGEST_BYTES = 32,
};

typedef struct attn_layer {
    float scale, softcap;
    int32_t window_left, window_right;
    const float *sinks, *alibi;     // [q_heads] or NULL; in the model's floats
    const float *k_scale, *v_scale; // [kv_heads] or NULL
    attn_rope rope;                 // rotary_dim 0 = none
    uint32_t kv_layer;              // whose K and V it reads; itself when it has its own
    uint32_t group;                 // layer group of kv_layer
    uint64_t k_offset, v_offset;    // bytes within a block of the group
} attn_layer;

typedef struct attn_group {
    uint32_t layers;
    int32_t window_left, window_right;
} attn_group;

typedef struct attn_model {
    char name[PROTO_NAME_BYTES];
    uint8_t digest[ATTN_MODEL_DIGEST_BYTES]; // of the weights
    attnd_dtype dtype, kv_dtype;
    uint32_t num_layers, q_heads, kv_heads, head_dim, v_head_dim, block_tokens;
    bool causal;
    attn_shape shape;
    attn_layer *layers; // [num_layers]
    float *floats;      // what the layers' arrays point into
    uint32_t num_floats, max_floats;
    bool shares_kv; // some layer reads another's K and V
    attn_group groups[ATTN_MODEL_GROUPS];
    uint32_t num_groups;
} attn_model;

// attn_model_parse reads a JSON body into a new model, checked whole.  default_block_tokens is for
// one that names none.  ATTND_EINVAL, ATTND_ENOTSUP with the field, ATTND_ENOMEM.  The caller owns
// *out: attn_model_free, which accepts NULL.
attnd_err attn_model_parse(attn_model **out, const void *json, size_t bytes,
                           uint32_t default_block_tokens, attnd_errinfo *info);
void attn_model_free(attn_model *model);

// attn_model_equal compares everything that a launch sees.
bool attn_model_equal(const attn_model *a, const attn_model *b);

// attn_layer_equal compares two layers of such a model, but for where K and V lie.
bool attn_layer_equal(const attn_model *model, const attn_layer *a, const attn_layer *b);

// attn_layer_fill fills in what of a launch's row is the layer's: offsets, mask, scales, RoPE.
// Arrays are borrowed from the model.
void attn_layer_fill(const attn_model *model, uint32_t layer, attn_row *row);

#endif
