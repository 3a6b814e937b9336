// The life of a request, and the launching.
//
//     submit -> QUEUED -> (launches) -> TAKEN -> ENDED -> done
//
// QUEUED: some of it is in no launch yet; a prefill in chunks may run at the same time.  TAKEN: all
// of it is in launches, or it was canceled while something of it runs.  ENDED: done is due.  The
// memory of a request is touched until done was called, never after.
//
// There is one batch more than the backend's depth: when a launch ends, the next is given to the
// backend first, and then the callbacks of the ended one run, so that replies are written while
// the backend works.
//
// Loop thread only.  Limits: sched_expire looks at every request, but only once a deadline came.
#include "scheduler/sched.h"

#include <stdlib.h>

#include "scheduler/sched_batch.h"
#include "scheduler/sched_queue.h"

enum { IDLE, QUEUED, TAKEN, ENDED };

struct sched {
    sched_opts opts;
    sched_backend backend;
    sched_queue *queue; // requests with rows
    list_node copies;   // requests with copies only, oldest first
    sched_batch *batches;
    uint32_t *tenant_queued; // [max_tenants]
    uint32_t queued, running;
    uint32_t ending; // ENDED requests
    uint32_t outstanding;
    uint32_t decodes_in_a_row; // decode launches since a prefill waits
    uint64_t quiet_us;         // from when on no decode is about, if none comes
    uint32_t decode_launches;  // outstanding
    uint64_t prefill_work;     // outstanding
    int64_t prefill_tokens;    // outstanding
    bool launching;            // inside the callbacks of a launch
    uint64_t seqno, launch_no;
    uint64_t next_deadline_ms; // no live request has an earlier one
    sched_info info;
};

static bool opts_ok(const sched_opts *opts, const sched_backend *backend) {
    return opts->max_queued >= 1 && opts->max_queued <= SCHED_MAX_QUEUED &&
           opts->max_launch_rows >= 1 && opts->max_launch_rows <= SCHED_MAX_QUEUED &&
           opts->max_tenant_queued >= 1 && opts->max_tenants >= 1 &&
           opts->prefill_chunk_tokens >= 1 && opts->prefill_alone_tokens >= 0 &&
           opts->max_decodes_in_a_row >= 1 && backend->depth >= 1 &&
           backend->depth <= SCHED_MAX_DEPTH;
}

static uint32_t num_batches(const sched *s) {
    return s->backend.depth + 1;
}

static attnd_err init_batches(sched *s) {
    s->batches = calloc(num_batches(s), sizeof(*s->batches));
    if (!s->batches) {
        return ATTND_ENOMEM;
    }
    sched_opts opts = s->opts;
    if (s->backend.deterministic) {
        opts.prefill_alone_tokens = 0;
    }
    for (uint32_t i = 0; i < num_batches(s); i++) {
        attnd_err err = sched_batch_init(&s->batches[i], &opts);
        if (err) {
            return err;
        }
        sched_launch *launch = &s->batches[i].launch;
        launch->idx = i;
        launch->params.pool = s->backend.pool;
        launch->params.pool_bytes = s->backend.pool_bytes;
        launch->params.deterministic = s->backend.deterministic;
    }
    return ATTND_OK;
}

attnd_err sched_create(sched **out, const sched_opts *opts, const sched_backend *backend) {
    if (!opts_ok(opts, backend)) {
        return ATTND_EINVAL;
    }
    sched *s = calloc(1, sizeof(*s));
    if (!s) {
        return ATTND_ENOMEM;
    }
    s->opts = *opts;
    if (opts->max_decodes_in_a_row < backend->depth) { // else a decode could wait for two chunks
        s->opts.max_decodes_in_a_row = backend->depth;
    }
    s->backend = *backend;
    s->next_deadline_ms = UINT64_MAX;
    s->info.last = (attn_choice){.kernel = "none", .why = "nothing ran yet"};
    list_init(&s->copies);
    s->tenant_queued = calloc(opts->max_tenants, sizeof(*s->tenant_queued));
    attnd_err err = sched_queue_create(&s->queue, opts->max_tenants, opts->max_queued);
    if (!err) {
        err = init_batches(s);
    }
    if (err || !s->tenant_queued) {
        sched_free(s);
        return ATTND_ENOMEM;
    }
    *out = s;
    return ATTND_OK;
}

