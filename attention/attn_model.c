// Models: from the JSON of model_open to groups, offsets and launch parameters.
//
// What a layer's parameters may be is attn_check's to say: a model is tried with an empty row of
// each layer, so that no launch of it can be refused for them later.
//
// All numbers of a model lie in one array that is sized from the text: a number takes two bytes of
// JSON at least, so nothing that a client claims decides how much is allocated.
#include "attention/attn_model.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/proto_json.h"

enum { MAX_BLOCK_TOKENS = 4096 };

// ---- reading

static attnd_dtype read_dtype(proto_obj *o, const char *key, attnd_dtype fallback) {
    char name[16];
    if (!proto_obj_text(o, key, name, sizeof(name))) {
        return fallback;
    }
    attnd_dtype dtype = attnd_dtype_parse(name);
    if (dtype == ATTND_NUM_DTYPES) {
        proto_obj_fail(o, key, ATTND_ENOTSUP, "not one of f32, bf16, f16, f8e4m3");
        return fallback;
    }
    return dtype;
}

// read_floats reads an array of exactly num numbers (0 = any even count up to max) into the model's
// array.
static const float *read_floats(attn_model *m, proto_obj *o, const char *key, uint32_t num,
                                uint32_t max, uint32_t *got) {
    float *out = m->floats + m->num_floats;
    uint32_t room = m->max_floats - m->num_floats;
    *got = 0;
    if (!proto_obj_floats(o, key, out, room < max ? room : max, got)) {
        return NULL;
    }
    if (num && *got != num) {
        proto_obj_fail(o, key, ATTND_EINVAL, "has %u numbers, not %u", *got, num);
        return NULL;
    }
    m->num_floats += *got;
    return out;
}

static void read_rope(attn_model *m, proto_obj *o, attn_layer *layer) {
    proto_obj rope;
    if (proto_obj_null(o, "rope")) {
        layer->rope = (attn_rope){.rotary_dim = 0};
        return;
    }
    if (!proto_obj_child(o, "rope", &rope)) {
        return;
    }
    attn_rope r = {.attention_factor = 1};
    uint32_t num = 0;
    proto_obj_require(&rope, "inv_freq");
    r.inv_freq = read_floats(m, &rope, "inv_freq", 0, m->head_dim / 2, &num);
    if (r.inv_freq && num == 0) {
        proto_obj_fail(&rope, "inv_freq", ATTND_EINVAL, "is empty; null is no RoPE");
    }
    r.rotary_dim = (int32_t)(2 * num);
    proto_obj_float(&rope, "attention_factor", &r.attention_factor);
    proto_obj_bool(&rope, "interleaved", &r.interleaved);
    proto_obj_close(&rope);
    layer->rope = r;
}

static void read_window(proto_obj *o, attn_layer *layer) {
    int32_t window[2];
    uint32_t num = 0;
    if (proto_obj_ints(o, "window", window, 2, &num)) {
        if (num != 2) {
            proto_obj_fail(o, "window", ATTND_EINVAL, "has %u numbers, not 2", num);
            return;
        }
        layer->window_left = window[0];
        layer->window_right = window[1];
    }
}

static void read_array(attn_model *m, proto_obj *o, const char *key, uint32_t num,
                       const float **out) {
    uint32_t got;
    const float *values = read_floats(m, o, key, num, num, &got);
    if (values) {
        *out = values;
    }
}

// read_layer reads what may be said of all layers and of each.
static void read_layer(attn_model *m, proto_obj *o, attn_layer *layer) {
    proto_obj_float(o, "scale", &layer->scale);
    proto_obj_float(o, "softcap", &layer->softcap);
    read_window(o, layer);
    read_array(m, o, "sinks", m->q_heads, &layer->sinks);
    read_array(m, o, "alibi", m->q_heads, &layer->alibi);
    read_array(m, o, "k_scale", m->kv_heads, &layer->k_scale);
    read_array(m, o, "v_scale", m->kv_heads, &layer->v_scale);
    read_rope(m, o, layer);
    proto_obj_u32(o, "kv_layer", 0, m->num_layers - 1, &layer->kv_layer);
}

