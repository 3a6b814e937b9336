// Gates on a GPU: what one that passes gives, and that one that gives up leaves no trace.  Exit
// code 77: there is no GPU with gates.  CUDA does not survive fork, so nothing is forked.
#include <stdio.h>
#include <string.h>

#include "tests/conformance/cuda/conf_gate.h"

enum { INPUTS = 4, GATES = 2000, TRIES = 50, MISSED_US = 10000, SKIPPED = 77 };

static const attn_device_ops *const ops = &attn_cuda_device_ops;
static attn_device *device;
static conf_input inputs[INPUTS], other;
static uint32_t waited_us;

// base: the first row is cut over several CTAs, so that its parts go through the workspace.
static conf_spec base(uint64_t seed) {
    return (conf_spec){.q_dtype = ATTND_BF16,
                       .kv_dtype = ATTND_BF16,
                       .q_heads = 4,
                       .kv_heads = 2,
                       .head_dim = 128,
                       .v_head_dim = 128,
                       .block_tokens = 16,
                       .features = CONF_CAUSAL,
                       .logit = 1,
                       .seed = seed,
                       .placement = seed,
                       .num_rows = 3,
                       .rows = {{1500, 1, 1, 0, 1}, {77, 5, 5, 0, 5}, {9, 3, 2, 1, 2}}};
}

START_TEST(a_pair_that_was_raised_passes_at_once) {
    ck_assert(conf_gate_run(&inputs[0], 0, 3, CONF_BEFORE, &waited_us));
    ck_assert_uint_lt(waited_us, CONF_GATE_LATER_US);
}
END_TEST

// When this thread is late the gate may miss it, or the gate itself is late: there is another try.
START_TEST(a_pair_that_is_raised_while_the_gate_waits_passes) {
    bool passed = false;
    for (int i = 0; i < TRIES && (!passed || waited_us < CONF_GATE_LATER_US / 2); i++) {
        passed = conf_gate_run(&inputs[1], 1, 0, CONF_LATER, &waited_us);
    }
    ck_assert(passed);
    ck_assert_uint_ge(waited_us, CONF_GATE_LATER_US / 2);
}
END_TEST

START_TEST(a_gate_that_gives_up_leaves_no_trace) {
    const uint64_t poison = UINT64_C(0xffffffff) << 32; // not raised
    CONF_GATE_OK(
        cudaMemcpy((void *)conf_gate_address(5), &poison, sizeof(poison), cudaMemcpyHostToDevice));
    ck_assert(!conf_gate_run(&inputs[2], 1, 5, CONF_NEVER, &waited_us));
    ck_assert_uint_ge(waited_us, ATTN_DEVICE_GATE_US);
    ck_assert_uint_le(waited_us, MISSED_US);
    ck_assert_uint_eq(conf_gate_pair(5), poison);
    conf_gate_plan(&inputs[2], 1);
    CONF_GATE_OK(ops->launch(device, 1, NULL));
    conf_gate_end(1);
    conf_gate_check_right(&inputs[2]);
}
END_TEST

// Half of them are never raised, a quarter before they begin, and a quarter right behind that, when
// they mostly pass.
START_TEST(gates_pass_when_raised_and_only_then) {
    static const conf_when whens[] = {CONF_NEVER, CONF_NEVER, CONF_BEFORE, CONF_BEHIND};
    uint32_t x = 2463534242u, num_raised = 0, num_passed = 0;
    for (uint32_t n = 0; n < GATES; n++) {
        x ^= x << 13; // xorshift
        x ^= x >> 17;
        x ^= x << 5;
        const conf_when when = whens[x >> 24 & 3];
        bool passed = conf_gate_run(&inputs[x >> 16 & (INPUTS - 1)], n % ATTN_DEVICE_BUFFERS,
                                    x >> 8 & (CONF_GATE_PAIRS - 1), when, &waited_us);
        ck_assert(when == CONF_BEHIND || passed == (when == CONF_BEFORE));
        num_raised += when != CONF_NEVER;
        num_passed += passed;
    }
    printf("%d gates: %u raised, %u passed\n", GATES, num_raised, num_passed);
    ck_assert_uint_ge(num_passed, num_raised / 2);
}
END_TEST

