// One ring, both ends in this process: the daemon's by srv_ring, the client's by a mapping of its
// own of the same memfd.  Offsets are worked out by hand for 4 entries: submissions at 4096 (32
// bytes each), completions at 4224 (16 each), data from 8192 on.
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server/srv_ring.h"
#include "tests/check_main.h"

enum { ENTRIES = 4, SQ = 4096, CQ = 4224, DATA = 8192, DATA_BYTES = 8192, END = 16384 };

static srv_ring ring;
static srv_ring_call call;
static attnd_errinfo info;
static int fd;
static uint8_t *region; // the client's mapping
static proto_ring *head;

static void setup(void) {
    ATTND_CK_OK(srv_ring_open(&ring, ENTRIES, DATA_BYTES, &fd, &info));
    region = mmap(NULL, END, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(region, MAP_FAILED);
    head = (proto_ring *)(void *)region;
}

static void teardown(void) {
    munmap(region, END);
    close(fd);
    srv_ring_close(&ring);
}

// submit writes an entry and publishes it.
static void submit(uint64_t msg_off, uint32_t msg_bytes, uint64_t reply_off, uint32_t reply_bytes,
                   uint64_t user) {
    proto_ring_submit s = {msg_off, msg_bytes, reply_bytes, reply_off, user};
    memcpy(region + SQ + head->sq_tail % ENTRIES * 32, &s, 32);
    head->sq_tail++;
}

static void submit_good(uint64_t user) {
    submit(DATA, 64, DATA + 4096, 512, user);
}

// completion reads the next one as a client does.
static proto_ring_complete completion(void) {
    proto_ring_complete c;
    ck_assert_uint_ne(head->cq_tail, head->cq_head);
    memcpy(&c, region + CQ + head->cq_head % ENTRIES * 16, 16);
    head->cq_head++;
    return c;
}

static void ck_refused(attnd_err status) {
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_REFUSED);
    proto_ring_complete c = completion();
    ATTND_CK_ERR((attnd_err)c.status, status);
    ck_assert_uint_eq(c.reply_bytes, 0);
    ck_assert_uint_eq(c.user, 7);
}

// ---- region

START_TEST(the_head_tells_the_geometry) {
    ck_assert_uint_eq(head->magic, 0x474e5241);
    ck_assert_uint_eq(head->version, PROTO_VERSION);
    ck_assert_uint_eq(head->entries, ENTRIES);
    ck_assert_uint_eq(head->sq_off, SQ);
    ck_assert_uint_eq(head->cq_off, CQ);
    ck_assert_uint_eq(head->data_off, DATA);
    ck_assert_uint_eq(head->data_bytes, DATA_BYTES);
}
END_TEST

START_TEST(the_region_cannot_change_its_size) {
    struct stat st;
    ck_assert_int_eq(fstat(fd, &st), 0);
    ck_assert_int_eq(st.st_size, END);
    ck_assert_int_eq(ftruncate(fd, 0), -1);
    ck_assert_int_eq(errno, EPERM);
    ck_assert_int_eq(ftruncate(fd, END + 4096), -1);
    ck_assert_int_eq(errno, EPERM);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
}
END_TEST

START_TEST(a_hole_reads_as_zeros_and_harms_nobody) {
    submit_good(1);
    ck_assert_int_eq(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, END), 0);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_EMPTY);
    submit_good(1);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
}
END_TEST

START_TEST(what_cannot_be_is_refused) {
    srv_ring other;
    int other_fd = -1;
    ATTND_CK_ERR(srv_ring_open(&other, 3, 4096, &other_fd, &info), ATTND_EINVAL);
    ATTND_CK_ERR(srv_ring_open(&other, 4, 0, &other_fd, &info), ATTND_EINVAL);
    ATTND_CK_ERR(srv_ring_open(&other, 4, UINT64_MAX, &other_fd, &info), ATTND_EMSGSIZE);
    ck_assert_int_eq(other_fd, -1);
    srv_ring_close(&other); // is no ring, and that is fine
}
END_TEST

// ---- queues

START_TEST(a_call_names_places_in_the_region) {
    submit(DATA + 128, 96, DATA + 4096, 4096, 99);
    ck_assert(srv_ring_pending(&ring));
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
    ck_assert(!srv_ring_pending(&ring));
    ck_assert_ptr_eq(call.msg.data, ring.base + DATA + 128);
    ck_assert_uint_eq(call.msg.bytes, 96);
    ck_assert_ptr_eq(call.reply, ring.base + DATA + 4096);
    ck_assert_uint_eq(call.reply_bytes, 4096); // up to the last byte of the region
    ck_assert_uint_eq(call.user, 99);
    ck_assert_uint_eq(head->sq_head, 1);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_EMPTY);
}
END_TEST

