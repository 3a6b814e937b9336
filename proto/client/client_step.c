// Steps: open, commit, cancel.  A reply is checked whole before anything of the caller's is filled.
#include <stddef.h>
#include <string.h>

#include "proto/client/client.h"
#include "proto/client/client_sheet.h"

static attnd_err check_num(attnd_client *c, const char *field, uint32_t num, attnd_errinfo *info) {
    uint32_t most = client_get_limits(c).step_seqs;
    return num >= 1 && num <= most ? ATTND_OK
                                   : attnd_fail(info, ATTND_EINVAL, field,
                                                "%s %u, from 1 to %u are taken", field, num, most);
}

attnd_err client_check_seqs(attnd_client *c, const attnd_step_seq *seqs, uint32_t num_seqs,
                            attnd_errinfo *info) {
    attnd_err err = check_num(c, "num_seqs", num_seqs, info);
    if (err) {
        return err;
    }
    for (uint32_t i = 0; i < num_seqs; i++) {
        if (seqs[i].tree_mask && client_entries(&seqs[i]) > PROTO_MAX_TREE_ROWS) {
            return attnd_fail(info, ATTND_EINVAL, "tree_mask", "seqs[%u]: tree of over %d rows", i,
                              PROTO_MAX_TREE_ROWS);
        }
    }
    return ATTND_OK;
}

// put_commit writes a commit behind `at`, where its fixed struct lies.
static void put_commit(client_sheet *s, uint64_t at, const proto_commit *commit,
                       const attnd_accept *accept) {
    client_sheet_set(s, at, commit, sizeof(*commit));
    uint32_t seqs = client_sheet_place(s, commit->num_seqs * sizeof(proto_commit_seq));
    for (uint32_t i = 0; i < commit->num_seqs; i++) {
        proto_commit_seq to = {.accepted = accept[i].accepted};
        to.path_off = client_sheet_put(s, accept[i].path, accept[i].num_path * sizeof(uint32_t));
        client_sheet_set(s, seqs + i * sizeof(to), &to, sizeof(to));
    }
}

static uint64_t lay_out_step(uint8_t *msg, proto_step step, const attnd_step_seq *seqs,
                             const attnd_step_opts *opts) {
    client_sheet s;
    client_sheet_begin(&s, msg, sizeof(step));
    uint32_t at = client_sheet_place(&s, step.num_seqs * sizeof(proto_step_seq));
    for (uint32_t i = 0; i < step.num_seqs; i++) {
        const attnd_step_seq *from = &seqs[i];
        uint64_t n = client_entries(from);
        proto_step_seq to = {.seq = from->seq,
                             .new_len = from->new_len,
                             .q_len = from->q_len,
                             .reserve = from->reserve};
        to.tokens_off = client_sheet_put(&s, from->tokens, from->new_len * sizeof(uint32_t));
        to.positions_off = client_sheet_put(&s, from->positions, n * sizeof(int32_t));
        to.tree_off = client_sheet_put(&s, from->tree_mask, n * ((n + 63) / 64) * sizeof(uint64_t));
        client_sheet_set(&s, at + i * sizeof(to), &to, sizeof(to));
    }
    if (opts->commit_step) {
        proto_commit commit = {.step = opts->commit_step, .num_seqs = opts->num_commit};
        step.commit_off = client_sheet_place(&s, sizeof(commit));
        put_commit(&s, step.commit_off, &commit, opts->commit_accept);
    }
    client_sheet_set(&s, PROTO_BODY, &step, sizeof(step));
    return s.end;
}

// read_step fills seqs from the reply, or nothing.
static attnd_err read_step(proto_view msg, attnd_step_seq *seqs, uint32_t num_seqs,
                           proto_step_reply *out, attnd_errinfo *info) {
    proto_step_reply r;
    const void *lens = NULL;
    attnd_err err = proto_read(msg, &r, sizeof(r), false, info);
    if (err || (err = proto_array(msg, "lens", PROTO_BODY + sizeof(r), num_seqs,
                                  sizeof(proto_step_len), sizeof(r), &lens, info))) {
        return err;
    }
    if (r.num_seqs != num_seqs) {
        return attnd_fail(info, ATTND_EPROTO, "num_seqs", "reply of %u sequences, %u were sent",
                          r.num_seqs, num_seqs);
    }
    proto_step_len len[PROTO_MAX_STEP_SEQS]; // the reply may be shared memory: copy, then check
    proto_copy(len, lens, num_seqs * sizeof(len[0]));
    for (uint32_t i = 0; i < num_seqs; i++) {
        if (len[i].cached > seqs[i].new_len) {
            return attnd_fail(info, ATTND_EPROTO, "cached", "reply: %u of %u tokens cached",
                              len[i].cached, seqs[i].new_len);
        }
    }
    for (uint32_t i = 0; i < num_seqs; i++) {
        seqs[i].committed = len[i].committed;
        seqs[i].cached = len[i].cached;
    }
    *out = r;
    return ATTND_OK;
}

