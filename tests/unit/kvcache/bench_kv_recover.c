// What durability costs.  A ledger with a million blocks in 64 sequences, each in blocks of its
// own, is recovered (the kernel's page cache holds it, as after a kill); and a decode step of 8
// sequences at 1024 tokens, llama-3-8b's geometry, is opened and committed with its replies kept:
// all that kvcache does for it, checksums and redo records included.  One line a case, the median
// of 9 runs and the best.  With --check the exit status is 1 when the best recovery takes longer
// than 0.5 s.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kvcache/kv_cache.h"

enum { SEQS = 64, SEQ_BLOCKS = 16384, BLOCK_TOKENS = 16, RUNS = 9, BATCH = 8, STEPS = 900 };
#define TARGET_MS 500.0

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void must(attnd_err err, const attnd_errinfo *info) {
    if (err) {
        fprintf(stderr, "bench_kv_recover: %s\n", info->text);
        exit(2);
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static kv_opts opts_of(void) {
    return (kv_opts){
        .slab_bytes = 32 << 20,
        .max_blocks = SEQS * SEQ_BLOCKS,
        .max_seqs = 4096,
        .max_seq_blocks = SEQ_BLOCKS,
        .max_models = 64,
        .max_tenants = 16,
        .max_sessions = 544,
        .max_steps = 256,
        .max_step_seqs = 1024,
    };
}

static uint64_t request = 1;

// step appends num tokens to sequences [n].
static void step(kv_cache *kv, uint64_t session, uint32_t model, const uint64_t *seqs, uint32_t n,
                 uint32_t num) {
    attnd_errinfo info = {.text = ""};
    kv_step_seq in[BATCH];
    uint32_t accepted[BATCH], num_copies;
    uint64_t handle;
    const kv_copy *copies;
    bool may_wait;
    for (uint32_t i = 0; i < n; i++) {
        in[i] = (kv_step_seq){.seq = seqs[i], .new_len = num};
        accepted[i] = num;
    }
    must(kv_step_open(kv, (kv_request){session, request++}, model, in, n, &handle, &copies,
                      &num_copies, &may_wait, &info),
         &info);
    must(kv_step_commit(kv, (kv_request){session, request++}, handle, accepted, n, &info), &info);
}

// make opens a model of the group and num sequences of len tokens each.
static kv_cache *make(kv_arena *arena, const kv_group_spec *group, uint32_t num, uint32_t len,
                      uint64_t *session, uint32_t *model, uint64_t *seqs) {
    attnd_errinfo info = {.text = ""};
    kv_opts opts = opts_of();
    kv_cache *kv;
    uint32_t tenant;
    kv_model_spec spec = {.name = "m", .num_groups = 1, .groups = {*group}};
    const uint8_t secret[KV_SECRET_BYTES] = {1};
    must(kv_create(&kv, arena, &opts, &info), &info);
    must(kv_tenant_set(kv, "default", 0, &tenant), &info);
    must(kv_model_open(kv, &spec, model, &info), &info);
    must(kv_session_open(kv, tenant, secret, session), &info);
    for (uint32_t i = 0; i < num; i++) {
        must(kv_seq_create(kv, (kv_request){*session, request++}, *model, &seqs[i], &info), &info);
        step(kv, *session, *model, &seqs[i], 1, len);
    }
    return kv;
}

static double recovery(void) {
    static uint64_t seqs[SEQS];
    const kv_group_spec group = {1, 1, 512, 512, BLOCK_TOKENS, -1};
    kv_arena arena = {.bytes = (uint64_t)SEQS * SEQ_BLOCKS * 16384, .fd = -1, .on_device = true};
    uint64_t session;
    uint32_t model;
    kv_cache *kv = make(&arena, &group, SEQS, SEQ_BLOCKS * BLOCK_TOKENS, &session, &model, seqs);
    double ms[RUNS];
    kv_recovered found = {0};
    for (int i = 0; i < RUNS; i++) {
        attnd_errinfo info = {.text = ""};
        kv_opts opts = opts_of();
        int fd = dup(kv_ledger_fd(kv));
        kv_free(kv);
        double from = now_us();
        must(kv_recover(&kv, &arena, &opts, fd, 0, &found, &info), &info);
        ms[i] = (now_us() - from) / 1e3;
    }
    kv_free(kv);
    qsort(ms, RUNS, sizeof(ms[0]), by_value);
    printf("recover blocks=%llu seqs=%u | %.1f ms | best %.1f ms\n",
           (unsigned long long)found.blocks, found.seqs, ms[RUNS / 2], ms[0]);
    return ms[0];
}

static void decode_step(void) {
    static uint64_t seqs[BATCH];
    const kv_group_spec group = {32, 8, 256, 256, 64, -1}; // llama-3-8b, bf16
    kv_arena arena = {.bytes = UINT64_C(8) << 30, .fd = -1, .on_device = true};
    uint64_t session;
    uint32_t model;
    kv_cache *kv = make(&arena, &group, BATCH, 1024, &session, &model, seqs);
    double us[RUNS];
    for (int i = 0; i < RUNS; i++) {
        double from = now_us();
        for (int n = 0; n < STEPS / RUNS; n++) {
            step(kv, session, model, seqs, BATCH, 1);
        }
        us[i] = (now_us() - from) / (STEPS / RUNS);
    }
    kv_free(kv);
    qsort(us, RUNS, sizeof(us[0]), by_value);
    printf("decode_step seqs=%d kv=1024 model=llama-3-8b | %.2f us in kvcache | best %.2f us\n",
           BATCH, us[RUNS / 2], us[0]);
}

int main(int argc, char **argv) {
    bool check = argc > 1 && strcmp(argv[1], "--check") == 0;
    double ms = recovery();
    decode_step();
    return check && ms > TARGET_MS;
}
