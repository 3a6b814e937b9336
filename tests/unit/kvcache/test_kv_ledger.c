// The ledger: layout, no pointers in it, what it costs a block, and every system call failing.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/kvcache/kv_faults.h"
#include "tests/unit/kvcache/kv_fixture.h"

static kv_fault memfd_fault = KV_NO_FAULT, truncate_fault = KV_NO_FAULT;
static kv_fault seal_fault = KV_NO_FAULT, mmap_fault = KV_NO_FAULT;
KV_FAULT_MEMFD(&memfd_fault)
KV_FAULT_FTRUNCATE(&truncate_fault)
KV_FAULT_FCNTL(&seal_fault)
KV_FAULT_MMAP(&mmap_fault)

START_TEST(kv_ledger_arrays_are_apart_and_in_order) {
    kv_fixture f;
    fix_init(&f);
    const kv_opts o = fix_opts();
    const struct {
        const void *at;
        size_t bytes;
    } arrays[] = {
        {f.kv->head, sizeof(*f.kv->head)},
        {f.kv->head_copy, sizeof(*f.kv->head_copy)},
        {f.kv->redo, 8},
        {f.kv->tenants, o.max_tenants * sizeof(*f.kv->tenants)},
        {f.kv->models, o.max_models * sizeof(*f.kv->models)},
        {f.kv->slabs, FIX_SLABS * sizeof(*f.kv->slabs)},
        {f.kv->sessions, o.max_sessions * sizeof(*f.kv->sessions)},
        {f.kv->replies, o.max_sessions * 65 * sizeof(*f.kv->replies)},
        {f.kv->values, o.max_sessions * 65 * 2 * o.max_step_seqs * 4},
        {f.kv->steps, o.max_steps * sizeof(*f.kv->steps)},
        {f.kv->seqs, o.max_seqs * sizeof(*f.kv->seqs)},
        {f.kv->sums, f.kv->num_units * sizeof(*f.kv->sums)},
        {f.kv->lists, sizeof(*f.kv->lists)},
        {f.kv->bits, FIX_SLABS * sizeof(*f.kv->bits)},
        {f.kv->refs, FIX_BLOCKS * 4},
        {f.kv->step_seqs, o.max_steps * o.max_step_seqs * sizeof(*f.kv->step_seqs)},
        {f.kv->tables, o.max_seqs * KV_MAX_GROUPS * o.max_seq_blocks * 4},
    };
    const char *end = (char *)f.kv->base;
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        ck_assert((const char *)arrays[i].at >= end);
        ck_assert_uint_eq((uintptr_t)arrays[i].at % 4096, 0);
        end = (const char *)arrays[i].at + arrays[i].bytes;
    }
    ck_assert((uintptr_t)end <= (uintptr_t)f.kv->base + f.kv->bytes);
    fix_fini(&f);
}
END_TEST

START_TEST(kv_ledger_is_sealed_and_says_what_it_is) {
    kv_fixture f;
    fix_init(&f);
    ck_assert_int_eq(ftruncate(f.kv->fd, 4096), -1);
    ck_assert_uint_eq(f.kv->head->magic, KV_LEDGER_MAGIC);
    ck_assert_uint_eq(f.kv->head->version, KV_LEDGER_VERSION);
    ck_assert_uint_eq(f.kv->head->arena_bytes, f.arena.bytes);
    ck_assert_uint_eq(f.kv->head->opts.max_seqs, 64);
    fix_fini(&f);
}
END_TEST

START_TEST(kv_ledger_holds_no_pointer) {
    kv_fixture f;
    fix_init(&f);
    uint64_t seq = fix_seq(&f), step, forked;
    uint32_t committed;
    bool may_wait;
    fix_append(&f, seq, 50);
    ATTND_CK_OK(kv_seq_fork(f.kv, fix_rq(&f), seq, &forked, &committed, &f.info));
    ATTND_CK_OK(kv_seq_keep(f.kv, fix_rq(&f), seq, "name", 5, &f.info));
    ATTND_CK_OK(fix_step(&f, forked, 5, 5, &step, &may_wait));
    uint64_t low[] = {(uintptr_t)f.kv->base, (uintptr_t)f.memory, (uintptr_t)f.kv};
    uint64_t size[] = {f.kv->bytes, f.arena.bytes, sizeof(*f.kv)};
    const char *region = (char *)f.kv->base;
    for (uint64_t at = 0; at + 8 <= f.kv->bytes; at += 4) {
        uint64_t word;
        memcpy(&word, region + at, sizeof(word));
        for (int i = 0; i < 3; i++) {
            ck_assert(word < low[i] || word - low[i] >= size[i]);
        }
    }
    fix_commit(&f, step, 5);
    fix_fini(&f);
}
END_TEST

