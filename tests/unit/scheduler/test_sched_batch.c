// Forming a launch: how rows are cut, and how copies are gathered.
#include "scheduler/sched_batch.h"

#include "tests/unit/scheduler/fake.h"

static const attn_shape shape_a = {.head_dim = 64, .block_stride = 256};

static const sched_opts opts = {.max_queued = 64,
                                .max_tenant_queued = 64,
                                .max_launch_rows = 8,
                                .max_tenants = 2,
                                .prefill_chunk_tokens = 512,
                                .max_decodes_in_a_row = 4};

static sched_queue *q;
static list_node copies;
static sched_batch batch;
static fake_req r[8];
static uint64_t launch_no;

static void setup(void) {
    launch_no = 0;
    list_init(&copies);
    ATTND_CK_OK(sched_queue_create(&q, opts.max_tenants, opts.max_queued));
    ATTND_CK_OK(sched_batch_init(&batch, &opts));
}

static void teardown(void) {
    sched_batch_fini(&batch);
    sched_queue_free(q);
}

static void push(fake_req *req, sched_kind kind) {
    static uint64_t seqno;
    req->req.kind = kind;
    req->req.seqno = ++seqno;
    req->req.queued_us = 100;
    sched_queue_push(q, &req->req);
}

static bool form(void) {
    sched_turn turn = {.launch_no = ++launch_no, .now_us = 130};
    return sched_batch_form(&batch, q, &copies, &turn);
}

// piece says what a row of a launch should be.
typedef struct piece {
    int req, row, first, count;
} piece;

static void expect(const piece *pieces, uint32_t num) {
    ck_assert(form());
    ck_assert_uint_eq(batch.launch.params.num_rows, num);
    for (uint32_t i = 0; i < num; i++) {
        const attn_row *row = &batch.launch.params.rows[i];
        ck_assert_ptr_eq(row->q, &r[pieces[i].req]);
        ck_assert_uint_eq(row->k_offset, (uint64_t)pieces[i].row);
        ck_assert_int_eq(row->q_first, pieces[i].first);
        ck_assert_int_eq(row->q_count, pieces[i].count);
        ck_assert_int_eq(row->q_len, r[pieces[i].req].q_len[pieces[i].row]);
        ck_assert_int_eq(row->kv_len, r[pieces[i].req].kv_len[pieces[i].row]);
        ck_assert_int_eq(row->new_len, pieces[i].first ? 0 : row->q_len);
        ck_assert(pieces[i].first ? !row->k_new && !row->v_new && !row->k_positions
                                  : row->k_new && row->v_new && row->k_positions);
    }
}

#define EXPECT(...) \
    expect((const piece[]){__VA_ARGS__}, sizeof((const piece[]){__VA_ARGS__}) / sizeof(piece))

START_TEST(row_is_cut_at_multiples_of_the_chunk) {
    fake_make(&r[0], &shape_a, 0, 1200, 1300);
    fake_row(&r[0], 100, 100);
    push(&r[0], SCHED_PREFILL);
    EXPECT({0, 0, 0, 512});
    ck_assert(sched_batch_left(&r[0].req));
    EXPECT({0, 0, 512, 512});
    EXPECT({0, 0, 1024, 176}, {0, 1, 0, 100});
    ck_assert(!sched_batch_left(&r[0].req));
    ck_assert(!form());
}
END_TEST

START_TEST(cuts_do_not_depend_on_batch_mates) {
    fake_make(&r[0], &shape_a, 0, 300, 300);
    fake_make(&r[1], &shape_a, 0, 700, 700);
    fake_make(&r[2], &shape_a, 0, 200, 200);
    for (int i = 0; i < 3; i++) {
        push(&r[i], SCHED_PREFILL);
    }
    EXPECT({0, 0, 0, 300}, {2, 0, 0, 200}); // 300 + 512 does not fit, 300 + 200 does
    EXPECT({1, 0, 0, 512});
    EXPECT({1, 0, 512, 188});
}
END_TEST

START_TEST(several_prefills_share_a_chunk) {
    for (int i = 0; i < 5; i++) {
        fake_make(&r[i], &shape_a, (uint32_t)i % 2, 128, 128);
        push(&r[i], SCHED_PREFILL);
    }
    EXPECT({0, 0, 0, 128}, {1, 0, 0, 128}, {2, 0, 0, 128}, {3, 0, 0, 128});
    EXPECT({4, 0, 0, 128});
}
END_TEST

START_TEST(rows_of_a_mixed_request_go_in_order) {
    fake_make(&r[0], &shape_a, 0, 1, 50); // decodes and a prefill in one step
    fake_row(&r[0], 0, 20);
    fake_row(&r[0], 600, 600);
    fake_row(&r[0], 1, 70);
    push(&r[0], SCHED_PREFILL);
    EXPECT({0, 0, 0, 1}, {0, 1, 0, 0}); // 1 + 512 would be too many
    EXPECT({0, 2, 0, 512});
    EXPECT({0, 2, 512, 88}, {0, 3, 0, 1});
}
END_TEST

START_TEST(decode_requests_go_in_whole) {
    for (int i = 0; i < 3; i++) {
        fake_make(&r[i], &shape_a, 0, 8, 100);
        fake_row(&r[i], 2, 100);
        fake_row(&r[i], 1, 100);
        push(&r[i], SCHED_DECODE);
    }
    EXPECT({0, 0, 0, 8}, {0, 1, 0, 2}, {0, 2, 0, 1}, {1, 0, 0, 8}, {1, 1, 0, 2}, {1, 2, 0, 1});
    ck_assert_int_eq(batch.decode_tokens, 22);
    ck_assert_uint_eq(batch.num_reqs, 2);
    ck_assert_uint_eq(r[0].req.queue_us, 30);
    EXPECT({2, 0, 0, 8}, {2, 1, 0, 2}, {2, 2, 0, 1});
}
END_TEST

