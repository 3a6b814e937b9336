// The grid: decode of few and of many, short and long sequences, alone and with a token appended;
// ragged batches beside uniform ones of as many keys; and prefill of 16384 tokens in all, from
// contiguous tensors (one block a sequence) and from pages, without and with a cached prefix.
#include "tests/load/bench_cuda_grid.h"

#define GROUP(...) ((const char *const[]){__VA_ARGS__, NULL})

#define DECODE(shape)      "decode bf16 32/8 " shape
#define WITH_APPEND(shape) DECODE(shape), DECODE(shape " new 1")
#define RAGGED(keys)       "ragged bf16 32/8 batch 128 kv_len " keys

// n tokens of a sequence, contiguous: 32/8 and 16/16 heads, causal and not, head_dim 64; and paged.
#define PREFILL(batch, n)                                                       \
    GROUP("prefill bf16 32/8 block " n " batch " batch " q_len " n,             \
          "prefill bf16 16/16 block " n " batch " batch " q_len " n,            \
          "full bf16 16/16 block " n " batch " batch " q_len " n,               \
          "prefill bf16 32/8 head_dim 64 block " n " batch " batch " q_len " n, \
          "prefill bf16 32/8 batch " batch " q_len " n)

// n new tokens behind 4096 cached ones, `all` together: contiguous, paged, appended to pages, and
// appended from what a fused projection of queries, keys and values wrote.
#define PREFIX(batch, n, all)                                                        \
    GROUP("prefill bf16 32/8 block " all " batch " batch " q_len " n " kv_len " all, \
          "prefill bf16 32/8 batch " batch " q_len " n " kv_len " all,               \
          "prefill bf16 32/8 batch " batch " q_len " n " kv_len " all " new " n,     \
          "prefill bf16 32/8 batch " batch " q_len " n " kv_len " all " new " n " fused 1")

// n tokens of one sequence behind none, 1024 and 8192 cached ones.
#define FEW(n, all_1024, all_8192)                                                        \
    GROUP("prefill bf16 32/8 q_len " n, "prefill bf16 32/8 q_len " n " kv_len " all_1024, \
          "prefill bf16 32/8 q_len " n " kv_len " all_8192)

const char *const *const bench_cuda_groups[] = {
    GROUP(WITH_APPEND("kv_len 8192")),
    GROUP(WITH_APPEND("kv_len 131072")),
    GROUP(WITH_APPEND("batch 8 kv_len 4096")),
    GROUP(WITH_APPEND("batch 32 kv_len 4096")),
    GROUP(WITH_APPEND("batch 64 kv_len 8192")),
    GROUP(WITH_APPEND("batch 128 kv_len 1024"), RAGGED("131072")),
    GROUP(WITH_APPEND("batch 128 kv_len 8192"), RAGGED("1048576")),
    GROUP("decode bf16 64/8 kv_len 8192"),
    GROUP("decode bf16 64/8 batch 128 kv_len 8192"),
    GROUP("decode bf16 32/32 batch 128 kv_len 8192"),
    GROUP(DECODE("kv_len 1"), DECODE("kv_len 16"), DECODE("kv_len 128"), DECODE("kv_len 256")),
    GROUP(DECODE("batch 256 kv_len 1"), DECODE("batch 256 kv_len 16"),
          DECODE("batch 256 kv_len 128"), DECODE("batch 256 kv_len 256")),
    GROUP(DECODE("batch 32 q_len 4 kv_len 4096"), DECODE("batch 32 q_len 8 kv_len 4096"),
          "decode bf16 64/8 batch 32 q_len 8 kv_len 4096"),
    GROUP("decode f16 32/8 batch 64 kv_len 8192", DECODE("head_dim 64 batch 64 kv_len 8192"),
          DECODE("block 16 batch 64 kv_len 8192"), DECODE("block 128 batch 64 kv_len 8192")),
    FEW("16", "1040", "8208"),
    FEW("128", "1152", "8320"),
    FEW("256", "1280", "8448"),
    PREFILL("32", "512"),
    PREFILL("16", "1024"),
    PREFILL("8", "2048"),
    PREFILL("4", "4096"),
    PREFILL("2", "8192"),
    PREFILL("1", "16384"),
    PREFIX("32", "512", "4608"),
    PREFIX("8", "2048", "6144"),
    PREFIX("2", "8192", "12288"),
    NULL,
};

#define SHARE(text, least) \
    { text, NULL, BENCH_SHARE, 0, least, 0 }
#define EVEN(ragged, equal) \
    { ragged, equal, BENCH_SLOWER, 0, 0, 1.03 }
#define MORE(shape) \
    { DECODE(shape " new 1"), DECODE(shape), BENCH_MORE, 0, 0, 2 }
#define PLAN(text) \
    { text, NULL, BENCH_PLAN, 0, 0, 5 }

// Shares are asked from 500 MB and from 2 GB of K and V on.
const bench_ask bench_cuda_asks[] = {
    SHARE(DECODE("kv_len 131072"), 0.93),
    SHARE(DECODE("batch 32 kv_len 4096"), 0.93),
    SHARE(DECODE("batch 128 kv_len 1024"), 0.93),
    SHARE(RAGGED("131072"), 0.93),
    SHARE(DECODE("batch 64 kv_len 8192"), 0.95),
    SHARE(DECODE("batch 128 kv_len 8192"), 0.95),
    SHARE("decode bf16 64/8 batch 128 kv_len 8192", 0.95),
    SHARE("decode bf16 32/32 batch 128 kv_len 8192", 0.95),
    SHARE(RAGGED("1048576"), 0.95),
    EVEN(RAGGED("131072"), DECODE("batch 128 kv_len 1024")),
    EVEN(RAGGED("1048576"), DECODE("batch 128 kv_len 8192")),
    MORE("kv_len 8192"),
    MORE("kv_len 131072"),
    MORE("batch 8 kv_len 4096"),
    MORE("batch 32 kv_len 4096"),
    MORE("batch 64 kv_len 8192"),
    MORE("batch 128 kv_len 1024"),
    MORE("batch 128 kv_len 8192"),
    PLAN(DECODE("batch 128 kv_len 1024")),
    PLAN(DECODE("batch 128 kv_len 1024 new 1")),
    PLAN(RAGGED("131072")),
    {NULL, NULL, BENCH_SHARE, 0, 0, 0},
};
