// The random client of kill_storm.
//
// Every function that talks to the daemon returns its attnd_err; whoever made the change in flight
// has written it to s->doubt before, so that settle can ask what became of it.
#include "tests/faults/storm_client.h"

#include <cjson/cJSON.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/proto_json.h"

enum {
    LAYERS = 2, // the second with a window: a layer group of its own
    DIM = 64,
    WINDOW = 20,
    BLOCK = 16,
    SEQS = 6,
    MAX_LEN = 80,
    MAX_NEW = 40,
    CHUNK = 12,      // most new tokens of a step
    PROMPTS = 4,     // that sequences begin with again and again
    MIN_PROMPT = 18, // tokens, to MAX_NEW
    STEP_SEQS = 3,
    MAX_ROWS = SEQS * MAX_LEN,
    CALLS_OF_AN_OP = 4,
};

#define SCORE_SCALE 16.0f

typedef struct seq {
    uint64_t handle; // 0 = none
    uint32_t len;
    uint32_t tokens[MAX_LEN];
} seq;

// change is what a call in flight does to a sequence.
typedef struct change {
    uint32_t seq, num;
    uint32_t tokens[MAX_NEW]; // appended, as accepted
    uint32_t path[MAX_NEW];   // of a tree
} change;

typedef enum doubt_kind { NOTHING, COMMIT, CREATE, FORK, TRUNCATE, FREE } doubt_kind;

typedef struct doubt {
    doubt_kind kind;
    uint32_t seq, other, len; // FORK: to other; TRUNCATE: to len
    uint64_t step;            // COMMIT
    uint32_t num;             // changes
    attnd_accept accept[STEP_SEQS];
    change changes[STEP_SEQS];
} doubt;

struct storm_client {
    attnd_client *client;
    attnd_errinfo info;
    uint32_t model;
    uint64_t rng;
    uint32_t next_token, prompts; // the first token of each
    seq seqs[SEQS];
    doubt doubt;
    storm_counts counts;
    atomic_ulong *progress;
    char *why;                                                          // [256], "" = all is right
    uint16_t q[MAX_ROWS * DIM], v[MAX_ROWS * DIM], out[MAX_ROWS * DIM]; // k is q
    uint32_t row_tokens[MAX_ROWS];
};

static uint32_t below(storm_client *s, uint32_t limit) {
    s->rng ^= s->rng << 13;
    s->rng ^= s->rng >> 7;
    s->rng ^= s->rng << 17;
    return (uint32_t)((s->rng >> 32) * limit >> 32);
}

// wrong notes the first thing that is wrong.
static attnd_err __attribute__((format(printf, 2, 3)))
wrong(storm_client *s, const char *fmt, ...) {
    if (!s->why[0]) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(s->why, 256, fmt, args);
        va_end(args);
    }
    return ATTND_EINVAL;
}

// checked returns the error of a call; one that says nothing of a lost daemon is wrong.
static attnd_err checked(storm_client *s, const char *call, attnd_err err) {
    bool gone = err == ATTND_ECONN || err == ATTND_EPROTO || err == ATTND_ESHUTDOWN;
    if (err && !gone) {
        wrong(s, "%s: %s %s %s", call, attnd_errname(err), s->info.field, s->info.text);
    }
    return err;
}

// announce is called straight before a call that changes something, for the killer to aim at.
static void announce(storm_client *s) {
    atomic_fetch_add(s->progress, 1);
}

static void made(storm_client *s) {
    s->doubt.kind = NOTHING;
    s->counts.calls++;
}

// ---- tokens

static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static uint64_t word_of(uint32_t token, uint32_t layer, uint32_t i) {
    return mix(((uint64_t)token << 16 | layer << 8 | i) * UINT64_C(0x9e3779b97f4a7c15));
}

// put_key writes the signs of a token, put_value its values: finite, of any sign and mantissa.
static void put_key(uint16_t *to, uint32_t token, uint32_t layer) {
    uint64_t signs = word_of(token, layer, 255);
    for (uint32_t i = 0; i < DIM; i++) {
        to[i] = signs >> i & 1 ? 0xbf80 : 0x3f80; // -1 or 1 in bf16
    }
}

