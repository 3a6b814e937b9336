// The GPU engine's host side: a device, its workspace, the plans, the launch.  C against the CUDA
// runtime; the kernels are the instances that CMake lists in attn_decode_kernels.inc and
// attn_prefill_kernels.inc.
//
// Threads: plans of one engine may be set by different threads; uploads and launches go into
// streams, and launches of one engine must follow each other, because they share the workspace.
// Every call makes the engine's device the calling thread's current one.
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "attention/cuda/attn_cuda.h"
#include "attention/cuda/attn_cuda_error.h"
#include "attention/cuda/attn_cuda_plan.h"
#include "attention/cuda/decode_instance.h"
#include "attention/cuda/prefill_instance.h"
#include "attention/cuda/prefill_map.h"

enum {
    WORKSPACE_BYTES = 64 << 20,
    FIRST_JOIN = 2,      // of the counters for prefill, behind tasks taken and CTAs done
    MIN_PART_TILES = 16, // fewer tiles than this take less time than merging one more part
};

// ATTN_TRY_CUDA clears the error, keeps its text in *info, and goes to fail.
#define ATTN_TRY_CUDA(call)                            \
    do {                                               \
        cudaError_t code = (call);                     \
        if (code != cudaSuccess) {                     \
            err = attn_cuda_failed(code, #call, info); \
            goto fail;                                 \
        }                                              \
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

typedef struct prefill_instance {
    const char *name;
    int32_t head_dim;
    attnd_dtype dtype;
    prefill_kernel_fn (*get)(void);
} prefill_instance;

#define ATTN_PREFILL_KERNEL(fn, is_bulk, head_dim, dtype) prefill_kernel_fn fn(void);
#include "attn_prefill_kernels.inc"
#undef ATTN_PREFILL_KERNEL

static const prefill_instance prefill_instances[] = {
#define ATTN_PREFILL_KERNEL(fn, is_bulk, head_dim, dtype) {#fn, head_dim, dtype, fn},
#include "attn_prefill_kernels.inc"
#undef ATTN_PREFILL_KERNEL
    {NULL, 0, ATTND_F32, NULL},
};

struct attn_cuda {
    int device;
    bool is_bulk;
    int32_t prefill_rows; // 0 = no prefill kernel
    uint32_t num_ctas;
    uint32_t min_part_tiles;
    uint64_t workspace_bytes;
    float *workspace;   // device, all bytes 0xff between launches
    float *angles;      // device, workspace_bytes, for prefill; with sums at the end
    uint32_t *counters; // device, [counters_of], 0 between launches
};

// plan_memory is the plans of both kernels: heads, then what the decode kernel reads, and at
// prefill.records_at what the prefill kernel reads.
typedef struct plan_memory {
    attn_prefill_head prefill;
    attn_cuda_head decode;
} plan_memory;

struct attn_cuda_plan {
    attn_cuda *cuda;
    attn_shape shape;
    const instance *kernel;   // decodes
    const instance *portable; // decodes masks that `kernel` does not take; NULL = none needed
    attn_cuda_kernel_fn fn, portable_fn;
    const prefill_instance *prefill; // NULL = all rows are decoded
    prefill_kernel_fn prefill_fn;
    prefill_map map;         // of keys and values
    prefill_map rows, token; // of queries and outputs
    uint64_t sums_at;        // bytes of the workspace for prefill before its sums
    uint32_t max_records;
    attn_cuda_limits limits;
    uint32_t kernels;    // that the plan needs
    plan_memory *host;   // pinned
    plan_memory *device; // the same, for the kernels
    bool owns_memory;
};

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

// counters_of returns how many counters prefill has: two, and those of tiles that are joined.
static size_t counters_of(const attn_cuda *cuda) {
    return FIRST_JOIN + 2 * (size_t)cuda->num_ctas;
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
    if (cuda->is_bulk && prop.major == 9 && prop.minor == 0 && opts->prefill_rows >= 0) {
        cuda->prefill_rows = opts->prefill_rows > 0 ? opts->prefill_rows : ATTN_PREFILL_MEASURED;
        ATTN_TRY_CUDA(cudaMalloc((void **)&cuda->angles, cuda->workspace_bytes));
        const size_t bytes = counters_of(cuda) * sizeof(*cuda->counters);
        ATTN_TRY_CUDA(cudaMalloc((void **)&cuda->counters, bytes));
        ATTN_TRY_CUDA(cudaMemset(cuda->counters, 0, bytes));
    }
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
        (void)cudaFree(cuda->angles);
        (void)cudaFree(cuda->counters);
        free(cuda);
    }
}

const char *attn_cuda_kernel(const attn_cuda *cuda) {
    return cuda->is_bulk ? "bulk" : "portable";
}

bool attn_cuda_prefills(const attn_cuda *cuda) {
    return cuda->prefill_rows != 0;
}

// find_instance returns the kernel of a shape that attn_cuda_check_shape passed, NULL when this
// build left it out.
static const instance *find_instance(bool is_bulk, const attn_shape *shape) {
    for (const instance *i = instances; i->name; i++) {
        if (i->is_bulk == is_bulk && i->head_dim == shape->head_dim && i->dtype == shape->q_dtype) {
            return i;
        }
    }
    return NULL;
}

// find_prefill does the same; NULL also when the engine does not prefill.
static const prefill_instance *find_prefill(const attn_cuda *cuda, const attn_shape *shape) {
    const prefill_instance *i = prefill_instances;
    while (i->name && (i->head_dim != shape->head_dim || i->dtype != shape->q_dtype)) {
        i++;
    }
    return i->name && attn_cuda_prefills(cuda) ? i : NULL;
}

attn_cuda_masks attn_cuda_takes_masks(const attn_cuda *cuda, const attn_shape *shape) {
    if (find_prefill(cuda, shape)) {
        return ATTN_CUDA_MASKS_PREFILL;
    }
    return find_instance(false, shape) ? ATTN_CUDA_MASKS_DECODE : ATTN_CUDA_MASKS_NONE;
}

// run_tokens_log2 is how many tokens of one head lie side by side for sure, up to 2^most_log2.
static int32_t run_tokens_log2(const attn_shape *s, int32_t most_log2) {
    int32_t log2 = 0;
    while (log2 < most_log2 && s->block_tokens % (2 << log2) == 0) {
        log2++;
    }
    return log2;
}

static int32_t exact_log2(int32_t x) {
    return (x & (x - 1)) == 0 ? __builtin_ctz((uint32_t)x) : -1;
}

// max_joins returns how many tiles of a launch may share their keys, of as much of the workspace.
static uint32_t max_joins(const attn_cuda *cuda, const prefill_kernel_fn *fn) {
    const uint64_t most = cuda->num_ctas / 2;
    const uint64_t fit = cuda->workspace_bytes / 4 / fn->join_bytes;
    const uint64_t words = (counters_of(cuda) - FIRST_JOIN) / fn->join_words;
    const uint64_t joins = most < fit ? most : fit;
    return (uint32_t)(joins < words ? joins : words);
}

// set_prefill finds the prefill kernel of a plan's shape and makes its maps.
static attnd_err set_prefill(attn_cuda_plan *plan, uint32_t max_records, attnd_errinfo *info) {
    const attn_cuda *cuda = plan->cuda;
    attnd_err err = ATTND_OK;
    plan->prefill = find_prefill(cuda, &plan->shape);
    if (!plan->prefill) {
        return ATTND_OK;
    }
    plan->prefill_fn = plan->prefill->get();
    plan->limits.prefill = (attn_prefill_limits){.max_records = max_records,
                                                 .tile_rows = plan->prefill_fn.tile_rows,
                                                 .ctas = cuda->num_ctas,
                                                 .least_rows = cuda->prefill_rows,
                                                 .max_joins = max_joins(cuda, &plan->prefill_fn)};
    plan->sums_at = (cuda->workspace_bytes -
                     (uint64_t)plan->limits.prefill.max_joins * plan->prefill_fn.join_bytes) /
                    16 * 16;
    plan->limits.prefill.max_angles = plan->sums_at / 8;
    ATTN_TRY_CUDA(cudaFuncSetAttribute(plan->prefill_fn.function,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)plan->prefill_fn.shared_bytes));
    int32_t group = plan->shape.q_heads / plan->shape.kv_heads;
    if (ATTN_PREFILL_ROWS % group == 0) { // else nothing is moved by it
        err = prefill_map_rows(&plan->rows, plan->shape.head_dim, plan->shape.q_heads, group,
                               ATTN_PREFILL_ROWS / group, info);
        err = err == ATTND_OK ? prefill_map_rows(&plan->token, plan->shape.head_dim,
                                                 plan->shape.q_heads, group, 1, info)
                              : err;
    }
    return err == ATTND_OK ? prefill_map_keys(&plan->map, plan->shape.head_dim,
                                              run_tokens_log2(&plan->shape, 7), info)
                           : err;
fail:
    return err;
}

