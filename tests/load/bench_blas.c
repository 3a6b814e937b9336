// The blocks of the last tokens cost most and are taken first.  The query heads of a KV head are
// copied together, so that each product has block * group rows.
#include "tests/load/bench_blas.h"

#include <dlfcn.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_simd.h"
#include "tests/load/bench_team.h"

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 }; // of CBLAS

typedef void (*sgemm_fn)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc);

static struct {
    bool is_tried;
    sgemm_fn sgemm;
    char name[160];
} blas;

// symbol reads a function's address; ISO C has no cast from an object's pointer.
static bool symbol(void *library, const char *name, void *to) {
    void *at = dlsym(library, name);
    memcpy(to, &at, sizeof(at));
    return at != NULL;
}

bool bench_blas_open(void) {
    if (blas.is_tried) {
        return blas.sgemm != NULL;
    }
    blas.is_tried = true;
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    void (*set_threads)(int) = NULL;
    char *(*config)(void) = NULL;
    if (!library || !symbol(library, "openblas_set_num_threads", &set_threads)) {
        return false;
    }
    set_threads(1);
    snprintf(blas.name, sizeof(blas.name), "OpenBLAS");
    if (symbol(library, "openblas_get_config", &config)) {
        snprintf(blas.name, sizeof(blas.name), "%.150s", config());
    }
    return symbol(library, "cblas_sgemm", &blas.sgemm);
}

const char *bench_blas_name(void) {
    return blas.name;
}

// The exponential: 2^n * 2^r as in bench_ceil_loops.h, over an array.
BODY void bench_blas_softmax_body(uint32_t level, float *x, int32_t num, float scale) {
    (void)level;
    const float magic = 12582912.0f;
    float part[16];
    for (int lane = 0; lane < 16; lane++) {
        part[lane] = x[0];
    }
    int32_t i = 0;
    for (; i + 16 <= num; i += 16) {
        for (int lane = 0; lane < 16; lane++) {
            part[lane] = x[i + lane] > part[lane] ? x[i + lane] : part[lane];
        }
    }
    for (; i < num; i++) {
        part[0] = x[i] > part[0] ? x[i] : part[0];
    }
    float max = part[0];
    for (int lane = 1; lane < 16; lane++) {
        max = part[lane] > max ? part[lane] : max;
    }
    memset(part, 0, sizeof(part));
    for (i = 0; i < num; i += 16) {
        for (int lane = 0; lane < 16; lane++) {
            float y = (x[i + lane] - max) * scale;
            y = y > -126.0f ? y : -126.0f;
            float shifted = y + magic;
            float r = y - (shifted - magic);
            float e = r * 1.3333558e-3f + 9.6181291e-3f;
            e = e * r + 5.5504109e-2f;
            e = e * r + 2.4022651e-1f;
            e = e * r + 6.9314718e-1f;
            e = e * r + 1.0f;
            uint32_t bits, power;
            memcpy(&bits, &e, sizeof(bits));
            memcpy(&power, &shifted, sizeof(power));
            bits += power << 23;
            memcpy(&e, &bits, sizeof(e));
            e = i + lane < num ? e : 0.0f;
            x[i + lane] = e;
            part[lane] += e;
        }
    }
    float sum = 0;
    for (int lane = 0; lane < 16; lane++) {
        sum += part[lane];
    }
    float inverse = 1.0f / sum;
    for (i = 0; i < num; i++) {
        x[i] *= inverse;
    }
}

MULTIVERSION(bench_blas_softmax, (float *x, int32_t num, float scale), x, num, scale)

typedef struct job {
    const bench_blas_case *c;
    _Atomic int32_t next;
    char *memory; // of all threads
    size_t bytes; // of a thread
} job;

static size_t row_floats(const bench_blas_case *c) {
    return ((size_t)c->tokens + 31) / 16 * 16; // a softmax writes whole sixteens
}

// copy_rows copies query heads of a group between [tokens, q_heads, head_dim] and [rows, head_dim].
static void copy_rows(const bench_blas_case *c, float *packed, float *spread, const float *from,
                      int32_t first, int32_t count, int32_t head) {
    size_t group = (size_t)(c->q_heads / c->kv_heads) * (size_t)c->head_dim;
    for (int32_t t = 0; t < count; t++) {
        size_t at =
            (size_t)(first + t) * (size_t)c->q_heads * (size_t)c->head_dim + (size_t)head * group;
        if (spread) {
            memcpy(spread + at, packed + (size_t)t * group, group * sizeof(float));
        } else {
            memcpy(packed + (size_t)t * group, from + at, group * sizeof(float));
        }
    }
}