static bool is_unsure(attnd_err err) {
    return err == ATTND_ECONN || err == ATTND_ETIMEDOUT || err == ATTND_EPROTO;
}

uint64_t client_unsure_of(attnd_client *c, uint64_t step) {
    uint64_t request = 0;
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < CLIENT_MAX_SLOTS; i++) {
        request = c->unsure[i].step == step && step ? c->unsure[i].request : request;
    }
    pthread_mutex_unlock(&c->lock);
    return request;
}

// At most CLIENT_MAX_SLOTS requests are in flight, so an entry that is overwritten is of a commit
// that nobody tried again while as many others were lost.
void client_unsure_set(attnd_client *c, uint64_t step, uint64_t request, attnd_err err) {
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < CLIENT_MAX_SLOTS; i++) {
        if (c->unsure[i].step == step) {
            c->unsure[i] = (client_unsure){0};
        }
    }
    if (is_unsure(err) && request) {
        c->unsure[c->next_unsure++ % CLIENT_MAX_SLOTS] = (client_unsure){step, request};
    }
    pthread_mutex_unlock(&c->lock);
}

static attnd_err check_commit(attnd_client *c, const attnd_step_opts *o, attnd_errinfo *info) {
    return o->commit_step ? check_num(c, "num_commit", o->num_commit, info) : ATTND_OK;
}

static bool is_of_commit(const attnd_errinfo *info) {
    static const char prefix[] = "commit.";
    return strncmp(info->field, prefix, sizeof(prefix) - 1) == 0;
}

// check_ready is client_engine_ready for a commit that a step carries.
static attnd_err check_ready(attnd_client *c, const attnd_step_opts *o, attnd_errinfo *info) {
    attnd_err err = client_engine_ready(c, o->commit_step, o->commit_accept, o->num_commit, info);
    if (err) {
        strcpy(info->field, "commit.step");
    }
    return err;
}

// get_tables_room returns what a reply has room for, set_tables_room sets it.
static uint64_t get_tables_room(attnd_client *c) {
    pthread_mutex_lock(&c->lock);
    uint64_t room = client_in_process(c) ? c->tables_room : 0;
    pthread_mutex_unlock(&c->lock);
    return room;
}

static void set_tables_room(attnd_client *c, uint64_t room) {
    pthread_mutex_lock(&c->lock);
    c->tables_room = room;
    pthread_mutex_unlock(&c->lock);
}

// open_in_engine: a step that the engine does not take is given back.
static attnd_err open_in_engine(attnd_client *c, const client_msg *reply, const proto_step_reply *r,
                                uint32_t model, const attnd_step_seq *seqs, attnd_errinfo *info) {
    attnd_engine_step s = {r->step, model, seqs, r->num_seqs, NULL, 0};
    attnd_err err = client_engine_step(reply, r->tables_off, &s, info);
    if (err) {
        attnd_step_cancel(c, r->step, NULL);
    }
    return err;
}

// give_back tells the daemon that nothing of this process works on a step that it does not commit
// any more: until then the blocks of one past its deadline are held.  Not an error where it is
// gone.
static void give_back(attnd_client *c, uint64_t step) {
    if (client_engine_is_here(c)) {
        attnd_step_cancel(c, step, NULL);
    } else {
        client_engine_close(c, step);
    }
}

// open_step makes one request.
static attnd_err open_step(attnd_client *c, uint32_t model, attnd_step_seq *seqs, uint32_t num_seqs,
                           const attnd_step_opts *o, uint64_t *step, attnd_errinfo *info) {
    client_msg m = {0};
    proto_step body = {.model = model, .num_seqs = num_seqs, .deadline_ms = o->deadline_ms};
    proto_step_reply r = {.step = 0};
    client_start_opts how = {.request_id = o->request};
    uint64_t room = PROTO_BODY + sizeof(proto_step_reply) + num_seqs * sizeof(proto_step_len) +
                    get_tables_room(c);
    attnd_err err = client_request(c, lay_out_step(NULL, body, seqs, o), room, &m, info);
    if (err) {
        return err;
    }
    uint64_t commit_request = 0;
    if (o->commit_step) {
        how.second_id = PROTO_BODY + offsetof(proto_step, commit_request);
        how.second_again_id = client_unsure_of(c, o->commit_step);
        how.second_request_id = &commit_request;
    }
    lay_out_step(m.data, body, seqs, o);
    if (!(err = client_call(c, PROTO_STEP, &m, body.deadline_ms, &how, info))) {
        err = read_step(client_msg_view(&m), seqs, num_seqs, &r, info);
    }
    if (o->commit_step) {
        client_unsure_set(c, o->commit_step, commit_request, err);
        if (!is_unsure(err) && err == ATTND_ESTALE && is_of_commit(info)) {
            give_back(c, o->commit_step);
        } else if (!err || (!is_unsure(err) && !is_of_commit(info))) {
            client_engine_close(c, o->commit_step); // it was made
        }
    }
    if (!err && !(err = open_in_engine(c, &m, &r, model, seqs, info))) {
        *step = r.step;
    }
    client_msg_free(&m);
    return err;
}

