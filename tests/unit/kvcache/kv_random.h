// kv_random is what the parts of the long random run share: see test_kv_random.c.
#ifndef ATTND_TESTS_KV_RANDOM_H
#define ATTND_TESTS_KV_RANDOM_H

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kvcache/kv_cache.h"
#include "kvcache/kv_pool.h"
#include "tests/check_main.h"
#include "tests/unit/kvcache/kv_naive.h"
#include "tests/unit/kvcache/kv_rows.h"

enum {
    SLAB_BYTES = 2048,
    SLABS = 24,
};

extern char memory[SLABS * SLAB_BYTES];
extern kv_cache *kv;
extern naive n;
extern uint32_t tenants[NAIVE_TENANTS];
extern uint64_t seed, rng, now_ms;
extern uint32_t op;
extern attnd_errinfo info;

// came is how often the run came by.
typedef struct came_by {
    uint32_t done, refused, waits, moved, copied, closed;
    uint32_t found_blocks, found_rows;
    uint32_t behind, unseen; // found blocks behind windows; truncations and reads that need one
} came_by;
extern came_by came;

// Blocks of 256, 512 and 768 bytes: 8, 4 and 2 a slab.
static const uint32_t shape_bytes[] = {256, 512, 768}, shape_slab[] = {8, 4, 2};

// Only a failure goes to Check, which writes to a pipe for every assertion that holds.
#define FAIL(...)                                                      \
    do {                                                               \
        printf("kv_random seed=%" PRIu64 " operation=%u\n", seed, op); \
        ck_abort_msg(__VA_ARGS__);                                     \
    } while (0)
#define CHECK(cond)                            \
    do {                                       \
        if (!(cond)) {                         \
            FAIL("%s (%s)", #cond, info.text); \
        }                                      \
    } while (0)
#define CHECK_ERR(expr, want)                                                                 \
    do {                                                                                      \
        attnd_err got_err = (expr);                                                           \
        if (got_err != (want)) {                                                              \
            FAIL("%s is %s, not %s (%s)", #expr, attnd_errname(got_err), attnd_errname(want), \
                 info.text);                                                                  \
        }                                                                                     \
    } while (0)

// below returns a random number below limit, chance true in so many percent.
uint32_t below(uint32_t limit);
bool chance(uint32_t percent);

// ---- kv_random_seqs.c

kv_request request(int session); // under an id that is new, or none
// answered notes what a request was answered.
void answered(int session, kv_request rq, kv_op kind, uint64_t id, const uint32_t *values,
              uint32_t num_values);
// rights returns what a session is answered that wants to change a sequence.
attnd_err rights(int session, int seq, bool needs_idle);
const char *name_text(int name);
void open_session(int slot);

// Operations: one call of kvcache each, and the same of the naive model.
void op_reply(int session);
void op_create(int session);
void op_fork(int session);
void op_truncate(int session);
void op_free(int session);
void op_keep(int session);
void op_attach(int session);
void op_expire(int session);
void op_close(int session);
void op_quota(int session);

// ---- kv_random_steps.c

// check_rows checks the committed tokens of sequence i of a step, those that it still has.
void check_rows(const naive_step *st, uint32_t i);
void abort_step(int slot, kv_request rq);
void op_open(int session);
void op_commit(int session);
void op_abort(int session);

#endif
