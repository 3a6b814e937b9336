// conf_oracle holds what a launch should give: the float64 reference and, per row, how far from it
// a result may be.
#ifndef ATTND_TESTS_CONFORMANCE_CONF_ORACLE_H
#define ATTND_TESTS_CONFORMANCE_CONF_ORACLE_H

#include "tests/conformance/conf_launch.h"

typedef struct conf_oracle {
    double *out, *lse;                                         // as attn_reference leaves them
    void *pool;                                                // after the append
    double out_bound[CONF_MAX_ROWS], lse_error[CONF_MAX_ROWS]; // by index in params.rows
    uint64_t saturated;
} conf_oracle;

// conf_oracle_init computes the oracle of a launch.  The launch's own pool and outputs stay as they
// are.
void conf_oracle_init(conf_oracle *o, const conf_launch *l);

void conf_oracle_fini(conf_oracle *o);

// conf_oracle_check compares a launch that has run.  Returns NULL when it is right, else what is
// wrong (in static storage).  Values of the pool may be one step of a narrow type beside the
// reference's, where float32 and float64 round to different sides; then the outputs are compared
// with the reference over the pool as it is.
const char *conf_oracle_check(const conf_oracle *o, const conf_launch *l);

// conf_worst_ratio is the largest error / bound that conf_oracle_check has seen since it was set to
// 0.
extern double conf_worst_ratio;

#endif
