// proto_wire is the wire format of attnd, version 1, whole: a client can be written from this file
// alone.  The C structs are the format: every field lies at its natural offset, all integers and
// floats are little-endian, offsets and sizes are asserted below.  Any thread.
//
// Transport.  NNG REQ (client) to REP (daemon) over ipc:// (or tcp://).  One NNG message is one
// request or one reply.  A connection (NNG pipe) is one session: its first request is hello.  A
// client may have many requests outstanding (one REQ context each); replies come in any order.  Set
// NNG_OPT_REQ_RESENDTIME to infinite: a repeat is the client's decision, under the same request id.
//
// Message.  proto_header, then body_bytes of body, nothing else.  A body is a struct of this file,
// or for rare ops one JSON object (UTF-8, no NUL, at most PROTO_MAX_JSON_BYTES, nested at most
// PROTO_MAX_JSON_DEPTH deep, unknown keys refused; 64-bit ids in JSON are hexadecimal strings).
// Offsets named `*_off` count bytes from the start of the message, are multiples of 8, and lie
// behind the fixed part; 0 means "not there".  Areas may lie in any order and may overlap (they are
// only read).  Reserved fields and unknown flag bits must be 0, else EINVAL.
//
// Version.  version must be PROTO_VERSION, else EVERSION and nothing else is read.  Within a
// version requests never change; replies may grow at their end, so a client ignores trailing bytes.
//
// Request ids.  Chosen by the client, never 0, different for all that is outstanding.  For the ops
// marked `once` an id is used for one request only, ever, in a session; such ids may arrive in any
// order within 64 below the highest seen, so a client sends none that is 64 or more above its
// oldest without an answer.  Ids of other ops do not count there; draw the two kinds from separate
// ranges.  A repeat of an answered request is answered again with the same reply and changes
// nothing.  It is known by its id: its body is not read again (decode and prefill excepted), so
// another body gets the first one's reply too; another op under the id gets EINVAL, an id below the
// window ESTALE.  A repeated decode
// or prefill computes its output again while the sequences still have the length it left, else
// ESTALE.
//
// Errors.  status < 0 (proto/err.h); the body is then one proto_error.  A refused request changed
// nothing.  Past the daemon's message limit, with garbage for a header, or with over twice the
// in-flight limit outstanding, the connection is closed.
//
//     op            code  body            reply            once  who
//     hello            1  JSON            JSON                   all; first on a connection
//     model_open       2  JSON            JSON                   all
//     model_close      3  proto_model     empty                  all
//     model_list       4  empty           JSON                   all; the tenant's own
//     seq_create      16  proto_seq_create proto_seq       yes   all
//     seq_fork        17  proto_seq       proto_seq        yes   all
//     seq_truncate    18  proto_seq       empty            yes   all; len = the new length
//     seq_free        19  proto_seq       empty            yes   all
//     seq_keep        20  proto_seq_keep  empty            yes   all
//     seq_attach      21  proto_seq_attach proto_seq       yes   all
//     seq_list        22  empty           JSON                   all; the tenant's own
//     step            32  proto_step      proto_step_reply yes   all
//     attend          33  proto_attend    proto_attend_reply     all; idempotent until commit
//     commit          34  proto_commit    proto_lens       yes   all
//     cancel          35  proto_cancel    empty                  all
//     decode          36  proto_attend1   proto_attend_reply yes all; models with one layer
//     prefill         37  proto_attend1   proto_attend_reply yes all; models with one layer
//     attend_all      38  proto_attend_all proto_attend_reply    rings with a region
//     stats           48  empty           JSON                   all; administration socket: of
//                                                                every tenant
//     session_list    49  empty           JSON                   administration socket
//     drain           64  JSON            JSON                   administration socket
//     config_get      65  JSON            JSON                   administration socket
//     config_set      66  JSON            JSON                   administration socket
//
// hello: {"client": "name for the log", "tenant": "default", "session": ID, "secret": HEX32}; every
//     key may be missing; session and secret together re-attach to a daemon that was restarted:
//     ESTALE when the session is gone, EPERM for a wrong secret, EBUSY when it has a connection.
//     Models then have to be opened again, and have the same number.  Reply: {"daemon": "attnd
//     0.1.0", "version": 1, "session": ID, "secret": HEX32, "tenant": S, "reattached": B,
//     "last_request": ID (the highest used of those marked `once`; the session's go on behind it),
//     "attach_socket": PATH or null (proto_ring.h; null on the administration socket and over
//     tcp://), "limits": {"message_bytes", "in_flight", "step_seqs", "step_rows", "sequences"}}.
// model_open: {"name": S, "digest": HEX64, "dtype": "f32" | "bf16" | "f16", "kv_dtype": the same or
//     "f8e4m3" (default dtype), "layers": N, "q_heads": N, "kv_heads": N, "head_dim": N,
//     "v_head_dim": N (default head_dim), "block_tokens": N (default: the daemon's), "causal": B
//     (default true)} and, as defaults for every layer or per layer in
//     "layer_overrides": [{"layer": N, ...}] (a layer once): "scale": X (0 = 1/sqrt(head_dim)),
//     "window": [L, R]
//     (-1 = unbounded), "softcap": X, "sinks": [q_heads], "alibi": [q_heads], "rope": {"inv_freq":
//     [rotary_dim/2], "attention_factor": X, "interleaved": B} or null, "kv_layer": N (reads that
//     layer's K and V instead of its own), "k_scale", "v_scale": [kv_heads].  Layers of equal
//     window form a layer group.  Reply: {"model": N, "block_tokens": N, "groups": [{"layers":
//     [N...], "window": [L, R], "block_bytes": N}]}.
// model_close gives one model_open of the session back (the rest follow with the session's end).
// The
//     model goes when nobody has it open and its last sequence is gone; until then its sequences
//     and open steps work as before.
// model_list, seq_list, session_list, stats: {"models": [...]}, {"sequences": [...]}, {"sessions":
//     [...]}; stats has "blocks": {"total", "free", "cached", "in_use"} (sums over "classes"),
//     "prefix_cache": {"blocks", "looked_up_tokens", "found_tokens", "evictions"}, and "scheduler"
//     with "last": {"kernel", "why", "splits", "rows"}.
//     "service" (on a GPU): "mps"; "wait_kernels", whether clients under the same MPS wait in
//     kernels (proto_region.h, Device pairs); regions: "regions", "region_bytes", "regions_kept"
//     (of processes that have left without a word), "regions_made", "regions_without_mps";
//     attend_alls: "waiting", "draining", "calls", "failed"; their layers: "layers" that have
//     ended, of these "prepared" before their flag came, "ahead" launched by the submit thread,
//     "gated" launched before their flag, and "gates_missed", launches before a flag that did not
//     come in time.
//     A model that nobody has opened since a restart has "model", "name" and "tenant" only.
// drain: {"timeout_ms": N}.  config_get: {"key": S} or {} for all.
// config_set: {"key": S, "value": S}.
#ifndef ATTND_PROTO_PROTO_WIRE_H
#define ATTND_PROTO_PROTO_WIRE_H

