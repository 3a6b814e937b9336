// attn_cpu_simd is the text of the SIMD attend kernels, in the names of a vector header
// (attn_cpu_vec_*.h).  Each instruction set's .c file includes its header, then this one, and makes
// its table entries of simd_attend with constants for the storage type, so that every choice by
// type is made at compile time.
//
// A task is walked step by step (64 keys), and inside a step KV head by KV head, so that a block's
// heads, which lie side by side, are read together.  Per step and head: scores, softmax step,
// weights times V.  Two forms of the products share all the rest:
//     stream (up to 4 query rows a KV head): straight from the cache, prefetching what comes next
//     packed (more): as matrix products over a transposed copy of the step
// The form follows from q_len and the group alone, so a row's bits do not depend on its task.
//
// F8E4M3 is widened to halves of 2^-8 its value (exact, and both types' subnormals agree) in
// scratch and then goes the way of F16; 2^8 is multiplied into the logits' factor and into acc at
// the end.
//
// q and acc are kept in the pair order of the storage type (attn_cpu_vec_*.h), so that neither K
// nor V are ever shuffled.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_H

#include "attention/cpu/attn_cpu_ops.h"
#include "attention/cpu/attn_cpu_simd_finish.h"
#include "attention/cpu/attn_cpu_simd_math.h"
#include "attention/cpu/attn_cpu_simd_packed.h"
#include "attention/cpu/attn_cpu_simd_stream.h"

enum {
    SIMD_STREAM_ROWS = 4,   // most query rows a KV head of the stream form
    SIMD_DECODE_ROWS = 128, // and of a decode task, whose heads are walked together
    SIMD_QUAD = 4 * VEC_LANES,
};

// simd_work is a task under way.  It and its arrays lie in the thread's scratch.
typedef struct simd_work {
    const attn_params *p;
    const attn_task *t;
    const attn_row *row;
    int32_t rows;               // query rows of a KV head
    int32_t stride_rows;        // the same with padding
    int32_t columns, v_columns; // of q and acc: head_dim and v_head_dim with padding
    float *q;                   // [head_count, stride_rows, columns], pair order
    float *acc;                 // [head_count, stride_rows, v_columns], pair order
    float *m, *d;               // [head_count, stride_rows]
    float *slopes;              // [head_count, stride_rows] when the row has ALiBi slopes
    float *places;              // [stride_rows]: i + kv_len - q_len
    float *s;                   // [SIMD_TILE_ROWS and padding, ATTN_STEP_KEYS]
    float *panel;               // [columns, ATTN_STEP_KEYS], packed form
    float *v;                   // [ATTN_STEP_KEYS, v_columns], packed form
    uint16_t *halves;           // [ATTN_STEP_KEYS, columns or v_columns], F8E4M3
    const char **half_row;      // [ATTN_STEP_KEYS], its rows
    const float **v_row;        // [ATTN_STEP_KEYS], rows of V in float32, packed form
    attn_cpu_step step[2];      // the one under way and the next
} simd_work;

// simd_head is one KV head of a step: what the two forms of the products get.
typedef struct simd_head {
    float *q, *acc, *m, *d;
    simd_rows k, v;
    simd_logits logits;
} simd_head;

// carve takes bytes of the scratch, aligned.
static inline void *carve(char **scratch, int64_t bytes) {
    void *x = *scratch;
    *scratch += (bytes + ATTN_CPU_ALIGN - 1) / ATTN_CPU_ALIGN * ATTN_CPU_ALIGN;
    return x;
}

static inline int32_t round_up(int32_t x, int32_t unit) {
    return (x + unit - 1) / unit * unit;
}

