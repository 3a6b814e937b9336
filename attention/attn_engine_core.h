// attn_engine_core is what all engines have in common: models, open steps with their tables, the
// checks of an attend, and its rows.  Where memory lies and how a launch runs is behind a table.
// Private to engines.
#ifndef ATTND_ATTENTION_ATTN_ENGINE_CORE_H
#define ATTND_ATTENTION_ATTN_ENGINE_CORE_H

#include <pthread.h>

#include "attention/attn_model.h"
#include "attention/attn_rows.h"
#include "proto/client/attnd_engine.h"

typedef struct attn_engine attn_engine;

// attn_engine_memory is host memory that launches read: a model's arrays, a step's tables.
// Where they see it, byte i of host is byte i of device.
typedef struct attn_engine_memory {
    uint8_t *host, *device;
    size_t bytes;
} attn_engine_memory;

typedef struct attn_engine_model {
    struct attn_engine_model *next;
    uint32_t number;
    attn_model *attn; // owned
    attn_engine_memory floats;
} attn_engine_model;

typedef struct attn_engine_step {
    struct attn_engine_step *next;
    uint64_t handle; // 0 = a step's memory without a step
    const attn_engine_model *model;
    uint32_t num_seqs, rows, new_rows;
    attn_engine_memory memory; // tables, positions, tree masks; used bytes of it:
    size_t used;
    attn_seq *seqs;          // [max_seqs]; positions and trees point into memory
    const uint32_t **tables; // [max_seqs, ATTN_MODEL_GROUPS], into memory
    uint32_t max_seqs;
    uint64_t attended[PROTO_MAX_LAYERS / 64]; // a bit a layer
    bool has_tokens;                          // its blocks go into the prefix cache
    // a backend's, zero at first
    bool uploaded, runs; // memory is where launches see it; something may still use it
    bool captures;       // the last run was a capture: nothing was attended
    void *stream, *event;
    attn_engine_memory lists;       // of block masks; bytes of it
    size_t lists_used, lists_shown; // that are used, and that launches see
} attn_engine_step;

// attn_engine_ops is what a kind of memory does.  Called one at a time, under the engine's lock.
typedef struct attn_engine_ops {
    // open maps the arena: fills in pool, pool_bytes and backend.
    attnd_err (*open)(attn_engine *e, const attnd_engine_opts *opts, attnd_errinfo *info);
    void (*close)(attn_engine *e); // accepts a half-made one
    // check_model says what the kernels do not take.
    attnd_err (*check_model)(attn_engine *e, const attn_model *m, attnd_errinfo *info);
    // alloc makes memory of at least bytes.  ATTND_ENOMEM, ATTND_ECUDA.  show makes all of it what
    // launches see.
    attnd_err (*alloc)(attn_engine *e, attn_engine_memory *out, size_t bytes, attnd_errinfo *info);
    attnd_err (*show)(attn_engine *e, const attn_engine_memory *m, attnd_errinfo *info);
    void (*free)(attn_engine *e, attn_engine_memory *m); // all zero: does nothing
    // lists gives *out, bytes for the lists of an attend's block mask, which its run shows to
    // launches.  ATTND_ENOMEM, ATTND_ECUDA, ATTND_ENOTSUP: not with these args.  NULL: launches
    // read the caller's lists.
    attnd_err (*lists)(attn_engine *e, attn_engine_step *s, const attnd_attend_args *args,
                       size_t bytes, attn_engine_memory *out, attnd_errinfo *info);
    // run runs a launch; pointers of its rows are device's.
    attnd_err (*run)(attn_engine *e, attn_engine_step *s, const attn_params *p,
                     const attnd_attend_args *args, attn_choice *choice, attnd_errinfo *info);
    // replay is attnd_step_replay.
    attnd_err (*replay)(attn_engine *e, uint64_t captured, attn_engine_step *s, void *stream,
                        attnd_errinfo *info);
    // ready returns when what was run of a step has ended.  leave notes that nothing more is run of
    // it; busy is true while its memory is in use after that.
    attnd_err (*ready)(attn_engine *e, attn_engine_step *s, attnd_errinfo *info);
    void (*leave)(attn_engine *e, attn_engine_step *s);
    bool (*busy)(attn_engine *e, attn_engine_step *s);
    void (*drop)(attn_engine *e, attn_engine_step *s); // before a step's memory is freed
} attn_engine_ops;

struct attn_engine {
    const attn_engine_ops *ops;
    pthread_mutex_t lock; // guards all below
    void *pool;
    uint64_t pool_bytes;
    bool deterministic;
    void *backend;
    attn_engine_model *models; // newest first
    attn_engine_step *steps;
    attn_row *rows;         // [max_rows]
    attn_block_mask *masks; // [max_rows], of a step's sequences
    uint32_t max_rows;
};

// attn_engine_open and what follows are the functions of attnd_engine.
attnd_err attn_engine_open(void **out, const attn_engine_ops *ops, const attnd_engine_opts *opts,
                           attnd_errinfo *info);
void attn_engine_close(void *state);
attnd_err attn_engine_model_open(void *state, uint32_t model, const char *json,
                                 uint32_t block_tokens, attnd_errinfo *info);
attnd_err attn_engine_step_open(void *state, const attnd_engine_step *step, attnd_errinfo *info);
attnd_err attn_engine_attend(void *state, const attnd_attend_args *args, attnd_ran *ran,
                             attnd_errinfo *info);
attnd_err attn_engine_replay(void *state, uint64_t captured, uint64_t step, void *stream,
                             attnd_errinfo *info);
attnd_err attn_engine_step_ready(void *state, uint64_t step, const attnd_accept *accept,
                                 uint32_t num_seqs, bool soon, attnd_errinfo *info);
void attn_engine_step_close(void *state, uint64_t step);
attnd_err attn_engine_abandon(void *state, attnd_errinfo *info);
attnd_err attn_engine_settle(void *state, attnd_errinfo *info);

// ATTN_ENGINE_CORE is of an engine's attnd_engine what all of them share: everything but its name
// and its open, which calls attn_engine_open.
#define ATTN_ENGINE_CORE                                                  \
    .close = attn_engine_close, .model_open = attn_engine_model_open,     \
    .step_open = attn_engine_step_open, .attend = attn_engine_attend,     \
    .replay = attn_engine_replay, .step_ready = attn_engine_step_ready,   \
    .step_close = attn_engine_step_close, .abandon = attn_engine_abandon, \
    .settle = attn_engine_settle

// attn_engine_params checks args against an open step and writes the rows of their launch to
// e->rows; *rope is kept as long as the rows.  For backends' replay.
attnd_err attn_engine_params(attn_engine *e, attn_engine_step *s, const attnd_attend_args *args,
                             attn_params *out, attn_rope *rope, attnd_errinfo *info);
void attn_engine_mark(attn_engine_step *s, uint32_t layer); // as attended

#endif
