// The engine for an arena in a GPU's memory: the client imports the allocation, and launches in its
// own streams.
//
// Plans lie side by side, in pinned memory and on the device (plan_set), so that one copy uploads
// all of them.  There is a set for attends as they come, with a plan for each layer, and one for
// each capture, whose places on the device a graph's kernels know: there, layers that differ in
// nothing but where their tensors lie share a plan.  A replay writes the plans for the next step
// into the half of the pinned memory that is not being uploaded, and copies it, and the step's
// tables, in the stream.
//
//     host     plan t+1 -> half 1 | plan t+2 -> half 0 (once upload t has ended) | ...
//     stream   upload t, graph t  | upload t+1, graph t+1                        | ...
//
// A step's memory is used again when the event behind its work has passed.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attn_engine.h"
#include "attention/attn_engine_core.h"
#include "attention/cuda/attn_cuda.h"
#include "attention/cuda/attn_cuda_engine.h"
#include "attention/cuda/attn_cuda_enter.h"
#include "attention/cuda/attn_cuda_error.h"
#include "attention/cuda/attn_cuda_memory.h"
#include "attention/cuda/attn_cuda_plan.h"

enum { HALVES = 2 };

#define TRY_CUDA(call)                                 \
    do {                                               \
        cudaError_t code = (call);                     \
        if (code != cudaSuccess) {                     \
            err = attn_cuda_failed(code, #call, info); \
            goto end;                                  \
        }                                              \
    } while (0)

typedef struct plan_set {
    struct plan_set *next;
    const attn_engine_model *model;
    uint64_t captured; // the step that was open then; 0 = for attends as they come
    uint64_t step;     // 0 captured: the step that it is used for
    uint32_t max_records, num_layers;
    uint64_t stride;
    uint8_t *host, *device; // [HALVES, num_layers, stride], [num_layers, stride]
    attn_cuda_plan **plans; // [num_layers], by layer; of a capture, num_plans in its order
    uint32_t *kernels;      // [num_layers], that each needs; 0 = not planned in this step
    uint32_t num_plans;
    attnd_attend_args *args; // [num_layers], of the capture: what each plan is made for
    bool *attends;           // [num_layers], layers in the capture
    cudaEvent_t uploaded[HALVES];
    uint32_t half;
} plan_set;

typedef struct cuda_engine {
    int device;
    attn_cuda *cuda;
    attn_cuda_memory arena;
    plan_set *sets;
} cuda_engine;

static attn_cuda_entered enter(const cuda_engine *c) {
    return attn_cuda_enter(c->device);
}

// ---- sets of plans

static void free_set(plan_set *set) {
    for (uint32_t l = 0; set->plans && l < set->num_layers; l++) {
        attn_cuda_plan_free(set->plans[l]);
    }
    for (int h = 0; h < HALVES; h++) {
        if (set->uploaded[h]) {
            (void)cudaEventDestroy(set->uploaded[h]);
        }
    }
    (void)cudaFreeHost(set->host);
    (void)cudaFree(set->device);
    free(set->plans);
    free(set->args);
    free(set->attends);
    free(set->kernels);
    free(set);
}

static attnd_err make_set(cuda_engine *c, const attn_engine_model *model, uint64_t captured,
                          uint32_t max_records, plan_set **out, attnd_errinfo *info) {
    const attn_shape *shape = &model->attn->shape;
    uint32_t n = model->attn->num_layers;
    attnd_err err = ATTND_OK;
    plan_set *set = calloc(1, sizeof(*set));
    if (!set) {
        return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for plans");
    }
    *set = (plan_set){.model = model,
                      .captured = captured,
                      .max_records = max_records,
                      .num_layers = n,
                      .stride = attn_cuda_plan_room(c->cuda, shape, max_records),
                      .plans = calloc(n, sizeof(*set->plans)),
                      .args = calloc(n, sizeof(*set->args)),
                      .attends = calloc(n, sizeof(*set->attends)),
                      .kernels = calloc(n, sizeof(*set->kernels))};
    if (!set->plans || !set->args || !set->attends || !set->kernels) {
        err = attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for plans");
        goto end;
    }
    for (int h = 0; h < HALVES; h++) {
        TRY_CUDA(cudaEventCreateWithFlags(&set->uploaded[h], cudaEventDisableTiming));
    }
    TRY_CUDA(cudaHostAlloc((void **)&set->host, HALVES * n * set->stride, cudaHostAllocDefault));
    TRY_CUDA(cudaMalloc((void **)&set->device, n * set->stride));
    for (uint32_t l = 0; l < n && !err; l++) {
        err = attn_cuda_plan_create_at(&set->plans[l], c->cuda, shape, max_records,
                                       set->host + l * set->stride, set->device + l * set->stride,
                                       info);
    }
end:
    if (err) {
        free_set(set);
        return err;
    }
    set->next = c->sets;
    c->sets = set;
    *out = set;
    return ATTND_OK;
}

static plan_set *find_set(const cuda_engine *c, const attn_engine_model *model, uint64_t captured) {
    plan_set *set = c->sets;
    while (set && (set->captured != captured || (model && set->model != model))) {
        set = set->next;
    }
    return set;
}

// records_of returns how many records a launch takes at most.
static uint32_t records_of(const cuda_engine *c, const attn_params *p) {
    const attn_cuda_masks masks = attn_cuda_takes_masks(c->cuda, &p->shape);
    uint64_t num = 0;
    for (uint32_t i = 0; i < p->num_rows; i++) {
        num += attn_cuda_row_records(&p->shape, &p->rows[i], masks);
    }
    return num < UINT32_MAX ? (uint32_t)num : UINT32_MAX;
}

// set_of returns the set for attends as they come, with room for the launch.  A larger one takes
// its place when all that was launched with it has ended.
static attnd_err set_of(cuda_engine *c, const attn_engine_model *model, const attn_params *p,
                        plan_set **out, attnd_errinfo *info) {
    plan_set *set = find_set(c, model, 0);
    uint32_t records = records_of(c, p);
    if (set && set->max_records >= records) {
        *out = set;
        return ATTND_OK;
    }
    attnd_err err = ATTND_OK;
    if (set) {
        TRY_CUDA(cudaDeviceSynchronize());
        plan_set **at = &c->sets;
        while (*at != set) {
            at = &(*at)->next;
        }
        *at = set->next;
        records = records > 2 * set->max_records ? records : 2 * set->max_records;
        free_set(set);
    }
    return make_set(c, model, 0, records, out, info);
end:
    return err;
}

// ---- launches

// show_tables copies a step's tables, positions and tree masks in the stream, once, and lists of
// block masks as they come.
static attnd_err show_tables(attn_engine_step *s, void *stream, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    if (s->uploaded && s->stream != stream) {
        return attnd_fail(info, ATTND_EINVAL, "stream", "the step's other layers are in another");
    }
    s->runs = true; // from here on the stream uses its memory
    if (!s->uploaded) {
        s->stream = stream;
        TRY_CUDA(cudaMemcpyAsync(s->memory.device, s->memory.host, s->used, cudaMemcpyHostToDevice,
                                 (cudaStream_t)stream));
        s->uploaded = true;
    }
    if (s->lists_shown < s->lists_used) {
        TRY_CUDA(cudaMemcpyAsync(s->lists.device + s->lists_shown, s->lists.host + s->lists_shown,
                                 s->lists_used - s->lists_shown, cudaMemcpyHostToDevice,
                                 (cudaStream_t)stream));
        s->lists_shown = s->lists_used;
    }
end:
    return err;
}

// begin_plan has the layer's plan written next; an upload of it that runs is waited for.
static attnd_err begin_plan(plan_set *set, const attn_engine_step *s, uint32_t layer,
                            attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    if (set->step != s->handle || set->kernels[layer]) {
        TRY_CUDA(cudaEventSynchronize(set->uploaded[0]));
    }
    if (set->step != s->handle) {
        memset(set->kernels, 0, set->num_layers * sizeof(*set->kernels));
        set->step = s->handle;
    }
end:
    return err;
}

static attnd_err run_now(cuda_engine *c, attn_engine_step *s, const attn_params *p,
                         const attnd_attend_args *args, attn_choice *choice, attnd_errinfo *info) {
    plan_set *set = NULL;
    attnd_err err = set_of(c, s->model, p, &set, info);
    if (!err) {
        err = begin_plan(set, s, args->layer, info);
    }
    if (!err) {
        err = attn_cuda_plan_set(set->plans[args->layer], p, choice, info);
    }
    if (!err) {
        err = show_tables(s, args->stream, info);
    }
    if (err) {
        return err;
    }
    attn_cuda_plan *plan = set->plans[args->layer];
    set->kernels[args->layer] = attn_cuda_plan_kernels(plan);
    err = attn_cuda_plan_upload(plan, args->stream, info);
    if (!err) {
        TRY_CUDA(cudaEventRecord(set->uploaded[0], (cudaStream_t)args->stream));
        err = attn_cuda_launch(plan, args->stream, info);
    }
end:
    return err;
}

static int64_t behind(const void *a, const void *b) {
    return (int64_t)((uintptr_t)b - (uintptr_t)a);
}

// shift_of says whether attend b's launch is a's but for where the tensors lie, and by how much.
static bool shift_of(const attn_model *m, const attnd_attend_args *a, const attnd_attend_args *b,
                     attn_cuda_shift *shift) {
    const attn_layer *x = &m->layers[a->layer], *y = &m->layers[b->layer];
    *shift = (attn_cuda_shift){.q = behind(a->q, b->q),
                               .out = behind(a->out, b->out),
                               .lse = behind(a->lse, b->lse),
                               .k_new = behind(a->k, b->k),
                               .v_new = behind(a->v, b->v),
                               .k = (int64_t)(y->k_offset - x->k_offset),
                               .v = (int64_t)(y->v_offset - x->v_offset)};
    return x->group == y->group && attn_layer_equal(m, x, y) && a->rows == b->rows &&
           a->new_rows == b->new_rows && a->partial == b->partial && !a->k == !b->k &&
           !a->lse == !b->lse && a->q_stride_token == b->q_stride_token &&
           a->q_stride_head == b->q_stride_head && a->k_stride_token == b->k_stride_token &&
           a->k_stride_head == b->k_stride_head && a->v_stride_token == b->v_stride_token &&
           a->v_stride_head == b->v_stride_head;
}

// capture adds a layer's kernels to the graph, and remembers what they are launched with.
static attnd_err capture(cuda_engine *c, const attn_engine_step *s, const attn_params *p,
                         const attnd_attend_args *args, attn_choice *choice, attnd_errinfo *info) {
    plan_set *set = find_set(c, NULL, s->handle);
    attnd_err err = set ? ATTND_OK : make_set(c, s->model, s->handle, records_of(c, p), &set, info);
    if (err) {
        return err;
    }
    attn_cuda_shift shift;
    uint32_t i = 0;
    while (i < set->num_plans && (set->kernels[i] != ATTN_CUDA_DECODE ||
                                  !shift_of(s->model->attn, &set->args[i], args, &shift))) {
        i++;
    }
    if (i == set->num_layers) {
        return attnd_fail(info, ATTND_ENOTSUP, "step",
                          "more attends were captured in it than the model has layers");
    }
    err = attn_cuda_plan_set(set->plans[i], p, choice, info);
    if (!err && i < set->num_plans) {
        err = attn_cuda_launch_shifted(set->plans[i], &shift, args->stream, info);
    } else if (!err) {
        set->args[i] = *args;
        set->kernels[i] = attn_cuda_plan_kernels(set->plans[i]);
        set->num_plans++;
        err = attn_cuda_launch(set->plans[i], args->stream, info);
    }
    set->attends[args->layer] |= !err;
    return err;
}

static attnd_err is_capturing(const void *stream, bool *out, attnd_errinfo *info) {
    enum cudaStreamCaptureStatus status;
    attnd_err err = ATTND_OK;
    TRY_CUDA(cudaStreamIsCapturing((cudaStream_t)stream, &status));
    *out = status != cudaStreamCaptureStatusNone;
end:
    return err;
}

static attnd_err run(attn_engine *e, attn_engine_step *s, const attn_params *p,
                     const attnd_attend_args *args, attn_choice *choice, attnd_errinfo *info) {
    cuda_engine *c = e->backend;
    attn_cuda_entered was = enter(c);
    attnd_err err = is_capturing(args->stream, &s->captures, info);
    if (!err) {
        err = s->captures ? capture(c, s, p, args, choice, info)
                          : run_now(c, s, p, args, choice, info);
    }
    attn_cuda_leave(was);
    return err;
}

// ---- replay

// make_plans plans what was captured for the step, into the half that is not being uploaded.
static attnd_err make_plans(attn_engine *e, plan_set *set, attn_engine_step *s,
                            attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    uint8_t *half = set->host + set->half * set->num_layers * set->stride;
    TRY_CUDA(cudaEventSynchronize(set->uploaded[set->half]));
    for (uint32_t i = 0; i < set->num_plans && !err; i++) {
        attn_rope rope;
        attn_params p;
        attn_cuda_plan_move_host(set->plans[i], half + i * set->stride);
        err = attn_engine_params(e, s, &set->args[i], &p, &rope, info);
        if (!err) {
            err = attn_cuda_plan_set(set->plans[i], &p, NULL, info);
        }
        if (!err && attn_cuda_plan_kernels(set->plans[i]) != set->kernels[i]) {
            err = attnd_fail(info, ATTND_ENOTSUP, "captured",
                             "layer %u needs other kernels than were captured", set->args[i].layer);
        }
    }
end:
    return err;
}

// upload copies the plans, at once when they allow it.
static attnd_err upload(plan_set *set, void *stream, attnd_errinfo *info) {
    uint64_t width = 0;
    bool at_once = true;
    attnd_err err = ATTND_OK;
    for (uint32_t i = 0; i < set->num_plans; i++) {
        uint64_t used = attn_cuda_plan_used(set->plans[i]);
        at_once &= used > 0;
        width = used > width ? used : width;
    }
    if (at_once) {
        const uint8_t *half = set->host + set->half * set->num_layers * set->stride;
        TRY_CUDA(cudaMemcpy2DAsync(set->device, set->stride, half, set->stride, width,
                                   set->num_plans, cudaMemcpyHostToDevice, (cudaStream_t)stream));
    }
    for (uint32_t i = 0; i < set->num_plans && !at_once && !err; i++) {
        err = attn_cuda_plan_upload(set->plans[i], stream, info);
    }
    if (!err) {
        TRY_CUDA(cudaEventRecord(set->uploaded[set->half], (cudaStream_t)stream));
    }
end:
    return err;
}

static attnd_err replay(attn_engine *e, uint64_t captured, attn_engine_step *s, void *stream,
                        attnd_errinfo *info) {
    cuda_engine *c = e->backend;
    plan_set *set = captured ? find_set(c, NULL, captured) : NULL;
    if (!set || set->model != s->model) {
        return attnd_fail(info, ATTND_ESTALE, "captured",
                          "nothing was captured during such a step of the model");
    }
    attn_cuda_entered was = enter(c);
    set->half = (set->half + 1) % HALVES;
    attnd_err err = make_plans(e, set, s, info);
    if (!err) {
        err = show_tables(s, stream, info);
    }
    if (!err) {
        err = upload(set, stream, info);
    }
    for (uint32_t l = 0; l < set->num_layers && !err; l++) {
        if (set->attends[l]) {
            attn_engine_mark(s, l);
        }
    }
    attn_cuda_leave(was);
    return err;
}

// ---- the end of a step

// note records where in the stream the step's work ends.
static attnd_err note(attn_engine_step *s, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    cudaEvent_t event = s->event;
    if (!event) {
        TRY_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        s->event = event;
    }
    TRY_CUDA(cudaEventRecord(event, (cudaStream_t)s->stream));
end:
    return err;
}

static attnd_err ready(attn_engine *e, attn_engine_step *s, attnd_errinfo *info) {
    if (!s->runs) {
        return ATTND_OK;
    }
    attn_cuda_entered was = enter(e->backend);
    attnd_err err = s->handle ? note(s, info) : ATTND_OK; // else it was noted when it was left
    if (!err) {
        TRY_CUDA(cudaEventSynchronize(s->event));
        s->runs = false;
    }
end:
    attn_cuda_leave(was);
    return err;
}

// leave: where the end cannot be noted (the stream is no more) it is waited for.
static void leave(attn_engine *e, attn_engine_step *s) {
    if (s->runs) {
        attn_cuda_entered was = enter(e->backend);
        if (note(s, NULL)) {
            (void)cudaDeviceSynchronize();
            s->runs = false;
        }
        attn_cuda_leave(was);
    }
}

static bool busy(attn_engine *e, attn_engine_step *s) {
    if (s->runs) {
        attn_cuda_entered was = enter(e->backend);
        s->runs = cudaEventQuery(s->event) == cudaErrorNotReady;
        attn_cuda_leave(was);
    }
    return s->runs;
}

static void drop(attn_engine *e, attn_engine_step *s) {
    if (ready(e, s, NULL)) {
        (void)cudaDeviceSynchronize();
    }
    if (s->event) {
        (void)cudaEventDestroy(s->event);
    }
}

// ---- memory

static attnd_err alloc(attn_engine *e, attn_engine_memory *out, size_t bytes, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    attn_engine_memory m = {.bytes = bytes};
    attn_cuda_entered was = enter(e->backend);
    TRY_CUDA(cudaHostAlloc((void **)&m.host, bytes, cudaHostAllocDefault));
    TRY_CUDA(cudaMalloc((void **)&m.device, bytes));
end:
    attn_cuda_leave(was);
    if (err) {
        (void)cudaFreeHost(m.host);
        return err;
    }
    *out = m;
    return ATTND_OK;
}

static attnd_err show(attn_engine *e, const attn_engine_memory *m, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    attn_cuda_entered was = enter(e->backend);
    TRY_CUDA(cudaMemcpy(m->device, m->host, m->bytes, cudaMemcpyHostToDevice));
end:
    attn_cuda_leave(was);
    return err;
}

static void free_memory(attn_engine *e, attn_engine_memory *m) {
    attn_cuda_entered was = enter(e->backend);
    (void)cudaFreeHost(m->host);
    (void)cudaFree(m->device);
    attn_cuda_leave(was);
}

// grow_lists makes room for at least bytes when all that was run of the step has ended.
static attnd_err grow_lists(attn_engine *e, attn_engine_step *s, size_t bytes,
                            attnd_errinfo *info) {
    attnd_err err = ready(e, s, info);
    if (err) {
        return err;
    }
    free_memory(e, &s->lists);
    s->lists = (attn_engine_memory){.host = NULL};
    s->lists_used = s->lists_shown = 0;
    return alloc(e, &s->lists, 2 * bytes, info);
}

// lists: a graph would go on with the lists that it captured, and they belong to the step.
static attnd_err lists(attn_engine *e, attn_engine_step *s, const attnd_attend_args *args,
                       size_t bytes, attn_engine_memory *out, attnd_errinfo *info) {
    const size_t aligned = (bytes + 7) / 8 * 8;
    bool captures = false;
    attn_cuda_entered was = enter(e->backend);
    attnd_err err = is_capturing(args->stream, &captures, info);
    attn_cuda_leave(was);
    if (!err && captures) {
        err = attnd_fail(info, ATTND_ENOTSUP, "block_mask", "not in a graph that is captured");
    }
    if (!err && s->lists.bytes - s->lists_used < aligned) {
        err = grow_lists(e, s, aligned, info);
    }
    if (!err) {
        *out = (attn_engine_memory){s->lists.host + s->lists_used, s->lists.device + s->lists_used,
                                    bytes};
        s->lists_used += aligned;
    }
    return err;
}

// ---- life

static attnd_err engine_open(attn_engine *e, const attnd_engine_opts *opts, attnd_errinfo *info) {
    cuda_engine *c = calloc(1, sizeof(*c));
    if (!c) {
        return attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for an engine");
    }
    e->backend = c;
    c->arena.fd = -1;
    attnd_err err = attn_cuda_engine_device(opts->device, &c->device, info);
    if (err) {
        return err;
    }
    attn_cuda_entered was = enter(c);
    TRY_CUDA(cudaFree(NULL)); // makes the context
    err = attn_cuda_memory_adopt(&c->arena, c->device, opts->bytes, opts->fd, opts->bytes, info);
    if (!err) {
        c->arena.fd = -1; // it was lent
        e->pool = (void *)(uintptr_t)c->arena.address;
        e->pool_bytes = opts->bytes;
        attn_cuda_opts cuda = {.device = c->device};
        err = attn_cuda_create(&c->cuda, &cuda, info);
    }
end:
    attn_cuda_leave(was);
    return err;
}

static void engine_close(attn_engine *e) {
    cuda_engine *c = e->backend;
    if (!c) {
        return;
    }
    attn_cuda_entered was = enter(c);
    for (plan_set *set; (set = c->sets);) {
        c->sets = set->next;
        free_set(set);
    }
    attn_cuda_free(c->cuda);
    attn_cuda_memory_close(&c->arena);
    attn_cuda_leave(was);
    free(c);
}

static attnd_err check_model(attn_engine *e, const attn_model *m, attnd_errinfo *info) {
    const cuda_engine *c = e->backend;
    attnd_err err = attn_cuda_check_shape(&m->shape, info);
    for (uint32_t l = 0; l < m->num_layers && !err; l++) {
        attn_row row = {.q_len = 0};
        attn_params p = {.shape = m->shape};
        attn_layer_fill(m, l, &row);
        err = attn_cuda_check_row(&p, &row, attn_cuda_takes_masks(c->cuda, &m->shape), l, info);
    }
    return err;
}

static const attn_engine_ops ops = {.open = engine_open,
                                    .close = engine_close,
                                    .check_model = check_model,
                                    .alloc = alloc,
                                    .show = show,
                                    .free = free_memory,
                                    .lists = lists,
                                    .run = run,
                                    .replay = replay,
                                    .ready = ready,
                                    .leave = leave,
                                    .busy = busy,
                                    .drop = drop};

static attnd_err open_device(void **state, const attnd_engine_opts *opts, attnd_errinfo *info) {
    return attn_engine_open(state, &ops, opts, info);
}

static const attnd_engine engine = {ATTN_ENGINE_CORE, .name = "cuda", .open = open_device};

const attnd_engine *attn_engine_cuda(void) {
    return &engine;
}
