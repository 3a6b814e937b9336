// attn_cuda_error turns the CUDA runtime's errors into ours, for the host code of this folder.
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_ERROR_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_ERROR_H

#include <cuda_runtime_api.h>
#include <string.h>

#include "proto/err.h"

// attn_cuda_failed clears the runtime's last error and returns ATTND_ENOMEM or ATTND_ECUDA, with
// CUDA's number in info->detail; call is the text of the call, told up to its "(".
static inline attnd_err attn_cuda_failed(cudaError_t code, const char *call, attnd_errinfo *info) {
    (void)cudaGetLastError();
    attnd_err err = code == cudaErrorMemoryAllocation ? ATTND_ENOMEM : ATTND_ECUDA;
    attnd_fail(info, err, "cuda", "%.*s: %s", (int)strcspn(call, "("), call,
               cudaGetErrorString(code));
    if (info) {
        info->detail = (int32_t)code;
    }
    return err;
}

#endif