// set_masks finds what computes the masks that the bulk kernel does not take.
static attnd_err set_masks(attn_cuda_plan *plan, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    plan->limits.masks = attn_cuda_takes_masks(plan->cuda, &plan->shape);
    if (plan->limits.masks == ATTN_CUDA_MASKS_DECODE && plan->kernel->is_bulk) {
        plan->portable = find_instance(false, &plan->shape);
        plan->portable_fn = plan->portable->get();
        ATTN_TRY_CUDA(cudaFuncSetAttribute(plan->portable_fn.function,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)plan->portable_fn.shared_bytes));
    }
    return ATTND_OK;
fail:
    return err;
}

// decode_bytes is what of plan_memory the decode kernel's plan takes, and the heads.
static uint64_t decode_bytes(const attn_cuda_plan *plan, uint32_t num_records, uint32_t num_masks) {
    return offsetof(plan_memory, decode) +
           attn_cuda_plan_bytes(plan->limits.num_ctas, num_records, num_masks);
}

// decode_room is what a plan has for it.
static uint64_t decode_room(const attn_cuda_plan *plan) {
    bool has_masks = plan->limits.masks == ATTN_CUDA_MASKS_DECODE;
    return decode_bytes(plan, plan->max_records, has_masks ? plan->max_records : 0);
}

