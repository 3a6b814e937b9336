// attend, decode and prefill: requests carry the caller's tensors packed; outputs are written from
// a good reply whole, and not at all from a bad one.
#include <stdatomic.h>
#include <string.h>

#include "proto/client/client.h"
#include "tests/check_main.h"
#include "tests/unit/proto/fake_daemon.h"

enum { ROWS = 3, NEW_ROWS = 2, Q_HEADS = 4, KV_HEADS = 2, DIM = 8, V_DIM = 16 };
enum { Q = ROWS * Q_HEADS * DIM, K = NEW_ROWS * KV_HEADS * DIM, V = NEW_ROWS * KV_HEADS * V_DIM };
enum { OUT = ROWS * Q_HEADS * V_DIM, LSE = Q_HEADS * ROWS };

// reply_body is a reply of attend (without lens) or of decode; offsets count from the header.
typedef struct reply_body {
    proto_attend_reply r;
    float out[OUT], lse[LSE];
    uint32_t lens[2];
} reply_body;
#define AT(member) ((uint32_t)(PROTO_BODY + offsetof(reply_body, member)))

static attnd_errinfo info;
static attnd_client *client;
static fake_daemon *fake;
static uint32_t model;
static uint8_t got[65536];
static size_t got_bytes;
static uint32_t got_op;
static atomic_int step = -1; // of fake_cut; -1 = whole
static reply_body body;

static float q[Q], k[K], v[V], out[OUT], lse[LSE], untouched[OUT];
static attnd_attend_args args;

static size_t answer(proto_view request, const proto_header *h, uint8_t *reply) {
    got_bytes = request.bytes;
    memcpy(got, request.data, got_bytes);
    got_op = h->op;
    size_t bytes = fake_body(reply, h, &body, sizeof(body));
    return atomic_load(&step) >= 0 ? fake_cut(reply, h, atomic_load(&step)) : bytes;
}

static void fill(void) {
    for (int i = 0; i < OUT; i++) {
        body.out[i] = (float)i + 0.5f;
        out[i] = untouched[i] = -7.0f;
    }
    for (int i = 0; i < LSE; i++) {
        body.lse[i] = (float)-i;
        lse[i] = -7.0f;
    }
    body.lens[0] = 103;
    body.lens[1] = 50;
    body.r = (proto_attend_reply){.rows = ROWS,
                                  .out_off = AT(out),
                                  .lse_off = AT(lse),
                                  .lens_off = AT(lens),
                                  .splits = 2,
                                  .batch_rows = 30,
                                  .queue_us = 4,
                                  .run_us = 5,
                                  .kernel = "cpu_scalar",
                                  .why = "only one"};
}

static void start(void) {
    fake = fake_daemon_start(answer, 0);
    ATTND_CK_OK(attnd_connect(&client, fake_daemon_url(fake),
                              &(attnd_connect_opts){.timeout_ms = 5000}, &info));
    attnd_model_opts opts = {.name = "m",
                             .layers = 1,
                             .q_heads = Q_HEADS,
                             .kv_heads = KV_HEADS,
                             .head_dim = DIM,
                             .v_head_dim = V_DIM,
                             .all = ATTND_LAYER_DEFAULT};
    ATTND_CK_OK(attnd_model_open(client, &opts, &model, &info));
    for (int i = 0; i < Q; i++) {
        q[i] = (float)i;
    }
    for (int i = 0; i < K; i++) {
        k[i] = (float)(1000 + i);
    }
    for (int i = 0; i < V; i++) {
        v[i] = (float)(2000 + i);
    }
    args = (attnd_attend_args){.step = 0x5e,
                               .model = model,
                               .layer = 1,
                               .rows = ROWS,
                               .new_rows = NEW_ROWS,
                               .q = q,
                               .k = k,
                               .v = v,
                               .out = out,
                               .lse = lse};
    fill();
}

static void stop(void) {
    attnd_close(client);
    fake_daemon_stop(fake);
}

// sent_tensor says that the tensor lies in the request, contiguous.
static void sent_tensor(const proto_tensor *t, size_t fixed, const float *want, size_t elems) {
    const void *at = NULL;
    ck_assert_uint_eq(t->stride_token | t->stride_head | t->reserved, 0);
    ATTND_CK_OK(
        proto_array((proto_view){got, got_bytes}, "x", t->off, elems, 4, fixed, &at, &info));
    ck_assert_ptr_nonnull(at);
    ck_assert_mem_eq(at, want, elems * 4);
}

