// Recovery: what a second cache over the same memory has, what damage to any byte of the ledger
// costs, and descriptors that are no ledger of ours.  Stops at every store are test_kv_crash.c's.
//
// Damage: after one byte is changed, whatever survives must be as it was, row for row; the books
// must balance; and no handle that was ever given out may be given out again.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvcache/kv_redo.h"
#include "tests/unit/kvcache/kv_faults.h"
#include "tests/unit/kvcache/kv_fixture.h"
#include "tests/unit/kvcache/kv_rows.h"

static kv_fault calloc_fault = KV_NO_FAULT, mmap_fault = KV_NO_FAULT;
KV_FAULT_CALLOC(&calloc_fault)
KV_FAULT_MMAP(&mmap_fault)

enum { MAX_SEQS = 12, MAX_LEN = 24, PAGE = 4096 };

static kv_opts small_opts(void) {
    kv_opts opts = fix_opts();
    opts.max_seqs = MAX_SEQS;
    opts.max_step_seqs = 2;
    opts.max_sessions = 3;
    return opts;
}

// kept is a sequence as the test knows it.
typedef struct kept {
    uint64_t seq, session;
    uint32_t len, tokens[MAX_LEN];
    const char *name;
    bool live;
} kept;

static kv_fixture f;
static kept seqs[MAX_SEQS];
static uint32_t num_seqs, next_token;
static uint64_t sessions[3];

static uint32_t make_seq(const char *name, uint64_t session) {
    seqs[num_seqs] = (kept){.session = session, .name = name, .live = true};
    ATTND_CK_OK(kv_seq_create(f.kv, (kv_request){session, f.next_request++}, f.model,
                              &seqs[num_seqs].seq, &f.info));
    if (name) {
        ATTND_CK_OK(kv_seq_keep(f.kv, (kv_request){session, f.next_request++}, seqs[num_seqs].seq,
                                name, 70, &f.info));
    }
    return num_seqs++;
}

// open_step opens a step of a sequence and writes its rows.
static uint64_t open_step(uint32_t i, uint32_t num, uint64_t *request) {
    kv_step_seq in = {.seq = seqs[i].seq, .new_len = num};
    const kv_copy *copies;
    uint32_t num_copies, entries;
    uint64_t step;
    bool may_wait;
    *request = f.next_request++;
    ATTND_CK_OK(kv_step_open(f.kv, (kv_request){seqs[i].session, *request}, f.model, &in, 1, &step,
                             &copies, &num_copies, &may_wait, &f.info));
    ATTND_CK_OK(kv_copy_run(f.kv, copies, num_copies, NULL));
    const uint32_t *table = kv_step_table(f.kv, step, 0, 0, &entries);
    for (uint32_t t = 0; t < num; t++) {
        rows_write(kv_model_get(f.kv, f.model), 0, f.memory, table, in.committed + t, ++next_token);
    }
    return step;
}

static void append(uint32_t i, uint32_t num) {
    uint64_t request, step = open_step(i, num, &request);
    for (uint32_t t = 0; t < num; t++) {
        seqs[i].tokens[seqs[i].len++] = next_token - num + 1 + t;
    }
    ATTND_CK_OK(kv_step_commit(f.kv, (kv_request){seqs[i].session, f.next_request++}, step, &num, 1,
                               &f.info));
}

static uint32_t fork_seq(uint32_t from) {
    uint32_t committed;
    seqs[num_seqs] = seqs[from];
    seqs[num_seqs].name = NULL;
    ATTND_CK_OK(kv_seq_fork(f.kv, (kv_request){seqs[from].session, f.next_request++},
                            seqs[from].seq, &seqs[num_seqs].seq, &committed, &f.info));
    return num_seqs++;
}

