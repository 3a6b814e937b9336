// One group, see bench_kernels.h.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/load/bench_kernels.h"

enum {
    MAX_COPIES = 512,     // of a case's data
    CHECK_KEYS = 1 << 17, // of the sample that is compared with float64
    CEILING_TRIES = 3,    // of each way, to choose one
    WARM_UPS = 2,
    RESTLESS_TIMES = 3, // so many times the repetitions are made while times spread
    // So many times what makes a run cold, what is left of the last call in the cache is nothing.
    HUGE_TIMES = 16,
};

#define RESTLESS_SPREAD 0.15

// entry is a case of the group.
typedef struct entry {
    const bench_case *c;
    bench_result *result;
    bench_set *sets; // [num_sets]
    uint32_t num_sets, next;
    uint32_t way, ways;
    bool has_peer;
    double us[BENCH_MAX_REPS], ceiling[BENCH_MAX_REPS], peer[BENCH_MAX_REPS];
    bench_pace pace[BENCH_MAX_REPS], peer_pace[BENCH_MAX_REPS];
} entry;

// group_run is what the steps below share.
typedef struct group_run {
    bench_backend *b;
    const bench_backend_ops *ops;
    bench_arena *arena;
    const bench_timing *timing;
    attnd_errinfo *info;
    entry *entries;
    uint32_t num;
    // Copies that one sample takes, of each case alike: so a copy comes again only when all others
    // of all cases have been.  calls is as many, or more where a sample has to be longer.
    uint32_t step, calls;
} group_run;

// copies_of returns how many copies of its data each case gets.  One of a single case is enough
// only when it is huge: what was read before leaves the end of it in the cache.
static uint32_t copies_of(const bench_case *cases, uint32_t num, const bench_timing *timing) {
    uint64_t once = 0;
    bool is_cold = false;
    for (uint32_t i = 0; i < num; i++) {
        once += bench_case_kv_bytes(&cases[i]);
        is_cold = is_cold || !bench_case_is_prefill(&cases[i]);
    }
    uint64_t copies = is_cold ? timing->cold_bytes / once + 1 : 1;
    bool is_huge = once >= HUGE_TIMES * timing->cold_bytes;
    copies = is_cold && num == 1 && copies < 2 && !is_huge ? 2 : copies;
    copies += copies > 1 && copies % 2 != 0; // two halves, which samples take in turns
    return (uint32_t)(copies > MAX_COPIES ? MAX_COPIES : copies);
}

// step_of returns how many copies of each case a sample takes: at most half of them.
static uint32_t step_of(const bench_case *cases, uint32_t num, const bench_timing *timing) {
    uint64_t once = 0;
    for (uint32_t i = 0; i < num; i++) {
        once += bench_case_kv_bytes(&cases[i]);
    }
    uint64_t step = timing->sample_bytes / once + 1;
    uint32_t most = copies_of(cases, num, timing) / 2;
    return step < most ? (uint32_t)step : most > 0 ? most : 1;
}

uint64_t bench_group_bytes(const bench_case *cases, uint32_t num, const bench_timing *timing) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < num; i++) {
        bytes += bench_set_bytes(&cases[i]);
    }
    return bytes * copies_of(cases, num, timing);
}

static attnd_err make_sets(group_run *g, entry *e, uint32_t copies, int64_t delta) {
    e->sets = calloc(copies, sizeof(*e->sets));
    if (!e->sets) {
        return attnd_fail(g->info, ATTND_ENOMEM, NULL, "no memory for %u sets", copies);
    }
    for (; e->num_sets < copies; e->num_sets++) {
        uint64_t seed = g->timing->seed + e->num_sets;
        attnd_err err = bench_set_init(&e->sets[e->num_sets], e->c, g->arena, delta, seed,
                                       g->ops->threads(g->b), g->info);
        if (err != ATTND_OK) {
            return err;
        }
    }
    return ATTND_OK;
}

static attnd_err make_all_sets(group_run *g, const bench_case *cases) {
    int64_t delta = 0;
    uint32_t copies = copies_of(cases, g->num, g->timing);
    bench_arena_reset(g->arena);
    attnd_err err = g->ops->place(g->b, g->arena, &delta, g->info);
    for (uint32_t i = 0; i < g->num && err == ATTND_OK; i++) {
        err = make_sets(g, &g->entries[i], copies, delta);
    }
    return err == ATTND_OK ? g->ops->put(g->b, g->arena, g->info) : err;
}

