// The runtime's policy; bench_step does the calls.
//
// A sequence knows its prompt and the tokens it has generated so far; `len` of them are in the
// daemon's cache.  While more than that are known, steps feed the rest; the step that feeds the
// last known token generates the next one.  So prefill, decode and the recomputation of a preempted
// sequence are one rule, and a decode is simply a sequence with one token left to feed.
//
// running[] is in the order of admission, so its last member is the youngest.  Preempted sequences
// wait on a stack in front of new requests: the last one pushed is the oldest.
#include "tests/load/bench_run.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/clock.h"
#include "tests/load/bench_data.h"
#include "tests/load/bench_progress.h"
#include "tests/load/bench_step.h"
#include "tests/load/bench_verify.h"

enum {
    STARVED_STEPS = 8,               // without blocks, until the last sequence is preempted too
    MAX_FAILURES = 10,               // in a row
    DEFAULT_BLOCK = 64,              // tokens; the daemon's default, unless it is configured
    MESSAGE_SLACK_BYTES = 256 << 10, // headers and step entries beside the tensors
    IDLE_US = 20000,                 // longest sleep between looks at the stop flag
};

typedef struct seq {
    bench_request req;
    uint64_t handle;
    uint32_t len;                           // committed tokens
    uint32_t generated;                     // tokens, in all lives of the sequence
    uint32_t take;                          // tokens in the step that is being made, 0 = not in it
    uint64_t arrival_us, first_us, last_us; // of the request, its first and its last token
    uint32_t most;                          // tokens ever committed, in all lives
    uint64_t grown_us;                      // when that grew
    bench_batch *batch;                     // open, of the verifier
} seq;

typedef struct runner {
    const bench_run_opts *opts;
    bench_link link;
    bench_step *step;
    bench_stats *stats;
    bench_progress bar;
    uint32_t prefill_chunk; // in use
    uint32_t block_tokens;  // that parts of prompts are multiples of
    seq *running;           // [concurrency]
    uint32_t num_running;
    seq *preempted; // [concurrency]
    uint32_t num_preempted;
    bench_request next; // to be admitted
    bool has_next;
    bool hold;         // admission, behind a preemption
    uint32_t failures; // in a row
    uint32_t starved;  // steps of one sequence that found no blocks, in a row
    bench_rng rng;     // of waits; not of the load
    uint64_t start_us;
} runner;

// ends_run says which errors concern the daemon, not one request.
static bool ends_run(attnd_err err) {
    return err == ATTND_ECONN || err == ATTND_ETIMEDOUT || err == ATTND_ESHUTDOWN ||
           err == ATTND_EPROTO || err == ATTND_EVERSION;
}

static uint32_t known(const seq *s) {
    return s->req.input + s->generated;
}

static bool decodes(const seq *s) {
    return s->generated > 0 && known(s) - s->len == 1;
}

static bool time_is_up(const runner *r) {
    uint64_t duration = r->opts->duration_us;
    return *r->opts->stop != 0 || (duration > 0 && attnd_clock_us() - r->start_us >= duration);
}

// ---- sequences begin and end

static attnd_err create(runner *r, seq *s, attnd_errinfo *info) {
    bench_retry retry = {0};
    attnd_err err;
    do {
        err = attnd_seq_create(r->link.client, r->link.model_id, &s->handle, info);
    } while (bench_retry_again(&retry, &r->link, err));
    if (err != ATTND_OK) {
        bench_stats_error(r->stats, "seq_create", err, info);
    }
    return err;
}

static attnd_err release(runner *r, const seq *s, attnd_errinfo *info) {
    bench_retry retry = {0};
    attnd_err err;
    do {
        err = attnd_seq_free(r->link.client, s->handle, info);
    } while (bench_retry_again(&retry, &r->link, err));
    if (err != ATTND_OK) {
        bench_stats_error(r->stats, "seq_free", err, info);
    }
    return ends_run(err) ? err : ATTND_OK;
}

static uint64_t due_us(const runner *r) {
    return r->start_us + r->next.arrival_us;
}

// take_waiting gets the next sequence that may begin now; false when there is none.
static bool take_waiting(runner *r, seq *s) {
    if (r->num_preempted > 0) {
        *s = r->preempted[--r->num_preempted];
        return true;
    }
    uint64_t now = attnd_clock_us();
    if (!r->has_next || (r->opts->open_loop && due_us(r) > now)) {
        return false;
    }
    *s = (seq){.req = r->next, .arrival_us = r->opts->open_loop ? due_us(r) : now, .grown_us = now};
    r->has_next = bench_load_next(r->opts->load, &r->next);
    return true;
}