// A million blocks in 64 sequences: the memory that the region really takes, tables and all.
START_TEST(kv_ledger_costs_at_most_64_bytes_a_block) {
    enum { SEQS = 64, SEQ_BLOCKS = 16384 };
    const kv_opts opts = {
        .slab_bytes = 32 << 20,
        .max_blocks = SEQS * SEQ_BLOCKS,
        .max_seqs = 4096,
        .max_seq_blocks = SEQ_BLOCKS,
        .max_models = 16,
        .max_tenants = 16,
        .max_sessions = 256,
        .max_steps = 256,
        .max_step_seqs = 1024,
    };
    const uint64_t block_bytes = 16384;
    kv_fixture f = {.next_request = 1};
    f.arena = (kv_arena){.bytes = SEQS * SEQ_BLOCKS * block_bytes, .fd = -1, .on_device = true};
    ATTND_CK_OK(kv_create(&f.kv, &f.arena, &opts, &f.info));
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 0, &f.tenant));
    kv_model_spec spec = fix_spec("m", f.tenant);
    spec.groups[0].k_row_bytes = spec.groups[0].v_row_bytes = 512;
    spec.groups[0].block_tokens = 16;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    ATTND_CK_OK(kv_session_open(f.kv, f.tenant, (const uint8_t[KV_SECRET_BYTES]){0}, &f.session));
    for (int i = 0; i < SEQS; i++) {
        fix_append(&f, fix_seq(&f), SEQ_BLOCKS * 16);
    }
    ck_assert_uint_eq(fix_in_use(&f), SEQS * SEQ_BLOCKS);
    ck_assert_msg(kv_check_full(f.kv, &f.info), "%s", f.info.text);
    struct stat st;
    ck_assert_int_eq(fstat(f.kv->fd, &st), 0);
    double a_block = 512.0 * (double)st.st_blocks / (SEQS * SEQ_BLOCKS);
    printf("kv_ledger blocks=%d | %.1f bytes/block resident\n", SEQS * SEQ_BLOCKS, a_block);
    ck_assert_double_le(a_block, 64);
    kv_free(f.kv);
}
END_TEST

enum { CACHED_BLOCKS = 1 << 17, CACHED_SEQS = 8, CACHED_TOKENS = 16 };

// bytes_of_cached fills a cache of CACHED_BLOCKS blocks, with token ids or without, and returns how
// much memory its ledger takes.
static uint64_t bytes_of_cached(bool with_ids) {
    kv_opts opts = fix_opts();
    const uint32_t num = CACHED_BLOCKS / CACHED_SEQS * CACHED_TOKENS;
    kv_fixture f = {.next_request = 1};
    opts.slab_bytes = 1 << 20;
    opts.max_blocks = opts.prefix_blocks = CACHED_BLOCKS;
    opts.max_seq_blocks = CACHED_BLOCKS / CACHED_SEQS;
    opts.prefix_block_tokens = CACHED_TOKENS;
    f.arena = (kv_arena){.bytes = (uint64_t)CACHED_BLOCKS << 10, .fd = -1, .on_device = true};
    ATTND_CK_OK(kv_create(&f.kv, &f.arena, &opts, &f.info));
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 0, &f.tenant));
    kv_model_spec spec = fix_spec("m", f.tenant);
    spec.groups[0].block_tokens = CACHED_TOKENS;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    ATTND_CK_OK(kv_session_open(f.kv, f.tenant, (const uint8_t[KV_SECRET_BYTES]){0}, &f.session));
    uint32_t *ids = malloc(num * sizeof(*ids));
    for (uint32_t s = 0; s < CACHED_SEQS; s++) {
        uint64_t step;
        bool may_wait;
        const uint32_t *tokens = with_ids ? ids : NULL;
        for (uint32_t i = 0; i < num; i++) {
            ids[i] = s * num + i;
        }
        ATTND_CK_OK(fix_step(&f, fix_seq(&f), num, 0, &step, &may_wait));
        ATTND_CK_OK(kv_step_commit_ids(f.kv, fix_rq(&f), step, &num, &tokens, 1, &f.info));
    }
    free(ids);
    kv_info info;
    struct stat st;
    kv_get_info(f.kv, &info);
    ck_assert_uint_eq(info.prefix_blocks, with_ids ? CACHED_BLOCKS : 0);
    ck_assert_int_eq(fstat(f.kv->fd, &st), 0);
    kv_free(f.kv);
    return (uint64_t)st.st_blocks * 512;
}

START_TEST(a_cached_block_costs_at_most_64_bytes_more_and_its_ids) {
    uint64_t ids = UINT64_C(4) * CACHED_TOKENS * CACHED_BLOCKS;
    uint64_t more = bytes_of_cached(true) - bytes_of_cached(false) - ids;
    printf("kv_ledger bytes a cached block=%.1f\n", (double)more / CACHED_BLOCKS);
    ck_assert_uint_le(more, UINT64_C(64) * CACHED_BLOCKS);
}
END_TEST

static void expect_named(kv_fault *fault, const char *name) {
    const kv_arena arena = {.bytes = FIX_BLOCKS * KV_BLOCK_UNIT, .fd = -1, .on_device = true};
    kv_opts opts = fix_opts();
    kv_cache *kv;
    attnd_errinfo info;
    int before = dup(0);
    close(before);
    *fault = (kv_fault){.after = 0, .err = EMFILE};
    ATTND_CK_ERR(kv_create(&kv, &arena, &opts, &info), ATTND_ENOMEM);
    ck_assert_ptr_nonnull(strstr(info.text, name));
    ck_assert_ptr_nonnull(strstr(info.text, strerror(EMFILE)));
    int after = dup(0);
    close(after);
    ck_assert_int_eq(after, before);
}

START_TEST(kv_ledger_failing_system_call_is_named) {
    expect_named(&memfd_fault, "memfd_create");
    expect_named(&truncate_fault, "ftruncate");
    expect_named(&seal_fault, "F_ADD_SEALS");
    expect_named(&mmap_fault, "mmap");
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_ledger");
    TCase *t = tcase_create("region");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, kv_ledger_arrays_are_apart_and_in_order);
    tcase_add_test(t, kv_ledger_is_sealed_and_says_what_it_is);
    tcase_add_test(t, kv_ledger_holds_no_pointer);
    tcase_add_test(t, kv_ledger_costs_at_most_64_bytes_a_block);
    tcase_add_test(t, a_cached_block_costs_at_most_64_bytes_more_and_its_ids);
    tcase_add_test(t, kv_ledger_failing_system_call_is_named);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
