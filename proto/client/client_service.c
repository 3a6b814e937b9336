// An attend as it comes is one attend_all with one layer; the layers of a captured graph are one
// attend_all at each replay, or a few, when they do not follow each other or lie at other places.
//
//     attend     tensors to places of the region | send | copies in, flags, copies out in the
//     stream capture    tensors to places of the region | keep | the same, captured replay     send
//     what was kept, for this step commit     wait for the answers of what was sent
//
// Tensors of the caller's that lie in the region are used where they are.  For the others there are
// places: of a lane, for each stream that attends as it comes, since what follows in one stream may
// use the same place again, and of each capture, whose graph has the addresses in it.  Pairs of
// flags likewise.
//
// Sending comes first: when the stream's work cannot be made, nothing waits in the stream, and the
// call ends with its step.  When the daemon refuses a call, it answers the call's flags all the
// same (proto_region.h), so that no stream hangs; the error comes out when the step is committed.
//
// One lock.  It is let go while an answer is waited for, and the call is marked meanwhile.
#include "proto/client/client_service.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "proto/client/client_attend.h"
#include "proto/client/client_watch.h"
#include "proto/clock.h"

enum {
    MAX_CALLS = 16,         // without an answer
    LANES = 8,              // streams that attend as they come
    LANE_FLAGS = MAX_CALLS, // of each: so many attends ahead of the daemon
    IDLE_US = 50,           // between two looks at a stream
    FEW = 8,                // rows of a sequence: more may be a launch that takes all SMs
};
_Static_assert(PROTO_REGION_MAX_FLAGS - LANES * LANE_FLAGS == 3968, "attnd.h says so");

enum { Q, K, V, OUT, LSE, TENSORS };

// call is an attend_all that was sent.
typedef struct call {
    bool taken, busy; // busy: a thread waits for its answer
    client_flight flight;
    uint64_t step;
    uint32_t first_flag;
} call;

typedef struct lane {
    void *stream;
    uint64_t used; // order of the last use; 0 = never
    uint32_t next_flag;
    client_place *places[TENSORS];
} lane;

typedef struct capture {
    struct capture *next;
    uint64_t step, id; // the step that was open then, the engine's number of the capture
    uint32_t model, rows, new_rows;
    client_place *places[TENSORS];
    proto_attend_all *runs; // [num_runs], of layers that follow each other
    uint32_t num_runs, max_runs;
} capture;

typedef struct open_step {
    struct open_step *next;
    uint64_t step; // 0 = none: kept for the next one
    uint32_t model, rows, new_rows;
    bool is_long; // a sequence has more than FEW rows
    bool has_stream;
    void *stream;
    attnd_err err; // the first answer that was one
    attnd_errinfo info;
} open_step;

struct client_service {
    const attnd_service *ops;
    void *state;
    client_conn *conn; // borrowed: it owns this
    uint8_t *base;     // where the client's device sees the region
    uint64_t bytes;
    proto_flags *head;
    uint64_t flags_bytes;
    proto_flag *flags;
    uint32_t num_flags;
    client_watch watch;
    bool watches;
    pthread_mutex_t lock; // guards all below
    pthread_cond_t ended; // a call has
    client_area area;
    uint32_t next_flag; // of those that captures take
    uint64_t uses;
    lane lanes[LANES];
    capture *captures; // newest first
    open_step *steps;
    call calls[MAX_CALLS];
    uint32_t num_calls;
};

// ---- calls

static open_step *find_step(client_service *s, uint64_t step) {
    open_step *o = s->steps;
    while (o && o->step != step) {
        o = o->next;
    }
    return step ? o : NULL;
}

static attnd_err not_open(attnd_errinfo *info) {
    return attnd_fail(info, ATTND_ESTALE, "step", "the step is not open");
}

// finish waits for a call's answer, without the lock, and notes its error.
static void finish(client_service *s, call *c, uint64_t deadline_ms) {
    client_msg m = {0};
    attnd_errinfo info;
    proto_attend_reply r;
    c->busy = true;
    pthread_mutex_unlock(&s->lock);
    attnd_err err = client_conn_finish(&c->flight, deadline_ms, &m, &info);
    if (!err) {
        err = proto_read(client_msg_view(&m), &r, sizeof(r), false, &info);
        client_msg_free(&m);
    }
    pthread_mutex_lock(&s->lock);
    open_step *o = find_step(s, c->step);
    if (err && o && !o->err) {
        o->err = err;
        o->info = info;
    }
    *c = (call){.taken = false};
    s->num_calls--;
    pthread_cond_broadcast(&s->ended);
}

