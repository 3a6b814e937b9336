// The plan of the prefill kernel: random launches are planned, the tiles of all tasks are taken as
// the device takes them, and together they must be the launch, each query row once.
#include <stdlib.h>
#include <string.h>

#include "attention/cuda/attn_prefill.h"
#include "tests/check_main.h"

enum { MAX_RECORDS = 64, KV_HEADS = 3, MAX_TOKENS = 400, MAX_GROUP = 300, TILE_ROWS = 128 };

static union {
    attn_prefill_head head;
    unsigned char room[1 << 16];
} plan __attribute__((aligned(16)));

static attn_row rows[MAX_RECORDS];
static attn_params params;
static attn_prefill_limits limits;
static attn_block_mask mask;
static attn_rope rope;
static _Alignas(16) uint16_t memory[64]; // whatever needs an address
static uint32_t list[1];
static uint64_t state;
static unsigned char seen[KV_HEADS][MAX_TOKENS][MAX_GROUP];

static int32_t below(int32_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (int32_t)((state >> 33) % (uint64_t)n);
}

static void begin(int32_t group) {
    params = (attn_params){.shape = {.q_dtype = ATTND_BF16,
                                     .kv_dtype = ATTND_BF16,
                                     .q_heads = KV_HEADS * group,
                                     .kv_heads = KV_HEADS,
                                     .head_dim = 128,
                                     .v_head_dim = 128,
                                     .block_tokens = 64},
                           .pool = memory,
                           .rows = rows};
    limits = (attn_prefill_limits){.max_records = MAX_RECORDS,
                                   .tile_rows = TILE_ROWS,
                                   .least_rows = 1,
                                   .max_angles = 1u << 20};
}

static attn_row *add_row(int32_t kv_len, int32_t q_len, int32_t q_first, int32_t q_count) {
    attn_row *row = &rows[params.num_rows++];
    *row = (attn_row){.q = (char *)memory + params.num_rows, // tells rows apart
                      .kv_len = kv_len,
                      .q_len = q_len,
                      .q_first = q_first,
                      .q_count = q_count,
                      .flags = ATTN_CAUSAL,
                      .window_left = -1,
                      .window_right = -1};
    return row;
}

static attnd_err make(attnd_errinfo *info) {
    return attn_prefill_make(&plan.head, 64, &params, &limits, info);
}

static const attn_row *row_of(const attn_prefill_record *r) {
    for (uint32_t i = 0; i < params.num_rows; i++) {
        if (rows[i].q == r->q) {
            return &rows[i];
        }
    }
    ck_abort_msg("a record is of no row");
    return NULL;
}

// check_record takes the tiles of a record's tasks.
static void check_record(const attn_prefill_record *r, int32_t num_tasks, int32_t group) {
    const attn_row *row = row_of(r);
    memset(seen, 0, sizeof(seen));
    for (int32_t n = 0; n < num_tasks; n++) {
        attn_prefill_tile t = attn_prefill_tile_of(r, n, group);
        ck_assert_int_le(t.tokens * r->tile_heads, limits.tile_rows);
        ck_assert_int_le(t.heads, r->tile_heads);
        for (int32_t token = t.token_first; token < t.token_first + t.tokens; token++) {
            for (int32_t head = t.head_first; head < t.head_first + t.heads; head++) {
                seen[t.kv_head][token][head]++;
            }
        }
        if (row->block_mask && t.tokens > 0) {
            ck_assert_int_eq(t.token_first / mask.q_block,
                             (t.token_first + t.tokens - 1) / mask.q_block);
        }
    }
    for (int32_t i = 0; i < limits.tile_rows; i++) {
        ck_assert_int_eq((int32_t)((uint32_t)i * r->heads_inverse >> 16), i / r->tile_heads);
    }
    int32_t wrong = 0;
    for (int32_t h = 0; h < KV_HEADS; h++) {
        for (int32_t token = 0; token < row->q_len; token++) {
            bool is_asked = token >= row->q_first && token < row->q_first + row->q_count;
            for (int32_t head = 0; head < group; head++) {
                wrong += seen[h][token][head] != is_asked;
            }
        }
    }
    ck_assert_int_eq(wrong, 0);
}

