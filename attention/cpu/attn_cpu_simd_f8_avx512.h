// attn_cpu_simd_f8_avx512 is the stream form's products with F8E4M3 for AVX-512 with VBMI and the
// dot product of bf16 pairs.  Every F8E4M3 is a bf16: two tables of 128 bytes give its bytes for 64
// elements at once, which costs 5 instructions.  As everywhere, they are 2^-8 of what is meant.
//
//     scores:  words of two keys are mixed, then widened: lanes have two columns, every other lane
//              another key, so that only 8 lanes of a sum are to be added up
//     weights: bytes of two keys are mixed, then widened: lanes have both keys of one column
//
// Q and the weights are sums of terms of bf16: one where Q is bf16, by which the plain
// implementation rounds too that the accuracy bound comes from, else two, which hold 16 bits.
//
// Included by attn_cpu_simd_stream.h in place of its own scores_f8 and weigh_f8.
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

// low_terms returns what rounding x to bf16 leaves.
static inline vec low_terms(vec x) {
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
    return vec_sub(x, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
}

// two_of_each returns 8 pairs, each twice.
static inline __m512i two_of_each(__m256i pairs) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(pairs));
}

// pair_term brings rows of q from the order SIMD_FOURS to pairs of bf16, each twice, in place.
static inline void pair_term(float *x, int64_t stride, int32_t rows, int32_t columns) {
    for (int32_t r = 0; r < rows; r++, x += stride) {
        for (int32_t c = 0; c < columns; c += VEC_LANES) {
            __m256i pairs = (__m256i)_mm512_cvtneps_pbh(vec_load(x + c));
            _mm512_storeu_si512(x + c, two_of_each(pairs));
        }
    }
}

// pair_terms brings them to two terms, 8 pairs of the first beside 8 of the second.
static inline void pair_terms(float *x, int64_t stride, int32_t rows, int32_t columns) {
    for (int32_t r = 0; r < rows; r++, x += stride) {
        for (int32_t c = 0; c < columns; c += VEC_LANES) {
            vec q = vec_load(x + c);
            _mm512_storeu_si512(x + c, (__m512i)_mm512_cvtne2ps_pbh(low_terms(q), q));
        }
    }
}

// load_term loads what pair_term or pair_terms wrote of one term.
SIMD_INLINE __m512bh load_term(const float *q, int term, int terms) {
    return (__m512bh)(terms == 1 ? _mm512_loadu_si512(q)
                                 : two_of_each(_mm256_loadu_si256((const __m256i *)q + term)));
}

// place_of returns where the sums of a pair of keys go.
SIMD_INLINE float *place_of(float *s, int sum, int num_pairs) {
    return s + sum / num_pairs * ATTN_STEP_KEYS + sum % num_pairs * 2;
}

// store_dots adds up sums, ordered [num_rows, pairs of keys], over the lanes of each key: the even
// ones are the first key of a pair.
SIMD_INLINE void store_dots(const vec x[VEC_DOTS], int num_rows, float *s) {
    const int num_pairs = VEC_DOTS / num_rows;
    vec h[8], q[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        h[i] = fold_halves(x[i], x[i + 8]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        q[i] = fold_quarters(h[i], h[i + 4]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) { // lane l of 128 bits has sums 4 l + i and the next
        vec two = fold_pairs(q[i], q[i + 1]);
        _mm_storeu_ps(place_of(s, i, num_pairs), _mm512_castps512_ps128(two));
        _mm_storeu_ps(place_of(s, 4 + i, num_pairs), _mm512_extractf32x4_ps(two, 1));
        _mm_storeu_ps(place_of(s, 8 + i, num_pairs), _mm512_extractf32x4_ps(two, 2));
        _mm_storeu_ps(place_of(s, 12 + i, num_pairs), _mm512_extractf32x4_ps(two, 3));
    }
}

// dots_f8 adds the products of a quad of columns from c on, n of them, to the sums of num_rows rows
// and VEC_DOTS / num_rows pairs of keys from key on.
SIMD_INLINE void dots_f8(vec sum[VEC_DOTS], const simd_score *x, const simd_rows *k,
                         simd_ahead *ahead, int32_t key, int32_t c, int32_t n, int num_rows) {
    const int num_pairs = VEC_DOTS / num_rows;
    const char *const *rows = k->row + key;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        // Without this, K stays in registers from one half to the next and sums are spilled.
        int64_t at = k->offset + c;
        __asm__("" : "+r"(at));
        __m512bh q[2 * 4][2];
#pragma GCC unroll 8
        for (int i = 0; i < x->terms * num_rows; i++) {
            const float *from = x->q + i % num_rows * x->stride_q + c + half * SIMD_PAIR;
            q[i][0] = load_term(from, i / num_rows, x->terms);
            q[i][1] = load_term(from + VEC_LANES, i / num_rows, x->terms);
        }
#pragma GCC unroll 16
        for (int j = 0; j < num_pairs; j++) {
            __m512i one = load_f8(rows[2 * j] + at, n);
            __m512i two = load_f8(rows[2 * j + 1] + at, n);
            __m512i a, b;
            fetch_ahead(ahead, SIMD_QUAD);
            bf16_of_f8(half ? _mm512_unpackhi_epi16(one, two) : _mm512_unpacklo_epi16(one, two), &a,
                       &b);
#pragma GCC unroll 8
            for (int i = 0; i < x->terms * num_rows; i++) {
                vec *to = &sum[i % num_rows * num_pairs + j];
                *to = _mm512_dpbf16_ps(*to, (__m512bh)a, q[i][0]);
                *to = _mm512_dpbf16_ps(*to, (__m512bh)b, q[i][1]);
            }
        }
    }
}

// scores_f8: see attn_cpu_simd_stream.h.
SIMD_INLINE void scores_f8(const simd_score *x, const simd_rows *k, simd_ahead *ahead,
                           int32_t first, int32_t end, int32_t head_dim, int num_rows) {
    const int num_keys = 2 * VEC_DOTS / num_rows;
    for (int32_t key = first - first % num_keys; key < end; key += num_keys) {
        vec sum[VEC_DOTS];
#pragma GCC unroll 16
        for (int i = 0; i < VEC_DOTS; i++) {
            sum[i] = vec_zero();
        }
        int32_t c = 0;
        for (; c + SIMD_QUAD <= head_dim; c += SIMD_QUAD) {
            dots_f8(sum, x, k, ahead, key, c, SIMD_QUAD, num_rows);
        }
        if (c < head_dim) {
            dots_f8(sum, x, k, ahead, key, c, head_dim - c, num_rows);
        }
        store_dots(sum, num_rows, x->s + key);
    }
}

// simd_pairs is the weights of a row in pairs of keys, by term, and by what a product with them is
// to be multiplied so that their sum is as it was before they were rounded: one key alone comes out
// exactly.
typedef struct simd_pairs {
    _Alignas(SIMD_LINE) int32_t term[2][ATTN_STEP_KEYS / 2];
    float repair;
} simd_pairs;

// pair_weights rounds a row of weights to pairs.
static inline void pair_weights(simd_pairs *to, const float *weights, int terms) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    vec sum = vec_zero();
    vec rounded = vec_zero();
    for (int32_t i = 0; i < ATTN_STEP_KEYS; i += SIMD_PAIR) {
        vec a = vec_load(weights + i);
        vec b = vec_load(weights + i + VEC_LANES);
        sum = vec_add(sum, vec_add(a, b));
        for (int t = 0; t < terms; t++) {
            __m512bh pairs = _mm512_cvtne2ps_pbh(b, a);
            rounded = _mm512_dpbf16_ps(rounded, pairs, ones);
            _mm512_store_si512(&to->term[t][i / 2], (__m512i)pairs);
            a = low_terms(a);
            b = low_terms(b);
        }
    }
    float whole = vec_hsum(rounded);
    to->repair = vec_hsum(sum) / (whole < FLT_MIN ? FLT_MIN : whole); // 0 where all are
}

