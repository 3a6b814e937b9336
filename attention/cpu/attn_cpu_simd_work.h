// attn_cpu_simd_work is a task under way: what lies where in the thread's scratch, how query rows
// get in and states get out.  Included behind a vector header, once per instruction set.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_WORK_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_SIMD_WORK_H

#include "attention/cpu/attn_cpu_ops.h"
#include "attention/cpu/attn_cpu_simd_math.h"
#include "attention/cpu/attn_cpu_simd_packed.h"
#include "attention/cpu/attn_cpu_simd_stream.h"

enum {
    SIMD_STREAM_ROWS = 4,   // most query rows a KV head of the stream form
    SIMD_DECODE_ROWS = 128, // and of a decode task
    SIMD_Q_AHEAD = 8,       // query rows, of what is fetched before it is loaded
};

// simd_order is the order of the columns of q and acc, that in which K and V come out of a load.
typedef enum simd_order {
    SIMD_PLAIN, // as they are
    SIMD_SPLIT, // of 2 VEC_LANES the even ones, then the odd ones: bf16 widened by shift and mask
    SIMD_QUADS, // of 4 VEC_LANES the even ones, then the odd ones: vec_f8_to_f16
    SIMD_FOURS, // of 64 the first 4 of each 16, the next 4 of each, ...: bytes unpacked twice
} simd_order;

typedef struct simd_work simd_work;
typedef struct simd_head simd_head;

// simd_head_fn is scores, softmax step and weights times V for all rows of one KV head and step.
typedef void (*simd_head_fn)(simd_work *w, const attn_cpu_step *step, simd_head *head);

// simd_step_fn is the same for all KV heads of step number current.
typedef void (*simd_step_fn)(simd_work *w, int32_t current);

// simd_form is how one storage type is worked on.
typedef struct simd_form {
    simd_order order;
    simd_step_fn stream; // up to SIMD_STREAM_ROWS rows
    simd_head_fn packed; // more
    // NULL, or the form multiplies pairs of bf16: it rounds rows of x [rows, stride] to them, in
    // place, and lays them out as the form's products read them.  Rows of q; in the packed form
    // weights, too.  columns is a multiple of 2 VEC_LANES, in SIMD_FOURS of 64.
    void (*pair)(float *x, int64_t stride, int32_t rows, int32_t columns);
} simd_form;

// All arrays are in the thread's scratch, as simd_work itself is.
struct simd_work {
    const simd_form *form;
    const attn_params *p;
    const attn_task *t;
    const attn_row *row;
    int32_t rows;               // query rows of a KV head
    int32_t stride_rows;        // the same with padding
    int32_t loaded;             // of them are in q
    int32_t columns, v_columns; // of q and acc: head_dim and v_head_dim with padding
    float *q;                   // [head_count, stride_rows, columns], in form->order
    float *acc;                 // [head_count, stride_rows, v_columns], in form->order; the
                                // state's own where that has no other size
    float *m;                   // [head_count, stride_rows]
    float *d;                   // [head_count, stride_rows, VEC_LANES]
    simd_logits *logits;        // [head_count]
    float *slopes;              // [head_count, stride_rows] when the row has ALiBi slopes
    float *places;              // [stride_rows]: i + kv_len - q_len
    float *s;                   // [score_rows, ATTN_STEP_KEYS]
    float *panel;               // [columns, ATTN_STEP_KEYS], packed form
    float *v;                   // [v_columns, ATTN_STEP_KEYS] as widen_v lays it, packed form
    uint16_t *halves;           // [ATTN_STEP_KEYS, columns or v_columns], F8E4M3
    const char **half_row;      // [ATTN_STEP_KEYS], its rows
    attn_cpu_step step[2];      // the one under way and the next
};

// simd_head is one KV head of a step.
struct simd_head {
    float *q, *acc, *m, *d; // of its rows
    simd_rows k, v;
    simd_rows next_k; // of the KV head that comes next: behind the last one the next step's first
    const simd_logits *logits;
};

