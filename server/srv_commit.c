// Commits.
//
// A commit is refused while any layer of the step was not attended, or is being attended.  Accepted
// counts and paths are copied into the step's memory and checked there.  When a path leaves gaps,
// its rows are moved together in all layers by the compute threads before the cache makes the
// lengths count; a step whose client dies meanwhile is aborted instead.
#include "server/srv_commit.h"

#include <string.h>

#include "server/srv_prefix.h"

static attnd_err check_layers(const srv_step *step, attnd_errinfo *info) {
    if (step->in_process) {
        return ATTND_OK; // it is the client's word
    }
    for (uint32_t i = 0; i < SRV_LAYER_WORDS; i++) {
        if (step->attending[i] || step->armed) {
            return attnd_fail(info, ATTND_EBUSY, "step", "an attend of the step is under way");
        }
    }
    if (step->num_attended == step->model->attn->num_layers) {
        return ATTND_OK;
    }
    uint32_t layer = 0;
    while (srv_layer_bit(step->attended, layer)) {
        layer++;
    }
    attnd_fail(info, ATTND_EINVAL, "step", "layer %u was not attended", layer);
    info->detail = (int32_t)layer;
    return ATTND_EINVAL;
}

static attnd_err no_room(attnd_errinfo *info) {
    return attnd_fail(info, ATTND_EMSGSIZE, "path_off",
                      "the paths need more memory than a step has");
}

// moves_of returns where the moves are listed: in what is left of the step's memory.
static kv_copy *moves_of(const srv_step *step) {
    return (kv_copy *)(void *)(step->memory + step->memory_used);
}

// read_path copies a path and lists the moves that it takes, behind those of earlier sequences.
static attnd_err read_path(srv_core *core, srv_step *step, const srv_request *rq, uint32_t i,
                           size_t fixed, attnd_errinfo *info) {
    kv_copy *moves = moves_of(step);
    size_t room = core->steps.memory_bytes - step->memory_used;
    uint32_t max_moves = (uint32_t)(room / sizeof(*moves));
    uint32_t num = step->accepted[i] - step->kv_seqs[i].cached;
    uint32_t *path = step->ids[i].path, off = step->ids[i].path_off;
    const void *in;
    attnd_err err = proto_array(rq->msg, "path_off", off, num, sizeof(uint32_t), fixed, &in, info);
    if (err) {
        return err;
    }
    proto_copy(path, in, num * sizeof(path[0]));
    uint32_t listed = 0;
    err = kv_step_moves(core->kv, step->handle, i, path, num, moves + step->num_copies,
                        max_moves - step->num_copies, &listed, info);
    step->num_copies += listed;
    return err == ATTND_EMSGSIZE ? no_room(info) : err;
}

static attnd_err check_accepted(const srv_step *step, uint32_t i, const proto_commit_seq *in,
                                attnd_errinfo *info) {
    const kv_step_seq *kv = &step->kv_seqs[i];
    if (in->accepted < kv->cached || in->accepted > kv->new_len) {
        return attnd_fail(info, ATTND_EINVAL, "accepted",
                          "%u of sequence %u is not within %u to %u", in->accepted, i, kv->cached,
                          kv->new_len);
    }
    if (in->path_off && !step->seqs[i].tree) {
        return attnd_fail(info, ATTND_EINVAL, "path_off", "sequence %u has no tree", i);
    }
    return ATTND_OK;
}

// read_entry reads and checks what is said of a sequence, and makes room for its path.
static attnd_err read_entry(srv_core *core, srv_step *step, uint32_t i, const uint8_t *entry,
                            attnd_errinfo *info) {
    proto_commit_seq in;
    srv_step_ids *s = &step->ids[i];
    proto_copy(&in, entry, sizeof(in));
    attnd_err err = check_accepted(step, i, &in, info);
    step->accepted[i] = in.accepted;
    s->path = NULL;
    s->path_off = in.path_off;
    if (!err && in.path_off) {
        size_t num = in.accepted - step->kv_seqs[i].cached;
        s->path = srv_step_alloc(core, step, num * sizeof(*s->path));
        err = s->path ? ATTND_OK : no_room(info);
    }
    return err;
}

