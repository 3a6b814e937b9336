// Filling a device's buffer with the rows of a launch.
//
// A part that turns out not to fit leaves the stage as it was: what was written behind in_bytes is
// overwritten by the next.  Pointers of the device's rows are made so that an index counts as in
// the launch's row: where a part begins with query token n, q points n tokens before what was
// copied.
#include "server/srv_stage.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGN = 256 }; // of everything in the buffer: whole lines for the device

attnd_err srv_stage_init(srv_stage *s, const attn_device_buffer *buffer, uint32_t max_rows) {
    *s = (srv_stage){.buffer = buffer, .max_rows = max_rows};
    s->rows = calloc(max_rows, sizeof(*s->rows));
    s->ropes = calloc(max_rows, sizeof(*s->ropes));
    s->masks = calloc(max_rows, sizeof(*s->masks));
    s->hosts = calloc(max_rows, sizeof(*s->hosts));
    if (!s->rows || !s->ropes || !s->masks || !s->hosts) {
        srv_stage_fini(s);
        return ATTND_ENOMEM;
    }
    return ATTND_OK;
}

void srv_stage_fini(srv_stage *s) {
    free(s->rows);
    free(s->ropes);
    free(s->masks);
    free(s->hosts);
    *s = (srv_stage){.max_rows = 0};
}

// ---- room