// decode_used is what the plan that was set last uses of it.
static uint64_t decode_used(const attn_cuda_plan *plan) {
    const attn_cuda_head *head = &plan->host->decode;
    return decode_bytes(plan, head->num_records, head->num_masks);
}

// make_plan makes a plan without memory for its records.
static attnd_err make_plan(attn_cuda_plan **out, attn_cuda *cuda, const attn_shape *shape,
                           uint32_t max_records, attnd_errinfo *info) {
    attnd_err err = attn_cuda_check_shape(shape, info);
    if (err != ATTND_OK) {
        return err;
    }
    const instance *kernel = find_instance(cuda->is_bulk, shape);
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
    plan->max_records = max_records;
    plan->kernels = ATTN_CUDA_DECODE;
    plan->shape = *shape;
    plan->kernel = kernel;
    plan->fn = kernel->get();
    plan->limits = (attn_cuda_limits){.num_ctas = cuda->num_ctas,
                                      .max_records = max_records,
                                      .slot_floats = cuda->workspace_bytes / sizeof(float),
                                      .min_part_tiles = cuda->min_part_tiles};
    ATTN_TRY_CUDA(cudaSetDevice(cuda->device));
    err = set_prefill(plan, max_records, info);
    err = err == ATTND_OK ? set_masks(plan, info) : err;
    if (err != ATTND_OK) {
        goto fail;
    }
    ATTN_TRY_CUDA(cudaFuncSetAttribute(plan->fn.function,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)plan->fn.shared_bytes));
    *out = plan;
    return ATTND_OK;
