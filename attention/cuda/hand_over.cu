// One thread of each kernel works; it polls memory of the GPU, never, or hardly ever, of the host.
//
// Shared memory: a kernel that asks for none would have an SM divide its memory anew between L1 and
// shared, which waits until the SM is empty; so all ask for the division that attention has.
#include "attention/cuda/hand_over.h"
#include "attention/cuda/ptx.cuh"
#include "proto/proto_region.h"

namespace {

constexpr uint64_t kNs = 1000;             // of a microsecond
constexpr uint64_t kHostLookNs = 64000;    // a look at host memory takes longer than the rest
constexpr uint64_t kRaised = 1;            // a proto_flag: ready = 1, done = 0
constexpr uint64_t kAnswered = 1ull << 32; // ready = 0, done = 1

__device__ __forceinline__ uint64_t now_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

// load is relaxed: an acquire each time would empty the L1 beside an attention.  Who has seen what
// it waits for fences once.
__device__ __forceinline__ uint64_t load(const proto_flag *p) {
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ bool is_ready(const proto_flag *p) {
    return (uint32_t)load(p) != 0;
}

__device__ __forceinline__ bool is_done(const proto_flag *p) {
    return load(p) >> 32 != 0;
}

__device__ __forceinline__ void store(uint64_t *p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// raise_and_wait: the daemon's gate looks at the pair, its host at the flag.  The host answers
// there, too, when the device does not.
__global__ void __launch_bounds__(32) raise_and_wait(proto_flag *pair, proto_flag *flag) {
    if (threadIdx.x != 0) {
        return;
    }
    store((uint64_t *)pair, kRaised);
    store((uint64_t *)flag, kRaised);
    uint64_t look_ns = now_ns() + kHostLookNs;
    while (!is_done(pair)) {
        if (now_ns() < look_ns) {
            continue;
        }
        if (is_done(flag)) {
            break;
        }
        look_ns = now_ns() + kHostLookNs;
    }
    __threadfence_system();
    *(volatile uint32_t *)&pair->ready = 0;
}

__global__ void __launch_bounds__(32)
    gate(const proto_flag *pair, hand_over_gate *outcome, uint32_t *work, uint32_t limit_us) {
    if (threadIdx.x != 0) {
        return;
    }
    const uint64_t begin_ns = now_ns(), limit_ns = limit_us * kNs;
    bool passed = is_ready(pair);
    while (!passed && now_ns() - begin_ns < limit_ns) {
        passed = is_ready(pair);
    }
    *outcome = {(uint32_t)(passed ? HAND_OVER_PASSED : HAND_OVER_MISSED),
                (uint32_t)((now_ns() - begin_ns) / kNs)};
    if (!passed) {
        *work = 0; // the launch looks there as soon as this has ended
    }
    __threadfence_system();
    if (passed) {
        ptx::grid_launch_next();
    }
}

// answer also tells the host: a store there by the gate would be waited for by the launch.
__global__ void __launch_bounds__(32)
    answer(proto_flag *pair, const hand_over_gate *outcome, hand_over_gate *told) {
    ptx::grid_wait();
    if (threadIdx.x != 0) {
        return;
    }
    const volatile hand_over_gate *g = outcome; // not from the L1
    const uint32_t state = g->state, waited_us = g->waited_us;
    if (state == HAND_OVER_PASSED) {
        store((uint64_t *)pair, kAnswered);
    }
    *told = {state, waited_us};
}

cudaError_t start(const void *kernel, void **args, bool is_early, cudaStream_t stream) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 32;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = is_early;
    return cudaLaunchKernelExC(&config, kernel, args);
}

cudaError_t prepare(const void *kernel) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
}

} // namespace

cudaError_t hand_over_prepare(void) {
    cudaError_t code = prepare((const void *)raise_and_wait);
    code = code != cudaSuccess ? code : prepare((const void *)gate);
    return code != cudaSuccess ? code : prepare((const void *)answer);
}

cudaError_t hand_over_raise(uint64_t pair, uint64_t flag, cudaStream_t stream) {
    void *args[] = {&pair, &flag};
    return start((const void *)raise_and_wait, args, false, stream);
}

cudaError_t hand_over_wait(uint64_t pair, hand_over_gate *outcome, uint32_t *work,
                           uint32_t limit_us, cudaStream_t stream) {
    void *args[] = {&pair, &outcome, &work, &limit_us};
    return start((const void *)gate, args, false, stream);
}

cudaError_t hand_over_answer(uint64_t pair, const hand_over_gate *outcome, hand_over_gate *told,
                             cudaStream_t stream) {
    void *args[] = {&pair, &outcome, &told};
    return start((const void *)answer, args, true, stream);
}
