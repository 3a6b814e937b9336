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

// make encodes a map of `rank` dimensions, the last two of which make the address: places of 16
// bytes, and of 4 GiB.  Types of 16 bits are moved alike; what is outside becomes zero in both.
static attnd_err make(prefill_map *map, cuuint32_t rank, cuuint64_t *sizes, cuuint64_t *strides,
                      cuuint32_t *box, attnd_errinfo *info) {
    static const cuuint32_t steps[] = {1, 1, 1, 1, 1};
    encode_fn encode = find_encode();
    if (!encode) {
        return attnd_fail(info, ATTND_ENOTSUP, "driver", "the CUDA driver has no tensor maps");
    }
    sizes[rank - 2] = 1ull << 28;
    sizes[rank - 1] = 1ull << 16;
    strides[rank - 3] = 16; // bytes; the first dimension has none
    strides[rank - 2] = 1ull << 32;
    box[rank - 2] = box[rank - 1] = 1;
    CUtensorMap encoded;
    CUresult code = CUDA_ERROR_INVALID_VALUE;
    // Some drivers refuse a map that begins at address 0; no memory lies in the first 16 bytes.
    for (map->base = 0; map->base <= 16 && code != CUDA_SUCCESS; map->base += 16) {
        code = encode(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank,
                      (void *)(uintptr_t)map->base, sizes, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    map->base -= 16;
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

attnd_err prefill_map_keys(prefill_map *map, int32_t head_dim, int32_t run_log2,
                           attnd_errinfo *info) {
    cuuint64_t sizes[4] = {(cuuint64_t)head_dim, 1ull << run_log2};
    cuuint64_t strides[3] = {(cuuint64_t)head_dim * 2};
    cuuint32_t box[4] = {64, 1u << run_log2};
    return make(map, 4, sizes, strides, box, info);
}

attnd_err prefill_map_rows(prefill_map *map, int32_t head_dim, int32_t q_heads, int32_t group,
                           int32_t tokens, attnd_errinfo *info) {
    cuuint64_t sizes[5] = {(cuuint64_t)head_dim, (cuuint64_t)group, (cuuint64_t)tokens};
    cuuint64_t strides[4] = {(cuuint64_t)head_dim * 2,
                             (cuuint64_t)q_heads * (cuuint64_t)head_dim * 2};
    cuuint32_t box[5] = {64, (cuuint32_t)group, (cuuint32_t)tokens};
    return make(map, 5, sizes, strides, box, info);
}
