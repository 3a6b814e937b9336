// attn_prefill is the plan of the prefill kernel: what the host writes and the device reads.
//
// A *record* is one row of the launch.  Its query rows are cut into *tiles* of up to tile_rows rows
// (a multiple of ATTN_PREFILL_ROWS): some tokens by the heads of a KV head's group.  A *task* is a
// tile of a KV head; the tasks of a launch are numbered, and CTAs take one after another:
//     records   the one whose longest tile sees most keys first
//     in one    a section of KV heads after another, so many heads that the L2 holds their keys
//               and values, a smaller one first, since few long tasks at the end would leave CTAs
//               idle; in a section the last tokens first (of causal rows they see most), each for
//               all heads, so that keys are read by several CTAs at a time
//     the end   of several rows that are short enough, a quarter of each after another (a record
//               each), the one that sees most keys first; where all tasks are about as long, the
//               keys of the last ones are shared by two CTAs, which join their sums
// Nothing is listed a task: a CTA finds the record by task_end and the rest by division.
//
// *Units* are what the prepare kernel does before, in the same launch: a new token to be rotated
// and written to the pool, or the angles of a query token.
//
// Pure host C, no allocation.  Any thread, one plan by one thread at a time.
#ifndef ATTND_ATTENTION_CUDA_ATTN_PREFILL_H
#define ATTND_ATTENTION_CUDA_ATTN_PREFILL_H

#include <stdbool.h>

#include "attention/attn.h"

#ifdef __CUDACC__
#define ATTN_PREFILL_BOTH static __device__ __forceinline__
#else
#define ATTN_PREFILL_BOTH static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    ATTN_PREFILL_KEYS = 128, // keys a step; steps begin at multiples of it
    ATTN_PREFILL_ROWS = 64,  // query rows of a consumer warpgroup, some of which share a tile
    // The choice between the kernels, measured (README.md has the table): a row of more than 8
    // tokens is prefilled when it has that many query rows of a KV head and few keys, also for each
    // of these, or when the launch has that many slices of 16 query rows, KV head by KV head, so
    // that decode, which takes the keys for each of them, takes longer than prefill, of which a
    // task reads all keys of the row by itself, or half of them when the row is alone.
    ATTN_PREFILL_LEAST_ROWS = 33,
    ATTN_PREFILL_MOST_KEYS = 2048,
    ATTN_PREFILL_ROW_KEYS = 24,
    ATTN_PREFILL_SLICE_ROWS = 16,
    ATTN_PREFILL_LEAST_SLICES = 160,
    ATTN_PREFILL_ALONE_SLICES = 96,
    ATTN_PREFILL_MEASURED = -1,
    ATTN_PREFILL_SECTION_BYTES = 48 << 20, // keys and values of a section, of an L2 of 60 MB
};

enum {
    ATTN_PREFILL_NEGATIVE = 1u << 8,    // the scale is negative: scores change their sign
    ATTN_PREFILL_INTERLEAVED = 1u << 9, // RoPE pairs
    // Queries, or outputs, lie without gaps [tokens, q_heads, head_dim], and 64 query rows are
    // whole tokens: one box of the map moves them.
    ATTN_PREFILL_DENSE_Q = 1u << 10,
    ATTN_PREFILL_DENSE_OUT = 1u << 11,
    // Queries of a token lie without gaps, and 64 query rows are whole tokens: a box for each
    // token.
    ATTN_PREFILL_TOKENS_Q = 1u << 13,
    ATTN_PREFILL_BENT = 1u << 12, // a negative scale, softcap, ALiBi or a tree mask
};

// attn_prefill_record is what the device knows of a row.  Pointers point at token 0.
typedef struct attn_prefill_record {
    const char *q; // [q_len, q_heads, head_dim]
    void *out;     // [q_len, q_heads, head_dim]
    float *lse;    // [q_heads, q_len], may be NULL
    const char *k_new, *v_new;
    const uint32_t *table;
    char *k, *v; // of block 0
    const float *sinks, *alibi_slopes;
    const uint64_t *tree_mask;
    const uint32_t *mask_start, *mask_blocks; // NULL = no block mask
    const float *inv_freq;                    // NULL = no RoPE
    const int32_t *q_positions, *k_positions;
    int64_t q_token_bytes, q_head_bytes;         // strides
    int64_t out_token, out_head, lse_head;       // strides, elements
    int64_t k_new_token_bytes, k_new_head_bytes; // strides
    int64_t v_new_token_bytes, v_new_head_bytes; // strides
    uint64_t angles_first;                       // of token q_first in the table of angles, even
    int32_t kv_len, new_len, q_len;
    int32_t q_first, q_end; // tokens of this launch
    uint32_t flags;         // ATTN_CAUSAL ..., ATTN_PREFILL_NEGATIVE ...
    // Causal and window let token i see keys from max(0, seen_first + i) to before min(kv_len,
    // seen_end + i).
    int32_t seen_first, seen_end;
    int32_t tree_words;              // of a token
    int32_t tile_tokens, tile_heads; // a tile; tile_heads of the group
    int32_t head_parts;              // sets of tile_heads in a group
    uint32_t heads_inverse;          // row / tile_heads = row * heads_inverse >> 16
    // Tiles lie in query blocks: of the block mask, else in one that ends with q_end, and may begin
    // before q_first.
    int32_t block_first, q_block, block_tiles, num_tiles;
    int32_t rotary_dim;
    float attention_factor;
    float scale_log2;          // |scale| * log2(e)
    float cap_log2, cap_scale; // softcap * log2(e), |scale| / softcap; 0 = off
    int32_t section_heads;     // KV heads of a section
    int32_t section_lacks;     // so many fewer has the first one
    int32_t shares_keys;       // 1 = a tile is two tasks, each of half of the keys; 0 = one
    int32_t reserved[3];
} attn_prefill_record;

