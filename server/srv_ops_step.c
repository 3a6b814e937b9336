// step, commit, cancel.
//
// Everything that a step carries is read and checked, and copied into the step's own memory, before
// its blocks are asked for: the message may go away, or in shared memory change, while attends
// still need positions and masks.
//
//     step:   read -> [commit of the one before] -> wait for blocks -> [copies] -> reply
//     commit: all layers attended? -> read accepted rows -> [moves of a tree's path] -> reply
#include <stdio.h>
#include <string.h>

#include "proto/clock.h"
#include "server/srv_commit.h"
#include "server/srv_ops.h"
#include "server/srv_step_read.h"

// ---- step

// tables_bytes returns what proto_step_tables takes, tables included.
static uint64_t tables_bytes(const srv_core *core, const srv_step *step) {
    uint32_t num_groups = step->model->attn->num_groups, num;
    uint64_t words = (uint64_t)step->num_seqs * num_groups;
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        for (uint32_t g = 0; g < num_groups; g++) {
            kv_step_table(core->kv, step->handle, i, g, &num);
            words += num;
        }
    }
    return sizeof(proto_step_tables) + words * sizeof(uint32_t);
}

static void put_tables(const srv_core *core, const srv_step *step, uint8_t *out) {
    proto_step_tables head = {.num_groups = step->model->attn->num_groups};
    memcpy(out, &head, sizeof(head));
    uint8_t *nums = out + sizeof(head);
    uint8_t *entries = nums + (size_t)step->num_seqs * head.num_groups * sizeof(uint32_t);
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        for (uint32_t g = 0; g < head.num_groups; g++) {
            uint32_t num;
            const uint32_t *table = kv_step_table(core->kv, step->handle, i, g, &num);
            memcpy(nums, &num, sizeof(num));
            memcpy(entries, table, num * sizeof(*table));
            nums += sizeof(num);
            entries += num * sizeof(*table);
        }
    }
}

static void reply_step(srv_step *step) {
    srv_request *rq = step->request;
    const srv_core *core = step->session->core;
    proto_step_reply head = {.step = step->handle, .num_seqs = step->num_seqs};
    uint64_t bytes = sizeof(head) + step->num_seqs * sizeof(proto_step_len);
    if (step->in_process) {
        head.tables_off = (uint32_t)(PROTO_BODY + bytes);
        bytes += tables_bytes(core, step);
    }
    uint8_t *body;
    attnd_errinfo info;
    attnd_err err = srv_reply_begin(rq, bytes, 0, &body, &info);
    if (err) {
        info.detail = err == ATTND_EMSGSIZE ? (int32_t)(PROTO_BODY + bytes) : 0;
        srv_reply_error(rq, err, &info);
        srv_step_end(step->session->core, step);
        return;
    }
    memcpy(body, &head, sizeof(head));
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        proto_step_len len = {step->kv_seqs[i].committed, step->kv_seqs[i].cached};
        memcpy(body + sizeof(head) + i * sizeof(len), &len, sizeof(len));
    }
    if (head.tables_off) {
        put_tables(core, step, body + head.tables_off - PROTO_BODY);
    }
    step->state = SRV_STEP_OPEN;
    step->request = NULL;
    srv_reply_end(rq);
}

static void copied(sched_req *req, attnd_err err, const attn_choice *choice,
                   const attnd_errinfo *info) {
    (void)choice;
    srv_step *step = req->user;
    srv_core *core = step->session->core;
    if (!err && step->state == SRV_STEP_ENDING) {
        err = ATTND_ECANCELED;
    }
    if (err) {
        srv_reply_error(step->request, err, info);
        srv_step_end(core, step);
    } else {
        reply_step(step);
    }
    srv_step_done(core, step);
}

static void cancel_opening(srv_request *rq) {
    srv_step_end(rq->session->core, rq->attend.step);
}

// opened: the reply waits for the copies, so that no attend can overtake them.
static void opened(srv_step *step, attnd_err err, const attnd_errinfo *info) {
    srv_core *core = step->session->core;
    if (err) {
        srv_reply_error(step->request, err, info);
        return;
    }
    if (step->deadline_ms) {
        core->hooks->rearm(core->hooks->ctx, step->deadline_ms);
    }
    if (!step->num_copies) {
        reply_step(step);
        return;
    }
    attnd_errinfo refused;
    step->request->cancel = cancel_opening;
    err = srv_step_copy(core, step, step->copies, step->num_copies, copied, &refused);
    if (err) {
        srv_reply_error(step->request, err, &refused);
        srv_step_end(core, step);
    }
}

