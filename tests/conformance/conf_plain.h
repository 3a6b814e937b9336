// conf_plain is attention as a program without fused kernels computes it, step by step in the
// storage type: RoPE written back, scores and sums in float32, each product and each sum rounded by
// itself (compile it with -ffp-contract=off), probabilities rounded before they meet V, out
// rounded.  Its error against float64 is the measure that kernels are held to.
#ifndef ATTND_TESTS_CONFORMANCE_CONF_PLAIN_H
#define ATTND_TESTS_CONFORMANCE_CONF_PLAIN_H

#include "attention/attn.h"

// The order in which float32 sums are taken.
typedef enum conf_order {
    CONF_ASCENDING,
    CONF_DESCENDING,
    CONF_PAIRWISE,
    CONF_NUM_ORDERS,
} conf_order;

// conf_plain appends to p's pool and computes out [sum of q_count, q_heads, v_head_dim] and lse
// [q_heads, sum of q_count], the layout of attn_reference.
void conf_plain(const attn_params *p, conf_order order, double *out, double *lse);

#endif
