// Sequences are arrays of float K and V per layer.  A step appends at once in attend and is undone
// by cancel; there is one step at a time, as attn-bench has.
#include "tests/load/fake_attnd.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SEQS = 256, MAX_LEN = 4096, MAX_LAYERS = 4 };

typedef struct fake_seq {
    bool used;
    bool left; // freed, but its rows are there until the place is needed
    uint32_t len;
    uint32_t known;                       // of len, tokens whose ids were given
    uint32_t *tokens;                     // [MAX_LEN]
    float *k[MAX_LAYERS], *v[MAX_LAYERS]; // [MAX_LEN, kv_heads, dim]
} fake_seq;

struct attnd_client {
    attnd_model_opts model;
    int32_t window[MAX_LAYERS];
    fake_seq seqs[MAX_SEQS];
    attnd_step_seq step[MAX_SEQS]; // tokens: not borrowed beyond step_open
    uint32_t step_seqs;            // 0 = no step is open
    uint32_t attended;             // layers of the open step
};

fake_attnd fake;

void fake_reset(void) {
    fake = (fake_attnd){.limits = {.message_bytes = 64 << 20,
                                   .in_flight = 64,
                                   .step_seqs = MAX_SEQS,
                                   .step_rows = 65536,
                                   .sequences = MAX_SEQS}};
}

// fault decides what happens to a call.
static attnd_err fault(attnd_errinfo *info) {
    fake.calls++;
    if (fake.on_call != NULL) {
        fake.on_call();
    }
    bool fails = fake.fail_call != 0 &&
                 (fake.fails_on ? fake.calls >= fake.fail_call : fake.calls == fake.fail_call);
    if (fails) {
        return attnd_fail(info, fake.fail_code, "fake", "call %u fails on purpose", fake.calls);
    }
    if (fake.busy_every != 0 && fake.calls % fake.busy_every == 0) {
        return attnd_fail(info, ATTND_EBUSY, "fake", "busy on purpose");
    }
    return ATTND_OK;
}

attnd_err attnd_connect(attnd_client **out, const char *url, const attnd_connect_opts *opts,
                        attnd_errinfo *info) {
    (void)opts;
    if (strcmp(url, "ipc://nowhere") == 0) {
        return attnd_fail(info, ATTND_ECONN, "url", "nobody listens there");
    }
    *out = calloc(1, sizeof(**out));
    fake.open = true;
    return ATTND_OK;
}

static void drop_rows(const attnd_client *c, fake_seq *s) {
    for (uint32_t l = 0; l < c->model.layers; l++) {
        free(s->k[l]);
        free(s->v[l]);
    }
    free(s->tokens);
    *s = (fake_seq){0};
}

static void free_seq(attnd_client *c, fake_seq *s) {
    fake.tokens -= s->len;
    fake.live--;
    s->used = false;
    s->left = fake.has_prefix_cache;
    if (!s->left) {
        drop_rows(c, s);
    }
}

void attnd_close(attnd_client *c) {
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        if (c->seqs[i].used) {
            free_seq(c, &c->seqs[i]);
        }
        if (c->seqs[i].left) {
            drop_rows(c, &c->seqs[i]);
        }
    }
    free(c);
    fake.open = false;
}

const attnd_limits *attnd_get_limits(const attnd_client *c) {
    (void)c;
    return &fake.limits;
}

attnd_err attnd_model_open(attnd_client *c, const attnd_model_opts *opts, uint32_t *model,
                           attnd_errinfo *info) {
    attnd_err err = fault(info);
    c->model = *opts;
    for (uint32_t l = 0; l < opts->layers; l++) {
        c->window[l] = opts->per_layer[l].window_left;
    }
    *model = 7;
    return err;
}

attnd_err attnd_seq_create(attnd_client *c, uint32_t model, uint64_t *seq, attnd_errinfo *info) {
    attnd_err err = model == 7 ? fault(info) : ATTND_ENOENT;
    for (uint32_t i = 0; i < MAX_SEQS && err == ATTND_OK; i++) {
        fake_seq *s = &c->seqs[i];
        if (s->used) {
            continue;
        }
        if (s->left && i + 1 < MAX_SEQS) {
            continue;
        }
        drop_rows(c, s);
        s->used = true;
        s->tokens = calloc(MAX_LEN, sizeof(*s->tokens));
        for (uint32_t l = 0; l < c->model.layers; l++) {
            s->k[l] =
                calloc((size_t)MAX_LEN * c->model.kv_heads * c->model.head_dim, sizeof(float));
            s->v[l] =
                calloc((size_t)MAX_LEN * c->model.kv_heads * c->model.v_head_dim, sizeof(float));
        }
        *seq = i + 1;
        fake.creates++;
        fake.live++;
        fake.max_live = fake.live > fake.max_live ? fake.live : fake.max_live;
        return ATTND_OK;
    }
    return err != ATTND_OK ? err : ATTND_EBUSY;
}