// finish_or_wait has c ended by this thread or by the one that is at it.
static void finish_or_wait(client_service *s, call *c, uint64_t deadline_ms) {
    if (c->busy) {
        pthread_cond_wait(&s->ended, &s->lock);
    } else {
        finish(s, c, deadline_ms);
    }
}

static call *find_call(client_service *s, uint64_t step) {
    for (uint32_t i = 0; i < MAX_CALLS; i++) {
        if (s->calls[i].taken && s->calls[i].step == step) {
            return &s->calls[i];
        }
    }
    return NULL;
}

// oldest returns the call that was sent first; nobody waits for it unless for all.
static call *oldest(client_service *s) {
    call *best = NULL;
    for (uint32_t i = 0; i < MAX_CALLS; i++) {
        call *c = &s->calls[i];
        bool better = c->taken && (!best || (best->busy && !c->busy) ||
                                   (best->busy == c->busy && c->flight.id < best->flight.id));
        best = better ? c : best;
    }
    return best;
}

// room_for waits until a call may be sent whose flags are free.
static call *room_for(client_service *s, uint32_t first_flag, uint64_t deadline_ms) {
    uint32_t most = s->conn->max_slots / 2; // the rest is for other requests
    most = most < 1 ? 1 : most < MAX_CALLS ? most : MAX_CALLS;
    call *room = NULL;
    while (!room) {
        call *in_use = NULL;
        for (uint32_t i = 0; i < MAX_CALLS; i++) {
            call *c = &s->calls[i];
            in_use = c->taken && c->first_flag == first_flag ? c : in_use;
            room = c->taken ? room : c;
        }
        in_use = !in_use && s->num_calls >= most ? oldest(s) : in_use;
        if (in_use) {
            room = NULL;
            finish_or_wait(s, in_use, deadline_ms);
        }
    }
    return room;
}

// lay_out_call: a mask lies right behind the body.
static uint64_t lay_out_call(uint8_t *msg, const proto_attend_all *body,
                             const attnd_block_mask *mask) {
    client_sheet sheet;
    client_sheet_begin(&sheet, msg, sizeof(*body));
    client_attend_put_mask(&sheet, mask);
    client_sheet_set(&sheet, PROTO_BODY, body, sizeof(*body));
    return sheet.end;
}

static attnd_err send_call(client_service *s, const proto_attend_all *body,
                           const attnd_block_mask *mask, uint64_t deadline_ms, uint64_t *request,
                           attnd_errinfo *info) {
    client_msg m = {0};
    client_start_opts how = {.request_id = request};
    call *c = room_for(s, body->first_flag, deadline_ms);
    attnd_err err = client_msg_alloc(s->conn, &m, lay_out_call(NULL, body, mask),
                                     PROTO_BODY + sizeof(proto_attend_reply), deadline_ms, info);
    if (err) {
        return err;
    }
    lay_out_call(m.data, body, mask);
    err = client_conn_start(s->conn, PROTO_ATTEND_ALL, &m, deadline_ms, &how, &c->flight, info);
    if (!err) {
        c->taken = true;
        c->step = body->step;
        c->first_flag = body->first_flag;
        s->num_calls++;
    }
    return err;
}

// ---- the region

attnd_err client_service_take(client_service *s, uint64_t bytes, client_place **place,
                              void **address, attnd_errinfo *info) {
    const uint64_t unit = PROTO_REGION_ALIGN;
    uint64_t whole = bytes < s->bytes ? (bytes / unit + 1) * unit : UINT64_MAX; // never 0
    pthread_mutex_lock(&s->lock);
    *place = client_area_take(&s->area, whole);
    pthread_mutex_unlock(&s->lock);
    if (!*place) {
        return attnd_fail(info, ATTND_ENOSPC, "region_bytes",
                          "no %llu bytes left in the region, which has %llu",
                          (unsigned long long)bytes, (unsigned long long)s->bytes);
    }
    *address = s->base + (*place)->off;
    return ATTND_OK;
}

void client_service_give(client_service *s, client_place *place) {
    pthread_mutex_lock(&s->lock);
    client_area_give(&s->area, place);
    pthread_mutex_unlock(&s->lock);
}

