// Models, steps and attends of an in-process client.
//
// What the daemon writes is not believed where a launch would follow it out of the arena: a table
// is copied once, then every entry of it checked, before a row points at it.  What the client says
// of its own tensors is: it runs in the same process.
//
// One lock: launches of an engine follow each other anyway.  Steps that are closed keep their
// memory for the next, so that nothing is allocated once a client has got going.
#include "attention/attn_engine_core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "proto/proto_msg.h"

// ---- life

void attn_engine_close(void *state) {
    attn_engine *e = state;
    if (!e) {
        return;
    }
    for (attn_engine_step *s; (s = e->steps);) {
        e->steps = s->next;
        e->ops->drop(e, s);
        e->ops->free(e, &s->memory);
        e->ops->free(e, &s->lists);
        free(s->seqs);
        free(s->tables);
        free(s);
    }
    for (attn_engine_model *m; (m = e->models);) {
        e->models = m->next;
        e->ops->free(e, &m->floats);
        attn_model_free(m->attn);
        free(m);
    }
    e->ops->close(e);
    pthread_mutex_destroy(&e->lock);
    free(e->rows);
    free(e->masks);
    free(e);
}

attnd_err attn_engine_open(void **out, const attn_engine_ops *ops, const attnd_engine_opts *opts,
                           attnd_errinfo *info) {
    attn_engine *e = calloc(1, sizeof(*e));
    if (!e) {
        return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for an engine");
    }
    e->ops = ops;
    e->deterministic = opts->deterministic;
    pthread_mutex_init(&e->lock, NULL);
    attnd_err err = ops->open(e, opts, info);
    if (err) {
        attn_engine_close(e);
        return err;
    }
    *out = e;
    return ATTND_OK;
}

// ---- models

static attn_engine_model *find_model(attn_engine *e, uint32_t number) {
    attn_engine_model *m = e->models;
    while (m && m->number != number) {
        m = m->next;
    }
    return m;
}

// add_model takes attn on success.
static attnd_err add_model(attn_engine *e, uint32_t number, attn_model *attn, attnd_errinfo *info) {
    size_t bytes = attn->num_floats * sizeof(float);
    attn_engine_model *m = calloc(1, sizeof(*m));
    attnd_err err = m ? e->ops->check_model(e, attn, info)
                      : attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for a model");
    if (!err && bytes > 0) {
        err = e->ops->alloc(e, &m->floats, bytes, info);
    }
    if (err) {
        free(m);
        return err;
    }
    if (bytes > 0) {
        memcpy(m->floats.host, attn->floats, bytes);
        err = e->ops->show(e, &m->floats, info);
    }
    if (err) {
        e->ops->free(e, &m->floats);
        free(m);
        return err;
    }
    m->number = number;
    m->attn = attn;
    m->next = e->models;
    e->models = m;
    return ATTND_OK;
}

attnd_err attn_engine_model_open(void *state, uint32_t model, const char *json,
                                 uint32_t block_tokens, attnd_errinfo *info) {
    attn_engine *e = state;
    attn_model *attn = NULL;
    attnd_err err = attn_model_parse(&attn, json, strlen(json), block_tokens, info);
    if (err) {
        return err;
    }
    pthread_mutex_lock(&e->lock);
    const attn_engine_model *old = find_model(e, model);
    bool same = old && attn_model_equal(old->attn, attn);
    err = same ? ATTND_OK : add_model(e, model, attn, info);
    pthread_mutex_unlock(&e->lock);
    if (same || err) {
        attn_model_free(attn);
    }
    return err;
}

// ---- steps

static attn_engine_step *find_step(attn_engine *e, uint64_t handle) {
    attn_engine_step *s = e->steps;
    while (s && s->handle != handle) {
        s = s->next;
    }
    return handle ? s : NULL;
}