static fake_seq *find(attnd_client *c, uint64_t seq) {
    return seq >= 1 && seq <= MAX_SEQS && c->seqs[seq - 1].used ? &c->seqs[seq - 1] : NULL;
}

attnd_err attnd_seq_free(attnd_client *c, uint64_t seq, attnd_errinfo *info) {
    attnd_err err = fault(info);
    fake_seq *s = find(c, seq);
    if (err != ATTND_OK || s == NULL) {
        return err != ATTND_OK ? err : ATTND_ESTALE;
    }
    fake.frees++;
    free_seq(c, s);
    return ATTND_OK;
}

// find_cached copies the rows of the first ones of the tokens, all but the last, that another
// sequence has behind the same tokens.
static uint32_t find_cached(const attnd_client *c, fake_seq *s, const attnd_step_seq *in) {
    const attnd_model_opts *m = &c->model;
    uint32_t most = 0;
    const fake_seq *from = NULL;
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        const fake_seq *o = &c->seqs[i];
        uint32_t n = 0, at = s->len;
        bool same = o != s && (o->used || o->left) && o->known > at && s->known == at &&
                    memcmp(o->tokens, s->tokens, at * sizeof(*o->tokens)) == 0;
        while (same && n + 1 < in->new_len && at + n < o->known &&
               o->tokens[at + n] == in->tokens[n]) {
            n++;
        }
        if (n > most) {
            most = n;
            from = o;
        }
    }
    for (uint32_t l = 0; l < m->layers && from != NULL; l++) {
        uint64_t k = (uint64_t)m->kv_heads * m->head_dim, v = (uint64_t)m->kv_heads * m->v_head_dim;
        memcpy(s->k[l] + s->len * k, from->k[l] + s->len * k, most * k * sizeof(float));
        memcpy(s->v[l] + s->len * v, from->v[l] + s->len * v, most * v * sizeof(float));
        s->v[l][s->len * v] += fake.spoils_cached ? 1 : 0;
    }
    return most;
}

attnd_err attnd_step_open(attnd_client *c, uint32_t model, attnd_step_seq *seqs, uint32_t num_seqs,
                          const attnd_step_opts *opts, uint64_t *step, attnd_errinfo *info) {
    (void)opts;
    uint32_t rows = 0;
    attnd_err err = fault(info);
    if (err != ATTND_OK || model != 7 || c->step_seqs != 0) {
        return err != ATTND_OK ? err : ATTND_EINVAL;
    }
    for (uint32_t i = 0; i < num_seqs; i++) {
        fake_seq *s = find(c, seqs[i].seq);
        if (s == NULL) {
            return attnd_fail(info, ATTND_ESTALE, "seq", "no such sequence");
        }
        seqs[i].committed = s->len;
        seqs[i].cached = 0;
        rows += seqs[i].new_len;
    }
    if (fake.pool_tokens != 0 && fake.tokens + rows > fake.pool_tokens) {
        return attnd_fail(info, ATTND_ENOSPC, "new_len", "pool is full");
    }
    for (uint32_t i = 0; i < num_seqs && fake.has_prefix_cache; i++) {
        fake_seq *s = find(c, seqs[i].seq);
        if (seqs[i].tokens != NULL) {
            seqs[i].cached = find_cached(c, s, &seqs[i]);
            memcpy(s->tokens + s->len, seqs[i].tokens, seqs[i].new_len * sizeof(*s->tokens));
        }
        rows -= seqs[i].cached;
    }
    memcpy(c->step, seqs, num_seqs * sizeof(*seqs));
    for (uint32_t i = 0; i < num_seqs && fake.lies_about_cached; i++) {
        seqs[i].cached = seqs[i].new_len;
    }
    c->step_seqs = num_seqs;
    c->attended = 0;
    fake.max_step_rows = rows > fake.max_step_rows ? rows : fake.max_step_rows;
    fake.max_step_seqs = num_seqs > fake.max_step_seqs ? num_seqs : fake.max_step_seqs;
    *step = 99;
    return ATTND_OK;
}

