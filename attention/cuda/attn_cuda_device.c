// The CUDA device behind attn_device.h.
//
// A plan lies in pinned memory that its upload reads, so there is one for each KV shape and buffer;
// they are made when a shape is first met, and the one used longest ago makes room for another.
#include "attention/cuda/attn_cuda_device.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/cuda/attn_cuda.h"
#include "attention/cuda/attn_cuda_error.h"
#include "attention/cuda/attn_cuda_flag.h"
#include "attention/cuda/attn_cuda_memory.h"
#include "attention/cuda/attn_cuda_plan.h"
#include "attention/cuda/hand_over.h"
#include "proto/clock.h"

enum {
    PLANS = 32,              // of one buffer: KV shapes met lately
    MAX_RECORDS = 16 * 1024, // of a plan, 5 MiB; a launch that needs more is refused as too large
    DECODE_TOKENS = 8,       // query tokens a row that a new plan has room for
    EARLY_US = 50,           // an upload is early when its launch comes so much later
    EARLY_MOST = 16,
};

#define TRY_CUDA(call)                                    \
    do {                                                  \
        cudaError_t result = (call);                      \
        if (result != cudaSuccess) {                      \
            return attn_cuda_failed(result, #call, info); \
        }                                                 \
    } while (0)

typedef struct plan_slot {
    attn_cuda_plan *plan; // NULL = none
    attn_shape shape;
    uint64_t used;    // order of the last use
    uint32_t records; // that the plan has room for
} plan_slot;

typedef struct cuda_device {
    attn_device pub; // first
    int32_t ordinal;
    uint32_t max_rows;
    attn_cuda *engine;
    attn_cuda_memory arena;
    cudaStream_t stream, uploads, copies; // copies: of read and write
    cudaEvent_t marks[ATTN_DEVICE_BUFFERS], uploaded[ATTN_DEVICE_BUFFERS];
    bool aside[ATTN_DEVICE_BUFFERS];   // the last upload was in `uploads`
    bool awaited[ATTN_DEVICE_BUFFERS]; // and is not known to have ended
    uint64_t upload_us[ATTN_DEVICE_BUFFERS];
    int32_t early; // uploads launched lately: early ones less others, 0 to EARLY_MOST
    hand_over_gate *outcomes, *told; // [ATTN_DEVICE_BUFFERS], on the device; pinned
    plan_slot plans[ATTN_DEVICE_BUFFERS][PLANS];
    attn_cuda_plan *planned[ATTN_DEVICE_BUFFERS];
    uint64_t uses;
} cuda_device;

// of makes the device current, which is a matter of the calling thread.
static cuda_device *of(attn_device *pub) {
    cuda_device *d = (cuda_device *)pub;
    (void)cudaSetDevice(d->ordinal);
    return d;
}

// ---- opening

static attnd_err find_device(int32_t ordinal, attnd_errinfo *info) {
    attnd_err err = attn_cuda_driver_check(info);
    if (err) {
        return err;
    }
    int num = 0;
    cudaError_t code = cudaGetDeviceCount(&num);
    if (code == cudaErrorNoDevice || (code == cudaSuccess && num == 0)) {
        return attnd_fail(info, ATTND_ENOTSUP, "device", "the machine has no CUDA device");
    }
    if (code != cudaSuccess) {
        return attn_cuda_failed(code, "cudaGetDeviceCount", info);
    }
    if (ordinal >= num) {
        return attnd_fail(info, ATTND_ENOTSUP, "device", "there is no cuda:%d, the machine has %d",
                          ordinal, num);
    }
    TRY_CUDA(cudaSetDevice(ordinal));
    return ATTND_OK;
}

static attnd_err make_buffers(cuda_device *d, uint64_t bytes, attnd_errinfo *info) {
    TRY_CUDA(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
    TRY_CUDA(cudaStreamCreateWithFlags(&d->uploads, cudaStreamNonBlocking));
    TRY_CUDA(cudaStreamCreateWithFlags(&d->copies, cudaStreamNonBlocking));
    for (int i = 0; i < ATTN_DEVICE_BUFFERS; i++) {
        attn_device_buffer *b = &d->pub.buffers[i];
        b->bytes = bytes;
        TRY_CUDA(cudaHostAlloc((void **)&b->host, bytes, cudaHostAllocDefault));
        TRY_CUDA(cudaMalloc((void **)&b->device, bytes));
        TRY_CUDA(cudaEventCreateWithFlags(&d->marks[i], cudaEventDisableTiming));
        TRY_CUDA(cudaEventCreateWithFlags(&d->uploaded[i], cudaEventDisableTiming));
    }
    return ATTND_OK;
}

// make_gates: a GPU before sm_90 has none.
static attnd_err make_gates(cuda_device *d, attnd_errinfo *info) {
    const size_t bytes = ATTN_DEVICE_BUFFERS * sizeof(hand_over_gate);
    d->pub.waits = hand_over_prepare() == cudaSuccess;
    (void)cudaGetLastError();
    TRY_CUDA(cudaMalloc((void **)&d->outcomes, bytes));
    TRY_CUDA(cudaHostAlloc((void **)&d->told, bytes, cudaHostAllocDefault));
    return ATTND_OK;
}

static attnd_err make_engine(cuda_device *d, attnd_errinfo *info) {
    struct cudaDeviceProp prop;
    TRY_CUDA(cudaGetDeviceProperties(&prop, d->ordinal));
    snprintf(d->pub.name, sizeof(d->pub.name), "%.63s", prop.name);
    memcpy(d->pub.uuid, &prop.uuid, sizeof(d->pub.uuid));
    int mps = 0; // not known to drivers before 12.3, which then say so by an error
    d->pub.mps =
        cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, d->ordinal) == cudaSuccess && mps != 0;
    (void)cudaGetLastError();
    attn_cuda_opts opts = {.device = d->ordinal};
    attnd_err err = attn_cuda_create(&d->engine, &opts, info);
    if (!err) {
        d->pub.kernels = attn_cuda_kernel(d->engine);
        err = attn_cuda_memory_unit(d->ordinal, &d->pub.region_unit, info);
    }
    return err;
}

static void device_close(attn_device *pub) {
    cuda_device *d = of(pub);
    (void)cudaDeviceSynchronize();
    for (int i = 0; i < ATTN_DEVICE_BUFFERS; i++) {
        for (int k = 0; k < PLANS; k++) {
            attn_cuda_plan_free(d->plans[i][k].plan);
        }
        if (d->marks[i]) {
            (void)cudaEventDestroy(d->marks[i]);
        }
        if (d->uploaded[i]) {
            (void)cudaEventDestroy(d->uploaded[i]);
        }
        (void)cudaFreeHost(pub->buffers[i].host);
        (void)cudaFree(pub->buffers[i].device);
    }
    if (d->stream) {
        (void)cudaStreamDestroy(d->stream);
    }
    if (d->uploads) {
        (void)cudaStreamDestroy(d->uploads);
    }
    if (d->copies) {
        (void)cudaStreamDestroy(d->copies);
    }
    (void)cudaFree(d->outcomes);
    (void)cudaFreeHost(d->told);
    attn_cuda_free(d->engine);
    attn_cuda_memory_close(&d->arena);
    free(d);
}

static attnd_err device_open(attn_device **out, const attn_device_opts *opts, attnd_errinfo *info) {
    attnd_err err = find_device(opts->ordinal, info);
    if (err) {
        return err;
    }
    cuda_device *d = calloc(1, sizeof(*d));
    if (!d) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a device");
    }
    d->pub.ops = &attn_cuda_device_ops;
    d->ordinal = opts->ordinal;
    d->early = EARLY_MOST;
    d->max_rows = opts->max_rows;
    d->arena.fd = -1;
    err = make_engine(d, info); // the context is current from here on
    if (!err && opts->adopt_bytes) {
        err = attn_cuda_memory_adopt(&d->arena, d->ordinal, opts->arena_bytes, opts->arena_fd,
                                     opts->adopt_bytes, info);
    } else if (!err) {
        err = attn_cuda_memory_open(&d->arena, d->ordinal, opts->arena_bytes, info);
    }
    if (!err) {
        err = make_buffers(d, opts->buffer_bytes, info);
    }
    if (!err) {
        err = make_gates(d, info);
    }
    if (err) {
        device_close(&d->pub);
        return err;
    }
    d->pub.arena = (void *)(uintptr_t)d->arena.address;
    d->pub.arena_bytes = d->arena.bytes;
    d->pub.arena_fd = d->arena.fd;
    *out = &d->pub;
    return ATTND_OK;
}

