// What a restart says of the cache that it goes on with.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/log.h"
#include "server/srv_resume.h"
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;
static char lines[4096];

static void sink(attnd_log_level level, const char *line, size_t len) {
    (void)level;
    (void)len;
    size_t used = strlen(lines);
    snprintf(lines + used, sizeof(lines) - used, "%s\n", line);
}

static kv_opts options(void) {
    kv_opts opts = fix_opts();
    opts.prefix_blocks = FIX_BLOCKS;
    opts.prefix_block_tokens = FIX_BLOCK_TOKENS;
    return opts;
}

// fill commits four full blocks of known tokens.
static void fill(void) {
    const kv_opts opts = options();
    static uint32_t ids[4 * FIX_BLOCK_TOKENS];
    const uint32_t *tokens = ids, num = 4 * FIX_BLOCK_TOKENS;
    uint64_t step;
    bool may_wait;
    fix_init_opts(&f, &opts);
    ATTND_CK_OK(fix_step(&f, fix_seq(&f), num, 0, &step, &may_wait));
    ATTND_CK_OK(kv_step_commit_ids(f.kv, fix_rq(&f), step, &num, &tokens, 1, &f.info));
}

static void resume(void) {
    const kv_opts opts = options();
    int fd = dup(kv_ledger_fd(f.kv));
    kv_free(f.kv);
    lines[0] = 0;
    attnd_log_set_sink(sink);
    ATTND_CK_OK(srv_resume_cache(&f.kv, &f.arena, &opts, fd, &f.info));
    attnd_log_set_sink(NULL);
}

START_TEST(a_whole_cache_is_taken_over_without_a_warning) {
    fill();
    resume();
    ck_assert_ptr_nonnull(strstr(lines, "1 sequences, 4 blocks"));
    ck_assert_ptr_null(strstr(lines, "dropped"));
    fix_fini(&f);
}
END_TEST

START_TEST(dropped_prefixes_are_told) {
    fill();
    kv_node_ids(f.kv, 1)[2] ^= 8; // and what is behind it
    resume();
    ck_assert_ptr_nonnull(strstr(lines, "the prefix cache has 1 blocks, 3 were dropped"));
    fix_fini(&f);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_resume");
    TCase *t = tcase_create("cache");
    tcase_add_test(t, a_whole_cache_is_taken_over_without_a_warning);
    tcase_add_test(t, dropped_prefixes_are_told);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
