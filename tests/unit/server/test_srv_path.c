// Who owns a socket's path.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/srv_path.h"
#include "tests/check_main.h"

static char dir[64], path[96], lock[108];
static srv_path claim;
static attnd_errinfo info;

static void setup(void) {
    strcpy(dir, "/tmp/attnd_path_XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/s", dir);
    snprintf(lock, sizeof(lock), "%s.lock", path);
}

static void teardown(void) {
    unlink(path);
    unlink(lock);
    rmdir(dir);
}

static int listen_at(const char *where) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strcpy(addr.sun_path, where);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    ck_assert_int_eq(listen(fd, 1), 0);
    return fd;
}

START_TEST(an_empty_path_is_claimed_and_released) {
    ATTND_CK_OK(srv_path_claim(&claim, path, &info));
    ck_assert_int_eq(access(lock, F_OK), 0);
    srv_path_release(&claim);
    ck_assert_int_ne(access(lock, F_OK), 0);
    srv_path_release(&claim); // again
    ATTND_CK_OK(srv_path_claim(&claim, path, &info));
    srv_path_release(&claim);
}
END_TEST

START_TEST(a_claimed_path_is_refused_to_another) {
    srv_path other;
    ATTND_CK_OK(srv_path_claim(&claim, path, &info));
    ATTND_CK_ERR(srv_path_claim(&other, path, &info), ATTND_EEXIST);
    ck_assert_int_eq(access(lock, F_OK), 0);
    srv_path_release(&claim);
}
END_TEST

START_TEST(the_lock_dies_with_its_process) {
    pid_t pid = fork();
    if (pid == 0) {
        _exit(srv_path_claim(&claim, path, &info) == ATTND_OK ? 0 : 1);
    }
    int status;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_int_eq(status, 0);
    ck_assert_int_eq(access(lock, F_OK), 0); // left behind
    ATTND_CK_OK(srv_path_claim(&claim, path, &info));
    srv_path_release(&claim);
}
END_TEST

START_TEST(a_dead_socket_is_removed_and_a_live_one_is_not) {
    int fd = listen_at(path);
    ATTND_CK_ERR(srv_path_claim(&claim, path, &info), ATTND_EEXIST);
    ck_assert_int_eq(access(path, F_OK), 0);
    ck_assert_int_ne(access(lock, F_OK), 0);
    close(fd);
    ATTND_CK_OK(srv_path_claim(&claim, path, &info));
    ck_assert_int_ne(access(path, F_OK), 0);
    srv_path_release(&claim);
}
END_TEST

START_TEST(files_links_and_folders_are_never_removed) {
    struct stat st;
    close(open(path, O_CREAT | O_WRONLY, 0600));
    ATTND_CK_ERR(srv_path_claim(&claim, path, &info), ATTND_EEXIST);
    ck_assert(lstat(path, &st) == 0 && S_ISREG(st.st_mode));
    unlink(path);
    char other[100];
    snprintf(other, sizeof(other), "%s/t", dir);
    int fd = listen_at(other); // a link to a dead socket is still a link
    close(fd);
    ck_assert_int_eq(symlink(other, path), 0);
    ATTND_CK_ERR(srv_path_claim(&claim, path, &info), ATTND_EEXIST);
    ck_assert(lstat(path, &st) == 0 && S_ISLNK(st.st_mode));
    unlink(path);
    unlink(other);
}
END_TEST

START_TEST(a_lock_that_is_a_link_is_refused) {
    char target[100];
    struct stat st;
    snprintf(target, sizeof(target), "%s/target", dir);
    ck_assert_int_eq(symlink(target, lock), 0);
    ATTND_CK_ERR(srv_path_claim(&claim, path, &info), ATTND_EIO);
    ck_assert_int_ne(lstat(target, &st), 0);
}
END_TEST

START_TEST(paths_have_the_length_of_a_sockets_name) {
    char longest[200];
    memset(longest, 'x', sizeof(longest));
    longest[199] = '\0';
    ATTND_CK_ERR(srv_path_claim(&claim, longest, &info), ATTND_EINVAL);
    ATTND_CK_ERR(srv_path_claim(&claim, "", &info), ATTND_EINVAL);
    ATTND_CK_ERR(srv_path_claim(&claim, "/nonexistent/s", &info), ATTND_EIO);
    int n = snprintf(longest, sizeof(longest), "%s/", dir);
    longest[n] = 'y';
    longest[107] = '\0'; // 107 bytes and a NUL are 108
    ATTND_CK_OK(srv_path_claim(&claim, longest, &info));
    srv_path_release(&claim);
}
END_TEST

static Suite *suite(void) {
    Suite *s = suite_create("srv_path");
    TCase *tc = tcase_create("srv_path");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_test(tc, an_empty_path_is_claimed_and_released);
    tcase_add_test(tc, a_claimed_path_is_refused_to_another);
    tcase_add_test(tc, the_lock_dies_with_its_process);
    tcase_add_test(tc, a_dead_socket_is_removed_and_a_live_one_is_not);
    tcase_add_test(tc, files_links_and_folders_are_never_removed);
    tcase_add_test(tc, a_lock_that_is_a_link_is_refused);
    tcase_add_test(tc, paths_have_the_length_of_a_sockets_name);
    suite_add_tcase(s, tc);
    return s;
}

CHECK_MAIN(suite)
