// bench_model is the geometry of the model that attn-bench plays: a preset, which flags may change,
// and what the daemon and the verifier need of it.
#ifndef ATTND_LOAD_BENCH_MODEL_H
#define ATTND_LOAD_BENCH_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/client/attnd.h"
#include "proto/dtype.h"
#include "proto/err.h"

typedef struct bench_model {
    char preset[32];
    attnd_dtype dtype;    // of q, k, v and out
    attnd_dtype kv_dtype; // of the cache; ATTND_NUM_DTYPES = dtype
    uint32_t layers, q_heads, kv_heads;
    uint32_t head_dim;
    uint32_t v_head_dim;   // 0 = head_dim
    uint32_t block_tokens; // 0 = the daemon's default
    uint32_t window;       // keys that a query sees, its own included; 0 = all
    uint32_t window_every; // only layers l with l % window_every == 0 have the window; >= 1
    float scale;           // 0 = 1 / sqrt(head_dim)
    float softcap;         // 0 = off
    double rope_theta;     // 0 = no RoPE
    double rope_factor;    // YaRN, 0 = off
    uint32_t rotary_dim;   // 0 = head_dim
    bool rope_interleaved; // pairs are (2p, 2p + 1)
    bool sinks;            // one random logit per layer and query head
    bool alibi;            // slopes 2^(-8 (h + 1) / q_heads)

    // made by bench_model_prepare; owned
    char name[64];          // unique to the geometry: two runs that differ do not share a model
    float attention_factor; // multiplies cos and sin
    float *inv_freq;        // [rotary_dim / 2], NULL without RoPE
    float *sink_logits;     // [layers, q_heads], NULL without sinks
    float *alibi_slopes;    // [q_heads], NULL without ALiBi
    attnd_layer_opts *per_layer; // [layers]
} bench_model;

// bench_model_preset fills in a preset by name; ATTND_ENOENT lists the names in *info.
attnd_err bench_model_preset(bench_model *m, const char *name, attnd_errinfo *info);

// bench_model_prepare checks the geometry and makes the arrays; seed is for the sinks.  The caller
// owns what it made: bench_model_fini, also after an error.  ATTND_EINVAL with the flag's name,
// ATTND_ENOMEM.
attnd_err bench_model_prepare(bench_model *m, uint64_t seed, attnd_errinfo *info);
void bench_model_fini(bench_model *m);

// bench_model_opts fills what attnd_model_open takes; it borrows from m.
void bench_model_opts(const bench_model *m, attnd_model_opts *opts);

// bench_model_window returns how many keys a query of that layer sees, 0 = all.
uint32_t bench_model_window(const bench_model *m, uint32_t layer);

// bench_model_row_bytes returns the bytes of one token's q, k and v of one layer, and of its
// output.
uint64_t bench_model_row_bytes(const bench_model *m);
uint64_t bench_model_out_bytes(const bench_model *m);

#endif
