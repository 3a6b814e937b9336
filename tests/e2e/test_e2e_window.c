// Models whose layers look back a bounded number of tokens: blocks behind the windows come free,
// and what is computed then is still the reference's.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/e2e/play.h"

static const char *const flags[] = {"--set", "cache.memory=2MiB",
                                    "--set", "cache.slab=1MiB",
                                    "--set", "server.reattach_timeout=100ms",
                                    NULL};

static e2e_daemon d;
static e2e_client c;
static play_model m;
static uint32_t ids[PLAY_MAX_TOKENS];

enum { LEFT = 40, MARGIN = PROTO_TRUNCATE_TOKENS, BLOCK = 16 };

// Two layers that see everything, and one that sees 40 tokens back: blocks of 16 and 8 KiB a
// sixteen tokens, of which there are 128.
static play_model mixed(void) {
    play_model mix = play_tiny();
    mix.name = "mixed";
    mix.layers = 3;
    mix.kv_heads = 1;
    mix.layer[1].window_left = LEFT;
    return mix;
}

static void begin(bool keeper) {
    memset(&d, 0, sizeof(d));
    e2e_dir(&d);
    d.keeper = keeper;
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    m = mixed();
    play_open(&c, &m);
    for (uint32_t i = 0; i < PLAY_MAX_TOKENS; i++) {
        ids[i] = 5 * i + 1;
    }
}

static void setup(void) {
    begin(false);
}

static void teardown(void) {
    e2e_close(&c);
    e2e_stop(&d);
}

static uint32_t ceil_div(uint32_t a, uint32_t b) {
    return (a + b - 1) / b;
}

// blocks_of counts the blocks of a sequence of len tokens whose last commit began at `at`.
static uint32_t blocks_of(uint32_t len, uint32_t at) {
    uint32_t gone = at > LEFT + MARGIN ? (at - LEFT - MARGIN) / BLOCK : 0;
    return 2 * ceil_div(len, BLOCK) - gone;
}

static void token(play_seq *s, uint32_t num) {
    play_token(&c, &s, 1, num);
}

static attnd_err truncate_to(play_seq *s, uint32_t len) {
    const proto_seq body = {.seq = s->handle, .len = len};
    attnd_err err = e2e_call(&c, PROTO_SEQ_TRUNCATE, &body, sizeof(body), NULL);
    s->len = err ? s->len : len;
    return err;
}

// read_back reads rows of committed tokens and compares.
static attnd_err read_back(play_seq *s, uint32_t rows) {
    const play_part part = {.seq = s, .q_len = rows};
    play_step step;
    attnd_err err = play_step_open(&c, &m, &part, 1, 0, &step, NULL);
    for (uint32_t l = 0; !err && l < m.layers; l++) {
        play_attend(&c, &step, l);
    }
    return err ? err : play_commit(&c, &step, NULL, NULL);
}

START_TEST(outputs_are_the_references_while_blocks_come_free) {
    play_seq s, forked;
    play_create(&c, &m, &s);
    token(&s, 300);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks_of(300, 0));
    token(&s, 130);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks_of(430, 300));
    for (uint32_t i = 0; i < 40; i++) {
        token(&s, 1 + i % 9 * (i % 2)); // decode, and short prefill
    }
    uint32_t len = s.len;
    token(&s, 1);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks_of(len + 1, len));
    play_fork(&c, &s, &forked);
    token(&forked, 70);
    token(&forked, 70);
    token(&s, 3);
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks_of(len + 141, len + 71));
    token(&forked, 1);
    play_free(&c, &forked);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}
END_TEST

START_TEST(what_was_given_back_is_refused_by_name) {
    play_seq s;
    play_create(&c, &m, &s);
    token(&s, 500);
    token(&s, 100);
    // The last commit began at 500: block (500 - 104) / 16 = 24 is the first, token 384.
    ATTND_CK_ERR(truncate_to(&s, 384 + LEFT - 1), ATTND_ENOTSUP);
    ATTND_CK_ERR(read_back(&s, 600 - (384 + LEFT) + 1), ATTND_ENOTSUP);
    ATTND_CK_OK(read_back(&s, 600 - (384 + LEFT)));
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks_of(600, 500));
    ATTND_CK_OK(truncate_to(&s, 500 - MARGIN));
    token(&s, 5);
    ATTND_CK_OK(truncate_to(&s, 0));
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    token(&s, 200);
    token(&s, 1);
    play_free(&c, &s);
}
END_TEST

