#include "tests/load/bench_case.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attn.h"
#include "tests/load/bench_math.h"

static const char *const kinds[BENCH_NUM_KINDS] = {"decode", "ragged", "prefill", "full"};

enum { NO_VALUE = -1, DEFAULT_BLOCK = 64, DEFAULT_HEAD_DIM = 128, DEFAULT_RAGGED = 128 };

// key is a word that a number follows.
typedef struct key {
    const char *name;
    int32_t *value;
    int32_t hi;
} key;

static attnd_err read_number(const char *word, int32_t lo, int32_t hi, const char *name,
                             int32_t *out, attnd_errinfo *info) {
    char *end = NULL;
    long value = word ? strtol(word, &end, 10) : 0;
    if (!word || end == word || *end != '\0' || value < lo || value > hi) {
        return attnd_fail(info, ATTND_EINVAL, name, "%s \"%s\" is not a number from %d to %d", name,
                          word ? word : "", lo, hi);
    }
    *out = (int32_t)value;
    return ATTND_OK;
}

static attnd_err read_heads(bench_case *c, char *word, attnd_errinfo *info) {
    char *slash = word ? strchr(word, '/') : NULL;
    if (!slash) {
        return attnd_fail(info, ATTND_EINVAL, "heads", "\"%s\" is not Q_HEADS/KV_HEADS",
                          word ? word : "");
    }
    *slash = '\0';
    attnd_err err = read_number(word, 1, ATTN_MAX_Q_HEADS, "q_heads", &c->q_heads, info);
    if (err == ATTND_OK) {
        err = read_number(slash + 1, 1, c->q_heads, "kv_heads", &c->kv_heads, info);
    }
    if (err == ATTND_OK && c->q_heads % c->kv_heads != 0) {
        err = attnd_fail(info, ATTND_EINVAL, "heads", "q_heads %d is no multiple of kv_heads %d",
                         c->q_heads, c->kv_heads);
    }
    return err;
}

static attnd_err read_head(bench_case *c, char **rest, attnd_errinfo *info) {
    char *word = strtok_r(NULL, " ", rest);
    attnd_dtype dtype = word ? attnd_dtype_parse(word) : ATTND_NUM_DTYPES;
    if (dtype == ATTND_NUM_DTYPES) {
        return attnd_fail(info, ATTND_EINVAL, "dtype", "\"%s\" is no storage type",
                          word ? word : "");
    }
    c->kv_dtype = dtype;
    c->q_dtype = dtype == ATTND_F8E4M3 ? ATTND_BF16 : dtype;
    return read_heads(c, strtok_r(NULL, " ", rest), info);
}

static attnd_err read_keys(bench_case *c, char **rest, attnd_errinfo *info) {
    const key keys[] = {
        {"batch", &c->batch, BENCH_MAX_BATCH},
        {"kv_len", &c->kv_len, 1 << 24},
        {"q_len", &c->q_len, 1 << 20},
        {"new", &c->new_len, 1 << 20},
        {"block", &c->block_tokens, 1 << 20},
        {"head_dim", &c->head_dim, ATTN_MAX_HEAD_DIM},
        {"fused", &c->fused, 1},
    };
    char *word;
    while ((word = strtok_r(NULL, " ", rest)) != NULL) {
        const key *k = NULL;
        for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
            k = strcmp(word, keys[i].name) == 0 ? &keys[i] : k;
        }
        if (!k) {
            return attnd_fail(info, ATTND_EINVAL, "case", "no key \"%s\"", word);
        }
        if (*k->value != NO_VALUE) {
            return attnd_fail(info, ATTND_EINVAL, k->name, "%s is given twice", k->name);
        }
        attnd_err err = read_number(strtok_r(NULL, " ", rest), 1, k->hi, k->name, k->value, info);
        if (err != ATTND_OK) {
            return err;
        }
    }
    return ATTND_OK;
}

static void set_default(int32_t *value, int32_t to) {
    *value = *value == NO_VALUE ? to : *value;
}

// check_lengths fills what was left out, and refuses what does not go together.
static attnd_err check_lengths(bench_case *c, attnd_errinfo *info) {
    set_default(&c->batch, c->kind == BENCH_RAGGED ? DEFAULT_RAGGED : 1);
    set_default(&c->head_dim, DEFAULT_HEAD_DIM);
    set_default(&c->block_tokens, DEFAULT_BLOCK);
    if (c->head_dim % 8 != 0) {
        return attnd_fail(info, ATTND_ENOTSUP, "head_dim", "head_dim %d is no multiple of 8",
                          c->head_dim);
    }
    if (bench_case_is_prefill(c) && c->q_len == NO_VALUE) {
        return attnd_fail(info, ATTND_EINVAL, "q_len", "a %s needs q_len", kinds[c->kind]);
    }
    set_default(&c->q_len, 1);
    set_default(&c->new_len, 0);
    set_default(&c->fused, 0);
    if (c->new_len > c->q_len) {
        return attnd_fail(info, ATTND_EINVAL, "new", "new %d is above q_len %d", c->new_len,
                          c->q_len);
    }
    if (bench_case_is_prefill(c)) {
        set_default(&c->kv_len, c->q_len);
    }
    if (c->kv_len == NO_VALUE) {
        return attnd_fail(info, ATTND_EINVAL, "kv_len", "a %s needs kv_len", kinds[c->kind]);
    }
    int64_t least = c->kind == BENCH_RAGGED ? (int64_t)c->q_len * c->batch : c->q_len;
    if (c->kv_len < least) {
        return attnd_fail(info, ATTND_EINVAL, "kv_len", "kv_len %d is below %lld", c->kv_len,
                          (long long)least);
    }
    return ATTND_OK;
}

