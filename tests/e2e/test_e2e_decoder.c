// A whole decoder over the daemon gives the tokens that it gives with the float64 reference.
#include <string.h>

#include "tests/e2e/decoder.h"
#include "tests/e2e/harness.h"

enum { PROMPT = 150, NUM = 200, SEEDS = 3 };

static const char *const flags[] = {"--set", "cache.memory=64MiB", "--set", "cache.slab=1MiB",
                                    NULL};
static const attnd_transport transports[] = {ATTND_TRANSPORT_NNG, ATTND_TRANSPORT_RING};

static e2e_daemon d;

static void setup(void) {
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
}

static void teardown(void) {
    e2e_stop(&d);
}

static void by_reference(decoder *m, const uint8_t *prompt, uint8_t *out) {
    decoder_attention *a = decoder_reference_open();
    ck_assert_ptr_nonnull(a);
    ck_assert(decoder_run(m, a, prompt, PROMPT, out, NUM));
    decoder_reference_close(a);
}

static void by_daemon(attnd_client *c, decoder *m, const uint8_t *prompt, uint8_t *out) {
    decoder_attention *a = decoder_attnd_open(c);
    ck_assert_ptr_nonnull(a);
    ck_assert(decoder_run(m, a, prompt, PROMPT, out, NUM));
    decoder_attnd_close(a);
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

START_TEST(decoder_has_the_references_tokens) {
    attnd_client *c;
    attnd_errinfo info = {0};
    attnd_connect_opts opts = {.transport = transports[_i]};
    ATTND_CK_OK(attnd_connect(&c, d.url, &opts, &info));
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        uint8_t prompt[PROMPT], want[NUM], got[NUM];
        for (int i = 0; i < PROMPT; i++) {
            prompt[i] = (uint8_t)(i * 37 + (int)seed);
        }
        decoder *m = decoder_create(seed);
        ck_assert_ptr_nonnull(m);
        by_reference(m, prompt, want);
        by_daemon(c, m, prompt, got);
        ck_assert_mem_eq(got, want, NUM);
        ck_assert_int_gt(distinct(want), 20); // it did not get stuck on a few
        decoder_free(m);
    }
    attnd_close(c);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_decoder");
    TCase *tc = tcase_create("decoder");
    tcase_set_timeout(tc, 120);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, decoder_has_the_references_tokens, 0, 2);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
