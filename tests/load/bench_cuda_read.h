// bench_cuda_read is the read ceiling of a CUDA device: what kernels that do nothing else read of
// memory in the order of a paged cache, runs of 16 KiB in random order.  The device is the current
// one.  One thread.
#ifndef ATTND_LOAD_BENCH_CUDA_READ_H
#define ATTND_LOAD_BENCH_CUDA_READ_H

#include <stdint.h>

#include "proto/err.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bench_cuda_read bench_cuda_read;

// bench_cuda_read_open takes bytes of device memory and fills them with random bf16.  ATTND_ENOMEM,
// ATTND_ECUDA.  The caller owns *out: bench_cuda_read_close, which accepts NULL.
attnd_err bench_cuda_read_open(bench_cuda_read **out, uint64_t bytes, attnd_errinfo *info);
void bench_cuda_read_close(bench_cuda_read *r);

// bench_cuda_read_ways returns how many ways to read there are on this device, and _name what one
// is: how many copies a run, and so on.
uint32_t bench_cuda_read_ways(const bench_cuda_read *r);
const char *bench_cuda_read_name(const bench_cuda_read *r, uint32_t way);

// bench_cuda_read_run reads all of it once and gives GB/s.  ATTND_ECUDA.
attnd_err bench_cuda_read_run(bench_cuda_read *r, uint32_t way, double *gbs, attnd_errinfo *info);

#ifdef __cplusplus
}
#endif

#endif
