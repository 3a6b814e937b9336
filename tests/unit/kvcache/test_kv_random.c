// A long random run of everything that kvcache does, against the naive model.
//
// Each token has a value of its own, and its rows, in every layer and head, K and V, hold bytes
// that are made from that value; so whether sharing, copies, moves, truncating, forking and freeing
// are right is seen in the bytes that a sequence's table leads to.  New rows are written with
// garbage when the step opens and rightly before its commit, reserved ones only with garbage: what
// one sequence writes must never be seen by another.  Where token ids are given they are few, so
// that prompts begin alike, and a token's value is made of all ids up to it: rows that a step finds
// in the prefix cache are right when their bytes are.  After every operation the numbers of blocks
// are compared; the bytes of some sequences often, of all sequences now and then.
//
// ATTND_TEST_SEED and ATTND_TEST_CHANGES choose another run.
#include "tests/unit/kvcache/kv_random.h"

#if defined(__SANITIZE_THREAD__) // slow, and there is one thread
enum { DEFAULT_CHANGES = 20000 };
#elif defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
enum { DEFAULT_CHANGES = 200000 };
#else
enum { DEFAULT_CHANGES = 1000000 };
#endif
enum {
    ALL_CHECKED_EVERY = 2000, // operations
    RECOUNTED_EVERY = 64,
};

char memory[SLABS * SLAB_BYTES] __attribute__((aligned(KV_BLOCK_UNIT)));
static const kv_arena arena = {
    .base = memory, .bytes = sizeof(memory), .fd = -1, .ops = &kv_arena_host_ops};
kv_cache *kv;
naive n;
uint32_t tenants[NAIVE_TENANTS];
uint64_t seed, rng, now_ms;
uint32_t op;
attnd_errinfo info;
came_by came;

uint32_t below(uint32_t limit) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)((rng >> 32) * limit >> 32);
}

bool chance(uint32_t percent) {
    return below(100) < percent;
}

// ---- comparing

static void compare_counts(void) {
    kv_info all;
    kv_get_info(kv, &all);
    CHECK(all.in_use == n.in_use[0] + n.in_use[1] + n.in_use[2]);
    for (uint32_t t = 0; t < NAIVE_TENANTS; t++) {
        char name[KV_NAME_BYTES];
        uint32_t blocks, quota;
        CHECK_ERR(kv_tenant_get(kv, tenants[t], name, &blocks, &quota), ATTND_OK);
        CHECK(blocks == n.tenant_blocks[t] && quota == n.quota[t]);
    }
    CHECK(kv_check_fast(kv));
}

// compare_seq checks what is told about a sequence, and its bytes when no step hinders.
static void compare_seq(uint32_t i) {
    naive_seq *s = &n.seqs[i];
    kv_seq_info got;
    CHECK_ERR(kv_seq_get(kv, 0, s->handle, &got), ATTND_OK);
    CHECK(got.committed == s->len && got.in_step == (s->step >= 0));
    CHECK(got.session == (s->session < 0 ? 0 : n.sessions[s->session].handle));
    uint32_t blocks = 0;
    for (uint32_t g = 0; g < n.models[s->model].num_groups; g++) {
        blocks += naive_blocks(s->len, n.models[s->model].block_tokens[g]) - s->first[g];
    }
    CHECK(s->step >= 0 || got.blocks == blocks);
    CHECK(got.ttl_ms == s->ttl && strcmp(got.name, name_text(s->name)) == 0);
    if (s->step >= 0) {
        naive_step *st = &n.steps[s->step];
        for (uint32_t at = 0; at < st->num_seqs; at++) {
            check_rows(st, at);
        }
    } else if (s->session >= 0) {
        naive_step st = {.num_seqs = 1, .seqs = {{.seq = i}}};
        kv_step_seq seq = {.seq = s->handle};
        const kv_copy *copies;
        uint32_t num;
        bool may_wait;
        attnd_err err = kv_step_open(kv, (kv_request){n.sessions[s->session].handle, 0},
                                     n.models[s->model].index, &seq, 1, &st.handle, &copies, &num,
                                     &may_wait, &info);
        if (err == ATTND_EBUSY) {
            return; // all steps are open
        }
        CHECK_ERR(err, ATTND_OK);
        check_rows(&st, 0);
        CHECK_ERR(kv_step_abort(kv, (kv_request){0}, st.handle), ATTND_OK);
    }
}

static void compare_all(void) {
    uint32_t live = 0;
    kv_info all;
    for (uint32_t i = 0; i < NAIVE_SEQS; i++) {
        if (n.seqs[i].live) {
            live++;
            compare_seq(i);
        }
    }
    kv_get_info(kv, &all);
    CHECK(all.seqs == live);
}

// ---- the run

static void make_model(uint32_t i, uint32_t tenant, uint32_t num_groups,
                       const kv_group_spec *groups, const uint32_t *shape) {
    naive_model *m = &n.models[i];
    kv_model_spec spec = {.tenant = tenants[tenant], .num_groups = num_groups};
    snprintf(spec.name, sizeof(spec.name), "m%u", i);
    m->tenant = tenant;
    m->num_groups = num_groups;
    for (uint32_t g = 0; g < num_groups; g++) {
        spec.groups[g] = groups[g];
        m->block_tokens[g] = groups[g].block_tokens;
        m->shape[g] = shape[g];
        m->window[g] = groups[g].window_left;
    }
    m->has_tree = groups[num_groups - 1].block_tokens == 4;
    CHECK_ERR(kv_model_open(kv, &spec, &m->index, &info), ATTND_OK);
}