void sched_free(sched *s) {
    if (!s) {
        return;
    }
    ATTND_ASSERT(sched_idle(s));
    for (uint32_t i = 0; s->batches && i < num_batches(s); i++) {
        sched_batch_fini(&s->batches[i]);
    }
    free(s->batches);
    sched_queue_free(s->queue);
    free(s->tenant_queued);
    free(s);
}

void sched_tenant_share(sched *s, uint32_t tenant, uint32_t weight) {
    weight = weight < 1 ? 1 : weight;
    sched_queue_set_weight(s->queue, tenant, weight < SCHED_MAX_SHARE ? weight : SCHED_MAX_SHARE);
}

// uncount is for a request that has just left its list.
static void uncount(sched *s, sched_req *req) {
    req->state = TAKEN;
    s->queued--;
    s->tenant_queued[req->tenant]--;
}

static void leave_queue(sched *s, sched_req *req) {
    if (req->shape) {
        sched_queue_remove(s->queue, req);
    } else {
        list_remove(&req->node);
    }
    uncount(s, req);
}

// ---- launching

static sched_batch *free_batch(sched *s) {
    for (uint32_t i = 0; i < num_batches(s); i++) {
        if (!s->batches[i].in_use) {
            return &s->batches[i];
        }
    }
    return NULL;
}

// note_formed brings the requests' states and the counters up to date with a batch just formed.
static void note_formed(sched *s, sched_batch *b) {
    b->in_use = true;
    for (uint32_t i = 0; i < b->num_reqs; i++) {
        sched_req *req = b->reqs[i];
        s->running += req->running == 1;
        if (!sched_batch_left(req)) {
            uncount(s, req);
        }
    }
    if (b->launch.params.num_rows > 0) {
        bool decodes = b->kind == SCHED_DECODE;
        s->decode_launches += decodes;
        bool prefill_waits = sched_queue_waiting(s->queue, SCHED_PREFILL) > 0;
        s->decodes_in_a_row = decodes && prefill_waits ? s->decodes_in_a_row + 1 : 0;
    }
    s->prefill_work += b->prefill_work;
    s->prefill_tokens += sched_batch_prefill_tokens(b);
    s->info.launches++;
    s->info.rows += b->launch.params.num_rows;
    s->info.copies += b->launch.num_copies;
}

// note_decode is told that a decode has come, or has run.
static void note_decode(sched *s) {
    s->quiet_us = s->opts.now_us() + SCHED_QUIET_US;
}

// room_alone returns how much work a launch of prefills may do, since no decode is about; else 0.
static uint64_t room_alone(const sched *s, uint64_t now_us) {
    uint64_t tokens = (uint64_t)s->opts.prefill_alone_tokens, most = tokens * tokens;
    bool is_quiet = now_us >= s->quiet_us && s->decode_launches == 0 &&
                    sched_queue_waiting(s->queue, SCHED_DECODE) == 0;
    return is_quiet && most > s->prefill_work ? most - s->prefill_work : 0;
}

// launch_next gives the backend one launch; false when it is the turn of a prefill that has to wait
// for the end of those before.
static bool launch_next(sched *s) {
    sched_batch *b = free_batch(s);
    ATTND_ASSERT(b != NULL);
    uint64_t now_us = s->opts.now_us();
    sched_turn turn = {.launch_no = ++s->launch_no,
                       .now_us = now_us,
                       .room = room_alone(s, now_us),
                       .outstanding = s->prefill_tokens,
                       .prefill_first = s->decodes_in_a_row >= s->opts.max_decodes_in_a_row};
    s->launching = true;
    bool formed = sched_batch_form(b, s->queue, &s->copies, &turn);
    ATTND_ASSERT(formed || s->prefill_tokens > 0);
    if (formed) {
        note_formed(s, b);
        s->outstanding++;
        s->backend.launch(s->backend.ctx, &b->launch);
    }
    s->launching = false;
    return formed;
}

// launch_ready gives the backend what waits, up to its depth.
static void launch_ready(sched *s) {
    ATTND_ASSERT(!s->launching);
    while (s->outstanding < s->backend.depth && s->queued > 0 && launch_next(s)) {
    }
}

