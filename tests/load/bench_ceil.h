// bench_ceil measures what this machine can do at most: reads, multiply-adds, conversions.  The
// loops are this benchmark's own, not the library's kernels, one file per instruction set; every
// figure is a rate over all threads together.  One caller at a time.
#ifndef ATTND_LOAD_BENCH_CEIL_H
#define ATTND_LOAD_BENCH_CEIL_H

#include <stdbool.h>
#include <stdint.h>

enum {
    BENCH_RUN_ALIGN = 256,      // bytes: runs begin and end at multiples of this
    BENCH_CEIL_ELEMENTS = 4096, // of a round of from_f16 and exp2: they stay in L1
    BENCH_CEIL_AHEADS = 6,      // prefetch distances, see bench_ceil_ahead
};

// bench_run is a piece of memory to be read in one go.
typedef struct bench_run {
    const char *at;
    uint64_t bytes;
} bench_run;

// bench_ceil_ops are the loops of one instruction set.  Each returns something that depends on all
// its work, so that none of it is left out.
typedef struct bench_ceil_ops {
    const char *isa; // "avx512_bf16", "avx512", "avx2", "neon", "scalar": names as of the engine
    // read reads num runs one after the other, and prefetches ahead bytes further along the runs,
    // one line for each line read; 0 = no prefetch.
    float (*read)(const bench_run *runs, uint64_t num, uint64_t ahead);
    float (*fma)(uint64_t rounds);
    uint64_t fma_flops;                 // of a round
    float (*dot_bf16)(uint64_t rounds); // NULL: there is no such instruction
    uint64_t dot_flops;
    // Convert, and raise 2 to, BENCH_CEIL_ELEMENTS values, rounds times.
    float (*from_f16)(const uint16_t *x, uint64_t rounds);
    float (*exp2)(const float *x, uint64_t rounds);
} bench_ceil_ops;

// bench_ceil_find returns the loops of an instruction set by the engine's name, or the best of this
// machine for NULL.  NULL when there are none.  Any thread.
const bench_ceil_ops *bench_ceil_find(const char *isa);

// bench_ceil_ahead returns prefetch distance index, in bytes; index 0 is none.
uint64_t bench_ceil_ahead(uint32_t index);

// bench_ceil_read returns GB/s of reading runs [num] once with threads, each of which gets as good
// as the same number of bytes in one stretch.
double bench_ceil_read(const bench_ceil_ops *ops, const bench_run *runs, uint64_t num,
                       uint64_t ahead, uint32_t threads);

// bench_ceil_rate is what bench_ceil_compute measures.
typedef enum bench_ceil_rate {
    BENCH_CEIL_FMA,      // GFLOP/s, float32
    BENCH_CEIL_DOT,      // GFLOP/s, bf16 products summed in float32
    BENCH_CEIL_FROM_F16, // G elements/s
    BENCH_CEIL_EXP2,     // G elements/s
    BENCH_CEIL_NUM_RATES,
} bench_ceil_rate;

// bench_ceil_compute runs one loop on all threads for about ms; 0 when there is no such loop.
double bench_ceil_compute(const bench_ceil_ops *ops, bench_ceil_rate rate, uint32_t threads,
                          double ms);

// One table per file; those of another architecture are not there.
extern const bench_ceil_ops bench_ceil_scalar;
extern const bench_ceil_ops bench_ceil_avx2;
extern const bench_ceil_ops bench_ceil_avx512;
extern const bench_ceil_ops bench_ceil_avx512_bf16;
extern const bench_ceil_ops bench_ceil_neon;

#endif
