// Each way of reading is a kernel that moves runs on chip and looks at a little of each, so that
// nothing of it can be left out.  Bulk copies need sm_90; plain loads are there on every GPU.
#include "tests/load/bench_cuda_read.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "attention/cuda/attn_cuda_error.h"
#include "attention/cuda/ptx.cuh"

#define TRY_CUDA(call)                                  \
    do {                                                \
        cudaError_t code = (call);                      \
        if (code != cudaSuccess) {                      \
            return attn_cuda_failed(code, #call, info); \
        }                                               \
    } while (0)

static constexpr int kRun = 16384; // bytes
static constexpr int kPlainThreads = 512;
static constexpr int kBulkShared = 220 * 1024; // bytes a CTA of the bulk ways may take

static __device__ uint64_t mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// fill writes random bits whose bf16 values are between 0.5 and 2, or minus that.
static __global__ void fill(uint64_t *g_data, uint64_t words) {
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < words;
         i += (uint64_t)gridDim.x * blockDim.x) {
        g_data[i] = (mix(i) & 0x80ff80ff80ff80ffull) | 0x3f003f003f003f00ull;
    }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// read_bulk: a loader warp, whose lanes copy a run together and hold the indices of 32 runs, and a
// warp that waits and hands the stage back.
template <int kCopies, int kPad, bool kOnce>
static __device__ void read_bulk(const char *g_data, const uint32_t *g_order, uint32_t runs,
                                 uint32_t stages, uint32_t *g_out) {
    extern __shared__ __align__(128) unsigned char s_memory[];
    constexpr uint32_t kStage = kRun + kCopies * kPad;
    uint64_t *s_bars = (uint64_t *)s_memory;
    const uint32_t s_full = ptx::s_addr(s_bars), s_empty = s_full + 8 * stages;
    const uint32_t s_data = ptx::s_addr(s_memory) + 1024;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < stages) {
        ptx::mbar_init(s_full + 8 * threadIdx.x, 1);
        ptx::mbar_init(s_empty + 8 * threadIdx.x, 1);
        ptx::fence_mbar_init();
    }
    __syncthreads();
    uint32_t stage = 0, phase = 0;
    if (threadIdx.x >= 32) {
        uint32_t sum = 0;
        for (uint32_t i = blockIdx.x; i < runs; i += gridDim.x) {
            ptx::mbar_wait(s_full + 8 * stage, phase);
            sum += ptx::s_load(s_data + stage * kStage + lane * 16).x;
            __syncwarp();
            if (lane == 0) {
                ptx::mbar_arrive(s_empty + 8 * stage);
            }
            if (++stage == stages) {
                stage = 0;
                phase ^= 1;
            }
        }
        if (sum == 0x12345678) {
            g_out[blockIdx.x] = sum;
        }
        return;
    }
    const uint64_t policy = ptx::policy_evict_first();
    uint32_t next = blockIdx.x + lane * gridDim.x;
    uint32_t run = next < runs ? __ldg(g_order + next) : 0;
    for (uint32_t first = blockIdx.x; first < runs; first += 32 * gridDim.x) {
        const uint32_t current = run;
        next += 32 * gridDim.x;
        run = next < runs ? __ldg(g_order + next) : 0;
        for (int k = 0; k < 32 && first + k * gridDim.x < runs; k++) {
            const char *src = g_data + (uint64_t)__shfl_sync(~0u, current, k) * kRun;
            ptx::mbar_wait(s_empty + 8 * stage, phase ^ 1);
            if (lane < kCopies) {
                constexpr uint32_t kBytes = kRun / kCopies;
                uint32_t dst = s_data + stage * kStage + lane * (kBytes + kPad);
                if (kOnce) {
                    ptx::bulk_copy_once(dst, src + lane * kBytes, kBytes, s_full + 8 * stage,
                                        policy);
                } else {
                    ptx::bulk_copy(dst, src + lane * kBytes, kBytes, s_full + 8 * stage);
                }
            }
            __syncwarp();
            if (lane == 0) {
                ptx::mbar_arrive_expect(s_full + 8 * stage, kRun);
            }
            if (++stage == stages) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}
#endif

template <int kCopies, int kPad, bool kOnce>
static __global__ void __launch_bounds__(64)
    read_runs(const char *g_data, const uint32_t *g_order, uint32_t runs, uint32_t stages,
              uint32_t *g_out) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    read_bulk<kCopies, kPad, kOnce>(g_data, g_order, runs, stages, g_out);
#endif
}

// read_plain: a CTA loads two 16-byte pieces a thread of each run.
static __global__ void __launch_bounds__(kPlainThreads)
    read_plain(const char *g_data, const uint32_t *g_order, uint32_t runs, uint32_t,
               uint32_t *g_out) {
    constexpr int kAtOnce = 4; // runs
    uint32_t sum = 0;
    for (uint32_t first = blockIdx.x * kAtOnce; first < runs; first += gridDim.x * kAtOnce) {
        uint4 x[kAtOnce][2] = {};
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
            if (first + k < runs) {
                const char *run = g_data + (uint64_t)__ldg(g_order + first + k) * kRun;
                x[k][0] = __ldg((const uint4 *)run + threadIdx.x);
                x[k][1] = __ldg((const uint4 *)run + kPlainThreads + threadIdx.x);
            }
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
            sum += x[k][0].x ^ x[k][0].y ^ x[k][0].z ^ x[k][0].w ^ x[k][1].x ^ x[k][1].y ^
                   x[k][1].z ^ x[k][1].w;
        }
    }
    if (sum == 0x12345678) {
        g_out[blockIdx.x] = sum;
    }
}

