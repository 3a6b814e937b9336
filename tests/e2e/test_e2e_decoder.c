// A whole decoder over the daemon gives the tokens that it gives with the float64 reference.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "attention/attn_engine.h"
#include "tests/e2e/decoder.h"
#include "tests/e2e/harness.h"

enum { PROMPT = 150, NUM = 200, SEEDS = 3 };

static char in_process[64];
static const char *const flags[] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB",
                                    "--set", in_process,           NULL};
enum { OVER_NNG, OVER_RING, IN_PROCESS, WAYS, GPU_WAYS = IN_PROCESS };
static const attnd_transport transports[] = {ATTND_TRANSPORT_NNG, ATTND_TRANSPORT_RING,
                                             ATTND_TRANSPORT_RING};

static e2e_daemon d;

static void setup(void) {
    memset(&d, 0, sizeof(d));
    snprintf(in_process, sizeof(in_process), "server.in_process_uids=%u", (unsigned)getuid());
    e2e_start(&d, flags);
}

static void teardown(void) {
    e2e_stop(&d);
}

static void run(decoder *m, decoder_attention *a, const decoder_talk *talk) {
    ck_assert_ptr_nonnull(a);
    ck_assert(decoder_run(m, a, talk));
}

static int distinct(const uint8_t *tokens) {
    bool seen[256] = {false};
    int num = 0;
    for (int i = 0; i < NUM; i++) {
        num += !seen[tokens[i]];
        seen[tokens[i]] = true;
    }
    return num;
}

// close_calls returns how many tokens differ where the reference's was close; others may not.
static int close_calls(const uint8_t *want, const float *margins, const uint8_t *got) {
    int num = 0;
    for (int i = 0; i < NUM; i++) {
        ck_assert(got[i] == want[i] || margins[i] < DECODER_CLOSE);
        num += got[i] != want[i];
    }
    return num;
}

// converse has one conversation with the reference and with the daemon.  In bf16 the daemon is fed
// the reference's tokens, so that a close one does not change all that follow.
static void converse(attnd_client *c, const decoder_kind *kind, uint64_t seed) {
    uint8_t prompt[PROMPT], want[NUM], got[NUM];
    float margins[NUM];
    for (int i = 0; i < PROMPT; i++) {
        prompt[i] = (uint8_t)(i * 37 + (int)seed);
    }
    decoder *m = decoder_create(kind, seed);
    ck_assert_ptr_nonnull(m);
    decoder_talk talk = {
        .prompt = prompt, .num_prompt = PROMPT, .num = NUM, .out = want, .margins = margins};
    decoder_attention *reference = decoder_reference_open(kind);
    run(m, reference, &talk);
    decoder_reference_close(reference);
    talk.out = got;
    talk.margins = NULL;
    talk.forced = kind == &decoder_bf16 ? want : NULL;
    decoder_attention *daemon = decoder_attnd_open(kind, c);
    run(m, daemon, &talk);
    decoder_attnd_close(daemon);
    if (kind == &decoder_bf16) {
        ck_assert_int_le(close_calls(want, margins, got), NUM / 50);
    } else {
        ck_assert_mem_eq(got, want, NUM);
    }
    ck_assert_int_gt(distinct(want), 20); // it did not get stuck on a few
    decoder_free(m);
}

static void converse_over(int way, const decoder_kind *kind) {
    attnd_client *c;
    attnd_errinfo info = {0};
    attnd_connect_opts opts = {.transport = transports[way],
                               .engine = way == IN_PROCESS ? attn_engine_cpu() : NULL};
    ATTND_CK_OK(attnd_connect(&c, d.url, &opts, &info));
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        converse(c, kind, seed);
    }
    attnd_close(c);
}

START_TEST(decoder_has_the_references_tokens) {
    converse_over(_i, &decoder_f32);
}
END_TEST

START_TEST(decoder_in_bf16_has_the_references_tokens) {
    converse_over(_i, &decoder_bf16);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_decoder");
    TCase *tc = tcase_create("decoder");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, decoder_has_the_references_tokens, 0, WAYS);
    suite_add_tcase(s, tc);
    tc = tcase_create("bf16"); // what a GPU can do: CK_RUN_CASE=bf16
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, decoder_in_bf16_has_the_references_tokens, 0, GPU_WAYS);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
