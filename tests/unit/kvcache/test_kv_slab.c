// Size classes and slabs: sharing a class, cutting, moving to another class when empty.
#include "kvcache/kv_slab.h"

#include "kvcache/kv_pool.h"
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;

static void setup(void) {
    fix_init(&f);
}

static void teardown(void) {
    fix_fini(&f);
}

static kv_class_info class_of(uint64_t block_bytes) {
    kv_class_info info;
    for (uint32_t i = 0; kv_class_get(f.kv, i, &info) == ATTND_OK; i++) {
        if (info.block_bytes == block_bytes) {
            return info;
        }
    }
    ck_abort_msg("no class of %llu bytes", (unsigned long long)block_bytes);
    return info;
}

START_TEST(kv_slab_classes_are_shared_by_block_size) {
    uint32_t a = kv_class_hold(f.kv, 3), b = kv_class_hold(f.kv, 3), c = kv_class_hold(f.kv, 4);
    ck_assert_uint_eq(a, b);
    ck_assert_uint_ne(a, c);
    kv_info info;
    kv_get_info(f.kv, &info);
    ck_assert_uint_eq(info.num_classes, 3); // with the model's own
    kv_class_rele(f.kv, a);
    kv_class_rele(f.kv, c);
    kv_get_info(f.kv, &info);
    ck_assert_uint_eq(info.num_classes, 2);
    kv_class_rele(f.kv, b);
    ck_assert_uint_eq(kv_class_hold(f.kv, 9), a); // the index is free again
    kv_class_rele(f.kv, a);
}
END_TEST

START_TEST(kv_slab_holds_as_many_blocks_as_fit) {
    const struct {
        uint32_t units, blocks;
    } cases[] = {{1, 16}, {2, 8}, {3, 5}, {5, 3}, {8, 2}, {9, 1}, {16, 1}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        uint32_t class_idx = kv_class_hold(f.kv, cases[i].units);
        ck_assert(kv_slab_assign(f.kv, class_idx));
        kv_class_info info = class_of((uint64_t)cases[i].units * KV_BLOCK_UNIT);
        ck_assert_uint_eq(info.total, cases[i].blocks);
        ck_assert_uint_eq(info.free, cases[i].blocks);
        ck_assert_uint_eq(info.slabs, 1);
        uint32_t entry = kv_pool_take(f.kv, class_idx, KV_NONE);
        kv_pool_rele(f.kv, entry); // the empty slab goes
        kv_class_rele(f.kv, class_idx);
    }
}
END_TEST

START_TEST(kv_slab_holds_at_most_its_share_of_max_blocks) {
    kv_fixture small;
    kv_opts opts = fix_opts();
    opts.max_blocks = 3 * FIX_SLABS + 1; // 3 a slab
    fix_open(&small, &opts, (uint64_t)FIX_BLOCKS * KV_BLOCK_UNIT);
    uint32_t class_idx = kv_class_hold(small.kv, 1), n = 0;
    while (kv_pool_take(small.kv, class_idx, KV_NONE) != KV_NONE) {
        n++;
    }
    ck_assert_uint_eq(n, 3 * FIX_SLABS);
    kv_free(small.kv);
    free(small.memory);
}
END_TEST

START_TEST(kv_slab_changes_class_when_its_last_block_is_free) {
    uint32_t one = kv_class_hold(f.kv, 1), two = kv_class_hold(f.kv, 2);
    uint32_t entries[FIX_BLOCKS];
    for (uint32_t i = 0; i < FIX_BLOCKS; i++) {
        entries[i] = kv_pool_take(f.kv, one, KV_NONE);
    }
    ck_assert(!kv_slab_assign(f.kv, two));
    ck_assert_uint_eq(kv_pool_take(f.kv, two, KV_NONE), KV_NONE);
    // all blocks but one of the slab of entries[0]
    uint32_t slab = entries[0] / FIX_SLAB_BLOCKS, last = KV_NONE;
    for (uint32_t i = 0; i < FIX_BLOCKS; i++) {
        if (entries[i] / FIX_SLAB_BLOCKS == slab) {
            if (last != KV_NONE) {
                kv_pool_rele(f.kv, entries[last]);
            }
            last = i;
        }
    }
    ck_assert_uint_eq(kv_pool_take(f.kv, two, KV_NONE), KV_NONE);
    kv_pool_rele(f.kv, entries[last]);
    ck_assert_uint_eq(f.kv->slabs[slab].units, 0);
    uint32_t taken = kv_pool_take(f.kv, two, KV_NONE);
    ck_assert_uint_eq(taken / FIX_SLAB_BLOCKS, slab);
    ck_assert_uint_eq(f.kv->slabs[slab].units, 2);
    ck_assert_uint_eq(class_of(512).total, 8);
    ck_assert_uint_eq(class_of(256).total, FIX_BLOCKS - 16);
    kv_pool_rele(f.kv, taken);
    for (uint32_t i = 0; i < FIX_BLOCKS; i++) {
        if (entries[i] / FIX_SLAB_BLOCKS != slab) {
            kv_pool_rele(f.kv, entries[i]);
        }
    }
    kv_info info;
    kv_get_info(f.kv, &info);
    ck_assert_uint_eq(info.unassigned_slabs, FIX_SLABS);
    ck_assert_uint_eq(info.total, 0);
    kv_class_rele(f.kv, one);
    kv_class_rele(f.kv, two);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_slab");
    TCase *t = tcase_create("slab");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_slab_classes_are_shared_by_block_size);
    tcase_add_test(t, kv_slab_holds_as_many_blocks_as_fit);
    tcase_add_test(t, kv_slab_holds_at_most_its_share_of_max_blocks);
    tcase_add_test(t, kv_slab_changes_class_when_its_last_block_is_free);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
