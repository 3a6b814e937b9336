// srv_args is the command line of attnd.
#ifndef ATTND_SERVER_SRV_ARGS_H
#define ATTND_SERVER_SRV_ARGS_H

#include "server/srv_conf.h"

enum { SRV_ARGS_MAX_SETS = 64 };

typedef enum srv_args_mode {
    SRV_ARGS_SERVE,
    SRV_ARGS_CHECK_CONFIG,
    SRV_ARGS_DUMP_CONFIG,
    SRV_ARGS_HELP,
    SRV_ARGS_VERSION,
} srv_args_mode;

typedef struct srv_args {
    srv_args_mode mode;
    bool no_keeper;
    const char *config;                  // path, NULL = no file
    char listen[SRV_CONF_TEXT_BYTES];    // all --listen, "" = none
    const char *device;                  // borrowed from argv, NULL = not given
    const char *sets[SRV_ARGS_MAX_SETS]; // "section.key=value", borrowed from argv
    int num_sets;
} srv_args;

// srv_args_parse reads the command line.  ATTND_EINVAL with a line for the user.
attnd_err srv_args_parse(srv_args *args, int argc, char **argv, attnd_errinfo *info);

// srv_args_conf makes the configuration: defaults, then the file, then the flags; checked once each
// value is good.  Called again, it reads the file again.  ATTND_EINVAL, ATTND_EIO, with a line in
// errors (which start as zeros) for each thing that is wrong.
attnd_err srv_args_conf(const srv_args *args, srv_conf *conf, srv_conf_errors *errors);

// srv_args_usage returns the text of --help.
const char *srv_args_usage(void);

#endif
