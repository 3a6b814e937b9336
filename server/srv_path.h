// srv_path makes a socket path the daemon's own before anything is bound to it: a live socket is
// left alone, a socket left by a dead daemon is removed, anything else is never touched.
// Loop thread only.
#ifndef ATTND_SERVER_SRV_PATH_H
#define ATTND_SERVER_SRV_PATH_H

#include "proto/err.h"

typedef struct srv_path {
    int lock_fd;
    char lock_path[128];
} srv_path;

// srv_path_claim takes the lock file beside path (path.lock) and removes a dead socket.
// ATTND_EEXIST: a daemon is alive there, or path is not a socket.  ATTND_EINVAL: longer than a
// socket's name can be.  ATTND_EIO.  On success srv_path_release gives the path up.
attnd_err srv_path_claim(srv_path *claim, const char *path, attnd_errinfo *info);

// srv_path_release removes the lock file and gives the lock up.  The socket must be gone by then.
void srv_path_release(srv_path *claim);

#endif
