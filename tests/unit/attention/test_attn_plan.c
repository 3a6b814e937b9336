// Plans: every piece of work is there once, splits begin where they must, and workers are kept
// busy.
#include "attention/attn_plan.h"

#include <stdlib.h>
#include <string.h>

#include "attention/attn_mask.h"
#include "tests/check_main.h"

enum { MAX_ROWS = 256, MAX_WORKERS = 64, PREFILL_ROWS = 96, DECODE_ROWS = 64 };

static attn_plan plan;
static attn_params params;
static attn_row rows[MAX_ROWS];
static uint64_t storage[1 << 16];
static uint64_t seed = 1;

static int32_t below(int32_t n) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (int32_t)((seed >> 33) % (uint64_t)n);
}

static void start(int32_t q_heads, int32_t kv_heads) {
    ck_assert_uint_le(attn_plan_bytes(MAX_ROWS), sizeof(storage));
    attn_plan_init(&plan, storage, MAX_ROWS);
    memset(rows, 0, sizeof(rows));
    params = (attn_params){.shape = {.q_heads = q_heads,
                                     .kv_heads = kv_heads,
                                     .head_dim = 128,
                                     .v_head_dim = 128,
                                     .block_tokens = 16},
                           .rows = rows};
}

static void add(int32_t kv_len, int32_t q_len) {
    rows[params.num_rows++] = (attn_row){.kv_len = kv_len,
                                         .q_len = q_len,
                                         .q_count = q_len,
                                         .flags = ATTN_CAUSAL,
                                         .window_left = -1,
                                         .window_right = -1};
}

static attn_machine machine_of(uint32_t workers) {
    return (attn_machine){.workers = workers,
                          .decode_rows = DECODE_ROWS,
                          .prefill_rows = PREFILL_ROWS,
                          .state_floats = 1 << 24,
                          .max_groups = 1 << 16};
}

static void make(uint32_t workers) {
    attn_machine machine = machine_of(workers);
    ATTND_CK_OK(attn_plan_make(&plan, &params, &machine, NULL));
}

static int32_t group(void) {
    return params.shape.q_heads / params.shape.kv_heads;
}

// cover counts how often the plan computes each key of each query row of each KV head of a row, by
// differences: line[key] is that of key less that of key - 1; line[kv_len + 1] is how often the
// query row is finished.
typedef struct cover {
    int16_t *counts; // [kv_heads, q_rows, kv_len + 2]
    size_t q_rows, width;
} cover;

static int16_t *line_of(const cover *c, int32_t head, int32_t q) {
    return c->counts + ((size_t)head * c->q_rows + (size_t)q) * c->width;
}

static void add_to(int16_t *x, int n) {
    *x = (int16_t)(*x + n);
}

static void count_task(const cover *c, const attn_plan_part *part, int32_t kv_len) {
    const attn_task *t = &part->task;
    ck_assert_int_le(t->head_count * t->q_count, ATTN_TASK_ROWS);
    ck_assert_int_le(t->q_count, part->row->decode ? DECODE_ROWS : PREFILL_ROWS);
    ck_assert(part->row->decode || t->head_count == 1);
    for (int32_t h = t->head_first; h < t->head_first + t->head_count; h++) {
        for (int32_t q = t->q_first; q < t->q_first + t->q_count; q++) {
            int16_t *line = line_of(c, h, q);
            add_to(&line[t->key_first], 1);
            add_to(&line[t->key_end], -1);
            add_to(&line[kv_len + 1], part->split == 0);
        }
    }
}

// check_row wants each key that a query sees computed once, when the row asks for the query at all.
static void check_row(const cover *c, const attn_row *row) {
    for (int32_t h = 0; h < params.shape.kv_heads; h++) {
        for (int32_t q = 0; q < (int32_t)c->q_rows; q++) {
            int32_t token = q / group();
            bool is_asked = token >= row->q_first && token < row->q_first + row->q_count;
            const int16_t *line = line_of(c, h, q);
            attn_span span = attn_mask_span(row, token, token);
            int count = 0;
            int num_wrong = 0;
            for (int32_t key = 0; key < row->kv_len; key++) {
                count += line[key];
                num_wrong += key >= span.first && key < span.end && count != is_asked;
            }
            ck_assert_int_eq(num_wrong, 0);
            ck_assert_int_eq(line[row->kv_len + 1], is_asked);
        }
    }
}

