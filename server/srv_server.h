// srv_server is the daemon: it makes everything in order, runs the loop, drains, and takes
// everything down again.
//
//     SIGTERM, SIGINT, drain   new work is refused, running work answered; then the end.  A second
//                              signal aborts what still runs.  A stop that hangs ends all the
//                              same, with exit status 3 (srv_deadline.h)
//     SIGHUP                   reads the configuration again; what cannot change is logged
//     SIGPIPE                  ignored
#ifndef ATTND_SERVER_SRV_SERVER_H
#define ATTND_SERVER_SRV_SERVER_H

#include "server/srv_args.h"

// srv_server_run serves until it is drained.  On success "attnd ready: ..." was written to standard
// output as one line when clients could connect, and ATTND_OK comes back at the end.  On failure
// *info says what could not be made, or that the device was lost while it served (ATTND_ECUDA); it
// has no text when that is the keeper's to say (srv_resume_later).  args are borrowed, for SIGHUP.
attnd_err srv_server_run(const srv_args *args, const srv_conf *conf, attnd_errinfo *info);

#endif
