// Buffers: a message of attend that is kept, with room for its reply.
//
//     [header | proto_attend | gap | q | gap | k | gap | v] [reply: out and lse are somewhere in
//     it]
//
// Over a ring the message lies in the region and each attend sends it again as it is.  Over NNG it
// is ordinary memory, in service mode device memory that the daemon sees, and an attend through it
// is one with the caller's arrays.
#include <stdlib.h>
#include <string.h>

#include "proto/client/client_attend.h"
#include "proto/client/client_service.h"

enum { LINE = 256 }; // what tensors are aligned to

typedef struct buffers {
    attnd_buffers pub; // first
    attnd_client *client;
    uint32_t model;
    bool lse;
    client_msg msg;          // over a ring
    uint8_t *memory;         // over NNG, in service mode: q, k, v, out, lse
    attnd_memory *in_region; // in service mode what memory is in
    client_conn *conn;       // likewise, to be compared only
    void *out;               // in memory
    float *out_lse;          // likewise
    uint64_t offs[3];        // of q, k, v in the message
} buffers;

static uint64_t line(uint64_t bytes) {
    return (bytes + LINE - 1) / LINE * LINE;
}

static buffers *of(attnd_buffers *pub) {
    return (buffers *)(void *)pub;
}

// lay_out sets offs, behind begin, and returns the end.
static uint64_t lay_out(buffers *b, const client_model *m, uint64_t begin) {
    uint64_t elem = attnd_dtype_bytes(m->dtype), rows = b->pub.max_rows, news = b->pub.max_new_rows;
    b->offs[0] = line(begin);
    b->offs[1] = line(b->offs[0] + rows * m->q_heads * m->head_dim * elem);
    b->offs[2] = line(b->offs[1] + news * m->kv_heads * m->head_dim * elem);
    return line(b->offs[2] + news * m->kv_heads * m->v_head_dim * elem);
}

static void point(buffers *b, uint8_t *base) {
    b->pub.q = base + b->offs[0];
    b->pub.k = base + b->offs[1];
    b->pub.v = base + b->offs[2];
}

// take_memory takes memory of this process, or in service mode of the region.
static attnd_err take_memory(buffers *b, bool service, uint64_t bytes, attnd_errinfo *info) {
    if (service) {
        attnd_err err = attnd_memory_create(b->client, &b->in_region, bytes, info);
        b->memory = err ? NULL : b->in_region->data;
        return err;
    }
    b->memory = aligned_alloc(LINE, bytes);
    return b->memory ? ATTND_OK : attnd_fail(info, ATTND_ENOMEM, "", "no memory for buffers");
}

static attnd_err make_private(buffers *b, const client_model *m, bool service,
                              attnd_errinfo *info) {
    uint64_t out_off = lay_out(b, m, 0), rows = b->pub.max_rows;
    uint64_t lse_off =
        line(out_off + rows * m->q_heads * m->v_head_dim * attnd_dtype_bytes(m->dtype));
    uint64_t bytes = line(lse_off + (b->lse ? rows * m->q_heads * sizeof(float) : 0) + 1);
    attnd_err err = take_memory(b, service, bytes, info);
    if (err) {
        return err;
    }
    point(b, b->memory);
    b->out = b->memory + out_off;
    b->out_lse = b->lse ? (float *)(void *)(b->memory + lse_off) : NULL;
    return ATTND_OK;
}

static attnd_err make_shared(buffers *b, const client_model *m, attnd_errinfo *info) {
    uint64_t bytes = lay_out(b, m, PROTO_BODY + sizeof(proto_attend));
    attnd_err err = client_request(
        b->client, bytes, client_attend_room(b->pub.max_rows, b->lse, m, 0), &b->msg, info);
    if (!err) {
        memset(b->msg.data, 0, b->offs[0]);
        point(b, b->msg.data);
    }
    return err;
}

attnd_err attnd_buffers_create(attnd_client *c, attnd_buffers **out, uint32_t model,
                               uint32_t max_rows, uint32_t max_new_rows, bool lse,
                               attnd_errinfo *info) {
    client_model m;
    attnd_attend_args most = {.rows = max_rows, .new_rows = max_new_rows};
    attnd_err err = client_attend_check_rows(c, &most, info);
    if (err || (err = client_model_get(c, model, &m, info))) {
        return err;
    }
    buffers *b = calloc(1, sizeof(*b));
    if (!b) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for buffers");
    }
    b->pub.max_rows = max_rows;
    b->pub.max_new_rows = max_new_rows;
    b->client = c;
    b->model = model;
    b->lse = lse;
    client_conn *conn = client_conn_of(c);
    err = client_conn_keeps(conn) ? make_shared(b, &m, info)
                                  : make_private(b, &m, conn->service != NULL, info);
    b->conn = conn->service ? conn : NULL;
    client_conn_rele(conn);
    if (err) {
        free(b);
        return err;
    }
    *out = &b->pub;
    return ATTND_OK;
}

