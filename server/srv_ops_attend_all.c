// attend_all: all layers of an open step, each when the client's stream raises its flag.
//
// The message is copied once and checked whole before anything is begun: layers, flags, and where
// the tensors lie in the connection's region.  What the region holds is read by the device alone.
// The client's stream may have raised flags of a call that is refused already, so that drains, too.
#include <string.h>

#include "server/srv_armed.h"
#include "server/srv_attend.h"
#include "server/srv_block_mask.h"
#include "server/srv_ops.h"

static attnd_err find_step(srv_core *core, const srv_request *rq, const proto_attend_all *body,
                           srv_step **out, attnd_errinfo *info) {
    srv_step *step = srv_step_find(core, rq->session, body->step);
    if (!step) {
        return attnd_fail(info, ATTND_ESTALE, "step", "the step is not open");
    }
    if (step->state == SRV_STEP_COMMITTING) {
        return attnd_fail(info, ATTND_EBUSY, "step", "a commit of the step is under way");
    }
    *out = step;
    return ATTND_OK;
}

// check_layers: what a layer reads of others is looked at when its flag comes.
static attnd_err check_layers(const srv_step *step, const proto_attend_all *body,
                              attnd_errinfo *info) {
    const attn_model *m = step->model->attn;
    uint64_t end = (uint64_t)body->first_layer + body->num_layers;
    if (body->num_layers == 0 || end > m->num_layers) {
        return attnd_fail(info, ATTND_EINVAL, "num_layers", "%u layers from %u on, of %u",
                          body->num_layers, body->first_layer, m->num_layers);
    }
    return ATTND_OK;
}

static bool appends(const srv_step *step, const proto_attend_all *body) {
    bool any = false;
    for (uint32_t i = 0; i < body->num_layers; i++) {
        any |= srv_attend_appends(step, body->first_layer + i);
    }
    return any;
}

// areas is where in the region everything lies; bytes 0 = nowhere.
typedef struct areas {
    proto_region_view q, k, v, out, lse;
} areas;

// read_tensor reads a tensor [rows, heads, dim] of the model's type, which must be there when rows
// are wanted, and may be when not.
static attnd_err read_tensor(const srv_region *region, const char *field,
                             const proto_region_tensor *t, const proto_tensor_shape *shape,
                             proto_region_view *out, attnd_errinfo *info) {
    if (t->off != PROTO_REGION_NONE) {
        return proto_region_place(srv_region_bytes(region), field, t, shape, out, info);
    }
    return shape->rows ? attnd_fail(info, ATTND_EINVAL, field, "%llu rows of %s are missing",
                                    (unsigned long long)shape->rows, field)
                       : ATTND_OK;
}

static attnd_err read_array(const srv_region *region, const char *field, uint64_t off,
                            uint64_t bytes, proto_region_view *out, attnd_errinfo *info) {
    if (bytes == 0 && off == PROTO_REGION_NONE) {
        return ATTND_OK;
    }
    *out = (proto_region_view){.off = off, .bytes = bytes};
    return proto_region_array(srv_region_bytes(region), field, off, bytes, info);
}

static attnd_err read_areas(const srv_region *region, const srv_step *step,
                            const proto_attend_all *body, areas *a, attnd_errinfo *info) {
    const attn_model *m = step->model->attn;
    uint32_t rows = step->rows, new_rows = appends(step, body) ? step->new_rows : 0;
    const proto_tensor_shape q = {rows, m->q_heads, m->head_dim, m->dtype},
                             k = {new_rows, m->kv_heads, m->head_dim, m->dtype},
                             v = {new_rows, m->kv_heads, m->v_head_dim, m->dtype};
    uint64_t out_bytes = (uint64_t)rows * m->q_heads * m->v_head_dim * attnd_dtype_bytes(m->dtype);
    uint64_t lse_bytes = (uint64_t)rows * m->q_heads * sizeof(float);
    bool lse = (body->flags & PROTO_ATTEND_LSE) != 0;
    attnd_err err = read_tensor(region, "q", &body->q, &q, &a->q, info);
    if (!err) {
        err = read_tensor(region, "k", &body->k, &k, &a->k, info);
    }
    if (!err) {
        err = read_tensor(region, "v", &body->v, &v, &a->v, info);
    }
    if (!err) {
        err = read_array(region, "out_off", body->out_off, out_bytes, &a->out, info);
    }
    if (!err && !lse && body->lse_off != PROTO_REGION_NONE) {
        err = attnd_fail(info, ATTND_EINVAL, "lse_off", "lse_off without PROTO_ATTEND_LSE");
    }
    if (!err && lse) {
        err = read_array(region, "lse_off", body->lse_off, lse_bytes, &a->lse, info);
    }
    return err;
}

