// The model, as Llama's: per layer
//     x += attention(rope(Wq n(x)), rope(Wk n(x)), Wv n(x)) Wo
//     x += (silu(Wg n(x)) * Wu n(x)) Wd            n = RMSNorm
// and logits = n(x) Wout.  Row by row, in the plainest way: it is a tenth of a megaflop.
#include "tests/e2e/decoder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 96, HIDDEN = 160 };

typedef struct layer {
    // rows of the kind's q_row or kv_row; wo [DIM, q_row]
    float wq[DECODER_MAX_Q_ROW * DIM], wk[DECODER_MAX_KV_ROW * DIM], wv[DECODER_MAX_KV_ROW * DIM];
    float wo[DIM * DECODER_MAX_Q_ROW];
    float gate[HIDDEN][DIM], up[HIDDEN][DIM], down[DIM][HIDDEN];
    float attention_norm[DIM], mlp_norm[DIM];
} layer;

typedef struct weights {
    float embedding[DECODER_VOCABULARY][DIM];
    layer layers[DECODER_LAYERS];
    float norm[DIM], out[DECODER_VOCABULARY][DIM];
} weights;

const decoder_kind decoder_f32 = {.head_dim = 32, .dtype = ATTND_F32};
const decoder_kind decoder_bf16 = {.head_dim = 64, .dtype = ATTND_BF16};

struct decoder {
    const decoder_kind *kind;
    weights w;
    float x[DECODER_MAX_ROWS][DIM]; // the residual stream
    // [rows, q_row] and [rows, kv_row]
    float q[DECODER_MAX_ROWS * DECODER_MAX_Q_ROW], out[DECODER_MAX_ROWS * DECODER_MAX_Q_ROW];
    float k[DECODER_MAX_ROWS * DECODER_MAX_KV_ROW], v[DECODER_MAX_ROWS * DECODER_MAX_KV_ROW];
};

// ---- weights

// next is xorshift64*; uniform in [-1, 1).
static float next(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    uint64_t bits = *state * UINT64_C(2685821657736338717);
    return (float)(bits >> 40) / (float)(1 << 23) - 1.0f;
}

static void fill(float *w, size_t n, float scale, uint64_t *state) {
    for (size_t i = 0; i < n; i++) {
        w[i] = next(state) * scale;
    }
}

// fill_matrix keeps the variance of what goes through [rows, cols].
static void fill_matrix(float *w, size_t rows, size_t cols, uint64_t *state) {
    fill(w, rows * cols, sqrtf(3.0f / (float)cols), state);
}

static void fill_norm(float *w, uint64_t *state) {
    fill(w, DIM, 0.2f, state);
    for (int i = 0; i < DIM; i++) {
        w[i] += 1.0f;
    }
}

decoder *decoder_create(const decoder_kind *kind, uint64_t seed) {
    decoder *d = calloc(1, sizeof(*d));
    uint64_t state = seed * 2 + 1;
    uint32_t q_row = decoder_q_row(kind), kv_row = decoder_kv_row(kind);
    if (!d) {
        return NULL;
    }
    d->kind = kind;
    fill(&d->w.embedding[0][0], DECODER_VOCABULARY * DIM, 1.7f, &state);
    for (int l = 0; l < DECODER_LAYERS; l++) {
        layer *y = &d->w.layers[l];
        fill_matrix(y->wq, q_row, DIM, &state);
        fill_matrix(y->wk, kv_row, DIM, &state);
        fill_matrix(y->wv, kv_row, DIM, &state);
        fill_matrix(y->wo, DIM, q_row, &state);
        fill_matrix(&y->gate[0][0], HIDDEN, DIM, &state);
        fill_matrix(&y->up[0][0], HIDDEN, DIM, &state);
        fill_matrix(&y->down[0][0], DIM, HIDDEN, &state);
        fill_norm(y->attention_norm, &state);
        fill_norm(y->mlp_norm, &state);
    }
    fill_norm(d->w.norm, &state);
    fill_matrix(&d->w.out[0][0], DECODER_VOCABULARY, DIM, &state);
    return d;
}

void decoder_free(decoder *d) {
    free(d);
}

void decoder_inv_freq(const decoder_kind *kind, float *out) {
    for (uint32_t p = 0; p < kind->head_dim / 2; p++) {
        out[p] = (float)pow(10000.0, -2.0 * p / kind->head_dim);
    }
}

// ---- forward