// check runs the first copy and compares a sample of what it wrote with float64.
static attnd_err check(group_run *g, entry *e) {
    bench_set *s = &e->sets[0];
    bench_exact exact;
    attnd_err err =
        bench_exact_init(&exact, &s->params, CHECK_KEYS, g->timing->seed, g->ops->threads(g->b));
    if (err != ATTND_OK) {
        return attnd_fail(g->info, err, NULL, "no memory for the reference");
    }
    err = g->ops->run(g->b, &s->launch, &e->result->choice, g->info);
    err = err == ATTND_OK ? g->ops->get(g->b, s->out, s->out_bytes, g->info) : err;
    if (err == ATTND_OK) {
        e->result->error = bench_exact_compare(&exact, &s->params);
    }
    bench_exact_fini(&exact);
    return err;
}

static const bench_set *next_set(entry *e) {
    return &e->sets[e->next++ % e->num_sets];
}

// sample_ceiling reads the next copies in one of the ways that there are.
static attnd_err sample_ceiling(group_run *g, entry *e, uint32_t way, bench_ceiling *out) {
    const bench_set *sets[MAX_COPIES];
    for (uint32_t i = 0; i < g->step; i++) {
        sets[i] = next_set(e);
    }
    return g->ops->ceiling(g->b, e->c, way, sets, g->step, out, g->info);
}

// choose_ceilings takes for each case the way that is best in the middle of a few tries.
static attnd_err choose_ceilings(group_run *g) {
    double best[BENCH_MAX_GROUP] = {0};
    uint32_t ways = g->entries[0].ways;
    for (uint32_t way = 0; way < ways && ways > 1; way++) {
        double tries[BENCH_MAX_GROUP][CEILING_TRIES];
        for (uint32_t i = 0; i < g->num * CEILING_TRIES; i++) {
            bench_ceiling c = {0};
            attnd_err err = sample_ceiling(g, &g->entries[i % g->num], way, &c);
            if (err != ATTND_OK) {
                return err;
            }
            tries[i % g->num][i / g->num] = c.value;
        }
        for (uint32_t i = 0; i < g->num; i++) {
            double median = bench_spread_of(tries[i], CEILING_TRIES).median;
            g->entries[i].way = median > best[i] ? way : g->entries[i].way;
            best[i] = fmax(best[i], median);
        }
    }
    return ATTND_OK;
}

static attnd_err sample_calls(group_run *g, entry *e, double *us) {
    const attn_params *launches[MAX_COPIES];
    for (uint32_t i = 0; i < g->calls; i++) {
        launches[i] = &next_set(e)->launch;
    }
    return g->ops->time(g->b, launches, g->calls, us, g->info);
}

// prepare checks all cases, warms up, and settles how ceilings are measured.
static attnd_err prepare(group_run *g) {
    attnd_err err = ATTND_OK;
    double us;
    for (uint32_t i = 0; i < g->num && err == ATTND_OK; i++) {
        entry *e = &g->entries[i];
        const char *peer = g->ops->peer_name ? g->ops->peer_name(g->b, e->c) : NULL;
        e->has_peer = peer != NULL;
        e->ways = g->ops->ceilings(g->b, e->c);
        snprintf(e->result->peer, sizeof(e->result->peer), "%s", peer ? peer : "");
        err = check(g, e);
        if (err == ATTND_OK && g->ops->plan_us) {
            e->result->plan_us = g->ops->plan_us(g->b, &e->sets[0].launch);
        }
    }
    err = err == ATTND_OK ? choose_ceilings(g) : err;
    for (uint32_t i = 0; i < g->num * WARM_UPS && err == ATTND_OK; i++) {
        err = sample_calls(g, &g->entries[i % g->num], &us);
    }
    return err;
}

static bench_pace pace_of(const group_run *g) {
    return g->ops->pace ? g->ops->pace(g->b) : (bench_pace){0};
}

static bench_pace median_pace(const bench_pace *paces, uint32_t reps) {
    double mhz[BENCH_MAX_REPS], watts[BENCH_MAX_REPS];
    for (uint32_t i = 0; i < reps; i++) {
        mhz[i] = paces[i].mhz;
        watts[i] = paces[i].watts;
    }
    return (bench_pace){bench_spread_of(mhz, reps).median, bench_spread_of(watts, reps).median};
}