START_TEST(a_completion_comes_back_with_its_user) {
    submit_good(99);
    srv_ring_take(&ring, &call);
    ck_assert_uint_eq(head->cq_tail, 0);
    srv_ring_post(&ring, call.user, 264, ATTND_ESTALE);
    ck_assert_uint_eq(head->cq_tail, 1);
    proto_ring_complete c = completion();
    ck_assert_uint_eq(c.user, 99);
    ck_assert_uint_eq(c.reply_bytes, 264);
    ck_assert_int_eq(c.status, ATTND_ESTALE);
}
END_TEST

START_TEST(calls_are_taken_in_order_and_completed_in_any) {
    for (uint64_t i = 1; i <= ENTRIES; i++) {
        submit_good(i);
    }
    for (uint64_t i = 1; i <= ENTRIES; i++) {
        ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
        ck_assert_uint_eq(call.user, i);
    }
    for (uint64_t i = ENTRIES; i > 0; i--) {
        srv_ring_post(&ring, i, 0, ATTND_OK);
        ck_assert_uint_eq(completion().user, i);
    }
}
END_TEST

START_TEST(indices_wrap_at_32_bits) {
    ring.sq_head = ring.cq_tail = UINT32_MAX - 1; // as after so many calls
    head->sq_tail = head->cq_head = head->sq_head = head->cq_tail = UINT32_MAX - 1;
    for (uint64_t i = 1; i <= 3 * ENTRIES; i++) {
        submit_good(i);
        ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
        ck_assert_uint_eq(call.user, i);
        srv_ring_post(&ring, i, 0, ATTND_OK);
        ck_assert_uint_eq(completion().user, i);
    }
    ck_assert_uint_eq(head->sq_head, 3 * ENTRIES - 2);
}
END_TEST

START_TEST(the_heads_own_words_are_not_believed) {
    submit_good(5);
    memset(region, 0xff, 64);        // geometry
    memset(region + 128, 0xff, 128); // what only the daemon writes
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
    ck_assert_ptr_eq(call.msg.data, ring.base + DATA);
    srv_ring_post(&ring, 5, 0, ATTND_OK);
    ck_assert_uint_eq(head->sq_head, 1);
    ck_assert_uint_eq(head->cq_tail, 1);
}
END_TEST

// ---- abuse of indices

START_TEST(a_tail_that_jumps_breaks_the_ring) {
    head->sq_tail = ENTRIES + 1;
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_BROKEN);
    head->sq_tail = 0x80000000u;
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_BROKEN);
}
END_TEST

START_TEST(a_tail_that_goes_back_breaks_the_ring) {
    submit_good(1);
    srv_ring_take(&ring, &call);
    head->sq_tail = 0;
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_BROKEN);
}
END_TEST

START_TEST(completions_read_before_they_came_break_the_ring) {
    head->cq_head = 1;
    submit_good(1);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_BROKEN);
}
END_TEST

START_TEST(a_cq_head_far_behind_breaks_the_ring) {
    head->cq_head = 0u - ENTRIES - 1;
    submit_good(1);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_BROKEN);
}
END_TEST

START_TEST(more_outstanding_than_entries_break_the_ring) {
    for (int i = 0; i < ENTRIES; i++) {
        submit_good(1);
        ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
    }
    submit_good(1);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_BROKEN);
}
END_TEST

START_TEST(unread_completions_are_outstanding) {
    for (int i = 0; i < ENTRIES; i++) {
        submit_good(1);
        ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
        srv_ring_post(&ring, 1, 0, ATTND_OK);
    }
    submit_good(1);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_BROKEN);
    completion();
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
}
END_TEST

// ---- places