struct way {
    const char *name;
    void (*function)(const char *, const uint32_t *, uint32_t, uint32_t, uint32_t *);
    int ctas, threads; // ctas of an SM
    uint32_t stages;   // of a CTA
};

// Those on sm_90 first: one copy a run, or four as the decode kernel has them.
static const way ways[] = {
    {"bulk copies of 16 KiB, 2 CTAs an SM", read_runs<1, 0, false>, 2, 64, 6},
    {"bulk copies of 16 KiB", read_runs<1, 0, false>, 1, 64, 13},
    {"bulk copies of 4 KiB", read_runs<4, 0, false>, 1, 64, 13},
    {"bulk copies of 4 KiB, each set off by 32 bytes", read_runs<4, 32, false>, 1, 64, 13},
    {"bulk copies of 16 KiB, evicted first", read_runs<1, 0, true>, 1, 64, 13},
    {"plain loads", read_plain, 2, kPlainThreads, 0},
};
static constexpr uint32_t kWays = sizeof(ways) / sizeof(*ways);

struct bench_cuda_read {
    uint64_t bytes;
    uint32_t runs, first_way;
    int sms;
    char *g_data;
    uint32_t *g_order, *g_out;
    cudaEvent_t begin, end;
};

static attnd_err make(bench_cuda_read *r, attnd_errinfo *info) {
    int device = 0, shared = 0;
    TRY_CUDA(cudaGetDevice(&device));
    TRY_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    TRY_CUDA(cudaDeviceGetAttribute(&r->sms, cudaDevAttrMultiProcessorCount, device));
    r->first_way = shared >= kBulkShared ? 0 : kWays - 1; // sm_90 and sm_100 have that much
    std::vector<uint32_t> order(r->runs);
    for (uint32_t i = 0; i < r->runs; i++) {
        order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    TRY_CUDA(cudaMalloc(&r->g_data, r->bytes));
    TRY_CUDA(cudaMalloc(&r->g_order, r->runs * sizeof(uint32_t)));
    TRY_CUDA(cudaMalloc(&r->g_out, 4096 * sizeof(uint32_t)));
    TRY_CUDA(
        cudaMemcpy(r->g_order, order.data(), r->runs * sizeof(uint32_t), cudaMemcpyHostToDevice));
    fill<<<1056, 256>>>((uint64_t *)r->g_data, r->bytes / 8);
    TRY_CUDA(cudaGetLastError());
    TRY_CUDA(cudaEventCreate(&r->begin));
    TRY_CUDA(cudaEventCreate(&r->end));
    return ATTND_OK;
}

attnd_err bench_cuda_read_open(bench_cuda_read **out, uint64_t bytes, attnd_errinfo *info) {
    bench_cuda_read *r = (bench_cuda_read *)calloc(1, sizeof(*r));
    if (!r) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory");
    }
    r->runs = (uint32_t)(bytes / kRun);
    r->bytes = (uint64_t)r->runs * kRun;
    attnd_err err = make(r, info);
    if (err != ATTND_OK) {
        bench_cuda_read_close(r);
        return err;
    }
    *out = r;
    return ATTND_OK;
}

void bench_cuda_read_close(bench_cuda_read *r) {
    if (r) {
        (void)cudaFree(r->g_data);
        (void)cudaFree(r->g_order);
        (void)cudaFree(r->g_out);
        (void)cudaEventDestroy(r->begin);
        (void)cudaEventDestroy(r->end);
        free(r);
    }
}

uint32_t bench_cuda_read_ways(const bench_cuda_read *r) {
    return kWays - r->first_way;
}

const char *bench_cuda_read_name(const bench_cuda_read *r, uint32_t way) {
    return ways[r->first_way + way].name;
}

attnd_err bench_cuda_read_run(bench_cuda_read *r, uint32_t number, double *gbs,
                              attnd_errinfo *info) {
    const way &w = ways[r->first_way + number];
    const int shared = w.stages > 0 ? 1024 + (int)w.stages * (kRun + 128) : 0;
    float ms = 0;
    if (shared > 0) {
        TRY_CUDA(cudaFuncSetAttribute((const void *)w.function,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    }
    TRY_CUDA(cudaEventRecord(r->begin, 0));
    w.function<<<r->sms * w.ctas, w.threads, shared>>>(r->g_data, r->g_order, r->runs, w.stages,
                                                       r->g_out);
    TRY_CUDA(cudaGetLastError());
    TRY_CUDA(cudaEventRecord(r->end, 0));
    TRY_CUDA(cudaEventSynchronize(r->end));
    TRY_CUDA(cudaEventElapsedTime(&ms, r->begin, r->end));
    *gbs = (double)r->bytes / ms * 1e-6;
    return ATTND_OK;
}
