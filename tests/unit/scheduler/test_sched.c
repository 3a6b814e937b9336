// The scheduler as a whole, against a backend that ends launches when told to: what runs when, and
// that everything is computed once.  (How requests end: test_sched_end.c.)
#include "scheduler/sched.h"

#include "tests/unit/scheduler/sched_fixture.h"

// ---- batching

START_TEST(idle_backend_gets_work_at_once) {
    decode(&r[0], 0);
    ck_assert_uint_eq(b.num, 1);
    const attn_params *p = &b.launches[0]->params;
    ck_assert_uint_eq(p->num_rows, 1);
    ck_assert_int_eq(p->rows[0].q_first, 0);
    ck_assert_int_eq(p->rows[0].q_count, 1);
    ck_assert_int_eq(p->shape.head_dim, 64);
    ck_assert_ptr_eq(p->pool, &b);
    ck_assert_uint_eq(p->pool_bytes, 1 << 20);
    ck_assert_uint_eq(p->num_blocks, 4096); // 1 MiB / 256 B
    ck_assert(p->deterministic);
    fake_end(&b);
    fake_check(&r[0]);
    ck_assert_str_eq(r[0].kernel, "fake");
}
END_TEST

START_TEST(work_gathers_while_the_backend_is_busy) {
    for (int i = 0; i < 6; i++) {
        decode(&r[i], (uint32_t)i % 3);
    }
    ck_assert_uint_eq(b.given, 1);
    fake_end(&b);
    ck_assert_uint_eq(b.given, 2);
    ck_assert_uint_eq(b.launches[0]->params.num_rows, 5);
    fake_end(&b);
    for (int i = 0; i < 6; i++) {
        fake_check(&r[i]);
    }
}
END_TEST

START_TEST(launch_holds_one_shape) {
    decode(&r[0], 0);
    for (int i = 1; i < 5; i++) {
        fake_make(&r[i], i % 2 ? &shape_b : &shape_a, 0, 1, 100);
        ATTND_CK_OK(sched_submit(b.s, &r[i].req, NULL));
    }
    fake_end(&b);
    ck_assert_int_eq(b.launches[0]->params.shape.head_dim, 128); // the oldest is of shape_b
    ck_assert_uint_eq(b.launches[0]->params.num_blocks, 2048);
    ck_assert_uint_eq(b.launches[0]->params.num_rows, 2);
    fake_end(&b);
    ck_assert_int_eq(b.launches[0]->params.shape.head_dim, 64);
    ck_assert_uint_eq(b.launches[0]->params.num_rows, 2);
    fake_end(&b);
}
END_TEST

START_TEST(decodes_and_prefills_run_apart) {
    decode(&r[0], 0);
    prefill(&r[1], 0, 20);
    decode(&r[2], 0);
    fake_end(&b);
    ck_assert_uint_eq(fake_in(&b, &r[2]), 1);
    ck_assert_uint_eq(fake_in(&b, &r[1]), 0);
    fake_end(&b);
    ck_assert_uint_eq(fake_in(&b, &r[1]), 1);
    fake_end(&b);
}
END_TEST

START_TEST(eight_query_tokens_are_a_decode_and_nine_are_not) {
    decode(&r[0], 0);
    prefill(&r[1], 0, 9);
    fake_make(&r[2], &shape_a, 0, 8, 100);
    ATTND_CK_OK(sched_submit(b.s, &r[2].req, NULL));
    fake_end(&b);
    ck_assert_uint_eq(fake_in(&b, &r[2]), 1);
    ck_assert_uint_eq(fake_in(&b, &r[1]), 0);
    fake_end_all(&b);
    sched_info info;
    sched_get_info(b.s, &info);
    ck_assert_uint_eq(info.decode_tokens, 1 + 8);
    ck_assert_uint_eq(info.prefill_tokens, 9);
}
END_TEST

