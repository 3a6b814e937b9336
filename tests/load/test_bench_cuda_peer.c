#include <string.h>

#include "tests/check_main.h"
#include "tests/load/bench_cuda_peer.h"

static bench_cuda_peer *peer;
static bench_case c;
static bench_pace pace;
static double us;
static attnd_errinfo info;

static void setup(void) {
    peer = NULL;
    ATTND_CK_OK(bench_case_parse(&c, "prefill bf16 32/8 batch 32 q_len 512", &info));
}

static void teardown(void) {
    bench_cuda_peer_close(peer);
}

START_TEST(a_peer_names_itself_and_times) {
    ATTND_CK_OK(bench_cuda_peer_open(&peer,
                                     "while read what name; do case $what in make) echo \"by "
                                     "$name\";; time) echo 12.5 1700 650.5;; esac; done",
                                     &info));
    ck_assert_str_eq(bench_cuda_peer_name(peer, &c), "by prefill bf16 32/8 batch 32 q_len 512");
    bench_cuda_peer_drop(peer); // has no answer
    ATTND_CK_OK(bench_cuda_peer_time(peer, &c, &us, &pace, &info));
    ck_assert(us == 12.5 && pace.mhz == 1700 && pace.watts == 650.5);
}
END_TEST

START_TEST(a_peer_may_take_no_such_case) {
    ATTND_CK_OK(bench_cuda_peer_open(&peer, "while read line; do echo -; done", &info));
    ck_assert_ptr_null(bench_cuda_peer_name(peer, &c));
}
END_TEST

START_TEST(a_peer_that_ends_or_errs_is_an_error) {
    ATTND_CK_OK(bench_cuda_peer_open(&peer, "read line; echo X; read line; echo no time", &info));
    ck_assert_str_eq(bench_cuda_peer_name(peer, &c), "X");
    ATTND_CK_ERR(bench_cuda_peer_time(peer, &c, &us, &pace, &info), ATTND_ECONN);
    ck_assert_ptr_nonnull(strstr(info.text, "no time"));
    ATTND_CK_ERR(bench_cuda_peer_time(peer, &c, &us, &pace, &info), ATTND_ECONN);
    ck_assert_ptr_null(bench_cuda_peer_name(peer, &c));
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("bench_cuda_peer");
    TCase *tc = tcase_create("core");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, a_peer_names_itself_and_times);
    tcase_add_test(tc, a_peer_may_take_no_such_case);
    tcase_add_test(tc, a_peer_that_ends_or_errs_is_an_error);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
