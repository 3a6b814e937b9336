// The test's model runtime and its float64 check.
#include "tests/e2e/play.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static uint64_t seed = 0x9e3779b97f4a7c15u;

static float random_float(void) { // in [-1, 1)
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (float)((double)(seed >> 40) / (1 << 23) - 1);
}

// ---- models

static play_model make(const char *name, uint32_t layers) {
    play_model m = {.name = name,
                    .layers = layers,
                    .q_heads = 4,
                    .kv_heads = 2,
                    .head_dim = 32,
                    .v_head_dim = 32,
                    .block_tokens = 16,
                    .num_inv_freq = 16};
    for (uint32_t i = 0; i < m.num_inv_freq; i++) {
        m.inv_freq[i] = powf(10000, -(float)i / 16);
    }
    for (uint32_t i = 0; i < PLAY_MAX_LAYERS; i++) {
        m.layer[i] = (play_layer){.window_left = -1, .window_right = -1, .kv_layer = i};
    }
    return m;
}

play_model play_tiny(void) {
    return make("tiny", 2);
}

play_model play_one(void) {
    return make("one", 1);
}

void play_hello(e2e_client *c, const char *name) {
    char json[128];
    snprintf(json, sizeof(json), "{\"client\": \"%s\"}", name);
    free(e2e_json(c, PROTO_HELLO, json));
}

void play_open(e2e_client *c, play_model *m) {
    char json[4096], *p = json, *end = json + sizeof(json);
    p += snprintf(p, (size_t)(end - p),
                  "{\"name\": \"%s\", \"digest\": \"%064x\", \"dtype\": \"f32\", \"layers\": %u, "
                  "\"q_heads\": %u, \"kv_heads\": %u, \"head_dim\": %u, \"v_head_dim\": %u, "
                  "\"block_tokens\": %u, \"causal\": %s, \"layer_overrides\": [",
                  m->name, 7, m->layers, m->q_heads, m->kv_heads, m->head_dim, m->v_head_dim,
                  m->block_tokens, m->not_causal ? "false" : "true");
    for (uint32_t i = 0; i < m->layers; i++) {
        const play_layer *l = &m->layer[i];
        p += snprintf(p, (size_t)(end - p),
                      "%s{\"layer\": %u, \"window\": [%d, %d], \"softcap\": %.9g, \"scale\": %.9g",
                      i ? ", " : "", i, l->window_left, l->window_right, (double)l->softcap,
                      (double)l->scale);
        p += l->kv_layer == i ? snprintf(p, (size_t)(end - p), "}")
                              : snprintf(p, (size_t)(end - p), ", \"kv_layer\": %u}", l->kv_layer);
    }
    p += snprintf(p, (size_t)(end - p), "]");
    for (uint32_t i = 0; i < m->num_inv_freq; i++) {
        p += snprintf(p, (size_t)(end - p), "%s%.9g", i ? ", " : ", \"rope\": {\"inv_freq\": [",
                      (double)m->inv_freq[i]);
    }
    snprintf(p, (size_t)(end - p), "%s", m->num_inv_freq ? "]}}" : "}");
    char *reply = e2e_json(c, PROTO_MODEL_OPEN, json);
    m->id = (uint32_t)e2e_number(reply, "model");
    free(reply);
}

// ---- sequences

static size_t mirror_floats(const play_model *m) {
    return (size_t)m->kv_heads * PLAY_MAX_TOKENS * (m->head_dim + m->v_head_dim);
}

// Mirrors are kept here too, so that a test need not free them for the leak checker's sake.
static float *mirrors[1 << 12];
static uint32_t num_mirrors;

static void make_mirror(play_seq *s, const play_model *m) {
    s->model = m;
    for (uint32_t l = 0; l < m->layers; l++) {
        s->mirror[l] = calloc(mirror_floats(m), sizeof(float));
        ck_assert_ptr_nonnull(s->mirror[l]);
        mirrors[num_mirrors++ % (1 << 12)] = s->mirror[l];
    }
}

