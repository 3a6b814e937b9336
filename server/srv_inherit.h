// srv_inherit finds the descriptors that the process was started with by systemd's protocol for
// socket activation (LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES).  Loop thread only.
#ifndef ATTND_SERVER_SRV_INHERIT_H
#define ATTND_SERVER_SRV_INHERIT_H

#include <stddef.h>

// srv_inherit_fd returns the descriptor that was handed over under a name, the first one when there
// are several; -1 for none.  The caller owns it.
int srv_inherit_fd(const char *name);

// srv_inherit_at returns the i-th descriptor and its name, cut to bytes; -1 behind the last.
int srv_inherit_at(int i, char *name, size_t bytes);

#endif