// tensor is one of the caller's: [rows, heads, width bytes]; strides in bytes.
typedef struct tensor {
    uint8_t *data; // NULL = not there
    uint64_t rows, heads, width, row, head;
    uint32_t stride_token, stride_head; // as the caller gave them
} tensor;

static tensor tensor_of(const void *data, uint64_t rows, uint64_t heads, uint64_t dim,
                        uint32_t stride_token, uint32_t stride_head, uint64_t elem) {
    return (tensor){.data = (uint8_t *)(uintptr_t)data,
                    .rows = rows,
                    .heads = heads,
                    .width = dim * elem,
                    .row = (stride_token ? stride_token : heads * dim) * elem,
                    .head = (stride_head ? stride_head : dim) * elem,
                    .stride_token = stride_token,
                    .stride_head = stride_head};
}

// in_region says whether the daemon can use a tensor where it lies, and where that is.
static bool in_region(const client_service *s, const tensor *t, uint64_t *off) {
    enum { STRIDE = 8 }; // elements
    if (t->data < s->base || t->data >= s->base + s->bytes || t->rows == 0) {
        return false;
    }
    uint64_t at = (uint64_t)(t->data - s->base);
    uint64_t end = (t->rows - 1) * t->row + (t->heads - 1) * t->head + t->width;
    *off = at;
    return end <= s->bytes - at && at % PROTO_REGION_ALIGN == 0 && t->stride_token % STRIDE == 0 &&
           t->stride_head % STRIDE == 0;
}

// place_for makes *place one of at least bytes.  What is too small is not in use (attend).
static attnd_err place_for(client_service *s, client_place **place, const tensor *t,
                           attnd_errinfo *info) {
    const uint64_t unit = PROTO_REGION_ALIGN;
    uint64_t bytes = (t->rows * t->heads * t->width / unit + 1) * unit;
    if (*place && (*place)->bytes >= bytes) {
        return ATTND_OK;
    }
    if (*place) {
        client_area_give(&s->area, *place);
    }
    *place = client_area_take(&s->area, bytes);
    return *place ? ATTND_OK
                  : attnd_fail(info, ATTND_ENOSPC, "region_bytes",
                               "a tensor of %llu bytes finds no place in the region of %llu",
                               (unsigned long long)bytes, (unsigned long long)s->bytes);
}

// put_in says where the daemon finds an input, and what has to be copied there before.
static attnd_err put_in(client_service *s, const tensor *t, client_place **place,
                        proto_region_tensor *out, attnd_hand_over *h, attnd_errinfo *info) {
    *out = (proto_region_tensor){.off = PROTO_REGION_NONE};
    if (!t->data) {
        return ATTND_OK;
    }
    if (in_region(s, t, &out->off)) {
        out->stride_token = t->stride_token;
        out->stride_head = t->stride_head;
        return ATTND_OK;
    }
    attnd_err err = place_for(s, place, t, info);
    if (err) {
        return err;
    }
    out->off = (*place)->off;
    h->in[h->num_in++] = (attnd_service_copy){.to = s->base + (*place)->off,
                                              .from = t->data,
                                              .rows = t->rows,
                                              .heads = t->heads,
                                              .width = t->width,
                                              .to_row = t->heads * t->width,
                                              .from_row = t->row,
                                              .from_head = t->head};
    return ATTND_OK;
}

// put_out does the same for an output, which is contiguous.
static attnd_err put_out(client_service *s, const tensor *t, client_place **place, uint64_t *off,
                         attnd_hand_over *h, attnd_errinfo *info) {
    *off = PROTO_REGION_NONE;
    if (!t->data || in_region(s, t, off)) {
        return ATTND_OK;
    }
    attnd_err err = place_for(s, place, t, info);
    if (err) {
        return err;
    }
    *off = (*place)->off;
    h->out[h->num_out++] = (attnd_service_copy){.to = t->data,
                                                .from = s->base + *off,
                                                .rows = t->rows,
                                                .heads = t->heads,
                                                .width = t->width,
                                                .to_row = t->row,
                                                .from_row = t->heads * t->width,
                                                .from_head = t->width};
    return ATTND_OK;
}

