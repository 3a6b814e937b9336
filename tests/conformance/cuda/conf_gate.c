// The pairs are in a region, the flags in host memory that the device was given, as in a daemon.
#include "tests/conformance/cuda/conf_gate.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "attention/cuda/hand_over.h"
#include "proto/proto_region.h"

enum { FLAGS_BYTES = 4096, RECORDS = 64, LONG_US = 1000000 };

static const attn_device_ops *const ops = &attn_cuda_device_ops;
static attn_device *device;
static attn_device_region region;
static uint64_t *flags, flags_address;
static cudaStream_t client;

// For masks.
static attn_cuda *engine;
static attn_cuda_plan *plan;
static cudaStream_t stream;
static hand_over_gate *outcome, *told; // on the device; pinned

attn_device *conf_gate_open(void) {
    attnd_errinfo info = {0};
    const attn_device_opts opts = {.arena_bytes = 1 << 20, .buffer_bytes = 4096, .max_rows = 8};
    const attn_cuda_opts no_prefill = {.prefill_rows = -1};
    attnd_err err = ops->open(&device, &opts, &info);
    if (err == ATTND_ENOTSUP) {
        printf("no GPU here: %s\n", info.text);
        return NULL;
    }
    if (!err && !device->waits) {
        printf("%s has no gates\n", device->name);
        ops->close(device);
        return NULL;
    }
    flags = mmap(NULL, FLAGS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (err || flags == MAP_FAILED ||
        ops->flags_map(device, flags, FLAGS_BYTES, &flags_address, &info) ||
        ops->region_make(device, CONF_GATE_PAIRS * sizeof(proto_flag), &region, &info) ||
        cudaStreamCreateWithFlags(&client, cudaStreamNonBlocking) ||
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) ||
        cudaMalloc((void **)&outcome, sizeof(*outcome)) ||
        cudaHostAlloc((void **)&told, sizeof(*told), cudaHostAllocDefault) ||
        attn_cuda_create(&engine, &no_prefill, &info)) {
        printf("%s: %s\n", info.field, info.text);
        abort();
    }
    return device;
}

void conf_gate_close(void) {
    (void)cudaDeviceSynchronize();
    attn_cuda_plan_free(plan);
    attn_cuda_free(engine);
    (void)cudaFree(outcome);
    (void)cudaFreeHost(told);
    (void)cudaStreamDestroy(client);
    (void)cudaStreamDestroy(stream);
    ops->region_free(device, &region);
    ops->flags_unmap(device, flags);
    (void)munmap(flags, FLAGS_BYTES);
    ops->close(device);
}

void conf_gate_start(void) {
    for (uint32_t i = 0; i < CONF_GATE_PAIRS; i++) {
        __atomic_fetch_or(&flags[i], CONF_ANSWERED, __ATOMIC_RELEASE);
    }
    CONF_GATE_OK(cudaDeviceSynchronize());
    memset(flags, 0, FLAGS_BYTES);
    CONF_GATE_OK(cudaMemset((void *)region.address, 0, CONF_GATE_PAIRS * sizeof(proto_flag)));
    CONF_GATE_OK(cudaDeviceSynchronize());
}

void conf_input_init(conf_input *in, const conf_spec *spec) {
    memset(in, 0, sizeof(*in));
    conf_launch_init(&in->launch, spec);
    conf_oracle_init(&in->oracle, &in->launch);
    conf_device_init(&in->gpu, &in->launch, (conf_layout){0, 1});
}

void conf_input_fini(conf_input *in) {
    conf_device_fini(&in->gpu);
    conf_oracle_fini(&in->oracle);
    conf_launch_fini(&in->launch);
    free(in->memory);
    free(in->pool);
}

// ---- the client

uint64_t conf_gate_address(uint32_t pair) {
    return region.address + pair * sizeof(proto_flag);
}

uint64_t conf_gate_pair(uint32_t pair) {
    uint64_t word = 0;
    const void *at = (const void *)conf_gate_address(pair);
    CONF_GATE_OK(cudaMemcpy(&word, at, sizeof(word), cudaMemcpyDeviceToHost));
    return word;
}

uint64_t *conf_gate_flag(uint32_t pair) {
    return &flags[pair];
}

static void raise_pair(uint32_t pair) {
    __atomic_store_n(&flags[pair], 0, __ATOMIC_RELEASE);
    CONF_GATE_OK(hand_over_raise(conf_gate_address(pair), flags_address + pair * sizeof(proto_flag),
                                 client));
}

void conf_gate_raise(uint32_t pair) {
    raise_pair(pair);
    CONF_GATE_AWAIT(__atomic_load_n(&flags[pair], __ATOMIC_ACQUIRE) == CONF_RAISED, LONG_US);
}

bool conf_gate_client_ended(void) {
    return cudaStreamQuery(client) == cudaSuccess;
}

void conf_gate_check_answered(uint32_t pair) {
    CONF_GATE_AWAIT(conf_gate_client_ended(), CONF_GATE_END_US);
    ck_assert_uint_eq(conf_gate_pair(pair), CONF_ANSWERED);
    ck_assert_uint_eq(__atomic_load_n(&flags[pair], __ATOMIC_ACQUIRE), CONF_RAISED); // as it was
}