static void push_copies(fake_req *req, uint32_t num, uint32_t mark) {
    fake_make_copies(req, 0, num);
    for (uint32_t i = 0; i < num; i++) {
        req->copies[i].src = mark + i;
    }
    list_append(&copies, &req->req.node);
}

START_TEST(copies_of_several_requests_are_gathered_in_order) {
    push_copies(&r[0], 2, 10);
    push_copies(&r[1], 1, 20);
    fake_make(&r[2], &shape_a, 0, 1, 1);
    r[2].req.copies = r[2].copies;
    r[2].req.num_copies = 2;
    r[2].copies[0].src = 30;
    r[2].copies[1].src = 31;
    push(&r[2], SCHED_DECODE);
    EXPECT({2, 0, 0, 1});
    const uint32_t src[] = {10, 11, 20, 30, 31};
    ck_assert_uint_eq(batch.launch.num_copies, 5);
    for (int i = 0; i < 5; i++) {
        ck_assert_uint_eq(batch.launch.copies[i].src, src[i]);
    }
    ck_assert_uint_eq(batch.num_reqs, 3);
    ck_assert(list_empty(&copies));
}
END_TEST

START_TEST(copies_alone_are_a_launch_without_rows) {
    push_copies(&r[0], 1, 1);
    ck_assert(form());
    ck_assert_uint_eq(batch.launch.params.num_rows, 0);
    ck_assert_uint_eq(batch.launch.num_copies, 1);
}
END_TEST

START_TEST(copies_of_a_prefill_run_once) {
    fake_make(&r[0], &shape_a, 0, 600, 600);
    r[0].req.copies = r[0].copies;
    r[0].req.num_copies = 1;
    push(&r[0], SCHED_PREFILL);
    EXPECT({0, 0, 0, 512});
    ck_assert_uint_eq(batch.launch.num_copies, 1);
    EXPECT({0, 0, 512, 88});
    ck_assert_uint_eq(batch.launch.num_copies, 0);
}
END_TEST

START_TEST(request_whose_copies_do_not_fit_takes_the_next_launch) {
    static kv_copy many[SCHED_LAUNCH_COPIES];
    for (int i = 0; i < 3; i++) {
        fake_make(&r[i], &shape_a, 0, 1, 1);
        r[i].req.copies = many;
        r[i].req.num_copies = (uint32_t[]){3000, 1097, 1096}[i];
        push(&r[i], SCHED_DECODE);
    }
    EXPECT({0, 0, 0, 1}, {2, 0, 0, 1}); // 3000 + 1096 = 4096
    EXPECT({1, 0, 0, 1});
    push_copies(&r[3], 4, 1);
    fake_make(&r[4], &shape_a, 0, 1, 1);
    r[4].req.copies = many;
    r[4].req.num_copies = SCHED_LAUNCH_COPIES;
    push(&r[4], SCHED_DECODE);
    ck_assert(form()); // the lead's own do not fit either
    ck_assert_uint_eq(batch.launch.params.num_rows, 0);
    EXPECT({4, 0, 0, 1});
}
END_TEST

START_TEST(rows_wait_for_copies_that_did_not_fit) {
    static kv_copy many[2 * SCHED_LAUNCH_COPIES];
    fake_make_copies(&r[0], 0, SCHED_LAUNCH_COPIES);
    fake_make_copies(&r[1], 0, SCHED_LAUNCH_COPIES + 1); // more than are gathered
    fake_make_copies(&r[2], 0, 1);
    for (int i = 0; i < 3; i++) {
        r[i].req.copies = many;
        list_append(&copies, &r[i].req.node);
    }
    fake_make(&r[3], &shape_a, 0, 1, 1);
    push(&r[3], SCHED_DECODE);
    for (uint32_t i = 0; i < 2; i++) {
        ck_assert(form());
        ck_assert_uint_eq(batch.num_reqs, 1);
        ck_assert_uint_eq(batch.launch.num_copies, SCHED_LAUNCH_COPIES + i);
        ck_assert_uint_eq(batch.launch.params.num_rows, 0);
    }
    ck_assert_ptr_eq(batch.launch.copies, many); // its own array
    EXPECT({3, 0, 0, 1});
    ck_assert_uint_eq(batch.launch.num_copies, 1);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("sched_batch");
    TCase *t = tcase_create("batch");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, row_is_cut_at_multiples_of_the_chunk);
    tcase_add_test(t, cuts_do_not_depend_on_batch_mates);
    tcase_add_test(t, several_prefills_share_a_chunk);
    tcase_add_test(t, rows_of_a_mixed_request_go_in_order);
    tcase_add_test(t, decode_requests_go_in_whole);
    tcase_add_test(t, copies_of_several_requests_are_gathered_in_order);
    tcase_add_test(t, copies_alone_are_a_launch_without_rows);
    tcase_add_test(t, copies_of_a_prefill_run_once);
    tcase_add_test(t, request_whose_copies_do_not_fit_takes_the_next_launch);
    tcase_add_test(t, rows_wait_for_copies_that_did_not_fit);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
