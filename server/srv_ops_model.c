// model_open, model_close, model_list.
//
// The cache decides which model a name is; the daemon adds the launch parameters, which must be the
// same for everybody who opens it.  A session may open a model several times; what it has not
// closed is closed with it.
#include <cjson/cJSON.h>
#include <string.h>

#include "proto/proto_json.h"
#include "server/srv_ops.h"

static void add_window(cJSON *o, int32_t left, int32_t right) {
    cJSON *window = cJSON_AddArrayToObject(o, "window");
    cJSON_AddItemToArray(window, cJSON_CreateNumber(left));
    cJSON_AddItemToArray(window, cJSON_CreateNumber(right));
}

static uint64_t block_bytes(const kv_group_spec *g) {
    return (uint64_t)g->layers * g->kv_heads * g->block_tokens * (g->k_row_bytes + g->v_row_bytes);
}

static void add_groups(cJSON *doc, const srv_model *model) {
    const attn_model *m = model->attn;
    cJSON *groups = cJSON_AddArrayToObject(doc, "groups");
    for (uint32_t g = 0; g < m->num_groups; g++) {
        cJSON *o = cJSON_CreateObject();
        cJSON *layers = cJSON_AddArrayToObject(o, "layers");
        for (uint32_t i = 0; i < m->num_layers; i++) {
            if (m->layers[i].group == g && m->layers[i].kv_layer == i) {
                cJSON_AddItemToArray(layers, cJSON_CreateNumber(i));
            }
        }
        add_window(o, m->groups[g].window_left, m->groups[g].window_right);
        cJSON_AddNumberToObject(o, "block_bytes", (double)block_bytes(&model->spec.groups[g]));
        cJSON_AddItemToArray(groups, o);
    }
}

// check_backend asks the backend whether it can do the model.
static attnd_err check_backend(const srv_backend *b, const attn_model *m, attnd_errinfo *info) {
    attnd_err err = b->ops->check_shape ? b->ops->check_shape(&m->shape, info) : ATTND_OK;
    for (uint32_t i = 0; i < m->num_layers && !err && b->ops->check_row; i++) {
        attn_row row = {.q_len = 0};
        attn_layer_fill(m, i, &row);
        err = b->ops->check_row(b, &m->shape, &row, info);
    }
    return err;
}

// open_model takes model on success only.
static attnd_err open_model(srv_core *core, srv_session *s, srv_model *model, uint32_t *idx,
                            attnd_errinfo *info) {
    attnd_err err = check_backend(core->backend, model->attn, info);
    if (!err) {
        err = kv_model_open(core->kv, &model->spec, idx, info);
    }
    if (err) {
        return err;
    }
    if (kv_model_is_new(core->kv, *idx)) { // what had the index before is gone
        srv_models_forget(&core->models, *idx);
    }
    if (s->model_uses[*idx] == UINT16_MAX) {
        err = attnd_fail(info, ATTND_EBUSY, "name", "the session has opened it too often");
    } else {
        err = srv_models_put(&core->models, *idx, model, info);
    }
    if (err) {
        kv_model_close(core->kv, *idx);
        return err;
    }
    s->model_uses[*idx]++;
    return ATTND_OK;
}

SRV_HANDLER(model_open) {
    (void)kept;
    srv_model *model = NULL;
    uint32_t idx = 0;
    attnd_errinfo info;
    attnd_err err =
        srv_model_parse(&model, rq->msg.data + sizeof(proto_header), rq->header.body_bytes,
                        rq->session->tenant, (uint32_t)core->conf.block_tokens, &info);
    if (!err) {
        err = open_model(core, rq->session, model, &idx, &info);
        if (err) {
            srv_model_free(model);
        }
    }
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    const srv_model *m = srv_models_get(&core->models, idx, rq->session->tenant);
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddNumberToObject(doc, "model", idx);
    cJSON_AddNumberToObject(doc, "block_tokens", m->attn->block_tokens);
    add_groups(doc, m);
    srv_reply_json(rq, doc);
}

SRV_HANDLER(model_close) {
    (void)kept;
    proto_model body;
    attnd_errinfo info;
    srv_session *s = rq->session;
    attnd_err err = proto_read(rq->msg, &body, sizeof(body), true, &info);
    if (!err && body.reserved) {
        err = attnd_fail(&info, ATTND_EINVAL, "reserved", "must be 0");
    }
    if (!err && (body.model >= core->models.max || !s->model_uses[body.model])) {
        err = attnd_fail(&info, ATTND_ENOENT, "model", "the session has no such model open");
    }
    if (!err) {
        err = kv_model_close(core->kv, body.model);
    }
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    s->model_uses[body.model]--;
    srv_core_freed(core);
    srv_reply_empty(rq);
}

static void describe(cJSON *o, const srv_model *model) {
    const attn_model *m = model->attn;
    proto_json_add_hex(o, "digest", m->digest, sizeof(m->digest));
    cJSON_AddStringToObject(o, "dtype", attnd_dtype_name(m->dtype));
    cJSON_AddStringToObject(o, "kv_dtype", attnd_dtype_name(m->kv_dtype));
    cJSON_AddNumberToObject(o, "layers", m->num_layers);
    cJSON_AddNumberToObject(o, "q_heads", m->q_heads);
    cJSON_AddNumberToObject(o, "kv_heads", m->kv_heads);
    cJSON_AddNumberToObject(o, "head_dim", m->head_dim);
    cJSON_AddNumberToObject(o, "v_head_dim", m->v_head_dim);
    cJSON_AddNumberToObject(o, "block_tokens", m->block_tokens);
    cJSON_AddBoolToObject(o, "causal", m->causal);
    add_groups(o, model);
}

// Of a model that nobody has opened since a restart, the cache's part is all that is known.
SRV_HANDLER(model_list) {
    (void)kept;
    cJSON *doc = cJSON_CreateObject();
    cJSON *list = cJSON_AddArrayToObject(doc, "models");
    for (uint32_t i = 0; i < core->models.max; i++) {
        const kv_model_spec *spec = kv_model_get(core->kv, i);
        if (!spec || !(rq->conn->admin || spec->tenant == rq->session->tenant)) {
            continue;
        }
        cJSON *o = cJSON_CreateObject();
        char tenant[KV_NAME_BYTES];
        uint32_t blocks, quota;
        cJSON_AddNumberToObject(o, "model", i);
        cJSON_AddStringToObject(o, "name", spec->name);
        if (kv_tenant_get(core->kv, spec->tenant, tenant, &blocks, &quota) == ATTND_OK) {
            cJSON_AddStringToObject(o, "tenant", tenant);
        }
        if (core->models.by_index[i]) {
            describe(o, core->models.by_index[i]);
        }
        cJSON_AddItemToArray(list, o);
    }
    srv_reply_json(rq, doc);
}