// ---- plans

// records_of returns for how many records a plan of a launch is to have room: max_rows decodes of
// DECODE_TOKENS tokens, or all that the launch needs when nothing of it is prefilled, within
// MAX_RECORDS.
static uint32_t records_of(const cuda_device *d, const attn_params *p) {
    const attn_cuda_masks masks = attn_cuda_takes_masks(d->engine, &p->shape);
    const attn_row decode = {.q_count = DECODE_TOKENS};
    uint64_t least = d->max_rows * attn_cuda_row_records(&p->shape, &decode, masks);
    uint64_t num = 0;
    for (uint32_t i = 0; i < p->num_rows; i++) {
        num += attn_cuda_row_records(&p->shape, &p->rows[i], masks);
    }
    num = num < least ? least : num;
    return num < MAX_RECORDS ? (uint32_t)num : MAX_RECORDS;
}

// slot_of returns the slot of a shape's plan, or that of the plan used longest ago.
static plan_slot *slot_of(cuda_device *d, uint32_t buffer, const attn_shape *shape) {
    plan_slot *oldest = &d->plans[buffer][0];
    for (int k = 0; k < PLANS; k++) {
        plan_slot *slot = &d->plans[buffer][k];
        if (slot->plan && memcmp(&slot->shape, shape, sizeof(*shape)) == 0) {
            return slot;
        }
        oldest = slot->used < oldest->used ? slot : oldest;
    }
    return oldest;
}

