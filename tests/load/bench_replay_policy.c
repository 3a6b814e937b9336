// The replay against kvcache: a step a prompt, with token ids, then the sequence is freed.
//
// A block of the trace is a block of 512 tokens whose ids are all its number.  Since a hit leaves
// at least one token to compute, each prompt has one more behind its full blocks, whatever the
// trace says of the rest; the commit does not accept it.  So the arena has a block more than the
// cache.
#include <stdlib.h>

#include "kvcache/kv_cache.h"
#include "tests/load/bench_replay_prompts.h"

typedef struct player {
    const bench_replay *r;
    kv_cache *kv;
    uint32_t model;
    uint64_t session;
    uint32_t *tokens; // of a prompt
} player;

// One byte a token of K and of V: nobody looks at them.
static const kv_group_spec group = {
    .layers = 1,
    .kv_heads = 1,
    .k_row_bytes = 1,
    .v_row_bytes = 1,
    .block_tokens = BENCH_TRACE_BLOCK,
    .window_left = -1,
};

static attnd_err set_up(player *p, kv_arena *arena, uint32_t blocks, uint32_t policy,
                        attnd_errinfo *info) {
    *arena = (kv_arena){.bytes = (blocks + UINT64_C(1)) * kv_block_bytes(&group),
                        .fd = -1,
                        .ops = &kv_arena_host_ops};
    const kv_opts opts = {
        .slab_bytes = arena->bytes,
        .max_blocks = blocks + 1,
        .max_seqs = 1,
        .max_seq_blocks = p->r->info.longest + 1,
        .max_models = 1,
        .max_tenants = 1,
        .max_sessions = 1,
        .max_steps = 1,
        .max_step_seqs = 1,
        .prefix_blocks = blocks,
        .prefix_block_tokens = BENCH_TRACE_BLOCK,
        .policy = policy,
    };
    kv_model_spec spec = {.name = "trace", .num_groups = 1, .groups = {group}};
    p->tokens = malloc((p->r->info.longest + UINT64_C(1)) * BENCH_TRACE_BLOCK * sizeof(*p->tokens));
    if (!p->tokens) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory to replay a trace");
    }
    attnd_err err = kv_create(&p->kv, arena, &opts, info);
    if (!err) {
        err = kv_tenant_set(p->kv, "trace", 0, &spec.tenant);
    }
    if (!err) {
        err = kv_model_open(p->kv, &spec, &p->model, info);
    }
    if (!err) {
        err = kv_session_open(p->kv, spec.tenant, (const uint8_t[KV_SECRET_BYTES]){0}, &p->session);
    }
    return err;
}

// play makes a prompt's step; *hit gets the full blocks that were found.
static attnd_err play(player *p, const bench_replay_prompt *prompt, uint32_t *hit,
                      attnd_errinfo *info) {
    const kv_request rq = {.session = p->session};
    const uint32_t len = prompt->blocks * BENCH_TRACE_BLOCK, *tokens = p->tokens;
    kv_step_seq in = {.new_len = len + 1, .tokens = tokens};
    const kv_copy *copies;
    uint32_t num_copies;
    uint64_t step;
    bool may_wait;
    for (uint32_t t = 0; t < len; t++) {
        p->tokens[t] = p->r->blocks[prompt->first + t / BENCH_TRACE_BLOCK];
    }
    p->tokens[len] = UINT32_MAX;
    attnd_err err = kv_seq_create(p->kv, rq, p->model, &in.seq, info);
    if (!err) {
        err =
            kv_step_open(p->kv, rq, p->model, &in, 1, &step, &copies, &num_copies, &may_wait, info);
    }
    if (!err) {
        err = kv_step_commit_ids(p->kv, rq, step, &len, &tokens, 1, info);
    }
    if (!err) {
        *hit = in.cached / BENCH_TRACE_BLOCK;
        err = kv_seq_free(p->kv, rq, in.seq, info);
    }
    return err;
}

attnd_err bench_replay_policy(const bench_replay *r, uint32_t blocks, uint32_t policy,
                              uint64_t *hits, attnd_errinfo *info) {
    player p = {.r = r};
    kv_arena arena;
    uint64_t found = 0;
    attnd_err err = bench_replay_check(r, blocks, info);
    if (!err) {
        err = set_up(&p, &arena, blocks, policy, info);
    }
    for (uint64_t i = 0; i < r->info.requests && !err; i++) {
        uint32_t hit = 0;
        if (r->prompts[i].blocks > 0) {
            err = play(&p, &r->prompts[i], &hit, info);
        }
        found += hit;
    }
    if (!err) {
        *hits = found * BENCH_TRACE_BLOCK;
    }
    kv_free(p.kv);
    free(p.tokens);
    return err;
}
