// client_attach asks the attach socket for a ring and maps what comes.  Any thread.
#ifndef ATTND_PROTO_CLIENT_CLIENT_ATTACH_H
#define ATTND_PROTO_CLIENT_CLIENT_ATTACH_H

#include "proto/client/client_conn.h"
#include "proto/proto_region.h"

typedef struct client_attached {
    int fd; // the attach socket
    uint8_t *base;
    proto_ring_layout layout;
    int arena_fd; // with PROTO_ATTACH_ARENA; else -1
    proto_attach_arena arena;
    int region_fd, flags_fd; // with PROTO_ATTACH_REGION; else -1
    proto_region region;
} client_attached;

// client_attach connects to the attach socket at path and sends *ask, and *region with
// PROTO_ATTACH_REGION.  The caller owns what is in *out.  The daemon's errors; *most
// tells of ATTND_EMSGSIZE, with the field ring_bytes or region_bytes, and is zeros otherwise;
// ATTND_ECONN: nobody listens there or the daemon hung up; ATTND_ETIMEDOUT; ATTND_EPROTO: what came
// is not what was asked for, or could change its size; ATTND_EINVAL: a path that is none;
// ATTND_ENOMEM.
attnd_err client_attach(client_attached *out, const char *path, const proto_attach *ask,
                        const proto_region_ask *region, int32_t timeout_ms, client_most *most,
                        attnd_errinfo *info);

// client_attached_close closes the descriptors of arena, region and flags.
void client_attached_close(client_attached *a);

// client_attach_leave tells the daemon that nothing is kept of what it gave, or may still give.
void client_attach_leave(int fd);

#endif