static void read_geometry(attn_model *m, proto_obj *o, uint32_t default_block_tokens) {
    static const char *const required[] = {"name",    "digest",   "dtype",   "layers",
                                           "q_heads", "kv_heads", "head_dim"};
    for (size_t i = 0; i < sizeof(required) / sizeof(required[0]); i++) {
        proto_obj_require(o, required[i]);
    }
    if (proto_obj_text(o, "name", m->name, sizeof(m->name)) && !m->name[0]) {
        proto_obj_fail(o, "name", ATTND_EINVAL, "is empty");
    }
    proto_obj_hex(o, "digest", m->digest, sizeof(m->digest));
    m->dtype = read_dtype(o, "dtype", ATTND_F32);
    m->kv_dtype = read_dtype(o, "kv_dtype", m->dtype);
    proto_obj_u32(o, "layers", 1, PROTO_MAX_LAYERS, &m->num_layers);
    proto_obj_u32(o, "q_heads", 1, ATTN_MAX_Q_HEADS, &m->q_heads);
    proto_obj_u32(o, "kv_heads", 1, ATTN_MAX_Q_HEADS, &m->kv_heads);
    proto_obj_u32(o, "head_dim", 1, ATTN_MAX_HEAD_DIM, &m->head_dim);
    m->v_head_dim = m->head_dim;
    proto_obj_u32(o, "v_head_dim", 1, ATTN_MAX_HEAD_DIM, &m->v_head_dim);
    m->block_tokens = default_block_tokens;
    proto_obj_u32(o, "block_tokens", 1, MAX_BLOCK_TOKENS, &m->block_tokens);
    m->causal = true;
    proto_obj_bool(o, "causal", &m->causal);
}

static attnd_err read_layers(attn_model *m, proto_obj *o, attnd_errinfo *info) {
    m->layers = calloc(m->num_layers, sizeof(*m->layers));
    if (!m->layers) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a model");
    }
    attn_layer all = {.window_left = -1, .window_right = -1, .kv_layer = UINT32_MAX};
    read_layer(m, o, &all);
    for (uint32_t i = 0; i < m->num_layers; i++) {
        m->layers[i] = all;
    }
    bool seen[PROTO_MAX_LAYERS] = {false};
    proto_obj item = {0};
    while (proto_obj_each(o, "layer_overrides", &item)) {
        uint32_t layer = 0;
        proto_obj_require(&item, "layer");
        proto_obj_u32(&item, "layer", 0, m->num_layers - 1, &layer);
        if (seen[layer]) {
            proto_obj_fail(&item, "layer", ATTND_EINVAL, "layer %u is there twice", layer);
        }
        seen[layer] = true;
        read_layer(m, &item, &m->layers[layer]);
    }
    return ATTND_OK;
}

// ---- groups

static attnd_err resolve_kv_layers(attn_model *m, attnd_errinfo *info) {
    for (uint32_t i = 0; i < m->num_layers; i++) {
        if (m->layers[i].kv_layer == UINT32_MAX) {
            m->layers[i].kv_layer = i;
        }
    }
    for (uint32_t i = 0; i < m->num_layers; i++) {
        const attn_layer *layer = &m->layers[i];
        const attn_layer *from = &m->layers[layer->kv_layer];
        if (from->kv_layer != layer->kv_layer) {
            return attnd_fail(info, ATTND_EINVAL, "kv_layer",
                              "layer %u reads layer %u, which has no K and V of its own", i,
                              layer->kv_layer);
        }
        if (from->window_left >= 0 &&
            (layer->window_left < 0 || layer->window_left > from->window_left)) {
            return attnd_fail(info, ATTND_EINVAL, "kv_layer",
                              "layer %u looks further back than layer %u, whose K and V it reads",
                              i, layer->kv_layer);
        }
    }
    return ATTND_OK;
}