static attnd_err sample_peer(group_run *g, entry *e, uint32_t rep) {
    if (!e->has_peer) {
        return ATTND_OK;
    }
    // One more than the repetitions until the case's own copies come again.
    uint32_t copies = e->num_sets / (2 * g->step) + 1;
    attnd_err err = g->ops->peer(g->b, e->c, copies, &e->peer[rep], g->info);
    e->peer_pace[rep] = pace_of(g);
    return err;
}

static attnd_err repeat(group_run *g, uint32_t rep) {
    attnd_err err = ATTND_OK;
    for (uint32_t i = 0; i < g->num && err == ATTND_OK; i++) {
        entry *e = &g->entries[i];
        if (e->ways == 0) {
            continue;
        }
        err = sample_ceiling(g, e, e->way, &e->result->ceiling);
        e->ceiling[rep] = e->result->ceiling.value;
    }
    for (uint32_t i = 0; i < g->num && err == ATTND_OK; i++) {
        err = sample_calls(g, &g->entries[i], &g->entries[i].us[rep]);
        g->entries[i].pace[rep] = pace_of(g);
        if (err == ATTND_OK && g->ops->peer_follows) {
            err = sample_peer(g, &g->entries[i], rep);
        }
    }
    for (uint32_t i = 0; i < g->num && err == ATTND_OK && !g->ops->peer_follows; i++) {
        err = sample_peer(g, &g->entries[i], rep);
    }
    return err;
}

// is_restless says whether the times of any case so far spread so much that more are wanted.
static bool is_restless(const group_run *g, uint32_t reps) {
    double x[BENCH_MAX_REPS];
    for (uint32_t i = 0; i < g->num; i++) {
        memcpy(x, g->entries[i].us, reps * sizeof(*x));
        if (bench_spread_of(x, reps).spread > RESTLESS_SPREAD) {
            return true;
        }
    }
    return false;
}

static void finish(entry *e, uint32_t calls, uint32_t reps) {
    bench_result *r = e->result;
    r->calls = calls;
    r->us = bench_spread_of(e->us, reps);
    r->pace = median_pace(e->pace, reps);
    if (e->ways > 0) {
        r->ceiling_value = bench_spread_of(e->ceiling, reps);
    }
    if (e->has_peer) {
        r->peer_us = bench_spread_of(e->peer, reps);
        r->peer_pace = median_pace(e->peer_pace, reps);
    }
    bench_result_derive(r);
}

attnd_err bench_group_run(bench_backend *b, const bench_backend_ops *ops, bench_arena *arena,
                          const bench_case *cases, uint32_t num, const bench_timing *timing,
                          bench_result *results, attnd_errinfo *info) {
    group_run g = {b, ops, arena, timing, info, calloc(num, sizeof(entry)), num, 1, 1};
    attnd_err err = g.entries ? ATTND_OK : attnd_fail(info, ATTND_ENOMEM, NULL, "no memory");
    for (uint32_t i = 0; i < num && err == ATTND_OK; i++) {
        results[i] = (bench_result){.c = cases[i]};
        g.entries[i].c = &cases[i];
        g.entries[i].result = &results[i];
    }
    err = err == ATTND_OK ? make_all_sets(&g, cases) : err;
    g.step = step_of(cases, num, timing);
    g.calls = g.step > timing->sample_calls ? g.step : timing->sample_calls;
    err = err == ATTND_OK ? prepare(&g) : err;
    uint32_t most = RESTLESS_TIMES * timing->reps;
    most = most < BENCH_MAX_REPS ? most : BENCH_MAX_REPS;
    uint32_t reps = 0;
    while (err == ATTND_OK && reps < most && (reps < timing->reps || is_restless(&g, reps))) {
        err = repeat(&g, reps++);
    }
    for (uint32_t i = 0; i < num && g.entries; i++) {
        if (err == ATTND_OK) {
            finish(&g.entries[i], g.calls, reps);
        }
        for (uint32_t k = 0; k < g.entries[i].num_sets; k++) {
            bench_set_fini(&g.entries[i].sets[k]);
        }
        free(g.entries[i].sets);
    }
    free(g.entries);
    return err;
}
