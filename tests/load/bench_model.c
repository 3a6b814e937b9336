// Presets and what follows from a geometry.  The figures of the presets are those of the public
// model configurations; tiny and tiny-gpu are for tests.  YaRN's frequencies: Peng et al. 2023,
// arXiv 2309.00071, section 3.2, with beta_fast 32, beta_slow 1 and an original context of 4096
// tokens (gpt-oss), without rounding the ramp's ends.
#include "tests/load/bench_model.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_data.h"
#include "tests/load/bench_math.h"

enum { MAX_LAYERS = 1024, MAX_HEADS = 1024, MAX_HEAD_DIM = 256, MAX_BLOCK_TOKENS = 1024 };

#define SAME ATTND_NUM_DTYPES

static const bench_model presets[] = {
    {.preset = "tiny",
     .dtype = ATTND_F32,
     .kv_dtype = SAME,
     .layers = 2,
     .q_heads = 4,
     .kv_heads = 2,
     .head_dim = 32,
     .window_every = 1},
    {.preset = "tiny-gpu",
     .dtype = ATTND_BF16,
     .kv_dtype = SAME,
     .layers = 2,
     .q_heads = 4,
     .kv_heads = 2,
     .head_dim = 64,
     .window_every = 1},
    {.preset = "llama-3-8b",
     .dtype = ATTND_BF16,
     .kv_dtype = SAME,
     .layers = 32,
     .q_heads = 32,
     .kv_heads = 8,
     .head_dim = 128,
     .window_every = 1,
     .rope_theta = 500000},
    {.preset = "qwen2.5-7b",
     .dtype = ATTND_BF16,
     .kv_dtype = SAME,
     .layers = 28,
     .q_heads = 28,
     .kv_heads = 4,
     .head_dim = 128,
     .window_every = 1,
     .rope_theta = 1000000},
    {.preset = "gpt-oss-20b",
     .dtype = ATTND_BF16,
     .kv_dtype = SAME,
     .layers = 24,
     .q_heads = 64,
     .kv_heads = 8,
     .head_dim = 64,
     .window = 128,
     .window_every = 2,
     .rope_theta = 150000,
     .rope_factor = 32,
     .sinks = true},
};
enum { NUM_PRESETS = sizeof(presets) / sizeof(presets[0]) };

attnd_err bench_model_preset(bench_model *m, const char *name, attnd_errinfo *info) {
    char names[128] = "";
    size_t len = 0;
    for (uint32_t i = 0; i < NUM_PRESETS; i++) {
        if (strcmp(presets[i].preset, name) == 0) {
            *m = presets[i];
            return ATTND_OK;
        }
        len += (size_t)snprintf(names + len, sizeof(names) - len, "%s%s", i == 0 ? "" : ", ",
                                presets[i].preset);
    }
    return attnd_fail(info, ATTND_ENOENT, "preset", "no preset \"%.40s\"; there are %s", name,
                      names);
}

static attnd_err check_range(const char *flag, uint32_t x, uint32_t lo, uint32_t hi,
                             attnd_errinfo *info) {
    if (x < lo || x > hi) {
        return attnd_fail(info, ATTND_EINVAL, flag,
                          "%s %" PRIu32 " is not in %" PRIu32 " to %" PRIu32, flag, x, lo, hi);
    }
    return ATTND_OK;
}

static attnd_err check_head_dim(const char *flag, uint32_t x, attnd_errinfo *info) {
    if (x % 8 != 0 || x == 0 || x > MAX_HEAD_DIM) {
        return attnd_fail(info, ATTND_EINVAL, flag,
                          "%s %" PRIu32 " is not a multiple of 8 from 8 to %d", flag, x,
                          MAX_HEAD_DIM);
    }
    return ATTND_OK;
}

