// hist is a log-linear histogram of 64-bit values (microseconds, bytes, tokens ...): every power of
// two is cut into 64 buckets of equal width.  Any value can be recorded; a quantile is off by less
// than 1 % (at most 1/128; values below 128 are exact).  Fixed size, nothing is ever allocated.
// Caller locks.
#ifndef ATTND_PROTO_HIST_H
#define ATTND_PROTO_HIST_H

#include <stdint.h>

enum { ATTND_HIST_BUCKETS = 58 * 64 + 64 };

// 30 KiB; embed it or allocate it, not on a small stack.  Private.
typedef struct attnd_hist {
    uint64_t count, min, max;
    double sum;
    uint64_t buckets[ATTND_HIST_BUCKETS];
} attnd_hist;

// attnd_hist_init empties it; also for use again.
void attnd_hist_init(attnd_hist *h);

void attnd_hist_record(attnd_hist *h, uint64_t value);

// attnd_hist_merge adds what src has recorded to dst, as if dst had recorded it.
void attnd_hist_merge(attnd_hist *dst, const attnd_hist *src);

uint64_t attnd_hist_count(const attnd_hist *h);
uint64_t attnd_hist_min(const attnd_hist *h); // exact; 0 when empty
uint64_t attnd_hist_max(const attnd_hist *h); // exact; 0 when empty
double attnd_hist_mean(const attnd_hist *h);  // exact but for float64 rounding; 0 when empty

// attnd_hist_quantile returns the smallest recorded value that at least q * count values do not
// exceed, within 1 %; never outside [min, max].  q <= 0 gives min, q >= 1 gives max, both exactly;
// 0 when empty.
uint64_t attnd_hist_quantile(const attnd_hist *h, double q);

#endif