static void put_value(uint16_t *to, uint32_t token, uint32_t layer) {
    for (uint32_t i = 0; i < DIM; i++) {
        uint64_t bits = word_of(token, layer, i);
        to[i] = (uint16_t)((bits & 0x807f) | (120 + (bits >> 20) % 10) << 7);
    }
}

// attend attends all layers of a step with s->row_tokens [rows], and looks at what comes out.
static attnd_err attend(storm_client *s, uint64_t step, uint32_t rows, bool new) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t i = 0; i < rows; i++) {
            put_key(s->q + i * DIM, s->row_tokens[i], layer);
            put_value(s->v + i * DIM, s->row_tokens[i], layer);
        }
        attnd_attend_args args = {.step = step,
                                  .model = s->model,
                                  .layer = layer,
                                  .rows = rows,
                                  .new_rows = new ? rows : 0,
                                  .q = s->q,
                                  .k = new ? s->q : NULL,
                                  .v = new ? s->v : NULL,
                                  .out = s->out};
        attnd_err err = checked(s, "attend", attnd_attend(s->client, &args, NULL, &s->info));
        if (err) {
            return err;
        }
        for (uint32_t i = 0; i < rows; i++) {
            if (memcmp(s->out + i * DIM, s->v + i * DIM, DIM * sizeof(*s->v)) != 0) {
                return wrong(s, "row %u of %u, token %u, layer %u: another value", i, rows,
                             s->row_tokens[i], layer);
            }
        }
        s->counts.rows += rows;
    }
    return ATTND_OK;
}

// look reads every token of every sequence, in one step.
static attnd_err look(storm_client *s) {
    attnd_step_seq in[SEQS];
    uint32_t num = 0, rows = 0;
    uint64_t step;
    for (uint32_t i = 0; i < SEQS; i++) {
        const seq *q = &s->seqs[i];
        if (q->handle && q->len) {
            in[num++] = (attnd_step_seq){.seq = q->handle, .q_len = q->len};
            memcpy(s->row_tokens + rows, q->tokens, q->len * sizeof(q->tokens[0]));
            rows += q->len;
        }
    }
    if (num == 0) {
        return ATTND_OK;
    }
    attnd_err err = attnd_step_open(s->client, s->model, in, num, NULL, &step, &s->info);
    err = checked(s, "step", err);
    err = err ? err : attend(s, step, rows, false);
    err = err ? err : checked(s, "cancel", attnd_step_cancel(s->client, step, &s->info));
    s->counts.seqs += err ? 0 : num;
    return err;
}

// ---- what was in flight

static void apply(storm_client *s, const doubt *d) {
    for (uint32_t i = 0; i < d->num; i++) {
        const change *c = &d->changes[i];
        seq *q = &s->seqs[c->seq];
        memcpy(q->tokens + q->len, c->tokens, c->num * sizeof(c->tokens[0]));
        q->len += c->num;
    }
}

// ask_commit has the commit in doubt answered.
static attnd_err ask_commit(storm_client *s) {
    doubt *d = &s->doubt;
    s->counts.repeated++;
    attnd_err err = attnd_step_commit(s->client, d->step, d->accept, d->num, NULL, &s->info);
    if (!err) {
        apply(s, d);
    }
    if (!err || err == ATTND_ESTALE) {
        *(err ? &s->counts.unmade : &s->counts.made) += 1;
        d->kind = NOTHING;
        return ATTND_OK;
    }
    return checked(s, "commit again", err);
}