attnd_err bench_case_parse(bench_case *out, const char *text, attnd_errinfo *info) {
    char copy[BENCH_CASE_BYTES];
    if (snprintf(copy, sizeof(copy), "%s", text) >= (int)sizeof(copy)) {
        return attnd_fail(info, ATTND_EINVAL, "case", "a case has at most %d characters",
                          BENCH_CASE_BYTES - 1);
    }
    bench_case c = {.kind = BENCH_NUM_KINDS,
                    .head_dim = NO_VALUE,
                    .block_tokens = NO_VALUE,
                    .batch = NO_VALUE,
                    .kv_len = NO_VALUE,
                    .q_len = NO_VALUE,
                    .new_len = NO_VALUE,
                    .fused = NO_VALUE};
    char *rest = NULL;
    char *word = strtok_r(copy, " ", &rest);
    for (int i = 0; i < BENCH_NUM_KINDS; i++) {
        c.kind = word && strcmp(word, kinds[i]) == 0 ? (bench_kind)i : c.kind;
    }
    if (c.kind == BENCH_NUM_KINDS) {
        return attnd_fail(info, ATTND_EINVAL, "kind",
                          "\"%s\" is not decode, ragged, prefill or full", word ? word : "");
    }
    attnd_err err = read_head(&c, &rest, info);
    err = err == ATTND_OK ? read_keys(&c, &rest, info) : err;
    err = err == ATTND_OK ? check_lengths(&c, info) : err;
    if (err == ATTND_OK) {
        *out = c;
    }
    return err;
}

// add_key writes " KEY N" behind what out holds, unless value is the default.
static void add_key(char *out, const char *name, int32_t value, int32_t standard) {
    size_t used = strlen(out);
    if (value != standard) {
        snprintf(out + used, BENCH_CASE_BYTES - used, " %s %d", name, value);
    }
}

void bench_case_name(const bench_case *c, char out[BENCH_CASE_BYTES]) {
    bool is_prefill = bench_case_is_prefill(c);
    snprintf(out, BENCH_CASE_BYTES, "%s %s %d/%d", kinds[c->kind], attnd_dtype_name(c->kv_dtype),
             c->q_heads, c->kv_heads);
    add_key(out, "head_dim", c->head_dim, DEFAULT_HEAD_DIM);
    add_key(out, "block", c->block_tokens, DEFAULT_BLOCK);
    add_key(out, "batch", c->batch, c->kind == BENCH_RAGGED ? NO_VALUE : 1);
    add_key(out, "q_len", c->q_len, is_prefill ? NO_VALUE : 1);
    add_key(out, "kv_len", c->kv_len, is_prefill ? c->q_len : NO_VALUE);
    add_key(out, "new", c->new_len, 0);
    add_key(out, "fused", c->fused, 0);
}

bool bench_case_matches(const char *name, const char *pattern) {
    if (!pattern) {
        return true;
    }
    return strpbrk(pattern, "*?[") ? fnmatch(pattern, name, 0) == 0 : strstr(name, pattern) != NULL;
}

// normal is about a standard normal variate: the sum of 12 uniform ones of variance 1, over its
// deviation.
static double normal(uint64_t i) {
    float x[12];
    double sum = 0;
    bench_uniform(x, bench_hash64(i), 0, 12);
    for (int k = 0; k < 12; k++) {
        sum += (double)x[k];
    }
    return sum / sqrt(12);
}

static double weight(const bench_case *c, int32_t i) {
    return c->weights ? c->weights[i] : exp(normal((uint64_t)i));
}

void bench_case_lengths(const bench_case *c, int32_t *lengths) {
    if (c->kind != BENCH_RAGGED) {
        for (int32_t i = 0; i < c->batch; i++) {
            lengths[i] = c->kv_len;
        }
        return;
    }
    double sum = 0;
    for (int32_t i = 0; i < c->batch; i++) {
        sum += weight(c, i);
    }
    // q_len keys each, and the others by weight; what rounding down leaves goes to the first.
    int32_t share = c->kv_len - c->q_len * c->batch;
    int32_t left = share;
    for (int32_t i = 0; i < c->batch; i++) {
        int32_t extra = (int32_t)((double)share * weight(c, i) / sum);
        lengths[i] = c->q_len + extra;
        left -= extra;
    }
    lengths[0] += left;
}

// total_keys is the sum of the lengths.
static int64_t total_keys(const bench_case *c) {
    return c->kind == BENCH_RAGGED ? c->kv_len : (int64_t)c->kv_len * c->batch;
}

double bench_case_flops(const bench_case *c) {
    // Query token i sees kv_len - q_len + i + 1 keys, or all.
    double q = c->q_len;
    double hidden = c->kind == BENCH_FULL ? 0 : (double)c->batch * q * (q - 1) / 2;
    double pairs = q * (double)total_keys(c) - hidden;
    return 4 * pairs * c->q_heads * c->head_dim;
}

uint64_t bench_case_kv_bytes(const bench_case *c) {
    return (uint64_t)total_keys(c) * (uint64_t)(2 * c->kv_heads * c->head_dim) *
           attnd_dtype_bytes(c->kv_dtype);
}
