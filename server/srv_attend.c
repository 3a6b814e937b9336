// One attend.
//
// The rows of a launch are built from three places: the step (lengths, tables, positions, masks),
// the model's layer (offsets, scales, window, RoPE), the request (tensors).  Launches mix rows of
// several clients, and one bad row would refuse them all, so a request's rows are checked alone
// first.
//
// A layer that is being attended is not attended again until that has ended: two appends to the
// same slots in one launch would race.  A layer that reads another's K and V waits for it.
#include "server/srv_attend.h"

#include <string.h>

#include "proto/clock.h"
#include "server/srv_block_mask.h"
#include "server/srv_stage.h"

static void set_bit(uint64_t *set, uint32_t layer) {
    set[layer / 64] |= 1ull << (layer % 64);
}

static void clear_bit(uint64_t *set, uint32_t layer) {
    set[layer / 64] &= ~(1ull << (layer % 64));
}

// ---- rows

static void fill_row(const srv_request *rq, uint32_t seq_idx, attn_row *row) {
    const srv_attend_state *a = &rq->attend;
    const srv_step *step = a->step;
    const attn_model *m = step->model->attn;
    uint32_t num_entries;
    memset(row, 0, sizeof(*row));
    attn_layer_fill(m, a->layer, row);
    attn_seq_fill(&step->seqs[seq_idx], &m->shape, &a->tensors, row);
    row->flags |= a->flags & PROTO_ATTEND_PARTIAL ? ATTN_PARTIAL : 0;
    row->flags |= a->on_device ? SRV_STAGE_ON_DEVICE : 0;
    row->block_mask = a->masks ? &a->masks[seq_idx] : NULL;
    row->table = kv_step_table(rq->session->core->kv, step->handle, seq_idx,
                               m->layers[a->layer].group, &num_entries);
}

static srv_request *request_of(sched_req *req) {
    return LIST_ENTRY(req, srv_request, sched);
}

static void fill(sched_req *req, attn_row *rows) {
    const srv_request *rq = request_of(req);
    const srv_step *step = rq->attend.step;
    for (uint32_t i = 0; i < step->num_active; i++) {
        fill_row(rq, step->active[i], &rows[i]);
    }
}

static void lens(sched_req *req, uint32_t row, int32_t *q_len, int32_t *kv_len) {
    const srv_step *step = request_of(req)->attend.step;
    const attn_seq *s = &step->seqs[step->active[row]];
    *q_len = (int32_t)s->rows;
    *kv_len = s->kv_len;
}

// check_rows has attention and the backend check the rows of this request alone, which are in
// core->rows then, without SRV_STAGE_ON_DEVICE.
static attnd_err check_rows(srv_core *core, srv_request *rq, attnd_errinfo *info) {
    const srv_step *step = rq->attend.step;
    fill(&rq->sched, core->rows);
    for (uint32_t i = 0; i < step->num_active; i++) {
        core->rows[i].flags &= ~SRV_STAGE_ON_DEVICE;
    }
    attn_params params = {
        .shape = *step->model->shape,
        .pool = core->arena->base,
        .pool_bytes = core->arena->bytes,
        .num_blocks = core->arena->bytes / KV_BLOCK_UNIT,
        .rows = core->rows,
        .num_rows = step->num_active,
    };
    attnd_err err = attn_check(&params, info);
    const srv_backend_ops *ops = core->backend->ops;
    for (uint32_t i = 0; i < step->num_active && !err && ops->check_row; i++) {
        err = ops->check_row(core->backend, &params.shape, &core->rows[i], info);
    }
    return err;
}

// ---- the request

static attnd_err check_layer(const srv_step *step, uint32_t idx, attnd_errinfo *info) {
    const attn_model *m = step->model->attn;
    if (idx >= m->num_layers) {
        return attnd_fail(info, ATTND_EINVAL, "layer", "the model has %u layers", m->num_layers);
    }
    if (srv_layer_bit(step->attending, idx)) {
        return attnd_fail(info, ATTND_EBUSY, "layer", "an attend of layer %u is under way", idx);
    }
    uint32_t from = m->layers[idx].kv_layer;
    if (from != idx &&
        (!srv_layer_bit(step->attended, from) || srv_layer_bit(step->attending, from))) {
        return attnd_fail(info, ATTND_EINVAL, "layer",
                          "layer %u reads layer %u, which must be attended first", idx, from);
    }
    for (uint32_t i = 0; m->shares_kv && from == idx && i < m->num_layers; i++) {
        if (m->layers[i].kv_layer == idx && srv_layer_bit(step->attending, i)) {
            return attnd_fail(info, ATTND_EBUSY, "layer", "layer %u, which reads it, is under way",
                              i);
        }
    }
    return ATTND_OK;
}