void play_create(e2e_client *c, const play_model *m, play_seq *s) {
    proto_model body = {.model = m->id};
    e2e_reply r;
    memset(s, 0, sizeof(*s));
    ATTND_CK_OK(e2e_call(c, PROTO_SEQ_CREATE, &body, sizeof(body), &r));
    memcpy(&s->handle, r.body, sizeof(s->handle));
    e2e_reply_fini(&r);
    make_mirror(s, m);
}

void play_fork(e2e_client *c, const play_seq *s, play_seq *forked) {
    proto_seq body = {.seq = s->handle}, out;
    e2e_reply r;
    memset(forked, 0, sizeof(*forked));
    ATTND_CK_OK(e2e_call(c, PROTO_SEQ_FORK, &body, sizeof(body), &r));
    ck_assert_uint_eq(r.body_bytes, sizeof(out));
    memcpy(&out, r.body, sizeof(out));
    e2e_reply_fini(&r);
    ck_assert_uint_eq(out.len, s->len);
    forked->handle = out.seq;
    forked->len = s->len;
    make_mirror(forked, s->model);
    for (uint32_t l = 0; l < s->model->layers; l++) {
        memcpy(forked->mirror[l], s->mirror[l], mirror_floats(s->model) * sizeof(float));
    }
}

void play_forget(play_seq *s) {
    for (uint32_t l = 0; s->model && l < s->model->layers; l++) {
        free(s->mirror[l]);
    }
    memset(s, 0, sizeof(*s));
}

void play_free(e2e_client *c, play_seq *s) {
    proto_seq body = {.seq = s->handle};
    ATTND_CK_OK(e2e_call(c, PROTO_SEQ_FREE, &body, sizeof(body), NULL));
    play_forget(s);
}

// ---- steps

uint32_t play_rows(const play_part *p) {
    return p->new_len ? p->new_len - p->cached : p->q_len;
}

void play_step_body(e2e_buf *b, uint64_t id, const play_model *m, const play_part *parts,
                    uint32_t num, uint32_t deadline_ms) {
    proto_step head = {.model = m->id, .num_seqs = num, .deadline_ms = deadline_ms};
    e2e_buf_init(b, PROTO_STEP, id, &head, sizeof(head));
    size_t first = b->bytes - PROTO_BODY;
    proto_step_seq none = {.seq = 0};
    for (uint32_t i = 0; i < num; i++) {
        e2e_buf_add(b, &none, sizeof(none));
    }
    for (uint32_t i = 0; i < num; i++) {
        const play_part *p = &parts[i];
        uint32_t rows = play_rows(p);
        proto_step_seq seq = {
            .seq = p->seq->handle, .new_len = p->new_len, .q_len = p->q_len, .reserve = p->reserve};
        if (p->positions) {
            seq.positions_off = e2e_buf_add(b, p->positions, rows * sizeof(int32_t));
        }
        if (p->tokens) {
            seq.tokens_off = e2e_buf_add(b, p->tokens, p->new_len * sizeof(uint32_t));
        }
        if (p->tree) {
            seq.tree_off = e2e_buf_add(b, p->tree, rows * ((rows + 63) / 64) * sizeof(uint64_t));
        }
        e2e_buf_set(b, first + i * sizeof(seq), &seq, sizeof(seq));
    }
    e2e_buf_seal(b);
}

// take_prefix makes rows of another sequence's mirror the next ones of a mirror.
static void take_prefix(const play_part *p) {
    const play_model *m = p->seq->model;
    size_t v_off = (size_t)m->kv_heads * PLAY_MAX_TOKENS * m->head_dim;
    for (uint32_t i = 0; p->cached && i < m->layers * m->kv_heads; i++) {
        uint32_t layer = i / m->kv_heads, head = i % m->kv_heads;
        size_t row = (size_t)head * PLAY_MAX_TOKENS + p->seq->len;
        float *to = p->seq->mirror[layer];
        const float *from = p->prefix->mirror[layer];
        memcpy(to + row * m->head_dim, from + row * m->head_dim,
               p->cached * m->head_dim * sizeof(float));
        memcpy(to + v_off + row * m->v_head_dim, from + v_off + row * m->v_head_dim,
               p->cached * m->v_head_dim * sizeof(float));
    }
}

