// decode_instance is what the engine knows of an instance of the decode kernel.
#ifndef ATTND_ATTENTION_CUDA_DECODE_INSTANCE_H
#define ATTND_ATTENTION_CUDA_DECODE_INSTANCE_H

#include "attention/cuda/attn_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attn_cuda_kernel_fn {
    const void *function; // for cudaLaunchKernel
    int32_t threads;      // a CTA
    uint32_t shared_bytes;
} attn_cuda_kernel_fn;

// decode_args is the kernel's argument.  A captured graph keeps it, so nothing of a launch is in
// it.
typedef struct decode_args {
    struct attn_cuda_head *plan;
    // [slots, query_rows, head_dim + 4]: sums [query_rows, head_dim], then (maximum, denominator)
    // [query_rows].  All bytes 0xff between launches.
    float *slots;
    attn_cuda_shift shift; // of all that records point to
    uint64_t block_stride;
    int64_t k_head_bytes, v_head_bytes; // strides
    int32_t block_tokens, kv_heads, group;
    int32_t block_tokens_log2; // -1 = no power of two
    uint32_t plan_bytes;       // without masks; of a graph, when it was captured
    int32_t run_tokens_log2;   // what one copy moves: a power of two that divides blocks and stages
} decode_args;

#ifdef __cplusplus
}
#endif

#endif