static inline simd_work *work_init(const attn_params *p, const attn_task *t, void *scratch,
                                   attnd_dtype dtype) {
    char *at = scratch;
    simd_work *w = carve(&at, sizeof(*w));
    int32_t unit = dtype == ATTND_F8E4M3 ? SIMD_QUAD : SIMD_PAIR;
    w->p = p;
    w->t = t;
    w->row = &p->rows[t->row];
    w->rows = t->q_count;
    w->stride_rows = w->rows / SIMD_TILE_ROWS * SIMD_TILE_ROWS; // tiles do not cross these
    while (w->stride_rows < w->rows) {
        w->stride_rows += tile_rows(w->rows - w->stride_rows);
    }
    w->columns = round_up(p->shape.head_dim, unit);
    w->v_columns = round_up(p->shape.v_head_dim, unit);
    int64_t states = (int64_t)t->head_count * w->stride_rows;
    const int64_t f32 = sizeof(float), pad = VEC_LANES; // vectors of states may end behind them
    w->q = carve(&at, states * w->columns * f32);
    w->acc = carve(&at, states * w->v_columns * f32);
    w->m = carve(&at, (states + pad) * f32);
    w->d = carve(&at, (states + pad) * f32);
    w->slopes = carve(&at, states * f32);
    w->places = carve(&at, w->stride_rows * f32);
    w->s = carve(&at, (SIMD_TILE_ROWS + SIMD_SHORT_ROWS) * ATTN_STEP_KEYS * f32);
    w->panel = carve(&at, w->columns * ATTN_STEP_KEYS * f32);
    w->v = carve(&at, w->v_columns * ATTN_STEP_KEYS * f32);
    int32_t widest = w->columns > w->v_columns ? w->columns : w->v_columns;
    w->halves = carve(&at, widest * ATTN_STEP_KEYS * (int64_t)sizeof(uint16_t));
    w->half_row = carve(&at, ATTN_STEP_KEYS * (int64_t)sizeof(char *));
    w->v_row = carve(&at, ATTN_STEP_KEYS * (int64_t)sizeof(float *));
    return w;
}

// order_pairs brings columns of a row from their order to the pair order of dtype.
static inline void order_pairs(float *to, const float *from, int32_t columns, attnd_dtype dtype) {
    vec a, b;
    if (dtype == ATTND_BF16) {
        for (int32_t c = 0; c < columns; c += SIMD_PAIR) {
            vec_split(vec_load(from + c), vec_load(from + c + VEC_LANES), &a, &b);
            vec_store(to + c, a);
            vec_store(to + c + VEC_LANES, b);
        }
    } else if (dtype == ATTND_F8E4M3) {
        for (int32_t c = 0; c < columns; c += SIMD_PAIR) {
            int32_t at = c / SIMD_QUAD * SIMD_QUAD + c % SIMD_QUAD / 2;
            vec_split(vec_load(from + c), vec_load(from + c + VEC_LANES), &a, &b);
            vec_store(to + at, a);
            vec_store(to + at + SIMD_PAIR, b);
        }
    } else {
        memcpy(to, from, (size_t)columns * sizeof(float));
    }
}

// restore_pairs is the inverse, times factor.
static inline void restore_pairs(float *to, const float *from, int32_t columns, attnd_dtype dtype) {
    vec a, b;
    for (int32_t c = 0; c < columns; c += SIMD_PAIR) {
        if (dtype == ATTND_BF16) {
            vec_merge(vec_load(from + c), vec_load(from + c + VEC_LANES), &a, &b);
        } else if (dtype == ATTND_F8E4M3) {
            int32_t at = c / SIMD_QUAD * SIMD_QUAD + c % SIMD_QUAD / 2;
            vec_merge(vec_load(from + at), vec_load(from + at + SIMD_PAIR), &a, &b);
            a = vec_mul(a, vec_set1(256.0f)); // of vec_f8_to_f16
            b = vec_mul(b, vec_set1(256.0f));
        } else {
            a = vec_load(from + c);
            b = vec_load(from + c + VEC_LANES);
        }
        vec_store(to + c, a);
        vec_store(to + c + VEC_LANES, b);
    }
}

// load_row converts one query row to float32, zeros behind head_dim, and rotates it.
static inline void load_row(float *to, const simd_work *w, const void *x, const double *cos_sin,
                            attnd_dtype dtype) {
    const attn_shape *s = &w->p->shape;
    int64_t bytes = VEC_LANES * (int64_t)attnd_dtype_bytes(s->q_dtype);
    float plain[ATTN_MAX_HEAD_DIM + SIMD_QUAD];
    const char *from = x;
    for (int32_t c = 0; c < w->columns; c += VEC_LANES, from += bytes) {
        int32_t n = s->head_dim - c;
        n = n < 0 ? 0 : n > VEC_LANES ? VEC_LANES : n;
        vec_store(plain + c, n ? vec_widen(from, s->q_dtype, n) : vec_zero());
    }
    if (cos_sin) {
        attn_cpu_rope_apply(w->row->rope, cos_sin, plain);
    }
    order_pairs(to, plain, w->columns, dtype);
}

