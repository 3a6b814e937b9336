// attn_cuda_flag writes a flag in host memory in the order of a stream: the driver's stream memory
// operation, looked up when it is first used, since nothing may link libcuda.
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_FLAG_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_FLAG_H

#include <stdint.h>

#include "proto/err.h"

// attn_cuda_flag_write has value written to a device address once all that was given to the stream
// (a cudaStream_t) before has ended, and its writes can be seen by everybody.  ATTND_ECUDA,
// ATTND_ENOTSUP.  Any thread.
attnd_err attn_cuda_flag_write(void *stream, uint64_t address, uint32_t value, attnd_errinfo *info);

#endif
