// bench_replay replays the prompts of a trace against a prefix cache of so many blocks: against
// kvcache with one of its policies, and against what no policy can beat.  Blocks are those of the
// trace's hash ids, and a hit is the full blocks at the beginning of a prompt that are cached: the
// last one of a prompt, when it is not full, is neither looked up nor kept, nor are outputs.
// Requests are taken one after another, in file order.  One thread.
#ifndef ATTND_LOAD_BENCH_REPLAY_H
#define ATTND_LOAD_BENCH_REPLAY_H

#include <stdint.h>

#include "proto/err.h"
#include "tests/load/bench_trace.h"

typedef struct bench_replay bench_replay;

// bench_replay_create prepares a trace, which it borrows.  The caller owns *out: bench_replay_free.
// ATTND_EINVAL: the trace has no hash ids, or too few for a prompt.  ATTND_ENOMEM.
attnd_err bench_replay_create(bench_replay **out, const bench_trace *trace, attnd_errinfo *info);
void bench_replay_free(bench_replay *replay);

typedef struct bench_replay_info {
    uint64_t requests, input_tokens;
    uint64_t unbounded_hits; // tokens, of a cache that keeps all
    uint32_t unique_blocks;  // different full ones
    uint32_t longest;        // full blocks of a prompt: the fewest that a cache must have
} bench_replay_info;
bench_replay_info bench_replay_get_info(const bench_replay *replay);

// bench_replay_belady gives the tokens found by a cache that knows the future: of the blocks that
// the prompt at hand has not, that goes which is needed again last (Belady 1966), whatever lies
// behind it.  ATTND_EINVAL: fewer blocks than the longest prompt has.  ATTND_ENOMEM.
attnd_err bench_replay_belady(const bench_replay *replay, uint32_t blocks, uint64_t *hits,
                              attnd_errinfo *info);

// bench_replay_policy gives the tokens that kvcache finds, in an arena of so many blocks and one
// more for the rest of the prompt at hand, with the policy of that index (kv_policy.h).  The arena
// has no memory behind it.  ATTND_EINVAL: fewer blocks than the longest prompt has, and what
// kvcache says.  ATTND_ENOMEM.
attnd_err bench_replay_policy(const bench_replay *replay, uint32_t blocks, uint32_t policy,
                              uint64_t *hits, attnd_errinfo *info);

#endif
