// A CUDA device as a backend.
//
// The arena has an image on the device, one allocation that stays until the end: the driver clears
// memory that is freed, in the background, and for tens of milliseconds after gigabytes were freed
// that takes a tenth of what the memory can do.  A sample is a CUDA graph of its calls, captured
// once and replayed, between two events.
//
// Decode is held against what simple kernels read (bench_cuda_read.h).  The peers of decode and
// prefill are in PyTorch: a process of its own that takes turns with this one (bench_cuda_peer.h).
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "attention/cuda/attn_cuda.h"
#include "attention/cuda/attn_cuda_error.h"
#include "attention/cuda/attn_cuda_memory.h"
#include "tests/load/bench_backend.h"
#include "tests/load/bench_cuda_grid.h"
#include "tests/load/bench_cuda_peer.h"
#include "tests/load/bench_cuda_read.h"
#include "tests/load/bench_nvml.h"
#include "tests/load/bench_result.h"
#include "tests/load/bench_team.h"

enum {
    SAMPLE_BYTES = 300 << 20,
    SAMPLE_CALLS = 8,
    PLAN_REPS = 101,
    MACHINE_REPS = 5,
    QUERY_ROWS = 64,  // of a record, see attn_cuda_plan_create
    MAX_GRAPHS = 256, // of a group
    MAX_KERNEL_NAME = 64,
};

#define READ_BYTES (4ull << 30)

#define TRY_CUDA(call)                                  \
    do {                                                \
        cudaError_t code = (call);                      \
        if (code != cudaSuccess) {                      \
            return attn_cuda_failed(code, #call, info); \
        }                                               \
    } while (0)

// planned is a launch that was planned.
typedef struct planned {
    const attn_params *launch;
    attn_cuda_plan *plan;
} planned;

// sample is a graph of calls.
typedef struct sample {
    const attn_params **launches; // [num]
    uint32_t num;
    cudaGraphExec_t exec;
} sample;

struct bench_backend {
    struct cudaDeviceProp prop;
    bench_nvml *nvml;
    bench_cuda_peer *peer; // NULL = none was asked for
    attn_cuda *engine;
    bench_cuda_read *read;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    char *image; // of the arena, at `delta` from it
    uint64_t image_bytes;
    int64_t delta;
    planned *plans; // [num_plans]
    uint32_t num_plans, max_plans;
    sample samples[MAX_GRAPHS];
    uint32_t num_samples;
    char kernel[MAX_KERNEL_NAME];
    bench_pace pace; // of the last time or peer
};

// Decode and prefill are the best decode kernel, and with it prefill, for all rows.
static const char *const kernels[] = {"bulk", "portable", "decode", "prefill", NULL};

// ---- opening

static attnd_err open_engine(bench_backend *b, const char *kernel, attnd_errinfo *info) {
    attn_cuda_opts opts = {.kernel = kernel};
    bool is_decode = kernel && strcmp(kernel, "decode") == 0;
    bool is_prefill = kernel && strcmp(kernel, "prefill") == 0;
    if (is_decode || is_prefill) {
        opts.kernel = NULL;
        opts.prefill_rows = is_decode ? -1 : 1;
    }
    attnd_err err = attn_cuda_create(&b->engine, &opts, info);
    if (err == ATTND_OK && is_prefill && !attn_cuda_prefills(b->engine)) {
        err = attnd_fail(info, ATTND_ENOTSUP, "kernel", "%s has no prefill kernel", b->prop.name);
    }
    snprintf(b->kernel, sizeof(b->kernel), "%s%s", b->engine ? attn_cuda_kernel(b->engine) : "",
             is_decode    ? ", all rows decoded"
             : is_prefill ? ", all rows prefilled"
                          : "");
    return err;
}

static attnd_err make(bench_backend *b, const bench_backend_opts *opts, attnd_errinfo *info) {
    char bus_id[32];
    if (opts->threads) {
        return attnd_fail(info, ATTND_ENOTSUP, "threads", "--threads is of --backend cpu");
    }
    attnd_err err = attn_cuda_driver_check(info);
    if (err != ATTND_OK) {
        return err;
    }
    TRY_CUDA(cudaSetDevice(0));
    TRY_CUDA(cudaGetDeviceProperties(&b->prop, 0));
    TRY_CUDA(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), 0));
    TRY_CUDA(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking));
    TRY_CUDA(cudaEventCreate(&b->begin));
    TRY_CUDA(cudaEventCreate(&b->end));
    b->nvml = bench_nvml_open(bus_id);
    if (!b->nvml) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory");
    }
    err = open_engine(b, opts->kernel, info);
    uint64_t bytes =
        b->prop.totalGlobalMem / 8 < READ_BYTES ? b->prop.totalGlobalMem / 8 : READ_BYTES;
    err = err == ATTND_OK ? bench_cuda_read_open(&b->read, bytes, info) : err;
    return err == ATTND_OK && opts->peer ? bench_cuda_peer_open(&b->peer, opts->peer, info) : err;
}

