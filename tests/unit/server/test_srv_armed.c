// Calls that wait for flags, over a backend that begins a layer by itself when the test says so.
#include <stdlib.h>
#include <string.h>

#include "proto/clock.h"
#include "server/srv_core.h"
#include "tests/check_main.h"

enum { LAYERS = 2, CALLS = 3, FLAGS = CALLS * LAYERS, TICKET = 9 };
enum { FLAGS_BYTES = PROTO_FLAGS_HEAD_BYTES + PROTO_FLAGS_PAGE_BYTES };

static srv_core core;
static attnd_errinfo info;
static uint64_t taken; // the ticket whose flag the backend has taken, 0 = none
static bool tells;     // begun says so, too

// What the backend's thread does falls between two questions of the loop's: the first that hears of
// it is forget.
static bool forget(srv_backend *b, uint64_t ticket) {
    (void)b;
    tells = true;
    return ticket == taken;
}

static bool begun(const srv_backend *b, uint64_t ticket) {
    (void)b;
    return tells && ticket && ticket == taken;
}

static void stir(void *ctx) {
    (void)ctx;
}

static const srv_backend_ops ops = {.forget = forget, .begun = begun};
static const srv_core_hooks hooks = {.stir = stir};
static srv_backend backend = {.ops = &ops};

static attn_layer layers[LAYERS] = {{.kv_layer = 0}, {.kv_layer = 1}};
static attn_model attn = {.num_layers = LAYERS, .layers = layers};
static const srv_model model = {.attn = &attn, .shape = &attn.shape};
static srv_session session = {.core = &core, .settling = true};
static srv_region region;

// ---- a connection that keeps the last reply

static uint64_t reply[64];
static uint32_t num_replies;

static attnd_err reply_alloc(srv_request *rq, size_t bytes, void **out, attnd_errinfo *i) {
    (void)rq, (void)i;
    ck_assert_uint_le(bytes, sizeof(reply));
    *out = reply;
    return ATTND_OK;
}

static void reply_send(srv_request *rq) {
    (void)rq;
    num_replies++;
}

static const srv_transport_ops transport = {.reply_alloc = reply_alloc, .reply_send = reply_send};
static srv_conn conn = {.ops = &transport};

// call is an attend_all of both layers of a step of its own, over two pairs.
typedef struct call {
    srv_step step;
    srv_request rq;
    proto_attend_reply reply;
    uint32_t pair;
} call;

static call first, second, third;

static void setup(void) {
    core = (srv_core){.hooks = &hooks, .backend = &backend, .conf.flag_spin_us = 100};
    ATTND_CK_OK(srv_armed_init(&core.armed, CALLS));
    region = (srv_region){.num_flags = FLAGS, .flags_bytes = FLAGS_BYTES};
    region.flags = calloc(1, FLAGS_BYTES);
    ck_assert_ptr_nonnull(region.flags);
    list_init(&region.calls);
    taken = 0;
    tells = false;
    num_replies = 0;
}

static void teardown(void) {
    srv_armed_fini(&core.armed);
    free(region.flags);
}

static void start(call *c, uint64_t handle, uint32_t pair, uint32_t num_active) {
    *c = (call){.pair = pair,
                .step = {.state = SRV_STEP_OPEN,
                         .handle = handle,
                         .session = &session,
                         .model = &model,
                         .num_active = num_active}};
    c->rq = (srv_request){
        .conn = &conn, .session = &session, .attend = {.step = &c->step, .reply = &c->reply}};
    proto_attend_all all = {.step = handle, .num_layers = LAYERS, .first_flag = pair};
    ATTND_CK_OK(srv_armed_start(&core, &c->rq, &region, &all, &info));
}

static bool is_done(const call *c, uint32_t layer) {
    const proto_flag *pairs = (const void *)(region.flags + PROTO_FLAGS_HEAD_BYTES);
    return pairs[c->pair + layer].done;
}

// later is when no flag has come for so long that every call is cold.
static uint64_t later(void) {
    return attnd_clock_us() + 1000000;
}

// The first call of the cold list has a layer without rows, which ends while its flag is looked at;
// the backend begins a layer of the next call at that moment.
START_TEST(a_layer_that_is_begun_during_a_walk_leaves_the_list_after_it) {
    start(&first, 1, 0, 0);
    srv_armed_poll(&core, later());
    start(&second, 2, LAYERS, 1);
    second.rq.attend.ticket = taken = TICKET; // it is alone, and prepared
    start(&third, 3, 2 * LAYERS, 1);
    srv_armed_poll(&core, later());
    ck_assert(!srv_armed_hot(&core));
    *srv_region_ready(&region, first.pair) = 1;

    ck_assert(srv_armed_tick(&core, attnd_clock_us()));
    ck_assert(tells);
    ck_assert(is_done(&first, 0));
    ck_assert(!is_done(&first, 1));
    ck_assert_uint_eq(core.armed.running, 0);
    ck_assert_uint_eq(core.armed.info.waiting, 3);
    ck_assert_uint_eq(core.armed.info.layers, 1);

    srv_armed_tick(&core, attnd_clock_us()); // which begins with hearing of it
    ck_assert_uint_eq(core.armed.running, 1);
    ck_assert_uint_eq(core.armed.info.layers, 1);
    ck_assert(srv_layer_bit(second.step.attending, 0));
    ck_assert(!is_done(&second, 0)); // the device says so when it is
}
END_TEST