// take_step returns a step without a handle, with room for num_seqs; NULL without memory.
static attn_engine_step *take_step(attn_engine *e, uint32_t num_seqs) {
    attn_engine_step *s = e->steps;
    while (s && (s->handle || e->ops->busy(e, s))) {
        s = s->next;
    }
    if (!s && (s = calloc(1, sizeof(*s)))) {
        s->next = e->steps;
        e->steps = s;
    }
    if (s && s->max_seqs < num_seqs) {
        attn_seq *seqs = realloc(s->seqs, num_seqs * sizeof(*seqs));
        s->seqs = seqs ? seqs : s->seqs;
        const uint32_t **tables =
            realloc(s->tables, num_seqs * ATTN_MODEL_GROUPS * sizeof(*tables));
        s->tables = tables ? tables : s->tables;
        if (!seqs || !tables) {
            return NULL;
        }
        s->max_seqs = num_seqs;
    }
    return s;
}

static uint64_t num_positions(const attnd_step_seq *seq) {
    return seq->new_len ? seq->new_len : seq->q_len;
}

static size_t tree_bytes(const attnd_step_seq *seq) {
    uint64_t n = num_positions(seq);
    return n * ((n + 63) / 64) * sizeof(uint64_t);
}

// place returns bytes of the step's memory, 8-aligned; take_memory has made room.
static void *place(attn_engine_step *s, size_t bytes) {
    void *p = s->memory.host + s->used;
    s->used += (bytes + 7) / 8 * 8;
    return p;
}

// take_memory makes room for the tables and all that the sequences point to.
static attnd_err take_memory(attn_engine *e, attn_engine_step *s, const attnd_engine_step *in,
                             attnd_errinfo *info) {
    size_t bytes = in->tables_bytes + 8;
    for (uint32_t i = 0; i < in->num_seqs; i++) {
        const attnd_step_seq *seq = &in->seqs[i];
        bytes += seq->positions ? num_positions(seq) * sizeof(int32_t) + 8 : 0;
        bytes += seq->tree_mask ? tree_bytes(seq) : 0;
    }
    s->used = 0;
    if (s->memory.bytes >= bytes) {
        return ATTND_OK;
    }
    e->ops->free(e, &s->memory);
    s->memory = (attn_engine_memory){.host = NULL};
    return e->ops->alloc(e, &s->memory, 2 * bytes, info);
}

static void copy_seq(attn_engine_step *s, uint32_t i, const attnd_step_seq *in) {
    attn_seq *seq = &s->seqs[i];
    s->has_tokens |= in->tokens != NULL;
    *seq = (attn_seq){.rows = in->q_len};
    if (in->positions) {
        size_t bytes = num_positions(in) * sizeof(int32_t);
        seq->positions = memcpy(place(s, bytes), in->positions, bytes);
    }
    if (in->tree_mask) {
        seq->tree = memcpy(place(s, tree_bytes(in)), in->tree_mask, tree_bytes(in));
    }
    attn_seq_place(seq, in->committed, in->new_len, in->cached, &s->rows, &s->new_rows);
}

static attnd_err bad_tables(attnd_errinfo *info) {
    return attnd_fail(info, ATTND_EPROTO, "tables_off", "reply: block tables that make no sense");
}

// first_entry returns the first entry of a group's table that the step's rows reach: there is no
// block behind the window of the first.
static uint32_t first_entry(const attn_model *m, const attn_seq *seq, uint32_t group) {
    int64_t at = (int64_t)seq->kv_len - seq->rows, left = m->groups[group].window_left;
    return left < 0 || at <= left ? 0 : (uint32_t)((at - left) / m->block_tokens);
}

// check_table wants a table for all keys of a sequence, and its blocks inside the arena; of those
// that no row reaches there may be none.
static attnd_err check_table(const attn_engine *e, const attn_engine_step *s, uint32_t seq,
                             uint32_t group, const uint32_t *entries, uint32_t num,
                             attnd_errinfo *info) {
    const attn_model *m = s->model->attn;
    uint64_t row_bytes = (uint64_t)(m->head_dim + m->v_head_dim) * attnd_dtype_bytes(m->kv_dtype);
    uint64_t block_bytes =
        m->groups[group].layers * (uint64_t)m->kv_heads * m->block_tokens * row_bytes;
    if ((uint64_t)num * m->block_tokens < (uint64_t)s->seqs[seq].kv_len ||
        block_bytes > e->pool_bytes) {
        return bad_tables(info);
    }
    uint64_t end = (e->pool_bytes - block_bytes) / ATTN_MODEL_BLOCK_UNIT;
    uint32_t first = first_entry(m, &s->seqs[seq], group);
    for (uint32_t i = 0; i < num; i++) {
        if (entries[i] > end && (i >= first || entries[i] != PROTO_NO_BLOCK)) {
            return bad_tables(info);
        }
    }
    return ATTND_OK;
}

