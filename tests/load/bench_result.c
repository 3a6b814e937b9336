#include "tests/load/bench_result.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

// quantile of sorted x: linear between the two values around (num - 1) * part.
static double quantile(const double *x, uint32_t num, double part) {
    double at = part * (num - 1);
    uint32_t i = (uint32_t)at;
    double next = i + 1 < num ? x[i + 1] : x[i];
    return x[i] + (at - i) * (next - x[i]);
}

bench_spread bench_spread_of(double *x, uint32_t num) {
    qsort(x, num, sizeof(*x), by_value);
    bench_spread s = {.num = num, .median = quantile(x, num, 0.5), .min = x[0], .max = x[num - 1]};
    s.spread = s.median > 0 ? (quantile(x, num, 0.75) - quantile(x, num, 0.25)) / s.median : 0;
    return s;
}

void bench_result_derive(bench_result *r) {
    bench_case_name(&r->c, r->name);
    r->kv_bytes = bench_case_kv_bytes(&r->c);
    r->gbs = (double)r->kv_bytes / r->us.median * 1e-3;
    r->gflops = bench_case_flops(&r->c) / r->us.median * 1e-3;
    double best = r->ceiling_value.median;
    r->ceiling_share = best > 0 ? (r->ceiling.is_bytes ? r->gbs : r->gflops) / best : 0;
}

// match says whether name is pattern with a number of at least from for its "*", and writes other
// with that number.
static bool match(const bench_ask *ask, const char *name, char other[BENCH_CASE_BYTES]) {
    const char *star = strchr(ask->pattern, '*');
    size_t before = star ? (size_t)(star - ask->pattern) : strlen(ask->pattern);
    if (strncmp(name, ask->pattern, before) != 0) {
        return false;
    }
    char *end = NULL;
    long number = star ? strtol(name + before, &end, 10) : ask->from;
    const char *rest = star ? end : name + before;
    if ((star && (end == name + before || strcmp(end, star + 1) != 0)) || number < ask->from ||
        (!star && *rest != '\0')) {
        return false;
    }
    other[0] = '\0';
    const char *hole = ask->other ? strchr(ask->other, '*') : NULL;
    if (hole) {
        snprintf(other, BENCH_CASE_BYTES, "%.*s%ld%s", (int)(hole - ask->other), ask->other, number,
                 hole + 1);
    } else if (ask->other) {
        snprintf(other, BENCH_CASE_BYTES, "%s", ask->other);
    }
    return true;
}

static const bench_result *find(const bench_result *results, uint32_t num, const char *name) {
    for (uint32_t i = 0; i < num; i++) {
        if (strcmp(results[i].name, name) == 0) {
            return &results[i];
        }
    }
    return NULL;
}

// measure returns false when the run has not what it takes.
static bool measure(const bench_ask *ask, const bench_result *r, const bench_result *other,
                    double *out) {
    if (ask->other && !other) {
        return false;
    }
    switch (ask->measure) {
    case BENCH_SHARE:
        *out = r->ceiling_share;
        return r->ceiling_share > 0;
    case BENCH_SPEEDUP:
        *out = other->us.median / r->us.median;
        return true;
    case BENCH_SLOWER:
        *out = r->us.median / other->us.median;
        return true;
    case BENCH_MORE:
        *out = r->us.median - other->us.median;
        return true;
    case BENCH_PLAN:
        *out = r->plan_us;
        return r->plan_us > 0;
    case BENCH_SLOPE:
        *out = r->us.median / r->c.kv_len / (other->us.median / other->c.kv_len);
        return true;
    case BENCH_PEER:
        *out = r->peer[0] != '\0' ? r->peer_us.median / r->us.median : 0;
        return r->peer[0] != '\0';
    }
    return false;
}

uint32_t bench_verdicts(const bench_ask *asks, const bench_result *results, uint32_t num,
                        bench_verdict_line *out, uint32_t max) {
    uint32_t count = 0;
    for (const bench_ask *ask = asks; ask->pattern; ask++) {
        for (uint32_t i = 0; i < num && count < max; i++) {
            bench_verdict_line v = {.ask = ask, .result = &results[i]};
            if (!match(ask, results[i].name, v.other)) {
                continue;
            }
            const bench_result *other = ask->other ? find(results, num, v.other) : NULL;
            if (other == &results[i] || !measure(ask, &results[i], other, &v.measured)) {
                continue;
            }
            v.is_met = (ask->at_least == 0 || v.measured >= ask->at_least) &&
                       (ask->at_most == 0 || v.measured <= ask->at_most);
            out[count++] = v;
        }
    }
    return count;
}

void bench_verdict_text(const bench_verdict_line *v, char out[BENCH_VERDICT_BYTES]) {
    char what[BENCH_CASE_BYTES + 64], asked[64];
    switch (v->ask->measure) {
    case BENCH_SHARE:
        snprintf(what, sizeof(what), "share of the ceiling");
        break;
    case BENCH_SPEEDUP:
        snprintf(what, sizeof(what), "speed over \"%s\"", v->other);
        break;
    case BENCH_SLOWER:
        snprintf(what, sizeof(what), "time over \"%s\"", v->other);
        break;
    case BENCH_MORE:
        snprintf(what, sizeof(what), "us more than \"%s\"", v->other);
        break;
    case BENCH_PLAN:
        snprintf(what, sizeof(what), "us to plan it");
        break;
    case BENCH_SLOPE:
        snprintf(what, sizeof(what), "time a key over \"%s\"", v->other);
        break;
    case BENCH_PEER:
        snprintf(what, sizeof(what), "speed over the peer");
        break;
    }
    if (v->ask->at_least > 0 && v->ask->at_most > 0) {
        snprintf(asked, sizeof(asked), "%.2f to %.2f", v->ask->at_least, v->ask->at_most);
    } else if (v->ask->at_least > 0) {
        snprintf(asked, sizeof(asked), "at least %.2f", v->ask->at_least);
    } else {
        snprintf(asked, sizeof(asked), "at most %.2f", v->ask->at_most);
    }
    snprintf(out, BENCH_VERDICT_BYTES, "%s: %s %.3f, asked %s: %s", v->result->name, what,
             v->measured, asked, v->is_met ? "met" : "NOT MET");
}
