// srv_model is what the daemon knows of an open model: how launches see it (attn_model.h), whose it
// is, and its groups as the cache knows them.  Owned by srv_models, by the cache's index; forgotten
// when the cache forgets the model.  Loop thread only.
#ifndef ATTND_SERVER_SRV_MODEL_H
#define ATTND_SERVER_SRV_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "attention/attn_model.h"
#include "kvcache/kv_cache.h"

typedef struct srv_model {
    attn_model *attn;        // owned
    const attn_shape *shape; // interned: equal geometry has equal pointers
    kv_model_spec spec;
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

// srv_model_parse reads the JSON body of a tenant's model_open into a new model, checked whole;
// shape is NULL until it is in the table.  default_block_tokens is the daemon's.  The caller owns
// *out: srv_model_free, which accepts NULL.
attnd_err srv_model_parse(srv_model **out, const void *json, size_t bytes, uint32_t tenant,
                          uint32_t default_block_tokens, attnd_errinfo *info);
void srv_model_free(srv_model *model);

// srv_models_put gives the model to the table under the cache's index.  A model that is there
// already and equal stays, and the given one is freed; an unequal one is ATTND_EEXIST and nothing
// is taken.
attnd_err srv_models_put(srv_models *t, uint32_t index, srv_model *model, attnd_errinfo *info);

// srv_models_forget forgets the model of an index, if there is one: nobody uses it.
void srv_models_forget(srv_models *t, uint32_t index);

// srv_models_sweep forgets the models that the cache has forgotten.
void srv_models_sweep(srv_models *t, const kv_cache *kv);

// srv_models_get returns the model of an index, NULL when it is none or another tenant's.
const srv_model *srv_models_get(const srv_models *t, uint32_t index, uint32_t tenant);

#endif