attnd_err attnd_step_open(attnd_client *c, uint32_t model, attnd_step_seq *seqs, uint32_t num_seqs,
                          const attnd_step_opts *opts, uint64_t *step, attnd_errinfo *info) {
    attnd_step_opts o = opts ? *opts : (attnd_step_opts){0};
    attnd_errinfo own;
    info = info ? info : &own;
    attnd_err err = client_check_seqs(c, seqs, num_seqs, info);
    if (err || (err = client_model_get(c, model, NULL, info)) ||
        (err = check_commit(c, &o, info)) || (o.commit_step && (err = check_ready(c, &o, info)))) {
        return err;
    }
    err = open_step(c, model, seqs, num_seqs, &o, step, info);
    if (err == ATTND_EMSGSIZE && client_in_process(c) &&
        info->detail > 0) { // the tables have grown
        set_tables_room(c, 2 * (uint64_t)info->detail);
        o.commit_step = 0; // it stands
        err = open_step(c, model, seqs, num_seqs, &o, step, info);
    }
    return err;
}

static uint64_t lay_out_commit(uint8_t *msg, const proto_commit *commit,
                               const attnd_accept *accept) {
    client_sheet s;
    client_sheet_begin(&s, msg, sizeof(*commit));
    put_commit(&s, PROTO_BODY, commit, accept);
    return s.end;
}

static attnd_err read_lens(proto_view msg, uint32_t num_seqs, uint32_t *lens, attnd_errinfo *info) {
    proto_lens r;
    const void *from = NULL;
    attnd_err err = proto_read(msg, &r, sizeof(r), false, info);
    if (err || (err = proto_array(msg, "lens", PROTO_BODY + sizeof(r), num_seqs, sizeof(*lens),
                                  sizeof(r), &from, info))) {
        return err;
    }
    if (r.num_seqs != num_seqs) {
        return attnd_fail(info, ATTND_EPROTO, "num_seqs", "reply of %u sequences, %u were sent",
                          r.num_seqs, num_seqs);
    }
    if (lens) {
        memcpy(lens, from, num_seqs * sizeof(*lens));
    }
    return ATTND_OK;
}

attnd_err attnd_step_commit(attnd_client *c, uint64_t step, const attnd_accept *accept,
                            uint32_t num_seqs, uint32_t *lens, attnd_errinfo *info) {
    client_msg m = {0};
    proto_commit body = {.step = step, .num_seqs = num_seqs};
    uint64_t room = PROTO_BODY + sizeof(proto_lens) + num_seqs * sizeof(*lens);
    attnd_err err = check_num(c, "num_seqs", num_seqs, info);
    if (err || (err = client_engine_ready(c, step, accept, num_seqs, info)) ||
        (err = client_request(c, lay_out_commit(NULL, &body, accept), room, &m, info))) {
        return err;
    }
    uint64_t request = 0;
    client_start_opts how = {.again_id = client_unsure_of(c, step), .request_id = &request};
    lay_out_commit(m.data, &body, accept);
    if (!(err = client_call(c, PROTO_COMMIT, &m, 0, &how, info))) {
        err = read_lens(client_msg_view(&m), num_seqs, lens, info);
    }
    client_unsure_set(c, step, request, err);
    client_msg_free(&m);
    if (err == ATTND_ESTALE) {
        give_back(c, step);
    } else if (!err) {
        client_engine_close(c, step);
    }
    return err;
}

attnd_err attnd_step_cancel(attnd_client *c, uint64_t step, attnd_errinfo *info) {
    proto_cancel body = {.step = step};
    if (step == 0) {
        return attnd_fail(info, ATTND_EINVAL, "step", "0 is no step");
    }
    attnd_err err = client_engine_settle(c, step, info);
    if (err) {
        return err;
    }
    client_engine_close(c, step);
    err = client_call_fixed(c, PROTO_CANCEL, &body, sizeof(body), NULL, 0, info);
    if (client_engine_collect(c, step)) { // its flags are not used any more: proto_region.h
        client_call_fixed(c, PROTO_CANCEL, &body, sizeof(body), NULL, 0, NULL);
    }
    return err;
}