#include <stdint.h>

#include "proto/dtype.h"
#include "proto/err.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "attnd's structs are its wire format: little-endian machines only"
#endif

#define PROTO_NO_BLOCK UINT32_MAX // a table entry

enum {
    PROTO_MAGIC = 0x444e5441, // "ATND"
    PROTO_VERSION = 1,
    PROTO_MAX_MESSAGE_BYTES =
        256 << 20,               // upper bound of the daemon's own limit (64 MiB unless configured)
    PROTO_MAX_STEP_SEQS = 1024,  // sequences of a step; the daemon's limit may be lower
    PROTO_MAX_STEP_ROWS = 65536, // query rows of a step, all sequences; likewise
    PROTO_MAX_TREE_ROWS = 512,   // query rows of a sequence with a tree mask
    PROTO_MAX_LAYERS = 1024,
    PROTO_NAME_BYTES = 64, // NUL included, zero-padded
    PROTO_MAX_JSON_BYTES = 1 << 20,
    PROTO_MAX_JSON_DEPTH = 8,
    PROTO_REQUEST_WINDOW = 64,
    PROTO_TRUNCATE_TOKENS = 64, // that seq_truncate can take off the place where the last commit
                                // began, whatever windows layers have
};

// XX(NAME, code, "name")
#define PROTO_OP_MAP(XX)                 \
    XX(HELLO, 1, "hello")                \
    XX(MODEL_OPEN, 2, "model_open")      \
    XX(MODEL_CLOSE, 3, "model_close")    \
    XX(MODEL_LIST, 4, "model_list")      \
    XX(SEQ_CREATE, 16, "seq_create")     \
    XX(SEQ_FORK, 17, "seq_fork")         \
    XX(SEQ_TRUNCATE, 18, "seq_truncate") \
    XX(SEQ_FREE, 19, "seq_free")         \
    XX(SEQ_KEEP, 20, "seq_keep")         \
    XX(SEQ_ATTACH, 21, "seq_attach")     \
    XX(SEQ_LIST, 22, "seq_list")         \
    XX(STEP, 32, "step")                 \
    XX(ATTEND, 33, "attend")             \
    XX(COMMIT, 34, "commit")             \
    XX(CANCEL, 35, "cancel")             \
    XX(DECODE, 36, "decode")             \
    XX(PREFILL, 37, "prefill")           \
    XX(ATTEND_ALL, 38, "attend_all")     \
    XX(STATS, 48, "stats")               \
    XX(SESSION_LIST, 49, "session_list") \
    XX(DRAIN, 64, "drain")               \
    XX(CONFIG_GET, 65, "config_get")     \
    XX(CONFIG_SET, 66, "config_set")

