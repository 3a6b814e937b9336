// attn_cpu_simd is the text of the SIMD attend kernels, in the names of a vector header
// (attn_cpu_vec_*.h).  Each instruction set's .c file includes its header, then this one, and fills
// the table.  Every choice by storage type and number of rows is made at compile time, below one
// indirect call per step and KV head.
//
// A task is walked step by step (64 keys), and inside a step KV head by KV head, so that a block's
// heads, which lie side by side, are read together.  Per step and head: scores, softmax step,
// weights times V; the stream form makes the scores of all heads first.  Two forms of the products
// share all the rest:
//     stream (up to 4 query rows a KV head): straight from the cache, prefetching what comes next
//     packed (more): as matrix products over a transposed copy of the step
// The form follows from q_len and the group alone, so a row's bits do not depend on its task.
//
// F8E4M3 is widened to halves of 2^-8 its value; 2^8 is multiplied into the logits' factor and into
// acc at the end.
//
// q and acc are kept in the pair order of the storage type (attn_cpu_vec_*.h), so that neither K
// nor V are ever shuffled.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_H

#include "attention/cpu/attn_cpu_simd_work.h"

// halve_rows widens rows of F8E4M3 to halves and lets *rows point to them.
static inline void halve_rows(simd_work *w, simd_rows *rows, int32_t first, int32_t end,
                              int32_t head_dim, int32_t columns) {
    for (int32_t key = first; key < end; key++) {
        uint16_t *to = w->halves + (int64_t)key * columns;
        const char *from = rows->row[key] + rows->offset;
        for (int32_t c = 0; c < head_dim; c += SIMD_QUAD) {
            int32_t n = head_dim - c < SIMD_QUAD ? head_dim - c : SIMD_QUAD;
            vec_f8_to_f16(from + c, n, to + c);
        }
        w->half_row[key] = (const char *)to;
    }
    for (int32_t key = 0; key < ATTN_STEP_KEYS; key++) {
        if (key < first || key >= end) {
            w->half_row[key] = w->half_row[first];
        }
    }
    rows->row = w->half_row;
    rows->offset = 0;
}