// find_plan finds or makes the plan of a launch's shape; one that is too small for the launch is
// made anew, twice as large at least.  Without memory for that it stays: it refuses the launch, and
// fewer rows may fit.
static attnd_err find_plan(cuda_device *d, uint32_t buffer, const attn_params *p,
                           attn_cuda_plan **out, attnd_errinfo *info) {
    plan_slot *slot = slot_of(d, buffer, &p->shape);
    uint32_t records = records_of(d, p);
    bool is_found = slot->plan && memcmp(&slot->shape, &p->shape, sizeof(p->shape)) == 0;
    if (!is_found) {
        attn_cuda_plan_free(slot->plan);
        *slot = (plan_slot){.plan = NULL};
    }
    if (slot->records < records) {
        uint32_t twice = 2 * slot->records < MAX_RECORDS ? 2 * slot->records : MAX_RECORDS;
        records = records < twice ? twice : records;
        attn_cuda_plan *plan = NULL;
        attnd_err err = attn_cuda_plan_create(&plan, d->engine, &p->shape, records, info);
        if (err && !is_found) {
            return err;
        }
        if (!err) {
            attn_cuda_plan_free(slot->plan);
            *slot = (plan_slot){.plan = plan, .shape = p->shape, .records = records};
        }
    }
    slot->used = ++d->uses;
    *out = slot->plan;
    return ATTND_OK;
}