attnd_err play_step_open(e2e_client *c, const play_model *m, const play_part *parts, uint32_t num,
                         uint32_t deadline_ms, play_step *s, e2e_reply *r) {
    e2e_buf b;
    e2e_reply mine;
    proto_step_reply head;
    play_step_body(&b, ++c->id, m, parts, num, deadline_ms);
    attnd_err err = e2e_call_raw(c, b.data, b.bytes, &mine);
    memset(s, 0, sizeof(*s));
    s->model = m;
    s->num = num;
    for (uint32_t i = 0; i < num; i++) {
        s->parts[i] = parts[i];
    }
    if (!err) {
        ck_assert_uint_eq(mine.body_bytes, sizeof(head) + num * sizeof(proto_step_len));
        memcpy(&head, mine.body, sizeof(head));
        ck_assert_uint_eq(head.num_seqs, num);
        s->handle = head.step;
        for (uint32_t i = 0; i < num; i++) {
            proto_step_len len;
            memcpy(&len, mine.body + sizeof(head) + i * sizeof(len), sizeof(len));
            ck_assert_uint_eq(len.committed, parts[i].seq->len);
            ck_assert(len.cached == 0 || (parts[i].tokens && len.cached < parts[i].new_len));
            s->parts[i].cached = len.cached;
            take_prefix(&s->parts[i]);
        }
    }
    for (uint32_t i = 0; i < num; i++) {
        s->rows += play_rows(&s->parts[i]);
        s->new_rows += s->parts[i].new_len - s->parts[i].cached;
    }
    e2e_buf_fini(&b);
    if (r) {
        *r = mine;
    } else {
        e2e_reply_fini(&mine);
    }
    return err;
}

// ---- attend

static float *random_floats(size_t num) {
    float *x = malloc((num + 1) * sizeof(*x));
    ck_assert_ptr_nonnull(x);
    for (size_t i = 0; i < num; i++) {
        x[i] = random_float();
    }
    return x;
}

play_tensors play_random(const play_step *s) {
    const play_model *m = s->model;
    return (play_tensors){
        .q = random_floats((size_t)s->rows * m->q_heads * m->head_dim),
        .k = random_floats((size_t)s->new_rows * m->kv_heads * m->head_dim),
        .v = random_floats((size_t)s->new_rows * m->kv_heads * m->v_head_dim),
    };
}

void play_tensors_fini(play_tensors *t) {
    free(t->q);
    free(t->k);
    free(t->v);
}

// add_tensors adds q, k and v behind a body that has been written.
static void add_tensors(e2e_buf *b, const play_step *s, uint32_t layer, const play_tensors *t,
                        proto_tensor *q, proto_tensor *k, proto_tensor *v) {
    const play_model *m = s->model;
    if (s->rows) {
        q->off = e2e_buf_add(b, t->q, (size_t)s->rows * m->q_heads * m->head_dim * sizeof(float));
    }
    if (s->new_rows && m->layer[layer].kv_layer == layer) {
        size_t heads = (size_t)s->new_rows * m->kv_heads;
        k->off = e2e_buf_add(b, t->k, heads * m->head_dim * sizeof(float));
        v->off = e2e_buf_add(b, t->v, heads * m->v_head_dim * sizeof(float));
    }
}

static uint32_t add_mask(e2e_buf *b, const play_mask *mask) {
    proto_block_mask head = {mask->q_block, mask->num};
    uint32_t num_blocks = mask->start[mask->num];
    size_t words = 2 + mask->num + 1 + num_blocks;
    uint32_t *all = malloc(words * sizeof(*all));
    ck_assert_ptr_nonnull(all);
    memcpy(all, &head, sizeof(head));
    memcpy(all + 2, mask->start, (mask->num + 1) * sizeof(*all));
    memcpy(all + 2 + mask->num + 1, mask->kv_blocks, num_blocks * sizeof(*all));
    uint32_t off = e2e_buf_add(b, all, words * sizeof(*all));
    free(all);
    return off;
}

