// The flags of `attn-bench serve` as a table, and the checks of what goes with what.
#include "tests/load/bench_serve_opts.h"

#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_opts.h"

enum { MAX_CONCURRENCY = 1024, MAX_CHUNK = 65536, MAX_THREADS = 64, DEFAULT_REQUESTS = 64 };

static const bench_serve_opts defaults = {
    .transport_name = "auto",
    .input = "512",
    .output = "64",
    .load = {.seed = 1, .shares_prefixes = true},
    .speed = 1,
    .patience_s = 30,
    .timeout_s = 60,
    .concurrency = 16,
    .prefill_chunk = 512,
    .verify_threads = 1,
};

enum { MAX_FLAGS = 64 };

// Each of these appends its rows to the table and returns how many rows that has then.
static uint32_t append(bench_opt *table, uint32_t at, const bench_opt *rows, size_t bytes) {
    memcpy(table + at, rows, bytes);
    return at + (uint32_t)(bytes / sizeof(*rows));
}

static uint32_t load_rows(bench_serve_opts *o, bench_opt *table, uint32_t at) {
    const double big = 9007199254740992.0; // 2^53: what a double counts up to
    const bench_opt rows[] = {
        {"Daemon", BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
        {"connect", BENCH_OPT_TEXT, &o->connect, "URL", "ipc://PATH or tcp://HOST:PORT", 0, 0,
         false},
        {"transport", BENCH_OPT_TEXT, &o->transport_name, "nng|ring|auto",
         "default auto: a ring when the daemon gives one", 0, 0, false},
        {"tenant", BENCH_OPT_TEXT, &o->tenant, "NAME", "tenant; default: \"default\"", 0, 0, false},
        {"timeout", BENCH_OPT_REAL, &o->timeout_s, "S", "of one call; default 60", 0.1, 86400,
         false},
        {"patience", BENCH_OPT_REAL, &o->patience_s, "S",
         "how long EBUSY and a full pool are endured; default 30", 0, 86400, false},
        {"daemon-pid", BENCH_OPT_U64, &o->daemon_pid, "PID",
         "whose CPU and memory are shown; default: the listener of an ipc:// path", 1, 1 << 30,
         false},
        {"Load", BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
        {"requests", BENCH_OPT_U64, &o->requests, "N",
         "default: the trace once, or 64; past its end a trace begins again", 1, big, false},
        {"duration", BENCH_OPT_REAL, &o->duration_s, "S",
         "end after S seconds instead; what is running then is cut off", 0.1, 1e7, false},
        {"trace", BENCH_OPT_TEXT, &o->load.trace, "FILE",
         "lengths from an Azure LLM CSV or a Mooncake JSON-lines trace", 0, 0, false},
        {"share-prefixes", BENCH_OPT_ON_OFF, &o->load.shares_prefixes, "on|off",
         "prompts share blocks as the trace's hash_ids say; default on", 0, 0, false},
        {"input", BENCH_OPT_TEXT, &o->input, "N|lognormal:MEAN,SIGMA",
         "prompt tokens; default 512 (MEAN is of the lengths, SIGMA of their logarithm)", 0, 0,
         false},
        {"output", BENCH_OPT_TEXT, &o->output, "N|lognormal:MEAN,SIGMA",
         "generated tokens; default 64", 0, 0, false},
        {"concurrency", BENCH_OPT_U32, &o->concurrency, "N", "sequences at a time; default 16", 1,
         MAX_CONCURRENCY, false},
        {"prefill-chunk", BENCH_OPT_U32, &o->prefill_chunk, "N",
         "prompt tokens a step; default 512", 1, MAX_CHUNK, false},
        {"rate", BENCH_OPT_REAL, &o->rate, "R",
         "open loop: Poisson arrivals, R requests/s, latency from the scheduled time", 1e-6, 1e6,
         false},
        {"trace-time", BENCH_OPT_FLAG, &o->trace_time, NULL,
         "open loop: arrivals at the trace's own times (as recorded, bursts included)", 0, 0,
         false},
        {"speed", BENCH_OPT_REAL, &o->speed, "X",
         "runs the trace's clock X times as fast; default 1", 1e-6, 1e9, false},
        {"seed", BENCH_OPT_U64, &o->load.seed, "N", "of lengths, arrivals, q, k and v; default 1",
         0, big, false},
    };
    return append(table, at, rows, sizeof(rows));
}

static uint32_t model_rows(bench_serve_opts *o, bench_opt *table, uint32_t at) {
    bench_model *m = &o->model;
    const bench_opt rows[] = {
        {"Model", BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
        {"preset", BENCH_OPT_TEXT, &o->preset, "NAME",
         "tiny, tiny-gpu, llama-3-8b, qwen2.5-7b or gpt-oss-20b; the flags below change it", 0, 0,
         false},
        {"layers", BENCH_OPT_U32, &m->layers, "N", "layers of the model", 1, 1024, false},
        {"q-heads", BENCH_OPT_U32, &m->q_heads, "N", "a multiple of the KV heads", 1, 1024, false},
        {"kv-heads", BENCH_OPT_U32, &m->kv_heads, "N", "KV heads", 1, 1024, false},
        {"head-dim", BENCH_OPT_U32, &m->head_dim, "N", "of q and k: a multiple of 8", 8, 256,
         false},
        {"v-head-dim", BENCH_OPT_U32, &m->v_head_dim, "N", "of v and the output; default: head-dim",
         8, 256, false},
        {"dtype", BENCH_OPT_DTYPE, &m->dtype, "T", "of q, k, v and the output: f32, bf16, f16", 0,
         0, false},
        {"kv-dtype", BENCH_OPT_DTYPE, &m->kv_dtype, "T",
         "of the cache: dtype, or f8e4m3 with a 16-bit dtype", 0, 0, false},
        {"block-tokens", BENCH_OPT_U32, &m->block_tokens, "N", "default: the daemon's", 1, 1024,
         false},
        {"window", BENCH_OPT_U32, &m->window, "N", "keys a query sees, its own included; 0 = all",
         0, 1 << 30, false},
        {"window-every", BENCH_OPT_U32, &m->window_every, "N",
         "only layers 0, N, 2N ... have the window; 1 = all", 1, 1024, false},
        {"scale", BENCH_OPT_REAL32, &m->scale, "X", "of the logits; 0 = 1 / sqrt(head-dim)", 0, 1e6,
         false},
        {"softcap", BENCH_OPT_REAL32, &m->softcap, "X", "0 = off", 0, 1e6, false},
        {"rope", BENCH_OPT_TEXT, &o->rope, "THETA|none", "base of the RoPE angles", 0, 0, false},
        {"rope-factor", BENCH_OPT_REAL, &m->rope_factor, "X", "YaRN scaling, from 1 on; 0 = off", 0,
         1e4, false},
        {"rope-interleaved", BENCH_OPT_ON_OFF, &m->rope_interleaved, "on|off",
         "pairs (2p, 2p + 1) instead of two halves", 0, 0, false},
        {"rotary-dim", BENCH_OPT_U32, &m->rotary_dim, "N", "dims that turn; default: head-dim", 2,
         256, false},
        {"sinks", BENCH_OPT_ON_OFF, &m->sinks, "on|off", "a random sink logit per head", 0, 0,
         false},
        {"alibi", BENCH_OPT_ON_OFF, &m->alibi, "on|off", "slopes 2^(-8 (h + 1) / heads)", 0, 0,
         false},
    };
    return append(table, at, rows, sizeof(rows));
}

static uint32_t other_rows(bench_serve_opts *o, bench_opt *table, uint32_t at) {
    const bench_opt rows[] = {
        {"Verification", BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
        {"verify", BENCH_OPT_REAL, &o->verify, "P",
         "recompute this fraction of the output rows in float64; default 0", 0, 1, false},
        {"verify-threads", BENCH_OPT_U32, &o->verify_threads, "N", "default 1", 1, MAX_THREADS,
         false},
        {"Output", BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
        {"json", BENCH_OPT_TEXT, &o->json, "FILE", "write the result there too", 0, 0, false},
        {"help", BENCH_OPT_FLAG, &o->help, NULL, "print this", 0, 0, false},
        {NULL, BENCH_OPT_HEADING, NULL, NULL, NULL, 0, 0, false},
    };
    return append(table, at, rows, sizeof(rows));
}

static void make_table(bench_serve_opts *o, bench_opt table[MAX_FLAGS]) {
    uint32_t at = load_rows(o, table, 0);
    at = model_rows(o, table, at);
    at = other_rows(o, table, at);
    ATTND_ASSERT(at <= MAX_FLAGS);
}

// check_load refuses flags that mean nothing without (or with) a trace.
static attnd_err check_load(const bench_serve_opts *o, const bench_opt *table,
                            attnd_errinfo *info) {
    bool trace = o->load.trace != NULL;
    if (trace && (bench_opts_seen(table, "input") || bench_opts_seen(table, "output"))) {
        return attnd_fail(info, ATTND_EINVAL, "trace",
                          "--trace has lengths: --input and --output do not go with it");
    }
    if (!trace && bench_opts_seen(table, "share-prefixes")) {
        return attnd_fail(info, ATTND_EINVAL, "share-prefixes", "--share-prefixes needs --trace");
    }
    if (o->trace_time && (!trace || bench_opts_seen(table, "rate"))) {
        return attnd_fail(info, ATTND_EINVAL, "trace-time",
                          "--trace-time needs --trace, and no --rate");
    }
    if (bench_opts_seen(table, "speed") && !o->trace_time) {
        return attnd_fail(info, ATTND_EINVAL, "speed", "--speed needs --trace-time");
    }
    if (bench_opts_seen(table, "requests") && bench_opts_seen(table, "duration")) {
        return attnd_fail(info, ATTND_EINVAL, "duration", "--requests or --duration, not both");
    }
    if (bench_opts_seen(table, "verify-threads") && o->verify == 0) {
        return attnd_fail(info, ATTND_EINVAL, "verify-threads", "--verify-threads needs --verify");
    }
    return ATTND_OK;
}

static attnd_err set_rope(bench_serve_opts *o, attnd_errinfo *info) {
    if (o->rope == NULL) {
        return ATTND_OK;
    }
    char *end;
    double theta = strtod(o->rope, &end);
    if (strcmp(o->rope, "none") == 0) {
        theta = 0;
        o->model.rope_factor = 0;
    } else if (end == o->rope || *end != '\0' || !(theta > 1 && theta <= 1e12)) {
        return attnd_fail(info, ATTND_EINVAL, "rope",
                          "--rope: \"%.40s\" is neither none nor a number above 1", o->rope);
    }
    o->model.rope_theta = theta;
    return ATTND_OK;
}

// check_model refuses flags of what the model does not have.
static attnd_err check_model(const bench_serve_opts *o, const bench_opt *table,
                             attnd_errinfo *info) {
    static const char *const of_rope[] = {"rope-factor", "rope-interleaved", "rotary-dim"};
    for (int i = 0; i < 3; i++) {
        if (o->model.rope_theta == 0 && bench_opts_seen(table, of_rope[i])) {
            return attnd_fail(info, ATTND_EINVAL, of_rope[i], "--%s needs --rope THETA",
                              of_rope[i]);
        }
    }
    if (o->model.window == 0 && bench_opts_seen(table, "window-every")) {
        return attnd_fail(info, ATTND_EINVAL, "window-every", "--window-every needs --window");
    }
    return ATTND_OK;
}

static attnd_err set_transport(bench_serve_opts *o, attnd_errinfo *info) {
    static const char *const names[] = {
        [ATTND_TRANSPORT_AUTO] = "auto",
        [ATTND_TRANSPORT_NNG] = "nng",
        [ATTND_TRANSPORT_RING] = "ring",
    };
    for (int i = ATTND_TRANSPORT_AUTO; i <= ATTND_TRANSPORT_RING; i++) {
        if (strcmp(o->transport_name, names[i]) == 0) {
            o->transport = (attnd_transport)i;
            return ATTND_OK;
        }
    }
    return attnd_fail(info, ATTND_EINVAL, "transport", "--transport: \"%.40s\" is none of %s",
                      o->transport_name, "nng, ring and auto");
}

static attnd_err set_length(bench_length *out, const char *flag, const char *text,
                            attnd_errinfo *info) {
    attnd_errinfo why;
    attnd_err err = bench_length_parse(out, text, &why);
    return err ? attnd_fail(info, err, flag, "--%s: %s", flag, why.text) : ATTND_OK;
}

static attnd_err set_load(bench_serve_opts *o, const bench_opt *table, attnd_errinfo *info) {
    attnd_err err = set_length(&o->load.input, "input", o->input, info);
    if (err == ATTND_OK) {
        err = set_length(&o->load.output, "output", o->output, info);
    }
    o->load.endless = bench_opts_seen(table, "duration");
    o->load.num_requests = o->requests;
    if (o->requests == 0 && o->load.trace == NULL) {
        o->load.num_requests = DEFAULT_REQUESTS;
    }
    o->load.rate = o->rate;
    o->load.speed = o->speed;
    o->load.arrival = o->trace_time ? BENCH_TRACE_TIME : o->rate > 0 ? BENCH_POISSON : BENCH_CLOSED;
    return err;
}

// find_preset looks for --preset in advance.
static const char *find_preset(int argc, char *const *argv) {
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--preset=", 9) == 0) {
            return argv[i] + 9;
        }
        if (strcmp(argv[i], "--preset") == 0 && i + 1 < argc) {
            return argv[i + 1];
        }
    }
    return NULL;
}

attnd_err bench_serve_parse(bench_serve_opts *o, int argc, char *const *argv, attnd_errinfo *info) {
    bench_opt table[MAX_FLAGS];
    *o = defaults;
    make_table(o, table);
    const char *preset = find_preset(argc, argv);
    attnd_err err = bench_model_preset(&o->model, preset != NULL ? preset : "tiny", info);
    if (err == ATTND_OK) {
        err = bench_opts_parse(table, argc, argv, info);
    }
    if (err != ATTND_OK || o->help) {
        return err;
    }
    if (o->connect == NULL || o->preset == NULL) {
        return attnd_fail(info, ATTND_EINVAL, "connect",
                          "--connect URL and --preset NAME are needed");
    }
    err = check_load(o, table, info);
    if (err == ATTND_OK) {
        err = set_transport(o, info);
    }
    if (err == ATTND_OK) {
        err = set_rope(o, info);
    }
    if (err == ATTND_OK) {
        err = check_model(o, table, info);
    }
    if (err == ATTND_OK) {
        err = set_load(o, table, info);
    }
    if (err == ATTND_OK) {
        err = bench_model_prepare(&o->model, o->load.seed, info);
    }
    return err;
}

void bench_serve_help(FILE *out) {
    bench_serve_opts o = defaults;
    bench_opt table[MAX_FLAGS];
    make_table(&o, table);
    fprintf(out, "usage: attn-bench serve --connect URL --preset NAME [FLAGS]\n");
    bench_opts_help(table, out);
}
