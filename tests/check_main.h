// check_main turns one Suite into a test program.  A test file defines `Suite *suite(void)` and
// ends with CHECK_MAIN.
#ifndef ATTND_TESTS_CHECK_MAIN_H
#define ATTND_TESTS_CHECK_MAIN_H

#include <check.h>
#include <stdlib.h>

#include "proto/err.h"

// ATTND_CK_OK and ATTND_CK_ERR compare an attnd_err by name, so that a failure reads well.
#define ATTND_CK_ERR(expr, code) ck_assert_str_eq(attnd_errname(expr), attnd_errname(code))
#define ATTND_CK_OK(expr)        ATTND_CK_ERR(expr, ATTND_OK)

#define CHECK_MAIN(make_suite)                          \
    int main(void) {                                    \
        SRunner *runner = srunner_create(make_suite()); \
        srunner_run_all(runner, CK_ENV);                \
        int failed = srunner_ntests_failed(runner);     \
        srunner_free(runner);                           \
        return failed ? EXIT_FAILURE : EXIT_SUCCESS;    \
    }

#endif
