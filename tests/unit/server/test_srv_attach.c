// The attach socket: its path and permissions, who is at the other end, packets, descriptors that
// come uninvited, and what happens when the process has none left.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/srv_attach.h"
#include "tests/check_main.h"

enum { MAX_RIGHTS = 253 }; // of one message, says the kernel

static char dir[64], path[96];
static srv_attach a;
static attnd_errinfo info;

static void setup(void) {
    strcpy(dir, "/tmp/attnd_attach_XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/s.attach", dir);
    ATTND_CK_OK(srv_attach_listen(&a, path, 0640, &info));
}

static void teardown(void) {
    srv_attach_close(&a);
    ck_assert_int_eq(rmdir(dir), 0); // neither socket nor lock file is left
}

static int dial(int type) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

// num_fds counts the descriptors of this process.
static int num_fds(void) {
    int num = 0;
    for (int fd = 0; fd < 1024; fd++) {
        num += fcntl(fd, F_GETFD) >= 0;
    }
    return num;
}

// send_rights sends a packet of bytes with num copies of a descriptor.
static void send_rights(int to, int what, int num, size_t bytes) {
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(MAX_RIGHTS * sizeof(int))];
    } control;
    char packet[64] = {0};
    struct iovec iov = {packet, bytes};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = CMSG_SPACE((size_t)num * sizeof(int))};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN((size_t)num * sizeof(int));
    for (int i = 0; i < num; i++) {
        memcpy(CMSG_DATA(c) + (size_t)i * sizeof(int), &what, sizeof(int));
    }
    ck_assert_int_eq(sendmsg(to, &msg, 0), (ssize_t)bytes);
}

START_TEST(the_socket_has_its_permissions) {
    struct stat st;
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert(S_ISSOCK(st.st_mode));
    ck_assert_uint_eq(st.st_mode & 0777, 0640);
    ck_assert_str_eq(a.path, path);
}
END_TEST

START_TEST(a_second_daemon_leaves_the_first_alone) {
    srv_attach second;
    ATTND_CK_ERR(srv_attach_listen(&second, path, 0600, &info), ATTND_EEXIST);
    int fd = dial(SOCK_SEQPACKET);
    ck_assert_int_ge(fd, 0);
    close(fd);
}
END_TEST