static attnd_err check(const bench_model *m, attnd_errinfo *info) {
    attnd_err err = check_range("layers", m->layers, 1, MAX_LAYERS, info);
    if (err == ATTND_OK) {
        err = check_range("kv-heads", m->kv_heads, 1, MAX_HEADS, info);
    }
    if (err == ATTND_OK) {
        err = check_range("q-heads", m->q_heads, 1, MAX_HEADS, info);
    }
    if (err == ATTND_OK && m->q_heads % m->kv_heads != 0) {
        err = attnd_fail(info, ATTND_EINVAL, "q-heads",
                         "q-heads %" PRIu32 " is not a multiple of kv-heads %" PRIu32, m->q_heads,
                         m->kv_heads);
    }
    if (err == ATTND_OK) {
        err = check_head_dim("head-dim", m->head_dim, info);
    }
    if (err == ATTND_OK) {
        err = check_head_dim("v-head-dim", m->v_head_dim, info);
    }
    if (err == ATTND_OK) {
        err = check_range("block-tokens", m->block_tokens, 0, MAX_BLOCK_TOKENS, info);
    }
    if (err == ATTND_OK && (m->rotary_dim % 2 != 0 || m->rotary_dim > m->head_dim)) {
        err = attnd_fail(info, ATTND_EINVAL, "rotary-dim",
                         "rotary-dim %" PRIu32 " is not an even number up to head-dim",
                         m->rotary_dim);
    }
    if (err == ATTND_OK && m->rope_factor != 0 && m->rope_factor < 1) {
        err = attnd_fail(info, ATTND_EINVAL, "rope-factor",
                         "rope-factor %g is neither 0 nor from 1 on", m->rope_factor);
    }
    if (err == ATTND_OK && m->dtype == ATTND_F8E4M3) {
        err = attnd_fail(info, ATTND_ENOTSUP, "dtype", "f8e4m3 is a type of the cache alone");
    }
    if (err == ATTND_OK && m->kv_dtype != m->dtype &&
        (m->kv_dtype != ATTND_F8E4M3 || m->dtype == ATTND_F32)) {
        err = attnd_fail(info, ATTND_ENOTSUP, "kv-dtype",
                         "kv-dtype is dtype, or f8e4m3 with a 16-bit dtype");
    }
    return err;
}

static attnd_err make_rope(bench_model *m) {
    if (m->rope_theta == 0) {
        return ATTND_OK;
    }
    uint32_t pairs = m->rotary_dim / 2;
    m->inv_freq = calloc(pairs, sizeof(*m->inv_freq));
    if (m->inv_freq == NULL) {
        return ATTND_ENOMEM;
    }
    double dim = m->rotary_dim, log_theta = log(m->rope_theta);
    double low = dim * log(4096 / (32 * 2 * M_PI)) / (2 * log_theta);
    double high = dim * log(4096 / (1 * 2 * M_PI)) / (2 * log_theta);
    for (uint32_t p = 0; p < pairs; p++) {
        double freq = exp(-2.0 * p / dim * log_theta);
        if (m->rope_factor > 0) {
            double ramp = fmin(fmax((p - low) / (high - low), 0), 1);
            freq = freq / m->rope_factor * ramp + freq * (1 - ramp);
        }
        m->inv_freq[p] = (float)freq;
    }
    m->attention_factor = m->rope_factor > 0 ? (float)(0.1 * log(m->rope_factor) + 1) : 1;
    return ATTND_OK;
}

static attnd_err make_biases(bench_model *m, uint64_t seed) {
    if (m->sinks) {
        uint64_t n = (uint64_t)m->layers * m->q_heads;
        m->sink_logits = calloc(n, sizeof(*m->sink_logits));
        if (m->sink_logits == NULL) {
            return ATTND_ENOMEM;
        }
        bench_uniform(m->sink_logits, bench_hash64(seed ^ 0x73696e6b73u), 0, (uint32_t)n);
    }
    if (m->alibi) {
        m->alibi_slopes = calloc(m->q_heads, sizeof(*m->alibi_slopes));
        if (m->alibi_slopes == NULL) {
            return ATTND_ENOMEM;
        }
        for (uint32_t h = 0; h < m->q_heads; h++) {
            m->alibi_slopes[h] = (float)exp2(-8.0 * (h + 1) / m->q_heads);
        }
    }
    return ATTND_OK;
}