// tensors_of makes the caller's tensors.
static void tensors_of(tensor t[TENSORS], const client_model *m, const attnd_attend_args *a) {
    uint64_t elem = attnd_dtype_bytes(m->dtype);
    t[Q] = tensor_of(a->q, a->rows, m->q_heads, m->head_dim, a->q_stride_token, a->q_stride_head,
                     elem);
    t[K] = tensor_of(a->k, a->new_rows, m->kv_heads, m->head_dim, a->k_stride_token,
                     a->k_stride_head, elem);
    t[V] = tensor_of(a->v, a->new_rows, m->kv_heads, m->v_head_dim, a->v_stride_token,
                     a->v_stride_head, elem);
    t[OUT] = tensor_of(a->out, a->rows, m->q_heads, m->v_head_dim, 0, 0, elem);
    t[LSE] = tensor_of(a->lse, m->q_heads, 1, a->rows, 0, 0, sizeof(float));
}

static attnd_err lay_out(client_service *s, const tensor t[TENSORS], client_place **places,
                         proto_attend_all *body, attnd_hand_over *h, attnd_errinfo *info) {
    attnd_err err = put_in(s, &t[Q], &places[Q], &body->q, h, info);
    err = err ? err : put_in(s, &t[K], &places[K], &body->k, h, info);
    err = err ? err : put_in(s, &t[V], &places[V], &body->v, h, info);
    err = err ? err : put_out(s, &t[OUT], &places[OUT], &body->out_off, h, info);
    return err ? err : put_out(s, &t[LSE], &places[LSE], &body->lse_off, h, info);
}

static void set_pair(client_service *s, attnd_hand_over *h, uint32_t pair) {
    h->pair = pair;
    h->ready = &s->flags[pair].ready;
    h->done = &s->flags[pair].done;
}

// ---- attends as they come

// await_idle waits, without the lock, until a stream is idle.
static bool await_idle(client_service *s, void *stream, uint64_t deadline_ms) {
    bool idle;
    pthread_mutex_unlock(&s->lock);
    while (!(idle = s->ops->idle(s->state, stream)) && attnd_clock_ms() < deadline_ms) {
        nanosleep(&(struct timespec){.tv_nsec = IDLE_US * 1000}, NULL);
    }
    pthread_mutex_lock(&s->lock);
    return idle;
}

static attnd_err still_busy(attnd_errinfo *info) {
    return attnd_fail(info, ATTND_ETIMEDOUT, "stream", "the stream's work has not ended in time");
}

// lane_of returns the stream's lane; the one used longest ago makes room for another.
static attnd_err lane_of(client_service *s, void *stream, uint64_t deadline_ms, lane **out,
                         attnd_errinfo *info) {
    lane *last = &s->lanes[0];
    for (uint32_t i = 0; i < LANES; i++) {
        lane *l = &s->lanes[i];
        if (l->used && l->stream == stream) {
            *out = l;
            return ATTND_OK;
        }
        last = l->used < last->used ? l : last;
    }
    uint64_t used = last->used;
    if (used && !await_idle(s, last->stream, deadline_ms)) {
        return still_busy(info);
    }
    if (last->used != used) { // another thread was faster
        return lane_of(s, stream, deadline_ms, out, info);
    }
    last->stream = stream;
    last->used = ++s->uses;
    *out = last;
    return ATTND_OK;
}

// grows says whether a place of the lane must become larger for the tensors.
static bool grows(const lane *l, const tensor t[TENSORS]) {
    bool larger = false;
    for (int i = 0; i < TENSORS; i++) {
        uint64_t bytes = t[i].rows * t[i].heads * t[i].width;
        larger |= l->places[i] && t[i].data && l->places[i]->bytes <= bytes;
    }
    return larger;
}

static attnd_err attend_now(client_service *s, const attnd_attend_args *a, const tensor t[TENSORS],
                            proto_attend_all *body, attnd_hand_over *h, uint64_t deadline_ms,
                            attnd_errinfo *info) {
    lane *l = NULL;
    attnd_err err = lane_of(s, a->stream, deadline_ms, &l, info);
    if (!err && grows(l, t) && !await_idle(s, a->stream, deadline_ms)) {
        err = still_busy(info);
    }
    if (err || (err = lay_out(s, t, l->places, body, h, info))) {
        return err;
    }
    l->used = ++s->uses;
    body->first_flag = (uint32_t)(l - s->lanes) * LANE_FLAGS + l->next_flag;
    l->next_flag = (l->next_flag + 1) % LANE_FLAGS;
    set_pair(s, h, body->first_flag);
    err = send_call(s, body, a->block_mask, deadline_ms, a->request, info);
    return err ? err : s->ops->hand_over(s->state, a->stream, h, info);
}

