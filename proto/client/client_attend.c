// attend, and decode and prefill, which are step, attend and commit in one.  A reply is checked
// whole before an output is written.
#include <string.h>

#include "proto/client/client_attend.h"

attnd_err client_attend_check_rows(attnd_client *c, const attnd_attend_args *a,
                                   attnd_errinfo *info) {
    uint32_t most = client_get_limits(c).step_rows;
    if (a->rows > most || a->new_rows > most) {
        return attnd_fail(info, ATTND_EINVAL, "rows", "%u rows, at most %u are taken",
                          a->rows > a->new_rows ? a->rows : a->new_rows, most);
    }
    return ATTND_OK;
}

attnd_err client_attend_check_mask(const attnd_attend_args *a, attnd_errinfo *info) {
    const attnd_block_mask *m = a->block_mask;
    if (m && (!m->start || (m->start[m->num_query_blocks] > 0 && !m->kv_blocks))) {
        return attnd_fail(info, ATTND_EINVAL, "block_mask", "%s is NULL",
                          m->start ? "kv_blocks" : "start");
    }
    return ATTND_OK;
}

static attnd_err check_attend(attnd_client *c, const attnd_attend_args *a, attnd_errinfo *info) {
    attnd_err err = client_attend_check_rows(c, a, info);
    if (err) {
        return err;
    }
    if ((!a->q || !a->out) && a->rows > 0) {
        return attnd_fail(info, ATTND_EINVAL, a->q ? "out" : "q", "%s is NULL", a->q ? "out" : "q");
    }
    if (!a->k != !a->v || (a->k && a->new_rows == 0)) {
        return attnd_fail(info, ATTND_EINVAL, a->k ? "v" : "k",
                          "k and v are both NULL, or both there with new_rows > 0");
    }
    return client_attend_check_mask(a, info);
}

// check_no_stream is for attends that the daemon does from a message.
static attnd_err check_no_stream(const attnd_attend_args *a, attnd_errinfo *info) {
    return a->stream ? attnd_fail(info, ATTND_ENOTSUP, "stream",
                                  "there is no engine on a GPU, which alone attends in a stream")
                     : ATTND_OK;
}

static uint32_t attend_flags(const attnd_attend_args *a) {
    return (a->lse ? PROTO_ATTEND_LSE : 0u) | (a->partial ? PROTO_ATTEND_PARTIAL : 0u);
}

typedef struct qkv {
    proto_tensor q, k, v;
} qkv;

static qkv put_qkv(client_sheet *s, const attnd_attend_args *a, const client_model *m) {
    uint64_t elem = attnd_dtype_bytes(m->dtype);
    client_tensor q = {a->q, a->rows,           m->q_heads,      m->head_dim,
                       elem, a->q_stride_token, a->q_stride_head};
    client_tensor k = {a->k, a->new_rows,       m->kv_heads,     m->head_dim,
                       elem, a->k_stride_token, a->k_stride_head};
    client_tensor v = {a->v, a->new_rows,       m->kv_heads,     m->v_head_dim,
                       elem, a->v_stride_token, a->v_stride_head};
    qkv out;
    out.q = client_sheet_put_tensor(s, &q); // one after another: the order is the layout
    out.k = client_sheet_put_tensor(s, &k);
    out.v = client_sheet_put_tensor(s, &v);
    return out;
}

uint32_t client_attend_put_mask(client_sheet *s, const attnd_block_mask *mask) {
    if (!mask) {
        return 0;
    }
    proto_block_mask head = {mask->q_block, mask->num_query_blocks};
    uint64_t num_start = (uint64_t)mask->num_query_blocks + 1;
    uint64_t start_bytes = num_start * sizeof(uint32_t);
    uint64_t blocks_bytes = (uint64_t)mask->start[num_start - 1] * sizeof(uint32_t);
    uint32_t off = client_sheet_place(s, sizeof(head) + start_bytes + blocks_bytes);
    client_sheet_set(s, off, &head, sizeof(head));
    client_sheet_set(s, off + sizeof(head), mask->start, start_bytes);
    if (blocks_bytes > 0) {
        client_sheet_set(s, off + sizeof(head) + start_bytes, mask->kv_blocks, blocks_bytes);
    }
    return off;
}

static uint64_t lay_out_attend(uint8_t *msg, const attnd_attend_args *a, const client_model *m) {
    client_sheet s;
    client_sheet_begin(&s, msg, sizeof(proto_attend));
    qkv t = put_qkv(&s, a, m);
    proto_attend body = {
        .step = a->step, .layer = a->layer, .flags = attend_flags(a), .q = t.q, .k = t.k, .v = t.v};
    body.block_mask_off = client_attend_put_mask(&s, a->block_mask);
    client_sheet_set(&s, PROTO_BODY, &body, sizeof(body));
    return s.end;
}

// need is an array that must be there.
static attnd_err need(proto_view msg, const char *field, uint32_t off, uint64_t count,
                      uint64_t elem_bytes, const void **out, attnd_errinfo *info) {
    attnd_err err =
        proto_array(msg, field, off, count, elem_bytes, sizeof(proto_attend_reply), out, info);
    if (!err && !*out) {
        err = attnd_fail(info, ATTND_EPROTO, field, "reply without %s", field);
    }
    return err;
}

