// The redo record: what it holds, that it is whole before it is published, and that whoever applies
// it again gets the same words.  The reader below knows the format from kv_redo.h alone.
#include "kvcache/kv_redo.h"
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fixture f;

static void setup(void) {
    fix_init(&f);
}

static void teardown(void) {
    fix_fini(&f);
}

static kv_word *record(uint32_t number) {
    return f.kv->redo + (number % 2) * kv_redo_record_words(f.kv->redo_cap);
}

// replay applies the published record again.
static void replay(void) {
    const kv_word *r = record(f.kv->head->published);
    ck_assert_uint_eq(r[0], f.kv->head->published);
    ck_assert_uint_eq((uint64_t)r[3] << 32 | r[2], kv_redo_checksum(r));
    for (uint32_t i = 0; i < r[1]; i++) {
        f.kv->base[r[4 + 2 * i]] = r[5 + 2 * i];
    }
}

START_TEST(kv_redo_applied_again_gives_the_same_words) {
    kv_word *values = f.kv->values;
    kv_redo_begin(f.kv);
    kv_redo_put(f.kv, &values[3], 30);
    kv_redo_put(f.kv, &values[5], 50);
    kv_redo_put64(f.kv, (uint64_t *)(void *)&values[6], UINT64_C(0x1122334455667788));
    kv_redo_put_bytes(f.kv, &values[8], "abcdefgh", 8);
    ck_assert_uint_eq(values[3], 0); // nothing is written before the commit
    kv_redo_commit(f.kv);
    ck_assert_uint_eq(values[3], 30);
    kv_word want[16];
    memcpy(want, values, sizeof(want));
    ck_assert_uint_eq(want[6], 0x55667788);
    ck_assert_uint_eq(want[7], 0x11223344);
    ck_assert_int_eq(memcmp(&want[8], "abcdefgh", 8), 0);
    for (int i = 0; i < 2; i++) {
        values[3] = values[5] = values[6] = values[7] = values[8] = values[9] = 0xdead;
        replay();
        ck_assert_int_eq(memcmp(want, values, sizeof(want)), 0);
    }
}
END_TEST

START_TEST(kv_redo_next_record_leaves_the_published_one_whole) {
    kv_word *values = f.kv->values;
    kv_redo_begin(f.kv);
    kv_redo_put(f.kv, &values[0], 1);
    kv_redo_commit(f.kv);
    uint32_t number = f.kv->head->published;
    kv_redo_begin(f.kv);
    kv_redo_put(f.kv, &values[0], 2);
    kv_redo_put(f.kv, &values[1], 3);
    ck_assert_uint_eq(f.kv->head->published, number);
    replay(); // killed here, the first record is what counts
    ck_assert_uint_eq(values[0], 1);
    kv_redo_commit(f.kv);
    ck_assert_uint_eq(f.kv->head->published, number + 1);
    ck_assert_uint_eq(values[0], 2);
}
END_TEST

START_TEST(kv_redo_checksum_sees_every_bit) {
    kv_redo_begin(f.kv);
    kv_redo_put(f.kv, &f.kv->values[0], 77);
    kv_redo_put(f.kv, &f.kv->values[1], 78);
    kv_redo_commit(f.kv);
    kv_word copy[12], words[] = {0, 1, 4, 5, 6, 7, 8, 9, 10, 11};
    memcpy(copy, record(f.kv->head->published), sizeof(copy));
    ck_assert_uint_eq(copy[1], 4); // two of ours, and the checksum of their unit
    uint64_t good = kv_redo_checksum(copy);
    for (size_t w = 0; w < sizeof(words) / sizeof(words[0]); w++) {
        for (int bit = 0; bit < 32; bit++) {
            copy[words[w]] ^= UINT32_C(1) << bit;
            bool longer = copy[1] > 4; // would be read past the copy
            ck_assert(longer || kv_redo_checksum(copy) != good);
            copy[words[w]] ^= UINT32_C(1) << bit;
        }
    }
}
END_TEST

// Each operation leaves a record that says again what it did: with the words of the ledger's
// authoritative part set back to what they were before it, the record alone restores them.
START_TEST(kv_redo_records_hold_the_whole_change_of_an_operation) {
    const size_t bytes = (size_t)((char *)f.kv->lists - (char *)f.kv->tenants);
    char *before = malloc(bytes), *after = malloc(bytes);
    ck_assert(before && after);
    uint64_t seq = fix_seq(&f), forked, step;
    fix_append(&f, seq, 6);
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "name", 0, &f.info));
    bool may_wait;
    uint32_t committed, accepted = 2;
    for (int op = 0; op < 6; op++) {
        memcpy(before, f.kv->tenants, bytes);
        switch (op) {
        case 0:
            ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seq, &forked, &committed, &f.info));
            break;
        case 1:
            ATTND_CK_OK(fix_step(&f, forked, 2, 0, &step, &may_wait));
            memcpy(before, f.kv->tenants, bytes);
            ATTND_CK_OK(kv_step_commit(f.kv, fix_rq(&f), step, &accepted, 1, &f.info));
            break;
        case 2:
            ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "other", 5, &f.info));
            break;
        case 3:
            ATTND_CK_OK(kv_seq_truncate(f.kv, fix_rq(&f), forked, 5, &f.info));
            break;
        case 4:
            ATTND_CK_OK(kv_tenant_set(f.kv, "t", 100, &f.tenant));
            break;
        default:
            ATTND_CK_OK(kv_seq_free(f.kv, fix_rq(&f), seq, &f.info));
        }
        memcpy(after, f.kv->tenants, bytes);
        ck_assert_int_ne(memcmp(before, after, bytes), 0);
        memcpy(f.kv->tenants, before, bytes);
        replay();
        ck_assert_int_eq(memcmp(after, f.kv->tenants, bytes), 0);
    }
    free(before);
    free(after);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_redo");
    TCase *t = tcase_create("record");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, kv_redo_applied_again_gives_the_same_words);
    tcase_add_test(t, kv_redo_next_record_leaves_the_published_one_whole);
    tcase_add_test(t, kv_redo_checksum_sees_every_bit);
    tcase_add_test(t, kv_redo_records_hold_the_whole_change_of_an_operation);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
