// fake_attnd is libattnd without a daemon: the client's functions over a toy cache in this process,
// with faults on request.  It attends in float64, straight from the definition, with a window and
// the default scale and nothing else.  One thread; one client at a time.
#ifndef ATTND_LOAD_FAKE_ATTND_H
#define ATTND_LOAD_FAKE_ATTND_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/client/attnd.h"

typedef struct fake_attnd {
    // set by the test before bench_run
    uint32_t pool_tokens; // of all sequences together; 0 = no end
    uint32_t busy_every;  // each so many calls, one is refused with EBUSY; 0 = none
    uint32_t fail_call;   // the call of this number (from 1) fails with fail_code; 0 = none
    attnd_err fail_code;
    bool fails_on;           // every later call fails too
    uint32_t spoil_attend;   // the attend of this number (from 1) gives one wrong element; 0 = none
    bool spoil_with_nan;     // and that is a NaN
    bool lies_about_lengths; // commit reports a token too many
    bool has_prefix_cache;   // tokens of sequences, also of freed ones, are found by their ids
    bool spoils_cached;      // and what is found is slightly wrong
    bool lies_about_cached;  // step says that all tokens are cached
    attnd_limits limits;     // 0 = large
    void (*on_call)(void);   // may be NULL
    // for the test to read afterwards
    uint32_t calls, attends, creates, frees, preempted_tokens;
    uint32_t live, max_live; // sequences
    uint32_t max_step_rows, max_step_seqs;
    uint32_t tokens; // in the cache now
    bool open;       // a client is connected
} fake_attnd;

extern fake_attnd fake;

// fake_reset empties it.
void fake_reset(void);

#endif
