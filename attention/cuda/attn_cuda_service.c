// The engine for service mode: the region imported, the flags registered, and per attend
//     copies in | ready = 1 and done = 0, wait for done | copies out
// in the caller's stream.  The two in the middle are one kernel where the client waits at device
// pairs (hand_over.h), else one batch of memory operations, which a stream under capture takes as
// one node of the graph.  The flags are written at once, as 64 bits, behind a barrier of the whole
// system, so that whoever sees ready sees q, k and v.
//
// The wait is the stream's alone: no thread takes part, and other streams go on.  It ends when the
// daemon, or libattnd in its place, stores done.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attn_engine.h"
#include "attention/cuda/attn_cuda_engine.h"
#include "attention/cuda/attn_cuda_enter.h"
#include "attention/cuda/attn_cuda_error.h"
#include "attention/cuda/attn_cuda_flag.h"
#include "attention/cuda/attn_cuda_memory.h"
#include "attention/cuda/hand_over.h"
#include "proto/client/attnd_engine.h"
#include "proto/proto_region.h"

enum { DRIVER_VERSION = 12000 }; // of the driver's functions that are used

#define TRY_CUDA(call)                                 \
    do {                                               \
        cudaError_t code = (call);                     \
        if (code != cudaSuccess) {                     \
            err = attn_cuda_failed(code, #call, info); \
            goto end;                                  \
        }                                              \
    } while (0)

typedef CUresult batch_fn(CUstream stream, unsigned count, CUstreamBatchMemOpParams *ops,
                          unsigned flags);

typedef struct service {
    int device; // of the client's streams
    attn_cuda_memory region;
    uint8_t *flags, *device_flags; // the same
    uint64_t pairs;                // device address of the region's pairs, 0 = none
    batch_fn *batch;
} service;

// ---- life

attnd_err attn_cuda_engine_device(const uint8_t uuid[16], int *out, attnd_errinfo *info) {
    attnd_err err = attn_cuda_driver_check(info);
    int num = 0;
    if (err) {
        return err;
    }
    TRY_CUDA(cudaGetDeviceCount(&num));
    for (int i = 0; i < num; i++) {
        struct cudaDeviceProp prop;
        TRY_CUDA(cudaGetDeviceProperties(&prop, i));
        if (memcmp(&prop.uuid, uuid, sizeof(prop.uuid)) == 0) {
            *out = i;
            return ATTND_OK;
        }
    }
    err = attnd_fail(info, ATTND_ENOTSUP, "engine",
                     "the daemon's memory is not of a GPU that this process sees");
end:
    return err;
}

static attnd_err current_device(uint8_t uuid[16], bool *mps, attnd_errinfo *info) {
    int device = 0, shared = 0;
    struct cudaDeviceProp prop;
    attnd_err err = attn_cuda_driver_check(info);
    if (err) {
        return err;
    }
    TRY_CUDA(cudaGetDevice(&device));
    TRY_CUDA(cudaGetDeviceProperties(&prop, device));
    memcpy(uuid, &prop.uuid, sizeof(prop.uuid));
    if (cudaDeviceGetAttribute(&shared, cudaDevAttrMpsEnabled, device) != cudaSuccess) {
        (void)cudaGetLastError(); // a driver that does not know of it
    }
    *mps = shared != 0;
end:
    return err;
}

static attnd_err find_batch(service *s, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    enum cudaDriverEntryPointQueryResult found;
    void *function = NULL;
#if CUDART_VERSION >= 12050
    TRY_CUDA(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &function, DRIVER_VERSION,
                                              cudaEnableDefault, &found));
#else
    TRY_CUDA(cudaGetDriverEntryPoint("cuStreamBatchMemOp", &function, cudaEnableDefault, &found));
#endif
    if (found != cudaDriverEntryPointSuccess) {
        return attnd_fail(info, ATTND_ENOTSUP, "engine",
                          "the NVIDIA driver has no cuStreamBatchMemOp");
    }
    memcpy(&s->batch, &function, sizeof(function)); // ISO C has no cast for it
end:
    return err;
}