START_TEST(a_prompt_is_found_though_its_first_blocks_are_behind_the_window) {
    play_seq first, second, third;
    play_create(&c, &m, &first);
    for (uint32_t i = 0; i < 6; i++) {
        play_prompt(&c, &first, NULL, ids + 100 * i, 100);
    }
    double used = e2e_stat(&c, "blocks.in_use");
    ck_assert_double_eq(used, blocks_of(600, 500));
    play_create(&c, &m, &second);
    ck_assert_uint_eq(play_prompt(&c, &second, &first, ids, 600), 592);
    // A block of its own in each group; else it shares all that it sees.
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), used + 2);
    token(&second, 3);
    play_free_there(&c, &first);
    play_free_there(&c, &second);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    play_create(&c, &m, &third);
    ids[500] = 0;
    ck_assert_uint_eq(play_prompt(&c, &third, &first, ids, 620), 500);
    token(&third, 1);
    play_free(&c, &third);
    play_forget(&first);
    play_forget(&second);
}
END_TEST

// A prefill of one message is computed again from what it left, with as many rows as it had.
START_TEST(a_repeated_prefill_sees_all_that_it_saw) {
    play_model one = play_one();
    play_seq s;
    one.layer[0].window_left = LEFT;
    play_open(&c, &one);
    play_create(&c, &one, &s);
    token(&s, 400);
    for (int again = 0; again < 2; again++) {
        play_step step = {.model = &one, .num = 1, .rows = 150, .new_rows = 150};
        step.parts[0] = (play_part){.seq = &s, .new_len = 150};
        play_tensors t = play_random(&step);
        e2e_buf b;
        e2e_reply r, repeated;
        play_attend1_body(&b, PROTO_PREFILL, ++c.id, &step, 0, &t);
        ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, &r));
        play_check(&step, 0, &t, &r);
        s.len += 150;
        ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"),
                            blocks_of(s.len, s.len - 150) - ceil_div(s.len, BLOCK));
        ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, &repeated));
        proto_attend_reply head;
        memcpy(&head, r.body, sizeof(head));
        size_t bytes = (size_t)150 * one.q_heads * one.v_head_dim * sizeof(float);
        const float *x = (const float *)(const void *)(r.msg + head.out_off);
        const float *y = (const float *)(const void *)(repeated.msg + head.out_off);
        for (size_t i = 0; i < bytes / sizeof(float); i++) {
            ck_assert_msg(fabsf(x[i] - y[i]) <= 1e-5f, "%zu", i);
        }
        e2e_reply_fini(&r);
        e2e_reply_fini(&repeated);
        e2e_buf_fini(&b);
        play_tensors_fini(&t);
    }
    play_free(&c, &s);
}
END_TEST

// ---- a long sequence

// One layer, one KV head, head_dim 32, float32: 4 KiB a block, so that the pool has room for 8192
// tokens.  Without RoPE a row's output follows from the keys of its window alone.
enum { LONG = 100000, CHUNK = 2000, WINDOW = 1024, DIM = 32, HEADS = 4 };

static float *all_k, *all_v; // [LONG, DIM]

// long_step does a step of num tokens; check: compares with the reference.
static void long_step(play_seq *s, uint32_t num, bool check) {
    const play_part part = {.seq = s, .new_len = num};
    play_step step;
    e2e_buf b;
    e2e_reply r;
    ATTND_CK_OK(play_step_open(&c, s->model, &part, 1, 0, &step, NULL));
    play_tensors t = play_random(&step);
    memcpy(all_k + (size_t)s->len * DIM, t.k, (size_t)num * DIM * sizeof(float));
    memcpy(all_v + (size_t)s->len * DIM, t.v, (size_t)num * DIM * sizeof(float));
    play_attend_body(&b, ++c.id, &step, 0, 0, &t);
    ATTND_CK_OK(e2e_call_raw(&c, b.data, b.bytes, &r));
    proto_attend_reply head;
    memcpy(&head, r.body, sizeof(head));
    const float *got = (const float *)(const void *)(r.msg + head.out_off);
    for (uint32_t i = 0; check && i<num; i += num> 8 ? num / 8 : 1) {
        for (uint32_t h = 0; h < HEADS; h++) {
            const float *q = t.q + ((size_t)i * HEADS + h) * DIM;
            uint32_t at = s->len + i, from = at > WINDOW ? at - WINDOW : 0;
            double out[DIM] = {0}, sum = 0;
            for (uint32_t j = from; j <= at; j++) {
                double dot = 0;
                for (size_t x = 0; x < DIM; x++) {
                    dot += (double)q[x] * (double)all_k[(size_t)j * DIM + x];
                }
                double weight = exp(dot / sqrt(DIM));
                sum += weight;
                for (size_t x = 0; x < DIM; x++) {
                    out[x] += weight * (double)all_v[(size_t)j * DIM + x];
                }
            }
            for (size_t x = 0; x < DIM; x++) {
                double diff = fabs(out[x] / sum - (double)got[((size_t)i * HEADS + h) * DIM + x]);
                ck_assert_msg(diff < 1e-5, "token %u head %u dim %d: off by %g", at, h, (int)x,
                              diff);
            }
        }
    }
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    e2e_reply_fini(&r);
    e2e_buf_fini(&b);
    play_tensors_fini(&t);
}

