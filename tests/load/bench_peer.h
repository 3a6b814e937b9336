// bench_peer times OpenBLAS (bench_blas.h) on the shapes of cases: decode of one sequence over a
// float32 cache, and causal prefill of one sequence, in float32 whatever the case's type.  Its data
// are its own, random, contiguous per KV head as it likes them; those of a decode exist as often as
// the caller says that it takes to read nothing that is cached.  One thread.
#ifndef ATTND_LOAD_BENCH_PEER_H
#define ATTND_LOAD_BENCH_PEER_H

#include "tests/load/bench_arena.h"
#include "tests/load/bench_blas.h"
#include "tests/load/bench_case.h"

enum { BENCH_MAX_PEERS = 8 };

// bench_peer is the peer of one case.
typedef struct bench_peer {
    bench_case c;
    bench_arena arena;
    bench_blas_case blas; // k and v: of the first copy
    uint32_t copies, next;
} bench_peer;

typedef struct bench_peers {
    bench_peer list[BENCH_MAX_PEERS];
    uint32_t num;
} bench_peers;

// bench_peer_knows says whether the library is there and takes such a case.
bool bench_peer_knows(const bench_case *c);

// bench_peer_time times one call.  The first one for a case makes its data, copies of them for
// a decode, and finds out which block of a prefill is fastest.  ATTND_ENOMEM.
attnd_err bench_peer_time(bench_peers *p, const bench_case *c, uint32_t threads, uint32_t copies,
                          double *us, attnd_errinfo *info);

// bench_peers_reset gives all data back.
void bench_peers_reset(bench_peers *p);

#endif