// ---- gates

// begin_gate has the backend begin the first layer of a call, which the loop has noticed or not.
static void begin_gate(bool noticed) {
    start(&first, 1, 0, 0);
    first.rq.attend.ticket = taken = TICKET;
    tells = noticed;
    srv_armed_poll(&core, attnd_clock_us());
    ck_assert_uint_eq(core.armed.running, noticed);
}

// end_gate says that it was in vain.
static void end_gate(attnd_err err) {
    sched_launch launch = {.ticket = TICKET, .gated = true, .missed = true, .err = err};
    if (err) {
        attnd_fail(&launch.info, err, "there", "as was asked for");
    }
    taken = 0;
    srv_armed_ran(&core, TICKET, &launch);
    ck_assert_uint_eq(core.armed.running, 0);
    ck_assert_uint_eq(core.armed.info.layers, 0);
    ck_assert_uint_eq(first.step.running, 0);
    ck_assert(!srv_layer_bit(first.step.attending, 0));
    ck_assert(!is_done(&first, 0)); // nobody waits there yet
    ck_assert(srv_armed_hot(&core));
}

static void raise_layer(uint32_t layer) {
    *srv_region_ready(&region, first.pair + layer) = 1;
    ck_assert(srv_armed_poll(&core, attnd_clock_us()));
    ck_assert_uint_eq(*srv_region_ready(&region, first.pair + layer), 0);
    ck_assert(is_done(&first, layer));
}

// ck_fails wants the call to be answered, and to drain from its first layer on.
static void ck_fails(attnd_err err) {
    ck_assert_uint_eq(num_replies, 1);
    ck_assert_int_eq(first.rq.status, err);
    ck_assert_uint_eq(core.armed.info.waiting, 0);
    ck_assert_uint_eq(core.armed.info.draining, 1);
    ck_assert_uint_eq(core.armed.info.failed, 1);
    ck_assert_uint_eq(first.step.armed, 0);
    raise_layer(0);
    ck_assert_uint_eq(core.armed.info.draining, 1);
    raise_layer(1);
    ck_assert_uint_eq(core.armed.info.draining, 0);
    ck_assert_uint_eq(region.num_calls, 0);
    ck_assert_uint_eq(num_replies, 1);
}

START_TEST(a_layer_whose_gate_was_in_vain_waits_for_its_flag) {
    begin_gate(_i);
    end_gate(ATTND_OK);
    ck_assert_uint_eq(core.armed.info.waiting, 1);
    ck_assert_uint_eq(num_replies, 0);
    raise_layer(0); // which has no rows, and ends at once
    ck_assert_uint_eq(core.armed.info.layers, 1);
    raise_layer(1);
    ck_assert_uint_eq(num_replies, 1);
    ck_assert_int_eq(first.rq.status, ATTND_OK);
    ck_assert_uint_eq(core.armed.info.waiting, 0);
    ck_assert_uint_eq(core.armed.info.failed, 0);
}
END_TEST

START_TEST(a_call_can_be_canceled_behind_a_gate_in_vain) {
    begin_gate(_i);
    end_gate(ATTND_OK);
    first.rq.cancel(&first.rq);
    ck_fails(ATTND_ECANCELED);
}
END_TEST

START_TEST(a_call_that_is_canceled_at_a_gate_fails_behind_it) {
    begin_gate(_i);
    first.rq.cancel(&first.rq);
    ck_assert_uint_eq(num_replies, 0);
    ck_assert_uint_eq(core.armed.running, 1);
    end_gate(ATTND_OK);
    ck_fails(ATTND_ECANCELED);
}
END_TEST

START_TEST(a_call_whose_deadline_passes_at_a_gate_fails_behind_it) {
    begin_gate(_i);
    first.step.deadline_ms = 1;
    first.step.state = SRV_STEP_LATE;
    end_gate(ATTND_OK);
    ck_fails(ATTND_ETIMEDOUT);
}
END_TEST

START_TEST(a_call_whose_gate_failed_drains_from_that_layer_on) {
    begin_gate(_i);
    end_gate(ATTND_ECUDA);
    ck_fails(ATTND_ECUDA);
    proto_error error;
    memcpy(&error, (const uint8_t *)reply + sizeof(proto_header), sizeof(error));
    ck_assert_str_eq(error.field, "there");
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_armed");
    TCase *tc = tcase_create("walk");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_layer_that_is_begun_during_a_walk_leaves_the_list_after_it);
    suite_add_tcase(s, tc);
    tc = tcase_create("gate");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_loop_test(tc, a_layer_whose_gate_was_in_vain_waits_for_its_flag, 0, 2);
    tcase_add_loop_test(tc, a_call_can_be_canceled_behind_a_gate_in_vain, 0, 2);
    tcase_add_loop_test(tc, a_call_that_is_canceled_at_a_gate_fails_behind_it, 0, 2);
    tcase_add_loop_test(tc, a_call_whose_deadline_passes_at_a_gate_fails_behind_it, 0, 2);
    tcase_add_loop_test(tc, a_call_whose_gate_failed_drains_from_that_layer_on, 0, 2);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
