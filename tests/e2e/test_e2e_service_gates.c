// Layers that come at equal times to a daemon that shares its GPU with the client through MPS, and
// so begins them at gates, shortly before their flags come: what they give, and what happens when
// the call ends at a gate, or its client does, or raises pairs as it likes.  ATTND_FAKE_MPS must be
// in the environment.
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"
#include "tests/device/fake_device.h"
#include "tests/e2e/service_fixture.h"

enum {
    GAP_US = 1000,       // between layers
    PATIENCE_MS = 20000, // for what happens when the machine lets layers come at equal times
};

// begin_gates is begin_one with a model of many layers, and a thread that polls for long, also
// where it takes turns with the loop.
static void begin_gates(play_model *m, play_seq *seq) {
    begin_with((const char *const[]){"--set", "compute.launch_ahead=on", "--set",
                                     "server.flag_spin_us=100000", NULL});
    service_join(&s, path, hello, MIB, FLAGS);
    ck_assert_ptr_nonnull(s.there);
    *m = play_tiny();
    m->layers = PLAY_MAX_LAYERS;
    play_open(&c, m);
    play_create(&c, m, seq);
}

// await_gap waits until a gap after `from` has passed.
static void await_gap(uint64_t from_us) {
    while (attnd_clock_us() - from_us < GAP_US) {
        sched_yield();
    }
}

// await_done is service_lower for a test of time.
static bool await_done(service_client *who, uint32_t pair, uint64_t *at_us) {
    uint64_t begin = attnd_clock_us();
    while (!__atomic_load_n(&who->there[pair].done, __ATOMIC_ACQUIRE) &&
           attnd_clock_us() - begin < 1000000) {
        sched_yield();
    }
    *at_us = attnd_clock_us();
    return service_lower(who, pair, 0);
}

// forward sends a step's call and has its layers [0, to) come at equal times; returns when the last
// one was done.
static uint64_t forward(const play_step *step, const proto_attend_all *all, uint32_t to) {
    uint64_t done_us = attnd_clock_us();
    service_send(&s, all, sizeof(*all));
    for (uint32_t layer = 0; layer < to; layer++) {
        play_tensors t = play_random(step);
        service_write(&s, step, all, &t);
        await_gap(done_us);
        service_raise(&s, PAIR + layer);
        ck_assert_msg(await_done(&s, PAIR + layer, &done_us), "layer %u hangs", layer);
        service_check(&s, step, all, layer, &t);
        play_tensors_fini(&t);
    }
    return done_us;
}