START_TEST(the_peers_user_is_known) {
    uint32_t uid = 12345;
    ck_assert_int_eq(srv_attach_accept(&a, &uid), -1); // nobody yet
    int client = dial(SOCK_SEQPACKET), fd = srv_attach_accept(&a, &uid);
    ck_assert_int_ge(fd, 0);
    ck_assert_uint_eq(uid, getuid());
    ck_assert_int_ne(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    ck_assert_int_ne(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
    close(client);
    close(fd);
}
END_TEST

START_TEST(other_kinds_of_socket_do_not_connect) {
    ck_assert_int_eq(dial(SOCK_STREAM), -1);
    ck_assert_int_eq(dial(SOCK_DGRAM), -1);
}
END_TEST

START_TEST(packets_keep_their_bounds) {
    uint32_t uid;
    char got[8] = "";
    size_t bytes = 0;
    int client = dial(SOCK_SEQPACKET), fd = srv_attach_accept(&a, &uid);
    ck_assert_int_eq(srv_attach_recv(fd, got, sizeof(got), &bytes), SRV_ATTACH_NONE);
    ck_assert_int_eq(send(client, "abc", 3, 0), 3);
    ck_assert_int_eq(send(client, "0123456789", 10, 0), 10);
    ck_assert_int_eq(srv_attach_recv(fd, got, sizeof(got), &bytes), SRV_ATTACH_PACKET);
    ck_assert_uint_eq(bytes, 3);
    ck_assert_mem_eq(got, "abc", 3);
    ck_assert_int_eq(srv_attach_recv(fd, got, sizeof(got), &bytes), SRV_ATTACH_PACKET);
    ck_assert_uint_eq(bytes, 10); // cut, and it says so
    ck_assert_int_eq(srv_attach_recv(fd, got, sizeof(got), &bytes), SRV_ATTACH_NONE);
    close(client);
    ck_assert_int_eq(srv_attach_recv(fd, got, sizeof(got), &bytes), SRV_ATTACH_GONE);
    close(fd);
}
END_TEST

START_TEST(descriptors_never_get_in) {
    static const int nums[] = {1, 2, 16, MAX_RIGHTS};
    uint32_t uid;
    char got[64];
    size_t bytes;
    int pipes[2];
    ck_assert_int_eq(pipe(pipes), 0);
    int memfd = memfd_create("x", 0), file = open("/proc/self/status", O_RDONLY);
    const int kinds[] = {memfd, file, pipes[0], pipes[1], a.fd};
    for (int k = 0; k < 5; k++) {
        for (int i = 0; i < 4; i++) {
            int client = dial(SOCK_SEQPACKET), fd = srv_attach_accept(&a, &uid);
            int before = num_fds();
            send_rights(client, kinds[k], nums[i], 1 + (size_t)i * 16);
            ck_assert_int_eq(srv_attach_recv(fd, got, sizeof(got), &bytes), SRV_ATTACH_RIGHTS);
            ck_assert_int_eq(num_fds(), before);
            close(client);
            close(fd);
        }
    }
    close(pipes[1]);
    ck_assert_int_eq(read(pipes[0], got, 1), 0); // no copy of the write end lives on
    close(pipes[0]);
    close(memfd);
    close(file);
}
END_TEST

START_TEST(a_descriptor_can_be_passed) {
    uint32_t uid;
    int client = dial(SOCK_SEQPACKET), fd = srv_attach_accept(&a, &uid);
    int memfd = memfd_create("x", 0);
    ck_assert_int_eq(ftruncate(memfd, 12345), 0);
    ck_assert(srv_attach_send(fd, "hello", 5, &memfd, 1));
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    char got[8];
    struct iovec iov = {got, sizeof(got)};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = sizeof(control.space)};
    ck_assert_int_eq(recvmsg(client, &msg, 0), 5);
    int passed;
    memcpy(&passed, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(passed));
    struct stat st;
    ck_assert_int_eq(fstat(passed, &st), 0);
    ck_assert_int_eq(st.st_size, 12345);
    close(client);
    ck_assert(!srv_attach_send(fd, "hello", 5, NULL, 0)); // and no SIGPIPE
    close(passed);
    close(memfd);
    close(fd);
}
END_TEST

START_TEST(peers_are_turned_away_when_no_descriptor_is_left) {
    uint32_t uid;
    int clients[4];
    for (int i = 0; i < 4; i++) {
        clients[i] = dial(SOCK_SEQPACKET);
    }
    int first = srv_attach_accept(&a, &uid);
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    rlim_t most = limit.rlim_cur;
    int lowest = dup(0); // the number that the next descriptor would have
    close(lowest);
    limit.rlim_cur = (rlim_t)lowest;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int i = 0; i < 3; i++) {
        char byte;
        ck_assert_int_eq(srv_attach_accept(&a, &uid), -1);
        ck_assert_int_eq(recv(clients[1 + i], &byte, 1, 0), 0); // closed, not left waiting
    }
    limit.rlim_cur = most;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    int again = dial(SOCK_SEQPACKET), fd = srv_attach_accept(&a, &uid);
    ck_assert_int_ge(fd, 0);
    for (int i = 0; i < 4; i++) {
        close(clients[i]);
    }
    close(first);
    close(again);
    close(fd);
}
END_TEST

// ---- a socket that somebody else made

START_TEST(a_socket_handed_over_is_served_and_its_path_left) {
    srv_attach handed;
    int fd = dup(a.fd);
    uint32_t uid;
    ATTND_CK_OK(srv_attach_adopt(&handed, fd, &info));
    ck_assert_str_eq(handed.path, path);
    int client = dial(SOCK_SEQPACKET), conn = srv_attach_accept(&handed, &uid);
    ck_assert_int_ge(conn, 0);
    srv_attach_close(&handed);
    ck_assert_int_eq(access(path, F_OK), 0);
    close(client);
    close(conn);
}
END_TEST

START_TEST(other_descriptors_are_not_taken_over) {
    srv_attach handed;
    int pair[2], stream = socket(AF_UNIX, SOCK_STREAM, 0), tcp = socket(AF_INET, SOCK_STREAM, 0);
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    int memfd = memfd_create("x", 0);
    const int bad[] = {stream, tcp, pair[0], memfd, 999};
    for (int i = 0; i < 5; i++) {
        ATTND_CK_ERR(srv_attach_adopt(&handed, bad[i], &info), ATTND_EINVAL);
        ck_assert_str_eq(info.field, "attach_socket");
    }
    close(pair[0]);
    close(pair[1]);
    close(stream);
    close(tcp);
    close(memfd);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_attach");
    TCase *tc = tcase_create("attach");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, the_socket_has_its_permissions);
    tcase_add_test(tc, a_second_daemon_leaves_the_first_alone);
    tcase_add_test(tc, the_peers_user_is_known);
    tcase_add_test(tc, other_kinds_of_socket_do_not_connect);
    tcase_add_test(tc, packets_keep_their_bounds);
    tcase_add_test(tc, descriptors_never_get_in);
    tcase_add_test(tc, a_descriptor_can_be_passed);
    tcase_add_test(tc, peers_are_turned_away_when_no_descriptor_is_left);
    tcase_add_test(tc, a_socket_handed_over_is_served_and_its_path_left);
    tcase_add_test(tc, other_descriptors_are_not_taken_over);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
