// attnd: command line, configuration, and then the keeper, or in its child the server.
#include <stdio.h>
#include <unistd.h>

#include "server/srv_args.h"
#include "server/srv_inherit.h"
#include "server/srv_keeper.h"
#include "server/srv_log.h"
#include "server/srv_server.h"

enum { EXIT_USAGE = 2 };

static int fail(const attnd_errinfo *info, const char *hint, int status) {
    if (info->text[0]) {
        fprintf(stderr, "attnd: %s%s\n", info->text, hint);
    }
    return status;
}

static int fail_all(const srv_conf_errors *errors) {
    for (uint32_t i = 0; i < errors->num && i < SRV_CONF_MAX_ERRORS; i++) {
        fprintf(stderr, "attnd: %s\n", errors->text[i]);
    }
    if (errors->num > SRV_CONF_MAX_ERRORS) {
        fprintf(stderr, "attnd: and %u more\n", errors->num - SRV_CONF_MAX_ERRORS);
    }
    return EXIT_USAGE;
}

// read_conf takes what the keeper hands over, else reads flags and file.
static attnd_err read_conf(const srv_args *args, srv_conf *conf, srv_conf_errors *errors) {
    int fd = args->no_keeper ? srv_inherit_fd(SRV_KEEPER_CONF) : -1;
    if (fd < 0) {
        return srv_args_conf(args, conf, errors);
    }
    attnd_err err = srv_conf_take(conf, fd, errors);
    close(fd);
    return err;
}

int main(int argc, char **argv) {
    static srv_args args;
    static srv_conf conf;
    static srv_conf_errors errors;
    attnd_errinfo info = {.code = ATTND_OK};
    if (srv_args_parse(&args, argc, argv, &info)) {
        return fail(&info, " (attnd --help lists the flags)", EXIT_USAGE);
    }
    if (args.mode == SRV_ARGS_HELP || args.mode == SRV_ARGS_VERSION) {
        fputs(args.mode == SRV_ARGS_HELP ? srv_args_usage() : "attnd " ATTND_VERSION "\n", stdout);
        return 0;
    }
    if (read_conf(&args, &conf, &errors)) {
        return fail_all(&errors);
    }
    if (args.mode == SRV_ARGS_DUMP_CONFIG) {
        srv_conf_dump(&conf, stdout);
        return 0;
    }
    if (args.mode == SRV_ARGS_CHECK_CONFIG) {
        printf("attnd: %s\n", args.config ? "the configuration is good"
                                          : "the flags are good; no --config, so no file was read");
        return 0;
    }
    srv_log_init();
    if (!args.no_keeper) {
        return srv_keeper_run(argc, argv, &conf);
    }
    return srv_server_run(&args, &conf, &info) ? fail(&info, "", 1) : 0;
}
