#include "tests/load/bench_cuda_peer.h"

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { LINE_BYTES = 256 };

struct bench_cuda_peer {
    pid_t pid;
    int fd;        // the socket whose other end is its input and output
    FILE *answers; // reads fd
    char line[LINE_BYTES];
};

static int start(bench_cuda_peer *p, const char *command, int other) {
    char *const argv[] = {"sh", "-c", (char *)command, NULL};
    posix_spawn_file_actions_t actions;
    int failed = posix_spawn_file_actions_init(&actions);
    if (failed) {
        return failed;
    }
    failed = posix_spawn_file_actions_adddup2(&actions, other, STDIN_FILENO);
    failed = failed ? failed : posix_spawn_file_actions_adddup2(&actions, other, STDOUT_FILENO);
    failed = failed ? failed : posix_spawn(&p->pid, "/bin/sh", &actions, NULL, argv, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    return failed;
}

attnd_err bench_cuda_peer_open(bench_cuda_peer **out, const char *command, attnd_errinfo *info) {
    int ends[2];
    bench_cuda_peer *p = calloc(1, sizeof(*p));
    if (!p) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory");
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        free(p);
        return attnd_fail(info, ATTND_ENOTSUP, "peer", "no pair of sockets");
    }
    p->fd = ends[0];
    int failed = start(p, command, ends[1]);
    (void)close(ends[1]);
    p->answers = failed ? NULL : fdopen(p->fd, "r");
    if (!p->answers) {
        (void)close(p->fd);
        p->fd = -1;
        bench_cuda_peer_close(p);
        return attnd_fail(info, ATTND_ENOTSUP, "peer", "\"%s\" cannot be started", command);
    }
    *out = p;
    return ATTND_OK;
}

void bench_cuda_peer_close(bench_cuda_peer *p) {
    if (!p) {
        return;
    }
    if (p->answers) {
        (void)fclose(p->answers); // it ends with its input
    }
    if (p->pid > 0) {
        (void)waitpid(p->pid, NULL, 0);
    }
    free(p);
}

static bool say(bench_cuda_peer *p, const char *what, const bench_case *c) {
    char name[BENCH_CASE_BYTES] = "";
    char line[LINE_BYTES];
    if (c) {
        bench_case_name(c, name);
    }
    int len = snprintf(line, sizeof(line), "%s%s%s\n", what, c ? " " : "", name);
    return send(p->fd, line, (size_t)len, MSG_NOSIGNAL) == len;
}

// ask returns the answer, NULL when there is none.
static const char *ask(bench_cuda_peer *p, const char *what, const bench_case *c) {
    if (!say(p, what, c) || !fgets(p->line, sizeof(p->line), p->answers)) {
        return NULL;
    }
    p->line[strcspn(p->line, "\n")] = '\0';
    return p->line;
}

const char *bench_cuda_peer_name(bench_cuda_peer *p, const bench_case *c) {
    const char *name = ask(p, "make", c);
    if (!name) {
        fprintf(stderr, "attn-bench: the peer has ended\n");
    }
    return name && strcmp(name, "-") != 0 ? name : NULL;
}

attnd_err bench_cuda_peer_time(bench_cuda_peer *p, const bench_case *c, double *us,
                               bench_pace *pace, attnd_errinfo *info) {
    const char *answer = ask(p, "time", c);
    if (!answer || sscanf(answer, "%lf %lf %lf", us, &pace->mhz, &pace->watts) != 3 || *us <= 0) {
        return attnd_fail(info, ATTND_ECONN, "peer", "the peer %s%s",
                          answer ? "answered " : "has ended", answer ? answer : "");
    }
    return ATTND_OK;
}

void bench_cuda_peer_drop(bench_cuda_peer *p) {
    (void)say(p, "drop", NULL);
}
