// The GPU engine's host side: a device, its workspace, the plans, the launch.  C against the CUDA
// runtime; the kernels are the instances that CMake lists in attn_decode_kernels.inc.
//
// Threads: plans of one engine may be set by different threads; uploads and launches go into
// streams, and launches of one engine must follow each other, because they share the workspace.
// Every call makes the engine's device the calling thread's current one.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "attention/cuda/attn_cuda.h"
#include "attention/cuda/attn_cuda_plan.h"
#include "attention/cuda/decode_instance.h"

enum {
    WORKSPACE_BYTES = 64 << 20,
    MIN_PART_TILES = 16, // fewer tiles than this take less time than merging one more part
};

// ATTN_TRY_CUDA clears the error, keeps its text in *info, and goes to fail.
#define ATTN_TRY_CUDA(call)                       \
    do {                                          \
        cudaError_t code = (call);                \
        if (code != cudaSuccess) {                \
            err = cuda_failed(code, #call, info); \
            goto fail;                            \
        }                                         \
    } while (0)

typedef struct instance {
    const char *name;
    bool is_bulk;
    int32_t head_dim;
    attnd_dtype dtype;
    attn_cuda_kernel_fn (*get)(void);
} instance;

#define ATTN_DECODE_KERNEL(fn, is_bulk, head_dim, dtype) attn_cuda_kernel_fn fn(void);
#include "attn_decode_kernels.inc"
#undef ATTN_DECODE_KERNEL

static const instance instances[] = {
#define ATTN_DECODE_KERNEL(fn, is_bulk, head_dim, dtype) {#fn, is_bulk, head_dim, dtype, fn},
#include "attn_decode_kernels.inc"
#undef ATTN_DECODE_KERNEL
    {NULL, false, 0, ATTND_F32, NULL},
};

struct attn_cuda {
    int device;
    bool is_bulk;
    uint32_t num_ctas;
    uint32_t min_part_tiles;
    uint64_t workspace_bytes;
    float *workspace; // device, all bytes 0xff between launches
};

struct attn_cuda_plan {
    attn_cuda *cuda;
    attn_shape shape;
    const instance *kernel;
    attn_cuda_kernel_fn fn;
    attn_cuda_limits limits;
    attn_cuda_head *host;   // pinned
    attn_cuda_head *device; // the same, for the kernel
};

static attnd_err cuda_failed(cudaError_t code, const char *call, attnd_errinfo *info) {
    (void)cudaGetLastError();
    attnd_err err = code == cudaErrorMemoryAllocation ? ATTND_ENOMEM : ATTND_ECUDA;
    attnd_fail(info, err, "cuda", "%.*s: %s", (int)strcspn(call, "("), call,
               cudaGetErrorString(code));
    if (info) {
        info->detail = (int32_t)code;
    }
    return err;
}

// choose_kernel decides between the two loaders.
static attnd_err choose_kernel(attn_cuda *cuda, const struct cudaDeviceProp *prop, const char *name,
                               attnd_errinfo *info) {
    bool has_bulk = prop->major >= 9 && prop->sharedMemPerBlockOptin >= (size_t)220 * 1024;
    if (prop->major < 8) {
        return attnd_fail(info, ATTND_ENOTSUP, "device", "%s is sm_%d%d, the kernels need sm_80",
                          prop->name, prop->major, prop->minor);
    }
    if (!name) {
        cuda->is_bulk = has_bulk;
        return ATTND_OK;
    }
    cuda->is_bulk = strcmp(name, "bulk") == 0;
    if (!cuda->is_bulk && strcmp(name, "portable") != 0) {
        return attnd_fail(info, ATTND_EINVAL, "kernel", "no kernel is called %.32s", name);
    }
    if (cuda->is_bulk && !has_bulk) {
        return attnd_fail(info, ATTND_ENOTSUP, "kernel", "%s cannot run the bulk kernel",
                          prop->name);
    }
    return ATTND_OK;
}

attnd_err attn_cuda_create(attn_cuda **out, const attn_cuda_opts *opts, attnd_errinfo *info) {
    static const attn_cuda_opts defaults;
    opts = opts ? opts : &defaults;
    attnd_err err = ATTND_ENOMEM;
    attn_cuda *cuda = calloc(1, sizeof(*cuda));
    if (!cuda) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for the engine");
    }
    cuda->device = opts->device;
    cuda->workspace_bytes = opts->workspace_bytes ? opts->workspace_bytes : WORKSPACE_BYTES;
    cuda->min_part_tiles =
        opts->min_part_tiles > 0 ? (uint32_t)opts->min_part_tiles : MIN_PART_TILES;
    struct cudaDeviceProp prop;
    ATTN_TRY_CUDA(cudaSetDevice(cuda->device));
    ATTN_TRY_CUDA(cudaGetDeviceProperties(&prop, cuda->device));
    err = choose_kernel(cuda, &prop, opts->kernel, info);
    if (err != ATTND_OK) {
        goto fail;
    }
    cuda->num_ctas = (uint32_t)prop.multiProcessorCount;
    ATTN_TRY_CUDA(cudaMalloc((void **)&cuda->workspace, cuda->workspace_bytes));
    ATTN_TRY_CUDA(cudaMemset(cuda->workspace, 0xff, cuda->workspace_bytes));
    ATTN_TRY_CUDA(cudaDeviceSynchronize());
    *out = cuda;
    return ATTND_OK;
fail:
    attn_cuda_free(cuda);
    return err;
}