START_TEST(deep_backend_gets_two_launches) {
    decode(&r[0], 0);
    decode(&r[1], 0);
    ck_assert_uint_eq(b.num, 2);
    decode(&r[2], 0);
    decode(&r[3], 0);
    ck_assert_uint_eq(fake_in(&b, &r[1]), 1);
    fake_end(&b);
    ck_assert_uint_eq(b.num, 2);
    ck_assert_uint_eq(fake_in(&b, &r[2]), 1);
    ck_assert_uint_eq(fake_in(&b, &r[3]), 1);
    fake_end_all(&b);
    ck_assert_uint_eq(b.given, 3);
}
END_TEST

// ---- protection and starvation

START_TEST(decode_waits_for_one_chunk_and_one_decode_launch) {
    prefill(&r[0], 0, 320); // ten chunks
    for (int i = 1; i <= 4; i++) {
        decode(&r[i], 0); // arrives while a chunk runs
        fake_end(&b);
        ck_assert_uint_eq(fake_in(&b, &r[i]), 1);
        decode(&r[10 + i], 0); // arrives while a decode launch runs
        fake_end(&b);
        ck_assert_uint_eq(fake_in(&b, &r[10 + i]), 1);
        fake_end(&b);
        ck_assert_uint_eq(fake_in(&b, &r[0]), 1); // nothing else waits: the next chunk
    }
    fake_end_all(&b);
    fake_check(&r[0]);
}
END_TEST

START_TEST(prefill_gets_a_chunk_after_three_decode_launches) {
    decode(&r[0], 0);
    prefill(&r[1], 0, 96); // three chunks
    int next = 2;
    for (int chunk = 0; chunk < 3; chunk++) {
        // the launch that ran when the prefill came does not count: it did not wait yet
        for (int i = 0; i < 3; i++) {
            decode(&r[next], 0);
            fake_end(&b);
            ck_assert_uint_eq(fake_in(&b, &r[next]), 1);
            next++;
        }
        decode(&r[next], 0);
        fake_end(&b);
        ck_assert_uint_eq(fake_in(&b, &r[1]), 1);
        ck_assert_uint_eq(fake_in(&b, &r[next]), 0);
        next++;
    }
    fake_end_all(&b);
    fake_check(&r[1]);
}
END_TEST

START_TEST(long_prefill_is_not_starved_by_short_ones) {
    decode(&r[0], 0);
    prefill(&r[1], 0, 320);
    for (int i = 2; i < 12; i++) {
        prefill(&r[i], 0, 16);
        fake_end(&b);
        ck_assert_uint_eq(fake_in(&b, &r[1]), 1); // oldest first
    }
    fake_end_all(&b);
    ck_assert_uint_eq(r[1].num_done, 1);
}
END_TEST

// ---- fair share

// count_launch adds up the rows of each tenant in the newest launch.
static void count_launch(uint32_t rows[4]) {
    const attn_params *p = &b.launches[b.num - 1]->params;
    memset(rows, 0, 4 * sizeof(*rows));
    for (uint32_t i = 0; i < p->num_rows; i++) {
        rows[((const fake_req *)p->rows[i].q)->req.tenant]++;
    }
}

START_TEST(weights_three_to_one_give_twelve_rows_to_four) {
    sched_tenant_share(b.s, 0, 3);
    decode(&r[0], 2);
    for (int i = 1; i <= 40; i++) {
        decode(&r[i], i <= 20 ? 1 : 0); // the lighter tenant comes first
    }
    // equal rows: in any stretch of launches tenant 0 gets 3 of 4
    fake_end(&b);
    uint32_t rows[4];
    count_launch(rows);
    ck_assert_uint_eq(rows[0], 12);
    ck_assert_uint_eq(rows[1], 4);
    fake_end_all(&b);
}
END_TEST

START_TEST(share_is_by_cost_not_by_requests) {
    decode(&r[0], 2);
    for (int i = 1; i <= 16; i++) { // 700 keys each
        fake_make(&r[i], &shape_a, 0, 1, 700);
        ATTND_CK_OK(sched_submit(b.s, &r[i].req, NULL));
    }
    for (int i = 17; i <= 40; i++) { // 100 keys each
        decode(&r[i], 1);
    }
    // 16 rows: 2 * 700 keys of tenant 0 for 14 * 100 of tenant 1
    fake_end(&b);
    uint32_t rows[4];
    count_launch(rows);
    ck_assert_uint_eq(rows[0], 2);
    ck_assert_uint_eq(rows[1], 14);
    fake_end_all(&b);
}
END_TEST