// fill makes two sessions with sequences: kept, forked, truncated, freed, and one in a step.
static void fill(void) {
    kv_opts opts = small_opts();
    num_seqs = next_token = 0;
    fix_open(&f, &opts, (uint64_t)FIX_BLOCKS * KV_BLOCK_UNIT);
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 90, &f.tenant));
    kv_model_spec spec = fix_spec("m", f.tenant);
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &f.model, &f.info));
    for (uint8_t i = 0; i < 2; i++) {
        const uint8_t secret[KV_SECRET_BYTES] = {(uint8_t)(i + 1)};
        ATTND_CK_OK(kv_session_open(f.kv, f.tenant, secret, &sessions[i]));
    }
    append(make_seq("one", sessions[0]), 10);
    append(make_seq(NULL, sessions[0]), 7);
    append(make_seq("two", sessions[1]), 3);
    uint32_t forked = fork_seq(0), gone = fork_seq(1);
    append(forked, 5);
    ATTND_CK_OK(kv_seq_truncate(f.kv, (kv_request){sessions[0], f.next_request++}, seqs[0].seq, 6,
                                &f.info));
    seqs[0].len = 6;
    ATTND_CK_OK(
        kv_seq_free(f.kv, (kv_request){sessions[0], f.next_request++}, seqs[gone].seq, &f.info));
    seqs[gone].live = false;
}

static attnd_err recover_fd(int fd, kv_recovered *found) {
    kv_opts opts = small_opts();
    return kv_recover(&f.kv, &f.arena, &opts, fd, 100, found, &f.info);
}

static void recover(kv_recovered *found) {
    int fd = dup(f.kv->fd);
    kv_free(f.kv);
    ATTND_CK_OK(recover_fd(fd, found));
}

// check_seq says whether a sequence is there, and aborts when it is not as it was.
static bool check_seq(const kept *k) {
    kv_seq_info info;
    if (kv_seq_get(f.kv, 0, k->seq, &info) != ATTND_OK) {
        return false;
    }
    ck_assert(k->live);
    ck_assert_uint_eq(info.committed, k->len);
    ck_assert_str_eq(info.name, k->name ? k->name : "");
    ck_assert(info.session == k->session || (info.session == 0 && k->name));
    const uint32_t *table =
        f.kv->tables + (uint64_t)(uint32_t)k->seq * KV_MAX_GROUPS * f.kv->opts.max_seq_blocks;
    for (uint32_t t = 0; t < k->len; t++) {
        ck_assert(rows_right(kv_model_get(f.kv, info.model), 0, f.memory, table, t, k->tokens[t]));
    }
    return true;
}

static uint32_t check_seqs(void) {
    uint32_t there = 0;
    ck_assert_msg(kv_check_full(f.kv, &f.info), "%s", f.info.text);
    for (uint32_t i = 0; i < num_seqs; i++) {
        there += check_seq(&seqs[i]);
    }
    return there;
}

START_TEST(kv_recover_has_all_that_was_committed) {
    kv_recovered found;
    kv_session_info session;
    kv_seq_info info;
    uint32_t cursor = 0, blocks, quota;
    char name[KV_NAME_BYTES];
    fill();
    uint64_t salt = kv_salt(f.kv);
    recover(&found);
    ck_assert_uint_eq(check_seqs(), 4);
    ck_assert_uint_eq(found.seqs, 4);
    ck_assert_uint_eq(found.sessions, 2);
    ck_assert_uint_eq(found.models, 1);
    ck_assert_uint_eq(found.lost_seqs + found.lost_sessions + found.lost_models, 0);
    ck_assert_uint_eq(found.blocks, fix_in_use(&f));
    ck_assert_uint_eq(kv_salt(f.kv), salt);
    for (uint8_t i = 0; i < 2; i++) {
        ck_assert(kv_session_next(f.kv, &cursor, &session));
        ck_assert_uint_eq(session.session, sessions[i]);
        ck_assert_uint_eq(session.secret[0], i + 1);
        ck_assert_uint_eq(session.num_seqs, i == 0 ? 3 : 1);
    }
    ck_assert(!kv_session_next(f.kv, &cursor, &session));
    ATTND_CK_OK(kv_tenant_get(f.kv, 0, name, &blocks, &quota));
    ck_assert_str_eq(name, "t");
    ck_assert_uint_eq(quota, 90);
    // 6 and 7 tokens: 2 blocks each; 3: 1; the fork of 10 that has 15 now: 4, of which 2 are shared
    // with the 6 tokens (its third was copied, and the old one went with the truncation).
    ck_assert_uint_eq(blocks, 2 + 2 + 1 + 2);
    append(3, 9); // and it goes on
    ck_assert_uint_eq(check_seqs(), 4);
    ATTND_CK_OK(kv_session_close(f.kv, sessions[0], 100));
    ATTND_CK_OK(kv_seq_get(f.kv, 0, seqs[0].seq, &info));
    ck_assert_uint_eq(info.session, 0);
    ATTND_CK_ERR(kv_seq_get(f.kv, 0, seqs[1].seq, &info), ATTND_ESTALE);
    fix_fini(&f);
}
END_TEST

