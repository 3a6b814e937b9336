// Models: the JSON of model_open, and the shapes that later messages need.
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/client.h"
#include "proto/proto_json.h"

attnd_err client_model_get(attnd_client *c, uint32_t model, client_model *out,
                           attnd_errinfo *info) {
    pthread_mutex_lock(&c->lock);
    const client_model *m = c->models;
    while (m && m->model != model) {
        m = m->next;
    }
    if (m && out) {
        *out = *m;
    }
    pthread_mutex_unlock(&c->lock);
    return m ? ATTND_OK : attnd_fail(info, ATTND_ENOENT, "model", "model %u is not open", model);
}

void client_models_free(attnd_client *c) {
    while (c->models) {
        client_model *m = c->models;
        c->models = m->next;
        free(m->json);
        free(m);
    }
}

// writer builds the JSON; the first allocation that fails is remembered, so that nothing is sent
// with a key missing.
typedef struct writer {
    const attnd_model_opts *opts;
    bool failed;
} writer;

// put adds item, which it takes, to an object, or (key NULL) to an array; returns it.
static cJSON *put(writer *w, cJSON *to, const char *key, cJSON *item) {
    bool ok =
        to && item && (key ? cJSON_AddItemToObject(to, key, item) : cJSON_AddItemToArray(to, item));
    if (!ok) {
        w->failed = true;
        cJSON_Delete(item);
        return NULL;
    }
    return item;
}

static void put_number(writer *w, cJSON *to, const char *key, double value) {
    put(w, to, key, cJSON_CreateNumber(value));
}

static void put_floats(writer *w, cJSON *to, const char *key, const float *values, uint32_t num) {
    if (values) {
        put(w, to, key, cJSON_CreateFloatArray(values, (int)num));
    }
}

static void put_nonzero(writer *w, cJSON *to, const char *key, double value) {
    if (value != 0.0) {
        put_number(w, to, key, value);
    }
}

// put_layer writes what is not default.
static void put_layer(writer *w, cJSON *o, const attnd_layer_opts *l) {
    put_nonzero(w, o, "scale", (double)l->scale);
    put_nonzero(w, o, "softcap", (double)l->softcap);
    if (l->window_left != -1 || l->window_right != -1) {
        const int window[2] = {l->window_left, l->window_right};
        put(w, o, "window", cJSON_CreateIntArray(window, 2));
    }
    put_floats(w, o, "sinks", l->sinks, w->opts->q_heads);
    put_floats(w, o, "alibi", l->alibi_slopes, w->opts->q_heads);
    put_floats(w, o, "k_scale", l->k_scale, w->opts->kv_heads);
    put_floats(w, o, "v_scale", l->v_scale, w->opts->kv_heads);
    if (l->kv_layer != -1) {
        put_number(w, o, "kv_layer", l->kv_layer);
    }
    if (l->rope.num_inv_freq > 0) {
        cJSON *rope = put(w, o, "rope", cJSON_CreateObject());
        put_floats(w, rope, "inv_freq", l->rope.inv_freq, l->rope.num_inv_freq);
        put_nonzero(w, rope, "attention_factor", (double)l->rope.attention_factor);
        put(w, rope, "interleaved", cJSON_CreateBool(l->rope.interleaved));
    }
}

static void put_model(writer *w, cJSON *o) {
    const attnd_model_opts *m = w->opts;
    put(w, o, "name", cJSON_CreateString(m->name));
    w->failed |= proto_json_add_hex(o, "digest", m->digest, sizeof(m->digest)) != ATTND_OK;
    put(w, o, "dtype", cJSON_CreateString(attnd_dtype_name(m->dtype)));
    put(w, o, "kv_dtype", cJSON_CreateString(attnd_dtype_name(m->kv_dtype)));
    put_number(w, o, "layers", m->layers);
    put_number(w, o, "q_heads", m->q_heads);
    put_number(w, o, "kv_heads", m->kv_heads);
    put_number(w, o, "head_dim", m->head_dim);
    put_nonzero(w, o, "v_head_dim", m->v_head_dim);
    put_nonzero(w, o, "block_tokens", m->block_tokens);
    put(w, o, "causal", cJSON_CreateBool(!m->not_causal));
    if (!m->per_layer) {
        put_layer(w, o, &m->all);
        return;
    }
    cJSON *overrides = put(w, o, "layer_overrides", cJSON_CreateArray());
    for (uint32_t i = 0; i < m->layers && !w->failed; i++) {
        cJSON *layer = put(w, overrides, NULL, cJSON_CreateObject());
        put_number(w, layer, "layer", i);
        put_layer(w, layer, &m->per_layer[i]);
    }
}

// model_text returns the JSON of model_open, NULL without memory; cJSON_free.
static char *model_text(const attnd_model_opts *opts) {
    writer w = {.opts = opts};
    cJSON *o = cJSON_CreateObject();
    put_model(&w, o);
    char *text = w.failed ? NULL : cJSON_PrintUnformatted(o);
    cJSON_Delete(o);
    return text;
}