// carve takes bytes of the scratch, aligned.
static inline void *carve(char **scratch, int64_t bytes) {
    void *x = *scratch;
    *scratch += (bytes + ATTN_CPU_ALIGN - 1) / ATTN_CPU_ALIGN * ATTN_CPU_ALIGN;
    return x;
}

static inline int32_t round_up(int32_t x, int32_t unit) {
    return (x + unit - 1) / unit * unit;
}

// score_rows returns the rows that s needs room for: of a tile, or of all heads in the stream form,
// which works on 3 rows as on 4.
static inline int64_t score_rows(const simd_work *w) {
    int64_t tile = SIMD_TILE_ROWS + SIMD_SHORT_ROWS;
    int64_t heads = (int64_t)w->t->head_count * (w->rows == 3 ? SIMD_STREAM_ROWS : w->rows);
    return w->rows > SIMD_STREAM_ROWS || heads < tile ? tile : heads;
}

static inline simd_work *work_init(const attn_params *p, const attn_task *t, const attn_state *out,
                                   void *scratch, const simd_form *form) {
    char *at = scratch;
    simd_work *w = carve(&at, sizeof(*w));
    int32_t unit = form->order >= SIMD_QUADS ? SIMD_QUAD : SIMD_PAIR;
    w->form = form;
    w->p = p;
    w->t = t;
    w->row = &p->rows[t->row];
    w->rows = t->q_count;
    w->loaded = 0;
    w->stride_rows = w->rows / SIMD_TILE_ROWS * SIMD_TILE_ROWS; // tiles do not cross these
    while (w->stride_rows < w->rows) {
        w->stride_rows += tile_rows(w->rows - w->stride_rows);
    }
    w->columns = round_up(p->shape.head_dim, unit);
    w->v_columns = round_up(p->shape.v_head_dim, unit);
    int64_t states = (int64_t)t->head_count * w->stride_rows;
    const int64_t f32 = sizeof(float), pad = VEC_LANES; // vectors of states may end behind them
    w->q = carve(&at, states * w->columns * f32);
    bool fits = w->stride_rows == w->rows && w->v_columns == p->shape.v_head_dim;
    w->acc = fits ? out->acc : carve(&at, states * w->v_columns * f32);
    w->m = carve(&at, (states + pad) * f32);
    w->d = carve(&at, states * VEC_LANES * f32);
    w->logits = carve(&at, t->head_count * (int64_t)sizeof(*w->logits));
    w->slopes = carve(&at, states * f32);
    w->places = carve(&at, w->stride_rows * f32);
    w->s = carve(&at, score_rows(w) * ATTN_STEP_KEYS * f32);
    w->panel = carve(&at, w->columns * ATTN_STEP_KEYS * f32);
    w->v = carve(&at, w->v_columns * ATTN_STEP_KEYS * f32);
    int32_t widest = w->columns > w->v_columns ? w->columns : w->v_columns;
    w->halves = carve(&at, widest * ATTN_STEP_KEYS * (int64_t)sizeof(uint16_t));
    w->half_row = carve(&at, ATTN_STEP_KEYS * (int64_t)sizeof(char *));
    ATTND_ASSERT(at - (char *)scratch <= ATTN_CPU_SCRATCH_BYTES);
    return w;
}

// swap_fours brings the columns of a row to the order SIMD_FOURS, or back.
static inline void swap_fours(float *to, const float *from, int32_t columns) {
    for (int32_t c = 0; c < columns; c += 64) {
        for (int32_t i = 0; i < 16; i++) {
            memcpy(to + c + i * 4, from + c + i % 4 * 16 + i / 4 * 4, 4 * sizeof(float));
        }
    }
}

// order_columns brings the columns of a row to an order; columns is a multiple of its unit.
static inline void order_columns(float *to, const float *from, int32_t columns, simd_order order) {
    if (order == SIMD_FOURS) {
        swap_fours(to, from, columns);
        return;
    }
    for (int32_t c = 0; c < columns; c += SIMD_PAIR) {
        vec a = vec_load(from + c);
        vec b = vec_load(from + c + VEC_LANES);
        int32_t at = c;
        int32_t apart = VEC_LANES;
        if (order != SIMD_PLAIN) {
            vec_split(a, b, &a, &b);
        }
        if (order == SIMD_QUADS) {
            at = c / SIMD_QUAD * SIMD_QUAD + c % SIMD_QUAD / 2;
            apart = SIMD_PAIR;
        }
        vec_store(to + at, a);
        vec_store(to + at + apart, b);
    }
}