// load_q fills q, slopes and places.
static inline void load_q(simd_work *w, attnd_dtype dtype) {
    const attn_row *row = w->row;
    const attn_task *t = w->t;
    int32_t group = attn_group(&w->p->shape);
    int64_t element = attnd_dtype_bytes(w->p->shape.q_dtype);
    double cos_sin[ATTN_MAX_HEAD_DIM];
    int32_t rotated = -1;
    for (int32_t r = 0; r < w->rows; r++) {
        int32_t token = (t->q_first + r) / group;
        int32_t place = row->kv_len - row->q_len + token;
        w->places[r] = (float)place;
        if (row->rope && rotated != token) {
            attn_cpu_rope_angles(row->rope, row->q_positions ? row->q_positions[token] : place,
                                 cos_sin);
            rotated = token;
        }
        for (int32_t h = 0; h < t->head_count; h++) {
            int32_t q_head = (t->head_first + h) * group + (t->q_first + r) % group;
            int64_t at = token * row->stride_q_token + q_head * row->stride_q_head;
            int64_t state = h * (int64_t)w->stride_rows + r;
            load_row(w->q + state * w->columns, w, (const char *)row->q + at * element,
                     row->rope ? cos_sin : NULL, dtype);
            w->slopes[state] = attn_logit_of(w->p, row, q_head).slope;
        }
    }
    for (int32_t h = 0; h < t->head_count; h++) {
        int64_t state = h * (int64_t)w->stride_rows + w->rows;
        memset(w->q + state * w->columns, 0,
               (size_t)(w->stride_rows - w->rows) * (size_t)w->columns * sizeof(float));
    }
}

static inline void clear_state(simd_work *w) {
    int64_t states = (int64_t)w->t->head_count * w->stride_rows;
    for (int64_t i = 0; i < states + VEC_LANES; i++) {
        w->m[i] = -INFINITY;
        w->d[i] = 0;
    }
    memset(w->acc, 0, (size_t)states * (size_t)w->v_columns * sizeof(float));
}

static inline void store_state(const simd_work *w, const attn_state *out, attnd_dtype dtype) {
    int32_t v_head_dim = w->p->shape.v_head_dim;
    float row[ATTN_MAX_HEAD_DIM + SIMD_QUAD];
    for (int32_t h = 0; h < w->t->head_count; h++) {
        for (int32_t r = 0; r < w->rows; r++) {
            int64_t from = h * (int64_t)w->stride_rows + r;
            int64_t to = h * (int64_t)w->rows + r;
            restore_pairs(row, w->acc + from * w->v_columns, w->v_columns, dtype);
            memcpy(out->acc + to * v_head_dim, row, (size_t)v_head_dim * sizeof(float));
            out->m[to] = w->m[from];
            out->d[to] = w->d[from];
        }
    }
}

// halve_rows widens rows of F8E4M3 to halves and lets *rows point to them.
static inline void halve_rows(simd_work *w, simd_rows *rows, int32_t first, int32_t end,
                              int32_t head_dim, int32_t columns) {
    for (int32_t key = first; key < end; key++) {
        uint16_t *to = w->halves + (int64_t)key * columns;
        const char *from = rows->row[key] + rows->offset;
        for (int32_t c = 0; c < head_dim; c += SIMD_QUAD) {
            int32_t n = head_dim - c < SIMD_QUAD ? head_dim - c : SIMD_QUAD;
            vec_f8_to_f16(from + c, n, to + c);
            prefetch(rows, key, c, SIMD_LINE);
        }
        w->half_row[key] = (const char *)to;
    }
    for (int32_t key = 0; key < ATTN_STEP_KEYS; key++) {
        if (key < first || key >= end) {
            w->half_row[key] = w->half_row[first];
        }
    }
    rows->row = rows->next = w->half_row;
    rows->offset = rows->next_offset = 0;
}

