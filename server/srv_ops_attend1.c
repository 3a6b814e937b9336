// decode and prefill: step, attend of layer 0 and commit in one message, for models with one layer.
//
// Inside they are a step that nobody else knows of; its commit is what the request's id is kept
// under.  A repeat finds the lengths that the first one left.  While the sequences still have them,
// it computes its output again, from the cache alone: the step is then read only, with the same
// query rows, and is aborted at the end.
#include <string.h>

#include "server/srv_attend.h"
#include "server/srv_ops.h"
#include "server/srv_step_read.h"

static void end_with_error(srv_step *step, attnd_err err, const attnd_errinfo *info) {
    srv_core *core = step->session->core;
    srv_request *rq = step->request;
    step->request = NULL;
    srv_reply_error(rq, err, info);
    srv_step_end(core, step);
}

static attnd_err commit(srv_core *core, srv_step *step, uint32_t *lens, attnd_errinfo *info) {
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        step->accepted[i] = step->kv_seqs[i].new_len;
        lens[i] = step->kv_seqs[i].committed + step->accepted[i];
    }
    if (step->recompute) {
        return kv_step_abort(core->kv, (kv_request){step->session->id, 0}, step->handle);
    }
    return kv_step_commit(core->kv, (kv_request){step->session->id, step->commit_id}, step->handle,
                          step->accepted, step->num_seqs, info);
}

static void attended(srv_request *rq, attnd_err err, proto_attend_reply *reply,
                     const attnd_errinfo *info) {
    (void)reply;
    srv_step *step = rq->attend.step;
    srv_core *core = rq->session->core;
    attnd_errinfo refused = {.code = ATTND_OK};
    if (!err && step->state == SRV_STEP_ENDING) {
        info = &refused;
        err = attnd_fail(&refused, ATTND_ECANCELED, "", "%s", attnd_strerror(ATTND_ECANCELED));
    }
    if (!err) {
        info = &refused;
        err = commit(core, step, rq->attend.lens, &refused);
    }
    if (err) {
        end_with_error(step, err, info);
        return;
    }
    srv_step_release(core, step);
    srv_reply_end(rq);
    srv_core_freed(core);
}

static void opened(srv_step *step, attnd_err err, const attnd_errinfo *info) {
    srv_core *core = step->session->core;
    srv_request *rq = step->request;
    proto_attend1 body;
    if (!err) {
        attnd_errinfo unused;
        attnd_err again = proto_read(rq->msg, &body, sizeof(body), false, &unused);
        ATTND_ASSERT(!again);
    } else {
        attnd_errinfo stale;
        if (err == ATTND_ENOTSUP && step->recompute) { // the length is the same, but not the tokens
            info = &stale;
            err = attnd_fail(&stale, ATTND_ESTALE, "request",
                             "what the request computed from was given back");
        }
        srv_reply_error(rq, err, info);
        return;
    }
    step->state = SRV_STEP_OPEN;
    srv_attend(core, rq, step,
               &(srv_attend_ask){.flags = body.flags,
                                 .q = &body.q,
                                 .k = &body.k,
                                 .v = &body.v,
                                 .fixed = sizeof(body) + step->num_seqs * sizeof(proto_attend1_seq),
                                 .num_lens = step->num_seqs,
                                 .recompute = step->recompute,
                                 .copies = step->copies,
                                 .num_copies = step->num_copies,
                                 .done = attended});
}

// ---- reading

static attnd_err read_seq(srv_core *core, srv_step *step, const srv_request *rq, uint32_t i,
                          const proto_attend1_seq *in, size_t fixed, uint64_t *rows,
                          attnd_errinfo *info) {
    attnd_err err = proto_check_zero(in->reserved, "reserved", info);
    if (!err) {
        err = srv_step_set_lens(core, step, i, in->new_len, in->q_len, rows, info);
    }
    if (!err && rq->header.op == PROTO_DECODE && step->seqs[i].rows > SCHED_DECODE_TOKENS) {
        err = attnd_fail(info, ATTND_EINVAL, in->new_len ? "new_len" : "q_len",
                         "a decode has at most %d rows a sequence", SCHED_DECODE_TOKENS);
    }
    step->kv_seqs[i].seq = in->seq;
    return err ? err : srv_step_read_positions(core, step, rq, i, in->positions_off, fixed, info);
}

