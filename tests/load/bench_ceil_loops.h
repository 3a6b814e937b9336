// bench_ceil_loops has the loops of bench_ceil_ops as the compiler's vector types express them; a
// file of an instruction set says how many bytes a vector has and includes it.  What has no such
// form (conversion of half, dot products) is that file's own.
//
// Enough accumulators stand side by side to hide the latency of the additions: a multiply-add takes
// 4 cycles on two ports, so 8 would do; 10 leave room and fit 16 registers.
#ifndef ATTND_LOAD_BENCH_CEIL_LOOPS_H
#define ATTND_LOAD_BENCH_CEIL_LOOPS_H

#include <string.h>

#include "tests/load/bench_ceil.h"

#ifndef CEIL_VECTOR_BYTES
#define CEIL_VECTOR_BYTES 16
#endif

typedef float ceil_f32 __attribute__((vector_size(CEIL_VECTOR_BYTES)));
typedef int32_t ceil_i32 __attribute__((vector_size(CEIL_VECTOR_BYTES)));
// Tokens of an odd size may lie anywhere.
typedef int32_t ceil_bits __attribute__((vector_size(CEIL_VECTOR_BYTES), aligned(1), may_alias));

enum {
    CEIL_LANES = CEIL_VECTOR_BYTES / 4,
    CEIL_PARTS = BENCH_RUN_ALIGN / CEIL_VECTOR_BYTES, // vectors of a piece
    CEIL_CHAINS = 10,
    CEIL_LINE = 64,
    CEIL_FMA_FLOPS = 2 * CEIL_CHAINS * CEIL_LANES,
};

static inline float ceil_sum(ceil_f32 x) {
    float sum = 0;
    for (int i = 0; i < CEIL_LANES; i++) {
        sum += x[i];
    }
    return sum;
}

// ceil_opaque hides from the compiler what a value is.
static inline float ceil_opaque(float x) {
    __asm__ volatile("" : "+m"(x));
    return x;
}

// ceil_cursor is a place in a list of runs.
typedef struct ceil_cursor {
    uint64_t run, at;
} ceil_cursor;

static inline void ceil_skip(ceil_cursor *c, const bench_run *runs, uint64_t num, uint64_t bytes) {
    c->at += bytes;
    while (c->run < num && c->at >= runs[c->run].bytes) {
        c->at -= runs[c->run].bytes;
        c->run++;
    }
}

static inline void ceil_read_piece(ceil_bits *acc, const char *at) {
    const ceil_bits *from = (const void *)at;
    for (int part = 0; part < CEIL_PARTS; part++) {
        acc[part] ^= from[part];
    }
}

static float ceil_read(const bench_run *runs, uint64_t num, uint64_t ahead) {
    ceil_bits acc[CEIL_PARTS];
    ceil_cursor here = {0, 0};
    ceil_cursor there = {0, 0};
    memset(acc, 0, sizeof(acc));
    ceil_skip(&there, runs, num, ahead);
    while (here.run < num) {
        const char *at = runs[here.run].at + here.at;
        uint64_t bytes = runs[here.run].bytes - here.at;
        if (ahead == 0 || there.run >= num) {
            for (uint64_t i = 0; i < bytes; i += BENCH_RUN_ALIGN) {
                ceil_read_piece(acc, at + i);
            }
        } else {
            uint64_t left = runs[there.run].bytes - there.at;
            const char *next = runs[there.run].at + there.at;
            bytes = bytes < left ? bytes : left;
            for (uint64_t i = 0; i < bytes; i += BENCH_RUN_ALIGN) {
                for (int line = 0; line < BENCH_RUN_ALIGN; line += CEIL_LINE) {
                    __builtin_prefetch(next + i + line, 0, 3);
                }
                ceil_read_piece(acc, at + i);
            }
            ceil_skip(&there, runs, num, bytes);
        }
        ceil_skip(&here, runs, num, bytes);
    }
    int32_t all = 0;
    for (int part = 0; part < CEIL_PARTS; part++) {
        for (int i = 0; i < CEIL_LANES; i++) {
            all ^= acc[part][i];
        }
    }
    return (float)all;
}

static float ceil_fma(uint64_t rounds) {
    ceil_f32 acc[CEIL_CHAINS];
    ceil_f32 factor, more;
    for (int i = 0; i < CEIL_LANES; i++) {
        factor[i] = ceil_opaque(0.75f);
        more[i] = ceil_opaque(0.5f);
    }
    for (int chain = 0; chain < CEIL_CHAINS; chain++) {
        acc[chain] = more * (float)chain;
    }
    for (uint64_t round = 0; round < rounds; round++) {
        for (int chain = 0; chain < CEIL_CHAINS; chain++) {
            acc[chain] = acc[chain] * factor + more;
        }
    }
    for (int chain = 1; chain < CEIL_CHAINS; chain++) {
        acc[0] += acc[chain];
    }
    return ceil_sum(acc[0]);
}

// ceil_exp2_of: 2^x = 2^n * 2^r, n = round(x), |r| <= 1/2; 2^r by its Taylor series up to
// (r ln 2)^5 / 5!.  Adding 1.5 * 2^23 rounds, and leaves n in the low bits.
static inline ceil_f32 ceil_exp2_of(ceil_f32 x) {
    const float magic = 12582912.0f;
    ceil_f32 shifted = x + magic;
    ceil_f32 r = x - (shifted - magic);
    ceil_f32 y = r * 1.3333558e-3f + 9.6181291e-3f;
    y = y * r + 5.5504109e-2f;
    y = y * r + 2.4022651e-1f;
    y = y * r + 6.9314718e-1f;
    y = y * r + 1.0f;
    return (ceil_f32)((ceil_i32)y + ((ceil_i32)shifted << 23));
}

static float ceil_exp2(const float *x, uint64_t rounds) {
    ceil_f32 acc[4];
    memset(acc, 0, sizeof(acc));
    for (uint64_t round = 0; round < rounds; round++) {
        for (int i = 0; i < BENCH_CEIL_ELEMENTS; i += 4 * CEIL_LANES) {
            for (int part = 0; part < 4; part++) {
                ceil_f32 in;
                memcpy(&in, x + i + part * CEIL_LANES, sizeof(in));
                acc[part] += ceil_exp2_of(in);
            }
        }
        __asm__ volatile("" ::: "memory");
    }
    return ceil_sum(acc[0] + acc[1] + acc[2] + acc[3]);
}

// A file that can convert float16 defines CEIL_WIDENS before the include, and ceil_widen behind it.
#ifdef CEIL_WIDENS
static ceil_f32 ceil_widen(const uint16_t *x); // CEIL_LANES of them

static float ceil_from_f16(const uint16_t *x, uint64_t rounds) {
    ceil_f32 acc[4];
    memset(acc, 0, sizeof(acc));
    for (uint64_t round = 0; round < rounds; round++) {
        for (int i = 0; i < BENCH_CEIL_ELEMENTS; i += 4 * CEIL_LANES) {
            for (int part = 0; part < 4; part++) {
                acc[part] += ceil_widen(x + i + part * CEIL_LANES);
            }
        }
        __asm__ volatile("" ::: "memory");
    }
    return ceil_sum(acc[0] + acc[1] + acc[2] + acc[3]);
}
#endif

#endif