START_TEST(tasks_of_a_plan_are_each_query_row_once) {
    static const int32_t groups[] = {1, 2, 3, 4, 7, 16, 65, 128, 129, 300};
    for (int round = 0; round < 120; round++) {
        int32_t group = groups[round % 10];
        begin(group);
        limits.tile_rows = round < 60 ? TILE_ROWS : 192;
        mask = (attn_block_mask){list, list, 1 + below(90)};
        int32_t num = 1 + below(5);
        for (int32_t i = 0; i < num; i++) {
            int32_t q_len = 1 + below(MAX_TOKENS - 1);
            int32_t first = below(q_len);
            attn_row *row = add_row(1 + below(2000), q_len, first, 1 + below(q_len - first));
            row->block_mask = below(2) ? &mask : NULL;
        }
        ck_assert_int_eq(make(NULL), ATTND_OK);
        ck_assert_uint_eq(plan.head.num_records, params.num_rows);
        uint32_t before = 0;
        for (uint32_t i = 0; i < plan.head.num_records; i++) {
            uint32_t end = attn_prefill_ends_of(&plan.head)[i].tasks;
            check_record(&attn_prefill_records(&plan.head)[i], (int32_t)(end - before), group);
            before = end;
        }
        ck_assert_uint_eq(before, plan.head.num_tasks);
    }
}
END_TEST

// halves counts how often a token of a row was taken, 2 a task, 1 where two tasks share the keys.
static int32_t halves[MAX_RECORDS][KV_HEADS][MAX_TOKENS];

static void count_halves(const attn_prefill_record *r, uint32_t num) {
    for (uint32_t n = 0; n < num; n++) {
        attn_prefill_tile t = attn_prefill_tile_of(r, (int32_t)n, 1);
        ck_assert_int_ge(t.token_first, r->q_first);
        ck_assert_int_le(t.token_first + t.tokens, r->q_end);
        for (int32_t token = t.token_first; token < t.token_first + t.tokens; token++) {
            halves[row_of(r) - rows][t.kv_head][token] += r->shares_keys ? 1 : 2;
        }
    }
}

static int32_t wrong_halves(void) {
    int32_t wrong = 0;
    for (uint32_t i = 0; i < params.num_rows; i++) {
        for (int32_t token = 0; token < rows[i].q_len; token++) {
            for (int32_t h = 0; h < KV_HEADS; h++) {
                wrong += halves[i][h][token] != (token >= rows[i].q_first ? 2 : 0);
            }
        }
    }
    return wrong;
}

// Where the ends of launches are cut, rows are several records, and each new token is once in them.
START_TEST(tasks_of_a_cut_plan_are_each_query_row_once) {
    int32_t num_cut = 0, num_shared = 0;
    for (int round = 0; round < 400; round++) {
        const int32_t num = 1 + below(5), kv_len = 2100 + below(1000);
        int32_t new_tokens = 0;
        begin(1);
        limits.tile_rows = 64;
        limits.ctas = 5 + (uint32_t)below(30);
        limits.max_joins = limits.ctas / 2;
        for (int32_t i = 0; i < num; i++) {
            const int32_t least = round % 4 == 3 ? 250 : 1; // four tiles, all causal
            const int32_t q_len = least + below(MAX_TOKENS - least);
            const int32_t first = below(4) ? 0 : below(q_len);
            attn_row *row = add_row(round % 4 < 2 ? kv_len : q_len, q_len, first, q_len - first);
            row->flags = round % 2 ? ATTN_CAUSAL : 0;
            row->new_len = q_len;
            new_tokens += q_len;
        }
        ck_assert_int_eq(make(NULL), ATTND_OK);
        ck_assert_int_eq((int32_t)plan.head.num_units, new_tokens);
        num_cut += plan.head.num_records > params.num_rows;
        memset(halves, 0, sizeof(halves));
        uint32_t before = 0;
        for (uint32_t i = 0; i < plan.head.num_records; i++) {
            const attn_prefill_record *r = &attn_prefill_records(&plan.head)[i];
            const uint32_t end = attn_prefill_ends_of(&plan.head)[i].tasks;
            num_shared += r->shares_keys;
            new_tokens -= r->new_len;
            count_halves(r, end - before);
            before = end;
        }
        ck_assert_uint_eq(before, plan.head.num_tasks);
        ck_assert_int_eq(wrong_halves(), 0);
        ck_assert_int_eq(new_tokens, 0);
    }
    ck_assert_int_gt(num_cut, 50); // of 400 launches
    ck_assert_int_gt(num_shared, 50);
}
END_TEST