static void attend(const bench_blas_case *c, int32_t head, int32_t first, float *memory) {
    int32_t count = c->tokens - first < c->block ? c->tokens - first : c->block;
    int32_t group = c->q_heads / c->kv_heads;
    int32_t rows = count * group;
    int32_t keys = first + count;
    int32_t dim = c->head_dim;
    int32_t width = (int32_t)row_floats(c);
    float scale = 1.4426950f / sqrtf((float)dim);
    float *q = memory;
    float *s = q + (size_t)c->block * (size_t)group * (size_t)dim;
    const float *k = c->k + (size_t)head * (size_t)c->tokens * (size_t)dim;
    const float *v = c->v + (size_t)head * (size_t)c->tokens * (size_t)dim;
    copy_rows(c, q, NULL, c->q, first, count, head);
    blas.sgemm(ROW_MAJOR, NO_TRANS, TRANS, rows, keys, dim, 1, q, dim, k, dim, 0, s, width);
    for (int32_t r = 0; r < rows; r++) {
        float *row = s + (size_t)r * (size_t)width;
        int32_t seen = first + r / group + 1;
        bench_blas_softmax(row, seen, scale);
        memset(row + seen, 0, (size_t)(keys - seen) * sizeof(float));
    }
    blas.sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, rows, dim, keys, 1, s, width, v, dim, 0, q, dim);
    copy_rows(c, q, c->out, NULL, first, count, head);
}

static void decode(void *arg, uint32_t worker) {
    job *j = arg;
    const bench_blas_case *c = j->c;
    int32_t group = c->q_heads / c->kv_heads;
    int32_t dim = c->head_dim;
    int32_t width = (int32_t)row_floats(c);
    float scale = 1.4426950f / sqrtf((float)dim);
    float *s = (void *)(j->memory + worker * j->bytes);
    for (int32_t head; (head = atomic_fetch_add(&j->next, 1)) < c->kv_heads;) {
        const float *q = c->q + (size_t)(head * group) * (size_t)dim;
        const float *k = c->k + (size_t)head * (size_t)c->tokens * (size_t)dim;
        const float *v = c->v + (size_t)head * (size_t)c->tokens * (size_t)dim;
        float *out = c->out + (size_t)(head * group) * (size_t)dim;
        blas.sgemm(ROW_MAJOR, NO_TRANS, TRANS, group, c->tokens, dim, 1, q, dim, k, dim, 0, s,
                   width);
        for (int32_t r = 0; r < group; r++) {
            bench_blas_softmax(s + (size_t)r * (size_t)width, c->tokens, scale);
        }
        blas.sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, group, dim, c->tokens, 1, s, width, v, dim, 0,
                   out, dim);
    }
}

static void prefill(void *arg, uint32_t worker) {
    job *j = arg;
    const bench_blas_case *c = j->c;
    int32_t blocks = (c->tokens + c->block - 1) / c->block;
    float *memory = (void *)(j->memory + worker * j->bytes);
    for (int32_t i; (i = atomic_fetch_add(&j->next, 1)) < blocks * c->kv_heads;) {
        attend(c, i % c->kv_heads, (blocks - 1 - i / c->kv_heads) * c->block, memory);
    }
}

// run gives each thread room for rows of scores and as many query rows.
static double run(const bench_blas_case *c, size_t rows, bench_team_fn fn, uint32_t threads) {
    job j = {.c = c};
    j.bytes = (rows * ((size_t)c->head_dim + row_floats(c)) * sizeof(float) + 4095) / 4096 * 4096;
    j.memory = aligned_alloc(4096, threads * j.bytes);
    if (!j.memory) {
        fprintf(stderr, "attn-bench: no memory for OpenBLAS\n");
        exit(1);
    }
    memset(j.memory, 0, threads * j.bytes); // resident before the time begins
    double seconds = bench_team_run(fn, &j, threads);
    free(j.memory);
    return seconds;
}

double bench_blas_prefill(const bench_blas_case *c, uint32_t threads) {
    return run(c, (size_t)c->block * (size_t)(c->q_heads / c->kv_heads), prefill, threads);
}

double bench_blas_decode(const bench_blas_case *c, uint32_t threads) {
    return run(c, (size_t)(c->q_heads / c->kv_heads), decode, threads);
}
