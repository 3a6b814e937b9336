// The helpers wait on an epoch: odd while work is open, even between.  They spin for SPIN_NS after
// the last work, since a model's layers follow each other within microseconds, then sleep.
//
//   caller: epoch = odd; wake sleepers; fn; epoch = even; wait until inside = 0
//   helper: see odd; inside++; epoch still the same? fn; inside--
//
// inside and epoch are sequentially consistent: either the helper sees the epoch closed, or the
// caller sees the helper inside.  The same pairing holds for sleepers and epoch, so no wake is
// lost.
//
// When there are as many workers as processors, each helper is bound to one, and the caller's is
// left to the caller.  Left to the kernel, a helper that wakes in a virtual machine is put on the
// caller's own processor, since one that is halted passes for taken; the two then share it until a
// tick of load balancing, milliseconds later.
#include "attention/cpu/attn_cpu_team.h"
#include "proto/pause.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

enum {
    SPIN_NS = 50000,
    TURNS_PER_YIELD = 256,
    TURNS_PER_CLOCK = 64,
};

struct attn_cpu_team {
    _Atomic uint64_t epoch;
    _Atomic uint32_t inside;
    _Atomic uint32_t sleepers;
    atomic_bool stopping;
    attn_cpu_team_fn fn; // fn and arg are set before epoch turns odd
    void *arg;
    pthread_mutex_t lock; // guards waiting on wake
    pthread_cond_t wake;
    // Processors that helpers are bound to, and the one that none is: the caller's.
    bool is_bound;
    size_t caller_processor;
    uint32_t num_helpers;
    struct helper {
        attn_cpu_team *team;
        uint32_t worker;
        size_t processor;
        pthread_t thread;
    } helpers[];
};

void attn_cpu_relax(uint32_t *turns) {
    attnd_pause();
    if (++*turns % TURNS_PER_YIELD == 0) {
        sched_yield();
    }
}

static int64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * 1000000000 + ts.tv_nsec;
}

// is_new says that work is open that the helper has not joined yet, or that it has to end.
static bool is_new(attn_cpu_team *team, uint64_t joined) {
    uint64_t epoch = atomic_load(&team->epoch);
    return (epoch % 2 == 1 && epoch != joined) || atomic_load(&team->stopping);
}

static void wait_for_work(attn_cpu_team *team, uint64_t joined) {
    int64_t until = now_ns() + SPIN_NS;
    for (uint32_t turns = 0; !is_new(team, joined);) {
        attn_cpu_relax(&turns);
        if (turns % TURNS_PER_CLOCK == 0 && now_ns() > until) {
            break;
        }
    }
    if (is_new(team, joined)) {
        return;
    }
    pthread_mutex_lock(&team->lock);
    atomic_fetch_add(&team->sleepers, 1);
    while (!is_new(team, joined)) {
        pthread_cond_wait(&team->wake, &team->lock);
    }
    atomic_fetch_sub(&team->sleepers, 1);
    pthread_mutex_unlock(&team->lock);
}

static void *help(void *arg) {
    struct helper *self = arg;
    attn_cpu_team *team = self->team;
    uint64_t joined = 0;
    while (true) {
        wait_for_work(team, joined);
        if (atomic_load(&team->stopping)) {
            return NULL;
        }
        atomic_fetch_add(&team->inside, 1);
        uint64_t epoch = atomic_load(&team->epoch);
        if (epoch % 2 == 1) {
            team->fn(team->arg, self->worker);
            joined = epoch;
        }
        atomic_fetch_sub(&team->inside, 1);
    }
}

static void wake_sleepers(attn_cpu_team *team) {
    if (atomic_load(&team->sleepers) > 0) {
        // A helper that goes to sleep holds the lock from its last look at epoch until it waits.
        pthread_mutex_lock(&team->lock);
        pthread_mutex_unlock(&team->lock);
        pthread_cond_broadcast(&team->wake);
    }
}

// bind asks for a processor; a helper that does not get it runs wherever it is.
static void bind_to(struct helper *h, size_t processor) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    pthread_setaffinity_np(h->thread, sizeof(set), &set);
    h->processor = processor;
}

// bind_helpers gives each helper a processor of its own, if there is one for everybody.
static void bind_helpers(attn_cpu_team *team) {
    cpu_set_t set;
    int caller = sched_getcpu();
    if (sched_getaffinity(0, sizeof(set), &set) != 0 ||
        CPU_COUNT(&set) != (int)team->num_helpers + 1 || caller < 0 ||
        !CPU_ISSET((size_t)caller, &set)) {
        return;
    }
    team->is_bound = true;
    team->caller_processor = (size_t)caller;
    CPU_CLR(team->caller_processor, &set);
    size_t processor = 0;
    for (uint32_t i = 0; i < team->num_helpers; i++, processor++) {
        while (!CPU_ISSET(processor, &set)) {
            processor++;
        }
        bind_to(&team->helpers[i], processor);
    }
}

// make_way sends a helper that is bound to the caller's processor to the one that the caller left.
static void make_way(attn_cpu_team *team) {
    int caller = sched_getcpu();
    if (!team->is_bound || caller < 0 || (size_t)caller == team->caller_processor) {
        return;
    }
    for (uint32_t i = 0; i < team->num_helpers; i++) {
        if (team->helpers[i].processor == (size_t)caller) {
            bind_to(&team->helpers[i], team->caller_processor);
            team->caller_processor = (size_t)caller;
            return;
        }
    }
}

attnd_err attn_cpu_team_create(attn_cpu_team **out, uint32_t num_workers) {
    uint32_t num_helpers = num_workers - 1;
    attn_cpu_team *team = calloc(1, sizeof(*team) + num_helpers * sizeof(team->helpers[0]));
    if (!team) {
        return ATTND_ENOMEM;
    }
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->wake, NULL);
    for (uint32_t i = 0; i < num_helpers; i++) {
        struct helper *h = &team->helpers[i];
        *h = (struct helper){.team = team, .worker = i + 1};
        if (pthread_create(&h->thread, NULL, help, h) != 0) {
            attn_cpu_team_free(team);
            return ATTND_ENOMEM;
        }
        team->num_helpers++;
    }
    bind_helpers(team);
    *out = team;
    return ATTND_OK;
}

void attn_cpu_team_free(attn_cpu_team *team) {
    if (!team) {
        return;
    }
    atomic_store(&team->stopping, true);
    wake_sleepers(team);
    for (uint32_t i = 0; i < team->num_helpers; i++) {
        pthread_join(team->helpers[i].thread, NULL);
    }
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->lock);
    free(team);
}

void attn_cpu_team_run(attn_cpu_team *team, attn_cpu_team_fn fn, void *arg) {
    make_way(team);
    team->fn = fn;
    team->arg = arg;
    atomic_fetch_add(&team->epoch, 1);
    wake_sleepers(team);
    fn(arg, 0);
    atomic_fetch_add(&team->epoch, 1);
    for (uint32_t turns = 0; atomic_load(&team->inside) > 0;) {
        attn_cpu_relax(&turns);
    }
}