// attend_head computes one head of the query at position p.
static void attend_head(const attnd_client *c, const fake_seq *s, uint32_t layer, uint32_t p,
                        uint32_t head, const void *q, uint64_t q_at, void *out, uint64_t out_at) {
    const attnd_model_opts *m = &c->model;
    uint32_t kv = head / (m->q_heads / m->kv_heads);
    uint32_t first = c->window[layer] >= 0 && p > (uint32_t)c->window[layer]
                         ? p - (uint32_t)c->window[layer]
                         : 0;
    double sum = 0, acc[256] = {0};
    for (uint32_t j = first; j <= p; j++) {
        const float *k = s->k[layer] + (uint64_t)(j * m->kv_heads + kv) * m->head_dim;
        const float *v = s->v[layer] + (uint64_t)(j * m->kv_heads + kv) * m->v_head_dim;
        double dot = 0;
        for (uint32_t d = 0; d < m->head_dim; d++) {
            dot += attnd_load(q, m->dtype, q_at + d) * (double)k[d];
        }
        double e = exp(dot / sqrt((double)m->head_dim)); // the test's logits are small
        sum += e;
        for (uint32_t d = 0; d < m->v_head_dim; d++) {
            acc[d] += e * (double)v[d];
        }
    }
    for (uint32_t d = 0; d < m->v_head_dim; d++) {
        attnd_store(out, m->dtype, out_at + d, acc[d] / sum);
    }
}

static void spoil(const attnd_client *c, const attnd_attend_args *a) {
    fake.attends++;
    if (fake.attends == fake.spoil_attend) {
        uint64_t last = (uint64_t)a->rows * c->model.q_heads * c->model.v_head_dim - 1;
        double x = attnd_load(a->out, c->model.dtype, last);
        attnd_store(a->out, c->model.dtype, last, fake.spoil_with_nan ? NAN : x + 0.01);
    }
}

attnd_err attnd_attend(attnd_client *c, const attnd_attend_args *a, attnd_ran *ran,
                       attnd_errinfo *info) {
    attnd_err err = fault(info);
    const attnd_model_opts *m = &c->model;
    if (err != ATTND_OK || a->step != 99 || c->step_seqs == 0) {
        return err != ATTND_OK ? err : ATTND_ESTALE;
    }
    uint64_t row = 0;
    for (uint32_t i = 0; i < c->step_seqs; i++) {
        fake_seq *s = find(c, c->step[i].seq);
        uint32_t k_elems = m->kv_heads * m->head_dim, v_elems = m->kv_heads * m->v_head_dim;
        for (uint32_t t = c->step[i].cached; t < c->step[i].new_len; t++, row++) {
            uint32_t p = s->len + t;
            for (uint32_t d = 0; d < k_elems; d++) {
                s->k[a->layer][p * k_elems + d] =
                    (float)attnd_load(a->k, m->dtype, row * k_elems + d);
            }
            for (uint32_t d = 0; d < v_elems; d++) {
                s->v[a->layer][p * v_elems + d] =
                    (float)attnd_load(a->v, m->dtype, row * v_elems + d);
            }
            for (uint32_t h = 0; h < m->q_heads; h++) {
                uint64_t at = row * m->q_heads + h;
                attend_head(c, s, a->layer, p, h, a->q, at * m->head_dim, a->out,
                            at * m->v_head_dim);
            }
        }
    }
    c->attended++;
    spoil(c, a);
    *ran = (attnd_ran){.kernel = "fake_f64", .why = "a test", .splits = 1, .batch_rows = a->rows};
    return row == a->rows && row == a->new_rows ? ATTND_OK : ATTND_EINVAL;
}

attnd_err attnd_step_commit(attnd_client *c, uint64_t step, const attnd_accept *accept,
                            uint32_t num_seqs, uint32_t *lens, attnd_errinfo *info) {
    attnd_err err = fault(info);
    if (err != ATTND_OK || step != 99 || num_seqs != c->step_seqs ||
        c->attended != c->model.layers) {
        return err != ATTND_OK ? err : ATTND_EINVAL;
    }
    for (uint32_t i = 0; i < num_seqs; i++) {
        fake_seq *s = find(c, c->step[i].seq);
        s->known += c->step[i].tokens != NULL && s->known == s->len ? accept[i].accepted : 0;
        s->len += accept[i].accepted;
        fake.tokens += accept[i].accepted;
        lens[i] = s->len + fake.lies_about_lengths;
    }
    c->step_seqs = 0;
    return ATTND_OK;
}

attnd_err attnd_step_cancel(attnd_client *c, uint64_t step, attnd_errinfo *info) {
    (void)step;
    (void)info;
    c->step_seqs = 0;
    return ATTND_OK;
}