static attnd_err read_seqs(srv_core *core, srv_step *step, const srv_request *rq,
                           const proto_attend1 *body, const uint8_t *seqs, attnd_errinfo *info) {
    attnd_err err = srv_step_set_model(step, body->model, body->deadline_ms, info);
    if (!err && step->model->attn->num_layers != 1) {
        err = attnd_fail(info, ATTND_ENOTSUP, "model", "%s is for models with one layer",
                         proto_op_name(rq->header.op));
    }
    size_t fixed = sizeof(*body) + body->num_seqs * sizeof(proto_attend1_seq);
    uint64_t rows = 0;
    for (uint32_t i = 0; i < body->num_seqs && !err; i++) {
        proto_attend1_seq seq;
        proto_copy(&seq, seqs + i * sizeof(seq), sizeof(seq));
        err = read_seq(core, step, rq, i, &seq, fixed, &rows, info);
    }
    if (!err) {
        step->accepted = srv_step_alloc(core, step, step->num_seqs * sizeof(*step->accepted));
        err = step->accepted ? ATTND_OK
                             : attnd_fail(info, ATTND_EMSGSIZE, "num_seqs",
                                          "the step needs more memory than a step has");
    }
    return err;
}

// read_again turns the step into one that reads what the first request of this id appended.
static attnd_err read_again(srv_core *core, srv_step *step, const kv_reply *kept,
                            attnd_errinfo *info) {
    if (kept->num_values != step->num_seqs) {
        return attnd_fail(info, ATTND_EINVAL, "num_seqs", "the id was used for %u sequences",
                          kept->num_values);
    }
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        kv_seq_info seq;
        attnd_err err = kv_seq_get(core->kv, step->session->id, step->kv_seqs[i].seq, &seq);
        if (err || seq.committed != kept->values[i]) {
            return attnd_fail(info, ATTND_ESTALE, "request",
                              "sequence %u no longer has the length that the request left", i);
        }
        step->kv_seqs[i].new_len = 0;
        step->kv_seqs[i].q_len = step->seqs[i].rows;
    }
    step->recompute = true;
    return ATTND_OK;
}

static attnd_err read_attend1(srv_core *core, const srv_request *rq, const kv_reply *kept,
                              srv_step **out, attnd_errinfo *info) {
    proto_attend1 body;
    const void *seqs;
    attnd_err err = proto_read(rq->msg, &body, sizeof(body), false, info);
    if (err) {
        return err;
    }
    if (body.num_seqs < 1 || body.num_seqs > core->conf.step_seqs) {
        return attnd_fail(info, ATTND_EINVAL, "num_seqs", "a step has 1 to %llu sequences",
                          (unsigned long long)core->conf.step_seqs);
    }
    err = proto_array(rq->msg, "num_seqs", PROTO_BODY + sizeof(body), body.num_seqs,
                      sizeof(proto_attend1_seq), sizeof(body), &seqs, info);
    if (!err) {
        err = srv_step_take(core, rq->session, body.num_seqs, out, info);
    }
    if (err) {
        return err;
    }
    err = read_seqs(core, *out, rq, &body, seqs, info);
    if (!err && kept) {
        err = read_again(core, *out, kept, info);
    }
    if (err) {
        srv_step_release(core, *out);
    }
    return err;
}

static void start(srv_core *core, srv_request *rq, const kv_reply *kept) {
    srv_step *step;
    attnd_errinfo info;
    attnd_err err = read_attend1(core, rq, kept, &step, &info);
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    step->request = rq;
    step->once = true;
    step->commit_id = rq->header.request;
    step->opened = opened;
    srv_step_open(core, step);
}

SRV_HANDLER(decode) {
    start(core, rq, kept);
}

SRV_HANDLER(prefill) {
    start(core, rq, kept);
}