fail:
    free(plan);
    return err;
}

static size_t all_bytes(const attn_cuda_plan *plan) {
    return decode_room(plan) + (plan->prefill ? attn_prefill_bytes(plan->max_records) : 0);
}

attnd_err attn_cuda_plan_create(attn_cuda_plan **out, attn_cuda *cuda, const attn_shape *shape,
                                uint32_t max_records, attnd_errinfo *info) {
    attn_cuda_plan *plan = NULL;
    attnd_err err = make_plan(&plan, cuda, shape, max_records, info);
    if (err != ATTND_OK) {
        return err;
    }
    plan->owns_memory = true;
    size_t bytes = all_bytes(plan);
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

uint64_t attn_cuda_plan_room(const attn_cuda *cuda, const attn_shape *shape, uint32_t max_records) {
    attn_cuda_plan *plan = NULL;
    if (make_plan(&plan, (attn_cuda *)cuda, shape, max_records, NULL) != ATTND_OK) {
        return 0;
    }
    uint64_t bytes = (all_bytes(plan) + 255) / 256 * 256;
    attn_cuda_plan_free(plan);
    return bytes;
}

attnd_err attn_cuda_plan_create_at(attn_cuda_plan **out, attn_cuda *cuda, const attn_shape *shape,
                                   uint32_t max_records, void *host, void *device,
                                   attnd_errinfo *info) {
    attn_cuda_plan *plan = NULL;
    attnd_err err = make_plan(&plan, cuda, shape, max_records, info);
    if (err == ATTND_OK) {
        plan->host = host;
        plan->device = device;
        memset(host, 0, sizeof(*plan->host));
        *out = plan;
    }
    return err;
}

void attn_cuda_plan_move_host(attn_cuda_plan *plan, void *host) {
    plan->host = host;
}

uint64_t attn_cuda_plan_used(const attn_cuda_plan *plan) {
    return plan->host->prefill.num_records > 0 ? 0 : decode_used(plan);
}

void attn_cuda_plan_free(attn_cuda_plan *plan) {
    if (plan && plan->owns_memory) {
        (void)cudaSetDevice(plan->cuda->device);
        (void)cudaFreeHost(plan->host);
        (void)cudaFree(plan->device);
    }
    free(plan);
}

uint32_t attn_cuda_plan_kernels(const attn_cuda_plan *plan) {
    return plan->kernels;
}

// say tells what will run.
static void say(const attn_cuda_plan *plan, attn_choice *choice) {
    if (plan->kernels & ATTN_CUDA_PORTABLE) {
        choice->kernel = plan->portable->name;
        choice->why = "a mask that the bulk kernel does not take";
        return;
    }
    if ((plan->kernels & ATTN_CUDA_PREFILL) == 0) {
        choice->kernel = plan->kernel->name;
        choice->why = plan->prefill ? "q_len up to 8, or few query rows over many keys, or splits"
                                    : "no prefill kernel for this GPU, or turned off";
        return;
    }
    bool both = (plan->kernels & ATTN_CUDA_DECODE) != 0;
    choice->splits = choice->splits > 0 ? choice->splits : 1;
    choice->kernel = both ? "cuda_prefill_and_decode" : plan->prefill->name;
    choice->why = both ? "rows of q_len over 8 by prefill, others by decode"
                       : "q_len over 8, or a mask that only prefill takes";
}

attnd_err attn_cuda_plan_set(attn_cuda_plan *plan, const attn_params *p, attn_choice *choice,
                             attnd_errinfo *info) {
    memset(plan->host, 0, sizeof(*plan->host));
    plan->kernels = ATTN_CUDA_DECODE;
    if (memcmp(&plan->shape, &p->shape, sizeof(plan->shape)) != 0) {
        return attnd_fail(info, ATTND_EINVAL, "shape", "the plan was created for another shape");
    }
    plan->limits.prefill.launch_slices = attn_prefill_count(p);
    attnd_err err = attn_cuda_plan_make(&plan->host->decode, p, &plan->limits, choice, info);
    if (err == ATTND_OK && plan->host->decode.num_left > 0) {
        uint32_t at = (uint32_t)decode_room(plan);
        err = attn_prefill_make(&plan->host->prefill, at, p, &plan->limits.prefill, info);
    }
    if (err != ATTND_OK) {
        memset(plan->host, 0, sizeof(*plan->host));
        return err;
    }
    uint32_t num_prefills = plan->host->prefill.num_records;
    plan->kernels =
        (plan->host->prefill.num_units > 0 ? ATTN_CUDA_PREPARE : 0) |
        (num_prefills > 0 ? ATTN_CUDA_PREFILL : 0) |
        (plan->host->decode.num_records > 0 || num_prefills == 0 ? ATTN_CUDA_DECODE : 0) |
        (plan->host->decode.is_masked && plan->portable ? ATTN_CUDA_PORTABLE : 0);
    if (choice) {
        say(plan, choice);
    }
    return ATTND_OK;
}

attnd_err attn_cuda_plan_upload(attn_cuda_plan *plan, void *stream, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    const attn_prefill_head *prefill = &plan->host->prefill;
    ATTN_TRY_CUDA(cudaSetDevice(plan->cuda->device));
    ATTN_TRY_CUDA(cudaMemcpyAsync(plan->device, plan->host, decode_used(plan),
                                  cudaMemcpyHostToDevice, (cudaStream_t)stream));
    if (prefill->num_records > 0) {
        ATTN_TRY_CUDA(cudaMemcpyAsync((char *)plan->device + prefill->records_at,
                                      (char *)plan->host + prefill->records_at,
                                      attn_prefill_bytes(prefill->num_records),
                                      cudaMemcpyHostToDevice, (cudaStream_t)stream));
    }
    return ATTND_OK;
fail:
    return err;
}

// start launches a kernel that may begin before the one before it in the stream has ended, and
// waits for it by itself.
static cudaError_t start(const void *function, uint32_t ctas, int32_t threads,
                         uint32_t shared_bytes, void *args, bool is_early, void *stream) {
    void *list[] = {args};
    cudaLaunchAttribute attribute = {.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                                     .val = {.programmaticStreamSerializationAllowed = 1}};
    cudaLaunchConfig_t config = {.gridDim = {ctas, 1, 1},
                                 .blockDim = {(uint32_t)threads, 1, 1},
                                 .dynamicSmemBytes = shared_bytes,
                                 .stream = (cudaStream_t)stream,
                                 .attrs = &attribute,
                                 .numAttrs = is_early};
    return cudaLaunchKernelExC(&config, function, list);
}

static attnd_err launch_prefill(attn_cuda_plan *plan, void *stream, attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    const attn_shape *s = &plan->shape;
    const prefill_kernel_fn *fn = &plan->prefill_fn;
    prefill_args args = {.map = plan->map,
                         .rows = plan->rows,
                         .token = plan->token,
                         .plan = &plan->device->prefill,
                         .counters = plan->cuda->counters,
                         .angles = plan->cuda->angles,
                         .joins = plan->cuda->counters + FIRST_JOIN,
                         .sums = plan->cuda->angles + plan->sums_at / sizeof(float),
                         .block_stride = s->block_stride,
                         .k_head_bytes = s->stride_k_head * 2,
                         .v_head_bytes = s->stride_v_head * 2,
                         .block_tokens = s->block_tokens,
                         .kv_heads = s->kv_heads,
                         .group = s->q_heads / s->kv_heads,
                         .block_tokens_log2 = exact_log2(s->block_tokens),
                         .run_log2 = run_tokens_log2(s, 7)};
    if (plan->kernels & ATTN_CUDA_PREPARE) {
        ATTN_TRY_CUDA(start(fn->prepare, (uint32_t)fn->prepare_ctas * plan->cuda->num_ctas,
                            fn->prepare_threads, 0, &args, true, stream));
    }
    ATTN_TRY_CUDA(start(fn->function, plan->cuda->num_ctas, fn->threads, fn->shared_bytes, &args,
                        true, stream));
    return ATTND_OK;
fail:
    return err;
}

static attnd_err launch_decode(attn_cuda_plan *plan, const attn_cuda_shift *shift, void *stream,
                               attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    const attn_shape *s = &plan->shape;
    decode_args args = {.plan = &plan->device->decode,
                        .slots = plan->cuda->workspace,
                        .shift = *shift,
                        .block_stride = s->block_stride,
                        .k_head_bytes = s->stride_k_head * 2,
                        .v_head_bytes = s->stride_v_head * 2,
                        .block_tokens = s->block_tokens,
                        .kv_heads = s->kv_heads,
                        .group = s->q_heads / s->kv_heads,
                        .block_tokens_log2 = exact_log2(s->block_tokens),
                        .plan_bytes = (uint32_t)attn_cuda_plan_bytes(
                            plan->limits.num_ctas, plan->host->decode.num_records, 0),
                        .run_tokens_log2 = run_tokens_log2(s, 6)};
    bool is_portable = (plan->kernels & ATTN_CUDA_PORTABLE) != 0 || !plan->kernel->is_bulk;
    const attn_cuda_kernel_fn *fn =
        plan->kernels & ATTN_CUDA_PORTABLE ? &plan->portable_fn : &plan->fn;
    ATTN_TRY_CUDA(start(fn->function, plan->cuda->num_ctas, fn->threads, fn->shared_bytes, &args,
                        !is_portable, stream));
    return ATTND_OK;
fail:
    return err;
}

uint32_t *attn_cuda_plan_work(attn_cuda_plan *plan) {
    bool is_decode = (plan->kernels & ~(uint32_t)ATTN_CUDA_PORTABLE) == ATTN_CUDA_DECODE;
    return is_decode ? &plan->device->decode.total : NULL;
}

attnd_err attn_cuda_launch_shifted(attn_cuda_plan *plan, const attn_cuda_shift *shift, void *stream,
                                   attnd_errinfo *info) {
    attnd_err err = ATTND_OK;
    if (plan->kernels != ATTN_CUDA_DECODE) {
        return attnd_fail(info, ATTND_ENOTSUP, "shift",
                          "the plan needs more than the decode kernel");
    }
    ATTN_TRY_CUDA(cudaSetDevice(plan->cuda->device));
    err = launch_decode(plan, shift, stream, info);
fail:
    return err;
}

attnd_err attn_cuda_launch(attn_cuda_plan *plan, void *stream, attnd_errinfo *info) {
    static const attn_cuda_shift none;
    attnd_err err = ATTND_OK;
    ATTN_TRY_CUDA(cudaSetDevice(plan->cuda->device));
    if (plan->kernels & ATTN_CUDA_PREFILL) {
        err = launch_prefill(plan, stream, info);
    }
    if (err == ATTND_OK && (plan->kernels & ATTN_CUDA_DECODE)) {
        err = launch_decode(plan, &none, stream, info);
    }
    return err;
fail:
    return err;
}

attnd_err attn_cuda_run(attn_cuda_plan *plan, const attn_params *p, void *stream,
                        attn_choice *choice, attnd_errinfo *info) {
    attnd_err err = attn_cuda_plan_set(plan, p, choice, info);
    err = err == ATTND_OK ? attn_cuda_plan_upload(plan, stream, info) : err;
    return err == ATTND_OK ? attn_cuda_launch(plan, stream, info) : err;
}
