// The keeper: a poll loop over signals and the worker's messages.  One thread.
#include "server/srv_keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/clock.h"
#include "proto/log.h"
#include "server/srv_inherit.h"
#include "server/srv_notify.h"

enum {
    MAX_KEPT = 17, // what systemd may store, and the configuration
    NAME_BYTES = 64,
    TEXT_BYTES = 4096, // of a message
    MAX_ARGS = 256,
    HEARD = 1024, // messages of one turn; more than a socket's queue holds
    FIRST_FD = 3,
    CALM_MS = 10000, // a worker that served as long did not die of its start
    CALM_DEATHS = 5, // sooner ones in a row that are put up with without a pause
    PAUSE_MS = 100,  // then, doubled each time,
    FORK_PAUSE_MS = 1000,
    EMPTY_AFTER = 3, // starts in a row without a worker that is ready
    FAIL_AFTER = 6,
    SAY_AGAIN_MS = 600000, // what is waited for
};

typedef struct kept {
    char name[NAME_BYTES];
    int fd;
} kept;

typedef struct keeper {
    char **argv;
    const char *above; // the notify socket of who supervises us, NULL = nobody
    kept kept[MAX_KEPT];
    int num_kept;
    int signals, messages;
    char address[NAME_BYTES]; // of messages, '@' first
    pid_t worker;             // 0 = none
    bool ready, was_ready;    // this worker, any worker
    bool stopping;
    bool reload;             // SIGHUP came that is to be passed on
    bool reloading;          // it was passed on to this worker, which has not said that it is done
    bool reload_again;       // the worker before was given it, too, and died
    uint32_t failed, deaths; // in a row: starts, workers that served for less than CALM_MS
    uint32_t waits;          // in a row: starts that found no device, which neither of these counts
    char no_device[ATTND_ERR_TEXT_BYTES]; // why this worker found none, "" = it has not said so
    char said[ATTND_ERR_TEXT_BYTES];      // what was logged of that last
    uint64_t ready_ms, start_at_ms, said_ms, max_pause_ms, watchdog_ms; // 0 = nobody watches
} keeper;

// ---- descriptors

static kept *find(keeper *k, const char *name) {
    for (int i = 0; i < k->num_kept; i++) {
        if (strcmp(k->kept[i].name, name) == 0) {
            return &k->kept[i];
        }
    }
    return NULL;
}

static void forget(keeper *k, const char *name) {
    kept *old = find(k, name);
    if (old) {
        close(old->fd);
        *old = k->kept[--k->num_kept];
    }
}

// keep takes fd, and moves it out of the way of those that a worker is started with.
static void keep(keeper *k, const char *name, int low) {
    forget(k, name);
    int fd = fcntl(low, F_DUPFD_CLOEXEC, FIRST_FD + MAX_KEPT);
    close(low);
    if (fd < 0 || k->num_kept == MAX_KEPT || strlen(name) >= NAME_BYTES) {
        attnd_log(ATTND_LOG_ERROR, "keeper", "descriptor %.63s is not kept: %d are", name,
                  k->num_kept);
        if (fd >= 0) {
            close(fd);
        }
        return;
    }
    kept *to = &k->kept[k->num_kept++];
    strcpy(to->name, name);
    to->fd = fd;
}

// inherit takes what we were started with.
static void inherit(keeper *k) {
    char name[NAME_BYTES];
    int fd;
    for (int i = 0; (fd = srv_inherit_at(i, name, sizeof(name))) >= 0; i++) {
        keep(k, name, fd);
    }
}

// ---- messages

// value returns the value of "key=value" among the lines of a message, cut out into out; false when
// it has no such line.
static bool value(const char *text, const char *key, char *out, size_t bytes) {
    size_t len = strlen(key);
    for (const char *line = text; line && *line; line = strchr(line, '\n'), line += line != NULL) {
        if (strncmp(line, key, len) == 0 && line[len] == '=') {
            snprintf(out, bytes, "%.*s", (int)strcspn(line + len + 1, "\n"), line + len + 1);
            return true;
        }
    }
    return false;
}

static void tell_above(const keeper *k, const char *text, int fd) {
    if (k->above) {
        srv_notify_send(k->above, text, strlen(text), fd);
    }
}

// pass_reload gives the worker a SIGHUP, one at a time: what it says then is of this one.
static void pass_reload(keeper *k) {
    if (k->reload && k->worker && k->ready && !k->reloading) {
        k->reload = false;
        k->reloading = true;
        kill(k->worker, SIGHUP);
    }
}

