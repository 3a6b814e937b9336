// attn_cpu_step.c walks a task's keys for the SIMD kernels.
//
// Most steps of most tasks are full: causal and window spans only grow with the token, so two
// comparisons tell, and no row needs bits of its own.  Only steps at an edge, under a tree mask or
// cut by a block mask pay for a word of bits a row.  A launch without causal, window and masks has
// one step with bits at most, the last.
//
// Thread: any, all state is the caller's.
#include "attention/cpu/attn_cpu_step.h"

#include "attention/cpu/attn_cpu_task.h"

// fill_bits fills row_bits for the keys that live says, and returns their union.
static uint64_t fill_bits(attn_cpu_step *step, const attn_params *p, const attn_task *t,
                          uint64_t live) {
    const attn_row *row = &p->rows[t->row];
    int32_t group = attn_group(&p->shape);
    int32_t token = -1;
    uint64_t bits = 0;
    uint64_t seen = 0;
    for (int32_t r = 0; r < t->q_count; r++) {
        int32_t row_token = (t->q_first + r) / group;
        if (row_token != token) {
            token = row_token;
            bits = live & attn_mask_bits(row, token, step->key_first, ATTN_STEP_KEYS);
            seen |= bits;
        }
        step->row_bits[r] = bits;
    }
    return seen;
}

static int32_t lowest_bit(int32_t x) {
    return x & -x;
}

// fill_rows fills k, v and run of the seen keys, run by run of a block.
static void fill_rows(attn_cpu_step *step, const attn_params *p, const attn_task *t) {
    const attn_shape *s = &p->shape;
    const attn_row *row = &p->rows[t->row];
    int64_t element = attnd_dtype_bytes(s->kv_dtype);
    int64_t k_bytes = s->stride_k_token * element;
    int64_t v_bytes = s->stride_v_token * element;
    step->run = lowest_bit(ATTN_STEP_KEYS | s->block_tokens | step->key_first);
    int32_t first = __builtin_ctzll(step->seen);
    int32_t end = ATTN_STEP_KEYS - __builtin_clzll(step->seen);
    for (int32_t b = first; b < end;) {
        int32_t count = attn_run_keys(s, step->key_first + b, step->key_first + end);
        if (step->seen >> b & attn_bits_below(count)) {
            const char *k = attn_k_at(p, row, 0, step->key_first + b);
            const char *v = attn_v_at(p, row, 0, step->key_first + b);
            for (int32_t i = 0; i < count; i++) {
                step->k[b + i] = k + i * k_bytes;
                step->v[b + i] = v + i * v_bytes;
            }
        }
        b += count;
    }
    for (uint64_t hidden = ~step->seen; hidden; hidden &= hidden - 1) {
        int32_t b = __builtin_ctzll(hidden);
        step->k[b] = step->k[first];
        step->v[b] = step->v[first];
    }
}

int32_t attn_cpu_step_next(attn_cpu_step *step, const attn_params *p, const attn_task *t,
                           attn_span span, int32_t key) {
    const attn_row *row = &p->rows[t->row];
    int32_t group = attn_group(&p->shape);
    int32_t token_first = t->q_first / group;
    int32_t token_last = (t->q_first + t->q_count - 1) / group;
    for (; key < span.end; key += ATTN_STEP_KEYS) {
        uint64_t live = attn_bits_below(t->key_end - key < ATTN_STEP_KEYS ? t->key_end - key : 64);
        if (row->block_mask) {
            live &= attn_mask_block_bits(row, p->shape.block_tokens, token_first, key, 64);
        }
        step->key_first = key;
        step->full =
            ~live == 0 && attn_mask_is_full(row, token_first, token_last, key, ATTN_STEP_KEYS);
        step->seen = step->full ? live : fill_bits(step, p, t, live);
        if (step->seen) {
            fill_rows(step, p, t);
            return key + ATTN_STEP_KEYS;
        }
    }
    step->seen = 0;
    return key;
}
