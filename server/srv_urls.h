// srv_urls is where the daemon listens, as the keys of [server] say it: client URLs, the
// administration socket, the attach socket.  Everything that can be known without touching the
// system is checked here, so that --check-config and a start agree.
#ifndef ATTND_SERVER_SRV_URLS_H
#define ATTND_SERVER_SRV_URLS_H

#include "server/srv_conf.h"

enum { SRV_URLS_MAX = 8, SRV_URL_BYTES = 160 };

typedef struct srv_urls {
    char clients[SRV_URLS_MAX][SRV_URL_BYTES]; // ipc://PATH, tcp://HOST:PORT
    uint32_t num_clients;
    char admin[SRV_URL_BYTES];  // ipc://PATH
    char attach[SRV_URL_BYTES]; // a path; "" = there is none to make
} srv_urls;

// srv_urls_read fills *out and adds a line to errors for each thing that is wrong with it.
// ATTND_EINVAL.
attnd_err srv_urls_read(srv_urls *out, const srv_conf *conf, srv_conf_errors *errors);

#endif