START_TEST(records_with_most_keys_come_first) {
    static const int32_t lengths[] = {3, 900, 64, 65536, 300, 80, 0, 5000};
    static const int32_t sorted[] = {65536, 5000, 900, 300, 80, 64, 3, 0};
    begin(4);
    for (int i = 0; i < 8; i++) {
        add_row(lengths[i], 40, 0, 40);
    }
    ck_assert_int_eq(make(NULL), ATTND_OK);
    for (int i = 0; i < 8; i++) {
        ck_assert_int_eq(attn_prefill_records(&plan.head)[i].kv_len, sorted[i]);
    }
}
END_TEST

// Of causal rows the first tile sees the fewest keys, so that one is cut short: 300 tokens in tiles
// of 128, from token 50 on, end at 350, 222 and 94.
START_TEST(the_first_tile_is_the_one_that_is_not_full) {
    static const int32_t firsts[] = {222, 94, 50}, tokens[] = {128, 128, 44};
    begin(1);
    add_row(400, 400, 50, 300);
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_tasks, 3 * KV_HEADS);
    for (int32_t n = 0; n < 3 * KV_HEADS; n++) {
        attn_prefill_tile t = attn_prefill_tile_of(attn_prefill_records(&plan.head), n, 1);
        ck_assert_int_eq(t.token_first, firsts[n / KV_HEADS]);
        ck_assert_int_eq(t.tokens, tokens[n / KV_HEADS]);
    }
}
END_TEST

// The last rows of a launch that have at least two tasks a CTA are cut in four, and all parts with
// the last tokens come first: of 5 rows of 4 tiles and 3 heads, 12 tasks a row, two rows.
START_TEST(a_launch_ends_with_short_tiles) {
    int32_t last = 512;
    uint32_t before = 0;
    begin(1);
    limits.ctas = 12;
    for (int i = 0; i < 5; i++) {
        add_row(512, 512, 0, 512)->new_len = 5;
    }
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_records, 3 + 2 * 4);
    ck_assert_uint_eq(plan.head.num_tasks, 60);
    ck_assert_uint_eq(plan.head.num_units, 25); // each new token once
    memset(seen, 0, sizeof(seen));
    for (uint32_t i = 0; i < plan.head.num_records; i++) {
        const attn_prefill_record *r = &attn_prefill_records(&plan.head)[i];
        uint32_t end = attn_prefill_ends_of(&plan.head)[i].tasks;
        ck_assert_uint_eq(end - before, i < 3 ? 12 : 3);
        for (uint32_t n = before; n < end; n++) {
            attn_prefill_tile t = attn_prefill_tile_of(r, (int32_t)(n - before), 1);
            ck_assert_int_eq(t.tokens, 128);
            seen[t.kv_head][t.token_first / 128][row_of(r) - rows]++;
            if (i >= 3) {
                ck_assert_int_le(t.token_first, last);
                last = t.token_first;
            }
        }
        before = end;
    }
    for (int row = 0; row < 5; row++) {
        for (int tile = 0; tile < 4 * KV_HEADS; tile++) {
            ck_assert_int_eq(seen[tile / 4][tile % 4][row], 1);
        }
    }
}
END_TEST

// Rows stay whole without room for their parts, when a window or a cached prefix makes tiles of
// about the same length of them, and when the last one alone has tasks enough.
START_TEST(rows_that_gain_nothing_stay_whole) {
    begin(1);
    limits.ctas = 12;
    attn_row *first = add_row(512, 512, 0, 512), *second = add_row(512, 512, 0, 512);
    limits.max_records = 7;
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_records, 2);
    limits.max_records = 8;
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_records, 8);
    first->window_left = second->window_left = 300;
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_records, 2);
    first->window_left = second->window_left = -1;
    first->kv_len = second->kv_len = 1025;
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_records, 2);
    first->kv_len = second->kv_len = 512;
    limits.ctas = 6;
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_records, 2);
}
END_TEST

// 15 tasks about as long on 12 CTAs: the last 3 are halved, so that 6 CTAs have them.
START_TEST(keys_of_the_last_of_equal_tasks_are_shared) {
    begin(1);
    limits.ctas = 12;
    limits.max_joins = 3;
    attn_row *row = add_row(2048, 640, 0, 640);
    row->flags = 0;
    row->new_len = 9;
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_records, 2);
    ck_assert_uint_eq(plan.head.num_tasks, 12 + 6);
    ck_assert_uint_eq(plan.head.num_units, 9);
    const attn_prefill_record *r = attn_prefill_records(&plan.head);
    ck_assert_int_eq(r[0].shares_keys, 0);
    ck_assert_int_eq(r[1].shares_keys, 1);
    for (int32_t n = 0; n < 12; n++) {
        ck_assert_int_eq(attn_prefill_tile_of(&r[0], n, 1).token_first, 512 - n / KV_HEADS * 128);
    }
    for (int32_t n = 0; n < 6; n++) {
        attn_prefill_tile t = attn_prefill_tile_of(&r[1], n, 1);
        ck_assert_int_eq(t.token_first, 0);
        ck_assert_int_eq(t.tokens, 128);
        ck_assert_int_eq(t.kv_head, n / 2);
    }
    row->q_len = row->q_count = 128; // all of them
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_records, 1);
    ck_assert_uint_eq(plan.head.num_tasks, 6);
}
END_TEST

