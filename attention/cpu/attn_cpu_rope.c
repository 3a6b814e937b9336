// RoPE and the reading of Q, the same for all instruction sets.  Plain C.
//
// Angles reach 10^5 and more, so float32 products would be off by 10^-2.  They are formed and
// reduced to [-pi/4, pi/4] in float64, where sine and cosine are short polynomials; no table bounds
// the position, and a loop without calls or branches is what the compiler can vectorise.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "attention/cpu/attn_cpu_convert.h"
#include "attention/cpu/attn_cpu_task.h"

// Adding and taking away 1.5 * 2^52 rounds a double to an integer, whose low bits stand in the low
// bits of the sum.
#define ROUND_MAGIC 0x1.8p52
// pi / 2 in two parts, the first with 33 bits, so that its product with an integer of 20 bits is
// exact.
#define HALF_PI_HIGH 1.57079632673412561417e+00
#define HALF_PI_LOW  6.07710050650619224932e-11

// sine_cosine: Taylor to x^11 and x^12; at pi/4 what is left out is below 10^-11.
static inline void sine_cosine(double angle, double *sine, double *cosine) {
    double shifted = angle * (2 / 3.14159265358979323846) + ROUND_MAGIC;
    double turns = shifted - ROUND_MAGIC;
    uint64_t quadrant;
    memcpy(&quadrant, &shifted, sizeof(quadrant));
    double x = (angle - turns * HALF_PI_HIGH) - turns * HALF_PI_LOW;
    double z = x * x;
    double s =
        x + x * z *
                (-1.0 / 6 +
                 z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800)))));
    double c =
        1 + z * (-1.0 / 2 + z * (1.0 / 24 + z * (-1.0 / 720 +
                                                 z * (1.0 / 40320 + z * (-1.0 / 3628800 +
                                                                         z * (1.0 / 479001600))))));
    double sine_abs = quadrant & 1 ? c : s;
    double cosine_abs = quadrant & 1 ? s : c;
    *sine = quadrant & 2 ? -sine_abs : sine_abs;
    *cosine = (quadrant + 1) & 2 ? -cosine_abs : cosine_abs;
}

void attn_cpu_rope_angles(const attn_rope *rope, int32_t position, double *cos_sin) {
    int32_t half = rope->rotary_dim / 2;
    double factor = (double)rope->attention_factor;
    for (int32_t i = 0; i < half; i++) {
        double sine = 0;
        double cosine = 0;
        sine_cosine((double)position * (double)rope->inv_freq[i], &sine, &cosine);
        cos_sin[i] = cosine * factor;
        cos_sin[half + i] = sine * factor;
    }
}

void attn_cpu_rope_apply(const attn_rope *rope, const double *cos_sin, float *x) {
    ptrdiff_t half = rope->rotary_dim / 2;
    ptrdiff_t step = rope->interleaved ? 2 : 1;
    float *pair = rope->interleaved ? x + 1 : x + half;
    for (ptrdiff_t i = 0; i < half; i++) {
        double a = (double)x[i * step];
        double b = (double)pair[i * step];
        x[i * step] = (float)(a * cos_sin[i] - b * cos_sin[half + i]);
        pair[i * step] = (float)(b * cos_sin[i] + a * cos_sin[half + i]);
    }
}

void attn_cpu_load_q(const attn_params *p, const attn_task *t, float *q) {
    const attn_shape *s = &p->shape;
    const attn_row *row = &p->rows[t->row];
    int32_t group = attn_group(s);
    int32_t last_token = -1;
    double cos_sin[ATTN_MAX_HEAD_DIM] = {0};
    for (int32_t r = t->q_first; r < t->q_first + t->q_count; r++) {
        int32_t token = r / group;
        if (row->rope && token != last_token) {
            int32_t position =
                row->q_positions ? row->q_positions[token] : row->kv_len - row->q_len + token;
            attn_cpu_rope_angles(row->rope, position, cos_sin);
            last_token = token;
        }
        for (int32_t h = 0; h < t->head_count; h++) {
            int64_t head = (int64_t)(t->head_first + h) * group + r % group;
            int64_t from = token * row->stride_q_token + head * row->stride_q_head;
            float *to = q + ((int64_t)h * t->q_count + r - t->q_first) * s->head_dim;
            attn_to_f32(to, (const char *)row->q + from * attnd_dtype_bytes(s->q_dtype), s->q_dtype,
                        s->head_dim);
            if (row->rope) {
                attn_cpu_rope_apply(row->rope, cos_sin, to);
            }
        }
    }
}