// restore_columns is the inverse, times scale.
static inline void restore_columns(float *to, const float *from, int32_t columns, simd_order order,
                                   float scale) {
    if (order == SIMD_FOURS) {
        swap_fours(to, from, columns);
        for (int32_t c = 0; c < columns; c += VEC_LANES) {
            vec_store(to + c, vec_mul(vec_load(to + c), vec_set1(scale)));
        }
        return;
    }
    for (int32_t c = 0; c < columns; c += SIMD_PAIR) {
        int32_t at = c;
        int32_t apart = VEC_LANES;
        if (order == SIMD_QUADS) {
            at = c / SIMD_QUAD * SIMD_QUAD + c % SIMD_QUAD / 2;
            apart = SIMD_PAIR;
        }
        vec a = vec_load(from + at);
        vec b = vec_load(from + at + apart);
        if (order != SIMD_PLAIN) {
            vec_merge(a, b, &a, &b);
        }
        vec_store(to + c, vec_mul(a, vec_set1(scale)));
        vec_store(to + c + VEC_LANES, vec_mul(b, vec_set1(scale)));
    }
}

// load_row converts one query row to float32, zeros behind head_dim, and rotates it.
static inline void load_row(float *to, const simd_work *w, const char *from,
                            const double *cos_sin) {
    const attn_shape *s = &w->p->shape;
    int64_t bytes = VEC_LANES * (int64_t)attnd_dtype_bytes(s->q_dtype);
    float plain[ATTN_MAX_HEAD_DIM + SIMD_QUAD];
    bool is_plain = !cos_sin && w->form->order == SIMD_PLAIN;
    float *x = is_plain ? to : plain;
    int32_t c = 0;
    for (; c + VEC_LANES <= s->head_dim; c += VEC_LANES, from += bytes) {
        vec_store(x + c, vec_widen(from, s->q_dtype, VEC_LANES));
    }
    for (; c < w->columns; c += VEC_LANES, from += bytes) {
        int32_t n = s->head_dim - c;
        vec_store(x + c, n > 0 ? vec_widen(from, s->q_dtype, n) : vec_zero());
    }
    if (cos_sin) {
        attn_cpu_rope_apply(w->row->rope, cos_sin, plain);
    }
    if (!is_plain) {
        order_columns(to, plain, w->columns, w->form->order);
    }
}

// q_row returns the address of query row r of KV head h.
static inline const char *q_row(const simd_work *w, int32_t h, int32_t r) {
    int32_t group = attn_group(&w->p->shape);
    int64_t token = (w->t->q_first + r) / group;
    int64_t q_head = (w->t->head_first + h) * group + (w->t->q_first + r) % group;
    int64_t at = token * w->row->stride_q_token + q_head * w->row->stride_q_head;
    return (const char *)w->row->q + at * (int64_t)attnd_dtype_bytes(w->p->shape.q_dtype);
}

// fetch_q fetches columns [c, c + n) of query rows [first, first + count) of the first KV head into
// the second cache: tokens lie far apart, which no hardware guesses.  Always inlined: GCC takes a
// function that does nothing else for one without effects and leaves out its calls.
SIMD_INLINE void fetch_q(const simd_work *w, int32_t first, int32_t count, int32_t c, int32_t n) {
    int64_t element = attnd_dtype_bytes(w->p->shape.q_dtype);
    int32_t end = first + count < w->rows ? first + count : w->rows;
    for (int32_t r = first; r < end; r++) {
        const char *x = q_row(w, 0, r) + c * element;
        for (int64_t at = 0; at < n * element; at += SIMD_LINE) {
            __builtin_prefetch(x + at, 0, 2);
        }
    }
}