// read_entries fills in accepted and paths, then, in what memory is left, copies and num_copies
// with the moves.
static attnd_err read_entries(srv_core *core, srv_step *step, const srv_request *rq,
                              const uint8_t *entries, size_t fixed, attnd_errinfo *info) {
    step->accepted = srv_step_alloc(core, step, step->num_seqs * sizeof(*step->accepted));
    if (!step->accepted) {
        return no_room(info);
    }
    attnd_err err = ATTND_OK;
    for (uint32_t i = 0; i < step->num_seqs && !err; i++) {
        err = read_entry(core, step, i, entries + i * sizeof(proto_commit_seq), info);
    }
    step->copies = moves_of(step);
    step->num_copies = 0;
    for (uint32_t i = 0; i < step->num_seqs && !err; i++) {
        if (step->ids[i].path) {
            err = read_path(core, step, rq, i, fixed, info);
        }
    }
    return err;
}

// reopen leaves the step as it was before its commit was tried.
static srv_request *reopen(srv_step *step) {
    srv_request *rq = step->request;
    step->request = NULL;
    step->memory_used = step->memory_mark;
    if (step->state == SRV_STEP_COMMITTING) {
        step->state = SRV_STEP_OPEN;
    }
    return rq;
}

// finish makes the lengths count and ends the step.  When the cache refuses, the step stays open,
// or is aborted if its rows have moved.  It is back in the pool before anyone is told, since what
// follows may get the same place in the cache; the lengths stay in its memory until somebody takes
// it.
static void finish(srv_core *core, srv_step *step) {
    attnd_errinfo info = {.code = ATTND_OK};
    srv_prefix_ids(step);
    attnd_err err =
        kv_step_commit_ids(core->kv, (kv_request){step->session->id, step->kept_id}, step->handle,
                           step->accepted, step->accepted_ids, step->num_seqs, &info);
    srv_committed_cb *then = step->committed;
    bool has_moved = step->num_copies > 0;
    srv_request *rq = reopen(step);
    if (err) {
        if (has_moved) {
            srv_step_end(core, step);
        }
        then(rq, err, NULL, 0, &info);
        return;
    }
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        step->accepted[i] += step->kv_seqs[i].committed;
    }
    srv_step_release(core, step);
    then(rq, ATTND_OK, step->accepted, step->num_seqs, &info);
    srv_core_freed(core);
}

static void moved(sched_req *req, attnd_err err, const attn_choice *choice,
                  const attnd_errinfo *info) {
    (void)choice;
    srv_step *step = req->user;
    srv_core *core = step->session->core;
    if (!err && step->state != SRV_STEP_ENDING) {
        step->running--;
        finish(core, step);
        return;
    }
    attnd_errinfo ended;
    if (!err) {
        info = &ended;
        err = attnd_fail(&ended, ATTND_ECANCELED, "step", "the step was aborted");
    }
    srv_request *rq = reopen(step);
    step->committed(rq, err, NULL, 0, info);
    srv_step_done(core, step);
}

attnd_err srv_step_copy(srv_core *core, srv_step *step, const kv_copy *copies, uint32_t num_copies,
                        void (*done)(sched_req *req, attnd_err err, const attn_choice *choice,
                                     const attnd_errinfo *info),
                        attnd_errinfo *info) {
    step->copy_req = (sched_req){
        .tenant = step->session->tenant,
        .copies = copies,
        .num_copies = num_copies,
        .done = done,
        .user = step,
    };
    step->running++;
    attnd_err err = sched_submit(core->sched, &step->copy_req, info);
    if (err) {
        step->running--;
    }
    return err;
}

