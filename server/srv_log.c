// The log sink.  A line leaves by one write(2), so that lines of several threads never mix.  When
// standard error cannot take a line (a full pipe that nobody reads, a full disk) the line is
// dropped and counted, and the next one that gets through says how many were lost: logging never
// blocks the loop.
#include "server/srv_log.h"

#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/log.h"

static atomic_uint lost_lines;
static bool journal;

static bool writable(void) {
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLOUT);
}

static bool put(attnd_log_level level, const char *line) {
    static const int priority[ATTND_LOG_NUM_LEVELS] = {3, 4, 6, 7}; // of syslog
    char buf[ATTND_LOG_LINE_BYTES + 8];
    int len = journal ? snprintf(buf, sizeof(buf), "<%d>%s\n", priority[level], line)
                      : snprintf(buf, sizeof(buf), "%s\n", line);
    return len > 0 && writable() && write(STDERR_FILENO, buf, (size_t)len) == len;
}

static void sink(attnd_log_level level, const char *line, size_t len) {
    (void)len;
    unsigned lost = atomic_exchange(&lost_lines, 0);
    char text[64];
    snprintf(text, sizeof(text), "WARN log %u lines were lost", lost);
    if (lost && !put(ATTND_LOG_WARN, text)) {
        atomic_fetch_add(&lost_lines, lost);
    }
    if (!put(level, line)) {
        atomic_fetch_add(&lost_lines, 1);
    }
}

void srv_log_init(void) {
    journal = getenv("JOURNAL_STREAM") != NULL;
    attnd_log_set_sink(sink);
}