// weigh_quads works on num_quads quads of columns from column c on, the last of columns columns.
SIMD_INLINE void weigh_quads(const simd_weigh *x, const simd_pairs *pairs, const simd_rows *v,
                             simd_ahead *rest, int32_t c, int32_t columns, int num_rows,
                             int num_quads) {
    const int num_vecs = num_quads * 4;
    vec sum[VEC_SUM_VECS];
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * num_vecs; i++) {
        sum[i] = vec_zero();
    }
    simd_ahead ahead = *rest; // stays in registers
    for (int32_t key = x->first / 2 * 2; key < x->end; key += 2) {
        __m512bh weight[2 * 4];
#pragma GCC unroll 8
        for (int i = 0; i < x->terms * num_rows; i++) {
            int32_t pair = pairs[i % num_rows].term[i / num_rows][key / 2];
            weight[i] = (__m512bh)_mm512_set1_epi32(pair);
        }
#pragma GCC unroll 2
        for (int q = 0; q < num_quads; q++) {
            const int64_t at = v->offset + c + q * SIMD_QUAD;
            fetch_ahead(&ahead, SIMD_QUAD);
            fetch_ahead(&ahead, SIMD_QUAD);
            __m512i one = load_f8(v->row[key] + at, columns);
            __m512i two = load_f8(v->row[key + 1] + at, columns);
            __m512i y[4]; // columns in the order SIMD_FOURS
            bf16_of_f8(_mm512_unpacklo_epi8(one, two), &y[0], &y[1]);
            bf16_of_f8(_mm512_unpackhi_epi8(one, two), &y[2], &y[3]);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
#pragma GCC unroll 8
                for (int i = 0; i < x->terms * num_rows; i++) {
                    vec *to = &sum[i % num_rows * num_vecs + q * 4 + j];
                    *to = _mm512_dpbf16_ps(*to, (__m512bh)y[j], weight[i]);
                }
            }
        }
    }
    *rest = ahead;
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * num_vecs; i++) {
        int r = i / num_vecs;
        float *to = x->acc + r * x->stride_acc + c + i % num_vecs * VEC_LANES;
        vec product = vec_mul(sum[i], vec_set1(pairs[r].repair));
        vec_store(to, vec_fma(vec_load(to), vec_set1(x->rescale[r]), product));
    }
}

// weigh_f8: see attn_cpu_simd_stream.h.
SIMD_INLINE void weigh_f8(const simd_weigh *x, const simd_rows *v, simd_ahead *ahead,
                          int32_t v_head_dim, int num_rows) {
    simd_pairs pairs[4];
    for (int r = 0; r < num_rows; r++) {
        pair_weights(&pairs[r], x->weights + r * ATTN_STEP_KEYS, x->terms);
    }
    int32_t c = 0;
    for (; num_rows <= 2 && c + 2 * SIMD_QUAD <= v_head_dim; c += 2 * SIMD_QUAD) {
        weigh_quads(x, pairs, v, ahead, c, SIMD_QUAD, num_rows, 2);
    }
    for (; c + SIMD_QUAD <= v_head_dim; c += SIMD_QUAD) {
        weigh_quads(x, pairs, v, ahead, c, SIMD_QUAD, num_rows, 1);
    }
    if (c < v_head_dim) {
        weigh_quads(x, pairs, v, ahead, c, v_head_dim - c, num_rows, 1);
    }
}

#endif