START_TEST(idle_time_is_no_credit) {
    for (int i = 0; i < 20; i++) { // tenant 0 alone
        decode(&r[0], 0);
        fake_end(&b);
    }
    decode(&r[0], 0);
    for (int i = 1; i <= 40; i++) {
        decode(&r[i], i <= 20 ? 0 : 1);
    }
    fake_end(&b);
    uint32_t rows[4];
    count_launch(rows);
    ck_assert_uint_ge(rows[0], 7); // 8 and 8, one off for the row that ran when tenant 1 came
    ck_assert_uint_ge(rows[1], 8);
    fake_end_all(&b);
}
END_TEST

START_TEST(riding_along_is_a_bounded_debt) {
    // Tenant 1 joins 40 launches that tenant 0 leads, and is charged 1000 for each of them.
    for (int i = 0; i < 40; i++) {
        decode(&r[0], 0);
        fake_make(&r[1], &shape_a, 0, 1, 10);
        fake_make(&r[2], &shape_a, 1, 1, 1000);
        ATTND_CK_OK(sched_submit(b.s, &r[1].req, NULL));
        ATTND_CK_OK(sched_submit(b.s, &r[2].req, NULL));
        fake_end_all(&b);
    }
    // Now tenant 0 always has work of 1000 in another shape: tenant 1 waits for at most 8 + 1 of
    // it.
    decode(&r[0], 0);
    fake_make(&r[1], &shape_b, 1, 1, 1000);
    ATTND_CK_OK(sched_submit(b.s, &r[1].req, NULL));
    int waited = 0;
    for (int i = 2; !fake_in(&b, &r[1]); i++, waited++) {
        ck_assert_int_le(waited, 10);
        fake_make(&r[i], &shape_a, 0, 1, 1000);
        ATTND_CK_OK(sched_submit(b.s, &r[i].req, NULL));
        fake_end(&b);
    }
    ck_assert_int_ge(waited, 2);
    fake_end_all(&b);
}
END_TEST

START_TEST(share_goes_before_decodes) {
    decode(&r[0], 0);
    prefill(&r[1], 1, 32);
    // Tenant 0 has been given 100, tenant 1 nothing: its prefill goes before the decode.
    decode(&r[2], 0);
    fake_end(&b);
    ck_assert_uint_eq(fake_in(&b, &r[1]), 1);
    fake_end_all(&b);
}
END_TEST

// ---- bounds

START_TEST(full_queue_is_ebusy_and_done_is_not_called) {
    decode(&r[0], 0); // runs, waits no longer
    for (int i = 1; i <= 48; i++) {
        decode(&r[i], 0);
    }
    attnd_errinfo info;
    fake_make(&r[49], &shape_a, 0, 1, 1);
    ATTND_CK_ERR(sched_submit(b.s, &r[49].req, &info), ATTND_EBUSY);
    ck_assert_str_eq(info.field, "tenant");
    for (int i = 50; i < 64; i++) { // another tenant still may, up to 64 in all
        decode(&r[i], 1);
    }
    static fake_req more[3];
    decode(&more[0], 2);
    decode(&more[1], 2);
    fake_make(&more[2], &shape_a, 2, 1, 1);
    ATTND_CK_ERR(sched_submit(b.s, &more[2].req, &info), ATTND_EBUSY);
    ck_assert_str_eq(info.field, "queue");
    fake_end_all(&b);
    ck_assert_uint_eq(r[49].num_done, 0);
    ck_assert_uint_eq(more[2].num_done, 0);
    ATTND_CK_OK(sched_submit(b.s, &r[49].req, NULL)); // there is room again
    fake_end_all(&b);
    fake_check(&r[49]);
}
END_TEST

