// Merging of partial states that lie in out and LSE form, as ranks or cascade levels exchange them.
// With w_s = exp(lse_s - max): lse = max + ln(sum w_s), out = sum w_s out_s / (sum w_s + exp(sink -
// max)).  A state that saw no key, (0, -inf), has no weight, and its out is not read.
#include <math.h>

#include "attention/attn.h"

// weigh returns the largest LSE of the states of one query and the sum of their weights.
static double weigh(const attn_merge_params *p, int64_t index, double *sum) {
    double largest = -INFINITY;
    for (int32_t s = 0; s < p->num_states; s++) {
        double lse = (double)p->state_lses[s][index];
        largest = isnan(lse) || lse > largest ? lse : largest;
    }
    *sum = 0;
    for (int32_t s = 0; s < p->num_states && largest != -INFINITY; s++) {
        *sum += exp((double)p->state_lses[s][index] - largest);
    }
    return largest;
}

static void merge_query(const attn_merge_params *p, int64_t token, int32_t head) {
    int64_t index = head * p->tokens + token;
    uint64_t first = (uint64_t)((token * p->q_heads + head) * p->v_head_dim);
    double acc[ATTN_MAX_HEAD_DIM] = {0};
    double sum = 0;
    double largest = weigh(p, index, &sum);
    bool is_empty = largest == -INFINITY;
    for (int32_t s = 0; s < p->num_states && !is_empty; s++) {
        double weight = exp((double)p->state_lses[s][index] - largest);
        for (int32_t d = 0; d < p->v_head_dim && weight != 0; d++) {
            acc[d] += weight * attnd_load(p->states[s], p->dtype, first + (uint64_t)d);
        }
    }
    double sink = p->sinks && !is_empty ? exp((double)p->sinks[head] - largest) : 0;
    for (int32_t d = 0; d < p->v_head_dim; d++) {
        attnd_store(p->out, p->dtype, first + (uint64_t)d, is_empty ? 0 : acc[d] / (sum + sink));
    }
    if (p->lse) {
        p->lse[index] = is_empty ? -INFINITY : (float)(largest + log(sum));
    }
}

void attn_merge_states(const attn_merge_params *p) {
    for (int64_t token = 0; token < p->tokens; token++) {
        for (int32_t head = 0; head < p->q_heads; head++) {
            merge_query(p, token, head);
        }
    }
}
