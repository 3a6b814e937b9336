// Slots of a tier: no two overlap, all of a tier can be used, sizes change, and what is claimed is
// as what was taken.
#include <stdlib.h>
#include <string.h>

#include "kvcache/kv_tier_slots.h"
#include "tests/check_main.h"

enum { SLABS = 4, SLAB_UNITS = 100, SLAB = SLAB_UNITS * KV_TIER_UNIT, UNITS = SLABS * SLAB_UNITS };

static kv_tier_slots *make(void) {
    kv_tier_slots *s;
    attnd_errinfo info;
    ATTND_CK_OK(kv_tier_slots_create(&s, SLABS * (uint64_t)SLAB + 5, SLAB, &info));
    return s;
}

static uint64_t taken(const kv_tier_slots *s) {
    uint64_t total;
    uint64_t bytes = kv_tier_slots_bytes(s, &total);
    ck_assert_uint_eq(total, SLABS * (uint64_t)SLAB);
    return bytes;
}

START_TEST(kv_tier_slots_fill_every_slab) {
    kv_tier_slots *s = make();
    uint64_t slot;
    for (uint32_t i = 0; i < UNITS; i++) {
        ck_assert(kv_tier_slots_take(s, 1, &slot));
    }
    ck_assert(!kv_tier_slots_take(s, 1, &slot));
    ck_assert_uint_eq(taken(s), SLABS * (uint64_t)SLAB);
    for (uint32_t i = 0; i < UNITS; i++) {
        kv_tier_slots_give(s, (uint64_t)i * KV_TIER_UNIT);
    }
    ck_assert_uint_eq(taken(s), 0);
    for (uint32_t i = 0; i < SLABS; i++) { // empty slabs take another size
        ck_assert(kv_tier_slots_take(s, SLAB, &slot));
        ck_assert_uint_eq(slot % SLAB, 0);
    }
    ck_assert(!kv_tier_slots_take(s, 1, &slot));
    kv_tier_slots_free(s);
}
END_TEST

START_TEST(kv_tier_slots_refuse_what_no_slab_holds) {
    kv_tier_slots *s = make(), *none = NULL;
    attnd_errinfo info;
    uint64_t slot = 77;
    ck_assert(!kv_tier_slots_take(s, SLAB + 1, &slot));
    ck_assert(!kv_tier_slots_take(s, 0, &slot));
    ck_assert_uint_eq(slot, 77);
    ATTND_CK_ERR(kv_tier_slots_create(&none, SLAB - 1, SLAB, &info), ATTND_EINVAL);
    ATTND_CK_ERR(kv_tier_slots_create(&none, SLAB, KV_TIER_UNIT + 256, &info), ATTND_EINVAL);
    ATTND_CK_ERR(kv_tier_slots_create(&none, SLAB, 0, &info), ATTND_EINVAL);
    ATTND_CK_ERR(kv_tier_slots_create(&none, UINT64_C(17) << 40, UINT64_C(1) << 40, &info),
                 ATTND_EINVAL);
    kv_tier_slots_free(s);
    kv_tier_slots_free(NULL);
}
END_TEST

START_TEST(kv_tier_slots_are_claimed_once_and_whole) {
    kv_tier_slots *s = make();
    const uint64_t two = 2 * KV_TIER_UNIT;
    ck_assert(kv_tier_slots_claim(s, SLAB + two, two - 1));
    ck_assert(!kv_tier_slots_claim(s, SLAB + two, two));                  // taken
    ck_assert(!kv_tier_slots_claim(s, SLAB + 3 * KV_TIER_UNIT, two));     // between slots
    ck_assert(!kv_tier_slots_claim(s, SLAB + two * 5, 3 * KV_TIER_UNIT)); // of another size
    ck_assert(!kv_tier_slots_claim(s, SLABS * (uint64_t)SLAB, two));      // outside
    ck_assert(!kv_tier_slots_claim(s, UINT64_MAX - 4095, two));
    ck_assert(!kv_tier_slots_claim(s, 99 * KV_TIER_UNIT, two)); // over the edge of a slab
    ck_assert(!kv_tier_slots_claim(s, 0, SLAB + 1));
    ck_assert(!kv_tier_slots_claim(s, 0, 0));
    ck_assert(kv_tier_slots_claim(s, SLAB, two));
    ck_assert_uint_eq(taken(s), 2 * two);
    for (uint32_t i = 0; i < 48; i++) { // the rest of the claimed slab comes first
        uint64_t slot;
        ck_assert(kv_tier_slots_take(s, two, &slot));
        ck_assert_uint_eq(slot / SLAB, 1);
    }
    kv_tier_slots_free(s);
}
END_TEST

// Against an array of units, each of which belongs to a slot or to none.
START_TEST(kv_tier_slots_never_overlap) {
    kv_tier_slots *s = make();
    static uint32_t owner[UNITS]; // id of the slot that the unit belongs to
    struct {
        uint64_t slot;
        uint32_t units;
    } held[UNITS];
    uint32_t num = 0, units = 0;
    const uint32_t sizes[] = {1, 2, 3, 7, 50, 100};
    memset(owner, 0, sizeof(owner));
    srand(1);
    for (uint32_t round = 1; round < 20000; round++) {
        uint32_t want = sizes[rand() % 6];
        if (rand() % 2 && kv_tier_slots_take(s, (uint64_t)want * KV_TIER_UNIT, &held[num].slot)) {
            held[num].units = want;
            uint64_t first = held[num].slot / KV_TIER_UNIT;
            ck_assert_uint_eq(first / SLAB_UNITS, (first + want - 1) / SLAB_UNITS);
            for (uint32_t u = 0; u < want; u++) {
                ck_assert_uint_eq(owner[first + u], 0);
                owner[first + u] = round;
            }
            num++;
            units += want;
        } else if (num > 0) {
            uint32_t i = (uint32_t)rand() % num;
            kv_tier_slots_give(s, held[i].slot);
            memset(&owner[held[i].slot / KV_TIER_UNIT], 0, held[i].units * sizeof(*owner));
            units -= held[i].units;
            held[i] = held[--num];
        }
        ck_assert_uint_eq(taken(s), (uint64_t)units * KV_TIER_UNIT);
    }
    kv_tier_slots *again = make(); // as after a restart
    for (uint32_t i = 0; i < num; i++) {
        ck_assert(kv_tier_slots_claim(again, held[i].slot, (uint64_t)held[i].units * KV_TIER_UNIT));
    }
    ck_assert_uint_eq(taken(again), (uint64_t)units * KV_TIER_UNIT);
    kv_tier_slots_free(again);
    kv_tier_slots_free(s);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_tier_slots");
    TCase *t = tcase_create("slots");
    tcase_add_test(t, kv_tier_slots_fill_every_slab);
    tcase_add_test(t, kv_tier_slots_refuse_what_no_slab_holds);
    tcase_add_test(t, kv_tier_slots_are_claimed_once_and_whole);
    tcase_add_test(t, kv_tier_slots_never_overlap);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