// Where there is no prefill kernel, decode takes all of them.
START_TEST(plans_that_prefill_have_no_gate) {
    conf_spec specs[] = {base(11), base(12), base(13)};
    int num_prefilled = 0;
    specs[0].rows[1] = (conf_row){200, 64, 64, 0, 64}; // beside rows that are decoded
    specs[1].rows[0] = (conf_row){200, 64, 0, 0, 64};
    specs[1].num_rows = 1;
    specs[2].features |= CONF_BLOCK_MASK;
    for (int i = 0; i < 3; i++) {
        attn_choice choice = {0};
        conf_input_init(&other, &specs[i]);
        CONF_GATE_OK(ops->plan(device, 0, &other.gpu.params, &choice, NULL));
        bool prefills = strstr(choice.kernel, "prefill") != NULL;
        ck_assert_int_eq(ops->gates(device, 0), !prefills);
        num_prefilled += prefills;
        conf_input_fini(&other);
    }
    ck_assert(num_prefilled == 0 || num_prefilled == 3);
}
END_TEST

START_TEST(gates_stand_before_the_portable_kernel_too) {
    static const conf_when whens[] = {CONF_NEVER, CONF_BEFORE, CONF_NEVER, CONF_BEFORE};
    conf_spec spec = base(14);
    spec.features |= CONF_BLOCK_MASK;
    conf_input_init(&other, &spec);
    for (int i = 0; i < 4; i++) {
        bool passed = conf_gate_run(&other, CONF_GATE_MASKS, 0, whens[i], &waited_us);
        ck_assert(passed == (whens[i] == CONF_BEFORE));
    }
    conf_input_fini(&other);
}
END_TEST

START_TEST(hosts_end_a_client_by_its_flag) {
    conf_gate_raise(1);
    ck_assert(!conf_gate_client_ended());
    __atomic_fetch_or(conf_gate_flag(1), CONF_ANSWERED, __ATOMIC_RELEASE);
    CONF_GATE_AWAIT(conf_gate_client_ended(), CONF_GATE_END_US);
    ck_assert_uint_eq(conf_gate_pair(1), 0); // lowered, and nobody has answered there
}
END_TEST

START_TEST(signals_answer_a_client) {
    conf_gate_raise(7);
    ck_assert_uint_eq(conf_gate_pair(7), CONF_RAISED);
    ck_assert(!conf_gate_client_ended());
    CONF_GATE_OK(ops->signal(device, conf_gate_address(7), NULL));
    conf_gate_check_answered(7);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("hand_over");
    TCase *t = tcase_create("gates");
    tcase_add_checked_fixture(t, conf_gate_start, NULL);
    tcase_add_test(t, a_pair_that_was_raised_passes_at_once);
    tcase_add_test(t, a_pair_that_is_raised_while_the_gate_waits_passes);
    tcase_add_test(t, a_gate_that_gives_up_leaves_no_trace);
    tcase_add_test(t, gates_pass_when_raised_and_only_then);
    tcase_add_test(t, plans_that_prefill_have_no_gate);
    tcase_add_test(t, gates_stand_before_the_portable_kernel_too);
    tcase_add_test(t, hosts_end_a_client_by_its_flag);
    tcase_add_test(t, signals_answer_a_client);
    suite_add_tcase(s, t);
    return s;
}

int main(void) {
    device = conf_gate_open();
    if (!device) {
        return SKIPPED;
    }
    for (uint32_t i = 0; i < INPUTS; i++) {
        const conf_spec spec = base(i + 1);
        conf_input_init(&inputs[i], &spec);
    }
    SRunner *runner = srunner_create(suite());
    srunner_set_fork_status(runner, CK_NOFORK);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    for (uint32_t i = 0; i < INPUTS; i++) {
        conf_input_fini(&inputs[i]);
    }
    conf_gate_close();
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
