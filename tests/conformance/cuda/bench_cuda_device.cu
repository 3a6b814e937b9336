// Device side of bench_cuda.
#include "tests/conformance/cuda/bench_cuda_device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <random>
#include <vector>

#include "attention/cuda/ptx.cuh"

static void must(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        exit(1);
    }
}

static __device__ uint64_t mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static __global__ void fill(__nv_bfloat16 *g_data, uint64_t elements, uint64_t seed) {
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < elements;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint64_t x = mix(seed ^ i * 0x1234567);
        float sum = 0; // four uniforms: variance 1/3
        for (int k = 0; k < 4; k++) {
            sum += (float)(x >> (16 * k) & 0xffff) / 65536.0f - 0.5f;
        }
        g_data[i] = __float2bfloat16(sum * 1.7320508f);
    }
}

extern "C" void bench_fill(void *g_data, uint64_t elements, uint64_t seed) {
    fill<<<1056, 256>>>((__nv_bfloat16 *)g_data, elements, seed);
    must(cudaGetLastError(), "fill");
}

static constexpr int kRun = 16384;

// read_runs: a loader warp, whose lanes copy a run together and hold the indices of 32 runs, and a
// warp that waits and hands the stage back.
template <int kCopies, int kPad, bool kOnce, int kFirst = 0>
static __global__ void __launch_bounds__(64, 1)
    read_runs(const char *g_data, const uint32_t *g_order, uint32_t runs, uint32_t stages,
              uint32_t *g_out) {
    extern __shared__ __align__(128) unsigned char s_memory[];
    constexpr uint32_t kStage = kRun + kCopies * kPad + 2 * kFirst;
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
                uint32_t dst = s_data + stage * kStage + lane * (kBytes + kPad) + kFirst;
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

using read_fn = void (*)(const char *, const uint32_t *, uint32_t, uint32_t, uint32_t *);

extern "C" double bench_read(void *g_data, uint64_t bytes, int how) {
    static const read_fn fns[BENCH_READS] = {read_runs<1, 0, false>,  read_runs<1, 0, false>,
                                             read_runs<4, 0, false>,  read_runs<4, 32, false>,
                                             read_runs<8, 32, false>, read_runs<4, 32, true>};
    int sms = 0;
    must(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
    const uint32_t runs = (uint32_t)(bytes / kRun);
    std::vector<uint32_t> order(runs);
    for (uint32_t i = 0; i < runs; i++) {
        order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    uint32_t *g_order, *g_out;
    must(cudaMalloc(&g_order, runs * 4ull), "cudaMalloc");
    must(cudaMalloc(&g_out, 4096), "cudaMalloc");
    must(cudaMemcpy(g_order, order.data(), runs * 4ull, cudaMemcpyHostToDevice), "cudaMemcpy");
    const uint32_t ctas = how == 0 ? 2 : 1, stages = how == 0 ? 6 : how == 4 ? 12 : 13;
    const int shared = 1024 + (int)stages * (kRun + 256);
    must(cudaFuncSetAttribute(fns[how], cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
         "shared");
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin), "event");
    must(cudaEventCreate(&end), "event");
    std::vector<float> times;
    for (int i = 0; i < 11; i++) {
        must(cudaEventRecord(begin), "record");
        fns[how]<<<sms * ctas, 64, shared>>>((const char *)g_data, g_order, runs, stages, g_out);
        must(cudaEventRecord(end), "record");
        must(cudaEventSynchronize(end), "read_runs");
        float ms;
        must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
        times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    cudaFree(g_order);
    cudaFree(g_out);
    return (double)bytes / times[5] / 1e6;
}

static __global__ void reference(attn_shape s, const char *g_pool, attn_row row, int32_t head,
                                 double *g_out) {
    extern __shared__ double s_sums[]; // [blockDim]
    const int32_t kv_head = head / (s.q_heads / s.kv_heads);
    const __nv_bfloat16 *q = (const __nv_bfloat16 *)row.q + head * row.stride_q_head;
    const int thread = threadIdx.x;
    double scale = row.scale != 0 ? row.scale : 1 / sqrt((double)s.head_dim);
    double largest = -1e300;
    for (int pass = 0; pass < 2; pass++) {
        double total = 0, out[128] = {};
        for (int32_t key = thread; key < row.kv_len; key += blockDim.x) {
            const char *block = g_pool + row.table[key / s.block_tokens] * s.block_stride;
            const int64_t slot = key % s.block_tokens;
            const __nv_bfloat16 *k = (const __nv_bfloat16 *)(block + row.k_offset) +
                                     kv_head * s.stride_k_head + slot * s.stride_k_token;
            const __nv_bfloat16 *v = (const __nv_bfloat16 *)(block + row.v_offset) +
                                     kv_head * s.stride_v_head + slot * s.stride_v_token;
            double x = 0;
            for (int32_t d = 0; d < s.head_dim; d++) {
                x += (double)__bfloat162float(q[d]) * (double)__bfloat162float(k[d]);
            }
            x *= scale;
            if (pass == 0) {
                largest = fmax(largest, x);
                continue;
            }
            const double w = exp(x - largest);
            total += w;
            for (int32_t d = 0; d < s.head_dim; d++) {
                out[d] += w * (double)__bfloat162float(v[d]);
            }
        }
        for (int32_t d = -1; d < (pass == 0 ? 0 : s.head_dim); d++) {
            s_sums[thread] = pass == 0 ? largest : d < 0 ? total : out[d];
            __syncthreads();
            for (unsigned n = blockDim.x / 2; n > 0; n /= 2) {
                if ((unsigned)thread < n) {
                    s_sums[thread] = pass == 0 ? fmax(s_sums[thread], s_sums[thread + n])
                                               : s_sums[thread] + s_sums[thread + n];
                }
                __syncthreads();
            }
            if (pass == 0) {
                largest = s_sums[0];
            } else if (d < 0) {
                total = s_sums[0];
            } else if (thread == 0) {
                g_out[d] = s_sums[0] / total;
            }
            __syncthreads();
        }
    }
}

extern "C" void bench_reference(const attn_params *p, const attn_row *row, int32_t head,
                                double *g_out) {
    reference<<<1, 256, 256 * sizeof(double)>>>(p->shape, (const char *)p->pool, *row, head, g_out);
    must(cudaGetLastError(), "reference");
}