// check_cover wants every piece of work to be done exactly once.
static void check_cover(void) {
    cover covers[MAX_ROWS];
    for (uint32_t r = 0; r < params.num_rows; r++) {
        covers[r].q_rows = (size_t)(rows[r].q_len * group());
        covers[r].width = (size_t)rows[r].kv_len + 2;
        size_t num = (size_t)params.shape.kv_heads * covers[r].q_rows * covers[r].width;
        covers[r].counts = calloc(num + 1, sizeof(int16_t));
    }
    for (uint64_t i = 0; i < plan.num_tasks; i++) {
        attn_plan_part part = attn_plan_task(&plan, &params, i);
        if (part.task.q_count > 0) {
            count_task(&covers[part.task.row], &part, rows[part.task.row].kv_len);
        }
    }
    for (uint32_t r = 0; r < params.num_rows; r++) {
        check_row(&covers[r], &rows[r]);
        free(covers[r].counts);
    }
}

START_TEST(every_query_row_meets_every_key_once) {
    static const int32_t kv_heads[] = {1, 2, 8};
    static const int32_t ratios[] = {1, 3, 8, 20};
    for (int n = 0; n < 40; n++) {
        int32_t heads = kv_heads[below(3)];
        start(heads * ratios[below(4)], heads);
        params.deterministic = below(3) == 0;
        params.num_splits = params.deterministic || below(2) ? 0 : 1 + below(ATTN_MAX_SPLITS);
        for (int i = 1 + below(4); i > 0; i--) {
            add(below(1500), below(2) ? 1 + below(8) : below(60));
            attn_row *row = &rows[params.num_rows - 1];
            row->flags = below(2) ? (uint32_t)ATTN_CAUSAL : 0;
            row->window_left = below(3) == 0 ? below(1000) : -1;
            row->q_first = row->q_len > 0 && below(3) == 0 ? below(row->q_len) : 0;
            row->q_count = row->q_len - row->q_first;
        }
        make(1 + (uint32_t)below(MAX_WORKERS));
        check_cover();
    }
}
END_TEST

START_TEST(no_tile_crosses_a_query_block) {
    for (int n = 0; n < 30; n++) {
        start(8, 2);
        add(300, 1 + below(120));
        attn_block_mask mask = {.q_block = 1 + below(40)};
        rows[0].block_mask = &mask;
        rows[0].q_first = below(rows[0].q_len);
        rows[0].q_count = rows[0].q_len - rows[0].q_first;
        make(4);
        check_cover();
        for (uint64_t i = 0; i < plan.num_tasks; i++) {
            attn_task t = attn_plan_task(&plan, &params, i).task;
            int32_t first = t.q_first / group() / mask.q_block;
            int32_t last = (t.q_first + t.q_count - 1) / group() / mask.q_block;
            ck_assert(t.q_count == 0 || first == last);
        }
    }
}
END_TEST

START_TEST(deterministic_splits_begin_at_multiples_of_1024) {
    for (uint32_t workers = 1; workers <= MAX_WORKERS; workers *= 4) {
        start(32, 8);
        params.deterministic = true;
        add(5000, 1);
        add(100000, 1);
        rows[1].window_left = 3000;
        add(2000, 200);
        make(workers);
        ck_assert_int_eq(plan.rows[0].num_splits, 5);
        ck_assert_int_eq(plan.rows[1].num_splits, 4); // 94208 to 100000 holds 96999 up
        for (int r = 0; r < 3; r++) {
            ck_assert_int_eq(plan.rows[r].key_first % ATTN_SPLIT_TOKENS, 0);
            ck_assert_int_eq(plan.rows[r].split_keys, ATTN_SPLIT_TOKENS);
        }
    }
}
END_TEST

