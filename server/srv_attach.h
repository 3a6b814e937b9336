// srv_attach is the attach socket and its connections: packets of AF_UNIX SOCK_SEQPACKET, the
// peer's user, and the descriptors that are sent.  No descriptor that a peer sends gets into
// the process.  Nothing here blocks.  Loop thread only.
#ifndef ATTND_SERVER_SRV_ATTACH_H
#define ATTND_SERVER_SRV_ATTACH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/srv_path.h"

typedef struct srv_attach {
    int fd;         // listens, non-blocking; -1 = closed
    int reserve_fd; // given up for a moment to turn a peer away when no descriptor is left
    srv_path claim; // lock_fd -1 when the socket was handed over
    char path[108]; // "" when it is not known
} srv_attach;

// srv_attach_listen claims path and listens there, with permissions of mode.  Errors as
// srv_path_claim.  srv_attach_close accepts what was never opened if fd is -1.
attnd_err srv_attach_listen(srv_attach *a, const char *path, uint32_t mode, attnd_errinfo *info);

// srv_attach_adopt takes over a listening socket that somebody else made, who also owns its path.
// ATTND_EINVAL: it is not an AF_UNIX SOCK_SEQPACKET socket that listens; fd is then left alone.
attnd_err srv_attach_adopt(srv_attach *a, int fd, attnd_errinfo *info);

void srv_attach_close(srv_attach *a);

// srv_attach_accept returns the descriptor of the next connection, non-blocking, with the user at
// its other end; -1 when there is none.  The caller owns it.
int srv_attach_accept(srv_attach *a, uint32_t *uid);

// srv_attach_pid returns the process that connected, -1 when it is not known.
int32_t srv_attach_pid(int fd);

typedef enum srv_attach_event {
    SRV_ATTACH_NONE,   // nothing has come
    SRV_ATTACH_PACKET, // *bytes of it, more than size when it was cut
    SRV_ATTACH_RIGHTS, // a packet with descriptors, which are closed already
    SRV_ATTACH_GONE,   // the peer has closed
} srv_attach_event;

// srv_attach_recv takes the next packet of a connection.
srv_attach_event srv_attach_recv(int fd, void *out, size_t size, size_t *bytes);

// srv_attach_send sends a packet, and with it copies of the descriptors pass [num_pass], at most
// SRV_ATTACH_MAX_PASS.  False when it could not be sent at once.
enum { SRV_ATTACH_MAX_PASS = 2 };
bool srv_attach_send(int fd, const void *packet, size_t bytes, const int *pass, size_t num_pass);

#endif
