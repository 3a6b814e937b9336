// attn_cuda_memory is device memory that another process can map by a descriptor, and that lives as
// long as a process holds it: one allocation of cuMemCreate.  The driver's functions are looked up
// when they are first used, since nothing may link libcuda.
#ifndef ATTND_ATTENTION_CUDA_ATTN_CUDA_MEMORY_H
#define ATTND_ATTENTION_CUDA_ATTN_CUDA_MEMORY_H

#include <stdint.h>

#include "proto/err.h"

typedef struct attn_cuda_memory {
    uint64_t address; // on the device; 0 = none
    uint64_t bytes;
    uint64_t handle;
    int fd; // POSIX file descriptor of the allocation, close-on-exec
} attn_cuda_memory;

// attn_cuda_driver_check says whether the driver is there.  ATTND_ENOTSUP with a line for an
// operator.
attnd_err attn_cuda_driver_check(attnd_errinfo *info);

// attn_cuda_memory_unit says what bytes are rounded up to on a device.  ATTND_ENOTSUP, ATTND_ECUDA.
attnd_err attn_cuda_memory_unit(int32_t device, uint64_t *unit, attnd_errinfo *info);

// attn_cuda_memory_open makes memory on a device whose primary context is current, rounded up to
// the device's granularity.  ATTND_ENOMEM, ATTND_ECUDA, ATTND_ENOTSUP.  The caller owns *out:
// attn_cuda_memory_close, which accepts one that is all zero.
attnd_err attn_cuda_memory_open(attn_cuda_memory *out, int32_t device, uint64_t bytes,
                                attnd_errinfo *info);

// attn_cuda_memory_adopt maps the memory that another process has made with the same bytes; fd is
// *out's on success.  was_bytes is what that process got.  ATTND_EINVAL: the device works, but
// the descriptor is no memory of it, or of another size.  Else as attn_cuda_memory_open.
attnd_err attn_cuda_memory_adopt(attn_cuda_memory *out, int32_t device, uint64_t bytes, int fd,
                                 uint64_t was_bytes, attnd_errinfo *info);

// attn_cuda_memory_reach lets another device use it, which can (peer access).
attnd_err attn_cuda_memory_reach(const attn_cuda_memory *m, int32_t device, attnd_errinfo *info);
void attn_cuda_memory_close(attn_cuda_memory *m);

#endif
