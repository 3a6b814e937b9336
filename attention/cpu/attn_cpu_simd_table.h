// attn_cpu_simd_table makes a whole table of the SIMD kernels: included by the .c file of each
// instruction set that has its own version of everything.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_TABLE_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_TABLE_H

#define SIMD_PRODUCT vec_fma
#include "attention/cpu/attn_cpu_simd.h"
#include "attention/cpu/attn_cpu_simd_finish.h"

static void stream_f32(simd_work *w, int32_t current) {
    stream_heads(w, current, ATTND_F32, 0);
}
static void packed_f32(simd_work *w, const attn_cpu_step *step, simd_head *head) {
    packed_head(w, step, head, ATTND_F32);
}
static const simd_form form_f32 = {SIMD_PLAIN, stream_f32, packed_f32, NULL};
static void decode_f32(const attn_params *p, const attn_task *t, const attn_state *out,
                       void *scratch) {
    simd_attend(p, t, out, scratch, &form_f32, true);
}
static void prefill_f32(const attn_params *p, const attn_task *t, const attn_state *out,
                        void *scratch) {
    simd_attend(p, t, out, scratch, &form_f32, false);
}

static void stream_bf16(simd_work *w, int32_t current) {
    stream_heads(w, current, ATTND_BF16, 0);
}
static void packed_bf16(simd_work *w, const attn_cpu_step *step, simd_head *head) {
    packed_head(w, step, head, ATTND_BF16);
}
static const simd_form form_bf16 = {SIMD_SPLIT, stream_bf16, packed_bf16, NULL};
static void decode_bf16(const attn_params *p, const attn_task *t, const attn_state *out,
                        void *scratch) {
    simd_attend(p, t, out, scratch, &form_bf16, true);
}
static void prefill_bf16(const attn_params *p, const attn_task *t, const attn_state *out,
                         void *scratch) {
    simd_attend(p, t, out, scratch, &form_bf16, false);
}

static void stream_f16(simd_work *w, int32_t current) {
    stream_heads(w, current, ATTND_F16, 0);
}
static void packed_f16(simd_work *w, const attn_cpu_step *step, simd_head *head) {
    packed_head(w, step, head, ATTND_F16);
}
static const simd_form form_f16 = {SIMD_PLAIN, stream_f16, packed_f16, NULL};
static void decode_f16(const attn_params *p, const attn_task *t, const attn_state *out,
                       void *scratch) {
    simd_attend(p, t, out, scratch, &form_f16, true);
}
static void prefill_f16(const attn_params *p, const attn_task *t, const attn_state *out,
                        void *scratch) {
    simd_attend(p, t, out, scratch, &form_f16, false);
}

static void stream_f8(simd_work *w, int32_t current) {
    stream_heads(w, current, ATTND_F8E4M3, 0);
}
static void packed_f8(simd_work *w, const attn_cpu_step *step, simd_head *head) {
    packed_head(w, step, head, ATTND_F8E4M3);
}
static const simd_form form_f8 = {SIMD_QUADS, stream_f8, packed_f8, NULL};
static void decode_f8(const attn_params *p, const attn_task *t, const attn_state *out,
                      void *scratch) {
    simd_attend(p, t, out, scratch, &form_f8, true);
}
static void prefill_f8(const attn_params *p, const attn_task *t, const attn_state *out,
                       void *scratch) {
    simd_attend(p, t, out, scratch, &form_f8, false);
}

// SIMD_NAMES are the kernels' names by storage type.
#define SIMD_NAMES(isa, op)                                                   \
    {                                                                         \
        "cpu_" isa "_f32_" op, "cpu_" isa "_bf16_" op, "cpu_" isa "_f16_" op, \
            "cpu_" isa "_f8e4m3_" op                                          \
    }

// simd_init fills the table with the kernels of this instruction set.
static inline void simd_init(attn_cpu_ops *ops, const char *const decode[ATTND_NUM_DTYPES],
                             const char *const prefill[ATTND_NUM_DTYPES]) {
    static const attn_cpu_attend_fn decode_fn[ATTND_NUM_DTYPES] = {decode_f32, decode_bf16,
                                                                   decode_f16, decode_f8};
    static const attn_cpu_attend_fn prefill_fn[ATTND_NUM_DTYPES] = {prefill_f32, prefill_bf16,
                                                                    prefill_f16, prefill_f8};
    for (uint32_t i = 0; i < ATTND_NUM_DTYPES; i++) {
        ops->decode[i] = (attn_cpu_kernel){decode_fn[i], decode[i], SIMD_DECODE_ROWS};
        ops->prefill[i] = (attn_cpu_kernel){prefill_fn[i], prefill[i], ATTN_TASK_ROWS};
    }
    ops->merge = simd_merge;
    ops->finish = simd_finish;
}

#endif
