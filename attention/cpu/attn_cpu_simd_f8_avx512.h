// attn_cpu_simd_f8_avx512 is the stream form's products with F8E4M3 for AVX-512 with VBMI and the
// dot product of bf16 pairs.  Every F8E4M3 is a bf16: two tables of 128 bytes give its bytes for 64
// elements at once, which costs 5 instructions.  Scores multiply those by Q in bf16
// (simd_score.pairs) two columns a lane; where Q has another type, and for V, a shift and a mask
// more make floats of them.  As everywhere, the values are 2^-8 of what is meant.
//
// Included by attn_cpu_simd_stream.h in place of its own dots_quad and weigh_f8.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_F8_AVX512_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_F8_AVX512_H

// F8_BF16 is 2^-8 of the F8E4M3 of bits x in [0, 127] as bf16.
#define F8_BF16(x)                                    \
    ((x) == 127 ? 0x7fc0                              \
     : (x) >= 8 ? ((x) / 8 + 112) << 7 | (x) % 8 << 4 \
     : (x) >= 4 ? 112 << 7 | (x) % 4 << 5             \
     : (x) >= 2 ? 111 << 7 | (x) % 2 << 6             \
                : (x)*110 << 7)
#define F8_LOW(x)   F8_BF16(x) & 0xff
#define F8_HIGH(x)  F8_BF16(x) >> 8
#define F8_4(f, x)  f(x), f(x + 1), f(x + 2), f(x + 3)
#define F8_16(f, x) F8_4(f, x), F8_4(f, x + 4), F8_4(f, x + 8), F8_4(f, x + 12)
#define F8_64(f, x) F8_16(f, x), F8_16(f, x + 16), F8_16(f, x + 32), F8_16(f, x + 48)

// load_f8 loads n <= SIMD_QUAD elements, zeros behind them.
static inline __m512i load_f8(const char *x, int32_t n) {
    return n == SIMD_QUAD ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi8((1ull << n) - 1, x);
}

// bf16_of_f8 turns 64 elements into bf16: *a has the first 8 of each 16, *b the others.
static inline void bf16_of_f8(__m512i x, __m512i *a, __m512i *b) {
    static const _Alignas(64) uint8_t low[128] = {F8_64(F8_LOW, 0), F8_64(F8_LOW, 64)};
    static const _Alignas(64) uint8_t high[128] = {F8_64(F8_HIGH, 0), F8_64(F8_HIGH, 64)};
    __m512i l = _mm512_permutex2var_epi8(_mm512_load_si512(low), x, _mm512_load_si512(low + 64));
    __m512i h = _mm512_permutex2var_epi8(_mm512_load_si512(high), x, _mm512_load_si512(high + 64));
    h = _mm512_ternarylogic_epi32(h, x, _mm512_set1_epi8((char)0x80), 0xf8); // h | (x & 0x80)
    *a = _mm512_unpacklo_epi8(l, h);
    *b = _mm512_unpackhi_epi8(l, h);
}

// floats_of_f8 turns 64 elements into floats in the order SIMD_QUADS.
static inline void floats_of_f8(__m512i x, vec to[4]) {
    static const _Alignas(64) uint8_t order[64] = {
#define F8_PICK(i)                                                                            \
    8 * (i), 32 + 8 * (i), 8 * (i) + 2, 34 + 8 * (i), 8 * (i) + 4, 36 + 8 * (i), 8 * (i) + 6, \
        38 + 8 * (i), 8 * (i) + 1, 33 + 8 * (i), 8 * (i) + 3, 35 + 8 * (i), 8 * (i) + 5,      \
        37 + 8 * (i), 8 * (i) + 7, 39 + 8 * (i)
        F8_PICK(0), F8_PICK(1), F8_PICK(2), F8_PICK(3)};
    __m512i a, b;
    bf16_of_f8(_mm512_permutexvar_epi8(_mm512_load_si512(order), x), &a, &b);
    pair_of_bf16(a, &to[0], &to[1]);
    pair_of_bf16(b, &to[2], &to[3]);
}