// load_q fills q, slopes and places with the next count rows of each KV head.
static inline void load_q(simd_work *w, int32_t count) {
    const attn_row *row = w->row;
    int32_t group = attn_group(&w->p->shape);
    double cos_sin[ATTN_MAX_HEAD_DIM];
    int32_t first = w->loaded;
    int32_t last_token = -1;
    w->loaded += count;
    for (int32_t r = first; r < w->loaded; r++) {
        int32_t token = (w->t->q_first + r) / group;
        int32_t place = row->kv_len - row->q_len + token;
        w->places[r] = (float)place;
        if (row->rope && token != last_token) {
            attn_cpu_rope_angles(row->rope, row->q_positions ? row->q_positions[token] : place,
                                 cos_sin);
        }
        last_token = token;
        fetch_q(w, r + SIMD_Q_AHEAD, 1, 0, w->p->shape.head_dim);
        for (int32_t h = 0; h < w->t->head_count; h++) {
            int64_t state = h * (int64_t)w->stride_rows + r;
            load_row(w->q + state * w->columns, w, q_row(w, h, r), row->rope ? cos_sin : NULL);
            if (row->alibi_slopes) {
                int32_t q_head = (w->t->head_first + h) * group + (w->t->q_first + r) % group;
                w->slopes[state] = attn_logit_of(w->p, row, q_head).slope;
            }
        }
    }
    for (int32_t h = 0; h < w->t->head_count; h++) {
        float *q = w->q + (h * (int64_t)w->stride_rows + first) * w->columns;
        if (w->form->pair) {
            w->form->pair(q, w->columns, count, w->columns);
        }
        if (w->loaded == w->rows) {
            size_t padding = (size_t)(w->stride_rows - w->rows) * (size_t)w->columns;
            memset(q + (int64_t)count * w->columns, 0, padding * sizeof(float));
        }
    }
}

// set_logits fills logits.
static inline void set_logits(simd_work *w) {
    const attn_shape *s = &w->p->shape;
    float more = s->kv_dtype == ATTND_F8E4M3 ? SIMD_F8_SCALE : 1.0f;
    for (int32_t h = 0; h < w->t->head_count; h++) {
        int32_t q_head = (w->t->head_first + h) * attn_group(s);
        attn_logit logit = attn_logit_of(w->p, w->row, q_head);
        simd_logits_set(&w->logits[h], w->row, &logit, more,
                        w->slopes + h * (int64_t)w->stride_rows, w->places);
    }
}

static inline void clear_state(simd_work *w) {
    int64_t states = (int64_t)w->t->head_count * w->stride_rows;
    for (int64_t i = 0; i < states + VEC_LANES; i++) {
        w->m[i] = -INFINITY;
    }
    memset(w->d, 0, (size_t)states * VEC_LANES * sizeof(float));
    memset(w->acc, 0, (size_t)states * (size_t)w->v_columns * sizeof(float));
}

static inline void store_state(const simd_work *w, const attn_state *out) {
    int32_t v_head_dim = w->p->shape.v_head_dim;
    float scale = w->p->shape.kv_dtype == ATTND_F8E4M3 ? SIMD_F8_SCALE : 1.0f;
    bool is_there = w->acc == out->acc && w->form->order == SIMD_PLAIN && scale == 1;
    float row[ATTN_MAX_HEAD_DIM + SIMD_QUAD];
    for (int32_t h = 0; h < w->t->head_count; h++) {
        for (int32_t r = 0; r < w->rows; r++) {
            int64_t from = h * (int64_t)w->stride_rows + r;
            int64_t to = h * (int64_t)w->rows + r;
            if (!is_there) {
                restore_columns(row, w->acc + from * w->v_columns, w->v_columns, w->form->order,
                                scale);
                memcpy(out->acc + to * v_head_dim, row, (size_t)v_head_dim * sizeof(float));
            }
            out->m[to] = w->m[from];
            out->d[to] = vec_hsum(vec_load(w->d + from * VEC_LANES));
        }
    }
}

#endif
