// kv_model: what the rest of kvcache asks of models (the public part is in kv_cache.h).
#ifndef ATTND_KVCACHE_KV_MODEL_H
#define ATTND_KVCACHE_KV_MODEL_H

#include "kvcache/kv_ledger.h"

// kv_model_find checks that the index is a model of the tenant.  ATTND_ENOENT.
attnd_err kv_model_find(const kv_cache *kv, uint32_t tenant, uint32_t model, attnd_errinfo *info);

// kv_model_revive takes the size classes that a recovered model needs; false when its spec is none
// that kv_model_open would have made.
bool kv_model_revive(kv_cache *kv, uint32_t model);

// kv_model_seq_gone is told that a sequence of the model was freed, kv_model_node_gone that a node
// of its prefix tree was removed; the last user, sequence or node to go takes the model with it.
void kv_model_seq_gone(kv_cache *kv, uint32_t model);
void kv_model_node_gone(kv_cache *kv, uint32_t model);

#endif
