// bench_data is the token ids, q, k and v that the load test sends: random numbers that depend on
// (seed, origin, layer, tensor, token) alone.  The verifier makes any of them again instead of
// storing them, and a preempted sequence gets the same ones when it is computed again.  Any thread.
#ifndef ATTND_LOAD_BENCH_DATA_H
#define ATTND_LOAD_BENCH_DATA_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/dtype.h"

typedef enum bench_tensor {
    BENCH_Q,
    BENCH_K,
    BENCH_V,
} bench_tensor;

enum { BENCH_SHARED_TOKENS = 512 }; // of a hash id

// bench_prompt says what the tokens of a request are: its own, or, of a prompt that has hash ids,
// those of blocks that it shares with every prompt that has the same id there.  An id stands for
// all tokens before it too, so requests share prefixes and nothing else.
typedef struct bench_prompt {
    uint64_t request;
    const uint32_t *ids; // [num_ids], of its blocks of BENCH_SHARED_TOKENS; borrowed from the load
    uint32_t num_ids;
    uint32_t input; // tokens that ids may be of; the generated ones behind them are its own
} bench_prompt;

// bench_prompt_origin returns whose a token is: a number of the request, or of the block.
uint64_t bench_prompt_origin(const bench_prompt *prompt, uint32_t token);

// bench_token_id returns the id of the token at that place of what it originates from.
uint32_t bench_token_id(uint64_t seed, uint64_t origin, uint32_t token);

// bench_row_key returns the key of one token's row of a tensor, [heads * dim] elements.
uint64_t bench_row_key(uint64_t seed, uint64_t origin, uint32_t layer, bench_tensor tensor,
                       uint32_t token);

// bench_fill writes elements first to first + n - 1 of a row, rounded to dtype.  k and v have
// variance 1; q has 4, so that with scale 1 / sqrt(head_dim) the logits have a standard deviation
// of 2, and a few keys carry a softmax without any one of them being alone.
void bench_fill(void *out, attnd_dtype dtype, bench_tensor tensor, uint64_t key, uint32_t first,
                uint32_t n);

// bench_round rounds n floats to dtype, in place.
void bench_round(float *x, attnd_dtype dtype, uint32_t n);

// bench_sampled says whether the output row of that token is to be verified: true for a fraction p
// of all (request, token), the same ones in every run with that seed.
bool bench_sampled(uint64_t seed, uint64_t request, uint32_t token, double p);

// bench_rng is a sequence of random numbers, for lengths and arrivals.  Caller locks.
typedef struct bench_rng {
    uint64_t state;
} bench_rng;

// bench_rng_uniform returns a number in (0, 1), bench_rng_normal one of mean 0 and variance 1.
double bench_rng_uniform(bench_rng *rng);
double bench_rng_normal(bench_rng *rng);

#endif