static attnd_err device_plan(attn_device *pub, uint32_t buffer, const attn_params *p,
                             attn_choice *choice, attnd_errinfo *info) {
    cuda_device *d = of(pub);
    d->planned[buffer] = NULL;
    attn_cuda_plan *plan = NULL;
    attnd_err err = find_plan(d, buffer, p, &plan, info);
    if (!err) {
        err = attn_cuda_plan_set(plan, p, choice, info);
    }
    if (!err) {
        d->planned[buffer] = plan;
    }
    return err;
}

static attnd_err device_check_row(const attn_device *pub, const attn_shape *shape,
                                  const attn_row *row, attnd_errinfo *info) {
    const cuda_device *d = (const cuda_device *)pub;
    attn_params p = {.shape = *shape};
    return attn_cuda_check_row(&p, row, attn_cuda_takes_masks(d->engine, shape), 0, info);
}

// ---- in stream order

// meet_upload is called for a launch: it waits for its upload, and counts whether that was early.
static attnd_err meet_upload(cuda_device *d, uint32_t buffer, attnd_errinfo *info) {
    if (attnd_clock_us() - d->upload_us[buffer] > EARLY_US) {
        d->early += d->early < EARLY_MOST;
    } else {
        d->early -= d->early > 0;
    }
    if (d->awaited[buffer]) {
        TRY_CUDA(cudaStreamWaitEvent(d->stream, d->uploaded[buffer], 0));
    }
    return ATTND_OK;
}

static attnd_err device_launch(attn_device *pub, uint32_t buffer, attnd_errinfo *info) {
    cuda_device *d = of(pub);
    attnd_err err = meet_upload(d, buffer, info);
    return err ? err : attn_cuda_launch(d->planned[buffer], d->stream, info);
}

static attnd_err copy_in(cuda_device *d, uint32_t buffer, uint64_t off, uint64_t bytes,
                         cudaStream_t stream, attnd_errinfo *info) {
    const attn_device_buffer *b = &d->pub.buffers[buffer];
    TRY_CUDA(
        cudaMemcpyAsync(b->device + off, b->host + off, bytes, cudaMemcpyHostToDevice, stream));
    return d->planned[buffer] ? attn_cuda_plan_upload(d->planned[buffer], stream, info) : ATTND_OK;
}

// device_upload: no work uses the buffer, so its copies need not follow any.  In the launches'
// stream they cost the launch behind them 2 us and its flag another 2, also when they ended long
// before (H200, MPS).  In a stream of their own they cost a launch that has to wait for them more,
// so they are made there while most uploads are early.
static attnd_err device_upload(attn_device *pub, uint32_t buffer, uint64_t off, uint64_t bytes,
                               attnd_errinfo *info) {
    cuda_device *d = of(pub);
    bool aside = d->early > EARLY_MOST / 2;
    cudaStream_t stream = aside ? d->uploads : d->stream;
    attnd_err err = copy_in(d, buffer, off, bytes, stream, info);
    d->aside[buffer] = d->awaited[buffer] = aside;
    d->upload_us[buffer] = attnd_clock_us();
    if (aside) {
        TRY_CUDA(cudaEventRecord(d->uploaded[buffer], stream));
    }
    return err;
}

static bool device_uploaded(attn_device *pub, uint32_t buffer) {
    cuda_device *d = (cuda_device *)pub;
    if (d->awaited[buffer]) {
        d->awaited[buffer] = cudaEventQuery(d->uploaded[buffer]) != cudaSuccess;
        (void)cudaGetLastError();
    }
    return !d->awaited[buffer];
}

static attnd_err device_download(attn_device *pub, uint32_t buffer, uint64_t off, uint64_t bytes,
                                 attnd_errinfo *info) {
    const attn_device_buffer *b = &pub->buffers[buffer];
    TRY_CUDA(cudaMemcpyAsync(b->host + off, b->device + off, bytes, cudaMemcpyDeviceToHost,
                             of(pub)->stream));
    return ATTND_OK;
}