// take_listed compares a sequence that the daemon lists with the model; what it cannot say more of
// is in doubt.
static attnd_err take_listed(storm_client *s, uint64_t handle, uint32_t len) {
    doubt *d = &s->doubt;
    for (uint32_t i = 0; i < SEQS; i++) {
        seq *q = &s->seqs[i];
        if (q->handle != handle) {
            continue;
        }
        if (d->kind == TRUNCATE && d->seq == i && len == d->len) {
            q->len = len;
        }
        return q->len == len ? ATTND_OK
                             : wrong(s, "sequence %u has %u tokens, not %u", i, len, q->len);
    }
    uint32_t want = d->kind == FORK ? s->seqs[d->seq].len : 0;
    seq *q = &s->seqs[d->other];
    if ((d->kind != CREATE && d->kind != FORK) || q->handle || len != want) {
        return wrong(s, "sequence %llx of %u tokens is nobody's", (unsigned long long)handle, len);
    }
    *q = d->kind == FORK ? s->seqs[d->seq] : (seq){.len = 0};
    q->handle = handle;
    return ATTND_OK;
}

static attnd_err read_list(storm_client *s, const cJSON *list, bool listed[SEQS]) {
    const cJSON *o;
    cJSON_ArrayForEach(o, list) {
        const cJSON *name = cJSON_GetObjectItem(o, "seq");
        uint64_t handle = strtoull(cJSON_GetStringValue(name), NULL, 16);
        uint32_t len = (uint32_t)cJSON_GetNumberValue(cJSON_GetObjectItem(o, "len"));
        if ((uint32_t)cJSON_GetNumberValue(cJSON_GetObjectItem(o, "model")) != s->model) {
            continue; // another client's
        }
        attnd_err err = take_listed(s, handle, len);
        if (err) {
            return err;
        }
        for (uint32_t i = 0; i < SEQS; i++) {
            listed[i] |= s->seqs[i].handle == handle;
        }
    }
    return ATTND_OK;
}

// compare asks for the list of sequences and makes the model what it says, where it may.
static attnd_err compare(storm_client *s) {
    char *json;
    bool listed[SEQS] = {false};
    attnd_err err = attnd_admin(s->client, "seq_list", NULL, &json, &s->info);
    if ((err = checked(s, "seq_list", err))) {
        return err;
    }
    cJSON *doc = cJSON_Parse(json);
    err = read_list(s, cJSON_GetObjectItem(doc, "sequences"), listed);
    cJSON_Delete(doc);
    attnd_free(json);
    for (uint32_t i = 0; i < SEQS && !err; i++) {
        seq *q = &s->seqs[i];
        if (q->handle && !listed[i] && s->doubt.kind == FREE && s->doubt.seq == i) {
            *q = (seq){.handle = 0};
        } else if (q->handle && !listed[i]) {
            err = wrong(s, "sequence %u is lost", i);
        }
    }
    s->doubt.kind = err ? s->doubt.kind : NOTHING;
    return err;
}

static attnd_err check_books(storm_client *s) {
    char *json;
    attnd_err err = attnd_admin(s->client, "stats", NULL, &json, &s->info);
    if ((err = checked(s, "stats", err))) {
        return err;
    }
    if (!strstr(json, "\"accounting_mismatches\":0,")) {
        err = wrong(s, "the accounting of blocks is wrong");
    }
    attnd_free(json);
    return err;
}

// come_back reconnects until it has looked at everything.
static void come_back(storm_client *s) {
    attnd_err err;
    do {
        s->counts.losses++;
        err = checked(s, "reconnect", attnd_reconnect(s->client, &s->info));
        err = err || s->doubt.kind != COMMIT ? err : ask_commit(s);
        err = err ? err : compare(s);
        err = err ? err : look(s);
        err = err ? err : check_books(s);
    } while (err && !s->why[0]);
}

// ---- changes

static int free_slot(const storm_client *s) {
    for (int i = 0; i < SEQS; i++) {
        if (!s->seqs[i].handle) {
            return i;
        }
    }
    return -1;
}

static attnd_err create(storm_client *s, uint32_t to) {
    uint64_t handle;
    s->doubt = (doubt){.kind = CREATE, .other = to};
    announce(s);
    attnd_err err = attnd_seq_create(s->client, s->model, &handle, &s->info);
    if (!(err = checked(s, "create", err))) {
        s->seqs[to] = (seq){.handle = handle};
        made(s);
    }
    return err;
}