typedef enum proto_op {
#define XX(name, code, text) PROTO_##name = code,
    PROTO_OP_MAP(XX)
#undef XX
} proto_op;

// proto_header opens every message, 32 bytes.
typedef struct proto_header {
    uint32_t magic;      //  0: PROTO_MAGIC
    uint16_t version;    //  4: PROTO_VERSION
    uint16_t op;         //  6: proto_op; a reply repeats it
    uint64_t request;    //  8: id; a reply repeats it
    uint32_t flags;      // 16: 0
    uint32_t body_bytes; // 20: bytes behind the header
    int32_t status;      // 24: request: 0; reply: 0 or an attnd_err
    uint32_t reserved;   // 28: 0
} proto_header;

// proto_error is the body of a reply with status < 0.
typedef struct proto_error {
    int32_t detail;                    //  0: what the code defines, else 0
    uint32_t reserved;                 //  4
    char field[ATTND_ERR_FIELD_BYTES]; //  8: offending field, NUL-terminated, may be ""
    char text[ATTND_ERR_TEXT_BYTES];   // 40: one line, NUL-terminated
} proto_error;

typedef struct proto_model {
    uint32_t model;    // 0: of the reply of model_open
    uint32_t reserved; // 4
} proto_model;

typedef struct proto_seq_create {
    uint32_t model;    // 0
    uint32_t priority; // 4: of cached blocks those of a lower one go first: 1 to 255, at most the
                       //    tenant's; 0 = the tenant's.  Forks have it, too
} proto_seq_create;

typedef struct proto_seq {
    uint64_t seq;      //  0: handle
    uint32_t len;      //  8: seq_truncate: new length; replies: committed length; else 0
                       //     Layers with a left window may have lost what lies behind it: ENOTSUP
                       //     for a length over PROTO_TRUNCATE_TOKENS before where the last commit
                       //     that accepted tokens began, unless it is 0
    uint32_t reserved; // 12
} proto_seq;