// read_tables copies the tables, and points at each.
static attnd_err read_tables(attn_engine *e, attn_engine_step *s, const attnd_engine_step *in,
                             attnd_errinfo *info) {
    uint32_t num_groups = s->model->attn->num_groups;
    uint64_t num_tables = (uint64_t)in->num_seqs * num_groups;
    uint8_t *copy = place(s, in->tables_bytes);
    proto_copy(copy, in->tables, in->tables_bytes);
    proto_step_tables head;
    uint64_t words = in->tables_bytes / sizeof(uint32_t), used = sizeof(head) / sizeof(uint32_t);
    if (words < used + num_tables) {
        return bad_tables(info);
    }
    memcpy(&head, copy, sizeof(head));
    const uint32_t *nums = (const uint32_t *)(void *)copy + used;
    const uint32_t *entries = nums + num_tables;
    words -= used + num_tables;
    attnd_err err = head.num_groups == num_groups ? ATTND_OK : bad_tables(info);
    for (uint64_t t = 0; t < num_tables && !err; t++) {
        if (nums[t] > words) {
            return bad_tables(info);
        }
        uint32_t seq = (uint32_t)(t / num_groups), group = (uint32_t)(t % num_groups);
        err = check_table(e, s, seq, group, entries, nums[t], info);
        s->tables[seq * ATTN_MODEL_GROUPS + group] = entries;
        entries += nums[t];
        words -= nums[t];
    }
    return err;
}

static attnd_err open_step(attn_engine *e, const attnd_engine_step *in, attnd_errinfo *info) {
    attn_engine_step *s = take_step(e, in->num_seqs);
    if (!s) {
        return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for a step");
    }
    s->model = find_model(e, in->model);
    if (!s->model) {
        return attnd_fail(info, ATTND_ENOENT, "model", "model %u is not open here", in->model);
    }
    attnd_err err = take_memory(e, s, in, info);
    if (err) {
        return err;
    }
    s->num_seqs = in->num_seqs;
    s->rows = s->new_rows = 0;
    s->uploaded = s->has_tokens = s->captures = false;
    s->lists_used = s->lists_shown = 0;
    memset(s->attended, 0, sizeof(s->attended));
    for (uint32_t i = 0; i < in->num_seqs; i++) {
        copy_seq(s, i, &in->seqs[i]);
    }
    err = read_tables(e, s, in, info);
    s->handle = err ? 0 : in->step;
    return err;
}

attnd_err attn_engine_step_open(void *state, const attnd_engine_step *step, attnd_errinfo *info) {
    attn_engine *e = state;
    pthread_mutex_lock(&e->lock);
    attnd_err err = open_step(e, step, info);
    pthread_mutex_unlock(&e->lock);
    return err;
}

static bool is_attended(const attn_engine_step *s, uint32_t layer) {
    return s->attended[layer / 64] >> (layer % 64) & 1;
}

static attnd_err check_whole(const attn_engine_step *s, attnd_errinfo *info) {
    for (uint32_t layer = 0; layer < s->model->attn->num_layers; layer++) {
        if (!is_attended(s, layer)) {
            attnd_fail(info, ATTND_EINVAL, "step", "layer %u was not attended", layer);
            if (info) {
                info->detail = (int32_t)layer;
            }
            return ATTND_EINVAL;
        }
    }
    return ATTND_OK;
}

