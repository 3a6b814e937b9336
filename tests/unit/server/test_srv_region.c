// Where a region has its flags and, if it ends in pairs, those, over a backend of numbers.
#include "server/srv_region.h"

#include <unistd.h>

#include "tests/check_main.h"

enum { UNIT = 4096, ADDRESS = 0x10000000, FLAGS_ADDRESS = 0x70000000 };

static uint64_t asked; // of the backend
static attnd_errinfo info;

static attnd_err region_make(srv_backend *b, uint64_t bytes, attn_device_region *out,
                             attnd_errinfo *i) {
    (void)b, (void)i;
    asked = bytes;
    *out = (attn_device_region){
        .address = ADDRESS, .bytes = (bytes + UNIT - 1) / UNIT * UNIT, .fd = -1};
    return ATTND_OK;
}

static void region_free(srv_backend *b, attn_device_region *r) {
    (void)b;
    *r = (attn_device_region){.fd = -1};
}

static attnd_err flags_map(srv_backend *b, void *base, uint64_t bytes, uint64_t *address,
                           attnd_errinfo *i) {
    (void)b, (void)base, (void)bytes, (void)i;
    *address = FLAGS_ADDRESS;
    return ATTND_OK;
}

static void flags_unmap(srv_backend *b, void *base) {
    (void)b, (void)base;
}

static const srv_backend_ops ops = {.region_make = region_make,
                                    .region_free = region_free,
                                    .flags_map = flags_map,
                                    .flags_unmap = flags_unmap};
static srv_backend backend = {.ops = &ops};

static void make(srv_region *r, uint64_t bytes, uint32_t num_flags, bool pairs) {
    int fd;
    ATTND_CK_OK(srv_region_open(r, &backend, bytes, num_flags, pairs, &fd, &info));
    close(fd);
}

// The flags have a head of 4096 bytes, and 8 bytes a pair.
START_TEST(region_without_pairs_is_all_for_tensors_and_answered_in_the_flags) {
    srv_region r;
    make(&r, 5000, 40, false);
    ck_assert_uint_eq(asked, 5000);
    ck_assert_uint_eq(r.pairs_off, 0);
    ck_assert_uint_eq(srv_region_bytes(&r), 8192);
    ck_assert_uint_eq(srv_region_signal(&r, 0, false), FLAGS_ADDRESS + 4096);
    ck_assert_uint_eq(srv_region_signal(&r, 39, true), FLAGS_ADDRESS + 4096 + 39 * 8);
    srv_region_close(&r);
}
END_TEST

// Pairs take whole 256 bytes, at the end.
START_TEST(region_with_pairs_ends_in_them_and_is_answered_there) {
    static const struct {
        uint64_t bytes;
        uint32_t num_flags;
        uint64_t pairs, all;
    } cases[] = {{5000, 40, 512, 8192},   {8192, 32, 256, 12288},     {8192, 33, 512, 12288},
                 {7936, 1, 256, 8192},    {7937, 1, 256, 12288},      {1, 1, 256, 4096},
                 {1, 4096, 32768, 36864}, {4096, 4096, 32768, 36864}, {4097, 4096, 32768, 40960}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        srv_region r;
        uint32_t last = cases[i].num_flags - 1;
        make(&r, cases[i].bytes, cases[i].num_flags, true);
        ck_assert_uint_eq(asked, cases[i].bytes + cases[i].pairs);
        ck_assert_uint_eq(r.memory.bytes, cases[i].all);
        ck_assert_uint_eq(r.pairs_off, cases[i].all - cases[i].pairs);
        ck_assert_uint_ge(r.pairs_off, cases[i].bytes);
        ck_assert_uint_eq(r.pairs_off % 256, 0);
        ck_assert_uint_eq(srv_region_bytes(&r), r.pairs_off);
        ck_assert_uint_eq(srv_region_signal(&r, 0, false), ADDRESS + r.pairs_off);
        ck_assert_uint_eq(srv_region_signal(&r, last, true), FLAGS_ADDRESS + 4096 + last * 8);
        ck_assert_uint_eq(srv_region_signal(&r, last, false), ADDRESS + r.pairs_off + last * 8);
        ck_assert_uint_le(r.pairs_off + last * 8 + 8, r.memory.bytes);
        srv_region_close(&r);
    }
}
END_TEST

// What hosts say they say in the flags.
START_TEST(region_with_pairs_has_hosts_answer_in_the_flags) {
    srv_region r;
    make(&r, 1, 4, true);
    const proto_flag *flags = (const void *)(r.flags + 4096);
    *srv_region_ready(&r, 2) = 1;
    ck_assert_uint_eq(flags[2].ready, 1);
    ck_assert(srv_region_take(&r, 2) && !srv_region_take(&r, 2));
    srv_region_answer(&r, 2);
    ck_assert_uint_eq(flags[2].done, 1);
    srv_region_reset(&r, 2);
    ck_assert_uint_eq(flags[2].done, 0);
    srv_region_close(&r);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_region");
    TCase *tc = tcase_create("region");
    tcase_add_test(tc, region_without_pairs_is_all_for_tensors_and_answered_in_the_flags);
    tcase_add_test(tc, region_with_pairs_ends_in_them_and_is_answered_there);
    tcase_add_test(tc, region_with_pairs_has_hosts_answer_in_the_flags);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
