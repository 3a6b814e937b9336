// client is the inside of libattnd: the client object and how its parts make requests.
#ifndef ATTND_PROTO_CLIENT_CLIENT_H
#define ATTND_PROTO_CLIENT_CLIENT_H

#include <pthread.h>

#include "proto/client/attnd_engine.h"
#include "proto/client/client_conn.h"

// client_model is what messages need to know of an open model.
typedef struct client_model {
    struct client_model *next;
    uint32_t model;
    uint32_t q_heads, kv_heads, head_dim, v_head_dim;
    attnd_dtype dtype;
    char *json; // of model_open, to open it again; owned (free)
} client_model;

// client_unsure is a commit of which the answer did not come: tried again, it goes under the same
// request id, so that the daemon says whether it was made.
typedef struct client_unsure {
    uint64_t step, request;
} client_unsure;

// client_async is an attend that was started: client_async.c.
typedef struct client_async {
    struct client_async *next;
    attnd_attend_args args;
    client_model model;
    client_flight flight; // holds its connection
    uint64_t deadline_ms;
    attnd_attend_cb *cb;
    void *ctx;
} client_async;

struct attnd_client {
    char *url, *client_name, *tenant; // owned
    attnd_transport transport;
    int32_t timeout_ms;
    uint64_t ring_bytes;
    uint32_t spin_us;
    const attnd_engine *engine; // NULL = the daemon attends
    int32_t engine_threads;
    uint64_t region_bytes;
    uint8_t engine_key[16];         // by which the daemon knows it among the process's clients
    pthread_mutex_t reconnect_lock; // taken before lock
    pthread_mutex_t lock;           // guards all below
    client_conn *conn;
    attnd_limits limits;
    attnd_transport now; // that conn uses
    uint64_t session;
    uint8_t secret[16];
    client_model *models; // owned; a model that was opened twice is in it twice
    uint64_t tables_room; // bytes of tables that a step's reply has room for
    bool commits_wait;    // of the engine's work: others may get to see the sequences
    client_unsure unsure[CLIENT_MAX_SLOTS];
    uint32_t next_unsure;
    client_async asyncs[CLIENT_MAX_SLOTS];
    client_async *idle_asyncs, *started; // started: oldest first
};

// client_in_process says whether the client attends itself, over the daemon's arena.
static inline bool client_in_process(const attnd_client *c) {
    return c->engine && !c->engine->service;
}

// client_model_get copies an open model of this client (out NULL: only looks): ATTND_ENOENT.
attnd_err client_model_get(attnd_client *c, uint32_t model, client_model *out, attnd_errinfo *info);

// client_models_free forgets all models.  Lock held, or nobody else there.
void client_models_free(attnd_client *c);

// client_models_again opens all models again, after a re-attach.  ATTND_ESTALE when one has become
// another.
attnd_err client_models_again(attnd_client *c, attnd_errinfo *info);

// client_unsure_of returns the request id of a commit of the step that had no answer, 0 for none.
// client_unsure_set says that it had none, or (err an answer) that it has one.
uint64_t client_unsure_of(attnd_client *c, uint64_t step);
void client_unsure_set(attnd_client *c, uint64_t step, uint64_t request, attnd_err err);

// client_get_limits copies them.
attnd_limits client_get_limits(attnd_client *c);

// client_request makes a request of bytes, header included, for a reply of at most reply_bytes.
// What is not written may hold anything.  ATTND_EMSGSIZE: over the daemon's limit.
attnd_err client_request(attnd_client *c, uint64_t bytes, uint64_t reply_bytes, client_msg *out,
                         attnd_errinfo *info);

// client_call is client_conn_call on the connection that *m was made for, with the client's timeout
// and extra_ms more.  how may be NULL.
attnd_err client_call(attnd_client *c, proto_op op, client_msg *m, uint32_t extra_ms,
                      const client_start_opts *how, attnd_errinfo *info);

// client_call_fixed makes a request of which request and reply are fixed structs.  *reply
// [reply_bytes] is untouched on failure; NULL when there is nothing in it.
attnd_err client_call_fixed(attnd_client *c, proto_op op, const void *body, size_t bytes,
                            void *reply, size_t reply_bytes, attnd_errinfo *info);

// client_call_json sends a JSON text (NULL = empty body); *reply is then a text of the caller's
// (free) that proto_json_check took.  client_conn_json is the same without the daemon's limit.
attnd_err client_call_json(attnd_client *c, proto_op op, const char *json, char **reply,
                           attnd_errinfo *info);
attnd_err client_conn_json(client_conn *conn, proto_op op, const char *json, int32_t timeout_ms,
                           char **reply, attnd_errinfo *info);

// client_conn_of holds the client's connection for the caller, who releases it.
client_conn *client_conn_of(attnd_client *c);

// client_engine_model opens a model of the daemon in the engine; block_tokens is the daemon's
// reply's.
attnd_err client_engine_model(attnd_client *c, uint32_t model, const char *json,
                              uint32_t block_tokens, attnd_errinfo *info);

// client_engine_step opens a step in the engine of the connection that brought the reply, whose
// tables begin at tables_off.
attnd_err client_engine_step(const client_msg *reply, uint32_t tables_off,
                             const attnd_engine_step *step, attnd_errinfo *info);

// client_engine_ready checks that a step may be committed (attnd_engine.h, step_ready); in service
// mode it waits for the answers to its attends.  ATTND_OK without an engine.  client_engine_close
// forgets a step that has ended.
attnd_err client_engine_ready(attnd_client *c, uint64_t step, const attnd_accept *accept,
                              uint32_t num_seqs, attnd_errinfo *info);
void client_engine_close(attnd_client *c, uint64_t step);

// client_engine_settle waits for all work in process, or in service mode for that of a step's
// stream (step 0: not at all).  client_engine_collect waits for the answers that are left of a step
// that was cancelled in service mode, and returns whether there were any.
attnd_err client_engine_settle(attnd_client *c, uint64_t step, attnd_errinfo *info);
bool client_engine_collect(attnd_client *c, uint64_t step);
void client_engine_abandon(attnd_client *c); // all steps; returns when nothing works on them

// client_engine_is_here says whether the client attends in its own process.
bool client_engine_is_here(const attnd_client *c);

// client_engine_take_key finds a key that no other client of the process has; false: 64 have one.
bool client_engine_take_key(uint8_t key[16]);
void client_engine_give_key(const uint8_t key[16]);

// client_engine_waits makes every commit wait for its work from now on.
void client_engine_waits(attnd_client *c);

// client_engine_attend attends by the engine; args without buffers.
attnd_err client_engine_attend(attnd_client *c, const attnd_attend_args *args, attnd_ran *ran,
                               attnd_errinfo *info);

// client_async_end ends what was started and not polled.
void client_async_end(attnd_client *c);

// client_entries returns how many positions, or rows of a tree mask, a sequence of a step has.
static inline uint64_t client_entries(const attnd_step_seq *seq) {
    return seq->new_len ? seq->new_len : seq->q_len;
}

// client_check_seqs checks the bounds of a step's sequences: EINVAL.
attnd_err client_check_seqs(attnd_client *c, const attnd_step_seq *seqs, uint32_t num_seqs,
                            attnd_errinfo *info);

#endif