// map_region: the region may be of another GPU than the client's.
static attnd_err map_region(service *s, const attnd_service_opts *opts, attnd_errinfo *info) {
    int owner = 0, reaches = 1;
    attnd_err err = attn_cuda_engine_device(opts->device, &owner, info);
    if (err) {
        return err;
    }
    if (owner != s->device) {
        TRY_CUDA(cudaDeviceCanAccessPeer(&reaches, s->device, owner));
    }
    if (!reaches) {
        return attnd_fail(info, ATTND_ENOTSUP, "engine",
                          "device %d has no peer access to the daemon's, which is %d here",
                          s->device, owner);
    }
    err = attn_cuda_memory_adopt(&s->region, owner, opts->bytes, opts->fd, opts->bytes, info);
    if (!err) {
        s->region.fd = -1; // it was lent
        err = owner != s->device ? attn_cuda_memory_reach(&s->region, s->device, info) : ATTND_OK;
    }
end:
    return err;
}

static attnd_err register_flags(service *s, const attnd_service_opts *opts, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    void *device_flags = NULL;
    TRY_CUDA(cudaHostRegister(opts->flags, opts->flags_bytes,
                              cudaHostRegisterMapped | cudaHostRegisterPortable));
    s->flags = opts->flags;
    TRY_CUDA(cudaHostGetDevicePointer(&device_flags, opts->flags, 0));
    s->device_flags = device_flags;
end:
    return err;
}

static void service_close(void *state) {
    service *s = state;
    attn_cuda_entered was = attn_cuda_enter(s->device);
    (void)cudaDeviceSynchronize();
    if (s->flags) {
        (void)cudaHostUnregister(s->flags);
    }
    attn_cuda_memory_close(&s->region);
    attn_cuda_leave(was);
    free(s);
}

static attnd_err service_open(void **state, void **base, const attnd_service_opts *opts,
                              attnd_errinfo *info) {
    attnd_err err = attn_cuda_driver_check(info);
    service *s = err ? NULL : calloc(1, sizeof(*s));
    if (!s) {
        return err ? err : attnd_fail(info, ATTND_ENOMEM, "engine", "no memory for an engine");
    }
    s->region.fd = -1;
    TRY_CUDA(cudaGetDevice(&s->device));
    TRY_CUDA(cudaFree(NULL)); // makes the context
    if ((err = attn_cuda_flag_check(s->device, info)) || (err = find_batch(s, info)) ||
        (err = map_region(s, opts, info)) || (err = register_flags(s, opts, info))) {
        goto end;
    }
    if (opts->pairs_off) {
        TRY_CUDA(hand_over_prepare());
        s->pairs = s->region.address + opts->pairs_off;
    }
    *state = s;
    *base = (void *)(uintptr_t)s->region.address;
end:
    if (err) {
        service_close(s);
    }
    return err;
}

// ---- attends

static attnd_err capture(void *state, void *stream, uint64_t *id, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    enum cudaStreamCaptureStatus status;
    unsigned long long number = 0;
    attn_cuda_entered was = attn_cuda_enter(((const service *)state)->device);
#if CUDART_VERSION >= 13000
    TRY_CUDA(
        cudaStreamGetCaptureInfo((cudaStream_t)stream, &status, &number, NULL, NULL, NULL, NULL));
#else
    TRY_CUDA(cudaStreamGetCaptureInfo_v2((cudaStream_t)stream, &status, &number, NULL, NULL, NULL));
#endif
    *id = status == cudaStreamCaptureStatusActive ? number : 0;
    if (status == cudaStreamCaptureStatusInvalidated) {
        err =
            attnd_fail(info, ATTND_EINVAL, "stream", "the stream's capture is not valid any more");
    }
end:
    attn_cuda_leave(was);
    return err;
}

