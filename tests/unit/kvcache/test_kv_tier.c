// Tiers of memory and of a file: images come back to the byte, or not at all; every way in which a
// store can fail switches it off and ends every job; what a restart finds.  The arena's copies and
// the results of the file's requests are the test's, so that they can be slow and wrong.
//
// Where the kernel gives no io_uring, or the file system no O_DIRECT, the tests of files say so and
// are left out.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kvcache/kv_tier.h"
#include "tests/check_main.h"

enum {
    BLOCK = 3 * 1024 * 1024 + 256, // several pieces of a file's, the last one short
    FIRST = 2 * 1024 * 1024 + 512, // an image is two blocks; one ends within a piece
    BLOCKS = 8,
    ARENA = BLOCKS * (BLOCK + 1024),
    SLAB = 4 << 20,
    TIER = 6 * SLAB,
    DEPTH = 4,
};

// An image's blocks lie in the arena in the other order, with a gap: bytes [0, FIRST) of the image
// at the end of its BLOCK + GAP bytes, the rest at their start.
enum { GAP = 1024, PLACE = BLOCK + GAP };
#define GAP_WORD UINT32_C(0xeeeeeeee)

// ---- what the test decides

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static bool gate_closed;       // copies of the arena wait
static attnd_err copy_err;     // of the arena's copies
static int result_is, results; // from how many results of the file on: this instead

int kv_tier_result(bool is_put, int result);
int kv_tier_result(bool is_put, int result) {
    (void)is_put;
    pthread_mutex_lock(&lock);
    bool hit = result_is != 0 && results-- <= 0;
    int changed = hit ? result_is : result;
    pthread_mutex_unlock(&lock);
    return changed;
}

static attnd_err pass(attnd_errinfo *info) {
    pthread_mutex_lock(&lock);
    while (gate_closed) {
        pthread_cond_wait(&cond, &lock);
    }
    attnd_err err = copy_err;
    pthread_mutex_unlock(&lock);
    return err ? attnd_fail(info, err, "device", "the device is lost") : ATTND_OK;
}

static attnd_err read_slowly(const kv_arena *arena, void *dst, uint64_t off, uint64_t bytes,
                             attnd_errinfo *info) {
    attnd_err err = pass(info);
    return err ? err : kv_arena_host_ops.read(arena, dst, off, bytes, info);
}

static attnd_err write_slowly(const kv_arena *arena, uint64_t off, const void *src, uint64_t bytes,
                              attnd_errinfo *info) {
    attnd_err err = pass(info);
    return err ? err : kv_arena_host_ops.write(arena, off, src, bytes, info);
}

static uint64_t pinned; // bytes

static void set_pinned(uint64_t bytes) {
    pthread_mutex_lock(&lock);
    pinned = bytes;
    pthread_mutex_unlock(&lock);
}

static bool pin(const kv_arena *over, void *base, uint64_t bytes) {
    (void)over;
    (void)base;
    set_pinned(bytes);
    return true;
}

static void unpin(const kv_arena *over, void *base) {
    (void)over;
    (void)base;
    set_pinned(0);
}

static const kv_arena_ops slow_ops = {
    .kind = "slow", .read = read_slowly, .write = write_slowly, .pin = pin, .unpin = unpin};

static void set_gate(bool closed) {
    pthread_mutex_lock(&lock);
    gate_closed = closed;
    pthread_cond_broadcast(&cond);
    pthread_mutex_unlock(&lock);
}

static void on_ended(void *ctx) {
    (void)ctx;
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&cond);
    pthread_mutex_unlock(&lock);
}

// ---- a tier over a small arena

static kv_arena arena, store;
static kv_tier *tier;
static char path[256];
static attnd_errinfo info;

static kv_tier_opts opts_of(uint64_t salt) {
    return (kv_tier_opts){.arena = &arena,
                          .bytes = TIER,
                          .slab_bytes = SLAB,
                          .salt = salt,
                          .depth = DEPTH,
                          .ended = on_ended};
}

// word_of returns word i of an image in the arena.
static uint32_t *word_of(uint32_t block, uint32_t i) {
    uint32_t *place = (uint32_t *)((char *)arena.base + (size_t)block * PLACE);
    return i < FIRST / 4 ? place + (PLACE - FIRST) / 4 + i : place + i - FIRST / 4;
}