uint64_t client_attend_room(uint32_t rows, bool lse, const client_model *m, uint32_t num_lens) {
    uint64_t row = (uint64_t)m->q_heads * m->v_head_dim * attnd_dtype_bytes(m->dtype);
    uint64_t lse_bytes = lse ? (uint64_t)m->q_heads * rows * sizeof(float) : 0;
    enum { GAPS = 3 * 64 }; // in front of each array
    return PROTO_BODY + sizeof(proto_attend_reply) + rows * row + lse_bytes +
           (uint64_t)num_lens * sizeof(uint32_t) + GAPS;
}

attnd_err client_attend_find(proto_view msg, uint32_t rows, bool lse, uint32_t num_lens,
                             const client_model *m, client_attend_results *out,
                             attnd_errinfo *info) {
    uint64_t row_bytes = (uint64_t)m->q_heads * m->v_head_dim * attnd_dtype_bytes(m->dtype);
    uint64_t lse_bytes = (uint64_t)m->q_heads * sizeof(float);
    *out = (client_attend_results){.out = NULL};
    proto_attend_reply *r = &out->r;
    attnd_err err = proto_read(msg, r, sizeof(*r), false, info);
    if (err) {
        return err;
    }
    if (r->rows != rows) {
        return attnd_fail(info, ATTND_EPROTO, "rows", "reply of %u rows, %u were sent", r->rows,
                          rows);
    }
    if ((rows && (err = need(msg, "out_off", r->out_off, rows, row_bytes, &out->out, info))) ||
        (rows && lse &&
         (err = need(msg, "lse_off", r->lse_off, rows, lse_bytes, &out->lse, info))) ||
        (num_lens && (err = need(msg, "lens_off", r->lens_off, num_lens, sizeof(uint32_t),
                                 &out->lens, info)))) {
        return err;
    }
    return ATTND_OK;
}

void client_attend_copy_ran(attnd_ran *ran, const proto_attend_reply *r) {
    if (ran) {
        *ran = (attnd_ran){.splits = r->splits,
                           .batch_rows = r->batch_rows,
                           .queue_us = r->queue_us,
                           .run_us = r->run_us};
        proto_copy_text(ran->kernel, r->kernel, sizeof(ran->kernel));
        proto_copy_text(ran->why, r->why, sizeof(ran->why));
    }
}

// read_attend copies the outputs out of the reply, or nothing.  lens [num_lens] may be NULL.
static attnd_err read_attend(proto_view msg, const attnd_attend_args *a, const client_model *m,
                             uint32_t *lens, uint32_t num_lens, attnd_ran *ran,
                             attnd_errinfo *info) {
    client_attend_results found;
    attnd_err err =
        client_attend_find(msg, a->rows, a->lse != NULL, lens ? num_lens : 0, m, &found, info);
    if (err) {
        return err;
    }
    if (found.out) {
        memcpy(a->out, found.out,
               (uint64_t)a->rows * m->q_heads * m->v_head_dim * attnd_dtype_bytes(m->dtype));
    }
    if (found.lse) {
        memcpy(a->lse, found.lse, (uint64_t)a->rows * m->q_heads * sizeof(float));
    }
    if (found.lens) {
        memcpy(lens, found.lens, num_lens * sizeof(*lens));
    }
    client_attend_copy_ran(ran, &found.r);
    return ATTND_OK;
}

attnd_err client_attend_prepare(attnd_client *c, const attnd_attend_args *args, client_model *model,
                                client_msg *m, attnd_errinfo *info) {
    attnd_err err = check_no_stream(args, info);
    if (err) {
        return err;
    }
    if (args->buffers) {
        err = client_model_get(c, args->model, model, info);
        return err ? err : client_buffers_prepare(c, args, m, info);
    }
    if ((err = check_attend(c, args, info)) ||
        (err = client_model_get(c, args->model, model, info)) ||
        (err = client_request(c, lay_out_attend(NULL, args, model),
                              client_attend_room(args->rows, args->lse != NULL, model, 0), m,
                              info))) {
        return err;
    }
    lay_out_attend(m->data, args, model);
    return ATTND_OK;
}

attnd_err client_attend_read(proto_view msg, const attnd_attend_args *args,
                             const client_model *model, attnd_ran *ran, attnd_errinfo *info) {
    return args->buffers ? client_buffers_read(msg, args, model, ran, info)
                         : read_attend(msg, args, model, NULL, 0, ran, info);
}

// attend_here attends by the engine.
static attnd_err attend_here(attnd_client *c, const attnd_attend_args *args, attnd_ran *ran,
                             attnd_errinfo *info) {
    attnd_attend_args a = *args;
    attnd_err err = args->buffers ? client_buffers_plain(c, args, &a, info) : ATTND_OK;
    if (err || (err = check_attend(c, &a, info)) ||
        (err = client_engine_attend(c, &a, ran, info))) {
        return err;
    }
    if (args->buffers) {
        client_buffers_done(args);
    }
    return ATTND_OK;
}