START_TEST(attend_sends_its_tensors) {
    ATTND_CK_OK(attnd_attend(client, &args, NULL, &info));
    ck_assert_uint_eq(got_op, PROTO_ATTEND);
    proto_attend a;
    memcpy(&a, got + 32, sizeof(a));
    ck_assert(a.step == 0x5e && a.layer == 1 && a.flags == PROTO_ATTEND_LSE);
    ck_assert(a.block_mask_off == 0 && a.reserved == 0);
    sent_tensor(&a.q, sizeof(a), q, Q);
    sent_tensor(&a.k, sizeof(a), k, K);
    sent_tensor(&a.v, sizeof(a), v, V);
}
END_TEST

START_TEST(attend_copies_outputs_and_what_ran) {
    attnd_ran ran;
    ATTND_CK_OK(attnd_attend(client, &args, &ran, &info));
    ck_assert_mem_eq(out, body.out, sizeof(out));
    ck_assert_mem_eq(lse, body.lse, sizeof(lse));
    ck_assert_str_eq(ran.kernel, "cpu_scalar");
    ck_assert_str_eq(ran.why, "only one");
    ck_assert(ran.splits == 2 && ran.batch_rows == 30 && ran.queue_us == 4 && ran.run_us == 5);
}
END_TEST

START_TEST(attend_packs_strided_tensors) {
    static float strided[ROWS * 100];
    for (int t = 0; t < ROWS; t++) {
        for (int h = 0; h < Q_HEADS; h++) {
            for (int d = 0; d < DIM; d++) {
                strided[t * 100 + h * 20 + d] = q[(t * Q_HEADS + h) * DIM + d];
            }
        }
    }
    args.q = strided;
    args.q_stride_token = 100;
    args.q_stride_head = 20;
    ATTND_CK_OK(attnd_attend(client, &args, NULL, &info));
    proto_attend a;
    memcpy(&a, got + 32, sizeof(a));
    sent_tensor(&a.q, sizeof(a), q, Q);
}
END_TEST

START_TEST(attend_of_a_shared_layer_sends_q_alone) {
    args.k = args.v = NULL;
    args.new_rows = 0;
    args.lse = NULL;
    args.partial = true;
    body.r.lse_off = 0;
    ATTND_CK_OK(attnd_attend(client, &args, NULL, &info));
    proto_attend a;
    memcpy(&a, got + 32, sizeof(a));
    ck_assert(a.k.off == 0 && a.v.off == 0 && a.flags == PROTO_ATTEND_PARTIAL);
    ck_assert_uint_eq(got_bytes, 104 + Q * 4);
}
END_TEST

static void refused(attnd_err code, const char *field) {
    attnd_ran ran = {.splits = 99};
    ATTND_CK_ERR(attnd_attend(client, &args, &ran, &info), code);
    if (field) {
        ck_assert_str_eq(info.field, field);
    }
    ck_assert_mem_eq(out, untouched, sizeof(out));
    ck_assert(lse[0] == -7.0f && ran.splits == 99);
}

START_TEST(attend_refuses_bad_arguments) {
    const attnd_attend_args good = args;
    args.model = 99;
    refused(ATTND_ENOENT, "model");
    args = good;
    args.q = NULL;
    refused(ATTND_EINVAL, "q");
    args = good;
    args.k = NULL;
    refused(ATTND_EINVAL, "k");
    args = good;
    args.v = NULL;
    refused(ATTND_EINVAL, "v");
    args = good;
    args.new_rows = 0; // with k and v
    refused(ATTND_EINVAL, NULL);
    args = good;
    args.rows = 257; // the daemon takes 256
    refused(ATTND_EINVAL, "rows");
    args = good;
    args.new_rows = UINT32_MAX;
    refused(ATTND_EINVAL, "rows");
    args = good;
    args.rows = args.new_rows = 256; // 3 * 32 KiB: over the message limit, measured only
    refused(ATTND_EMSGSIZE, NULL);
    args = good;
    args.out = NULL;
    ATTND_CK_ERR(attnd_attend(client, &args, NULL, &info), ATTND_EINVAL);
    ck_assert_uint_eq(got_op, 0);
}
END_TEST