void attn_cuda_free(attn_cuda *cuda) {
    if (cuda) {
        (void)cudaSetDevice(cuda->device);
        (void)cudaFree(cuda->workspace);
        free(cuda);
    }
}

const char *attn_cuda_kernel(const attn_cuda *cuda) {
    return cuda->is_bulk ? "bulk" : "portable";
}

// find_instance returns the kernel of a shape that attn_cuda_check_shape passed, NULL when this
// build left it out.
static const instance *find_instance(const attn_cuda *cuda, const attn_shape *shape) {
    for (const instance *i = instances; i->name; i++) {
        if (i->is_bulk == cuda->is_bulk && i->head_dim == shape->head_dim &&
            i->dtype == shape->q_dtype) {
            return i;
        }
    }
    return NULL;
}

attnd_err attn_cuda_plan_create(attn_cuda_plan **out, attn_cuda *cuda, const attn_shape *shape,
                                uint32_t max_records, attnd_errinfo *info) {
    attnd_err err = attn_cuda_check_shape(shape, info);
    if (err != ATTND_OK) {
        return err;
    }
    const instance *kernel = find_instance(cuda, shape);
    if (!kernel) {
        return attnd_fail(info, ATTND_ENOTSUP, "head_dim",
                          "this build has no kernel for head_dim %d in %s", shape->head_dim,
                          attnd_dtype_name(shape->q_dtype));
    }
    attn_cuda_plan *plan = calloc(1, sizeof(*plan));
    if (!plan) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for the plan");
    }
    plan->cuda = cuda;
    plan->shape = *shape;
    plan->kernel = kernel;
    plan->fn = kernel->get();
    plan->limits = (attn_cuda_limits){.num_ctas = cuda->num_ctas,
                                      .max_records = max_records,
                                      .slot_floats = cuda->workspace_bytes / sizeof(float),
                                      .min_part_tiles = cuda->min_part_tiles};
    size_t bytes = attn_cuda_plan_bytes(cuda->num_ctas, max_records);
    ATTN_TRY_CUDA(cudaSetDevice(cuda->device));
    ATTN_TRY_CUDA(cudaFuncSetAttribute(plan->fn.function,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)plan->fn.shared_bytes));
    ATTN_TRY_CUDA(cudaHostAlloc((void **)&plan->host, bytes, cudaHostAllocDefault));
    ATTN_TRY_CUDA(cudaMalloc((void **)&plan->device, bytes));
    memset(plan->host, 0, sizeof(*plan->host));
    ATTN_TRY_CUDA(cudaMemset(plan->device, 0, bytes));
    ATTN_TRY_CUDA(cudaDeviceSynchronize());
    *out = plan;
    return ATTND_OK;