START_TEST(a_message_must_lie_in_the_data_area) {
    static const struct {
        uint64_t off;
        uint32_t bytes;
    } bad[] = {
        {0, 64},                        // the head
        {SQ, 64},                       // the queues
        {DATA - 64, 64},                // just before
        {END, 64},                      // behind the end
        {END - 64, 65},                 // over the end
        {DATA, DATA_BYTES + 1},         //
        {DATA, UINT32_MAX},             //
        {DATA + 8, 64},                 // not aligned
        {DATA + 63, 64},                //
        {UINT64_MAX - 63, 64},          // overflows
        {UINT64_MAX - 63, UINT32_MAX},  //
        {(UINT64_C(1) << 63) + 64, 64}, //
        {DATA, 31},                     // shorter than a header
        {DATA, 0},                      //
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        submit(bad[i].off, bad[i].bytes, DATA, 512, 7);
        ck_refused(ATTND_EPROTO);
    }
    submit(END - 64, 64, DATA, 512, 1); // the last place there is
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
}
END_TEST

START_TEST(a_reply_must_lie_in_the_data_area) {
    static const struct {
        uint64_t off;
        uint32_t bytes;
    } bad[] = {{0, 512},
               {CQ, 512},
               {DATA - 64, 512},
               {END, 512},
               {END - 448, 512},
               {DATA + 32, 512},
               {DATA, DATA_BYTES + 64},
               {DATA, UINT32_MAX},
               {UINT64_MAX, 512},
               {0xffffffff00000000u, 512}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        submit(DATA, 64, bad[i].off, bad[i].bytes, 7);
        ck_refused(ATTND_EPROTO);
    }
}
END_TEST

START_TEST(a_reply_has_room_for_an_error) {
    submit(DATA, 64, DATA, 0, 7);
    ck_refused(ATTND_EMSGSIZE);
    submit(DATA, 64, DATA, 263, 7);
    ck_refused(ATTND_EMSGSIZE);
    submit(DATA, 64, DATA, 264, 1); // header 32, error 232
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
}
END_TEST

START_TEST(places_may_overlap) {
    submit(DATA, DATA_BYTES, DATA, DATA_BYTES, 1);
    submit(DATA + 64, 128, DATA, DATA_BYTES, 2);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
    ck_assert_int_eq(srv_ring_take(&ring, &call), SRV_RING_CALL);
}
END_TEST

START_TEST(refused_submissions_keep_no_room) {
    for (int i = 0; i < 3 * ENTRIES; i++) {
        submit(0, 0, 0, 0, 7);
        ck_refused(ATTND_EPROTO);
    }
    ck_assert_uint_eq(ring.unanswered, 0);
}
END_TEST

// ---- sleeping

START_TEST(the_sleep_flag_is_the_daemons) {
    srv_ring_set_sleeps(&ring, true);
    ck_assert_uint_eq(head->daemon_sleeps, 1);
    srv_ring_set_sleeps(&ring, false);
    ck_assert_uint_eq(head->daemon_sleeps, 0);
}
END_TEST

START_TEST(nobody_is_woken_without_a_completion) {
    head->client_waits = 1;
    srv_ring_wake(&ring);
    ck_assert_uint_eq(head->client_waits, 1);
    submit_good(1);
    srv_ring_take(&ring, &call);
    srv_ring_post(&ring, 1, 0, ATTND_OK);
    ck_assert_uint_eq(head->client_waits, 1); // only when asked to
    srv_ring_wake(&ring);
    ck_assert_uint_eq(head->client_waits, 0);
}
END_TEST

static void *wait_for_completion(void *arg) {
    struct timespec bound = {.tv_sec = 20};
    (void)arg;
    __atomic_store_n(&head->client_waits, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&head->cq_tail, __ATOMIC_ACQUIRE) == 0) {
        if (syscall(SYS_futex, &head->cq_tail, FUTEX_WAIT, 0, &bound, NULL, 0) != 0 &&
            errno == ETIMEDOUT) {
            return (void *)1;
        }
    }
    return NULL;
}

START_TEST(a_waiting_client_is_woken_through_its_own_mapping) {
    pthread_t thread;
    void *timed_out;
    ck_assert_int_eq(pthread_create(&thread, NULL, wait_for_completion, NULL), 0);
    while (!__atomic_load_n(&head->client_waits, __ATOMIC_SEQ_CST)) {
        usleep(1000);
    }
    usleep(20000); // asleep by now, most likely
    submit_good(1);
    srv_ring_take(&ring, &call);
    srv_ring_post(&ring, 1, 0, ATTND_OK);
    srv_ring_wake(&ring);
    ck_assert_int_eq(pthread_join(thread, &timed_out), 0);
    ck_assert_ptr_null(timed_out);
}
END_TEST

// ---- anything

static uint64_t rng = 88172645463325252u;

static uint64_t draw(void) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    return rng ^= rng << 17;
}

