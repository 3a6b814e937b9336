// bench_host reads what a result must say of the machine, and what the daemon has used, from /proc.
// Linux only.  Any thread.
#ifndef ATTND_LOAD_BENCH_HOST_H
#define ATTND_LOAD_BENCH_HOST_H

#include <stdint.h>

#include "proto/err.h"

typedef struct bench_host {
    char cpu[128];    // model name of the first processor, "unknown" when there is none
    char kernel[256]; // name, release, machine
    uint32_t cpus;    // that this process may use
    uint64_t memory_bytes;
} bench_host;

void bench_host_read(bench_host *out);

// bench_usage is what a process has used since it began.
typedef struct bench_usage {
    double cpu_s;        // user and system, all threads
    uint64_t rss_bytes;  // resident now, shared memory included
    uint64_t peak_bytes; // most that was resident
} bench_usage;

// bench_usage_read: ATTND_ENOENT when there is no such process or /proc does not show it.
attnd_err bench_usage_read(bench_usage *out, int64_t pid);

// bench_usage_parse reads the text of /proc/PID/stat and /proc/PID/status.  ATTND_EINVAL.
attnd_err bench_usage_parse(bench_usage *out, const char *stat, const char *status,
                            long ticks_per_s);

// bench_peer_pid returns the process that listens on an ipc:// URL (SO_PEERCRED of a connection
// that is closed again at once), 0 when there is none or the URL is another one.
int64_t bench_peer_pid(const char *url);

#endif
