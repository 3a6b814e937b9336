// What a decode waits for where two launches are outstanding at a time.
#include "scheduler/sched.h"

#include "tests/unit/scheduler/sched_fixture.h"

// ck_order: what is outstanding is these requests' launches, oldest first, each of one row.
static void ck_order(const fake_req *first, const fake_req *second) {
    const fake_req *want[2] = {first, second};
    uint32_t num = second ? 2 : 1;
    ck_assert_uint_eq(b.num, num);
    for (uint32_t i = 0; i < num; i++) {
        ck_assert_uint_eq(b.launches[i]->params.num_rows, 1);
        ck_assert_ptr_eq(b.launches[i]->params.rows[0].q, want[i]);
    }
}

// In its order of arrival behind a chunk that runs, or in front of the next one.
START_TEST(there_is_never_more_than_a_chunk_before_it) {
    prefill(&r[0], 0, 128); // four chunks
    ck_order(&r[0], NULL);
    decode(&r[1], 0);
    ck_order(&r[0], &r[1]);
    fake_end(&b);
    ck_order(&r[1], &r[0]);
    decode(&r[2], 0);
    fake_end(&b);
    ck_order(&r[0], &r[2]);
    fake_end(&b);
    ck_order(&r[2], &r[0]);
    fake_end(&b);
    ck_order(&r[0], NULL);
    fake_end(&b);
    ck_order(&r[0], NULL); // the last
    ck_assert_int_eq(b.launches[0]->params.rows[0].q_first, 96);
    decode(&r[3], 0);
    ck_order(&r[0], &r[3]);
    fake_end_all(&b);
    fake_check(&r[0]);
}
END_TEST

START_TEST(short_prompts_are_a_chunk_together) {
    prefill(&r[0], 0, 20);
    prefill(&r[1], 0, 12);
    ck_order(&r[0], &r[1]); // 32
    prefill(&r[2], 0, 21);
    fake_end(&b);
    ck_order(&r[1], NULL); // 33
    prefill(&r[3], 0, 20);
    ck_order(&r[1], NULL); // the older one's turn it is
    decode(&r[4], 0);
    ck_order(&r[1], &r[4]);
    fake_end(&b);
    ck_order(&r[4], &r[2]);
    fake_end_all(&b);
    fake_check(&r[3]);
}
END_TEST

// Tenant 1 has been given less, so both chunks of its prompt go first, one after another.
START_TEST(over_its_share_it_waits_for_those_within_theirs) {
    prefill(&r[0], 0, 96); // 32 * 96 for a chunk
    decode(&r[1], 1);
    fake_end(&b);
    ck_order(&r[1], &r[0]);
    prefill(&r[2], 1, 64); // 32 * 64
    decode(&r[3], 0);
    fake_end(&b);
    ck_order(&r[0], NULL);
    fake_end(&b);
    ck_order(&r[2], NULL);
    fake_end(&b);
    ck_order(&r[2], &r[3]);
    fake_end_all(&b);
    fake_check(&r[0]);
}
END_TEST

// A chunk after every decode launch: with two outstanding, that would be two before the next.
START_TEST(prefills_get_no_turn_that_is_a_second_chunk) {
    sched_opts o = opts;
    o.max_decodes_in_a_row = 1;
    fake_open(&b, o, 2);
    prefill(&r[0], 0, 320);
    decode(&r[1], 0);
    ck_order(&r[0], &r[1]);
    decode(&r[2], 0);
    fake_end(&b);
    ck_order(&r[1], &r[2]);
    decode(&r[3], 0);
    fake_end(&b);
    ck_order(&r[2], &r[0]); // two decode launches were in a row
    fake_end(&b);
    ck_order(&r[0], &r[3]);
    fake_end_all(&b);
    fake_check(&r[0]);
    teardown();
}
END_TEST

// ---- at random

enum { NUM = 24, DECODES = 8 }; // requests, of which the first are decodes: all fit one launch

static uint64_t state;

static uint32_t below(uint32_t n) { // xorshift64
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 33) % n;
}