void play_attend_body(e2e_buf *b, uint64_t id, const play_step *s, uint32_t layer, uint32_t flags,
                      const play_tensors *t) {
    proto_attend body = {.step = s->handle, .layer = layer, .flags = flags};
    e2e_buf_init(b, PROTO_ATTEND, id, &body, sizeof(body));
    add_tensors(b, s, layer, t, &body.q, &body.k, &body.v);
    if (s->mask) {
        body.block_mask_off = add_mask(b, s->mask);
    }
    e2e_buf_set(b, 0, &body, sizeof(body));
    e2e_buf_seal(b);
}

// mirror_shape is that of a mirror as one block; or, masked, of blocks of the model's tokens, which
// then are table entries one behind the other.
static attn_shape mirror_shape(const play_model *m, bool masked) {
    attn_shape shape = {
        .q_dtype = ATTND_F32,
        .kv_dtype = ATTND_F32,
        .q_heads = (int32_t)m->q_heads,
        .kv_heads = (int32_t)m->kv_heads,
        .head_dim = (int32_t)m->head_dim,
        .v_head_dim = (int32_t)m->v_head_dim,
        .block_tokens = PLAY_MAX_TOKENS,
        .stride_k_token = m->head_dim,
        .stride_k_head = (int64_t)PLAY_MAX_TOKENS * m->head_dim,
        .stride_v_token = m->v_head_dim,
        .stride_v_head = (int64_t)PLAY_MAX_TOKENS * m->v_head_dim,
        .block_stride = mirror_floats(m) * sizeof(float),
    };
    if (masked) {
        ck_assert_uint_eq(m->head_dim, m->v_head_dim);
        shape.block_tokens = (int32_t)m->block_tokens;
        shape.block_stride = (uint64_t)m->block_tokens * m->head_dim * sizeof(float);
    }
    return shape;
}

// mask_of returns where the query blocks of a part begin.
static attn_block_mask mask_of(const play_step *s, uint32_t part) {
    uint32_t first = 0, rows = play_rows(&s->parts[part]), q_block = s->mask->q_block;
    for (uint32_t i = 0; i < part; i++) {
        uint32_t before = play_rows(&s->parts[i]);
        first += before ? (before - 1) / q_block + 1 : 0;
    }
    q_block = q_block < rows ? q_block : rows;
    return (attn_block_mask){s->mask->start + first, s->mask->kv_blocks, (int32_t)q_block};
}

static void reference(const play_step *s, uint32_t layer, uint32_t part, const float *q,
                      const float *k, const float *v, double *out, double *lse) {
    static uint32_t table[PLAY_MAX_TOKENS];
    for (uint32_t i = 0; i < PLAY_MAX_TOKENS; i++) {
        table[i] = i;
    }
    const play_model *m = s->model;
    attn_block_mask mask = {.q_block = 0};
    if (s->mask) {
        mask = mask_of(s, part);
    }
    const play_part *p = &s->parts[part];
    const play_layer *l = &m->layer[layer];
    bool own = l->kv_layer == layer;
    const int32_t *positions = p->positions ? p->positions + p->cached : NULL;
    attn_rope rope = {m->inv_freq, 1, (int32_t)(2 * m->num_inv_freq), false};
    attn_row row = {
        .q = q,
        .out = out, // not written
        .k_new = own ? k : NULL,
        .v_new = own ? v : NULL,
        .table = table,
        .stride_q_token = (int64_t)m->q_heads * m->head_dim,
        .stride_q_head = m->head_dim,
        .stride_out_token = (int64_t)m->q_heads * m->v_head_dim,
        .stride_out_head = m->v_head_dim,
        .stride_k_new_token = (int64_t)m->kv_heads * m->head_dim,
        .stride_k_new_head = m->head_dim,
        .stride_v_new_token = (int64_t)m->kv_heads * m->v_head_dim,
        .stride_v_new_head = m->v_head_dim,
        .v_offset = (uint64_t)m->kv_heads * PLAY_MAX_TOKENS * m->head_dim * sizeof(float),
        .kv_len = (int32_t)(p->seq->len + p->new_len),
        .q_len = (int32_t)play_rows(p),
        .q_count = (int32_t)play_rows(p),
        .new_len = own ? (int32_t)(p->new_len - p->cached) : 0,
        .flags = m->not_causal ? 0 : ATTN_CAUSAL,
        .scale = l->scale,
        .softcap = l->softcap,
        .window_left = l->window_left,
        .window_right = l->window_right,
        .rope = m->num_inv_freq ? &rope : NULL,
        .q_positions = positions,
        .k_positions = own && p->new_len ? positions : NULL,
        .tree_mask = p->tree,
        .block_mask = s->mask ? &mask : NULL,
    };
    attn_params params = {.shape = mirror_shape(m, s->mask != NULL),
                          .pool = p->seq->mirror[l->kv_layer],
                          .pool_bytes = mirror_floats(m) * sizeof(float),
                          .num_blocks = s->mask ? PLAY_MAX_TOKENS / m->block_tokens : 1,
                          .rows = &row,
                          .num_rows = 1};
    attnd_errinfo info = {.text = ""};
    ck_assert_msg(attn_check(&params, &info) == ATTND_OK, "%s", info.text);
    ATTND_CK_OK(attn_reference(&params, out, lse));
}

