// log turns events into lines: one event, one line, in a form that a person and grep both read:
//
//     2025-01-31T12:00:00.123Z WARN kv pool full: 0 of 8192 blocks free, seq 17 waits
//
// Only server/ and the tools log; proto, kvcache, attention and scheduler return errors.  Values
// carry their units.  This is the one piece of process-wide state outside server/: a level, which
// may change at any time, and a sink, which server/ sets before it starts threads.  Any thread.
#ifndef ATTND_PROTO_LOG_H
#define ATTND_PROTO_LOG_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum attnd_log_level {
    ATTND_LOG_ERROR, // something is lost or broken; an operator should look
    ATTND_LOG_WARN,  // it goes on, but not as it was meant to
    ATTND_LOG_INFO,  // starts, stops, sessions, models: a few lines a client
    ATTND_LOG_DEBUG, // requests
    ATTND_LOG_NUM_LEVELS,
} attnd_log_level;

enum { ATTND_LOG_LINE_BYTES = 512 }; // NUL included; a longer line is cut and ends in "..."

// attnd_log_sink gets a whole line without a newline, NUL-terminated, len bytes; borrowed until it
// returns.  It is called by whichever thread logs.
typedef void attnd_log_sink(attnd_log_level level, const char *line, size_t len);

// attnd_log_set_sink: NULL (the default) drops every line.
void attnd_log_set_sink(attnd_log_sink *sink);

// attnd_log_set_level lets lines of that level and the more severe ones through; default INFO.
void attnd_log_set_level(attnd_log_level level);

// attnd_log_level_name returns "error", "warn", "info", "debug"; "?" for a number that is none.
const char *attnd_log_level_name(attnd_log_level level);

// attnd_log_level_parse is the inverse; ATTND_LOG_NUM_LEVELS for a name that is none.
attnd_log_level attnd_log_level_parse(const char *name);

// attnd_log(level, "area", fmt, ...) evaluates its arguments only when the level is on.
#define attnd_log(level, area, ...) \
    (attnd_log_on(level) ? attnd_log_write((level), (area), __VA_ARGS__) : (void)0)

extern atomic_int attnd_log_limit; // private; inline for speed

static inline bool attnd_log_on(attnd_log_level level) {
    return (int)level <= atomic_load_explicit(&attnd_log_limit, memory_order_relaxed);
}

// attnd_log_some is attnd_log for what a peer can cause as often as it likes: of each 10 s, 10
// lines are written and the rest counted; a line in front of the next one says how many were left
// out.  rate starts as zeros; one for each kind of event.  Caller locks.
#define attnd_log_some(rate, level, area, ...)                       \
    (attnd_log_on(level) && attnd_log_admit((rate), (level), (area)) \
         ? attnd_log_write((level), (area), __VA_ARGS__)             \
         : (void)0)

enum { ATTND_LOG_SOME_LINES = 10, ATTND_LOG_SOME_MS = 10000 };

typedef struct attnd_log_rate {
    uint64_t since_ms; // of attnd_clock_ms
    uint32_t lines;    // since then, those that were left out too
} attnd_log_rate;

// attnd_log_admit counts an event and says whether its line is to be written.
bool attnd_log_admit(attnd_log_rate *rate, attnd_log_level level, const char *area);

void attnd_log_write(attnd_log_level level, const char *area, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

// attnd_log_format writes the line of an event at wall_us (of attnd_wall_us), and returns its
// length.  Bytes outside printable ASCII become '?': text from a client can neither start a line of
// its own nor reach the terminal.
size_t attnd_log_format(char line[ATTND_LOG_LINE_BYTES], uint64_t wall_us, attnd_log_level level,
                        const char *area, const char *fmt, va_list args)
    __attribute__((format(printf, 5, 0)));

#endif
