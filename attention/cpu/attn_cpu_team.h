// attn_cpu_team is a fixed set of threads that help a caller with one piece of work after another.
#ifndef ATTND_ATTENTION_CPU_ATTN_CPU_TEAM_H
#define ATTND_ATTENTION_CPU_ATTN_CPU_TEAM_H

#include <stdint.h>

#include "proto/err.h"

typedef struct attn_cpu_team attn_cpu_team;

// attn_cpu_team_fn is the work: called at the same time by the caller and by the helpers that came
// in time, so it takes its pieces from shared counters.  worker is 0 for the caller.
typedef void (*attn_cpu_team_fn)(void *arg, uint32_t worker);

// attn_cpu_team_create starts num_workers - 1 helpers.  ATTND_ENOMEM when threads do not start. The
// caller owns *out: attn_cpu_team_free.
attnd_err attn_cpu_team_create(attn_cpu_team **out, uint32_t num_workers);

// attn_cpu_team_free ends the helpers.  Accepts NULL.
void attn_cpu_team_free(attn_cpu_team *team);

// attn_cpu_team_run calls fn on the calling thread and on every helper that wakes before that call
// returns; comes back when none is inside fn any more.  A helper that wakes late finds nothing to
// do, so short work never waits for it.  One caller at a time.
void attn_cpu_team_run(attn_cpu_team *team, attn_cpu_team_fn fn, void *arg);

// attn_cpu_relax is one turn of a waiting loop: a pause, now and then the processor for others.
void attn_cpu_relax(uint32_t *turns);

#endif