// pair_quads brings quads of rows of q from the order SIMD_QUADS to bf16 as bf16_of_f8 has them, in
// place: two vectors at the first half of the place of four.
static inline void pair_quads(float *x, int64_t stride, int32_t rows, int32_t columns) {
    const __m512i pick =
        _mm512_set_epi16(59, 27, 58, 26, 57, 25, 56, 24, 51, 19, 50, 18, 49, 17, 48, 16, 43, 11, 42,
                         10, 41, 9, 40, 8, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i more = _mm512_set1_epi16(4);
    for (int32_t r = 0; r < rows; r++, x += stride) {
        for (int32_t c = 0; c < columns; c += SIMD_QUAD) {
            const float *q = x + c;
            __m512i even = (__m512i)_mm512_cvtne2ps_pbh(vec_load(q + 16), vec_load(q));
            __m512i odd = (__m512i)_mm512_cvtne2ps_pbh(vec_load(q + 48), vec_load(q + 32));
            __m512i a = _mm512_permutex2var_epi16(even, pick, odd);
            __m512i b = _mm512_permutex2var_epi16(even, _mm512_add_epi16(pick, more), odd);
            vec_store(x + c / 2, (vec)a);
            vec_store(x + c / 2 + VEC_LANES, (vec)b);
        }
    }
}

// dots_quad: see attn_cpu_simd_stream.h.
SIMD_INLINE void dots_quad(vec sum[VEC_DOTS], const simd_score *x, const simd_rows *k,
                           simd_ahead *ahead, int32_t key, int32_t c, int32_t n, int num_rows) {
    const int num_keys = VEC_DOTS / num_rows;
    const char *const *rows = k->row + key;
    const int64_t at = k->offset + c;
    if (x->pairs) {
        __m512bh qa[4], qb[4];
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            qa[r] = (__m512bh)vec_load(x->q + r * x->stride_q + c / 2);
            qb[r] = (__m512bh)vec_load(x->q + r * x->stride_q + c / 2 + VEC_LANES);
        }
#pragma GCC unroll 16
        for (int j = 0; j < num_keys; j++) {
            __m512i a, b;
            fetch_ahead(ahead, SIMD_QUAD);
            bf16_of_f8(load_f8(rows[j] + at, n), &a, &b);
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                vec *to = &sum[r * num_keys + j];
                *to = _mm512_dpbf16_ps(*to, (__m512bh)a, qa[r]);
                *to = _mm512_dpbf16_ps(*to, (__m512bh)b, qb[r]);
            }
        }
        return;
    }
#pragma GCC unroll 16
    for (int j = 0; j < num_keys; j++) {
        vec y[4];
        fetch_ahead(ahead, SIMD_QUAD);
        floats_of_f8(load_f8(rows[j] + at, n), y);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            const float *q = x->q + r * x->stride_q + c;
            vec *to = &sum[r * num_keys + j];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                *to = vec_fma(y[i], vec_load(q + i * VEC_LANES), *to);
            }
        }
    }
}

// weigh_quads works on num_quads quads of columns from column c on, the last of columns columns.
SIMD_INLINE void weigh_quads(const simd_weigh *x, const simd_rows *v, simd_ahead *rest, int32_t c,
                             int32_t columns, int num_rows, int num_quads) {
    const int num_vecs = num_quads * 4;
    vec sum[VEC_SUM_VECS];
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * num_vecs; i++) {
        sum[i] = vec_zero();
    }
    simd_ahead ahead = *rest; // stays in registers
    for (int32_t key = x->first; key < x->end; key++) {
        const char *row = v->row[key] + v->offset + c;
#pragma GCC unroll 2
        for (int i = 0; i < num_quads; i++) {
            vec y[4];
            fetch_ahead(&ahead, SIMD_QUAD);
            floats_of_f8(load_f8(row + i * SIMD_QUAD, columns), y);
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                vec weight = vec_set1(x->weights[r * ATTN_STEP_KEYS + key]);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    vec *to = &sum[r * num_vecs + i * 4 + j];
                    *to = vec_fma(weight, y[j], *to);
                }
            }
        }
    }
    *rest = ahead;
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * num_vecs; i++) {
        int r = i / num_vecs;
        float *to = x->acc + r * x->stride_acc + c + i % num_vecs * VEC_LANES;
        vec_store(to, vec_fma(vec_load(to), vec_set1(x->rescale[r]), sum[i]));
    }
}

// weigh_f8: see attn_cpu_simd_stream.h.
SIMD_INLINE void weigh_f8(const simd_weigh *x, const simd_rows *v, simd_ahead *ahead,
                          int32_t v_head_dim, int num_rows) {
    int32_t c = 0;
    for (; num_rows <= 2 && c + 2 * SIMD_QUAD <= v_head_dim; c += 2 * SIMD_QUAD) {
        weigh_quads(x, v, ahead, c, SIMD_QUAD, num_rows, 2);
    }
    for (; c + SIMD_QUAD <= v_head_dim; c += SIMD_QUAD) {
        weigh_quads(x, v, ahead, c, SIMD_QUAD, num_rows, 1);
    }
    if (c < v_head_dim) {
        weigh_quads(x, v, ahead, c, v_head_dim - c, num_rows, 1);
    }
}

#endif