static attnd_err device_move(attn_device *pub, uint64_t dst, uint64_t src, uint64_t row_bytes,
                             uint64_t pitch, uint64_t num_rows, attnd_errinfo *info) {
    char *arena = pub->arena;
    TRY_CUDA(cudaMemcpy2DAsync(arena + dst, pitch, arena + src, pitch, row_bytes, num_rows,
                               cudaMemcpyDeviceToDevice, of(pub)->stream));
    return ATTND_OK;
}

static attnd_err device_read(attn_device *pub, void *dst, uint64_t off, uint64_t bytes,
                             attnd_errinfo *info) {
    cuda_device *d = of(pub);
    TRY_CUDA(
        cudaMemcpyAsync(dst, (char *)pub->arena + off, bytes, cudaMemcpyDeviceToHost, d->copies));
    TRY_CUDA(cudaStreamSynchronize(d->copies));
    return ATTND_OK;
}

static attnd_err device_write(attn_device *pub, uint64_t off, const void *src, uint64_t bytes,
                              attnd_errinfo *info) {
    cuda_device *d = of(pub);
    TRY_CUDA(
        cudaMemcpyAsync((char *)pub->arena + off, src, bytes, cudaMemcpyHostToDevice, d->copies));
    TRY_CUDA(cudaStreamSynchronize(d->copies));
    return ATTND_OK;
}

static bool device_pin(attn_device *pub, void *base, uint64_t bytes) {
    (void)of(pub);
    bool good = cudaHostRegister(base, bytes, cudaHostRegisterDefault) == cudaSuccess;
    (void)cudaGetLastError();
    return good;
}

static void device_unpin(attn_device *pub, void *base) {
    (void)of(pub);
    (void)cudaHostUnregister(base);
    (void)cudaGetLastError();
}

// ---- shared with clients

static attnd_err clear(cuda_device *d, uint64_t address, uint64_t bytes, attnd_errinfo *info) {
    TRY_CUDA(cudaMemsetAsync((void *)(uintptr_t)address, 0, bytes, d->copies));
    TRY_CUDA(cudaStreamSynchronize(d->copies));
    return ATTND_OK;
}

// device_region_make: the driver clears memory between processes, not between clients of this one.
static attnd_err device_region_make(attn_device *pub, uint64_t bytes, attn_device_region *out,
                                    attnd_errinfo *info) {
    cuda_device *d = of(pub);
    attn_cuda_memory m = {.fd = -1};
    attnd_err err = attn_cuda_memory_open(&m, d->ordinal, bytes, info);
    if (!err) {
        err = clear(d, m.address, m.bytes, info);
    }
    if (err) {
        attn_cuda_memory_close(&m);
        return err;
    }
    *out = (attn_device_region){
        .address = m.address, .bytes = m.bytes, .fd = m.fd, .handle = m.handle};
    return ATTND_OK;
}

static void device_region_free(attn_device *pub, attn_device_region *r) {
    (void)of(pub);
    attn_cuda_memory m = {
        .address = r->address, .bytes = r->bytes, .fd = r->fd, .handle = r->handle};
    attn_cuda_memory_close(&m);
    *r = (attn_device_region){.fd = -1};
}

static attnd_err device_flags_map(attn_device *pub, void *base, uint64_t bytes, uint64_t *address,
                                  attnd_errinfo *info) {
    attnd_err err = attn_cuda_flag_check(of(pub)->ordinal, info);
    if (err) {
        return err;
    }
    void *mapped = NULL;
    TRY_CUDA(cudaHostRegister(base, bytes, cudaHostRegisterMapped));
    cudaError_t code = cudaHostGetDevicePointer(&mapped, base, 0);
    if (code != cudaSuccess) {
        (void)cudaHostUnregister(base);
        return attn_cuda_failed(code, "cudaHostGetDevicePointer", info);
    }
    *address = (uintptr_t)mapped;
    return ATTND_OK;
}

