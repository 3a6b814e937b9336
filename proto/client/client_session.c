// Sessions: connecting over a ring or NNG, hello, re-attaching.
//
// A ring has a session of its own, so with it no NNG connection is made at all.  Its attach socket
// is looked for where the daemon puts it unless told otherwise, beside the ipc:// path; if nobody
// listens there, hello over NNG says where it is.
#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/client/client.h"
#include "proto/clock.h"
#include "proto/proto_json.h"

enum {
    DEFAULT_TIMEOUT_MS = 30000,
    DEFAULT_SPIN_US = 50,
    DEFAULT_RING_BYTES = 32 << 20,
    DEFAULT_REGION_BYTES = 256 << 20,
    FIRST_RETRY_MS = 2, // doubled until
    RETRY_MS = 50,
    PATH_BYTES = 256,
};

// greeting is what hello's reply says.
typedef struct greeting {
    attnd_limits limits;
    uint64_t session;
    uint8_t secret[16];
    uint64_t last_request;          // that the session has used, of those that are done once
    char attach_socket[PATH_BYTES]; // "" = none
} greeting;

// link is a connection with a session; making it, whatever it takes, ends at until_ms.
typedef struct link_made {
    client_conn *conn;
    attnd_transport transport;
    greeting greeting;
    uint64_t until_ms;
} link_made;

// left_ms is the time that is left, at least 1, since 0 would mean none or for ever.
static int32_t left_ms(const link_made *l) {
    uint64_t now_ms = attnd_clock_ms();
    return l->until_ms > now_ms ? (int32_t)(l->until_ms - now_ms) : 1;
}

// ---- hello

static void read_limits(proto_obj *o, attnd_limits *out) {
    proto_obj limits;
    const struct {
        const char *key;
        uint32_t max, *value;
    } keys[] = {
        {"message_bytes", PROTO_MAX_MESSAGE_BYTES, &out->message_bytes},
        {"in_flight", UINT32_MAX, &out->in_flight},
        {"step_seqs", PROTO_MAX_STEP_SEQS, &out->step_seqs},
        {"step_rows", PROTO_MAX_STEP_ROWS, &out->step_rows},
        {"sequences", UINT32_MAX, &out->sequences},
    };
    proto_obj_require(o, "limits");
    if (proto_obj_child(o, "limits", &limits)) {
        for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
            proto_obj_require(&limits, keys[i].key);
            proto_obj_u32(&limits, keys[i].key, 1, keys[i].max, keys[i].value);
        }
    }
}

// read_greeting: keys that this library does not know are for newer ones.
static attnd_err read_greeting(const char *text, greeting *out, attnd_errinfo *info) {
    cJSON *doc;
    attnd_err err = proto_json_parse(&doc, text, strlen(text), info);
    if (err) {
        return err;
    }
    proto_obj o;
    *out = (greeting){.session = 0};
    proto_obj_open(&o, doc, info);
    read_limits(&o, &out->limits);
    proto_obj_id(&o, "session", &out->session);
    proto_obj_hex(&o, "secret", out->secret, sizeof(out->secret));
    proto_obj_id(&o, "last_request", &out->last_request);
    if (!proto_obj_null(&o, "attach_socket")) {
        proto_obj_text(&o, "attach_socket", out->attach_socket, sizeof(out->attach_socket));
    }
    cJSON_Delete(doc);
    return o.err ? attnd_fail(info, ATTND_EPROTO, "limits", "the daemon's hello is malformed")
                 : ATTND_OK;
}

// hello_text returns the JSON of hello, NULL without memory; cJSON_free.  session 0 = a new one.
static char *hello_text(const attnd_client *c, uint64_t session, const uint8_t *secret) {
    cJSON *body = cJSON_CreateObject();
    bool ok = cJSON_AddStringToObject(body, "client", c->client_name) &&
              cJSON_AddStringToObject(body, "tenant", c->tenant) &&
              (!session || (!proto_json_add_id(body, "session", session) &&
                            !proto_json_add_hex(body, "secret", secret, sizeof(c->secret))));
    char *text = ok ? cJSON_PrintUnformatted(body) : NULL;
    cJSON_Delete(body);
    return text;
}

static attnd_err hello(const attnd_client *c, uint64_t session, const uint8_t *secret, link_made *l,
                       attnd_errinfo *info) {
    char *text = hello_text(c, session, secret), *reply = NULL;
    if (!text) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for hello");
    }
    attnd_err err = client_conn_json(l->conn, PROTO_HELLO, text, left_ms(l), &reply, info);
    cJSON_free(text);
    if (!err) {
        err = read_greeting(reply, &l->greeting, info);
    }
    free(reply);
    return err;
}

// ---- connecting