// harms is true when a commit before the step's work has ended could do harm: blocks go into the
// prefix cache (tokens) or are given back (tokens that are not accepted, a window) or are read by
// the daemon (a path).
static bool harms(const attn_engine_step *s, const attnd_accept *accept, uint32_t num_seqs) {
    const attn_model *m = s->model->attn;
    bool harm = s->has_tokens || num_seqs != s->num_seqs;
    for (uint32_t g = 0; g < m->num_groups; g++) {
        harm |= m->groups[g].window_left >= 0;
    }
    for (uint32_t i = 0; i < s->num_seqs && !harm; i++) {
        harm = accept[i].path || accept[i].accepted != s->seqs[i].new_rows;
    }
    return harm;
}

attnd_err attn_engine_step_ready(void *state, uint64_t step, const attnd_accept *accept,
                                 uint32_t num_seqs, bool soon, attnd_errinfo *info) {
    attn_engine *e = state;
    pthread_mutex_lock(&e->lock);
    attn_engine_step *s = find_step(e, step);
    attnd_err err = s ? check_whole(s, info) : ATTND_OK;
    if (s && !err && (!soon || harms(s, accept, num_seqs))) {
        err = e->ops->ready(e, s, info);
    }
    pthread_mutex_unlock(&e->lock);
    return err;
}

static attnd_err settle(attn_engine *e, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    for (attn_engine_step *s = e->steps; s && !err; s = s->next) {
        err = e->ops->ready(e, s, info);
    }
    return err;
}

attnd_err attn_engine_settle(void *state, attnd_errinfo *info) {
    attn_engine *e = state;
    pthread_mutex_lock(&e->lock);
    attnd_err err = settle(e, info);
    pthread_mutex_unlock(&e->lock);
    return err;
}

static void close_step(attn_engine *e, attn_engine_step *s) {
    if (s->handle) {
        e->ops->leave(e, s);
        s->handle = 0;
    }
}

void attn_engine_step_close(void *state, uint64_t step) {
    attn_engine *e = state;
    pthread_mutex_lock(&e->lock);
    attn_engine_step *s = find_step(e, step);
    if (s) {
        close_step(e, s);
    }
    pthread_mutex_unlock(&e->lock);
}

attnd_err attn_engine_abandon(void *state, attnd_errinfo *info) {
    attn_engine *e = state;
    pthread_mutex_lock(&e->lock);
    for (attn_engine_step *s = e->steps; s; s = s->next) {
        close_step(e, s);
    }
    attnd_err err = settle(e, info);
    pthread_mutex_unlock(&e->lock);
    return err;
}

// ---- attend

static attnd_err check_args(const attn_engine_step *s, const attnd_attend_args *a,
                            attnd_errinfo *info) {
    const attn_model *m = s->model->attn;
    if (a->model != s->model->number) {
        return attnd_fail(info, ATTND_EINVAL, "model", "the step is of model %u", s->model->number);
    }
    if (a->layer >= m->num_layers) {
        return attnd_fail(info, ATTND_EINVAL, "layer", "the model has %u layers", m->num_layers);
    }
    if (a->rows != s->rows || a->new_rows != s->new_rows) {
        return attnd_fail(info, ATTND_EINVAL, a->rows != s->rows ? "rows" : "new_rows",
                          "%u rows, %u new: the step has %u and %u", a->rows, a->new_rows, s->rows,
                          s->new_rows);
    }
    uint32_t from = m->layers[a->layer].kv_layer;
    if (from != a->layer && !is_attended(s, from)) {
        return attnd_fail(info, ATTND_EINVAL, "layer",
                          "layer %u reads layer %u, which must be attended first", a->layer, from);
    }
    bool appends = s->new_rows > 0 && from == a->layer;
    if (appends != (a->k != NULL) || appends != (a->v != NULL)) {
        return attnd_fail(info, ATTND_EINVAL, appends != (a->k != NULL) ? "k" : "v",
                          "%u new tokens are to be appended to layer %u", appends ? s->new_rows : 0,
                          a->layer);
    }
    return ATTND_OK;
}

