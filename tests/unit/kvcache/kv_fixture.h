// kv_fixture is a small cache over a small arena: what most tests of kvcache start from.
#ifndef ATTND_TESTS_KV_FIXTURE_H
#define ATTND_TESTS_KV_FIXTURE_H

#include <stdio.h>
#include <string.h>

#include "kvcache/kv_cache.h"
#include "kvcache/kv_ledger.h"
#include "tests/check_main.h"

// Blocks of one layer, one head, 4 tokens of 32 + 32 bytes: 256 bytes, 16 a slab, 128 in the arena.
enum {
    FIX_BLOCK_TOKENS = 4,
    FIX_SLAB_BLOCKS = 16,
    FIX_SLABS = 8,
    FIX_BLOCKS = FIX_SLABS * FIX_SLAB_BLOCKS,
};

typedef struct kv_fixture {
    char *memory;
    kv_arena arena;
    kv_cache *kv;
    uint32_t tenant, model;
    uint64_t session;
    uint64_t next_request;
    attnd_errinfo info;
} kv_fixture;

static inline kv_opts fix_opts(void) {
    return (kv_opts){
        .slab_bytes = FIX_SLAB_BLOCKS * KV_BLOCK_UNIT,
        .max_blocks = FIX_BLOCKS,
        .max_seqs = 64,
        .max_seq_blocks = 32,
        .max_models = 4,
        .max_tenants = 4,
        .max_sessions = 4,
        .max_steps = 8,
        .max_step_seqs = 8,
    };
}

static inline kv_group_spec fix_group(uint32_t layers) {
    return (kv_group_spec){
        .layers = layers,
        .kv_heads = 1,
        .k_row_bytes = 32,
        .v_row_bytes = 32,
        .block_tokens = FIX_BLOCK_TOKENS,
        .window_left = -1,
    };
}

static inline kv_model_spec fix_spec(const char *name, uint32_t tenant) {
    kv_model_spec spec = {.tenant = tenant, .num_groups = 1, .groups = {fix_group(1)}};
    snprintf(spec.name, sizeof(spec.name), "%s", name);
    return spec;
}

// fix_open makes the cache alone; fix_init also tenant "t" (quota 0), model "m" and a session.
static inline void fix_open(kv_fixture *f, const kv_opts *opts, uint64_t arena_bytes) {
    *f = (kv_fixture){.next_request = 1};
    f->memory = aligned_alloc(KV_BLOCK_UNIT, arena_bytes);
    ck_assert_ptr_nonnull(f->memory);
    memset(f->memory, 0xee, arena_bytes);
    f->arena =
        (kv_arena){.base = f->memory, .bytes = arena_bytes, .fd = -1, .ops = &kv_arena_host_ops};
    ATTND_CK_OK(kv_create(&f->kv, &f->arena, opts, &f->info));
}

static inline void fix_init_opts(kv_fixture *f, const kv_opts *opts) {
    fix_open(f, opts, (uint64_t)FIX_BLOCKS * KV_BLOCK_UNIT);
    ATTND_CK_OK(kv_tenant_set(f->kv, "t", 0, &f->tenant));
    kv_model_spec spec = fix_spec("m", f->tenant);
    ATTND_CK_OK(kv_model_open(f->kv, &spec, &f->model, &f->info));
    ATTND_CK_OK(
        kv_session_open(f->kv, f->tenant, (const uint8_t[KV_SECRET_BYTES]){1}, &f->session));
}

static inline void fix_init(kv_fixture *f) {
    kv_opts opts = fix_opts();
    fix_init_opts(f, &opts);
}

// fix_fini checks that the books balance, then frees all.
static inline void fix_fini(kv_fixture *f) {
    bool good = kv_check_full(f->kv, &f->info);
    ck_assert_msg(good, "%s", f->info.text);
    ck_assert(kv_check_fast(f->kv));
    kv_free(f->kv);
    free(f->memory);
}

static inline kv_request fix_rq(kv_fixture *f) {
    return (kv_request){.session = f->session, .request = f->next_request++};
}

static inline uint64_t fix_seq(kv_fixture *f) {
    uint64_t seq;
    ATTND_CK_OK(kv_seq_create(f->kv, fix_rq(f), f->model, &seq, &f->info));
    return seq;
}

// fix_step opens a step of one sequence.
static inline attnd_err fix_step(kv_fixture *f, uint64_t seq, uint32_t new_len, uint32_t reserve,
                                 uint64_t *step, bool *may_wait) {
    kv_step_seq s = {.seq = seq, .new_len = new_len, .reserve = reserve};
    const kv_copy *copies;
    uint32_t num;
    return kv_step_open(f->kv, fix_rq(f), f->model, &s, 1, step, &copies, &num, may_wait, &f->info);
}

static inline void fix_commit(kv_fixture *f, uint64_t step, uint32_t accepted) {
    ATTND_CK_OK(kv_step_commit(f->kv, fix_rq(f), step, &accepted, 1, &f->info));
}

// fix_append commits num tokens to a sequence.
static inline void fix_append(kv_fixture *f, uint64_t seq, uint32_t num) {
    uint64_t step;
    bool may_wait;
    ATTND_CK_OK(fix_step(f, seq, num, 0, &step, &may_wait));
    fix_commit(f, step, num);
}

static inline uint32_t fix_in_use(const kv_fixture *f) {
    kv_info info;
    kv_get_info(f->kv, &info);
    return info.in_use;
}

static inline uint32_t fix_committed(const kv_fixture *f, uint64_t seq) {
    kv_seq_info info;
    ATTND_CK_OK(kv_seq_get(f->kv, f->session, seq, &info));
    return info.committed;
}

#endif
