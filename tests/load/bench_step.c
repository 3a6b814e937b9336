// The order of things: step_open reserves the blocks of all layers, so a full pool is known before
// anything is computed.  Then each sampled row gets a place in a batch of the verifier, and after
// each attend its output is copied there.  A batch that the step has filled is submitted behind the
// commit, when all layers of its rows are there.
//
// Of tokens that the daemon has cached no row is sent, and none comes back.  That they are the
// right ones shows in the rows behind them, which see them.
#include "tests/load/bench_step.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/clock.h"
#include "tests/load/bench_data.h"

typedef struct entry {
    bench_prompt prompt;
    uint32_t first, num; // tokens
    uint32_t cached;     // of them, the first ones
    bench_batch **open;
} entry;

typedef struct sample {
    bench_batch *batch;
    uint32_t slot; // in the batch
    uint32_t row;  // in the step
} sample;

struct bench_step {
    const bench_model *model;
    uint32_t max_seqs, max_rows;
    uint32_t num_seqs, num_rows;
    uint32_t num_cached;  // of the rows; found when the step is opened
    entry *entries;       // [max_seqs]
    attnd_step_seq *seqs; // [max_seqs]
    attnd_accept *accept; // [max_seqs]
    uint32_t *lens;       // [max_seqs]
    uint32_t *tokens;     // [max_rows]
    sample *samples;      // [max_rows]
    bench_batch **full;   // [max_rows], filled by this step
    uint32_t num_samples, num_full;
    uint8_t *q, *k, *v, *out; // [max_rows, heads, dim]
};

bool bench_retry_wait(bench_retry *r, const bench_link *link) {
    uint64_t now = attnd_clock_us();
    if (r->sleep_us == 0) {
        r->since_us = now;
        r->sleep_us = 1000;
    }
    if (*link->stop || now - r->since_us > link->patience_us) {
        return false;
    }
    nanosleep(&(struct timespec){.tv_nsec = r->sleep_us * 1000L}, NULL);
    r->sleep_us = r->sleep_us * 2 < 100000 ? r->sleep_us * 2 : 100000;
    return true;
}

bool bench_retry_again(bench_retry *r, const bench_link *link, attnd_err err) {
    if (err != ATTND_EBUSY || !bench_retry_wait(r, link)) {
        return false;
    }
    link->stats->retries++;
    return true;
}

attnd_err bench_step_create(bench_step **out, const bench_model *m, uint32_t max_seqs,
                            uint32_t max_rows) {
    bench_step *s = calloc(1, sizeof(*s));
    if (s == NULL) {
        return ATTND_ENOMEM;
    }
    uint64_t size = attnd_dtype_bytes(m->dtype), rows = max_rows;
    s->model = m;
    s->max_seqs = max_seqs;
    s->max_rows = max_rows;
    s->entries = calloc(max_seqs, sizeof(*s->entries));
    s->seqs = calloc(max_seqs, sizeof(*s->seqs));
    s->accept = calloc(max_seqs, sizeof(*s->accept));
    s->lens = calloc(max_seqs, sizeof(*s->lens));
    s->tokens = calloc(rows, sizeof(*s->tokens));
    s->samples = calloc(rows, sizeof(*s->samples));
    s->full = calloc(rows, sizeof(bench_batch *));
    s->q = malloc(rows * m->q_heads * m->head_dim * size);
    s->k = malloc(rows * m->kv_heads * m->head_dim * size);
    s->v = malloc(rows * m->kv_heads * m->v_head_dim * size);
    s->out = malloc(rows * bench_model_out_bytes(m));
    if (s->entries == NULL || s->seqs == NULL || s->accept == NULL || s->lens == NULL ||
        s->tokens == NULL || s->samples == NULL || s->full == NULL || s->q == NULL ||
        s->k == NULL || s->v == NULL || s->out == NULL) {
        bench_step_free(s);
        return ATTND_ENOMEM;
    }
    *out = s;
    return ATTND_OK;
}

void bench_step_free(bench_step *s) {
    if (s != NULL) {
        free(s->entries);
        free(s->seqs);
        free(s->accept);
        free(s->lens);
        free(s->tokens);
        free(s->samples);
        free(s->full);
        free(s->q);
        free(s->k);
        free(s->v);
        free(s->out);
        free(s);
    }
}

void bench_step_clear(bench_step *s) {
    s->num_seqs = s->num_rows = s->num_cached = 0;
}

