// Open models: a table by the cache's index, and the shapes of their launches.
#include "server/srv_model.h"

#include <stdlib.h>
#include <string.h>

#include "kvcache/kv_sum.h"

_Static_assert((int)ATTN_MODEL_BLOCK_UNIT == (int)KV_BLOCK_UNIT,
               "table entries count the same unit");
_Static_assert((int)ATTN_MODEL_GROUPS == (int)KV_MAX_GROUPS, "as many groups");
_Static_assert((int)ATTN_MODEL_DIGEST_BYTES == (int)KV_DIGEST_BYTES, "digests of one size");
_Static_assert((int)PROTO_NAME_BYTES == (int)KV_NAME_BYTES, "names of one size");

static uint64_t add_floats(uint64_t hash, const float *floats, uint32_t num) {
    uint32_t has = floats ? num : 0;
    hash = kv_sum_bytes(&has, sizeof(has), hash);
    return has ? kv_sum_bytes(floats, has * sizeof(*floats), hash) : hash;
}

static uint64_t add_layer(uint64_t hash, const attn_model *m, const attn_layer *l) {
    const attn_rope *rope = &l->rope;
    bool turns = rope->rotary_dim > 0;
    const float numbers[] = {l->scale, l->softcap, turns ? rope->attention_factor : 0};
    const int32_t others[] = {l->window_left, l->window_right, (int32_t)l->kv_layer,
                              turns && rope->interleaved};
    hash = kv_sum_bytes(numbers, sizeof(numbers), hash);
    hash = kv_sum_bytes(others, sizeof(others), hash);
    hash = add_floats(hash, turns ? rope->inv_freq : NULL, (uint32_t)rope->rotary_dim / 2);
    hash = add_floats(hash, l->sinks, m->q_heads);
    hash = add_floats(hash, l->alibi, m->q_heads);
    hash = add_floats(hash, l->k_scale, m->kv_heads);
    return add_floats(hash, l->v_scale, m->kv_heads);
}

// fold adds to a digest what else the rows of a model depend on, and with them its cached prefixes:
// all that its launches see.  Models that are equal (attn_model_equal) have equal digests.
static void fold(const attn_model *m, uint8_t digest[KV_DIGEST_BYTES]) {
    const uint32_t whole[] = {m->dtype, m->kv_dtype, m->causal, m->num_layers, m->q_heads};
    uint64_t hash = kv_sum_bytes(whole, sizeof(whole), 0);
    for (uint32_t i = 0; i < m->num_layers; i++) {
        hash = add_layer(hash, m, &m->layers[i]);
    }
    for (size_t i = 0; i < sizeof(hash); i++) {
        digest[i] ^= (uint8_t)(hash >> 8 * i);
    }
}

static void make_spec(const attn_model *m, uint32_t tenant, kv_model_spec *spec) {
    uint32_t elem = attnd_dtype_bytes(m->kv_dtype);
    *spec = (kv_model_spec){.tenant = tenant, .num_groups = m->num_groups};
    memcpy(spec->name, m->name, sizeof(spec->name));
    memcpy(spec->digest, m->digest, sizeof(spec->digest));
    fold(m, spec->digest);
    for (uint32_t g = 0; g < m->num_groups; g++) {
        spec->groups[g] = (kv_group_spec){.layers = m->groups[g].layers,
                                          .kv_heads = m->kv_heads,
                                          .k_row_bytes = m->head_dim * elem,
                                          .v_row_bytes = m->v_head_dim * elem,
                                          .block_tokens = m->block_tokens,
                                          .window_left = m->groups[g].window_left};
    }
}

attnd_err srv_model_parse(srv_model **out, const void *json, size_t bytes, uint32_t tenant,
                          uint32_t default_block_tokens, attnd_errinfo *info) {
    srv_model *m = calloc(1, sizeof(*m));
    if (!m) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a model");
    }
    attnd_err err = attn_model_parse(&m->attn, json, bytes, default_block_tokens, info);
    if (err) {
        free(m);
        return err;
    }
    make_spec(m->attn, tenant, &m->spec);
    *out = m;
    return ATTND_OK;
}

void srv_model_free(srv_model *m) {
    if (m) {
        attn_model_free(m->attn);
        free(m);
    }
}

attnd_err srv_models_init(srv_models *t, uint32_t max) {
    t->by_index = calloc(max, sizeof(*t->by_index));
    t->shapes = calloc(max, sizeof(*t->shapes));
    t->max = max;
    return t->by_index && t->shapes ? ATTND_OK : ATTND_ENOMEM;
}

static void forget(srv_models *t, uint32_t i) {
    for (uint32_t k = 0; k < t->max; k++) {
        t->shapes[k].users -= &t->shapes[k].shape == t->by_index[i]->shape;
    }
    srv_model_free(t->by_index[i]);
    t->by_index[i] = NULL;
}

void srv_models_forget(srv_models *t, uint32_t index) {
    if (t->by_index[index]) {
        forget(t, index);
    }
}

void srv_models_fini(srv_models *t) {
    for (uint32_t i = 0; t->by_index && i < t->max; i++) {
        srv_model_free(t->by_index[i]);
    }
    free(t->by_index);
    free(t->shapes);
}

// same_shape compares field by field, since padding may differ.
static bool same_shape(const attn_shape *a, const attn_shape *b) {
    return a->q_dtype == b->q_dtype && a->kv_dtype == b->kv_dtype && a->q_heads == b->q_heads &&
           a->kv_heads == b->kv_heads && a->head_dim == b->head_dim &&
           a->v_head_dim == b->v_head_dim && a->block_tokens == b->block_tokens &&
           a->stride_k_token == b->stride_k_token && a->stride_k_head == b->stride_k_head &&
           a->stride_v_token == b->stride_v_token && a->stride_v_head == b->stride_v_head &&
           a->block_stride == b->block_stride;
}

// intern returns the shape of the table that equals the given one.  There is always room: at most
// one a model.
static const attn_shape *intern(srv_models *t, const attn_shape *shape) {
    srv_shape *unused = NULL;
    for (uint32_t i = 0; i < t->max; i++) {
        srv_shape *s = &t->shapes[i];
        if (s->users && same_shape(&s->shape, shape)) {
            s->users++;
            return &s->shape;
        }
        unused = s->users || unused ? unused : s;
    }
    ATTND_ASSERT(unused);
    unused->shape = *shape;
    unused->users = 1;
    return &unused->shape;
}

attnd_err srv_models_put(srv_models *t, uint32_t index, srv_model *model, attnd_errinfo *info) {
    ATTND_ASSERT(index < t->max);
    const srv_model *old = t->by_index[index];
    if (old &&
        (old->spec.tenant != model->spec.tenant || !attn_model_equal(old->attn, model->attn))) {
        return attnd_fail(info, ATTND_EEXIST, "name",
                          "a model of that name is open with other parameters");
    }
    if (old) {
        srv_model_free(model);
        return ATTND_OK;
    }
    model->shape = intern(t, &model->attn->shape);
    t->by_index[index] = model;
    return ATTND_OK;
}

void srv_models_sweep(srv_models *t, const kv_cache *kv) {
    for (uint32_t i = 0; i < t->max; i++) {
        if (t->by_index[i] && !kv_model_get(kv, i)) {
            forget(t, i);
        }
    }
}

const srv_model *srv_models_get(const srv_models *t, uint32_t index, uint32_t tenant) {
    const srv_model *m = index < t->max ? t->by_index[index] : NULL;
    return m && m->spec.tenant == tenant ? m : NULL;
}