// stream_head is scores, softmax step and weights times V for up to 4 rows of one KV head.
SIMD_INLINE void stream_head(simd_work *w, const attn_cpu_step *step, simd_head *head,
                             attnd_dtype dtype, int num_rows) {
    const attn_shape *s = &w->p->shape;
    int32_t first = __builtin_ctzll(step->seen);
    int32_t end = ATTN_STEP_KEYS - __builtin_clzll(step->seen);
    float rescale[VEC_LANES];
    simd_tile tile = {
        .s = w->s,
        .m = head->m,
        .d = head->d,
        .rescale = rescale,
        .row_bits = step->full ? NULL : step->row_bits,
        .rows = w->rows,
        .key_first = step->key_first,
    };
    bool is_f8 = dtype == ATTND_F8E4M3;
    attnd_dtype load = is_f8 ? ATTND_F16 : dtype;
    if (is_f8) {
        halve_rows(w, &head->k, first, end, s->head_dim, w->columns);
    }
    stream_scores(w->s, head->q, w->columns, &head->k, first, end, load,
                  is_f8 ? w->columns : s->head_dim, num_rows);
    simd_softmax_step(&tile, &head->logits);
    if (is_f8) {
        halve_rows(w, &head->v, first, end, s->v_head_dim, w->v_columns);
    }
    stream_weigh(head->acc, w->v_columns, w->s, rescale, &head->v, first, end, load,
                 is_f8 ? w->v_columns : s->v_head_dim, num_rows);
}

// tile_keys returns the keys of the step that rows [r, r + count) see together.
static inline uint64_t tile_keys(const simd_work *w, const attn_cpu_step *step, int32_t r,
                                 int32_t count) {
    if (step->full) {
        return ~0ull;
    }
    uint64_t seen = 0;
    for (int32_t end = r + count < w->rows ? r + count : w->rows; r < end; r++) {
        seen |= step->row_bits[r];
    }
    return seen;
}

// packed_rows is scores, softmax step and weights times V for rows [row_first, row_first + rows) of
// one KV head, whose K and V are packed.
static inline void packed_rows(simd_work *w, const attn_cpu_step *step, const simd_head *head,
                               int32_t row_first, int32_t rows) {
    float rescale[SIMD_TILE_ROWS + VEC_LANES];
    float *q = head->q + (int64_t)row_first * w->columns;
    float *acc = head->acc + (int64_t)row_first * w->v_columns;
    for (int32_t r = 0, n; r < rows; r += n) {
        n = tile_rows(rows - r);
        uint64_t seen = tile_keys(w, step, row_first + r, n);
        if (seen) {
            score_tile_rows(w->s + r * ATTN_STEP_KEYS, q + (int64_t)r * w->columns, w->columns,
                            w->panel, w->columns, seen, n);
        }
    }
    simd_tile tile = {
        .s = w->s,
        .m = head->m + row_first,
        .d = head->d + row_first,
        .rescale = rescale,
        .row_bits = step->full ? NULL : step->row_bits + row_first,
        .rows = rows,
        .row_first = row_first,
        .key_first = step->key_first,
    };
    simd_softmax_step(&tile, &head->logits);
    for (int32_t r = 0, n; r < rows; r += n) {
        n = tile_rows(rows - r);
        uint64_t seen = tile_keys(w, step, row_first + r, n);
        if (seen) {
            weigh_tile_rows(acc + (int64_t)r * w->v_columns, w->v_columns,
                            w->s + r * ATTN_STEP_KEYS, rescale + r, w->v_row, w->v_columns, seen,
                            n);
        }
    }
}

// packed_head packs K and V of one KV head and runs all rows over them.
SIMD_INLINE void packed_head(simd_work *w, const attn_cpu_step *step, simd_head *head,
                             attnd_dtype dtype) {
    const attn_shape *s = &w->p->shape;
    int32_t first = __builtin_ctzll(step->seen);
    int32_t end = ATTN_STEP_KEYS - __builtin_clzll(step->seen);
    bool is_f8 = dtype == ATTND_F8E4M3;
    attnd_dtype load = is_f8 ? ATTND_F16 : dtype;
    if (is_f8) {
        halve_rows(w, &head->k, first, end, s->head_dim, w->columns);
    }
    pack_k(w->panel, &head->k, end, load, is_f8 ? w->columns : s->head_dim);
    if (is_f8) {
        halve_rows(w, &head->v, first, end, s->v_head_dim, w->v_columns);
    }
    if (dtype == ATTND_F32 && w->v_columns == s->v_head_dim) {
        for (int32_t key = first; key < end; key++) {
            w->v_row[key] = (const float *)(const void *)(head->v.row[key] + head->v.offset);
        }
    } else {
        widen_v(w->v, w->v_columns, &head->v, first, end, load,
                is_f8 ? w->v_columns : s->v_head_dim);
        for (int32_t key = first; key < end; key++) {
            w->v_row[key] = w->v + (int64_t)key * w->v_columns;
        }
    }
    for (int32_t r = 0; r < w->rows; r += SIMD_TILE_ROWS) {
        int32_t left = w->rows - r;
        packed_rows(w, step, head, r, left < SIMD_TILE_ROWS ? left : SIMD_TILE_ROWS);
    }
}