void bench_step_add(bench_step *s, uint64_t seq, const bench_prompt *prompt, uint32_t first,
                    uint32_t num, bench_batch **open) {
    ATTND_ASSERT(num > 0 && s->num_seqs < s->max_seqs && num <= s->max_rows - s->num_rows);
    s->seqs[s->num_seqs] = (attnd_step_seq){.seq = seq, .new_len = num};
    s->accept[s->num_seqs] = (attnd_accept){.accepted = num};
    s->entries[s->num_seqs++] =
        (entry){.prompt = *prompt, .first = first, .num = num, .open = open};
    s->num_rows += num;
}

uint32_t bench_step_rows(const bench_step *s) {
    return s->num_rows;
}

uint32_t bench_step_seqs(const bench_step *s) {
    return s->num_seqs;
}

// place_samples gives every sampled row of the step a place in a batch.
static void place_samples(bench_step *s, const bench_link *link) {
    uint32_t row = 0;
    s->num_samples = s->num_full = 0;
    if (link->verify == NULL) {
        return;
    }
    for (uint32_t i = 0; i < s->num_seqs; i++) {
        const entry *e = &s->entries[i];
        for (uint32_t t = e->cached; t < e->num; t++, row++) {
            if (!bench_sampled(link->seed, e->prompt.request, e->first + t, link->verify_share)) {
                continue;
            }
            if (*e->open == NULL) {
                *e->open = bench_verify_take(link->verify, &e->prompt);
            }
            bench_batch *batch = *e->open;
            batch->positions[batch->num_rows] = e->first + t;
            batch->calls[batch->num_rows] = (bench_call){e->first + e->cached, e->num - e->cached};
            s->samples[s->num_samples++] =
                (sample){.batch = batch, .slot = batch->num_rows++, .row = row};
            if (batch->num_rows == bench_verify_capacity(link->verify)) {
                s->full[s->num_full++] = batch;
                *e->open = NULL;
            }
        }
    }
}

static void end_samples(bench_step *s, const bench_link *link, bool good) {
    for (uint32_t i = 0; i < s->num_full; i++) {
        if (good) {
            bench_verify_submit(link->verify, s->full[i]);
        } else {
            bench_verify_discard(link->verify, s->full[i]);
        }
    }
}

// fill makes q, k and v of all rows of one layer.
static void fill(bench_step *s, const bench_link *link, uint32_t layer) {
    const bench_model *m = s->model;
    uint32_t elems[] = {m->q_heads * m->head_dim, m->kv_heads * m->head_dim,
                        m->kv_heads * m->v_head_dim};
    uint8_t *at[] = {s->q, s->k, s->v};
    uint64_t begin = attnd_clock_us();
    for (uint32_t i = 0; i < s->num_seqs; i++) {
        const entry *e = &s->entries[i];
        for (uint32_t t = e->first + e->cached; t < e->first + e->num; t++) {
            uint64_t origin = bench_prompt_origin(&e->prompt, t);
            for (int tensor = BENCH_Q; tensor <= BENCH_V; tensor++) {
                uint64_t key = bench_row_key(link->seed, origin, layer, (bench_tensor)tensor, t);
                bench_fill(at[tensor], m->dtype, (bench_tensor)tensor, key, 0, elems[tensor]);
                at[tensor] += (uint64_t)elems[tensor] * attnd_dtype_bytes(m->dtype);
            }
        }
    }
    link->stats->fill_us += attnd_clock_us() - begin;
}

static attnd_err attend(bench_step *s, const bench_link *link, uint64_t step, uint32_t layer,
                        attnd_errinfo *info) {
    attnd_attend_args args = {
        .step = step,
        .model = link->model_id,
        .layer = layer,
        .rows = s->num_rows - s->num_cached,
        .new_rows = s->num_rows - s->num_cached,
        .q = s->q,
        .k = s->k,
        .v = s->v,
        .out = s->out,
    };
    attnd_ran ran = {0};
    bench_retry r = {0};
    attnd_err err;
    fill(s, link, layer);
    uint64_t begin = attnd_clock_us();
    do {
        err = attnd_attend(link->client, &args, &ran, info);
    } while (bench_retry_again(&r, link, err));
    if (err != ATTND_OK) {
        bench_stats_error(link->stats, "attend", err, info);
        return err;
    }
    bench_stats_time(link->stats, BENCH_TIME_attend, attnd_clock_us() - begin);
    bench_stats_ran(link->stats, &ran);
    link->stats->layer_calls++;
    uint64_t bytes = bench_model_out_bytes(s->model);
    for (uint32_t i = 0; i < s->num_samples; i++) {
        const sample *p = &s->samples[i];
        memcpy(bench_verify_out(link->verify, p->batch, layer, p->slot), s->out + p->row * bytes,
               bytes);
    }
    return ATTND_OK;
}