static void start(void) {
    const kv_opts opts = {
        .slab_bytes = SLAB_BYTES,
        .max_blocks = SLABS * 8,
        .max_seqs = NAIVE_SEQS,
        .max_seq_blocks = NAIVE_SEQ_BLOCKS,
        .max_models = NAIVE_MODELS,
        .max_tenants = NAIVE_TENANTS,
        .max_sessions = NAIVE_SESSIONS,
        .max_steps = NAIVE_STEPS,
        .max_step_seqs = NAIVE_STEP_SEQS,
        .prefix_blocks = SLABS * 8,
        .prefix_block_tokens = 4,
        .window_margin = NAIVE_MARGIN,
    };
    // layers, kv_heads, k_row_bytes, v_row_bytes, block_tokens: 256, 420, 384, 128, 672 bytes
    const kv_group_spec two[] = {{2, 2, 8, 8, 4, -1}, {1, 3, 12, 8, 7, 20}};
    const kv_group_spec one[] = {{1, 3, 24, 8, 4, -1}};
    const kv_group_spec wide[] = {{1, 1, 20, 12, 4, -1}, {3, 2, 8, 8, 7, 5}};
    const kv_group_spec tree[] = {{2, 2, 8, 8, 4, -1}, {1, 3, 24, 8, 4, -1}};
    const kv_group_spec seen[] = {{2, 2, 8, 8, 4, 9}, {1, 3, 24, 8, 4, 2}};
    memset(&n, 0, sizeof(n));
    CHECK_ERR(kv_create(&kv, &arena, &opts, &info), ATTND_OK);
    CHECK_ERR(kv_tenant_set(kv, "t0", 0, &tenants[0]), ATTND_OK);
    CHECK_ERR(kv_tenant_set(kv, "t1", 0, &tenants[1]), ATTND_OK);
    make_model(0, 0, 2, two, (const uint32_t[]){0, 1});
    make_model(1, 0, 1, one, (const uint32_t[]){1});
    make_model(2, 1, 2, wide, (const uint32_t[]){0, 2});
    make_model(3, 0, 2, tree, (const uint32_t[]){0, 1});
    make_model(4, 1, 2, seen, (const uint32_t[]){0, 1});
    for (int i = 0; i < NAIVE_SESSIONS; i++) {
        open_session(i);
    }
}

static const struct {
    uint32_t weight;
    void (*run)(int session);
} kinds[] = {
    {50, op_create}, {90, op_fork},  {50, op_truncate}, {50, op_free},  {40, op_keep},
    {40, op_attach}, {260, op_open}, {300, op_commit},  {30, op_abort}, {60, op_reply},
    {20, op_expire}, {8, op_quota},  {2, op_close},
};

static void run_one(void) {
    int session = (int)below(NAIVE_SESSIONS);
    uint32_t what = below(1000), kind = 0; // the weights' sum
    now_ms += below(20);
    if (!n.sessions[session].live) {
        open_session(session);
    }
    while (what >= kinds[kind].weight) {
        what -= kinds[kind++].weight;
    }
    kinds[kind].run(session);
}

static uint64_t from_env(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

START_TEST(kv_cache_agrees_with_the_naive_model) {
    uint32_t changes = (uint32_t)from_env("ATTND_TEST_CHANGES", DEFAULT_CHANGES);
    seed = from_env("ATTND_TEST_SEED", 20240229);
    rng = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    printf("kv_random seed=%" PRIu64 " changes=%u\n", seed, changes);
    fflush(stdout);
    start();
    for (op = 0; came.done < changes; op++) { // operations that changed something count
        run_one();
        compare_counts();
        uint32_t seq = below(NAIVE_SEQS);
        if (n.seqs[seq].live && chance(40)) {
            compare_seq(seq);
        }
        if (op % RECOUNTED_EVERY == 0) {
            CHECK(kv_check_full(kv, &info));
        }
        if (op % ALL_CHECKED_EVERY == 0) {
            compare_all();
        }
    }
    for (int i = 0; i < NAIVE_SESSIONS; i++) {
        if (n.sessions[i].live) {
            op_close(i);
        }
    }
    now_ms += 1000000;
    op_expire(-1);
    compare_all();
    CHECK(kv_check_full(kv, &info));
    kv_info all;
    kv_get_info(kv, &all);
    printf("kv_random changes=%u of=%u refused=%u may_wait=%u copies=%u moves=%u sessions=%u "
           "found blocks=%u rows=%u behind=%u unseen=%u evicted=%" PRIu64 "\n",
           came.done, op, came.refused, came.waits, came.copied, came.moved, came.closed,
           came.found_blocks, came.found_rows, came.behind, came.unseen, all.evictions);
    CHECK(changes < 10000 || (came.refused && came.waits && came.waits < came.refused &&
                              came.copied && came.moved && came.closed && came.found_blocks &&
                              came.found_rows && came.behind && came.unseen && all.evictions));
    kv_free(kv);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_random");
    TCase *t = tcase_create("run");
    tcase_set_timeout(t, 110);
    tcase_add_test(t, kv_cache_agrees_with_the_naive_model);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