fail:
    attn_cuda_plan_free(plan);
    return err;
}

void attn_cuda_plan_free(attn_cuda_plan *plan) {
    if (plan) {
        (void)cudaSetDevice(plan->cuda->device);
        (void)cudaFreeHost(plan->host);
        (void)cudaFree(plan->device);
        free(plan);
    }
}

attnd_err attn_cuda_plan_set(attn_cuda_plan *plan, const attn_params *p, attn_choice *choice,
                             attnd_errinfo *info) {
    memset(plan->host, 0, sizeof(*plan->host));
    if (memcmp(&plan->shape, &p->shape, sizeof(plan->shape)) != 0) {
        return attnd_fail(info, ATTND_EINVAL, "shape", "the plan was created for another shape");
    }
    attnd_err err = attn_cuda_plan_make(plan->host, p, &plan->limits, choice, info);
    if (err == ATTND_OK && choice) {
        choice->kernel = plan->kernel->name;
    }
    return err;
}

attnd_err attn_cuda_plan_upload(attn_cuda_plan *plan, void *stream, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    size_t bytes = attn_cuda_plan_bytes(plan->cuda->num_ctas, plan->host->num_records);
    ATTN_TRY_CUDA(cudaSetDevice(plan->cuda->device));
    ATTN_TRY_CUDA(cudaMemcpyAsync(plan->device, plan->host, bytes, cudaMemcpyHostToDevice,
                                  (cudaStream_t)stream));
    return ATTND_OK;
fail:
    return err;
}

// run_tokens_log2 is how many tokens of one head lie side by side for sure, as far as a stage goes.
static int32_t run_tokens_log2(const attn_shape *s) {
    int32_t log2 = 0;
    while (s->block_tokens % (2 << log2) == 0 && (2 << log2) <= 64) {
        log2++;
    }
    return log2;
}

static int32_t exact_log2(int32_t x) {
    return (x & (x - 1)) == 0 ? __builtin_ctz((uint32_t)x) : -1;
}

attnd_err attn_cuda_launch(attn_cuda_plan *plan, void *stream, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    const attn_shape *s = &plan->shape;
    decode_args args = {.plan = plan->device,
                        .slots = plan->cuda->workspace,
                        .block_stride = s->block_stride,
                        .k_head_bytes = s->stride_k_head * 2,
                        .v_head_bytes = s->stride_v_head * 2,
                        .block_tokens = s->block_tokens,
                        .kv_heads = s->kv_heads,
                        .group = s->q_heads / s->kv_heads,
                        .block_tokens_log2 = exact_log2(s->block_tokens),
                        .run_tokens_log2 = run_tokens_log2(s)};
    void *list[] = {&args};
    ATTN_TRY_CUDA(cudaSetDevice(plan->cuda->device));
    cudaLaunchAttribute attribute = {.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                                     .val = {.programmaticStreamSerializationAllowed = 1}};
    cudaLaunchConfig_t config = {.gridDim = {plan->cuda->num_ctas, 1, 1},
                                 .blockDim = {(uint32_t)plan->fn.threads, 1, 1},
                                 .dynamicSmemBytes = plan->fn.shared_bytes,
                                 .stream = (cudaStream_t)stream,
                                 .attrs = &attribute,
                                 .numAttrs = plan->cuda->is_bulk};
    ATTN_TRY_CUDA(cudaLaunchKernelExC(&config, plan->fn.function, list));
    return ATTND_OK;
fail:
    return err;
}

attnd_err attn_cuda_run(attn_cuda_plan *plan, const attn_params *p, void *stream,
                        attn_choice *choice, attnd_errinfo *info) {
    attnd_err err = attn_cuda_plan_set(plan, p, choice, info);
    err = err == ATTND_OK ? attn_cuda_plan_upload(plan, stream, info) : err;
    return err == ATTND_OK ? attn_cuda_launch(plan, stream, info) : err;
}