// check_len compares the daemon's lengths with the runtime's; a difference ends the run.
static attnd_err check_len(const bench_link *link, const char *what, const entry *e, uint32_t want,
                           uint32_t got, attnd_errinfo *info) {
    if (got == want) {
        return ATTND_OK;
    }
    attnd_err err = attnd_fail(info, ATTND_EPROTO, "committed",
                               "request %" PRIu64 ": daemon says %" PRIu32
                               " tokens are committed, but they are %" PRIu32,
                               e->prompt.request, got, want);
    bench_stats_error(link->stats, what, err, info);
    return err;
}

static attnd_err commit(bench_step *s, const bench_link *link, uint64_t step, attnd_errinfo *info) {
    bench_retry r = {0};
    attnd_err err;
    uint64_t begin = attnd_clock_us();
    do {
        err = attnd_step_commit(link->client, step, s->accept, s->num_seqs, s->lens, info);
    } while (bench_retry_again(&r, link, err));
    if (err != ATTND_OK) {
        bench_stats_error(link->stats, "commit", err, info);
        return err;
    }
    bench_stats_time(link->stats, BENCH_TIME_commit, attnd_clock_us() - begin);
    link->stats->steps++;
    link->stats->rows += (uint64_t)(s->num_rows - s->num_cached) * s->model->layers;
    link->stats->cached_tokens += s->num_cached;
    for (uint32_t i = 0; i < s->num_seqs && err == ATTND_OK; i++) {
        const entry *e = &s->entries[i];
        err = check_len(link, "commit", e, e->first + e->num, s->lens[i], info);
    }
    return err;
}

// give_tokens fills in the ids of all tokens of the step.
static void give_tokens(bench_step *s, const bench_link *link) {
    uint32_t *at = s->tokens;
    for (uint32_t i = 0; i < s->num_seqs; i++) {
        const entry *e = &s->entries[i];
        s->seqs[i].tokens = link->gives_tokens ? at : NULL;
        for (uint32_t t = e->first; t < e->first + e->num && link->gives_tokens; t++) {
            *at++ = bench_token_id(link->seed, bench_prompt_origin(&e->prompt, t), t);
        }
    }
}

// take_cached takes down what the daemon has found; more than it may is an error that ends the run.
static attnd_err take_cached(bench_step *s, const bench_link *link, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    s->num_cached = 0;
    for (uint32_t i = 0; i < s->num_seqs; i++) {
        entry *e = &s->entries[i];
        bool may = s->seqs[i].cached < (link->gives_tokens ? e->num : 1);
        e->cached = may ? s->seqs[i].cached : 0;
        s->num_cached += e->cached;
        if (!may && err == ATTND_OK) {
            err = attnd_fail(info, ATTND_EPROTO, "cached",
                             "request %" PRIu64 ": daemon says %" PRIu32 " of %" PRIu32
                             " tokens are cached",
                             e->prompt.request, s->seqs[i].cached, e->num);
            bench_stats_error(link->stats, "step", err, info);
        }
    }
    return err;
}

static attnd_err open_step(bench_step *s, const bench_link *link, uint64_t *step,
                           attnd_errinfo *info) {
    bench_retry r = {0};
    attnd_err err;
    uint64_t begin = attnd_clock_us();
    do {
        err = attnd_step_open(link->client, link->model_id, s->seqs, s->num_seqs, NULL, step, info);
    } while (bench_retry_again(&r, link, err));
    if (err == ATTND_OK) {
        bench_stats_time(link->stats, BENCH_TIME_step, attnd_clock_us() - begin);
    } else if (err != ATTND_ENOSPC) {
        bench_stats_error(link->stats, "step", err, info);
    }
    return err;
}

attnd_err bench_step_run(bench_step *s, const bench_link *link, attnd_errinfo *info) {
    uint64_t step = 0;
    give_tokens(s, link);
    attnd_err err = open_step(s, link, &step, info);
    if (err != ATTND_OK) {
        return err;
    }
    err = take_cached(s, link, info);
    for (uint32_t i = 0; i < s->num_seqs && err == ATTND_OK; i++) {
        const entry *e = &s->entries[i];
        err = check_len(link, "step", e, e->first, s->seqs[i].committed, info);
    }
    place_samples(s, link);
    for (uint32_t layer = 0; layer < s->model->layers && err == ATTND_OK; layer++) {
        err = attend(s, link, step, layer, info);
    }
    if (err == ATTND_OK) {
        err = commit(s, link, step, info);
    }
    if (err != ATTND_OK) {
        attnd_step_cancel(link->client, step, NULL); // what it was about is in *info
    }
    end_samples(s, link, err == ATTND_OK);
    return err == ATTND_ENOSPC ? ATTND_EINVAL : err; // only an unopened step is out of space
}