static void on_ready(keeper *k) {
    k->ready = k->was_ready = true;
    k->ready_ms = attnd_clock_ms();
    k->failed = k->waits = 0;
    pass_reload(k);
}

static void on_reloaded(keeper *k) {
    k->reloading = k->reload_again = false;
    pass_reload(k);
}

// keep_reload gives a SIGHUP that the worker died with to the next one, but not to a third: it may
// be what they die of.
static void keep_reload(keeper *k) {
    if (k->reloading && k->reload_again) {
        attnd_log(ATTND_LOG_ERROR, "keeper", "two workers ended in a reload: it is given up");
        k->reload_again = false;
    } else if (k->reloading) {
        k->reload = k->reload_again = true;
    }
    k->reloading = false;
}

// take_message reads what a worker says, passes it on, and takes *fd when it is to be kept.
static void take_message(keeper *k, const char *text, int *fd) {
    char name[NAME_BYTES] = "stored", one[8];
    value(text, "FDNAME", name, sizeof(name));
    bool conf = strcmp(name, SRV_KEEPER_CONF) == 0; // never without one
    bool reloaded = value(text, SRV_NOTIFY_RELOADED, one, sizeof(one));
    bool no_device = value(text, SRV_NOTIFY_NO_DEVICE, k->no_device, sizeof(k->no_device));
    if (!conf && !reloaded && !no_device) {
        tell_above(k, text, *fd);
    }
    if (value(text, "READY", one, sizeof(one))) {
        on_ready(k);
    }
    if (reloaded) {
        on_reloaded(k);
    }
    if (value(text, "FDSTOREREMOVE", one, sizeof(one)) && !conf) {
        forget(k, name);
    }
    if (value(text, "FDSTORE", one, sizeof(one)) && *fd >= 0) {
        keep(k, name, *fd);
        *fd = -1;
    }
}

// receive reads one message; false when there is none.  Only the worker is listened to: the
// address is open to every process of this machine.
static bool receive(keeper *k) {
    char text[TEXT_BYTES];
    union {
        char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(MAX_KEPT * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = {.iov_base = text, .iov_len = sizeof(text) - 1};
    struct msghdr msg = {.msg_iov = &part,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    ssize_t bytes = recvmsg(k->messages, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes < 0) {
        return false;
    }
    text[bytes] = '\0';
    int fds[MAX_KEPT], num_fds = 0;
    struct ucred sender = {.pid = 0};
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS) {
            memcpy(&sender, CMSG_DATA(c), sizeof(sender));
        } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            num_fds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(fds, CMSG_DATA(c), (size_t)num_fds * sizeof(int));
        }
    }
    int none = -1;
    if (sender.pid == k->worker && k->worker > 0 && num_fds <= 1) {
        take_message(k, text, num_fds ? &fds[0] : &none);
    }
    for (int i = 0; i < num_fds; i++) {
        if (fds[i] >= 0) {
            close(fds[i]);
        }
    }
    return true;
}

// hear reads what has come.  Bounded, since the address is open to every process: one that never
// stops sending keeps nobody from being started, or ended.
static void hear(keeper *k) {
    for (int i = 0; i < HEARD && receive(k); i++) {
    }
}

// ---- the worker

// place_fds puts what is kept where LISTEN_FDS says that it is.
static void place_fds(const keeper *k) {
    char names[MAX_KEPT * (NAME_BYTES + 1)] = "", number[16];
    for (int i = 0; i < k->num_kept; i++) {
        if (dup2(k->kept[i].fd, FIRST_FD + i) < 0) {
            _exit(1);
        }
        snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s", i ? ":" : "",
                 k->kept[i].name);
    }
    snprintf(number, sizeof(number), "%d", k->num_kept);
    setenv("LISTEN_FDS", number, 1);
    setenv("LISTEN_FDNAMES", names, 1);
    snprintf(number, sizeof(number), "%d", (int)getpid());
    setenv("LISTEN_PID", number, 1);
    if (k->watchdog_ms) {
        setenv("WATCHDOG_PID", number, 1);
    }
    setenv("NOTIFY_SOCKET", k->address, 1);
}

// exec_worker: should the keeper be killed, the worker drains; its cache could not outlive it.
static _Noreturn void exec_worker(const keeper *k, pid_t parent) {
    char *argv[MAX_ARGS + 3] = {k->argv[0], "--no-keeper"};
    for (int i = 1; k->argv[i] && i < MAX_ARGS; i++) {
        argv[i + 1] = k->argv[i];
    }
    sigset_t none;
    sigemptyset(&none);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) {
        _exit(0);
    }
    place_fds(k);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execv("/proc/self/exe", argv);
    fprintf(stderr, "attnd: /proc/self/exe: %s\n", strerror(errno));
    _exit(1);
}