static void set_stride(int64_t out[2], uint32_t token, uint32_t head, uint32_t heads,
                       uint32_t dim) {
    out[0] = token ? token : (int64_t)heads * dim;
    out[1] = head ? head : dim;
}

static attn_tensors tensors_of(const attn_model *m, const attnd_attend_args *a) {
    attn_tensors t = {
        .q = a->q, .k = a->k, .v = a->v, .out = a->out, .lse = a->lse, .rows = a->rows};
    set_stride(t.q_stride, a->q_stride_token, a->q_stride_head, m->q_heads, m->head_dim);
    set_stride(t.k_stride, a->k_stride_token, a->k_stride_head, m->kv_heads, m->head_dim);
    set_stride(t.v_stride, a->v_stride_token, a->v_stride_head, m->kv_heads, m->v_head_dim);
    return t;
}

// seen returns where launches see a place in memory.
static const void *seen(const attn_engine_memory *m, const void *host) {
    return host ? m->device + ((const uint8_t *)host - m->host) : NULL;
}

// seen_float: the model's arrays lie in attn->floats as in the memory.
static const float *seen_float(const attn_engine_model *m, const float *array) {
    return array ? (const float *)(const void *)m->floats.device + (array - m->attn->floats) : NULL;
}

// fill_rows writes the rows of a launch; *rope is the layer's, as launches see it.
static uint32_t fill_rows(attn_engine *e, const attn_engine_step *s, const attnd_attend_args *a,
                          attn_rope *rope) {
    const attn_model *m = s->model->attn;
    const attn_layer *layer = &m->layers[a->layer];
    attn_tensors t = tensors_of(m, a);
    attn_row common = {.q_len = 0};
    attn_layer_fill(m, a->layer, &common);
    common.flags |= a->partial ? ATTN_PARTIAL : 0;
    common.sinks = seen_float(s->model, layer->sinks);
    common.alibi_slopes = seen_float(s->model, layer->alibi);
    common.k_scale = seen_float(s->model, layer->k_scale);
    common.v_scale = seen_float(s->model, layer->v_scale);
    *rope = layer->rope;
    rope->inv_freq = seen_float(s->model, rope->inv_freq);
    common.rope = common.rope ? rope : NULL;
    uint32_t num = 0;
    for (uint32_t i = 0; i < s->num_seqs; i++) {
        if (s->seqs[i].rows == 0) {
            continue;
        }
        attn_row *row = &e->rows[num++];
        *row = common;
        attn_seq_fill(&s->seqs[i], &m->shape, &t, row);
        row->table = seen(&s->memory, s->tables[i * ATTN_MODEL_GROUPS + layer->group]);
        row->q_positions = seen(&s->memory, row->q_positions);
        row->k_positions = seen(&s->memory, row->k_positions);
        row->tree_mask = seen(&s->memory, row->tree_mask);
        row->block_mask = a->block_mask ? &e->masks[i] : NULL;
    }
    return num;
}

static attnd_err make_rows(attn_engine *e, uint32_t num, attnd_errinfo *info) {
    if (num > e->max_rows) {
        attn_row *rows = realloc(e->rows, num * sizeof(*rows));
        if (!rows) {
            return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for rows");
        }
        e->rows = rows;
        attn_block_mask *masks = realloc(e->masks, num * sizeof(*masks));
        if (!masks) {
            return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for masks");
        }
        e->masks = masks;
        e->max_rows = num;
    }
    return ATTND_OK;
}

// show_mask copies the lists of a mask, once its part of each row was checked, to where launches
// see them.
static attnd_err show_mask(attn_engine *e, attn_engine_step *s, const attnd_attend_args *a,
                           const attn_params *p, attnd_errinfo *info) {
    const attnd_block_mask *mask = a->block_mask;
    const size_t starts = (size_t)mask->num_query_blocks + 1;
    const size_t listed = mask->start[mask->num_query_blocks];
    attn_engine_memory m;
    attnd_err err = ATTND_OK;
    for (uint32_t i = 0; i < p->num_rows && !err; i++) {
        err = attn_check_mask(&p->shape, &p->rows[i], i, info);
    }
    if (!err) {
        err = e->ops->lists(e, s, a, (starts + listed) * sizeof(uint32_t), &m, info);
    }
    if (err) {
        return err;
    }
    uint32_t *host = (uint32_t *)(void *)m.host;
    const uint32_t *device = (const uint32_t *)(const void *)m.device;
    memcpy(host, mask->start, starts * sizeof(*host));
    if (listed > 0) {
        memcpy(host + starts, mask->kv_blocks, listed * sizeof(*host));
    }
    for (uint32_t i = 0; i < s->num_seqs; i++) {
        e->masks[i].start = device + (e->masks[i].start - mask->start);
        e->masks[i].kv_blocks = device + starts;
    }
    return ATTND_OK;
}

