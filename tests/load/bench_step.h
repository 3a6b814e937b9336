// bench_step is one step of the runtime against the daemon: open it for a batch of sequences,
// attend each layer with freshly made q, k and v, commit; and keep the sampled output rows for the
// verifier. All memory is made at the start.  One thread.
#ifndef ATTND_LOAD_BENCH_STEP_H
#define ATTND_LOAD_BENCH_STEP_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/client/attnd.h"
#include "tests/load/bench_model.h"
#include "tests/load/bench_stats.h"
#include "tests/load/bench_verify.h"

// bench_link is the connection that steps run on.  Borrows everything.
typedef struct bench_link {
    attnd_client *client;
    uint32_t model_id;
    uint64_t seed;
    uint64_t patience_us;              // how long EBUSY is retried
    const volatile sig_atomic_t *stop; // not 0: give up waiting
    bench_stats *stats;
    bench_verify *verify; // NULL = nothing is verified
    double verify_share;  // of the rows
    bool gives_tokens;    // ids, so that the daemon may have prefixes in its cache
} bench_link;

// bench_retry makes a loop around a call that may be refused for the moment:
//     bench_retry r = {0};
//     do { err = call(); } while (bench_retry_again(&r, link, err));
// bench_retry_again returns false unless err is EBUSY; else it counts, sleeps (1 ms, doubling up to
// 100 ms), and returns true until patience_us have passed or stop is set.
typedef struct bench_retry {
    uint64_t since_us;
    uint32_t sleep_us;
} bench_retry;
bool bench_retry_again(bench_retry *r, const bench_link *link, attnd_err err);

// bench_retry_wait sleeps in the same way, whatever the reason; false when patience is over.
bool bench_retry_wait(bench_retry *r, const bench_link *link);

typedef struct bench_step bench_step;

attnd_err bench_step_create(bench_step **out, const bench_model *m, uint32_t max_seqs,
                            uint32_t max_rows);
void bench_step_free(bench_step *step);

// bench_step_clear empties the batch.
void bench_step_clear(bench_step *step);

// bench_step_add adds num tokens of a sequence, from position first on.  *open is the sequence's
// open batch for the verifier (may point to NULL), which a run may replace.
void bench_step_add(bench_step *step, uint64_t seq, const bench_prompt *prompt, uint32_t first,
                    uint32_t num, bench_batch **open);
uint32_t bench_step_rows(const bench_step *step); // with those that will turn out to be cached
uint32_t bench_step_seqs(const bench_step *step);

// bench_step_run runs the batch.  ATTND_ENOSPC: the pool has no blocks for it, nothing happened.
// Any other error has been counted in stats and the step was canceled; the open batches may then
// hold rows without outputs and are to be discarded.
attnd_err bench_step_run(bench_step *step, const bench_link *link, attnd_errinfo *info);

#endif
