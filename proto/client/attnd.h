// libattnd: the client library of attnd.  A model runtime opens a session, a model and sequences,
// and per token does step, one attend a layer, commit.  Calls block (attnd_attend_start excepted);
// every call may be made from any thread, also at the same time (each has its own request in
// flight).
//
//     attnd_client *c;
//     attnd_connect(&c, "ipc:///run/attnd/attnd.sock", NULL, &info);
//     attnd_model_open(c, &model_opts, &model, &info);
//     attnd_seq_create(c, model, &seq, &info);
//     attnd_step_seq s = {.seq = seq, .new_len = 1};
//     attnd_step_open(c, model, &s, 1, &(attnd_step_opts){.deadline_ms = 1000}, &step, &info);
//     for (layer = 0; layer < layers; layer++)
//         attnd_attend(c, &(attnd_attend_args){.step = step, .layer = layer, .q = q, .k = k, ...},
//         ...);
//     attnd_step_commit(c, step, &(attnd_accept){.accepted = 1}, 1, NULL, &info);
//
// Transports.  The same calls go over NNG messages or over a ring, memory that the client shares
// with a daemon of the same machine.  A ring costs a copy of q, k, v and one of out; attends
// through attnd_buffers cost none.
//
// In process.  With an engine (attn_engine.h) a client that the daemon's configuration trusts
// (server.in_process_uids) maps the daemon's arena and attends by itself: step, commit and all the
// rest go over the ring, attnd_attend is a call in this process, which copies nothing.  Such a
// client can read and destroy what every tenant has cached.  The daemon cannot stop what attends a
// step past its deadline: it only refuses the commit (ATTND_ESTALE), with which, or with
// attnd_step_cancel, libattnd waits for the step's work and has its blocks given back; until then
// the step's sequences are busy.  attnd_cancel reaches no attend; attnd_attend_start is refused.
// The blocks of a client that is gone are given to others when its process is known to have ended.
//
// Service mode on a GPU.  With an engine for it (attn_engine_cuda_service) attends are work in a
// stream of the caller's, too, which the daemon does in its own, batched with that of other
// clients: attnd_attend puts into the stream what hands q, k and v over, waits there for the
// daemon's launch, and brings out back.  Tensors lie in a region, device memory that the daemon has
// made; what is in ordinary device memory is copied there and back, what is in attnd_memory or
// attnd_buffers is not.  The client's GPU is the one that is current at attnd_connect: the
// daemon's own or one that reaches it.  Two processes on one GPU want MPS, under which they share
// their failures, and which serves one user; without it each hand-over costs two context switches.
// Errors of attends come out at the commit, of what the daemon refuses or cannot do, too; out then
// holds nothing.  Under MPS a client that is killed while one of its streams waits ends the
// contexts of all (compute.wait_kernels).  No wait outlasts either end by a second: when the daemon
// is gone, the stream runs to its end, and the next call says ATTND_ECONN.  Streams that attends
// were given in stay until attnd_close.  Of one connection 3968 attends can be captured, those of
// all its graphs together, then ATTND_ENOSPC.  attnd_attend_start is refused; attnd_ran is empty.
//
// Errors.  Each function returns an attnd_err; *info (may be NULL) then names the field and says it
// in a line.  ATTND_ECONN: no connection, or it was lost: every later call says so too, until
// attnd_reconnect.  ATTND_ETIMEDOUT: no reply within timeout_ms (of a step, decode or prefill:
// timeout_ms + deadline_ms).  After either, the outcome of a state-changing call is unknown.
// (tried again, a commit goes under the same request id until it has an answer: ATTND_OK says that
// it counts once, ATTND_ESTALE that the step was aborted with the daemon, and nothing of it
// counts). ATTND_EPROTO: the reply is malformed; nothing of it was used.  When the daemon's end of
// a ring makes no sense, the connection is lost, and every call says ATTND_EPROTO.
//
// A call takes one of 64 slots (fewer when the daemon allows fewer requests in flight); when all
// are taken it waits for one within its timeout.  So does a call that changes state when 63 younger
// ones were made since the oldest that still has no answer (a step that waits for blocks, say), and
// over a ring a call for which its memory has no room left.  Over a ring a request that timed out
// keeps its slot and its memory until the daemon answers after all.
#ifndef ATTND_PROTO_CLIENT_ATTND_H
#define ATTND_PROTO_CLIENT_ATTND_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/dtype.h"
#include "proto/err.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attnd_client attnd_client;

