// Copies of rows: which ones gather a path, and what kv_copy_run does to the bytes.
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;
static uint64_t seq, step;

static void setup(void) {
    fix_init(&f);
    seq = fix_seq(&f);
}

static void teardown(void) {
    fix_fini(&f);
}

static uint32_t moves(const uint32_t *path, uint32_t num_path, kv_copy *out, uint32_t max) {
    uint32_t num = 99;
    ATTND_CK_OK(kv_step_moves(f.kv, step, 0, path, num_path, out, max, &num, &f.info));
    return num;
}

static void open_tree(uint32_t committed, uint32_t new_len) {
    bool may_wait;
    if (committed) {
        fix_append(&f, seq, committed);
    }
    ATTND_CK_OK(fix_step(&f, seq, new_len, 0, &step, &may_wait));
}

static void expect(const kv_copy *copy, uint32_t src, uint32_t src_token, uint32_t dst,
                   uint32_t dst_token, uint32_t num_tokens) {
    uint32_t entries;
    const uint32_t *table = kv_step_table(f.kv, step, 0, 0, &entries);
    ck_assert_uint_eq(copy->model, f.model);
    ck_assert_uint_eq(copy->group, 0);
    ck_assert_uint_eq(copy->src, table[src]);
    ck_assert_uint_eq(copy->dst, table[dst]);
    ck_assert_uint_eq(copy->src_token, src_token);
    ck_assert_uint_eq(copy->dst_token, dst_token);
    ck_assert_uint_eq(copy->num_tokens, num_tokens);
}

START_TEST(kv_step_moves_leaves_what_lies_right_alone) {
    kv_copy out[4];
    open_tree(2, 6);
    ck_assert_uint_eq(moves((const uint32_t[]){0, 1, 2}, 3, out, 4), 0);
    ck_assert_uint_eq(moves(NULL, 0, out, 0), 0);
    fix_commit(&f, step, 3);
}
END_TEST

START_TEST(kv_step_moves_joins_neighbours_within_blocks) {
    // tokens 2 .. 9; rows 2, 3, 4, 5 go to 0 .. 3: tokens 4 .. 7 to 2 .. 5, blocks of 4
    kv_copy out[4];
    open_tree(2, 8);
    ck_assert_uint_eq(moves((const uint32_t[]){2, 3, 4, 5}, 4, out, 4), 2);
    expect(&out[0], 1, 0, 0, 2, 2); // tokens 4, 5 to 2, 3
    expect(&out[1], 1, 2, 1, 0, 2); // tokens 6, 7 to 4, 5: the destination begins a block
    fix_commit(&f, step, 4);
}
END_TEST

START_TEST(kv_step_moves_takes_a_path_with_gaps) {
    kv_copy out[4];
    open_tree(0, 12);
    ck_assert_uint_eq(moves((const uint32_t[]){0, 2, 5, 11}, 4, out, 4), 3);
    expect(&out[0], 0, 2, 0, 1, 1);
    expect(&out[1], 1, 1, 0, 2, 1);
    expect(&out[2], 2, 3, 0, 3, 1);
    uint32_t num = 99;
    ATTND_CK_ERR(
        kv_step_moves(f.kv, step, 0, (const uint32_t[]){0, 2, 5, 11}, 4, out, 2, &num, &f.info),
        ATTND_EMSGSIZE);
    ck_assert_uint_eq(num, 99);
    fix_commit(&f, step, 4);
}
END_TEST

START_TEST(kv_step_moves_bad_path_is_refused) {
    kv_copy out[4];
    uint32_t num;
    open_tree(1, 4);
    const uint32_t bad[][2] = {{0, 4}, {1, 1}, {2, 1}, {0, UINT32_MAX}, {4, 5}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ATTND_CK_ERR(kv_step_moves(f.kv, step, 0, bad[i], 2, out, 4, &num, &f.info), ATTND_EINVAL);
        ck_assert_str_eq(f.info.field, "path");
    }
    ATTND_CK_ERR(kv_step_moves(f.kv, step, 1, bad[0], 1, out, 4, &num, &f.info), ATTND_EINVAL);
    fix_commit(&f, step, 0);
    ATTND_CK_ERR(kv_step_moves(f.kv, step, 0, bad[0], 1, out, 4, &num, &f.info), ATTND_ESTALE);
}
END_TEST

// ---- bytes: a model of 2 layers, 2 heads, 4 tokens, K rows of 12 bytes, V rows of 4

