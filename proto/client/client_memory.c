// Memory of the region, for the caller's own tensors.  It holds its connection, so that the region
// stays mapped as long as the caller may look at it.
#include <stdlib.h>

#include "proto/client/client_service.h"

typedef struct memory {
    attnd_memory pub; // first
    client_conn *conn;
    client_place *place;
} memory;

attnd_err attnd_memory_create(attnd_client *c, attnd_memory **out, uint64_t bytes,
                              attnd_errinfo *info) {
    client_conn *conn = client_conn_of(c);
    memory *m = calloc(1, sizeof(*m));
    attnd_err err = !conn->service ? attnd_fail(info, ATTND_ENOTSUP, "engine", "there is no region")
                    : m ? client_service_take(conn->service, bytes, &m->place, &m->pub.data, info)
                        : attnd_fail(info, ATTND_ENOMEM, "", "no memory for memory");
    if (err) {
        client_conn_rele(conn);
        free(m);
        return err;
    }
    m->conn = conn;
    m->pub.bytes = bytes;
    *out = &m->pub;
    return ATTND_OK;
}

void attnd_memory_free(attnd_memory *pub) {
    if (pub) {
        memory *m = (memory *)(void *)pub;
        client_service_give(m->conn->service, m->place);
        client_conn_rele(m->conn);
        free(m);
    }
}