// head_of fills *head for KV head h of the task.
static inline void head_of(simd_head *head, const simd_work *w, int32_t current, int32_t h,
                           attnd_dtype dtype) {
    const attn_shape *s = &w->p->shape;
    const attn_cpu_step *step = &w->step[current];
    const attn_cpu_step *next = &w->step[!current];
    int64_t state = h * (int64_t)w->stride_rows;
    int32_t kv_head = w->t->head_first + h;
    int64_t element = attnd_dtype_bytes(s->kv_dtype);
    bool last = h + 1 == w->t->head_count;
    int32_t next_head = last ? w->t->head_first : kv_head + 1;
    if (!last || !next->seen) {
        next = step;
    }
    head->q = w->q + state * w->columns;
    head->acc = w->acc + state * w->v_columns;
    head->m = w->m + state;
    head->d = w->d + state;
    head->k = (simd_rows){step->k, next->k, kv_head * s->stride_k_head * element,
                          next_head * s->stride_k_head * element};
    head->v = (simd_rows){step->v, next->v, kv_head * s->stride_v_head * element,
                          next_head * s->stride_v_head * element};
    attn_logit logit = attn_logit_of(w->p, w->row, kv_head * attn_group(s));
    float more = dtype == ATTND_F8E4M3 ? 256.0f : 1.0f; // of vec_f8_to_f16
    simd_logits_set(&head->logits, w->row, &logit, more, w->slopes + state, w->places);
}

// simd_attend is an attend kernel for one storage type.
SIMD_INLINE void simd_attend(const attn_params *p, const attn_task *t, const attn_state *out,
                             void *scratch, attnd_dtype dtype, bool may_stream) {
    simd_work *w = work_init(p, t, scratch, dtype);
    int32_t all_rows = w->row->q_len * attn_group(&p->shape);
    bool stream = may_stream && all_rows <= SIMD_STREAM_ROWS;
    load_q(w, dtype);
    clear_state(w);
    attn_span span = attn_task_span(p, t);
    int32_t current = 0;
    int32_t key = attn_cpu_step_next(&w->step[current], p, t, span, span.first);
    while (w->step[current].seen) {
        key = attn_cpu_step_next(&w->step[!current], p, t, span, key);
        for (int32_t h = 0; h < t->head_count; h++) {
            simd_head head;
            head_of(&head, w, current, h, dtype);
            if (!stream) {
                packed_head(w, &w->step[current], &head, dtype);
            } else if (w->rows == 1) {
                stream_head(w, &w->step[current], &head, dtype, 1);
            } else if (w->rows == 2) {
                stream_head(w, &w->step[current], &head, dtype, 2);
            } else {
                stream_head(w, &w->step[current], &head, dtype, 4);
            }
        }
        current = !current;
    }
    store_state(w, out, dtype);
}

static void decode_f32(const attn_params *p, const attn_task *t, const attn_state *out,
                       void *scratch) {
    simd_attend(p, t, out, scratch, ATTND_F32, true);
}
static void decode_bf16(const attn_params *p, const attn_task *t, const attn_state *out,
                        void *scratch) {
    simd_attend(p, t, out, scratch, ATTND_BF16, true);
}
static void decode_f16(const attn_params *p, const attn_task *t, const attn_state *out,
                       void *scratch) {
    simd_attend(p, t, out, scratch, ATTND_F16, true);
}
static void decode_f8(const attn_params *p, const attn_task *t, const attn_state *out,
                      void *scratch) {
    simd_attend(p, t, out, scratch, ATTND_F8E4M3, true);
}
static void prefill_f32(const attn_params *p, const attn_task *t, const attn_state *out,
                        void *scratch) {
    simd_attend(p, t, out, scratch, ATTND_F32, false);
}
static void prefill_bf16(const attn_params *p, const attn_task *t, const attn_state *out,
                         void *scratch) {
    simd_attend(p, t, out, scratch, ATTND_BF16, false);
}
static void prefill_f16(const attn_params *p, const attn_task *t, const attn_state *out,
                        void *scratch) {
    simd_attend(p, t, out, scratch, ATTND_F16, false);
}
static void prefill_f8(const attn_params *p, const attn_task *t, const attn_state *out,
                       void *scratch) {
    simd_attend(p, t, out, scratch, ATTND_F8E4M3, false);
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