static attnd_err fork_to(storm_client *s, uint32_t from, uint32_t to) {
    uint64_t handle;
    uint32_t len;
    s->doubt = (doubt){.kind = FORK, .seq = from, .other = to};
    announce(s);
    attnd_err err = attnd_seq_fork(s->client, s->seqs[from].handle, &handle, &len, &s->info);
    if ((err = checked(s, "fork", err))) {
        return err;
    }
    s->seqs[to] = s->seqs[from];
    s->seqs[to].handle = handle;
    made(s);
    return len == s->seqs[to].len ? ATTND_OK : wrong(s, "a fork has %u tokens", len);
}

static attnd_err truncate_to(storm_client *s, uint32_t i, uint32_t len) {
    s->doubt = (doubt){.kind = TRUNCATE, .seq = i, .len = len};
    announce(s);
    attnd_err err = attnd_seq_truncate(s->client, s->seqs[i].handle, len, &s->info);
    if (!(err = checked(s, "truncate", err))) {
        s->seqs[i].len = len;
        made(s);
    }
    return err;
}

static attnd_err free_seq(storm_client *s, uint32_t i) {
    s->doubt = (doubt){.kind = FREE, .seq = i};
    announce(s);
    attnd_err err = attnd_seq_free(s->client, s->seqs[i].handle, &s->info);
    if (!(err = checked(s, "free", err))) {
        s->seqs[i] = (seq){.handle = 0};
        made(s);
    }
    return err;
}

// ---- steps

// fresh is a step that is made: per sequence its rows' tokens, and what of them is to be accepted.
typedef struct fresh {
    uint64_t step;
    uint32_t num, rows;
    attnd_step_seq in[STEP_SEQS];
    uint32_t tokens[STEP_SEQS][MAX_NEW];
    uint64_t masks[STEP_SEQS][MAX_NEW];
    doubt commit;
} fresh;

// grow_tree hangs every row on an earlier one, or on none, and accepts the way to a random row.
static void grow_tree(storm_client *s, fresh *f, uint32_t n) {
    uint32_t parent[MAX_NEW], way[MAX_NEW], len = 0;
    change *c = &f->commit.changes[f->num];
    for (uint32_t r = 0; r < n; r++) {
        uint32_t up = below(s, r + 1); // r = none
        parent[r] = up;
        f->masks[f->num][r] = UINT64_C(1) << r | (up < r ? f->masks[f->num][up] : 0);
    }
    for (uint32_t r = below(s, n);; r = parent[r]) {
        way[len++] = r;
        if (parent[r] == r) {
            break;
        }
    }
    c->num = len;
    for (uint32_t i = 0; i < len; i++) {
        c->path[i] = way[len - 1 - i];
        c->tokens[i] = f->tokens[f->num][c->path[i]];
    }
    f->in[f->num].tree_mask = f->masks[f->num];
    f->commit.accept[f->num] = (attnd_accept){.accepted = len, .num_path = len, .path = c->path};
}

// take_prompt begins a sequence as others did; returns how many tokens long.
static uint32_t take_prompt(storm_client *s, uint32_t tokens[MAX_NEW]) {
    uint32_t n = MIN_PROMPT + below(s, MAX_NEW - MIN_PROMPT + 1), prompt = below(s, PROMPTS);
    for (uint32_t r = 0; r < n; r++) {
        tokens[r] = s->prompts + prompt * MAX_NEW + r;
    }
    return n;
}

