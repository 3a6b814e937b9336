// clock reads the two clocks of attnd: a monotonic one for intervals and deadlines, and wall time
// for people.  Any thread.
#ifndef ATTND_PROTO_CLOCK_H
#define ATTND_PROTO_CLOCK_H

#include <stdint.h>

// attnd_clock_us and attnd_clock_ms return CLOCK_MONOTONIC, which has nothing to do with the date
// and is the same for every process since boot.
uint64_t attnd_clock_us(void);
uint64_t attnd_clock_ms(void);

// attnd_wall_us returns microseconds since 1970-01-01T00:00:00Z.
uint64_t attnd_wall_us(void);

// attnd_wall_text writes "2025-01-31T12:00:00.123Z": UTC, milliseconds, cut not rounded, NUL
// included.  Years behind 9999 are shown as 9999-12-31T23:59:59.999Z.
enum { ATTND_WALL_TEXT_BYTES = 25 };
void attnd_wall_text(char out[ATTND_WALL_TEXT_BYTES], uint64_t wall_us);

#endif