static uint32_t pattern(uint32_t seed, uint32_t i) {
    return (seed * UINT32_C(2654435761)) ^ (i * UINT32_C(40503));
}

static void fill(uint32_t block, uint32_t seed) {
    for (uint32_t i = 0; i < BLOCK / 4; i++) {
        *word_of(block, i) = pattern(seed, i);
    }
}

// holds says whether the image is there and nothing was written into the gap.
static bool holds(uint32_t block, uint32_t seed) {
    const uint32_t *gap = word_of(block, 0) - GAP / 4;
    for (uint32_t i = 0; i < BLOCK / 4; i++) {
        if (*word_of(block, i) != pattern(seed, i) || gap[i % (GAP / 4)] != GAP_WORD) {
            return false;
        }
    }
    return true;
}

static void open_arena(void) {
    gate_closed = false;
    copy_err = ATTND_OK;
    result_is = results = 0;
    arena = (kv_arena){.base = malloc(ARENA), .bytes = ARENA, .fd = -1, .ops = &slow_ops};
    ck_assert_ptr_nonnull(arena.base);
    memset(arena.base, 0xee, ARENA);
}

static void open_memory(void) {
    open_arena();
    kv_tier_opts opts = opts_of(1);
    ATTND_CK_OK(kv_arena_open_host(&store, TIER, &info));
    ATTND_CK_OK(kv_tier_open_memory(&tier, &opts, &store, false, &info));
}

static void close_memory(void) {
    kv_tier_close(tier);
    kv_arena_close_host(&store);
    free(arena.base);
}

