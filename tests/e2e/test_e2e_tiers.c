// Tiers: prompts that share prefixes which together are larger than the pool are served from tiers,
// and what attention over them gives is the reference's, whatever happens to the tiers and to the
// daemon.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvcache/kv_tier.h"
#include "tests/e2e/play.h"

// The pool has 128 blocks of 16 KiB, 16 tokens each; the prompts have 160.
enum { PROMPTS = 8, LEN = 320, BLOCKS = LEN / 16, ALL = PROMPTS * BLOCKS, POOL = 128 };
enum { WHOLE = LEN - 16 }; // what is found of a prompt that is all there

enum { MEMORY = 1, FILES = 2 };

static e2e_daemon d;
static e2e_client c;
static play_model m;
static play_seq first[PROMPTS];
static char file[96];

static const uint32_t *prompt(uint32_t p) {
    static uint32_t ids[LEN];
    for (uint32_t i = 0; i < LEN; i++) {
        ids[i] = p * 10007 + i;
    }
    return ids;
}

// no_files says why a file cannot be a tier here; true when it cannot.
static bool no_files(void) {
    attnd_errinfo why;
    char path[] = "/tmp/e2e_tiers_XXXXXX";
    int fd = mkstemp(path);
    close(fd);
    fd = open(path, O_RDWR | O_DIRECT);
    bool direct = fd >= 0;
    close(fd);
    unlink(path);
    if (kv_tier_file_check(&why) || !direct) {
        printf("e2e_tiers: files are left out: %s\n", direct ? why.text : "/tmp has no O_DIRECT");
        return true;
    }
    return false;
}

static void join(void) {
    e2e_connect(&c, d.url);
    play_hello(&c, "test");
    play_open(&c, &m);
}

// begin starts a daemon with tiers of those kinds and sizes.
static void begin(int kinds, const char *memory, const char *file_size) {
    char set_memory[64], set_file[128], set_size[64];
    const char *flags[16] = {"--set", "cache.memory=2MiB", "--set", "cache.slab=256KiB",
                             "--set", "tier.wait=60s"};
    int num = 6;
    e2e_dir(&d);
    d.keeper = true;
    snprintf(file, sizeof(file), "%s/tier", d.dir);
    snprintf(set_memory, sizeof(set_memory), "tier.memory=%s", memory);
    snprintf(set_file, sizeof(set_file), "tier.file=%s", file);
    snprintf(set_size, sizeof(set_size), "tier.file_size=%s", file_size);
    const char *sets[] = {kinds & MEMORY ? set_memory : NULL, kinds & FILES ? set_file : NULL,
                          kinds & FILES ? set_size : NULL};
    for (int i = 0; i < 3; i++) {
        if (sets[i]) {
            flags[num++] = "--set";
            flags[num++] = sets[i];
        }
    }
    e2e_start(&d, flags);
    m = play_tiny();
    join();
}

static void finish(void) {
    ck_assert_double_eq(e2e_stat(&c, "accounting_mismatches"), 0);
    ck_assert_double_eq(e2e_stat(&c, "blocks.in_use"), 0);
    for (uint32_t p = 0; p < PROMPTS; p++) {
        play_forget(&first[p]);
    }
    e2e_close(&c);
    unlink(file);
    e2e_stop(&d);
}

static void fill(void) {
    for (uint32_t p = 0; p < PROMPTS; p++) {
        play_create(&c, &m, &first[p]);
        ck_assert_uint_eq(play_prompt(&c, &first[p], NULL, prompt(p), LEN), 0);
        play_free_there(&c, &first[p]);
    }
    ck_assert_double_gt(e2e_stat(&c, "tiers.spills"), 0);
}

// again serves a prompt once more, and returns how many of its tokens were found; the other rows,
// which are random, are what the cache has from then on.
static uint32_t again(uint32_t p) {
    play_seq s;
    play_create(&c, &m, &s);
    uint32_t cached = play_prompt(&c, &s, &first[p], prompt(p), LEN);
    play_free_there(&c, &s);
    play_forget(&first[p]);
    first[p] = s;
    return cached;
}

static void restart(void) {
    e2e_close(&c);
    e2e_kill_worker(&d);
    e2e_await_ready(&d);
    join();
}

static const int kinds[] = {MEMORY, FILES, MEMORY | FILES};

// The sizes are together those of all prompts, and some.
START_TEST(prompts_larger_than_the_pool_are_found_again) {
    if (kinds[_i] & FILES && no_files()) {
        return;
    }
    bool both = kinds[_i] == (MEMORY | FILES);
    begin(kinds[_i], both ? "264KiB" : "2MiB", both ? "1MiB" : "2MiB");
    fill();
    for (uint32_t p = 0; p < PROMPTS; p++) {
        ck_assert_uint_ge(again(p), WHOLE);
    }
    ck_assert_double_ge(e2e_stat(&c, "tiers.fetches"), ALL - POOL);
    ck_assert_double_eq(e2e_stat(&c, "tiers.lost"), 0);
    ck_assert_int_eq(e2e_stat(&c, "tiers.moves") > 0, both); // from memory to the file
    restart();
    for (uint32_t p = 0; p < PROMPTS; p++) {
        ck_assert_uint_ge(again(p), WHOLE);
    }
    ck_assert_double_gt(e2e_stat(&c, "tiers.fetches"), 0);
    ck_assert_double_eq(e2e_stat(&c, "tiers.lost"), 0);
    finish();
}
END_TEST