// plan_seq adds sequence i of len tokens to the step.  A tree's tokens are nobody's prefix.
static void plan_seq(storm_client *s, fresh *f, uint32_t i, uint32_t len) {
    uint32_t *tokens = f->tokens[f->num], n = 0;
    change *c = &f->commit.changes[f->num];
    if (len == 0 && below(s, 2)) {
        n = take_prompt(s, tokens);
    }
    for (uint32_t chunk = n ? n : 1 + below(s, CHUNK); n < chunk; n++) {
        tokens[n] = s->next_token++;
    }
    c->seq = i;
    f->in[f->num] = (attnd_step_seq){.seq = s->seqs[i].handle, .new_len = n};
    if (n <= CHUNK && below(s, 4) == 0) {
        grow_tree(s, f, n);
    } else {
        c->num = below(s, 3) ? n : below(s, n + 1);
        memcpy(c->tokens, tokens, n * sizeof(*tokens));
        f->commit.accept[f->num] = (attnd_accept){.accepted = c->num};
        f->in[f->num].tokens = below(s, 8) ? tokens : NULL;
    }
    f->num++;
}

// settle_rows makes the step's rows what was not found in the prefix cache.
static void settle_rows(storm_client *s, fresh *f) {
    f->rows = 0;
    for (uint32_t i = 0; i < f->num; i++) {
        const attnd_step_seq *in = &f->in[i];
        change *c = &f->commit.changes[i];
        uint32_t num = in->new_len - in->cached;
        memcpy(s->row_tokens + f->rows, f->tokens[i] + in->cached, num * sizeof(*c->tokens));
        f->rows += num;
        s->counts.cached += in->cached;
        if (c->num < in->cached) { // they count, whatever else does
            c->num = f->commit.accept[i].accepted = in->cached;
        }
    }
}

// plan makes a step of one to three sequences that have room, whose lengths are what s->doubt's
// commit makes of them; false when there are none.
static bool plan(storm_client *s, fresh *f) {
    uint32_t first = below(s, SEQS), want = 1 + below(s, STEP_SEQS);
    f->num = 0;
    f->commit = (doubt){.kind = COMMIT};
    for (uint32_t n = 0; n < SEQS && f->num < want; n++) {
        uint32_t i = (first + n) % SEQS, len = s->seqs[i].len;
        for (uint32_t d = 0; s->doubt.kind == COMMIT && d < s->doubt.num; d++) {
            len += s->doubt.changes[d].seq == i ? s->doubt.changes[d].num : 0;
        }
        if (s->seqs[i].handle && len + CHUNK <= MAX_LEN) {
            plan_seq(s, f, i, len);
        }
    }
    f->commit.num = f->num;
    return f->num > 0;
}

// begin opens the step, which carries the commit in doubt, if there is one.
static attnd_err begin(storm_client *s, fresh *f) {
    attnd_step_opts opts = {.deadline_ms = 1000};
    bool carries = s->doubt.kind == COMMIT;
    if (carries) {
        opts.commit_step = s->doubt.step;
        opts.commit_accept = s->doubt.accept;
        opts.num_commit = s->doubt.num;
        announce(s);
    }
    attnd_err err = attnd_step_open(s->client, s->model, f->in, f->num, &opts, &f->step, &s->info);
    if ((err = checked(s, "step", err))) {
        return err;
    }
    if (carries) {
        apply(s, &s->doubt);
        made(s);
    }
    for (uint32_t i = 0; i < f->num; i++) {
        uint32_t want = s->seqs[f->commit.changes[i].seq].len;
        if (f->in[i].committed != want) {
            return wrong(s, "a step begins behind %u tokens, not %u", f->in[i].committed, want);
        }
    }
    settle_rows(s, f);
    return attend(s, f->step, f->rows, true);
}

static attnd_err commit(storm_client *s) {
    doubt *d = &s->doubt;
    uint32_t lens[STEP_SEQS];
    announce(s);
    attnd_err err = attnd_step_commit(s->client, d->step, d->accept, d->num, lens, &s->info);
    if ((err = checked(s, "commit", err))) {
        return err;
    }
    apply(s, d);
    for (uint32_t i = 0; i < d->num; i++) {
        uint32_t want = s->seqs[d->changes[i].seq].len;
        if (lens[i] != want) {
            return wrong(s, "a commit leaves %u tokens, not %u", lens[i], want);
        }
    }
    made(s);
    return ATTND_OK;
}

