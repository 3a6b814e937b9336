// Forming a launch.  A decode request goes in whole.  A prefill is cut: the pieces of a row begin
// at multiples of chunk_tokens, whatever else is in the launch, and pieces are taken in order as
// long as the launch, with the prefills that are outstanding, stays within chunk_tokens query
// tokens.  The first piece always fits where none are outstanding, so prefills make progress.
// Where a turn has room for prefills alone, a piece is the rest of its row, or as many chunks as
// there is room for.
//
//     chunk_tokens = 512, one request, q_len 1200 and 100
//     launch 1: row 0 [0, 512)      launch 2: row 0 [512, 1024)
//     launch 3: row 0 [1024, 1200), row 1 [0, 100)
//
// Copies of several requests are gathered in one array; a request that has more than that holds is
// given its own array and shares the launch with no other copies.
#include "scheduler/sched_batch.h"

#include <stdlib.h>
#include <string.h>

attnd_err sched_batch_init(sched_batch *b, const sched_opts *opts) {
    *b = (sched_batch){.max_rows = opts->max_launch_rows,
                       .chunk_tokens = opts->prefill_chunk_tokens,
                       .alone_tokens = opts->prefill_alone_tokens};
    b->rows = calloc(opts->max_launch_rows, sizeof(*b->rows));
    b->copies = calloc(SCHED_LAUNCH_COPIES, sizeof(*b->copies));
    b->reqs = calloc(opts->max_queued, sizeof(sched_req *));
    b->signals = calloc(opts->max_queued, sizeof(*b->signals));
    if (!b->rows || !b->copies || !b->reqs || !b->signals) {
        sched_batch_fini(b);
        return ATTND_ENOMEM;
    }
    return ATTND_OK;
}

void sched_batch_fini(sched_batch *b) {
    free(b->rows);
    free(b->copies);
    free(b->reqs);
    free(b->signals);
    *b = (sched_batch){.num_reqs = 0};
}

bool sched_batch_left(const sched_req *req) {
    return req->row < req->num_rows;
}

int64_t sched_batch_prefill_tokens(const sched_batch *b) {
    return b->kind == SCHED_PREFILL ? b->decode_tokens + b->prefill_tokens : 0;
}

static bool copies_fit(const sched_batch *b, uint32_t num_copies) {
    uint64_t sum = (uint64_t)b->launch.num_copies + num_copies;
    return num_copies == 0 || b->launch.num_copies == 0 || sum <= SCHED_LAUNCH_COPIES;
}

static void add_copies(sched_batch *b, const sched_req *req) {
    if (req->num_copies > SCHED_LAUNCH_COPIES) {
        b->launch.copies = req->copies;
    } else if (req->num_copies > 0) {
        memcpy(b->copies + b->launch.num_copies, req->copies, req->num_copies * sizeof(kv_copy));
    }
    b->launch.num_copies += req->num_copies;
}

// add puts a request on the launch's list; its copies go with its first launch.
static void add(sched_batch *b, sched_req *req, const sched_turn *turn) {
    if (req->launch_no == 0) {
        add_copies(b, req);
        req->queue_us = turn->now_us - req->queued_us;
    }
    req->launch_no = turn->launch_no;
    req->running++;
    b->reqs[b->num_reqs++] = req;
}

// alone_tokens returns how many tokens of a row a launch of prefills alone has room for.
static int32_t alone_tokens(const sched_batch *b, const sched_req *req, int32_t kv_len) {
    uint64_t tokens = req->in_place && kv_len > 0 ? b->room / (uint64_t)kv_len : 0;
    return tokens < (uint64_t)b->alone_tokens ? (int32_t)tokens : b->alone_tokens;
}

// piece_tokens returns the length of the next piece of a prefill.
static int32_t piece_tokens(const sched_batch *b, const sched_req *req, int32_t q_len,
                            int32_t kv_len) {
    int32_t rest = q_len - req->q_first, most = alone_tokens(b, req, kv_len);
    if (rest <= most) {
        return rest;
    }
    most = most < b->chunk_tokens ? b->chunk_tokens : most / b->chunk_tokens * b->chunk_tokens;
    return rest < most ? rest : most;
}

// has_room says whether the launch, with so many query tokens of a row more, is a chunk together
// with what is outstanding, or within what launches of prefills alone may be.
static bool has_room(const sched_batch *b, const sched_req *req, int32_t tokens, int32_t kv_len) {
    int64_t sum = b->decode_tokens + b->prefill_tokens + tokens;
    uint64_t work = b->prefill_work + (uint64_t)tokens * (uint64_t)kv_len;
    bool is_chunk = sum <= b->chunk_tokens || (req->in_place && sum <= b->alone_tokens);
    return b->outstanding + sum <= b->chunk_tokens || (is_chunk && work <= b->room);
}

// next_count returns how many query tokens of the row the launch takes; negative when it has no
// room.
static int32_t next_count(const sched_batch *b, const sched_req *req, int32_t q_len,
                          int32_t kv_len) {
    if (req->kind == SCHED_DECODE) {
        return q_len;
    }
    int32_t count = piece_tokens(b, req, q_len, kv_len);
    return has_room(b, req, count, kv_len) ? count : -1;
}