// read_tensor reads a tensor of [rows, heads, dim] of the model's type.
static attnd_err read_tensor(const srv_request *rq, const char *field, const proto_tensor *t,
                             proto_tensor_shape shape, size_t fixed, const void **out,
                             int64_t stride[2], attnd_errinfo *info) {
    shape.dtype = rq->attend.step->model->attn->dtype;
    return proto_read_tensor(rq->msg, field, t, &shape, fixed, out, &stride[0], &stride[1], info);
}

bool srv_attend_must_wait(const srv_step *step, uint32_t layer) {
    const attn_model *m = step->model->attn;
    uint32_t from = m->layers[layer].kv_layer;
    bool waits = srv_layer_bit(step->attending, layer) || srv_layer_bit(step->attending, from);
    for (uint32_t i = 0; m->shares_kv && from == layer && i < m->num_layers && !waits; i++) {
        waits = m->layers[i].kv_layer == layer && srv_layer_bit(step->attending, i);
    }
    return waits;
}

bool srv_attend_appends(const srv_step *step, uint32_t layer) {
    return step->new_rows > 0 && step->model->attn->layers[layer].kv_layer == layer;
}

static attnd_err read_kv(srv_request *rq, const srv_attend_ask *ask, attnd_errinfo *info) {
    srv_attend_state *a = &rq->attend;
    const srv_step *step = a->step;
    const attn_model *m = step->model->attn;
    bool appends = srv_attend_appends(step, ask->layer);
    if (ask->recompute) {
        return ATTND_OK;
    }
    if (!appends && (ask->k->off || ask->v->off)) {
        return attnd_fail(info, ATTND_EINVAL, ask->k->off ? "k" : "v",
                          "nothing is appended to layer %u: it must be NULL", ask->layer);
    }
    proto_tensor_shape k = {.rows = step->new_rows, .heads = m->kv_heads, .dim = m->head_dim};
    proto_tensor_shape v = {.rows = step->new_rows, .heads = m->kv_heads, .dim = m->v_head_dim};
    attnd_err err =
        read_tensor(rq, "k", ask->k, k, ask->fixed, &a->tensors.k, a->tensors.k_stride, info);
    if (!err) {
        err = read_tensor(rq, "v", ask->v, v, ask->fixed, &a->tensors.v, a->tensors.v_stride, info);
    }
    if (!err && appends && (!a->tensors.k || !a->tensors.v)) {
        err = attnd_fail(info, ATTND_EINVAL, a->tensors.k ? "v" : "k",
                         "%u new tokens are to be appended", step->new_rows);
    }
    return err;
}

static attnd_err read_ask(srv_request *rq, srv_step *step, const srv_attend_ask *ask,
                          attnd_errinfo *info) {
    srv_attend_state *a = &rq->attend;
    const attn_model *m = step->model->attn;
    attnd_err err = proto_check_zero(
        ask->flags & ~(uint32_t)(PROTO_ATTEND_LSE | PROTO_ATTEND_PARTIAL), "flags", info);
    if (!err) {
        err = check_layer(step, ask->layer, info);
    }
    if (err) {
        return err;
    }
    a->step = step;
    a->layer = ask->layer;
    a->flags = ask->flags;
    a->done = ask->done;
    proto_tensor_shape q = {.rows = step->rows, .heads = m->q_heads, .dim = m->head_dim};
    err = read_tensor(rq, "q", ask->q, q, ask->fixed, &a->tensors.q, a->tensors.q_stride, info);
    if (!err && step->rows && !a->tensors.q) {
        err = attnd_fail(info, ATTND_EINVAL, "q", "%u rows are to be attended", step->rows);
    }
    if (!err) {
        err = read_kv(rq, ask, info);
    }
    if (!err && ask->block_mask_off) {
        err = srv_block_mask_read(rq->session->core, rq, ask->block_mask_off, ask->fixed, info);
    }
    return err;
}

