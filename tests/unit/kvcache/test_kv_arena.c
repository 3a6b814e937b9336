// The host arena: size, seals, which pages it says it got, and every system call failing.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvcache/kv_arena.h"
#include "tests/check_main.h"
#include "tests/unit/kvcache/kv_faults.h"

static kv_fault memfd_fault = KV_NO_FAULT, truncate_fault = KV_NO_FAULT;
static kv_fault seal_fault = KV_NO_FAULT, mmap_fault = KV_NO_FAULT;
KV_FAULT_MEMFD(&memfd_fault)
KV_FAULT_FTRUNCATE(&truncate_fault)
KV_FAULT_FCNTL(&seal_fault)
KV_FAULT_MMAP(&mmap_fault)

enum { HUGE = 2 << 20 };

START_TEST(kv_arena_is_rounded_up_and_all_zero) {
    kv_arena arena;
    attnd_errinfo info;
    ATTND_CK_OK(kv_arena_open_host(&arena, HUGE + 1, &info));
    ck_assert_uint_eq(arena.bytes, 2 * HUGE);
    ck_assert(!arena.on_device);
    struct stat st;
    ck_assert_int_eq(fstat(arena.fd, &st), 0);
    ck_assert_int_eq(st.st_size, 2 * HUGE);
    char *bytes = arena.base;
    for (size_t i = 0; i < arena.bytes; i += 4096) {
        ck_assert_int_eq(bytes[i], 0);
    }
    bytes[arena.bytes - 1] = 7;
    char last;
    ck_assert_int_eq(pread(arena.fd, &last, 1, 2 * HUGE - 1), 1);
    ck_assert_int_eq(last, 7);
    kv_arena_close_host(&arena);
    ck_assert_int_eq(arena.fd, -1);
    ck_assert_ptr_null(arena.base);
}
END_TEST

START_TEST(kv_arena_can_neither_shrink_nor_grow) {
    kv_arena arena;
    ATTND_CK_OK(kv_arena_open_host(&arena, HUGE, NULL));
    ck_assert_int_eq(ftruncate(arena.fd, HUGE / 2), -1);
    ck_assert_int_eq(ftruncate(arena.fd, 2 * HUGE), -1);
    ck_assert_int_eq(fcntl(arena.fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    kv_arena_close_host(&arena);
}
END_TEST

START_TEST(kv_arena_of_no_or_absurd_size_is_refused) {
    kv_arena arena = {.bytes = 77};
    attnd_errinfo info;
    ATTND_CK_ERR(kv_arena_open_host(&arena, 0, &info), ATTND_EINVAL);
    ATTND_CK_ERR(kv_arena_open_host(&arena, UINT64_MAX, &info), ATTND_EINVAL);
    ck_assert_str_eq(info.field, "bytes");
    ATTND_CK_ERR(kv_arena_open_host(&arena, UINT64_C(1) << 62, &info), ATTND_ENOMEM);
    ck_assert_uint_eq(arena.bytes, 77); // untouched on failure
}
END_TEST

START_TEST(kv_arena_takes_small_pages_when_huge_ones_cannot_be_mapped) {
    kv_arena arena;
    mmap_fault = (kv_fault){.after = 0, .err = ENOMEM};
    ATTND_CK_OK(kv_arena_open_host(&arena, HUGE, NULL));
    ck_assert_int_ne(arena.pages, KV_PAGES_HUGE);
    kv_arena_close_host(&arena);
}
END_TEST

// fail_both makes a call fail in the attempt with huge pages and in the one with small pages.
static void fail_both(kv_fault *fault, const char *name) {
    kv_arena arena;
    attnd_errinfo info;
    int before = dup(0);
    close(before);
    *fault = (kv_fault){.after = 0, .err = EMFILE, .times = 2};
    ATTND_CK_ERR(kv_arena_open_host(&arena, HUGE, &info), ATTND_ENOMEM);
    ck_assert_ptr_nonnull(strstr(info.text, name));
    ck_assert_ptr_nonnull(strstr(info.text, strerror(EMFILE)));
    int after = dup(0);
    close(after);
    ck_assert_int_eq(after, before); // no descriptor was left open
}

START_TEST(kv_arena_failing_system_call_is_named) {
    fail_both(&memfd_fault, "memfd_create");
    fail_both(&truncate_fault, "ftruncate");
    fail_both(&seal_fault, "F_ADD_SEALS");
    fail_both(&mmap_fault, "mmap");
}
END_TEST

START_TEST(kv_arena_without_reserved_huge_pages_says_so) {
    unsigned reserved = 1;
    FILE *file = fopen("/proc/sys/vm/nr_hugepages", "re");
    if (file) {
        ck_assert_int_eq(fscanf(file, "%u", &reserved), 1);
        fclose(file);
    }
    kv_arena arena;
    ATTND_CK_OK(kv_arena_open_host(&arena, HUGE, NULL));
    if (reserved == 0) {
        ck_assert_int_ne(arena.pages, KV_PAGES_HUGE);
    }
    kv_arena_close_host(&arena);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_arena");
    TCase *t = tcase_create("host");
    tcase_add_test(t, kv_arena_is_rounded_up_and_all_zero);
    tcase_add_test(t, kv_arena_can_neither_shrink_nor_grow);
    tcase_add_test(t, kv_arena_of_no_or_absurd_size_is_refused);
    tcase_add_test(t, kv_arena_takes_small_pages_when_huge_ones_cannot_be_mapped);
    tcase_add_test(t, kv_arena_failing_system_call_is_named);
    tcase_add_test(t, kv_arena_without_reserved_huge_pages_says_so);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
