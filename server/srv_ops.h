// srv_ops is the table of operations, one row each, and the way of a request to its handler.  A new
// operation is a row here, a line in PROTO_OP_MAP, and a handler.  Loop thread only.
#ifndef ATTND_SERVER_SRV_OPS_H
#define ATTND_SERVER_SRV_OPS_H

#include "kvcache/kv_cache.h"
#include "server/srv_core.h"

enum {
    SRV_OP_ONCE = 1u << 0,    // its request id is used once; a repeat gets the kept reply
    SRV_OP_ADMIN = 1u << 1,   // over the administration socket only
    SRV_OP_HELLO = 1u << 2,   // needs no session
    SRV_OP_STARTS = 1u << 3,  // begins work: refused while draining
    SRV_OP_REPEATS = 1u << 4, // a repeat is the handler's: it computes again
    SRV_OP_ROOM = 1u << 5,    // changes what is there, then answers in JSON: room is checked first
};

typedef struct srv_op {
    const char *name;
    uint32_t code; // proto_op
    // handler answers rq, now or later.  kept is the reply to repeat, NULL unless SRV_OP_REPEATS.
    void (*handler)(srv_core *core, srv_request *rq, const kv_reply *kept);
    uint64_t max_bytes; // of the message, header included; 0 = the transport's limit
    uint32_t flags;
    uint32_t kv_op; // of the replies kept for SRV_OP_ONCE
} srv_op;

extern const srv_op srv_ops[]; // ends with name NULL

// srv_ops_find returns the row of a code, NULL for none.
const srv_op *srv_ops_find(uint32_t code);

// srv_dispatch takes a request from a transport.
void srv_dispatch(srv_core *core, srv_request *rq);

// srv_reply_json sends doc and frees it; NULL is answered with ENOMEM.
void srv_reply_json(srv_request *rq, struct cJSON *doc);

// srv_reply_kept sends a kept reply of any state-changing op again.
void srv_reply_kept(srv_request *rq, const kv_reply *kept);

// handlers, by topic
#define SRV_HANDLER(name) void srv_op_##name(srv_core *core, srv_request *rq, const kv_reply *kept)
SRV_HANDLER(hello);        // srv_ops_admin.c
SRV_HANDLER(stats);        //
SRV_HANDLER(session_list); //
SRV_HANDLER(drain);        //
SRV_HANDLER(config_get);   //
SRV_HANDLER(config_set);   //
SRV_HANDLER(model_open);   // srv_ops_model.c
SRV_HANDLER(model_close);  //
SRV_HANDLER(model_list);   //
SRV_HANDLER(seq_create);   // srv_ops_seq.c
SRV_HANDLER(seq_fork);     //
SRV_HANDLER(seq_truncate); //
SRV_HANDLER(seq_free);     //
SRV_HANDLER(seq_keep);     //
SRV_HANDLER(seq_attach);   //
SRV_HANDLER(seq_list);     //
SRV_HANDLER(step);         // srv_ops_step.c
SRV_HANDLER(commit);       //
SRV_HANDLER(cancel);       //
SRV_HANDLER(attend);       // srv_ops_attend.c
SRV_HANDLER(decode);       // srv_ops_attend1.c
SRV_HANDLER(prefill);      //
SRV_HANDLER(attend_all);   // srv_ops_attend_all.c

#endif