START_TEST(kv_recover_aborts_open_steps_and_forgets_their_reply) {
    kv_recovered found;
    kv_reply reply;
    uint64_t request, committed_request, again;
    fill();
    append(0, 2);
    committed_request = f.next_request - 1;
    uint64_t step = open_step(0, 3, &request);
    recover(&found);
    ck_assert_uint_eq(found.aborted_steps, 1);
    ck_assert_uint_eq(check_seqs(), 4);
    kv_request rq = {sessions[0], request};
    ATTND_CK_ERR(kv_reply_find(f.kv, rq, &reply), ATTND_ENOENT);
    uint32_t accepted = 3;
    ATTND_CK_ERR(kv_step_commit(f.kv, (kv_request){sessions[0], f.next_request}, step, &accepted, 1,
                                &f.info),
                 ATTND_ESTALE);
    rq.request = committed_request;
    ATTND_CK_OK(kv_reply_find(f.kv, rq, &reply));
    ck_assert_uint_eq(reply.op, KV_OP_COMMIT);
    ck_assert_uint_eq(reply.values[0], 8);
    f.next_request = request; // a repeat opens it again, as another step
    uint64_t second = open_step(0, 3, &again);
    ck_assert_uint_eq(again, request);
    ck_assert_uint_ne(second, step);
    ATTND_CK_OK(kv_step_abort(f.kv, (kv_request){0}, second));
    fix_fini(&f);
}
END_TEST

// ---- damage

static char *snapshot;
static size_t snapshot_bytes;
static uint8_t *touched; // [pages]

static void take_snapshot(void) {
    snapshot_bytes = f.kv->bytes;
    snapshot = malloc(snapshot_bytes);
    touched = calloc(snapshot_bytes / PAGE, 1);
    ck_assert(snapshot && touched);
    memcpy(snapshot, f.kv->base, snapshot_bytes);
    for (size_t i = 0; i < snapshot_bytes; i++) {
        touched[i / PAGE] |= snapshot[i] != 0;
    }
}

// make_copy makes a memfd as the snapshot; it stays unsealed when unsealed is set.
static int make_copy(bool unsealed) {
    int fd = memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)snapshot_bytes), 0);
    for (size_t p = 0; p < snapshot_bytes / PAGE; p++) {
        if (touched[p]) {
            ck_assert_int_eq(pwrite(fd, snapshot + p * PAGE, PAGE, (off_t)(p * PAGE)), PAGE);
        }
    }
    if (!unsealed) {
        ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    }
    return fd;
}

// check_new makes a session and sequences: none may have a handle of before.
static void check_new(void) {
    const uint8_t secret[KV_SECRET_BYTES] = {9};
    kv_model_spec spec = fix_spec("m", 0);
    uint64_t session, seq;
    uint32_t tenant, model;
    ATTND_CK_OK(kv_tenant_set(f.kv, "t", 90, &tenant));
    spec.tenant = tenant;
    ATTND_CK_OK(kv_model_open(f.kv, &spec, &model, &f.info));
    ATTND_CK_OK(kv_session_open(f.kv, tenant, secret, &session));
    ck_assert(session != sessions[0] && session != sessions[1]);
    while (kv_seq_create(f.kv, (kv_request){session, 0}, model, &seq, &f.info) == ATTND_OK) {
        for (uint32_t i = 0; i < num_seqs; i++) {
            ck_assert_uint_ne(seq, seqs[i].seq);
        }
    }
    ck_assert_msg(kv_check_full(f.kv, &f.info), "%s", f.info.text);
}