// forget gives back what was made for the launches of a group.
static void forget(bench_backend *b) {
    for (uint32_t i = 0; i < b->num_samples; i++) {
        (void)cudaGraphExecDestroy(b->samples[i].exec);
        free(b->samples[i].launches);
    }
    for (uint32_t i = 0; i < b->num_plans; i++) {
        attn_cuda_plan_free(b->plans[i].plan);
    }
    b->num_samples = b->num_plans = 0;
    if (b->peer) {
        bench_cuda_peer_drop(b->peer);
    }
}

static void cuda_close(bench_backend *b) {
    forget(b);
    free(b->plans);
    bench_cuda_peer_close(b->peer);
    bench_nvml_close(b->nvml);
    bench_cuda_read_close(b->read);
    attn_cuda_free(b->engine);
    (void)cudaFree(b->image);
    if (b->stream) {
        (void)cudaStreamDestroy(b->stream);
    }
    free(b);
}

static attnd_err cuda_open(bench_backend **out, const bench_backend_opts *opts,
                           attnd_errinfo *info) {
    bench_backend *b = calloc(1, sizeof(*b));
    if (!b) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory");
    }
    attnd_err err = make(b, opts, info);
    if (err != ATTND_OK) {
        cuda_close(b);
        return err;
    }
    *out = b;
    return ATTND_OK;
}

static void cuda_describe(const bench_backend *b, char *out, size_t bytes) {
    char limits[160];
    int runtime = 0;
    (void)cudaRuntimeGetVersion(&runtime);
    bench_nvml_limits(b->nvml, limits, sizeof(limits));
    snprintf(out, bytes, "%s (sm_%d%d, %d SMs, %llu MiB), kernel %s; CUDA runtime %d.%d, %s",
             b->prop.name, b->prop.major, b->prop.minor, b->prop.multiProcessorCount,
             (unsigned long long)(b->prop.totalGlobalMem >> 20), b->kernel, runtime / 1000,
             runtime % 1000 / 10, limits);
}

static void cuda_state(const bench_backend *b, char *out, size_t bytes) {
    bench_nvml_state(b->nvml, out, bytes);
}

static uint32_t cuda_threads(const bench_backend *b) {
    (void)b;
    long num = sysconf(_SC_NPROCESSORS_ONLN);
    return num < 1 ? 1 : num > BENCH_MAX_THREADS ? BENCH_MAX_THREADS : (uint32_t)num;
}

static uint64_t cuda_last_cache(const bench_backend *b) {
    return (uint64_t)b->prop.l2CacheSize;
}

// ---- memory

static attnd_err cuda_place(bench_backend *b, const bench_arena *arena, int64_t *delta,
                            attnd_errinfo *info) {
    forget(b);
    if (b->image_bytes < arena->bytes) {
        (void)cudaFree(b->image);
        b->image = NULL;
        b->image_bytes = 0;
        TRY_CUDA(cudaMalloc((void **)&b->image, arena->bytes));
        b->image_bytes = arena->bytes;
    }
    b->delta = b->image - arena->base;
    *delta = b->delta;
    return ATTND_OK;
}

static attnd_err cuda_put(bench_backend *b, const bench_arena *arena, attnd_errinfo *info) {
    TRY_CUDA(cudaMemcpy(b->image, arena->base, arena->used, cudaMemcpyHostToDevice));
    TRY_CUDA(cudaDeviceSynchronize()); // launches are in a stream that waits for nobody
    return ATTND_OK;
}

static attnd_err cuda_get(bench_backend *b, void *host, uint64_t bytes, attnd_errinfo *info) {
    TRY_CUDA(cudaMemcpy(host, (char *)host + b->delta, bytes, cudaMemcpyDeviceToHost));
    return ATTND_OK;
}

// ---- launches

// records returns how many records a plan of the launch may need.
static uint32_t records(const attn_params *launch) {
    uint64_t num = 0;
    int64_t group = launch->shape.q_heads / launch->shape.kv_heads;
    for (uint32_t i = 0; i < launch->num_rows; i++) {
        int64_t tokens = QUERY_ROWS / group > 0 ? QUERY_ROWS / group : 1; // of a record
        int64_t parts = (group + QUERY_ROWS - 1) / QUERY_ROWS;
        num += (uint64_t)((launch->rows[i].q_count + tokens - 1) / tokens * parts);
    }
    return (uint32_t)num;
}

