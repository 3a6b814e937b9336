// prefill_map makes the tensor maps of the prefill kernel; prefill_instance.h says what they show.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_MAP_H
#define ATTND_ATTENTION_CUDA_PREFILL_MAP_H

#include "attention/cuda/prefill_instance.h"
#include "proto/err.h"

// prefill_map_keys makes the map of keys and values, rows of head_dim 16-bit elements: boxes of 64
// columns by 2^run_log2 rows.  ATTND_ENOTSUP when the driver has no tensor maps, ATTND_ECUDA with
// its code in detail.
attnd_err prefill_map_keys(prefill_map *map, int32_t head_dim, int32_t run_log2,
                           attnd_errinfo *info);

// prefill_map_rows makes that of queries and outputs [tokens, q_heads, head_dim] without gaps:
// boxes of 64 columns by the `group` heads of a KV head by `tokens` tokens.  Errors as above.
attnd_err prefill_map_rows(prefill_map *map, int32_t head_dim, int32_t q_heads, int32_t group,
                           int32_t tokens, attnd_errinfo *info);

#endif