static attnd_err make_layers(bench_model *m) {
    m->per_layer = calloc(m->layers, sizeof(*m->per_layer));
    if (m->per_layer == NULL) {
        return ATTND_ENOMEM;
    }
    for (uint32_t l = 0; l < m->layers; l++) {
        attnd_layer_opts *o = &m->per_layer[l];
        uint32_t window = bench_model_window(m, l);
        *o = ATTND_LAYER_DEFAULT;
        o->scale = m->scale;
        o->softcap = m->softcap;
        o->window_left = window > 0 ? (int32_t)(window - 1) : -1;
        o->sinks = m->sink_logits != NULL ? m->sink_logits + (uint64_t)l * m->q_heads : NULL;
        o->alibi_slopes = m->alibi_slopes;
        if (m->inv_freq != NULL) {
            o->rope.inv_freq = m->inv_freq;
            o->rope.num_inv_freq = m->rotary_dim / 2;
            o->rope.attention_factor = m->attention_factor;
            o->rope.interleaved = m->rope_interleaved;
        }
    }
    return ATTND_OK;
}

// digest folds all that makes two models differ into 64 bits.
static uint64_t digest(const bench_model *m, uint64_t seed) {
    const uint64_t words[] = {
        m->dtype,      m->kv_dtype,   m->layers,           m->q_heads, m->kv_heads,
        m->head_dim,   m->v_head_dim, m->block_tokens,     m->window,  m->window_every,
        m->rotary_dim, m->alibi,      m->rope_interleaved, m->sinks,   m->sinks ? seed : 0,
    };
    const double reals[] = {m->scale, m->softcap, m->rope_theta, m->rope_factor};
    uint64_t h = 0;
    for (uint32_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        h = bench_hash64(h ^ words[i]);
    }
    for (uint32_t i = 0; i < sizeof(reals) / sizeof(reals[0]); i++) {
        uint64_t bits;
        memcpy(&bits, &reals[i], sizeof(bits));
        h = bench_hash64(h ^ bits);
    }
    return h;
}

attnd_err bench_model_prepare(bench_model *m, uint64_t seed, attnd_errinfo *info) {
    m->kv_dtype = m->kv_dtype == SAME ? m->dtype : m->kv_dtype;
    m->v_head_dim = m->v_head_dim == 0 ? m->head_dim : m->v_head_dim;
    m->rotary_dim = m->rotary_dim == 0 ? m->head_dim : m->rotary_dim;
    m->window_every = m->window_every == 0 ? 1 : m->window_every;
    attnd_err err = check(m, info);
    if (err != ATTND_OK) {
        return err;
    }
    err = make_rope(m);
    if (err == ATTND_OK) {
        err = make_biases(m, seed);
    }
    if (err == ATTND_OK) {
        err = make_layers(m);
    }
    if (err != ATTND_OK) {
        return attnd_fail(info, err, "layers", "no memory for the model");
    }
    snprintf(m->name, sizeof(m->name), "bench-%s-%016" PRIx64, m->preset, digest(m, seed));
    return ATTND_OK;
}

void bench_model_fini(bench_model *m) {
    free(m->inv_freq);
    free(m->sink_logits);
    free(m->alibi_slopes);
    free(m->per_layer);
    m->inv_freq = m->sink_logits = m->alibi_slopes = NULL;
    m->per_layer = NULL;
}

void bench_model_opts(const bench_model *m, attnd_model_opts *opts) {
    *opts = (attnd_model_opts){
        .name = m->name,
        .dtype = m->dtype,
        .kv_dtype = m->kv_dtype,
        .layers = m->layers,
        .q_heads = m->q_heads,
        .kv_heads = m->kv_heads,
        .head_dim = m->head_dim,
        .v_head_dim = m->v_head_dim,
        .block_tokens = m->block_tokens,
        .all = ATTND_LAYER_DEFAULT,
        .per_layer = m->per_layer,
    };
    memcpy(opts->digest, m->name + strlen(m->name) - 16, 16); // the hexadecimal digits
}

uint32_t bench_model_window(const bench_model *m, uint32_t layer) {
    return layer % m->window_every == 0 ? m->window : 0;
}

uint64_t bench_model_row_bytes(const bench_model *m) {
    uint64_t elems =
        (uint64_t)m->q_heads * m->head_dim + (uint64_t)m->kv_heads * (m->head_dim + m->v_head_dim);
    return elems * attnd_dtype_bytes(m->dtype);
}

uint64_t bench_model_out_bytes(const bench_model *m) {
    return (uint64_t)m->q_heads * m->v_head_dim * attnd_dtype_bytes(m->dtype);
}