typedef enum attnd_transport {
    ATTND_TRANSPORT_AUTO, // a ring on an ipc:// URL when the daemon gives one, else NNG
    ATTND_TRANSPORT_NNG,
    ATTND_TRANSPORT_RING, // or an error; ATTND_ENOTSUP on other URLs
} attnd_transport;

struct attnd_engine;

typedef struct attnd_connect_opts {
    const char *client_name; // for the daemon's log; NULL = the program's name
    const char *tenant;      // NULL = "default"
    int32_t timeout_ms;      // of connecting and of each call; 0 = 30000
    attnd_transport transport;
    uint64_t ring_bytes; // memory for requests and replies in flight and buffers; 0 = 32 MiB, or
                         // the most that the daemon gives if that is less; ATTND_EMSGSIZE for more,
                         // and for a request that does not fit with its reply
    int32_t spin_us;     // how long one thread of those that wait on a ring watches it before it
                         // sleeps; 0 = 50, below 0 = not at all
    uint64_t session;    // re-attaches that session (attnd_get_session); 0 = a new one.
    uint8_t secret[16];  // ATTND_ESTALE: it is gone; ATTND_EPERM: not its secret
    const struct attnd_engine *engine; // in process or service mode, over a ring; NULL = neither
    int32_t engine_threads; // of the engine on the CPU; 0 = processors of the affinity mask
    uint64_t region_bytes;  // of the region in service mode; 0 = 256 MiB, or the most that the
                            // daemon gives if that is less.  In other modes ATTND_EINVAL.
} attnd_connect_opts;

typedef struct attnd_limits {
    uint32_t message_bytes, in_flight, step_seqs, step_rows, sequences;
} attnd_limits;

// attnd_connect opens a session on an NNG URL.  opts may be NULL.  The caller owns *out:
// attnd_close, which frees the session's sequences that are not kept and calls back what was
// started with ATTND_ECONN; no other call may be running then.  Buffers may be freed later.
// Over NNG, not in a child of fork when the parent has used it before: its threads are gone there.
attnd_err attnd_connect(attnd_client **out, const char *url, const attnd_connect_opts *opts,
                        attnd_errinfo *info);
void attnd_close(attnd_client *c);

// attnd_reconnect connects again after a loss, which it waits for up to timeout_ms, and offers the
// session and its secret.  ATTND_OK: nothing was lost, or a daemon that was restarted has attached
// the session again: models (opened again by this call) and sequences are as they were committed,
// steps that were open are aborted, and buffers have to be made anew.  ATTND_ESTALE: there is a new
// session, and the models, sequences, steps and buffers of the old one are lost; their handles must
// not be used any more, since the daemon may have given the same ones out again.  So let the
// threads of a client stop before one of them reconnects.  Other errors: still no connection;
// ATTND_ETIMEDOUT also when there is one and the daemon does not answer.
attnd_err attnd_reconnect(attnd_client *c, attnd_errinfo *info);

// attnd_get_limits is valid until attnd_reconnect.  attnd_get_transport never returns AUTO.
// attnd_get_session returns the id of the session, and its secret (may be NULL).
const attnd_limits *attnd_get_limits(const attnd_client *c);
attnd_transport attnd_get_transport(attnd_client *c);
uint64_t attnd_get_session(attnd_client *c, uint8_t secret[16]);

// ---- models

typedef struct attnd_rope_opts {
    const float *inv_freq;  // [num_inv_freq], rotary_dim / 2 of them
    uint32_t num_inv_freq;  // 0 = no RoPE
    float attention_factor; // 0 = 1
    bool interleaved;
} attnd_rope_opts;