// append makes a chain of steps, each of which carries the commit of the one before; the last may
// be cancelled.
static attnd_err append(storm_client *s) {
    static _Thread_local fresh f;
    uint32_t steps = 1 + below(s, CALLS_OF_AN_OP);
    s->doubt.kind = NOTHING;
    for (uint32_t i = 0; i < steps && plan(s, &f); i++) {
        attnd_err err = begin(s, &f);
        if (err) {
            return err;
        }
        s->doubt = f.commit;
        s->doubt.step = f.step;
        for (uint32_t n = 0; n < f.num; n++) {
            attnd_accept *a = &s->doubt.accept[n];
            a->path = a->path ? s->doubt.changes[n].path : NULL;
        }
    }
    if (s->doubt.kind == COMMIT && below(s, 8) == 0) {
        s->doubt.kind = NOTHING;
        return checked(s, "cancel", attnd_step_cancel(s->client, f.step, &s->info));
    }
    return s->doubt.kind == COMMIT ? commit(s) : ATTND_OK;
}

// ---- the run

static attnd_err any_call(storm_client *s) {
    uint32_t i = below(s, SEQS), dice = below(s, 100);
    int to = free_slot(s);
    if (!s->seqs[i].handle) {
        return create(s, i);
    }
    if (dice < 60) {
        return append(s);
    }
    if (dice < 75) {
        return to < 0 ? free_seq(s, i) : fork_to(s, i, (uint32_t)to);
    }
    if (dice < 90) {
        return truncate_to(s, i, below(s, s->seqs[i].len + 1));
    }
    return dice < 95 ? look(s) : free_seq(s, i);
}

static bool open_model(storm_client *s, uint32_t index, attnd_errinfo *info) {
    char name[32];
    snprintf(name, sizeof(name), "storm%u", index);
    attnd_layer_opts layers[LAYERS] = {ATTND_LAYER_DEFAULT, ATTND_LAYER_DEFAULT};
    layers[0].scale = layers[1].scale = SCORE_SCALE;
    layers[1].window_left = WINDOW;
    attnd_model_opts opts = {.name = name,
                             .dtype = ATTND_BF16,
                             .kv_dtype = ATTND_BF16,
                             .layers = LAYERS,
                             .q_heads = 1,
                             .kv_heads = 1,
                             .head_dim = DIM,
                             .block_tokens = BLOCK,
                             .all = ATTND_LAYER_DEFAULT,
                             .per_layer = layers};
    return attnd_model_open(s->client, &opts, &s->model, info) == ATTND_OK;
}

storm_client *storm_client_open(const char *url, attnd_transport transport, uint32_t index,
                                uint64_t seed, attnd_errinfo *info) {
    attnd_connect_opts opts = {.transport = transport, .timeout_ms = 20000, .ring_bytes = 4 << 20};
    storm_client *s = calloc(1, sizeof(*s));
    if (!s) {
        attnd_fail(info, ATTND_ENOMEM, "", "no memory for a client");
        return NULL;
    }
    s->rng = mix(seed * 64 + index + 1) | 1;
    s->next_token = index << 28;
    s->prompts = s->next_token + (1 << 27);
    if (attnd_connect(&s->client, url, &opts, info) || !open_model(s, index, info)) {
        storm_client_close(s);
        return NULL;
    }
    return s;
}

bool storm_client_run(storm_client *s, const atomic_bool *stop, atomic_ulong *progress, char *why) {
    s->progress = progress;
    s->why = why;
    while (!atomic_load(stop) && !why[0]) {
        if (any_call(s) && !why[0]) {
            come_back(s);
        }
    }
    for (uint32_t i = 0; i < SEQS && !why[0];) {
        if (!s->seqs[i].handle) {
            i++;
        } else if (free_seq(s, i) && !why[0]) {
            come_back(s);
        }
    }
    return !why[0];
}

const storm_counts *storm_client_counts(const storm_client *s) {
    return &s->counts;
}

void storm_client_close(storm_client *s) {
    attnd_close(s->client);
    free(s);
}