typedef struct proto_seq_keep {
    uint64_t seq;                //  0
    uint64_t ttl_ms;             //  8: time to live without a session, 0 = for ever
    char name[PROTO_NAME_BYTES]; // 16: unique in the tenant; "" = no longer kept
} proto_seq_keep;

typedef struct proto_seq_attach {
    uint32_t model;              //  0
    uint32_t reserved;           //  4
    char name[PROTO_NAME_BYTES]; //  8
} proto_seq_attach;

// proto_step, then proto_step_seq [num_seqs].
// A step may carry the commit of the one before it: commit_off names a proto_commit with its
// entries in this message, and commit_request its own request id.  The commit is made first.  When
// it fails, the step is not tried and the error's field begins with "commit."; when the step then
// fails, the commit stays made.
typedef struct proto_step {
    uint32_t model;       //  0
    uint32_t num_seqs;    //  4: 1 to PROTO_MAX_STEP_SEQS
    uint32_t deadline_ms; //  8: how long it may wait for blocks and then stay open; 0 = do not wait
                          //     for blocks (ENOSPC at once), and no deadline once open
    uint32_t commit_off;  // 12: 0 = no commit carried
    uint64_t commit_request; // 16: 0 = no commit carried
} proto_step;

// proto_step_seq: n below is new_len, or q_len when new_len = 0; entries of tokens that turn out to
// be cached are checked and not used.
typedef struct proto_step_seq {
    uint64_t seq;           //  0
    uint32_t new_len;       //  8: new tokens, cached ones included; 0 = read only
    uint32_t q_len;         // 12: query rows when new_len = 0; else 0 (then new_len - cached)
                            //     ENOTSUP for rows that see tokens which layers with a left window
                            //     have lost; rows committed last can always be read
    uint32_t reserve;       // 16: extra slots
    uint32_t tokens_off;    // 20: uint32 token ids [new_len], for the prefix cache; 0 = none.
                            //     ENOTSUP for a model whose prefixes cannot be cached
    uint32_t positions_off; // 24: int32 positions [n]; 0 = default
    uint32_t tree_off;      // 28: uint64 tree mask [n, ceil(n / 64)]; bit b of word w of row i: row
                            //     i sees new token 64 w + b; 0 = none
} proto_step_seq;

// proto_step_reply, then proto_step_len [num_seqs].
typedef struct proto_step_reply {
    uint64_t step;       //  0: handle
    uint32_t num_seqs;   //  8
    uint32_t tables_off; // 12: proto_step_tables; 0 = none
} proto_step_reply;

typedef struct proto_step_len {
    uint32_t committed; // 0: before the step
    uint32_t cached;    // 4: of new_len; the step's rows of the sequence are the tokens behind them
} proto_step_len;

// proto_step_tables, then uint32 num_entries [num_seqs, num_groups], then uint32 table entries, one
// table behind the other in that order: entry e is the block at arena + 256 e.  PROTO_NO_BLOCK: a
// block behind the window of the sequence's first row, which was given back.  Only over a ring
// with the arena (proto_ring.h), and not in the repeat of a reply.  A reply that does not fit its
// place is EMSGSIZE with its bytes in detail, and the step is not open.
typedef struct proto_step_tables {
    uint32_t num_groups; // 0: layer groups of the model
    uint32_t reserved;   // 4
} proto_step_tables;

// proto_tensor is [rows, heads, dim] inside the message, dim contiguous.
typedef struct proto_tensor {
    uint32_t off;          // 0: 0 = NULL
    uint32_t stride_token; // 4: elements from a row to the next; 0 = heads * dim
    uint32_t stride_head;  // 8: elements from a head to the next; 0 = dim
    uint32_t reserved;     // 12
} proto_tensor;

enum {
    PROTO_ATTEND_LSE = 1u << 0,        // the reply carries LSE
    PROTO_ATTEND_PARTIAL = 1u << 1,    // out and LSE are a state to be merged: sinks left out
    PROTO_ATTEND_BLOCK_MASK = 1u << 2, // attend_all: a proto_block_mask lies right behind it
    PROTO_ATTEND_AT_FLAGS = 1u << 3,   // attend_all: the client waits at the flags in any case
};