static void start(keeper *k) {
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        exec_worker(k, parent);
    }
    k->ready = false;
    k->no_device[0] = '\0';
    k->worker = child > 0 ? child : 0;
    k->start_at_ms = child > 0 ? UINT64_MAX : attnd_clock_ms() + FORK_PAUSE_MS;
    if (child < 0) {
        attnd_log(ATTND_LOG_ERROR, "keeper", "fork: %s", strerror(errno));
    }
}

static uint64_t pause_of(const keeper *k, uint32_t doublings) {
    uint64_t ms = doublings ? (uint64_t)PAUSE_MS << (doublings < 10 ? doublings - 1 : 9) : 0;
    return ms < k->max_pause_ms ? ms : k->max_pause_ms;
}

// wait_for_device counts a start that found no device, says so, the log not every time, and returns
// how long to wait until the next one.
static uint64_t wait_for_device(keeper *k) {
    char status[sizeof(k->no_device) + 64];
    uint64_t now = attnd_clock_ms();
    bool is_news = k->waits++ == 0 || strcmp(k->said, k->no_device) != 0;
    if (is_news || now - k->said_ms >= SAY_AGAIN_MS) {
        attnd_log(ATTND_LOG_WARN, "keeper", "no device to start with: %s: it is waited for%s",
                  k->no_device, find(k, "ledger") ? ", with the cache" : "");
        strcpy(k->said, k->no_device);
        k->said_ms = now;
    }
    snprintf(status, sizeof(status), "STATUS=waits for the device: %s", k->no_device);
    tell_above(k, status, -1);
    return pause_of(k, k->waits);
}

// pause_after counts a worker's end and returns how long to wait until the next one.
static uint64_t pause_after(keeper *k) {
    bool calm = k->ready && attnd_clock_ms() - k->ready_ms >= CALM_MS;
    k->deaths = calm ? 0 : k->deaths + 1;
    k->failed = k->ready ? 0 : k->failed + 1;
    if (k->failed == EMPTY_AFTER && find(k, "ledger")) {
        attnd_log(ATTND_LOG_ERROR, "keeper", "%d starts in a row failed: the cache is given up",
                  EMPTY_AFTER);
        tell_above(k, "FDSTOREREMOVE=1\nFDNAME=ledger", -1);
        tell_above(k, "FDSTOREREMOVE=1\nFDNAME=arena", -1);
        forget(k, "ledger");
        forget(k, "arena");
    }
    return pause_of(k, k->deaths > CALM_DEATHS ? k->deaths - CALM_DEATHS : k->failed);
}

// status_of returns what the keeper would end with.  A worker that is stopped while it starts may
// not listen yet, and die of the signal: it was stopped.
static int status_of(const keeper *k, int how) {
    if (WIFEXITED(how)) {
        return WEXITSTATUS(how);
    }
    bool is_stop = WTERMSIG(how) == SIGTERM || WTERMSIG(how) == SIGINT;
    return k->stopping && is_stop ? 0 : 128 + WTERMSIG(how);
}

// start_later has a worker that has died followed by another; false, with *status, when that makes
// no sense any more.
static bool start_later(keeper *k, int how, int *status) {
    uint64_t ms = pause_after(k);
    attnd_log(ATTND_LOG_WARN, "keeper", "the worker ended by %s %d: started again in %u ms%s",
              WIFEXITED(how) ? "exit status" : "signal",
              WIFEXITED(how) ? WEXITSTATUS(how) : WTERMSIG(how), (unsigned)ms,
              find(k, "ledger") ? ", with its cache" : "");
    if (k->failed >= FAIL_AFTER) {
        attnd_log(ATTND_LOG_ERROR, "keeper", "%d starts in a row failed", FAIL_AFTER);
        *status = 1;
        return false;
    }
    tell_above(k, "STATUS=the worker is started again", -1);
    k->start_at_ms = attnd_clock_ms() + ms;
    return true;
}

// ended_without_device is ended for a worker that found no device; how it ended says no more.
static bool ended_without_device(keeper *k, int *status) {
    if (k->stopping) { // nothing else could come of the start
        *status = 0;
        return true;
    }
    if (!k->was_ready && !find(k, "ledger")) {
        fprintf(stderr, "attnd: %s\n", k->no_device);
        return true;
    }
    k->start_at_ms = attnd_clock_ms() + wait_for_device(k);
    return false;
}