// ---- captures

static capture *find_capture(const client_service *s, uint64_t step) {
    capture *c = s->captures;
    while (c && c->step != step) {
        c = c->next;
    }
    return c;
}

// capture_of returns the capture that an attend belongs to; a new one stands before an earlier one
// of the same step.
static capture *capture_of(client_service *s, const open_step *o, uint64_t id) {
    capture *c = find_capture(s, o->step);
    if (c && c->id == id) {
        return c;
    }
    if ((c = calloc(1, sizeof(*c)))) {
        *c = (capture){.next = s->captures,
                       .step = o->step,
                       .id = id,
                       .model = o->model,
                       .rows = o->rows,
                       .new_rows = o->new_rows};
        s->captures = c;
    }
    return c;
}

static bool follows(const proto_attend_all *run, const proto_attend_all *next) {
    return run->first_layer + run->num_layers == next->first_layer &&
           run->first_flag + run->num_layers == next->first_flag && run->flags == next->flags &&
           memcmp(&run->q, &next->q, sizeof(*run) - offsetof(proto_attend_all, q)) == 0;
}

static attnd_err keep(capture *c, const proto_attend_all *body, attnd_errinfo *info) {
    if (c->num_runs > 0 && follows(&c->runs[c->num_runs - 1], body)) {
        c->runs[c->num_runs - 1].num_layers++;
        return ATTND_OK;
    }
    if (c->num_runs == c->max_runs) {
        uint32_t max = c->max_runs ? 2 * c->max_runs : 4;
        proto_attend_all *runs = realloc(c->runs, max * sizeof(*runs));
        if (!runs) {
            return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for a capture");
        }
        c->runs = runs;
        c->max_runs = max;
    }
    c->runs[c->num_runs++] = *body;
    return ATTND_OK;
}

static attnd_err attend_later(client_service *s, const open_step *o, uint64_t id,
                              const attnd_attend_args *a, const tensor t[TENSORS],
                              proto_attend_all *body, attnd_hand_over *h, attnd_errinfo *info) {
    capture *c = capture_of(s, o, id);
    if (!c) {
        return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for a capture");
    }
    if (s->next_flag == s->num_flags) {
        return attnd_fail(info, ATTND_ENOSPC, "engine", "%u attends are captured already",
                          s->num_flags - LANES * LANE_FLAGS);
    }
    attnd_err err = lay_out(s, t, c->places, body, h, info);
    if (err) {
        return err;
    }
    body->first_flag = s->next_flag;
    body->step = 0;
    set_pair(s, h, body->first_flag);
    err = s->ops->hand_over(s->state, a->stream, h, info);
    if (!err && !(err = keep(c, body, info))) {
        s->next_flag++;
    }
    return err;
}

// ---- steps

static void add_up(const attnd_engine_step *step, open_step *o) {
    for (uint32_t i = 0; i < step->num_seqs; i++) {
        const attnd_step_seq *seq = &step->seqs[i];
        uint32_t own = seq->new_len ? seq->new_len - seq->cached : 0;
        uint32_t rows = seq->new_len ? own : seq->q_len;
        o->new_rows += own;
        o->rows += rows;
        o->is_long |= rows > FEW;
    }
}

attnd_err client_service_step_open(client_service *s, const attnd_engine_step *step,
                                   attnd_errinfo *info) {
    pthread_mutex_lock(&s->lock);
    open_step *o = s->steps;
    while (o && o->step) {
        o = o->next;
    }
    open_step *next = o ? o->next : s->steps;
    if (!o && (o = calloc(1, sizeof(*o)))) {
        s->steps = o;
    }
    if (o) {
        *o = (open_step){.next = next, .step = step->step, .model = step->model};
        add_up(step, o);
    }
    pthread_mutex_unlock(&s->lock);
    return o ? ATTND_OK : attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for a step");
}

void client_service_step_close(client_service *s, uint64_t step) {
    pthread_mutex_lock(&s->lock);
    open_step *o = find_step(s, step);
    if (o) {
        o->step = 0;
    }
    pthread_mutex_unlock(&s->lock);
}