enum { LAYERS = 2, HEADS = 2, TOKENS = 4, K_ROW = 12, V_ROW = 4 };
enum { LAYER_BYTES = HEADS * TOKENS * (K_ROW + V_ROW) };

static char *row(uint32_t entry, int layer, int head, int token, bool value) {
    char *block = f.memory + (size_t)entry * KV_BLOCK_UNIT + layer * LAYER_BYTES;
    return value ? block + HEADS * TOKENS * K_ROW + (head * TOKENS + token) * V_ROW
                 : block + (head * TOKENS + token) * K_ROW;
}

static void fill(uint32_t entry, int token, int content) {
    for (int l = 0; l < LAYERS; l++) {
        for (int h = 0; h < HEADS; h++) {
            memset(row(entry, l, h, token, false), content + 16 * l + 32 * h, K_ROW);
            memset(row(entry, l, h, token, true), content + 16 * l + 32 * h + 64, V_ROW);
        }
    }
}

static void expect_row(uint32_t entry, int token, int content) {
    for (int l = 0; l < LAYERS; l++) {
        for (int h = 0; h < HEADS; h++) {
            char want[K_ROW];
            memset(want, content + 16 * l + 32 * h, sizeof(want));
            ck_assert_int_eq(memcmp(row(entry, l, h, token, false), want, K_ROW), 0);
            memset(want, content + 16 * l + 32 * h + 64, sizeof(want));
            ck_assert_int_eq(memcmp(row(entry, l, h, token, true), want, V_ROW), 0);
        }
    }
}

static uint32_t open_rows_model(void) {
    kv_model_spec spec = fix_spec("rows", f.tenant);
    uint32_t model;
    spec.groups[0] = (kv_group_spec){.layers = LAYERS,
                                     .kv_heads = HEADS,
                                     .k_row_bytes = K_ROW,
                                     .v_row_bytes = V_ROW,
                                     .block_tokens = TOKENS,
                                     .window_left = -1};
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
    return model;
}

START_TEST(kv_copy_run_moves_every_row_of_every_layer_and_head) {
    kv_copy copy = {
        .model = open_rows_model(), .src = 3, .dst = 9, .src_token = 1, .num_tokens = 2};
    for (int t = 0; t < TOKENS; t++) {
        fill(3, t, 1 + t);
        fill(9, t, 8 + t);
    }
    ATTND_CK_OK(kv_copy_run(f.kv, &copy, 1, &f.info));
    const int want[TOKENS] = {2, 3, 10, 11}; // tokens 1, 2 of block 3, then what was there
    for (int t = 0; t < TOKENS; t++) {
        expect_row(9, t, want[t]);
        expect_row(3, t, 1 + t);
    }
}
END_TEST

START_TEST(kv_copy_run_may_overlap_itself) {
    kv_copy copy = {
        .model = open_rows_model(), .src = 3, .dst = 3, .src_token = 1, .num_tokens = 3};
    for (int t = 0; t < TOKENS; t++) {
        fill(3, t, 1 + t);
    }
    ATTND_CK_OK(kv_copy_run(f.kv, &copy, 1, &f.info));
    const int want[TOKENS] = {2, 3, 4, 4};
    for (int t = 0; t < TOKENS; t++) {
        expect_row(3, t, want[t]);
    }
}
END_TEST

// ---- the arena's table

static kv_move seen[16];
static uint32_t num_seen;

// note writes a move down; the third fails.
static attnd_err note(const kv_arena *arena, const kv_move *move, attnd_errinfo *info) {
    (void)arena;
    if (num_seen == 2) {
        return attnd_fail(info, ATTND_ECUDA, "cuda", "lost");
    }
    seen[num_seen++] = *move;
    return ATTND_OK;
}

static void expect_move(uint32_t i, uint64_t src, uint64_t dst, uint64_t row_bytes, uint64_t pitch,
                        uint64_t num_rows) {
    ck_assert_uint_eq(seen[i].src, src);
    ck_assert_uint_eq(seen[i].dst, dst);
    ck_assert_uint_eq(seen[i].row_bytes, row_bytes);
    ck_assert_uint_eq(seen[i].pitch, pitch);
    ck_assert_uint_eq(seen[i].num_rows, num_rows);
}

