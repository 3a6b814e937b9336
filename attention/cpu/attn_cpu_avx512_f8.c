// attn_cpu_avx512_f8.c is decode of F8E4M3 with tables and the dot product of bf16 pairs
// (attn_cpu_simd_f8_avx512.h), on top of attn_cpu_avx512_bf16.c.
//
// Thread: any.
#include "attention/cpu/attn_cpu_vec_avx512.h"

#define SIMD_PRODUCT   vec_fma
#define SIMD_F8_HEADER "attention/cpu/attn_cpu_simd_f8_avx512.h"
#include "attention/cpu/attn_cpu_simd.h"

static void packed_f8(simd_work *w, const attn_cpu_step *step, simd_head *head) {
    packed_head(w, step, head, ATTND_F8E4M3);
}
static void stream_term(simd_work *w, int32_t current) {
    stream_heads(w, current, ATTND_F8E4M3, 1);
}
static void stream_terms(simd_work *w, int32_t current) {
    stream_heads(w, current, ATTND_F8E4M3, 2);
}
static const simd_form form_packed = {SIMD_QUADS, NULL, packed_f8, NULL};
static const simd_form form_term = {SIMD_FOURS, stream_term, NULL, pair_term};
static const simd_form form_terms = {SIMD_FOURS, stream_terms, NULL, pair_terms};

static void decode_f8(const attn_params *p, const attn_task *t, const attn_state *out,
                      void *scratch) {
    bool streams = p->rows[t->row].q_len * attn_group(&p->shape) <= SIMD_STREAM_ROWS;
    const simd_form *stream = p->shape.q_dtype == ATTND_BF16 ? &form_term : &form_terms;
    simd_attend(p, t, out, scratch, streams ? stream : &form_packed, streams);
}

void attn_cpu_avx512_f8_init(attn_cpu_ops *ops) {
    ops->decode[ATTND_F8E4M3] =
        (attn_cpu_kernel){decode_f8, "cpu_avx512_f8e4m3_vbmi_decode", SIMD_DECODE_ROWS};
}