static uint64_t aligned(uint64_t bytes) {
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

// take_in returns room for inputs on the host side, NULL when there is none.
static uint8_t *take_in(srv_stage *s, uint64_t bytes, uint64_t *off) {
    uint64_t room = s->buffer->bytes - s->in_bytes - s->out_bytes;
    if (aligned(bytes) > room) {
        return NULL;
    }
    *off = s->in_bytes;
    s->in_bytes += aligned(bytes);
    return s->buffer->host + *off;
}

static bool take_out(srv_stage *s, uint64_t bytes, uint64_t *off) {
    uint64_t room = s->buffer->bytes - s->in_bytes - s->out_bytes;
    if (aligned(bytes) > room) {
        return false;
    }
    s->out_bytes += aligned(bytes);
    *off = s->buffer->bytes - s->out_bytes;
    return true;
}

// before returns the device address of element 0 of an array whose element `first` lies at off.
static void *before(const srv_stage *s, uint64_t off, int64_t first, uint64_t elem_bytes) {
    return (void *)((uintptr_t)(s->buffer->device + off) - (uintptr_t)first * elem_bytes);
}

// ---- tensors

// tensor is tokens [first, first + num) of [.., heads, dim].
typedef struct tensor {
    const void *data;
    int64_t stride_token, stride_head; // elements
    int32_t first, num;
    uint32_t heads, dim, elem_bytes;
    bool on_device;
} tensor;

static bool on_device(const attn_row *row) {
    return (row->flags & SRV_STAGE_ON_DEVICE) != 0;
}

static uint64_t token_bytes(const tensor *t) {
    return (uint64_t)t->heads * t->dim * t->elem_bytes;
}

static void pack(uint8_t *out, const tensor *t) {
    const uint8_t *in = t->data;
    uint64_t head_bytes = (uint64_t)t->dim * t->elem_bytes;
    for (int64_t i = t->first; i < t->first + t->num; i++) {
        const uint8_t *token = in + i * t->stride_token * t->elem_bytes;
        if (t->stride_head == t->dim) {
            memcpy(out, token, token_bytes(t));
        } else {
            for (int64_t h = 0; h < t->heads; h++) {
                memcpy(out + (uint64_t)h * head_bytes, token + h * t->stride_head * t->elem_bytes,
                       head_bytes);
            }
        }
        out += token_bytes(t);
    }
}

// put packs a tensor; *at is where the device finds its token 0.  What lies there stays there.
static bool put(srv_stage *s, const tensor *t, const void **at, int64_t *stride_token,
                int64_t *stride_head) {
    uint64_t off;
    if (t->on_device) {
        *at = t->data;
        *stride_token = t->stride_token;
        *stride_head = t->stride_head;
        return true;
    }
    uint8_t *out = take_in(s, (uint64_t)t->num * token_bytes(t), &off);
    if (!out) {
        return false;
    }
    pack(out, t);
    *at = before(s, off, t->first, token_bytes(t));
    *stride_token = (int64_t)t->heads * t->dim;
    *stride_head = t->dim;
    return true;
}

// put_words copies elements [first, first + num) of an array.
static bool put_words(srv_stage *s, const void *array, int64_t first, int64_t num,
                      uint64_t elem_bytes, const void **at) {
    uint64_t off;
    uint8_t *out = take_in(s, (uint64_t)num * elem_bytes, &off);
    if (!out) {
        return false;
    }
    memcpy(out, (const uint8_t *)array + (uint64_t)first * elem_bytes, (uint64_t)num * elem_bytes);
    *at = before(s, off, first, elem_bytes);
    return true;
}

// put_shared copies an array of a layer, unless it was the last of its kind.
static bool put_shared(srv_stage *s, const float **array, int32_t num, const float **last,
                       uint64_t *last_off) {
    if (!*array) {
        return true;
    }
    if (*array != *last) {
        const void *at;
        uint64_t off = s->in_bytes;
        if (!put_words(s, *array, 0, num, sizeof(float), &at)) {
            return false;
        }
        *last = *array;
        *last_off = off;
    }
    *array = (const float *)(const void *)(s->buffer->device + *last_off);
    return true;
}

// ---- rows

// part is what of a row a filling takes.
typedef struct part {
    int32_t new_first, new_num; // of the row's new tokens
    int32_t q_first, q_count;
} part;

// take_outputs makes room for out and lse.
static bool take_outputs(srv_stage *s, const attn_row *row, const part *p, attn_row *r,
                         srv_stage_row *host) {
    const attn_shape *shape = s->shape;
    uint32_t elem = attnd_dtype_bytes(shape->q_dtype);
    const int64_t out_token = (int64_t)shape->q_heads * shape->v_head_dim;
    uint64_t out_bytes = (uint64_t)p->q_count * (uint64_t)out_token * elem;
    if (!take_out(s, out_bytes, &host->out_off)) {
        return false;
    }
    r->out = before(s, host->out_off, p->q_first, (uint64_t)out_token * elem);
    r->stride_out_token = out_token;
    r->stride_out_head = shape->v_head_dim;
    if (row->lse) {
        uint64_t lse_bytes = (uint64_t)shape->q_heads * (uint64_t)row->q_len * sizeof(float);
        if (!take_out(s, lse_bytes, &host->lse_off)) {
            return false;
        }
        r->lse = (float *)(void *)(s->buffer->device + host->lse_off);
        r->stride_lse_head = row->q_len;
    }
    return true;
}

static bool put_queries(srv_stage *s, const attn_row *row, const part *p, attn_row *r,
                        srv_stage_row *host) {
    const attn_shape *shape = s->shape;
    uint32_t elem = attnd_dtype_bytes(shape->q_dtype);
    const tensor q = {
        row->q,        row->stride_q_token,      row->stride_q_head,        p->q_first,
        p->q_count,    (uint32_t)shape->q_heads, (uint32_t)shape->head_dim, elem,
        on_device(row)};
    if (p->q_count == 0) {
        r->q = r->out = NULL;
        r->lse = NULL;
        r->q_positions = NULL;
        return true;
    }
    if (!put(s, &q, &r->q, &r->stride_q_token, &r->stride_q_head) ||
        (!on_device(row) && !take_outputs(s, row, p, r, host))) {
        return false;
    }
    return !row->q_positions || put_words(s, row->q_positions, p->q_first, p->q_count,
                                          sizeof(int32_t), (const void **)&r->q_positions);
}

static bool put_new(srv_stage *s, const attn_row *row, const part *p, attn_row *r) {
    const attn_shape *shape = s->shape;
    uint32_t elem = attnd_dtype_bytes(shape->q_dtype);
    uint32_t heads = (uint32_t)shape->kv_heads;
    r->new_len = p->new_num;
    r->kv_len = row->kv_len - row->new_len + p->new_first + p->new_num;
    r->k_new = r->v_new = NULL;
    if (p->new_num == 0) {
        r->k_positions = NULL;
        return true;
    }
    // The device's row has new tokens of its own: its first is new_first here.
    const tensor k = {(const uint8_t *)row->k_new + p->new_first * row->stride_k_new_token * elem,
                      row->stride_k_new_token,
                      row->stride_k_new_head,
                      0,
                      p->new_num,
                      heads,
                      (uint32_t)shape->head_dim,
                      elem,
                      on_device(row)};
    const tensor v = {(const uint8_t *)row->v_new + p->new_first * row->stride_v_new_token * elem,
                      row->stride_v_new_token,
                      row->stride_v_new_head,
                      0,
                      p->new_num,
                      heads,
                      (uint32_t)shape->v_head_dim,
                      elem,
                      on_device(row)};
    return put(s, &k, &r->k_new, &r->stride_k_new_token, &r->stride_k_new_head) &&
           put(s, &v, &r->v_new, &r->stride_v_new_token, &r->stride_v_new_head) &&
           (!row->k_positions || put_words(s, row->k_positions + p->new_first, 0, p->new_num,
                                           sizeof(int32_t), (const void **)&r->k_positions));
}

static bool put_mask(srv_stage *s, const attn_row *row, attn_row *r) {
    int64_t entries = ((int64_t)r->kv_len + s->shape->block_tokens - 1) / s->shape->block_tokens;
    int64_t words = (int64_t)row->q_len * ((row->q_len + 63) / 64);
    return put_words(s, row->table, 0, entries, sizeof(uint32_t), (const void **)&r->table) &&
           (!row->tree_mask ||
            put_words(s, row->tree_mask, 0, words, sizeof(uint64_t), (const void **)&r->tree_mask));
}

static bool put_block_mask(srv_stage *s, const attn_row *row, attn_row *r) {
    const attn_block_mask *mask = row->block_mask;
    attn_block_mask *m = &s->masks[s->num_rows];
    if (!mask || r->q_count == 0) { // the lists may go beyond the part's kv_len
        r->block_mask = NULL;
        return true;
    }
    *m = *mask;
    r->block_mask = m;
    int64_t num = ((int64_t)row->q_len + mask->q_block - 1) / mask->q_block;
    int64_t first = mask->start[0]; // behind the lists of sequences before
    return put_words(s, mask->start, 0, num + 1, sizeof(uint32_t), (const void **)&m->start) &&
           put_words(s, mask->kv_blocks, first, mask->start[num] - first, sizeof(uint32_t),
                     (const void **)&m->kv_blocks);
}

static bool put_layer(srv_stage *s, const attn_row *row, attn_row *r) {
    const attn_shape *shape = s->shape;
    attn_rope *rope = &s->ropes[s->num_rows];
    if (row->rope) {
        *rope = *row->rope;
        r->rope = rope;
        if (!put_shared(s, &rope->inv_freq, rope->rotary_dim / 2, &s->inv_freq, &s->inv_freq_off)) {
            return false;
        }
    }
    return put_shared(s, &r->sinks, shape->q_heads, &s->sinks, &s->sinks_off) &&
           put_shared(s, &r->alibi_slopes, shape->q_heads, &s->alibi_slopes, &s->alibi_off) &&
           put_shared(s, &r->k_scale, shape->kv_heads, &s->k_scale, &s->k_scale_off) &&
           put_shared(s, &r->v_scale, shape->kv_heads, &s->v_scale, &s->v_scale_off);
}

// add takes a part of a row, or leaves the stage as it was.
static bool add(srv_stage *s, const attn_row *row, const part *p) {
    const srv_stage saved = *s;
    attn_row *r = &s->rows[s->num_rows];
    srv_stage_row *host = &s->hosts[s->num_rows];
    *r = *row;
    r->flags &= ~SRV_STAGE_ON_DEVICE;
    *host = (srv_stage_row){.row = row, .q_first = p->q_first, .q_count = p->q_count};
    r->q_first = p->q_first;
    r->q_count = p->q_count;
    if (!put_new(s, row, p, r) || !put_queries(s, row, p, r, host) || !put_mask(s, row, r) ||
        !put_block_mask(s, row, r) || !put_layer(s, row, r)) {
        *s = saved;
        return false;
    }
    s->num_rows++;
    return true;
}

// ---- fillings

static bool take_part(srv_stage *s, const attn_row *row, const part *p, srv_stage_cursor *at) {
    if (!add(s, row, p)) {
        return false;
    }
    at->appended += p->new_num;
    at->queries += p->q_count;
    if (at->appended == row->new_len && at->queries == row->q_count) {
        *at = (srv_stage_cursor){.row = at->row + 1};
    }
    return true;
}

// cut takes as much of a row as fits an empty stage: new tokens first, without queries, since no
// row may see what another one of its launch appends.
static bool cut(srv_stage *s, const attn_row *row, part p, srv_stage_cursor *at) {
    int32_t *num = p.new_num > 0 ? &p.new_num : &p.q_count;
    if (p.new_num > 0) {
        p.q_count = 0;
    } else {
        p.q_count /= 2;
    }
    while (*num > 0 && !take_part(s, row, &p, at)) {
        *num /= 2;
    }
    return *num > 0;
}

static void reset(srv_stage *s, const attn_shape *shape) {
    s->shape = shape;
    s->num_rows = 0;
    s->in_bytes = s->out_bytes = 0;
    s->sinks = s->alibi_slopes = s->k_scale = s->v_scale = s->inv_freq = NULL;
}

bool srv_stage_fill(srv_stage *s, const attn_params *launch, srv_stage_cursor *at,
                    const srv_stage_limits *limits) {
    uint32_t max_rows = limits->rows < s->max_rows ? limits->rows : s->max_rows;
    reset(s, &launch->shape);
    while (at->row < launch->num_rows && s->num_rows < max_rows) {
        const attn_row *row = &launch->rows[at->row];
        uint32_t before_row = at->row;
        part p = {.new_first = at->appended,
                  .new_num = row->new_len - at->appended,
                  .q_first = row->q_first + at->queries,
                  .q_count = row->q_count - at->queries};
        p.q_count = p.q_count < limits->queries ? p.q_count : limits->queries;
        if (!take_part(s, row, &p, at)) {
            return s->num_rows > 0 || cut(s, row, p, at);
        }
        if (at->row == before_row) { // the rest of the row sees what this part appends
            break;
        }
    }
    return true;
}

bool srv_stage_halve(const srv_stage *s, srv_stage_limits *limits) {
    if (s->num_rows > 1) {
        limits->rows = s->num_rows / 2;
        return true;
    }
    if (s->num_rows == 1 && s->rows[0].q_count > 1) {
        limits->queries = s->rows[0].q_count / 2;
        return true;
    }
    return false;
}

attn_params srv_stage_params(const srv_stage *s, const attn_params *launch) {
    attn_params p = *launch;
    p.rows = s->rows;
    p.num_rows = s->num_rows;
    return p;
}

// ---- outputs

static void spread_out(const srv_stage *s, const srv_stage_row *host) {
    const attn_shape *shape = s->shape;
    const attn_row *row = host->row;
    uint32_t elem = attnd_dtype_bytes(shape->q_dtype);
    uint64_t head_bytes = (uint64_t)shape->v_head_dim * elem;
    const uint8_t *in = s->buffer->host + host->out_off;
    for (int64_t t = host->q_first; t < host->q_first + host->q_count; t++) {
        uint8_t *token = (uint8_t *)row->out + t * row->stride_out_token * elem;
        for (int64_t h = 0; h < shape->q_heads; h++) {
            memcpy(token + h * row->stride_out_head * elem, in, head_bytes);
            in += head_bytes;
        }
    }
}

static void spread_lse(const srv_stage *s, const srv_stage_row *host) {
    const attn_row *row = host->row;
    const float *in = (const float *)(const void *)(s->buffer->host + host->lse_off);
    for (int64_t h = 0; h < s->shape->q_heads; h++) {
        memcpy(row->lse + h * row->stride_lse_head + host->q_first,
               in + h * row->q_len + host->q_first, (uint64_t)host->q_count * sizeof(float));
    }
}

void srv_stage_spread(const srv_stage *s) {
    for (uint32_t i = 0; i < s->num_rows; i++) {
        const srv_stage_row *host = &s->hosts[i];
        if (host->q_count == 0 || on_device(host->row)) {
            continue;
        }
        spread_out(s, host);
        if (host->row->lse) {
            spread_lse(s, host);
        }
    }
}