// first_of and end_of are the keys of a step that bits span.
static inline int32_t first_of(uint64_t bits) {
    return __builtin_ctzll(bits);
}
static inline int32_t end_of(uint64_t bits) {
    return ATTN_STEP_KEYS - __builtin_clzll(bits);
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

// simd_part is a tile of rows of a product and the keys that they see.
typedef struct simd_part {
    int32_t row, num_rows, first, end;
} simd_part;

// cut_rows cuts rows [row_first, row_first + rows) into tiles, less those that see nothing, and
// returns their number.
static inline int32_t cut_rows(simd_part *parts, const simd_work *w, const attn_cpu_step *step,
                               int32_t row_first, int32_t rows) {
    int32_t num = 0;
    for (int32_t r = 0, n; r < rows; r += n) {
        n = tile_rows(rows - r);
        uint64_t seen = tile_keys(w, step, row_first + r, n);
        if (seen) {
            parts[num++] = (simd_part){r, n, first_of(seen), end_of(seen)};
        }
    }
    return num;
}

// packed_rows is scores, softmax step and weights times V for rows [row_first, row_first + rows) of
// one KV head, whose K and V are packed.
static inline void packed_rows(simd_work *w, const attn_cpu_step *step, const simd_head *head,
                               int32_t row_first, int32_t rows) {
    float rescale[SIMD_TILE_ROWS + VEC_LANES];
    simd_part parts[SIMD_TILE_ROWS / SIMD_SHORT_ROWS + 1];
    int32_t num_parts = cut_rows(parts, w, step, row_first, rows);
    float *q = head->q + (int64_t)row_first * w->columns;
    float *acc = head->acc + (int64_t)row_first * w->v_columns;
    const int terms = w->form->pair ? 1 : 0;
    const int32_t per_product = 1 + terms;
    int32_t products = w->columns / per_product;
    for (int32_t c = 0; c < products; c += SIMD_SUM_COLUMNS) {
        int32_t n = products - c < SIMD_SUM_COLUMNS ? products - c : SIMD_SUM_COLUMNS;
        for (int32_t i = 0; i < num_parts; i++) {
            const simd_part *x = &parts[i];
            simd_score score = {w->s + x->row * ATTN_STEP_KEYS, q + (int64_t)x->row * w->columns,
                                w->columns, terms};
            packed_scores(&score, w->panel, c, n, x->first, x->end, x->num_rows);
            if (w->loaded < w->rows) {
                fetch_q(w, w->loaded + x->row, x->num_rows, c * per_product, n * per_product);
            }
        }
    }
    simd_tile tile = {
        .s = w->s,
        .m = head->m + row_first,
        .d = head->d + row_first * VEC_LANES,
        .rescale = rescale,
        .row_bits = step->full ? NULL : step->row_bits + row_first,
        .rows = rows,
        .row_first = row_first,
        .key_first = step->key_first,
    };
    simd_softmax_step(&tile, head->logits);
    if (w->form->pair) {
        w->form->pair(w->s, ATTN_STEP_KEYS, rows, ATTN_STEP_KEYS);
    }
    for (int32_t c = 0, n; c < w->v_columns; c += n) {
        n = weigh_columns(c, w->v_columns);
        for (int32_t i = 0; i < num_parts; i++) {
            const simd_part *x = &parts[i];
            simd_weigh product = {acc + (int64_t)x->row * w->v_columns,
                                  w->v_columns,
                                  w->s + x->row * ATTN_STEP_KEYS,
                                  rescale + x->row,
                                  x->first / per_product,
                                  (x->end + per_product - 1) / per_product,
                                  terms};
            packed_weigh(&product, w->v + c * ATTN_STEP_KEYS, c, n, x->num_rows);
        }
    }
}

// packed_tiles runs all rows of one KV head over its packed K and V.  In the first step they are
// loaded on the way, a part at a time, while those of the next part are on theirs from memory.
static inline void packed_tiles(simd_work *w, const attn_cpu_step *step, const simd_head *head) {
    for (int32_t r = 0; r < w->rows; r += SIMD_TILE_ROWS) {
        int32_t left = w->rows - r;
        int32_t rows = left < SIMD_TILE_ROWS ? left : SIMD_TILE_ROWS;
        if (r == w->loaded) {
            load_q(w, rows);
        }
        packed_rows(w, step, head, r, rows);
    }
}

// packed_head packs K and V of one KV head and runs all rows over them.
SIMD_INLINE void packed_head(simd_work *w, const attn_cpu_step *step, simd_head *head,
                             attnd_dtype dtype) {
    const attn_shape *s = &w->p->shape;
    int32_t first = first_of(step->seen);
    int32_t end = end_of(step->seen);
    bool is_f8 = dtype == ATTND_F8E4M3;
    attnd_dtype load = is_f8 ? ATTND_F16 : dtype;
    if (is_f8) {
        halve_rows(w, &head->k, first, end, s->head_dim, w->columns);
    }
    pack_k(w->panel, &head->k, end, load, is_f8 ? w->columns : s->head_dim);
    if (is_f8) {
        halve_rows(w, &head->v, first, end, s->v_head_dim, w->v_columns);
    }
    widen_v(w->v, &head->v, first, end, load, is_f8 ? w->v_columns : s->v_head_dim);
    packed_tiles(w, step, head);
}

// k_rows and v_rows are K and V of a KV head of a step.
static inline simd_rows k_rows(const simd_work *w, const attn_cpu_step *step, int32_t kv_head) {
    const attn_shape *s = &w->p->shape;
    int32_t element = (int32_t)attnd_dtype_bytes(s->kv_dtype);
    return (simd_rows){step->k, kv_head * s->stride_k_head * element, s->stride_k_token * element,
                       step->run, s->head_dim * element};
}

static inline simd_rows v_rows(const simd_work *w, const attn_cpu_step *step, int32_t kv_head) {
    const attn_shape *s = &w->p->shape;
    int32_t element = (int32_t)attnd_dtype_bytes(s->kv_dtype);
    return (simd_rows){step->v, kv_head * s->stride_v_head * element, s->stride_v_token * element,
                       step->run, s->v_head_dim * element};
}

// head_of fills *head for KV head h of the task.
static inline void head_of(simd_head *head, const simd_work *w, int32_t current, int32_t h) {
    const attn_cpu_step *step = &w->step[current];
    const attn_cpu_step *next = &w->step[!current];
    int64_t state = h * (int64_t)w->stride_rows;
    int32_t kv_head = w->t->head_first + h;
    bool last = h + 1 == w->t->head_count;
    int32_t next_head = last ? w->t->head_first : kv_head + 1;
    if (!last || !next->seen) {
        next = step;
    }
    head->q = w->q + state * w->columns;
    head->acc = w->acc + state * w->v_columns;
    head->m = w->m + state;
    head->d = w->d + state * VEC_LANES;
    head->k = k_rows(w, step, kv_head);
    head->v = v_rows(w, step, kv_head);
    head->next_k = k_rows(w, next, next_head);
    head->logits = &w->logits[h];
}

// stream_softmax is the softmax step of up to 4 rows of one KV head.
static inline void stream_softmax(simd_work *w, const attn_cpu_step *step, const simd_head *head,
                                  float *scores, float *rescale) {
    simd_tile tile = {
        .s = scores,
        .m = head->m,
        .d = head->d,
        .rescale = rescale,
        .row_bits = step->full ? NULL : step->row_bits,
        .rows = w->rows,
        .key_first = step->key_first,
    };
    simd_softmax_step(&tile, head->logits);
}

// stream_rows is scores, softmax step and weights times V for up to 4 rows of each KV head.  K of
// all heads passes before V of all heads: that is how they lie in a block.  terms: see simd_score.
SIMD_INLINE void stream_rows(simd_work *w, int32_t current, attnd_dtype dtype, int terms,
                             int num_rows) {
    const attn_shape *s = &w->p->shape;
    const attn_cpu_step *step = &w->step[current];
    int32_t first = first_of(step->seen);
    int32_t end = end_of(step->seen);
    simd_head head;
    for (int32_t h = 0; h < w->t->head_count; h++) {
        float *scores = w->s + (int64_t)h * num_rows * ATTN_STEP_KEYS;
        bool last = h + 1 == w->t->head_count;
        head_of(&head, w, current, h);
        simd_score score = {scores, head.q, w->columns, terms};
        simd_rows next = last ? v_rows(w, step, w->t->head_first) : head.next_k;
        stream_scores(&score, &head.k, &next, first, end, dtype, s->head_dim, num_rows);
    }
    for (int32_t h = 0; h < w->t->head_count; h++) {
        float *scores = w->s + (int64_t)h * num_rows * ATTN_STEP_KEYS;
        float rescale[VEC_LANES];
        bool last = h + 1 == w->t->head_count;
        head_of(&head, w, current, h);
        stream_softmax(w, step, &head, scores, rescale);
        simd_weigh product = {head.acc, w->v_columns, scores, rescale, first, end, terms};
        simd_rows next = last ? head.next_k : v_rows(w, step, w->t->head_first + h + 1);
        stream_weigh(&product, &head.v, &next, dtype, s->v_head_dim, num_rows);
    }
}

// stream_heads chooses the number of rows that are worked on.
SIMD_INLINE void stream_heads(simd_work *w, int32_t current, attnd_dtype dtype, int terms) {
    if (w->rows == 1) {
        stream_rows(w, current, dtype, terms, 1);
    } else if (w->rows == 2) {
        stream_rows(w, current, dtype, terms, 2);
    } else {
        stream_rows(w, current, dtype, terms, SIMD_STREAM_ROWS);
    }
}

// fetch_first fetches K of the first head of the first step; what comes later is fetched
// between the products.  Always inlined, see fetch_q.
SIMD_INLINE void fetch_first(const simd_work *w, const attn_cpu_step *step) {
    const attn_shape *s = &w->p->shape;
    int64_t element = attnd_dtype_bytes(s->kv_dtype);
    int64_t k = w->t->head_first * s->stride_k_head * element;
    for (uint64_t left = step->seen; left; left &= left - 1) {
        int32_t key = first_of(left);
        for (int64_t at = 0; at < s->head_dim * element; at += SIMD_LINE) {
            fetch_line(step->k[key] + k + at, false);
        }
    }
}

// simd_attend is an attend kernel for one storage type.
static inline void simd_attend(const attn_params *p, const attn_task *t, const attn_state *out,
                               void *scratch, const simd_form *form, bool may_stream) {
    simd_work *w = work_init(p, t, out, scratch, form);
    int32_t all_rows = w->row->q_len * attn_group(&p->shape);
    bool streams = may_stream && all_rows <= SIMD_STREAM_ROWS;
    attn_span span = attn_task_span(p, t);
    int32_t current = 0;
    int32_t key = attn_cpu_step_next(&w->step[current], p, t, span, span.first);
    fetch_first(w, &w->step[current]);
    if (streams) {
        load_q(w, w->rows);
    }
    set_logits(w);
    clear_state(w);
    while (w->step[current].seen) {
        key = attn_cpu_step_next(&w->step[!current], p, t, span, key);
        if (streams) {
            form->stream(w, current);
        }
        for (int32_t h = 0; h < t->head_count && !streams; h++) {
            simd_head head;
            head_of(&head, w, current, h);
            form->packed(w, &w->step[current], &head);
        }
        current = !current;
    }
    store_state(w, out);
}

#endif
