// Attaching with a region: what the daemon sends behind the ring is not believed, no descriptor is
// kept, and when the daemon goes all flags are lowered, whoever looks.
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/client_conn.h"
#include "proto/proto_region.h"
#include "tests/check_main.h"

enum { REGION = 1 << 20, DATA = 64 << 10, MAX_FDS = 3 };

typedef enum lie {
    TRUTH,
    PAIRS, // no lie, either: the region ends in pairs
    NO_DESCRIPTOR,
    ONE_DESCRIPTOR,
    THREE_DESCRIPTORS,
    UNSEALED,
    SHORT_FLAGS,
    OTHER_FLAGS,
    LESS_BYTES,
    PAIRS_ASKEW, // their place is no multiple of 256,
    PAIRS_BELOW, // or among the bytes that were asked for,
    PAIRS_SHORT, // or they reach past the end,
    PAIRS_PAST,  // or lie behind it
    OTHER_MAGIC,
    SHORT_PACKET,
    HANGUP,
    LIES,
} lie;

static const attnd_err errors[LIES] = {[TRUTH] = ATTND_OK,
                                       [PAIRS] = ATTND_OK,
                                       [PAIRS_ASKEW] = ATTND_EPROTO,
                                       [PAIRS_BELOW] = ATTND_EPROTO,
                                       [PAIRS_SHORT] = ATTND_EPROTO,
                                       [PAIRS_PAST] = ATTND_EPROTO,
                                       [NO_DESCRIPTOR] = ATTND_EPROTO,
                                       [ONE_DESCRIPTOR] = ATTND_EPROTO,
                                       [THREE_DESCRIPTORS] = ATTND_EPROTO,
                                       [UNSEALED] = ATTND_EPROTO,
                                       [SHORT_FLAGS] = ATTND_EPROTO,
                                       [OTHER_FLAGS] = ATTND_EPROTO,
                                       [LESS_BYTES] = ATTND_EPROTO,
                                       [OTHER_MAGIC] = ATTND_EPROTO,
                                       [SHORT_PACKET] = ATTND_EPROTO,
                                       [HANGUP] = ATTND_ECONN};

// fake is a daemon that gives one client what it asks for, with a lie in it.
typedef struct fake {
    pthread_t thread;
    int listen_fd, fd;
    char path[64];
    lie lie;
    proto_attach ask;
    proto_region_ask region_ask;
    ssize_t asked_bytes;
    proto_flag *flags; // mapped here, too
} fake;

static fake f;
static client_conn *conn;
static client_most most;
static attnd_errinfo info;

static int memory(uint64_t bytes, bool sealed) {
    int fd = memfd_create("fake", MFD_ALLOW_SEALING);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    if (sealed) {
        ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    }
    return fd;
}

static void send_packet(int fd, const void *packet, size_t bytes, const int *fds, size_t num) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control = {.space = {0}};
    struct iovec iov = {(void *)(uintptr_t)packet, bytes};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (num > 0) {
        msg.msg_control = control.space;
        msg.msg_controllen = CMSG_SPACE(num * sizeof(int));
        struct cmsghdr *h = CMSG_FIRSTHDR(&msg);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(num * sizeof(int));
        memcpy(CMSG_DATA(h), fds, num * sizeof(int));
    }
    (void)!sendmsg(fd, &msg, MSG_NOSIGNAL);
}

static void send_ring(void) {
    proto_ring_layout layout;
    ck_assert_int_eq(proto_ring_layout_make(&layout, f.ask.entries, f.ask.data_bytes, NULL), 0);
    proto_attach_reply reply = {
        .magic = PROTO_RING_MAGIC, .bytes = layout.bytes, .data_off = layout.data_off};
    int ring = memory(layout.bytes, true);
    send_packet(f.fd, &reply, sizeof(reply), &ring, 1);
    close(ring);
}

// lie_of_pairs places the pairs behind what was asked for, or nearly so.
static void lie_of_pairs(proto_region *r) {
    const uint64_t bytes = PROTO_REGION_MAX_FLAGS * 8; // of the pairs, a multiple of 256
    r->bytes += bytes + 256;
    r->pairs_off = REGION + (f.lie == PAIRS_ASKEW ? 128 : 256);
    r->pairs_off -= f.lie == PAIRS_BELOW ? 512 : 0;
    r->pairs_off += f.lie == PAIRS_SHORT ? 256 : f.lie == PAIRS_PAST ? bytes + 256 : 0;
}