static void compare(const float *got, const double *want, size_t num, const char *what) {
    double largest = 0;
    for (size_t i = 0; i < num; i++) {
        largest = fmax(largest, isfinite(want[i]) ? fabs(want[i]) : 0);
    }
    for (size_t i = 0; i < num; i++) {
        bool same = isinf(want[i]) ? (double)got[i] == want[i]
                                   : fabs((double)got[i] - want[i]) <= 2e-5 * fmax(largest, 0.1);
        if (!same) { // an assertion of Check is a system call
            ck_abort_msg("%s [%zu] is %g, the reference has %g", what, i, (double)got[i], want[i]);
        }
    }
}

void play_check(const play_step *s, uint32_t layer, const play_tensors *t, const e2e_reply *r) {
    const play_model *m = s->model;
    proto_attend_reply head;
    ck_assert_uint_ge(r->body_bytes, sizeof(head));
    memcpy(&head, r->body, sizeof(head));
    ck_assert_uint_eq(head.rows, s->rows);
    ck_assert_uint_eq(head.out_off % 8, 0);
    size_t out_row = (size_t)m->q_heads * m->v_head_dim, row = 0, new_row = 0;
    ck_assert_uint_le(head.out_off + s->rows * out_row * sizeof(float), r->bytes);
    for (uint32_t i = 0; i < s->num; i++) {
        size_t rows = play_rows(&s->parts[i]);
        double *out = calloc(rows * out_row + 1, sizeof(*out));
        double *lse = calloc(rows * m->q_heads + 1, sizeof(*lse));
        reference(s, layer, i, t->q + row * m->q_heads * m->head_dim,
                  t->k + new_row * m->kv_heads * m->head_dim,
                  t->v + new_row * m->kv_heads * m->v_head_dim, out, lse);
        const uint8_t *got = r->msg + head.out_off + row * out_row * sizeof(float);
        compare((const float *)(const void *)got, out, rows * out_row, "out");
        for (uint32_t h = 0; head.lse_off && h < m->q_heads; h++) {
            got = r->msg + head.lse_off + (h * s->rows + row) * sizeof(float);
            compare((const float *)(const void *)got, lse + h * rows, rows, "lse");
        }
        free(out);
        free(lse);
        row += rows;
        new_row += s->parts[i].new_len - s->parts[i].cached;
    }
}

void play_attend(e2e_client *c, const play_step *s, uint32_t layer) {
    e2e_buf b;
    e2e_reply r;
    play_tensors t = play_random(s);
    play_attend_body(&b, ++c->id, s, layer, PROTO_ATTEND_LSE, &t);
    attnd_err err = e2e_call_raw(c, b.data, b.bytes, &r);
    ck_assert_msg(err == ATTND_OK, "attend of layer %u: %s: %s", layer, attnd_errname(err),
                  r.error.text);
    play_check(s, layer, &t, &r);
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
}

// ---- commit