static void never(void *ctx, attnd_err err, const attnd_ran *ran, const attnd_errinfo *why) {
    (void)ctx, (void)err, (void)ran, (void)why;
    ck_abort_msg("called back");
}

// What is refused is not sent, and the place of what was not started is free again.
START_TEST(attend_without_an_engine_refuses_a_stream) {
    args.stream = &args;
    for (int i = 0; i < 2 * CLIENT_MAX_SLOTS; i++) {
        ATTND_CK_ERR(attnd_attend_start(client, &args, never, NULL, &info), ATTND_ENOTSUP);
        ck_assert_str_eq(info.field, "stream");
    }
    ATTND_CK_ERR(attnd_attend(client, &args, NULL, &info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "stream");
    ck_assert_uint_eq(got_op, 0);
}
END_TEST

START_TEST(attend_is_not_started_without_a_callback) {
    ATTND_CK_ERR(attnd_attend_start(client, &args, NULL, NULL, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "cb");
    ck_assert_uint_eq(got_op, 0);
    ck_assert_uint_eq(attnd_poll(client, 0), 0);
}
END_TEST

START_TEST(attend_refuses_every_cut_of_a_reply) {
    int last = (int)AT(lens) * 2; // what comes behind lse is not asked for
    for (int i = 0; i < last; i++) {
        atomic_store(&step, i);
        refused(ATTND_EPROTO, NULL);
    }
    atomic_store(&step, last + 1);
    ATTND_CK_OK(attnd_attend(client, &args, NULL, &info));
}
END_TEST

START_TEST(attend_refuses_offsets_that_lie) {
    const uint32_t lies[] = {0,           8,          32,           AT(out) + 1,
                             AT(out) + 4, AT(lens),   AT(lens) + 8, 0xfffffff8,
                             UINT32_MAX,  0x80000000, sizeof(body)};
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        fill();
        body.r.out_off = lies[i];
        refused(ATTND_EPROTO, "out_off");
        fill();
        body.r.lse_off = lies[i];
        refused(ATTND_EPROTO, "lse_off");
    }
}
END_TEST

START_TEST(attend_refuses_a_reply_of_other_rows) {
    const uint32_t rows[] = {0, ROWS - 1, ROWS + 1, UINT32_MAX};
    for (int i = 0; i < 4; i++) {
        body.r.rows = rows[i];
        refused(ATTND_EPROTO, "rows");
    }
}
END_TEST

START_TEST(attend_makes_names_of_a_hostile_daemon_safe) {
    memset(body.r.kernel, '\n', sizeof(body.r.kernel));
    memset(body.r.why, 'y', sizeof(body.r.why));
    attnd_ran ran;
    ATTND_CK_OK(attnd_attend(client, &args, &ran, &info));
    ck_assert_uint_eq(strlen(ran.kernel), sizeof(ran.kernel) - 1);
    ck_assert_uint_eq(strlen(ran.why), sizeof(ran.why) - 1);
    ck_assert_ptr_null(strchr(ran.kernel, '\n'));
}
END_TEST

static const int32_t positions[2] = {5, 6};
static attnd_step_seq seqs[2];

static void fill_seqs(void) {
    seqs[0] = (attnd_step_seq){.seq = 0xa1, .new_len = 2, .positions = positions};
    seqs[1] = (attnd_step_seq){.seq = 0xa2, .q_len = 1};
}

static void check_attend1(uint32_t op) {
    ck_assert_uint_eq(got_op, op);
    proto_attend1 a;
    memcpy(&a, got + 32, sizeof(a));
    ck_assert(a.model == model && a.num_seqs == 2 && a.deadline_ms == 300 && a.flags == 1);
    const proto_attend1_seq want[2] = {{.seq = 0xa1, .new_len = 2, .positions_off = 144},
                                       {.seq = 0xa2, .q_len = 1}};
    ck_assert_mem_eq(got + 96, want, sizeof(want));
    ck_assert_mem_eq(got + 144, positions, sizeof(positions));
    sent_tensor(&a.q, sizeof(a), q, Q);
    sent_tensor(&a.k, sizeof(a), k, K);
    sent_tensor(&a.v, sizeof(a), v, V);
}

START_TEST(decode_and_prefill_send_sequences_and_tensors) {
    uint32_t lens[2] = {0};
    fill_seqs();
    ATTND_CK_OK(attnd_decode(client, seqs, 2, 300, &args, lens, NULL, &info));
    check_attend1(PROTO_DECODE);
    ck_assert(lens[0] == 103 && lens[1] == 50);
    ck_assert_mem_eq(out, body.out, sizeof(out));
    fill();
    ATTND_CK_OK(attnd_prefill(client, seqs, 2, 300, &args, NULL, NULL, &info));
    check_attend1(PROTO_PREFILL);
}
END_TEST

START_TEST(decode_refuses_what_it_has_no_field_for) {
    uint32_t token = 1;
    uint64_t tree = 1;
    const attnd_step_seq bad[] = {{.new_len = 1, .tokens = &token},
                                  {.new_len = 1, .tree_mask = &tree},
                                  {.new_len = 1, .reserve = 1}};
    const char *const fields[] = {"tokens", "tree_mask", "reserve"};
    for (int i = 0; i < 3; i++) {
        seqs[0] = bad[i];
        ATTND_CK_ERR(attnd_decode(client, seqs, 1, 0, &args, NULL, NULL, &info), ATTND_ENOTSUP);
        ck_assert_str_eq(info.field, fields[i]);
    }
    fill_seqs();
    args.stream = &args;
    ATTND_CK_ERR(attnd_decode(client, seqs, 2, 0, &args, NULL, NULL, &info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "stream");
    ATTND_CK_ERR(attnd_prefill(client, seqs, 2, 0, &args, NULL, NULL, &info), ATTND_ENOTSUP);
    ck_assert_str_eq(info.field, "stream");
    args.stream = NULL;
    ATTND_CK_ERR(attnd_decode(client, seqs, 0, 0, &args, NULL, NULL, &info), ATTND_EINVAL);
    ATTND_CK_ERR(attnd_decode(client, seqs, 9, 0, &args, NULL, NULL, &info), ATTND_EINVAL);
    ck_assert_uint_eq(got_op, 0);
}
END_TEST

START_TEST(decode_refuses_lens_that_are_cut_or_lie) {
    uint32_t lens[2] = {1, 2};
    fill_seqs();
    for (int i = (int)AT(lens) * 2; i < 2 * (PROTO_BODY + (int)sizeof(body)); i++) {
        atomic_store(&step, i);
        ATTND_CK_ERR(attnd_decode(client, seqs, 2, 0, &args, lens, NULL, &info), ATTND_EPROTO);
    }
    atomic_store(&step, -1);
    const uint32_t lies[] = {0, AT(lens) + 4, AT(lens) + 8, 0xfffffff8};
    for (int i = 0; i < 4; i++) {
        body.r.lens_off = lies[i];
        ATTND_CK_ERR(attnd_decode(client, seqs, 2, 0, &args, lens, NULL, &info), ATTND_EPROTO);
        ck_assert_str_eq(info.field, "lens_off");
    }
    ck_assert(lens[0] == 1 && lens[1] == 2);
    ck_assert_mem_eq(out, untouched, sizeof(out));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_attend");
    TCase *tc = tcase_create("attend");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, start, stop);
    tcase_add_test(tc, attend_sends_its_tensors);
    tcase_add_test(tc, attend_copies_outputs_and_what_ran);
    tcase_add_test(tc, attend_packs_strided_tensors);
    tcase_add_test(tc, attend_of_a_shared_layer_sends_q_alone);
    tcase_add_test(tc, attend_refuses_bad_arguments);
    tcase_add_test(tc, attend_without_an_engine_refuses_a_stream);
    tcase_add_test(tc, attend_is_not_started_without_a_callback);
    tcase_add_test(tc, attend_refuses_every_cut_of_a_reply);
    tcase_add_test(tc, attend_refuses_offsets_that_lie);
    tcase_add_test(tc, attend_refuses_a_reply_of_other_rows);
    tcase_add_test(tc, attend_makes_names_of_a_hostile_daemon_safe);
    tcase_add_test(tc, decode_and_prefill_send_sequences_and_tensors);
    tcase_add_test(tc, decode_refuses_what_it_has_no_field_for);
    tcase_add_test(tc, decode_refuses_lens_that_are_cut_or_lie);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