// has_room says whether another sequence would get a part of the next step: it is not begun before
// the prompts of the running ones leave some of the chunk, so that it holds no place and no blocks
// for nothing.
static bool has_room(const runner *r) {
    uint64_t wanted = 0;
    for (uint32_t i = 0; i < r->num_running; i++) {
        const seq *s = &r->running[i];
        wanted += decodes(s) ? 0 : known(s) - s->len;
    }
    return !r->hold && r->num_running < r->opts->concurrency && wanted < r->prefill_chunk;
}

static attnd_err admit(runner *r, attnd_errinfo *info) {
    seq s;
    while (has_room(r) && take_waiting(r, &s)) {
        attnd_err err = create(r, &s, info);
        if (ends_run(err) || (err != ATTND_OK && ++r->failures == MAX_FAILURES)) {
            return err;
        }
        if (err != ATTND_OK) {
            r->stats->failed++;
            continue;
        }
        r->running[r->num_running++] = s;
    }
    return ATTND_OK;
}

static attnd_err preempt_youngest(runner *r, attnd_errinfo *info) {
    seq *s = &r->running[--r->num_running];
    attnd_err err = release(r, s, info);
    bench_verify_submit(r->link.verify, s->batch);
    r->stats->preemptions += s->len > 0; // else it had not begun
    r->stats->recomputed_tokens += s->len;
    s->batch = NULL;
    s->len = 0;
    r->preempted[r->num_preempted++] = *s;
    r->hold = true;
    return err;
}

// remove_at takes a sequence out of running[] and keeps the order of the others.
static void remove_at(runner *r, uint32_t i) {
    memmove(&r->running[i], &r->running[i + 1], (r->num_running - i - 1) * sizeof(*r->running));
    r->num_running--;
    r->hold = false;
}

static attnd_err finish(runner *r, uint32_t i, attnd_errinfo *info) {
    seq s = r->running[i];
    remove_at(r, i);
    bench_verify_submit(r->link.verify, s.batch);
    r->stats->requests++;
    bench_stats_time(r->stats, BENCH_TIME_e2e, s.last_us - s.arrival_us);
    if (s.generated > 1) {
        uint64_t mean = (s.last_us - s.first_us) / (s.generated - 1);
        bench_stats_time(r->stats, BENCH_TIME_tpot, mean);
    }
    return release(r, &s, info);
}

// drop_step gives up every request of a failed step.
static attnd_err drop_step(runner *r, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    for (uint32_t i = r->num_running; i-- > 0 && err == ATTND_OK;) {
        seq s = r->running[i];
        if (s.take > 0) {
            remove_at(r, i);
            bench_verify_discard(r->link.verify, s.batch);
            r->stats->failed++;
            err = release(r, &s, info);
        }
    }
    return err;
}

// ---- one iteration

static void add(runner *r, seq *s, uint32_t take) {
    const bench_prompt prompt = {
        .request = s->req.id, .ids = s->req.ids, .num_ids = s->req.num_ids, .input = s->req.input};
    s->take = take;
    bench_step_add(r->step, s->handle, &prompt, s->len, take, &s->batch);
}

// part_of returns how many of the tokens that are left are fed within a budget.  A part of a prompt
// that may be cached ends with a block, since behind one that is not full nothing is looked up.
static uint32_t part_of(const runner *r, const seq *s, uint32_t budget) {
    uint32_t left = known(s) - s->len;
    if (left <= budget) {
        return left;
    }
    uint32_t over = r->link.gives_tokens ? (s->len + budget) % r->block_tokens : 0;
    return over < budget ? budget - over : budget;
}

static void build(runner *r) {
    uint32_t budget = r->prefill_chunk;
    bench_step_clear(r->step);
    for (uint32_t i = 0; i < r->num_running; i++) {
        r->running[i].take = 0;
        if (decodes(&r->running[i])) {
            add(r, &r->running[i], 1);
        }
    }
    for (uint32_t i = 0; i < r->num_running && budget > 0; i++) {
        seq *s = &r->running[i];
        if (s->take == 0) {
            uint32_t take = part_of(r, s, budget);
            add(r, s, take);
            budget -= take;
        }
    }
}