// attnd_layer_opts is what may differ from layer to layer.
typedef struct attnd_layer_opts {
    float scale;                       // 0 = 1 / sqrt(head_dim)
    float softcap;                     // 0 = off
    int32_t window_left, window_right; // -1 = unbounded
    const float *sinks;                // [q_heads] or NULL
    const float *alibi_slopes;         // [q_heads] or NULL
    const float *k_scale, *v_scale;    // [kv_heads] or NULL, f8e4m3 only
    attnd_rope_opts rope;
    int32_t kv_layer; // reads that layer's K and V; -1 = its own
} attnd_layer_opts;

#define ATTND_LAYER_DEFAULT \
    ((attnd_layer_opts){.window_left = -1, .window_right = -1, .kv_layer = -1})

typedef struct attnd_model_opts {
    const char *name;
    uint8_t digest[32]; // of the weights; two models of one name must agree in it
    attnd_dtype dtype, kv_dtype;
    uint32_t layers, q_heads, kv_heads, head_dim;
    uint32_t v_head_dim;   // 0 = head_dim
    uint32_t block_tokens; // 0 = the daemon's default
    bool not_causal;
    attnd_layer_opts all;              // of every layer (start from ATTND_LAYER_DEFAULT)
    const attnd_layer_opts *per_layer; // [layers], overrides all; may be NULL
} attnd_model_opts;

attnd_err attnd_model_open(attnd_client *c, const attnd_model_opts *opts, uint32_t *model,
                           attnd_errinfo *info);

// attnd_model_close: sequences of the model stay until they are freed, but cannot be attended
// unless it is opened again: steps of it, decode, prefill, buffers and more sequences get
// ATTND_ENOENT.
attnd_err attnd_model_close(attnd_client *c, uint32_t model, attnd_errinfo *info);

// ---- sequences (proto/proto_wire.h says what each op means)

attnd_err attnd_seq_create(attnd_client *c, uint32_t model, uint64_t *seq, attnd_errinfo *info);
// attnd_seq_create_priority: what the sequence leaves in the prefix cache goes before what has a
// higher priority: 1 (goes first) to 255, at most the tenant's (tenant cache_priority, 100 unless
// configured); 0 = the tenant's.
attnd_err attnd_seq_create_priority(attnd_client *c, uint32_t model, uint32_t priority,
                                    uint64_t *seq, attnd_errinfo *info);
attnd_err attnd_seq_fork(attnd_client *c, uint64_t seq, uint64_t *forked, uint32_t *len,
                         attnd_errinfo *info);
// attnd_seq_truncate: for a model whose layers have left windows, ATTND_ENOTSUP for a length over
// 64 tokens before where the last commit began: what rows there see was given back.  0 is possible.
attnd_err attnd_seq_truncate(attnd_client *c, uint64_t seq, uint32_t len, attnd_errinfo *info);
attnd_err attnd_seq_free(attnd_client *c, uint64_t seq, attnd_errinfo *info);
attnd_err attnd_seq_keep(attnd_client *c, uint64_t seq, const char *name, uint64_t ttl_ms,
                         attnd_errinfo *info);
attnd_err attnd_seq_attach(attnd_client *c, uint32_t model, const char *name, uint64_t *seq,
                           uint32_t *len, attnd_errinfo *info);

// ---- steps

typedef struct attnd_step_seq {
    uint64_t seq;
    uint32_t new_len;           // tokens to append
    uint32_t q_len;             // rows when new_len = 0
    uint32_t reserve;           // extra slots
    const uint32_t *tokens;     // [new_len], for the prefix cache; may be NULL
    const int32_t *positions;   // [n], n = new_len, or q_len when that is 0; may be NULL
    const uint64_t *tree_mask;  // [n, ceil(n / 64)]; may be NULL
    uint32_t committed, cached; // filled by attnd_step_open
} attnd_step_seq;

typedef struct attnd_accept {
    uint32_t accepted;    // new tokens that count, cached ones included
    uint32_t num_path;    // accepted - cached
    const uint32_t *path; // [num_path], tree rows in ascending order; NULL = the first ones
} attnd_accept;

typedef struct attnd_step_opts {
    uint32_t deadline_ms; // 0 = do not wait for blocks
    // A commit of the step before, made first; the fields of its errors begin with "commit.".  When
    // the step is refused after it, the commit stands.
    uint64_t commit_step;              // 0 = none
    const attnd_accept *commit_accept; // [num_commit]
    uint32_t num_commit;               // sequences of that step
    uint64_t *request; // gets the request's id for attnd_cancel before it is sent; may be NULL
} attnd_step_opts;

