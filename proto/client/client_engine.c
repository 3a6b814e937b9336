// The way to the engine of an in-process client.  The engine is its connection's: each call holds
// that, so that the arena stays mapped until the call has ended.
#include "proto/client/client.h"

attnd_err client_engine_model(attnd_client *c, uint32_t model, const char *json,
                              uint32_t block_tokens, attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    attnd_err err =
        conn->engine ? conn->engine->model_open(conn->engine_state, model, json, block_tokens, info)
                     : ATTND_OK;
    client_conn_rele(conn);
    return err;
}

attnd_err client_engine_step(const client_msg *reply, uint32_t tables_off,
                             const attnd_engine_step *step, attnd_errinfo *info) {
    const client_conn *conn = reply->conn;
    if (!conn->engine) {
        return ATTND_OK;
    }
    attnd_engine_step s = *step;
    attnd_err err =
        proto_array(client_msg_view(reply), "tables_off", tables_off, 1, sizeof(proto_step_tables),
                    sizeof(proto_step_reply), &s.tables, info);
    if (!err && !s.tables) {
        err = attnd_fail(info, ATTND_EPROTO, "tables_off", "reply without block tables");
    }
    if (err) {
        return err;
    }
    s.tables_bytes = reply->bytes - tables_off;
    return conn->engine->step_open(conn->engine_state, &s, info);
}

attnd_err client_engine_ready(attnd_client *c, uint64_t step, const attnd_accept *accept,
                              uint32_t num_seqs, attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    attnd_err err = ATTND_OK;
    if (conn->engine) {
        pthread_mutex_lock(&c->lock);
        bool soon = !c->commits_wait;
        pthread_mutex_unlock(&c->lock);
        err = conn->engine->step_ready(conn->engine_state, step, accept, num_seqs, soon, info);
    }
    client_conn_rele(conn);
    return err;
}

void client_engine_waits(attnd_client *c) {
    pthread_mutex_lock(&c->lock);
    c->commits_wait = true;
    pthread_mutex_unlock(&c->lock);
}

attnd_err client_engine_settle(attnd_client *c, attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    attnd_err err = conn->engine ? conn->engine->settle(conn->engine_state, info) : ATTND_OK;
    client_conn_rele(conn);
    return err;
}

attnd_err attnd_step_replay(attnd_client *c, uint64_t captured, uint64_t step, void *stream,
                            attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    attnd_err err = !conn->engine ? attnd_fail(info, ATTND_ENOTSUP, "engine", "there is no engine")
                    : client_conn_is_lost(conn)
                        ? client_conn_lost(conn, info)
                        : conn->engine->replay(conn->engine_state, captured, step, stream, info);
    client_conn_rele(conn);
    return err;
}

void client_engine_close(attnd_client *c, uint64_t step) {
    client_conn *conn = client_conn_of(c);
    if (conn->engine) {
        conn->engine->step_close(conn->engine_state, step);
    }
    client_conn_rele(conn);
}

attnd_err client_engine_attend(attnd_client *c, const attnd_attend_args *args, attnd_ran *ran,
                               attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    attnd_err err;
    if (client_conn_is_lost(conn)) {
        err = client_conn_lost(conn, info);
    } else {
        err = conn->engine->attend(conn->engine_state, args, ran, info);
    }
    client_conn_rele(conn);
    return err;
}
