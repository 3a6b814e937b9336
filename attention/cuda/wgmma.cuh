// wgmma wraps Hopper's warpgroup matrix products and what goes with them: tensor-map copies, which
// leave tiles as the products read them, and the registers of warpgroups.  sm_90a only.
//
// A tile in shared memory is rows of 64 16-bit elements (128 bytes), at a multiple of 1024 bytes;
// the eight 16-byte pieces of row r stand at places piece ^ (r % 8) (128-byte swizzle).
#ifndef ATTND_ATTENTION_CUDA_WGMMA_CUH
#define ATTND_ATTENTION_CUDA_WGMMA_CUH

#include "attention/cuda/ptx.cuh"

namespace ptx {

// --- registers

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- copies by tensor map

// tensor_copy copies the box at (x, y, z, w) of a map to s_dst, and reports it to s_bar.  What of
// the box lies outside the tensor becomes zero.
__device__ __forceinline__ void tensor_copy(uint32_t s_dst, const void *map, int32_t x, int32_t y,
                                            int32_t z, int32_t w, uint32_t s_bar) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(s_dst),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(s_bar)
                 : "memory");
}

// tensor_copy of five dimensions, and tensor_store, which copies from s_src to the box and leaves
// out what lies outside the tensor.
__device__ __forceinline__ void tensor_copy(uint32_t s_dst, const void *map, int32_t x, int32_t h,
                                            int32_t y, int32_t z, int32_t w, uint32_t s_bar) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(s_dst),
                 "l"(map), "r"(x), "r"(h), "r"(y), "r"(z), "r"(w), "r"(s_bar)
                 : "memory");
}

__device__ __forceinline__ void tensor_store(uint32_t s_src, const void *map, int32_t x, int32_t h,
                                             int32_t y, int32_t z, int32_t w) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
                 "[%1, {%2, %3, %4, %5, %6}], [%0];" ::"r"(s_src),
                 "l"(map), "r"(x), "r"(h), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// tensor_stores_read waits until all of this thread's tensor_store have read shared memory.
__device__ __forceinline__ void tensor_stores_read() {
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void tensor_prefetch_map(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp_async_wait waits for all of this thread's cp_async_16.
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// bar_any waits at a named barrier, and returns whether `is` is so for any of the threads.
__device__ __forceinline__ bool bar_any(uint32_t barrier, uint32_t threads, bool is) {
    uint32_t any;
    asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.u32 p, %3, 0;\n\t"
                 "barrier.cta.red.or.pred q, %1, %2, p;\n\tselp.u32 %0, 1, 0, q;\n\t}"
                 : "=r"(any)
                 : "r"(barrier), "r"(threads), "r"((uint32_t)is)
                 : "memory");
    return any != 0;
}

// s_store_tiles stores four 8 x 8 matrices of 16-bit elements, which lie one register a lane as in
// mma's c; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void s_store_tiles(uint32_t s_row, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(s_row),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// --- products

// wgmma_tile describes a tile at s_tile.  Rows in groups of eight lie 1024 bytes apart.  For a
// tile read along its columns (the right side of P V), the next 64 columns lie column_bytes behind.
__device__ __forceinline__ uint64_t wgmma_tile(uint32_t s_tile, uint32_t column_bytes) {
    return (uint64_t)((s_tile & 0x3ffff) >> 4) | (uint64_t)(column_bytes >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// wgmma_moved describes what lies bytes behind.
__device__ __forceinline__ uint64_t wgmma_moved(uint64_t tile, uint32_t bytes) {
    return tile + (bytes >> 4);
}

__device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma_wait waits until at most kGroups of the groups committed are under way.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// wgmma_hold keeps the compiler from moving accesses to d across this place.
template <int kNum>
__device__ __forceinline__ void wgmma_hold(float (&d)[kNum]) {
#pragma unroll
    for (int i = 0; i < kNum; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

// wgmma_hold keeps registers that products read as they are up to this place.
template <int kNum>
__device__ __forceinline__ void wgmma_hold(const uint32_t (&a)[kNum][4]) {
#pragma unroll
    for (int i = 0; i < kNum; i++) {
        asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
    }
}

#define WGMMA_OUT_8(d, i)                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OUT_32(d) WGMMA_OUT_8(d, 0), WGMMA_OUT_8(d, 8), WGMMA_OUT_8(d, 16), WGMMA_OUT_8(d, 24)
#define WGMMA_OUT_64(d) \
    WGMMA_OUT_32(d), WGMMA_OUT_8(d, 32), WGMMA_OUT_8(d, 40), WGMMA_OUT_8(d, 48), WGMMA_OUT_8(d, 56)
#define WGMMA_D32                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define WGMMA_D64                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "  \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "  \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

// wgmma_tiles is d [64, 128] (+)= A [64, 16] * B [128, 16]^T.  A thread of the warpgroup, lane
// (g, t) = (lane / 4, lane % 4) of warp w, holds of columns 8 j + 2t and + 1 row 16 w + g in
// d[4 j], d[4 j + 1] and row 16 w + g + 8 in d[4 j + 2], d[4 j + 3].
template <typename T>
__device__ void wgmma_tiles(float (&d)[64], uint64_t a, uint64_t b, int adds);

// wgmma_weights is d [64, columns] (+)= A [64, 16] * B [16, columns]; A lies in registers as in
// mma.
template <typename T>
__device__ void wgmma_weights(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int adds);
template <typename T>
__device__ void wgmma_weights(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int adds);

#define WGMMA_INSTANCES(T, types)                                                          \
    template <>                                                                            \
    __device__ __forceinline__ void wgmma_tiles<T>(float(&d)[64], uint64_t a, uint64_t b,  \
                                                   int adds) {                             \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"                    \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " " WGMMA_D64    \
                     "%64, %65, p, 1, 1, 0, 0;\n\t}"                                       \
                     : WGMMA_OUT_64(d)                                                     \
                     : "l"(a), "l"(b), "r"(adds));                                         \
    }                                                                                      \
    template <>                                                                            \
    __device__ __forceinline__ void wgmma_weights<T>(float(&d)[64], const uint32_t(&a)[4], \
                                                     uint64_t b, int adds) {               \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"                    \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " " WGMMA_D64    \
                     "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n\t}"                         \
                     : WGMMA_OUT_64(d)                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));     \
    }                                                                                      \
    template <>                                                                            \
    __device__ __forceinline__ void wgmma_weights<T>(float(&d)[32], const uint32_t(&a)[4], \
                                                     uint64_t b, int adds) {               \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"                    \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " " WGMMA_D32     \
                     "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n\t}"                         \
                     : WGMMA_OUT_32(d)                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));     \
    }

WGMMA_INSTANCES(__nv_bfloat16, "bf16.bf16")
WGMMA_INSTANCES(__half, "f16.f16")
#undef WGMMA_INSTANCES

} // namespace ptx

#endif