// token notes that a sequence has generated one.
static void token(runner *r, seq *s, uint64_t now) {
    if (s->generated++ == 0) {
        s->first_us = now;
        bench_stats_time(r->stats, BENCH_TIME_ttft, now - s->arrival_us);
    } else {
        bench_stats_time(r->stats, BENCH_TIME_itl, now - s->last_us);
    }
    s->last_us = now;
}

// advance moves every sequence of a committed step on.
static attnd_err advance(runner *r, attnd_errinfo *info) {
    uint64_t now = attnd_clock_us();
    attnd_err err = ATTND_OK;
    for (uint32_t i = 0; i < r->num_running; i++) {
        seq *s = &r->running[i];
        if (s->take == 0) {
            continue;
        }
        *(decodes(s) ? &r->stats->decode_tokens : &r->stats->prefill_tokens) += s->take;
        s->len += s->take;
        if (s->len > s->most) {
            s->most = s->len;
            s->grown_us = now;
        }
        if (s->len == known(s)) {
            token(r, s, now);
        }
    }
    for (uint32_t i = r->num_running; i-- > 0 && err == ATTND_OK;) {
        if (r->running[i].generated == r->running[i].req.output) {
            err = finish(r, i, info);
        }
    }
    return err;
}

static void sleep_random(runner *r, uint32_t max_ms) {
    double ns = bench_rng_uniform(&r->rng) * max_ms * 1e6;
    nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
}

// starve handles a full pool when one sequence is left: others' sequences hold the blocks.  Waiting
// comes first; then this one gives its own blocks back too, for a while, since two runtimes that
// each wait for the other's last blocks would wait for ever.  A sequence that has not grown for as
// long as patience lasts is given up.
static attnd_err starve(runner *r, attnd_errinfo *info) {
    const seq *s = &r->running[0];
    if (attnd_clock_us() - s->grown_us > r->opts->patience_us) {
        bench_stats_error(r->stats, "step", ATTND_ENOSPC, info);
        return drop_step(r, info);
    }
    if (++r->starved % STARVED_STEPS != 0) {
        sleep_random(r, 20);
        return ATTND_OK;
    }
    attnd_err err = preempt_youngest(r, info);
    sleep_random(r, 200);
    return err;
}

static attnd_err iterate(runner *r, attnd_errinfo *info) {
    build(r);
    attnd_err err = bench_step_run(r->step, &r->link, info);
    if (err == ATTND_OK) {
        r->failures = r->starved = 0;
        return advance(r, info);
    }
    if (err == ATTND_ENOSPC) {
        return r->num_running > 1 ? preempt_youngest(r, info) : starve(r, info);
    }
    if (ends_run(err) || ++r->failures == MAX_FAILURES) {
        return err;
    }
    return drop_step(r, info);
}

static void sleep_until_due(const runner *r) {
    uint64_t now = attnd_clock_us();
    uint64_t us = due_us(r) > now ? due_us(r) - now : 0;
    us = us < IDLE_US ? us : IDLE_US;
    nanosleep(&(struct timespec){.tv_nsec = (long)us * 1000}, NULL);
}

static attnd_err serve(runner *r, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    r->start_us = r->bar.start_us = r->rng.state = attnd_clock_us();
    r->has_next = bench_load_next(r->opts->load, &r->next);
    while (err == ATTND_OK && !time_is_up(r)) {
        err = admit(r, info);
        if (err == ATTND_OK && r->num_running > 0) {
            err = iterate(r, info);
        } else if (err == ATTND_OK && r->num_preempted > 0) {
            r->hold = false; // the rest of a failed step held them
        } else if (err == ATTND_OK && !r->has_next) {
            break;
        } else if (err == ATTND_OK) {
            sleep_until_due(r);
        }
        bench_verdict done = {0};
        if (r->bar.on && r->link.verify != NULL) {
            bench_verify_progress(r->link.verify, &done);
        }
        bench_progress_draw(&r->bar, r->stats, r->num_running, done.rows);
    }
    r->stats->elapsed_us = attnd_clock_us() - r->start_us;
    r->stats->unfinished = r->num_running + r->num_preempted;
    return err;
}

// ---- set up and take down