static attnd_err read_step(srv_core *core, srv_request *rq, proto_step *body, srv_step **out,
                           attnd_errinfo *info) {
    attnd_err err = proto_read(rq->msg, body, sizeof(*body), false, info);
    if (!err && (body->commit_off == 0) != (body->commit_request == 0)) {
        err = attnd_fail(info, ATTND_EINVAL, "commit_request",
                         "commit_off and commit_request go together");
    }
    if (!err && body->commit_request == rq->header.request) {
        err = attnd_fail(info, ATTND_EINVAL, "commit_request", "the id of the step itself");
    }
    if (!err) {
        err = srv_step_read(core, rq, body, out, info);
    }
    return err;
}

static void open_step(srv_core *core, srv_step *step) {
    step->opened = opened;
    srv_step_open(core, step);
}

// carried is told how the commit went that a step carried.
static void carried(srv_request *rq, attnd_err err, const uint32_t *lens, uint32_t num_lens,
                    const attnd_errinfo *info) {
    (void)lens, (void)num_lens;
    srv_step *step = rq->attend.step;
    srv_core *core = rq->session->core;
    if (!err && step->state != SRV_STEP_ENDING) {
        open_step(core, step);
        return;
    }
    attnd_errinfo named;
    if (err) {
        char field[ATTND_ERR_FIELD_BYTES];
        snprintf(field, sizeof(field), "commit.%.24s", info->field);
        attnd_fail(&named, err, field, "%s", info->text);
        named.detail = info->detail;
    } else {
        err =
            attnd_fail(&named, ATTND_ECANCELED, "", "the commit was made, the step was not tried");
    }
    srv_reply_error(rq, err, &named);
    srv_step_release(core, step);
}

SRV_HANDLER(step) {
    (void)kept;
    proto_step body;
    srv_step *step = NULL;
    attnd_errinfo info;
    attnd_err err = read_step(core, rq, &body, &step, &info);
    if (err) {
        srv_reply_error(rq, err, &info);
        return;
    }
    step->request = rq;
    step->kept_id = rq->header.request;
    step->in_process = rq->conn->arena;
    rq->attend.step = step;
    if (body.commit_off) {
        srv_commit(core, rq, body.commit_off, body.commit_request, carried);
    } else {
        open_step(core, step);
    }
}

// ---- commit

static void committed(srv_request *rq, attnd_err err, const uint32_t *lens, uint32_t num_lens,
                      const attnd_errinfo *info) {
    proto_lens head = {.num_seqs = num_lens};
    uint8_t *body;
    attnd_errinfo full;
    if (!err) {
        info = &full;
        err = srv_reply_begin(rq, sizeof(head) + num_lens * sizeof(*lens), 0, &body, &full);
    }
    if (err) {
        srv_reply_error(rq, err, info);
        return;
    }
    memcpy(body, &head, sizeof(head));
    memcpy(body + sizeof(head), lens, num_lens * sizeof(*lens));
    srv_reply_end(rq);
}

SRV_HANDLER(commit) {
    (void)kept;
    srv_commit(core, rq, PROTO_BODY, rq->header.request, committed);
}

// ---- cancel

// forget ends drains of a step of the session's: its client will not touch their flags any more.
static bool forget(srv_core *core, const srv_session *s, uint64_t step) {
    bool any = s->conn && s->conn->region && srv_armed_forget(core, s->conn->region, step);
    return (s->ring && s->ring->region && srv_armed_forget(core, s->ring->region, step)) || any;
}

static void cancel_request(srv_request *rq, uint64_t id) {
    srv_request *other = srv_session_find_request(rq->session, id, rq);
    if (!other) {
        attnd_errinfo info;
        attnd_fail(&info, ATTND_ENOENT, "request", "no such request is waiting or running");
        srv_reply_error(rq, ATTND_ENOENT, &info);
        return;
    }
    if (other->cancel) {
        void (*cancel)(srv_request *) = other->cancel;
        other->cancel = NULL;
        cancel(other);
    }
    srv_reply_empty(rq);
}

SRV_HANDLER(cancel) {
    (void)kept;
    proto_cancel body;
    attnd_errinfo info;
    attnd_err err = proto_read(rq->msg, &body, sizeof(body), true, &info);
    if (!err && (body.step == 0) == (body.request == 0)) {
        err =
            attnd_fail(&info, ATTND_EINVAL, "step", "one of step and request names what to cancel");
    }
    srv_step *step = NULL;
    bool forgot = false;
    if (!err && body.step) {
        forgot = forget(core, rq->session, body.step);
        step = srv_step_find_late(core, rq->session, body.step);
        err = !step && forgot ? ATTND_OK
              : !step         ? attnd_fail(&info, ATTND_ESTALE, "step", "the step is not open")
              : step->state == SRV_STEP_COMMITTING
                  ? attnd_fail(&info, ATTND_EBUSY, "step", "a commit of the step is under way")
                  : ATTND_OK;
    }
    if (err) {
        srv_reply_error(rq, err, &info);
    } else if (step) {
        list_append(&step->cancels, &rq->wait_node);
        srv_step_end(core, step);
    } else if (forgot) {
        srv_reply_empty(rq);
    } else {
        cancel_request(rq, body.request);
    }
}