START_TEST(forced_splits_are_as_many_as_asked) {
    start(8, 2);
    add(1000, 1);
    add(3, 1);
    add(0, 1);
    add(64, 64);
    for (int32_t splits = 1; splits <= ATTN_MAX_SPLITS; splits += 7) {
        params.num_splits = splits;
        make(8);
        ck_assert_int_eq(plan.max_splits, splits);
        for (int r = 0; r < 4; r++) {
            ck_assert_int_eq(plan.rows[r].num_splits, splits);
        }
        check_cover();
    }
}
END_TEST

// makespan simulates workers that take the tasks in order and returns busiest / mean; ms is in
// units of keys * rows.
static double makespan(uint32_t workers) {
    uint64_t load[MAX_WORKERS] = {0};
    uint64_t total = 0;
    for (uint64_t i = 0; i < plan.num_tasks; i++) {
        attn_task t = attn_plan_task(&plan, &params, i).task;
        int32_t g = group();
        attn_span span =
            attn_mask_span(&rows[t.row], t.q_first / g, (t.q_first + t.q_count - 1) / g);
        int32_t first = span.first > t.key_first ? span.first : t.key_first;
        int32_t end = span.end < t.key_end ? span.end : t.key_end;
        uint64_t cost = end > first ? (uint64_t)(end - first) * (uint64_t)t.head_count *
                                          (uint64_t)(t.q_count + 4)
                                    : 0;
        uint32_t least = 0;
        for (uint32_t w = 1; w < workers; w++) {
            least = load[w] < load[least] ? w : least;
        }
        load[least] += cost;
        total += cost;
    }
    uint64_t most = 0;
    for (uint32_t w = 0; w < workers; w++) {
        most = load[w] > most ? load[w] : most;
    }
    return (double)most * workers / (double)total;
}

START_TEST(one_long_sequence_keeps_every_worker_busy) {
    for (uint32_t workers = 2; workers <= MAX_WORKERS; workers *= 2) {
        start(32, 8);
        add(131072, 1);
        make(workers);
        ck_assert_uint_ge(plan.num_tasks, 4 * workers);
        ck_assert_double_lt(makespan(workers), 1.15);
        params.deterministic = true;
        make(workers);
        ck_assert_double_lt(makespan(workers), 1.15);
    }
}
END_TEST

// check_splits wants the splits of row 0 to have these numbers of keys.
static void check_splits(const int32_t *keys, int32_t num) {
    int32_t at = plan.rows[0].key_first;
    ck_assert_int_eq(plan.rows[0].num_splits, num);
    for (int32_t split = 0; split < num; split++) {
        int32_t first, end;
        attn_plan_split(&plan.rows[0], split, &first, &end);
        ck_assert_int_eq(first, at);
        ck_assert_int_eq(end - first, keys[split]);
        at = end;
    }
    ck_assert_int_eq(at, plan.rows[0].key_end);
}

// A key of 8 heads of 4 rows costs 64, so that 128 keys are as much as a task has at least.
START_TEST(a_long_decode_is_cut_in_rounds) {
    static const int32_t two[] = {1792, 1792, 128, 128, 128, 128};
    static const int32_t twice[] = {2048, 2048, 1792, 1792, 128, 128, 128, 128};
    static const int32_t uneven[] = {384, 384, 128, 128, 128, 48}; // steps of 64, the last is cut
    static const int32_t four[] = {768, 768, 768, 768, 128, 128, 128, 128, 128, 128, 128, 128};
    start(32, 8);
    add(4096, 1);
    make(2);
    check_splits(two, 6);
    make(4);
    check_splits(four, 12);
    start(32, 8);
    add(8192, 1);
    make(2);
    check_splits(twice, 8);
    start(32, 8);
    add(1200, 1);
    make(2);
    check_splits(uneven, 6);
}
END_TEST

START_TEST(a_decode_too_short_for_rounds_is_cut_in_equal_splits) {
    static const int32_t equal[] = {256, 256, 256, 256, 256, 256, 256, 256,
                                    256, 256, 256, 256, 256, 256, 256, 256};
    start(32, 8);
    add(4096, 1);
    make(32);
    ck_assert_int_eq(plan.rows[0].round_splits, 0);
    check_splits(equal, 16);
}
END_TEST