// proto_attend attends one layer of an open step, all its sequences' rows packed in step order.
typedef struct proto_attend {
    uint64_t step;  //  0
    uint32_t layer; //  8
    uint32_t flags; // 12: PROTO_ATTEND_*
    proto_tensor q; // 16: [rows, q_heads, head_dim] of dtype
    proto_tensor k; // 32: [rows of sequences with new tokens, kv_heads, head_dim]; NULL for a
    proto_tensor v; // 48:     layer with kv_layer, or when no sequence has new tokens
    uint32_t block_mask_off; // 64: proto_block_mask; 0 = none
    uint32_t reserved;       // 68
} proto_attend;

// proto_block_mask, then uint32 start [num_query_blocks + 1], then uint32 kv_blocks [start[last]]:
// per query block the KV blocks it sees, ascending: indices of the sequence's blocks (of
// model_open's block_tokens), new tokens' included.  Query blocks of all sequences follow each
// other, ceil(rows / q_block) for each.  What it hides is not read.  It lies in the step's memory
// while the attend runs: EMSGSIZE when that is too small, EBUSY when masks of other attends are
// there.
typedef struct proto_block_mask {
    uint32_t q_block;          // 0: query rows a query block, >= 1
    uint32_t num_query_blocks; // 4
} proto_block_mask;

// proto_region_tensor is [rows, heads, dim] inside the connection's region, dim contiguous.
typedef struct proto_region_tensor {
    uint64_t off;          //  0: bytes from the region's start, a multiple of PROTO_REGION_ALIGN;
                           //     PROTO_REGION_NONE = NULL
    uint32_t stride_token; //  8: elements from a row to the next; 0 = heads * dim
    uint32_t stride_head;  // 12: elements from a head to the next; 0 = dim
} proto_region_tensor;

#define PROTO_REGION_NONE UINT64_MAX
enum {
    PROTO_REGION_ALIGN = 256, // bytes, of offsets
    PROTO_REGION_STRIDE = 8,  // elements, of strides
};

// proto_attend_all attends layers first_layer to first_layer + num_layers - 1 of an open step, one
// after another, each when its ready flag is raised (proto_region.h); layer first_layer + i has the
// pair first_flag + i.  The tensors lie at the same place for every layer: the client's stream
// writes those of the next once this one's done flag has come.  A layer that may not run beside
// what is under way of its step (EBUSY for an attend) waits for that.  Out and lse overlap nothing
// else (EINVAL).  One reply when the last layer has ended, or the first one fails (detail: which
// layer; with ECUDA CUDA's own code): proto_attend_reply with out_off, lse_off and lens_off 0,
// splits, batch_rows, kernel and why of the last layer, queue_us (from a layer's flag to its
// launch) and run_us of all.  A block mask is that of each of its layers, and is in the step's
// memory until the reply.  ENOTSUP: the connection has no region.  EBUSY: a pair belongs to an
// earlier call, or too many calls run.  The step must stay open (commit: EBUSY) until the reply;
// deadline and cancel of the step, and cancel of the request, end it.
typedef struct proto_attend_all {
    uint64_t step;         //  0
    uint32_t first_layer;  //  8
    uint32_t num_layers;   // 12: at least 1
    uint32_t first_flag;   // 16
    uint32_t flags;        // 20: PROTO_ATTEND_*
    proto_region_tensor q; // 24: as in proto_attend
    proto_region_tensor k; // 40: NULL when none of the layers appends; not read for a layer that
    proto_region_tensor v; // 56:     does not
    uint64_t out_off;      // 72: [rows, q_heads, v_head_dim] of dtype, contiguous
    uint64_t lse_off;      // 80: float32 [q_heads, rows]; PROTO_REGION_NONE without
                           //     PROTO_ATTEND_LSE
} proto_attend_all;

