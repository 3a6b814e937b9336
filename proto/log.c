// Lines are made on the caller's stack and go to the sink whole; nothing is allocated, nothing is
// locked here.  What a slow sink costs is the sink's own business.
#include "proto/log.h"

#include <stdio.h>
#include <string.h>

#include "proto/clock.h"

static const char *const names[ATTND_LOG_NUM_LEVELS] = {"error", "warn", "info", "debug"};
static const char *const tags[ATTND_LOG_NUM_LEVELS] = {"ERROR", "WARN", "INFO", "DEBUG"};

atomic_int attnd_log_limit = ATTND_LOG_INFO;
static _Atomic(attnd_log_sink *) current_sink;

void attnd_log_set_sink(attnd_log_sink *sink) {
    atomic_store(&current_sink, sink);
}

void attnd_log_set_level(attnd_log_level level) {
    atomic_store_explicit(&attnd_log_limit, (int)level, memory_order_relaxed);
}

const char *attnd_log_level_name(attnd_log_level level) {
    return (uint32_t)level < ATTND_LOG_NUM_LEVELS ? names[level] : "?";
}

attnd_log_level attnd_log_level_parse(const char *name) {
    uint32_t i = 0;
    while (i < ATTND_LOG_NUM_LEVELS && strcmp(name, names[i]) != 0) {
        i++;
    }
    return (attnd_log_level)i;
}

size_t attnd_log_format(char line[ATTND_LOG_LINE_BYTES], uint64_t wall_us, attnd_log_level level,
                        const char *area, const char *fmt, va_list args) {
    const size_t room = ATTND_LOG_LINE_BYTES;
    char when[ATTND_WALL_TEXT_BYTES];
    attnd_wall_text(when, wall_us);
    const char *tag = (uint32_t)level < ATTND_LOG_NUM_LEVELS ? tags[level] : "?";
    int len = snprintf(line, room, "%s %s %.32s ", when, tag, area); // always fits
    int text = vsnprintf(line + len, room - (size_t)len, fmt, args);
    len += text > 0 ? text : 0;
    if ((size_t)len >= room) {
        len = (int)room - 1;
        memcpy(line + len - 3, "...", sizeof("..."));
    }
    for (char *c = line; *c; c++) {
        *c = (char)(*c >= ' ' && *c <= '~' ? *c : '?');
    }
    return (size_t)len;
}

void attnd_log_write(attnd_log_level level, const char *area, const char *fmt, ...) {
    attnd_log_sink *sink = atomic_load(&current_sink);
    if (!sink) {
        return;
    }
    char line[ATTND_LOG_LINE_BYTES];
    va_list args;
    va_start(args, fmt);
    size_t len = attnd_log_format(line, attnd_wall_us(), level, area, fmt, args);
    va_end(args);
    sink(level, line, len);
}

bool attnd_log_admit(attnd_log_rate *rate, attnd_log_level level, const char *area) {
    uint64_t now = attnd_clock_ms();
    if (rate->lines == 0 || now - rate->since_ms >= ATTND_LOG_SOME_MS) {
        if (rate->lines > ATTND_LOG_SOME_LINES) {
            attnd_log_write(level, area, "%u lines like the next one were left out",
                            (unsigned)(rate->lines - ATTND_LOG_SOME_LINES));
        }
        *rate = (attnd_log_rate){.since_ms = now};
    }
    rate->lines += rate->lines < UINT32_MAX;
    return rate->lines <= ATTND_LOG_SOME_LINES;
}