static void share(void) {
    begin(1);
    limits.ctas = 12;
    limits.max_joins = 3;
    add_row(2048, 640, 0, 640)->flags = 0;
}

static uint32_t num_tasks(void) {
    ck_assert_int_eq(make(NULL), ATTND_OK);
    return plan.head.num_tasks;
}

START_TEST(keys_are_not_shared_where_that_gains_nothing_or_is_not_asked) {
    share();
    ck_assert_uint_eq(num_tasks(), 18);
    rows[0].kv_len = 2047; // too few
    ck_assert_uint_eq(num_tasks(), 15);
    rows[0].kv_len = 5000;
    ck_assert_uint_eq(num_tasks(), 18);
    rows[0].flags = ATTN_CAUSAL; // tiles see 4361 to 5000
    ck_assert_uint_eq(num_tasks(), 18);
    rows[0].kv_len = 2560; // 1921 to 2560
    ck_assert_uint_eq(num_tasks(), 15);
    share();
    params.deterministic = true;
    ck_assert_uint_eq(num_tasks(), 15);
    share();
    limits.max_joins = 2;
    ck_assert_uint_eq(num_tasks(), 15);
    share();
    limits.max_records = 1;
    ck_assert_uint_eq(num_tasks(), 15);
    share();
    limits.ctas = 5; // as many tasks as CTAs, three times
    ck_assert_uint_eq(num_tasks(), 15);
    limits.ctas = 8; // 7 of 8 CTAs have one
    limits.max_joins = 9;
    ck_assert_uint_eq(num_tasks(), 15);
    share();
    mask = (attn_block_mask){list, list, 640};
    rows[0].block_mask = &mask;
    ck_assert_uint_eq(num_tasks(), 15);
    share();
    add_row(9000, 640, 0, 640)->flags = 0; // 6 tasks are left, but of those some are far longer
    ck_assert_uint_eq(num_tasks(), 30);
    rows[1].kv_len = 2100;
    limits.max_joins = 6;
    ck_assert_uint_eq(num_tasks(), 36);
}
END_TEST

START_TEST(rows_of_few_query_rows_and_forced_splits_are_not_prefilled) {
    begin(4);
    limits.least_rows = 65;
    attn_row *few = add_row(100, 16, 0, 16);
    attn_row *many = add_row(100, 17, 0, 1); // chunks of a row go where the row goes
    ck_assert(!attn_prefill_takes(&params, few, &limits));
    ck_assert(attn_prefill_takes(&params, many, &limits));
    few->block_mask = &mask;
    ck_assert(attn_prefill_takes(&params, few, &limits));
    params.num_splits = 2;
    ck_assert(!attn_prefill_takes(&params, many, &limits));
    params.num_splits = 0;
    limits.least_rows = 0; // no such kernel
    ck_assert(!attn_prefill_takes(&params, many, &limits));
    ck_assert(!attn_prefill_takes(&params, few, &limits));
}
END_TEST