// ---- the daemon

void conf_gate_plan(conf_input *in, uint32_t buffer) {
    if (buffer != CONF_GATE_MASKS) {
        CONF_GATE_OK(ops->plan(device, buffer, &in->gpu.params, NULL, NULL));
        CONF_GATE_OK(ops->upload(device, buffer, 0, 0, NULL));
        CONF_GATE_AWAIT(ops->uploaded(device, buffer), LONG_US);
        ck_assert(ops->gates(device, buffer));
        return;
    }
    if (!plan) {
        CONF_GATE_OK(attn_cuda_plan_create(&plan, engine, &in->gpu.params.shape, RECORDS, NULL));
    }
    CONF_GATE_OK(attn_cuda_plan_set(plan, &in->gpu.params, NULL, NULL));
    ck_assert(attn_cuda_plan_kernels(plan) & ATTN_CUDA_PORTABLE);
    CONF_GATE_OK(attn_cuda_plan_upload(plan, stream, NULL));
    CONF_GATE_OK(cudaStreamSynchronize(stream));
}

static void begin(uint32_t buffer, uint64_t pair) {
    if (buffer != CONF_GATE_MASKS) {
        CONF_GATE_OK(ops->launch_gated(device, buffer, pair, NULL));
        return;
    }
    CONF_GATE_OK(
        hand_over_wait(pair, outcome, attn_cuda_plan_work(plan), ATTN_DEVICE_GATE_US, stream));
    CONF_GATE_OK(attn_cuda_launch(plan, stream, NULL));
    CONF_GATE_OK(hand_over_answer(pair, outcome, told, stream));
}

static bool has_ended(uint32_t buffer) {
    bool ended = false;
    CONF_GATE_OK(ops->ended(device, buffer, &ended, NULL));
    return ended;
}

void conf_gate_end(uint32_t buffer) {
    CONF_GATE_OK(ops->mark(device, buffer, NULL));
    CONF_GATE_AWAIT(has_ended(buffer), LONG_US);
}

// end returns whether the gate has passed.
static bool end(uint32_t buffer, uint32_t *waited_us) {
    if (buffer != CONF_GATE_MASKS) {
        conf_gate_end(buffer);
        return ops->passed(device, buffer, waited_us);
    }
    CONF_GATE_AWAIT(cudaStreamQuery(stream) == cudaSuccess, LONG_US);
    *waited_us = told->waited_us;
    return told->state == HAND_OVER_PASSED;
}

static char *copy_of(const void *bytes, size_t num, enum cudaMemcpyKind kind) {
    char *copy = malloc(num);
    CONF_GATE_OK(cudaMemcpy(copy, bytes, num, kind));
    return copy;
}

static void check_holds(const conf_device *d, const char *memory, const char *pool) {
    char *got_memory = copy_of(d->memory, d->bytes, cudaMemcpyDeviceToHost);
    char *got_pool = copy_of(d->pool, d->pool_bytes, cudaMemcpyDeviceToHost);
    ck_assert_int_eq(memcmp(got_memory, memory, d->bytes), 0);
    ck_assert_int_eq(memcmp(got_pool, pool, d->pool_bytes), 0);
    free(got_memory);
    free(got_pool);
}

void conf_gate_check_right(conf_input *in) {
    conf_device *d = &in->gpu;
    if (in->memory) {
        check_holds(d, in->memory, in->pool);
        return;
    }
    conf_device_get(d, &in->launch);
    const char *wrong = conf_oracle_check(&in->oracle, &in->launch);
    ck_assert_msg(!wrong, "%s", wrong);
    in->memory = copy_of(d->image, d->bytes, cudaMemcpyHostToHost);
    in->pool = copy_of(d->pool_image, d->pool_bytes, cudaMemcpyHostToHost);
}

bool conf_gate_run(conf_input *in, uint32_t buffer, uint32_t pair, conf_when when,
                   uint32_t *waited_us) {
    conf_launch_reset(&in->launch);
    conf_device_put(&in->gpu, &in->launch);
    conf_gate_plan(in, buffer);
    const uint64_t before = conf_gate_pair(pair);
    if (when == CONF_BEFORE) {
        conf_gate_raise(pair);
    }
    const uint64_t begin_us = attnd_clock_us();
    begin(buffer, conf_gate_address(pair));
    while (when == CONF_LATER && attnd_clock_us() - begin_us < CONF_GATE_LATER_US) {
    }
    if (when > CONF_BEFORE) {
        raise_pair(pair);
    }
    bool passed = end(buffer, waited_us);
    ck_assert(passed || attnd_clock_us() - begin_us >= ATTN_DEVICE_GATE_US);
    if (when != CONF_NEVER && !passed) {
        CONF_GATE_OK(ops->signal(device, conf_gate_address(pair), NULL));
    }
    if (when != CONF_NEVER) {
        conf_gate_check_answered(pair);
    } else {
        ck_assert_uint_eq(conf_gate_pair(pair), before);
    }
    if (passed) {
        conf_gate_check_right(in);
    } else {
        check_holds(&in->gpu, in->gpu.image, in->gpu.pool_image); // what was put
    }
    return passed;
}
