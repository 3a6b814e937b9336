// Attention in the client's own process, over the daemon's arena: the bits of the daemon's, and
// what happens when such a client is wrong.
#include "tests/e2e/inproc_fixture.h"

// ---- outputs

// converse makes a conversation of all kinds of steps; every output goes into all [*num].
static void converse(player *p, outputs *all, uint32_t *num) {
    attnd_step_seq s = {.seq = p->seq, .new_len = 37, .reserve = 5};
    uint64_t step = open_step(p, &s, 1);
    attend_all(p, step, 0, 37, true, &all[(*num)++]);
    commit(p, step, (attnd_accept){.accepted = 37}, 37);
    for (uint32_t t = 37; t < 60; t++) { // tokens
        s = (attnd_step_seq){.seq = p->seq, .new_len = 1};
        step = open_step(p, &s, 1);
        ck_assert_uint_eq(s.committed, t);
        attend_all(p, step, t, 1, true, &all[*num]);
        attend_all(p, step, t, 1, true, &all[(*num)++]); // again, into the same slots
        commit(p, step, (attnd_accept){.accepted = 1}, t + 1);
    }
    // A tree: rows 0 to 3, of which 0, 2 and 3 are a path.
    static const uint64_t tree[4] = {1, 3, 5, 13};
    static const int32_t positions[4] = {60, 61, 61, 62};
    static const uint32_t path[3] = {0, 2, 3};
    s = (attnd_step_seq){.seq = p->seq, .new_len = 4, .positions = positions, .tree_mask = tree};
    step = open_step(p, &s, 1);
    attend_all(p, step, 100, 4, true, &all[(*num)++]);
    commit(p, step, (attnd_accept){.accepted = 3, .num_path = 3, .path = path}, 63);
    // Two sequences with the same blocks, of which one appends and one only reads.
    uint64_t forked = 0;
    uint32_t len = 0;
    ATTND_CK_OK(attnd_seq_fork(p->c, p->seq, &forked, &len, &info));
    ATTND_CK_OK(attnd_seq_truncate(p->c, p->seq, 61, &info));
    attnd_step_seq one = {.seq = p->seq, .new_len = 5};
    step = open_step(p, &one, 1);
    attend_all(p, step, 200, 5, true, &all[(*num)++]);
    commit(p, step, (attnd_accept){.accepted = 2}, 63);
    attnd_step_seq two = {.seq = forked, .q_len = 3};
    step = open_step(p, &two, 1);
    attend_all(p, step, 300, 3, false, &all[(*num)++]);
    commit(p, step, (attnd_accept){.accepted = 0}, 63);
}

// check_listed wants a session of this process and user to be listed as connected so.
static void check_listed(const char *way) {
    e2e_client admin;
    char want[96];
    e2e_connect(&admin, d.admin_url);
    free(e2e_json(&admin, PROTO_HELLO, "{}"));
    char *text = e2e_json(&admin, PROTO_SESSION_LIST, "");
    snprintf(want, sizeof(want), "\"uid\":%u,\"way\":\"%s\",\"pid\":%d,", (unsigned)getuid(), way,
             (int)getpid());
    ck_assert_msg(strstr(text, want) != NULL, "no %s in %s", want, text);
    snprintf(want, sizeof(want), "\"way\":\"messages\",\"pid\":%d,", (int)getpid());
    ck_assert_msg(strstr(text, want) != NULL, "no %s in %s", want, text); // this one
    free(text);
    snprintf(want, sizeof(want), ", %s, pid %d, uid %u", way, (int)getpid(), (unsigned)getuid());
    ck_assert(e2e_log_has(&d, want));
    e2e_close(&admin);
}

START_TEST(outputs_have_the_bits_of_the_daemons) {
    static outputs there[40], here[40];
    player a, b;
    uint32_t num[2] = {0, 0};
    e2e_start(&d, flags);
    begin(&a, false);
    check_listed("ring");
    converse(&a, there, &num[0]);
    attnd_close(a.c);
    begin(&b, true);
    ck_assert_int_eq(attnd_get_transport(b.c), ATTND_TRANSPORT_RING);
    check_listed("in process");
    converse(&b, here, &num[1]);
    ck_assert_uint_eq(num[0], num[1]);
    ck_assert_mem_eq(there, here, sizeof(there));
    ck_assert(stat_of("blocks.in_use") > 0);
    // The daemon's attends were a's, each token's twice; and for each of the two it moved a tree's
    // rows and copied a shared block.
    ck_assert_double_eq(stat_of("scheduler.launches"), (double)(num[0] + 23) * LAYERS + 2 * 2);
    attnd_close(b.c);
    await_stat("blocks.in_use", 0, 1000);
    e2e_stop(&d);
}
END_TEST

