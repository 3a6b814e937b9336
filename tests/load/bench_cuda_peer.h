// bench_cuda_peer has another program time cases, in turns with this one: a process that lives as
// long as the benchmark, so that both see the same clocks, and either waits while the other runs.
// tests/load/peers.py --serve is one.  It reads lines and answers each by a line, but for "drop":
//     make CASE    makes random data for a case (bench_case.h); who computes it, or "-"
//     time CASE    times it once: microseconds of a call, MHz of the SMs, watts
//     drop         gives all data back
// One thread.
#ifndef ATTND_LOAD_BENCH_CUDA_PEER_H
#define ATTND_LOAD_BENCH_CUDA_PEER_H

#include "tests/load/bench_backend.h"

typedef struct bench_cuda_peer bench_cuda_peer;

// bench_cuda_peer_open starts the program by the shell.  ATTND_ENOTSUP when it cannot be started,
// ATTND_ENOMEM.  The caller owns *out: bench_cuda_peer_close, which accepts NULL.
attnd_err bench_cuda_peer_open(bench_cuda_peer **out, const char *command, attnd_errinfo *info);
void bench_cuda_peer_close(bench_cuda_peer *p);

// bench_cuda_peer_name returns who computes such cases, valid until the next call; NULL when nobody
// does, or the program has ended.
const char *bench_cuda_peer_name(bench_cuda_peer *p, const bench_case *c);

// bench_cuda_peer_time times a case once, after its name was asked for.  ATTND_ECONN when the
// program has ended or answers what it should not.
attnd_err bench_cuda_peer_time(bench_cuda_peer *p, const bench_case *c, double *us,
                               bench_pace *pace, attnd_errinfo *info);

// bench_cuda_peer_drop gives all data back.
void bench_cuda_peer_drop(bench_cuda_peer *p);

#endif
