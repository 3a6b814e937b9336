// Small readers of text files; a file that is not there gives "unknown" or 0, since a load test
// should not fail for want of a label.
#include "tests/load/bench_host.h"

#include <ctype.h>
#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <unistd.h>

enum { TEXT_BYTES = 8192 };

static void read_cpu(char *out, size_t bytes) {
    char line[256];
    snprintf(out, bytes, "unknown");
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon != NULL) {
            colon += 1 + strspn(colon + 1, " ");
            colon[strcspn(colon, "\n")] = '\0';
            snprintf(out, bytes, "%.120s", colon);
            break;
        }
    }
    if (f != NULL) {
        fclose(f);
    }
}

void bench_host_read(bench_host *out) {
    *out = (bench_host){.kernel = "unknown"};
    read_cpu(out->cpu, sizeof(out->cpu));
    struct utsname uts;
    if (uname(&uts) == 0) {
        snprintf(out->kernel, sizeof(out->kernel), "%s %s %s", uts.sysname, uts.release,
                 uts.machine);
    }
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        out->cpus = (uint32_t)CPU_COUNT(&set);
    }
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    out->memory_bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
}

// status_kib finds a line "Name:  123 kB".
static bool status_kib(const char *status, const char *name, uint64_t *bytes) {
    const char *line = strstr(status, name);
    if (line == NULL) {
        return false;
    }
    char *end;
    line += strlen(name);
    uint64_t kib = strtoull(line, &end, 10);
    *bytes = kib * 1024;
    return end != line;
}

attnd_err bench_usage_parse(bench_usage *out, const char *stat, const char *status,
                            long ticks_per_s) {
    // "pid (name) state ppid ...": the name may hold anything, so count fields behind the last ')'.
    const char *field = strrchr(stat, ')');
    bench_usage u;
    for (int i = 2; i < 14 && field != NULL; i++) { // the name is field 2, utime 14, stime 15
        field = strchr(field + 1, ' ');
    }
    if (field == NULL || ticks_per_s <= 0) {
        return ATTND_EINVAL;
    }
    char *end;
    uint64_t ticks = strtoull(field, &end, 10);
    ticks += strtoull(end, &end, 10);
    u.cpu_s = (double)ticks / (double)ticks_per_s;
    if (!status_kib(status, "VmRSS:", &u.rss_bytes) ||
        !status_kib(status, "VmHWM:", &u.peak_bytes)) {
        return ATTND_EINVAL;
    }
    *out = u;
    return ATTND_OK;
}

static bool read_proc(int64_t pid, const char *name, char *text) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%" PRId64 "/%s", pid, name);
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return false;
    }
    size_t n = fread(text, 1, TEXT_BYTES - 1, f);
    text[n] = '\0';
    fclose(f);
    return n > 0;
}

attnd_err bench_usage_read(bench_usage *out, int64_t pid) {
    char stat[TEXT_BYTES], status[TEXT_BYTES];
    if (pid <= 0 || !read_proc(pid, "stat", stat) || !read_proc(pid, "status", status) ||
        bench_usage_parse(out, stat, status, sysconf(_SC_CLK_TCK)) != ATTND_OK) {
        return ATTND_ENOENT;
    }
    return ATTND_OK;
}

// shake_hands exchanges the 8 bytes with which both ends of an SP connection begin (version 0, then
// the protocol's number: REQ 0x30).  NNG 1.5.2 stops listening for good when a connection ends
// before it could send its own, so a look at the credentials alone would be an attack.
static void shake_hands(int fd) {
    static const uint8_t hello[8] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
    uint8_t reply[8];
    struct timeval second = {.tv_sec = 1};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second));
    if (send(fd, hello, sizeof(hello), MSG_NOSIGNAL) == (ssize_t)sizeof(hello)) {
        ssize_t got = recv(fd, reply, sizeof(reply), MSG_WAITALL);
        (void)got; // whatever it is, it was sent
    }
}

int64_t bench_peer_pid(const char *url) {
    static const char scheme[] = "ipc://";
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    struct ucred cred = {0};
    socklen_t len = sizeof(cred);
    int64_t pid = 0;
    if (strncmp(url, scheme, sizeof(scheme) - 1) != 0 ||
        strlen(url + sizeof(scheme) - 1) >= sizeof(addr.sun_path)) {
        return 0;
    }
    memcpy(addr.sun_path, url + sizeof(scheme) - 1, strlen(url + sizeof(scheme) - 1) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return 0;
    }
    if (connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0) {
        pid = cred.pid;
        shake_hands(fd);
    }
    close(fd);
    return pid;
}