START_TEST(what_cannot_run_is_refused) {
    attnd_errinfo info;
    fake_make(&r[0], &shape_a, 0, 1, 1);
    r[0].req.num_rows = 17;
    ATTND_CK_ERR(sched_submit(b.s, &r[0].req, &info), ATTND_EMSGSIZE);
    ck_assert_str_eq(info.field, "num_rows");
    r[0].req.num_rows = 0;
    ATTND_CK_ERR(sched_submit(b.s, &r[0].req, &info), ATTND_EINVAL);
    fake_make_copies(&r[1], 0, 0);
    ATTND_CK_ERR(sched_submit(b.s, &r[1].req, &info), ATTND_EINVAL);
    ck_assert_uint_eq(b.given, 0);
}
END_TEST

START_TEST(create_refuses_bounds_of_zero) {
    sched_backend backend = {.launch = fake_launch, .depth = 1};
    for (int i = 0; i < 7; i++) {
        sched_opts o = opts;
        uint32_t *fields[] = {&o.max_queued,  &o.max_tenant_queued,    &o.max_launch_rows,
                              &o.max_tenants, &o.max_decodes_in_a_row, &backend.depth};
        backend.depth = 1;
        if (i < 6) {
            *fields[i] = 0;
        } else {
            o.prefill_chunk_tokens = 0;
        }
        sched *s = NULL;
        ATTND_CK_ERR(sched_create(&s, &o, &backend), ATTND_EINVAL);
        ck_assert_ptr_null(s);
    }
}
END_TEST

// ---- figures

START_TEST(times_and_counters_add_up) {
    sched_info info;
    sched_get_info(b.s, &info);
    ck_assert_str_eq(info.last.kernel, "none");
    prefill(&r[0], 0, 64);
    fake_now_us += 7;
    decode(&r[1], 0);
    fake_now_us += 5;
    sched_get_info(b.s, &info);
    ck_assert_uint_eq(info.queued, 2); // the prefill's second chunk, and the decode
    ck_assert_uint_eq(info.running, 1);
    fake_end_all(&b);
    ck_assert_uint_eq(r[0].req.queue_us, 0);
    ck_assert_uint_eq(r[0].req.run_us, 20);
    ck_assert_uint_eq(r[1].req.queue_us, 5);
    ck_assert_uint_eq(r[1].req.run_us, 10);
    sched_get_info(b.s, &info);
    ck_assert_uint_eq(info.launches, 3);
    ck_assert_uint_eq(info.requests, 2);
    ck_assert_uint_eq(info.rows, 3);
    ck_assert_uint_eq(info.prefill_tokens, 64);
    ck_assert_uint_eq(info.decode_tokens, 1);
    ck_assert_uint_eq(info.busy_us, 30);
    ck_assert_uint_eq(info.queued, 0);
    ck_assert_uint_eq(info.running, 0);
    ck_assert_str_eq(info.last.kernel, "fake");
}
END_TEST

// ---- anything at all

static uint64_t state = 1;

static uint32_t below(uint32_t n) { // xorshift64
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 33) % n;
}

// random_request: those of a tenant of odd number have their tensors in place.
static void random_request(fake_req *req) {
    fake_make(req, below(2) ? &shape_a : &shape_b, below(4), 0, 0);
    req->req.num_rows = 0;
    bool decodes = below(2);
    for (uint32_t n = 1 + below(FAKE_MAX_ROWS); n > 0; n--) {
        int32_t q_len = (int32_t)(decodes ? below(9) : below(100));
        fake_row(req, q_len, q_len + (int32_t)below(50));
    }
    req->req.deadline_ms = below(8) ? 0 : 1 + below(200);
    req->req.in_place = req->req.tenant % 2 == 1;
}

