// bench_replay_prompts is what the replays of bench_replay.h share.
#ifndef ATTND_LOAD_BENCH_REPLAY_PROMPTS_H
#define ATTND_LOAD_BENCH_REPLAY_PROMPTS_H

#include "tests/load/bench_replay.h"

typedef struct bench_replay_prompt {
    uint64_t first; // of its uses
    uint32_t blocks;
} bench_replay_prompt;

struct bench_replay {
    const bench_trace *trace;
    bench_replay_info info;
    bench_replay_prompt *prompts; // [requests]
    uint32_t *blocks;             // [num_uses], full blocks of all prompts, numbered from 0 on
    uint64_t num_uses;
};

// bench_replay_check refuses a cache that the longest prompt does not fit: ATTND_EINVAL.
attnd_err bench_replay_check(const bench_replay *replay, uint32_t blocks, attnd_errinfo *info);

#endif