// plan_of returns the plan of a launch, which is made, set and uploaded when it is first asked for.
static attnd_err plan_of(bench_backend *b, const attn_params *launch, attn_choice *choice,
                         attn_cuda_plan **out, attnd_errinfo *info) {
    for (uint32_t i = 0; i < b->num_plans; i++) {
        if (b->plans[i].launch == launch) {
            *out = b->plans[i].plan;
            return choice ? attn_cuda_plan_set(*out, launch, choice, info) : ATTND_OK;
        }
    }
    if (b->num_plans == b->max_plans) {
        uint32_t max = b->max_plans ? 2 * b->max_plans : 64;
        planned *plans = realloc(b->plans, max * sizeof(*plans));
        if (!plans) {
            return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for plans");
        }
        b->plans = plans;
        b->max_plans = max;
    }
    attn_cuda_plan *plan = NULL;
    attnd_err err = attn_cuda_plan_create(&plan, b->engine, &launch->shape, records(launch), info);
    err = err == ATTND_OK ? attn_cuda_plan_set(plan, launch, choice, info) : err;
    err = err == ATTND_OK ? attn_cuda_plan_upload(plan, b->stream, info) : err;
    if (err != ATTND_OK) {
        attn_cuda_plan_free(plan);
        return err;
    }
    TRY_CUDA(cudaStreamSynchronize(b->stream));
    b->plans[b->num_plans++] = (planned){launch, plan};
    *out = plan;
    return ATTND_OK;
}

static attnd_err cuda_run(bench_backend *b, const attn_params *launch, attn_choice *choice,
                          attnd_errinfo *info) {
    attn_cuda_plan *plan = NULL;
    attnd_err err = plan_of(b, launch, choice, &plan, info);
    err = err == ATTND_OK ? attn_cuda_launch(plan, b->stream, info) : err;
    if (err == ATTND_OK) {
        TRY_CUDA(cudaStreamSynchronize(b->stream));
    }
    return err;
}

static double cuda_plan_us(bench_backend *b, const attn_params *launch) {
    double times[PLAN_REPS];
    attn_cuda_plan *plan = NULL;
    attnd_errinfo info;
    if (plan_of(b, launch, NULL, &plan, &info) != ATTND_OK) {
        return 0;
    }
    for (int i = 0; i < PLAN_REPS; i++) {
        double begin = bench_now();
        if (attn_cuda_plan_set(plan, launch, NULL, &info) != ATTND_OK) {
            return 0;
        }
        times[i] = (bench_now() - begin) * 1e6;
    }
    return bench_spread_of(times, PLAN_REPS).median;
}

// capture records the calls of a sample; its launches are there.
static attnd_err capture(bench_backend *b, sample *s, attnd_errinfo *info) {
    cudaGraph_t graph = NULL;
    attnd_err err = ATTND_OK;
    attn_cuda_plan *plan = NULL;
    for (uint32_t i = 0; i < s->num && err == ATTND_OK; i++) {
        err = plan_of(b, s->launches[i], NULL, &plan, info);
    }
    if (err != ATTND_OK) {
        return err;
    }
    TRY_CUDA(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
    for (uint32_t i = 0; i < s->num && err == ATTND_OK; i++) {
        err = plan_of(b, s->launches[i], NULL, &plan, info);
        err = err == ATTND_OK ? attn_cuda_launch(plan, b->stream, info) : err;
    }
    cudaError_t ended = cudaStreamEndCapture(b->stream, &graph);
    if (err != ATTND_OK) {
        return err;
    }
    TRY_CUDA(ended);
    cudaError_t made = cudaGraphInstantiate(&s->exec, graph, 0);
    (void)cudaGraphDestroy(graph);
    TRY_CUDA(made);
    TRY_CUDA(cudaGraphLaunch(s->exec, b->stream)); // the first replay takes longer
    TRY_CUDA(cudaStreamSynchronize(b->stream));
    return ATTND_OK;
}

static attnd_err sample_of(bench_backend *b, const attn_params *const *launches, uint32_t num,
                           const sample **out, attnd_errinfo *info) {
    for (uint32_t i = 0; i < b->num_samples; i++) {
        const sample *s = &b->samples[i];
        if (s->num == num && memcmp(s->launches, launches, num * sizeof(*launches)) == 0) {
            *out = s;
            return ATTND_OK;
        }
    }
    if (b->num_samples == MAX_GRAPHS) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "more than %d samples of a group", MAX_GRAPHS);
    }
    sample *s = &b->samples[b->num_samples];
    *s = (sample){.launches = malloc(num * sizeof(*launches)), .num = num};
    if (!s->launches) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for a sample");
    }
    memcpy(s->launches, launches, num * sizeof(*launches));
    attnd_err err = capture(b, s, info);
    if (err != ATTND_OK) {
        free(s->launches);
        return err;
    }
    b->num_samples++;
    *out = s;
    return ATTND_OK;
}