// Killed while a step waits for blocks that are being spilled.
START_TEST(killed_amid_copies_it_serves_what_is_left) {
    if (kinds[_i] & FILES && no_files()) {
        return;
    }
    begin(kinds[_i], "2MiB", "2MiB");
    fill();
    for (uint32_t p = 0; p < 4; p++) {
        play_seq s;
        play_create(&c, &m, &s);
        e2e_reply r;
        e2e_buf b;
        e2e_flight f;
        const play_part part = {.seq = &s, .new_len = LEN, .tokens = prompt(p)};
        play_step_body(&b, ++c.id, &m, &part, 1, 60000);
        e2e_buf_seal(&b);
        e2e_send(&c, &f, b.data, b.bytes);
        e2e_sleep_ms((int)(p % 3));
        e2e_kill_worker(&d);
        e2e_recv(&f, &r);
        e2e_reply_fini(&r);
        e2e_buf_fini(&b);
        play_forget(&s);
        e2e_close(&c);
        e2e_await_ready(&d);
        join();
        ck_assert_uint_ge(again(p), WHOLE);
    }
    ck_assert_double_eq(e2e_stat(&c, "tiers.lost"), 0);
    finish();
}
END_TEST

START_TEST(a_tier_that_is_too_small_drops_what_came_first) {
    begin(MEMORY, "264KiB", "0"); // 16 blocks
    fill();
    ck_assert_double_eq(e2e_stat(&c, "tiers.dropped"), ALL - POOL - 16);
    ck_assert_uint_le(again(0), LEN - 16 * 16);
    ck_assert_uint_ge(again(PROMPTS - 1), WHOLE);
    finish();
}
END_TEST

static void change(long at, const char *bytes, size_t num) {
    int fd = open(file, O_WRONLY);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(pwrite(fd, bytes, num, at), (ssize_t)num);
    close(fd);
}

START_TEST(damage_is_missed_and_counted) {
    if (no_files()) {
        return;
    }
    begin(FILES, "0", "2MiB");
    fill();
    for (long at = 4096; at < 2 << 20; at += 16384) {
        change(at + 5000, "damage", 6);
    }
    for (uint32_t p = 0; p < PROMPTS; p++) {
        again(p); // outputs are right
    }
    ck_assert_double_gt(e2e_stat(&c, "tiers.lost"), 0);
    ck_assert_double_eq(e2e_stat(&c, "tiers.off"), 0);
    finish();
}
END_TEST

// make_room leaves as many blocks free as a prompt has: a step that does not wait spills nothing.
static void make_room(void) {
    play_seq s;
    play_step step;
    play_create(&c, &m, &s);
    const play_part part = {.seq = &s, .new_len = LEN};
    ATTND_CK_OK(play_step_open(&c, &m, &part, 1, 0, &step, NULL));
    play_attend(&c, &step, 0);
    play_attend(&c, &step, 1);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_free(&c, &s);
}

START_TEST(a_tier_that_fails_is_off_and_the_service_goes_on) {
    if (no_files()) {
        return;
    }
    begin(FILES, "0", "2MiB");
    fill();
    make_room();
    ck_assert_int_eq(truncate(file, 4096), 0);
    for (uint32_t p = 0; p < PROMPTS; p++) {
        again(p);
    }
    ck_assert_double_eq(e2e_stat(&c, "tiers.off"), 1);
    ck_assert_double_eq(e2e_stat(&c, "tiers.spilled"), 0);
    ck_assert(e2e_log_has(&d, "the file tier is off: read of the file: 0 bytes"));
    ck_assert_uint_ge(again(PROMPTS - 1), WHOLE); // in the arena
    restart();                                    // it is opened anew
    ck_assert_double_eq(e2e_stat(&c, "tiers.off"), 0);
    for (uint32_t p = 0; p < PROMPTS; p++) {
        again(p);
    }
    ck_assert_double_gt(e2e_stat(&c, "tiers.spilled"), 0);
    finish();
}
END_TEST

START_TEST(a_tier_that_cannot_be_opened_is_off_and_the_service_goes_on) {
    if (no_files()) {
        return;
    }
    begin(FILES, "0", "2MiB");
    e2e_close(&c);
    change(0, "a letter", 8); // another's file now
    e2e_kill_worker(&d);
    e2e_await_ready(&d);
    join();
    ck_assert_double_eq(e2e_stat(&c, "tiers.off"), 1);
    ck_assert(e2e_log_has(&d, "it is no tier's file, and left as it is"));
    for (uint32_t p = 0; p < 2; p++) {
        play_create(&c, &m, &first[p]);
        play_prompt(&c, &first[p], NULL, prompt(p), LEN);
        play_free_there(&c, &first[p]);
        ck_assert_uint_ge(again(p), WHOLE);
    }
    finish();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("e2e_tiers");
    TCase *t = tcase_create("tiers");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, prompts_larger_than_the_pool_are_found_again, 0, 3);
    tcase_add_loop_test(t, killed_amid_copies_it_serves_what_is_left, 0, 2);
    tcase_add_test(t, a_tier_that_is_too_small_drops_what_came_first);
    tcase_add_test(t, damage_is_missed_and_counted);
    tcase_add_test(t, a_tier_that_fails_is_off_and_the_service_goes_on);
    tcase_add_test(t, a_tier_that_cannot_be_opened_is_off_and_the_service_goes_on);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
