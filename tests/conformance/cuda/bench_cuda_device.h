// bench_cuda_device is the device side of bench_cuda: random data, the read ceiling, and a plain
// float64 attention that outputs are checked against before they are timed.
#ifndef ATTND_TESTS_CONFORMANCE_CUDA_BENCH_CUDA_DEVICE_H
#define ATTND_TESTS_CONFORMANCE_CUDA_BENCH_CUDA_DEVICE_H

#include <stdint.h>

#include "attention/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

// bench_fill fills device memory with random bf16, about normal.
void bench_fill(void *g_data, uint64_t elements, uint64_t seed);

// bench_read times reading bytes in runs of 16 KiB in random order, and returns GB/s.  How: 0 = one
// copy a run, 2 CTAs an SM; 1 = the same, 1 CTA; 2 = four copies a run, as the decode kernel does;
// 3 = the same, set off by 32 bytes; 4 = eight copies of 2 KiB, set off; 5 = 3 with an evict-first
// hint.
enum { BENCH_READS = 6 };
double bench_read(void *g_data, uint64_t bytes, int how);

// bench_reference writes the float64 outputs of one query row (token 0, a head) to g_out
// [head_dim], from device pointers in *row.  Old tokens only.
void bench_reference(const attn_params *p, const attn_row *row, int32_t head, double *g_out);

#ifdef __cplusplus
}
#endif

#endif
