// client is the inside of libattnd: the client object and how its parts make requests.
#ifndef ATTND_PROTO_CLIENT_CLIENT_H
#define ATTND_PROTO_CLIENT_CLIENT_H

#include <pthread.h>

#include "proto/client/attnd.h"
#include "proto/client/client_conn.h"

// client_model is what messages need to know of an open model.
typedef struct client_model {
    struct client_model *next;
    uint32_t model;
    uint32_t q_heads, kv_heads, head_dim, v_head_dim;
    attnd_dtype dtype;
} client_model;

struct attnd_client {
    client_conn *conn; // any thread
    attnd_limits limits;
    int32_t timeout_ms;
    pthread_mutex_t lock; // guards models
    client_model *models; // owned; a model that was opened twice is in it twice
};

// client_model_get copies an open model of this client: ATTND_ENOENT.
attnd_err client_model_get(attnd_client *c, uint32_t model, client_model *out, attnd_errinfo *info);

// client_models_free forgets all models of a client that is closing.
void client_models_free(attnd_client *c);

// client_request makes a request of bytes, header included, all zero.  ATTND_EMSGSIZE: over the
// daemon's limit.
attnd_err client_request(attnd_client *c, uint64_t bytes, client_msg *out, attnd_errinfo *info);

// client_call is client_conn_call with the client's timeout and extra_ms more.
attnd_err client_call(attnd_client *c, proto_op op, client_msg *m, uint32_t extra_ms,
                      attnd_errinfo *info);

// client_call_fixed makes a request of which request and reply are fixed structs.  *reply
// [reply_bytes] is untouched on failure; NULL when there is nothing in it.
attnd_err client_call_fixed(attnd_client *c, proto_op op, const void *body, size_t bytes,
                            void *reply, size_t reply_bytes, attnd_errinfo *info);

// client_call_json sends a JSON text (NULL = empty body); *reply's body is then JSON that
// proto_json_check took.
attnd_err client_call_json(attnd_client *c, proto_op op, const char *json, client_msg *reply,
                           attnd_errinfo *info);

// client_entries returns how many positions, or rows of a tree mask, a sequence of a step has.
static inline uint64_t client_entries(const attnd_step_seq *seq) {
    return seq->new_len ? seq->new_len : seq->q_len;
}

// client_check_seqs checks the bounds of a step's sequences: EINVAL.
attnd_err client_check_seqs(const attnd_client *c, const attnd_step_seq *seqs, uint32_t num_seqs,
                            attnd_errinfo *info);

#endif