attnd_err attnd_step_open(attnd_client *c, uint32_t model, attnd_step_seq *seqs, uint32_t num_seqs,
                          const attnd_step_opts *opts, uint64_t *step, attnd_errinfo *info);

// attnd_block_mask says per query block which KV blocks it sees, ascending.  Query blocks of all
// sequences follow each other, ceil(rows / q_block) for each.
typedef struct attnd_block_mask {
    uint32_t q_block;          // query rows a query block
    uint32_t num_query_blocks; // of the step
    const uint32_t *start;     // [num_query_blocks + 1]
    const uint32_t *kv_blocks; // [start[num_query_blocks]]
} attnd_block_mask;

typedef struct attnd_buffers attnd_buffers;

// attnd_attend_args: q [rows, q_heads, head_dim], k [new rows, kv_heads, head_dim], v [new rows,
// kv_heads, v_head_dim] of the model's dtype, dim contiguous.  out [rows, q_heads, v_head_dim] and
// lse [q_heads, rows] (may be NULL) are the caller's.  Strides count elements; 0 = contiguous.
typedef struct attnd_attend_args {
    uint64_t step;
    uint32_t model, layer;
    uint32_t rows;     // query rows of the step, all sequences
    uint32_t new_rows; // of sequences with new_len > 0; 0: k and v are NULL
    const void *q, *k, *v;
    void *out;
    float *lse;
    uint32_t q_stride_token, q_stride_head;
    uint32_t k_stride_token, k_stride_head;
    uint32_t v_stride_token, v_stride_head;
    bool partial;
    const attnd_block_mask *block_mask; // NULL = none; not of decode and prefill
    attnd_buffers *buffers;             // instead of q, k, v, out, lse and strides; NULL = those
    void *stream;      // with an engine on a GPU: a cudaStream_t, in which the attend is done; else
                       // NULL, or ATTND_ENOTSUP.  decode and prefill take none.
    uint64_t *request; // as in attnd_step_opts
} attnd_attend_args;

// attnd_ran says what the daemon ran for an attend.
typedef struct attnd_ran {
    char kernel[40], why[56];
    uint32_t splits, batch_rows, queue_us, run_us;
} attnd_ran;

attnd_err attnd_attend(attnd_client *c, const attnd_attend_args *args, attnd_ran *ran,
                       attnd_errinfo *info);

// attnd_attend_start sends an attend and returns; args' arrays must stay until cb was called.
// ATTND_EBUSY: 64 are started already.  After an error cb is not called.
//
// Threads: cb is called by attnd_poll, on the thread that calls that, and nowhere else (by
// attnd_close for what is left).  It may make any call but attnd_close, attnd_poll included.
// info is NULL when err is 0; ran is NULL otherwise.
typedef void attnd_attend_cb(void *ctx, attnd_err err, const attnd_ran *ran,
                             const attnd_errinfo *info);
attnd_err attnd_attend_start(attnd_client *c, const attnd_attend_args *args, attnd_attend_cb *cb,
                             void *ctx, attnd_errinfo *info);

// attnd_poll calls back what has ended, and returns how many.  If there is none it waits up to
// wait_ms for the first one; at once when nothing is started.
uint32_t attnd_poll(attnd_client *c, int32_t wait_ms);

// attnd_buffers is memory for attends of up to max_rows query rows and max_new_rows new ones that,
// over a ring, is shared with the daemon: q, k and v are written there by the caller, contiguous;
// out and lse (NULL unless asked for) point at the results of the last attend that succeeded, until
// the next one.  Over NNG it is ordinary memory, in service mode memory of the region, where out
// and lse are those of the last attend in stream order.  One attend at a time: else ATTND_EBUSY,
// also while one that timed out has not ended.  Not for decode and prefill (ATTND_ENOTSUP). After
// attnd_reconnect had to make a new connection: ATTND_ESTALE; only free them then.
struct attnd_buffers {
    void *q;          // [max_rows, q_heads, head_dim]
    void *k, *v;      // [max_new_rows, kv_heads, head_dim], [max_new_rows, kv_heads, v_head_dim]
    const void *out;  // [rows, q_heads, v_head_dim]
    const float *lse; // [q_heads, rows]
    uint32_t max_rows, max_new_rows;
};
attnd_err attnd_buffers_create(attnd_client *c, attnd_buffers **out, uint32_t model,
                               uint32_t max_rows, uint32_t max_new_rows, bool lse,
                               attnd_errinfo *info);
