// Who owns a socket path.
//
// NNG finds out by itself whether a path is stale: it connects, and removes the path when nobody
// answers.  But a daemon that has bound and does not listen yet looks just as dead, so two that
// start together can remove each other's socket; and NNG removes whatever lies at the path.  So a
// daemon first locks a file beside the socket (the lock dies with the process), then probes what is
// there, and lets NNG bind only an empty path.
//
// The lock file is removed at the end by its holder.  A starter that had opened it just before then
// holds a lock on a file without a name; it notices that by the inode and tries again.
#include "server/srv_path.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static attnd_err lock(srv_path *claim, attnd_errinfo *info) {
    for (;;) {
        int fd = open(claim->lock_path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0) {
            return attnd_fail(info, ATTND_EIO, "listen", "%s: %s", claim->lock_path,
                              strerror(errno));
        }
        struct stat mine, named;
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            close(fd);
            return attnd_fail(info, ATTND_EEXIST, "listen", "%s: another daemon holds this lock",
                              claim->lock_path);
        }
        if (fstat(fd, &mine) == 0 && lstat(claim->lock_path, &named) == 0 &&
            mine.st_ino == named.st_ino && mine.st_dev == named.st_dev) {
            claim->lock_fd = fd;
            return ATTND_OK;
        }
        close(fd);
    }
}

// answers is true when a process listens on the socket at path.
static bool answers(const struct sockaddr_un *addr) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return true; // not known: leave it alone
    }
    bool alive =
        connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) == 0 || errno != ECONNREFUSED;
    close(fd);
    return alive;
}

static attnd_err clear(const struct sockaddr_un *addr, attnd_errinfo *info) {
    const char *path = addr->sun_path;
    struct stat st;
    if (lstat(path, &st) != 0) {
        return errno == ENOENT
                   ? ATTND_OK
                   : attnd_fail(info, ATTND_EIO, "listen", "%s: %s", path, strerror(errno));
    }
    if (!S_ISSOCK(st.st_mode)) {
        return attnd_fail(info, ATTND_EEXIST, "listen", "%s exists and is not a socket", path);
    }
    if (answers(addr)) {
        return attnd_fail(info, ATTND_EEXIST, "listen", "%s: a daemon is alive there", path);
    }
    if (unlink(path) != 0) {
        return attnd_fail(info, ATTND_EIO, "listen", "%s: %s", path, strerror(errno));
    }
    return ATTND_OK;
}

attnd_err srv_path_claim(srv_path *claim, const char *path, attnd_errinfo *info) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    if (!path[0] || strlen(path) >= sizeof(addr.sun_path)) {
        return attnd_fail(info, ATTND_EINVAL, "listen", "a socket's path has 1 to %zu bytes",
                          sizeof(addr.sun_path) - 1);
    }
    strcpy(addr.sun_path, path);
    claim->lock_fd = -1;
    snprintf(claim->lock_path, sizeof(claim->lock_path), "%s.lock", path);
    attnd_err err = lock(claim, info);
    if (!err) {
        err = clear(&addr, info);
        if (err) {
            srv_path_release(claim);
        }
    }
    return err;
}

void srv_path_release(srv_path *claim) {
    if (claim->lock_fd >= 0) {
        unlink(claim->lock_path);
        close(claim->lock_fd);
        claim->lock_fd = -1;
    }
}
