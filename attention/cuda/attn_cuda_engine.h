// attn_cuda_engine is what the engines of this folder share (attention/attn_engine.h).
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_ENGINE_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_ENGINE_H

#include <stdint.h>

#include "proto/err.h"

// attn_cuda_engine_device finds the GPU of that UUID; ATTND_ENOTSUP: this process sees none such.
attnd_err attn_cuda_engine_device(const uint8_t uuid[16], int *out, attnd_errinfo *info);

#endif
