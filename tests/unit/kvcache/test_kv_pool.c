// Blocks: taking, neighbours, references, and what fits.
#include "kvcache/kv_pool.h"

#include <signal.h>

#include "kvcache/kv_slab.h"
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;
static uint32_t one; // class of blocks of one unit

static void setup(void) {
    fix_init(&f);
    one = kv_class_hold(f.kv, 1);
}

static void teardown(void) {
    kv_class_rele(f.kv, one);
    fix_fini(&f);
}

START_TEST(kv_pool_take_fails_when_empty) {
    bool seen[FIX_BLOCKS] = {false};
    for (uint32_t i = 0; i < FIX_BLOCKS; i++) {
        uint32_t entry = kv_pool_take(f.kv, one, KV_NONE);
        ck_assert_uint_lt(entry, FIX_BLOCKS);
        ck_assert(!seen[entry]);
        seen[entry] = true;
        ck_assert_uint_eq(kv_pool_refs(f.kv, entry), 1);
    }
    ck_assert_uint_eq(kv_pool_take(f.kv, one, KV_NONE), KV_NONE);
    ck_assert_uint_eq(kv_pool_take(f.kv, one, 5), KV_NONE);
    ck_assert(kv_pool_rele(f.kv, 77));
    ck_assert_uint_eq(kv_pool_take(f.kv, one, 5), 77);
    for (uint32_t i = 0; i < FIX_BLOCKS; i++) {
        ck_assert(kv_pool_rele(f.kv, i));
    }
}
END_TEST

START_TEST(kv_pool_entries_are_block_addresses) {
    // slabs of 16 units hold 5 blocks of 3: entries 0, 3, 6, 9, 12, then the next slab
    uint32_t three = kv_class_hold(f.kv, 3);
    bool seen[FIX_BLOCKS] = {false};
    for (int i = 0; i < 10; i++) {
        uint32_t entry = kv_pool_take(f.kv, three, KV_NONE);
        ck_assert_uint_eq(entry % 16 % 3, 0);
        ck_assert_uint_le(entry % 16, 12);
        ck_assert(!seen[entry]);
        seen[entry] = true;
    }
    for (uint32_t i = 0; i < FIX_BLOCKS; i++) {
        if (seen[i]) {
            kv_pool_rele(f.kv, i);
        }
    }
    kv_class_rele(f.kv, three);
}
END_TEST

START_TEST(kv_pool_takes_the_free_neighbour) {
    uint32_t entries[8];
    for (int i = 0; i < 8; i++) {
        entries[i] = kv_pool_take(f.kv, one, KV_NONE);
    }
    kv_pool_rele(f.kv, entries[2]);
    kv_pool_rele(f.kv, entries[5]);
    ck_assert_uint_eq(kv_pool_take(f.kv, one, entries[4]), entries[5]); // not the lowest
    ck_assert_uint_eq(kv_pool_take(f.kv, one, entries[7]), entries[7] + 1);
    ck_assert_uint_eq(kv_pool_take(f.kv, one, KV_NONE), entries[2]);
    kv_pool_rele(f.kv, entries[7] + 1);
    for (int i = 0; i < 8; i++) {
        kv_pool_rele(f.kv, entries[i]);
    }
}
END_TEST

START_TEST(kv_pool_neighbour_ends_with_the_slab) {
    uint32_t entries[FIX_SLAB_BLOCKS];
    for (int i = 0; i < FIX_SLAB_BLOCKS; i++) {
        entries[i] = kv_pool_take(f.kv, one, i > 0 ? entries[i - 1] : KV_NONE);
        ck_assert_uint_eq(entries[i], entries[0] + (uint32_t)i);
    }
    uint32_t next = kv_pool_take(f.kv, one, entries[FIX_SLAB_BLOCKS - 1]);
    ck_assert_uint_ne(next, KV_NONE);
    kv_pool_rele(f.kv, next);
    for (int i = 0; i < FIX_SLAB_BLOCKS; i++) {
        kv_pool_rele(f.kv, entries[i]);
    }
}
END_TEST

START_TEST(kv_pool_last_reference_frees) {
    uint32_t entry = kv_pool_take(f.kv, one, KV_NONE);
    kv_pool_hold(f.kv, entry);
    kv_pool_hold(f.kv, entry);
    ck_assert_uint_eq(kv_pool_refs(f.kv, entry), 3);
    ck_assert(!kv_pool_rele(f.kv, entry));
    ck_assert(!kv_pool_rele(f.kv, entry));
    ck_assert_uint_eq(kv_pool_refs(f.kv, entry), 1);
    kv_pool_hold(f.kv, entry);
    ck_assert_uint_eq(kv_pool_refs(f.kv, entry), 2);
    ck_assert(!kv_pool_rele(f.kv, entry));
    ck_assert_uint_eq(fix_in_use(&f), 1);
    ck_assert(kv_pool_rele(f.kv, entry));
    ck_assert_uint_eq(fix_in_use(&f), 0);
}
END_TEST

START_TEST(kv_pool_giving_a_free_block_back_is_a_bug) {
    uint32_t a = kv_pool_take(f.kv, one, KV_NONE), b = kv_pool_take(f.kv, one, KV_NONE);
    kv_pool_rele(f.kv, a);
    ck_assert_uint_ne(a, b);
    kv_pool_rele(f.kv, a); // aborts
}
END_TEST