static attnd_err check(const sched *s, const sched_req *req, attnd_errinfo *info) {
    if (req->shape ? req->num_rows == 0 : req->num_copies == 0) {
        return attnd_fail(info, ATTND_EINVAL, "num_rows", "the request has nothing to run");
    }
    if (req->num_rows > s->opts.max_launch_rows) {
        return attnd_fail(info, ATTND_EMSGSIZE, "num_rows", "%u rows, a launch holds %u",
                          req->num_rows, s->opts.max_launch_rows);
    }
    if (s->tenant_queued[req->tenant] >= s->opts.max_tenant_queued) {
        return attnd_fail(info, ATTND_EBUSY, "tenant", "%u requests of the tenant are queued",
                          s->tenant_queued[req->tenant]);
    }
    if (s->queued >= s->opts.max_queued) {
        return attnd_fail(info, ATTND_EBUSY, "queue", "%u requests are queued", s->queued);
    }
    return ATTND_OK;
}

static sched_kind kind_of(sched_req *req) {
    for (uint32_t row = 0; row < req->num_rows; row++) {
        int32_t q_len, kv_len;
        req->lens(req, row, &q_len, &kv_len);
        if (q_len > SCHED_DECODE_TOKENS) {
            return SCHED_PREFILL;
        }
    }
    return SCHED_DECODE;
}

attnd_err sched_submit(sched *s, sched_req *req, attnd_errinfo *info) {
    ATTND_ASSERT(req->tenant < s->opts.max_tenants && req->state == IDLE && !s->launching);
    attnd_err err = check(s, req, info);
    if (err) {
        return err;
    }
    req->node = (list_node){NULL, NULL};
    req->seqno = ++s->seqno;
    req->launch_no = 0;
    req->queued_us = s->opts.now_us();
    req->queue_us = req->run_us = 0;
    req->q_first = 0;
    req->row = req->running = req->passed = 0;
    req->err = ATTND_OK;
    req->signaled = false;
    req->signaler = NULL;
    req->state = QUEUED;
    if (req->shape) {
        req->kind = kind_of(req);
        sched_queue_push(s->queue, req);
        if (req->kind == SCHED_DECODE) {
            note_decode(s);
        }
    } else {
        list_append(&s->copies, &req->node);
    }
    s->queued++;
    s->tenant_queued[req->tenant]++;
    if (req->deadline_ms && req->deadline_ms < s->next_deadline_ms) {
        s->next_deadline_ms = req->deadline_ms;
    }
    launch_ready(s);
    return ATTND_OK;
}

// ---- ending

// end calls done.  launch is the last of the request, NULL when there was none.
static void end(sched *s, sched_req *req, const sched_launch *launch) {
    attnd_errinfo info = {.code = ATTND_OK};
    if (launch && launch->err && launch->err == req->err) {
        info = launch->info;
        info.code = launch->err;
    } else if (req->err) {
        attnd_fail(&info, req->err, NULL, "%s", attnd_strerror(req->err));
    }
    req->state = IDLE;
    s->ending--;
    s->info.requests++;
    req->done(req, req->err, launch ? &launch->choice : NULL, &info);
}

// stop takes the rest of a live request out; true when nothing of it runs, and it is ENDED.
static bool stop(sched *s, sched_req *req, attnd_err err) {
    if (req->state == QUEUED) {
        leave_queue(s, req);
    }
    req->err = req->err ? req->err : err;
    if (req->running > 0) {
        return false;
    }
    req->state = ENDED;
    s->ending++;
    return true;
}

void sched_cancel(sched *s, sched_req *req) {
    if ((req->state == QUEUED || req->state == TAKEN) && stop(s, req, ATTND_ECANCELED)) {
        end(s, req, NULL);
    }
}

// settle notes that a launch of the request has ended; true when it was the last.
static bool settle(sched *s, sched_req *req, const sched_launch *launch) {
    req->run_us += launch->run_us;
    req->running--;
    s->running -= req->running == 0;
    req->signaled |= !launch->err && req->signaler == launch;
    if (launch->err) {
        return stop(s, req, launch->err);
    }
    if (req->running > 0 || req->state == QUEUED) {
        return false;
    }
    req->state = ENDED;
    s->ending++;
    return true;
}

static void count(sched *s, const sched_batch *b) {
    s->prefill_work -= b->prefill_work;
    s->prefill_tokens -= sched_batch_prefill_tokens(b);
    if (b->launch.params.num_rows > 0 && b->kind == SCHED_DECODE) {
        s->decode_launches--;
        note_decode(s);
    }
    s->info.busy_us += b->launch.run_us;
    if (b->launch.err) {
        return;
    }
    s->info.decode_tokens += (uint64_t)b->decode_tokens;
    s->info.prefill_tokens += (uint64_t)b->prefill_tokens;
    if (b->launch.params.num_rows > 0) {
        s->info.last = b->launch.choice;
    }
}

