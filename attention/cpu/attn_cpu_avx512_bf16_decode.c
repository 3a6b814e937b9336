// attn_cpu_avx512_bf16_decode.c is decode of bf16 with scores by the dot product of bf16 pairs
// (attn_cpu_simd_bf16_avx512.h), on top of attn_cpu_avx512_bf16.c.  Weights times V stay in
// float32: rounding weights to bf16 would cost accuracy.
//
// Thread: any.
#include "attention/cpu/attn_cpu_vec_avx512.h"

#define SIMD_PRODUCT     vec_fma
#define SIMD_BF16_HEADER "attention/cpu/attn_cpu_simd_bf16_avx512.h"
#include "attention/cpu/attn_cpu_simd.h"

static void stream_bf16(simd_work *w, int32_t current) {
    stream_heads(w, current, ATTND_BF16, 1);
}
static void packed_bf16(simd_work *w, const attn_cpu_step *step, simd_head *head) {
    packed_head(w, step, head, ATTND_BF16);
}
static const simd_form form_bf16 = {SIMD_SPLIT, NULL, packed_bf16, NULL};
static const simd_form form_pairs = {SIMD_SPLIT, stream_bf16, NULL, pair_split};

// decode_bf16 multiplies pairs where the form is that of streams.
static void decode_bf16(const attn_params *p, const attn_task *t, const attn_state *out,
                        void *scratch) {
    bool streams = p->rows[t->row].q_len * attn_group(&p->shape) <= SIMD_STREAM_ROWS;
    simd_attend(p, t, out, scratch, streams ? &form_pairs : &form_bf16, streams);
}

void attn_cpu_avx512_bf16_decode_init(attn_cpu_ops *ops) {
    ops->decode[ATTND_BF16] =
        (attn_cpu_kernel){decode_bf16, "cpu_avx512_bf16dot_decode", SIMD_DECODE_ROWS};
}