static attnd_err device_signal(attn_device *pub, uint64_t pair, attnd_errinfo *info) {
    return attn_cuda_flag_answer(of(pub)->stream, pair, info);
}

// ---- gates

static bool device_gates(attn_device *pub, uint32_t buffer) {
    const cuda_device *d = (const cuda_device *)pub;
    attn_cuda_plan *plan = d->planned[buffer];
    return d->pub.waits && plan && attn_cuda_plan_work(plan);
}

static attnd_err device_launch_gated(attn_device *pub, uint32_t buffer, uint64_t pair,
                                     attnd_errinfo *info) {
    cuda_device *d = of(pub);
    attn_cuda_plan *plan = d->planned[buffer];
    d->told[buffer].state = HAND_OVER_PENDING;
    attnd_err err = meet_upload(d, buffer, info);
    if (err) {
        return err;
    }
    TRY_CUDA(hand_over_wait(pair, &d->outcomes[buffer], attn_cuda_plan_work(plan),
                            ATTN_DEVICE_GATE_US, d->stream));
    err = attn_cuda_launch(plan, d->stream, info);
    if (!err) {
        TRY_CUDA(hand_over_answer(pair, &d->outcomes[buffer], &d->told[buffer], d->stream));
    }
    return err;
}

static bool device_passed(attn_device *pub, uint32_t buffer, uint32_t *waited_us) {
    const hand_over_gate *g = &((const cuda_device *)pub)->told[buffer];
    *waited_us = g->waited_us;
    return g->state == HAND_OVER_PASSED;
}

static attnd_err device_mark(attn_device *pub, uint32_t buffer, attnd_errinfo *info) {
    TRY_CUDA(cudaEventRecord(of(pub)->marks[buffer], of(pub)->stream));
    return ATTND_OK;
}

static attnd_err device_ended(attn_device *pub, uint32_t buffer, bool *ended, attnd_errinfo *info) {
    const cuda_device *d = of(pub);
    cudaError_t code = cudaEventQuery(d->marks[buffer]);
    if (code == cudaSuccess && d->aside[buffer]) {
        code = cudaEventQuery(d->uploaded[buffer]);
    }
    *ended = code != cudaErrorNotReady;
    if (code == cudaSuccess || code == cudaErrorNotReady) {
        return ATTND_OK;
    }
    return attn_cuda_failed(code, "cudaEventQuery", info);
}

// standing_error: an error of a kernel stays with the context, so that every call returns it.
static cudaError_t standing_error(attn_device *pub) {
    cudaError_t code = cudaStreamQuery(of(pub)->stream);
    (void)cudaGetLastError();
    return code == cudaErrorNotReady ? cudaSuccess : code;
}

static bool device_lost(attn_device *pub) {
    return standing_error(pub) != cudaSuccess;
}

// device_spoilt: what a kernel may end with; anything else, an error of memory or of a link, says
// nothing good of what lies there.
static bool device_spoilt(attn_device *pub) {
    switch (standing_error(pub)) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
        return false;
    default:
        return true;
    }
}

const attn_device_ops attn_cuda_device_ops = {
    .open = device_open,
    .close = device_close,
    .check_shape = attn_cuda_check_shape,
    .check_row = device_check_row,
    .plan = device_plan,
    .launch = device_launch,
    .upload = device_upload,
    .uploaded = device_uploaded,
    .download = device_download,
    .move = device_move,
    .read = device_read,
    .write = device_write,
    .pin = device_pin,
    .unpin = device_unpin,
    .region_make = device_region_make,
    .region_free = device_region_free,
    .flags_map = device_flags_map,
    .flags_unmap = device_unpin,
    .signal = device_signal,
    .gates = device_gates,
    .launch_gated = device_launch_gated,
    .passed = device_passed,
    .mark = device_mark,
    .ended = device_ended,
    .lost = device_lost,
    .spoilt = device_spoilt,
};
