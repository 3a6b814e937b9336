// The way to a client's engine, in process or for service mode.  The engine is its connection's:
// each call holds that, so that arena or region stay mapped until the call has ended.
#include <stdatomic.h>
#include <string.h>

#include "proto/client/client_service.h"

// Keys tell a process's clients apart, for the daemon.  One that was closed leaves its key to the
// next: that one says of both, when it attaches, that nothing of before is still at work.  A key is
// a number from here, and where here is, since a process may have this library twice.
static atomic_uint_least64_t keys_taken; // a bit a number

bool client_engine_take_key(uint8_t key[16]) {
    uint_least64_t taken = atomic_load(&keys_taken);
    uint64_t number;
    do {
        if (taken == UINT64_MAX) {
            return false;
        }
        number = (uint64_t)__builtin_ctzll(~taken);
    } while (!atomic_compare_exchange_weak(&keys_taken, &taken, taken | UINT64_C(1) << number));
    const uint64_t words[2] = {(uint64_t)(uintptr_t)&keys_taken, number};
    memcpy(key, words, sizeof(words));
    return true;
}

void client_engine_give_key(const uint8_t key[16]) {
    uint64_t words[2];
    memcpy(words, key, sizeof(words));
    atomic_fetch_and(&keys_taken, ~(UINT64_C(1) << words[1]));
}

bool client_engine_is_here(const attnd_client *c) {
    return c->engine && !c->engine->service;
}

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
        return conn->service ? client_service_step_open(conn->service, step, info) : ATTND_OK;
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
    } else if (conn->service) {
        err = client_service_ready(conn->service, step, c->timeout_ms, info);
    }
    client_conn_rele(conn);
    return err;
}

void client_engine_waits(attnd_client *c) {
    pthread_mutex_lock(&c->lock);
    c->commits_wait = true;
    pthread_mutex_unlock(&c->lock);
}

attnd_err client_engine_settle(attnd_client *c, uint64_t step, attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    attnd_err err = conn->engine ? conn->engine->settle(conn->engine_state, info)
                    : conn->service
                        ? client_service_settle(conn->service, step, c->timeout_ms, info)
                        : ATTND_OK;
    client_conn_rele(conn);
    return err;
}

bool client_engine_collect(attnd_client *c, uint64_t step) {
    client_conn *conn = client_conn_of(c);
    bool any = conn->service && client_service_collect(conn->service, step, c->timeout_ms);
    client_conn_rele(conn);
    return any;
}

void client_engine_abandon(attnd_client *c) {
    client_conn *conn = client_conn_of(c);
    if (conn->engine) {
        // An error means that the device is lost, and all work with it.
        (void)conn->engine->abandon(conn->engine_state, NULL);
    }
    client_conn_rele(conn);
}

attnd_err attnd_step_replay(attnd_client *c, uint64_t captured, uint64_t step, void *stream,
                            attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    attnd_err err;
    if (client_conn_is_lost(conn)) {
        err = client_conn_lost(conn, info);
    } else if (conn->engine) {
        err = conn->engine->replay(conn->engine_state, captured, step, stream, info);
    } else if (conn->service) {
        err = client_service_replay(conn->service, captured, step, stream, c->timeout_ms, info);
    } else {
        err = attnd_fail(info, ATTND_ENOTSUP, "engine", "there is no engine");
    }
    client_conn_rele(conn);
    return err;
}

void client_engine_close(attnd_client *c, uint64_t step) {
    client_conn *conn = client_conn_of(c);
    if (conn->engine) {
        conn->engine->step_close(conn->engine_state, step);
    } else if (conn->service) {
        client_service_step_close(conn->service, step);
    }
    client_conn_rele(conn);
}

// attend_service: what will have run is not known yet.
static attnd_err attend_service(attnd_client *c, client_conn *conn, const attnd_attend_args *args,
                                attnd_ran *ran, attnd_errinfo *info) {
    client_model model;
    attnd_err err = client_model_get(c, args->model, &model, info);
    err = err ? err : client_service_attend(conn->service, &model, args, c->timeout_ms, info);
    if (!err && ran) {
        *ran = (attnd_ran){.why = "given to the daemon"};
    }
    return err;
}

attnd_err client_engine_attend(attnd_client *c, const attnd_attend_args *args, attnd_ran *ran,
                               attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    attnd_err err;
    if (args->request) {
        __atomic_store_n(args->request, 0, __ATOMIC_RELEASE); // in process there is none
    }
    if (client_conn_is_lost(conn)) {
        err = client_conn_lost(conn, info);
    } else if (conn->service) {
        err = attend_service(c, conn, args, ran, info);
    } else {
        err = conn->engine->attend(conn->engine_state, args, ran, info);
    }
    client_conn_rele(conn);
    return err;
}
