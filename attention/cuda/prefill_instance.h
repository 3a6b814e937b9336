// prefill_instance is what the engine knows of an instance of the prefill kernel.
#ifndef ATTND_ATTENTION_CUDA_PREFILL_INSTANCE_H
#define ATTND_ATTENTION_CUDA_PREFILL_INSTANCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#define ATTN_CUDA_ALIGNED(n) alignas(n)
#else
#define ATTN_CUDA_ALIGNED(n) _Alignas(n)
#endif

typedef struct prefill_kernel_fn {
    const void *function; // for cudaLaunchKernel
    int32_t threads;      // a CTA
    uint32_t shared_bytes;
    int32_t tile_rows;               // query rows of a task
    uint32_t join_words, join_bytes; // of a tile that is joined: of prefill_args.joins and sums
    const void *prepare;             // the kernel that comes before: new tokens, angles
    int32_t prepare_threads, prepare_ctas; // a CTA; on an SM
} prefill_kernel_fn;

// prefill_map is a CUtensorMap over all of the address space.  Its last two dimensions make the
// address, so that a box can begin at any multiple of 16 bytes: whatever pool, layer and block it
// is of, whatever launch's queries.
//     keys, values      (x, y, z, w) lies at base + 2 x + row_bytes y + 16 z + 2^32 w,
//                       x < head_dim, y < 2^run_log2 tokens of a block
//     queries, outputs  (x, h, y, z, w) lies at base + 2 x + row_bytes h + token_bytes y + 16 z +
//                       2^32 w, h < q_heads / kv_heads, y < tokens of 64 query rows
typedef struct prefill_map {
    ATTN_CUDA_ALIGNED(64) uint64_t words[16];
    uint64_t base;
} prefill_map;

// prefill_args is the argument of both kernels.  A captured graph keeps it, so nothing of a launch
// is in it.
typedef struct prefill_args {
    prefill_map map;
    prefill_map rows;  // of queries and outputs that lie densely (ATTN_PREFILL_DENSE_Q)
    prefill_map token; // the same, of one token
    struct attn_prefill_head *plan;
    uint32_t *counters; // tasks taken, CTAs that are done; both 0 between launches
    float *angles;      // (cosine, sine) of pairs, see attn_prefill_record
    // Of tiles whose keys two CTAs share, per consumer: a word, 0 between launches; and sums, O
    // and for each thread its two rows' maxima and parts of the denominators.
    uint32_t *joins;
    float *sums;
    uint64_t block_stride;
    int64_t k_head_bytes, v_head_bytes; // strides
    int32_t block_tokens, kv_heads, group;
    int32_t block_tokens_log2; // -1 = no power of two
    int32_t run_log2;          // tokens of a box, a power of two that divides blocks and steps
} prefill_args;

#ifdef __cplusplus
}
#endif

#endif
