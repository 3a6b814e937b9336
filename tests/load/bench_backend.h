// bench_backend is what `attn-bench kernels` needs of a device: a table of functions and a row of
// bench_backends.  Cases, data, checks, statistics, verdicts and reports are the same for all.
//
// One thread.  Errors come with a text; the benchmark ends at the first.
#ifndef ATTND_LOAD_BENCH_BACKEND_H
#define ATTND_LOAD_BENCH_BACKEND_H

#include <stddef.h>

#include "tests/load/bench_set.h"

enum { BENCH_MAX_MACHINE = 8 };

typedef struct bench_backend bench_backend; // each backend has its own

typedef struct bench_backend_opts {
    const char *kernel; // instruction set or kernel by name, one of kernels; NULL = the best
    uint32_t threads;   // of a CPU; 0 = as many as there are
    const char *peer;   // a program that times the peers (bench_cuda_peer.h); NULL = none
} bench_backend_opts;

// bench_pace is how fast a device was allowed to run; 0 = unknown.
typedef struct bench_pace {
    double mhz, watts;
} bench_pace;

// bench_ceiling is what a case is held against: bytes or operations that the machine can do.
typedef struct bench_ceiling {
    char what[96];
    double value;  // GB/s or GFLOP/s, 0 = there is none
    bool is_bytes; // GB/s, compared with gbs, else with gflops
} bench_ceiling;

typedef struct bench_backend_ops {
    const char *name; // of --backend
    // groups are the cases of the whole run: lists of case names, each ended by NULL, which are
    // timed in turns; the list of lists is ended by NULL too.
    const char *const *const *groups;
    const struct bench_ask *asks; // of its cases, see bench_result.h; ended by a pattern of NULL

    const char *const *kernels; // names that bench_backend_opts may ask for, ended by NULL

    // A sample, of which one time is taken, reads at least that much and is at least so many calls.
    uint64_t sample_bytes;
    uint32_t sample_calls;

    // open: ATTND_ENOTSUP when there is no such device, kernel or peer.  The caller owns *out:
    // close.
    attnd_err (*open)(bench_backend **out, const bench_backend_opts *opts, attnd_errinfo *info);
    void (*close)(bench_backend *b);

    // describe says on what launches run, for a person and the report; state how it is at the
    // moment: clocks, power (may be NULL).
    void (*describe)(const bench_backend *b, char *out, size_t bytes);
    void (*state)(const bench_backend *b, char *out, size_t bytes);
    uint32_t (*threads)(const bench_backend *b); // that may help on the host

    // last_cache returns the bytes of the largest cache between kernels and memory.
    uint64_t (*last_cache)(const bench_backend *b);

    // place says what to add to an address of the arena to get the device's; put copies the used
    // part of the arena there, and get a part of it back (nothing to do where both are the same).
    attnd_err (*place)(bench_backend *b, const bench_arena *arena, int64_t *delta,
                       attnd_errinfo *info);
    attnd_err (*put)(bench_backend *b, const bench_arena *arena, attnd_errinfo *info);
    attnd_err (*get)(bench_backend *b, void *host, uint64_t bytes, attnd_errinfo *info);

    // run does one launch to its end; time does num of them one after the other and gives the
    // microseconds of one.
    attnd_err (*run)(bench_backend *b, const attn_params *launch, attn_choice *choice,
                     attnd_errinfo *info);
    attnd_err (*time)(bench_backend *b, const attn_params *const *launches, uint32_t num,
                      double *us, attnd_errinfo *info);

    // pace says at which pace the last time or peer ran; may be NULL.
    bench_pace (*pace)(const bench_backend *b);

    // plan_us returns the microseconds that planning a launch takes on the host, 0 when that is
    // part of run; may be NULL.
    double (*plan_us)(bench_backend *b, const attn_params *launch);

    // ceilings returns how many ways there are to measure what a case is held against; the best
    // one counts, and 0 is none.  ceiling measures one of them, once; sets [num] are copies of the
    // case's data that are not in a cache.
    uint32_t (*ceilings)(const bench_backend *b, const bench_case *c);
    attnd_err (*ceiling)(bench_backend *b, const bench_case *c, uint32_t way,
                         const bench_set *const *sets, uint32_t num, bench_ceiling *out,
                         attnd_errinfo *info);

    // machine measures, once a run, what any figure may be held against: at most
    // BENCH_MAX_MACHINE, into out; returns how many.  The arena's content does not matter.
    uint32_t (*machine)(bench_backend *b, const bench_arena *arena, bench_ceiling *out);

    // peer_name returns who else computes such cases here, NULL when nobody does.  peer times one
    // call of it on data of the same shape, of which copies take turns.  Both may be NULL.
    const char *(*peer_name)(bench_backend *b, const bench_case *c);
    attnd_err (*peer)(bench_backend *b, const bench_case *c, uint32_t copies, double *us,
                      attnd_errinfo *info);
    // peer_follows: a case's peer is timed right behind the case, since they share a clock that
    // follows the power; else all peers behind all cases, since their threads linger.
    bool peer_follows;
    // peer_missing says which peer is not there and how to get it, NULL when none is missing.
    const char *(*peer_missing)(bench_backend *b);
} bench_backend_ops;

// bench_backend_find finds a backend by name.  ATTND_EINVAL: there is none of that name.
// ATTND_ENOTSUP: this build left it out.
attnd_err bench_backend_find(const bench_backend_ops **ops, const char *name, attnd_errinfo *info);

// bench_backends are all of this build, ended by NULL.
extern const bench_backend_ops *const bench_backends[];

// One table per backend.
extern const bench_backend_ops bench_backend_cpu;
extern const bench_backend_ops bench_backend_cuda; // where CUDA was there at build time

#endif