void sched_launch_done(sched *s, sched_launch *launch) {
    sched_batch *b = &s->batches[launch->idx];
    ATTND_ASSERT(launch == &b->launch && b->in_use && !s->launching);
    s->outstanding--;
    count(s, b);
    uint32_t ended = 0;
    for (uint32_t i = 0; i < b->num_reqs; i++) {
        if (settle(s, b->reqs[i], launch)) {
            b->reqs[ended++] = b->reqs[i];
        }
    }
    b->num_reqs = 0; // from here on a request's memory may be gone
    launch_ready(s);
    for (uint32_t i = 0; i < ended; i++) {
        end(s, b->reqs[i], launch);
    }
    b->in_use = false;
}

// ---- what ran without us

// charge_ran has the tenant pay; its request is queued for an instant, for the clock of the shares.
static void charge_ran(sched *s, sched_req *req, uint64_t cost) {
    if (s->queued < s->opts.max_queued) {
        req->node = (list_node){NULL, NULL};
        req->seqno = ++s->seqno;
        req->kind = SCHED_DECODE;
        sched_queue_push(s->queue, req);
        sched_queue_advance(s->queue);
        sched_queue_charge(s->queue, req->tenant, cost);
        sched_queue_remove(s->queue, req);
    }
}

void sched_ran(sched *s, sched_req *req, const sched_launch *launch) {
    ATTND_ASSERT(req->state == IDLE && req->shape && !s->launching);
    uint64_t cost = 0, tokens = 0;
    for (uint32_t row = 0; row < req->num_rows; row++) {
        int32_t q_len, kv_len;
        req->lens(req, row, &q_len, &kv_len);
        tokens += (uint64_t)q_len;
        cost += (uint64_t)q_len * (uint64_t)kv_len;
    }
    charge_ran(s, req, cost > 0 ? cost : 1);
    note_decode(s);
    req->queue_us = 0;
    req->run_us = launch->run_us;
    req->signaled = !launch->err;
    s->info.launches++;
    s->info.requests++;
    s->info.rows += req->num_rows;
    s->info.busy_us += launch->run_us;
    if (!launch->err) {
        s->info.decode_tokens += tokens;
        s->info.last = launch->choice;
    }
}

// ---- deadlines

typedef struct sweep {
    sched *s;
    uint64_t now_ms, next_ms;
    list_node ended;
} sweep;

static void sweep_one(void *ctx, sched_req *req) {
    sweep *w = ctx;
    if (!req->deadline_ms || req->err || req->state == ENDED) {
        return;
    }
    if (req->deadline_ms > w->now_ms) {
        w->next_ms = req->deadline_ms < w->next_ms ? req->deadline_ms : w->next_ms;
    } else if (stop(w->s, req, ATTND_ETIMEDOUT)) {
        list_append(&w->ended, &req->node);
    }
}

static void sweep_all(sched *s, sweep *w) {
    sched_queue_each(s->queue, sweep_one, w);
    LIST_FOREACH (&s->copies, node) {
        sweep_one(w, LIST_ENTRY(node, sched_req, node));
    }
    for (uint32_t i = 0; i < num_batches(s); i++) {
        const sched_batch *b = &s->batches[i];
        for (uint32_t k = 0; b->in_use && k < b->num_reqs; k++) {
            sweep_one(w, b->reqs[k]);
        }
    }
}

uint64_t sched_expire(sched *s, uint64_t now_ms) {
    if (now_ms < s->next_deadline_ms) {
        return s->next_deadline_ms;
    }
    sweep w = {.s = s, .now_ms = now_ms, .next_ms = UINT64_MAX};
    list_init(&w.ended);
    sweep_all(s, &w);
    s->next_deadline_ms = w.next_ms;
    for (list_node *node = list_first(&w.ended); node; node = list_first(&w.ended)) {
        list_remove(node);
        end(s, LIST_ENTRY(node, sched_req, node), NULL);
    }
    return s->next_deadline_ms;
}

bool sched_idle(const sched *s) {
    return s->queued == 0 && s->outstanding == 0 && s->ending == 0;
}

void sched_get_info(const sched *s, sched_info *out) {
    *out = s->info;
    out->queued = s->queued;
    out->running = s->running;
}