// With masks: two sequences, in query blocks of 12 over blocks of 8 tokens; then tokens.
START_TEST(masked_outputs_have_the_bits_of_the_daemons) {
    enum { STEPS = 5, ROWS = 60 };
    static outputs all[2][STEPS];
    static const uint32_t start[] = {0, 1, 2, 5, 6, 7, 8}, blocks[] = {0, 1, 0, 2, 4, 0, 1, 3};
    static const uint32_t of_token[] = {0, 3}, blocks_of_token[] = {0, 2, 4};
    const attnd_block_mask prompts = {12, 6, start, blocks};
    const attnd_block_mask token = {1, 1, of_token, blocks_of_token};
    e2e_start(&d, flags);
    for (int here = 0; here < 2; here++) {
        player p;
        uint64_t other = 0;
        begin(&p, here);
        ATTND_CK_OK(attnd_seq_create(p.c, p.model, &other, &info));
        attnd_step_seq s[2] = {{.seq = p.seq, .new_len = 36}, {.seq = other, .new_len = 24}};
        uint64_t step = 0;
        attend_mask = &prompts; // the last two query blocks are the other's, which has 3 KV blocks
        step = open_step(&p, s, 2);
        ATTND_CK_ERR(attend(&p, step, 0, 0, ROWS, true, &all[here][0]), ATTND_EINVAL);
        ck_assert_str_eq(info.field, "block_mask");
        const attnd_block_mask good = {12, 5, start, blocks};
        attend_mask = &good;
        attend_all(&p, step, 0, ROWS, true, &all[here][0]);
        attnd_accept accept[2] = {{.accepted = 36}, {.accepted = 24}};
        uint32_t lens[2];
        ATTND_CK_OK(attnd_step_commit(p.c, step, accept, 2, lens, &info));
        attend_mask = &token;
        for (uint32_t i = 1; i < STEPS; i++) {
            attnd_step_seq one = {.seq = p.seq, .new_len = 1};
            step = open_step(&p, &one, 1);
            attend_all(&p, step, 100 + i, 1, true, &all[here][i]);
            commit(&p, step, (attnd_accept){.accepted = 1}, 36 + i);
        }
        attend_mask = NULL;
        attnd_close(p.c);
        await_stat("blocks.in_use", 0, 1000);
    }
    ck_assert_mem_eq(all[0], all[1], sizeof(all[0]));
    ck_assert(memcmp(all[0][1].out, all[0][2].out, sizeof(all[0][1].out[0])) != 0);
    e2e_stop(&d);
}
END_TEST

// Blocks behind the window of layer 1 (13 tokens, and 64 that are kept) come free: the tables have
// none there, and outputs are the same.
START_TEST(outputs_have_the_bits_of_the_daemons_behind_a_window) {
    enum { STEPS = 16, LEN = 6 * 60 + 10 };
    static outputs all[2][STEPS];
    e2e_start(&d, flags);
    for (int here = 0; here < 2; here++) {
        player p;
        begin(&p, here);
        for (uint32_t i = 0, len = 0; i < STEPS; i++) {
            uint32_t num = i < 6 ? 60 : 1;
            attnd_step_seq s = {.seq = p.seq, .new_len = num};
            uint64_t step = open_step(&p, &s, 1);
            attend_all(&p, step, len, num, true, &all[here][i]);
            len += num;
            commit(&p, step, (attnd_accept){.accepted = num}, len);
        }
        uint32_t blocks = (LEN + BLOCK - 1) / BLOCK, gone = (LEN - 1 - 13 - 64) / BLOCK;
        ck_assert_double_eq(stat_of("blocks.in_use"), 2 * blocks - gone);
        ATTND_CK_ERR(attnd_seq_truncate(p.c, p.seq, LEN - 80, &info), ATTND_ENOTSUP);
        attnd_close(p.c);
        await_stat("blocks.in_use", 0, 1000);
    }
    ck_assert_mem_eq(all[0], all[1], sizeof(all[0]));
    e2e_stop(&d);
}
END_TEST

