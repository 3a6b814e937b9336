// srv_reload takes a configuration that was read again over the one that is in force.  Loop thread.
#ifndef ATTND_SERVER_SRV_RELOAD_H
#define ATTND_SERVER_SRV_RELOAD_H

#include "server/srv_conf.h"

// srv_reload_take makes conf what next says, as far as that can change while the daemon runs, and
// logs every difference: what has changed, and what waits for the next start.  Tenants are added,
// never removed.  Whoever works by values of conf is told by the caller.  next is not kept.
void srv_reload_take(srv_conf *conf, srv_conf *next);

#endif
