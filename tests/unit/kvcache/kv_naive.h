// kv_naive is what kvcache should do, said in the plainest way: a sequence is an array of token
// values, and for every block that it should hold a number; blocks are equal when numbers are.  It
// knows no entries, slabs or bits, and is written from kv_cache.h alone.
#ifndef ATTND_TESTS_KV_NAIVE_H
#define ATTND_TESTS_KV_NAIVE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    NAIVE_TENANTS = 2,
    NAIVE_MODELS = 5,
    NAIVE_SEQS = 40,
    NAIVE_SESSIONS = 5,
    NAIVE_STEPS = 6,
    NAIVE_STEP_SEQS = 4,
    NAIVE_GROUPS = 2,
    NAIVE_SEQ_BLOCKS = 12, // a group
    NAIVE_MAX_LEN = 48,
    NAIVE_BLOCKS = 4096, // numbers
    NAIVE_REQUESTS = 256,
    NAIVE_NAMES = 12,
    NAIVE_MARGIN = 3, // tokens kept behind windows
};

typedef struct naive_model {
    uint32_t index, tenant; // of kvcache
    uint32_t num_groups;
    uint32_t block_tokens[NAIVE_GROUPS];
    int32_t window[NAIVE_GROUPS]; // tokens looked back, -1 = all
    uint32_t shape[NAIVE_GROUPS]; // which block size: equal numbers compete for blocks
    uint32_t max_len;
    bool has_tree; // prefixes are cached
} naive_model;

typedef struct naive_seq {
    bool live;
    uint64_t handle;
    uint32_t model;
    int session;         // slot, -1 = none
    int name;            // -1 = not kept
    uint64_t ttl, end;   // end: UINT64_MAX = never
    int step;            // slot, -1 = none
    uint32_t len, known; // of len, from the first on: tokens that came with ids
    uint32_t tokens[NAIVE_MAX_LEN];
    uint32_t blocks[NAIVE_GROUPS][NAIVE_SEQ_BLOCKS]; // numbers of blocks
    uint32_t first[NAIVE_GROUPS];                    // blocks before it were given back
} naive_seq;

typedef struct naive_step_seq {
    uint32_t seq, new_len, reserve, q_len, cached;
    bool with_ids;
    uint32_t ids[NAIVE_MAX_LEN];    // [new_len]
    uint32_t copied[NAIVE_GROUPS];  // number of the cached block of which rows are copied, + 1
    uint32_t tokens[NAIVE_MAX_LEN]; // [new_len]
    uint32_t blocks[NAIVE_GROUPS][NAIVE_SEQ_BLOCKS]; // while the step is open
} naive_step_seq;

typedef struct naive_step {
    bool live;
    uint64_t handle;
    int session;
    uint32_t num_seqs;
    naive_step_seq seqs[NAIVE_STEP_SEQS];
} naive_step;

// naive_reply is what a request was answered; of an id that was never used request is 0.
typedef struct naive_reply {
    uint64_t request, id;
    uint32_t op, num_values, values[2 * NAIVE_STEP_SEQS];
} naive_reply;

typedef struct naive_session {
    bool live;
    uint64_t handle;
    uint32_t tenant;
    uint64_t highest;
    naive_reply replies[NAIVE_REQUESTS]; // of request r at r % NAIVE_REQUESTS
} naive_session;

typedef struct naive {
    naive_model models[NAIVE_MODELS];
    uint32_t quota[NAIVE_TENANTS];
    naive_seq seqs[NAIVE_SEQS];
    naive_step steps[NAIVE_STEPS];
    naive_session sessions[NAIVE_SESSIONS];
    uint32_t users[NAIVE_BLOCKS]; // of a block: sequences and steps that hold its number
    uint8_t tenant[NAIVE_BLOCKS], shape[NAIVE_BLOCKS];
    uint32_t entry[NAIVE_BLOCKS]; // of a block with users: where kvcache has it
    bool indexed[NAIVE_BLOCKS];   // it is found by its tokens, so a writer copies it
    uint32_t in_use[4];           // blocks, by shape
    uint32_t tenant_blocks[NAIVE_TENANTS];
    uint32_t next_token, next_block;
} naive;

// naive_new_block makes a block of a shape with one user; naive_hold and naive_drop count users.
uint32_t naive_new_block(naive *n, uint32_t tenant, uint32_t shape);
void naive_hold(naive *n, uint32_t block);
void naive_drop(naive *n, uint32_t block);

uint32_t naive_blocks(uint32_t len, uint32_t block_tokens); // that hold len tokens

// naive_first returns the first block of a group that rows from place `at` on can see, or that lies
// within the margin.
uint32_t naive_first(const naive_model *m, uint32_t g, uint32_t at);

// naive_found returns the first block that a step of a sequence takes over, of those found.
uint32_t naive_found(const naive *n, const naive_step_seq *in, uint32_t g);

// naive_sees says whether a sequence has all that rows from place `at` on see.
bool naive_sees(const naive *n, uint32_t seq, int64_t at);

// naive_need counts blocks that a step takes, by shape: new ones and copies of a last block that
// others use too.  seqs [num].
void naive_need(const naive *n, const naive_step_seq *seqs, uint32_t num, uint32_t need[4]);

// naive_held counts the different blocks that sequences hold, by shape.
void naive_held(const naive *n, const naive_step_seq *seqs, uint32_t num, uint32_t held[4]);

// naive_open fills the blocks of the step's sequences but those that were found in the cache, which
// are there.
void naive_open(naive *n, int step);
// naive_end ends a step: accepted [num_seqs] tokens count, path[i] [accepted[i]] says which of the
// new ones (NULL = the first).  accepted NULL = aborted.
void naive_end(naive *n, int step, const uint32_t *accepted, const uint32_t *const *path);

void naive_fork(naive *n, uint32_t from, uint32_t to); // copies *from but for its handle
void naive_truncate(naive *n, uint32_t seq, uint32_t len);
void naive_free(naive *n, uint32_t seq);

#endif