START_TEST(a_long_sequence_lives_in_a_small_pool) {
    play_model one = play_one();
    play_seq s;
    all_k = calloc((size_t)LONG * DIM, sizeof(float));
    all_v = calloc((size_t)LONG * DIM, sizeof(float));
    ck_assert(all_k && all_v);
    one.kv_heads = 1;
    one.num_inv_freq = 0;
    one.layer[0].window_left = WINDOW;
    play_open(&c, &one);
    play_create(&c, &one, &s);
    while (s.len < LONG - 30) {
        uint32_t left = LONG - 30 - s.len;
        long_step(&s, left < CHUNK ? left : CHUNK, s.len % (10 * CHUNK) == 0);
        ck_assert_double_le(e2e_stat(&c, "blocks.in_use"),
                            ceil_div(WINDOW + MARGIN + CHUNK, BLOCK) + 2);
    }
    while (s.len < LONG) {
        long_step(&s, 1, true);
    }
    ck_assert_double_le(e2e_stat(&c, "blocks.in_use"), ceil_div(WINDOW + MARGIN, BLOCK) + 2);
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    free(all_k);
    free(all_v);
}
END_TEST

// ---- a restart

static void setup_keeper(void) {
    begin(true);
}

START_TEST(a_restarted_daemon_goes_on_with_what_is_left) {
    play_seq s;
    play_create(&c, &m, &s);
    token(&s, 300);
    token(&s, 60);
    proto_seq_keep keep = {.seq = s.handle, .ttl_ms = 60000, .name = "kept"};
    ATTND_CK_OK(e2e_call(&c, PROTO_SEQ_KEEP, &keep, sizeof(keep), NULL));
    e2e_kill_worker(&d);
    e2e_await_ready(&d);
    e2e_close(&c);
    e2e_connect(&c, d.url);
    play_hello(&c, "again");
    play_open(&c, &m);
    e2e_await_stat(&c, "sessions", 1, 5000); // nobody comes back to the other one
    proto_seq_attach attach = {.model = m.id, .name = "kept"};
    e2e_reply r;
    ATTND_CK_OK(e2e_call(&c, PROTO_SEQ_ATTACH, &attach, sizeof(attach), &r));
    memcpy(&s.handle, r.body, sizeof(s.handle));
    e2e_reply_fini(&r);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks_of(360, 300));
    ATTND_CK_ERR(truncate_to(&s, 100), ATTND_ENOTSUP);
    token(&s, 20);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), blocks_of(380, 360));
    play_free(&c, &s);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_window");
    TCase *t = tcase_create("window");
    tcase_set_timeout(t, 60);
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, outputs_are_the_references_while_blocks_come_free);
    tcase_add_test(t, what_was_given_back_is_refused_by_name);
    tcase_add_test(t, a_prompt_is_found_though_its_first_blocks_are_behind_the_window);
    tcase_add_test(t, a_repeated_prefill_sees_all_that_it_saw);
    tcase_add_test(t, a_long_sequence_lives_in_a_small_pool);
    suite_add_tcase(s, t);
    t = tcase_create("restart");
    tcase_set_timeout(t, 60);
    tcase_add_checked_fixture(t, setup_keeper, teardown);
    tcase_add_test(t, a_restarted_daemon_goes_on_with_what_is_left);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