// A kept sequence that was filled in process is read by the daemon, and the other way round.
START_TEST(both_ways_share_a_sequence) {
    static outputs there, here;
    player a, b;
    e2e_start(&d, flags);
    begin(&b, true);
    attnd_step_seq s = {.seq = b.seq, .new_len = 30};
    uint64_t step = open_step(&b, &s, 1);
    attend_all(&b, step, 0, 30, true, &here);
    commit(&b, step, (attnd_accept){.accepted = 30}, 30);
    s = (attnd_step_seq){.seq = b.seq, .q_len = 8};
    step = open_step(&b, &s, 1);
    attend_all(&b, step, 500, 8, false, &here);
    commit(&b, step, (attnd_accept){.accepted = 0}, 30);
    ATTND_CK_OK(attnd_seq_keep(b.c, b.seq, "kept", 0, &info));
    attnd_close(b.c);
    begin(&a, false);
    uint32_t len = 0;
    ATTND_CK_OK(attnd_seq_attach(a.c, a.model, "kept", &a.seq, &len, &info));
    ck_assert_uint_eq(len, 30);
    s = (attnd_step_seq){.seq = a.seq, .q_len = 8};
    step = open_step(&a, &s, 1);
    attend_all(&a, step, 500, 8, false, &there);
    commit(&a, step, (attnd_accept){.accepted = 0}, 30);
    for (int l = 0; l < LAYERS; l++) {
        ck_assert_mem_eq(there.out[l], here.out[l], 8 * OUT_ROW * sizeof(float));
    }
    attnd_close(a.c);
    e2e_stop(&d);
}
END_TEST

// prompt opens a step of 37 tokens with their ids, attends what of them is not cached, and commits;
// returns how many were.
static uint32_t prompt(player *p, outputs *o) {
    enum { PROMPT = 37 };
    uint32_t ids[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++) {
        ids[i] = 1000 + i;
    }
    ATTND_CK_OK(attnd_seq_create(p->c, p->model, &p->seq, &info));
    attnd_step_seq s = {.seq = p->seq, .new_len = PROMPT, .tokens = ids};
    uint64_t step = open_step(p, &s, 1);
    attend_all(p, step, s.cached, PROMPT - s.cached, true, o);
    commit(p, step, (attnd_accept){.accepted = PROMPT}, PROMPT);
    return s.cached;
}

// What was filled in process is found by the daemon's prefix cache, for both.
START_TEST(a_cached_prefix_has_no_rows) {
    static outputs there, here, all;
    player a, b;
    e2e_start(&d, flags);
    begin(&b, true);
    ck_assert_uint_eq(prompt(&b, &all), 0);
    begin(&a, false);
    uint32_t cached = prompt(&a, &there);
    ck_assert_uint_ge(cached, 32); // whole blocks of 8
    ck_assert_uint_le(cached, 36); // at least the last one is computed
    ck_assert_uint_eq(prompt(&b, &here), cached);
    for (int l = 0; l < LAYERS; l++) {
        ck_assert_mem_eq(there.out[l], here.out[l], (37 - cached) * OUT_ROW * sizeof(float));
        for (uint32_t i = 0; i < (37 - cached) * OUT_ROW; i++) { // and without the cache
            ck_assert_float_eq_tol(here.out[l][i], all.out[l][cached * OUT_ROW + i], 1e-5f);
        }
    }
    attnd_close(a.c);
    attnd_close(b.c);
    e2e_stop(&d);
}
END_TEST

// ---- what is refused