// attn_prefill_tile is the query rows of a task: row r is token token_first + r / tile_heads, head
// head_first + r % tile_heads of the KV head's group; rows with r % tile_heads >= heads are empty.
typedef struct attn_prefill_tile {
    int32_t kv_head;
    int32_t token_first, tokens; // tokens may be 0
    int32_t head_first, heads;
} attn_prefill_tile;

// attn_prefill_ends is how far tasks and units go, up to and with a record.
typedef struct attn_prefill_ends {
    uint32_t tasks, units;
} attn_prefill_ends;

// attn_prefill_head begins a plan.  Records and ends [num_records] lie somewhere behind it.
typedef struct attn_prefill_head {
    uint32_t num_records;
    uint32_t num_tasks, num_units;
    uint32_t ends_at, records_at; // bytes from here
    uint32_t reserved[3];
} attn_prefill_head;

// attn_prefill_limits is what a plan has to know of the engine.
typedef struct attn_prefill_limits {
    uint32_t max_records;
    int32_t tile_rows; // query rows of a tile
    uint32_t ctas;     // that take tasks
    // Query rows a KV head (q_len * q_heads / kv_heads) from which on a row is prefilled; 0 = there
    // is no prefill kernel, ATTN_PREFILL_MEASURED = as measured.
    int32_t least_rows;
    uint64_t launch_slices; // of the launch that is planned: attn_prefill_count
    uint64_t max_angles;    // pairs (cosine, sine) of the workspace
    uint32_t max_joins;     // tiles whose keys may be shared
} attn_prefill_limits;

static inline attn_prefill_ends *attn_prefill_ends_of(attn_prefill_head *head) {
    return (attn_prefill_ends *)((char *)head + head->ends_at);
}

static inline attn_prefill_record *attn_prefill_records(attn_prefill_head *head) {
    return (attn_prefill_record *)((char *)head + head->records_at);
}

// attn_prefill_bytes returns the size of ends and records.
static inline uint64_t attn_prefill_bytes(uint32_t num_records) {
    return ((uint64_t)num_records * sizeof(attn_prefill_ends) + 15) / 16 * 16 +
           (uint64_t)num_records * sizeof(attn_prefill_record);
}

// attn_prefill_tile_of returns the tile of task `number` of a record.  The device's code too.
ATTN_PREFILL_BOTH attn_prefill_tile attn_prefill_tile_of(const attn_prefill_record *r,
                                                         int32_t number, int32_t group) {
    attn_prefill_tile t;
    number >>= r->shares_keys;
    int32_t head_tasks = r->num_tiles * r->head_parts;
    int32_t section = (int32_t)(((uint32_t)number + (uint32_t)(head_tasks * r->section_lacks)) /
                                (uint32_t)(head_tasks * r->section_heads));
    int32_t section_first = section > 0 ? section * r->section_heads - r->section_lacks : 0;
    int32_t section_heads = r->section_heads - (section > 0 ? 0 : r->section_lacks);
    number -= section_first * head_tasks;
    t.kv_head = section_first + number % section_heads;
    number /= section_heads;
    t.head_first = number % r->head_parts * r->tile_heads;
    t.heads = group - t.head_first < r->tile_heads ? group - t.head_first : r->tile_heads;
    int32_t tile = r->num_tiles - 1 - number / r->head_parts;
    int32_t block = r->block_first + tile / r->block_tiles * r->q_block;
    int32_t first = block + tile % r->block_tiles * r->tile_tokens;
    int32_t end = first + r->tile_tokens < r->q_end ? first + r->tile_tokens : r->q_end;
    end = end - block < r->q_block ? end : block + r->q_block;
    t.token_first = first > r->q_first ? first : r->q_first;
    t.tokens = end > t.token_first ? end - t.token_first : 0;
    return t;
}

// attn_prefill_count returns how many slices of 16 query rows the rows of more than 8 tokens have,
// times KV heads.
uint64_t attn_prefill_count(const attn_params *p);

// attn_prefill_takes says whether the prefill kernel computes a row; else the decode kernel does.
bool attn_prefill_takes(const attn_params *p, const attn_row *row,
                        const attn_prefill_limits *limits);

// attn_prefill_make writes the plan of the rows that the prefill kernel takes to *head, and records
// and ends `at` bytes (a multiple of 16) behind it, where attn_prefill_bytes(max_records) are free.
// The rows have been checked.  ATTND_EMSGSIZE.
attnd_err attn_prefill_make(attn_prefill_head *head, uint32_t at, const attn_params *p,
                            const attn_prefill_limits *limits, attnd_errinfo *info);

#ifdef __cplusplus
}
#endif

#endif