// launch_is_sound: most is how many query tokens a launch of prefills may have, of which a chunk of
// 32 is moved at most.
static bool launch_is_sound(const attn_params *p, int32_t most) {
    int32_t tokens = 0, moved = 0;
    bool prefills = false, one_shape = true;
    for (uint32_t k = 0; k < p->num_rows; k++) {
        const fake_req *req = p->rows[k].q;
        one_shape = one_shape && req->req.shape->head_dim == p->shape.head_dim;
        tokens += p->rows[k].q_count;
        moved += req->req.in_place ? 0 : p->rows[k].q_count;
        prefills = prefills || p->rows[k].q_len > SCHED_DECODE_TOKENS;
    }
    return p->num_rows <= 16 && one_shape && (!prefills || (tokens <= most && moved <= 32));
}

START_TEST(random_work_is_computed_once_and_done_once) {
    state = (uint64_t)_i * 2654435761u + 1;
    bool alone = _i % 2 == 1;
    sched_opts o = opts;
    o.prefill_alone_tokens = alone ? 128 : 0;
    fake_open_as(&b, o, 1 + (uint32_t)_i % 3, !alone);
    uint32_t submitted = 0, done = 0;
    bool live[64] = {false};
    for (int n = 0; n < 10000; n++) {
        uint32_t i = below(64);
        if (live[i] && r[i].num_done == 1) {
            live[i] = false;
            done++;
            if (r[i].err == ATTND_OK) {
                fake_check(&r[i]);
            }
        } else if (!live[i]) {
            random_request(&r[i]);
            live[i] = sched_submit(b.s, &r[i].req, NULL) == ATTND_OK;
            submitted += live[i];
        } else if (below(16) == 0) {
            sched_cancel(b.s, &r[i].req);
        }
        if (b.num > 0 && below(3) == 0) {
            fake_end_as(&b, below(50) ? ATTND_OK : ATTND_EIO);
        }
        if (below(100) == 0) {
            sched_expire(b.s, below(200));
        }
        const attn_params *p = b.num > 0 ? &b.launches[b.num - 1]->params : NULL;
        ck_assert(!p || launch_is_sound(p, alone ? 128 : 32));
        fake_now_us += below(100) ? 0 : 2 * SCHED_QUIET_US;
    }
    fake_end_all(&b);
    for (int i = 0; i < 64; i++) {
        done += live[i] && r[i].num_done == 1;
    }
    ck_assert_uint_eq(done, submitted);
    ck_assert_uint_gt(submitted, 1500);
    fake_close(&b);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("sched");
    TCase *t = with("batching", setup);
    tcase_add_test(t, idle_backend_gets_work_at_once);
    tcase_add_test(t, work_gathers_while_the_backend_is_busy);
    tcase_add_test(t, launch_holds_one_shape);
    tcase_add_test(t, decodes_and_prefills_run_apart);
    tcase_add_test(t, eight_query_tokens_are_a_decode_and_nine_are_not);
    tcase_add_test(t, times_and_counters_add_up);
    suite_add_tcase(s, t);

    t = with("policy", setup);
    tcase_add_test(t, decode_waits_for_one_chunk_and_one_decode_launch);
    tcase_add_test(t, prefill_gets_a_chunk_after_three_decode_launches);
    tcase_add_test(t, long_prefill_is_not_starved_by_short_ones);
    tcase_add_test(t, weights_three_to_one_give_twelve_rows_to_four);
    tcase_add_test(t, share_is_by_cost_not_by_requests);
    tcase_add_test(t, idle_time_is_no_credit);
    tcase_add_test(t, riding_along_is_a_bounded_debt);
    tcase_add_test(t, share_goes_before_decodes);
    suite_add_tcase(s, t);

    t = with("bounds", setup);
    tcase_add_test(t, full_queue_is_ebusy_and_done_is_not_called);
    tcase_add_test(t, what_cannot_run_is_refused);
    suite_add_tcase(s, t);

    t = with("depth", setup_deep);
    tcase_add_test(t, deep_backend_gets_two_launches);
    suite_add_tcase(s, t);

    t = tcase_create("whole");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, create_refuses_bounds_of_zero);
    tcase_add_loop_test(t, random_work_is_computed_once_and_done_once, 0, 12);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