static bool has_pairs(void) {
    return f.lie == PAIRS || (f.lie >= PAIRS_ASKEW && f.lie <= PAIRS_PAST);
}

static void send_region(void) {
    uint64_t flags_bytes = proto_flags_bytes(f.region_ask.num_flags);
    proto_region region = {.magic = PROTO_RING_MAGIC + (f.lie == OTHER_MAGIC),
                           .num_flags = f.region_ask.num_flags - (f.lie == OTHER_FLAGS),
                           .bytes = f.region_ask.bytes / (f.lie == LESS_BYTES ? 2 : 1),
                           .flags_bytes = flags_bytes};
    if (has_pairs()) {
        lie_of_pairs(&region);
    }
    int fds[MAX_FDS] = {memory(region.bytes, true),
                        memory(flags_bytes / (f.lie == SHORT_FLAGS ? 2 : 1), f.lie != UNSEALED)};
    fds[2] = fds[0];
    size_t num = f.lie == NO_DESCRIPTOR       ? 0
                 : f.lie == ONE_DESCRIPTOR    ? 1
                 : f.lie == THREE_DESCRIPTORS ? 3
                                              : 2;
    if (!errors[f.lie]) {
        void *p = mmap(NULL, flags_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[1], 0);
        ck_assert_ptr_ne(p, MAP_FAILED);
        f.flags = (proto_flag *)(void *)((uint8_t *)p + PROTO_FLAGS_HEAD_BYTES);
    }
    size_t bytes = sizeof(region) - (f.lie == SHORT_PACKET ? 8 : 0);
    if (f.lie != HANGUP) {
        send_packet(f.fd, &region, bytes, fds, num);
    }
    close(fds[0]);
    close(fds[1]);
}

static void *serve(void *arg) {
    uint8_t packet[sizeof(f.ask) + sizeof(f.region_ask) + 8];
    (void)arg;
    f.fd = accept(f.listen_fd, NULL, NULL);
    f.asked_bytes = recv(f.fd, packet, sizeof(packet), 0);
    memcpy(&f.ask, packet, sizeof(f.ask));
    memcpy(&f.region_ask, packet + sizeof(f.ask), sizeof(f.region_ask));
    send_ring();
    send_region();
    if (f.lie == HANGUP) {
        shutdown(f.fd, SHUT_RDWR);
    }
    return NULL;
}

static void start(lie l) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    f = (fake){.lie = l};
    snprintf(f.path, sizeof(f.path), "/tmp/attnd_region_%d", (int)getpid());
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", f.path);
    unlink(f.path);
    f.listen_fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    ck_assert_int_eq(bind(f.listen_fd, (const struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert_int_eq(listen(f.listen_fd, 1), 0);
    ck_assert_int_eq(pthread_create(&f.thread, NULL, serve, NULL), 0);
}

static void stop(void) {
    close(f.fd);
    close(f.listen_fd);
    unlink(f.path);
}

// heard_left says that the last packet of the client so far was the one by which it leaves.
static bool heard_left(void) {
    proto_attach_left left = {0}, last = {0};
    while (recv(f.fd, &left, sizeof(left), MSG_DONTWAIT) > 0) {
        last = left;
    }
    return last.magic == PROTO_ATTACH_LEFT;
}

// hung_up says whether the client has, or does within ms.
static bool hung_up(int ms) {
    struct pollfd p = {.fd = f.fd, .events = POLLRDHUP};
    return poll(&p, 1, ms) == 1;
}

static int num_fds(void) {
    int num = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir)) {
        num++;
    }
    closedir(dir);
    return num;
}

// ---- an engine that looks at what it is given

static bool closed, left_early;
static attnd_err open_err;

static attnd_err device(uint8_t uuid[16], bool *mps, attnd_errinfo *e) {
    (void)e;
    memset(uuid, 7, 16);
    *mps = true;
    return ATTND_OK;
}

static attnd_err open_region(void **state, void **base, const attnd_service_opts *opts,
                             attnd_errinfo *e) {
    bool pairs = f.lie == PAIRS;
    ck_assert_uint_eq(opts->bytes, REGION + (pairs ? 256 + PROTO_REGION_MAX_FLAGS * 8 : 0));
    ck_assert_uint_eq(opts->pairs_off, pairs ? REGION + 256 : 0);
    ck_assert_uint_eq(opts->flags_bytes, proto_flags_bytes(PROTO_REGION_MAX_FLAGS));
    *state = *base = malloc(1);
    return open_err ? attnd_fail(e, open_err, "engine", "asked for") : ATTND_OK;
}

