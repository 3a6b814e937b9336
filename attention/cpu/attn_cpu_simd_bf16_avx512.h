// attn_cpu_simd_bf16_avx512 is the stream form's scores with K of bf16 for AVX-512 with the dot
// product of bf16 pairs: two columns a lane, K as it lies.  It takes a quarter of the instructions
// of widening K and multiplying floats.  The products are exact; as many of them meet in a lane
// before the lanes are added up.
//
// Included by attn_cpu_simd_stream.h.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_BF16_AVX512_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_BF16_AVX512_H

// pair_split brings rows of q from the order SIMD_SPLIT to pairs of bf16 as they lie in K, in
// place: one vector at the first half of the place of two.
static inline void pair_split(float *x, int64_t stride, int32_t rows, int32_t columns) {
    for (int32_t r = 0; r < rows; r++, x += stride) {
        for (int32_t c = 0; c < columns; c += SIMD_PAIR) {
            __m256i even = (__m256i)_mm512_cvtneps_pbh(vec_load(x + c));
            __m256i odd = (__m256i)_mm512_cvtneps_pbh(vec_load(x + c + VEC_LANES));
            __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
            vec_store(x + c / 2, (vec)pairs);
        }
    }
}

// dots_bf16 makes the products of num_rows query rows and VEC_DOTS / num_rows keys from key on, to
// be added up over lanes.
SIMD_INLINE void dots_bf16(vec sum[VEC_DOTS], const simd_score *x, const simd_rows *k,
                           simd_ahead *ahead, int32_t key, int32_t head_dim, int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    for (int32_t c = 0; c < head_dim; c += SIMD_PAIR) {
        const int32_t n = head_dim - c;
        const __mmask32 bits = n >= SIMD_PAIR ? ~0u : (1u << n) - 1;
        const int64_t at = k->offset + c * (int64_t)sizeof(uint16_t);
        __m512bh q[4];
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            q[r] = (__m512bh)vec_load(x->q + r * x->stride_q + c / 2);
        }
#pragma GCC unroll 16
        for (int j = 0; j < num_keys; j++) {
            fetch_ahead(ahead, SIMD_LINE);
            __m512bh y = (__m512bh)_mm512_maskz_loadu_epi16(bits, k->row[key + j] + at);
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                vec *to = &sum[r * num_keys + j];
                *to = _mm512_dpbf16_ps(*to, y, q[r]);
            }
        }
    }
}

#endif