// K and V rows of one length, 3 layers, 2 heads: 12 heads of 4 tokens of 8 bytes, side by side.
START_TEST(a_copy_between_blocks_is_one_move_of_the_arenas) {
    static const kv_arena_ops ops = {.kind = "device", .move = note};
    kv_model_spec spec = fix_spec("even", f.tenant);
    uint32_t model;
    spec.groups[0] = (kv_group_spec){.layers = 3,
                                     .kv_heads = 2,
                                     .k_row_bytes = 8,
                                     .v_row_bytes = 8,
                                     .block_tokens = TOKENS,
                                     .window_left = -1};
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
    f.arena.ops = &ops;
    num_seen = 0;
    const kv_copy copies[] = {
        {.model = model, .src = 3, .dst = 9, .src_token = 1, .num_tokens = 3},
        // down by two within its block, which does not overlap
        {.model = model, .src = 5, .dst = 5, .src_token = 2, .num_tokens = 2},
        {.model = model, .src = 6, .dst = 6, .src_token = 1, .num_tokens = 2},
    };
    ATTND_CK_ERR(kv_copy_run(f.kv, copies, 3, &f.info), ATTND_ECUDA);
    ck_assert_str_eq(f.info.text, "lost");
    ck_assert_uint_eq(num_seen, 2);
    expect_move(0, 3 * KV_BLOCK_UNIT + 8, 9 * KV_BLOCK_UNIT, 24, 32, 12);
    expect_move(1, 5 * KV_BLOCK_UNIT + 16, 5 * KV_BLOCK_UNIT, 16, 32, 12);
    num_seen = 0;
    ATTND_CK_OK(kv_copy_run(f.kv, copies + 2, 1, &f.info));
    ck_assert_uint_eq(num_seen, 2); // row by row: it overlaps itself
    expect_move(0, 6 * KV_BLOCK_UNIT + 8, 6 * KV_BLOCK_UNIT, 8, 32, 12);
    expect_move(1, 6 * KV_BLOCK_UNIT + 16, 6 * KV_BLOCK_UNIT + 8, 8, 32, 12);
}
END_TEST

// Every subset of 10 rows behind every committed length of a block, gathered in place.
START_TEST(kv_step_moves_gather_every_path) {
    enum { ROWS = 10 };
    uint32_t model = open_rows_model();
    for (uint32_t committed = 0; committed < TOKENS; committed++) {
        uint64_t own;
        uint32_t entries, num, accepted;
        const kv_copy *copies;
        bool may_wait;
        ATTND_CK_OK(kv_seq_create(f.kv, fix_rq(&f), model, &own, &f.info));
        kv_step_seq s = {.seq = own, .new_len = committed};
        ATTND_CK_OK(
            kv_step_open(f.kv, fix_rq(&f), model, &s, 1, &step, &copies, &num, &may_wait, &f.info));
        fix_commit(&f, step, committed);
        s = (kv_step_seq){.seq = own, .new_len = ROWS};
        ATTND_CK_OK(
            kv_step_open(f.kv, fix_rq(&f), model, &s, 1, &step, &copies, &num, &may_wait, &f.info));
        const uint32_t *table = kv_step_table(f.kv, step, 0, 0, &entries);
        for (uint32_t mask = 0; mask < 1u << ROWS; mask++) {
            uint32_t path[ROWS];
            kv_copy out[ROWS];
            accepted = 0;
            for (uint32_t t = 0; t < committed + ROWS; t++) {
                fill(table[t / TOKENS], (int)(t % TOKENS), (int)t);
            }
            for (uint32_t r = 0; r < ROWS; r++) {
                if (mask >> r & 1) {
                    path[accepted++] = r;
                }
            }
            ATTND_CK_OK(kv_step_moves(f.kv, step, 0, path, accepted, out, ROWS, &num, &f.info));
            ATTND_CK_OK(kv_copy_run(f.kv, out, num, &f.info));
            for (uint32_t t = 0; t < committed + accepted; t++) {
                uint32_t want = t < committed ? t : committed + path[t - committed];
                expect_row(table[t / TOKENS], (int)(t % TOKENS), (int)want);
            }
        }
        ATTND_CK_OK(kv_step_abort(f.kv, fix_rq(&f), step));
    }
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_copy");
    TCase *t = tcase_create("copy");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, kv_step_moves_leaves_what_lies_right_alone);
    tcase_add_test(t, kv_step_moves_joins_neighbours_within_blocks);
    tcase_add_test(t, kv_step_moves_takes_a_path_with_gaps);
    tcase_add_test(t, kv_step_moves_bad_path_is_refused);
    tcase_add_test(t, kv_copy_run_moves_every_row_of_every_layer_and_head);
    tcase_add_test(t, kv_copy_run_may_overlap_itself);
    tcase_add_test(t, a_copy_between_blocks_is_one_move_of_the_arenas);
    tcase_add_test(t, kv_step_moves_gather_every_path);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