// damaged recovers a copy with the byte at `at` changed; how much was lost is added up.
static void damaged(size_t at, uint8_t change, long *lost, long *refused) {
    kv_recovered found;
    int fd = make_copy(false);
    uint8_t byte = (uint8_t)snapshot[at] ^ change;
    ck_assert_int_eq(pwrite(fd, &byte, 1, (off_t)at), 1);
    attnd_err err = recover_fd(fd, &found);
    if (err) {
        ck_assert_msg(f.info.text[0] != 0, "byte %zu", at);
        ++*refused;
        close(fd);
        return;
    }
    uint32_t there = check_seqs();
    ck_assert_uint_eq(there, found.seqs);
    ck_assert(there + found.lost_seqs == 4 || found.bad_units); // a damaged state looks free
    *lost += 4 - there;
    check_new();
    kv_recovered again;
    kv_cache *first = f.kv;
    fd = dup(first->fd);
    kv_free(first);
    ATTND_CK_OK(recover_fd(fd, &again)); // what was repaired stays so
    ck_assert_uint_eq(again.bad_units, 0);
    ck_assert_uint_eq(again.lost_seqs + again.lost_sessions + again.lost_models, 0);
    kv_free(f.kv);
}

// Every byte of what was written, and some of what was not; ATTND_EXHAUSTIVE: every byte.
START_TEST(kv_recover_serves_the_rest_whatever_byte_is_damaged) {
    fill();
    take_snapshot();
    kv_cache *kv = f.kv;
    size_t end = (size_t)((char *)kv->lists - (char *)kv->base), tables = kv->bytes;
    size_t first_table = (size_t)((char *)kv->tables - (char *)kv->base);
    bool all = getenv("ATTND_EXHAUSTIVE") != NULL;
    long tried = 0, lost = 0, refused = 0;
    for (size_t at = 0; at < tables; at++) {
        at = at == end ? first_table : at;
        bool near_data =
            snapshot[at] || (at > 0 && snapshot[at - 1]) || (at + 1 < tables && snapshot[at + 1]);
        if (touched[at / PAGE] && (all || near_data || at % 61 == 0)) {
            damaged(at, (uint8_t)(1u << at % 8), &lost, &refused);
            tried++;
        }
    }
    printf("kv_recover bytes=%ld sequences lost=%ld of %ld, refused=%ld\n", tried, lost, 4 * tried,
           refused);
    ck_assert_int_eq(refused, 0);
    ck_assert_int_gt(lost, 0);
    f.kv = kv;
    fix_fini(&f);
    free(snapshot);
    free(touched);
}
END_TEST

// A page of noise, as after a stray write.
START_TEST(kv_recover_serves_the_rest_whatever_page_is_damaged) {
    fill();
    take_snapshot();
    kv_cache *kv = f.kv;
    srand(7);
    for (size_t p = 0; p < snapshot_bytes / PAGE; p++) {
        if (!touched[p]) {
            continue;
        }
        kv_recovered found;
        char noise[PAGE];
        for (int i = 0; i < PAGE; i++) {
            noise[i] = (char)rand();
        }
        int fd = make_copy(false);
        ck_assert_int_eq(pwrite(fd, noise, PAGE, (off_t)(p * PAGE)), PAGE);
        if (recover_fd(fd, &found)) {
            ck_assert_uint_eq(p, 0); // magic and version are there
            ck_assert_str_ne(f.info.text, "");
            close(fd);
            continue;
        }
        ck_assert_uint_eq(check_seqs(), found.seqs);
        check_new();
        kv_free(f.kv);
    }
    f.kv = kv;
    fix_fini(&f);
    free(snapshot);
    free(touched);
}
END_TEST

