// srv_model is what the daemon knows of an open model beyond the cache's part: the KV shape of its
// launches and, per layer, what goes into a launch's row.  Owned by srv_models, by the cache's
// index; forgotten when the cache forgets the model.  Loop thread only.
#ifndef ATTND_SERVER_SRV_MODEL_H
#define ATTND_SERVER_SRV_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/attn.h"
#include "kvcache/kv_cache.h"
#include "proto/proto_wire.h"

typedef struct srv_layer {
    float scale, softcap;
    int32_t window_left, window_right;
    const float *sinks, *alibi;     // [q_heads] or NULL; in the model's floats
    const float *k_scale, *v_scale; // [kv_heads] or NULL
    attn_rope rope;                 // rotary_dim 0 = none
    uint32_t kv_layer;              // whose K and V it reads; itself when it has its own
    uint32_t group;                 // layer group of kv_layer
    uint64_t k_offset, v_offset;    // bytes within a block of the group
} srv_layer;

typedef struct srv_model {
    char name[KV_NAME_BYTES];
    uint32_t tenant; // of kv_cache
    attnd_dtype dtype, kv_dtype;
    uint32_t num_layers, q_heads, kv_heads, head_dim, v_head_dim, block_tokens;
    bool causal;
    const attn_shape *shape; // interned: equal geometry has equal pointers
    srv_layer *layers;       // [num_layers]
    float *floats;           // what the layers' arrays point into
    uint32_t num_floats, max_floats;
    bool shares_kv;                      // some layer reads another's K and V
    kv_model_spec spec;                  // groups as the cache knows them
    int32_t window_right[KV_MAX_GROUPS]; // and what it need not know
} srv_model;

typedef struct srv_shape {
    attn_shape shape;
    uint32_t users; // models
} srv_shape;

typedef struct srv_models {
    srv_model **by_index; // [max], NULL = none
    srv_shape *shapes;    // [max]
    uint32_t max;
} srv_models;

attnd_err srv_models_init(srv_models *t, uint32_t max);
void srv_models_fini(srv_models *t);

// srv_model_parse reads the JSON body of model_open into a new model, checked whole, with its
// groups and shape filled in.  default_block_tokens is the daemon's.  The caller owns *out:
// srv_model_free.
attnd_err srv_model_parse(srv_model **out, const void *json, size_t bytes,
                          uint32_t default_block_tokens, attn_shape *shape, attnd_errinfo *info);
void srv_model_free(srv_model *model);

// srv_layer_fill fills in what of a launch's row is the layer's: offsets, mask, scales, RoPE.
// Arrays are borrowed from the model.
void srv_layer_fill(const srv_model *model, uint32_t layer, attn_row *row);

// srv_model_equal compares everything that a launch sees.
bool srv_model_equal(const srv_model *a, const srv_model *b);

// srv_models_put gives the model to the table under the cache's index.  A model that is there
// already and equal stays, and the given one is freed; an unequal one is ATTND_EEXIST and nothing
// is taken.
attnd_err srv_models_put(srv_models *t, uint32_t index, srv_model *model, const attn_shape *shape,
                         attnd_errinfo *info);

// srv_models_sweep forgets the models that the cache has forgotten.
void srv_models_sweep(srv_models *t, const kv_cache *kv);

// srv_models_get returns the model of an index, NULL when it is none or another tenant's.
const srv_model *srv_models_get(const srv_models *t, uint32_t index, uint32_t tenant);

#endif