static bool meet(const proto_region_view *a, const proto_region_view *b) {
    return a->bytes && b->bytes && a->off < b->off + b->bytes && b->off < a->off + a->bytes;
}

static attnd_err check_apart(const areas *a, attnd_errinfo *info) {
    const proto_region_view *const in[] = {&a->q, &a->k, &a->v};
    for (int i = 0; i < 3; i++) {
        if (meet(&a->out, in[i]) || meet(&a->lse, in[i])) {
            return attnd_fail(info, ATTND_EINVAL, meet(&a->out, in[i]) ? "out_off" : "lse_off",
                              "it overlaps q, k or v");
        }
    }
    return meet(&a->out, &a->lse) ? attnd_fail(info, ATTND_EINVAL, "lse_off", "out and lse overlap")
                                  : ATTND_OK;
}

// at returns the device address of an area, NULL for none.
static void *at(const srv_region *region, const proto_region_view *view) {
    return view->bytes ? (void *)(uintptr_t)(region->memory.address + view->off) : NULL;
}

static void fill_state(srv_request *rq, srv_step *step, const srv_region *region,
                       const proto_attend_all *body, const areas *a) {
    rq->attend = (srv_attend_state){
        .step = step,
        .flags = body->flags & ~(uint32_t)(PROTO_ATTEND_BLOCK_MASK | PROTO_ATTEND_AT_FLAGS),
        .on_device = true,
        .tensors = {.q = at(region, &a->q),
                    .k = at(region, &a->k),
                    .v = at(region, &a->v),
                    .out = at(region, &a->out),
                    .lse = at(region, &a->lse),
                    .rows = step->rows,
                    .q_stride = {a->q.stride_token, a->q.stride_head},
                    .k_stride = {a->k.stride_token, a->k.stride_head},
                    .v_stride = {a->v.stride_token, a->v.stride_head}},
    };
}

// make_reply takes the place now: what has run must also be told.
static attnd_err make_reply(srv_request *rq, attnd_errinfo *info) {
    uint8_t *reply;
    size_t bytes = sizeof(proto_attend_reply);
    attnd_err err = srv_reply_begin(rq, bytes, bytes, &reply, info);
    if (!err) {
        rq->attend.reply = (proto_attend_reply *)(void *)reply;
        rq->attend.reply->rows = rq->attend.step->rows;
    }
    return err;
}

// read_body reads the fixed part, behind which there is a mask or nothing.
static attnd_err read_body(const srv_request *rq, proto_attend_all *out, attnd_errinfo *info) {
    attnd_err err = proto_read(rq->msg, out, sizeof(*out), false, info);
    if (!err && !(out->flags & PROTO_ATTEND_BLOCK_MASK) &&
        rq->msg.bytes > PROTO_BODY + sizeof(*out)) {
        err = attnd_fail(info, ATTND_EPROTO, "body_bytes", "body of %zu bytes without a mask",
                         rq->msg.bytes - PROTO_BODY);
    }
    return err;
}

// check checks the message against the step and the region, and fills in rq->attend.
static attnd_err check(srv_core *core, srv_request *rq, const srv_region *region,
                       const proto_attend_all *body, attnd_errinfo *info) {
    srv_step *step = NULL;
    areas a;
    memset(&a, 0, sizeof(a));
    attnd_err err =
        proto_check_zero(body->flags & ~(uint32_t)(PROTO_ATTEND_LSE | PROTO_ATTEND_PARTIAL |
                                                   PROTO_ATTEND_BLOCK_MASK | PROTO_ATTEND_AT_FLAGS),
                         "flags", info);
    if (!err) {
        err = find_step(core, rq, body, &step, info);
    }
    if (!err) {
        err = check_layers(step, body, info);
    }
    if (!err) {
        err = read_areas(region, step, body, &a, info);
    }
    if (!err) {
        err = check_apart(&a, info);
    }
    if (!err) {
        fill_state(rq, step, region, body, &a);
        err = make_reply(rq, info);
    }
    if (!err && (body->flags & PROTO_ATTEND_BLOCK_MASK)) {
        err = srv_block_mask_read(core, rq, PROTO_BODY + sizeof(*body), sizeof(*body), info);
    }
    return err;
}

SRV_HANDLER(attend_all) {
    (void)kept;
    srv_region *region = rq->conn->region;
    proto_attend_all body;
    attnd_errinfo info;
    attnd_err err = region ? read_body(rq, &body, &info)
                           : attnd_fail(&info, ATTND_ENOTSUP, "op", "the connection has no region");
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    err = check(core, rq, region, &body, &info);
    if (!err) {
        err = srv_armed_start(core, rq, region, &body, &info);
    } else {
        srv_armed_refuse(core, region, &body, err);
    }
    if (err) {
        srv_block_mask_drop(rq);
        rq->attend.step = NULL;
        srv_reply_error(rq, err, &info);
    }
}