// ask_less makes a default of ours the daemon's most; false when there is none to be made smaller.
static bool ask_less(const attnd_client *c, client_ring_opts *opts, const client_most *most) {
    bool by_default = most->of_region ? !c->region_bytes : !c->ring_bytes;
    uint64_t *ask = most->of_region ? &opts->region_bytes : &opts->data_bytes;
    bool less = by_default && most->bytes > 0 && most->bytes < *ask;
    if (less) {
        *ask = most->bytes;
    }
    return less;
}

static attnd_err open_ring(const attnd_client *c, const char *path, link_made *l,
                           attnd_errinfo *info) {
    client_most most;
    client_ring_opts opts = {.path = path,
                             .spin_us = c->spin_us,
                             .engine = c->engine,
                             .engine_threads = c->engine_threads,
                             .engine_key = c->engine_key};
    opts.data_bytes = c->ring_bytes ? c->ring_bytes : DEFAULT_RING_BYTES;
    opts.region_bytes = c->region_bytes ? c->region_bytes : DEFAULT_REGION_BYTES;
    attnd_err err;
    do {
        opts.timeout_ms = left_ms(l);
        err = client_ring_open(&l->conn, &opts, &most, info);
    } while (err == ATTND_EMSGSIZE && ask_less(c, &opts, &most));
    l->transport = ATTND_TRANSPORT_RING;
    return err;
}

static void hang_up(link_made *l) {
    client_conn_close(l->conn);
    l->conn = NULL;
}

static attnd_err ring_link(const attnd_client *c, const char *path, uint64_t session,
                           const uint8_t *secret, link_made *l, attnd_errinfo *info) {
    attnd_err err = open_ring(c, path, l, info);
    if (!err && (err = hello(c, session, secret, l, info))) {
        hang_up(l);
    }
    return err;
}

static attnd_err nng_link(const attnd_client *c, uint64_t session, const uint8_t *secret,
                          link_made *l, attnd_errinfo *info) {
    l->transport = ATTND_TRANSPORT_NNG;
    attnd_err err = client_nng_open(&l->conn, c->url, left_ms(l), info);
    if (!err && (err = hello(c, session, secret, l, info))) {
        hang_up(l);
    }
    return err;
}

// is_answer is true for errors of hello that another transport would not mend.
static bool is_answer(attnd_err err) {
    return err == ATTND_ESTALE || err == ATTND_EPERM || err == ATTND_ESHUTDOWN ||
           err == ATTND_EVERSION;
}

// is_too_much is true when the caller named a ring that cannot be: the caller's to mend.
static bool is_too_much(const attnd_client *c, attnd_err err) {
    return err == ATTND_EMSGSIZE && c->ring_bytes > 0;
}

// connect_named asks over NNG for the attach socket, and moves there.
static attnd_err connect_named(const attnd_client *c, uint64_t session, const uint8_t *secret,
                               link_made *l, attnd_errinfo *info) {
    bool must = c->transport == ATTND_TRANSPORT_RING || (session && c->now == ATTND_TRANSPORT_RING);
    attnd_err err = nng_link(c, must ? 0 : session, secret, l, info);
    if (err || (!must && (session || !l->greeting.attach_socket[0]))) {
        return err;
    }
    link_made ring = {.until_ms = l->until_ms};
    err = l->greeting.attach_socket[0]
              ? ring_link(c, l->greeting.attach_socket, session, secret, &ring, info)
              : attnd_fail(info, ATTND_ENOTSUP, "transport", "the daemon has no rings");
    must = must || is_too_much(c, err);
    if (!err || must) {
        hang_up(l);
        *l = ring;
    }
    return must ? err : ATTND_OK;
}

// make_link connects and says hello until l->until_ms; session 0 = a new one.
static attnd_err make_link(const attnd_client *c, uint64_t session, const uint8_t *secret,
                           link_made *l, attnd_errinfo *info) {
    static const char ipc[] = "ipc://";
    char path[PATH_BYTES];
    bool local = strncmp(c->url, ipc, sizeof(ipc) - 1) == 0;
    *l = (link_made){.until_ms = l->until_ms};
    if (c->transport == ATTND_TRANSPORT_NNG || (!local && c->transport == ATTND_TRANSPORT_AUTO) ||
        (session && c->now == ATTND_TRANSPORT_NNG)) {
        return nng_link(c, session, secret, l, info);
    }
    if (!local) {
        return attnd_fail(info, ATTND_ENOTSUP, c->engine ? "engine" : "transport",
                          "%s an ipc:// URL",
                          c->engine ? "an engine needs a ring, which needs" : "a ring needs");
    }
    if (snprintf(path, sizeof(path), "%s.attach", c->url + sizeof(ipc) - 1) >= (int)sizeof(path)) {
        return attnd_fail(info, ATTND_EINVAL, "url", "the URL is too long");
    }
    attnd_err err = ring_link(c, path, session, secret, l, info);
    bool nobody = err == ATTND_ECONN, late = attnd_clock_ms() >= l->until_ms;
    bool may_fall_back =
        nobody || (c->transport == ATTND_TRANSPORT_AUTO && !is_answer(err) && !is_too_much(c, err));
    return err && may_fall_back && !late ? connect_named(c, session, secret, l, info) : err;
}

