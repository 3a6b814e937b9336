// conf_cases is the launches of test_conformance_cuda, which checks each against the reference, and
// the facts that need no launch.  A file an idea:
//     conf_few.c      rows of few query tokens: types, head ratios, lengths, features, logits
//     conf_many.c     rows of many query tokens, and block masks
//     conf_planned.c  what a device plans, and what it says that it would
#ifndef ATTND_TESTS_CONFORMANCE_CUDA_CONF_CASES_H
#define ATTND_TESTS_CONFORMANCE_CUDA_CONF_CASES_H

#include "tests/conformance/conf_launch.h"
#include "tests/conformance/cuda/conf_device.h"

// In which modes a launch is run.
enum {
    CONF_MODE_AUTO = 1 << 0,
    CONF_MODE_DETERMINISTIC = 1 << 1,
    CONF_MODE_SPLITS = 1 << 2, // 2 and 3, forced
    CONF_MODE_ALL_SPLITS = 1 << 3,
    CONF_MODE_USUAL = CONF_MODE_AUTO | CONF_MODE_DETERMINISTIC | CONF_MODE_SPLITS,
};

// ---- what makes a launch

// conf_add adds a launch that shows a fact, and returns its spec to be changed.  Its blocks are all
// of the pool, in one layer; conf_lay_out lays those of the launch that was added last out
// otherwise.
conf_spec *conf_add(const char *fact, int modes, const conf_spec *spec);
void conf_lay_out(conf_layout layout);

// conf_base returns a launch of four causal rows of few query tokens.
conf_spec conf_base(attnd_dtype dtype, int32_t head_dim, uint64_t seed);

// conf_dtype_of and conf_head_dim_of go through the types and head dimensions by turns.
attnd_dtype conf_dtype_of(uint64_t i);
int32_t conf_head_dim_of(uint64_t i);

// conf_chunked returns a launch of one row of 400 query tokens of 4 heads, to be cut into chunks.
enum { CONF_CHUNKED = 20 };
conf_spec conf_chunked(int i);

// ---- the launches

// conf_add_few adds the launches with rows of few query tokens.  is_short: what a memory checker
// gets through.
void conf_add_few(bool is_short);

// conf_add_many adds the launches with rows of many query tokens, as `kernel` is to show them
// (test_conformance_cuda.c names them): bulk those that it leaves to the portable kernel.
void conf_add_many(const char *kernel, bool is_short);

// ---- the plans

// conf_long_rows_are_planned plans rows of many query tokens, decoded, in plans of a device that
// was opened for few rows, and returns what is wrong, NULL if nothing.
const char *conf_long_rows_are_planned(void);

// conf_checked_masks_are_planned holds what a device's check_row says of rows with masks against
// its plan, and returns what is wrong.  In any build, also one without some of the kernels
// (ATTN_ONLY).
const char *conf_checked_masks_are_planned(void);

#endif
