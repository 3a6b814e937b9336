// Streams of a GPU.  A pause is a host function that sleeps.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <time.h>

#include "attention/attn_engine.h"
#include "proto/clock.h"
#include "tests/check_main.h"
#include "tests/e2e/service_device.h"

#define CUDA_OK(call) ck_assert_int_eq((call), cudaSuccess)

struct service_stream {
    int none; // never made: a service_stream is a cudaStream_t
};

struct service_graph {
    cudaGraphExec_t exec;
};

static cudaStream_t of(service_stream *s) {
    return (cudaStream_t)(void *)s;
}

const attnd_engine *service_engine(void) {
    return attn_engine_cuda_service();
}

void service_use(void) {
    const char *number = getenv("ATTND_E2E_CLIENT_DEVICE");
    CUDA_OK(cudaSetDevice(number ? (int)strtol(number, NULL, 10) : 0));
}

void *service_alloc(size_t bytes) {
    void *p = NULL;
    CUDA_OK(cudaMalloc(&p, bytes));
    CUDA_OK(cudaMemset(p, 0, bytes));
    CUDA_OK(cudaDeviceSynchronize()); // streams do not wait for it
    return p;
}

void service_free(void *p) {
    CUDA_OK(cudaFree(p));
}

service_stream *service_stream_create(void) {
    cudaStream_t s;
    CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return (service_stream *)(void *)s;
}

void service_stream_free(service_stream *s) {
    CUDA_OK(cudaStreamDestroy(of(s)));
}

void service_copy(service_stream *s, void *to, const void *from, size_t bytes) {
    CUDA_OK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, of(s)));
}

static void CUDART_CB sleep_ms(void *arg) {
    long ms = (long)(intptr_t)arg;
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

void service_pause(service_stream *s, int ms) {
    CUDA_OK(cudaLaunchHostFunc(of(s), sleep_ms, (void *)(intptr_t)ms));
}

bool service_sync(service_stream *s, int ms) {
    uint64_t until = attnd_clock_ms() + (uint64_t)ms;
    cudaError_t code;
    while ((code = cudaStreamQuery(of(s))) == cudaErrorNotReady && attnd_clock_ms() < until) {
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    ck_assert(code == cudaSuccess || code == cudaErrorNotReady);
    return code == cudaSuccess;
}

void service_capture(service_stream *s) {
    CUDA_OK(cudaStreamBeginCapture(of(s), cudaStreamCaptureModeGlobal));
}

service_graph *service_end(service_stream *s) {
    service_graph *g = calloc(1, sizeof(*g));
    cudaGraph_t graph;
    ck_assert_ptr_nonnull(g);
    CUDA_OK(cudaStreamEndCapture(of(s), &graph));
    CUDA_OK(cudaGraphInstantiate(&g->exec, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    return g;
}

void service_launch(service_graph *g, service_stream *s) {
    CUDA_OK(cudaGraphLaunch(g->exec, of(s)));
}

void service_graph_free(service_graph *g) {
    CUDA_OK(cudaGraphExecDestroy(g->exec));
    free(g);
}