static attnd_err check_stream(open_step *o, void *stream, attnd_errinfo *info) {
    if (o->has_stream && o->stream != stream) {
        return attnd_fail(info, ATTND_EINVAL, "stream", "the step's other layers are in another");
    }
    o->has_stream = true;
    o->stream = stream;
    return ATTND_OK;
}

static attnd_err check_args(const open_step *o, const attnd_attend_args *a, attnd_errinfo *info) {
    if (a->model != o->model) {
        return attnd_fail(info, ATTND_EINVAL, "model", "the step is of model %u", o->model);
    }
    if (a->rows != o->rows || a->new_rows != o->new_rows) {
        return attnd_fail(info, ATTND_EINVAL, a->rows != o->rows ? "rows" : "new_rows",
                          "%u rows, %u new: the step has %u and %u", a->rows, a->new_rows, o->rows,
                          o->new_rows);
    }
    return client_attend_check_mask(a, info);
}

static attnd_err attend(client_service *s, const client_model *model, const attnd_attend_args *a,
                        uint64_t deadline_ms, attnd_errinfo *info) {
    open_step *o = find_step(s, a->step);
    uint64_t id = 0;
    attnd_err err = o ? check_args(o, a, info) : not_open(info);
    if (err || (err = s->ops->capture(s->state, a->stream, &id, info))) {
        return err;
    }
    tensor t[TENSORS];
    tensors_of(t, model, a);
    attnd_hand_over h = {.num_in = 0};
    proto_attend_all body = {.step = a->step, .first_layer = a->layer, .num_layers = 1};
    body.flags = (a->lse ? PROTO_ATTEND_LSE : 0u) | (a->partial ? PROTO_ATTEND_PARTIAL : 0u) |
                 (a->block_mask ? PROTO_ATTEND_BLOCK_MASK : 0u) |
                 (o->is_long ? PROTO_ATTEND_AT_FLAGS : 0u);
    h.at_flags = o->is_long;
    if (id && a->block_mask) {
        return attnd_fail(info, ATTND_ENOTSUP, "block_mask", "not in a graph that is captured");
    }
    if (id) {
        return attend_later(s, o, id, a, t, &body, &h, info);
    }
    err = check_stream(o, a->stream, info);
    return err ? err : attend_now(s, a, t, &body, &h, deadline_ms, info);
}

attnd_err client_service_attend(client_service *s, const client_model *model,
                                const attnd_attend_args *args, int32_t timeout_ms,
                                attnd_errinfo *info) {
    pthread_mutex_lock(&s->lock);
    attnd_err err = attend(s, model, args, attnd_clock_ms() + (uint64_t)timeout_ms, info);
    pthread_mutex_unlock(&s->lock);
    return err;
}

static attnd_err replay(client_service *s, uint64_t captured, uint64_t step, void *stream,
                        uint64_t deadline_ms, attnd_errinfo *info) {
    open_step *o = find_step(s, step);
    const capture *c = captured ? find_capture(s, captured) : NULL;
    if (!o) {
        return not_open(info);
    }
    if (!c || c->model != o->model) {
        return attnd_fail(info, ATTND_ESTALE, "captured",
                          "nothing was captured during such a step of the model");
    }
    if (c->rows != o->rows || c->new_rows != o->new_rows) {
        return attnd_fail(info, ATTND_EINVAL, "rows",
                          "captured with %u rows, %u new: the step has %u and %u", c->rows,
                          c->new_rows, o->rows, o->new_rows);
    }
    attnd_err err = check_stream(o, stream, info);
    for (uint32_t i = 0; i < c->num_runs && !err; i++) {
        proto_attend_all body = c->runs[i];
        body.step = step;
        err = send_call(s, &body, NULL, deadline_ms, NULL, info);
    }
    return err;
}

attnd_err client_service_replay(client_service *s, uint64_t captured, uint64_t step, void *stream,
                                int32_t timeout_ms, attnd_errinfo *info) {
    pthread_mutex_lock(&s->lock);
    attnd_err err =
        replay(s, captured, step, stream, attnd_clock_ms() + (uint64_t)timeout_ms, info);
    pthread_mutex_unlock(&s->lock);
    return err;
}

