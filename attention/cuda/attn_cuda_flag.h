// attn_cuda_flag answers a pair of flags in the order of a stream, by the driver's stream memory
// operation, which is looked up when it is first used, since nothing may link libcuda.
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_FLAG_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_FLAG_H

#include <stdint.h>

#include "proto/err.h"

// attn_cuda_flag_check says whether the device has what this and a client's stream need, memory
// operations of 64 bits.  ATTND_ENOTSUP.  Any thread.
attnd_err attn_cuda_flag_check(int device, attnd_errinfo *info);

// attn_cuda_flag_answer has ready = 0 and done = 1 written at once to a pair (proto_flag, a device
// address) when all that was given to the stream (a cudaStream_t) before has ended, and its writes
// can be seen by everybody.  ATTND_ECUDA, ATTND_ENOTSUP.  Any thread.
attnd_err attn_cuda_flag_answer(void *stream, uint64_t pair, attnd_errinfo *info);

#endif