// The parts of a launch that are much of it come last, for their short last tasks.
START_TEST(rows_in_rounds_even_out_what_comes_before) {
    for (uint32_t workers = 2; workers <= 8; workers *= 2) {
        start(32, 8);
        add(65536, 1);
        for (int i = 0; i < 3; i++) {
            add(4000 + below(4000), 1);
        }
        make(workers);
        ck_assert_int_eq(plan.rows[0].round_splits, (int32_t)workers);
        ck_assert_double_lt(makespan(workers), 1.03);
        check_cover();
    }
}
END_TEST

START_TEST(a_ragged_batch_keeps_every_worker_busy) {
    for (uint32_t workers = 2; workers <= 32; workers *= 2) {
        start(32, 8);
        for (int i = 0; i < 128; i++) {
            add(1 + below(below(8) == 0 ? 16000 : 2000), 1);
        }
        make(workers);
        ck_assert_double_lt(makespan(workers), 1.05);
    }
}
END_TEST

START_TEST(a_causal_prefill_keeps_every_worker_busy) {
    for (uint32_t workers = 2; workers <= 16; workers *= 2) {
        start(32, 8);
        add(2048, 2048);
        make(workers);
        ck_assert_double_lt(makespan(workers), 1.05);
    }
}
END_TEST

START_TEST(one_worker_spreads_nothing) {
    start(32, 8);
    add(100000, 1);
    add(5000, 100);
    make(1);
    ck_assert_int_eq(plan.max_splits, 1);
    ck_assert_uint_eq(plan.state_floats, 0);
    ck_assert_uint_eq(plan.num_groups, 0);
}
END_TEST

START_TEST(states_stay_inside_their_room) {
    for (uint64_t room = 0; room < 1 << 20; room = room * 3 + 1000) {
        start(32, 8);
        for (int i = 0; i < 64; i++) {
            add(1 + below(40000), 1);
        }
        attn_machine machine = machine_of(32);
        machine.state_floats = room;
        machine.max_groups = 20;
        ATTND_CK_OK(attn_plan_make(&plan, &params, &machine, NULL));
        ck_assert_uint_le(plan.state_floats, room);
        ck_assert_uint_le(plan.num_groups, 20);
        bool overlaps = false;
        uint64_t end = 0;
        for (uint32_t r = 0; r < params.num_rows; r++) {
            overlaps |= plan.rows[r].spread && plan.rows[r].state_first < end;
            end = plan.rows[r].spread ? plan.rows[r].state_first +
                                            plan.rows[r].num_tasks * plan.rows[r].state_stride
                                      : end;
        }
        ck_assert(!overlaps && end <= room);
    }
}
END_TEST

START_TEST(every_new_token_is_appended_once) {
    start(4, 2);
    int64_t want = 0;
    for (int i = 0; i < 50; i++) {
        add(1000, 1);
        rows[i].new_len = below(3) == 0 ? 0 : below(300);
        want += rows[i].new_len;
    }
    make(4);
    int64_t got = 0;
    uint32_t row = 0;
    int32_t next = 0;
    for (uint64_t i = 0; i < plan.num_appends; i++) {
        attn_append_task t = attn_plan_append(&plan, &params, i);
        next = t.row == row ? next : 0;
        row = t.row;
        ck_assert_int_eq(t.token_first, next);
        ck_assert(t.token_count > 0 && t.token_count <= ATTN_APPEND_TOKENS);
        next += t.token_count;
        ck_assert_int_le(next, rows[row].new_len);
        got += t.token_count;
    }
    ck_assert_int_eq(got, want);
}
END_TEST

START_TEST(short_queries_decode_and_long_ones_prefill) {
    start(32, 4); // 8 rows a token
    add(100, 1);
    add(100, 8); // 64 rows: fits
    add(100, 9);
    make(2);
    ck_assert(plan.rows[0].decode && plan.rows[1].decode && !plan.rows[2].decode);
    start(64, 4); // 16 rows a token
    add(100, 4);
    add(100, 5);
    make(2);
    ck_assert(plan.rows[0].decode && !plan.rows[1].decode);
}
END_TEST