void attnd_buffers_free(attnd_buffers *b); // accepts NULL

// attnd_memory is memory of the region in service mode, aligned to 256 bytes, at an address of the
// client's GPU.  q, k, v and out that lie in it at multiples of 256 bytes, with strides of
// multiples of 8 elements, are not copied; parts of one tensor, such as the product of a fused
// projection, may be q, k and v.  ATTND_ENOTSUP: there is no region; ATTND_ENOSPC: it is full.
// Work that uses it must have ended before it is freed; it may be freed after attnd_close, within
// half a second, or the region counts as the client's until its process has ended.
typedef struct attnd_memory {
    void *data;
    uint64_t bytes;
} attnd_memory;
attnd_err attnd_memory_create(attnd_client *c, attnd_memory **out, uint64_t bytes,
                              attnd_errinfo *info);
void attnd_memory_free(attnd_memory *m); // accepts NULL

// attnd_step_commit: accept [num_seqs]; lens [num_seqs] gets the committed lengths (may be NULL).
attnd_err attnd_step_commit(attnd_client *c, uint64_t step, const attnd_accept *accept,
                            uint32_t num_seqs, uint32_t *lens, attnd_errinfo *info);
attnd_err attnd_step_cancel(attnd_client *c, uint64_t step, attnd_errinfo *info);

// attnd_step_replay is for CUDA graphs, with an engine on a GPU.  Attends in a stream under capture
// are captured: nothing is done then, and their step need not be committed.  For each step that
// follows with as many sequences and rows, lengths as they may be, attnd_step_replay copies tables
// and plan into stream for the graph's kernels (in service mode it tells the daemon, in one message
// for all layers); the caller launches the graph there, behind it, and commits: every captured
// layer counts as attended.  `captured` is the step that was open during the capture, kept until
// attnd_close or attnd_reconnect makes a new connection; q, k, v and out lie where they were.
// ATTND_ENOTSUP: the step needs other kernels than those that were captured.  A graph that is not
// launched after all: cancel the step.
//
// In process on a GPU a commit returns when the step's work has ended, or before: when all new
// tokens are accepted, no token ids were given, no layer has a window, and the client has kept or
// attached no sequence.  So a host may be a step ahead of its GPU.
attnd_err attnd_step_replay(attnd_client *c, uint64_t captured, uint64_t step, void *stream,
                            attnd_errinfo *info);

// attnd_cancel cancels a request of another thread that waits or runs, which then answers
// ATTND_ECANCELED unless it was faster.
attnd_err attnd_cancel(attnd_client *c, uint64_t request, attnd_errinfo *info);

// attnd_decode and attnd_prefill are step, attend and commit of a model with one layer in one
// message; args->step and layer are ignored.  lens as in attnd_step_commit.
attnd_err attnd_decode(attnd_client *c, attnd_step_seq *seqs, uint32_t num_seqs,
                       uint32_t deadline_ms, const attnd_attend_args *args, uint32_t *lens,
                       attnd_ran *ran, attnd_errinfo *info);
attnd_err attnd_prefill(attnd_client *c, attnd_step_seq *seqs, uint32_t num_seqs,
                        uint32_t deadline_ms, const attnd_attend_args *args, uint32_t *lens,
                        attnd_ran *ran, attnd_errinfo *info);

// ---- administration

// attnd_admin calls an op that answers in JSON by its name: model_list, seq_list, stats and
// session_list (json NULL), drain, config_get, config_set (json NULL = {}).  *reply is the reply's
// JSON, NUL-terminated; the caller frees it with attnd_free.  ATTND_ENOTSUP for another op.

attnd_err attnd_admin(attnd_client *c, const char *op, const char *json, char **reply,
                      attnd_errinfo *info);
void attnd_free(void *p);

#ifdef __cplusplus
}
#endif

#endif