void play_commit_body(e2e_buf *b, uint64_t id, const play_step *s, const uint32_t *accepted) {
    proto_commit head = {.step = s->handle, .num_seqs = s->num};
    e2e_buf_init(b, PROTO_COMMIT, id, &head, sizeof(head));
    for (uint32_t i = 0; i < s->num; i++) {
        proto_commit_seq seq = {.accepted = accepted ? accepted[i] : s->parts[i].new_len};
        e2e_buf_add(b, &seq, sizeof(seq));
    }
    e2e_buf_seal(b);
}

attnd_err play_commit(e2e_client *c, play_step *s, const uint32_t *accepted, e2e_reply *r) {
    e2e_buf b;
    e2e_reply mine;
    play_commit_body(&b, ++c->id, s, accepted);
    attnd_err err = e2e_call_raw(c, b.data, b.bytes, &mine);
    if (!err) {
        proto_lens head;
        ck_assert_uint_eq(mine.body_bytes, sizeof(head) + s->num * sizeof(uint32_t));
        for (uint32_t i = 0; i < s->num; i++) {
            uint32_t len;
            memcpy(&len, mine.body + sizeof(head) + i * sizeof(len), sizeof(len));
            s->parts[i].seq->len += accepted ? accepted[i] : s->parts[i].new_len;
            ck_assert_uint_eq(len, s->parts[i].seq->len);
        }
    }
    e2e_buf_fini(&b);
    if (r) {
        *r = mine;
    } else {
        e2e_reply_fini(&mine);
    }
    return err;
}

void play_token(e2e_client *c, play_seq *const *seqs, uint32_t num, uint32_t new_len) {
    play_part parts[PLAY_MAX_SEQS];
    play_step s;
    memset(parts, 0, sizeof(parts));
    for (uint32_t i = 0; i < num; i++) {
        parts[i].seq = seqs[i];
        parts[i].new_len = new_len;
    }
    ATTND_CK_OK(play_step_open(c, seqs[0]->model, parts, num, 60000, &s, NULL));
    for (uint32_t l = 0; l < s.model->layers; l++) {
        play_attend(c, &s, l);
    }
    ATTND_CK_OK(play_commit(c, &s, NULL, NULL));
}

uint32_t play_prompt(e2e_client *c, play_seq *s, const play_seq *prefix, const uint32_t *tokens,
                     uint32_t num) {
    const play_part part = {.seq = s, .new_len = num, .tokens = tokens, .prefix = prefix};
    play_step step;
    ATTND_CK_OK(play_step_open(c, s->model, &part, 1, 60000, &step, NULL));
    for (uint32_t l = 0; l < s->model->layers; l++) {
        play_attend(c, &step, l);
    }
    ATTND_CK_OK(play_commit(c, &step, NULL, NULL));
    return step.parts[0].cached;
}

void play_free_there(e2e_client *c, const play_seq *s) {
    const proto_seq body = {.seq = s->handle};
    ATTND_CK_OK(e2e_call(c, PROTO_SEQ_FREE, &body, sizeof(body), NULL));
}

void play_attend1_body(e2e_buf *b, uint32_t op, uint64_t id, const play_step *s,
                       uint32_t deadline_ms, const play_tensors *t) {
    proto_attend1 body = {.model = s->model->id,
                          .num_seqs = s->num,
                          .deadline_ms = deadline_ms,
                          .flags = PROTO_ATTEND_LSE};
    e2e_buf_init(b, op, id, &body, sizeof(body));
    size_t first = b->bytes - PROTO_BODY;
    proto_attend1_seq none = {.seq = 0};
    for (uint32_t i = 0; i < s->num; i++) {
        e2e_buf_add(b, &none, sizeof(none));
    }
    for (uint32_t i = 0; i < s->num; i++) {
        const play_part *p = &s->parts[i];
        proto_attend1_seq seq = {.seq = p->seq->handle, .new_len = p->new_len, .q_len = p->q_len};
        if (p->positions) {
            seq.positions_off = e2e_buf_add(b, p->positions, play_rows(p) * sizeof(int32_t));
        }
        e2e_buf_set(b, first + i * sizeof(seq), &seq, sizeof(seq));
    }
    add_tensors(b, s, 0, t, &body.q, &body.k, &body.v);
    e2e_buf_set(b, 0, &body, sizeof(body));
    e2e_buf_seal(b);
}