// make_reply lays the reply out: fixed part, out, lse, lens.  Offsets count from the header.
static attnd_err make_reply(srv_request *rq, const srv_attend_ask *ask, attnd_errinfo *info) {
    srv_attend_state *a = &rq->attend;
    const srv_step *step = a->step;
    const attn_model *m = step->model->attn;
    uint64_t out_bytes =
        (uint64_t)step->rows * m->q_heads * m->v_head_dim * attnd_dtype_bytes(m->dtype);
    uint64_t out_off = sizeof(proto_header) + sizeof(proto_attend_reply);
    uint64_t lse_off = proto_align(out_off + out_bytes);
    bool lse = (ask->flags & PROTO_ATTEND_LSE) != 0;
    uint64_t lens_off =
        proto_align(lse_off + (lse ? (uint64_t)step->rows * m->q_heads * sizeof(float) : 0));
    uint64_t end = lens_off + ask->num_lens * sizeof(uint32_t);
    uint8_t *body;
    attnd_err err =
        srv_reply_begin(rq, end - sizeof(proto_header), sizeof(proto_attend_reply), &body, info);
    if (err) {
        return err;
    }
    uint8_t *msg = body - sizeof(proto_header);
    memset(msg + out_off + out_bytes, 0, lse_off - out_off - out_bytes); // padding
    memset(msg + (lse ? lens_off - 4 : lens_off), 0, end - (lse ? lens_off - 4 : lens_off));
    a->reply = (proto_attend_reply *)(void *)body;
    a->reply->rows = step->rows;
    a->reply->out_off = (uint32_t)out_off;
    a->reply->lse_off = lse ? (uint32_t)lse_off : 0;
    a->reply->lens_off = ask->num_lens ? (uint32_t)lens_off : 0;
    a->tensors.rows = step->rows;
    a->tensors.out = msg + out_off;
    a->tensors.lse = lse ? (float *)(void *)(msg + lse_off) : NULL;
    a->lens = (uint32_t *)(void *)(msg + lens_off);
    return ATTND_OK;
}

// ---- running

static void describe(const srv_request *rq, const attn_choice *choice) {
    proto_attend_reply *reply = rq->attend.reply;
    reply->queue_us = srv_attend_cut_us(rq->sched.queue_us);
    reply->run_us = srv_attend_cut_us(rq->sched.run_us);
    reply->splits = choice->splits;
    reply->batch_rows = choice->rows;
    strncpy(reply->kernel, choice->kernel ? choice->kernel : "none", sizeof(reply->kernel) - 1);
    strncpy(reply->why, choice->why ? choice->why : "", sizeof(reply->why) - 1);
}

// finish marks the layer and tells the op.  rq is gone afterwards; the step may be back in the
// pool, where nobody takes it before the loop's next event.
static void finish(srv_core *core, srv_request *rq, attnd_err err, const attn_choice *choice,
                   const attnd_errinfo *info) {
    srv_attend_state *a = &rq->attend;
    srv_step *step = a->step;
    rq->cancel = NULL;
    if (!a->armed) { // else it is the call's, which may have more layers
        srv_block_mask_drop(rq);
    }
    clear_bit(step->attending, a->layer);
    if (!err && !srv_layer_bit(step->attended, a->layer)) {
        set_bit(step->attended, a->layer);
        step->num_attended++;
    }
    if (!err) {
        describe(rq, choice);
    }
    step->running--;
    a->done(rq, err, err ? NULL : a->reply, info);
    srv_step_settle(core, step);
}

static void ran(sched_req *req, attnd_err err, const attn_choice *choice,
                const attnd_errinfo *info) {
    srv_request *rq = request_of(req);
    srv_core *core = rq->session->core;
    finish(core, rq, err, choice, info);
}

static void cancel(srv_request *rq) {
    sched_cancel(rq->session->core->sched, &rq->sched);
}

static void fill_sched(srv_request *rq, const kv_copy *copies, uint32_t num_copies) {
    const srv_step *step = rq->attend.step;
    rq->sched = (sched_req){
        .shape = step->model->shape,
        .num_rows = step->num_active,
        .tenant = rq->session->tenant,
        .in_place = rq->attend.on_device && !rq->attend.masks,
        .deadline_ms = step->deadline_ms,
        .fill = fill,
        .lens = lens,
        .copies = copies,
        .num_copies = num_copies,
        .ticket = rq->attend.ticket,
        .signal = rq->attend.signal,
        .done = ran,
    };
}

static attnd_err submit(srv_core *core, srv_request *rq, const kv_copy *copies, uint32_t num_copies,
                        attnd_errinfo *info) {
    fill_sched(rq, copies, num_copies);
    attnd_err err = rq->attend.ticket ? ATTND_OK : check_rows(core, rq, info);
    if (!err) {
        rq->cancel = cancel;
        err = sched_submit(core->sched, &rq->sched, info);
    }
    return err;
}