// adopt makes a link the client's; returns the connection before.  Lock held, or nobody else there.
static client_conn *adopt(attnd_client *c, const link_made *l) {
    client_conn *old = c->conn;
    bool same = old && c->session == l->greeting.session;
    client_conn_limit(l->conn, l->greeting.limits.in_flight);
    client_conn_ids(l->conn, l->greeting.last_request);
    client_conn_ids(l->conn, same ? client_conn_last_id(old) : 0);
    c->conn = l->conn;
    c->now = l->transport;
    c->limits = l->greeting.limits;
    c->session = l->greeting.session;
    memcpy(c->secret, l->greeting.secret, sizeof(c->secret));
    return old;
}

static attnd_err check_engine(const attnd_connect_opts *o, attnd_errinfo *info) {
    if (o->engine && o->transport == ATTND_TRANSPORT_NNG) {
        return attnd_fail(info, ATTND_EINVAL, "engine",
                          "an engine needs a ring, over an ipc:// URL");
    }
    if (o->region_bytes && !(o->engine && o->engine->service)) {
        return attnd_fail(info, ATTND_EINVAL, "region_bytes",
                          "a region is for service mode, and %s",
                          o->engine ? "this engine attends in process" : "there is no engine");
    }
    return ATTND_OK;
}

static attnd_err check_opts(const char *url, const attnd_connect_opts *o, attnd_errinfo *info) {
    if (!url) {
        return attnd_fail(info, ATTND_EINVAL, "url", "url is NULL");
    }
    if (o->timeout_ms < 0) {
        return attnd_fail(info, ATTND_EINVAL, "timeout_ms", "timeout_ms %d is negative",
                          o->timeout_ms);
    }
    if (o->transport < ATTND_TRANSPORT_AUTO || o->transport > ATTND_TRANSPORT_RING) {
        return attnd_fail(info, ATTND_EINVAL, "transport", "%d is no transport", (int)o->transport);
    }
    return check_engine(o, info);
}

// tell gives the caller the reason of an error, not those of tries that another one made good.
static attnd_err tell(attnd_err err, const attnd_errinfo *why, attnd_errinfo *info) {
    if (err && info) {
        *info = *why;
    }
    return err;
}

// create_client makes a client that is not connected; NULL without memory.
static attnd_client *create_client(const char *url, const attnd_connect_opts *o) {
    attnd_client *c = calloc(1, sizeof(*c));
    if (!c) {
        return NULL;
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->reconnect_lock, NULL);
    c->url = strdup(url);
    c->client_name = strdup(o->client_name ? o->client_name : program_invocation_short_name);
    c->tenant = strdup(o->tenant ? o->tenant : "default");
    c->transport = o->engine ? ATTND_TRANSPORT_RING : o->transport;
    c->engine = o->engine;
    c->engine_threads = o->engine_threads;
    c->region_bytes = o->region_bytes;
    c->timeout_ms = o->timeout_ms ? o->timeout_ms : DEFAULT_TIMEOUT_MS;
    c->ring_bytes = o->ring_bytes;
    c->spin_us = o->spin_us < 0 ? 0 : o->spin_us ? (uint32_t)o->spin_us : DEFAULT_SPIN_US;
    for (uint32_t i = 0; i < CLIENT_MAX_SLOTS; i++) {
        c->asyncs[i].next = c->idle_asyncs;
        c->idle_asyncs = &c->asyncs[i];
    }
    bool has_key = !client_engine_is_here(c) || client_engine_take_key(c->engine_key);
    if (!has_key) {
        c->engine = NULL; // nothing to give back
    }
    if (!has_key || !c->url || !c->client_name || !c->tenant) {
        attnd_close(c);
        return NULL;
    }
    return c;
}

attnd_err attnd_connect(attnd_client **out, const char *url, const attnd_connect_opts *opts,
                        attnd_errinfo *info) {
    attnd_connect_opts o = opts ? *opts : (attnd_connect_opts){0};
    attnd_err err = check_opts(url, &o, info);
    if (err) {
        return err;
    }
    attnd_client *c = create_client(url, &o);
    if (!c) {
        return attnd_fail(info, ATTND_ENOMEM, "", "no memory for a client");
    }
    link_made l = {.until_ms = attnd_clock_ms() + (uint64_t)c->timeout_ms};
    attnd_errinfo why;
    if ((err = make_link(c, o.session, o.secret, &l, &why))) {
        attnd_close(c);
        return tell(err, &why, info);
    }
    adopt(c, &l);
    *out = c;
    return ATTND_OK;
}