// copy makes one copy where the heads of a row follow each other, else one for each head.
static attnd_err copy(const attnd_service_copy *c, cudaStream_t stream, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    bool whole = c->from_head == c->width || c->heads == 1;
    uint64_t times = whole ? 1 : c->heads, width = whole ? c->heads * c->width : c->width;
    uint8_t *to = c->to;
    const uint8_t *from = c->from;
    for (uint64_t i = 0; i < times && c->rows > 0; i++) {
        if (c->rows == 1 || (width == c->to_row && width == c->from_row)) {
            TRY_CUDA(cudaMemcpyAsync(to, from, c->rows * width, cudaMemcpyDefault, stream));
        } else {
            TRY_CUDA(cudaMemcpy2DAsync(to, c->to_row, from, c->from_row, width, c->rows,
                                       cudaMemcpyDefault, stream));
        }
        to += c->width;
        from += c->from_head;
    }
end:
    return err;
}

static CUdeviceptr seen(const service *s, const uint32_t *flag) {
    return (CUdeviceptr)(uintptr_t)(s->device_flags + ((const uint8_t *)flag - s->flags));
}

static attnd_err pass(const service *s, const attnd_hand_over *h, void *stream,
                      attnd_errinfo *info) {
    static const uint32_t raised[2] = {1, 0}; // ready, done
    CUstreamBatchMemOpParams ops[2];
    memset(ops, 0, sizeof(ops));
    ops[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    ops[0].writeValue.address = seen(s, h->ready);
    memcpy(&ops[0].writeValue.value64, raised, sizeof(raised));
    ops[0].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    ops[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    ops[1].waitValue.address = seen(s, h->done);
    ops[1].waitValue.value = 1;
    ops[1].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    CUresult code = s->batch((CUstream)stream, sizeof(ops) / sizeof(ops[0]), ops, 0);
    if (code == CUDA_SUCCESS) {
        return ATTND_OK;
    }
    attnd_fail(info, ATTND_ECUDA, "cuda", "cuStreamBatchMemOp: error %d", (int)code);
    if (info) {
        info->detail = (int32_t)code;
    }
    return ATTND_ECUDA;
}

static attnd_err raise_pair(const service *s, const attnd_hand_over *h, void *stream,
                            attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    uint64_t pair = s->pairs + h->pair * sizeof(proto_flag);
    TRY_CUDA(hand_over_raise(pair, seen(s, h->ready), (cudaStream_t)stream));
end:
    return err;
}

static attnd_err hand_over(void *state, void *stream, const attnd_hand_over *h,
                           attnd_errinfo *info) {
    const service *s = state;
    attnd_err err = ATTND_OK;
    attn_cuda_entered was = attn_cuda_enter(s->device);
    for (uint32_t i = 0; i < h->num_in && !err; i++) {
        err = copy(&h->in[i], (cudaStream_t)stream, info);
    }
    if (!err) {
        err = s->pairs && !h->at_flags ? raise_pair(s, h, stream, info) : pass(s, h, stream, info);
    }
    for (uint32_t i = 0; i < h->num_out && !err; i++) {
        err = copy(&h->out[i], (cudaStream_t)stream, info);
    }
    attn_cuda_leave(was);
    return err;
}

static bool idle(void *state, void *stream) {
    attn_cuda_entered was = attn_cuda_enter(((const service *)state)->device);
    cudaError_t code = cudaStreamQuery((cudaStream_t)stream);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
    }
    attn_cuda_leave(was);
    return code != cudaErrorNotReady;
}

static const attnd_service ops = {.device = current_device,
                                  .open = service_open,
                                  .close = service_close,
                                  .capture = capture,
                                  .hand_over = hand_over,
                                  .idle = idle};

static const attnd_engine engine = {.name = "cuda service", .service = &ops};

const attnd_engine *attn_engine_cuda_service(void) {
    return &engine;
}