// ---- descriptors

static void refuses(int fd, attnd_err err, const char *says) {
    kv_recovered found;
    ATTND_CK_ERR(recover_fd(fd, &found), err);
    ck_assert_msg(strstr(f.info.text, says) != NULL, "%s", f.info.text);
    ck_assert_int_ge(fcntl(fd, F_GETFD), 0); // it stays the caller's
    close(fd);
}

START_TEST(kv_recover_refuses_what_is_no_ledger_of_ours) {
    kv_recovered found;
    fill();
    take_snapshot();
    kv_cache *kv = f.kv;
    int fd = make_copy(true);
    ck_assert_int_eq(ftruncate(fd, (off_t)snapshot_bytes - PAGE), 0);
    refuses(fd, ATTND_EINVAL, "bytes, not");
    refuses(make_copy(true), ATTND_EINVAL, "not sealed");
    fd = make_copy(false);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
    refuses(fd, ATTND_EINVAL, strerror(EPERM));
    fd = memfd_create("empty", MFD_CLOEXEC);
    refuses(fd, ATTND_EINVAL, "no ledger");
    refuses(open("/dev/null", O_RDWR | O_CLOEXEC), ATTND_EINVAL, "no ledger");
    for (int head = 0; head < 2; head++) { // another version, sealed by its own checksum
        fd = make_copy(false);
        kv_led_head other = *kv->head;
        other.version++;
        other.check = kv_head_check(&other);
        ck_assert_int_eq(pwrite(fd, &other, sizeof(other), 0), sizeof(other));
        if (head == 1) {
            ck_assert_int_eq(pwrite(fd, &other, sizeof(other), PAGE), sizeof(other));
        }
        refuses(fd, ATTND_EVERSION, "version 6");
    }
    kv_opts opts = small_opts();
    opts.max_steps++;
    fd = make_copy(false);
    ATTND_CK_ERR(kv_recover(&f.kv, &f.arena, &opts, fd, 0, &found, &f.info), ATTND_EINVAL);
    ck_assert_str_eq(f.info.field, "max_steps");
    f.arena.bytes *= 2;
    refuses(fd, ATTND_EINVAL, "arena");
    f.arena.bytes /= 2;
    f.kv = kv;
    fix_fini(&f);
    free(snapshot);
    free(touched);
}
END_TEST

START_TEST(kv_recover_without_memory_changes_nothing) {
    kv_recovered found;
    fill();
    int fd = dup(f.kv->fd);
    kv_free(f.kv);
    for (int n = 0; n < 3; n++) {
        calloc_fault = (kv_fault){.after = n, .err = ENOMEM};
        ATTND_CK_ERR(recover_fd(fd, &found), ATTND_ENOMEM);
    }
    mmap_fault = (kv_fault){.after = 0, .err = ENOMEM};
    ATTND_CK_ERR(recover_fd(fd, &found), ATTND_ENOMEM);
    mmap_fault = (kv_fault)KV_NO_FAULT;
    ATTND_CK_OK(recover_fd(fd, &found));
    ck_assert_uint_eq(check_seqs(), 4);
    fix_fini(&f);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_recover");
    TCase *t = tcase_create("recover");
    tcase_set_timeout(t, 100);
    tcase_add_test(t, kv_recover_has_all_that_was_committed);
    tcase_add_test(t, kv_recover_aborts_open_steps_and_forgets_their_reply);
    tcase_add_test(t, kv_recover_serves_the_rest_whatever_byte_is_damaged);
    tcase_add_test(t, kv_recover_serves_the_rest_whatever_page_is_damaged);
    tcase_add_test(t, kv_recover_refuses_what_is_no_ledger_of_ours);
    tcase_add_test(t, kv_recover_without_memory_changes_nothing);
    suite_add_tcase(s, t);
    return s;
}

CHECK_MAIN(suite)