START_TEST(decode_walks_the_heads_of_a_block_together) {
    start(32, 8);
    add(32768, 1);
    make(2);
    ck_assert_int_eq(plan.rows[0].head_step, 8);
}
END_TEST

START_TEST(kernels_have_room_for_4_rows_a_head) {
    start(512, 512);
    add(1, 1);
    make(2);
    ck_assert_int_eq(plan.rows[0].head_step, 128);
}
END_TEST

START_TEST(windows_limit_the_keys) {
    start(4, 2);
    add(100000, 1);
    rows[0].window_left = 100;
    make(8);
    ck_assert_int_eq(plan.rows[0].key_first, 99840); // 99899 rounded down to a step
    ck_assert_int_eq(plan.rows[0].key_end, 100000);
}
END_TEST

START_TEST(too_many_rows_are_refused) {
    start(4, 2);
    params.num_rows = MAX_ROWS + 1;
    attn_machine machine = machine_of(2);
    attnd_errinfo info;
    ATTND_CK_ERR(attn_plan_make(&plan, &params, &machine, &info), ATTND_EMSGSIZE);
    ck_assert_str_eq(info.field, "rows");
}
END_TEST

START_TEST(the_longest_lengths_do_not_overflow) {
    start(1024, 1024);
    add(ATTN_MAX_TOKENS, ATTN_MAX_TOKENS);
    add(ATTN_MAX_TOKENS, 1);
    rows[0].new_len = ATTN_MAX_TOKENS;
    make(64);
    ck_assert_uint_gt(plan.num_tasks, 1u << 30);
    attn_task first = attn_plan_task(&plan, &params, 0).task;
    ck_assert(first.q_count > 0 && first.head_count > 0);
    uint64_t last = plan.num_appends - 1;
    ck_assert_int_eq(attn_plan_append(&plan, &params, last).token_first,
                     ATTN_MAX_TOKENS - ATTN_APPEND_TOKENS);
}
END_TEST

START_TEST(a_plan_prints_a_line_a_row) {
    char text[4096] = {0};
    start(4, 2);
    add(100, 1);
    add(100, 50);
    make(2);
    FILE *out = fmemopen(text, sizeof(text), "w");
    attn_plan_print(&plan, out);
    fclose(out);
    ck_assert_ptr_nonnull(strstr(text, "plan: 2 rows"));
    ck_assert_ptr_nonnull(strstr(text, "row 0: decode"));
    ck_assert_ptr_nonnull(strstr(text, "row 1: prefill"));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_plan");
    TCase *c = tcase_create("plan");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, every_query_row_meets_every_key_once);
    tcase_add_test(c, no_tile_crosses_a_query_block);
    tcase_add_test(c, a_long_decode_is_cut_in_rounds);
    tcase_add_test(c, a_decode_too_short_for_rounds_is_cut_in_equal_splits);
    tcase_add_test(c, rows_in_rounds_even_out_what_comes_before);
    tcase_add_test(c, deterministic_splits_begin_at_multiples_of_1024);
    tcase_add_test(c, forced_splits_are_as_many_as_asked);
    tcase_add_test(c, one_long_sequence_keeps_every_worker_busy);
    tcase_add_test(c, a_ragged_batch_keeps_every_worker_busy);
    tcase_add_test(c, a_causal_prefill_keeps_every_worker_busy);
    tcase_add_test(c, one_worker_spreads_nothing);
    tcase_add_test(c, states_stay_inside_their_room);
    tcase_add_test(c, every_new_token_is_appended_once);
    tcase_add_test(c, short_queries_decode_and_long_ones_prefill);
    tcase_add_test(c, decode_walks_the_heads_of_a_block_together);
    tcase_add_test(c, kernels_have_room_for_4_rows_a_head);
    tcase_add_test(c, windows_limit_the_keys);
    tcase_add_test(c, too_many_rows_are_refused);
    tcase_add_test(c, the_longest_lengths_do_not_overflow);
    tcase_add_test(c, a_plan_prints_a_line_a_row);
    suite_add_tcase(s, c);
    return s;
}

CHECK_MAIN(suite)
