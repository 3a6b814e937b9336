// bench_cuda_grid is the cases of the CUDA backend, and what is asked of them.
#ifndef ATTND_LOAD_BENCH_CUDA_GRID_H
#define ATTND_LOAD_BENCH_CUDA_GRID_H

#include "tests/load/bench_result.h"

extern const char *const *const bench_cuda_groups[]; // see bench_backend_ops
extern const bench_ask bench_cuda_asks[];

#endif
