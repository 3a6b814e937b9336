// The clocks.  Nothing here can fail: both clocks exist on every Linux, and years that would not
// fit the text are cut to the last one that does.
#include "proto/clock.h"

#include <stdio.h>
#include <time.h>

static const uint64_t last_wall_us = UINT64_C(253402300799999999); // the end of the year 9999

static uint64_t read_us(clockid_t clock) {
    struct timespec ts;
    clock_gettime(clock, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

uint64_t attnd_clock_us(void) {
    return read_us(CLOCK_MONOTONIC);
}

uint64_t attnd_clock_ms(void) {
    return read_us(CLOCK_MONOTONIC) / 1000u;
}

uint64_t attnd_wall_us(void) {
    return read_us(CLOCK_REALTIME);
}

void attnd_wall_text(char out[ATTND_WALL_TEXT_BYTES], uint64_t wall_us) {
    uint64_t us = wall_us < last_wall_us ? wall_us : last_wall_us;
    time_t seconds = (time_t)(us / 1000000u);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    size_t len = strftime(out, ATTND_WALL_TEXT_BYTES, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(out + len, ATTND_WALL_TEXT_BYTES - len, ".%03uZ", (unsigned)(us / 1000u % 1000u));
}
