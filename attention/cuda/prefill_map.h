// prefill_map makes the tensor map of the prefill kernel; prefill_instance.h says what it shows.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_MAP_H
#define ATTND_ATTENTION_CUDA_PREFILL_MAP_H

#include "attention/cuda/prefill_instance.h"
#include "proto/err.h"

// prefill_map_make makes a map of rows of head_dim 16-bit elements and boxes of 64 columns by
// 2^run_log2 rows.  *base is what the kernel subtracts from addresses.  ATTND_ENOTSUP when the
// driver has no tensor maps, ATTND_ECUDA with its code in detail.
attnd_err prefill_map_make(prefill_map *map, uint64_t *base, int32_t head_dim, int32_t run_log2,
                           attnd_errinfo *info);

#endif
