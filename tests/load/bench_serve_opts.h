// bench_serve_opts are the flags of `attn-bench serve`.
#ifndef ATTND_LOAD_BENCH_SERVE_OPTS_H
#define ATTND_LOAD_BENCH_SERVE_OPTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/client/attnd.h"
#include "tests/load/bench_load.h"
#include "tests/load/bench_model.h"

typedef struct bench_serve_opts {
    const char *connect, *tenant, *preset, *json, *rope, *input, *output;
    bench_model model;
    bench_load_opts load;
    uint64_t requests, daemon_pid;
    double verify, duration_s, rate, speed, patience_s, timeout_s;
    uint32_t concurrency, prefill_chunk, verify_threads;
    bool trace_time, help;
    const char *transport_name;
    attnd_transport transport;
} bench_serve_opts;

// bench_serve_parse reads argv[1 .. argc - 1]; texts are borrowed from it.  The preset is applied
// first, then the other flags change it, whatever their order.  model is prepared (the caller owns
// its arrays: bench_model_fini, also after an error) unless help was asked for.  ATTND_EINVAL,
// ATTND_ENOENT or ATTND_ENOTSUP with the flag's name in *info.
attnd_err bench_serve_parse(bench_serve_opts *o, int argc, char *const *argv, attnd_errinfo *info);

// bench_serve_help prints all flags.
void bench_serve_help(FILE *out);

#endif
