// check is the part of the Check library that test_conformance_cpu.c uses, for builds that have no
// such library: cross builds, bare machines.  Same names, same meaning, but all tests run in one
// process, without time limits; a crash ends the run.  One thread.
#ifndef ATTND_TESTS_CONFORMANCE_BARE_CHECK_H
#define ATTND_TESTS_CONFORMANCE_BARE_CHECK_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CK_ENV, BARE_MAX_TESTS = 64, BARE_MAX_CASES = 8 };

typedef struct bare_test {
    const char *name;
    void (*run)(int i);
    int first, end; // values of _i
} bare_test;

typedef struct TCase {
    const char *name;
    void (*setup)(void);
    void (*teardown)(void);
    bare_test tests[BARE_MAX_TESTS];
    int num_tests;
} TCase;

typedef struct Suite {
    const char *name;
    TCase *cases[BARE_MAX_CASES];
    int num_cases;
} Suite;

typedef struct SRunner {
    Suite *suite;
    int num_run, num_failed;
} SRunner;

static jmp_buf bare_end; // of the test that runs

#define ck_abort_msg(...)                      \
    do {                                       \
        printf("%s:%d: ", __FILE__, __LINE__); \
        printf(__VA_ARGS__);                   \
        printf("\n");                          \
        longjmp(bare_end, 1);                  \
    } while (0)
#define ck_assert_msg(cond, ...)       \
    do {                               \
        if (!(cond)) {                 \
            ck_abort_msg(__VA_ARGS__); \
        }                              \
    } while (0)
#define ck_assert(cond)           ck_assert_msg(cond, "%s", #cond)
#define ck_assert_int_eq(a, b)    ck_assert_msg((a) == (b), "%s is not %s", #a, #b)
#define ck_assert_uint_eq(a, b)   ck_assert_msg((a) == (b), "%s is not %s", #a, #b)
#define ck_assert_double_le(a, b) ck_assert_msg((a) <= (b), "%s: %g is above %g", #a, (a), (b))
#define ck_assert_mem_eq(a, b, n) ck_assert_msg(memcmp(a, b, n) == 0, "%s is not %s", #a, #b)
#define ck_assert_str_eq(a, b) \
    ck_assert_msg(strcmp(a, b) == 0, "%s: \"%s\" is not \"%s\"", #a, a, b)

#define START_TEST(name)       \
    static void name(int _i) { \
        (void)_i;
#define END_TEST }

#define tcase_add_loop_test(c, test, lo, hi) bare_add(c, #test, test, lo, hi)
#define tcase_add_test(c, test)              bare_add(c, #test, test, 0, 1)

static inline void *bare_new(size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p) {
        abort();
    }
    return p;
}

static inline void bare_add(TCase *c, const char *name, void (*run)(int), int first, int end) {
    if (c->num_tests == BARE_MAX_TESTS) {
        abort();
    }
    c->tests[c->num_tests++] = (bare_test){name, run, first, end};
}

static inline Suite *suite_create(const char *name) {
    Suite *s = bare_new(sizeof(*s));
    s->name = name;
    return s;
}

static inline TCase *tcase_create(const char *name) {
    TCase *c = bare_new(sizeof(*c));
    c->name = name;
    return c;
}

static inline void tcase_add_checked_fixture(TCase *c, void (*setup)(void),
                                             void (*teardown)(void)) {
    c->setup = setup;
    c->teardown = teardown;
}

static inline void tcase_set_timeout(TCase *c, double seconds) {
    (void)c;
    (void)seconds;
}

static inline void suite_add_tcase(Suite *s, TCase *c) {
    if (s->num_cases == BARE_MAX_CASES) {
        abort();
    }
    s->cases[s->num_cases++] = c;
}

static inline SRunner *srunner_create(Suite *s) {
    SRunner *r = bare_new(sizeof(*r));
    r->suite = s;
    return r;
}

// bare_run runs a test with one value of _i.  What a failed one had taken stays taken.
static inline void bare_run(SRunner *r, const TCase *c, const bare_test *test, int i) {
    r->num_run++;
    if (setjmp(bare_end) == 0) {
        c->setup();
        test->run(i);
        c->teardown();
    } else {
        r->num_failed++;
        printf("FAILED: %s, %s, _i = %d\n", c->name, test->name, i);
    }
    fflush(stdout);
}

static inline void srunner_run_all(SRunner *r, int mode) {
    (void)mode;
    for (int c = 0; c < r->suite->num_cases; c++) {
        const TCase *tcase = r->suite->cases[c];
        for (int t = 0; t < tcase->num_tests; t++) {
            for (int i = tcase->tests[t].first; i < tcase->tests[t].end; i++) {
                bare_run(r, tcase, &tcase->tests[t], i);
            }
        }
    }
    printf("%s: %d tests, %d failed\n", r->suite->name, r->num_run, r->num_failed);
}

static inline int srunner_ntests_failed(const SRunner *r) {
    return r->num_failed;
}

static inline void srunner_free(SRunner *r) {
    for (int c = 0; c < r->suite->num_cases; c++) {
        free(r->suite->cases[c]);
    }
    free(r->suite);
    free(r);
}

#endif
