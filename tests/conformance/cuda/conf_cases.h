// conf_cases adds launches to test_conformance_cuda: those with rows of many query tokens are made
// in conf_many.c.
#ifndef ATTND_TESTS_CONFORMANCE_CUDA_CONF_CASES_H
#define ATTND_TESTS_CONFORMANCE_CUDA_CONF_CASES_H

#include "tests/conformance/conf_launch.h"

// In which modes a launch is run.
enum {
    CONF_MODE_AUTO = 1 << 0,
    CONF_MODE_DETERMINISTIC = 1 << 1,
    CONF_MODE_SPLITS = 1 << 2, // 2 and 3, forced
    CONF_MODE_ALL_SPLITS = 1 << 3,
    CONF_MODE_USUAL = CONF_MODE_AUTO | CONF_MODE_DETERMINISTIC | CONF_MODE_SPLITS,
};

// conf_add adds a launch that shows a fact, and returns its spec to be changed.
conf_spec *conf_add(const char *fact, int modes, const conf_spec *spec);

// conf_base returns a launch of four causal rows of few query tokens.
conf_spec conf_base(attnd_dtype dtype, int32_t head_dim, uint64_t seed);

// conf_dtype_of and conf_head_dim_of go through the types and head dimensions by turns.
attnd_dtype conf_dtype_of(uint64_t i);
int32_t conf_head_dim_of(uint64_t i);

// conf_long_rows_are_planned plans rows of many query tokens, decoded, in plans of a device that
// was opened for few rows, and returns what is wrong, NULL if nothing.
const char *conf_long_rows_are_planned(void);

// conf_chunked returns a launch of one row of 400 query tokens of 4 heads, to be cut into chunks.
enum { CONF_CHUNKED = 20 };
conf_spec conf_chunked(int i);

// conf_add_many adds the launches with rows of many query tokens, as `kernel` is to show them
// (test_conformance_cuda.c names them): bulk those that it leaves to the portable kernel.
void conf_add_many(const char *kernel, bool is_short);

#endif