START_TEST(the_measured_choice_goes_by_tokens_keys_and_slices) {
    begin(4);
    limits.least_rows = ATTN_PREFILL_MEASURED;
    attn_row *row = add_row(864, 8, 0, 8);
    ck_assert(!attn_prefill_takes(&params, row, &limits)); // 8 tokens
    row->q_len = row->q_count = 9;
    ck_assert(attn_prefill_takes(&params, row, &limits)); // 24 keys for each of 36 query rows
    row->kv_len = 865;
    // 9 tokens of 4 heads are 3 slices of 16 query rows, of each of 3 KV heads.
    ck_assert_uint_eq(attn_prefill_count(&params), 9);
    limits.launch_slices = 159;
    ck_assert(!attn_prefill_takes(&params, row, &limits));
    while (params.num_rows < 18) {
        add_row(5000, 9, 0, 9);
    }
    add_row(5000, 8, 0, 8); // is decoded anyway
    limits.launch_slices = attn_prefill_count(&params);
    ck_assert_uint_eq(limits.launch_slices, 162);
    ck_assert(attn_prefill_takes(&params, row, &limits));
    params.deterministic = true; // batch mates don't count
    ck_assert(!attn_prefill_takes(&params, row, &limits));
    row->kv_len = 2048;
    row->q_len = row->q_count = 64; // 256 query rows, 48 slices
    ck_assert(attn_prefill_takes(&params, row, &limits));
    row->kv_len = 2049;
    ck_assert(!attn_prefill_takes(&params, row, &limits));
    row->kv_len = 50000;
    row->q_len = 212; // 848 query rows are 53 slices, of 3 heads 159
    ck_assert(!attn_prefill_takes(&params, row, &limits));
    row->q_len = 213;
    ck_assert(attn_prefill_takes(&params, row, &limits));
    row->q_count = 1; // chunks go where the row goes
    ck_assert(attn_prefill_takes(&params, row, &limits));
}
END_TEST

START_TEST(a_row_alone_is_prefilled_from_fewer_slices_on) {
    begin(4);
    limits.least_rows = ATTN_PREFILL_MEASURED;
    attn_row *row = add_row(50000, 124, 0, 124); // 496 query rows are 31 slices, of 3 heads 93
    limits.launch_slices = attn_prefill_count(&params);
    ck_assert_uint_eq(limits.launch_slices, 93);
    ck_assert(!attn_prefill_takes(&params, row, &limits));
    row->q_len = row->q_count = 125; // 500, 32, 96
    limits.launch_slices = attn_prefill_count(&params);
    ck_assert(attn_prefill_takes(&params, row, &limits));
    add_row(5000, 8, 0, 8); // is decoded, and doesn't count
    limits.launch_slices = attn_prefill_count(&params);
    ck_assert(attn_prefill_takes(&params, row, &limits));
    add_row(50000, 9, 0, 9);
    limits.launch_slices = attn_prefill_count(&params);
    ck_assert(!attn_prefill_takes(&params, row, &limits));
    params.num_rows = 1;
    limits.launch_slices = attn_prefill_count(&params);
    params.deterministic = true; // keys are not shared
    ck_assert(!attn_prefill_takes(&params, row, &limits));
}
END_TEST

START_TEST(few_keys_do_not_make_a_prefill_of_32_query_rows) {
    begin(1);
    limits.least_rows = ATTN_PREFILL_MEASURED;
    attn_row *row = add_row(32, 32, 0, 32);
    limits.launch_slices = attn_prefill_count(&params); // 2 slices of 3 heads
    ck_assert_uint_eq(limits.launch_slices, 6);
    ck_assert(!attn_prefill_takes(&params, row, &limits));
    row->kv_len = row->q_len = row->q_count = 33;
    ck_assert(attn_prefill_takes(&params, row, &limits));
}
END_TEST

START_TEST(units_are_new_tokens_and_angles) {
    begin(1);
    rope = (attn_rope){.inv_freq = (const float *)(const void *)memory, .rotary_dim = 64};
    add_row(100, 50, 10, 30)->new_len = 20;
    attn_row *row = add_row(50, 40, 0, 40);
    row->new_len = 7;
    row->rope = &rope;
    ck_assert_int_eq(make(NULL), ATTND_OK);
    ck_assert_uint_eq(plan.head.num_units, 20 + 7 + 40);
    attnd_errinfo info = {0};
    limits.max_angles = 40 * 32 - 1;
    ck_assert_int_eq(make(&info), ATTND_EMSGSIZE);
    ck_assert_str_eq(info.field, "rows");
    ck_assert_uint_eq(plan.head.num_tasks, 0);
}
END_TEST