void attnd_buffers_free(attnd_buffers *pub) {
    if (pub) {
        buffers *b = of(pub);
        client_msg_free(&b->msg);
        if (b->in_region) {
            attnd_memory_free(b->in_region);
        } else {
            free(b->memory);
        }
        free(b);
    }
}

static attnd_err check(attnd_client *c, const attnd_attend_args *a, attnd_errinfo *info) {
    const buffers *b = of(a->buffers);
    if (a->q || a->k || a->v || a->out || a->lse || a->q_stride_token || a->q_stride_head ||
        a->k_stride_token || a->k_stride_head || a->v_stride_token || a->v_stride_head) {
        return attnd_fail(info, ATTND_EINVAL, "buffers",
                          "buffers stand instead of q, k, v, out, lse and strides");
    }
    if (a->block_mask) {
        return attnd_fail(info, ATTND_ENOTSUP, "block_mask", "not with buffers");
    }
    if (b->client != c || b->model != a->model) {
        return attnd_fail(info, ATTND_EINVAL, "buffers", "buffers of another model");
    }
    if (a->rows > b->pub.max_rows || a->new_rows > b->pub.max_new_rows) {
        return attnd_fail(info, ATTND_EINVAL, "rows", "%u rows, %u new: the buffers have %u and %u",
                          a->rows, a->new_rows, b->pub.max_rows, b->pub.max_new_rows);
    }
    return ATTND_OK;
}

// plain makes args of an attend through private memory ones with arrays.
static attnd_attend_args plain(const attnd_attend_args *args) {
    const buffers *b = of(args->buffers);
    attnd_attend_args a = *args;
    a.buffers = NULL;
    a.q = b->pub.q;
    a.k = a.new_rows ? b->pub.k : NULL;
    a.v = a.new_rows ? b->pub.v : NULL;
    a.out = b->out;
    a.lse = b->out_lse;
    return a;
}

attnd_err client_buffers_plain(attnd_client *c, const attnd_attend_args *args,
                               attnd_attend_args *out, attnd_errinfo *info) {
    attnd_err err = check(c, args, info);
    const buffers *b = of(args->buffers);
    client_conn *conn = client_conn_of(c);
    bool stale = !b->memory || (b->conn && b->conn != conn);
    client_conn_rele(conn);
    if (!err && stale) {
        err = attnd_fail(info, ATTND_ESTALE, "buffers", "buffers of a connection that is lost");
    }
    if (!err) {
        *out = plain(args);
    }
    return err;
}

void client_buffers_done(const attnd_attend_args *args) {
    buffers *b = of(args->buffers);
    b->pub.out = b->out;
    b->pub.lse = b->out_lse;
}

attnd_err client_buffers_prepare(attnd_client *c, const attnd_attend_args *args, client_msg *m,
                                 attnd_errinfo *info) {
    buffers *b = of(args->buffers);
    attnd_err err = check(c, args, info);
    if (err) {
        return err;
    }
    if (b->memory) {
        client_model model;
        attnd_attend_args a = plain(args);
        return client_attend_prepare(c, &a, &model, m, info);
    }
    client_conn *conn = client_conn_of(c);
    bool stale = conn != b->msg.conn;
    client_conn_rele(conn);
    if (stale) {
        return attnd_fail(info, ATTND_ESTALE, "buffers", "buffers of a connection that is lost");
    }
    if ((err = client_msg_again(m, &b->msg, info))) {
        return err;
    }
    bool news = args->new_rows > 0;
    proto_attend body = {.step = args->step,
                         .layer = args->layer,
                         .flags = (b->lse ? PROTO_ATTEND_LSE : 0u) |
                                  (args->partial ? PROTO_ATTEND_PARTIAL : 0u),
                         .q = {.off = (uint32_t)b->offs[0]},
                         .k = {.off = news ? (uint32_t)b->offs[1] : 0},
                         .v = {.off = news ? (uint32_t)b->offs[2] : 0}};
    memcpy(m->data + PROTO_BODY, &body, sizeof(body));
    return ATTND_OK;
}

attnd_err client_buffers_read(proto_view msg, const attnd_attend_args *args,
                              const client_model *model, attnd_ran *ran, attnd_errinfo *info) {
    buffers *b = of(args->buffers);
    attnd_err err;
    if (b->memory) {
        attnd_attend_args a = plain(args);
        if (!(err = client_attend_read(msg, &a, model, ran, info))) {
            client_buffers_done(args);
        }
        return err;
    }
    client_attend_results found;
    if (!(err = client_attend_find(msg, args->rows, b->lse, 0, model, &found, info))) {
        b->pub.out = found.out;
        b->pub.lse = found.lse;
        client_attend_copy_ran(ran, &found.r);
    }
    return err;
}
