#include "tests/load/bench_team.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct team {
    bench_team_fn fn;
    void *arg;
    uint32_t num;
    _Atomic uint32_t waiting;
} team;

typedef struct member {
    team *team;
    uint32_t worker;
    double begin, end;
    pthread_t thread;
} member;

double bench_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *run(void *arg) {
    member *m = arg;
    atomic_fetch_add(&m->team->waiting, 1);
    while (atomic_load(&m->team->waiting) < m->team->num) {
    }
    m->begin = bench_now();
    m->team->fn(m->team->arg, m->worker);
    m->end = bench_now();
    return NULL;
}

double bench_team_run(bench_team_fn fn, void *arg, uint32_t num) {
    team t = {.fn = fn, .arg = arg, .num = num};
    member *members = calloc(num, sizeof(*members));
    if (!members) {
        fprintf(stderr, "attn-bench: no memory for %u threads\n", num);
        exit(1);
    }
    for (uint32_t i = 0; i < num; i++) {
        members[i].team = &t;
        members[i].worker = i;
        if (i > 0 && pthread_create(&members[i].thread, NULL, run, &members[i]) != 0) {
            fprintf(stderr, "attn-bench: thread %u of %u does not start\n", i + 1, num);
            exit(1);
        }
    }
    run(&members[0]);
    double begin = members[0].begin;
    double end = members[0].end;
    for (uint32_t i = 1; i < num; i++) {
        pthread_join(members[i].thread, NULL);
        // The first that sees all there: a late one may find its work done by others.
        begin = members[i].begin < begin ? members[i].begin : begin;
        end = members[i].end > end ? members[i].end : end;
    }
    free(members);
    return end - begin;
}
