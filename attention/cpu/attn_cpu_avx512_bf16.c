// attn_cpu_avx512_bf16.c is what AVX-512's dot product of bf16 pairs (vdpbf16ps) does better than
// the kernels of attn_cpu_avx512.c, which stand for all the rest: prefill of bf16.  Both products
// multiply two elements a lane: scores pairs of columns, weights times V pairs of keys.  The
// products of bf16 are exact in float32, sums are float32; Q after RoPE and the weights are rounded
// to bf16 as the plain implementation does that the accuracy bound comes from.
//
// attn_cpu_avx512_bf16_decode.c has decode.
//
// Thread: any.
#include "attention/cpu/attn_cpu_vec_avx512.h"

// dot_product adds the products of both elements of each pair to sum.
static inline vec dot_product(vec a, vec b, vec sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

#define SIMD_PRODUCT dot_product
#include "attention/cpu/attn_cpu_simd.h"

// pair_rows: see simd_form.pair.
static void pair_rows(float *x, int64_t stride, int32_t rows, int32_t columns) {
    for (int32_t r = 0; r < rows; r++, x += stride) {
        for (int32_t c = 0; c < columns; c += SIMD_PAIR) {
            __m512bh pairs = _mm512_cvtne2ps_pbh(vec_load(x + c + VEC_LANES), vec_load(x + c));
            vec_store(x + c / 2, (vec)pairs);
        }
    }
}

// load_bf16 loads n <= 2 VEC_LANES elements, zeros behind them.
static inline __m512i load_bf16(const char *x, int32_t n) {
    return _mm512_maskz_loadu_epi16(n >= SIMD_PAIR ? ~0u : (1u << n) - 1, x);
}

// pair_k transposes keys [0, end) of the step, rounded up to VEC_LANES, to panel [columns / 2,
// ATTN_STEP_KEYS] of pairs of columns.
static void pair_k(float *panel, const simd_rows *k, int32_t end, int32_t head_dim) {
    for (int32_t key = 0; key < end; key += VEC_LANES) {
        for (int32_t c = 0; c < head_dim; c += SIMD_PAIR) {
            vec x[VEC_LANES];
            for (int i = 0; i < VEC_LANES; i++) {
                const char *row = k->row[key + i] + k->offset + c * (int64_t)sizeof(uint16_t);
                x[i] = (vec)load_bf16(row, head_dim - c);
            }
            vec_transpose(x);
            for (int i = 0; i < VEC_LANES; i++) {
                vec_store(panel + (c / 2 + i) * ATTN_STEP_KEYS + key, x[i]);
            }
        }
    }
}

// pair_v lays pairs of keys out as widen_v does keys: a panel is [ATTN_STEP_KEYS / 2, num columns].
static void pair_v(float *panels, const simd_rows *v, int32_t first, int32_t end,
                   int32_t v_head_dim, int32_t columns) {
    const __m512i low = _mm512_setr_epi32(
        0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007, 0x280008,
        0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(VEC_LANES));
    for (int32_t c = 0, width; c < columns; c += width) {
        width = weigh_columns(c, columns);
        for (int32_t key = first - first % 2; key < end; key += 2) {
            float *to = panels + c * ATTN_STEP_KEYS + key / 2 * width;
            for (int32_t i = 0; i < width; i += SIMD_PAIR) {
                int64_t at = v->offset + (c + i) * (int64_t)sizeof(uint16_t);
                __m512i a = load_bf16(v->row[key] + at, v_head_dim - c - i);
                __m512i b = load_bf16(v->row[key + 1] + at, v_head_dim - c - i);
                vec_store(to + i, (vec)_mm512_permutex2var_epi16(a, low, b));
                vec_store(to + i + VEC_LANES, (vec)_mm512_permutex2var_epi16(a, high, b));
            }
        }
    }
}

static void packed_pairs(simd_work *w, const attn_cpu_step *step, simd_head *head) {
    int32_t end = end_of(step->seen);
    pair_k(w->panel, &head->k, end, w->p->shape.head_dim);
    pair_v(w->v, &head->v, first_of(step->seen), end, w->p->shape.v_head_dim, w->v_columns);
    packed_tiles(w, step, head);
}

static const simd_form form_pairs = {SIMD_PLAIN, NULL, packed_pairs, pair_rows};
static void prefill_pairs(const attn_params *p, const attn_task *t, const attn_state *out,
                          void *scratch) {
    simd_attend(p, t, out, scratch, &form_pairs, false);
}

void attn_cpu_avx512_bf16_init(attn_cpu_ops *ops) {
    ops->isa = "avx512_bf16";
    ops->prefill[ATTND_BF16] =
        (attn_cpu_kernel){prefill_pairs, "cpu_avx512_bf16dot_prefill", ATTN_TASK_ROWS};
    attn_cpu_avx512_bf16_decode_init(ops);
    attn_cpu_avx512_f8_init(ops);
}