// fit_limits checks the run against the daemon's limits; the prefill chunk gives way.
static attnd_err fit_limits(runner *r, attnd_errinfo *info) {
    const attnd_limits *lim = attnd_get_limits(r->link.client);
    const bench_model *m = r->opts->model;
    uint32_t seqs = r->opts->concurrency;
    uint64_t row = bench_model_row_bytes(m) + bench_model_out_bytes(m);
    uint64_t rows = lim->message_bytes > MESSAGE_SLACK_BYTES
                        ? (lim->message_bytes - MESSAGE_SLACK_BYTES) / row
                        : 0;
    rows = rows < lim->step_rows ? rows : lim->step_rows;
    if (seqs > lim->step_seqs || seqs > lim->sequences || seqs >= rows) {
        return attnd_fail(info, ATTND_EINVAL, "concurrency",
                          "concurrency %" PRIu32 " is past the daemon's limits: %" PRIu32
                          " sequences, %" PRIu32 " a step, %" PRIu64 " rows a step",
                          seqs, lim->sequences, lim->step_seqs, rows);
    }
    uint32_t chunk = r->opts->prefill_chunk;
    r->prefill_chunk = chunk < rows - seqs ? chunk : (uint32_t)rows - seqs;
    r->stats->prefill_chunk = r->prefill_chunk;
    return ATTND_OK;
}

static attnd_err set_up(runner *r, attnd_errinfo *info) {
    const bench_run_opts *o = r->opts;
    attnd_connect_opts connect = {
        .client_name = "attn-bench",
        .tenant = o->tenant,
        .timeout_ms = o->timeout_ms,
        .transport = o->transport,
    };
    attnd_model_opts model;
    attnd_err err = attnd_connect(&r->link.client, o->url, &connect, info);
    if (err == ATTND_OK) {
        err = fit_limits(r, info);
    }
    if (err != ATTND_OK) {
        return err;
    }
    bench_model_opts(o->model, &model);
    err = attnd_model_open(r->link.client, &model, &r->link.model_id, info);
    if (err != ATTND_OK) {
        return err;
    }
    uint32_t rows = r->prefill_chunk + o->concurrency;
    r->running = calloc(o->concurrency, sizeof(*r->running));
    r->preempted = calloc(o->concurrency, sizeof(*r->preempted));
    err = bench_step_create(&r->step, o->model, o->concurrency, rows);
    if (err != ATTND_OK || r->running == NULL || r->preempted == NULL) {
        return attnd_fail(info, ATTND_ENOMEM, "concurrency", "no memory for the sequences");
    }
    if (o->verify > 0) {
        bench_verify_opts verify = {.seed = o->seed,
                                    .num_threads = o->verify_threads,
                                    .num_sequences = o->concurrency,
                                    .step_rows = rows};
        err = bench_verify_start(&r->link.verify, o->model, &verify, info);
    }
    return err;
}

// take_down ends the session, which frees what it holds, and waits for the verifier.  Behind an
// error an open batch may hold rows without outputs.
static attnd_err take_down(runner *r, bool good, bench_verdict *verdict) {
    for (uint32_t i = 0; i < r->num_running; i++) {
        if (good) {
            bench_verify_submit(r->link.verify, r->running[i].batch);
        } else {
            bench_verify_discard(r->link.verify, r->running[i].batch);
        }
    }
    if (r->link.client != NULL) {
        attnd_close(r->link.client);
    }
    attnd_err err = bench_verify_stop(r->link.verify, verdict);
    bench_progress_clear(&r->bar);
    bench_step_free(r->step);
    free(r->running);
    free(r->preempted);
    return err;
}

attnd_err bench_run(const bench_run_opts *opts, bench_stats *stats, bench_verdict *verdict,
                    attnd_errinfo *info) {
    runner r = {
        .opts = opts,
        .stats = stats,
        .link = {.seed = opts->seed,
                 .patience_us = opts->patience_us,
                 .stop = opts->stop,
                 .stats = stats,
                 .verify_share = opts->verify,
                 .gives_tokens = bench_load_shares(opts->load)},
        .block_tokens = opts->model->block_tokens ? opts->model->block_tokens : DEFAULT_BLOCK,
        .bar = {.on = opts->progress,
                .total_requests = bench_load_total(opts->load),
                .duration_us = opts->duration_us},
    };
    bench_stats_init(stats);
    attnd_err err = set_up(&r, info);
    if (err == ATTND_OK) {
        err = serve(&r, info);
    }
    attnd_err verify_err = take_down(&r, err == ATTND_OK, verdict);
    if (verify_err != ATTND_OK && err == ATTND_OK) {
        err = attnd_fail(info, verify_err, "verify", "no memory for the verifier");
    }
    return err;
}