// wait is what has run since a decode came.
typedef struct wait {
    int64_t tokens, work; // of prefills
    uint32_t decodes;     // launches
    bool waits, may_be_long;
} wait;

static wait waits[DECODES];
static uint64_t decode_us; // when the last one came or ended
static uint32_t covered;   // launches that were given before the first decode after a pause came

static void submit_random(uint32_t i) {
    bool decodes = i < DECODES;
    int32_t q_len = (int32_t)(decodes ? 1 + below(8) : 9 + below(290));
    fake_make(&r[i], &shape_a, 0, q_len, q_len + (int32_t)below(100));
    r[i].req.in_place = below(2);
    if (decodes) {
        bool about = fake_now_us - decode_us < SCHED_QUIET_US;
        for (uint32_t k = 0; k < DECODES; k++) {
            about = about || waits[k].waits;
        }
        covered = about ? covered : b.given;
        waits[i] = (wait){.waits = true, .may_be_long = b.given - b.num < covered};
        decode_us = fake_now_us;
    }
    ATTND_CK_OK(sched_submit(b.s, &r[i].req, NULL));
}

// count_launch adds a launch to what the decodes wait for that are not in it; of those in it the
// waiting ends.
static void count_launch(const sched_launch *launch, uint32_t depth) {
    const attn_row *rows = launch->params.rows;
    bool decodes = rows[0].q_len <= SCHED_DECODE_TOKENS;
    int64_t tokens = 0, work = 0;
    for (uint32_t k = 0; k < launch->params.num_rows; k++) {
        tokens += rows[k].q_count;
        work += (int64_t)rows[k].q_count * rows[k].kv_len;
    }
    for (uint32_t i = 0; i < DECODES; i++) {
        wait *w = &waits[i];
        bool in_it = false;
        for (uint32_t k = 0; k < launch->params.num_rows; k++) {
            in_it = in_it || rows[k].q == &r[i];
        }
        if (in_it) {
            ck_assert(w->tokens <= 32 || (w->may_be_long && w->work <= 128L * 128));
            ck_assert_uint_le(w->decodes, depth);
            w->waits = false;
            decode_us = fake_now_us;
        } else if (w->waits) {
            w->tokens += decodes ? 0 : tokens;
            w->work += decodes ? 0 : work;
            w->decodes += decodes;
        }
    }
}

START_TEST(it_waits_for_one_chunk_and_the_decodes_outstanding) {
    uint32_t depth = 1 + (uint32_t)_i % 3;
    sched_opts o = opts;
    bool live[NUM] = {false};
    state = (uint64_t)_i * 2654435761u + 1;
    o.prefill_alone_tokens = _i % 2 ? 128 : 0;
    o.max_decodes_in_a_row = 1 + (uint32_t)_i / 6;
    fake_open_as(&b, o, depth, false);
    decode_us = fake_now_us - SCHED_QUIET_US; // none ever came
    covered = 0;
    for (int n = 0; n < 20000; n++) {
        uint32_t i = below(4) ? DECODES + below(NUM - DECODES) : below(DECODES);
        if (!live[i] || r[i].num_done == 1) {
            submit_random(i);
            live[i] = true;
        }
        if (b.num > 0 && below(2)) {
            count_launch(b.launches[0], depth);
            fake_end(&b);
        }
        fake_now_us += below(40) ? below(100) : SCHED_QUIET_US;
    }
    while (b.num > 0) {
        count_launch(b.launches[0], depth);
        fake_end(&b);
    }
    fake_close(&b);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("sched_decode");
    TCase *t = with("order", setup_deep);
    tcase_add_test(t, there_is_never_more_than_a_chunk_before_it);
    tcase_add_test(t, short_prompts_are_a_chunk_together);
    tcase_add_test(t, over_its_share_it_waits_for_those_within_theirs);
    suite_add_tcase(s, t);

    t = tcase_create("whole");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, prefills_get_no_turn_that_is_a_second_chunk);
    tcase_add_loop_test(t, it_waits_for_one_chunk_and_the_decodes_outstanding, 0, 18);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
