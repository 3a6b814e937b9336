// Reading a step.  A message may hold anything, and in shared memory it may change between two
// looks: each struct and array is copied out first, and only the copy is checked and used.
#include "server/srv_step_read.h"

#include <string.h>

#include "proto/clock.h"
#include "server/srv_prefix.h"

attnd_err srv_step_set_model(srv_step *step, uint32_t model, uint32_t deadline_ms,
                             attnd_errinfo *info) {
    step->model_idx = model;
    step->model = srv_session_model(step->session, model);
    step->deadline_ms = deadline_ms ? attnd_clock_ms() + deadline_ms : 0;
    return step->model ? ATTND_OK : attnd_fail(info, ATTND_ENOENT, "model", "no such model");
}

attnd_err srv_step_set_lens(srv_core *core, srv_step *step, uint32_t i, uint32_t new_len,
                            uint32_t q_len, uint64_t *rows, attnd_errinfo *info) {
    if (new_len && q_len) {
        return attnd_fail(info, ATTND_EINVAL, "q_len",
                          "sequence %u has new tokens: its q_len must be 0", i);
    }
    *rows += (uint64_t)new_len + q_len;
    if (*rows > core->conf.step_rows) {
        return attnd_fail(info, ATTND_EMSGSIZE, new_len ? "new_len" : "q_len",
                          "over %llu rows in a step", (unsigned long long)core->conf.step_rows);
    }
    step->kv_seqs[i].new_len = new_len;
    step->kv_seqs[i].q_len = q_len;
    step->seqs[i].rows = new_len + q_len;
    return ATTND_OK;
}

// reader is a message that a step is read from.
typedef struct reader {
    srv_core *core;
    srv_step *step;
    proto_view msg;
    size_t fixed; // bytes of the body in front of the arrays
} reader;

// copy_array copies an array of the message into the step's memory.  *out = NULL when off is 0.
static attnd_err copy_array(const reader *in, const char *field, uint32_t off, uint64_t bytes,
                            void **out, attnd_errinfo *info) {
    const void *array = NULL;
    *out = NULL;
    attnd_err err = proto_array(in->msg, field, off, bytes, 1, in->fixed, &array, info);
    if (err || !array) {
        return err;
    }
    *out = srv_step_alloc(in->core, in->step, bytes);
    if (!*out) {
        return attnd_fail(info, ATTND_EMSGSIZE, field,
                          "token ids, positions, masks and paths of a step have over %llu bytes",
                          (unsigned long long)in->core->conf.step_bytes);
    }
    proto_copy(*out, array, bytes);
    return ATTND_OK;
}

attnd_err srv_step_read_positions(srv_core *core, srv_step *step, const srv_request *rq, uint32_t i,
                                  uint32_t off, size_t fixed, attnd_errinfo *info) {
    void *copy;
    uint32_t rows = step->seqs[i].rows;
    attnd_err err = copy_array(&(reader){core, step, rq->msg, fixed}, "positions_off", off,
                               (uint64_t)rows * sizeof(int32_t), &copy, info);
    const int32_t *positions = copy;
    for (uint32_t r = 0; !err && positions && r < rows; r++) {
        if (positions[r] < 0) {
            return attnd_fail(info, ATTND_EINVAL, "positions_off",
                              "position %d of row %u of sequence %u is negative", positions[r], r,
                              i);
        }
    }
    step->seqs[i].positions = positions;
    return err;
}

static attnd_err read_tree(const reader *in, uint32_t i, uint32_t off, attnd_errinfo *info) {
    const srv_step *step = in->step;
    uint64_t rows = step->seqs[i].rows;
    if (off && (!step->kv_seqs[i].new_len || rows > PROTO_MAX_TREE_ROWS)) {
        return attnd_fail(info, ATTND_EINVAL, "tree_off",
                          "a tree has 1 to %d new tokens, sequence %u has %u", PROTO_MAX_TREE_ROWS,
                          i, step->kv_seqs[i].new_len);
    }
    void *copy;
    attnd_err err =
        copy_array(in, "tree_off", off, rows * ((rows + 63) / 64) * sizeof(uint64_t), &copy, info);
    step->seqs[i].tree = copy;
    return err;
}

static attnd_err read_tokens(const reader *in, uint32_t i, uint32_t off, attnd_errinfo *info) {
    const srv_step *step = in->step;
    void *copy;
    attnd_err err = copy_array(in, "tokens_off", off,
                               (uint64_t)step->kv_seqs[i].new_len * sizeof(uint32_t), &copy, info);
    if (!err && copy) {
        err = srv_prefix_can(in->core, step->model, info);
    }
    step->ids[i].tokens = in->core->conf.prefixes ? copy : NULL;
    return err;
}

static attnd_err read_seq(srv_core *core, srv_step *step, const srv_request *rq, uint32_t i,
                          const proto_step_seq *in, size_t fixed, uint64_t *rows,
                          attnd_errinfo *info) {
    attnd_err err = srv_step_set_lens(core, step, i, in->new_len, in->q_len, rows, info);
    if (err) {
        return err;
    }
    step->kv_seqs[i].seq = in->seq;
    step->kv_seqs[i].reserve = in->reserve;
    if (!in->new_len && (in->reserve || in->tokens_off)) {
        return attnd_fail(info, ATTND_EINVAL, in->reserve ? "reserve" : "tokens_off",
                          "sequence %u has no new tokens: it is read only, and has no %s", i,
                          in->reserve ? "reserve" : "token ids");
    }
    const reader reads = {core, step, rq->msg, fixed};
    err = read_tokens(&reads, i, in->tokens_off, info);
    if (!err) {
        err = srv_step_read_positions(core, step, rq, i, in->positions_off, fixed, info);
    }
    if (!err) {
        err = read_tree(&reads, i, in->tree_off, info);
    }
    return err;
}

static attnd_err read_seqs(srv_core *core, srv_step *step, const srv_request *rq,
                           const proto_step *body, const uint8_t *seqs, attnd_errinfo *info) {
    attnd_err err = srv_step_set_model(step, body->model, body->deadline_ms, info);
    size_t fixed = sizeof(*body) + body->num_seqs * sizeof(proto_step_seq);
    uint64_t rows = 0;
    for (uint32_t i = 0; i < body->num_seqs && !err; i++) {
        proto_step_seq seq;
        proto_copy(&seq, seqs + i * sizeof(seq), sizeof(seq));
        err = read_seq(core, step, rq, i, &seq, fixed, &rows, info);
    }
    return err;
}

attnd_err srv_step_read(srv_core *core, const srv_request *rq, const proto_step *body,
                        srv_step **out, attnd_errinfo *info) {
    if (body->num_seqs < 1 || body->num_seqs > core->conf.step_seqs) {
        return attnd_fail(info, ATTND_EINVAL, "num_seqs", "a step has 1 to %llu sequences",
                          (unsigned long long)core->conf.step_seqs);
    }
    const void *seqs;
    attnd_err err = proto_array(rq->msg, "num_seqs", PROTO_BODY + sizeof(*body), body->num_seqs,
                                sizeof(proto_step_seq), sizeof(*body), &seqs, info);
    srv_step *step = NULL;
    if (!err) {
        err = srv_step_take(core, rq->session, body->num_seqs, &step, info);
    }
    if (!err) {
        err = read_seqs(core, step, rq, body, seqs, info);
    }
    if (err && step) {
        srv_step_release(core, step);
    }
    *out = step;
    return err;
}
