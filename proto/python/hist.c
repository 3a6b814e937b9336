// Bucket of a value: with e the number of bits behind the leading 7, value >> e lies in 64..127 and
// names the bucket inside its power of two:
//
//     value            e    buckets
//     0 .. 127         0    0 .. 127, one value each
//     128 .. 255       1    128 .. 191, two values each
//     2^k .. 2^(k+1)-1 k-6  64 of 2^(k-6) values each
//
// A bucket answers with its middle, so it is wrong by at most half its width: 2^(e-1) of at least
// 64 * 2^e.
#include "proto/hist.h"

#include <string.h>

enum { SUB_LOG2 = 6, SUB = 1 << SUB_LOG2, EXACT = 2 * SUB };

static uint32_t bucket_of(uint64_t value) {
    if (value < EXACT) {
        return (uint32_t)value;
    }
    uint32_t e = 63u - (uint32_t)__builtin_clzll(value) - SUB_LOG2;
    return e * SUB + (uint32_t)(value >> e);
}

static uint64_t middle_of(uint32_t bucket) {
    if (bucket < EXACT) {
        return bucket;
    }
    uint32_t e = bucket / SUB - 1;
    uint64_t low = (uint64_t)(bucket - e * SUB) << e;
    return low + ((UINT64_C(1) << e) - 1) / 2;
}

void attnd_hist_init(attnd_hist *h) {
    memset(h, 0, sizeof(*h));
    h->min = UINT64_MAX;
}

void attnd_hist_record(attnd_hist *h, uint64_t value) {
    h->count++;
    h->sum += (double)value;
    h->min = value < h->min ? value : h->min;
    h->max = value > h->max ? value : h->max;
    h->buckets[bucket_of(value)]++;
}

void attnd_hist_merge(attnd_hist *dst, const attnd_hist *src) {
    dst->count += src->count;
    dst->sum += src->sum;
    dst->min = src->min < dst->min ? src->min : dst->min;
    dst->max = src->max > dst->max ? src->max : dst->max;
    for (uint32_t i = 0; i < ATTND_HIST_BUCKETS; i++) {
        dst->buckets[i] += src->buckets[i];
    }
}

uint64_t attnd_hist_count(const attnd_hist *h) {
    return h->count;
}

uint64_t attnd_hist_min(const attnd_hist *h) {
    return h->count ? h->min : 0;
}

uint64_t attnd_hist_max(const attnd_hist *h) {
    return h->max;
}

double attnd_hist_mean(const attnd_hist *h) {
    return h->count ? h->sum / (double)h->count : 0.0;
}

uint64_t attnd_hist_quantile(const attnd_hist *h, double q) {
    if (h->count == 0 || q <= 0.0) {
        return attnd_hist_min(h);
    }
    if (q >= 1.0) {
        return h->max;
    }
    double rank = q * (double)h->count; // the answer is the first value with `seen` >= rank
    uint64_t seen = 0;
    uint32_t i = 0;
    while (i < ATTND_HIST_BUCKETS - 1 && (double)(seen += h->buckets[i]) < rank) {
        i++;
    }
    uint64_t value = middle_of(i);
    value = value < h->min ? h->min : value;
    return value > h->max ? h->max : value;
}