// find_group returns the group of a layer's window, a new one when there is none,
// ATTN_MODEL_GROUPS when there is no room.
static uint32_t find_group(attn_model *m, const attn_layer *layer) {
    uint32_t g = 0;
    while (g < m->num_groups && (m->groups[g].window_left != layer->window_left ||
                                 m->groups[g].window_right != layer->window_right)) {
        g++;
    }
    if (g == m->num_groups && g < ATTN_MODEL_GROUPS) {
        m->groups[g].window_left = layer->window_left;
        m->groups[g].window_right = layer->window_right;
        m->num_groups++;
    }
    return g;
}

static attnd_err make_groups(attn_model *m, attnd_errinfo *info) {
    uint64_t rows = (uint64_t)m->kv_heads * m->block_tokens * attnd_dtype_bytes(m->kv_dtype);
    uint64_t k_bytes = rows * m->head_dim, v_bytes = rows * m->v_head_dim;
    for (uint32_t i = 0; i < m->num_layers; i++) {
        attn_layer *layer = &m->layers[i];
        if (layer->kv_layer != i) {
            continue;
        }
        uint32_t g = find_group(m, layer);
        if (g == ATTN_MODEL_GROUPS) {
            return attnd_fail(info, ATTND_ENOTSUP, "window", "more than %d different windows",
                              ATTN_MODEL_GROUPS);
        }
        layer->group = g;
        layer->k_offset = m->groups[g].layers++ * (k_bytes + v_bytes);
        layer->v_offset = layer->k_offset + k_bytes;
    }
    for (uint32_t i = 0; i < m->num_layers; i++) {
        const attn_layer *from = &m->layers[m->layers[i].kv_layer];
        m->layers[i].group = from->group;
        m->layers[i].k_offset = from->k_offset;
        m->layers[i].v_offset = from->v_offset;
        m->shares_kv |= m->layers[i].kv_layer != i;
    }
    return ATTND_OK;
}

static void make_shape(attn_model *m) {
    m->shape = (attn_shape){
        .q_dtype = m->dtype,
        .kv_dtype = m->kv_dtype,
        .q_heads = (int32_t)m->q_heads,
        .kv_heads = (int32_t)m->kv_heads,
        .head_dim = (int32_t)m->head_dim,
        .v_head_dim = (int32_t)m->v_head_dim,
        .block_tokens = (int32_t)m->block_tokens,
        .stride_k_token = m->head_dim,
        .stride_k_head = (int64_t)m->block_tokens * m->head_dim,
        .stride_v_token = m->v_head_dim,
        .stride_v_head = (int64_t)m->block_tokens * m->v_head_dim,
        .block_stride = ATTN_MODEL_BLOCK_UNIT,
    };
}

void attn_layer_fill(const attn_model *m, uint32_t layer_idx, attn_row *row) {
    const attn_layer *layer = &m->layers[layer_idx];
    row->k_offset = layer->k_offset;
    row->v_offset = layer->v_offset;
    row->flags = m->causal ? ATTN_CAUSAL : 0;
    row->scale = layer->scale;
    row->softcap = layer->softcap;
    row->window_left = layer->window_left;
    row->window_right = layer->window_right;
    row->sinks = layer->sinks;
    row->alibi_slopes = layer->alibi;
    row->k_scale = layer->k_scale;
    row->v_scale = layer->v_scale;
    row->rope = layer->rope.rotary_dim ? &layer->rope : NULL;
}

// try_layers has attention check each layer's parameters, on a row without tokens.
static attnd_err try_layers(const attn_model *m, attnd_errinfo *info) {
    uint64_t nothing = 0;
    for (uint32_t i = 0; i < m->num_layers; i++) {
        attn_row row = {.q_len = 0};
        attn_layer_fill(m, i, &row);
        attn_params params = {.shape = m->shape,
                              .pool = &nothing,
                              .pool_bytes = sizeof(nothing),
                              .num_blocks = 1,
                              .rows = &row,
                              .num_rows = 1};
        attnd_err err = attn_check(&params, info);
        if (err) {
            return err;
        }
    }
    return ATTND_OK;
}