// ---- again

static bool is_lost(attnd_client *c) {
    client_conn *conn = client_conn_of(c);
    bool lost = client_conn_is_lost(conn);
    client_conn_rele(conn);
    return lost;
}

// ask finds out whether the connection was lost, which an idle one does not notice.  Any answer
// will do, here that nothing is named that could be cancelled.
static attnd_err ask(attnd_client *c, attnd_errinfo *info) {
    proto_cancel nothing = {.step = 0};
    attnd_errinfo why;
    attnd_err err = client_call_fixed(c, PROTO_CANCEL, &nothing, sizeof(nothing), NULL, 0, &why);
    return err == ATTND_ETIMEDOUT ? attnd_fail(info, err, why.field, "%s", why.text) : ATTND_OK;
}

static void sleep_ms(long ms) {
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

// may_come says whether another try may help: the daemon starts, stops, or has not noticed yet that
// the connection was lost.
static bool may_come(attnd_err err) {
    return err == ATTND_ECONN || err == ATTND_ESHUTDOWN || err == ATTND_EBUSY;
}

// link_again tries until the daemon is there or it is l->until_ms.
static attnd_err link_again(attnd_client *c, uint64_t session, const uint8_t *secret, link_made *l,
                            attnd_errinfo *info) {
    attnd_err err;
    for (long ms = FIRST_RETRY_MS; (err = make_link(c, session, secret, l, info)) &&
                                   may_come(err) && attnd_clock_ms() < l->until_ms;) {
        sleep_ms(ms);
        ms = ms < RETRY_MS / 2 ? 2 * ms : RETRY_MS;
    }
    return err;
}

static attnd_err reconnect(attnd_client *c, attnd_errinfo *info) {
    pthread_mutex_lock(&c->reconnect_lock);
    link_made l = {.until_ms = attnd_clock_ms() + (uint64_t)c->timeout_ms};
    bool fresh = false;
    attnd_err err = is_lost(c) ? ATTND_OK : ask(c, info);
    bool lost = is_lost(c);
    if (lost) {
        client_engine_abandon(c);
        err = link_again(c, c->session, c->secret, &l, info);
        fresh = err == ATTND_ESTALE || (!err && c->session && l.greeting.session != c->session);
        if (err == ATTND_ESTALE) {
            err = link_again(c, 0, c->secret, &l, info);
        }
    }
    if (lost && !err) {
        pthread_mutex_lock(&c->lock);
        client_conn *old = adopt(c, &l);
        pthread_mutex_unlock(&c->lock);
        client_conn_close(old);
        if (!fresh) {
            err = client_models_again(c, info);
        }
        if (fresh || err == ATTND_ESTALE) {
            pthread_mutex_lock(&c->lock);
            client_models_free(c);
            memset(c->unsure, 0, sizeof(c->unsure));
            pthread_mutex_unlock(&c->lock);
        }
    }
    pthread_mutex_unlock(&c->reconnect_lock);
    return err || !fresh
               ? err
               : attnd_fail(info, ATTND_ESTALE, "session",
                            "the daemon has a new session: models, sequences and steps are lost");
}

attnd_err attnd_reconnect(attnd_client *c, attnd_errinfo *info) {
    attnd_errinfo why;
    return tell(reconnect(c, &why), &why, info);
}

void attnd_close(attnd_client *c) {
    if (!c) {
        return;
    }
    if (c->conn) {
        pthread_mutex_lock(&c->lock);
        client_conn *conn = client_conn_hold(c->conn);
        pthread_mutex_unlock(&c->lock);
        client_conn_close(conn); // loses it and drops the reference of two lines above
        client_async_end(c);
        client_conn_rele(c->conn);
    }
    if (client_engine_is_here(c)) {
        client_engine_give_key(c->engine_key); // its engine is closed
    }
    client_models_free(c);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->reconnect_lock);
    free(c->url);
    free(c->client_name);
    free(c->tenant);
    free(c);
}

const attnd_limits *attnd_get_limits(const attnd_client *c) {
    return &c->limits;
}

attnd_transport attnd_get_transport(attnd_client *c) {
    pthread_mutex_lock(&c->lock);
    attnd_transport now = c->now;
    pthread_mutex_unlock(&c->lock);
    return now;
}

uint64_t attnd_get_session(attnd_client *c, uint8_t secret[16]) {
    pthread_mutex_lock(&c->lock);
    uint64_t session = c->session;
    if (secret) {
        memcpy(secret, c->secret, sizeof(c->secret));
    }
    pthread_mutex_unlock(&c->lock);
    return session;
}