static void close_region(void *state) {
    closed = true;
    left_early = heard_left();
    free(state);
}

static const attnd_service ops = {.device = device, .open = open_region, .close = close_region};
static const attnd_engine engine = {.name = "test", .service = &ops};

static attnd_err dial(void) {
    client_ring_opts opts = {.path = f.path,
                             .timeout_ms = 3000,
                             .data_bytes = DATA,
                             .engine = &engine,
                             .region_bytes = REGION};
    attnd_err err = client_ring_open(&conn, &opts, &most, &info);
    pthread_join(f.thread, NULL);
    return err;
}

START_TEST(region_that_is_nonsense_is_refused_and_nothing_kept) {
    int before = num_fds();
    start((lie)_i);
    ATTND_CK_ERR(dial(), errors[_i]);
    ck_assert_int_eq(f.asked_bytes, (ssize_t)(sizeof(f.ask) + sizeof(f.region_ask)));
    ck_assert_uint_eq(f.ask.flags, PROTO_ATTACH_REGION);
    ck_assert_uint_eq(f.region_ask.bytes, REGION);
    ck_assert_uint_eq(f.region_ask.num_flags, PROTO_REGION_MAX_FLAGS);
    ck_assert_uint_eq(f.region_ask.flags, PROTO_REGION_MPS | PROTO_REGION_PAIRS);
    ck_assert_uint_eq(f.region_ask.device[3], 7);
    if (!errors[_i]) {
        client_conn_close(conn);
    }
    ck_assert(closed == !errors[_i]);
    ck_assert(heard_left() == (_i != HANGUP));
    stop();
    ck_assert_int_eq(num_fds(), before);
}
END_TEST

START_TEST(region_that_the_engine_does_not_take_is_given_back) {
    int before = num_fds();
    open_err = ATTND_ENOTSUP;
    start(TRUTH);
    ATTND_CK_ERR(dial(), ATTND_ENOTSUP);
    ck_assert(heard_left());
    stop();
    ck_assert_int_eq(num_fds(), before);
}
END_TEST

static bool all_done(void) {
    for (int i = 0; i < PROTO_REGION_MAX_FLAGS; i++) {
        if (!__atomic_load_n(&f.flags[i].done, __ATOMIC_ACQUIRE)) {
            return false;
        }
    }
    return true;
}

static bool await_done(void) {
    for (int i = 0; i < 1000 && !all_done(); i++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return all_done();
}

// Nobody makes a call meanwhile.
START_TEST(region_flags_are_lowered_when_the_daemon_goes) {
    start(TRUTH);
    ATTND_CK_OK(dial());
    ck_assert(!all_done());
    ck_assert(!client_conn_is_lost(conn));
    stop();
    ck_assert(await_done());
    ck_assert(client_conn_is_lost(conn));
    __atomic_store_n(&f.flags[PROTO_REGION_MAX_FLAGS - 1].done, 0, __ATOMIC_RELEASE);
    ck_assert(await_done()); // again and again
    client_conn_close(conn);
    ck_assert(closed);
}
END_TEST

START_TEST(region_flags_are_lowered_when_the_client_closes) {
    start(TRUTH);
    ATTND_CK_OK(dial());
    client_conn_hold(conn);
    client_conn_close(conn);
    ck_assert(await_done());
    ck_assert(!closed); // somebody may still look
    ck_assert(!heard_left() && !hung_up(0));
    client_conn_rele(conn);
    ck_assert(closed && !left_early);
    ck_assert(heard_left() && hung_up(0)); // the streams have ended, the region is not mapped
    stop();
}
END_TEST

// Whoever keeps the connection, or a stream that does not end, does not keep the session.
START_TEST(session_ends_without_a_word_when_streams_do_not) {
    start(TRUTH);
    ATTND_CK_OK(dial());
    client_conn_hold(conn);
    client_conn_close(conn);
    ck_assert(hung_up(5000));
    ck_assert(!closed && !heard_left());
    client_conn_rele(conn);
    ck_assert(closed && !heard_left());
    stop();
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("client_region");
    TCase *tc = tcase_create("region");
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, region_that_is_nonsense_is_refused_and_nothing_kept, 0, LIES);
    tcase_add_test(tc, region_that_the_engine_does_not_take_is_given_back);
    tcase_add_test(tc, region_flags_are_lowered_when_the_daemon_goes);
    tcase_add_test(tc, region_flags_are_lowered_when_the_client_closes);
    tcase_add_test(tc, session_ends_without_a_word_when_streams_do_not);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