START_TEST(a_user_without_the_grant_is_refused_by_name) {
    player p;
    e2e_start(&d, no_grant);
    ATTND_CK_ERR(dial(&p, true), ATTND_EPERM);
    ck_assert_str_eq(info.field, "engine");
    ck_assert_ptr_nonnull(strstr(info.text, "server.in_process_uids"));
    ck_assert(e2e_log_has(&d, "in_process_uids"));
    ATTND_CK_OK(dial(&p, false)); // else it is served
    attnd_close(p.c);
    attnd_connect_opts opts = {.transport = ATTND_TRANSPORT_NNG, .engine = attn_engine_cpu()};
    ATTND_CK_ERR(attnd_connect(&p.c, d.url, &opts, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "engine");
    e2e_stop(&d);
}
END_TEST

START_TEST(a_commit_wants_every_layer) {
    static outputs o;
    player p;
    e2e_start(&d, flags);
    begin(&p, true);
    attnd_step_seq s = {.seq = p.seq, .new_len = 2};
    uint64_t step = open_step(&p, &s, 1), next = 0;
    attnd_accept accept = {.accepted = 2};
    ATTND_CK_OK(attend(&p, step, 0, 0, 2, true, &o));
    ATTND_CK_ERR(attend(&p, step, 3, 0, 2, true, &o), ATTND_EINVAL); // it reads layer 1
    ck_assert_str_eq(info.field, "layer");
    ATTND_CK_OK(attend(&p, step, 2, 0, 2, true, &o));
    ATTND_CK_ERR(attnd_step_commit(p.c, step, &accept, 1, NULL, &info), ATTND_EINVAL);
    ck_assert_int_eq(info.detail, 1);
    attnd_step_opts opts = {.commit_step = step, .commit_accept = &accept, .num_commit = 1};
    s = (attnd_step_seq){.seq = p.seq, .new_len = 1};
    ATTND_CK_ERR(attnd_step_open(p.c, p.model, &s, 1, &opts, &next, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "commit.step");
    ck_assert_int_eq(info.detail, 1);
    ATTND_CK_OK(attend(&p, step, 1, 0, 2, true, &o));
    ATTND_CK_OK(attend(&p, step, 3, 0, 2, true, &o));
    ATTND_CK_OK(attnd_step_open(p.c, p.model, &s, 1, &opts, &next, &info));
    ck_assert_uint_eq(s.committed, 2);
    ATTND_CK_ERR(attend(&p, step, 0, 0, 2, true, &o), ATTND_ESTALE); // it is committed
    ATTND_CK_OK(attnd_step_cancel(p.c, next, &info));
    ATTND_CK_ERR(attend(&p, next, 0, 0, 1, true, &o), ATTND_ESTALE);
    attnd_close(p.c);
    e2e_stop(&d);
}
END_TEST

START_TEST(wrong_attends_are_refused_by_name) {
    static float x[64 * OUT_ROW];
    player p;
    e2e_start(&d, flags);
    begin(&p, true);
    attnd_step_seq s = {.seq = p.seq, .new_len = 2};
    uint64_t step = open_step(&p, &s, 1);
    const attnd_attend_args good = {
        .step = step, .model = p.model, .rows = 2, .new_rows = 2, .q = x, .k = x, .v = x, .out = x};
    const attnd_block_mask mask = {.q_block = 1};
    struct {
        attnd_attend_args a;
        attnd_err err;
        const char *field;
    } bad[] = {{good, ATTND_EINVAL, "rows"},   {good, ATTND_EINVAL, "new_rows"},
               {good, ATTND_EINVAL, "layer"},  {good, ATTND_EINVAL, "k"},
               {good, ATTND_EINVAL, "q"},      {good, ATTND_EINVAL, "block_mask"},
               {good, ATTND_EINVAL, "model"},  {good, ATTND_ESTALE, "step"},
               {good, ATTND_ENOTSUP, "stream"}};
    bad[0].a.rows = 3;
    bad[1].a.new_rows = 1;
    bad[2].a.layer = LAYERS;
    bad[3].a.k = bad[3].a.v = NULL;
    bad[4].a.q = NULL;
    bad[5].a.block_mask = &mask;
    bad[6].a.model++;
    bad[7].a.step++;
    bad[8].a.stream = x;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ATTND_CK_ERR(attnd_attend(p.c, &bad[i].a, NULL, &info), bad[i].err);
        ck_assert_str_eq(info.field, bad[i].field);
    }
    ATTND_CK_ERR(attnd_attend_start(p.c, &good, NULL, NULL, &info), ATTND_ENOTSUP);
    ATTND_CK_OK(attnd_attend(p.c, &good, NULL, &info));
    attnd_close(p.c);
    e2e_stop(&d);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_inproc");
    TCase *tc = tcase_create("inproc");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, NULL);
    tcase_add_test(tc, outputs_have_the_bits_of_the_daemons);
    tcase_add_test(tc, masked_outputs_have_the_bits_of_the_daemons);
    tcase_add_test(tc, outputs_have_the_bits_of_the_daemons_behind_a_window);
    tcase_add_test(tc, both_ways_share_a_sequence);
    tcase_add_test(tc, a_cached_prefix_has_no_rows);
    tcase_add_test(tc, a_user_without_the_grant_is_refused_by_name);
    tcase_add_test(tc, a_commit_wants_every_layer);
    tcase_add_test(tc, wrong_attends_are_refused_by_name);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