static attnd_err cuda_time(bench_backend *b, const attn_params *const *launches, uint32_t num,
                           double *us, attnd_errinfo *info) {
    const sample *s = NULL;
    float ms = 0;
    attnd_err err = sample_of(b, launches, num, &s, info);
    if (err != ATTND_OK) {
        return err;
    }
    TRY_CUDA(cudaEventRecord(b->begin, b->stream));
    TRY_CUDA(cudaGraphLaunch(s->exec, b->stream));
    TRY_CUDA(cudaEventRecord(b->end, b->stream));
    bench_nvml_pace(b->nvml, &b->pace.mhz, &b->pace.watts); // while it runs
    TRY_CUDA(cudaEventSynchronize(b->end));
    TRY_CUDA(cudaEventElapsedTime(&ms, b->begin, b->end));
    *us = (double)ms * 1e3 / num;
    return ATTND_OK;
}

static bench_pace cuda_pace(const bench_backend *b) {
    return b->pace;
}

// ---- peers

static const char *cuda_peer_name(bench_backend *b, const bench_case *c) {
    return b->peer ? bench_cuda_peer_name(b->peer, c) : NULL;
}

static attnd_err cuda_peer(bench_backend *b, const bench_case *c, uint32_t copies, double *us,
                           attnd_errinfo *info) {
    (void)copies; // it has as many as it needs
    return bench_cuda_peer_time(b->peer, c, us, &b->pace, info);
}

static const char *cuda_peer_missing(bench_backend *b) {
    return b->peer ? NULL
                   : "peers are left out: --peer 'python3 tests/load/peers.py --serve' is cuDNN, "
                     "where PyTorch is";
}

// ---- ceilings

static uint32_t cuda_ceilings(const bench_backend *b, const bench_case *c) {
    return bench_case_is_prefill(c) ? 0 : bench_cuda_read_ways(b->read);
}

static void name_ceiling(const bench_backend *b, uint32_t way, bench_ceiling *out) {
    *out = (bench_ceiling){.is_bytes = true};
    snprintf(out->what, sizeof(out->what), "read in random order, %s",
             bench_cuda_read_name(b->read, way));
}

static attnd_err cuda_ceiling(bench_backend *b, const bench_case *c, uint32_t way,
                              const bench_set *const *sets, uint32_t num, bench_ceiling *out,
                              attnd_errinfo *info) {
    (void)c;
    (void)sets;
    (void)num;
    name_ceiling(b, way, out);
    return bench_cuda_read_run(b->read, way, &out->value, info);
}

static uint32_t cuda_machine(bench_backend *b, const bench_arena *arena, bench_ceiling *out) {
    (void)arena;
    uint32_t num = bench_cuda_read_ways(b->read);
    for (uint32_t way = 0; way < num; way++) {
        double values[MACHINE_REPS] = {0};
        for (int i = 0; i < MACHINE_REPS; i++) {
            (void)bench_cuda_read_run(b->read, way, &values[i], NULL);
        }
        name_ceiling(b, way, &out[way]);
        out[way].value = bench_spread_of(values, MACHINE_REPS).median;
    }
    return num;
}

const bench_backend_ops bench_backend_cuda = {
    .name = "cuda",
    .groups = bench_cuda_groups,
    .asks = bench_cuda_asks,
    .kernels = kernels,
    .sample_bytes = SAMPLE_BYTES,
    .sample_calls = SAMPLE_CALLS,
    .open = cuda_open,
    .close = cuda_close,
    .describe = cuda_describe,
    .state = cuda_state,
    .threads = cuda_threads,
    .last_cache = cuda_last_cache,
    .place = cuda_place,
    .put = cuda_put,
    .get = cuda_get,
    .run = cuda_run,
    .time = cuda_time,
    .pace = cuda_pace,
    .plan_us = cuda_plan_us,
    .ceilings = cuda_ceilings,
    .ceiling = cuda_ceiling,
    .machine = cuda_machine,
    .peer_name = cuda_peer_name,
    .peer = cuda_peer,
    .peer_follows = true,
    .peer_missing = cuda_peer_missing,
};
