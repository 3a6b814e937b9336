// ptx wraps one PTX instruction a function, so that kernels read as C.  Addresses called s_* are
// shared-memory addresses in the 32-bit shared window.
#ifndef ATTND_ATTENTION_CUDA_PTX_CUH
#define ATTND_ATTENTION_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace ptx {

__device__ __forceinline__ uint32_t s_addr(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// thread returns threadIdx.x, read anew: what follows from it is not kept in registers from one
// item to the next.
__device__ __forceinline__ int thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// --- mbarrier

__device__ __forceinline__ void mbar_init(uint32_t s_bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(s_bar), "r"(arrivals) : "memory");
}

// fence_mbar_init makes this thread's mbar_init known to the copy engine.
__device__ __forceinline__ void fence_mbar_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbar_arrive(uint32_t s_bar) {
    asm volatile("{\n\t.reg .b64 t;\n\tmbarrier.arrive.shared.b64 t, [%0];\n\t}" ::"r"(s_bar)
                 : "memory");
}

// mbar_test returns whether the phase of that parity is over; on sm_90 it may sleep a little first.
__device__ __forceinline__ bool mbar_test(uint32_t s_bar, uint32_t parity) {
    uint32_t done;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(s_bar), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(s_bar), "r"(parity)
                 : "memory");
#endif
    return done != 0;
}

__device__ __forceinline__ void mbar_wait(uint32_t s_bar, uint32_t parity) {
    while (!mbar_test(s_bar, parity)) {
    }
}

// --- asynchronous copies, global to shared

// mbar_arrive_expect arrives and adds bytes to what the phase still waits for.
__device__ __forceinline__ void mbar_arrive_expect(uint32_t s_bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(s_bar), "r"(bytes)
                 : "memory");
}

// mbar_expect only adds bytes.
__device__ __forceinline__ void mbar_expect(uint32_t s_bar, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(s_bar), "r"(bytes)
                 : "memory");
}

// bulk_copy copies bytes (a multiple of 16, both sides aligned to 16), and reports them to s_bar.
__device__ __forceinline__ void bulk_copy(uint32_t s_dst, const void *g_src, uint32_t bytes,
                                          uint32_t s_bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(s_dst),
                 "l"(g_src), "r"(bytes), "r"(s_bar)
                 : "memory");
}

// bulk_copy_once is bulk_copy of what will not be read again: L2 lets go of it first.
__device__ __forceinline__ void bulk_copy_once(uint32_t s_dst, const void *g_src, uint32_t bytes,
                                               uint32_t s_bar, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(s_dst),
                 "l"(g_src), "r"(bytes), "r"(s_bar), "l"(policy)
                 : "memory");
}

// bulk_prefetch brings bytes (a multiple of 16, aligned to 16) to L2.
__device__ __forceinline__ void bulk_prefetch(const void *g_src, uint32_t bytes, uint64_t policy) {
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(g_src),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ uint64_t policy_evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t policy_evict_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// g_load_kept loads what no kernel writes and L2 is to keep.
__device__ __forceinline__ uint32_t g_load_kept(const uint32_t *g_src, uint64_t policy) {
    uint32_t x;
    asm("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(x) : "l"(g_src), "l"(policy));
    return x;
}

// fence_async_shared orders this thread's ordinary accesses to shared memory before later ones of
// the copy engine.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void cp_async_16(uint32_t s_dst, const void *g_src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s_dst), "l"(g_src) : "memory");
}

// cp_async_arrive arrives at s_bar once all of this thread's cp_async_16 so far have landed.
__device__ __forceinline__ void cp_async_arrive(uint32_t s_bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(s_bar) : "memory");
}

// --- barriers and memory order

// grid_wait waits for the grids that this one depends on, when it was launched before their end.
__device__ __forceinline__ void grid_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// grid_launch_next lets the next grid of the stream be launched, as far as this one is concerned.
__device__ __forceinline__ void grid_launch_next() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void bar_sync(uint32_t barrier, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// bar_arrive counts this thread among those that bar_sync waits for.
__device__ __forceinline__ void bar_arrive(uint32_t barrier, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// g_load_acquire loads a word that another CTA may add to, before what is read from here on.
__device__ __forceinline__ uint32_t g_load_acquire(const uint32_t *g_src) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(g_src) : "memory");
    return v;
}

// g_add adds to a word if `is` is so, in order with what is read and written before and behind, and
// returns what it was, else 0.  Without a branch, after which the compiler keeps lanes apart.
__device__ __forceinline__ uint32_t g_add(bool is, uint32_t *g_dst, uint32_t x) {
    uint32_t was;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tmov.u32 %0, 0;\n\t"
                 "@p atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n\t}"
                 : "=&r"(was)
                 : "l"(g_dst), "r"(x), "r"((uint32_t)is)
                 : "memory");
    return was;
}

// g_load_now loads what another CTA may just have stored; word by word, in no order.
__device__ __forceinline__ float4 g_load_now(const float4 *g_src) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(g_src)
                 : "memory");
    return v;
}

__device__ __forceinline__ float2 g_load_now(const float2 *g_src) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "l"(g_src)
                 : "memory");
    return v;
}

// --- shared memory, up to 16 bytes

// s_put and s_get are of a word that another warp looks at meanwhile.
__device__ __forceinline__ void s_put(uint32_t *s_dst, uint32_t x) {
    *(volatile uint32_t *)s_dst = x;
}

__device__ __forceinline__ uint32_t s_get(const uint32_t *s_src) {
    return *(const volatile uint32_t *)s_src;
}

__device__ __forceinline__ uint4 s_load(uint32_t s_src) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(s_src)
                 : "memory");
    return v;
}

__device__ __forceinline__ void s_load(uint4 &v, uint32_t s_src) {
    v = s_load(s_src);
}

__device__ __forceinline__ void s_load(uint2 &v, uint32_t s_src) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(s_src) : "memory");
}

__device__ __forceinline__ void s_store(uint2 v, uint32_t s_dst) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(s_dst), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ float4 s_load_f32(uint32_t s_src) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(s_src)
                 : "memory");
    return v;
}

__device__ __forceinline__ void s_store_f32(uint32_t s_dst, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(s_dst), "f"(a), "f"(b), "f"(c),
                 "f"(d)
                 : "memory");
}

// --- arithmetic

__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// low_halves and high_halves join a 16-bit half of a (low) and of b (high).
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x5410);
}

__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x7632);
}

// transpose_8x8 transposes an 8 x 8 matrix of 16-bit elements that lies one register a lane.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// mma adds A [16, 16] * B [16, 8] to c [16, 8].  Lane (g, t) = (lane / 4, lane % 4) holds
//     A: a0 (g, 2t..), a1 (g + 8, 2t..), a2 (g, 2t + 8..), a3 (g + 8, 2t + 8..)
//     B: b0 (2t.., g), b1 (2t + 8.., g)     c: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
template <typename T>
__device__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                    uint32_t b1);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                   uint32_t a2, uint32_t a3, uint32_t b0,
                                                   uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// pack rounds two floats to T, the first in the low half.
template <typename T>
__device__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// unpack is the other way.
template <typename T>
__device__ float2 unpack(uint32_t x);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t x) {
    float2 y;
    asm("{\n\t.reg .b16 a, b;\n\tmov.b32 {a, b}, %2;\n\tcvt.f32.f16 %0, a;\n\tcvt.f32.f16 %1, "
        "b;\n\t}"
        : "=f"(y.x), "=f"(y.y)
        : "r"(x));
    return y;
}

} // namespace ptx

#endif