// ended reaps a worker that has died; true when the keeper ends, too, with *status.
static bool ended(keeper *k, int *status) {
    int how = 0;
    hear(k); // its last words
    keep_reload(k);
    waitpid(k->worker, &how, 0);
    k->worker = 0;
    *status = status_of(k, how);
    if (k->no_device[0]) {
        return ended_without_device(k, status);
    }
    if (k->stopping || *status == 0 || (WIFEXITED(how) && !k->was_ready)) {
        return true;
    }
    return !start_later(k, how, status);
}

// ---- signals

// has_died is true when the worker is to be reaped; until that its pid is its own.
static bool has_died(const keeper *k) {
    siginfo_t info = {.si_pid = 0};
    return k->worker && waitid(P_PID, (id_t)k->worker, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == k->worker;
}

// on_signal returns true when the keeper ends with *status.  What a terminal sends reaches the
// worker by itself, too: it is not told twice to end, and reloads twice.
static bool on_signal(keeper *k, const struct signalfd_siginfo *info, int *status) {
    if (info->ssi_signo == SIGCHLD) {
        return has_died(k) && ended(k, status);
    }
    if (info->ssi_signo == SIGHUP) {
        k->reload = true;
        pass_reload(k);
        return false;
    }
    k->stopping = true;
    if (k->worker && info->ssi_code != SI_KERNEL) {
        kill(k->worker, (int)info->ssi_signo);
    }
    *status = 0;
    return !k->worker && k->stopping;
}

static bool open_all(keeper *k) {
    struct sockaddr_un any = {.sun_family = AF_UNIX}, got = {.sun_family = AF_UNIX};
    socklen_t len = sizeof(got);
    sigset_t set;
    int on = 1;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    k->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    k->messages = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (k->signals < 0 || k->messages < 0 ||
        setsockopt(k->messages, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0 ||
        bind(k->messages, (struct sockaddr *)&any, sizeof(any.sun_family)) != 0 ||
        getsockname(k->messages, (struct sockaddr *)&got, &len) != 0) {
        return false;
    }
    size_t name = len - offsetof(struct sockaddr_un, sun_path);
    if (name < 2 || name >= sizeof(k->address)) {
        return false;
    }
    memcpy(k->address, got.sun_path, name);
    k->address[0] = '@';
    return true;
}

// tell_alive is for whoever watches, who else hears that from the worker.
static void tell_alive(const keeper *k) {
    if (k->watchdog_ms && !k->worker) {
        tell_above(k, "WATCHDOG=1", -1);
    }
}

// nap_ms returns for how long nothing is to be done.
static int nap_ms(const keeper *k, uint64_t now) {
    if (k->worker) {
        return -1;
    }
    uint64_t ms = k->start_at_ms > now ? k->start_at_ms - now : 0;
    return (int)(k->watchdog_ms && k->watchdog_ms / 2 < ms ? k->watchdog_ms / 2 : ms);
}

int srv_keeper_run(int argc, char **argv, const srv_conf *conf) {
    static keeper k;
    int status = 1;
    k = (keeper){.argv = argv,
                 .max_pause_ms = conf->restart_pause_ms,
                 .above = getenv("NOTIFY_SOCKET"),
                 .watchdog_ms = srv_notify_watchdog_ms()};
    if (argc > MAX_ARGS) {
        fprintf(stderr, "attnd: more than %d arguments\n", MAX_ARGS);
        return 2;
    }
    inherit(&k);
    int conf_fd = srv_conf_put(conf);
    if (conf_fd < 0 || !open_all(&k)) {
        fprintf(stderr, "attnd: the keeper cannot start: %s\n", strerror(errno));
        return 1;
    }
    keep(&k, SRV_KEEPER_CONF, conf_fd);
    for (bool over = false; !over;) {
        uint64_t now = attnd_clock_ms();
        if (!k.worker && now >= k.start_at_ms) {
            start(&k);
        }
        struct pollfd fds[] = {{.fd = k.signals, .events = POLLIN},
                               {.fd = k.messages, .events = POLLIN}};
        tell_alive(&k);
        poll(fds, 2, nap_ms(&k, now));
        hear(&k);
        struct signalfd_siginfo info;
        while (!over && read(k.signals, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
            over = on_signal(&k, &info, &status);
        }
    }
    return status;
}