START_TEST(kv_pool_needs_of_several_classes_compete_for_slabs) {
    uint32_t two = kv_class_hold(f.kv, 2), five = kv_class_hold(f.kv, 5); // 8 and 3 a slab
    kv_need needs[] = {{.class_idx = one, .take = 17},
                       {.class_idx = two, .take = 25},
                       {.class_idx = five, .take = 6}};
    ck_assert(kv_pool_fits(f.kv, needs, 3)); // 2 + 4 + 2 slabs of 8
    needs[2].take = 7;
    ck_assert(!kv_pool_fits(f.kv, needs, 3));
    uint32_t entry = kv_pool_take(f.kv, one, KV_NONE); // 15 free, 7 slabs
    needs[0].take = 15;
    ck_assert(kv_pool_fits(f.kv, needs, 3)); // 0 + 4 + 3
    needs[0].take = 16;
    ck_assert(!kv_pool_fits(f.kv, needs, 3));
    ck_assert(kv_pool_could_fit(f.kv, needs, 3)); // without the block of others
    needs[0].held = 1;
    ck_assert(!kv_pool_could_fit(f.kv, needs, 3)); // with an own one: 2 + 4 + 3
    needs[0] = (kv_need){.class_idx = one, .take = 1, .held = 2, .slabs = 2};
    ck_assert(!kv_pool_could_fit(f.kv, needs, 3)); // 2 + 4 + 3 slabs, 3 blocks in two of them
    needs[0].slabs = 1;
    ck_assert(kv_pool_could_fit(f.kv, needs, 3));
    needs[1].take = UINT64_C(1) << 40;
    ck_assert(!kv_pool_fits(f.kv, needs, 3));
    kv_pool_rele(f.kv, entry);
    kv_class_rele(f.kv, two);
    kv_class_rele(f.kv, five);
}
END_TEST

START_TEST(kv_pool_marks_count_distinct_blocks_and_slabs) {
    uint32_t entries[20];
    bool new_block, new_slab;
    for (int i = 0; i < 20; i++) {
        entries[i] = kv_pool_take(f.kv, one, KV_NONE);
        kv_pool_hold(f.kv, entries[i]);
    }
    uint32_t blocks = 0, slabs = 0;
    for (int i = 0; i < 40; i++) {
        kv_pool_mark(f.kv, entries[i % 20], &new_block, &new_slab);
        blocks += new_block;
        slabs += new_slab;
    }
    ck_assert_uint_eq(blocks, 20);
    ck_assert_uint_eq(slabs, 2);
    for (int i = 0; i < 20; i++) {
        kv_pool_unmark(f.kv, entries[i]);
        ck_assert_uint_eq(kv_pool_refs(f.kv, entries[i]), 2);
        kv_pool_rele(f.kv, entries[i]);
        kv_pool_rele(f.kv, entries[i]);
    }
}
END_TEST

// A random run of all operations against arrays of references.
START_TEST(kv_pool_agrees_with_plain_counts) {
    const uint32_t units[3] = {1, 3, 7};
    uint32_t classes[3], refs[FIX_BLOCKS] = {0}, in_use = 0;
    uint32_t seed = 12345;
    for (int i = 0; i < 3; i++) {
        classes[i] = kv_class_hold(f.kv, units[i]);
    }
    for (int i = 0; i < 20000; i++) {
        seed = seed * 1664525 + 1013904223;
        uint32_t entry = seed >> 8 & (FIX_BLOCKS - 1), what = seed >> 16 & 7;
        if (refs[entry] == 0) {
            uint32_t c = what % 3;
            uint32_t taken = kv_pool_take(f.kv, classes[c], KV_NONE);
            if (taken != KV_NONE) {
                ck_assert_uint_eq(refs[taken], 0);
                for (uint32_t u = 1; u < units[c]; u++) { // nothing lies inside it
                    ck_assert_uint_eq(refs[taken + u], 0);
                }
                refs[taken] = 1;
                in_use++;
            }
        } else if (what < 2) {
            kv_pool_hold(f.kv, entry);
            refs[entry]++;
        } else {
            bool was_last = --refs[entry] == 0;
            ck_assert(kv_pool_rele(f.kv, entry) == was_last);
            in_use -= was_last;
        }
        ck_assert(refs[entry] == 0 || kv_pool_refs(f.kv, entry) == refs[entry]);
        ck_assert_uint_eq(fix_in_use(&f), in_use);
    }
    for (uint32_t e = 0; e < FIX_BLOCKS; e++) {
        for (; refs[e] > 0; refs[e]--) {
            kv_pool_rele(f.kv, e);
        }
    }
    for (int i = 0; i < 3; i++) {
        kv_class_rele(f.kv, classes[i]);
    }
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_pool");
    TCase *t = tcase_create("blocks");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_pool_take_fails_when_empty);
    tcase_add_test(t, kv_pool_entries_are_block_addresses);
    tcase_add_test(t, kv_pool_takes_the_free_neighbour);
    tcase_add_test(t, kv_pool_neighbour_ends_with_the_slab);
    tcase_add_test(t, kv_pool_last_reference_frees);
    tcase_add_test_raise_signal(t, kv_pool_giving_a_free_block_back_is_a_bug, SIGABRT);
    tcase_add_test(t, kv_pool_needs_of_several_classes_compete_for_slabs);
    tcase_add_test(t, kv_pool_marks_count_distinct_blocks_and_slabs);
    tcase_add_test(t, kv_pool_agrees_with_plain_counts);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