// multiply: out [rows] = w [rows, cols] x [cols].
static void multiply(float *out, const float *w, const float *x, int rows, int cols) {
    for (int r = 0; r < rows; r++) {
        float sum = 0;
        for (int c = 0; c < cols; c++) {
            sum += w[r * cols + c] * x[c];
        }
        out[r] = sum;
    }
}

static void rms_norm(float *out, const float *x, const float *weight) {
    float sum = 0;
    for (int i = 0; i < DIM; i++) {
        sum += x[i] * x[i];
    }
    float scale = 1.0f / sqrtf(sum / DIM + 1e-5f);
    for (int i = 0; i < DIM; i++) {
        out[i] = x[i] * scale * weight[i];
    }
}

static void add(float *x, const float *y) {
    for (int i = 0; i < DIM; i++) {
        x[i] += y[i];
    }
}

static void project(decoder *d, const layer *y, uint32_t row) {
    float n[DIM];
    rms_norm(n, d->x[row], y->attention_norm);
    uint32_t q_row = decoder_q_row(d->kind), kv_row = decoder_kv_row(d->kind);
    multiply(d->q + row * q_row, y->wq, n, (int)q_row, DIM);
    multiply(d->k + row * kv_row, y->wk, n, (int)kv_row, DIM);
    multiply(d->v + row * kv_row, y->wv, n, (int)kv_row, DIM);
}

static void mlp(decoder *d, const layer *y, uint32_t row) {
    float n[DIM], sum[DIM], gate[HIDDEN], up[HIDDEN];
    uint32_t q_row = decoder_q_row(d->kind);
    multiply(sum, y->wo, d->out + row * q_row, DIM, (int)q_row);
    add(d->x[row], sum);
    rms_norm(n, d->x[row], y->mlp_norm);
    multiply(gate, &y->gate[0][0], n, HIDDEN, DIM);
    multiply(up, &y->up[0][0], n, HIDDEN, DIM);
    for (int i = 0; i < HIDDEN; i++) {
        up[i] *= gate[i] / (1.0f + expf(-gate[i]));
    }
    multiply(sum, &y->down[0][0], up, DIM, HIDDEN);
    add(d->x[row], sum);
}

// likeliest returns the token after a row; *margin is how far the second is behind.
static uint8_t likeliest(const decoder *d, uint32_t row, float *margin) {
    float n[DIM], logits[DECODER_VOCABULARY];
    int best = 0;
    rms_norm(n, d->x[row], d->w.norm);
    multiply(logits, &d->w.out[0][0], n, DECODER_VOCABULARY, DIM);
    for (int i = 1; i < DECODER_VOCABULARY; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    *margin = INFINITY;
    for (int i = 0; i < DECODER_VOCABULARY; i++) {
        float behind = logits[best] - logits[i];
        *margin = i != best && behind < *margin ? behind : *margin;
    }
    return (uint8_t)best;
}

// forward appends rows tokens; out of the talk gets token `at`, which comes after the last one.
static bool forward(decoder *d, const decoder_attention *a, const uint8_t *tokens, uint32_t rows,
                    const decoder_talk *talk, uint32_t at) {
    if (!a->begin(a->ctx, rows)) {
        return false;
    }
    for (uint32_t i = 0; i < rows; i++) {
        memcpy(d->x[i], d->w.embedding[tokens[i]], sizeof(d->x[i]));
    }
    for (uint32_t l = 0; l < DECODER_LAYERS; l++) {
        for (uint32_t i = 0; i < rows; i++) {
            project(d, &d->w.layers[l], i);
        }
        if (!a->attend(a->ctx, l, rows, d->q, d->k, d->v, d->out)) {
            return false;
        }
        for (uint32_t i = 0; i < rows; i++) {
            mlp(d, &d->w.layers[l], i);
        }
    }
    float margin;
    talk->out[at] = likeliest(d, rows - 1, &margin);
    if (talk->margins) {
        talk->margins[at] = margin;
    }
    return a->end(a->ctx, rows);
}

bool decoder_run(decoder *d, const decoder_attention *a, const decoder_talk *talk) {
    for (uint32_t at = 0; at < talk->num_prompt; at += DECODER_MAX_ROWS) {
        uint32_t left = talk->num_prompt - at;
        uint32_t rows = left < DECODER_MAX_ROWS ? left : DECODER_MAX_ROWS;
        if (!forward(d, a, talk->prompt + at, rows, talk, 0)) {
            return false;
        }
    }
    const uint8_t *fed = talk->forced ? talk->forced : talk->out;
    for (uint32_t i = 1; i < talk->num; i++) {
        if (!forward(d, a, &fed[i - 1], 1, talk, i)) {
            return false;
        }
    }
    return true;
}
