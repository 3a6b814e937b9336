// The one call of the driver's own API, found at run time, so that nothing links libcuda.
#include "attention/cuda/prefill_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_fn find_encode(void) {
    void *entry = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                        cudaEnableDefault, &found);
#else
    cudaError_t code =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    encode_fn encode = NULL;
    if (code == cudaSuccess && found == cudaDriverEntryPointSuccess) {
        memcpy(&encode, &entry, sizeof(encode));
    }
    return encode;
}

attnd_err prefill_map_make(prefill_map *map, uint64_t *base, int32_t head_dim, int32_t run_log2,
                           attnd_errinfo *info) {
    encode_fn encode = find_encode();
    if (!encode) {
        return attnd_fail(info, ATTND_ENOTSUP, "driver", "the CUDA driver has no tensor maps");
    }
    // Two dimensions for the address: places of 16 bytes, and of 4 GiB.  Types of 16 bits are
    // moved alike; what is outside becomes zero in both.
    const cuuint64_t sizes[] = {(cuuint64_t)head_dim, 1ull << run_log2, 1ull << 28, 1ull << 16};
    const cuuint64_t strides[] = {(cuuint64_t)head_dim * 2, 16, 1ull << 32}; // bytes
    const cuuint32_t box[] = {64, 1u << run_log2, 1, 1};
    const cuuint32_t steps[] = {1, 1, 1, 1};
    CUtensorMap encoded;
    CUresult code = CUDA_ERROR_INVALID_VALUE;
    // Some drivers refuse a map that begins at address 0; no memory lies in the first 16 bytes.
    for (*base = 0; *base <= 16 && code != CUDA_SUCCESS; *base += 16) {
        code =
            encode(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)(uintptr_t)*base, sizes,
                   strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    *base -= 16;
    if (code != CUDA_SUCCESS) {
        attnd_fail(info, ATTND_ECUDA, "cuda", "cuTensorMapEncodeTiled: error %d", (int)code);
        if (info) {
            info->detail = (int32_t)code;
        }
        return ATTND_ECUDA;
    }
    memcpy(map->words, &encoded, sizeof(map->words));
    return ATTND_OK;
}