// collect ends all calls of a step, and returns whether there were any.  Lock held.
static bool collect(client_service *s, uint64_t step, uint64_t deadline_ms) {
    call *c = find_call(s, step);
    bool any = c != NULL;
    for (; c; c = find_call(s, step)) {
        finish_or_wait(s, c, deadline_ms);
    }
    return any;
}

attnd_err client_service_ready(client_service *s, uint64_t step, int32_t timeout_ms,
                               attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    pthread_mutex_lock(&s->lock);
    collect(s, step, attnd_clock_ms() + (uint64_t)timeout_ms);
    open_step *o = find_step(s, step);
    if (o && o->err) {
        err = o->err;
        o->err = ATTND_OK;
        if (info) {
            *info = o->info;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return err;
}

attnd_err client_service_settle(client_service *s, uint64_t step, int32_t timeout_ms,
                                attnd_errinfo *info) {
    pthread_mutex_lock(&s->lock);
    open_step *o = find_step(s, step);
    bool idle =
        !o || !o->has_stream || await_idle(s, o->stream, attnd_clock_ms() + (uint64_t)timeout_ms);
    pthread_mutex_unlock(&s->lock);
    return idle ? ATTND_OK : still_busy(info);
}

bool client_service_collect(client_service *s, uint64_t step, int32_t timeout_ms) {
    pthread_mutex_lock(&s->lock);
    bool any = collect(s, step, attnd_clock_ms() + (uint64_t)timeout_ms);
    pthread_mutex_unlock(&s->lock);
    return any;
}

// ---- life

static attnd_err map_flags(client_service *s, const client_attached *a, attnd_errinfo *info) {
    void *flags =
        mmap(NULL, a->region.flags_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, a->flags_fd, 0);
    if (flags == MAP_FAILED) {
        return attnd_fail(info, ATTND_ENOMEM, "engine", "the flags cannot be mapped");
    }
    s->head = flags;
    s->flags_bytes = a->region.flags_bytes;
    s->flags = (proto_flag *)(void *)((uint8_t *)flags + PROTO_FLAGS_HEAD_BYTES);
    s->num_flags = a->region.num_flags;
    s->next_flag = LANES * LANE_FLAGS;
    return ATTND_OK;
}

static attnd_err map_region(client_service *s, const client_attached *a, attnd_errinfo *info) {
    attnd_service_opts opts = {.fd = a->region_fd,
                               .bytes = a->region.bytes,
                               .pairs_off = a->region.pairs_off,
                               .flags = s->head,
                               .flags_bytes = s->flags_bytes};
    void *base = NULL;
    memcpy(opts.device, a->region.device, sizeof(opts.device));
    attnd_err err = s->ops->open(&s->state, &base, &opts, info);
    s->base = base;
    s->bytes = a->region.pairs_off ? a->region.pairs_off : a->region.bytes;
    client_area_init(&s->area, s->bytes);
    return err;
}

attnd_err client_service_open(client_service **out, client_conn *conn, const attnd_service *ops,
                              const client_attached *a, void (*gone)(void *ctx),
                              attnd_errinfo *info) {
    client_service *s = calloc(1, sizeof(*s));
    attnd_err err =
        s ? ATTND_OK : attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for an engine");
    if (!err) {
        s->ops = ops;
        s->conn = conn;
        pthread_mutex_init(&s->lock, NULL);
        pthread_cond_init(&s->ended, NULL);
        err = map_flags(s, a, info);
    }
    if (!err && !(err = map_region(s, a, info))) {
        err = client_watch_start(&s->watch, a->fd, s->flags, s->num_flags, gone, conn, info);
        s->watches = !err;
    }
    if (err) {
        client_service_close(s);
        return err;
    }
    *out = s;
    return ATTND_OK;
}

// client_service_close: the engine waits for the client's streams, which the watching thread lets
// run to their end.
void client_service_close(client_service *s) {
    if (!s) {
        return;
    }
    if (s->state) {
        s->ops->close(s->state);
    }
    if (s->watches) {
        client_watch_stop(&s->watch);
    }
    if (s->head) {
        munmap(s->head, s->flags_bytes);
    }
    for (capture *c; (c = s->captures);) {
        s->captures = c->next;
        free(c->runs);
        free(c);
    }
    for (open_step *o; (o = s->steps);) {
        s->steps = o->next;
        free(o);
    }
    pthread_cond_destroy(&s->ended);
    pthread_mutex_destroy(&s->lock);
    free(s);
}