START_TEST(layers_that_come_at_equal_times_are_begun_at_gates) {
    play_seq seq;
    play_model m;
    begin_gates(&m, &seq);
    uint64_t until = e2e_now_ms() + PATIENCE_MS;
    double rounds = 0;
    for (; e2e_stat(&c, "service.gated") < 20 && e2e_now_ms() < until; rounds++) {
        play_step step = open_step(&m, &seq, 1, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        forward(&step, &all, m.layers);
        ck_reply(&step);
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    }
    double gated = e2e_stat(&c, "service.gated"), missed = e2e_stat(&c, "service.gates_missed");
    printf("%.0f layers, %.0f at gates, %.0f gates in vain\n", rounds * m.layers, gated, missed);
    ck_assert_double_gt(gated, 0);
    ck_assert_double_eq(e2e_stat(&c, "service.layers"), rounds * m.layers);
    ck_assert_double_le(gated, e2e_stat(&c, "service.ahead"));
    play_free(&c, &seq);
    end();
}
END_TEST

// Calls at the flags and calls at the pairs take turns in the same places.
START_TEST(a_call_may_be_at_the_flags_though_there_are_pairs) {
    play_seq seq;
    play_model m;
    begin_gates(&m, &seq);
    proto_flag *there = s.there;
    for (int round = 0; round < 6; round++) {
        const bool at_flags = round % 2 == 0;
        play_step step = open_step(&m, &seq, 1, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        all.flags |= at_flags ? PROTO_ATTEND_AT_FLAGS : 0u;
        s.there = at_flags ? NULL : there;
        service_send(&s, &all, sizeof(all));
        for (uint32_t layer = 0; layer < m.layers; layer++) {
            proto_flag before = there[PAIR + layer];
            play_tensors t = play_random(&step);
            service_write(&s, &step, &all, &t);
            service_raise(&s, PAIR + layer);
            ck_assert_msg(service_lower(&s, PAIR + layer, 1000), "layer %u hangs", layer);
            service_check(&s, &step, &all, layer, &t);
            ck_assert(!at_flags || memcmp(&before, &there[PAIR + layer], sizeof(before)) == 0);
            play_tensors_fini(&t);
        }
        ck_reply(&step);
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    }
    s.there = there;
    play_free(&c, &seq);
    end();
}
END_TEST

// At any time around a gate, with the flag raised or not.
START_TEST(a_cancel_meets_a_gate) {
    enum { ROUNDS = 60 };
    play_seq seq;
    play_model m;
    begin_gates(&m, &seq);
    for (int round = 0; round < ROUNDS; round++) {
        const uint32_t at = 4 + (uint32_t)round % 3;
        play_step step = open_step(&m, &seq, 1, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        uint64_t done_us = forward(&step, &all, at);
        proto_cancel cancel = {.step = step.handle};
        bool raises = round % 2;
        while (attnd_clock_us() - done_us < GAP_US - 60 + (uint64_t)round % 20 * 5) {
        }
        if (raises) {
            service_raise(&s, PAIR + at);
        }
        ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
        ATTND_CK_ERR(service_recv(&s, NULL), ATTND_ECANCELED);
        if (raises) {
            ck_assert_msg(service_lower(&s, PAIR + at, 1000), "round %d hangs", round);
        }
        ck_drains(&all, at + raises);
        e2e_await_stat(&c, "service.draining", 0, 1000);
        e2e_await_stat(&c, "steps", 0, 1000);
    }
    whole(&m, &seq, 3);
    play_free(&c, &seq);
    end();
}
END_TEST

// A pair without its flag passes a gate, and the call fails; where there is no gate it is nothing.
START_TEST(a_pair_that_is_raised_without_its_flag_fails_its_call_alone) {
    enum { LATER = 40 }; // steps: gates are launched again after 64 layers or, mostly, 128
    play_seq seq, other;
    play_model m;
    begin_gates(&m, &seq);
    play_create(&c, &m, &other);
    uint64_t until = e2e_now_ms() + PATIENCE_MS;
    bool failed = false;
    while (!failed && e2e_now_ms() < until) {
        const uint32_t at = 5;
        play_step step = open_step(&m, &seq, 1, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        await_gap(forward(&step, &all, at));
        __atomic_store_n(&s.there[PAIR + at].ready, 1, __ATOMIC_RELEASE);
        play_token(&c, (play_seq *const[]){&other}, 1, 1); // is checked
        usleep(50000);
        failed = __atomic_load_n(&s.head->error_epoch, __ATOMIC_ACQUIRE) > 0;
        if (failed) {
            ATTND_CK_ERR(service_recv(&s, NULL), ATTND_EPROTO);
        }
        proto_cancel cancel = {.step = step.handle};
        ATTND_CK_OK(e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL));
        if (!failed) {
            ATTND_CK_ERR(service_recv(&s, NULL), ATTND_ECANCELED);
            s.head->error_epoch = 0;
        } else { // ends its drain
            (void)e2e_call(&c, PROTO_CANCEL, &cancel, sizeof(cancel), NULL);
        }
        ck_drains(&all, failed ? m.layers : at);
        s.there[PAIR + at] = (proto_flag){.ready = 0};
        e2e_await_stat(&c, "service.draining", 0, 1000);
        e2e_await_stat(&c, "steps", 0, 1000);
    }
    ck_assert(failed);
    whole(&m, &seq, 3);
    double gated = e2e_stat(&c, "service.gated"), missed = e2e_stat(&c, "service.gates_missed");
    for (int i = 0; i < LATER; i++) { // no gate waits for that client any more
        play_step step = open_step(&m, &seq, 1, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        forward(&step, &all, m.layers);
        ck_reply(&step);
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    }
    ck_assert_double_eq(e2e_stat(&c, "service.gated"), gated);
    ck_assert_double_eq(e2e_stat(&c, "service.gates_missed"), missed);
    play_free(&c, &seq);
    play_free(&c, &other);
    end();
}
END_TEST

// A client that knows nothing of pairs waits at its flags; only one of the same GPU can do else.
START_TEST(pairs_are_for_who_asks_for_them_on_this_gpu) {
    static const struct {
        uint32_t flags;
        bool here, gets;
    } asks[] = {{PROTO_REGION_MPS, true, false},
                {PROTO_REGION_PAIRS, true, false},
                {PROTO_REGION_MPS | PROTO_REGION_PAIRS, false, false},
                {PROTO_REGION_MPS | PROTO_REGION_PAIRS, true, true}};
    const proto_attach attach = {.magic = PROTO_RING_MAGIC,
                                 .version = PROTO_VERSION,
                                 .flags = PROTO_ATTACH_REGION,
                                 .entries = 16,
                                 .data_bytes = 4096};
    begin_with(NULL);
    for (size_t i = 0; i < sizeof(asks) / sizeof(asks[0]); i++) {
        service_client r;
        proto_region_ask ask = {.bytes = 4096, .num_flags = 1, .flags = asks[i].flags};
        memcpy(ask.device, FAKE_UUID, sizeof(ask.device));
        ask.device[15] ^= (uint8_t)!asks[i].here;
        ATTND_CK_OK(service_ask(&r, path, &attach, &ask));
        ck_assert_msg((r.given.pairs_off != 0) == asks[i].gets, "case %zu", i);
        service_close(&r);
    }
    end();
}
END_TEST

START_TEST(tensors_do_not_reach_into_pairs) {
    play_seq seq;
    play_model m;
    begin_gates(&m, &seq);
    play_step step = open_step(&m, &seq, 1, 0);
    const uint64_t row = 4 * 32 * sizeof(float);
    proto_attend_all all = service_layout(&step, 0, PAIR);
    ck_assert_uint_eq(s.given.pairs_off % PROTO_REGION_ALIGN, 0);
    ck_assert_uint_le(s.given.pairs_off + FLAGS * sizeof(proto_flag), s.given.bytes);
    all.out_off = s.given.pairs_off - row + PROTO_REGION_ALIGN;
    service_send(&s, &all, sizeof(all));
    const void *reply;
    ATTND_CK_ERR(service_recv(&s, &reply), ATTND_EINVAL);
    ck_assert_str_eq(((const proto_error *)reply)->field, "out_off");
    ck_drains(&all, 0);
    all.out_off = s.given.pairs_off - row;
    service_send(&s, &all, sizeof(all));
    service_layers(&s, &step, &all, 0, m.layers);
    ck_reply(&step);
    ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
    play_free(&c, &seq);
    end();
}
END_TEST

// ---- a client that is killed

static uint32_t *layers_done; // of the victim, shared

static uint64_t victim_step(service_client *v, uint32_t model, const uint8_t seq[8]) {
    const void *reply;
    uint64_t step;
    struct {
        proto_step step;
        proto_step_seq seq;
    } body = {.step = {.model = model, .num_seqs = 1}, .seq = {.new_len = 1}};
    memcpy(&body.seq.seq, seq, 8);
    ATTND_CK_OK(ring_client_call(&v->ring, PROTO_STEP, ++v->id, &body, sizeof(body), &reply));
    memcpy(&step, reply, 8);
    return step;
}

// live is a client that has layers come at equal times until it is killed.
static _Noreturn void live(void) {
    static const char json[] =
        "{\"name\": \"victim\", \"digest\": "
        "\"0000000000000000000000000000000000000000000000000000000000000000\", \"dtype\": "
        "\"f32\", \"layers\": 8, \"q_heads\": 4, \"kv_heads\": 2, \"head_dim\": 32}";
    const play_model shape = {
        .layers = 8, .q_heads = 4, .kv_heads = 2, .head_dim = 32, .v_head_dim = 32};
    service_client v;
    const void *reply;
    uint8_t seq[8];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    service_open(&v, path, MIB, FLAGS);
    ATTND_CK_OK(ring_client_call(&v.ring, PROTO_MODEL_OPEN, ++v.id, json, strlen(json), &reply));
    proto_model create = {.model = (uint32_t)e2e_number(reply, "model")};
    ATTND_CK_OK(
        ring_client_call(&v.ring, PROTO_SEQ_CREATE, ++v.id, &create, sizeof(create), &reply));
    memcpy(seq, reply, 8);
    for (;;) {
        play_step step = {.model = &shape, .rows = 1, .new_rows = 1};
        step.handle = victim_step(&v, create.model, seq);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        proto_cancel cancel = {.step = step.handle};
        service_send(&v, &all, sizeof(all));
        uint64_t done_us = attnd_clock_us();
        for (uint32_t layer = 0; layer < shape.layers; layer++) {
            await_gap(done_us);
            service_raise(&v, PAIR + layer);
            ck_assert(await_done(&v, PAIR + layer, &done_us));
            __atomic_store_n(layers_done, *layers_done + 1, __ATOMIC_RELEASE);
        }
        ATTND_CK_OK(service_recv(&v, NULL));
        ATTND_CK_OK(ring_client_call(&v.ring, PROTO_CANCEL, ++v.id, &cancel, sizeof(cancel), NULL));
    }
}

// Its last layer is at a gate, or before or behind it.
START_TEST(a_client_killed_at_a_gate_leaves_nothing) {
    enum { ROUNDS = 12, AFTER = 40 };
    play_seq seq;
    play_model m;
    begin_gates(&m, &seq);
    whole(&m, &seq, 2);
    double in_use = e2e_stat(&c, "blocks.in_use");
    layers_done = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert(layers_done != MAP_FAILED);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        *layers_done = 0;
        pid_t victim = fork();
        ck_assert_int_ge(victim, 0);
        if (victim == 0) {
            live();
        }
        uint64_t until = e2e_now_ms() + PATIENCE_MS;
        while (__atomic_load_n(layers_done, __ATOMIC_ACQUIRE) < AFTER && e2e_now_ms() < until) {
            usleep(100);
        }
        for (uint64_t from = attnd_clock_us();
             attnd_clock_us() - from < GAP_US - 60 + round * 10;) {
        }
        kill(victim, SIGKILL);
        ck_assert_int_eq(waitpid(victim, NULL, 0), victim);
        ck_assert_uint_ge(*layers_done, AFTER);
        e2e_await_stat(&c, "service.regions", 1, 1000);
        e2e_await_stat(&c, "sessions", 1, 1000);
        e2e_await_stat(&c, "blocks.in_use", in_use, 1000);
        ck_clean();
        play_step step = open_step(&m, &seq, 1, 0);
        proto_attend_all all = service_layout(&step, 0, PAIR);
        forward(&step, &all, m.layers);
        ck_reply(&step);
        ATTND_CK_OK(play_commit(&c, &step, NULL, NULL));
        in_use = e2e_stat(&c, "blocks.in_use");
    }
    printf("%.0f layers at gates, %.0f gates in vain\n", e2e_stat(&c, "service.gated"),
           e2e_stat(&c, "service.gates_missed"));
    munmap(layers_done, 4096);
    play_free(&c, &seq);
    end();
}
END_TEST

static Suite *suite(void) {
    Suite *all = suite_create("e2e_service_gates");
    TCase *tc = tcase_create("gates");
    tcase_set_timeout(tc, 120);
    tcase_add_test(tc, layers_that_come_at_equal_times_are_begun_at_gates);
    tcase_add_test(tc, a_call_may_be_at_the_flags_though_there_are_pairs);
    tcase_add_test(tc, a_cancel_meets_a_gate);
    tcase_add_test(tc, a_pair_that_is_raised_without_its_flag_fails_its_call_alone);
    tcase_add_test(tc, pairs_are_for_who_asks_for_them_on_this_gpu);
    tcase_add_test(tc, tensors_do_not_reach_into_pairs);
    tcase_add_test(tc, a_client_killed_at_a_gate_leaves_nothing);
    suite_add_tcase(all, tc);
    return all;
}

CHECK_MAIN(suite)
