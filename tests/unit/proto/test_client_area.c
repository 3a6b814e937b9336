// Places of a data area: they never overlap, are aligned, and all come back.
#include "proto/client/client_area.h"

#include <stdlib.h>

#include "proto/proto_ring.h"
#include "tests/check_main.h"

static client_area area;

START_TEST(area_takes_the_lowest_place_that_fits) {
    client_area_init(&area, 1024);
    client_place *a = client_area_take(&area, 100), *b = client_area_take(&area, 64);
    ck_assert_uint_eq(a->off, 0);
    ck_assert_uint_eq(a->bytes, 128);
    ck_assert_uint_eq(b->off, 128);
    client_area_give(&area, a);
    client_place *c = client_area_take(&area, 200); // does not fit in front of b
    ck_assert_uint_eq(c->off, 192);
    ck_assert_uint_eq(client_area_take(&area, 128)->off, 0);
}
END_TEST

START_TEST(area_that_is_full_gives_nothing) {
    client_area_init(&area, 1024);
    ck_assert_ptr_null(client_area_take(&area, 1025));
    ck_assert_ptr_null(client_area_take(&area, UINT64_MAX));
    client_place *a = client_area_take(&area, 1024);
    ck_assert_ptr_null(client_area_take(&area, 1));
    client_area_give(&area, a);
    ck_assert_ptr_nonnull(client_area_take(&area, 1));
}
END_TEST

START_TEST(area_has_a_bound_of_places) {
    client_area_init(&area, 1 << 20);
    for (int i = 0; i < CLIENT_AREA_PLACES; i++) {
        ck_assert_ptr_nonnull(client_area_take(&area, 64));
    }
    ck_assert_ptr_null(client_area_take(&area, 64));
}
END_TEST

START_TEST(area_place_that_is_held_comes_back_with_the_last) {
    client_area_init(&area, 64);
    client_place *a = client_area_take(&area, 64);
    client_area_hold(a);
    client_area_give(&area, a);
    ck_assert_ptr_null(client_area_take(&area, 64));
    client_area_give(&area, a);
    ck_assert_ptr_nonnull(client_area_take(&area, 64));
}
END_TEST

// A model with a byte for each 64 of the area.
START_TEST(area_places_never_overlap) {
    enum { LINES = 300 };
    static unsigned char used[LINES];
    client_place *held[40] = {NULL};
    client_area_init(&area, LINES * 64);
    srand(1);
    for (int round = 0; round < 20000; round++) {
        int i = rand() % 40;
        if (held[i]) {
            for (uint64_t k = 0; k < held[i]->bytes / 64; k++) {
                used[held[i]->off / 64 + k] = 0;
            }
            client_area_give(&area, held[i]);
            held[i] = NULL;
            continue;
        }
        uint64_t want = 1 + (uint64_t)rand() % 2000, run = 0, best = 0;
        held[i] = client_area_take(&area, want);
        for (int k = 0; k < LINES; k++) {
            run = used[k] ? 0 : run + 1;
            best = run > best ? run : best;
        }
        ck_assert_int_eq(held[i] != NULL, best * 64 >= want);
        for (uint64_t k = 0; held[i] && k < held[i]->bytes / 64; k++) {
            ck_assert_uint_eq(used[held[i]->off / 64 + k]++, 0);
        }
    }
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_area");
    TCase *tc = tcase_create("area");
    tcase_add_test(tc, area_takes_the_lowest_place_that_fits);
    tcase_add_test(tc, area_that_is_full_gives_nothing);
    tcase_add_test(tc, area_has_a_bound_of_places);
    tcase_add_test(tc, area_place_that_is_held_comes_back_with_the_last);
    tcase_add_test(tc, area_places_never_overlap);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