// KV heads that the L2 does not hold together are taken in sections: of 3 heads with 512 bytes a
// token, as many as fit 48 MiB in sections of equal size, of which the first one may lack heads,
// tokens from the last ones down in each.
START_TEST(heads_beyond_the_l2_are_taken_in_sections) {
    static const struct {
        int32_t kv_len;
        int32_t heads[12]; // of the tasks; 4 tiles of 128 tokens a head
    } cases[] = {
        {32768, {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2}}, // 16 MiB a head: 48 in one section
        {32769, {0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 1, 2}},
        {65536, {0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 1, 2}}, // 32 MiB a head: 96 in two
        {65537, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}}, // three sections
        {1 << 20, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        int32_t last[KV_HEADS] = {512, 512, 512};
        begin(1);
        add_row(cases[i].kv_len, 512, 0, 512);
        ck_assert_int_eq(make(NULL), ATTND_OK);
        ck_assert_uint_eq(plan.head.num_tasks, 12);
        for (int32_t n = 0; n < 12; n++) {
            attn_prefill_tile t = attn_prefill_tile_of(attn_prefill_records(&plan.head), n, 1);
            ck_assert_int_eq(t.kv_head, cases[i].heads[n]);
            ck_assert_int_eq(t.token_first, last[t.kv_head] - 128);
            last[t.kv_head] = t.token_first;
        }
    }
}
END_TEST

// One box of 64 query rows moves what has no gaps, when 64 rows are whole tokens; one of a token
// queries whose tokens have.
START_TEST(dense_queries_and_outputs_are_known) {
    static const struct {
        int32_t group, q_gap, out_gap; // elements behind each token
        uint32_t flags;
    } cases[] = {
        {1, 0, 0, ATTN_PREFILL_TOKENS_Q | ATTN_PREFILL_DENSE_Q | ATTN_PREFILL_DENSE_OUT},
        {64, 0, 0, ATTN_PREFILL_TOKENS_Q | ATTN_PREFILL_DENSE_Q | ATTN_PREFILL_DENSE_OUT},
        {4, 8, 0, ATTN_PREFILL_TOKENS_Q | ATTN_PREFILL_DENSE_OUT},
        {4, 0, 8, ATTN_PREFILL_TOKENS_Q | ATTN_PREFILL_DENSE_Q},
        {3, 0, 0, 0},
        {128, 0, 0, 0},
    };
    const uint32_t all = ATTN_PREFILL_TOKENS_Q | ATTN_PREFILL_DENSE_Q | ATTN_PREFILL_DENSE_OUT;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        begin(cases[i].group);
        int32_t token = KV_HEADS * cases[i].group * 128;
        attn_row *row = add_row(50, 40, 0, 40);
        row->stride_q_head = row->stride_out_head = 128;
        row->stride_q_token = token + cases[i].q_gap;
        row->stride_out_token = token + cases[i].out_gap;
        ck_assert_int_eq(make(NULL), ATTND_OK);
        const uint32_t flags = attn_prefill_records(&plan.head)[0].flags;
        ck_assert_uint_eq(flags & all, cases[i].flags);
        row->stride_q_head = row->stride_out_head = 136; // heads overlap the next token
        ck_assert_int_eq(make(NULL), ATTND_OK);
        ck_assert_uint_eq(attn_prefill_records(&plan.head)[0].flags & all, 0);
    }
}
END_TEST

START_TEST(more_rows_than_records_are_refused) {
    begin(1);
    limits.max_records = 2;
    add_row(1, 1, 0, 1);
    add_row(1, 1, 0, 1);
    ck_assert_int_eq(make(NULL), ATTND_OK);
    add_row(1, 1, 0, 1);
    ck_assert_int_eq(make(NULL), ATTND_EMSGSIZE);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("attn_prefill");
    TCase *t = tcase_create("plan");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, tasks_of_a_plan_are_each_query_row_once);
    tcase_add_test(t, tasks_of_a_cut_plan_are_each_query_row_once);
    tcase_add_test(t, records_with_most_keys_come_first);
    tcase_add_test(t, the_first_tile_is_the_one_that_is_not_full);
    tcase_add_test(t, a_launch_ends_with_short_tiles);
    tcase_add_test(t, rows_that_gain_nothing_stay_whole);
    tcase_add_test(t, keys_of_the_last_of_equal_tasks_are_shared);
    tcase_add_test(t, keys_are_not_shared_where_that_gains_nothing_or_is_not_asked);
    tcase_add_test(t, rows_of_few_query_rows_and_forced_splits_are_not_prefilled);
    tcase_add_test(t, the_measured_choice_goes_by_tokens_keys_and_slices);
    tcase_add_test(t, a_row_alone_is_prefilled_from_fewer_slices_on);
    tcase_add_test(t, few_keys_do_not_make_a_prefill_of_32_query_rows);
    tcase_add_test(t, units_are_new_tokens_and_angles);
    tcase_add_test(t, heads_beyond_the_l2_are_taken_in_sections);
    tcase_add_test(t, dense_queries_and_outputs_are_known);
    tcase_add_test(t, more_rows_than_records_are_refused);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