typedef struct proto_attend_reply {
    uint32_t rows;       //  0
    uint32_t out_off;    //  4: [rows, q_heads, v_head_dim] of dtype, contiguous
    uint32_t lse_off;    //  8: float32 [q_heads, rows]; 0 = not asked for
    uint32_t lens_off;   // 12: decode, prefill: uint32 committed length per sequence; else 0
    uint32_t splits;     // 16: the most that a row of the launch was cut into
    uint32_t batch_rows; // 20: rows of the launch, all clients together
    uint32_t queue_us;   // 24: from arrival to launch
    uint32_t run_us;     // 28: of the launch
    char kernel[40];     // 32: name of the kernel that ran
    char why[56];        // 72: why that one
} proto_attend_reply;

// proto_commit, then proto_commit_seq [num_seqs] in step order.
typedef struct proto_commit {
    uint64_t step;     //  0
    uint32_t num_seqs; //  8: as the step's
    uint32_t reserved; // 12
} proto_commit;

typedef struct proto_commit_seq {
    uint32_t accepted; // 0: new tokens that count, cached ones included
    uint32_t
        path_off; // 4: tree: uint32 [accepted - cached] ascending row indices; 0 = the first ones
} proto_commit_seq;

// proto_lens, then uint32 committed length [num_seqs].
typedef struct proto_lens {
    uint32_t num_seqs; // 0
    uint32_t reserved; // 4
} proto_lens;

// proto_cancel aborts an open step, or (step = 0) the waiting or running request of that id.
typedef struct proto_cancel {
    uint64_t step;    // 0
    uint64_t request; // 8
} proto_cancel;

// proto_attend1, then proto_attend1_seq [num_seqs]: step, attend of layer 0 and commit in one.
typedef struct proto_attend1 {
    uint32_t model;       //  0
    uint32_t num_seqs;    //  4
    uint32_t deadline_ms; //  8: as in proto_step
    uint32_t flags;       // 12: PROTO_ATTEND_*
    proto_tensor q;       // 16
    proto_tensor k;       // 32
    proto_tensor v;       // 48
} proto_attend1;

typedef struct proto_attend1_seq {
    uint64_t seq;           //  0
    uint32_t new_len;       //  8: as in proto_step_seq; decode: at most 8
    uint32_t q_len;         // 12: as in proto_step_seq; decode: at most 8
    uint32_t positions_off; // 16: as in proto_step_seq
    uint32_t reserved;      // 20
} proto_attend1_seq;

#ifdef __cplusplus
#define PROTO_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), "the size is the format")
#else
#define PROTO_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "the size is the format")
#endif
PROTO_SIZE(proto_header, 32);
PROTO_SIZE(proto_error, 232);
PROTO_SIZE(proto_model, 8);
PROTO_SIZE(proto_seq_create, 8);
PROTO_SIZE(proto_seq, 16);
PROTO_SIZE(proto_seq_keep, 80);
PROTO_SIZE(proto_seq_attach, 72);
PROTO_SIZE(proto_step, 24);
PROTO_SIZE(proto_step_seq, 32);
PROTO_SIZE(proto_step_reply, 16);
PROTO_SIZE(proto_step_len, 8);
PROTO_SIZE(proto_step_tables, 8);
PROTO_SIZE(proto_tensor, 16);
PROTO_SIZE(proto_attend, 72);
PROTO_SIZE(proto_block_mask, 8);
PROTO_SIZE(proto_region_tensor, 16);
PROTO_SIZE(proto_attend_all, 88);
PROTO_SIZE(proto_attend_reply, 128);
PROTO_SIZE(proto_commit, 16);
PROTO_SIZE(proto_commit_seq, 8);
PROTO_SIZE(proto_lens, 8);
PROTO_SIZE(proto_cancel, 16);
PROTO_SIZE(proto_attend1, 64);
PROTO_SIZE(proto_attend1_seq, 24);

#endif