static attnd_err find_step(srv_core *core, const srv_request *rq, const proto_commit *body,
                           srv_step **out, attnd_errinfo *info) {
    srv_step *step = srv_step_find(core, rq->session, body->step);
    if (!step) {
        return attnd_fail(info, ATTND_ESTALE, "step", "the step is not open");
    }
    if (step->state == SRV_STEP_COMMITTING) {
        return attnd_fail(info, ATTND_EBUSY, "step", "a commit of the step is under way");
    }
    if (body->num_seqs != step->num_seqs) {
        return attnd_fail(info, ATTND_EINVAL, "num_seqs", "the step has %u sequences",
                          step->num_seqs);
    }
    *out = step;
    return check_layers(step, info);
}

// check_room: what is committed must also be told.
static attnd_err check_room(const srv_request *rq, uint32_t num_seqs, attnd_errinfo *info) {
    size_t bytes = sizeof(proto_header) + sizeof(proto_lens) + num_seqs * sizeof(uint32_t);
    return bytes <= rq->reply_room
               ? ATTND_OK
               : attnd_fail(info, ATTND_EMSGSIZE, "reply_bytes", "the reply has %zu bytes", bytes);
}

static attnd_err read_commit(srv_core *core, srv_request *rq, uint32_t off, srv_step **out,
                             attnd_errinfo *info) {
    proto_commit body;
    const void *in, *entries;
    size_t before = off == PROTO_BODY ? 0 : sizeof(proto_step);
    attnd_err err = proto_array(rq->msg, "commit_off", off, 1, sizeof(body), before, &in, info);
    if (err) {
        return err;
    }
    proto_copy(&body, in, sizeof(body));
    err = proto_check_zero(body.reserved, "reserved", info);
    if (!err) {
        err = find_step(core, rq, &body, out, info);
    }
    if (!err && off == PROTO_BODY) {
        err = check_room(rq, body.num_seqs, info);
    }
    if (!err) {
        err = proto_array(rq->msg, "num_seqs", (uint64_t)off + sizeof(body), body.num_seqs,
                          sizeof(proto_commit_seq), before, &entries, info);
    }
    if (err) {
        return err;
    }
    (*out)->memory_mark = (*out)->memory_used;
    err = read_entries(core, *out, rq, entries, before + sizeof(body), info);
    if (err) {
        reopen(*out);
    }
    return err;
}

// answered_before tells `then` of a commit that was made under the same id already.
static bool answered_before(srv_core *core, srv_request *rq, uint64_t id, srv_committed_cb *then) {
    kv_reply kept;
    attnd_errinfo info = {.code = ATTND_OK};
    attnd_err err = kv_reply_find(core->kv, (kv_request){rq->session->id, id}, &kept);
    if (err == ATTND_ENOENT) {
        return false;
    }
    if (err) {
        attnd_fail(&info, err, "request", "the id is below the window of kept replies");
    } else if (kept.op != KV_OP_COMMIT) {
        err = attnd_fail(&info, ATTND_EINVAL, "request", "the id was used for another operation");
    }
    then(rq, err, err ? NULL : kept.values, err ? 0 : kept.num_values, &info);
    return true;
}

void srv_commit(srv_core *core, srv_request *rq, uint32_t off, uint64_t id,
                srv_committed_cb *then) {
    if (answered_before(core, rq, id, then)) {
        return;
    }
    srv_step *step = NULL;
    attnd_errinfo info = {.code = ATTND_OK};
    attnd_err err = read_commit(core, rq, off, &step, &info);
    if (err) {
        then(rq, err, NULL, 0, &info);
        return;
    }
    step->request = rq;
    step->kept_id = id;
    step->committed = then;
    step->state = SRV_STEP_COMMITTING;
    if (!step->num_copies) {
        finish(core, step);
        return;
    }
    err = srv_step_copy(core, step, step->copies, step->num_copies, moved, &info);
    if (err) {
        then(reopen(step), err, NULL, 0, &info);
    }
}