// likely draws a number that is mostly good, now and then just off, or anything.
static uint64_t likely(uint64_t first, uint64_t step, uint64_t range) {
    uint64_t kind = draw() % 16;
    return kind > 1 ? first + draw() % range / step * step : kind ? draw() % (2 * END) : draw();
}

// scribble writes a random submission at a random place, and a word of the head.
static void scribble(void) {
    static const uint16_t places[] = {64, 68, 72, 128, 132, 136, 0, 16, 40};
    proto_ring_submit s = {.msg_off = likely(DATA, 64, DATA_BYTES),
                           .msg_bytes = (uint32_t)likely(0, 1, DATA_BYTES),
                           .reply_bytes = (uint32_t)likely(0, 1, DATA_BYTES),
                           .reply_off = likely(DATA, 64, DATA_BYTES),
                           .user = draw()};
    memcpy(region + SQ + draw() % ENTRIES * sizeof(s), &s, sizeof(s));
    uint32_t value = draw() % 8 ? ring.sq_head + (uint32_t)(draw() % ENTRIES) : (uint32_t)draw();
    memcpy(region + places[draw() % 9], &value, sizeof(value));
}

START_TEST(whatever_is_in_the_region_a_call_lies_in_its_data) {
    uint64_t calls = 0, broken = 0, held[ENTRIES];
    uint32_t num = 0;
    for (int i = 0; i < 300000; i++) {
        scribble();
        srv_ring_found found = srv_ring_take(&ring, &call);
        ck_assert_uint_le(ring.unanswered, ENTRIES);
        if (found == SRV_RING_CALL) {
            calls++;
            ck_assert(call.msg.data >= ring.base + DATA);
            ck_assert_uint_ge(call.msg.bytes, 32);
            ck_assert(call.msg.data + call.msg.bytes <= ring.base + END);
            ck_assert(call.reply >= ring.base + DATA);
            ck_assert_uint_ge(call.reply_bytes, 264);
            ck_assert(call.reply + call.reply_bytes <= ring.base + END);
            held[num++] = call.user;
        } else if (found == SRV_RING_BROKEN) {
            broken++;
            head->sq_tail = ring.sq_head + 1; // and on
            head->cq_head = ring.cq_tail;
        }
        while (num > 0 && (num == ENTRIES || draw() % 2)) {
            srv_ring_post(&ring, held[--num], 264, ATTND_OK);
            srv_ring_wake(&ring);
        }
    }
    ck_assert_uint_gt(calls, 1000);
    ck_assert_uint_gt(broken, 1000);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_ring");
    TCase *tc = tcase_create("ring");
    tcase_set_timeout(tc, 60);
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, the_head_tells_the_geometry);
    tcase_add_test(tc, the_region_cannot_change_its_size);
    tcase_add_test(tc, a_hole_reads_as_zeros_and_harms_nobody);
    tcase_add_test(tc, what_cannot_be_is_refused);
    tcase_add_test(tc, a_call_names_places_in_the_region);
    tcase_add_test(tc, a_completion_comes_back_with_its_user);
    tcase_add_test(tc, calls_are_taken_in_order_and_completed_in_any);
    tcase_add_test(tc, indices_wrap_at_32_bits);
    tcase_add_test(tc, the_heads_own_words_are_not_believed);
    tcase_add_test(tc, a_tail_that_jumps_breaks_the_ring);
    tcase_add_test(tc, a_tail_that_goes_back_breaks_the_ring);
    tcase_add_test(tc, completions_read_before_they_came_break_the_ring);
    tcase_add_test(tc, a_cq_head_far_behind_breaks_the_ring);
    tcase_add_test(tc, more_outstanding_than_entries_break_the_ring);
    tcase_add_test(tc, unread_completions_are_outstanding);
    tcase_add_test(tc, a_message_must_lie_in_the_data_area);
    tcase_add_test(tc, a_reply_must_lie_in_the_data_area);
    tcase_add_test(tc, a_reply_has_room_for_an_error);
    tcase_add_test(tc, places_may_overlap);
    tcase_add_test(tc, refused_submissions_keep_no_room);
    tcase_add_test(tc, the_sleep_flag_is_the_daemons);
    tcase_add_test(tc, nobody_is_woken_without_a_completion);
    tcase_add_test(tc, a_waiting_client_is_woken_through_its_own_mapping);
    tcase_add_test(tc, whatever_is_in_the_region_a_call_lies_in_its_data);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