// run gives the layer to the scheduler, or ends it at once.
static void run(srv_core *core, srv_request *rq, const kv_copy *copies, uint32_t num_copies) {
    srv_step *step = rq->attend.step;
    attnd_errinfo info = {.code = ATTND_OK};
    step->running++;
    set_bit(step->attending, rq->attend.layer);
    if (!step->num_active) {
        attn_choice nothing = {.kernel = "none", .why = "no rows"};
        finish(core, rq, ATTND_OK, &nothing, &info);
        return;
    }
    attnd_err err = submit(core, rq, copies, num_copies, &info);
    if (err) {
        finish(core, rq, err, NULL, &info);
    }
}

void srv_attend(srv_core *core, srv_request *rq, srv_step *step, const srv_attend_ask *ask) {
    attnd_errinfo info = {.code = ATTND_OK};
    srv_armed_withdraw(core, step);
    attnd_err err = read_ask(rq, step, ask, &info);
    if (!err) {
        err = make_reply(rq, ask, &info);
    }
    if (err) {
        srv_block_mask_drop(rq);
        ask->done(rq, err, NULL, &info);
    } else {
        run(core, rq, ask->copies, ask->num_copies);
    }
}

static bool is_decode(const srv_step *step) {
    for (uint32_t i = 0; i < step->num_active; i++) {
        if (step->seqs[step->active[i]].rows > SCHED_DECODE_TOKENS) {
            return false;
        }
    }
    return step->num_active > 0;
}

// may_begin: nothing that the layer depends on, or that depends on it, is under way.
static bool may_begin(const srv_core *core, const srv_request *rq) {
    const srv_step *step = rq->attend.step;
    return sched_idle(core->sched) && rq->attend.on_device &&
           !check_layer(step, rq->attend.layer, NULL) &&
           !srv_attend_must_wait(step, rq->attend.layer);
}

void srv_attend_prepare(srv_core *core, srv_request *rq, uint64_t ticket, const srv_ahead *ahead) {
    srv_backend *backend = core->backend;
    const srv_step *step = rq->attend.step;
    attnd_errinfo info;
    if (!backend->ops->prepare || !is_decode(step) || check_rows(core, rq, &info)) {
        return; // what is wrong with it is told when it is run
    }
    for (uint32_t i = 0; i < step->num_active && rq->attend.on_device; i++) {
        core->rows[i].flags |= SRV_STAGE_ON_DEVICE; // which check_rows has taken away
    }
    attn_params params = {.shape = *step->model->shape,
                          .pool = backend->sched.pool,
                          .pool_bytes = backend->sched.pool_bytes,
                          .num_blocks =
                              backend->sched.pool_bytes / step->model->shape->block_stride,
                          .rows = core->rows,
                          .num_rows = step->num_active,
                          .deterministic = backend->sched.deterministic};
    rq->attend.ticket = ticket;
    bool may = ahead && may_begin(core, rq);
    backend->ops->prepare(backend, &params, ticket, may ? ahead : NULL);
}

bool srv_attend_forget(srv_core *core, srv_request *rq) {
    uint64_t ticket = rq->attend.ticket;
    bool is_late = ticket && core->backend->ops->forget(core->backend, ticket);
    rq->attend.ticket = is_late ? ticket : 0;
    return is_late;
}

void srv_attend_began(srv_request *rq) {
    fill_sched(rq, NULL, 0);
    rq->attend.step->running++;
    set_bit(rq->attend.step->attending, rq->attend.layer);
}

void srv_attend_missed(srv_request *rq) {
    rq->attend.step->running--;
    clear_bit(rq->attend.step->attending, rq->attend.layer);
}

void srv_attend_ended(srv_core *core, srv_request *rq, const sched_launch *launch) {
    sched_ran(core->sched, &rq->sched, launch);
    rq->attend.ticket = 0;
    finish(core, rq, launch->err, &launch->choice, &launch->info);
}

void srv_attend_layer(srv_core *core, srv_request *rq) {
    srv_attend_state *a = &rq->attend;
    attnd_errinfo info = {.code = ATTND_OK};
    rq->sched = (sched_req){.signal = 0};
    attnd_err err = check_layer(a->step, a->layer, &info);
    if (err) {
        a->done(rq, err, NULL, &info);
    } else {
        run(core, rq, NULL, 0);
    }
}