static attnd_err finish(attn_model *m, attnd_errinfo *info) {
    make_shape(m);
    attnd_err err = attn_check_shape(&m->shape, info);
    if (!err) {
        err = resolve_kv_layers(m, info);
    }
    if (!err) {
        err = try_layers(m, info);
    }
    if (!err) {
        err = make_groups(m, info);
    }
    return err;
}

attnd_err attn_model_parse(attn_model **out, const void *json, size_t bytes,
                           uint32_t default_block_tokens, attnd_errinfo *info) {
    cJSON *doc = NULL;
    attnd_err err = proto_json_parse(&doc, json, bytes, info);
    if (err) {
        return err;
    }
    attn_model *m = calloc(1, sizeof(*m));
    float *floats = m ? calloc(bytes / 2 + 1, sizeof(*floats)) : NULL;
    if (!floats) {
        free(m);
        cJSON_Delete(doc);
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a model");
    }
    m->floats = floats;
    m->max_floats = (uint32_t)(bytes / 2 + 1);
    m->num_layers = m->q_heads = m->kv_heads = 1; // until they are read
    proto_obj o;
    proto_obj_open(&o, doc, info);
    read_geometry(m, &o, default_block_tokens);
    err = read_layers(m, &o, info);
    attnd_err read_err = proto_obj_close(&o);
    cJSON_Delete(doc);
    if (!err) {
        err = read_err ? read_err : finish(m, info);
    }
    if (err) {
        attn_model_free(m);
        return err;
    }
    *out = m;
    return ATTND_OK;
}

void attn_model_free(attn_model *m) {
    if (m) {
        free(m->layers);
        free(m->floats);
        free(m);
    }
}

// ---- equality

static bool same_floats(const float *a, const float *b, uint32_t num) {
    return a && b ? memcmp(a, b, num * sizeof(*a)) == 0 : !a && !b;
}

static bool same_bits(float a, float b) {
    return memcmp(&a, &b, sizeof(a)) == 0;
}

bool attn_layer_equal(const attn_model *m, const attn_layer *a, const attn_layer *b) {
    const attn_rope *ra = &a->rope, *rb = &b->rope;
    return same_bits(a->scale, b->scale) && same_bits(a->softcap, b->softcap) &&
           a->window_left == b->window_left && a->window_right == b->window_right &&
           ra->rotary_dim == rb->rotary_dim &&
           (!ra->rotary_dim ||
            (ra->interleaved == rb->interleaved &&
             same_bits(ra->attention_factor, rb->attention_factor) &&
             same_floats(ra->inv_freq, rb->inv_freq, (uint32_t)ra->rotary_dim / 2))) &&
           same_floats(a->sinks, b->sinks, m->q_heads) &&
           same_floats(a->alibi, b->alibi, m->q_heads) &&
           same_floats(a->k_scale, b->k_scale, m->kv_heads) &&
           same_floats(a->v_scale, b->v_scale, m->kv_heads);
}

bool attn_model_equal(const attn_model *a, const attn_model *b) {
    bool same = strcmp(a->name, b->name) == 0 && a->dtype == b->dtype &&
                a->kv_dtype == b->kv_dtype && a->num_layers == b->num_layers &&
                a->q_heads == b->q_heads && a->kv_heads == b->kv_heads &&
                a->head_dim == b->head_dim && a->v_head_dim == b->v_head_dim &&
                a->block_tokens == b->block_tokens && a->causal == b->causal;
    for (uint32_t i = 0; same && i < a->num_layers; i++) {
        same = a->layers[i].kv_layer == b->layers[i].kv_layer &&
               attn_layer_equal(a, &a->layers[i], &b->layers[i]);
    }
    return same;
}