// no_files says why there can be no file tiers here, once; true when there can be none.
static bool no_files(void) {
    attnd_errinfo why;
    if (kv_tier_file_check(&why)) {
        printf("kv_tier: tests of files are left out: %s\n", why.text);
        return true;
    }
    snprintf(path, sizeof(path), "%s/kv_tier_XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    close(fd);
    fd = open(path, O_RDWR | O_DIRECT);
    if (fd < 0) {
        printf("kv_tier: tests of files are left out: %s: %s with O_DIRECT\n", path,
               strerror(errno));
        unlink(path);
        return true;
    }
    close(fd);
    open_arena();
    return false;
}

static void open_file(uint64_t salt) {
    kv_tier_opts opts = opts_of(salt);
    attnd_err err = kv_tier_open_file(&tier, &opts, path, &info);
    ck_assert_msg(err == ATTND_OK, "%s", info.text);
}

static void close_file(void) {
    kv_tier_close(tier);
    unlink(path);
    free(arena.base);
}

static kv_tier_job job_of(kv_tier_op op, uint32_t block, uint64_t slot, uint64_t sum) {
    uint64_t at = (uint64_t)block * PLACE;
    return (kv_tier_job){.op = op,
                         .tag = block + 100,
                         .slot = slot,
                         .sum = sum,
                         .num_blocks = 2,
                         .at = {at + PLACE - FIRST, at},
                         .bytes = {FIRST, BLOCK - FIRST}};
}

// await waits for a job that has ended, for some seconds at most.
static kv_tier_job await(void) {
    kv_tier_job out;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    pthread_mutex_lock(&lock);
    while (!kv_tier_take_ended(tier, &out)) {
        ck_assert_int_eq(pthread_cond_timedwait(&cond, &lock, &until), 0);
    }
    pthread_mutex_unlock(&lock);
    return out;
}

static kv_tier_job run(kv_tier_job job) {
    ATTND_CK_OK(kv_tier_submit(tier, &job));
    kv_tier_job out = await();
    ck_assert_uint_eq(out.tag, job.tag);
    ck_assert_int_eq(out.op, job.op);
    return out;
}

static kv_tier_job put(uint32_t block, uint64_t *slot) {
    ck_assert(kv_tier_take(tier, BLOCK, slot));
    return run(job_of(KV_TIER_PUT, block, *slot, 0));
}

static kv_tier_info look(void) {
    kv_tier_info out;
    kv_tier_get_info(tier, &out);
    return out;
}

// ---- what both kinds do

static void come_back(void) {
    uint64_t slots[3];
    kv_tier_job puts[3];
    for (uint32_t i = 0; i < 3; i++) {
        fill(i, i + 1);
        puts[i] = put(i, &slots[i]);
        ATTND_CK_OK(puts[i].err);
    }
    memset(arena.base, 0xee, ARENA);
    for (uint32_t i = 0; i < 3; i++) { // to other blocks
        ATTND_CK_OK(run(job_of(KV_TIER_GET, i + 4, slots[i], puts[i].sum)).err);
        ck_assert(holds(i + 4, i + 1));
    }
    kv_tier_info i = look();
    ck_assert_uint_eq(i.puts, 3);
    ck_assert_uint_eq(i.gets, 3);
    ck_assert_uint_eq(i.put_bytes, 3 * (uint64_t)BLOCK);
    ck_assert_uint_eq(i.get_bytes, 3 * (uint64_t)BLOCK);
    ck_assert_uint_eq(i.jobs, 0);
    const uint64_t slot_bytes = (BLOCK + 4095) / 4096 * 4096;
    ck_assert_uint_eq(i.in_use_bytes, 3 * slot_bytes);
    kv_tier_give(tier, slots[0]);
    ck_assert_uint_eq(look().in_use_bytes, 2 * slot_bytes);
    ATTND_CK_OK(look().off);
}

// A get with the sum of another image, or of a place that another image was put in, is none.
static void know_their_image(void) {
    uint64_t a, b;
    fill(0, 1);
    fill(1, 1);
    kv_tier_job one = put(0, &a), two = put(1, &b); // the same bytes, other places
    ck_assert_uint_ne(one.sum, two.sum);
    ATTND_CK_ERR(run(job_of(KV_TIER_GET, 2, a, two.sum)).err, ATTND_ESTALE);
    fill(1, 3);
    kv_tier_job over = run(job_of(KV_TIER_PUT, 1, a, 0));
    ATTND_CK_OK(over.err);
    ATTND_CK_ERR(run(job_of(KV_TIER_GET, 2, a, one.sum)).err, ATTND_ESTALE);
    ATTND_CK_OK(run(job_of(KV_TIER_GET, 2, a, over.sum)).err);
    ck_assert(holds(2, 3));
    ck_assert_uint_eq(look().damaged, 2);
    ATTND_CK_OK(look().off);
}

// The loop never waits: what is more than the depth is refused, and all that was taken ends.
static void bound_their_queue(void) {
    uint64_t slot[DEPTH];
    set_gate(true);
    for (uint32_t i = 0; i < DEPTH; i++) {
        fill(i, i + 1);
        ck_assert(kv_tier_take(tier, BLOCK, &slot[i]));
        ck_assert_uint_eq(kv_tier_room(tier), DEPTH - i);
        kv_tier_job job = job_of(KV_TIER_PUT, i, slot[i], 0);
        ATTND_CK_OK(kv_tier_submit(tier, &job));
    }
    kv_tier_job more = job_of(KV_TIER_PUT, 5, slot[0], 0), none;
    ck_assert_uint_eq(kv_tier_room(tier), 0);
    ATTND_CK_ERR(kv_tier_submit(tier, &more), ATTND_EBUSY);
    ck_assert(!kv_tier_take_ended(tier, &none));
    ck_assert_uint_eq(look().busy, 1);
    ck_assert_uint_eq(look().jobs, DEPTH);
    set_gate(false);
    for (uint32_t i = 0; i < DEPTH; i++) {
        ATTND_CK_OK(await().err);
    }
    ck_assert_uint_eq(kv_tier_room(tier), DEPTH);
    ATTND_CK_OK(kv_tier_submit(tier, &more));
    ATTND_CK_OK(await().err);
}

// One job fails and the others, begun, waiting and new, end with the same error.
static void end_when_copies_fail(void) {
    uint64_t slot[DEPTH];
    set_gate(true);
    for (uint32_t i = 0; i < DEPTH; i++) {
        ck_assert(kv_tier_take(tier, BLOCK, &slot[i]));
        kv_tier_job job = job_of(KV_TIER_PUT, i, slot[i], 0);
        ATTND_CK_OK(kv_tier_submit(tier, &job));
    }
    copy_err = ATTND_ECUDA;
    set_gate(false);
    for (uint32_t i = 0; i < DEPTH; i++) {
        ATTND_CK_ERR(await().err, ATTND_EIO);
    }
    ck_assert(kv_tier_is_off(tier));
    ck_assert_str_eq(look().why, "the device is lost");
    copy_err = ATTND_OK; // it stays off
    kv_tier_job more = job_of(KV_TIER_GET, 5, slot[0], 0);
    uint64_t other;
    ATTND_CK_ERR(kv_tier_submit(tier, &more), ATTND_EIO);
    ck_assert_uint_eq(kv_tier_room(tier), 0);
    ck_assert(!kv_tier_take(tier, BLOCK, &other));
    ck_assert_uint_eq(look().puts, 0);
    for (uint32_t i = 0; i < DEPTH; i++) {
        kv_tier_give(tier, slot[i]); // the books go on
    }
    ck_assert_uint_eq(look().in_use_bytes, 0);
}

// Closing does not wait for what has not begun.
static void close_with_jobs(void) {
    set_gate(true);
    for (uint32_t i = 0; i < DEPTH; i++) {
        uint64_t slot;
        ck_assert(kv_tier_take(tier, BLOCK, &slot));
        kv_tier_job job = job_of(KV_TIER_PUT, i, slot, 0);
        ATTND_CK_OK(kv_tier_submit(tier, &job));
    }
    set_gate(false);
}

#define BOTH(name, test)                   \
    START_TEST(kv_tier_of_memory_##name) { \
        open_memory();                     \
        test();                            \
        close_memory();                    \
    }                                      \
    END_TEST                               \
    START_TEST(kv_tier_of_a_file_##name) { \
        if (no_files()) {                  \
            return;                        \
        }                                  \
        open_file(1);                      \
        test();                            \
        close_file();                      \
    }                                      \
    END_TEST

BOTH(gives_images_back, come_back)
BOTH(knows_its_images, know_their_image)
BOTH(bounds_its_queue, bound_their_queue)
BOTH(is_off_after_a_failing_copy, end_when_copies_fail)
BOTH(closes_with_jobs, close_with_jobs)

// ---- memory

START_TEST(kv_tier_of_memory_survives_with_its_descriptor) {
    open_memory();
    uint64_t slot, other;
    fill(0, 7);
    kv_tier_job image = put(0, &slot);
    kv_tier_close(tier);
    kv_arena again;
    ATTND_CK_OK(kv_arena_adopt_host(&again, dup(store.fd), TIER, &info));
    kv_arena_close_host(&store);
    store = again;
    kv_tier_opts opts = opts_of(1);
    ATTND_CK_OK(kv_tier_open_memory(&tier, &opts, &store, true, &info));
    ck_assert(!kv_tier_claim(tier, TIER, BLOCK));
    ck_assert(kv_tier_claim(tier, slot, BLOCK));
    ck_assert(!kv_tier_claim(tier, slot, BLOCK));
    ck_assert(kv_tier_take(tier, BLOCK, &other));
    ck_assert_uint_ne(slot, other);
    ATTND_CK_OK(run(job_of(KV_TIER_GET, 1, slot, image.sum)).err);
    ck_assert(holds(1, 7));
    close_memory();
}
END_TEST

START_TEST(kv_tier_of_memory_that_was_changed_is_no_image) {
    open_memory();
    uint64_t slot;
    fill(0, 7);
    kv_tier_job image = put(0, &slot);
    ((char *)store.base)[slot + BLOCK - 1] ^= 1;
    memset(arena.base, 0xee, ARENA);
    ATTND_CK_ERR(run(job_of(KV_TIER_GET, 1, slot, image.sum)).err, ATTND_ESTALE);
    ((char *)store.base)[slot + BLOCK - 1] ^= 1;
    ATTND_CK_OK(run(job_of(KV_TIER_GET, 1, slot, image.sum)).err);
    close_memory();
}
END_TEST

START_TEST(kv_tier_of_memory_is_pinned_for_a_device) {
    open_memory();
    ck_assert_uint_eq(pinned, store.bytes);
    close_memory();
    ck_assert_uint_eq(pinned, 0);
}
END_TEST

// ---- files

static void change_file(uint64_t at, const char *bytes, size_t num) {
    int fd = open(path, O_WRONLY);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(pwrite(fd, bytes, num, (off_t)at), (ssize_t)num);
    close(fd);
}

START_TEST(kv_tier_of_a_file_with_a_changed_byte_is_no_image) {
    if (no_files()) {
        return;
    }
    open_file(1);
    uint64_t slot;
    memset(arena.base, 0, ARENA);
    kv_tier_job image = put(0, &slot);
    change_file(4096 + slot + BLOCK - 1, "x", 1);
    ATTND_CK_ERR(run(job_of(KV_TIER_GET, 1, slot, image.sum)).err, ATTND_ESTALE);
    ck_assert_uint_eq(look().damaged, 1);
    ATTND_CK_OK(look().off);
    change_file(4096 + slot + BLOCK - 1, "", 1);
    ATTND_CK_OK(run(job_of(KV_TIER_GET, 1, slot, image.sum)).err);
    close_file();
}
END_TEST

// fail_at makes the n-th request on end with a result, and returns how a job ends then.
static void fail_at(kv_tier_op op, int n, int result, const char *why) {
    open_file(1);
    uint64_t slot, more;
    kv_tier_job image = put(0, &slot);
    pthread_mutex_lock(&lock);
    results = n;
    result_is = result;
    pthread_mutex_unlock(&lock);
    ATTND_CK_ERR(run(job_of(op, 1, slot, image.sum)).err, ATTND_EIO);
    ck_assert_msg(strstr(look().why, why) != NULL, "%s", look().why);
    ck_assert(!kv_tier_take(tier, BLOCK, &more));
    kv_tier_close(tier);
    result_is = 0;
}

START_TEST(kv_tier_of_a_file_is_off_after_an_error) {
    if (no_files()) {
        return;
    }
    for (int n = 0; n < 4; n++) { // each piece
        fail_at(KV_TIER_PUT, n, -EIO, "write of the file: Input/output error");
        fail_at(KV_TIER_GET, n, -EIO, "read of the file: Input/output error");
    }
    fail_at(KV_TIER_PUT, 1, -ENOSPC, "No space left on device");
    fail_at(KV_TIER_PUT, 0, 4096, "write of the file: 4096 bytes instead of 1048576");
    unlink(path);
    free(arena.base);
}
END_TEST

START_TEST(kv_tier_of_a_file_cut_off_meanwhile_is_off) {
    if (no_files()) {
        return;
    }
    open_file(1);
    uint64_t slot;
    kv_tier_job image = put(0, &slot);
    ck_assert_int_eq(truncate(path, 4096 + (1 << 20) + 8192), 0);
    ATTND_CK_ERR(run(job_of(KV_TIER_GET, 1, slot, image.sum)).err, ATTND_EIO);
    ck_assert_msg(strstr(look().why, "read of the file: 8192 bytes instead of 1048576"), "%s",
                  look().why);
    close_file();
}
END_TEST

START_TEST(kv_tier_of_a_file_survives) {
    if (no_files()) {
        return;
    }
    open_file(5);
    uint64_t first, second;
    fill(0, 1);
    fill(1, 2);
    kv_tier_job a = put(0, &first), b = put(1, &second);
    ck_assert_uint_lt(first, second);
    kv_tier_close(tier);
    open_file(5);
    ck_assert(kv_tier_claim(tier, first, BLOCK));
    ck_assert(kv_tier_claim(tier, second, BLOCK));
    ATTND_CK_OK(run(job_of(KV_TIER_GET, 4, first, a.sum)).err);
    ATTND_CK_OK(run(job_of(KV_TIER_GET, 5, second, b.sum)).err);
    ck_assert(holds(4, 1) && holds(5, 2));
    kv_tier_close(tier);

    ck_assert_int_eq(truncate(path, (off_t)(4096 + second + BLOCK / 2)), 0);
    open_file(5);
    ck_assert(kv_tier_claim(tier, first, BLOCK));
    ck_assert(!kv_tier_claim(tier, second, BLOCK)); // was cut off
    kv_tier_close(tier);
    struct stat st;
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_int_eq(st.st_size, 4096 + TIER);
    ck_assert_int_ge(st.st_blocks * 512, 4096 + TIER); // all of it is allocated

    open_file(6); // another ledger's
    ck_assert(!kv_tier_claim(tier, first, BLOCK));
    kv_tier_close(tier);
    unlink(path);
    open_file(6); // gone
    ck_assert(!kv_tier_claim(tier, first, BLOCK));
    close_file();
}
END_TEST

START_TEST(kv_tier_of_a_file_leaves_other_files_alone) {
    if (no_files()) {
        return;
    }
    kv_tier_opts opts = opts_of(1);
    change_file(0, "a letter", 8);
    ATTND_CK_ERR(kv_tier_open_file(&tier, &opts, path, &info), ATTND_EINVAL);
    struct stat st;
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_int_eq(st.st_size, 8);
    ATTND_CK_ERR(kv_tier_open_file(&tier, &opts, "/tmp", &info), ATTND_EIO);
    ATTND_CK_ERR(kv_tier_open_file(&tier, &opts, "/nowhere/x", &info), ATTND_EIO);
    ck_assert_str_eq(info.text, "/nowhere/x: open with O_DIRECT: No such file or directory");
    ck_assert_int_eq(truncate(path, 0), 0);
    opts.bytes = UINT64_C(1) << 60; // a whole number of slabs
    ATTND_CK_ERR(kv_tier_open_file(&tier, &opts, path, &info), ATTND_EIO);
    ck_assert_msg(strstr(info.text, "fallocate: ") != NULL, "%s", info.text);
    unlink(path);
    free(arena.base);
}
END_TEST

static void *close_later(void *arg) {
    nanosleep(&(struct timespec){.tv_nsec = 200 * 1000000L}, NULL);
    kv_tier_close(arg);
    return NULL;
}

START_TEST(kv_tier_of_a_file_is_of_one_process) {
    if (no_files()) {
        return;
    }
    open_file(1);
    kv_tier *second = NULL;
    kv_tier_opts opts = opts_of(1);
    ATTND_CK_ERR(kv_tier_open_file(&second, &opts, path, &info), ATTND_EBUSY);
    pthread_t thread; // of one that ends: waited for
    ck_assert_int_eq(pthread_create(&thread, NULL, close_later, tier), 0);
    open_file(1);
    pthread_join(thread, NULL);
    close_file();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("kv_tier");
    TCase *m = tcase_create("memory"), *f = tcase_create("file");
    tcase_add_test(m, kv_tier_of_memory_gives_images_back);
    tcase_add_test(m, kv_tier_of_memory_knows_its_images);
    tcase_add_test(m, kv_tier_of_memory_bounds_its_queue);
    tcase_add_test(m, kv_tier_of_memory_is_off_after_a_failing_copy);
    tcase_add_test(m, kv_tier_of_memory_closes_with_jobs);
    tcase_add_test(m, kv_tier_of_memory_survives_with_its_descriptor);
    tcase_add_test(m, kv_tier_of_memory_that_was_changed_is_no_image);
    tcase_add_test(m, kv_tier_of_memory_is_pinned_for_a_device);
    tcase_add_test(f, kv_tier_of_a_file_gives_images_back);
    tcase_add_test(f, kv_tier_of_a_file_knows_its_images);
    tcase_add_test(f, kv_tier_of_a_file_bounds_its_queue);
    tcase_add_test(f, kv_tier_of_a_file_is_off_after_a_failing_copy);
    tcase_add_test(f, kv_tier_of_a_file_closes_with_jobs);
    tcase_add_test(f, kv_tier_of_a_file_with_a_changed_byte_is_no_image);
    tcase_add_test(f, kv_tier_of_a_file_is_off_after_an_error);
    tcase_add_test(f, kv_tier_of_a_file_cut_off_meanwhile_is_off);
    tcase_add_test(f, kv_tier_of_a_file_survives);
    tcase_add_test(f, kv_tier_of_a_file_leaves_other_files_alone);
    tcase_add_test(f, kv_tier_of_a_file_is_of_one_process);
    tcase_set_timeout(f, 60);
    suite_add_tcase(s, m);
    suite_add_tcase(s, f);
    return s;
}

CHECK_MAIN(suite)
