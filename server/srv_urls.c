// The names of sockets.  The administration and attach sockets lie beside the first ipc:// socket
// unless the configuration names them, so the lengths of all three follow from it.
#include "server/srv_urls.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

enum { PATH_BYTES = sizeof(((struct sockaddr_un *)0)->sun_path) }; // NUL included

static bool is_ipc(const char *url) {
    return strncmp(url, "ipc://", 6) == 0;
}

// check_path: what is the key, or what made the path.
static void check_path(const char *what, const char *path, srv_conf_errors *errors) {
    if (!path[0]) {
        srv_conf_error(errors, "%s: a path is missing behind ipc://", what);
    } else if (strlen(path) >= PATH_BYTES) {
        srv_conf_error(errors, "%s: %s: a socket's path has at most %d bytes, this one has %zu",
                       what, path, (int)PATH_BYTES - 1, strlen(path));
    }
}

// check_tcp wants HOST:PORT, the host in brackets when it holds colons.
static void check_tcp(const char *url, srv_conf_errors *errors) {
    const char *host = url + strlen("tcp://");
    const char *colon = strrchr(host, ':');
    char *end = NULL;
    unsigned long port =
        colon && isdigit((unsigned char)colon[1]) ? strtoul(colon + 1, &end, 10) : 0;
    bool brackets = host[0] == '[' && colon && colon[-1] == ']';
    if (port < 1 || port > 65535 || *end ||
        (memchr(host, ':', (size_t)(colon - host)) && !brackets)) {
        srv_conf_error(errors, "server.listen: %s: tcp:// is followed by HOST:PORT", url);
    }
}

static void add_client(srv_urls *out, const char *url, srv_conf_errors *errors) {
    if (out->num_clients == SRV_URLS_MAX) {
        srv_conf_error(errors, "server.listen: %s: more than %d URLs", url, SRV_URLS_MAX);
        return;
    }
    for (uint32_t i = 0; i < out->num_clients; i++) {
        if (strcmp(out->clients[i], url) == 0) {
            srv_conf_error(errors, "server.listen: %s is there twice", url);
            return;
        }
    }
    if (is_ipc(url)) {
        check_path("server.listen", url + 6, errors);
    } else if (strncmp(url, "tcp://", 6) == 0) {
        check_tcp(url, errors);
    } else {
        srv_conf_error(errors, "server.listen: %s: neither ipc://PATH nor tcp://HOST:PORT", url);
    }
    snprintf(out->clients[out->num_clients++], SRV_URL_BYTES, "%s", url);
}

static const char *first_ipc(const srv_urls *urls) {
    for (uint32_t i = 0; i < urls->num_clients; i++) {
        if (is_ipc(urls->clients[i])) {
            return urls->clients[i];
        }
    }
    return NULL;
}

static void name_admin(srv_urls *out, const srv_conf *conf, srv_conf_errors *errors) {
    const char *ipc = first_ipc(out);
    if (!conf->admin[0] && !ipc) {
        srv_conf_error(errors, "server.admin must be set: server.listen has no ipc:// URL to name "
                               "the administration socket after");
        return;
    }
    char url[SRV_CONF_TEXT_BYTES + 8];
    snprintf(url, sizeof(url), "%s%s", conf->admin[0] ? conf->admin : ipc,
             conf->admin[0] ? "" : ".admin");
    if (is_ipc(url)) {
        check_path(conf->admin[0] ? "server.admin" : "server.listen with .admin appended", url + 6,
                   errors);
    } else {
        srv_conf_error(errors, "server.admin: %s: the administration socket is ipc:// only", url);
    }
    snprintf(out->admin, sizeof(out->admin), "%.*s", SRV_URL_BYTES - 1, url);
}

static void name_attach(srv_urls *out, const srv_conf *conf, srv_conf_errors *errors) {
    const char *ipc = first_ipc(out);
    bool named = conf->attach_socket[0] != '\0';
    if (named ? strcmp(conf->attach_socket, "none") == 0 : !ipc) {
        return;
    }
    char path[SRV_CONF_TEXT_BYTES + 8];
    snprintf(path, sizeof(path), "%s%s", named ? conf->attach_socket : ipc + 6,
             named ? "" : ".attach");
    check_path(named ? "server.attach_socket" : "server.listen with .attach appended", path,
               errors);
    snprintf(out->attach, sizeof(out->attach), "%.*s", SRV_URL_BYTES - 1, path);
}

static void check_different(const srv_urls *urls, srv_conf_errors *errors) {
    const char *admin = urls->admin[0] ? urls->admin + 6 : "";
    if (urls->attach[0] && strcmp(urls->attach, admin) == 0) {
        srv_conf_error(errors, "server.attach_socket and server.admin are the same: %s", admin);
    }
    for (uint32_t i = 0; i < urls->num_clients; i++) {
        const char *url = urls->clients[i];
        if (strcmp(url, urls->admin) == 0) {
            srv_conf_error(errors, "server.listen and server.admin are the same: %s", url);
        }
        if (is_ipc(url) && strcmp(url + 6, urls->attach) == 0) {
            srv_conf_error(errors, "server.listen and server.attach_socket are the same: %s", url);
        }
    }
}

attnd_err srv_urls_read(srv_urls *out, const srv_conf *conf, srv_conf_errors *errors) {
    char list[SRV_CONF_TEXT_BYTES];
    char *save = NULL;
    uint32_t before = errors->num;
    memset(out, 0, sizeof(*out));
    strcpy(list, conf->listen);
    for (char *url = strtok_r(list, " ", &save); url; url = strtok_r(NULL, " ", &save)) {
        add_client(out, url, errors);
    }
    if (out->num_clients == 0) {
        srv_conf_error(errors, "server.listen is empty");
    } else {
        if (conf->admin[0] || first_ipc(out) || errors->num == before) { // else told already
            name_admin(out, conf, errors);
        }
        name_attach(out, conf, errors);
        check_different(out, errors);
    }
    return errors->num == before ? ATTND_OK : ATTND_EINVAL;
}