// check_opts refuses what cannot be written down; the daemon judges the rest.
static attnd_err check_opts(const attnd_model_opts *m, attnd_errinfo *info) {
    if (!m->name) {
        return attnd_fail(info, ATTND_EINVAL, "name", "name is NULL");
    }
    if (!attnd_dtype_bytes(m->dtype) || !attnd_dtype_bytes(m->kv_dtype)) {
        return attnd_fail(info, ATTND_EINVAL, attnd_dtype_bytes(m->dtype) ? "kv_dtype" : "dtype",
                          "not a dtype");
    }
    if (m->layers > PROTO_MAX_LAYERS) {
        return attnd_fail(info, ATTND_EINVAL, "layers", "layers %u, at most %d", m->layers,
                          PROTO_MAX_LAYERS);
    }
    const uint32_t most = 65535; // products of rows, heads and dim then fit 64 bits
    const uint32_t dims[] = {m->q_heads, m->kv_heads, m->head_dim, m->v_head_dim};
    const char *const names[] = {"q_heads", "kv_heads", "head_dim", "v_head_dim"};
    for (int i = 0; i < 4; i++) {
        if (dims[i] > most) {
            return attnd_fail(info, ATTND_EINVAL, names[i], "%s %u, at most %u", names[i], dims[i],
                              most);
        }
    }
    for (uint32_t i = 0; i < (m->per_layer ? m->layers : 1); i++) {
        const attnd_rope_opts *rope = m->per_layer ? &m->per_layer[i].rope : &m->all.rope;
        if (rope->num_inv_freq > most || (rope->num_inv_freq && !rope->inv_freq)) {
            return attnd_fail(info, ATTND_EINVAL, "rope.inv_freq", "no or too many inv_freq");
        }
    }
    return ATTND_OK;
}

// open_model sends the JSON and reads the model's number from the reply.
static attnd_err open_model(attnd_client *c, const char *json, uint32_t *model,
                            attnd_errinfo *info) {
    char *reply = NULL;
    cJSON *doc = NULL;
    attnd_err err = client_call_json(c, PROTO_MODEL_OPEN, json, &reply, info);
    if (!err) {
        err = proto_json_parse(&doc, reply, strlen(reply), info);
    }
    uint32_t block_tokens = 0;
    if (!err) {
        proto_obj o;
        proto_obj_open(&o, doc, info);
        if (!proto_obj_u32(&o, "model", 0, UINT32_MAX, model) ||
            (client_in_process(c) &&
             !proto_obj_u32(&o, "block_tokens", 1, UINT32_MAX, &block_tokens))) {
            err = attnd_fail(info, ATTND_EPROTO, "model", "the reply names no model");
        }
    }
    cJSON_Delete(doc);
    free(reply);
    if (!err && client_in_process(c) &&
        (err = client_engine_model(c, *model, json, block_tokens, info))) {
        proto_model body = {.model = *model};
        client_call_fixed(c, PROTO_MODEL_CLOSE, &body, sizeof(body), NULL, 0, NULL);
    }
    return err;
}

attnd_err attnd_model_open(attnd_client *c, const attnd_model_opts *opts, uint32_t *model,
                           attnd_errinfo *info) {
    attnd_err err = check_opts(opts, info);
    if (err) {
        return err;
    }
    char *text = model_text(opts);
    client_model *m = malloc(sizeof(*m));
    char *json = text ? strdup(text) : NULL;
    if (!json || !m) {
        err = attnd_fail(info, ATTND_ENOMEM, "", "no memory for a model");
    } else {
        *m = (client_model){.q_heads = opts->q_heads,
                            .kv_heads = opts->kv_heads,
                            .head_dim = opts->head_dim,
                            .v_head_dim = opts->v_head_dim ? opts->v_head_dim : opts->head_dim,
                            .dtype = opts->dtype,
                            .json = json};
        err = open_model(c, text, &m->model, info);
    }
    cJSON_free(text);
    if (err) {
        free(json);
        free(m);
        return err;
    }
    *model = m->model;
    pthread_mutex_lock(&c->lock);
    m->next = c->models;
    c->models = m;
    pthread_mutex_unlock(&c->lock);
    return ATTND_OK;
}

attnd_err client_models_again(attnd_client *c, attnd_errinfo *info) {
    for (client_model *m = c->models; m; m = m->next) {
        uint32_t model = UINT32_MAX;
        attnd_err err = open_model(c, m->json, &model, info);
        if (err == ATTND_EEXIST || (!err && model != m->model)) {
            return attnd_fail(info, ATTND_ESTALE, "model", "model %u has become another", m->model);
        }
        if (err) {
            return err;
        }
    }
    return ATTND_OK;
}

attnd_err attnd_model_close(attnd_client *c, uint32_t model, attnd_errinfo *info) {
    proto_model body = {.model = model};
    attnd_err err = client_call_fixed(c, PROTO_MODEL_CLOSE, &body, sizeof(body), NULL, 0, info);
    if (err) {
        return err;
    }
    pthread_mutex_lock(&c->lock);
    client_model **at = &c->models;
    while (*at && (*at)->model != model) {
        at = &(*at)->next;
    }
    client_model *gone = *at;
    if (gone) {
        *at = gone->next;
    }
    pthread_mutex_unlock(&c->lock);
    if (gone) {
        free(gone->json);
    }
    free(gone);
    return ATTND_OK;
}
