// srv_keeper is the main process of attnd: it starts the daemon proper, the worker, as a child,
// holds the descriptors of its cache, and starts it again when it dies, so that the next worker
// goes on with all that was committed (srv_resume.h).  It maps nothing, runs no CUDA and no NNG,
// and allocates nothing, so there is little that could kill it.
//
//     systemd <--- notify, descriptors --- keeper <--- notify, descriptors --- worker
//             ---- LISTEN_FDS ----------->        ---- LISTEN_FDS ----------->
//
// A worker is started after the one before was reaped, never sooner: two must not share a cache,
// and a process that can be reaped has closed its descriptors, so that its GPU context is gone,
// too.
//
// Both sides speak systemd's protocol, so a keeper that is restarted by systemd gets back what it
// held from systemd's descriptor store; without systemd it lives as long as the service.
//
// A worker goes on with the configuration of the one before, whatever the file says by then: a
// death is nobody's decision to change it, and a file with an error, or with other sizes, would
// cost the cache.  It is not for systemd to store: a keeper that is started reads the file.
//
//     SIGTERM, SIGINT           go to the worker, and the keeper ends with it
//     SIGHUP                    goes to the worker once it is ready.  When that dies before it has
//                               said that it has reloaded, the next one is given it, too, but none
//                               after that
//     worker exits with 0       so does the keeper
//     worker fails its first start    so does the keeper, with its exit status
//     worker finds no device    it is started again until it does, ever later, and with the cache:
//                               nothing is wrong with that (srv_resume_later).  A first start fails
//                               unless there is a cache, from systemd's store
//     worker dies later         it is started again, at once; ever later when it keeps dying, and
//                               with an empty cache when three starts in a row got nowhere: what
//                               kills it may lie there.  After six the keeper fails, too
#ifndef ATTND_SERVER_SRV_KEEPER_H
#define ATTND_SERVER_SRV_KEEPER_H

#include "server/srv_conf.h"

// SRV_KEEPER_CONF names the descriptor of the configuration (srv_conf_put) that a worker is started
// with, and stores when another one came into force.
#define SRV_KEEPER_CONF "config"

// srv_keeper_run runs workers with the command line argv and --no-keeper until one ends for good;
// returns the exit status.
int srv_keeper_run(int argc, char **argv, const srv_conf *conf);

#endif