attnd_err attn_engine_params(attn_engine *e, attn_engine_step *s, const attnd_attend_args *args,
                             attn_params *out, attn_rope *rope, attnd_errinfo *info) {
    const attnd_block_mask *mask = args->block_mask;
    attnd_err err = check_args(s, args, info);
    if (!err) {
        err = make_rows(e, s->num_seqs, info);
    }
    if (!err && mask) {
        err = attn_mask_cut(s->seqs, s->num_seqs, mask->q_block, mask->num_query_blocks,
                            mask->start, mask->kv_blocks, e->masks, info);
    }
    if (err) {
        return err;
    }
    *out = (attn_params){.shape = s->model->attn->shape,
                         .pool = e->pool,
                         .pool_bytes = e->pool_bytes,
                         .num_blocks = e->pool_bytes / ATTN_MODEL_BLOCK_UNIT,
                         .rows = e->rows,
                         .deterministic = e->deterministic};
    out->num_rows = fill_rows(e, s, args, rope);
    return mask && e->ops->lists ? show_mask(e, s, args, out, info) : ATTND_OK;
}

void attn_engine_mark(attn_engine_step *s, uint32_t layer) {
    s->attended[layer / 64] |= 1ull << (layer % 64);
}

static attnd_err attend(attn_engine *e, const attnd_attend_args *a, attn_choice *choice,
                        attnd_errinfo *info) {
    attn_engine_step *s = find_step(e, a->step);
    if (!s) {
        return attnd_fail(info, ATTND_ESTALE, "step", "the step is not open");
    }
    attn_rope rope;
    attn_params p;
    attnd_err err = attn_engine_params(e, s, a, &p, &rope, info);
    if (!err && p.num_rows > 0) {
        err = e->ops->run(e, s, &p, a, choice, info);
    }
    if (!err && !s->captures) {
        attn_engine_mark(s, a->layer);
    }
    return err;
}

attnd_err attn_engine_replay(void *state, uint64_t captured, uint64_t step, void *stream,
                             attnd_errinfo *info) {
    attn_engine *e = state;
    pthread_mutex_lock(&e->lock);
    attn_engine_step *s = find_step(e, step);
    attnd_err err = s ? e->ops->replay(e, captured, s, stream, info)
                      : attnd_fail(info, ATTND_ESTALE, "step", "the step is not open");
    pthread_mutex_unlock(&e->lock);
    return err;
}

attnd_err attn_engine_attend(void *state, const attnd_attend_args *args, attnd_ran *ran,
                             attnd_errinfo *info) {
    attn_engine *e = state;
    attn_choice choice = {.kernel = "none", .why = "no rows"};
    uint64_t from_us = attnd_clock_us();
    pthread_mutex_lock(&e->lock);
    uint64_t start_us = attnd_clock_us();
    attnd_err err = attend(e, args, &choice, info);
    pthread_mutex_unlock(&e->lock);
    if (!err && ran) {
        *ran = (attnd_ran){.splits = choice.splits,
                           .batch_rows = choice.rows,
                           .queue_us = (uint32_t)(start_us - from_us),
                           .run_us = (uint32_t)(attnd_clock_us() - start_us)};
        snprintf(ran->kernel, sizeof(ran->kernel), "%s", choice.kernel);
        snprintf(ran->why, sizeof(ran->why), "%s", choice.why);
    }
    return err;
}
