// bench_trace reads the request lengths and arrival times of public serving traces, and what their
// prompts share, as the files are published:
//
//     Azure LLM inference, CSV     TIMESTAMP,ContextTokens,GeneratedTokens (columns in any order,
//                                  others ignored), TIMESTAMP "2023-11-16 18:15:46.6805900", with
//                                  or without a zone (Z, +00:00)
//     Mooncake, JSON lines         {"timestamp": ms, "input_length": n, "output_length": n,
//                                  "hash_ids": [...]}, other keys ignored; equal hash_ids are
//                                  equal blocks of BENCH_TRACE_BLOCK tokens behind equal prefixes
//
// A file may hold anything.  What is not such a line is refused with its number.
#ifndef ATTND_LOAD_BENCH_TRACE_H
#define ATTND_LOAD_BENCH_TRACE_H

#include <stdint.h>

#include "proto/err.h"

enum {
    BENCH_MAX_LENGTH = 1 << 24,       // tokens of an input or output
    BENCH_TRACE_MAX_ROWS = 1 << 24,   // requests of a trace
    BENCH_TRACE_LINE_BYTES = 1 << 20, // longest line
    BENCH_TRACE_BLOCK = 512, // tokens of a hash id; the last one of a prompt may have fewer
};

typedef struct bench_trace_row {
    uint64_t time_us; // since the earliest row of the trace
    uint32_t input, output;
    uint32_t num_ids;  // of its prompt, 0 when the trace has none
    uint64_t first_id; // in the trace's ids
} bench_trace_row;

typedef struct bench_trace {
    bench_trace_row *rows; // [num_rows], in file order
    uint64_t num_rows;     // >= 1
    uint32_t *ids;         // [num_ids], hash ids of all rows
    uint64_t num_ids;
    const char *format; // "azure" or "mooncake"
} bench_trace;

// bench_trace_read reads the first max_rows requests of a file (0 = all).  The caller owns *out:
// bench_trace_free.  ATTND_EIO: cannot be opened or read; ATTND_EINVAL: says which line and why;
// ATTND_ENOMEM.
attnd_err bench_trace_read(bench_trace *out, const char *path, uint64_t max_rows,
                           attnd_errinfo *info);
void bench_trace_free(bench_trace *trace);

#endif
