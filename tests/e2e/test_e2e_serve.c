// The main story over a real socket: hello, model, sequences, steps, attends, commits; every output
// is compared with the float64 reference.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/e2e/play.h"

static const char *const flags[] = {"--set", "cache.memory=64MiB",    "--set", "cache.slab=1MiB",
                                    "--set", "limits.connections=16", NULL};

static e2e_daemon d;
static e2e_client c;

static void setup(void) {
    memset(&d, 0, sizeof(d));
    e2e_start(&d, flags);
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
}

static void teardown(void) {
    e2e_close(&c);
    e2e_stop(&d);
}

START_TEST(ready_is_one_line) {
    ck_assert_ptr_nonnull(strstr(d.ready, "attnd ready: ipc://"));
    ck_assert_ptr_eq(strchr(d.ready, '\n'), d.ready + strlen(d.ready) - 1);
}
END_TEST

START_TEST(a_conversation_has_the_references_outputs) {
    play_model m = play_tiny();
    play_seq s;
    play_open(&c, &m);
    play_create(&c, &m, &s);
    play_seq *const seqs[] = {&s};
    play_token(&c, seqs, 1, 50); // prompt
    for (int i = 0; i < 20; i++) {
        play_token(&c, seqs, 1, 1);
    }
    ck_assert_uint_eq(s.len, 70);
    play_free(&c, &s);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}
END_TEST

START_TEST(a_batch_of_ragged_sequences_is_packed_in_step_order) {
    play_model m = play_tiny();
    play_seq s[5];
    play_open(&c, &m);
    play_part parts[5];
    memset(parts, 0, sizeof(parts));
    for (uint32_t i = 0; i < 5; i++) {
        play_create(&c, &m, &s[i]);
        parts[i].seq = &s[i];
        parts[i].new_len = 1 + 7 * i;
    }
    play_step step;
    for (int round = 0; round < 3; round++) {
        ATTND_CK_OK(play_step_open(&c, &m, parts, 5, 60000, &step, NULL));
        play_attend(&c, &step, 1); // any order of layers
        play_attend(&c, &step, 0);
        play_attend(&c, &step, 1); // again: the same slots
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    }
    for (uint32_t i = 0; i < 5; i++) {
        ck_assert_uint_eq(s[i].len, 3 * (1 + 7 * i));
        play_free(&c, &s[i]);
    }
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_serve");
    TCase *tc = tcase_create("serve");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, ready_is_one_line);
    tcase_add_test(tc, a_conversation_has_the_references_outputs);
    tcase_add_test(tc, a_batch_of_ragged_sequences_is_packed_in_step_order);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