attnd_err attnd_attend(attnd_client *c, const attnd_attend_args *args, attnd_ran *ran,
                       attnd_errinfo *info) {
    if (c->engine) {
        return attend_here(c, args, ran, info);
    }
    client_model model;
    client_msg m = {0};
    client_start_opts how = {.request_id = args->request};
    attnd_err err = client_attend_prepare(c, args, &model, &m, info);
    if (err) {
        return err;
    }
    if (!(err = client_call(c, PROTO_ATTEND, &m, 0, &how, info))) {
        err = client_attend_read(client_msg_view(&m), args, &model, ran, info);
    }
    client_msg_free(&m);
    return err;
}

// attend1 is what the layout of decode and prefill needs.
typedef struct attend1 {
    const attnd_step_seq *seqs;
    uint32_t num_seqs, deadline_ms;
    const attnd_attend_args *args;
    client_model model;
} attend1;

static uint64_t lay_out_attend1(uint8_t *msg, const attend1 *a) {
    client_sheet s;
    client_sheet_begin(&s, msg, sizeof(proto_attend1));
    uint32_t at = client_sheet_place(&s, a->num_seqs * sizeof(proto_attend1_seq));
    for (uint32_t i = 0; i < a->num_seqs; i++) {
        const attnd_step_seq *from = &a->seqs[i];
        proto_attend1_seq to = {.seq = from->seq, .new_len = from->new_len, .q_len = from->q_len};
        to.positions_off =
            client_sheet_put(&s, from->positions, client_entries(from) * sizeof(int32_t));
        client_sheet_set(&s, at + i * sizeof(to), &to, sizeof(to));
    }
    qkv t = put_qkv(&s, a->args, &a->model);
    proto_attend1 body = {.model = a->args->model,
                          .num_seqs = a->num_seqs,
                          .deadline_ms = a->deadline_ms,
                          .flags = attend_flags(a->args),
                          .q = t.q,
                          .k = t.k,
                          .v = t.v};
    client_sheet_set(&s, PROTO_BODY, &body, sizeof(body));
    return s.end;
}

// check_attend1_seqs refuses what these two ops have no field for.
static attnd_err check_attend1_seqs(const attnd_step_seq *seqs, uint32_t num_seqs,
                                    attnd_errinfo *info) {
    for (uint32_t i = 0; i < num_seqs; i++) {
        const char *field = seqs[i].tokens      ? "tokens"
                            : seqs[i].tree_mask ? "tree_mask"
                            : seqs[i].reserve   ? "reserve"
                                                : NULL;
        if (field) {
            return attnd_fail(info, ATTND_ENOTSUP, field, "decode and prefill take no %s", field);
        }
    }
    return ATTND_OK;
}

static attnd_err check_attend1_args(const attnd_attend_args *a, attnd_errinfo *info) {
    const char *field = a->buffers      ? "buffers"
                        : a->block_mask ? "block_mask"
                        : a->stream     ? "stream"
                                        : NULL;
    return field ? attnd_fail(info, ATTND_ENOTSUP, field, "decode and prefill take no %s", field)
                 : ATTND_OK;
}

static attnd_err call_attend1(attnd_client *c, proto_op op, attend1 *a, uint32_t *lens,
                              attnd_ran *ran, attnd_errinfo *info) {
    client_msg m = {0};
    client_start_opts how = {.request_id = a->args->request};
    attnd_err err = client_check_seqs(c, a->seqs, a->num_seqs, info);
    if (err || (err = client_engine_settle(c, 0, info)) ||
        (err = check_attend1_seqs(a->seqs, a->num_seqs, info)) ||
        (err = check_attend1_args(a->args, info)) || (err = check_attend(c, a->args, info)) ||
        (err = client_model_get(c, a->args->model, &a->model, info)) ||
        (err = client_request(
             c, lay_out_attend1(NULL, a),
             client_attend_room(a->args->rows, a->args->lse != NULL, &a->model, a->num_seqs), &m,
             info))) {
        return err;
    }
    lay_out_attend1(m.data, a);
    if (!(err = client_call(c, op, &m, a->deadline_ms, &how, info))) {
        err = read_attend(client_msg_view(&m), a->args, &a->model, lens, a->num_seqs, ran, info);
    }
    client_msg_free(&m);
    return err;
}

attnd_err attnd_decode(attnd_client *c, attnd_step_seq *seqs, uint32_t num_seqs,
                       uint32_t deadline_ms, const attnd_attend_args *args, uint32_t *lens,
                       attnd_ran *ran, attnd_errinfo *info) {
    attend1 a = {seqs, num_seqs, deadline_ms, args, {0}};
    return call_attend1(c, PROTO_DECODE, &a, lens, ran, info);
}

attnd_err attnd_prefill(attnd_client *c, attnd_step_seq *seqs, uint32_t num_seqs,
                        uint32_t deadline_ms, const attnd_attend_args *args, uint32_t *lens,
                        attnd_ran *ran, attnd_errinfo *info) {
    attend1 a = {seqs, num_seqs, deadline_ms, args, {0}};
    return call_attend1(c, PROTO_PREFILL, &a, lens, ran, info);
}
