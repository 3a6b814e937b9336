// The CPU kernels of every instruction set of this machine against the float64 reference: storage
// types x features x shapes, in automatic, forced and deterministic splits, on 1, 2 and 3 threads.
//
// ATTND_CONFORMANCE=long adds long sequences and more random launches, ATTND_SEED=n repeats the
// random launches of a run that printed n.
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "attention/cpu/attn_cpu_ops.h"
#include "tests/check_main.h"
#include "tests/conformance/conf_oracle.h"

enum { MAX_THREADS = 3, NUM_ISAS = 5, BASE_TOKENS = 16 };

static const char *const isas[NUM_ISAS] = {"scalar", "avx2", "avx512", "avx512_bf16", "neon"};
static attn_cpu *engines[NUM_ISAS][MAX_THREADS]; // NULL: not on this machine
static conf_launch launch;

// A pair of storage types.
typedef struct types {
    attnd_dtype q, kv;
} types;

enum { NUM_TYPES = 5 };
static const types all_types[NUM_TYPES] = {{ATTND_F32, ATTND_F32},
                                           {ATTND_BF16, ATTND_BF16},
                                           {ATTND_F16, ATTND_F16},
                                           {ATTND_BF16, ATTND_F8E4M3},
                                           {ATTND_F16, ATTND_F8E4M3}};

static void open_engines(void) {
    for (int i = 0; i < NUM_ISAS; i++) {
        for (int t = 0; t < MAX_THREADS; t++) {
            attn_cpu_opts opts = {.num_threads = t + 1, .max_rows = 1024, .isa = isas[i]};
            attnd_err err = attn_cpu_create(&engines[i][t], &opts, NULL);
            ck_assert(err == ATTND_OK || (err == ATTND_ENOTSUP && i > 0));
        }
    }
}

static void close_engines(void) {
    for (int i = 0; i < NUM_ISAS; i++) {
        for (int t = 0; t < MAX_THREADS; t++) {
            attn_cpu_free(engines[i][t]);
            engines[i][t] = NULL;
        }
    }
}

// outputs is a copy of what a launch wrote.
typedef struct outputs {
    unsigned char *bytes;
    size_t num;
} outputs;

static outputs copy_outputs(const conf_launch *l) {
    outputs o = {0};
    for (uint32_t i = 0; i < l->spec.num_rows; i++) {
        o.num += l->out_bytes[i] + l->lse_bytes[i];
    }
    o.bytes = malloc(o.num + 1);
    size_t at = 0;
    for (uint32_t i = 0; i < l->spec.num_rows; i++) {
        const attn_row *row = &l->rows[conf_launch_row(l, i)];
        if (row->out) {
            memcpy(o.bytes + at, row->out, l->out_bytes[i]);
            at += l->out_bytes[i];
        }
        if (row->lse) {
            memcpy(o.bytes + at, row->lse, l->lse_bytes[i]);
            at += l->lse_bytes[i];
        }
    }
    o.num = at;
    return o;
}

static void run(attn_cpu *cpu, conf_launch *l, int32_t num_splits, bool deterministic) {
    conf_launch_reset(l);
    l->params.num_splits = num_splits;
    l->params.deterministic = deterministic;
    attnd_errinfo info = {0};
    attn_choice choice;
    attnd_err err = attn_cpu_run(cpu, &l->params, &choice, &info);
    ck_assert_msg(err == ATTND_OK, "%s %s: %s", attnd_errname(err), info.field, info.text);
}

static void check(const conf_oracle *o, conf_launch *l, const char *isa, const char *mode) {
    const char *wrong = conf_oracle_check(o, l);
    if (wrong) {
        conf_print(&l->spec);
        ck_abort_msg("%s, %s: %s", isa, mode, wrong);
    }
}

// check_isa runs the launch in every mode on one instruction set.
static void check_isa(const conf_oracle *o, conf_launch *l, int isa) {
    run(engines[isa][1], l, 0, false);
    check(o, l, isas[isa], "splits by the plan, 2 threads");
    run(engines[isa][1], l, 3, false);
    check(o, l, isas[isa], "3 splits, 2 threads");
    run(engines[isa][0], l, 0, true);
    check(o, l, isas[isa], "deterministic, 1 thread");
    outputs one = copy_outputs(l);
    for (int t = 1; t < MAX_THREADS; t++) {
        run(engines[isa][t], l, 0, true);
        outputs more = copy_outputs(l);
        bool is_same = memcmp(one.bytes, more.bytes, one.num) == 0;
        free(more.bytes);
        if (!is_same) {
            conf_print(&l->spec);
            ck_abort_msg("%s: other bits on %d threads", isas[isa], t + 1);
        }
    }
    free(one.bytes);
}

static void check_spec(const conf_spec *spec) {
    conf_oracle oracle;
    conf_launch_init(&launch, spec);
    conf_oracle_init(&oracle, &launch);
    for (int i = 0; i < NUM_ISAS; i++) {
        if (engines[i][0]) {
            check_isa(&oracle, &launch, i);
        }
    }
    conf_oracle_fini(&oracle);
    conf_launch_fini(&launch);
}

// base is a plain launch: one decode, one speculative step, one prefill.
static conf_spec base(types t, uint64_t seed) {
    return (conf_spec){.q_dtype = t.q,
                       .kv_dtype = t.kv,
                       .q_heads = 4,
                       .kv_heads = 2,
                       .head_dim = 64,
                       .v_head_dim = 64,
                       .block_tokens = BASE_TOKENS,
                       .features = CONF_CAUSAL,
                       .logit = 1,
                       .seed = seed,
                       .num_rows = 3,
                       .rows = {{77, 1, 1, 0, 1}, {50, 5, 5, 0, 5}, {40, 33, 20, 0, 33}}};
}

START_TEST(plain_launches_of_every_type_match_the_reference) {
    conf_spec spec = base(all_types[_i], 1);
    check_spec(&spec);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("conformance_cpu");
    TCase *types_case = tcase_create("types");
    tcase_add_checked_fixture(types_case, open_engines, close_engines);
    tcase_add_loop_test(types_case, plain_launches_of_every_type_match_the_reference, 0, NUM_TYPES);
    suite_add_tcase(s, types_case);
    return s;
}

CHECK_MAIN(suite)