// fits says whether the launch has room for the next piece of a request.
static bool fits(void *ctx, sched_req *req) {
    const sched_batch *b = ctx;
    if (b->launch.params.num_rows + req->num_rows > b->max_rows ||
        (req->launch_no == 0 && !copies_fit(b, req->num_copies))) {
        return false;
    }
    int32_t q_len, kv_len;
    req->lens(req, req->row, &q_len, &kv_len);
    return next_count(b, req, q_len, kv_len) >= 0;
}

// cut makes row the piece of count query tokens from first on.
static void cut(attn_row *row, int32_t first, int32_t count) {
    row->q_first = first;
    row->q_count = count;
    if (first > 0) { // the first piece has appended
        row->new_len = 0;
        row->k_new = row->v_new = NULL;
        row->k_positions = NULL;
    }
}

static void count_tokens(sched_batch *b, const attn_row *row) {
    if (row->q_len <= SCHED_DECODE_TOKENS) {
        b->decode_tokens += row->q_count;
    } else {
        b->prefill_tokens += row->q_count;
    }
}

// take_rows moves the request's next pieces into the launch and returns their cost.
static uint64_t take_rows(sched_batch *b, sched_req *req) {
    attn_row *rows = b->rows + b->launch.params.num_rows;
    req->fill(req, rows);
    uint32_t taken = 0;
    uint64_t cost = 0;
    while (sched_batch_left(req)) {
        attn_row *row = &rows[taken];
        if (taken < req->row) { // the first rows were in earlier launches
            *row = rows[req->row];
        }
        int32_t count = next_count(b, req, row->q_len, row->kv_len);
        if (count < 0) {
            break;
        }
        taken++;
        cut(row, req->q_first, count);
        uint64_t work = (uint64_t)count * (uint64_t)row->kv_len;
        count_tokens(b, row);
        b->prefill_work += req->kind == SCHED_PREFILL ? work : 0;
        cost += work;
        req->q_first += count;
        if (req->q_first < row->q_len) { // the next piece is for another launch
            break;
        }
        req->row++;
        req->q_first = 0;
    }
    b->launch.params.num_rows += taken;
    return cost;
}

static void add_signal(sched_batch *b, sched_req *req) {
    if (req->signal) {
        req->signaler = &b->launch;
        b->signals[b->launch.num_signals++] = req->signal;
    }
}

static void take(sched_batch *b, sched_queue *q, sched_req *req, const sched_turn *turn) {
    add(b, req, turn);
    uint64_t cost = take_rows(b, req);
    sched_queue_charge(q, req->tenant, cost > 0 ? cost : 1);
    if (!sched_batch_left(req)) {
        sched_queue_remove(q, req);
        add_signal(b, req);
    }
}

// take_copies takes the requests with copies only, in order; false when not all of them fit.
static bool take_copies(sched_batch *b, list_node *copies, const sched_turn *turn) {
    LIST_FOREACH (copies, node) {
        sched_req *req = LIST_ENTRY(node, sched_req, node);
        if (!copies_fit(b, req->num_copies)) {
            return false;
        }
        list_remove(node);
        add(b, req, turn);
    }
    return true;
}

static void reset(sched_batch *b) {
    b->launch.params.rows = b->rows;
    b->launch.params.num_rows = 0;
    b->launch.copies = b->copies;
    b->launch.num_copies = 0;
    b->launch.signals = b->signals;
    b->launch.num_signals = 0;
    b->launch.ticket = 0;
    b->launch.prepared = false;
    b->launch.choice = (attn_choice){.kernel = "", .why = ""};
    b->launch.err = ATTND_OK;
    b->launch.info = (attnd_errinfo){.code = ATTND_OK};
    b->launch.run_us = 0;
    b->num_reqs = 0;
    b->decode_tokens = b->prefill_tokens = 0;
    b->prefill_work = 0;
}

static void set_shape(attn_params *p, const attn_shape *shape) {
    p->shape = *shape;
    p->num_blocks = shape->block_stride ? p->pool_bytes / shape->block_stride : 0;
}

bool sched_batch_form(sched_batch *b, sched_queue *q, list_node *copies, const sched_turn *turn) {
    reset(b);
    b->room = turn->room;
    b->outstanding = turn->outstanding;
    bool all_copies = take_copies(b, copies, turn);
    sched_req *req = all_copies ? sched_queue_lead(q, turn->prefill_first) : NULL;
    if (!req || !fits(b, req)) {
        return b->num_reqs > 0;
    }
    sched_queue_advance(q);
    b->kind = req->kind;
    set_shape(&b->launch.params, req->shape);
    sched_follow follow = {
        .shape = req->shape, .kind = b->kind, .launch_no = turn->launch_no, .fits = fits, .ctx = b};
    do {
        take(b, q, req, turn);
        req = sched_queue_follow(q, &follow);
    } while (req);
    if (b->num_reqs == 1 && b->kind == SCHED_DECODE && b->launch.num_copies == 0) {
        b->launch.ticket = b->reqs[0]->ticket;
    }
    return true;
}
