// bench_team runs one function on several threads at once and times it.  Threads are made for each
// call and begin together, so nothing has to be kept between calls.
#ifndef ATTND_LOAD_BENCH_TEAM_H
#define ATTND_LOAD_BENCH_TEAM_H

#include <stdint.h>

enum { BENCH_MAX_THREADS = 1024 };

typedef void (*bench_team_fn)(void *arg, uint32_t worker);

// bench_team_run calls fn(arg, 0) to fn(arg, num - 1), the first on the calling thread, and returns
// the seconds from when all had started until the last had ended.  A thread that cannot be started
// ends the program.
double bench_team_run(bench_team_fn fn, void *arg, uint32_t num);

// bench_now returns seconds of a clock that never goes back, of nanosecond grain.
double bench_now(void);

#endif
